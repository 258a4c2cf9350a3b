"""The operators: one public function each, with its contract; beneath it the fake (shapes for torch.compile).

Conventions: b batch, Hk KV heads, n cached tokens, d and dv head dims. k: [b, Hk, n, d] and v: [b, Hk, n, dv] are fp32,
fp16, bf16 or, for operators that score or only move rows, fp8 (e4m3, e5m2; read as bf16 of the same values, see
docs/layouts.md), with any strides whose last dim is contiguous and rows of a multiple of 16 bytes; they are read where
they lie, never copied. Arithmetic and scores are fp32. `starts`, `lengths`: int32 [b], slot i of row b is valid when
starts[b] <= i < starts[b] + lengths[b] (defaults 0 and n - starts). Wrong input is a ValueError (TypeError for what
is no tensor) that names the argument, what was expected and what came, before anything is written. The operators are
inference-only: an input that requires grad raises outside `torch.no_grad()`.

Pages: with `block_table`, int32 [b, max_pages], k and v are pages, [num_pages, Hk, page_size, d], and b and n are the
table's: slot i of request b is slot i % page_size of page block_table[b, i // page_size], n = max_pages * page_size.
Only the pages of valid slots are looked up (of the indices, or of what `visible` lets be seen); the others may be -1.
Results have the bits that each request has alone in dense memory (docs/layouts.md).

CUDA tensors: work goes to the current stream and nothing waits for the GPU, so the values of indices, starts, lengths,
budgets and block tables are checked under `kvops.debug_checks()` only; otherwise wrong ones are skipped or clamped
(docs/cuda.md).
Head dims up to 1024.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor
from torch.library import register_fake

from . import _lib  # registers torch.ops.kvops.*
from .checks import (
    check_at_least,
    check_code,
    check_dims,
    check_layers,
    check_one_device,
    check_pair,
    check_plan,
    check_scores,
)
from .dispatch import operator, register
from .ladder import LadderPlan, decode_plan
from .lag import kept_length, longest_kept, num_segments

__all__ = [
    "anchor_cosine",
    "assign_prototypes",
    "build_prototypes",
    "cluster_mean",
    "cluster_priority",
    "compact_kv_",
    "gather_kv",
    "ladder_compact_",
    "ladder_gather",
    "lag_score",
    "lsh_bucket",
    "outlier_degree",
    "rope_at_slots",
    "select_topk",
    "window_attention",
    "window_scores",
]

MAX_WINDOW = 256  # rows that one call of the window operators takes

#: The integers that the schemas of torch.ops.kvops.* have for the names that these functions take.
SCORES = {"softmax": 0, "dot": 1}
REDUCTIONS = {"sum": 0, "mean": 1, "max": 2, "none": 3}

_ops = torch.ops.kvops
_lag_score = operator(_ops.lag_score.default)
_anchor_cosine = operator(_ops.anchor_cosine.default)
_window_scores = operator(_ops.window_scores.default)
_window_attention = operator(_ops.window_attention.default)
_select_topk = operator(_ops.select_topk.default)
_gather_kv = operator(_ops.gather_kv.default)
_gather_kv_out = operator(_ops.gather_kv.out, k_out="out[0]", v_out="out[1]")
_compact_kv_ = operator(_ops.compact_kv_.default)
_ladder_gather = operator(_ops.ladder_gather.default)
_ladder_gather_out = operator(_ops.ladder_gather.out, k_out="out[0]", v_out="out[1]")
_ladder_compact_ = operator(_ops.ladder_compact_.default)
_rope_at_slots = operator(_ops.rope_at_slots.default)
_rope_at_slots_out = operator(_ops.rope_at_slots.out, k_out="out")
_outlier_degree = operator(_ops.outlier_degree.default)
_lsh_bucket = operator(_ops.lsh_bucket.default)
_build_prototypes = operator(_ops.build_prototypes.default)
_assign_prototypes = operator(_ops.assign_prototypes.default)
_cluster_mean = operator(_ops.cluster_mean.default)
_cluster_priority = operator(_ops.cluster_priority.default)


def _written(*tensors: Tensor) -> None:
    """Tells autograd that the tensors changed (the stable ABI's mutating operators do not)."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(tensors)


# Beneath each function its fake: the shapes of its results, without data. It checks what it computes with, in the
# operator's words, and that no real tensor is mixed with meta tensors, which no operator gets to see; the operator
# checks everything else.

_KV = "[batch, heads, tokens, head_dim]"
_SCORES = "[batch, heads, tokens]"
_INDICES = "[batch, heads, kept]"


def _cache_shape(op: str, k: Tensor, block_table: Tensor | None) -> tuple[int, int, int, int]:
    """(b, Hk, n, d) of a dense cache, or of pages and their block table."""
    check_dims(op, _KV, k=k)
    b, heads, n, d = k.shape
    if block_table is None:
        return b, heads, n, d
    check_dims(op, "[batch, max_pages]", block_table=block_table)
    return block_table.shape[0], heads, block_table.shape[1] * n, d


def lag_score(
    k: Tensor,
    v: Tensor,
    *,
    lag: int,
    prefix: int = 0,
    v_weight: float = 1.0,
    self_reference: bool = False,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """LagKV's scores: how far each token stands out of its partition, seen by the next partition.

    Slots [prefix, n) are cut into partitions of `lag` tokens. With X partition p and Y partition p + 1, per channel c
    and for Z in {K, V}::

        N[t, c] = (X[t, c] - min_t Y[t, c]) / (max_t Y[t, c] - min_t Y[t, c])    0 where the range is 0 or not finite
        s_Z[t]  = softmax over t of std over c of N[t, c]                         unbiased std
        score   = s_K + v_weight * s_V

    Args:
        k: [b, Hk, n, d].
        v: [b, Hk, n, dv].
        lag: tokens of a partition.
        prefix: slots before the first partition: the sinks, and in a stream what was kept of older partitions.
        v_weight: the weight of V's scores.
        self_reference: Y is X itself (the paper's LocalKV).
        starts, lengths: int32 [b], the valid slots of each row. Row b's partitions begin at starts[b] + prefix.
        block_table: int32 [b, max_pages]: k and v are pages, as the head of this module says.

    Returns:
        fp32 [b, Hk, S, lag], S = max(0, (n - prefix) // lag - 1): all complete partitions but the last, which is only a
        reference. Partitions that a row lacks are NaN.

    Source: LagKV, Sec. 2.2, Eq. 5-9; LocalKV: App. A.2.
    """
    return _lag_score(k, v, lag, prefix, v_weight, self_reference, starts, lengths, block_table)


@register_fake("kvops::lag_score")
def _(k, v, lag, prefix=0, v_weight=1.0, self_reference=False, starts=None, lengths=None, block_table=None):
    check_one_device("lag_score", k, v=v, starts=starts, lengths=lengths, block_table=block_table)
    check_dims("lag_score", _KV, v=v)
    b, heads, n, _ = _cache_shape("lag_score", k, block_table)
    check_at_least("lag_score", "lag", lag, 1)
    check_at_least("lag_score", "prefix", prefix, 0)
    return k.new_empty((b, heads, num_segments(n, prefix, lag), lag), dtype=torch.float32)


@overload
def anchor_cosine(
    k: Tensor,
    *,
    anchor: Tensor | None = None,
    normalize_anchor: bool = True,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
    return_anchor: Literal[False] = False,
) -> Tensor: ...
@overload
def anchor_cosine(
    k: Tensor,
    *,
    anchor: Tensor | None = None,
    normalize_anchor: bool = True,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
    return_anchor: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def anchor_cosine(
    k: Tensor,
    *,
    anchor: Tensor | None = None,
    normalize_anchor: bool = True,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
    return_anchor: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """KeyDiff's scores: how little a key looks like the mean key. ::

        mu    = sum_j k_j / ||k_j||     over the valid finite keys
        score = -cos(k_i, mu)

    A zero key or a zero anchor scores 0. A key that is not finite stays out of mu and scores NaN; so do invalid slots.

    Args:
        k: [b, Hk, n, d].
        anchor: fp32 [b, Hk, d], used as mu (any positive multiple scores alike): K is then read once, not twice.
        normalize_anchor: False: mu is the sum of the keys as they are.
        starts, lengths: int32 [b], the valid slots of each row.
        return_anchor: returns mu too.
        block_table: int32 [b, max_pages]: k is pages, as the head of this module says.

    Returns:
        fp32 [b, Hk, n], and with `return_anchor` also mu, fp32 [b, Hk, d] (a copy of a given anchor).

    Source: KeyDiff, Sec. 3.2, Eq. 8.
    """
    scores, mu = _anchor_cosine(k, anchor, normalize_anchor, starts, lengths, block_table)
    return (scores, mu) if return_anchor else scores


@register_fake("kvops::anchor_cosine")
def _(k, anchor=None, normalize_anchor=True, starts=None, lengths=None, block_table=None):
    check_one_device("anchor_cosine", k, anchor=anchor, starts=starts, lengths=lengths, block_table=block_table)
    b, heads, n, d = _cache_shape("anchor_cosine", k, block_table)
    return k.new_empty((b, heads, n), dtype=torch.float32), k.new_empty((b, heads, d), dtype=torch.float32)


def _window(op, q, k, group_reduce, block_table, **others) -> Tensor:
    check_one_device(op, q, k=k, block_table=block_table, **others)
    check_dims(op, "[batch, query heads, rows, head_dim]", q=q)
    _, kv_heads, n, _ = _cache_shape(op, k, block_table)
    heads = q.shape[1] if group_reduce == REDUCTIONS["none"] else kv_heads
    return q.new_empty((q.shape[0], heads, n), dtype=torch.float32)


def window_scores(
    q: Tensor,
    k: Tensor,
    visible: Tensor,
    *,
    lse: Tensor | None = None,
    scale: float | None = None,
    score: str = "softmax",
    reduce: str = "sum",
    group_reduce: str = "mean",
    starts: Tensor | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """How much the last queries attend to each key: the observation window of SnapKV, LAQ and all that follow them. ::

        logit[i, j] = scale * q_i . k_j
                      then softcap * tanh(logit / softcap), if softcap is not 0
        a[i, j]     = exp(logit[i, j] - lse[i])      lse[i] = log(sum of exp(logit[i, j]) over the keys that i sees)
        score[j]    = reduce over the rows that see j, then group_reduce over the query heads of j's KV head

    A logit that is not finite stays out of its row's softmax, and its key scores NaN. A key that no row sees scores 0.
    Nothing of size rows x n is written (for w = 1 one workspace [b, Hq, n]).

    Args:
        q: [b, Hq, w, d], the queries of 1 to 256 rows, of k's dtype (bf16 where that is fp8) and any strides. Query
            head h serves KV head h // (Hq / Hk), and K is never expanded.
        k: [b, Hk, n, d].
        visible: int32 [w] or [b, w]. Row i sees the keys starts[b] <= j < visible[i]; with 0 it does not count (a
            sequence that has ended, padding).
        lse: fp32 [b, Hq, w], natural logarithm, over exactly those keys, as every FlashAttention returns it: K is then
            read once, else twice. On the CPU (on a GPU under `debug_checks()`) one that cannot be of these logits is
            refused.
        scale: 1 / sqrt(d) if None.
        score: "softmax", or "dot": the logits are reduced as they are (no lse).
        reduce: "sum", "mean" (over the rows that see any key) or "max".
        group_reduce: the same, or "none" for a score per query head.
        starts: int32 [b], the first valid slot of each row.
        softcap: 0 for none.
        sink_logits: fp32 [Hq], one more logit in each row's softmax, without a key (lse is given without it).
        block_table: int32 [b, max_pages]: k is pages, as the head of this module says.

    Returns:
        fp32 [b, Hk, n], with group_reduce="none" [b, Hq, n].

    Source: LAQ, Sec. 4.3, Eq. 4; SnapKV's observation window.
    """
    return _window_scores(
        q,
        k,
        visible,
        lse,
        scale=scale,
        score=check_code("window_scores", "score", score, SCORES, "dot"),
        reduce=check_code("window_scores", "reduce", reduce, REDUCTIONS, "max"),
        group_reduce=check_code("window_scores", "group_reduce", group_reduce, REDUCTIONS, "none"),
        starts=starts,
        softcap=softcap,
        sink_logits=sink_logits,
        block_table=block_table,
    )


@register_fake("kvops::window_scores")
def _(
    q,
    k,
    visible,
    lse=None,
    *,
    scale=None,
    score=0,
    reduce=0,
    group_reduce=1,
    starts=None,
    softcap=0.0,
    sink_logits=None,
    block_table=None,
):
    others = dict(visible=visible, lse=lse, starts=starts, sink_logits=sink_logits)
    return _window("window_scores", q, k, group_reduce, block_table, **others)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    *,
    scale: float | None = None,
    reduce: str = "sum",
    group_reduce: str = "mean",
    starts: Tensor | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    scores: bool = True,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The attention of the last queries, or of one decode step, with `window_scores` as a by-product. ::

        out[i] = sum over j of a[i, j] * v_j         a row that sees no key gives 0 and lse -inf

    A prefill runs any FlashAttention on all rows but the last w, and this on those: no row is computed twice, and the
    scores cost no attention of their own. A key whose logit is not finite is left out of the row. Slots that no row
    sees are not read (they may hold NaN). A V row that is not finite and that some row sees may reach all rows of its
    batch row and KV head.

    A cache of keys without rotation is read as it lies: with cos and sin each key is turned on its way, and all results
    have the bits that `rope_at_slots` of K and this would give, without the write and the second read of K.

    Args:
        v: [b, Hk, n, dv].
        cos, sin, interleaved: how keys turn at their slots, as in `rope_at_slots`; cos and sin both or none. q is
            rotated already.
        scores: False for the attention alone, which saves the second read of K (w > 1) or the logits (w = 1).
        block_table: int32 [b, max_pages]: k and v are pages, as the head of this module says.

    All other arguments as in `window_scores`.

    Returns:
        out [b, Hq, w, dv] of q's dtype, lse fp32 [b, Hq, w] (without the sink), scores fp32 [b, Hk, n] (or [b, Hq, n];
        without scores n is 0).

    Source: FlashAttention-2 and flash-decoding (Dao et al., 2023); LAQ, Sec. 4.3.
    """
    return _window_attention(
        q,
        k,
        v,
        visible,
        scale=scale,
        reduce=check_code("window_attention", "reduce", reduce, REDUCTIONS, "max"),
        group_reduce=check_code("window_attention", "group_reduce", group_reduce, REDUCTIONS, "none"),
        starts=starts,
        softcap=softcap,
        sink_logits=sink_logits,
        cos=cos,
        sin=sin,
        interleaved=interleaved,
        scores=scores,
        block_table=block_table,
    )


@register_fake("kvops::window_attention")
def _(
    q,
    k,
    v,
    visible,
    *,
    scale=None,
    reduce=0,
    group_reduce=1,
    starts=None,
    softcap=0.0,
    sink_logits=None,
    cos=None,
    sin=None,
    interleaved=False,
    scores=True,
    block_table=None,
):
    others = dict(v=v, visible=visible, starts=starts, sink_logits=sink_logits, cos=cos, sin=sin)
    observed = _window("window_attention", q, k, group_reduce, block_table, **others)
    check_dims("window_attention", _KV, v=v)
    b, heads, w, _ = q.shape
    if not scores:
        observed = observed.new_empty((*observed.shape[:2], 0))
    return q.new_empty((b, heads, w, v.shape[3])), q.new_empty((b, heads, w), dtype=torch.float32), observed


def select_topk(
    scores: Tensor,
    *,
    k: int,
    sinks: int = 0,
    window: int = 0,
    seq_len: int | None = None,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    budgets: Tensor | None = None,
    fill_invalid: bool = False,
) -> Tensor:
    """The slots to keep, ascending: the first `sinks`, the last `window`, and the best between, k in all.

    The order is total, hence the same on every device: numbers by value (-0.0 equals 0.0), then -inf, then NaN; equal
    scores keep the LOWER slot. Invalid slots are never kept.

    Args:
        scores: fp32 [b, Hk, n]. Or segments, fp32 [b, Hk, S, L] of `seq_len` slots, as `lag_score` gives them: then the
            first `sinks` slots stay, the best k of each segment, and all slots behind the last segment, in one pass.
        k: slots to keep, of a segment if there are some.
        sinks, window: first and last slots that always stay; part of k.
        seq_len: slots in all, with segments.
        starts, lengths: int32 [b], the valid slots of each row.
        budgets: int32 [b, Hk], each row's own k, at most k.
        fill_invalid: rows that lack slots end in their lowest invalid ones, in ascending place (what a left-padded
            cache needs), instead of -1, last.

    Returns:
        int64 [b, Hk, min(k, n)]. With segments [b, Hk, sinks + S * k + tail]; with starts or lengths as wide as the
        longest that any length <= seq_len gives.

    Source: LagKV, Sec. 2.2 (top-k per partition, Eq. 10); KeyDiff, Sec. 3.2 (top N).
    """
    return _select_topk(scores, k, sinks, window, seq_len, starts, lengths, budgets, fill_invalid)


@register_fake("kvops::select_topk")
def _(scores, k, sinks=0, window=0, seq_len=None, starts=None, lengths=None, budgets=None, fill_invalid=False):
    op = "select_topk"
    check_scores(op, scores, seq_len)
    for name, value in (("k", k), ("sinks", sinks), ("window", window)):
        check_at_least(op, name, value, 0)
    b, heads = scores.shape[:2]
    if scores.dim() == 3:
        width = min(k, scores.shape[2])
    else:
        check_at_least(op, "the lag of scores", scores.shape[3], 1)
        width_of = kept_length if starts is None and lengths is None else longest_kept
        width = width_of(seq_len, sinks, scores.shape[3], k)
    return scores.new_empty((b, heads, width), dtype=torch.int64)


def gather_kv(
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    block_table: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The kept rows, k[b, h, indices[b, h, i]] and the same of v. An index of -1 gives a row of zeros.

    Args:
        k: [b, Hk, n, d].
        v: [b, Hk, n, dv].
        indices: int64 [b, Hk, m], any strides (so [b, 1, m] expanded serves all heads).
        out: (k_out, v_out) of the result's shapes and any row-contiguous strides, which share no memory with the
            inputs, indices included. They are written and returned.
        block_table: int32 [b, max_pages]: k and v are pages, as the head of this module says.

    Returns:
        Fresh contiguous [b, Hk, m, d] and [b, Hk, m, dv], or `out`.
    """
    if out is None:
        return _gather_kv(k, v, indices, block_table)
    k_out, v_out = check_pair("gather_kv", out)
    _gather_kv_out(k, v, indices, block_table, k_out=k_out, v_out=v_out)
    _written(k_out, v_out)
    return k_out, v_out


@register_fake("kvops::gather_kv")
def _(k, v, indices, block_table=None):
    check_one_device("gather_kv", k, v=v, indices=indices, block_table=block_table)
    check_dims("gather_kv", _KV, k=k, v=v)
    check_dims("gather_kv", _INDICES, indices=indices)
    return k.new_empty((*indices.shape, k.shape[3])), v.new_empty((*indices.shape, v.shape[3]))


@register_fake("kvops::gather_kv.out")
def _(k, v, indices, block_table=None, *, k_out, v_out):
    check_one_device("gather_kv", k, v=v, indices=indices, block_table=block_table, k_out=k_out, v_out=v_out)


Layers = Tensor | Sequence[Tensor]


@overload
def compact_kv_(
    k: Tensor, v: Tensor, indices: Tensor, *, block_table: Tensor | None = ...
) -> tuple[Tensor, Tensor]: ...


@overload
def compact_kv_(
    k: Sequence[Tensor], v: Sequence[Tensor], indices: Sequence[Tensor], *, block_table: Tensor | None = ...
) -> tuple[list[Tensor], list[Tensor]]: ...


def compact_kv_(k: Layers, v: Layers, indices: Layers, *, block_table: Tensor | None = None) -> tuple[Layers, Layers]:
    """`gather_kv` in place: moves row indices[b, h, i] of k and v to slot i. Slots >= m are left as they are.

    It takes no extra memory; on a GPU 4 bytes for each 32 KiB that moves.

    Args:
        k: [b, Hk, n, d]; or a list, one per layer, all of one shape and dtype (one launch on a GPU).
        v: [b, Hk, n, dv], or a list. No two of the tensors may share memory, nor may one overlap itself.
        indices: int64 [b, Hk, m], strictly ascending in each row, -1 only at the end (those slots become zeros), or a
            list; m may differ between layers. All of them are checked before the first write.
        block_table: k and v are pages, the same for all layers, and what a request keeps moves to the front of its own
            pages. Slots behind it are left as they are, where indices are -1 too. Each page that is written belongs to
            one request.

    Returns:
        The views k[:, :, :m] and v[:, :, :m]; of pages k and v. Lists if k is one.
    """
    keys, values, kept = check_layers("compact_kv_", k=k, v=v, indices=indices)
    _compact_kv_(keys, values, kept, block_table)
    _written(*keys, *values)
    if block_table is not None:
        return k, v
    k_out, v_out = ([x[:, :, : i.shape[2]] for x, i in zip(tensors, kept)] for tensors in (keys, values))
    return (k_out[0], v_out[0]) if isinstance(k, Tensor) else (k_out, v_out)


@register_fake("kvops::compact_kv_")
def _(k, v, indices, block_table=None):
    for keys, values, kept in zip(k, v, indices):
        check_one_device("compact_kv_", keys, v=values, indices=kept, block_table=block_table)
        check_dims("compact_kv_", _KV, k=keys, v=values)
        check_dims("compact_kv_", _INDICES, indices=kept)


def _encoded(plan: LadderPlan | Sequence[int]) -> Sequence[int]:
    return plan.encoded if isinstance(plan, LadderPlan) else plan


def _plan_length(op: str, plan: Sequence[int]) -> int:
    """The slots that stay."""
    check_plan(op, plan)
    return len(decode_plan(plan))


def ladder_gather(
    k: Layers,
    v: Layers,
    *,
    plan: LadderPlan | Sequence[int],
    layer: int | Sequence[int],
    inv_freq: Tensor | None = None,
    interleaved: bool = False,
    out: tuple[Layers, Layers] | None = None,
) -> tuple[Layers, Layers]:
    """LaCache's move: what `plan` keeps of a layer's slots, or of the slots of all layers of a model at once.

    Slot p of the result comes from plan.indices(layer)[p] by a closed form; there is no index tensor.

    Args:
        k: [b, Hk, n, d] with the plan's n; or a list, one per layer, all of one shape and dtype (one launch on a GPU).
        v: [b, Hk, n, dv], or a list.
        plan: from `kvops.lacache_plan`.
        layer: which of the plan's layers this is, or a list.
        inv_freq: fp32 [pairs], radians per position. Given, the keys are ones that were rotated at their slots, and
            turned to the new ones while they move: pair i by (p - source) * inv_freq[i], in fp32, rounded once.
        interleaved: pair i is channels 2 i and 2 i + 1 (GPT-J), else i and i + pairs (NeoX). Channels from 2 * pairs on
            are moved.
        out: (k_out, v_out) of the result's shapes, which share no memory with the inputs. They are written and
            returned.

    Returns:
        Fresh contiguous [b, Hk, len(plan), d] and [b, Hk, len(plan), dv], lists if k is one; or `out`.

    Source: LaCache, Sec. 3.2, 3.3.
    """
    keys, values = check_layers("ladder_gather", k=k, v=v)
    one, layer, plan = isinstance(k, Tensor), [layer] if isinstance(layer, int) else layer, _encoded(plan)
    if out is None:
        k_out, v_out = _ladder_gather(keys, values, plan, layer, inv_freq=inv_freq, interleaved=interleaved)
    else:
        pair = check_pair("ladder_gather", out)
        k_out, v_out = check_layers("ladder_gather", **{"out[0]": pair[0], "out[1]": pair[1]})
        options = dict(inv_freq=inv_freq, interleaved=interleaved, k_out=k_out, v_out=v_out)
        _ladder_gather_out(keys, values, plan, layer, **options)
        _written(*k_out, *v_out)
    return (k_out[0], v_out[0]) if one else (k_out, v_out)


@register_fake("kvops::ladder_gather")
def _(k, v, plan, layer, *, inv_freq=None, interleaved=False):
    m = _plan_length("ladder_gather", plan)
    for name, tensors in (("k", k), ("v", v)):
        for x in tensors:
            check_dims("ladder_gather", _KV, **{name: x})
    new = [[x.new_empty((*x.shape[:2], m, x.shape[3])) for x in tensors] for tensors in (k, v)]
    return new[0], new[1]


@register_fake("kvops::ladder_gather.out")
def _(k, v, plan, layer, *, inv_freq=None, interleaved=False, k_out, v_out):
    _plan_length("ladder_gather", plan)


def ladder_compact_(
    k: Layers,
    v: Layers,
    *,
    plan: LadderPlan | Sequence[int],
    layer: int | Sequence[int],
    inv_freq: Tensor | None = None,
    interleaved: bool = False,
) -> tuple[Layers, Layers]:
    """`ladder_gather` in place.

    It takes no extra memory; on a GPU 4 bytes for each 32 KiB that moves. Slots before the plan's first ladder are not
    touched, slots from len(plan) on are left with what they held.

    Args: as in `ladder_gather`. No two of the tensors may share memory.

    Returns:
        The views k[:, :, :len(plan)] and v[:, :, :len(plan)], lists if k is one.
    """
    keys, values = check_layers("ladder_compact_", k=k, v=v)
    one, layer, plan = isinstance(k, Tensor), [layer] if isinstance(layer, int) else layer, _encoded(plan)
    _ladder_compact_(keys, values, plan, layer, inv_freq=inv_freq, interleaved=interleaved)
    _written(*keys, *values)
    m = len(decode_plan(plan))
    k_out, v_out = [x[:, :, :m] for x in keys], [x[:, :, :m] for x in values]
    return (k_out[0], v_out[0]) if one else (k_out, v_out)


@register_fake("kvops::ladder_compact_")
def _(k, v, plan, layer, *, inv_freq=None, interleaved=False):
    _plan_length("ladder_compact_", plan)


def rope_at_slots(
    k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, out: Tensor | None = None
) -> Tensor:
    """Rotary position embedding of cached keys (or queries) when they are read: pair i of slot j by its own angle. ::

        x', y' = x cos[j, i] - y sin[j, i], y cos[j, i] + x sin[j, i]

    Computed in fp32, rounded once. `kvops.Rope` makes the tables: of positions, from one position to another, and back
    to none.

    Args:
        k: [b, H, n, d].
        cos, sin: fp32 [n, pairs], or [b, n, pairs] if rows of the batch differ; 2 * pairs <= d.
        interleaved: x and y are channels 2 i and 2 i + 1 (GPT-J), else i and i + pairs (NeoX). Channels from 2 * pairs
            on are copied.
        out: [b, H, n, d] of k's dtype, k itself or memory that the inputs do not share. It is written and returned.

    Returns:
        A fresh contiguous [b, H, n, d], or `out`.

    Source: RoFormer, Su et al., 2021, Eq. 34; slot positions: StreamingLLM, Sec. 3.2; LaCache, Sec. 4.1.
    """
    if out is None:
        return _rope_at_slots(k, cos, sin, interleaved=interleaved)
    _rope_at_slots_out(k, cos, sin, interleaved=interleaved, k_out=out)
    _written(out)
    return out


@register_fake("kvops::rope_at_slots")
def _(k, cos, sin, *, interleaved=False):
    check_one_device("rope_at_slots", k, cos=cos, sin=sin)
    return k.new_empty(k.shape)


@register_fake("kvops::rope_at_slots.out")
def _(k, cos, sin, *, interleaved=False, k_out):  # not `out`: torch.compile takes that for contiguous tensors only
    check_one_device("rope_at_slots", k, cos=cos, sin=sin, out=k_out)


def outlier_degree(
    k: Tensor,
    *,
    kappa: int = 5,
    standardize: bool = True,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """ProtoKV's outlier degree: how little a key looks like its neighbours; semantic anchors score high. ::

        S(i)     = mean over the valid j with |i - j| <= kappa of cos(k_i, k_j)      j = i included
        Theta(i) = (E[S] - S(i)) / sqrt(Var[S])        mean and variance over the valid tokens of a row and head

    Near the ends the mean is over the neighbours that are there. The sign is such that LOW similarity is HIGH (Eq. 5 as
    printed finds the opposite of what the text says). A zero key has cosine 0 with all, itself too. A key that is not
    finite is nobody's neighbour, stays out of mean and variance, and scores NaN; so do invalid slots. Similarities that
    are all alike (sqrt(Var) <= 1e-6, what fp32 resolves) have Theta 0.

    Args:
        k: [b, Hk, n, d].
        kappa: neighbours on either side, 1 to 1024; the time does not depend on it.
        standardize: False returns S itself.
        starts, lengths: int32 [b], the valid slots of each row.
        block_table: int32 [b, max_pages]: k is pages, as the head of this module says.

    Returns:
        fp32 [b, Hk, n].

    Source: ProtoKV, Def. 2, Eq. 4, 5.
    """
    return _outlier_degree(k, kappa, standardize, starts, lengths, block_table)


@register_fake("kvops::outlier_degree")
def _(k, kappa=5, standardize=True, starts=None, lengths=None, block_table=None):
    check_one_device("outlier_degree", k, starts=starts, lengths=lengths, block_table=block_table)
    return k.new_empty(_cache_shape("outlier_degree", k, block_table)[:3], dtype=torch.float32)


def lsh_bucket(
    k: Tensor, indices: Tensor, projection: Tensor, phase: Tensor, *, block_table: Tensor | None = None
) -> Tensor:
    """The bucket of each chosen key: its random Fourier features' signs, read as a number of r bits. ::

        bucket(j) = sum over q < r of 2^(r - 1 - q) * [cos(projection_q . k_j + phase_q) > 0]

    The products are summed in fp64, so that every device finds the same buckets.

    Args:
        k: [b, Hk, n, d].
        indices: int64 [b, Hk, p], any strides (so arange(n) expanded hashes all keys). -1 gives bucket -1, as does a
            key that is not finite.
        projection: fp32 [r, d], 1 <= r <= 30, shared by all heads (`kvops.lsh_projection` draws both).
        phase: fp32 [r].
        block_table: int32 [b, max_pages]: k is pages, as the head of this module says.

    Returns:
        int32 [b, Hk, p], in [-1, 2^r).

    Source: ProtoKV, Sec. 4.2, Eq. 7, 8.
    """
    return _lsh_bucket(k, indices, projection, phase, block_table)


@register_fake("kvops::lsh_bucket")
def _(k, indices, projection, phase, block_table=None):
    check_one_device("lsh_bucket", k, indices=indices, projection=projection, phase=phase, block_table=block_table)
    check_dims("lsh_bucket", _INDICES, indices=indices)
    return k.new_empty(indices.shape, dtype=torch.int32)


def build_prototypes(
    k: Tensor,
    *,
    sat_indices: Tensor | None = None,
    buckets: Tensor | None = None,
    num_chunks: int,
    num_buckets: int = 4,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """ProtoKV's prototypes, in one read of K: the mean key of each chunk of tokens, then of each bucket of anchors. ::

        prototype c              = mean of chunk c without the anchors
        prototype num_chunks + s = mean of the anchors in bucket s

    A row's m valid tokens are cut into v' = min(num_chunks, m) chunks of consecutive tokens, chunk c = [c * m // v', (c
    + 1) * m // v') of them. An anchor of bucket -1 is in no prototype, nor is a key that is not finite or a token
    outside of the valid slots. A prototype of no token is zero.

    Args:
        k: [b, Hk, n, d].
        sat_indices: int64 [b, Hk, p], the semantic anchors, strictly ascending, -1 only at the end, as `select_topk`
            gives them. None, as buckets then is: there are none.
        buckets: int32 [b, Hk, p], in [-1, num_buckets).
        num_chunks, num_buckets: prototypes of either kind.
        starts, lengths: int32 [b], the valid slots of each row.
        block_table: int32 [b, max_pages]: k is pages, as the head of this module says.

    Returns:
        prototypes, fp32 [b, Hk, num_chunks + num_buckets, d], and counts, int32 [b, Hk, num_chunks + num_buckets].

    Source: ProtoKV, Sec. 4.2, Algorithm 1, lines 4-16 (the scale of Eq. 9 changes no cosine).
    """
    return _build_prototypes(k, sat_indices, buckets, num_chunks, num_buckets, starts, lengths, block_table)


@register_fake("kvops::build_prototypes")
def _(k, sat_indices, buckets, num_chunks, num_buckets=4, starts=None, lengths=None, block_table=None):
    others = dict(sat_indices=sat_indices, buckets=buckets, starts=starts, lengths=lengths, block_table=block_table)
    check_one_device("build_prototypes", k, **others)
    check_at_least("build_prototypes", "num_chunks", num_chunks, 0)
    check_at_least("build_prototypes", "num_buckets", num_buckets, 0)
    b, heads, _, d = _cache_shape("build_prototypes", k, block_table)
    count = num_chunks + num_buckets
    return k.new_empty((b, heads, count, d), dtype=torch.float32), k.new_empty((b, heads, count), dtype=torch.int32)


def assign_prototypes(
    k: Tensor,
    prototypes: Tensor,
    *,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """The prototype of highest cosine for each key: argmax over c of cos(k_i, prototype_c), ties to the lower c.

    The cosines are products of 16-bit numbers where the hardware multiplies those faster, summed in fp32: the winner's
    exact cosine is within 4e-3 of the best one's. They are never written: [n, C] does not exist. A zero key has cosine
    0 with all.

    Args:
        k: [b, Hk, n, d].
        prototypes: fp32 [b, Hk, C, d]. One that is zero (empty) or not finite never wins.
        starts, lengths: int32 [b], the valid slots of each row.
        block_table: int32 [b, max_pages]: k is pages, as the head of this module says.

    Returns:
        int32 [b, Hk, n]: -1 for a key that is not finite, for invalid slots, and if no prototype can win.

    Source: ProtoKV, Sec. 4.3, Eq. 10.
    """
    return _assign_prototypes(k, prototypes, starts, lengths, block_table)


@register_fake("kvops::assign_prototypes")
def _(k, prototypes, starts=None, lengths=None, block_table=None):
    others = dict(prototypes=prototypes, starts=starts, lengths=lengths, block_table=block_table)
    check_one_device("assign_prototypes", k, **others)
    return k.new_empty(_cache_shape("assign_prototypes", k, block_table)[:3], dtype=torch.int32)


def cluster_mean(scores: Tensor, assignment: Tensor, *, num_clusters: int, reduce: str = "mean") -> Tensor:
    """The mean (or "sum") of the scores in each cluster.

    Scores that are not finite are left out; a cluster without others is NaN. The scores are added as integers, in units
    of the largest |score| among them (2^-31 of it or finer for n up to 2^31), so no order of the sum matters and every
    device finds the same.

    Args:
        scores: fp32 [b, Hk, n].
        assignment: int32 [b, Hk, n], as `assign_prototypes` gives it: -1 is in no cluster.
        num_clusters: C.
        reduce: "mean" or "sum".

    Returns:
        fp32 [b, Hk, C].

    Source: ProtoKV, Algorithm 1, line 22 (mean), Eq. 11 (sum).
    """
    code = check_code("cluster_mean", "reduce", reduce, REDUCTIONS, "mean")
    return _cluster_mean(scores, assignment, num_clusters, code)


@register_fake("kvops::cluster_mean")
def _(scores, assignment, num_clusters, reduce=1):
    check_one_device("cluster_mean", scores, assignment=assignment)
    check_dims("cluster_mean", _SCORES, scores=scores)
    check_at_least("cluster_mean", "num_clusters", num_clusters, 1)
    return scores.new_empty((*scores.shape[:2], num_clusters))


def cluster_priority(
    scores: Tensor,
    assignment: Tensor,
    cluster_scores: Tensor,
    *,
    k: int,
    budgets: Tensor | None = None,
    whole: bool = False,
) -> tuple[Tensor, Tensor]:
    """What `select_topk` keeps k tokens by, so that clusters stay or go whole.

    Clusters come by descending score (ties: the lower one first; NaN last). Their tokens' priority is +inf as long as
    all of them fit into k, the token's own score in the one cluster that straddles the budget (a score that is not
    finite comes last in it), and -inf in all others. Tokens in no cluster (assignment -1) are NaN. The time grows with
    C squared, which shows from tens of thousands of clusters on.

    Args:
        scores: fp32 [b, Hk, n].
        assignment: int32 [b, Hk, n], as in `cluster_mean`.
        cluster_scores: fp32 [b, Hk, C].
        k: tokens to keep.
        budgets: int32 [b, Hk], each head's own k, at most k.
        whole: -inf in the straddling cluster too.

    Returns:
        priority, fp32 [b, Hk, n], and int32 [b, Hk], how many tokens of clusters are to be kept: min(k, those there
        are), or with `whole` those of the whole clusters.

    Source: ProtoKV, Eq. 2 and Algorithm 1, line 24.
    """
    return _cluster_priority(scores, assignment, cluster_scores, k, budgets, whole)


@register_fake("kvops::cluster_priority")
def _(scores, assignment, cluster_scores, k, budgets=None, whole=False):
    check_one_device("cluster_priority", scores, assignment=assignment, cluster_scores=cluster_scores, budgets=budgets)
    check_dims("cluster_priority", _SCORES, scores=scores)
    return scores.new_empty(scores.shape), scores.new_empty(scores.shape[:2], dtype=torch.int32)


_overloads = [getattr(getattr(_ops, op), x) for op in __all__ for x in getattr(_ops, op).overloads()]
_inference_only = register(_overloads)  # while it lives


# A torch with CUDA, but no CUDA kernels: say why, where torch would list every backend that it knows.


def _refuse_cuda(why: str) -> torch.library.Library:
    library = torch.library.Library("kvops", "IMPL")
    for op in __all__:

        def refuse(*args, op=op, **kwargs):
            raise NotImplementedError(f"{op}: got CUDA tensors, but kvops has no CUDA kernels here: {why}")

        for name in getattr(_ops, op).overloads():
            library.impl(op if name == "default" else f"{op}.{name}", refuse, "CUDA")
    return library


if torch.version.cuda and (_why := _lib.build_info()["cuda"]["why"]):
    _without_cuda = _refuse_cuda(_why)  # registered while it lives
