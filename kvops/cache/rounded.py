"""Rows of K and V rounded to a byte per number: storage="int8" and storage="fp8".

int8: A row of d channels takes d + 16 bytes: the integers, the scale in fp32, and 12 bytes of zeros, because operators
move rows of whole 16-byte pieces. So whatever moves a row moves its scale, and a cache needs nothing else.
fp8: d bytes, torch.float8_e4m3fn without a scale, held as torch.uint8, which torch can index.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..methods.view import View
from ..ops.int8 import dequantize_rows, quantize_rows

STORED = {"int8": torch.int8, "fp8": torch.uint8}  # the dtype of packed rows, by storage
FP8 = torch.float8_e4m3fn
SCALE = 16  # bytes of an int8 row that hold its scale


def extra(storage: str | None) -> int:
    """The bytes that a packed row takes beside its numbers."""
    return SCALE if storage == "int8" else 0


def packed(x: Tensor, storage: str) -> Tensor:
    """Round rows, [..., d], to int8 [..., d + 16] or uint8 [..., d]. Rows that are packed stay as they are.

    fp8 takes numbers beyond its range as its largest, 448, and infinities as NaN.
    """
    if is_packed(x):
        return x
    if storage == "fp8":
        largest = torch.finfo(FP8).max
        rows = x.clamp(-largest, largest).masked_fill_(x.isinf(), torch.nan).to(FP8)
        return rows.contiguous().view(torch.uint8)  # x may have any strides
    rows, scales = quantize_rows(x)
    out = rows.new_zeros(*x.shape[:-1], x.shape[-1] + SCALE)
    out[..., : x.shape[-1]] = rows
    out.view(torch.float32)[..., x.shape[-1] // 4] = scales
    return out


def is_packed(x: Tensor) -> bool:
    """Whether these are packed rows; a cache that rounds stores no others of these dtypes."""
    return x.dtype in STORED.values()


def channels(x: Tensor) -> int:
    """The channels of rows, packed or not."""
    return x.shape[-1] - SCALE * (x.dtype == torch.int8)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the integers, [..., d], and the scales, fp32 [...], of packed int8 rows."""
    return x[..., :-SCALE], x.view(torch.float32)[..., -SCALE // 4]


def numbers(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that packed rows stand for, rounded to `dtype`; other rows as they are."""
    if x.dtype == torch.int8:
        return dequantize_rows(*split(x), dtype)
    return x.view(FP8).to(dtype) if is_packed(x) else x


def operand(name: str, x: Tensor) -> dict[str, Any]:
    """Return rows as the operators' argument of this name, packed int8 rows with their scales."""
    if x.dtype == torch.int8:
        rows, scales = split(x)
        return {name: rows, f"{name}_scale": scales}
    return {name: x.view(FP8) if is_packed(x) else x}


def operands(k: Tensor, v: Tensor) -> dict[str, Any]:
    """Return K and V as the arguments of `attention` and `window_attention`."""
    return operand("k", k) | operand("v", v)


def query(q: Tensor, k: Tensor) -> Tensor:
    """Return queries as the operators take them with such keys: in bf16, if the keys are packed."""
    return q.bfloat16() if is_packed(k) else q


def view_of(k: Tensor, v: Tensor, dtype: torch.dtype | None, **options: Any) -> View:
    """Return a policy's view of rows. dtype: of the numbers that packed rows stand for; None: no rows are packed."""
    if dtype is None or not is_packed(k):
        return View(k, v, **options)
    return RoundedView(k, v, dtype=dtype, **options)


class RoundedView(View):
    """A view of packed rows. What reads `k` or `v` gets a copy of the numbers, made once, when it is read."""

    def __init__(self, k: Tensor, v: Tensor, *, dtype: torch.dtype, **options: Any):
        self.dtype = dtype
        self._k: Tensor | None
        self._v: Tensor | None
        super().__init__(k, v, **options)

    def __post_init__(self) -> None:
        self.heads = self.keys.shape[1]

    @property
    def n(self) -> int:
        return self.keys.shape[2] * (1 if self.block_table is None else self.block_table.shape[1])

    @property
    def rows(self) -> int:
        return len(self.keys if self.block_table is None else self.block_table)

    def decide_by(self, k: Tensor | None, v: Tensor | None) -> None:
        """Let `k` and `v` be the numbers from before they were rounded. None: forget all numbers."""
        self._k, self._v = k, v

    @property
    def packed(self) -> tuple[Tensor, Tensor]:
        """K and V as they are stored."""
        return self._packed_k, self._packed_v

    @property
    def k(self) -> Tensor:
        if self._k is None:
            self._k = numbers(self._packed_k, self.dtype)
        return self._k

    @k.setter
    def k(self, x: Tensor) -> None:
        self._packed_k, self._k = x, None

    @property
    def v(self) -> Tensor:
        if self._v is None:
            self._v = numbers(self._packed_v, self.dtype)
        return self._v

    @v.setter
    def v(self, x: Tensor) -> None:
        self._packed_v, self._v = x, None

    @property
    def keys(self) -> Tensor:
        return self._packed_k

    @property
    def scored_keys(self) -> tuple[Tensor, dict[str, Tensor]]:
        found = operand("k", self.keys)
        return found.pop("k"), found
