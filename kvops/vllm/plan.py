"""Where the slots of a request lie, computed from its tokens, so that vLLM's scheduler and workers agree.

A `Schedule` says when a request is evicted and how many slots it then holds. vLLM, however, assigns blocks by tokens:
a request of n tokens has ceil(n / block_size) of them. An eviction moves the kept tokens to the front of the request's
blocks. Of the blocks behind them,

```text
freed(n) = (n - held(n)) // block_size
```

return to the pool, the last ones in use at that time. They are gaps in the request's list of blocks. Slot i of a
request lies in block i // block_size of those outside the gaps, and new tokens take the slots after the held ones, so
the plugin also computes where vLLM writes them. One block more than the slots need may stay, because the last block of
the tokens and the last block of the slots do not fill at the same time.

With shared prefixes (`Plan.shared`) the first eviction of a request moves nothing in place, because its blocks may be
those of other requests, or be found by later ones. The kept tokens are copied to new blocks, and all blocks before
these are the first gap. From then on vLLM counts the tokens as if the request had begun in its first new block:

```text
length(n) = first new block * block_size + held(first) + n - first        (n, without shared prefixes)
freed(n) = (length(n) - held(n)) // block_size
```

All this depends neither on scores nor on how the tokens were divided into steps, if no step goes beyond an eviction
(`Schedule.cut`). A preempted request that is recomputed therefore holds the same blocks again. This module does not
import vLLM.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from ..cache.queries import check_observed
from ..cache.schedule import Schedule
from ..methods import Policy
from ..methods.base import BudgetPolicy, check_policy
from ..methods.lagkv import LagKV

_REMEMBERED = 1 << 16  # states


class State(NamedTuple):
    """A request after some of its tokens."""

    held: int  # slots in use
    kept: int = 0  # the first slots, which the last eviction kept; later ones hold consecutive tokens
    gaps: tuple[range, ...] = ()  # the blocks that have been freed, ascending, not adjacent


@dataclass
class Plan:
    """A schedule applied to blocks.

    Attributes:
        schedule: when requests are evicted, and by which policy.
        block_size: slots per block.
        shared: whether requests share the blocks of their prompts, see above.
    """

    schedule: Schedule
    block_size: int
    shared: bool = False
    _states: dict[tuple[int, int], State] = field(default_factory=dict, repr=False)
    _first: dict[int, int] = field(default_factory=dict, repr=False)  # by prompt: the tokens at the first eviction

    @property
    def policy(self) -> Policy:
        return self.schedule.policy

    @property
    def kinds(self) -> dict[str, torch.dtype]:
        """The values stored per slot, with dtypes: token positions if the rule reads them, and the policy's own."""
        positions = {"positions": torch.int32} if self.policy.needs.positions else {}
        return positions | dict.fromkeys(self.policy.needs.per_slot, torch.float32)

    def freed(self, n: int, prompt: int) -> int:
        """Return how many blocks have been freed of a request after n tokens, `prompt` of them its prompt."""
        return (self.length(n, prompt) - self.schedule.held(n, prompt)) // self.block_size

    def length(self, n: int, prompt: int) -> int:
        """Return for how many tokens vLLM must assign blocks to a request of n tokens, `prompt` of them its prompt."""
        held = self.schedule.held
        if not self.shared or held(n, prompt) == n:
            return n
        if (first := self._first.get(prompt)) is None:
            # No request holds all its tokens again after an eviction, and none is evicted before its prompt's end.
            self._first[prompt] = first = bisect_left(range(n), True, prompt, key=lambda m: held(m, prompt) < m)
        return _blocks(first, self.block_size) * self.block_size + held(first, prompt) + n - first

    def at(self, n: int, prompt: int) -> State:
        """Return a request's state after n tokens, `prompt` of them its prompt."""
        ahead, m = [n], n
        while (state := self._states.get(_key(m, prompt))) is None and m:  # back to a known state
            m = m - 1 if m > prompt else self.schedule.last(m - 1, prompt)
            ahead.append(m)
        state = state or State(0)
        for before, after in zip(reversed(ahead), [*reversed(ahead)][1:]):
            state = self._next(state, before, after, prompt)
            if len(self._states) >= _REMEMBERED:
                self._states.clear()
            self._states[_key(after, prompt)] = state
        return state

    def _next(self, state: State, before: int, after: int, prompt: int) -> State:
        """Return the state after tokens of which only the last may be followed by an eviction."""
        held = self.schedule.held(after, prompt)
        if held == state.held + after - before:
            return state._replace(held=held)
        if self.copies(state, before):
            return State(held, held, (range(_blocks(after, self.block_size)),))
        gone = {block for gap in state.gaps for block in gap}
        more, block = self.freed(after, prompt) - len(gone), _blocks(self.length(after, prompt), self.block_size)
        while more:
            block -= 1
            if block not in gone:
                gone.add(block)
                more -= 1
        return State(held, held, _ranges(sorted(gone)))

    def copies(self, before: State, n: int) -> bool:
        """Return whether an eviction copies what it keeps: the first one. before: the state, after n tokens."""
        return self.shared and before.held == n

    @staticmethod
    def columns(states: Sequence[State], width: int) -> np.ndarray:
        """Return the first `width` blocks outside the gaps of each state, int64 [states, width]."""
        blocks = np.tile(np.arange(width), (len(states), 1))
        for i in range(max((len(x.gaps) for x in states), default=0)):  # a block behind a gap is so much further
            gaps = [x.gaps[i] if i < len(x.gaps) else range(0) for x in states]
            start, length = np.array([(x.start, len(x)) for x in gaps]).T[..., None]
            blocks += (blocks >= start) * length
        return blocks

    def most(self, max_tokens: int, tokens_in_flight: int) -> int:
        """Return an upper bound on the blocks that a request holds.

        Args:
            max_tokens: the longest request.
            tokens_in_flight: the most tokens that may have been scheduled since blocks were last freed.
        """
        if self.shared:  # until the copies have been made, and the tokens after them come one by one
            return self.width(max_tokens)
        held = max(self.schedule.held(n, prompt) for n in range(max_tokens + 1) for prompt in (1, max_tokens))
        # One more block, see above.
        return min(_blocks(held + tokens_in_flight, self.block_size) + 1, _blocks(max_tokens, self.block_size))

    def width(self, max_tokens: int) -> int:
        """Return an upper bound on the blocks in a request's list, gaps included."""
        blocks = _blocks(max_tokens, self.block_size)
        if not self.shared:
            return blocks
        if self.policy.protect is not None:  # a prompt of any length is copied too
            return 2 * blocks + 1
        pairs = ((n, prompt) for n in range(1, max_tokens + 1) for prompt in (1, n))
        kept = max((x for n, prompt in pairs if (x := self.schedule.held(n, prompt)) < n), default=0)
        return blocks + _blocks(kept, self.block_size) + 1


def why_not_shared(schedule: Schedule) -> str | None:
    """Return why requests with this schedule cannot share the blocks of their prompts, or None if they can."""
    if schedule.block is not None:
        return f"evict={schedule.evict} evicts from a prompt before its end"
    if schedule.policy.needs.per_slot:
        return f"{schedule.policy.name} adds up the scores of all queries, which a shared prefix does not compute again"
    return None


def _key(n: int, prompt: int) -> tuple[int, int]:
    return n, min(n + 1, prompt)  # before its end, the length of a prompt does not matter


def _blocks(slots: int, size: int) -> int:
    return -(-slots // size)


def _ranges(numbers: list[int]) -> tuple[range, ...]:
    """Return ascending numbers as ranges."""
    found: list[range] = []
    for x in numbers:
        if found and found[-1].stop == x:
            found[-1] = range(found[-1].start, x + 1)
        else:
            found.append(range(x, x + 1))
    return tuple(found)


def check(policy: Policy) -> None:
    """Raise for a policy that vLLM's pages cannot serve."""
    check_policy("kvops.vllm", policy)
    name = policy.name
    if policy.needs.stage:
        raise ValueError(
            f"{name}: kvops.vllm does not support it, because vLLM runs no stage of its own before an eviction, got "
            f"{policy!r}; use another policy, such as SnapKV"
        )
    if not isinstance(policy, (LagKV, BudgetPolicy)):
        raise ValueError(
            f"{name}: kvops.vllm counts a request's slots from its tokens, expected a policy that keeps the highest "
            f"scores within a budget, or LagKV, got {policy!r}"
        )
    if policy.merge:
        raise ValueError(f"{name}: kvops.vllm moves tokens without merging their values, expected merge=False")
    check_observed("kvops.vllm", policy)
    if policy.positions != "original":
        raise ValueError(
            f"{name}: vLLM rotates keys by their original positions, expected positions='original', got "
            f"{policy.positions!r}"
        )
    if isinstance(policy, BudgetPolicy) and not isinstance(policy.budget, int):
        raise ValueError(f"{name}: kvops.vllm expects a budget in tokens (an int), got {policy.budget}")
    if not policy.uniform_layers:
        raise ValueError(
            f"{name}: vLLM has one block table for all layers, expected a policy that keeps equally many tokens in "
            f"each layer, got {policy!r}"
        )
    if "w_o" in policy.needs.model:  # a worker takes the weights from its model, see `weights`
        policy = replace(policy, w_o=torch.empty(0, 0))  # type: ignore[call-arg]
    policy.check_equal_heads("vLLM")
    policy.check_cache(0, 1)
