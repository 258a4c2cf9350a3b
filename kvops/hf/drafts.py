"""Prompt lookup and assisted decoding with a `KVCache`: transformers drafts tokens, has the model check them in one
step, and takes the rejected ones back (`crop`).

Its first step is the prompt and a draft, so a method would observe with drafted tokens, and evict before they are taken
back. And the steps that check a draft are as long as chunks of a prompt, which methods compress. So with a `KVCache`
the first draft is empty, which leaves the prompt's step as it is without drafts, and no layer evicts from a draft on
until what was rejected of it has been taken back. Then the cache is that of decode without drafts, if the method evicts
nothing in decode. Methods that evict in decode by K, V or positions do so then, by the tokens that were accepted. Those
that would ask the queries of a draft, some of which are rejected, are refused.

transformers has no place to say so. This module wraps the method of its models that makes the generators of candidates,
for calls with a `KVCache`; all others get what they would get without.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import LongTensor
from transformers import GenerationMixin
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    CandidateGenerator,
    EarlyExitCandidateGenerator,
    PromptLookupCandidateGenerator,
)

from ..cache import Cache
from ..methods import LAQ, Policy, ProtoKV
from ..methods.queries import WindowPolicy
from .cache import KVCache


class DraftsAfterPrompt(CandidateGenerator):
    """The candidates of another generator, but for the step that reads the prompt.

    Args:
        make: makes the other generator, from the tokens that there are.
        cache: evicts nothing while a draft is being checked.
    """

    def __init__(self, make: Callable[[LongTensor], CandidateGenerator], cache: KVCache):
        self.make, self.cache = make, cache
        self.generator: CandidateGenerator | None = None
        self.prompt_is_read = False
        self.frozen: list[Cache] = []  # until what is rejected has been taken back

    def get_candidates(self, input_ids: LongTensor, **kwargs: Any) -> tuple[LongTensor, Any]:
        if not self.prompt_is_read:
            self.prompt_is_read = True
            return input_ids, None
        if self.generator is None:  # only now: an assistant copies the masks that there are
            self.generator = self.make(input_ids)
        self.frozen = [x.cache for x in self.cache.evicting_layers if not x.cache.frozen]
        for cache in self.frozen:
            cache.frozen = True
        return self.generator.get_candidates(input_ids, **kwargs)

    def update_candidate_strategy(self, input_ids: LongTensor, scores: Any, num_matches: int) -> None:
        for cache in self.frozen:
            cache.frozen = False
            cache.catch_up()
        self.frozen = []
        if self.generator is not None:
            self.generator.update_candidate_strategy(input_ids, scores, num_matches)


def observes_in_decode(policy: Policy) -> bool:
    """Whether queries after the prompt's may decide what stays, as far as is known of the policy."""
    if isinstance(policy, ProtoKV):
        return policy.buffer is not None or policy.window < 2
    if isinstance(policy, WindowPolicy):
        return policy.window < 2 and not isinstance(policy, LAQ)  # a step of one token has a window's rows
    return policy.uses_queries or not policy.croppable


_make = GenerationMixin._get_candidate_generator


@functools.wraps(_make)
def _get_candidate_generator(self: Any, *args: Any, **kwargs: Any) -> CandidateGenerator:
    made = _make(self, *args, **kwargs)
    cache = kwargs["model_kwargs"].get("past_key_values")
    if not isinstance(cache, KVCache):
        return made
    _check(made, cache)
    return DraftsAfterPrompt(lambda input_ids: _make(self, *args, **{**kwargs, "input_ids": input_ids}), cache)


def _check(made: CandidateGenerator, cache: KVCache) -> None:
    """Raises for what would not give the text of greedy decoding."""
    policy = cache.policy
    if observes_in_decode(policy):
        raise NotImplementedError(
            "KVCache: prompt lookup and assisted decoding take tokens back, but not what their queries have observed; "
            "expected a policy that looks at the prompt's queries only (SnapKV, PyramidKV, ChunkKV, LAQ, ProtoKV with "
            f"buffer=None), or at none (KeyDiff, LagKV, StreamingLLM, SATKV, ...), got {policy!r}"
        )
    if isinstance(policy, LAQ) and not cache._staged:
        raise NotImplementedError(
            "KVCache: kvops.LAQ evicts in its lookahead, expected kvops.hf.generate or a block of kvops.hf.compress, "
            "got model.generate"
        )
    if seen := cache.get_seq_length():
        raise NotImplementedError(
            "KVCache: in prompt lookup and assisted decoding transformers reads the whole prompt again, what the cache "
            f"holds too, expected an empty cache, got one that has seen {seen} tokens; call generate without them"
        )
    known = isinstance(made, (PromptLookupCandidateGenerator, AssistedCandidateGenerator))
    if not known or isinstance(made, EarlyExitCandidateGenerator):
        raise NotImplementedError(
            "KVCache: expected drafts of prompt_lookup_num_tokens or of an assistant_model with a cache of its own, "
            f"got {type(made).__name__}"
        )


GenerationMixin._get_candidate_generator = _get_candidate_generator  # type: ignore[method-assign]
