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
from . import cpu_pages
from .plan import Plan

#: A copy of keys is of about so many pages: of more it takes longer for each, as the allocator maps its memory anew.
PAGES = 128


class Row(NamedTuple):
    """A request in a step."""

    block: int  # its first
    start: int  # of its tokens in the step's
    before: int  # tokens computed before the step,
    after: int  # and with it


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
        self.slots = {name: torch.empty(num_blocks + 1, heads, size, dtype=kind) for name, kind in kinds.items()}
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

    def __call__(
        self, memory: Memory, query: Tensor, kv_cache: Tensor, isa: str, logits: Mapping[str, Any]
    ) -> Tensor | None:
        """Remembers what later steps need; the queries that observe in this one's moves, [moves, Hq, rows, d].

        Args:
            memory: of the layer.
            query: [tokens, Hq, d], of all requests.
            kv_cache: [num_blocks, Hk, block_size, 2 * d], with the step's tokens.
            isa: of the layer; see `cpu_pages`.
            logits: see `kvops.methods.queries.Logits`.
        """


class Observer(Protocol):
    def step(self, rows: Sequence[Row], ends: Sequence[tuple[int, int]], table: Tensor, lengths: Tensor) -> Look:
        """What all layers do in a step.

        Args:
            rows: the requests.
            ends: of each move its row, and one past the last token that it looks at.
            table: int32 [rows, any], the blocks that each request holds, with the step's.
            lengths: int32 [rows], the slots that it uses of them.
        """


def observer(plan: Plan, requests: int) -> Observer | None:
    """What a plan's rule needs: None if it does not look at queries. requests: the most that live at a time."""
    rule = plan.rule
    if not isinstance(rule, QueryPolicy):
        return None
    return AllQueries(rule, plan.block_size) if rule.by_slot else LastQueries(rule.rows_at(0, 0), requests)


class LastQueries:
    """The last `window` queries before the end of what a move looks at, however they came in steps.

    A move's step brings at least the last of them, so window - 1 are remembered of each request, in a ring: that of the
    token at position p lies at p % (window - 1).
    """

    def __init__(self, window: int, requests: int):
        self.window, self.room, self._rings = window, window - 1, Rings(requests)

    def step(self, rows: Sequence[Row], ends: Sequence[tuple[int, int]], table: Tensor, lengths: Tensor) -> LookAtLast:
        rings = self._rings.of(rows) if self.room else [0] * len(rows)
        room, ring = max(1, self.room), torch.tensor(rings, dtype=torch.int64)
        start, before, after = torch.tensor([x[1:] for x in rows], dtype=torch.int64).unbind(1)
        first = start - before  # the query of position p is the step's first + p, if it is one of the step's

        moving = torch.tensor([row for row, _ in ends], dtype=torch.int64)
        end = torch.tensor([end for _, end in ends], dtype=torch.int64)
        asked = end[:, None] + torch.arange(-self.window, 0)  # positions
        newest = after[:, None] + torch.arange(-self.room, 0)
        kept = newest >= before[:, None]
        return LookAtLast(
            own=asked >= before[moving, None],
            rows=first[moving, None] + asked,
            places=ring[moving, None] * room + asked % room,
            new_rows=(first[:, None] + newest)[kept],
            new_places=(ring[:, None] * room + newest % room)[kept],
            most=self.room * (max(rings, default=0) + 1),
        )


class Rings:
    """A small number for each request that lives, which it keeps."""

    def __init__(self, requests: int):
        self._most = requests
        self._of = dict[int, int]()  # by the first block; those seen last come last

    def of(self, rows: Sequence[Row]) -> list[int]:
        for x in rows:
            if x.before and x.block not in self._of:
                raise RuntimeError(
                    "kvops.vllm: expected to have seen the queries of a request from its first token on, got one with "
                    f"{x.before} tokens computed before"
                )
        for block in [x.block for x in rows if x.block in self._of]:
            self._of[block] = self._of.pop(block)
        for block in [x.block for x in rows if x.block not in self._of]:
            # Where there is one for each that lives, that of a request which ended is free, and seen least lately.
            free = self._of.pop(next(iter(self._of))) if len(self._of) == self._most else len(self._of)
            self._of[block] = free
        return [self._of[x.block] for x in rows]


@dataclass
class LookAtLast:
    """A step of `LastQueries`.

    Attributes:
        own: bool [moves, window], whether a query is one of the step's.
        rows: int64 [moves, window], then it is this one; places: else it is remembered here.
        new_rows: int64 [any], the step's queries that are to be remembered; new_places: where.
        most: places that the memory needs.
    """

    own: Tensor
    rows: Tensor
    places: Tensor
    new_rows: Tensor
    new_places: Tensor
    most: int

    def __call__(
        self, memory: Memory, query: Tensor, kv_cache: Tensor, isa: str, logits: Mapping[str, Any]
    ) -> Tensor | None:
        last, observing = memory.last(self.most, query), None
        if len(self.own):
            observing = query[self.rows.clamp(min=0)]
            if not self.own.all():
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

    def step(self, rows: Sequence[Row], ends: Sequence[tuple[int, int]], table: Tensor, lengths: Tensor) -> LookOfAll:
        new, start = [x.after - x.before for x in rows], torch.tensor([x.start for x in rows])
        calls = list[Call]()
        for count in sorted({*new} - {0}):
            same = torch.tensor([i for i, x in enumerate(new) if x == count])
            pages = -(-int(lengths[same].max()) // self.block_size)
            calls += (self._call(start[i], table[i], lengths[i], count) for i in same.split(max(1, PAGES // pages)))
        return LookOfAll(self.rule, calls)

    def _call(self, start: Tensor, table: Tensor, lengths: Tensor, count: int) -> Call:
        """Of requests with as many new tokens each."""
        pages = -(-int(lengths.max()) // self.block_size)
        columns, slots = torch.arange(pages), torch.arange(pages * self.block_size)
        new = torch.arange(count)
        return Call(
            start[:, None] + new,
            torch.where(columns * self.block_size < lengths[:, None], table[:, :pages], -1),
            (lengths[:, None] - count + 1 + new).int(),
            slots < (lengths - count)[:, None, None],
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

    def __call__(self, memory: Memory, query: Tensor, kv_cache: Tensor, isa: str, logits: Mapping[str, Any]) -> None:
        for rows, table, visible, known in self.calls:
            k = cpu_pages.keys(kv_cache, table, isa=isa)
            scores = self.rule.summed(query[rows].transpose(1, 2), View(k, k), visible, None, None, logits)
            assert scores is not None  # as there are rows
            sums = memory.slots["scores"]
            by_slot.write(sums, table, scores.add_(torch.where(known, by_slot.read(sums, table), 0.0)))
