"""What queries observe, for the policies that ask, in pages: those of the last tokens (`LastQueries`), or of all
(`AllQueries`).

An observer is made once for layers that share a block table, and asked once in a step for what all of them do then, a
`Look`. What a layer remembers from one step to the next is `Remembered`. A request that is computed from its first
token again begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..methods.base import Policy, View
from ..methods.queries import QueryPolicy
from . import by_slot

#: Of a block table, int32 [b, max_blocks], a view whose K has its keys, by rows or in pages; those of -1 are anything.
Keys = Callable[[Tensor], View]
#: A copy of keys is of about so many pages: of more it takes longer for each, as the allocator maps its memory anew.
PAGES = 128


@dataclass(frozen=True)
class Batch:
    """The requests of a step, [rows] each.

    Attributes:
        table: int32 [rows, max_blocks] on the device, the blocks of each. The first one names it.
        starts: int64 on the host, as all that follow: where its tokens begin among the step's.
        before: tokens computed before the step; after: and with it.
    """

    table: Tensor
    starts: Tensor
    before: Tensor
    after: Tensor


def on(device: torch.device, values: Tensor) -> Tensor:
    """Values of the host on the device, without waiting for it."""
    if device.type == "cuda":
        values = values.pin_memory()  # of memory that is not pinned, a copy may wait for the stream
    return values.to(device, non_blocking=True)


class Remembered:
    """What a layer remembers beside its cache.

    Attributes:
        slots: numbers of each slot, as `by_slot` has them.
    """

    def __init__(self, shape: Sequence[int], kinds: Mapping[str, torch.dtype], device: torch.device):
        """shape: num_blocks, Hk, block_size. kinds: of the numbers, by name."""
        self.num_blocks, heads, block_size = shape
        shape = self.num_blocks + 1, heads, block_size
        self.slots = {name: torch.empty(shape, dtype=kind, device=device) for name, kind in kinds.items()}
        self._queries: Tensor | None = None

    def last(self, places: int, like: Tensor) -> Tensor:
        """[at least places, Hq, d]: queries of earlier steps, where a `Look` has put them. like: [any, Hq, d]."""
        if self._queries is None or len(self._queries) < places:
            known = like[:0] if self._queries is None else self._queries
            room = max(places, 2 * len(known)) - len(known)
            self._queries = torch.cat((known, like.new_zeros(room, *like.shape[1:])))
        return self._queries

    def copy_last(self, source: slice, dest: slice) -> None:
        """Queries of some places to others."""
        if self._queries is not None:
            last = self.last(dest.stop, self._queries)
            last[dest] = last[source]


class Look(Protocol):
    """What the queries of a step are to do in each layer."""

    def __call__(self, memory: Remembered, query: Tensor, keys: Keys, logits: Mapping[str, Any]) -> Tensor | None:
        """Remembers what later steps need; the queries that observe in this one's moves, [moves, Hq, rows, d].

        Args:
            memory: of the layer.
            query: [tokens, Hq, d], of all requests.
            keys: of the layer's cache, with the step's tokens.
            logits: see `kvops.methods.queries.Logits`.
        """


class Observer(Protocol):
    def step(self, batch: Batch, ends: Sequence[tuple[int, int]], table: Tensor, lengths: Tensor) -> Look:
        """What all layers do in a step.

        Args:
            batch: the requests.
            ends: of each move its row of the batch, and one past the last token that it looks at.
            table: int32 [rows, any] on the device, the blocks that each request holds, with the step's.
            lengths: int64 [rows] on the host, the slots that it uses of them.
        """


class Rings(Protocol):
    """A small number for each request that lives, which it keeps.

    Attributes:
        most: one past the greatest.
    """

    most: int

    def of(self, batch: Batch) -> Tensor:
        """int64 [rows], on the device."""


def observer(policy: Policy, block_size: int, rings: Rings) -> Observer | None:
    """What a policy needs: None if it does not look at queries."""
    if not isinstance(policy, QueryPolicy):
        return None
    if policy.by_slot:
        return AllQueries(policy, block_size)
    return LastQueries(policy.rows_at(0, 0), rings)


def check_observed(who: str, policy: Policy) -> None:
    """Raises for a policy that no observer serves. who: the engine's side."""
    name = policy.name
    if policy.uses_queries and not isinstance(policy, QueryPolicy):
        raise ValueError(f"{name}: {who} expects a policy that looks at queries as QueryPolicy does, got {policy!r}")
    if policy.by_slot not in ((), ("scores",)) or (policy.by_slot and not policy.uses_queries):
        raise ValueError(
            f"{name}: {who} keeps the sums of what queries observed for each slot, and nothing else, expected "
            f"by_slot=('scores',), got {policy.by_slot!r}"
        )
    if isinstance(policy, QueryPolicy) and not policy.by_slot and not policy.rows_at(0, 0):
        raise ValueError(f"{name}: {who} expects a window of at least one query, or by_slot, got {policy!r}")


class LastQueries:
    """The last `window` queries before the end of what a move looks at, however they came in steps.

    A move's step brings at least the last of them, so window - 1 are remembered of each request, in a ring: that of the
    token at position p lies at p % (window - 1).
    """

    def __init__(self, window: int, rings: Rings):
        self.window, self.room, self._rings = window, window - 1, rings

    def step(self, batch: Batch, ends: Sequence[tuple[int, int]], table: Tensor, lengths: Tensor) -> LookAtLast:
        device, room = batch.table.device, max(1, self.room)
        ring = self._rings.of(batch) if self.room else torch.zeros_like(batch.table[:, 0])
        first = batch.starts - batch.before  # the query of position p is the step's first + p, if it is one of its

        moving, end = torch.tensor(ends, dtype=torch.int64).reshape(-1, 2).unbind(1)
        asked = end[:, None] + torch.arange(-self.window, 0)  # positions
        own = asked >= batch.before[moving, None]
        newest = batch.after[:, None] + torch.arange(-self.room, 0)
        row, column = (newest >= batch.before[:, None]).nonzero(as_tuple=True)
        position = newest[row, column]
        return LookAtLast(
            own=None if own.all() else on(device, own),
            rows=on(device, (first[moving, None] + asked).clamp(min=0)),
            places=ring[on(device, moving), None] * room + on(device, asked % room),
            new_rows=on(device, first[row] + position),
            new_places=ring[on(device, row)] * room + on(device, position % room),
            most=self.room * self._rings.most,
        )

    def copy(self, layers: Sequence[Remembered], source: int, dest: int) -> None:
        """What is remembered of one request is that of another too. source, dest: their rings."""
        for layer in layers:
            layer.copy_last(*(slice(ring * self.room, (ring + 1) * self.room) for ring in (source, dest)))


@dataclass
class LookAtLast:
    """A step of `LastQueries`.

    Attributes:
        own: bool [moves, window], whether a query is one of the step's; None: all are.
        rows: int64 [moves, window], then it is this one; places: else it is remembered here.
        new_rows: int64 [any], the step's queries that are to be remembered; new_places: where.
        most: places that the memory needs.
    """

    own: Tensor | None
    rows: Tensor
    places: Tensor
    new_rows: Tensor
    new_places: Tensor
    most: int

    def __call__(self, memory: Remembered, query: Tensor, keys: Keys, logits: Mapping[str, Any]) -> Tensor | None:
        last, observing = memory.last(self.most, query), None
        if len(self.rows):
            observing = query[self.rows]
            if self.own is not None:
                observing = torch.where(self.own[..., None, None], observing, last[self.places])
            observing = observing.transpose(1, 2)
        last.index_copy_(0, self.new_places, query.index_select(0, self.new_rows))  # not before the last ones were read
        return observing


class AllQueries:
    """All queries observe all that their requests hold at the time, and what they observe is added up slot by slot.

    The engine's attention leaves no weights behind, so they are computed once more.
    """

    def __init__(self, rule: QueryPolicy, block_size: int):
        self.rule, self.block_size = rule, block_size

    def step(self, batch: Batch, ends: Sequence[tuple[int, int]], table: Tensor, lengths: Tensor) -> LookOfAll:
        new, calls = batch.after - batch.before, list[Call]()
        for count in new.unique().tolist():
            (same,) = (new == count).nonzero(as_tuple=True)
            pages = -(-int(lengths[same].max()) // self.block_size)
            calls += (
                self._call(batch.starts[i], table, i, lengths[i], count) for i in same.split(max(1, PAGES // pages))
            )
        return LookOfAll(self.rule, calls)

    def _call(self, starts: Tensor, table: Tensor, rows: Tensor, lengths: Tensor, count: int) -> Call:
        """Of requests with as many new tokens each."""
        pages = -(-int(lengths.max()) // self.block_size)
        columns, slots = torch.arange(pages), torch.arange(pages * self.block_size)
        new, device = torch.arange(count), table.device
        return Call(
            on(device, starts[:, None] + new),
            torch.where(on(device, columns * self.block_size < lengths[:, None]), table[on(device, rows), :pages], -1),
            on(device, (lengths[:, None] - count + 1 + new).int()),
            on(device, slots < (lengths - count)[:, None, None]),
        )


class Call(NamedTuple):
    """Requests of a step with as many new tokens each."""

    rows: Tensor  # int64 [b, t], of the step's queries
    table: Tensor  # int32 [b, pages], -1 behind what they hold
    visible: Tensor  # int32 [b, t], the slots that each query sees
    known: Tensor  # bool [b, 1, pages * block_size], those that had been observed before


@dataclass
class LookOfAll:
    """A step of `AllQueries`."""

    rule: QueryPolicy
    calls: list[Call]

    def __call__(self, memory: Remembered, query: Tensor, keys: Keys, logits: Mapping[str, Any]) -> None:
        for rows, table, visible, known in self.calls:
            scores = self.rule.summed(query[rows].transpose(1, 2), keys(table), visible, None, None, logits)
            assert scores is not None  # as there are rows
            sums = memory.slots["scores"]
            by_slot.write(sums, table, scores.add_(torch.where(known, by_slot.read(sums, table), 0.0)))
