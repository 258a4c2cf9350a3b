"""R-KV: eviction in decode by attention and redundancy.

Reasoning models repeat themselves, and repeated tokens attend to one another, so attention alone keeps many copies.
R-KV subtracts how similar a token's key is to all other keys.

Source: "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models", Cai et al., 2025, and the released code.
Decisions: docs/methods/rkv.md.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops.api import Reduce, key_similarity
from ..ops.checks import check_finite
from ..ops.window import Pooling, outside_prefix
from .base import Needs
from .queries import ObservedPolicy
from .view import View


@dataclass(frozen=True, eq=False)
class RKV(ObservedPolicy):
    """R-KV: keeps the tokens that the last queries attend to and that are unlike the others, per head.

    ```text
    a[i, j]    = softmax over j of scale * q_i . k_j         the last w queries, each over the keys up to its own
    importance = max over neighbours of max over the group's query heads of mean over i of a[i, j]       for j < n - w
    redundancy = softmax over j of the mean cosine of k_j with all other keys, where each key spares its last
                 similar one                                                                 (`ops.key_similarity`)
    score      = mix * importance - (1 - mix) * redundancy
    ```

    The w newest tokens are kept, and the highest scores before them up to the budget. In decode a cache evicts down to
    the budget whenever it holds `buffer` tokens more, by the queries of the last w tokens, which it remembers. A
    prompt, and each chunk or further turn of at least w tokens, is compressed in the same way.

    Attributes:
        budget: See `BudgetPolicy`. It must hold the window.
        sinks: See `BudgetPolicy`.
        head_mode: See `BudgetPolicy`.
        group_reduce: See `QueryPolicy`; the released code takes the maximum.
        buffer: See `KeyPolicy`.
        protect: See `KeyPolicy`.
        window: How many of the last queries observe; their tokens are kept.
        kernel_size: The slots over which the importance is pooled by its maximum; odd. 1 does not pool.
        mix: The weight of the importance, lambda in the paper, in [0, 1].
        threshold: The cosine that similar keys exceed; see `ops.key_similarity`.

    Source: R-KV, Cai et al., 2025.
    """

    needs = Needs(dense=False, positions=False)

    _: KW_ONLY
    buffer: int | float | None = 128
    group_reduce: Reduce = "max"
    kernel_size: int = 7
    mix: float = 0.1
    threshold: float = 0.5

    def check(self) -> None:
        Pooling(self.kernel_size).check(self.name)
        check_finite(self.name, "mix", self.mix, 0, 1)
        check_finite(self.name, "threshold", self.threshold, 0)
        super().check()

    @classmethod
    def at_budget(
        cls, budget: int, n: int, num_layers: int, streaming: bool, options: dict[str, Any]
    ) -> dict[str, Any]:
        """The buffer of the paper, and a window of 8 tokens, or half the budget if that is less."""
        return {"budget": budget, "window": max(1, min(8, budget // 2))}

    def scores(self, view: View) -> Tensor:
        importance = view.seen_by_queries
        outside = outside_prefix(importance, view.window, view.starts, view.end)
        importance = Pooling(self.kernel_size)(importance, view.heads, outside)
        redundancy = key_similarity(view.k, threshold=self.threshold, **view.slots)
        lost = redundancy.isnan()
        redundancy = redundancy.masked_fill(lost, -torch.inf).softmax(-1).masked_fill(lost, torch.nan)
        return self.mix * importance - (1 - self.mix) * redundancy
