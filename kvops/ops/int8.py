"""Rows of K and V as int8 with a scale each: half the bytes of bf16."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import inference_only

#: What is rounded.
ROUNDED = torch.float32, torch.float16, torch.bfloat16
LARGEST = 127  # a row and its negative round alike, so -128 is not used


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows of K or V to int8, with a scale per row (symmetric).

    ```text
    scale = max over channels of |x| / 127       rounded = round(x / scale), half to even
    ```

    So each number is at most scale / 2 from scale * rounded, up to the rounding of the scale. `attention`,
    `ops.window_attention` and `ops.window_scores` read such rows as they are.

    Args:
        x: [..., d] with d > 0, torch.float32, float16 or bfloat16.

    Returns:
        (rows, scales): int8 [..., d] and fp32 [...]. A row with a number that is not finite has a scale that is not
        finite, and counts as such a row.

    Raises:
        TypeError: x is not a tensor.
        ValueError: x has another dtype, no channels, or requires grad outside `torch.no_grad()`.
    """
    inference_only("quantize_rows", x=x)
    if x.dtype not in ROUNDED or x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(
            "quantize_rows: x must be [..., d > 0] in torch.float32, torch.float16 or torch.bfloat16, got "
            f"{x.dtype} {list(x.shape)}"
        )
    x = x.float()
    scales = x.abs().amax(-1) / LARGEST
    rows = (x / scales.unsqueeze(-1)).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-LARGEST, LARGEST)
    return rows.to(torch.int8), scales


def dequantize_rows(rows: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the numbers that rows of `quantize_rows` stand for: scale * row, in fp32 and then rounded to `dtype`.

    Args:
        rows: int8 [..., d].
        scales: fp32 [...], one per row.
        dtype: The dtype of the result: torch.float32, float16 or bfloat16, or float64, which is exact.

    Returns:
        [..., d].

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: A dtype or a shape is wrong.
    """
    inference_only("dequantize_rows", rows=rows, scales=scales)
    if dtype not in (torch.float64, *ROUNDED):
        raise ValueError(f"dequantize_rows: dtype must be a floating-point torch.dtype, got {dtype!r}")
    fits = rows.dim() > 0 and scales.shape == rows.shape[:-1] and scales.device == rows.device
    if rows.dtype != torch.int8 or scales.dtype != torch.float32 or not fits:
        raise ValueError(
            "dequantize_rows: rows must be torch.int8 [..., d] and scales torch.float32 [...], got "
            f"{rows.dtype} {list(rows.shape)} {rows.device} and {scales.dtype} {list(scales.shape)} {scales.device}"
        )
    scales = scales.double() if dtype == torch.float64 else scales
    return (rows * scales.unsqueeze(-1)).to(dtype)
