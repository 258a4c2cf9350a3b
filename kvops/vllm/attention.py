"""kvops' attention in vLLM's CPU backend: KVOPS_VLLM_ATTENTION=1, with and without eviction.

Pages hold rows, in the memory that vLLM allocates, kv_cache [num_pages, Hk, page_size, 2 * d]. Each page of a head
holds page_size rows of K, then as many of V (`cpu_pages.row_views`). Evictions therefore move rows as they are, and
`window_attention` can return the scores of the keys.

A step's requests are attended in one of two ways, whichever is faster (`few`):

```text
window_attention    decode steps, long prompts, and new tokens after many old ones
vLLM's kernel       the other prompts, on a copy of their pages in the order that it reads
```

Layers with a sliding window or ALiBi, and layers that do not attend causally to their own tokens (encoders,
cross-attention), keep vLLM's attention and its page order. So does an fp8 cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from ..ops import window_attention
from . import cpu_pages

logger = init_logger(f"vllm.{__name__}")

Rows = slice | Tensor  # which of the step's tokens

BLOCK = 64  # query rows per window: fewer read K and V too often, more compute too much that the mask then hides


class Pages(NamedTuple):
    """Views of a layer's cache."""

    k: Tensor  # [num_pages, Hk, page_size, d]
    v: Tensor
    rows: Tensor  # [num_pages, Hk * 2 * page_size, d], those of K and V

    @classmethod
    def of(cls, kv_cache: Tensor) -> Pages:
        k, v = cpu_pages.row_views(kv_cache)
        return cls(k, v, kv_cache.view(len(kv_cache), -1, k.shape[3]))


@dataclass(frozen=True)
class Writes:
    """Where a step's tokens are written."""

    rows: Rows
    page: Tensor  # int64 [tokens]
    slot: Tensor  # int64 [tokens], within the page
    runs: list[tuple[slice, int, slice]]  # tokens, page and slots of each run of slots, if the runs are long
    _places: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by KV heads, in which layers may differ

    @classmethod
    def of(cls, slot_mapping: Tensor, page_size: int) -> Writes:
        rows: Rows = slice(0, len(slot_mapping))
        (valid,) = (slot_mapping >= 0).nonzero(as_tuple=True)  # -1 is padding
        if len(valid) < len(slot_mapping):
            rows, slot_mapping = valid, slot_mapping[valid]
        page, slot = slot_mapping // page_size, slot_mapping % page_size
        return cls(rows, page, slot, _runs(page, slot))

    def places(self, pages: Pages) -> tuple[Tensor, Tensor]:
        """Return where K's rows and then V's are in `pages.rows`: page and row, int64 [tokens, 1], [tokens, 2 * Hk]."""
        heads, size = pages.k.shape[1:3]
        if heads not in self._places:
            first = 2 * size * torch.arange(heads)
            self._places[heads] = self.page[:, None], self.slot[:, None] + torch.cat((first, first + size))
        return self._places[heads]

    def write(self, key: Tensor, value: Tensor, pages: Pages) -> None:
        key, value = key[self.rows], value[self.rows]
        if not self.runs:
            pages.rows[self.places(pages)] = torch.cat((key, value), 1)
        for tokens, page, slots in self.runs:
            pages.k[page, :, slots] = key[tokens].transpose(0, 1)
            pages.v[page, :, slots] = value[tokens].transpose(0, 1)


def _runs(page: Tensor, slot: Tensor) -> list[tuple[slice, int, slice]]:
    """Divide tokens into runs of consecutive slots of a page; return none if copies run by run were the slower way."""
    ends = ((slot[1:] != slot[:-1] + 1) | (page[1:] != page[:-1])).nonzero().flatten() + 1
    if len(slot) < 8 * (len(ends) + 1):
        return []
    bounds = [0, *ends.tolist(), len(slot)]
    firsts = zip(page[bounds[:-1]].tolist(), slot[bounds[:-1]].tolist())
    return [
        (slice(begin, end), own, slice(first, first + end - begin))
        for begin, end, (own, first) in zip(bounds, bounds[1:], firsts)
    ]


@dataclass(frozen=True)
class Window:
    """Requests with equally many new tokens, or blocks of one request's, for one call of `window_attention`."""

    rows: Rows
    table: Tensor  # int32 [b, pages]
    visible: Tensor  # int32 [b, t], the slots that each token sees


@dataclass
class Copied:
    """Requests for one call of vLLM's kernel on a copy of their pages."""

    rows: Rows
    pages: list[int]  # the pages to copy
    metadata: CPUAttentionMetadata  # its block table names pages of the copy
    _tiles: Tensor | None = None

    def tiles(self, kv_cache: Tensor, isa: cpu_pages.Isa) -> Tensor:
        """Return the copy, in the order that vLLM's kernel reads. Layers of one shape have it in the same memory, so it
        is valid until the next layer's."""
        shape = (len(self.pages), *kv_cache.shape[1:])
        if self._tiles is None or (self._tiles.shape, self._tiles.dtype) != (shape, kv_cache.dtype):
            self._tiles = kv_cache.new_empty(shape)
        cpu_pages.copy_to_tiles(kv_cache, self.pages, self._tiles, isa)
        return self._tiles


@dataclass(frozen=True)
class Parts:
    """How a step is attended. All layers do the same."""

    writes: Writes
    windows: list[Window]
    copied: Copied | None


def few(new: int, total: int, dtype: torch.dtype, isa: str) -> bool:
    """Return whether `window_attention` is the faster way for a request's new tokens, the last of all its tokens."""
    if new == 1:
        return True
    if isa == "amx":  # vLLM's kernel multiplies matrices in hardware
        return new <= 4
    if dtype == torch.float32:
        return total >= 4 * new
    return total >= min(2 * new, 1024)


class Builder(CPUAttentionMetadataBuilder):
    """Also divides a step's requests into `Parts`."""

    supports_update_block_table = False  # the parts hold the table, too

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if metadata.causal is True and metadata.dynamic_causal is None and metadata.encoder_cache is None:
            metadata.parts = self._parts(common_attn_metadata)
        return metadata

    def _parts(self, m: CommonAttentionMetadata) -> Parts:
        starts, totals = m.query_start_loc.tolist(), m.seq_lens.tolist()
        new = [end - start for start, end in zip(starts, starts[1:])]
        same, copied, windows = dict[int, list[int]](), list[int](), list[Window]()
        for i, (t, total) in enumerate(zip(new, totals)):
            if t and few(t, total, self.dtype, self.isa):
                same.setdefault(t, []).append(i)
            elif t:
                copied.append(i)
        for t, requests in same.items():
            if t > BLOCK:
                for i in requests:
                    windows += self._blocks(starts[i], t, totals[i], m.block_table_tensor[i])
            else:
                own = [totals[i] for i in requests]
                table = m.block_table_tensor[requests, : self._pages(max(own))].contiguous()
                visible = torch.tensor(own, dtype=torch.int32)[:, None] - torch.arange(t - 1, -1, -1, dtype=torch.int32)
                windows.append(Window(_tokens(starts, requests), table, visible))
        writes = Writes.of(m.slot_mapping, self.block_size)
        return Parts(writes, windows, self._copied(m, starts, totals, copied) if copied else None)

    def _blocks(self, start: int, new: int, total: int, table: Tensor) -> Iterator[Window]:
        """Divide a request's new tokens into blocks of BLOCK. Blocks that run together are like requests."""
        visible = torch.arange(total - new + 1, total + 1, dtype=torch.int32)
        together = -(-4 * torch.get_num_threads() // self.num_kv_heads)  # enough for the threads, with little memory
        first = 0
        while first < new:
            count = min(together, (new - first) // BLOCK)
            last = first + count * BLOCK if count else new
            own = table[: self._pages(total - new + last)].expand(max(1, count), -1).contiguous()
            rows = slice(start + first, start + last)
            yield Window(rows, own, visible[first:last].unflatten(0, (len(own), -1)))
            first = last

    def _copied(
        self, m: CommonAttentionMetadata, starts: Sequence[int], totals: Sequence[int], requests: list[int]
    ) -> Copied:
        counts = [self._pages(totals[i]) for i in requests]
        pages = torch.cat([m.block_table_tensor[i, :count] for i, count in zip(requests, counts)])
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        columns = torch.arange(max(counts), dtype=torch.int32)
        # Entries after a request's last page are not read.
        table = ((ends - torch.tensor(counts, dtype=torch.int32))[:, None] + columns).clamp_(max=len(pages) - 1)
        new = [starts[i + 1] - starts[i] for i in requests]
        begin = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        metadata = super().build(
            0,
            m.replace(
                query_start_loc=begin,
                query_start_loc_cpu=begin,
                seq_lens=m.seq_lens[requests],
                num_reqs=len(requests),
                num_actual_tokens=sum(new),
                max_query_len=max(new),
                max_seq_len=max(totals[i] for i in requests),
                block_table_tensor=table,
            ),
        )
        return Copied(_tokens(starts, requests), pages.tolist(), metadata)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


def _tokens(starts: Sequence[int], requests: list[int]) -> Rows:
    first, last = requests[0], requests[-1]
    between = [i for i in range(first, last + 1) if starts[i] < starts[i + 1]]
    if requests == between:
        return slice(starts[first], starts[last + 1])
    return torch.cat([torch.arange(starts[i], starts[i + 1]) for i in requests])


class Impl(CPUAttentionBackendImpl):
    """Attends with kvops' kernels, or as vLLM does in a layer that they do not support: see `why_not`."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.why_not = self._why_not()
        self._of: tuple[Tensor, Pages] | None = None  # the layer's cache, and its views
        if self.why_not:
            logger.warning_once("KVOPS_VLLM_ATTENTION: layers with %s keep vLLM's attention", self.why_not)

    def _why_not(self) -> str | None:
        if self.attn_type != AttentionType.DECODER:
            return f"attn_type={self.attn_type!r}"
        if self.alibi_slopes is not None:
            return "ALiBi"
        if self.sliding_window > 0:
            return "a sliding window"
        if self.is_fp8_kv_cache:
            return f"kv_cache_dtype={self.kv_cache_dtype!r}"
        return None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        scales = output_scale, output_block_scale
        if attn_metadata is None or scales != (None, None):
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        new = key is not None and value is not None and self.kv_sharing_target_layer_name is None
        if self.why_not:
            if new:
                super().do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
        parts: Parts | None = getattr(attn_metadata, "parts", None)
        if parts is None:
            raise NotImplementedError(
                "KVOPS_VLLM_ATTENTION=1 expects causal attention in this layer, got a step that is not causal; unset it"
            )
        pages = self._pages(kv_cache)
        if new:
            parts.writes.write(key, value, pages)
        logits: dict[str, Any] = {"scale": self.scale, "softcap": float(self.logits_soft_cap)}
        if self.sinks is not None:
            logits["sink_logits"] = self.sinks.detach().float()
        for x in parts.windows:
            q = query[x.rows].view(*x.visible.shape, *query.shape[1:]).transpose(1, 2)
            output[x.rows] = self.attend(x, q, pages.k, pages.v, logits).transpose(1, 2).flatten(0, 1)
        if parts.copied is not None:
            rows = parts.copied.rows
            out = output[rows]  # a view if rows is a slice
            tiles = parts.copied.tiles(kv_cache, layer.isa)
            super().forward(layer, query[rows], key, value, tiles, parts.copied.metadata, out)
            if not isinstance(rows, slice):
                output[rows] = out
        return output

    def attend(self, window: Window, q: Tensor, k: Tensor, v: Tensor, logits: dict[str, Any]) -> Tensor:
        """Return the attention of a window's tokens, [b, Hq, t, d]. q: the same shape; k, v: pages."""
        return window_attention(q, k, v, window.visible, block_table=window.table, scores=False, **logits)[0]

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        if self.why_not:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        Writes.of(slot_mapping, kv_cache.shape[2]).write(key, value, self._pages(kv_cache))

    def _pages(self, kv_cache: Tensor) -> Pages:
        if self._of is None or self._of[0] is not kv_cache:
            self._of = kv_cache, Pages.of(kv_cache)
        return self._of[1]


class Backend(CPUAttentionBackend):
    forward_includes_kv_cache_update = True  # so that a step's layers share `Writes`

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return Builder

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False
