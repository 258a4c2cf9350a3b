"""Baselines for every comparison, built from the same operators: StreamingLLM, L2 norm, Random, the full cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache import Method, SlotMethod
from ..checks import check_vector
from ..dispatch import inference_only
from ..rope import Rope
from .common import (
    Compressed,
    all_slots,
    budget_tokens,
    check_head_mode,
    check_holds,
    check_int,
    check_rank,
    in_place,
    moved,
    negative_norms,
    random_integers,
    recent_tokens,
    select_budget,
    shared_scores,
)


def streamingllm_compress(
    k: Tensor,
    v: Tensor,
    budget: int | float,
    *,
    sinks: int = 4,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    fill_invalid: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> Compressed:
    """StreamingLLM in one call: the first `sinks` tokens and the newest, `budget` in all. Keys are only moved.

    Shapes, budget, starts, lengths, fill_invalid and out as in `keydiff_compress`.

    Source: "Efficient Streaming Language Models with Attention Sinks", Xiao et al., 2023.
    """
    return moved("streamingllm_compress", k, v, _newest(k, budget, sinks, starts, lengths, fill_invalid), out)


streamingllm_compress_ = in_place(streamingllm_compress)


def l2_compress(
    k: Tensor,
    v: Tensor,
    budget: int | float,
    *,
    sinks: int = 0,
    recent: int | float = 0,
    skip_layers: tuple[int, ...] = (0, 1),
    layer: int | None = None,
    num_layers: int | None = None,
    head_mode: str = "per_head",
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    fill_invalid: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> Compressed:
    """The keys of the lowest L2 norm: they draw the most attention.

    skip_layers: layers that stay whole, if `layer` says that this is one of them, in models of more than 8
        (`num_layers`). The budget is that of the others.
    sinks, recent: first and newest tokens that stay. All other arguments as in `keydiff_compress`.

    Source: "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", Devoto et al., 2024.
    """
    op = "l2_compress"
    check_head_mode(op, head_mode)
    check_rank(op, k)
    if _skipped(skip_layers, layer, num_layers):
        budget_tokens(op, budget, 1)
        return moved(op, k, v, all_slots(k, starts, lengths, fill_invalid), out)
    scores = lowest_norms(op, k, head_mode)
    indices = select_budget(op, scores, k.shape[1], budget, sinks, recent, starts, lengths, fill_invalid)
    return moved(op, k, v, indices, out)


l2_compress_ = in_place(l2_compress)


def random_compress(
    k: Tensor,
    v: Tensor,
    budget: int | float,
    *,
    seed: int = 0,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    fill_invalid: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> Compressed:
    """A random `budget` of the tokens, per head: those of the highest hash of (seed, head, position).

    The same on every device and in every row of a batch; position counts from the row's first valid slot. Shapes,
    budget, starts, lengths, fill_invalid and out as in `keydiff_compress`.
    """
    return moved("random_compress", k, v, _random(k, budget, seed, starts, lengths, fill_invalid), out)


random_compress_ = in_place(random_compress)


def _newest(k, budget, sinks, starts, lengths, fill_invalid, op="streamingllm_compress") -> Tensor:
    """Indices of the first `sinks` slots and the newest, alike for all heads."""
    check_rank(op, k)
    b, heads, n, _ = k.shape
    newer = torch.arange(-n, 0, dtype=torch.float32, device=k.device)  # exact for the last 2^24 slots
    return select_budget(op, newer.expand(b, 1, n), heads, budget, sinks, 0, starts, lengths, fill_invalid)


def _random(k, budget, seed, starts, lengths, fill_invalid) -> Tensor:
    """Indices of random slots per head."""
    op = "random_compress"
    check_rank(op, k)
    check_int(op, "seed", seed, 0)
    b, heads, n, _ = k.shape
    position = torch.arange(n, dtype=torch.int32, device=k.device).expand(b, 1, n)
    check_vector(op, "starts", starts, b, k)
    if starts is not None:
        position = position - starts[:, None, None]
    scores = random_integers(position.expand(b, heads, n), seed, 0)
    return select_budget(op, scores, heads, budget, 0, 0, starts, lengths, fill_invalid)


def lowest_norms(op: str, k: Tensor, head_mode: str) -> Tensor:
    """Minus the keys' norms, fp32 [b, Hk, n]."""
    inference_only(op, k=k)
    scores = negative_norms(k)
    return shared_scores(scores) if head_mode == "shared" else scores


def _skipped(skip_layers: tuple[int, ...], layer: int | None, num_layers: int | None) -> bool:
    return layer in skip_layers and num_layers is not None and num_layers > 8


class StreamingLLM(SlotMethod):
    """StreamingLLM's cache of one layer: the first `sinks` tokens and the newest.

    budget: tokens; or a fraction of the tokens seen, but never less than sinks + 1.
    positions, storage, rope: see `SlotMethod`.
    """

    def __init__(
        self,
        budget: int | float,
        *,
        sinks: int = 4,
        positions: str = "slots",
        storage: str = "pre_rope",
        rope: Rope | None = None,
        attend_before_compress: bool = True,
    ):
        check_int("StreamingLLM", "sinks", sinks, 0)
        keep = budget_tokens("StreamingLLM", budget, 1)
        if isinstance(budget, int):
            check_holds("StreamingLLM", keep, sinks, 0)
        self.budget, self.sinks = budget, sinks
        super().__init__(positions, storage, rope, attend_before_compress)

    def _evict(self, k: Tensor, v: Tensor, pads: Tensor | None, seen: int) -> Tensor | None:
        keep = budget_tokens("StreamingLLM", self.budget, seen)
        if isinstance(self.budget, float):
            keep = max(keep, self.sinks + 1)
        if k.shape[2] <= keep:
            return None
        return _newest(k, keep, self.sinks, pads, None, pads is not None, "StreamingLLM")


class L2(Method):
    """A cache of one layer that keeps the keys of the lowest L2 norm.

    In models of more than 8 layers, `skip_layers` stay whole, so layers differ in length. A fraction is one of the
    tokens seen, but never less than sinks + recent. Settings as in `l2_compress`.
    """

    def __init__(
        self,
        budget: int | float,
        *,
        sinks: int = 0,
        recent: int | float = 0,
        skip_layers: tuple[int, ...] = (0, 1),
        head_mode: str = "per_head",
        attend_before_compress: bool = True,
    ):
        check_head_mode("L2", head_mode)
        check_int("L2", "sinks", sinks, 0)
        keep = budget_tokens("L2", budget, 1)
        window = recent_tokens("L2", recent, keep)
        if isinstance(budget, int):
            check_holds("L2", keep, sinks, window)
        self.budget, self.sinks, self.recent, self.head_mode = budget, sinks, recent, head_mode
        self.skip_layers = skip_layers
        super().__init__(attend_before_compress)

    @property
    def uniform_layers(self) -> bool:
        return not self.skip_layers

    def _evict(self, k: Tensor, v: Tensor, pads: Tensor | None, seen: int) -> Tensor | None:
        keep = budget_tokens("L2", self.budget, seen)
        window = recent_tokens("L2", self.recent, keep)
        keep = max(keep, self.sinks + window)
        if k.shape[2] <= keep or _skipped(self.skip_layers, self.layer, self.num_layers):
            return None
        scores = lowest_norms("L2", k, self.head_mode)
        return select_budget("L2", scores, k.shape[1], keep, self.sinks, window, pads, None, pads is not None)


class Random(Method):
    """A cache of one layer that keeps a random sample of all tokens seen, another one in every head and layer.

    A token's rank is fixed by (seed, layer, head, position), so one call, chunks and single tokens keep the same slots.
    """

    def __init__(self, budget: int | float, *, seed: int = 0, attend_before_compress: bool = True):
        budget_tokens("Random", budget, 1)
        check_int("Random", "seed", seed, 0)
        self.budget, self.seed = budget, seed
        super().__init__(attend_before_compress)

    def _evict(self, k: Tensor, v: Tensor, pads: Tensor | None, seen: int) -> Tensor | None:
        keep = budget_tokens("Random", self.budget, seen)
        if k.shape[2] <= keep:
            return None
        position = self._positions(k, seen)
        if pads is not None:
            position = position - self._padding[:, None, None]
        scores = random_integers(position.int(), self.seed, self.layer)
        return select_budget("Random", scores, k.shape[1], keep, 0, 0, pads, None, pads is not None)


class Full(Method):
    """The whole cache: keeps everything."""

    def _evict(self, k: Tensor, v: Tensor, pads: Tensor | None, seen: int) -> None:
        return None
