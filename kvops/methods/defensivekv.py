"""DefensiveKV: eviction by the most attention that any query has given a key, instead of the mean.

Source: "Taming the Fragility of KV Cache Eviction in LLM Inference", Feng et al., 2025. Decisions:
docs/methods/defensivekv.md.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..ops import select_topk
from ..ops.api import Reduce
from ..ops.checks import check_bool, check_finite
from ..ops.window import outside_prefix
from .base import Needs
from .budgets import Budget, check_shared, first_slots, with_first
from .projection import Projection, projected_norms
from .queries import WindowPolicy
from .select import shared_scores
from .view import View


@dataclass(frozen=True, eq=False)
class DefensiveKV(WindowPolicy):
    """DefensiveKV: keeps the tokens to which at least one of the prompt's last queries attends, per head.

    ```text
    a[i, j] = softmax over j of scale * q_i . k_j      the last w queries, each over the keys up to its own
    m[j]    = mean over the group's query heads and the rows i of a[i, j]       for j < n - w
    r[j]    = max over the group's query heads and the rows i of a[i, j]        the worst-case risk
    p[j]    = the highest r among the kernel_size slots centred on j
    risk[j] = max(p[j], prior * mean of p over all j < n - w)                   the prior-risk correction
    norm[j] = mean over the group's query heads h of ||W_O^h v_j||_1            (`ops.value_norm`)
    kept    = the w newest tokens;
              the tokens of highest m, as long as the attention m of all others is more than 1 - first_stage_mass;
              and up to the budget the tokens of highest risk * norm / (sum of norm over all j < n - w)
    ```

    A key that is important for a single query has a low mean, and SnapKV evicts it. Here its one high weight counts.
    The correction gives each key a risk of at least the head's mean. The two stages are CriticalKV's; without them
    (`stages=False`) the risk alone decides, and W_O is not needed. Keys whose score is NaN do not count in the sums and
    are evicted first, and so are tokens whose value is not finite.

    Attributes:
        budget: See `BudgetPolicy`. It must hold the window.
        sinks: See `BudgetPolicy`.
        head_mode: See `BudgetPolicy`. With "adaptive" the heads share the layer's budget, and each stage is one for all
            of them: the first keeps the layer's highest m, as long as the attention of all others is more than
            1 - first_stage_mass on average over the heads. With "shared" m and the second stage's scores are means over
            the heads.
        group_reduce: See `QueryPolicy`. Of r; m is always a mean.
        window: See `WindowPolicy`.
        kernel_size: See `WindowPolicy`.
        pooling: See `WindowPolicy`.
        pool_first: See `WindowPolicy`.
        score: "softmax"; or "dot", see `WindowPolicy`, which needs `stages=False`.
        prior: The least risk of a key, as a multiple of the head's mean risk; at least 0. 0 does not correct.
        stages: Keep the tokens of most attention first, and weight the risk by the norms of the projected values.
        first_stage_mass: The part of the attention, in [0, 1], that the window, the sinks and the first stage are to
            hold. The token that would reach it is left to the second stage.
        w_o: The weights of the output projection, see `CriticalKV`. Only needed with `stages`.

    Source: DefensiveKV, Feng et al., 2025, and its released code.
    """

    by_head: ClassVar[bool] = True
    reduce: ClassVar[str] = "max"

    _: KW_ONLY
    kernel_size: int = 5
    group_reduce: Reduce = "max"
    prior: float = 1.0
    stages: bool = True
    first_stage_mass: float = 0.9
    w_o: Projection | None = field(default=None, repr=False)

    @property
    def needs(self) -> Needs:
        return Needs(dense=False, positions=False, model=("w_o",) if self.stages else ())

    @property
    def reductions(self) -> tuple[tuple[str, str], ...]:
        worst = ((self.reduce, self.operator_reduce),)
        return (*worst, ("mean", "mean")) if self.stages else worst

    def check(self) -> None:
        check_finite(self.name, "prior", self.prior, 0)
        check_bool(self.name, "stages", self.stages)
        check_finite(self.name, "first_stage_mass", self.first_stage_mass, 0, 1)
        super().check()
        if self.stages and self.score != "softmax":
            raise ValueError(
                f"{self.name}: the first stage is a part of the attention, expected score='softmax' or stages=False, "
                f"got {self.score!r}"
            )

    def scores(self, view: View) -> Tensor:
        worst = view.seen_by_queries
        if self.stages:
            worst = worst[:, : -view.heads]
        outside = outside_prefix(worst, view.window, view.starts, view.end)
        risk = self.pool(worst, view.heads, outside)
        if not self.prior:
            return risk
        counts = risk.isfinite() & ~outside
        total = torch.where(counts, risk, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
        mean = total / counts.sum(-1, keepdim=True).clamp(min=1)
        return torch.maximum(risk, (self.prior * mean).float())

    def choose(self, scores: Tensor, view: View, budget: Budget, *, recent: int = 0, **options: Any) -> Tensor:
        """Select the slots to keep, given the risks, fp32 [b, Hk, n]."""
        if self.stages:
            scores = self._staged(scores, view, budget, recent)
        return super().choose(scores, view, budget, recent=recent, **options)

    def _staged(self, risk: Tensor, view: View, budget: Budget, recent: int) -> Tensor:
        """Scores that order the tokens of the first stage before those of the second."""
        norms = projected_norms(self.name, self.w_o, view)
        mean, outside = view.seen_by_queries[:, -view.heads :], outside_prefix(risk, recent, view.starts, view.end)
        usable = (risk * norms).isfinite() & ~outside
        total = torch.where(usable, norms, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
        weighted = risk * (norms / torch.where(total > 0, total, 1.0)).float()
        mean = torch.where(usable, mean, torch.nan)
        if self.head_mode == "shared":
            mean, weighted = shared_scores(mean), shared_scores(weighted)
        if self.sinks:
            mean = mean.masked_fill(view.first(self.sinks), torch.nan)  # kept in any case, as the window is
        if self.head_mode == "adaptive":  # the first stage, too, is one for all heads of the layer, here one row
            mean, kept = mean.flatten(1).unsqueeze(1) / view.heads, self.sinks + recent
            if self.shares is None:
                check_shared(self.name, budget, recent)
                assert isinstance(budget, int)  # because there is a window
                best = select_topk(mean, k=view.heads * (budget - kept))
            else:
                each = [view.heads * (sum(x) // view.heads - kept) for x in self.fixed(view)]
                budgets = torch.tensor(each, dtype=torch.int32, device=mean.device).unsqueeze(1)
                best = select_topk(mean, k=max(each, default=0), budgets=budgets)
        else:
            best = first_slots(self.name, mean, budget, self.sinks + recent, starts=view.starts, lengths=view.lengths)
        attention = pad(mean.nan_to_num(0.0), (0, 1)).double()
        held = attention.gather(2, torch.where(best < 0, mean.shape[2], best))
        order = held.sort(dim=-1, descending=True, stable=True)
        others = attention.sum(-1, keepdim=True) - order.values.cumsum(-1)
        first = torch.where(others > 1 - self.first_stage_mass, best.gather(2, order.indices), -1)
        # Heads that share a budget may keep a part of the first stage, so it has the order of m. A token of the first
        # stage has at least 1 / n of the attention that is left, so this power of two puts it before all others.
        chosen = with_first(torch.zeros_like(mean), first, 1.0) > 0
        return torch.where(chosen, mean * 2.0**100, weighted.view_as(mean)).view_as(weighted)
