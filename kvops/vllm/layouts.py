"""How vLLM's backends lay out a layer's cache, and K and V in it as rows. This module does not import vLLM.

To all backends the cache of a layer is kv_cache: [num_blocks, Hk, block_size, 2 * d].
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor

from ..methods.base import View
from . import cpu_pages


@dataclass(frozen=True)
class Blocks:
    """The blocks of one step's moves.

    Attributes:
        table: int32 [moves, width] on the device. A row is padded with -1.
        once: int64 on the host, the places in the flat table that name each block once.
        held: int64 on the host, the places of the blocks that are still in use after the moves.
    """

    table: Tensor
    once: Tensor
    held: Tensor

    @cached_property
    def pages(self) -> tuple[Tensor, Tensor]:
        """The blocks that `once` and `held` name: int64. Computed once for all layers of a step."""
        once, held = (self.table.flatten()[places].long() for places in (self.once, self.held))
        return once, held


class Layout(Protocol):
    """The cache of a layer."""

    def rows(self, blocks: Blocks) -> AbstractContextManager[tuple[Tensor, Tensor]]:
        """Within the `with` block K and V are rows, views [num_blocks, Hk, block_size, d], in these blocks."""

    def keys(self, table: Tensor) -> View:
        """See `kvops.cache.queries.Keys`."""


@dataclass(frozen=True)
class Rows:
    """FLASH_ATTN and FLASHINFER: K and V of a token side by side, and heads, slots and blocks in any order."""

    kv_cache: Tensor

    @contextmanager
    def rows(self, blocks: Blocks) -> Iterator[tuple[Tensor, Tensor]]:
        k, v = self.kv_cache.chunk(2, -1)
        yield k, v

    def keys(self, table: Tensor) -> View:
        k, v = self.kv_cache.chunk(2, -1)
        return View(k, v, block_table=table)


@dataclass(frozen=True)
class Tiles:
    """CPU_ATTN: see `cpu_pages`."""

    kv_cache: Tensor
    isa: str

    @contextmanager
    def rows(self, blocks: Blocks) -> Iterator[tuple[Tensor, Tensor]]:
        once, held = blocks.pages
        with cpu_pages.converted(self.kv_cache, once, held, self.isa) as (k, v):
            yield k, v

    def keys(self, table: Tensor) -> View:
        k = cpu_pages.keys(self.kv_cache, table, isa=self.isa)
        return View(k, k)
