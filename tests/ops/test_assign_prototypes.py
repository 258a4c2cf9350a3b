"""assign_prototypes against its reference: ProtoKV Eq. 10.

The tolerance: the exact cosine of the chosen prototype is within 4e-3 of the best.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops import ops
from kvops.ops import reference

pytestmark = kit.every_device


def check(k, prototypes, **spans):
    chosen = ops.assign_prototypes(k, prototypes, **spans)
    expected = reference.assign_prototypes(k, prototypes, **spans)
    assert chosen.dtype == torch.int32 and torch.equal(chosen == -1, expected == -1)
    cosines = reference.prototype_cosines(k, prototypes)
    missed = cosines.amax(-1) - cosines.gather(-1, chosen.long().clamp(min=0).unsqueeze(-1)).squeeze(-1)
    missed = missed[chosen >= 0]
    assert not (missed > 4e-3).any() and not missed.isnan().any(), f"a cosine {missed.max():.2e} below the best"
    return chosen


def means(k, count: int):
    """Return prototypes as in ProtoKV: means of consecutive keys."""
    return reference.build_prototypes(k.float(), num_chunks=count, num_buckets=0, dtype=torch.float32)[0]


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d", kit.HEAD_DIMS)
def test_dtypes_and_head_dims(dtype, d):
    k, _ = kit.kv(1, 2, 131, d, dtype)
    check(k, means(k, 70))


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d", [8, 16, 24, 328, 520, 1024])
def test_narrow_and_wide_rows(dtype, d):
    k, _ = kit.kv(1, 2, 70, d, dtype)
    check(k, kit.randn(1, 2, 37, d))


def test_rows_of_16_bytes_of_floats():
    k, _ = kit.kv(1, 2, 70, 4)
    check(k, kit.randn(1, 2, 20, 4))
    k, _ = kit.kv(1, 2, 70, 20)
    check(k, kit.randn(1, 2, 20, 20))


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 63, 64, 65, 300, kit.size(2000, 600)])
def test_numbers_of_prototypes(count):
    for dtype in (torch.float32, torch.bfloat16):
        k, _ = kit.kv(1, 1, 90, 24, dtype)
        check(k, kit.randn(1, 1, count, 24))


@given(
    n=st.integers(0, 120),
    heads=st.integers(1, 3),
    count=st.integers(1, 90),
    dtype=st.sampled_from(kit.DTYPES),
    seed=st.integers(0, 2**31),
)
@kit.examples(60)
def test_any_sizes(n, heads, count, dtype, seed):
    k, _ = kit.kv(1, heads, n, 24, dtype, seed=seed)
    prototypes = kit.randn(1, heads, count, 24, seed=seed + 1)
    prototypes[:, :, :: 1 + seed % 7] = 0  # empty prototypes never win
    chosen = check(k, prototypes)
    assert (
        (prototypes.gather(2, chosen.long().clamp(min=0).unsqueeze(-1).expand(*k.shape)) != 0)[chosen >= 0]
        .any(-1)
        .all()
    )


@pytest.mark.parametrize("layout", kit.LAYOUTS)
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_layouts_change_nothing(layout, dtype):
    k, _ = kit.kv(2, 2, 150, 72, dtype)
    prototypes = kit.randn(2, 2, 40, 72)
    plain = ops.assign_prototypes(k, prototypes)
    assert torch.equal(plain, ops.assign_prototypes(kit.kv(2, 2, 150, 72, dtype, layout)[0], prototypes))


def test_a_batch_changes_nothing():
    k, _ = kit.kv(3, 5, 300, 64, torch.bfloat16)
    prototypes = kit.randn(3, 5, 50, 64)
    together = ops.assign_prototypes(k, prototypes)
    for b, h in ((0, 0), (1, 4), (2, 2)):
        own = (slice(b, b + 1), slice(h, h + 1))
        assert torch.equal(ops.assign_prototypes(k[own], prototypes[own].contiguous()), together[own])


@kit.only("cpu")
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("heads, n", [(1, 9000), (3, 3000), (9, 1100)])
def test_threads_change_nothing(dtype, heads, n):
    k, _ = kit.kv(1, heads, n, 64, dtype)
    prototypes = kit.randn(1, heads, 77, 64)
    kit.assert_threads_change_nothing(lambda: ops.assign_prototypes(k, prototypes))


@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_prototypes_that_are_much_alike(dtype):
    """Keys of one direction plus a random walk, with one channel larger than all others together."""
    k = kit.randn(1, 2, 1, 64) * 3 + kit.randn(1, 2, kit.size(2000, 500), 64, seed=1).cumsum(2) * 0.02
    check(k.to(dtype), means(k, 100))
    k[..., 7] += 40
    check(k.to(dtype), means(k, 100))


@given(data=st.data(), n=st.integers(1, 60))
@kit.examples(30)
def test_padded_rows_are_assigned_as_if_alone(data, n):
    (k,) = kit.padded(data, kit.kv(3, 2, n, 16)[0])
    prototypes = kit.randn(3, 2, 11, 16)
    chosen = check(k.x, prototypes, **k.spans)
    k.assert_as_alone(chosen, [ops.assign_prototypes(x, own) for x, own in zip(k.alone, prototypes.split(1))], -1)


@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_ties_go_to_the_lower_id(dtype):
    """Equal prototypes at any positions; a prototype times a power of two counts as equal."""
    k, _ = kit.kv(1, 2, 120, 32, dtype)
    some = kit.randn(1, 2, 7, 32)
    first = check(k, some)
    for copies in (2, 3, 10, 30):
        again = torch.cat([some * 2.0**i for i in range(copies)], 2)
        assert torch.equal(check(k, again), first)
        empty_between = torch.cat([torch.zeros(1, 2, 5, 32), again], 2)
        assert torch.equal(check(k, empty_between), first + 5)
        each = some.repeat_interleave(copies, 2)
        assert torch.equal(check(k, each), first * copies)


@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_prototypes_that_are_all_equal(dtype):
    k, _ = kit.kv(1, 2, 70, 32, dtype)
    assert (check(k, kit.randn(1, 2, 1, 32).expand(1, 2, 70, 32).contiguous()) == 0).all()


@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_keys_opposed_to_all_prototypes(dtype):
    """The best cosine is negative, but a zero prototype (cosine 0) still does not win."""
    k = (kit.randn(1, 2, 90, 32).abs() + 0.1).to(dtype)
    prototypes = -kit.randn(1, 2, 40, 32, seed=1).abs() - 0.1
    prototypes[:, :, ::3] = 0
    assert (check(k, prototypes) % 3 != 0).all()


@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_what_is_not_finite_stays_where_it_is(dtype):
    k, _ = kit.kv(2, 2, 90, 40, dtype)
    prototypes = kit.randn(2, 2, 30, 40)
    clean = ops.assign_prototypes(k, prototypes)
    for i, bad in enumerate((float("nan"), float("inf"), float("-inf"))):
        k[0, 1, 20 + i, 3 * i] = bad
        prototypes[1, 0, 5 + i, 3 * i] = bad
    chosen = check(k, prototypes)
    assert (chosen[0, 1, 20:23] == -1).all() and (chosen == -1).sum() == 3
    assert not set(chosen[1, 0].tolist()) & {5, 6, 7}
    assert torch.equal(chosen[0, 0], clean[0, 0]) and torch.equal(chosen[1, 1], clean[1, 1])


@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_no_prototype_that_can_win(dtype):
    k, _ = kit.kv(1, 2, 40, 16, dtype)
    prototypes = torch.zeros(1, 2, 20, 16)
    prototypes[0, 1, 3] = float("nan")
    assert (check(k, prototypes) == -1).all()


@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_zero_keys_go_to_the_first_prototype_that_can_win(dtype):
    k, _ = kit.kv(1, 2, 40, 16, dtype)
    k[:, :, 7] = 0
    k[:, :, 39] = -0.0
    prototypes = kit.randn(1, 2, 20, 16)
    prototypes[:, 1, :3] = 0
    assert check(k, prototypes)[0, :, [7, 39]].tolist() == [[0, 0], [3, 3]]


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-30, 1e25, 1e38])
def test_tiny_and_huge_keys_have_a_direction(scale):
    k = kit.randn(1, 2, 90, 32).clamp(-3, 3).double()
    prototypes = kit.randn(1, 2, 30, 32, seed=1)
    k[:, :, 20:60] *= scale  # among keys of ordinary size
    for dtype in (torch.float32, torch.bfloat16):
        check(k.to(dtype), prototypes)
    check(k.to(torch.float32), prototypes * (1e-30 if scale < 1 else 1e30))


def test_tiny_half_keys_have_a_direction():
    k = (kit.randn(1, 2, 90, 32) * 6e-7).half()  # subnormal
    check(k, kit.randn(1, 2, 30, 32, seed=1))


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-20, 1e20, 1e38])
def test_tiny_and_huge_prototypes_have_a_direction(scale):
    prototypes = kit.randn(1, 2, 60, 32).clamp(-3, 3).double()
    prototypes[:, :, ::2] *= scale
    for dtype in kit.DTYPES:
        check(kit.kv(1, 2, 90, 32, dtype)[0], prototypes.float())


def test_bad_input():
    k, _ = kit.kv(2, 2, 10, 16)
    prototypes = kit.randn(2, 2, 5, 16)
    for arguments, parts in (
        (dict(k=k[0], prototypes=prototypes), ("assign_prototypes", "k must be", r"\[2, 10, 16\]")),
        (dict(k=k.double(), prototypes=prototypes), ("k must be float32", "torch.float64")),
        (dict(k=k, prototypes=prototypes.half()), ("prototypes must be torch.float32", "torch.float16")),
        (dict(k=k, prototypes=prototypes[:1]), ("prototypes must be a contiguous", r"got \[1, 2, 5, 16\]")),
        (dict(k=k, prototypes=prototypes[..., :8]), ("prototypes must be a contiguous", r"got \[2, 2, 5, 8\]")),
        (dict(k=k, prototypes=prototypes[:, :, :0]), ("at least 1", r"got \[2, 2, 0, 16\]")),
        (dict(k=k, prototypes=prototypes, lengths=kit.int32(1, 11)), ("starts and lengths of row 1", "length 11")),
    ):
        with kvops.debug_checks(), kit.refuses(*parts):
            ops.assign_prototypes(**arguments)
    with kit.refuses("prototypes must be a torch.Tensor", kind=TypeError):
        ops.assign_prototypes(k, None)
    with kit.refuses("prototypes requires grad"):
        ops.assign_prototypes(k, prototypes.requires_grad_())


@kit.only("cuda", "simulator")
def test_a_gpus_starts_and_lengths_are_not_looked_at():
    k, _ = kit.kv(6, 2, 50, 16)
    prototypes = kit.randn(6, 2, 9, 16)
    kit.assert_spans_are_clamped(lambda **spans: ops.assign_prototypes(k, prototypes, **spans))
