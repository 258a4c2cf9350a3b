"""Learned gates: small networks that predict from a token's hidden state how much its keys and values will matter.

A gate maps the hidden state that a layer's attention is called with to a score for each of its KV heads: by a linear
map, by two with a GELU between them, or by a small attention of the token to itself and to learned sinks. `fit_gates`
fits gates to the scores of a method that is too slow to run on each prompt, such as KVzip+ (`kvops.hf.gate_data`).

Sources: "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning", Jegou and Jeblick, 2026, whose files `Gates.load`
reads; the attention to sinks: "Fast KVzip: Efficient and Accurate LLM Inference with Gated KV Eviction", Kim et al.,
2026.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, rms_norm

from ..ops.checks import MAX_LAYERS, check_finite, check_int, inference_only, plain
from .precision import without_autocast
from .stored import to_file

WHO = "Gates"
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
#: Tokens that a gate scores at a time, so that what it computes in fp32 stays small beside the prompt's keys.
TOKENS = 4096
#: Of the training of two maps: passes over the tokens, tokens per step, and the highest learning rate.
EPOCHS, BATCH, RATE = 15, 512, 5e-3
#: The tensors of an attention to sinks, by their names in a published module; Qwen3's RMSNorm adds this to the square.
SINK_ATTENTION = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "q_norm.weight", "k_norm.weight", "k_base", "b")
EPSILON = 1e-6


@dataclass(frozen=True, eq=False)
class Gates:
    """The gates of all layers that evict.

    ```text
    score = W x + b                       (W, b)
    score = W2 gelu(W1 x + b1) + b2       (W1, b1, W2, b2)
    score = log(mean over the G queries of exp(own) / (exp(own) + sum over the sinks of exp(base)))
                                          (Wq, bq, Wk, q_norm, k_norm, k_base, b)
            q = q_norm * norm(Wq x + bq)       own  = k . q / sqrt(d) + b
            k = k_norm * norm(Wk x)            base = k_base . q / sqrt(d)
            norm(y) = y / sqrt(mean(y^2) + 1e-6)
    ```

    Attributes:
        layers: For each layer that evicts, in order, its weights and biases as torch.nn.Linear stores them: floating
            point [Hk, hidden] and [Hk]; or [width, hidden], [width], [Hk, width] and [Hk]; or of an attention to sinks
            [Hk * G * d, hidden], [Hk * G * d], [Hk * d, hidden], [d], [d], [Hk, 1, sinks, d] and [Hk, 1, G]. They are
            used in fp32.

    Raises:
        TypeError: `layers` is not a list of lists of tensors.
        ValueError: A layer has other tensors, shapes or values.
    """

    layers: Sequence[Sequence[Tensor]]
    _made: ClassVar[Any]  # each object's own

    def __post_init__(self) -> None:
        if not isinstance(self.layers, (list, tuple)) or not self.layers:
            raise TypeError(f"{WHO}: layers must be a list with the tensors of each layer, got {self.layers!r}")
        for i, layer in enumerate(self.layers):
            _check_layer(i, layer)
        object.__setattr__(self, "layers", tuple(tuple(x.detach() for x in layer) for layer in self.layers))
        object.__setattr__(self, "_made", {})  # the layers on their devices; no field, since it is no part of the value

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_made": {}}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Gates):
            return NotImplemented
        mine, theirs = ([x for layer in gates.layers for x in layer] for gates in (self, other))
        return self._shapes == other._shapes and all(map(torch.equal, mine, theirs))

    def __hash__(self) -> int:
        return hash(self._shapes)

    @property
    def _shapes(self) -> tuple[Any, ...]:
        return tuple((*x.shape, x.dtype, x.device) for layer in self.layers for x in layer)

    def __repr__(self) -> str:
        first = self.layers[0]
        width = "" if len(first) == 2 else f" -> {len(first[0])}"
        if len(first) == len(SINK_ATTENTION):
            width = f" -> {first[5].shape[3]} beside {first[5].shape[2]} sinks"
        return f"Gates({len(self.layers)} layers: {first[0].shape[1]}{width} -> {len(first[-1])})"

    def scores(self, hidden: Tensor, layer: int) -> Tensor:
        """Score tokens: fp32 [b, Hk, t].

        Args:
            hidden: Floating point [b, t, hidden], what the layer's attention is called with.
            layer: The layer, counted over those that evict.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: There is no gate for this layer, or it is for another hidden size.
        """
        check_int(WHO, "layer", layer, 0)
        if layer >= len(self.layers):
            raise ValueError(f"{WHO}: layer must be one of the {len(self.layers)} with a gate, got {layer}")
        inference_only(WHO, hidden=hidden)
        size = self.layers[layer][0].shape[1]
        if hidden.dim() != 3 or hidden.shape[2] != size or not hidden.is_floating_point():
            raise ValueError(
                f"{WHO}: hidden must be floating point [b, t, {size}], got {hidden.dtype} {list(hidden.shape)}"
            )
        key, made = (layer, hidden.device), self._made
        if key not in made:
            made[key] = tuple(x.to(hidden.device, torch.float32) for x in self.layers[layer])
        with without_autocast(hidden.device):
            if hidden.shape[1] == 1:  # a step of decode
                return _apply(made[key], hidden.float()).reshape(len(hidden), -1, 1)
            parts = [_apply(made[key], x.float()) for x in hidden.split(TOKENS, 1)]
        return torch.cat(parts, 1).transpose(1, 2).clone(memory_format=torch.contiguous_format)

    def threshold(self, hidden: Sequence[Tensor], keep: float) -> float:
        """The threshold of `kvops.KVzap` that this fraction of texts' scores reach, over all layers and heads.

        Args:
            hidden: Floating point [tokens, hidden] for each layer, as `kvops.hf.gate_data` returns them.
            keep: The fraction, in (0, 1]. Tokens that are always kept come on top.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: `hidden` has other layers or shapes, or `keep` lies outside (0, 1].
        """
        check_finite(WHO, "keep", keep)
        if not isinstance(hidden, (list, tuple)) or not all(isinstance(x, Tensor) for x in hidden):
            raise TypeError(f"{WHO}: hidden must be a list of torch.Tensor, one per layer, got {type(hidden).__name__}")
        if len(hidden) != len(self.layers) or any(x.dim() != 2 or not len(x) for x in hidden):
            raise ValueError(
                f"{WHO}: hidden must be [tokens, hidden] for each of the {len(self.layers)} layers, got "
                f"{[list(x.shape) for x in hidden][:8]}"
            )
        every = torch.cat([self.scores(x[None], i).flatten().cpu() for i, x in enumerate(hidden)])
        if every.isnan().any():
            raise ValueError(f"{WHO}: hidden must be finite, got NaN among the scores")
        count = round(plain(keep) * len(every))
        if not 0 < count <= len(every):
            raise ValueError(f"{WHO}: keep must be in (0, 1] and keep at least one of {len(every)} scores, got {keep}")
        return float(every.kthvalue(len(every) - count + 1).values)

    def save(self, path: str | Path) -> None:
        """Write the gates to a safetensors file. An existing file is replaced when the new one is complete."""
        tensors = {name: x.to("cpu", copy=True).contiguous() for name, x in self._named()}
        to_file(WHO, path, tensors, {"format": "pt"})

    def _named(self) -> list[tuple[str, Tensor]]:
        """The tensors by their names in a file, which are those of a torch.nn.ModuleList named layers."""
        return [
            (f"layers.{i}.{name}", x) for i, layer in enumerate(self.layers) for name, x in zip(_names(layer), layer)
        ]

    @staticmethod
    def load(path: str | Path) -> Gates:
        """Read gates from a safetensors file: one that `save` wrote, or a published KVzap model (model.safetensors).

        Fast KVzip publishes pickles, which can run code; see docs/methods/kvzap.md.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file holds something else.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        if not isinstance(path, (str, Path)):
            raise TypeError(f"{WHO}: path must be a str or a Path, got {type(path).__name__}")
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError(f"{WHO}: {path} must be a file, got a folder or a device")
        try:
            found = load_file(path)
        except FileNotFoundError:
            raise
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{WHO}: {path} must be a safetensors file: {error}") from error
        layers: dict[int, list[Tensor]] = {}
        for name in sorted(found, key=_order):
            if (place := _order(name))[0] < 0:
                raise ValueError(f"{WHO}: {path} does not hold gates: expected layers.<i>.., got tensor {name!r}")
            layers.setdefault(place[0], []).append(found[name])
        try:
            gates = Gates([layers[i] for i in sorted(layers)])
            if sorted(layers) != list(range(len(layers))) or {x for x, _ in gates._named()} != set(found):
                raise ValueError(
                    f"expected {gates._named()[-1][0]} as the last of its tensors, got {sorted(found)[:8]}"
                )
        except (TypeError, ValueError) as error:
            why = str(error).removeprefix(f"{WHO}: ")
            raise ValueError(f"{WHO}: {path} does not hold gates: {why}") from error
        return gates


def _names(layer: Sequence[Tensor]) -> tuple[str, ...]:
    """The names of a layer's tensors in its module."""
    if len(layer) == len(SINK_ATTENTION):
        return SINK_ATTENTION
    return ("weight", "bias") if len(layer) == 2 else ("0.weight", "0.bias", "2.weight", "2.bias")


def _order(name: str) -> tuple[int, int, bool]:
    """The layer, the place in it, and whether it is a bias, from a tensor's name; -1 for another name."""
    found = re.fullmatch(r"layers\.(\d{1,4})\.(?:(\d)\.)?(weight|bias)", name)
    if found:
        return int(found[1]), int(found[2] or 0), found[3] == "bias"
    found = re.fullmatch(r"layers\.(\d{1,4})\.([a-z_.]+)", name)
    if found and found[2] in SINK_ATTENTION:
        return int(found[1]), SINK_ATTENTION.index(found[2]), False
    return -1, 0, False


def _check_layer(i: int, layer: Sequence[Tensor]) -> None:
    if i >= MAX_LAYERS:
        raise ValueError(f"{WHO}: layers must be at most {MAX_LAYERS}, got more")
    if not isinstance(layer, (list, tuple)) or not all(isinstance(x, Tensor) for x in layer):
        raise TypeError(f"{WHO}: layer {i} must be a list of torch.Tensor, got {type(layer).__name__}")
    shapes = [list(x.shape) for x in layer]
    sizes = [x.shape[0] if x.dim() else 0 for x in layer]
    fits = len(layer) in (2, 4) and all(
        w.dim() == 2 and w.numel() and list(b.shape) == [len(w)] for w, b in zip(layer[::2], layer[1::2])
    )
    if len(layer) == len(SINK_ATTENTION):
        fits = layer[5].dim() == 4 and layer[6].dim() == 3 and layer[0].dim() == 2 and min(map(Tensor.numel, layer)) > 0
        heads, _, sinks, d = shapes[5] if fits else (0, 0, 0, 0)
        group, size = (shapes[6][2], shapes[0][1]) if fits else (0, 0)
        rows = heads * group * d
        fits = shapes == [[rows, size], [rows], [heads * d, size], [d], [d], [heads, 1, sinks, d], [heads, 1, group]]
    if not fits or (len(layer) == 4 and layer[2].shape[1] != sizes[0]):
        raise ValueError(
            f"{WHO}: layer {i} must have tensors [Hk, hidden] and [Hk], or [width, hidden], [width], [Hk, width] and "
            f"[Hk], or the {len(SINK_ATTENTION)} of an attention to sinks, got {shapes}"
        )
    for x in layer:
        if x.dtype not in DTYPES or x.is_meta or x.layout != torch.strided:
            got = f"{x.dtype}, {x.layout} on {x.device}"
            raise ValueError(f"{WHO}: layer {i} must be dense fp64, fp32, fp16 or bf16 with data, got {got}")
        if not x.float().isfinite().all():
            raise ValueError(f"{WHO}: layer {i} must be finite in fp32, got values that are not")


def _apply(layer: Sequence[Tensor], x: Tensor) -> Tensor:
    """fp32 [.., hidden] -> [.., Hk]."""
    if len(layer) == len(SINK_ATTENTION):
        return _attend(layer, x)
    first, *second = zip(layer[::2], layer[1::2])
    x = linear(x, *first)
    return linear(gelu(x), *second[0]) if second else x


def _attend(layer: Sequence[Tensor], x: Tensor) -> Tensor:
    """The log weight of each token beside the sinks: fp32 [.., hidden] -> [.., Hk]."""
    w_q, b_q, w_k, q_norm, k_norm, k_base, b = layer
    heads, _, _, d = k_base.shape
    q = rms_norm(linear(x, w_q, b_q).unflatten(-1, (heads, -1, d)), (d,), q_norm, EPSILON)  # [.., Hk, G, d]
    k = rms_norm(linear(x, w_k).unflatten(-1, (heads, 1, d)), (d,), k_norm, EPSILON)
    own = (q * k).sum(-1, keepdim=True) / math.sqrt(d) + b[:, 0, :, None]  # [.., Hk, G, 1]
    sinks = q @ k_base[:, 0].mT / math.sqrt(d)  # [.., Hk, G, sinks]
    weight = (own - torch.cat((own, sinks), -1).logsumexp(-1, keepdim=True)).squeeze(-1)
    return weight.logsumexp(-1) - math.log(weight.shape[-1])


def fit_gates(
    hidden: Sequence[Tensor],
    scores: Sequence[Tensor],
    *,
    width: int | None = None,
    sinks: int = 0,
    group: int = 1,
    ridge: float = 1e-3,
    seed: int = 0,
) -> Gates:
    """Fit gates to the scores of tokens, layer by layer, by the squared error.

    Linear gates solve a ridge regression, in fp64:

    ```text
    W = Y^T X (X^T X + ridge * tokens * mean variance of X's channels * I)^-1        X, Y: without their means
    ```

    Others, of two maps or an attention to sinks, are trained from random weights, by AdamW with a cosine schedule over
    15 passes.

    Args:
        hidden: Floating point [tokens, hidden] for each layer that evicts.
        scores: Floating point [tokens, Hk] for each layer, finite; KVzap's are logarithms, and so are those for sinks.
        width: The channels between two maps, or of the queries and keys of an attention to sinks, which needs them;
            None: one linear map.
        sinks: The learned sinks of each KV head, for an attention to sinks (Fast KVzip: 16, with a width of 16).
        group: The queries of each KV head in an attention to sinks (Fast KVzip: the model's query heads per KV head).
        ridge: See above; linear gates only.
        seed: Of the random weights and the order of the tokens; global random state stays as it is.

    Returns:
        The gates, fp32 on the CPU.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The layers differ in number, or a layer's tensors in tokens; a tensor has another shape or values
            that are not finite.

    Source: KVzap, Jegou and Jeblick, 2026, Sec. 3. There the ridge is 1, and gates of two maps see X unscaled. Fast
    KVzip, Kim et al., 2026, trains its gates on the scores of KVzip, by SGD.
    """
    op = "fit_gates"
    check_finite(op, "ridge", ridge, 0)
    if plain(ridge) == 0:
        raise ValueError(f"{op}: ridge must be greater than 0, got {ridge}")
    check_int(op, "seed", seed, 0)
    if width is not None:
        check_int(op, "width", width, 1)
    check_int(op, "sinks", sinks, 0)
    check_int(op, "group", group, 1)
    if (sinks and width is None) or (group > 1 and not sinks):
        raise ValueError(f"{op}: an attention to sinks needs width and sinks, got width={width}, sinks={sinks}")
    for name, tensors in (("hidden", hidden), ("scores", scores)):
        if not isinstance(tensors, (list, tuple)) or not all(isinstance(x, Tensor) for x in tensors):
            raise TypeError(f"{op}: {name} must be a list of torch.Tensor, one per layer, got {type(tensors).__name__}")
    if len(hidden) != len(scores) or not hidden:
        raise ValueError(f"{op}: hidden and scores must have the same layers, got {len(hidden)} and {len(scores)}")
    for i, (x, y) in enumerate(zip(hidden, scores)):
        if x.dim() != 2 or y.dim() != 2 or len(x) != len(y) or not x.numel() or not y.numel():
            raise ValueError(
                f"{op}: layer {i} must have hidden [tokens, hidden] and scores [tokens, Hk], got {list(x.shape)} and "
                f"{list(y.shape)}"
            )
        if not all(z.dtype in DTYPES and not z.is_meta and z.isfinite().all() for z in (x, y)):
            raise ValueError(
                f"{op}: hidden and scores of layer {i} must be finite fp64, fp32, fp16 or bf16, got {x.dtype} and "
                f"{y.dtype}"
            )
    with torch.inference_mode(False), without_autocast(hidden[0].device):
        if width is None:
            return Gates([_ridge(x.detach(), y.detach(), plain(ridge)) for x, y in zip(hidden, scores)])
        sizes = plain(width), plain(sinks), plain(group)
        pairs = enumerate(zip(hidden, scores))
        return Gates([_trained(x.detach(), y.detach(), *sizes, plain(seed) + i) for i, (x, y) in pairs])


def _ridge(x: Tensor, y: Tensor, ridge: float) -> list[Tensor]:
    """The weights and biases of a linear gate."""
    x, y = x.double(), y.double()
    x_mean, y_mean = x.mean(0), y.mean(0)
    x = x - x_mean
    gram = x.mT @ x
    gram.diagonal().add_(max(ridge * gram.diagonal().mean().item(), 1e-300))  # equal tokens have no variance
    try:
        weight = torch.linalg.solve(gram, x.mT @ (y - y_mean)).mT
    except RuntimeError as error:
        raise ValueError(f"fit_gates: ridge must be larger for {len(x)} tokens, got {ridge}: {error}") from error
    return [w.float().cpu() for w in (weight, y_mean - weight @ x_mean)]


def _trained(x: Tensor, y: Tensor, width: int, sinks: int, group: int, seed: int) -> list[Tensor]:
    """The weights and biases of a gate that is trained, on hidden states of unit variance (two maps) or square."""
    random = torch.Generator().manual_seed(seed)
    if sinks:
        return _trained_beside_sinks(x, y, width, sinks, group, random)
    (mean, std), (y_mean, y_std) = _moments(x), _moments(y)
    first, second = (_normal(random, *s) / math.sqrt(s[1]) for s in ((width, x.shape[1]), (y.shape[1], width)))
    maps = [first, first.new_zeros(len(first)), second, second.new_zeros(len(second))]
    target = ((y.double() - y_mean) / y_std).float()
    _train(maps, x, mean, std, target, random)
    w1, b1, w2, b2 = (w.detach().double() for w in maps)
    w1 = torch.where(std < torch.inf, w1 / std, 0.0)  # of hidden states as they are
    y_std = torch.where(y_std < torch.inf, y_std, 0.0)
    return [w.float().cpu() for w in (w1, b1 - w1 @ mean, w2 * y_std[:, None], b2 * y_std + y_mean)]


def _trained_beside_sinks(
    x: Tensor, y: Tensor, width: int, sinks: int, group: int, random: torch.Generator
) -> list[Tensor]:
    """The tensors of an attention to sinks. Its keys have no bias, so the hidden states keep their means."""
    (size, heads), scale = (x.shape[1], y.shape[1]), x.double().square().mean(0).sqrt()
    scale = torch.where(scale > 0, scale, torch.inf)
    rows = heads * group * width
    w_q, w_k = (_normal(random, n, size) / math.sqrt(size) for n in (rows, heads * width))
    k_base = _normal(random, heads, 1, sinks, width)  # unlike zeros, sinks that can learn to differ
    zeros, ones = k_base.new_zeros, k_base.new_ones
    maps = [w_q, zeros(rows), w_k, ones(width), ones(width), k_base, zeros(heads, 1, group)]
    _train(maps, x, torch.zeros_like(scale), scale, y.float(), random)
    maps[0], maps[2] = (torch.where(scale < torch.inf, w / scale, 0.0) for w in (maps[0].detach(), maps[2].detach()))
    return [w.detach().float().cpu() for w in maps]


def _normal(random: torch.Generator, *size: int) -> Tensor:
    return torch.randn(size, generator=random, dtype=torch.float32)


def _train(maps: list[Tensor], x: Tensor, mean: Tensor, scale: Tensor, target: Tensor, random: torch.Generator) -> None:
    """Train the tensors of a gate, in place of those in `maps`, to map (x - mean) / scale to the target."""
    maps[:] = [w.to(x.device).requires_grad_() for w in maps]
    optimizer = torch.optim.AdamW(maps, lr=RATE)
    steps = EPOCHS * -(-len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    with torch.enable_grad():
        for _ in range(EPOCHS):
            for at in torch.randperm(len(x), generator=random).split(BATCH):
                inputs = ((x[at].double() - mean) / scale).float()
                loss = (_apply(maps, inputs) - target[at]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(maps, 1.0)
                optimizer.step()
                schedule.step()


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the standard deviation of each channel, fp64; infinite for one that is constant."""
    std, mean = torch.std_mean(x.double(), 0, correction=0)
    return mean, torch.where(std > 1e-6 * mean.abs(), std, torch.inf)
