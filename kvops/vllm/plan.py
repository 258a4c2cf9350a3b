"""Which blocks a request holds, as a function of its tokens alone: what vLLM's scheduler and its workers agree on.

vLLM gives token t of a request slot t % block_size of its block t // block_size, and the plugin leaves it so. When
blocks have filled, the tokens that stay move to the front of the blocks that were looked at, and the rest of these are
given back: a gap. The request is then attended to over the blocks outside of its gaps, in order. So of n tokens

    held = block_size * plan.held(n // block_size) + n % block_size

slots are held. Neither the prompt's length nor how tokens were cut into steps plays a part: after n tokens the same
blocks are held. A preempted request, computed anew, ends as it was. This module does not import vLLM.
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
from ..methods.laq import LAQ

Counts: TypeAlias = np.ndarray  # int64, a few numbers: a numpy call costs a third of a torch call


class Move(NamedTuple):
    """The tokens that stay of some blocks move to the front of the first `moved` of them."""

    blocks: list[int]  # of the request, in order: those that the rule looks at
    moved: int  # how many of them, the first ones, it chooses from; what it chooses of the others is left alone
    moved_before: int  # how many of them, the first ones, hold what an earlier move kept

    @property
    def end(self) -> int:
        """One past the last block that the rule looks at."""
        return self.blocks[-1] + 1


@dataclass(frozen=True)
class Plan:
    """A policy on blocks.

    Attributes:
        policy: with the settings that it has here.
        rule: the policy whose `select` makes one move.
        kept: blocks that a move fills.
        block_size: slots of a block.
    """

    policy: Policy
    rule: Policy
    kept: int
    block_size: int

    @property
    def kinds(self) -> dict[str, torch.dtype]:
        """The values stored for each slot: token positions where the rule reads them, and the policy's own."""
        positions = {"positions": torch.int32} if self.rule.uses_positions else {}
        return positions | dict.fromkeys(self.rule.by_slot, torch.float32)

    def held(self, filled: int) -> int:
        """How many of so many filled blocks are held."""
        raise NotImplementedError

    def gaps(self, filled: int) -> list[range]:
        """The blocks that are given back once so many of a request's blocks have filled, in order."""
        raise NotImplementedError

    def gone(self, filled: Counts) -> Counts:
        """How many blocks the gaps have: filled - held(filled), for many requests at once."""
        raise NotImplementedError

    def block_of(self, filled: Counts, column: Counts) -> Counts:
        """The blocks at these places of those outside of the gaps, for many requests at once."""
        raise NotImplementedError

    def moves(self, before: int, after: int) -> Iterator[Move]:
        """The moves of a step that begins with `before` blocks filled and ends with `after`."""
        raise NotImplementedError

    def most(self, max_tokens: int, tokens_in_flight: int) -> int:
        """The most blocks that a request of up to max_tokens holds, where so many of its last tokens may have been
        scheduled since blocks were last given back."""
        size = self.block_size
        # One more, as these tokens may begin anywhere in a block.
        open_blocks = -(-tokens_in_flight // size) + 1
        held = max(map(self.held, range(max_tokens // size + 1)))
        return min(held + open_blocks, -(-max_tokens // size))


@dataclass(frozen=True)
class BudgetPlan(Plan):
    """A budget and a buffer of whole blocks: when the buffer is full, the budget's blocks take what stays of both."""

    buffer: int

    def held(self, filled: int) -> int:
        more = filled - self.kept
        return filled if more < self.buffer else self.kept + more % self.buffer

    def _folded(self, filled: int) -> int:
        """How many of a request's blocks have gone into the budget's; 0: all are as they were."""
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
    """LagKV in whole blocks: a partition's first blocks take what stays of it, once the next partition is complete."""

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
        behind = place >= folded * self.kept  # of all that partitions have kept
        partition = place // max(1, self.kept)  # else; with none kept all is behind
        gaps = (place >= 0) * (behind * folded + ~behind * partition)
        return column + gaps * (self.lag - self.kept)

    def _folded(self, filled: Counts) -> Counts:
        """The partitions that have been evicted: `num_segments`."""
        return np.maximum((filled - self.sinks) // self.lag - 1, 0)

    def moves(self, before: int, after: int) -> Iterator[Move]:
        for i in range(*(num_segments(x, self.sinks, self.lag) for x in (before, after))):
            start = self.sinks + i * self.lag
            yield Move([*range(start, start + 2 * self.lag)], self.lag, 0)


def check(policy: Policy) -> None:
    """Raises for what vLLM's pages cannot serve, whatever the size of blocks."""
    check_policy("kvops.vllm", policy)
    name = policy.name
    if isinstance(policy, LAQ):
        raise ValueError(f"{name}: vLLM drafts no answer before it evicts, expected another policy, got {policy!r}")
    if not isinstance(policy, (LagKV, BudgetPolicy)):
        raise ValueError(
            f"{name}: kvops.vllm gives back whole blocks, expected a policy that keeps a budget's highest scores, or "
            f"LagKV, got {policy!r}"
        )
    check_observed("kvops.vllm", policy)
    if policy.positions != "original":
        raise ValueError(
            f"{name}: vLLM leaves keys at the positions of their tokens, expected positions='original', got "
            f"{policy.positions!r}"
        )
    if isinstance(policy, BudgetPolicy) and not isinstance(policy.budget, int):
        raise ValueError(f"{name}: kvops.vllm expects a budget in tokens, an int, got {policy.budget}")
    if not policy.uniform_layers:
        raise ValueError(
            f"{name}: vLLM has one block table for all layers, expected a policy under which they hold equally many "
            f"tokens, got {policy!r}"
        )
    policy.check_cache(0, 1)
    if isinstance(policy, DecodePolicy) and policy.buffer is None:
        raise ValueError(
            f"{name}: kvops.vllm evicts in prompts and decode alike, expected a buffer in tokens or as a share of the "
            f"budget, got {policy!r}"
        )


def plan(policy: Policy, block_size: int) -> Plan:
    """The plan of a policy on blocks of so many slots.

    A buffer is rounded up to whole blocks, since blocks are evicted when they have filled. A policy that has none,
    since it keeps all of decode elsewhere, gets that of the others.

    Raises:
        ValueError: kvops.vllm does not serve the policy, or its budget, sinks or lag are not of whole blocks.
    """
    check(policy)

    def whole(setting: str, tokens: int, least: int = 1) -> int:
        if tokens % block_size or tokens < least:
            raise ValueError(
                f"{policy.name}: vLLM's blocks have {block_size} slots, expected {setting} to be a multiple of it"
                f"{' above 0' if least else ''}, got {tokens}"
            )
        return tokens // block_size

    if isinstance(policy, LagKV):
        sinks, lag = whole("sinks", policy.sinks, 0), whole("lag", policy.lag)
        kept = whole("int(ratio * lag)", policy.kept, 0)
        return LagPlan(policy, replace(policy, sinks=0), kept, block_size, sinks, lag)
    assert isinstance(policy, BudgetPolicy) and isinstance(policy.budget, int)  # as `check` asks for
    budget = whole("budget", policy.budget)
    buffer = -(-policy.spare(policy.budget) // block_size)
    if isinstance(policy, DecodePolicy):
        policy = replace(policy, buffer=buffer * block_size)
    return BudgetPlan(policy, policy, budget, block_size, buffer)
