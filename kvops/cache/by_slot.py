"""Per-slot numbers in pages, such as positions or scores. They share the block tables of K and V.

A pool is [num_pages + 1, Hk, page_size]. The extra last page, which index -1 addresses, belongs to no request.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import pad


def read(pool: Tensor, table: Tensor) -> Tensor:
    """Read all slots of the table's pages. table: int32 [b, max_pages] -> [b, Hk, max_pages * page_size]."""
    return pool[table].transpose(1, 2).flatten(2)


def write(pool: Tensor, table: Tensor, values: Tensor) -> None:
    """Write values [b, Hk, m] to each request's first m slots. The rest of the last page may be overwritten."""
    size = pool.shape[2]
    pages = -(-values.shape[2] // size)
    padded = pad(values, (0, pages * size - values.shape[2]))
    pool[table[:, :pages]] = padded.unflatten(2, (pages, size)).transpose(1, 2)


def widened(tensors: Sequence[Tensor], value: float) -> list[Tensor]:
    """Pad the last dim of the tensors to that of the widest."""
    width = max(x.shape[-1] for x in tensors)
    return [pad(x, (0, width - x.shape[-1]), value=value) for x in tensors]
