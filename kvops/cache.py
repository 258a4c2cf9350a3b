"""A compressed cache of one layer that grows: what every method does in prefill chunks and in decode.

An object is settings plus the state of ONE layer. `attend` takes the new tokens, computes their attention over what is
stored and over each other, then evicts by the method's rule::

    cache = kvops.SnapKV(budget=1024)
    out = cache.attend(q, k, v)                 # q: [b, Hq, t, d], k, v: [b, Hk, t, d] -> [b, Hq, t, d]

With an attention of one's own it is two steps: `append` returns the K and V that this step's attention reads, [b, Hk,
len + t, d]. Most methods have then evicted already. Those that look at queries (`AttentionMethod`) do it in
`attention`, which has to follow, and so do those that rotate keys at their slots (`SlotMethod`).

Logical positions live outside of the stored slots: the next token's position is `seen`, not `len`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .dispatch import inference_only
from .flash import attention
from .ops import MAX_WINDOW, gather_kv, rope_at_slots, window_attention, window_scores
from .rope import Rope


class Method:
    """Base of the methods' objects. A method says in `_evict` which slots stay; all else is here.

    k, v: [b, Hk, len, d] and [b, Hk, len, dv], what is stored (None while empty); heads and rows keep equally many.
    pads: int32 [b] or None, how many of a row's first stored slots are left padding.
    seen: logical tokens seen, padding included.
    frozen: nothing is evicted any more (`freeze`).
    layer, num_layers: which layer of how many that evict this is (`fresh` sets them).
    """

    #: Every row of a padded batch keeps the same number of slots (padding goes first).
    fixed_budget = True
    #: Every layer keeps the same number of slots.
    uniform_layers = True
    #: The rule looks at queries: a step's attention has to be the library's own.
    uses_queries = False
    #: Tensors of the state whose first dim is the batch.
    _state = ("k", "v", "pads", "_padding", "_kept")
    #: Those with an entry for each stored slot, [b, Hk, len]; the base moves them with their slots.
    _by_slot: tuple[str, ...] = ()

    def __init__(self, attend_before_compress: bool = True):
        self.attend_before_compress = attend_before_compress
        self.layer, self.num_layers = 0, 1
        self.reset()

    def reset(self) -> None:
        """Forgets every token and the padding; settings stay."""
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.pads: Tensor | None = None
        self._padding: Tensor | None = None  # int32 [b]: padding columns of the whole sequence
        self.seen = 0
        self._kept: Tensor | None = None  # int64 [b, Hk, <= len]: positions at the last eviction; the rest follow on
        self._evicted_at = 0  # tokens seen at the last eviction
        self._step_pads: Tensor | None = None  # int32 [b]: pads of what the last append returned
        self.frozen = False

    def fresh(self, layer: int = 0, num_layers: int = 1) -> Method:
        """An empty object with the same settings, for `layer` of the `num_layers` that evict."""
        other = copy.copy(self)
        other.layer, other.num_layers = layer, num_layers
        other.reset()
        return other

    def __repr__(self) -> str:
        names = inspect.signature(type(self)).parameters
        return f"{type(self).__name__}({', '.join(f'{name}={self._setting(name)!r}' for name in names)})"

    def _setting(self, name: str):
        """What the constructor got as `name`."""
        return getattr(self, name)

    def __len__(self) -> int:
        """Stored slots per head."""
        return 0 if self.k is None else self.k.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the stored K and V hold."""
        return sum(x.untyped_storage().nbytes() for x in (self.k, self.v) if x is not None)

    @property
    def positions(self) -> Tensor | None:
        """int64 [b, Hk, len]: the logical position of each stored slot (columns of the padded batch)."""
        return None if self.k is None else self._positions(self.k, self.seen)

    @property
    def padding(self) -> Tensor | None:
        """int32 [b]: columns of padding that each row of the sequence begins with; None: there is none."""
        return self._padding

    def freeze(self) -> None:
        """From now on every token stays (until `reset`): a prompt that is compressed once, and a decode that grows."""
        self.frozen = True

    def set_pads(self, pads: Tensor) -> None:
        """Row b of the sequence begins with pads[b] columns of padding. Call before the first append."""
        if self.k is not None:
            raise ValueError(
                f"{type(self).__name__}: set_pads must come before the first append, got {self.seen} tokens"
            )
        if not isinstance(pads, Tensor):
            raise TypeError(f"{type(self).__name__}: pads must be a torch.Tensor, got {type(pads).__name__}")
        if pads.dim() != 1 or pads.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{type(self).__name__}: pads must be int32 [b], got {pads.dtype} {list(pads.shape)}")
        if (pads < 0).any():
            raise ValueError(f"{type(self).__name__}: pads must be at least 0, got {pads.min()}")
        if not self.fixed_budget and not pads.any():
            return
        self._padding = pads.to(torch.int32)
        self.pads = torch.zeros_like(self._padding)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Takes t new tokens, k: [b, Hk, t, d], v: [b, Hk, t, dv]; returns what this step's attention reads.

        That is [b, Hk, len + t, ...], the stored slots and the new ones (with `attend_before_compress=False` what is
        kept of them). Then evicts: the kept slots move to fresh memory, so that the rest is freed with the returned
        tensors. A failed call leaves the object as it was.
        """
        self._check(k, v)
        with self._undone_on_error():
            return self._append(k, v)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """`append` and the causal attention of the new tokens: q: [b, Hq, t, d], k, v as there -> [b, Hq, t, dv].

        Logits are scale * q.k (1 / sqrt(d) unless given), then softcap * tanh(logit / softcap) if softcap is not 0;
        sink_logits: fp32 [Hq], one more logit for each softmax. Rows that are padding give 0. A failed call leaves the
        object as it was.
        """
        check_tokens(type(self).__name__, k)
        with self._undone_on_error():
            k_step, v_step = self.append(k, v)
            check_step(type(self).__name__, q, k, k.shape[2])
            return self.attention(q, k_step, v_step, scale=scale, softcap=softcap, sink_logits=sink_logits)

    def attention(
        self,
        q: Tensor,
        k_step: Tensor,
        v_step: Tensor,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """The second half of `attend`: the attention of the rows just appended over what `append` returned."""
        if q.shape[2] > 1 and not self.attend_before_compress and k_step.shape[2] != self.seen:
            raise NotImplementedError(
                f"{type(self).__name__}: with attend_before_compress=False only one token at a time can attend to a "
                f"compressed cache (which kept slots are older than a row differs by head), got {q.shape[2]}"
            )
        options = dict(scale=scale, softcap=softcap, sink_logits=sink_logits)
        return attention(q, k_step, v_step, starts=self._step_pads, **options).out

    def read(self, q: Tensor, k_step: Tensor, v_step: Tensor, **options) -> Tensor:
        """The attention of another layer's queries over the step that `attention` was for (layers that share keys).

        q: [b, Hq, t or fewer, d], of the last of the rows just appended -> [b, Hq, as many, dv]. options: as there.
        """
        return attention(q, k_step, v_step, starts=self._step_pads, **options).out

    def _append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        t, seen = k.shape[2], self.seen + k.shape[2]
        k_step, v_step = (k, v) if self.k is None else (torch.cat((self.k, k), 2), torch.cat((self.v, v), 2))
        self._step_pads = pads = self._pads_with(t)
        first = self.k is None
        if not self._store(k_step, v_step, pads, seen):
            if first:  # do not hold on to the caller's memory
                self.k, self.v = (x.clone(memory_format=torch.contiguous_format) for x in (k, v))
            return self.k, self.v
        if self.attend_before_compress:
            return k_step, v_step
        self._step_pads = self.pads
        return self.k, self.v

    def _store(self, k: Tensor, v: Tensor, pads: Tensor | None, seen: int) -> bool:
        """Stores what the rule leaves of k, v; whether it evicted any."""
        indices = None if self.frozen else self._evict(k, v, pads, seen)
        if indices is None:
            self.k, self.v, self.pads, self.seen = k, v, pads, seen
        else:
            self._keep(indices, k, v, pads, seen)
        return indices is not None

    def _pads_with(self, t: int) -> Tensor | None:
        """`pads` when t more columns of the batch are stored."""
        return None if self.pads is None else self.pads + (self._padding - self.seen).clamp(0, t)

    def _keep(self, indices: Tensor, k: Tensor, v: Tensor, pads: Tensor | None, seen: int) -> None:
        """Evicts all slots of k, v but `indices`, int64 [b, Hk, m]: ascending, -1 first in rows that keep fewer."""
        slots = indices.clamp(min=0) if pads is not None else indices
        self._kept = self._positions(k, seen).gather(2, slots)
        for name in self._by_slot:
            setattr(self, name, getattr(self, name).gather(2, slots))
        left = pads
        if pads is not None:  # what is kept of a row's padding, alike in all heads, stays first
            left = (indices[:, 0] < pads[:, None]).sum(-1, dtype=torch.int32)
        self.k, self.v = self._moved(indices, k, v, pads, left)
        self.pads, self.seen, self._evicted_at = left, seen, seen

    def _moved(
        self, indices: Tensor, k: Tensor, v: Tensor, pads: Tensor | None, left: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The slots that stay, in fresh memory. pads, left: int32 [b] or None, padding before and after."""
        return gather_kv(k, v, indices)

    @contextlib.contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        before = dict(vars(self))  # the state's tensors are replaced, never written to
        try:
            yield
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            raise

    def crop(self, seen: int) -> None:
        """Forgets all tokens from logical position `seen` on (those of a rejected draft, say).

        ValueError when that needs tokens that were evicted: when `seen` is before the last eviction.
        """
        if isinstance(seen, bool) or not isinstance(seen, int):
            raise TypeError(f"{type(self).__name__}: crop needs an int, got {type(seen).__name__} {seen!r}")
        if seen < 0:
            raise ValueError(f"{type(self).__name__}: crop expected at least 0 tokens, got {seen}")
        if seen >= self.seen:
            return
        if seen < self._evicted_at:
            raise ValueError(
                f"{type(self).__name__}: cannot crop to {seen} tokens, since some were evicted when "
                f"{self._evicted_at} had been seen; expected {self._evicted_at} or more"
            )
        length = len(self) - (self.seen - seen)
        for name in ("k", "v", *self._by_slot):
            x = getattr(self, name)
            if x is not None:
                setattr(self, name, x[:, :, :length].clone())
        self.seen = seen
        if self.pads is not None:
            self.pads = self.pads.clamp(max=length)

    def reorder(self, idx: Tensor) -> None:
        """Row i becomes what row idx[i] was (beam search). idx: int [b]."""
        self._map(lambda x: x.index_select(0, idx.to(x.device)))

    def select_rows(self, idx: Tensor) -> None:
        """Keeps the rows idx, in that order. idx: int [any]."""
        self.reorder(idx)

    def repeat_interleave(self, r: int) -> None:
        """Each row becomes r rows, side by side."""
        self._map(lambda x: x.repeat_interleave(r, 0))

    def _evict(self, k: Tensor, v: Tensor, pads: Tensor | None, seen: int) -> Tensor | None:
        """The slots that stay of k, v: int64 [b, Hk, m], ascending; None if all do. The method's rule.

        k: [b, Hk, n, d], v: [b, Hk, n, dv], the stored slots and the new ones; pads: int32 [b] or None, a row's first
        invalid slots; seen: tokens including the new ones. A method may replace the tensors of its own state, but not
        write to them.
        """
        raise NotImplementedError

    def _positions(self, k: Tensor, seen: int) -> Tensor:
        """Logical positions of the slots of k: the kept ones, then consecutive ones up to seen - 1."""
        b, heads, n, _ = k.shape
        kept = 0 if self._kept is None else self._kept.shape[2]
        new = torch.arange(seen - n + kept, seen, device=k.device).expand(b, heads, -1)
        return new if self._kept is None else torch.cat((self._kept, new), 2)

    def _map(self, f: Callable[[Tensor], Tensor]) -> None:
        for name in self._state:
            x = getattr(self, name)
            if x is not None:
                setattr(self, name, f(x))

    def _check(self, k: Tensor, v: Tensor) -> None:
        """New tokens have four dims, agree with each other and with what is stored, and need no gradient."""
        who = type(self).__name__
        for name, x, stored in (("k", k, self.k), ("v", v, self.v)):
            inference_only(who, **{name: x})
            if x.dim() != 4:
                raise ValueError(f"{who}: {name} must be [b, Hk, t, d], got shape {list(x.shape)}")
            if x.shape[:3] != k.shape[:3] or x.dtype != k.dtype or x.device != k.device:
                raise ValueError(
                    f"{who}: v must match k in [b, Hk, t], dtype and device, expected {list(k.shape[:3])} {k.dtype} "
                    f"{k.device}, got {list(x.shape[:3])} {x.dtype} {x.device}"
                )
            if stored is None:
                continue
            want, got = (*stored.shape[:2], stored.shape[3]), (*x.shape[:2], x.shape[3])
            if want != got or stored.dtype != x.dtype or stored.device != x.device:
                raise ValueError(
                    f"{who}: {name} must match what is stored in (b, Hk, d), dtype and device, expected {want} "
                    f"{stored.dtype} {stored.device}, got {got} {x.dtype} {x.device}"
                )
        if self._padding is not None and len(self._padding) != k.shape[0]:
            raise ValueError(
                f"{who}: k must have the rows that set_pads named, expected {len(self._padding)}, got {k.shape[0]}"
            )


def check_tokens(who: str, k: Tensor) -> None:
    """k: [b, Hk, t, d] has tokens whose attention can be asked for."""
    inference_only(who, k=k)
    if k.dim() == 4 and k.shape[2] == 0:
        raise ValueError(f"{who}: k must hold at least one token, got shape {list(k.shape)}")


def check_step(who: str, q: Tensor, k: Tensor, due: int) -> None:
    """`attention` follows an `append`, and q: [b, Hq, t, d] fits the t = `due` tokens, k: [b, Hk, any, d]."""
    inference_only(who, q=q)
    if not due:
        raise RuntimeError(f"{who}: attention() must follow an append(), once")
    b, heads, _, d = k.shape
    if q.dim() != 4 or q.shape[0] != b or q.shape[1] % heads or q.shape[2] != due or q.shape[3] != d:
        raise ValueError(
            f"{who}: q must be [b, Hq, t, d] for the tokens just appended, expected [{b}, a multiple of {heads}, "
            f"{due}, {d}], got {list(q.shape)}"
        )


def summed_scores(
    q: Tensor, k: Tensor, visible: Tensor, lse: Tensor | None, prefix: int | Tensor | None = None, **options
) -> Tensor | None:
    """`ops.window_scores` of any number of rows: blocks of 256, added up in order; None for no rows.

    prefix: int, or int32 [b]. Given, every row that counts (visible > 0) sees all keys before it, and the scores of the
    others do not matter.
    """
    if prefix is not None and q.shape[2] and lse is None and _linear(q, k, **options):
        return _linear_scores(q, k, visible, prefix, **options)
    total = None
    for first in range(0, q.shape[2], MAX_WINDOW):
        rows = slice(first, first + MAX_WINDOW)
        block_lse = None if lse is None else lse[:, :, rows]
        block = window_scores(q[:, :, rows], k, visible[..., rows].contiguous(), block_lse, **options)
        total = block if total is None else total.add_(block)
    return total


def _linear(q: Tensor, k: Tensor, score="softmax", reduce="sum", group_reduce="mean", **logit) -> bool:
    """Whether the summed scores are those of the summed queries (and q fits k; if not, the operator says so)."""
    plain = not logit.get("softcap") and logit.get("sink_logits") is None
    fits = q.dtype == k.dtype and q.shape[1] >= k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
    return score == "dot" and reduce == "sum" and group_reduce in ("mean", "sum") and plain and fits


def _linear_scores(
    q: Tensor,
    k: Tensor,
    visible: Tensor,
    prefix: int | Tensor,
    *,
    group_reduce="mean",
    scale=None,
    starts=None,
    **_,
) -> Tensor:
    """The sum over rows and group of q_i . k_j is (the sum of q_i) . k_j: a row per KV head instead of G * w.

    The sum, in fp64, becomes rows of k's dtype that add up to it: one of fp32, three of fp16 or bf16, scaled by a power
    of two so that their range does not matter. That is as exact as fp32, more so than the sum of rounded scores.
    """
    counts = (visible > 0)[..., None, :, None]
    total = torch.where(counts, q, 0).unflatten(1, (k.shape[1], -1)).sum((2, 3), dtype=torch.float64)  # [b, Hk, d]
    if group_reduce == "mean":
        total = total / (q.shape[1] // k.shape[1])
    exponent = total.abs().amax(-1, keepdim=True).frexp().exponent.clamp(-100, 100)
    left, rows = total.ldexp(-exponent), []
    for _ in range(1 if k.dtype == torch.float32 else 3):
        rows.append(left.to(k.dtype))
        left = left - rows[-1].double()
    if isinstance(prefix, Tensor):
        limits = prefix.clamp(min=0).unsqueeze(-1).repeat(1, len(rows))
    else:
        limits = torch.full((len(rows),), max(0, prefix), dtype=torch.int32, device=k.device)
    rows = torch.stack(rows, 2)
    return window_scores(rows, k, limits, scale=scale, score="dot", starts=starts).ldexp_(exponent)


class AttentionMethod(Method):
    """Base of the methods whose rule asks how much queries attend to each key.

    `append` only stores. `attention` computes the step's attention, with the scores of its last rows as a by-product,
    and then evicts. A method says in `_rows` which rows observe, and in `_evict_by` which slots stay.

    Where several layers share these keys (`readers` more), `attention` is for the first and `read` for each of the
    others: their query heads count like further heads of the group, as far as their rows observe, and the last of them
    evicts. The queries that are remembered are the first's.
    """

    uses_queries = True
    #: How the window's rows, and the query heads of a group, become one score: see `kvops.ops.window_scores`.
    score, reduce, group_reduce = "softmax", "sum", "mean"
    #: The observing rows' own tokens stay in any case: `_evict_by` asks for no scores of theirs.
    protects_window = False
    _state = (*Method._state, "_queries")

    def __init__(self):
        super().__init__(attend_before_compress=True)

    def reset(self) -> None:
        super().reset()
        self._due = 0  # rows whose queries have not been seen yet
        self._queries: Tensor | None = None  # [b, Hq, at most _remembered(), d]: of the last tokens
        self._waiting = 0  # layers that have yet to read this step
        self._observed: list[Tensor] = []  # the scores of those that have, each as `_evict_by` gets them

    @property
    def last_queries(self) -> Tensor | None:
        """[b, Hq, any, d]: those of the last tokens, as many as the method remembers."""
        return self._queries

    def crop(self, seen: int) -> None:
        before = self.seen
        super().crop(seen)
        if self._queries is not None and self.seen < before:
            self._queries = self._queries[:, :, : max(0, self._queries.shape[2] - (before - self.seen))]

    def _remembered(self) -> int:
        """How many of the last queries are kept for later."""
        return 0

    def _rows(self, t: int) -> int:
        """How many of the t new rows, the last ones, observe. 0: nothing is evicted now."""
        raise NotImplementedError

    def _evict_by(self, scores: Tensor, k: Tensor, v: Tensor, pads: Tensor | None, seen: int) -> Tensor | None:
        """As `_evict`, with the window's scores, fp32 [b, Hk, n] (operator_reduce "none": [b, Hq, n])."""
        raise NotImplementedError

    @property
    def _operator_reduce(self) -> str:
        """What the operator does with the query heads of a group; "none" leaves it to `_evict_by`."""
        return self.group_reduce

    def _evict(self, k: Tensor, v: Tensor, pads: Tensor | None, seen: int) -> None:
        return None

    def _append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self._due:
            raise RuntimeError(
                f"{type(self).__name__}: the queries of the last {self._due} tokens were never seen, and this method "
                "evicts by queries; call attend(), or attention() after append() (with transformers: "
                "kvops.hf.use_attention(model))"
            )
        self._due = k.shape[2]
        return super()._append(k, v)

    def attention(self, q: Tensor, k_step: Tensor, v_step: Tensor, *, readers: int = 0, **options) -> Tensor:
        due = 0 if self._waiting else self._due
        check_step(type(self).__name__, q, self.k, due)
        with self._undone_on_error():
            self._waiting, self._observed = readers + 1, []
            out = self._read(q, k_step, v_step, options)
            if count := self._remembered():
                last = q if self._queries is None else torch.cat((self._queries, q), 2)
                self._queries = last[:, :, -count:].clone()
            if not self._waiting:
                self._settle(k_step, v_step, options)
        return out

    def read(self, q: Tensor, k_step: Tensor, v_step: Tensor, **options) -> Tensor:
        due = min(q.shape[2], self._due) if self._waiting else 0
        check_step(type(self).__name__, q, self.k, due)
        with self._undone_on_error():
            self._observed = list(self._observed)
            out = self._read(q, k_step, v_step, options)
            if not self._waiting:
                self._settle(k_step, v_step, options)
        return out

    def _read(self, q: Tensor, k_step: Tensor, v_step: Tensor, options: dict) -> Tensor:
        """One layer's attention; its scores join the step's."""
        w = 0 if self.frozen else min(self._rows(self._due), q.shape[2])
        out, scores = self._observe(q, k_step, v_step, w, options)
        if w:
            self._observed.append(scores)
        self._waiting -= 1
        return out

    def _settle(self, k_step: Tensor, v_step: Tensor, options: dict) -> None:
        """Evicts, once every layer has attended. options: of the attention."""
        if self._observed:
            scores = self._of_group(self._observed, k_step.shape[1])
            indices = self._evict_by(scores, k_step, v_step, self.pads, self.seen)
            if indices is not None:
                self._keep(indices, k_step, v_step, self.pads, self.seen)
        self._due, self._observed = 0, []

    def _of_group(self, parts: list[Tensor], heads: int) -> Tensor:
        """The scores of all layers, as those of one layer with all their query heads."""
        if len(parts) == 1:
            return parts[0]
        if self._operator_reduce == "none":
            return torch.cat([x.unflatten(1, (heads, -1)) for x in parts], 2).flatten(1, 2)
        if self._operator_reduce == "max":
            return functools.reduce(torch.maximum, parts)
        total = functools.reduce(torch.add, parts)
        return total / len(parts) if self._operator_reduce == "mean" else total

    def _observe(self, q, k, v, w, options) -> tuple[Tensor, Tensor | None]:
        """The attention of all rows, and the scores of the last w."""
        pads, (t, n) = self._step_pads, (q.shape[2], k.shape[2])
        reductions = dict(reduce=self.reduce, group_reduce=self._operator_reduce, starts=pads, **options)
        limits = torch.arange(n - t + 1, n + 1, dtype=torch.int32, device=q.device)
        if 0 < w <= MAX_WINDOW and self.score == "softmax":
            out, _, scores = window_attention(q[:, :, t - w :], k, v, limits[t - w :], **reductions)
            if w < t:  # the rows before need no scores: any FlashAttention will do
                starts = None if pads is None else pads.clamp(max=n - w)
                rest = attention(q[:, :, : t - w], k[:, :, : n - w], v[:, :, : n - w], starts=starts, **options).out
                out = torch.cat((rest, out), 2)
            return out, scores
        out, lse, _ = attention(q, k, v, starts=pads, **options)
        if self.score == "dot":
            lse = reductions["sink_logits"] = None
        last = slice(t - w, t)
        lse = None if lse is None else lse[:, :, last]
        prefix = n - w if self.protects_window else None
        return out, summed_scores(q[:, :, last], k, limits[last], lse, prefix, score=self.score, **reductions)


class SlotMethod(Method):
    """Base of the methods that can give tokens the positions of their slots: 0, 1, ..., without the evicted ones' gaps.

    positions: "slots"; or "original": keys stay at the positions that they were rotated at.
    rope: the model's rotary embedding, for slots. With it, the second half of a step has to follow the first: `append`
        hands on the new tokens, and `attention` rotates all keys at their slots and the queries at theirs (new tokens
        take the slots after the stored ones), attends, stores and evicts. Without it keys are moved as they come, and
        their rotation is the caller's business (`kvops.ops.rope_at_slots`).
    storage: with a rope, "pre_rope": keys are stored without rotation, and rotated whenever they are read; "post_rope":
        they are stored rotated at their slots and turned when they move, which rounds them each time.
    """

    def __init__(self, positions: str, storage: str, rope: Rope | None, attend_before_compress: bool = True):
        who = type(self).__name__
        for name, value, choices in (
            ("positions", positions, ("slots", "original")),
            ("storage", storage, ("pre_rope", "post_rope")),
        ):
            if value not in choices:
                raise ValueError(f"{who}: {name} must be {choices[0]!r} or {choices[1]!r}, got {value!r}")
        if not (rope is None or isinstance(rope, Rope)):
            raise TypeError(f"{who}: rope must be a kvops.Rope, got {type(rope).__name__}")
        if rope is not None and not (positions == "slots" and attend_before_compress):
            raise ValueError(f"{who}: rope= needs positions='slots' and attend_before_compress=True")
        self.slot_positions, self.storage, self.rope = positions == "slots", storage, rope
        super().__init__(attend_before_compress)

    def _setting(self, name: str):
        return ("slots" if self.slot_positions else "original") if name == "positions" else super()._setting(name)

    def reset(self) -> None:
        super().reset()
        self._due = 0  # tokens appended whose attention has not been computed yet

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        positions: Tensor | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """As `Method.attend`. positions: int64 [t] or [b, t], where q and k are rotated; None: they are not (yet)."""
        check_tokens(type(self).__name__, k)
        with self._undone_on_error():
            k_step, v_step = self.append(k, v)
            check_step(type(self).__name__, q, k, k.shape[2])
            options = dict(scale=scale, softcap=softcap, sink_logits=sink_logits)
            return self.attention(q, k_step, v_step, positions=positions, **options)

    def attention(
        self, q: Tensor, k_step: Tensor, v_step: Tensor, *, positions: Tensor | None = None, **options
    ) -> Tensor:
        """As `Method.attention`; positions as in `attend`."""
        who, t = type(self).__name__, k_step.shape[2]
        if self.rope is None:
            if positions is not None:
                raise ValueError(f"{who}: positions are for an object with rope=, got {list(positions.shape)}")
            return super().attention(q, k_step, v_step, **options)
        check_step(who, q, k_step, self._due)
        positions = self._check_positions(positions, k_step)
        with self._undone_on_error():
            n, pads = len(self), self._pads_with(t)
            slots = self._slots(n + t, pads, k_step.device)
            interleaved, turn = self.rope.interleaved, self.rope.between(positions, slots[..., n:])
            q = rope_at_slots(q, *turn, interleaved=interleaved)
            read = k_step.new_empty(*k_step.shape[:2], n + t, k_step.shape[3])
            rope_at_slots(k_step, *turn, interleaved=interleaved, out=read[:, :, n:])
            if self.storage == "post_rope":
                k = read
                if n:
                    read[:, :, :n] = self.k
            else:
                if positions is None:
                    k = k_step.clone(memory_format=torch.contiguous_format)
                else:
                    k = rope_at_slots(k_step, *self.rope.between(positions, None), interleaved=interleaved)
                if n:
                    tables = self.rope.first(n, k.device) if pads is None else self.rope.tables(slots[..., :n])
                    rope_at_slots(self.k, *tables, interleaved=interleaved, out=read[:, :, :n])
                    k = torch.cat((self.k, k), 2)
            v = v_step.clone(memory_format=torch.contiguous_format) if n == 0 else torch.cat((self.v, v_step), 2)
            out = attention(q, read, v, starts=pads, **options).out
            self._store(k, v, pads, self.seen + t)
            self._due = 0
        return out

    def _append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.rope is None:
            return super()._append(k, v)
        if self._due:
            raise RuntimeError(
                f"{type(self).__name__}: the attention of the last {self._due} tokens was never computed, and with "
                "rope= that is what stores them; call attend(), or attention() after append() (with transformers: "
                "kvops.hf.use_attention(model))"
            )
        self._due = k.shape[2]
        return k, v

    def _moved(
        self, indices: Tensor, k: Tensor, v: Tensor, pads: Tensor | None, left: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        k, v = super()._moved(indices, k, v, pads, left)
        if self.rope is not None and self.storage == "post_rope":  # all heads keep the same slots
            old = indices[0, 0] if pads is None else (indices[:, 0] - pads[:, None]).clamp(min=0)
            new = self._slots(indices.shape[2], left, k.device)
            rope_at_slots(k, *self.rope.between(old, new), interleaved=self.rope.interleaved, out=k)
        return k, v

    @staticmethod
    def _slots(n: int, pads: Tensor | None, device: torch.device) -> Tensor:
        """The positions of n slots: int64 [n]; of rows that begin with padding [b, n], 0 there."""
        slots = torch.arange(n, device=device)
        return slots if pads is None else (slots - pads[:, None]).clamp(min=0)

    def _check_positions(self, positions: Tensor | None, k: Tensor) -> Tensor | None:
        if positions is None:
            return None
        b, t = k.shape[0], k.shape[2]
        integers = isinstance(positions, Tensor) and positions.dtype in (torch.int32, torch.int64)
        if not integers or positions.shape not in ((t,), (1, t), (b, t)):
            got = f"{positions.dtype} {list(positions.shape)}" if isinstance(positions, Tensor) else repr(positions)
            raise ValueError(f"{type(self).__name__}: positions must be int64 [{t}] or [{b}, {t}], got {got}")
        return positions[0] if positions.dim() == 2 and positions.shape[0] == 1 else positions
