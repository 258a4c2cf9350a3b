"""Policies whose rule asks how much queries attend to each key.

One call takes the queries that observe (`SnapKV.compress(k, v, q_window)`); in a cache the last rows of a step observe,
and their scores are a by-product of the step's attention. Either way the rule sees `View.observed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, TypedDict

from torch import Tensor
from typing_extensions import Unpack

from ..checks import check_choice, check_holds_window, check_in_prompt, check_int, check_lse, check_queries
from ..window import GROUP_REDUCES, Pooling, causal_limits, outside_prefix, summed_scores
from .base import BudgetPolicy, Compressed, LayerSpans, View
from .budgets import most_tokens

SCORES = ("softmax", "dot")


class Logits(TypedDict, total=False):
    """What the model's attention makes of q . k, as in `kvops.ops.window_scores`.

    scale: 1 / sqrt(d) if None. softcap: 0 for none. sink_logits: fp32 [Hq], one more logit for each softmax.
    """

    scale: float | None
    softcap: float
    sink_logits: Tensor | None


class QueryCall(LayerSpans, Logits, total=False):
    """What `compress` takes beside K, V and the queries.

    lse: fp32 [b, Hq, rows], the log-sum-exp of those rows, as every FlashAttention returns it (`kvops.attention`): K is
        then read once, not twice.
    """

    lse: Tensor | None


@dataclass(frozen=True, eq=False)
class QueryPolicy(BudgetPolicy):
    """A policy that scores tokens by the attention of queries.

    Attributes:
        budget, sinks, head_mode: see `BudgetPolicy`.
        group_reduce: "mean", "max" or "sum": how the query heads of a KV head become one score.
    """

    uses_queries: ClassVar[bool] = True
    #: What `compress` and errors call the queries.
    argument: ClassVar[str] = "q_window"
    #: The observing rows' own tokens stay in any case: the rule asks for no scores of theirs.
    protects_window: ClassVar[bool] = False
    #: How the rows become one score, and what a row's score is: see `kvops.ops.window_scores`.
    reduce: ClassVar[str] = "sum"
    score = "softmax"
    #: Rows that observe, the last ones; their tokens stay.
    window = 0

    _: KW_ONLY
    group_reduce: str = "mean"

    def check(self) -> None:
        check_choice(self.name, "score", self.score, SCORES)
        check_choice(self.name, "group_reduce", self.group_reduce, GROUP_REDUCES)
        super().check()

    def check_holds(self, keep: int, newest: int) -> None:
        if self.sinks:
            BudgetPolicy.check_holds(self, keep, newest)
        check_holds_window(self.name, keep, newest)

    def newest(self, keep: int) -> int:
        return self.window

    @property
    def operator_reduce(self) -> str:
        """What the operator does with the query heads of a group; "none" leaves it to `scores`."""
        return self.group_reduce

    @property
    def remembers(self) -> int:
        """How many of the last queries a cache keeps for later."""
        return 0

    def rows(self, view: View) -> int:
        """How many rows of a cache's step, the last ones, observe. 0: nothing is evicted now."""
        raise NotImplementedError

    def rows_at(self, n: int, prompt: int) -> int:
        """How many rows, the last ones, observe when a request of a `PagedCache` evicts after n tokens.

        0: all of each step do, and the policy adds up what they observe (`by_slot`).
        """
        return self.window if n <= prompt else 0

    def rows_remembered(self, view: View) -> int:
        """How many of the rows that a cache remembers observe after a step of which none does."""
        return 0

    def compress(  # type: ignore[override]  # the queries are no option
        self, k: Tensor, v: Tensor, q_window: Tensor, **call: Unpack[QueryCall]
    ) -> Compressed:
        """The rule in one call.

        Args:
            k: [b, Hk, n, d].
            v: [b, Hk, n, dv].
            q_window: [b, Hq, w, d], the queries that observe: of the last w (valid) tokens of each row. Query head h
                serves KV head h // (Hq / Hk). Shorter rows ignore the first.
            call: lse, scale, softcap, sink_logits, starts, lengths, fill_invalid, out; see `QueryCall`.

        Returns:
            (k, v, indices) with the slots that stay.

        Raises:
            TypeError, ValueError: wrong arguments; nothing has been written.
        """
        logits, lse, spans = split(call)
        view, out = self._view(k, v, **spans)
        self.observe(view, q_window, lse, logits)
        return self._compress(view, out)

    def observe(self, view: View, q: Tensor, lse: Tensor | None, logits: Mapping[str, Any]) -> None:
        """Sets what the queries of a prompt's last tokens observe."""
        check_queries(self.name, self.argument, q, view.k)
        check_in_prompt(self.name, self.argument, q, view.n)
        check_lse(self.name, lse, q)
        view.window = w = q.shape[2]
        if w > self.window:
            raise ValueError(f"{self.name}: {self.argument} must have at most window, {self.window}, rows, got {w}")
        self.check_holds(most_tokens(self.name, self.budget, view.n), w)
        limits = causal_limits(view.end, w, view.k.device)
        view.observed = self.summed(q, view, limits, lse, view.end - w, logits)

    def summed(
        self,
        q: Tensor,
        view: View,
        visible: Tensor,
        lse: Tensor | None,
        prefix: int | Tensor | None,
        logits: Mapping[str, Any],
    ) -> Tensor | None:
        """The scores of rows that see what `visible` says; see `summed_scores`."""
        options = {"score": self.score, "reduce": self.reduce, "group_reduce": self.operator_reduce, **logits}
        return summed_scores(
            q, view.k, visible, lse, prefix, starts=view.starts, block_table=view.block_table, **options
        )

    def scores(self, view: View) -> Tensor:
        return view.seen_by_queries

    def pick(self, scores: Tensor, view: View) -> Tensor:
        return self.choose(scores, view, self.budget, recent=view.window)

    def evict(self, view: View) -> Tensor | None:
        return self.choose(self.scores(view), view, self.room(view), recent=view.window)


def split(call: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor | None, dict[str, Any]]:
    """The arguments of a call, by who takes them: the logits, their log-sum-exp, and the rest."""
    rest = dict(call)
    logits = {name: rest.pop(name) for name in Logits.__annotations__ if name in rest}
    return logits, rest.pop("lse", None), rest


@dataclass(frozen=True, eq=False)
class WindowPolicy(QueryPolicy):
    """A policy that scores tokens by an observation window, pooled over neighbours.

    Attributes:
        budget, sinks, head_mode, group_reduce: see `QueryPolicy`. The budget holds the window.
        window: the last rows of a prompt observe, and their tokens stay. In a cache a step of at least as many tokens
            brings it to the budget; shorter ones add to it.
        kernel_size: odd; 1 does not pool.
        pooling: "max", or "avg" (over kernel_size slots, those outside counting as 0).
        pool_first: pools each query head, then reduces the group.
        score: "softmax", or "dot": the sum of the logits themselves.
    """

    protects_window: ClassVar[bool] = True

    window: int = 32
    _: KW_ONLY
    kernel_size: int = 7
    pooling: str = "max"
    pool_first: bool = False
    score: str = "softmax"

    def check(self) -> None:
        self.pool.check(self.name)
        check_int(self.name, "window", self.window, self.least_window)
        super().check()

    @property
    def least_window(self) -> int:
        """The fewest rows that can be asked to observe."""
        return 1

    @property
    def pool(self) -> Pooling:
        return Pooling(self.kernel_size, self.pooling, self.pool_first, self.group_reduce)

    @property
    def operator_reduce(self) -> str:
        return self.pool.operator_reduce

    def scores(self, view: View) -> Tensor:
        outside = outside_prefix(view.seen_by_queries, view.window, view.starts, view.end)
        return self.pool(view.seen_by_queries, view.heads, outside)

    def rows(self, view: View) -> int:
        return self.window if view.new >= self.window and view.n > self.room(view) else 0

    @classmethod
    def at_budget(
        cls, budget: int, n: int, num_layers: int, streaming: bool, options: dict[str, Any]
    ) -> dict[str, Any]:
        """An observation window of 32 tokens, of half the budget where that is less."""
        return {"budget": budget, "window": max(1, min(32, budget // 2))}


def window_rows(q: Tensor) -> int:
    """How many rows are about to observe; 1 for what is no such tensor, which `compress` refuses."""
    return max(1, q.shape[2]) if isinstance(q, Tensor) and q.dim() == 4 else 1
