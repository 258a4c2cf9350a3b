"""The work after a step's attention: scoring with the observing queries, and the evictions that must run now.

A step is built once for a group of layers, from host-side metadata, and run in each layer. Tables and lengths are
copied to the device, and nothing is read back from it. A layer computes all that changes before it moves a row. After
an error the requests of the step must be computed again from their first token; vLLM ends the engine. This module does
not import vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..cache import by_slot
from ..cache.queries import Batch, Look, Observer, Remembered, on
from ..methods.base import View
from ..methods.queries import QueryPolicy
from ..ops import compact_kv_
from .layouts import Blocks, Layout
from .plan import Move, Plan


class Held(NamedTuple):
    """The blocks and slots that a step's attention reads."""

    table: Tensor  # int32 [rows, any] on the device: each request's blocks outside its gaps; the rest is undefined
    lengths: Tensor  # int64 [rows] on the host: the slots in use, including this step's tokens

    @classmethod
    def of(cls, plan: Plan, batch: Batch) -> Held | None:
        """Return None if no request has a gap: then attention reads the engine's own table."""
        filled, size = batch.before.numpy() // plan.block_size, plan.block_size
        gone = plan.gone(filled)
        if not np.count_nonzero(gone):
            return None
        lengths = batch.after.numpy() - gone * size
        columns = np.arange(-(-lengths.max() // size))
        # Columns after a request's last block may hold any block, but must stay inside the table.
        blocks = np.minimum(plan.block_of(filled[:, None], columns), batch.table.shape[1] - 1)
        table = batch.table.gather(1, on(batch.table.device, torch.from_numpy(blocks)))
        return cls(table, torch.from_numpy(lengths))


@dataclass
class Eviction:
    """A step's moves, of all its requests. Each layer runs the same moves.

    Attributes:
        plan: its `rule` selects the kept tokens.
        blocks: the blocks that the rule reads.
        lengths: int32 [moves], the number of slots in these blocks.
        tokens: int64 [moves], the tokens of the request up to the last of these blocks.
        written: int32 [moves, any], the leading columns of the table, up to the last one that any move writes.
        positions: the slots that an earlier move has filled, bool [moves, 1, width * block_size], and the token
            positions of the others, int32 of the same shape; None if the rule does not read positions.
    """

    plan: Plan
    blocks: Blocks
    lengths: Tensor
    tokens: Tensor
    written: Tensor
    positions: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, plan: Plan, moves: Sequence[tuple[int, Move]], block_table: Tensor) -> Eviction:
        """Build the tensors of a step's moves.

        Args:
            plan: the plan.
            moves: each move with its row of the block table.
            block_table: int32 [rows, max_blocks] on the device.
        """
        size, device = plan.block_size, block_table.device
        width = max(len(move.blocks) for _, move in moves)
        blocks = torch.tensor([move.blocks + [-1] * (width - len(move.blocks)) for _, move in moves])
        row, moved_before = torch.tensor([(row, move.moved_before) for row, move in moves]).unbind(1)
        logical, positions = on(device, blocks), None
        table = block_table[on(device, row)].gather(1, logical.clamp(min=0))
        table = torch.where(logical < 0, -1, table)
        if "positions" in plan.kinds:
            before = torch.arange(width) < moved_before[:, None]
            new = (logical[..., None] * size + torch.arange(size, device=device)).flatten(1)[:, None].int()
            positions = on(device, before.repeat_interleave(size, 1)[:, None]), new
        return cls(
            plan,
            Blocks(table, *_places(plan, moves, width)),
            on(device, torch.tensor([len(move.blocks) * size for _, move in moves], dtype=torch.int32)),
            on(device, torch.tensor([move.end * size for _, move in moves])),
            table[:, : max(move.moved for _, move in moves)].contiguous(),
            positions,
        )

    def run(
        self,
        layout: Layout,
        memory: Remembered,
        place: tuple[int, int],
        observing: Tensor | None,
        logits: Mapping[str, Any],
    ) -> None:
        """Run the moves in one layer.

        Args:
            layout: the layout of the layer's cache.
            memory: the per-slot values that the layer stores beside its cache.
            place: the layer's number, and the number of the model's layers.
            observing: [moves, Hq, any, d], the queries that the rule scores with, or None if it uses none.
            logits: how the attention computes its logits, see `Look`.
        """
        size, kept_blocks, rule, table = self.plan.block_size, self.plan.kept, self.plan.rule, self.blocks.table
        of_slots = {name: by_slot.read(pool, table) for name, pool in memory.slots.items()}
        if self.positions is not None:
            moved_before, new = self.positions
            of_slots["positions"] = torch.where(moved_before, of_slots["positions"], new).long()
        with layout.rows(self.blocks) as (k, v):
            view = self._view(k, v)
            view.layer, view.num_layers = place
            view.tokens = self.tokens
            view.kept = of_slots.get("positions")
            view.observed = of_slots.get("scores")
            if observing is not None:
                assert isinstance(rule, QueryPolicy)  # other policies have no observer
                rule.observe(view, observing, None, logits)
            kept = rule.select(view)[..., : kept_blocks * size].contiguous()
            moved = [(pool, of_slots[name].gather(2, kept).to(pool.dtype)) for name, pool in memory.slots.items()]
            compact_kv_(k, v, kept, block_table=self.written)
        for pool, values in moved:
            by_slot.write(pool, table[:, :kept_blocks], values)

    def _view(self, k: Tensor, v: Tensor) -> View:
        """Return the rule's input: the pages, or a copy of their rows if the rule does not support pages."""
        table = self.blocks.table
        if self.plan.rule.paged:
            return View(k, v, lengths=self.lengths, block_table=table)
        k, v = (x[table.clamp(min=0)].transpose(1, 2).flatten(2, 3) for x in (k, v))
        return View(k, v, lengths=self.lengths)


def _places(plan: Plan, moves: Sequence[tuple[int, Move]], width: int) -> tuple[Tensor, Tensor]:
    """Return `Blocks.once` and `Blocks.held`. Several moves of one request may read the same block."""
    places, freed = dict[tuple[int, int], int](), set[tuple[int, int]]()
    for i, (row, move) in enumerate(moves):
        for column, block in enumerate(move.blocks):
            places.setdefault((row, block), i * width + column)
        freed |= {(row, block) for block in move.blocks[plan.kept : move.moved]}
    held = [place for block, place in places.items() if block not in freed]
    return torch.tensor([*places.values()]), torch.tensor(held, dtype=torch.int64)


@dataclass
class Step:
    """The work after a step's attention. Each layer runs the same."""

    plan: Plan
    look: Look | None  # what the step's queries do: stored for later steps, or used for scores
    eviction: Eviction | None

    @classmethod
    def of(cls, plan: Plan, observer: Observer | None, held: Held, batch: Batch) -> Step | None:
        """Build the step's work, or return None if there is none.

        Args:
            plan: the plan.
            observer: what tracks queries for the plan's rule, or None if the rule does not use queries.
            held: the blocks and slots that the step's attention reads.
            batch: the step's requests. Rows that pad a CUDA graph have no new tokens.
        """
        before, after = batch.before, batch.after
        old, new = (x.numpy() // plan.block_size for x in (before, after))
        (grown,) = (new > old).nonzero()
        moves = [(row, move) for row in grown.tolist() for move in plan.moves(int(old[row]), int(new[row]))]
        look = eviction = None
        if observer is not None:
            (live,) = (after > before).nonzero(as_tuple=True)
            rows = on(batch.table.device, live)
            place = dict(zip(live.tolist(), range(len(live))))
            look = observer.step(
                Batch(batch.table[rows], batch.starts[live], before[live], after[live]),
                [(place[row], move.end * plan.block_size) for row, move in moves],
                held.table[rows],
                held.lengths[live],
            )
        if moves and plan.kept:
            eviction = Eviction.of(plan, moves, batch.table)
        return cls(plan, look, eviction) if look or eviction else None

    def run(
        self, memory: Remembered, query: Tensor, layout: Layout, place: tuple[int, int], logits: Mapping[str, Any]
    ) -> None:
        """Run the step's work in one layer. The arguments are those of `Look` and `Eviction.run`."""
        observing = None if self.look is None else self.look(memory, query, layout.keys, logits)
        if self.eviction is not None:
            self.eviction.run(layout, memory, place, observing, logits)
