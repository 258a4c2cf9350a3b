"""Policies that can renumber tokens by their slots."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from ..ops.checks import check_choice
from .base import POSITIONS, Policy, Positions


@dataclass(frozen=True, eq=False)
class SlotPolicy(Policy):
    """A policy that can use slots as positions: 0, 1, ..., without gaps for evicted tokens.

    Attributes:
        positions: "slots", or "original": keys keep the positions at which they were rotated. For "slots" a cache needs
            the model's rotary embedding (`kvops.Cache(policy, rope=...)`). Without it the cache moves the keys as they
            are, and the caller rotates them (`kvops.ops.rope_at_slots`).
    """

    _: KW_ONLY
    positions: Positions = "slots"

    def check(self) -> None:
        check_choice(self.name, "positions", self.positions, POSITIONS)
        super().check()
