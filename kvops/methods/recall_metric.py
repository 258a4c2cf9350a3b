"""LAQ's recall: the fraction of the answer's most attended keys that an observation window keeps.

Source: "Lookahead Q-Cache: Achieving More Consistent KV Cache Eviction via Pseudo Query", Sec. 3 (Eq. 1-3).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops.api import Reduce, Score, select_topk
from ..ops.checks import check_budget, check_queries, check_rank, plain
from ..ops.window import Pool, Pooling, outside_prefix, span_ends, summed_scores
from .budgets import budget_tokens
from .laq import lookahead_limits
from .queries import Logits


class RecallCall(Logits, total=False):
    """The options of `recall`: `Logits` and padding.

    Attributes:
        starts: int32 [b], the first valid slot of each row.
        lengths: int32 [b], the number of valid slots of each row.
    """

    starts: Tensor | None
    lengths: Tensor | None


def recall(
    k: Tensor,
    q_observed: Tensor,
    q_response: Tensor,
    budget: int | float,
    *,
    visible: Tensor | None = None,
    kernel_size: int = 1,
    pooling: Pool = "max",
    pool_first: bool = False,
    score: Score = "softmax",
    group_reduce: Reduce = "mean",
    **call: Unpack[RecallCall],
) -> Tensor:
    """Compute LAQ's Recall_W: the fraction of the keys chosen by the answer's queries that a window also chooses.

    ```text
    gold   = the budget's best keys by the sum over the response's rows      (Eq. 1)
    kept   = the same by the window's rows                                   (Eq. 2)
    recall = |kept and gold| / |gold|                                        (Eq. 3)
    ```

    Args:
        k: [b, Hk, n, d], the prompt's keys.
        q_observed: [b, Hq, w, d], the queries of the observation window.
        q_response: [b, Hq, any, d], the queries of the response, which see all of k.
        budget: Tokens (int), or a fraction in (0, 1] of n (float).
        visible: int32 [w] or [b, w], how many keys each row of `q_observed` sees, for a window inside the prompt. None
            means all keys.
        kernel_size: As in `kvops.SnapKV`, but by default 1 (no pooling).
        pooling: As in `kvops.SnapKV`.
        pool_first: As in `kvops.SnapKV`.
        score: "softmax", or "dot" as the equations are printed.
        group_reduce: As in `kvops.SnapKV`.
        **call: scale, softcap, sink_logits, starts, lengths; see `RecallCall`.

    Returns:
        fp32 [b, Hk], each in [0, 1].

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument has the wrong shape, dtype, device or value.

    Source: LAQ, Sec. 3, Eq. 1-3.
    """
    op = "recall"
    pool = Pooling(kernel_size, pooling, pool_first, group_reduce)
    pool.check(op)
    check_rank(op, k)
    check_budget(op, budget)
    keep = budget_tokens(plain(budget), k.shape[2])
    spans = call.get("starts"), call.get("lengths")
    kept, gold = (
        best_slots(prompt_scores(op, name, q, k, pool, limits, score=score, **call), keep, *spans)
        for name, q, limits in (("q_observed", q_observed, visible), ("q_response", q_response, None))
    )
    return (kept & gold).sum(-1).float() / gold.sum(-1).clamp(min=1)


def prompt_scores(
    op: str,
    name: str,
    q: Tensor,
    k: Tensor,
    pool: Pooling,
    visible: Tensor | None = None,
    *,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The scores that queries give to a prompt's keys, as in `recall`: fp32 [b, Hk, n].

    options: score, scale, softcap, sink_logits.
    """
    check_queries(op, name, q, k)
    end = span_ends(k, starts, lengths)
    if visible is None:
        visible = lookahead_limits(op, end, 0, q.shape[2], False, None, len(k), k.device)
    scores = summed_scores(q, k, visible, None, starts=starts, group_reduce=pool.operator_reduce, **options)
    assert scores is not None  # q has rows
    return pool(scores, k.shape[1], outside_prefix(k, 0, starts, end))


def best_slots(scores: Tensor, keep: int, starts: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
    """Marks the slots with the `keep` highest scores: fp32 [b, Hk, n] -> bool [b, Hk, n]."""
    *outer, n = scores.shape
    indices = select_topk(scores, k=keep, starts=starts, lengths=lengths)
    best = torch.zeros(*outer, n + 1, dtype=torch.bool, device=scores.device)
    return best.scatter_(2, torch.where(indices < 0, n, indices), True)[:, :, :n]
