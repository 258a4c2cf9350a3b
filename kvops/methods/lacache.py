"""LaCache: a ladder. Each layer keeps other tokens, early layers early ones, so that each token stays in some layers.

Source: "LaCache: Ladder-Shaped KV Caching for Efficient Long-Context Modeling of Large Language Models", Shi et al.,
2025. Decisions: docs/methods/lacache.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache import SlotMethod
from ..ladder import PATTERNS, LadderPlan, LadderState, check_budget, lacache_plan, least_budget, make_ladder
from ..ops import ladder_compact_, ladder_gather
from ..rope import Rope
from .common import IN_PLACE, Compressed, budget_tokens, check_choice, check_int, check_out, check_rank, in_place

TASKS = ("modeling", "understanding")


def lacache_compress(
    k: Tensor,
    v: Tensor,
    *,
    layer: int,
    num_layers: int,
    budget: int | float,
    span: int | None = None,
    overlap: int | None = None,
    sinks: int | None = None,
    pattern: str = "paper",
    task: str = "modeling",
    rope: Rope | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> Compressed:
    """LaCache in one call, of one layer of a model. k: [b, Hk, n, d], v: [b, Hk, n, dv] -> (k, v, indices).

    As many slots stay as `lacache_plan` says, alike in all heads: at most budget + R // 2, where a ladder frees R slots
    of a layer; all layers keep equally many, and which they are is arithmetic on (layer, slot).

    layer, num_layers: which layer of how many this is.
    budget: tokens, or a fraction of n; it holds the sinks, the newest num_layers slots and a ladder's kept ones.
    span, overlap, sinks, pattern: see `lacache_plan`. Not given: by the task. "modeling": span max(1, round(num_layers
        / 4)), overlap span // 2, 4 sinks; "understanding" (a prompt, then a short answer): span round(num_layers *
        budget / n), overlap 0, min(128, budget // 4) sinks.
    rope: keys that are rotated at their slots are turned to their new ones. None: keys are only moved (they are not
        rotated yet, or stay at their original positions).
    out: as in `keydiff_compress`.

    Source: LaCache, Sec. 3.2, 3.3, 4.1.
    """
    op = "lacache_compress"
    check_rank(op, k)
    check_int(op, "layer", layer, 0)
    n = k.shape[2]
    settings = _settings(op, num_layers, budget, n, span, overlap, sinks, pattern, task)
    plan = lacache_plan(n, **settings)
    if layer >= num_layers:
        raise ValueError(f"{op}: layer must lie in [0, num_layers), expected less than {num_layers}, got {layer}")
    k, v = _carry_out(op, k, v, plan, layer, rope, out)
    return Compressed(k, v, plan.indices(layer, k.device).expand(*k.shape[:2], -1))


lacache_compress_ = in_place(lacache_compress)


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
    """Which tokens each layer holds when n have been streamed: bool [num_layers, n].

    chunk: how many tokens come at a time, or the size of each chunk (what is left comes one by one). All other
    arguments as in `lacache_plan`.

    Source: LaCache, Fig. 2 and 4.
    """
    check_int("lacache_coverage", "n", n, 0)
    for size in [chunk] if isinstance(chunk, int) else chunk:
        check_int("lacache_coverage", "chunk", size, 1)
    sizes = [chunk] * -(-n // chunk) if isinstance(chunk, int) else [*chunk] + [1] * (n - sum(chunk))
    settings = dict(num_layers=num_layers, budget=budget, span=span, overlap=overlap, sinks=sinks, pattern=pattern)
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


def _settings(
    op: str,
    num_layers: int,
    budget: int | float,
    n: int,
    span: int | None,
    overlap: int | None,
    sinks: int | None,
    pattern: str,
    task: str,
    streaming: bool = False,
) -> dict:
    """The arguments of `lacache_plan`, checked, with the task's defaults. n: tokens, those seen so far if streaming."""
    check_choice(op, "task", task, TASKS)
    keep = budget_tokens(op, budget, n)
    if task == "understanding":
        if span is None:
            if streaming and isinstance(budget, int):
                raise ValueError(
                    f"{op}: task='understanding' needs span= (about num_layers * budget / length) when the budget is "
                    f"{budget} tokens, as a stream's length is not known; or give the budget as a fraction"
                )
            ratio = budget if isinstance(budget, float) else keep / max(n, 1)
            span = understanding_span(num_layers, ratio)
        overlap = 0 if overlap is None else overlap
        sinks = min(128, keep // 4) if sinks is None else sinks
    sinks = 4 if sinks is None else sinks
    check_int(op, "sinks", sinks, 0)
    ladder = make_ladder(num_layers, span, overlap, pattern)
    if streaming and isinstance(budget, float):
        keep = max(keep, least_budget(sinks, ladder))
    check_budget(op, keep, sinks, ladder)
    shape = dict(num_layers=num_layers, span=ladder.span, overlap=ladder.overlap, pattern=pattern)
    return dict(budget=keep, sinks=sinks, **shape)


def _carry_out(
    op: str,
    k: Tensor,
    v: Tensor,
    plan: LadderPlan,
    layer: int,
    rope: Rope | None,
    out: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """What the plan keeps: in fresh memory, in the caller's `out`, or at the front of k and v themselves."""
    options = {} if rope is None else dict(inv_freq=rope.inv_freq.to(k.device), interleaved=rope.interleaved)
    check_out(op, out)
    if out is IN_PLACE:
        for part in plan.parts():
            k, v = ladder_compact_(k, v, part, layer, **options)
        return k, v
    *parts, last = plan.parts()
    for part in parts:
        k, v = ladder_gather(k, v, part, layer, **options)
    return ladder_gather(k, v, last, layer, **options, out=out)


class LaCache(SlotMethod):
    """LaCache's cache of one layer: when it is longer than the budget, ladders are thinned, in every layer other slots.

    Make each layer's object with `fresh(layer, num_layers)`. All layers are equally long: the length oscillates around
    the budget by what a ladder frees. Rows of a padded batch keep what they keep alone: different numbers of tokens,
    which begin after `pads` empty slots.

    budget: tokens; or a fraction of the tokens seen, but never less than a ladder needs.
    span, overlap, sinks, pattern, task: as in `lacache_compress`; with task="understanding" and a budget in tokens span
        must be given.
    positions, storage, rope: see `SlotMethod`.
    """

    fixed_budget = False
    _state = (*SlotMethod._state, "_rows")

    def __init__(
        self,
        budget: int | float,
        *,
        span: int | None = None,
        overlap: int | None = None,
        sinks: int | None = None,
        pattern: str = "paper",
        task: str = "modeling",
        positions: str = "slots",
        storage: str = "pre_rope",
        rope: Rope | None = None,
    ):
        budget_tokens("LaCache", budget, 1)
        check_choice("LaCache", "task", task, TASKS)
        check_choice("LaCache", "pattern", pattern, PATTERNS)
        self.budget, self.span, self.overlap, self.sinks = budget, span, overlap, sinks
        self.pattern, self.task = pattern, task
        super().__init__(positions, storage, rope)

    def reset(self) -> None:
        super().reset()
        self._ladder: LadderState | None = None
        self._plan: LadderPlan | None = None  # of the eviction under way
        # Of the rows of a padded batch: padding; slots kept at the last eviction, columns seen then; cap, cursor.
        self._rows: Tensor | None = None  # int64 [b, 5], on the CPU

    def fresh(self, layer: int = 0, num_layers: int = 1) -> LaCache:
        other = super().fresh(layer, num_layers)
        other._settings(1)
        return other

    def _settings(self, seen: int) -> dict:
        if self.num_layers == 1:
            raise ValueError(
                "LaCache: expected a model of several layers, got 1; make each layer's object with "
                "fresh(layer, num_layers)"
            )
        shape = self.span, self.overlap, self.sinks, self.pattern, self.task
        return _settings("LaCache", self.num_layers, self.budget, seen, *shape, streaming=True)

    def _evict(self, k: Tensor, v: Tensor, pads: Tensor | None, seen: int) -> Tensor | None:
        if pads is not None:
            return self._evict_rows(k, seen)
        plan = lacache_plan(k.shape[2], **self._settings(seen), state=self._ladder)
        if not plan.passes:
            return None
        self._ladder, self._plan = plan.state, plan
        return plan.indices(self.layer, k.device).expand(*k.shape[:2], -1)

    def _evict_rows(self, k: Tensor, seen: int) -> Tensor | None:
        """Each row of a padded batch by a plan of its own, made from what the host knows."""
        if self._rows is None:
            rows = [(padding, 0, 0, 0, 0) for padding in self._padding.tolist()]
        else:
            rows = self._rows.tolist()
        plans = []
        for padding, kept, then, *state in rows:
            length = kept + max(0, seen - max(padding, then))
            settings = self._settings(max(0, seen - padding))
            plans.append(lacache_plan(length, **settings, state=LadderState(*state) if then else None))
        if not any(plan.passes for plan in plans):
            return None
        n, width = k.shape[2], max(map(len, plans))
        indices = torch.full((len(plans), width), -1, device=k.device)
        for row, plan in enumerate(plans):
            indices[row, width - len(plan) :] = plan.indices(self.layer, k.device) + (n - plan.n)
        self._rows = torch.tensor(
            [(row[0], len(plan), seen, plan.state.cap, plan.state.cursor) for row, plan in zip(rows, plans)],
            device="cpu",
        )
        return indices[:, None].expand(-1, k.shape[1], -1)

    def _moved(
        self, indices: Tensor, k: Tensor, v: Tensor, pads: Tensor | None, left: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if pads is not None:
            return super()._moved(indices, k, v, pads, left)
        rope = self.rope if self.storage == "post_rope" else None
        return _carry_out("LaCache", k, v, self._plan, self.layer, rope, None)
