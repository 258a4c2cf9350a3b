"""Caches with policies that use queries: chunks, decode steps, padding, drafts; and LagKV's padded batches."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from test_streaming import assert_same_state, chunks, examples, rows

pytestmark = kit.every_device

METHODS = [
    kvops.SnapKV(12, 4),
    kvops.SnapKV(0.4, 4, head_mode="shared", pooling="avg", kernel_size=3),
    kvops.SnapKV(12, 4, score="dot", pool_first=True, group_reduce="max"),
    kvops.DefensiveKV(20, 4, w_o=torch.ones(6, 4 * 8).cumsum(0).cumsum(1)),
    kvops.CriticalKV(12, 4, w_o=torch.ones(6, 4 * 8).cumsum(0).cumsum(1)),
    kvops.RKV(12, 4, buffer=5),
    kvops.PyramidKV(12, 4),
    kvops.ChunkKV(12, 4, chunk=5),
    kvops.H2O(12),
    kvops.H2O(12, buffer=5),
    kvops.H2O(0.4, recent=3, head_mode="shared"),
    kvops.TOVA(12),
    kvops.TOVA(0.4),
    kvops.TOVA(12, buffer=0.4),
    kvops.LAQ(12),
    kvops.ProtoKV(12, 4, num_sats=4, num_chunks=6, buffer=5, alpha=2),
    kvops.ProtoKV(0.4, 4, num_chunks=6, clusters="chunks", score="softmax", head_mode="shared", buffer=None),
]
every_method = pytest.mark.parametrize("policy", METHODS, ids=repr)


def make(seed=0, b=2, heads=2, group=2, n=60, d=16, dv=8):
    k, v = kit.kv(b, heads, n, d, dv=dv, seed=seed)
    return kit.randn(b, heads * group, n, d, seed=seed + 1), k, v


def feed(cache, q, k, v, pieces, first=0):
    """Attend to q, k, v in pieces of the given lengths, then token by token; return the cache. cache: or a policy."""
    cache = kvops.Cache(cache) if isinstance(cache, kvops.Policy) else cache
    sizes = [*pieces]
    while first < k.shape[2]:
        last = min(k.shape[2], first + (max(1, sizes.pop(0)) if sizes else 1))
        cache.attend(*(x[:, :, first:last] for x in (q, k, v)))
        first = last
    return cache


# All policies


@every_method
@examples
@given(pieces=chunks, pads=st.none() | st.integers(0, 30))
def test_attend_is_attention_over_what_is_stored(policy, pieces, pads):
    q, k, v = make()
    cache, first = kvops.Cache(policy, layer=1, num_layers=4), 0
    if not policy.fixed_budget:  # its rows begin with empty slots, see test_padded_rows.py
        pads = None
    if pads is not None:
        cache.set_pads(torch.tensor([0, pads]))
        k[1, :, :pads], v[1, :, :pads] = 7e3, 7e3
    for t in [*pieces, 9, 1, 1, 14, 1]:
        last = min(60, first + t)
        stored = (k[:, :, :0], v[:, :, :0]) if cache.k is None else (cache.k, cache.v)
        seen = [torch.cat((x, y[:, :, first:last]), 2) for x, y in zip(stored, (k, v))]
        starts = None
        if pads is not None:
            starts = (cache.pads + (torch.tensor([0, pads]) - first).clamp(0, last - first)).int()
        if last > first:
            out = cache.attend(*(x[:, :, first:last] for x in (q, k, v)))
            want = kvops.attention(q[:, :, first:last], *seen, starts=starts, backend="kvops").out
            torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
        first = last
        positions = cache.positions
        assert (positions.diff(dim=-1) > 0).all() and cache.seen == first
        assert torch.equal(cache.k, rows(k, positions)) and torch.equal(cache.v, rows(v, positions))
        kit.assert_holds_little(cache, 16 + 8)
        if pads is not None:
            left = max(0, len(cache) - max(0, first - pads))
            assert cache.pads.tolist() == [0, left]
            assert torch.equal(positions[1, 0] < pads, torch.arange(len(cache)) < left)


@every_method
def test_batch_operations_are_those_of_a_batch_fed_so(policy):
    q, k, v = make(b=3)
    pads = torch.tensor([0, 4, 9])
    for change, as_rows in (
        (lambda m: m.reorder(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda m: m.select_rows(torch.tensor([1])), [1]),
        (lambda m: m.repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        changed, want = kvops.Cache(policy, layer=2, num_layers=4), kvops.Cache(policy, layer=2, num_layers=4)
        changed.set_pads(pads)
        want.set_pads(pads[as_rows])
        feed(changed, *(x[:, :, :30] for x in (q, k, v)), [25])
        change(changed)
        feed(changed, q[as_rows], k[as_rows], v[as_rows], [], first=30)
        feed(want, *(x[as_rows, :, :30] for x in (q, k, v)), [25])
        assert_same_state(changed, feed(want, q[as_rows], k[as_rows], v[as_rows], [], first=30))


@every_method
def test_fresh_and_reset_are_empty_with_the_same_settings(policy):
    q, k, v = make()
    used = feed(kvops.Cache(policy, layer=3, num_layers=7), q, k, v, [20, 30])
    twin = kvops.Cache(policy, layer=3, num_layers=7)
    assert (twin.layer, twin.num_layers) == (3, 7) and len(twin) == twin.seen == 0 and twin.k is None
    assert repr(twin).partition(":")[0] == repr(used).partition(":")[0] and twin.policy is used.policy is policy
    feed(twin, q, k, v, [20, 30])
    assert_same_state(used, twin)
    used.reset()
    assert len(used) == used.seen == used.nbytes == 0 and used.positions is None
    assert_same_state(feed(used, q, k, v, [20, 30]), twin)
    hidden = {"w_o": policy.w_o} if policy.w_o is not None else {}
    assert eval(repr(policy), vars(kvops)).__dict__ | hidden == policy.__dict__


@every_method
def test_frozen_caches_only_grow(policy):
    """Nothing is evicted, positions continue from the prompt, every step attends to all; reset() unfreezes."""
    q, k, v = make()
    cache = feed(kvops.Cache(policy, layer=1, num_layers=4), *(x[:, :, :30] for x in (q, k, v)), [25])
    kept = cache.positions
    cache.freeze()
    for first, last in [(30, 50), *((i, i + 1) for i in range(50, 60))]:
        out = cache.attend(*(x[:, :, first:last] for x in (q, k, v)))
        positions = torch.cat((kept, torch.arange(30, last).expand(2, 2, -1)), 2)
        assert cache.seen == last and torch.equal(cache.positions, positions)
        assert torch.equal(cache.k, rows(k, positions)) and torch.equal(cache.v, rows(v, positions))
        want = kvops.attention(q[:, :, first:last], rows(k, positions), rows(v, positions), backend="kvops").out
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
    cache.reset()
    assert_same_state(feed(cache, q, k, v, [25]), feed(kvops.Cache(policy, layer=1, num_layers=4), q, k, v, [25]))


@every_method
def test_errors_change_nothing(policy):
    q, k, v = make()
    cache = feed(kvops.Cache(policy), *(x[:, :, :30] for x in (q, k, v)), [30])
    state = copy.deepcopy(cache)
    more = [x[:, :, 30:36] for x in (q, k, v)]
    for wrong in (more[0][:, :3], more[0][:, :, :5], more[0][..., :8], more[0].clone().requires_grad_()):
        with pytest.raises(ValueError, match=f"{type(policy).__name__}: q "):
            cache.attend(wrong, *more[1:])
        assert_same_state(cache, state)
    with pytest.raises(ValueError, match="scale must be positive"):
        cache.attend(*more, scale=-1.0)
    assert_same_state(feed(cache, q, k, v, [], first=30), feed(state, q, k, v, [], first=30))


# SnapKV, PyramidKV, ChunkKV, DefensiveKV

W_O = torch.ones(6, 4 * 8).cumsum(0).cumsum(1)

SHARED = dict(head_mode="shared", pooling="avg")
WINDOWS = {
    "SnapKV": (kvops.SnapKV(12, 4), kvops.snapkv_compress, {}),
    "SnapKV shared": (kvops.SnapKV(0.4, 4, **SHARED), kvops.snapkv_compress, SHARED),
    "DropKV": (kvops.SnapKV(12, 4, score="drop"), kvops.snapkv_compress, dict(score="drop")),
    "ChunkKV": (kvops.ChunkKV(12, 4, chunk=5), kvops.chunkkv_compress, dict(chunk=5)),
    "DefensiveKV": (kvops.DefensiveKV(12, 4, w_o=W_O), kvops.defensivekv_compress, dict(w_o=W_O)),
    "PyramidKV": (kvops.PyramidKV(12, 4), kvops.pyramidkv_compress, dict(layer=1, num_layers=3)),
}
every_window = pytest.mark.parametrize("policy, compress, options", WINDOWS.values(), ids=WINDOWS)


@every_window
@examples
@given(pieces=st.lists(st.integers(1, 25), max_size=4), seed=st.integers(0, 99))
def test_steps_of_a_window_compress_what_is_stored(policy, compress, options, pieces, seed):
    q, k, v = make(seed)
    cache = kvops.Cache(policy, layer=1, num_layers=3)
    positions, first = torch.empty(2, 2, 0, dtype=torch.int64), 0
    for t in [*pieces, 15, 1, 1, 6]:
        last = min(60, first + t)
        if last == first:
            break
        cache.attend(*(x[:, :, first:last] for x in (q, k, v)))
        positions = torch.cat((positions, torch.arange(first, last).expand(2, 2, -1)), 2)
        budget = policy.budget if isinstance(policy.budget, int) else max(4, int(policy.budget * last))
        if last - first >= 4:  # otherwise it grows
            if compress is kvops.pyramidkv_compress:
                budget = kvops.pyramidkv_budgets(budget, 3, last, 4)[1]  # of the tokens seen
                kept = kvops.snapkv_compress(rows(k, positions), rows(v, positions), q[:, :, last - 4 : last], budget)
            else:
                kept = compress(rows(k, positions), rows(v, positions), q[:, :, last - 4 : last], budget, **options)
            positions = positions.gather(2, kept.indices)
        assert torch.equal(cache.positions, positions)
        first = last


@every_window
def test_one_step_is_one_call(policy, compress, options):
    q, k, v = make()
    cache = feed(kvops.Cache(policy, layer=1, num_layers=3), q, k, v, [60])
    want = compress(k, v, q[:, :, -4:], policy.budget, **options)
    assert torch.equal(cache.positions, want.indices) and torch.equal(cache.k, want.k)


@pytest.mark.parametrize("make_policy", [lambda: kvops.SnapKV(12, 4), lambda: kvops.ChunkKV(12, 4, chunk=5)])
def test_padded_rows_keep_what_they_keep_alone(make_policy):
    q, k, v = make()
    k[1, :, :17], v[1, :, :17], q[1, :, :17] = 9e3, 9e3, 9e3
    cache = kvops.Cache(make_policy())
    cache.set_pads(torch.tensor([0, 17]))
    feed(cache, *(x[:, :, :50] for x in (q, k, v)), [10, 40])
    alone = feed(make_policy(), *(x[1:, :, 17:50] for x in (q, k, v)), [33])
    assert torch.equal(cache.positions[1:] - 17, alone.positions) and torch.equal(cache.k[1:], alone.k)


def test_pyramid_layers_add_up():
    q, k, v = make(n=200)
    policy = kvops.PyramidKV(20, 8)
    assert not policy.uniform_layers
    lengths = [len(feed(kvops.Cache(policy, layer=layer, num_layers=5), q, k, v, [200])) for layer in range(5)]
    assert lengths == kvops.pyramidkv_budgets(20, 5, 200, 8) and sum(lengths) == 100 and lengths[0] > lengths[-1]
    chunked = [len(feed(kvops.Cache(policy, layer=layer, num_layers=5), q, k, v, [50] * 4)) for layer in range(5)]
    assert chunked == lengths


def test_snapkv_crop():
    q, k, v = make()
    cache = feed(kvops.SnapKV(12, 4), q, k, v, [50])
    assert len(cache) == 22
    with pytest.raises(ValueError, match="cannot crop to 49 tokens"):
        cache.crop(49)
    cache.crop(53)
    assert len(cache) == 15 and torch.equal(cache.positions[..., 12:], torch.arange(50, 53).expand(2, 2, -1))
    assert_same_state(feed(cache, q, k, v, [], first=53), feed(kvops.SnapKV(12, 4), q, k, v, [50]))


def test_models_logits_are_scored_as_they_are():
    """The scores use the scale, softcap and sinks of the attention."""
    q, k, v = make()
    options = dict(scale=0.7, softcap=3.0, sink_logits=kit.randn(4))
    cache = kvops.Cache(kvops.SnapKV(20, 4))
    cache.attend(q, k, v, **options)
    assert torch.equal(cache.positions, kvops.snapkv_compress(k, v, q[:, :, -4:], 20, **options).indices)
    assert not torch.equal(cache.positions, kvops.snapkv_compress(k, v, q[:, :, -4:], 20).indices)


# H2O and TOVA


def h2o_simulated(q, k, budget, recent, steps):
    """One row and head, in fp64: the kept positions after each step. q: [G, n, d], k: [n, d]."""
    stored, scores, kept = [], {}, []
    first = 0
    for t in steps:
        new = list(range(first, first + t))
        stored += new
        scores.update({j: 0.0 for j in new})
        for i in new:
            seen = [j for j in stored if j <= i]
            a = (q[:, i] @ k[seen].T * k.shape[1] ** -0.5).softmax(-1).mean(0)
            for j, x in zip(seen, a.tolist()):
                scores[j] += x
        if len(stored) > budget:
            old = sorted(stored[:-recent], key=lambda j: (-scores[j], j))[: budget - recent]
            stored = sorted(old) + stored[-recent:]
        kept.append([*stored])
        first += t
    return kept


@pytest.mark.parametrize("steps", [[60], [25, 20, 15], [8] + [1] * 52, [1] * 60, [30] + [1] * 10 + [10] + [1] * 10])
def test_h2o_accumulates_over_steps(steps):
    q, k, v = make()
    cache, first, kept = kvops.Cache(kvops.H2O(12)), 0, []
    for t in steps:
        cache.attend(*(x[:, :, first : first + t] for x in (q, k, v)))
        kept.append(cache.positions.clone())
        assert cache.state["scores"].shape == (2, 2, len(cache))
        first += t
    for b in range(2):
        for h in range(2):
            want = h2o_simulated(q[b, 2 * h : 2 * h + 2].double(), k[b, h].double(), 12, 6, steps)
            assert [x[b, h].tolist() for x in kept] == want


def test_h2o_one_step_is_one_call():
    q, k, v = make(n=kit.size(300, 60))
    for options in ({}, dict(recent=3, head_mode="shared", group_reduce="max")):
        cache = feed(kvops.H2O(20, **options), q, k, v, [k.shape[2]])
        want = kvops.h2o_compress(k, v, q, 20, **options)
        assert torch.equal(cache.positions, want.indices) and torch.equal(cache.k, want.k)


def test_h2o_cannot_forget():
    q, k, v = make(n=10)
    cache = feed(kvops.H2O(12), q, k, v, [10])
    with pytest.raises(ValueError, match="H2O: cannot crop to 9 of 10 tokens, because the scores include"):
        cache.crop(9)
    cache.crop(10)
    assert len(cache) == 10
    with pytest.raises(TypeError, match="crop expected an int"):
        cache.crop(None)


@pytest.mark.parametrize("budget", [12, 0.3])
@pytest.mark.parametrize("steps", [[60], [25, 20, 15], [8] + [1] * 52])
def test_tova_steps_are_calls(budget, steps):
    q, k, v = make()
    cache, positions, first = kvops.Cache(kvops.TOVA(budget)), torch.empty(2, 2, 0, dtype=torch.int64), 0
    for t in steps:
        last = first + t
        cache.attend(*(x[:, :, first:last] for x in (q, k, v)))
        positions = torch.cat((positions, torch.arange(first, last).expand(2, 2, -1)), 2)
        keep = budget if isinstance(budget, int) else max(1, int(budget * last))
        kept = kvops.tova_compress(rows(k, positions), rows(v, positions), q[:, :, last - 1 : last], keep).indices
        positions = positions.gather(2, kept)
        assert torch.equal(cache.positions, positions)
        first = last


# L2


@pytest.mark.parametrize("options", [dict(budget=12), dict(budget=0.3, sinks=2, recent=0.25, head_mode="shared")])
@examples
@given(pieces=chunks)
def test_l2_steps_are_calls(options, pieces):
    _, k, v = make()
    cache, positions, first = kvops.Cache(kvops.L2(**options)), torch.empty(2, 2, 0, dtype=torch.int64), 0
    for t in [*pieces, 15, 1, 1]:
        last = min(60, first + t)
        cache.append(k[:, :, first:last], v[:, :, first:last])
        positions = torch.cat((positions, torch.arange(first, last).expand(2, 2, -1)), 2)
        budget = options["budget"]
        if isinstance(budget, float):
            budget = max(1, int(budget * last))
            budget = max(budget, 2 + int(0.25 * budget))
        recent = int(0.25 * max(1, int(0.3 * last))) if "recent" in options else 0
        call = dict(options, budget=budget, recent=recent)
        positions = positions.gather(2, kvops.l2_compress(rows(k, positions), rows(v, positions), **call).indices)
        assert torch.equal(cache.positions, positions)
        first = last


def test_l2_leaves_the_first_layers_of_deep_models():
    _, k, v = make()
    for layer, layers, length in [(0, 9, 60), (1, 9, 60), (2, 9, 12), (0, 8, 12)]:
        cache = kvops.Cache(kvops.L2(12), layer=layer, num_layers=layers)
        cache.append(k, v)
        assert len(cache) == length
    assert not kvops.L2(12).uniform_layers and kvops.L2(12, skip_layers=()).uniform_layers


# LAQ


def prompt_and_draft(seed=0, n=50, steps=5, **options):
    """Tensors of a prompt, and of the steps after it."""
    q, k, v = make(seed, n=n + steps, **options)
    return [x[:, :, :n] for x in (q, k, v)], [x[:, :, n:] for x in (q, k, v)]


@pytest.mark.parametrize("window", [0, 4])
@examples
@given(
    pieces=st.lists(st.integers(1, 25), max_size=4),
    budget=st.sampled_from([12, 0.3, 70]),
    ended=st.none() | st.lists(st.integers(1, 5), min_size=2, max_size=2),
    compat=st.booleans(),
    score=st.sampled_from(["softmax", "dot"]),
    seed=st.integers(0, 99),
)
def test_laq_is_its_two_calls(window, pieces, budget, ended, compat, score, seed):
    (q, k, v), (q_ahead, k_ahead, v_ahead) = prompt_and_draft(seed)
    cache = feed(kvops.LAQ(budget, window, compat_mask=compat, score=score), q, k, v, pieces)
    assert len(cache) == 50 and torch.equal(cache.k, k)
    draft = cache.draft()
    tokens = budget if isinstance(budget, int) else int(budget * 50)
    first = kvops.snapkv_compress(k, v, q[:, :, -min(32, tokens // 2) :], tokens)
    assert torch.equal(draft.positions, first.indices) and torch.equal(draft.k, first.k) and draft.seen == 50
    feed(draft, q_ahead, k_ahead, v_ahead, [])
    assert torch.equal(draft.queries, q_ahead) and len(draft) == min(tokens, 50) + 5
    lengths = None if ended is None else kit.int32(*ended)
    cache.evict(draft, lengths)
    options = dict(q_window=q[:, :, -window:] if window else None, lookahead_lengths=lengths)
    want = kvops.laq_compress(k, v, q_ahead, tokens, compat_mask=compat, score=score, **options)
    assert torch.equal(cache.positions, want.indices) and torch.equal(cache.k, want.k) and torch.equal(cache.v, want.v)
    assert len(draft) == 0 and draft.queries is None and cache.seen == 50
    feed(cache, q_ahead, k_ahead, v_ahead, [])
    assert len(cache) == min(tokens, 50) + 5 and cache.seen == 55
    kit.assert_holds_little(cache, 16 + 8)


STAGE1 = [
    kvops.StreamingLLM(12),
    kvops.Full(),
    kvops.KeyDiff(20),
    kvops.TOVA(9),
    kvops.SnapKV(60, 40),
    kvops.PyramidKV(12, 4),
    kvops.ProtoKV(12, 4, num_chunks=9),
]


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, kvops.SnapKV(100, 32)),
        ({"stage1": "SnapKV", "stage1_budget": 40}, kvops.SnapKV(40, 20)),
        ({"stage1": "full", "stage1_budget": 40}, kvops.Full()),
        ({"stage1": "keydiff"}, kvops.KeyDiff(100, buffer=1)),
        ({"stage1": "keydiff-window", "stage1_budget": 40}, kvops.KeyDiff(40, buffer=1, recent=0.2)),
        ({"stage1": "lacache"}, kvops.LaCache(100, task="understanding", span=2)),
    ],
)
def test_the_first_stage_by_name(settings, expected):
    assert kvops.LAQ(100, **settings).draft_policy(200, 4) == expected


@pytest.mark.parametrize("stage1", STAGE1, ids=repr)
def test_laq_with_another_first_stage(stage1):
    (q, k, v), ahead = prompt_and_draft(n=100)
    cache = feed(kvops.Cache(kvops.LAQ(12, stage1=stage1), layer=1, num_layers=3), q, k, v, [100])
    draft, alone = cache.draft(), feed(kvops.Cache(stage1, layer=1, num_layers=3), q, k, v, [100])
    assert_same_state(draft, alone)
    for i in range(5):
        step = [x[:, :, i : i + 1] for x in ahead]
        torch.testing.assert_close(draft.attend(*step), alone.attend(*step))
    assert_same_state(draft, alone)
    assert draft.policy is stage1 and draft.drafts and (draft.layer, draft.num_layers) == (1, 3)
    assert torch.equal(draft.queries, ahead[0]) and repr(draft) == repr(alone)
    before = cache.k
    cache.evict(draft)
    assert torch.equal(cache.positions, kvops.laq_compress(k, v, ahead[0], 12).indices) and torch.equal(before, k)


def test_laq_in_padded_batches():
    (q, k, v), ahead = prompt_and_draft(n=50)
    k[1, :, :17], v[1, :, :17], q[1, :, :17] = 9e3, 9e3, 9e3
    cache = kvops.Cache(kvops.LAQ(12, 4))
    cache.set_pads(torch.tensor([0, 17]))
    feed(cache, q, k, v, [20])
    draft = cache.draft()
    feed(draft, *ahead, [])
    cache.evict(draft, kit.int32(5, 3))
    alone = feed(kvops.LAQ(12, 4), q[1:, :, 17:], k[1:, :, 17:], v[1:, :, 17:], [33])
    one = alone.draft()
    feed(one, *(x[1:] for x in ahead), [])
    alone.evict(one, kit.int32(3))
    assert torch.equal(cache.positions[1:] - 17, alone.positions) and torch.equal(cache.k[1:], alone.k)
    assert cache.pads.tolist() == [0, 0]


def test_laq_second_turn_and_beams():
    """Both stages again after a first turn, with rows changed between the stages."""
    (q, k, v), ahead = prompt_and_draft(n=50)
    cache = feed(kvops.LAQ(12, 4), q, k, v, [50])
    draft = cache.draft()
    feed(draft, *ahead, [])
    for x in (cache, draft):
        x.reorder(torch.tensor([1, 1]))
    cache.evict(draft)
    want = kvops.laq_compress(k, v, ahead[0], 12, q_window=q[:, :, -4:])
    assert torch.equal(cache.positions, want.indices[[1, 1]])
    turn, later = prompt_and_draft(7, n=30)
    feed(cache, *turn, [30])
    stored = cache.k.clone(), cache.v.clone()
    assert len(cache) == 42
    draft = cache.draft()
    feed(draft, *later, [])
    cache.evict(draft)
    want = kvops.laq_compress(*stored, later[0], 12, q_window=turn[0][:, :, -4:])
    assert torch.equal(cache.k, want.k) and cache.seen == 80


def test_laq_forgets_the_queries_of_cropped_tokens():
    (q, k, v), ahead = prompt_and_draft(n=50)
    cache = feed(kvops.LAQ(12, 4), q, k, v, [50])
    feed(cache, *ahead, [])
    cache.crop(50)
    assert torch.equal(cache.k, k)
    draft, want = cache.draft(), feed(kvops.LAQ(12, 4), q, k, v, [50]).draft()
    assert_same_state(draft, want)


def test_laq_wrong_use():
    (q, k, v), ahead = prompt_and_draft(n=50)
    cache = kvops.Cache(kvops.LAQ(12, 4))
    with pytest.raises(RuntimeError, match=r"LAQ: draft\(\) must follow the attention of a prompt"):
        cache.draft()
    feed(cache, q, k, v, [50])
    draft = cache.draft()
    for wrong in (draft, kvops.Cache(kvops.Full()), None):
        with pytest.raises(RuntimeError, match=r"LAQ: evict\(\) expected a draft that has taken at least one step"):
            cache.evict(wrong)
    feed(draft, *ahead, [])
    state = copy.deepcopy(cache)
    with kit.refuses(r"LAQ: lookahead_lengths must be torch.int32 \[2\]"):
        cache.evict(draft, kit.int32(1))
    assert_same_state(cache, state)
    with kit.refuses("LAQ: stage1 must use a window of the last queries, expected at most 32 rows, got 50 from H2O"):
        feed(kvops.LAQ(12, stage1=kvops.H2O(12)), q, k, v, [50]).draft()
    cache.crop(48)
    draft = cache.draft()
    assert len(draft) == 12


def test_wrong_settings():
    for make_policy, error, message in [
        (
            lambda: kvops.SnapKV(31),
            ValueError,
            "SnapKV: budget must hold the window, expected at least 32 tokens, got 31",
        ),
        (lambda: kvops.PyramidKV(3, 4), ValueError, "PyramidKV: budget must hold the window"),
        (lambda: kvops.ChunkKV(3, 4), ValueError, "ChunkKV: budget must hold the window"),
        (lambda: kvops.LAQ(3, 4), ValueError, "LAQ: budget must hold the window"),
        (lambda: kvops.SnapKV(12, 0), ValueError, "SnapKV: window must be at least 1, got 0"),
        (lambda: kvops.SnapKV(12, 4, kernel_size=2), ValueError, "SnapKV: kernel_size must be odd"),
        (lambda: kvops.SnapKV(12, 4, pooling="sum"), ValueError, "SnapKV: pooling must be one of"),
        (lambda: kvops.SnapKV(12, 4, score="cosine"), ValueError, "SnapKV: score must be one of 'softmax', 'dot'"),
        (lambda: kvops.SnapKV(12, 4, head_mode="x"), ValueError, "SnapKV: head_mode must be one of"),
        (lambda: kvops.SnapKV(True), TypeError, "SnapKV: budget must be an int"),
        (lambda: kvops.ChunkKV(12, 4, chunk=0), ValueError, "ChunkKV: chunk must be at least 1, got 0"),
        (
            lambda: kvops.H2O(3, recent=4),
            ValueError,
            r"H2O: budget must hold sinks \+ recent, expected at least 0 \+ 4",
        ),
        (lambda: kvops.H2O(3, group_reduce="x"), ValueError, "H2O: group_reduce must be one of"),
        (lambda: kvops.TOVA(0), ValueError, "TOVA: budget must be at least 1 token, got 0"),
        (lambda: kvops.L2(3, sinks=4), ValueError, r"L2: budget must hold sinks \+ recent, expected at least 4 \+ 0"),
        (lambda: kvops.LAQ(12, -1), ValueError, "LAQ: window must be at least 0, got -1"),
        (lambda: kvops.LAQ(12, steps=0), ValueError, "LAQ: steps must be at least 1, got 0"),
        (lambda: kvops.LAQ(12, stage1=None), TypeError, "LAQ: stage1 must be a kvops policy .* got NoneType"),
        (lambda: kvops.LAQ(12, stage1="laq++"), ValueError, r"LAQ: stage1 must be one of full, .*, got 'laq\+\+'"),
        (
            lambda: kvops.LAQ(12, stage1=kvops.Full(), stage1_budget=8),
            ValueError,
            r"LAQ: stage1_budget is for a stage1 given by name, expected None with Full\(\), got 8",
        ),
    ]:
        with pytest.raises(error, match=message):
            make_policy()


# LagKV in padded batches


@pytest.mark.parametrize("options", [{}, dict(head_mode="shared"), dict(score="l2"), dict(reference="self")], ids=str)
@examples
@given(
    pieces=chunks,
    pads=st.lists(st.integers(0, 40), min_size=3, max_size=3),
    ratio=st.sampled_from([0.5, 0.0, 1.0]),
    seed=st.integers(0, 99),
)
def test_lagkv_rows_of_a_padded_batch_are_as_alone(options, pieces, pads, ratio, seed):
    _, k, v = make(seed, b=3)
    for row, pad in enumerate(pads):
        k[row, :, :pad], v[row, :, :pad] = torch.nan, torch.nan
    policy = kvops.LagKV(6, ratio, sinks=3, **options)
    cache = kvops.Cache(policy, layer=2, num_layers=4)
    alone = [kvops.Cache(policy, layer=2, num_layers=4) for _ in pads]
    cache.set_pads(torch.tensor(pads))
    first = 0
    for t in [*pieces, *[1] * 60]:
        last = min(60, first + t)
        cache.append(k[:, :, first:last], v[:, :, first:last])
        for row, (one, pad) in enumerate(zip(alone, pads)):
            span = slice(max(first, pad), max(last, pad))
            one.append(k[row : row + 1, :, span], v[row : row + 1, :, span])
            left = len(cache) - len(one)
            if any(pads):
                assert cache.pads[row] == left
            assert torch.equal(cache.k[row, :, left:], one.k[0]) and torch.equal(cache.v[row, :, left:], one.v[0])
            assert torch.equal(cache.positions[row, :, left:] - pad, one.positions[0])
        first = last


def test_lagkv_padded_batches_change_rows():
    _, k, v = make(b=3)
    cache, want = kvops.Cache(kvops.LagKV(6, 0.5, sinks=3)), kvops.Cache(kvops.LagKV(6, 0.5, sinks=3))
    cache.set_pads(torch.tensor([0, 8, 20]))
    want.set_pads(torch.tensor([20, 0, 0]))
    for m, r in ((cache, [0, 1, 2]), (want, [2, 0, 0])):
        m.append(k[r, :, :40], v[r, :, :40])
    cache.reorder(torch.tensor([2, 0, 0]))
    for m in (cache, want):
        for i in range(40, 60):
            m.append(k[[2, 0, 0], :, i : i + 1], v[[2, 0, 0], :, i : i + 1])
    left = want.pads.tolist()
    assert cache.pads.tolist()[0] - left[0] == len(cache) - len(want)
    for row in range(3):
        width = len(want) - left[row]
        assert torch.equal(cache.k[row, :, len(cache) - width :], want.k[row, :, left[row] :])


def test_lagkv_attends_in_padded_batches():
    q, k, v = make(b=2)
    k[1, :, :17], v[1, :, :17] = 9e3, 9e3
    cache, alone = kvops.Cache(kvops.LagKV(6, 0.5, sinks=3)), kvops.Cache(kvops.LagKV(6, 0.5, sinks=3))
    cache.set_pads(torch.tensor([0, 17]))
    for first, last in ((0, 30), (30, 31), (31, 50), (50, 51), (51, 60)):
        out = cache.attend(*(x[:, :, first:last] for x in (q, k, v)))
        start = max(first, 17)
        want = alone.attend(*(x[1:, :, start:last] for x in (q, k, v)))
        torch.testing.assert_close(out[1:, :, start - first :], want, rtol=1e-4, atol=1e-4)
