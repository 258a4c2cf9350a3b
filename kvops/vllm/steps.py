"""What comes behind the attention of a step: what the queries observe, and the evictions that are due.

It is made once for a step of a group of layers, from numbers that the engine has on the host, and run in each layer.
Tables and lengths go to the device, and nothing is read back from it. This module does not import vLLM.
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
    """What the attention of a step reads."""

    table: Tensor  # int32 [rows, any] on the device: the blocks outside of each request's gaps, and anything behind
    lengths: Tensor  # int64 [rows] on the host: the slots in use, with the step's

    @classmethod
    def of(cls, plan: Plan, batch: Batch) -> Held | None:
        """None: all that the requests have had, as none has a gap."""
        filled, size = batch.before.numpy() // plan.block_size, plan.block_size
        gone = plan.gone(filled)
        if not np.count_nonzero(gone):
            return None
        lengths = batch.after.numpy() - gone * size
        columns = np.arange(-(-lengths.max() // size))
        # Behind what a row holds there may be anything.
        blocks = np.minimum(plan.block_of(filled[:, None], columns), batch.table.shape[1] - 1)
        table = batch.table.gather(1, on(batch.table.device, torch.from_numpy(blocks)))
        return cls(table, torch.from_numpy(lengths))


@dataclass
class Eviction:
    """The moves of a step, of all its requests: the same in each layer.

    Attributes:
        plan: its `rule` says what stays.
        blocks: those that are looked at.
        lengths: int32 [moves], their slots.
        written: int32 [moves, any], the first columns of the table, which hold blocks that are written, for some move.
        positions: int32 [moves, 1, width * block_size], of the tokens where no earlier move has been.
        moved_before: bool [moves, 1, width * block_size], the slots where one has.
    """

    plan: Plan
    blocks: Blocks
    lengths: Tensor
    written: Tensor
    positions: Tensor
    moved_before: Tensor

    @classmethod
    def of(cls, plan: Plan, moves: Sequence[tuple[int, Move]], block_table: Tensor) -> Eviction:
        """moves: each with its row of the block table, int32 [rows, max_blocks]."""
        size, device = plan.block_size, block_table.device
        width = max(len(move.blocks) for _, move in moves)
        blocks = torch.tensor([move.blocks + [-1] * (width - len(move.blocks)) for _, move in moves])
        row, moved_before = torch.tensor([(row, move.moved_before) for row, move in moves]).unbind(1)
        logical, offsets = on(device, blocks), torch.arange(size, device=device)
        table = block_table[on(device, row)].gather(1, logical.clamp(min=0))
        table = torch.where(logical < 0, -1, table)
        before = torch.arange(width) < moved_before[:, None]
        return cls(
            plan,
            Blocks(table, *_places(plan, moves, width)),
            on(device, torch.tensor([len(move.blocks) * size for _, move in moves], dtype=torch.int32)),
            table[:, : max(move.moved for _, move in moves)].contiguous(),
            (logical[..., None] * size + offsets).flatten(1)[:, None].int(),
            on(device, before.repeat_interleave(size, 1)[:, None]),
        )

    def run(
        self, layout: Layout, memory: Remembered, layer: int, observing: Tensor | None, logits: Mapping[str, Any]
    ) -> None:
        """Evicts a layer.

        Args:
            layout: of the layer's cache.
            memory: of the layer.
            layer: its number.
            observing: [moves, Hq, any, d], the queries that the rule asks for.
            logits: see `Look`.
        """
        size, kept_blocks, rule, table = self.plan.block_size, self.plan.kept, self.plan.rule, self.blocks.table
        of_slots = {name: by_slot.read(pool, table) for name, pool in memory.slots.items()}
        if "positions" in of_slots:
            of_slots["positions"] = torch.where(self.moved_before, of_slots["positions"], self.positions).long()
        with layout.rows(self.blocks) as (k, v):
            view = self._view(k, v)
            view.layer = layer
            view.kept = of_slots.get("positions")
            view.observed = of_slots.get("scores")
            if observing is not None:
                assert isinstance(rule, QueryPolicy)  # as others are shown none
                rule.observe(view, observing, None, logits)
            kept = rule.select(view)[..., : kept_blocks * size].contiguous()
            compact_kv_(k, v, kept, block_table=self.written)
        for name, values in of_slots.items():
            pool = memory.slots[name]
            by_slot.write(pool, table[:, :kept_blocks], values.gather(2, kept).to(pool.dtype))

    def _view(self, k: Tensor, v: Tensor) -> View:
        """What the rule looks at: pages, or for those that take none a copy of their rows."""
        table = self.blocks.table
        if self.plan.rule.paged:
            return View(k, v, lengths=self.lengths, block_table=table)
        k, v = (x[table.clamp(min=0)].transpose(1, 2).flatten(2, 3) for x in (k, v))
        return View(k, v, lengths=self.lengths)


def _places(plan: Plan, moves: Sequence[tuple[int, Move]], width: int) -> tuple[Tensor, Tensor]:
    """`Blocks.once` and `Blocks.held`. Moves of one request may look at the same block."""
    places, freed = dict[tuple[int, int], int](), set[tuple[int, int]]()
    for i, (row, move) in enumerate(moves):
        for column, block in enumerate(move.blocks):
            places.setdefault((row, block), i * width + column)
        freed |= {(row, block) for block in move.blocks[plan.kept : move.moved]}
    held = [place for block, place in places.items() if block not in freed]
    return torch.tensor([*places.values()]), torch.tensor(held, dtype=torch.int64)


@dataclass
class Step:
    """What comes behind the attention of a step: the same in each layer."""

    plan: Plan
    look: Look | None
    eviction: Eviction | None

    @classmethod
    def of(cls, plan: Plan, observer: Observer | None, held: Held, batch: Batch) -> Step | None:
        """None: nothing comes behind it. batch: with rows of a graph's padding, which have no new tokens."""
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

    def run(self, memory: Remembered, query: Tensor, layout: Layout, layer: int, logits: Mapping[str, Any]) -> None:
        """Of a layer. See `Look` and `Eviction.run`."""
        observing = None if self.look is None else self.look(memory, query, layout.keys, logits)
        if self.eviction is not None:
            self.eviction.run(layout, memory, layer, observing, logits)
