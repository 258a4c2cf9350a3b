"""value_norm against its reference: CriticalKV's projected value norms."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops import ops
from kvops.ops import reference

pytestmark = kit.every_device


def weights(hidden: int, heads: int, dv: int, dtype=torch.float32, seed=1):
    """Return an output projection of so many query heads."""
    return (kit.randn(hidden, heads * dv, seed=seed) * (heads * dv) ** -0.5).to(dtype)


def check(v, w_o, **options):
    norms = ops.value_norm(v, w_o, **options)
    exact = reference.value_norm(v, w_o, **options)
    kit.assert_close(norms, reference.value_norm(v, w_o, **options, dtype=torch.float32), exact)
    return norms


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("dv", kit.HEAD_DIMS)
def test_dtypes_and_head_dims(dtype, dv):
    check(kit.kv(2, 2, 131, dv, dtype)[1], weights(100, 4, dv, dtype))


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("dv", [8, 24, 328, 520, 1024])
def test_narrow_and_wide_rows(dtype, dv):
    check(kit.kv(1, 2, 40, dv, dtype)[1], weights(30, 2, dv, dtype))


@pytest.mark.parametrize("hidden", [0, 1, 15, 16, 17, 127, 128, 129, 300])
def test_widths_of_the_model(hidden):
    for dtype in (torch.float32, torch.bfloat16):
        check(kit.kv(1, 1, 90, 24, dtype)[1], weights(hidden, 3, 24, dtype))


@pytest.mark.parametrize("group_reduce", ["mean", "max", "sum"])
def test_groups(group_reduce):
    for group in (1, 2, 5):
        check(kit.kv(2, 3, 70, 16)[1], weights(50, 3 * group, 16), group_reduce=group_reduce)


@given(
    n=st.integers(0, 200),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    hidden=st.integers(1, 150),
    dtype=st.sampled_from(kit.DTYPES),
    seed=st.integers(0, 2**31),
)
@kit.examples(50)
def test_any_sizes(n, heads, group, hidden, dtype, seed):
    check(kit.kv(1, heads, n, 24, dtype, seed=seed)[1], weights(hidden, heads * group, 24, dtype, seed=seed))


@pytest.mark.parametrize("layout", kit.LAYOUTS)
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_layouts_change_nothing(layout, dtype):
    w_o = weights(60, 4, 72, dtype)
    plain = ops.value_norm(kit.kv(2, 2, 150, 72, dtype)[1], w_o)
    v = kit.kv(2, 2, 150, 72, dtype, layout)[1]
    assert torch.equal(plain, ops.value_norm(v, w_o))
    for offset, gap in ((0, 8), (1, 0), (3, 5)):  # rows of the weights at any address
        assert torch.equal(plain, ops.value_norm(v, kit.unaligned(w_o[None], offset, gap)[0]))


def test_a_batch_changes_nothing():
    v = kit.kv(3, 5, 300, 64, torch.bfloat16)[1]
    w_o = weights(90, 10, 64, torch.bfloat16)
    together = ops.value_norm(v, w_o)
    for b, h in ((0, 0), (1, 4), (2, 2)):
        own = w_o[:, 128 * h : 128 * (h + 1)]
        assert torch.equal(ops.value_norm(v[b : b + 1, h : h + 1], own), together[b : b + 1, h : h + 1])


@kit.only("cpu")
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("heads, n", [(1, 5000), (3, 2000), (9, 700)])
def test_threads_change_nothing(dtype, heads, n):
    v, w_o = kit.kv(1, heads, n, 64, dtype)[1], weights(200, 2 * heads, 64, dtype)
    kit.assert_threads_change_nothing(lambda: ops.value_norm(v, w_o))


@given(data=st.data(), n=st.integers(1, 60))
@kit.examples(30)
def test_padded_rows_score_as_if_alone(data, n):
    (v,), w_o = kit.padded(data, kit.kv(3, 2, n, 16)[1]), weights(40, 4, 16)
    v.assert_as_alone(ops.value_norm(v.x, w_o, **v.spans), [ops.value_norm(x, w_o) for x in v.alone])


@pytest.mark.parametrize("group_reduce", ["mean", "max"])
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_has_no_norm(bad, dtype, group_reduce):
    v, w_o = kit.kv(2, 2, 150, 40, dtype)[1], weights(70, 4, 40, dtype)
    w_o[3] = 0
    clean = ops.value_norm(v, w_o, group_reduce=group_reduce)
    v[0, 1, 20, 3] = bad
    v[0, 1, 149, 39] = bad
    norms = check(v, w_o, group_reduce=group_reduce)
    assert norms.isnan().sum() == 2 and norms[0, 1, [20, 149]].isnan().all()
    assert torch.equal(norms[~norms.isnan()], clean[~norms.isnan()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_values(dtype):
    """A norm beyond fp32 is infinite; one within it is found although products overflow."""
    v = torch.zeros(1, 1, 3, 16, dtype=dtype)
    v[0, 0, :2] = 3e38
    w_o = torch.full((4, 16), 0.5, dtype=dtype)
    w_o[:, 8:] = -0.5
    w_o[:, 0] += 2.0**-7  # bf16 has 8 bits
    norms = ops.value_norm(v, w_o)[0, 0]
    exact = reference.value_norm(v, w_o)[0, 0]
    torch.testing.assert_close(norms, exact.float(), rtol=1e-5, atol=0)
    assert norms[0] > 9e36 and norms[2] == 0
    assert ops.value_norm(v, w_o.abs() * 100)[0, 0, 0] == float("inf")


def test_zero_values():
    v = kit.kv(1, 2, 30, 16)[1]
    v[:, :, 5] = 0
    assert (check(v, weights(20, 2, 16))[:, :, 5] == 0).all()


def test_bad_input():
    v, w_o = kit.kv(2, 2, 10, 16)[1], weights(20, 4, 16)
    for arguments, parts in (
        (dict(v=v[0], w_o=w_o), ("value_norm", "v must be", r"\[2, 10, 16\]")),
        (dict(v=v.double(), w_o=w_o), ("v must be float32", "torch.float64")),
        (dict(v=v, w_o=w_o.half()), ("w_o must be torch.float32", "torch.float16")),
        (dict(v=v, w_o=w_o[0]), ("w_o must be", r"got \[64\]")),
        (dict(v=v, w_o=w_o[:, :40]), (r"w_o must be \[hidden, a multiple of 2 heads \* 16\]", r"got \[20, 40\]")),
        (dict(v=v, w_o=w_o.mT.contiguous().mT), ("w_o must be", "contiguous last dim")),
        (dict(v=v, w_o=w_o[:1].expand(2**31, -1)), ("w_o must have at most 1048576 rows", "got 2147483648")),
        (dict(v=v, w_o=w_o, group_reduce="none"), ("value_norm: group_reduce must be", "'none'")),
        (dict(v=v, w_o=w_o, lengths=kit.int32(1, 11)), ("starts and lengths of row 1", "length 11")),
    ):
        with kvops.debug_checks(), kit.refuses(*parts):
            ops.value_norm(**arguments)
    with kit.refuses("w_o must be a torch.Tensor", kind=TypeError):
        ops.value_norm(v, None)
    with kit.refuses("w_o requires grad"):
        ops.value_norm(v, w_o.requires_grad_())


@kit.only("cuda", "simulator")
def test_a_gpus_starts_and_lengths_are_not_looked_at():
    v, w_o = kit.kv(6, 2, 50, 16)[1], weights(20, 2, 16)
    kit.assert_spans_are_clamped(lambda **spans: ops.value_norm(v, w_o, **spans))
