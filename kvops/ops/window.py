"""Observation windows: which keys each query row sees, scores summed over any number of rows, and pooling.

A window is w queries: the last ones of the prompt, or later ones. Each row sees the keys before its own limit.
`ops.window_scores` sums the scores of all rows per key. Pooling over neighbours then also keeps the tokens around a key
that got attention.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, pad

from .api import MAX_WINDOW, Reduce, Score, drop_scores, window_scores
from .checks import check_bool, check_choice, check_int

Pool = Literal["max", "avg"]
GROUP_REDUCES: tuple[Reduce, ...] = get_args(Reduce)
POOLINGS: tuple[Pool, ...] = get_args(Pool)


def span_ends(k: Tensor, starts: Tensor | None, lengths: Tensor | None) -> Tensor | int:
    """One past each row's last valid slot: n for all rows, or int32 [b]."""
    n = k.shape[2]
    if lengths is None:
        return n
    return (lengths if starts is None else starts + lengths).clamp(0, n)


def prefix_lengths(k: Tensor, window: int, starts: Tensor | None, lengths: Tensor | None) -> Tensor:
    """The number of valid tokens before each row's last `window`: int32 [b]. k: [b, Hk, n, ...], keys or scores."""
    if lengths is None:
        n = torch.full((k.shape[0],), k.shape[2], dtype=torch.int32, device=k.device)
        lengths = n if starts is None else n - starts
    return (lengths - window).clamp(min=0)


def causal_limits(end: Tensor | int, w: int, device: torch.device) -> Tensor:
    """The `visible` limits of the last w rows before `end`: int32 [w] or [b, w]. Rows before slot 0 see nothing."""
    behind = torch.arange(w - 1, -1, -1, dtype=torch.int32, device=device)
    return ((end[:, None] if isinstance(end, Tensor) else end) - behind).clamp(min=0)


def outside_prefix(k: Tensor, window: int, starts: Tensor | None, end: Tensor | int) -> Tensor:
    """Which slots lie outside the prefix, the valid slots before the window: bool [b or 1, 1, n].

    k: [b, Hk, n, ...], keys or scores.
    """
    slots = torch.arange(k.shape[2], device=k.device)
    outside = slots >= ((end[:, None, None] if isinstance(end, Tensor) else end) - window)
    if starts is not None:
        outside = outside | (slots < starts[:, None, None])
    return outside.view(-1, 1, k.shape[2])


def summed_scores(
    q: Tensor,
    k: Tensor,
    visible: Tensor,
    lse: Tensor | None,
    prefix: int | Tensor | None = None,
    row_weights: Tensor | None = None,
    values: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """Computes `ops.window_scores` of any number of rows, in blocks of 256 reduced in order; None for no rows.

    With `values` it computes `ops.drop_scores`, whose rows are summed and have neither an lse nor weights.

    prefix: int or int32 [b]. If given, every row that counts (visible > 0) sees all keys before it, and the caller
    ignores the scores of the other keys.
    """
    if values is not None:
        reduce = options.pop("reduce", "sum")
        assert reduce == "sum" and lse is None and row_weights is None
    elif prefix is not None and q.shape[2] and lse is None and _linear(q, k, **options):
        return _linear_scores(q, k, visible, prefix, **options)
    reduce = options.get("reduce") if q.shape[2] > MAX_WINDOW else None
    total, most = None, reduce == "max"
    if reduce == "mean":  # of all rows, not of each block's
        options["reduce"] = "sum"
    for first in range(0, q.shape[2], MAX_WINDOW):
        rows = slice(first, first + MAX_WINDOW)
        block_lse = None if lse is None else lse[:, :, rows]
        weights = None if row_weights is None else row_weights[:, :, rows]
        limits = visible[..., rows].contiguous()
        if values is None:
            block = window_scores(q[:, :, rows], k, limits, lse=block_lse, row_weights=weights, **options)
        else:
            block = drop_scores(q[:, :, rows], k, values, limits, **options)
        if most:  # keys that no row of the block sees have no score in it
            unseen = torch.arange(block.shape[2], device=k.device) >= visible[..., rows].amax(-1).view(-1, 1, 1)
            block = block.masked_fill(unseen, -torch.inf)
        if total is None:
            total = block
        else:
            total = torch.maximum(total, block) if most else total.add_(block)
    if total is not None and most:
        total = total.masked_fill(total == -torch.inf, 0.0)
    if total is not None and reduce == "mean":
        starts = options.get("starts")
        seeing = (visible > (0 if starts is None else starts[:, None])).sum(-1)  # rows that see a key
        total = total / seeing.clamp(min=1).view(-1, 1, 1)
    return total


def _linear(
    q: Tensor,
    k: Tensor,
    score: Score = "softmax",
    reduce: Reduce = "sum",
    group_reduce: Reduce = "mean",
    **logit: Any,
) -> bool:
    """Whether the sum of the scores is the score of the summed queries; False if q does not fit k."""
    plain = not logit.get("softcap") and logit.get("sink_logits") is None
    fits = q.dtype == k.dtype and q.shape[1] >= k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
    return score == "dot" and reduce == "sum" and group_reduce in ("mean", "sum") and plain and fits


def _linear_scores(
    q: Tensor,
    k: Tensor,
    visible: Tensor,
    prefix: int | Tensor,
    *,
    group_reduce: Reduce = "mean",
    scale: float | None = None,
    starts: Tensor | None = None,
    block_table: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Computes dot-product scores from summed queries: one row per KV head instead of G * w.

    The sum over rows and group of q_i . k_j equals (the sum of q_i) . k_j. The summed query, in fp64, is split into
    rows of k's dtype that add up to it: one for fp32, three for fp16 or bf16. A power of two scales the rows so that
    their range does not matter. The result is as exact as fp32, and more exact than a sum of rounded scores.
    """
    counts = (visible > 0)[..., None, :, None]
    grouped = torch.where(counts, q, 0).reshape(len(q), k.shape[1], -1, *q.shape[2:])
    total = grouped.sum((2, 3), dtype=torch.float64)  # [b, Hk, d]
    if group_reduce == "mean":
        total = total / (q.shape[1] // k.shape[1])
    exponent = total.abs().amax(-1, keepdim=True).frexp().exponent.clamp(-100, 100)
    left, parts = total.ldexp(-exponent), []
    for _part in range(1 if k.dtype == torch.float32 else 3):
        parts.append(left.to(k.dtype))
        left = left - parts[-1].double()
    if isinstance(prefix, Tensor):
        limits = prefix.clamp(min=0).unsqueeze(-1).repeat(1, len(parts))
    else:
        limits = torch.full((len(parts),), max(0, prefix), dtype=torch.int32, device=k.device)
    rows = torch.stack(parts, 2)
    return window_scores(rows, k, limits, scale=scale, score="dot", starts=starts, block_table=block_table).ldexp_(
        exponent
    )


class Pooling(NamedTuple):
    """How scores are pooled over neighbours and reduced over the query heads of a group."""

    kernel_size: int = 7
    pooling: Pool = "max"
    pool_first: bool = False
    group_reduce: Reduce = "mean"

    def check(self, op: str) -> None:
        check_int(op, "kernel_size", self.kernel_size, 1)
        if self.kernel_size % 2 == 0:
            raise ValueError(f"{op}: kernel_size must be odd (1 does not pool), got {self.kernel_size}")
        check_choice(op, "pooling", self.pooling, POOLINGS)
        check_bool(op, "pool_first", self.pool_first)
        check_choice(op, "group_reduce", self.group_reduce, GROUP_REDUCES)

    @property
    def operator_reduce(self) -> str:
        """The `group_reduce` of the operator."""
        return "none" if self.pool_first else self.group_reduce

    def __call__(self, scores: Tensor, heads: int, outside: Tensor) -> Tensor:
        """Pools the operator's scores to fp32 [b, Hk, n].

        outside: bool [b or 1, 1, n], the slots that do not count in their neighbours' scores: the window and invalid
        slots. Keys whose score is NaN do not count either, and stay NaN.
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
        # Summed one by one, so that the order of the sum is fixed.
        members: tuple[Tensor, ...] = scores.unflatten(1, (heads, -1)).unbind(2)
        total = members[0]
        for x in members[1:]:
            total = torch.maximum(total, x) if self.group_reduce == "max" else total + x
        return total / len(members) if self.group_reduce == "mean" else total


def neighbours_max(x: Tensor, sides: int) -> Tensor:
    """The maximum of each entry of the last dim and its `sides` neighbours on either side; x has no NaN.

    `max_pool1d` does the same, but torch.export supports it for a single size only. Each step doubles the reach.
    """
    x, reach = pad(x, (sides, sides), value=-torch.inf), 1
    while reach <= 2 * sides:
        step = min(reach, 2 * sides + 1 - reach)
        x = torch.maximum(x[..., :-step], x[..., step:])
        reach += step
    return x
