"""TriAttention: keeps the keys that mean queries, rotated to the next positions, score highest.

Source: "TriAttention: Efficient Long Reasoning with Trigonometric KV Compression", Mao et al., 2026 (arXiv:2604.04921),
and its code, WeianMao/triattention. Decisions: docs/methods/triattention.md.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops import trig_scores
from ..ops.checks import check_bool, check_int
from .base import Needs
from .statistics import FARTHEST, CalibratedPolicy, pairs_of, trig_centers
from .view import View

LEAST_STD = 1e-6  # scores of a head that spread less count as equal


@dataclass(frozen=True, eq=False)
class TriAttention(CalibratedPolicy):
    """TriAttention: keeps the keys with the highest trigonometric scores, and the newest.

    ```text
    S[h, i]  = mean over D of sum over f of |E q_f| |k_if| cos(omega_f (t + D - p_i) + phi_f)
             + sum over f of (E|q_f| - |E q_f|) |k_if|
    score[i] = max over the group of (S[h, i] - mean_i S[h, i]) / std_i S[h, i]
    ```

    The mean and the std are those of the tokens after the sinks; with protect="prompt", of those after the prompt.
    f: a frequency of RoPE, q_f and k_f: the channels that it rotates, before RoPE, phi_f: the angle between E q_f and
    k_f, t: the next position, p_i: the key's, D: 1, 2, 4, .. up to `max_offset`.

    The statistics of the queries are of the model, gathered before (`QueryStatistics`), so no query is needed.

    Attributes:
        budget: See `BudgetPolicy`.
        sinks: See `BudgetPolicy`. They are always kept, so their scores do not count in the mean and the std.
        recent: See `KeyPolicy`. The authors' engine plugin keeps the newest 128 tokens of a budget of 2048.
        head_mode: See `BudgetPolicy`.
        buffer: See `KeyPolicy`. The authors evict every 128 tokens.
        protect: See `KeyPolicy`.
        statistics: See `CalibratedPolicy`.
        max_offset: The largest future offset D, at most 2^40.
        normalize: If False, the scores of a group's query heads are compared as they are.

    Source: TriAttention, Mao et al., 2026; code: `methods/pruning_utils.py`, `methods/triattention.py`.
    """

    needs = Needs(dense=False, positions=False, model=("statistics",))

    _: KW_ONLY
    recent: int | float = 128
    buffer: int | float | None = 128
    max_offset: int = 65536
    normalize: bool = True

    def check(self) -> None:
        check_int(self.name, "max_offset", self.max_offset, 1, FARTHEST)
        check_bool(self.name, "normalize", self.normalize)
        super().check()

    @classmethod
    def at_budget(
        cls, budget: int, n: int, num_layers: int, streaming: bool, options: dict[str, Any]
    ) -> dict[str, Any]:
        """At most half of the budget for the newest tokens."""
        return {"budget": budget, "buffer": 1, "recent": min(128, budget // 2)}

    def scores(self, view: View) -> Tensor:
        of = self.of_layer(view)
        assert of.norms is not None  # they are of the model
        centers = trig_centers(of.mean, of.rope, view.next_position(), max_offset=self.max_offset)
        norms = (of.norms.double() - pairs_of(of.mean.double(), of.rope).abs()) * of.rope.scaling
        scores = trig_scores(
            view.k, centers, norms=norms.float().contiguous(), interleaved=of.rope.interleaved, **view.slots
        )
        if self.normalize:
            # Sums in fp64: their rounding would depend on the number of slots that are not valid.
            others = scores.masked_fill(view.first(self.sinks), torch.nan) if self.sinks else scores
            mean = others.nanmean(-1, keepdim=True, dtype=torch.float64).float()
            variance = (others - mean).square().nanmean(-1, keepdim=True, dtype=torch.float64).float()
            scores = (scores - mean) / variance.sqrt().clamp(min=LEAST_STD)
        return scores.unflatten(1, (view.heads, -1)).amax(2)
