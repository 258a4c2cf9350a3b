"""vLLM's worker side: attention over the blocks that are held, then what is to be evicted.

What a backend of vLLM's needs, whichever it is, is in three classes, `EvictingBuilder`, `EvictingImpl` and
`EvictingBackend`, which `cpu_attn`, `flash_attn` and `flashinfer` mix into the backend's own. What comes behind the
attention is in `steps`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheSpec

from ..cache.queries import Batch, Remembered, observer, on
from ..methods.base import Policy
from ..methods.queries import QueryPolicy
from . import plugin
from .layouts import Layout, Rows
from .plan import Plan
from .rings import DeviceRings
from .scheduler import EvictingSpec, plan_of
from .steps import Held, Step


class EvictingBuilder(AttentionMetadataBuilder):
    """The blocks that are held take the place of all blocks, for the attention; and what is to be evicted behind it."""

    supports_update_block_table = False  # the table of another group would go round `build`

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.plan: Plan | None = None
        if isinstance(kv_cache_spec, EvictingSpec):
            self.check_group()
            self.plan = plan_of(kv_cache_spec.block_size)
            scheduler = vllm_config.scheduler_config
            requests = max(scheduler.max_num_seqs, scheduler.max_num_active_seqs or 0)
            self._observer = observer(self.plan.rule, self.plan.block_size, DeviceRings(requests, device))
        elif isinstance(kv_cache_spec, FullAttentionSpec):  # one group for layers with and without a window
            refuse("disable_hybrid_kv_cache_manager", "False where some layers have a window", True)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """Never a part of a graph, as it evicts in some steps: vLLM captures what lies between attentions."""
        return AttentionCGSupport.NEVER

    def check_group(self) -> None:
        """Raises for a group of layers that cannot be evicted as one."""
        config, cache = self.vllm_config, self.vllm_config.cache_config
        for name in self.layer_names:
            extract_layer_index(name)  # raises for names that have none, which evictions would stumble over
        others = get_layers_from_vllm_config(config, AttentionLayerBase).keys() - {*self.layer_names}
        if others and cache.enable_prefix_caching:
            refuse("enable_prefix_caching", "False where only some layers are evicted", True)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        if self.plan is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        m = common_attn_metadata
        # Without speculation, which is refused, the bound is the number.
        starts, after = m.query_start_loc_cpu.long(), m.seq_lens_cpu_upper_bound.long()
        batch = Batch(m.block_table_tensor, starts[:-1], after - starts.diff(), after)
        held = Held.of(self.plan, batch)
        if held is not None:
            lengths = held.lengths.to(m.seq_lens.dtype)
            common_attn_metadata = m.replace(
                block_table_tensor=held.table,
                seq_lens=on(held.table.device, lengths),
                max_seq_len=int(lengths.max()),
                seq_lens_cpu_upper_bound=lengths,
                _num_computed_tokens_cache=None,
            )
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.step = Step.of(self.plan, self._observer, held or Held(batch.table, after), batch)
        return metadata


class EvictingImpl(AttentionImpl):
    """Attention, then the evictions that are due."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        config = get_current_vllm_config()
        _check_config(config)
        _check_attention(self)
        EvictingBackend.limits = config.model_config.max_model_len, config.max_in_flight_tokens
        self._memory: Remembered | None = None

    def layout(self, layer: Any, kv_cache: Tensor) -> Layout:
        """How the backend has the layer's cache."""
        return Rows(kv_cache)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        out = super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
        )
        step: Step | None = getattr(attn_metadata, "step", None)
        if step is not None:
            if self._memory is None or self._memory.num_blocks != len(kv_cache):
                self._memory = Remembered(kv_cache.shape[:3], step.plan.kinds, kv_cache.device)
            number, logits = extract_layer_index(layer.layer_name), self._logits(step.plan.rule)
            step.run(self._memory, query, self.layout(layer, kv_cache), number, logits)
        return out

    def _logits(self, rule: Policy) -> dict[str, Any]:
        """What the attention makes of q . k, as the rule's scores have it."""
        logits: dict[str, Any] = {"scale": self.scale, "softcap": float(self.logits_soft_cap)}
        if self.sinks is not None and isinstance(rule, QueryPolicy) and rule.score == "softmax":
            logits["sink_logits"] = self.sinks.detach().float()
        return logits


class EvictingBackend(AttentionBackend):
    """A backend whose full attention evicts. Layers with a window are left as they are."""

    #: max_model_len and max_in_flight_tokens of the model that this process has built its layers for.
    limits: ClassVar[tuple[int, int]]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        spec = super().customize_spec(spec)
        if type(spec) is not FullAttentionSpec or spec.sliding_window or spec.attention_chunk_size:
            return spec
        max_tokens, in_flight = cls.limits
        own = {x.name: getattr(spec, x.name) for x in fields(spec)}
        return EvictingSpec(**own, max_tokens=max_tokens, tokens_in_flight=in_flight)


def refuse(setting: str, expected: object, got: object) -> NoReturn:
    """Raises for a setting of an engine that evicts."""
    raise NotImplementedError(f"kvops.vllm: expected {setting} to be {expected} in an engine that evicts, got {got!r}")


def _check_config(config: VllmConfig) -> None:
    """Raises for what an engine cannot do while it evicts."""
    parallel, model = config.parallel_config, config.model_config
    # Pipelines would be evicted layer by layer as one process is, but this vLLM does not run them on the CPU.
    if parallel.use_ubatching:
        refuse("use_ubatching (enable_dbo, ubatch_size)", "False", parallel.num_ubatches)
    for setting in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if (got := getattr(parallel, setting)) != 1:
            refuse(setting, 1, got)
    policy = plugin.policy()
    if parallel.tensor_parallel_size > 1 and policy is not None and not policy.heads_alone:
        refuse("tensor_parallel_size", f"1 for {policy!r}, which looks at all heads", parallel.tensor_parallel_size)
    if config.speculative_config is not None:
        refuse("speculative_config", None, config.speculative_config.method)
    if config.kv_transfer_config is not None:
        refuse("kv_transfer_config", None, config.kv_transfer_config.kv_connector)
    if is_quantized_kv_cache(config.cache_config.cache_dtype):
        refuse("kv_cache_dtype", "one of the model's", config.cache_config.cache_dtype)
    if model.is_encoder_decoder:
        refuse("the model", "a decoder", model.architecture)
    if model.runner_type != "generate":
        refuse("runner", "'generate'", model.runner_type)


def _check_attention(impl: AttentionImpl) -> None:
    """Raises for attention that does not bear a cache with gaps."""
    if impl.attn_type != AttentionType.DECODER:
        refuse("attn_type", repr(AttentionType.DECODER), impl.attn_type)
    if impl.alibi_slopes is not None:
        refuse("alibi_slopes", "None, as they count slots", "some")
    if impl.kv_sharing_target_layer_name is not None:
        refuse("kv_sharing_target_layer_name", "None: each layer with a cache", impl.kv_sharing_target_layer_name)
