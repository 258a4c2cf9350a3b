"""Checks of arguments. All of them name the function, the argument, what was expected and what came."""

import torch
from torch import Tensor


def check_int(op: str, name: str, value: int, low: int) -> None:
    """`value` is an int (a bool is not) of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: {name} must be an int, got {type(value).__name__} {value!r}")
    if value < low:
        raise ValueError(f"{op}: {name} must be at least {low}, got {value}")


def check_vector(
    op: str, name: str, x: Tensor | None, size: int, like: Tensor, dtype: torch.dtype = torch.int32
) -> None:
    """`x` is None, or a tensor [size] of this dtype on like's device."""
    if x is None:
        return
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype != dtype or x.shape != (size,) or x.device != like.device or x.layout != torch.strided:
        raise ValueError(
            f"{op}: {name} must be {dtype} [{size}] on {like.device}, got {x.dtype} {list(x.shape)} on {x.device}"
            + ("" if x.layout == torch.strided else f" ({x.layout})")
        )
