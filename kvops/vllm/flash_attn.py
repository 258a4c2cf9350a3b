"""vLLM's FLASH_ATTN backend with KV-cache eviction."""

from __future__ import annotations

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from .worker import EvictingBackend, EvictingBuilder, EvictingImpl


class Builder(EvictingBuilder, FlashAttentionMetadataBuilder):
    pass


class Impl(EvictingImpl, FlashAttentionImpl):
    pass


class Backend(EvictingBackend, FlashAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder
