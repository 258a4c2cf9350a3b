"""Baselines built from the same operators: StreamingLLM, L2 norm, Random and the full cache."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..ops.checks import check_int, check_vector, inference_only, shown
from .base import BUFFER, BudgetPolicy, KeyPolicy, Needs, Policy, Positions, Protect
from .random_numbers import random_integers
from .select import all_slots, negative_norms
from .view import View


@dataclass(frozen=True, eq=False)
class StreamingLLM(BudgetPolicy):
    """StreamingLLM: keeps the first `sinks` tokens and the newest tokens, `budget` in all.

    Attributes:
        budget: Tokens to keep (int), or a fraction in (0, 1] of the valid slots (float), rounded down, at least 1; the
            same for all heads. In a cache a fraction is never less than sinks + 1 tokens.
        buffer: See `KeyPolicy`.
        protect: See `KeyPolicy`.
        head_mode: Without effect, since all heads keep the same tokens; "adaptive" is refused.
        sinks: First tokens that are always kept.
        positions: See `LaCache`. One-shot calls move the keys as they are.

    Source: "Efficient Streaming Language Models with Attention Sinks", Xiao et al., 2023.
    """

    needs = Needs(dense=False, positions=False)

    _: KW_ONLY
    sinks: int = 4
    buffer: int | float | None = BUFFER
    protect: Protect | None = None
    positions: Positions = "slots"

    def newest(self, keep: int) -> int:
        return int(isinstance(self.budget, float))

    def scores(self, view: View) -> Tensor:
        newer = torch.arange(-view.n, 0, dtype=torch.float32, device=view.keys.device)  # exact for the last 2^24 slots
        return newer.expand(view.rows, 1, view.n)


@dataclass(frozen=True, eq=False)
class L2(KeyPolicy):
    """L2 norm: keeps the keys with the lowest L2 norm, which get the most attention.

    ```text
    score[i] = -||k_i||
    ```

    Attributes:
        budget: See `BudgetPolicy`. It is the budget of each layer that is not skipped.
        sinks: See `BudgetPolicy`.
        recent: See `KeyPolicy`.
        head_mode: See `BudgetPolicy`.
        buffer: See `KeyPolicy`.
        protect: See `KeyPolicy`.
        skip_layers: Layers that keep everything, in models of more than 8 layers. Layers then differ in length.
            One-shot calls skip only if `layer` and `num_layers` are given.
        merge: See `KeyDiff`.

    Source: "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", Devoto et al., 2024.
    """

    needs = Needs(positions=False)

    _: KW_ONLY
    merge: bool = False
    skip_layers: tuple[int, ...] = (0, 1)

    def check(self) -> None:
        if not isinstance(self.skip_layers, tuple):
            raise TypeError(f"{self.name}: skip_layers must be a tuple of layer indices, got {shown(self.skip_layers)}")
        super().check()

    @property
    def uniform_layers(self) -> bool:
        return not self.skip_layers

    def whole(self, view: View) -> bool:
        return view.layer in self.skip_layers and view.num_layers is not None and view.num_layers > 8

    def scores(self, view: View) -> Tensor:
        inference_only(self.name, k=view.k)
        return negative_norms(self.name, view.k)


@dataclass(frozen=True, eq=False)
class Random(KeyPolicy):
    """Random: keeps random tokens, different ones in every head and layer.

    The score of a token is a hash of (seed, layer, head, position). It is the same on every device, in every row of a
    batch, and whether tokens come in one call, in chunks or one by one. Positions count from a row's first valid token.

    Attributes:
        budget: See `BudgetPolicy`.
        sinks: See `BudgetPolicy`.
        recent: See `KeyPolicy`.
        head_mode: See `BudgetPolicy`.
        buffer: See `KeyPolicy`.
        protect: See `KeyPolicy`.
        seed: The seed of the hash, at least 0.
    """

    needs = Needs(dense=False)

    _: KW_ONLY
    seed: int = 0

    @property
    def heads_alone(self) -> bool:
        return False  # a head's numbers depend on its index among the heads of the tensor

    def check(self) -> None:
        check_int(self.name, "seed", self.seed, 0)
        super().check()

    def scores(self, view: View) -> Tensor:
        check_vector(self.name, "starts", view.starts, view.rows, view.k)
        return random_integers(view.row_positions(), self.seed, view.layer or 0)


@dataclass(frozen=True, eq=False)
class Full(Policy):
    """The full cache: keeps everything."""

    needs = Needs(dense=False, positions=False)
    budget_settings: ClassVar[tuple[str, ...]] = ()

    @property
    def heads_alone(self) -> bool:
        return True

    def select(self, view: View) -> Tensor:
        return all_slots(view)

    def evict(self, view: View) -> None:
        return None

    def held(self, n: int, prompt: int) -> int:
        """All slots."""
        return n
