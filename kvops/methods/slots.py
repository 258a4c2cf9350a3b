"""Policies that can give tokens the positions of their slots."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from ..checks import check_choice
from .base import Policy

POSITIONS = ("slots", "original")


@dataclass(frozen=True, eq=False)
class SlotPolicy(Policy):
    """A policy that can give tokens the positions of their slots: 0, 1, ..., without the gaps of evicted ones.

    Attributes:
        positions: "slots"; or "original": keys stay at the positions that they were rotated at. For "slots" a cache
            needs the model's rotary embedding (`kvops.Cache(policy, rope=...)`); without it keys are moved as they
            come, and their rotation is the caller's business (`kvops.ops.rope_at_slots`).
    """

    _: KW_ONLY
    positions: str = "slots"

    def check(self) -> None:
        check_choice(self.name, "positions", self.positions, POSITIONS)
        super().check()
