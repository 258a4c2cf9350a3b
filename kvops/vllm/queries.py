"""What queries observe, for the policies that ask: those of the last tokens (`LastQueries`), or of all (`AllQueries`).

An observer is made once for a group of layers, and asked once in a step for what all of its layers do then, a `Look`.
What a layer remembers from one step to the next is its `Memory`. A request is known by its first block, which no other
has while it lives. One that is preempted is computed from its first token again, and so begins anew. This module does
not import vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..cache import by_slot
from ..methods.base import Policy, View
from ..methods.queries import QueryPolicy
from .layouts import Layout
from .plan import Plan

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


class Memory:
    """What a layer remembers beside its cache.

    Attributes:
        slots: numbers of each slot, as `by_slot` has them: "positions", int32, of the tokens in blocks that moves have
            filled; and the policy's own, fp32.
    """

    def __init__(self, kv_cache: Tensor, policy: Policy):
        num_blocks, heads, size, _ = kv_cache.shape
        self.num_blocks = num_blocks
        kinds = {"positions": torch.int32} | dict.fromkeys(policy.by_slot, torch.float32)
        shape = num_blocks + 1, heads, size
        self.slots = {name: torch.empty(shape, dtype=kind, device=kv_cache.device) for name, kind in kinds.items()}
        self._queries: Tensor | None = None

    def last(self, places: int, like: Tensor) -> Tensor:
        """[at least places, Hq, d]: queries of earlier steps, where a `Look` has put them. like: [any, Hq, d]."""
        if self._queries is None or len(self._queries) < places:
            known = like[:0] if self._queries is None else self._queries
            room = max(places, 2 * len(known)) - len(known)
            self._queries = torch.cat((known, like.new_zeros(room, *like.shape[1:])))
        return self._queries


class Look(Protocol):
    """What the queries of a step are to do in each layer."""

    def __call__(self, memory: Memory, query: Tensor, layout: Layout, logits: Mapping[str, Any]) -> Tensor | None:
        """Remembers what later steps need; the queries that observe in this one's moves, [moves, Hq, rows, d].

        Args:
            memory: of the layer.
            query: [tokens, Hq, d], of all requests.
            layout: of the layer's cache, with the step's tokens.
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


def observer(plan: Plan, requests: int, device: torch.device) -> Observer | None:
    """What a plan's rule needs: None if it does not look at queries. requests: the most that live at a time."""
    rule = plan.rule
    if not isinstance(rule, QueryPolicy):
        return None
    if rule.by_slot:
        return AllQueries(rule, plan.block_size)
    return LastQueries(rule.rows_at(0, 0), requests, device)


class LastQueries:
    """The last `window` queries before the end of what a move looks at, however they came in steps.

    A move's step brings at least the last of them, so window - 1 are remembered of each request, in a ring: that of the
    token at position p lies at p % (window - 1).
    """

    def __init__(self, window: int, requests: int, device: torch.device):
        self.window, self.room, self._rings = window, window - 1, Rings(requests, device)

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


class Rings:
    """A small number for each request that lives, which it keeps. It is found on the device, which is not waited for.

    Attributes:
        most: one past the greatest.
    """

    def __init__(self, requests: int, device: torch.device):
        self.most = 0
        self._owner = torch.full((requests,), -1, device=device)  # the first block of its request
        self._seen = torch.zeros(requests, dtype=torch.int64, device=device)  # the last step with it
        self._step = 0

    def of(self, batch: Batch) -> Tensor:
        """int64 [rows], on the device."""
        self._step += 1
        self.most = min(len(self._owner), self.most + int((batch.before == 0).sum()))
        blocks = batch.table[:, 0].to(self._owner.dtype)
        same = blocks[:, None] == self._owner
        known = same.any(1)
        torch._assert_async(
            (known | on(blocks.device, batch.before == 0)).all(),
            "kvops.vllm: expected to have seen the queries of a request from its first token on, got one whose "
            "queries were forgotten",
        )
        # Where there is one for each that lives, that of a request which ended is free, and seen least lately.
        seen = torch.where(same.any(0), self._step, self._seen)
        free = seen.argsort(stable=True)[((~known).cumsum(0) - 1).clamp(min=0)]
        ring = torch.where(known, same.int().argmax(1), free)
        self._owner[ring] = blocks
        self._seen[ring] = self._step
        return ring


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

    def __call__(self, memory: Memory, query: Tensor, layout: Layout, logits: Mapping[str, Any]) -> Tensor | None:
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

    vLLM's attention leaves no weights behind, so they are computed once more, from a copy of the keys as rows.
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

    def __call__(self, memory: Memory, query: Tensor, layout: Layout, logits: Mapping[str, Any]) -> None:
        for rows, table, visible, known in self.calls:
            k = layout.keys(table)
            scores = self.rule.summed(query[rows].transpose(1, 2), View(k, k), visible, None, None, logits)
            assert scores is not None  # as there are rows
            sums = memory.slots["scores"]
            by_slot.write(sums, table, scores.add_(torch.where(known, by_slot.read(sums, table), 0.0)))
