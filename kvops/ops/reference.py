"""Every operator in a few lines of plain PyTorch: the specification against which the tests compare the kernels.

Names, arguments and contracts are those of `kvops.ops`. The functions follow the formulas literally and compute in
`dtype` (fp64 by default). They are not meant to be fast or to save memory.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .api import Layers
from .ladder import LadderPlan, decode_plan
from .lag import kept_length, num_segments, segment_start


def movable(x: Tensor) -> Tensor:
    """x, or the bytes of fp8, for which torch lacks functions that only move numbers or set them to 0."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def pages_to_dense(x: Tensor, block_table: Tensor) -> Tensor:
    """Gathers pages into a dense tensor: [num_pages, Hk, page_size, d] -> [b, Hk, max_pages * page_size, d].

    block_table: int32 [b, max_pages]; entries of -1 give zeros.
    """
    rows = movable(x)[block_table.long().clamp(min=0)]  # [b, max_pages, Hk, page_size, d]
    rows = rows.masked_fill((block_table < 0)[..., None, None, None], 0)
    return rows.transpose(1, 2).flatten(2, 3).view(x.dtype)


def also_of_pages(f: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the argument `block_table`, with which k and v are pages."""
    signature = inspect.signature(f)

    @functools.wraps(f)
    def call(*args: Any, block_table: Tensor | None = None, **options: Any) -> Any:
        given = signature.bind(*args, **options).arguments
        if block_table is not None:
            given |= {name: pages_to_dense(given[name], block_table) for name in ("k", "v") if name in given}
            for name in ("key_bias", "k_scale", "v_scale"):
                if given.get(name) is not None:
                    given[name] = pages_to_dense(given[name].unsqueeze(-1), block_table).squeeze(-1)
        return f(**given)

    table = inspect.Parameter("block_table", inspect.Parameter.KEYWORD_ONLY, default=None)
    call.__signature__ = signature.replace(parameters=[*signature.parameters.values(), table])  # type: ignore[attr-defined]
    return call


def spans(b: int, n: int, starts: Tensor | None, lengths: Tensor | None) -> list[tuple[int, int]]:
    """The first valid slot of each of the b rows, and one past the last."""
    first = [0] * b if starts is None else starts.tolist()
    count = [n - s for s in first] if lengths is None else lengths.tolist()
    return [(s, s + c) for s, c in zip(first, count)]


def softmax_of_finite(x: Tensor) -> Tensor:
    """Softmax over the finite entries of the last dim; the others become NaN."""
    finite = x.isfinite()
    return torch.where(finite, x.masked_fill(~finite, -torch.inf).softmax(-1), torch.nan)


def lag_std(z: Tensor, lag: int, self_reference: bool = False) -> Tensor:
    """LagKV Eq. 5-8 before the softmax: whole partitions [.., (S + 1) lag, d] -> std of each token, [.., S, lag]."""
    x = z.unflatten(-2, (-1, lag))  # [.., S + 1, lag, d]
    subject = x[..., :-1, :, :]
    reference = subject if self_reference else x[..., 1:, :, :]
    lo, hi = reference.amin(-2, keepdim=True), reference.amax(-2, keepdim=True)
    usable = (hi - lo).isfinite() & (hi != lo)
    return torch.where(usable, (subject - lo) / (hi - lo), 0.0).std(-1)


@also_of_pages
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
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """LagKV Eq. 5-9. k: [b, Hk, n, d], v: [b, Hk, n, dv] -> [b, Hk, S, lag]."""
    b, heads, n, _ = k.shape
    scores = torch.full((b, heads, num_segments(n, prefix, lag), lag), torch.nan, dtype=dtype, device=k.device)

    for row, (first, last) in enumerate(spans(b, n, starts, lengths)):
        count = num_segments(last - first, prefix, lag)
        if count:
            grid = slice(first + prefix, first + segment_start(count + 1, prefix, lag))
            k_score, v_score = (
                softmax_of_finite(lag_std(z[row, :, grid].to(dtype), lag, self_reference)) for z in (k, v)
            )
            scores[row, :, :count] = k_score + v_weight * v_score
    return scores


def unit_keys(k: Tensor) -> tuple[Tensor, Tensor]:
    """k / |k| (0 for a zero key, arbitrary for one that is not finite), and bool [b, Hk, n]: which keys are finite."""
    norm = torch.linalg.vector_norm(k, dim=-1, keepdim=True)
    return torch.where(norm > 0, k / norm, 0.0), k.isfinite().all(-1)


def valid_slots(k: Tensor, starts: Tensor | None, lengths: Tensor | None) -> Tensor:
    """Which slots are valid: bool [b, 1, n]."""
    b, n = k.shape[0], k.shape[2]
    valid = torch.zeros(b, 1, n, dtype=torch.bool, device=k.device)
    for row, (first, last) in enumerate(spans(b, n, starts, lengths)):
        valid[row, :, first:last] = True
    return valid


@also_of_pages
def anchor_cosine(
    k: Tensor,
    *,
    anchor: Tensor | None = None,
    normalize_anchor: bool = True,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    return_anchor: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Tensor | tuple[Tensor, Tensor]:
    """KeyDiff Sec. 3.2, Eq. 8. k: [b, Hk, n, d] -> scores [b, Hk, n] (and the anchor [b, Hk, d])."""
    keys = k.to(dtype)
    unit, finite = unit_keys(keys)
    usable = (valid_slots(k, starts, lengths) & finite).unsqueeze(-1)
    if anchor is None:
        anchor = torch.where(usable, unit if normalize_anchor else keys, 0.0).sum(2)
    anchor = anchor.to(dtype)
    length = torch.linalg.vector_norm(anchor, dim=-1, keepdim=True)
    direction = torch.where(length == 0, 0.0, anchor / length)
    scores = -(unit * direction.unsqueeze(2)).sum(-1)
    scores = torch.where(usable.squeeze(-1), scores, torch.nan)
    return (scores, anchor) if return_anchor else scores


def group_size(q: Tensor, k: Tensor) -> int:
    """Query heads per KV head."""
    return q.shape[1] // k.shape[1] if k.shape[1] else 1


def scaled_rows(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rows of K or V as numbers: int8 rows times their scales, [b, Hk, n]; NaN if a scale is not finite."""
    return x.to(dtype) if scale is None else x.to(dtype) * (scale + 0 * scale).to(dtype).unsqueeze(-1)


def window_logits(
    q: Tensor,
    k: Tensor,
    visible: Tensor,
    scale: float | None,
    starts: Tensor | None,
    softcap: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The logits of a window's rows, [b, Hk, G, w, n], and which of them the rows see, bool [b, 1, 1, w, n]."""
    b, heads, n, d = k.shape
    scale = d**-0.5 if scale is None else scale
    logits = q.to(dtype).unflatten(1, (heads, group_size(q, k))) @ k.to(dtype).unsqueeze(2).mT * scale
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    slots = torch.arange(n, device=k.device)
    seen = slots < visible.expand(b, -1).unsqueeze(-1)
    if starts is not None:
        seen = seen & (slots >= starts[:, None, None])
    return logits, seen[:, None, None]


def window_softmax(
    logits: Tensor, seen: Tensor, lse: Tensor | None, sink_logits: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The softmax weights, 0 for logits that are not finite or not seen, and the log-sum-exp without the sink.

    Returns [b, Hk, G, w, n] and [b, Hk, G, w].
    """
    usable = seen & logits.isfinite()
    sinks = logits.new_full(logits.shape[1:3], -torch.inf) if sink_logits is None else sink_logits.to(logits.dtype)
    sinks = sinks.view(*logits.shape[1:3], 1)
    if lse is None:  # not computed from the lse: if logits are large, the lse is rounded to one of them
        masked = logits.masked_fill(~usable, -torch.inf)
        weights = torch.cat((masked, sinks.unsqueeze(-1).expand(*logits.shape[:-1], 1)), -1).softmax(-1)[..., :-1]
        return torch.where(usable, weights, 0.0), masked.logsumexp(-1)
    return torch.where(usable, (logits - lse.logaddexp(sinks).unsqueeze(-1)).exp(), 0.0), lse


def window_reduce(rows: Tensor, seen: Tensor, finite: Tensor, reduce: str, group_reduce: str) -> Tensor:
    """Reduces over the rows that see a key (0 if none does), then over the group.

    [b, Hk, G, w, n] -> [b, Hk, n] or [b, Hq, n].
    """
    rows = torch.where(finite, rows, torch.nan)
    if reduce == "max":
        scores = torch.where(seen.any(-2), rows.masked_fill(~seen, -torch.inf).amax(-2), 0.0)
    else:
        scores = torch.where(seen, rows, 0.0).sum(-2)
        if reduce == "mean":
            scores = scores / seen.any(-1).sum(-1).clamp(min=1).unsqueeze(-1)
    if group_reduce == "none":
        return scores.flatten(1, 2)
    reduced: dict[str, Callable[[int], Tensor]] = {"sum": scores.sum, "mean": scores.mean, "max": scores.amax}
    return reduced[group_reduce](2)


@also_of_pages
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
    row_weights: Tensor | None = None,
    k_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """LAQ Sec. 4.3 (Eq. 4), SnapKV's observation window. q: [b, Hq, w, d], k: [b, Hk, n, d] -> [b, Hk, n]."""
    k = scaled_rows(k, k_scale, dtype)
    logits, seen = window_logits(q, k, visible, scale, starts, softcap, dtype)
    rows = logits
    if score == "softmax":
        lse = None if lse is None else lse.to(dtype).unflatten(1, (k.shape[1], group_size(q, k)))
        rows, _ = window_softmax(logits, seen, lse, sink_logits)
    if row_weights is not None:
        rows = rows * row_weights.to(dtype).unflatten(1, (k.shape[1], group_size(q, k))).unsqueeze(-1)
    return window_reduce(rows, seen, logits.isfinite(), reduce, group_reduce)


@also_of_pages
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
    key_bias: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(q k) v, its log-sum-exp and `window_scores`. -> [b, Hq, w, dv], [b, Hq, w], [b, Hk, n or 0]."""
    if cos is not None and sin is not None:  # in fp32, and rounded to the queries' dtype
        k = rope_at_slots(k, cos, sin, interleaved=interleaved, dtype=torch.float32).to(q.dtype)
    k, v = scaled_rows(k, k_scale, dtype), scaled_rows(v, v_scale, dtype)
    logits, seen = window_logits(q, k, visible, scale, starts, softcap, dtype)
    if key_bias is not None:
        logits = logits + key_bias.to(dtype)[:, :, None, None]
    weights, lse = window_softmax(logits, seen, None, sink_logits)
    values = torch.where(seen.any(-2).unsqueeze(-1), v.unsqueeze(2), 0.0)  # unseen slots are not read
    observed = window_reduce(weights, seen, logits.isfinite(), reduce, group_reduce)
    return (weights @ values).flatten(1, 2), lse.flatten(1, 2), observed if scores else observed[..., :0]


@also_of_pages
def drop_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    *,
    scale: float | None = None,
    group_reduce: str = "mean",
    starts: Tensor | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    epsilon: float = 1e-6,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """DropKV: the squared change of the outputs if a key is dropped. -> [b, Hk, n]."""
    logits, seen = window_logits(q, k, visible, scale, starts, softcap, dtype)
    weights, _ = window_softmax(logits, seen, None, sink_logits)
    values = torch.where(seen.any(-2).unsqueeze(-1), v.to(dtype).unsqueeze(2), 0.0)  # unseen slots are not read
    outs = weights @ values
    gains = weights / ((1 - weights).clamp(min=0) + epsilon)
    distances = torch.cdist(
        outs, values.expand(-1, -1, outs.shape[2], -1, -1), compute_mode="donot_use_mm_for_euclid_dist"
    )
    return window_reduce((gains * distances).square(), seen, logits.isfinite(), "sum", group_reduce)


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
    """Selects slots by (higher score, lower slot): numbers, then -inf, then NaN. -> int64 [b, Hk, width], ascending."""
    segments = scores.dim() == 4
    b, heads = scores.shape[:2]
    n = scores.shape[2] if seq_len is None else seq_len
    lag = scores.shape[3] if segments else 0
    if not segments:
        width = min(k, n)
    elif starts is None and lengths is None:
        width = kept_length(n, sinks, lag, k)
    else:
        width = max(kept_length(i, sinks, lag, k) for i in range(n + 1))

    def best(row: np.ndarray, count: int) -> np.ndarray:
        nan = np.isnan(row)
        order = np.lexsort((np.arange(len(row)), -np.where(nan, 0.0, row), nan))
        return np.sort(order[:count])

    out = np.full((b, heads, width), -1, dtype=np.int64)
    values = scores.detach().double().cpu().numpy()
    for i, (first, last) in enumerate(spans(b, n, starts, lengths)):
        for h in range(heads):
            valid = last - first
            if segments:
                count = num_segments(valid, sinks, lag)
                chosen = [best(values[i, h, s], k) + segment_start(s, sinks, lag) for s in range(count)]
                head, tail = min(sinks, valid), min(sinks, valid) + count * lag
                kept = np.concatenate([np.arange(head), *chosen, np.arange(tail, valid)])
            else:
                budget = k if budgets is None else int(budgets[i, h])
                if valid <= budget:
                    kept = np.arange(valid)
                else:
                    middle = best(values[i, h, first + sinks : last - window], budget - sinks - window) + sinks
                    kept = np.concatenate([np.arange(sinks), middle, np.arange(valid - window, valid)])
            kept = kept + first
            if fill_invalid:
                invalid = np.concatenate([np.arange(first), np.arange(last, n)])
                kept = np.sort(np.concatenate([kept, invalid[: width - len(kept)]]))
            out[i, h, : len(kept)] = kept
    return torch.from_numpy(out).to(scores.device)


@also_of_pages
def gather_kv(k: Tensor, v: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Rows k[b, h, indices[b, h, i]] and the same of v; -1 gives zeros. -> [b, Hk, m, d], [b, Hk, m, dv]."""

    def rows(x: Tensor) -> Tensor:
        picked = movable(x).gather(2, indices.clamp(min=0).unsqueeze(-1).expand(*indices.shape, x.shape[-1]))
        return picked.masked_fill(indices.unsqueeze(-1) < 0, 0).view(x.dtype)

    return rows(k), rows(v)


def compact_kv_(k: Layers, v: Layers, indices: Layers, *, block_table: Tensor | None = None) -> tuple[Layers, Layers]:
    """The contents of slots [0, m) of k and v (or of lists of layers) after the in-place move: those of `gather_kv`."""
    if isinstance(k, Tensor):
        return gather_kv(k, v, indices, block_table=block_table)
    layers = [gather_kv(*x, block_table=block_table) for x in zip(k, v, indices)]
    return [x for x, _ in layers], [x for _, x in layers]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates each pair of the first 2 * pairs channels by its angle. x: [.., d], cos, sin: [.., pairs]."""
    pairs = cos.shape[-1]
    rotated, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    first, second = rotated.unflatten(-1, (pairs, 2) if interleaved else (2, pairs)).unbind(-1 if interleaved else -2)
    pair = first * cos - second * sin, second * cos + first * sin
    return torch.cat((torch.stack(pair, -1 if interleaved else -2).flatten(-2), rest), -1)


def ladder_gather(
    k: Layers,
    v: Layers,
    *,
    plan: LadderPlan | Sequence[int],
    layer: int | Sequence[int],
    inv_freq: Tensor | None = None,
    interleaved: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Layers, Layers]:
    """LaCache Sec. 3.2, 3.3: the slots that a plan keeps of a layer (or of lists of layers). With inv_freq the keys are
    rotated and returned in `dtype`."""
    decoded = plan if isinstance(plan, LadderPlan) else decode_plan(plan)

    def moved(x: Tensor, i: int, frequencies: Tensor | None) -> Tensor:
        indices = decoded.indices(i, x.device)
        kept = x[:, :, indices]
        if frequencies is None:
            return kept
        angles = (torch.arange(len(indices), device=x.device) - indices).unsqueeze(-1) * frequencies.to(dtype)
        return rotate(kept.to(dtype), angles.cos(), angles.sin(), interleaved)

    layers = [layer] if isinstance(layer, int) else layer
    keys = [moved(x, i, inv_freq) for x, i in zip([k] if isinstance(k, Tensor) else k, layers)]
    values = [moved(x, i, None) for x, i in zip([v] if isinstance(v, Tensor) else v, layers)]
    return (keys[0], values[0]) if isinstance(k, Tensor) else (keys, values)


ladder_compact_ = ladder_gather  # the operator moves the same values in place


def rope_at_slots(
    k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, dtype: torch.dtype = torch.float64
) -> Tensor:
    """RoFormer Eq. 34. k: [b, H, n, d], cos, sin: [n, pairs] or [b, n, pairs] -> [b, H, n, d] in `dtype`."""
    cos, sin = (x.to(dtype) if x.dim() == 2 else x.to(dtype).unsqueeze(1) for x in (cos, sin))
    return rotate(k.to(dtype), cos, sin, interleaved)


FLAT_SIMILARITY = 1e-6  # smaller standard deviations are rounding errors of fp32


@also_of_pages
def outlier_degree(
    k: Tensor,
    *,
    kappa: int = 5,
    standardize: bool = True,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """ProtoKV Eq. 4, 5. k: [b, Hk, n, d] -> [b, Hk, n]."""
    unit, finite = unit_keys(k.to(dtype))
    usable = valid_slots(k, starts, lengths) & finite
    unit = torch.where(usable.unsqueeze(-1), unit, 0.0)
    total, count = torch.zeros_like(unit[..., 0]), torch.zeros_like(unit[..., 0])
    n = k.shape[2]
    for step in range(-min(kappa, n), min(kappa, n) + 1):
        here, there = slice(max(0, -step), n - max(0, step)), slice(max(0, step), n - max(0, -step))
        total[:, :, here] += (unit[:, :, here] * unit[:, :, there]).sum(-1)
        count[:, :, here] += usable[:, :, there]
    similarity = torch.where(usable, total / count, torch.nan)
    if not standardize:
        return similarity
    mean = similarity.nanmean(-1, keepdim=True)
    std = (similarity - mean).square().nanmean(-1, keepdim=True).sqrt()
    return torch.where(usable, torch.where(std > FLAT_SIMILARITY, (mean - similarity) / std, 0.0), torch.nan)


def by_kv_head(rows: Tensor, k: Tensor, batched: bool) -> Tensor:
    """Coefficients [Hq, ..] or [b, Hq, ..] as [b, Hk, G, ..], in k's dtype."""
    rows = rows if batched else rows.expand(len(k), *rows.shape)
    return rows.to(k.dtype).unflatten(1, (k.shape[1], -1))


def finite_scores(scores: Tensor, k: Tensor, starts: Tensor | None, lengths: Tensor | None) -> Tensor:
    """Scores [b, Hk, G, n] as [b, Hq, n], with NaN for invalid slots and where they exceed fp32."""
    usable = valid_slots(k, starts, lengths).unsqueeze(2) & (scores.abs() <= torch.finfo(torch.float32).max)
    return torch.where(usable, scores, torch.nan).flatten(1, 2)


@also_of_pages
def quadratic_scores(
    k: Tensor,
    mean: Tensor,
    *,
    cov: Tensor | None = None,
    scale: float | None = None,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Expected Attention. k: [b, Hk, n, d], mean: [Hq, d], cov: [Hq, d, d] (or with a batch) -> [b, Hq, n]."""
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    k = k.to(dtype)
    scores = scale * torch.einsum("bhgd,bhnd->bhgn", by_kv_head(mean, k, mean.dim() == 3), k)
    if cov is not None:
        products = torch.einsum("bhgde,bhne->bhgnd", by_kv_head(cov, k, cov.dim() == 4), k)
        scores = scores + scale**2 / 2 * (products * k.unsqueeze(2)).sum(-1)
    return finite_scores(scores, k, starts, lengths)


@also_of_pages
def trig_scores(
    k: Tensor,
    centers: Tensor,
    *,
    norms: Tensor | None = None,
    interleaved: bool = False,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """TriAttention. k: [b, Hk, n, d], centers: [Hq, d], norms: [Hq, pairs] (or with a batch) -> [b, Hq, n]."""
    k = k.to(dtype)
    scores = torch.einsum("bhgd,bhnd->bhgn", by_kv_head(centers, k, centers.dim() == 3), k)
    if norms is not None:
        turned = k[..., : 2 * norms.shape[-1]]
        pairs = turned.unflatten(-1, (-1, 2)) if interleaved else turned.unflatten(-1, (2, -1)).mT
        scores = scores + torch.einsum(
            "bhgf,bhnf->bhgn", by_kv_head(norms, k, norms.dim() == 3), torch.linalg.vector_norm(pairs, dim=-1)
        )
    return finite_scores(scores, k, starts, lengths)


@also_of_pages
def lsh_bucket(k: Tensor, indices: Tensor, projection: Tensor, phase: Tensor) -> Tensor:
    """ProtoKV Eq. 7, 8. k: [b, Hk, n, d], indices: [b, Hk, p] -> int32 [b, Hk, p]."""
    rows = indices.clamp(min=0).unsqueeze(-1).expand(*indices.shape, k.shape[-1])
    keys = k.double().gather(2, rows)
    r = len(phase)
    bits = (keys @ projection.double().mT + phase.double()).cos() > 0
    buckets = (bits * 2 ** torch.arange(r - 1, -1, -1, device=k.device)).sum(-1).int()
    return buckets.masked_fill((indices < 0) | ~keys.isfinite().all(-1), -1)


@also_of_pages
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
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """ProtoKV Algorithm 1, lines 4-16. k: [b, Hk, n, d] -> [b, Hk, num_chunks + num_buckets, d], and the counts."""
    b, heads, n, d = k.shape
    cluster = torch.full((b, heads, n), -1, dtype=torch.int64, device=k.device)
    for row, (first, last) in enumerate(spans(b, n, starts, lengths)):
        m = last - first
        for c in range(chunks := min(num_chunks, max(1, m // least_chunk)) if m else 0):
            cluster[row, :, first + c * m // chunks : first + (c + 1) * m // chunks] = c
    if sat_indices is not None and buckets is not None:
        for row in range(b):
            for h in range(heads):
                for i, bucket in zip(sat_indices[row, h].tolist(), buckets[row, h].tolist()):
                    if i >= 0:
                        cluster[row, h, i] = num_chunks + bucket if bucket >= 0 else -1
    keys = k.to(dtype)
    usable = valid_slots(k, starts, lengths) & keys.isfinite().all(-1) & (cluster >= 0)
    keys = torch.where(usable.unsqueeze(-1), keys, 0.0)
    cluster = cluster.clamp(min=0)
    shape = b, heads, num_chunks + num_buckets
    counts = torch.zeros(shape, dtype=torch.int32, device=k.device).scatter_add_(2, cluster, usable.int())
    sums = torch.zeros(*shape, d, dtype=dtype, device=k.device)
    sums.scatter_add_(2, cluster.unsqueeze(-1).expand_as(keys), keys)
    return sums / counts.clamp(min=1).unsqueeze(-1), counts


def prototype_cosines(k: Tensor, prototypes: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Each key's cosine with each prototype, -inf for prototypes that cannot win: [b, Hk, n, C]."""
    unit, _ = unit_keys(k.to(dtype))
    directions, finite = unit_keys(prototypes.to(dtype))
    usable = finite & (prototypes != 0).any(-1)
    cosines = unit.nan_to_num(0, 0, 0) @ torch.where(usable.unsqueeze(-1), directions, 0.0).mT
    return cosines.masked_fill(~usable.unsqueeze(2), -torch.inf)


@also_of_pages
def assign_prototypes(
    k: Tensor,
    prototypes: Tensor,
    *,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """ProtoKV Eq. 10. k: [b, Hk, n, d], prototypes: [b, Hk, C, d] -> int32 [b, Hk, n]."""
    cosines = prototype_cosines(k, prototypes, dtype)
    best = cosines.amax(-1, keepdim=True)
    first = (cosines == best).int().argmax(-1).int()
    usable = valid_slots(k, starts, lengths) & k.to(dtype).isfinite().all(-1) & (best.squeeze(-1) > -torch.inf)
    return first.masked_fill(~usable, -1)


@also_of_pages
def key_similarity(
    k: Tensor,
    *,
    threshold: float = 0.5,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """R-KV's redundancy before the softmax. k: [b, Hk, n, d] -> [b, Hk, n]."""
    unit, finite = unit_keys(k.to(dtype))
    usable = valid_slots(k, starts, lengths) & finite
    unit = torch.where(usable.unsqueeze(-1), unit, 0.0)
    cosines = (unit @ unit.mT).tril(-1) + (unit @ unit.mT).triu(1)  # [.., i, j]
    slots = torch.arange(k.shape[2], device=k.device)
    last = torch.where(cosines > threshold, slots, -1).amax(-1, keepdim=True) if k.shape[2] else slots
    cosines = cosines.masked_fill(slots == last, 0.0) if threshold < 1 else cosines
    return torch.where(usable, cosines.sum(-2) / usable.sum(-1, keepdim=True), torch.nan)


@also_of_pages
def value_norm(
    v: Tensor,
    w_o: Tensor,
    *,
    group_reduce: str = "mean",
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """CriticalKV's projected value norms. v: [b, Hk, n, dv], w_o: [hidden, Hq * dv] -> [b, Hk, n]."""
    weights = w_o.to(dtype).unflatten(1, (v.shape[1], -1, v.shape[3]))  # [hidden, Hk, group, dv]
    values = v.to(dtype)
    norms = torch.einsum("bhnd,chgd->bhngc", values, weights).abs().sum(-1)
    reduced = {"sum": norms.sum(-1), "mean": norms.mean(-1), "max": norms.amax(-1)}[group_reduce]
    usable = valid_slots(v, starts, lengths) & values.isfinite().all(-1)
    return torch.where(usable, reduced, torch.nan)


@also_of_pages
def value_range(
    v: Tensor,
    *,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """VaSE's value ranges. v: [b, Hk, n, dv] -> [b, Hk, n]."""
    values = v.to(dtype)
    return torch.where(valid_slots(v, starts, lengths), values.amax(-1) - values.amin(-1), torch.nan)


def cluster_counts(scores: Tensor, assignment: Tensor, num_clusters: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each cluster, [b, Hk, C]: the fp64 sum of its finite scores, their number, and its number of tokens."""
    member = (assignment >= 0).long()
    finite = scores.isfinite() & (assignment >= 0)
    where = assignment.clamp(min=0).long()
    zero = torch.zeros(*scores.shape[:2], num_clusters, dtype=torch.int64, device=scores.device)
    sums = zero.double().scatter_add_(2, where, torch.where(finite, scores.double(), 0.0))
    return sums, zero.scatter_add(2, where, finite.long()), zero.scatter_add(2, where, member)


def cluster_mean(scores: Tensor, assignment: Tensor, *, num_clusters: int, reduce: str = "mean") -> Tensor:
    """ProtoKV Algorithm 1, line 22; "sum": Eq. 11. scores, assignment: [b, Hk, n] -> fp64 [b, Hk, C]."""
    sums, finite, _ = cluster_counts(scores, assignment, num_clusters)
    return torch.where(finite > 0, sums if reduce == "sum" else sums / finite, torch.nan)


def cluster_priority(
    scores: Tensor,
    assignment: Tensor,
    cluster_scores: Tensor,
    *,
    k: int,
    budgets: Tensor | None = None,
    whole: bool = False,
) -> tuple[Tensor, Tensor]:
    """ProtoKV Eq. 2, Algorithm 1, line 24. -> fp32 [b, Hk, n], int32 [b, Hk]."""
    priority = torch.full_like(scores, torch.nan)
    kept = torch.zeros(scores.shape[:2], dtype=torch.int32, device=scores.device)
    sizes = cluster_counts(scores, assignment, cluster_scores.shape[2])[2]
    for row in range(scores.shape[0]):
        for h in range(scores.shape[1]):
            left = k if budgets is None else int(budgets[row, h])
            values = cluster_scores[row, h].double().cpu().numpy()
            nan = np.isnan(values)
            for c in np.lexsort((np.arange(len(values)), -np.where(nan, 0.0, values), nan)):
                members, size = assignment[row, h] == int(c), int(sizes[row, h, c])
                own = scores[row, h, members]
                if size <= left:
                    own = torch.full_like(own, torch.inf)
                elif left <= 0 or whole:
                    own, size, left = torch.full_like(own, -torch.inf), 0, 0
                else:
                    own, size = torch.where(own.isfinite(), own, torch.finfo(own.dtype).min), left
                priority[row, h, members] = own
                kept[row, h] += size
                left -= size
    return priority, kept
