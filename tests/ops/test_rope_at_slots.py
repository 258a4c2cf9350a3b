"""rope_at_slots against its reference: correct to one rounding, in both pair layouts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
from kit import same
from kvops import ops
from kvops.ops import reference
from kvops.ops.rope import Rope
from test_ladder_gather import pair_size

pytestmark = kit.every_device


def keys(b, heads, n, d, dtype=torch.float32, layout="bhnd"):
    return kit.kv(b, heads, n, d, dtype, layout)[0]


def tables(n: int, pairs: int, rows: int | None = None):
    """Return cosine and sine tables, with different positions per batch row if rows are given."""
    positions = torch.arange(n) + (0 if rows is None else 1000 * torch.arange(rows).unsqueeze(1))
    return Rope.of(2 * pairs).tables(positions)


def check(result, k, cos, sin, interleaved=False):
    """Check that rotated channels are correct to one rounding and the others are unchanged."""
    pairs = cos.shape[-1]
    exact = reference.rope_at_slots(k, cos, sin, interleaved=interleaved)
    assert result.dtype == k.dtype and same((result[..., 2 * pairs :],), (k[..., 2 * pairs :],))
    kit.assert_rounded_once(result, exact, pair_size(k, pairs, interleaved))


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("d", kit.HEAD_DIMS)
def test_dtypes_and_head_dims(dtype, interleaved, d):
    k = keys(2, 3, 30, d, dtype)
    for rows in (None, 2):
        cos, sin = tables(30, d // 2, rows)
        result = ops.rope_at_slots(k, cos, sin, interleaved=interleaved)
        assert result.is_contiguous()
        check(result, k, cos, sin, interleaved)


@pytest.mark.parametrize("layout", kit.LAYOUTS)
@pytest.mark.parametrize("out_layout", kit.LAYOUTS)
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_layouts_and_out(layout, out_layout, dtype):
    k, (cos, sin) = keys(2, 3, 30, 48, dtype, layout), tables(30, 16, 2)
    out = kit.laid_out(torch.full_like(k, 7.0), out_layout)
    version = out._version
    assert ops.rope_at_slots(k, cos, sin, out=out) is out and out._version > version
    check(out, k, cos, sin)
    assert same((ops.rope_at_slots(k, cos, sin),), (out,))
    ops.rope_at_slots(k, cos, sin, out=k)
    assert same((k,), (out,))


@given(
    d=st.sampled_from((8, 16, 24, 64, 136)),
    pairs=st.integers(1, 68),
    n=st.integers(0, 20),
    heads=st.integers(1, 3),
    dtype=st.sampled_from(kit.DTYPES),
    interleaved=st.booleans(),
    in_place=st.booleans(),
)
@kit.examples(60)
def test_any_shape(d, pairs, n, heads, dtype, interleaved, in_place):
    """The rotated halves fill whole registers, or have any other number of channels."""
    k, (cos, sin) = keys(2, heads, n, d, dtype), tables(n, min(pairs, d // 2))
    before = k.clone()
    result = ops.rope_at_slots(k, cos, sin, interleaved=interleaved, out=k if in_place else None)
    check(result, before, cos, sin, interleaved)


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_tables_of_any_strides_and_values(dtype, interleaved):
    """Tables need not be rotations: RoPE scaling, or the inverse of rounded cosines. Rows may share a table."""
    k = keys(2, 2, 20, 32, dtype)
    wide = kit.randn(20, 40, seed=3)
    cos, sin = wide[:, 3:14], wide.flip(0)[:, 20:31]
    check(ops.rope_at_slots(k, cos, sin, interleaved=interleaved), k, 1.5 * cos / 1.5, sin, interleaved)
    one, zero = torch.ones(20, 11), torch.zeros(20, 11)
    assert same((ops.rope_at_slots(k, one, zero, interleaved=interleaved),), (k,))
    expanded = [x.expand(2, -1, -1) for x in (cos, sin)]
    by_row = ops.rope_at_slots(k, *expanded, interleaved=interleaved)
    assert same((by_row,), (ops.rope_at_slots(k, cos, sin, interleaved=interleaved),))
    k = keys(2, 2, 1, 32, dtype)
    check(ops.rope_at_slots(k, cos[:1], sin[:1], interleaved=interleaved), k, cos[:1], sin[:1], interleaved)


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d", [1024, 2048])
def test_wide_rows(dtype, d):
    k, (cos, sin) = keys(1, 2, 5, d, dtype), tables(5, d // 2)
    for interleaved in (False, True):
        check(ops.rope_at_slots(k, cos, sin, interleaved=interleaved), k, cos, sin, interleaved)


@kit.only("cpu", "simulator")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_every_16_bit_number(dtype, interleaved):
    """Multiplied by one and by slightly different factors: rounded to nearest, ties to even, as in torch."""
    k = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(1, 1, -1, 64)
    for factor in (1.0, 1 + 2**-9, 1 + 2**-12, 0.75, 2**-5, 1 - 2**-24):
        cos, sin = torch.full((1024, 32), factor), torch.zeros(1024, 32)
        result = ops.rope_at_slots(k, cos, sin, interleaved=interleaved)
        # the pair's other number times zero is zero or NaN
        first, second = (k.unflatten(-1, (32, 2)).unbind(-1)) if interleaved else k.unflatten(-1, (2, 32)).unbind(-2)
        first, second = first.float(), second.float()
        turned = first * factor - second * 0.0, second * factor + first * 0.0
        expected = torch.stack(turned, -1 if interleaved else -2).flatten(-2).to(dtype)
        assert torch.equal(result.isnan(), expected.isnan())
        assert torch.equal(result.nan_to_num(0), expected.nan_to_num(0)), factor


@kit.only("cuda", "simulator")
def test_many_heads():
    """More heads than a CUDA grid can have blocks in y."""
    k, (cos, sin) = keys(7, 10_000, 2, 8, torch.float16), tables(2, 4)
    check(ops.rope_at_slots(k, cos, sin), k, cos, sin)


@kit.only("cpu", "cuda")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_large_outputs_are_streamed(dtype, interleaved):
    """Outputs of more than 16 MiB use streaming stores; no result depends on the number of threads."""
    k, (cos, sin) = keys(1, 8, 10_000, 128, dtype), tables(10_000, 64)
    results = []
    for count in (1, 2, 5):
        with kit.threads(count):
            results.append(ops.rope_at_slots(k, cos, sin, interleaved=interleaved))
            y = k.clone()
            results.append(ops.rope_at_slots(y, cos, sin, interleaved=interleaved, out=y))
    check(results[0], k, cos, sin, interleaved)
    assert all(same((x,), (results[0],)) for x in results)


@pytest.mark.parametrize("b,heads,n", [(0, 2, 5), (1, 0, 5), (1, 2, 0)])
def test_empty(b, heads, n):
    k = keys(b, heads, n, 16)
    assert ops.rope_at_slots(k, *tables(n, 8)).shape == k.shape
    assert ops.rope_at_slots(k, *tables(n, 8, b)).shape == k.shape


def test_bad_input_changes_nothing():
    k, (cos, sin) = keys(2, 2, 20, 16), tables(20, 8)
    out = torch.full_like(k, 7.0)
    buffer = torch.zeros(2, 2, 30, 16)
    wide = torch.zeros(20, 16)
    for arguments, target, parts in (
        ((k[0], cos, sin), None, (r"k must be", r"\[2, 20, 16\]")),
        ((k.double(), cos, sin), None, ("k must be float32, float16 or bfloat16", "torch.float64")),
        ((k, cos.half(), sin), None, ("cos must be torch.float32, got torch.float16",)),
        ((k, cos, sin.double()), None, ("sin must be torch.float32, got torch.float64",)),
        ((k, cos[:19], sin), None, (r"cos must be float32 \[20, pairs\] or \[2, 20, pairs\]", r"got \[19, 8\]")),
        ((k, cos, sin[0]), None, ("sin must be", r"got \[8\]")),
        ((k, cos.expand(3, -1, -1), sin), None, ("cos must be", r"got \[3, 20, 8\]")),
        ((k, *tables(20, 9)), None, ("2 \\* pairs at most the head_dim 16", r"got \[20, 9\]")),
        ((k, cos[:, :0], sin[:, :0]), None, ("cos must be", r"got \[20, 0\]")),
        ((k, cos, sin[:, :4]), None, (r"sin must have the shape of cos \[20, 8\], got \[20, 4\]",)),
        ((k, wide[:, ::2], sin), None, ("cos must have a contiguous last dim, got stride 2",)),
        ((k, cos, sin), out.half(), ("out must have k's dtype torch.float32, got torch.float16",)),
        ((k, cos, sin), out[:, :, :19], (r"out must be \[2, 2, 20, 16\], got \[2, 2, 19, 16\]",)),
        ((k, cos, sin), out[:, :1].expand(-1, 2, -1, -1), ("out is written", "overlap itself")),
        ((buffer[:, :, :20], cos, sin), buffer[:, :, 5:25], ("out is written", "no memory with k")),
        ((k, buffer[0, 0, :20, :8], sin), buffer[:, :, :20], ("out is written", "no memory with cos")),
        ((k, cos, buffer[1, 1, :20, 4:12]), buffer[:, :, :20], ("out is written", "no memory with sin")),
    ):
        before = [x.clone() for x in (k, cos, sin, out, buffer)]
        with kit.refuses("rope_at_slots", *parts):
            ops.rope_at_slots(*arguments, out=target)
        assert all(map(torch.equal, (k, cos, sin, out, buffer), before))
    same_row = k[:1, :1, :1].expand(2, 2, 20, -1)
    check(ops.rope_at_slots(same_row, cos, sin), same_row, cos, sin)  # an input may overlap itself
    with kit.refuses("overlap itself"):
        ops.rope_at_slots(same_row, cos, sin, out=same_row)
    with kit.refuses("cos must be a torch.Tensor", kind=TypeError):
        ops.rope_at_slots(k, [1.0], sin)
    with kit.refuses("out requires grad"):
        ops.rope_at_slots(k, cos, sin, out=out.requires_grad_())


@kit.only("cpu", "simulator")
def test_lazy_clones_are_read_without_a_copy():
    """A copy-on-write clone shares its memory until it is written to; reading must not trigger the copy."""
    lazy = [torch._lazy_clone(x) for x in (keys(1, 2, 20, 16), *tables(20, 8))]
    ops.rope_at_slots(*lazy)
    assert all(torch._C._is_cow_tensor(x) for x in lazy)
