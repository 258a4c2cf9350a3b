"""KeyDiff: keeps the keys that are least similar to the mean key.

Source: "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in Resource-Constrained
Environments", Sec. 3 (Eq. 7, 8), sliding window: Sec. 3.2 and App. E, ablations: Sec. 4.4. Decisions:
docs/methods/keydiff.md.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..ops import anchor_cosine
from ..ops.checks import check_bool, check_choice, check_int
from .base import KeyPolicy, Needs
from .precision import without_autocast
from .select import gather_rows, readable_keys
from .view import View

Metric = Literal["cosine", "dot", "euclidean"]
Anchor = Literal["mean", "median", "pairwise"]
METRICS: tuple[Metric, ...] = get_args(Metric)
ANCHORS: tuple[Anchor, ...] = get_args(Anchor)


@dataclass(frozen=True, eq=False)
class KeyDiff(KeyPolicy):
    """KeyDiff: keeps the keys that are least similar to the mean key, per head.

    ```text
    mu       = mean over j of k_j / ||k_j||
    score[i] = -cos(k_i, mu)
    ```

    If the prompt is appended in blocks (128 tokens in the paper), a cache never holds more than budget + block tokens;
    `keydiff_compress` takes the whole prompt at once. In decode the cache evicts as `buffer` says. The anchor mu is
    then a running sum: the cache adds new keys and subtracts evicted ones. It recomputes the sum after `refresh`
    evictions, because fp32 sums drift, or when that is less work.

    The ablations run in plain PyTorch.

    Attributes:
        budget: See `BudgetPolicy`.
        sinks: See `BudgetPolicy`. The paper protects none.
        recent: See `KeyPolicy`.
        head_mode: See `BudgetPolicy`.
        buffer: See `KeyPolicy`. The paper evicts after every token: buffer=1.
        protect: See `KeyPolicy`.
        normalize_anchor: If False, mu is the mean of the keys without normalization.
        metric: "cosine"; ablations "dot" (-k_i . mu) and "euclidean" (||k_i - mu||).
        anchor: "mean"; ablations "median" (per channel) and "pairwise" (Eq. 7: minus the mean cosine with every key).
        refresh: Evictions after which a cache recomputes the anchor.
        merge: Average evicted values into the kept tokens with the most similar keys; not part of the paper. This needs
            n * m * d multiply-adds per head for m kept tokens, and 8 n dv bytes of memory per head until it is done.
            Pages, and engines that move tokens by themselves, are refused.

    Source: KeyDiff, Sec. 3, Eq. 7, 8; ablations: Sec. 4.4.
    """

    _: KW_ONLY
    merge: bool = False
    normalize_anchor: bool = True
    metric: Metric = "cosine"
    anchor: Anchor = "mean"
    refresh: int = 1024

    @property
    def needs(self) -> Needs:
        return Needs(dense=self.ablation or self.merge, positions=False)

    def check(self) -> None:
        check_bool(self.name, "normalize_anchor", self.normalize_anchor)
        check_choice(self.name, "metric", self.metric, METRICS)
        check_choice(self.name, "anchor", self.anchor, ANCHORS)
        if self.anchor == "pairwise" and self.metric != "cosine":
            raise ValueError(
                f"{self.name}: anchor='pairwise' (Eq. 7) is defined for metric='cosine', got metric={self.metric!r}"
            )
        check_int(self.name, "refresh", self.refresh, 1)
        super().check()

    @property
    def ablation(self) -> bool:
        return self.metric != "cosine" or self.anchor != "mean"

    def scores(self, view: View) -> Tensor:
        if self.ablation:
            return ablation_scores(self.name, view, self.normalize_anchor, self.metric, self.anchor)
        return anchor_cosine(view.k, normalize_anchor=self.normalize_anchor, **view.slots)

    def evict(self, view: View) -> Tensor | None:
        if self.ablation or self.ragged:  # an anchor updated with each step has the tokens of all heads
            return super().evict(view)
        keep, k, pads = self.room(view), view.k, view.starts
        evicted = view.n - keep
        if not self.full(view, keep):
            return None
        # anchor: fp32 [b, Hk, d], the sum of the (normalized) keys of the first `summed` slots.
        # drift: evictions since the anchor was last recomputed.
        anchor, summed, drift = view.state.get("anchor"), view.state.get("summed", 0), view.state.get("drift", 0)
        if anchor is not None:
            anchor = anchor + self._key_sum(k[:, :, summed:], None if pads is None else (pads - summed).clamp(min=0))
        scores, anchor = anchor_cosine(
            k, anchor=anchor, normalize_anchor=self.normalize_anchor, starts=pads, return_anchor=True
        )
        indices = self.choose(scores, view, keep, recent=self.protected_in_cache(view))
        drift += evicted
        if drift >= self.refresh or evicted > keep:
            anchor, drift = None, 0
        else:
            slots = complement(indices, view.n)
            gone = gather_rows(k, slots)
            if pads is not None:  # all heads evict the same padding, which comes first
                pads = (slots[:, 0] < pads[:, None]).sum(-1, dtype=torch.int32)
            anchor = anchor - self._key_sum(gone, pads)
        view.state.update(anchor=anchor, summed=keep, drift=drift)
        return indices

    def _key_sum(self, k: Tensor, pads: Tensor | None) -> Tensor:
        """The sum of the (normalized) valid, finite keys: fp32 [b, Hk, d]."""
        return anchor_cosine(k, normalize_anchor=self.normalize_anchor, starts=pads, return_anchor=True)[1]


def ablation_scores(op: str, view: View, normalize_anchor: bool, metric: Metric, anchor: Anchor) -> Tensor:
    """The scores of the paper's ablations (Sec. 4.4): fp32 [b, Hk, n]; NaN for keys that are invalid or not finite."""
    keys, starts, lengths = readable_keys(op, view.k).float(), view.starts, view.lengths
    usable = keys.isfinite().all(-1, keepdim=True)  # [b, Hk, n, 1]
    slots = torch.arange(view.n, device=keys.device)
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
        with without_autocast(keys.device):
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


def complement(indices: Tensor, n: int) -> Tensor:
    """The slots of [0, n) that are not in `indices` (ascending, without -1): int64 [b, Hk, n - m], ascending.

    indices[i] - i evicted slots precede the kept slot indices[i]. The number of kept slots before the j-th evicted one
    is therefore the number of i with indices[i] - i <= j.
    """
    m = indices.shape[2]
    before = (indices - torch.arange(m, device=indices.device)).contiguous()
    j = torch.arange(n - m, device=indices.device).expand(*indices.shape[:2], -1).contiguous()
    return j + torch.searchsorted(before, j, right=True)
