"""The policies as functions: `kvops.keydiff_compress(k, v, budget)` is `kvops.KeyDiff(budget).compress(k, v)`.

Each function takes the settings of its policy, in the same order, and the options of the policy's `compress` (`Spans`,
`LayerSpans`, `QueryCall`). Each function has an in-place twin without `out`, such as `keydiff_compress_`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

from torch import Tensor
from typing_extensions import Unpack

from ..ladder import Compaction, Pattern
from ..ops import Reduce, Score
from ..rope import Rope
from ..window import Pool
from .base import IN_PLACE, Compressed, HeadMode, LayerSpans, Out, Spans
from .baselines import L2, Random, StreamingLLM
from .budgets import Budget
from .calling import Layout, one_shot
from .criticalkv import CriticalKV
from .defensivekv import DefensiveKV
from .expected_attention import ExpectedAttention
from .h2o import H2O, TOVA
from .keydiff import Anchor, KeyDiff, Metric
from .kvzip import KVzip, RepeatCall
from .lacache import LaCache, Task
from .lagkv import LagKV, Norm, Reference, check_lag_ratio
from .laq import LAQ
from .protokv import SATKV, ClusterReduce, Clusters, ProtoKV
from .queries import QueryCall, window_rows
from .rkv import RKV
from .snapkv import ChunkKV, PyramidKV, SnapKV
from .statistics import QueryStatistics
from .triattention import TriAttention

__all__ = [
    "chunkkv_compress",
    "chunkkv_compress_",
    "defensivekv_compress",
    "defensivekv_compress_",
    "expectedattention_compress",
    "expectedattention_compress_",
    "criticalkv_compress",
    "criticalkv_compress_",
    "h2o_compress",
    "h2o_compress_",
    "keydiff_compress",
    "keydiff_compress_",
    "kvzip_compress",
    "kvzip_compress_",
    "l2_compress",
    "l2_compress_",
    "lacache_compress",
    "lacache_compress_",
    "lagkv_compress",
    "lagkv_compress_",
    "laq_compress",
    "laq_compress_",
    "protokv_compress",
    "protokv_compress_",
    "pyramidkv_compress",
    "pyramidkv_compress_",
    "random_compress",
    "random_compress_",
    "rkv_compress",
    "rkv_compress_",
    "satkv_compress",
    "satkv_compress_",
    "snapkv_compress",
    "snapkv_compress_",
    "streamingllm_compress",
    "streamingllm_compress_",
    "tova_compress",
    "tova_compress_",
    "triattention_compress",
    "triattention_compress_",
]

P = ParamSpec("P")


def in_place(compress: Callable[P, Compressed]) -> Callable[P, Compressed]:
    """Makes the in-place form of a compress function: it moves the kept slots to the front of k and v."""
    name = compress.__name__
    plain: Callable[..., Compressed] = compress.__wrapped__  # type: ignore[attr-defined]  # one_shot's

    def compress_(*args: P.args, **options: P.kwargs) -> Compressed:
        if "out" in options:
            raise TypeError(f"{name}_() got an unexpected keyword argument 'out'")
        return plain(*args, **{**options, "out": IN_PLACE})

    functools.update_wrapper(compress_, compress)
    signature = inspect.signature(compress)
    parameters = [x for x in signature.parameters.values() if x.name != "out"]
    compress_.__dict__.update(__signature__=signature.replace(parameters=parameters))
    del compress_.__dict__["__wrapped__"]
    compress_.__name__ = compress_.__qualname__ = name + "_"
    compress_.__doc__ = (
        f"`{name}` in place: moves the kept slots to the front of k and v, and returns views of them.\n\n"
        f"Takes the arguments of `{name}` except `out`."
    )
    return one_shot(compress_)


@one_shot
def lagkv_compress(
    k: Tensor,
    v: Tensor,
    L: int = 1024,
    r: float = 0.5,
    *,
    sinks: int = 16,
    v_weight: float = 1.0,
    reference: Reference = "lag",
    score: Norm = "std",
    head_mode: HeadMode = "per_head",
    **call: Unpack[LayerSpans],
) -> Compressed:
    """Evict by LagKV: keep the tokens of each partition that stand out most against the range of the next.

    Equals `kvops.LagKV(L, r, ...).compress(k, v)`.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], laid out like k. Swapped K and V cannot be detected.
        L: Tokens per partition (lag).
        r: The fraction of each partition to keep, in [0, 1] (ratio).
        sinks: See `kvops.LagKV`.
        v_weight: See `kvops.LagKV`.
        reference: See `kvops.LagKV`.
        score: See `kvops.LagKV`.
        head_mode: See `kvops.LagKV`.
        **call: starts, lengths, fill_invalid, out, block_table, layout, layer, num_layers; see `Spans` and
            `LayerSpans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`. By Eq. 10 their number is sinks + floor(r * L) ((n - sinks)
        // L - 1) + L + (n - sinks) % L for n >= sinks + 2 L, else n. In a padded batch the width is the largest of any
        length <= n.

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: LagKV, Liang et al., 2025, Sec. 2.2, Eq. 5-10.
    """
    check_lag_ratio("LagKV", L, r, names=("L", "r"))
    policy = LagKV(L, r, sinks=sinks, v_weight=v_weight, reference=reference, score=score, head_mode=head_mode)
    return policy.compress(k, v, **call)


@one_shot
def keydiff_compress(
    k: Tensor,
    v: Tensor,
    budget: Budget,
    *,
    sinks: int = 0,
    recent: int | float = 0,
    normalize_anchor: bool = True,
    metric: Metric = "cosine",
    anchor: Anchor = "mean",
    head_mode: HeadMode = "per_head",
    merge: bool = False,
    **call: Unpack[Spans],
) -> Compressed:
    """Evict by KeyDiff: keep the keys that are least similar to the mean key.

    Equals `kvops.KeyDiff(budget, ...).compress(k, v)`.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], laid out like k. Swapped K and V cannot be detected.
        budget: Tokens to keep per head (int), or a fraction in (0, 1] of the valid tokens (float), or int32 [b, Hk],
            the tokens of each head.
        sinks: See `kvops.KeyDiff`.
        recent: See `kvops.KeyDiff`.
        normalize_anchor: See `kvops.KeyDiff`.
        metric: See `kvops.KeyDiff`.
        anchor: See `kvops.KeyDiff`.
        head_mode: See `kvops.KeyDiff`.
        merge: See `kvops.KeyDiff`.
        **call: starts, lengths, fill_invalid, out, block_table, layout; see `Spans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`. k and v are [b, Hk, m, d] and [b, Hk, m, dv] with m =
        min(budget, n).

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: KeyDiff, Park et al., 2025, Sec. 3.2, Eq. 8.
    """
    options: dict[str, Any] = dict(sinks=sinks, recent=recent, metric=metric, anchor=anchor, head_mode=head_mode)
    return KeyDiff(budget, normalize_anchor=normalize_anchor, merge=merge, **options).compress(k, v, **call)


@one_shot
def lacache_compress(
    k: Tensor,
    v: Tensor,
    budget: int | float,
    *,
    layer: int,
    num_layers: int,
    span: int | None = None,
    overlap: int | None = None,
    sinks: int | None = None,
    pattern: Pattern = "paper",
    compaction: Compaction = "ladder",
    task: Task = "modeling",
    rope: Rope | None = None,
    out: Out = None,
    layout: Layout | None = None,
) -> Compressed:
    """Evict one layer by LaCache: keep the layer's part of a ladder of tokens.

    Equals `kvops.LaCache(budget, ...).compress(k, v, layer=layer, num_layers=num_layers)`.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], laid out like k. Swapped K and V cannot be detected.
        budget: Tokens to keep per layer (int), or a fraction in (0, 1] of the tokens (float).
        layer: The index of the layer in the model.
        num_layers: The number of layers of the model.
        span: See `kvops.LaCache`.
        overlap: See `kvops.LaCache`.
        sinks: See `kvops.LaCache`.
        pattern: See `kvops.LaCache`.
        compaction: See `kvops.LaCache`.
        task: See `kvops.LaCache`.
        rope: The rotary embedding, if keys were rotated at their slots; None moves the keys as they are.
        out: (k_out, v_out) of the result's shapes to write to.
        layout: "bhnd" (default) or "bnhd"; see `Spans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`. Their number is len(kvops.lacache_plan(n, ...)).

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: LaCache, Shi et al., 2025, Sec. 3.2, 3.3.
    """
    settings: dict[str, Any] = dict(sinks=sinks, pattern=pattern, compaction=compaction, task=task)
    policy = LaCache(budget=budget, span=span, overlap=overlap, **settings)
    call: dict[str, Any] = {"layout": layout}
    return policy.compress(k, v, layer=layer, num_layers=num_layers, rope=rope, out=out, **call)


@one_shot
def snapkv_compress(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: Budget,
    *,
    kernel_size: int = 7,
    pooling: Pool = "max",
    pool_first: bool = False,
    score: Score = "softmax",
    group_reduce: Reduce = "mean",
    sinks: int = 0,
    head_mode: HeadMode = "per_head",
    **call: Unpack[QueryCall],
) -> Compressed:
    """Evict by SnapKV: keep the tokens to which the prompt's last queries attend.

    Equals `kvops.SnapKV(budget, w, ...).compress(k, v, q_window)`, where w is the number of rows of q_window.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], laid out like k. Swapped K and V cannot be detected.
        q_window: [b, Hq, w, d], the queries of the last w (valid) tokens of each row; 32 rows are usual.
        budget: Tokens to keep per head (int), or a fraction in (0, 1] of the valid tokens (float), or int32 [b, Hk],
            the tokens of each head.
        kernel_size: See `kvops.SnapKV`.
        pooling: See `kvops.SnapKV`.
        pool_first: See `kvops.SnapKV`.
        score: See `kvops.SnapKV`.
        group_reduce: See `kvops.SnapKV`.
        sinks: See `kvops.SnapKV`.
        head_mode: See `kvops.SnapKV`.
        **call: lse, scale, softcap, sink_logits, starts, lengths, fill_invalid, out, block_table, layout, layer,
            num_layers; see `QueryCall`, `LayerSpans` and `Spans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`. k and v are [b, Hk, m, d] and [b, Hk, m, dv] with m =
        min(budget, n).

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: SnapKV, Li et al., 2024.
    """
    settings: dict[str, Any] = dict(kernel_size=kernel_size, pooling=pooling, pool_first=pool_first, score=score)
    settings |= dict(group_reduce=group_reduce, sinks=sinks, head_mode=head_mode)
    return SnapKV(budget=budget, window=window_rows(q_window), **settings).compress(k, v, q_window, **call)


@one_shot
def criticalkv_compress(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: Budget,
    *,
    w_o: Tensor | Sequence[Tensor] | None = None,
    first_stage_ratio: float = 0.5,
    epsilon: float = 1e-4,
    kernel_size: int = 7,
    pooling: Pool = "max",
    pool_first: bool = False,
    score: Score = "softmax",
    group_reduce: Reduce = "mean",
    sinks: int = 0,
    head_mode: HeadMode = "per_head",
    **call: Unpack[QueryCall],
) -> Compressed:
    """Evict by CriticalKV: keep tokens by attention, then by attention times the norm of the projected value.

    Equals `kvops.CriticalKV(budget, w, ...).compress(k, v, q_window)`, where w is the number of rows of q_window.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], laid out like k. Swapped K and V cannot be detected.
        q_window: [b, Hq, w, d], the queries of the last w (valid) tokens of each row; 32 rows are usual.
        budget: Tokens to keep per head (int), or a fraction in (0, 1] of the valid tokens (float), or int32 [b, Hk],
            the tokens of each head.
        w_o: [hidden, Hq * dv], the weights of the output projection. Required; see `kvops.CriticalKV`.
        first_stage_ratio: See `kvops.CriticalKV`.
        epsilon: See `kvops.CriticalKV`.
        kernel_size: See `kvops.CriticalKV`.
        pooling: See `kvops.CriticalKV`.
        pool_first: See `kvops.CriticalKV`.
        score: See `kvops.CriticalKV`.
        group_reduce: See `kvops.CriticalKV`.
        sinks: See `kvops.CriticalKV`.
        head_mode: See `kvops.CriticalKV`.
        **call: lse, scale, softcap, sink_logits, starts, lengths, fill_invalid, out, block_table, layout, layer,
            num_layers; see `QueryCall`, `LayerSpans` and `Spans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`. k and v are [b, Hk, m, d] and [b, Hk, m, dv] with m =
        min(budget, n).

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: CriticalKV, Feng et al., 2025.
    """
    settings: dict[str, Any] = dict(kernel_size=kernel_size, pooling=pooling, pool_first=pool_first, score=score)
    settings |= dict(group_reduce=group_reduce, sinks=sinks, head_mode=head_mode)
    settings |= dict(w_o=w_o, first_stage_ratio=first_stage_ratio, epsilon=epsilon)
    return CriticalKV(budget=budget, window=window_rows(q_window), **settings).compress(k, v, q_window, **call)


@one_shot
def rkv_compress(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: Budget,
    *,
    mix: float = 0.1,
    threshold: float = 0.5,
    kernel_size: int = 7,
    group_reduce: Reduce = "max",
    sinks: int = 0,
    head_mode: HeadMode = "per_head",
    **call: Unpack[QueryCall],
) -> Compressed:
    """Evict by R-KV: keep the tokens to which the last queries attend and whose keys are unlike the others.

    Equals `kvops.RKV(budget, w, ...).compress(k, v, q_window)`, where w is the number of rows of q_window.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], laid out like k. Swapped K and V cannot be detected.
        q_window: [b, Hq, w, d], the queries of the last w (valid) tokens of each row; 8 rows are usual.
        budget: Tokens to keep per head (int), or a fraction in (0, 1] of the valid tokens (float), or int32 [b, Hk],
            the tokens of each head.
        mix: See `kvops.RKV`.
        threshold: See `kvops.RKV`.
        kernel_size: See `kvops.RKV`.
        group_reduce: See `kvops.RKV`.
        sinks: See `kvops.RKV`.
        head_mode: See `kvops.RKV`.
        **call: lse, scale, softcap, sink_logits, starts, lengths, fill_invalid, out, block_table, layout, layer,
            num_layers; see `QueryCall`, `LayerSpans` and `Spans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`. k and v are [b, Hk, m, d] and [b, Hk, m, dv] with m =
        min(budget, n).

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: R-KV, Cai et al., 2025.
    """
    settings: dict[str, Any] = dict(mix=mix, threshold=threshold, kernel_size=kernel_size)
    settings |= dict(group_reduce=group_reduce, sinks=sinks, head_mode=head_mode)
    return RKV(budget=budget, window=window_rows(q_window), **settings).compress(k, v, q_window, **call)


@one_shot
def pyramidkv_compress(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: Budget,
    *,
    kernel_size: int = 7,
    pooling: Pool = "max",
    pool_first: bool = False,
    score: Score = "softmax",
    group_reduce: Reduce = "mean",
    sinks: int = 0,
    head_mode: HeadMode = "per_head",
    **call: Unpack[QueryCall],
) -> Compressed:
    """Evict one layer by PyramidKV: SnapKV with more of the budget in early layers.

    Equals `kvops.PyramidKV(budget, w, ...).compress(k, v, q_window, layer=..., num_layers=...)`. `layer` and
    `num_layers` must be given.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], laid out like k. Swapped K and V cannot be detected.
        q_window: [b, Hq, w, d], the queries of the last w (valid) tokens of each row; 32 rows are usual.
        budget: Tokens to keep per head (int), or a fraction in (0, 1] of the valid tokens (float): the mean over the
            layers.
        kernel_size: See `kvops.PyramidKV`.
        pooling: See `kvops.PyramidKV`.
        pool_first: See `kvops.PyramidKV`.
        score: See `kvops.PyramidKV`.
        group_reduce: See `kvops.PyramidKV`.
        sinks: See `kvops.PyramidKV`.
        head_mode: See `kvops.PyramidKV`.
        **call: lse, scale, softcap, sink_logits, starts, lengths, fill_invalid, out, block_table, layout, layer,
            num_layers; see `QueryCall`, `LayerSpans` and `Spans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`. Their number is the budget that `kvops.pyramidkv_budgets`
        gives this layer.

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: PyramidKV, Cai et al., 2024.
    """
    settings: dict[str, Any] = dict(kernel_size=kernel_size, pooling=pooling, pool_first=pool_first, score=score)
    settings |= dict(group_reduce=group_reduce, sinks=sinks, head_mode=head_mode)
    policy = PyramidKV(budget=budget, window=window_rows(q_window), **settings)
    return policy.compress(k, v, q_window, **call)


@one_shot
def defensivekv_compress(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: Budget,
    *,
    kernel_size: int = 5,
    pooling: Pool = "max",
    pool_first: bool = False,
    score: Score = "softmax",
    group_reduce: Reduce = "max",
    prior: float = 1.0,
    sinks: int = 0,
    head_mode: HeadMode = "per_head",
    **call: Unpack[QueryCall],
) -> Compressed:
    """Evict by DefensiveKV: keep the tokens to which at least one of the prompt's last queries attends.

    Equals `kvops.DefensiveKV(budget, w, ...).compress(k, v, q_window)`, where w is the number of rows of q_window.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], laid out like k. Swapped K and V cannot be detected.
        q_window: [b, Hq, w, d], the queries of the last w (valid) tokens of each row; 32 rows are usual.
        budget: Tokens to keep per head (int), or a fraction in (0, 1] of the valid tokens (float), or int32 [b, Hk],
            the tokens of each head.
        kernel_size: See `kvops.DefensiveKV`.
        pooling: See `kvops.DefensiveKV`.
        pool_first: See `kvops.DefensiveKV`.
        score: See `kvops.DefensiveKV`.
        group_reduce: See `kvops.DefensiveKV`.
        prior: See `kvops.DefensiveKV`.
        sinks: See `kvops.DefensiveKV`.
        head_mode: See `kvops.DefensiveKV`.
        **call: lse, scale, softcap, sink_logits, starts, lengths, fill_invalid, out, block_table, layout, layer,
            num_layers; see `QueryCall`, `LayerSpans` and `Spans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`. k and v are [b, Hk, m, d] and [b, Hk, m, dv] with m =
        min(budget, n).

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: DefensiveKV, Feng et al., 2025.
    """
    settings: dict[str, Any] = dict(kernel_size=kernel_size, pooling=pooling, pool_first=pool_first, score=score)
    settings |= dict(group_reduce=group_reduce, prior=prior, sinks=sinks, head_mode=head_mode)
    return DefensiveKV(budget=budget, window=window_rows(q_window), **settings).compress(k, v, q_window, **call)


@one_shot
def chunkkv_compress(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: Budget,
    *,
    chunk: int = 20,
    kernel_size: int = 1,
    pooling: Pool = "max",
    pool_first: bool = False,
    score: Score = "softmax",
    group_reduce: Reduce = "mean",
    sinks: int = 0,
    **call: Unpack[QueryCall],
) -> Compressed:
    """Evict by ChunkKV: keep whole chunks of tokens, by SnapKV's scores.

    Equals `kvops.ChunkKV(budget, w, ...).compress(k, v, q_window)`, where w is the number of rows of q_window.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], laid out like k. Swapped K and V cannot be detected.
        q_window: [b, Hq, w, d], the queries of the last w (valid) tokens of each row; 32 rows are usual.
        budget: Tokens to keep (int), or a fraction in (0, 1] of the valid tokens (float).
        chunk: Tokens per chunk.
        kernel_size: See `kvops.ChunkKV`.
        pooling: See `kvops.ChunkKV`.
        pool_first: See `kvops.ChunkKV`.
        score: See `kvops.ChunkKV`.
        group_reduce: See `kvops.ChunkKV`.
        sinks: See `kvops.ChunkKV`.
        **call: lse, scale, softcap, sink_logits, starts, lengths, fill_invalid, out, block_table, layout, layer,
            num_layers; see `QueryCall`, `LayerSpans` and `Spans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`. k and v are [b, Hk, m, d] and [b, Hk, m, dv] with m =
        min(budget, n).

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: ChunkKV, Liu et al., 2025.
    """
    settings: dict[str, Any] = dict(kernel_size=kernel_size, pooling=pooling, pool_first=pool_first, score=score)
    settings |= dict(chunk=chunk, group_reduce=group_reduce, sinks=sinks)
    return ChunkKV(budget=budget, window=window_rows(q_window), **settings).compress(k, v, q_window, **call)


@one_shot
def laq_compress(
    k: Tensor,
    v: Tensor,
    q_lookahead: Tensor,
    budget: Budget,
    *,
    q_window: Tensor | None = None,
    lookahead_lengths: Tensor | None = None,
    compat_mask: bool = False,
    kernel_size: int = 7,
    pooling: Pool = "max",
    pool_first: bool = False,
    score: Score = "softmax",
    group_reduce: Reduce = "mean",
    sinks: int = 0,
    head_mode: HeadMode = "per_head",
    **call: Unpack[QueryCall],
) -> Compressed:
    """Evict by the second stage of LAQ: keep the tokens to which the queries of a drafted answer attend.

    Equals `kvops.LAQ(budget, w, ...).compress(k, v, q_lookahead, q_window=q_window)`. Without q_window this is LAQ,
    with it LAQ++.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], laid out like k. Swapped K and V cannot be detected.
        q_lookahead: [b, Hq, steps, d], the queries of drafted tokens that follow the prompt.
        budget: Tokens to keep per head (int), or a fraction in (0, 1] of the valid tokens (float), or int32 [b, Hk],
            the tokens of each head.
        q_window: [b, Hq, w, d], the queries of the prompt's last w tokens, which are then kept.
        lookahead_lengths: int32 [b], how many lookahead rows count.
        compat_mask: See `kvops.LAQ`.
        kernel_size: See `kvops.LAQ`.
        pooling: See `kvops.LAQ`.
        pool_first: See `kvops.LAQ`.
        score: See `kvops.LAQ`.
        group_reduce: See `kvops.LAQ`.
        sinks: See `kvops.LAQ`.
        head_mode: See `kvops.LAQ`.
        **call: lse, scale, softcap, sink_logits, starts, lengths, fill_invalid, out, block_table, layout, layer,
            num_layers; see `QueryCall`, `LayerSpans` and `Spans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`. k and v are [b, Hk, m, d] and [b, Hk, m, dv] with m =
        min(budget, n).

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: Lookahead Q-Cache, Wang et al., 2025, Sec. 4.
    """
    settings: dict[str, Any] = dict(kernel_size=kernel_size, pooling=pooling, pool_first=pool_first, score=score)
    settings |= dict(group_reduce=group_reduce, sinks=sinks, head_mode=head_mode, compat_mask=compat_mask)
    policy = LAQ(budget=budget, window=0 if q_window is None else window_rows(q_window), **settings)
    return policy.compress(k, v, q_lookahead, q_window=q_window, lookahead_lengths=lookahead_lengths, **call)


@one_shot
def kvzip_compress(
    k: Tensor,
    v: Tensor,
    q_repeat: Tensor,
    budget: Budget,
    *,
    k_repeat: Tensor,
    passes: Sequence[int] | None = None,
    chunk: int = 2048,
    group_reduce: Reduce = "max",
    sinks: int = 4,
    head_mode: HeadMode = "per_head",
    **call: Unpack[RepeatCall],
) -> Compressed:
    """Evict by KVzip: keep the tokens to which the model attends when it repeats its prompt.

    Equals `kvops.KVzip(budget, ...).compress(k, v, q_repeat, k_repeat=k_repeat, passes=passes)`.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], laid out like k. Swapped K and V cannot be detected.
        q_repeat: [b, Hq, t, d], the queries of the passes that repeat the prompt; see `kvops.KVzip.compress`.
        budget: Tokens to keep per head (int), or a fraction in (0, 1] of the valid tokens (float), or int32 [b, Hk],
            the tokens of each head.
        k_repeat: [b, Hk, t, d], the keys of the passes.
        passes: The rows of each pass; None: one pass.
        chunk: See `kvops.KVzip`.
        group_reduce: See `kvops.KVzip`.
        sinks: See `kvops.KVzip`.
        head_mode: See `kvops.KVzip`.
        **call: scale, softcap, sink_logits, starts, lengths, fill_invalid, out, layout, layer, num_layers; see
            `Logits`, `LayerSpans` and `Spans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`. k and v are [b, Hk, m, d] and [b, Hk, m, dv] with m =
        min(budget, n).

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: KVzip, Kim et al., 2025.
    """
    policy = KVzip(budget, sinks=sinks, head_mode=head_mode, group_reduce=group_reduce, chunk=chunk)
    return policy.compress(k, v, q_repeat, k_repeat=k_repeat, passes=passes, **call)


@one_shot
def protokv_compress(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: Budget,
    *,
    kappa: int = 5,
    num_sats: int = 32,
    num_chunks: int | None = None,
    projection: Tensor | None = None,
    phase: Tensor | None = None,
    seed: int = 0,
    hash_bits: int = 2,
    clusters: Clusters = "prototypes",
    score: Score = "dot",
    cluster_reduce: ClusterReduce = "mean",
    whole_clusters: bool = False,
    group_reduce: Reduce = "mean",
    sinks: int = 0,
    head_mode: HeadMode = "per_head",
    **call: Unpack[QueryCall],
) -> Compressed:
    """Evict by ProtoKV: keep whole clusters of similar tokens, by the attention of the last queries.

    Equals `kvops.ProtoKV(budget, w, ...).compress(k, v, q_window)`, where w is the number of rows of q_window. `lse`
    and `sink_logits` are for score="softmax".

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], laid out like k. Swapped K and V cannot be detected.
        q_window: [b, Hq, w, d], the queries of the last w (valid) tokens of each row; 8 rows are usual for budgets of
            at most 128 tokens, else 32.
        budget: Tokens to keep per head (int), or a fraction in (0, 1] of the valid tokens (float), or int32 [b, Hk],
            the tokens of each head.
        kappa: See `kvops.ProtoKV`.
        num_sats: See `kvops.ProtoKV`.
        num_chunks: See `kvops.ProtoKV`.
        projection: See `kvops.ProtoKV`.
        phase: See `kvops.ProtoKV`.
        seed: See `kvops.ProtoKV`.
        hash_bits: See `kvops.ProtoKV`.
        clusters: See `kvops.ProtoKV`.
        score: See `kvops.ProtoKV`.
        cluster_reduce: See `kvops.ProtoKV`.
        whole_clusters: See `kvops.ProtoKV`.
        group_reduce: See `kvops.ProtoKV`.
        sinks: See `kvops.ProtoKV`.
        head_mode: See `kvops.ProtoKV`.
        **call: lse, scale, softcap, sink_logits, starts, lengths, fill_invalid, out, block_table, layout, layer,
            num_layers; see `QueryCall`, `LayerSpans` and `Spans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`. k and v are [b, Hk, m, d] and [b, Hk, m, dv] with m =
        min(budget, n).

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: ProtoKV, Yu et al., Sec. 4, Algorithm 1.
    """
    settings: dict[str, Any] = dict(
        kappa=kappa, num_sats=num_sats, num_chunks=num_chunks, projection=projection, phase=phase
    )
    settings |= dict(seed=seed, hash_bits=hash_bits, clusters=clusters, score=score, cluster_reduce=cluster_reduce)
    settings |= dict(whole_clusters=whole_clusters, group_reduce=group_reduce, sinks=sinks, head_mode=head_mode)
    return ProtoKV(budget=budget, window=window_rows(q_window), **settings).compress(k, v, q_window, **call)


@one_shot
def satkv_compress(
    k: Tensor,
    v: Tensor,
    budget: Budget,
    window: int = 32,
    *,
    kappa: int = 5,
    sinks: int = 0,
    head_mode: HeadMode = "per_head",
    **call: Unpack[Spans],
) -> Compressed:
    """Evict by SATKV: keep semantic anchors, the keys that are least similar to their neighbours.

    Equals `kvops.SATKV(budget, window, ...).compress(k, v)`.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], laid out like k. Swapped K and V cannot be detected.
        budget: Tokens to keep per head (int), or a fraction in (0, 1] of the valid tokens (float), or int32 [b, Hk],
            the tokens of each head.
        window: Newest tokens that are always kept.
        kappa: See `kvops.SATKV`.
        sinks: See `kvops.SATKV`.
        head_mode: See `kvops.SATKV`.
        **call: starts, lengths, fill_invalid, out, block_table, layout; see `Spans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`. k and v are [b, Hk, m, d] and [b, Hk, m, dv] with m =
        min(budget, n).

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: ProtoKV, Yu et al., Sec. 4.1, App. H.
    """
    return SATKV(budget=budget, window=window, kappa=kappa, sinks=sinks, head_mode=head_mode).compress(k, v, **call)


@one_shot
def h2o_compress(
    k: Tensor,
    v: Tensor,
    q: Tensor,
    budget: Budget,
    *,
    recent: int | float = 0.5,
    group_reduce: Reduce = "mean",
    sinks: int = 0,
    head_mode: HeadMode = "per_head",
    **call: Unpack[QueryCall],
) -> Compressed:
    """Evict by H2O: keep the tokens with the most attention from all queries, and the newest tokens.

    Equals `kvops.H2O(budget, ...).compress(k, v, q)`.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], laid out like k. Swapped K and V cannot be detected.
        q: [b, Hq, t, d], the queries of the last t slots; t = n, the whole prompt, is H2O. With `lse`, fp32 [b, Hq, t],
            the kernel reads K once per block of 256 rows instead of twice.
        budget: Tokens to keep per head (int), or a fraction in (0, 1] of the valid tokens (float), or int32 [b, Hk],
            the tokens of each head.
        recent: See `kvops.H2O`.
        group_reduce: See `kvops.H2O`.
        sinks: See `kvops.H2O`.
        head_mode: See `kvops.H2O`.
        **call: lse, scale, softcap, sink_logits, starts, lengths, fill_invalid, out, block_table, layout, layer,
            num_layers; see `QueryCall`, `LayerSpans` and `Spans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`. k and v are [b, Hk, m, d] and [b, Hk, m, dv] with m =
        min(budget, n).

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: H2O, Zhang et al., 2023.
    """
    policy = H2O(budget, recent=recent, group_reduce=group_reduce, sinks=sinks, head_mode=head_mode)
    return policy.compress(k, v, q, **call)


@one_shot
def tova_compress(
    k: Tensor, v: Tensor, q_last: Tensor, budget: Budget, *, sinks: int = 0, **call: Unpack[QueryCall]
) -> Compressed:
    """Evict by TOVA: keep the tokens to which the last query attends most.

    Equals `kvops.TOVA(budget, ...).compress(k, v, q_last)`. All heads keep the same tokens.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], laid out like k. Swapped K and V cannot be detected.
        q_last: [b, Hq, 1, d], the query of each row's last (valid) token.
        budget: Tokens to keep (int), or a fraction in (0, 1] of the valid tokens (float).
        sinks: See `kvops.TOVA`.
        **call: lse, scale, softcap, sink_logits, starts, lengths, fill_invalid, out, block_table, layout, layer,
            num_layers; see `QueryCall`, `LayerSpans` and `Spans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`. k and v are [b, Hk, m, d] and [b, Hk, m, dv] with m =
        min(budget, n).

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: TOVA, Oren et al., 2024.
    """
    return TOVA(budget, sinks=sinks).compress(k, v, q_last, **call)


@one_shot
def streamingllm_compress(
    k: Tensor, v: Tensor, budget: int | float, *, sinks: int = 4, **call: Unpack[Spans]
) -> Compressed:
    """Evict by StreamingLLM: keep the first `sinks` tokens and the newest.

    Equals `kvops.StreamingLLM(budget, sinks=sinks).compress(k, v)`. Keys are moved without rotation.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], laid out like k. Swapped K and V cannot be detected.
        budget: Tokens to keep (int), or a fraction in (0, 1] of the valid tokens (float).
        sinks: First tokens that are always kept.
        **call: starts, lengths, fill_invalid, out, block_table, layout; see `Spans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`. k and v are [b, Hk, m, d] and [b, Hk, m, dv] with m =
        min(budget, n).

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: StreamingLLM, Xiao et al., 2023.
    """
    return StreamingLLM(budget, sinks=sinks).compress(k, v, **call)


@one_shot
def l2_compress(
    k: Tensor,
    v: Tensor,
    budget: Budget,
    *,
    sinks: int = 0,
    recent: int | float = 0,
    skip_layers: tuple[int, ...] = (0, 1),
    head_mode: HeadMode = "per_head",
    merge: bool = False,
    **call: Unpack[LayerSpans],
) -> Compressed:
    """Evict by L2 norm: keep the keys with the lowest norm.

    Equals `kvops.L2(budget, ...).compress(k, v)`. With `layer` and `num_layers` given, the layers in `skip_layers` keep
    everything.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], laid out like k. Swapped K and V cannot be detected.
        budget: Tokens to keep per head (int), or a fraction in (0, 1] of the valid tokens (float), or int32 [b, Hk],
            the tokens of each head.
        sinks: See `kvops.L2`.
        recent: See `kvops.L2`.
        skip_layers: See `kvops.L2`.
        head_mode: See `kvops.L2`.
        merge: See `kvops.L2`.
        **call: starts, lengths, fill_invalid, out, block_table, layout, layer, num_layers; see `Spans` and
            `LayerSpans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`. k and v are [b, Hk, m, d] and [b, Hk, m, dv] with m =
        min(budget, n).

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: L2 norm, Devoto et al., 2024.
    """
    policy = L2(budget, sinks=sinks, recent=recent, skip_layers=skip_layers, head_mode=head_mode, merge=merge)
    return policy.compress(k, v, **call)


@one_shot
def expectedattention_compress(
    k: Tensor,
    v: Tensor,
    budget: Budget,
    *,
    statistics: QueryStatistics | str | None = None,
    sinks: int = 4,
    recent: int | float = 0,
    future: int = 512,
    covariance: bool = True,
    value_norm: bool = True,
    epsilon: float = 0.0,
    head_mode: HeadMode = "per_head",
    **call: Unpack[LayerSpans],
) -> Compressed:
    """Evict by Expected Attention: keep the tokens that future queries are expected to attend to.

    Equals `kvops.ExpectedAttention(budget, ...).compress(k, v)`.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8, after RoPE; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], laid out like k. Swapped K and V cannot be detected.
        budget: Tokens to keep per head (int), or a fraction in (0, 1] of the valid tokens (float), or int32 [b, Hk],
            the tokens of each head.
        statistics: Of the model's queries, required. See `kvops.QueryStatistics`.
        sinks: See `kvops.ExpectedAttention`.
        recent: See `kvops.ExpectedAttention`.
        future: See `kvops.ExpectedAttention`.
        covariance: See `kvops.ExpectedAttention`.
        value_norm: See `kvops.ExpectedAttention`.
        epsilon: See `kvops.ExpectedAttention`.
        head_mode: See `kvops.ExpectedAttention`.
        **call: starts, lengths, fill_invalid, out, block_table, layout, layer, num_layers; see `Spans` and
            `LayerSpans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`. k and v are [b, Hk, m, d] and [b, Hk, m, dv] with m =
        min(budget, n).

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value, or there are no statistics. Nothing
            has been written.

    Source: Expected Attention, Devoto et al., 2025.
    """
    policy = ExpectedAttention(
        budget,
        statistics=statistics,
        sinks=sinks,
        recent=recent,
        future=future,
        covariance=covariance,
        value_norm=value_norm,
        epsilon=epsilon,
        head_mode=head_mode,
    )
    return policy.compress(k, v, **call)


@one_shot
def triattention_compress(
    k: Tensor,
    v: Tensor,
    budget: Budget,
    *,
    statistics: QueryStatistics | str | None = None,
    sinks: int = 0,
    recent: int | float = 128,
    max_offset: int = 65536,
    normalize: bool = True,
    head_mode: HeadMode = "per_head",
    **call: Unpack[LayerSpans],
) -> Compressed:
    """Evict by TriAttention: keep the keys that mean queries score highest at future positions, and the newest.

    Equals `kvops.TriAttention(budget, ...).compress(k, v)`.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8, after RoPE; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], laid out like k. Swapped K and V cannot be detected.
        budget: Tokens to keep per head (int), or a fraction in (0, 1] of the valid tokens (float), or int32 [b, Hk],
            the tokens of each head.
        statistics: Of the model's queries, required. See `kvops.QueryStatistics`.
        sinks: See `kvops.TriAttention`.
        recent: See `kvops.TriAttention`.
        max_offset: See `kvops.TriAttention`.
        normalize: See `kvops.TriAttention`.
        head_mode: See `kvops.TriAttention`.
        **call: starts, lengths, fill_invalid, out, block_table, layout, layer, num_layers; see `Spans` and
            `LayerSpans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`. k and v are [b, Hk, m, d] and [b, Hk, m, dv] with m =
        min(budget, n).

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value, or there are no statistics. Nothing
            has been written.

    Source: TriAttention, Mao et al., 2026.
    """
    policy = TriAttention(
        budget,
        statistics=statistics,
        sinks=sinks,
        recent=recent,
        max_offset=max_offset,
        normalize=normalize,
        head_mode=head_mode,
    )
    return policy.compress(k, v, **call)


@one_shot
def random_compress(
    k: Tensor, v: Tensor, budget: Budget, *, seed: int = 0, largest_values: int | float = 0, **call: Unpack[Spans]
) -> Compressed:
    """Evict at random: keep random tokens, different ones in every head.

    Equals `kvops.Random(budget, seed=seed, largest_values=largest_values).compress(k, v)`.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], laid out like k. Swapped K and V cannot be detected.
        budget: Tokens to keep per head (int), or a fraction in (0, 1] of the valid tokens (float), or int32 [b, Hk],
            the tokens of each head.
        seed: The seed, at least 0.
        largest_values: See `kvops.Random`.
        **call: starts, lengths, fill_invalid, out, block_table, layout; see `Spans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`. k and v are [b, Hk, m, d] and [b, Hk, m, dv] with m =
        min(budget, n).

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.
    """
    return Random(budget, seed=seed, largest_values=largest_values).compress(k, v, **call)


lagkv_compress_ = in_place(lagkv_compress)
"""`lagkv_compress` in place: moves the kept slots to the front of k and v, and returns views of them."""
keydiff_compress_ = in_place(keydiff_compress)
"""`keydiff_compress` in place: moves the kept slots to the front of k and v, and returns views of them."""
lacache_compress_ = in_place(lacache_compress)
"""`lacache_compress` in place: moves the kept slots to the front of k and v, and returns views of them."""
snapkv_compress_ = in_place(snapkv_compress)
"""`snapkv_compress` in place: moves the kept slots to the front of k and v, and returns views of them."""
criticalkv_compress_ = in_place(criticalkv_compress)
"""`criticalkv_compress` in place: moves the kept slots to the front of k and v, and returns views of them."""
rkv_compress_ = in_place(rkv_compress)
"""`rkv_compress` in place: moves the kept slots to the front of k and v, and returns views of them."""
pyramidkv_compress_ = in_place(pyramidkv_compress)
"""`pyramidkv_compress` in place: moves the kept slots to the front of k and v, and returns views of them."""
chunkkv_compress_ = in_place(chunkkv_compress)
"""`chunkkv_compress` in place: moves the kept slots to the front of k and v, and returns views of them."""
defensivekv_compress_ = in_place(defensivekv_compress)
"""`defensivekv_compress` in place: moves the kept slots to the front of k and v, and returns views of them."""
kvzip_compress_ = in_place(kvzip_compress)
"""`kvzip_compress` in place: moves the kept slots to the front of k and v, and returns views of them."""
laq_compress_ = in_place(laq_compress)
"""`laq_compress` in place: moves the kept slots to the front of k and v, and returns views of them."""
protokv_compress_ = in_place(protokv_compress)
"""`protokv_compress` in place: moves the kept slots to the front of k and v, and returns views of them."""
satkv_compress_ = in_place(satkv_compress)
"""`satkv_compress` in place: moves the kept slots to the front of k and v, and returns views of them."""
h2o_compress_ = in_place(h2o_compress)
"""`h2o_compress` in place: moves the kept slots to the front of k and v, and returns views of them."""
tova_compress_ = in_place(tova_compress)
"""`tova_compress` in place: moves the kept slots to the front of k and v, and returns views of them."""
streamingllm_compress_ = in_place(streamingllm_compress)
"""`streamingllm_compress` in place: moves the kept slots to the front of k and v, and returns views of them."""
l2_compress_ = in_place(l2_compress)
expectedattention_compress_ = in_place(expectedattention_compress)
triattention_compress_ = in_place(triattention_compress)
"""`l2_compress` in place: moves the kept slots to the front of k and v, and returns views of them."""
random_compress_ = in_place(random_compress)
"""`random_compress` in place: moves the kept slots to the front of k and v, and returns views of them."""
