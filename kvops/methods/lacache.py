"""LaCache: a ladder-shaped cache. Each layer keeps different tokens, so that each token survives in some layers.

Source: "LaCache: Ladder-Shaped KV Caching for Efficient Long-Context Modeling of Large Language Models", Shi et al.,
2025. Decisions: docs/methods/lacache.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from ..ops import ladder_compact_, ladder_gather
from ..ops.checks import check_budget, check_choice, check_holds_ladder, check_int, check_num_layers, plain
from ..ops.ladder import COMPACTIONS, PATTERNS, Compaction, LadderState, Pattern, lacache_plan, make_ladder
from ..ops.rope import Rope
from .base import IN_PLACE, Compressed, Layout, Out, Policy, Positions, one_shot
from .budgets import budget_tokens
from .view import View

Task = Literal["modeling", "understanding"]
TASKS: tuple[Task, ...] = get_args(Task)
MOST_COVERED = 1 << 20  # tokens of `lacache_coverage`, which streams them one by one


@dataclass(frozen=True, eq=False)
class LaCache(Policy):
    """LaCache: keeps a ladder of tokens, in the paper's pattern early tokens in early layers, late ones in deep layers.

    Which slots a layer keeps depends only on (layer, slot), never on scores (see `lacache_plan`). All layers keep the
    same number of slots, and all heads of a layer the same slots: at most budget + R // 2, where R is the number of
    slots that a ladder frees in each layer.

    A cache is thinned when it grows longer than that, so its length oscillates around the budget by R. Each row of a
    padded batch keeps the tokens that it would keep alone. Rows may therefore differ in length; their tokens begin
    after `pads` empty slots.

    Attributes:
        budget: Tokens (int), or a fraction (float). It must hold the sinks, the newest num_layers slots and one
            ladder's kept slots. In a cache a fraction is of the tokens seen, but never less than that minimum.
        span: See `lacache_plan`. None depends on the task: max(1, round(num_layers / 4)) for "modeling",
            round(num_layers * budget / n) for "understanding". A cache for "understanding" with a budget in tokens
            needs it.
        overlap: See `lacache_plan`. None is span // 2 for "modeling", 0 for "understanding".
        sinks: First tokens that are always kept. None is 4 for "modeling", min(128, budget // 4) for "understanding".
        pattern: See `lacache_plan`.
        compaction: See `lacache_plan`.
        task: "modeling" (language modeling), or "understanding" (a prompt, then a short answer).
        positions: "slots": tokens take the positions of their slots, 0, 1, ..., without gaps for evicted tokens; or
            "original": keys keep the positions at which they were rotated. For "slots" a cache needs the model's rotary
            embedding (`kvops.Cache(policy, rope=...)`). Without it the cache moves the keys as they are, and the caller
            rotates them (`kvops.ops.rope_at_slots`).

    Source: LaCache, Sec. 3.2, 3.3, 4.1.
    """

    fixed_budget: ClassVar[bool] = False

    budget: int | float
    _: KW_ONLY
    positions: Positions = "slots"
    span: int | None = None
    overlap: int | None = None
    sinks: int | None = None
    pattern: Pattern = "paper"
    compaction: Compaction = "ladder"
    task: Task = "modeling"

    @property
    def heads_alone(self) -> bool:
        return True

    def check(self) -> None:
        check_budget(self.name, self.budget)
        check_choice(self.name, "task", self.task, TASKS)
        check_choice(self.name, "pattern", self.pattern, PATTERNS)
        check_choice(self.name, "compaction", self.compaction, COMPACTIONS)
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

    @one_shot
    def compress(  # type: ignore[override]  # no padding, and the layer is no option
        self,
        k: Tensor,
        v: Tensor,
        *,
        layer: int,
        num_layers: int,
        rope: Rope | None = None,
        out: Out = None,
        layout: Layout | None = None,
    ) -> Compressed:
        """Apply the rule once to a whole cache of one layer.

        Args:
            k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
            v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
            layer: The index of the layer in the model.
            num_layers: The number of layers of the model.
            rope: The rotary embedding, if keys were rotated at their slots: they are rotated to their new slots. None
                moves the keys as they are, for keys that are not rotated or keep their original positions.
            out: (k_out, v_out) of the result's shapes to write to.
            layout: "bhnd" (default) or "bnhd"; see `Spans`.

        Returns:
            (k, v, indices) of the kept slots; see `Compressed`.

        Raises:
            TypeError: An argument has the wrong type. Nothing has been written.
            ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.
        """
        check_int(self.name, "layer", layer, 0)
        view, out = self._view(k, v, layer=layer, num_layers=num_layers, out=out)
        view.rope = rope
        return self._compress(view, out)

    def select(self, view: View) -> Tensor:
        layer, num_layers = view.layer_and_count(self.name)
        plan = lacache_plan(view.n, **self.plan_settings(num_layers, view.n))
        indices = plan.indices(layer, view.keys.device).expand(view.rows, view.heads, -1)
        view.state["plan"] = plan, indices
        return indices

    def evict(self, view: View) -> Tensor | None:
        layer, num_layers = view.layer_and_count(self.name)
        if view.starts is not None:
            return self._evict_rows(view, layer, num_layers)
        settings = self.plan_settings(num_layers, view.seen, streaming=True)
        plan = lacache_plan(view.n, **settings, state=view.state.get("ladder"))
        if not plan.passes:
            return None
        indices = plan.indices(layer, view.keys.device).expand(view.rows, view.heads, -1)
        view.state.update(ladder=plan.state, plan=(plan, indices))
        return indices

    def _evict_rows(self, view: View, layer: int, num_layers: int) -> Tensor | None:
        """Evicts each row of a padded batch by its own plan, which needs only values on the host."""
        # rows: int64 [b, 5] on the CPU: padding, slots kept at the last eviction, columns seen then, cap, cursor
        before = view.state.get("rows")
        if before is None:
            assert view.padding is not None  # the rows begin with padding
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
        indices = torch.full((len(plans), width), -1, device=view.keys.device)
        for row, plan in enumerate(plans):
            indices[row, width - len(plan) :] = plan.indices(layer, view.keys.device) + (view.n - plan.n)
        ends = [(row[0], len(plan), view.seen, plan.state.cap, plan.state.cursor) for row, plan in zip(rows, plans)]
        view.state["rows"] = torch.tensor(ends, device="cpu")
        return indices[:, None].expand(-1, view.heads, -1)

    def move(self, view: View, indices: Tensor, out: Out = None) -> tuple[Tensor, Tensor]:
        """Moves by closed form instead of by indices, and rotates the keys to their new slots.

        Rows with plans of their own move by indices, and so do slots that others chose (`Cache.keep`).
        """
        plan, planned = view.state.get("plan", (None, None))
        if view.starts is not None or indices is not planned:
            return super().move(view, indices, out)
        rope, (layer, _) = view.rope, view.layer_and_count(self.name)
        k: Any = view.k
        v: Any = view.v
        options: dict[str, Any] = {}
        if rope is not None:
            options = {"inv_freq": rope.inv_freq.to(k.device), "interleaved": rope.interleaved}
        view.rope = None
        *parts, last = plan.parts()
        if out is IN_PLACE:
            for part in (*parts, last):
                k, v = ladder_compact_(k, v, plan=part, layer=layer, **options)
            return k, v
        for part in parts:
            k, v = ladder_gather(k, v, plan=part, layer=layer, **options)
        k, v = ladder_gather(k, v, plan=last, layer=layer, **options, out=out)
        return k, v

    def plan_settings(self, num_layers: int, n: int, streaming: bool = False) -> dict[str, Any]:
        """The arguments of `lacache_plan`, with the task's defaults. n: tokens, or if streaming tokens seen so far."""
        op, budget, span, overlap, sinks = self.name, self.budget, self.span, self.overlap, self.sinks
        keep = budget_tokens(budget, n)
        if self.task == "understanding":
            if span is None:
                if streaming and isinstance(budget, int):
                    raise ValueError(
                        f"{op}: task='understanding' needs span= (about num_layers * budget / length) when the budget "
                        f"is {budget} tokens, as a stream's length is not known; or give the budget as a fraction"
                    )
                ratio = budget if isinstance(budget, float) else keep / max(n, 1)
                span = understanding_span(num_layers, ratio, self.pattern)
            overlap = 0 if overlap is None else overlap
            sinks = min(128, keep // 4) if sinks is None else sinks
        sinks = 4 if sinks is None else sinks
        ladder = make_ladder(num_layers, span, overlap, self.pattern, op)
        least = ladder.least(self.compaction == "whole")
        if streaming and isinstance(budget, float):
            keep = max(keep, sinks + num_layers + least)
        check_holds_ladder(op, keep, sinks, num_layers, least)
        shape = {"num_layers": num_layers, "span": ladder.span, "overlap": ladder.overlap, "pattern": self.pattern}
        return {"budget": keep, "sinks": sinks, "compaction": self.compaction, **shape}

    @classmethod
    def at_budget(
        cls, budget: int, n: int, num_layers: int, streaming: bool, options: dict[str, Any]
    ) -> dict[str, Any]:
        """The paper's settings for a prompt and a short answer, or for language modeling."""
        if options.get("task", "modeling" if streaming else "understanding") == "modeling":
            return {"budget": budget}
        span = understanding_span(num_layers, budget / n, options.get("pattern", "paper"))
        return {"budget": budget, "task": "understanding", "span": span}


def lacache_coverage(
    n: int,
    *,
    num_layers: int,
    budget: int,
    span: int | None = None,
    overlap: int | None = None,
    sinks: int = 4,
    pattern: Pattern = "paper",
    compaction: Compaction = "ladder",
    chunk: int | Sequence[int] = 1,
) -> Tensor:
    """Compute which tokens each layer holds after n tokens have been streamed.

    Args:
        n: The tokens of the stream, at most 2^20.
        num_layers: See `lacache_plan`.
        budget: See `lacache_plan`.
        span: See `lacache_plan`.
        overlap: See `lacache_plan`.
        sinks: See `lacache_plan`.
        pattern: See `lacache_plan`.
        compaction: See `lacache_plan`.
        chunk: The tokens per step, or the sizes of all steps; tokens left after these come one by one.

    Returns:
        bool [num_layers, n].

    Raises:
        TypeError: A number is not an int.
        ValueError: A setting is invalid; see `lacache_plan`.

    Source: LaCache, Fig. 2 and 4.
    """
    check_int("lacache_coverage", "n", n, 0, MOST_COVERED)
    check_num_layers("lacache_coverage", num_layers)
    n, chunk = plain(n), plain(chunk)
    for size in [chunk] if isinstance(chunk, int) else chunk:
        check_int("lacache_coverage", "chunk", size, 1)
    sizes = [chunk] * -(-n // chunk) if isinstance(chunk, int) else [*chunk] + [1] * (n - sum(chunk))
    settings: dict[str, Any] = dict(num_layers=num_layers, budget=budget, span=span, overlap=overlap)
    settings |= dict(sinks=sinks, pattern=pattern, compaction=compaction)
    held = torch.empty(num_layers, 0, dtype=torch.int64, device="cpu")
    state, seen, new = None, 0, 0  # new: tokens that are not in `held` yet
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


def understanding_span(num_layers: int, ratio: float, pattern: Pattern) -> int:
    """The paper's span for a prompt and a short answer, if this fraction of the prompt is kept, or the longest span."""
    return max(1, min(round(num_layers * ratio), num_layers // 2 if pattern == "paper" else num_layers - 1))
