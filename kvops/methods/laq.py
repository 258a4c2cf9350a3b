"""LAQ, the Lookahead Q-Cache: keeps what the first queries of the answer attend to, got from a cheap draft of it.

Source: "Lookahead Q-Cache: Achieving More Consistent KV Cache Eviction via Pseudo Query", Sec. 4 (Eq. 4; LAQ++: Eq. 5),
recall: Sec. 3 (Eq. 1-3). Decisions where paper and released code differ: docs/methods/laq.md.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..cache import AttentionMethod, Method, summed_scores
from ..ops import select_topk
from .common import Compressed, budget_tokens, check_choice, check_head_mode, check_int, check_rank, in_place, moved
from .snapkv import SnapKV
from .window import (
    Pooling,
    causal_limits,
    check_budget,
    check_in_prompt,
    check_queries,
    outside_prefix,
    span_ends,
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
    indices = window_indices(
        op, q, k, visible, budget, w, pool, head_mode, lse, *spans, whole_prefix=not compat_mask, **options
    )
    return moved(op, k, v, indices, out)


laq_compress_ = in_place(laq_compress)


def _limits(op, end, w: int, steps: int, compat_mask: bool, lookahead_lengths: Tensor | None, k: Tensor) -> Tensor:
    """What the w local and the `steps` lookahead rows see: int32 [w + steps] or [b, w + steps]."""
    if compat_mask:
        visible = causal_limits(end, w + steps, k.device)
    else:
        all_keys = causal_limits(end, 1, k.device).expand(*([-1] * (isinstance(end, Tensor))), steps)
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
    keep, spans = budget_tokens(op, budget, k.shape[2]), dict(starts=starts, lengths=lengths)
    options = dict(score=score, scale=scale, softcap=softcap, sink_logits=sink_logits, **spans)
    kept, gold = (
        best_slots(prompt_scores(op, name, q, k, pool, limits, **options), keep, **spans)
        for name, q, limits in (("q_observed", q_observed, visible), ("q_response", q_response, None))
    )
    return (kept & gold).sum(-1).float() / gold.sum(-1).clamp(min=1)


def prompt_scores(
    op: str,
    name: str,
    q: Tensor,
    k: Tensor,
    pool: Pooling,
    visible: Tensor | None = None,
    *,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    **options,
) -> Tensor:
    """What queries say of a prompt's keys, as in `recall`: fp32 [b, Hk, n]. options: score, scale, softcap,
    sink_logits."""
    check_queries(op, name, q, k)
    end = span_ends(k, starts, lengths)
    if visible is None:
        visible = _limits(op, end, 0, q.shape[2], False, None, k)
    scores = summed_scores(q, k, visible, None, starts=starts, group_reduce=pool.operator_reduce, **options)
    return pool(scores, k.shape[1], outside_prefix(k, 0, starts, end))


def best_slots(scores: Tensor, keep: int, starts: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
    """Which slots have the `keep` highest scores, fp32 [b, Hk, n]: bool [b, Hk, n]."""
    *outer, n = scores.shape
    indices = select_topk(scores, keep, starts=starts, lengths=lengths)
    best = torch.zeros(*outer, n + 1, dtype=torch.bool, device=scores.device)
    return best.scatter_(2, torch.where(indices < 0, n, indices), True)[:, :, :n]


class LAQ(AttentionMethod):
    """LAQ's cache of one layer: keeps all of the prompt until a draft of the answer says which of it to keep. ::

        cache.attend(q, k, v)             # the prompt, in one step or in chunks; everything stays
        draft = cache.draft()             # stage 1: a small cache of the same prompt
        draft.attend(q, k, v)             # `steps` tokens of the draft, one by one
        cache.evict(draft)                # stage 2: the budget's best tokens for the draft's queries
        cache.attend(q, k, v)             # decode from the prompt's end; every new token stays

    budget: of both stages; a fraction is one of the tokens seen.
    window: the prompt's last queries that observe beside the draft's, and whose tokens stay: 0 is LAQ, 8 LAQ++.
    steps: tokens that the draft is meant to have.
    stage1: the method of the draft, such as kvops.StreamingLLM(64) or kvops.Full(); None is SnapKV with this budget and
        a window of min(32, budget // 2).

    All other settings as in `laq_compress`.
    """

    def __init__(
        self,
        budget: int | float,
        window: int = 0,
        *,
        steps: int = 8,
        stage1: Method | None = None,
        compat_mask: bool = False,
        kernel_size: int = 7,
        pooling: str = "max",
        pool_first: bool = False,
        score: str = "softmax",
        group_reduce: str = "mean",
        head_mode: str = "per_head",
    ):
        self._pool = Pooling(kernel_size, pooling, pool_first, group_reduce)
        self._pool.check("LAQ")
        check_choice("LAQ", "score", score, ("softmax", "dot"))
        check_head_mode("LAQ", head_mode)
        check_int("LAQ", "window", window, 0)
        check_int("LAQ", "steps", steps, 1)
        if budget_tokens("LAQ", budget, 1) and isinstance(budget, int):
            check_budget("LAQ", budget, 0, window)
        if stage1 is not None and not isinstance(stage1, Method):
            raise TypeError(f"LAQ: stage1 must be a kvops method such as kvops.Full(), got {type(stage1).__name__}")
        if getattr(stage1, "rope", None) is not None:
            raise ValueError("LAQ: stage1 must keep keys as they come, expected no rope=, got one")
        self.budget, self.window, self.steps, self.stage1 = budget, window, steps, stage1
        self.compat_mask, self.score, self.head_mode = compat_mask, score, head_mode
        self.kernel_size, self.pooling, self.pool_first, self.group_reduce = self._pool
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self._options: dict = {}  # the model's scale, softcap and sinks

    def _rows(self, t: int) -> int:
        return 0

    def _remembered(self) -> int:
        """The last queries that are kept: what the window, and the draft's own, may ask for."""
        return max(32, self.window, getattr(self.stage1, "window", 0))

    def attention(self, q: Tensor, k_step: Tensor, v_step: Tensor, *, readers: int = 0, **options) -> Tensor:
        with self._undone_on_error():
            out = super().attention(q, k_step, v_step, readers=readers, **options)
            self._options = options
        return out

    def _scoring(self, score: str, **options) -> dict:
        """What the model's attention says of its logits, for the window operator."""
        options = dict(self._options, score=score, **options)
        if score == "dot":
            options.pop("sink_logits", None)
        return options

    def draft(self) -> Method:
        """Stage 1: a cache with what `stage1` keeps of the prompt, which remembers the queries of its further steps."""
        if self._queries is None:
            raise RuntimeError("LAQ: draft() must follow the attention of a prompt, got none yet")
        method = self.stage1
        if method is None:
            budget = budget_tokens("LAQ", self.budget, self.seen)
            method = SnapKV(budget, max(1, min(32, budget // 2)))
        draft = method.fresh(self.layer, self.num_layers)
        draft.__class__ = _remembering(type(method))
        draft.queries = None
        for name in ("k", "v", "pads", "_padding", "seen", "_kept", "_evicted_at"):  # shared: never written to
            setattr(draft, name, getattr(self, name))
        tokens = draft.k, draft.v, draft.pads, draft.seen
        if isinstance(method, AttentionMethod):
            w, indices = draft._rows(self.seen), None
            if w > self._queries.shape[2]:
                raise ValueError(
                    f"LAQ: stage1 must look at the last queries only, expected at most {self._queries.shape[2]} rows, "
                    f"got {w} of {method!r}"
                )
            if w:
                limits = causal_limits(len(self), w, self.k.device)
                options = self._scoring(draft.score, reduce=draft.reduce, group_reduce=draft._operator_reduce)
                scores = summed_scores(self._queries[:, :, -w:], self.k, limits, None, starts=self.pads, **options)
                indices = draft._evict_by(scores, *tokens)
        else:
            indices = draft._evict(*tokens)
        if indices is not None:
            draft._keep(indices, *tokens)
        return draft

    def evict(self, draft: Method, lookahead_lengths: Tensor | None = None) -> None:
        """Stage 2: keeps what the draft's queries, and the window's, attend to; the draft is emptied.

        lookahead_lengths: int32 [b], how many of the draft's steps count in each row (it ended sooner).
        """
        ahead = getattr(draft, "queries", None)
        if ahead is None:
            raise RuntimeError("LAQ: evict() needs a draft() that has taken at least one step, got none")
        n, w = len(self), self.window
        keep = max(w, budget_tokens("LAQ", self.budget, self.seen))
        if n > keep:
            if self._queries.shape[2] < w:
                raise RuntimeError(
                    f"LAQ: evict() needs the queries of the last {w} tokens, got {self._queries.shape[2]}"
                )
            visible = _limits("LAQ", n, w, ahead.shape[2], self.compat_mask, lookahead_lengths, self.k)
            q = torch.cat((self._queries[:, :, self._queries.shape[2] - w :], ahead), 2)
            spans = (self.pads, None, self.pads is not None)
            options = dict(self._scoring(self.score), whole_prefix=not self.compat_mask)
            indices = window_indices(
                "LAQ", q, self.k, visible, keep, w, self._pool, self.head_mode, None, *spans, **options
            )
            with self._undone_on_error():
                self._keep(indices, self.k, self.v, self.pads, self.seen)
        draft.reset()


class _Remembers:
    """A method that remembers the queries of its steps: [b, Hq, steps, d], or None."""

    uses_queries = True
    queries: Tensor | None = None

    def reset(self) -> None:
        super().reset()
        self.queries = None

    def attention(self, q: Tensor, *args, **options) -> Tensor:
        out = super().attention(q, *args, **options)
        self.queries = q.clone() if self.queries is None else torch.cat((self.queries, q), 2)
        return out


@functools.cache
def _remembering(method: type[Method]) -> type[Method]:
    return type(method.__name__, (_Remembers, method), {"_state": (*method._state, "queries")})
