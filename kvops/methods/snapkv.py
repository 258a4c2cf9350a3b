"""SnapKV, PyramidKV and ChunkKV: eviction by the attention of the prompt's last queries.

SnapKV keeps the keys to which the last queries attend, their neighbours, and the tokens of those queries. PyramidKV
gives more of the budget to early layers. ChunkKV keeps whole chunks of tokens.

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

from ..ops.checks import check_budget, check_holds_window, check_int, check_num_layers, plain
from .base import Needs
from .budgets import budget_tokens, row_budgets
from .queries import WindowPolicy
from .select import places, shared_scores
from .view import View

_T = TypeVar("_T", int, Tensor)


@dataclass(frozen=True, eq=False)
class SnapKV(WindowPolicy):
    """SnapKV: keeps the tokens to which the prompt's last queries attend, per head.

    ```text
    a[i, j] = softmax over j of scale * q_i . k_j      the last w queries, each over the keys up to its own
    s[j]    = mean over the group's query heads of sum over i of a[i, j]        for j < n - w
    score   = the highest s among the kernel_size slots centred on j
    ```

    DropKV (score="drop", pooling="avg", or the method "dropkv") scores tokens by how far the outputs move without them:

    ```text
    o[i]    = sum over j of a[i, j] * v[j]
    s[j]    = mean over the group's query heads of sum over i of (a / (1 - a))^2 * ||v[j] - o[i]||^2    a = a[i, j]
    score   = mean of s over the kernel_size slots centred on j
    ```

    The w newest tokens are kept, and the highest scores before them up to the budget. A cache compresses the prompt by
    its last `window` queries. Each chunk of a chunked prefill and each further turn is compressed in the same way,
    together with the tokens kept before. Decode keeps every new token.

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

    Source: SnapKV, Li et al., 2024; DropKV, 2026.
    """

    needs = Needs(dense=False, positions=False)
    by_head: ClassVar[bool] = True


@dataclass(frozen=True, eq=False)
class PyramidKV(WindowPolicy):
    """PyramidKV: `SnapKV` with a budget of its own for each layer, larger in early layers (`pyramidkv_budgets`).

    Layers differ in length, so one-shot calls need `layer` and `num_layers`. Each row of a padded batch has the budget
    of its own length. Rows that keep fewer slots than others end in -1 in a one-shot call, and begin with `pads` empty
    slots in a cache.

    Attributes:
        budget: The mean over the layers, an int or a float; see `BudgetPolicy`. It must hold the window.
        sinks: See `BudgetPolicy`.
        head_mode: "per_head" or "shared"; see `BudgetPolicy`.
        group_reduce: See `QueryPolicy`.
        window: See `WindowPolicy`.
        kernel_size: See `WindowPolicy`.
        pooling: See `WindowPolicy`.
        pool_first: See `WindowPolicy`.
        score: See `WindowPolicy`.

    Source: PyramidKV, Cai et al., 2024.
    """

    needs = Needs(dense=False, positions=False)
    by_head: ClassVar[bool] = True
    fixed_budget: ClassVar[bool] = False

    def check(self) -> None:
        if isinstance(self.budget, Tensor) or self.head_mode == "adaptive":
            got = "a budget per head" if isinstance(self.budget, Tensor) else "head_mode='adaptive'"
            raise ValueError(
                f"{self.name}: layers share the budget, and the heads of a layer keep the same number of tokens; "
                f"expected budget as an int or a float and head_mode 'per_head' or 'shared', got {got}"
            )
        super().check()

    @property
    def uniform_layers(self) -> bool:
        return False

    def room(self, view: View) -> int:
        budget = super().room(view)
        room = layer_budget(budget, view.seen, self.window, *view.layer_and_count(self.name))
        # A row that is shorter than its batch may have less room in this layer than the batch, down to the mean.
        return room if view.padding is None else min(room, budget)

    def pick(self, scores: Tensor, view: View) -> Tensor:
        layer, num_layers = view.layer_and_count(self.name)
        share = functools.partial(layer_budget, window=view.window, layer=layer, num_layers=num_layers)
        return self.choose(scores, view, self.budget, recent=view.window, share=share)

    def evict(self, view: View) -> Tensor | None:
        if view.padding is None:
            return super().evict(view)
        layer, num_layers = view.layer_and_count(self.name)
        tokens = (view.seen - view.padding).unsqueeze(1)  # int32 [b, 1]: of each row, while `view.seen` has padding
        shape, least = (view.rows, view.heads), self.sinks + self.window
        _, budgets = row_budgets(self.name, self.budget, shape, view.seen, view.padding, None)

        def share(keep: Any, _: Any) -> Any:
            if isinstance(keep, int):
                return layer_budget(keep, view.seen, self.window, layer, num_layers)
            own = keep if budgets is None else budgets.clamp(min=least)
            return layer_budget(own, tokens, self.window, layer, num_layers)

        view = view.changed(fill_invalid=False)
        kept = self.choose(self.scores(view), view, super().room(view), recent=self.window, share=share)
        return kept.sort(-1).values  # entries of -1 first


@dataclass(frozen=True, eq=False)
class ChunkKV(WindowPolicy):
    """ChunkKV: keeps whole chunks of tokens, by the mean of SnapKV's scores (without pooling) over all heads.

    The w newest tokens are kept. The tokens before them are cut into chunks; the last chunk may be shorter. Chunks are
    kept whole by descending mean score. Of the chunk that straddles the budget, the best tokens are kept, so the budget
    is met exactly. All KV heads keep the same tokens. Keys whose score is NaN do not count in the mean of their chunk
    and are evicted first.

    Attributes:
        budget: Tokens to keep (int), or a fraction in (0, 1] of the valid slots (float), rounded down, at least 1; the
            same for all heads. It must hold the window.
        sinks: See `BudgetPolicy`.
        head_mode: Without effect, since all heads keep the same tokens; "adaptive" is refused.
        group_reduce: See `QueryPolicy`.
        window: See `WindowPolicy`.
        kernel_size: The slots over which scores are pooled; odd. The default, 1, does not pool.
        pooling: See `WindowPolicy`.
        pool_first: See `WindowPolicy`.
        score: See `WindowPolicy`.
        chunk: Tokens per chunk.

    Source: ChunkKV, Liu et al., 2025.
    """

    needs = Needs(dense=False, positions=False)

    _: KW_ONLY
    chunk: int = 20
    kernel_size: int = 1

    @property
    def heads_alone(self) -> bool:
        return False

    def check(self) -> None:
        check_int(self.name, "chunk", self.chunk, 1)
        super().check()

    def scores(self, view: View) -> Tensor:
        return chunk_ranks(super().scores(view), self.chunk, view.window, view.starts, view.end)


def pyramidkv_budgets(budget: int | float, num_layers: int, n: int, window: int = 32) -> list[int]:
    """Compute the tokens that each layer keeps under PyramidKV, first layer first.

    ```text
    c  = budget - window
    hi = min(2 c - c // 20, n - window)
    lo = 2 c - hi
    tokens of a layer = window + a line from hi (layer 0) to lo (last layer)
    ```

    All layers get the same budget if n < 2 c, if n <= budget, or if there is only one layer.

    Args:
        budget: Tokens (int), or a fraction in (0, 1] of n (float). It is exactly the mean over the layers.
        num_layers: The layers of the model.
        n: The tokens of the prompt.
        window: The rows that observe.

    Returns:
        The tokens of each layer, a list of ints.

    Raises:
        TypeError: A number has the wrong type.
        ValueError: A number is too small, or budget is less than window.

    Source: PyramidKV, Cai et al., 2024.
    """
    op = "pyramidkv_budgets"
    check_num_layers(op, num_layers)
    for name, value, low in (("num_layers", num_layers, 1), ("n", n, 0), ("window", window, 0)):
        check_int(op, name, value, low)
    num_layers, n, window = plain(num_layers), plain(n), plain(window)
    check_budget(op, budget)
    keep = budget_tokens(plain(budget), n)
    check_holds_window(op, keep, window)
    return [layer_budget(keep, n, window, layer, num_layers) for layer in range(num_layers)]


def layer_budget(budget: _T, n: _T, window: int, layer: int, num_layers: int) -> _T:
    """One layer's part of a budget for n tokens, as an int, or as an int tensor for many rows.

    The line is rounded up in the first half of the layers and mirrored in the second half, so the sum is exact.
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
    """Integers that order the prefix by (mean of the chunk, own score), ties by lower slot: fp32 [b, 1, n].

    scores: [b, Hk, n]. The integers are below 2 n and exact in fp32 for n <= 2^23.
    """
    b, _, n = scores.shape
    chunk = min(chunk, max(n, 1))
    count = -(-n // chunk)
    # The chunks of a row begin at its first valid slot: slot j of the grid is slot starts + j of the cache.
    grid = torch.arange(count * chunk, device=scores.device).expand(b, -1)
    first = torch.zeros(b, 1, dtype=torch.int64, device=scores.device) if starts is None else starts[:, None].long()
    last = (end[:, None] if isinstance(end, Tensor) else end) - window
    inside = grid + first < last
    means = shared_scores(scores).squeeze(1).gather(1, (grid + first).clamp(max=n - 1))
    usable = inside & means.isfinite()
    tokens = torch.where(usable, means, -torch.inf).unflatten(1, (count, chunk))  # [b, count, chunk]
    best = tokens.amax(2)
    total, size = torch.zeros_like(best), torch.zeros_like(best)
    for i in range(chunk):  # one by one, so that the order of the sum is fixed
        finite = tokens[:, :, i].isfinite()
        total = total + torch.where(finite, tokens[:, :, i] - best, 0.0)  # exact where all are equal, as after pooling
        size = size + finite
    chunks = torch.where(size > 0, best + total / size, -torch.inf)
    order = places(chunks).unsqueeze(-1) * chunk + places(tokens)
    ranks = torch.where(usable, (count * chunk - order).flatten(1).float(), torch.nan)
    back = (torch.arange(n, device=scores.device) - first).clamp(min=0)
    return ranks.gather(1, back).unsqueeze(1)
