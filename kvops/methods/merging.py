"""Merging on eviction: evicted values are averaged into the kept token with the most similar key.

The kept keys are the prototypes of the evicted ones:

```text
c(j) = argmax over the kept slots i of cos(k_j, k_i)                      for each evicted token j
v_i  = mean of v_i and of all v_j with c(j) = i, per channel              for each kept slot i; k_i is unchanged
```

A value that was merged before counts as one value in the next mean. Values that are not finite are left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import assign_prototypes, cluster_mean
from .select import gather_rows, readable_keys
from .view import View


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
    prototypes = gather_rows(k, at).float()
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
