"""quadratic_scores against its reference: Expected Attention's exponent."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops import ops
from kvops.ops import reference

pytestmark = kit.every_device


def statistics(heads: int, d: int, *batch: int, seed=0):
    """Return means and covariances of query heads, with correlated channels and small trailing eigenvalues."""
    factor = kit.randn(*batch, heads, d, d, seed=seed) * 2.0 ** -torch.arange(d).remainder(7)
    return kit.randn(*batch, heads, d, seed=seed + 1), factor @ factor.mT / d


def check(k, mean, cov=None, **options):
    scores = ops.quadratic_scores(k, mean, cov=cov, **options)
    exact = reference.quadratic_scores(k, mean, cov=cov, **options)
    eager = reference.quadratic_scores(k, mean, cov=cov, **options, dtype=torch.float32)
    kit.assert_close(scores, eager, exact, condition(exact, k, mean, cov, **options))
    return scores


def condition(exact, k, mean, cov=None, *, scale=None, **spans) -> float:
    """Return by how much the terms exceed the scores. The plain formula may be exact for a few keys by luck."""
    if exact.numel() > 50 or exact.isnan().all():
        return 1.0
    of_terms = reference.quadratic_scores(
        k.abs(),
        mean.abs(),
        cov=None if cov is None else cov.abs(),
        scale=None if scale is None else abs(scale),
        **spans,
    )
    return (of_terms.nan_to_num(0).max() / exact.nan_to_num(0).abs().max().clamp(min=1e-30)).item()


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d", kit.HEAD_DIMS)
def test_dtypes_and_head_dims(dtype, d):
    k, _ = kit.kv(1, 2, 131, d, dtype)
    mean, cov = statistics(6, d)
    check(k, mean, cov)
    check(k, mean)


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d", [8, 16, 24, 328, kit.size(1024, 520)])
def test_narrow_and_wide_rows(dtype, d):
    k, _ = kit.kv(1, 2, 40, d, dtype)
    mean, cov = statistics(2, d)
    check(k, mean, cov)
    check(k, mean)


@kit.only("simulator")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_widest_rows_in_the_least_shared_memory(dtype, monkeypatch):
    """A tile of U then takes all of a block's 99 KB."""
    monkeypatch.setenv("CUDASIM_DEVICE", "rtx3090")
    k, _ = kit.kv(1, 1, 40, 1008)
    check(k.to(dtype), *statistics(1, 1008))


def test_rows_of_16_bytes_of_floats():
    for d in (4, 20):
        k, _ = kit.kv(1, 2, 70, d)
        check(k, *statistics(4, d))


@pytest.mark.parametrize("batched", [(False, False), (True, False), (False, True), (True, True)])
def test_statistics_for_all_rows_or_for_each(batched):
    k, _ = kit.kv(3, 2, 90, 32, torch.bfloat16)
    both = statistics(4, 32, 3)
    mean, cov = (x if of_row else x[1].contiguous() for x, of_row in zip(both, batched))
    scores = check(k, mean, cov)
    own, of = (x[2] if of_row else x for x, of_row in zip((mean, cov), batched))
    assert torch.equal(ops.quadratic_scores(k[2:], own, cov=of), scores[2:])


@given(
    n=st.integers(0, 120),
    heads=st.integers(1, 3),
    group=st.integers(1, 5),
    dtype=st.sampled_from(kit.DTYPES),
    scale=st.sampled_from([None, 1.0, -0.3, 0.0]),
    seed=st.integers(0, 2**31),
)
@kit.examples(60)
def test_any_sizes(n, heads, group, dtype, scale, seed):
    k, _ = kit.kv(1, heads, n, 24, dtype, seed=seed)
    check(k, *statistics(heads * group, 24, seed=seed), scale=scale)


def test_it_is_the_logarithm_of_the_mean_weight():
    """Against a million queries."""
    k = kit.kv(1, 1, 5, 8)[0] / 4
    mean, cov = statistics(1, 8)
    q = mean[0] + kit.randn(kit.size(1_000_000, 200_000), 8, seed=5) @ torch.linalg.cholesky(cov[0].double()).float().mT
    weights = (q @ k[0, 0].mT * 8**-0.5).double().exp().mean(0).log()
    assert (ops.quadratic_scores(k, mean, cov=cov)[0, 0] - weights).abs().max() < 0.02


def test_only_the_symmetric_part_of_the_covariance_matters():
    k, _ = kit.kv(1, 2, 60, 40)
    mean, cov = statistics(2, 40)
    skew = kit.randn(2, 40, 40, seed=9)
    check(k, mean, cov + skew)
    torch.testing.assert_close(
        ops.quadratic_scores(k, mean, cov=cov + skew - skew.mT), ops.quadratic_scores(k, mean, cov=cov)
    )


@pytest.mark.parametrize("layout", kit.LAYOUTS)
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_layouts_change_nothing(layout, dtype):
    k, _ = kit.kv(2, 2, 150, 72, dtype)
    mean, cov = statistics(4, 72)
    for options in (dict(cov=cov), {}):
        plain = ops.quadratic_scores(k, mean, **options)
        assert torch.equal(plain, ops.quadratic_scores(kit.kv(2, 2, 150, 72, dtype, layout)[0], mean, **options))


def test_a_batch_changes_nothing():
    k, _ = kit.kv(3, 5, 300, 64, torch.bfloat16)
    mean, cov = statistics(10, 64)
    together = ops.quadratic_scores(k, mean, cov=cov)
    for b, h in ((0, 0), (1, 4), (2, 2)):
        of_head = slice(2 * h, 2 * h + 2)
        alone = ops.quadratic_scores(k[b : b + 1, h : h + 1], mean[of_head], cov=cov[of_head])
        assert torch.equal(alone, together[b : b + 1, of_head])


@kit.only("cpu")
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("heads, n", [(1, 9000), (3, 3000), (9, 1100)])
def test_threads_change_nothing(dtype, heads, n):
    k, _ = kit.kv(1, heads, n, 64, dtype)
    mean, cov = statistics(heads, 64)
    kit.assert_threads_change_nothing(lambda: ops.quadratic_scores(k, mean, cov=cov))


@given(data=st.data(), n=st.integers(1, 60))
@kit.examples(30)
def test_padded_rows_score_as_if_alone(data, n):
    (k,) = kit.padded(data, kit.kv(3, 2, n, 16)[0])
    mean, cov = statistics(6, 16)
    k.assert_as_alone(check(k.x, mean, cov, **k.spans), [ops.quadratic_scores(x, mean, cov=cov) for x in k.alone])


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_scores_nan(bad, dtype):
    k, _ = kit.kv(2, 2, 90, 40, dtype)
    mean, cov = statistics(4, 40)
    clean = ops.quadratic_scores(k, mean, cov=cov)
    k[0, 1, 20, 3] = k[0, 1, 89, 39] = bad
    scores = check(k, mean, cov)
    assert scores.isnan().sum() == 4 and scores[0, 2:, [20, 89]].isnan().all()
    assert torch.equal(scores[~scores.isnan()], clean[~scores.isnan()])
    for of_head in (mean[0], cov[1]):
        of_head.view(-1)[7] = bad
    scores = check(k, mean, cov)
    assert scores[:, :2].isnan().all() and torch.equal(scores[1, 2:], clean[1, 2:])


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e12, 1e25])
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_tiny_and_huge_covariances(scale, dtype):
    mean, cov = statistics(2, 32)
    check(kit.kv(1, 2, 70, 32, dtype)[0], mean * scale, cov * scale)


def test_bad_input():
    k, _ = kit.kv(2, 2, 10, 16)
    mean, cov = statistics(4, 16)
    for arguments, parts in (
        (dict(k=k[0], mean=mean), ("quadratic_scores", "k must be", r"\[2, 10, 16\]")),
        (dict(k=k.double(), mean=mean), ("k must be float32", "torch.float64")),
        (dict(k=k, mean=mean.half()), ("mean must be torch.float32", "torch.float16")),
        (dict(k=k, mean=mean[:, :8]), (r"mean must be a contiguous \[Hq, 16\] or \[2, Hq, 16\]", r"got \[4, 8\]")),
        (dict(k=k, mean=mean[:3]), ("mean must have a multiple of k's 2 heads, got 3",)),
        (dict(k=k, mean=mean, cov=cov[:2]), (r"cov must be a contiguous \[4, 16, 16\] or \[2, 4, 16, 16\]",)),
        (dict(k=k, mean=mean, cov=cov, scale=1e39), ("scale must be finite in fp32", "1e\\+39")),
        (dict(k=k, mean=mean, lengths=kit.int32(1, 11)), ("starts and lengths of row 1", "length 11")),
    ):
        with kvops.debug_checks(), kit.refuses(*parts):
            ops.quadratic_scores(**arguments)
    with kit.refuses("mean must be a torch.Tensor", kind=TypeError):
        ops.quadratic_scores(k, None)
    with kit.refuses("cov requires grad"):
        ops.quadratic_scores(k, mean, cov=cov.requires_grad_())


@kit.only("cuda", "simulator")
def test_a_gpus_starts_and_lengths_are_not_looked_at():
    k, _ = kit.kv(6, 2, 50, 16)
    mean, cov = statistics(2, 16)
    kit.assert_spans_are_clamped(lambda **spans: ops.quadratic_scores(k, mean, cov=cov, **spans))
