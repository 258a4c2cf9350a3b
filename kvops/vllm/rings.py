"""Where the queries of a request are remembered. This module does not import vLLM."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache.queries import Batch, on


class DeviceRings:
    """See `kvops.cache.queries.Rings`. A request is known by its first block, which no other has while it lives.

    It is looked for on the device, which nothing waits for.
    """

    def __init__(self, requests: int, device: torch.device):
        self.most = 0
        self._owner = torch.full((requests,), -1, device=device)  # the first block of its request
        self._seen = torch.zeros(requests, dtype=torch.int64, device=device)  # the last step with it
        self._step = 0

    def of(self, batch: Batch) -> Tensor:
        self._step += 1
        self.most = min(len(self._owner), self.most + int((batch.before == 0).sum()))
        blocks = batch.table[:, 0].to(self._owner.dtype)
        same = blocks[:, None] == self._owner
        known = same.any(1)
        torch._assert_async(
            (known | on(blocks.device, batch.before == 0)).all(),
            "kvops.vllm: expected to have seen the queries of a request from its first token on, got one whose "
            "queries were forgotten",
        )
        # Where there is one for each that lives, that of a request which ended is free, and seen least lately.
        seen = torch.where(same.any(0), self._step, self._seen)
        free = seen.argsort(stable=True)[((~known).cumsum(0) - 1).clamp(min=0)]
        ring = torch.where(known, same.int().argmax(1), free)
        self._owner[ring] = blocks
        self._seen[ring] = self._step
        return ring
