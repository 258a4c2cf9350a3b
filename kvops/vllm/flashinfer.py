"""vLLM's FLASHINFER backend with KV-cache eviction."""

from __future__ import annotations

from vllm.v1.attention.backends.flashinfer import FlashInferBackend, FlashInferImpl, FlashInferMetadataBuilder

from .worker import EvictingBackend, EvictingBuilder, EvictingImpl


class Builder(EvictingBuilder, FlashInferMetadataBuilder):
    pass


class Impl(EvictingImpl, FlashInferImpl):
    pass


class Backend(EvictingBackend, FlashInferBackend):
    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder
