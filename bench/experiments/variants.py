"""Variants of methods that explain a result, or that a paper mentions in passing. They are no methods of kvops.

    variants=bench/experiments/variants.py
    python -m kvops.eval --methods laq laq++ $variants:ObserveOnly $variants:ProtectOnly

docs/evaluation.md and docs/methods/ have the results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

import kvops
from kvops.bench.eager import cluster_centers
from kvops.methods.laq import lookahead_limits
from kvops.methods.snapkv import layer_budget
from kvops.ops import assign_prototypes


@dataclass(frozen=True, eq=False)
class ObserveOnly(kvops.LAQ):
    """LAQ++ whose local queries observe, but whose local tokens compete like all others."""

    window: int = 8

    def observe_draft(
        self,
        view: kvops.View,
        local: Tensor | None,
        ahead: Tensor,
        lengths: Tensor | None,
        lse: Tensor | None,
        logits: Mapping[str, Any],
    ) -> None:
        assert local is not None  # a cache passes it
        place = view.rows, view.k.device
        visible = lookahead_limits(self.name, view.end, self.window, ahead.shape[2], False, lengths, *place)
        view.window = 0
        view.observed = self.summed(torch.cat((local, ahead), 2), view, visible, lse, None, logits)


@dataclass(frozen=True, eq=False)
class ProtectOnly(kvops.LAQ):
    """LAQ++ whose local tokens are kept, but whose local queries do not observe."""

    window: int = 8

    def observe_draft(
        self,
        view: kvops.View,
        local: Tensor | None,
        ahead: Tensor,
        lengths: Tensor | None,
        lse: Tensor | None,
        logits: Mapping[str, Any],
    ) -> None:
        visible = lookahead_limits(self.name, view.end, 0, ahead.shape[2], False, lengths, view.rows, view.k.device)
        view.window = self.window
        view.observed = self.summed(ahead, view, visible, lse, view.end - self.window, logits)


@dataclass(frozen=True, eq=False)
class TheAnswerIs(kvops.LAQ):
    """LAQ that reads a fixed text in place of a draft (the paper's App. B). The shipped model's tokens are bytes."""

    template: tuple[int, ...] = tuple(b"The answer is")


@dataclass(frozen=True, eq=False)
class FoundTheAnswer(kvops.LAQ):
    """The same with the paper's other text."""

    template: tuple[int, ...] = tuple(b"I have found the answer!")


@dataclass(frozen=True, eq=False)
class KVzipAlone(kvops.KVzip):
    """KVzip whose passes read a chunk alone: no instruction, and no end of the user's turn."""

    instruction: tuple[int, ...] | None = ()
    next_instruction: tuple[int, ...] | None = ()
    suffix: tuple[int, ...] | None = ()


class Pyramid:
    """Shares a budget among the layers like PyramidKV."""

    @property
    def uniform_layers(self) -> bool:
        return False

    def room(self, view: kvops.View) -> int:
        return layer_budget(super().room(view), view.seen, self.window, *view.layer_and_count(self.name))


@dataclass(frozen=True, eq=False)
class PyramidLAQ(Pyramid, kvops.LAQ):
    """LAQ with PyramidKV's budgets (the paper's Sec. 5.2 suggests it)."""


@dataclass(frozen=True, eq=False)
class PyramidProtoKV(Pyramid, kvops.ProtoKV):
    """ProtoKV with PyramidKV's budgets (one of the layer-wise allocations of the paper's Table 4)."""


@dataclass(frozen=True, eq=False)
class KMeansKV(kvops.ProtoKV):
    """ProtoKV with clusters of K-means, as ClusterKV and SqueezedAttention have them (the paper's Fig. 7, Table 3).

    K-means of the keys' directions: as many clusters as ProtoKV's, first around evenly spaced tokens.

    Attributes:
        iterations: How often every token is assigned to its nearest center.
    """

    iterations: int = 20

    def assign(self, view: kvops.View, starts: Tensor | None, prefix: Tensor) -> Tensor:
        count, places = self.chunks(view)[0] + self.num_buckets, (view.rows, view.heads)
        first = torch.zeros_like(prefix) if starts is None else starts
        steps = torch.arange(count, device=view.k.device) * prefix[:, None] // count
        slots = (first[:, None] + steps)[:, None, :, None].expand(*places, count, view.k.shape[3])
        keys = normalize(view.k.float(), dim=-1)
        centers = keys.gather(2, slots)
        for left in reversed(range(self.iterations)):
            clusters = assign_prototypes(view.k, centers, starts=starts, lengths=prefix)
            if left:
                at = clusters.masked_fill(clusters < 0, count).long()
                means, sizes = (x[:, :, :count] for x in cluster_centers(keys, at, count + 1))
                centers = torch.where(sizes.unsqueeze(-1) > 0, means, centers)  # an empty one stays
        return clusters
