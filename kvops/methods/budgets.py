"""Budgets: how many tokens stay, and how a layer's budget is shared among its heads.

Source of `head_budgets`: "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM
Inference", Feng et al., 2024, Algorithm 1; with ProtoKV: its Table 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..checks import (
    check_budget,
    check_head_budgets,
    check_holds_window,
    check_int,
    check_recent,
    check_rows_hold,
    inference_only,
)
from ..ops import select_topk
from ..window import outside_prefix, prefix_lengths, span_ends

#: Tokens, or a fraction in (0, 1] of a row's valid ones; the one-shot calls also take each head's own tokens, int32
#: [b, Hk] (`kvops.head_budgets`).
Budget = int | float | Tensor


def budget_tokens(op: str, budget: Budget, n: int) -> int:
    """Tokens to keep of n: a count as it is, a fraction in (0, 1] as max(1, int(fraction * n))."""
    check_budget(op, budget)
    return budget if isinstance(budget, int) else max(1, int(float(budget) * n))


def most_tokens(op: str, budget: Budget, n: int) -> int:
    """`budget_tokens`; of a budget per head the most of any."""
    if not isinstance(budget, Tensor):
        return budget_tokens(op, budget, n)
    check_head_budgets(op, budget)
    return int(budget.max()) if budget.numel() else 0


def recent_tokens(op: str, recent: int | float, keep: int) -> int:
    """Newest tokens to protect among the `keep`: a count as it is, a share in [0, 1) as int(share * keep)."""
    check_recent(op, recent)
    return recent if isinstance(recent, int) else int(recent * keep)


def valid_slots(n: int, starts: Tensor | None, lengths: Tensor | None) -> Tensor:
    """How many slots of each row are valid, int32 [b]; one of the two is given."""
    if lengths is not None:
        return lengths
    assert starts is not None
    return n - starts


def row_budgets(
    op: str, budget: Budget, shape: Sequence[int], n: int, starts: Tensor | None, lengths: Tensor | None
) -> tuple[int, Tensor | None]:
    """The most tokens that any head keeps of n slots, and, where rows or heads differ, how many each: int32 [b, 1 or
    Hk]. shape: (b, heads), those that have scores of their own.
    """
    keep = most_tokens(op, budget, n)
    if isinstance(budget, Tensor):
        check_head_budgets(op, budget, shape)
        return keep, budget
    if isinstance(budget, float) and not (starts is None and lengths is None):
        valid = valid_slots(n, starts, lengths)
        return keep, (valid.double() * budget).int().clamp(min=1).unsqueeze(1)  # truncated fp64, as int() does
    return keep, None


def head_budgets(
    scores: Tensor,
    budget: int | float,
    window: int = 0,
    *,
    floor: float = 0.2,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Each head's tokens when a layer keeps its highest scores, whichever head they are of. ::

        c    = budget - window
        each head keeps its int(floor * c) best;  the rest of Hk * c are the highest of all other scores of the layer

    and the window, which counts towards the budget. A row's budgets add up to Hk * budget exactly.

    Args:
        scores: fp32 [b, Hk, n], comparable between heads, such as `ops.window_scores`. Those of the last `window` valid
            slots do not count, nor do scores that are NaN, as long as there are others.
        budget: tokens (int), or a fraction in (0, 1] of the valid slots (float): the mean over the heads.
        window: newest tokens that every head keeps.
        floor: in [0, 1]; 1 gives all heads alike.
        starts, lengths: int32 [b], the valid slots of each row.

    Returns:
        int32 [b, Hk], for the budget of any policy that takes one per head.
    """
    op = "head_budgets"
    inference_only(op, scores=scores)
    if scores.dim() != 3:
        raise ValueError(f"{op}: scores must be [b, Hk, n], got shape {list(scores.shape)}")
    if isinstance(budget, Tensor):
        raise TypeError(f"{op}: budget must be an int (tokens) or a float (fraction), got a tensor")
    check_int(op, "window", window, 0)
    if not 0.0 <= floor <= 1.0:
        raise ValueError(f"{op}: floor must be in [0, 1], got {floor}")
    b, heads, n = scores.shape
    keep, budgets = row_budgets(op, budget, (b, heads), n, starts, lengths)
    check_holds_window(op, keep, window)
    if budgets is None:
        budgets = torch.full((b, 1), keep, dtype=torch.int32, device=scores.device)
    else:
        check_rows_hold(op, budgets, 0, torch.full_like(budgets, window))
    count = budgets - window  # int32 [b, 1]: of a head's prefix, on average
    least = (count.double() * floor).int()
    prefix = prefix_lengths(scores, window, starts, lengths)
    best = select_topk(
        scores,
        k=int(floor * (keep - window)),
        starts=starts,
        lengths=prefix,
        budgets=least.expand(b, heads).contiguous(),
    )
    # What a head keeps in any case comes first, and what is not of the prefix last, in one row for the whole layer.
    ranked = scores.nan_to_num(-torch.inf, torch.finfo(scores.dtype).max, -torch.inf)
    ranked.masked_fill_(outside_prefix(scores, window, starts, span_ends(scores, starts, lengths)), torch.nan)
    ranked = torch.nn.functional.pad(ranked, (0, 1)).scatter_(2, torch.where(best < 0, n, best), torch.inf)[..., :n]
    chosen = select_topk(ranked.contiguous().view(b, 1, heads * n), k=heads * (keep - window), budgets=heads * count)
    counts = budgets.repeat(1, heads)
    for h in range(heads):
        counts[:, h] = ((chosen >= h * n) & (chosen < (h + 1) * n)).sum((1, 2)) + window
    return torch.where(count < prefix.unsqueeze(1), counts, budgets)


def entropy_budgets(
    scores: Sequence[Tensor],
    budget: int,
    window: int = 0,
    *,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Each layer's tokens when layers share a budget by the entropy of their attention: the more tokens a layer looks
    at, the more it keeps. ::

        p     = a head's scores / their sum       over the valid tokens before the window
        H     = mean over the layer's heads of -sum p ln p
        c     = budget - window;   window + num_layers * c * H / (the sum of H over the layers)  tokens of the layer

    rounded so that a row's budgets add up to num_layers * budget exactly (of rows with fewer tokens, to all of them). A
    layer whose share is more than there is keeps all, and the others share the rest.

    Args:
        scores: of each layer, fp32 [b, Hk, n], such as `ops.window_scores`; finite and at least 0, others do not count.
        budget: tokens, the mean over the layers.
        window: newest tokens that every layer keeps.
        starts, lengths: int32 [b], the valid slots of each row.

    Returns:
        int32 [num_layers, b]; policies take layer i's as budget=budgets[i, :, None].expand(b, Hk).contiguous().

    Source: after "Entropy-Guided KV Caching for Efficient LLM Inference", Kim and Jung, 2025, whose layers of higher
    entropy get larger budgets; that shares are proportional was chosen here.
    """
    op = "entropy_budgets"
    if isinstance(scores, Tensor) or not scores:
        raise ValueError(f"{op}: scores must be a list with those of at least one layer, got {type(scores).__name__}")
    inference_only(op, **{f"scores[{i}]": x for i, x in enumerate(scores)})
    check_int(op, "budget", budget, 1)
    check_int(op, "window", window, 0)
    check_holds_window(op, budget, window)
    for i, x in enumerate(scores):
        if x.dim() != 3 or (x.shape[0], x.shape[2]) != (scores[0].shape[0], scores[0].shape[2]):
            raise ValueError(
                f"{op}: scores must be [b, Hk, n], alike in b and n, got {list(x.shape)} of layer {i} beside "
                f"{list(scores[0].shape)}"
            )
    outside = outside_prefix(scores[0], window, starts, span_ends(scores[0], starts, lengths))
    entropy = torch.stack([_entropy(x, outside) for x in scores])  # fp64 [layers, b]
    most = prefix_lengths(scores[0], window, starts, lengths).double()  # [b]
    left = len(scores) * most.clamp(max=budget - window)
    share, shares = torch.zeros_like(entropy), torch.ones_like(entropy, dtype=torch.bool)
    for _ in scores:  # each round some layers turn out to keep all, or none do
        weight = torch.where(shares, entropy, 0.0)
        total = weight.sum(0)
        weight = torch.where(total > 0, weight, shares.double())
        ideal = left * weight / weight.sum(0).clamp(min=1e-300)
        whole = shares & (ideal >= most)
        share = torch.where(whole, most, torch.where(shares, ideal, share))
        left, shares = left - torch.where(whole, most, 0.0).sum(0), shares & ~whole
    tokens = share.floor()
    rest = (share.sum(0).round() - tokens.sum(0)).round()  # go to the largest fractions, ties to the lower layer
    order = (share - tokens).argsort(dim=0, descending=True, stable=True)
    layers = torch.arange(len(scores), device=order.device)[:, None].expand_as(order)
    more = torch.empty_like(order).scatter_(0, order, layers) < rest
    return (tokens + more).int() + prefix_lengths(scores[0], 0, starts, lengths).clamp(max=window)


def _entropy(scores: Tensor, outside: Tensor) -> Tensor:
    """fp64 [b]: the mean over heads of the entropy of what is not outside, as shares of its sum."""
    counted = torch.where(outside | ~(scores > 0) | scores.isinf(), 0.0, scores.double())
    p = counted / counted.sum(-1, keepdim=True).clamp(min=1e-300)
    return -torch.xlogy(p, p).sum(-1).mean(1)
