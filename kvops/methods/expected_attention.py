"""Expected Attention: keeps the tokens that future queries are expected to attend to.

Source: "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution", Devoto et
al., 2025, and NVIDIA's kvpress. Decisions: docs/methods/expectedattention.md.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from ..ops import quadratic_scores
from ..ops.checks import check_bool, check_finite, check_int
from .base import Needs
from .select import readable_keys
from .statistics import FARTHEST, CalibratedPolicy, mean_rotation, turned
from .view import View


@dataclass(frozen=True, eq=False)
class ExpectedAttention(CalibratedPolicy):
    """Expected Attention: keeps the tokens with the largest expected contribution to the next queries' output.

    ```text
    R        = mean over the next `future` positions of their RoPE
    mu, C    = R mean, R cov R^T                                    of the query statistics
    z[h, i]  = scale mu_h . k_i + scale^2 / 2 k_i^T C_h k_i         log of the mean weight of a Gaussian query
    a        = softmax over the tokens after the sinks of z
    score[i] = (mean over the group of a[h, i] + epsilon) * ||v_i||
    ```

    `head_mode="adaptive"` shares a layer's budget among its heads, as AdaKV does.

    Attributes:
        budget: See `BudgetPolicy`.
        sinks: See `BudgetPolicy`. The softmax leaves these tokens out.
        recent: See `KeyPolicy`.
        head_mode: See `BudgetPolicy`.
        buffer: See `KeyPolicy`.
        protect: See `KeyPolicy`.
        statistics: See `CalibratedPolicy`. Or "prompt", as in kvpress: the mean and the covariance of the prompt's own
            queries, per row, without those of the first `sinks` tokens. A cache gathers them and needs `rope`, which
            `kvops.hf` fills in; one-shot calls and engines raise ValueError. Later steps of several tokens add to them.
            Evictions in decode use them too. A row whose prompt has at most `sinks` tokens has mean 0 and covariance 0.
        future: How many next positions the queries are expected at, at most 2^40.
        covariance: If False, only the mean query counts: C is 0.
        value_norm: If False, the score is without epsilon and ||v_i||.
        epsilon: Added to the expected weight, at least 0. kvpress uses 0.01 with adaptive budgets.

    Source: Expected Attention, Devoto et al., 2025; code: kvpress, expected_attention_press.py.
    """

    _: KW_ONLY
    sinks: int = 4
    future: int = 512
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0

    @property
    def needs(self) -> Needs:
        # dense: the norms of V are computed in torch
        of_prompt = self.statistics == "prompt"
        return Needs(dense=self.value_norm, positions=False, model=("statistics",), statistics=of_prompt)

    def check(self) -> None:
        check_int(self.name, "future", self.future, 1, FARTHEST)
        check_bool(self.name, "covariance", self.covariance)
        check_bool(self.name, "value_norm", self.value_norm)
        check_finite(self.name, "epsilon", self.epsilon, 0)
        super().check()

    def scores(self, view: View) -> Tensor:
        logits = self.logits(view)
        if self.sinks:
            logits = logits.masked_fill(view.first(self.sinks), -torch.inf)
        usable = logits > -torch.inf  # neither a sink nor NaN
        # In fp64: the rounding of an fp32 sum would depend on the number of slots that are not valid.
        weights = torch.where(usable, logits, -torch.inf).softmax(-1, dtype=torch.float64).float()
        weights = torch.where(usable, weights, torch.where(logits.isnan(), logits, 0.0))
        expected = weights.unflatten(1, (view.heads, -1)).mean(2)
        if not self.value_norm:
            return expected
        norms = torch.linalg.vector_norm(readable_keys(self.name, view.v), dim=-1, dtype=torch.float32)
        return (expected + self.epsilon) * norms

    def logits(self, view: View) -> Tensor:
        """The logarithm of each key's expected weight, before the softmax: fp32 [b, Hq, n]."""
        of = self.of_layer(view)
        # [pairs] or [b, 1, pairs]
        by = mean_rotation(of.rope, view.next_position(), range(self.future), view.keys.device)
        mean = turned(of.mean.double(), by, of.rope).float().contiguous()
        cov = None
        if self.covariance:
            if by.dim() > 1:
                by = by.unsqueeze(-2)
            once = turned(of.cov.double(), by, of.rope)
            cov = turned(once.mT, by, of.rope).mT.float().contiguous()
        return quadratic_scores(view.k, mean, cov=cov, scale=of.scale, **view.slots)
