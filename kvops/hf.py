"""Hugging Face transformers: a cache that compresses itself, and an attention function, for `model.generate`. ::

    import kvops.hf

    model = kvops.hf.use_attention(model)  # for the methods that look at queries
    cache = kvops.hf.KVCache(model.config, kvops.SnapKV(1024))
    model.generate(**inputs, past_key_values=cache)

Each full-attention layer holds a `kvops` method. `update()` stores, and lets the method evict: the step's attention
still reads every key and value that was there, then only the kept ones are stored. transformers counts in two ways, and
both stay right: `get_seq_length()` is the logical length (positions, what a second turn still has to feed),
`get_mask_sizes()` says that the stored slots are the last ones before the query.

With the attention of transformers its own masks serve: all stored slots are older than the query, so causal masks are
exact; and when a row's padding is evicted first, in slot order, what is left of it lies just where the padding mask
looks. That needs every row to keep the same number of slots in every layer (`fixed_budget`, `uniform_layers`).

With the library's attention (`use_attention`) no mask is made: where transformers asks for the mask of evicting layers,
it gets an object that only the library's attention can read, once it is sure that the mask would be causal. `update()`
leaves word of its step in a thread-local, where the attention function finds the layer that the keys came from. The
layer's method knows its padding, sees the queries, and computes the attention with the scores it needs. That serves
every method. What is not understood raises: keys that no cache returned, other masks, unknown arguments.

Keys and queries come rotated at their logical positions. Methods that give tokens the positions of their slots get the
step's position_ids and the model's rotary embedding (`model_rope`), and turn both to where they want them.

The only module of kvops that imports transformers.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from .architectures import ARCHITECTURES, Architecture, name_of
from .cache import AttentionMethod, Method, SlotMethod
from .methods import LAQ
from .rope import Rope

MIN_TRANSFORMERS = "5.15.0"  # the oldest that the tests have run with; before, get_mask_sizes() and crop() differ

try:
    import transformers
    from packaging.version import Version
except ImportError:
    raise ImportError(
        f"kvops.hf needs transformers >= {MIN_TRANSFORMERS}, which is not installed: pip install -U transformers"
    ) from None
if Version(transformers.__version__) < Version(MIN_TRANSFORMERS):
    raise ImportError(
        f"kvops.hf needs transformers >= {MIN_TRANSFORMERS}, found {transformers.__version__}: "
        "pip install -U transformers"
    )

# ruff: noqa: E402  (after the check of the version)
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.models.auto.modeling_auto import MODEL_MAPPING

__all__ = ["KVCache", "LayerStats", "Stage", "generate", "lookahead", "model_rope", "use_attention"]

ATTENTION = "kvops"  # the name of the attention function in transformers

# A cache whose tensors change shape and owner in every step is no graph; torch.compile goes on around it.
_eager = torch.compiler.disable(reason="the caches of kvops.hf run outside of compiled graphs (so no fullgraph=True)")


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
    """One layer's keys and values, [b, Hk, n, d], under the rule of a `kvops` method."""

    is_croppable = False  # what was evicted cannot come back, so a rollback may fail

    def __init__(self, method: Method, pads: Tensor | None, own_attention: bool, readers: int = 0):
        super().__init__()
        self.method = method
        self.own_attention = own_attention  # the model's attention is the library's
        self.pads = pads  # int32 [b] as the user gave them, before beam search repeats the rows
        self.seen_pads: Tensor | None = None  # int32 [b] as the first step's mask has them
        self.readers = readers  # layers without keys of their own, which attend to this one's too
        self.reads = 0  # of the last step, so far

    def _mirror(self) -> None:
        """`keys` and `values` are what transformers reads; the method owns the tensors."""
        self.keys, self.values = self.method.k, self.method.v

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True
        if isinstance(self.method, SlotMethod) and self.method.rope is not None:
            # transformers rounds cosines and sines to the model's dtype
            self.method.rope = self.method.rope.to(self.device, self.dtype)
        pads = self.padding(key_states.shape[0])
        if pads is not None and pads.any():
            self.method.set_pads(pads.to(self.device))

    def padding(self, rows: int) -> Tensor | None:
        """How many pads each of the rows begins with, int32 [rows]; None where nobody has said so."""
        if self.method.seen:
            return self.method.padding
        if self.pads is None:
            return self.seen_pads
        if rows % self.pads.numel():
            raise ValueError(
                f"KVCache: pads must have one entry per row of the batch ({rows}), got {self.pads.numel()}"
            )
        # generate() repeats each prompt for its beams and return sequences, in this order
        return self.pads.repeat_interleave(rows // self.pads.numel())

    @_eager
    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        key_states, value_states = autocast(key_states), autocast(value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        step = self.method.append(key_states, value_states)
        self._mirror()
        if self.own_attention:
            self.reads = 0
            _steps.add(self, *step)
        return step

    def attention(self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **options) -> Tensor:
        """The attention of the step that `update` returned, for this layer or one that shares its keys."""
        first, self.reads = self.reads == 0, self.reads + 1
        if first:
            if self.readers and isinstance(self.method, AttentionMethod):
                options["readers"] = self.readers
            out = self.method.attention(query, key, value, **options)
        elif self.reads <= 1 + self.readers:
            out = self.method.read(query, key, value, **options)
        else:
            raise NotImplementedError(
                f"kvops.hf: {type(module).__name__} attends to the keys of an evicting layer, and is one more than the "
                f"config says (num_kv_shared_layers), expected {self.readers}; {_STOCK}"
            )
        self._mirror()
        return out

    def get_seq_length(self) -> int:
        return self.method.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        slots = len(self.method) + query_length
        return _Slots(slots) if self.own_attention else slots, self.method.seen - len(self.method)

    def reset(self) -> None:
        self.method.reset()
        self._mirror()
        self.is_initialized, self.seen_pads, self.reads = False, None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.is_initialized:
            self.method.reorder(beam_idx)
            self._mirror()

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.method.repeat_interleave(repeats)
            self._mirror()

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_initialized:
            self.method.select_rows(indices)
            self._mirror()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(
                f"KVCache.crop: tokens_to_remove must be 0 or negative (-2 removes 2 tokens), got {tokens_to_remove}"
            )
        if tokens_to_remove and self.is_initialized:
            self.method.crop(self.method.seen + tokens_to_remove)
            self._mirror()

    def with_method(self, method: Method) -> EvictingLayer:
        """Such a layer with another method."""
        twin = EvictingLayer.__new__(EvictingLayer)
        twin.__dict__.update(self.__dict__, method=method)
        twin._mirror()
        return twin

    def __copy__(self) -> EvictingLayer:
        """A layer of its own that shares the tensors (crop makes views, it never writes)."""
        return self.with_method(copy.copy(self.method))


# The library's attention in transformers.

_STOCK = (
    "use model.set_attn_implementation('sdpa') and a method that needs no queries (such as kvops.KeyDiff), or a cache "
    "of transformers"
)
# What models hand to any attention function and sdpa has no use for either. Whatever else comes may change the result.
_HARMLESS = frozenset(
    "position_ids position_embeddings cache_position token_type_ids use_cache return_dict logits_to_keep labels "
    "num_items_in_batch output_attentions output_hidden_states output_router_logits hidden_states deterministic "
    "sliding_window seq_idx cu_seqlens cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k".split()
)
_OF_SDPA = frozenset(inspect.signature(sdpa_attention_forward).parameters) - {"kwargs"}


class _Steps(threading.local):
    """What `update()` of evicting layers returned in this thread, as long as it lives."""

    def __init__(self):
        self._layers: dict[int, tuple[weakref.ref, ...]] = {}  # id of the keys: keys, values, layer
        self.unread: weakref.ref | None = None  # the last updated layer, until its attention is computed

    def add(self, layer: EvictingLayer, keys: Tensor, values: Tensor) -> None:
        layers, at = self._layers, id(keys)
        keys = weakref.ref(keys, lambda _: layers.pop(at, None))
        layers[at] = (keys, weakref.ref(values), weakref.ref(layer))
        self.unread = layers[at][2]

    def layer(self, keys: Tensor, values: Tensor) -> EvictingLayer | None:
        """The layer that returned just these."""
        step = self._layers.get(id(keys))
        return step[2]() if step and step[0]() is keys and step[1]() is values else None


_steps = _Steps()


class _Slots(int):
    """The length of keys of an evicting layer, for `_mask` to know them by."""

    cache: KVCache


class _Misuse(NotImplementedError, AttributeError):
    """AttributeError, so that `hasattr` may ask."""


class _CausalMask:
    """In the place of the mask of evicting layers: each row sees the valid slots, and the new tokens up to its own.

    Only `_attention` reads it, and only for keys that it knows. Whatever else a model does with its mask raises.
    """

    ndim = 4  # a mask that is made already, as models that hold another one tell it (PaliGemma)

    def __init__(self, model: str, rows: int, tokens: int, causal: bool):
        self.model, self.rows, self.tokens = model, rows, tokens  # as many queries, the last ones
        self.causal = causal  # False: what was asked for is not, which matters if it is used

    def _refuse(self, *args, **kwargs):
        raise _Misuse(
            f"kvops.hf: the model {self.model!r} makes something of its attention mask that is not the library's "
            f"attention, so what was evicted would not be hidden; {_STOCK}"
        )

    def __getattr__(self, name: str):
        if name.startswith("__"):  # of Python's protocols
            raise AttributeError(name)
        self._refuse()

    def __getitem__(self, index) -> _CausalMask:
        """Gemma 4 goes on with the last rows only."""
        every = slice(None)
        if isinstance(index, tuple) and len(index) == 4 and index[:2] == (every, every) and index[3] == every:
            rows = index[2]
            if isinstance(rows, slice) and rows.stop is rows.step is None and -self.tokens <= (rows.start or 0) <= 0:
                return _CausalMask(self.model, self.rows, -rows.start if rows.start else self.tokens, self.causal)
        self._refuse()

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        for x in [*args, *(kwargs or {}).values()]:
            for mask in x if isinstance(x, (tuple, list)) else (x,):
                if isinstance(mask, cls):
                    mask._refuse()
        return NotImplemented


for _name in "eq ne lt le gt ge add radd sub rsub mul rmul truediv rtruediv and rand or ror invert neg len".split():
    setattr(_CausalMask, f"__{_name}__", _CausalMask._refuse)
_CausalMask.__hash__ = object.__hash__


@_eager
def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs,
) -> Tensor | _CausalMask | None:
    """What transformers calls for a mask; layers that do not evict are served by sdpa."""
    _steps.unread = None  # a forward begins
    config = kwargs.get("config")
    if not isinstance(kv_length, _Slots):
        if getattr(config, "num_kv_shared_layers", 0):
            # such a model may go on with the last rows only, and None says nothing of which these are
            kwargs["allow_is_causal_skip"] = False
        return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **kwargs)
    causal = mask_function is causal_mask_function
    if isinstance(attention_mask, _CausalMask) and causal:
        return attention_mask
    if not causal:  # a mask of images in a prompt without any, say, is causal none the less
        kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        mask = sdpa_mask(batch_size, q_length, q_offset + q_length, q_offset, 0, mask_function, None, **kwargs)
        causal = bool((mask == torch.ones_like(mask[0, 0]).tril(q_offset)).all())
    kv_length.cache._see_padding(attention_mask, batch_size, q_length)
    return _CausalMask(getattr(config, "model_type", "unknown"), batch_size, q_length, causal)


@_eager
def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | _CausalMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """What transformers calls: query: [b, Hq, t, d], key, value: what update() returned -> [b, t, Hq, dv]."""
    who, layer = type(module).__name__, _steps.layer(key, value)
    unread, _steps.unread = _steps.unread and _steps.unread(), None
    own = isinstance(attention_mask, _CausalMask)
    if layer is None and (own or unread is not None):
        raise NotImplementedError(
            f"kvops.hf: {who} attends to keys and values that are not those that the KVCache returned (it changes them "
            f"on the way, as latent attention does), so what was evicted would not be hidden; {_STOCK}"
        )
    kwargs = {name: x for name, x in kwargs.items() if x is not None}
    known = _HARMLESS if layer or softcap is not None or s_aux is not None else _HARMLESS | _OF_SDPA
    if unknown := sorted(kwargs.keys() - known - {"is_causal"}):
        raise NotImplementedError(
            f"kvops.hf: {who} hands {', '.join(unknown)} to its attention, which the library's does not know; "
            "use model.set_attn_implementation('sdpa')"
        )
    if layer is None:
        if softcap is not None or s_aux is not None:
            if dropout:
                raise ValueError(f"kvops.hf: {who} has a softcap or sinks, expected no dropout, got {dropout}")
            causal = kwargs.get("is_causal", getattr(module, "is_causal", True))
            return _plain_attention(query, key, value, attention_mask, scaling, softcap, s_aux, causal), None
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if not own:
        got = "none" if attention_mask is None else f"one of shape {list(getattr(attention_mask, 'shape', []))}"
        raise NotImplementedError(
            f"kvops.hf: {who} brings an attention mask of its own for keys of an evicting layer, expected the causal "
            f"one that transformers asks the library for, got {got}; give the model a mask [batch, tokens], or none"
        )
    if not attention_mask.causal:
        raise NotImplementedError(
            f"kvops.hf: {who} (model {attention_mask.model!r}) asks for attention that is not causal (a prefix or an "
            "image that sees all of itself, a local window, ...), and evicting layers serve causal attention only; "
            "use a cache of transformers"
        )
    if dropout:
        raise ValueError(f"kvops.hf: the library's attention is inference-only, expected no dropout, got {dropout}")
    if (query.shape[0], query.shape[2]) != (attention_mask.rows, attention_mask.tokens):
        raise NotImplementedError(
            f"kvops.hf: {who} attends with queries that the mask was not made for, expected "
            f"[{attention_mask.rows}, any, {attention_mask.tokens}, any], got {list(query.shape)}; {_STOCK}"
        )
    sinks = None if s_aux is None else s_aux.float().contiguous()
    options = dict(scale=scaling, softcap=softcap or 0.0, sink_logits=sinks)
    if isinstance(layer.method, SlotMethod) and layer.method.rope is not None:
        options["positions"] = kwargs.get("position_ids")
        if options["positions"] is None:
            raise ValueError(
                f"kvops.hf: {who} hands no position_ids to its attention, so nothing says where keys are rotated; "
                "use positions='original'"
            )
    out = layer.attention(module, autocast(query), key, value, **options)
    return out.transpose(1, 2).contiguous(), None


def autocast(x: Tensor) -> Tensor:
    """x as sdpa gets it under torch.autocast, which keys and values may come to in two dtypes."""
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def _plain_attention(query, key, value, mask, scaling, softcap, s_aux, causal) -> Tensor:
    """Attention with a softcap or a sink in layers that do not evict, by the formula: sdpa has neither."""
    b, heads, t, _ = query.shape
    groups = key.shape[1]
    logits = (query.unflatten(1, (groups, -1)) @ key.unsqueeze(2).mT).float()  # [b, Hk, G, t, n]
    logits *= query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    if mask is None and causal:
        mask = torch.ones(t, key.shape[2], dtype=torch.bool, device=key.device).tril(key.shape[2] - t)[None, None]
    if mask is not None:
        mask = mask.unsqueeze(2)
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    if s_aux is not None:
        sink = s_aux.float().view(1, groups, -1, 1, 1).expand(b, -1, -1, t, -1)
        logits = torch.cat((logits, sink), -1)
    weights = logits.softmax(-1).nan_to_num(0.0)[..., : key.shape[2]]  # rows that see nothing: 0
    return (weights.to(value.dtype) @ value.unsqueeze(2)).reshape(b, heads, t, -1).transpose(1, 2).contiguous()


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _mask)


def use_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Makes the library's attention the model's; returns the model.

    It serves a `KVCache` of every method: those that look at queries, those that leave layers or rows with different
    lengths, left padding, second turns and chunked prefill, softcap and attention sinks. Layers that do not evict, and
    calls without a KVCache, go to sdpa. The same as `from_pretrained(..., attn_implementation="kvops")`. Make the
    KVCache afterwards.

    ValueError, and the model stays as it was: one whose attention it cannot compute (docs/architectures.md names them).
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"use_attention: model must be a transformers model, got {type(model).__name__}")
    _check_attention("use_attention", model.config)
    before = _implementations(model)
    model.set_attn_implementation(ATTENTION)
    if model.config.get_text_config(decoder=True)._attn_implementation != ATTENTION:
        _restore(before)
        raise ValueError(
            f"use_attention: {type(model).__name__} computes its attention itself, without the AttentionInterface of "
            "transformers, so the library's cannot take its place; a KVCache of a method that needs no queries (such "
            "as kvops.KeyDiff) may serve it as it is"
        )
    return model


def _implementations(model: PreTrainedModel) -> list[tuple[PreTrainedConfig, str | None]]:
    """The configs of a model and its parts, each with the attention that it names."""
    configs = [x.config for x in model.modules() if isinstance(x, PreTrainedModel)]
    for config in configs:  # grows
        configs += [x for x in (getattr(config, name, None) for name in config.sub_configs) if x is not None]
    return [(config, config._attn_implementation) for config in configs]


def _restore(before: list[tuple[PreTrainedConfig, str | None]]) -> None:
    for config, name in before:
        config._attn_implementation_internal = name  # the public one would set the parts' too


# A statement of an attention's forward that rotates all its queries and keys, whatever the layer, and is the last to
# change the keys before the cache gets them.
_ROTATES = re.compile(
    r"^        (q\w*), (k\w*) = apply_rotary_pos_emb\(\s*\1, \2, cos, sin\)$(?:\n(?! *\2 = ).*)*?\.update\(",
    re.MULTILINE,
)


def model_rope(config: PreTrainedConfig) -> Rope:
    """The rotary embedding of a model's full-attention layers, from the code that transformers has for it.

    Its rotary module has the frequencies, and `rotate_half` shows which channels are a pair. That every layer rotates
    its keys, from their first channel on, and does nothing to them afterwards, is read off the source, where most
    models say so in the same words. ValueError for the others: layers without rotation, MLA, norms after it, positions
    of several dims, code from elsewhere; and for frequencies that change with the length (dynamic, longrope).
    """
    config = config.get_text_config(decoder=True)
    unclear = (
        f"KVCache: cannot tell how the model of {type(config).__name__} rotates its keys; give the method "
        "rope=kvops.Rope(inv_freq, interleaved=...) if all layers rotate them alike, or positions='original'"
    )
    model = MODEL_MAPPING.get(type(config), None)
    if not isinstance(model, type):
        raise ValueError(unclear)
    code = sys.modules[model.__module__]
    source = inspect.getsource(code)
    rotations = re.findall(r"^ .*= *apply_\w*rotary\w*\(", source, re.MULTILINE)
    names = [x for x in re.findall(r"^class (\w*RotaryEmbedding)\(", source, re.MULTILINE) if "Vision" not in x]
    if len(names) != 1 or not 0 < len(rotations) == len(_ROTATES.findall(source)) or not hasattr(code, "rotate_half"):
        raise ValueError(unclear)
    rotary = getattr(code, names[0])(config)
    kind, prefix = rotary.rope_type, ""
    if isinstance(kind, dict):  # frequencies by the type of layer
        kind, prefix = kind.get("full_attention"), "full_attention_"
    half = tuple(code.rotate_half(torch.arange(1.0, 5.0, device="cpu")).tolist())
    interleaved = {(-3, -4, 1, 2): False, (-2, 1, -4, 3): True}.get(half)
    if None in (kind, interleaved) or hasattr(rotary, "mrope_section") or hasattr(config, "qk_rope_head_dim"):
        raise ValueError(unclear)
    if kind in ("dynamic", "longrope"):
        raise ValueError(
            f"KVCache: rotary frequencies of type {kind!r} change with the length, so slots have no fixed rotation; "
            "give the method rope=kvops.Rope(inv_freq) of one length, or positions='original'"
        )
    inv_freq, scaling = getattr(rotary, prefix + "inv_freq"), getattr(rotary, prefix + "attention_scaling")
    return Rope(inv_freq.float(), interleaved, scaling)


class KVCache(DynamicCache):
    """A cache for `past_key_values=` whose full-attention layers evict by `method`.

    Args:
        config: the model's config (`model.config`). It says which layers are "full_attention"; layers of other kinds
            (sliding window, ...) keep the class that transformers gives them; and whether the attention is the
            library's (`use_attention`).
        method: the rule and its settings, such as `kvops.LagKV(lag=128)` or `kvops.KeyDiff(1024)`. Each layer gets a
            fresh object with these settings; this one is not touched. One that gives tokens the positions of their
            slots gets the model's rotary embedding (`model_rope`), if it has no `rope` yet.
        attention_mask: int or bool [b, n], the mask of the first prompt, when its rows are padded on the left.
        pads: the same said shorter: how many pads each row starts with (b integers). With the library's attention
            neither is needed, as the model's attention mask says it (unless a prompt is read in chunks, and the first
            holds nothing of some row); if given, they have to agree with it. The attention of transformers does not
            show its mask: there a padded batch without one of the two gives wrong text, because pads are scored and
            kept as tokens.

    Raises:
        TypeError: config is no transformers config, method no kvops method.
        ValueError: a method that needs the library's attention, without it; padding that is not on the left, or not
            what was said of it; `crop` of what was evicted (the cache stays as it was).
        NotImplementedError: what masks cannot express (see the module's text), and, while the model runs, what the
            library's attention does not understand of it: keys that change after the cache, attention that is not
            causal, masks of four dims.
        RuntimeError: decode with `kvops.LAQ` before `lookahead`.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        method: Method,
        *,
        attention_mask: Tensor | None = None,
        pads: Tensor | Sequence[int] | None = None,
    ):
        _check(config, method)
        pads = _pads(attention_mask, pads)
        own = config.get_text_config(decoder=True)._attn_implementation == ATTENTION
        if own:
            _check_attention("KVCache", config)
        else:
            _check_stock_attention(method, pads is not None and bool(pads.any()))
        if isinstance(method, SlotMethod) and method.slot_positions and method.rope is None:
            method = copy.copy(method)
            method.rope = model_rope(config)
        super().__init__(config=config)
        self.method = method
        self.stages: list[Stage] = []  # filled by `lookahead`
        self._staged = False  # `generate` will see to the lookahead
        self._asked = False  # for the size of a mask, which the library has yet to make,
        self._masked = 0  # and of how many tokens, all in all, its last one was
        config = config.get_text_config(decoder=True)
        cross = getattr(config, "cross_attention_layers", None) or ()  # an image's keys, which no step adds to
        evicting = [i for i, x in enumerate(self.layers) if type(x) is DynamicLayer and i not in cross]
        for layer, i in enumerate(evicting):
            readers = _readers(config, i)
            if readers and isinstance(method, SlotMethod) and method.slot_positions:
                raise NotImplementedError(
                    f"KVCache: layers of {type(config).__name__} share keys, which cannot be turned to the slots of "
                    f"{method!r} for all of them; use positions='original'"
                )
            self.layers[i] = EvictingLayer(method.fresh(layer, len(evicting)), pads, own, readers)
        if not evicting:
            warnings.warn("KVCache: this model has no full-attention layer, so nothing is evicted", stacklevel=2)

    @property
    def evicting_layers(self) -> list[EvictingLayer]:
        return [layer for layer in self.layers if isinstance(layer, EvictingLayer)]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        layer = self.layers[layer_idx]
        method = layer.method if isinstance(layer, EvictingLayer) else None
        if method is not None and self._asked and self._masked != method.seen + key_states.shape[-2]:
            raise RuntimeError(
                "KVCache: made for the library's attention, but the model has another now; set the model's attention "
                "(kvops.hf.use_attention, set_attn_implementation) before making the cache"
            )
        decode = method is not None and method.seen and key_states.shape[-2] == 1
        if decode and isinstance(method, LAQ) and not (self.stages or self._staged):
            raise RuntimeError(
                "KVCache: kvops.LAQ evicts in its lookahead only, and a step of one token came before it, so the "
                "whole prompt would stay; call kvops.hf.generate, or kvops.hf.lookahead between prompt and decode"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @_eager
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        slots, offset = super().get_mask_sizes(query_length, layer_idx)
        if isinstance(slots, _Slots):
            slots.cache, self._asked = self, True
        return slots, offset

    def reset(self) -> None:
        super().reset()
        self.stages, self._staged, self._asked, self._masked = [], False, False, 0

    def _see_padding(self, mask: Tensor | None, rows: int, tokens: int) -> None:
        """Takes the padding from the mask of a step of `tokens` tokens, bool [rows, seen + tokens] or None, or checks
        that it is what it was."""
        layers = self.evicting_layers
        seen = layers[0].method.seen
        self._asked, self._masked = False, seen + tokens
        if seen == 0:
            for layer in layers:
                layer.seen_pads = None
        if mask is None:
            return
        if mask.shape != (rows, seen + tokens):
            raise ValueError(
                f"KVCache: attention_mask must be [batch, tokens seen and new], expected [{rows}, {seen} + {tokens}], "
                f"got {list(mask.shape)}; a cache is for one conversation, and goes on where it ended"
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
        before = [copy.copy(layer) for layer in self.layers]
        try:
            super().crop(tokens_to_remove)
        except Exception:
            self.layers = before
            raise

    def freeze(self) -> None:
        """From now on every token stays (until `reset`): a prompt that is compressed once, and a decode that grows."""
        for layer in self.layers:
            if isinstance(layer, EvictingLayer):
                layer.method.freeze()

    def stats(self) -> list[LayerStats]:
        """Tokens and bytes per layer, full and kept; layers without keys and values (recurrent ones) are left out."""
        out = []
        for i, layer in enumerate(self.layers):
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if keys is None or keys.numel() == 0:
                continue
            seen, kept = layer.get_seq_length(), keys.shape[-2]
            per_token = (keys.nbytes + values.nbytes) // kept
            evicts = isinstance(layer, EvictingLayer)
            out.append(LayerStats(i, evicts, seen, kept, seen * per_token, _storage_bytes(keys, values)))
        return out


# Generation.


def generate(
    model: PreTrainedModel,
    method: Method,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    logits_processor: Sequence[LogitsProcessor] = (),
    **kwargs,
):
    """`model.generate` with a `KVCache` of `method` and the library's attention.

    With `kvops.LAQ` it runs the stages of the paper: the prefill with its whole cache, which gives the first token; a
    draft cache of stage 1, over which `steps` lookahead tokens are decoded greedily, keeping their queries (a row that
    comes to its end stops early); the eviction of the whole cache by these queries; then the decode.

    input_ids, attention_mask: int [b, n], the prompts, padded on the left (no mask: no padding). logits_processor and
    all other arguments go to `model.generate`, and its result comes back. With `return_dict_in_generate=True` the
    cache is its `past_key_values`, whose `stages` say how many bytes all caches held after each stage of LAQ: the
    largest is the peak.

    Any number of threads may generate with one model. Its attention is the library's until the last of them is done,
    which other calls of the model must not meet halfway: if there are any, call `use_attention` before, once.

    Source: LAQ, Sec. 4.
    """
    if "past_key_values" in kwargs:
        raise ValueError("generate: expected no past_key_values (the cache is made from `method`), got one")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    processors = LogitsProcessorList(logits_processor)
    with _own_attention(model):
        cache = KVCache(model.config, method, attention_mask=attention_mask)
        if isinstance(method, LAQ):
            cache._staged = True
            processors.append(_Lookahead(model, cache, attention_mask, kwargs))
        return model.generate(
            input_ids, attention_mask=attention_mask, past_key_values=cache, logits_processor=processors, **kwargs
        )


# Models that `generate` runs: how many calls at a time, and what their attention was before.
_generating: weakref.WeakKeyDictionary[PreTrainedModel, list] = weakref.WeakKeyDictionary()
_switching = threading.Lock()


@contextmanager
def _own_attention(model: PreTrainedModel) -> Iterator[None]:
    """The library's attention for a while: until the last of the calls that run at a time."""
    with _switching:
        if model not in _generating:
            before = _implementations(model) if isinstance(model, PreTrainedModel) else []
            use_attention(model)
            _generating[model] = [0, before]
        _generating[model][0] += 1
    try:
        yield
    finally:
        with _switching:
            _generating[model][0] -= 1
            if not _generating[model][0]:
                _restore(_generating.pop(model)[1])


def lookahead(
    model: PreTrainedModel,
    cache: KVCache,
    logits: Tensor,
    *,
    attention_mask: Tensor | None = None,
    eos_token_id: int | Sequence[int] | None = None,
) -> None:
    """LAQ's stages between the prefill and the decode, for loops of one's own: `cache` is cut by a draft's queries.

    cache: a KVCache of `kvops.LAQ` that has read the prompts, with the library's attention (`use_attention`). logits:
    [b, vocab], of the prompts' last tokens; their largest are the first tokens of the draft. attention_mask: int [b,
    n], the prompts' (no mask: no padding; b may repeat its rows for beams). eos_token_id: what ends a row's draft.
    Decode goes on from the prompts' ends. `cache.stages` says how many bytes were held after each stage.
    """
    if not isinstance(cache, KVCache) or not isinstance(cache.method, LAQ):
        got = f"one of {cache.method!r}" if isinstance(cache, KVCache) else type(cache).__name__
        raise TypeError(f"lookahead: cache must be a KVCache of kvops.LAQ, got {got}")
    cache.stages = [Stage("prefill", _held(cache))]
    if not cache.evicting_layers:
        return  # of which KVCache has warned
    draft = copy.copy(cache)
    draft.layers = [
        layer.with_method(layer.method.draft()) if isinstance(layer, EvictingLayer) else copy.deepcopy(layer)
        for layer in cache.layers
    ]
    if attention_mask is None:
        attention_mask = logits.new_ones(len(logits), cache.get_seq_length(), dtype=torch.int64)
    ends = [] if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    lengths = decode_greedily(model, draft, logits, attention_mask, ends, cache.method.steps)
    cache.stages.append(Stage("lookahead", _held(cache, draft)))
    for layer, drafted in zip(cache.layers, draft.layers):
        if isinstance(layer, EvictingLayer):
            layer.method.evict(drafted.method, lengths)
            layer._mirror()
    cache.stages.append(Stage("decode", _held(cache)))


def decode_greedily(
    model: PreTrainedModel, draft: KVCache, logits: Tensor, mask: Tensor, ends: Sequence[int], steps: int
) -> Tensor:
    """The steps over the draft's cache; how many of them count in each row, int32 [b]."""
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

    def __init__(self, model: PreTrainedModel, cache: KVCache, attention_mask: Tensor, settings: dict):
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
    return _storage_bytes(*(x for x in tensors if x is not None))


def _storage_bytes(*tensors: Tensor) -> int:
    """Of the storages that the tensors lie in, each counted once."""
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def _check(config: PreTrainedConfig, method: Method) -> None:
    """Raises for what cannot work, whatever the batch."""
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"KVCache: config must be a transformers config (model.config), got {type(config).__name__}")
    if not isinstance(method, Method):
        got = f"the class {method.__name__}" if isinstance(method, type) else type(method).__name__
        raise TypeError(f"KVCache: method must be a kvops method object such as kvops.KeyDiff(1024), got {got}")
    if config.is_encoder_decoder:
        raise NotImplementedError("KVCache: encoder-decoder models need two caches and are not supported")
    text = config.get_text_config(decoder=True)
    if why := _architecture(text).cache:
        raise NotImplementedError(
            f"KVCache: models of type {text.model_type!r} are not served: {why}; use a cache of transformers"
        )
    if not method.attend_before_compress:
        raise NotImplementedError(
            "KVCache: attend_before_compress=False is not supported: transformers makes the mask of a step before the "
            "layers know what they keep of it"
        )


_warned: set[type] = set()


def _architecture(text: PreTrainedConfig) -> Architecture:
    """What is known of a text model. Warns where nothing is, once for each class."""
    known = ARCHITECTURES.get(name_of(text))
    if known is not None and type(text).__module__.startswith("transformers."):
        return known
    if type(text) not in _warned:
        _warned.add(type(text))
        warnings.warn(
            f"kvops.hf has never been tried with the model of {type(text).__name__} (type {text.model_type!r}): first "
            "compare what it writes with kvops.Full() and with a cache of transformers",
            stacklevel=4,
        )
    return Architecture()


def _check_attention(who: str, config: PreTrainedConfig) -> None:
    """Raises where the library's attention cannot take the place of the model's."""
    text = config.get_text_config(decoder=True)
    if why := _architecture(text).attention:
        raise ValueError(
            f"{who}: the attention of models of type {text.model_type!r} cannot be the library's: {why}; {_STOCK}"
        )


def _readers(config: PreTrainedConfig, layer: int) -> int:
    """How many layers without keys of their own attend to those of `layer` (Gemma 3n, Gemma 4): the last layers of its
    kind, if it is the last of that kind before them."""
    shared = getattr(config, "num_kv_shared_layers", None)
    if not shared:
        return 0
    kinds, first = config.layer_types, len(config.layer_types) - shared
    return 0 if kinds[layer] in kinds[layer + 1 : first] else kinds[first:].count(kinds[layer])


def _check_stock_attention(method: Method, padded: bool) -> None:
    """Raises for what the attention of transformers and its masks cannot serve."""
    if method.uses_queries:
        why = "looks at queries, which the attention of transformers does not hand over"
    elif isinstance(method, SlotMethod) and method.slot_positions:
        why = "rotates keys and queries at their slots (unless positions='original'), before the attention"
    elif not method.uniform_layers:
        why = "leaves the layers with different lengths, but transformers makes one attention mask for all of them"
    elif padded and not method.fixed_budget:
        why = "keeps more of a longer row than of a shorter one, so the rows of a padded batch need masks of their own"
    else:
        return
    raise ValueError(f"KVCache: {method!r} {why}; call kvops.hf.use_attention(model) before making the cache")


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
