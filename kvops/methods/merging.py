"""Merging on eviction: evicted values are averaged into the kept token with the most similar key."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from ..ops import assign_prototypes, cluster_mean
from ..ops.checks import check_bool
from .base import KeyPolicy, Out
from .select import readable_keys
from .view import View


@dataclass(frozen=True, eq=False)
class MergingPolicy(KeyPolicy):
    """A `KeyPolicy` that can merge the values that it evicts into those that it keeps.

    The kept keys are the prototypes of the evicted ones:

    ```text
    c(j) = argmax over the kept slots i of cos(k_j, k_i)                      for each evicted token j
    v_i  = mean of v_i and of all v_j with c(j) = i, per channel              for each kept slot i; k_i is unchanged
    ```

    A value that was merged before counts as one value in the next mean. Values that are not finite are left out.

    Attributes:
        merge: Merge evicted values. This needs n * m * d multiply-adds per head for m kept tokens, and 8 n dv bytes of
            memory per head until it is done. Pages, and engines that move tokens by themselves, are refused.
    """

    _: KW_ONLY
    merge: bool = False

    def check(self) -> None:
        check_bool(self.name, "merge", self.merge)
        super().check()

    @property
    def merges(self) -> bool:
        return self.merge

    def move(self, view: View, indices: Tensor, out: Out = None) -> tuple[Tensor, Tensor]:
        if not self.merge or indices.shape[2] in (0, view.n):
            return super().move(view, indices, out)
        merged, changed = merged_values(self.name, view, indices)  # before an eviction in place overwrites v
        k, v = super().move(view, indices, out)
        kept = readable_keys(self.name, v)
        v.copy_(torch.where(changed & kept.isfinite(), merged, kept.float()))
        return k, v


def merged_values(op: str, view: View, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Average the evicted values into the kept ones.

    Args:
        op: The name in errors.
        view: The slots before the eviction.
        indices: int64 [b, Hk, m], the slots to keep; -1 for none.

    Returns:
        fp32 [b, Hk, m, dv], the means; and bool [b, Hk, m, dv], where a mean is of several values.
    """
    k, v, m = readable_keys(op, view.k), readable_keys(op, view.v), indices.shape[2]
    first = 0 if view.starts is None else view.starts[:, None, None]
    end = view.end if isinstance(view.end, int) else view.end[:, None, None]
    kept = (indices >= first) & (indices < end)  # not padding
    at = indices.clamp(min=0)
    prototypes = k.gather(2, at.unsqueeze(-1).expand(-1, -1, -1, k.shape[3])).float()
    prototypes = prototypes.masked_fill(~kept.unsqueeze(-1), torch.nan)  # which no key is assigned to
    clusters = assign_prototypes(view.k, prototypes, **view.slots)
    # A kept token belongs to its own cluster. The last column takes the writes of missing entries.
    own = torch.arange(m, dtype=torch.int32, device=at.device).expand_as(at)
    clusters = torch.nn.functional.pad(clusters, (0, 1)).scatter_(2, torch.where(indices < 0, view.n, at), own)
    clusters = clusters[..., : view.n]
    sizes = at.new_zeros((*at.shape[:2], m + 1))
    sizes.scatter_add_(2, torch.where(clusters < 0, m, clusters).long(), torch.ones_like(clusters, dtype=torch.int64))
    channels = v.shape[3]
    means = cluster_mean(
        v.float().mT.flatten(1, 2).contiguous(),
        clusters.repeat_interleave(channels, 1),
        num_clusters=m,
    ).unflatten(1, (-1, channels))
    means = means.mT
    several = kept & (sizes[..., :m] > 1)
    return means, several.unsqueeze(-1) & means.isfinite()
