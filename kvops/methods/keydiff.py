"""KeyDiff: keeps the keys that look least like the mean key.

Source: "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in Resource-Constrained
Environments", Sec. 3 (Eq. 7, 8), sliding window: Sec. 3.2 and App. E, ablations: Sec. 4.4. Decisions:
docs/methods/keydiff.md.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..cache import Method
from ..ops import anchor_cosine
from .common import (
    Compressed,
    budget_tokens,
    check_choice,
    check_head_mode,
    check_holds,
    check_int,
    check_rank,
    in_place,
    moved,
    recent_tokens,
    select_budget,
    shared_scores,
)

METRICS = ("cosine", "dot", "euclidean")
ANCHORS = ("mean", "median", "pairwise")


def keydiff_compress(
    k: Tensor,
    v: Tensor,
    budget: int | float,
    *,
    sinks: int = 0,
    recent: int | float = 0,
    normalize_anchor: bool = True,
    metric: str = "cosine",
    anchor: str = "mean",
    head_mode: str = "per_head",
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    fill_invalid: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> Compressed:
    """KeyDiff in one call. k: [b, Hk, n, d], v: [b, Hk, n, dv] -> (k, v, indices) with min(budget, n) slots. ::

        mu = mean_j k_j / ||k_j||;   score_i = -cos(k_i, mu);   the budget's highest scores stay, per head

    budget: tokens (int), or a fraction in (0, 1] of the valid slots (float): max(1, int(budget * n)).
    sinks: first tokens that always stay. recent: newest tokens that always stay (int), or a share in [0, 1) of the
        budget (float). Both count towards the budget, which must hold them.
    normalize_anchor: False takes the mean of the keys as they are.
    metric: "cosine"; ablations "dot" (-k_i . mu) and "euclidean" (||k_i - mu||).
    anchor: "mean"; ablations "median" (per channel) and "pairwise" (Eq. 7: minus the mean cosine with every key).
    head_mode: "per_head", or "shared": one kept set for all heads, by the mean score.
    starts, lengths: int32 [b], the valid slots of each row. Rows that keep fewer end in -1 (zeros in k and v), or with
        `fill_invalid` keep their lowest invalid slots instead.
    out: (k_out, v_out) of the result's shapes to write to.

    The ablations run in plain PyTorch. TypeError or ValueError for wrong arguments, before anything is written.
    """
    indices = _indices(
        k, budget, sinks, recent, normalize_anchor, metric, anchor, head_mode, starts, lengths, fill_invalid
    )
    return moved("keydiff_compress", k, v, indices, out)


keydiff_compress_ = in_place(keydiff_compress)


def _check(op: str, metric: str, anchor: str, head_mode: str) -> None:
    check_choice(op, "metric", metric, METRICS)
    check_choice(op, "anchor", anchor, ANCHORS)
    check_head_mode(op, head_mode)
    if anchor == "pairwise" and metric != "cosine":
        raise ValueError(f"{op}: anchor='pairwise' (Eq. 7) is defined for metric='cosine', got metric={metric!r}")


def _indices(
    k, budget, sinks, recent, normalize_anchor, metric, anchor, head_mode, starts, lengths, fill_invalid
) -> Tensor:
    """The kept slots of one call, [b, Hk, m]."""
    op = "keydiff_compress"
    _check(op, metric, anchor, head_mode)
    check_rank(op, k)
    if metric == "cosine" and anchor == "mean":
        scores = anchor_cosine(k, normalize_anchor=normalize_anchor, starts=starts, lengths=lengths)
    else:
        scores = _ablation_scores(k, normalize_anchor, metric, anchor, starts, lengths)
    if head_mode == "shared":
        scores = shared_scores(scores)
    return select_budget(op, scores, k.shape[1], budget, sinks, recent, starts, lengths, fill_invalid)


def _ablation_scores(k, normalize_anchor, metric, anchor, starts, lengths) -> Tensor:
    """Scores of the paper's ablations (Sec. 4.4), fp32 [b, Hk, n]; NaN for keys that are invalid or not finite."""
    keys = k.float()
    usable = keys.isfinite().all(-1, keepdim=True)  # [b, Hk, n, 1]
    slots = torch.arange(k.shape[2], device=k.device)
    if starts is not None:
        usable = usable & (slots >= starts[:, None])[:, None, :, None]
    if lengths is not None:
        end = lengths if starts is None else starts + lengths
        usable = usable & (slots < end[:, None])[:, None, :, None]
    tiny = torch.finfo(torch.float32).tiny
    keys = torch.where(usable, keys, 0.0)
    unit = normalize(keys, dim=-1, eps=tiny)
    count = usable.sum(2, keepdim=True)  # [b, Hk, 1, 1]; where it is 0 all scores are NaN anyway
    if anchor == "pairwise":
        blocks = [-(block @ unit.mT).sum(-1, keepdim=True) for block in unit.split(1024, 2)]
        scores = torch.cat(blocks, 2) / count
    else:
        members = unit if normalize_anchor else keys
        if anchor == "mean":
            mu = members.sum(2, keepdim=True) / count
        else:
            mu = torch.where(usable, members, torch.nan).nanmedian(2, keepdim=True).values
        if metric == "cosine":
            scores = -(unit * normalize(mu, dim=-1, eps=tiny)).sum(-1, keepdim=True)
        elif metric == "dot":
            scores = -(keys * mu).sum(-1, keepdim=True)
        else:
            scores = torch.linalg.vector_norm(keys - mu, dim=-1, keepdim=True)
    return torch.where(usable, scores, torch.nan).squeeze(-1)


class KeyDiff(Method):
    """KeyDiff's cache of one layer: after each append only the budget's least similar keys stay.

    Append blocks of the prompt (128 in the paper) and it never holds more than budget + block; one whole prompt is
    `keydiff_compress`. The anchor is a running sum: new keys are added, evicted ones subtracted, and it is computed
    anew after `refresh` evictions (fp32 sums drift) or when that is less work.

    Settings as in `keydiff_compress`; a fraction is one of the tokens seen, but never less than sinks + recent.
    """

    _state = (*Method._state, "_sum")

    def __init__(
        self,
        budget: int | float,
        *,
        sinks: int = 0,
        recent: int | float = 0,
        normalize_anchor: bool = True,
        metric: str = "cosine",
        anchor: str = "mean",
        head_mode: str = "per_head",
        refresh: int = 1024,
        attend_before_compress: bool = True,
    ):
        _check("KeyDiff", metric, anchor, head_mode)
        check_int("KeyDiff", "sinks", sinks, 0)
        check_int("KeyDiff", "refresh", refresh, 1)
        keep = budget_tokens("KeyDiff", budget, 1)
        window = recent_tokens("KeyDiff", recent, keep)
        if isinstance(budget, int):
            check_holds("KeyDiff", keep, sinks, window)
        self.budget, self.sinks, self.recent, self.normalize_anchor = budget, sinks, recent, normalize_anchor
        self.metric, self.anchor, self.head_mode, self.refresh = metric, anchor, head_mode, refresh
        super().__init__(attend_before_compress)

    def reset(self) -> None:
        super().reset()
        self._sum: Tensor | None = None  # fp32 [b, Hk, d]: sum of the (normalized) keys of the first `_summed` slots
        self._summed = 0
        self._drift = 0  # evictions since the sum was computed anew

    def _evict(self, k: Tensor, v: Tensor, pads: Tensor | None, seen: int) -> Tensor | None:
        keep = budget_tokens("KeyDiff", self.budget, seen)
        window = recent_tokens("KeyDiff", self.recent, keep)
        keep = max(keep, self.sinks + window)
        evicted = k.shape[2] - keep
        if evicted <= 0:
            return None
        total = None
        if self.metric == "cosine" and self.anchor == "mean":
            if self._sum is not None:
                new_pads = None if pads is None else (pads - self._summed).clamp(min=0)
                total = self._sum + self._key_sum(k[:, :, self._summed :], new_pads)
            scores, total = anchor_cosine(
                k, anchor=total, normalize_anchor=self.normalize_anchor, starts=pads, return_anchor=True
            )
        else:
            scores = _ablation_scores(k, self.normalize_anchor, self.metric, self.anchor, pads, None)
        if self.head_mode == "shared":
            scores = shared_scores(scores)
        indices = select_budget(
            "KeyDiff", scores, k.shape[1], keep, self.sinks, window, pads, None, fill_invalid=pads is not None
        )
        drift = self._drift + evicted
        if total is None or drift >= self.refresh or evicted > keep:
            self._sum, self._drift = None, 0
        else:
            slots = _complement(indices, k.shape[2])
            gone = k.gather(2, slots.unsqueeze(-1).expand(-1, -1, -1, k.shape[3]))
            # Padding is the first to go.
            self._sum = total - self._key_sum(gone, None if pads is None else pads.clamp(max=evicted))
            self._drift = drift
        self._summed = keep
        return indices

    def _key_sum(self, k: Tensor, pads: Tensor | None) -> Tensor:
        """Sum of the (normalized) valid finite keys, fp32 [b, Hk, d]."""
        return anchor_cosine(k, normalize_anchor=self.normalize_anchor, starts=pads, return_anchor=True)[1]


def _complement(indices: Tensor, n: int) -> Tensor:
    """The slots of [0, n) that are not in `indices` (ascending, none missing): int64 [b, Hk, n - m], ascending.

    Before the kept slot indices[i] lie indices[i] - i evicted ones, so the j-th evicted slot has as many kept ones
    before it as there are i with indices[i] - i <= j.
    """
    m = indices.shape[2]
    before = (indices - torch.arange(m, device=indices.device)).contiguous()
    j = torch.arange(n - m, device=indices.device).expand(*indices.shape[:2], -1).contiguous()
    return j + torch.searchsorted(before, j, right=True)
