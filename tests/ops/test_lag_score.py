"""lag_score against its reference: LagKV Eq. 5-9."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops import ops
from kvops.ops import reference
from kvops.ops.lag import num_segments, segment_start

pytestmark = kit.every_device


def check(k, v, lag, prefix=0, v_weight=1.0, self_reference=False, *, condition=1.0, **spans):
    """Compare the operator with fp64, and with the plain fp32 formula."""
    options = dict(lag=lag, prefix=prefix, v_weight=v_weight, self_reference=self_reference, **spans)
    actual = ops.lag_score(k, v, **options)
    eager = reference.lag_score(k, v, **options, dtype=torch.float32)
    kit.assert_close(actual, eager, reference.lag_score(k, v, **options), condition)
    return actual


def condition_of(k, v, lag, prefix, self_reference=False) -> float:
    """Return the condition: softmax scales a std's relative error by the std, which is large in short partitions."""
    count = num_segments(k.shape[2], prefix, lag)
    grid = slice(prefix, segment_start(count + 1, prefix, lag))
    stds = [reference.lag_std(z[:, :, grid].double(), lag, self_reference) for z in (k, v) if count]
    return max([1.0, *(x.max().item() for x in stds)])


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d", kit.HEAD_DIMS)
def test_dtypes_and_head_dims(dtype, d):
    for self_reference in (False, True):
        check(*kit.kv(2, 3, 211, d, dtype), 32, 16, 1.0, self_reference)


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d, dv", [(8, 1024), (16, 24), (328, 512), (1024, 520)])
def test_narrow_and_wide_rows(dtype, d, dv):
    check(*kit.kv(1, 2, 40, d, dtype, dv=dv), 10)


@kit.only("cuda", "simulator")
def test_many_heads():
    """More heads than a CUDA grid can have blocks in y; a head's scores do not depend on it."""
    k, v = kit.kv(7, kit.size(10_000, 300), 4, 8)
    scores = check(k, v, 2)
    assert torch.equal(scores[3:4, :2], ops.lag_score(k[3:4, :2], v[3:4, :2], lag=2))


@pytest.mark.parametrize("heads, n, lag", [(1, kit.size(20_000, 3_000), 1_000), (1, 300, 1)])
def test_repeatable(heads, n, lag):
    """Long partitions, and partitions of one token."""
    k, v = kit.kv(1, heads, n, 64, torch.bfloat16)
    kit.assert_repeatable(lambda: (ops.lag_score(k, v, lag=lag, prefix=7),))


@pytest.mark.parametrize("heads, n, d, lag", [(5, 400, 64, 64), (3, 560, 1024, 270)])
def test_a_batch_changes_nothing(heads, n, d, lag):
    k, v = kit.kv(3, heads, n, d, torch.bfloat16)
    together = ops.lag_score(k, v, lag=lag)
    for b, h in ((0, 0), (1, heads - 1), (2, 2)):
        one = (slice(b, b + 1), slice(h, h + 1))
        assert torch.equal(ops.lag_score(k[one], v[one], lag=lag), together[one])


@kit.only("simulator")
@pytest.mark.parametrize("self_reference", [False, True])
@pytest.mark.parametrize("lag", [70, 270])  # clusters of 2 blocks; of 4 (on the small GPU) and 8
def test_clusters_change_nothing(monkeypatch, lag, self_reference):
    """GPUs with and without clusters, with more or less shared memory, give the same bits."""
    k, v = kit.kv(1, 1, 3 * lag + 9, 1024, torch.bfloat16, dv=512)
    k[:, :, lag : lag + 4] += 1e4  # far outside the reference's range
    v[:, :, 40, 7] = float("nan")
    monkeypatch.setenv("CUDASIM_DEVICE", "a100")
    expected = check(k, v, lag, 5, 0.5, self_reference)
    for device in ("small", "h200", "b200"):
        monkeypatch.setenv("CUDASIM_DEVICE", device)
        assert kit.same(
            [ops.lag_score(k, v, lag=lag, prefix=5, v_weight=0.5, self_reference=self_reference)], [expected]
        ), device


@pytest.mark.parametrize("layout", kit.LAYOUTS)
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_layouts_change_nothing(layout, dtype):
    plain = check(*kit.kv(2, 2, 150, 72 if dtype != torch.float32 else 36, dtype, dv=128), 32, 5)
    other = ops.lag_score(
        *kit.kv(2, 2, 150, 72 if dtype != torch.float32 else 36, dtype, layout, dv=128), lag=32, prefix=5
    )
    assert torch.equal(plain, other)


@given(
    n=st.integers(0, 90),
    lag=st.integers(1, 20),
    prefix=st.integers(0, 20),
    heads=st.integers(1, 3),
    v_weight=st.sampled_from((0.0, 0.5, 1.0, -2.0)),
    self_reference=st.booleans(),
    dtype=st.sampled_from(kit.DTYPES),
    seed=st.integers(0, 2**31),
)
@kit.examples(60)
def test_any_sizes(n, lag, prefix, heads, v_weight, self_reference, dtype, seed):
    k, v = kit.kv(1, heads, n, 16, dtype, seed=seed)
    condition = condition_of(k, v, lag, prefix, self_reference)
    check(k, v, lag, prefix, v_weight, self_reference, condition=condition)


@given(data=st.data(), n=st.integers(1, 80), lag=st.integers(1, 12), prefix=st.integers(0, 9))
@kit.examples(40)
def test_padded_rows_score_as_if_alone(data, n, lag, prefix):
    k, v = kit.padded(data, *kit.kv(3, 2, n, 8))
    rows = list(zip(k.alone, v.alone))
    condition = max(condition_of(*row, lag, prefix) for row in rows)
    scores = check(k.x, v.x, lag, prefix, condition=condition, **k.spans)
    for found, row in zip(scores, rows):
        alone = ops.lag_score(*row, lag=lag, prefix=prefix)
        assert torch.equal(found[:, : alone.shape[2]], alone[0])
        assert found[:, alone.shape[2] :].isnan().all()


@kit.only("cpu")
@pytest.mark.parametrize("heads,n", [(1, 5000), (3, 1500), (8, 600)])
def test_threads_change_nothing(heads, n):
    k, v = kit.kv(1, heads, n, 64)
    kit.assert_threads_change_nothing(lambda: ops.lag_score(k, v, lag=64, prefix=16))


def test_a_constant_channel_contributes_zero():
    k, v = kit.kv(1, 2, 96, 32)
    k[:, :, 32:64, 5] = 3.0  # the reference of partition 0, the subject of partition 1
    scores = check(k, v, 32)
    assert scores.isfinite().all()
    k[:, :, :, :] = 1.0
    v[:, :, :, :] = 2.0
    assert torch.allclose(check(k, v, 32), torch.full((1, 2, 2, 32), 2 / 32))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("token", [3, 40, 70, 95])
@pytest.mark.parametrize("self_reference", [False, True])
def test_what_is_not_finite_stays_where_it_is(bad, where, token, self_reference):
    k, v = kit.kv(2, 2, 96, 40)
    clean = ops.lag_score(k, v, lag=32, self_reference=self_reference)
    (k if where == "k" else v)[0, 1, token, 7] = bad
    scores = check(k, v, 32, 0, 1.0, self_reference)
    assert torch.equal(scores[1], clean[1]) and torch.equal(scores[0, 0], clean[0, 0])
    assert scores.isnan().sum() == (1 if not self_reference and token < 64 else 0)


def test_a_partition_of_nan():
    k, v = kit.kv(1, 1, 96, 16)
    k[:, :, :32] = float("nan")
    assert check(k, v, 32)[:, :, 0].isnan().all()
    k[:, :, 32:64] = float("nan")
    check(k, v, 32)


def test_large_means_keep_their_accuracy():
    k, v = kit.kv(1, 2, 256, 64)
    check(k + 1000 * torch.arange(64.0), v - 500, 64)


@pytest.mark.parametrize("offset", [30.0, 3e3, 1e6, -1e8])
def test_a_subject_far_outside_of_the_reference(offset):
    """Its normalized values share a huge mean, in which a naive one-pass variance would lose all precision."""
    k, v = kit.randn(2, 1, 2, 96, 64).unbind(0)
    k[:, :, :32] += offset
    check(k, v, 32)


@pytest.mark.parametrize("lag", [kit.size(9_000, 2_400), kit.size(55_000, 10_900)])  # larger than shared memory
def test_long_partitions(lag):
    check(*kit.kv(1, 1, 2 * lag + 99, 8), lag, 16)


def test_bad_input():
    k, v = kit.kv(1, 2, 64, 16)
    good = dict(k=k, v=v, lag=8)
    for change, parts in {
        "rank": (dict(k=k[0]), ("lag_score", "k must be", r"\[2, 64, 16\]")),
        "dtype": (dict(k=k.double(), v=v.double()), ("k must be float32", "torch.float64")),
        "v dtype": (dict(v=v.half()), ("v must have k's dtype", "torch.float16")),
        "tokens": (dict(v=v[:, :, 1:]), ("v must have k's batch", r"\[1, 2, 63, 16\]")),
        "last dim": (dict(k=k.mT.contiguous().mT), ("k must have a contiguous last dim", "64")),
        "head_dim": (dict(k=k[..., :6]), ("head_dim of k", "multiple of 4", "got 6")),
        "lag": (dict(lag=0), ("lag must be in", "got 0")),
        "huge lag": (dict(lag=2**62), ("lag must be in", str(2**62))),
        "prefix": (dict(prefix=-1), ("prefix must be >= 0", "got -1")),
        "starts": (dict(starts=kit.int32(65)), ("starts and lengths of row 0", "64", "start 65")),
        "lengths": (dict(starts=kit.int32(1), lengths=kit.int32(64)), ("row 0", "length 64")),
        "starts shape": (dict(starts=kit.int32(0, 0)), ("starts must be a contiguous int32", r"\[2\]")),
        "starts dtype": (dict(starts=torch.zeros(1)), ("starts must be torch.int32", "torch.float32")),
        "weight": (dict(v_weight=float("nan")), ("v_weight must be finite in fp32, got nan",)),
        "large weight": (dict(v_weight=1e300), ("v_weight must be finite in fp32, got 1e\\+300",)),
        "device": (dict(v=v.to("meta")), ("v must be on the first tensor's device", "got meta")),
    }.values():
        with kvops.debug_checks(), kit.refuses(*parts):
            ops.lag_score(**good | change)
    with kit.refuses("lag_score: k must be a torch.Tensor, got list", kind=TypeError):
        ops.lag_score([1.0], v, lag=8)
    with kit.refuses("v requires grad", "no_grad"):
        ops.lag_score(k, v.requires_grad_(), lag=8)
    with torch.no_grad():
        ops.lag_score(k, v, lag=8)


@kit.only("cuda", "simulator")
def test_what_a_gpu_refuses():
    wide, narrow = torch.zeros(1, 1, 8, 1032), torch.zeros(1, 1, 8, 16)
    for k, v, name in ((wide, narrow, "k"), (narrow, wide, "v")):
        with kit.refuses(f"lag_score: head_dim of {name} must be at most 1024 on a GPU, got 1032"):
            ops.lag_score(k, v, lag=2)


@kit.only("cuda", "simulator")
def test_a_gpus_starts_and_lengths_are_not_looked_at():
    k, v = kit.kv(6, 2, 50, 16)
    kit.assert_spans_are_clamped(lambda **spans: ops.lag_score(k, v, lag=8, prefix=2, **spans))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("range_of_one", [3e-38, 2e-39, 5e-40])
def test_a_channel_of_a_very_small_range_counts(dtype, range_of_one):
    """Below 2.9e-39, 1 / range overflows fp32. Some rows are far outside the range, in one or both tensors."""
    k, v = kit.kv(1, 2, 70, 16, dtype)
    for x in (k, v):
        x[..., 3] = (torch.rand(1, 2, 70) * range_of_one).to(dtype)
        x[..., 5] = 0.25
    scores = check(k, v, 10)
    assert not torch.equal(scores, ops.lag_score(k.index_fill(3, torch.tensor([3]), 0.0), v, lag=10))
    for self_reference in (False, True):
        check(k, kit.kv(1, 2, 70, 16, dtype, seed=1)[1], 10, 5, 1.0, self_reference)
