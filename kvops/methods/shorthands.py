"""The policies as functions: `kvops.keydiff_compress(k, v, budget)` is `kvops.KeyDiff(budget).compress(k, v)`.

Settings are those of the policy, in its order. All else is what its `compress` takes: see `Spans`, `LayerSpans` and
`QueryCall`. Each function has a twin that works in place, `keydiff_compress_`, without `out`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

from torch import Tensor
from typing_extensions import Unpack

from ..rope import Rope
from .base import IN_PLACE, Compressed, LayerSpans, Out, Spans
from .baselines import L2, Random, StreamingLLM
from .budgets import Budget
from .h2o import H2O, TOVA
from .keydiff import KeyDiff
from .lacache import LaCache
from .lagkv import LagKV, check_lag_ratio
from .laq import LAQ
from .protokv import SATKV, ProtoKV
from .queries import QueryCall, window_rows
from .snapkv import ChunkKV, PyramidKV, SnapKV

__all__ = [
    "chunkkv_compress",
    "chunkkv_compress_",
    "h2o_compress",
    "h2o_compress_",
    "keydiff_compress",
    "keydiff_compress_",
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
    "satkv_compress",
    "satkv_compress_",
    "snapkv_compress",
    "snapkv_compress_",
    "streamingllm_compress",
    "streamingllm_compress_",
    "tova_compress",
    "tova_compress_",
]

P = ParamSpec("P")


def in_place(compress: Callable[P, Compressed]) -> Callable[P, Compressed]:
    """The form of a compress function that moves the kept slots to the front of k and v, without `out`."""
    name = compress.__name__

    def compress_(*args: P.args, **options: P.kwargs) -> Compressed:
        if "out" in options:
            raise TypeError(f"{name}_() got an unexpected keyword argument 'out'")
        return compress(*args, **{**options, "out": IN_PLACE})

    functools.update_wrapper(compress_, compress)
    signature = inspect.signature(compress)
    parameters = [x for x in signature.parameters.values() if x.name != "out"]
    compress_.__dict__.update(__signature__=signature.replace(parameters=parameters))
    del compress_.__dict__["__wrapped__"]
    compress_.__name__ = compress_.__qualname__ = name + "_"
    compress_.__doc__ = (
        f"`{name}` in place: the kept slots move to the front of k and v; returns views of the first m slots."
    )
    return compress_


def lagkv_compress(
    k: Tensor,
    v: Tensor,
    L: int = 1024,
    r: float = 0.5,
    *,
    sinks: int = 16,
    v_weight: float = 1.0,
    reference: str = "lag",
    score: str = "std",
    head_mode: str = "per_head",
    **call: Unpack[LayerSpans],
) -> Compressed:
    """LagKV in one call: `kvops.LagKV` with lag L and ratio r.

    k: [b, Hk, n, d], v: [b, Hk, n, dv] -> (k, v, indices) with m slots, by Eq. 10: sinks + int(r * L) * ((n - sinks) //
    L - 1) + L + (n - sinks) % L for n >= sinks + 2 L, else n. In a padded batch m is the longest that any length <= n
    gives.
    """
    check_lag_ratio("LagKV", L, r, names=("L", "r"))
    policy = LagKV(L, r, sinks=sinks, v_weight=v_weight, reference=reference, score=score, head_mode=head_mode)
    return policy.compress(k, v, **call)


def keydiff_compress(
    k: Tensor,
    v: Tensor,
    budget: Budget,
    *,
    sinks: int = 0,
    recent: int | float = 0,
    normalize_anchor: bool = True,
    metric: str = "cosine",
    anchor: str = "mean",
    head_mode: str = "per_head",
    **call: Unpack[Spans],
) -> Compressed:
    """KeyDiff in one call: `kvops.KeyDiff`.

    k: [b, Hk, n, d], v: [b, Hk, n, dv] -> (k, v, indices) with min(budget, n) slots.
    """
    options: dict[str, Any] = dict(normalize_anchor=normalize_anchor, metric=metric, anchor=anchor, head_mode=head_mode)
    return KeyDiff(budget, sinks=sinks, recent=recent, **options).compress(k, v, **call)


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
    pattern: str = "paper",
    task: str = "modeling",
    rope: Rope | None = None,
    out: Out = None,
) -> Compressed:
    """LaCache in one call, of one layer of a model: `kvops.LaCache`. k: [b, Hk, n, d], v: [b, Hk, n, dv]."""
    policy = LaCache(budget, span=span, overlap=overlap, sinks=sinks, pattern=pattern, task=task)
    return policy.compress(k, v, layer=layer, num_layers=num_layers, rope=rope, out=out)


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
    sinks: int = 0,
    head_mode: str = "per_head",
    **call: Unpack[QueryCall],
) -> Compressed:
    """SnapKV in one call: `kvops.SnapKV`, whose window is as long as q_window has rows.

    k: [b, Hk, n, d], v: [b, Hk, n, dv], q_window: [b, Hq, w, d], the queries of the last w (valid) tokens of each row
    -> (k, v, indices) with min(budget, n) slots. 32 rows are usual.
    """
    settings: dict[str, Any] = dict(kernel_size=kernel_size, pooling=pooling, pool_first=pool_first, score=score)
    settings |= dict(group_reduce=group_reduce, sinks=sinks, head_mode=head_mode)
    return SnapKV(budget, window_rows(q_window), **settings).compress(k, v, q_window, **call)


def pyramidkv_compress(
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
    sinks: int = 0,
    head_mode: str = "per_head",
    **call: Unpack[QueryCall],
) -> Compressed:
    """PyramidKV in one call: `kvops.PyramidKV`, of `layer` of `num_layers`. All else as in `snapkv_compress`."""
    settings: dict[str, Any] = dict(kernel_size=kernel_size, pooling=pooling, pool_first=pool_first, score=score)
    settings |= dict(group_reduce=group_reduce, sinks=sinks, head_mode=head_mode)
    policy = PyramidKV(budget, window_rows(q_window), **settings)
    return policy.compress(k, v, q_window, **call)


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
    sinks: int = 0,
    **call: Unpack[QueryCall],
) -> Compressed:
    """ChunkKV in one call: `kvops.ChunkKV`. All else as in `snapkv_compress`."""
    settings: dict[str, Any] = dict(kernel_size=kernel_size, pooling=pooling, pool_first=pool_first, score=score)
    settings |= dict(chunk=chunk, group_reduce=group_reduce, sinks=sinks)
    return ChunkKV(budget, window_rows(q_window), **settings).compress(k, v, q_window, **call)


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
    pooling: str = "max",
    pool_first: bool = False,
    score: str = "softmax",
    group_reduce: str = "mean",
    sinks: int = 0,
    head_mode: str = "per_head",
    **call: Unpack[QueryCall],
) -> Compressed:
    """LAQ's second stage in one call: `kvops.LAQ.compress`, which says what the queries are.

    Without q_window it is LAQ, with it LAQ++. All else as in `snapkv_compress`.
    """
    settings: dict[str, Any] = dict(kernel_size=kernel_size, pooling=pooling, pool_first=pool_first, score=score)
    settings |= dict(group_reduce=group_reduce, sinks=sinks, head_mode=head_mode, compat_mask=compat_mask)
    policy = LAQ(budget, 0 if q_window is None else window_rows(q_window), **settings)
    return policy.compress(k, v, q_lookahead, q_window=q_window, lookahead_lengths=lookahead_lengths, **call)


def protokv_compress(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: Budget,
    *,
    kappa: int = 5,
    num_sats: int = 32,
    num_chunks: int = 496,
    projection: Tensor | None = None,
    phase: Tensor | None = None,
    seed: int = 0,
    hash_bits: int = 2,
    clusters: str = "prototypes",
    score: str = "dot",
    cluster_reduce: str = "mean",
    whole_clusters: bool = False,
    group_reduce: str = "mean",
    sinks: int = 0,
    head_mode: str = "per_head",
    **call: Unpack[QueryCall],
) -> Compressed:
    """ProtoKV in one call: `kvops.ProtoKV`. 8 rows of queries are usual for budgets of at most 128 tokens, else 32.

    lse and sink_logits are for score="softmax". All else as in `snapkv_compress`.
    """
    settings: dict[str, Any] = dict(
        kappa=kappa, num_sats=num_sats, num_chunks=num_chunks, projection=projection, phase=phase
    )
    settings |= dict(seed=seed, hash_bits=hash_bits, clusters=clusters, score=score, cluster_reduce=cluster_reduce)
    settings |= dict(whole_clusters=whole_clusters, group_reduce=group_reduce, sinks=sinks, head_mode=head_mode)
    return ProtoKV(budget, window_rows(q_window), **settings).compress(k, v, q_window, **call)


def satkv_compress(
    k: Tensor,
    v: Tensor,
    budget: Budget,
    window: int = 32,
    *,
    kappa: int = 5,
    sinks: int = 0,
    head_mode: str = "per_head",
    **call: Unpack[Spans],
) -> Compressed:
    """SATKV in one call: `kvops.SATKV`. k: [b, Hk, n, d], v: [b, Hk, n, dv] -> min(budget, n) slots."""
    return SATKV(budget, window, kappa=kappa, sinks=sinks, head_mode=head_mode).compress(k, v, **call)


def h2o_compress(
    k: Tensor,
    v: Tensor,
    q: Tensor,
    budget: Budget,
    *,
    recent: int | float = 0.5,
    group_reduce: str = "mean",
    sinks: int = 0,
    head_mode: str = "per_head",
    **call: Unpack[QueryCall],
) -> Compressed:
    """H2O in one call: `kvops.H2O`. q: [b, Hq, t, d], the queries of the last t slots; t = n, the whole prompt, is H2O.

    lse: fp32 [b, Hq, t]: K is then read once per block of 256 rows, not twice. All else as in `snapkv_compress`.
    """
    policy = H2O(budget, recent=recent, group_reduce=group_reduce, sinks=sinks, head_mode=head_mode)
    return policy.compress(k, v, q, **call)


def tova_compress(
    k: Tensor, v: Tensor, q_last: Tensor, budget: Budget, *, sinks: int = 0, **call: Unpack[QueryCall]
) -> Compressed:
    """TOVA in one call: `kvops.TOVA`. q_last: [b, Hq, 1, d], the query of each row's last (valid) token."""
    return TOVA(budget, sinks=sinks).compress(k, v, q_last, **call)


def streamingllm_compress(
    k: Tensor, v: Tensor, budget: int | float, *, sinks: int = 4, **call: Unpack[Spans]
) -> Compressed:
    """StreamingLLM in one call: `kvops.StreamingLLM`. Keys are only moved."""
    return StreamingLLM(budget, sinks=sinks).compress(k, v, **call)


def l2_compress(
    k: Tensor,
    v: Tensor,
    budget: Budget,
    *,
    sinks: int = 0,
    recent: int | float = 0,
    skip_layers: tuple[int, ...] = (0, 1),
    head_mode: str = "per_head",
    **call: Unpack[LayerSpans],
) -> Compressed:
    """The keys of the lowest L2 norm in one call: `kvops.L2`. `layer` and `num_layers` say whether this one is skipped.

    k: [b, Hk, n, d], v: [b, Hk, n, dv] -> (k, v, indices) with min(budget, n) slots.
    """
    policy = L2(budget, sinks=sinks, recent=recent, skip_layers=skip_layers, head_mode=head_mode)
    return policy.compress(k, v, **call)


def random_compress(k: Tensor, v: Tensor, budget: Budget, *, seed: int = 0, **call: Unpack[Spans]) -> Compressed:
    """A random `budget` of the tokens, per head, in one call: `kvops.Random`."""
    return Random(budget, seed=seed).compress(k, v, **call)


lagkv_compress_ = in_place(lagkv_compress)
keydiff_compress_ = in_place(keydiff_compress)
lacache_compress_ = in_place(lacache_compress)
snapkv_compress_ = in_place(snapkv_compress)
pyramidkv_compress_ = in_place(pyramidkv_compress)
chunkkv_compress_ = in_place(chunkkv_compress)
laq_compress_ = in_place(laq_compress)
protokv_compress_ = in_place(protokv_compress)
satkv_compress_ = in_place(satkv_compress)
h2o_compress_ = in_place(h2o_compress)
tova_compress_ = in_place(tova_compress)
streamingllm_compress_ = in_place(streamingllm_compress)
l2_compress_ = in_place(l2_compress)
random_compress_ = in_place(random_compress)
