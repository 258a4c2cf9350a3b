"""KVzip: keeps the tokens that the model attends to when it repeats its own prompt.

Source: "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction", Kim et al., 2025. Decisions where
paper and released code differ: docs/methods/kvzip.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops.api import Reduce
from ..ops.checks import (
    check_bool,
    check_hidden,
    check_queries,
    inference_only,
)
from ..ops.window import summed_scores
from .base import Compressed, LayerSpans, Needs, one_shot
from .budgets import budget_tokens
from .projection import Projection, output_norms
from .queries import Logits
from .repeating import WORDS, RepeatPolicy, rows_of_chunk, tokens_of_chunk
from .select import gather_rows
from .view import View


class RepeatCall(LayerSpans, Logits, total=False):
    """The options of `KVzip.compress`: `LayerSpans`, `Logits`, and what weights the rows of the passes.

    Attributes:
        hidden_repeat: With plus=True: [b, t, hidden], what the layer's attention was called with in the passes.
        gradients_repeat: With gradients=True: [b, t], the norms of the gradients of the passes' rows.
    """

    hidden_repeat: Tensor | None
    gradients_repeat: Tensor | None


@dataclass(frozen=True, eq=False)
class KVzip(RepeatPolicy):
    """KVzip: keeps the whole prompt until the model has read it a second time, which shows what the prompt needs.

    The second reading is in passes, one for each `chunk` of the prompt: an instruction to repeat it, the tokens before
    the chunk, the end of the user's turn, then the chunk's own tokens. The queries of a pass score the chunk's keys in
    the cache:

    ```text
    a[i, j] = softmax over j of scale * q_i . k_j      j: the sinks, the chunk, and the tokens of the pass up to i
    score   = max over the group's query heads and the rows i of the pass of a[i, j]      for j in the chunk
    ```

    KVzip+ (plus=True) scores what a token adds to the hidden state h_i that the layer's attention is called with:

    ```text
    score   = max over the group's query heads h and the rows i of the pass of a[i, j] * ||W_O^h v_j|| / ||h_i||
    ```

    KVgrad (gradients=True) weights the rows by how sensitive the model's last hidden states are to what the layer's
    output projection returns for them, r_i, instead:

    ```text
    score   = max over the group's query heads h and the rows i of the pass of a[i, j] * ||W_O^h v_j|| * g_i
    g_i     = ||d Phi / d r_i||        Phi: the sum over the pass of the squared norms of what the last layer returns
    ```

    The tokens of a pass are forgotten afterwards. The scores know no question, so one compressed prompt can serve many.
    A one-shot call (`compress`) gets the queries and keys of the passes. A cache runs them:

    ```python
    cache = kvops.Cache(kvops.KVzip(1024))
    cache.attend(q, k, v)                 # the prompt, in one step or in chunks; everything is kept
    with cache.repeating(0):              # a pass for the chunk that begins at token 0; then for the other chunks
        cache.attend(q, k, v)
    cache.evict()                         # keep the budget's best tokens
    ```

    Attributes:
        budget: See `BudgetPolicy`.
        sinks: First tokens that are always kept. They also take part in the softmax of the passes for later chunks.
        head_mode: See `BudgetPolicy`.
        scope: See `RepeatPolicy`.
        group_reduce: See `QueryPolicy`.
        plus: The scores of KVzip+.
        gradients: The scores of KVgrad, whose chunks have 256 tokens. `kvops.hf` computes the gradients: one more
            forward and one backward for each pass, through torch's attention.
        w_o: With plus=True or gradients=True the weights of the output projection; see `CriticalKV`.
        chunk: See `RepeatPolicy`.
        previous: See `RepeatPolicy`.
        instruction: See `RepeatPolicy`.
        next_instruction: See `RepeatPolicy`.
        suffix: See `RepeatPolicy`.

    Source: KVzip, Kim et al., 2025; KVzip+ in KVzap, Jegou and Jeblick, 2026; KVgrad, 2026, and kvpress,
    kvgrad_press.py.
    """

    argument: ClassVar[str] = "q_repeat"
    reduce: ClassVar[str] = "max"

    _: KW_ONLY
    group_reduce: Reduce = "max"
    plus: bool = False
    gradients: bool = False
    w_o: Projection | None = field(default=None, repr=False)

    @property
    def needs(self) -> Needs:
        model = (*WORDS, "w_o") if self.plus or self.gradients else WORDS
        return Needs(positions=False, model=model, stage="repeat", inputs=self.plus)

    def check(self) -> None:
        check_bool(self.name, "plus", self.plus)
        check_bool(self.name, "gradients", self.gradients)
        if self.plus and self.gradients:
            raise ValueError(f"{self.name}: plus and gradients both weight the rows, expected one, got both")
        super().check()

    def add_pass(
        self,
        passes: Tensor | None,
        q: Tensor,
        view: View,
        first: int,
        end: Tensor | int,
        logits: dict[str, Any],
        hidden: Tensor | None = None,
        gradients: Tensor | None = None,
    ) -> Tensor:
        weights = row_weights(self, len(q), q.shape[2], hidden, gradients)
        scores = self.score_pass(q, view, first, end, logits, weights)
        return scores if passes is None else torch.maximum(passes, scores)

    def observe_passes(self, view: View, passes: Tensor, logits: dict[str, Any]) -> None:
        view.observed = passes

    def check_readers(self, readers: int) -> None:
        """Raise if layers that share keys cannot be scored together."""
        if readers and (self.plus or self.gradients):
            raise NotImplementedError(
                f"{self.name}: plus=True weights a layer's scores by its own output projection, and so does "
                f"gradients=True; expected layers that do not share keys, got {readers} more that read those of one "
                "layer; use plus=False"
            )

    @one_shot
    def compress(  # type: ignore[override]  # the queries and keys of the passes
        self,
        k: Tensor,
        v: Tensor,
        q_repeat: Tensor,
        *,
        k_repeat: Tensor,
        passes: Sequence[int] | None = None,
        **call: Unpack[RepeatCall],
    ) -> Compressed:
        """Evict the whole prompt by the queries of its repetition.

        Args:
            k: [b, Hk, n, d], the keys of the prompt alone.
            v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
            q_repeat: [b, Hq, t, d], the queries of all passes, one pass after the other. A pass ends with the tokens of
                its chunk: the first pass with those of the first `chunk` tokens of each row, and so on. In a padded
                batch, a row with fewer tokens in the chunk than other rows has as many rows less at the end of the
                pass; the values there are ignored.
            k_repeat: [b, Hk, t, d], the keys of the same tokens.
            passes: The rows of each pass, with the sum t; one pass for each chunk of the longest row. None: one pass.
            **call: hidden_repeat, gradients_repeat, scale, softcap, sink_logits, starts, lengths, fill_invalid, out,
                layout, layer, num_layers; see `RepeatCall`, `Logits`, `LayerSpans` and `Spans`.

        Returns:
            (k, v, indices) of the kept slots; see `Compressed`.

        Raises:
            TypeError: An argument has the wrong type. Nothing has been written.
            ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.
        """
        spans: dict[str, Any] = dict(call)
        given = {name: spans.pop(name, None) for name in ("hidden_repeat", "gradients_repeat")}
        logits = {name: spans.pop(name) for name in Logits.__annotations__ if name in spans}
        view, out = self._view(k, v, **spans)
        view.observed = self.repeated(view, q_repeat, k_repeat, passes, logits, **given)
        return self._compress(view, out)

    def repeated(
        self,
        view: View,
        q: Tensor,
        k: Tensor,
        passes: Sequence[int] | None,
        logits: dict[str, Any],
        **given: Tensor | None,
    ) -> Tensor:
        """The scores of all passes: fp32 [b, Hk, n]. q, k, given: as `compress` takes them."""
        check_queries(self.name, "q_repeat", q, view.k)
        check_queries(self.name, "k_repeat", k, view.k, q.shape[2])
        if k.shape[:2] != view.k.shape[:2] or k.shape[3] != view.k.shape[3] or k.dtype != view.k.dtype:
            raise ValueError(
                f"{self.name}: k_repeat must have k's dtype and its shape except for the rows (dim 2), expected "
                f"{view.k.dtype} {list(view.k.shape)}, got {k.dtype} {list(k.shape)}"
            )
        self.check_holds(budget_tokens(self.budget, view.n), 0)
        rows = [q.shape[2]] if passes is None else list(passes)
        chunks = -(-view.n // self.chunk)
        if sum(rows) != q.shape[2] or min(rows, default=0) < 1 or len(rows) > max(1, chunks):
            raise ValueError(
                f"{self.name}: passes must be the rows of at most {chunks} passes of {self.chunk} tokens, with the sum "
                f"{q.shape[2]}, got {rows}"
            )
        weights = row_weights(self, len(q), q.shape[2], **given)
        of_passes = [None] * len(rows) if weights is None else weights.split(rows, 1)
        total = torch.zeros(view.keys.shape[:3], dtype=torch.float32, device=view.keys.device)
        for i, (queries, keys, own) in enumerate(zip(q.split(rows, 2), k.split(rows, 2), of_passes)):
            every = view.changed(k=torch.cat((view.k, keys), 2))
            total = torch.maximum(total, self.score_pass(queries, every, i * self.chunk, view.end, logits, own))
        return total

    def score_pass(
        self, q: Tensor, view: View, first: int, end: Tensor | int, logits: dict[str, Any], weights: Tensor | None
    ) -> Tensor:
        """The scores of one pass: fp32 [b, Hk, n], 0 outside of its chunk.

        q: [b, Hq, t, d]. view: k is [b, Hk, n + t, d], the prompt's keys and those of the pass; v has at least the
        prompt's n slots. first: the chunk's first token, counted from each row's start. end: of each row's tokens among
        the n slots; see `View`. weights: of the rows, fp32 [b, t]; see `row_weights`.
        """
        t, n = q.shape[2], view.n - q.shape[2]
        held, most = min(self.sinks, first), max(0, min(self.chunk, n - first))
        at, inside, visible = _pass_slots(view, n, t, end, first, held, most)
        seen = gather_rows(view.k, at[:, None])
        options = {"reduce": self.reduce, "group_reduce": self.operator_reduce, **logits}
        if weights is not None:
            weights = weights.to(q.device).unsqueeze(1).expand(q.shape[:3])
            options |= {"group_reduce": "none", "row_weights": weights}
        scores = summed_scores(q, seen, visible, None, **options)
        assert scores is not None  # there is at least one row
        chunk = slice(held, held + most)
        scores, at, inside = scores[..., chunk], at[:, chunk], inside[:, chunk]
        if weights is not None:
            scores = _by_output(self, scores, gather_rows(view.v, at.where(inside, 0)[:, None]), view.layer)
        at = at.where(inside, n)[:, None].expand_as(scores)
        return scores.new_zeros(view.rows, view.heads, n + 1).scatter_(2, at, scores)[..., :n]


def _by_output(policy: KVzip, scores: Tensor, v: Tensor, layer: int | None) -> Tensor:
    """The scores of the query heads, [b, Hq, m], times ||W_O v||, reduced over the group: [b, Hk, m]."""
    norms = output_norms(policy.name, policy.w_o, v, layer, scores.shape[1])
    grouped = (scores * norms).unflatten(1, (v.shape[1], -1))
    return {"max": grouped.amax, "mean": grouped.mean, "sum": grouped.sum}[policy.group_reduce](2)


def row_weights(
    policy: KVzip, b: int, t: int, hidden_repeat: Tensor | None = None, gradients_repeat: Tensor | None = None
) -> Tensor | None:
    """The weights of the rows of passes, fp32 [b, t]: 1 / ||h_i||, or the norms of gradients; None if they have none.

    A weight that is not finite is 0.
    """
    who = policy.name
    if hidden_repeat is not None and not policy.plus:
        raise ValueError(f"{who}: hidden_repeat is for plus=True, expected None, got hidden states")
    if gradients_repeat is not None and not policy.gradients:
        raise ValueError(f"{who}: gradients_repeat is for gradients=True, expected None, got norms")
    if policy.plus:
        if hidden_repeat is None:
            raise ValueError(
                f"{who}: with plus=True a pass needs the hidden states of its tokens, got none; pass hidden_repeat to "
                "compress, or inputs to Cache.attend"
            )
        check_hidden(who, "hidden_repeat", hidden_repeat, b, t)
        return hidden_repeat.float().norm(dim=-1).reciprocal().nan_to_num(0.0, 0.0, 0.0)
    if not policy.gradients:
        return None
    if gradients_repeat is None:
        raise ValueError(
            f"{who}: with gradients=True a pass needs the norms of its rows' gradients, got none; pass "
            "gradients_repeat to compress, or gradients to Cache.repeating (kvops.hf computes them)"
        )
    inference_only(who, gradients_repeat=gradients_repeat)
    if gradients_repeat.shape != (b, t) or not gradients_repeat.is_floating_point():
        got = f"{gradients_repeat.dtype} {list(gradients_repeat.shape)}"
        raise ValueError(f"{who}: gradients_repeat must be floating point [{b}, {t}], got {got}")
    return gradients_repeat.float().nan_to_num(0.0, 0.0, 0.0)


def _pass_slots(
    view: View, n: int, t: int, end: Tensor | int, first: int, held: int, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The slots that a pass of t rows sees, one after the other: the sinks, the chunk, the pass itself.

    view, first, end: as in `KVzip.score_pass`. n: the slots of the prompt. held, most: sinks and tokens of the longest
    chunk before the pass.

    Returns:
        The slots, int64 [b, held + most + t]; which of them belong to sinks or chunk; and how many each row sees, int32
        [b, t].
    """
    device = view.keys.device
    begin, count = tokens_of_chunk(view, first, end, most)
    slot = torch.arange(held + most + t, device=device)
    own = slot - held - count
    at = torch.where(own < 0, begin[:, None] + torch.where(slot < held, slot, first - held + slot), n + own)
    row, rows = torch.arange(t, device=device), rows_of_chunk(count, t)
    return at.clamp(max=n + t - 1), own < 0, torch.where(row < rows, held + count + row + 1, 0).int()
