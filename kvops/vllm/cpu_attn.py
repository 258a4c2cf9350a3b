"""vLLM's CPU_ATTN backend with KV-cache eviction, on vLLM's attention and on kvops' own (`OwnBackend`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from ..cache.queries import AllQueries, Batch, FullObservation
from ..methods.queries import QueryPolicy
from ..ops.api import Reduce, window_attention
from . import attention, cpu_pages
from .layouts import Layout, PageRows, Tiles
from .steps import Step
from .worker import EvictingBackend, EvictingBuilder, EvictingImpl, refuse


class Builder(EvictingBuilder, CPUAttentionMetadataBuilder):
    def check_group(self) -> None:
        super().check_group()
        if self.isa not in cpu_pages.ISAS:
            refuse("CPU_ATTN's kernel", f"one of {', '.join(cpu_pages.ISAS)}", self.isa)


class Impl(EvictingImpl, CPUAttentionBackendImpl):
    def layout(self, layer: Any, kv_cache: Tensor) -> Layout:
        return Tiles(kv_cache, layer.isa)


class Backend(EvictingBackend, CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder


class OwnBuilder(EvictingBuilder, attention.Builder):
    """Policies that add up the attention of all queries get it from the step's attention, where kvops computes it."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._all: AllQueries | None = None  # in place of the observer, for the requests that vLLM's kernel attends
        if isinstance(self._observer, AllQueries) and by_product(self._observer.rule):
            self._all, self._observer = self._observer, None

    def build(self, *args: Any, **options: Any) -> Any:
        self._observation: FullObservation | None = None  # `_copied` sets it
        metadata = super().build(*args, **options)
        if self._all is not None and self.plan is not None:
            metadata.step = metadata.step or Step(self.plan, None, [])
            metadata.step.observation, metadata.adds_up = self._observation, True
        return metadata

    def _copied(
        self, m: CommonAttentionMetadata, starts: Sequence[int], totals: Sequence[int], requests: list[int]
    ) -> attention.Copied:
        if self._all is not None:
            first, last, lengths = (
                torch.tensor([x[i + more] for i in requests]) for x, more in ((starts, 0), (starts, 1), (totals, 0))
            )
            table = m.block_table_tensor[requests]
            self._observation = self._all.step(
                Batch(table, first, lengths - (last - first), lengths), [], table, lengths
            )
        return super()._copied(m, starts, totals, requests)


def by_product(rule: QueryPolicy) -> bool:
    """Return whether `window_attention` computes the sums that the rule adds up."""
    return (rule.score, rule.reduce) == ("softmax", "sum") and rule.operator_reduce in ("mean", "sum")


class OwnImpl(EvictingImpl, attention.Impl):
    _sums: Tensor | None = None  # fp32 [num_blocks + 1, Hk, block_size], to which the step's attention adds its scores
    _group_reduce: Reduce

    def layout(self, layer: Any, kv_cache: Tensor) -> Layout:
        return PageRows(kv_cache)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        *args: Any,
        **options: Any,
    ) -> Tensor:
        self._sums = None
        if getattr(attn_metadata, "adds_up", False):
            step, writes = attn_metadata.step, attn_metadata.parts.writes
            self._sums = self.memory(step.plan, kv_cache).slots["scores"]
            self._group_reduce = step.plan.policy.operator_reduce
            self._sums[writes.page, :, writes.slot] = 0.0
        return super().forward(layer, query, key, value, kv_cache, attn_metadata, *args, **options)

    def attend(self, window: attention.Window, q: Tensor, k: Tensor, v: Tensor, logits: dict[str, Any]) -> Tensor:
        if self._sums is None:
            return super().attend(window, q, k, v, logits)
        table = window.table
        out, _, scores = window_attention(
            q, k, v, window.visible, block_table=table, group_reduce=self._group_reduce, **logits
        )
        # Slots that no query sees get 0, so the pages behind a request's own are not changed.
        pages = scores.unflatten(2, (table.shape[1], -1)).transpose(1, 2).flatten(0, 1)
        self._sums.index_add_(0, table.flatten(), pages)
        return out


class OwnBackend(EvictingBackend, attention.Backend):
    @staticmethod
    def get_impl_cls() -> type[OwnImpl]:
        return OwnImpl

    @staticmethod
    def get_builder_cls() -> type[OwnBuilder]:
        return OwnBuilder
