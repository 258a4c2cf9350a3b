"""vLLM's CPU tiles: read as its writer leaves them, converted to rows and back bit by bit, no other page touched."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kit
import kvops
from kvops import ops
from kvops.vllm.cpu_pages import as_rows, copy_to_tiles, keys, to_rows_, to_tiles_
from kvops.vllm.layouts import Blocks, Tiles

HEADS = 2
DTYPES = {"vec": (*kit.DTYPES, *kit.BYTES), "amx": (torch.bfloat16, torch.float16, *kit.BYTES)}
DTYPES["vec16"] = DTYPES["vec"]
HEAD_DIMS = {"vec": (32, 64, 96, 128), "vec16": (48, 80, 112), "amx": (32, 64, 96, 128)}


def places(isa: str, page_size: int, d: int) -> tuple[Tensor, Tensor]:
    """Return the offsets of token t's channel c in a page of a head, for K and V: int64 [page_size, d].

    The formulas are those of vLLM's cache writers."""
    t, c = torch.arange(page_size)[:, None], torch.arange(d)
    behind_k = page_size * d
    if isa == "amx":
        k = t // 16 * 16 * d + c // 2 * 32 + t % 16 * 2 + c % 2
        v = c // 16 * 16 * page_size + t // 2 * 32 + c % 16 * 2 + t % 2
        return k, behind_k + v
    return c * page_size + t, behind_k + t * d + c


class Case(NamedTuple):
    isa: str
    cache: Tensor  # [num_pages, Hk, page_size, 2 * d], random bits, all pages tiles
    table: Tensor  # int32 [b, max_pages]
    lengths: Tensor  # int32 [b]

    @property
    def options(self) -> dict:
        return dict(isa=self.isa, lengths=self.lengths)

    @property
    def used(self) -> list[int]:
        pages = self.lengths.add(self.cache.shape[2] - 1) // self.cache.shape[2]
        return [page for row, count in zip(self.table.tolist(), pages.tolist()) for page in row[:count]]

    def rows(self) -> tuple[Tensor, Tensor]:
        """Copy all pages as rows: K and V [num_pages, Hk, page_size, d]."""
        page_size, d = self.cache.shape[2], self.cache.shape[3] // 2
        return tuple(self.cache.flatten(2)[:, :, x] for x in places(self.isa, page_size, d))

    def write(self, k: Tensor, v: Tensor) -> None:
        """Store rows of all pages as tiles."""
        memory = self.cache.view(*self.cache.shape[:2], -1)
        for x, place in zip((k, v), places(self.isa, self.cache.shape[2], self.cache.shape[3] // 2)):
            memory[:, :, place] = x


def case(isa="amx", dtype=torch.bfloat16, d=64, page_size=32, lengths=(70, 0, 33), strided=False, seed=0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    columns = max(1, -(-max(lengths) // page_size)) + 1
    pool = torch.randperm(len(lengths) * columns + 2, generator=generator).int()
    table = torch.full((len(lengths), columns), -1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        held = -(-length // page_size)
        table[row, :held] = pool[row * columns : row * columns + held]
    shape = (len(pool), HEADS, page_size, 2 * d * dtype.itemsize)
    wide = torch.randint(256, (shape[0], 3, HEADS + 1, *shape[2:]), dtype=torch.uint8, generator=generator)
    cache = wide[:, 1, 1:] if strided else wide[:, 1, 1:].contiguous()
    return Case(isa, cache.view(dtype), table, kit.int32(*lengths))


@st.composite
def cases(draw):
    isa = draw(st.sampled_from(sorted(DTYPES)))
    return case(
        isa,
        draw(st.sampled_from(DTYPES[isa])),
        draw(st.sampled_from(HEAD_DIMS[isa])),
        draw(st.sampled_from((32, 64, 96))),
        draw(st.lists(st.integers(0, 200), min_size=1, max_size=4)),
        draw(st.booleans()),
        draw(st.integers(0, 99)),
    )


@given(cases())
@kit.examples(60)
def test_pages_become_rows_and_tiles_again(x):
    """Tiles are read as rows, no other page is touched, and converting back restores every bit."""
    before, expected = x.cache.clone(), x.rows()
    k, v = to_rows_(x.cache, x.table, **x.options)
    assert kit.same((k[x.used], v[x.used]), (y[x.used] for y in expected))
    assert k.shape == v.shape == expected[0].shape
    assert k.untyped_storage()._cdata == v.untyped_storage()._cdata == x.cache.untyped_storage()._cdata
    others = torch.ones(len(before), dtype=torch.bool)
    others[x.used] = False
    assert kit.same([x.cache[others]], [before[others]])
    tiles = torch.empty_like(before[x.used])
    copy_to_tiles(x.cache, x.used, tiles, x.isa)
    assert kit.same([tiles], [before[x.used]])
    to_tiles_(x.cache, x.table, **x.options)
    assert kit.same([x.cache], [before])
    with as_rows(x.cache, x.table, **x.options) as rows:
        assert kit.same((y[x.used] for y in rows), (y[x.used] for y in expected))
        assert kit.same([x.cache[others]], [before[others]])
    assert kit.same([x.cache], [before])


def test_pages_that_are_given_back_are_left_as_rows():
    x = case(lengths=(128, 0, 33))
    before, rows = x.cache.clone(), x.rows()
    used, held = x.used, [x.used[0], x.used[4], -1]
    with as_rows(x.cache, x.table, **x.options, held=kit.int32(held)):
        pass
    left = [page for page in used if page not in held]
    k, v = x.cache.view(*x.cache.shape[:2], 2, *rows[0].shape[2:]).unbind(2)
    assert kit.same((k[left], v[left]), (y[left] for y in rows))
    x.cache[left] = before[left]
    assert kit.same([x.cache], [before])
    with pytest.raises(KeyError), as_rows(x.cache, x.table, **x.options, held=kit.int32(held)):
        raise KeyError
    assert kit.same([x.cache], [before])
    other = next(page for page in range(len(x.cache)) if page not in used)
    with kit.refuses("as_rows: held must only name pages of block_table", str(other)):
        as_rows(x.cache, x.table, **x.options, held=kit.int32([other])).__enter__()
    assert kit.same([x.cache], [before])


@given(cases())
@kit.examples(40)
def test_keys_are_copies_of_rows(x):
    before, (k, _) = x.cache.clone(), x.rows()
    found = keys(x.cache, x.table, isa=x.isa)
    for i, n in enumerate(x.lengths.tolist()):
        rows = k[x.table[i, : -(-n // k.shape[2])].long()].transpose(0, 1).flatten(1, 2)
        assert kit.same([found[i, :, :n]], [rows[:, :n]])
    assert kit.same([x.cache], [before])
    assert found.is_contiguous() and found.untyped_storage().data_ptr() != x.cache.untyped_storage().data_ptr()


def test_keys_of_no_page():
    x = case()
    for wrong in (-2, 14):
        table = x.table.clone()
        table[2, 1] = wrong
        with kit.refuses(r"keys: block_table must name pages in \[0, 14\) or -1"):
            keys(x.cache, table, isa=x.isa)
    with kit.refuses("keys: isa"):
        keys(x.cache, x.table, isa="neon")


@given(cases(), st.data())
@kit.examples(40)
def test_a_compaction_in_tiles_is_that_in_rows(x, data):
    k, v = x.rows()
    kept = torch.full((len(x.lengths), HEADS, max(1, int(x.lengths.max()))), -1)
    for row, n in enumerate(x.lengths.tolist()):
        for head in range(HEADS):
            slots = sorted(data.draw(st.sets(st.integers(0, n - 1)))) if n else []
            kept[row, head, : len(slots)] = torch.tensor(slots, dtype=torch.int64)
    expected = x._replace(cache=x.cache.clone())
    ops.compact_kv_(k, v, kept, block_table=x.table)
    expected.write(k, v)
    with as_rows(x.cache, x.table, **x.options) as pages:
        ops.compact_kv_(*pages, kept, block_table=x.table)
    assert kit.same([x.cache], [expected.cache])


@pytest.mark.parametrize("isa, dtype", [("vec", torch.float32), ("vec16", torch.float16), ("amx", torch.bfloat16)])
def test_a_policy_in_tiles_is_that_in_rows(isa, dtype):
    """As an engine does it: evicted pages are freed as they are, and only the pages still in use become tiles."""
    lengths = (200, 31, 0, 96)
    x = case(isa, dtype, HEAD_DIMS[isa][1], 32, lengths)
    x.write(*(kit.randn(*y.shape, seed=i).to(dtype) for i, y in enumerate(x.rows())))
    policy, (k, v) = kvops.KeyDiff(64), x.rows()
    expected = policy.compress_(k, v, lengths=x.lengths, block_table=x.table)
    kept = policy.compress_(*to_rows_(x.cache, x.table, **x.options), lengths=x.lengths, block_table=x.table)
    assert torch.equal(kept.indices, expected.indices) and kept.lengths.tolist() == [64, 31, 0, 64]
    to_tiles_(x.cache, x.table, isa=isa, lengths=kept.lengths)
    held = x._replace(lengths=kept.lengths).used
    assert len(held) == 5 and kit.same((y[held] for y in x.rows()), (y[held] for y in (k, v)))


def test_an_exception_leaves_tiles():
    x = case()
    before = x.cache.clone()
    with pytest.raises(ZeroDivisionError), as_rows(x.cache, x.table, **x.options):
        raise ZeroDivisionError
    assert kit.same([x.cache], [before])


def test_all_slots_are_meant_without_lengths():
    x = case(lengths=(96, 128))
    x = x._replace(table=x.table[:, :3].contiguous(), lengths=kit.int32(96, 96))
    expected = x.rows()
    with as_rows(x.cache, x.table, isa=x.isa) as rows:
        assert len(x.used) == 6 and kit.same((y[x.used] for y in rows), (y[x.used] for y in expected))


def refused(*parts: str, kind=ValueError, **changes) -> None:
    """Check that all three functions raise under their own names and leave the cache unchanged."""
    x = case()
    arguments = dict(kv_cache=x.cache, block_table=x.table, **x.options) | changes
    before = x.cache.clone()
    for name, f in dict(to_rows_=to_rows_, to_tiles_=to_tiles_, as_rows=as_rows).items():
        with kit.refuses(f"{name}: ", *parts, kind=kind):
            if name == "as_rows":
                with f(**arguments):
                    pytest.fail("rows were handed out")
            f(**arguments)
    assert kit.same([x.cache], [before])


def test_bad_caches():
    good = case().cache
    refused("kv_cache must be a torch.Tensor", "got list", kind=TypeError, kv_cache=[good])
    refused("kv_cache must be on the CPU", "got meta", kv_cache=good.to("meta"))
    refused(r"kv_cache must be \[num_pages, Hk, page_size, 2 \* d\]", r"\[14, 2, 4096\]", kv_cache=good.flatten(2))
    for page_size in (0, 16, 31, 40):
        refused("page_size that is a multiple of 32", f"got {page_size}", kv_cache=torch.zeros(9, 2, page_size, 128))
    refused(r"last dim \(2 \* d\)", "multiple of 64 for isa='amx', got 160", kv_cache=torch.zeros(9, 2, 32, 160))
    refused("a multiple of 2 for isa='vec', got 65", kv_cache=torch.zeros(9, 2, 32, 65), isa="vec")
    refused("a multiple of 64 for isa='amx', got 0", kv_cache=good[..., :0])
    refused("elements of 1 or 2 bytes for isa='amx'", "got torch.float32", kv_cache=good.float())
    refused("each page of a head in contiguous", r"strides \[8192, 4096, 1, 32\]", kv_cache=good.mT.contiguous().mT)
    refused("each page of a head in contiguous", kv_cache=good.repeat(1, 1, 1, 2)[..., :128])
    refused("kv_cache requires grad", "inference-only", kv_cache=good.nan_to_num(0).requires_grad_())


def test_bad_tables():
    x = case()
    refused("isa must be one of 'vec', 'vec16', 'amx'", "got 'neon'", isa="neon")
    refused("block_table must be a torch.Tensor", "got list", kind=TypeError, block_table=x.table.tolist())
    refused("block_table must be int32", "got torch.int64", block_table=x.table.long())
    refused(r"block_table must be \[batch, max_pages\]", r"got \[4\]", block_table=x.table[0])
    refused("block_table must be on the first tensor's device cpu", "got meta", block_table=x.table.to("meta"))
    refused("lengths must be a torch.Tensor", "got list", kind=TypeError, lengths=[70, 0, 33])
    refused(r"lengths must be torch.int32 \[3\]", "got torch.int64", lengths=x.lengths.long())
    refused(r"lengths must be torch.int32 \[3\]", r"\[2\]", lengths=x.lengths[:2])
    for wrong in (-1, 129):
        refused(r"lengths must lie in \[0, 128\]", f"got {wrong} for row 1", lengths=kit.int32(70, wrong, 33))
    refused(r"name pages in \[0, 14\)", "got -1 at request 0, page 3", lengths=None)
    for wrong in (-1, 14, 2**31 - 1):
        table = x.table.clone()
        table[2, 1] = wrong
        refused(r"name pages in \[0, 14\)", f"got {wrong} at request 2, page 1", block_table=table)
    table = x.table.clone()
    table[2, 0] = table[0, 1]
    refused(
        "each page once, since the call writes to it",
        f"page {int(table[0, 1])} again at request 2, page 0",
        block_table=table,
    )


@pytest.mark.parametrize("page_size", [32, 64, 128])
@pytest.mark.parametrize("d", [64, 80, 96, 128])
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_vllm_writes_and_reads_these_tiles(dtype, d, page_size):
    """vLLM's own writer fills the cache, and its own attention reads it after an eviction. vLLM is optional."""
    pytest.importorskip("vllm")
    from vllm import _custom_ops as vllm_ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    torch.cpu._init_amx()  # asks Linux for the AMX registers; without them vLLM's attention is an illegal instruction
    lengths = [300, 0, 37, 128]
    for isa in {_get_attn_isa(dtype, page_size, d), "vec16", *(["vec"] if d % 32 == 0 else [])}:
        x = case(isa, dtype, d, page_size, lengths)
        written = x._replace(cache=torch.zeros_like(x.cache))
        halves = written.cache.view(*x.cache.shape[:2], 2 * page_size, d).chunk(2, 2)
        k, v = kit.kv(1, HEADS, sum(lengths), d, dtype)
        slots = [
            x.table[i, t // page_size] * page_size + t % page_size for i, n in enumerate(lengths) for t in range(n)
        ]
        tokens = [y[0].transpose(0, 1).contiguous() for y in (k, v)]  # [tokens, Hk, d]
        vllm_ops.cpu_attn_reshape_and_cache(*tokens, *halves, torch.tensor(slots, dtype=torch.int64), isa)

        policy = kvops.KeyDiff(2 * page_size)
        with as_rows(written.cache, x.table, **x.options) as rows:
            first = 0
            for i, n in enumerate(lengths):  # the written tokens, as rows
                front = torch.arange(n).expand(1, HEADS, n)
                found = ops.gather_kv(*rows, front, block_table=x.table[i : i + 1])
                assert kit.same(found, (y[:, :, first : first + n] for y in (k, v)))
                first += n
            kept = policy.compress_(*rows, lengths=x.lengths, block_table=x.table)
            front = torch.arange(kept.indices.shape[2]).expand_as(kept.indices)
            k_kept, v_kept = ops.gather_kv(*rows, front.where(kept.indices >= 0, -1), block_table=x.table)

        live = kept.lengths.nonzero().flatten()  # vLLM never schedules a request without tokens
        q = kit.randn(len(live), 2 * HEADS, d, seed=1).to(dtype)
        starts, held, out = torch.arange(len(live) + 1, dtype=torch.int32), kept.lengths[live], torch.empty_like(q)
        plan = vllm_ops.cpu_attn_get_scheduler_metadata(
            len(live), 2 * HEADS, HEADS, d, held, dtype, starts, True, -1, isa, True
        )
        vllm_ops.cpu_attention_with_kv_cache(
            q, *halves, out, starts, held, d**-0.5, True, None, -1, x.table[live], 0.0, plan, None
        )
        for i, request in enumerate(live.tolist()):
            n = int(held[i])
            y = (z[request : request + 1, :, :n].double() for z in (k_kept, v_kept))
            exact = torch.nn.functional.scaled_dot_product_attention(
                q[i : i + 1, :, None].double(), *y, enable_gqa=True
            )
            tolerance = 1e-5 if dtype == torch.float32 else 3e-2
            torch.testing.assert_close(out[i].double(), exact[0, :, 0], rtol=tolerance, atol=tolerance)


@given(cases())
@kit.examples(30)
def test_an_eviction_reads_shared_pages_once_and_writes_others(x):
    """What requests share is copied once. Written pages hold it as tiles again; others are unchanged."""
    if x.cache.dtype.itemsize == 1:
        return  # fp8 caches are not evicted
    (own,) = (x.table.flatten() >= 0).nonzero(as_tuple=True)
    twice, layout = torch.cat((x.table, x.table)), Tiles(x.cache, x.isa)
    places = torch.cat((own, own + x.table.numel()))
    (k, v), table = layout.read(Blocks(twice, places, places[:0]))
    pages = x.table.flatten()[own].long()
    assert len(k) == len(pages.unique()) and torch.equal(table >= 0, twice >= 0)
    for found, all_rows in zip((k, v), x.rows()):
        assert kit.same([found[table.flatten()[places].long()]], [all_rows[torch.cat((pages, pages))]])
    before, distinct = x.cache.clone(), pages.unique()
    x.cache[distinct] = 0
    layout.write(distinct, k, v)
    assert kit.same([x.cache], [before])
