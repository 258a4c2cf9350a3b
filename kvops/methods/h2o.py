"""H2O: keeps the tokens that all queries so far attended to most, and the newest. TOVA: those that the last query does.

Sources: "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", Zhang et al., 2023;
"Transformers are Multi-State RNNs", Oren et al., 2024 (TOVA). Decisions: docs/methods/.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..cache import AttentionMethod
from ..ops import MAX_WINDOW, window_scores
from .common import (
    Compressed,
    budget_tokens,
    check_choice,
    check_head_mode,
    check_holds,
    in_place,
    moved,
    recent_tokens,
    select_budget,
    shared_scores,
)
from .window import GROUP_REDUCES, causal_limits, check_in_prompt, check_lse, check_queries, span_ends


def h2o_compress(
    k: Tensor,
    v: Tensor,
    q: Tensor,
    budget: int | float,
    *,
    recent: int | float = 0.5,
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
    """H2O in one call. k: [b, Hk, n, d], v: [b, Hk, n, dv] -> (k, v, indices) with min(budget, n) slots. ::

        score[j] = mean over the group's query heads of sum over all queries i of softmax(q_i k)_j       causal

    The newest tokens stay (half of the budget), and of those before the highest scores, per head. The n x n weights are
    never written: blocks of 256 rows are scored and added up.

    q: [b, Hq, t, d], the queries of the last t slots; t = n, the whole prompt, is H2O.
    recent: newest tokens that stay: an int, or a share in [0, 1) of the budget.
    lse: fp32 [b, Hq, t], those rows' log-sum-exp (`kvops.attention`): K is then read once per block, not twice.

    All other arguments as in `snapkv_compress`.
    """
    op = "h2o_compress"
    check_head_mode(op, head_mode)
    check_choice(op, "group_reduce", group_reduce, GROUP_REDUCES)
    check_queries(op, "q", q, k)
    check_in_prompt(op, "q", q, k)
    check_lse(op, lse, q)
    b, heads, n, _ = k.shape
    t, end = q.shape[2], span_ends(k, starts, lengths)
    scores = torch.zeros(b, heads, n, dtype=torch.float32, device=k.device)
    options = dict(scale=scale, softcap=softcap, sink_logits=sink_logits, group_reduce=group_reduce)
    for first in range(0, t, MAX_WINDOW):
        rows = slice(first, min(first + MAX_WINDOW, t))
        seen = n - t + rows.stop  # no row of the block sees more
        visible = causal_limits(seen, rows.stop - rows.start, k.device)
        if isinstance(end, Tensor):  # rows behind the end are padding
            visible = torch.where(visible <= end[:, None], visible, 0)
        block_starts = None if starts is None else starts.clamp(max=seen)
        block_lse = None if lse is None else lse[:, :, rows]
        scores[:, :, :seen] += window_scores(
            q[:, :, rows], k[:, :, :seen], visible, block_lse, starts=block_starts, **options
        )
    if head_mode == "shared":
        scores = shared_scores(scores)
    return moved(op, k, v, select_budget(op, scores, heads, budget, 0, recent, starts, lengths, fill_invalid), out)


h2o_compress_ = in_place(h2o_compress)


def tova_compress(
    k: Tensor,
    v: Tensor,
    q_last: Tensor,
    budget: int | float,
    *,
    lse: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    fill_invalid: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> Compressed:
    """TOVA in one call: the tokens that the last query attends to most, and its own; one set for all heads. ::

        score[j] = mean over all query heads of softmax(q_last k)_j

    q_last: [b, Hq, 1, d], the query of each row's last (valid) token. All other arguments as in `snapkv_compress`.
    """
    op = "tova_compress"
    check_queries(op, "q_last", q_last, k, rows=1)
    check_in_prompt(op, "q_last", q_last, k)
    check_lse(op, lse, q_last)
    visible = causal_limits(span_ends(k, starts, lengths), 1, k.device)
    options = dict(scale=scale, softcap=softcap, sink_logits=sink_logits)
    scores = shared_scores(window_scores(q_last, k, visible, lse, starts=starts, **options))
    indices = select_budget(op, scores, k.shape[1], budget, 0, 1, starts, lengths, fill_invalid)
    return moved(op, k, v, indices, out)


tova_compress_ = in_place(tova_compress)


class H2O(AttentionMethod):
    """H2O's cache of one layer: after every step the newest tokens stay, and those that drew most attention so far.

    The scores are sums over all queries seen since a token came, and travel with the tokens. They cannot be taken back,
    so `crop` refuses. A fraction is one of the tokens seen. Settings as in `h2o_compress`.
    """

    _state = (*AttentionMethod._state, "_scores")
    _by_slot = ("_scores",)

    def __init__(
        self,
        budget: int | float,
        *,
        recent: int | float = 0.5,
        group_reduce: str = "mean",
        head_mode: str = "per_head",
    ):
        check_head_mode("H2O", head_mode)
        check_choice("H2O", "group_reduce", group_reduce, GROUP_REDUCES)
        keep = budget_tokens("H2O", budget, 1)
        window = recent_tokens("H2O", recent, keep)
        if isinstance(budget, int):
            check_holds("H2O", keep, 0, window)
        self.budget, self.recent, self.group_reduce, self.head_mode = budget, recent, group_reduce, head_mode
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self._scores: Tensor | None = None  # fp32 [b, Hk, len]: attention that each slot has drawn

    def crop(self, seen: int) -> None:
        if isinstance(seen, int) and 0 <= seen < self.seen:
            raise ValueError(
                f"H2O: cannot crop to {seen} of {self.seen} tokens: what the later ones attended to is in the scores"
            )
        super().crop(seen)

    def _rows(self, t: int) -> int:
        return t

    def _evict_by(self, scores: Tensor, k: Tensor, v: Tensor, pads: Tensor | None, seen: int) -> Tensor | None:
        if self._scores is not None:
            scores = scores + pad(self._scores, (0, scores.shape[2] - self._scores.shape[2]))
        self._scores = scores
        keep = budget_tokens("H2O", self.budget, seen)
        window = recent_tokens("H2O", self.recent, keep)
        keep = max(keep, window)
        if k.shape[2] <= keep:
            return None
        if self.head_mode == "shared":
            scores = shared_scores(scores)
        return select_budget("H2O", scores, k.shape[1], keep, 0, window, pads, None, pads is not None)


class TOVA(AttentionMethod):
    """TOVA's cache of one layer: after every step the tokens that the last query attends to most, and its own.

    A fraction is one of the tokens seen. Settings as in `tova_compress`.
    """

    def __init__(self, budget: int | float):
        budget_tokens("TOVA", budget, 1)
        self.budget = budget
        super().__init__()

    def _rows(self, t: int) -> int:
        return int(len(self) > budget_tokens("TOVA", self.budget, self.seen))

    def _evict_by(self, scores: Tensor, k: Tensor, v: Tensor, pads: Tensor | None, seen: int) -> Tensor:
        keep = budget_tokens("TOVA", self.budget, seen)
        scores = shared_scores(scores)
        return select_budget("TOVA", scores, k.shape[1], keep, 0, 1, pads, None, pads is not None)
