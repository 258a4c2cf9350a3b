"""`model.generate` with a cache that evicts, and the stages of Lookahead Q-Cache.

Not called `generate.py`: `kvops.hf.generate` is the function, which a module of that name would hide, or be hidden by.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.utils import GenerateOutput

from ..cache import LookaheadCache
from ..methods import LAQ, Policy
from .attention import own_attention
from .cache import EvictingLayer, KVCache, Stage, storage_bytes


def generate(
    model: PreTrainedModel,
    policy: Policy,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    logits_processor: Sequence[LogitsProcessor] = (),
    **kwargs: Any,
) -> GenerateOutput | Tensor:
    """`model.generate` with a `KVCache` of `policy` and the library's attention.

    With `kvops.LAQ` it runs the stages of the paper: the prefill with its whole cache, which gives the first token; a
    draft cache of stage 1, over which `steps` lookahead tokens are decoded greedily, keeping their queries (a row that
    comes to its end stops early); the eviction of the whole cache by these queries; then the decode.

    Any number of threads may generate with one model. Its attention is the library's until the last of them is done,
    which other calls of the model must not meet halfway: if there are any, call `use_attention` before, once.

    Args:
        model: a causal language model of transformers.
        policy: the rule of the cache, such as kvops.SnapKV(1024).
        input_ids: int64 [b, n], the prompts, padded on the left.
        attention_mask: int [b, n]; None: no padding.
        logits_processor: of transformers.
        kwargs: further arguments of `model.generate`, but for past_key_values.

    Returns:
        What `model.generate` returns. With `return_dict_in_generate=True` the cache is its `past_key_values`; after LAQ
        the cache's `stages` say how many bytes all caches held after each stage, the largest of which is the peak.

    Raises:
        ValueError: past_key_values is given; or what `KVCache` and `use_attention` refuse.

    Source: LAQ, Sec. 4.
    """
    if "past_key_values" in kwargs:
        raise ValueError("generate: expected no past_key_values (the cache is made from `policy`), got one")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    processors = LogitsProcessorList(logits_processor)
    with own_attention(model):
        cache = KVCache(model.config, policy, attention_mask=attention_mask)
        if isinstance(policy, LAQ):
            cache._staged = True
            processors.append(_Lookahead(model, cache, attention_mask, kwargs))
        return cast(Any, model).generate(
            input_ids, attention_mask=attention_mask, past_key_values=cache, logits_processor=processors, **kwargs
        )


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
        attention_mask: int [b, n], of the prompts; b may repeat its rows for beams. None: no padding.
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
        attention_mask = logits.new_ones(len(logits), cache.get_seq_length(), dtype=torch.int64)
    ends = [] if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    lengths = decode_greedily(model, draft, logits, attention_mask, ends, cache.policy.steps)
    cache.stages.append(Stage("lookahead", _held(cache, draft)))
    for layer, drafted in zip(cache.layers, draft.layers):
        if isinstance(layer, EvictingLayer) and isinstance(drafted, EvictingLayer):
            _stages(layer).evict(drafted.cache, lengths)
            layer.mirror()
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


class _Lookahead(LogitsProcessor):
    """Runs LAQ's stages when transformers first asks what to make of the logits, which is after the prefill. It leaves
    them as they are."""

    def __init__(self, model: PreTrainedModel, cache: KVCache, attention_mask: Tensor, settings: dict[str, Any]):
        self.model, self.cache, self.mask = model, cache, attention_mask
        config = settings.get("generation_config") or model.generation_config
        self.ends = settings.get("eos_token_id", config.eos_token_id)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.cache.stages:
            lookahead(self.model, self.cache, scores, attention_mask=self.mask, eos_token_id=self.ends)
        return scores


def _held(*caches: KVCache) -> int:
    """Bytes that the caches' keys and values hold."""
    tensors = [getattr(x, name, None) for cache in caches for x in cache.layers for name in ("keys", "values")]
    return storage_bytes(*(x for x in tensors if x is not None))
