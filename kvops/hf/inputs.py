"""Passes what the layers of a model are called with to their caches, for policies that need it (`Needs.inputs`).

An attention function gets neither hidden states nor token ids. So forward hooks see the calls of the model and of its
attention modules, while a block or a call with such a policy is running.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from ..methods import Policy
from ..methods.view import LayerInputs
from .arguments import by_name
from .attention import eager, unwrap
from .cache import EvictingLayer, KVCache


@contextmanager
def passing_inputs(model: torch.nn.Module, policy: Policy) -> Iterator[None]:
    """Pass token ids, hidden states and modules to the KVCaches of a model's calls, if the policy needs them."""
    with ExitStack() as hooks:
        for module in unwrap("kvops.hf", model).modules() if policy.needs.inputs else ():
            parameters = inspect.signature(module.forward).parameters
            if isinstance(module, PreTrainedModel) and "input_ids" in parameters:
                hook = _note_ids
            elif isinstance(getattr(module, "layer_idx", None), int) and "hidden_states" in parameters:
                hook = _note_inputs  # of a layer, and then of the attention in it, which is called last
            else:
                continue
            handle = module.register_forward_pre_hook(eager(functools.partial(_called, hook)), with_kwargs=True)
            hooks.callback(handle.remove)
        yield


def _called(hook: Any, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    call = by_name(module.forward, args, kwargs)
    cache = next((x for x in call.values() if isinstance(x, KVCache)), None)  # modules have different names for it
    if cache is not None and cache.policy.needs.inputs:
        hook(cache, module, call)


def _note_ids(cache: KVCache, module: torch.nn.Module, call: dict[str, Any]) -> None:
    cache.token_ids = call.get("input_ids")


def _note_inputs(cache: KVCache, module: Any, call: dict[str, Any]) -> None:
    layer = cache.layers[module.layer_idx] if module.layer_idx < len(cache.layers) else None
    if isinstance(layer, EvictingLayer):
        layer.inputs = LayerInputs(call["hidden_states"], cache.token_ids, module)
