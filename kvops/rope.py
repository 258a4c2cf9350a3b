"""Rotary position embedding as angles: what turns keys from one position to another.

Pair i of a key's channels is turned by position * inv_freq[i]. A rotation to another position, one that undoes another,
or one of positions that a model has interpolated are all a cosine and a sine per (position, pair), which
`ops.rope_at_slots` applies in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

Tables = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Rope:
    """A model's rotary embedding.

    inv_freq: fp32 [pairs], radians per position, the model's own (so any scaling of positions is in it); channels
        2 * pairs and above are not rotated.
    interleaved: pair i is channels 2 i and 2 i + 1 (GPT-J, GLM, Cohere), else i and i + pairs (NeoX, Llama).
    scaling: what the model multiplies cosines and sines with (YaRN's attention factor).
    dtype: what the model rounds cosines and sines to, if it does.
    """

    inv_freq: Tensor
    interleaved: bool = False
    scaling: float = 1.0
    dtype: torch.dtype | None = None
    _made: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  # what `to` and `first` make once

    @staticmethod
    def of(
        dim: int, theta: float = 10000.0, *, interleaved: bool = False, device: torch.device | str | None = None
    ) -> Rope:
        """The plain frequencies theta^(-2 i / dim) of `dim` rotated channels."""
        exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
        return Rope(1.0 / theta**exponent, interleaved)

    def to(self, device: torch.device, dtype: torch.dtype) -> Rope:
        """The same on a device, rounded to `dtype` unless its own is given; made once."""
        twin = self._made.get((device, dtype))
        if twin is None:
            twin = replace(self, inv_freq=self.inv_freq.to(device), dtype=self.dtype or dtype)
            self._made[device, dtype] = twin
        return twin

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines at these positions, as the model computes them: int [...] -> fp32 [..., pairs] each."""
        angles = positions.unsqueeze(-1).float() * self.inv_freq.to(positions.device)
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        if self.dtype is not None:
            cos, sin = cos.to(self.dtype).float(), sin.to(self.dtype).float()
        return cos, sin

    def first(self, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """`tables` of the positions 0 .. n - 1, made once: fp32 [n, pairs] each."""
        tables = self._made.get(device)
        if tables is None or len(tables[0]) < n:
            tables = self._made[device] = self.tables(torch.arange(n + n // 2, device=device))
        return tables[0][:n], tables[1][:n]

    def new_slots(self, old: Tensor | None, first: int, t: int, device: torch.device) -> tuple[Tables, Tables | None]:
        """What turns t new tokens, rotated at `old` or not at all, to the slots from `first` on, and to no rotation.

        None: they need no turn. The layers of a model ask for the same in each step, and it is made once.
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
        """Cosines and sines that turn what is rotated at the old positions to the new ones; None: not rotated.

        Exact also where rounded cosines and sines are no rotation: the old ones are divided by, not turned back. Where
        old and new agree this is 1 and 0 to the last bit.
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
    """Whether this is the tensor of before, and nobody has written to it; tensors of inference mode do not tell."""
    return x is before and version is not None and not x.is_inference() and x._version == version
