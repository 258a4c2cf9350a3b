"""lsh_bucket against its reference, exactly: ProtoKV Eq. 7, 8."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops import ops
from kvops.ops import reference

pytestmark = kit.every_device


def drawn(r: int, d: int, seed=0):
    return kit.randn(r, d, seed=seed) / math.sqrt(d), kit.randn(r, seed=seed + 1) * 9


def every(k):
    """Return indices of all slots of k, as an expanded view."""
    return torch.arange(k.shape[2]).expand(*k.shape[:3])


def check(k, indices, projection, phase):
    actual = ops.lsh_bucket(k, indices, projection, phase)
    assert torch.equal(actual, reference.lsh_bucket(k, indices, projection, phase))
    return actual


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d", [8, 40, 128, 1024])
def test_dtypes_and_head_dims(dtype, d):
    k, _ = kit.kv(2, 2, 70, d, dtype)
    buckets = check(k, every(k), *drawn(2, d))
    assert buckets.unique().tolist() == [0, 1, 2, 3] and buckets.dtype == torch.int32


@pytest.mark.parametrize("r", [1, 9, 30])
def test_bits(r):
    k, _ = kit.kv(1, 2, 60, 16)
    buckets = check(k, every(k), *drawn(r, 16))
    assert buckets.max() >= 2 ** (r - 1) and buckets.max() < 2**r  # the first bit is the most significant


@given(data=st.data(), n=st.integers(1, 40), p=st.integers(0, 20), seed=st.integers(0, 2**31))
@kit.examples(40)
def test_chosen_keys(data, n, p, seed):
    k, _ = kit.kv(2, 3, n, 8, seed=seed)
    flat = data.draw(st.lists(st.integers(-1, n - 1), min_size=6 * p, max_size=6 * p))
    indices = torch.tensor(flat, dtype=torch.int64).view(2, 3, p)
    assert torch.equal(check(k, indices, *drawn(3, 8)) == -1, indices == -1)


@pytest.mark.parametrize("layout", kit.LAYOUTS)
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_layouts_change_nothing(layout, dtype):
    k, _ = kit.kv(2, 2, 50, 72, dtype, layout)
    check(k, every(k)[:, :, 3::2], *drawn(4, 72))
    check(kit.unaligned(k, 1, 3), every(k), *drawn(4, 72))


def test_a_key_that_is_not_finite_is_in_no_bucket():
    k, _ = kit.kv(1, 3, 20, 8)
    for head, bad in enumerate((float("nan"), float("inf"), float("-inf"))):
        k[0, head, 7, 3] = bad
    assert (check(k, every(k), *drawn(2, 8))[0, :, 7] == -1).all()


def test_the_features_sign():
    """A key whose product with the projection is x has the bit cos(x + phase) > 0."""
    x = torch.tensor([0.0, 1.5, 1.6, 3.1, 4.7, 4.8, 6.2, 7.9, -1.5, -1.6, -4.8, 1e4, 1e6 + 0.25])
    k = torch.zeros(1, 1, len(x), 8)
    k[0, 0, :, 3] = x
    axis = torch.eye(8)[3:4].contiguous()
    assert check(k, every(k), axis, torch.zeros(1)).flatten().tolist() == (x.double().cos() > 0).int().tolist()
    assert check(torch.zeros(1, 1, 1, 8), every(k)[:, :, :1], axis, torch.full((1,), 2.0)).item() == 0


@pytest.mark.parametrize("scale", [1e-42, 1e20, 3e37])
def test_tiny_and_huge_keys_have_buckets(scale):
    """Angles beyond 2^53 turns have no fraction: their feature counts as positive, on every device."""
    k = kit.kv(1, 2, 40, 16)[0] * scale
    projection, phase = drawn(3, 16)
    buckets = ops.lsh_bucket(k, every(k), projection, phase)
    if scale < 1:
        assert torch.equal(buckets, ops.lsh_bucket(k * 0, every(k), projection, phase))
    else:
        assert (buckets == 7).all()


@kit.only("cpu")
def test_threads_change_nothing():
    k, _ = kit.kv(1, 3, 20_000, 16)
    with kit.threads(1):
        one = ops.lsh_bucket(k, every(k), *drawn(4, 16))
    with kit.threads(3):
        assert torch.equal(ops.lsh_bucket(k, every(k), *drawn(4, 16)), one)


def test_bad_input():
    k, _ = kit.kv(2, 2, 10, 16)
    good = dict(k=k, indices=every(k), projection=torch.zeros(2, 16), phase=torch.zeros(2))
    for change, parts in (
        (dict(k=k.double()), ("lsh_bucket", "k must be float32", "torch.float64")),
        (dict(indices=every(k).int()), ("indices must be torch.int64", "torch.int32")),
        (dict(indices=every(k)[:1]), ("indices must be", r"\[2, 2, m\]", r"\[1, 2, 10\]")),
        (dict(indices=every(k) + 1), (r"indices must lie in \[-1, 10\), got 10 at row 0, head 0, entry 9",)),
        (dict(projection=torch.zeros(2, 8)), (r"projection must be a contiguous \[r, 16\]", r"\[2, 8\]")),
        (dict(projection=torch.zeros(31, 16), phase=torch.zeros(31)), (r"r in \[1, 30\], got \[31, 16\]",)),
        (dict(projection=torch.zeros(2, 16).double()), ("projection must be torch.float32", "torch.float64")),
        (dict(projection=torch.full((2, 16), torch.nan)), ("projection must be finite, got nan at entry 0",)),
        (dict(phase=torch.tensor([0.0, torch.inf])), ("phase must be finite, got inf at entry 1",)),
        (dict(phase=torch.zeros(3)), (r"phase must be a contiguous \[2\]", r"\[3\]")),
    ):
        with kvops.debug_checks(), kit.refuses(*parts):
            ops.lsh_bucket(**good | change)
    with kit.refuses("phase must be a torch.Tensor", kind=TypeError):
        ops.lsh_bucket(k, every(k), torch.zeros(2, 16), 1.0)
    with kit.refuses("projection requires grad"):
        ops.lsh_bucket(k, every(k), torch.zeros(2, 16, requires_grad=True), torch.zeros(2))


@kit.only("cuda", "simulator")
def test_a_gpus_indices_are_not_looked_at():
    k, _ = kit.kv(1, 1, 10, 8)
    indices = torch.tensor([[[3, 10, -2, 2**40, 4]]])
    expected = ops.lsh_bucket(k, torch.tensor([[[3, -1, -1, -1, 4]]]), *drawn(4, 8))
    assert torch.equal(ops.lsh_bucket(k, indices, *drawn(4, 8)), expected)
