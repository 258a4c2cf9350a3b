"""The memory of a layer's keys and values. Tokens are appended in place, and kept ones are compacted in place.

A cache that grows allocates room for `spare_slots` more tokens, so that few decode steps copy the whole cache. Memory
that is largely unused is released (`wasteful`): a compressed prompt moves to memory of its own size.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor


class Memory:
    """Keys [b, Hk, capacity, d] and values [b, Hk, capacity, dv]. A cache uses the first slots.

    Attributes:
        shared: whether another cache reads the same memory, so that neither may write to it.
    """

    __slots__ = ("k", "v", "shared")

    def __init__(self, k: Tensor, v: Tensor):
        self.k, self.v, self.shared = k, v, False

    @staticmethod
    def of(k: Tensor, v: Tensor) -> Memory:
        """Return a copy of k and v without spare slots."""
        return Memory(*(x.clone(memory_format=torch.contiguous_format) for x in (k, v)))

    @property
    def shape(self) -> tuple[int, int]:
        """(b, Hk)."""
        return self.k.shape[0], self.k.shape[1]

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return self.k.shape[2]

    @property
    def writable(self) -> bool:
        """Whether a cache may write here."""
        return is_writable(self.k, self.shared)

    def first(self, n: int) -> tuple[Tensor, Tensor]:
        """Return views of the first n slots."""
        return self.k.narrow(2, 0, n), self.v.narrow(2, 0, n)

    def wasteful(self, n: int) -> bool:
        """Return whether so many slots beyond the first n are unused that a copy to smaller memory pays."""
        return self.capacity - n > max(32, n // 4)

    def extended(self, n: int, k: Tensor, v: Tensor) -> Memory:
        """Append tokens after the first n slots: in this memory if there is room, else in a larger copy."""
        t = k.shape[2]
        memory = self
        if n + t > self.capacity or not self.writable:
            size = n + t + spare_slots(n + t)
            memory = Memory(*(x.new_empty((*x.shape[:2], size, x.shape[3])) for x in (self.k, self.v)))
            for new, old in zip(memory.first(n), self.first(n)):
                new.copy_(old)
        memory.k.narrow(2, n, t).copy_(k)
        memory.v.narrow(2, n, t).copy_(v)
        return memory


def is_writable(k: Tensor, shared: bool) -> bool:
    """Return whether a cache may write to memory: not while it is shared, and inference tensors in inference mode."""
    return not shared and (torch.is_inference_mode_enabled() or not k.is_inference())


def spare_slots(n: int) -> int:
    """Return how many spare slots to allocate for n tokens: a sixteenth, so copies cost 16 tokens per new token."""
    return max(16, n // 16)


def storage_bytes(*tensors: Tensor) -> int:
    """Return the bytes of the tensors' storages. A shared storage counts once."""
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def size(nbytes: float) -> str:
    """Return a number of bytes as text."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"


def span(counts: Collection[int]) -> str:
    """Return the fewest and the most of some counts as text: "3", or "3 to 5"."""
    fewest, most = min(counts, default=0), max(counts, default=0)
    return f"{fewest}" if fewest == most else f"{fewest} to {most}"
