"""LagKV: keeps the tokens of each partition that stand out most against the range of the next partition.

Source: "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important", Sec. 2.2 (Eq. 5-10); the
variants LocalKV and L2 norm: App. A.2. Decisions where paper and released code differ: docs/methods/lagkv.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import lag_score, select_topk
from ..ops.checks import check_choice, check_finite, check_int
from ..ops.lag import kept_length, kept_within, num_segments
from .base import HEAD_MODES, HeadMode, Needs, Policy
from .budgets import fraction_of
from .select import all_slots, negative_norms, places, shared_scores
from .view import View

Reference = Literal["lag", "self"]
Norm = Literal["std", "l2"]
REFERENCES: tuple[Reference, ...] = get_args(Reference)
NORMS: tuple[Norm, ...] = get_args(Norm)
#: With score="l2" these layers keep everything.
L2_SKIPPED_LAYERS = (0, 1)
SINKS = 16


@dataclass(frozen=True, eq=False)
class LagKV(Policy):
    """LagKV: keeps the tokens of each partition that stand out most against the range of the next partition.

    The slots after the first `sinks` are cut into partitions of `lag` tokens. Of each complete partition except the
    last, LagKV keeps the floor(ratio * lag) tokens with the highest scores, per head:

    ```text
    N     = (X - min Y) / (max Y - min Y)      per channel; X is a partition, Y the next one
    score = softmax(std N of K) + v_weight * softmax(std N of V)
    ```

    Of n >= sinks + 2 lag tokens it keeps sinks + floor(ratio * lag) ((n - sinks) // lag - 1) + lag + (n - sinks) % lag
    (Eq. 10), and of fewer tokens all.

    A cache compresses a partition as soon as the next one is complete, in decode once every `lag` tokens. The kept
    slots are the same, bit for bit, whether tokens come in one call, in chunks or one by one. Each row of a padded
    batch keeps the tokens that it would keep alone. Rows may therefore differ in length; their tokens begin after
    `pads` empty slots.

    Attributes:
        lag: Tokens per partition.
        ratio: The fraction of them to keep, in [0, 1].
        sinks: First tokens that are always kept.
        v_weight: The weight of V's scores.
        reference: "lag", or "self" for LocalKV (Y is X itself).
        score: "std", or "l2": minus the L2 norm of the key. With "l2", V, v_weight and reference are ignored, and
            layers 0 and 1 keep everything, so layers differ in length.
        head_mode: "per_head": each head keeps its own tokens. "shared": all heads keep the same tokens, chosen by their
            mean score. "adaptive" (one-shot calls without padding only): the heads share the tokens that they
            keep of a partition by one threshold for their scores, which are comparable (Limitations). Heads then differ
            in length and end in -1.

    Source: LagKV, Sec. 2.2, Eq. 5-10; LocalKV and L2 norm: App. A.2.
    """

    budget_settings: ClassVar[tuple[str, ...]] = ("lag", "ratio")
    function_names: ClassVar[Mapping[str, str]] = {"lag": "L", "ratio": "r"}  # the paper's

    fixed_budget: ClassVar[bool] = False

    lag: int = 1024
    ratio: float = 0.5
    _: KW_ONLY
    sinks: int = SINKS
    v_weight: float = 1.0
    reference: Reference = "lag"
    score: Norm = "std"
    head_mode: HeadMode = "per_head"

    @property
    def heads_alone(self) -> bool:
        return self.head_mode == "per_head"

    @property
    def needs(self) -> Needs:
        return Needs(dense=self.score != "std", positions=False)

    def check(self) -> None:
        names = self.function_names if self.of_function else {}
        lag, ratio = (names.get(x, x) for x in ("lag", "ratio"))
        check_int(self.name, lag, self.lag, 1)
        if isinstance(self.ratio, bool) or not isinstance(self.ratio, (int, float)):
            raise TypeError(f"{self.name}: {ratio} must be a float, got {type(self.ratio).__name__} {self.ratio!r}")
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"{self.name}: {ratio} must be in [0, 1], got {self.ratio}")
        check_int(self.name, "sinks", self.sinks, 0)
        check_finite(self.name, "v_weight", self.v_weight)
        check_choice(self.name, "reference", self.reference, REFERENCES)
        check_choice(self.name, "score", self.score, NORMS)
        check_choice(self.name, "head_mode", self.head_mode, HEAD_MODES)
        if self.head_mode == "adaptive" and self.score != "std":
            raise ValueError(
                f"{self.name}: head_mode='adaptive' needs score='std', whose scores are comparable between heads, got "
                f"{self.score!r}"
            )

    @property
    def kept(self) -> int:
        """The tokens kept of a partition; may be 0."""
        return fraction_of(self.ratio, self.lag)

    @property
    def uniform_layers(self) -> bool:
        return self.score != "l2"

    def check_cache(self, layer: int, num_layers: int) -> None:
        if self.head_mode == "adaptive":
            raise ValueError(
                "LagKV: the heads of a cache keep the same number of tokens, expected head_mode 'per_head' or "
                "'shared', got 'adaptive'"
            )

    def whole(self, view: View) -> bool:
        return self.score == "l2" and view.layer in L2_SKIPPED_LAYERS

    def scores(self, view: View, prefix: int) -> Tensor:
        """The scores of the partitions of [prefix, n) that have a next one: fp32 [b, Hk, S, lag]."""
        k, n, starts = view.k, view.n, view.starts
        if self.score == "std":
            return lag_score(
                k,
                view.v,
                lag=self.lag,
                prefix=prefix,
                v_weight=self.v_weight,
                self_reference=self.reference == "self",
                **view.slots,
            )
        count = num_segments(n, prefix, self.lag)
        last = prefix + count * self.lag
        if starts is None:
            return negative_norms(self.name, k[:, :, prefix:last]).unflatten(2, (count, self.lag))
        # Each row has its own partitions. Slots after the row's end lie in partitions from which nothing is selected.
        grid = (starts[:, None] + torch.arange(prefix, last, device=k.device)).clamp(max=n - 1)
        norms = negative_norms(self.name, k).gather(2, grid[:, None].expand(-1, view.heads, -1))
        return norms.unflatten(2, (count, self.lag))

    def select(self, view: View) -> Tensor:
        return self._partitions(view, self.sinks)

    def evict(self, view: View) -> Tensor | None:
        if self.whole(view):
            return None
        if view.starts is None:
            kept, view.state["static"] = self._row(view, view.state.get("static", self.sinks))
            return kept
        # Rows differ in length, so each has its own partitions and is evicted as if it were alone.
        pads, state = view.starts.tolist(), view.state.get("row_static")
        static = [self.sinks] * len(pads) if state is None else state.tolist()
        rows, evicts = [], False
        for row, pad in enumerate(pads):
            tokens = slice(row, row + 1), slice(None), slice(pad, None)
            kept, static[row] = self._row(View(view.k[tokens], view.v[tokens]), static[row])
            evicts |= kept is not None
            if kept is None:
                rows.append(torch.arange(pad, view.n, device=view.keys.device).expand(view.heads, -1))
            else:
                rows.append(kept[0] + pad)
        if not evicts:
            return None
        view.state["row_static"] = torch.tensor(static, device="cpu")
        width = max(indices.shape[1] for indices in rows)
        return torch.stack([F.pad(indices, (width - indices.shape[1], 0), value=-1) for indices in rows])

    def held(self, n: int, prompt: int) -> int:
        """The whole prompt until its last token; then the kept length of Eq. 10."""
        return n if n < prompt else kept_length(n, self.sinks, self.lag, self.kept)

    def resumed(self, before: int, n: int, prompt: int) -> Policy:
        return replace(self, sinks=self.sinks + self.kept * num_segments(before, self.sinks, self.lag))

    def _row(self, view: View, static: int) -> tuple[Tensor | None, int]:
        """The slots to keep of rows without padding (None: all), and the new length of the static part.

        The static part is never compressed again: the sinks and the tokens kept from older partitions.
        """
        count = num_segments(view.n, static, self.lag)
        if count == 0:
            return None, static
        return self._partitions(view, static), static + count * self.kept

    def _partitions(self, view: View, prefix: int) -> Tensor:
        """The rule: each partition's highest scores, and all slots without a score. int64 [b, Hk, m]."""
        scores = self.scores(view, prefix)
        if not scores.shape[2]:  # no segment; `select_topk` would prepare for segments of any length
            return all_slots(view)
        if self.head_mode == "adaptive":
            return self._by_threshold(scores, view, prefix)
        if self.head_mode == "shared":
            scores = shared_scores(scores)
        indices = select_topk(scores, k=self.kept, sinks=prefix, seq_len=view.n, **view.spans)
        return indices.expand(-1, view.heads, -1)

    def _by_threshold(self, scores: Tensor, view: View, prefix: int) -> Tensor:
        """The rule of head_mode="adaptive": int64 [b, Hk, m]; heads that keep fewer than m slots end in -1."""
        if not (view.starts is None and view.lengths is None):
            raise ValueError(
                f"{self.name}: with head_mode='adaptive', starts and lengths must be None, got a tensor; compress rows "
                "one by one"
            )
        b, heads, count, lag = scores.shape
        scores = scores.nan_to_num(-torch.inf)
        ranks = places(scores.transpose(1, 2).flatten(2)).view(b, count, heads, lag).transpose(1, 2)
        stays = torch.ones(b, heads, view.n, dtype=torch.float32, device=scores.device)
        stays[:, :, prefix : prefix + count * lag] = (ranks < heads * self.kept).flatten(2).float()
        tokens = stays.sum(-1, dtype=torch.int32)
        return select_topk(stays, k=int(tokens.max()), budgets=tokens) if tokens.numel() else all_slots(view)

    @classmethod
    def at_budget(
        cls, budget: int, n: int, num_layers: int, streaming: bool, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Chooses the lag, then the ratio.

        The lag is the largest power of two up to 1024 (the paper's) with which the sinks, the last partition and the
        remainder take at most half of the budget. If a small budget leaves less than one token per partition, no lag
        qualifies, and the lag is the one that keeps the most tokens.
        """
        sinks, lag = options.get("sinks", SINKS), options.get("lag")
        if lag is not None and lag < 1:
            raise ValueError(f"LagKV: lag must be at least 1, got {lag}")
        if lag is None:
            plans = [(x, *kept_within(n, sinks, x, budget)) for x in (2**i for i in range(10, 3, -1))]
            within = {x: kept_length(n, sinks, x, kept) for x, kept, _ in plans if kept >= 0}
            chooses = [x for x, kept, fixed in plans if kept > 0 and 2 * fixed <= budget]
            lag = chooses[0] if chooses else max(within, key=lambda x: within[x], default=plans[-1][0])
        kept, fixed = kept_within(n, sinks, lag, budget)
        if kept < 0:
            raise ValueError(
                f"LagKV: budget must hold the sinks, the last partition and the remainder, expected at least {fixed} "
                f"of {n} tokens with lag {lag}, got {budget}"
            )
        ratio = min(1.0, (kept + 0.5) / lag)  # floor(ratio * lag) == kept however it rounds
        return {"sinks": sinks, "lag": lag, "ratio": ratio}
