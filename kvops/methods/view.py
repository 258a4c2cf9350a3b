"""What a policy's rule sees of a cache: `View`."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.checks import check_int, check_num_layers, plain
from ..ops.rope import Rope


@dataclass(frozen=True)
class OfLayer:
    """The statistics of one layer's queries, as `QueryStatistics` has them; those of prompts have a batch dim.

    Attributes:
        mean: fp32 [Hq, d] or [b, Hq, d], before RoPE.
        cov: fp32 [Hq, d, d] or [b, Hq, d, d].
        norms: fp32 [Hq, pairs]; None for statistics of prompts.
        rope: The model's rotary embedding.
        scale: The factor of the logits; None: 1 / sqrt(d).
    """

    mean: Tensor
    cov: Tensor
    norms: Tensor | None
    rope: Rope
    scale: float | None


class LayerInputs(NamedTuple):
    """What the attention module of a layer is called with in a step of t tokens, padding included.

    Attributes:
        hidden: [b, t, hidden], the hidden states, as the module receives them: in most models after the layer's norm.
        token_ids: int64 [b, t]; None if unknown, as with embeddings in their place.
        module: The module itself, for its weights and config; None if unknown.
    """

    hidden: Tensor
    token_ids: Tensor | None = None
    module: Any = None


@dataclass
class View:
    """The cached entries of one layer, as a policy's rule sees them.

    They are the arguments of a one-shot call, or the contents of a cache including the tokens of the current step.

    Attributes:
        k: [b, Hk, n, d], or pages if there is a block table. A rule that supports pages reads them with operators.
        v: [b, Hk, n, dv], or pages.
        starts: int32 [b] or None, the first valid slot of each row.
        lengths: int32 [b] or None, the number of valid slots of each row; None means all slots from `starts` on.
        fill_invalid: Rows with fewer valid slots than the budget keep invalid slots instead of -1.
        layer: The index of the layer among the layers that evict; None if the caller did not give it.
        num_layers: The number of layers that evict; None if the caller did not give it.
        seen: Tokens seen so far, padding included; n in a one-shot call.
        new: How many of the last slots belong to the current step; n in a one-shot call.
        kept: int64 [b, Hk, <= n] or None, the positions of the first slots of a cache. The positions of the other slots
            are consecutive and end at `seen`. In a cache whose heads differ in length, those of all slots; -1 in the
            gaps of heads that hold fewer slots than the longest, where K and V are NaN.
        padding: int32 [b] or None, the columns of padding before each row's first token.
        observed: The attention that queries gave to each key (`QueryPolicy`): fp32 [b, Hk, n] or [b, Hq, n]. With
            several `reductions`, as in `DefensiveKV`, the heads of each follow one another.
        window: How many of the newest tokens gave the observing queries; these tokens are kept.
        rope: If not None, keys are rotated at their slots, and `move` must rotate them to their new slots and then set
            it to None.
        state: What the policy remembers about the layer from one eviction to the next. Its tensors have the batch as
            first dim. An eviction replaces entries and never writes to their memory.
        block_table: int32 [b, max_pages] or None; see `Spans`.
        tokens: int64 [b] or None, the tokens that each request of an engine has seen; None: those of `seen`, which all
            rows share.
        whole_prompt: A cache keeps the whole prompt (`Policy.protect`), with its padding.
        statistics: The statistics of each row's queries, if the policy needs them (`Needs.statistics`); None before a
            cache has gathered any.
        reference: Reference queries and what they get from all keys (`AttentionMatching`).
        values: [b, Hk, m, dv], what `move` writes in place of the values of the kept slots; None: these values.
        inputs: What the attention module was called with in the current step, if the policy needs it (`Needs.inputs`).
            Its tokens are those of the last `new` slots. A rule reads `hidden`, `token_ids` and `module`.
        heads: The number of KV heads.
    """

    k: Tensor
    v: Tensor
    starts: Tensor | None = None
    lengths: Tensor | None = None
    fill_invalid: bool = False
    layer: int | None = None
    num_layers: int | None = None
    seen: int = -1
    new: int = -1
    kept: Tensor | None = None
    padding: Tensor | None = None
    observed: Tensor | None = None
    window: int = 0
    rope: Rope | None = None
    state: dict[str, Any] = field(default_factory=dict)
    block_table: Tensor | None = None
    tokens: Tensor | None = None
    whole_prompt: bool = False
    statistics: OfLayer | None = None
    inputs: LayerInputs | None = None
    reference: Any = None
    values: Tensor | None = None
    heads: int = field(init=False)

    def __post_init__(self) -> None:
        self.heads = self.k.shape[1]
        if self.seen < 0:
            self.seen = self.new = self.k.shape[2] if self.block_table is None else self.n
            self.padding = self.starts

    def changed(self, **attributes: Any) -> View:
        """A copy with other values of some attributes."""
        twin = copy.copy(self)
        for name, x in attributes.items():
            setattr(twin, name, x)
        twin.heads = twin.keys.shape[1]
        return twin

    @property
    def keys(self) -> Tensor:
        """The keys as they are stored, for their shape [b, Hk, n, any] and device; a cache may have rounded them."""
        return self.k

    @property
    def scored_keys(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The keys as `window_scores` reads them without a copy, and its further arguments for them."""
        return self.k, {}

    @property
    def n(self) -> int:
        """The number of slots."""
        return self.k.shape[2] * (1 if self.block_table is None else self.block_table.shape[1])

    @property
    def rows(self) -> int:
        """The number of rows of the batch, or of requests."""
        return len(self.k if self.block_table is None else self.block_table)

    @property
    def end(self) -> Tensor | int:
        """One past each row's last valid slot: n for all rows, or int32 [b]."""
        if self.lengths is None:
            return self.n
        return (self.lengths if self.starts is None else self.starts + self.lengths).clamp(0, self.n)

    def row_tokens(self) -> list[int]:
        """The tokens of each row so far, without padding."""
        if self.lengths is not None:
            return self.lengths.clamp(0, self.n).tolist()
        return [self.seen] * self.rows if self.padding is None else (self.seen - self.padding).clamp(min=0).tolist()

    @property
    def spans(self) -> dict[str, Any]:
        """starts, lengths and fill_invalid, as a selection takes them. Padding that must stay counts as valid."""
        starts = None if self.whole_prompt else self.starts
        return {"starts": starts, "lengths": self.lengths, "fill_invalid": self.fill_invalid}

    @property
    def slots(self) -> dict[str, Any]:
        """starts, lengths and block_table, as the operators that read K and V take them."""
        return {"starts": self.starts, "lengths": self.lengths, "block_table": self.block_table}

    def first(self, count: int) -> Tensor:
        """Which slots are the first `count` of their row: bool [n], or [b, 1, n]."""
        slots, starts = torch.arange(self.n, device=self.keys.device), self.spans["starts"]
        begin = 0 if starts is None else starts[:, None, None]
        return (slots >= begin) & (slots < begin + count)

    def behind(self, count: int) -> tuple[Tensor | None, Tensor | None]:
        """The starts and lengths, as a selection takes them, without the first `count` valid slots of each row."""
        starts, lengths = self.spans["starts"], self.lengths
        if not count:
            return starts, lengths
        begin = torch.zeros(self.rows, dtype=torch.int32, device=self.keys.device) if starts is None else starts
        valid = self.n - begin if lengths is None else lengths
        return begin + valid.clamp(max=count), (valid - count).clamp(min=0)

    @property
    def gaps(self) -> Tensor | None:
        """Which slots are the gaps of heads that hold fewer than the longest: bool [b, Hk, n]; None if there are none.

        In a gap K and V are NaN. Operators leave it out; a rule's own sums over tokens must.
        """
        return None if self.kept is None or self.kept.shape[2] < self.n else self.kept < 0

    def without_gaps(self, scores: Tensor) -> Tensor:
        """The scores, [b, Hk, n], with NaN in the gaps."""
        gaps = self.gaps
        return scores if gaps is None else scores.masked_fill(gaps, torch.nan)

    @property
    def seen_by_queries(self) -> Tensor:
        """`observed`, which is never None in a rule that uses queries."""
        assert self.observed is not None
        return self.observed

    @property
    def hidden(self) -> Tensor:
        """The hidden states of the step, [b, new, hidden]; see `LayerInputs`. Raises RuntimeError if unknown."""
        return self._given("hidden")

    @property
    def token_ids(self) -> Tensor:
        """The token ids of the step, int64 [b, new]. Raises RuntimeError if unknown."""
        return self._given("token_ids")

    @property
    def module(self) -> Any:
        """The attention module. Raises RuntimeError if unknown."""
        return self._given("module")

    def _given(self, name: str) -> Any:
        if self.inputs is None:
            raise RuntimeError(
                f"View.{name}: expected what the attention module was called with, got none; it takes a policy that "
                "declares kvops.Needs(inputs=True), and kvops.hf.compress, kvops.hf.generate or inputs= of "
                "kvops.Cache.attend"
            )
        if (found := getattr(self.inputs, name)) is None:
            raise RuntimeError(
                f"View.{name}: expected it among the inputs, got None (with embeddings there are no ids)"
            )
        return found

    def layer_and_count(self, op: str) -> tuple[int, int]:
        """layer and num_layers, for the policies that need them."""
        layer, num_layers = self.layer, self.num_layers
        if layer is None or num_layers is None:
            raise TypeError(
                f"{op}: layer and num_layers must be ints, got {layer!r} and {num_layers!r}; pass both to compress"
            )
        check_int(op, "layer", layer, 0)
        check_num_layers(op, num_layers)
        if layer >= num_layers:
            raise ValueError(f"{op}: layer must lie in [0, num_layers), expected less than {num_layers}, got {layer}")
        return plain(layer), plain(num_layers)

    def next_position(self) -> int | Tensor:
        """The position of the token after the cached ones, padding left out: an int, or int64 [b]."""
        if self.tokens is not None:
            return self.tokens
        position: int | Tensor = self.seen - self.n + self.end
        if self.padding is not None:
            position = position - self.padding
        return position if isinstance(position, int) else position.long()

    def positions(self) -> Tensor:
        """The logical position of each slot, padding included: int64 [b, Hk, n]."""
        kept = 0 if self.kept is None else self.kept.shape[2]
        first, device = self.seen - self.n + kept, self.keys.device
        new = torch.arange(first, self.seen, device=device).expand(self.rows, self.heads, -1)
        return new if self.kept is None else torch.cat((self.kept, new), 2)

    def row_positions(self) -> Tensor:
        """`positions`, counted from each row's first token: int32."""
        position = self.positions()
        return (position if self.padding is None else position - self.padding[:, None, None]).int()
