"""H2O, TOVA and L2 in one call, compared with small fp64 versions; guarantees of all methods with queries."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from test_methods import assert_best, assert_moved, fp64, with_tensors
from test_window_methods import causal, heads_of, logit_options, make, weights

pytestmark = kit.every_device
examples = kit.examples(40, derandomize=True)


def assert_kept(indices, scores, recent, budget, tolerance=1e-5):
    """Check one head's `indices`: the newest `recent` of all slots, and the best of the others."""
    kept, n = indices.cpu().numpy(), len(scores)
    assert len(kept) == min(budget, n) and np.isin(np.arange(n - min(recent, n), n), kept).all()
    if budget < n:
        assert_best(kept[kept < n - recent], scores[: n - recent], budget - recent, tolerance)


@examples
@given(
    n=st.integers(0, 50).map(lambda x: 60 - x),
    t=st.integers(1, 60),
    budget=st.integers(1, 70),
    recent=st.sampled_from([0.5, 0, 1, 0.25]),
    group_reduce=st.sampled_from(["mean", "max", "sum"]),
    dtype=st.sampled_from(kit.DTYPES),
    with_lse=st.booleans(),
    shared=st.booleans(),
    logit=st.fixed_dictionaries({x: logit_options[x] for x in ("scale", "softcap")}),
    seed=st.integers(0, 99),
)
def test_h2o_is_its_formula(n, t, budget, recent, group_reduce, dtype, with_lse, shared, logit, seed):
    t = min(t, n)
    q, k, v = make(seed, n=n, w=t, dtype=dtype)
    options = dict(logit, lse=kvops.attention(q, k, v, **logit).lse if with_lse else None)
    head_mode = "shared" if shared else "per_head"
    result = kvops.h2o_compress(
        k, v, q, budget, recent=recent, group_reduce=group_reduce, head_mode=head_mode, **options
    )
    assert_moved(result, k, v)
    newest = int(recent * budget) if isinstance(recent, float) else recent
    group = {"mean": np.mean, "sum": np.sum, "max": np.max}[group_reduce]
    for b in range(2):
        scores = [group(weights(qs, ks, causal(n, t), **logit).sum(1), 0) for qs, ks in heads_of(q, k, b)]
        scores = [np.mean(scores, 0)] * 2 if shared else scores
        for h in range(2):
            tolerance = 2e-5 if not with_lse or dtype == torch.float32 else 0.1  # torch returns a half-precision lse
            assert_kept(
                result.indices[b, h], scores[h], newest, budget, tolerance * (3 if group_reduce == "sum" else 1)
            )


def test_h2o_of_a_long_prompt():
    """More rows than one operator call takes."""
    n = kit.size(600, 300)
    q, k, v = make(b=1, n=n, w=n)
    for lse in (None, kvops.attention(q, k, v).lse):
        result = kvops.h2o_compress(k, v, q, 100, lse=lse)
        for h, (qs, ks) in enumerate(heads_of(q, k, 0)):
            assert_kept(result.indices[0, h], weights(qs, ks, causal(n, n)).sum(1).mean(0), 50, 100, 1e-4)


@examples
@given(
    n=st.integers(1, 60),
    budget=st.integers(1, 70),
    dtype=st.sampled_from(kit.DTYPES),
    logit=st.fixed_dictionaries({x: logit_options[x] for x in ("scale", "softcap")}),
    sink=st.booleans(),
    seed=st.integers(0, 99),
)
def test_tova_is_its_formula(n, budget, dtype, logit, sink, seed):
    q, k, v = make(seed, n=n, w=1, dtype=dtype)
    sinks = kit.randn(6, seed=seed) if sink else None
    result = kvops.tova_compress(k, v, q, budget, sink_logits=sinks, **logit)
    assert_moved(result, k, v)
    for b in range(2):
        rows = []
        for h, (qs, ks) in enumerate(heads_of(q, k, b)):
            one = fp64(sinks[3 * h : 3 * h + 3]) if sink else None
            rows.append(weights(qs, ks, [n], sink=one, **logit)[:, 0])
        assert torch.equal(result.indices[b, 0], result.indices[b, 1])
        assert_kept(result.indices[b, 0], np.concatenate(rows).mean(0), 1, budget)


@examples
@given(
    n=st.integers(1, 60),
    budget=st.integers(1, 70),
    sinks=st.integers(0, 1),
    recent=st.sampled_from([0, 0.25]),
    dtype=st.sampled_from(kit.DTYPES),
    layout=st.sampled_from(kit.LAYOUTS),
    shared=st.booleans(),
    seed=st.integers(0, 99),
)
def test_l2_is_its_formula(n, budget, sinks, recent, dtype, layout, shared, seed):
    k, v = kit.kv(2, 2, n, 16, dtype, layout, dv=8, seed=seed)
    head_mode = "shared" if shared else "per_head"
    result = kvops.l2_compress(k, v, budget, sinks=sinks, recent=recent, head_mode=head_mode)
    assert_moved(result, k, v)
    norms = -np.linalg.norm(fp64(k), axis=-1)
    norms = norms.mean(1, keepdims=True).repeat(2, 1) if shared else norms
    newest = int(recent * budget)
    for b in range(2):
        for h in range(2):
            scores = norms[b, h].copy()
            if budget < n:
                scores[:sinks] = np.inf
            assert_kept(result.indices[b, h], scores, newest, budget)


def test_l2_leaves_the_first_layers_of_deep_models():
    k, v = kit.kv(2, 2, 40, 16, dv=8)
    compressed = kvops.l2_compress(k, v, 9).indices
    for layer, layers, skip, whole in [
        (0, 9, (0, 1), True),
        (1, 32, (0, 1), True),
        (2, 32, (0, 1), False),
        (0, 8, (0, 1), False),
        (0, None, (0, 1), False),
        (0, 32, (), False),
        (5, 32, (5,), True),
    ]:
        result = kvops.l2_compress(k, v, 9, layer=layer, num_layers=layers, skip_layers=skip)
        assert torch.equal(result.k, k) if whole else torch.equal(result.indices, compressed)


def test_l2_keys_that_are_not_finite_go_first():
    k, v = kit.kv(1, 1, 20, 16, dv=8)
    k[0, 0, 3, 1], k[0, 0, 9, 2], k[0, 0, 5] = torch.nan, -torch.inf, 0
    kept = kvops.l2_compress(k, v, 18).indices[0, 0].tolist()
    assert kept == [x for x in range(20) if x not in (3, 9)]
    assert 5 in kvops.l2_compress(k, v, 1).indices[0, 0].tolist()


# All methods that take queries (and L2): rows of a padded batch, in place, out=, compile, wrong arguments

CALLS = {
    "snapkv_compress": dict(w=3),
    "pyramidkv_compress": dict(w=3, layer=0, num_layers=3),
    "chunkkv_compress": dict(w=3, chunk=4),
    "laq_compress": dict(w=3),
    "h2o_compress": dict(w=40),
    "tova_compress": dict(w=1),
    "l2_compress": dict(w=0),
}
every_call = pytest.mark.parametrize("name", CALLS)


def prepared(name, seed=0, b=2, n=40):
    """Return (the call without its last options, k, v, the tensors before the budget)."""
    options = dict(CALLS[name])
    w = options.pop("w")
    q, k, v = make(seed, b=b, n=n, w=min(w, n) or 1)
    queries = (q,) if w else ()
    return k, v, queries, options


@pytest.mark.parametrize("name", ["h2o_compress", "tova_compress", "l2_compress"])
@examples
@given(
    starts=st.lists(st.integers(0, 12), min_size=3, max_size=3),
    lengths=st.lists(st.integers(0, 27).map(lambda x: 28 - x), min_size=3, max_size=3),
    budget=st.sampled_from([8, 0.5]),
    seed=st.integers(0, 99),
)
def test_padded_rows_are_as_alone(name, starts, lengths, budget, seed):
    k, v, queries, options = prepared(name, seed, b=3)
    for row, (start, length) in enumerate(zip(starts, lengths)):
        for x in (k, v, *(queries if name == "h2o_compress" else ())):
            x[row, :, :start], x[row, :, start + length :] = torch.nan, torch.nan
    call = getattr(kvops, name)
    spans = dict(starts=kit.int32(*starts), lengths=kit.int32(*lengths))
    result = call(k, v, *queries, budget, **spans)
    assert_moved(result, k.nan_to_num(), v.nan_to_num())
    for row, (start, length) in enumerate(zip(starts, lengths)):
        span = slice(start, start + length)
        alone = [x[row : row + 1, :, span] for x in (k, v)]
        alone += [x[row : row + 1, :, span] if name == "h2o_compress" else x[row : row + 1] for x in queries]
        want = call(*alone, budget).indices + start
        m = want.shape[2]
        assert result.lengths[row] == m and torch.equal(result.indices[row, :, :m], want[0])
        assert (result.indices[row, :, m:] == -1).all()


@pytest.mark.parametrize("spans", [{}, dict(starts=(0, 7)), dict(lengths=(35, 33), fill_invalid=True)], ids=str)
@every_call
def test_in_place_and_out_are_the_same(name, spans):
    k, v, queries, options = prepared(name)
    options.update(with_tensors(spans))
    want = getattr(kvops, name)(k, v, *queries, 12, **options)
    m = want.indices.shape[2]
    out = tuple(torch.full((2, m + 3, 2, d), 9.0).transpose(1, 2)[:, :, :m] for d in (16, 8))
    written = getattr(kvops, name)(k, v, *queries, 12, out=out, **options)
    assert written.k is out[0] and written.v is out[1]
    rest = k[:, :, m:].clone()
    moved = getattr(kvops, name + "_")(k, v, *queries, 12, **options)
    assert moved.k.data_ptr() == k.data_ptr() and torch.equal(k[:, :, m:], rest)
    for result in (written, moved):
        assert all(torch.equal(got, expected) for got, expected in zip(result, want))
    with pytest.raises(TypeError, match=f"{name}_.. got an unexpected keyword argument 'out'"):
        getattr(kvops, name + "_")(k, v, *queries, 12, out=out, **options)
    assert getattr(kvops, name + "_").__name__ == name + "_"


@every_call
def test_empty_and_gradients(name):
    for change in (dict(b=0), dict(heads=0)):
        _, _, queries, options = prepared(name)
        shape = (change.get("b", 2), change.get("heads", 2), 40)
        k, v = torch.zeros(*shape, 16), torch.zeros(*shape, 8)
        queries = [x[: shape[0], : 3 * shape[1]] for x in queries]
        for call in (getattr(kvops, name), getattr(kvops, name + "_")):
            assert call(k, v, *queries, 12, **options).k.shape[:2] == shape[:2]
    k, v, queries, options = prepared(name)
    for i, x in enumerate((k, v, *queries)):
        inputs = [k, v, *queries]
        inputs[i] = x.clone().requires_grad_()
        for call in (getattr(kvops, name), getattr(kvops, name + "_")):
            with pytest.raises(ValueError, match="requires grad"):
                call(*inputs, 12, **options)
    with torch.no_grad():
        assert getattr(kvops, name)(*inputs, 12, **options).k.shape[2] < 40


@kit.only("cpu")
@every_call
def test_compiles_without_graph_breaks(name):
    torch.compiler.reset()
    k, v, queries, options = prepared(name)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def both(k, v, *queries):
        kept = getattr(kvops, name)(k, v, *queries, 12, starts=starts, **options)
        return kept, getattr(kvops, name + "_")(k, v, *queries, 12, **options)

    starts = kit.int32(0, 7)
    want = [getattr(kvops, name)(k, v, *queries, 12, **x, **options) for x in (dict(starts=starts), {})]
    for got, expected in zip(both(k, v, *queries), want):
        assert all(torch.equal(x, y) for x, y in zip(got, expected))


def test_wrong_arguments():
    q, k, v = make(n=40, w=8)
    for name, change, message in [
        ("tova_compress", dict(q_last=q), "q_last must have at most window rows, expected at most 1, got 8"),
        ("tova_compress", dict(q_last=q[:, :, :1], lse=torch.zeros(2, 6)), r"lse must be torch.float32 \[2, 6, 1\]"),
        ("tova_compress", dict(q_last=q[:, :, :1], budget=0), "budget must be at least 1 token, got 0"),
        (
            "h2o_compress",
            dict(q=q, k=k[:, :, :7], v=v[:, :, :7]),
            "q must be queries of the prompt, expected at most 7",
        ),
        ("h2o_compress", dict(q=q, group_reduce="none"), "group_reduce must be one of 'mean', 'max', 'sum'"),
        (
            "h2o_compress",
            dict(q=q, recent=21),
            r"budget must hold sinks \+ recent, expected at least 0 \+ 21 tokens, got 20",
        ),
        ("h2o_compress", dict(q=q, head_mode="all"), "head_mode must be one of"),
        ("h2o_compress", dict(q=q, lse=torch.zeros(2, 6, 7)), r"lse must be torch.float32 \[2, 6, 8\]"),
        ("l2_compress", dict(sinks=21), r"budget must hold sinks \+ recent, expected at least 21 \+ 0 tokens, got 20"),
        ("l2_compress", dict(k=k[0]), r"k must be \[b, Hk, n, d\]"),
    ]:
        with kit.refuses(f"{name}: {message}"):
            getattr(kvops, name)(**{**dict(k=k, v=v, budget=20), **change})
