"""Where queries attend: to which tokens, to the first tokens (sinks), and to keys that differ from the mean key."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ..ops.api import Reduce, anchor_cosine
from ..ops.checks import check_int, check_queries, plain
from ..ops.window import causal_limits, outside_prefix, span_ends, summed_scores


def cumulative_attention(
    k: Tensor,
    q: Tensor,
    *,
    visible: Tensor | None = None,
    group_reduce: Reduce | Literal["none"] = "mean",
    scale: float | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Compute how much an answer attends to each token of its prompt.

    ```text
    A_j = mean over the answer's queries and the group's query heads of softmax over the prompt of scale * q . k_j
    ```

    Args:
        k: [b, Hk, n, d].
        q: [b, Hq, any, d] of k's dtype, the queries of the answer.
        visible: int32 [rows] or [b, rows], how many keys each query sees, for queries of the prompt itself. None: all
            of them see the whole prompt.
        group_reduce: "mean", "max" or "sum" over the query heads of a KV head; "none" keeps them apart.
        scale: The scale of the model's attention, as in `ops.window_scores`.
        softcap: The softcap of the model's attention; 0 for none.
        sink_logits: fp32 [Hq], the sink logits of the model's attention.
        starts: int32 [b], the first valid slot of each row.
        lengths: int32 [b], the number of valid slots of each row.

    Returns:
        fp32 [b, Hk, n], or [b, Hq, n] with group_reduce="none". With "mean" or "none" each head sums to 1, minus the
        weight of a sink.

    Raises:
        TypeError: q or k is not a tensor.
        ValueError: q does not fit k, or has no rows.

    Source: ProtoKV, Def. 1, Eq. 1, as a mean.
    """
    check_queries("cumulative_attention", "q", q, k)
    rows = q.shape[2]
    if visible is None:
        visible = causal_limits(span_ends(k, starts, lengths), 1, k.device).repeat_interleave(rows, -1)
    options: dict[str, Any] = dict(scale=scale, softcap=softcap, sink_logits=sink_logits, starts=starts)
    total = summed_scores(q, k, visible, None, group_reduce=group_reduce, **options)
    assert total is not None  # q has rows
    return total / rows


def sink_attention(
    k: Tensor, q: Tensor, sinks: int = 4, *, starts: Tensor | None = None, lengths: Tensor | None = None, **options: Any
) -> Tensor:
    """Compute the fraction of each query head's attention that goes to the first tokens.

    Args:
        k: [b, Hk, n, d].
        q: [b, Hq, any, d] of k's dtype.
        sinks: The number of first tokens.
        starts: int32 [b], the first valid slot of each row.
        lengths: int32 [b], the number of valid slots of each row.
        **options: visible, scale, softcap and sink_logits, as in `cumulative_attention`.

    Returns:
        fp32 [b, Hq], the mean over the queries. The weight of sink logits is not part of it.

    Raises:
        TypeError: sinks is not an int, or q or k is not a tensor.
        ValueError: sinks is too small, or q does not fit k.

    Source: StreamingLLM, Fig. 2.
    """
    check_int("sink_attention", "sinks", sinks, 1)
    attention = cumulative_attention(k, q, group_reduce="none", starts=starts, lengths=lengths, **options)
    slots = torch.arange(k.shape[2], device=k.device)
    first = 0 if starts is None else starts[:, None, None]
    return torch.where((slots >= first) & (slots < first + plain(sinks)), attention, 0.0).sum(-1)


def attention_rank_correlation(
    k: Tensor, q: Tensor, *, starts: Tensor | None = None, lengths: Tensor | None = None, **options: Any
) -> Tensor:
    """Correlate dissimilarity with attention: Spearman's rho of -cos(k_j, anchor) and the attention to k_j.

    The anchor is KeyDiff's, the mean unit key. 1 means that KeyDiff ranks the keys as the queries do. The paper does
    not say which queries it averages over. Here all keys are seen by all queries: for queries of the prompt itself
    (`visible`) only the keys before the first of them are ranked, since later keys are seen by fewer queries.

    Args:
        k: [b, Hk, n, d].
        q: [b, Hq, any, d] of k's dtype.
        starts: int32 [b], the first valid slot of each row.
        lengths: int32 [b], the number of valid slots of each row.
        **options: visible, scale, softcap and sink_logits, as in `cumulative_attention`.

    Returns:
        fp32 [b, Hk], in [-1, 1]. Equal values share the mean of their ranks. NaN where all keys have one rank.

    Raises:
        TypeError: q or k is not a tensor.
        ValueError: q does not fit k.

    Source: KeyDiff, App. C.4, Table 3.
    """
    attention = cumulative_attention(k, q, starts=starts, lengths=lengths, **options)
    difference = anchor_cosine(k, starts=starts, lengths=lengths)
    end: Tensor | int = span_ends(k, starts, lengths)
    if (visible := options.get("visible")) is not None:
        end = visible.amin(-1).expand(len(k))
    counts = difference.isfinite() & attention.isfinite() & ~outside_prefix(k, 0, starts, end)
    return spearman(difference, attention, counts)


def spearman(x: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    """Spearman's rho of x and y where `counts`: fp32 [b, Hk, n], bool -> fp32 [b, Hk]. Tied values share a rank."""
    ranks = []
    for values in (x, y):
        values = torch.where(counts, values, torch.inf)  # others come last and leave the ranks before them alone
        ordered = values.sort(-1).values
        rank = torch.searchsorted(ordered, values) + torch.searchsorted(ordered, values, right=True)
        rank = torch.where(counts, rank.double(), 0.0)
        mean = rank.sum(-1, keepdim=True) / counts.sum(-1, keepdim=True)
        ranks.append(torch.where(counts, rank - mean, 0.0))
    a, b = ranks
    return ((a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt()).float()
