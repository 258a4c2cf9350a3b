"""H2O: keeps the tokens with the most attention from all queries so far, and the newest. TOVA: from the last query.

Sources: "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", Zhang et al., 2023;
"Transformers are Multi-State RNNs", Oren et al., 2024 (TOVA). Decisions: docs/methods/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops.api import MAX_WINDOW, window_scores
from ..ops.checks import check_in_prompt, check_lse, check_queries
from ..ops.window import causal_limits
from .base import BUFFER, Compressed, HeadMode, Needs, Protect, one_shot
from .budgets import budget_tokens
from .queries import QueryCall, QueryPolicy
from .view import View


@dataclass(frozen=True, eq=False)
class H2O(QueryPolicy):
    """H2O: keeps the newest tokens (half of the budget) and the highest scores among the older ones, per head.

    ```text
    score[j] = mean over the group's query heads of sum over all queries i of softmax(q_i k)_j       causal
    ```

    A one-shot call takes the queries of the last t slots; t = n, the whole prompt, is H2O. The n x n weights are never
    written: blocks of 256 rows are scored and added up.

    In a cache a token's score is the sum over all queries since it was appended, and it moves with the token. Scores
    cannot be subtracted again, so `crop` raises. With group_reduce="max" a cache adds up the maxima of its steps, so
    the result depends on how the tokens are divided into steps; engines refuse that.

    Attributes:
        budget: See `BudgetPolicy`.
        sinks: See `BudgetPolicy`.
        head_mode: See `BudgetPolicy`.
        group_reduce: See `QueryPolicy`.
        buffer: See `KeyPolicy`. The paper's buffer is 1.
        protect: See `KeyPolicy`.
        recent: Newest tokens that are always kept: an int, or a fraction in [0, 1) of the budget (float). With
            head_mode="adaptive" as in `KeyPolicy`.

    Source: H2O, Zhang et al., 2023.
    """

    needs = Needs(dense=False, positions=False, per_slot=("scores",))
    by_head: ClassVar[bool] = True
    argument: ClassVar[str] = "q"
    croppable: ClassVar[bool] = False

    _: KW_ONLY
    buffer: int | float | None = BUFFER
    protect: Protect | None = None
    recent: int | float = 0.5

    @one_shot
    def compress(  # type: ignore[override]  # the queries are no option
        self, k: Tensor, v: Tensor, q: Tensor, **call: Unpack[QueryCall]
    ) -> Compressed:
        """Apply the rule once to a whole cache.

        Args:
            k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
            v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
            q: [b, Hq, t, d], the queries of the last t slots; t = n, the whole prompt, is H2O. Query head h belongs to
                KV head h // (Hq / Hk).
            **call: See `QueryCall`; lse is fp32 [b, Hq, t].

        Returns:
            (k, v, indices) of the kept slots; see `Compressed`.

        Raises:
            TypeError: An argument has the wrong type. Nothing has been written.
            ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.
        """
        return self._by_queries(k, v, q, call)

    def rows(self, view: View) -> int:
        return view.new

    def rows_at(self, n: int, prompt: int) -> int:
        return 0

    def observe(self, view: View, q: Tensor, lse: Tensor | None, logits: Mapping[str, Any]) -> None:
        check_queries(self.name, self.argument, q, view.k)
        check_in_prompt(self.name, self.argument, q, view.n)
        check_lse(self.name, lse, q)
        k, n, end, t = view.k, view.n, view.end, q.shape[2]
        scores = torch.zeros((view.rows, view.heads, n), dtype=torch.float32, device=k.device)
        for first in range(0, t, MAX_WINDOW):
            rows = slice(first, min(first + MAX_WINDOW, t))
            seen = n - t + rows.stop  # no row of the block sees more
            visible = causal_limits(seen, rows.stop - rows.start, k.device)
            if isinstance(end, Tensor):  # rows after the end are padding
                visible = torch.where(visible <= end[:, None], visible, 0)
            part = window_scores(
                q[:, :, rows],
                k if view.block_table is not None else k[:, :, :seen],
                visible,
                lse=None if lse is None else lse[:, :, rows],
                starts=None if view.starts is None else view.starts.clamp(max=seen),
                group_reduce=self.group_reduce,
                block_table=view.block_table,
                **logits,
            )
            scores[:, :, :seen] += part[:, :, :seen]
        view.observed = scores

    def evict(self, view: View) -> Tensor | None:
        scores, before = view.seen_by_queries, view.state.get("scores")
        if before is not None:
            scores[:, :, : before.shape[2]] += before  # in place: no other object uses the step's own scores
        view.state["scores"] = scores
        keep = self.room(view)
        if not self.full(view, keep):
            return None
        return self.choose(scores, view, keep, recent=self.newest(budget_tokens(self.budget, view.seen)))


@dataclass(frozen=True, eq=False)
class TOVA(QueryPolicy):
    """TOVA: keeps the tokens to which the last query attends most, and its own token; one set for all heads.

    ```text
    score[j] = mean over all query heads of softmax(q_last k)_j
    ```

    A one-shot call takes the query of each row's last (valid) token. A cache uses the last query of the step that
    evicts.

    Attributes:
        budget: See `BudgetPolicy`. A budget per head needs head_mode="per_head".
        sinks: See `BudgetPolicy`.
        head_mode: See `BudgetPolicy`. The paper's is "shared".
        group_reduce: See `QueryPolicy`.
        buffer: See `KeyPolicy`. The paper's buffer is 1.
        protect: See `KeyPolicy`.

    Source: TOVA, Oren et al., 2024.
    """

    needs = Needs(dense=False, positions=False)
    argument: ClassVar[str] = "q_last"
    window = 1

    _: KW_ONLY
    head_mode: HeadMode = "shared"
    buffer: int | float | None = BUFFER
    protect: Protect | None = None

    @one_shot
    def compress(  # type: ignore[override]  # the queries are no option
        self, k: Tensor, v: Tensor, q_last: Tensor, **call: Unpack[QueryCall]
    ) -> Compressed:
        """Apply the rule once to a whole cache.

        Args:
            k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
            v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
            q_last: [b, Hq, 1, d], the query of each row's last (valid) token. Query head h belongs to KV head
                h // (Hq / Hk).
            **call: See `QueryCall`; lse is fp32 [b, Hq, 1].

        Returns:
            (k, v, indices) of the kept slots; see `Compressed`.

        Raises:
            TypeError: An argument has the wrong type. Nothing has been written.
            ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.
        """
        return self._by_queries(k, v, q_last, call)

    def rows(self, view: View) -> int:
        return int(self.full(view, self.room(view)))

    def rows_at(self, n: int, prompt: int) -> int:
        return 1

    @property
    def remembers(self) -> int:
        return 0  # the step that evicts has the query
