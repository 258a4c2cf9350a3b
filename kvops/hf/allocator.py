"""An allocator for transformers' continuous batching whose full-attention layers evict.

This is the only module of kvops that uses the engine's own classes, which are undocumented. `check_hooks` verifies that
they have the methods and parameters used here.

The engine counts tokens. Where it counts `past_length` tokens of a request, this allocator counts the slots that the
request holds then, held(past_length). They depend on the length of its prompt too, which `EvictingScheduler` reports.
The scheduler also ends a step where a request is evicted. Everything else is the engine's own code. In a step with q
tokens, a request goes from held(n) to held(n) + q slots, and ends with held(n + q):

1. `EvictingScheduler` chooses the requests and q. `allocate_cache_to_request` allocates blocks for held(n) + q slots.
2. `get_seqlen_k` returns the number of keys, without naming the request: the next one in the scheduler's order.
   `get_write_indices` adds the request to the step. It must be evicted if it would hold more than held(n + q) slots.
3. `update` runs for each layer. The engine's own `update` returns copies of K and V for the attention. For policies
   that use queries, `query_hook` has delivered the layer's queries. After the last layer, all requests that exceed
   held(n + q) are evicted in all layers: the kept slots move to the front of their blocks, and the blocks after them
   return to the pool before the engine schedules the next step.
"""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.generation.continuous_batching import cache as engine
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.scheduler import Scheduler

from ..cache import by_slot
from ..cache.queries import Batch, LastQueries, LayerMemory, Observation, observer, to_device
from ..cache.schedule import Schedule
from ..methods.base import Policy
from ..methods.queries import QueryPolicy
from ..methods.select import dense_rows
from ..methods.view import View
from ..ops import compact_kv_
from .query_hook import AttentionInputs, pass_queries

FULL_ATTENTION = "full_attention"
#: Held while an engine is created, because the registry then holds that engine's allocator.
_registry = threading.Lock()
#: The parameters of the engine's methods that this module overrides or calls.
_HOOKS: dict[type, dict[str, str]] = {
    FullAttentionCacheAllocator: {
        "needs_new_blocks": "request_id past_length query_length",
        "allocate_cache_to_request": "request_id past_length query_length",
        "free_blocks": "request_id no_cache",
        "fork_blocks": "source_request_id dest_request_id past_length",
        "get_seqlen_k": "past_length query_length",
        "get_read_indices": "request_id past_length query_length",
        "get_write_indices": "request_id past_length query_length",
        "update": "key_states value_states layer_idx read_index write_index",
        "register_cache_tensor": "bytes_per_sector non_trash_bytes cache_tensor pool",
    },
    Scheduler: {
        "add_waiting_request": "state",
        "schedule_batch": "token_budget cache_budget",
        "_infer_request_tokens": "state request_ids_to_remove_from_waiting",
        "_schedule_request": "state request_tokens token_budget request_ids_to_remove_from_waiting",
    },
    RequestState: {"current_len": ""},
}
#: The attributes of its requests that this module reads.
_STATE = ("request_id", "initial_tokens", "_true_initial_tokens")


def check_hooks() -> None:
    """Raise RuntimeError if the engine's classes are not the ones that this module was written for."""
    for kind, hooks in _HOOKS.items():
        for name, parameters in hooks.items():
            hook = getattr(kind, name, None)
            got = " ".join([*inspect.signature(hook).parameters][1:]) if hook else "none"
            if got != parameters:
                raise _changed(f"{kind.__name__}.{name}({parameters})", got)
    if missing := sorted({*_STATE} - {*inspect.signature(RequestState).parameters}):
        raise _changed(f"a RequestState with {', '.join(_STATE)}", f"one without {', '.join(missing)}")
    with _registry:
        registered = engine.ATTN_TYPE_TO_ALLOCATOR.get(FULL_ATTENTION)
    if registered is not FullAttentionCacheAllocator:
        raise _changed(f"FullAttentionCacheAllocator for {FULL_ATTENTION!r}", registered)
    if not hasattr(ContinuousBatchingManager, "_create_batch_processor"):
        raise _changed("ContinuousBatchingManager._create_batch_processor", "none")


def _changed(expected: str, got: object) -> RuntimeError:
    import transformers

    return RuntimeError(
        "continuous_batching: the installed transformers has a different engine than the one this was written for: "
        f"expected {expected}, got {got} in transformers {transformers.__version__}; install a tested version"
    )


@dataclass
class Batching:
    """What `kvops.hf.continuous_batching` yields: counts of what its engines have evicted so far. `print` shows them.

    Attributes:
        schedule: The policy of all engines made in the block, and when it evicts.
        evictions: How many times a request was evicted.
        tokens: Evicted tokens, per head and layer.
        blocks: Blocks that evictions returned to the engine's pool, each of `page_size` tokens in all evicting layers.
        most_blocks: The most blocks that any request has had.
    """

    schedule: Schedule
    evictions: int = 0
    tokens: int = 0
    blocks: int = 0
    most_blocks: int = 0

    @property
    def policy(self) -> Policy:
        """The policy of all engines made in the block."""
        return self.schedule.policy

    def stats(self) -> str:
        """Return the counts as a line of text."""
        return (
            f"{self.evictions} evictions of {self.tokens} tokens per head and layer, which freed {self.blocks} blocks; "
            f"no request had more than {self.most_blocks}"
        )

    __str__ = stats


class Row(NamedTuple):
    """A request of a step. It is evicted at the end of the step if it holds more than `keep` slots."""

    request: str
    start: int  # where its tokens begin among the step's
    prompt: int  # tokens of its prompt
    before: int  # tokens computed before the step
    n: int  # tokens computed after the step
    held: int  # slots in use, the step's tokens included
    keep: int  # slots to keep


class EngineRingTable:
    """Implements `kvops.cache.queries.RingTable` for the engine's request ids.

    Args:
        step: The requests of the current step. The allocator updates this list.
        device: The device of the returned numbers.
    """

    def __init__(self, step: list[Row], device: torch.device):
        self.size, self._step, self._device = 0, step, device
        self._numbers: dict[str, int] = {}
        self._free: list[int] = []

    def numbers(self, batch: Batch, asked: Sequence[tuple[int, int]]) -> Tensor:
        for x in self._step:
            if x.request not in self._numbers:
                if x.before:
                    raise RuntimeError(
                        f"continuous_batching: expected the queries of request {x.request} from its first token on, "
                        f"got none of its first {x.before}"
                    )
                self.join(x.request)
        return to_device(self._device, torch.tensor([self._numbers[x.request] for x in self._step]))

    def join(self, request: str) -> int:
        """Assign a number to a new request and return it."""
        if not self._free:
            self._free.append(self.size)
            self.size += 1
        self._numbers[request] = ring = self._free.pop()
        return ring

    def leave(self, request: str) -> None:
        if request in self._numbers:
            self._free.append(self._numbers.pop(request))

    def get(self, request: str) -> int | None:
        return self._numbers.get(request)


class EvictingAllocator(FullAttentionCacheAllocator):
    """Allocates the full-attention layers of one engine and evicts from them. `kind` makes the class to register."""

    supports_block_sharing = False  # after compaction a block no longer holds the tokens that requests share
    supports_block_table = False  # a kernel that writes new tokens itself uses lengths that bypass the allocator
    text: ClassVar[PreTrainedConfig]  # the text config of the engine's model
    batching: ClassVar[Batching]

    @staticmethod
    def kind(text: PreTrainedConfig, batching: Batching) -> type[EvictingAllocator]:
        """Return the class for one model's engine. Engines of other models still get transformers' own allocator."""
        return type("EvictingAllocator", (EvictingAllocator,), {"text": text, "batching": batching})

    def __new__(cls, *args: Any, config: PreTrainedConfig, **options: Any) -> Any:
        if config is not cls.text:
            return FullAttentionCacheAllocator(*args, config=config, **options)  # type: ignore[misc]
        return super().__new__(cls)

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.schedule, self.policy = self.batching.schedule, self.batching.policy
        self._prompts: dict[str, int] = {}  # tokens of each request's prompt
        self._scheduled: deque[str] = deque()  # the step's requests without a row in `_step`
        self._step: list[Row] = []
        #: For requests that were evicted: int32 [layers, Hk, slots], the positions of the slots kept then. Later slots
        #: count on from there.
        self._positions: dict[str, Tensor] = {}

    def register_cache_tensor(self, *args: Any, **options: Any) -> None:
        super().register_cache_tensor(*args, **options)
        #: By layer: [all blocks, Hk, page, d], views of the engine's memory, indexed by block number.
        layers = self._blocks().unbind(1)
        self._k, self._v = ([layer[:, part].transpose(1, 2) for layer in layers] for part in (0, 1))
        last = self.num_blocks - 1
        for i, layer in enumerate(self.layer_indices):
            slot = last * self.block_physical_stride
            for pages, tokens in zip((self._k[i], self._v[i]), self._kv_token_views[layer]):
                if pages[last, :, 0].data_ptr() != tokens[slot].data_ptr():
                    raise _changed("blocks of [layers, K and V, page, heads, head_dim]", "another order")
        self._rings = EngineRingTable(self._step, self.cache_tensor.device)
        self._observer = observer(self.policy, self.tokens_per_page, self._rings)
        kinds = dict.fromkeys(self.policy.needs.per_slot, torch.float32)
        shape = len(self._k[0]), self.num_key_value_heads, self.tokens_per_page
        self._memories = [LayerMemory(shape, kinds, self.cache_tensor.device) for _ in self.layer_indices]
        self._inputs: AttentionInputs | None = None
        self._observation: Observation | None = None
        self._observing: list[tuple[Tensor | None, dict[str, Any]]] = []  # by layer
        if self._observer is not None:
            pass_queries()

    def _blocks(self) -> Tensor:
        """Return the engine's memory as [all blocks, layers, 2, page, Hk, d]."""
        shape = (-1, self.pages_per_block, 2, self.tokens_per_page, self.num_key_value_heads, self.head_dim)
        return self.cache_tensor.view(shape)

    # ---- what the scheduler says ----

    def join(self, request: str, prompt: int) -> None:
        """Add a request with a prompt of `prompt` tokens."""
        self._prompts[request] = prompt

    def scheduled(self, requests: Iterable[str]) -> None:
        """Receive the requests of the next step, in order."""
        self._scheduled = deque(requests)

    def held(self, request: str, n: int) -> int:
        """Return the slots of a request with n computed tokens."""
        return self.schedule.held(n, self._prompt(request))

    def cut(self, request: str, n: int, new: int) -> int:
        """Return how many of its `new` next tokens a step may take."""
        return self.schedule.cut(n, new, self._prompt(request))

    def _prompt(self, request: str) -> int:
        if request not in self._prompts:
            raise _changed("a scheduler to which all requests are added", f"the unknown request {request!r}")
        return self._prompts[request]

    # ---- the engine's calls, with held(past_length) slots for `past_length` tokens ----

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        return super().needs_new_blocks(request_id, *self._slots(request_id, past_length, query_length))

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        if self._step:
            # After a step that failed, or a replayed graph, which calls no `update`. Its requests would continue with
            # slots that have not been moved, or with scores that count queries twice.
            raise RuntimeError(
                "continuous_batching: expected `update` to succeed for all layers of a step, got a step that ended "
                f"before the last one; free its requests, {[x.request for x in self._step]}, and compute them again"
            )
        super().allocate_cache_to_request(request_id, *self._slots(request_id, past_length, query_length))
        self.batching.most_blocks = max(self.batching.most_blocks, len(self.block_table[request_id]))

    def _slots(self, request: str, n: int, new: int) -> tuple[int, int]:
        """Return a request's slots before a step and its new ones. The scheduler has yet to cut the tokens."""
        return self.held(request, n), self.cut(request, n, new)

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        if not self._scheduled:
            raise _changed("one `get_seqlen_k` for each scheduled request", "one more")
        return super().get_seqlen_k(self.held(self._scheduled[0], past_length), query_length)

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        return super().get_read_indices(request_id, self.held(request_id, past_length), query_length)

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        if not self._scheduled or request_id != self._scheduled[0]:
            raise _changed(f"the scheduled requests in order, {[*self._scheduled]}", repr(request_id))
        if query_length > (most := self.cut(request_id, past_length, query_length)):
            raise _changed(f"a step that ends with an eviction, after {most} tokens", query_length)
        self._scheduled.popleft()
        start = self._step[-1].start + self._step[-1].n - self._step[-1].before if self._step else 0
        n, before = past_length + query_length, self.held(request_id, past_length)
        row = Row(
            request_id,
            start,
            self._prompt(request_id),
            past_length,
            n,
            before + query_length,
            self.held(request_id, n),
        )
        self._step.append(row)
        return super().get_write_indices(request_id, before, query_length)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        self._step[:] = [x for x in self._step if x.request != request_id]
        self._positions.pop(request_id, None)
        self._prompts.pop(request_id, None)
        self._rings.leave(request_id)
        super().free_blocks(request_id, no_cache)

    def fork_blocks(
        self, source_request_id: str, dest_request_id: str, past_length: int
    ) -> tuple[list[int], list[int]]:
        self.join(dest_request_id, self._prompt(source_request_id))
        if source_request_id in self._positions:
            self._positions[dest_request_id] = self._positions[source_request_id]
        source, dest = super().fork_blocks(source_request_id, dest_request_id, past_length)
        ring = self._rings.get(source_request_id)
        for layer in self._memories:
            for pool in layer.slots.values():
                pool[dest] = pool[source]
        if ring is not None:
            assert isinstance(self._observer, LastQueries)  # only this observer assigns rings
            self._observer.copy(self._memories, ring, self._rings.join(dest_request_id))
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

    def take(self, inputs: AttentionInputs) -> None:
        """Receive the queries of the layer that is updated next."""
        self._inputs = inputs

    # ---- eviction ----

    @property
    def _due(self) -> list[Row]:
        return [x for x in self._step if x.keep < x.held]

    def _observe(self, layer: int) -> None:
        """Let a layer's queries observe, and keep the queries that score this step's evictions."""
        inputs, self._inputs = self._inputs, None
        if inputs is None:
            raise _changed("an attention that `kvops.hf.query_hook` has wrapped", "a layer without queries")
        if layer == 0:
            self._observation, self._observing = self._observation_of_step(), []
        if self._observation is None or len(self._observing) != layer:
            raise _changed("an `update` for each layer in order", f"one for layer {self.layer_indices[layer]}")

        def keys(table: Tensor) -> View:
            return View(self._k[layer], self._v[layer], block_table=table)

        observing = self._observation(self._memories[layer], inputs.query, keys, inputs.logits)
        self._observing.append((observing, inputs.logits))

    def _observation_of_step(self) -> Observation:
        assert self._observer is not None
        rows = self._step
        table = self._table(rows)
        ends = [(row, x.n) for row, x in enumerate(rows) if x.keep < x.held]
        with torch.device("cpu"):  # regardless of the default device
            starts, before, after, lengths = torch.tensor([(x.start, x.before, x.n, x.held) for x in rows]).unbind(1)
            return self._observer.step(Batch(table, starts, before, after), ends, table, lengths)

    def _evict(self) -> None:
        """Evict all due requests: compute all that changes, then move the rows of all layers with one call."""
        by_rule: dict[Policy, list[int]] = {}
        for i, x in enumerate(due := self._due):
            by_rule.setdefault(self.schedule.rule(x.before, x.n, x.prompt), []).append(i)
        if not due:
            return
        selected = [self._select(rule, due, own) for rule, own in by_rule.items()]
        rows = [due[i] for own in by_rule.values() for i in own]
        kept, positions = (torch.cat(by_slot.widened(x, -1), 1) for x in zip(*selected))
        table = self._table(rows)
        moved = [
            (pool, by_slot.read(pool, table).gather(2, indices.clamp(min=0)))
            for layer, indices in zip(self._memories, kept)
            for pool in layer.slots.values()
        ]
        left = {x.request: positions[:, i, :, : x.keep].clone() for i, x in enumerate(rows)}
        # If this fails, `allocate_cache_to_request` refuses further steps until the step's requests have been freed.
        compact_kv_(self._k, self._v, list(kept.unbind()), block_table=table)
        for pool, values in moved:
            by_slot.write(pool, table, values)
        self._positions |= left
        for x in rows:
            self._give_back(x)

    def _select(self, rule: Policy, due: list[Row], own: list[int]) -> tuple[Tensor, Tensor]:
        """Select the slots to keep for some of the due requests.

        Returns:
            The slots to keep, int64 [layers, b, Hk, m], -1 last; and their positions, int32 of the same shape.
        """
        device, layers, rows = self.cache_tensor.device, self.pages_per_block, [due[i] for i in own]
        table = self._table(rows)
        with torch.device("cpu"):
            lengths, keep = to_device(
                device, torch.tensor([(x.held, x.keep) for x in rows], dtype=torch.int32).T.contiguous()
            )
            seen = to_device(device, torch.tensor([x.n for x in rows]))
        positions = torch.stack([self._positions_of(x, table.shape[1] * self.tokens_per_page) for x in rows], 1)
        kept = []
        for i in range(layers):
            view = self._view(rule, i, table, lengths)
            view.kept, view.tokens = positions[i].long(), seen
            if isinstance(rule, QueryPolicy):
                observing, logits = self._observing[i]
                if observing is None:
                    view.observed = by_slot.read(self._memories[i].slots["scores"], table)
                else:
                    rows_at = rule.rows_at(rows[0].n, rows[0].prompt)
                    rule.observe(view, observing[own, :, -rows_at:], None, logits)
            kept.append(rule.select(view))
        got = torch.stack([(x >= 0).sum(-1) for x in kept])
        if not torch.equal(got, keep[:, None].expand_as(got)):  # the next step would read empty slots
            raise RuntimeError(
                f"continuous_batching: {rule!r} must keep as many slots as its `held` returns, expected "
                f"{keep.tolist()} of {lengths.tolist()} slots, got {got.tolist()} by layer, request and head"
            )
        slots = torch.stack(kept)
        return slots, positions.gather(-1, slots.clamp(min=0))

    def _view(self, rule: Policy, layer: int, table: Tensor, lengths: Tensor) -> View:
        """Return a rule's view of a layer: its pages, or a dense copy for rules that do not support pages."""
        k, v = self._k[layer], self._v[layer]
        where: dict[str, Any] = dict(lengths=lengths, layer=layer, num_layers=self.pages_per_block)
        if not rule.needs.dense:
            return View(k, v, block_table=table, **where)
        k, v = (dense_rows(x, table) for x in (k, v))
        return View(k, v, **where)

    def _table(self, rows: list[Row]) -> Tensor:
        """Return the blocks in use, int32 [rows, blocks], -1 after a row's own blocks."""
        tables = [self.block_table[x.request][: self._blocks_of(x.held)] for x in rows]
        width = max(map(len, tables))
        with torch.device("cpu"):  # the host knows these, so nothing waits for a GPU
            table = torch.tensor([x + [-1] * (width - len(x)) for x in tables], dtype=torch.int32)
        return to_device(self.cache_tensor.device, table)

    def _positions_of(self, x: Row, width: int) -> Tensor:
        """Return the positions of a request's slots, int32 [layers, Hk, width]; entries after them are arbitrary."""
        heads, device = (self.pages_per_block, self.num_key_value_heads), self.cache_tensor.device
        known = self._positions.get(x.request, torch.empty(*heads, 0, dtype=torch.int32, device=device))
        first = x.n - x.held + known.shape[2]
        new = torch.arange(first, first + width - known.shape[2], dtype=torch.int32, device=device)
        return torch.cat((known, new.expand(*heads, -1)), 2)

    def _give_back(self, x: Row) -> None:
        """Return the blocks after a request's kept slots to the pool."""
        table = self.block_table[x.request]
        behind = table[self._blocks_of(x.keep) :]
        del table[self._blocks_of(x.keep) :]
        self.pool.free_blocks(self.index, behind)
        self.batching.evictions += 1
        self.batching.tokens += x.held - x.keep
        self.batching.blocks += len(behind)

    def _blocks_of(self, slots: int) -> int:
        return -(-slots // self.tokens_per_page)


class EvictingScheduler(Scheduler):
    """The engine's scheduler, which counts a request's slots and ends a step where the request is evicted.

    `_adapt` makes it the first base of the scheduler's own class.
    """

    allocator: EvictingAllocator

    def add_waiting_request(self, state: RequestState) -> None:
        """Receive a new request, or one that starts again with its generated tokens.

        Raises:
            ValueError: The pool cannot hold its prompt. The engine then fails this request alone.
        """
        a = self.allocator
        prompt, slots = state._true_initial_tokens or len(state.initial_tokens), a.num_blocks * a.tokens_per_page
        if (most := a.schedule.most(prompt)) > slots:
            raise ValueError(
                f"continuous_batching: the prompt of request {state.request_id!r} needs {most} slots until it is "
                f"evicted, expected at most {slots}, which all blocks of the pool hold; use evict='blocks:N' or a "
                "larger pool (num_blocks, max_memory_percent)"
            )
        a.join(state.request_id, prompt)
        super().add_waiting_request(state)

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
        self.allocator.scheduled(())
        batch, *rest = super().schedule_batch(token_budget, cache_budget)  # type: ignore[safe-super]
        self.allocator.scheduled(x.state.request_id for x in batch or ())
        return batch, *rest

    def _infer_request_tokens(self, state: RequestState, request_ids_to_remove_from_waiting: set[str]) -> list[int]:
        # Next, the scheduler counts the slots that the request reads: min(current_len(), read_cache_limit). The engine
        # has no limit for full attention, and a request with more tokens than slots exist would wait forever.
        n = state.current_len()
        windows = (getattr(x, "sliding_window", 0) for x in self.cache.cache_allocators.values())
        self.cache.read_cache_limit = max(self.allocator.held(state.request_id, n), *windows)
        return super()._infer_request_tokens(state, request_ids_to_remove_from_waiting)

    def _schedule_request(
        self,
        state: RequestState,
        request_tokens: list[int],
        token_budget: int,
        request_ids_to_remove_from_waiting: set[str],
    ) -> None:
        most = self.allocator.cut(state.request_id, state.current_len(), len(request_tokens))
        super()._schedule_request(state, request_tokens, min(token_budget, most), request_ids_to_remove_from_waiting)


def evicting_engine(make: Callable[[], Any], text: PreTrainedConfig, batching: Batching) -> Any:
    """Call `make`, which creates a model's engine, so that the engine's layers evict, and return its result."""
    kind, registry = EvictingAllocator.kind(text, batching), engine.ATTN_TYPE_TO_ALLOCATOR
    with _registry:
        before = registry[FULL_ATTENTION]
        registry[FULL_ATTENTION] = kind
        try:
            processor = make()
        finally:
            registry[FULL_ATTENTION] = before
    _adapt(processor)
    return processor


def has_full_attention(text: PreTrainedConfig) -> bool:
    """Return whether a model's engine has layers to evict from."""
    return FULL_ATTENTION in engine.group_layers_by_attn_type(text)


def _adapt(processor: Any) -> None:
    """Make the engine's scheduler an `EvictingScheduler`."""
    made = processor.cache.cache_allocators.get(FULL_ATTENTION)
    if not isinstance(made, EvictingAllocator):
        raise _changed("an engine whose allocators are those of the registry", type(made).__name__)
    if not hasattr(processor.cache, "read_cache_limit"):
        raise _changed("PagedAttentionCache.read_cache_limit", "none")
    scheduler = getattr(processor, "scheduler", None)
    if not isinstance(scheduler, Scheduler):
        raise _changed("ContinuousBatchProcessor.scheduler", type(scheduler).__name__)
    if not isinstance(scheduler, EvictingScheduler):  # a manager that starts again has the engine that it had
        bases = EvictingScheduler, type(scheduler)
        scheduler.__class__ = type("EvictingScheduler", bases, {"allocator": made})
