"""Semantic anchors in a model's keys: what ProtoKV says of them, as functions on one layer's tensors.

Every function takes k: [b, Hk, n, d], the keys of a prompt as the cache holds them, and kappa, starts and lengths as
`kvops.ops.outlier_degree` does, whose Theta tells anchors (SATs, high) from the tokens that look like their neighbours.
Invalid slots, and keys that are not finite, count nowhere. `experiments/anchors.py` applies them to a model and draws.

Source: "ProtoKV: Long-context Knowledges Are Already Well-Organized Before Your Query", Sec. 3, App. B, C, E, F, N.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .checks import check_int, check_queries
from .ops import outlier_degree
from .window import causal_limits, span_ends, summed_scores

__all__ = [
    "Clustering",
    "attention_by_outlier_group",
    "clustering_degree",
    "cumulative_attention",
    "neighbourhood_similarity",
    "outlier_histogram",
    "sat_counts",
]


def neighbourhood_similarity(
    k: Tensor, kappa: int = 5, *, starts: Tensor | None = None, lengths: Tensor | None = None
) -> Tensor:
    """How similar each key is to its neighbours: S, the mean cosine with the kappa keys on either side and itself.

    Args:
        k: [b, Hk, n, d].
        kappa: neighbours on either side, as in `ops.outlier_degree`.
        starts, lengths: int32 [b], the valid slots of each row.

    Returns:
        fp32 [b, Hk, n]; NaN for keys that do not count.

    Source: ProtoKV, Def. 2, Eq. 4; Fig. 3.
    """
    return outlier_degree(k, kappa=kappa, standardize=False, starts=starts, lengths=lengths)


def outlier_histogram(
    k: Tensor,
    edges: Sequence[float] | Tensor,
    kappa: int = 5,
    *,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """The histogram of each head's outlier degrees Theta.

    Args:
        k: [b, Hk, n, d].
        edges: bin edges, ascending.
        kappa: neighbours on either side, as in `ops.outlier_degree`.
        starts, lengths: int32 [b], the valid slots of each row.

    Returns:
        int64 [b, Hk, len(edges) + 1]: the number of tokens with Theta < edges[0], then with edges[i] <= Theta <
        edges[i + 1], last with edges[-1] <= Theta. They add up to the tokens that count.

    Source: ProtoKV, Eq. 5; Fig. 2.
    """
    theta = outlier_degree(k, kappa=kappa, starts=starts, lengths=lengths)
    edges = torch.as_tensor(edges, dtype=torch.float32, device=k.device)
    bins = torch.bucketize(theta, edges, right=True)
    counts = theta.new_zeros((*theta.shape[:2], len(edges) + 1), dtype=torch.int64)
    return counts.scatter_add_(2, bins, theta.isfinite().long())


def sat_counts(
    k: Tensor,
    thresholds: Sequence[float] | Tensor = (1.5, 1.75, 2.0),
    kappa: int = 5,
    *,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """The number of anchors of each head: tokens with Theta > threshold.

    Args:
        k: [b, Hk, n, d].
        thresholds: of Theta, in standard deviations.
        kappa: neighbours on either side, as in `ops.outlier_degree`.
        starts, lengths: int32 [b], the valid slots of each row.

    Returns:
        int64 [b, Hk, len(thresholds)].

    Source: ProtoKV, App. N; Fig. 37.
    """
    return _members(outlier_degree(k, kappa=kappa, starts=starts, lengths=lengths), thresholds).sum(-1)


class Clustering(NamedTuple):
    """What `clustering_degree` returns: each [b, Hk, thresholds]."""

    degree: Tensor  # fp64, Gamma = intra / inter
    intra: Tensor  # fp64, mean cosine between anchors
    inter: Tensor  # fp64, mean cosine between anchors and the other tokens
    tokens: Tensor  # int64, number of anchors


def clustering_degree(
    k: Tensor,
    thresholds: Sequence[float] | Tensor,
    kappa: int = 5,
    *,
    distinct: bool = False,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Clustering:
    """Whether anchors cluster: C are the tokens with Theta > threshold. ::

        S_intra = mean over i, j in C of cos(k_i, k_j)              Gamma = S_intra / S_inter
        S_inter = mean over i in C, j not in C of cos(k_i, k_j)

    No pair is ever formed: the sum over pairs is a product of two sums of unit keys, O(n d) for each threshold.

    Args:
        k: [b, Hk, n, d].
        thresholds: of Theta, in standard deviations.
        kappa: neighbours on either side, as in `ops.outlier_degree`.
        distinct: leaves the pairs i = j out of S_intra. They are in the definition, and raise it by up to 1 / |C|: a
            single anchor has S_intra 1, so Gamma grows with the threshold where nothing clusters.
        starts, lengths: int32 [b], the valid slots of each row.

    Returns:
        Gamma, S_intra, S_inter and |C|, each [b, Hk, len(thresholds)]. NaN where there is no pair: S_intra of no anchor
        (distinct: of one), S_inter of none or of all tokens.

    Source: ProtoKV, Def. 3, Eq. 6; Fig. 4.
    """
    theta = outlier_degree(k, kappa=kappa, starts=starts, lengths=lengths)
    counts = theta.isfinite()
    unit = normalize(torch.where(counts.unsqueeze(-1), k, 0.0).double(), dim=-1, eps=torch.finfo(torch.float64).tiny)
    members = _members(theta, thresholds).double()  # [b, Hk, thresholds, n]
    anchors = members @ unit  # [b, Hk, thresholds, d]
    others = unit.sum(2, keepdim=True) - anchors
    size = members.sum(-1)
    within, pairs = anchors.square().sum(-1), size * size
    if distinct:
        with_itself = (members @ unit.square().sum(-1, keepdim=True)).squeeze(-1)  # 1 each; 0 for a zero key
        within, pairs = within - with_itself, pairs - size
    between, mixed_pairs = (anchors * others).sum(-1), size * (counts.sum(-1, keepdim=True) - size)
    intra = torch.where(pairs > 0, within / pairs, torch.nan)
    inter = torch.where(mixed_pairs > 0, between / mixed_pairs, torch.nan)
    return Clustering(intra / inter, intra, inter, size.long())


def cumulative_attention(
    k: Tensor,
    q: Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """How much an answer attends to each token of its prompt. ::

        A_j = mean over the answer's queries and the group's query heads of softmax over the prompt of scale * q . k_j

    Args:
        k: [b, Hk, n, d].
        q: [b, Hq, any, d], of k's dtype, the queries of the answer; all of them see the whole prompt.
        scale, softcap, sink_logits: those of the model's attention, as in `ops.window_scores`.
        starts, lengths: int32 [b], the valid slots of each row.

    Returns:
        fp32 [b, Hk, n]; each head sums to 1, less what a sink takes.

    Raises:
        TypeError, ValueError: q does not fit k, or has no rows.

    Source: ProtoKV, Def. 1, Eq. 1, as a mean.
    """
    check_queries("cumulative_attention", "q", q, k)
    rows, end = q.shape[2], span_ends(k, starts, lengths)
    visible = causal_limits(end, 1, k.device).repeat_interleave(rows, -1)
    options: dict[str, Any] = dict(scale=scale, softcap=softcap, sink_logits=sink_logits, starts=starts)
    total = summed_scores(q, k, visible, None, **options)
    assert total is not None  # q has rows
    return total / rows


def attention_by_outlier_group(
    k: Tensor,
    q: Tensor,
    kappa: int = 5,
    *,
    groups: int = 10,
    skip: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Whether answers attend to anchors: the `cumulative_attention` of groups of tokens by outlier degree.

    The tokens are ranked by Theta, the highest first, ties by slot, and cut into groups whose sizes differ by one at
    most.

    Args:
        k: [b, Hk, n, d].
        q: [b, Hq, any, d], of k's dtype, the queries of the answer.
        kappa: neighbours on either side, as in `ops.outlier_degree`.
        groups: number of groups.
        skip: first tokens of each row that are in no group, such as attention sinks (10 in Fig. 30). The attention to
            them still counts in the softmax.
        scale, softcap, sink_logits: those of the model's attention, as in `ops.window_scores`.
        starts, lengths: int32 [b], the valid slots of each row.

    Returns:
        fp32 [b, Hk, groups]; each head sums to 1, less the skipped tokens and what a sink takes.

    Raises:
        TypeError, ValueError: wrong groups or skip, or q does not fit k.

    Source: ProtoKV, Fig. 5.
    """
    for name, value, low in (("groups", groups, 1), ("skip", skip, 0)):
        check_int("attention_by_outlier_group", name, value, low)
    options: dict[str, Any] = dict(scale=scale, softcap=softcap, sink_logits=sink_logits)
    attention = cumulative_attention(k, q, **options, starts=starts, lengths=lengths)
    theta = outlier_degree(k, kappa=kappa, starts=starts, lengths=lengths)
    first = torch.zeros_like(theta[:, :1, 0], dtype=torch.int64) if starts is None else starts[:, None]
    grouped = theta.isfinite() & (torch.arange(k.shape[2], device=k.device) >= (first + skip).unsqueeze(-1))
    order = torch.where(grouped, theta, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    rank = order.argsort(-1)
    group = rank * groups // grouped.sum(-1, keepdim=True).clamp(min=1)
    shares = attention.new_zeros((*attention.shape[:2], groups))
    return shares.scatter_add_(2, group.clamp(max=groups - 1), torch.where(grouped, attention, 0.0))


def _members(theta: Tensor, thresholds: Sequence[float] | Tensor) -> Tensor:
    """bool [b, Hk, thresholds, n]: the tokens above each threshold; what does not count (NaN) is above none."""
    thresholds = torch.as_tensor(thresholds, dtype=torch.float32, device=theta.device)
    return theta.unsqueeze(2) > thresholds[:, None]
