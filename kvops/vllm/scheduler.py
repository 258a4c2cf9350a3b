"""vLLM's scheduler side: a kind of cache that holds fewer blocks than its tokens fill, and a manager that gives the
others back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from . import plugin
from .plan import Plan, plan

logger = init_logger("vllm.kvops")  # vLLM shows what is logged below its own name
_SECONDS = 10.0  # between two log lines of blocks given back


def plan_of(block_size: int) -> Plan:
    """The plan of KVOPS_VLLM's policy. Every process makes its own from the environment."""
    policy = plugin.policy()
    if policy is None:
        raise RuntimeError(f"kvops.vllm: {plugin.VARIABLE} must name the policy that the plugin began with, got none")
    return plan(policy, block_size)


@dataclass(frozen=True, kw_only=True)
class EvictingSpec(FullAttentionSpec):
    """Full attention over what a policy keeps.

    Attributes:
        max_tokens: of a request.
        tokens_in_flight: the most that are scheduled and not yet computed.
    """

    max_tokens: int
    tokens_in_flight: int

    @property
    def prefix_cacheable(self) -> bool:
        """Never: what a block holds follows from more than the tokens up to its end."""
        return False

    def most_blocks(self, max_tokens: int) -> int:
        """The most that a request of so many tokens holds: for the size of the pool, and for admission to it."""
        return plan_of(self.block_size).most(max_tokens, self.tokens_in_flight)

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        return self.most_blocks(vllm_config.model_config.max_model_len) * self.page_size_bytes

    def copy_with_new_block_size(self, block_size: int) -> EvictingSpec:
        """vLLM asks for it where the attention's kernels take smaller blocks than these."""
        if block_size != self.block_size:
            raise NotImplementedError(
                f"kvops.vllm: expected a block_size that the attention's kernels take as it is, got {self.block_size}, "
                f"which vLLM splits into blocks of {block_size}"
            )
        return self

    @classmethod
    def merge(cls, specs: Sequence[FullAttentionSpec]) -> EvictingSpec:
        first = specs[0]
        if not isinstance(first, EvictingSpec) or any(x != first for x in specs):
            kinds = ", ".join(sorted({str(x) for x in specs}))
            raise ValueError(f"kvops.vllm: expected the layers of a group to have one kind of cache, got {kinds}")
        return replace(first)


class EvictingManager(FullAttentionManager):
    """Gives back the blocks of a request's gaps as soon as its tokens have been computed."""

    def __init__(self, kv_cache_spec: EvictingSpec, *args: Any, **options: Any):
        super().__init__(kv_cache_spec, *args, **options)
        self.plan = plan_of(self.block_size)
        pool = self.block_pool.num_gpu_blocks - 1  # one is the null block
        self.max_admission_blocks_per_request = min(kv_cache_spec.most_blocks(kv_cache_spec.max_tokens), pool)
        self.freed = 0  # blocks, of all requests
        self._logged = monotonic()
        logger.info(
            "kvops evicts with %s: at most %d blocks of %d tokens for a request of %d tokens",
            self.plan.policy,
            self.max_admission_blocks_per_request,
            self.block_size,
            kv_cache_spec.max_tokens,
        )

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        blocks = self.req_to_blocks.get(request_id)
        if not blocks:
            return
        free = self.block_pool.get_num_free_blocks()
        for gap in reversed(self.plan.gaps(processed_computed_tokens // self.block_size)):
            if blocks[gap.stop - 1] is self._null_block:
                break  # this gap and those before it were given back
            self._remove_blocks_in_range(request_id, gap.start, gap.stop)
        freed = self.block_pool.get_num_free_blocks() - free
        if freed:
            self._count(freed)

    def _count(self, freed: int) -> None:
        self.freed += freed
        if (now := monotonic()) - self._logged >= _SECONDS:
            self._logged = now
            logger.info("kvops with %s: %d blocks given back by evictions", self.plan.policy.name, self.freed)


def register() -> None:
    """Tells vLLM which manager goes with the spec."""
    KVCacheSpecRegistry._ensure_registered()  # an empty table fills itself with vLLM's own; one with ours would not
    KVCacheSpecRegistry.register(EvictingSpec, EvictingManager, uniform_type_base_spec=FullAttentionSpec)
