"""Rows of K and V as int8 with a scale each. What operators do with them: test_window_attention.py and others."""

import pytest
import torch

import kit
import kvops

pytestmark = kit.every_device


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 40, 48), (64,), (5, 0, 16)])
def test_rounding(dtype, shape):
    """Each number moves by at most half a scale, and the largest of a row by nothing but the scale's own rounding."""
    x = (kit.randn(*shape) * torch.exp(3 * kit.randn(*shape[:-1], 1, seed=1))).to(dtype)
    rows, scales = kvops.quantize_rows(x)
    assert rows.dtype == torch.int8 and scales.dtype == torch.float32 and scales.shape == shape[:-1]
    back, exact = kvops.dequantize_rows(rows, scales, torch.float64), x.double()
    assert ((back - exact).abs() <= (0.5 + 1e-4) * scales.double().unsqueeze(-1)).all()
    largest = exact.abs().amax(-1)
    torch.testing.assert_close(back.abs().amax(-1), largest, rtol=1e-6, atol=0)
    assert (rows.abs().amax(-1) == 127).all()
    again = kvops.quantize_rows(-x)
    assert torch.equal(again[0], -rows) and torch.equal(again[1], scales)
    assert kvops.dequantize_rows(rows, scales).dtype == torch.bfloat16


def test_special_rows():
    x = kit.randn(5, 32)
    x[0], x[1, 3], x[2, 4], x[3] = 0.0, torch.nan, -torch.inf, 1e-44
    rows, scales = kvops.quantize_rows(x)
    assert (rows[0] == 0).all() and scales[0] == 0 and not kvops.dequantize_rows(rows, scales)[0].any()
    assert scales[1].isnan() and scales[2].isinf() and not kvops.dequantize_rows(rows, scales)[1:3].isfinite().any()
    assert (rows[3] == 0).all()


def test_errors():
    x, (rows, scales) = kit.randn(4, 16), kvops.quantize_rows(kit.randn(4, 16))
    with kit.refuses(r"quantize_rows: x must be \[..., d > 0\] in torch.float32, .* got torch.int8 \[4, 16\]"):
        kvops.quantize_rows(rows)
    with kit.refuses(r"quantize_rows: x must be", r"\[4, 0\]"):
        kvops.quantize_rows(x[:, :0])
    with kit.refuses("quantize_rows: x must be a torch.Tensor, got list", kind=TypeError):
        kvops.quantize_rows([1.0])
    with kit.refuses("quantize_rows: x requires grad"):
        kvops.quantize_rows(x.requires_grad_())
    for wrong in ((rows.float(), scales), (rows, scales.half()), (rows, scales[:3])):
        with kit.refuses("dequantize_rows: rows must be torch.int8"):
            kvops.dequantize_rows(*wrong)
    for dtype in (torch.int8, None, "x"):
        with kit.refuses("dequantize_rows: dtype must be a floating-point torch.dtype, got"):
            kvops.dequantize_rows(rows, scales, dtype)
