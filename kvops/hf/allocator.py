"""Full-attention layers that evict in transformers' continuous batching: an allocator of its registry.

The only module of kvops that reads the engine's own classes, which are not documented. `check_hooks` compares them with
what is used here.

The engine asks the allocator how many slots a request takes, writes new tokens to the slots that it names, reads those
that it names, and counts as many keys of the request as `get_seqlen_k` says, which is not told the request. So what a
request holds has to follow from the number of its tokens alone: `Policy.held`. Where the engine has `past_length`
tokens, this allocator has held(past_length) slots, and everything else is the engine's. A step of a request with q
tokens goes from held(n) to held(n) + q slots, and ends with held(n + q):

1. `allocate_cache_to_request`: blocks for held(n) + q slots. Several steps may bring the prompt (chunked prefill).
2. `get_write_indices`: the request is in the step; it is due if it will hold more than held(n + q).
3. `update`, for each layer: the engine's own, which hands copies of K and V to the attention. For policies that look at
   queries, `handover` has brought those of the layer. With the last layer all requests that are due are evicted, in all
   layers: what stays moves to the front of their blocks, and the blocks behind go back to the pool, before the engine
   schedules the next step.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.generation.continuous_batching import cache as engine
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from ..cache import by_slot
from ..cache.queries import Batch, LastQueries, Look, Remembered, observer, on
from ..methods.base import DecodePolicy, Policy, View
from ..methods.queries import QueryPolicy
from ..ops import compact_kv_
from .handover import Handed, hand_over

FULL_ATTENTION = "full_attention"
#: One engine is made at a time: what the registry holds meanwhile is for that one.
_registry = threading.Lock()
#: The parameters that the engine hands to what is overridden or called here.
_HOOKS = {
    "needs_new_blocks": "request_id past_length query_length",
    "allocate_cache_to_request": "request_id past_length query_length",
    "free_blocks": "request_id no_cache",
    "fork_blocks": "source_request_id dest_request_id past_length",
    "get_seqlen_k": "past_length query_length",
    "get_read_indices": "request_id past_length query_length",
    "get_write_indices": "request_id past_length query_length",
    "update": "key_states value_states layer_idx read_index write_index",
    "register_cache_tensor": "bytes_per_sector non_trash_bytes cache_tensor pool",
}


def check_hooks() -> None:
    """RuntimeError if the engine's classes are not those that this module was written for."""
    for name, parameters in _HOOKS.items():
        hook = getattr(FullAttentionCacheAllocator, name, None)
        got = " ".join([*inspect.signature(hook).parameters][1:]) if hook else "none"
        if got != parameters:
            raise _changed(f"FullAttentionCacheAllocator.{name}({parameters})", got)
    with _registry:
        registered = engine.ATTN_TYPE_TO_ALLOCATOR.get(FULL_ATTENTION)
    if registered is not FullAttentionCacheAllocator:
        raise _changed(f"FullAttentionCacheAllocator for {FULL_ATTENTION!r}", registered)
    if not hasattr(ContinuousBatchingManager, "_create_batch_processor"):
        raise _changed("ContinuousBatchingManager._create_batch_processor", "none")


def _changed(expected: str, got: object) -> RuntimeError:
    import transformers

    return RuntimeError(
        "continuous_batching: the engine of the installed transformers is another than the one this was written for, "
        f"expected {expected}, got {got} in transformers {transformers.__version__}"
    )


@dataclass
class Batching:
    """What `kvops.hf.continuous_batching` yields: what its engines have evicted so far.

    Attributes:
        policy: of all engines made in the block.
        evictions: how often a request was evicted.
        tokens: that were evicted, per head and layer.
        blocks: that evictions gave back to the engine's pool, each of `page_size` tokens in all evicting layers.
        most_blocks: the most that a request has had.
    """

    policy: Policy
    evictions: int = 0
    tokens: int = 0
    blocks: int = 0
    most_blocks: int = 0

    def stats(self) -> str:
        """A line about it."""
        return (
            f"{self.evictions} evictions of {self.tokens} tokens per head and layer, which gave back {self.blocks} "
            f"blocks; no request had more than {self.most_blocks}"
        )


class Row(NamedTuple):
    """A request of a step. It is evicted when the step ends if it holds more than it is to keep."""

    request: str
    start: int  # of its tokens among the step's
    before: int  # tokens computed before the step,
    n: int  # and with it
    held: int  # slots with the step's tokens
    keep: int


class Rings:
    """See `kvops.cache.queries.Rings`.

    Attributes:
        step: the requests of the step.
    """

    def __init__(self, step: list[Row], device: torch.device):
        self.most, self._step, self._device = 0, step, device
        self._of: dict[str, int] = {}
        self._free: list[int] = []

    def of(self, batch: Batch) -> Tensor:
        for x in self._step:
            if x.request not in self._of:
                if x.before:
                    raise RuntimeError(
                        f"continuous_batching: expected to have seen the queries of {x.request} from its first token "
                        f"on, got none of its first {x.before}"
                    )
                self.join(x.request)
        return on(self._device, torch.tensor([self._of[x.request] for x in self._step]))

    def join(self, request: str) -> int:
        """The number of a new request."""
        if not self._free:
            self._free.append(self.most)
            self.most += 1
        self._of[request] = ring = self._free.pop()
        return ring

    def leave(self, request: str) -> None:
        if request in self._of:
            self._free.append(self._of.pop(request))

    def get(self, request: str) -> int | None:
        return self._of.get(request)


class EvictingAllocator(FullAttentionCacheAllocator):
    """The full-attention layers of one engine, evicted by a policy; `kind` makes the class to register."""

    supports_block_sharing = False  # blocks that were compacted are no longer those of their tokens
    supports_block_table = False  # a kernel that writes new tokens itself takes lengths that no allocator sees
    text: ClassVar[PreTrainedConfig]  # the model's
    batching: ClassVar[Batching]

    @staticmethod
    def kind(text: PreTrainedConfig, batching: Batching) -> type[EvictingAllocator]:
        """The class for the engine of one model; the engine of any other, made meanwhile, gets its own allocator."""
        return type("EvictingAllocator", (EvictingAllocator,), {"text": text, "batching": batching})

    def __new__(cls, *args: Any, config: PreTrainedConfig, **options: Any) -> Any:
        if config is not cls.text:
            return FullAttentionCacheAllocator(*args, config=config, **options)  # type: ignore[misc]
        return super().__new__(cls)

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.policy = self.batching.policy
        self._step: list[Row] = []
        #: Of requests that were evicted: int32 [layers, Hk, held then], the positions of their first slots; the others
        #: follow on.
        self._positions: dict[str, Tensor] = {}

    def register_cache_tensor(self, *args: Any, **options: Any) -> None:
        super().register_cache_tensor(*args, **options)
        #: Of each layer: [all blocks, Hk, page, d], views of the engine's memory, by the blocks' numbers.
        layers = self._blocks().unbind(1)
        self._k, self._v = ([layer[:, part].transpose(1, 2) for layer in layers] for part in (0, 1))
        last = self.num_blocks - 1
        for i, layer in enumerate(self.layer_indices):
            slot = last * self.block_physical_stride
            for pages, tokens in zip((self._k[i], self._v[i]), self._kv_token_views[layer]):
                if pages[last, :, 0].data_ptr() != tokens[slot].data_ptr():
                    raise _changed("blocks of [layers, K and V, page, heads, head_dim]", "another order")
        self._rings = Rings(self._step, self.cache_tensor.device)
        self._observer = observer(self.policy, self.tokens_per_page, self._rings)
        kinds = dict.fromkeys(self.policy.by_slot, torch.float32)
        shape = len(self._k[0]), self.num_key_value_heads, self.tokens_per_page
        self._remembered = [Remembered(shape, kinds, self.cache_tensor.device) for _ in self.layer_indices]
        self._handed: Handed | None = None
        self._look: Look | None = None
        self._observing: list[tuple[Tensor | None, dict[str, Any]]] = []  # of each layer
        if self._observer is not None:
            hand_over()

    def _blocks(self) -> Tensor:
        """[all blocks, layers, 2, page, Hk, d] of the engine's memory."""
        shape = (-1, self.pages_per_block, 2, self.tokens_per_page, self.num_key_value_heads, self.head_dim)
        return self.cache_tensor.view(shape)

    def most_held(self, limit: int) -> int:
        """No request holds more slots than this, nor than `limit`."""
        policy = self.policy
        if not isinstance(policy, (DecodePolicy, QueryPolicy)):
            return limit
        assert isinstance(policy.budget, int)  # as `continuous_batching` asks for
        return min(limit, policy.budget + policy.spare(policy.budget))

    def held(self, n: int) -> int:
        """Slots of a request that n tokens were computed of. No policy that is served asks for the prompt's length."""
        return held(self.policy, n)

    # ---- what the engine asks: `past_length` tokens are held(past_length) slots ----

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        return super().needs_new_blocks(request_id, self.held(past_length), query_length)

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        if self._step:
            # A graph that is replayed calls no `update`; its requests would go on with slots that nothing has moved.
            raise RuntimeError(
                "continuous_batching: a step ended without the eviction of its requests, expected that `update` is "
                f"called for all layers, got none for the last one; in the step were {[x.request for x in self._step]}"
            )
        super().allocate_cache_to_request(request_id, self.held(past_length), query_length)
        self.batching.most_blocks = max(self.batching.most_blocks, len(self.block_table[request_id]))

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        held = self.held(past_length)
        if held > self.most_held(held):  # the scheduler counts on it, and the engine clears no more of its mask
            raise RuntimeError(
                f"continuous_batching: {self.policy!r} must hold at most its budget and its buffer, "
                f"{self.most_held(held)} tokens, got {held}"
            )
        return super().get_seqlen_k(held, query_length)

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        return super().get_read_indices(request_id, self.held(past_length), query_length)

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        start = self._step[-1].start + self._step[-1].n - self._step[-1].before if self._step else 0
        n = past_length + query_length
        held = self.held(past_length) + query_length
        self._step.append(Row(request_id, start, past_length, n, held, self.held(n)))
        return super().get_write_indices(request_id, self.held(past_length), query_length)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        self._step[:] = [x for x in self._step if x.request != request_id]
        self._positions.pop(request_id, None)
        self._rings.leave(request_id)
        super().free_blocks(request_id, no_cache)

    def fork_blocks(
        self, source_request_id: str, dest_request_id: str, past_length: int
    ) -> tuple[list[int], list[int]]:
        if source_request_id in self._positions:
            self._positions[dest_request_id] = self._positions[source_request_id]
        source, dest = super().fork_blocks(source_request_id, dest_request_id, past_length)
        ring = self._rings.get(source_request_id)
        for layer in self._remembered:
            for pool in layer.slots.values():
                pool[dest] = pool[source]
        if ring is not None:
            assert isinstance(self._observer, LastQueries)  # as others have no rings
            self._observer.copy(self._remembered, ring, self._rings.join(dest_request_id))
        return source, dest

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, read_index: Tensor, write_index: Tensor
    ) -> tuple[Tensor, Tensor]:
        copies = super().update(key_states, value_states, layer_idx, read_index, write_index)
        if self._step:
            if self._observer is not None:
                self._observe(self.layer_indices.index(layer_idx))
            if layer_idx == self.layer_indices[-1]:
                self._evict()
                self._step.clear()
        return copies

    def take(self, handed: Handed) -> None:
        """What the layer that is updated next attends with."""
        self._handed = handed

    # ---- eviction ----

    @property
    def _due(self) -> list[Row]:
        return [x for x in self._step if x.keep < x.held]

    def _observe(self, layer: int) -> None:
        """Remembers what a layer's queries observe, and those that observe in this step's evictions."""
        handed, self._handed = self._handed, None
        if handed is None:
            raise _changed("an attention that `kvops.hf.handover` has wrapped", "none for a layer's queries")
        if layer == 0:
            self._look, self._observing = self._looking(), []
        if self._look is None or len(self._observing) != layer:
            raise _changed("an `update` of each layer in order", f"one of layer {self.layer_indices[layer]}")

        def keys(table: Tensor) -> View:
            return View(self._k[layer], self._v[layer], block_table=table)

        observing = self._look(self._remembered[layer], handed.query, keys, handed.logits)
        self._observing.append((observing, handed.logits))

    def _looking(self) -> Look:
        assert self._observer is not None
        rows = self._step
        table = self._table(rows)
        ends = [(row, x.n) for row, x in enumerate(rows) if x.keep < x.held]
        with torch.device("cpu"):  # whatever the default device
            starts, before, after, lengths = torch.tensor([(x.start, x.before, x.n, x.held) for x in rows]).unbind(1)
            return self._observer.step(Batch(table, starts, before, after), ends, table, lengths)

    def _evict(self) -> None:
        """Evicts what is due: selects by rule and layer, for all its requests; then moves by rule, all layers."""
        by_rule: dict[Policy, list[int]] = {}
        for i, x in enumerate(due := self._due):
            by_rule.setdefault(rule_of(self.policy, x), []).append(i)
        moves = [([due[i] for i in own], *self._select(rule, due, own)) for rule, own in by_rule.items()]
        for rows, table, positions, kept in moves:
            compact_kv_(self._k, self._v, list(kept.unbind()), block_table=table)
            positions = positions.gather(-1, kept.clamp(min=0))
            for layer, indices in zip(self._remembered, kept):
                for pool in layer.slots.values():
                    by_slot.write(pool, table, by_slot.read(pool, table).gather(2, indices.clamp(min=0)))
            for i, x in enumerate(rows):
                self._positions[x.request] = positions[:, i, :, : x.keep].clone()
                self._give_back(x)

    def _select(self, rule: Policy, due: list[Row], own: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """The block table of some of the requests that are due, int32 [b, blocks], and of all layers the positions of
        their slots, int32 [layers, b, Hk, slots], and the slots that stay, int64 [layers, b, Hk, m], -1 last."""
        device, layers, rows = self.cache_tensor.device, self.pages_per_block, [due[i] for i in own]
        table = self._table(rows)
        with torch.device("cpu"):
            lengths, keep = on(device, torch.tensor([(x.held, x.keep) for x in rows], dtype=torch.int32).T.contiguous())
        positions = torch.stack([self._positions_of(x, table.shape[1] * self.tokens_per_page) for x in rows], 1)
        kept = []
        for i in range(layers):
            view = self._view(rule, i, table, lengths)
            view.kept = positions[i].long()
            if isinstance(rule, QueryPolicy):
                observing, logits = self._observing[i]
                if observing is None:
                    view.observed = by_slot.read(self._remembered[i].slots["scores"], table)
                else:
                    rule.observe(view, observing[own], None, logits)
            kept.append(rule.select(view))
        got = torch.stack([(x >= 0).sum(-1) for x in kept])
        if not torch.equal(got, keep[:, None].expand_as(got)):  # the next step would read slots that hold nothing
            raise RuntimeError(
                f"continuous_batching: {rule!r} must leave what its `held` says, expected {keep.tolist()} of "
                f"{lengths.tolist()} slots, got {got.tolist()} of each layer, request and head"
            )
        return table, positions, torch.stack(kept)

    def _view(self, rule: Policy, layer: int, table: Tensor, lengths: Tensor) -> View:
        """What a rule looks at: pages, or for those that take none a copy of their rows."""
        k, v = self._k[layer], self._v[layer]
        where: dict[str, Any] = dict(lengths=lengths, layer=layer, num_layers=self.pages_per_block)
        if rule.paged:
            return View(k, v, block_table=table, **where)
        k, v = (x[table.clamp(min=0)].transpose(1, 2).flatten(2, 3) for x in (k, v))
        return View(k, v, **where)

    def _table(self, rows: list[Row]) -> Tensor:
        """int32 [rows, blocks]: the blocks in use, -1 behind."""
        tables = [self.block_table[x.request][: self._blocks_of(x.held)] for x in rows]
        width = max(map(len, tables))
        with torch.device("cpu"):  # known here, so nothing waits for a GPU
            table = torch.tensor([x + [-1] * (width - len(x)) for x in tables], dtype=torch.int32)
        return on(self.cache_tensor.device, table)

    def _positions_of(self, x: Row, width: int) -> Tensor:
        """int32 [layers, Hk, width]: the positions of a request's slots, and anything behind."""
        heads, device = (self.pages_per_block, self.num_key_value_heads), self.cache_tensor.device
        known = self._positions.get(x.request, torch.empty(*heads, 0, dtype=torch.int32, device=device))
        first = x.n - x.held + known.shape[2]
        new = torch.arange(first, first + width - known.shape[2], dtype=torch.int32, device=device)
        return torch.cat((known, new.expand(*heads, -1)), 2)

    def _give_back(self, x: Row) -> None:
        """The blocks behind what a request keeps are the pool's again."""
        table = self.block_table[x.request]
        behind = table[self._blocks_of(x.keep) :]
        del table[self._blocks_of(x.keep) :]
        self.pool.free_blocks(self.index, behind)
        self.batching.evictions += 1
        self.batching.tokens += x.held - x.keep
        self.batching.blocks += len(behind)

    def _blocks_of(self, slots: int) -> int:
        return -(-slots // self.tokens_per_page)


def held(policy: Policy, n: int) -> int:
    """Slots of a request that n tokens were computed of, whatever its prompt."""
    if isinstance(policy, QueryPolicy):  # of which some hold a whole prompt elsewhere, and all of decode
        return policy.cycled(n)
    return policy.held(n, n)


def rule_of(policy: Policy, x: Row) -> Policy:
    """The policy whose `select` leaves what a request is to keep."""
    if isinstance(policy, QueryPolicy):
        return replace(policy, budget=x.keep)
    return policy.resumed(x.before, x.n, x.n)


def evicting_engine(make: Callable[[], Any], text: PreTrainedConfig, batching: Batching) -> Any:
    """What `make` returns, which makes the engine of a model, with layers that evict."""
    kind, registry = EvictingAllocator.kind(text, batching), engine.ATTN_TYPE_TO_ALLOCATOR
    with _registry:
        before = registry[FULL_ATTENTION]
        registry[FULL_ATTENTION] = kind
        try:
            processor = make()
        finally:
            registry[FULL_ATTENTION] = before
    _adapt(processor.cache)
    return processor


def has_full_attention(text: PreTrainedConfig) -> bool:
    """Whether the engine of a model has layers to evict from."""
    return FULL_ATTENTION in engine.group_layers_by_attn_type(text)


def _adapt(cache: Any) -> None:
    """Lets the engine's scheduler count the slots that requests hold.

    In every step it reads at most as many slots as there are, and takes a request's tokens for its slots, up to
    `read_cache_limit`. A request of more tokens than there are slots would wait for ever.
    """
    made = cache.cache_allocators.get(FULL_ATTENTION)
    if not isinstance(made, EvictingAllocator):
        raise _changed("an engine whose allocators are those of the registry", type(made).__name__)
    for name in ("read_cache_limit", "max_tokens_read"):
        if not hasattr(cache, name):
            raise _changed(f"PagedAttentionCache.{name}", "none")
    window = max(getattr(x, "sliding_window", 0) for x in cache.cache_allocators.values())
    cache.read_cache_limit = max(made.most_held(cache.max_tokens_read), window)
