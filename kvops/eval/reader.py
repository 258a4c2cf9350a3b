"""A model that reads a prompt, lets a method cut the cache once, and answers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..methods import LAQ
from .methods import Rule, Unreachable

if TYPE_CHECKING:  # bench/peers/ has a reader that runs with an older transformers
    from transformers import PreTrainedModel

    from .. import hf


@dataclass
class Cut:
    """A batch of prompts whose cache was cut; it grows with what is fed and said."""

    cache: hf.KVCache
    logits: Tensor  # [b, vocab], of the last token that was fed
    seconds: float  # of reading and cutting
    tokens: int  # kept per KV head, mean over the layers
    bytes_held: int
    bytes_full: int


class Reader:
    """Greedy, and with the library's attention.

    model: one of transformers'.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = self.prepared(model.eval())
        self.num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
        ends = model.generation_config.eos_token_id
        self.ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)

    def prepared(self, model: PreTrainedModel) -> PreTrainedModel:
        from .. import hf

        return hf.use_attention(model)

    def clock(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()

    def feed(self, cache: hf.KVCache, ids: Tensor) -> Tensor:
        """The logits of the last token, [b, vocab]."""
        return self.model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]

    def tokens(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(ids).to(self.model.device)

    @torch.inference_mode()
    def cut(self, prompts: np.ndarray, rule: Rule, budget: int | None) -> Cut:
        """Reads prompts, int64 [b, n], with a cache of the rule's method, which cuts it to the budget; after that it
        grows. Unreachable where the method cannot be brought to the budget."""
        from .. import hf

        method = rule.method(budget, prompts.shape[1], self.num_layers)
        try:
            cache = hf.KVCache(self.model.config, method)
        except ValueError as error:
            raise Unreachable(str(error)) from error
        begin = self.clock()
        logits = self.feed(cache, self.tokens(prompts))
        if isinstance(method, LAQ):
            hf.lookahead(self.model, cache, logits, eos_token_id=self.ends)
        seconds = self.clock() - begin
        cache.freeze()
        stats = cache.stats()
        kept = round(sum(x.tokens_kept for x in stats) / len(stats))
        return Cut(cache, logits, seconds, kept, sum(x.bytes_kept for x in stats), sum(x.bytes_full for x in stats))

    @torch.inference_mode()
    def answer(self, cut: Cut, feed: np.ndarray | None, steps: int, stops: bool) -> tuple[np.ndarray, float, int]:
        """See `tasks.Reader`."""
        if feed is not None:
            cut.logits = self.feed(cut.cache, self.tokens(feed))
        said = torch.full((len(cut.logits), steps), -1)
        alive, end = torch.ones(len(said), dtype=torch.bool), torch.tensor(self.ends)
        begin, count = self.clock(), 0
        for step in range(steps):
            token = cut.logits.argmax(-1)
            now = token.cpu()
            if stops:
                alive &= ~torch.isin(now, end)
            said[:, step] = torch.where(alive, now, -1)
            if not alive.any():
                break
            cut.logits = self.feed(cut.cache, token[:, None])
            count += 1
        return said.numpy(), self.clock() - begin, count
