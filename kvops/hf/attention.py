"""The library's attention and masks in transformers, under the name "kvops".

`kvops.hf.cache` imports this module, never the other way: the attention finds its layer in `steps`, where the layer's
`update()` has left it, and the mask finds its cache in the `Slots` that the cache has returned.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from . import architectures

if TYPE_CHECKING:
    from .cache import EvictingLayer, KVCache

ATTENTION = "kvops"  # the name of the attention function in transformers
_F = TypeVar("_F", bound=Callable[..., Any])
_Configs = list[tuple[PreTrainedConfig, str | None]]  # each with the attention that it names

STOCK = (
    "use model.set_attn_implementation('sdpa') and a policy that needs no queries (such as kvops.KeyDiff), or a cache "
    "of transformers"
)
# What models hand to any attention function and sdpa has no use for either. Whatever else comes may change the result.
# user_cache: Nemotron-H's slip of the pen, before transformers 5.12.
_HARMLESS = frozenset(
    "position_ids position_embeddings cache_position token_type_ids use_cache user_cache return_dict logits_to_keep "
    "labels num_items_in_batch output_attentions output_hidden_states output_router_logits hidden_states deterministic "
    "sliding_window seq_idx cu_seqlens cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k".split()
)
_OF_SDPA = frozenset(inspect.signature(sdpa_attention_forward).parameters) - {"kwargs"}


def eager(function: _F) -> _F:
    """Leaves a function out of compiled graphs: a cache whose tensors change shape and owner in every step is none."""
    reason = "the caches of kvops.hf run outside of compiled graphs (so no fullgraph=True)"
    return torch.compiler.disable(function, reason=reason)


class _Steps(threading.local):
    """What `update()` of evicting layers returned in this thread, as long as it lives."""

    def __init__(self) -> None:
        #: By the id of the keys: keys, values, layer.
        self._layers: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor], weakref.ref[EvictingLayer]]] = {}
        #: The last updated layer, until its attention is computed.
        self.unread: weakref.ref[EvictingLayer] | None = None

    def add(self, layer: EvictingLayer, keys: Tensor, values: Tensor) -> None:
        layers, at = self._layers, id(keys)
        forget = weakref.ref(keys, lambda _: layers.pop(at, None))
        layers[at] = forget, weakref.ref(values), weakref.ref(layer)
        self.unread = layers[at][2]

    def layer(self, keys: Tensor, values: Tensor) -> EvictingLayer | None:
        """The layer that returned just these."""
        step = self._layers.get(id(keys))
        return step[2]() if step and step[0]() is keys and step[1]() is values else None


steps = _Steps()


class Slots(int):
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

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise _Misuse(
            f"kvops.hf: the model {self.model!r} makes something of its attention mask that is not the library's "
            f"attention, so what was evicted would not be hidden; {STOCK}"
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # of Python's protocols
            raise AttributeError(name)
        self._refuse()

    def __getitem__(self, index: object) -> _CausalMask:
        """Gemma 4 goes on with the last rows only."""
        every = slice(None)
        if isinstance(index, tuple) and len(index) == 4 and index[:2] == (every, every) and index[3] == every:
            rows = index[2]
            if isinstance(rows, slice) and rows.stop is rows.step is None and -self.tokens <= (rows.start or 0) <= 0:
                return _CausalMask(self.model, self.rows, -rows.start if rows.start else self.tokens, self.causal)
        self._refuse()

    @classmethod
    def __torch_function__(
        cls, function: object, types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        for x in [*args, *(kwargs or {}).values()]:
            for mask in x if isinstance(x, (tuple, list)) else (x,):
                if isinstance(mask, cls):
                    mask._refuse()
        return NotImplemented


for _name in "eq ne lt le gt ge add radd sub rsub mul rmul truediv rtruediv and rand or ror invert neg len".split():
    setattr(_CausalMask, f"__{_name}__", _CausalMask._refuse)


@eager
def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | _CausalMask | None:
    """What transformers calls for a mask; layers that do not evict are served by sdpa."""
    steps.unread = None  # a forward begins
    config = kwargs.get("config")
    if not isinstance(kv_length, Slots):
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
        assert mask is not None  # no mask is skipped
        causal = torch.equal(mask, torch.ones_like(mask).tril(q_offset))
    kv_length.cache._see_padding(attention_mask, batch_size, q_length)
    return _CausalMask(getattr(config, "model_type", "unknown"), batch_size, q_length, causal)


@eager
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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query: [b, Hq, t, d], key, value: what update() returned -> [b, t, Hq, dv]."""
    who, layer = type(module).__name__, steps.layer(key, value)
    unread, steps.unread = steps.unread and steps.unread(), None
    own = None
    if isinstance(attention_mask, _CausalMask):
        own, attention_mask = attention_mask, None
    if layer is None and (own is not None or unread is not None):
        raise NotImplementedError(
            f"kvops.hf: {who} attends to keys and values that are not those that the KVCache returned (it changes them "
            f"on the way, as latent attention does), so what was evicted would not be hidden; {STOCK}"
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
    if own is None:
        got = "none" if attention_mask is None else f"one of shape {list(getattr(attention_mask, 'shape', []))}"
        raise NotImplementedError(
            f"kvops.hf: {who} brings an attention mask of its own for keys of an evicting layer, expected the causal "
            f"one that transformers asks the library for, got {got}; give the model a mask [batch, tokens], or none"
        )
    if not own.causal:
        raise NotImplementedError(
            f"kvops.hf: {who} (model {own.model!r}) asks for attention that is not causal (a prefix or an "
            "image that sees all of itself, a local window, ...), and evicting layers serve causal attention only; "
            "use a cache of transformers"
        )
    if dropout:
        raise ValueError(f"kvops.hf: the library's attention is inference-only, expected no dropout, got {dropout}")
    if (query.shape[0], query.shape[2]) != (own.rows, own.tokens):
        raise NotImplementedError(
            f"kvops.hf: {who} attends with queries that the mask was not made for, expected "
            f"[{own.rows}, any, {own.tokens}, any], got {list(query.shape)}; {STOCK}"
        )
    _check_continues(layer, kwargs.get("position_ids"))
    sinks = None if s_aux is None else s_aux.float().contiguous()
    options: dict[str, Any] = dict(scale=scaling, softcap=softcap or 0.0, sink_logits=sinks)
    if layer.cache.rope is not None:
        options["positions"] = kwargs.get("position_ids")
        if options["positions"] is None:
            raise ValueError(
                f"kvops.hf: {who} hands no position_ids to its attention, so nothing says where keys are rotated; "
                "use positions='original'"
            )
    out = layer.attention(module, autocast(query), key, value, **options)
    return out.transpose(1, 2).contiguous(), None


def _check_continues(layer: EvictingLayer, positions: object) -> None:
    """Raise for a chunk whose positions restart at 0 in every row, after tokens that the cache has seen.

    A cache with a rope is exempt: there, positions only say where the keys come rotated.
    """
    cache = layer.cache
    if cache.layer or not layer.before or cache.rope is not None:  # once per step
        return
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] < 2:
        return
    first = positions[:, :2]
    restarts = (first == torch.arange(2, device=first.device)).all()
    if cache.padding is not None:  # a row may have begun with padding only
        restarts &= (cache.padding < layer.before).all()
    if restarts:
        raise ValueError(
            f"KVCache: expected position_ids that continue the {layer.before} tokens that this cache has seen, got "
            "position_ids that restart at 0; for a new prompt make a new KVCache (kvops.hf.compress makes one for "
            "every call)"
        )


def autocast(x: Tensor) -> Tensor:
    """x as sdpa gets it under torch.autocast, which keys and values may come to in two dtypes."""
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
    causal: bool,
) -> Tensor:
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


_Model = TypeVar("_Model", bound=torch.nn.Module)


def unwrap(who: str, model: object) -> PreTrainedModel:
    """The transformers model in the wrappers of `torch.compile` and PEFT, which is in none of the library's imports.

    TypeError: there is none, in the name of `who`.
    """
    inner = model
    while not isinstance(inner, PreTrainedModel):
        if isinstance(compiled := getattr(inner, "_orig_mod", None), torch.nn.Module):
            inner = compiled
        elif isinstance(inner, torch.nn.Module) and hasattr(inner, "get_base_model"):
            inner = cast(Any, inner).get_base_model()
        else:
            raise TypeError(f"{who}: model must be a transformers model, got {type(model).__name__}")
    return inner


def use_attention(model: _Model) -> _Model:
    """Sets the library's attention as the model's, as `from_pretrained(..., attn_implementation="kvops")` does.

    It serves a `KVCache` of every policy: those that look at queries, those that leave layers or rows with different
    lengths, left padding, second turns and chunked prefill, softcap and attention sinks. Layers that do not evict, and
    calls without a KVCache, go to sdpa. Make the KVCache afterwards.

    Args:
        model: of transformers, which PEFT or `torch.compile` may have wrapped.

    Returns:
        The same model, in its wrapper.

    Raises:
        TypeError: model is no transformers model.
        ValueError: the library cannot compute its attention (docs/architectures.md); the model stays as it was.
    """
    inner = unwrap("use_attention", model)
    check_attention("use_attention", inner.config)
    before = _implementations(inner)
    inner.set_attn_implementation(ATTENTION)
    if inner.config.get_text_config(decoder=True)._attn_implementation != ATTENTION:
        _restore(before)
        raise ValueError(
            f"use_attention: {type(inner).__name__} computes its attention itself, without the AttentionInterface of "
            "transformers, so the library's cannot take its place; a KVCache of a policy that needs no queries (such "
            "as kvops.KeyDiff) may serve it as it is"
        )
    return model


def _implementations(model: PreTrainedModel) -> _Configs:
    """Those of a model and its parts."""
    configs = [x.config for x in model.modules() if isinstance(x, PreTrainedModel)]
    for config in configs:  # grows
        configs += [x for x in (getattr(config, name, None) for name in config.sub_configs) if x is not None]
    return [(config, config._attn_implementation) for config in configs]


def _restore(before: _Configs) -> None:
    for config, name in before:
        config._attn_implementation_internal = name  # the public one would set the parts' too


def check_attention(who: str, config: PreTrainedConfig) -> None:
    """Raises where the library's attention cannot take the place of the model's."""
    text = config.get_text_config(decoder=True)
    if why := architectures.lookup(text).attention:
        raise ValueError(
            f"{who}: the attention of models of type {text.model_type!r} cannot be the library's: {why}; {STOCK}"
        )


# Models that `compress` has: how many blocks and calls at a time, and what their attention was before.
_generating: weakref.WeakKeyDictionary[PreTrainedModel, tuple[int, _Configs]] = weakref.WeakKeyDictionary()
_switching = threading.Lock()


@contextmanager
def own_attention(model: PreTrainedModel) -> Iterator[None]:
    """The library's attention for a while: until the last of the blocks and calls that hold it at a time."""
    with _switching:
        if model not in _generating:
            before = _implementations(model)
            use_attention(model)
            _generating[model] = 0, before
        calls, before = _generating[model]
        _generating[model] = calls + 1, before
    try:
        yield
    finally:
        with _switching:
            calls, before = _generating.pop(model)
            if calls > 1:
                _generating[model] = calls - 1, before
            else:
                _restore(before)
