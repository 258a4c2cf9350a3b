"""Budgets: how many tokens are kept, and how the heads of a layer, or the layers of a model, share a budget.

Source of `head_budgets`: "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM
Inference", Feng et al., 2024, Algorithm 1; with ProtoKV: its Table 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..ops import select_topk
from ..ops.checks import (
    check_budget,
    check_head_budgets,
    check_holds_window,
    check_int,
    check_rows_hold,
    inference_only,
    plain,
)
from ..ops.window import outside_prefix, prefix_lengths, span_ends

#: Tokens (int), or a fraction in (0, 1] of a row's valid tokens (float). One-shot calls also take a budget per head,
#: int32 [b, Hk] (`kvops.head_budgets`).
Budget = int | float | Tensor

_N = TypeVar("_N", int, Tensor)


def fraction_of(fraction: float, n: _N) -> _N:
    """This fraction of n tokens, rounded down: floor(fraction * n), exact for a fraction as it is written in decimal.

    In doubles 0.29 * 100 is 28.999999999999996, whose floor would lose a token. The relative error of such a product is
    less than 2^-51, so a product that close below an integer counts as the integer.

    Args:
        fraction: In [0, 1].
        n: An int, or int [..].
    """
    if isinstance(n, int):
        product = n * fraction
        return int(product + product * 2.0**-51)
    products = n.double() * fraction
    return (products + products * 2.0**-51).int()


def budget_tokens(budget: Budget, n: int) -> int:
    """The tokens to keep of n: an int as it is, a fraction in (0, 1] rounded down (`fraction_of`), at least 1.

    Of a budget per head, the largest.
    """
    if isinstance(budget, Tensor):
        return int(budget.max()) if budget.numel() else 0
    return max(1, fraction_of(budget, n)) if isinstance(budget, float) else budget


def check_shared(op: str, budget: Budget, protected: int | float) -> None:
    """Raise ValueError unless heads can share the budget, in which so many tokens of each head are protected."""
    if not isinstance(budget, int) and protected:
        raise ValueError(f"{op}: head_mode='adaptive' with sinks or recent needs a budget in tokens, got {budget}")


def recent_tokens(recent: int | float, keep: int) -> int:
    """The newest tokens to protect among `keep`: an int as it is, a fraction in [0, 1) rounded down (`fraction_of`)."""
    return fraction_of(recent, keep) if isinstance(recent, float) else recent


def valid_slots(n: int, starts: Tensor | None, lengths: Tensor | None) -> Tensor:
    """The number of valid slots of each row, int32 [b]; starts or lengths is given."""
    if lengths is not None:
        return lengths
    assert starts is not None
    return n - starts


def row_budgets(
    op: str, budget: Budget, shape: Sequence[int], n: int, starts: Tensor | None, lengths: Tensor | None
) -> tuple[int, Tensor | None]:
    """The largest number of tokens that any head keeps of n slots, and the number of each if rows or heads differ.

    The second result is int32 [b, 1 or Hk], or None. shape: (b, heads), the rows and heads with scores of their own.
    """
    if isinstance(budget, Tensor):
        check_head_budgets(op, budget, shape)
        return budget_tokens(budget, n), budget
    if not isinstance(budget, float):
        return budget, None
    keep = budget_tokens(budget, n)
    if not (starts is None and lengths is None):
        valid = valid_slots(n, starts, lengths)
        return keep, fraction_of(budget, valid).clamp(min=1).unsqueeze(1)
    return keep, None


def first_slots(
    op: str,
    scores: Tensor,
    budget: Budget,
    protected: int,
    share: float = 1.0,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """The slots of the highest scores, [b, heads, n], as many as a share of the budget without the protected tokens.

    int64 [b, heads, any], in ascending order, -1 for none.
    """
    keep, budgets = row_budgets(op, budget, scores.shape[:2], scores.shape[2], starts, lengths)
    if budgets is not None:
        budgets = fraction_of(share, (budgets - protected).clamp(min=0)).expand(scores.shape[:2]).contiguous()
    k = fraction_of(share, max(keep - protected, 0))
    return select_topk(scores, k=k, starts=starts, lengths=lengths, budgets=budgets)


def with_first(scores: Tensor, slots: Tensor, score: float = torch.inf) -> Tensor:
    """A copy of the scores, [b, heads, n], in which these slots have `score`: int64 [b, heads, any], -1 for none."""
    n = scores.shape[2]
    return pad(scores, (0, 1)).scatter_(2, torch.where(slots < 0, n, slots), score)[..., :n].contiguous()


def head_budgets(
    scores: Tensor,
    budget: int | float,
    window: int = 0,
    *,
    floor: float = 0.2,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Share a layer's budget among its heads: the layer keeps its highest scores, whichever heads they belong to.

    With c = budget - window, each head keeps its floor * c best tokens, rounded down. The rest of the layer's `Hk * c`
    tokens are those with the highest remaining scores of all heads. Each head also keeps its window, which counts
    towards the budget. The budgets of a row add up to exactly `Hk * budget`.

    Args:
        scores: fp32 [b, Hk, n], comparable between heads, such as `ops.window_scores`. Scores of the last `window`
            valid slots are ignored, and so are NaN scores as long as there are others.
        budget: Tokens (int), or a fraction in (0, 1] of the valid slots (float); the mean over the heads. The tokens of
            all heads together must fit int32.
        window: Newest tokens that every head keeps.
        floor: In [0, 1]. With 1 all heads get the same budget.
        starts: int32 [b], the first valid slot of each row.
        lengths: int32 [b], the number of valid slots of each row.

    Returns:
        int32 [b, Hk], the tokens of each head. Pass it as the budget of a policy that takes a budget per head.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: scores is not [b, Hk, n], floor is not in [0, 1], or budget is less than window.

    Source: Ada-KV, Algorithm 1; with ProtoKV: ProtoKV, Table 4.
    """
    op, budget, window, floor = "head_budgets", plain(budget), plain(window), plain(floor)
    inference_only(op, scores=scores)
    if scores.dim() != 3:
        raise ValueError(f"{op}: scores must be [b, Hk, n], got shape {list(scores.shape)}")
    if isinstance(budget, Tensor):
        raise TypeError(f"{op}: budget must be an int (tokens) or a float (fraction), got a tensor")
    check_budget(op, budget)
    check_int(op, "window", window, 0)
    if not 0.0 <= floor <= 1.0:
        raise ValueError(f"{op}: floor must be in [0, 1], got {floor}")
    b, heads, n = scores.shape
    keep, budgets = row_budgets(op, budget, (b, heads), n, starts, lengths)
    check_int(op, "budget", keep, 1, (2**31 - 1) // max(heads, 1))  # the layer's tokens are int32
    check_holds_window(op, keep, window)
    if budgets is None:
        budgets = torch.full((b, 1), keep, dtype=torch.int32, device=scores.device)
    else:
        check_rows_hold(op, budgets, 0, torch.full_like(budgets, window))
    count = budgets - window  # int32 [b, 1]: tokens of a head's prefix, on average
    least = fraction_of(floor, count)
    prefix = prefix_lengths(scores, window, starts, lengths)
    best = select_topk(
        scores,
        k=fraction_of(floor, keep - window),
        starts=starts,
        lengths=prefix,
        budgets=least.expand(b, heads).contiguous(),
    )
    # Rank the whole layer in one row: each head's guaranteed tokens first, slots outside of the prefix last.
    ranked = scores.nan_to_num(-torch.inf, torch.finfo(scores.dtype).max, -torch.inf)
    ranked.masked_fill_(outside_prefix(scores, window, starts, span_ends(scores, starts, lengths)), torch.nan)
    ranked = with_first(ranked, best)
    chosen = select_topk(ranked.view(b, 1, heads * n), k=heads * (keep - window), budgets=heads * count)
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
    """Share a model's budget among its layers by the entropy of their attention.

    The more tokens a layer attends to, the more it keeps.

    ```text
    p      = a head's scores / their sum       over the valid tokens before the window
    H      = mean over the layer's heads of -sum p ln p
    c      = budget - window
    tokens = window + num_layers * c * H / (sum of H over the layers)
    ```

    The results are rounded so that the budgets of a row add up to exactly `num_layers * budget`, or to all tokens of a
    row that has fewer. A layer that would get more tokens than it has keeps all of them, and the other layers share the
    rest.

    Args:
        scores: One tensor per layer, fp32 [b, Hk, n], such as `ops.window_scores`. Scores that are negative or not
            finite are ignored.
        budget: Tokens; the mean over the layers.
        window: Newest tokens that every layer keeps.
        starts: int32 [b], the first valid slot of each row.
        lengths: int32 [b], the number of valid slots of each row.

    Returns:
        int32 [num_layers, b]. To pass layer i's budget to a policy, use
        `budget=budgets[i, :, None].expand(b, Hk).contiguous()`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: scores is empty or differs in b or n between layers, or budget is less than window.

    Source: after "Entropy-Guided KV Caching for Efficient LLM Inference", Kim and Jung, 2025, in which layers of higher
    entropy get larger budgets. That budgets are proportional to the entropy was chosen here.
    """
    op = "entropy_budgets"
    if isinstance(scores, Tensor) or not scores:
        raise ValueError(f"{op}: scores must be a list of at least one layer's scores, got {type(scores).__name__}")
    inference_only(op, **{f"scores[{i}]": x for i, x in enumerate(scores)})
    check_int(op, "budget", budget, 1)
    check_int(op, "window", window, 0)
    budget, window = plain(budget), plain(window)
    check_holds_window(op, budget, window)
    for i, x in enumerate(scores):
        if x.dim() != 3 or (x.shape[0], x.shape[2]) != (scores[0].shape[0], scores[0].shape[2]):
            raise ValueError(
                f"{op}: scores must be [b, Hk, n] with the same b and n in all layers, got {list(x.shape)} in layer "
                f"{i} and {list(scores[0].shape)} in layer 0"
            )
    outside = outside_prefix(scores[0], window, starts, span_ends(scores[0], starts, lengths))
    entropy = torch.stack([_entropy(x, outside) for x in scores])  # fp64 [layers, b]
    most = prefix_lengths(scores[0], window, starts, lengths).double()  # [b]
    left = len(scores) * most.clamp(max=budget - window)
    share, shares = torch.zeros_like(entropy), torch.ones_like(entropy, dtype=torch.bool)
    for _ in scores:  # in each round some more layers turn out to keep all their tokens, or none do
        weight = torch.where(shares, entropy, 0.0)
        total = weight.sum(0)
        weight = torch.where(total > 0, weight, shares.double())
        ideal = left * weight / weight.sum(0).clamp(min=1e-300)
        whole = shares & (ideal >= most)
        share = torch.where(whole, most, torch.where(shares, ideal, share))
        left, shares = left - torch.where(whole, most, 0.0).sum(0), shares & ~whole
    tokens = share.floor()
    rest = (share.sum(0).round() - tokens.sum(0)).round()  # for the largest fractions, ties to the lower layer
    order = (share - tokens).argsort(dim=0, descending=True, stable=True)
    layers = torch.arange(len(scores), device=order.device)[:, None].expand_as(order)
    more = torch.empty_like(order).scatter_(0, order, layers) < rest
    return (tokens + more).int() + prefix_lengths(scores[0], 0, starts, lengths).clamp(max=window)


def _entropy(scores: Tensor, outside: Tensor) -> Tensor:
    """The mean over heads of the entropy of the scores that are not `outside`, normalized to sum 1: fp64 [b]."""
    counted = torch.where(outside | ~(scores > 0) | scores.isinf(), 0.0, scores.double())
    p = counted / counted.sum(-1, keepdim=True).clamp(min=1e-300)
    return -torch.xlogy(p, p).sum(-1).mean(1)
