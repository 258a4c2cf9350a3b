"""key_similarity against its reference: R-KV's redundancy estimation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops import ops
from kvops.ops import reference

pytestmark = kit.every_device


def clear_threshold(k, wanted: float, reach: float = 0.05, **spans) -> float:
    """Return a threshold near `wanted` that no cosine of two keys is close to, so that rounding decides no pair."""
    unit, finite = reference.unit_keys(k.double())
    usable = reference.valid_slots(k, **{"starts": None, "lengths": None} | spans) & finite
    unit = torch.where(usable.unsqueeze(-1), unit, 0.0)
    near = (unit @ unit.mT).flatten()
    ends = torch.tensor([wanted - reach, wanted + reach], dtype=torch.float64)
    near = torch.cat([near[(near - wanted).abs() < reach], kit.on_device(ends).to(near)]).sort().values
    gaps = near.diff()
    widest = gaps.argmax()
    assert gaps[widest] > 2e-6
    return ((near[widest] + near[widest + 1]) / 2).item()


def check(k, threshold=0.5, **spans):
    threshold = clear_threshold(k, threshold, **spans)
    scores = ops.key_similarity(k, threshold=threshold, **spans)
    exact = reference.key_similarity(k, threshold=threshold, **spans)
    eager = reference.key_similarity(k, threshold=threshold, **spans, dtype=torch.float32)
    # A score is a difference: the mean over all keys, less the key itself, less what is spared.
    terms = reference.key_similarity(k, threshold=1.0, **spans).abs() + 1 / (~exact.isnan()).sum(-1, keepdim=True)
    assert torch.equal(scores.isnan(), exact.isnan())
    error, allowed = ((x.double() - exact).nan_to_num(0).abs() for x in (scores, eager))
    if not error.numel():
        return scores
    bound = 2 * allowed.max() + 4 * torch.finfo(torch.float32).eps * terms.nan_to_num(0, 0).max()
    assert (error <= bound).all(), f"error {error.max():.3e} against fp64, at most {bound:.3e} allowed"
    return scores


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d", kit.HEAD_DIMS)
def test_dtypes_and_head_dims(dtype, d):
    check(kit.kv(2, 2, 131, d, dtype)[0])


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d", [8, 24, 328, 520, 1024])
def test_narrow_and_wide_rows(dtype, d):
    check(kit.kv(1, 2, 70, d, dtype)[0])


@pytest.mark.parametrize("threshold", [0.06, 0.3, 0.7, 0.9])
def test_thresholds(threshold):
    """From every key has a similar one among the last few, to hardly any has one."""
    for dtype in (torch.float32, torch.bfloat16):
        check(kit.kv(1, 2, kit.size(600, 300), 24, dtype)[0], threshold)
        check(kit.randn(1, 2, 300, 16).to(dtype), threshold)


@pytest.mark.parametrize("threshold", [1.0, 2.0, float("inf")])
def test_no_pair_is_spared_from_1_on(threshold):
    """Not even equal keys."""
    k = kit.randn(1, 2, 1, 32).expand(1, 2, 70, 32).contiguous()
    scores = ops.key_similarity(k, threshold=threshold)
    torch.testing.assert_close(scores, torch.full_like(scores, 69 / 70), rtol=1e-6, atol=0)


def test_of_equal_keys_the_last_is_spared():
    k = kit.randn(1, 1, 1, 32).expand(1, 1, 10, 32).contiguous()
    scores = ops.key_similarity(k)[0, 0]
    # All keys spare the last one, which spares the last but one.
    expected = torch.tensor([9.0] * 8 + [8.0, 0.0]) / 10
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-6)


def test_a_key_without_a_similar_one_spares_none():
    """The released code takes slot 0 for it."""
    k = torch.eye(16)[None, None]
    k = torch.cat([k, k[:, :, 3:4] + 0.1 * k[:, :, 4:5]], 2)
    scores = ops.key_similarity(k)[0, 0]
    torch.testing.assert_close(scores, reference.key_similarity(k).float()[0, 0], rtol=1e-6, atol=1e-7)
    assert scores[3].abs() < 1e-7 and scores[16].abs() < 0.01 and scores[4] > 0


@given(
    n=st.integers(0, 300),
    heads=st.integers(1, 3),
    dtype=st.sampled_from(kit.DTYPES),
    seed=st.integers(0, 2**31),
    threshold=st.sampled_from([0.1, 0.5, 0.8]),
)
@kit.examples(50)
def test_any_sizes(n, heads, dtype, seed, threshold):
    check(kit.kv(1, heads, n, 24, dtype, seed=seed)[0], threshold)


@pytest.mark.parametrize("layout", kit.LAYOUTS)
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_layouts_change_nothing(layout, dtype):
    plain = ops.key_similarity(kit.kv(2, 2, 150, 72, dtype)[0])
    assert torch.equal(plain, ops.key_similarity(kit.kv(2, 2, 150, 72, dtype, layout)[0]))


def test_a_batch_changes_nothing():
    k, _ = kit.kv(3, 5, 300, 64, torch.bfloat16)
    together = ops.key_similarity(k)
    for b, h in ((0, 0), (1, 4), (2, 2)):
        assert torch.equal(ops.key_similarity(k[b : b + 1, h : h + 1]), together[b : b + 1, h : h + 1])


@kit.only("cpu")
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("heads, n", [(1, 5000), (3, 2000), (9, 700)])
def test_threads_change_nothing(dtype, heads, n):
    k = kit.randn(1, heads, n, 64).to(dtype)
    k[:, :, 1::2] = k[:, :, ::2]
    kit.assert_threads_change_nothing(lambda: ops.key_similarity(k))


@given(data=st.data(), n=st.integers(1, 60))
@kit.examples(30)
def test_padded_rows_score_as_if_alone(data, n):
    (k,) = kit.padded(data, kit.kv(3, 2, n, 16)[0])
    k.assert_as_alone(ops.key_similarity(k.x, **k.spans), map(ops.key_similarity, k.alone))
    check(k.x, **k.spans)


def test_zero_keys_are_like_nothing():
    k, _ = kit.kv(1, 2, 40, 32)
    k[0, 0, 7] = 0
    k[0, 1, 39] = -0.0
    scores = check(k)
    assert scores[0, 0, 7] == 0 and scores[0, 1, 39] == 0
    for threshold in (0.0, 0.5):
        assert (ops.key_similarity(torch.zeros(1, 2, 50, 32), threshold=threshold) == 0).all()


@pytest.mark.parametrize("threshold", [0.5, 1.0])
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_a_lone_key_is_like_nothing(dtype, threshold):
    """Alone in its row, among invalid slots, or among keys that are zero or not finite. The score is 0, not -0."""
    rows = kit.size(40, 3)
    k = kit.randn(rows, 2, 9, 72).to(dtype)
    alone = ops.key_similarity(k[:, :, :1], threshold=threshold)
    assert torch.equal(alone.view(torch.int32), torch.zeros_like(alone).view(torch.int32))
    spans = dict(starts=kit.int32(*[4] * rows), lengths=kit.int32(*[1] * rows))
    padded = ops.key_similarity(k, threshold=threshold, **spans)
    assert (padded[:, :, 4] == 0).all() and padded.isnan().sum() == rows * 2 * 8
    assert (reference.key_similarity(k, threshold=threshold, **spans)[:, :, 4] == 0).all()
    k[:, :, 1:5] = 0
    k[:, :, 5:, 3] = float("nan")
    scores = ops.key_similarity(k, threshold=threshold)
    assert (scores[:, :, :5] == 0).all() and scores[:, :, 5:].isnan().all()
    assert (reference.key_similarity(k, threshold=threshold)[:, :, :5] == 0).all()
    k[:, :, 4] = k[:, :, 0]
    assert (ops.key_similarity(k, threshold=1.0)[:, :, :1] > 0.19).all()  # two keys are not alone


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_like_nothing(bad, dtype):
    k, _ = kit.kv(2, 2, 150, 40, dtype)
    clean = ops.key_similarity(k)
    k[0, 1, 20, 3] = bad
    k[0, 1, 149, 39] = bad
    check(k)
    scores = ops.key_similarity(k)
    assert scores.isnan().sum() == 2 and scores[0, 1, [20, 149]].isnan().all()
    assert torch.equal(scores[1], clean[1]) and torch.equal(scores[0, 0], clean[0, 0])
    assert ops.key_similarity(torch.full((1, 1, 9, 8), bad, dtype=dtype)).isnan().all()


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-30, 1e-20, 1e18, 1e25, 1e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiny_and_huge_keys_have_a_direction(scale, dtype):
    """Their squared norms exceed fp32's range. The plain fp32 formula fails here, so the bound is absolute."""
    k = kit.randn(1, 2, 80, 32).clamp(-2, 2).double()
    k[:, :, 40:] = k[:, :, :40] + 0.3 * k[:, :, 40:]
    k[:, :, 20:60] *= scale  # among keys of ordinary size
    k = k.to(dtype)
    threshold = clear_threshold(k, 0.8)
    actual, exact = (x.key_similarity(k, threshold=threshold) for x in (ops, reference))
    assert (actual - exact).abs().max() < 1e-6


def test_tiny_half_keys_have_a_direction():
    k = (kit.randn(1, 2, 90, 32) * 6e-7).half()  # subnormal
    threshold = clear_threshold(k, 0.5)
    actual, exact = (x.key_similarity(k, threshold=threshold) for x in (ops, reference))
    assert (actual - exact).abs().max() < 1e-6


def test_bad_input():
    k, _ = kit.kv(1, 2, 64, 16)
    for arguments, parts in (
        (dict(k=k[0]), ("key_similarity", "k must be", r"\[2, 64, 16\]")),
        (dict(k=k.double()), ("k must be float32", "torch.float64")),
        (dict(k=k.mT.contiguous().mT), ("k must have a contiguous last dim",)),
        (dict(k=k, threshold=-0.1), ("threshold must be at least 0, got -0.1",)),
        (dict(k=k, threshold=float("nan")), ("threshold must be at least 0, got nan",)),
        (dict(k=k, starts=kit.int32(-1)), ("starts and lengths of row 0", "start -1")),
        (dict(k=k, lengths=kit.int32(65)), ("starts and lengths of row 0", "length 65")),
    ):
        with kvops.debug_checks(), kit.refuses(*parts):
            ops.key_similarity(**arguments)
    with kit.refuses("k must be a torch.Tensor", kind=TypeError):
        ops.key_similarity(None)
    with kit.refuses("k requires grad"):
        ops.key_similarity(k.requires_grad_())


@kit.only("cuda", "simulator")
def test_a_gpus_starts_and_lengths_are_not_looked_at():
    k, _ = kit.kv(6, 2, 50, 16)
    kit.assert_spans_are_clamped(lambda **spans: ops.key_similarity(k, **spans))
