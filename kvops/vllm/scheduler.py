"""The scheduler side: steps that end at evictions, a cache spec that holds fewer blocks than its tokens fill, and a
manager that frees the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from time import monotonic
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from ..cache.queries import window
from ..cache.schedule import Schedule
from . import settings
from .plan import Plan, why_not_shared

logger = init_logger("vllm.kvops")  # vLLM prints only loggers below its own name
_SECONDS = 10.0  # minimum interval between two log lines about freed blocks


def _schedule() -> Schedule:
    schedule = settings.schedule()
    if schedule is None:
        raise RuntimeError(
            f"kvops.vllm: expected {settings.VARIABLE} to name the policy that the engine started with, got no policy; "
            "do not change it while vLLM runs"
        )
    return schedule


def plan_of(spec: EvictingSpec) -> Plan:
    """Return the plan of KVOPS_VLLM's policy. Each process creates its own from the environment."""
    return Plan(_schedule(), spec.block_size, spec.shared)


class EndingAtEvictions(Scheduler):
    """Ends a step where a request is evicted. `evicting` combines it with the engine's own scheduler."""

    need_mamba_block_aligned_split: bool
    starting = False  # while one is created

    def __init__(self, *args: Any, **options: Any):
        EndingAtEvictions.starting = True
        try:
            super().__init__(*args, **options)
        finally:
            EndingAtEvictions.starting = False
        self._evictions = _schedule()
        self._observing = max(1, window(self._evictions.policy))  # of a prompt's tokens
        self._aligns, self.need_mamba_block_aligned_split = self.need_mamba_block_aligned_split, True

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Shorten a step. vLLM calls this for models whose states it caches at the end of blocks."""
        known = num_new_local_computed_tokens, num_external_computed_tokens
        if self._aligns:
            num_new_tokens = super()._mamba_block_aligned_split(request, num_new_tokens, *known)
        if num_new_tokens <= 0:
            return num_new_tokens
        before = request.num_computed_tokens + sum(known)
        return self._evictions.cut(before, num_new_tokens, request.num_prompt_tokens)

    def _get_local_prefix_cache_hit(self, request: Request, *limit: Any) -> Any:
        """Shorten a hit: the request computes the queries that observe at its prompt's end, at least the last one.

        What a preempted request has generated may be the prompt of another one, but it is not held whole.
        """
        blocks, tokens, *rest = super()._get_local_prefix_cache_hit(request, *limit)
        most = max(0, request.num_prompt_tokens - self._observing) // self.block_size * self.block_size
        if tokens > most:
            blocks, tokens = self.kv_cache_manager.truncate_computed_blocks(blocks, most), most
        return blocks, tokens, *rest


@cache
def evicting(scheduler: type[Scheduler]) -> type[EndingAtEvictions]:
    """Return a scheduler class like the given one, whose steps end at evictions."""
    return type(f"Evicting{scheduler.__name__}", (EndingAtEvictions, scheduler), {})


@dataclass(frozen=True, kw_only=True)
class EvictingSpec(FullAttentionSpec):
    """Cache spec of full attention over the tokens that a policy keeps.

    Attributes:
        max_tokens: the longest request, in tokens.
        tokens_in_flight: the most tokens that are scheduled but not yet computed.
        shared: whether requests share the blocks of their prompts.
    """

    max_tokens: int
    tokens_in_flight: int
    shared: bool

    @property
    def prefix_cacheable(self) -> bool:
        """Whether blocks have hashes: with `shared`, those of prompts, which are never evicted in place.

        The content of an evicted block does not depend only on the tokens up to its end.
        """
        return self.shared

    def most_blocks(self, max_tokens: int) -> int:
        """Return the most blocks that a request of max_tokens holds, which sizes the pool and admits requests."""
        return plan_of(self).most(max_tokens, self.tokens_in_flight)

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        return plan_of(self).width(max_len)

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        # The engine asks this in the process of its scheduler, before it creates the scheduler of this class.
        config = vllm_config.scheduler_config
        found = config.get_scheduler_cls()
        if not issubclass(found, EndingAtEvictions):
            config.scheduler_cls = evicting(found)
        return self.most_blocks(vllm_config.model_config.max_model_len) * self.page_size_bytes

    def copy_with_new_block_size(self, block_size: int) -> EvictingSpec:
        """Raise for another block size, which vLLM requests when the attention kernels need smaller blocks."""
        if block_size != self.block_size:
            raise NotImplementedError(
                f"kvops.vllm: expected a block_size that the attention kernels support, got {self.block_size}, which "
                f"vLLM splits into blocks of {block_size}; set --block-size {block_size}"
            )
        return self

    @classmethod
    def merge(cls, specs: Sequence[FullAttentionSpec]) -> EvictingSpec:
        first = specs[0]
        if not isinstance(first, EvictingSpec) or any(x != first for x in specs):
            kinds = ", ".join(sorted({str(x) for x in specs}))
            raise ValueError(f"kvops.vllm: expected all layers of a group to have the same cache spec, got {kinds}")
        return replace(first)


class EvictingManager(FullAttentionManager):
    """Frees the blocks in a request's gaps as soon as the tokens after which they are evicted have been computed."""

    def __init__(self, kv_cache_spec: EvictingSpec, *args: Any, **options: Any):
        super().__init__(kv_cache_spec, *args, **options)
        if not EndingAtEvictions.starting:
            raise RuntimeError(
                "kvops.vllm: expected vLLM to create the scheduler whose steps end at evictions, got another one"
            )
        self.plan = plan_of(kv_cache_spec)
        pool = self.block_pool.num_gpu_blocks - 1  # vLLM reserves one null block
        most = kv_cache_spec.most_blocks(kv_cache_spec.max_tokens)
        if self.plan.shared and most > pool:  # the longest request would never get its last block
            raise ValueError(
                f"kvops.vllm: expected {most} blocks, for a prompt of {kv_cache_spec.max_tokens} tokens and the copy "
                f"that its first eviction makes, got {pool}; lower max_model_len, or set enable_prefix_caching=False"
            )
        self.max_admission_blocks_per_request = min(most, pool)
        self._width = self.plan.width(kv_cache_spec.max_tokens)
        self._prompts: dict[str, int] = {}  # by request: the tokens of its prompt
        self._gaps: dict[str, tuple[range, ...]] = {}  # by request: the blocks that have been freed
        self.freed = 0  # blocks freed so far, over all requests, less those of copies
        self._logged = monotonic()
        logger.info(
            "kvops evicts with %s, evict=%s: a request of up to %d tokens takes at most %d blocks of %d tokens",
            self.plan.policy,
            self.plan.schedule.evict,
            kv_cache_spec.max_tokens,
            self.max_admission_blocks_per_request,
            self.block_size,
        )
        if self.enable_caching and (why := why_not_shared(self.plan.schedule)):
            logger.warning(
                "kvops.vllm: enable_prefix_caching has no effect, because %s: requests share no prefix, and each "
                "computes its whole prompt; enable_prefix_caching=False silences this warning",
                why,
            )

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **options: Any) -> int:
        # Before a request's first tokens have slots, vLLM asks for all that it has, which is its prompt if it is new.
        length = self.plan.length(num_tokens, self._prompts.get(request_id, num_tokens))
        return super().get_num_blocks_to_allocate(request_id, length, *args, **options)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, *args: Any, **options: Any) -> list[KVCacheBlock]:
        length = self.plan.length(num_tokens, self._prompts[request_id])
        if length > self._width * self.block_size:
            raise RuntimeError(
                f"kvops.vllm: expected {self.plan.policy!r} to fit a request of {num_tokens} tokens into a block table "
                f"of {self._width} blocks of {self.block_size}, got {length} slots; set enable_prefix_caching=False"
            )
        return super().allocate_new_blocks(request_id, length, *args, **options)

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **options: Any) -> None:
        """Give hashes to full blocks of the prompt only."""
        super().cache_blocks(request, min(num_tokens, request.num_prompt_tokens), *args, **options)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        assert num_prompt_tokens is not None  # both callers pass it
        self._prompts[request_id] = num_prompt_tokens
        blocks = self.req_to_blocks.get(request_id)
        if not blocks:
            return
        _, kept, gaps = self.plan.at(processed_computed_tokens, num_prompt_tokens)
        known = self._gaps.get(request_id, ())
        if gaps == known:
            return
        self._gaps[request_id] = gaps
        new = [i for gap in reversed(gaps) for i in reversed(gap) if blocks[i] is not self._null_block]
        freed = [blocks[i] for i in new]
        for i in new:
            blocks[i] = self._null_block
        self.block_pool.free_blocks(freed)
        copied = -(-kept // self.block_size) if self.plan.shared and not known else 0
        self._count(len(freed) - copied)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self._gaps.pop(request_id, None)
        self._prompts.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    def _count(self, freed: int) -> None:
        self.freed += freed
        if (now := monotonic()) - self._logged >= _SECONDS:
            self._logged = now
            logger.info("kvops with %s: evictions have freed %d blocks", self.plan.policy.name, self.freed)


def register() -> None:
    """Tell vLLM which manager serves the spec."""
    KVCacheSpecRegistry._ensure_registered()  # add vLLM's own entries first: it only does so while the table is empty
    KVCacheSpecRegistry.register(EvictingSpec, EvictingManager, uniform_type_base_spec=FullAttentionSpec)
