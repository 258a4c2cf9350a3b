"""Random numbers that are the same on every device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _mix(x: Any) -> Any:
    """MurmurHash3's 32-bit finalizer of int32 values: each bit of x changes about half of the result's bits.

    x: an int or a tensor. int32 tensors rely on products that wrap around, which a compiler that knows the range of the
    values may break; int64 tensors do not.
    """
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = x ^ ((x >> shift) & (2 ** (32 - shift) - 1))  # a logical shift: zeros come in, whatever the sign
        wraps = isinstance(x, Tensor) and x.dtype == torch.int32
        x = x * _signed(factor) if wraps else _signed(x * factor)
    return x


def _signed(x: Any) -> Any:
    """The low 32 bits of x as an int32."""
    return ((x & 0xFFFFFFFF) ^ 2**31) - 2**31


#: One past the largest random integer.
RANGE = 1 << 24


def random_integers(position: Tensor, seed: int, layer: int, draw: Tensor | None = None) -> Tensor:
    """Hashes (seed, layer, head, draw, position) to fp32 integers in [0, 2^24).

    Args:
        position: int32 [b, Hk, n].
        seed: At least 0.
        layer: At least 0.
        draw: int32 [b, Hk, 1], for numbers that differ from draw to draw. None: each position has one number.
    """
    key = 0
    for word in (seed, seed >> 32, layer):
        key = _mix(_signed(key + word + 0x9E3779B9))
    heads = torch.arange(position.shape[1], device=position.device)[:, None]
    keys = _mix(_signed(heads + _signed(key + 0x9E3779B9))).int()  # torch 2.11 compiles range + number in int32
    if draw is not None:
        keys = _mix(_mix(draw) ^ keys)
    mixed: Tensor = _mix(_mix(position) ^ keys)
    return (mixed & (RANGE - 1)).float()
