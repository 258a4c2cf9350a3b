"""A model that reads a prompt, lets a method cut the cache once, and answers."""

from __future__ import annotations

import copy
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..cache import AttendingCache, Cache, SlotCache
from ..cache.base import Storage
from ..methods import LagKV, Needs, Policy, View
from ..methods.queries import RecordQueries
from ..methods.recall_metric import prompt_scores
from ..ops.window import Pooling
from .methods import Rule, Unreachable
from .specs import Refused
from .stream import CacheSize, Stream, stream

if TYPE_CHECKING:  # bench/peers/ has a reader that runs with an older transformers
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .. import hf


@dataclass
class Prefill:
    """A batch of prompts that were read, and their cache, which a method may have cut.

    The cache grows with every further token.

    Attributes:
        cache: the cache of all layers.
        logits: [b, vocab], after the last token that was fed.
        seconds: time to read and cut; 0 if other methods shared the reading.
        tokens: tokens kept per KV head, averaged over the layers.
        bytes_held: bytes of the cache after the cut.
        bytes_full: bytes of an uncut cache.
    """

    cache: hf.KVCache
    logits: Tensor
    seconds: float
    tokens: int
    bytes_held: int
    bytes_full: int

    @property
    def positions(self) -> list[Tensor]:
        """The positions that each evicting layer holds, int64 [b, Hk, any]."""
        return [kept for x in caches(self.cache) if (kept := x.positions) is not None]


@dataclass
class Whole:
    """The answers of a batch of prompts with the full cache.

    Attributes:
        said: int64 [b, steps], the generated tokens.
        logits: [b, steps, vocab], from which each token was chosen.
        scores: fp32 [b, Hk, n] per layer, how much the answer attends to the prompt's keys, as in `kvops.recall`.
    """

    said: np.ndarray
    logits: Tensor
    scores: list[Tensor]


def caches(cache: hf.KVCache) -> list[Cache]:
    """Return the caches of the layers that evict."""
    return [x.cache for x in cache.layers if hasattr(x, "cache")]


def chunks(policy: Policy, n: int, chunk: int) -> list[int]:
    """Return the sizes of the chunks in which a prompt is read.

    Args:
        policy: the cache's policy.
        n: tokens of the prompt.
        chunk: tokens per chunk. 0 means 256; for LagKV S + 2 L and then L, so that it compresses at every chunk (LagKV,
            Sec. 3.4).
    """
    first = then = chunk or 256
    if not chunk and isinstance(policy, LagKV):
        first, then = policy.sinks + 2 * policy.lag, policy.lag
    return [min(n, first)] + [min(n - i, then) for i in range(first, n, then)]


@dataclass(frozen=True, eq=False)
class RecordInputs(RecordQueries):
    """Remembers what the attention modules were called with, too."""

    needs = Needs(inputs=True)

    def remember(self, view: View) -> None:
        view.state["inputs"] = view.inputs


class Reader:
    """Reads prompts and answers greedily, with kvops' attention.

    Args:
        model: a causal language model from transformers.
        tokenizer: its tokenizer, which makes the words of `kvops.KVzip`.
        inner: the model inside its wrappers (PEFT, `torch.compile`), if it has any.
        share: whether methods and budgets share the reading of a prompt (`prefill`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        inner: PreTrainedModel | None = None,
        share: bool = False,
    ):
        self.model = self.prepared(model.eval())
        self.tokenizer = tokenizer
        self.inner = inner or model
        self.num_layers = self.inner.config.get_text_config(decoder=True).num_hidden_layers
        generation = self.inner.generation_config
        ends = None if generation is None else generation.eos_token_id
        self.ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        self._whole: tuple[tuple[Any, ...], Whole] | None = None  # the last result of `whole`, with its arguments
        self._read: tuple[Any, hf.KVCache, Tensor] | None = None  # the last prompts read, their cache and logits
        self.share = share
        if share and any(x.readers for x in self._cache(RecordQueries()).evicting_layers):
            raise Refused("--share-prefill: layers of this model share keys; leave it out")

    def prepared(self, model: PreTrainedModel) -> PreTrainedModel:
        from .. import hf

        return hf.use_attention(model)

    def clock(self) -> float:
        if self.inner.device.type == "cuda":
            torch.cuda.synchronize(self.inner.device)
        return time.perf_counter()

    def feed(self, cache: hf.KVCache, ids: Tensor) -> Tensor:
        """Feed tokens; return the logits of the last one, [b, vocab]."""
        return self.model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]

    def _policy(self, rule: Rule, budget: int | None, n: int, streaming: bool) -> Policy:
        from .. import hf

        policy = rule.policy(budget, n, self.num_layers, streaming)
        try:
            return hf.for_model(policy, self.inner, self.tokenizer)
        except ValueError as error:
            raise Unreachable(str(error)) from error

    def _cache(self, policy: Policy, storage: Storage = "pre_rope") -> hf.KVCache:
        from .. import hf

        try:
            return hf.KVCache(self.inner.config, policy, storage=storage)
        except ValueError as error:
            raise Unreachable(str(error)) from error

    def _passing_inputs(self, policy: Policy) -> AbstractContextManager[None]:
        from ..hf.inputs import passing_inputs

        return passing_inputs(self.inner, policy)

    def tokens(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(ids).to(self.inner.device)

    @torch.inference_mode()
    def prefill(self, prompts: np.ndarray, rule: Rule, budget: int | None, chunk: int | None = None) -> Prefill:
        """Read prompts with the rule's policy, which cuts the cache to the budget; after that the cache only grows.

        If the reader shares, the model reads the prompts once, and every rule cuts a copy of that cache. What the model
        computes while it reads a whole prompt does not depend on what is evicted then. Rules with a stage of their own
        (LAQ, KVzip) and prompts in chunks are read alone.

        Args:
            prompts: int64 [b, n], tokens.
            rule: the method.
            budget: tokens per KV head; None for a method that keeps everything.
            chunk: read the prompts in chunks (see `chunks`) and let the policy evict after each; None reads them at
                once.

        Raises:
            Unreachable: no settings of the method meet the budget, or it does not support the model.
        """
        n = prompts.shape[1]
        policy = self._policy(rule, budget, n, chunk is not None)
        cache = self._cache(policy, rule.storage)
        if self.share and chunk is None and not policy.needs.stage:
            return Prefill(cache, self._cut(cache, prompts), 0.0, *CacheSize.by(cache))
        begin = self.clock()
        with self._passing_inputs(policy):
            for piece in self.tokens(prompts).split([n] if chunk is None else chunks(policy, n, chunk), 1):
                logits = self.feed(cache, piece)
        if policy.needs.stage:
            from ..hf.generation import run_stages

            try:
                run_stages(self.model, cache, self.tokens(prompts), logits, eos_token_id=self.ends)
            except ValueError as error:  # a first stage that needs more queries than the cache has
                raise Unreachable(str(error)) from error
        seconds = self.clock() - begin
        cache.freeze()
        return Prefill(cache, logits, seconds, *CacheSize.by(cache))

    def _cut(self, cache: hf.KVCache, prompts: np.ndarray) -> Tensor:
        """Fill a cache, which evicts, from the last reading of these prompts; return the logits of their last token."""
        kind = RecordInputs if (inputs := cache.policy.needs.inputs) else RecordQueries
        key = prompts.shape, prompts.tobytes(), inputs
        if self._read is None or self._read[0] != key:
            self._read = None  # free its memory first
            every = self._cache(kind(last=prompts.shape[1]))
            with self._passing_inputs(every.policy):
                self._read = key, every, self.feed(every, self.tokens(prompts))
        _, every, logits = self._read
        options: dict[str, Any] = {}
        if any(isinstance(x, SlotCache) for x in caches(cache)):  # where the keys come rotated
            options["positions"] = torch.arange(prompts.shape[1], device=logits.device)
        for layer, read in zip(cache.evicting_layers, every.evicting_layers):
            own = read.cache
            assert isinstance(own, AttendingCache) and own.k is not None and own.v is not None
            assert own.last_queries is not None
            seen = own.state.get("inputs")
            layer.lazy_initialization(own.k, own.v)
            if type(layer.cache) is Cache:  # it evicts without queries
                layer.cache.append(own.k, own.v, inputs=seen)
            else:
                layer.cache.attend(own.last_queries, own.k, own.v, inputs=seen, **own.logits, **options)
        cache.layers = [x if hasattr(x, "cache") else copy.deepcopy(y) for x, y in zip(cache.layers, every.layers)]
        cache.freeze()
        return logits

    @torch.inference_mode()
    def answer(
        self, prefill: Prefill, feed: np.ndarray | None, steps: int, stops: bool
    ) -> tuple[np.ndarray, float, int]:
        """Decode greedily after a prefill. Its cache grows.

        Args:
            prefill: what `prefill` returned.
            feed: int64 [b, any], tokens to read first; None if there are none.
            steps: the most tokens to generate.
            stops: whether an end-of-sequence token ends a row.

        Returns:
            The generated tokens, int64 [b, steps], -1 after an end of sequence; the seconds of the one-token steps; the
            number of these steps.
        """
        if feed is not None:
            prefill.logits = self.feed(prefill.cache, self.tokens(feed))
        said = torch.full((len(prefill.logits), steps), -1)
        alive, end = torch.ones(len(said), dtype=torch.bool), torch.tensor(self.ends, dtype=torch.int64)
        begin, count = self.clock(), 0
        for step in range(steps):
            token = prefill.logits.argmax(-1)
            now = token.cpu()
            if stops:
                alive &= ~torch.isin(now, end)
            said[:, step] = torch.where(alive, now, -1)
            if not alive.any():
                break
            prefill.logits = self.feed(prefill.cache, token[:, None])
            count += 1
        return said.numpy(), self.clock() - begin, count

    @torch.inference_mode()
    def follow(self, prefill: Prefill, feed: np.ndarray | None, said: np.ndarray) -> Tensor:
        """Like `answer`, but with given tokens instead of generated ones.

        Args:
            prefill: what `prefill` returned.
            feed: as in `answer`.
            said: int64 [b, steps].

        Returns:
            The logits before each token of `said`, [b, steps, vocab].
        """
        first = prefill.logits if feed is None else self.feed(prefill.cache, self.tokens(feed))
        rest = self.model(self.tokens(said), past_key_values=prefill.cache).logits
        return torch.cat((first[:, None], rest[:, :-1]), 1)

    @torch.inference_mode()
    def whole(self, prompts: np.ndarray, feed: np.ndarray | None, steps: int) -> Whole:
        """Return the full cache's answer, which goes on past an end of sequence. The last result is cached.

        Args:
            prompts: int64 [b, n], tokens.
            feed: int64 [b, any], tokens to read after them, or None.
            steps: tokens to generate.
        """
        key = (prompts.tobytes(), None if feed is None else feed.tobytes(), steps)
        if self._whole is None or self._whole[0] != key:
            self._whole = None  # free its memory first
            cache = self._cache(RecordQueries(last=steps))
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
        """Stream a text through a cache that the rule's policy bounds; see `stream.stream`.

        Args:
            ids: int64 [b, tokens].
            rule: the method.
            budget: tokens per KV head; None for a method that keeps everything.
            window: tokens per window.

        Raises:
            Unreachable: no settings of the method meet the budget, or it does not support the model.
        """
        policy = self._policy(rule, budget, ids.shape[1], True)
        with self._passing_inputs(policy):
            return stream(self.model, self._cache(policy, rule.storage), self.tokens(ids), window)
