"""Assign each request a ring buffer for its last queries. This module does not import vLLM."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache.queries import Batch, on


class DeviceRings:
    """Ring numbers looked up on the device, without a host sync; see `kvops.cache.queries.Rings`.

    A request is identified by its first block, which no other live request has.
    """

    def __init__(self, requests: int, device: torch.device):
        self.most = 0
        self._owner = torch.full((requests,), -1, device=device)  # per ring: the first block of its request
        self._seen = torch.zeros(requests, dtype=torch.int64, device=device)  # per ring: the last step that used it
        self._step = 0

    def of(self, batch: Batch) -> Tensor:
        step = self._step + 1
        blocks = batch.table[:, 0].to(self._owner.dtype)
        same = blocks[:, None] == self._owner
        known = same.any(1)
        torch._assert_async(
            (known | on(blocks.device, batch.before == 0)).all(),
            "kvops.vllm: expected to have seen the queries of each request from its first token on, got a request "
            "whose queries are no longer stored",
        )
        # There are as many rings as live requests, so a new request can take the least recently used ring: that of a
        # request that has ended.
        seen = torch.where(same.any(0), step, self._seen)
        free = seen.argsort(stable=True)[((~known).cumsum(0) - 1).clamp(min=0)]
        ring = torch.where(known, same.int().argmax(1), free)
        self._owner[ring] = blocks
        self._seen[ring] = self._step = step
        self.most = min(len(self._owner), self.most + int((batch.before == 0).sum()))
        return ring
