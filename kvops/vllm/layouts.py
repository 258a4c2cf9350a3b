"""The cache layouts of vLLM's backends, and how to access K and V in them as rows.

Every backend gets a layer's cache as kv_cache: [num_blocks, Hk, block_size, 2 * d]. This module does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from ..methods.view import View
from . import cpu_pages


@dataclass(frozen=True)
class Blocks:
    """The blocks that one step's moves read.

    Attributes:
        table: int32 [moves, width] on the device, the blocks of each move. Rows are padded with -1.
        once: int64 on the host, indices into the flattened table that name each block once. In moves that share blocks,
            some blocks are named again.
        held: int64 on the host, like `once`, but only for the blocks still in use after the moves.
    """

    table: Tensor
    once: Tensor
    held: Tensor

    @cached_property
    def pages(self) -> tuple[Tensor, Tensor]:
        """The block numbers that `once` and `held` select: int64. Computed once for all layers of a step."""
        once, held = (self.table.flatten()[places].long() for places in (self.once, self.held))
        return once, held

    @cached_property
    def distinct(self) -> tuple[Tensor, Tensor]:
        """The block numbers without repetition, int64, and a table like `table` of their indices in these."""
        pages, indices = self.pages[0].unique(return_inverse=True)
        table = torch.full_like(self.table, -1)
        table.view(-1)[self.once] = indices.int()
        return pages, table


class Layout(Protocol):
    """The cache of a layer, in whatever order its backend stores it."""

    def rows(self, blocks: Blocks) -> AbstractContextManager[tuple[Tensor, Tensor]]:
        """Give K and V as views [num_blocks, Hk, block_size, d] in a `with` block; the given blocks hold rows in it."""

    def read(self, blocks: Blocks) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return K and V as `rows` does, only to read, and the table of the blocks in them. Moves may share blocks."""

    def write(self, pages: Tensor, k: Tensor, v: Tensor) -> None:
        """Write rows to whole blocks. pages: int64, each block once; k, v: [pages, Hk, block_size, d]."""

    def keys(self, table: Tensor) -> View:
        """See `kvops.cache.queries.Keys`."""


@dataclass(frozen=True)
class Rows:
    """FLASH_ATTN and FLASHINFER: K and V of a token are adjacent; heads, slots and blocks come in any stride order."""

    kv_cache: Tensor

    def views(self) -> tuple[Tensor, Tensor]:
        k, v = self.kv_cache.chunk(2, -1)
        return k, v

    @contextmanager
    def rows(self, blocks: Blocks) -> Iterator[tuple[Tensor, Tensor]]:
        yield self.views()

    def read(self, blocks: Blocks) -> tuple[tuple[Tensor, Tensor], Tensor]:
        return self.views(), blocks.table

    def write(self, pages: Tensor, k: Tensor, v: Tensor) -> None:
        for own, rows in zip(self.views(), (k, v)):
            own[pages] = rows

    def keys(self, table: Tensor) -> View:
        k, v = self.views()
        return View(k, v, block_table=table)


@dataclass(frozen=True)
class PageRows(Rows):
    """kvops' attention in CPU_ATTN: in each page of a head the rows of K, then those of V."""

    def views(self) -> tuple[Tensor, Tensor]:
        return cpu_pages.row_views(self.kv_cache)


@dataclass(frozen=True)
class Tiles:
    """CPU_ATTN with vLLM's own attention: tiles, see `cpu_pages`."""

    kv_cache: Tensor
    isa: cpu_pages.Isa

    @contextmanager
    def rows(self, blocks: Blocks) -> Iterator[tuple[Tensor, Tensor]]:
        once, held = blocks.pages
        with cpu_pages.converted(self.kv_cache, once, held, self.isa) as (k, v):
            yield k, v

    def read(self, blocks: Blocks) -> tuple[tuple[Tensor, Tensor], Tensor]:
        pages, table = blocks.distinct
        return cpu_pages.read(self.kv_cache, pages, self.isa), table

    def write(self, pages: Tensor, k: Tensor, v: Tensor) -> None:
        cpu_pages.write(self.kv_cache, pages, k, v, self.isa)

    def keys(self, table: Tensor) -> View:
        k = cpu_pages.keys(self.kv_cache, table, isa=self.isa)
        return View(k, k)
