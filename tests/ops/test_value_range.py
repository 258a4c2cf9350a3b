"""value_range against torch: VaSE's value ranges, bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops import ops
from kvops.ops import reference

pytestmark = kit.every_device

NAN, INF = float("nan"), float("inf")


def in_torch(v):
    return v.amax(-1).float() - v.amin(-1).float()


def check(v):
    ranges = ops.value_range(v)
    torch.testing.assert_close(ranges, in_torch(v), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(ranges, reference.value_range(v).float(), rtol=0, atol=0, equal_nan=True)
    return ranges


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("dv", kit.HEAD_DIMS)
def test_dtypes_and_head_dims(dtype, dv):
    check(kit.kv(2, 2, 131, dv, dtype)[1])


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("dv", [8, 16, 24, 32, 48, 328, 520, 1024])
def test_narrow_and_wide_rows(dtype, dv):
    """Also of one sign: a zero instead of a missing channel would be an extreme."""
    v = kit.kv(1, 2, 40, dv, dtype)[1]
    for x in (v, v.abs() + 1, -v.abs() - 1):
        check(x)


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("dv", [8, 24, 40, 128, 520])
def test_extremes_in_every_channel(dtype, dv):
    v = torch.zeros(1, 1, dv, dv).to(dtype)
    v[0, 0].fill_diagonal_(3)
    assert (check(v) == 3).all() and (check(-v) == 3).all()


@given(
    n=st.integers(0, 400),
    heads=st.integers(1, 3),
    dv=st.integers(1, 40).map(lambda x: 8 * x),
    dtype=st.sampled_from(kit.DTYPES),
    seed=st.integers(0, 2**31),
)
@kit.examples(60)
def test_any_sizes(n, heads, dv, dtype, seed):
    check(kit.kv(1, heads, n, dv, dtype, seed=seed)[1])


@pytest.mark.parametrize("layout", kit.LAYOUTS)
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_layouts_change_nothing(layout, dtype):
    check(kit.kv(2, 2, 150, 72, dtype, layout)[1])


@kit.only("cpu")
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("heads, n", [(1, 20_000), (3, 6000), (9, 2100)])
def test_threads_change_nothing(dtype, heads, n):
    v = kit.kv(1, heads, n, 64, dtype)[1]
    kit.assert_threads_change_nothing(lambda: ops.value_range(v))


@given(data=st.data(), n=st.integers(1, 60))
@kit.examples(30)
def test_padded_rows_score_as_if_alone(data, n):
    (v,) = kit.padded(data, kit.kv(3, 2, n, 16)[1])
    v.assert_as_alone(ops.value_range(v.x, **v.spans), [in_torch(x) for x in v.alone])


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("dv", [16, 40, 64, 1024])
def test_nan_and_infinities(dtype, dv):
    v = kit.kv(2, 2, 90, dv, dtype)[1]
    clean = ops.value_range(v)
    v[0, 1, 20, 3] = v[0, 1, 89, dv - 1] = v[1, 0, 0, 0] = NAN
    v[0, 0, 5, 9] = v[0, 0, 6, 0] = INF
    v[0, 0, 6, dv - 1] = v[0, 0, 7, 2] = -INF
    v[1, 1, 30], v[1, 1, 31] = INF, -INF
    v[1, 1, 32], v[1, 1, 32, 7] = INF, NAN
    ranges = check(v)
    assert ranges.isnan().nonzero().tolist() == [
        *([0, 1, 20], [0, 1, 89], [1, 0, 0]),
        *([1, 1, 30], [1, 1, 31], [1, 1, 32]),
    ]
    assert (ranges[0, 0, 5:8] == INF).all() and ranges.isposinf().sum() == 3
    assert torch.equal(ranges[ranges.isfinite()], clean[ranges.isfinite()])


@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_every_channel_that_may_be_nan(dtype):
    v = kit.kv(1, 1, 72, 72, dtype)[1]
    v[0, 0].fill_diagonal_(NAN)
    assert check(v).isnan().all()


@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_huge_tiny_and_equal_channels(dtype):
    most, least = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    v = torch.zeros(1, 1, 4, 24).to(dtype)
    v[0, 0, 0, ::2], v[0, 0, 0, 1::2] = most, -most
    v[0, 0, 1, 3] = least / 2
    v[0, 0, 2] = -0.5
    v[0, 0, 3, ::2] = -0.0
    ranges = check(v)[0, 0]
    assert ranges[2] == 0 and ranges[3] == 0 and (ranges[0] == INF) == (dtype != torch.float16)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dv", [16, 32, 80, 128])
def test_fp8(dtype, dv):
    v = kit.kv(2, 2, 131, dv)[1].to(dtype)
    assert torch.equal(ops.value_range(v), in_torch(v.bfloat16()))
    codes = kit.kv(2, 2, 131, dv, dtype)[1]  # with NaN and infinities
    torch.testing.assert_close(ops.value_range(codes), in_torch(codes.bfloat16()), rtol=0, atol=0, equal_nan=True)


def test_bad_input():
    v = kit.kv(2, 2, 10, 16)[1]
    for arguments, parts in (
        (dict(v=v[0]), ("value_range", "v must be", r"\[2, 10, 16\]")),
        (dict(v=v.double()), ("v must be float32", "torch.float64")),
        (dict(v=v.mT), ("v must have a contiguous last dim", "got stride 16")),
        (dict(v=v[..., :3]), ("head_dim of v must be a positive multiple of 4", "got 3")),
        (dict(v=v, starts=kit.int32(0)), (r"starts must be a contiguous int32 \[2\]", r"got \[1\]")),
        (dict(v=v, lengths=kit.int32(1, 11)), ("starts and lengths of row 1", "length 11")),
    ):
        with kvops.debug_checks(), kit.refuses(*parts):
            ops.value_range(**arguments)
    with kit.refuses("v must be a torch.Tensor", kind=TypeError):
        ops.value_range(None)
    with kit.refuses("v requires grad"):
        ops.value_range(v.requires_grad_())


@kit.only("cuda", "simulator")
def test_a_gpus_starts_and_lengths_are_not_looked_at():
    v = kit.kv(6, 2, 50, 16)[1]
    kit.assert_spans_are_clamped(lambda **spans: ops.value_range(v, **spans))
