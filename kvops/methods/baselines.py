"""Baselines for every comparison, built from the same operators: StreamingLLM, L2 norm, Random, the full cache."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..checks import check_int, check_vector, inference_only
from .base import DecodePolicy, KeyPolicy, Policy, View
from .random_numbers import random_integers
from .select import all_slots, negative_norms
from .slots import SlotPolicy


@dataclass(frozen=True, eq=False)
class StreamingLLM(SlotPolicy, DecodePolicy):
    """The first `sinks` tokens and the newest, `budget` in all.

    Attributes:
        budget, buffer: see `DecodePolicy`; in a cache a fraction is never less than sinks + 1 tokens.
        sinks: first tokens that always stay.
        positions: see `SlotPolicy`.

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
class L2(KeyPolicy):
    """The keys of the lowest L2 norm: they draw the most attention.

    Attributes:
        budget, sinks, recent, head_mode, buffer: see `KeyPolicy`. The budget is that of layers that are not skipped.
        skip_layers: layers that stay whole in models of more than 8, so layers differ in length.

    Source: "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", Devoto et al., 2024.
    """

    uses_positions: ClassVar[bool] = False

    _: KW_ONLY
    skip_layers: tuple[int, ...] = (0, 1)

    def check(self) -> None:
        if not isinstance(self.skip_layers, tuple):
            raise TypeError(f"{self.name}: skip_layers must be a tuple of layers, got {self.skip_layers!r}")
        super().check()

    @property
    def uniform_layers(self) -> bool:
        return not self.skip_layers

    def whole(self, view: View) -> bool:
        return view.layer in self.skip_layers and view.num_layers is not None and view.num_layers > 8

    def scores(self, view: View) -> Tensor:
        inference_only(self.name, k=view.k)
        return negative_norms(view.k)


@dataclass(frozen=True, eq=False)
class Random(KeyPolicy):
    """A random `budget` of the tokens, another one in every head and layer: those of the highest hash.

    A token's rank is fixed by (seed, layer, head, position), so it is the same on every device, in every row of a
    batch, and in one call, chunks and single tokens. Positions count from a row's first valid token.

    Attributes:
        budget, sinks, recent, head_mode, buffer: see `KeyPolicy`.
        seed: at least 0.
    """

    _: KW_ONLY
    seed: int = 0

    @property
    def heads_alone(self) -> bool:
        return False  # a head's numbers go by its place among those that are there

    @property
    def paged(self) -> bool:
        return True

    def check(self) -> None:
        check_int(self.name, "seed", self.seed, 0)
        super().check()

    def scores(self, view: View) -> Tensor:
        check_vector(self.name, "starts", view.starts, view.rows, view.k)
        position = view.positions()
        if view.padding is not None:
            position = position - view.padding[:, None, None]
        return random_integers(position.int(), self.seed, view.layer or 0)


@dataclass(frozen=True, eq=False)
class Full(Policy):
    """The whole cache: keeps everything."""

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
        """All."""
        return n
