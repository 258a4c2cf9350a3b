"""Further prompts: `generate` with a `KVCache` that already holds tokens continues that sequence, or raises.

transformers assumes that the prompt begins with the cached tokens. It feeds whatever follows the first
`get_seq_length()` token ids and never compares those before. An unrelated prompt therefore loses its beginning and
continues the old text. A prompt that is too short loses its beginning too, or is fed whole after the old one. It also
counts positions by the attention mask, whatever its length, and drops a mask without zeros before any forward.

A cache never sees token ids or such masks, so `generate` is wrapped for calls with a `KVCache`. The wrapper checks the
call against the cache's `Conversation`, declares the padding of the mask, and adds a logits processor that notes which
tokens the cache has read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from .arguments import by_name, given_cache
from .cache import KVCache
from .conversation import REMEDY, mask_of_pads
from .generation import setting
from .patches import wraps


@wraps("generate")
def generate_with_cache(generate: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """`generate`, with the checks of a call with a `KVCache`."""
    cache = given_cache(kwargs)
    if not isinstance(cache, KVCache):
        return generate(self, *args, **kwargs)
    call = by_name(functools.partial(generate, self), args, kwargs)
    check_caching("KVCache", self)
    use_cache = setting(self, call, "use_cache")
    if use_cache is False or (use_cache is None and "use_cache" in call):
        raise ValueError(
            f"kvops.hf: expected use_cache=True, got {use_cache}: without a cache there is nothing to evict; if it "
            "comes from model.generation_config, pass use_cache=True"
        )
    pads, before = _check_prompt(self, cache, call)
    note = _Note(cache, before)
    call["logits_processor"] = LogitsProcessorList([note, *(call.get("logits_processor") or ())])
    with cache.conversation.declaring(pads):
        return generate(self, **call)


def check_caching(who: str, model: PreTrainedModel) -> None:
    """Raise for a model that would run without its cache."""
    if any(x.training and getattr(x, "gradient_checkpointing", False) for x in model.modules()):
        raise ValueError(
            f"{who}: {type(model).__name__} is in train mode with gradient checkpointing, for which transformers "
            "switches the cache off, so the model would read no context; call model.eval()"
        )


def _check_prompt(model: PreTrainedModel, cache: KVCache, call: dict[str, Any]) -> tuple[Tensor | None, int | None]:
    """Check that a call of `generate` continues what the cache holds, and add the mask that transformers would infer.

    Args:
        model: The model.
        cache: The cache of the call.
        call: The arguments, by name. Token ids, int64 [b, n], are the whole conversation; or only its new tokens, if
            attention_mask covers all of it. Embeddings [b, n, hidden] are the whole conversation.

    Returns:
        The padding of an empty cache, int32 [b], or None. And how many tokens precede the token ids of the call: 0, or
        those that the cache has seen; None if that is unknown.

    Raises:
        ValueError: The prompt has no token that the cache has not seen, or differs from the cached tokens, or the mask
            does not fit. The cache stays unchanged.
    """
    cache.check_layers()
    talk, seen, layers = cache.conversation, cache.get_seq_length(), cache.evicting_layers
    embeds, ids = call.get("inputs_embeds"), call.get("inputs")
    ids = call.get("input_ids") if ids is None else ids
    prompt = ids if embeds is None else embeds
    if seen and prompt is None:
        raise ValueError(f"KVCache: expected a prompt that continues the {seen} cached tokens, got none; {REMEDY}")
    if prompt is None:
        return None, 0  # it begins with a single token
    if not isinstance(prompt, Tensor) or prompt.dim() < 2 or (embeds is None and prompt.is_floating_point()):
        return None, None  # no token ids
    if talk.virtual:
        raise ValueError(
            f"KVCache: expected a cache without virtual tokens for a further prompt, got one with {talk.virtual} "
            "(prompt tuning), by which transformers would miscount the new tokens; make a new KVCache for each prompt"
        )
    rows, n = prompt.shape[:2]
    held = layers[0].cache.rows if layers else 0
    if held and held != rows * (repeats := _repeats(model, call)):
        raise ValueError(
            f"KVCache: expected a prompt for each of the {held} rows of this cache, got {rows}"
            f"{f', each {repeats} times' if repeats > 1 else ''}; {REMEDY}"
        )
    known = _padding(cache, rows)
    mask = call.get("attention_mask")
    if mask is None:
        mask = _inferred_mask(model, call, prompt) if embeds is None else None
        mask = mask_of_pads(known, prompt.shape[1], prompt.device) if mask is None else mask
    elif not isinstance(mask, Tensor) or mask.dim() != 2:
        got = f"shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"KVCache: attention_mask must be a tensor [batch, tokens] of 0 and 1, got {got}")
    elif ((mask != 0) & (mask != 1)).any():
        raise ValueError("KVCache: attention_mask must be a tensor [batch, tokens] of 0 and 1, got other numbers")
    new = bool(seen) and embeds is None and mask is not None and mask.shape[1] != n  # so does transformers decide
    if seen and not new and n <= seen:
        raise ValueError(
            f"KVCache: expected a prompt that continues the {seen} tokens that this cache has seen, got one of {n}; "
            f"{REMEDY}"
        )
    before, pads = None if embeds is not None else seen if new else 0, None
    if mask is not None and (layers or not seen):  # without evicting layers, the masks of transformers serve any pads
        pads = talk.check_mask(mask, rows, seen, n if new else n - seen, known)
        call["attention_mask"] = mask
    if not seen:
        cache.check_padding(pads)
        return pads, before
    if embeds is None and not new and prompt.dim() == 2:
        talk.check_ids(prompt, seen, known)
    return None, before


def _padding(cache: KVCache, rows: int) -> Tensor | None:
    """Return the known padding of a call's rows, int32 [rows]; None if there is none."""
    layers = cache.evicting_layers
    if not layers or not layers[0].cache.seen:
        return cache.conversation.padding(rows)
    pads = layers[0].cache.padding
    return None if pads is None else pads[:: len(pads) // rows]  # all beams of a row have its padding


def _repeats(model: PreTrainedModel, call: Mapping[str, Any]) -> int:
    """Return how often `generate` repeats each row, for its beams or return sequences."""
    return max(setting(model, call, name) or 1 for name in ("num_beams", "num_return_sequences"))


def _inferred_mask(model: PreTrainedModel, call: Mapping[str, Any], ids: Tensor) -> Tensor | None:
    """Return the mask that transformers infers from pad tokens, int64 [b, n]; None if there is none."""
    if ids.dim() != 2:
        return None
    pad, ends = (setting(model, call, name) for name in ("pad_token_id", "eos_token_id"))
    if pad is not None and not torch.isin(torch.as_tensor(pad), torch.as_tensor([] if ends is None else ends)).any():
        mask = ids.ne(torch.as_tensor(pad, device=ids.device)).long()
        return None if mask.all() else mask
    return None


class _Note(LogitsProcessor):
    """Notes the token ids that the cache has read after each forward. It returns the logits unchanged.

    Beam search and drafts call it with the rows and tokens that the cache holds at that time.

    Args:
        cache: The cache of the call.
        before: How many tokens precede the token ids of the call; None if that is unknown.
    """

    def __init__(self, cache: KVCache, before: int | None):
        talk = cache.conversation
        self.cache, self.before, self.seen = cache, before, cache.get_seq_length()
        self.first: int | None = None  # how many tokens precede `input_ids`
        self.known = 0  # how many of these have known ids: all that the cache has seen since `talk.first`, or none
        if before and talk.ids is not None and talk.ids.shape[1] == self.seen - talk.first:
            self.known = talk.ids.shape[1]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        talk = self.cache.conversation
        if self.first is None:
            self.first = self._after_prefill(input_ids)
        if self.first < 0:  # not the tokens that the cache has read
            talk.ids = None
        elif self.known and talk.ids is not None and len(talk.ids) == len(input_ids):
            # beam search has reordered the known ids with the rows of the cache
            talk.ids = torch.cat((talk.ids[:, : self.known].to(input_ids.device), input_ids), 1)
        else:
            talk.ids, talk.first, self.known = input_ids.clone(), self.first, 0
        return scores

    def _after_prefill(self, input_ids: Tensor) -> int:
        """Return how many tokens precede `input_ids` in the cache.

        Raises:
            RuntimeError: The model has not read the prompt into this cache as it was given.
        """
        seen, layers, talk = self.cache.get_seq_length(), self.cache.evicting_layers, self.cache.conversation
        first = seen - input_ids.shape[1]
        if layers and seen == self.seen:
            raise RuntimeError(
                "KVCache: expected the model to read the prompt into this cache, got a forward with another cache "
                "or none: adapters by prefix tuning (PEFT) replace the cache by one of their own; use a cache of "
                "transformers"
            )
        talk.virtual = 0 if self.before is None or not layers else max(0, first - self.before)
        if talk.virtual and (self.seen or ((pads := layers[0].cache.padding) is not None and pads.any())):
            raise RuntimeError(
                f"KVCache: expected the model to read {seen - self.seen - talk.virtual} tokens of the prompt, got "
                f"{seen - self.seen}: prompt tuning (PEFT) serves one prompt per cache, without padding, and older "
                "transformers cannot read further prompts in chunks (prefill_chunk_size)"
            )
        return first
