"""The stages of Lookahead Q-Cache (LAQ), which generation runs between prefill and decode.

The module is not called `lookahead.py`, because that name would hide the function `kvops.hf.lookahead`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from ..cache import LookaheadCache
from ..cache.memory import storage_bytes
from ..methods import LAQ
from .arguments import CACHE
from .cache import EvictingLayer, KVCache, Stage


def lookahead(
    model: PreTrainedModel,
    cache: KVCache,
    logits: Tensor,
    *,
    attention_mask: Tensor | None = None,
    eos_token_id: int | Sequence[int] | None = None,
) -> None:
    """Run LAQ's stages between prefill and decode, for your own generation loop.

    It decodes the draft and evicts from `cache` by the draft's queries. The decode then continues from the end of the
    prompts. Afterwards `cache.stages` tells how many bytes were held after each stage.

    Args:
        model: The model that has read the prompts, with the library's attention (`use_attention`).
        cache: A KVCache with `kvops.LAQ` that holds the prompts.
        logits: [b, vocab], the logits of the prompts' last tokens. The draft begins with their argmax.
        attention_mask: int64 [b, n], the mask of the prompts, or fewer rows if the cache repeats each for its beams.
            None: the padding that the cache has seen.
        eos_token_id: Token id or ids that end a row's draft.

    Raises:
        TypeError: `cache` is not a KVCache with `kvops.LAQ`.
    """
    if not isinstance(cache, KVCache) or not isinstance(cache.policy, LAQ):
        got = f"one with {cache.policy!r}" if isinstance(cache, KVCache) else type(cache).__name__
        raise TypeError(f"lookahead: cache must be a KVCache with kvops.LAQ, got {got}")
    cache.stages = [Stage("prefill", _held(cache))]
    if not cache.evicting_layers:
        return  # KVCache has warned about it
    draft = copy.copy(cache)
    draft.layers = [
        layer.with_cache(_stages(layer).draft()) if isinstance(layer, EvictingLayer) else copy.deepcopy(layer)
        for layer in cache.layers
    ]
    if attention_mask is None:
        first = cache.evicting_layers[0].cache
        attention_mask = logits.new_ones(len(logits), first.seen, dtype=torch.int64)
        if first.padding is not None:  # from the mask of the prefill
            attention_mask = (torch.arange(first.seen, device=logits.device) >= first.padding[:, None]).long()
    ends = [] if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    lengths = decode_greedily(model, draft, logits, attention_mask, ends, cache.policy.steps)
    cache.stages.append(Stage("lookahead", _held(cache, draft)))
    for layer, drafted in zip(cache.layers, draft.layers):
        if isinstance(layer, EvictingLayer) and isinstance(drafted, EvictingLayer):
            _stages(layer).evict(drafted.cache, lengths)
    cache.stages.append(Stage("decode", _held(cache)))


def _stages(layer: EvictingLayer) -> LookaheadCache:
    assert isinstance(layer.cache, LookaheadCache)  # the policy is LAQ
    return layer.cache


def decode_greedily(
    model: PreTrainedModel, draft: KVCache, logits: Tensor, mask: Tensor, ends: Sequence[int], steps: int
) -> Tensor:
    """Decode greedily over a draft's cache, which keeps the queries.

    Args:
        model: A model of transformers.
        draft: The cache to decode over. It grows by one token per step.
        logits: [b, vocab], the logits before the first step.
        mask: int64 [b, n], the mask of the prompts, or fewer rows if the cache repeats each for its beams.
        ends: Token ids that end a row.
        steps: The most steps to take. Decoding stops earlier when all rows have ended.

    Returns:
        int32 [b], how many of the steps count in each row, at least 1.
    """
    rows = logits.shape[0]  # beam search repeats the prompts
    mask = mask.repeat_interleave(rows // mask.shape[0], 0)
    end = torch.tensor(ends, dtype=torch.int64, device=logits.device)
    token = logits.argmax(-1, keepdim=True)
    lengths = torch.ones(rows, dtype=torch.int32, device=logits.device)
    alive = ~torch.isin(token[:, 0], end)
    for step in range(steps):
        mask = torch.cat((mask, mask.new_ones(rows, 1)), 1)
        positions = mask.sum(-1, keepdim=True) - 1
        logits = model(token, attention_mask=mask, position_ids=positions, **{CACHE: draft}).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
        alive = alive & ~torch.isin(token[:, 0], end)
        if step + 1 == steps or (ends and not alive.any()):
            break
        lengths = lengths + alive.int()
    return lengths


class Lookahead(LogitsProcessor):
    """Runs LAQ's stages when transformers first processes logits, which is after the prefill.

    It returns the logits unchanged.

    Args:
        model: As in `lookahead`.
        cache: As in `lookahead`.
        attention_mask: As in `lookahead`.
        call: The arguments of `model.generate`.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache, attention_mask: Tensor | None, call: Mapping[str, Any]):
        self.model, self.cache, self.mask = model, cache, attention_mask
        self.ends = setting(model, call, "eos_token_id")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.cache.stages:
            lookahead(self.model, self.cache, scores, attention_mask=self.mask, eos_token_id=self.ends)
        return scores


def setting(model: PreTrainedModel, call: Mapping[str, Any], name: str) -> Any:
    """Return the value that a generation setting has in a call of `model.generate` with these arguments."""
    if name in call:
        return call[name]
    value = getattr(call.get("generation_config"), name, None)
    return getattr(model.generation_config, name, None) if value is None else value


def _held(*caches: KVCache) -> int:
    """Return the bytes of the caches' keys and values."""
    tensors = [getattr(x, name, None) for cache in caches for x in cache.layers for name in ("keys", "values")]
    return storage_bytes(*(x for x in tensors if x is not None))
