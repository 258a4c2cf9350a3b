"""anchor_cosine against its reference: KeyDiff Eq. 8."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops import ops
from kvops.ops import reference

pytestmark = kit.every_device


def check(k, **kwargs):
    actual, anchor = ops.anchor_cosine(k, **kwargs, return_anchor=True)
    eager, eager_anchor = reference.anchor_cosine(k, **kwargs, return_anchor=True, dtype=torch.float32)
    exact, exact_anchor = reference.anchor_cosine(k, **kwargs, return_anchor=True)
    kit.assert_close(actual, eager, exact)
    kit.assert_close(anchor, eager_anchor, exact_anchor)
    return actual, anchor


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d", kit.HEAD_DIMS)
def test_dtypes_and_head_dims(dtype, d):
    k, _ = kit.kv(2, 3, 131, d, dtype)
    for normalize in (True, False):
        scores, anchor = check(k, normalize_anchor=normalize)
        again, copy = check(k, anchor=anchor, normalize_anchor=normalize)
        assert torch.equal(scores, again) and torch.equal(anchor, copy) and copy.data_ptr() != anchor.data_ptr()


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d", [8, 16, 24, 328, 512, 520, 1024])
def test_narrow_and_wide_rows(dtype, d):
    check(kit.kv(1, 2, 40, d, dtype)[0])


@pytest.mark.parametrize("layout", kit.LAYOUTS)
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_layouts_change_nothing(layout, dtype):
    plain, _ = check(kit.kv(2, 2, 150, 72, dtype)[0])
    assert torch.equal(plain, ops.anchor_cosine(kit.kv(2, 2, 150, 72, dtype, layout)[0]))


@kit.only("cuda", "simulator")
def test_many_heads():
    """More heads than a CUDA grid can have blocks in y; a head's scores do not depend on it."""
    k, _ = kit.kv(7, kit.size(10_000, 300), 3, 8)
    scores, _ = check(k)
    assert torch.equal(scores[3:4, :2], ops.anchor_cosine(k[3:4, :2]))


def test_a_batch_changes_nothing():
    k, _ = kit.kv(3, 5, 700, 64)
    together = ops.anchor_cosine(k)
    for b, h in ((0, 0), (1, 4), (2, 2)):
        assert torch.equal(ops.anchor_cosine(k[b : b + 1, h : h + 1]), together[b : b + 1, h : h + 1])


@given(
    n=st.integers(0, 70),
    heads=st.integers(1, 3),
    normalize=st.booleans(),
    dtype=st.sampled_from(kit.DTYPES),
    seed=st.integers(0, 2**31),
)
@kit.examples(60)
def test_any_sizes(n, heads, normalize, dtype, seed):
    check(kit.kv(1, heads, n, 24, dtype, seed=seed)[0], normalize_anchor=normalize)


@given(data=st.data(), n=st.integers(1, 60), given_anchor=st.booleans())
@kit.examples(40)
def test_padded_rows_score_as_if_alone(data, n, given_anchor):
    (k,) = kit.padded(data, kit.kv(3, 2, n, 16)[0])
    anchors = kit.randn(3, 2, 16).split(1) if given_anchor else [None] * 3
    scores, _ = check(k.x, anchor=torch.cat(anchors) if given_anchor else None, **k.spans)
    k.assert_as_alone(scores, [ops.anchor_cosine(x, anchor=own) for x, own in zip(k.alone, anchors)])


@kit.only("cpu")
@pytest.mark.parametrize("heads,n", [(1, 9000), (3, 3000), (1, 40000), (9, 1100)])
def test_threads_change_nothing(heads, n):
    k, _ = kit.kv(1, heads, n, 64)
    kit.assert_threads_change_nothing(lambda: ops.anchor_cosine(k, return_anchor=True))


def test_long_rows_keep_their_accuracy():
    check(kit.kv(1, 1, kit.size(60_000, 6_000), 16)[0])


def test_zero_keys_and_zero_anchor_score_zero():
    k, _ = kit.kv(1, 2, 40, 32)
    k[0, 0, 7] = 0
    k[0, 1, 39] = -0.0
    scores, _ = check(k)
    assert scores[0, 0, 7] == 0 and scores[0, 1, 39] == 0 and scores.isfinite().all()
    scores, _ = check(k, anchor=torch.zeros(1, 2, 32))
    assert (scores == 0).all()
    assert (check(torch.zeros(1, 2, 5, 32))[0] == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("normalize", [True, False])
def test_what_is_not_finite_stays_where_it_is(bad, normalize):
    k, _ = kit.kv(2, 2, 50, 40)
    clean = ops.anchor_cosine(k, normalize_anchor=normalize)
    k[0, 1, 20, 3] = bad
    scores, anchor = check(k, normalize_anchor=normalize)
    assert scores.isnan().sum() == 1 and scores[0, 1, 20].isnan() and anchor.isfinite().all()
    assert torch.equal(scores[1], clean[1]) and torch.equal(scores[0, 0], clean[0, 0])


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e18, 1e25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiny_and_huge_keys_have_a_direction(scale, dtype):
    """Their squared norms exceed fp32's range. The plain fp32 formula fails here, so the bound is absolute."""
    k = (kit.kv(1, 2, 40, 32)[0].double() * scale).to(dtype)
    actual, anchor = ops.anchor_cosine(k, return_anchor=True)
    exact, exact_anchor = reference.anchor_cosine(k, return_anchor=True)
    assert (actual - exact).abs().max() < 1e-6
    assert (anchor - exact_anchor).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_value_is_read_right(dtype):
    """Keys (x, 1, 0, ...) score -x / sqrt(x^2 + 1) against the first axis, including subnormals, infinities and NaN."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    k = torch.zeros(1, 1, len(x), 8, dtype=dtype)
    k[0, 0, :, 0], k[0, 0, :, 1] = x, 1.0
    anchor = torch.eye(8)[:1].reshape(1, 1, 8).contiguous()
    actual, exact = ops.anchor_cosine(k, anchor=anchor).double(), reference.anchor_cosine(k, anchor=anchor)
    assert torch.equal(actual.isnan(), exact.isnan()) and exact.isnan().any()
    tiny = torch.finfo(torch.float32).tiny
    assert ((actual - exact).abs() <= 1e-6 * exact.abs() + tiny)[~exact.isnan()].all()


def test_any_positive_multiple_of_the_anchor_scores_alike():
    k, _ = kit.kv(1, 2, 40, 32)
    scores, anchor = check(k)
    assert torch.equal(ops.anchor_cosine(k, anchor=anchor * 0.25), scores)


def test_bad_input():
    k, _ = kit.kv(1, 2, 64, 16)
    for arguments, parts in (
        (dict(k=k[0]), ("anchor_cosine", "k must be", r"\[2, 64, 16\]")),
        (dict(k=k.double()), ("k must be float32", "torch.float64")),
        (dict(k=k.mT.contiguous().mT), ("k must have a contiguous last dim",)),
        (dict(k=k[..., :2]), ("head_dim of k", "got 2")),
        (dict(k=k, anchor=torch.zeros(1, 2, 8)), ("anchor must be a contiguous", r"\[1, 2, 16\]", r"\[1, 2, 8\]")),
        (
            dict(k=k, anchor=torch.zeros(1, 2, 16, dtype=torch.float64)),
            ("anchor must be torch.float32", "torch.float64"),
        ),
        (dict(k=k, starts=kit.int32(-1)), ("starts and lengths of row 0", "start -1")),
        (dict(k=k, lengths=kit.int32(65)), ("starts and lengths of row 0", "length 65")),
    ):
        with kvops.debug_checks(), kit.refuses(*parts):
            ops.anchor_cosine(**arguments)
    with kit.refuses("k must be a torch.Tensor", kind=TypeError):
        ops.anchor_cosine(None)
    with kit.refuses("k requires grad"):
        ops.anchor_cosine(k.requires_grad_())


@kit.only("cuda", "simulator")
def test_what_a_gpu_refuses():
    with kit.refuses("anchor_cosine: head_dim of k must be at most 1024 on a GPU, got 1032"):
        ops.anchor_cosine(torch.zeros(1, 1, 4, 1032))


@kit.only("cuda", "simulator")
def test_a_gpus_starts_and_lengths_are_not_looked_at():
    k, _ = kit.kv(6, 2, 50, 16)
    kit.assert_spans_are_clamped(lambda **spans: ops.anchor_cosine(k, return_anchor=True, **spans))


@pytest.mark.parametrize("heads, n", [(1, 3000), (4, 700)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_beyond_fp32_still_have_a_direction(dtype, heads, n):
    """Keys near the end of fp32's range, not normalized: mu is infinite, but no score is."""
    k = (kit.randn(1, heads, n, 16).clamp(-1, 1) * 1e38 + 1e38).to(dtype)
    k[:, :, 7] = 1e-30
    k[:, :, 9, 3] = torch.nan
    with kit.threads(2):
        scores, mu = ops.anchor_cosine(k, normalize_anchor=False, return_anchor=True)
    exact, exact_mu = reference.anchor_cosine(k, normalize_anchor=False, return_anchor=True)
    eager = reference.anchor_cosine(k * 2.0**-60, normalize_anchor=False, dtype=torch.float32)
    kit.assert_close(scores, eager, exact)
    assert torch.equal(mu, exact_mu.float()) and mu.isinf().all()


@pytest.mark.parametrize("n", [500, 512, 513, 1025, kit.size(70_000, 2_000)])
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_many_keys_that_are_alike(dtype, n):
    """The rounding errors of their sum all have the same sign."""
    k = kit.randn(1, 1, 1, 40).to(dtype).expand(1, 1, n, 40).contiguous()
    for normalize in (True, False):
        _, mu = ops.anchor_cosine(k, normalize_anchor=normalize, return_anchor=True)
        _, exact = reference.anchor_cosine(k, normalize_anchor=normalize, return_anchor=True)
        assert ((mu - exact).abs() <= 2e-6 * exact.abs()).all()
