"""The memory of a layer whose heads hold different numbers of tokens.

Each row, a KV head of a row of the batch, owns consecutive pages of one pool. The attention takes it as a request of
one head: its block table counts up from its first page. No row is padded to the longest, so a head that keeps few
tokens takes few pages. All rows have room for equally many new tokens. When these are used up, the rows move to a
larger pool.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.api import MAX_WINDOW, window_attention
from .memory import is_writable, spare_slots
from .rounded import operands, query

PAGE = 16  # slots per page: a row wastes less than these


class Ragged:
    """Keys and values of b * Hk rows in pages.

    Attributes:
        k: [pages, 1, PAGE, d]; v: [pages, 1, PAGE, dv].
        bias: fp32 [pages, 1, PAGE], the biases of the keys; None: they have none.
        counts: int64 [b, Hk], the slots that each row held when the memory was made. All rows have got equally many
            since then; methods take this number as `since`.
        room: How many tokens fit into each row after these.
        longest: The largest of the counts.
        mean: The largest mean of a batch row's counts, rounded down.
        table: int32 [b * Hk, most pages of a row], the block table; -1 after a row's own pages.
        shared: Whether another cache reads the same memory, so that neither may write to it.
    """

    __slots__ = tuple("k v bias counts room longest mean table shared _first _next _visible _host".split())

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        counts: Tensor,
        room: int | None = None,
        host: list[list[int]] | None = None,
        biased: bool = False,
    ):
        """Allocate rows for `counts` slots, int64 [b, Hk], and `room` more, like those of k and v, [.., d].

        room: None: spare slots for the mean. host: the counts on the host, without which this waits for the device.
        biased: Whether the keys have biases, which are 0 at first.
        """
        self._host = counts.tolist() if host is None else host
        every = [x for row in self._host for x in row]
        self.longest = max(every, default=0)
        self.mean = max((sum(row) // len(row) for row in self._host if row), default=0)
        self.room = spare_slots(self.mean) if room is None else room
        held = [-(-(x + self.room) // PAGE) for x in every]
        self.k, self.v = (x.new_empty(sum(held), 1, PAGE, x.shape[-1]) for x in (k, v))
        self.bias = k.new_zeros(sum(held), 1, PAGE, dtype=torch.float32) if biased else None
        self.counts, self.shared = counts, False
        pages = -(-(counts.flatten() + self.room) // PAGE)
        first = pages.cumsum(0) - pages
        page = torch.arange(max(held, default=0), device=k.device)
        self.table = torch.where(page < pages[:, None], first[:, None] + page, -1).int()
        self._first = first * PAGE  # of each row's slots in the pool
        # Of the first token after `counts`, so that a step of decode computes little: its slot, and one less than the
        # slots that it sees.
        self._next = (self._first.view_as(counts) + counts).unsqueeze(-1)
        self._visible = counts.view(-1, 1).int()

    @staticmethod
    def of(k: Tensor, v: Tensor, indices: Tensor, spare: bool, bias: Tensor | None = None) -> Ragged:
        """Copy the slots `indices`, int64 [b, Hk, m] with -1 last, of k and v, [b, Hk, n, d].

        spare: Allocate spare slots at once, not with the next token. bias: fp32 [b, Hk, m], of the keys at `indices`.
        """
        kept = indices >= 0
        counts = kept.sum(-1)
        memory = Ragged(k, v, counts, None if spare else 0, biased=bias is not None)
        b, h, slot = kept.nonzero(as_tuple=True)
        at, to = (b, h, indices[kept]), memory._first[b * k.shape[1] + h] + slot
        memory._write(to, _bytes(k)[at], _bytes(v)[at])
        if memory.bias is not None and bias is not None:
            memory.bias.view(-1)[to] = bias[kept]
        return memory

    @property
    def shape(self) -> tuple[int, int]:
        """(b, Hk)."""
        return self.counts.shape[0], self.counts.shape[1]

    def host_lengths(self, since: int) -> list[int]:
        """Return how many slots each row holds, without waiting for the device."""
        return [x + since for row in self._host for x in row]

    def wasteful(self, since: int) -> bool:
        """Return whether so much room is unused that a copy to smaller memory pays."""
        return self.room - since > max(32, (self.mean + since) // 4)

    def lengths(self, since: int) -> Tensor:
        """Return how many slots each row holds, int64 [b * Hk]."""
        return self.counts.flatten() + since

    def extended(self, since: int, k: Tensor, v: Tensor) -> Ragged:
        """Append tokens, [b, Hk, t, d], to all rows: in this memory if there is room, else in a larger copy."""
        t, memory = k.shape[2], self
        if since + t > self.room or not is_writable(self.k, self.shared):
            room = self.room if since + t <= self.room else since + t + spare_slots(self.mean + since + t)
            memory = self.rows(None, since, room)
        memory._write(memory._next + _span(since, since + t, k.device), _bytes(k), _bytes(v))
        return memory

    def rows(self, rows: Tensor | None, since: int, room: int) -> Ragged:
        """Copy some rows of the batch, int64 [any], to memory of their own with this room. rows: None: all rows."""
        if rows is None:
            twin, first = Ragged(self.k, self.v, self.counts, room, self._host, self.bias is not None), self._first
        else:
            twin = Ragged(self.k, self.v, self.counts[rows], room, biased=self.bias is not None)
            first = self._first.view_as(self.counts)[rows].flatten()
        held, total = twin.lengths(since), sum(twin.host_lengths(since))
        row = torch.arange(len(held), device=held.device).repeat_interleave(held, output_size=total)
        slot = torch.arange(total, device=held.device) - (held.cumsum(0) - held)[row]
        old, new = first[row] + slot, twin._first[row] + slot
        for pool, x in ((twin.k, self.k), (twin.v, self.v)):
            _slots(pool)[new] = _slots(x)[old]
        if twin.bias is not None and self.bias is not None:
            twin.bias.view(-1)[new] = self.bias.view(-1)[old]
        return twin

    def columns(self, since: int, last: int = 0) -> Tensor:
        """Return the slots of each row as the columns of a rectangle as wide as the longest: int64 [b * Hk, width].

        The last slots of a row, `last` of them, end with the last column, and the others stay where they are. -1 marks
        the gap between.
        """
        held, width = self.lengths(since).unsqueeze(1), self.longest + since
        column = torch.arange(width, device=held.device)
        moved, first = column - (width - held), held - last
        return torch.where(column < first, column, torch.where(moved >= first.clamp(min=0), moved, -1))

    def rectangle(self, columns: Tensor, empty: float) -> tuple[Tensor, Tensor]:
        """Copy K and V, [b, Hk, width, d], in the order of `columns`. empty: 0.0 or NaN, the value in the gaps."""
        none = columns < 0
        at, gap = (self._first.unsqueeze(1) + columns).masked_fill_(none, 0), none.unsqueeze(-1)

        def copied(pool: Tensor) -> Tensor:
            rows = _slots(pool)[at]
            value: Any = empty if rows.is_floating_point() else 0xFF * (empty != 0)  # NaN, in fp8 and packed rows
            return rows.masked_fill_(gap, value).view(pool.dtype).view(*self.shape, *rows.shape[1:])

        return copied(self.k), copied(self.v)

    def attention(
        self, q: Tensor, since: int, *, sink_logits: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Compute the causal attention of the last tokens of all rows.

        q: [b, Hq, t, d]. options: scale and softcap. Returns out [b, Hq, t, dv], and the log-sum-exp without the sink,
        fp32 [b, Hq, t].
        """
        t, rows, keys = q.shape[2], self.by_row(query(q, self.k)), operands(self.k, self.v)
        parts, options = [], {**options, "block_table": self.table, "key_bias": self.bias}
        for begin in range(0, t, MAX_WINDOW):
            end = min(t, begin + MAX_WINDOW)
            visible = self.visible(since - t + end, end - begin)
            part = window_attention(rows[:, :, begin:end], **keys, visible=visible, scores=False, **options)
            parts.append(part[:2])
        out, lse = parts[0] if len(parts) == 1 else (torch.cat(x, 2) for x in zip(*parts))
        out, lse = out.to(q.dtype).view(*q.shape[:3], -1), lse.view(q.shape[:3])
        if sink_logits is not None:  # rows differ in their heads' sinks, and the operator has the same for all rows
            out = (out * torch.sigmoid(lse - sink_logits[:, None]).unsqueeze(-1)).to(q.dtype)
        return out, lse

    def visible(self, since: int, t: int) -> Tensor:
        """Return the slots that each of the last t tokens of the rows sees, int32 [b * Hk, t]."""
        return self._visible + _span(since - t + 1, since + 1, self.k.device)

    def by_row(self, x: Tensor) -> Tensor:
        """Return [b, Hq, ..] as [b * Hk, Hq / Hk, ..]."""
        return x.reshape(len(self.table), -1, *x.shape[2:])

    def _write(self, at: Tensor, k: Tensor, v: Tensor) -> None:
        for pool, x in ((self.k, k), (self.v, v)):
            _slots(pool)[at] = x


def _span(begin: int, end: int, device: torch.device) -> int | Tensor:
    """begin, ..., end - 1: int32, or one int."""
    return begin if end - begin == 1 else torch.arange(begin, end, dtype=torch.int32, device=device)


def _slots(pool: Tensor) -> Tensor:
    """The slots of all pages, [slots, d]."""
    return _bytes(pool).view(-1, pool.shape[3])


def _bytes(x: Tensor) -> Tensor:
    """x, and fp8 as bytes, which torch can index."""
    return x.view(torch.uint8) if x.element_size() == 1 else x
