"""Fixed shares of a budget: how many tokens each head of each layer keeps, whatever the prompt.

Head-level methods such as HeadKV (Fu et al., 2024) and DuoAttention (Xiao et al., 2024) measure once which heads look
far back, and give these more of the cache. Their profile is a table of shares, [layers, Hk]: `kvops.hf.head_shares`
measures one, and a file keeps it.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import torch
from torch import Tensor

from .stored import from_file, to_file
from .view import View

#: Floating point [layers, Hk], or the path of a file that `save_shares` wrote.
Shares = Tensor | str | Path

_NAME = "shares"  # of the tensor in a file


def check_shares(op: str, shares: Shares, head_mode: str) -> None:
    """Check the setting `shares`; of a path only that it is one."""
    if not isinstance(shares, (Tensor, str, Path)):
        raise TypeError(f"{op}: shares must be a torch.Tensor or the path of a file, got {type(shares).__name__}")
    if head_mode != "adaptive":
        raise ValueError(f"{op}: shares need head_mode='adaptive', got {head_mode!r}")
    if isinstance(shares, Tensor):
        _check_values(op, shares)


def _check_values(op: str, shares: Tensor) -> None:
    if shares.dim() != 2 or not shares.is_floating_point() or not shares.numel():
        raise ValueError(
            f"{op}: shares must be floating point [layers, Hk], got {shares.dtype} of shape {list(shares.shape)}"
        )
    values = shares.float()  # what a file holds
    if not (values.isfinite().all() and (values >= 0).all() and values.any()):
        raise ValueError(
            f"{op}: shares must be finite, at least 0, and not all 0, got values from {values.min()} to {values.max()}"
        )


def check_no_shares(op: str, shares: Shares | None, who: str) -> None:
    """Raise ValueError for shares, which `who` does not support."""
    if shares is not None:
        raise ValueError(f"{op}: {who} does not support shares of heads, expected shares=None, got {shares!r}")


def fixed_budgets(op: str, shares: Shares, view: View, budget: int, least: int) -> list[list[int]]:
    """The tokens of each head of the view's layer, of each row.

    Every head keeps `least`, and 1 at least. The rest of the budget is divided among the heads of the model in
    proportion to their shares, up to all tokens of the row, and rounded to the nearest.
    """
    table, (layer, num_layers) = _table(op, shares), view.layer_and_count(op)
    if tuple(table.shape) != (num_layers, view.heads):
        raise ValueError(
            f"{op}: shares must be [layers that evict, Hk], expected [{num_layers}, {view.heads}], got "
            f"{list(table.shape)}"
        )
    values = tuple(table.detach().float().flatten().tolist())  # fp32, as in a file
    total, own = max(0, budget - least) * len(values), slice(layer * view.heads, (layer + 1) * view.heads)
    rows = view.row_tokens()
    each = {seen: _divided(values, total, max(0, seen - least))[own] for seen in set(rows)}
    return [[max(1, least + round(x)) for x in each[seen]] for seen in rows]


@functools.lru_cache(16)
def _divided(shares: tuple[float, ...], total: int, most: int) -> list[float]:
    """Divide a total in proportion to shares; what is over `most` of one goes to the others.

    The layers of a step ask for the same, so the last results are remembered.
    """
    ordered = sorted(shares)
    sums = list(itertools.accumulate(ordered))
    free = len(ordered)  # how many of the smallest shares get less than `most`
    while free and ordered[free - 1] * total > most * sums[free - 1]:
        free, total = free - 1, total - most
    weight, limit = (sums[free - 1], ordered[free - 1]) if free else (0.0, -1.0)
    return [most if x > limit else x * total / weight if x else 0.0 for x in shares]


def check_layers_of_shares(op: str, shares: Shares, num_layers: int) -> None:
    """Raise for a file that cannot be read, or shares of another number of layers, before a cache holds tokens."""
    if (got := len(_table(op, shares))) != num_layers:
        raise ValueError(f"{op}: shares must be of the {num_layers} layers that evict, got those of {got}")


def _table(op: str, shares: Shares) -> Tensor:
    return shares if isinstance(shares, Tensor) else from_file(op, "shares", shares, _load)


def save_shares(shares: Tensor, path: str | Path) -> None:
    """Write fixed shares to a safetensors file, which `shares="path"` of a policy reads.

    Args:
        shares: Floating point [layers, Hk], finite and at least 0.
        path: The file, which is replaced if it exists.

    Raises:
        TypeError: `shares` is not a tensor, or the path is not one.
        ValueError: `shares` has another shape, dtype or values.
        FileNotFoundError: There is no such folder.
    """
    if not isinstance(shares, Tensor):
        raise TypeError(f"save_shares: shares must be a torch.Tensor, got {type(shares).__name__}")
    _check_values("save_shares", shares)
    to_file("save_shares", path, {_NAME: shares.detach().to("cpu", torch.float32, copy=True).contiguous()})


def _load(path: str) -> Tensor:
    """The shares in a file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    expected = "expected a file that save_shares wrote, got one"
    try:
        found = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{expected} that is not safetensors: {error}") from error
    if set(found) != {_NAME}:
        raise ValueError(f"{expected} with the tensors {sorted(found)}")
    _check_values("save_shares", found[_NAME])
    return found[_NAME]
