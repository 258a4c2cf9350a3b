"""The work after vLLM's attention, in each of vLLM's cache layouts. Needs no vLLM."""

import pytest
import torch
from torch import Tensor

import kit
import kvops
from kvops.cache.queries import Batch, Remembered, observer
from kvops.methods.base import View
from kvops.vllm.layouts import Blocks, Layout, Rows, Tiles
from kvops.vllm.plan import Plan, plan
from kvops.vllm.rings import DeviceRings
from kvops.vllm.steps import Held, Step

HEADS, GROUP, D, SIZE, BLOCKS, TOKENS = 2, 2, 32, 32, 40, 600
LAYERS = 3
#: vLLM's `KVCacheLayout`: the memory order of layers, blocks, heads, slots and channels.
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
STATISTICS = kit.query_statistics(LAYERS, HEADS * GROUP, D)
POLICIES = [
    kvops.KeyDiff(4 * SIZE),
    kvops.StreamingLLM(4 * SIZE, positions="original"),
    kvops.LagKV(4 * SIZE, 0.5, sinks=SIZE),
    kvops.L2(4 * SIZE, skip_layers=()),
    kvops.SnapKV(4 * SIZE, 8),
    kvops.TOVA(4 * SIZE, head_mode="per_head"),
    kvops.H2O(4 * SIZE),
    kvops.TriAttention(4 * SIZE, recent=SIZE, statistics=STATISTICS),
    kvops.ExpectedAttention(4 * SIZE, future=8, statistics=STATISTICS),
]


def layer(layout: str, dtype=torch.float32) -> Tensor:
    """Return one layer of a cache for all layers, as the backends get it: [blocks, Hk, slots, 2 * d]."""
    sizes = dict(zip("LBHNC", (LAYERS, BLOCKS, HEADS, SIZE, 2 * D)))
    memory = kit.randn(*(sizes[x] for x in layout)).to(dtype)
    return memory.permute(*(layout.index(x) for x in "LBHNC"))[1]


def batch(table: Tensor, before: list[int], after: list[int]) -> Batch:
    before, after = torch.tensor(before), torch.tensor(after)
    new = after - before
    return Batch(table, new.cumsum(0) - new, before, after)


def all_of(table: Tensor) -> Blocks:
    """Return all blocks of a table without -1 and without repeated blocks."""
    return Blocks(table, *[torch.arange(table.numel())] * 2)


def write(layout: Layout, step: Batch, k: Tensor, v: Tensor) -> None:
    """Write a step's tokens to the slots that the engine assigns. k, v: [rows, Hk, tokens, d], of all steps."""
    with layout.rows(all_of(step.table)) as pages:
        for row, (a, b) in enumerate(zip(step.before.tolist(), step.after.tolist())):
            for t in range(a, b):
                for x, pool in zip((k, v), pages):
                    pool[step.table[row, t // SIZE], :, t % SIZE] = x[row, :, t]


def run(rule_plan: Plan, cache: Tensor, layout: Layout, steps: list[tuple[list[int], list[int]]]) -> None:
    """Run all steps of two requests. Each has half of the pool's blocks, shuffled."""
    table = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(0)).int().view(2, -1)
    k, v = (kit.randn(2, HEADS, TOKENS, D, seed=i).to(cache.dtype) for i in (1, 2))
    q = kit.randn(2, TOKENS, HEADS * GROUP, D, seed=3).to(cache.dtype)
    memory = Remembered(cache.shape[:3], rule_plan.kinds, cache.device)
    for pool in memory.slots.values():
        pool.fill_(-1)
    seen = observer(rule_plan.rule, SIZE, DeviceRings(2, cache.device))
    for before, after in steps:
        now = batch(table, before, after)
        write(layout, now, k, v)
        held = Held.of(rule_plan, now) or Held(now.table, now.after)
        step = Step.of(rule_plan, seen, held, now)
        if step is not None:
            query = torch.cat([q[row, a:b] for row, (a, b) in enumerate(zip(before, after))])
            step.run(memory, query, layout, (1, LAYERS), {"scale": D**-0.5})


def dense(rule_plan: Plan, row: int, ends: list[int], dtype: torch.dtype) -> Tensor:
    """Compute a request's cache without pages: [Hk, any, 2 * d]. ends: its number of tokens after each step."""
    k, v = (kit.randn(2, HEADS, TOKENS, D, seed=i).to(dtype)[row] for i in (1, 2))
    q = kit.randn(2, TOKENS, HEADS * GROUP, D, seed=3).to(dtype)[row]
    slots, rule = torch.cat((k, v), -1), rule_plan.rule
    for before, after in zip([0, *ends], ends):
        for move in rule_plan.moves(before // SIZE, after // SIZE):
            looked_at = (torch.tensor(move.blocks)[:, None] * SIZE + torch.arange(SIZE)).flatten()
            rows = slots[:, looked_at]
            place = dict(seen=move.end * SIZE, new=SIZE, layer=1, num_layers=LAYERS)
            view = View(*rows[None].split(D, -1), **place)
            if rule.uses_queries:
                window, end = rule.rows_at(0, 0), move.end * SIZE
                rule.observe(view, q[None, end - window : end].transpose(1, 2), None, {"scale": D**-0.5})
            kept = rule.select(view)[0, :, : rule_plan.kept * SIZE]
            slots[:, looked_at[: kept.shape[1]]] = rows.gather(1, kept[..., None].expand(-1, -1, 2 * D).long())
    return slots


STEPS = [([0, 0], [200, 140]), ([200, 140], [320, 141]), ([320, 141], [321, 300]), ([321, 300], [600, 580])]


@pytest.mark.parametrize("policy", [x for x in POLICIES if not x.by_slot], ids=lambda x: x.name)
@pytest.mark.parametrize("order", [*LAYOUTS, "tiles"])
def test_what_stays_in_each_layout(order, policy):
    """Two requests of different lengths are evicted in the same step."""
    rule_plan, cache = plan(policy, SIZE), layer("LBHNC" if order == "tiles" else order)
    layout = Tiles(cache, "vec") if order == "tiles" else Rows(cache)
    table = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(0)).view(2, -1)
    run(rule_plan, cache, layout, STEPS)
    for row in range(2):
        ends = [after[row] for _, after in STEPS]
        expected, filled = dense(rule_plan, row, ends, cache.dtype), ends[-1] // SIZE
        gone = {block for gap in rule_plan.gaps(filled) for block in gap}
        assert gone
        held = [block for block in range(filled + 1) if block not in gone]
        with layout.rows(all_of(table[row, held].int())) as pages:
            for block in held:
                used = min(SIZE, ends[-1] - block * SIZE)
                found = torch.cat([x[table[row, block], :, :used] for x in pages], -1)
                assert torch.equal(found, expected[:, block * SIZE : block * SIZE + used]), block


@pytest.mark.parametrize("order", LAYOUTS)
def test_rows(order):
    cache, table = layer(order), torch.tensor([[3, 0, 7], [5, 39, -1]], dtype=torch.int32)
    rows = Rows(cache)
    with rows.rows(Blocks(table, *[torch.arange(5)] * 2)) as (k, v):
        assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
        assert torch.equal(torch.cat((k, v), -1), cache)
    view = rows.keys(table)
    assert torch.equal(view.k, cache[..., :D]) and view.block_table is table


@pytest.mark.parametrize("policy", [*POLICIES, kvops.KeyDiff(4 * SIZE, head_mode="shared")], ids=repr)
def test_nothing_is_read_back_from_the_device(policy):
    """Meta tensors have no values, so reading one raises."""
    rule_plan = plan(policy, SIZE)
    cache = torch.empty(BLOCKS, HEADS, SIZE, 2 * D, dtype=torch.bfloat16, device="meta")
    table = torch.empty(2, BLOCKS // 2, dtype=torch.int32, device="meta")
    memory, evictions = Remembered(cache.shape[:3], rule_plan.kinds, cache.device), 0
    seen = observer(rule_plan.rule, SIZE, DeviceRings(2, cache.device))
    for before, after in STEPS:
        now = batch(table, before, after)
        held = Held.of(rule_plan, now) or Held(now.table, now.after)
        assert held.table.device == cache.device and held.lengths.device.type == "cpu"
        step = Step.of(rule_plan, seen, held, now)
        if step is not None:
            evictions += step.eviction is not None
            tokens = int((now.after - now.before).sum())
            query = torch.empty(tokens, HEADS * GROUP, D, dtype=cache.dtype, device="meta")
            step.run(memory, query, Rows(cache), (1, LAYERS), {"scale": 1.0})
    assert evictions > 1


def test_meta_tensors_notice_a_read():
    with pytest.raises(RuntimeError, match="meta"):
        torch.empty(1, device="meta").item()
