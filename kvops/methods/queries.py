"""Policies that score keys by the attention of queries.

A one-shot call takes the observing queries as an argument (`SnapKV.compress(k, v, q_window)`). In a cache the last rows
of a step observe, and their scores are a by-product of the step's attention. Either way the rule reads the scores from
`View.observed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, TypedDict, get_args

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops.api import Reduce
from ..ops.checks import check_choice, check_in_prompt, check_int, check_lse, check_queries
from ..ops.window import GROUP_REDUCES, Pool, Pooling, causal_limits, outside_prefix, summed_scores
from .base import BUFFER, BudgetPolicy, Compressed, LayerSpans, Protect, one_shot
from .budgets import Budget, budget_tokens
from .view import View

Score = Literal["softmax", "dot", "drop"]
SCORES: tuple[Score, ...] = get_args(Score)


class Logits(TypedDict, total=False):
    """How the model's attention computes logits from q . k, as in `kvops.ops.window_scores`.

    Attributes:
        scale: The factor of the logits; 1 / sqrt(d) if None.
        softcap: The cap of the logits; 0 for none.
        sink_logits: fp32 [Hq], one more logit in each row's softmax that belongs to no key.
    """

    scale: float | None
    softcap: float
    sink_logits: Tensor | None


class QueryCall(LayerSpans, Logits, total=False):
    """The options of `compress` for policies that use queries: `LayerSpans`, `Logits` and the log-sum-exp.

    Attributes:
        lse: fp32 [b, Hq, rows], the log-sum-exp of the query rows, as every FlashAttention returns it
            (`kvops.attention`). With it the kernel reads K once instead of twice.
    """

    lse: Tensor | None


@dataclass(frozen=True, eq=False)
class QueryPolicy(BudgetPolicy):
    """A policy that scores tokens by the attention of queries.

    Attributes:
        budget: See `BudgetPolicy`.
        sinks: See `BudgetPolicy`.
        head_mode: See `BudgetPolicy`.
        group_reduce: How the scores of the query heads of a KV head are reduced to one: "mean", "max" or "sum".
    """

    argument: ClassVar[str] = "q_window"
    #: The tokens of the observing rows are always kept, so the rule does not need their scores.
    protects_window: ClassVar[bool] = False
    #: The smallest possible `window`.
    least_window: ClassVar[int] = 1
    #: How the rows' scores are reduced to one, as in `kvops.ops.window_scores`, and what they are: see `WindowPolicy`.
    reduce: ClassVar[str] = "sum"
    score = "softmax"

    _: KW_ONLY
    group_reduce: Reduce = "mean"

    def check(self) -> None:
        check_choice(self.name, "score", self.score, SCORES)
        check_choice(self.name, "group_reduce", self.group_reduce, GROUP_REDUCES)
        if self.score == "drop" and any(rows != "sum" for rows, _ in self.reductions):
            raise ValueError(
                f"{self.name}: score='drop' is a sum over the rows, which this policy also reduces in other ways, "
                "expected 'softmax' or 'dot', got 'drop'"
            )
        if self.needs.per_slot and len(self.reductions) > 1:
            raise ValueError(
                f"{self.name}: caches add up the scores of one reduction for needs.per_slot, expected one in "
                f"reductions, got {self.reductions}"
            )
        super().check()

    def protected(self, view: View) -> int | float:
        return view.window if self.window or view.window else super().protected(view)

    def protected_in_cache(self, view: View) -> int:
        return view.window if self.window or view.window else super().protected_in_cache(view)

    @property
    def operator_reduce(self) -> str:
        """The `group_reduce` of the operator; with "none" `scores` reduces the query heads."""
        return self.group_reduce

    @property
    def reductions(self) -> tuple[tuple[str, str], ...]:
        """`reduce` and `group_reduce` of the operator. The scores of further pairs follow the first as more heads."""
        return ((self.reduce, self.operator_reduce),)

    @property
    def decode_window(self) -> int:
        """How many of the last queries observe in decode, if the policy evicts then. A cache remembers them."""
        return self.window

    @property
    def remembers(self) -> int:
        """How many of the last queries a cache keeps for later steps."""
        return 0 if self.buffer is None else self.decode_window

    def rows(self, view: View) -> int:
        """How many of the last rows of a cache's step observe. 0 means that nothing is evicted now."""
        if not self.window:
            raise NotImplementedError
        return self.window if self.of_prompt(view) and self.full(view, self.room(view)) else 0

    def rows_at(self, n: int, prompt: int) -> int:
        """How many of the last rows observe when a request of a `PagedCache` evicts after n tokens.

        0 means that all rows of each step observe, and the policy adds up their scores (`Needs.per_slot`).
        """
        return self.window if n <= prompt else self.remembers

    def rows_remembered(self, view: View) -> int:
        """How many of the remembered rows observe after a step in which no row observes."""
        return self.remembers if not self.of_prompt(view) and self.full(view, self.room(view)) else 0

    @one_shot
    def compress(  # type: ignore[override]  # the queries are no option
        self, k: Tensor, v: Tensor, q_window: Tensor, **call: Unpack[QueryCall]
    ) -> Compressed:
        """Apply the rule once to a whole cache.

        Args:
            k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
            v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
            q_window: [b, Hq, w, d], the observing queries: those of the last w (valid) tokens of each row. Query head h
                belongs to KV head h // (Hq / Hk). Rows with fewer than w tokens ignore the first queries.
            **call: lse, scale, softcap, sink_logits, starts, lengths, fill_invalid, out, block_table, layout, layer,
                num_layers; see `QueryCall`, `LayerSpans` and `Spans`.

        Returns:
            (k, v, indices) of the kept slots; see `Compressed`.

        Raises:
            TypeError: An argument has the wrong type. Nothing has been written.
            ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.
        """
        return self._by_queries(k, v, q_window, call)

    def _by_queries(self, k: Tensor, v: Tensor, q: Tensor, call: Mapping[str, Any]) -> Compressed:
        logits, lse, spans = split(call)
        view, out = self._view(k, v, **spans)
        self.observe(view, q, lse, logits)
        return self._compress(view, out)

    def observe(self, view: View, q: Tensor, lse: Tensor | None, logits: Mapping[str, Any]) -> None:
        """Set `view.observed` to the scores of the queries of a prompt's last tokens."""
        check_queries(self.name, self.argument, q, view.k)
        check_in_prompt(self.name, self.argument, q, view.n)
        check_lse(self.name, lse, q)
        view.window = w = q.shape[2]
        if w > self.window:
            raise ValueError(
                f"{self.name}: {self.argument} must have at most window rows, expected at most {self.window}, got {w}"
            )
        self.check_holds(budget_tokens(self.budget, view.n), w)
        limits = causal_limits(view.end, w, view.keys.device)
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
        """The summed scores of rows with the limits `visible`; see `summed_scores` and `reductions`."""
        options = {"starts": view.starts, "block_table": view.block_table, **logits}
        if self.score != "drop":
            options["score"] = self.score
        elif lse is None:
            options["values"] = view.v
        else:
            raise ValueError(
                f"{self.name}: with score='drop' the operator computes the softmax, expected no lse, got one"
            )
        k, of_keys = (view.k, {}) if self.score == "drop" else view.scored_keys
        options |= of_keys
        q = q.to(torch.bfloat16) if k.element_size() == 1 else q
        parts = [
            summed_scores(q, k, visible, lse, prefix, reduce=rows, group_reduce=group, **options)
            for rows, group in self.reductions
        ]
        scores = [x for x in parts if x is not None]
        return torch.cat(scores, 1) if len(scores) > 1 else parts[0]

    def scores(self, view: View) -> Tensor:
        return view.seen_by_queries

    def evict(self, view: View) -> Tensor | None:
        return self.choose(self.scores(view), view, self.room(view), recent=self.protected_in_cache(view))


def split(call: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor | None, dict[str, Any]]:
    """Splits the arguments of a call into those of the logits, the log-sum-exp, and the rest."""
    rest = dict(call)
    logits = {name: rest.pop(name) for name in Logits.__annotations__ if name in rest}
    return logits, rest.pop("lse", None), rest


@dataclass(frozen=True, eq=False)
class WindowPolicy(QueryPolicy):
    """A policy that scores tokens by an observation window and pools the scores over neighbours.

    Attributes:
        budget: See `BudgetPolicy`. It must hold the window.
        sinks: See `BudgetPolicy`.
        head_mode: See `BudgetPolicy`.
        group_reduce: See `QueryPolicy`.
        window: How many of a prompt's last queries observe; their tokens are kept. In a cache, a step of at least this
            many tokens evicts down to the budget, and shorter steps add to the cache.
        kernel_size: The slots over which scores are pooled; odd. 1 does not pool.
        pooling: "max", or "avg" (over kernel_size slots, where slots outside count as 0).
        pool_first: Pool the scores of each query head, then reduce the group.
        score: "softmax"; "dot": the sum of the logits themselves; or "drop": how far the rows' outputs move if the
            token is dropped (`kvops.ops.drop_scores`), which needs the values too.
    """

    protects_window: ClassVar[bool] = True

    window: int = 32
    _: KW_ONLY
    kernel_size: int = 7
    pooling: Pool = "max"
    pool_first: bool = False
    score: Score = "softmax"

    def check(self) -> None:
        self.pool.check(self.name)
        check_int(self.name, "window", self.window, self.least_window)
        super().check()

    def of_prompt(self, view: View) -> bool:
        return view.new >= self.window  # one token fills a window of one

    @property
    def pool(self) -> Pooling:
        return Pooling(self.kernel_size, self.pooling, self.pool_first, self.group_reduce)

    @property
    def operator_reduce(self) -> str:
        return self.pool.operator_reduce

    def scores(self, view: View) -> Tensor:
        outside = outside_prefix(view.seen_by_queries, view.window, view.starts, view.end)
        return self.pool(view.seen_by_queries, view.heads, outside)

    @classmethod
    def at_budget(
        cls, budget: int, n: int, num_layers: int, streaming: bool, options: dict[str, Any]
    ) -> dict[str, Any]:
        """An observation window of 32 tokens, or half the budget if that is less."""
        return {"budget": budget, "window": max(1, min(32, budget // 2))}


@dataclass(frozen=True, eq=False)
class ObservedPolicy(QueryPolicy):
    """A policy that evicts in decode too, each time by the last `window` queries.

    A prompt, and each chunk or further turn of at least `window` tokens, is compressed by its own last queries. In
    decode a cache remembers the queries.

    Attributes:
        budget: See `BudgetPolicy`. It must hold the window.
        sinks: See `BudgetPolicy`.
        head_mode: See `BudgetPolicy`.
        group_reduce: See `QueryPolicy`.
        buffer: See `KeyPolicy`.
        protect: See `KeyPolicy`.
        window: How many of the last queries observe; their tokens are kept.
    """

    by_head: ClassVar[bool] = True
    protects_window: ClassVar[bool] = True
    reduce: ClassVar[str] = "mean"

    window: int = 8
    _: KW_ONLY
    buffer: int | float | None = BUFFER
    protect: Protect | None = None

    def check(self) -> None:
        check_int(self.name, "window", self.window, 1)
        super().check()


@dataclass(frozen=True, eq=False)
class RecordQueries(QueryPolicy):
    """A policy that keeps everything, and remembers the queries of the `last` tokens."""

    budget: Budget = 1.0
    last: int = 1

    @property
    def remembers(self) -> int:
        return self.last

    def rows(self, view: View) -> int:
        return 0
