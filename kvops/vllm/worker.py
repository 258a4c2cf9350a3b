"""vLLM's worker side: attention over the blocks that are held, then what is to be evicted.

What a backend of vLLM's needs, whichever it is, is in three classes, `EvictingBuilder`, `EvictingImpl` and
`EvictingBackend`, which `cpu_attn`, `flash_attn` and `flashinfer` mix into the backend's own. What a step does follows
from numbers that vLLM has on the host; tables and lengths go to the device, and nothing is read back from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
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

from ..cache import by_slot
from ..methods.base import Policy, View
from ..methods.queries import QueryPolicy
from ..ops import compact_kv_
from . import plugin
from .layouts import Layout, Rows
from .plan import Move, Plan
from .queries import Batch, Look, Memory, observer, on
from .scheduler import EvictingSpec, plan_of


@dataclass
class Eviction:
    """The moves of a step, of all its requests: the same in each layer.

    Attributes:
        plan: its `rule` says what stays.
        table: int32 [moves, width], the blocks that are looked at; -1 behind a move's own.
        lengths: int32 [moves], their slots.
        moved: columns of the table that hold blocks which are written, for some move.
        positions: int64 [moves, width * block_size], of the tokens where no earlier move has been.
        moved_before: bool [moves, width], the blocks where one has.
    """

    plan: Plan
    table: Tensor
    lengths: Tensor
    moved: int
    positions: Tensor
    moved_before: Tensor

    @classmethod
    def of(cls, plan: Plan, moves: Sequence[tuple[int, Move]], block_table: Tensor) -> Eviction:
        """moves: each with its row of the block table, int32 [rows, max_blocks]."""
        size, device = plan.block_size, block_table.device
        width = max(len(move.blocks) for _, move in moves)
        blocks = torch.tensor([move.blocks + [-1] * (width - len(move.blocks)) for _, move in moves])
        row, moved_before = torch.tensor([(row, move.moved_before) for row, move in moves]).unbind(1)
        logical = on(device, blocks)
        table = block_table[on(device, row)].gather(1, logical.clamp(min=0))
        return cls(
            plan,
            torch.where(logical < 0, -1, table),
            on(device, torch.tensor([len(move.blocks) * size for _, move in moves], dtype=torch.int32)),
            max(move.moved for _, move in moves),
            (logical[..., None] * size + torch.arange(size, device=device)).flatten(1),
            on(device, torch.arange(width) < moved_before[:, None]),
        )

    def run(
        self, layout: Layout, memory: Memory, layer: int, observing: Tensor | None, logits: Mapping[str, Any]
    ) -> None:
        """Evicts a layer.

        Args:
            layout: of the layer's cache.
            memory: of the layer.
            layer: its number.
            observing: [moves, Hq, any, d], the queries that the rule asks for.
            logits: see `Look`.
        """
        size, kept_blocks, rule = self.plan.block_size, self.plan.kept, self.plan.rule
        before = self.moved_before.repeat_interleave(size, 1)[:, None]
        of_slots = {name: by_slot.read(pool, self.table) for name, pool in memory.slots.items()}
        of_slots["positions"] = torch.where(before, of_slots["positions"], self.positions[:, None].int())
        with layout.rows(self.table) as (k, v):
            view = self._view(k, v)
            view.layer = layer
            view.kept = of_slots["positions"].long()
            view.observed = of_slots.get("scores")
            if observing is not None:
                assert isinstance(rule, QueryPolicy)  # as others are shown none
                rule.observe(view, observing, None, logits)
            kept = rule.select(view)[..., : kept_blocks * size].contiguous()
            compact_kv_(k, v, kept, block_table=self.table[:, : self.moved].contiguous())
        for name, values in of_slots.items():
            by_slot.write(memory.slots[name], self.table[:, :kept_blocks], values.gather(2, kept))

    def _view(self, k: Tensor, v: Tensor) -> View:
        """What the rule looks at: pages, or for those that take none a copy of their rows."""
        if self.plan.rule.paged:
            return View(k, v, lengths=self.lengths, block_table=self.table)
        k, v = (x[self.table.clamp(min=0)].transpose(1, 2).flatten(2, 3) for x in (k, v))
        return View(k, v, lengths=self.lengths)


@dataclass
class Step:
    """What comes behind the attention of a step: the same in each layer."""

    plan: Plan
    look: Look | None
    eviction: Eviction | None

    def run(self, memory: Memory, query: Tensor, layout: Layout, layer: int, logits: Mapping[str, Any]) -> None:
        """Of a layer. See `Look` and `Eviction.run`."""
        observing = None if self.look is None else self.look(memory, query, layout, logits)
        if self.eviction is not None:
            self.eviction.run(layout, memory, layer, observing, logits)


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
            self._observer = observer(self.plan, requests, device)
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
        plan, m = self.plan, common_attn_metadata
        size, device = plan.block_size, m.block_table_tensor.device
        # Without speculation, which is refused, the bound is the number.
        after, new = m.seq_lens_cpu_upper_bound.long(), m.query_start_loc_cpu.long().diff()
        before = after - new
        filled = before // size
        gone = plan.gone(filled)
        table, lengths = m.block_table_tensor, after - gone * size
        held = m
        if gone.any():
            columns = torch.arange(-(-int(lengths.max()) // size))
            # Behind what a row holds its table may have anything.
            blocks = plan.block_of(filled[:, None], columns).clamp(max=table.shape[1] - 1)
            table = table.gather(1, on(device, blocks))
            host = lengths.to(m.seq_lens.dtype)
            held = m.replace(
                block_table_tensor=table,
                seq_lens=on(device, host),
                max_seq_len=int(lengths.max()),
                seq_lens_cpu_upper_bound=host,
                _num_computed_tokens_cache=None,
            )
        metadata = super().build(common_prefix_len, held, fast_build)
        grown = (after // size > filled).nonzero().flatten().tolist()
        moves = [(row, move) for row in grown for move in plan.moves(int(filled[row]), int(after[row]) // size)]
        look = eviction = None
        if self._observer is not None:
            (live,) = new.nonzero(as_tuple=True)  # others are a graph's padding
            rows = on(device, live)
            place = dict(zip(live.tolist(), range(len(live))))
            look = self._observer.step(
                Batch(m.block_table_tensor[rows, 0], m.query_start_loc_cpu[live].long(), before[live], after[live]),
                [(place[row], move.end * size) for row, move in moves],
                table[rows],
                lengths[live],
            )
        if moves and plan.kept:
            eviction = Eviction.of(plan, moves, m.block_table_tensor)
        metadata.step = Step(plan, look, eviction) if look or eviction else None
        return metadata


class EvictingImpl(AttentionImpl):
    """Attention, then the evictions that are due."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        config = get_current_vllm_config()
        _check_config(config)
        _check_attention(self)
        EvictingBackend.limits = config.model_config.max_model_len, config.max_in_flight_tokens
        self._memory: Memory | None = None

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
                self._memory = Memory(kv_cache, step.plan.rule)
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
