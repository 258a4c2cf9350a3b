"""The cache for `past_key_values=`: `KVCache` for a model, and its layers that evict."""

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
from ..cache.base import Storage
from ..cache.memory import size, span, storage_bytes
from ..cache.rounded import STORED, channels
from ..methods import LAQ, Policy, QueryPolicy
from ..methods.registry import as_policy
from ..methods.repeating import RepeatPolicy
from ..methods.view import LayerInputs
from ..ops.rope import Rope
from . import architectures
from .attention import ATTENTION, STOCK, Slots, autocast, check_attention, eager, steps
from .conversation import Conversation, declared_pads
from .patches import install
from .rope import KV_HEADS, model_rope

_CROPS_TO_LENGTHS = "max_length" in inspect.signature(DynamicLayer.crop).parameters  # transformers before 5.15


class LayerStats(NamedTuple):
    """What one layer holds. Tokens count slots per head, padding included; bytes count the whole batch.

    Of heads that differ in length, the tokens are their mean, rounded up.
    """

    layer: int
    evicts: bool  # False: a layer of another kind (sliding window, ...), which keeps its class from transformers
    tokens_full: int  # tokens seen, which an uncompressed cache would hold
    tokens_kept: int
    bytes_full: int
    bytes_kept: int  # of the allocated storage, not of the view


class Stage(NamedTuple):
    """Bytes that the caches of all layers hold after a stage of LAQ, KVzip or its like, for the whole batch."""

    name: str
    bytes: int


class EvictingLayer(DynamicLayer):
    """One layer's keys and values, [b, Hk, n, d], in a `kvops.Cache`. `KVCache` creates these layers.

    Args:
        cache: Holds the layer's tokens and evicts by its policy.
        conversation: Knows the padding. All layers share it.
        own_attention: Whether the model uses the library's attention.
        readers: How many layers without keys of their own also attend to this layer's keys.
    """

    is_croppable = False  # evicted tokens cannot be restored, so a rollback may fail

    def __init__(self, cache: Cache, conversation: Conversation, own_attention: bool, readers: int = 0):
        self.cache = cache
        super().__init__()
        self.conversation = conversation
        self.own_attention = own_attention
        self.readers = readers
        self.reads = 0  # how many layers have attended in the last step
        self.before = 0  # tokens seen before the last step
        self.inputs: LayerInputs | None = None  # of the coming step; see `inputs.passing_inputs`

    # transformers reads these attributes; the cache owns the tensors.

    @property
    def keys(self) -> Tensor | None:
        return self.cache.k

    @keys.setter
    def keys(self, none: Tensor | None) -> None:
        """Ignore the None that the base class assigns first."""

    @property
    def values(self) -> Tensor | None:
        return self.cache.v

    @values.setter
    def values(self, none: Tensor | None) -> None:
        """Ignore the None that the base class assigns first."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True
        if self.cache.rope is not None:
            # transformers rounds cosines and sines to the model's dtype
            self.cache.rope = self.cache.rope.to(self.device, self.dtype)
        pads = self.conversation.padding(key_states.shape[0])
        if pads is not None and pads.any():
            self.cache.set_pads(pads.to(self.device))

    @eager
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        key_states, value_states = autocast(key_states), autocast(value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.before = self.cache.seen
        inputs, self.inputs = self.inputs, None
        step = self.cache.append(key_states, value_states, inputs=inputs)
        if self.own_attention:
            self.reads = 0
            steps.add(self, *step)
        return step

    def attention(self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Compute the attention of the step that `update` returned, for this layer or one that shares its keys."""
        first, self.reads = self.reads == 0, self.reads + 1
        if first:
            if self.readers and isinstance(self.cache, AttendingCache):
                options["readers"] = self.readers
            out = self.cache.attention(query, key, value, **options)
        elif self.reads <= 1 + self.readers:
            out = self.cache.read(query, key, value, **options)
        else:
            raise NotImplementedError(
                f"kvops.hf: {type(module).__name__} attends to the keys of an evicting layer, expected at most "
                f"{self.readers} layers besides it (config.num_kv_shared_layers), got one more; {STOCK}"
            )
        if self.reads == 1 + self.readers:
            self.cache.release()
        return out

    def __repr__(self) -> str:
        return f"EvictingLayer({self.cache!r})"

    def get_seq_length(self) -> int:
        return self.cache.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        slots = len(self.cache) + query_length
        return Slots(slots) if self.own_attention else slots, self.cache.seen - len(self.cache)

    def reset(self) -> None:
        self.cache.reset()
        self.is_initialized, self.reads = False, 0

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
                f"KVCache.crop: expected tokens_to_remove <= 0 (-2 removes 2 tokens), got {tokens_to_remove}"
            )
        if tokens_to_remove and self.is_initialized:
            self.cache.crop(self.cache.seen + tokens_to_remove)

    def with_cache(self, cache: Cache) -> EvictingLayer:
        """Return a copy of this layer with another cache."""
        twin = EvictingLayer.__new__(EvictingLayer)
        twin.__dict__.update(self.__dict__, cache=cache)
        return twin

    def __copy__(self) -> EvictingLayer:
        """Return an independent copy. Both caches share their memory until one of them writes."""
        return self.with_cache(copy.copy(self.cache))


class KVCache(DynamicCache):
    """A cache for `past_key_values=` whose full-attention layers evict by a policy.

    A KVCache is for one batch of prompts and their further turns. For new prompts make a new one, or use
    `kvops.hf.compress`, which makes one for every call.

    Args:
        config: The model's config (`model.config`). It determines which layers are "full_attention" and whether the
            model uses the library's attention (`use_attention`). Layers of other kinds (sliding window, ...) keep the
            class that transformers gives them.
        policy: The eviction policy and its settings, such as `kvops.LagKV(lag=128)` or `kvops.KeyDiff(1024)`, or a
            string for `kvops.policy`: "keydiff:budget=1024". Each evicting layer gets its own `kvops.Cache` with it.
        rope: The rotary embedding, for policies that place tokens at the positions of their slots and for those with
            statistics="prompt"; see `kvops.Cache`. None: the model's own (`model_rope`).
        storage: How keys are stored with a rope, "pre_rope" or "post_rope"; or "int8" or "fp8", which round keys and
            values, with the library's attention. See `kvops.Cache`.
        attention_mask: int or bool [b, n], the mask of the first prompt, if its rows are left-padded. `generate` needs
            neither this nor `pads`, because it shows its mask. Nor does a forward, `model(...)`, with the library's
            attention, unless it reads a prompt in chunks whose first one is all padding in some row. If given, they
            must agree with the mask. A forward with the attention of transformers does not show its mask to a cache.
            There a padded batch without `attention_mask` or `pads` gives wrong text, because pads are scored and kept
            as tokens.
        pads: int [b], how many pads each row starts with: the same information in short form.

    Attributes:
        policy: The policy.
        conversation: Which tokens and which padding the cache has seen.
        stages: Bytes that all caches held after each stage of LAQ or KVzip; empty before `lookahead` or `repeat`, and
            for other policies.
        peak_bytes: The most bytes that the evicting layers held at any time.

    Raises:
        TypeError: `config` is not a transformers config, or `policy` is not a kvops policy or a string that names one.
        ValueError: The policy needs the library's attention and the model does not use it; it is a `kvops.RepeatPolicy`
            whose `instruction`, `next_instruction` or `suffix` is None; the padding is not on the left or differs from
            what was declared; `generate` is called with a prompt that does not continue the cached tokens; or `crop`
            needs evicted tokens. The cache stays unchanged.
        NotImplementedError: Masks cannot express what the policy keeps (see `kvops.hf`). Or, while the model runs, the
            library's attention does not understand the model: keys that change after the cache, attention that is not
            causal, masks of four dims. Or a policy that uses all KV heads meets only some of them (tensor
            parallelism).
        RuntimeError: Decode with `kvops.LAQ` before `lookahead`, or with a `kvops.RepeatPolicy` before `repeat`.
    """

    def __new__(cls, *args: Any, **options: Any) -> KVCache:
        install()  # also for a cache that was pickled in another process
        return super().__new__(cls)

    def __init__(
        self,
        config: PreTrainedConfig,
        policy: Policy | str,
        *,
        rope: Rope | None = None,
        storage: Storage = "pre_rope",
        attention_mask: Tensor | None = None,
        pads: Tensor | Sequence[int] | None = None,
    ):
        policy = check("KVCache", config, policy)
        if isinstance(policy, RepeatPolicy):
            policy.check_words()  # before the model reads the prompt
        conversation = Conversation(declared_pads(attention_mask, pads))
        own = config.get_text_config(decoder=True)._attn_implementation == ATTENTION
        if storage in STORED and not own:
            raise ValueError(
                f"KVCache: storage={storage!r} is read by the library's attention, which this model does not use, "
                "expected kvops.hf.use_attention(model) before making the cache"
            )
        if own:
            check_attention("KVCache", config)
        else:
            _check_stock_attention(policy, conversation.declared)
        super().__init__(config=config)
        self.policy, self.conversation, self._own = policy, conversation, own
        self.stages: list[Stage] = []  # filled by `lookahead` and `repeat`
        self._staged = False  # whether `generate` will run the lookahead
        self._asked = False  # whether mask sizes were requested for a mask that the library has yet to make
        self._masked = 0  # how many tokens, cached and new, the last mask covered
        self._peak = 0  # bytes
        self._token_ids: Tensor | None = None  # of the current forward; see `inputs.passing_inputs`
        config = config.get_text_config(decoder=True)
        self._kv_heads = _kv_heads(config)
        cross = getattr(config, "cross_attention_layers", None) or ()  # an image's keys, which never grow
        evicting = [i for i, x in enumerate(self.layers) if type(x) is DynamicLayer and i not in cross]
        slots = policy.positions == "slots"
        if evicting and (slots or policy.needs.statistics) and rope is None:
            rope = model_rope(config)
        for layer, i in enumerate(evicting):
            readers = _readers(config, i)
            if readers and slots:
                raise NotImplementedError(
                    f"KVCache: layers of {type(config).__name__} share keys, which cannot be rotated to the slots of "
                    f"{policy!r} for all of them; use positions='original'"
                )
            if isinstance(policy, RepeatPolicy):
                policy.check_readers(readers)
            cache = Cache(policy, layer=layer, num_layers=len(evicting), rope=rope, storage=storage)
            self.layers[i] = EvictingLayer(cache, conversation, own, readers)
        if not evicting:
            warnings.warn("KVCache: this model has no full-attention layer, so nothing is evicted", stacklevel=2)

    def __repr__(self) -> str:
        caches = [x.cache for x in self.evicting_layers]
        return (
            f"KVCache({self.policy!r}, {len(caches)} of {len(self.layers)} layers evict: "
            f"{span([x.seen for x in caches])} tokens seen, {span([x.mean_length for x in caches])} kept, "
            f"{size(sum(x.nbytes for x in caches))})"
        )

    @property
    def evicting_layers(self) -> list[EvictingLayer]:
        """The layers that evict, in model order."""
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
        if key_states.shape[-2] > 1:  # decode adds one token at a time; `peak_bytes` measures it when read
            self._peak = max(self._peak, self._held(layer, step))
        return step

    def _held(self, layer: EvictingLayer | None = None, step: tuple[Tensor, ...] = ()) -> int:
        """Return the bytes of the evicting layers, while `layer` attends to what its `update` returned."""
        others = sum(x.cache.nbytes for x in self.evicting_layers if x is not layer)
        return others + (0 if layer is None else layer.cache.nbytes_with(*step))

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the evicting layers have held at any time, including the one layer that holds a whole
        prompt while it reads it. The model's own activations (projections, logits) are not counted."""
        return max(self._peak, self._held())

    def _check_step(self, cache: Cache, tokens: int) -> None:
        """Raise for a step with another attention than the cache was made for, or before the stage of LAQ or KVzip."""
        if self._asked and self._masked != cache.seen + tokens:
            raise RuntimeError(
                "KVCache: expected the library's attention, which this cache was made for, got a model with another; "
                "set the attention (kvops.hf.use_attention, set_attn_implementation) before making the cache"
            )
        # some models of transformers before 5.23 never ask, and mask by themselves
        if not self._own and self._masked and len(cache) != cache.seen and self._masked != cache.seen + tokens:
            raise NotImplementedError(
                f"KVCache: expected the causal mask over the {len(cache)} slots that are left of {cache.seen} tokens, "
                "which transformers makes by the cache's sizes, got a forward that did not ask for them, as with a "
                "mask of four dims; pass the model a mask [batch, tokens], or none"
            )
        if cache.seen and tokens == 1 and cache.policy.needs.stage and not (self.stages or self._staged):
            stage = "lookahead" if isinstance(cache.policy, LAQ) else "repeat"
            raise RuntimeError(
                f"KVCache: kvops.{cache.policy.name} evicts in its {stage} only, expected one before decode, got a "
                "step of one token without it, which would keep the whole prompt; call kvops.hf.generate, or "
                f"kvops.hf.{stage} between prompt and decode"
            )

    def _check_heads(self, heads: int) -> None:
        """Raise if this rank has only some of the KV heads and the policy uses all of them together."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self.policy.heads_alone or not distributed or heads >= self._kv_heads:
            return
        raise NotImplementedError(
            f"KVCache: {self.policy!r} uses all KV heads of a layer together, but tensor parallelism puts some on "
            f"other ranks: expected {self._kv_heads} heads, got {heads}; use a policy that treats each head on its "
            "own, such as one with head_mode='per_head'"
        )

    def check_layers(self) -> None:
        """Raise if a forward was interrupted between two layers."""
        seen = {x.cache.seen for x in self.evicting_layers}
        if len(seen) > 1:
            raise RuntimeError(
                f"KVCache: expected all layers to have seen the same tokens, got from {min(seen)} to {max(seen)}, "
                "because a forward was interrupted; make a new KVCache"
            )

    @eager
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        self.check_layers()
        slots, offset = super().get_mask_sizes(query_length, layer_idx)
        if isinstance(slots, Slots):
            slots.cache, self._asked = self, True
        elif not self._own and isinstance(self.layers[layer_idx], EvictingLayer):
            self._masked = offset + slots
        return slots, offset

    def reset(self) -> None:
        super().reset()
        self.stages, self._staged, self._asked, self._masked, self._peak = [], False, False, 0, 0
        self.conversation.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self.conversation.map_rows(lambda ids: ids.index_select(0, beam_idx.to(ids.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.conversation.map_rows(lambda ids: ids.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.conversation.map_rows(lambda ids: ids[indices.to(ids.device)])

    def check_padding(self, pads: Tensor | None) -> None:
        """Raise if the model's attention cannot serve the policy with this padding, int32 [b] or None."""
        if not self._own:
            _check_stock_attention(self.policy, pads)

    def _see_mask(self, mask: Tensor | None, rows: int, tokens: int) -> None:
        """Check the mask of a forward with `tokens` new tokens: bool [rows, seen + tokens], or None."""
        first = self.evicting_layers[0].cache
        self._asked, self._masked = False, first.seen + tokens
        self.conversation.see(mask, rows, first.seen, tokens, first.padding)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, as transformers does with the rejected tokens of a draft.

        Args:
            tokens_to_remove: 0 or negative: -2 removes two tokens. With transformers before 5.15 a positive number is
                how many tokens to keep, as in its own caches.

        Raises:
            ValueError: The policy does not allow it, or some of the remaining tokens were evicted. The cache stays
                unchanged.
        """
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.15 counts rejected tokens in a tensor
        if _CROPS_TO_LENGTHS:
            if tokens_to_remove > 0:
                tokens_to_remove = min(0, tokens_to_remove - self.get_seq_length())
            if tokens_to_remove == 0:  # its layers would take 0 for a length
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
        self.conversation.crop(self.get_seq_length())
        for layer in self.evicting_layers:
            if layer.is_initialized and not layer.cache.seen:  # as if it were new: another batch may follow
                frozen = layer.cache.frozen
                layer.reset()
                layer.cache.frozen = frozen
        if not self.get_seq_length():
            self.stages = []

    def freeze(self) -> None:
        """Stop evicting until `reset`: the compressed prompt stays as it is, and all later tokens are kept."""
        for layer in self.layers:
            if isinstance(layer, EvictingLayer):
                layer.cache.freeze()

    def stats(self) -> list[LayerStats]:
        """Return what each layer holds and what an uncompressed cache would hold, in tokens and bytes.

        Layers without keys and values (recurrent ones) and empty layers are left out.
        """
        out = []
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, CacheLayerMixin):
                continue
            tensors = tensors_of(layer)
            if not tensors or tensors[0].numel() == 0:
                continue
            seen, held = layer.get_seq_length(), storage_bytes(*tensors)
            if isinstance(layer, EvictingLayer):
                lengths, (k, v) = layer.cache.lengths, tensors[:2]
                assert lengths is not None  # there are tensors
                per_token = lengths.numel() * (channels(k) + channels(v)) * layer.dtype.itemsize
                out.append(LayerStats(i, True, seen, int(lengths.double().mean().ceil()), seen * per_token, held))
            else:
                kept = tensors[0].shape[-2]
                per_token = sum(x.nbytes for x in tensors) // kept
                out.append(LayerStats(i, False, seen, kept, seen * per_token, held))
        return out


def tensors_of(layer: Any) -> tuple[Tensor, ...]:
    """Return the tensors in which a layer's keys and values lie; none for an empty layer, or one without."""
    if isinstance(layer, EvictingLayer):
        return layer.cache.settled_tensors()
    tensors = getattr(layer, "keys", None), getattr(layer, "values", None)
    return tuple(x for x in tensors if x is not None)


def check(who: str, config: PreTrainedConfig, policy: Policy | str) -> Policy:
    """Return the policy. Raise for a config or policy that cannot work with any batch."""
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"{who}: config must be a transformers config (model.config), got {type(config).__name__}")
    policy = as_policy(who, policy)
    if config.is_encoder_decoder:
        raise NotImplementedError(
            f"{who}: encoder-decoder models need two caches and are not supported; use a cache of transformers"
        )
    text = config.get_text_config(decoder=True)
    if why := architectures.lookup(text).cache:
        raise NotImplementedError(
            f"{who}: models of type {text.model_type!r} are not supported: {why}; use a cache of transformers"
        )
    return policy


def _kv_heads(config: PreTrainedConfig) -> int:
    """Return the fewest KV heads of any layer, over all ranks; 0 for models without attention."""
    names = [x for x in (*KV_HEADS, "num_global_key_value_heads") if getattr(config, x, None)]
    counts = [getattr(config, x) for x in names] or [getattr(config, "num_attention_heads", 0)]
    return min(min(x) if isinstance(x, (list, tuple)) else x for x in counts)


def _readers(config: PreTrainedConfig, layer: int) -> int:
    """Return how many layers without keys of their own attend to the keys of `layer` (Gemma 3n, Gemma 4).

    The last layers of a kind share the keys of the last layer of that kind before them.
    """
    shared = getattr(config, "num_kv_shared_layers", None)
    if not shared:
        return 0
    kinds, first = config.layer_types, len(config.layer_types) - shared
    return 0 if kinds[layer] in kinds[layer + 1 : first] else kinds[first:].count(kinds[layer])


def _check_stock_attention(policy: Policy, pads: Tensor | None) -> None:
    """Raise for policies that the attention of transformers and its masks cannot support. pads: int32 [b], or None."""
    padded = pads is not None and bool(pads.any())
    if isinstance(policy, QueryPolicy) or policy.needs.statistics:
        why = "uses queries, which the attention of transformers does not pass to a cache"
    elif policy.needs.inputs:
        why = "reads hidden states, which a cache with the attention of transformers does not get"
    elif policy.positions == "slots":
        why = "rotates keys and queries at their slots before the attention (unless positions='original')"
    elif policy.ragged:
        why = "keeps different numbers of slots in different heads, but the attention of transformers reads rectangles"
    elif not policy.uniform_layers:
        why = "keeps different numbers of slots in different layers, but transformers makes one attention mask for all"
    elif padded and not policy.fixed_budget:
        why = "keeps more of a longer row than of a shorter one, so each row of a padded batch needs its own mask"
    else:
        return
    raise ValueError(f"KVCache: {policy!r} {why}; call kvops.hf.use_attention(model) before making the cache")
