"""Caches: tokens in chunks and one by one, padding, and the operations of beam search and drafts."""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops import ops
from kvops.ops import reference

pytestmark = kit.every_device
examples = kit.examples(25, derandomize=True)

METHODS = [
    kvops.LagKV(6, 0.5, sinks=3),
    kvops.LagKV(6, 0.5, sinks=3, head_mode="shared"),
    kvops.LagKV(6, 0.5, sinks=3, score="l2"),
    kvops.KeyDiff(12),
    kvops.KeyDiff(12, sinks=2, recent=3, head_mode="shared"),
    kvops.KeyDiff(12, sinks=2, buffer=5),
    kvops.KeyDiff(12, metric="dot", anchor="median", recent=0.25),
    kvops.KeyDiff(0.4, sinks=2, recent=0.5, normalize_anchor=False),
    kvops.StreamingLLM(12),
    kvops.StreamingLLM(0.4),
    kvops.StreamingLLM(12, buffer=0.5),
    kvops.LaCache(12, span=2, overlap=0, sinks=2),
    kvops.LaCache(0.4, sinks=2),
    kvops.Random(12),
    kvops.Random(0.4, seed=5),
    kvops.L2(12),
    kvops.L2(12, buffer=None),
    kvops.L2(0.4, sinks=2, recent=3, head_mode="shared"),
    kvops.SATKV(12, 3, buffer=4),
    kvops.SATKV(0.4, 3, head_mode="shared", buffer=None),
    kvops.Full(),
]
every_method = pytest.mark.parametrize("policy", METHODS, ids=repr)
fixed_budget = pytest.mark.parametrize("policy", [m for m in METHODS if m.fixed_budget], ids=repr)


def make_kv(seed=0, b=2, heads=2, n=60, d=16, dv=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        kit.on_device(torch.randn(b, heads, n, x, generator=generator, device="cpu").to(dtype)) for x in (d, dv)
    )


def rows(x, positions):
    return x.gather(2, positions.unsqueeze(-1).expand(*positions.shape, x.shape[-1]))


def feed(cache, k, v, chunks, first=0):
    """Append k, v in pieces of the given lengths, then token by token; return the cache. cache: a cache or a policy."""
    cache = kvops.Cache(cache) if isinstance(cache, kvops.Policy) else cache
    sizes = [*chunks]
    while first < k.shape[2]:
        q = max(1, sizes.pop(0)) if sizes else 1
        cache.append(k[:, :, first : first + q], v[:, :, first : first + q])
        first += q
    return cache


def assert_same_state(a, b):
    assert a.seen == b.seen and len(a) == len(b)
    for x, y in ((a.k, b.k), (a.v, b.v), (a.positions, b.positions), (a.pads, b.pads)):
        assert (x is None and y is None) or torch.equal(x, y)


chunks = st.lists(st.integers(1, 25), max_size=4)


# Stored slots


@every_method
@examples
@given(chunks=chunks)
def test_stored_slots_are_the_tokens_at_their_positions(policy, chunks):
    k, v = make_kv()
    cache = feed(kvops.Cache(policy, layer=2, num_layers=4), k, v, chunks)
    positions = cache.positions
    assert cache.seen == 60 and positions.shape == (2, 2, len(cache)) and positions.dtype == torch.int64
    assert (positions.diff(dim=-1) > 0).all() and (positions >= 0).all() and (positions < 60).all()
    assert torch.equal(cache.k, rows(k, positions)) and torch.equal(cache.v, rows(v, positions))
    kit.assert_holds_little(cache, 16 + 8)


@every_method
def test_append_returns_what_the_step_attends_to(policy):
    k, v = make_kv()
    cache = kvops.Cache(policy, layer=2, num_layers=4)
    for first, last in ((0, 40), (40, 41), (41, 60)):
        stored_k = k[:, :, :0] if cache.k is None else cache.k.clone()
        stored_v = v[:, :, :0] if cache.v is None else cache.v.clone()
        k_step, v_step = cache.append(k[:, :, first:last], v[:, :, first:last])
        assert torch.equal(k_step, torch.cat((stored_k, k[:, :, first:last]), 2))
        assert torch.equal(v_step, torch.cat((stored_v, v[:, :, first:last]), 2))
    assert (len(cache) == 60) == (type(policy) is kvops.Full)


@pytest.mark.parametrize("make", [kvops.KeyDiff, kvops.StreamingLLM, kvops.Random], ids=lambda c: c.__name__)
def test_attend_after_compress(make):
    k, v = make_kv()
    cache = kvops.Cache(make(12), attend_before_compress=False)
    k_step, v_step = cache.append(k, v)
    assert k_step.shape[2] == 12 and torch.equal(k_step, cache.k) and torch.equal(v_step, cache.v)
    assert_same_state(cache, feed(make(12), k, v, [60]))


def test_lagkv_attend_after_compress():
    k, v = make_kv()
    k_step, v_step = kvops.Cache(kvops.LagKV(6, 0.5, sinks=3), attend_before_compress=False).append(k, v)
    want = kvops.lagkv_compress(k, v, 6, 0.5, sinks=3)
    assert torch.equal(k_step, want.k) and torch.equal(v_step, want.v)


@every_method
def test_memory_of_the_caller_is_not_held(policy):
    fused = torch.randn(2, 5, 4, 64).transpose(1, 2)  # q, k, v from one projection
    k, v = fused[:, :2, :, :16], fused[:, 2:, :, :8]
    cache = kvops.Cache(policy, layer=2, num_layers=4)
    cache.append(k, v)
    kit.assert_holds_little(cache, 16 + 8)
    stored = cache.k.clone()
    fused.zero_()
    assert torch.equal(cache.k, stored)


# Chunks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_mode", ["per_head", "shared"])
@pytest.mark.parametrize("score, reference", [("std", "lag"), ("std", "self"), ("l2", "lag")])
@examples
@given(
    chunks=chunks,
    lag=st.integers(0, 9).map(lambda x: 10 - x),
    ratio=st.sampled_from([0.4, 0.7, 0.0, 1.0]),
    sinks=st.integers(0, 9),
    n=st.integers(0, 59).map(lambda x: 60 - x),
)
def test_lagkv_one_shot_is_chunked_is_token_by_token(chunks, lag, ratio, sinks, n, dtype, head_mode, score, reference):
    k, v = make_kv(n=n, dtype=dtype)
    options = dict(sinks=sinks, head_mode=head_mode, score=score, reference=reference)
    want = kvops.lagkv_compress(k, v, lag, ratio, **options)
    for pieces in ([n], chunks, []):
        cache = feed(kvops.Cache(kvops.LagKV(lag, ratio, **options), layer=2, num_layers=3), k, v, pieces)
        assert torch.equal(cache.positions, want.indices)
        assert torch.equal(cache.k, want.k) and torch.equal(cache.v, want.v)


def test_lagkv_large_partitions_in_chunks():
    k, v = make_kv(n=16 + 5 * 256 + 100, d=64, dv=64)
    want = kvops.lagkv_compress(k, v, 256, 0.25)
    for pieces in ([528, 256, 256, 256], [100] * 14):
        cache = feed(kvops.LagKV(256, 0.25), k, v, pieces)
        assert torch.equal(cache.positions, want.indices) and torch.equal(cache.k, want.k)


def test_lagkv_fires_once_every_lag_tokens():
    k, v = make_kv(n=60)
    cache, lengths = kvops.Cache(kvops.LagKV(6, 0.5, sinks=3)), []
    for i in range(60):
        cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        lengths.append(len(cache))
    drops = [i + 1 for i in range(1, 60) if lengths[i] < lengths[i - 1]]
    assert drops == [3 + 2 * 6 + 6 * i for i in range(len(drops))] and drops[-1] == 57


def test_lagkv_l2_leaves_the_first_two_layers():
    k, v = make_kv()
    policy = kvops.LagKV(6, 0.5, sinks=3, score="l2")
    assert not policy.uniform_layers and kvops.LagKV(6, 0.5).uniform_layers
    lengths = [len(feed(kvops.Cache(policy, layer=layer, num_layers=3), k, v, [60])) for layer in range(3)]
    assert lengths[:2] == [60, 60] and lengths[2] < 60


KEYDIFF = [
    dict(budget=12),
    dict(budget=12, sinks=2, recent=3),
    dict(budget=20, recent=0.4, head_mode="shared", normalize_anchor=False),
    dict(budget=0.3, sinks=1),
    dict(budget=7, metric="euclidean"),
    dict(budget=7, anchor="pairwise"),
]


@pytest.mark.parametrize("options", KEYDIFF, ids=str)
def test_keydiff_blocks_of_infinity_are_one_shot(options):
    k, v = make_kv()
    want = kvops.keydiff_compress(k, v, **options)
    cache = kvops.Cache(kvops.KeyDiff(**options))
    cache.append(k, v)
    assert torch.equal(cache.positions, want.indices)
    assert torch.equal(cache.k, want.k) and torch.equal(cache.v, want.v)


@pytest.mark.parametrize("options", KEYDIFF, ids=str)
@examples
@given(chunks=chunks, seed=st.integers(0, 99))
def test_keydiff_is_one_shot_of_stored_and_new(options, chunks, seed):
    """Prompt chunks: each step keeps what one call would keep of the stored and the new tokens."""
    k, v = make_kv(seed)
    cache = kvops.Cache(kvops.KeyDiff(**options, refresh=1))
    positions, first = torch.empty(2, 2, 0, dtype=torch.int64), 0
    for q in [*chunks, 15, 1, 1, 1, 1]:
        last = min(60, first + q)
        cache.append(k[:, :, first:last], v[:, :, first:last])
        positions = torch.cat((positions, torch.arange(first, last).expand(2, 2, -1)), 2)
        budget = options["budget"] if isinstance(options["budget"], int) else max(1, int(options["budget"] * last))
        kept = kvops.keydiff_compress(rows(k, positions), rows(v, positions), **{**options, "budget": budget}).indices
        positions = positions.gather(2, kept)
        assert torch.equal(cache.positions, positions)
        first = last


@kit.only("cpu", "cuda")
@pytest.mark.parametrize("normalize_anchor", [True, False])
@pytest.mark.parametrize("head_mode", ["per_head", "shared"])
@pytest.mark.parametrize("pads", [None, [9, 100]])
def test_keydiff_running_anchor_agrees_with_the_recomputed_one(normalize_anchor, head_mode, pads):
    """Over hundreds of evictions, of one and of several tokens, with keys of very different norms."""
    k, v = make_kv(n=700)
    k = k * torch.logspace(-2, 2, 700)[kit.randn(700, seed=1).argsort()][:, None]
    options = dict(budget=64, recent=8, buffer=1, normalize_anchor=normalize_anchor, head_mode=head_mode)
    running, recomputed = (kvops.Cache(kvops.KeyDiff(**options, refresh=x)) for x in (10**9, 1))
    if pads is not None:
        running.set_pads(torch.tensor(pads))
        recomputed.set_pads(torch.tensor(pads))
    agree = total = 0
    for first in range(0, 700, 7):
        for a, b in ((0, 4), (4, 5), (5, 6), (6, 7)):
            for cache in (running, recomputed):
                cache.append(k[:, :, first + a : first + b], v[:, :, first + a : first + b])
        slots = dict(starts=running.pads)
        scores, anchor = kvops.ops.anchor_cosine(
            running.k, normalize_anchor=normalize_anchor, return_anchor=True, **slots
        )
        if (key_sum := running.state.get("anchor")) is not None:
            # About 700 keys entered and left a running sum of 64: fp32 round-off of the largest key in it.
            largest = 1.0 if normalize_anchor else k.norm(dim=-1).max()
            assert (key_sum - anchor).norm(dim=-1).max() < 1e-5 * largest * 8
        agree += (running.positions == recomputed.positions).sum().item()
        total += running.positions.numel()
    assert running.state["anchor"] is not None and recomputed.state["anchor"] is None
    assert agree == total


def test_keydiff_running_anchor_is_recomputed_in_time():
    k, v = make_kv(n=200, b=1)
    cache = feed(kvops.KeyDiff(32, buffer=1, refresh=50), k, v, [32])
    drifts = []
    for i in range(120):
        cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        drifts.append(cache.state["drift"])
        assert (cache.state["anchor"] is None) == (cache.state["drift"] == 0)
    assert max(drifts) == 49 and drifts.count(0) == 2


def test_keydiff_nan_keys_leave_first_and_leave_the_anchor_alone():
    k, v = make_kv(n=60, b=1, heads=1)
    k[0, 0, [5, 33, 41]] = torch.nan
    cache, clean = kvops.Cache(kvops.KeyDiff(16, refresh=10**9)), kvops.Cache(kvops.KeyDiff(16))
    good = [i for i in range(60) if i not in (5, 33, 41)]
    for i in range(60):
        cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        if i in good:
            clean.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        assert i < 20 or not cache.k.isnan().any()
    assert cache.state["anchor"].isfinite().all()
    assert torch.equal(cache.positions, torch.tensor(good)[clean.positions])


@pytest.mark.parametrize("make", [kvops.StreamingLLM, kvops.Random], ids=lambda c: c.__name__)
@examples
@given(chunks=chunks, seed=st.integers(0, 3))
def test_baselines_one_shot_is_chunked_is_token_by_token(make, chunks, seed):
    k, v = make_kv()
    options = dict(seed=seed) if make is kvops.Random else {}
    compress = kvops.random_compress if make is kvops.Random else kvops.streamingllm_compress
    want = compress(k, v, 12, **options)
    for pieces in ([60], chunks, []):
        cache = feed(make(12, **options), k, v, pieces)
        assert torch.equal(cache.positions, want.indices) and torch.equal(cache.k, want.k)


def test_random_differs_between_layers():
    k, v = make_kv()
    first, second = (
        feed(kvops.Cache(kvops.Random(12), layer=layer, num_layers=2), k, v, [60]).positions for layer in (0, 1)
    )
    assert not torch.equal(first, second)


# Budgets


@pytest.mark.parametrize(
    "policy",
    [
        kvops.LaCache(12, span=2, overlap=0, sinks=2),
        kvops.KeyDiff(12, sinks=2, buffer=1),
        kvops.StreamingLLM(12, buffer=1),
        kvops.Random(12, buffer=1),
    ],
    ids=repr,
)
def test_count_budgets_hold_after_every_step(policy):
    k, v = make_kv()
    cache = kvops.Cache(policy, layer=2, num_layers=4)
    for i in range(60):
        cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        assert len(cache) == min(i + 1, 12)


@pytest.mark.parametrize(
    "make, floor",
    [
        (lambda: kvops.KeyDiff(0.25), 1),
        (lambda: kvops.KeyDiff(0.25, sinks=3, recent=2), 5),
        (lambda: kvops.StreamingLLM(0.25), 5),
        (lambda: kvops.Random(0.25), 1),
    ],
)
def test_fractions_are_of_the_tokens_seen(make, floor):
    """So fractions do not compound; while the sequence is short, protected tokens are kept."""
    k, v = make_kv()
    cache = kvops.Cache(make())
    for first in range(0, 60, 3):
        cache.append(k[:, :, first : first + 3], v[:, :, first : first + 3])
        assert len(cache) == min(first + 3, max(floor, 1, (first + 3) // 4))


# Padding


@fixed_budget
@examples
@given(chunks=chunks, pads=st.integers(0, 30))
def test_padding_goes_first(policy, chunks, pads):
    k, v = make_kv()
    k[1, :, :pads], v[1, :, :pads] = torch.nan, torch.nan
    plain = feed(kvops.Cache(policy), k[:1], v[:1], chunks)
    cache = kvops.Cache(policy)
    cache.set_pads(torch.tensor([0, pads]))
    first = 0
    for q in [*chunks, *[1] * 60]:
        cache.append(k[:, :, first : first + q], v[:, :, first : first + q])
        first = min(60, first + q)
        left = cache.pads.tolist()
        valid_seen = max(0, first - pads)
        assert left == [0, max(0, len(cache) - valid_seen)]  # no token is evicted while padding is left
        assert torch.equal(cache.positions[1, 0] < pads, torch.arange(len(cache)) < left[1])
        assert not cache.k[1, :, left[1] :].isnan().any()
    assert torch.equal(cache.positions[:1], plain.positions)


@pytest.mark.parametrize("make", [kvops.StreamingLLM, kvops.Random], ids=lambda c: c.__name__)
def test_padded_rows_keep_what_they_keep_alone(make):
    k, v = make_kv()
    cache = kvops.Cache(make(12))
    cache.set_pads(torch.tensor([0, 17], dtype=torch.int32))
    feed(cache, k, v, [10, 20])
    alone = feed(make(12), k[1:, :, 17:], v[1:, :, 17:], [])
    assert torch.equal(cache.positions[1:] - 17, alone.positions) and torch.equal(cache.k[1:], alone.k)


def test_padded_rows_keep_what_they_keep_alone_keydiff():
    k, v = make_kv()
    cache, alone = kvops.Cache(kvops.KeyDiff(12, recent=2)), kvops.Cache(kvops.KeyDiff(12, recent=2))
    cache.set_pads(torch.tensor([0, 17], dtype=torch.int32))
    feed(cache, k, v, [30])
    feed(alone, k[1:, :, 17:], v[1:, :, 17:], [13])
    assert torch.equal(cache.positions[1:] - 17, alone.positions) and torch.equal(cache.k[1:], alone.k)


def test_lagkv_without_padding_is_told_so():
    k, v = make_kv()
    cache = kvops.Cache(kvops.LagKV(6, 0.5, sinks=3))
    cache.set_pads(torch.tensor([0, 0]))
    assert cache.pads is None
    assert torch.equal(feed(cache, k, v, [60]).positions, kvops.lagkv_compress(k, v, 6, 0.5, sinks=3).indices)


def test_set_pads_wrong_use():
    k, v = make_kv()
    cache = kvops.Cache(kvops.KeyDiff(12))
    with pytest.raises(TypeError, match=r"pads must be a torch.Tensor, got list"):
        cache.set_pads([0, 3])
    for wrong in (torch.tensor([0.0, 3.0]), torch.tensor([[0, 3]]), torch.tensor(3), torch.tensor([True, False])):
        with pytest.raises(ValueError, match=r"pads must be int32 \[b\], got"):
            cache.set_pads(wrong)
    with pytest.raises(ValueError, match="pads must be at least 0, got -1"):
        cache.set_pads(torch.tensor([0, -1]))
    cache.set_pads(torch.tensor([0, 3, 1]))
    with pytest.raises(ValueError, match="expected 3, got 2"):
        cache.append(k, v)
    cache.reset()
    cache.append(k, v)
    with pytest.raises(ValueError, match="set_pads must be called before the first append, got a cache with 60 tokens"):
        cache.set_pads(torch.tensor([0, 3]))


# Beams, drafts, further turns


@every_method
def test_batch_operations_are_those_of_a_batch_fed_so(policy):
    k, v = make_kv(b=3)
    pads = torch.tensor([0, 4, 9]) if policy.fixed_budget else torch.zeros(3, dtype=torch.int32)
    for change, as_rows in (
        (lambda m: m.reorder(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda m: m.select_rows(torch.tensor([1])), [1]),
        (lambda m: m.repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        changed, want = kvops.Cache(policy, layer=2, num_layers=4), kvops.Cache(policy, layer=2, num_layers=4)
        changed.set_pads(pads)
        want.set_pads(pads[as_rows])
        feed(changed, k[:, :, :30], v[:, :, :30], [25])
        change(changed)
        feed(changed, k[as_rows], v[as_rows], [], first=30)
        feed(want, k[as_rows, :, :30], v[as_rows, :, :30], [25])
        assert_same_state(changed, feed(want, k[as_rows], v[as_rows], [], first=30))


def test_batch_operations_before_the_first_token():
    cache = kvops.Cache(kvops.KeyDiff(12))
    cache.reorder(torch.tensor([1, 0]))
    assert cache.k is None and len(cache) == 0 and cache.positions is None and cache.nbytes == 0
    cache.set_pads(torch.tensor([0, 4]))
    cache.repeat_interleave(2)
    feed(cache, *make_kv(b=4), [60])
    assert cache.positions.shape == (4, 2, 12)


@every_method
@examples
@given(length=st.integers(0, 60), chunks=chunks)
def test_crop_is_never_having_seen(policy, length, chunks):
    k, v = make_kv()
    cache, first, evicted_at = kvops.Cache(policy, layer=2, num_layers=4), 0, 0
    for q in [*chunks, 9, 9, 9, 3]:
        expected, last = len(cache) + min(60, first + q) - first, min(60, first + q)
        cache.append(k[:, :, first:last], v[:, :, first:last])
        first = last
        if len(cache) < expected:
            evicted_at = first
    state = copy.deepcopy(cache)
    if length < evicted_at:
        with pytest.raises(
            ValueError, match=f"cannot crop to {length} tokens, because .*expected at least {evicted_at}"
        ):
            cache.crop(length)
        assert_same_state(cache, state)
        return
    cache.crop(length)
    if length >= first:
        assert_same_state(cache, state)
        return
    assert cache.seen == length and torch.equal(cache.positions, state.positions[:, :, : len(cache)])
    assert (cache.positions < length).all() and len(state) - len(cache) == first - length
    assert torch.equal(cache.k, rows(k, cache.positions))
    kit.assert_holds_little(cache, 16 + 8)
    # and then it continues as if the rest had never come
    cache.append(k[:, :, length:first], v[:, :, length:first])
    for i in range(first, 60):
        for m in (cache, state):
            m.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
    assert_same_state(cache, state)


def test_crop_with_padding_and_wrong_arguments():
    k, v = make_kv(n=10)
    cache = kvops.Cache(kvops.KeyDiff(12))
    cache.set_pads(torch.tensor([0, 8]))
    cache.append(k, v)
    for wrong in (True, 3.0, None):
        with pytest.raises(TypeError, match="crop expected an int"):
            cache.crop(wrong)
    with pytest.raises(ValueError, match="crop expected seen >= 0, got -1"):
        cache.crop(-1)
    cache.crop(5)
    assert cache.pads.tolist() == [0, 5] and cache.seen == len(cache) == 5
    cache.append(k[:, :, 5:], v[:, :, 5:])
    assert cache.pads.tolist() == [0, 8]
    cache.crop(0)
    cache.append(k, v)
    assert cache.pads.tolist() == [0, 8] and torch.equal(cache.k, k)


@every_method
def test_fresh_and_reset_are_empty_with_the_same_settings(policy):
    k, v = make_kv()
    used = feed(kvops.Cache(policy, layer=3, num_layers=7), k, v, [20])
    twin = kvops.Cache(policy, layer=3, num_layers=7)
    assert (twin.layer, twin.num_layers) == (3, 7) and len(twin) == twin.seen == 0 and twin.k is None
    assert repr(twin).partition(":")[0] == repr(used).partition(":")[0]
    assert twin.policy is used.policy is policy and len(used) > 0
    want = feed(twin, k, v, [20])
    assert_same_state(used, want)
    used.reset()
    assert len(used) == used.seen == used.nbytes == 0 and used.pads is None and used.positions is None
    assert_same_state(feed(used, k, v, [20]), want)


@every_method
def test_frozen_caches_only_grow(policy):
    """Nothing is evicted, positions continue from the prompt, and a draft can be cropped; reset() unfreezes."""
    k, v = make_kv()
    cache = feed(kvops.Cache(policy, layer=2, num_layers=4), k[:, :, :30], v[:, :, :30], [25])
    kept = cache.positions
    cache.freeze()
    feed(cache, k, v, [20], first=30)
    positions = torch.cat((kept, torch.arange(30, 60).expand(2, 2, -1)), 2)
    assert cache.seen == 60 and torch.equal(cache.positions, positions)
    assert torch.equal(cache.k, rows(k, positions)) and torch.equal(cache.v, rows(v, positions))
    cache.crop(40)
    assert torch.equal(cache.positions, positions[:, :, :-20]) and torch.equal(cache.k, rows(k, cache.positions))
    cache.reset()
    assert_same_state(feed(cache, k, v, [25]), feed(kvops.Cache(policy, layer=2, num_layers=4), k, v, [25]))


def test_repr_shows_the_settings():
    policy = kvops.StreamingLLM(8)
    assert repr(policy) == (
        "StreamingLLM(budget=8, sinks=4, head_mode='per_head', shares=None, buffer=0.0625, protect=None, "
        "positions='slots')"
    )
    assert repr(kvops.Cache(policy, layer=1, num_layers=2)) == (
        f"Cache({policy!r}, layer=1, num_layers=2: 0 tokens seen, 0 kept, 0 B)"
    )
    assert eval(repr(METHODS[0]), vars(kvops)).sinks == 3


# The step's attention


def make_q(k, group=2, seed=9):
    b, heads, n, d = k.shape
    return kit.randn(b, heads * group, n, d, seed=seed).to(k.dtype)


def plain_attention(q, k, v, pads=None, scale=None):
    """Compute causal attention of the last rows of k by the formula; rows that see nothing give 0."""
    t, n = q.shape[2], k.shape[2]
    seen = torch.ones(t, n, dtype=torch.bool).tril(n - t)[None, None].expand(q.shape[0], 1, t, n)
    if pads is not None:
        seen = seen & (torch.arange(n) >= pads[:, None, None, None])
    logits = q.unflatten(1, (k.shape[1], -1)).double() @ k.double().unsqueeze(2).mT
    logits = (logits * (q.shape[3] ** -0.5 if scale is None else scale)).masked_fill(~seen.unsqueeze(2), -torch.inf)
    return (logits.softmax(-1).nan_to_num(0.0) @ v.double().unsqueeze(2)).flatten(1, 2).float()


@every_method
@pytest.mark.parametrize("pads", [None, [0, 14]], ids=["whole", "padded"])
def test_attend_is_attention_over_what_append_returns(policy, pads):
    k, v = make_kv()
    q = make_q(k)
    cache, twin = kvops.Cache(policy, layer=2, num_layers=4), kvops.Cache(policy, layer=2, num_layers=4)
    if pads:
        for x in (cache, twin):
            x.set_pads(torch.tensor(pads))
    for part in (slice(0, 40), slice(40, 59), slice(59, 60)):
        k_step, v_step = twin.append(k[:, :, part], v[:, :, part])
        stored = None if pads is None else cache.pads + (cache.padding - cache.seen).clamp(0, part.stop - part.start)
        out = cache.attend(q[:, :, part], k[:, :, part], v[:, :, part], scale=0.3)
        torch.testing.assert_close(
            out, plain_attention(q[:, :, part], k_step, v_step, stored, 0.3), atol=1e-5, rtol=1e-5
        )
        assert_same_state(cache, twin)


@dataclass(frozen=True, eq=False)
class Observing(kvops.QueryPolicy):
    """Keeps the slots of the highest scores, by the last `window` rows of a step of at least as many.

    apart: the operator scores each query head, and the policy sums over the heads.
    """

    needs = kvops.Needs(per_slot=("sums",))

    window: int = 4
    score: str = "softmax"
    apart: bool = False

    @property
    def operator_reduce(self):
        return "none" if self.apart else self.group_reduce

    def newest(self, keep):
        return 0

    def rows(self, view):
        return self.window if view.new >= self.window else 0

    def evict(self, view):
        sums = view.observed.unflatten(1, (view.heads, -1)).sum(2) if self.apart else view.observed
        view.state["sums"] = sums
        spans = dict(starts=view.starts, fill_invalid=view.fill_invalid)
        return ops.select_topk(sums, k=min(self.budget, view.n), **spans)


@pytest.mark.parametrize("pads", [None, [0, 14]], ids=["whole", "padded"])
@pytest.mark.parametrize("window", [1, 4, 40, 300])
@pytest.mark.parametrize("score, group_reduce", [("softmax", "mean"), ("dot", "mean"), ("softmax", "none")])
def test_methods_that_look_at_queries(pads, window, score, group_reduce):
    """The output equals a whole cache's, and the kept tokens are those that the reference's scores select."""
    n = kit.size(330, 320)
    k, v = make_kv(n=n)
    q = make_q(k)
    cache = kvops.Cache(Observing(12, window, score, group_reduce == "none"))
    starts = None
    if pads:
        cache.set_pads(torch.tensor(pads))
        starts = kit.int32(*pads)
    out = cache.attend(q, k, v)
    torch.testing.assert_close(out, plain_attention(q, k, v, starts), atol=1e-5, rtol=1e-5)
    visible = torch.arange(n - window + 1, n + 1, dtype=torch.int32)
    scores = reference.window_scores(
        q[:, :, -window:], k, visible, score=score, group_reduce=group_reduce, starts=starts
    )
    if group_reduce == "none":
        scores = scores.unflatten(1, (2, -1)).sum(2)
    wanted = ops.select_topk(scores.float(), k=12, starts=starts)
    assert torch.equal(cache.positions, wanted) and len(cache) == 12 and cache.seen == n
    torch.testing.assert_close(cache.state["sums"], scores.gather(2, wanted).float(), atol=1e-4, rtol=1e-4)

    tail = make_kv(seed=3, n=3)  # too few rows to observe: the cache grows
    k_step, v_step = torch.cat((cache.k, tail[0]), 2), torch.cat((cache.v, tail[1]), 2)
    more = make_q(tail[0], seed=4)
    cache.policy = replace(cache.policy, window=max(window, 4))
    out = cache.attend(more, *tail)
    torch.testing.assert_close(out, plain_attention(more, k_step, v_step), atol=1e-5, rtol=1e-5)
    assert len(cache) == 15 and cache.seen == n + 3


def test_queries_must_follow_their_tokens():
    k, v = make_kv(n=20)
    q = make_q(k)
    cache = kvops.Cache(Observing(12))
    with pytest.raises(RuntimeError, match="Observing: expected one attention.. after each append"):
        cache.attention(q, k, v)
    k_step, v_step = cache.append(k, v)
    with pytest.raises(RuntimeError, match="evicts by queries, got none for the last 20 tokens"):
        cache.append(k, v)
    for wrong, error, message in [
        (None, TypeError, "q must be a torch.Tensor, got NoneType"),
        (q[0], ValueError, r"q must be .* expected \[2, a multiple of 2, 20, 16\], got \[4, 20, 16\]"),
        (q[:, :3], ValueError, r".*got \[2, 3, 20, 16\]"),
        (q[:, :, 1:], ValueError, r".*got \[2, 4, 19, 16\]"),
        (q.clone().requires_grad_(), ValueError, "q requires grad"),
    ]:
        with pytest.raises(error, match=f"Observing: {message}"):
            cache.attention(wrong, k_step, v_step)
    cache.attention(q, k_step, v_step)
    assert len(cache) == 12
    with pytest.raises(RuntimeError, match="expected one attention.. after each append"):
        cache.attention(q, k_step, v_step)
    state = copy.deepcopy(cache)
    for t in (1, 19, 21):
        rows = q[:, :, :1].expand(-1, -1, t, -1)
        with pytest.raises(ValueError, match=rf"q must be .* expected .*, 20, 16\], got \[2, 4, {t}, 16\]"):
            cache.attend(rows, k, v)
        one = kvops.Cache(kvops.KeyDiff(12))
        with pytest.raises(ValueError, match=rf"KeyDiff: q must be .*, 20, 16\], got \[2, 4, {t}, 16\]"):
            one.attend(rows, k, v)
        assert one.seen == 0
    with pytest.raises(ValueError, match="scale must be positive"):
        cache.attend(q, k, v, scale=-1.0)
    assert_same_state(cache, state)  # the append has been undone
    cache.attend(q, k, v)
    assert len(cache) == 12 and cache.seen == 40


def test_attention_after_compression_is_for_single_tokens():
    k, v = make_kv()
    q = make_q(k)
    cache = kvops.Cache(kvops.StreamingLLM(12), attend_before_compress=False)
    with pytest.raises(NotImplementedError, match="one token at a time .* got 60"):
        cache.attend(q, k, v)
    assert cache.seen == 0 and cache.k is None
    cache.append(k[:, :, :59], v[:, :, :59])
    out = cache.attend(q[:, :, 59:], k[:, :, 59:], v[:, :, 59:])
    torch.testing.assert_close(out, plain_attention(q[:, :, 59:], cache.k, cache.v), atol=1e-5, rtol=1e-5)


# Bad input


@every_method
def test_wrong_tokens_change_nothing(policy):
    k, v = make_kv()
    cache = feed(kvops.Cache(policy, layer=2, num_layers=4), k[:, :, :30], v[:, :, :30], [30])
    state = copy.deepcopy(cache)
    more = k[:, :, 30:31], v[:, :, 30:31]
    for wrong_k, wrong_v, error, message in [
        (None, more[1], TypeError, "k must be a torch.Tensor, got NoneType"),
        (more[0], 3, TypeError, "v must be a torch.Tensor, got int"),
        (more[0][0], more[1], ValueError, r"k must be \[b, Hk, t, d\], got shape \[2, 1, 16\]"),
        (more[0], more[1][0], ValueError, r"v must be \[b, Hk, t, d\], got shape \[2, 1, 8\]"),
        (more[0], v[:, :, 30:32], ValueError, r"v must match k .* expected \[2, 2, 1\] .* got \[2, 2, 2\]"),
        (more[0], more[1].half(), ValueError, "v must match k .* got .*float16"),
        (more[0].half(), more[1].half(), ValueError, "k must match the cached tokens .* got .*float16"),
        (
            more[0][:1],
            more[1][:1],
            ValueError,
            r"k must match the cached tokens .* expected \(2, 2, 16\) .* got \(1, 2, 16\)",
        ),
        (more[0][:, :1], more[1][:, :1], ValueError, "k must match the cached tokens"),
        (more[0][..., :8], more[1], ValueError, "k must match the cached tokens"),
        (more[0], more[1][..., :4], ValueError, "v must match the cached tokens"),
        (more[0].clone().requires_grad_(), more[1], ValueError, "k requires grad"),
        (more[0], more[1].clone().requires_grad_(), ValueError, "v requires grad"),
    ]:
        with pytest.raises(error, match=f"{type(policy).__name__}: {message}"):
            cache.append(wrong_k, wrong_v)
        assert_same_state(cache, state)
    assert_same_state(feed(cache, k, v, [], first=30), feed(state, k, v, [], first=30))


@pytest.mark.parametrize("policy", [kvops.LagKV(6, 0.5, sinks=3), kvops.KeyDiff(12), kvops.StreamingLLM(12)], ids=repr)
def test_errors_of_the_operators_change_nothing(policy):
    """Errors that only the operators raise, some of them after the selection."""
    k, v = make_kv(n=20)
    cache = kvops.Cache(policy)
    for wrong_k, wrong_v, message in [
        (k.double(), v.double(), "float32, float16,? (or )?bfloat16.*, got torch.float64"),
        (k, v.mT.contiguous().mT, "contiguous last dim"),
    ]:
        with pytest.raises(ValueError, match=message):
            cache.append(wrong_k, wrong_v)
        assert len(cache) == cache.seen == 0 and cache.k is None
    assert_same_state(feed(cache, k, v, [20]), feed(kvops.Cache(policy), k, v, [20]))


@dataclass(frozen=True, eq=False)
class Unsorted(kvops.Policy):
    """Keeps `slots` of more than 30."""

    slots: tuple = ()

    def evict(self, view):
        if view.n <= 30:
            return None
        return torch.tensor(self.slots, device=view.k.device).expand(view.rows, view.heads, -1)


WRONG_SLOTS = [
    ([3, 2, 4], "must ascend without repeats, got 2 after 3"),
    ([0, 1, 1], "must ascend without repeats, got 1 after 1"),
    ([0, 31], r"must lie in \[0, 31\), got 31"),
    ([-1, 2], r"must lie in \[0, 31\), got -1"),
]


@kit.only("cpu")  # values on a GPU are not read back
@pytest.mark.parametrize("policy", [kvops.KeyDiff(31), kvops.LagKV(64, 0.5), kvops.Full()], ids=repr)
def test_slots_that_the_caller_keeps_must_ascend(policy):
    k, v = make_kv()
    cache = feed(kvops.Cache(policy), k[:, :, :31], v[:, :, :31], [30])
    state = copy.deepcopy(cache)
    shape = r"keep\(\) expected slots as torch.int64 \[m\] or \[2, 2, m\] on cpu, got"
    for slots, message in [
        *((torch.tensor(x), f"slots {y}") for x, y in WRONG_SLOTS),
        (torch.tensor([[[0, 1], [0, 1]], [[0, 1], [1, 0]]]), "slots must ascend without repeats, got 0 after 1"),
        (torch.arange(3, dtype=torch.int32), f"{shape} torch.int32 .3."),
        (torch.zeros(2, 3, dtype=torch.int64), f"{shape} torch.int64 .2, 3."),
        (torch.zeros(3, 2, 4, dtype=torch.int64), f"{shape} torch.int64 .3, 2, 4."),
    ]:
        with pytest.raises(ValueError, match=f"{policy.name}: {message}"):
            cache.keep(slots)
        assert_same_state(cache, state)
    with pytest.raises(TypeError, match=rf"{policy.name}: keep\(\) expected slots as a torch.Tensor, got list"):
        cache.keep([0, 1])
    assert_same_state(feed(cache, k, v, [], first=31), feed(state, k, v, [], first=31))
    with pytest.raises(RuntimeError, match=f"{policy.name}: expected a cache with tokens, got an empty one"):
        kvops.Cache(policy).keep(torch.arange(1))


@kit.only("cpu")
def test_slots_that_a_policy_keeps_must_ascend():
    k, v = make_kv()
    for slots, message in WRONG_SLOTS:
        cache = feed(kvops.Cache(Unsorted(slots=tuple(slots))), k[:, :, :30], v[:, :, :30], [29])
        state = copy.deepcopy(cache)
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"Unsorted: the slots that evict\(\) keeps {message}"):
                cache.append(k[:, :, 30:31], v[:, :, 30:31])
            assert_same_state(cache, state)
    cache = feed(kvops.Cache(Unsorted(slots=(2, 3, 30))), k[:, :, :31], v[:, :, :31], [30])
    assert cache.positions.tolist() == [[[2, 3, 30]] * 2] * 2
