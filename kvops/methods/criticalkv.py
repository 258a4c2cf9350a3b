"""CriticalKV: eviction by attention and by how far a token's value reaches after the output projection.

Dropping a token changes the output of a layer by at most its attention weight times the L1 norm of its projected value,
||W_O v||_1. CriticalKV spends a part of the budget on the highest attention weights, and the rest on the highest
products.

Source: "Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective", Feng et al., 2025.
Decisions: docs/methods/criticalkv.md.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..ops.checks import check_finite
from ..ops.window import outside_prefix
from .base import Needs
from .budgets import Budget, first_slots, with_first
from .projection import Projection, projected_norms
from .queries import WindowPolicy
from .select import select_budget, shared_scores
from .view import View


@dataclass(frozen=True, eq=False)
class CriticalKV(WindowPolicy):
    """CriticalKV: keeps tokens by attention first, then by attention times the norm of the projected value, per head.

    ```text
    s[j]    = SnapKV's score: the pooled attention of the prompt's last w queries
    norm[j] = mean over the group's query heads h of ||W_O^h v_j||_1                  (`ops.value_norm`)
    kept    = the w newest tokens;
              of the c = budget - w others first_stage_ratio * c, rounded down, by s;
              and the rest by (s / w + epsilon) * norm
    ```

    The rule needs the weights of the output projection, W_O. `kvops.hf.for_model` takes them from a model, which
    `kvops.hf.compress`, `kvops.hf.generate` and the evaluation do by themselves. Caches evict when `SnapKV`'s do.

    Attributes:
        budget: See `BudgetPolicy`. It must hold the window.
        sinks: See `BudgetPolicy`.
        head_mode: See `BudgetPolicy`. With "adaptive" the heads share the layer's budget by s, and each splits its own
            into the two stages. With "shared" both scores are means over the heads.
        group_reduce: See `QueryPolicy`.
        window: See `WindowPolicy`.
        kernel_size: See `WindowPolicy`.
        pooling: See `WindowPolicy`.
        pool_first: See `WindowPolicy`.
        score: See `WindowPolicy`.
        w_o: [hidden, Hq * dv], the weights of the output projection as torch.nn.Linear stores them; or a list of them,
            one for each layer that evicts, in which case one-shot calls need `layer`. They are converted to v's dtype
            if they have another.
        first_stage_ratio: The part of the budget without the protected tokens that attention alone decides, in [0, 1].
            With 1 the rule is SnapKV's.
        epsilon: Added to the mean attention of a query, at least 0, so that tokens without attention are ordered by
            their norms.

    Source: CriticalKV, Feng et al., 2025.
    """

    needs = Needs(dense=False, positions=False, model=("w_o",))
    by_head: ClassVar[bool] = True

    _: KW_ONLY
    w_o: Projection | None = field(default=None, repr=False)
    first_stage_ratio: float = 0.5
    epsilon: float = 1e-4

    def check(self) -> None:
        check_finite(self.name, "first_stage_ratio", self.first_stage_ratio, 0, 1)
        check_finite(self.name, "epsilon", self.epsilon, 0)
        super().check()

    def choose(self, scores: Tensor, view: View, budget: Budget, *, recent: int = 0, **options: Any) -> Tensor:
        """Select the slots to keep, given SnapKV's scores, fp32 [b, Hk, n]."""
        norms = projected_norms(self.name, self.w_o, view)
        weighted = (scores / view.window + self.epsilon) * norms
        if self.head_mode == "adaptive":
            scores = view.without_gaps(scores)
            budget = self._shares(scores, view, budget, recent)
        elif self.head_mode == "shared":
            scores, weighted = shared_scores(scores), shared_scores(weighted)
        # The protected tokens are kept in any case, and a token without a norm is kept last.
        outside = outside_prefix(scores, recent, view.starts, view.end) | weighted.isnan()
        if self.sinks:
            outside = outside | view.first(self.sinks)
        others, protected = scores.masked_fill(outside, torch.nan), self.sinks + recent
        best = first_slots(
            self.name, others, budget, protected, self.first_stage_ratio, starts=view.starts, lengths=view.lengths
        )
        ranked = with_first(weighted, best)
        return select_budget(
            self.name, ranked, view.heads, budget, sinks=self.sinks, recent=recent, **view.spans, **options
        )
