"""Caches that gather the statistics of a prompt's own queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..methods.base import BudgetPolicy
from ..methods.statistics import Moments, pooled, unrotated
from ..methods.view import OfLayer, View
from ..ops.rope import Rope
from .attending import check_attended
from .base import Cache

BLOCK = 1024  # queries that are converted to fp64 at a time


class StatisticsCache(Cache, kind="statistics"):
    """A cache for policies that score keys by the statistics of the prompt's queries; see `Needs.statistics`.

    `append` only stores. `attention` computes the step's attention, adds its queries to the statistics, and evicts.
    The queries are those of the first step and of each further step of several tokens, unless the cache is frozen.
    Padding and the first `sinks` tokens of a row do not count. A query's position is that of its token, padding left
    out. If several layers share these keys, the queries of the first one count.
    """

    policy: BudgetPolicy
    rope: Rope

    def reset(self) -> None:
        super().reset()
        self._due = 0  # appended rows whose attention has not been computed yet
        self._moments: Moments | None = None  # of the queries before RoPE
        self._gathered = 0  # tokens seen when the last queries were added
        self._scale: float | None = None

    def crop(self, seen: int) -> None:
        with self.undone_on_error():
            super().crop(seen)
            if not self.seen:
                self._moments, self._gathered = None, 0
            if self.seen < self._gathered:
                raise ValueError(
                    f"{self.name}: cannot crop to {seen} tokens, because the statistics include the queries of the "
                    f"first {self._gathered}; expected 0 or at least {self._gathered}, or copy the cache before the "
                    "tokens that you may take back"
                )

    def _append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        check_attended(self.name, self._due)
        self._due = k.shape[2]
        return super()._append(k, v)

    def _evict(self, view: View) -> Tensor | None:
        return None if self._due else super()._evict(view)  # eviction waits for the attention

    def _may_evict(self, new: int) -> bool:
        return not self._due and super()._may_evict(new)

    def attention(self, q: Tensor, k_step: Tensor, v_step: Tensor, **options: Any) -> Tensor:
        self._check_step(q, k_step, self._due)
        with self.undone_on_error():
            out = super().attention(q, k_step, v_step, **options)
            new, self._due = self._due, 0
            if not self.frozen and (new > 1 or self._moments is None):
                self._gather(q)
                self._scale, self._gathered = options.get("scale"), self.seen
            self._evict_step(new)
        return out

    def _gather(self, q: Tensor) -> None:
        """Add a step's queries, [b, Hq, t, d], to the moments."""
        positions = torch.arange(self.seen - q.shape[2], self.seen, device=q.device)
        if self._padding is not None:
            positions = positions - self._padding[:, None]
        for part, at in zip(q.split(BLOCK, 2), positions.split(BLOCK, -1)):
            plain = unrotated(part.float(), self.rope, at.clamp(min=0))
            self._moments = pooled(self._moments, plain, at >= self.policy.sinks)

    def _view(self, *args: Any, **options: Any) -> View:
        view = super()._view(*args, **options)
        if self._moments is not None:
            _, mean, cov = self._moments
            view.statistics = OfLayer(mean, cov, None, self.rope, self._scale)
        return view

    def _map(self, f: Callable[[Tensor], Tensor]) -> None:
        super()._map(f)
        if self._moments is not None:
            count, mean, cov = map(f, self._moments)
            self._moments = count, mean, cov
