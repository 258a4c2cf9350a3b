"""KVzap: keeps the tokens to which learned gates give high scores, in prompts and in decode.

Source: "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning", Jegou and Jeblick, 2026. Decisions:
docs/methods/kvzap.md.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops.checks import check_finite, check_hidden
from .base import Compressed, KeyPolicy, LayerSpans, Needs, one_shot
from .budgets import Budget, budget_tokens
from .gates import Gates
from .select import select_budget
from .stored import from_file
from .view import View


@dataclass(frozen=True, eq=False)
class KVzap(KeyPolicy):
    """KVzap: keeps the tokens to which learned gates give the highest scores, or all above a threshold.

    ```text
    score[h, i] = gate of the layer(hidden state of token i)[h]          a prediction of log KVzip+ (`KVzip`)
    ```

    A token is scored once, by the hidden state that the layer's attention is called with when the token arrives. The
    scores know no question. K and V are not read: a linear gate takes hidden * Hk products per token.

    With a threshold, how much is kept follows from the text: a head keeps the tokens that score at least the threshold,
    within the budget, and those that are always kept. A budget of 1.0 sets no limit:

    ```python
    policy = kvops.KVzap(1.0, gates="model.safetensors", threshold=-4.0, recent=128, head_mode="adaptive")
    ```

    Attributes:
        budget: See `BudgetPolicy`. With a threshold, the upper limit.
        sinks: See `BudgetPolicy`.
        recent: See `KeyPolicy`.
        head_mode: See `BudgetPolicy`.
        shares: See `BudgetPolicy`.
        buffer: See `KeyPolicy`. With a threshold a cache evicts in decode after this many tokens; a fraction of a
            budget of 1.0 is one of all tokens seen, so give it in tokens.
        protect: See `KeyPolicy`.
        gates: `Gates` of the model (`kvops.fit_gates`), or the path of their file, which is read at once: one that
            `Gates.save` wrote, or the model.safetensors of a published KVzap model. The first step or call needs them.
        threshold: The least score of a token that is kept, one for all layers. It needs head_mode="adaptive" and
            `recent` in tokens. KVzap's gates predict logarithms: -4 keeps what adds at least 1.8 % to a hidden state.
            None: only the budget counts.

    Source: KVzap, Jegou and Jeblick, 2026.
    """

    argument: ClassVar[str] = "hidden"

    _: KW_ONLY
    sinks: int = 4
    recent: int | float = 0.125
    gates: Gates | str | Path | None = field(default=None, repr=False)
    threshold: float | None = None

    @property
    def needs(self) -> Needs:
        return Needs(positions=False, per_slot=("scores",), inputs=True)

    @property
    def heads_alone(self) -> bool:
        return False  # gates are those of all heads

    def check(self) -> None:
        if isinstance(self.gates, (str, Path)):
            object.__setattr__(self, "gates", from_file(self.name, "gates", self.gates, Gates.load))
        if not isinstance(self.gates, (Gates, type(None))):
            raise TypeError(
                f"{self.name}: gates must be a kvops.Gates or the path of their file, got {type(self.gates).__name__}"
            )
        if self.threshold is not None:
            check_finite(self.name, "threshold", self.threshold)
            if self.head_mode != "adaptive" or not isinstance(self.recent, int):
                raise ValueError(
                    f"{self.name}: with a threshold heads differ in length, expected head_mode='adaptive' and recent "
                    f"in tokens, got {self.head_mode!r} and {self.recent!r}"
                )
        super().check()

    def check_cache(self, layer: int, num_layers: int) -> None:
        super().check_cache(layer, num_layers)
        if len((gates := self._given()).layers) != num_layers:
            raise ValueError(
                f"{self.name}: gates must be those of the {num_layers} layers that evict, got {gates!r}; kvops.Cache "
                "takes layer= and num_layers="
            )

    def _given(self) -> Gates:
        if self.gates is None:
            raise ValueError(
                f"{self.name}: gates must be a kvops.Gates of the model or the path of their file, got None; fit them "
                "with kvops.fit_gates(*kvops.hf.gate_data(model, ids, tokenizer=tokenizer))"
            )
        assert isinstance(self.gates, Gates)  # `check` reads a path
        return self.gates

    def remember(self, view: View) -> None:
        new = self._scored(view, view.hidden)
        seen = view.state.get("scores")
        view.state["scores"] = new if seen is None else torch.cat((seen, new), 2)

    def scores(self, view: View) -> Tensor:
        scores: Tensor = view.state["scores"]
        return scores

    def _scored(self, view: View, hidden: Tensor) -> Tensor:
        """The scores of the tokens of these hidden states: fp32 [b, Hk, t]."""
        gates, layer = self._given(), view.layer or 0
        if view.layer is None and len(gates.layers) > 1:
            raise TypeError(f"{self.name}: layer must name one of {gates!r}, got None; pass it to compress")
        try:
            scores = gates.scores(hidden, layer).to(view.keys.device)
        except ValueError as error:
            raise ValueError(f"{self.name}: layer {layer}: {error}") from error
        if scores.shape[1] != view.heads:
            raise ValueError(
                f"{self.name}: gates of layer {layer} must score {view.heads} KV heads, got {scores.shape[1]}"
            )
        return scores

    def choose(self, scores: Tensor, view: View, budget: Budget, *, recent: int | float = 0, **options: Any) -> Tensor:
        if self.threshold is None:
            return super().choose(scores, view, budget, recent=recent, **options)
        scores = view.without_gaps(scores)
        slots = torch.arange(view.n, device=scores.device)
        begin, end = (x[:, None, None] if isinstance(x, Tensor) else x for x in (view.spans["starts"], view.end))
        always = view.first(self.sinks) | (slots >= end - recent)
        valid = (slots < end) & (slots >= (0 if begin is None else begin))
        if (gaps := view.gaps) is not None:
            valid = valid & ~gaps
        budgets = (valid & (always | (scores >= self.threshold))).sum(-1, dtype=torch.int32)
        if self.shares is not None or budget_tokens(budget, view.n) < view.n:
            budgets = torch.minimum(budgets, self._shares(scores, view, budget, recent))
        budgets = budgets.clamp(min=max(1, self.sinks + int(recent)))  # of rows with fewer tokens, all are kept
        return select_budget(
            self.name, scores, view.heads, budgets, sinks=self.sinks, recent=recent, **view.spans, **options
        )

    def full(self, view: View, keep: int) -> bool:
        if self.threshold is None or (view.new == 1 and self.buffer is None):
            return super().full(view, keep)
        return self.of_prompt(view) or view.seen - view.state.get("evicted", 0) >= self.buffer_tokens(keep)

    def evict(self, view: View) -> Tensor | None:
        indices = super().evict(view)
        if indices is not None:
            view.state["evicted"] = view.seen
        return indices

    @one_shot
    def compress(  # type: ignore[override]  # the hidden states
        self, k: Tensor, v: Tensor, hidden: Tensor, **call: Unpack[LayerSpans]
    ) -> Compressed:
        """Apply the rule once to a whole cache.

        Args:
            k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
            v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
            hidden: Floating point [b, n, hidden], what the layer's attention was called with, for all slots.
            **call: starts, lengths, fill_invalid, out, layout, layer, num_layers; see `Spans` and `LayerSpans`. With
                gates of several layers `layer` must be given.

        Returns:
            (k, v, indices) of the kept slots; see `Compressed`.

        Raises:
            TypeError: An argument has the wrong type. Nothing has been written.
            ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.
        """
        view, out = self._view(k, v, **call)
        check_hidden(self.name, "hidden", hidden, view.rows, view.n)
        view.state["scores"] = self._scored(view, hidden)
        return self._compress(view, out)

    @classmethod
    def at_budget(
        cls, budget: int, n: int, num_layers: int, streaming: bool, options: dict[str, Any]
    ) -> dict[str, Any]:
        settings = super().at_budget(budget, n, num_layers, streaming, options) | {"sinks": min(4, budget)}
        if options.get("threshold") is not None:
            settings |= {"head_mode": "adaptive", "recent": budget // 8}
        return settings
