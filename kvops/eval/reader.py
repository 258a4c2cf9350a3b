"""A model that reads a prompt, lets a method cut the cache once, and answers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..cache import AttendingCache, Cache
from ..methods import LAQ, LagKV, Policy, QueryPolicy, View
from ..methods.budgets import Budget
from ..methods.recall_metric import prompt_scores
from ..window import Pooling
from .methods import Rule, Unreachable
from .stream import Held, Stream, stream

if TYPE_CHECKING:  # bench/peers/ has a reader that runs with an older transformers
    from transformers import PreTrainedModel

    from .. import hf


@dataclass
class Cut:
    """A batch of prompts whose cache was cut; it grows with what is fed and said.

    Attributes:
        cache: of all layers.
        logits: [b, vocab], of the last token that was fed.
        seconds: of reading and cutting.
        tokens: kept per KV head, mean over the layers.
        bytes_held: of the cache after the cut.
        bytes_full: of an uncut cache.
    """

    cache: hf.KVCache
    logits: Tensor
    seconds: float
    tokens: int
    bytes_held: int
    bytes_full: int

    @property
    def positions(self) -> list[Tensor]:
        """What every layer that evicts holds, int64 [b, Hk, any]."""
        return [kept for x in caches(self.cache) if (kept := x.positions) is not None]


@dataclass
class Whole:
    """What the full cache of a batch of prompts answers.

    Attributes:
        said: int64 [b, steps].
        logits: [b, steps, vocab], that each token was chosen by.
        scores: fp32 [b, Hk, n] of every layer, how much the answer attends to the prompt's keys, as in `kvops.recall`.
    """

    said: np.ndarray
    logits: Tensor
    scores: list[Tensor]


def caches(cache: hf.KVCache) -> list[Cache]:
    """The caches of the layers that evict."""
    return [x.cache for x in cache.layers if hasattr(x, "cache")]


@dataclass(frozen=True, eq=False)
class Watched(QueryPolicy):
    """Keeps everything, and the queries of the `last` tokens."""

    budget: Budget = 1.0
    last: int = 1

    @property
    def remembers(self) -> int:
        return self.last

    def rows(self, view: View) -> int:
        return 0


def chunks(policy: Policy, n: int, chunk: int) -> list[int]:
    """The sizes of the pieces in which a prompt is read.

    Args:
        policy: of the cache.
        n: tokens of the prompt.
        chunk: tokens of a piece; 0: 256, but for LagKV S + 2 L and then L, which compress at every step (LagKV, Sec.
            3.4).
    """
    first = then = chunk or 256
    if not chunk and isinstance(policy, LagKV):
        first, then = policy.sinks + 2 * policy.lag, policy.lag
    return [min(n, first)] + [min(n - i, then) for i in range(first, n, then)]


class Reader:
    """Reads prompts and answers, greedily and with the library's attention.

    Args:
        model: a causal language model of transformers.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = self.prepared(model.eval())
        self.num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
        ends = model.generation_config.eos_token_id
        self._whole: tuple[tuple[Any, ...], Whole] | None = None  # the last of `whole`, behind what it was asked for
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

    def _cache(self, policy: Policy) -> hf.KVCache:
        from .. import hf

        try:
            return hf.KVCache(self.model.config, policy)
        except ValueError as error:
            raise Unreachable(str(error)) from error

    def tokens(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(ids).to(self.model.device)

    @torch.inference_mode()
    def cut(self, prompts: np.ndarray, rule: Rule, budget: int | None, chunk: int | None = None) -> Cut:
        """Reads prompts with a cache of the rule's method, which cuts it to the budget; after that it grows.

        Args:
            prompts: int64 [b, n], tokens.
            rule: the method.
            budget: tokens per KV head; None: of a method that keeps everything.
            chunk: the prompts come in pieces (see `chunks`), and the method may evict after each; None: they come
                whole.

        Raises:
            Unreachable: the method cannot be brought to the budget, or cannot serve the model.
        """
        n = prompts.shape[1]
        policy = rule.policy(budget, n, self.num_layers, streaming=chunk is not None)
        cache = self._cache(policy)
        begin = self.clock()
        for piece in self.tokens(prompts).split([n] if chunk is None else chunks(policy, n, chunk), 1):
            logits = self.feed(cache, piece)
        if isinstance(policy, LAQ):
            from .. import hf

            hf.lookahead(self.model, cache, logits, eos_token_id=self.ends)
        seconds = self.clock() - begin
        cache.freeze()
        return Cut(cache, logits, seconds, *Held.by(cache))

    @torch.inference_mode()
    def answer(self, cut: Cut, feed: np.ndarray | None, steps: int, stops: bool) -> tuple[np.ndarray, float, int]:
        """Goes on greedily after a cut. The cache grows.

        Args:
            cut: what `cut` returned.
            feed: int64 [b, any], tokens to read first; None: nothing was said since the cut.
            steps: tokens to say, at most.
            stops: an end-of-sequence token ends a row.

        Returns:
            What is said, int64 [b, steps], -1 behind an end; the seconds of the steps of one token; the number of
            these steps.
        """
        if feed is not None:
            cut.logits = self.feed(cut.cache, self.tokens(feed))
        said = torch.full((len(cut.logits), steps), -1)
        alive, end = torch.ones(len(said), dtype=torch.bool), torch.tensor(self.ends, dtype=torch.int64)
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

    @torch.inference_mode()
    def follow(self, cut: Cut, feed: np.ndarray | None, said: np.ndarray) -> Tensor:
        """As `answer`, but what is said is given.

        Args:
            cut: what `cut` returned.
            feed: as in `answer`.
            said: int64 [b, steps].

        Returns:
            [b, steps, vocab], the logits before each token of `said`.
        """
        first = cut.logits if feed is None else self.feed(cut.cache, self.tokens(feed))
        rest = self.model(self.tokens(said), past_key_values=cut.cache).logits
        return torch.cat((first[:, None], rest[:, :-1]), 1)

    @torch.inference_mode()
    def whole(self, prompts: np.ndarray, feed: np.ndarray | None, steps: int) -> Whole:
        """What the full cache answers, beyond an end of sequence too; the last result is remembered.

        Args:
            prompts: int64 [b, n], tokens.
            feed: int64 [b, any], tokens to read after them, or None.
            steps: tokens to say.
        """
        key = (prompts.tobytes(), None if feed is None else feed.tobytes(), steps)
        if self._whole is None or self._whole[0] != key:
            self._whole = None  # its memory is free for the next
            cache = self._cache(Watched(last=steps))
            steps_logits = [self.feed(cache, self.tokens(prompts))]
            if feed is not None:
                steps_logits = [self.feed(cache, self.tokens(feed))]
            for _ in range(steps):
                steps_logits.append(self.feed(cache, steps_logits[-1].argmax(-1, keepdim=True)))
            logits = torch.stack(steps_logits[:-1], 1)
            n, scores = prompts.shape[1], []
            for layer in caches(cache):
                assert isinstance(layer, AttendingCache) and layer.last_queries is not None and layer.k is not None
                asked = layer.last_queries, layer.k[:, :, :n], Pooling(1)
                scores.append(prompt_scores("recall", "q_response", *asked, **layer.logits))
            self._whole = key, Whole(logits.argmax(-1).cpu().numpy(), logits, scores)
        return self._whole[1]

    def stream(self, ids: np.ndarray, rule: Rule, budget: int | None, window: int) -> Stream:
        """Streams a text through a cache that the rule's method bounds; see `stream.stream`.

        Args:
            ids: int64 [b, tokens].
            rule: the method.
            budget: tokens per KV head; None: of a method that keeps everything.
            window: tokens that come at a time.

        Raises:
            Unreachable: the method cannot be brought to the budget, or cannot serve the model.
        """
        policy = rule.policy(budget, ids.shape[1], self.num_layers, streaming=True)
        return stream(self.model, self._cache(policy), self.tokens(ids), window)
