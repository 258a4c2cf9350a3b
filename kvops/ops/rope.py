"""Rotary position embedding (RoPE): tables that rotate keys from one position to another.

RoPE rotates pair i of a key's channels by position * inv_freq[i]. A rotation to another position, the inverse of a
rotation, and positions that a model interpolates are all one cosine and one sine per (position, pair).
`ops.rope_at_slots` applies them in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .checks import check_int

Tables = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Rope:
    """A model's rotary embedding.

    Attributes:
        inv_freq: fp32 [pairs], radians per position, as the model uses them, so that they include any scaling of
            positions. Channels from 2 * pairs on are not rotated.
        interleaved: Pair i is channels 2 i and 2 i + 1 (GPT-J, GLM, Cohere) instead of i and i + pairs (NeoX, Llama).
        scaling: The factor by which the model multiplies cosines and sines (YaRN's attention factor).
        dtype: The dtype to which the model rounds cosines and sines; None if it does not round them.
    """

    inv_freq: Tensor
    interleaved: bool = False
    scaling: float = 1.0
    dtype: torch.dtype | None = None
    _made: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  # the cached tables

    @staticmethod
    def of(
        dim: int, theta: float = 10000.0, *, interleaved: bool = False, device: torch.device | str | None = None
    ) -> Rope:
        """Make the plain embedding: inv_freq[i] = theta^(-2 i / dim).

        Args:
            dim: Rotated channels of a head.
            theta: The base of the frequencies.
            interleaved: See the class.
            device: The device of inv_freq; None is torch's default.
        """
        check_int("Rope.of", "dim", dim, 0, 1 << 16)
        exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
        return Rope(1.0 / theta**exponent, interleaved)

    def to(self, device: torch.device, dtype: torch.dtype) -> Rope:
        """The same embedding on a device, made once. It rounds to `dtype` unless it has a dtype of its own."""
        twin = self._made.get((device, dtype))
        if twin is None:
            twin = replace(self, inv_freq=self.inv_freq.to(device), dtype=self.dtype or dtype)
            self._made[device, dtype] = twin
        return twin

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Compute cosines and sines of positions as the model does: int [...] -> fp32 [..., pairs] each."""
        angles = positions.unsqueeze(-1).float() * self.inv_freq.to(positions.device)
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        if self.dtype is not None:
            cos, sin = cos.to(self.dtype).float(), sin.to(self.dtype).float()
        return cos, sin

    def first(self, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The `tables` of positions 0 to n - 1, computed once: fp32 [n, pairs] each."""
        tables = self._made.get(device)
        if tables is None or len(tables[0]) < n:
            tables = self._made[device] = self.tables(torch.arange(n + n // 2, device=device))
        return tables[0][:n], tables[1][:n]

    def average(self, offsets: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """The frequencies and the mean of exp(i omega offset) over a range or tuple of offsets, times `scaling`.

        fp64 and complex128, [pairs] each. Computed once per device, so that evictions do not wait for the host. Over
        the m offsets of a range, the mean is a geometric series: exp(i omega middle) sin(m x) / (m sin(x)), with x half
        of omega times the range's step.
        """
        key = offsets, device
        if key not in self._made:
            omega = self.inv_freq.double().cpu()
            if isinstance(offsets, range):
                x, m = omega * (offsets.step / 2), len(offsets)
                size = torch.where(x.sin() == 0, 1.0, (m * x).sin() / (m * x.sin()))
                mean = torch.polar(torch.ones_like(x), omega * ((offsets[0] + offsets[-1]) / 2)) * size
            else:
                angles = torch.tensor(offsets, dtype=torch.float64, device="cpu")[:, None] * omega
                mean = torch.polar(torch.ones_like(angles), angles).mean(0)
            mean = mean * self.scaling
            self._made[key] = omega.to(device), mean.to(device)
        made: tuple[Tensor, Tensor] = self._made[key]
        return made

    def new_slots(self, old: Tensor | None, first: int, t: int, device: torch.device) -> tuple[Tables, Tables | None]:
        """Tables that rotate t new tokens to the slots from `first` on, and tables that undo their present rotation.

        old: the positions at which the tokens are rotated now; None if they are not rotated, and then the second result
        is None too. All layers of a model request the same tables in a step, so they are computed once.
        """
        if old is None:
            cos, sin = self.first(first + t, device)
            return (cos[first:], sin[first:]), None
        key, made = (first, t, device), self._made.get("step")
        if made is None or made[0] != key or not _unchanged(old, *made[1:3]):
            slots = torch.arange(first, first + t, device=device)
            version = None if old.is_inference() else old._version
            made = key, old, version, self.between(old, slots), self.between(old, None)
            self._made["step"] = made
        return made[3], made[4]

    def between(self, old: Tensor | None, new: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute cosines and sines that rotate keys from old to new positions.

        This is exact even if the model rounds its cosines and sines, so that they are not quite a rotation: it divides
        by the old ones instead of rotating back. Where old and new positions agree the results are exactly 1 and 0.

        Args:
            old: int [...], the positions at which the keys are rotated now; None if they are not rotated.
            new: int [...], the positions to rotate to; None for no rotation.

        Returns:
            (cos, sin): fp32 [..., pairs] each.
        """
        if old is None:
            assert new is not None  # one of the two is given
            return self.tables(new)
        cos, sin = (x.double() for x in self.tables(old))
        size = cos * cos + sin * sin
        if new is None:
            return (cos / size).float(), (-sin / size).float()
        new_cos, new_sin = (x.double() for x in self.tables(new))
        return ((new_cos * cos + new_sin * sin) / size).float(), ((new_sin * cos - new_cos * sin) / size).float()


def _unchanged(x: Tensor, before: Tensor, version: int | None) -> bool:
    """Whether x is the same tensor as before and has not been written to. Inference tensors have no version: False."""
    return x is before and version is not None and not x.is_inference() and x._version == version
