"""Per-slot numbers in pages, such as positions or scores. They share the block tables of K and V.

A pool is [num_pages + 1, Hk, page_size]. The extra last page, which index -1 addresses, belongs to no request.
"""

from __future__ import annotations

import torch
from torch import Tensor


def read(pool: Tensor, table: Tensor) -> Tensor:
    """Read all slots of the table's pages. table: int32 [b, max_pages] -> [b, Hk, max_pages * page_size]."""
    return pool[table].transpose(1, 2).flatten(2)


def write(pool: Tensor, table: Tensor, values: Tensor) -> None:
    """Write values [b, Hk, m] to each request's first m slots. The rest of the last page may be overwritten."""
    size = pool.shape[2]
    pages = -(-values.shape[2] // size)
    padded = torch.nn.functional.pad(values, (0, pages * size - values.shape[2]))
    pool[table[:, :pages]] = padded.unflatten(2, (pages, size)).transpose(1, 2)
