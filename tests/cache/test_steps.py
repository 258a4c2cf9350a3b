"""Random schedules of everything that runs steps, with failures, compared with each request alone in dense memory.

Requests join, take prompts in chunks and decoded tokens in steps of any of them, are evicted together, and leave. Some
steps fail at one of their torch calls, kvops' operators included. A `PagedCache` is then as before, and the step is
repeated. An engine's requests of that step start again, and the others do not notice.
"""

import random

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kit
import kvops
from kvops import ops
from kvops.methods.queries import QueryPolicy
from kvops.methods.view import View
from test_paged_cache import DV, GROUP, HEADS, LAYERS, STATISTICS, Alone, D, Text, check_pages, paged, step

pytestmark = [kit.every_device, pytest.mark.usefixtures("one_thread")]

PROMPTS, TOKENS = (1, 3, 7, 12, 13, 20, 33, 33), 60
every_length = pytest.mark.parametrize(
    "steps", [pytest.param(40, id="short"), pytest.param(100, id="long", marks=pytest.mark.full)]
)


class Fails(TorchDispatchMode):
    """Raises Failure in place of the call number `at` of any operator, and counts the calls."""

    def __init__(self, at: int = -1):
        super().__init__()
        self.at, self.calls = at, 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.calls += 1
        if self.calls == self.at + 1:
            raise Failure(operator)
        return operator(*args, **kwargs or {})


class Failure(Exception):
    pass


class Schedule:
    """A random schedule. Subclasses run it in a cache or an engine and compare.

    Attributes:
        live: The requests by number, each with the text and the reference of a request alone.
    """

    def __init__(self, seed: int):
        self.rng, self.live, self.calls = random.Random(seed), {}, 100
        self.texts = [Text(x, TOKENS, layers=self.layers) for x in range(4)]
        self.failures = self.evictions = self.refused = 0

    layers = LAYERS

    def run(self, steps: int) -> None:
        rng = self.rng
        for turn in range(steps):
            while len(self.live) < 4 and (not self.live or rng.random() < 0.7):
                prompt = rng.choice(PROMPTS)
                text = rng.choice(self.texts)
                self.live[self.join(prompt)] = text, self.alone(prompt, text)
            counts = {}
            for x in rng.sample(sorted(self.live), rng.randint(1, len(self.live))):
                _, alone = self.live[x]
                due = alone.prompt - alone.seen
                # Half of the prompts end in this step, so that several are evicted in it.
                counts[x] = rng.choice((due, rng.randint(1, due))) if due > 0 else rng.choice((1, 1, 1, 2))
            if not self.fits(counts):
                self.refused += 1
                self.end(rng.choice(sorted(self.live)))
                continue
            every = steps > 50 and turn == 60  # each call of one step, one call of the others
            # Most steps fail close to their end, where they change something.
            at = 0 if every else rng.choice((-1, rng.randrange(self.calls), *(self.calls - rng.randrange(40),) * 3))
            while True:
                try:
                    with Fails(at) as calls:
                        outs = self.step(counts)
                    break
                except Failure:
                    self.failures += 1
                    counts = self.failed(counts)
                    at = at + 1 if every else -1
            self.calls = calls.calls
            self.check(counts, outs)
            for x in [x for x, (_, alone) in self.live.items() if alone.seen > TOKENS - 10 or rng.random() < 0.05]:
                self.end(x)

    def end(self, x) -> None:
        self.leave(x)
        del self.live[x]


class ByHead(Alone):
    """A request alone whose heads differ in length from the end of its prompt on."""

    heads = None  # by layer and head: k, v [1, 1, n, any] and positions [n]
    dv = DV

    def evict(self, memory, rule, layer) -> None:
        k, v = memory["k"], memory["v"]
        view = View(k, v, seen=self.seen, new=self.seen, layer=layer, num_layers=LAYERS)
        if rule.needs.per_slot:
            view.observed = memory["scores"]
        elif isinstance(rule, QueryPolicy):
            rule.observe(view, memory["q"][:, :, -rule.rows_at(self.seen, self.prompt) :], None, {})
        self.heads = self.heads or []
        self.heads.append([])
        for head, slots in enumerate(rule.select(view)[0]):
            slots = slots[slots >= 0]
            self.heads[layer].append((k[:, head : head + 1, slots], v[:, head : head + 1, slots], slots))

    def step(self, text, count, width=None):
        if self.heads is None:
            return super().step(text, count, width)
        outs, width = [], width or count
        for layer, heads in enumerate(self.heads):
            q, k, v = (x[None] for x in text.tokens(layer, self.seen, count, width))
            parts = []
            for head, (old_k, old_v, positions) in enumerate(heads):
                own = [torch.cat((old, x[:, head : head + 1, :count]), 2) for old, x in ((old_k, k), (old_v, v))]
                visible = torch.arange(width, dtype=torch.int32) + (len(positions) + 1)
                visible[count:] = 0
                part = ops.window_attention(q[:, head * GROUP : (head + 1) * GROUP], *own, visible)[0]
                parts.append(part[:, :, :count])
                new = torch.arange(self.seen, self.seen + count)
                heads[head] = *own, torch.cat((positions, new))
            outs.append(torch.cat(parts, 1))
        self.seen += count
        return outs

    def rows(self, layer: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
        """K, V and positions of a head."""
        if self.heads is not None:
            k, v, positions = self.heads[layer][head]
            return k[0, 0], v[0, 0], positions
        memory = self.layers[layer]
        if not isinstance(memory["k"], Tensor):
            return torch.empty(0, D), torch.empty(0, self.dv), torch.empty(0, dtype=torch.int64)
        return memory["k"][0, head], memory["v"][0, head], memory["positions"][0, head]


class InPagedCache(Schedule):
    def __init__(self, policy, by_head: bool, seed: int):
        super().__init__(seed)
        self.cache = paged(policy, num_pages=100 if by_head else 18, by_head=by_head)

    def alone(self, prompt, text):
        return ByHead(self.cache.policy, prompt) if self.cache.by_head else EachHead(self.cache.policy, prompt)

    def join(self, prompt):
        return self.cache.join(prompt)

    def leave(self, x):
        self.cache.leave(x)
        check_pages(self.cache)

    def fits(self, counts):
        step, free = (list(counts), list(counts.values())), self.cache.free
        if (needed := self.cache.pages_for(*step)) <= free:
            return True
        with kit.refuses(f"needs {needed} more pages, got {free} free of", kind=kvops.OutOfPages):
            self.cache.step(*step)
        self.check_rows()
        return False

    def step(self, counts):
        return step(self.cache, {x: text for x, (text, _) in self.live.items()}, counts)

    def failed(self, counts):
        self.check_rows()
        return counts

    def check(self, counts, outs):
        held = {x: self.cache.held(x) for x in counts}
        for row, (x, t) in enumerate(counts.items()):
            text, alone = self.live[x]
            before = alone.seen
            for own, out in zip(alone.step(text, t, max(counts.values())), outs):
                assert kit.same(out[row, :, :t], own[0]) and not out[row, :, t:].any()
            self.evictions += held[x] < before + t
        self.check_rows()

    def check_rows(self):
        cache = self.cache
        check_pages(cache)
        for x, (_, alone) in self.live.items():
            assert cache.seen(x) == alone.seen
            for layer in range(LAYERS):
                for head in range(HEADS):
                    k, v, positions = alone.rows(layer, head)
                    assert torch.equal(cache.positions(x, layer, head), positions.int())
                    pages = cache._chain(x, layer, head).pages
                    for pool, expected in ((cache.k[layer], k), (cache.v[layer], v)):
                        rows = pool[pages, 0 if cache.by_head else head].flatten(0, 1)[: len(expected)]
                        assert kit.same(rows, expected)


class EachHead(Alone):
    rows, heads, dv = ByHead.rows, None, DV


W_O = kit.randn(40, GROUP * HEADS * DV)
SHARED = [
    kvops.KeyDiff(12, buffer=1),
    kvops.KeyDiff(12, sinks=2, recent=0.25, buffer=5),
    kvops.LagKV(5, 0.4, sinks=2),
    kvops.Random(12, seed=3, buffer=4),
    kvops.SnapKV(12, window=4),
    kvops.SnapKV(12, window=4, score="drop", pooling="avg"),
    kvops.CriticalKV(12, window=4, w_o=W_O),
    kvops.DefensiveKV(12, window=4, w_o=W_O),
    kvops.RKV(12, window=4, buffer=6),
    kvops.VaSE(16, window=4, buffer=6),
    kvops.TOVA(12, buffer=3),
    kvops.H2O(12, buffer=3),
    kvops.TriAttention(12, recent=4, buffer=3, statistics=STATISTICS),
]
BY_HEAD = [
    kvops.KeyDiff(12, sinks=2, head_mode="adaptive", buffer=None),
    kvops.SnapKV(12, window=4, head_mode="adaptive"),
    kvops.SnapKV(12, window=4, head_mode="adaptive", score="drop"),
    kvops.CriticalKV(12, window=4, w_o=W_O, head_mode="adaptive"),
    kvops.PyramidKV(12, window=4),
    kvops.DefensiveKV(12, window=4, w_o=W_O, head_mode="adaptive"),
    kvops.H2O(12, recent=4, head_mode="adaptive", buffer=None),
    kvops.SATKV(12, window=4, kappa=2, head_mode="adaptive", buffer=None),
    kvops.TriAttention(12, recent=4, buffer=None, statistics=STATISTICS, head_mode="adaptive"),
]


@every_length
@pytest.mark.parametrize(
    ("policy", "by_head"),
    [(x, False) for x in SHARED] + [(x, True) for x in BY_HEAD],
    ids=lambda x: getattr(x, "name", x),
)
def test_paged_cache(policy, by_head, steps):
    schedule = InPagedCache(policy, by_head, seed=steps)
    schedule.run(steps)
    assert schedule.failures > steps / 10 and schedule.evictions and (schedule.refused or steps < 100)
    for x in list(schedule.live):
        schedule.end(x)
    assert schedule.cache.free == schedule.cache.num_pages


# ---- transformers' continuous batching -------------------------------------------------------------------------------


class InEngineAlone(EachHead):
    dv = D


class InEngine(Schedule):
    def __init__(self, policy, seed):
        from test_hf_continuous_batching import engine, greedy, make_model

        super().__init__(seed)
        for text in self.texts:
            text.layers = [(q, k, v[..., :D]) for q, k, v in text.layers]
        heads = dict(num_attention_heads=GROUP * HEADS, num_key_value_heads=HEADS, head_dim=D)
        model = make_model(num_hidden_layers=LAYERS, hidden_size=GROUP * HEADS * D, **heads)
        with kvops.hf.continuous_batching(model, policy):
            manager = model.init_continuous_batching(greedy(), engine(page_size=4))
            self.engine = manager._create_batch_processor().cache
        self.allocator = self.engine.cache_allocators["full_attention"]
        self.policy, self.joined = policy, 0

    def alone(self, prompt, text):
        return InEngineAlone(self.policy, prompt)

    def join(self, prompt):
        self.joined += 1
        self.allocator.join(f"{self.joined:04}", prompt)
        return f"{self.joined:04}"

    def leave(self, x):
        self.engine.free_blocks(x)

    def fits(self, counts):
        counts |= {x: self.allocator.cut(x, self.live[x][1].seen, t) for x, t in counts.items()}
        return True

    def step(self, counts):
        from kvops.hf.query_hook import AttentionInputs

        a, read, write, outs = self.allocator, [], [], []
        for x, t in counts.items():
            seen = self.live[x][1].seen
            for _ in range(a.needs_new_sectors(x, seen, t)):
                self.engine.pool.allocate_sector(a.index)
            a.allocate_cache_to_request(x, seen, t)
        a.scheduled(counts)
        for x, t in counts.items():
            assert a.get_seqlen_k(self.live[x][1].seen, t) == a.held(x, self.live[x][1].seen) + t
            read += a.get_read_indices(x, self.live[x][1].seen, t)
            write += a.get_write_indices(x, self.live[x][1].seen, t)
        read, write = torch.tensor(read), torch.tensor(write)
        for layer in range(LAYERS):
            parts = [self.live[x][0].tokens(layer, self.live[x][1].seen, t, t) for x, t in counts.items()]
            q, k, v = (torch.cat(x, 1).transpose(0, 1) for x in zip(*parts))
            a.take(AttentionInputs(q, {"scale": D**-0.5}))
            outs.append(a.update(k, v, layer, read, write))
        return outs

    def failed(self, counts):
        """The engine refuses to go on with the step's requests. They are freed, and start again."""
        with kit.refuses("got a step that ended before", "compute them again", kind=RuntimeError):
            self.allocator.allocate_cache_to_request(next(iter(counts)), 0, 1)
        for x in counts:
            self.leave(x)
            text, alone = self.live[x]
            self.live[x] = text, self.alone(alone.prompt, text)
            self.allocator.join(x, alone.prompt)
        self.check_rows()
        return {x: self.live[x][1].prompt for x in counts}

    def check(self, counts, outs):
        first = 0
        for x, t in counts.items():
            text, alone = self.live[x]
            before = [[alone.rows(layer, head)[:2] for head in range(HEADS)] for layer in range(LAYERS)]
            n = len(before[0][0][0]) + t
            for layer, out in enumerate(outs):
                new = text.tokens(layer, alone.seen, t, t)[1:]
                for head in range(HEADS):
                    for copy, old, own in zip(out, before[layer][head], new):
                        assert kit.same(copy[first : first + n, head], torch.cat((old, own[head])))
            first += n
            alone.step(text, t)
            self.evictions += len(alone.rows(0, 0)[0]) < n
        self.check_rows()

    def check_rows(self):
        a = self.allocator
        tables = [block for x in self.live for block in a.block_table.get(x, [])]
        assert len(tables) == len({*tables}) and not a._step
        for x, (_, alone) in self.live.items():
            for layer in range(LAYERS):
                for head in range(HEADS):
                    k, v, positions = alone.rows(layer, head)
                    if not len(k):
                        continue
                    table = a.block_table[x]
                    assert len(table) == -(-len(k) // 4)
                    for pool, expected in ((a._k[layer], k), (a._v[layer], v)):
                        assert kit.same(pool[table, head].flatten(0, 1)[: len(k)], expected)
                    if x in a._positions:
                        known = a._positions[x][layer, head]
                        assert torch.equal(known, positions[: len(known)].int())


IN_ENGINE = [
    kvops.KeyDiff(12, buffer=1),
    kvops.KeyDiff(12, sinks=2, recent=0.25, buffer=5),
    kvops.LagKV(5, 0.4, sinks=2),
    kvops.Random(12, seed=3, buffer=4),
    kvops.SnapKV(12, window=4),
    kvops.TOVA(12, buffer=3),
    kvops.H2O(12, buffer=3),
    kvops.TriAttention(12, recent=4, buffer=3, statistics=STATISTICS),
]


@every_length
@pytest.mark.parametrize("policy", IN_ENGINE, ids=lambda x: x.name)
@kit.only("cpu")
def test_continuous_batching(policy, steps):
    pytest.importorskip("transformers")
    pytest.importorskip("kvops.hf.allocator")
    from test_hf_continuous_batching import assert_whole

    schedule = InEngine(policy, seed=steps)
    schedule.run(steps)
    assert schedule.failures > steps / 10 and schedule.evictions
    for x in list(schedule.live):
        schedule.end(x)
    assert_whole(schedule.allocator)


# ---- the workers of vLLM ---------------------------------------------------------------------------------------------

SIZE, BLOCKS = 4, 80


class InWorkerAlone(EachHead):
    dv = D


class InWorker(Schedule):
    def __init__(self, policy, block, seed):
        from kvops.cache.queries import LayerMemory, observer
        from kvops.vllm.plan import Plan
        from kvops.vllm.rings import RequestRingTable

        super().__init__(seed)
        for text in self.texts:
            text.layers = [(q, k, v[..., :D]) for q, k, v in text.layers]
        self.plan, self.joined = Plan(kvops.cache.schedule.Schedule(policy, block), SIZE), 0
        self.caches = list(torch.empty(LAYERS, BLOCKS, HEADS, SIZE, 2 * D).unbind())
        device = self.caches[0].device
        self.memories = [LayerMemory(x.shape[:3], self.plan.kinds, device) for x in self.caches]
        # One ring per block: requests that wait keep theirs. In vLLM none waits while another joins.
        self.observer = observer(policy, SIZE, RequestRingTable(BLOCKS, device))
        self.free, self.tables, self.names = list(range(1, BLOCKS)), {}, {}  # block 0 is vLLM's null block

    def as_layers(self):
        from kvops.vllm.layouts import Rows
        from kvops.vllm.steps import Layer

        logits = {"scale": D**-0.5}
        return [Layer(Rows(x), m, (i, LAYERS), logits) for i, (x, m) in enumerate(zip(self.caches, self.memories))]

    def alone(self, prompt, text):
        return InWorkerAlone(self.plan.policy, prompt, evict=self.plan.schedule.evict)

    def join(self, prompt):
        self.joined += 1
        self.tables[self.joined], self.names[self.joined] = [], object()
        return self.joined

    def leave(self, x):
        self.free += [block for block in self.tables.pop(x) if block]

    def fits(self, counts):
        return True

    def cut(self, counts):
        """Shorten a step, as vLLM's scheduler does."""
        of = {x: self.live[x][1] for x in counts}
        return {x: self.plan.schedule.cut(of[x].seen, t, of[x].prompt) for x, t in counts.items()}

    def step(self, counts):
        from kvops.cache.queries import Batch
        from kvops.vllm.steps import Step, StepSlots

        counts = self.cut(counts)
        before, prompts = zip(*((self.live[x][1].seen, self.live[x][1].prompt) for x in counts))
        after = [seen + t for seen, t in zip(before, counts.values())]
        for x, n in zip(counts, after):
            self.tables[x] += [self.free.pop(0) for _ in range(-(-n // SIZE) - len(self.tables[x]))]
        width = max(len(self.tables[x]) for x in counts)
        table = torch.tensor([self.tables[x] + [0] * (width - len(self.tables[x])) for x in counts]).int()
        new = torch.tensor(list(counts.values()))
        batch = Batch(
            table, new.cumsum(0) - new, torch.tensor(before), torch.tensor(after), [*map(self.names.get, counts)]
        )
        held = StepSlots.of(self.plan, batch, prompts)
        now = Step.of(self.plan, self.observer, held, batch, prompts)
        at = [(row, n) for row, (s, e) in enumerate(zip(before, after)) for n in range(s, e)]
        slots = held.slots
        if slots is None:
            slots = torch.tensor([table[row, n // SIZE] * SIZE + n % SIZE for row, n in at])
        layers = self.as_layers()
        for i, cache in enumerate(self.caches):
            parts = [self.live[x][0].tokens(i, s, t, t) for s, (x, t) in zip(before, counts.items())]
            rows = torch.cat([torch.cat((k, v), -1) for _, k, v in parts], 1)
            cache[slots // SIZE, :, slots % SIZE] = rows.transpose(0, 1)
            if now is not None and self.observer is not None:
                now.run([layers[i]], torch.cat([q for q, _, _ in parts], 1).transpose(0, 1))
        if now is not None and self.observer is None:
            now.run(layers)

    def failed(self, counts):
        """vLLM ends the engine. Here the step's requests start again, as after a preemption."""
        for x in counts:
            self.free += [block for block in self.tables[x] if block]
            text, alone = self.live[x]
            self.tables[x], self.live[x] = [], (text, self.alone(alone.prompt, text))
        self.check_rows()
        return {x: self.live[x][1].prompt for x in counts}

    def check(self, counts, outs):
        for x, t in self.cut(counts).items():
            text, alone = self.live[x]
            before = alone.seen
            alone.step(text, t)
            held = [self.plan.schedule.held(n, alone.prompt) for n in (before, alone.seen)]
            self.evictions += held[1] < held[0] + t
            for gap in self.plan.at(alone.seen, alone.prompt).gaps:  # as `EvictingManager` frees them
                self.free += [block for block in self.tables[x][gap.start : gap.stop] if block]
                self.tables[x][gap.start : gap.stop] = [0] * len(gap)
        self.check_rows()

    def check_rows(self):
        used = [block for table in self.tables.values() for block in table if block]
        assert sorted(used + self.free) == list(range(1, BLOCKS))
        for x, (_, alone) in self.live.items():
            held = self.plan.schedule.held(alone.seen, alone.prompt)
            own = torch.tensor([block for block in self.tables[x] if block], dtype=torch.int64)
            assert held <= len(own) * SIZE < held + 2 * SIZE
            for layer, cache in enumerate(self.caches if held else ()):
                rows = cache[own].transpose(0, 1).flatten(1, 2)[:, :held]
                memory = alone.layers[layer]
                assert kit.same(rows, torch.cat((memory["k"], memory["v"]), -1)[0])


IN_WORKERS = [
    kvops.KeyDiff(13, buffer=3),
    kvops.KeyDiff(12, sinks=2, recent=0.25, buffer=8),
    kvops.LagKV(7, 0.5, sinks=3),
    kvops.Random(12, seed=3, buffer=4),
    kvops.SnapKV(11, window=4),
    kvops.RKV(11, window=4, buffer=3),
    kvops.VaSE(16, window=4, buffer=3),
    kvops.TOVA(12, buffer=1),
    kvops.H2O(12, buffer=5),
    kvops.TriAttention(12, recent=4, buffer=4, statistics=STATISTICS),
]


@every_length
@pytest.mark.parametrize("policy", IN_WORKERS, ids=lambda x: x.name)
@pytest.mark.parametrize("block", [None, 9])
def test_vllm_workers(policy, block, steps):
    schedule = InWorker(policy, block, seed=steps)
    schedule.run(steps)
    assert schedule.failures > steps / 10 and schedule.evictions
    for x in list(schedule.live):
        schedule.end(x)
    assert sorted(schedule.free) == list(range(1, BLOCKS))
