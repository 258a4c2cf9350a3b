"""Attention Matching: few keys with biases, and fitted values, that answer reference queries as the whole prompt does.

Source: "Fast KV Compaction via Attention Matching", Zweiger et al., 2026. Decisions where paper and released code
differ: docs/methods/attentionmatching.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops import window_attention
from ..ops.api import MAX_WINDOW, Reduce
from ..ops.checks import KEY_BIAS_SCALES, check_finite, check_int, check_queries, inference_only
from ..ops.window import summed_scores
from .base import Compressed, LayerSpans, Needs, Out, one_shot
from .budgets import Budget, budget_tokens
from .precision import without_autocast
from .queries import Logits
from .repeating import WORDS, RepeatPolicy, rows_of_chunk, tokens_of_chunk
from .select import readable_keys
from .view import View

LEAST_RIDGE = 1e-4  # so that the sums, which are in fp32, stay positive definite
MOST_BIAS = 30.0
STEPS = 256  # of the gradient descent that fits the biases
BLOCK = 1 << 23  # weights of rows and kept keys that are computed at a time
GRAM = 1 << 26  # entries of a matrix of normal equations that are held at a time, if one head of all rows has fewer
#: The name of the biases in a cache's state.
KEY_BIAS = "key_bias"


class Matched(Compressed):
    """The kept entries of Attention Matching; unpacks as (k, v, indices).

    Attributes:
        key_bias: fp32 [b, Hk, m], the biases of the kept keys, for `kvops.attention` and
            `kvops.ops.window_attention`.
    """

    key_bias: Tensor

    def _replace(self, **changes: Any) -> Matched:
        return Matched.of(super()._replace(**changes), self.key_bias)

    @classmethod
    def of(cls, kept: Compressed, key_bias: Tensor) -> Matched:
        """`kept` with biases."""
        matched = cls(*kept)
        matched.key_bias = key_bias
        return matched

    def transposed(self) -> Matched:
        return Matched.of(super().transposed(), self.key_bias)


class MatchCall(LayerSpans, Logits, total=False):
    """The options of `AttentionMatching.compress`: `LayerSpans` and `Logits`."""


class Reference(NamedTuple):
    """Reference queries, and what they get from all keys of a layer."""

    q: Tensor  # [b, Hq, rows, d]
    row_weights: Tensor  # fp32 [b, Hq, rows]: how much each counts, 0 or more
    out: Tensor  # [b, Hq, rows, dv]
    lse: Tensor  # fp32 [b, Hq, rows]; -inf for rows that do not count
    scale: float
    key_bias: Tensor | None  # fp32 [b, Hk, n]: of the keys themselves


@dataclass(frozen=True, eq=False)
class AttentionMatching(RepeatPolicy):
    """Attention Matching: replaces the prompt by fewer keys with biases and fitted values, once.

    What the attention over a prompt gives a query i is its output o_i and its mass m_i; with both, it can be merged
    with the attention over any later tokens. So the kept keys, with a bias each, and their values are fitted to the
    outputs and masses of reference queries:

    ```text
    a[i, j] = exp(scale * q_i . k_j) / m_i         m_i = sum over all j of exp(scale * q_i . k_j)
    score   = max over the group's query heads and i of r_i a[i, j]                      the best keys are kept
    bias    = log w,  |bias| <= max_bias
              w = argmin of the sum over i of r_i^2 (sum over the kept j of a[i, j] w_j - 1)^2
    x[i, j] = a[i, j] w_j / sum over the kept j of a[i, j] w_j
    values  = argmin over c of
              the sum over i of r_i^2 |sum over the kept j of x[i, j] c_j - o_i|^2 + damping |c - v|^2
    ```

    The reference queries are those of a second reading of the prompt, in KVzip's passes (`RepeatPolicy`). Their
    weight r_i is the part of the query's softmax that was on the prompt; the rest was on tokens of the pass. Or they
    are any that a one-shot call gets. A query counts for its KV head. The sinks of a softmax (`sink_logits`)
    change neither keys nor values.

    A cache keeps the biases and attends with them (`key_bias`). Later tokens have none, and are kept. Models that cap
    their logits are refused.

    Attributes:
        budget: See `BudgetPolicy`.
        sinks: See `BudgetPolicy`.
        head_mode: See `BudgetPolicy`.
        scope: See `RepeatPolicy`.
        group_reduce: See `QueryPolicy`.
        chunk: See `RepeatPolicy`.
        previous: See `RepeatPolicy`.
        instruction: See `RepeatPolicy`.
        next_instruction: See `RepeatPolicy`.
        suffix: See `RepeatPolicy`.
        queries: About how many reference queries of a head a cache remembers of all passes, evenly spaced; at least one
            of each pass.
        max_bias: The largest absolute change of a bias by one fit, at most 30; 0 fits none.
        ridge: The damping of the values' changes, as a fraction of the mean diagonal of the normal equations, at least
            1e-4.

    Source: Attention Matching, Zweiger et al., 2026, Sec. 3, with "highest attention" keys.
    """

    argument: ClassVar[str] = "q_reference"
    reduce: ClassVar[str] = "max"

    _: KW_ONLY
    group_reduce: Reduce = "max"
    queries: int = 4096
    max_bias: float = 3.0
    ridge: float = 1e-3

    @property
    def needs(self) -> Needs:
        return Needs(positions=False, model=WORDS, stage="repeat", per_slot=(KEY_BIAS,))

    def check(self) -> None:
        check_int(self.name, "queries", self.queries, 1)
        check_finite(self.name, "max_bias", self.max_bias, 0.0, MOST_BIAS)
        check_finite(self.name, "ridge", self.ridge, LEAST_RIDGE)
        super().check()

    def check_readers(self, readers: int) -> None:
        if readers:
            raise NotImplementedError(
                f"{self.name}: the values of a layer are fitted to its own queries, expected layers that do not share "
                f"keys, got {readers} more that read those of one layer"
            )

    @one_shot
    def compress(  # type: ignore[override]  # the reference queries
        self, k: Tensor, v: Tensor, q_reference: Tensor, *, row_weights: Tensor | None = None, **call: Unpack[MatchCall]
    ) -> Matched:
        """Replace a whole cache once by fewer entries that answer the reference queries as it does.

        Args:
            k: [b, Hk, n, d], the keys.
            v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
            q_reference: [b, Hq, rows, d], the reference queries, rotated like k. Each sees all valid keys.
            row_weights: fp32 [b, Hq, rows], finite and at least 0: how much each reference query counts; None: 1.
            **call: scale, softcap (0), sink_logits, starts, lengths, fill_invalid, out, layout, layer, num_layers; see
                `MatchCall`, `Logits`, `LayerSpans` and `Spans`.

        Returns:
            (k, v, indices) of the kept slots, v fitted, with the biases as the attribute `key_bias`; see `Matched`.

        Raises:
            TypeError: An argument has the wrong type. Nothing has been written.
            ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.
        """
        spans: dict[str, Any] = dict(call)
        logits = {name: spans.pop(name) for name in Logits.__annotations__ if name in spans}
        view, out = self._view(k, v, **spans)
        check_queries(self.name, self.argument, q_reference, k)
        self.check_holds(budget_tokens(self.budget, view.n), 0)
        if row_weights is None:
            row_weights = torch.ones_like(q_reference[..., 0], dtype=torch.float32)
        self._check_row_weights(row_weights, q_reference)
        self._observe(view, q_reference, row_weights, logits)
        kept = self._compress(view, out)
        bias = view.state[KEY_BIAS].gather(2, kept.indices.clamp(min=0))
        return Matched.of(kept, bias.masked_fill(kept.indices < 0, 0.0))

    # Caches

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
        """The reference queries and, behind their channels, their row weights: [b, Hq, any, d + 1]."""
        self._check_logits(logits)
        t, n = q.shape[2], view.n - q.shape[2]
        _, count = tokens_of_chunk(view, first, end, max(0, min(self.chunk, n - first)))
        counts = torch.arange(t, device=q.device) < rows_of_chunk(count, t)
        every = n + -(-n // self.chunk) * max(0, t - min(self.chunk, n - first))  # the rows of all passes, about
        step = min(t, max(1, -(-every // self.queries)))
        q, counts, scale = q[:, :, ::step], counts[:, ::step], self._scale(q, logits)
        ends = torch.as_tensor(end, dtype=torch.int32, device=q.device).view(-1, 1)
        whole = torch.arange(n + 1, n + t + 1, step, dtype=torch.int32, device=q.device)
        options: dict[str, Any] = dict(scale=scale, key_bias=view.state.get(KEY_BIAS))
        lse, lse_of_all = (
            _attended(view, q, _narrow(view.k), torch.where(counts, visible, 0).int(), **options)[1]
            for visible in (ends, whole)
        )
        weights = (lse - lse_of_all).exp().nan_to_num(0.0)  # 0 for rows that do not count
        rows = torch.cat((q, weights.unsqueeze(-1).to(q.dtype)), 3)
        return rows if passes is None else torch.cat((passes, rows), 2)

    def observe_passes(self, view: View, passes: Tensor, logits: dict[str, Any]) -> None:
        self._observe(view, passes[..., :-1], passes[..., -1].float(), logits)

    def remember(self, view: View) -> None:
        new = torch.zeros(view.rows, view.heads, view.new, dtype=torch.float32, device=view.keys.device)
        before = view.state.get(KEY_BIAS)
        view.state[KEY_BIAS] = new if before is None else torch.cat((before, new), 2)

    # The rule

    def _check_logits(self, logits: dict[str, Any]) -> None:
        if (softcap := logits.get("softcap", 0.0)) != 0:
            raise ValueError(f"{self.name}: softcap must be 0, because biases are not capped, got {softcap!r}")
        if logits.get("scale") is not None:
            check_finite(self.name, "scale", logits["scale"], *KEY_BIAS_SCALES)

    def _check_row_weights(self, weights: Tensor, q: Tensor) -> None:
        inference_only(self.name, row_weights=weights)
        if weights.shape != q.shape[:3] or weights.dtype != torch.float32 or weights.device != q.device:
            raise ValueError(
                f"{self.name}: row_weights must be torch.float32 {list(q.shape[:3])} on {q.device}, one per reference "
                f"query, got {weights.dtype} {list(weights.shape)} on {weights.device}"
            )

    @staticmethod
    def _scale(q: Tensor, logits: dict[str, Any]) -> float:
        scale: float | None = logits.get("scale")
        return q.shape[3] ** -0.5 if scale is None else scale

    def _observe(self, view: View, q: Tensor, row_weights: Tensor, logits: dict[str, Any]) -> None:
        """Set the view's scores and its reference. row_weights: see `Reference`."""
        self._check_logits(logits)
        scale = self._scale(q, logits)
        end = torch.as_tensor(view.end, dtype=torch.int32, device=q.device).view(-1, 1)
        visible = torch.where((row_weights > 0).any(1), end, 0).int().contiguous()
        bias = view.state.get(KEY_BIAS)
        out, lse = _attended(view, q, view.v, visible, scale=scale, key_bias=bias)
        options: dict[str, Any] = dict(reduce=self.reduce, group_reduce=self.group_reduce, starts=view.starts)
        scores = summed_scores(q, view.k, visible, lse, row_weights=row_weights, scale=scale, **options)
        assert scores is not None  # there is at least one row
        view.observed = scores if bias is None else scores * bias.exp()
        view.reference = Reference(q, row_weights, out, lse, scale, bias)

    def choose(self, scores: Tensor, view: View, budget: Budget, **options: Any) -> Tensor:
        indices = super().choose(scores, view, budget, **options)
        reference = view.reference
        assert reference is not None  # `_observe` sets it with the scores
        bias, view.values = fitted(self.name, view, reference, indices, self.max_bias, self.ridge)
        none = bias.new_zeros(view.rows, view.heads, view.n + 1)
        view.state[KEY_BIAS] = none.scatter_(2, indices.where(indices >= 0, view.n), bias)[..., : view.n]
        return indices

    def move(self, view: View, indices: Tensor, out: Out = None) -> tuple[Tensor, Tensor]:
        k, v = super().move(view, indices, out)
        if view.values is not None:
            v.copy_(torch.where(indices.unsqueeze(-1) < 0, readable_keys(self.name, v).float(), view.values))
        return k, v


def _narrow(k: Tensor) -> Tensor:
    """The shortest rows that values can have, for outputs that are not used."""
    return k[..., : 16 // k.element_size()]


def _attended(view: View, q: Tensor, v: Tensor, visible: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The output and log-sum-exp of any number of rows. visible: int32 [b, rows]."""
    parts = []
    for first in range(0, max(1, q.shape[2]), MAX_WINDOW):
        rows = slice(first, first + MAX_WINDOW)
        limits = visible[:, rows].contiguous()
        part = window_attention(q[:, :, rows], view.k, v, limits, starts=view.starts, scores=False, **options)
        parts.append(part[:2])
    out, lse = (torch.cat(x, 2) for x in zip(*parts))
    return out, lse


def fitted(
    op: str, view: View, reference: Reference, indices: Tensor, max_bias: float, ridge: float
) -> tuple[Tensor, Tensor]:
    """Fit the biases and values of kept keys to what reference queries get from all keys.

    Args:
        op: The name in errors.
        view: All keys and values.
        reference: The queries.
        indices: int64 [b, Hk, m], the kept slots; -1 for none.
        max_bias: See `AttentionMatching`.
        ridge: See `AttentionMatching`.

    Returns:
        The biases, fp32 [b, Hk, m]; and the values, fp32 [b, Hk, m, dv]. Slots that are padding or none have the bias
        0 and their own value.
    """
    if not indices.numel():
        return indices.new_zeros(indices.shape, dtype=torch.float32), view.v.new_zeros(*indices.shape, view.v.shape[3])
    first = 0 if view.starts is None else view.starts[:, None, None]
    end = view.end if isinstance(view.end, int) else view.end[:, None, None]
    valid, at = (indices >= first) & (indices < end), indices.clamp(min=0)
    (b, heads, m), group = indices.shape, reference.q.shape[1] // indices.shape[1]
    keys, values = (readable_keys(op, x) for x in (view.k, view.v))
    q, row_weights, out, lse = (x.unflatten(1, (heads, group)).flatten(2, 3) for x in reference[:4])
    largest = row_weights.amax(2, keepdim=True)
    row_weights = row_weights / largest.where(largest > 0, 1.0)
    before = None if reference.key_bias is None else reference.key_bias.gather(2, at)
    biases, changed = [], []
    size = max(1, GRAM // max(1, b * m * m))
    for begin in range(0, heads, size):
        own = slice(begin, begin + size)
        k, v = (x[:, own].gather(2, at[:, own, :, None].expand(-1, -1, -1, x.shape[3])).float() for x in (keys, values))
        of_keys = None if before is None else before[:, own]
        rows = Reference(q[:, own], row_weights[:, own], out[:, own], lse[:, own], reference.scale, of_keys)
        with without_autocast(k.device):
            bias, change = _fit(k, v, valid[:, own], rows, max_bias, ridge)
        biases.append(bias if before is None else bias + before[:, own])
        changed.append(torch.where(valid[:, own, :, None], v + change, v))
    return torch.cat(biases, 1).where(valid, 0.0), torch.cat(changed, 1)


def _fit(
    keys: Tensor, values: Tensor, valid: Tensor, rows: Reference, max_bias: float, ridge: float
) -> tuple[Tensor, ...]:
    """The biases of some heads, fp32 [b, Hk, m], and the changes of their values, fp32 [b, Hk, m, dv].

    keys, values: those that are kept, fp32. valid: bool [b, Hk, m]. rows: the queries of a group one after the other,
    and the biases that the kept keys have.
    """
    b, heads, m = valid.shape
    gram, mass = keys.new_zeros(b, heads, m, m), keys.new_zeros(b, heads, m)
    for weights, row_weights, _ in _blocks(keys, valid, rows):
        weights *= row_weights
        gram += weights.mT @ weights
        mass += (weights * row_weights).sum(2)
    factors = bounded_least_squares(gram, mass, math.exp(-max_bias), math.exp(max_bias))
    gram.zero_()
    missing = torch.zeros_like(values)
    for weights, row_weights, out in _blocks(keys, valid, rows):
        weights *= factors.unsqueeze(2)
        weights /= weights.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        error = (out - weights @ values) * row_weights
        weights *= row_weights
        gram += weights.mT @ weights
        missing += weights.mT @ error
    damped = gram.double()
    size = damped.diagonal(dim1=-2, dim2=-1)
    mean = size.sum(-1, keepdim=True) / valid.sum(-1, keepdim=True).clamp(min=1)
    size += (ridge * mean).clamp(min=1e-12)
    change = torch.cholesky_solve(missing.double(), torch.linalg.cholesky(damped))
    return factors.log(), change.float()


def _blocks(keys: Tensor, valid: Tensor, rows: Reference) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For blocks of rows the weights of the kept keys, fp32 [b, Hk, block, m], the rows' own, and their outputs.

    The weights are 0 for keys that are not valid and for rows that do not count.
    """
    keys, size = keys.masked_fill(~valid.unsqueeze(-1), 0.0), max(1, BLOCK // max(1, valid.numel()))
    for begin in range(0, rows.q.shape[2], size):
        own = slice(begin, begin + size)
        logits = (rows.q[:, :, own].float() * rows.scale) @ keys.mT
        logits -= rows.lse[:, :, own, None]  # infinity in rows that do not count
        if rows.key_bias is not None:
            logits += rows.key_bias.unsqueeze(2)
        weights = logits.exp_().nan_to_num_(0.0, 0.0, 0.0).mul_(valid.unsqueeze(2))
        yield weights, rows.row_weights[:, :, own, None], rows.out[:, :, own].float()


def bounded_least_squares(gram: Tensor, target: Tensor, low: float, high: float) -> Tensor:
    """Minimize x . gram x / 2 - target . x over low <= x <= high, by accelerated projected gradients from x = 1.

    Args:
        gram: [.., m, m], fp32 or fp64, symmetric, positive semidefinite, without negative entries.
        target: [.., m].
        low: At least 0.
        high: At least `low`.

    Returns:
        [.., m].
    """
    size = gram.diagonal(dim1=-2, dim2=-1)
    size = size.clamp(min=1e-12).sqrt()  # the steps are those of variables whose columns have length 1
    scaled, goal = gram / (size.unsqueeze(-1) * size.unsqueeze(-2)), target / size
    step = 1.0 / scaled.sum(-1).amax(-1, keepdim=True).clamp(min=1e-12)  # a bound of the largest eigenvalue
    least, most = low * size, high * size
    x = y = size
    speed = 1.0
    for _ in range(STEPS):
        gradient = (scaled @ y.unsqueeze(-1)).squeeze(-1) - goal
        moved = torch.minimum(torch.maximum(y - step * gradient, least), most)
        faster = (1 + math.sqrt(1 + 4 * speed * speed)) / 2
        y, x, speed = moved + (speed - 1) / faster * (moved - x), moved, faster
    return x / size
