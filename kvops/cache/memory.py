"""The memory of a layer's keys and values: tokens are appended in place, and kept ones compacted in place.

A cache that grows takes memory with room for `spare_slots` more tokens, so that one step in many copies, not every
one. Memory of which much is unused goes back (`wasteful`): prompts are compressed into memory of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Memory:
    """Keys [b, Hk, capacity, d] and values [b, Hk, capacity, dv], of which a cache uses the first slots.

    Attributes:
        shared: another cache reads the same memory, so neither writes to it.
    """

    __slots__ = ("k", "v", "shared")

    def __init__(self, k: Tensor, v: Tensor):
        self.k, self.v, self.shared = k, v, False

    @staticmethod
    def of(k: Tensor, v: Tensor) -> Memory:
        """A copy of these, without room."""
        return Memory(*(x.clone(memory_format=torch.contiguous_format) for x in (k, v)))

    @property
    def capacity(self) -> int:
        """Slots."""
        return self.k.shape[2]

    @property
    def writable(self) -> bool:
        """Whether it may be written to: not while it is shared, nor outside of inference mode if it is from there."""
        return not self.shared and (torch.is_inference_mode_enabled() or not self.k.is_inference())

    def first(self, n: int) -> tuple[Tensor, Tensor]:
        """The views of the first n slots."""
        return self.k.narrow(2, 0, n), self.v.narrow(2, 0, n)

    def wasteful(self, n: int) -> bool:
        """Whether n used slots leave so many unused that fresh memory is worth a copy."""
        return self.capacity - n > max(32, n // 4)

    def extended(self, n: int, k: Tensor, v: Tensor) -> Memory:
        """The first n slots, and then these tokens: this memory where it has room, else larger memory."""
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


def spare_slots(n: int) -> int:
    """The room that memory for n tokens is given: a sixteenth, so a token's share of the copies is 16 tokens."""
    return max(16, n // 16)


def storage_bytes(*tensors: Tensor) -> int:
    """Of the storages that the tensors lie in, each counted once."""
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())
