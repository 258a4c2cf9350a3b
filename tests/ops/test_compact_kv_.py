"""compact_kv_: equal to gather_kv, but in place, with no other memory touched."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kit import same
from kvops import ops
from kvops.ops import reference
from test_gather_kv import moved, random_indices

pytestmark = kit.every_device


def check(k, v, indices):
    """Check that in place equals out of place, in views of the same storage, and later slots are unchanged."""
    kit.assert_in_place(lambda: ops.compact_kv_(k, v, indices), k, v, moved(k, v, indices))


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d", kit.HEAD_DIMS)
def test_dtypes_and_head_dims(dtype, d):
    check(*kit.kv(2, 3, 90, d, dtype, dv=64), random_indices(2, 3, 90, 33, missing=2))


@pytest.mark.parametrize("layout", kit.LAYOUTS)
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_layouts(layout, dtype):
    k, v = kit.kv(2, 3, 90, 48, dtype, layout, dv=80)
    check(k, v, random_indices(2, 3, 90, 60))


@pytest.mark.parametrize("dtype", kit.BYTES)
def test_rows_of_bytes(dtype):
    k, v = kit.kv(2, 3, 90, 48, dtype, dv=80)
    check(k, v, random_indices(2, 3, 90, 60))
    odd = kit.kv(2, 3, 90, 49, dtype)[0]
    for wrong in (odd[..., :48], kit.kv(2, 3, 90, 64, dtype)[0][..., 1:49]):
        with kit.refuses("compact_kv_: k must begin at an even address and have even strides"):
            ops.compact_kv_(wrong, v[..., :48], random_indices(2, 3, 90, 60))


@given(n=st.integers(0, 60), data=st.data(), heads=st.integers(1, 3), count=st.integers(1, 5))
@kit.examples(60)
def test_any_selection(n, data, heads, count):
    m = data.draw(st.integers(0, n))
    with kit.threads(count):
        check(*kit.kv(2, heads, n, 16), random_indices(2, heads, n, m, data.draw(st.integers(0, m))))


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d, dv", [(8, 1024), (16, 24), (520, 8), (2048, 72)])
def test_narrow_and_wide_rows(dtype, d, dv):
    check(*kit.kv(1, 2, 50, d, dtype, dv=dv), random_indices(1, 2, 50, 21, missing=1))


@kit.only("cuda", "simulator")
def test_many_heads():
    """More heads than a CUDA grid can have blocks in y."""
    k, v = kit.kv(7, 10_000, 3, 8, torch.float16)
    check(k, v, random_indices(*k.shape[:3], 2))


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("heads", [1, 8])
def test_repeatable(d, heads):
    """Results would differ between runs if a row were overwritten before it is read."""
    k, v = kit.kv(1, heads, kit.size(3_000, 700), d, torch.bfloat16)
    n = k.shape[2]
    indices = random_indices(1, heads, n, n - 3)
    kit.assert_repeatable(lambda: ops.compact_kv_(k.clone(), v.clone(), indices))


@pytest.mark.parametrize("shift", [1, 5, 300])
def test_all_rows_move_a_little(shift):
    """Each row moves a short distance, so chunks depend on one another; there are three chunks, or over forty."""
    for n, d in ((700, 64), (2700, 256)):
        k, v = kit.kv(1, 2, n, d, torch.bfloat16)
        check(k, v, torch.arange(shift, n).expand(1, 2, -1))


@kit.only("cpu", "cuda")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", kit.LAYOUTS)
@pytest.mark.parametrize("heads", [1, 2])
def test_large_moves_are_streamed_and_split_by_column(dtype, layout, heads):
    """Sources more than 4 MiB ahead use streaming stores; the threads split one head by columns."""
    for count in (1, 2, 5):
        with kit.threads(count):
            check(*kit.kv(1, heads, 40_000, 128, dtype, layout), random_indices(1, heads, 40_000, 9_000))


@pytest.mark.parametrize("count", [1, 2, 9])
def test_lists_of_layers(count):
    """Each layer has its own address, layout and number of kept slots."""
    inputs = [kit.kv(2, 2, 40, 16, torch.bfloat16, kit.LAYOUTS[i % 3], dv=24, seed=i) for i in range(count)]
    keys, values = (list(x) for x in zip(*inputs))
    indices = [random_indices(2, 2, 40, 5 * i % 23) for i in range(count)]
    before = [(k.clone(), v.clone()) for k, v in inputs]
    expected = reference.compact_kv_(keys, values, indices)
    k_out, v_out = ops.compact_kv_(keys, values, indices)
    assert len(k_out) == len(v_out) == count and all(map(same, (k_out, v_out), expected))
    for k, v, kept, kv, old in zip(k_out, v_out, indices, inputs, before):
        m = kept.shape[2]
        assert k.shape[2] == v.shape[2] == m and same((k, v), ops.gather_kv(*old, kept))
        assert same([x[:, :, m:] for x in kv], [x[:, :, m:] for x in old])


def test_more_layers_than_a_launch_takes():
    """On a GPU, layers with the same layout share a launch, up to a maximum number of layers."""
    stack, indices = kit.randn(100, 2, 1, 1, 20, 8), [random_indices(1, 1, 20, 7, seed=i) for i in range(100)]
    keys, values = (list(x) for x in stack.unbind(1))
    expected = [ops.gather_kv(k, v, kept) for k, v, kept in zip(keys, values, indices)]
    assert all(map(same, zip(*ops.compact_kv_(keys, values, indices)), expected))


def test_a_bad_layer_changes_no_layer():
    k, v = kit.kv(2, 2, 20, 16)
    good = random_indices(2, 2, 20, 5)
    for arguments, parts in (
        (([k, k + 0], [v], [good, good]), ("k and v must have one tensor per layer, got 2 and 1",)),
        (([k, k + 0], [v, v + 0], [good]), ("k and indices must have one tensor per layer, got 2 and 1",)),
        (([], [], []), ("at least one layer",)),
        (([k, k + 0], [v, v + 0], [good, good - 1 + 20]), (r"indices must lie in \[-1, 20\)",)),
        (([k, k[:, :, :10]], [v, v[:, :, :10]], [good, good]), ("all layers must have one shape", "in layer 1")),
        (([k, k.double().half()], [v, v.half()], [good, good]), ("all layers must have one dtype", "in layer 1")),
        (([k, k], [v, v + 0], [good, good]), (r"k\[0\] is written", r"no memory with k\[1\]")),
    ):
        before = k.clone(), v.clone()
        with kvops.debug_checks(), kit.refuses("compact_kv_", *parts):
            ops.compact_kv_(*arguments)
        assert same((k, v), before)


@pytest.mark.parametrize("b,heads,n,m", [(0, 2, 5, 2), (1, 0, 5, 2), (1, 2, 5, 0), (1, 2, 0, 0)])
def test_empty(b, heads, n, m):
    k, v = kit.kv(b, heads, n, 16)
    before = k.clone(), v.clone()
    assert ops.compact_kv_(k, v, torch.zeros(b, heads, m, dtype=torch.int64))[0].shape == (b, heads, m, 16)
    assert same((k, v), before)


def test_k_and_v_may_be_slices_of_one_buffer():
    for both in (kit.randn(3, 2, 4, 50, 16).unbind(1), kit.randn(2, 4, 50, 40).split((16, 24), -1)):
        k, v = both
        b, heads, n, _ = k.shape
        check(k, v, random_indices(b, heads, n, 20))


def test_bad_input_changes_nothing():
    k, v = kit.kv(2, 2, 20, 16)
    good = random_indices(2, 2, 20, 5)

    def with_last_row(*values):
        bad = good.clone()
        bad[1, 1] = torch.tensor(values)
        return bad

    for arguments, parts in (
        (
            (k, v, with_last_row(0, 1, 2, 3, 20)),
            (r"indices must lie in \[-1, 20\)", "got 20", "row 1, head 1, entry 4"),
        ),
        ((k, v, with_last_row(0, 1, 2, 3, -2)), ("indices must lie", "got -2")),
        ((k, v, with_last_row(0, 1, 3, 2, 4)), ("indices must be strictly ascending", "got 2 after 3")),
        ((k, v, with_last_row(0, 1, 1, 2, 4)), ("indices must be strictly ascending", "got 1 after 1")),
        ((k, v, with_last_row(0, -1, 2, 3, 4)), ("-1 only at the end", "got -1 after 0", "entry 1")),
        ((k, v, good.int()), ("indices must be torch.int64",)),
        ((k, v, random_indices(2, 2, 30, 25)), ("at most the cache's 20 slots", "got 25")),
        ((k, v[:, :, :10], good), ("v must have k's batch",)),
        ((k, k, good), ("k is written", "no memory with v")),
        ((k, k.flip(0).flip(0)[:, :, :, :], good.clone().fill_(99)), ("indices must lie",)),
        ((k[:1].expand(2, -1, -1, -1), v, good), ("k is written", "overlap itself")),
        ((k, v[:, :, :1].expand(-1, -1, 20, -1), good), ("v is written", "overlap itself")),
    ):
        before = k.clone(), v.clone()
        with kvops.debug_checks(), kit.refuses("compact_kv_", *parts):
            ops.compact_kv_(*arguments)
        assert same((k, v), before)
    buffer = torch.randn(2, 2, 25, 16)
    with kit.refuses("no memory with v"):
        ops.compact_kv_(buffer[:, :, :20], buffer[:, :, 5:], good)
    with kit.refuses("k requires grad"):
        ops.compact_kv_(k.clone().requires_grad_(), v, good)


@kit.only("cuda", "simulator")
def test_a_gpus_indices_are_not_looked_at():
    """The kernel skips entries that are out of range or out of order: their slots stay unchanged."""
    k, v = kit.kv(1, 2, 20, 16)
    good = torch.tensor([2, 3, 7, 8, 11, 19]).expand(1, 2, -1)
    for entry, value in ((2, 20), (2, 2**62), (2, -2), (2, 3), (2, 1), (5, 8), (4, -(2**63)), (3, 0)):
        bad = good.clone()
        bad[0, 1, entry] = value
        entries = bad[0, 1].tolist()
        skipped = [i for i, x in enumerate(entries) if not i <= x < 20 or (i and x <= entries[i - 1])]
        expected = moved(k, v, good)
        for x, y in zip(expected, (k, v)):
            x[0, 1, skipped] = y[0, 1, skipped]
        assert same(ops.compact_kv_(k.clone(), v.clone(), bad), expected)
