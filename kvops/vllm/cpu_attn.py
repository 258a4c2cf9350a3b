"""vLLM's CPU_ATTN backend with KV-cache eviction, on vLLM's attention and on kvops' own (`OwnBackend`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from . import attention, cpu_pages
from .layouts import Layout, PageRows, Tiles
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
    pass


class OwnImpl(EvictingImpl, attention.Impl):
    def layout(self, layer: Any, kv_cache: Tensor) -> Layout:
        return PageRows(kv_cache)


class OwnBackend(EvictingBackend, attention.Backend):
    @staticmethod
    def get_impl_cls() -> type[OwnImpl]:
        return OwnImpl

    @staticmethod
    def get_builder_cls() -> type[OwnBuilder]:
        return OwnBuilder
