"""What people write in PyTorch for the same results: the baselines of the benchmark, run as they are and compiled.

The scores follow NVIDIA's kvpress (keydiff_press.py, lagkv_press.py), in the dtype of the inputs, as there. Selection
is torch.topk, and a sort because the kept indices ascend; movement is torch.gather.
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


def window_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[b, Hq, w, d], [b, Hk, n, d] twice -> [b, Hq, w, d], [b, Hq, w], [b, Hk, n]."""
    w, d = q.shape[2:]
    logits = grouped_logits(q * d**-0.5, k)
    weights = window_weights(logits, w)
    first = logits.unflatten(2, (-1, w))[..., 0].float()
    lse = first - weights[..., 0].log()
    out = weights.to(v.dtype) @ v.unsqueeze(2)
    return out.flatten(1, 2), lse.flatten(1, 2), weights.sum(3).mean(2)


def flash(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Tensor]]:
    """FlashAttention of the last rows (without their causal corner) in torch, by the names of the kernels."""
    if q.is_cpu:
        return {"flash": lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)}

    def run(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    kernels = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    return {name: partial(run, backend) for name, backend in kernels.items()}


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
    """Layers of [b, Hk, n, d], the slots [m] that each keeps -> [b, Hk, m, d]; keys turned to the new slots."""
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
    """The same weights, with K repeated for each query head, as most code does."""
    group, w = q.shape[1] // k.shape[1], q.shape[2]
    scores = window_scores(q, k.repeat_interleave(group, 1))
    return _snapkv_select(k, v, scores.unflatten(1, (-1, group)).mean(2), w, budget, kernel)


def _snapkv_select(k, v, scores, w, budget, kernel) -> tuple[Tensor, Tensor, Tensor]:
    b, heads, n, _ = k.shape
    prefix = F.max_pool1d(scores[..., : n - w], kernel, 1, kernel // 2)
    last = torch.arange(n - w, n, device=k.device).expand(b, heads, -1)
    indices = torch.cat([select_topk(prefix, budget - w), last], dim=-1)
    return *gather_kv(k, v, indices), indices
