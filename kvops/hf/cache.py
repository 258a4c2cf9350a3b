"""The cache for `past_key_values=`: a layer that evicts by a method, and all layers of a model."""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer

from ..cache import AttendingCache, Cache
from ..cache.memory import storage_bytes
from ..methods import LAQ, Policy
from ..methods.base import check_policy
from ..rope import Rope
from . import architectures
from .attention import ATTENTION, STOCK, Slots, autocast, check_attention, eager, steps
from .rope import KV_HEADS, model_rope

_CROPS_TO_LENGTHS = "max_length" in inspect.signature(DynamicLayer.crop).parameters  # transformers before 5.15


class LayerStats(NamedTuple):
    """What one layer holds. Tokens are slots per head (padding included), bytes are those of the whole batch."""

    layer: int
    evicts: bool  # False: a layer of another kind (sliding window, ...), which keeps the class of transformers
    tokens_full: int  # tokens seen: what an uncompressed cache would hold
    tokens_kept: int
    bytes_full: int
    bytes_kept: int  # of the storage really allocated, not of the view


class Stage(NamedTuple):
    """What the caches of all layers hold after a stage of `generate`, of the whole batch."""

    name: str
    bytes: int


class EvictingLayer(DynamicLayer):
    """One layer's keys and values, [b, Hk, n, d], in a `kvops.Cache`; `KVCache` makes them.

    Args:
        cache: holds the layer's tokens and evicts by its policy.
        pads: int32 [b], how many pads each row begins with, before beam search repeats the rows; None: not said.
        own_attention: the model's attention is the library's.
        readers: further layers, without keys of their own, that attend to this one's.
    """

    is_croppable = False  # what was evicted cannot come back, so a rollback may fail

    def __init__(self, cache: Cache, pads: Tensor | None, own_attention: bool, readers: int = 0):
        self.cache = cache
        super().__init__()
        self.own_attention = own_attention
        self.pads = pads
        self.seen_pads: Tensor | None = None  # int32 [b] as the first step's mask has them
        self.readers = readers
        self.reads = 0  # of the last step, so far
        self.before = 0  # tokens seen before the last step

    # What transformers reads; the cache owns the tensors.

    @property
    def keys(self) -> Tensor | None:
        return self.cache.k

    @keys.setter
    def keys(self, none: Tensor | None) -> None:
        """The base class begins without."""

    @property
    def values(self) -> Tensor | None:
        return self.cache.v

    @values.setter
    def values(self, none: Tensor | None) -> None:
        """As `keys`."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True
        if self.cache.rope is not None:
            # transformers rounds cosines and sines to the model's dtype
            self.cache.rope = self.cache.rope.to(self.device, self.dtype)
        pads = self.padding(key_states.shape[0])
        if pads is not None and pads.any():
            self.cache.set_pads(pads.to(self.device))

    def padding(self, rows: int) -> Tensor | None:
        """How many pads each of the rows begins with, int32 [rows]; None: not known."""
        if self.cache.seen:
            return self.cache.padding
        if self.pads is None:
            return self.seen_pads
        if rows % self.pads.numel():
            raise ValueError(
                f"KVCache: pads must have one entry per row of the batch ({rows}), got {self.pads.numel()}"
            )
        # generate() repeats each prompt for its beams and return sequences, in this order
        return self.pads.repeat_interleave(rows // self.pads.numel())

    @eager
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        key_states, value_states = autocast(key_states), autocast(value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.before = self.cache.seen
        step = self.cache.append(key_states, value_states)
        if self.own_attention:
            self.reads = 0
            steps.add(self, *step)
        return step

    def attention(self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """The attention of the step that `update` returned, for this layer or one that shares its keys."""
        first, self.reads = self.reads == 0, self.reads + 1
        if first:
            if self.readers and isinstance(self.cache, AttendingCache):
                options["readers"] = self.readers
            out = self.cache.attention(query, key, value, **options)
        elif self.reads <= 1 + self.readers:
            out = self.cache.read(query, key, value, **options)
        else:
            raise NotImplementedError(
                f"kvops.hf: {type(module).__name__} attends to the keys of an evicting layer, and is one more than the "
                f"config says (num_kv_shared_layers), expected {self.readers}; {STOCK}"
            )
        return out

    def get_seq_length(self) -> int:
        return self.cache.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        slots = len(self.cache) + query_length
        return Slots(slots) if self.own_attention else slots, self.cache.seen - len(self.cache)

    def reset(self) -> None:
        self.cache.reset()
        self.is_initialized, self.seen_pads, self.reads = False, None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.is_initialized:
            self.cache.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.cache.repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_initialized:
            self.cache.select_rows(indices)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(
                f"KVCache.crop: tokens_to_remove must be 0 or negative (-2 removes 2 tokens), got {tokens_to_remove}"
            )
        if tokens_to_remove and self.is_initialized:
            self.cache.crop(self.cache.seen + tokens_to_remove)

    def with_cache(self, cache: Cache) -> EvictingLayer:
        """Such a layer with another cache."""
        twin = EvictingLayer.__new__(EvictingLayer)
        twin.__dict__.update(self.__dict__, cache=cache)
        return twin

    def __copy__(self) -> EvictingLayer:
        """A layer of its own; its cache shares the memory until one of the two writes."""
        return self.with_cache(copy.copy(self.cache))


class KVCache(DynamicCache):
    """A cache for `past_key_values=` whose full-attention layers evict by a policy.

    Args:
        config: the model's config (`model.config`). It says which layers are "full_attention"; layers of other kinds
            (sliding window, ...) keep the class that transformers gives them; and whether the attention is the
            library's (`use_attention`).
        policy: the rule and its settings, such as `kvops.LagKV(lag=128)` or `kvops.KeyDiff(1024)`; each layer has a
            `kvops.Cache` of its own under it.
        rope, storage: for policies that give tokens the positions of their slots, see `kvops.Cache`; rope None: the
            model's own (`model_rope`).
        attention_mask: int or bool [b, n], the mask of the first prompt, when its rows are padded on the left.
        pads: the same said shorter: how many pads each row starts with (b integers). With the library's attention
            neither is needed, as the model's attention mask says it (unless a prompt is read in chunks, and the first
            holds nothing of some row); if given, they have to agree with it. The attention of transformers does not
            show its mask: there a padded batch without one of the two gives wrong text, because pads are scored and
            kept as tokens.

    Attributes:
        policy: as given.
        stages: what all caches held after each stage of LAQ; empty before `lookahead` and for other policies.
        peak_bytes: the most bytes that the evicting layers held at a time.

    Raises:
        TypeError: config is no transformers config, policy no kvops policy.
        ValueError: a policy that needs the library's attention, without it; padding that is not on the left, or not
            what was said of it; `crop` of what was evicted (the cache stays as it was).
        NotImplementedError: what masks cannot express (see the text of `kvops.hf`), and, while the model runs, what the
            library's attention does not understand of it: keys that change after the cache, attention that is not
            causal, masks of four dims; some of the KV heads (tensor parallelism) for a policy that looks at all.
        RuntimeError: decode with `kvops.LAQ` before `lookahead`.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        policy: Policy,
        *,
        rope: Rope | None = None,
        storage: str = "pre_rope",
        attention_mask: Tensor | None = None,
        pads: Tensor | Sequence[int] | None = None,
    ):
        check(config, policy)
        pads = _pads(attention_mask, pads)
        own = config.get_text_config(decoder=True)._attn_implementation == ATTENTION
        if own:
            check_attention("KVCache", config)
        else:
            _check_stock_attention(policy, pads is not None and bool(pads.any()))
        super().__init__(config=config)
        self.policy = policy
        self.stages: list[Stage] = []  # filled by `lookahead`
        self._staged = False  # `generate` will see to the lookahead
        self._asked = False  # for the size of a mask, which the library has yet to make,
        self._masked = 0  # and of how many tokens, all in all, its last one was
        self._peak = 0  # bytes
        #: int64 [b, n]: the last prompt that `generate` was called with, see `turns`.
        self._prompt: Tensor | None = None
        config = config.get_text_config(decoder=True)
        self._kv_heads = _kv_heads(config)
        cross = getattr(config, "cross_attention_layers", None) or ()  # an image's keys, which no step adds to
        evicting = [i for i, x in enumerate(self.layers) if type(x) is DynamicLayer and i not in cross]
        slots = policy.positions == "slots"
        if evicting and slots and rope is None:
            rope = model_rope(config)
        for layer, i in enumerate(evicting):
            readers = _readers(config, i)
            if readers and slots:
                raise NotImplementedError(
                    f"KVCache: layers of {type(config).__name__} share keys, which cannot be turned to the slots of "
                    f"{policy!r} for all of them; use positions='original'"
                )
            cache = Cache(policy, layer=layer, num_layers=len(evicting), rope=rope, storage=storage)
            self.layers[i] = EvictingLayer(cache, pads, own, readers)
        if not evicting:
            warnings.warn("KVCache: this model has no full-attention layer, so nothing is evicted", stacklevel=2)

    @property
    def evicting_layers(self) -> list[EvictingLayer]:
        """The layers that evict, in order."""
        return [layer for layer in self.layers if isinstance(layer, EvictingLayer)]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        layer = self.layers[layer_idx]
        if not isinstance(layer, EvictingLayer):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._check_step(layer.cache, key_states.shape[-2])
        if not layer.is_initialized:
            self._check_heads(key_states.shape[1])
        step = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if key_states.shape[-2] > 1:  # decode adds a token at a time, which `peak_bytes` sees at the end
            self._peak = max(self._peak, self._held(layer, step))
        return step

    def _held(self, layer: EvictingLayer | None = None, step: tuple[Tensor, ...] = ()) -> int:
        """Bytes of the evicting layers, while one of them attends to what `update` returned of it."""
        others = sum(x.cache.nbytes for x in self.evicting_layers if x is not layer)
        return others + (0 if layer is None else layer.cache.nbytes_with(*step))

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the layers that evict have held at a time, the one that reads a prompt whole with all of
        it. Not what the model makes on its way (its projections, the logits)."""
        return max(self._peak, self._held())

    def _check_step(self, cache: Cache, tokens: int) -> None:
        """Raises for a step that was not prepared as it has to be."""
        if self._asked and self._masked != cache.seen + tokens:
            raise RuntimeError(
                "KVCache: made for the library's attention, but the model has another now; set the model's attention "
                "(kvops.hf.use_attention, set_attn_implementation) before making the cache"
            )
        if cache.seen and tokens == 1 and isinstance(cache.policy, LAQ) and not (self.stages or self._staged):
            raise RuntimeError(
                "KVCache: kvops.LAQ evicts in its lookahead only, and a step of one token came before it, so the "
                "whole prompt would stay; call kvops.hf.generate, or kvops.hf.lookahead between prompt and decode"
            )

    def _check_heads(self, heads: int) -> None:
        """Raises where this rank has some of the KV heads, and the policy looks at all of them."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self.policy.heads_alone or not distributed or heads >= self._kv_heads:
            return
        raise NotImplementedError(
            f"KVCache: {self.policy!r} looks at all KV heads of a layer, and tensor parallelism leaves some to other "
            f"ranks, expected {self._kv_heads} heads, got {heads}; use a policy whose heads keep tokens of their own, "
            "such as one with head_mode='per_head'"
        )

    @eager
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        slots, offset = super().get_mask_sizes(query_length, layer_idx)
        if isinstance(slots, Slots):
            slots.cache, self._asked = self, True
        return slots, offset

    def reset(self) -> None:
        super().reset()
        self.stages, self._staged, self._asked, self._masked, self._peak = [], False, False, 0, 0
        self._prompt = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._prompt = None  # its rows are no longer those of the cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._prompt = None

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._prompt = None

    def _see_padding(self, mask: Tensor | None, rows: int, tokens: int) -> None:
        """Takes the padding from the mask of a step of `tokens` tokens, bool [rows, seen + tokens] or None, or checks
        that it is what it was."""
        layers = self.evicting_layers
        seen = layers[0].cache.seen
        self._asked, self._masked = False, seen + tokens
        if seen == 0:
            for layer in layers:
                layer.seen_pads = None
        if mask is None:
            return
        if mask.shape != (rows, seen + tokens):
            raise ValueError(
                f"KVCache: attention_mask must be [batch, tokens seen and new], expected [{rows}, {seen} + {tokens}], "
                f"got {list(mask.shape)}; a cache is for one conversation, make a new KVCache for a new prompt"
            )
        pads = (mask.cumsum(1) == 0).sum(1, dtype=torch.int32)
        if ((~mask).sum(1) != pads).any():
            raise ValueError(
                "KVCache: attention_mask must be padded on the left (0s, then 1s): padding_side='left'; pads on the "
                "right, or between the turns of a conversation, are not supported with an evicting cache"
            )
        known = layers[0].padding(rows)
        if seen or known is not None:
            known = torch.zeros_like(pads) if known is None else known.to(pads.device)
            if not torch.equal(pads, known.clamp(max=seen + tokens)):
                raise ValueError(
                    "KVCache: attention_mask must begin with the pads that the cache was told of, or saw in the first "
                    f"step, expected {known.tolist()}, got {pads.tolist()}"
                )
            return
        if (pads == tokens).any():
            raise ValueError(
                "KVCache: a row of attention_mask has begun with pads only, and more may follow in the next chunk: "
                "give the KVCache the whole attention_mask, or pads"
            )
        for layer in layers:
            layer.seen_pads = pads

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens, as transformers does for the rejected tokens of a draft.

        Args:
            tokens_to_remove: 0 or negative: -2 removes two tokens. With transformers before 5.15, as in its own caches,
                a positive number is how many tokens stay.

        Raises:
            ValueError: the policy or an eviction does not allow it; the cache stays as it was.
        """
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.15 counts rejected tokens in a tensor
        if _CROPS_TO_LENGTHS:
            if tokens_to_remove > 0:
                tokens_to_remove = min(0, tokens_to_remove - self.get_seq_length())
            if tokens_to_remove == 0:  # which its layers would take for a length too
                return
        before = [layer if isinstance(layer, EvictingLayer) else copy.copy(layer) for layer in self.layers]
        with contextlib.ExitStack() as undone:
            for layer in self.evicting_layers:
                undone.enter_context(layer.cache.undone_on_error())
            try:
                super().crop(tokens_to_remove)
            except Exception:
                self.layers = before
                raise
        if self._prompt is not None:
            self._prompt = self._prompt[:, : self.get_seq_length()]

    def freeze(self) -> None:
        """From now on every token stays (until `reset`): a prompt that is compressed once, and a decode that grows."""
        for layer in self.layers:
            if isinstance(layer, EvictingLayer):
                layer.cache.freeze()

    def stats(self) -> list[LayerStats]:
        """What each layer holds, in tokens and bytes, beside what an uncompressed cache would.

        Layers without keys and values (recurrent ones), and those that are empty yet, are left out.
        """
        out = []
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, CacheLayerMixin):
                continue
            keys, values = layer.keys, layer.values
            if keys is None or values is None or keys.numel() == 0:
                continue
            seen, kept = layer.get_seq_length(), keys.shape[-2]
            per_token = (keys.nbytes + values.nbytes) // kept
            evicts = isinstance(layer, EvictingLayer)
            out.append(LayerStats(i, evicts, seen, kept, seen * per_token, storage_bytes(keys, values)))
        return out


def check(config: PreTrainedConfig, policy: Policy) -> None:
    """Raises for what cannot work, whatever the batch."""
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"KVCache: config must be a transformers config (model.config), got {type(config).__name__}")
    check_policy("KVCache", policy)
    if config.is_encoder_decoder:
        raise NotImplementedError("KVCache: encoder-decoder models need two caches and are not supported")
    text = config.get_text_config(decoder=True)
    if why := architectures.lookup(text).cache:
        raise NotImplementedError(
            f"KVCache: models of type {text.model_type!r} are not served: {why}; use a cache of transformers"
        )


def _kv_heads(config: PreTrainedConfig) -> int:
    """The fewest that any layer has, all ranks together; 0 in models without attention."""
    names = [x for x in (*KV_HEADS, "num_global_key_value_heads") if getattr(config, x, None)]
    counts = [getattr(config, x) for x in names] or [getattr(config, "num_attention_heads", 0)]
    return min(min(x) if isinstance(x, (list, tuple)) else x for x in counts)


def _readers(config: PreTrainedConfig, layer: int) -> int:
    """How many layers without keys of their own attend to those of `layer` (Gemma 3n, Gemma 4): the last layers of its
    kind, if it is the last of that kind before them."""
    shared = getattr(config, "num_kv_shared_layers", None)
    if not shared:
        return 0
    kinds, first = config.layer_types, len(config.layer_types) - shared
    return 0 if kinds[layer] in kinds[layer + 1 : first] else kinds[first:].count(kinds[layer])


def _check_stock_attention(policy: Policy, padded: bool) -> None:
    """Raises for what the attention of transformers and its masks cannot serve."""
    if policy.uses_queries:
        why = "looks at queries, which the attention of transformers does not hand over"
    elif policy.positions == "slots":
        why = "rotates keys and queries at their slots (unless positions='original'), before the attention"
    elif not policy.uniform_layers:
        why = "leaves the layers with different lengths, but transformers makes one attention mask for all of them"
    elif padded and not policy.fixed_budget:
        why = "keeps more of a longer row than of a shorter one, so the rows of a padded batch need masks of their own"
    else:
        return
    raise ValueError(f"KVCache: {policy!r} {why}; call kvops.hf.use_attention(model) before making the cache")


def _pads(attention_mask: Tensor | None, pads: Tensor | Sequence[int] | None) -> Tensor | None:
    """The pad counts, int32 [b] on the CPU, or None where nobody has said so."""
    if attention_mask is not None:
        if pads is not None:
            raise ValueError("KVCache: give attention_mask or pads, not both")
        if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
            raise ValueError("KVCache: attention_mask must be a tensor [batch, tokens] of 0 and 1")
        mask = attention_mask.cpu() != 0
        if not (mask.cummax(1).values == mask).all() or not mask.any(1).all():
            raise ValueError("KVCache: attention_mask must be padded on the left (0s, then 1s): padding_side='left'")
        pads = (~mask).sum(1)
    if pads is None:
        return None
    try:
        counts = torch.as_tensor(pads, device="cpu")
        integers = counts.dim() == 1 and counts.numel() and not (counts.is_floating_point() or counts.is_complex())
        fits = integers and counts.dtype != torch.bool and ((counts >= 0) & (counts < 2**31)).all()
    except (TypeError, ValueError, RuntimeError, OverflowError):  # no numbers, ragged, beyond 64 bits
        fits = False
    if not fits:
        got = pads.tolist() if isinstance(pads, Tensor) else pads
        raise ValueError(f"KVCache: pads must be one count >= 0 and < 2^31 per row of the batch, got {got}")
    return counts.to(torch.int32)
