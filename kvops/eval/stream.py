"""Stream a text through a model in windows; measure the loss of each next token and the size of the cache."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .specs import Refused

if TYPE_CHECKING:  # see reader.py
    from transformers import PreTrainedModel

    from .. import hf


class CacheSize(NamedTuple):
    """The size of a batch's cache.

    Attributes:
        tokens: tokens per KV head, averaged over the layers.
        bytes: bytes of keys and values.
        bytes_full: bytes of an uncut cache.
    """

    tokens: int
    bytes: int
    bytes_full: int

    @classmethod
    def by(cls, cache: hf.KVCache) -> CacheSize:
        stats = cache.stats()
        if not stats:
            raise Refused("--model: none of its layers has a KV cache")
        tokens = round(sum(x.tokens_kept for x in stats) / len(stats))
        return cls(tokens, sum(x.bytes_kept for x in stats), sum(x.bytes_full for x in stats))


@dataclass
class Stream:
    """The result of `stream`.

    Attributes:
        losses: [b, tokens - 1], nats; -log p of each token but the first.
        held: size of the cache after each window.
        seconds: [windows], time of each window.
        window: tokens per window.
    """

    losses: np.ndarray
    held: list[CacheSize]
    seconds: np.ndarray
    window: int

    @property
    def bytes(self) -> np.ndarray:
        return np.array([x.bytes for x in self.held])


@torch.inference_mode()
def stream(model: PreTrainedModel, cache: hf.KVCache, ids: Tensor, window: int, label: str | None = None) -> Stream:
    """Feed a text in windows, let the cache evict after each, and measure the loss of each next token.

    Args:
        model: a causal language model from transformers.
        cache: an empty cache.
        ids: int64 [b, tokens].
        window: tokens per window.
        label: label of a progress bar; None for no bar.
    """
    losses, held, seconds = [], [], []
    firsts: Iterable[int] = range(0, ids.shape[1] - 1, window)
    if label is not None:
        from tqdm import tqdm

        firsts = tqdm(firsts, desc=label, leave=False, mininterval=1)
    for first in firsts:
        begin = time.perf_counter()
        following = ids[:, first + 1 : first + 1 + window]
        chunk = ids[:, first : first + following.shape[1]]
        logits = model(chunk, past_key_values=cache).logits
        losses.append(F.cross_entropy(logits.mT.float(), following, reduction="none").cpu())
        seconds.append(time.perf_counter() - begin)
        held.append(CacheSize.by(cache))
    return Stream(torch.cat(losses, 1).numpy(), held, np.array(seconds), window)
