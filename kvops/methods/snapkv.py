"""SnapKV: keeps the keys that the last queries of the prompt attend to, with their neighbours, and those queries' own.
PyramidKV: the same with more of the budget in the early layers. ChunkKV: the same in whole chunks of tokens.

Sources: "SnapKV: LLM Knows What You are Looking for Before Generation", Li et al., 2024; "PyramidKV: Dynamic KV Cache
Compression based on Pyramidal Information Funneling", Cai et al., 2024; "ChunkKV: Semantic-Preserving KV Cache
Compression for Efficient Long-Context LLM Inference", Liu et al., 2025. Decisions: docs/methods/.
"""

from __future__ import annotations

import functools
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ..checks import check_holds_window, check_int
from .base import View
from .budgets import budget_tokens
from .queries import WindowPolicy
from .select import places, shared_scores

_T = TypeVar("_T", int, Tensor)


@dataclass(frozen=True, eq=False)
class SnapKV(WindowPolicy):
    """SnapKV. ::

        a[i, j] = softmax over j of scale * q_i . k_j      the last w queries, each over the keys up to its own
        s[j]    = mean over the group's query heads of sum over i of a[i, j]        for j < n - w
        score   = the highest s among the kernel_size neighbours of j, itself in the middle

    The w newest tokens stay, and the budget's highest scores of what is before, per head. So a cache compresses the
    prompt, by its last `window` queries, and each chunk of a chunked prefill and each further turn with what was kept
    before; decode keeps every new token.

    Attributes: see `WindowPolicy`.
    """

    uses_positions: ClassVar[bool] = False

    by_head: ClassVar[bool] = True

    @property
    def paged(self) -> bool:
        return True


@dataclass(frozen=True, eq=False)
class PyramidKV(WindowPolicy):
    """PyramidKV: `SnapKV` with each layer's own share of the budget, see `pyramidkv_budgets`.

    Layers differ in length; `layer` and `num_layers` say which one it is. In one call shorter rows of a padded batch
    have shares of their own and end in -1; in a cache the shares are of the padded length.

    Attributes: see `WindowPolicy`; budget is the mean over the layers, an int or a float. head_mode is "per_head" or
        "shared".
    """

    by_head: ClassVar[bool] = True

    @property
    def paged(self) -> bool:
        return True

    def check(self) -> None:
        if isinstance(self.budget, Tensor) or self.head_mode == "adaptive":
            got = "a budget per head" if isinstance(self.budget, Tensor) else "head_mode='adaptive'"
            raise ValueError(
                f"{self.name}: the budget is shared among layers, and the heads of a layer keep equally many tokens; "
                f"expected budget as an int or a float and head_mode 'per_head' or 'shared', got {got}"
            )
        super().check()

    @property
    def uniform_layers(self) -> bool:
        return False

    def room(self, view: View) -> int:
        return layer_budget(super().room(view), view.seen, self.window, *view.place(self.name))

    def pick(self, scores: Tensor, view: View) -> Tensor:
        layer, num_layers = view.place(self.name)
        share = functools.partial(layer_budget, window=view.window, layer=layer, num_layers=num_layers)
        return self.choose(scores, view, self.budget, recent=view.window, share=share)


@dataclass(frozen=True, eq=False)
class ChunkKV(WindowPolicy):
    """ChunkKV: whole chunks of `chunk` tokens, by the mean of SnapKV's scores (not pooled) over all heads.

    The w newest tokens stay. What is before is cut into chunks (the last may be shorter), and the chunks of the highest
    mean stay whole, but for the one that the budget cuts: it gives its best tokens. One set for all KV heads, exactly
    the budget. Keys whose score is NaN do not count in their chunk's mean, and go first.

    Attributes:
        chunk: tokens of a chunk.
        kernel_size: 1, so scores are not pooled. For the others see `WindowPolicy`.
    """

    uses_positions: ClassVar[bool] = False

    _: KW_ONLY
    chunk: int = 20
    kernel_size: int = 1

    @property
    def heads_alone(self) -> bool:
        return False

    @property
    def paged(self) -> bool:
        return True

    def check(self) -> None:
        check_int(self.name, "chunk", self.chunk, 1)
        super().check()

    def scores(self, view: View) -> Tensor:
        return chunk_ranks(super().scores(view), self.chunk, view.window, view.starts, view.end)


def pyramidkv_budgets(budget: int | float, num_layers: int, n: int, window: int = 32) -> list[int]:
    """The tokens that each layer keeps of n, first layer first. ::

        c = budget - window;   hi = min(2 c - c // 20, n - window);   lo = 2 c - hi
        window + a line from hi (layer 0) to lo (the last)

    All layers alike if n < 2 c, if n <= budget, or if there is one layer.

    Args:
        budget: tokens (int), or a fraction in (0, 1] of n (float): the mean over the layers, exactly.
        num_layers: layers of the model.
        n: tokens of the prompt.
        window: rows that observe.
    """
    op = "pyramidkv_budgets"
    for name, value, low in (("num_layers", num_layers, 1), ("n", n, 0), ("window", window, 0)):
        check_int(op, name, value, low)
    keep = budget_tokens(op, budget, n)
    check_holds_window(op, keep, window)
    return [layer_budget(keep, n, window, layer, num_layers) for layer in range(num_layers)]


def layer_budget(budget: _T, n: _T, window: int, layer: int, num_layers: int) -> _T:
    """One layer's share of a budget for n tokens; ints, or int tensors of any number of rows.

    The line is rounded up in the first half of the layers, and the second half mirrors it, so the sum is exact.
    """

    def where(condition: Any, yes: Any, no: Any) -> Any:
        if isinstance(condition, Tensor):
            return torch.where(condition, yes, no)
        return yes if condition else no

    c = budget - window
    top = 2 * c - c // 20
    hi = where(n - window < top, n - window, top)
    rise = hi - 2 * (hi - c) * min(layer, num_layers - 1 - layer) // max(1, num_layers - 1)  # hi - lo = 2 (hi - c)
    share = rise if 2 * layer < num_layers else 2 * c - rise
    uniform = (n < 2 * c) | (n <= budget)
    kept: _T = window + (c if num_layers == 1 else where(uniform, c, share))
    return kept


def chunk_ranks(scores: Tensor, chunk: int, window: int, starts: Tensor | None, end: Tensor | int) -> Tensor:
    """fp32 [b, 1, n]: whole numbers that order the prefix by (its chunk's mean, its own score), ties by lower slot.

    scores: [b, Hk, n]. Numbers below 2 n are exact in fp32 for n <= 2^23.
    """
    b, _, n = scores.shape
    chunk = min(chunk, max(n, 1))
    count = -(-n // chunk)
    # Row by row, chunks count from the first valid slot: slot j of the grid is slot starts + j of the cache.
    grid = torch.arange(count * chunk, device=scores.device).expand(b, -1)
    first = torch.zeros(b, 1, dtype=torch.int64, device=scores.device) if starts is None else starts[:, None].long()
    last = (end[:, None] if isinstance(end, Tensor) else end) - window
    inside = grid + first < last
    means = shared_scores(scores).squeeze(1).gather(1, (grid + first).clamp(max=n - 1))
    usable = inside & means.isfinite()
    tokens = torch.where(usable, means, -torch.inf).unflatten(1, (count, chunk))  # [b, count, chunk]
    total, size = torch.zeros_like(tokens[:, :, 0]), torch.zeros_like(tokens[:, :, 0])
    for i in range(chunk):  # one by one: the order of the sum is fixed
        finite = tokens[:, :, i].isfinite()
        total = total + torch.where(finite, tokens[:, :, i], 0.0)
        size = size + finite
    chunks = torch.where(size > 0, total / size, -torch.inf)
    order = places(chunks).unsqueeze(-1) * chunk + places(tokens)
    ranks = torch.where(usable, (count * chunk - order).flatten(1).float(), torch.nan)
    back = (torch.arange(n, device=scores.device) - first).clamp(min=0)
    return ranks.gather(1, back).unsqueeze(1)
