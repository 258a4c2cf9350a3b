"""Pages: every operator that reads K or V, on pages of any layout, equals each request in dense memory."""

import copy
import inspect
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

import kit
import kvops
from calls import OPERATORS_CALLS, direct, inputs
from fuzz import between_guards, mapped, placed, span
from kvops import ops
from kvops.ops import reference
from test_schema import SCHEMAS

pytestmark = kit.every_device

#: Operators that read K or V, [b, Hk, n, d], but do not support pages, and why.
DENSE_ONLY = {
    "ladder_gather": "LaCache's move by closed form, of lists of layers",
    "ladder_compact_": "the same",
    "rope_at_slots": "window_attention turns keys of pages as it reads them",
}
PAGED = sorted({x.name.removeprefix("kvops::") for x in SCHEMAS if any(a.name == "block_table" for a in x.arguments)})
PAGED_CALLS = [x for x in OPERATORS_CALLS if x.split(",")[0].split(".")[0] in PAGED]


class Pages(NamedTuple):
    k: Tensor  # [num_pages, Hk, page_size, d]
    v: Tensor
    block_table: Tensor  # int32 [b, max_pages]
    memory: Tensor  # k and v are views of it


def swapped(*pages: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in pages]


BY_KEY = "key_bias", "k_scale", "v_scale"  # fp32 [b, Hk, n]


#: Page layouts of engines: the memory's shape for (pages, heads, page_size, d), and K and V in it.
LAYOUTS = {
    "HND": (lambda p, h, s, d: (2, p, h, s, d), lambda x: x),
    "NHD": (lambda p, h, s, d: (2, p, s, h, d), lambda x: swapped(*x)),
    "FlashInfer, HND": (lambda p, h, s, d: (p, 2, h, s, d), lambda x: x.unbind(1)),
    "FlashInfer, NHD": (lambda p, h, s, d: (p, 2, s, h, d), lambda x: swapped(*x.unbind(1))),
    "vLLM, HND": (lambda p, h, s, d: (p, h, s, 2 * d), lambda x: x.chunk(2, -1)),
    "vLLM, NHD": (lambda p, h, s, d: (p, s, h, 2 * d), lambda x: swapped(*x.chunk(2, -1))),
}


def to_pages(k: Tensor, v: Tensor, size: int, seed: int = 0, layout: str = "HND", lengths=None) -> Pages:
    """Put dense requests into shuffled pages of a pool. Unused slots are NaN or 127, unused entries of the table -1."""
    b, heads, n, d = k.shape
    generator = torch.Generator().manual_seed(seed)
    columns = -(-n // size)
    pool = torch.randperm(b * columns + 3, generator=generator, device="cpu").to(torch.int32)
    table = torch.full((b, columns), -1, dtype=torch.int32)
    shape, views = LAYOUTS[layout]
    unused = torch.nan if k.is_floating_point() else 127
    memory = torch.full(shape(len(pool), heads, size, max(d, v.shape[3])), unused, dtype=k.dtype)
    pages = [x[..., : dense.shape[3]] for x, dense in zip(views(memory), (k, v))]
    for row, length in enumerate([n] * b if lengths is None else lengths):
        for page in range(-(-length // size)):
            table[row, page] = taken = pool[row * columns + page]
            for x, dense in zip(pages, (k, v)):
                part = dense[row, :, page * size : (page + 1) * size]
                x[taken, :, : part.shape[1]] = part
    return Pages(*pages, table, memory)


def test_no_operator_is_forgotten():
    reading = {
        x.name.removeprefix("kvops::")
        for x in SCHEMAS
        if not x.overload_name and any(a.name in ("k", "v") and "Tensor" in str(a.type) for a in x.arguments)
    }
    assert reading == {*PAGED, *DENSE_ONLY}
    assert {x.split(",")[0].split(".")[0] for x in PAGED_CALLS} == set(PAGED)


def paged(arguments: dict, size: int, seed: int = 0, layout: str = "HND") -> dict:
    """Return the arguments with K and V in pages; several layers use the same page numbers."""
    if isinstance(arguments.get("k"), list):
        layers = [to_pages(k, v, size, seed, layout) for k, v in zip(arguments["k"], arguments["v"])]
        return {
            **arguments,
            "k": [x.k for x in layers],
            "v": [x.v for x in layers],
            "block_table": layers[0].block_table,
        }
    rows = [name for name in ("k", "v") if name in arguments]
    pages = to_pages(arguments[rows[0]], arguments[rows[-1]], size, seed, layout)
    arguments = with_paged_values(arguments, size, seed, layout)
    return {**arguments, **{name: getattr(pages, name) for name in rows}, "block_table": pages.block_table}


def with_paged_values(arguments: dict, size: int, seed: int, layout: str) -> dict:
    """Return the arguments with what there is per key, such as biases, in the pages that K has."""
    by_key = {x: arguments[x].unsqueeze(-1) for x in BY_KEY if arguments.get(x) is not None}
    return arguments | {name: to_pages(x, x, size, seed, layout).k.squeeze(-1) for name, x in by_key.items()}


def results(overload, arguments: dict) -> list[Tensor]:
    """Return what a call returns or writes; for a compaction, the kept slots."""
    found = overload(**arguments)
    if overload._schema.name == "kvops::compact_kv_":
        table, found = arguments.get("block_table"), []
        for k, v, indices in zip(arguments["k"], arguments["v"], arguments["indices"]):
            kept = torch.arange(indices.shape[2]).expand_as(indices).masked_fill(indices < 0, -1)
            found += ops.gather_kv(k, v, kept, block_table=table)
    elif found is None:
        found = [arguments[x.name] for x in overload._schema.arguments if x.alias_info]
    return [found] if isinstance(found, Tensor) else list(found)


DTYPES = kit.DTYPES[:: kit.size(1, 2)]  # the two half types have the same addresses


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PAGED_CALLS)
def test_every_call_is_the_same_in_pages(name, dtype, layout):
    """Bit-identical with every option of an operator, and with pages of 1 to 80 slots, powers of two or not."""
    overload, arguments = direct(name, inputs(0, n=80, d=32, dv=32, dtype=dtype).map(kit.on_device))
    expected = results(overload, copy.deepcopy(arguments))
    sizes = [*enumerate((1, 5, 16, 20, 80))]
    for seed, size in sizes if not kit.SIMULATED else sizes[[*LAYOUTS].index(layout) % 3 :: 3]:
        assert kit.same(results(overload, paged(arguments, size, seed, layout)), expected), size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PAGED_CALLS)
def test_long_requests_are_the_same_in_pages(name, dtype):
    """Several blocks, splits and threads; K and V of different widths."""
    n = kit.size(3600 if "key_similarity" in name else 7200, 1200)  # which compares all pairs of keys
    x = inputs(0, b=2, heads=kit.size(2, 1), n=n, d=64, dv=80, dtype=dtype)
    overload, arguments = direct(name, x.map(kit.on_device))
    expected = results(overload, copy.deepcopy(arguments))
    for size, layout in ((16, "NHD"), (48, "HND"), (75, "FlashInfer, NHD")):
        assert kit.same(results(overload, paged(arguments, size, 0, layout)), expected), size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PAGED_CALLS)
def test_opcheck(name, dtype):
    x = inputs(0, n=80, d=16, dv=16, dtype=dtype).map(kit.on_device)
    x.starts.zero_(), x.lengths.fill_(80)  # no result is NaN then, which opcheck would take for a difference
    overload, arguments = direct(name, x)
    pages = paged(arguments, 16)
    pages |= pytree.tree_map(lambda x: x.nan_to_num(0), {x: pages[x] for x in ("k", "v", *BY_KEY) if x in pages})
    torch.library.opcheck(overload, (), pages)


def test_compiles():
    k, v = kit.kv(2, 2, 96, 32)
    pages = to_pages(k, v, 16)

    @torch.compile(fullgraph=True)
    def step(k, v, table, lengths):
        kept = ops.select_topk(ops.anchor_cosine(k, lengths=lengths, block_table=table), k=24, lengths=lengths)
        ops.compact_kv_(k, v, kept, block_table=table)
        return kept

    torch.compiler.reset()
    lengths = kit.int32(96, 90)
    kept = ops.select_topk(ops.anchor_cosine(k, lengths=lengths), k=24, lengths=lengths)
    assert torch.equal(step(pages.k, pages.v, pages.block_table, lengths), kept)
    front = torch.arange(24).expand_as(kept)
    assert kit.same(ops.gather_kv(pages.k, pages.v, front, block_table=pages.block_table), ops.gather_kv(k, v, kept))


class Evict(torch.nn.Module):
    def forward(self, k, v, table, lengths):
        kept = ops.select_topk(ops.anchor_cosine(k, lengths=lengths, block_table=table), k=8, lengths=lengths)
        ops.compact_kv_([k], [v], [kept], block_table=table)
        return ops.gather_kv(k, v, kept, block_table=table)


@kit.only("cpu")
def test_exports_with_any_number_of_requests_and_pages(tmp_path):
    k, v, table, _ = to_pages(*kit.kv(2, 2, 40, 16), 8)
    pages, requests, columns = (
        torch.export.Dim("pages"),
        torch.export.Dim("requests"),
        torch.export.Dim("columns", min=3),
    )
    dynamic = {0: pages}, {0: pages}, {0: requests, 1: columns}, {0: requests}
    program = torch.export.export(Evict(), (k, v, table, kit.int32(40, 40)), dynamic_shapes=dynamic, strict=False)
    torch.export.save(program, tmp_path / "evict.pt2")
    loaded = torch.export.load(tmp_path / "evict.pt2").module()
    k, v, table, _ = to_pages(*kit.kv(3, 2, 72, 16), 8, lengths=[72, 30, 11])
    twins = k.clone(), v.clone()
    lengths = kit.int32(72, 30, 11)
    assert kit.same(loaded(k, v, table, lengths), Evict()(*twins, table, lengths))
    assert kit.same((k, v), twins)


# Requests of different lengths give the same as alone.


class Batch(NamedTuple):
    k: Tensor
    v: Tensor
    lengths: list[int]
    layout: str
    pages: Pages

    def alone(self) -> list[tuple[Tensor, Tensor]]:
        return [(self.k[i : i + 1, :, :n], self.v[i : i + 1, :, :n]) for i, n in enumerate(self.lengths)]


@st.composite
def batches(draw) -> Batch:
    lengths = draw(st.lists(st.integers(0, 90), min_size=1, max_size=4))
    heads, d = draw(st.integers(1, 3)), draw(st.sampled_from([8, 16, 40]))
    dtype, seed = draw(st.sampled_from(kit.DTYPES)), draw(st.integers(0, 2**31))
    size = draw(st.one_of(st.integers(1, 9), st.sampled_from([16, 17, 32, 64, 256])))
    k, v = kit.kv(len(lengths), heads, max(1, *lengths), d, dtype, seed=seed)
    layout = draw(st.sampled_from([*LAYOUTS]))
    return Batch(k, v, lengths, layout, to_pages(k, v, size, seed, layout, lengths))


def same_as_alone(batch: Batch, found: Tensor, alone, rest) -> None:
    """Check that each request's part of [b, Hk, n] equals its result alone, followed by `rest`."""
    for i, (n, (k, v)) in enumerate(zip(batch.lengths, batch.alone())):
        if n:
            assert kit.same(found[i : i + 1, :, :n], alone(i, k, v))
        behind = found[i, :, n:]
        assert behind.isnan().all() if rest is None else (behind == rest).all()


@given(batches())
@kit.examples(60)
def test_scores_of_ragged_requests(batch):
    k, _, table, _ = batch.pages
    options = dict(lengths=kit.int32(*batch.lengths), block_table=table)
    same_as_alone(batch, ops.anchor_cosine(k, **options), lambda i, k, v: ops.anchor_cosine(k), None)
    same_as_alone(
        batch,
        ops.outlier_degree(k, kappa=3, standardize=False, **options),
        lambda i, k, v: ops.outlier_degree(k, kappa=3, standardize=False),
        None,
    )
    same_as_alone(batch, ops.key_similarity(k, **options), lambda i, k, v: ops.key_similarity(k), None)
    pages_of_v = batch.pages[1]
    w_o = kit.randn(30, 2 * k.shape[1] * pages_of_v.shape[3]).to(k.dtype)
    same_as_alone(batch, ops.value_norm(pages_of_v, w_o, **options), lambda i, k, v: ops.value_norm(v, w_o), None)
    same_as_alone(batch, ops.value_range(pages_of_v, **options), lambda i, k, v: ops.value_range(v), None)
    prototypes, counts = ops.build_prototypes(k, num_chunks=5, num_buckets=0, **options)
    for i, (n, (own, _)) in enumerate(zip(batch.lengths, batch.alone())):
        if n:
            expected = ops.build_prototypes(own, num_chunks=5, num_buckets=0)
            assert kit.same((prototypes[i : i + 1], counts[i : i + 1]), expected)
    same_as_alone(
        batch,
        ops.assign_prototypes(k, prototypes, **options),
        lambda i, k, v: ops.assign_prototypes(k, prototypes[i : i + 1]),
        -1,
    )
    heads, d = k.shape[1], k.shape[3]
    mean, cov = kit.randn(2 * heads, d), kit.randn(len(batch.lengths), 2 * heads, d, d, seed=1)
    same_as_alone(
        batch,
        ops.quadratic_scores(k, mean, cov=cov, **options),
        lambda i, k, v: ops.quadratic_scores(k, mean, cov=cov[i]),
        None,
    )
    norms = mean[:, : d // 2].contiguous()
    same_as_alone(
        batch,
        ops.trig_scores(k, mean, norms=norms, **options),
        lambda i, k, v: ops.trig_scores(k, mean, norms=norms),
        None,
    )


@given(batches(), st.integers(1, 12), st.integers(0, 7))
@kit.examples(60)
def test_lag_scores_of_ragged_requests(batch, lag, prefix):
    k, v, table, _ = batch.pages
    found = ops.lag_score(k, v, lag=lag, prefix=prefix, lengths=kit.int32(*batch.lengths), block_table=table)
    for i, (n, own) in enumerate(zip(batch.lengths, batch.alone())):
        segments = kvops.ops.lag.num_segments(n, prefix, lag)
        if segments:
            assert kit.same(found[i : i + 1, :, :segments], ops.lag_score(*own, lag=lag, prefix=prefix))
        assert found[i, :, segments:].isnan().all()


@given(batches(), st.integers(1, 6), st.integers(1, 3), st.booleans())
@kit.examples(60)
def test_windows_of_ragged_requests(batch, w, group, rotated):
    """A decode step of a batch, or the last rows of its prompts; requests with fewer tokens than rows see fewer."""
    k, v, table, _ = batch.pages
    n = table.shape[1] * k.shape[2]
    q = kit.randn(len(batch.lengths), group * k.shape[1], w, k.shape[3]).to(k.dtype)
    visible = torch.tensor([[max(0, x - w + 1 + i) for i in range(w)] for x in batch.lengths], dtype=torch.int32)
    tables = kvops.Rope.of(k.shape[3]).tables(torch.arange(n)) if rotated else ()
    options = dict(zip(("cos", "sin"), tables))
    out, lse, scores = ops.window_attention(q, k, v, visible, block_table=table, **options)
    bias = kit.randn(*k.shape[:3])
    biased = ops.window_attention(q, k, v, visible, key_bias=bias, block_table=table)
    rounded = kvops.quantize_rows(torch.cat((k, k, k, k), -1)), kvops.quantize_rows(torch.cat((v, v, v, v), -1))
    int8 = dict(zip(("k", "k_scale", "v", "v_scale"), (*rounded[0], *rounded[1])))
    wide = torch.cat((q, q, q, q), -1).bfloat16()
    narrow = ops.window_attention(wide, **int8, visible=visible, block_table=table)
    narrow_scores = ops.window_scores(wide, k=int8["k"], k_scale=int8["k_scale"], visible=visible, block_table=table)
    again = ops.window_scores(q, k, visible, block_table=table)
    drops = ops.drop_scores(q, k, v, visible, block_table=table)
    for i, (length, own) in enumerate(zip(batch.lengths, batch.alone())):
        if not length:
            assert (lse[i] == -torch.inf).all() and (out[i] == 0).all() and (scores[i] == 0).all()
            continue
        mine = {name: x[:length] for name, x in options.items()}
        one = slice(i, i + 1)
        expected = ops.window_attention(q[one], *own, visible[i], **mine)
        assert kit.same((out[one], lse[one], scores[one, :, :length]), expected)
        own_bias = reference.pages_to_dense(bias.unsqueeze(-1), table[one])[:, :, :length, 0]
        expected = ops.window_attention(q[one], *own, visible[i], key_bias=own_bias)
        assert kit.same((*(x[one] for x in biased[:2]), biased[2][one, :, :length]), expected)
        mine = {
            x: reference.pages_to_dense(y.view(*y.shape[:3], -1), table[one])[:, :, :length] for x, y in int8.items()
        }
        mine |= {x: mine[x].squeeze(-1) for x in ("k_scale", "v_scale")}
        expected = ops.window_attention(wide[one], **mine, visible=visible[i])
        assert kit.same((*(x[one] for x in narrow[:2]), narrow[2][one, :, :length]), expected)
        expected = ops.window_scores(wide[one], mine["k"], visible[i], k_scale=mine["k_scale"])
        assert kit.same(narrow_scores[one, :, :length], expected)
        assert kit.same(again[one, :, :length], ops.window_scores(q[one], own[0], visible[i]))
        assert kit.same(drops[one, :, :length], ops.drop_scores(q[one], *own, visible[i]))
        assert all((x[i, :, length:] == 0).all() for x in (scores, again, drops))


@given(batches(), st.data())
@kit.examples(60)
def test_moves_of_ragged_requests(batch, data):
    """Byte for byte: in all pages, only the new places of the kept slots change."""
    k, v, table, memory = batch.pages
    heads, most = k.shape[1], max(batch.lengths)
    kept = torch.full((len(batch.lengths), heads, most), -1)
    for i, n in enumerate(batch.lengths):
        for h in range(heads):
            slots = sorted(data.draw(st.sets(st.integers(0, n - 1)))) if n else []
            kept[i, h, : len(slots)] = torch.tensor(slots, dtype=torch.int64)
    dense = ops.gather_kv(batch.k, batch.v, kept)
    assert kit.same(ops.gather_kv(k, v, kept, block_table=table), dense)
    want = memory.clone()
    for pages, moved in zip(LAYOUTS[batch.layout][1](want), dense):
        for i, h, j in (kept >= 0).nonzero().tolist():
            page, slot = divmod(j, k.shape[2])
            pages[table[i, page], h, slot, : moved.shape[3]] = moved[i, h, j]
    result = ops.compact_kv_(k, v, kept, block_table=table)
    assert result[0] is k and result[1] is v
    assert torch.equal(kit.bits(memory), kit.bits(want))


# Policies.

PLACE = dict(layer=1, num_layers=4)
STATISTICS = kit.query_statistics(1, 4, 16)
POLICIES = [
    kvops.KeyDiff(20),
    kvops.KeyDiff(0.3, sinks=2, recent=3, head_mode="shared", normalize_anchor=False),
    kvops.KeyDiff(20, head_mode="adaptive"),
    kvops.LagKV(8, 0.5, sinks=3),
    kvops.LagKV(8, 0.5, reference="self", head_mode="shared"),
    kvops.SnapKV(20, window=5),
    kvops.SnapKV(0.4, window=3, kernel_size=3, pool_first=True, pooling="avg"),
    kvops.SnapKV(20, window=5, score="dot"),
    kvops.SnapKV(20, window=5, score="drop", pooling="avg"),
    kvops.DefensiveKV(20, window=5, w_o=torch.ones(6, 4 * 16).cumsum(0).cumsum(1)),
    kvops.DefensiveKV(20, window=5, stages=False, head_mode="adaptive"),
    kvops.CriticalKV(20, window=5, w_o=torch.ones(6, 4 * 16).cumsum(0).cumsum(1)),
    kvops.RKV(20, window=5, mix=0.5, threshold=0.3),
    kvops.VaSE(20, window=5, sinks=2),
    kvops.PyramidKV(24, window=5),
    kvops.ChunkKV(20, window=5, chunk=4),
    kvops.LAQ(20, window=4),
    kvops.LAQ(20, window=0, compat_mask=True),
    kvops.ProtoKV(20, window=5, num_chunks=6, num_sats=8),
    kvops.ProtoKV(20, window=5, num_chunks=6, clusters="lsh"),
    kvops.ProtoKV(0.5, window=5, num_chunks=6, clusters="chunks", sinks=2, whole_clusters=True),
    kvops.SATKV(20, window=5, kappa=2),
    kvops.H2O(20),
    kvops.TOVA(20),
    kvops.StreamingLLM(20),
    kvops.Random(20, seed=3),
    kvops.TriAttention(20, recent=5, statistics=STATISTICS),
    kvops.ExpectedAttention(20, value_norm=False, statistics=STATISTICS),
    kvops.Full(),
]
REFUSE_PAGES = [
    kvops.L2(20),
    kvops.ExpectedAttention(20),
    kvops.LaCache(20),
    kvops.KVzip(20),
    kvops.KeyDiff(20, metric="dot"),
    kvops.LagKV(8, 0.5, score="l2"),
]
CHOSEN = {type(x) for x in (*POLICIES, *REFUSE_PAGES)}
for _policy in [x.policy(20) for x in kvops.METHODS.values() if x.policy not in CHOSEN]:
    (REFUSE_PAGES if _policy.needs.dense else POLICIES).append(_policy)


def queries_of(policy: kvops.Policy, b: int, heads: int, n: int, d: int) -> dict[str, Tensor]:
    """Return the queries that `compress` takes by name."""
    rows = {"q_window": getattr(policy, "window", 0), "q_last": 1, "q": n, "q_lookahead": 7}
    needed = [x for x in inspect.signature(policy.compress).parameters if x in rows and rows[x]]
    return {x: kit.randn(b, heads, rows[x], d, seed=len(x)) for x in needed}


def test_policies_say_whether_they_take_pages():
    assert not any(x.needs.dense for x in POLICIES) and all(x.needs.dense for x in REFUSE_PAGES)


@dataclass(frozen=True, eq=False)
class Mine(kvops.KeyDiff):
    pass


@pytest.mark.parametrize(
    "call, width",
    [
        (lambda k, v, q, **pages: kvops.keydiff_compress(k, v, 20, **pages), 0),
        (lambda k, v, q, **pages: kvops.snapkv_compress(k, v, q, 20, **pages), 8),
        (lambda k, v, q, **pages: Mine(20).compress(k, v, **pages), 0),
    ],
    ids=["keydiff", "snapkv", "subclass"],
)
def test_policies_that_take_pages_compile(call, width):
    k, v = kit.kv(2, 2, 96, 16)
    pages, q = to_pages(k, v, 16), kit.randn(2, 4, width, 16)
    given = dict(block_table=pages.block_table, lengths=kit.int32(96, 90))
    torch.compiler.reset()
    kept = torch.compile(call, fullgraph=True, backend="eager")(pages.k, pages.v, q, **given)
    assert kit.same(kept, call(pages.k, pages.v, q, **given))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda x: x.name)
def test_policies_take_pages(policy):
    """Ragged requests keep the same slots as in dense memory, out of place and in place."""
    # A fraction of no tokens cannot hold the protected ones.
    lengths, size = [90, 37, 50 if isinstance(getattr(policy, "budget", 0), float) else 0, 64], 16
    k, v = kit.kv(4, 2, 96, 16)
    for i, length in enumerate(lengths):
        k[i, :, length:] = v[i, :, length:] = torch.nan
    call = dict(lengths=kit.int32(*lengths), **queries_of(policy, 4, 4, 96, 16))
    if type(policy) in (kvops.PyramidKV, kvops.Random):
        call |= PLACE
    expected = policy.compress(k, v, **call)
    for layout in ("HND", "FlashInfer, NHD"):
        pages = to_pages(k, v, size, 0, layout, lengths)
        call["block_table"] = pages.block_table
        assert kit.same(policy.compress(pages.k, pages.v, **call), expected)
        result = policy.compress_(pages.k, pages.v, **call)
        assert result.k is pages.k and result.v is pages.v and torch.equal(result.indices, expected.indices)
        front = torch.arange(expected.indices.shape[2]).expand_as(expected.indices)
        front = torch.where(expected.indices < 0, -1, front)
        assert kit.same(ops.gather_kv(pages.k, pages.v, front, block_table=pages.block_table), expected[:2])


@pytest.mark.parametrize("policy", REFUSE_PAGES, ids=lambda x: x.name)
def test_policies_that_take_no_pages(policy):
    k, v = kit.kv(1, 2, 32, 16)
    pages = to_pages(k, v, 16)
    if isinstance(policy, kvops.LaCache):  # its plan knows no lengths
        with kit.refuses("unexpected keyword argument 'block_table'", kind=TypeError):
            policy.compress_(pages.k, pages.v, block_table=pages.block_table, **PLACE)
        return
    with kit.refuses("takes no pages", "expected dense K and V", "got a block_table"):
        call = dict(PLACE, lengths=kit.int32(32), block_table=pages.block_table)
        if isinstance(policy, kvops.KVzip):
            call |= dict(q_repeat=kit.randn(1, 4, 8, 16), k_repeat=kit.randn(1, 2, 8, 16))
        if isinstance(policy, kvops.AttentionMatching):
            call |= dict(q_reference=kit.randn(1, 4, 8, 16))
        if isinstance(policy, kvops.KVzap):
            call |= dict(hidden=kit.randn(1, 32, 8))
        policy.compress_(pages.k, pages.v, **call)


@pytest.fixture
def checked():
    """On a GPU this reads tables, lengths and indices back."""
    with kvops.debug_checks():
        yield


def test_bad_calls_of_policies(checked):
    k, v, table, memory = to_pages(*kit.kv(2, 2, 32, 16), 16)
    before, lengths = memory.clone(), kit.int32(32, 20)
    for parts, call in (
        (("with a block_table, lengths must be torch.int32", "got None"), dict(block_table=table)),
        (("fill_invalid must be False",), dict(block_table=table, lengths=lengths, fill_invalid=True)),
        ((r"block_table must be \[batch, max_pages\]", r"\[4\]"), dict(block_table=table.flatten(), lengths=lengths)),
        (("block_table must name pages",), dict(block_table=table + 7, lengths=lengths)),
    ):
        with kit.refuses(*parts):
            kvops.keydiff_compress_(k, v, 8, **call)
    with kit.refuses("block_table must be a torch.Tensor, got list", kind=TypeError):
        kvops.keydiff_compress_(k, v, 8, block_table=[[0, 1]], lengths=lengths)
    assert torch.equal(kit.bits(memory), kit.bits(before))


def test_the_reference_takes_pages():
    k, v = kit.kv(2, 2, 30, 16)
    pages = to_pages(k, v, 4)
    scores = ops.anchor_cosine(pages.k, lengths=kit.int32(30, 30), block_table=pages.block_table)
    exact = reference.anchor_cosine(pages.k, lengths=kit.int32(30, 30), block_table=pages.block_table)
    torch.testing.assert_close(scores[:, :, :30], exact[:, :, :30].float())
    assert torch.equal(reference.pages_to_dense(pages.k, pages.block_table)[:, :, :30], k)


# Bad input: nothing is read or written outside of the request's pages.


def refused(*parts: str, **changes) -> None:
    k, v = kit.kv(2, 2, 30, 16)
    pages = to_pages(k, v, 8, lengths=[30, 20])
    arguments = dict(block_table=pages.block_table, lengths=kit.int32(30, 20)) | changes
    with kit.refuses(*parts):
        ops.anchor_cosine(pages.k, **arguments)


def test_bad_tables(checked):
    good = to_pages(*kit.kv(2, 2, 30, 16), 8, lengths=[30, 20]).block_table
    refused("block_table must be torch.int32", "torch.int64", block_table=good.long())
    refused(r"block_table must be \[batch, max_pages\]", r"\[4\]", block_table=good[0])
    refused("contiguous last dim", block_table=good.repeat_interleave(2, 1)[:, ::2])
    refused("starts and lengths of row 0", r"\[0, 24\]", "length 30", block_table=good[:, :3])
    for wrong in (-1, 11, 2**30):
        table = good.clone()
        table[1, 2] = wrong
        refused(r"block_table must name pages in \[0, 11\)", f"got {wrong} at request 1, page 2", block_table=table)
    table = good.clone()
    table[1, 3] = 99  # no slot of that page is used
    k = to_pages(*kit.kv(2, 2, 30, 16), 8, lengths=[30, 20]).k
    ops.anchor_cosine(k, block_table=table, lengths=kit.int32(30, 20))
    with kit.refuses(r"lengths must be a contiguous int32 \[2\]"):
        ops.anchor_cosine(k, block_table=good, lengths=kit.int32(30, 20, 1))
    with kit.refuses("block_table", "fit int32"):
        ops.anchor_cosine(k[:, :, :1].expand(-1, -1, 2**29, -1), block_table=good, lengths=kit.int32(0, 0))
    for empty in (k[:, :, :0], k[:0]):
        with kit.refuses("must hold 1 to", "of at least 1 slot"):
            ops.anchor_cosine(empty, block_table=good, lengths=kit.int32(0, 0))
    with kit.refuses("v must have k's pages, heads and page size"):
        ops.lag_score(k, k[1:], lag=4, block_table=good)


def test_a_page_of_two_requests_is_not_compacted(checked):
    k, v, table, memory = to_pages(*kit.kv(2, 2, 30, 16), 8)
    before = memory.clone()
    table[1, 1] = table[0, 2]
    kept = torch.arange(0, 30, 2).expand(2, 2, 15)
    with kit.refuses(
        "each page once, since the call writes to it", f"page {int(table[0, 2])} again at request 1, page 1"
    ):
        ops.compact_kv_(k, v, kept, block_table=table)
    assert torch.equal(kit.bits(memory), kit.bits(before))
    ops.gather_kv(k, v, kept, block_table=table)  # shared prefixes may be read
    table[1, 1] = table[1, 0]
    with kit.refuses("again at request 1, page 1"):
        ops.compact_kv_(k, v, kept, block_table=table)
    with kit.refuses("share no memory with block_table"):
        words = k.view(torch.int32)[0, 0, 0, :4].view(1, 4)
        ops.compact_kv_(k, v, kept[:1], block_table=words)


def test_windows_need_pages_for_what_is_visible(checked):
    k, v, table, _ = to_pages(*kit.kv(2, 2, 30, 16), 8, lengths=[30, 10])
    q, visible = kit.randn(2, 4, 1, 16), kit.int32(30, 17).view(2, 1)
    with kit.refuses("block_table must name pages", "got -1 at request 1, page 2"):
        ops.window_attention(q, k, v, visible, block_table=table)
    ops.window_attention(q, k, v, kit.int32(30, 10).view(2, 1), block_table=table)
    table[:, 0] = -1  # padding has no page
    ops.window_attention(q, k, v, kit.int32(30, 10).view(2, 1), starts=kit.int32(8, 9), block_table=table)


# On a GPU nothing reads the table before the kernels do.

NO_PAGES = (-1, 2**31 - 1, -(2**31), 10_000)


def next_to_a_guard(x: Tensor, at_end: bool) -> Tensor:
    return placed(x, between_guards(span(x), at_end))


@kit.only("simulator")
@pytest.mark.parametrize("size", [5, 16])
@pytest.mark.parametrize("name", PAGED_CALLS)
def test_entries_that_name_no_page_are_not_followed(name, size):
    """No access leaves the tensors, which end at guard pages, and the other request's results are unchanged."""
    overload, arguments = direct(name, inputs(0, n=80, d=16, dv=16))
    good = paged(arguments, size)
    expected = results(overload, copy.deepcopy(good))
    wrong = good["block_table"].clone()
    wrong[0] = torch.tensor(NO_PAGES, dtype=torch.int32).repeat(20)[: wrong.shape[1]]
    with pytest.raises(ValueError, match=f"{overload._opname}.*: block_table must name pages"), kvops.debug_checks():
        overload(**copy.deepcopy(good) | {"block_table": wrong})
    for at_end in (False, True):
        here = mapped(good | {"block_table": wrong}, partial(next_to_a_guard, at_end=at_end))
        found = results(overload, here)
        assert kit.same([x[1:] for x in found], [x[1:] for x in expected])
        caches = ({name: x[name] for name in ("k", "v") if name in x} for x in (here, good))
        for pages, before in zip(*map(pytree.tree_leaves, caches)):
            others = torch.ones(len(pages), dtype=torch.bool)
            others[wrong[1].long()] = overload._opname != "compact_kv_"
            assert torch.equal(kit.bits(pages[others]), kit.bits(before[others]))


@kit.only("simulator")
def test_rows_are_moved_between_pages_that_there_are():
    """Reads from and writes to pages that do not exist are skipped."""
    k, v, table, _ = to_pages(*kit.kv(1, 1, 32, 16), 4)
    before, kept = (k.clone(), v.clone()), torch.arange(16, 32).view(1, 1, 16)
    good = table.clone()
    table[0, 1], table[0, 6] = -1, 1000  # slots 4 to 7, and the destination of slots 8 to 11
    ops.compact_kv_(k, v, kept, block_table=table)
    for pages, was in zip((k, v), before):
        want = was.clone()
        for to, source in ((0, 4), (3, 7)):
            want[good[0, to]] = was[good[0, source]]
        assert torch.equal(kit.bits(pages), kit.bits(want))
