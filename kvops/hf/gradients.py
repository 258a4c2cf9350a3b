"""How sensitive a model's last hidden states are to what each layer's attention adds: the gradients of KVgrad."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from .arguments import CACHE
from .attention import eager
from .cache import EvictingLayer, KVCache
from .weights import output_projections


def gradient_norms(
    model: PreTrainedModel, cache: KVCache, ids: Tensor, mask: Tensor, positions: Tensor, counts: Tensor
) -> list[Tensor]:
    """Return the norms of the gradients of Phi at the outputs of the evicting layers' output projections: fp32 [b, t].

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
    last, projections = _last_layer(model, len(cache.layers)), output_projections(model)
    probes: dict[int, Tensor] = {}
    returned: list[Tensor] = []
    here = threading.get_ident()  # other threads may call the model meanwhile

    @eager
    def add_probe(layer: int, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        if threading.get_ident() != here:
            return out
        probes[layer] = torch.zeros_like(out, requires_grad=True)
        return out + probes[layer]

    @eager
    def note(module: nn.Module, args: Any, out: Any) -> None:
        if threading.get_ident() == here:
            returned.append(out[0] if isinstance(out, tuple) else out)

    with contextlib.ExitStack() as hooks, torch.inference_mode(False), torch.enable_grad():
        for i in evicting:
            hooks.callback(projections[i].register_forward_hook(functools.partial(add_probe, i)).remove)
        hooks.callback(last.register_forward_hook(note).remove)
        ids, mask, positions, counts = (x.clone() for x in (ids, mask, positions, counts))  # as in `_plain`
        model(ids, attention_mask=mask, position_ids=positions, logits_to_keep=1, **{CACHE: _plain(cache)})
        phi = (returned[-1].float().square().sum(-1) * counts).sum()
        with following("kvops.hf: KVgrad", model, "kvops.KVzip without gradients"):
            found = torch.autograd.grad(phi, [probes[i] for i in evicting])
    return [x.float().norm(dim=-1).view(ids.shape) for x in found]


@contextlib.contextmanager
def following(who: str, model: nn.Module, instead: str) -> Iterator[None]:
    """Raise NotImplementedError, in the name of `who`, if autograd cannot follow the model. instead: what to use."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # a layer that works in place, or that does not pass gradients on
        raise NotImplementedError(
            f"{who} expected a model that autograd can follow, got {type(model).__name__}: {error}; use {instead}"
        ) from error


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
