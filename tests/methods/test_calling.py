"""What all one-shot calls share: layouts, errors that name the function called, and numbers of numpy."""

import dataclasses
import functools
import subprocess
import sys
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch._dynamo.variables.user_defined import FrozenDataClassVariable

import kvops
from kvops.methods import functions
from kvops.methods.registry import table_name

B, HEADS, N, D = 2, 2, 64, 16


@pytest.fixture
def kv():
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(B, HEADS, N, D, generator=generator) for _ in range(2))


@pytest.fixture
def q():
    return torch.randn(B, 2 * HEADS, 8, D, generator=torch.Generator().manual_seed(1))


STATISTICS = kvops.QueryStatistics.of(torch.randn(1, 2 * HEADS, 50, D), kvops.Rope.of(D))
#: Settings by the function's name: of a function that is not here, a budget of 24.
SETTINGS = {
    "lagkv": dict(L=8, r=0.5),
    "lacache": dict(budget=48, layer=1, num_layers=8),
    "pyramidkv": dict(budget=24, layer=1, num_layers=4),
    "kvzip": dict(budget=24, k_repeat=torch.ones(B, HEADS, 8, D)),
    "kvzap": dict(budget=24, recent=4, gates=kvops.Gates([[torch.ones(HEADS, D), torch.ones(HEADS)]])),
    "criticalkv": dict(budget=24, w_o=torch.ones(8, 2 * HEADS * D)),
    "defensivekv": dict(budget=24, w_o=torch.ones(8, 2 * HEADS * D)),
    "satkv": dict(budget=40),
    "expectedattention": dict(budget=24, statistics=STATISTICS),
    "triattention": dict(budget=24, statistics=STATISTICS, recent=4),
}
CALLS = {  # name: (whether it takes queries, settings)
    name.removesuffix("_compress"): (
        issubclass(cls, kvops.QueryPolicy),
        SETTINGS.get(name.removesuffix("_compress"), dict(budget=24)),
    )
    for name, cls in functions.POLICIES.items()
}


def call_of(name, q):
    """Return the positional arguments after K and V, and the settings."""
    needs_queries, options = CALLS[name]
    if name == "kvzap":
        return (q[:, 0].repeat(1, N // 8, 1),), options
    return ((q[:, :, -1:] if name == "tova" else q,) if needs_queries else ()), options


def test_every_method_is_called():
    assert sorted(f"{name}_compress{end}" for name in CALLS for end in ("", "_")) == sorted(
        x for x in kvops.__all__ if x.rstrip("_").endswith("_compress")
    )


@pytest.mark.parametrize("name", CALLS)
def test_bnhd_is_bhnd_transposed(name, kv, q):
    queries, options = call_of(name, q)
    want = getattr(kvops, name + "_compress")(*kv, *queries, **options)
    k, v, *rest = (x.transpose(1, 2).contiguous() if x.dim() == 4 else x for x in (*kv, *queries))
    options = {
        key: x.transpose(1, 2) if isinstance(x, torch.Tensor) and x.dim() == 4 else x for key, x in options.items()
    }
    got = getattr(kvops, name + "_compress")(k, v, *rest, **options, layout="bnhd")
    assert got.k.shape == (B, want.k.shape[2], HEADS, D)
    assert torch.equal(got.indices, want.indices) and torch.equal(got.lengths, want.lengths)
    for x, y in zip(got[:2], want[:2]):
        assert torch.equal(x.transpose(1, 2), y)

    out = torch.empty_like(got.k), torch.empty_like(got.v)
    given = getattr(kvops, name + "_compress")(k, v, *rest, **options, layout="bnhd", out=out)
    assert torch.equal(out[0], got.k) and torch.equal(out[1], got.v)
    assert given.k.data_ptr() == out[0].data_ptr()

    moved = getattr(kvops, name + "_compress_")(k, v, *rest, **options, layout="bnhd")
    assert moved.k.data_ptr() == k.data_ptr() and torch.equal(moved.k, got.k) and torch.equal(moved.v, got.v)


def test_bnhd_of_policies_and_pages(kv, q):
    k, v = (x.transpose(1, 2) for x in kv)
    assert kvops.KeyDiff(24).compress(k, v, layout="bnhd").k.shape == (B, 24, HEADS, D)
    snapkv = kvops.SnapKV(24, 8)
    want = snapkv.compress(*kv, q).indices
    assert torch.equal(snapkv.compress(k, v, q_window=q.transpose(1, 2), layout="bnhd").indices, want)
    pages = [torch.randn(8, 16, HEADS, D) for _ in range(2)]
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    options = dict(block_table=table, lengths=torch.tensor([60, 50], dtype=torch.int32))
    got = kvops.KeyDiff(24).compress(*pages, **options, layout="bnhd")
    want = kvops.KeyDiff(24).compress(*(x.transpose(1, 2) for x in pages), **options)
    assert torch.equal(got.indices, want.indices) and torch.equal(got.k.transpose(1, 2), want.k)


@pytest.mark.parametrize(
    "call",
    [kvops.keydiff_compress, kvops.keydiff_compress_, kvops.KeyDiff(0.5).compress, kvops.KeyDiff(0.5).compress_],
)
def test_more_heads_than_tokens_are_warned_of(call, kv):
    k, v = (x.transpose(1, 2) for x in kv)
    args = () if hasattr(call, "__self__") else (0.5,)
    name = "KeyDiff" if hasattr(call, "__self__") else call.__name__
    with pytest.warns(UserWarning, match=rf"^{name}: .* KV heads \(64\) than tokens \(2\); .* pass layout='bnhd'") as w:
        call(k, v, *args)
    assert len(w) == 1 and w[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(k.clone(), v.clone(), *args, layout="bhnd")
        call(k.clone(), v.clone(), *args, layout="bnhd")
        call(*(x.clone() for x in kv), *args)
        cache = kvops.Cache(kvops.KeyDiff(8))  # the first token of a stream
        cache.append(k[:1, :8, :1], v[:1, :8, :1])
        call(k[:, :, :0], v[:, :, :0], *args)
    with pytest.raises(ValueError, match=rf"^{name}: layout must be one of 'bhnd', 'bnhd', got 'nhd'"):
        call(k, v, *args, layout="nhd")


def test_warnings_of_calls_with_queries_name_the_caller(kv):
    k, v = (x.transpose(1, 2) for x in kv)
    q = k
    for call in (
        lambda: kvops.H2O(0.5).compress(k, v, q[:, :, :1]),
        lambda: kvops.TOVA(0.5).compress_(k.clone(), v.clone(), q[:, :, :1]),
        lambda: kvops.snapkv_compress(k, v, q[:, :, :1], 2),
        lambda: kvops.snapkv_compress_(k.clone(), v.clone(), q[:, :, :1], 2),
    ):
        with pytest.warns(UserWarning, match="more KV heads") as w:
            call()
        assert len(w) == 1 and w[0].filename == __file__


def test_layout_in_a_compiled_call(kv):
    k, v = (x.transpose(1, 2).contiguous() for x in kv)
    compiled = torch.compile(
        lambda k, v: kvops.keydiff_compress(k, v, 24, layout="bnhd"), fullgraph=True, backend="eager"
    )
    want = kvops.keydiff_compress(k, v, 24, layout="bnhd")
    assert all(torch.equal(x, y) for x, y in zip(compiled(k, v), want))


@pytest.mark.parametrize("name", CALLS)
def test_compiles_without_graph_breaks(name, kv, q, monkeypatch):
    """The Dynamo of torch 2.11 cannot list the attributes of a frozen dataclass that the compiled function creates."""
    found = FrozenDataClassVariable.var_getattr

    def var_getattr(self, tx, attribute):
        assert attribute != "__dict__"
        return found(self, tx, attribute)

    monkeypatch.setattr(FrozenDataClassVariable, "var_getattr", var_getattr)
    torch.compiler.reset()
    queries, options = call_of(name, q)
    call = functools.partial(getattr(kvops, name + "_compress"), **options)
    compiled = torch.compile(lambda *x: call(*x), fullgraph=True, backend="eager")
    want = call(*kv, *queries)
    assert all(torch.equal(x, y) for x, y in zip(compiled(*kv, *queries), want))
    in_place = functools.partial(getattr(kvops, name + "_compress_"), **options)
    compiled, (k, v) = torch.compile(lambda *x: in_place(*x), fullgraph=True, backend="eager"), map(torch.clone, kv)
    got = compiled(k, v, *queries)
    assert all(torch.equal(x, y) for x, y in zip(got, want)) and got.k.data_ptr() == k.data_ptr()


@pytest.mark.parametrize("name", CALLS)
def test_settings_are_passed_in_the_order_of_all_fields_or_by_name(name, kv, q, monkeypatch):
    """The Dynamo of torch 2.11 matches positional arguments with all fields of a frozen dataclass, keyword-only ones
    included."""

    def checked(init):
        def __init__(policy, *args, **settings):
            every = dataclasses.fields(policy)
            assert not any(x.kw_only for x in every[: len(args)])
            created.append(policy)
            init(policy, *args, **settings)

        return __init__

    functions._remembered.cache_clear()
    created, policies = [], [kvops.Policy]
    for policy in policies:
        policies += policy.__subclasses__()
        if "__init__" in vars(policy):
            monkeypatch.setattr(policy, "__init__", checked(policy.__init__))
    queries, options = call_of(name, q)
    getattr(kvops, name + "_compress")(*kv, *queries, **options)
    assert created


# Errors


def test_errors_name_the_function_that_was_called(kv, q):
    k, v = kv
    ints = torch.zeros(B, HEADS, N, D, dtype=torch.int32)
    for call, name in (
        (lambda k, v: kvops.keydiff_compress(k, v, 8), "keydiff_compress"),
        (lambda k, v: kvops.keydiff_compress_(k, v, 8), "keydiff_compress_"),
        (lambda k, v: kvops.lagkv_compress(k, v, 8), "lagkv_compress"),
        (lambda k, v: kvops.satkv_compress(k, v, 40), "satkv_compress"),
        (kvops.KeyDiff(8).compress, "KeyDiff"),
        (kvops.KeyDiff(8).compress_, "KeyDiff"),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: k must be .*, got "):
            call(ints, v)
        with pytest.raises(ValueError, match=rf"^{name}: k must be \[b, Hk, n, d\], got"):
            call(k[0], v)
        with pytest.raises(TypeError, match=rf"^{name}: k must be a torch.Tensor, got list"):
            call([k], v)
    with pytest.raises(ValueError, match="^snapkv_compress: q_window must .*, got"):
        kvops.snapkv_compress(k, v, q.double(), 24)
    with pytest.raises(ValueError, match="^H2O: q must .*, got"):
        kvops.H2O(24).compress(k, v, q.double())
    with pytest.raises(
        ValueError, match="^tova_compress: q_last must be queries of the prompt|^tova_compress: q_last must"
    ):
        kvops.tova_compress(k, v, q.double()[:, :, :1], 24)
    with pytest.raises(ValueError, match="^keydiff_compress, row 1: budget must hold sinks"):
        lengths = torch.tensor([40, 8], dtype=torch.int32)
        kvops.keydiff_compress(k, v, 0.25, sinks=3, lengths=lengths)


class Broken(kvops.KeyPolicy):
    def scores(self, view):
        raise ValueError(self.message)


@pytest.mark.parametrize("message", ["anything: at all", "no prefix", "", "Broken: own"])
def test_errors_of_other_code_are_left_alone(message, kv):
    Broken.message = message
    with pytest.raises(ValueError) as error:
        Broken(8).compress(*kv)
    assert str(error.value) == message


# Numbers


def test_numbers_of_numpy_are_numbers(kv):
    k, v = kv
    for make in (np.int64, np.int32, np.uint8):
        policy = kvops.KeyDiff(make(24), sinks=make(2), recent=make(4), refresh=make(64))
        assert policy == kvops.KeyDiff(24, sinks=2, recent=4, refresh=64)
        assert {type(x) for x in (policy.budget, policy.sinks, policy.recent, policy.refresh)} == {int}
        assert repr(policy) == repr(kvops.KeyDiff(24, sinks=2, recent=4, refresh=64))
    for make in (np.float16, np.float32, np.float64, Fraction):
        policy = kvops.KeyDiff(make(0.25), recent=make(0.5), buffer=make(0.125))
        assert policy == kvops.KeyDiff(0.25, recent=0.5, buffer=0.125)
    want = kvops.lagkv_compress(k, v, 8, 0.5).indices
    assert torch.equal(kvops.lagkv_compress(k, v, np.int64(8), np.float32(0.5)).indices, want)
    want = kvops.l2_compress(k, v, 24, layer=3, num_layers=16).indices
    got = kvops.l2_compress(k, v, np.int64(24), layer=np.int64(3), num_layers=np.int64(16)).indices
    assert torch.equal(got, want)
    cache = kvops.Cache(kvops.StreamingLLM(np.int64(24)))
    cache.append(k, v)
    assert len(cache) == 24


def test_numbers_of_numpy_in_functions(kv):
    k, v = kv
    n, eight = np.int64(64), np.int64(8)
    scores = torch.rand(1, 2, 64)
    plan = kvops.lacache_plan(n, num_layers=eight, budget=np.int64(48), span=np.int64(2), overlap=np.int64(1))
    assert plan == kvops.lacache_plan(64, num_layers=8, budget=48, span=2, overlap=1)
    assert kvops.pyramidkv_budgets(np.int64(32), eight, n, eight) == kvops.pyramidkv_budgets(32, 8, 64, 8)
    assert torch.equal(kvops.head_budgets(scores, eight), kvops.head_budgets(scores, 8))
    assert torch.equal(kvops.head_budgets(scores, np.float32(0.25)), kvops.head_budgets(scores, 0.25))
    assert torch.equal(kvops.entropy_budgets([scores], eight, np.int64(2)), kvops.entropy_budgets([scores], 8, 2))
    assert torch.equal(kvops.lsh_projection(np.int64(16), np.int64(2))[0], kvops.lsh_projection(16, 2)[0])
    options = dict(num_layers=8, budget=48)
    assert torch.equal(
        kvops.lacache_coverage(n, **options, chunk=eight), kvops.lacache_coverage(64, **options, chunk=8)
    )
    moved = kvops.ops.ladder_gather(k, v, plan=plan, layer=np.int64(1))
    assert torch.equal(moved[0], kvops.ops.ladder_gather(k, v, plan=plan, layer=1)[0])
    assert torch.equal(kvops.ops.lag_score(k, v, lag=eight), kvops.ops.lag_score(k, v, lag=8))
    kept = kvops.ops.select_topk(scores, k=eight, sinks=np.int32(2))
    assert torch.equal(kept, kvops.ops.select_topk(scores, k=8, sinks=2))
    assert torch.equal(kvops.attention(k, k, v, scale=np.float32(0.25)).out, kvops.attention(k, k, v, scale=0.25).out)


@pytest.mark.parametrize("wrong", [True, np.bool_(True), "8", 8.5, np.array([8]), None])
def test_other_things_are_no_ints(wrong):
    with pytest.raises(TypeError, match="^KeyDiff: sinks must be an int, got"):
        kvops.KeyDiff(24, sinks=wrong)
    if not isinstance(wrong, float):
        with pytest.raises(TypeError, match="^KeyDiff: budget must be an int"):
            kvops.KeyDiff(wrong)


# Names


@pytest.mark.parametrize(
    "name, key",
    [("KeyDiff", "keydiff"), ("KEYDIFF", "keydiff"), ("LAQ++", "laq++"), ("LagKV L2", "lagkv-l2"), ("x", None)]
    + [(entry.label, key) for key, entry in kvops.METHODS.items()],
)
def test_method_names_in_any_case(name, key):
    assert table_name(name) == key


def test_policies_by_names_in_any_case():
    assert kvops.policy("SnapKV", budget=64) == kvops.policy("snapkv:budget=64") == kvops.SnapKV(64)
    assert kvops.policy("LAQ++:budget=64") == kvops.LAQ(64, window=8)
    with pytest.raises(ValueError, match="method must be one of .* got 'KeyDif'; did you mean 'keydiff'"):
        kvops.policy("KeyDif", budget=64)


def test_dir_holds_the_public_names():
    code = """
import sys
import kvops
names = dir(kvops)
assert names == sorted(names) and set(kvops.__all__) <= set(names), names
assert set(names) - set(kvops.__all__) == {"methods"}, set(names) - set(kvops.__all__)
assert all(getattr(kvops, name) is not None for name in names)
assert not {"transformers", "matplotlib", "vllm"} & set(sys.modules)
import kvops.analysis
assert "analysis" in dir(kvops)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
