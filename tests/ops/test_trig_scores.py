"""trig_scores against its reference: TriAttention's series and norms."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops import ops
from kvops.ops import reference

pytestmark = kit.every_device


def check(k, centers, norms=None, **options):
    scores = ops.trig_scores(k, centers, norms=norms, **options)
    exact = reference.trig_scores(k, centers, norms=norms, **options)
    eager = reference.trig_scores(k, centers, norms=norms, **options, dtype=torch.float32)
    kit.assert_close(scores, eager, exact, condition(exact, k, centers, norms, **options))
    return scores


def condition(exact, k, centers, norms=None, **options) -> float:
    """Return by how much the terms exceed the scores. The plain formula may be exact for a few keys by luck."""
    if exact.numel() > 50 or exact.isnan().all():
        return 1.0
    of_terms = reference.trig_scores(k.abs(), centers.abs(), norms=None if norms is None else norms.abs(), **options)
    return (of_terms.nan_to_num(0).max() / exact.nan_to_num(0).abs().max().clamp(min=1e-30)).item()


def weights(heads: int, d: int, pairs: int | None = None, *batch: int, seed=0):
    return kit.randn(*batch, heads, d, seed=seed), kit.randn(*batch, heads, pairs or d // 2, seed=seed + 1).abs()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d", kit.HEAD_DIMS)
def test_dtypes_and_head_dims(dtype, d, interleaved):
    k, _ = kit.kv(1, 2, 131, d, dtype)
    check(k, *weights(6, d), interleaved=interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d", [8, 16, 24, 328, 1024])
def test_narrow_and_wide_rows(dtype, d, interleaved):
    k, _ = kit.kv(1, 2, 40, d, dtype)
    check(k, *weights(2, d), interleaved=interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("pairs", [1, 3, 8, 15, 16, 17, 20, 32, 36])
def test_some_channels_rotate(pairs, dtype, interleaved):
    k, _ = kit.kv(2, 2, 50, 72, dtype)
    check(k, *weights(4, 72, pairs), interleaved=interleaved)


def test_rows_of_16_bytes_of_floats():
    for d in (4, 20):
        k, _ = kit.kv(1, 2, 70, d)
        check(k, *weights(4, d))


@pytest.mark.parametrize("batched", [(False, False), (True, False), (False, True), (True, True)])
def test_weights_for_all_rows_or_for_each(batched):
    k, _ = kit.kv(3, 2, 90, 32, torch.bfloat16)
    centers, norms = (x if of_row else x[1] for x, of_row in zip(weights(4, 32, None, 3), batched))
    scores = check(k, centers, norms)
    own, of = (x[2] if of_row else x for x, of_row in zip((centers, norms), batched))
    assert torch.equal(ops.trig_scores(k[2:], own, norms=of), scores[2:])


@given(
    n=st.integers(0, 120),
    heads=st.integers(1, 3),
    group=st.integers(1, 9),
    dtype=st.sampled_from(kit.DTYPES),
    pairs=st.integers(0, 12),
    interleaved=st.booleans(),
    seed=st.integers(0, 2**31),
)
@kit.examples(60)
def test_any_sizes(n, heads, group, dtype, pairs, interleaved, seed):
    k, _ = kit.kv(1, heads, n, 24, dtype, seed=seed)
    centers, norms = weights(heads * group, 24, pairs, seed=seed)
    check(k, centers, norms if pairs else None, interleaved=interleaved)


@pytest.mark.parametrize("layout", kit.LAYOUTS)
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_layouts_change_nothing(layout, dtype):
    k, _ = kit.kv(2, 2, 150, 72, dtype)
    centers, norms = weights(4, 72)
    plain = ops.trig_scores(k, centers, norms=norms)
    assert torch.equal(plain, ops.trig_scores(kit.kv(2, 2, 150, 72, dtype, layout)[0], centers, norms=norms))


def test_a_batch_changes_nothing():
    k, _ = kit.kv(3, 5, 300, 64, torch.bfloat16)
    centers, norms = weights(10, 64)
    together = ops.trig_scores(k, centers, norms=norms)
    for b, h in ((0, 0), (1, 4), (2, 2)):
        of_head = slice(2 * h, 2 * h + 2)
        alone = ops.trig_scores(k[b : b + 1, h : h + 1], centers[of_head], norms=norms[of_head])
        assert torch.equal(alone, together[b : b + 1, of_head])


@kit.only("cpu")
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("heads, n", [(1, 20_000), (3, 6000), (9, 2100)])
def test_threads_change_nothing(dtype, heads, n):
    k, _ = kit.kv(1, heads, n, 64, dtype)
    centers, norms = weights(heads, 64)
    kit.assert_threads_change_nothing(lambda: ops.trig_scores(k, centers, norms=norms))


@given(data=st.data(), n=st.integers(1, 60))
@kit.examples(30)
def test_padded_rows_score_as_if_alone(data, n):
    (k,) = kit.padded(data, kit.kv(3, 2, n, 16)[0])
    centers, norms = weights(6, 16)
    scores = check(k.x, centers, norms, **k.spans)
    k.assert_as_alone(scores, [ops.trig_scores(x, centers, norms=norms) for x in k.alone])


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_scores_nan(bad, dtype):
    k, _ = kit.kv(2, 2, 90, 40, dtype)
    centers, norms = weights(4, 40)
    clean = ops.trig_scores(k, centers, norms=norms)
    k[0, 1, 20, 3] = k[0, 1, 89, 39] = bad
    scores = check(k, centers, norms)
    assert scores.isnan().sum() == 4 and scores[0, 2:, [20, 89]].isnan().all()
    assert torch.equal(scores[~scores.isnan()], clean[~scores.isnan()])
    centers[0, 7] = norms[1, 3] = bad
    scores = check(k, centers, norms)
    assert scores[:, :2].isnan().all() and torch.equal(scores[1, 2:], clean[1, 2:])


@pytest.mark.parametrize("scale", [1e-15, 1e15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_and_large_keys(scale, dtype):
    check((kit.kv(1, 2, 70, 32)[0] * scale).to(dtype), *weights(4, 32))


def test_squares_that_overflow_score_nan():
    k, _ = kit.kv(1, 2, 40, 32)
    centers, norms = weights(2, 32)
    k[0, 1, 5, 4] = 1e20
    assert ops.trig_scores(k, centers, norms=norms).isnan().nonzero().tolist() == [[0, 1, 5]]
    assert ops.trig_scores(k, centers).isfinite().all()


def test_bad_input():
    k, _ = kit.kv(2, 2, 10, 16)
    centers, norms = weights(4, 16)
    for arguments, parts in (
        (dict(k=k[0], centers=centers), ("trig_scores", "k must be", r"\[2, 10, 16\]")),
        (dict(k=k.double(), centers=centers), ("k must be float32", "torch.float64")),
        (dict(k=k, centers=centers.half()), ("centers must be torch.float32", "torch.float16")),
        (dict(k=k, centers=centers[:, :8]), (r"centers must be a contiguous \[Hq, 16\] or \[2, Hq, 16\]",)),
        (dict(k=k, centers=centers[:3]), ("centers must have a multiple of k's 2 heads, got 3",)),
        (dict(k=k, centers=centers, norms=norms[:2]), (r"norms must be a contiguous \[4, 8\] or \[2, 4, 8\]",)),
        (dict(k=k, centers=centers, norms=centers), (r"2 \* pairs at most the head_dim 16", r"got \[4, 16\]")),
        (dict(k=k, centers=centers, lengths=kit.int32(1, 11)), ("starts and lengths of row 1", "length 11")),
    ):
        with kvops.debug_checks(), kit.refuses(*parts):
            ops.trig_scores(**arguments)
    with kit.refuses("centers must be a torch.Tensor", kind=TypeError):
        ops.trig_scores(k, None)
    with kit.refuses("norms requires grad"):
        ops.trig_scores(k, centers, norms=norms.requires_grad_())


@kit.only("cuda", "simulator")
def test_a_gpus_starts_and_lengths_are_not_looked_at():
    k, _ = kit.kv(6, 2, 50, 16)
    centers, norms = weights(2, 16)
    kit.assert_spans_are_clamped(lambda **spans: ops.trig_scores(k, centers, norms=norms, **spans))
