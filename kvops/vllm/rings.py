"""Assign each request a ring buffer for its last queries. This module does not import vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.queries import Batch, to_device


class _Ring(NamedTuple):
    number: int
    request: object  # alive as long as the ring is its own, so that no other object has its id
    first: int  # the position of the oldest query since which all have been seen
    end: int  # one past that of the newest


class RequestRingTable:
    """Ring numbers by request; see `kvops.cache.queries.RingTable`. Nothing is read back from the device.

    Args:
        requests: The most requests that live at a time.
        device: The device of the returned numbers.
    """

    def __init__(self, requests: int, device: torch.device):
        self.size, self._requests, self._device = 0, requests, device
        self._rings: dict[int, _Ring] = {}  # by the request's id, the least recently used first

    def numbers(self, batch: Batch, asked: Sequence[tuple[int, int]]) -> Tensor:
        rows = [*zip(batch.requests, batch.before.tolist(), batch.after.tolist(), strict=True)]
        known = [self._rings.pop(id(request), None) for request, *_ in rows]
        rings = list[_Ring]()
        for ring, (request, before, after) in zip(known, rows):
            # A preempted request starts anew, at its first token or after a shared prefix.
            first = ring.first if ring is not None and ring.end == before else before
            rings.append(_Ring(self._free() if ring is None else ring.number, request, first, after))
        self._rings |= {id(x.request): x for x in rings}
        for row, position in asked:
            if rings[row].first > position:
                raise RuntimeError(
                    f"kvops.vllm: expected the queries of a request from token {position} on to be stored, got those "
                    f"from {rings[row].first} on"
                )
        return to_device(self._device, torch.tensor([x.number for x in rings]))

    def _free(self) -> int:
        if self.size < self._requests:
            self.size += 1
            return self.size - 1
        # There are as many rings as live requests, and a step that a request joins has tokens of all others. So the
        # least recently used ring is that of a request that has ended, or is left out after its prompt.
        return self._rings.pop(next(iter(self._rings))).number
