"""The work after vLLM's attention, in each of vLLM's cache layouts. Needs no vLLM."""

import pytest
import torch
from torch import Tensor

import kit
import kvops
from kvops.cache.queries import Batch, LayerMemory, observer
from kvops.cache.schedule import Schedule
from kvops.methods.view import View
from kvops.vllm import steps
from kvops.vllm.layouts import Blocks, Layout, Rows, Tiles
from kvops.vllm.plan import Plan
from kvops.vllm.rings import RequestRingTable
from kvops.vllm.steps import Layer, Step, StepSlots

HEADS, GROUP, D, SIZE, BLOCKS, TOKENS = 2, 2, 32, 32, 60, 600
LAYERS = 3
#: vLLM's `KVCacheLayout`: the memory order of layers, blocks, heads, slots and channels.
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
STATISTICS = kit.query_statistics(LAYERS, HEADS * GROUP, D)
POLICIES = [
    kvops.KeyDiff(125),
    kvops.StreamingLLM(4 * SIZE, positions="original"),
    kvops.LagKV(50, 0.3, sinks=7),
    kvops.L2(100, skip_layers=()),
    kvops.SnapKV(123, 8),
    kvops.RKV(100, 8, buffer=20),
    kvops.VaSE(100, 8, buffer=20),
    kvops.ProtoKV(100, window=8, alpha=16, buffer=20),
    kvops.TOVA(100, head_mode="per_head"),
    kvops.H2O(110),
    kvops.Random(110, seed=3),
    kvops.TriAttention(100, recent=SIZE, buffer=20, statistics=STATISTICS),
    kvops.ExpectedAttention(100, future=8, statistics=STATISTICS),
]
#: Tokens of the two requests' prompts.
PROMPTS = [320, 290]


#: The first tokens of both, whose blocks they share if the plan says so.
SHARED = 2 * SIZE


def tokens(layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return K and V of two requests in a layer, [2, Hk, TOKENS, d]."""
    k, v = (kit.randn(2, HEADS, TOKENS, D, seed=2 * layer + i).to(dtype) for i in (1, 2))
    for x in (k, v):
        x[1, :, :SHARED] = x[0, :, :SHARED]
    return k, v


def caches(layout: str, dtype=torch.float32) -> list[Tensor]:
    """Return the layers of a cache, as the backends get them: [blocks, Hk, slots, 2 * d] each."""
    sizes = dict(zip("LBHNC", (LAYERS, BLOCKS, HEADS, SIZE, 2 * D)))
    memory = kit.randn(*(sizes[x] for x in layout)).to(dtype)
    return list(memory.permute(*(layout.index(x) for x in "LBHNC")).unbind())


def batch(table: Tensor, before: list[int], after: list[int]) -> Batch:
    before, after = torch.tensor(before), torch.tensor(after)
    new = after - before
    return Batch(table, new.cumsum(0) - new, before, after, range(len(new)))


def all_of(table: Tensor) -> Blocks:
    """Return all blocks of a table without -1 and without repeated blocks."""
    return Blocks(table, *[torch.arange(table.numel())] * 2)


def run(plan: Plan, layouts: list[Layout], ends: list[tuple[list[int], list[int]]]) -> Tensor:
    """Run the steps of two requests between these token counts, and return their block table.

    Each has half of the pool's blocks, shuffled.
    """
    table = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(0)).int().view(2, -1)
    if plan.shared:
        table[1, : SHARED // SIZE] = table[0, : SHARED // SIZE]
    dtype = layouts[0].kv_cache.dtype
    q = kit.randn(2, TOKENS, HEADS * GROUP, D, seed=3).to(dtype)
    layers = []
    for i, layout in enumerate(layouts):
        memory = LayerMemory(layout.kv_cache.shape[:3], plan.kinds, torch.device("cpu"))
        for pool in memory.slots.values():
            pool.fill_(-1)
        layers.append(Layer(layout, memory, (i, LAYERS), {"scale": D**-0.5}))
    seen, due = observer(plan.policy, SIZE, RequestRingTable(2, torch.device("cpu"))), None
    for before, after in ends:
        if due is not None:
            due.run(layers)
        now = batch(table.clone(), before, after)
        held = StepSlots.of(plan, now, PROMPTS)
        new = [(row, t) for row, (a, b) in enumerate(zip(before, after)) for t in range(a, b)]
        slots = held.slots
        if slots is None:  # vLLM's own
            slots = torch.stack([table[row, t // SIZE] * SIZE + t % SIZE for row, t in new])
        for i, layout in enumerate(layouts):
            row, t = torch.tensor(new).unbind(1)
            with layout.rows(all_of(table.unique()[None])) as pages:
                for x, pool in zip(tokens(i, dtype), pages):
                    pool[slots // SIZE, :, slots % SIZE] = x[row, :, t]
        step = Step.of(plan, seen, held, now, PROMPTS)
        now.table.fill_(-1)  # as the engine's own changes for the next step
        if seen is None:
            due = step
        elif step is not None:
            query = torch.cat([q[row, a:b] for row, (a, b) in enumerate(zip(before, after))])
            for layer in layers:
                step.run([layer], query)
    if due is not None:
        due.run(layers)
    return table


def dense(plan: Plan, layer: int, row: int, ends: list[int], dtype: torch.dtype) -> Tensor:
    """Compute a request's cache without pages: [Hk, held, 2 * d]. ends: its number of tokens after each step."""
    k, v = (x[row] for x in tokens(layer, dtype))
    q = kit.randn(2, TOKENS, HEADS * GROUP, D, seed=3).to(dtype)[row]
    slots, rows = torch.empty(HEADS, 0, 2 * D, dtype=dtype), torch.cat((k, v), -1)
    sums, position, logits = torch.zeros(1, HEADS, 0), torch.empty(1, HEADS, 0).long(), {"scale": D**-0.5}
    for before, n in zip([0, *ends], ends):
        if not (new := n - before):
            continue
        slots = torch.cat((slots, rows[:, before:n]), 1)
        position = torch.cat((position, torch.arange(before, n).expand(1, HEADS, -1)), 2)
        sums = torch.nn.functional.pad(sums, (0, new))
        view = View(*slots[None].split(D, -1), seen=n, new=new, layer=layer, num_layers=LAYERS, kept=position)
        if plan.policy.needs.per_slot:
            visible = slots.shape[1] - new + 1 + torch.arange(new, dtype=torch.int32)
            sums += plan.policy.summed(q[None, before:n].transpose(1, 2), view, visible, None, None, logits)
            view.observed = sums.clone()
        if (keep := plan.schedule.held(n, PROMPTS[row])) < slots.shape[1]:
            rule = plan.schedule.rule(before, n, PROMPTS[row])
            if isinstance(rule, kvops.QueryPolicy) and not rule.needs.per_slot:
                window = rule.rows_at(n, PROMPTS[row])
                rule.observe(view, q[None, n - window : n].transpose(1, 2), None, logits)
            kept = rule.select(view)
            assert kept.shape[2] == keep
            sums, position = sums.gather(2, kept), position.gather(2, kept)
            slots = slots.gather(1, kept[0, ..., None].expand(-1, -1, 2 * D))
    return slots


def steps_of(plan: Plan, wanted: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """Cut steps to these token counts where the schedule says."""
    found, n = [], [0, 0]
    for ends in wanted:
        while n != ends:
            new = [plan.schedule.cut(a, b - a, p) if b > a else 0 for a, b, p in zip(n, ends, PROMPTS)]
            found.append((n, n := [a + b for a, b in zip(n, new)]))
    return found


WANTED = [[200, 140], [320, 141], [321, 290], [370, 290], [400, 372], [450, 372], [600, 580]]


@pytest.mark.parametrize("order", [*LAYOUTS, "tiles"])
@pytest.mark.parametrize(
    "block, shared, policy",
    [(block, False, x) for block in (None, 72) for x in POLICIES]
    + [(None, True, x) for x in POLICIES if not x.needs.per_slot],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_what_stays_in_each_layout(order, policy, block, shared):
    """Two requests of different lengths, some of whose evictions are in the same step.

    If no queries observe, all layers evict together, just before the next step writes.
    """
    plan, pools = Plan(Schedule(policy, block), SIZE, shared), caches("LBHNC" if order == "tiles" else order)
    layouts = [Tiles(x, "vec") if order == "tiles" else Rows(x) for x in pools]
    counts = steps_of(plan, WANTED)
    table = run(plan, layouts, counts)
    for layer, layout in enumerate(layouts):
        for row in range(2):
            ends = [after[row] for _, after in counts]
            expected, state = dense(plan, layer, row, ends, torch.float32), plan.at(ends[-1], PROMPTS[row])
            own = table[row, torch.from_numpy(plan.columns([state], -(-state.held // SIZE))[0])]
            assert state.gaps and expected.shape[1] == state.held
            assert torch.equal(read(layout, own)[:, : state.held], expected)
            if shared:  # its prompt is as it was
                prompt = torch.cat(tokens(layer, torch.float32), -1)[row, :, : PROMPTS[row]]
                found = read(layout, table[row, : -(-PROMPTS[row] // SIZE)])
                assert torch.equal(found[:, : PROMPTS[row]], prompt)


def read(layout: Layout, blocks: Tensor) -> Tensor:
    """Return the rows of K and V in these blocks, [Hk, slots, 2 * d]."""
    with layout.rows(all_of(blocks)) as pages:
        return torch.cat([x[blocks].transpose(0, 1).flatten(1, 2) for x in pages], -1)


def test_one_call_moves_the_rows_of_all_layers(monkeypatch):
    plan, calls = Plan(Schedule(kvops.KeyDiff(125)), SIZE), []
    compact = steps.compact_kv_
    monkeypatch.setattr(
        steps, "compact_kv_", lambda k, *args, **options: calls.append(len(k)) or compact(k, *args, **options)
    )
    run(plan, [Rows(x) for x in caches("LBNHC")], steps_of(plan, WANTED))
    assert len(calls) > 3 and {*calls} == {LAYERS}


@pytest.mark.parametrize("order", LAYOUTS)
def test_rows(order):
    cache, table = caches(order)[1], torch.tensor([[3, 0, 7], [5, 39, -1]], dtype=torch.int32)
    rows = Rows(cache)
    with rows.rows(Blocks(table, *[torch.arange(5)] * 2)) as (k, v):
        assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
        assert torch.equal(torch.cat((k, v), -1), cache)
    view = rows.keys(table)
    assert torch.equal(view.k, cache[..., :D]) and view.block_table is table


@pytest.mark.parametrize("policy", [*POLICIES, kvops.KeyDiff(4 * SIZE, head_mode="shared")], ids=repr)
@pytest.mark.parametrize("shared", [False, True])
def test_nothing_is_read_back_from_the_device(policy, shared):
    """Meta tensors have no values, so reading one raises."""
    plan = Plan(Schedule(policy), SIZE, shared)
    cache = torch.empty(BLOCKS, HEADS, SIZE, 2 * D, dtype=torch.bfloat16, device="meta")
    table = torch.empty(2, BLOCKS // 2, dtype=torch.int32, device="meta")
    memory, evictions = LayerMemory(cache.shape[:3], plan.kinds, cache.device), 0
    seen = observer(plan.policy, SIZE, RequestRingTable(2, cache.device))
    for before, after in steps_of(plan, WANTED):
        now = batch(table, before, after)
        held = StepSlots.of(plan, now, PROMPTS)
        assert held.table.device == cache.device and held.lengths.device.type == "cpu"
        step = Step.of(plan, seen, held, now, PROMPTS)
        if step is not None:
            evictions += len(step.evictions)
            tokens = int((now.after - now.before).sum())
            query = torch.empty(tokens, HEADS * GROUP, D, dtype=cache.dtype, device="meta")
            step.run([Layer(Rows(cache), memory, (1, LAYERS), {"scale": 1.0})], query)
    assert evictions > 1


def test_meta_tensors_notice_a_read():
    with pytest.raises(RuntimeError, match="meta"):
        torch.empty(1, device="meta").item()
