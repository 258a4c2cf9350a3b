"""What the operators' tests share: inputs in every layout, the error-ratio rule, and errors by message."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = (40, 64, 80, 96, 128, 192, 256)
LAYOUTS = ("bhnd", "bnhd", "slice")


def kv(b: int, heads: int, n: int, d: int, dtype=torch.float32, layout="bhnd", *, dv=None, seed=0):
    """K [b, heads, n, d] and V [b, heads, n, dv], random with a mean and a scale per channel, in one of LAYOUTS."""
    generator = torch.Generator().manual_seed(seed)

    def one(width: int) -> Tensor:
        scale = torch.rand(width, generator=generator) * 2 + 0.1
        values = torch.randn(b, heads, n, width, generator=generator) * scale + torch.randn(width, generator=generator)
        return laid_out(values.to(dtype), layout)

    return one(d), one(dv or d)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values: contiguous, with heads behind tokens, or as a slice of a tensor wider in every dim."""
    if layout == "bhnd":
        return x.contiguous()
    if layout == "bnhd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    b, heads, n, d = x.shape
    pad = 16 // x.element_size()
    wide = torch.full((b + 1, heads + 1, n + 3, d + 2 * pad), float("nan"), dtype=x.dtype)
    inner = wide[1:, :heads, 2 : 2 + n, pad : pad + d]
    inner.copy_(x)
    return inner


def far_apart(x: Tensor) -> Tensor:
    """The same values with tokens so far apart that the last lie beyond 2^31 elements; nothing between is touched."""
    b, heads, n, d = x.shape
    step = (1 << 31) // (n - 2)
    wide = torch.empty((n - 1) * step + b * heads * d, dtype=x.dtype)
    view = wide.as_strided(x.shape, (heads * d, d, step, 1))
    view.copy_(x)
    return view


def assert_close(actual: Tensor, eager: Tensor, exact: Tensor) -> None:
    """The error-ratio rule: against fp64, at most twice the error of the plain fp32 formula, + 4 eps of the largest."""
    assert actual.dtype == torch.float32 and eager.dtype == torch.float32 and exact.dtype == torch.float64
    assert torch.equal(actual.isnan(), exact.isnan()), "NaN in other places than the reference"
    if exact.numel() == 0 or exact.isnan().all():
        return
    error, allowed = ((x.double() - exact).nan_to_num(nan=0.0).abs().max().item() for x in (actual, eager))
    bound = 2 * allowed + 4 * torch.finfo(torch.float32).eps * exact.nan_to_num(nan=0.0).abs().max().item()
    assert error <= bound, f"error {error:.3e} against fp64, at most {bound:.3e} allowed (plain formula {allowed:.3e})"


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@contextlib.contextmanager
def threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def refuses(*parts: str, kind=ValueError):
    """The block raises `kind` with a message that has all the parts."""
    pattern = "".join(f"(?=.*{part})" for part in parts)
    return pytest.raises(kind, match=f"(?s){pattern}")
