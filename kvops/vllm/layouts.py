"""How vLLM's backends lay out a layer's cache, and K and V in it as rows. This module does not import vLLM.

To all backends the cache of a layer is kv_cache: [num_blocks, Hk, block_size, 2 * d].
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from ..methods.base import View
from . import cpu_pages


class Blocks(NamedTuple):
    """Blocks of some moves."""

    table: Tensor  # int32 [moves, width] on the device, -1 behind a move's own
    once: Tensor  # int64 on the host: where the flat table has each of them once,
    held: Tensor  # and where those that are in use behind the moves


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
        pages, held = (blocks.table.flatten()[places][None] for places in (blocks.once, blocks.held))
        with cpu_pages.as_rows(self.kv_cache, pages, isa=self.isa, held=held) as (k, v):
            yield k, v

    def keys(self, table: Tensor) -> View:
        k = cpu_pages.keys(self.kv_cache, table, isa=self.isa)
        return View(k, k)
