"""LAQ, the Lookahead Q-Cache: keeps the tokens to which the first queries of a cheaply drafted answer attend.

Source: "Lookahead Q-Cache: Achieving More Consistent KV Cache Eviction via Pseudo Query", Sec. 4 (Eq. 4; LAQ++: Eq. 5).
Decisions where paper and released code differ: docs/methods/laq.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops.checks import check_bool, check_in_prompt, check_int, check_lse, check_queries, check_token_ids
from ..ops.window import causal_limits
from .base import Compressed, Needs, Policy, one_shot
from .budgets import budget_tokens
from .queries import QueryCall, WindowPolicy, split
from .registry import METHODS, Entry, as_policy, table_name
from .view import View


@dataclass(frozen=True, eq=False)
class LAQ(WindowPolicy):
    """LAQ: keeps the whole prompt until a draft of the answer shows which tokens to keep.

    ```text
    s[j]  = sum over the window's rows i of softmax over the prompt's keys of scale * q_i . k_j
    score = max-pooling of the mean of s over the group's query heads
    ```

    A one-shot call (`compress`) is the second stage, given the queries of the draft. A cache runs both stages:

    ```python
    cache = kvops.Cache(kvops.LAQ(1024))
    cache.attend(q, k, v)             # the prompt, in one step or in chunks; everything is kept
    draft = cache.draft()             # stage 1: a small cache of the same prompt
    draft.attend(q, k, v)             # `steps` tokens of the draft, one by one
    cache.evict(draft)                # stage 2: keep the budget's best tokens for the draft's queries
    cache.attend(q, k, v)             # decode from the end of the prompt; every new token is kept
    ```

    Attributes:
        budget: The budget of both stages; see `BudgetPolicy`.
        sinks: See `BudgetPolicy`.
        head_mode: See `BudgetPolicy`.
        group_reduce: See `QueryPolicy`.
        window: How many of the prompt's last queries observe together with the draft's. Their tokens are kept. 0 is
            LAQ, 8 is LAQ++.
        kernel_size: See `WindowPolicy`.
        pooling: See `WindowPolicy`.
        pool_first: See `WindowPolicy`.
        score: See `WindowPolicy`.
        steps: The intended number of tokens in the draft.
        template: Token ids of a fixed text that `kvops.hf` reads in place of a draft, such as those of "The answer is"
            (App. B); () drafts `steps` tokens.
        stage1: The policy of the draft, such as kvops.StreamingLLM(64) or "streamingllm:budget=64", or its name in
            kvops.METHODS, such as "full". A name alone stands for the settings that meet `stage1_budget`: SnapKV then
            has a window of min(32, stage1_budget // 2). Policies that need `w_o` or `statistics` of a model are not
            given by name; `kvops.hf.for_model` fills in those of a policy.
        stage1_budget: The tokens of the draft's cache if stage1 is a name; None is the budget of stage 2.
        compat_mask: Use the mask of the released code, in which row i of all window + steps rows sees keys up to
            n - (window + steps) + i.

    Source: LAQ, Sec. 4, Eq. 4; LAQ++: Eq. 5.
    """

    needs = Needs(dense=False, positions=False, stage="draft")
    argument: ClassVar[str] = "q_lookahead"
    least_window: ClassVar[int] = 0

    window: int = 0
    _: KW_ONLY
    steps: int = 8
    template: tuple[int, ...] = ()
    stage1: Policy | str = "snapkv"
    stage1_budget: int | None = None
    compat_mask: bool = False

    def check_paged_cache(self, num_layers: int, by_head: bool = False) -> None:
        raise ValueError(f"LAQ: a PagedCache cannot draft answers, expected another policy, got {self!r}")

    def check(self) -> None:
        check_int(self.name, "steps", self.steps, 1, 1 << 16)
        check_token_ids(self.name, "template", self.template)
        check_bool(self.name, "compat_mask", self.compat_mask)
        if isinstance(self.stage1, str):
            if ":" in self.stage1:  # with settings of its own
                object.__setattr__(self, "stage1", as_policy(f"{self.name}: stage1", self.stage1))
            else:
                entry_of(self.name, self.stage1)
        elif not isinstance(self.stage1, Policy):
            raise TypeError(
                f"{self.name}: stage1 must be a kvops policy such as kvops.Full(), or a name such as 'full', got "
                f"{type(self.stage1).__name__}"
            )
        elif self.stage1.needs.inputs:
            raise ValueError(
                f"{self.name}: stage1 gets no hidden states of the prompt, expected a policy without needs.inputs, got "
                f"{self.stage1!r}"
            )
        elif self.stage1.needs.statistics:
            raise ValueError(
                f"{self.name}: stage1 gets no queries of the prompt, expected statistics of the model, got "
                f"{self.stage1!r}"
            )
        if self.stage1_budget is not None:
            check_int(self.name, "stage1_budget", self.stage1_budget, 1)
            if isinstance(self.stage1, Policy):
                raise ValueError(
                    f"{self.name}: stage1_budget is for a stage1 given by name, expected None with {self.stage1!r}, "
                    f"got {self.stage1_budget}"
                )
        super().check()

    def check_cache(self, layer: int, num_layers: int) -> None:
        super().check_cache(layer, num_layers)
        # Before the prompt is read, not only when the draft begins.
        if isinstance(self.stage1, Policy):
            self.stage1.check_cache(layer, num_layers)
        elif taken := {"statistics", "w_o"} & {x.name for x in fields(entry_of(self.name, self.stage1).policy)}:  # type: ignore[arg-type]
            raise ValueError(
                f"{self.name}: stage1 by name has no {taken.pop()} of a model, expected a policy, such as "
                f"kvops.hf.for_model('{self.stage1}:budget=64', model), got {self.stage1!r}"
            )

    @property
    def remembers(self) -> int:
        """The number of last queries that a cache keeps, for the window and for the window of the draft's policy."""
        return max(32, self.window, getattr(self.stage1, "window", 0))

    def rows(self, view: View) -> int:
        return 0

    def draft_policy(self, seen: int, num_layers: int | None = None) -> Policy:
        """The policy of stage 1 after `seen` tokens."""
        if isinstance(self.stage1, Policy):
            return self.stage1
        entry = entry_of(self.name, self.stage1)
        budget = self.stage1_budget or budget_tokens(self.budget, seen)
        layers = 1 if num_layers is None else num_layers
        settings = entry.policy.at_budget(budget, seen, layers, False, {}) if entry.policy.budget_settings else {}
        return entry.policy(**settings, **entry.defaults)

    @one_shot
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
        """Run the second stage: evict the whole prompt by the queries of its continuation.

        Args:
            k: [b, Hk, n, d], the keys of the prompt alone.
            v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
            q_lookahead: [b, Hq, steps, d], the queries of tokens that follow the prompt, drafted with any small cache.
                They see all keys of the prompt.
            q_window: [b, Hq, window, d], the queries of the prompt's last tokens (LAQ++). They observe too, each up to
                its own key, and their tokens are kept. Without them (LAQ) none of the newest tokens is protected.
            lookahead_lengths: int32 [b], how many lookahead rows count, if the drafts of some rows ended early.
            **call: See `QueryCall`; lse is fp32 [b, Hq, window + steps], the window's rows first, over exactly the keys
                that each row sees.

        Returns:
            (k, v, indices) of the kept slots; see `Compressed`.

        Raises:
            TypeError: An argument has the wrong type. Nothing has been written.
            ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.
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
                    f"{op}: q_window must have q_lookahead's shape except for its rows (dim 2), expected "
                    f"{list(q_lookahead.shape)}, got {list(q_window.shape)}"
                )
            if q_window.shape[2] != self.window:
                raise ValueError(
                    f"{op}: q_window must have one row for each token of the window, expected {self.window} rows, got "
                    f"{q_window.shape[2]}"
                )
        elif self.window:
            raise ValueError(
                f"{op}: window={self.window} needs q_window, the queries of the last {self.window} tokens, got None"
            )
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
        """Sets `view.observed` to the scores of the `window` local queries and the lookahead queries."""
        view.window = w = self.window
        visible = lookahead_limits(
            self.name, view.end, w, ahead.shape[2], self.compat_mask, lengths, view.rows, view.keys.device
        )
        q = ahead if local is None else torch.cat((local, ahead), 2)
        check_lse(self.name, lse, q)
        self.check_holds(budget_tokens(self.budget, view.n), w)
        view.observed = self.summed(q, view, visible, lse, None if self.compat_mask else view.end - w, logits)

    @classmethod
    def at_budget(
        cls, budget: int, n: int, num_layers: int, streaming: bool, options: dict[str, Any]
    ) -> dict[str, Any]:
        if streaming:
            raise ValueError(
                "LAQ: eviction needs a draft of the answer to a whole prompt, so it cannot run while a text streams in"
            )
        return {"budget": budget}


def entry_of(op: str, stage1: str) -> Entry:
    """The method that drafts, by its name in `METHODS`."""
    name = table_name(stage1)
    if name is None or issubclass(METHODS[name].policy, LAQ):
        names = ", ".join(x for x, entry in METHODS.items() if not issubclass(entry.policy, LAQ))
        raise ValueError(f"{op}: stage1 must be one of {names}, got {stage1!r}")
    return METHODS[name]


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
    """The `visible` limits of the w local and the `steps` lookahead rows: int32 [w + steps] or [b, w + steps]."""
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
                f"{op}: lookahead_lengths must be torch.int32 [{rows}], got {lookahead_lengths.dtype} "
                f"{list(lookahead_lengths.shape)}"
            )
        if lookahead_lengths.is_cpu and not torch.compiler.is_compiling():
            for value in lookahead_lengths.tolist():
                if not 0 <= value <= steps:
                    raise ValueError(f"{op}: lookahead_lengths must lie in [0, {steps}], got {value}")
        counts = torch.arange(w + steps, device=device) < w + lookahead_lengths[:, None]
        visible = torch.where(counts, visible, 0).to(torch.int32)
    return visible
