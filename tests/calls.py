"""Calls of everything that has a CUDA kernel, with inputs.

test_operators.py makes each call on every device; test_cuda.py captures, repeats and races them.

python tests/calls.py [OPERATOR ...] [--seconds N]

makes all calls, or those of the given operators, on the GPU in a few shapes and dtypes, for compute-sanitizer.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

import kvops
from kvops import LadderPlan, ops
from kvops.ops.lag import kept_length, num_segments
from kvops.ops.reference import window_logits, window_softmax

SINK = 5
RATIO = 0.3
SOFTCAP = 20.0


@dataclass
class Inputs:
    """The calls' inputs; the shapes are the same for every seed."""

    k: Tensor  # [b, Hk, n, d]
    v: Tensor  # [b, Hk, n, dv]
    anchor: Tensor  # fp32 [b, Hk, d]
    scores: Tensor  # fp32 [b, Hk, n], with ties, infinities and NaN
    segments: Tensor  # fp32 [b, Hk, S, lag], with the same special values
    indices: Tensor  # int64 [b, Hk, n // 4], ascending, including n - 1, some -1 at the end
    starts: Tensor  # int32 [b]
    lengths: Tensor  # int32 [b]
    budgets: Tensor  # int32 [b, Hk]
    q: Tensor  # [b, 4 Hk, 6, d]
    rounded: tuple[Tensor, Tensor, Tensor]  # q as bf16, k and v as int8, with zeros up to a multiple of 16 channels
    scales: tuple[Tensor, Tensor]  # of the rounded k and v
    visible: Tensor  # int32 [b, 6]; the last row sees all keys
    sink_logits: Tensor  # fp32 [4 Hk]
    key_bias: Tensor  # fp32 [b, Hk, n]
    lse: Tensor  # fp32 [b, 4 Hk, 6]
    buckets: Tensor  # int32 [b, Hk, n // 4] in [-1, 4)
    projection: Tensor  # fp32 [2, d]
    phase: Tensor  # fp32 [2]
    prototypes: Tensor  # fp32 [b, Hk, 70, d], some of them zero
    mean: Tensor  # fp32 [4 Hk, d]
    cov: Tensor  # fp32 [b, 4 Hk, d, d]
    norms: Tensor  # fp32 [b, 4 Hk, d / 2]
    w_o: Tensor  # [90, 2 Hk * dv]
    assignment: Tensor  # int32 [b, Hk, n] in [-1, 70)
    means: Tensor  # fp32 [b, Hk, 70], like `scores`
    deep: tuple[Tensor, Tensor]  # K and V of another layer
    inv_freq: Tensor  # fp32 [d // 2]
    angles: tuple[Tensor, Tensor]  # cosines and sines, fp32 [b, n, d // 2]
    out: tuple[Tensor, Tensor]  # [b, Hk, n // 4, d] and [.., dv]
    ladder_out: tuple[Tensor, Tensor]  # for the slots that the ladder keeps
    lagkv_out: tuple[Tensor, Tensor]  # for the slots that LagKV keeps

    def __post_init__(self):
        self.plan = ladder_plan(self.n)

    @property
    def int8(self) -> dict[str, Tensor]:
        return dict(zip(("q", "k", "v", "k_scale", "v_scale"), (*self.rounded, *self.scales)))

    @property
    def int8_keys(self) -> dict[str, Tensor]:
        return {name: x for name, x in self.int8.items() if name not in ("v", "v_scale")}

    @property
    def n(self) -> int:
        return self.k.shape[2]

    @property
    def keep(self) -> int:
        return self.n // 4

    @property
    def lag(self) -> int:
        return self.n // 12

    def map(self, f: Callable[[Tensor], Tensor]) -> Inputs:
        """Return the inputs with f applied to every tensor."""
        values = [getattr(self, field.name) for field in fields(self)]
        return Inputs(*(tuple(map(f, x)) if isinstance(x, tuple) else f(x) for x in values))

    def copy_(self, other: Inputs) -> None:
        """Copy the values of the other's tensors."""
        for mine, theirs in zip(self.tensors(), other.tensors()):
            mine.copy_(theirs)

    def tensors(self) -> list[Tensor]:
        found = []
        self.map(lambda x: found.append(x) or x)
        return found


def ladder_plan(n: int) -> LadderPlan:
    return kvops.lacache_plan(n, num_layers=8, budget=n // 2)


def inputs(seed: int, b=2, heads=3, n=3000, d=64, dv=80, dtype=torch.float32) -> Inputs:
    """Return random inputs on the CPU; output tensors are filled with NaN."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(b, heads, *shape, generator=generator, device="cpu")

    def scores(*shape: int) -> Tensor:
        x = randn(*shape).round(decimals=2)
        x[torch.rand(x.shape, generator=generator, device="cpu") < 0.01] = -torch.inf
        x[torch.rand(x.shape, generator=generator, device="cpu") < 0.01] = torch.nan
        return x

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32, device="cpu")

    keep, lag = n // 4, n // 12
    indices = randn(n).argsort(-1)[..., :keep].sort(-1).values
    indices[..., keep - 3 :] = torch.tensor([n - 1, -1, -1], device="cpu")
    starts = integers(0, n // 8, b)
    rope = kvops.Rope.of(d, device="cpu")
    kept = kept_length(n, SINK, lag, int(RATIO * lag))

    def nan(tokens: int) -> tuple[Tensor, Tensor]:
        return tuple(torch.full((b, heads, tokens, x), torch.nan, dtype=dtype, device="cpu") for x in (d, dv))

    prototypes = randn(70, d)
    prototypes[:, :, ::9] = 0
    k, q = randn(n, d).to(dtype), randn(4, 6, d).flatten(1, 2).to(dtype)
    visible = integers(n // 2, n + 1, b, 6)
    visible[:, -1] = n
    _, lse = window_softmax(*window_logits(q, k, visible, None, None, SOFTCAP, torch.float32), None, None)
    v = randn(n, dv).to(dtype)
    wide_q, wide_k, wide_v = (torch.nn.functional.pad(x, (0, -x.shape[-1] % 16)) for x in (q, k, v))
    (k8, k_scale), (v8, v_scale) = kvops.quantize_rows(wide_k), kvops.quantize_rows(wide_v)
    return Inputs(
        k=k,
        v=v,
        anchor=randn(d),
        scores=scores(n),
        segments=scores(num_segments(n, SINK, lag), lag),
        indices=indices,
        starts=starts,
        lengths=n - starts - integers(0, n // 8, b),
        budgets=integers(4 + 8, keep, b, heads),  # at least the sinks and the window
        q=q,
        rounded=(wide_q.bfloat16(), k8, v8),
        scales=(k_scale, v_scale),
        visible=visible,
        sink_logits=randn(4)[0].flatten(),
        key_bias=torch.randn(b, heads, n, generator=torch.Generator().manual_seed(seed + 1), device="cpu"),
        lse=lse.flatten(1, 2),
        buckets=integers(-1, 4, b, heads, keep),
        projection=randn(2, d)[0, 0],
        phase=randn(2)[0, 0],
        prototypes=prototypes,
        mean=randn(4, d)[0].flatten(0, 1),
        cov=randn(4, d, d).flatten(1, 2),
        norms=randn(4, d // 2).flatten(1, 2),
        w_o=(randn(2, 90, dv)[0].movedim(2, 0).flatten(1) / heads).to(dtype),
        assignment=integers(-1, 70, b, heads, n),
        means=scores(70),
        deep=(randn(n, d).to(dtype), randn(n, dv).to(dtype)),
        inv_freq=rope.inv_freq,
        angles=rope.tables(torch.arange(n, device="cpu") - starts.long().unsqueeze(1)),
        out=nan(keep),
        ladder_out=nan(len(ladder_plan(n))),
        lagkv_out=nan(kept),
    )


def flat(lists: tuple[list[Tensor], list[Tensor]]) -> tuple[Tensor, ...]:
    return tuple(x for tensors in lists for x in tensors)


CALLS: dict[str, Callable[[Inputs], tuple[Tensor, ...]]] = {
    "lag_score": lambda x: (ops.lag_score(x.k, x.v, lag=x.lag, prefix=SINK),),
    "lag_score, padded, self": lambda x: (
        ops.lag_score(
            x.k, x.v, lag=x.lag, prefix=SINK, v_weight=0.5, self_reference=True, starts=x.starts, lengths=x.lengths
        ),
    ),
    "anchor_cosine": lambda x: ops.anchor_cosine(x.k, return_anchor=True),
    "anchor_cosine, padded": lambda x: ops.anchor_cosine(
        x.k, normalize_anchor=False, starts=x.starts, lengths=x.lengths, return_anchor=True
    ),
    "anchor_cosine, anchor": lambda x: (ops.anchor_cosine(x.k, anchor=x.anchor),),
    "window_scores": lambda x: (ops.window_scores(x.q, x.k, x.visible),),
    "window_scores, padded": lambda x: (
        ops.window_scores(
            x.q, x.k, x.visible, starts=x.starts, reduce="mean", group_reduce="max", sink_logits=x.sink_logits
        ),
    ),
    "window_scores, lse": lambda x: (ops.window_scores(x.q, x.k, x.visible, lse=x.lse, softcap=SOFTCAP),),
    "window_scores, row weights": lambda x: (
        ops.window_scores(x.q, x.k, x.visible, reduce="max", group_reduce="none", row_weights=x.lse.exp().clamp(max=9)),
    ),
    "window_scores, one row": lambda x: (ops.window_scores(x.q[:, :, -1:], x.k, x.visible[:, -1:].contiguous()),),
    "window_scores, dot": lambda x: (
        ops.window_scores(x.q, x.k, x.visible[0], scale=0.2, score="dot", reduce="max", group_reduce="none"),
    ),
    "drop_scores": lambda x: (ops.drop_scores(x.q, x.k, x.v, x.visible),),
    "drop_scores, padded": lambda x: (
        ops.drop_scores(
            x.q,
            x.k,
            x.v,
            x.visible,
            group_reduce="max",
            starts=x.starts,
            softcap=SOFTCAP,
            sink_logits=x.sink_logits,
            epsilon=1e-3,
        ),
    ),
    "drop_scores, one row": lambda x: (
        ops.drop_scores(x.q[:, :, -1:], x.k, x.v, x.visible[:, -1:].contiguous(), scale=0.2, group_reduce="none"),
    ),
    "window_attention": lambda x: ops.window_attention(x.q, x.k, x.v, x.visible, starts=x.starts),
    "window_attention, one row": lambda x: ops.window_attention(
        x.q[:, :, -1:], x.k, x.v, x.visible[:, -1:].contiguous(), sink_logits=x.sink_logits, softcap=SOFTCAP
    ),
    "window_attention, biases": lambda x: ops.window_attention(
        x.q, x.k, x.v, x.visible, starts=x.starts, key_bias=x.key_bias
    ),
    "window_attention, biases, one row": lambda x: ops.window_attention(
        x.q[:, :, -1:],
        x.k,
        x.v,
        x.visible[:, -1:].contiguous(),
        sink_logits=x.sink_logits,
        cos=x.angles[0],
        sin=x.angles[1],
        key_bias=x.key_bias,
    ),
    "window_attention, heads": lambda x: ops.window_attention(
        x.q, x.k, x.v, x.visible[0], scale=0.2, reduce="max", group_reduce="none"
    ),
    "window_attention, no scores": lambda x: ops.window_attention(
        x.q, x.k, x.v, x.visible, starts=x.starts, scores=False
    ),
    "window_attention, no scores, one row": lambda x: ops.window_attention(
        x.q[:, :, -1:], x.k, x.v, x.visible[:, -1:].contiguous(), group_reduce="none", scores=False
    ),
    "window_scores, int8": lambda x: (ops.window_scores(**x.int8_keys, visible=x.visible, starts=x.starts),),
    "window_attention, int8": lambda x: ops.window_attention(
        **x.int8, visible=x.visible, starts=x.starts, key_bias=x.key_bias
    ),
    "window_attention, int8, one row": lambda x: ops.window_attention(
        **x.int8 | dict(q=x.rounded[0][:, :, -1:]),
        visible=x.visible[:, -1:].contiguous(),
        softcap=SOFTCAP,
        sink_logits=x.sink_logits,
    ),
    "window_attention, RoPE": lambda x: ops.window_attention(
        x.q, x.k, x.v, x.visible, cos=x.angles[0], sin=x.angles[1], interleaved=True, starts=x.starts
    ),
    "window_attention, RoPE, one row": lambda x: ops.window_attention(
        x.q[:, :, -1:],
        x.k,
        x.v,
        x.visible[:, -1:].contiguous(),
        scale=0.2,
        reduce="mean",
        group_reduce="sum",
        starts=x.starts,
        softcap=SOFTCAP,
        sink_logits=x.sink_logits,
        cos=x.angles[0],
        sin=x.angles[1],
        interleaved=False,
    ),
    "window_attention, RoPE, some channels": lambda x: ops.window_attention(
        x.q[:, :, -1:],
        x.k,
        x.v,
        x.visible[:, -1:].contiguous(),
        cos=x.angles[0][0, :, :3],
        sin=x.angles[1][0, :, :3],
        interleaved=True,
    ),
    "select_topk": lambda x: (ops.select_topk(x.scores, k=x.keep, sinks=4, window=8),),
    "select_topk, padded": lambda x: (
        ops.select_topk(x.scores, k=x.keep, sinks=4, window=8, starts=x.starts, lengths=x.lengths, budgets=x.budgets),
    ),
    "select_topk, filled": lambda x: (
        ops.select_topk(
            x.scores,
            k=x.keep,
            sinks=4,
            window=8,
            starts=x.starts,
            lengths=x.lengths,
            budgets=x.budgets,
            fill_invalid=True,
        ),
    ),
    "select_topk, segments": lambda x: (ops.select_topk(x.segments, k=int(RATIO * x.lag), sinks=SINK, seq_len=x.n),),
    "select_topk, segments, padded": lambda x: (
        ops.select_topk(x.segments, k=int(RATIO * x.lag), sinks=SINK, seq_len=x.n, starts=x.starts, lengths=x.lengths),
    ),
    "gather_kv": lambda x: ops.gather_kv(x.k, x.v, x.indices),
    "gather_kv, out=": lambda x: ops.gather_kv(x.k, x.v, x.indices, out=x.out),
    "compact_kv_": lambda x: ops.compact_kv_(x.k, x.v, x.indices),
    "compact_kv_, layers": lambda x: flat(
        ops.compact_kv_([x.k, x.deep[0]], [x.v, x.deep[1]], [x.indices, x.indices[..., :2]])
    ),
    "ladder_gather": lambda x: ops.ladder_gather(x.k, x.v, plan=x.plan, layer=3),
    "ladder_gather, RoPE": lambda x: ops.ladder_gather(x.k, x.v, plan=x.plan, layer=3, inv_freq=x.inv_freq),
    "ladder_gather, some channels": lambda x: ops.ladder_gather(
        x.k, x.v, plan=x.plan, layer=3, inv_freq=x.inv_freq[:3]
    ),
    "ladder_gather, out=": lambda x: ops.ladder_gather(x.k, x.v, plan=x.plan, layer=3, out=x.ladder_out),
    "ladder_gather, layers": lambda x: flat(
        ops.ladder_gather(
            [x.k, x.deep[0]], [x.v, x.deep[1]], plan=x.plan, layer=[1, 5], inv_freq=x.inv_freq, interleaved=True
        )
    ),
    "ladder_gather, layers, out=": lambda x: flat(
        ops.ladder_gather(
            [x.k, x.deep[0]],
            [x.v, x.deep[1]],
            plan=x.plan,
            layer=[1, 5],
            inv_freq=x.inv_freq[:3],
            interleaved=True,
            out=tuple([y, torch.empty_like(y)] for y in x.ladder_out),
        )
    ),
    "ladder_compact_": lambda x: ops.ladder_compact_(x.k, x.v, plan=x.plan, layer=3),
    "ladder_compact_, RoPE": lambda x: ops.ladder_compact_(x.k, x.v, plan=x.plan, layer=3, inv_freq=x.inv_freq),
    "ladder_compact_, some channels": lambda x: ops.ladder_compact_(
        x.k, x.v, plan=x.plan, layer=3, inv_freq=x.inv_freq[:3], interleaved=True
    ),
    "ladder_compact_, layers": lambda x: flat(
        ops.ladder_compact_(
            [x.k, x.deep[0]], [x.v, x.deep[1]], plan=x.plan, layer=[1, 5], inv_freq=x.inv_freq, interleaved=True
        )
    ),
    "rope_at_slots": lambda x: (ops.rope_at_slots(x.k, *x.angles),),
    "rope_at_slots, interleaved": lambda x: (
        ops.rope_at_slots(x.k, *(y[..., :3] for y in x.angles), interleaved=True),
    ),
    "rope_at_slots, out=": lambda x: (
        ops.rope_at_slots(x.k, *(y[..., :3] for y in x.angles), out=torch.empty_like(x.k)),
    ),
    "rope_at_slots, in place": lambda x: (ops.rope_at_slots(x.k, *x.angles, interleaved=True, out=x.k),),
    "rope_at_slots, in place, some channels": lambda x: (
        ops.rope_at_slots(x.k, *(y[..., :3] for y in x.angles), out=x.k),
    ),
    "outlier_degree": lambda x: (ops.outlier_degree(x.k),),
    "outlier_degree, padded": lambda x: (ops.outlier_degree(x.k, kappa=70, starts=x.starts, lengths=x.lengths),),
    "outlier_degree, similarity": lambda x: (ops.outlier_degree(x.k, standardize=False),),
    "lsh_bucket": lambda x: (ops.lsh_bucket(x.k, x.indices, x.projection, x.phase),),
    "build_prototypes": lambda x: ops.build_prototypes(x.k, sat_indices=x.indices, buckets=x.buckets, num_chunks=66),
    "build_prototypes, padded": lambda x: ops.build_prototypes(
        x.k, sat_indices=x.indices, buckets=x.buckets, num_chunks=1, starts=x.starts, lengths=x.lengths
    ),
    "build_prototypes, chunks": lambda x: ops.build_prototypes(
        x.k, num_chunks=70, num_buckets=0, least_chunk=3, starts=x.starts, lengths=x.lengths
    ),
    "assign_prototypes": lambda x: (ops.assign_prototypes(x.k, x.prototypes),),
    "assign_prototypes, padded": lambda x: (
        ops.assign_prototypes(x.k, x.prototypes, starts=x.starts, lengths=x.lengths),
    ),
    "quadratic_scores": lambda x: (ops.quadratic_scores(x.k, x.mean, cov=x.cov),),
    "quadratic_scores, padded": lambda x: (
        ops.quadratic_scores(x.k, x.mean, cov=x.cov[0], scale=-0.2, starts=x.starts, lengths=x.lengths),
    ),
    "quadratic_scores, means": lambda x: (ops.quadratic_scores(x.k, x.mean),),
    "trig_scores": lambda x: (ops.trig_scores(x.k, x.mean, norms=x.norms),),
    "trig_scores, padded": lambda x: (
        ops.trig_scores(x.k, x.cov[:, :, 0].contiguous(), starts=x.starts, lengths=x.lengths),
    ),
    "trig_scores, some channels": lambda x: (
        ops.trig_scores(x.k, x.mean, norms=x.norms[0, :, :3].contiguous(), interleaved=True),
    ),
    "key_similarity": lambda x: (ops.key_similarity(x.k, threshold=0.3),),
    "key_similarity, padded": lambda x: (ops.key_similarity(x.k, starts=x.starts, lengths=x.lengths),),
    "value_norm": lambda x: (ops.value_norm(x.v, x.w_o),),
    "value_norm, padded": lambda x: (
        ops.value_norm(x.v, x.w_o, group_reduce="max", starts=x.starts, lengths=x.lengths),
    ),
    "value_range": lambda x: (ops.value_range(x.v),),
    "value_range, padded": lambda x: (ops.value_range(x.v, starts=x.starts, lengths=x.lengths),),
    "cluster_mean": lambda x: (ops.cluster_mean(x.scores, x.assignment, num_clusters=70),),
    "cluster_mean, sum": lambda x: (ops.cluster_mean(x.scores, x.assignment, num_clusters=70, reduce="sum"),),
    "cluster_priority": lambda x: ops.cluster_priority(x.scores, x.assignment, x.means, k=x.keep),
    "cluster_priority, budgets": lambda x: ops.cluster_priority(
        x.scores, x.assignment, x.means, k=x.keep, budgets=x.budgets
    ),
    "cluster_priority, whole": lambda x: ops.cluster_priority(
        x.scores, x.assignment, x.means, k=x.keep, budgets=x.budgets, whole=True
    ),
    "keydiff_compress": lambda x: kvops.keydiff_compress(x.k, x.v, x.keep, sinks=2, recent=0.1),
    "keydiff_compress, padded": lambda x: kvops.keydiff_compress(
        x.k, x.v, 0.25, recent=0.1, starts=x.starts, lengths=x.lengths
    ),
    "keydiff_compress, shared": lambda x: kvops.keydiff_compress(x.k, x.v, x.keep, head_mode="shared"),
    "keydiff_compress, out=": lambda x: kvops.keydiff_compress(x.k, x.v, x.keep, out=x.out),
    "keydiff_compress_": lambda x: kvops.keydiff_compress_(x.k, x.v, x.keep),
    "lagkv_compress": lambda x: kvops.lagkv_compress(x.k, x.v, x.lag, RATIO, sinks=SINK),
    "lagkv_compress, padded": lambda x: kvops.lagkv_compress(
        x.k, x.v, x.lag, RATIO, sinks=SINK, starts=x.starts, lengths=x.lengths, fill_invalid=True
    ),
    "lagkv_compress, shared": lambda x: kvops.lagkv_compress(x.k, x.v, x.lag, RATIO, sinks=SINK, head_mode="shared"),
    "lagkv_compress, out=": lambda x: kvops.lagkv_compress(x.k, x.v, x.lag, RATIO, sinks=SINK, out=x.lagkv_out),
    "lagkv_compress_": lambda x: kvops.lagkv_compress_(x.k, x.v, x.lag, RATIO, sinks=SINK),
    "streamingllm_compress": lambda x: kvops.streamingllm_compress(x.k, x.v, x.keep, starts=x.starts),
    "random_compress": lambda x: kvops.random_compress(x.k, x.v, x.keep, starts=x.starts),
}

# Calls that make exactly one operator call.
OPERATORS_CALLS = [name for name in CALLS if name.split(",")[0] in ops.__all__]


class Recorder(TorchDispatchMode):
    """Records copies of the arguments of every kvops overload that is called."""

    def __init__(self):
        super().__init__()
        self.found: list[tuple[OpOverload, dict[str, Any]]] = []

    def __torch_dispatch__(self, overload, types, args=(), kwargs=None):
        if overload.namespace == "kvops":
            by_name = dict(zip((x.name for x in overload._schema.arguments), args)) | (kwargs or {})
            self.found.append((overload, copy.deepcopy(by_name)))  # before the operator writes
        return overload(*args, **(kwargs or {}))


def every_tensor(x: Inputs) -> dict[str, dict[str, Any]]:
    """Return, for each overload, the arguments of a call that succeeds, with every tensor that it takes.

    int8 keys and values have arguments that others do not have, and the other way round: a second call, by the name of
    the overload and ", int8".
    """
    plan = list(x.plan.encoded)
    ladder = dict(k=[x.k], v=[x.v], plan=plan, layer=[3], inv_freq=x.inv_freq)
    span = dict(starts=x.starts, lengths=x.lengths)
    window = dict(q=x.q, k=x.k, visible=x.visible, starts=x.starts, sink_logits=x.sink_logits)
    tables = dict(zip(("cos", "sin"), x.angles))
    k_out, v_out = x.out
    ladder_out = dict(k_out=[x.ladder_out[0]], v_out=[x.ladder_out[1]])
    every = {
        "lag_score": dict(k=x.k, v=x.v, lag=x.lag, **span),
        "anchor_cosine": dict(k=x.k, anchor=x.anchor, **span),
        "window_scores": dict(
            window, lse=ops.window_attention(v=x.v, **window)[1], row_weights=torch.rand(*x.q.shape[:3])
        ),
        "window_attention": dict(window, v=x.v, key_bias=x.key_bias, **tables),
        "window_attention, int8": window | x.int8,
        "window_scores, int8": window | x.int8_keys,
        "drop_scores": dict(window, v=x.v),
        "select_topk": dict(scores=x.scores, k=x.keep, sinks=4, window=8, budgets=x.budgets, **span),
        "gather_kv": dict(k=x.k, v=x.v, indices=x.indices),
        "gather_kv.out": dict(k=x.k, v=x.v, indices=x.indices, k_out=k_out, v_out=v_out),
        "compact_kv_": dict(k=[x.k], v=[x.v], indices=[x.indices]),
        "ladder_gather": ladder,
        "ladder_gather.out": dict(ladder, **ladder_out),
        "ladder_compact_": ladder,
        "rope_at_slots": dict(k=x.k, **tables),
        "rope_at_slots.out": dict(k=x.k, **tables, k_out=torch.empty_like(x.k)),
        "outlier_degree": dict(k=x.k, **span),
        "lsh_bucket": dict(k=x.k, indices=x.indices, projection=x.projection, phase=x.phase),
        "build_prototypes": dict(k=x.k, sat_indices=x.indices, buckets=x.buckets, num_chunks=6, **span),
        "assign_prototypes": dict(k=x.k, prototypes=x.prototypes, **span),
        "quadratic_scores": dict(k=x.k, mean=x.mean, cov=x.cov, **span),
        "trig_scores": dict(k=x.k, centers=x.mean, norms=x.norms, **span),
        "key_similarity": dict(k=x.k, **span),
        "value_norm": dict(v=x.v, w_o=x.w_o, **span),
        "value_range": dict(v=x.v, **span),
        "cluster_mean": dict(scores=x.scores, assignment=x.assignment, num_clusters=70),
        "cluster_priority": dict(
            scores=x.scores, assignment=x.assignment, cluster_scores=x.means, k=x.keep, budgets=x.budgets
        ),
    }
    return {f"kvops::{name}": arguments for name, arguments in every.items()}


def direct(name: str, x: Inputs) -> tuple[OpOverload, dict[str, Any]]:
    """Return the overload and arguments that one of OPERATORS_CALLS leads to. Shared tensors stay shared."""
    with Recorder() as recorder:
        CALLS[name](x)
    (found,) = recorder.found
    return found


# Few shapes, since the sanitizer is slow: every dtype, rows of 16 bytes and of many, long and short, one token.
SAMPLE = [
    dict(n=1500, d=128, dv=128, dtype=torch.bfloat16),
    dict(n=300, d=40, dv=64, dtype=torch.float32),
    dict(b=1, heads=1, n=70, d=8, dv=256, dtype=torch.float16),
    dict(b=1, heads=8, n=20_000, d=64, dv=64, dtype=torch.bfloat16),
]


def label(name: str, shape: dict) -> str:
    return f"{name}: {', '.join(f'{x}={y}' for x, y in shape.items())}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further call after so long")
    a = parser.parse_args()
    hopper = kvops.build_info()["cuda"]["sm90"]
    if os.environ.get("KVOPS_SM90") == "1" and not hopper["used"]:
        sys.exit(f"the Hopper kernels are not in use: {hopper['why'] or 'the CUDA library is not loaded'}")
    began = time.monotonic()
    names = [name for name in CALLS if not a.operators or name.split(",")[0] in a.operators]
    for shape in SAMPLE:
        for name in names:
            print(f"planned: {label(name, shape)}")
    for shape in SAMPLE:
        on_cpu = inputs(0, **shape)
        for name in names:
            if time.monotonic() - began > a.seconds:
                return
            CALLS[name](on_cpu.map(lambda x: x.cuda()))
            torch.cuda.synchronize()
            print(f"made: {label(name, shape)}", flush=True)


if __name__ == "__main__":
    main()
