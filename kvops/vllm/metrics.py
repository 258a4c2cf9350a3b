"""Eviction counters for the metrics endpoint of vLLM's server (`/metrics`).

The scheduler frees the blocks, but runs in another process than the metrics. The logger does not need to ask it: the
number of blocks freed from a request depends only on its tokens and those of its prompt (see `plan.py`). vLLM finds
`EvictionLogger` through its entry point and creates one in every server. Without a policy it does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import Counter
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import StatLoggerBase

from . import settings
from .plan import Plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, SchedulerStats

logger = init_logger("vllm.kvops")
_LABELS = ("model_name", "engine", "policy")
_REQUESTS = Counter("kvops:evicted_requests", "Finished requests that had KV-cache blocks evicted.", _LABELS)
_BLOCKS = Counter("kvops:evicted_blocks", "KV-cache blocks freed from finished requests by eviction.", _LABELS)


class EvictionLogger(StatLoggerBase):
    """Counts evicted requests and freed blocks when requests finish.

    An aborted request counts if it has generated at least one token.
    """

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0):
        self.schedule = settings.schedule()
        self.config = vllm_config
        self.engine = engine_index
        self._plan: Plan | None = None

    @property
    def plan(self) -> Plan:
        """The plan, created on first use: vLLM settles the block size while the engine starts."""
        assert self.schedule is not None
        if self._plan is None:
            self._plan = Plan(self.schedule, self.config.cache_config.block_size)
        return self._plan

    def log_engine_initialized(self) -> None:
        """Log nothing: the scheduler has already logged the policy."""

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if self.schedule is None or iteration_stats is None:
            return
        for request in iteration_stats.finished_requests:
            self._count(request)

    def _count(self, request: FinishedRequestStats) -> None:
        if not request.num_generation_tokens:
            return
        tokens = request.num_prompt_tokens + request.num_generation_tokens - 1  # the last token is never computed
        blocks = self.plan.freed(tokens, request.num_prompt_tokens)
        if blocks:
            labels = (self.config.model_config.served_model_name, str(self.engine), self.plan.policy.name)
            _REQUESTS.labels(*labels).inc()
            _BLOCKS.labels(*labels).inc(blocks)
            logger.debug("kvops: evicted %d blocks of request %s (%d tokens)", blocks, request.request_id, tokens)
