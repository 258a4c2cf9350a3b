"""Policies that evict after the model has read its prompt a second time: what they share.

The second reading is in passes, one for each `chunk` of the prompt: an instruction to repeat it, the tokens before the
chunk, the end of the user's turn, then the chunk's own tokens. The queries of the passes say what the prompt's keys are
needed for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from typing_extensions import Self

from ..ops.checks import check_choice, check_int, check_token_ids
from .base import Needs
from .budgets import Budget
from .queries import QueryPolicy
from .view import View

Scope = Literal["layer", "model"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
#: The settings that a tokenizer makes.
WORDS = ("instruction", "next_instruction", "suffix")


@dataclass(frozen=True, eq=False)
class RepeatPolicy(QueryPolicy):
    """A policy that keeps the whole prompt until the model has read it a second time, and then evicts once.

    Attributes:
        budget: See `BudgetPolicy`.
        sinks: See `BudgetPolicy`.
        head_mode: See `BudgetPolicy`.
        group_reduce: See `QueryPolicy`.
        scope: Which heads share a budget with head_mode="adaptive": those of a "layer", or of the whole "model", which
            keeps its highest scores in whichever layers and heads they are. The budget is then the mean over all heads,
            without the floor of `kvops.head_budgets`, and only `kvops.hf` evicts.
        chunk: How many tokens of the prompt a pass repeats.
        previous: How many of the tokens before its chunk a pass reads between instruction and chunk.
        instruction: The token ids of the instruction of the first pass. None: not given yet.
        next_instruction: The token ids of the instruction of each later pass, or None.
        suffix: The token ids between them and the chunk, or None: with a chat model, those that end the user's turn and
            begin the answer. `kvops.hf` needs all three, which `kvops.hf.repeat_prompts` makes from a tokenizer; with
            () for each a pass reads the chunk alone. `kvops.Cache` and one-shot calls do not use them, because their
            caller runs the passes.
    """

    gradients = False  # whether passes need the gradients of their rows

    _: KW_ONLY
    sinks: int = 4
    scope: Scope = "layer"
    chunk: int = 2048
    previous: int = 8
    instruction: tuple[int, ...] | None = None
    next_instruction: tuple[int, ...] | None = None
    suffix: tuple[int, ...] | None = None

    @property
    def needs(self) -> Needs:
        return Needs(positions=False, model=WORDS, stage="repeat")

    def check(self) -> None:
        check_choice(self.name, "scope", self.scope, SCOPES)
        if self.scope == "model" and self.head_mode != "adaptive":
            raise ValueError(
                f"{self.name}: with scope='model' the heads share a budget, expected head_mode='adaptive', got "
                f"{self.head_mode!r}"
            )
        if self.scope == "model" and self.shares is not None:
            raise ValueError(f"{self.name}: shares and scope='model' both divide the budget, expected one, got both")
        check_int(self.name, "chunk", self.chunk, 1)
        check_int(self.name, "previous", self.previous, 0)
        for name in WORDS:
            if getattr(self, name) is not None:
                check_token_ids(self.name, name, getattr(self, name))
        super().check()

    def add_pass(
        self,
        passes: Tensor | None,
        q: Tensor,
        view: View,
        first: int,
        end: Tensor | int,
        logits: dict[str, Any],
        hidden: Tensor | None = None,
        gradients: Tensor | None = None,
    ) -> Tensor:
        """What a cache holds of the passes: `passes` with one more. The batch is its first dim.

        Args:
            passes: What it holds of earlier passes, or None.
            q: [b, Hq, t, d], the queries of the pass.
            view: k is [b, Hk, n + t, d], the prompt's keys and those of the pass; v has at least the prompt's n slots.
            first: The chunk's first token, counted from each row's start.
            end: Of each row's tokens among the n slots; see `View`.
            logits: The options of the attention; see `Logits`.
            hidden: [b, t, hidden], what the layer was called with, if the policy needs it.
            gradients: [b, t], the norms of the rows' gradients, if the policy needs them.
        """
        raise NotImplementedError

    def observe_passes(self, view: View, passes: Tensor, logits: dict[str, Any]) -> None:
        """Set `view.observed` by all passes. view: of the prompt alone."""
        raise NotImplementedError

    def check_words(self) -> None:
        """Raise unless all words of the passes are given, which `repeat_ids` needs."""
        if lacking := [name for name in WORDS if getattr(self, name) is None]:
            raise ValueError(
                f"{self.name}: {', '.join(lacking)} must be the token ids that ask the model to repeat its prompt, got "
                f"None; use kvops.{type(self).__name__}(..., **kvops.hf.repeat_prompts(tokenizer)), or () to read the "
                "chunk alone"
            )

    def check_paged_cache(self, num_layers: int, by_head: bool = False) -> None:
        raise ValueError(f"{self.name}: a PagedCache cannot repeat prompts, expected another policy, got {self!r}")

    def check_readers(self, readers: int) -> None:
        """Raise if layers that share keys cannot be scored together."""

    def rows(self, view: View) -> int:
        return 0

    def choose(self, scores: Tensor, view: View, budget: Budget, **options: Any) -> Tensor:
        if self.scope == "model":
            raise ValueError(
                f"{self.name}: with scope='model' the heads of all layers share a budget, but this is the eviction of "
                "one; use kvops.hf, or scope='layer'"
            )
        return super().choose(scores, view, budget, **options)

    def of_layers(self, views: Sequence[View]) -> list[Self]:
        """With scope="model": the policy of each layer, with the budgets of its heads. views: with `observed`."""
        first = views[0]
        scores = torch.cat([x.seen_by_queries.to(first.k.device) for x in views], 1)
        none = first.k.new_empty(*scores.shape, 0)
        shares = self._shares(scores, first.changed(k=none, v=none), self.room(first), 0, floor=0.0)
        heads = [x.heads for x in views]
        budgets = [x.to(view.keys.device).contiguous() for x, view in zip(shares.split(heads, 1), views)]
        return [replace(self, budget=x, head_mode="per_head", scope="layer") for x in budgets]

    @classmethod
    def at_budget(
        cls, budget: int, n: int, num_layers: int, streaming: bool, options: dict[str, Any]
    ) -> dict[str, Any]:
        if streaming:
            raise ValueError(
                f"{cls.__name__}: eviction needs a second reading of a whole prompt, so it cannot run while a text "
                "streams in"
            )
        return {"budget": budget, "sinks": min(4, budget)}


def tokens_of_chunk(view: View, first: int, end: Tensor | int, most: int) -> tuple[Tensor, Tensor]:
    """Each row's first slot, int64 [b], and how many tokens it has in a chunk of at most `most`, int64 [b, 1].

    first, end: as in `RepeatPolicy.add_pass`.
    """
    device = view.keys.device
    begin = torch.zeros(view.rows, dtype=torch.int64, device=device) if view.starts is None else view.starts.long()
    return begin, (torch.as_tensor(end, device=device) - begin - first).clamp(0, most)[:, None]


def rows_of_chunk(count: Tensor, t: int) -> Tensor:
    """How many of the t rows of a pass count for chunks of `count` tokens: fewer for shorter chunks, none if empty."""
    return torch.where(count > 0, t - (count.max() - count), 0)


def repeat_ids(policy: RepeatPolicy, ids: Tensor, valid: Tensor, first: int) -> Tensor:
    """The tokens of the pass for the chunk that begins at token `first`: int64 [b, t].

    policy: with its words. ids: int64 [b, n], left-padded. valid: int64 [b], the tokens of each row. Where a row's
    chunk is shorter than others, its last tokens are arbitrary.
    """
    before = min(policy.previous, first)
    size = min(policy.chunk, int(valid.max()) - first)
    columns = ids.shape[1] - valid[:, None] + torch.arange(first - before, first + size, device=ids.device)
    previous, chunk = ids.gather(1, columns.clamp(max=ids.shape[1] - 1)).split([before, size], 1)
    instruction = policy.next_instruction if first else policy.instruction
    told, turn = (ids.new_tensor(x).expand(len(ids), -1) for x in (instruction, policy.suffix))
    return torch.cat((told, previous, turn, chunk), 1)


def repeat_counts(policy: RepeatPolicy, valid: Tensor, first: int, t: int) -> Tensor:
    """Which of the t tokens of a pass are not arbitrary: bool [b, t]. valid, first: as for `repeat_ids`."""
    count = (valid - first).clamp(0, policy.chunk)[:, None]
    return torch.arange(t, device=valid.device) < rows_of_chunk(count, t)
