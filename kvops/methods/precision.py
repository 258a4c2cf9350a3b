"""Arithmetic whose precision the caller's autocast does not change."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """A block without autocast on devices of this kind; entering one costs as much as a gate of `Gates`."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
