"""The weights of a model that policies need."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..methods import Full
from .cache import EvictingLayer, KVCache

PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj", "wo")  # what models call the output projection


def output_weights(model: PreTrainedModel) -> tuple[Tensor, ...]:
    """Return the weights of the output projection of each layer that evicts, for `kvops.CriticalKV`.

    Args:
        model: A causal language model of transformers. Its attention modules have a `layer_idx`, and a linear layer
            named o_proj, out_proj, dense, c_proj or wo.

    Returns:
        [hidden, Hq * dv] for each evicting layer (`KVCache.evicting_layers`), first layer first. They share the model's
        memory, unless the model stores them transposed (GPT-2). With tensor parallelism they are those of this rank's
        heads.

    Raises:
        ValueError: A layer has no such projection, or it is quantized.
    """
    found: dict[int, Tensor] = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        projection = next((x for name in PROJECTIONS if (x := getattr(module, name, None)) is not None), None)
        if isinstance(layer, int) and isinstance(projection, nn.Module) and layer not in found:
            found[layer] = _weight(projection, layer)
    layers = KVCache(model.config, Full()).layers
    evicting = [i for i, x in enumerate(layers) if isinstance(x, EvictingLayer)]
    if missing := [i for i in evicting if i not in found]:
        raise ValueError(
            f"output_weights: expected an attention module with layer_idx={missing[0]} and a linear layer named "
            f"{', '.join(PROJECTIONS)} in {type(model).__name__}, found none; pass the weights to the policy yourself"
        )
    return tuple(found[i] for i in evicting)


def _weight(projection: nn.Module, layer: int) -> Tensor:
    weight = getattr(projection, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point() or weight.itemsize < 2:
        got = f"{weight.dtype} {list(weight.shape)}" if isinstance(weight, Tensor) else "none"
        raise ValueError(
            f"output_weights: expected weights of two dims in torch.float32, float16 or bfloat16 in the output "
            f"projection of layer {layer}, a {type(projection).__name__}, got {got}"
        )
    weight = weight.detach()
    if hasattr(weight, "to_local"):  # tensor parallelism: this rank's heads
        weight = weight.to_local()
    return weight.mT.contiguous() if isinstance(projection, Conv1D) else weight
