"""LAQ, the Lookahead Q-Cache: keeps what the first queries of the answer attend to, got from a cheap draft of it.

Source: "Lookahead Q-Cache: Achieving More Consistent KV Cache Eviction via Pseudo Query", Sec. 4 (Eq. 4; LAQ++: Eq. 5).
Decisions where paper and released code differ: docs/methods/laq.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..checks import check_bool, check_in_prompt, check_int, check_lse, check_queries
from ..window import causal_limits
from .base import Compressed, Policy, View
from .budgets import budget_tokens, most_tokens
from .queries import QueryCall, WindowPolicy, split
from .snapkv import SnapKV


@dataclass(frozen=True, eq=False)
class LAQ(WindowPolicy):
    """LAQ: keeps all of the prompt until a draft of the answer says which of it to keep. ::

        s[j]  = sum over the window's rows i of softmax over the prompt's keys of scale * q_i . k_j
        score = max-pooling of the mean of s over the group's query heads

    One call (`compress`) is the second stage, given the draft's queries. A cache does both::

        cache = kvops.Cache(kvops.LAQ(1024))
        cache.attend(q, k, v)             # the prompt, in one step or in chunks; everything stays
        draft = cache.draft()             # stage 1: a small cache of the same prompt
        draft.attend(q, k, v)             # `steps` tokens of the draft, one by one
        cache.evict(draft)                # stage 2: the budget's best tokens for the draft's queries
        cache.attend(q, k, v)             # decode from the prompt's end; every new token stays

    Attributes:
        budget: of both stages.
        window: the prompt's last queries that observe beside the draft's, and whose tokens stay: 0 is LAQ, 8 LAQ++.
        steps: tokens that the draft is meant to have.
        stage1: the policy of the draft, such as kvops.StreamingLLM(64) or kvops.Full(); None is SnapKV with this budget
            and a window of min(32, budget // 2).
        compat_mask: the released code's mask, in which row i of all window + steps sees keys up to n - (window + steps)
            + i.

    For the others see `WindowPolicy`.
    """

    window: int = 0
    _: KW_ONLY
    steps: int = 8
    stage1: Policy | None = None
    compat_mask: bool = False

    def check_paged_cache(self, num_layers: int, by_head: bool = False) -> None:
        raise ValueError(f"LAQ: a PagedCache drafts no answers, expected another policy, got {self!r}")

    @property
    def paged(self) -> bool:
        return True

    def check(self) -> None:
        check_int(self.name, "steps", self.steps, 1)
        check_bool(self.name, "compat_mask", self.compat_mask)
        if self.stage1 is not None and not isinstance(self.stage1, Policy):
            raise TypeError(
                f"{self.name}: stage1 must be a kvops policy such as kvops.Full(), got {type(self.stage1).__name__}"
            )
        super().check()

    @property
    def least_window(self) -> int:
        return 0

    @property
    def remembers(self) -> int:
        """The last queries that a cache keeps: what the window, and the draft's own, may ask for."""
        return max(32, self.window, getattr(self.stage1, "window", 0))

    def rows(self, view: View) -> int:
        return 0

    def draft_policy(self, seen: int) -> Policy:
        """Stage 1's policy, when so many tokens have been seen."""
        if self.stage1 is not None:
            return self.stage1
        budget = budget_tokens(self.name, self.budget, seen)
        return SnapKV(budget, max(1, min(32, budget // 2)))

    def compress(  # type: ignore[override]  # the lookahead's queries, and which of them count
        self,
        k: Tensor,
        v: Tensor,
        q_lookahead: Tensor,
        *,
        q_window: Tensor | None = None,
        lookahead_lengths: Tensor | None = None,
        **call: Unpack[QueryCall],
    ) -> Compressed:
        """The second stage in one call: re-evicts the whole prompt by queries of its continuation.

        Args:
            k: [b, Hk, n, d], of the prompt alone.
            v: [b, Hk, n, dv].
            q_lookahead: [b, Hq, steps, d], the queries of tokens that follow the prompt (drafted with any small
                cache). They see all of its keys. None of the newest tokens is protected (LAQ), unless
            q_window: [b, Hq, window, d], the queries of its last tokens, are given too (LAQ++): they observe beside the
                others, each up to its own key, and their tokens stay.
            lookahead_lengths: int32 [b], how many of the lookahead rows count (the draft of some rows ended sooner).
            call: see `QueryCall`; lse: fp32 [b, Hq, window + steps], the window's rows first, over exactly the keys
                seen.

        Returns:
            (k, v, indices) with the slots that stay.

        Raises:
            TypeError, ValueError: wrong arguments; nothing has been written.
        """
        logits, lse, spans = split(call)
        view, out = self._view(k, v, **spans)
        op = self.name
        check_queries(op, "q_lookahead", q_lookahead, k)
        if q_window is not None:
            check_queries(op, "q_window", q_window, k)
            check_in_prompt(op, "q_window", q_window, view.n)
            if q_window.shape[:2] != q_lookahead.shape[:2] or q_window.shape[3] != q_lookahead.shape[3]:
                raise ValueError(
                    f"{op}: q_window must be like q_lookahead but for its rows, expected {list(q_lookahead.shape)}, "
                    f"got {list(q_window.shape)}"
                )
            if q_window.shape[2] != self.window:
                raise ValueError(f"{op}: q_window must have window, {self.window}, rows, got {q_window.shape[2]}")
        elif self.window:
            raise ValueError(f"{op}: window={self.window} needs the queries of as many tokens, expected q_window")
        self.observe_draft(view, q_window, q_lookahead, lookahead_lengths, lse, logits)
        return self._compress(view, out)

    def observe_draft(
        self,
        view: View,
        local: Tensor | None,
        ahead: Tensor,
        lengths: Tensor | None,
        lse: Tensor | None,
        logits: Mapping[str, Any],
    ) -> None:
        """Sets what the `window` local and the lookahead queries observe."""
        view.window = w = self.window
        visible = lookahead_limits(
            self.name, view.end, w, ahead.shape[2], self.compat_mask, lengths, view.rows, view.k.device
        )
        q = ahead if local is None else torch.cat((local, ahead), 2)
        check_lse(self.name, lse, q)
        self.check_holds(most_tokens(self.name, self.budget, view.n), w)
        view.observed = self.summed(q, view, visible, lse, None if self.compat_mask else view.end - w, logits)

    @classmethod
    def at_budget(
        cls, budget: int, n: int, num_layers: int, streaming: bool, options: dict[str, Any]
    ) -> dict[str, Any]:
        if streaming:
            raise ValueError(
                "LAQ: evicts by a draft of the answer to a whole prompt, so not while a text is being read"
            )
        return {"budget": budget}


def lookahead_limits(
    op: str,
    end: Tensor | int,
    w: int,
    steps: int,
    compat_mask: bool,
    lookahead_lengths: Tensor | None,
    rows: int,
    device: torch.device,
) -> Tensor:
    """What the w local and the `steps` lookahead rows see: int32 [w + steps] or [b, w + steps]."""
    if compat_mask:
        visible = causal_limits(end, w + steps, device)
    else:
        all_keys = causal_limits(end, 1, device).expand(*([-1] * (isinstance(end, Tensor))), steps)
        visible = torch.cat((causal_limits(end, w, device), all_keys), -1)
    if lookahead_lengths is not None:
        if not isinstance(lookahead_lengths, Tensor):
            raise TypeError(f"{op}: lookahead_lengths must be a torch.Tensor, got {type(lookahead_lengths).__name__}")
        if lookahead_lengths.dtype != torch.int32 or lookahead_lengths.shape != (rows,):
            raise ValueError(
                f"{op}: lookahead_lengths must be int32 [{rows}], got {lookahead_lengths.dtype} "
                f"{list(lookahead_lengths.shape)}"
            )
        if lookahead_lengths.is_cpu and not torch.compiler.is_compiling():
            for value in lookahead_lengths.tolist():
                if not 0 <= value <= steps:
                    raise ValueError(f"{op}: lookahead_lengths must lie in [0, {steps}], got {value}")
        counts = torch.arange(w + steps, device=device) < w + lookahead_lengths[:, None]
        visible = torch.where(counts, visible, 0).to(torch.int32)
    return visible
