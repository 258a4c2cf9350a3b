"""PagedCache: requests join, grow, are evicted and leave, each with the same results as alone in dense memory."""

import copy
import pickle
import random
import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kit
import kvops
from kvops import ops
from kvops.cache.schedule import Schedule
from kvops.methods.queries import QueryPolicy
from kvops.methods.statistics import CalibratedPolicy
from kvops.methods.view import View

pytestmark = kit.every_device

LAYERS, GROUP, HEADS, D, DV = 2, 2, 2, 16, 24
POLICIES = [
    kvops.KeyDiff(20),
    kvops.KeyDiff(20, sinks=2, recent=0.25, head_mode="shared", buffer=5),
    kvops.KeyDiff(20, buffer=None),
    kvops.LagKV(6, 0.5, sinks=3),
    kvops.LagKV(6, 0.0, sinks=0, head_mode="shared"),
    kvops.StreamingLLM(20),
    kvops.Random(20, seed=3),
    kvops.SATKV(20, window=4, kappa=2, buffer=7),
    kvops.SnapKV(20, window=5),
    kvops.ChunkKV(20, window=5, chunk=4),
    kvops.RKV(20, window=5, buffer=6),
    kvops.VaSE(20, window=5, buffer=6),
    kvops.TOVA(20, buffer=3),
    kvops.H2O(20, buffer=3),
    kvops.H2O(20, recent=4, group_reduce="max"),
    kvops.ProtoKV(20, window=5, num_chunks=6, num_sats=8, buffer=6),
    kvops.ProtoKV(20, window=5, num_chunks=6, clusters="lsh", buffer=None),
    kvops.KeyDiff(9, recent=0.25, buffer=4, protect="prompt"),
    kvops.RKV(9, window=5, buffer=4, protect="prompt"),
    kvops.VaSE(16, window=5, buffer=4, protect="prompt"),
    kvops.H2O(9, buffer=3, protect="prompt"),
    kvops.ProtoKV(9, window=5, alpha=3, num_chunks=6, num_sats=8, buffer=6, protect="prompt"),
    kvops.Full(),
]
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=repr)
#: Policies that score by the next token's position, which is not the number of slots once tokens have been evicted.
STATISTICS = kit.query_statistics(LAYERS, GROUP * HEADS, D)
CALIBRATED = [
    kvops.TriAttention(20, recent=4, buffer=3, statistics=STATISTICS),
    kvops.ExpectedAttention(20, buffer=5, future=8, value_norm=False, statistics=STATISTICS),
]


def paged(policy, num_pages=200, page_size=4, **changes) -> kvops.PagedCache:
    sizes = dict(num_layers=LAYERS, kv_heads=HEADS, head_dim=D, v_head_dim=DV, page_size=page_size)
    return kvops.PagedCache(policy, num_pages, **sizes | changes)


class Text:
    """The tokens of a request: q, k, v of each layer, [heads, n, d]; the same for the same seed."""

    def __init__(self, seed: int, n: int, dtype=torch.float32, layers=LAYERS):
        shapes = (GROUP * HEADS, n, D), (HEADS, n, D), (HEADS, n, DV)
        self.layers = [
            tuple(kit.randn(*x, seed=100 * seed + 10 * i + j).to(dtype) for j, x in enumerate(shapes))
            for i in range(layers)
        ]

    def tokens(self, layer: int, first: int, count: int, width: int) -> list[Tensor]:
        """Return q, k, v of some tokens, right-padded with values that must not be read."""
        some = [x[:, first : first + count] for x in self.layers[layer]]
        return [torch.nn.functional.pad(x, (0, 0, 0, width - count), value=torch.nan) for x in some]


def step(cache, texts: dict[int, Text], counts: dict[int, int]) -> list[Tensor]:
    """Take that many tokens of each request through the layers; return each layer's output."""
    numbers, tokens = list(counts), list(counts.values())
    with cache.step(numbers, tokens) as now:
        outs = []
        for layer in range(cache.num_layers):
            parts = [texts[x].tokens(layer, cache.seen(x), t, max(tokens)) for x, t in zip(numbers, tokens)]
            outs.append(now.attend(layer, *(torch.stack(x) for x in zip(*parts))))
    return outs


class Alone:
    """A request in dense memory, computed with the one-shot forms of the policies."""

    def __init__(self, policy, prompt: int, layers=LAYERS, evict="prompt"):
        self.policy, self.prompt, self.seen = policy, prompt, 0
        self.schedule = Schedule.of("Alone", policy, evict)
        self.layers = [dict(k=[], v=[], q=[], positions=None, scores=None) for _ in range(layers)]

    def step(self, text: Text, count: int, width: int | None = None) -> list[Tensor]:
        """width: of the queries, with padding. The number of rows in a call affects how sums are rounded."""
        outs, before, policy, width = [], self.seen, self.policy, width or count
        self.seen += count
        for layer, memory in enumerate(self.layers):
            q, k, v = (x[None] for x in text.tokens(layer, before, count, count))
            new = torch.arange(before, self.seen).expand(1, HEADS, -1)
            for name, x in dict(k=k, v=v, q=q, positions=new).items():
                memory[name] = torch.cat((memory[name], x), 2) if isinstance(memory[name], Tensor) else x.clone()
            k, v, n = memory["k"], memory["v"], memory["k"].shape[2]
            visible = torch.arange(n - count + 1, n - count + 1 + width, dtype=torch.int32)
            visible[count:] = 0
            q = text.tokens(layer, before, count, width)[0][None]
            options = dict(group_reduce=policy.group_reduce) if isinstance(policy, QueryPolicy) else {}
            parts = [
                ops.window_attention(q[:, :, i : i + 256], k, v, visible[i : i + 256], **options)
                for i in range(0, width, 256)
            ]
            outs.append(torch.cat([x[0] for x in parts], 2)[:, :, :count])
            scores = torch.zeros(1, HEADS, n)
            for part in parts:
                scores += part[2]
            if memory["scores"] is not None:
                scores[:, :, : n - count] += memory["scores"]
            memory["scores"] = scores
            if self.schedule.held(self.seen, self.prompt) < n:
                self.evict(memory, self.schedule.rule(before, self.seen, self.prompt), layer)
        return outs

    def evict(self, memory, rule, layer) -> None:
        k, v = memory["k"], memory["v"]
        if isinstance(rule, kvops.H2O):
            recent = int(rule.recent * rule.budget) if isinstance(rule.recent, float) else rule.recent
            indices = ops.select_topk(memory["scores"], k=rule.budget, sinks=rule.sinks, window=recent)
        elif isinstance(rule, kvops.Random):
            ranks = kvops.methods.random_numbers.random_integers(memory["positions"].int(), rule.seed, layer)
            indices = ops.select_topk(ranks, k=rule.budget)
        elif isinstance(rule, CalibratedPolicy):
            indices = rule.select(View(k, v, seen=self.seen, new=1, layer=layer, num_layers=LAYERS))
        elif isinstance(rule, QueryPolicy):
            rows = rule.rows_at(self.seen, self.prompt)
            view = View(k, v, seen=self.seen, new=1, layer=layer, num_layers=LAYERS, kept=memory["positions"])
            rule.observe(view, memory["q"][:, :, -rows:], None, {})
            indices = rule.select(view)
        else:
            indices = rule.compress(k, v).indices
        memory["k"], memory["v"] = ops.gather_kv(k, v, indices)
        for name in ("positions", "scores"):
            memory[name] = memory[name].gather(2, indices)


def check_pages(cache) -> None:
    """Check that every page is free or belongs to one request, which has as many as it needs."""
    requests = list(cache._requests.values())
    chains = [chain for x in requests for chain in x.chains]
    assert sorted([page for x in chains for page in x.pages] + cache._free) == list(range(cache.num_pages))
    assert all(len(x.pages) == -(-x.held // cache.page_size) for x in chains)
    if not cache.by_head:
        assert all(x.chains[0].held == cache.policy.held(x.seen, x.prompt) for x in requests)


def positions(cache, request: int, layer: int) -> Tensor:
    """int32 [Hk, held]."""
    return torch.stack([cache.positions(request, layer, head) for head in range(HEADS)])


def same_slots(cache, request: int, alone: Alone) -> None:
    """Check that a request holds the same K, V and positions as alone."""
    for layer, memory in enumerate(alone.layers):
        assert torch.equal(positions(cache, request, layer), memory["positions"][0].int())
        for pages, dense in ((cache.k[layer], memory["k"]), (cache.v[layer], memory["v"])):
            held = pages[cache._requests[request].chains[0].pages].transpose(0, 1).flatten(1, 2)
            assert kit.same(held[:, : cache.held(request)], dense[0])


@pytest.mark.parametrize("policy", [*POLICIES, *CALIBRATED], ids=lambda x: x.name if x in CALIBRATED else repr(x))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_request_is_as_if_alone(policy, dtype):
    """Bit-identical: prompts in chunks and at once, shorter and longer than the budget, and decode."""
    cache = paged(policy, dtype=dtype)
    prompts = 40, 61, 7
    a, b, c = numbers = [cache.join(x) for x in prompts]
    texts = {x: Text(x, 110, dtype) for x in numbers}
    alone = {x: Alone(policy, n) for x, n in zip(numbers, prompts)}
    decode = [{a: 1, b: 1, c: 1}] * 20 + [{c: 3, a: 1}] * 5 + [{b: 2}] * 9
    for counts in [{a: 40, b: 30}, {b: 28, c: 7, a: 1}, {a: 1, b: 3}, *decode]:
        outs = step(cache, texts, counts)
        check_pages(cache)
        for row, (x, t) in enumerate(counts.items()):
            for own, out in zip(alone[x].step(texts[x], t, max(counts.values())), outs):
                assert kit.same(out[row, :, :t], own[0])
                assert not out[row, :, t:].any()
            same_slots(cache, x, alone[x])
    for x in numbers:
        cache.leave(x)
    assert cache.free == 200 and len(cache) == 0


@every_policy
def test_attention_is_that_of_the_full_cache_with_a_mask(policy):
    cache = paged(policy)
    a = cache.join(50)
    texts = {a: Text(1, 90)}
    step(cache, texts, {a: 50})
    for _ in range(30):
        n = cache.seen(a) + 1
        kept = [torch.cat((positions(cache, a, i), torch.full((HEADS, 1), n - 1)), 1).long() for i in range(LAYERS)]
        for layer, out in enumerate(step(cache, texts, {a: 1})):
            q, k, v = texts[a].layers[layer]
            mask = torch.zeros(HEADS, n, dtype=torch.bool).scatter_(1, kept[layer], True).repeat_interleave(GROUP, 0)
            k, v = (x[:, :n].repeat_interleave(GROUP, 0) for x in (k, v))
            logits = (q[:, n - 1 : n] @ k.mT / D**0.5).masked_fill(~mask[:, None], -torch.inf)
            torch.testing.assert_close(out[0], logits.softmax(-1) @ v)


@pytest.mark.parametrize("prompt", [1, 7, 20, 21, 40, 53])
@pytest.mark.parametrize("policy", [*POLICIES, *CALIBRATED], ids=lambda x: x.name if x in CALIBRATED else repr(x))
def test_it_is_the_cache_of_one_layer(policy, prompt):
    """A prompt in one step, then decode."""
    pages, dense = paged(policy), [kvops.Cache(policy, layer=i, num_layers=LAYERS) for i in range(LAYERS)]
    a = pages.join(prompt)
    texts = {a: Text(5, prompt + 40)}
    for count in [prompt] + [1] * 40:
        seen = pages.seen(a)
        outs = step(pages, texts, {a: count})
        for layer, (cache, out) in enumerate(zip(dense, outs)):
            torch.testing.assert_close(
                out, cache.attend(*(x[None] for x in texts[a].tokens(layer, seen, count, count)))
            )
            assert torch.equal(positions(pages, a, layer), cache.positions[0].int())


@every_policy
@given(st.integers(1, 70), st.integers(0, 40), st.data())
@kit.examples(30)
def test_what_is_held_depends_on_counts_alone(policy, prompt, decode, data):
    """However the tokens come: never more slots than tokens, and each token adds at most one."""
    cuts = {prompt, prompt + decode, *data.draw(st.sets(st.integers(1, max(1, prompt + decode - 1))))} - {0}
    schedule = Schedule(policy)
    held = [schedule.held(n, prompt) for n in range(prompt + decode + 1)]
    assert all(0 <= y <= x + 1 for x, y in pairwise(held)) and held[0] == 0
    before = 0
    for n in sorted(cuts):
        m = held[before] + n - before
        assert held[n] <= m
        if held[n] < m and not isinstance(policy, QueryPolicy):
            k, v = kit.kv(1, 1, m, 8)
            assert schedule.rule(before, n, prompt).compress(k, v).k.shape[2] == held[n]
        before = n


def test_memory_is_bounded_by_the_budget():
    """A prompt counts until it ends; in blocks, only one of them does."""
    for policy, block, most in (
        (kvops.KeyDiff(20), None, 50 - 1),
        (kvops.KeyDiff(20), 8, 27),
        (kvops.KeyDiff(32, buffer=8), 4, 39),
        (kvops.SnapKV(20, window=5), None, 20 + 39),
    ):
        assert max(Schedule(policy, block).held(n, 50) for n in range(90)) == most, policy


@pytest.mark.parametrize(
    "policy",
    [x for x in POLICIES if not isinstance(x, kvops.Full) and getattr(x, "group_reduce", None) != "max"]
    + [kvops.RKV(20, window=5, buffer=6)],
    ids=repr,
)
@pytest.mark.parametrize("evict", ["prompt", "blocks:16"])
def test_the_answer_does_not_depend_on_the_steps(policy, evict):
    """The kept slots are those of a request alone that takes its prompt in as few steps as it may."""
    prompts, texts = (53, 40, 90), {}
    cache = paged(policy, evict=evict)
    numbers = [cache.join(x) for x in prompts]
    texts = {x: Text(x, 130) for x in numbers}
    due, rng = dict(zip(numbers, prompts)), random.Random(0)
    while any(cache.seen(x) < due[x] + 30 for x in numbers):
        counts = {}
        for x in numbers:
            n = cache.seen(x)
            if n < due[x] + 30 and rng.random() < 0.8:
                counts[x] = cache.schedule.cut(n, rng.randint(1, 25) if n < due[x] else 1, due[x])
        if counts:
            step(cache, texts, counts)
    for x in numbers:
        alone = Alone(policy, due[x], evict=evict)
        while alone.seen < due[x] + 30:
            alone.step(texts[x], alone.schedule.cut(alone.seen, due[x] if alone.seen < due[x] else 1, due[x]))
        for layer, memory in enumerate(alone.layers):
            assert torch.equal(positions(cache, x, layer), memory["positions"][0].int())


@every_policy
@given(st.integers(1, 70), st.integers(1, 30), st.integers(0, 100), st.integers(1, 100))
@kit.examples(50)
def test_a_step_ends_at_the_next_eviction(policy, prompt, block, before, new):
    for schedule in (Schedule(policy), Schedule(policy, block)):
        held = [schedule.held(n, prompt) for n in range(before + new + 1)]
        drops = [n for n in range(before + 1, before + new) if held[n] <= held[n - 1]]
        cut = schedule.cut(before, new, prompt)
        assert 1 <= cut <= new and not [n for n in drops if n < before + cut]


def test_names_of_schedules():
    policy = kvops.KeyDiff(20)
    for evict, block in (("prompt", None), ("blocks:16", 16)):
        schedule = Schedule.of("f", policy, evict)
        assert schedule == Schedule(policy, block) and schedule.evict == evict
    for evict in ("", "blocks", "blocks:", "blocks:0", "blocks:-1", "blocks:1.5", "blocks:²", "prompts", "prompt:1"):
        with kit.refuses("f: evict must be 'prompt' or 'blocks:N'", re.escape(repr(evict))):
            Schedule.of("f", policy, evict)
    with kit.refuses("f: evict must be a str", "got int 16", kind=TypeError):
        Schedule.of("f", policy, 16)
    with kit.refuses("PagedCache", "expected evict='prompt', got 'blocks:16'"):
        paged(kvops.KeyDiff(20, buffer=None), by_head=True, evict="blocks:16")
    cache = paged(policy, evict="blocks:16")
    a = cache.join(40)
    with kit.refuses("the end of a block of the prompt", "at most 16 tokens of request 1, got 17"):
        cache.step([a], 17)


def test_bad_steps():
    cache = paged(kvops.KeyDiff(20))
    a, b = cache.join(10), cache.join(10)
    for parts, requests, tokens in (
        (("expected at least one request",), [], 1),
        (("each once",), [a, a], 1),
        (("expected a request that has joined", "got 9"), [a, 9], 1),
        (("expected one entry of tokens per request, 2, got 1",), [a, b], [1]),
        (("tokens must be at least 1, got 0",), [a, b], [1, 0]),
        (("not go beyond the prompt's end", "at most 10 tokens of request 2, got 11"), [a, b], [1, 11]),
    ):
        with kit.refuses(*parts):
            cache.step(requests, tokens)
    with kit.refuses("prompt must be at least 1"):
        cache.join(0)
    with cache.step([a, b], [3, 2]) as now:
        for call in (lambda: cache.step([a]), lambda: cache.leave(a)):
            with kit.refuses("step", kind=RuntimeError):
                call()
        q, k, v = (kit.randn(2, x, 3, d) for x, d in ((4, D), (2, D), (2, DV)))
        for parts, arguments in (
            (("expected layer < 2", "got 2"), (2, q, k, v)),
            ((r"q must be \[2, a multiple of 2, 3, 16\]", r"\[2, 3, 3, 16\]"), (0, q[:, :3], k, v)),
            ((r"k must be \[2, 2, 3, 16\]", r"\[2, 2, 2, 16\]"), (0, q, k[:, :, :2], v)),
            ((r"v must be \[2, 2, 3, 24\] torch.float32", "float16"), (0, q, k, v.half())),
            (("k requires grad",), (0, q, k.clone().requires_grad_(), v)),
        ):
            with kit.refuses("PagedCache", *parts):
                now.attend(*arguments)
        for layer in (1, 0):
            now.attend(layer, q, k, v)
        with kit.refuses("each once per step, got 1"):
            now.attend(1, q, k, v)
    with kit.refuses("after the step has ended", kind=RuntimeError):
        now.attend(0, q, k, v)
    check_pages(cache)
    with kit.refuses(r"in every layer of a step, got none in \[0\]", kind=RuntimeError), cache.step([b]) as now:
        now.attend(1, *(x[:1, :, :1] for x in (q, k, v)))
    assert cache.seen(b) == 2
    cache.leave(b)
    with kit.refuses("got 2"):
        cache.leave(b)


def test_settings():
    for policy, parts in (
        (kvops.KeyDiff(0.5), ("budget in tokens, an int, got 0.5",)),
        (kvops.KeyDiff(20, head_mode="adaptive"), ("one block table for all heads", "keep the same number of tokens")),
        (kvops.L2(20, skip_layers=()), ("whose compress takes pages",)),
        (kvops.LaCache(20, sinks=2, span=1, overlap=0), ("whose compress takes pages",)),
        (kvops.PyramidKV(24, window=5), ("layers that differ in length need a PagedCache with by_head=True",)),
        (kvops.LAQ(20), ("cannot draft answers",)),
        (kvops.ProtoKV(20, whole_clusters=True), ("but whole clusters differ in size",)),
    ):
        with kit.refuses(policy.name, *parts):
            paged(policy)
    for policy, parts in (
        (kvops.KeyDiff(20), ("evicted only at the end of the prompt, expected buffer=None, got 0.0625",)),
        (kvops.LagKV(6, 0.5), ("all heads keep the same number of tokens, expected by_head=False",)),
        (kvops.ChunkKV(20, window=5), ("all heads keep the same number of tokens",)),
        (kvops.SnapKV(0.5, window=5), ("budget in tokens",)),
        (kvops.DefensiveKV(20, window=5), ("w_o must be the weights of the output projection", "got None")),
        (kvops.CriticalKV(20, window=5), ("w_o must be the weights of the output projection", "got None")),
        (kvops.CriticalKV(20, window=5, w_o=[torch.ones(8, 96)]), ("weights of each layer", "expected 2, got 1")),
    ):
        with kit.refuses(policy.name, *parts):
            paged(policy, by_head=True)
    with kit.refuses("policy must be a kvops policy", "the class KeyDiff", kind=TypeError):
        paged(kvops.KeyDiff)
    with kit.refuses("page_size must be at least 1, got 0"):
        paged(kvops.KeyDiff(20), page_size=0)


BY_HEAD = [
    kvops.KeyDiff(20, head_mode="adaptive", buffer=None),
    kvops.KeyDiff(20, sinks=2, recent=4, head_mode="adaptive", buffer=None),
    kvops.SnapKV(20, window=5, head_mode="adaptive"),
    kvops.SnapKV(20, window=5),
    kvops.PyramidKV(20, window=5),
    kvops.H2O(20, recent=4, head_mode="adaptive", buffer=None),
    kvops.SATKV(20, window=4, kappa=2, head_mode="adaptive", buffer=None),
]


@pytest.mark.parametrize("policy", BY_HEAD, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_of_different_length(policy, dtype):
    """The kept tokens equal a one-shot call's, the attention equals the full cache's with a mask, and the pages
    hold the budgets' tokens."""
    cache = paged(policy, num_pages=400, by_head=True, dtype=dtype)
    prompts = 60, 44, 12
    a, b, c = numbers = [cache.join(x) for x in prompts]
    texts = {x: Text(x, 90, dtype) for x in numbers}
    held, lengths = {}, set()
    for counts in [{a: 60, b: 20}, {b: 24, c: 12}] + [{a: 1, b: 1, c: 1}] * 20 + [{c: 3, a: 2}]:
        n = {x: cache.seen(x) for x in counts}
        before = {(x, i, h): cache.positions(x, i, h) for x in counts for i in range(LAYERS) for h in range(HEADS)}
        outs = step(cache, texts, counts)
        check_pages(cache)
        for row, (x, t) in enumerate(counts.items()):
            for layer, out in enumerate(outs):
                q, k, v = texts[x].layers[layer]
                for head in range(HEADS):
                    slots = torch.cat((before[x, layer, head], torch.arange(n[x], n[x] + t))).long()
                    own = q[head * GROUP : (head + 1) * GROUP, n[x] : n[x] + t].float()
                    logits = own @ k[head, slots].float().T / D**0.5
                    logits = logits.masked_fill(slots > torch.arange(n[x], n[x] + t)[:, None], -torch.inf)
                    expected = (logits.softmax(-1) @ v[head, slots].float()).to(dtype)
                    found = out[row, head * GROUP : (head + 1) * GROUP, :t]
                    # GPUs round the weights to bf16 too: 2^-9.
                    close = dict(rtol=1.6e-2, atol=4e-3) if dtype == torch.bfloat16 else {}
                    torch.testing.assert_close(found, expected, **close)
        for x in counts:
            if cache.seen(x) != dict(zip(numbers, prompts))[x]:
                continue
            for layer in range(LAYERS):
                q, k, v = (y[None, :, : cache.seen(x)] for y in texts[x].layers[layer])
                queries = [q] if policy.needs.per_slot else [q[:, :, -5:]] if isinstance(policy, QueryPolicy) else []
                kept = policy.compress(k, v, *queries, layer=layer, num_layers=LAYERS).indices[0]
                for head, row in enumerate(kept):
                    assert torch.equal(cache.positions(x, layer, head), row[row >= 0].int())
                    lengths.add(cache.held(x, layer, head))
                    held[x, layer, head] = int((row >= 0).sum())
            total = sum(held[x, i, h] for i in range(LAYERS) for h in range(HEADS))
            assert total == LAYERS * HEADS * min(20, cache.seen(x))
    for (x, layer, head), count in held.items():
        assert cache.held(x, layer, head) == count + cache.seen(x) - dict(zip(numbers, prompts))[x]
    assert (len(lengths) > 2) == (policy != kvops.SnapKV(20, window=5))
    for x in numbers:
        cache.leave(x)
    assert cache.free == 400


def test_heads_have_sinks_in_no_softmax():
    cache = paged(kvops.SnapKV(20, window=5, head_mode="adaptive"), by_head=True)
    q, k, v = (kit.randn(1, x, 3, d) for x, d in ((4, D), (2, D), (2, DV)))
    with kit.refuses("by_head does not support", kind=NotImplementedError), cache.step([cache.join(3)], 3) as now:
        now.attend(0, q, k, v, sink_logits=torch.zeros(4))
    assert cache.free == 200


def test_positions_of_a_step():
    """Queries and keys are rotated at the tokens' positions in the text, whatever was evicted."""
    cache = paged(kvops.KeyDiff(8))
    a, b = cache.join(30), cache.join(4)
    texts = {a: Text(1, 60), b: Text(2, 60)}
    step(cache, texts, {a: 30, b: 4})
    with pytest.raises(ZeroDivisionError), cache.step([a, b], [3, 2]) as now:
        assert now.positions.tolist() == [[30, 31, 32], [4, 5, 6]]
        _ = 1 / 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deep", "pickled"])
@pytest.mark.parametrize("by_head", [False, True])
def test_copies(copied, by_head):
    """They share nothing, and their layers share their pages as the original's do."""
    cache = paged(kvops.SnapKV(8, window=4), by_head=by_head)
    text = Text(3, 40)

    def read(cache, start, end):
        outs = []
        with cache.step([1], end - start) as now:
            for layer in range(LAYERS):
                outs.append(now.attend(layer, *(x[None, :, start:end] for x in text.layers[layer])))
        return torch.stack(outs)

    cache.join(30)
    read(cache, 0, 20)
    twin = copied(cache)
    assert (twin.k[0].data_ptr() == twin.k[1].data_ptr()) is by_head
    assert len({x.untyped_storage().data_ptr() for x in (*twin.k, *cache.k)}) == 2
    for start, end in ((20, 30), (30, 31), (31, 32)):
        assert torch.equal(read(cache, start, end), read(twin, start, end))
    with pytest.raises(TypeError, match="use copy.deepcopy"):
        copy.copy(cache)


def test_repr_says_what_the_cache_holds():
    cache = paged(kvops.KeyDiff(20, buffer=1), num_pages=30)
    pages = 4 * 30 * LAYERS * HEADS * (D + DV) * 4 / 1024  # fp32
    assert repr(cache).endswith(
        f", 30 of 30 pages free, 0 requests: 0 tokens seen, 0 kept, {pages:.4g} KiB of pages)"
    ), repr(cache)
    texts = Text(0, 40), Text(1, 12)
    requests = [cache.join(40), cache.join(12)]
    for request, text, n in zip(requests, texts, (40, 12)):
        with cache.step([request], n) as step:
            for layer in range(LAYERS):
                step.attend(layer, *(x[None, :, :n] for x in text.layers[layer]))
    assert f"{cache.free} of 30 pages free, 2 requests: 12 to 40 tokens seen, 12 to 20 kept, " in repr(cache)
