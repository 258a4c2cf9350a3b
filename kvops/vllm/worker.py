"""The worker side: attention over the blocks that a request holds, then the evictions.

Three mixins hold the code that all of vLLM's backends share: `EvictingBuilder`, `EvictingImpl` and `EvictingBackend`.
The modules `cpu_attn`, `flash_attn` and `flashinfer` combine them with vLLM's own classes. `steps` has the work that
follows the attention. There are two times for it:

```text
between steps       rules that read keys and values alone: as the next step's metadata is built, before it writes. The
                    attention is vLLM's, so that CUDA graphs can hold it.
after attention     rules that queries observe, in each layer: only there are the queries at hand
```
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor
from vllm.config import ModelConfig, VllmConfig, get_current_vllm_config, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    is_quantized_kv_cache,
)

from ..cache.queries import Batch, LayerMemory, Observer, observer, to_device
from ..methods.base import Policy
from ..methods.queries import QueryPolicy
from . import settings
from .layouts import Layout, Rows
from .plan import Plan, why_not_shared
from .prompts import Prompts
from .rings import RequestRingTable
from .scheduler import EvictingSpec, plan_of
from .steps import Layer, Step, StepSlots
from .weights import with_weights


class EvictingBuilder(AttentionMetadataBuilder):
    """Tells the attention which blocks and slots are held, the layers where to write, and builds the evictions."""

    supports_update_block_table = False  # it would install the table of another group without calling `build`

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.plan: Plan | None = None
        self._observer: Observer | None = None
        self._due: Step | None = None  # the last step, if it is still to evict
        if isinstance(kv_cache_spec, EvictingSpec):
            self.check_group()
            layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, layer_names).values()
            model = vllm_config.model_config
            self.plan = with_weights(plan_of(kv_cache_spec), layers, _num_layers(model), model.dtype)
            if Prompts.current is None:
                raise RuntimeError(
                    "kvops.vllm: expected vLLM to have loaded the logits processor kvops.vllm.prompts:Prompts, which "
                    "tells prompts' lengths, got none; install kvops as a package, so that vLLM finds its entry points"
                )
            self._prompts = Prompts.current
            scheduler = vllm_config.scheduler_config
            requests = max(scheduler.max_num_seqs, scheduler.max_num_active_seqs or 0)
            # One more for rows without a request, which only runs without requests have.
            self._observer = observer(self.plan.policy, self.plan.block_size, RequestRingTable(requests + 1, device))
            self._between = between_steps(vllm_config)
            # Tables and lengths lie at the same addresses in each step, which CUDA graphs read.
            self._lengths = torch.zeros(requests, dtype=torch.int32, device=device)
            self._table: Tensor | None = None  # allocated when the first step shows its width
        elif isinstance(kv_cache_spec, FullAttentionSpec):  # one group for layers with and without a sliding window
            refuse("disable_hybrid_kv_cache_manager", "False for a model with sliding-window layers", True)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """Return NEVER if layers evict after their attention. vLLM then captures only the parts between attentions."""
        if between_steps(vllm_config):
            return super().get_cudagraph_support(vllm_config, kv_cache_spec)
        return AttentionCGSupport.NEVER

    def check_group(self) -> None:
        """Raise for a group of layers that cannot be evicted together."""
        config, cache = self.vllm_config, self.vllm_config.cache_config
        for name in self.layer_names:
            extract_layer_index(name)  # raises here, not at the first eviction, for names without a layer number
        others = get_layers_from_vllm_config(config, AttentionLayerBase).keys() - {*self.layer_names}
        if others and cache.enable_prefix_caching:
            refuse("enable_prefix_caching", "False for a model of which only some layers are evicted", True)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        if self.plan is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self._due is not None:  # before this step's tokens are written
            due, self._due = self._due, None
            self._evict(due)
        m = common_attn_metadata
        # The upper bound is exact without speculative decoding, which _check_config rejects.
        starts, after = m.query_start_loc_cpu.long(), m.seq_lens_cpu_upper_bound.long()
        prompts, requests = self._prompts.by_row(m)
        batch = Batch(m.block_table_tensor, starts[:-1], after - starts.diff(), after, requests)
        held = StepSlots.of(self.plan, batch, prompts)
        table, lengths = self._buffers(m.block_table_tensor, held)
        if held.slots is not None:
            # The layers write this step's keys and values where this buffer says. vLLM fills it anew for each step.
            m.slot_mapping[: len(held.slots)] = held.slots
        common_attn_metadata = m.replace(
            block_table_tensor=table,
            seq_lens=lengths,
            # Without a request it is the length for which a graph is captured.
            max_seq_len=int(held.lengths.max()) if any(x is not None for x in requests) else m.max_seq_len,
            seq_lens_cpu_upper_bound=held.lengths.int(),
            _num_computed_tokens_cache=None,
        )
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        step = Step.of(self.plan, self._observer, held, batch, prompts)
        metadata.step, self._due = (None, step) if self._between else (step, None)
        return metadata

    def _buffers(self, table: Tensor, held: StepSlots) -> tuple[Tensor, Tensor]:
        """Return the blocks and slots that are held, in the builder's buffers. table: the engine's."""
        assert self.plan is not None
        rows, width = len(held.lengths), -(-int(held.lengths.max()) // self.plan.block_size)
        if self._table is None:
            self._table = table.new_zeros(len(self._lengths), table.shape[1])
        self._table[:rows, :width] = held.table[:, :width]
        self._lengths[:rows] = to_device(self._lengths.device, held.lengths.int())
        return self._table[:rows], self._lengths[:rows]

    def _evict(self, step: Step) -> None:
        """Run the evictions of an earlier step in all layers."""
        found = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase, self.layer_names).values()
        layers = [x.impl.layer_of(step.plan, x, x.kv_cache) for x in found]
        # One launch moves the rows of all layers. Those that are converted for it come one by one, for want of memory.
        for some in [layers] if all(isinstance(x.layout, Rows) for x in layers) else [[x] for x in layers]:
            step.run(some)


class EvictingImpl(AttentionImpl):
    """Runs vLLM's attention, then the evictions that follow it."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        config = get_current_vllm_config()
        _check_config(config)
        _check_attention(self)
        schedule = settings.schedule()
        EvictingBackend.limits = Limits(
            config.model_config.max_model_len,
            config.max_in_flight_tokens,
            bool(config.cache_config.enable_prefix_caching and schedule and not why_not_shared(schedule)),
        )
        self._num_layers = _num_layers(config.model_config)
        self._memory: LayerMemory | None = None

    def layout(self, layer: Any, kv_cache: Tensor) -> Layout:
        """Return how the backend stores the layer's cache."""
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
            step.run([self.layer_of(step.plan, layer, kv_cache)], query)
        return out

    def layer_of(self, plan: Plan, layer: Any, kv_cache: Tensor) -> Layer:
        """Return the layer as its evictions need it."""
        layer_and_count = extract_layer_index(layer.layer_name), self._num_layers
        return Layer(
            self.layout(layer, kv_cache), self.memory(plan, kv_cache), layer_and_count, self._logits(plan.policy)
        )

    def memory(self, plan: Plan, kv_cache: Tensor) -> LayerMemory:
        """Return what the layer remembers besides its cache."""
        if self._memory is None or self._memory.num_blocks != len(kv_cache):
            self._memory = LayerMemory(kv_cache.shape[:3], plan.kinds, kv_cache.device)
        return self._memory

    def _logits(self, rule: Policy) -> dict[str, Any]:
        """Return how the attention turns q . k into logits, so that the rule's scores use the same logits."""
        logits: dict[str, Any] = {"scale": self.scale, "softcap": float(self.logits_soft_cap)}
        if self.sinks is not None and isinstance(rule, QueryPolicy) and rule.score != "dot":
            logits["sink_logits"] = self.sinks.detach().float()
        return logits


class Limits(NamedTuple):
    """The attributes that `EvictingSpec` adds."""

    max_tokens: int
    tokens_in_flight: int
    shared: bool


class EvictingBackend(AttentionBackend):
    """A backend whose full-attention layers evict. Sliding-window layers are unchanged."""

    #: Of the model whose layers this process has built.
    limits: ClassVar[Limits]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        spec = super().customize_spec(spec)
        if type(spec) is not FullAttentionSpec or spec.sliding_window or spec.attention_chunk_size:
            return spec
        own = {x.name: getattr(spec, x.name) for x in fields(spec)}
        return EvictingSpec(**own, **cls.limits._asdict())


def _num_layers(model: ModelConfig) -> int:
    return int(model.hf_text_config.num_hidden_layers)


def between_steps(config: VllmConfig) -> bool:
    """Return whether layers evict between steps. Otherwise each evicts after its attention.

    vLLM zeroes the new blocks of some models before it builds a step's metadata. The last evictions have just freed
    some of these.
    """
    schedule = settings.schedule()
    assert schedule is not None
    specs = [x.get_kv_cache_spec(config) for x in get_layers_from_vllm_config(config, AttentionLayerBase).values()]
    groups = [KVCacheGroupSpec([], spec) for spec in specs if spec is not None]
    return not isinstance(schedule.policy, QueryPolicy) and not KVCacheConfig(0, [], groups).needs_kv_cache_zeroing


def refuse(setting: str, expected: object, got: object) -> NoReturn:
    """Raise for a setting that does not work with eviction."""
    raise NotImplementedError(f"kvops.vllm: eviction expects {setting} to be {expected}, got {got!r}")


def _check_config(config: VllmConfig) -> None:
    """Raise for engine features that do not work with eviction."""
    parallel, model = config.parallel_config, config.model_config
    # Pipeline parallelism needs no extra code, but is untested: this vLLM does not run it on the CPU.
    if parallel.use_ubatching:
        refuse("use_ubatching (enable_dbo, ubatch_size)", "False", parallel.num_ubatches)
    for setting in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if (got := getattr(parallel, setting)) != 1:
            refuse(setting, 1, got)
    schedule = settings.schedule()
    if parallel.tensor_parallel_size > 1 and schedule is not None and not schedule.policy.heads_alone:
        refuse(
            "tensor_parallel_size", f"1 for {schedule.policy!r}, which reads all heads", parallel.tensor_parallel_size
        )
    if schedule is not None and "w_o" in schedule.policy.needs.model:
        if config.lora_config is not None:
            refuse("enable_lora", f"False for {schedule.policy!r}, which reads the weights without adapters", True)
        if config.weight_transfer_config is not None:
            got = config.weight_transfer_config
            refuse("weight_transfer_config", f"None for {schedule.policy!r}, which reads the weights once", got)
    if config.speculative_config is not None:
        refuse("speculative_config", None, config.speculative_config.method)
    if config.kv_transfer_config is not None:
        refuse("kv_transfer_config", None, config.kv_transfer_config.kv_connector)
    if is_quantized_kv_cache(config.cache_config.cache_dtype):
        refuse("kv_cache_dtype", "an unquantized dtype, such as 'auto'", config.cache_config.cache_dtype)
    if model.enable_prompt_embeds:
        refuse("enable_prompt_embeds", "False, because a prompt's end is counted in its tokens", True)
    if model.is_encoder_decoder:
        refuse("the model", "decoder-only", model.architecture)
    if model.is_mm_prefix_lm:  # ranges of image tokens count positions, but an evicted request's lengths count slots
        expected = "one without bidirectional image tokens, or served for text alone (language_model_only=True)"
        refuse("the model", expected, model.architecture)
    if model.runner_type != "generate":
        refuse("runner", "'generate'", model.runner_type)


def _check_attention(impl: AttentionImpl) -> None:
    """Raise for attention that does not support a cache with gaps."""
    if impl.attn_type != AttentionType.DECODER:
        refuse("attn_type", repr(AttentionType.DECODER), impl.attn_type)
    if impl.alibi_slopes is not None:
        refuse("alibi_slopes", "None, because ALiBi computes distances from slots", "slopes")
    if impl.kv_sharing_target_layer_name is not None:
        refuse(
            "kv_sharing_target_layer_name",
            "None, because each layer needs a cache of its own",
            impl.kv_sharing_target_layer_name,
        )
