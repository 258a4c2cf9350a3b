"""LaCache's ladder: which slots stay is arithmetic on (layer, slot), made here on the host in plain integers. ::

    plan = kvops.lacache_plan(n, num_layers=32, budget=512)            # what a cache of n slots needs
    ops.ladder_compact_(k, v, plan=plan, layer=layer)                  # one layer, or lists of all of them
    plan = kvops.lacache_plan(n, num_layers=32, budget=512, state=plan.state)      # the next time

A ladder is `length` consecutive slots. Every layer keeps `kept` consecutive ones of it, from its `offset` on, and frees
the others; deeper layers have larger offsets. A cache that overflows is thinned by one ladder after the other, from the
sinks towards the newest tokens; at their end it starts over and thins what is already thin.

Source: LaCache, Sec. 3.2 (the ladder), 3.3 (iterative compaction), Fig. 2 and 4.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .checks import check_choice, check_holds_ladder, check_int

PATTERNS = ("paper", "official")
MAX_PASSES = 192  # of one call of the operators


@dataclass(frozen=True)
class Ladder:
    """The shape of a ladder in a model: see `make_ladder`, which checks and fills in what is left out.

    The properties are not cached: `torch.compile` traces them.
    """

    num_layers: int
    span: int
    overlap: int
    pattern: str = "paper"

    @property
    def step(self) -> int:
        """Layers from one slot's first layer to the next slot's."""
        return self.span - self.overlap

    @property
    def length(self) -> int:
        """Slots of a ladder."""
        return 1 - (self.span - self.num_layers) // self.step

    @property
    def kept(self) -> int:
        """Slots that each layer keeps of a ladder."""
        return min(-(-self.span // self.step), self.length)

    @property
    def freed(self) -> int:
        """Slots that each layer frees of a ladder."""
        return self.length - self.kept

    def offset(self, layer: int) -> int:
        """The first slot of a ladder that the layer keeps."""
        if self.pattern == "official":
            return layer % (self.freed + 1)
        return min(max(layer // self.step - (self.kept - 1), 0), self.freed)


@dataclass(frozen=True)
class LadderState:
    """What a sequence remembers between plans."""

    cap: int  # slots from which on the cache is thinned: the budget, after the first overflow freed // 2 more
    cursor: int  # the slot of the next ladder


@dataclass(frozen=True)
class LadderPlan:
    """What becomes of n slots: `passes` of (cursor, ladders), in turn. `state` is for the next plan."""

    ladder: Ladder
    n: int
    passes: tuple[tuple[int, int], ...]
    state: LadderState

    def __len__(self) -> int:
        """Slots that stay."""
        return self.n - self.ladder.freed * sum(count for _, count in self.passes)

    @property
    def encoded(self) -> tuple[int, ...]:
        """What the operators take."""
        shape = self.ladder
        head = (self.n, shape.num_layers, shape.span, shape.overlap, PATTERNS.index(shape.pattern))
        return (*head, *(x for one in self.passes for x in one))

    def indices(self, layer: int, device: torch.device | str | None = None) -> Tensor:
        """The slots that stay in a layer: int64 [len(plan)], ascending."""
        ladder, offset = self.ladder, self.ladder.offset(layer)
        slots = torch.arange(len(self), device=device)
        for cursor, count in reversed(self.passes):
            inside = slots - cursor
            moved = torch.div(inside, ladder.kept, rounding_mode="floor") * ladder.freed + offset
            moved = torch.where(inside < ladder.kept * count, moved, ladder.freed * count)
            slots = slots + torch.where(inside < 0, 0, moved)
        return slots

    def parts(self) -> Iterator[LadderPlan]:
        """Plans of at most `MAX_PASSES` passes each, which do the same in turn; one as a rule."""
        n = self.n
        for first in range(0, max(len(self.passes), 1), MAX_PASSES):
            part = replace(self, n=n, passes=self.passes[first : first + MAX_PASSES])
            yield part
            n = len(part)


def lacache_plan(
    n: int,
    *,
    num_layers: int,
    budget: int,
    span: int | None = None,
    overlap: int | None = None,
    sinks: int = 4,
    pattern: str = "paper",
    state: LadderState | None = None,
) -> LadderPlan:
    """What LaCache makes of a cache of n slots, the same number in every layer: which ladders are thinned.

    A ladder is A = 1 + ceil((num_layers - span) / (span - overlap)) slots, of which each layer keeps B = min(ceil(span
    / (span - overlap)), A) and frees R = A - B. The length oscillates by R: the cache is thinned when it is longer than
    the budget, from the first time on when it is longer than budget + R // 2, to more than R less; so the mean length,
    token by token, is the budget (budget + 1/2 for even R).

    Args:
        n: slots of the cache.
        num_layers: layers of the model.
        budget: slots to stay within.
        span: layers that keep a token; None: max(1, round(num_layers / 4)), the paper's for language modelling.
        overlap: how many of those its next neighbour shares; None: span // 2.
        sinks: first slots that always stay.
        pattern: "paper": layer l keeps B slots of a ladder from clamp(l // (span - overlap) - (B - 1), 0, R) on, so
            that early tokens stay in early layers; "official": from l mod (R + 1) on, as the released code does.
        state: the last plan's `state`, of the same sequence and settings; None for a sequence that never overflowed.

    Returns:
        The plan; with n within the budget it has no passes. Takes microseconds and no tensors.

    Raises:
        ValueError: no slot is freed, or the budget holds no ladder between the sinks and the newest num_layers slots;
            what would work is named.

    Source: LaCache, Sec. 3.2, 3.3, 4.1; the closed form is this library's.
    """
    for name, value in (("n", n), ("num_layers", num_layers), ("budget", budget), ("sinks", sinks)):
        check_int("lacache_plan", name, value, 0)
    for name, given in (("span", span), ("overlap", overlap)):
        if given is not None:
            check_int("lacache_plan", name, given, 0)
    ladder = make_ladder(num_layers, span, overlap, pattern)
    check_holds_ladder("lacache_plan", budget, sinks, least=least_budget(sinks, ladder), kept=ladder.kept)
    cap, cursor = (budget, sinks) if state is None else (state.cap, state.cursor)
    passes: list[tuple[int, int]] = []
    left, kept, freed = n, ladder.kept, ladder.freed
    if n > cap:
        cap = budget + freed // 2
    while left > cap:
        room = max(0, (cap - cursor - num_layers) // kept)
        count = min(-((cap - left) // freed), room)
        if count:
            passes.append((cursor, count))
            cursor += kept * count
            left -= freed * count
        if left > cap:
            cursor = sinks
    return LadderPlan(ladder, n, tuple(passes), LadderState(cap, cursor))


def decode_plan(plan: Sequence[int]) -> LadderPlan:
    """The plan that `encoded` is of. The state is lost."""
    n, num_layers, span, overlap, pattern, *passes = plan
    ladder = Ladder(num_layers, span, overlap, PATTERNS[pattern])
    return LadderPlan(ladder, n, tuple(zip(passes[::2], passes[1::2])), LadderState(0, 0))


@functools.lru_cache
def make_ladder(num_layers: int, span: int | None, overlap: int | None, pattern: str) -> Ladder:
    """The ladder, with the defaults for what is None."""
    if span is None:
        span = max(1, round(num_layers / 4))
    if overlap is None:
        overlap = span // 2
    check_choice("lacache", "pattern", pattern, PATTERNS)
    if num_layers >= 1 and 1 <= span <= num_layers and 0 <= overlap < span:
        ladder = Ladder(num_layers, span, overlap, pattern)
        if ladder.freed:
            return ladder
    valid = [(s, o) for s in range(1, num_layers + 1) for o in range(s) if Ladder(num_layers, s, o).freed]
    shown = ", ".join(map(str, valid[:8])) + (", ..." if len(valid) > 8 else "")
    raise ValueError(
        f"lacache: (span, overlap) must free slots of a ladder of {num_layers} layers, expected one of "
        f"{shown or 'none: the model has too few layers'}; got ({span}, {overlap})"
    )


def least_budget(sinks: int, ladder: Ladder) -> int:
    """What a budget has to hold: the sinks, a ladder's kept slots, and the newest `num_layers` slots."""
    return sinks + ladder.num_layers + ladder.kept
