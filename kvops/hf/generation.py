"""What generation with Lookahead Q-Cache needs more than a cache: its stages.

Not called `lookahead.py`: `kvops.hf.lookahead` is the function, which a module of that name would hide.
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
from .cache import EvictingLayer, KVCache, Stage


def lookahead(
    model: PreTrainedModel,
    cache: KVCache,
    logits: Tensor,
    *,
    attention_mask: Tensor | None = None,
    eos_token_id: int | Sequence[int] | None = None,
) -> None:
    """LAQ's stages between the prefill and the decode, for generation loops of your own.

    Decodes the draft and evicts by its queries. The decode then goes on from the prompts' ends. `cache.stages` says how
    many bytes were held after each stage.

    Args:
        model: the one that has read the prompts, with the library's attention (`use_attention`).
        cache: a KVCache of `kvops.LAQ` that holds the prompts.
        logits: [b, vocab], of the prompts' last tokens; their argmax begins the draft.
        attention_mask: int [b, n], of the prompts; b may repeat its rows for beams. None: padded
            as the cache has seen it.
        eos_token_id: ends a row's draft.

    Raises:
        TypeError: cache is no KVCache of `kvops.LAQ`.
    """
    if not isinstance(cache, KVCache) or not isinstance(cache.policy, LAQ):
        got = f"one of {cache.policy!r}" if isinstance(cache, KVCache) else type(cache).__name__
        raise TypeError(f"lookahead: cache must be a KVCache of kvops.LAQ, got {got}")
    cache.stages = [Stage("prefill", _held(cache))]
    if not cache.evicting_layers:
        return  # of which KVCache has warned
    draft = copy.copy(cache)
    draft.layers = [
        layer.with_cache(_stages(layer).draft()) if isinstance(layer, EvictingLayer) else copy.deepcopy(layer)
        for layer in cache.layers
    ]
    if attention_mask is None:
        first = cache.evicting_layers[0].cache
        attention_mask = logits.new_ones(len(logits), first.seen, dtype=torch.int64)
        if first.padding is not None:  # as the library's attention saw it in the prefill
            attention_mask = (torch.arange(first.seen, device=logits.device) >= first.padding[:, None]).long()
    ends = [] if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    lengths = decode_greedily(model, draft, logits, attention_mask, ends, cache.policy.steps)
    cache.stages.append(Stage("lookahead", _held(cache, draft)))
    for layer, drafted in zip(cache.layers, draft.layers):
        if isinstance(layer, EvictingLayer) and isinstance(drafted, EvictingLayer):
            _stages(layer).evict(drafted.cache, lengths)
    cache.stages.append(Stage("decode", _held(cache)))


def _stages(layer: EvictingLayer) -> LookaheadCache:
    assert isinstance(layer.cache, LookaheadCache)  # as the policy is LAQ
    return layer.cache


def decode_greedily(
    model: PreTrainedModel, draft: KVCache, logits: Tensor, mask: Tensor, ends: Sequence[int], steps: int
) -> Tensor:
    """Decodes greedily over a draft's cache, which keeps the queries.

    Args:
        model: of transformers.
        draft: the cache to decode over; it grows by a token per step.
        logits: [b, vocab], before the first step.
        mask: int [b or fewer, n], of the prompts; rows are repeated for beams.
        ends: token ids that end a row.
        steps: at most; fewer when all rows have ended.

    Returns:
        int32 [b]: how many of the steps count in each row, at least 1.
    """
    rows = logits.shape[0]  # beams repeat the prompts
    mask = mask.repeat_interleave(rows // mask.shape[0], 0)
    end = torch.tensor(ends, dtype=torch.int64, device=logits.device)
    token = logits.argmax(-1, keepdim=True)
    lengths = torch.ones(rows, dtype=torch.int32, device=logits.device)
    alive = ~torch.isin(token[:, 0], end)
    for step in range(steps):
        mask = torch.cat((mask, mask.new_ones(rows, 1)), 1)
        positions = mask.sum(-1, keepdim=True) - 1
        logits = model(token, attention_mask=mask, position_ids=positions, past_key_values=draft).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
        alive = alive & ~torch.isin(token[:, 0], end)
        if step + 1 == steps or (ends and not alive.any()):
            break
        lengths = lengths + alive.int()
    return lengths


class Lookahead(LogitsProcessor):
    """Runs LAQ's stages when transformers first asks what to make of the logits, which is after the prefill. It leaves
    them as they are.

    Args:
        model, cache, attention_mask: as in `lookahead`.
        call: the arguments of `model.generate`.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache, attention_mask: Tensor | None, call: Mapping[str, Any]):
        self.model, self.cache, self.mask = model, cache, attention_mask
        self.ends = setting(model, call, "eos_token_id")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.cache.stages:
            lookahead(self.model, self.cache, scores, attention_mask=self.mask, eos_token_id=self.ends)
        return scores


def setting(model: PreTrainedModel, call: Mapping[str, Any], name: str) -> Any:
    """A setting of generation, as a call of `model.generate` with these arguments will have it."""
    if name in call:
        return call[name]
    value = getattr(call.get("generation_config"), name, None)
    return getattr(model.generation_config, name, None) if value is None else value


def _held(*caches: KVCache) -> int:
    """Bytes that the caches' keys and values hold."""
    tensors = [getattr(x, name, None) for cache in caches for x in cache.layers for name in ("keys", "values")]
    return storage_bytes(*(x for x in tensors if x is not None))
