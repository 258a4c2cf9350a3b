"""The output projection W_O, for methods that weight attention by how far a token's value reaches: ||W_O v||."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops import quadratic_scores, value_norm
from .precision import without_autocast
from .view import View

#: [hidden, Hq * dv], as torch.nn.Linear stores it, or a list of them, one for each layer that evicts.
Projection = Tensor | Sequence[Tensor]


def check_projection(op: str, w_o: Projection | None) -> None:
    """Check the weights that a policy was made with."""
    for x in w_o if isinstance(w_o, tuple) else () if w_o is None else (w_o,):
        if not isinstance(x, Tensor):
            raise TypeError(f"{op}: w_o must be a torch.Tensor or a list of them, got {type(x).__name__}")
        if x.dim() != 2:
            raise ValueError(f"{op}: w_o must be [hidden, Hq * dv], got shape {list(x.shape)}")


def check_layers(op: str, w_o: Projection | None, num_layers: int) -> None:
    """Check that there are weights for the layers of a cache."""
    if w_o is None:
        raise ValueError(f"{op}: {_MISSING}")
    if isinstance(w_o, tuple) and len(w_o) != num_layers:
        raise ValueError(
            f"{op}: w_o must have the weights of each layer that evicts, expected {num_layers}, got {len(w_o)}"
        )


def projected_norms(op: str, w_o: Projection | None, view: View) -> Tensor:
    """The mean over a group's query heads h of ||W_O^h v_j||_1 in the view's layer: fp32 [b, Hk, n].

    The weights are converted to the dtype that v is computed in.
    """
    weights = _of_layer(op, w_o, view.layer)
    dtype = torch.bfloat16 if view.v.element_size() == 1 else view.v.dtype
    return value_norm(view.v, weights.to(view.v.device, dtype), **view.slots)


def output_norms(op: str, w_o: Projection | None, v: Tensor, layer: int | None, heads: int) -> Tensor:
    """||W_O^h v_j||_2 for each of the query heads h: fp32 [b, heads, n]. v: [b, Hk, n, dv].

    It is the square root of v_j^T (W_O^h^T W_O^h) v_j, so the hidden channels are summed once, and not per token.
    """
    weights = _of_layer(op, w_o, layer).to(v.device, torch.float32)
    dv = v.shape[3]
    if weights.shape[1] != heads * dv:
        raise ValueError(f"{op}: w_o must be [hidden, {heads} query heads * {dv}], got {list(weights.shape)}")
    by_head = weights.unflatten(1, (-1, dv)).transpose(0, 1)  # [Hq, hidden, dv]
    with without_autocast(v.device):
        gram = by_head.mT @ by_head
    return quadratic_scores(v, gram.new_zeros(gram.shape[:2]), cov=gram, scale=2**0.5).clamp(min=0.0).sqrt()


def _of_layer(op: str, w_o: Projection | None, layer: int | None) -> Tensor:
    """The weights of one layer."""
    if isinstance(w_o, tuple):
        if layer is None:
            raise TypeError(f"{op}: w_o is a list, so layer must be an int, got None; pass it to compress")
        if not 0 <= layer < len(w_o):
            raise ValueError(f"{op}: layer must name one of the {len(w_o)} weights of w_o, got layer {layer}")
        w_o = w_o[layer]
    if w_o is None:
        raise ValueError(f"{op}: {_MISSING}")
    assert isinstance(w_o, Tensor)
    return w_o.detach()


_MISSING = (
    "w_o must be the weights of the output projection, [hidden, Hq * dv] or a list of them by layer, got None; pass "
    "w_o=kvops.hf.output_weights(model), or use kvops.hf.for_model(policy, model)"
)
