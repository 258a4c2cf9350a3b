"""H2O: keeps the tokens that all queries so far attended to most, and the newest. TOVA: those that the last query does.

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

from ..checks import check_in_prompt, check_lse, check_queries, check_recent
from ..ops import MAX_WINDOW, window_scores
from ..window import causal_limits
from .base import BudgetPolicy, Compressed, DecodePolicy, View
from .budgets import budget_tokens, recent_tokens
from .queries import QueryCall, QueryPolicy


@dataclass(frozen=True, eq=False)
class H2O(DecodePolicy, QueryPolicy):
    """H2O: the newest tokens stay (half of the budget), and of those before the highest scores, per head. ::

        score[j] = mean over the group's query heads of sum over all queries i of softmax(q_i k)_j       causal

    One call takes the queries of the last t slots; t = n, the whole prompt, is H2O. The n x n weights are never
    written: blocks of 256 rows are scored and added up.

    In a cache the scores are sums over all queries seen since a token came, and travel with the tokens. They cannot be
    taken back, so `crop` refuses.

    Attributes:
        budget, sinks, head_mode, group_reduce: see `QueryPolicy`. buffer: see `DecodePolicy`; 1 is the paper's.
        recent: newest tokens that stay: an int, or a share in [0, 1) of the budget; with head_mode="adaptive" as in
            `KeyPolicy`.
    """

    uses_positions: ClassVar[bool] = False

    by_head: ClassVar[bool] = True
    argument: ClassVar[str] = "q"
    by_slot: ClassVar[tuple[str, ...]] = ("scores",)
    croppable: ClassVar[bool] = False

    _: KW_ONLY
    recent: int | float = 0.5

    @property
    def paged(self) -> bool:
        return True

    def check(self) -> None:
        check_recent(self.name, self.recent)
        super().check()

    def check_holds(self, keep: int, newest: int) -> None:
        BudgetPolicy.check_holds(self, keep, newest)

    def compress(  # type: ignore[override]  # the queries are no option
        self, k: Tensor, v: Tensor, q: Tensor, **call: Unpack[QueryCall]
    ) -> Compressed:
        """The rule in one call.

        Args:
            k: [b, Hk, n, d].
            v: [b, Hk, n, dv].
            q: [b, Hq, t, d], the queries of the last t slots; t = n, the whole prompt, is H2O. Query head h serves KV
                head h // (Hq / Hk).
            call: see `QueryCall`; lse: fp32 [b, Hq, t].

        Returns:
            (k, v, indices) with the slots that stay.

        Raises:
            TypeError, ValueError: wrong arguments; nothing has been written.
        """
        return super().compress(k, v, q, **call)

    def newest(self, keep: int) -> int:
        return recent_tokens(self.name, self.recent, keep)

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
            if isinstance(end, Tensor):  # rows behind the end are padding
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

    def pick(self, scores: Tensor, view: View) -> Tensor:
        return self.choose(scores, view, self.budget, recent=self.recent)

    def evict(self, view: View) -> Tensor | None:
        scores, before = view.seen_by_queries, view.state.get("scores")
        if before is not None:
            scores[:, :, : before.shape[2]] += before  # the step's own scores are nobody else's
        view.state["scores"] = scores
        keep = self.room(view)
        if not self.full(view, keep):
            return None
        return self.choose(scores, view, keep, recent=self.newest(budget_tokens(self.name, self.budget, view.seen)))


@dataclass(frozen=True, eq=False)
class TOVA(DecodePolicy, QueryPolicy):
    """TOVA: the tokens that the last query attends to most, and its own; one set for all heads. ::

        score[j] = mean over all query heads of softmax(q_last k)_j

    One call takes the query of each row's last (valid) token; in a cache that of the step that evicts observes.

    Attributes:
        budget, sinks, head_mode, group_reduce: see `QueryPolicy`; head_mode="per_head" is not the paper's.
        buffer: see `DecodePolicy`; 1 is the paper's.
    """

    uses_positions: ClassVar[bool] = False

    argument: ClassVar[str] = "q_last"
    window = 1

    _: KW_ONLY
    head_mode: str = "shared"

    @property
    def paged(self) -> bool:
        return True

    def compress(  # type: ignore[override]  # the queries are no option
        self, k: Tensor, v: Tensor, q_last: Tensor, **call: Unpack[QueryCall]
    ) -> Compressed:
        """The rule in one call.

        Args:
            k: [b, Hk, n, d].
            v: [b, Hk, n, dv].
            q_last: [b, Hq, 1, d], the query of each row's last (valid) token. Query head h serves KV head h // (Hq /
                Hk).
            call: see `QueryCall`; lse: fp32 [b, Hq, 1].

        Returns:
            (k, v, indices) with the slots that stay.

        Raises:
            TypeError, ValueError: wrong arguments; nothing has been written.
        """
        return super().compress(k, v, q_last, **call)

    def rows(self, view: View) -> int:
        return int(self.full(view, self.room(view)))

    def rows_at(self, n: int, prompt: int) -> int:
        return 1
