"""Selection: from scores to the slots to keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops import select_topk
from ..ops.checks import check_holds, check_rows_hold, check_vector
from .budgets import Budget, fraction_of, row_budgets, valid_slots
from .view import View


def readable_keys(op: str, k: Tensor) -> Tensor:
    """Returns k for arithmetic in torch, as the operators read it: fp8 as bf16. Other unsupported dtypes raise."""
    if k.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return k.bfloat16()
    if k.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"{op}: k must be torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn or torch.float8_e5m2, "
            f"got {k.dtype}"
        )
    return k


def gather_rows(x: Tensor, slots: Tensor) -> Tensor:
    """The rows of x, [b, Hk, n, d], at `slots`, int64 [b, Hk or 1, m]; also of fp8, which torch cannot gather."""
    index = slots.unsqueeze(-1).expand(*x.shape[:2], -1, x.shape[3])
    if x.element_size() == 1:
        return x.view(torch.uint8).gather(2, index).view(x.dtype)
    return x.gather(2, index)


def dense_rows(x: Tensor, block_table: Tensor) -> Tensor:
    """Copies the rows of pages: [b, Hk, max_pages * page_size, d]. Rows of page -1 are arbitrary."""
    return x[block_table.clamp(min=0)].transpose(1, 2).flatten(2, 3)


def negative_norms(op: str, k: Tensor) -> Tensor:
    """Minus each key's L2 norm, fp32 [b, Hk, n]."""
    return torch.linalg.vector_norm(readable_keys(op, k), dim=-1, dtype=torch.float32).neg_()


def shared_scores(scores: Tensor) -> Tensor:
    """The mean over the heads with a finite score; NaN if there is none. [b, Hk, ...] -> [b, 1, ...].

    The heads are added one by one. The order of the sum then does not depend on n, so chunks score like the whole, and
    no temporary is larger than one head.
    """
    if scores.shape[1] == 0:
        return scores.new_full((scores.shape[0], 1, *scores.shape[2:]), torch.nan)
    first, *others = scores.unbind(1)
    count = first.isfinite()
    total = torch.where(count, first, 0.0)
    count = count.to(total.dtype)
    for head in others:
        finite = head.isfinite()
        total += torch.where(finite, head, 0.0)
        count += finite
    return (total / count).unsqueeze(1)


def places(*keys: Tensor) -> Tensor:
    """The rank of each entry along the last dim, 0 the highest: by the first key, then the next, then by index."""
    slots = order = torch.arange(keys[0].shape[-1], device=keys[0].device).expand_as(keys[0])
    for key in reversed(keys):
        order = order.gather(-1, key.gather(-1, order).sort(dim=-1, descending=True, stable=True).indices)
    return torch.empty_like(order).scatter_(-1, order, slots)


def select_budget(
    op: str,
    scores: Tensor,
    heads: int,
    budget: Budget,
    sinks: int = 0,
    recent: int | float = 0,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    fill_invalid: bool = False,
    share: Callable[[Any, Any], Any] | None = None,
) -> Tensor:
    """Selects the slots with the highest scores within a budget, always with the first `sinks` and newest `recent`.

    scores: fp32 [b, Hk, n], or [b, 1, n] for all heads alike. Fractions are of a row's valid slots. share(budget,
    valid): this layer's part of a row's budget. Returns int64 [b, heads, m] with m = min(tokens of the budget, n); with
    a budget per head m is the largest, and heads that keep fewer end in -1.
    """
    n = scores.shape[2]
    padded = not (starts is None and lengths is None)
    if padded:
        check_vector(op, "starts", starts, len(scores), scores)
        check_vector(op, "lengths", lengths, len(scores), scores)
    keep, budgets = row_budgets(op, budget, scores.shape[:2], n, starts, lengths)
    window = fraction_of(recent, keep) if isinstance(recent, float) else recent
    check_holds(op, keep, sinks, window)
    valid: Any = valid_slots(n, starts, lengths).unsqueeze(1) if padded else n  # int32 [b, 1], or an int
    if share is not None:
        assert not isinstance(budget, Tensor)  # policies with `share` refuse it
        keep = max(share(keep, n), keep if padded else 0)  # an upper bound for rows of any length
        if padded and budgets is None:
            budgets = torch.full_like(valid, min(budget, 1 << 29))  # more than any row has; `share` doubles them
    if budgets is not None:
        newest = fraction_of(recent, budgets) if isinstance(recent, float) else torch.full_like(budgets, window)
        check_rows_hold(op, budgets, sinks, newest)
        if isinstance(recent, float):
            # The operator has one window for all rows, so the newest slots of each row get the highest score instead.
            window = 0
            end = valid if starts is None else starts.unsqueeze(1) + valid
            slots = torch.arange(n, device=scores.device)
            scores = scores.masked_fill(slots >= (end - newest).unsqueeze(-1), torch.inf)
        if share is not None:
            budgets = share(budgets, valid).int()
        budgets = budgets.expand(scores.shape[:2]).contiguous()
    indices = select_topk(
        scores,
        k=keep,
        sinks=sinks,
        window=window,
        starts=starts,
        lengths=lengths,
        budgets=budgets,
        fill_invalid=fill_invalid,
    )
    return indices if indices.shape[1] == heads else indices.expand(-1, heads, -1)


def all_slots(view: View) -> Tensor:
    """The indices that keep every valid slot: int64 [b, Hk, n]."""
    scores = torch.zeros(view.rows, 1, view.n, dtype=torch.float32, device=view.keys.device)
    return select_topk(scores, k=max(view.n, 1), **view.spans).expand(-1, view.heads, -1)
