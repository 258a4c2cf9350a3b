"""vLLM's pages on the CPU, which are tiles for its attention kernels: turned into rows in place, and back.

A layer's cache of the backend CPU_ATTN is [num_pages, Hk, page_size, 2 * d]. These last two dims are a name for memory:
a page of a head is K, page_size * d elements, and behind it V, as many, both as the kernel that vLLM picked reads them
(vLLM 0.32)::

    isa           K                                 V
    vec, vec16    [d, page_size]                    [page_size, d], rows
    amx           [page_size / 16, d / 2, 16, 2]    [d / 16, page_size / 2, 16, 2]

So a tile is 16 tokens of 2 channels in K, and 16 channels of 2 tokens in V. `isa` is the layer's `layer.isa`: amx for
bf16 and fp8 caches where the CPU has AMX, vec16 for head dims that 32 does not divide, else vec.

    with cpu_pages.as_rows(kv_cache, block_table, isa=layer.isa, lengths=lengths) as (k, v):
        kept = policy.compress_(k, v, lengths=lengths, block_table=block_table)

Nothing but the pages of valid slots is read or written, and the scratch is one page. Bits are only moved, so any dtype
comes back as it was. As in `kvops.ops`, wrong input is a ValueError (TypeError for what is no tensor) that names the
argument, what was expected and what came, before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..checks import check_choice, check_dims, check_one_device, check_vector, inference_only

__all__ = ["as_rows", "keys", "to_rows_", "to_tiles_"]

ISAS = ("vec", "vec16", "amx")
_TOGETHER = 32  # pages that are turned in one call: few calls, and still in the processor's cache when they are written
_MULTIPLE = 32  # of tokens in a page, and for amx of channels in a head: what the kernels take


def to_rows_(
    kv_cache: Tensor, block_table: Tensor, *, isa: str, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The requests' pages, which are tiles, become rows. vLLM must not read them until `to_tiles_` was called.

    Args:
        kv_cache: [num_pages, Hk, page_size, 2 * d] of tiles, on the CPU, any dtype; a page of a head is contiguous.
        block_table: int32 [b, max_pages]. A page belongs to one request.
        isa: "vec", "vec16" or "amx", vLLM's `layer.isa`.
        lengths: int32 [b], the slots that each request uses (default all). Entries of the table behind may be -1.

    Returns:
        K and V, views [num_pages, Hk, page_size, d] of kv_cache for `kvops.ops` and policies, with `block_table`. Only
        the requests' pages are rows.
    """
    pages = _pages("to_rows_", kv_cache, block_table, isa, lengths)
    _convert_(kv_cache, torch.tensor(pages, dtype=torch.int64), isa, to_rows=True)
    return _rows(kv_cache)


def to_tiles_(kv_cache: Tensor, block_table: Tensor, *, isa: str, lengths: Tensor | None = None) -> None:
    """`to_rows_` undone. After a compaction the pages that are still held are enough: `lengths` as they are now.

    Args:
        kv_cache: [num_pages, Hk, page_size, 2 * d], what was given to `to_rows_`.
        block_table, isa, lengths: as there. Each page named is taken for rows.
    """
    pages = _pages("to_tiles_", kv_cache, block_table, isa, lengths)
    _convert_(kv_cache, torch.tensor(pages, dtype=torch.int64), isa, to_rows=False)


@contextmanager
def as_rows(
    kv_cache: Tensor, block_table: Tensor, *, isa: str, lengths: Tensor | None = None, held: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """The requests' pages are rows within the `with` block, and tiles again behind it; after an exception all of them.

    Args:
        kv_cache, block_table, isa, lengths: as of `to_rows_`, and so is what is yielded.
        held: int32 [b, any], those of the pages that are still in use behind the block, -1 for none (default all). The
            others are left as they are, to be written anew.
    """
    pages = _pages("as_rows", kv_cache, block_table, isa, lengths)
    again = pages
    if held is not None:
        again = _pages("as_rows", kv_cache, held[held >= 0][None], isa, None)
        if not {*again} <= {*pages}:
            raise ValueError(
                f"as_rows: held must name pages of block_table, got {sorted({*again} - {*pages})} beside them"
            )
    own, kept = (torch.tensor(x, dtype=torch.int64) for x in (pages, again))
    with converted(kv_cache, own, kept, isa) as rows:
        yield rows


@contextmanager
def converted(kv_cache: Tensor, pages: Tensor, held: Tensor, isa: str) -> Iterator[tuple[Tensor, Tensor]]:
    """`as_rows` without its checks. pages, held: int64, each page once; held is a subset of pages."""
    _convert_(kv_cache, pages, isa, to_rows=True)
    try:
        yield _rows(kv_cache)
    except BaseException:
        held = pages
        raise
    finally:
        _convert_(kv_cache, held, isa, to_rows=False)


def keys(kv_cache: Tensor, block_table: Tensor, *, isa: str) -> Tensor:
    """A copy of the requests' keys as rows, [b, Hk, max_pages * page_size, d]; the pages stay tiles.

    Args:
        kv_cache: as of `to_rows_`.
        block_table: int32 [b, max_pages]. Requests may share pages. The keys of entries of -1 are of no request.
        isa: as of `to_rows_`.
    """
    _check_arguments("keys", kv_cache, block_table, isa)
    num_pages = len(kv_cache)
    if block_table.numel() and not (-1 <= block_table.min() and block_table.max() < num_pages):
        raise ValueError(f"keys: block_table must name pages in [0, {num_pages}), or -1, got {block_table.tolist()}")
    k, _ = _rows(kv_cache)
    found = _tiled(k, k, *_k_tile(kv_cache, isa))[block_table].transpose(1, 2)  # [b, Hk, max_pages, ...]
    (b, columns), (_, heads, page_size, d) = block_table.shape, k.shape
    return found.reshape(b, heads, columns * page_size, d).contiguous()


def _rows(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """K and V, [num_pages, Hk, page_size, d] each, of pages that are rows."""
    num_pages, heads, page_size, width = kv_cache.shape
    k, v = kv_cache.view(num_pages, heads, 2, page_size, width // 2).unbind(2)
    return k, v


def _k_tile(kv_cache: Tensor, isa: str) -> tuple[int, int]:
    """Tokens and channels of one of K's tiles."""
    return (16, 2) if isa == "amx" else (kv_cache.shape[2], 1)


def _tiled(x: Tensor, matrix: Tensor, a: int, b: int) -> Tensor:
    """[num_pages, Hk, n / a, a, m / b, b]: a matrix [n, m] of each page and head, whose tiles [a, b] are x's memory."""
    n, m = matrix.shape[2:]
    return x.view(*x.shape[:2], n // a, m // b, a, b).transpose(3, 4)


def _convert_(kv_cache: Tensor, pages: Tensor, isa: str, *, to_rows: bool) -> None:
    if kv_cache.itemsize == 1:
        kv_cache = kv_cache.view(torch.uint8)  # index_copy_ takes no fp8
    k, v = _rows(kv_cache)
    a, b = _k_tile(kv_cache, isa)
    # V's tiles, where it has any, are those of K with tokens and channels swapped.
    for x, matrix in ((k, k), (v, v.mT)) if isa == "amx" else ((k, k),):
        # Two views of one memory, [num_pages, Hk, n / a, a, m / b, b]: where an element is in rows, and in tiles.
        rows, tiles = matrix.unflatten(3, (-1, b)).unflatten(2, (-1, a)), _tiled(x, matrix, a, b)
        source, target = (tiles, rows) if to_rows else (rows, tiles)
        if b == 1:
            for some in pages.split(_TOGETHER):
                target.index_copy_(0, some, source.index_select(0, some))
            continue
        scratch = torch.empty_like(source[0])  # in the order of source's strides
        for page in pages.tolist():  # one by one: it is still in the processor's cache when it is written
            scratch.copy_(source[page])
            for there, here in zip(target[page].unbind(-1), scratch.unbind(-1)):  # twice as fast as all b at once
                there.copy_(here)


def _check_arguments(op: str, kv_cache: Tensor, block_table: Tensor, isa: str) -> None:
    inference_only(op, kv_cache=kv_cache, block_table=block_table)
    if not kv_cache.is_cpu:
        raise ValueError(f"{op}: kv_cache must be on the CPU, got {kv_cache.device}")
    check_one_device(op, kv_cache, block_table=block_table)
    check_choice(op, "isa", isa, ISAS)
    _check_cache(op, kv_cache, isa)
    check_dims(op, "[batch, max_pages]", block_table=block_table)
    if block_table.dtype != torch.int32:
        raise ValueError(f"{op}: block_table must be int32, got {block_table.dtype}")


def _pages(op: str, kv_cache: Tensor, block_table: Tensor, isa: str, lengths: Tensor | None) -> list[int]:
    """Checks all arguments; the pages of valid slots."""
    _check_arguments(op, kv_cache, block_table, isa)
    num_pages, page_size = kv_cache.shape[0], kv_cache.shape[2]
    b, columns = block_table.shape
    check_vector(op, "lengths", lengths, b, block_table)

    taken: dict[int, None] = {}  # in order
    for row, length in enumerate([columns * page_size] * b if lengths is None else lengths.tolist()):
        if not 0 <= length <= columns * page_size:
            raise ValueError(
                f"{op}: lengths must lie in [0, {columns * page_size}], the slots of block_table, got {length} for "
                f"row {row}"
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


def _check_cache(op: str, kv_cache: Tensor, isa: str) -> None:
    """kv_cache is what vLLM has for this kernel."""
    check_dims(op, "[num_pages, Hk, page_size, 2 * d]", kv_cache=kv_cache)
    page_size, width = kv_cache.shape[2:]
    if page_size == 0 or page_size % _MULTIPLE:
        raise ValueError(f"{op}: kv_cache must have pages of a multiple of {_MULTIPLE} slots, got {page_size}")
    multiple = 2 * _MULTIPLE if isa == "amx" else 2
    if width == 0 or width % multiple:
        raise ValueError(
            f"{op}: kv_cache must have a last dim of 2 * d, for isa={isa!r} a multiple of {multiple}, got {width}"
        )
    if isa == "amx" and kv_cache.element_size() > 2:
        raise ValueError(f"{op}: kv_cache must have elements of 1 or 2 bytes for isa='amx', got {kv_cache.dtype}")
    if kv_cache.stride()[2:] != (width, 1):
        raise ValueError(
            f"{op}: kv_cache must hold a page of a head in contiguous memory, got strides {list(kv_cache.stride())} "
            f"of {list(kv_cache.shape)}"
        )
