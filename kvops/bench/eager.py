"""Common PyTorch formulations of the same results: the baselines of the benchmark, run eagerly and compiled.

The scores follow NVIDIA's kvpress (keydiff_press.py, lagkv_press.py), in the dtype of the inputs as in kvpress.
Selection is torch.topk plus a sort, since the kept indices ascend. Movement is torch.gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def anchor_cosine(k: Tensor) -> Tensor:
    """[b, Hk, n, d] -> [b, Hk, n]."""
    anchor = F.normalize(k, p=2, dim=-1).mean(dim=2, keepdim=True)
    return -F.cosine_similarity(k, anchor, dim=-1)


def lag_score(k: Tensor, v: Tensor, lag: int, sink: int) -> Tensor:
    """[b, Hk, n, d] twice -> [b, Hk, P - 1, lag]."""

    def score(x: Tensor) -> Tensor:
        b, heads, n, d = x.shape
        end = sink + (n - sink) // lag * lag
        x = x[:, :, sink:end].reshape(b, heads, -1, lag, d)
        reference, subject = x[:, :, 1:], x[:, :, :-1]
        lo = reference.min(dim=-2, keepdim=True).values
        hi = reference.max(dim=-2, keepdim=True).values
        return ((subject - lo) / (hi - lo)).std(dim=-1).softmax(dim=-1)

    return score(k) + score(v)


def grouped_logits(q: Tensor, k: Tensor) -> Tensor:
    """The rows of a group of query heads as one tile per KV head: [b, Hq, w, d], [b, Hk, n, d] -> [b, Hk, G w, n]."""
    b, heads, n, d = k.shape
    return q.reshape(b, heads, -1, d) @ k.mT


def window_weights(logits: Tensor, w: int) -> Tensor:
    """Causal softmax of the last w rows: [b, Hk, G w, n] -> fp32 [b, Hk, G, w, n]."""
    logits = logits.unflatten(2, (-1, w)).float()
    n = logits.shape[-1]
    later = torch.ones(w, n, dtype=torch.bool, device=logits.device).triu(n - w + 1)
    return logits.masked_fill(later, -torch.inf).softmax(-1)


def window_scores(q: Tensor, k: Tensor) -> Tensor:
    """[b, Hq, w, d], [b, Hk, n, d] -> [b, Hk, n]."""
    w, d = q.shape[2:]
    return window_weights(grouped_logits(q * d**-0.5, k), w).sum(3).mean(2)


def window_attention(q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """[b, Hq, w, d], [b, Hk, n, d] twice, [b, Hk, n] -> [b, Hq, w, d], [b, Hq, w], [b, Hk, n]."""
    w, d = q.shape[2:]
    logits = grouped_logits(q * d**-0.5, k)
    if key_bias is not None:
        logits = logits + key_bias.unsqueeze(2)
    weights = window_weights(logits, w)
    first = logits.unflatten(2, (-1, w))[..., 0].float()
    lse = first - weights[..., 0].log()
    out = weights.to(v.dtype) @ v.unsqueeze(2)
    return out.flatten(1, 2), lse.flatten(1, 2), weights.sum(3).mean(2)


def drop_scores(q: Tensor, k: Tensor, v: Tensor, epsilon: float = 1e-6) -> Tensor:
    """[b, Hq, w, d], [b, Hk, n, d] twice -> [b, Hk, n]."""
    w, d = q.shape[2:]
    weights = window_weights(grouped_logits(q * d**-0.5, k), w)
    values = v.float().unsqueeze(2)
    outs = weights @ values
    squares = values.square().sum(-1).unsqueeze(3) + outs.square().sum(-1, keepdim=True)
    gains = weights / (1 - weights + epsilon)
    return (gains.square() * (squares - 2 * outs @ values.mT)).sum(3).mean(2)


def turned_attention(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`window_attention` with keys cached before RoPE; cos, sin: [n, d // 2]."""
    return window_attention(q, rotate_half(k, cos, sin), v)


def int8_attention(q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor, v_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`window_attention` with K and V in int8 and their scales, [b, Hk, n]."""
    return window_attention(q, *((x * scale.unsqueeze(-1)).to(q.dtype) for x, scale in ((k, k_scale), (v, v_scale))))


def flash(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Tensor]]:
    """torch's FlashAttention of the last rows (without their causal corner), by kernel name."""
    if q.is_cpu:
        return {"flash": lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)}

    def run(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    kernels = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    return {name: partial(run, backend) for name, backend in kernels.items()}


def outlier_degree(k: Tensor, kappa: int = 5) -> Tensor:
    """[b, Hk, n, d] -> [b, Hk, n]: the mean of the neighbours' directions by pooling, not one cosine per pair."""
    unit = F.normalize(k, dim=-1).flatten(0, 1)
    near = F.avg_pool1d(unit.mT, 2 * kappa + 1, 1, kappa, count_include_pad=False).mT
    similarity = (unit * near).sum(-1).unflatten(0, k.shape[:2])
    return (similarity.mean(-1, keepdim=True) - similarity) / similarity.std(-1, correction=0, keepdim=True)


def lsh_bucket(k: Tensor, indices: Tensor, projection: Tensor, phase: Tensor) -> Tensor:
    """[b, Hk, n, d], [b, Hk, p], [r, d], [r] -> [b, Hk, p]."""
    rows = indices.unsqueeze(-1).expand(-1, -1, -1, k.shape[-1])
    bits = (k.gather(2, rows).float() @ projection.mT + phase).cos() > 0
    return (bits * 2 ** torch.arange(len(phase) - 1, -1, -1, device=k.device)).sum(-1).int()


def build_prototypes(
    k: Tensor, sats: Tensor, buckets: Tensor, num_chunks: int, num_buckets: int = 4
) -> tuple[Tensor, Tensor]:
    """[b, Hk, n, d], [b, Hk, p] twice -> [b, Hk, num_chunks + num_buckets, d] and the counts."""
    b, heads, n, d = k.shape
    chunks = ((torch.arange(n, device=k.device) + 1) * num_chunks - 1) // n
    cluster = chunks.expand(b, heads, n).scatter(2, sats, num_chunks + buckets.long())
    return cluster_centers(k, cluster, num_chunks + num_buckets)


def cluster_centers(k: Tensor, cluster: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[b, Hk, n, d], [b, Hk, n] -> fp32 [b, Hk, count, d], int32 [b, Hk, count]."""
    b, heads, _, d = k.shape
    sums = k.new_zeros(b, heads, count, d, dtype=torch.float32)
    sums.scatter_add_(2, cluster.unsqueeze(-1).expand(k.shape), k.float())
    counts = sums.new_zeros(b, heads, count).scatter_add_(2, cluster, sums.new_ones(cluster.shape))
    return sums / counts.clamp(min=1).unsqueeze(-1), counts.int()


def assign_prototypes(k: Tensor, prototypes: Tensor) -> Tensor:
    """[b, Hk, n, d], [b, Hk, C, d] -> [b, Hk, n]."""
    return (F.normalize(k, dim=-1) @ F.normalize(prototypes, dim=-1).to(k.dtype).mT).argmax(-1).int()


def quadratic_scores(k: Tensor, mean: Tensor, cov: Tensor | None = None) -> Tensor:
    """[b, Hk, n, d], [Hq, d], [Hq, d, d] -> [b, Hq, n]. As kvpress: K is expanded to the query heads."""
    keys = k.repeat_interleave(len(mean) // k.shape[1], dim=1)
    scores = (keys @ mean.to(k.dtype).unsqueeze(-1)).squeeze(-1) * k.shape[-1] ** -0.5
    if cov is not None:
        scores = scores + ((keys @ cov.to(k.dtype)) * keys).sum(-1) / (2 * k.shape[-1])
    return scores


def trig_scores(k: Tensor, centers: Tensor, norms: Tensor) -> Tensor:
    """[b, Hk, n, d], [Hq, d], [Hq, d / 2] -> [b, Hq, n], with the series already folded into the centers."""
    group = len(centers) // k.shape[1]
    lengths = torch.linalg.vector_norm(k.unflatten(-1, (2, -1)), dim=-2)
    of_centers, of_norms = (x.to(k.dtype).unflatten(0, (-1, group)) for x in (centers, norms))
    return (of_centers @ k.mT + of_norms @ lengths.mT).flatten(1, 2)


def key_similarity(k: Tensor, threshold: float = 0.5) -> Tensor:
    """R-KV's redundancy without the softmax: [b, Hk, n, d] -> [b, Hk, n]. Writes [b, Hk, n, n]."""
    unit, n = F.normalize(k.float(), dim=-1), k.shape[2]
    cosines = unit @ unit.mT
    cosines.diagonal(dim1=-2, dim2=-1).zero_()
    slots = torch.arange(n, device=k.device)
    last = torch.where(cosines > threshold, slots, -1).amax(-1, keepdim=True)
    return cosines.masked_fill_(slots == last, 0).sum(-2) / n


def value_norm(v: Tensor, w_o: Tensor) -> Tensor:
    """CriticalKV's value norms: [b, Hk, n, dv], [hidden, Hq * dv] -> [b, Hk, n]. Writes [b, Hk, n, hidden]."""
    weights = w_o.unflatten(1, (v.shape[1], -1, v.shape[3])).permute(2, 1, 3, 0)  # [group, Hk, dv, hidden]
    return torch.stack([(v @ x).abs().sum(-1, dtype=torch.float32) for x in weights]).mean(0)


def cluster_sums(scores: Tensor, assignment: Tensor, count: int) -> Tensor:
    """[b, Hk, n] twice -> [b, Hk, count]."""
    return scores.new_zeros(*scores.shape[:2], count).scatter_add_(2, assignment.long(), scores)


def cluster_mean(scores: Tensor, assignment: Tensor, count: int) -> Tensor:
    """[b, Hk, n] twice -> [b, Hk, count]."""
    return cluster_sums(scores, assignment, count) / cluster_sums(torch.ones_like(scores), assignment, count)


def cluster_priority(scores: Tensor, assignment: Tensor, means: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """[b, Hk, n] twice, [b, Hk, C] -> [b, Hk, n], [b, Hk]."""
    sizes = cluster_sums(torch.ones_like(scores), assignment, means.shape[2])
    order = means.nan_to_num(-torch.inf).argsort(dim=-1, descending=True, stable=True)
    upto = torch.empty_like(sizes).scatter_(2, order, sizes.gather(2, order).cumsum(-1))
    upto, size = (x.gather(2, assignment.long()) for x in (upto, sizes))
    priority = torch.where(upto <= k, torch.inf, torch.where(upto - size < k, scores, -torch.inf))
    return priority, sizes.sum(-1).clamp(max=k).int()


def select_topk(scores: Tensor, k: int) -> Tensor:
    """[b, Hk, n] -> [b, Hk, k], ascending."""
    return scores.topk(k, dim=-1).indices.sort(dim=-1).values


def gather_kv(k: Tensor, v: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """[b, Hk, n, d] twice, [b, Hk, m] -> [b, Hk, m, d] twice."""
    rows = indices.unsqueeze(-1).expand(-1, -1, -1, k.shape[-1])
    return k.gather(2, rows), v.gather(2, rows)


def ladder_gather(
    keys: Sequence[Tensor], values: Sequence[Tensor], indices: Sequence[Tensor], inv_freq: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Layers of [b, Hk, n, d], the slots [m] that each keeps -> [b, Hk, m, d]; keys rotated to the new slots."""
    moved = [gather_kv(k, v, i.expand(*k.shape[:2], -1)) for k, v, i in zip(keys, values, indices)]
    if inv_freq is None:
        return [k for k, _ in moved], [v for _, v in moved]
    slots = torch.arange(indices[0].shape[0], device=inv_freq.device)
    angles = [(slots - i).unsqueeze(-1) * inv_freq for i in indices]
    return [rotate_half(k, x.cos(), x.sin()) for (k, _), x in zip(moved, angles)], [v for _, v in moved]


def rotate_half(k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[b, H, n, d], [n, d // 2] twice -> [b, H, n, d]: Hugging Face's apply_rotary_pos_emb, in k's dtype."""
    cos, sin = (torch.cat((x, x), -1).to(k.dtype) for x in (cos, sin))
    first, second = k.chunk(2, -1)
    return k * cos + torch.cat((-second, first), -1) * sin


def keydiff_compress(k: Tensor, v: Tensor, budget: int) -> tuple[Tensor, Tensor, Tensor]:
    indices = select_topk(anchor_cosine(k), budget)
    return *gather_kv(k, v, indices), indices


def lagkv_compress(k: Tensor, v: Tensor, lag: int, ratio: float, sink: int) -> tuple[Tensor, Tensor, Tensor]:
    b, heads, n, _ = k.shape
    scores = lag_score(k, v, lag, sink)
    segments = scores.shape[2]
    kept = select_topk(scores, int(ratio * lag)) + torch.arange(segments, device=k.device)[:, None] * lag + sink
    head = torch.arange(sink, device=k.device).expand(b, heads, -1)
    tail = torch.arange(sink + segments * lag, n, device=k.device).expand(b, heads, -1)
    indices = torch.cat([head, kept.flatten(2), tail], dim=-1)
    return *gather_kv(k, v, indices), indices


def snapkv_compress(k: Tensor, v: Tensor, q: Tensor, budget: int, kernel: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """SnapKV, per KV head: softmax of the window, sum, mean over the group, max-pooling of the prefix, top k."""
    return _snapkv_select(k, v, window_scores(q, k), q.shape[2], budget, kernel)


def snapkv_compress_expanded(k: Tensor, v: Tensor, q: Tensor, budget: int, kernel: int = 7) -> tuple[Tensor, ...]:
    """The same weights, with K repeated for each query head, as in most code."""
    group, w = q.shape[1] // k.shape[1], q.shape[2]
    scores = window_scores(q, k.repeat_interleave(group, 1))
    return _snapkv_select(k, v, scores.unflatten(1, (-1, group)).mean(2), w, budget, kernel)


def _snapkv_select(
    k: Tensor, v: Tensor, scores: Tensor, w: int, budget: int, kernel: int
) -> tuple[Tensor, Tensor, Tensor]:
    n = k.shape[2]
    return _prefix_and_window(k, v, F.max_pool1d(scores[..., : n - w], kernel, 1, kernel // 2), budget)


def _prefix_and_window(k: Tensor, v: Tensor, prefix: Tensor, budget: int) -> tuple[Tensor, Tensor, Tensor]:
    """The highest scores of the prefix, [b, Hk, n - w], and the w tokens after it."""
    b, heads, n, _ = k.shape
    w = n - prefix.shape[2]
    last = torch.arange(n - w, n, device=k.device).expand(b, heads, -1)
    indices = torch.cat([select_topk(prefix, budget - w), last], dim=-1)
    return *gather_kv(k, v, indices), indices


def satkv_compress(k: Tensor, v: Tensor, window: int, budget: int) -> tuple[Tensor, Tensor, Tensor]:
    return _prefix_and_window(k, v, outlier_degree(k[:, :, : k.shape[2] - window]), budget)


def protokv_compress(
    k: Tensor,
    v: Tensor,
    q: Tensor,
    budget: int,
    num_chunks: int,
    projection: Tensor,
    phase: Tensor,
    score: str = "dot",
) -> tuple[Tensor, ...]:
    """ProtoKV with raw dot scores, or score="softmax": [b, Hk, n, d] twice, [b, Hq, w, d] -> K, V, indices."""
    d = k.shape[3]
    w, group = q.shape[2], q.shape[1] // k.shape[1]
    prefix = k[:, :, : k.shape[2] - w]
    sats = select_topk(outlier_degree(prefix), 32)
    buckets = lsh_bucket(prefix, sats, projection, phase)
    prototypes, counts = build_prototypes(prefix, sats, buckets, num_chunks)
    assignment = assign_prototypes(prefix, prototypes)
    if score == "dot":
        scores = grouped_logits(q * d**-0.5, prefix).float().sum(2) / group
    else:
        scores = window_scores(q, k)[..., : prefix.shape[2]]
    means = cluster_mean(scores, assignment, counts.shape[2])
    priority, _ = cluster_priority(scores, assignment, means, budget - w)
    return _prefix_and_window(k, v, priority, budget)


def streamingllm_compress(k: Tensor, v: Tensor, budget: int, sinks: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    n = k.shape[2]
    indices = torch.cat([torch.arange(sinks, device=k.device), torch.arange(n - budget + sinks, n, device=k.device)])
    indices = indices.expand(*k.shape[:2], -1)
    return *gather_kv(k, v, indices), indices


def random_compress(k: Tensor, v: Tensor, budget: int) -> tuple[Tensor, Tensor, Tensor]:
    indices = select_topk(torch.rand(k.shape[:3], device=k.device), budget)
    return *gather_kv(k, v, indices), indices


def kmeans(k: Tensor, count: int, iterations: int = 10) -> Tensor:
    """Lloyd's algorithm by cosine, from tokens at equal distances: [b, Hk, n, d] -> [b, Hk, n]."""
    centers = k[:, :, :: k.shape[2] // count][:, :, :count].float()
    for _ in range(iterations):
        assignment = assign_prototypes(k, centers)
        centers, _ = cluster_centers(k, assignment.long(), count)
    return assignment
