"""Passes what the layers of a model are called with to their caches, for policies that need it (`Needs.inputs`).

An attention function gets neither hidden states nor token ids. So forward hooks see the calls of the model and of its
attention modules, while a block or a call with such a policy is running.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from ..methods import Policy
from ..methods.view import LayerInputs
from .arguments import by_name
from .attention import Users, eager, unwrap, while_used
from .cache import EvictingLayer, KVCache

_watched: Users = weakref.WeakKeyDictionary()  # the models with hooks


def passing_inputs(model: torch.nn.Module, policy: Policy) -> AbstractContextManager[None]:
    """Pass token ids, hidden states and modules to the KVCaches of a model's calls, if the policy needs them."""
    return while_used(_watched, unwrap("kvops.hf", model), _hooks) if policy.needs.inputs else nullcontext()


def _hooks(model: PreTrainedModel) -> ExitStack:
    hooks = ExitStack()
    for module in model.modules():
        parameters = inspect.signature(module.forward).parameters
        if isinstance(module, PreTrainedModel) and "input_ids" in parameters:
            note = _note_ids
        elif isinstance(getattr(module, "layer_idx", None), int) and "hidden_states" in parameters:
            note = _note_inputs  # of a layer, and then of the attention in it, which is called last
        else:
            continue
        before, after = (eager(functools.partial(_watch, note, entering)) for entering in (True, False))
        hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        hooks.callback(module.register_forward_hook(after, with_kwargs=True, always_call=True).remove)
    return hooks


def _watch(note: Any, entering: bool, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *out: Any) -> None:
    """Note what a call passes as it begins, and forget it as it ends, also by an exception before a layer took it."""
    call = by_name(module.forward, args, kwargs)
    cache = next((x for x in call.values() if isinstance(x, KVCache)), None)  # modules have different names for it
    if cache is not None and cache.policy.needs.inputs:
        note(cache, module, call if entering else None)


def _note_ids(cache: KVCache, module: Any, call: dict[str, Any] | None) -> None:
    ids = None if call is None else call.get("input_ids")
    if call is None or ids is not None:  # an inner model may get their embeddings
        cache._token_ids = ids


def _note_inputs(cache: KVCache, module: Any, call: dict[str, Any] | None) -> None:
    layer = cache.layers[module.layer_idx] if module.layer_idx < len(cache.layers) else None
    if isinstance(layer, EvictingLayer):
        layer.inputs = None if call is None else LayerInputs(call["hidden_states"], cache._token_ids, module)
