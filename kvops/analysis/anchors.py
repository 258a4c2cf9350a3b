"""Measurements of semantic anchors in a model's keys, as defined by ProtoKV, on the tensors of one layer.

Every function takes k: [b, Hk, n, d], the keys of a prompt as the cache holds them. `kappa`, `starts` and `lengths` are
those of `kvops.ops.outlier_degree`, whose outlier degree Theta is high for semantic anchors (SATs) and low for tokens
that are similar to their neighbours. Invalid slots and keys that are not finite are ignored.
`bench/experiments/anchors.py` applies the functions to a model and plots the results.

Source: "ProtoKV: Long-context Knowledges Are Already Well-Organized Before Your Query", Sec. 3, App. B, C, E, F, N.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..ops import outlier_degree
from ..ops.checks import check_int, plain
from .attention import cumulative_attention

__all__ = [
    "Clustering",
    "attention_by_outlier_group",
    "clustering_degree",
    "neighbourhood_similarity",
    "outlier_histogram",
    "sat_counts",
]


def neighbourhood_similarity(
    k: Tensor, kappa: int = 5, *, starts: Tensor | None = None, lengths: Tensor | None = None
) -> Tensor:
    """Compute each key's similarity to its neighbours: S, its mean cosine with itself and kappa keys on either side.

    Args:
        k: [b, Hk, n, d].
        kappa: Neighbours on either side, as in `ops.outlier_degree`.
        starts: int32 [b], the first valid slot of each row.
        lengths: int32 [b], the number of valid slots of each row.

    Returns:
        fp32 [b, Hk, n]; NaN for invalid slots and for keys that are not finite.

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
    """Compute the histogram of each head's outlier degrees Theta.

    Args:
        k: [b, Hk, n, d].
        edges: The edges of the bins, ascending.
        kappa: Neighbours on either side, as in `ops.outlier_degree`.
        starts: int32 [b], the first valid slot of each row.
        lengths: int32 [b], the number of valid slots of each row.

    Returns:
        int64 [b, Hk, len(edges) + 1]: the number of tokens with Theta < edges[0], then with edges[i] <= Theta <
        edges[i + 1], and last with edges[-1] <= Theta. The sum is the number of valid tokens with finite keys.

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
    """Count the anchors of each head: the tokens with Theta > threshold.

    Args:
        k: [b, Hk, n, d].
        thresholds: Thresholds of Theta, in standard deviations.
        kappa: Neighbours on either side, as in `ops.outlier_degree`.
        starts: int32 [b], the first valid slot of each row.
        lengths: int32 [b], the number of valid slots of each row.

    Returns:
        int64 [b, Hk, len(thresholds)].

    Source: ProtoKV, App. N; Fig. 37.
    """
    return _members(outlier_degree(k, kappa=kappa, starts=starts, lengths=lengths), thresholds).sum(-1)


class Clustering(NamedTuple):
    """The result of `clustering_degree`; each tensor is [b, Hk, thresholds].

    Attributes:
        degree: fp64, Gamma = intra / inter.
        intra: fp64, the mean cosine between anchors.
        inter: fp64, the mean cosine between anchors and the other tokens.
        tokens: int64, the number of anchors.
    """

    degree: Tensor
    intra: Tensor
    inter: Tensor
    tokens: Tensor


def clustering_degree(
    k: Tensor,
    thresholds: Sequence[float] | Tensor,
    kappa: int = 5,
    *,
    distinct: bool = False,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Clustering:
    """Measure whether the anchors, C = the tokens with Theta > threshold, form a cluster.

    ```text
    S_intra = mean over i, j in C of cos(k_i, k_j)              Gamma = S_intra / S_inter
    S_inter = mean over i in C, j not in C of cos(k_i, k_j)
    ```

    The function forms no pairs: the sum over pairs is a product of two sums of unit keys, O(n d) per threshold.

    Args:
        k: [b, Hk, n, d].
        thresholds: Thresholds of Theta, in standard deviations.
        kappa: Neighbours on either side, as in `ops.outlier_degree`.
        distinct: Leave the pairs i = j out of S_intra. The definition includes them, and they raise S_intra by up to
            1 / |C|. A single anchor has S_intra 1, so Gamma grows with the threshold even where nothing clusters.
        starts: int32 [b], the first valid slot of each row.
        lengths: int32 [b], the number of valid slots of each row.

    Returns:
        Gamma, S_intra, S_inter and |C|, each [b, Hk, len(thresholds)]. A mean over no pairs is NaN: S_intra without
        anchors (with `distinct` also for a single one), S_inter if no token or every token is an anchor.

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
    """Measure whether answers attend to anchors: the `cumulative_attention` of groups of tokens by outlier degree.

    The tokens are ranked by Theta, highest first and ties by slot, and cut into groups whose sizes differ by at most
    one.

    Args:
        k: [b, Hk, n, d].
        q: [b, Hq, any, d] of k's dtype, the queries of the answer.
        kappa: Neighbours on either side, as in `ops.outlier_degree`.
        groups: The number of groups.
        skip: First tokens of each row that are left out of all groups, such as attention sinks (10 in Fig. 30). They
            still count in the softmax.
        scale: The scale of the model's attention, as in `ops.window_scores`.
        softcap: The softcap of the model's attention; 0 for none.
        sink_logits: fp32 [Hq], the sink logits of the model's attention.
        starts: int32 [b], the first valid slot of each row.
        lengths: int32 [b], the number of valid slots of each row.

    Returns:
        fp32 [b, Hk, groups]. Each head sums to 1, minus the weights of the skipped tokens and of a sink.

    Raises:
        TypeError: groups or skip is not an int, or q or k is not a tensor.
        ValueError: groups or skip is too small, or q does not fit k.

    Source: ProtoKV, Fig. 5.
    """
    for name, value, low in (("groups", groups, 1), ("skip", skip, 0)):
        check_int("attention_by_outlier_group", name, value, low)
    groups, skip = plain(groups), plain(skip)
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
    """The tokens above each threshold: bool [b, Hk, thresholds, n]. NaN is above none."""
    thresholds = torch.as_tensor(thresholds, dtype=torch.float32, device=theta.device)
    return theta.unsqueeze(2) > thresholds[:, None]
