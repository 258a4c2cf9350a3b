"""SnapKV: keeps the keys that the last queries of the prompt attend to, with their neighbours, and those queries' own.
PyramidKV: the same with more of the budget in the early layers. ChunkKV: the same in whole chunks of tokens.

Sources: "SnapKV: LLM Knows What You are Looking for Before Generation", Li et al., 2024; "PyramidKV: Dynamic KV Cache
Compression based on Pyramidal Information Funneling", Cai et al., 2024; "ChunkKV: Semantic-Preserving KV Cache
Compression for Efficient Long-Context LLM Inference", Liu et al., 2025. Decisions: docs/methods/.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..cache import AttentionMethod, summed_scores
from .common import (
    Budget,
    Compressed,
    budget_tokens,
    check_choice,
    check_head_mode,
    check_int,
    in_place,
    moved,
    places,
    select_budget,
    shared_scores,
)
from .window import (
    Pooling,
    check_budget,
    check_lse,
    observation_window,
    outside_prefix,
    span_ends,
    window_indices,
)


def snapkv_compress(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: Budget,
    *,
    kernel_size: int = 7,
    pooling: str = "max",
    pool_first: bool = False,
    score: str = "softmax",
    group_reduce: str = "mean",
    lse: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    head_mode: str = "per_head",
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    fill_invalid: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> Compressed:
    """SnapKV in one call. k: [b, Hk, n, d], v: [b, Hk, n, dv] -> (k, v, indices) with min(budget, n) slots. ::

        a[i, j] = softmax over j of scale * q_i . k_j      the last w queries, each over the keys up to its own
        s[j]    = mean over the group's query heads of sum over i of a[i, j]        for j < n - w
        score   = the highest s among the kernel_size neighbours of j, itself in the middle

    The w newest tokens stay, and the budget's highest scores of what is before, per head.

    q_window: [b, Hq, w, d], the queries of the last w (valid) tokens of each row; query head h serves KV head
        h // (Hq / Hk), and K is never expanded. 32 rows are usual; a row that has fewer tokens ignores the first.
    budget: tokens (int), or a fraction in (0, 1] of the valid slots (float); it must hold the w newest.
    kernel_size: odd; 1 does not pool. pooling: "max", or "avg" (over kernel_size slots, those outside counting as 0).
        pool_first: pools each query head, then reduces the group.
    score: "softmax", or "dot": the sum of the logits themselves. group_reduce: "mean", "max" or "sum".
    lse: fp32 [b, Hq, w], the log-sum-exp of those rows, as every FlashAttention returns it (`kvops.attention`): K is
        then read once, not twice.
    scale, softcap, sink_logits: those of the model's attention, as in `kvops.ops.window_scores`.
    head_mode, starts, lengths, fill_invalid, out: as in `keydiff_compress`.

    TypeError or ValueError for wrong arguments, before anything is written.
    """
    op = "snapkv_compress"
    pool = Pooling(kernel_size, pooling, pool_first, group_reduce)
    visible, w = observation_window(op, q_window, k, starts, lengths)
    options = dict(score=score, scale=scale, softcap=softcap, sink_logits=sink_logits)
    spans = (starts, lengths, fill_invalid)
    indices = window_indices(op, q_window, k, visible, budget, w, pool, head_mode, lse, *spans, **options)
    return moved(op, k, v, indices, out)


snapkv_compress_ = in_place(snapkv_compress)


def pyramidkv_compress(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: Budget,
    *,
    layer: int,
    num_layers: int,
    kernel_size: int = 7,
    pooling: str = "max",
    pool_first: bool = False,
    score: str = "softmax",
    group_reduce: str = "mean",
    lse: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    head_mode: str = "per_head",
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    fill_invalid: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> Compressed:
    """PyramidKV in one call: `snapkv_compress` of `layer` with that layer's share of the budget.

    budget: the mean over the layers; `pyramidkv_budgets` says what each gets. In a padded batch that depends on the
    length of each row, and shorter rows end in -1. All else as in `snapkv_compress`.
    """
    op = "pyramidkv_compress"
    pool = Pooling(kernel_size, pooling, pool_first, group_reduce)
    _check_layer(op, layer, num_layers)
    visible, w = observation_window(op, q_window, k, starts, lengths)
    options = dict(score=score, scale=scale, softcap=softcap, sink_logits=sink_logits)
    share = functools.partial(_layer_budget, window=w, layer=layer, num_layers=num_layers)
    spans = (starts, lengths, fill_invalid, share)
    indices = window_indices(op, q_window, k, visible, budget, w, pool, head_mode, lse, *spans, **options)
    return moved(op, k, v, indices, out)


pyramidkv_compress_ = in_place(pyramidkv_compress)


def pyramidkv_budgets(budget: int | float, num_layers: int, n: int, window: int = 32) -> list[int]:
    """The tokens that each layer keeps of n, first layer first; `budget` is their mean, exactly. ::

        c = budget - window;   hi = min(2 c - c // 20, n - window);   lo = 2 c - hi
        window + a line from hi (layer 0) to lo (the last)

    All layers alike if n < 2 c, if n <= budget, or if there is one layer.
    """
    op = "pyramidkv_budgets"
    for name, value, low in (("num_layers", num_layers, 1), ("n", n, 0), ("window", window, 0)):
        check_int(op, name, value, low)
    keep = check_budget(op, budget, n, window)
    return [_layer_budget(keep, n, window, layer, num_layers) for layer in range(num_layers)]


def _layer_budget(budget: int | Tensor, n: int | Tensor, window: int, layer: int, num_layers: int) -> int | Tensor:
    """One layer's share of a budget for n tokens; ints, or int tensors of any number of rows.

    The line is rounded up in the first half of the layers, and the second half mirrors it, so the sum is exact.
    """

    def where(condition, yes, no):
        if isinstance(condition, Tensor):
            return torch.where(condition, yes, no)
        return yes if condition else no

    c = budget - window
    top = 2 * c - c // 20
    hi = where(n - window < top, n - window, top)
    rise = hi - 2 * (hi - c) * min(layer, num_layers - 1 - layer) // max(1, num_layers - 1)  # hi - lo = 2 (hi - c)
    share = rise if 2 * layer < num_layers else 2 * c - rise
    uniform = (n < 2 * c) | (n <= budget)
    return window + (c if num_layers == 1 else where(uniform, c, share))


def chunkkv_compress(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: Budget,
    *,
    chunk: int = 20,
    kernel_size: int = 1,
    pooling: str = "max",
    pool_first: bool = False,
    score: str = "softmax",
    group_reduce: str = "mean",
    lse: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    fill_invalid: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> Compressed:
    """ChunkKV in one call: whole chunks of `chunk` tokens, by the mean of SnapKV's scores (not pooled) over all heads.

    The w newest tokens stay. What is before is cut into chunks (the last may be shorter), and the chunks of the highest
    mean stay whole, but for the one that the budget cuts: it gives its best tokens. One set for all KV heads, exactly
    the budget. Keys whose score is NaN have no say in their chunk's mean, and go first.

    All other arguments as in `snapkv_compress`.
    """
    op = "chunkkv_compress"
    check_int(op, "chunk", chunk, 1)
    pool = Pooling(kernel_size, pooling, pool_first, group_reduce)
    pool.check(op)
    visible, w = observation_window(op, q_window, k, starts, lengths)
    check_lse(op, lse, q_window)
    check_budget(op, budget, k.shape[2], w)
    options = dict(score=score, scale=scale, softcap=softcap, sink_logits=sink_logits)
    end = span_ends(k, starts, lengths)
    reductions = dict(starts=starts, group_reduce=pool.operator_reduce)
    scores = summed_scores(q_window, k, visible, lse, end - w, **reductions, **options)
    scores = chunk_ranks(pool(scores, k.shape[1], outside_prefix(k, w, starts, end)), chunk, w, starts, end)
    return moved(op, k, v, select_budget(op, scores, k.shape[1], budget, 0, w, starts, lengths, fill_invalid), out)


chunkkv_compress_ = in_place(chunkkv_compress)


def chunk_ranks(scores: Tensor, chunk: int, window: int, starts: Tensor | None, end: Tensor | int) -> Tensor:
    """fp32 [b, 1, n]: whole numbers that order the prefix by (its chunk's mean, its own score), ties by lower slot.

    scores: [b, Hk, n]. Numbers below 2 n are exact in fp32 for n <= 2^23.
    """
    b, _, n = scores.shape
    chunk = min(chunk, max(n, 1))
    count = -(-n // chunk)
    # Row by row, chunks count from the first valid slot: slot j of the grid is slot starts + j of the cache.
    grid = torch.arange(count * chunk, device=scores.device).expand(b, -1)
    first = torch.zeros(b, 1, dtype=torch.int64, device=scores.device) if starts is None else starts[:, None].long()
    last = (end[:, None] if isinstance(end, Tensor) else end) - window
    inside = grid + first < last
    means = shared_scores(scores).squeeze(1).gather(1, (grid + first).clamp(max=n - 1))
    usable = inside & means.isfinite()
    tokens = torch.where(usable, means, -torch.inf).unflatten(1, (count, chunk))  # [b, count, chunk]
    total, size = torch.zeros_like(tokens[:, :, 0]), torch.zeros_like(tokens[:, :, 0])
    for i in range(chunk):  # one by one: the order of the sum is fixed
        finite = tokens[:, :, i].isfinite()
        total = total + torch.where(finite, tokens[:, :, i], 0.0)
        size = size + finite
    chunks = torch.where(size > 0, total / size, -torch.inf)
    order = places(chunks).unsqueeze(-1) * chunk + places(tokens)
    ranks = torch.where(usable, (count * chunk - order).flatten(1).float(), torch.nan)
    back = (torch.arange(n, device=scores.device) - first).clamp(min=0)
    return ranks.gather(1, back).unsqueeze(1)


def _check_layer(op: str, layer: int, num_layers: int) -> None:
    check_int(op, "layer", layer, 0)
    check_int(op, "num_layers", num_layers, 1)
    if layer >= num_layers:
        raise ValueError(f"{op}: layer must be below num_layers, {num_layers}, got {layer}")


class SnapKV(AttentionMethod):
    """SnapKV's cache of one layer: a step of at least `window` tokens brings it to the budget, shorter ones add to it.

    So the prompt is compressed, by its last `window` queries, and each chunk of a chunked prefill and each further turn
    with what was kept before; decode keeps every new token. A fraction is one of the tokens seen, but never less than
    the window. Settings as in `snapkv_compress`.
    """

    protects_window = True

    def __init__(
        self,
        budget: int | float,
        window: int = 32,
        *,
        kernel_size: int = 7,
        pooling: str = "max",
        pool_first: bool = False,
        score: str = "softmax",
        group_reduce: str = "mean",
        head_mode: str = "per_head",
    ):
        op = type(self).__name__
        self._pool = Pooling(kernel_size, pooling, pool_first, group_reduce)
        self._pool.check(op)
        check_choice(op, "score", score, ("softmax", "dot"))
        check_head_mode(op, head_mode)
        check_int(op, "window", window, 1)
        if budget_tokens(op, budget, 1) and isinstance(budget, int):
            check_budget(op, budget, 0, window)
        self.budget, self.window, self.score, self.head_mode = budget, window, score, head_mode
        self.kernel_size, self.pooling, self.pool_first, self.group_reduce = self._pool
        super().__init__()

    @property
    def _operator_reduce(self) -> str:
        return self._pool.operator_reduce

    def _keep_of(self, seen: int) -> int:
        """Tokens that stay in this layer."""
        return max(self.window, budget_tokens(type(self).__name__, self.budget, seen))

    def _rows(self, t: int) -> int:
        return self.window if t >= self.window and len(self) > self._keep_of(self.seen) else 0

    def _evict_by(self, scores: Tensor, k: Tensor, v: Tensor, pads: Tensor | None, seen: int) -> Tensor:
        scores = self._pool(scores, k.shape[1], outside_prefix(k, self.window, pads, k.shape[2]))
        scores = self._ranked(scores, k, pads)
        keep = self._keep_of(seen)
        return select_budget(
            type(self).__name__, scores, k.shape[1], keep, 0, self.window, pads, None, pads is not None
        )

    def _ranked(self, scores: Tensor, k: Tensor, pads: Tensor | None) -> Tensor:
        """What is selected by, from the pooled scores."""
        return shared_scores(scores) if self.head_mode == "shared" else scores


class PyramidKV(SnapKV):
    """PyramidKV's cache of one layer: `SnapKV` with the layer's share of the budget, see `pyramidkv_budgets`.

    Layers differ in length; `fresh` says which one this is. In a padded batch the shares are of the padded length.
    """

    uniform_layers = False

    def _keep_of(self, seen: int) -> int:
        return _layer_budget(super()._keep_of(seen), seen, self.window, self.layer, self.num_layers)


class ChunkKV(SnapKV):
    """ChunkKV's cache of one layer: as `SnapKV`, but whole chunks of tokens stay, alike in all heads.

    Settings as in `chunkkv_compress`.
    """

    def __init__(
        self,
        budget: int | float,
        window: int = 32,
        *,
        chunk: int = 20,
        kernel_size: int = 1,
        pooling: str = "max",
        pool_first: bool = False,
        score: str = "softmax",
        group_reduce: str = "mean",
    ):
        check_int("ChunkKV", "chunk", chunk, 1)
        self.chunk = chunk
        pool = dict(kernel_size=kernel_size, pooling=pooling, pool_first=pool_first, group_reduce=group_reduce)
        super().__init__(budget, window, score=score, **pool)

    def _ranked(self, scores: Tensor, k: Tensor, pads: Tensor | None) -> Tensor:
        return chunk_ranks(scores, self.chunk, self.window, pads, k.shape[2])
