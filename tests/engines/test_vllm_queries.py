"""The scores that vLLM's queries produce, however the tokens are split into steps. Needs no vLLM."""

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops.cache import by_slot
from kvops.cache.queries import AllQueries, Batch, LastQueries, LayerMemory, observer
from kvops.cache.schedule import Schedule
from kvops.methods.view import View
from kvops.vllm.layouts import Blocks, Rows, Tiles
from kvops.vllm.plan import Plan
from kvops.vllm.rings import RequestRingTable
from kvops.vllm.steps import Step, StepSlots

HEADS, GROUP, D, SIZE = 2, 2, 32, 32
CPU, NONE = torch.device("cpu"), torch.empty(0)
KEYS = Tiles(NONE, "vec").keys  # the last queries do not read keys


@dataclass
class Request:
    name: int
    block: int
    n: int = 0  # tokens computed


def query(name: int, position: int) -> torch.Tensor:
    """Return a query [Hq, d] that differs for each token."""
    return torch.arange(3.0)[:, None] + torch.tensor([float(name), float(position)])


def batch(rows: list[tuple[int, ...]], requests) -> Batch:
    """rows: per request its first block, where its tokens begin in the step, and its tokens before and after it."""
    blocks, *rest = torch.tensor(rows).unbind(1)
    return Batch(blocks[:, None], *rest, requests)


@given(st.integers(1, 9), st.integers(1, 4), st.randoms(use_true_random=False))
@kit.examples(100)
def test_a_move_sees_the_last_queries_before_its_end(window, most, draw):
    """Requests arrive, finish and are preempted; new requests reuse their first blocks; steps have any size."""
    last, memory = LastQueries(window, RequestRingTable(most, CPU)), LayerMemory((9, 1, SIZE), {}, CPU)
    living, blocks, names = list[Request](), list(range(most + 1)), iter(range(10**6))
    for _ in range(30):
        for x in [x for x in living if draw.random() < 0.1]:
            living.remove(x)
            blocks.append(x.block)
        # A step leaves a request out only if the step is full, and no request joins a full step.
        full = draw.random() < 0.3
        while len(living) < most and not full and draw.random() < 0.5:
            living.append(Request(next(names), blocks.pop(draw.randrange(len(blocks)))))
        chosen = [x for x in living if not full or draw.random() < 0.5]
        draw.shuffle(chosen)
        if not chosen:
            continue
        rows, queries, ends = list[tuple[int, ...]](), list[torch.Tensor](), list[tuple[int, int]]()
        for row, x in enumerate(chosen):
            new = draw.choice((1, 1, 2, 5, 20))
            rows.append((x.block, len(queries), x.n, x.n + new))
            queries += (query(x.name, x.n + i) for i in range(new))
            ends += ((row, end) for end in range(max(window, x.n + 1), x.n + new + 1) if draw.random() < 0.4)
            x.n += new
        observation = last.step(batch(rows, chosen), ends, NONE, NONE)
        found = observation(memory, torch.stack(queries), KEYS, {})
        expected = [torch.stack([query(chosen[row].name, p) for p in range(end - window, end)], 1) for row, end in ends]
        assert torch.equal(found, torch.stack(expected)) if ends else found is None


def test_as_many_queries_are_remembered_as_requests_live():
    last, memory = LastQueries(8, RequestRingTable(3, CPU)), LayerMemory((9, 1, SIZE), {}, CPU)
    requests = [Request(name, 0) for name in range(20)]
    for x in requests:
        observation = last.step(batch([(0, 0, 0, 5)], [x]), [], NONE, NONE)
        observation(memory, torch.zeros(5, 4, D), KEYS, {})
    assert len(memory.last(0, torch.zeros(0, 4, D))) <= 2 * 3 * 7
    last.step(batch([(0, 0, 5, 9)], requests[-1:]), [(0, 9)], NONE, NONE)
    with kit.refuses("from token 1 on", "those from 5 on", kind=RuntimeError):
        last.step(batch([(0, 0, 5, 9)], requests[:1]), [(0, 9)], NONE, NONE)  # the least recently used of the 20


def test_a_request_may_begin_after_a_shared_prefix():
    """Only the queries that an eviction asks for must have been seen. A preempted request begins anew."""
    last, x = LastQueries(8, RequestRingTable(1, CPU)), Request(0, 0)

    def step(before, after, *ends):
        last.step(batch([(0, 0, before, after)], [x]), [(0, end) for end in ends], NONE, NONE)

    step(32, 36)
    step(36, 40, 40)
    step(40, 41, 41)
    with kit.refuses("from token 57 on", "those from 58 on", kind=RuntimeError):
        step(58, 65, 65)
    step(32, 40, 40)
    step(96, 100)
    step(100, 103)
    with kit.refuses("from token 95 on", "those from 96 on", kind=RuntimeError):
        step(103, 103, 103)


@pytest.mark.parametrize(
    "group_reduce, isa, dtype",
    [
        ("mean", "vec", torch.float32),
        ("sum", "vec", torch.float16),
        ("mean", "amx", torch.bfloat16),
        ("mean", None, torch.float32),
    ],
)
def test_what_all_queries_observe_is_that_of_one_call(group_reduce, isa, dtype):
    """Three requests in steps of different sizes, some with more than 256 prompt tokens."""
    draw, rule = random.Random(0), kvops.H2O(64, group_reduce=group_reduce)
    lengths, scale = [330, 70, 41], 0.2
    k, v = kit.kv(3, HEADS, max(lengths), D, dtype)
    q = kit.randn(3, HEADS * GROUP, max(lengths), D, seed=1).to(dtype)
    pools = torch.randperm(40, generator=torch.Generator().manual_seed(0)).int()
    cache = kit.randn(40, HEADS, SIZE, 2 * D, seed=2).to(dtype)
    table = torch.full((3, 12), 5, dtype=torch.int32)  # vLLM's tables may hold any block after the request's own
    table[0, :11], table[1, :3], table[2, :2] = pools[:11], pools[11:14], pools[14:16]
    layout = Tiles(cache, isa) if isa else Rows(cache)
    memory = LayerMemory(cache.shape[:3], {"scores": torch.float32}, CPU)
    memory.slots["scores"].fill_(torch.nan)  # left by earlier requests
    seen = observer(rule, SIZE, RequestRingTable(3, CPU))
    assert isinstance(seen, AllQueries)
    n = [0, 0, 0]
    while n != lengths:
        new = [min(draw.choice((1, 1, 40, 300)), end - x) for x, end in zip(n, lengths)]
        rows, queries = list[tuple[int, ...]](), list[torch.Tensor]()
        chosen = [i for i in range(3) if new[i]]
        for i in chosen:
            rows.append((0, sum(map(len, queries)), n[i], n[i] + new[i]))
            queries.append(q[i, :, n[i] : n[i] + new[i]].transpose(0, 1))
            own = table[i : i + 1, : -(-lengths[i] // SIZE)]
            with layout.rows(Blocks(own, *[torch.arange(own.numel())] * 2)) as (k_rows, _):
                for t in range(n[i], n[i] + new[i]):
                    k_rows[table[i, t // SIZE], :, t % SIZE] = k[i, :, t]
            n[i] += new[i]
        observation = seen.step(batch(rows, chosen), [], table[chosen], torch.tensor([n[i] for i in chosen]))
        assert observation(memory, torch.cat(queries), layout.keys, {"scale": scale}) is None
    for i, length in enumerate(lengths):
        view = View(k[i : i + 1, :, :length], v[i : i + 1, :, :length])
        rule.observe(view, q[i : i + 1, :, :length], None, {"scale": scale})
        found = by_slot.read(memory.slots["scores"], table[i : i + 1])[..., :length]
        torch.testing.assert_close(found, view.observed)


@pytest.mark.parametrize(
    "policy, window",
    [
        (kvops.SnapKV(64, 20), 20),
        (kvops.ChunkKV(64), 32),
        (kvops.ProtoKV(64), 8),
        (kvops.ProtoKV(64, window=16, alpha=4), 16),
        (kvops.ProtoKV(64, window=4, alpha=16), 16),
        (kvops.TOVA(64), 1),
        (kvops.H2O(64), None),
        (kvops.KeyDiff(64), None),
    ],
    ids=repr,
)
def test_how_many_queries_a_policy_asks_for(policy, window):
    assert getattr(observer(policy, SIZE, RequestRingTable(4, CPU)), "window", None) == window


@pytest.mark.parametrize("policy", [kvops.SnapKV(64, 20), kvops.ChunkKV(64), kvops.RKV(64), kvops.TOVA(64)], ids=repr)
def test_a_step_leaves_out_requests_that_no_longer_observe(policy):
    """Beyond their prompts the queries of SnapKV and ChunkKV are not stored. A request that is computed again is."""
    plan, in_decode = Plan(Schedule(policy), SIZE), isinstance(policy, (kvops.RKV, kvops.TOVA))
    seen = observer(policy, SIZE, RequestRingTable(1, CPU))

    def stored(*rows: tuple[int, int, int]) -> int:
        """rows: each request's tokens before and after the step, and those of its prompt."""
        before, after, prompts = torch.tensor(rows).unbind(1)
        new, table = after - before, torch.arange(4 * len(rows), dtype=torch.int32).view(-1, 4)
        now = Batch(table, new.cumsum(0) - new, before, after, rows)
        step = Step.of(plan, seen, StepSlots.of(plan, now, prompts.tolist()), now, prompts.tolist())
        return 0 if step is None or step.observation is None else len(step.observation.new_rows)

    room = seen.room
    assert stored((0, 60, 60)) == min(60, room)
    assert stored((60, 61, 60)) == stored((61, 62, 60)) == (min(1, room) if in_decode else 0)
    assert stored((0, 40, 60)) == stored((0, 60, 60)) == min(40, room)
