"""The weights that a module applies: its own tensor, if that explains its products, or else those of unit vectors.

Unit vectors read quantized, packed and adapted weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard

import torch
from torch import Tensor
from torch.nn.functional import linear

TOLERANCE = 0.05  # of the norm of a product: quantizing activations to 8 bits changes it by 1 to 3 %
_CHUNK = 1 << 22  # elements of the unit vectors, or of their products, that are in memory at a time
_BIASED = 64.0  # the length of the vectors where there is a bias, which would drown small weights


def is_float(x: object) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.is_floating_point() and x.itemsize > 1


def same(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and x.device == y.device and torch.equal(x, y)


def random_vectors(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a few random vectors, [1, 4, width], the same in each call. Their products show which weights apply."""
    numbers = torch.Generator("cpu").manual_seed(0)
    return torch.randn(1, 4, width, generator=numbers, device="cpu", dtype=torch.float32).to(device, dtype)


def stored_weights(weight: object, bias: Tensor | None, x: Tensor, y: Tensor) -> Tensor | None:
    """Return a module's `weight`, [outputs, width], if it explains the products y of x bit for bit, or else None."""
    if not is_float(weight) or type(weight.detach()) is not Tensor or weight.dim() != 2 or weight.device != x.device:
        return None
    for w in (weight.detach(), weight.detach().mT):
        if w.shape != (y.shape[-1], x.shape[-1]):
            continue
        # with tensor parallelism, the bias is added afterwards
        if same(linear(x, w, bias), y) or (bias is not None and same(linear(x, w) + bias, y)):
            return w.contiguous()
    return None


def linear_weights(products: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Return the weights of a linear function, [outputs, width].

    Args:
        products: The function, of vectors [1, any, width]: [1, any, outputs].
        x: Random vectors, [1, any, width].
        y: Their products, [1, any, outputs].

    Raises:
        ValueError: The function is not linear: the products of x differ from those with the weights by more than 5 % of
            their norm.
    """
    width, wide = x.shape[-1], torch.promote_types(y.dtype, torch.float32)
    zero = products(torch.zeros_like(x[:, :1]))[0].to(wide)  # the bias
    size = _BIASED if zero.any() else 1.0
    weights = torch.empty(y.shape[-1], width, dtype=y.dtype, device=y.device)
    rows = max(1, _CHUNK // max(weights.shape))
    for first in range(0, width, rows):
        unit = torch.zeros(1, min(rows, width - first), width, dtype=x.dtype, device=x.device)
        unit[0].diagonal(first).fill_(size)
        weights[:, first : first + unit.shape[1]] = ((products(unit)[0].to(wide) - zero) / size).mT
    there = y[0].to(wide) - zero
    error = (linear(x[0].to(y.dtype), weights).to(wide) - there).norm(dim=-1) / there.norm(dim=-1).clamp(min=1e-30)
    if not (error <= TOLERANCE).all():  # NaN is not
        raise ValueError(
            f"its products with random vectors differ from those with its weights by {float(error.max()):.1%} of their "
            f"norm, expected at most {TOLERANCE:.0%}"
        )
    return weights
