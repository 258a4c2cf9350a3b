"""Caches whose heads differ in length: what they hold, attend to and evict, against fp64 and each head alone."""

import copy
import pickle
from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops.cache.ragged import PAGE
from kvops.methods.queries import QueryPolicy

pytestmark = kit.every_device
B, HEADS, GROUP, D, DV = 2, 3, 2, 16, 8
TOKENS = 110

POLICIES = [
    kvops.KeyDiff(20),
    kvops.KeyDiff(20, sinks=2, recent=3, buffer=4),
    kvops.KeyDiff(0.4, buffer=None),
    kvops.KeyDiff(20, metric="dot", anchor="median", buffer=1),
    kvops.L2(20, recent=0.25, skip_layers=(), buffer=2),
    kvops.Random(20, buffer=3),
    kvops.SATKV(20, 4, buffer=3),
    kvops.RKV(20, window=4, buffer=3),
    kvops.RKV(20, window=4, buffer=1, sinks=2),
    kvops.VaSE(20, window=4, buffer=3),
    kvops.SnapKV(20, 4, kernel_size=3),
    kvops.SnapKV(0.4, 4),
    kvops.SnapKV(20, 4, pool_first=True, sinks=2),
    kvops.SnapKV(20, 4, score="dot"),
    kvops.SnapKV(20, 4, score="drop"),
    kvops.CriticalKV(20, 4, w_o=torch.eye(DV).repeat(1, HEADS * GROUP)),
    kvops.DefensiveKV(20, 4, w_o=torch.eye(DV).repeat(1, HEADS * GROUP), pool_first=True),
    kvops.ExpectedAttention(20, statistics=kit.query_statistics(1, HEADS * GROUP, D), buffer=3),
    kvops.TriAttention(20, recent=2, statistics=kit.query_statistics(1, HEADS * GROUP, D), buffer=3),
]
POLICIES = [replace(x, head_mode="adaptive") for x in POLICIES]
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda x: f"{x.name}-{POLICIES.index(x)}")
chunks = st.lists(st.sampled_from((1, 1, 1, 1, 3, 4, 9, 30)), min_size=8, max_size=25)


class Text:
    """The queries, keys and values of all tokens, and a cache that reads them."""

    def __init__(self, policy, pads=None, dtype=torch.float32, dv=DV, seed=0):
        self.q, k = (kit.randn(B, h, TOKENS, D, seed=seed + i) for i, h in ((1, HEADS * GROUP), (2, HEADS)))
        k[:, 0] *= 1.5  # heads that differ
        k[:, 1, 40:60] *= 2
        self.q, self.k = self.q.to(torch.bfloat16 if dtype.itemsize == 1 else dtype), k.to(dtype)
        self.v = kit.randn(B, HEADS, TOKENS, dv, seed=seed + 3).to(dtype)
        self.pads = [0] * B if pads is None else pads
        self.cache = cache = kvops.Cache(policy)
        if pads is not None:
            cache.set_pads(kit.int32(*pads))

    def step(self, t, **options):
        now = slice(self.cache.seen, self.cache.seen + t)
        return self.cache.attend(*(x[:, :, now] for x in (self.q, self.k, self.v)), **options)

    def attention(self, positions, first, t, scale=D**-0.5, softcap=0.0, sink_logits=None):
        """Return the attention of tokens [first, first + t) over the slots before and each other, in fp64."""
        end = first + t
        token = torch.arange(end, device=self.k.device)
        new = torch.arange(first, end, device=self.k.device)
        seen = (token >= first) & (token <= new[:, None])  # [t, end]
        seen = seen.expand(B, HEADS, -1, -1)
        if positions is not None:
            held = torch.zeros(B, HEADS, end + 1, dtype=torch.bool, device=self.k.device)
            held = held.scatter_(2, positions.where(positions >= 0, end), True)[..., :end]
            seen = seen | held.unsqueeze(2)
        pads = kit.int32(*self.pads).view(B, 1, 1, 1)
        seen = (seen & (token >= pads)).repeat_interleave(GROUP, 1)
        q, k, v = self.q[:, :, first:end].double(), self.k[:, :, :end].double(), self.v[:, :, :end].double()
        logits = scale * q @ k.repeat_interleave(GROUP, 1).mT
        if softcap:
            logits = softcap * (logits / softcap).tanh()
        logits = logits.masked_fill(~seen, -torch.inf)
        if sink_logits is not None:
            logits = torch.cat((logits, sink_logits.double().view(1, -1, 1, 1).expand(B, -1, t, 1)), 3)
        weights = logits.softmax(-1).nan_to_num(0.0)[..., :end]  # a row of padding sees nothing
        return weights @ v.repeat_interleave(GROUP, 1)

    def check(self):
        """Check that the cache holds the tokens of its positions, bit for bit, and little spare memory."""
        cache = self.cache
        positions, lengths = cache.positions, cache.lengths
        assert positions.shape == (B, HEADS, len(cache)) and int(lengths.max()) == len(cache)
        for b in range(B):
            for h in range(HEADS):
                own, m = positions[b, h], int(lengths[b, h])
                assert (own[:m].diff() > 0).all() and (own[:m] < cache.seen).all() and (own[m:] == -1).all()
                if not cache.ragged:
                    continue
                assert own[0] >= self.pads[b]  # no padding is kept
                for x, text in ((cache.k, self.k), (cache.v, self.v)):
                    assert torch.equal(x[b, h, :m], text[b, h, own[:m]]) and not x[b, h, m:].any()
        if cache.ragged:
            spare = max(16, int(lengths.double().mean()) // 16) + PAGE  # per head
            slots = int(lengths.sum()) + B * HEADS * (spare + PAGE)
            assert cache.nbytes <= slots * (D + DV) * self.k.element_size()


@every_policy
@kit.examples(8)
@given(sizes=chunks, pads=st.sampled_from((None, [0, 7], [33, 0])))
def test_steps(policy, sizes, pads):
    """A prompt, then steps of one and of several tokens: outputs against fp64, contents bit for bit, budgets."""
    text = Text(policy, pads)
    buffer, differ = None if policy.buffer is None else policy.buffer_tokens(20), False
    for t in (40, *sizes):
        t = min(t, TOKENS - text.cache.seen)
        if not t:
            break
        before, first = text.cache.positions, text.cache.seen
        out = text.step(t)
        want = text.attention(before, first, t)
        torch.testing.assert_close(out.double(), want.to(out.device), atol=1e-5, rtol=1e-5)
        text.check()
        cache = text.cache
        assert cache.ragged
        differ |= bool((cache.lengths.amax(1) > cache.lengths.amin(1)).any())
        keep = policy.budget if isinstance(policy.budget, int) else int(cache.seen * policy.budget)
        for b, row in enumerate(cache.lengths):
            old = 0 if before is None else (before[b] >= text.pads[b]).sum()
            new = HEADS * (t - (text.pads[b] if before is None else 0))
            if t >= max(policy.window, 2):  # a short row keeps all it has
                assert row.sum() == min(old + new, HEADS * keep)
            if buffer is not None and isinstance(policy.budget, int):
                assert row.sum() <= HEADS * (keep + buffer)
    assert differ or isinstance(policy, kvops.DefensiveKV)  # whose first stage keeps the budget in each head here


@every_policy
def test_the_first_eviction_is_that_of_one_call(policy):
    text = Text(policy)
    text.step(60)
    k, v = text.k[:, :, :60], text.v[:, :, :60]
    queries = (text.q[:, :, 60 - policy.window : 60],) if isinstance(policy, QueryPolicy) else ()
    if isinstance(policy.budget, float):
        policy = replace(policy, budget=24)
    if isinstance(policy.recent, float):  # in one call, of each head's own budget
        policy = replace(policy, recent=5)
    kept = policy.compress(k, v, *queries)
    assert torch.equal(text.cache.positions, kept.indices)
    assert torch.equal(text.cache.k, kept.k) and torch.equal(text.cache.v, kept.v)


@every_policy
@pytest.mark.parametrize("pads", [None, [0, 7]])
def test_later_evictions_score_a_head_as_if_all_heads_held_its_tokens(policy, pads):
    """The gaps of shorter heads do not count: not in anchors, means, sums over the keys or over neighbours."""
    text = Text(policy, pads)
    for t in (50, 1, 6 if policy.window else 1):
        text.step(t)
    cache, w = text.cache, policy.window or 1
    view, options = cache._stored(new=1), dict(scale=None, softcap=0.0, sink_logits=None)
    if isinstance(policy, QueryPolicy):
        cache._remember(view, text.q[:, :, cache.seen - w : cache.seen], w, options)
    found, positions = policy.scores(view), view.positions()
    assert (positions < 0).any()
    for b in range(B):
        for h in range(HEADS):
            columns = (positions[b, h] >= 0).nonzero()[:, 0]
            own = positions[b, h, columns]
            k, v = (x[b : b + 1, :, own].contiguous() for x in (text.k, text.v))
            alone = kvops.View(
                k, v, layer=0, num_layers=1, seen=cache.seen, new=1, kept=own.expand(1, HEADS, -1),
                padding=None if pads is None else kit.int32(pads[b]),
            )  # fmt: skip
            if isinstance(policy, QueryPolicy):
                policy.observe(alone, text.q[b : b + 1, :, cache.seen - w : cache.seen], None, options)
            want, usable = policy.scores(alone)[0, h], slice(policy.sinks, len(own) - policy.window)
            torch.testing.assert_close(found[b, h, columns][usable], want[usable], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("policy", [POLICIES[1], POLICIES[7], POLICIES[10]], ids=lambda x: x.name)
@pytest.mark.parametrize(
    "options", [dict(softcap=2.0), dict(scale=0.4), dict(sinks=True), dict(softcap=3.0, sinks=True)], ids=str
)
def test_options_of_the_logits(policy, options):
    """In steps of one and of several tokens, with evictions between."""
    options = dict(options)
    if options.pop("sinks", False):
        options["sink_logits"] = kit.randn(HEADS * GROUP, seed=9)
    text = Text(policy)
    for t in (50, 1, 6, 1, 1, 1, 1, 9):
        before, first = text.cache.positions, text.cache.seen
        out = text.step(t, **options)
        want = text.attention(before, first, t, **options)
        torch.testing.assert_close(out.double(), want.to(out.device), atol=1e-5, rtol=1e-5)
        text.check()


def test_scores_count_the_sinks():
    """SnapKV's scores of a later turn, in which each row's weights are those of a softmax with the head's sink."""
    policy = replace(kvops.SnapKV(20, 4, kernel_size=1), head_mode="adaptive")
    text, sinks = Text(policy), kit.randn(HEADS * GROUP, seed=9)
    text.step(50, sink_logits=sinks)
    cache = text.cache
    before = cache.positions
    scores, plain = torch.zeros(2, B, HEADS, cache.seen + 6, dtype=torch.float64)
    for b in range(B):
        for h in range(HEADS * GROUP):
            own = before[b, h // GROUP]
            own = own[own >= 0]
            for i in range(52, 56):
                at = torch.cat((own, torch.arange(50, i + 1)))
                logits = D**-0.5 * (text.k[b, h // GROUP, at].double() @ text.q[b, h, i].double())
                weights = torch.cat((logits, sinks[h : h + 1].double())).softmax(0)[:-1]
                scores[b, h // GROUP, at] += weights / GROUP
                plain[b, h // GROUP, at] += logits.softmax(0) / GROUP
    seen = []
    text.cache.policy = policy = _Watched(**{x.name: getattr(policy, x.name) for x in fields(policy)})
    object.__setattr__(policy, "seen", seen)
    text.step(6, sink_logits=sinks)
    [view] = seen
    columns, positions = view.positions() >= 0, view.positions()
    at = positions.clamp(min=0)
    found = view.observed.double()
    assert found[~columns].isnan().all()
    torch.testing.assert_close(found[columns], scores.gather(2, at)[columns], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(scores, plain, atol=1e-3)


@dataclass(frozen=True, eq=False)
class _Watched(kvops.SnapKV):
    def evict(self, view):
        self.seen.append(view)
        return super().evict(view)


def ragged(policy=POLICIES[2], steps=(50, 1, 1), **options):
    text = Text(policy, **options)
    for t in steps:
        text.step(t)
    assert text.cache.ragged
    return text


def state(cache):
    return [x.clone() for x in (cache.k, cache.v, cache.positions, cache.lengths)]


def test_rows_of_beams():
    text = ragged()
    k, v, positions, lengths = state(text.cache)
    text.cache.reorder(torch.tensor([1, 0], device=k.device))
    assert kit.same(state(text.cache), [x.flip(0) for x in (k, v, positions, lengths)])
    text.cache.repeat_interleave(2)
    assert text.cache.rows == 4
    more = [kit.randn(4, h, 1, d, seed=5) for h, d in ((HEADS * GROUP, D), (HEADS, D), (HEADS, DV))]
    out = text.cache.attend(*more)
    assert torch.equal(text.cache.k[1, 0, : lengths[1, 0]], k[1, 0, : lengths[1, 0]])
    for row in range(4):  # each beam goes its own way
        own = text.cache.lengths[row, 0] - 1
        assert torch.equal(text.cache.k[row, 0, own], more[1][row, 0, 0])
    text.cache.select_rows(torch.tensor([2], device=k.device))
    assert text.cache.rows == 1 and torch.equal(text.cache.k[0, 0, :3], k[0, 0, :3]) and out.isfinite().all()


def test_beams_that_keep_fewer_tokens():
    """After the longest row has left, the cache is as wide as the longest that is left."""
    text = ragged()
    lengths = text.cache.lengths
    for row in range(B):
        one = copy.copy(text.cache)
        one.select_rows(torch.tensor([row], device=lengths.device))
        assert len(one) == lengths[row].max() and one.k.shape[2] == len(one) and one.positions.shape[2] == len(one)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_copies_are_independent(how):
    text = ragged()
    before = state(text.cache)
    twin, seen = how(text.cache), text.cache.seen
    other = [kit.randn(B, h, 1, d, seed=6) for h, d in ((HEADS * GROUP, D), (HEADS, D), (HEADS, DV))]
    twin.attend(*other)
    assert kit.same(state(text.cache), before) and text.cache.seen == seen
    text.step(1)
    own = int(twin.lengths[0, 0]) - 1
    assert torch.equal(twin.k[0, 0, own], other[1][0, 0, 0]) and torch.equal(
        text.cache.k[0, 0, own], text.k[0, 0, seen]
    )
    text.check()


def test_crop_forgets_the_last_tokens():
    text = ragged()
    before, seen = state(text.cache), text.cache.seen
    for _ in range(3):
        text.step(1)
    text.cache.crop(seen)
    assert text.cache.seen == seen and kit.same(state(text.cache), before)
    with kit.refuses("KeyDiff: cannot crop to 49 tokens, because the last eviction came after 50"):
        text.cache.crop(49)
    out, want = text.step(1), text.attention(before[2], seen, 1)
    torch.testing.assert_close(out.double(), want.to(out.device), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("policy", [POLICIES[1], POLICIES[7]], ids=lambda x: x.name)
def test_frozen_caches_grow_and_catch_up(policy):
    text = ragged(policy, (50,))
    text.cache.freeze()
    lengths = text.cache.lengths
    for _ in range(9):
        text.step(1)
    assert torch.equal(text.cache.lengths, lengths + 9)
    text.cache.frozen = False
    if isinstance(policy, QueryPolicy):
        text.step(1)
    else:
        text.cache.catch_up()
    assert (text.cache.lengths.sum(1) == HEADS * 20).all()
    text.check()


@pytest.mark.parametrize("policy", [POLICIES[1], POLICIES[7], POLICIES[10]], ids=lambda x: x.name)
def test_a_failed_step_changes_nothing(policy, monkeypatch):
    text = ragged(policy, (50, 1, 1))
    twin = ragged(policy, (50, 1, 1))
    before, seen = state(text.cache), text.cache.seen

    def fails(*args, **options):
        raise KeyError("fails")

    with monkeypatch.context() as m, pytest.raises(KeyError):
        m.setattr(type(policy), "scores", fails)
        text.step(8)
    with kit.refuses("k must hold at least one token"):
        text.step(0)
    with kit.refuses("must match the cached tokens", f"{B}, {HEADS}, {D}"):
        text.cache.append(text.k[:, :1, :1], text.v[:, :1, :1])
    assert text.cache.seen == seen and kit.same(state(text.cache), before)
    for t in (8, 1, 1, 1):
        assert torch.equal(text.step(t), twin.step(t))


@pytest.mark.parametrize("policy", [POLICIES[1], POLICIES[10]], ids=lambda x: x.name)
def test_chunks_in_which_a_row_is_all_padding(policy):
    """Nothing is evicted until each row has a token, and padding is never a token of a head."""
    text = Text(policy, [0, 45])
    for t in (30, 15, 20, 1, 1, 20):
        before, first = text.cache.positions, text.cache.seen
        out, want = text.step(t), text.attention(before, first, t)
        torch.testing.assert_close(out.double(), want.to(out.device), atol=1e-5, rtol=1e-5)
        assert text.cache.ragged == (text.cache.seen > 45)
        text.check()
    assert (text.cache.lengths.sum(1) == HEADS * 20).all()


def test_a_pool_that_is_full_grows():
    text, sizes = ragged(replace(POLICIES[2], budget=20)), set()
    for _ in range(50):
        text.step(1)
        text.check()
        sizes.add(text.cache.nbytes)
    assert 2 <= len(sizes) <= 5


def test_reset():
    text = ragged()
    text.cache.reset()
    assert not text.cache.ragged and text.cache.k is None and text.cache.lengths is None and text.cache.nbytes == 0
    text.step(50)
    text.check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_dtypes(dtype):
    """Rows are moved bit for bit. fp8 has no attention of a dense prompt, so that is one's own."""
    policy = replace(kvops.KeyDiff(20, buffer=2), head_mode="adaptive")
    text = Text(policy, dtype=dtype, dv=16)
    text.cache.append(text.k[:, :, :50], text.v[:, :, :50])
    for _ in range(5):
        before, first = text.cache.positions, text.cache.seen
        out, want = text.step(1), text.attention(before, first, 1)
        torch.testing.assert_close(out.double(), want.to(out.device), atol=0.02, rtol=0.02)
        positions, lengths = text.cache.positions, text.cache.lengths
        for b in range(B):
            for h in range(HEADS):
                own = positions[b, h, : lengths[b, h]]
                at = text.cache.k[b, h, : lengths[b, h]]
                assert torch.equal(at.view(torch.uint8), text.k[b, h].view(torch.uint8)[own])


def test_append_needs_attention():
    text = Text(POLICIES[1])
    text.cache.append(text.k[:, :, :50], text.v[:, :, :50])  # its K and V are there for any attention
    now = text.k[:, :, 50:51], text.v[:, :, 50:51]
    step = text.cache.append(*now)
    assert step[0] is now[0] and step[1] is now[1]
    with kit.refuses("KeyDiff: expected attention", "heads that differ in length", kind=RuntimeError):
        text.cache.append(*now)
    text.cache.attention(text.q[:, :, 50:51], *step)
    text.cache.release()
    with kit.refuses("KeyDiff: expected attention.. or read.. before release", kind=RuntimeError):
        text.cache.attention(text.q[:, :, 50:51], *step)
    text.cache.append(*now)


def test_refusals():
    text = ragged()
    with kit.refuses(r"KeyDiff: keep\(\) expected heads that hold the same slots, got Cache\(KeyDiff.* 52 tokens seen"):
        text.cache.keep(torch.arange(3))
    with kit.refuses("set_pads must be called before the first append, got a cache with 52 tokens"):
        text.cache.set_pads(kit.int32(0, 1))
    for policy, why in (
        (kvops.StreamingLLM(20), "it keeps one set of tokens for all heads"),
        (kvops.ChunkKV(20, 4), "it keeps one set of tokens for all heads"),
        (kvops.TOVA(20), "it keeps one set of tokens for all heads"),
        (kvops.H2O(20), "its rule makes .'scores',. in `evict`"),
        (kvops.KeyDiff(20, merge=True), "merge=True averages values"),
        (kvops.KeyDiff(20, protect="prompt"), "protect='prompt' needs"),
    ):
        with kit.refuses(f"{policy.name}: a cache does not support head_mode='adaptive', because {why}"):
            kvops.Cache(replace(policy, head_mode="adaptive"))
    with kit.refuses("Cache: head_mode='adaptive' needs attend_before_compress=True, .* got False"):
        kvops.Cache(POLICIES[0], attend_before_compress=False)


def test_arguments_of_the_attention_are_those_of_other_caches():
    """Errors name the argument, and nothing changes."""
    text = ragged()
    now = [x[:, :, 52:53] for x in (text.q, text.k, text.v)]
    before = state(text.cache)
    for sinks in (torch.zeros(1), torch.zeros(HEADS * GROUP, dtype=torch.float64), torch.zeros(5)):
        with kit.refuses("KeyDiff: sink_logits must be torch.float32 .6."):
            text.cache.attend(*now, sink_logits=kit.on_device(sinks))
    for q in (now[0][:, :5], now[0].expand(-1, -1, 3, -1), now[0][..., :8]):
        with kit.refuses("KeyDiff: q must be .b, Hq, t, d. for the tokens just appended"):
            text.cache.attend(q, *now[1:])
    assert kit.same(state(text.cache), before)


def test_budgets_that_hold_the_protected_tokens_alone():
    """Nothing is left to share."""
    for policy in (kvops.KeyDiff(4, sinks=4), kvops.KeyDiff(0.05, sinks=4), kvops.RKV(6, window=4, sinks=2)):
        text = Text(replace(policy, head_mode="adaptive"))
        text.step(60)
        held = max(4, int(60 * policy.budget)) if isinstance(policy.budget, float) else policy.budget
        assert (text.cache.lengths == held).all()
        text.step(1)
        text.check()
    k, v = kit.kv(2, HEADS, 30, D)
    assert (
        kvops.KeyDiff(4, sinks=4, head_mode="adaptive").compress(k, v).indices == torch.arange(4).to(k.device)
    ).all()


def test_slots_that_the_caller_keeps():
    """keep() of a padded batch keeps no padding as tokens."""
    text = Text(replace(kvops.KeyDiff(100), head_mode="adaptive"), [0, 7])
    text.step(40)
    text.cache.keep(torch.arange(20, device=text.k.device))
    assert text.cache.lengths.tolist() == [[20] * HEADS, [13] * HEADS]
    text.check()
    before, out = text.cache.positions, text.step(1)
    torch.testing.assert_close(out.double(), text.attention(before, 40, 1).to(out.device), atol=1e-5, rtol=1e-5)


def test_a_row_that_keeps_padding_alone_holds_no_slots():
    """Its heads have no pages, and it may be the last row."""
    text = Text(kvops.KeyDiff(100, head_mode="adaptive"), [0, 5])
    text.step(7)
    text.cache.keep(torch.arange(3, device=text.k.device))
    assert text.cache.lengths.tolist() == [[3] * HEADS, [0] * HEADS]
    for found, want in ((text.cache.k, text.k), (text.cache.v, text.v)):
        assert torch.equal(found[0], want[0, :, :3]) and not found[1].any()
    for _ in range(2):
        before, n = text.cache.positions, text.cache.seen
        out = text.step(1)
        torch.testing.assert_close(out.double(), text.attention(before, n, 1).to(out.device), atol=1e-5, rtol=1e-5)


def test_a_step_that_does_not_evict_copies_nothing(monkeypatch):
    """Neither rows nor rectangles; and a step that evicts makes one rectangle."""
    made = []
    rectangle = kvops.cache.ragged.Ragged.rectangle
    monkeypatch.setattr(kvops.cache.ragged.Ragged, "rectangle", lambda *args: made.append(args) or rectangle(*args))
    for policy, steps in ((POLICIES[1], (1, 1, 1)), (POLICIES[7], (1, 1)), (POLICIES[10], (1, 1, 3, 1))):
        text = ragged(policy, (50,))
        for t in steps:
            text.step(t)
        assert not made, policy
        text.step(6)
        assert len(made) == 1, policy
        made.clear()


def test_crop_frees_memory_and_ends_a_step():
    text = ragged(POLICIES[2], (30, 1))
    held = text.cache.nbytes
    text.cache.freeze()
    text.step(70)
    assert text.cache.nbytes > 2 * held
    text.cache.crop(31)
    assert text.cache.nbytes <= 1.5 * held
    text.check()
    now = [x[:, :, 31:32] for x in (text.q, text.k, text.v)]
    step = text.cache.append(*now[1:])
    text.cache.crop(31)
    with kit.refuses("expected attention.. or read.. before release", kind=RuntimeError):
        text.cache.attention(now[0], *step)
    text.cache.append(*now[1:])
    before = text.cache.positions[..., : len(text.cache) - 1]
    assert text.cache.attention(now[0], *step).isfinite().all() and before.shape[2] == len(text.cache) - 1


def test_empty_batches():
    text = ragged()
    text.cache.select_rows(torch.zeros(0, dtype=torch.int64, device=text.k.device))
    assert text.cache.rows == 0 and text.cache.lengths.shape == (0, HEADS)
    cache = kvops.Cache(POLICIES[0])
    out = cache.attend(*(x[:0, :, :50] for x in (text.q, text.k, text.v)))
    assert out.shape == (0, HEADS * GROUP, 50, DV) and cache.rows == 0


def test_pickles_and_inference_mode():
    with torch.inference_mode():
        text = ragged()
    text.cache = pickle.loads(pickle.dumps(text.cache))
    before, first = text.cache.positions, text.cache.seen
    out = text.step(1)
    torch.testing.assert_close(out.double(), text.attention(before, first, 1).to(out.device), atol=1e-5, rtol=1e-5)
    with torch.inference_mode():
        text = ragged()
    text.step(1)  # outside of it, on a copy
    text.check()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("policy", [kvops.SnapKV(16, 4, kernel_size=5), kvops.KeyDiff(16, sinks=2, recent=3)], ids=str)
def test_a_second_eviction_keeps_what_one_call_keeps_of_each_heads_tokens(policy, seed):
    """Pooling sees the head's own neighbours, without a gap between the tokens before and after the first eviction."""
    cache = kvops.Cache(replace(policy, head_mode="adaptive"))
    q, (k, v) = kit.randn(1, 4, 67, D, seed=seed), kit.kv(1, 2, 67, D, seed=seed + 100)
    for span in (slice(0, 50), slice(50, 67)):
        before = cache.positions
        cache.attend(*(x[:, :, span] for x in (q, k, v)))
    for head in range(2):
        held = torch.cat((before[0, head][before[0, head] >= 0], torch.arange(50, 67, device=k.device)))
        kept = cache.positions[0, head][cache.positions[0, head] >= 0]
        alone = replace(policy, budget=kit.int32(len(kept)).view(1, 1))
        queries = (q[:, 2 * head : 2 * head + 2, -4:],) if isinstance(policy, kvops.SnapKV) else ()
        want = alone.compress(k[:, head : head + 1, held], v[:, head : head + 1, held], *queries).indices
        assert torch.equal(kept, held[want[0, 0]])
