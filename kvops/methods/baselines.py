"""Baselines built from the same operators: StreamingLLM, L2 norm, Random and the full cache."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..checks import check_int, check_recent, check_vector, inference_only, shown
from ..ops import select_topk
from .base import DecodePolicy, KeyPolicy, Policy, View
from .budgets import budget_tokens, fraction_of
from .merging import MergingPolicy
from .random_numbers import RANGE, random_integers
from .select import all_slots, negative_norms, readable_keys
from .slots import SlotPolicy


@dataclass(frozen=True, eq=False)
class StreamingLLM(SlotPolicy, DecodePolicy):
    """StreamingLLM: keeps the first `sinks` tokens and the newest tokens, `budget` in all.

    Attributes:
        budget: See `BudgetPolicy`. In a cache a fraction is never less than sinks + 1 tokens.
        buffer: See `DecodePolicy`.
        protect: See `DecodePolicy`.
        head_mode: See `BudgetPolicy`.
        sinks: First tokens that are always kept.
        positions: See `SlotPolicy`.

    Source: "Efficient Streaming Language Models with Attention Sinks", Xiao et al., 2023.
    """

    uses_positions: ClassVar[bool] = False

    _: KW_ONLY
    sinks: int = 4

    @property
    def paged(self) -> bool:
        return True

    def newest(self, keep: int) -> int:
        return int(isinstance(self.budget, float))

    def scores(self, view: View) -> Tensor:
        newer = torch.arange(-view.n, 0, dtype=torch.float32, device=view.k.device)  # exact for the last 2^24 slots
        return newer.expand(view.rows, 1, view.n)


@dataclass(frozen=True, eq=False)
class L2(MergingPolicy):
    """L2 norm: keeps the keys with the lowest L2 norm, which get the most attention.

    ```text
    score[i] = -||k_i||
    ```

    Attributes:
        budget: See `BudgetPolicy`. It is the budget of each layer that is not skipped.
        sinks: See `BudgetPolicy`.
        recent: See `KeyPolicy`.
        head_mode: See `BudgetPolicy`.
        buffer: See `DecodePolicy`.
        protect: See `DecodePolicy`.
        skip_layers: Layers that keep everything, in models of more than 8 layers. Layers then differ in length.
        merge: See `MergingPolicy`; not part of the paper.

    Source: "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", Devoto et al., 2024.
    """

    uses_positions: ClassVar[bool] = False

    _: KW_ONLY
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

    With `largest_values` the tokens whose values have the largest L2 norms are kept first, as in VaSE.

    Attributes:
        budget: See `BudgetPolicy`.
        sinks: See `BudgetPolicy`.
        recent: See `KeyPolicy`.
        head_mode: See `BudgetPolicy`.
        buffer: See `DecodePolicy`.
        protect: See `DecodePolicy`.
        seed: The seed of the hash, at least 0.
        largest_values: Tokens with the largest values that are always kept (int), or a fraction in [0, 1) of the budget
            (float), which must then be in tokens; they count towards the budget. Pages are refused.

    Source of `largest_values`: "Value-Aware Stochastic KV Cache Eviction for Reasoning Models", Chang et al., 2026.
    """

    _: KW_ONLY
    seed: int = 0
    largest_values: int | float = 0

    @property
    def heads_alone(self) -> bool:
        return False  # a head's numbers depend on its index among the heads of the tensor

    @property
    def paged(self) -> bool:
        return not self.largest_values  # the norms are computed in torch

    def in_tokens(self, keep: int) -> dict[str, Any]:
        return super().in_tokens(keep) | {"largest_values": self.largest(keep)}

    def largest(self, keep: int) -> int:
        """How many tokens with the largest values are always among the `keep` kept ones."""
        return self.largest_values if isinstance(self.largest_values, int) else fraction_of(self.largest_values, keep)

    def check(self) -> None:
        check_int(self.name, "seed", self.seed, 0)
        check_recent(self.name, self.largest_values, "largest_values")
        if isinstance(self.largest_values, float) and not isinstance(self.budget, int):
            raise ValueError(
                f"{self.name}: largest_values as a fraction needs a budget in tokens, an int, got {shown(self.budget)}"
            )
        super().check()

    def check_holds(self, keep: int, newest: int) -> None:
        super().check_holds(keep, newest)
        if self.sinks + newest + (largest := self.largest(keep)) > keep:
            raise ValueError(
                f"{self.name}: budget must hold sinks + recent + largest_values, expected at least {self.sinks} + "
                f"{newest} + {largest} tokens, got {keep}"
            )

    def scores(self, view: View) -> Tensor:
        check_vector(self.name, "starts", view.starts, view.rows, view.k)
        position = view.positions()
        if view.padding is not None:
            position = position - view.padding[:, None, None]
        scores = random_integers(position.int(), self.seed, view.layer or 0)
        if not self.largest_values:
            return scores
        norms = torch.linalg.vector_norm(readable_keys(self.name, view.v), dim=-1, dtype=torch.float32)
        starts, lengths = self.behind_sinks(view)
        count = self.largest(budget_tokens(self.budget, view.n))
        largest = select_topk(norms, k=count, starts=starts, lengths=lengths)
        # The last column takes the writes of missing entries.
        first = torch.nn.functional.pad(torch.zeros_like(scores), (0, 1))
        first.scatter_(2, torch.where(largest < 0, view.n, largest), float(RANGE))
        return scores + first[..., : view.n]


@dataclass(frozen=True, eq=False)
class Full(Policy):
    """The full cache: keeps everything."""

    budget_settings: ClassVar[tuple[str, ...]] = ()

    @property
    def heads_alone(self) -> bool:
        return True

    @property
    def paged(self) -> bool:
        return True

    def select(self, view: View) -> Tensor:
        return all_slots(view)

    def evict(self, view: View) -> None:
        return None

    def held(self, n: int, prompt: int) -> int:
        """All slots."""
        return n
