"""What people write in PyTorch for the same results: the baselines of the benchmark, run as they are and compiled.

The scores follow NVIDIA's kvpress (keydiff_press.py, lagkv_press.py), in the dtype of the inputs, as there. Selection
is torch.topk, and a sort because the kept indices ascend; movement is torch.gather.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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


def select_topk(scores: Tensor, k: int) -> Tensor:
    """[b, Hk, n] -> [b, Hk, k], ascending."""
    return scores.topk(k, dim=-1).indices.sort(dim=-1).values


def gather_kv(k: Tensor, v: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """[b, Hk, n, d] twice, [b, Hk, m] -> [b, Hk, m, d] twice."""
    rows = indices.unsqueeze(-1).expand(-1, -1, -1, k.shape[-1])
    return k.gather(2, rows), v.gather(2, rows)


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
