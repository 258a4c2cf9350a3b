"""Which blocks a request holds, computed from its number of tokens, so that vLLM's scheduler and workers agree.

vLLM writes token t of a request to slot t % block_size of the request's block t // block_size, and the plugin does not
change that. When blocks have filled, an eviction moves the kept tokens to the front of the blocks it read and frees the
rest of them. The freed blocks are a gap in the request's list of blocks. Attention then reads the blocks outside the
gaps, in order. A request of n tokens holds

```text
held = block_size * plan.held(n // block_size) + n % block_size
```

slots. This depends neither on the prompt's length nor on how the tokens were split into steps. A preempted request that
is recomputed therefore holds the same blocks again. This module does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from ..cache.queries import check_observed
from ..lag import num_segments
from ..methods import Policy
from ..methods.base import BudgetPolicy, DecodePolicy, check_policy
from ..methods.lagkv import LagKV

Counts: TypeAlias = np.ndarray  # int64, one per request: for so few numbers numpy's calls take a third of torch's time


class Move(NamedTuple):
    """One eviction of a request: it moves the kept tokens of the first `moved` blocks to the front of these blocks."""

    blocks: list[int]  # blocks of the request, ascending, that the rule reads
    moved: int  # the first `moved` blocks are evicted; tokens that the rule selects in later blocks are not moved
    moved_before: int  # the first `moved_before` blocks hold tokens that an earlier move kept

    @property
    def end(self) -> int:
        """One past the last block that the rule reads."""
        return self.blocks[-1] + 1


@dataclass(frozen=True)
class Plan:
    """A policy applied to blocks.

    Attributes:
        policy: the policy, with its settings as rounded for this block size.
        rule: the policy whose `select` chooses the kept tokens of one move.
        kept: number of blocks that the kept tokens of a move fill.
        block_size: slots per block.
    """

    policy: Policy
    rule: Policy
    kept: int
    block_size: int

    @property
    def kinds(self) -> dict[str, torch.dtype]:
        """The values stored per slot, with dtypes: token positions if the rule reads them, and the policy's own."""
        positions = {"positions": torch.int32} if self.rule.uses_positions else {}
        return positions | dict.fromkeys(self.rule.by_slot, torch.float32)

    def held(self, filled: int) -> int:
        """Return how many blocks a request holds after `filled` of its blocks have filled."""
        raise NotImplementedError

    def gaps(self, filled: int) -> list[range]:
        """Return the ranges of blocks that are freed once `filled` of a request's blocks have filled, ascending."""
        raise NotImplementedError

    def gone(self, filled: Counts) -> Counts:
        """Return the number of freed blocks, filled - held(filled), for many requests at once."""
        raise NotImplementedError

    def block_of(self, filled: Counts, column: Counts) -> Counts:
        """Map columns of the list of held blocks to blocks of the request, for many requests at once."""
        raise NotImplementedError

    def moves(self, before: int, after: int) -> Iterator[Move]:
        """Yield the moves of a step that begins with `before` filled blocks and ends with `after`."""
        raise NotImplementedError

    def most(self, max_tokens: int, tokens_in_flight: int) -> int:
        """Return an upper bound on the blocks that a request holds.

        Args:
            max_tokens: the longest request.
            tokens_in_flight: the most tokens that may have been scheduled since blocks were last freed.
        """
        size = self.block_size
        # One more block, because the tokens in flight may begin anywhere in a block.
        open_blocks = -(-tokens_in_flight // size) + 1
        held = max(map(self.held, range(max_tokens // size + 1)))
        return min(held + open_blocks, -(-max_tokens // size))


@dataclass(frozen=True)
class BudgetPlan(Plan):
    """A budget and a buffer of whole blocks: when the buffer is full, the kept tokens of both move into the budget."""

    buffer: int

    def held(self, filled: int) -> int:
        more = filled - self.kept
        return filled if more < self.buffer else self.kept + more % self.buffer

    def _folded(self, filled: int) -> int:
        """Return how many of a request's first blocks have been evicted into the budget, 0 before the first time."""
        held = self.held(filled)
        return filled - (held - self.kept) if held < filled else 0

    def gaps(self, filled: int) -> list[range]:
        folded = self._folded(filled)
        return [range(self.kept, folded)] if folded else []

    def gone(self, filled: Counts) -> Counts:
        more = np.maximum(filled - self.kept, 0)
        return more - more % self.buffer

    def block_of(self, filled: Counts, column: Counts) -> Counts:
        return column + (column >= self.kept) * self.gone(filled)

    def moves(self, before: int, after: int) -> Iterator[Move]:
        old, new = self._folded(before), self._folded(after)
        if new > old:
            blocks = [*range(self.kept if old else 0), *range(old, new)]
            yield Move(blocks, len(blocks), self.kept if old else 0)


@dataclass(frozen=True)
class LagPlan(Plan):
    """LagKV in whole blocks: a partition's kept tokens move to its first blocks once the next partition is complete."""

    sinks: int
    lag: int

    def held(self, filled: int) -> int:
        return self.policy.held(filled * self.block_size, 0) // self.block_size

    def gaps(self, filled: int) -> list[range]:
        ends = (self.sinks + (i + 1) * self.lag for i in range(num_segments(filled, self.sinks, self.lag)))
        return [range(end - self.lag + self.kept, end) for end in ends] if self.kept < self.lag else []

    def gone(self, filled: Counts) -> Counts:
        return self._folded(filled) * (self.lag - self.kept)

    def block_of(self, filled: Counts, column: Counts) -> Counts:
        folded, place = self._folded(filled), column - self.sinks
        behind = place >= folded * self.kept  # after the blocks that the evicted partitions keep
        partition = place // max(1, self.kept)  # used where not behind; with kept == 0 everything is behind
        gaps = (place >= 0) * (behind * folded + ~behind * partition)
        return column + gaps * (self.lag - self.kept)

    def _folded(self, filled: Counts) -> Counts:
        """Return the number of evicted partitions: `num_segments`, for many requests at once."""
        return np.maximum((filled - self.sinks) // self.lag - 1, 0)

    def moves(self, before: int, after: int) -> Iterator[Move]:
        for i in range(*(num_segments(x, self.sinks, self.lag) for x in (before, after))):
            start = self.sinks + i * self.lag
            yield Move([*range(start, start + 2 * self.lag)], self.lag, 0)


def check(policy: Policy) -> None:
    """Raise for a policy that vLLM's pages cannot serve at any block size."""
    check_policy("kvops.vllm", policy)
    name = policy.name
    if policy.staged:
        raise ValueError(
            f"{name}: kvops.vllm does not support it, because vLLM runs no stage of its own before an eviction, got "
            f"{policy!r}; use another policy, such as SnapKV"
        )
    if not isinstance(policy, (LagKV, BudgetPolicy)):
        raise ValueError(
            f"{name}: kvops.vllm frees whole blocks, expected a policy that keeps the highest scores within a budget, "
            f"or LagKV, got {policy!r}"
        )
    if policy.merges:
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
    policy.check_cache(0, 1)
    if isinstance(policy, DecodePolicy) and policy.buffer is None:
        raise ValueError(
            f"{name}: kvops.vllm evicts in prefill and decode alike, expected buffer to be a number of tokens or a "
            f"fraction of the budget, got {policy!r}"
        )


def plan(policy: Policy, block_size: int) -> Plan:
    """Return the plan of a policy for a block size.

    The buffer is rounded up to whole blocks, because evictions run when blocks have filled. Policies without a buffer,
    which elsewhere keep all decoded tokens, get the default buffer of the other policies.

    Args:
        policy: the policy, with budget, sinks and lag in whole blocks.
        block_size: slots per block.

    Raises:
        ValueError: kvops.vllm does not support the policy, or its budget, sinks or lag are not whole blocks.
    """
    check(policy)

    def whole(setting: str, tokens: int, least: int = 1) -> int:
        if tokens % block_size or tokens < least:
            raise ValueError(
                f"{policy.name}: kvops.vllm expects {setting} to be a {'positive ' if least else ''}multiple of "
                f"vLLM's block size ({block_size}), got {tokens}"
            )
        return tokens // block_size

    if isinstance(policy, LagKV):
        sinks, lag = whole("sinks", policy.sinks, 0), whole("lag", policy.lag)
        kept = whole("floor(ratio * lag)", policy.kept, 0)
        return LagPlan(policy, replace(policy, sinks=0), kept, block_size, sinks, lag)
    assert isinstance(policy, BudgetPolicy) and isinstance(policy.budget, int)  # ensured by `check`
    budget = whole("budget", policy.budget)
    buffer = -(-policy.spare(policy.budget) // block_size)
    if isinstance(policy, DecodePolicy):
        policy = replace(policy, buffer=buffer * block_size)
    return BudgetPlan(policy, policy, budget, block_size, buffer)
