"""build_prototypes against its reference: ProtoKV Algorithm 1, lines 4-16."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops import ops
from kvops.ops import reference

pytestmark = kit.every_device


def anchors(k, p: int, buckets=4, missing=0, seed=0):
    """Return p ascending slots per head of k, the last `missing` of them -1, and a bucket for each, some -1."""
    order = kit.randn(*k.shape[:3], seed=seed).argsort(-1)[..., : max(0, p - missing)].sort(-1).values
    indices = torch.cat([order, torch.full((*k.shape[:2], p - order.shape[2]), -1, dtype=torch.int64)], -1)
    chosen = (kit.randn(*k.shape[:2], p, seed=seed + 1).abs() * 3).int().clamp(max=buckets) - 1
    return indices, chosen


def build(k, sats, buckets, num_chunks):
    return ops.build_prototypes(k, sat_indices=sats, buckets=buckets, num_chunks=num_chunks)


def check(k, sats, buckets, num_chunks, num_buckets=4, **spans):
    options = dict(sat_indices=sats, buckets=buckets, num_chunks=num_chunks, num_buckets=num_buckets, **spans)
    prototypes, counts = ops.build_prototypes(k, **options)
    eager, _ = reference.build_prototypes(k, **options, dtype=torch.float32)
    exact, exact_counts = reference.build_prototypes(k, **options)
    assert torch.equal(counts, exact_counts)
    kit.assert_close(prototypes, eager, exact)
    assert (prototypes[counts == 0] == 0).all()
    return prototypes, counts


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d", [8, 24, 64, 72, 128, 256, 1024])
def test_dtypes_and_head_dims(dtype, d):
    k, _ = kit.kv(2, 2, 131, d, dtype)
    check(k, *anchors(k, 9), 20)


@given(data=st.data(), n=st.integers(0, 60), chunks=st.integers(0, 40), seed=st.integers(0, 2**31))
@kit.examples(60)
def test_any_sizes(data, n, chunks, seed):
    """Chunks that contain only anchors, fewer tokens than chunks, no tokens at all."""
    k, _ = kit.kv(2, 2, n, 16, seed=seed)
    p = data.draw(st.integers(0, n + 3))
    check(k, *anchors(k, p, 4, max(data.draw(st.integers(0, p)), p - n), seed), chunks)


@pytest.mark.parametrize("layout", kit.LAYOUTS)
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_layouts_change_nothing(layout, dtype):
    plain, _ = kit.kv(2, 2, 150, 72, dtype)
    sats, buckets = anchors(plain, 9)
    expected = build(plain, sats, buckets, 7)
    wide = torch.stack([sats, sats], -1)[..., 0]
    for k in (kit.kv(2, 2, 150, 72, dtype, layout)[0], kit.unaligned(plain, 3, 5)):
        assert kit.same(build(k, wide, buckets, 7), expected)


@pytest.mark.parametrize("chunks", [1, 5, 700])
def test_every_key_is_in_one_mean(chunks):
    """The means, weighted by their counts, add up to the sum of the keys."""
    k, _ = kit.kv(2, 3, 600, 32)
    sats, buckets = anchors(k, 40)
    prototypes, counts = check(k, sats, buckets.clamp(min=0), chunks)
    assert (counts.sum(-1) == 600).all() and (counts[:, :, chunks:].sum(-1) == 40).all()
    error = (prototypes.double() * counts.unsqueeze(-1)).sum(2) - k.double().sum(2)
    assert error.abs().max() < 1e-6 * k.double().abs().sum(2).max()


@pytest.mark.parametrize("num_chunks, num_buckets", [(0, 3), (30, 0), (30, 200)])
def test_counts_of_prototypes(num_chunks, num_buckets):
    k, _ = kit.kv(1, 2, 90, 16)
    check(k, *anchors(k, 12, num_buckets), num_chunks, num_buckets)
    prototypes, counts = check(k, None, None, num_chunks, num_buckets)
    assert (counts[:, :, num_chunks:] == 0).all() and (prototypes[:, :, num_chunks:] == 0).all()
    assert (counts[:, :, :num_chunks] == 3).all()


@pytest.mark.parametrize(
    "n, num_chunks, least, chunks",
    [(90, 30, 1, 30), (90, 30, 4, 22), (90, 5, 4, 5), (8, 30, 9, 1), (9, 30, 9, 1), (18, 30, 9, 2), (9, 3, 2**40, 1)],
)
def test_the_fewest_tokens_of_a_chunk(n, num_chunks, least, chunks):
    k, _ = kit.kv(1, 2, n, 16)
    _, counts = check(k, None, None, num_chunks, 0, least_chunk=least)
    assert ((counts > 0).sum(-1) == chunks).all() and counts[:, :, :chunks].min() >= min(n, least)
    assert torch.equal(check(k[:, :, :0], None, None, num_chunks, 0, least_chunk=least)[1], torch.zeros_like(counts))
    check(k, *anchors(k, n // 2), num_chunks, least_chunk=least, lengths=kit.int32(n - 3))


@given(data=st.data(), n=st.integers(1, 60), chunks=st.integers(1, 20))
@kit.examples(30)
def test_padded_rows_build_as_if_alone(data, n, chunks):
    (k,) = kit.padded(data, kit.kv(3, 2, n, 16)[0])
    starts, sats = k.spans["starts"].tolist(), torch.full((3, 2, 5), -1, dtype=torch.int64)
    buckets = kit.randn(3, 2, 5).abs().int().clamp(max=3)
    for row, (s, keys) in enumerate(zip(starts, k.alone)):
        chosen = min(5, keys.shape[2])
        sats[row, :, :chosen] = s + kit.randn(2, keys.shape[2]).argsort(-1)[:, :chosen].sort(-1).values
    result = check(k.x, sats, buckets, chunks, **k.spans)
    for row, (s, keys) in enumerate(zip(starts, k.alone)):
        own = sats[row : row + 1]
        own = torch.where(own >= 0, own - s, own)
        alone = build(keys, own, buckets[row : row + 1], chunks)
        assert kit.same([x[row] for x in result], [x[0] for x in alone])


def test_anchors_outside_of_the_valid_slots_are_in_no_mean():
    k, _ = kit.kv(1, 1, 30, 8)
    sats = torch.tensor([[[0, 9, 10, 19, 20, 29]]])
    _, counts = check(k, sats, torch.zeros_like(sats).int(), 4, starts=kit.int32(10), lengths=kit.int32(10))
    assert counts[0, 0].tolist() == [1, 3, 2, 2, 2, 0, 0, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_left_out(bad):
    k, _ = kit.kv(2, 2, 90, 40)
    sats, buckets = anchors(k, 10)
    clean = build(k, sats, buckets, 6)
    k[0, 1, 20, 3] = bad
    k[0, 1, sats[0, 1, 4], 39] = bad
    dirty = check(k, sats, buckets, 6)
    for x, y in zip(clean, dirty):
        assert torch.equal(x[1], y[1]) and torch.equal(x[0, 0], y[0, 0]) and not torch.equal(x[0, 1], y[0, 1])


def test_a_batch_changes_nothing():
    k, _ = kit.kv(3, 5, 300, 64)
    sats, buckets = anchors(k, 20)
    together = build(k, sats, buckets, 17)
    for b, h in ((0, 0), (1, 4), (2, 2)):
        own = (slice(b, b + 1), slice(h, h + 1))
        alone = build(k[own], sats[own], buckets[own].contiguous(), 17)
        assert kit.same(alone, [x[own].contiguous() for x in together])


@kit.only("cpu")
@pytest.mark.parametrize("chunks", [1, 496])
def test_threads_change_nothing(chunks):
    k, _ = kit.kv(1, 3, 9000, 64)
    sats = anchors(k, 32)
    with kit.threads(1):
        one = build(k, *sats, chunks)
    for count in (2, 5):
        with kit.threads(count):
            assert kit.same(build(k, *sats, chunks), one)


def test_one_long_chunk_keeps_its_accuracy():
    k, _ = kit.kv(1, 1, kit.size(60_000, 6_000), 16)
    check(k, None, None, 1)


def test_bad_input():
    k, _ = kit.kv(2, 2, 10, 16)
    sats = torch.tensor([1, 4, -1]).expand(2, 2, 3)
    buckets = torch.zeros(2, 2, 3, dtype=torch.int32)
    good = dict(k=k, sat_indices=sats, buckets=buckets, num_chunks=3)
    for change, parts in (
        (dict(k=k.double()), ("build_prototypes", "k must be float32", "torch.float64")),
        (dict(num_chunks=-1), ("num_chunks must be in", "got -1")),
        (dict(num_buckets=-1), ("num_buckets must be in", "got -1")),
        (dict(least_chunk=0), ("least_chunk must be at least 1, got 0",)),
        (dict(num_chunks=0, num_buckets=0), (r"num_chunks \+ num_buckets must be at least 1, got 0",)),
        (dict(buckets=None), ("sat_indices and buckets must be given together",)),
        (dict(sat_indices=sats.int()), ("sat_indices must be torch.int64", "torch.int32")),
        (dict(sat_indices=sats + 6), (r"sat_indices must lie in \[-1, 10\), got 10 at row 0, head 0, entry 1",)),
        (dict(sat_indices=sats.roll(1, -1)), ("sat_indices must be strictly ascending", "got -1 after -1 .* entry 0")),
        (dict(buckets=buckets.long()), ("buckets must be torch.int32", "torch.int64")),
        (dict(buckets=buckets[..., :2]), (r"buckets must be a contiguous int32 \[2, 2, 3\], got \[2, 2, 2\]",)),
        (dict(buckets=buckets + 4), (r"buckets must lie in \[-1, 4\), got 4",)),
        (dict(lengths=kit.int32(1, 11)), ("starts and lengths of row 1", "length 11")),
    ):
        with kvops.debug_checks(), kit.refuses(*parts):
            ops.build_prototypes(**good | change)
    with kit.refuses("k requires grad"):
        ops.build_prototypes(k.requires_grad_(), num_chunks=3)


@kit.only("cuda", "simulator")
def test_a_gpus_anchors_are_not_looked_at():
    """The kernel ignores anchors and buckets that are out of range."""
    k, _ = kit.kv(1, 1, 20, 8)
    bad = torch.tensor([[[-5, 3, 7, 2**40, 20]]]), torch.tensor([[[0, 1, 9, 0, 0]]], dtype=torch.int32)
    good = torch.tensor([[[3, 7, -1, -1, -1]]]), torch.tensor([[[1, -1, 0, 0, 0]]], dtype=torch.int32)
    assert kit.same(build(k, *bad, 4), build(k, *good, 4))
