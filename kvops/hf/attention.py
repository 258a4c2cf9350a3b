"""The library's attention and masks in transformers, registered as "kvops".

`kvops.hf.cache` imports this module, never the other way round. The attention finds its layer in `steps`, where the
layer's `update()` records it. The mask finds its cache in the `Slots` that the cache returns.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NoReturn, Protocol, TypeVar, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from .._lib import NAMESPACE
from ..cache.slots import SlotCache
from . import architectures


class Layer(Protocol):
    """What the attention needs of an `EvictingLayer`."""

    cache: Any
    before: int

    @property
    def attention(self) -> Any: ...


ATTENTION = NAMESPACE  # the name of the attention function in transformers: "kvops"
_F = TypeVar("_F", bound=Callable[..., Any])
_Configs = list[tuple[PreTrainedConfig, str | None]]  # each with its attention's name

STOCK = (
    "use model.set_attn_implementation('sdpa') and a policy that does not use queries (such as kvops.KeyDiff), or a "
    "cache of transformers"
)
# Arguments that models pass to any attention function and that sdpa ignores too. Any other may change the result.
# user_cache: a typo of Nemotron-H, before transformers 5.12. tokenizer: `generate` takes it for stop strings, and hands
# it to the model too.
_HARMLESS = frozenset(
    "position_ids position_embeddings cache_position token_type_ids use_cache user_cache return_dict logits_to_keep "
    "labels num_items_in_batch output_attentions output_hidden_states output_router_logits hidden_states deterministic "
    "sliding_window seq_idx cu_seqlens cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k tokenizer".split()
)
_OF_SDPA = frozenset(inspect.signature(sdpa_attention_forward).parameters) - {"kwargs"}


def eager(function: _F) -> _F:
    """Exclude a function from compiled graphs: a cache's tensors change shape and owner in every step."""
    reason = "the caches of kvops.hf run outside of compiled graphs, so fullgraph=True is not supported"
    return torch.compiler.disable(function, reason=reason)


class _Steps(threading.local):
    """The tensors that `update()` of evicting layers returned in this thread, for as long as they are alive."""

    def __init__(self) -> None:
        #: Keys, values and layer, by the id of the keys.
        self._layers: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor], weakref.ref[Layer]]] = {}
        #: The layer updated last, until its attention is computed.
        self.unread: weakref.ref[Layer] | None = None

    def add(self, layer: Layer, keys: Tensor, values: Tensor) -> None:
        layers, at = self._layers, id(keys)
        forget = weakref.ref(keys, lambda _: layers.pop(at, None))
        layers[at] = forget, weakref.ref(values), weakref.ref(layer)
        self.unread = layers[at][2]

    def layer(self, keys: Tensor, values: Tensor) -> Layer | None:
        """Return the layer whose `update` returned exactly these tensors; None if no layer did."""
        step = self._layers.get(id(keys))
        return step[2]() if step and step[0]() is keys and step[1]() is values else None


steps = _Steps()


class Slots(int):
    """The key length of an evicting layer, by which `_mask` recognizes such layers."""

    cache: Any  # the KVCache


class _Misuse(NotImplementedError, AttributeError):
    """Also an AttributeError, so that `hasattr` works."""


class _CausalMask:
    """Stands in for the mask of evicting layers: each row sees the valid slots and the new tokens up to its own.

    Only `_attention` reads it, and only with keys that a cache returned. Anything else that a model does with it
    raises.
    """

    ndim = 4  # models such as PaliGemma recognize a finished mask by its four dims

    def __init__(self, model: str, rows: int, tokens: int, causal: bool):
        self.model, self.rows, self.tokens = model, rows, tokens  # tokens: the number of queries
        self.causal = causal  # False: the requested mask is not causal, which raises when it is used

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise _Misuse(
            f"kvops.hf: the model {self.model!r} uses its attention mask itself, not only in the library's attention, "
            f"so evicted tokens would not be hidden; {STOCK}"
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python's protocols
            raise AttributeError(name)
        self._refuse()

    def __getitem__(self, index: object) -> _CausalMask:
        """Return the mask of the last rows, which Gemma 4 takes; refuse any other index."""
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
    """Make the mask that transformers requests. For layers that do not evict it is sdpa's."""
    steps.unread = None  # a forward begins
    config = kwargs.get("config")
    if not isinstance(kv_length, Slots):
        if getattr(config, "num_kv_shared_layers", 0):
            # such a model may continue with the last rows only, and a mask of None would not tell which rows they are
            kwargs["allow_is_causal_skip"] = False
        return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **kwargs)
    causal = mask_function is causal_mask_function
    if isinstance(attention_mask, _CausalMask) and causal:
        return attention_mask
    if not causal:  # it may be causal all the same, such as an image mask for a prompt without images
        kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        mask = sdpa_mask(batch_size, q_length, q_offset + q_length, q_offset, 0, mask_function, None, **kwargs)
        assert mask is not None  # skipping is disabled
        causal = torch.equal(mask, torch.ones_like(mask).tril(q_offset))
    kv_length.cache._see_mask(attention_mask, batch_size, q_length)
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
    """Compute attention for transformers. query: [b, Hq, t, d]; key, value: as update() returned -> [b, t, Hq, dv]."""
    who, layer = type(module).__name__, steps.layer(key, value)
    unread, steps.unread = steps.unread and steps.unread(), None
    own = None
    if isinstance(attention_mask, _CausalMask):
        own, attention_mask = attention_mask, None
    if layer is None and own is not None and unread is None and module.training:
        raise NotImplementedError(
            f"kvops.hf: {who} attends without the cache that its mask was made for, as in train mode with gradient "
            "checkpointing, for which transformers switches the cache off; call model.eval()"
        )
    if layer is None and (own is not None or unread is not None):
        raise NotImplementedError(
            f"kvops.hf: {who} attends to other keys and values than the KVCache returned (it changes them after the "
            f"cache, as latent attention does), so evicted tokens would not be hidden; {STOCK}"
        )
    kwargs = {name: x for name, x in kwargs.items() if x is not None}
    known = _HARMLESS if layer or softcap is not None or s_aux is not None else _HARMLESS | _OF_SDPA
    if unknown := sorted(kwargs.keys() - known - {"is_causal"}):
        raise NotImplementedError(
            f"kvops.hf: {who} passes {', '.join(unknown)} to its attention, which the library's attention does not "
            "support; use model.set_attn_implementation('sdpa')"
        )
    if layer is None:
        if softcap is not None or s_aux is not None:
            if dropout:
                raise ValueError(
                    f"kvops.hf: {who} has a softcap or sinks, expected dropout 0, got {dropout}; call model.eval()"
                )
            causal = kwargs.get("is_causal", getattr(module, "is_causal", True))
            return _plain_attention(query, key, value, attention_mask, scaling, softcap, s_aux, causal), None
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if own is None:
        got = "none" if attention_mask is None else f"one of shape {list(getattr(attention_mask, 'shape', []))}"
        raise NotImplementedError(
            f"kvops.hf: {who} has its own attention mask for keys of an evicting layer, expected the causal mask that "
            f"transformers requests from the library, got {got}; pass the model a mask [batch, tokens], or none"
        )
    if not own.causal:
        raise NotImplementedError(
            f"kvops.hf: {who} (model {own.model!r}) needs attention that is not causal (a bidirectional prefix or "
            "image, a local window, ...), but evicting layers support causal attention only; use a cache of "
            "transformers"
        )
    if dropout:
        raise ValueError(
            f"kvops.hf: the library's attention is inference-only, expected dropout 0, got {dropout}; call model.eval()"
        )
    if (query.shape[0], query.shape[2]) != (own.rows, own.tokens):
        raise NotImplementedError(
            f"kvops.hf: {who} attends with other queries than its mask was made for, expected "
            f"[{own.rows}, heads, {own.tokens}, head_dim], got {list(query.shape)}; {STOCK}"
        )
    _check_continues(layer, kwargs.get("position_ids"))
    sinks = None if s_aux is None else s_aux.float().contiguous()
    options: dict[str, Any] = dict(scale=scaling, softcap=softcap or 0.0, sink_logits=sinks)
    if isinstance(layer.cache, SlotCache):
        options["positions"] = kwargs.get("position_ids")
        if options["positions"] is None:
            raise ValueError(
                f"kvops.hf: {who} passes no position_ids to its attention, so it is unknown where keys are rotated; "
                "use positions='original'"
            )
    out = layer.attention(module, autocast(query), key, value, **options)
    return out.transpose(1, 2).contiguous(), None


def _check_continues(layer: Layer, positions: object) -> None:
    """Raise for a chunk whose positions restart at 0 in every row although the cache has seen tokens.

    A cache that rotates keys at their slots is exempt. There the positions only tell where they come rotated.
    """
    cache = layer.cache
    if cache.layer or not layer.before or isinstance(cache, SlotCache):  # once per step
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
    """Cast x as sdpa would under torch.autocast. Keys and values may arrive in different dtypes."""
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
    """Compute attention with a softcap or sinks for layers that do not evict, in plain PyTorch: sdpa has neither."""
    n = key.shape[2]
    if mask is None and causal:
        mask = causal_mask(query.shape[2], n, key.device)
    weights = softmax_weights(attention_logits(query, key, scaling, softcap), mask, s_aux)
    return (weights.to(value.dtype) @ value.unsqueeze(2)).flatten(1, 2).transpose(1, 2).contiguous()


def causal_mask(t: int, n: int, device: torch.device) -> Tensor:
    """Return which of n keys each of the last t queries sees: bool [1, 1, t, n]."""
    return torch.ones(t, n, dtype=torch.bool, device=device).tril(n - t)[None, None]


def attention_logits(query: Tensor, key: Tensor, scaling: float | None, softcap: float | None) -> Tensor:
    """Compute the logits of attention in plain PyTorch: fp32 [b, Hk, G, t, n].

    query: [b, Hq, t, d]. key: [b, Hk, n, d].
    """
    logits = (query.unflatten(1, (key.shape[1], -1)) @ key.unsqueeze(2).mT).float()
    logits = logits * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def softmax_weights(logits: Tensor, mask: Tensor | None, s_aux: Tensor | None) -> Tensor:
    """Compute the softmax of logits, [b, Hk, G, t, n], without the weights of the sinks; 0 in rows that see nothing.

    mask: [b or 1, Hk or 1, t, n], bool, or added to the logits. s_aux: [Hq], the logits of the sinks.
    """
    *lead, t, n = logits.shape
    if mask is not None:
        mask = mask.unsqueeze(2)
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    if s_aux is not None:
        sink = s_aux.float().view(1, *lead[1:], 1, 1).expand(*lead, t, -1)
        logits = torch.cat((logits, sink), -1)
    return logits.softmax(-1).nan_to_num(0.0)[..., :n]


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _mask)


_Model = TypeVar("_Model", bound=torch.nn.Module)


def unwrap(who: str, model: object) -> PreTrainedModel:
    """Return the transformers model inside the wrappers of `torch.compile` and PEFT, without importing PEFT.

    Raises:
        TypeError: There is none. The message begins with `who`.
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
    """Switch a model to the library's attention, as `from_pretrained(..., attn_implementation="kvops")` does.

    It supports a `KVCache` with any policy: policies that use queries, and policies that keep different numbers of
    tokens per layer or row. It also supports left padding, further turns, chunked prefill, softcap and attention sinks.
    Layers that do not evict, and calls without a KVCache, go to sdpa. Make the KVCache after this call.

    Args:
        model: A model of transformers. PEFT or `torch.compile` may have wrapped it.

    Returns:
        The same model, in its wrapper.

    Raises:
        TypeError: `model` is not a transformers model.
        ValueError: The library cannot compute this model's attention (docs/architectures.md). The model stays
            unchanged.
    """
    inner = unwrap("use_attention", model)
    check_attention("use_attention", inner.config)
    before = implementations(inner)
    inner.set_attn_implementation(ATTENTION)
    if inner.config.get_text_config(decoder=True)._attn_implementation != ATTENTION:
        restore(before)
        raise ValueError(
            f"use_attention: {type(inner).__name__} computes its attention itself, without the AttentionInterface of "
            "transformers, so the library cannot replace it; a KVCache with a policy that does not use queries (such "
            "as kvops.KeyDiff) may work with the model's own attention"
        )
    return model


def implementations(model: PreTrainedModel) -> _Configs:
    """Return the configs of a model and its parts, each with its attention's name."""
    configs = [x.config for x in model.modules() if isinstance(x, PreTrainedModel)]
    for config in configs:  # grows
        configs += [x for x in (getattr(config, name, None) for name in config.sub_configs) if x is not None]
    return [(config, config._attn_implementation) for config in configs]


def restore(before: _Configs) -> None:
    for config, name in before:
        config._attn_implementation_internal = name  # the public attribute would set the parts' too


def check_attention(who: str, config: PreTrainedConfig) -> None:
    """Raise ValueError if the library's attention cannot replace the model's."""
    text = config.get_text_config(decoder=True)
    if why := architectures.lookup(text).attention:
        raise ValueError(
            f"{who}: the library's attention does not support models of type {text.model_type!r}: {why}; {STOCK}"
        )


#: Of models that are changed while blocks and calls need it: by how many, and what undoes the change.
Users = weakref.WeakKeyDictionary[PreTrainedModel, tuple[int, ExitStack]]
_generating: Users = weakref.WeakKeyDictionary()  # those switched to the library's attention
_switching = threading.Lock()


@contextmanager
def while_used(users: Users, model: PreTrainedModel, begin: Callable[[PreTrainedModel], ExitStack]) -> Iterator[None]:
    """Change a model, by `begin`, until the last of the concurrent blocks and calls ends; then undo it."""
    with _switching:
        count, undo = users.get(model) or (0, begin(model))
        users[model] = count + 1, undo
    try:
        yield
    finally:
        with _switching:
            count, undo = users.pop(model)
            if count > 1:
                users[model] = count - 1, undo
            else:
                undo.close()


def own_attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Switch a model to the library's attention until the last of the concurrent blocks and calls ends."""
    return while_used(_generating, model, _switched)


def _switched(model: PreTrainedModel) -> ExitStack:
    before, undo = implementations(model), ExitStack()
    use_attention(model)
    undo.callback(restore, before)
    return undo
