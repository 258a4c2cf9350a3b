"""Prompt lookup and assisted decoding with a `KVCache`.

transformers drafts tokens, lets the model verify them in one step, and removes the rejected ones from the cache
(`crop`). Two things about that do not fit eviction. The first step is the prompt with a draft, so a policy would score
with drafted tokens and evict before they are rejected. And the steps that verify a draft are as long as prompt chunks,
which policies compress.

With a `KVCache`, the first draft is therefore empty, which makes the prompt's step the same as without drafts. From
each draft on, no layer evicts until the rejected tokens have been removed. A policy that evicts nothing in decode then
has the same cache as decode without drafts. Policies that evict in decode by K, V or positions evict at that point,
with the accepted tokens. Policies that would use the queries of a draft are refused, because some of these queries
belong to rejected tokens.

transformers has no hook for this, so the method of its models that creates candidate generators is wrapped, for calls
with a `KVCache`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from packaging.version import Version
from torch import LongTensor
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    CandidateGenerator,
    EarlyExitCandidateGenerator,
    PromptLookupCandidateGenerator,
)

from ..cache import Cache
from ..methods import Policy, ProtoKV
from ..methods.queries import QueryPolicy, WindowPolicy
from .arguments import given_cache
from .cache import KVCache
from .patches import wraps

#: Whether transformers refuses drafts for caches that evict; it does so after the prompt.
WHOLE_CACHES = Version(transformers.__version__) >= Version("5.24.dev0")


class DraftsAfterPrompt(CandidateGenerator):
    """Candidates of another generator, except in the step that reads the prompt, which gets none.

    Args:
        make: Creates the other generator from the tokens so far.
        cache: The cache, which must not evict while a draft is being verified.
    """

    def __init__(self, make: Callable[[LongTensor], CandidateGenerator], cache: KVCache):
        self.make, self.cache = make, cache
        self.generator: CandidateGenerator | None = None
        self.prompt_is_read = False
        self.frozen: list[Cache] = []  # until the rejected tokens have been removed

    def get_candidates(self, input_ids: LongTensor, **kwargs: Any) -> tuple[LongTensor, Any]:
        if not self.prompt_is_read:
            self.prompt_is_read = True
            return input_ids, None
        if self.generator is None:  # not earlier, because an assistant copies the current masks
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
    """Return whether queries after the prompt's may decide what is kept, as far as the policy's class tells."""
    if policy.needs.stage:
        return False
    if isinstance(policy, ProtoKV):
        return policy.buffer is not None
    if isinstance(policy, WindowPolicy):
        return policy.window < 2  # one token of decode fills a window of one
    return isinstance(policy, QueryPolicy) or not policy.croppable


@wraps("_get_candidate_generator")
def drafts_after_prompt(make: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> CandidateGenerator:
    """What creates candidate generators; for a call with a `KVCache`, those whose first draft is empty."""
    made = make(self, *args, **kwargs)
    cache = given_cache(kwargs["model_kwargs"])
    if not isinstance(cache, KVCache):
        return made
    _check(made, cache)
    return DraftsAfterPrompt(lambda input_ids: make(self, *args, **{**kwargs, "input_ids": input_ids}), cache)


def _check(made: CandidateGenerator, cache: KVCache) -> None:
    """Raise for calls whose text would differ from greedy decoding."""
    policy = cache.policy
    if observes_in_decode(policy):
        raise NotImplementedError(
            "KVCache: prompt lookup and assisted decoding can remove rejected tokens, but not what their queries have "
            "observed; expected a policy that uses the prompt's queries only (SnapKV, PyramidKV, ChunkKV, LAQ, ProtoKV "
            f"with buffer=None), or none (KeyDiff, LagKV, StreamingLLM, SATKV, ...), got {policy!r}"
        )
    if policy.needs.inputs and not policy.needs.stage:
        raise NotImplementedError(
            "KVCache: with prompt lookup and assisted decoding a cache evicts after the steps whose hidden states and "
            f"token ids a policy could read, expected one without needs.inputs, got {policy!r}"
        )
    if policy.needs.stage and not cache._staged:
        raise NotImplementedError(
            f"KVCache: kvops.{policy.name} evicts in a stage of its own, expected kvops.hf.generate or a block of "
            "kvops.hf.compress, got model.generate"
        )
    if seen := cache.get_seq_length():
        raise NotImplementedError(
            "KVCache: with prompt lookup and assisted decoding, transformers reads the whole prompt again, cached "
            f"tokens included: expected an empty cache, got one that has seen {seen} tokens; call generate without "
            "drafts"
        )
    known = isinstance(made, (PromptLookupCandidateGenerator, AssistedCandidateGenerator))
    if not known or isinstance(made, EarlyExitCandidateGenerator):
        raise NotImplementedError(
            "KVCache: expected drafts by prompt_lookup_num_tokens or by an assistant_model with its own cache, got "
            f"{type(made).__name__}"
        )
    if WHOLE_CACHES:
        raise NotImplementedError(
            "KVCache: prompt lookup and assisted decoding need transformers < 5.24, because later versions accept only "
            f"caches that can restore every token, got {transformers.__version__}; call generate without drafts"
        )
