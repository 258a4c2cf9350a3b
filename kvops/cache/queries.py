"""Query observation in paged caches, for policies that score keys by queries.

`LastQueries` observes with the last tokens' queries, `AllQueries` with all queries.

Layers that share a block table share an observer. In each step the observer returns an `Observation`, which every layer
then calls. `LayerMemory` holds what a layer remembers from one step to the next. A request that is recomputed from its
first token starts over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..methods.base import Policy
from ..methods.queries import QueryPolicy
from ..methods.view import View
from . import by_slot

#: Maps a block table, int32 [b, max_blocks], to a view with its keys, dense or paged. Keys of block -1 are arbitrary.
Keys = Callable[[Tensor], View]
#: Keys are copied in batches of about this many pages. Larger copies take longer per page, because the allocator maps
#: their memory again each time.
PAGES = 128


@dataclass(frozen=True)
class Batch:
    """The requests of a step, one per row.

    Attributes:
        table: int32 [rows, max_blocks] on the device, the blocks of each request.
        starts: int64 [rows] on the host, where each request's tokens begin among the step's tokens.
        before: int64 [rows] on the host, tokens computed before the step.
        after: int64 [rows] on the host, tokens computed after the step.
        requests: The requests, if the engine's `RingTable` tells them apart by this: the same object in each step.
    """

    table: Tensor
    starts: Tensor
    before: Tensor
    after: Tensor
    requests: Sequence[object] = ()


def to_device(device: torch.device, values: Tensor) -> Tensor:
    """Copy host values to the device without waiting for it."""
    if device.type == "cuda":
        values = values.pin_memory()  # copies from pageable memory may wait for the stream
    return values.to(device, non_blocking=True)


class LayerMemory:
    """What a layer remembers besides its cache.

    Attributes:
        slots: Per-slot numbers by name, in the layout of `by_slot`.
    """

    def __init__(self, shape: Sequence[int], kinds: Mapping[str, torch.dtype], device: torch.device):
        """Allocate the per-slot numbers. shape: (num_blocks, Hk, block_size). kinds: their dtypes by name."""
        self.num_blocks, heads, block_size = shape
        shape = self.num_blocks + 1, heads, block_size
        self.slots = {name: torch.empty(shape, dtype=kind, device=device) for name, kind in kinds.items()}
        self._queries: Tensor | None = None

    def write(self, table: Tensor, values: Mapping[str, Tensor]) -> None:
        """Write per-slot numbers to the first slots of a table, see `by_slot.write`."""
        for name, pool in self.slots.items():
            by_slot.write(pool, table, values[name].to(pool.dtype))

    def last(self, places: int, like: Tensor) -> Tensor:
        """Return queries of earlier steps, [>= places, Hq, d], where an `Observation` put them. like: [t, Hq, d]."""
        if self._queries is None or len(self._queries) < places:
            known = like[:0] if self._queries is None else self._queries
            room = max(places, 2 * len(known)) - len(known)
            self._queries = torch.cat((known, like.new_zeros(room, *like.shape[1:])))
        return self._queries

    def copy_last(self, source: slice, dest: slice) -> None:
        """Copy the queries of some places to others."""
        if self._queries is not None:
            last = self.last(dest.stop, self._queries)
            last[dest] = last[source]


class Observation(Protocol):
    """What each layer does with the queries of a step."""

    def __call__(self, memory: LayerMemory, query: Tensor, keys: Keys, logits: Mapping[str, Any]) -> Tensor | None:
        """Remember what later steps need, and return the queries that score this step's evictions.

        Args:
            memory: The layer's memory.
            query: [tokens, Hq, d], the queries of all requests.
            keys: Reads the layer's cache, with the step's tokens.
            logits: Logit options, see `kvops.methods.queries.Logits`.

        Returns:
            [evictions, Hq, rows, d]; None if nothing is evicted, or if the scores are already in `memory.slots`.
        """


class Observer(Protocol):
    """Observes the requests of all steps.

    Attributes:
        in_decode: Whether tokens after a request's prompt observe; otherwise a step may leave out their requests.
    """

    in_decode: bool

    def step(self, batch: Batch, ends: Sequence[tuple[int, int]], table: Tensor, lengths: Tensor) -> Observation:
        """Return what all layers do in a step.

        Args:
            batch: The requests.
            ends: For each eviction, the request's row in the batch, and one past the last token that it considers.
            table: int32 [rows, max_blocks] on the device, each request's blocks, those of the step included.
            lengths: int64 [rows] on the host, how many slots of its blocks each request uses.
        """


class RingTable(Protocol):
    """Assigns each live request a small number, which it keeps as long as it lives.

    Attributes:
        size: One past the largest number.
    """

    size: int

    def numbers(self, batch: Batch, asked: Sequence[tuple[int, int]]) -> Tensor:
        """Return the requests' numbers, int64 [rows], on the device.

        Args:
            batch: The requests.
            asked: Pairs of a row and a position. The row's queries from there on must have been seen.
        """


def observer(policy: Policy, block_size: int, rings: RingTable) -> Observer | None:
    """Return the observer that a policy needs; None if it does not use queries."""
    if not isinstance(policy, QueryPolicy):
        return None
    if policy.needs.per_slot:
        return AllQueries(policy, block_size)
    return LastQueries(window(policy), rings, policy.rows_at(2, 1) > 0)


def window(policy: Policy) -> int:
    """Return how many of a request's last queries score its tokens; 0 if none does, or all."""
    if not isinstance(policy, QueryPolicy):
        return 0
    return max(policy.rows_at(n, 1) for n in (1, 2))  # in the prompt, and after it


def check_observed(who: str, policy: Policy) -> None:
    """Raise ValueError for queries that no observer supports. who: the integration that error messages name."""
    name, per_slot = policy.name, policy.needs.per_slot
    policy.check_engine(who)
    if per_slot and not (isinstance(policy, QueryPolicy) and per_slot == ("scores",)):
        raise ValueError(
            f"{name}: {who} stores only accumulated query scores per slot, expected needs.per_slot=('scores',) of a "
            f"QueryPolicy, got {per_slot!r}"
        )
    if not isinstance(policy, QueryPolicy):
        return
    if per_slot and policy.group_reduce == "max":
        raise ValueError(
            f"{name}: with group_reduce='max' the scores depend on how {who} divides the tokens into steps, expected "
            "'mean' or 'sum', got 'max'"
        )
    if not per_slot and not policy.rows_at(0, 0):
        raise ValueError(
            f"{name}: {who} expects a window of at least one query, or needs.per_slot=('scores',), got {policy!r}"
        )


class LastQueries:
    """Observes with the last `window` queries that an eviction considers, across steps.

    The step of an eviction computes at least the last of these queries itself. So each request remembers window - 1
    queries, in a ring: the query of the token at position p lies at p % (window - 1).
    """

    def __init__(self, window: int, rings: RingTable, in_decode: bool = True):
        self.window, self.room, self._rings, self.in_decode = window, window - 1, rings, in_decode

    def step(self, batch: Batch, ends: Sequence[tuple[int, int]], table: Tensor, lengths: Tensor) -> WindowObservation:
        device, room = batch.table.device, max(1, self.room)
        asked_first = [(row, max(0, end - self.window)) for row, end in ends]
        ring = self._rings.numbers(batch, asked_first) if self.room else torch.zeros_like(batch.table[:, 0])
        first = batch.starts - batch.before  # the step's query of position p is row first + p

        moving, end = torch.tensor(ends, dtype=torch.int64).reshape(-1, 2).unbind(1)
        asked = end[:, None] + torch.arange(-self.window, 0)  # positions
        own = asked >= batch.before[moving, None]
        newest = batch.after[:, None] + torch.arange(-self.room, 0)
        row, column = (newest >= batch.before[:, None]).nonzero(as_tuple=True)
        position = newest[row, column]
        return WindowObservation(
            own=None if own.all() else to_device(device, own),
            rows=to_device(device, (first[moving, None] + asked).clamp(min=0)),
            places=ring[to_device(device, moving), None] * room + to_device(device, asked % room),
            new_rows=to_device(device, first[row] + position),
            new_places=ring[to_device(device, row)] * room + to_device(device, position % room),
            most=self.room * self._rings.size,
        )

    def copy(self, layers: Sequence[LayerMemory], source: int, dest: int) -> None:
        """Copy one request's remembered queries to another. source, dest: their rings."""
        for layer in layers:
            layer.copy_last(*(slice(ring * self.room, (ring + 1) * self.room) for ring in (source, dest)))


@dataclass
class WindowObservation:
    """A step of `LastQueries`.

    Attributes:
        own: bool [evictions, window], whether a query belongs to this step; None: all do.
        rows: int64 [evictions, window], the query's row in the step, where `own`.
        places: int64 [evictions, window], where the query is remembered, where not `own`.
        new_rows: int64 [queries], rows of the step's queries to remember.
        new_places: int64 [queries], where to remember them.
        most: Number of places that the memory needs.
    """

    own: Tensor | None
    rows: Tensor
    places: Tensor
    new_rows: Tensor
    new_places: Tensor
    most: int

    def __call__(self, memory: LayerMemory, query: Tensor, keys: Keys, logits: Mapping[str, Any]) -> Tensor | None:
        last, observing = memory.last(self.most, query), None
        if len(self.rows):
            observing = query[self.rows]
            if self.own is not None:
                observing = torch.where(self.own[..., None, None], observing, last[self.places])
            observing = observing.transpose(1, 2)
        last.index_copy_(0, self.new_places, query.index_select(0, self.new_rows))  # after the old ones have been read
        return observing


class AllQueries:
    """Observes with all queries, each over the slots that its request holds at the time. Scores accumulate per slot.

    The engine's attention returns no weights, so this recomputes them.
    """

    in_decode = True

    def __init__(self, rule: QueryPolicy, block_size: int):
        self.rule, self.block_size = rule, block_size

    def step(self, batch: Batch, ends: Sequence[tuple[int, int]], table: Tensor, lengths: Tensor) -> FullObservation:
        new, calls = batch.after - batch.before, list[Call]()
        for count in new.unique().tolist():
            (same,) = (new == count).nonzero(as_tuple=True)
            pages = -(-int(lengths[same].max()) // self.block_size)
            calls += (
                self._call(batch.starts[i], table, i, lengths[i], count) for i in same.split(max(1, PAGES // pages))
            )
        return FullObservation(self.rule, calls)

    def _call(self, starts: Tensor, table: Tensor, rows: Tensor, lengths: Tensor, count: int) -> Call:
        """Return the call for requests that have `count` new tokens each."""
        pages = -(-int(lengths.max()) // self.block_size)
        columns, slots = torch.arange(pages), torch.arange(pages * self.block_size)
        new, device = torch.arange(count), table.device
        return Call(
            to_device(device, starts[:, None] + new),
            torch.where(
                to_device(device, columns * self.block_size < lengths[:, None]),
                table[to_device(device, rows), :pages],
                -1,
            ),
            to_device(device, (lengths[:, None] - count + 1 + new).int()),
            to_device(device, slots < (lengths - count)[:, None, None]),
        )


class Call(NamedTuple):
    """Requests of a step that have equally many new tokens."""

    rows: Tensor  # int64 [b, t], rows of the step's queries
    table: Tensor  # int32 [b, pages], -1 after a request's own pages
    visible: Tensor  # int32 [b, t], how many slots each query sees
    known: Tensor  # bool [b, 1, pages * block_size], slots observed in earlier steps


@dataclass
class FullObservation:
    """A step of `AllQueries`."""

    rule: QueryPolicy
    calls: list[Call]

    def __call__(self, memory: LayerMemory, query: Tensor, keys: Keys, logits: Mapping[str, Any]) -> None:
        for rows, table, visible, known in self.calls:
            scores = self.rule.summed(query[rows].transpose(1, 2), keys(table), visible, None, None, logits)
            assert scores is not None  # there is at least one row
            sums = memory.slots["scores"]
            by_slot.write(sums, table, scores.add_(torch.where(known, by_slot.read(sums, table), 0.0)))
