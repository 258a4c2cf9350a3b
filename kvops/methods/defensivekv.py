"""DefensiveKV: eviction by the most attention that any query has given a key, instead of the mean.

Source: "Taming the Fragility of KV Cache Eviction in LLM Inference", Feng et al., 2025. Decisions:
docs/methods/defensivekv.md.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..ops.api import Reduce
from ..ops.checks import check_finite
from ..ops.window import outside_prefix
from .base import Needs
from .queries import WindowPolicy
from .view import View


@dataclass(frozen=True, eq=False)
class DefensiveKV(WindowPolicy):
    """DefensiveKV: keeps the tokens to which at least one of the prompt's last queries attends, per head.

    ```text
    a[i, j] = softmax over j of scale * q_i . k_j      the last w queries, each over the keys up to its own
    r[j]    = max over the group's query heads and the rows i of a[i, j]        for j < n - w: the worst-case risk
    p[j]    = the highest r among the kernel_size slots centred on j
    score   = max(p[j], prior * mean of p over all j < n - w)                   the prior-risk correction
    ```

    A key that is important for a single query has a low mean, and SnapKV evicts it. Here its one high weight counts.
    The correction gives each key a risk of at least the head's mean. It matters where heads share a budget
    (head_mode="adaptive"), and where the budget reaches below the mean: of the corrected keys, the lower slots are
    kept. Keys whose score is NaN do not count in the mean and are evicted first.

    Attributes:
        budget: See `BudgetPolicy`. It must hold the window.
        sinks: See `BudgetPolicy`.
        head_mode: See `BudgetPolicy`.
        group_reduce: See `QueryPolicy`.
        window: See `WindowPolicy`.
        kernel_size: See `WindowPolicy`.
        pooling: See `WindowPolicy`.
        pool_first: See `WindowPolicy`.
        score: See `WindowPolicy`.
        prior: The least risk of a key, as a multiple of the head's mean risk; at least 0. 0 does not correct.

    Source: DefensiveKV, Feng et al., 2025, and its released code.
    """

    needs = Needs(dense=False, positions=False)
    by_head: ClassVar[bool] = True
    reduce: ClassVar[str] = "max"

    _: KW_ONLY
    kernel_size: int = 5
    group_reduce: Reduce = "max"
    prior: float = 1.0

    def check(self) -> None:
        check_finite(self.name, "prior", self.prior, 0)
        super().check()

    def scores(self, view: View) -> Tensor:
        risk = super().scores(view)
        if not self.prior:
            return risk
        counts = risk.isfinite() & ~outside_prefix(risk, view.window, view.starts, view.end)
        total = torch.where(counts, risk, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
        mean = total / counts.sum(-1, keepdim=True).clamp(min=1)
        return torch.maximum(risk, (self.prior * mean).float())
