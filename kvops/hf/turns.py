"""Further prompts: `generate` with a `KVCache` that already holds tokens continues that sequence, or raises.

transformers assumes that the prompt begins with the cached tokens. It feeds whatever follows the first
`get_seq_length()` token ids and never compares those before. An unrelated prompt therefore loses its beginning and
continues the old text. A prompt that is too short loses its beginning too, or is fed whole after the old one.

A cache never sees token ids, so this module wraps `generate` for calls with a `KVCache`. All other calls are unchanged.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin

from .arguments import given_cache
from .cache import KVCache

_REMEDY = (
    "for a new prompt make a new KVCache (kvops.hf.compress makes one for every call); to continue the conversation "
    "pass the token ids of all of it, its replies as generate returned them, or the new ids with an attention_mask "
    "over all tokens"
)
_generate = GenerationMixin.generate


@functools.wraps(_generate)
def _generate_with_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
    cache = given_cache(kwargs)
    if isinstance(cache, KVCache):
        inputs = args[0] if args else kwargs.get("inputs")
        check_prompt(
            cache,
            kwargs.get("input_ids") if inputs is None else inputs,
            kwargs.get("inputs_embeds"),
            kwargs.get("attention_mask"),
        )
    return _generate(self, *args, **kwargs)


def check_prompt(cache: KVCache, ids: Any, embeds: Any, mask: Any) -> None:
    """Check that a prompt continues what the cache holds, and remember its token ids for the next check.

    Args:
        cache: the cache of the call.
        ids: int64 [b, n], the whole conversation; or only its new tokens, if `mask` covers all of it; or None.
        embeds: [b, n, hidden], the whole conversation, in place of `ids`; or None.
        mask: int [b, n] or [b, tokens cached and new]; or None.

    Raises:
        ValueError: the prompt has no token that the cache has not seen, or differs from the cached prompt.
    """
    whole = ids if embeds is None else embeds
    if not isinstance(whole, Tensor) or whole.dim() < 2:
        return
    n, seen = whole.shape[1], cache.get_seq_length()
    if embeds is None and isinstance(mask, Tensor) and (mask.dim() != 2 or mask.shape[1] != n):
        return  # transformers takes all ids for new tokens
    if seen and n <= seen:
        raise ValueError(
            f"KVCache: expected a prompt that continues the {seen} tokens that this cache has seen, got one of {n}; "
            f"{_REMEDY}"
        )
    if not (embeds is None and isinstance(ids, Tensor) and ids.dim() == 2):
        cache._prompt = None
        return
    known = cache._prompt
    if seen and known is not None and known.shape[0] == ids.shape[0]:
        known = known[:, :seen].to(ids.device)
        differs = known != ids[:, : known.shape[1]]
        if isinstance(mask, Tensor):
            differs &= mask[:, : known.shape[1]].to(ids.device) != 0  # padding may have any id
        if differs.any():
            row, token = differs.nonzero()[0].tolist()
            raise ValueError(
                f"KVCache: expected a prompt that continues the {seen} tokens that this cache has seen, got another "
                f"one: row {row} differs from token {token} on; {_REMEDY}"
            )
    cache._prompt = ids.detach().clone(memory_format=torch.contiguous_format)


GenerationMixin.generate = _generate_with_cache  # type: ignore[method-assign]
