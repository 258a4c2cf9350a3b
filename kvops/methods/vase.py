"""VaSE: eviction in decode that keeps the largest values and draws the other tokens.

A few values are far larger than the rest, and a reasoning model that loses them falls into loops. Of the other tokens a
model needs a varied sample rather than the best by one score.

Source: "Value-Aware Stochastic KV Cache Eviction for Reasoning Models", Chang et al., 2026, and the released code.
Decisions: docs/methods/vase.md.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops import select_topk, value_range
from ..ops.checks import check_int, check_recent, inference_only
from ..ops.window import Pool, Pooling, outside_prefix, prefix_lengths
from .base import Needs
from .budgets import fraction_of, row_budgets
from .queries import ObservedPolicy
from .random_numbers import RANGE, random_integers
from .select import shared_scores
from .view import View

#: Added to the scores of the largest values. All others lie between the logarithm of the least float and 18.
_KEPT = 1e4


@dataclass(frozen=True, eq=False)
class VaSE(ObservedPolicy):
    """VaSE (its variant AttnV): keeps the largest values, and draws the other tokens by their attention, per head.

    ```text
    a[i, j]  = softmax over j of scale * q_i . k_j         the last w queries, each over the keys up to its own
    p[j]     = mean over the kernel_size slots around j of the mean over the group's query heads and i of a[i, j]
    range[j] = max over the channels of v_j - min over the channels of v_j                   (`ops.value_range`)
    ```

    The w newest tokens, the sinks and the tokens of the largest ranges are kept. The rest of the budget is drawn
    without replacement, with probabilities proportional to p, anew at each eviction: the highest log p[j] + g[j], with
    independent numbers g of the Gumbel distribution, are such a draw. The numbers are hashes of (seed, layer, head,
    the token's position, the newest token's position), so a draw does not depend on the rest of the batch. With
    head_mode="shared" the heads' p and ranges are averaged, and one draw is that of all heads.

    In decode a cache evicts like `RKV`.

    Attributes:
        budget: See `BudgetPolicy`. It must hold the sinks, the window and the largest values.
        sinks: See `BudgetPolicy`.
        head_mode: See `BudgetPolicy`.
        group_reduce: See `QueryPolicy`.
        buffer: See `KeyPolicy`.
        protect: See `KeyPolicy`.
        window: How many of the last queries observe; their tokens are kept.
        kernel_size: The slots over which the attention is pooled; odd. 1 does not pool.
        pooling: "avg" or "max"; see `WindowPolicy`.
        largest_values: Tokens of the largest ranges that are kept, besides sinks and window: an int, or a fraction in
            [0, 1) of the budget (float).
        seed: The seed of the hash, at least 0.

    Source: VaSE, Chang et al., 2026.
    """

    needs = Needs(dense=False)

    window: int = 64
    _: KW_ONLY
    sinks: int = 4
    buffer: int | float | None = 64
    kernel_size: int = 5
    pooling: Pool = "avg"
    largest_values: int | float = 0.25
    seed: int = 0

    @property
    def heads_alone(self) -> bool:
        return False  # a head's numbers depend on its index among the heads of the tensor

    @property
    def pool(self) -> Pooling:
        return Pooling(self.kernel_size, self.pooling)

    def check(self) -> None:
        self.pool.check(self.name)
        check_int(self.name, "seed", self.seed, 0)
        check_recent(self.name, self.largest_values, "largest_values")
        super().check()

    def check_holds(self, keep: int, newest: int) -> None:
        if self.sinks + newest + (largest := self.largest(keep)) > keep:
            raise ValueError(
                f"{self.name}: budget must hold sinks + window + largest_values, expected at least {self.sinks} + "
                f"{newest} + {largest} tokens, got {keep}; raise budget, or lower one of the others"
            )
        super().check_holds(keep, newest)

    def in_tokens(self, keep: int) -> dict[str, Any]:
        return super().in_tokens(keep) | {"largest_values": self.largest(keep)}

    def largest(self, keep: int) -> int:
        """How many tokens of the largest ranges are among the `keep` kept ones."""
        return self.largest_values if isinstance(self.largest_values, int) else fraction_of(self.largest_values, keep)

    @classmethod
    def at_budget(
        cls, budget: int, n: int, num_layers: int, streaming: bool, options: dict[str, Any]
    ) -> dict[str, Any]:
        """The buffer of the released code, and its window of 64 tokens, or a quarter of the budget if that is less."""
        return {"budget": budget, "window": max(1, min(64, budget // 4))}

    def scores(self, view: View) -> Tensor:
        self.check_values(view)
        observed = view.seen_by_queries
        attention = self.pool(observed, view.heads, outside_prefix(observed, view.window, view.starts, view.end))
        ranges, gumbel = self.ranges(view), self.gumbel(view)
        if self.head_mode == "shared":  # one draw for all heads
            attention, ranges, gumbel = shared_scores(attention), shared_scores(ranges), gumbel[:, :1]
        drawn = attention.clamp(min=torch.finfo(attention.dtype).tiny).log() + gumbel
        shape = drawn.shape[:2]
        keep, budgets = row_budgets(self.name, self.budget, shape, view.seen, view.padding, view.lengths)
        if budgets is not None and isinstance(self.largest_values, float):
            budgets = fraction_of(self.largest_values, budgets).expand(shape).contiguous()
        else:
            budgets = None
        starts, lengths = view.behind(self.sinks)
        lengths = prefix_lengths(drawn, view.window, starts, lengths)
        largest = select_topk(ranges, k=self.largest(keep), starts=starts, lengths=lengths, budgets=budgets)
        # The last column takes the writes of missing entries.
        kept = torch.nn.functional.pad(torch.zeros_like(drawn), (0, 1))
        kept.scatter_(2, torch.where(largest < 0, view.n, largest), _KEPT)
        return drawn + kept[..., : view.n]

    def check_values(self, view: View) -> None:
        """Check v against k, which no operator does before the selection."""
        inference_only(self.name, v=view.v)
        if view.v.dtype != view.k.dtype or view.v.dim() != 4 or view.v.shape[:3] != view.k.shape[:3]:
            raise ValueError(
                f"{self.name}: v must be {view.k.dtype} [b, Hk, n, dv] with b, Hk, n = {list(view.k.shape[:3])} as in "
                f"k, got {view.v.dtype} {list(view.v.shape)}"
            )

    def ranges(self, view: View) -> Tensor:
        """The range of each value over its channels: fp32 [b, Hk, n]."""
        return value_range(view.v, **view.slots)

    def gumbel(self, view: View) -> Tensor:
        """Independent numbers of the Gumbel distribution: fp32 [b, Hk, n]."""
        position, end = view.row_positions(), view.end
        if isinstance(end, Tensor):
            newest = position.gather(2, (end.long() - 1).clamp(min=0)[:, None, None].expand(-1, position.shape[1], 1))
        else:
            newest = position[..., end - 1 : end]
        integers = random_integers(position, self.seed, view.layer or 0, newest)
        uniform = (integers.double() + 0.5) / RANGE  # in (0, 1); in fp32 the largest would be 1
        return -(-uniform.log()).log().float()
