"""The weights of a model's output projections, for policies that need them.

They are read once, when the engine has loaded its model. vLLM's CPU build packs weights for its kernels and frees the
originals; then unit vectors are passed through the projection. An attention layer does not know the module that it
belongs to. PyTorch's hook for new submodules tells it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.models.utils import extract_layer_index

from ..linear import linear_weights, random_vectors, stored_weights
from .plan import Plan

_owners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


@cache
def watch() -> None:
    """From now on, note to which module each of vLLM's attention layers belongs."""
    register_module_module_registration_hook(_note)


def _note(owner: nn.Module, name: str, layer: nn.Module | None) -> None:
    if layer is not None and hasattr(layer, "impl"):
        _owners[layer] = weakref.ref(owner)


def with_weights(plan: Plan, layers: Iterable[Any], num_layers: int, dtype: torch.dtype) -> Plan:
    """Return the plan, its policy with the weights of these attention layers if it needs them.

    With tensor parallelism they are those of this worker's heads. dtype: of the model.
    """
    policy = plan.policy
    if "w_o" not in policy.needs.model:
        return plan
    w_o = [torch.empty(0, 0)] * num_layers  # of layers that do not evict
    for layer in layers:
        w_o[extract_layer_index(layer.layer_name)] = _output_weights(policy.name, layer, dtype)
    own = replace(policy, w_o=w_o)  # type: ignore[type-var]  # a dataclass with this setting
    return replace(plan, schedule=replace(plan.schedule, policy=own))


@torch.no_grad()
def _output_weights(who: str, layer: Any, dtype: torch.dtype) -> Tensor:
    """Return what the projection behind an attention layer computes, [hidden, Hq * dv]."""
    owner = _owners[layer]() if layer in _owners else None  # transformers' models keep their layers in a dict
    width = layer.num_heads * layer.head_size_v
    children = () if owner is None else owner.children()
    rows = [x for x in children if isinstance(x, RowParallelLinear) and x.input_size_per_partition == width]
    if len(rows) != 1:
        raise NotImplementedError(
            f"{who}: expected one RowParallelLinear of {width} inputs, the output projection, beside "
            f"{layer.layer_name} in {type(owner).__name__}, got {len(rows)}; use another policy, such as SnapKV"
        )
    (projection,) = rows

    def products(x: Tensor) -> Tensor:
        out: Tensor = projection.quant_method.apply(projection, x.squeeze(0))  # without bias, and of this worker alone
        return out[None]

    device = next((x.device for x in projection.parameters()), torch.device("cpu"))
    some = random_vectors(width, dtype, device)
    try:
        found = products(some)
        own = stored_weights(getattr(projection, "weight", None), None, some, found)
        return linear_weights(products, some, found) if own is None else own
    except ValueError as error:
        raise NotImplementedError(
            f"{who}: expected a linear output projection behind {layer.layer_name}, got {error}; use another "
            "policy, such as SnapKV"
        ) from error
