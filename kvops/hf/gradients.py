"""How sensitive a model's last hidden states are to what each layer's attention adds: the gradients of KVgrad."""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from .arguments import CACHE
from .attention import eager
from .cache import EvictingLayer, KVCache


def gradient_norms(
    model: PreTrainedModel, cache: KVCache, ids: Tensor, mask: Tensor, positions: Tensor, counts: Tensor
) -> list[Tensor]:
    """Return the norms of the gradients of Phi at the outputs of the evicting layers' attention modules: fp32 [b, t].

    Phi is the sum of the squared norms of what the model's last layer returns for the tokens that count. The model
    reads the tokens after those that the cache holds, with torch's attention, and the cache stays as it is.

    Args:
        model: The model, with the library's attention.
        cache: Holds the prompts, whole.
        ids: int64 [b, t], the tokens.
        mask: int64 [b, n + t], the mask of all tokens.
        positions: int64 [b, t].
        counts: bool [b, t], which tokens count.
    """
    evicting = [i for i, x in enumerate(cache.layers) if isinstance(x, EvictingLayer)]
    attentions, last = _attention_modules(model, evicting), _last_layer(model, len(cache.layers))
    probes: dict[int, Tensor] = {}
    returned: list[Tensor] = []
    here = threading.get_ident()  # other threads may call the model meanwhile

    @eager
    def add_probe(module: nn.Module, args: Any, out: Any) -> Any:
        if threading.get_ident() != here:
            return out
        first = out[0] if isinstance(out, tuple) else out
        probes[module.layer_idx] = probe = torch.zeros_like(first, requires_grad=True)  # type: ignore[index]
        return (first + probe, *out[1:]) if isinstance(out, tuple) else first + probe

    @eager
    def note(module: nn.Module, args: Any, out: Any) -> None:
        if threading.get_ident() == here:
            returned.append(out[0] if isinstance(out, tuple) else out)

    with contextlib.ExitStack() as hooks, torch.inference_mode(False), torch.enable_grad():
        for module in attentions:
            hooks.callback(module.register_forward_hook(add_probe).remove)
        hooks.callback(last.register_forward_hook(note).remove)
        ids, mask, positions, counts = (x.clone() for x in (ids, mask, positions, counts))  # as in `_plain`
        model(ids, attention_mask=mask, position_ids=positions, logits_to_keep=1, **{CACHE: _plain(cache)})
        phi = (returned[-1].float().square().sum(-1) * counts).sum()
        try:
            found = torch.autograd.grad(phi, [probes[i] for i in evicting])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a layer that works in place, or that does not pass gradients on
            raise NotImplementedError(
                f"kvops.hf: KVgrad expected a model that autograd can follow, got {type(model).__name__}: {error}; use "
                "kvops.KVzip without gradients"
            ) from error
    return [x.float().norm(dim=-1) for x in found]


def _plain(cache: KVCache) -> KVCache:
    """Return a copy whose layers hold the same tokens and do not evict, so that autograd can follow their attention."""
    plain = copy.copy(cache)
    plain.layers = []
    for layer in cache.layers:
        if not isinstance(layer, EvictingLayer):
            plain.layers.append(copy.deepcopy(layer))
            continue
        k, v = layer.keys, layer.values
        assert k is not None and v is not None  # the cache holds the prompts
        twin = DynamicLayer()
        twin.update(k.clone(), v.clone())  # clones, because autograd cannot save tensors of an inference mode
        plain.layers.append(twin)
    return plain


def _attention_modules(model: nn.Module, layers: list[int]) -> list[nn.Module]:
    """Return the attention module of each layer, the innermost module with its `layer_idx` that takes hidden states."""
    found: dict[int, nn.Module] = {}
    for module in model.modules():  # outer modules come first
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and "hidden_states" in inspect.signature(module.forward).parameters:
            found[layer] = module
    if missing := [i for i in layers if i not in found]:
        raise NotImplementedError(
            f"kvops.hf: KVgrad expected attention modules with a layer_idx in {type(model).__name__}, found none for "
            f"layer {missing[0]}; use kvops.KVzip without gradients"
        )
    return [found[i] for i in layers]


def _last_layer(model: nn.Module, count: int) -> nn.Module:
    """Return the last layer of the model: of its list of `count` modules that hold the attention modules."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            indices = [getattr(x, "layer_idx", None) for x in module[count - 1].modules()]
            if count - 1 in indices:
                return module[count - 1]
    raise NotImplementedError(
        f"kvops.hf: KVgrad expected a list of {count} layers in {type(model).__name__}, found none; use kvops.KVzip "
        "without gradients"
    )
