"""LaCache's ladder: which slots each layer keeps.

The kept slots are a function of (layer, slot) alone, computed here on the host in plain integers.

```python
plan = kvops.lacache_plan(n, num_layers=32, budget=512)            # for a cache of n slots
ops.ladder_compact_(k, v, plan=plan, layer=layer)                  # one layer, or lists of all layers
plan = kvops.lacache_plan(n, num_layers=32, budget=512, state=plan.state)      # at the next overflow
```

A ladder is `length` consecutive slots. Every layer keeps `kept` consecutive slots of it, beginning at the layer's
`offset`, and frees the others; deeper layers have larger offsets, and every slot is kept in at least `span` layers. A
cache that overflows is thinned ladder by ladder, from the sinks towards the newest tokens. At the end it starts over
and thins the slots that were thinned before.

Source: LaCache, Sec. 3.2 (the ladder), 3.3 (iterative compaction), Fig. 2 and 4.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from .checks import MAX_LAYERS, check_choice, check_holds_ladder, check_int, plain

Pattern = Literal["paper", "official", "short"]
Compaction = Literal["ladder", "whole"]
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)
COMPACTIONS: tuple[Compaction, ...] = get_args(Compaction)
MAX_PASSES = 192  # per call of the operators
MOST_PASSES = 1 << 14  # per plan, about; each pass thins all slots within the budget once


@dataclass(frozen=True)
class Ladder:
    """The shape of a ladder in a model; `make_ladder` checks it and fills in defaults.

    The properties are not cached because `torch.compile` traces them.
    """

    num_layers: int
    span: int
    overlap: int
    pattern: Pattern = "paper"

    @property
    def step(self) -> int:
        """The distance in layers from one slot's first layer to the next slot's."""
        return self.span - self.overlap

    @property
    def length(self) -> int:
        """The slots of a ladder."""
        reached = 1 - (self.span - self.num_layers) // self.step
        if self.pattern == "paper":  # each layer keeps `_kept` slots, so no more than these fit, `span` layers each
            return min(reached, self._kept * (self.num_layers // self.span))
        return reached

    @property
    def kept(self) -> int:
        """The slots of a ladder that each layer keeps."""
        return min(self._kept, self.length)

    @property
    def _kept(self) -> int:
        return -(-self.span // self.step)

    @property
    def freed(self) -> int:
        """The slots of a ladder that each layer frees."""
        return self.length - self.kept

    def least(self, whole: bool) -> int:
        """The fewest slots that a budget must hold besides the sinks and the newest `num_layers` slots.

        A budget of one ladder's kept slots is enough, or, if whole caches are thinned, of all but one of its slots: the
        slot that overflows then completes a ladder.
        """
        return self.length - 1 if whole else self.kept

    def offset(self, layer: int) -> int:
        """The first slot of a ladder that the layer keeps."""
        if self.pattern == "official":
            return layer % (self.freed + 1)
        first = layer // self.step - (self.kept - 1)
        if self.pattern == "paper":  # early enough that the slots that follow have `span` layers each
            first = max(first, self.freed - self.kept * ((self.num_layers - 1 - layer) // self.span))
        return min(max(first, 0), self.freed)


@dataclass(frozen=True)
class LadderState:
    """What a sequence remembers from one plan to the next.

    Attributes:
        cap: A cache with more slots is thinned. It is the budget until the first overflow, then budget + freed // 2.
        cursor: The slot at which the next ladder begins.
    """

    cap: int
    cursor: int


@dataclass(frozen=True)
class LadderPlan:
    """Which of n slots each layer keeps; made by `lacache_plan`.

    Attributes:
        ladder: The shape of a ladder.
        n: The slots before the move.
        passes: Pairs (cursor, number of ladders), applied in order.
        state: The state to pass to the next `lacache_plan` of the same sequence.
    """

    ladder: Ladder
    n: int
    passes: tuple[tuple[int, int], ...]
    state: LadderState

    def __len__(self) -> int:
        """The number of slots that each layer keeps."""
        return self.n - self.ladder.freed * sum(count for _, count in self.passes)

    @property
    def encoded(self) -> tuple[int, ...]:
        """The plan as integers, as the operators take it."""
        shape = self.ladder
        head = (self.n, shape.num_layers, shape.span, shape.overlap, PATTERNS.index(shape.pattern))
        return (*head, *(x for one in self.passes for x in one))

    def indices(self, layer: int, device: torch.device | str | None = None) -> Tensor:
        """The slots that a layer keeps: int64 [len(plan)], ascending."""
        ladder, offset = self.ladder, self.ladder.offset(layer)
        slots = torch.arange(len(self), device=device)
        for cursor, count in reversed(self.passes):
            inside = slots - cursor
            moved = torch.div(inside, ladder.kept, rounding_mode="floor") * ladder.freed + offset
            moved = torch.where(inside < ladder.kept * count, moved, ladder.freed * count)
            slots = slots + torch.where(inside < 0, 0, moved)
        return slots

    def parts(self) -> Iterator[LadderPlan]:
        """Splits the plan into plans of at most `MAX_PASSES` passes, to be applied in order; usually one."""
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
    pattern: Pattern = "paper",
    compaction: Compaction = "ladder",
    state: LadderState | None = None,
) -> LadderPlan:
    """Plan which slots LaCache keeps of a cache of n slots, the same number in every layer.

    ```text
    B = ceil(span / (span - overlap))                        slots of a ladder that each layer keeps
    A = 1 + ceil((num_layers - span) / (span - overlap))     slots of a ladder, at most B * (num_layers // span)
    R = A - B                                                slots of it that each layer frees
    ```

    A cache with more than budget + R // 2 slots is thinned, ladder by ladder, until it has at most that many. Its
    length therefore oscillates by R, and the mean length token by token is the budget (budget + 1/2 for even R).

    Args:
        n: The slots of the cache.
        num_layers: The layers of the model.
        budget: The number of slots to stay within.
        span: The number of layers that keep a token; None is max(1, round(num_layers / 4)), the paper's setting for
            language modelling.
        overlap: How many of those layers the next token shares; None is span // 2.
        sinks: First slots that are always kept.
        pattern: Where the B slots that layer l keeps of a ladder begin. "paper": at
            max(l // (span - overlap) - (B - 1), R - B * ((num_layers - 1 - l) // span)), clamped to [0, R]. Early
            layers keep early tokens, and every token is in at least `span` consecutive layers. "short": at
            l // (span - overlap) - (B - 1), clamped, and A has no upper bound; the last tokens of a ladder may then be
            in fewer than `span` layers. "official": at l mod (R + 1), with the A of "short", as the released code does.
        compaction: "ladder" thins as few ladders as needed, beginning where the last plan ended. "whole" thins all
            slots between the sinks and the newest num_layers slots at once, whenever there are more than the budget.
            The length then falls to about B / A of the budget, and the mean length is below the budget.
        state: The `state` of the last plan for the same sequence and settings; None for a sequence that has never
            overflowed.

    Returns:
        The plan. It has no passes if n is within the budget. Planning takes microseconds and uses no tensors.

    Raises:
        TypeError: A number is not an int.
        ValueError: The ladder frees no slot, or the budget does not hold the sinks, one ladder's kept slots (for
            "whole" all slots of a ladder but one) and the newest num_layers slots. The message names values that work.
            Or n is so many times the budget that the plan would have more than 16,384 passes.

    Source: LaCache, Sec. 3.2, 3.3, 4.1; the closed form is this library's.
    """
    check_int("lacache_plan", "num_layers", num_layers, 0, MAX_LAYERS)
    for name, value in (("n", n), ("budget", budget), ("sinks", sinks)):
        check_int("lacache_plan", name, value, 0)
    for name, given in (("span", span), ("overlap", overlap)):
        if given is not None:
            check_int("lacache_plan", name, given, 0)
    n, num_layers, budget, sinks, span, overlap = map(plain, (n, num_layers, budget, sinks, span, overlap))
    ladder = make_ladder(num_layers, span, overlap, pattern)
    check_choice("lacache_plan", "compaction", compaction, COMPACTIONS)
    whole = compaction == "whole"
    check_holds_ladder("lacache_plan", budget, sinks, ladder.num_layers, ladder.least(whole))
    cap, cursor = (budget, sinks) if state is None else (state.cap, state.cursor)
    passes: list[tuple[int, int]] = []
    left, kept, freed = n, ladder.kept, ladder.freed
    if n > cap:
        cap = budget if whole else budget + freed // 2
    if not whole and n > (most := cap + MOST_PASSES * freed * max(1, (cap - sinks - num_layers) // kept)):
        raise ValueError(
            f"lacache_plan: n must be at most {most} to be thinned to a budget of {budget}, got {n}; raise budget, or "
            "append the tokens in several steps"
        )
    while left > cap:
        if whole:
            passes.append((sinks, count := (left - sinks - num_layers) // ladder.length))
            left -= freed * count
            continue
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
    """Rebuilds a plan from its `encoded` form, without the state."""
    n, num_layers, span, overlap, pattern, *passes = plan
    ladder = Ladder(num_layers, span, overlap, PATTERNS[pattern])
    return LadderPlan(ladder, n, tuple(zip(passes[::2], passes[1::2])), LadderState(0, 0))


@functools.lru_cache
def make_ladder(
    num_layers: int, span: int | None, overlap: int | None, pattern: Pattern, op: str = "lacache"
) -> Ladder:
    """Makes a ladder, with the defaults for settings that are None."""
    if span is None:
        span = max(1, round(num_layers / 4))
    if overlap is None:
        overlap = span // 2
    check_choice(op, "pattern", pattern, PATTERNS)
    if num_layers >= 1 and 1 <= span <= num_layers and 0 <= overlap < span:
        ladder = Ladder(num_layers, span, overlap, pattern)
        if ladder.freed:
            return ladder
    every = ((s, o) for s in range(1, num_layers + 1) for o in range(s) if Ladder(num_layers, s, o).freed)
    valid = list(itertools.islice(every, 9))
    shown = ", ".join(map(str, valid[:8])) + (", ..." if len(valid) > 8 else "")
    raise ValueError(
        f"{op}: (span, overlap) must free slots of a ladder of {num_layers} layers, expected one of "
        f"{shown or 'none: the model has too few layers'}; got ({span}, {overlap})"
    )
