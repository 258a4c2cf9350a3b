"""The public function of each operator, with its contract.

Below each function stands its fake, which gives `torch.compile` the shapes of the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.library import register_fake

from .. import _lib  # registers the operators
from .checks import (
    check_at_least,
    check_bool,
    check_code,
    check_dims,
    check_layers,
    check_one_device,
    check_pair,
    check_plan,
    check_scores,
    plain,
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
    "drop_scores",
    "gather_kv",
    "key_similarity",
    "ladder_compact_",
    "ladder_gather",
    "lag_score",
    "lsh_bucket",
    "outlier_degree",
    "quadratic_scores",
    "rope_at_slots",
    "select_topk",
    "trig_scores",
    "value_norm",
    "value_range",
    "window_attention",
    "window_scores",
]

MAX_WINDOW = 256  # query rows per call of the window operators

Score = Literal["softmax", "dot"]
Reduce = Literal["mean", "max", "sum"]
#: The integers that the schemas of torch.ops.kvops.* use for the names that these functions take.
SCORES = {"softmax": 0, "dot": 1}
REDUCTIONS = {"sum": 0, "mean": 1, "max": 2, "none": 3}


_ops = _lib.operators
_lag_score = operator(_ops.lag_score.default)
_anchor_cosine = operator(_ops.anchor_cosine.default)
_window_scores = operator(_ops.window_scores.default)
_window_attention = operator(_ops.window_attention.default)
_drop_scores = operator(_ops.drop_scores.default)
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
_quadratic_scores = operator(_ops.quadratic_scores.default)
_trig_scores = operator(_ops.trig_scores.default)
_key_similarity = operator(_ops.key_similarity.default)
_value_norm = operator(_ops.value_norm.default)
_value_range = operator(_ops.value_range.default)
_cluster_mean = operator(_ops.cluster_mean.default)
_cluster_priority = operator(_ops.cluster_priority.default)


def _written(*tensors: Tensor) -> None:
    """Tells autograd that the tensors changed, which mutating operators of the stable ABI do not do."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(tensors)


def _fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return register_fake(f"{_lib.NAMESPACE}::{name}")


# Below each function stands its fake, which returns tensors of the right shapes without data. A fake checks the values
# it computes with, in the operator's words. It also checks that no real tensor is mixed with meta tensors, which never
# reach the operator. The operator checks everything else.

_KV = "[batch, heads, tokens, head_dim]"
_SCORES = "[batch, heads, tokens]"
_INDICES = "[batch, heads, kept]"


def _cache_shape(op: str, k: Tensor, block_table: Tensor | None, name: str = "k") -> tuple[int, int, int, int]:
    """(b, Hk, n, d) of a dense cache, or of pages and their block table."""
    check_dims(op, _KV, **{name: k})
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
    """Score tokens as LagKV does: by their spread over channels, normalized by the range of the next partition.

    The slots [prefix, n) are cut into partitions of `lag` tokens. For partition X, the partition Y that follows it,
    and Z in {K, V}:

    ```text
    N[t, c] = (X[t, c] - min_t Y[t, c]) / (max_t Y[t, c] - min_t Y[t, c])    0 where the range is 0 or not finite
    s_Z[t]  = softmax over t of std over c of N[t, c]                         unbiased std
    score   = s_K + v_weight * s_V
    ```

    Args:
        k: [b, Hk, n, d].
        v: [b, Hk, n, dv].
        lag: Tokens per partition, at least 1.
        prefix: Slots before the first partition: the sinks, and in a stream also the tokens kept from older partitions.
        v_weight: The weight of V's scores.
        self_reference: Use X itself as Y (the paper's LocalKV).
        starts: int32 [b], the first valid slot of each row. Row b's partitions begin at starts[b] + prefix.
        lengths: int32 [b], the number of valid slots of each row.
        block_table: int32 [b, max_pages]: `k` and `v` are pages (see `kvops.ops`).

    Returns:
        fp32 [b, Hk, S, lag] with S = max(0, (n - prefix) // lag - 1). The last complete partition serves only as a
        reference and has no scores. Partitions that a shorter row does not have are NaN.

    Raises:
        TypeError: A tensor argument is not a tensor, or an option has the wrong type.
        ValueError: An argument has the wrong shape, dtype, device, layout or value.

    Source: LagKV, Sec. 2.2, Eq. 5-9; LocalKV: App. A.2.
    """
    return _lag_score(k, v, lag, prefix, v_weight, self_reference, starts, lengths, block_table)


@_fake("lag_score")
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
    """Score keys as KeyDiff does: by their negative cosine similarity to the mean key (the anchor).

    ```text
    mu       = sum over j of k_j / ||k_j||     over the valid, finite keys
    score[i] = -cos(k_i, mu)
    ```

    A zero key scores 0, and so do all keys if the anchor is zero. A key that is not finite is left out of mu and scores
    NaN. Invalid slots score NaN.

    Args:
        k: [b, Hk, n, d].
        anchor: fp32 [b, Hk, d], used as mu; positive multiples of it give the same scores. The kernel then reads K once
            instead of twice.
        normalize_anchor: If False, mu is the sum of the keys without normalization.
        starts: int32 [b], the first valid slot of each row.
        lengths: int32 [b], the number of valid slots of each row.
        block_table: int32 [b, max_pages]: `k` is pages (see `kvops.ops`).
        return_anchor: Return mu too.

    Returns:
        scores fp32 [b, Hk, n]; with `return_anchor` the pair (scores, mu), mu fp32 [b, Hk, d]. If `anchor` is given, mu
        is a copy of it.

    Raises:
        TypeError: A tensor argument is not a tensor, or an option has the wrong type.
        ValueError: An argument has the wrong shape, dtype, device, layout or value.

    Source: KeyDiff, Sec. 3.2, Eq. 8.
    """
    check_bool("anchor_cosine", "return_anchor", return_anchor)
    scores, mu = _anchor_cosine(k, anchor, normalize_anchor, starts, lengths, block_table)
    return (scores, mu) if return_anchor else scores


@_fake("anchor_cosine")
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
    score: Score = "softmax",
    reduce: Reduce = "sum",
    group_reduce: Reduce | Literal["none"] = "mean",
    starts: Tensor | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    row_weights: Tensor | None = None,
    k_scale: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """Score keys by the attention of an observation window, as SnapKV and LAQ do.

    The window is w query rows, usually the last queries of the prompt.

    ```text
    logit[i, j] = scale * q_i . k_j              k_j times k_scale[j], if k is int8
                  then softcap * tanh(logit / softcap), if softcap is not 0
    a[i, j]     = exp(logit[i, j] - lse[i])      lse[i] = log(sum of exp(logit[i, j]) over the keys that row i sees)
    score[j]    = reduce row_weights[i] * a[i, j] over the rows i that see j, then group_reduce over the query heads
                  of j's KV head
    ```

    A logit that is not finite is left out of its row's softmax, and its key scores NaN. A key that no row sees scores
    0. The kernel never writes a rows x n matrix; for w = 1 it uses one workspace [b, Hq, n].

    Args:
        q: [b, Hq, w, d], 1 to 256 query rows, with any strides, of k's dtype, or bfloat16 if k is fp8 or int8. Query
            head h belongs to KV head h // (Hq / Hk); K is never expanded to Hq heads.
        k: [b, Hk, n, d].
        visible: int32 [w] or [b, w]. Row i sees the keys starts[b] <= j < visible[i]. A row with 0 does not count, such
            as padding or a sequence that has ended.
        lse: fp32 [b, Hq, w], the natural-log-sum-exp of each row over exactly the keys that it sees, as every
            FlashAttention returns it. With it the kernel reads K once, otherwise twice. An lse that these logits cannot
            have raises ValueError on the CPU, and on a GPU under `kvops.debug_checks()`.
        scale: The factor of the logits; 1 / sqrt(d) if None.
        score: "softmax", or "dot" to reduce the logits themselves (then `lse` must be None).
        reduce: "sum", "mean" (over the rows that see any key) or "max".
        group_reduce: "sum", "mean" or "max", or "none" for a score per query head.
        starts: int32 [b], the first valid slot of each row.
        softcap: The cap of the logits; 0 for none.
        sink_logits: fp32 [Hq], one more logit in each row's softmax that belongs to no key. `lse` is without it.
        row_weights: fp32 [b, Hq, w], finite and at least 0: factors of the rows' weights, as KVzip+ has them. None: 1.
            They apply to score="softmax" only, and do not change which rows "mean" counts.
        k_scale: fp32 [b, Hk, n], any strides, given if and only if k is torch.int8: what each key is multiplied by
            (`quantize_rows`). With `block_table` it lies in pages as K does: [num_pages, Hk, page_size].
        block_table: int32 [b, max_pages]: `k` is pages (see `kvops.ops`).

    Returns:
        fp32 [b, Hk, n], or [b, Hq, n] with group_reduce="none".

    Raises:
        TypeError: A tensor argument is not a tensor, or an option has the wrong type.
        ValueError: An argument has the wrong shape, dtype, device, layout or value.

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
        row_weights=row_weights,
        k_scale=k_scale,
        block_table=block_table,
    )


@_fake("window_scores")
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
    row_weights=None,
    k_scale=None,
    block_table=None,
):
    others = dict(visible=visible, lse=lse, starts=starts, sink_logits=sink_logits, row_weights=row_weights)
    others["k_scale"] = k_scale
    return _window("window_scores", q, k, group_reduce, block_table, **others)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    *,
    scale: float | None = None,
    reduce: Reduce = "sum",
    group_reduce: Reduce | Literal["none"] = "mean",
    starts: Tensor | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    scores: bool = True,
    key_bias: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the attention of the last queries, or of one decode step, with `window_scores` as a by-product.

    ```text
    out[i] = sum over j of a[i, j] * v_j         with a[i, j] as in `window_scores`
    ```

    A row that sees no key gives 0 and an lse of -inf. In a prefill, run any FlashAttention on all rows but the last w,
    and this operator on those w: no row is computed twice, and the scores need no attention pass of their own.

    A key whose logit is not finite is left out of the row. The kernel does not read slots that no row sees; they may
    hold NaN. A non-finite V row that some row sees may make all rows of its batch row and KV head non-finite.

    With `key_bias` the logits are scale * q_i . k_j + key_bias[j]. A key with the bias log(m) weighs as much as m equal
    keys: caches that merge or refit tokens, as Attention Matching does, keep the mass of the tokens they drop in it.
    On the CPU biases of 0 change no bit.

    With `k_scale` and `v_scale`, k and v are int8 rows of half the bytes: key j is k_scale[j] * k_j and its value
    v_scale[j] * v_j. The kernel multiplies the integers, which are exact in bf16, then the products by k_scale, and the
    softmax weights by v_scale. A k_scale that is not finite leaves its key out; a v_scale that is not finite counts as
    such a V row.

    With `cos` and `sin` the cache may hold keys before RoPE: the kernel rotates each key as it reads it. All results
    have the bits that `rope_at_slots` on K followed by this operator would give, without writing K and reading it
    again.

    Args:
        q: [b, Hq, w, d], 1 to 256 query rows, already rotated; as in `window_scores`.
        k: [b, Hk, n, d].
        v: [b, Hk, n, dv].
        visible: int32 [w] or [b, w], as in `window_scores`.
        scale: The factor of the logits; 1 / sqrt(d) if None.
        reduce: "sum", "mean" (over the rows that see any key) or "max".
        group_reduce: "sum", "mean" or "max", or "none" for a score per query head.
        starts: int32 [b], the first valid slot of each row.
        softcap: The cap of the logits; 0 for none.
        sink_logits: fp32 [Hq], one more logit in each row's softmax that belongs to no key.
        cos: fp32 [n, pairs] or [b, n, pairs], the rotation of each slot as in `rope_at_slots`; given with `sin` or not
            at all.
        sin: As `cos`.
        interleaved: Which channels form a pair, as in `rope_at_slots`.
        scores: If False, compute the attention alone. This saves the second read of K (w > 1) or the workspace of
            logits (w = 1).
        key_bias: fp32 [b, Hk, n], added to the logits of each key, any strides; `softcap` must then be 0 and `scale` in
            [1e-6, 1e6]. With `block_table` it lies in pages as K does: [num_pages, Hk, page_size]. If a bias is not
            finite, or too large for fp32 when divided by `scale`, the key's logit counts as not finite.
        k_scale: fp32 [b, Hk, n], any strides, given if and only if k and v are torch.int8: what each key is multiplied
            by (`quantize_rows`). With `block_table` it lies in pages as `key_bias` does. `cos` and `sin` must then be
            None: rotate keys before they are rounded.
        v_scale: The same for the values.
        block_table: int32 [b, max_pages]: `k` and `v` are pages (see `kvops.ops`).

    Returns:
        (out, lse, scores): out [b, Hq, w, dv] of q's dtype; lse fp32 [b, Hq, w], natural logarithm, without the sink;
        scores fp32 [b, Hk, n], or [b, Hq, n] with group_reduce="none". With scores=False the last dim of scores is 0.

    Raises:
        TypeError: A tensor argument is not a tensor, or an option has the wrong type.
        ValueError: An argument has the wrong shape, dtype, device, layout or value.

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
        key_bias=key_bias,
        k_scale=k_scale,
        v_scale=v_scale,
        block_table=block_table,
    )


@_fake("window_attention")
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
    key_bias=None,
    k_scale=None,
    v_scale=None,
    block_table=None,
):
    others = dict(v=v, visible=visible, starts=starts, sink_logits=sink_logits, cos=cos, sin=sin, key_bias=key_bias)
    others |= dict(k_scale=k_scale, v_scale=v_scale)
    observed = _window("window_attention", q, k, group_reduce, block_table, **others)
    check_dims("window_attention", _KV, v=v)
    b, heads, w, _ = q.shape
    if not scores:
        observed = observed.new_empty((*observed.shape[:2], 0))
    return q.new_empty((b, heads, w, v.shape[3])), q.new_empty((b, heads, w), dtype=torch.float32), observed


def drop_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    *,
    scale: float | None = None,
    group_reduce: Reduce | Literal["none"] = "mean",
    starts: Tensor | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    epsilon: float = 1e-6,
    block_table: Tensor | None = None,
) -> Tensor:
    """Score keys by how far the outputs of the last queries move if the key is dropped, as DropKV does.

    Without key j the softmax of row i divides the weight of j among the other keys, and the output o_i becomes
    o_i + a / (1 - a) * (o_i - v_j), with a = a[i, j]. So one key's loss is known without computing another softmax:

    ```text
    o_i      = sum over j of a[i, j] * v_j                 with a[i, j] as in `window_scores`
    gain     = a[i, j] / (1 - a[i, j] + epsilon)
    score[j] = sum over the rows i that see j of gain^2 * ||v_j - o_i||^2, then group_reduce over the query heads
               of j's KV head
    ```

    The operator computes the outputs itself and keeps them in fp32: where one key has nearly all of a row's weight, the
    gain multiplies the rounding error of v_j - o_i. It reads K and V twice (on a GPU in fp32, or with head dims above
    256, K three times), and never writes a rows x n matrix; on a GPU group_reduce="max" uses one workspace [b, Hq, n].

    A logit that is not finite is left out of its row's softmax, and its key scores NaN. A key that no row sees scores
    0, and so does the only key of a row. A non-finite V row that some row sees may make all scores of its batch row and
    KV head NaN.

    Args:
        q: [b, Hq, w, d], 1 to 256 query rows; as in `window_scores`.
        k: [b, Hk, n, d].
        v: [b, Hk, n, dv], of the dtype of k.
        visible: int32 [w] or [b, w], as in `window_scores`.
        scale: The factor of the logits; 1 / sqrt(d) if None.
        group_reduce: "sum", "mean" or "max", or "none" for a score per query head.
        starts: int32 [b], the first valid slot of each row.
        softcap: The cap of the logits; 0 for none.
        sink_logits: fp32 [Hq], one more logit in each row's softmax that belongs to no key.
        epsilon: In [1e-7, 1], where 1e-7 is fp32's rounding of 1 - a. Bounds the gain of a key with all of a row's
            weight.
        block_table: int32 [b, max_pages]: `k` and `v` are pages (see `kvops.ops`).

    Returns:
        fp32 [b, Hk, n], or [b, Hq, n] with group_reduce="none".

    Raises:
        TypeError: A tensor argument is not a tensor, or an option has the wrong type.
        ValueError: An argument has the wrong shape, dtype, device, layout or value.

    Source: DropKV, 2026; epsilon: kvpress, dropkv_press.py.
    """
    return _drop_scores(
        q,
        k,
        v,
        visible,
        scale=scale,
        group_reduce=check_code("drop_scores", "group_reduce", group_reduce, REDUCTIONS, "none"),
        starts=starts,
        softcap=softcap,
        sink_logits=sink_logits,
        epsilon=epsilon,
        block_table=block_table,
    )


@_fake("drop_scores")
def _(
    q,
    k,
    v,
    visible,
    *,
    scale=None,
    group_reduce=1,
    starts=None,
    softcap=0.0,
    sink_logits=None,
    epsilon=1e-6,
    block_table=None,
):
    scores = _window(
        "drop_scores", q, k, group_reduce, block_table, v=v, visible=visible, starts=starts, sink_logits=sink_logits
    )
    check_dims("drop_scores", _KV, v=v)
    return scores


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
    """Select the k slots to keep: the first `sinks`, the last `window`, and the highest scores between them.

    The order of scores is total, so it is the same on every device: numbers by value (-0.0 equals 0.0), then -inf, then
    NaN. Of equal scores the LOWER slot is kept. Invalid slots are never kept.

    `scores` may also hold segments, [b, Hk, S, L], as `lag_score` returns them. One pass then keeps the first `sinks`
    slots, the best k slots of each segment, and all slots after the last segment.

    Args:
        scores: fp32 [b, Hk, n], or fp32 [b, Hk, S, L] with `seq_len`.
        k: Slots to keep; with segments, slots to keep per segment.
        sinks: First valid slots that are always kept; they count towards k (not with segments).
        window: Last valid slots that are always kept; they count towards k.
        seq_len: With segments, the number of slots in all.
        starts: int32 [b], the first valid slot of each row.
        lengths: int32 [b], the number of valid slots of each row.
        budgets: int32 [b, Hk], the k of each row and head, at most `k`.
        fill_invalid: If a row has too few valid slots, keep its lowest invalid slots too, in ascending order, as a
            left-padded cache needs. Otherwise the missing entries are -1 and come last.

    Returns:
        int64 [b, Hk, min(k, n)], ascending in each row. With segments [b, Hk, sinks + S * k + tail]; with `starts` or
        `lengths` the width is the longest that any length <= seq_len gives.

    Raises:
        TypeError: A tensor argument is not a tensor, or an option has the wrong type.
        ValueError: An argument has the wrong shape, dtype, device, layout or value.

    Source: LagKV, Sec. 2.2 (top-k per partition, Eq. 10); KeyDiff, Sec. 3.2 (top N).
    """
    return _select_topk(scores, k, sinks, window, seq_len, starts, lengths, budgets, fill_invalid)


@_fake("select_topk")
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
    """Copy the kept rows of K and V: k[b, h, indices[b, h, i]], and the same of v.

    An index of -1 gives a row of zeros.

    Args:
        k: [b, Hk, n, d].
        v: [b, Hk, n, dv].
        indices: int64 [b, Hk, m] with any strides, so [b, 1, m] expanded over the heads works.
        block_table: int32 [b, max_pages]: `k` and `v` are pages (see `kvops.ops`).
        out: (k_out, v_out) to write to, of the result's shapes, with contiguous rows. They must not share memory with
            the inputs, indices included.

    Returns:
        (k, v): [b, Hk, m, d] and [b, Hk, m, dv], newly allocated and contiguous, or `out`.

    Raises:
        TypeError: A tensor argument is not a tensor, or `out` is not a pair.
        ValueError: An argument has the wrong shape, dtype, device, layout or value, or an index is not a slot.
    """
    if out is None:
        return _gather_kv(k, v, indices, block_table)
    k_out, v_out = check_pair("gather_kv", out)
    _gather_kv_out(k, v, indices, block_table, k_out=k_out, v_out=v_out)
    _written(k_out, v_out)
    return k_out, v_out


@_fake("gather_kv")
def _(k, v, indices, block_table=None):
    check_one_device("gather_kv", k, v=v, indices=indices, block_table=block_table)
    check_dims("gather_kv", _KV, k=k, v=v)
    check_dims("gather_kv", _INDICES, indices=indices)
    return k.new_empty((*indices.shape, k.shape[3])), v.new_empty((*indices.shape, v.shape[3]))


@_fake("gather_kv.out")
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
    """Move the kept rows of K and V to the front, in place: row indices[b, h, i] goes to slot i.

    Slots from m on keep their contents. The move needs no extra memory on the CPU, and on a GPU 4 bytes of workspace
    for each 32 KiB that moves.

    Args:
        k: [b, Hk, n, d], or a list with one such tensor per layer, all of one shape and dtype. A list takes one launch
            on a GPU.
        v: [b, Hk, n, dv], or a list. No two of the tensors may share memory, and none may overlap itself.
        indices: int64 [b, Hk, m], strictly ascending in each row, or a list. Entries of -1 are allowed only at the end
            of a row; those slots become zeros. m may differ between layers. On the CPU all indices are checked before
            the first write.
        block_table: int32 [b, max_pages]: `k` and `v` are pages, with one table for all layers. The kept rows of each
            request move to the front of its own pages. The slots after them keep their contents, also where indices are
            -1. A page that is written must belong to one request only.

    Returns:
        The views k[:, :, :m] and v[:, :, :m], or lists of them if `k` is a list. With pages, `k` and `v` themselves.

    Raises:
        TypeError: An argument is neither a tensor nor a list of tensors.
        ValueError: An argument has the wrong shape, dtype, device, layout or value, or indices do not ascend.
    """
    keys, values, kept = check_layers("compact_kv_", k=k, v=v, indices=indices)
    _compact_kv_(keys, values, kept, block_table)
    _written(*keys, *values)
    if block_table is not None:
        return k, v
    k_out, v_out = ([x[:, :, : i.shape[2]] for x, i in zip(tensors, kept)] for tensors in (keys, values))
    return (k_out[0], v_out[0]) if isinstance(k, Tensor) else (k_out, v_out)


@_fake("compact_kv_")
def _(k, v, indices, block_table=None):
    for keys, values, kept in zip(k, v, indices):
        check_one_device("compact_kv_", keys, v=values, indices=kept, block_table=block_table)
        check_dims("compact_kv_", _KV, k=keys, v=values)
        check_dims("compact_kv_", _INDICES, indices=kept)


def _encoded(plan: LadderPlan | Sequence[int]) -> Sequence[int]:
    return plan.encoded if isinstance(plan, LadderPlan) else plan


def _layer_list(layer: int | Sequence[int]) -> Sequence[int]:
    layer = plain(layer)
    return [layer] if isinstance(layer, int) else layer


def _plan_length(op: str, plan: Sequence[int]) -> int:
    """The number of slots that the plan keeps."""
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
    """Copy the slots that a LaCache plan keeps, for one layer or for all layers of a model at once.

    Slot p of the result is slot plan.indices(layer)[p] of the input. The kernel computes it in closed form and needs no
    index tensor.

    Args:
        k: [b, Hk, n, d] with the plan's n, or a list with one such tensor per layer, all of one shape and dtype. A list
            takes one launch on a GPU.
        v: [b, Hk, n, dv], or a list.
        plan: The result of `kvops.lacache_plan`.
        layer: The index of the layer in the model, or a list of them.
        inv_freq: fp32 [pairs], radians per position. Give it if the keys were rotated at their slots: the kernel then
            rotates pair i of each key by (new slot - old slot) * inv_freq[i], in fp32 and rounded once.
        interleaved: Pair i is channels 2 i and 2 i + 1 (GPT-J) instead of i and i + pairs (NeoX). Channels from
            2 * pairs on are copied without rotation.
        out: (k_out, v_out) to write to, of the result's shapes, or a pair of lists. They must not share memory with the
            inputs.

    Returns:
        (k, v): [b, Hk, len(plan), d] and [b, Hk, len(plan), dv], newly allocated and contiguous, as lists if `k` is a
        list; or `out`.

    Raises:
        TypeError: An argument is neither a tensor nor a list of tensors, or `out` is not a pair.
        ValueError: An argument has the wrong shape, dtype, device, layout or value, or does not fit the plan.

    Source: LaCache, Sec. 3.2, 3.3.
    """
    keys, values = check_layers("ladder_gather", k=k, v=v)
    one, layer, plan = isinstance(k, Tensor), _layer_list(layer), _encoded(plan)
    if out is None:
        k_out, v_out = _ladder_gather(keys, values, plan, layer, inv_freq=inv_freq, interleaved=interleaved)
    else:
        pair = check_pair("ladder_gather", out)
        k_out, v_out = check_layers("ladder_gather", **{"out[0]": pair[0], "out[1]": pair[1]})
        options = dict(inv_freq=inv_freq, interleaved=interleaved, k_out=k_out, v_out=v_out)
        _ladder_gather_out(keys, values, plan, layer, **options)
        _written(*k_out, *v_out)
    return (k_out[0], v_out[0]) if one else (k_out, v_out)


@_fake("ladder_gather")
def _(k, v, plan, layer, *, inv_freq=None, interleaved=False):
    m = _plan_length("ladder_gather", plan)
    for name, tensors in (("k", k), ("v", v)):
        for x in tensors:
            check_dims("ladder_gather", _KV, **{name: x})
    new = [[x.new_empty((*x.shape[:2], m, x.shape[3])) for x in tensors] for tensors in (k, v)]
    return new[0], new[1]


@_fake("ladder_gather.out")
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
    """Move the slots that a LaCache plan keeps to the front, in place: `ladder_gather` without a copy.

    The move needs no extra memory on the CPU, and on a GPU 4 bytes of workspace for each 32 KiB that moves. Slots
    before the plan's first ladder are not touched, and slots from len(plan) on keep their contents.

    Args:
        k: [b, Hk, n, d] with the plan's n, or a list with one such tensor per layer, all of one shape and dtype. No two
            of the tensors may share memory.
        v: [b, Hk, n, dv], or a list.
        plan: The result of `kvops.lacache_plan`.
        layer: The index of the layer in the model, or a list of them.
        inv_freq: fp32 [pairs], radians per position, to rotate the keys to their new slots; as in `ladder_gather`.
        interleaved: Which channels form a pair, as in `ladder_gather`.

    Returns:
        The views k[:, :, :len(plan)] and v[:, :, :len(plan)], or lists of them if `k` is a list.

    Raises:
        TypeError: An argument is neither a tensor nor a list of tensors.
        ValueError: An argument has the wrong shape, dtype, device, layout or value, or does not fit the plan.

    Source: LaCache, Sec. 3.2, 3.3.
    """
    keys, values = check_layers("ladder_compact_", k=k, v=v)
    one, layer, plan = isinstance(k, Tensor), _layer_list(layer), _encoded(plan)
    _ladder_compact_(keys, values, plan, layer, inv_freq=inv_freq, interleaved=interleaved)
    _written(*keys, *values)
    m = len(decode_plan(plan))
    k_out, v_out = [x[:, :, :m] for x in keys], [x[:, :, :m] for x in values]
    return (k_out[0], v_out[0]) if one else (k_out, v_out)


@_fake("ladder_compact_")
def _(k, v, plan, layer, *, inv_freq=None, interleaved=False):
    _plan_length("ladder_compact_", plan)


def rope_at_slots(
    k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, out: Tensor | None = None
) -> Tensor:
    """Rotate cached keys (or queries) by RoPE: pair i of slot j by the angle of its own cosine and sine.

    ```text
    x' = x cos[j, i] - y sin[j, i]
    y' = y cos[j, i] + x sin[j, i]
    ```

    The rotation is computed in fp32 and rounded once. `kvops.Rope` makes the tables: for positions, from one position
    to another, and back to no rotation.

    Args:
        k: [b, H, n, d].
        cos: fp32 [n, pairs], or [b, n, pairs] if the rows of the batch differ; 2 * pairs <= d.
        sin: As `cos`.
        interleaved: x and y are channels 2 i and 2 i + 1 (GPT-J) instead of i and i + pairs (NeoX). Channels from
            2 * pairs on are copied.
        out: [b, H, n, d] of k's dtype to write to: `k` itself, or memory that the inputs do not share.

    Returns:
        [b, H, n, d], newly allocated and contiguous, or `out`.

    Raises:
        TypeError: A tensor argument is not a tensor.
        ValueError: An argument has the wrong shape, dtype, device, layout or value.

    Source: RoFormer, Su et al., 2021, Eq. 34; slot positions: StreamingLLM, Sec. 3.2; LaCache, Sec. 4.1.
    """
    if out is None:
        return _rope_at_slots(k, cos, sin, interleaved=interleaved)
    _rope_at_slots_out(k, cos, sin, interleaved=interleaved, k_out=out)
    _written(out)
    return out


@_fake("rope_at_slots")
def _(k, cos, sin, *, interleaved=False):
    check_one_device("rope_at_slots", k, cos=cos, sin=sin)
    return k.new_empty(k.shape)


@_fake("rope_at_slots.out")
def _(k, cos, sin, *, interleaved=False, k_out):  # not `out`, which torch.compile supports for contiguous tensors only
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
    """Compute ProtoKV's outlier degree: how dissimilar each key is to its neighbours. Semantic anchors score high.

    ```text
    S(i)     = mean over the valid j with |i - j| <= kappa of cos(k_i, k_j)      j = i included
    Theta(i) = (E[S] - S(i)) / sqrt(Var[S])        mean and variance over the valid tokens of a row and head
    ```

    Near the ends of a row the mean covers the neighbours that exist. LOW similarity gives a HIGH degree; Eq. 5 as
    printed has the opposite sign, against the paper's text. A zero key has cosine 0 with every key, itself included. A
    key that is not finite is left out of all means and variances and scores NaN, and so do invalid slots. If all
    similarities are alike (sqrt(Var) <= 1e-6, the resolution of fp32), Theta is 0.

    Args:
        k: [b, Hk, n, d].
        kappa: Neighbours on either side, 1 to 1024. The run time does not depend on it.
        standardize: If False, return S instead of Theta.
        starts: int32 [b], the first valid slot of each row.
        lengths: int32 [b], the number of valid slots of each row.
        block_table: int32 [b, max_pages]: `k` is pages (see `kvops.ops`).

    Returns:
        fp32 [b, Hk, n].

    Raises:
        TypeError: A tensor argument is not a tensor, or an option has the wrong type.
        ValueError: An argument has the wrong shape, dtype, device, layout or value.

    Source: ProtoKV, Def. 2, Eq. 4, 5.
    """
    return _outlier_degree(k, kappa, standardize, starts, lengths, block_table)


@_fake("outlier_degree")
def _(k, kappa=5, standardize=True, starts=None, lengths=None, block_table=None):
    check_one_device("outlier_degree", k, starts=starts, lengths=lengths, block_table=block_table)
    return k.new_empty(_cache_shape("outlier_degree", k, block_table)[:3], dtype=torch.float32)


def lsh_bucket(
    k: Tensor, indices: Tensor, projection: Tensor, phase: Tensor, *, block_table: Tensor | None = None
) -> Tensor:
    """Hash chosen keys into buckets: the signs of r random Fourier features, read as an r-bit number.

    ```text
    bucket(j) = sum over q < r of 2^(r - 1 - q) * [cos(projection_q . k_j + phase_q) > 0]
    ```

    The kernel sums the products in fp64, so every device finds the same buckets.

    Args:
        k: [b, Hk, n, d].
        indices: int64 [b, Hk, p] with any strides, so arange(n) expanded hashes all keys. An index of -1 gives bucket
            -1, and so does a key that is not finite.
        projection: fp32 [r, d] with 1 <= r <= 30, shared by all heads. `kvops.lsh_projection` draws projection and
            phase.
        phase: fp32 [r], radians.
        block_table: int32 [b, max_pages]: `k` is pages (see `kvops.ops`).

    Returns:
        int32 [b, Hk, p], each in [-1, 2^r).

    Raises:
        TypeError: A tensor argument is not a tensor.
        ValueError: An argument has the wrong shape, dtype, device, layout or value.

    Source: ProtoKV, Sec. 4.2, Eq. 7, 8.
    """
    return _lsh_bucket(k, indices, projection, phase, block_table)


@_fake("lsh_bucket")
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
    least_chunk: int = 1,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ProtoKV's prototypes in one read of K: the mean key of each chunk, then of each bucket of anchors.

    ```text
    prototype c              = mean of chunk c without the anchors
    prototype num_chunks + s = mean of the anchors in bucket s
    ```

    The m valid tokens of a row are cut into v' = min(num_chunks, max(1, m // least_chunk)) chunks of consecutive
    tokens. Chunk c holds tokens [c * m // v', (c + 1) * m // v'). Anchors of bucket -1, keys that are not finite and
    invalid slots are in no prototype. A prototype without tokens is zero.

    Args:
        k: [b, Hk, n, d].
        sat_indices: int64 [b, Hk, p], the semantic anchors, strictly ascending, with -1 only at the end, as
            `select_topk` returns them. None, together with `buckets`, means no anchors.
        buckets: int32 [b, Hk, p], the bucket of each anchor, in [-1, num_buckets).
        num_chunks: Prototypes of chunks.
        num_buckets: Prototypes of buckets.
        least_chunk: The fewest tokens of a chunk. Rows of fewer than num_chunks * least_chunk tokens have fewer chunks.
        starts: int32 [b], the first valid slot of each row.
        lengths: int32 [b], the number of valid slots of each row.
        block_table: int32 [b, max_pages]: `k` is pages (see `kvops.ops`).

    Returns:
        (prototypes, counts): fp32 [b, Hk, num_chunks + num_buckets, d] and int32 [b, Hk, num_chunks + num_buckets], the
        tokens of each prototype.

    Raises:
        TypeError: A tensor argument is not a tensor, or an option has the wrong type.
        ValueError: An argument has the wrong shape, dtype, device, layout or value.

    Source: ProtoKV, Sec. 4.2, Algorithm 1, lines 4-16 (the scale of Eq. 9 changes no cosine).
    """
    return _build_prototypes(
        k, sat_indices, buckets, num_chunks, num_buckets, least_chunk, starts, lengths, block_table
    )


@_fake("build_prototypes")
def _(k, sat_indices, buckets, num_chunks, num_buckets=4, least_chunk=1, starts=None, lengths=None, block_table=None):
    others = dict(sat_indices=sat_indices, buckets=buckets, starts=starts, lengths=lengths, block_table=block_table)
    check_one_device("build_prototypes", k, **others)
    check_at_least("build_prototypes", "num_chunks", num_chunks, 0)
    check_at_least("build_prototypes", "num_buckets", num_buckets, 0)
    check_at_least("build_prototypes", "least_chunk", least_chunk, 1)
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
    """Assign each key to the prototype of highest cosine: argmax over c of cos(k_i, prototype_c), ties to the lower c.

    Where the hardware multiplies 16-bit numbers faster, the kernel computes the cosines from 16-bit products summed in
    fp32; the exact cosine of the winner is then within 4e-3 of the best. The kernel never writes the [n, C] matrix. A
    zero key has cosine 0 with every prototype.

    Args:
        k: [b, Hk, n, d].
        prototypes: fp32 [b, Hk, C, d]. A prototype that is zero (empty) or not finite never wins.
        starts: int32 [b], the first valid slot of each row.
        lengths: int32 [b], the number of valid slots of each row.
        block_table: int32 [b, max_pages]: `k` is pages (see `kvops.ops`).

    Returns:
        int32 [b, Hk, n]: -1 for keys that are not finite, for invalid slots, and if no prototype can win.

    Raises:
        TypeError: A tensor argument is not a tensor.
        ValueError: An argument has the wrong shape, dtype, device, layout or value.

    Source: ProtoKV, Sec. 4.3, Eq. 10.
    """
    return _assign_prototypes(k, prototypes, starts, lengths, block_table)


@_fake("assign_prototypes")
def _(k, prototypes, starts=None, lengths=None, block_table=None):
    others = dict(prototypes=prototypes, starts=starts, lengths=lengths, block_table=block_table)
    check_one_device("assign_prototypes", k, **others)
    return k.new_empty(_cache_shape("assign_prototypes", k, block_table)[:3], dtype=torch.int32)


def _head_scores(op: str, k: Tensor, rows: Tensor, name: str, block_table: Tensor | None) -> Tensor:
    """The result of a fake whose scores are per query head: rows is [Hq, d] or [b, Hq, d]."""
    b, _, n, _ = _cache_shape(op, k, block_table)
    if rows.dim() not in (2, 3):
        raise ValueError(f"{op}: {name} must be [Hq, d] or [b, Hq, d], got {list(rows.shape)}")
    return k.new_empty((b, rows.shape[-2], n), dtype=torch.float32)


def quadratic_scores(
    k: Tensor,
    mean: Tensor,
    *,
    cov: Tensor | None = None,
    scale: float | None = None,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """Score keys as Expected Attention does: by the attention weight that Gaussian queries give them on average.

    ```text
    score[h, i] = scale * mean_h . k_i + scale^2 / 2 * k_i^T cov_h k_i = log E[exp(scale * q . k_i)]
                                                                         for q ~ N(mean_h, cov_h)
    ```

    The kernel multiplies K with each covariance and with K again, and never writes the [n, d] products. A key whose
    score is not finite in fp32 scores NaN. Invalid slots score NaN.

    Args:
        k: [b, Hk, n, d].
        mean: fp32 [Hq, d] or [b, Hq, d], the mean query of each query head, rotated to the positions at which the keys
            are scored. Query head h belongs to KV head h // (Hq / Hk).
        cov: fp32 [Hq, d, d] or [b, Hq, d, d], the covariance of the queries. Only its symmetric part matters. Without
            it, the score is scale * mean_h . k_i.
        scale: The factor of the logits; 1 / sqrt(d) if None.
        starts: int32 [b], the first valid slot of each row.
        lengths: int32 [b], the number of valid slots of each row.
        block_table: int32 [b, max_pages]: `k` is pages (see `kvops.ops`).

    Returns:
        fp32 [b, Hq, n].

    Raises:
        TypeError: A tensor argument is not a tensor, or an option has the wrong type.
        ValueError: An argument has the wrong shape, dtype, device, layout or value.

    Source: Expected Attention, Devoto et al., 2025.
    """
    return _quadratic_scores(k, mean, cov, scale=scale, starts=starts, lengths=lengths, block_table=block_table)


@_fake("quadratic_scores")
def _(k, mean, cov=None, *, scale=None, starts=None, lengths=None, block_table=None):
    op = "quadratic_scores"
    check_one_device(op, k, mean=mean, cov=cov, starts=starts, lengths=lengths, block_table=block_table)
    return _head_scores(op, k, mean, "mean", block_table)


def trig_scores(
    k: Tensor,
    centers: Tensor,
    *,
    norms: Tensor | None = None,
    interleaved: bool = False,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """Score keys as TriAttention does: by a trigonometric series in their distance, and by their norms.

    ```text
    score[h, i] = sum over c of centers[h, c] * k[i, c] + sum over f of norms[h, f] * |k[i, f]|
    ```

    |k[i, f]| is the norm of the two channels that RoPE rotates together. For keys that are cached after RoPE, the
    series over frequencies f that TriAttention averages over future offsets is one product with rotated query
    centers, which `kvops.trig_centers` computes: a key's own position is already in the key.

    A pair of channels with a norm below 1e-19 counts as zero. A key whose score is not finite in fp32 scores NaN, and
    so does one whose squares overflow. Invalid slots score NaN.

    Args:
        k: [b, Hk, n, d], after RoPE.
        centers: fp32 [Hq, d] or [b, Hq, d], in the channel order of k. Query head h belongs to KV head h // (Hq / Hk).
        norms: fp32 [Hq, pairs] or [b, Hq, pairs] with 2 * pairs <= d, the weight of each pair's norm.
        interleaved: Pair f is channels 2 f and 2 f + 1 (GPT-J); otherwise f and f + pairs (NeoX).
        starts: int32 [b], the first valid slot of each row.
        lengths: int32 [b], the number of valid slots of each row.
        block_table: int32 [b, max_pages]: `k` is pages (see `kvops.ops`).

    Returns:
        fp32 [b, Hq, n].

    Raises:
        TypeError: A tensor argument is not a tensor, or an option has the wrong type.
        ValueError: An argument has the wrong shape, dtype, device, layout or value.

    Source: TriAttention, Mao et al., 2026.
    """
    return _trig_scores(
        k, centers, norms, interleaved=interleaved, starts=starts, lengths=lengths, block_table=block_table
    )


@_fake("trig_scores")
def _(k, centers, norms=None, *, interleaved=False, starts=None, lengths=None, block_table=None):
    op = "trig_scores"
    check_one_device(op, k, centers=centers, norms=norms, starts=starts, lengths=lengths, block_table=block_table)
    return _head_scores(op, k, centers, "centers", block_table)


def key_similarity(
    k: Tensor,
    *,
    threshold: float = 0.5,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """Compute R-KV's redundancy before its softmax: each key's mean cosine with all others, some pairs spared.

    ```text
    last(i)  = the last j != i with cos(k_i, k_j) > threshold, if any
    score(j) = (sum over i != j with last(i) != j of cos(k_i, k_j)) / N        N: the finite valid keys
    ```

    So of tokens that repeat one another, each spares the most recent one, and the score of older copies is higher. The
    kernel never writes the [n, n] cosines. Their sum is linear, so only last(i) needs products of pairs: at most
    n^2 d multiply-adds per head, less where keys have similar ones near the end, and none from threshold 1 on.

    A zero key has cosine 0 with every key. A key that is not finite is left out of all sums and scores NaN, and so do
    invalid slots.

    Args:
        k: [b, Hk, n, d].
        threshold: The cosine that similar keys exceed, at least 0. From 1 on no pair is spared.
        starts: int32 [b], the first valid slot of each row.
        lengths: int32 [b], the number of valid slots of each row.
        block_table: int32 [b, max_pages]: `k` is pages (see `kvops.ops`).

    Returns:
        fp32 [b, Hk, n]. `last` depends on products of the keys as stored, summed in fp32; only cosines within their
        rounding of the threshold can differ between devices.

    Raises:
        TypeError: A tensor argument is not a tensor, or an option has the wrong type.
        ValueError: An argument has the wrong shape, dtype, device, layout or value.

    Source: R-KV, redundancy estimation, and `cal_similarity` of the released code (retain_direction="last"), except
    that a token without a similar one spares none; there it spares slot 0.
    """
    return _key_similarity(k, threshold, starts, lengths, block_table)


@_fake("key_similarity")
def _(k, threshold=0.5, starts=None, lengths=None, block_table=None):
    check_one_device("key_similarity", k, starts=starts, lengths=lengths, block_table=block_table)
    return k.new_empty(_cache_shape("key_similarity", k, block_table)[:3], dtype=torch.float32)


def value_norm(
    v: Tensor,
    w_o: Tensor,
    *,
    group_reduce: Reduce = "mean",
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """Compute CriticalKV's value norms: the L1 norm of each value after the output projection.

    ```text
    norm(i) = mean over the query heads h of the KV head's group of sum over c of |W_O[c, h] . v_i|
    ```

    W_O[c, h] are the dv weights from query head h to output channel c. The work is n Hq hidden dv multiply-adds, as
    much as the output projection of n tokens. The kernel never writes the [n, hidden] products. A value that is not
    finite scores NaN, and so do invalid slots.

    Args:
        v: [b, Hk, n, dv].
        w_o: [hidden, Hq * dv], as torch.nn.Linear stores the output projection, in v's dtype (torch.bfloat16 if v is
            fp8), with hidden up to 2^20. Weights must be finite.
        group_reduce: Over the query heads of a group: "mean", "max" or "sum".
        starts: int32 [b], the first valid slot of each row.
        lengths: int32 [b], the number of valid slots of each row.
        block_table: int32 [b, max_pages]: `v` is pages (see `kvops.ops`).

    Returns:
        fp32 [b, Hk, n].

    Raises:
        TypeError: A tensor argument is not a tensor.
        ValueError: An argument has the wrong shape, dtype, device, layout or value.

    Source: CriticalKV, the bound of the output perturbation.
    """
    code = check_code("value_norm", "group_reduce", group_reduce, REDUCTIONS, "max")
    return _value_norm(v, w_o, group_reduce=code, starts=starts, lengths=lengths, block_table=block_table)


@_fake("value_norm")
def _(v, w_o, *, group_reduce=1, starts=None, lengths=None, block_table=None):
    check_one_device("value_norm", v, w_o=w_o, starts=starts, lengths=lengths, block_table=block_table)
    return v.new_empty(_cache_shape("value_norm", v, block_table, "v")[:3], dtype=torch.float32)


def value_range(
    v: Tensor,
    *,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """Compute VaSE's value ranges: the largest channel of each value minus the smallest.

    ```text
    range[i] = max over the channels of v_i - min over the channels of v_i
    ```

    A value with a NaN channel scores NaN, and so does one whose channels are all the same infinity. A value with other
    infinities scores infinity. Invalid slots score NaN. Every device finds the same bits.

    Args:
        v: [b, Hk, n, dv].
        starts: int32 [b], the first valid slot of each row.
        lengths: int32 [b], the number of valid slots of each row.
        block_table: int32 [b, max_pages]: `v` is pages (see `kvops.ops`).

    Returns:
        fp32 [b, Hk, n].

    Raises:
        TypeError: A tensor argument is not a tensor.
        ValueError: An argument has the wrong shape, dtype, device, layout or value.

    Source: VaSE, Chang et al., 2026: the range of each value over its channels.
    """
    return _value_range(v, starts=starts, lengths=lengths, block_table=block_table)


@_fake("value_range")
def _(v, *, starts=None, lengths=None, block_table=None):
    check_one_device("value_range", v, starts=starts, lengths=lengths, block_table=block_table)
    return v.new_empty(_cache_shape("value_range", v, block_table, "v")[:3], dtype=torch.float32)


def cluster_mean(
    scores: Tensor, assignment: Tensor, *, num_clusters: int, reduce: Literal["mean", "sum"] = "mean"
) -> Tensor:
    """Compute the mean (or sum) of the scores in each cluster.

    Scores that are not finite are left out; a cluster without finite scores is NaN. The kernel adds the scores as
    integers, in units of 2^-31 of the largest |score| or finer (for n up to 2^31). The order of the sum therefore does
    not matter, and every device finds the same result.

    Args:
        scores: fp32 [b, Hk, n].
        assignment: int32 [b, Hk, n], the cluster of each token as `assign_prototypes` returns it; -1 for none.
        num_clusters: C, the number of clusters.
        reduce: "mean" or "sum".

    Returns:
        fp32 [b, Hk, C].

    Raises:
        TypeError: A tensor argument is not a tensor, or an option has the wrong type.
        ValueError: An argument has the wrong shape, dtype, device, layout or value.

    Source: ProtoKV, Algorithm 1, line 22 (mean), Eq. 11 (sum).
    """
    code = check_code("cluster_mean", "reduce", reduce, REDUCTIONS, "mean")
    return _cluster_mean(scores, assignment, num_clusters, code)


@_fake("cluster_mean")
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
    """Compute priorities that make `select_topk` keep whole clusters within a budget of k tokens.

    Clusters are taken by descending score (ties: the lower id first; NaN last). Tokens of clusters that fit into the
    budget entirely get +inf. In the one cluster that straddles the budget each token gets its own score, and scores
    that are not finite rank last. Tokens of all other clusters get -inf, and tokens in no cluster (assignment -1) get
    NaN. The run time grows with C squared, which is noticeable from tens of thousands of clusters on.

    Args:
        scores: fp32 [b, Hk, n], the score of each token.
        assignment: int32 [b, Hk, n], the cluster of each token, as in `cluster_mean`.
        cluster_scores: fp32 [b, Hk, C], the score of each cluster.
        k: Tokens to keep.
        budgets: int32 [b, Hk], the k of each row and head, at most `k`.
        whole: Give -inf to the straddling cluster too, so that no cluster is cut.

    Returns:
        (priority, kept): priority fp32 [b, Hk, n]; kept int32 [b, Hk], the number of tokens to keep from clusters. It
        is min(k, tokens in clusters), or with `whole` the number of tokens in the clusters that fit.

    Raises:
        TypeError: A tensor argument is not a tensor, or an option has the wrong type.
        ValueError: An argument has the wrong shape, dtype, device, layout or value.

    Source: ProtoKV, Eq. 2 and Algorithm 1, line 24.
    """
    return _cluster_priority(scores, assignment, cluster_scores, k, budgets, whole)


@_fake("cluster_priority")
def _(scores, assignment, cluster_scores, k, budgets=None, whole=False):
    check_one_device("cluster_priority", scores, assignment=assignment, cluster_scores=cluster_scores, budgets=budgets)
    check_dims("cluster_priority", _SCORES, scores=scores)
    return scores.new_empty(scores.shape), scores.new_empty(scores.shape[:2], dtype=torch.int32)


_overloads = [getattr(getattr(_ops, op), x) for op in __all__ for x in getattr(_ops, op).overloads()]
_inference_only = register(_overloads)  # the registration lasts as long as this object


# With a CUDA build of torch but without CUDA kernels, say why they are missing; torch's own error would list backends.


def _refuse_cuda(why: str) -> torch.library.Library:
    library = torch.library.Library(_lib.NAMESPACE, "IMPL")
    for op in __all__:

        def refuse(*args, op=op, **kwargs):
            raise NotImplementedError(f"{op}: got CUDA tensors, but kvops has no CUDA kernels here: {why}")

        for name in getattr(_ops, op).overloads():
            library.impl(op if name == "default" else f"{op}.{name}", refuse, "CUDA")
    return library


if torch.version.cuda and (_why := _lib.build_info()["cuda"]["why"]):
    _without_cuda = _refuse_cuda(_why)  # the registration lasts as long as this object
