"""LaCache: a ladder. Each layer keeps other tokens, early layers early ones, so that each token stays in some layers.

Source: "LaCache: Ladder-Shaped KV Caching for Efficient Long-Context Modeling of Large Language Models", Shi et al.,
2025. Decisions: docs/methods/lacache.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..checks import check_budget, check_choice, check_holds_ladder, check_int
from ..ladder import PATTERNS, LadderState, lacache_plan, least_budget, make_ladder
from ..ops import ladder_compact_, ladder_gather
from ..rope import Rope
from .base import IN_PLACE, Compressed, Out, View
from .budgets import budget_tokens
from .slots import SlotPolicy

TASKS = ("modeling", "understanding")


@dataclass(frozen=True, eq=False)
class LaCache(SlotPolicy):
    """LaCache: as many slots stay as `lacache_plan` says, alike in all heads: at most budget + R // 2, where a ladder
    frees R slots of a layer. All layers keep equally many, and which they are is arithmetic on (layer, slot).

    A cache is thinned when it is longer than the budget, so its length oscillates around the budget by what a ladder
    frees. Rows of a padded batch keep what they keep alone: different numbers of tokens, which begin after `pads` empty
    slots.

    Attributes:
        budget: tokens, or a fraction; it holds the sinks, the newest num_layers slots and a ladder's kept ones. In a
            cache a fraction is one of the tokens seen, but never less than that.
        span, overlap, sinks, pattern: see `lacache_plan`. None: by the task. "modeling": span max(1, round(num_layers
            / 4)), overlap span // 2, 4 sinks; "understanding" (a prompt, then a short answer): span round(num_layers *
            budget / n), overlap 0, min(128, budget // 4) sinks. A cache needs the span for a budget in tokens.
        task: "modeling" or "understanding".
        positions: see `SlotPolicy`.

    Source: LaCache, Sec. 3.2, 3.3, 4.1.
    """

    fixed_budget: ClassVar[bool] = False

    budget: int | float
    _: KW_ONLY
    span: int | None = None
    overlap: int | None = None
    sinks: int | None = None
    pattern: str = "paper"
    task: str = "modeling"

    @property
    def heads_alone(self) -> bool:
        return True

    def check(self) -> None:
        check_budget(self.name, self.budget)
        check_choice(self.name, "task", self.task, TASKS)
        check_choice(self.name, "pattern", self.pattern, PATTERNS)
        for name, low in (("span", 1), ("overlap", 0), ("sinks", 0)):
            if (value := getattr(self, name)) is not None:
                check_int(self.name, name, value, low)
        super().check()

    def check_cache(self, layer: int, num_layers: int) -> None:
        if num_layers == 1:
            raise ValueError(
                f"{self.name}: expected a model of several layers, got 1; make each layer's cache with "
                "Cache(policy, layer=..., num_layers=...)"
            )
        self.plan_settings(num_layers, 1, streaming=True)

    def compress(  # type: ignore[override]  # no padding, and the layer is no option
        self, k: Tensor, v: Tensor, *, layer: int, num_layers: int, rope: Rope | None = None, out: Out = None
    ) -> Compressed:
        """The rule in one call, of one layer of a model.

        Args:
            k: [b, Hk, n, d].
            v: [b, Hk, n, dv].
            layer, num_layers: which layer of how many this is.
            rope: keys that are rotated at their slots are turned to their new ones. None: keys are only moved (they
                are not rotated yet, or stay at their original positions).
            out: (k_out, v_out) of the result's shapes to write to.

        Returns:
            (k, v, indices) with the slots that stay.

        Raises:
            TypeError, ValueError: wrong arguments; nothing has been written.
        """
        check_int(self.name, "layer", layer, 0)
        view, out = self._view(k, v, layer=layer, num_layers=num_layers, out=out)
        view.rope = rope
        return self._compress(view, out)

    def select(self, view: View) -> Tensor:
        layer, num_layers = view.place(self.name)
        view.state["plan"] = plan = lacache_plan(view.n, **self.plan_settings(num_layers, view.n))
        return plan.indices(layer, view.k.device).expand(*view.k.shape[:2], -1)

    def evict(self, view: View) -> Tensor | None:
        layer, num_layers = view.place(self.name)
        if view.starts is not None:
            return self._evict_rows(view, layer, num_layers)
        settings = self.plan_settings(num_layers, view.seen, streaming=True)
        plan = lacache_plan(view.n, **settings, state=view.state.get("ladder"))
        if not plan.passes:
            return None
        view.state.update(ladder=plan.state, plan=plan)
        return plan.indices(layer, view.k.device).expand(*view.k.shape[:2], -1)

    def _evict_rows(self, view: View, layer: int, num_layers: int) -> Tensor | None:
        """Each row of a padded batch by a plan of its own, made from what the host knows."""
        # padding; slots kept at the last eviction, columns seen then; cap, cursor: int64 [b, 5], on the CPU
        before = view.state.get("rows")
        if before is None:
            assert view.padding is not None  # as rows begin with some
            rows = [(padding, 0, 0, 0, 0) for padding in view.padding.tolist()]
        else:
            rows = before.tolist()
        plans = []
        for padding, kept, then, *state in rows:
            length = kept + max(0, view.seen - max(padding, then))
            settings = self.plan_settings(num_layers, max(0, view.seen - padding), streaming=True)
            plans.append(lacache_plan(length, **settings, state=LadderState(*state) if then else None))
        if not any(plan.passes for plan in plans):
            return None
        width = max(map(len, plans))
        indices = torch.full((len(plans), width), -1, device=view.k.device)
        for row, plan in enumerate(plans):
            indices[row, width - len(plan) :] = plan.indices(layer, view.k.device) + (view.n - plan.n)
        ends = [(row[0], len(plan), view.seen, plan.state.cap, plan.state.cursor) for row, plan in zip(rows, plans)]
        view.state["rows"] = torch.tensor(ends, device="cpu")
        return indices[:, None].expand(-1, view.heads, -1)

    def move(self, view: View, indices: Tensor, out: Out = None) -> tuple[Tensor, Tensor]:
        """By closed form, without the indices, and with the keys turned to their new slots; rows that differ by
        them."""
        if view.starts is not None:
            return super().move(view, indices, out)
        rope, (layer, _) = view.rope, view.place(self.name)
        k: Any = view.k
        v: Any = view.v
        options: dict[str, Any] = {}
        if rope is not None:
            options = {"inv_freq": rope.inv_freq.to(k.device), "interleaved": rope.interleaved}
        view.rope = None
        *parts, last = view.state["plan"].parts()
        if out is IN_PLACE:
            for part in (*parts, last):
                k, v = ladder_compact_(k, v, plan=part, layer=layer, **options)
            return k, v
        for part in parts:
            k, v = ladder_gather(k, v, plan=part, layer=layer, **options)
        k, v = ladder_gather(k, v, plan=last, layer=layer, **options, out=out)
        return k, v

    def plan_settings(self, num_layers: int, n: int, streaming: bool = False) -> dict[str, Any]:
        """The arguments of `lacache_plan`, with the task's defaults. n: tokens, those seen so far if streaming."""
        op, budget, span, overlap, sinks = self.name, self.budget, self.span, self.overlap, self.sinks
        keep = budget_tokens(op, budget, n)
        if self.task == "understanding":
            if span is None:
                if streaming and isinstance(budget, int):
                    raise ValueError(
                        f"{op}: task='understanding' needs span= (about num_layers * budget / length) when the budget "
                        f"is {budget} tokens, as a stream's length is not known; or give the budget as a fraction"
                    )
                ratio = budget if isinstance(budget, float) else keep / max(n, 1)
                span = understanding_span(num_layers, ratio)
            overlap = 0 if overlap is None else overlap
            sinks = min(128, keep // 4) if sinks is None else sinks
        sinks = 4 if sinks is None else sinks
        ladder = make_ladder(num_layers, span, overlap, self.pattern)
        if streaming and isinstance(budget, float):
            keep = max(keep, least_budget(sinks, ladder))
        check_holds_ladder(op, keep, sinks, least=least_budget(sinks, ladder), kept=ladder.kept)
        shape = {"num_layers": num_layers, "span": ladder.span, "overlap": ladder.overlap, "pattern": self.pattern}
        return {"budget": keep, "sinks": sinks, **shape}

    @classmethod
    def at_budget(
        cls, budget: int, n: int, num_layers: int, streaming: bool, options: dict[str, Any]
    ) -> dict[str, Any]:
        """A prompt and a short answer, or language modelling: the paper's settings for each."""
        if options.get("task", "modeling" if streaming else "understanding") == "modeling":
            return {"budget": budget}
        return {"budget": budget, "task": "understanding", "span": understanding_span(num_layers, budget / n)}


def lacache_coverage(
    n: int,
    *,
    num_layers: int,
    budget: int,
    span: int | None = None,
    overlap: int | None = None,
    sinks: int = 4,
    pattern: str = "paper",
    chunk: int | Sequence[int] = 1,
) -> Tensor:
    """Which tokens each layer holds when n have been streamed.

    Args:
        chunk: how many tokens come at a time, or the size of each chunk (what is left comes one by one).

    All other arguments as in `lacache_plan`.

    Returns:
        bool [num_layers, n].

    Source: LaCache, Fig. 2 and 4.
    """
    check_int("lacache_coverage", "n", n, 0)
    for size in [chunk] if isinstance(chunk, int) else chunk:
        check_int("lacache_coverage", "chunk", size, 1)
    sizes = [chunk] * -(-n // chunk) if isinstance(chunk, int) else [*chunk] + [1] * (n - sum(chunk))
    settings: dict[str, Any] = dict(num_layers=num_layers, budget=budget, span=span, overlap=overlap)
    settings |= dict(sinks=sinks, pattern=pattern)
    held = torch.empty(num_layers, 0, dtype=torch.int64, device="cpu")
    state, seen, new = None, 0, 0  # `new` tokens since the last that were put into `held`
    for size in sizes:
        size = min(size, n - seen)
        seen, new = seen + size, new + size
        plan = lacache_plan(held.shape[1] + new, **settings, state=state)
        state = plan.state
        if plan.passes or seen == n:
            held = torch.cat((held, torch.arange(seen - new, seen, device="cpu").expand(num_layers, -1)), 1)
            kept = torch.stack([plan.indices(layer, "cpu") for layer in range(num_layers)])
            held, new = held.gather(1, kept), 0
    return torch.zeros(num_layers, n, dtype=torch.bool, device="cpu").scatter_(1, held, True)


def understanding_span(num_layers: int, ratio: float) -> int:
    """The paper's span for a prompt and a short answer, when this share of the prompt is kept."""
    return max(1, min(round(num_layers * ratio), num_layers - 1))
