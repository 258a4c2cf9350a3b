"""Numbers of each slot, kept in pages beside those of K and V, under the same block tables.

A pool is [num_pages + 1, Hk, page_size]. Its last page, which -1 names, is of no request.
"""

from __future__ import annotations

import torch
from torch import Tensor


def read(pool: Tensor, table: Tensor) -> Tensor:
    """[b, Hk, max_pages * page_size]: all slots of the table's pages. table: int32 [b, max_pages]."""
    return pool[table].transpose(1, 2).flatten(2)


def write(pool: Tensor, table: Tensor, values: Tensor) -> None:
    """The front of each request's slots: values: [b, Hk, m]. Those behind them in the last page may be anything."""
    size = pool.shape[2]
    pages = -(-values.shape[2] // size)
    padded = torch.nn.functional.pad(values, (0, pages * size - values.shape[2]))
    pool[table[:, :pages]] = padded.unflatten(2, (pages, size)).transpose(1, 2)
