"""The work around a step's attention: where its tokens go, scoring with the observing queries, and the evictions.

A step is built once for a group of layers, from host-side metadata. Tables and lengths are copied to the device, and
nothing is read back from it. If queries observe, each layer runs the step after its attention. Otherwise all layers run
it together, at any time between the step's attention and the next write to the cache: it has copies of the tables. The
layers that run together compute all that changes before a row moves. After an error the requests of the step must be
computed again from their first token; vLLM ends the engine. This module does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..cache import by_slot
from ..cache.queries import Batch, LayerMemory, Observation, Observer, to_device
from ..methods.base import Policy
from ..methods.queries import QueryPolicy
from ..methods.select import dense_rows
from ..methods.view import View
from ..ops import compact_kv_, gather_kv
from .layouts import Blocks, Layout
from .plan import Plan, State


class StepSlots(NamedTuple):
    """The blocks and slots that a step's attention reads, and where its tokens are written."""

    table: Tensor  # int32 [rows, any] on the device: each request's blocks outside its gaps; the rest is undefined
    lengths: Tensor  # int64 [rows] on the host: the slots in use, including this step's tokens
    slots: Tensor | None  # int64 [tokens] on the device: each token's slot in the pool; None: as vLLM assigns it

    @classmethod
    def of(cls, plan: Plan, batch: Batch, prompts: Sequence[int]) -> StepSlots:
        """Compute a step's slots. prompts: the tokens of each request's prompt."""
        before = batch.before.tolist()
        states = [plan.at(n, prompt) for n, prompt in zip(before, prompts)]
        if [x.held for x in states] == before:  # nothing has been evicted: the engine's own table and slots serve
            return cls(batch.table, batch.after, None)
        size, device, new = plan.block_size, batch.table.device, batch.after - batch.before
        held = torch.tensor([x.held for x in states])
        lengths = held + new
        table = _outside_gaps(plan, states, batch.table, -(-int(lengths.max()) // size))
        row = torch.arange(len(new)).repeat_interleave(new)
        slot = torch.arange(len(row)) - (batch.starts - held)[row]
        block = table[to_device(device, row), to_device(device, slot // size)].long()
        return cls(table, lengths, block * size + to_device(device, slot % size))


def _outside_gaps(plan: Plan, states: Sequence[State], table: Tensor, width: int) -> Tensor:
    """Return the first `width` blocks outside the gaps of each state. table: [states, any], all blocks."""
    # Columns after a request's last block may hold any block, but must stay inside the table.
    blocks = np.minimum(plan.columns(states, width), table.shape[1] - 1)
    return table.gather(1, to_device(table.device, torch.from_numpy(blocks)))


class Layer(NamedTuple):
    """A layer of the group."""

    layout: Layout
    memory: LayerMemory
    layer_and_count: tuple[int, int]  # the layer's number, and the number of the model's layers
    logits: Mapping[str, Any]  # how the attention computes its logits, see `Observation`


@dataclass
class Eviction:
    """Requests of a step that are evicted by the same policy. All layers evict the same requests.

    The kept tokens move to the front of the blocks, or are copied to others (`copies`), which leaves the blocks as they
    are: requests may share them.

    Attributes:
        rule: its `select` chooses the kept tokens.
        rows: the requests, as rows among those of the step that are evicted.
        blocks: the blocks in use.
        copies: the blocks that the kept tokens are copied to, int32 [requests, any] padded with -1, and for each of
            them, its place in this table as int64 on the device; None if they move within `blocks`.
        lengths: int32 [requests], the slots in use.
        tokens: int64 [requests], the tokens that each request has seen.
        window: how many of the last queries observe.
        positions: the slots that an earlier eviction has kept, bool [requests, 1, width * block_size], and the token
            positions of the others, int32 of the same shape; None if the rule does not read positions.
    """

    rule: Policy
    rows: Tensor
    blocks: Blocks
    copies: tuple[Tensor, Tensor] | None
    lengths: Tensor
    tokens: Tensor
    window: int
    positions: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, plan: Plan, due: Sequence[Due], table: Tensor, all_blocks: Tensor, rows: Sequence[int]) -> Eviction:
        """Build the tensors of requests that the same policy evicts.

        Args:
            plan: the plan.
            due: all evictions of the step.
            table: int32 [due, any] on the device, the blocks of these requests outside their gaps.
            all_blocks: int32 [due, any] on the device, all their blocks.
            rows: the entries of `due` of which this is. All of them copy what they keep, or none.
        """
        size, device, own = plan.block_size, table.device, [due[i] for i in rows]
        index = to_device(device, torch.tensor(rows))
        lengths, n, known, keep = torch.tensor([(x.length, x.n, x.before.kept, x.keep) for x in own]).unbind(1)
        columns, rule = torch.arange(-(-int(lengths.max()) // size)), own[0].rule
        used = columns * size < lengths[:, None]
        own_table = torch.where(to_device(device, used), table[index, : len(columns)], -1)
        positions = None
        if "positions" in plan.kinds:
            slot = torch.arange(len(columns) * size)
            new = slot + (n - lengths)[:, None]
            positions = to_device(device, (slot < known[:, None])[:, None]), to_device(device, new.int()[:, None])
        places, kept, copies = torch.arange(used.numel()).view(used.shape), columns * size < keep[:, None], None
        if own[0].copies:
            states, there = [plan.at(x.n, x.prompt) for x in own], kept[:, : -(-int(keep.max()) // size)]
            new_table = _outside_gaps(plan, states, all_blocks[index], there.shape[1])
            (filled,) = there.flatten().nonzero(as_tuple=True)
            new_table = torch.where(to_device(device, there), new_table, -1)
            copies = new_table, to_device(device, filled)
        return cls(
            rule,
            index,
            Blocks(own_table, places[used], places[kept]),
            copies,
            to_device(device, lengths.int()),
            to_device(device, n),
            rule.rows_at(own[0].n, own[0].prompt) if isinstance(rule, QueryPolicy) else 0,
            positions,
        )

    def run(self, layers: Sequence[Layer], observing: Tensor | None) -> None:
        """Evict in these layers.

        Args:
            layers: the layers, of one shape and dtype.
            observing: [evictions of the step, Hq, any, d], the queries of the only layer with which the rule scores, or
                None if it uses none.
        """
        if self.copies is not None:
            for layer in layers:
                self._copy(layer, observing)
            return
        with ExitStack() as stack:
            rows = [stack.enter_context(layer.layout.rows(self.blocks)) for layer in layers]
            moves = [self._select(layer, *kv, self.blocks.table, observing) for layer, kv in zip(layers, rows)]
            keys, values = zip(*rows)
            compact_kv_(keys, values, [kept for kept, _ in moves], block_table=self.blocks.table)
        for layer, (_, of_slots) in zip(layers, moves):
            layer.memory.write(self.blocks.table, of_slots)

    def _copy(self, layer: Layer, observing: Tensor | None) -> None:
        """Copy the kept tokens to other blocks."""
        assert self.copies is not None
        (table, places), ((k, v), own) = self.copies, layer.layout.read(self.blocks)
        kept, of_slots = self._select(layer, k, v, own, observing)
        size = k.shape[2]
        room = table.shape[1] * size - kept.shape[2]
        padded = (pad(x, (0, 0, 0, room)) for x in gather_kv(k, v, kept, block_table=own))
        k, v = (x.unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1)[places] for x in padded)
        layer.layout.write(table.flatten()[places].long(), k, v)
        layer.memory.write(table, of_slots)

    def _select(
        self, layer: Layer, k: Tensor, v: Tensor, table: Tensor, observing: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the kept slots, int64 [requests, Hk, kept], and the per-slot values that go with them."""
        rule, own = self.rule, self.blocks.table
        of_slots = {name: by_slot.read(pool, own) for name, pool in layer.memory.slots.items()}
        if self.positions is not None:
            known, new = self.positions
            of_slots["positions"] = torch.where(known, of_slots["positions"], new).long()
        view = self._view(k, v, table)
        view.layer, view.num_layers = layer.layer_and_count
        view.tokens = self.tokens
        view.kept = of_slots.get("positions")
        view.observed = of_slots.get("scores")
        if observing is not None:
            assert isinstance(rule, QueryPolicy)  # other policies have no observer
            rule.observe(view, observing[self.rows][:, :, -self.window :], None, layer.logits)
        kept = rule.select(view)
        if self.copies is not None:  # columns behind the slots of the copy are -1
            kept = kept[..., : self.copies[0].shape[1] * k.shape[2]]
        kept = kept.contiguous()
        there = kept.clamp(min=0)  # rows that keep fewer slots than others end in -1
        return kept, {name: values.gather(2, there) for name, values in of_slots.items()}

    def _view(self, k: Tensor, v: Tensor, table: Tensor) -> View:
        """Return the rule's input: the pages, or a copy of their rows if the rule does not support pages."""
        if not self.rule.needs.dense:
            return View(k, v, lengths=self.lengths, block_table=table)
        k, v = (dense_rows(x, table) for x in (k, v))
        return View(k, v, lengths=self.lengths)


class Due(NamedTuple):
    """A request that exceeds its schedule after a step."""

    row: int  # of the batch
    rule: Policy
    before: State
    length: int  # slots in use
    n: int  # tokens seen
    prompt: int
    keep: int
    copies: bool


@dataclass
class Step:
    """The work after a step's attention."""

    plan: Plan
    observation: Observation | None  # what the step's queries do: stored for later steps, or used for scores
    evictions: list[Eviction]

    @classmethod
    def of(
        cls, plan: Plan, observer: Observer | None, held: StepSlots, batch: Batch, prompts: Sequence[int]
    ) -> Step | None:
        """Build the step's work, or return None if there is none.

        Args:
            plan: the plan.
            observer: what tracks queries for the plan's policy, or None if it does not use queries.
            held: the blocks and slots that the step's attention reads.
            batch: the step's requests. Rows that pad a CUDA graph have no new tokens.
            prompts: the tokens of each request's prompt.
        """
        due, schedule = list[Due](), plan.schedule
        rows = zip(batch.before.tolist(), batch.after.tolist(), held.lengths.tolist(), prompts)
        for row, (before, n, length, prompt) in enumerate(rows):
            keep = schedule.held(n, prompt)
            if keep < length and before < n:
                rule = schedule.rule(before, n, prompt)
                state = plan.at(before, prompt)
                due.append(Due(row, rule, state, length, n, prompt, keep, plan.copies(state, before)))
        device, observation = batch.table.device, None
        observed = batch.after > batch.before
        if observer is not None and not observer.in_decode:
            observed &= batch.before < torch.tensor(prompts)
        if observer is not None and observed.any():
            (live,) = observed.nonzero(as_tuple=True)
            place = dict(zip(live.tolist(), range(len(live))))
            index = to_device(device, live)
            observation = observer.step(
                Batch(
                    batch.table[index],
                    batch.starts[live],
                    batch.before[live],
                    batch.after[live],
                    [batch.requests[row] for row in place],
                ),
                [(place[x.row], x.n) for x in due],
                held.table[index],
                held.lengths[live],
            )
        alike: dict[tuple[Policy, bool], list[int]] = {}
        for i, x in enumerate(due):
            alike.setdefault((x.rule, x.copies), []).append(i)
        evictions = list[Eviction]()
        if due:
            moving = to_device(device, torch.tensor([x.row for x in due]))
            tables = held.table[moving], batch.table[moving]
            evictions = [Eviction.of(plan, due, *tables, own) for own in alike.values()]
        return cls(plan, observation, evictions) if observation or evictions else None

    def run(self, layers: Sequence[Layer], query: Tensor | None = None) -> None:
        """Run the step's work in some layers, of one shape and dtype.

        Args:
            layers: the layers. A step whose queries observe takes one.
            query: [tokens, Hq, d], the queries of that layer.
        """
        observing = None
        if self.observation is not None:
            (layer,) = layers
            assert query is not None
            observing = self.observation(layer.memory, query, layer.layout.keys, layer.logits)
        for eviction in self.evictions:
            eviction.run(layers, observing)
