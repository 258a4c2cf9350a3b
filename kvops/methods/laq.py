"""LAQ, the Lookahead Q-Cache: keeps what the first queries of the answer attend to, got from a cheap draft of it.

Source: "Lookahead Q-Cache: Achieving More Consistent KV Cache Eviction via Pseudo Query", Sec. 4 (Eq. 4; LAQ++: Eq. 5),
recall: Sec. 3 (Eq. 1-3). Decisions where paper and released code differ: docs/methods.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import select_topk
from .common import Compressed, budget_tokens, check_rank, in_place, moved
from .window import (
    Pooling,
    causal_limits,
    check_in_prompt,
    check_queries,
    outside_prefix,
    span_ends,
    summed_scores,
    window_indices,
)


def laq_compress(
    k: Tensor,
    v: Tensor,
    q_lookahead: Tensor,
    budget: int | float,
    *,
    q_window: Tensor | None = None,
    lookahead_lengths: Tensor | None = None,
    compat_mask: bool = False,
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
    """LAQ's second stage in one call: re-evicts the whole prompt by queries of its continuation. ::

        s[j]  = sum over the window's rows i of softmax over the prompt's keys of scale * q_i . k_j
        score = max-pooling of the mean of s over the group's query heads

    k: [b, Hk, n, d], v: [b, Hk, n, dv], the prompt alone. -> (k, v, indices) with min(budget, n) slots.

    q_lookahead: [b, Hq, steps, d], the queries of tokens that follow the prompt (drafted with any small cache). They
        see all of its keys. None of the newest tokens is protected (LAQ), unless
    q_window: [b, Hq, w, d], the queries of its last w tokens, are given too (LAQ++): they observe beside the others,
        each up to its own key, and their tokens stay.
    lookahead_lengths: int32 [b], how many of the lookahead rows count (the draft of some rows ended sooner).
    compat_mask: the released code's mask, in which row i of all w + steps sees keys up to n - (w + steps) + i.
    lse: fp32 [b, Hq, w + steps], the window's rows first, over exactly the keys seen.

    All other arguments as in `snapkv_compress`.
    """
    op = "laq_compress"
    pool = Pooling(kernel_size, pooling, pool_first, group_reduce)
    check_queries(op, "q_lookahead", q_lookahead, k)
    steps, w, end = q_lookahead.shape[2], 0, span_ends(k, starts, lengths)
    if q_window is not None:
        check_queries(op, "q_window", q_window, k)
        check_in_prompt(op, "q_window", q_window, k)
        if q_window.shape[:2] != q_lookahead.shape[:2] or q_window.shape[3] != q_lookahead.shape[3]:
            raise ValueError(
                f"{op}: q_window must be like q_lookahead but for its rows, expected {list(q_lookahead.shape)}, got "
                f"{list(q_window.shape)}"
            )
        w = q_window.shape[2]
    visible = _limits(op, end, w, steps, compat_mask, lookahead_lengths, k)
    q = q_lookahead if q_window is None else torch.cat((q_window, q_lookahead), 2)
    options = dict(score=score, scale=scale, softcap=softcap, sink_logits=sink_logits)
    spans = (starts, lengths, fill_invalid)
    indices = window_indices(op, q, k, visible, budget, w, pool, head_mode, lse, *spans, **options)
    return moved(op, k, v, indices, out)


laq_compress_ = in_place(laq_compress)


def _limits(op, end, w: int, steps: int, compat_mask: bool, lookahead_lengths: Tensor | None, k: Tensor) -> Tensor:
    """What the w local and the `steps` lookahead rows see: int32 [w + steps] or [b, w + steps]."""
    if compat_mask:
        visible = causal_limits(end, w + steps, k.device)
    else:
        all_keys = causal_limits(end, 1, k.device).expand(*([-1] * (not isinstance(end, int))), steps)
        visible = torch.cat((causal_limits(end, w, k.device), all_keys), -1)
    if lookahead_lengths is not None:
        b = k.shape[0]
        if not isinstance(lookahead_lengths, Tensor):
            raise TypeError(f"{op}: lookahead_lengths must be a torch.Tensor, got {type(lookahead_lengths).__name__}")
        if lookahead_lengths.dtype != torch.int32 or lookahead_lengths.shape != (b,):
            raise ValueError(
                f"{op}: lookahead_lengths must be int32 [{b}], got {lookahead_lengths.dtype} "
                f"{list(lookahead_lengths.shape)}"
            )
        if lookahead_lengths.is_cpu and not torch.compiler.is_compiling():
            for value in lookahead_lengths.tolist():
                if not 0 <= value <= steps:
                    raise ValueError(f"{op}: lookahead_lengths must lie in [0, {steps}], got {value}")
        counts = torch.arange(w + steps, device=k.device) < w + lookahead_lengths[:, None]
        visible = torch.where(counts, visible, 0).to(torch.int32)
    return visible


def recall(
    k: Tensor,
    q_observed: Tensor,
    q_response: Tensor,
    budget: int | float,
    *,
    visible: Tensor | None = None,
    kernel_size: int = 1,
    pooling: str = "max",
    pool_first: bool = False,
    score: str = "softmax",
    group_reduce: str = "mean",
    scale: float | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """How much of what the answer's queries would keep an observation window keeps (LAQ's Recall_W): fp32 [b, Hk]. ::

        gold   = the budget's best keys by the sum over the response's rows      (Eq. 1)
        kept   = the same by the window's rows                                   (Eq. 2)
        recall = |kept and gold| / |gold|                                        (Eq. 3)

    k: [b, Hk, n, d], the prompt's keys. q_observed: [b, Hq, w, d], q_response: [b, Hq, any, d], which see all of k.
    visible: int32 [w] or [b, w], how many keys each observed row sees (a window inside the prompt); all by default.
    score: "softmax", or "dot" as the equations are printed. Pooling is off unless kernel_size says otherwise. All other
        arguments as in `snapkv_compress`.
    """
    op = "recall"
    pool = Pooling(kernel_size, pooling, pool_first, group_reduce)
    pool.check(op)
    check_rank(op, k)
    heads, n = k.shape[1:3]
    keep, end = budget_tokens(op, budget, n), span_ends(k, starts, lengths)
    options = dict(
        score=score, scale=scale, softcap=softcap, sink_logits=sink_logits, group_reduce=pool.operator_reduce
    )

    def best(name: str, q: Tensor, limits: Tensor | None) -> Tensor:
        """bool [b, Hk, n + 1]: the slots that these queries keep."""
        check_queries(op, name, q, k)
        if limits is None:
            limits = _limits(op, end, 0, q.shape[2], False, None, k)
        scores = pool(summed_scores(q, k, limits, None, starts, **options), heads, outside_prefix(k, 0, starts, end))
        indices = select_topk(scores, keep, starts=starts, lengths=lengths)
        chosen = torch.zeros(*scores.shape[:2], n + 1, dtype=torch.bool, device=k.device)
        return chosen.scatter_(2, torch.where(indices < 0, n, indices), True)[:, :, :n]

    kept, gold = best("q_observed", q_observed, visible), best("q_response", q_response, None)
    return (kept & gold).sum(-1) / gold.sum(-1).clamp(min=1)
