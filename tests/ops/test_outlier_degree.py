"""outlier_degree against its reference: ProtoKV Eq. 4, 5."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops import ops
from kvops.ops import reference

pytestmark = kit.every_device


def check(k, kappa=5, **spans):
    """Check both forms and return (similarities, outlier degrees)."""
    exact = reference.outlier_degree(k, kappa=kappa, standardize=False, **spans)
    similarity = ops.outlier_degree(k, kappa=kappa, standardize=False, **spans)
    kit.assert_close(
        similarity, reference.outlier_degree(k, kappa=kappa, standardize=False, **spans, dtype=torch.float32), exact
    )
    degree = ops.outlier_degree(k, kappa=kappa, **spans)
    exact_degree = reference.outlier_degree(k, kappa=kappa, **spans)
    eager = reference.outlier_degree(k, kappa=kappa, **spans, dtype=torch.float32)
    assert torch.equal(degree.isnan(), exact_degree.isnan())
    # The degree divides differences of similarities by their spread, so errors grow with their size over that spread.
    for row in range(k.shape[0]):
        for h in range(k.shape[1]):
            s = exact[row, h][~exact[row, h].isnan()]
            if len(s) and (spread := s.std(correction=0)) > reference.FLAT_SIMILARITY:
                largest = exact_degree[row, h].nan_to_num(0).abs().max()
                condition = (s.abs().max() / (spread * largest)).item()
                kit.assert_close(degree[row, h], eager[row, h], exact_degree[row, h], max(1.0, condition))
    return similarity, degree


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d", kit.HEAD_DIMS)
def test_dtypes_and_head_dims(dtype, d):
    check(kit.kv(2, 2, 131, d, dtype)[0])


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d", [8, 24, 328, 1024])
def test_narrow_and_wide_rows(dtype, d):
    check(kit.kv(1, 2, 40, d, dtype)[0], 7)


@pytest.mark.parametrize(
    "n, kappa",
    [(1, 1), (2, 1024), (300, 1), (300, 7), (300, 8), (300, 9), (300, 64), (300, 299), (300, 1024), (1200, 1024)],
)
def test_neighbourhoods_of_every_size(n, kappa):
    check(kit.kv(1, 1, n, 16)[0], kappa)


@pytest.mark.parametrize("kappa", [680, 681, 682])
def test_about_48_kb_of_shared_memory(kappa):
    """A kernel that needs more shared memory must request it."""
    check(kit.kv(1, 1, 30, 64, torch.bfloat16)[0], kappa)


@pytest.mark.parametrize("kappa", [5, 12])
@pytest.mark.parametrize("layout", kit.LAYOUTS)
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_layouts_change_nothing(layout, dtype, kappa):
    plain = ops.outlier_degree(kit.kv(2, 2, 150, 72, dtype)[0], kappa=kappa)
    assert torch.equal(plain, ops.outlier_degree(kit.kv(2, 2, 150, 72, dtype, layout)[0], kappa=kappa))


def test_a_batch_changes_nothing():
    k, _ = kit.kv(3, 5, 700, 64)
    together = ops.outlier_degree(k)
    for b, h in ((0, 0), (1, 4), (2, 2)):
        assert torch.equal(ops.outlier_degree(k[b : b + 1, h : h + 1]), together[b : b + 1, h : h + 1])


@given(n=st.integers(0, 90), heads=st.integers(1, 3), kappa=st.integers(1, 40), seed=st.integers(0, 2**31))
@kit.examples(40)
def test_any_sizes(n, heads, kappa, seed):
    check(kit.kv(1, heads, n, 24, seed=seed)[0], kappa)


@given(data=st.data(), n=st.integers(1, 60), kappa=st.integers(1, 70))
@kit.examples(30)
def test_padded_rows_score_as_if_alone(data, n, kappa):
    (k,) = kit.padded(data, kit.kv(3, 2, n, 16)[0])
    for standardize in (False, True):
        options = dict(kappa=kappa, standardize=standardize)
        scores = ops.outlier_degree(k.x, **options, **k.spans)
        k.assert_as_alone(scores, [ops.outlier_degree(x, **options) for x in k.alone])
    check(k.x, kappa, **k.spans)


@kit.only("cpu")
@pytest.mark.parametrize("heads, n, kappa", [(1, 9000, 5), (3, 3000, 70), (9, 1100, 1024)])
def test_threads_change_nothing(heads, n, kappa):
    k, _ = kit.kv(1, heads, n, 64)
    kit.assert_threads_change_nothing(lambda: ops.outlier_degree(k, kappa=kappa))


@pytest.mark.parametrize("kappa", [5, 100])
def test_long_rows_keep_their_accuracy(kappa):
    """A running window sum over the whole row would accumulate the rounding errors of every step."""
    check(kit.kv(1, 1, kit.size(20_000, 3_000), 16)[0], kappa)


def test_planted_outliers_score_highest():
    """Tokens of one direction among tokens of another. With the sign of Eq. 5 as printed, none would be found."""
    k = kit.randn(1, 2, 1, 32) + 0.1 * kit.randn(1, 2, 400, 32, seed=1)
    planted = list(range(30, 400, 37))
    k[:, :, planted] = kit.randn(1, 2, 1, 32, seed=2) + 0.1 * kit.randn(1, 2, len(planted), 32, seed=3)
    assert (ops.select_topk(ops.outlier_degree(k), k=len(planted)) == torch.tensor(planted)).all()


@pytest.mark.parametrize("kappa", [5, 12])
def test_zero_keys_are_like_nothing(kappa):
    k, _ = kit.kv(1, 2, 40, 32)
    k[0, 0, 7] = 0
    k[0, 1, 39] = -0.0
    similarity, degree = check(k, kappa)
    assert similarity[0, 0, 7] == 0 and similarity[0, 1, 39] == 0 and degree.isfinite().all()
    similarity, degree = check(torch.zeros(1, 2, 50, 32), kappa)
    assert (similarity == 0).all() and (degree == 0).all()


@pytest.mark.parametrize("kappa", [5, 12])
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_keys_that_are_all_alike_are_no_outliers(dtype, kappa):
    """Equal keys, keys that differ only in length, and a single key: similarities differ by rounding at most."""
    k = kit.randn(1, 2, 1, 64).to(dtype).expand(1, 2, 300, 64).contiguous()
    for x in (k, k * (2 ** torch.arange(300).remainder(5)).unsqueeze(-1).to(dtype), k[:, :, :1]):
        assert (ops.outlier_degree(x, kappa=kappa) == 0).all()
        assert (ops.outlier_degree(x, kappa=kappa, standardize=False) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("kappa", [5, 12])
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_nobodys_neighbour(bad, dtype, kappa):
    k, _ = kit.kv(2, 2, 150, 40, dtype)
    clean = ops.outlier_degree(k, kappa=kappa)
    k[0, 1, 20, 3] = bad
    k[0, 1, 149, 39] = bad
    similarity, degree = check(k, kappa)
    assert similarity.isnan().sum() == 2 and degree[0, 1, [20, 149]].isnan().all()
    assert torch.equal(degree[1], clean[1]) and torch.equal(degree[0, 0], clean[0, 0])
    assert ops.outlier_degree(torch.full((1, 1, 9, 8), bad, dtype=dtype), kappa=kappa).isnan().all()


@pytest.mark.parametrize("kappa", [5, 12])
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e18, 1e25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiny_and_huge_keys_have_a_direction(scale, dtype, kappa):
    """Their squared norms exceed fp32's range. The plain fp32 formula fails here, so the bound is absolute."""
    k = kit.kv(1, 2, 80, 32)[0].double()
    k[:, :, 20:60] *= scale  # among keys of ordinary size
    k = k.to(dtype)
    actual, exact = (x.outlier_degree(k, kappa=kappa, standardize=False) for x in (ops, reference))
    assert (actual - exact).abs().max() < 1e-6


def test_bad_input():
    k, _ = kit.kv(1, 2, 64, 16)
    for arguments, parts in (
        (dict(k=k[0]), ("outlier_degree", "k must be", r"\[2, 64, 16\]")),
        (dict(k=k.double()), ("k must be float32", "torch.float64")),
        (dict(k=k.mT.contiguous().mT), ("k must have a contiguous last dim",)),
        (dict(k=k[..., :2]), ("head_dim of k", "got 2")),
        (dict(k=k, kappa=0), (r"kappa must be in \[1, 1024\], got 0",)),
        (dict(k=k, kappa=1025), (r"kappa must be in \[1, 1024\], got 1025",)),
        (dict(k=k, starts=kit.int32(-1)), ("starts and lengths of row 0", "start -1")),
        (dict(k=k, lengths=kit.int32(65)), ("starts and lengths of row 0", "length 65")),
    ):
        with kvops.debug_checks(), kit.refuses(*parts):
            ops.outlier_degree(**arguments)
    with kit.refuses("k must be a torch.Tensor", kind=TypeError):
        ops.outlier_degree(None)
    with kit.refuses("k requires grad"):
        ops.outlier_degree(k.requires_grad_())


@kit.only("cuda", "simulator")
def test_a_gpus_starts_and_lengths_are_not_looked_at():
    k, _ = kit.kv(6, 2, 50, 16)
    kit.assert_spans_are_clamped(lambda **spans: ops.outlier_degree(k, **spans))
