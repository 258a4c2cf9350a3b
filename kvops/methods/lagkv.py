"""LagKV: keeps, of each partition of `lag` tokens, those that stand out most when seen by the next partition.

Source: "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important", Sec. 2.2 (Eq. 5-10); the
variants LocalKV and L2 norm: App. A.2. Decisions where paper and released code differ: docs/methods/lagkv.md.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cache import Method
from ..ops import lag_score, select_topk
from ..reference import num_segments
from .common import (
    Compressed,
    all_slots,
    check_choice,
    check_head_mode,
    check_int,
    check_rank,
    in_place,
    moved,
    negative_norms,
    shared_scores,
)

#: score="l2" leaves these layers as they are.
L2_SKIPPED_LAYERS = (0, 1)


def lagkv_compress(
    k: Tensor,
    v: Tensor,
    L: int = 1024,
    r: float = 0.5,
    *,
    sink: int = 16,
    v_weight: float = 1.0,
    reference: str = "lag",
    score: str = "std",
    layer: int | None = None,
    head_mode: str = "per_head",
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    fill_invalid: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> Compressed:
    """LagKV in one call. k: [b, Hk, n, d], v: [b, Hk, n, dv] -> (k, v, indices) with m slots.

    The slots behind the first `sink` are cut into partitions of L tokens. Of each partition but the last complete one
    the int(r * L) tokens of the highest score stay, per head::

        N = (X - min Y) / (max Y - min Y)      per channel; X a partition, Y the next one
        score = softmax(std N of K) + v_weight * softmax(std N of V)
        m = sink + int(r * L) * ((n - sink) // L - 1) + L + (n - sink) % L       for n >= sink + 2 L, else n (Eq. 10)

    reference: "lag", or "self" for LocalKV (Y is X itself).
    score: "std", or "l2": minus the key's norm; V, v_weight and reference then have no say, and layers 0 and 1 (if
        `layer` says so) stay whole.
    head_mode: "per_head", or "shared": one kept set for all heads, by the mean score.
    starts, lengths: int32 [b], the valid slots of each row; partitions and sinks count from starts. The width m is then
        the longest that any length <= n gives, and shorter rows end in -1 (zeros in k and v), or with `fill_invalid`
        keep their lowest invalid slots instead.
    out: (k_out, v_out) of the result's shapes to write to.

    TypeError or ValueError for wrong arguments, before anything is written.
    """
    indices = _indices(k, v, L, r, sink, v_weight, reference, score, layer, head_mode, starts, lengths, fill_invalid)
    return moved("lagkv_compress", k, v, indices, out)


lagkv_compress_ = in_place(lagkv_compress)


def _check(op, lag, ratio, sink, reference, score, head_mode, names=("lag", "ratio")) -> int:
    """Tokens kept of a partition, int(ratio * lag); 0 is allowed. `names` are what the caller calls the first two."""
    check_int(op, names[0], lag, 1)
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)):
        raise TypeError(f"{op}: {names[1]} must be a float, got {type(ratio).__name__} {ratio!r}")
    if not 0 <= ratio <= 1:
        raise ValueError(f"{op}: {names[1]} must be in [0, 1], got {ratio}")
    check_int(op, "sink", sink, 0)
    check_choice(op, "reference", reference, ("lag", "self"))
    check_choice(op, "score", score, ("std", "l2"))
    check_head_mode(op, head_mode)
    return int(ratio * lag)


def _indices(
    k, v, lag, ratio, sink, v_weight, reference, score, layer, head_mode, starts, lengths, fill_invalid
) -> Tensor:
    """The kept slots of one call, [b, Hk, m]."""
    op = "lagkv_compress"
    m = _check(op, lag, ratio, sink, reference, score, head_mode, names=("L", "r"))
    check_rank(op, k)
    if score == "l2" and layer in L2_SKIPPED_LAYERS:
        return all_slots(k, starts, lengths, fill_invalid)
    scores = _scores(k, v, lag, sink, v_weight, reference, score, starts, lengths)
    return _select(scores, k, m, sink, head_mode, starts, lengths, fill_invalid)


def _scores(k, v, lag, prefix, v_weight, reference, score, starts, lengths) -> Tensor:
    """fp32 [b, Hk, S, lag] of the partitions of [prefix, n) that have a next one."""
    if score == "std":
        return lag_score(k, v, lag, prefix, v_weight, reference == "self", starts, lengths)
    n = k.shape[2]
    count = num_segments(n, prefix, lag)
    if starts is None:
        k = k[:, :, prefix : prefix + count * lag]
    norms = negative_norms(k)
    if starts is not None:  # each row has its own grid; slots beyond it belong to partitions that are not selected from
        grid = (starts[:, None] + torch.arange(prefix, prefix + count * lag, device=k.device)).clamp(max=n - 1)
        norms = norms.gather(2, grid[:, None].expand(-1, k.shape[1], -1))
    return norms.unflatten(2, (count, lag))


def _select(scores, k, m, prefix, head_mode, starts=None, lengths=None, fill_invalid=False) -> Tensor:
    if head_mode == "shared":
        scores = shared_scores(scores)
    indices = select_topk(scores, m, prefix, 0, k.shape[2], starts, lengths, None, fill_invalid)
    return indices.expand(-1, k.shape[1], -1)


class LagKV(Method):
    """LagKV's cache of one layer: compresses partitions as soon as the next one is complete.

    Fires when 2 * lag tokens follow the part that is already compressed: in decode once every `lag` tokens. However the
    tokens come, in one call, in chunks or one by one, the same slots stay, bit for bit. Rows of a padded batch keep
    what they keep alone: different numbers of tokens, which begin after `pads` empty slots.

    Settings as in `lagkv_compress`; with score="l2" layers 0 and 1 stay whole, so layers differ in length.
    """

    fixed_budget = False
    _state = (*Method._state, "_row_static")

    def __init__(
        self,
        lag: int = 1024,
        ratio: float = 0.5,
        *,
        sink: int = 16,
        v_weight: float = 1.0,
        reference: str = "lag",
        score: str = "std",
        head_mode: str = "per_head",
        attend_before_compress: bool = True,
    ):
        self._m = _check("LagKV", lag, ratio, sink, reference, score, head_mode)
        self.lag, self.ratio, self.sink, self.v_weight = lag, ratio, sink, v_weight
        self.reference, self.score, self.head_mode = reference, score, head_mode
        super().__init__(attend_before_compress)

    def reset(self) -> None:
        super().reset()
        self._static = self.sink  # slots that are never looked at again: sinks and what was kept of older partitions
        self._row_static: Tensor | None = None  # int64 [b], on the CPU: the same per row of a padded batch

    @property
    def uniform_layers(self) -> bool:
        return self.score != "l2"

    def _evict(self, k: Tensor, v: Tensor, pads: Tensor | None, seen: int) -> Tensor | None:
        if self.score == "l2" and self.layer in L2_SKIPPED_LAYERS:
            return None
        if pads is None:
            indices, self._static = self._row_indices(k, v, self._static)
            return indices
        # Rows differ in length, so each has its own partitions: row by row, as if it were alone.
        static = [self.sink] * len(k) if self._row_static is None else self._row_static.tolist()
        rows = []
        for row, pad in enumerate(pads.tolist()):
            tokens = slice(row, row + 1), slice(None), slice(pad, None)
            indices, static[row] = self._row_indices(k[tokens], v[tokens], static[row])
            rows.append(None if indices is None else indices[0] + pad)
        if all(indices is None for indices in rows):
            return None
        self._row_static = torch.tensor(static, device="cpu")
        for row, pad in enumerate(pads.tolist()):
            if rows[row] is None:
                rows[row] = torch.arange(pad, k.shape[2], device=k.device).expand(k.shape[1], -1)
        width = max(indices.shape[1] for indices in rows)
        return torch.stack([F.pad(indices, (width - indices.shape[1], 0), value=-1) for indices in rows])

    def _row_indices(self, k: Tensor, v: Tensor, static: int) -> tuple[Tensor | None, int]:
        """What stays of rows without padding (None: everything), and the new length of the static part."""
        count = num_segments(k.shape[2], static, self.lag)
        if count == 0:
            return None, static
        scores = _scores(k, v, self.lag, static, self.v_weight, self.reference, self.score, None, None)
        return _select(scores, k, self._m, static, self.head_mode), static + count * self._m
