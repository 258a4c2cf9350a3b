"""LagKV: keeps, of each partition of `lag` tokens, those that stand out most when seen by the next partition.

Source: "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important", Sec. 2.2 (Eq. 5-10); the
variants LocalKV and L2 norm: App. A.2. Decisions where paper and released code differ: docs/methods/lagkv.md.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import check_choice, check_finite, check_int
from ..lag import kept_length, kept_within, num_segments
from ..ops import lag_score, select_topk
from .base import HEAD_MODES, Policy, View
from .select import all_slots, negative_norms, places, shared_scores

#: score="l2" leaves these layers as they are.
L2_SKIPPED_LAYERS = (0, 1)
SINKS = 16


@dataclass(frozen=True, eq=False)
class LagKV(Policy):
    """LagKV. The slots behind the first `sinks` are cut into partitions of `lag` tokens. Of each partition but the last
    complete one the int(ratio * lag) tokens of the highest score stay, per head::

        N = (X - min Y) / (max Y - min Y)      per channel; X a partition, Y the next one
        score = softmax(std N of K) + v_weight * softmax(std N of V)

    Of n >= sinks + 2 lag tokens, sinks + int(ratio * lag) * ((n - sinks) // lag - 1) + lag + (n - sinks) % lag stay
    (Eq. 10), of fewer all.

    A cache compresses partitions as soon as the next one is complete: in decode once every `lag` tokens. However the
    tokens come, in one call, in chunks or one by one, the same slots stay, bit for bit. Rows of a padded batch keep
    what they keep alone: different numbers of tokens, which begin after `pads` empty slots.

    Attributes:
        lag: tokens of a partition.
        ratio: share of them that stays, in [0, 1].
        sinks: first tokens that always stay.
        v_weight: the weight of V's scores.
        reference: "lag", or "self" for LocalKV (Y is X itself).
        score: "std", or "l2": minus the key's norm. V, v_weight and reference are then not used, and layers 0 and 1
            stay whole, so layers differ in length.
        head_mode: "per_head"; "shared": one kept set for all heads, by the mean score; or "adaptive" (one-shot calls
            without padding): the heads share a partition's Hk * int(ratio * lag) tokens, by one threshold for their
            scores, which are comparable (Limitations), so heads differ in length and end in -1.
    """

    uses_positions: ClassVar[bool] = False

    fixed_budget: ClassVar[bool] = False

    lag: int = 1024
    ratio: float = 0.5
    _: KW_ONLY
    sinks: int = SINKS
    v_weight: float = 1.0
    reference: str = "lag"
    score: str = "std"
    head_mode: str = "per_head"

    @property
    def heads_alone(self) -> bool:
        return self.head_mode == "per_head"

    def check(self) -> None:
        check_lag_ratio(self.name, self.lag, self.ratio)
        check_int(self.name, "sinks", self.sinks, 0)
        check_finite(self.name, "v_weight", self.v_weight)
        check_choice(self.name, "reference", self.reference, ("lag", "self"))
        check_choice(self.name, "score", self.score, ("std", "l2"))
        check_choice(self.name, "head_mode", self.head_mode, HEAD_MODES)
        if self.head_mode == "adaptive" and self.score != "std":
            raise ValueError(f"LagKV: only score='std' is comparable between heads, got {self.score!r} with 'adaptive'")

    @property
    def kept(self) -> int:
        """Tokens that stay of a partition; may be 0."""
        return int(self.ratio * self.lag)

    @property
    def uniform_layers(self) -> bool:
        return self.score != "l2"

    @property
    def paged(self) -> bool:
        return self.score == "std"

    def check_cache(self, layer: int, num_layers: int) -> None:
        if self.head_mode == "adaptive":
            raise ValueError(
                "LagKV: the heads of a cache keep equally many tokens, expected head_mode 'per_head' or 'shared', got "
                "'adaptive'"
            )

    def whole(self, view: View) -> bool:
        return self.score == "l2" and view.layer in L2_SKIPPED_LAYERS

    def scores(self, view: View, prefix: int) -> Tensor:
        """Of the partitions of [prefix, n) that have a next one: fp32 [b, Hk, S, lag]."""
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
            return negative_norms(k[:, :, prefix:last]).unflatten(2, (count, self.lag))
        # Each row has its own partitions; slots beyond it belong to partitions that nothing is selected from.
        grid = (starts[:, None] + torch.arange(prefix, last, device=k.device)).clamp(max=n - 1)
        norms = negative_norms(k).gather(2, grid[:, None].expand(-1, view.heads, -1))
        return norms.unflatten(2, (count, self.lag))

    def select(self, view: View) -> Tensor:
        return self._partitions(view, self.sinks)

    def evict(self, view: View) -> Tensor | None:
        if self.whole(view):
            return None
        if view.starts is None:
            kept, view.state["static"] = self._row(view, view.state.get("static", self.sinks))
            return kept
        # Rows differ in length, so each has its own partitions: row by row, as if it were alone.
        pads, state = view.starts.tolist(), view.state.get("row_static")
        static = [self.sinks] * len(pads) if state is None else state.tolist()
        rows, evicts = [], False
        for row, pad in enumerate(pads):
            tokens = slice(row, row + 1), slice(None), slice(pad, None)
            kept, static[row] = self._row(View(view.k[tokens], view.v[tokens]), static[row])
            evicts |= kept is not None
            if kept is None:
                rows.append(torch.arange(pad, view.n, device=view.k.device).expand(view.heads, -1))
            else:
                rows.append(kept[0] + pad)
        if not evicts:
            return None
        view.state["row_static"] = torch.tensor(static, device="cpu")
        width = max(indices.shape[1] for indices in rows)
        return torch.stack([F.pad(indices, (width - indices.shape[1], 0), value=-1) for indices in rows])

    def held(self, n: int, prompt: int) -> int:
        """Eq. 10."""
        return kept_length(n, self.sinks, self.lag, self.kept)

    def resumed(self, before: int, n: int, prompt: int) -> Policy:
        return replace(self, sinks=self.sinks + self.kept * num_segments(before, self.sinks, self.lag))

    def _row(self, view: View, static: int) -> tuple[Tensor | None, int]:
        """What stays of rows without padding (None: everything), and the new length of the static part: the slots that
        are never looked at again, the sinks and what was kept of older partitions."""
        count = num_segments(view.n, static, self.lag)
        if count == 0:
            return None, static
        return self._partitions(view, static), static + count * self.kept

    def _partitions(self, view: View, prefix: int) -> Tensor:
        """The rule: each partition's highest scores, and all slots that have none. int64 [b, Hk, m]."""
        scores = self.scores(view, prefix)
        if self.head_mode == "adaptive":
            return self._by_threshold(scores, view, prefix)
        if self.head_mode == "shared":
            scores = shared_scores(scores)
        indices = select_topk(scores, k=self.kept, sinks=prefix, seq_len=view.n, **view.spans)
        return indices.expand(-1, view.heads, -1)

    def _by_threshold(self, scores: Tensor, view: View, prefix: int) -> Tensor:
        """The rule of head_mode="adaptive": int64 [b, Hk, m], -1 last in heads that keep fewer than the most."""
        if not (view.starts is None and view.lengths is None):
            raise ValueError("LagKV: head_mode='adaptive' takes no starts or lengths, got some")
        b, heads, count, lag = scores.shape
        scores = scores.nan_to_num(-torch.inf)
        ranks = places(scores.transpose(1, 2).flatten(2)).view(b, count, heads, lag).transpose(1, 2)
        stays = torch.ones(b, heads, view.n, device=scores.device)
        stays[:, :, prefix : prefix + count * lag] = (ranks < heads * self.kept).flatten(2).float()
        tokens = stays.sum(-1, dtype=torch.int32)
        return select_topk(stays, k=int(tokens.max()), budgets=tokens) if tokens.numel() else all_slots(view)

    @classmethod
    def at_budget(
        cls, budget: int, n: int, num_layers: int, streaming: bool, options: dict[str, Any]
    ) -> dict[str, Any]:
        """The largest lag, at most 1024, the paper's, whose sinks, last partition and rest take half of the budget or
        less; then the ratio. What is left of a small budget may be less than a token for each partition: then none is
        chosen, and the lag is the one that keeps most."""
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
                f"LagKV: sinks, last partition and rest of {n} tokens are {fixed} with lag {lag}, over {budget}"
            )
        ratio = min(1.0, (kept + 0.5) / lag)  # int(ratio * lag) is kept, in any rounding
        return {"sinks": sinks, "lag": lag, "ratio": ratio}


def check_lag_ratio(op: str, lag: int, ratio: float, names: tuple[str, str] = ("lag", "ratio")) -> None:
    """names: what the caller calls the two."""
    check_int(op, names[0], lag, 1)
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)):
        raise TypeError(f"{op}: {names[1]} must be a float, got {type(ratio).__name__} {ratio!r}")
    if not 0 <= ratio <= 1:
        raise ValueError(f"{op}: {names[1]} must be in [0, 1], got {ratio}")
