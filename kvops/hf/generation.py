"""The stages of Lookahead Q-Cache (LAQ) and of KVzip and its like, which generation runs between prefill and decode.

The module is not called `lookahead.py`, because that name would hide the function `kvops.hf.lookahead`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from ..cache import LookaheadCache, RepeatingCache
from ..cache.attending import evict_repeated
from ..cache.memory import storage_bytes
from ..methods import LAQ
from ..methods.repeating import RepeatPolicy, repeat_counts, repeat_ids
from .arguments import CACHE
from .cache import EvictingLayer, KVCache, Stage, tensors_of
from .conversation import mask_of_pads
from .gradients import gradient_norms
from .inputs import passing_inputs


def lookahead(
    model: PreTrainedModel,
    cache: KVCache,
    logits: Tensor,
    *,
    attention_mask: Tensor | None = None,
    eos_token_id: int | Sequence[int] | None = None,
) -> None:
    """Run LAQ's stages between prefill and decode, for your own generation loop.

    It decodes the draft, or reads the policy's template in its place, and evicts from `cache` by the queries of these
    tokens. The decode then continues from the end of the prompts. Afterwards `cache.stages` tells how many bytes were
    held after each stage.

    Args:
        model: The model that has read the prompts, with the library's attention (`use_attention`).
        cache: A KVCache with `kvops.LAQ` that holds the prompts.
        logits: [b, vocab], the logits of the prompts' last tokens. The draft begins with their argmax. With a template
            only b counts.
        attention_mask: int64 [b, n], the mask of the prompts, or fewer rows if the cache repeats each for its beams.
            None: the padding that the cache has seen.
        eos_token_id: Token id or ids that end a row's draft.

    Raises:
        TypeError: `cache` is not a KVCache with `kvops.LAQ`.
        ValueError: `attention_mask` is not the mask of the prompts that the cache has read.
    """
    if not isinstance(cache, KVCache) or not isinstance(cache.policy, LAQ):
        got = f"one with {cache.policy!r}" if isinstance(cache, KVCache) else type(cache).__name__
        raise TypeError(f"lookahead: cache must be a KVCache with kvops.LAQ, got {got}")
    if attention_mask is not None and cache.evicting_layers:
        rows, first = len(logits), cache.evicting_layers[0].cache
        repeated = attention_mask.repeat_interleave(rows // len(attention_mask), 0)  # once for each beam
        cache.conversation.check_mask(repeated, rows, first.seen, 0, first.padding)
    stages = [Stage("prefill", _held(cache))]
    if not cache.evicting_layers:
        cache.stages = stages
        return  # KVCache has warned about it
    draft = copy.copy(cache)
    draft.stages = stages
    draft.layers = [
        layer.with_cache(_stages(layer).draft()) if isinstance(layer, EvictingLayer) else copy.deepcopy(layer)
        for layer in cache.layers
    ]
    mask = _mask_of(cache, logits)
    lengths = None
    if cache.policy.template:
        read_template(model, draft, logits, mask, cache.policy.template)
    else:
        ends = [] if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
        lengths = decode_greedily(model, draft, logits, mask, ends, cache.policy.steps)
    stages.append(Stage("lookahead", _held(cache, draft)))
    for layer, drafted in zip(cache.layers, draft.layers):
        if isinstance(layer, EvictingLayer) and isinstance(drafted, EvictingLayer):
            _stages(layer).evict(drafted.cache, lengths)
    cache.stages = [*stages, Stage("decode", _held(cache))]


def _stages(layer: EvictingLayer) -> LookaheadCache:
    assert isinstance(layer.cache, LookaheadCache)  # the policy is LAQ
    return layer.cache


def repeat(model: PreTrainedModel, cache: KVCache, input_ids: Tensor, *, attention_mask: Tensor | None = None) -> None:
    """Run the passes of KVzip or Attention Matching between prefill and decode, for your own loop, and evict.

    The model reads each chunk of the prompts again, after the instruction of the policy (`repeat_prompts`). The queries
    score the cached prompts, and the tokens of a pass are forgotten. The decode then continues from the end of the
    prompts. Afterwards `cache.stages` tells how many bytes were held before and after the eviction.

    Args:
        model: The model that has read the prompts, with the library's attention (`use_attention`).
        cache: A KVCache with `kvops.KVzip` or `kvops.AttentionMatching` that holds the prompts.
        input_ids: int64 [b, n], the prompts, left-padded.
        attention_mask: int64 [b, n], the mask of the prompts, or fewer rows if the cache repeats each for its beams.
            None: the padding that the cache has seen.

    Raises:
        TypeError: `cache` is not a KVCache with such a policy.
        ValueError: `input_ids` are not the tokens that the cache has seen.
    """
    if not isinstance(cache, KVCache) or not isinstance(cache.policy, RepeatPolicy):
        got = f"one with {cache.policy!r}" if isinstance(cache, KVCache) else type(cache).__name__
        raise TypeError(f"repeat: cache must be a KVCache with kvops.KVzip or kvops.AttentionMatching, got {got}")
    if input_ids.shape[-1] != (seen := cache.get_seq_length()):
        raise ValueError(
            f"repeat: input_ids must be the prompts that the cache has read, expected {seen} tokens, got "
            f"{list(input_ids.shape)}; with inputs_embeds there are none to repeat"
        )
    stages = [Stage("prefill", _held(cache))]
    layers = cache.evicting_layers
    if not layers:
        cache.stages = stages
        return  # KVCache has warned about it
    mask = _mask_of(cache, input_ids) if attention_mask is None else attention_mask
    if mask is None:
        mask = torch.ones_like(input_ids)
    mask = mask.repeat_interleave(len(input_ids) // len(mask), 0)
    valid = mask.sum(1)
    for first in range(0, int(valid.max()), cache.policy.chunk):
        ids = repeat_ids(cache.policy, input_ids, valid, first)
        every = torch.cat((mask, mask.new_ones(ids.shape)), 1)
        reading = copy.copy(cache)  # layers that do not evict cannot all forget
        reading.stages = stages
        reading.layers = [x if isinstance(x, EvictingLayer) else copy.deepcopy(x) for x in cache.layers]
        positions = (every.cumsum(1) - 1)[:, -ids.shape[1] :]
        gradients: list[Tensor | None] = [None] * len(layers)
        if cache.policy.gradients:
            counts = repeat_counts(cache.policy, valid, first, ids.shape[1])
            gradients = [*gradient_norms(model, cache, ids, every, positions, counts)]
        with contextlib.ExitStack() as passes:
            for layer, own in zip(layers, gradients):
                passes.enter_context(_repeating(layer).repeating(first, own))
            passes.enter_context(passing_inputs(model, cache.policy))
            model(ids, attention_mask=every, position_ids=positions, logits_to_keep=1, **{CACHE: reading})
    evict_repeated([_repeating(layer) for layer in layers])
    cache.stages = [*stages, Stage("decode", _held(cache))]


def repeat_prompts(tokenizer: Any) -> dict[str, tuple[int, ...]]:
    """Return the settings of `kvops.KVzip` and its like that ask a model to repeat its prompt, in the authors' words.

    `generate` does it with `tokenizer=`, and the evaluation with the model's tokenizer, if the policy has none.

    Args:
        tokenizer: The model's tokenizer. If it has a chat template, the second reading is an answer: the template says
            how a user's turn ends and an answer begins. It gets `enable_thinking=False`, as in the authors' code.

    Returns:
        instruction, next_instruction and suffix: `kvops.KVzip(1024, **kvops.hf.repeat_prompts(tokenizer))`.

    Raises:
        ValueError: The chat template fails, or does not contain what a user says.

    Source: KVzip, Kim et al., 2025; code: snu-mllab/KVzip.
    """
    suffix = ""
    if getattr(tokenizer, "chat_template", None):
        said = "\N{BLACK DIAMOND SUIT}"  # in no template
        turn = [{"role": "user", "content": said}]
        try:
            text = tokenizer.apply_chat_template(
                turn, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
        except Exception as error:  # the template's own
            raise ValueError(f"repeat_prompts: the tokenizer's chat template fails: {error}") from error
        _, found, suffix = text.partition(said)
        if not found:
            raise ValueError(f"repeat_prompts: expected a chat template that contains the user's words, got {text!r}")
    texts = {
        "instruction": "\n\nRepeat the previous context exactly.",
        "next_instruction": "\n\nRepeat the part of the previous context exactly, starting with",
        "suffix": suffix,
    }
    return {name: tuple(tokenizer(x, add_special_tokens=False).input_ids) for name, x in texts.items()}


def _repeating(layer: EvictingLayer) -> RepeatingCache:
    assert isinstance(layer.cache, RepeatingCache)  # the policy is a RepeatPolicy
    return layer.cache


def _mask_of(cache: KVCache, like: Tensor) -> Tensor | None:
    """The mask of the prompts that a cache holds, int64 [b, n], on the device of `like`; None without padding."""
    first = cache.evicting_layers[0].cache
    return mask_of_pads(first.padding, first.seen, like.device)


def run_stages(
    model: PreTrainedModel,
    cache: KVCache,
    input_ids: Tensor,
    logits: Tensor,
    attention_mask: Tensor | None = None,
    eos_token_id: int | Sequence[int] | None = None,
) -> None:
    """Run `lookahead` or `repeat`, whichever the cache's policy needs; nothing for other policies."""
    if isinstance(cache.policy, LAQ):
        lookahead(model, cache, logits, attention_mask=attention_mask, eos_token_id=eos_token_id)
    elif isinstance(cache.policy, RepeatPolicy):
        repeat(model, cache, input_ids, attention_mask=attention_mask)


def decode_greedily(
    model: PreTrainedModel, draft: KVCache, logits: Tensor, mask: Tensor | None, ends: Sequence[int], steps: int
) -> Tensor:
    """Decode greedily over a draft's cache, which keeps the queries.

    With a mask or with `ends` every step reads from the device: it checks the mask, or whether all rows have ended.

    Args:
        model: A model of transformers.
        draft: The cache to decode over. It grows by one token per step.
        logits: [b, vocab], the logits before the first step.
        mask: int64 [b, n], the mask of the prompts; None: no padding.
        ends: Token ids that end a row.
        steps: The most steps to take. Decoding stops earlier when all rows have ended.

    Returns:
        int32 [b], how many of the steps count in each row, at least 1.
    """
    rows = logits.shape[0]
    end = torch.tensor(ends, dtype=torch.int64, device=logits.device)
    token = logits.argmax(-1, keepdim=True)
    lengths = torch.ones(rows, dtype=torch.int32, device=logits.device)
    alive = ~torch.isin(token[:, 0], end)
    for step in range(steps):
        mask = _extended(mask)
        token = _next_logits(model, draft, token, mask).argmax(-1, keepdim=True)
        alive = alive & ~torch.isin(token[:, 0], end)
        if step + 1 == steps or (ends and not alive.any()):
            break
        lengths = lengths + alive.int()
    return lengths


def read_template(
    model: PreTrainedModel, draft: KVCache, logits: Tensor, mask: Tensor | None, template: Sequence[int]
) -> None:
    """Read the same tokens in every row over a draft's cache, which keeps the queries, in steps of one token.

    Args:
        model: A model of transformers.
        draft: The cache. It grows by one token per step.
        logits: [b, vocab], as in `decode_greedily`. Only b counts.
        mask: As in `decode_greedily`.
        template: The token ids.
    """
    for token in template:
        mask = _extended(mask)
        _next_logits(model, draft, logits.new_full((len(logits), 1), token, dtype=torch.int64), mask)


def _extended(mask: Tensor | None) -> Tensor | None:
    """The mask with one more token."""
    return None if mask is None else torch.cat((mask, mask.new_ones(len(mask), 1)), 1)


def _next_logits(model: PreTrainedModel, draft: KVCache, token: Tensor, mask: Tensor | None) -> Tensor:
    """The logits after one token, [b, vocab]. token: int64 [b, 1]. mask: int64 [b, n], up to this token, or None."""
    if mask is None:
        positions = torch.full_like(token, draft.get_seq_length())
    else:
        positions = mask.sum(-1, keepdim=True) - 1
    return model(token, attention_mask=mask, position_ids=positions, **{CACHE: draft}).logits[:, -1]


class Lookahead(LogitsProcessor):
    """Runs the stages of LAQ or KVzip and its like when transformers first processes logits, after the prefill.

    It returns the logits unchanged.

    Args:
        model: As in `lookahead`.
        cache: As in `lookahead`.
        call: The arguments of `model.generate`.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache, call: Mapping[str, Any]):
        self.model, self.cache = model, cache
        self.ends = setting(model, call, "eos_token_id")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.cache.stages:
            run_stages(self.model, self.cache, input_ids, scores, eos_token_id=self.ends)
        return scores


def setting(model: PreTrainedModel, call: Mapping[str, Any], name: str) -> Any:
    """Return the value that a generation setting has in a call of `model.generate` with these arguments."""
    if name in call:
        return call[name]
    value = getattr(call.get("generation_config"), name, None)
    return getattr(model.generation_config, name, None) if value is None else value


def _held(*caches: KVCache) -> int:
    """Return the bytes of the caches' keys and values."""
    return storage_bytes(*(x for cache in caches for layer in cache.layers for x in tensors_of(layer)))
