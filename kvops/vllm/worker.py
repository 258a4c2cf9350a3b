"""vLLM's worker side, for its backend CPU_ATTN: attention over the blocks that are held, then what is to be evicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from ..cache import by_slot
from ..methods.base import Policy, View
from ..methods.queries import QueryPolicy
from ..ops import compact_kv_
from . import cpu_pages, plugin
from .plan import Move, Plan
from .queries import Look, Memory, Row, observer
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
        pages: int32 [1, any], every block once.
    """

    plan: Plan
    table: Tensor
    lengths: Tensor
    moved: int
    positions: Tensor
    moved_before: Tensor
    pages: Tensor

    @classmethod
    def of(cls, plan: Plan, moves: Sequence[tuple[Move, Tensor]]) -> Eviction:
        """moves: each with the block table of its request, int32 [max_blocks]."""
        size = plan.block_size
        width = max(len(move.blocks) for move, _ in moves)
        table = torch.full((len(moves), width), -1, dtype=torch.int32)
        logical = torch.zeros(len(moves), width, dtype=torch.int64)
        for row, (move, blocks) in enumerate(moves):
            logical[row, : len(move.blocks)] = torch.tensor(move.blocks)
            table[row, : len(move.blocks)] = blocks[logical[row, : len(move.blocks)]]
        return cls(
            plan,
            table,
            torch.tensor([len(move.blocks) * size for move, _ in moves], dtype=torch.int32),
            max(move.moved for move, _ in moves),
            (logical[..., None] * size + torch.arange(size)).flatten(1),
            torch.arange(width) < torch.tensor([[move.moved_before] for move, _ in moves]),
            table[table >= 0].unique()[None],
        )

    def run(
        self, kv_cache: Tensor, memory: Memory, layer: Any, observing: Tensor | None, logits: Mapping[str, Any]
    ) -> None:
        """Evicts a layer.

        Args:
            kv_cache: of the layer, as the backend has it.
            memory: of the layer.
            layer: vLLM's.
            observing: [moves, Hq, any, d], the queries that the rule asks for.
            logits: see `Look`.
        """
        size, kept_blocks, rule = self.plan.block_size, self.plan.kept, self.plan.rule
        before = self.moved_before.repeat_interleave(size, 1)[:, None]
        of_slots = {name: by_slot.read(pool, self.table) for name, pool in memory.slots.items()}
        of_slots["positions"] = torch.where(before, of_slots["positions"], self.positions[:, None].int())
        with rows(kv_cache, self.pages, layer) as (k, v):
            view = self._view(k, v)
            view.layer = extract_layer_index(layer.layer_name)
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

    def run(self, memory: Memory, query: Tensor, kv_cache: Tensor, layer: Any, logits: Mapping[str, Any]) -> None:
        """Of a layer. See `Look` and `Eviction.run`."""
        observing = None if self.look is None else self.look(memory, query, kv_cache, layer.isa, logits)
        if self.eviction is not None:
            self.eviction.run(kv_cache, memory, layer, observing, logits)


@contextmanager
def rows(kv_cache: Tensor, pages: Tensor, layer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """K and V of a layer, [num_blocks, Hk, block_size, d] each, in which the pages named are rows. One function per
    backend: where K and V are strides of rows, it yields views."""
    with cpu_pages.as_rows(kv_cache, pages, isa=layer.isa) as (k, v):
        yield k, v


class EvictingBuilder(CPUAttentionMetadataBuilder):
    """The blocks that are held take the place of all blocks, for the attention; and what is to be evicted behind it."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.plan: Plan | None = None
        if isinstance(kv_cache_spec, EvictingSpec):
            _check_group(self)
            self.plan = plan = plan_of(kv_cache_spec.block_size)
            scheduler = vllm_config.scheduler_config
            self._observer = observer(plan, max(scheduler.max_num_seqs, scheduler.max_num_active_seqs or 0))
            # What blocks a request holds is asked at every step, and changes once in a block.
            self._blocks = lru_cache(1024)(lambda filled: torch.tensor(plan.blocks(filled), dtype=torch.int64))
        elif isinstance(kv_cache_spec, FullAttentionSpec):  # one group for layers with and without a window
            _refuse("disable_hybrid_kv_cache_manager", "False where some layers have a window", True)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        if self.plan is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        plan, size, m = self.plan, self.plan.block_size, common_attn_metadata
        table, lengths = m.block_table_tensor.clone(), m.seq_lens.clone()
        steps, moves = list[Row](), list[tuple[int, Move]]()
        first, starts = m.block_table_tensor[:, 0].tolist(), m.query_start_loc_cpu.tolist()
        for row, (n, new) in enumerate(zip(m.seq_lens.tolist(), m.naive_query_lens().tolist())):
            before, after = (n - new) // size, n // size
            held, own = self._blocks(before), m.block_table_tensor[row]
            count = -(-n // size)
            if len(held) < before:
                table[row, : len(held) + count - before] = torch.cat((own[held], own[before:count]))
                lengths[row] = n - (before - len(held)) * size
            steps.append(Row(first[row], starts[row], n - new, n))
            moves += ((row, move) for move in plan.moves(before, after))
        held_now = m.replace(
            block_table_tensor=table,
            seq_lens=lengths,
            max_seq_len=int(lengths.max()),
            seq_lens_cpu_upper_bound=None,
            _num_computed_tokens_cache=None,
        )
        metadata = super().build(common_prefix_len, held_now, fast_build)
        look = eviction = None
        if self._observer is not None:
            look = self._observer.step(steps, [(row, move.end * size) for row, move in moves], table, lengths)
        if moves and plan.kept:
            eviction = Eviction.of(plan, [(move, m.block_table_tensor[row]) for row, move in moves])
        metadata.step = Step(plan, look, eviction) if look or eviction else None
        return metadata


class EvictingImpl(CPUAttentionBackendImpl):
    """Attention, then the evictions that are due."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        config = get_current_vllm_config()
        _check_config(config)
        _check_attention(self)
        EvictingBackend.limits = config.model_config.max_model_len, config.max_in_flight_tokens
        self._memory: Memory | None = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
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
            step.run(self._memory, query, kv_cache, layer, self._logits(step.plan.rule))
        return out

    def _logits(self, rule: Policy) -> dict[str, Any]:
        """What the attention makes of q . k, as the rule's scores have it."""
        logits: dict[str, Any] = {"scale": self.scale, "softcap": float(self.logits_soft_cap)}
        if self.sinks is not None and isinstance(rule, QueryPolicy) and rule.score == "softmax":
            logits["sink_logits"] = self.sinks.detach().float()
        return logits


class EvictingBackend(CPUAttentionBackend):
    """CPU_ATTN whose full attention evicts. Layers with a window are left as they are."""

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

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return EvictingImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return EvictingBuilder


def _refuse(setting: str, expected: object, got: object) -> NoReturn:
    raise NotImplementedError(f"kvops.vllm: expected {setting} to be {expected} in an engine that evicts, got {got!r}")


def _check_config(config: VllmConfig) -> None:
    """Raises for what an engine cannot do while it evicts."""
    parallel, model = config.parallel_config, config.model_config
    # Pipelines would be evicted layer by layer as one process is, but this vLLM does not run them on the CPU.
    for setting in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if (got := getattr(parallel, setting)) != 1:
            _refuse(setting, 1, got)
    policy = plugin.policy()
    if parallel.tensor_parallel_size > 1 and policy is not None and not policy.heads_alone:
        _refuse("tensor_parallel_size", f"1 for {policy!r}, which looks at all heads", parallel.tensor_parallel_size)
    if config.speculative_config is not None:
        _refuse("speculative_config", None, config.speculative_config.method)
    if config.kv_transfer_config is not None:
        _refuse("kv_transfer_config", None, config.kv_transfer_config.kv_connector)
    if is_quantized_kv_cache(config.cache_config.cache_dtype):
        _refuse("kv_cache_dtype", "one of the model's", config.cache_config.cache_dtype)
    if model.is_encoder_decoder:
        _refuse("the model", "a decoder", model.architecture)
    if model.runner_type != "generate":
        _refuse("runner", "'generate'", model.runner_type)


def _check_attention(impl: CPUAttentionBackendImpl) -> None:
    """Raises for attention that does not bear a cache with gaps."""
    if impl.attn_type != AttentionType.DECODER:
        _refuse("attn_type", repr(AttentionType.DECODER), impl.attn_type)
    if impl.alibi_slopes is not None:
        _refuse("alibi_slopes", "None, as they count slots", "some")
    if impl.kv_sharing_target_layer_name is not None:
        _refuse("kv_sharing_target_layer_name", "None: each layer with a cache", impl.kv_sharing_target_layer_name)


def _check_group(builder: EvictingBuilder) -> None:
    """Raises for a group of layers that cannot be evicted as one."""
    config, names = builder.vllm_config, set(builder.layer_names)
    if builder.isa not in cpu_pages.ISAS:
        _refuse("the kernel of CPU_ATTN", f"one of {', '.join(cpu_pages.ISAS)}", builder.isa)
    for name in builder.layer_names:
        extract_layer_index(name)  # raises for names that have none, which evictions would stumble over
    others = get_layers_from_vllm_config(config, AttentionLayerBase).keys() - names
    if others and config.cache_config.enable_prefix_caching:
        _refuse("enable_prefix_caching", "False where only some layers are evicted", True)


def __getattr__(name: str) -> NoReturn:
    """`MLA` is the backend of models that the plugin refuses: to ask for it is the error."""
    if name == "MLA":
        raise NotImplementedError(
            "kvops.vllm: expected a model that caches keys and values, got one with multi-head latent attention (MLA)"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """Puts the backend in the place of CPU_ATTN."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{EvictingBackend.__name__}")
    for mla in (AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.AMX_MLA):
        register_backend(mla, f"{__name__}.MLA")
