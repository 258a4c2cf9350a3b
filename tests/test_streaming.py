"""The methods' objects: tokens that come in chunks and one by one, padding, and what beam search and drafts need."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops import ops, reference
from kvops.cache import AttentionMethod

pytestmark = kit.every_device
examples = kit.examples(25, derandomize=True)

METHODS = [
    kvops.LagKV(6, 0.5, sink=3),
    kvops.LagKV(6, 0.5, sink=3, head_mode="shared"),
    kvops.LagKV(6, 0.5, sink=3, score="l2"),
    kvops.KeyDiff(12),
    kvops.KeyDiff(12, sinks=2, recent=3, head_mode="shared"),
    kvops.KeyDiff(12, metric="dot", anchor="median", recent=0.25),
    kvops.KeyDiff(0.4, sinks=2, recent=0.5, normalize_anchor=False),
    kvops.StreamingLLM(12),
    kvops.StreamingLLM(0.4),
    kvops.LaCache(12, span=2, overlap=0, sinks=2),
    kvops.LaCache(0.4, sinks=2),
    kvops.Random(12),
    kvops.Random(0.4, seed=5),
    kvops.L2(12),
    kvops.L2(0.4, sinks=2, recent=3, head_mode="shared"),
    kvops.SATKV(12, 3, buffer=4),
    kvops.SATKV(0.4, 3, head_mode="shared", buffer=None),
    kvops.Full(),
]
every_method = pytest.mark.parametrize("method", METHODS, ids=repr)
fixed_budget = pytest.mark.parametrize("method", [m for m in METHODS if m.fixed_budget], ids=repr)


def make_kv(seed=0, b=2, heads=2, n=60, d=16, dv=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        kit.on_device(torch.randn(b, heads, n, x, generator=generator, device="cpu").to(dtype)) for x in (d, dv)
    )


def rows(x, positions):
    return x.gather(2, positions.unsqueeze(-1).expand(*positions.shape, x.shape[-1]))


def feed(method, k, v, chunks, first=0):
    """Appends k, v in pieces of the given lengths, then token by token; returns the method."""
    sizes = [*chunks]
    while first < k.shape[2]:
        q = max(1, sizes.pop(0)) if sizes else 1
        method.append(k[:, :, first : first + q], v[:, :, first : first + q])
        first += q
    return method


def assert_same_state(a, b):
    assert a.seen == b.seen and len(a) == len(b)
    for x, y in ((a.k, b.k), (a.v, b.v), (a.positions, b.positions), (a.pads, b.pads)):
        assert (x is None and y is None) or torch.equal(x, y)


chunks = st.lists(st.integers(1, 25), max_size=4)


# What is stored


@every_method
@examples
@given(chunks=chunks)
def test_stored_slots_are_the_tokens_at_their_positions(method, chunks):
    k, v = make_kv()
    method = feed(method.fresh(2, 4), k, v, chunks)
    positions = method.positions
    assert method.seen == 60 and positions.shape == (2, 2, len(method)) and positions.dtype == torch.int64
    assert (positions.diff(dim=-1) > 0).all() and (positions >= 0).all() and (positions < 60).all()
    assert torch.equal(method.k, rows(k, positions)) and torch.equal(method.v, rows(v, positions))
    assert method.nbytes == 2 * 2 * len(method) * (16 + 8) * 4  # nothing else is held


@every_method
def test_append_returns_what_the_step_attends_to(method):
    k, v = make_kv()
    method = method.fresh(2, 4)
    for first, last in ((0, 40), (40, 41), (41, 60)):
        stored_k = k[:, :, :0] if method.k is None else method.k.clone()
        stored_v = v[:, :, :0] if method.v is None else method.v.clone()
        k_step, v_step = method.append(k[:, :, first:last], v[:, :, first:last])
        assert torch.equal(k_step, torch.cat((stored_k, k[:, :, first:last]), 2))
        assert torch.equal(v_step, torch.cat((stored_v, v[:, :, first:last]), 2))
    assert (len(method) == 60) == (type(method) is kvops.Full)


@pytest.mark.parametrize("make", [kvops.KeyDiff, kvops.StreamingLLM, kvops.Random], ids=lambda c: c.__name__)
def test_attend_after_compress(make):
    k, v = make_kv()
    method = make(12, attend_before_compress=False)
    k_step, v_step = method.append(k, v)
    assert k_step.shape[2] == 12 and torch.equal(k_step, method.k) and torch.equal(v_step, method.v)
    assert_same_state(method, feed(make(12), k, v, [60]))


def test_lagkv_attend_after_compress():
    k, v = make_kv()
    k_step, v_step = kvops.LagKV(6, 0.5, sink=3, attend_before_compress=False).append(k, v)
    want = kvops.lagkv_compress(k, v, 6, 0.5, sink=3)
    assert torch.equal(k_step, want.k) and torch.equal(v_step, want.v)


@every_method
def test_memory_of_the_caller_is_not_held(method):
    fused = torch.randn(2, 5, 4, 64).transpose(1, 2)  # q, k, v of one projection
    k, v = fused[:, :2, :, :16], fused[:, 2:, :, :8]
    method = method.fresh(2, 4)
    method.append(k, v)
    assert method.nbytes == 2 * 2 * len(method) * (16 + 8) * 4
    stored = method.k.clone()
    fused.zero_()
    assert torch.equal(method.k, stored)


# Chunks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_mode", ["per_head", "shared"])
@pytest.mark.parametrize("score, reference", [("std", "lag"), ("std", "self"), ("l2", "lag")])
@examples
@given(
    chunks=chunks,
    lag=st.integers(0, 9).map(lambda x: 10 - x),
    ratio=st.sampled_from([0.4, 0.7, 0.0, 1.0]),
    sink=st.integers(0, 9),
    n=st.integers(0, 59).map(lambda x: 60 - x),
)
def test_lagkv_one_shot_is_chunked_is_token_by_token(chunks, lag, ratio, sink, n, dtype, head_mode, score, reference):
    k, v = make_kv(n=n, dtype=dtype)
    options = dict(sink=sink, head_mode=head_mode, score=score, reference=reference)
    want = kvops.lagkv_compress(k, v, lag, ratio, **options)
    for pieces in ([n], chunks, []):
        method = feed(kvops.LagKV(lag, ratio, **options).fresh(layer=2), k, v, pieces)
        assert torch.equal(method.positions, want.indices)
        assert torch.equal(method.k, want.k) and torch.equal(method.v, want.v)


def test_lagkv_large_partitions_in_chunks():
    k, v = make_kv(n=16 + 5 * 256 + 100, d=64, dv=64)
    want = kvops.lagkv_compress(k, v, 256, 0.25)
    for pieces in ([528, 256, 256, 256], [100] * 14):
        method = feed(kvops.LagKV(256, 0.25), k, v, pieces)
        assert torch.equal(method.positions, want.indices) and torch.equal(method.k, want.k)


def test_lagkv_fires_once_every_lag_tokens():
    k, v = make_kv(n=60)
    method, lengths = kvops.LagKV(6, 0.5, sink=3), []
    for i in range(60):
        method.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        lengths.append(len(method))
    drops = [i + 1 for i in range(1, 60) if lengths[i] < lengths[i - 1]]
    assert drops == [3 + 2 * 6 + 6 * i for i in range(len(drops))] and drops[-1] == 57


def test_lagkv_l2_leaves_the_first_two_layers():
    k, v = make_kv()
    method = kvops.LagKV(6, 0.5, sink=3, score="l2")
    assert not method.uniform_layers and kvops.LagKV(6, 0.5).uniform_layers
    lengths = [len(feed(method.fresh(layer, 3), k, v, [60])) for layer in range(3)]
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
    method = kvops.KeyDiff(**options)
    method.append(k, v)
    assert torch.equal(method.positions, want.indices)
    assert torch.equal(method.k, want.k) and torch.equal(method.v, want.v)


@pytest.mark.parametrize("options", KEYDIFF, ids=str)
@examples
@given(chunks=chunks, seed=st.integers(0, 99))
def test_keydiff_is_one_shot_of_stored_and_new(options, chunks, seed):
    """Blocks: each step keeps what one call keeps of the stored tokens and the new ones."""
    k, v = make_kv(seed)
    method, positions, first = kvops.KeyDiff(**options, refresh=1), torch.empty(2, 2, 0, dtype=torch.int64), 0
    for q in [*chunks, 15, 1, 1, 1, 1]:
        last = min(60, first + q)
        method.append(k[:, :, first:last], v[:, :, first:last])
        positions = torch.cat((positions, torch.arange(first, last).expand(2, 2, -1)), 2)
        budget = options["budget"] if isinstance(options["budget"], int) else max(1, int(options["budget"] * last))
        kept = kvops.keydiff_compress(rows(k, positions), rows(v, positions), **{**options, "budget": budget}).indices
        positions = positions.gather(2, kept)
        assert torch.equal(method.positions, positions)
        first = last


@kit.only("cpu", "cuda")
@pytest.mark.parametrize("normalize_anchor", [True, False])
@pytest.mark.parametrize("head_mode", ["per_head", "shared"])
@pytest.mark.parametrize("pads", [None, [9, 100]])
def test_keydiff_running_anchor_agrees_with_the_recomputed_one(normalize_anchor, head_mode, pads):
    """Over hundreds of evictions, of one and of several tokens, with keys of very different norms."""
    k, v = make_kv(n=700)
    k = k * torch.logspace(-2, 2, 700)[kit.randn(700, seed=1).argsort()][:, None]
    options = dict(budget=64, recent=8, normalize_anchor=normalize_anchor, head_mode=head_mode)
    running, recomputed = kvops.KeyDiff(**options, refresh=10**9), kvops.KeyDiff(**options, refresh=1)
    if pads is not None:
        running.set_pads(torch.tensor(pads))
        recomputed.set_pads(torch.tensor(pads))
    agree = total = 0
    for first in range(0, 700, 7):
        for a, b in ((0, 4), (4, 5), (5, 6), (6, 7)):
            for method in (running, recomputed):
                method.append(k[:, :, first + a : first + b], v[:, :, first + a : first + b])
        slots = dict(starts=running.pads)
        scores, anchor = kvops.ops.anchor_cosine(
            running.k, normalize_anchor=normalize_anchor, return_anchor=True, **slots
        )
        if running._sum is not None:
            # A sum of 64 keys that about 700 came into and left again: fp32 round-off of the largest that was in it.
            largest = 1.0 if normalize_anchor else k.norm(dim=-1).max()
            assert (running._sum - anchor).norm(dim=-1).max() < 1e-5 * largest * 8
        agree += (running.positions == recomputed.positions).sum().item()
        total += running.positions.numel()
    assert running._sum is not None and recomputed._sum is None
    assert agree == total


def test_keydiff_running_anchor_is_recomputed_in_time():
    k, v = make_kv(n=200, b=1)
    method = feed(kvops.KeyDiff(32, refresh=50), k, v, [32])
    drifts = []
    for i in range(120):
        method.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        drifts.append(method._drift)
        assert (method._sum is None) == (method._drift == 0)
    assert max(drifts) == 49 and drifts.count(0) == 2


def test_keydiff_nan_keys_leave_first_and_leave_the_anchor_alone():
    k, v = make_kv(n=60, b=1, heads=1)
    k[0, 0, [5, 33, 41]] = torch.nan
    method, clean = kvops.KeyDiff(16, refresh=10**9), kvops.KeyDiff(16)
    good = [i for i in range(60) if i not in (5, 33, 41)]
    for i in range(60):
        method.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        if i in good:
            clean.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        assert i < 20 or not method.k.isnan().any()
    assert method._sum.isfinite().all()
    assert torch.equal(method.positions, torch.tensor(good)[clean.positions])


@pytest.mark.parametrize("make", [kvops.StreamingLLM, kvops.Random], ids=lambda c: c.__name__)
@examples
@given(chunks=chunks, seed=st.integers(0, 3))
def test_baselines_one_shot_is_chunked_is_token_by_token(make, chunks, seed):
    k, v = make_kv()
    options = dict(seed=seed) if make is kvops.Random else {}
    compress = kvops.random_compress if make is kvops.Random else kvops.streamingllm_compress
    want = compress(k, v, 12, **options)
    for pieces in ([60], chunks, []):
        method = feed(make(12, **options), k, v, pieces)
        assert torch.equal(method.positions, want.indices) and torch.equal(method.k, want.k)


def test_random_differs_between_layers():
    k, v = make_kv()
    first, second = (feed(kvops.Random(12).fresh(layer, 2), k, v, [60]).positions for layer in (0, 1))
    assert not torch.equal(first, second)


# Budgets


@pytest.mark.parametrize(
    "method",
    [m for m in METHODS if isinstance(getattr(m, "budget", None), int) and not hasattr(m, "buffer")],
    ids=repr,
)
def test_count_budgets_hold_after_every_step(method):
    k, v = make_kv()
    method = method.fresh(2, 4)
    for i in range(60):
        method.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        assert len(method) == min(i + 1, 12)


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
    """So they do not compound; while the sequence is short, what is protected stays."""
    k, v = make_kv()
    method = make()
    for first in range(0, 60, 3):
        method.append(k[:, :, first : first + 3], v[:, :, first : first + 3])
        assert len(method) == min(first + 3, max(floor, 1, (first + 3) // 4))


# Padding


@fixed_budget
@examples
@given(chunks=chunks, pads=st.integers(0, 30))
def test_padding_goes_first(method, chunks, pads):
    k, v = make_kv()
    k[1, :, :pads], v[1, :, :pads] = torch.nan, torch.nan
    plain = feed(method.fresh(), k[:1], v[:1], chunks)
    method = method.fresh()
    method.set_pads(torch.tensor([0, pads]))
    first = 0
    for q in [*chunks, *[1] * 60]:
        method.append(k[:, :, first : first + q], v[:, :, first : first + q])
        first = min(60, first + q)
        left = method.pads.tolist()
        valid_seen = max(0, first - pads)
        assert left == [0, max(0, len(method) - valid_seen)]  # no token went while padding was left
        assert torch.equal(method.positions[1, 0] < pads, torch.arange(len(method)) < left[1])
        assert not method.k[1, :, left[1] :].isnan().any()
    assert torch.equal(method.positions[:1], plain.positions)


@pytest.mark.parametrize("make", [kvops.StreamingLLM, kvops.Random], ids=lambda c: c.__name__)
def test_padded_rows_keep_what_they_keep_alone(make):
    k, v = make_kv()
    method = make(12)
    method.set_pads(torch.tensor([0, 17], dtype=torch.int32))
    feed(method, k, v, [10, 20])
    alone = feed(make(12), k[1:, :, 17:], v[1:, :, 17:], [])
    assert torch.equal(method.positions[1:] - 17, alone.positions) and torch.equal(method.k[1:], alone.k)


def test_padded_rows_keep_what_they_keep_alone_keydiff():
    k, v = make_kv()
    method, alone = kvops.KeyDiff(12, recent=2), kvops.KeyDiff(12, recent=2)
    method.set_pads(torch.tensor([0, 17], dtype=torch.int32))
    feed(method, k, v, [30])
    feed(alone, k[1:, :, 17:], v[1:, :, 17:], [13])
    assert torch.equal(method.positions[1:] - 17, alone.positions) and torch.equal(method.k[1:], alone.k)


def test_lagkv_without_padding_is_told_so():
    k, v = make_kv()
    method = kvops.LagKV(6, 0.5, sink=3)
    method.set_pads(torch.tensor([0, 0]))
    assert method.pads is None
    assert torch.equal(feed(method, k, v, [60]).positions, kvops.lagkv_compress(k, v, 6, 0.5, sink=3).indices)


def test_set_pads_wrong_use():
    k, v = make_kv()
    method = kvops.KeyDiff(12)
    with pytest.raises(TypeError, match=r"pads must be a torch.Tensor, got list"):
        method.set_pads([0, 3])
    for wrong in (torch.tensor([0.0, 3.0]), torch.tensor([[0, 3]]), torch.tensor(3), torch.tensor([True, False])):
        with pytest.raises(ValueError, match=r"pads must be int32 \[b\], got"):
            method.set_pads(wrong)
    with pytest.raises(ValueError, match="pads must be at least 0, got -1"):
        method.set_pads(torch.tensor([0, -1]))
    method.set_pads(torch.tensor([0, 3, 1]))
    with pytest.raises(ValueError, match="expected 3, got 2"):
        method.append(k, v)
    method.reset()
    method.append(k, v)
    with pytest.raises(ValueError, match="set_pads must come before the first append, got 60 tokens"):
        method.set_pads(torch.tensor([0, 3]))


# Beams, drafts, turns


@every_method
def test_batch_operations_are_those_of_a_batch_fed_so(method):
    k, v = make_kv(b=3)
    pads = torch.tensor([0, 4, 9]) if method.fixed_budget else torch.zeros(3, dtype=torch.int32)
    for change, as_rows in (
        (lambda m: m.reorder(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda m: m.select_rows(torch.tensor([1])), [1]),
        (lambda m: m.repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        changed, want = method.fresh(2, 4), method.fresh(2, 4)
        changed.set_pads(pads)
        want.set_pads(pads[as_rows])
        feed(changed, k[:, :, :30], v[:, :, :30], [25])
        change(changed)
        feed(changed, k[as_rows], v[as_rows], [], first=30)
        feed(want, k[as_rows, :, :30], v[as_rows, :, :30], [25])
        assert_same_state(changed, feed(want, k[as_rows], v[as_rows], [], first=30))


def test_batch_operations_before_the_first_token():
    method = kvops.KeyDiff(12)
    method.reorder(torch.tensor([1, 0]))
    assert method.k is None and len(method) == 0 and method.positions is None and method.nbytes == 0
    method.set_pads(torch.tensor([0, 4]))
    method.repeat_interleave(2)
    feed(method, *make_kv(b=4), [60])
    assert method.positions.shape == (4, 2, 12)


@every_method
@examples
@given(length=st.integers(0, 60), chunks=chunks)
def test_crop_is_never_having_seen(method, length, chunks):
    k, v = make_kv()
    method, first, evicted_at = method.fresh(2, 4), 0, 0
    for q in [*chunks, 9, 9, 9, 3]:
        expected, last = len(method) + min(60, first + q) - first, min(60, first + q)
        method.append(k[:, :, first:last], v[:, :, first:last])
        first = last
        if len(method) < expected:
            evicted_at = first
    state = copy.deepcopy(method)
    if length < evicted_at:
        with pytest.raises(ValueError, match=f"cannot crop to {length} tokens, since .*{evicted_at} or more"):
            method.crop(length)
        assert_same_state(method, state)
        return
    method.crop(length)
    if length >= first:
        assert_same_state(method, state)
        return
    assert method.seen == length and torch.equal(method.positions, state.positions[:, :, : len(method)])
    assert (method.positions < length).all() and len(state) - len(method) == first - length
    assert torch.equal(method.k, rows(k, method.positions))
    assert method.nbytes == 2 * 2 * len(method) * (16 + 8) * 4
    # and then it goes on as if the rest had never come
    method.append(k[:, :, length:first], v[:, :, length:first])
    for i in range(first, 60):
        for m in (method, state):
            m.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
    assert_same_state(method, state)


def test_crop_with_padding_and_wrong_arguments():
    k, v = make_kv(n=10)
    method = kvops.KeyDiff(12)
    method.set_pads(torch.tensor([0, 8]))
    method.append(k, v)
    for wrong in (True, 3.0, None):
        with pytest.raises(TypeError, match="crop needs an int"):
            method.crop(wrong)
    with pytest.raises(ValueError, match="at least 0 tokens, got -1"):
        method.crop(-1)
    method.crop(5)
    assert method.pads.tolist() == [0, 5] and method.seen == len(method) == 5
    method.append(k[:, :, 5:], v[:, :, 5:])
    assert method.pads.tolist() == [0, 8]
    method.crop(0)
    method.append(k, v)
    assert method.pads.tolist() == [0, 8] and torch.equal(method.k, k)


@every_method
def test_fresh_and_reset_are_empty_with_the_same_settings(method):
    k, v = make_kv()
    used = feed(method.fresh(3, 7), k, v, [20])
    twin = used.fresh(3, 7)
    assert (twin.layer, twin.num_layers) == (3, 7) and len(twin) == twin.seen == 0 and twin.k is None
    assert repr(twin) == repr(used) == repr(method) and len(used) > 0 and len(method) == 0
    want = feed(twin, k, v, [20])
    assert_same_state(used, want)
    used.reset()
    assert len(used) == used.seen == used.nbytes == 0 and used.pads is None and used.positions is None
    assert_same_state(feed(used, k, v, [20]), want)


@every_method
def test_frozen_caches_only_grow(method):
    """Nothing goes any more, positions go on from those of the prompt, a draft can be taken back; reset() thaws."""
    k, v = make_kv()
    method = feed(method.fresh(2, 4), k[:, :, :30], v[:, :, :30], [25])
    kept = method.positions
    method.freeze()
    feed(method, k, v, [20], first=30)
    positions = torch.cat((kept, torch.arange(30, 60).expand(2, 2, -1)), 2)
    assert method.seen == 60 and torch.equal(method.positions, positions)
    assert torch.equal(method.k, rows(k, positions)) and torch.equal(method.v, rows(v, positions))
    method.crop(40)
    assert torch.equal(method.positions, positions[:, :, :-20]) and torch.equal(method.k, rows(k, method.positions))
    method.reset()
    assert_same_state(feed(method, k, v, [25]), feed(method.fresh(2, 4), k, v, [25]))


def test_repr_shows_the_settings():
    assert repr(kvops.StreamingLLM(8)) == (
        "StreamingLLM(budget=8, sinks=4, positions='slots', storage='pre_rope', rope=None, attend_before_compress=True)"
    )
    assert eval(repr(METHODS[0]), vars(kvops)).sink == 3


# The step's attention


def make_q(k, group=2, seed=9):
    b, heads, n, d = k.shape
    return kit.randn(b, heads * group, n, d, seed=seed).to(k.dtype)


def plain_attention(q, k, v, pads=None, scale=None):
    """Causal attention of the last rows of k, by the formula; rows that see nothing give 0."""
    t, n = q.shape[2], k.shape[2]
    seen = torch.ones(t, n, dtype=torch.bool).tril(n - t)[None, None].expand(q.shape[0], 1, t, n)
    if pads is not None:
        seen = seen & (torch.arange(n) >= pads[:, None, None, None])
    logits = q.unflatten(1, (k.shape[1], -1)).double() @ k.double().unsqueeze(2).mT
    logits = (logits * (q.shape[3] ** -0.5 if scale is None else scale)).masked_fill(~seen.unsqueeze(2), -torch.inf)
    return (logits.softmax(-1).nan_to_num(0.0) @ v.double().unsqueeze(2)).flatten(1, 2).float()


@every_method
@pytest.mark.parametrize("pads", [None, [0, 14]], ids=["whole", "padded"])
def test_attend_is_attention_over_what_append_returns(method, pads):
    k, v = make_kv()
    q = make_q(k)
    method, twin = method.fresh(2, 4), method.fresh(2, 4)
    if pads:
        for x in (method, twin):
            x.set_pads(torch.tensor(pads))
    for part in (slice(0, 40), slice(40, 59), slice(59, 60)):
        k_step, v_step = twin.append(k[:, :, part], v[:, :, part])
        stored = (
            None if pads is None else method.pads + (method._padding - method.seen).clamp(0, part.stop - part.start)
        )
        out = method.attend(q[:, :, part], k[:, :, part], v[:, :, part], scale=0.3)
        torch.testing.assert_close(
            out, plain_attention(q[:, :, part], k_step, v_step, stored, 0.3), atol=1e-5, rtol=1e-5
        )
        assert_same_state(method, twin)


class Observing(AttentionMethod):
    """Keeps the slots of the highest scores, by the last `window` rows of a step of at least as many."""

    _by_slot = ("sums",)

    def __init__(self, budget, window=4, score="softmax", group_reduce="mean"):
        self.budget, self.window, self.score, self.group_reduce = budget, window, score, group_reduce
        super().__init__()

    def reset(self):
        super().reset()
        self.sums = None

    def _rows(self, t):
        return self.window if t >= self.window else 0

    def _evict_by(self, scores, k, v, pads, seen):
        self.sums = scores if self.group_reduce != "none" else scores.unflatten(1, (k.shape[1], -1)).sum(2)
        keep = min(self.budget, k.shape[2])
        return ops.select_topk(self.sums, keep, starts=pads, fill_invalid=pads is not None)


@pytest.mark.parametrize("pads", [None, [0, 14]], ids=["whole", "padded"])
@pytest.mark.parametrize("window", [1, 4, 40, 300])
@pytest.mark.parametrize("score, group_reduce", [("softmax", "mean"), ("dot", "mean"), ("softmax", "none")])
def test_methods_that_look_at_queries(pads, window, score, group_reduce):
    """The output is that of a whole cache, and what stays is what the reference's scores choose."""
    n = kit.size(330, 320)
    k, v = make_kv(n=n)
    q = make_q(k)
    method = Observing(12, window, score, group_reduce)
    starts = None
    if pads:
        method.set_pads(torch.tensor(pads))
        starts = kit.int32(*pads)
    out = method.attend(q, k, v)
    torch.testing.assert_close(out, plain_attention(q, k, v, starts), atol=1e-5, rtol=1e-5)
    visible = torch.arange(n - window + 1, n + 1, dtype=torch.int32)
    scores = reference.window_scores(
        q[:, :, -window:], k, visible, score=score, group_reduce=group_reduce, starts=starts
    )
    if group_reduce == "none":
        scores = scores.unflatten(1, (2, -1)).sum(2)
    wanted = ops.select_topk(scores.float(), 12, starts=starts)
    assert torch.equal(method.positions, wanted) and len(method) == 12 and method.seen == n
    torch.testing.assert_close(method.sums, scores.gather(2, wanted).float(), atol=1e-4, rtol=1e-4)

    tail = make_kv(seed=3, n=3)  # too few to observe: the cache grows
    k_step, v_step = torch.cat((method.k, tail[0]), 2), torch.cat((method.v, tail[1]), 2)
    more = make_q(tail[0], seed=4)
    method.window = max(window, 4)
    out = method.attend(more, *tail)
    torch.testing.assert_close(out, plain_attention(more, k_step, v_step), atol=1e-5, rtol=1e-5)
    assert len(method) == 15 and method.seen == n + 3


def test_queries_must_follow_their_tokens():
    k, v = make_kv(n=20)
    q = make_q(k)
    method = Observing(12)
    with pytest.raises(RuntimeError, match="Observing: attention.. must follow an append"):
        method.attention(q, k, v)
    k_step, v_step = method.append(k, v)
    with pytest.raises(RuntimeError, match="queries of the last 20 tokens were never seen"):
        method.append(k, v)
    for wrong, error, message in [
        (None, TypeError, "q must be a torch.Tensor, got NoneType"),
        (q[0], ValueError, r"q must be .* expected \[2, a multiple of 2, 20, 16\], got \[4, 20, 16\]"),
        (q[:, :3], ValueError, r".*got \[2, 3, 20, 16\]"),
        (q[:, :, 1:], ValueError, r".*got \[2, 4, 19, 16\]"),
        (q.clone().requires_grad_(), ValueError, "q requires grad"),
    ]:
        with pytest.raises(error, match=f"Observing: {message}"):
            method.attention(wrong, k_step, v_step)
    method.attention(q, k_step, v_step)
    assert len(method) == 12
    with pytest.raises(RuntimeError, match="must follow an append.*once"):
        method.attention(q, k_step, v_step)
    state = copy.deepcopy(method)
    for t in (1, 19, 21):
        rows = q[:, :, :1].expand(-1, -1, t, -1)
        with pytest.raises(ValueError, match=rf"q must be .* expected .*, 20, 16\], got \[2, 4, {t}, 16\]"):
            method.attend(rows, k, v)
        one = kvops.KeyDiff(12)
        with pytest.raises(ValueError, match=rf"KeyDiff: q must be .*, 20, 16\], got \[2, 4, {t}, 16\]"):
            one.attend(rows, k, v)
        assert one.seen == 0
    with pytest.raises(ValueError, match="scale must be positive"):
        method.attend(q, k, v, scale=-1.0)
    assert_same_state(method, state)  # the append has been taken back
    method.attend(q, k, v)
    assert len(method) == 12 and method.seen == 40


def test_attention_after_compression_is_for_single_tokens():
    k, v = make_kv()
    q = make_q(k)
    method = kvops.StreamingLLM(12, attend_before_compress=False)
    with pytest.raises(NotImplementedError, match="one token at a time .* got 60"):
        method.attend(q, k, v)
    assert method.seen == 0 and method.k is None
    method.append(k[:, :, :59], v[:, :, :59])
    out = method.attend(q[:, :, 59:], k[:, :, 59:], v[:, :, 59:])
    torch.testing.assert_close(out, plain_attention(q[:, :, 59:], method.k, method.v), atol=1e-5, rtol=1e-5)


# Bad input


@every_method
def test_wrong_tokens_change_nothing(method):
    k, v = make_kv()
    method = feed(method.fresh(2, 4), k[:, :, :30], v[:, :, :30], [30])
    state = copy.deepcopy(method)
    more = k[:, :, 30:31], v[:, :, 30:31]
    for wrong_k, wrong_v, error, message in [
        (None, more[1], TypeError, "k must be a torch.Tensor, got NoneType"),
        (more[0], 3, TypeError, "v must be a torch.Tensor, got int"),
        (more[0][0], more[1], ValueError, r"k must be \[b, Hk, t, d\], got shape \[2, 1, 16\]"),
        (more[0], more[1][0], ValueError, r"v must be \[b, Hk, t, d\], got shape \[2, 1, 8\]"),
        (more[0], v[:, :, 30:32], ValueError, r"v must match k .* expected \[2, 2, 1\] .* got \[2, 2, 2\]"),
        (more[0], more[1].half(), ValueError, "v must match k .* got .*float16"),
        (more[0].half(), more[1].half(), ValueError, "k must match what is stored .* got .*float16"),
        (
            more[0][:1],
            more[1][:1],
            ValueError,
            r"k must match what is stored .* expected \(2, 2, 16\) .* got \(1, 2, 16\)",
        ),
        (more[0][:, :1], more[1][:, :1], ValueError, "k must match what is stored"),
        (more[0][..., :8], more[1], ValueError, "k must match what is stored"),
        (more[0], more[1][..., :4], ValueError, "v must match what is stored"),
        (more[0].clone().requires_grad_(), more[1], ValueError, "k requires grad"),
        (more[0], more[1].clone().requires_grad_(), ValueError, "v requires grad"),
    ]:
        with pytest.raises(error, match=f"{type(method).__name__}: {message}"):
            method.append(wrong_k, wrong_v)
        assert_same_state(method, state)
    assert_same_state(feed(method, k, v, [], first=30), feed(state, k, v, [], first=30))


@pytest.mark.parametrize("method", [kvops.LagKV(6, 0.5, sink=3), kvops.KeyDiff(12), kvops.StreamingLLM(12)], ids=repr)
def test_errors_of_the_operators_change_nothing(method):
    """What only the operators refuse, some of it after the selection."""
    k, v = make_kv(n=20)
    method = method.fresh()
    for wrong_k, wrong_v, message in [
        (k.double(), v.double(), "float32, float16 or bfloat16"),
        (k, v.mT.contiguous().mT, "contiguous last dim"),
    ]:
        with pytest.raises(ValueError, match=message):
            method.append(wrong_k, wrong_v)
        assert len(method) == method.seen == 0 and method.k is None
    assert_same_state(feed(method, k, v, [20]), feed(method.fresh(), k, v, [20]))
