"""What the output projections of a model compute, which policies need as weights."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..linear import is_float, linear_weights, random_vectors, same, stored_weights
from ..methods import Full
from .cache import EvictingLayer, KVCache

PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj", "wo", "Wo")  # what models call the output projection


def output_weights(model: PreTrainedModel) -> tuple[Tensor, ...]:
    """Return the weights of the output projection of each layer that evicts, for policies with `w_o`.

    The weights are those that the projection applies at the time of the call. Where random vectors show that its
    `weight` is all that it applies, bit for bit, this is returned. Otherwise, as with adapters (LoRA), offloaded or
    quantized weights, unit vectors are passed through the module, in chunks, and their products are the weights. They
    are remembered with the module, and used again as long as its products of the random vectors stay the same. Forward
    hooks of the module run with each call.

    Args:
        model: A causal language model of transformers. Its attention modules have a `layer_idx`, and a linear layer
            named o_proj, out_proj, dense, c_proj, wo or Wo. Dropout in the projection, such as that of an adapter in
            training, is switched off during the call. With tensor parallelism all ranks call this together.

    Returns:
        [hidden, Hq * dv] for each evicting layer (`KVCache.evicting_layers`), first layer first, in the dtype of the
        module's products and on its device (the CPU if its weights are offloaded). Weights that are returned as they
        are share the model's memory. With tensor parallelism they are those of this rank's heads.

    Raises:
        ValueError: A layer has no such projection, or several. Or the projection is not linear: the products of random
            vectors and of the weights differ by more than 5 % of their norm.
    """
    found = output_projections(model)
    dtype = next((x.dtype for x in model.parameters() if is_float(x)), torch.float32)
    with torch.inference_mode(False), torch.no_grad():
        config = model.config.get_text_config(decoder=True)
        return tuple(_weights(found[i], i, config, dtype) for i in found)


def output_projections(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Return the output projections of the layers that evict. Raises ValueError if a layer has none, or several."""
    layers, projections = KVCache(model.config, Full()).layers, _projections(model)
    found: dict[int, nn.Module] = {}
    for i in (i for i, x in enumerate(layers) if isinstance(x, EvictingLayer)):
        if len(projections.get(i, ())) != 1:
            got = "several" if i in projections else "none"
            raise ValueError(
                f"output_weights: expected one attention module with layer_idx={i} and a linear layer named "
                f"{', '.join(PROJECTIONS)} in {type(model).__name__}, found {got}; pass the weights to the policy "
                "yourself"
            )
        [found[i]] = projections[i]
    return found


def _projections(model: nn.Module) -> dict[int, list[nn.Module]]:
    """Return the output projections by layer."""
    found: dict[int, dict[nn.Module, None]] = {}
    for module in model.modules():
        attention, owner = module, module
        if (inner := getattr(module, "self", None)) is not None:  # BERT's: the attention, and what follows it
            attention, owner = inner, getattr(module, "output", module)
        layer = getattr(attention, "layer_idx", None)
        projection = next((x for name in PROJECTIONS if (x := getattr(owner, name, None)) is not None), None)
        if isinstance(layer, int) and isinstance(projection, nn.Module):
            found.setdefault(layer, {})[projection] = None
    return {layer: list(each) for layer, each in found.items()}


# What each projection returned for the random vectors, and its weights.
_known: weakref.WeakKeyDictionary[nn.Module, tuple[Tensor, Tensor]] = weakref.WeakKeyDictionary()


def _weights(projection: nn.Module, layer: int, config: PreTrainedConfig, dtype: torch.dtype) -> Tensor:
    """Return the weights of one projection. dtype: of its inputs, unless it has a `weight` of another."""
    weight, bias = getattr(projection, "weight", None), getattr(projection, "bias", None)
    if is_float(weight):
        dtype = weight.dtype
    there = (x.device for x in itertools.chain(projection.parameters(), projection.buffers()) if not x.is_meta)
    device = next(there, torch.device("cpu"))
    products = _products(projection, weight, device)
    weight, bias = (cast(Any, x).to_local() if hasattr(x, "to_local") else x for x in (weight, bias))
    training = [x for x in projection.modules() if x.training]
    try:
        for x in training:
            x.training = False
        random, some = _some(products, _widths(projection, weight, config), dtype, device)
        if (own := stored_weights(weight, bias, random, some)) is not None:
            return own
        if (known := _known.get(projection)) is None or not same(known[0], some):
            known = _known[projection] = some, linear_weights(products, random, some)
        return known[1]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the module raises
        raise ValueError(
            f"output_weights: expected a linear output projection of {dtype} inputs in layer {layer}, got a "
            f"{type(projection).__name__}: {error}; pass the weights to the policy yourself"
        ) from error
    finally:
        for x in training:
            x.training = True


def _products(projection: nn.Module, weight: object, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function that passes vectors, [1, any, width], through the projection.

    With tensor parallelism, a projection adds up the products of all ranks, so they take turns.
    """
    # on the weight, or before transformers 5.23 on the module
    mesh: Any = getattr(weight, "device_mesh", None) or getattr(projection, "_hf_device_mesh", None)
    turns, own = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())

    def products(x: Tensor) -> Tensor:
        each = [projection(x if turn == own else torch.zeros_like(x)) for turn in range(turns)]
        found: Tensor = each[own].to(device)
        return found

    return products


def _widths(projection: nn.Module, weight: object, config: PreTrainedConfig) -> list[int]:
    """Return the widths that the projection's inputs may have. transformers' Conv1D has transposed weights."""
    if isinstance(weight, Tensor) and weight.is_floating_point() and weight.dim() == 2:
        return list(dict.fromkeys(weight.shape[::-1]))
    if isinstance(width := getattr(projection, "in_features", None), int):
        return [width]
    heads = config.num_attention_heads
    return [heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)]


def _some(
    products: Callable[[Tensor], Tensor], widths: list[int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return random vectors of the first width that the projection takes, and their products."""
    for i, width in enumerate(widths):
        x = random_vectors(width, dtype, device)
        try:
            return x, products(x)
        except Exception:
            if i + 1 == len(widths):
                raise
    raise AssertionError  # there is a width
