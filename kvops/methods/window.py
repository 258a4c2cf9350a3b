"""What the methods with an observation window share: who sees what, scores of many rows, pooling, and the checks.

A window is w queries, the last of the prompt or some that came later. Each row sees the keys before its own limit; the
scores of all rows are summed per key (`ops.window_scores`), and pooling over the neighbours keeps the words around a
key that was attended to.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, pad

from ..cache import summed_scores
from ..dispatch import inference_only
from .common import (
    Budget,
    check_choice,
    check_head_mode,
    check_int,
    check_rank,
    most_tokens,
    select_budget,
    shared_scores,
)

GROUP_REDUCES = ("mean", "max", "sum")


class Pooling(NamedTuple):
    """How scores of neighbours become one, and those of a group's query heads."""

    kernel_size: int = 7
    pooling: str = "max"
    pool_first: bool = False
    group_reduce: str = "mean"

    def check(self, op: str) -> None:
        check_int(op, "kernel_size", self.kernel_size, 1)
        if self.kernel_size % 2 == 0:
            raise ValueError(f"{op}: kernel_size must be odd (1 does not pool), got {self.kernel_size}")
        check_choice(op, "pooling", self.pooling, ("max", "avg"))
        check_choice(op, "group_reduce", self.group_reduce, GROUP_REDUCES)

    @property
    def operator_reduce(self) -> str:
        """What the operator does with the query heads of a group."""
        return "none" if self.pool_first else self.group_reduce

    def __call__(self, scores: Tensor, heads: int, outside: Tensor) -> Tensor:
        """fp32 [b, Hk, n], from the operator's scores.

        outside: bool [b or 1, 1, n], slots that have no say in their neighbours' scores: the window, and what is
        invalid. Neither has a key whose score is NaN, which stays NaN itself.
        """
        if self.kernel_size > 1 and scores.numel():
            lost = scores.isnan()
            sides = min(self.kernel_size // 2, scores.shape[2] - 1)  # there are no others
            size = 2 * sides + 1
            if self.pooling == "max":
                pooled = neighbours_max(scores.masked_fill(lost | outside, -torch.inf), sides)
            else:
                pooled = avg_pool1d(scores.masked_fill(lost | outside, 0.0), size, 1, sides)
                if size < self.kernel_size:
                    pooled *= size / self.kernel_size
            scores = pooled.masked_fill_(lost, torch.nan)
        if not self.pool_first:
            return scores
        members = scores.unflatten(1, (heads, -1)).unbind(2)  # one by one: the order of the sum is fixed
        total = members[0]
        for x in members[1:]:
            total = torch.maximum(total, x) if self.group_reduce == "max" else total + x
        return total / len(members) if self.group_reduce == "mean" else total


def neighbours_max(x: Tensor, sides: int) -> Tensor:
    """The maximum over each entry of the last dim and `sides` neighbours to either side; no NaN.

    `max_pool1d` would be that, but torch.export takes it for one size only. The reach of the maxima doubles each time.
    """
    x, reach = pad(x, (sides, sides), value=-torch.inf), 1
    while reach <= 2 * sides:
        step = min(reach, 2 * sides + 1 - reach)
        x = torch.maximum(x[..., :-step], x[..., step:])
        reach += step
    return x


def span_ends(k: Tensor, starts: Tensor | None, lengths: Tensor | None) -> Tensor | int:
    """One past each row's last valid slot: n for all rows, or int32 [b]."""
    n = k.shape[2]
    if lengths is None:
        return n
    return (lengths if starts is None else starts + lengths).clamp(0, n)


def observation_window(
    op: str, q: Tensor, k: Tensor, starts: Tensor | None, lengths: Tensor | None
) -> tuple[Tensor, int]:
    """What the rows of q, the queries of a prompt's last w tokens, see; and w."""
    check_queries(op, "q_window", q, k)
    check_in_prompt(op, "q_window", q, k)
    w = q.shape[2]
    return causal_limits(span_ends(k, starts, lengths), w, k.device), w


def prefix_lengths(k: Tensor, window: int, starts: Tensor | None, lengths: Tensor | None) -> Tensor:
    """Valid tokens of each row before its last `window`: int32 [b]. k: [b, Hk, n, ...], keys or scores."""
    if lengths is None:
        n = torch.full((k.shape[0],), k.shape[2], dtype=torch.int32, device=k.device)
        lengths = n if starts is None else n - starts
    return (lengths - window).clamp(min=0)


def causal_limits(end: Tensor | int, w: int, device: torch.device) -> Tensor:
    """The `visible` of the last w rows before `end`: int32 [w], or [b, w]. Rows before slot 0 see nothing."""
    behind = torch.arange(w - 1, -1, -1, dtype=torch.int32, device=device)
    return ((end[:, None] if isinstance(end, Tensor) else end) - behind).clamp(min=0)


def check_queries(op: str, name: str, q: Tensor, k: Tensor, rows: int | None = None) -> None:
    """q is [b, Hq, w, d] beside k, with at least one row (or exactly `rows`)."""
    check_rank(op, k)
    inference_only(op, **{name: q})
    if q.dim() != 4:
        raise ValueError(f"{op}: {name} must be [b, Hq, w, d], got shape {list(q.shape)}")
    if q.shape[2] < 1 or (rows is not None and q.shape[2] != rows):
        raise ValueError(f"{op}: {name} must have {rows or 'at least one'} row(s), got {q.shape[2]}")


def check_in_prompt(op: str, name: str, q: Tensor, k: Tensor) -> None:
    """The rows of q are those of tokens in k."""
    if q.shape[2] > k.shape[2]:
        raise ValueError(
            f"{op}: {name} must be rows of the prompt, expected at most its {k.shape[2]} tokens, got {q.shape[2]}"
        )


def check_lse(op: str, lse: Tensor | None, rows: Tensor) -> None:
    """lse has one entry per row of the queries."""
    if lse is None:
        return
    inference_only(op, lse=lse)
    if lse.shape != rows.shape[:3] or lse.dtype != torch.float32:
        raise ValueError(
            f"{op}: lse must be float32 {list(rows.shape[:3])}, one per row of the queries, got {lse.dtype} "
            f"{list(lse.shape)}"
        )


def check_budget(op: str, budget: Budget, n: int, window: int) -> int:
    """Tokens to keep of n (of a budget per head, the most), of which the window's are a part."""
    keep = most_tokens(op, budget, n)
    if keep < window:
        raise ValueError(f"{op}: budget must hold the window, expected at least {window} tokens, got {keep}")
    return keep


def outside_prefix(k: Tensor, window: int, starts: Tensor | None, end: Tensor | int) -> Tensor:
    """Which slots are not of the prefix, the valid slots before the window: bool [b or 1, 1, n]. k: as there."""
    slots = torch.arange(k.shape[2], device=k.device)
    outside = slots >= ((end[:, None, None] if isinstance(end, Tensor) else end) - window)
    if starts is not None:
        outside = outside | (slots < starts[:, None, None])
    return outside.view(-1, 1, k.shape[2])


def window_indices(
    op: str,
    q: Tensor,
    k: Tensor,
    visible: Tensor,
    budget: Budget,
    window: int,
    pool: Pooling,
    head_mode: str,
    lse: Tensor | None,
    starts: Tensor | None,
    lengths: Tensor | None,
    fill_invalid: bool,
    share=None,
    whole_prefix: bool = True,
    **options,
) -> Tensor:
    """The kept slots: the last `window` and the best pooled scores of what is before. int64 [b, Hk, m].

    whole_prefix: all rows that count see all of what is before.
    """
    check_head_mode(op, head_mode)
    pool.check(op)
    check_lse(op, lse, q)
    check_budget(op, budget, k.shape[2], window)
    heads, end = k.shape[1], span_ends(k, starts, lengths)
    prefix = end - window if whole_prefix else None
    scores = summed_scores(q, k, visible, lse, prefix, starts=starts, group_reduce=pool.operator_reduce, **options)
    scores = pool(scores, heads, outside_prefix(k, window, starts, end))
    if head_mode == "shared":
        scores = shared_scores(scores)
    return select_budget(op, scores, heads, budget, 0, window, starts, lengths, fill_invalid, share)
