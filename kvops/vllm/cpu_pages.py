"""Convert vLLM's CPU pages, which its attention kernels store as tiles, to rows and back, in place.

With the CPU_ATTN backend, a layer's cache is a tensor [num_pages, Hk, page_size, 2 * d]. Its last two dims do not
describe the memory order. Each page of a head holds K (page_size * d elements), then V (as many), both in the order
that vLLM's selected kernel reads (vLLM 0.32):

```text
isa           K                                 V
vec, vec16    [d, page_size]                    [page_size, d], rows
amx           [page_size / 16, d / 2, 16, 2]    [d / 16, page_size / 2, 16, 2]
```

A tile holds 16 tokens of 2 channels in K, and 16 channels of 2 tokens in V. `isa` is the layer's `layer.isa`: amx for
bf16 and fp8 caches on CPUs with AMX, vec16 for head dims that are not a multiple of 32, vec otherwise.

```python
with cpu_pages.as_rows(kv_cache, block_table, isa=layer.isa, lengths=lengths) as (k, v):
    kept = policy.compress_(k, v, lengths=lengths, block_table=block_table)
```

The functions read and write only the pages of valid slots, with one page of scratch memory. They move bits without
interpreting them, so every dtype round-trips exactly. As in `kvops.ops`, invalid arguments raise ValueError (TypeError
for an argument that is not a tensor) before anything is written. The message names the argument, what was expected and
what came.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor

from ..ops.checks import check_choice, check_dims, check_one_device, check_vector, inference_only

__all__ = ["as_rows", "keys", "to_rows_", "to_tiles_"]

Isa = Literal["vec", "vec16", "amx"]
ISAS: tuple[Isa, ...] = get_args(Isa)
_TOGETHER = 32  # pages converted per call: few calls, and the pages are still in the CPU cache when they are written
_MULTIPLE = 32  # vLLM's kernels need tokens per page, and for amx channels per head, to be a multiple of this


def to_rows_(
    kv_cache: Tensor, block_table: Tensor, *, isa: Isa, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Convert the requests' pages from tiles to rows. vLLM must not read them until you have called `to_tiles_`.

    Args:
        kv_cache: [num_pages, Hk, page_size, 2 * d] of tiles, on the CPU, any dtype. Each page of a head must be
            contiguous.
        block_table: int32 [b, max_pages]. Each page must belong to one request.
        isa: "vec", "vec16" or "amx", vLLM's `layer.isa`.
        lengths: int32 [b], the number of slots each request uses (default: all). Later entries of the table may be -1.

    Returns:
        K and V, views [num_pages, Hk, page_size, d] of kv_cache. Pass them to `kvops.ops` and policies together with
            `block_table`. Only the requests' pages are rows.

    Raises:
        ValueError: an argument has the wrong device, dtype, shape or strides, or the table or lengths are out of range.
        TypeError: a tensor argument is not a tensor.
    """
    pages = _pages("to_rows_", kv_cache, block_table, isa, lengths)
    _convert_(kv_cache, torch.tensor(pages, dtype=torch.int64), isa, to_rows=True)
    return row_views(kv_cache)


def to_tiles_(kv_cache: Tensor, block_table: Tensor, *, isa: Isa, lengths: Tensor | None = None) -> None:
    """Convert the requests' pages back from rows to tiles, undoing `to_rows_`.

    After a compaction it is enough to convert the pages still in use: pass the new `lengths`.

    Args:
        kv_cache: [num_pages, Hk, page_size, 2 * d], the tensor given to `to_rows_`.
        block_table: int32 [b, max_pages], as for `to_rows_`. All pages it names for valid slots must be rows.
        isa: as for `to_rows_`.
        lengths: as for `to_rows_`.

    Raises:
        ValueError: as for `to_rows_`.
        TypeError: as for `to_rows_`.
    """
    pages = _pages("to_tiles_", kv_cache, block_table, isa, lengths)
    _convert_(kv_cache, torch.tensor(pages, dtype=torch.int64), isa, to_rows=False)


@contextmanager
def as_rows(
    kv_cache: Tensor, block_table: Tensor, *, isa: Isa, lengths: Tensor | None = None, held: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Convert the requests' pages to rows for the duration of a `with` block, then back to tiles.

    The block receives K and V, as `to_rows_` returns them. If it raises, all pages become tiles again.

    Args:
        kv_cache: as for `to_rows_`.
        block_table: as for `to_rows_`.
        isa: as for `to_rows_`.
        lengths: as for `to_rows_`.
        held: int32 [b, any], the pages still in use after the block; -1 is padding (default: all pages). The other
            pages stay rows: their content is undefined for vLLM until it overwrites them.

    Raises:
        ValueError: as for `to_rows_`, or `held` names a page that `block_table` does not.
        TypeError: as for `to_rows_`.
    """
    pages = _pages("as_rows", kv_cache, block_table, isa, lengths)
    again = pages
    if held is not None:
        again = _pages("as_rows", kv_cache, held[held >= 0][None], isa, None)
        if not {*again} <= {*pages}:
            raise ValueError(
                f"as_rows: held must only name pages of block_table, got {sorted({*again} - {*pages})} as well"
            )
    own, kept = (torch.tensor(x, dtype=torch.int64) for x in (pages, again))
    with converted(kv_cache, own, kept, isa) as rows:
        yield rows


@contextmanager
def converted(kv_cache: Tensor, pages: Tensor, held: Tensor, isa: Isa) -> Iterator[tuple[Tensor, Tensor]]:
    """Do what `as_rows` does, without its checks. pages, held: int64, each page once; held is a subset of pages."""
    _convert_(kv_cache, pages, isa, to_rows=True)
    try:
        yield row_views(kv_cache)
    except BaseException:
        held = pages
        raise
    finally:
        _convert_(kv_cache, held, isa, to_rows=False)


def keys(kv_cache: Tensor, block_table: Tensor, *, isa: Isa) -> Tensor:
    """Copy the requests' keys as rows; the pages stay tiles.

    Args:
        kv_cache: as for `to_rows_`.
        block_table: int32 [b, max_pages]. Requests may share pages. For entries of -1 the returned keys are undefined.
        isa: as for `to_rows_`.

    Returns:
        The keys, [b, Hk, max_pages * page_size, d].

    Raises:
        ValueError: as for `to_rows_`.
        TypeError: as for `to_rows_`.
    """
    _check_arguments("keys", kv_cache, block_table, isa)
    num_pages = len(kv_cache)
    if block_table.numel() and not (-1 <= block_table.min() and block_table.max() < num_pages):
        raise ValueError(f"keys: block_table must name pages in [0, {num_pages}) or -1, got {block_table.tolist()}")
    k, _ = row_views(kv_cache)
    found = _tiled(k, k, *_k_tile(kv_cache, isa))[block_table].transpose(1, 2)  # [b, Hk, max_pages, ...]
    (b, columns), (_, heads, page_size, d) = block_table.shape, k.shape
    return found.reshape(b, heads, columns * page_size, d).contiguous()


def read(kv_cache: Tensor, pages: Tensor, isa: Isa) -> tuple[Tensor, Tensor]:
    """Copy pages as rows: K and V, [pages, Hk, page_size, d]. pages: int64."""
    k, v = (x[pages].contiguous().flatten(4, 5).flatten(2, 3) for x in _tile_views(kv_cache, isa))
    return k, v.mT.contiguous() if isa == "amx" else v


def write(kv_cache: Tensor, pages: Tensor, k: Tensor, v: Tensor, isa: Isa) -> None:
    """Write rows to pages, which become tiles. pages: int64, each page once; k, v: [pages, Hk, page_size, d]."""
    for there, here in _pieces(kv_cache, k, v, isa):
        there[pages] = here


def copy_to_tiles(kv_cache: Tensor, pages: Sequence[int], tiles: Tensor, isa: Isa) -> None:
    """Copy pages of rows to the pages of `tiles`, in this order."""
    for there, here in _pieces(tiles, *row_views(kv_cache), isa):
        for to, page in zip(there, pages):  # a copy of all pages at once would first gather them
            to.copy_(here[page])


def _pieces(tiles: Tensor, k: Tensor, v: Tensor, isa: Isa) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of pages of tiles and of rows, [pages, ...], whose elements correspond."""
    for there, rows in zip(_tile_views(tiles, isa), (k, v.mT if isa == "amx" else v)):
        a, b = there.shape[3::2]
        rows = rows.unflatten(3, (-1, b)).unflatten(2, (-1, a))
        yield from zip(there.unbind(-1), rows.unbind(-1))  # twice as fast as all b at once


def _tile_views(kv_cache: Tensor, isa: Isa) -> tuple[Tensor, Tensor]:
    """View K and V as [num_pages, Hk, n / a, a, m / b, b]: K [n, m] with tiles [a, b], and of V its rows, or in amx its
    transpose."""
    k, v = row_views(kv_cache)
    a, b = _k_tile(kv_cache, isa)
    return _tiled(k, k, a, b), _tiled(v, v.mT, a, b) if isa == "amx" else v[:, :, :, None, :, None].transpose(2, 3)


def row_views(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return views K and V, [num_pages, Hk, page_size, d] each, of pages that are rows."""
    num_pages, heads, page_size, width = kv_cache.shape
    k, v = kv_cache.view(num_pages, heads, 2, page_size, width // 2).unbind(2)
    return k, v


def _k_tile(kv_cache: Tensor, isa: Isa) -> tuple[int, int]:
    """Return the number of tokens and channels in one tile of K."""
    return (16, 2) if isa == "amx" else (kv_cache.shape[2], 1)


def _tiled(x: Tensor, matrix: Tensor, a: int, b: int) -> Tensor:
    """View the memory of x, tiles [a, b] of a matrix [n, m] per page and head, as [num_pages, Hk, n/a, a, m/b, b]."""
    n, m = matrix.shape[2:]
    return x.view(*x.shape[:2], n // a, m // b, a, b).transpose(3, 4)


def _convert_(kv_cache: Tensor, pages: Tensor, isa: Isa, *, to_rows: bool) -> None:
    if kv_cache.itemsize == 1:
        kv_cache = kv_cache.view(torch.uint8)  # index_copy_ does not support fp8
    k, v = row_views(kv_cache)
    if isa != "amx":  # K is transposed, V has rows
        transposed = k.view(*k.shape[:2], k.shape[3], k.shape[2]).mT
        source, target = (transposed, k) if to_rows else (k, transposed)
        for some in pages.split(_TOGETHER):
            target.index_copy_(0, some, source.index_select(0, some))
        return
    a, b = _k_tile(kv_cache, isa)
    for x, matrix in ((k, k), (v, v.mT)):  # V's tiles are K's with tokens and channels swapped
        # Two views of the same memory, [num_pages, Hk, n / a, a, m / b, b]: an element's place in rows, and in tiles.
        rows, tiles = matrix.unflatten(3, (-1, b)).unflatten(2, (-1, a)), _tiled(x, matrix, a, b)
        source, target = (tiles, rows) if to_rows else (rows, tiles)
        scratch = torch.empty_like(source[0])  # keeps the order of source's strides
        for page in pages.tolist():  # one at a time, so that the page is still in the CPU cache when it is written
            scratch.copy_(source[page])
            for there, here in zip(target[page].unbind(-1), scratch.unbind(-1)):  # twice as fast as all b at once
                there.copy_(here)


def _check_arguments(op: str, kv_cache: Tensor, block_table: Tensor, isa: Isa) -> None:
    inference_only(op, kv_cache=kv_cache, block_table=block_table)
    if not kv_cache.is_cpu:
        raise ValueError(f"{op}: kv_cache must be on the CPU, got {kv_cache.device}")
    check_one_device(op, kv_cache, block_table=block_table)
    check_choice(op, "isa", isa, ISAS)
    _check_cache(op, kv_cache, isa)
    check_dims(op, "[batch, max_pages]", block_table=block_table)
    if block_table.dtype != torch.int32:
        raise ValueError(f"{op}: block_table must be int32, got {block_table.dtype}")


def _pages(op: str, kv_cache: Tensor, block_table: Tensor, isa: Isa, lengths: Tensor | None) -> list[int]:
    """Check all arguments and return the pages that hold valid slots."""
    _check_arguments(op, kv_cache, block_table, isa)
    num_pages, page_size = kv_cache.shape[0], kv_cache.shape[2]
    b, columns = block_table.shape
    check_vector(op, "lengths", lengths, b, block_table)

    taken: dict[int, None] = {}  # an ordered set
    for row, length in enumerate([columns * page_size] * b if lengths is None else lengths.tolist()):
        if not 0 <= length <= columns * page_size:
            raise ValueError(
                f"{op}: lengths must lie in [0, {columns * page_size}], the slots that block_table covers, got "
                f"{length} for row {row}"
            )
        for column, page in enumerate(block_table[row, : -(-length // page_size)].tolist()):
            where = f"at request {row}, page {column}"
            if not 0 <= page < num_pages:
                raise ValueError(
                    f"{op}: block_table must name pages in [0, {num_pages}) for all slots in use, got {page} {where}"
                )
            if page in taken:
                raise ValueError(
                    f"{op}: block_table must name each page once, since the call writes to it, got page "
                    f"{page} again {where}"
                )
            taken[page] = None
    return list(taken)


def _check_cache(op: str, kv_cache: Tensor, isa: Isa) -> None:
    """Check that kv_cache has the shape, dtype and strides that vLLM uses for this kernel."""
    check_dims(op, "[num_pages, Hk, page_size, 2 * d]", kv_cache=kv_cache)
    page_size, width = kv_cache.shape[2:]
    if page_size == 0 or page_size % _MULTIPLE:
        raise ValueError(f"{op}: kv_cache must have a page_size that is a multiple of {_MULTIPLE}, got {page_size}")
    multiple = 2 * _MULTIPLE if isa == "amx" else 2
    if width == 0 or width % multiple:
        raise ValueError(
            f"{op}: kv_cache must have a last dim (2 * d) that is a multiple of {multiple} for isa={isa!r}, got {width}"
        )
    if isa == "amx" and kv_cache.element_size() > 2:
        raise ValueError(f"{op}: kv_cache must have elements of 1 or 2 bytes for isa='amx', got {kv_cache.dtype}")
    if kv_cache.stride()[2:] != (width, 1):
        raise ValueError(
            f"{op}: kv_cache must hold each page of a head in contiguous memory, got strides "
            f"{list(kv_cache.stride())} for shape {list(kv_cache.shape)}"
        )
