"""Statistics of a model's queries before RoPE: what Expected Attention and TriAttention know of future queries."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..ops import rope_at_slots
from ..ops.checks import MAX_LAYERS, check_bool, check_finite, check_int, check_layers, plain
from ..ops.rope import Rope
from .base import KeyPolicy, Needs
from .stored import from_file, to_file
from .view import OfLayer, View

FORMAT = "kvops query statistics 1"
PER_LAYER = ("mean", "cov", "norms")
LARGEST = 1e9  # of a query's channel: with its square, sums over keys of any dtype are finite in fp32
FARTHEST = 1 << 40  # offset of a future position: fp64 angles are exact to 2^-13 there


@dataclass(frozen=True, eq=False)
class QueryStatistics:
    """Means, covariances and norms of the queries of each layer, before RoPE.

    Channels that RoPE does not rotate are part of `mean` and `cov`, but not of `norms`. `kvops.hf.query_statistics`
    gathers them from a model; `QueryStatistics.of` from queries at hand.

    Attributes:
        mean: fp32 [Hq, d] per layer that evicts, in the order of the layers.
        cov: fp32 [Hq, d, d] per layer.
        norms: fp32 [Hq, pairs] per layer, the mean norm of the two channels that RoPE rotates together.
        rope: The model's rotary embedding.
        scale: The factor of the model's logits; None is 1 / sqrt(d).
    """

    mean: Sequence[Tensor]
    cov: Sequence[Tensor]
    norms: Sequence[Tensor]
    rope: Rope
    scale: float | None = None
    _made: ClassVar[Any]  # each object's own

    def __post_init__(self) -> None:
        who = "QueryStatistics"
        object.__setattr__(self, "_made", {})  # the layers on their devices; no field, since it is no part of the value
        for name in PER_LAYER:
            tensors = getattr(self, name)
            if not isinstance(tensors, (list, tuple)) or not all(isinstance(x, Tensor) for x in tensors):
                raise TypeError(f"{who}: {name} must be a list of torch.Tensor, one per layer, got {_kind(tensors)}")
            object.__setattr__(self, name, tuple(tensors))
        if not len(self.mean) == len(self.cov) == len(self.norms) >= 1:
            raise ValueError(
                f"{who}: mean, cov and norms must have one tensor per layer, got "
                f"{len(self.mean)}, {len(self.cov)} and {len(self.norms)}"
            )
        _check_rope(self.rope)
        if self.scale is not None:
            check_finite(who, "scale", self.scale)
            if plain(self.scale) <= 0:
                raise ValueError(f"{who}: scale must be positive, got {self.scale}")
        pairs = len(self.rope.inv_freq)
        for i, (mean, cov, norms) in enumerate(zip(self.mean, self.cov, self.norms)):
            heads, d = mean.shape if mean.dim() == 2 else (0, 0)
            if not heads or not d or 2 * pairs > d or cov.shape != (heads, d, d) or norms.shape != (heads, pairs):
                raise ValueError(
                    f"{who}: layer {i} must have mean [Hq, d], cov [Hq, d, d] and norms [Hq, {pairs}], got "
                    f"{list(mean.shape)}, {list(cov.shape)} and {list(norms.shape)}"
                )
            for name, x, most in (("mean", mean, LARGEST), ("cov", cov, LARGEST**2), ("norms", norms, LARGEST)):
                if x.dtype != torch.float32 or x.layout != torch.strided or x.is_meta:
                    got = f"{x.dtype}, {x.layout} on {x.device}"
                    raise ValueError(
                        f"{who}: {name} of layer {i} must be torch.float32, dense and with data, got {got}"
                    )
                if not (x.abs() <= most).all():  # NaN is not
                    got = f"{float(x.abs().max()):g}" if x.isfinite().all() else "values that are not finite"
                    raise ValueError(f"{who}: {name} of layer {i} must be at most {most:g} in magnitude, got {got}")
            variance, rounding = cov.diagonal(dim1=1, dim2=2), 1e-4 * cov.abs().amax()
            if (norms < 0).any() or (variance < -rounding - 1e-6 * mean.square()).any():
                name, least = ("norms", norms.min()) if (norms < 0).any() else ("variances in cov", variance.min())
                raise ValueError(f"{who}: {name} of layer {i} must be at least 0, got {float(least):g}")
            if ((cov - cov.mT).abs() > rounding).any():
                raise ValueError(
                    f"{who}: cov of layer {i} must be symmetric, got differences above {float(rounding):g}"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_made": {}}

    @staticmethod
    def of(queries: Tensor | Sequence[Tensor], rope: Rope, *, scale: float | None = None) -> QueryStatistics:
        """Compute the statistics of given queries.

        Args:
            queries: [b, Hq, w, d] before RoPE, of one layer or a list of layers. All rows and tokens count alike.
            rope: The model's rotary embedding.
            scale: See the class.
        """
        _check_rope(rope)
        layers = []
        for q in check_layers("QueryStatistics", queries=queries)[0]:
            layers.append(Sums(rope))
            layers[-1].add(q)
        return of_sums(layers, rope, scale)

    def layer(self, who: str, layer: int | None, num_layers: int | None, device: torch.device) -> OfLayer:
        """The statistics of one layer on a device.

        Raises:
            ValueError: The layer is not given and there are several, or the model has another number of layers.
        """
        count = len(self.mean)
        for name, value in (("layer", layer), ("num_layers", num_layers)):
            if value is not None:
                check_int(who, name, value, 0)
        if layer is None and count > 1:
            raise ValueError(f"{who}: statistics cover {count} layers, pass layer and num_layers to compress")
        if num_layers is not None and num_layers != count:
            raise ValueError(
                f"{who}: statistics must cover the {num_layers} layers that evict, got {count}; gather them from the "
                "same model with kvops.hf.query_statistics"
            )
        i = layer or 0
        if i >= count:
            raise ValueError(f"{who}: statistics must cover layer {i}, got those of {count} layers")
        if (i, device) not in self._made:
            mean, cov, norms = (x[i].to(device) for x in (self.mean, self.cov, self.norms))
            self._made[i, device] = OfLayer(mean, cov, norms, self.rope, self.scale)
        return self._made[i, device]

    def save(self, path: str | Path) -> None:
        """Write the statistics to a safetensors file. An existing file is replaced when the new one is complete."""
        tensors = {"inv_freq": self.rope.inv_freq.float().contiguous().cpu()}
        for name in PER_LAYER:
            tensors |= {f"{name}.{i}": x.detach().contiguous().cpu() for i, x in enumerate(getattr(self, name))}
        more = dict(
            layers=len(self.mean), interleaved=self.rope.interleaved, scaling=self.rope.scaling, scale=self.scale
        )
        tensors = {name: x.clone() for name, x in tensors.items()}  # safetensors takes no shared memory
        to_file("QueryStatistics.save", path, tensors, {"format": FORMAT, "settings": json.dumps(more)})

    @staticmethod
    def load(path: str | Path) -> QueryStatistics:
        """Read statistics from a file that `save` wrote.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file holds something else. The message names the file, and the field that is wrong.
        """
        from safetensors import SafetensorError, safe_open

        if not isinstance(path, (str, Path)):
            raise TypeError(f"QueryStatistics: path must be a str or a Path, got {type(path).__name__}")
        if not os.path.exists(path):
            raise FileNotFoundError(f"QueryStatistics: there is no file {path}")
        if not os.path.isfile(path):
            raise ValueError(f"QueryStatistics: {path} must be a file, got a folder or a device")
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise ValueError("expected a file that QueryStatistics.save wrote")
                more = _settings(metadata.get("settings", ""))
                names = {"inv_freq", *(f"{name}.{i}" for name in PER_LAYER for i in range(more["layers"]))}
                if wrong := names ^ set(file.keys()):
                    what = "has no" if min(wrong) in names else "must not have"
                    raise ValueError(f"the file {what} tensor {min(wrong)}")
                read = {name: file.get_tensor(name) for name in sorted(names)}
            rope = Rope(read["inv_freq"], more["interleaved"], more["scaling"])
            mean, cov, norms = ([read[f"{name}.{i}"] for i in range(more["layers"])] for name in PER_LAYER)
            return QueryStatistics(mean, cov, norms, rope, more["scale"])
        except SafetensorError as error:
            raise ValueError(f"QueryStatistics: {path} must be a safetensors file, got {error}") from error
        except (OSError, TypeError, ValueError) as error:
            why = str(error).removeprefix("QueryStatistics: ")
            raise ValueError(f"QueryStatistics: {path} does not hold statistics: {why}") from error


def _settings(text: str) -> dict[str, Any]:
    """The settings in a file's metadata, whose types and ranges `QueryStatistics` checks further."""
    try:
        more = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("settings must be JSON that QueryStatistics.save wrote") from error
    expected = {"layers", "interleaved", "scaling", "scale"}
    if not isinstance(more, dict) or set(more) != expected:
        got = ", ".join(sorted(more)) if isinstance(more, dict) else type(more).__name__
        raise ValueError(f"settings must have {', '.join(sorted(expected))}, got {got[:200]}")
    check_int("QueryStatistics", "layers", more["layers"], 1, MAX_LAYERS)
    return more


def _check_rope(rope: Rope) -> None:
    """Checks the rotary embedding of query statistics."""
    who = "QueryStatistics"
    if not isinstance(rope, Rope):
        raise TypeError(f"{who}: rope must be a kvops.Rope, got {type(rope).__name__}")
    frequencies = rope.inv_freq
    if not isinstance(frequencies, Tensor):
        raise TypeError(f"{who}: inv_freq must be a torch.Tensor, got {type(frequencies).__name__}")
    if frequencies.dim() != 1 or not frequencies.is_floating_point() or frequencies.is_meta:
        got = f"{frequencies.dtype} {list(frequencies.shape)} on {frequencies.device}"
        raise ValueError(f"{who}: inv_freq must be torch.float32 [pairs], got {got}")
    if not ((frequencies >= 0) & (frequencies <= LARGEST)).all():
        raise ValueError(f"{who}: inv_freq must be in [0, {LARGEST:g}], got {frequencies.tolist()[:8]}")
    check_bool(who, "interleaved", rope.interleaved)
    check_finite(who, "scaling", rope.scaling)
    if not 0 < rope.scaling <= LARGEST:
        raise ValueError(f"{who}: scaling must be in (0, {LARGEST:g}], got {rope.scaling}")


def _kind(x: object) -> str:
    """What x is, and if it is a list, its first element that is not a tensor."""
    if isinstance(x, (list, tuple)):
        return f"a {type(x).__name__} with {next(type(y).__name__ for y in x if not isinstance(y, Tensor))}"
    return type(x).__name__


class Sums:
    """Sums over the queries of one layer, in fp64: their statistics need not be gathered in one piece."""

    def __init__(self, rope: Rope):
        self.rope, self.count = rope, 0
        self.total: tuple[Tensor, Tensor, Tensor] | None = None

    def add(self, q: Tensor) -> None:
        """Add queries before RoPE, [b, Hq, w, d]."""
        least = 2 * len(self.rope.inv_freq)
        if not isinstance(q, Tensor):
            raise TypeError(f"QueryStatistics: queries must be a torch.Tensor per layer, got {type(q).__name__}")
        if q.dim() != 4 or not q.numel() or q.shape[3] < least or not q.is_floating_point():
            raise ValueError(
                f"QueryStatistics: queries must be floats [b, Hq, w, d] with at least one row and d >= {least} (the "
                f"channels that rope rotates), got {q.dtype} {list(q.shape)}"
            )
        q = q.double().transpose(0, 1).flatten(1, 2)  # [Hq, tokens, d]
        norms = torch.view_as_real(pairs_of(q, self.rope)).square().sum(-1).sqrt().sum(1)
        added = q.sum(1), q.mT @ q, norms
        self.total = added if self.total is None else tuple(x + y for x, y in zip(self.total, added))  # type: ignore[assignment]
        self.count += q.shape[1]

    def statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        """mean, cov and norms, fp32."""
        assert self.total is not None
        mean, squares, norms = (x / self.count for x in self.total)
        cov = squares - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return mean.float(), cov.float(), norms.float()


#: The number of queries that count, fp64 [b], their mean, fp32 [b, Hq, d], and their covariance, fp32 [b, Hq, d, d].
Moments = tuple[Tensor, Tensor, Tensor]


def pooled(before: Moments | None, q: Tensor, counts: Tensor) -> Moments:
    """Add queries to the moments of earlier ones, in fp64.

    Args:
        before: The moments of the earlier queries; None if there are none.
        q: [b, Hq, t, d], before RoPE.
        counts: bool [t] or [b, t], which of them count.

    Returns:
        The moments of all queries. In rows in which none counts, mean and covariance are 0.

    Source: the pairwise update of Chan, Golub and LeVeque, 1983.
    """
    counts = counts.expand(len(q), -1)[:, None, :, None]
    new = counts.sum(2).double()  # [b, 1, 1]
    q = torch.where(counts, q.double(), 0.0)
    mean = q.sum(2) / new.clamp(min=1)
    q = torch.where(counts, q - mean.unsqueeze(2), 0.0)
    cov = q.mT @ q / new.clamp(min=1).unsqueeze(-1)
    if before is not None:
        old, old_mean, old_cov = before
        share = new / (old.view_as(new) + new).clamp(min=1)
        apart, of_all, new = mean - old_mean, share.unsqueeze(-1), old.view_as(new) + new
        mean = old_mean + share * apart
        between = (1 - of_all) * apart.unsqueeze(-1) * apart.unsqueeze(-2)
        cov = old_cov + of_all * (cov - old_cov + between)
    return new.flatten(), mean.float(), cov.float()


def of_sums(layers: Sequence[Sums], rope: Rope, scale: float | None) -> QueryStatistics:
    """The statistics of the sums of all layers."""
    mean, cov, norms = zip(*(x.statistics() for x in layers))
    return QueryStatistics(mean, cov, norms, rope, scale)


@dataclass(frozen=True, eq=False)
class CalibratedPolicy(KeyPolicy):
    """A policy that scores keys by statistics of the model's queries.

    Attributes:
        budget: See `BudgetPolicy`.
        sinks: See `BudgetPolicy`.
        recent: See `KeyPolicy`.
        head_mode: See `BudgetPolicy`.
        buffer: See `KeyPolicy`.
        protect: See `KeyPolicy`.
        statistics: A `QueryStatistics` of the model, or the path of its file. It is required: calls without it raise
            ValueError. If it covers several layers, single calls need `layer` and `num_layers`.
    """

    _: KW_ONLY
    statistics: QueryStatistics | str | None = None

    @property
    def needs(self) -> Needs:
        return Needs(model=("statistics",))

    def check(self) -> None:
        if not isinstance(self.statistics, (QueryStatistics, str, Path, type(None))):
            raise TypeError(
                f"{self.name}: statistics must be a kvops.QueryStatistics or the path of its file, got "
                f"{type(self.statistics).__name__}"
            )
        if self.statistics == "prompt" and not self.needs.statistics:
            raise ValueError(
                f"{self.name}: statistics='prompt' is for rules that declare Needs(statistics=True), expected a "
                "kvops.QueryStatistics or the path of its file (./prompt if that is its name), got 'prompt' with "
                f"{self.needs}"
            )
        super().check()

    @property
    def heads_alone(self) -> bool:
        return self.needs.statistics and super().heads_alone  # statistics of the model are those of all heads

    def check_cache(self, layer: int, num_layers: int) -> None:
        super().check_cache(layer, num_layers)
        if not self.needs.statistics:
            resolved(self.name, self.statistics)

    def of_layer(self, view: View) -> OfLayer:
        """The statistics of the view's layer."""
        if self.needs.statistics:
            if view.statistics is None:
                raise ValueError(
                    f"{self.name}: statistics={self.statistics!r} are gathered by a cache that sees the prompt's "
                    "queries (kvops.Cache with rope=, kvops.hf.KVCache), got no queries; one-shot calls expect a "
                    "kvops.QueryStatistics, such as kvops.QueryStatistics.of(q, rope), or the path of its file"
                )
            return view.statistics
        return resolved(self.name, self.statistics).layer(self.name, view.layer, view.num_layers, view.keys.device)


def resolved(who: str, statistics: QueryStatistics | str | Path | None) -> QueryStatistics:
    """Statistics given as an object or as the path of a file."""
    if statistics is None:
        raise ValueError(
            f"{who}: statistics must be a kvops.QueryStatistics or the path of its file, got None; gather them with "
            "kvops.hf.query_statistics(model, ids)"
        )
    if isinstance(statistics, QueryStatistics):
        return statistics
    return from_file(who, "statistics", statistics, QueryStatistics.load)


def pairs_of(x: Tensor, rope: Rope) -> Tensor:
    """The channels that RoPE rotates, as complex numbers: fp64 [.., d] -> complex128 [.., pairs]."""
    pairs = len(rope.inv_freq)
    x = x[..., : 2 * pairs]
    first, second = (x[..., ::2], x[..., 1::2]) if rope.interleaved else (x[..., :pairs], x[..., pairs:])
    return torch.complex(first, second)


def unrotated(x: Tensor, rope: Rope, positions: Tensor) -> Tensor:
    """Undo the RoPE of queries or keys [b, H, n, d] at positions int64 [n] or [b, n]: fp32."""
    cos, sin = rope.to(x.device, x.dtype).between(positions, None)
    return rope_at_slots(x.float().contiguous(), cos, sin, interleaved=rope.interleaved)


def turned(x: Tensor, by: Tensor, rope: Rope) -> Tensor:
    """Multiply the pairs of channels by complex factors: fp64 [.., d], complex128 [.., pairs] -> fp64 [.., d]."""
    z = pairs_of(x, rope) * by
    parts = (z.real, z.imag)
    mixed = torch.stack(parts, -1).flatten(-2) if rope.interleaved else torch.cat(parts, -1)
    return torch.cat((mixed, x[..., mixed.shape[-1] :].expand(*mixed.shape[:-1], -1)), -1)


def mean_rotation(rope: Rope, position: int | Tensor, offsets: Sequence[int], device: torch.device) -> Tensor:
    """RoPE averaged over the positions that lie `offsets` after `position`: complex128 [pairs], or [b, 1, pairs].

    offsets: hashable, a range or a tuple.
    """
    omega, average = rope.average(offsets, device)
    if isinstance(position, Tensor):
        position = position.to(device, torch.float64)[:, None, None]
    angles = position * omega
    return torch.polar(torch.ones_like(angles), angles) * average


def trig_centers(mean: Tensor, rope: Rope, position: int | Tensor, *, max_offset: int = 65536) -> Tensor:
    """Rotate mean queries to the next positions and average them, as TriAttention's score needs them.

    With them `kvops.ops.trig_scores` computes the mean over the offsets D = 1, 2, 4, ... up to `max_offset` of the
    series

    ```text
    sum over f of |E q_f| |k_f| cos(omega_f (position + D - p) + phi_f)      phi_f: the angle between E q_f and k_f
    ```

    for a key that is rotated to its position p. The mean is one product with the key because the offset and the
    position only rotate E q_f: center_f = E q_f exp(i omega_f position) mean_D exp(i omega_f D). Computed in fp64.

    Args:
        mean: fp32 [Hq, d], the mean queries before RoPE.
        rope: The model's rotary embedding.
        position: The position of the next token, an int or int64 [b].
        max_offset: The largest future offset.

    Returns:
        fp32 [Hq, d], or [b, Hq, d] for one position per row.

    Source: TriAttention, Mao et al., 2026; the factored mean: its code, `score_keys_for_round`.
    """
    check_int("trig_centers", "max_offset", max_offset, 1, FARTHEST)
    max_offset = plain(max_offset)
    if not isinstance(position, Tensor):
        check_int("trig_centers", "position", position, 0)
    offsets = tuple(2**i for i in range(max_offset.bit_length()))
    by = mean_rotation(rope, position, offsets, mean.device)
    return turned(mean.double(), by, rope).float().contiguous()
