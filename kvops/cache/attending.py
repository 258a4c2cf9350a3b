"""Caches for policies that use queries, and the stages of LAQ and of policies that repeat prompts."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..methods.laq import LAQ
from ..methods.queries import QueryPolicy
from ..methods.repeating import RepeatPolicy
from ..methods.view import View
from ..ops.api import MAX_WINDOW, window_attention
from ..ops.flash_attention import attention
from ..ops.window import causal_limits
from .base import Cache
from .ragged import Ragged
from .rounded import RoundedView, is_packed, operands, query


class AttendingCache(Cache, kind="queries"):
    """A cache for policies that score keys by the attention of queries.

    `append` only stores. `attention` computes the step's attention, which yields the scores of its last rows as a
    by-product, and then evicts.

    Several layers may share these keys. Then the first layer calls `attention` with `readers`, the number of the other
    layers, and each of those calls `read`. Their query heads count as further heads of the GQA group, for the rows in
    the observation window. The last reader evicts. The cache remembers the first layer's queries only.
    """

    policy: QueryPolicy
    _protecting: QueryPolicy | None
    _tensors = (*Cache._tensors, "_queries")

    def reset(self) -> None:
        super().reset()
        #: How the model's attention computed its logits in the last step: scale, softcap and sink_logits.
        self.logits: dict[str, Any] = {}
        self._due = 0  # appended rows whose attention has not been computed yet
        self._queries: Tensor | None = None  # [b, Hq, <= policy.remembers, d]: the last tokens' queries
        self._waiting = 0  # layers that have yet to read this step
        self._observed: list[Tensor] = []  # the scores of the layers that have, each as `View.observed`

    @property
    def _rule(self) -> QueryPolicy:
        return self._protecting or self.policy

    @property
    def last_queries(self) -> Tensor | None:
        """The queries of the last tokens, [b, Hq, tokens, d], as many as the policy remembers; None before any."""
        return self._queries

    def crop(self, seen: int) -> None:
        before = self.seen
        super().crop(seen)
        if self._queries is not None and self.seen < before:
            self._queries = self._queries[:, :, : max(0, self._queries.shape[2] - (before - self.seen))]

    def _evict(self, view: View) -> Tensor | None:
        return None  # eviction waits for the attention

    def _may_evict(self, new: int) -> bool:
        return False

    def _append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        check_attended(self.name, self._due)
        self._due = k.shape[2]
        return super()._append(k, v)

    def attention(self, q: Tensor, k_step: Tensor, v_step: Tensor, *, readers: int = 0, **options: Any) -> Tensor:
        due = 0 if self._waiting else self._due
        self._check_step(q, k_step, due)
        with self.undone_on_error():
            self._waiting, self._observed, self.logits = readers + 1, [], options
            view = self._step_view(due, k_step, v_step)
            out = self._read(q, k_step, v_step, view, options)
            if count := self.policy.remembers:
                last = q if self._queries is None else torch.cat((self._queries, q), 2)
                self._queries = last[:, :, -count:].clone()
            if not self._waiting:
                self._evict_by_queries(view, options)
            return self._record(q, out)

    def read(self, q: Tensor, k_step: Tensor, v_step: Tensor, **options: Any) -> Tensor:
        due = min(q.shape[2], self._due) if self._waiting else 0
        self._check_step(q, k_step, due)
        with self.undone_on_error():
            self._observed = list(self._observed)
            view = self._step_view(self._due, k_step, v_step)
            out = self._read(q, k_step, v_step, view, options)
            if not self._waiting:
                self._evict_by_queries(view, options)
        return out

    def _step_view(self, new: int, k_step: Tensor, v_step: Tensor) -> View:
        """Return the policy's view of the stored slots with the step's; if heads differ in length, one to decide on."""
        if self._ragged is not None:
            return self._counting_view(new)
        view = self._stored(new=new)
        if isinstance(view, RoundedView) and not is_packed(k_step):  # the first step: decide before it is rounded
            view.decide_by(k_step, v_step)
        return view

    def _read(self, q: Tensor, k_step: Tensor, v_step: Tensor, view: View, options: dict[str, Any]) -> Tensor:
        """Compute one layer's attention and add its scores to the step's. view: as `_step_view` returns it."""
        rows = 0 if self._stays(self.seen) else self._rule.rows(view)
        w = min(rows, q.shape[2])
        out, scores = self._observe(q, k_step, v_step, w, options)
        if scores is not None:
            self._observed.append(scores)
        self._waiting -= 1
        return out

    def _evict_by_queries(self, view: View, options: dict[str, Any]) -> None:
        """Evict once all layers have attended. options: the logit options of the attention."""
        w = 0 if self._observed or self._stays(self.seen) else self._rule.rows_remembered(view)
        if self._ragged is not None and (self._observed or w):
            view = self._stored(new=view.new)
        if self._observed:
            view.observed = self._of_group(self._observed, view.heads)
            view.window = self.policy.window
        elif w:
            # The window spans several steps, so all its rows observe together, now.
            self._remember(view, self._queries, w, options, view.n - w if self.policy.protects_window else None)
        if view.observed is not None:
            self._done(self._rule.evict(view), view)
        self._due, self._observed = 0, []

    def _remember(
        self, view: View, queries: Tensor | None, w: int, options: dict[str, Any], prefix: int | None = None
    ) -> None:
        """Set the view's scores to those of the last w queries. prefix: see `summed_scores`."""
        if self.policy.score == "dot":
            options = {name: x for name, x in options.items() if name != "sink_logits"}
        assert queries is not None
        queries = queries[:, :, -w:]
        if self._ragged is not None:
            view.window = w
            view.observed = self._scores_by_row(self._ragged, queries, self._since, None, options)
            return
        visible = causal_limits(view.n, queries.shape[2], view.keys.device)
        view.window = w
        view.observed = self.policy.summed(queries, view, visible, None, prefix, options)

    def _scores_by_row(
        self, ragged: Ragged, q: Tensor, since: int, lse: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """Return `View.observed` of the last queries, [b, Hq, w, d], for heads that differ in length.

        lse: their log-sum-exp, or None. options: of the logits.
        """
        policy, w, (_, heads) = self.policy, q.shape[2], ragged.shape
        held, queries, visible = ragged.lengths(since).int(), ragged.by_row(q), ragged.visible(since, w)
        known = None if lse is None else ragged.by_row(lse).contiguous()

        def observed(rows: slice, sinks: Tensor | None) -> Tensor:
            view = self._view_of(ragged.k, ragged.v, lengths=held[rows], block_table=ragged.table[rows])
            prefix = held[rows] - w if policy.protects_window else None
            own = None if known is None else known[rows]
            scores = policy.summed(queries[rows], view, visible[rows], own, prefix, {**options, "sink_logits": sinks})
            assert scores is not None  # there are queries
            return scores

        sinks = options.get("sink_logits")
        if sinks is None or policy.score == "dot":
            scores = observed(slice(None), None)
        else:  # the operator has the same sinks for all rows
            each = [observed(slice(h, None, heads), own) for h, own in enumerate(sinks.view(heads, -1))]
            scores = torch.stack(each, 1).flatten(0, 1)
        columns = self._columns(ragged).unsqueeze(1)
        at = columns.clamp(min=0).expand(-1, scores.shape[1], -1)
        scores = scores.gather(2, at).masked_fill(columns < 0, torch.nan)
        group = q.shape[1] // ragged.shape[1]
        split = scores.split([group if how == "none" else 1 for _, how in policy.reductions], 1)
        return torch.cat([x.reshape(ragged.shape[0], -1, x.shape[2]) for x in split], 1)

    def _of_group(self, parts: list[Tensor], heads: int) -> Tensor:
        """Combine the scores of all layers as if one layer had all their query heads."""
        if len(parts) == 1:
            return parts[0]
        reductions = [group for _, group in self.policy.reductions]
        more = heads * (len(reductions) - 1)  # at most the first has a score per query head
        split = [x.split([x.shape[1] - more, *[heads] * (len(reductions) - 1)], 1) for x in parts]
        return torch.cat([_reduced(group, x, heads) for group, x in zip(reductions, zip(*split))], 1)

    def _observe(
        self, q: Tensor, k: Tensor, v: Tensor, w: int, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the attention of all rows, and the scores of the last w."""
        policy, pads, (t, n) = self.policy, self._step_pads, (q.shape[2], k.shape[2])
        if not w:
            return self._attention(q, k, v, options)[0], None
        if self._reading is not None:
            out, lse = self._attention(q, k, v, options)
            last = slice(t - w, t)
            known = lse[:, :, last] if policy.score == "softmax" else None
            return out, self._scores_by_row(self._reading, q[:, :, last], self._read_since, known, options)
        limits = torch.arange(n - t + 1, n + 1, dtype=torch.int32, device=q.device)
        [(rows, group), *more] = policy.reductions
        if w <= MAX_WINDOW and policy.score == "softmax" and not more:
            reductions: dict[str, Any] = dict(reduce=rows, group_reduce=group, starts=pads)
            narrow, rows_of_step = query(q, k), operands(k, v)
            last_rows = narrow[:, :, t - w :]
            out, _, scores = window_attention(
                last_rows, **rows_of_step, visible=limits[t - w :], **reductions, **options
            )
            if w < t:  # earlier rows need no scores, so any FlashAttention serves
                starts = None if pads is None else pads.clamp(max=n - w)
                before = {name: x[:, :, : n - w] for name, x in rows_of_step.items()}
                rest = attention(narrow[:, :, : t - w], **before, starts=starts, **options).out
                out = torch.cat((rest, out), 2)
            return out.to(q.dtype), scores
        out, lse = self._attention(q, k, v, options)
        if policy.score == "dot":
            options = {**options, "sink_logits": None}
        last = slice(t - w, t)
        known = lse[:, :, last] if policy.score == "softmax" else None
        prefix = n - w if policy.protects_window else None
        return out, policy.summed(q[:, :, last], self._view_of(k, v, starts=pads), limits[last], known, prefix, options)


def _reduced(how: str, parts: Sequence[Tensor], heads: int) -> Tensor:
    """Reduce the scores of several layers over a group, or with "none" make one group of their query heads."""
    if how == "none":
        return torch.cat([x.unflatten(1, (heads, -1)) for x in parts], 2).flatten(1, 2)
    if how == "max":
        return functools.reduce(torch.maximum, parts)
    total = functools.reduce(torch.add, parts)
    return total / len(parts) if how == "mean" else total


def check_attended(who: str, due: int) -> None:
    """Raise RuntimeError if the attention of the last `due` tokens has not been computed."""
    if due:
        raise RuntimeError(
            f"{who}: expected attention() after each append(), because this policy evicts by queries, got none for the "
            f"last {due} tokens; call attend(), or attention() after append() (with transformers: "
            "kvops.hf.use_attention(model))"
        )


class LookaheadCache(AttendingCache, kind="draft"):
    """LAQ's cache. It keeps the whole prompt until `evict`, which uses the queries of a `draft`; see `kvops.LAQ`."""

    policy: LAQ

    def draft(self) -> Cache:
        """Return stage 1's cache: the prompt tokens that `stage1` keeps. It remembers the queries of its further steps.

        Raises:
            RuntimeError: No prompt has been attended yet.
            ValueError: `stage1` needs more queries than this cache remembers.
        """
        if self._ragged is not None:
            raise RuntimeError("LAQ: draft() expected a cache that has not evicted, got one whose heads differ")
        if self._queries is None:
            raise RuntimeError("LAQ: draft() must follow the attention of a prompt, got a cache without one")
        policy = self.policy.draft_policy(self.seen, self.num_layers)
        draft = Cache(policy, layer=self.layer, num_layers=self.num_layers, storage=self.storage)
        draft.drafts = True
        self._k_and_v()
        assert self._memory is not None  # there are queries, so there are keys
        self._memory.shared = True
        for name in ("_memory", "_dtype", "_length", "pads", "_padding", "seen", "_kept", "_evicted_at"):
            setattr(draft, name, getattr(self, name))
        view = draft._stored(new=self.seen)
        indices = None
        if not isinstance(policy, QueryPolicy):
            indices = policy.evict(view)
        elif w := policy.rows(view):
            if w > self._queries.shape[2]:
                raise ValueError(
                    f"LAQ: stage1 must use a window of the last queries, expected at most {self._queries.shape[2]} "
                    f"rows, got {w} from {policy!r}"
                )
            assert isinstance(draft, AttendingCache)
            draft._remember(view, self._queries, w, self.logits)
            indices = policy.evict(view)
        if indices is None:
            draft.state = view.state
        else:
            draft._keep(indices, view)
        return draft

    def evict(self, draft: Cache, lookahead_lengths: Tensor | None = None) -> None:
        """Run stage 2: keep the tokens that the draft's queries and the window's queries attend to. Empty the draft.

        Args:
            draft: The cache that `draft` returned, after at least one step.
            lookahead_lengths: int32 [b], how many of the draft's steps count in each row; None: all. Rows that ended
                early count fewer.

        Raises:
            RuntimeError: The draft has taken no step, or this cache remembers too few queries.
        """
        ahead = getattr(draft, "queries", None)
        if ahead is None:
            raise RuntimeError("LAQ: evict() expected a draft that has taken at least one step, got one without")
        view, w = self._stored(), self.policy.window
        if view.n > self.policy.room(view):
            held = 0 if self._queries is None else self._queries.shape[2]
            if self._queries is None or held < w:
                raise RuntimeError(f"LAQ: evict() expected the queries of the last {w} tokens, got {held}")
            logits = self.logits
            if self.policy.score == "dot":
                logits = {name: x for name, x in logits.items() if name != "sink_logits"}
            local = self._queries[:, :, held - w :]
            self.policy.observe_draft(view, local, ahead, lookahead_lengths, None, logits)
            indices = self.policy.evict(view)
            assert indices is not None  # there are more slots than the budget
            with self.undone_on_error():
                self._keep(indices, view)
        draft.reset()


class RepeatingCache(AttendingCache, kind="repeat"):
    """A `RepeatPolicy`'s cache. It keeps the whole prompt until `evict`, after the passes; see `kvops.KVzip`."""

    policy: RepeatPolicy
    _tensors = (*AttendingCache._tensors, "_passes")

    def reset(self) -> None:
        super().reset()
        self._first: int | None = None  # the first token of the chunk that a pass repeats
        self._passes: Tensor | None = None  # what the policy remembers of the passes so far
        self._passed = 0  # the slots that they were over
        self._gradients: Tensor | None = None  # of the pass; see `repeating`

    @contextmanager
    def repeating(self, first: int, gradients: Tensor | None = None) -> Iterator[None]:
        """A block whose one step is a pass. The step's queries score the chunk, and its tokens are forgotten.

        Args:
            first: The first token of the chunk that the pass repeats, counted without padding.
            gradients: With gradients=True: [b, t], the norms of the gradients of the step's rows.

        Raises:
            RuntimeError: No prompt has been attended yet; or the cache has evicted, and its tokens are more than a
                chunk.
            ValueError: `first` is not among the tokens.
        """
        if self._ragged is not None:
            raise RuntimeError(
                f"{self.name}: repeating() expected a cache that has not evicted, got one whose heads differ"
            )
        if self._memory is None or self._due or self._first is not None:
            raise RuntimeError(
                f"{self.name}: repeating() must follow the attention of a prompt, got a cache without one"
            )
        if not 0 <= first < self.seen:
            raise ValueError(f"{self.name}: first must be one of the {self.seen} tokens of the prompt, got {first}")
        if len(self) < self.seen and self.seen > self.policy.chunk:
            raise RuntimeError(
                f"{self.name}: after an eviction one pass scores all slots, because those of a chunk are not known: "
                f"repeating() expected chunk >= {self.seen}, the tokens seen, got {self.policy.chunk}"
            )
        seen, self._first, self._gradients = self.seen, first, gradients
        try:
            yield
        finally:
            self._first = self._gradients = None
            self._due = self._waiting = 0  # if the step failed
            self.crop(seen)

    def _append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self._first is None:
            self._passes = None  # they were over other tokens
        return super()._append(k, v)

    def attention(self, q: Tensor, k_step: Tensor, v_step: Tensor, *, readers: int = 0, **options: Any) -> Tensor:
        self.policy.check_readers(readers)
        return super().attention(q, k_step, v_step, readers=readers, **options)

    def _read(self, q: Tensor, k_step: Tensor, v_step: Tensor, view: View, options: dict[str, Any]) -> Tensor:
        out = super()._read(q, k_step, v_step, view, options)
        if self._first is not None and q.shape[2] == self._due:  # some models' last layers read the last row alone
            end = k_step.shape[2] - q.shape[2]
            hidden = None if self._inputs is None else self._inputs.hidden
            every = self._view_of(k_step, v_step, starts=self._step_pads, layer=self.layer, state=self.state)
            before = self._passes if self._passed == end else None
            self._passes = self.policy.add_pass(before, q, every, self._first, end, options, hidden, self._gradients)
            self._passed = end
        return out

    def repeated(self) -> View:
        """Return the view of the stored slots, with what the passes so far observed.

        Raises:
            RuntimeError: There was no pass since the last token.
        """
        if self._passes is None or self._ragged is not None or self._passed != len(self):
            raise RuntimeError(
                f"{self.name}: evict() must follow the passes over the stored tokens, got none since the last"
            )
        view = self._stored()
        self.policy.observe_passes(view, self._passes, self.logits)
        return view

    def evict(self) -> None:
        """Keep the budget's best tokens by the passes so far.

        Raises:
            RuntimeError: There was no pass since the last token.
            ValueError: The policy has scope="model", and this is one of several layers.
        """
        evict_repeated([self])


def evict_repeated(caches: Sequence[RepeatingCache]) -> None:
    """Keep the budget's best tokens in the caches of a model, or of one layer; see `RepeatingCache.evict`."""
    policy, layers = caches[0].policy, caches[0].num_layers
    if policy.scope == "model" and len(caches) != layers:
        raise ValueError(
            f"{policy.name}: with scope='model' the heads of all layers share a budget, expected the caches of all "
            f"{layers} layers, got {len(caches)}; use kvops.hf, or scope='layer'"
        )
    with ExitStack() as undone:
        for cache in caches:
            undone.enter_context(cache.undone_on_error())
        if policy.scope == "layer":
            for cache in caches:
                view = cache.repeated()  # one by one, since a view may hold what passes observed
                if view.n > policy.room(view):
                    cache._keep(policy.choose(policy.scores(view), view, policy.room(view)), view)
        else:
            views = [x.repeated() for x in caches]
            if any(view.n > policy.room(view) for view in views):  # all or none, since they have one budget
                for cache, own, view in zip(caches, policy.of_layers(views), views):
                    cache._keep(own.pick(own.scores(view), view), view)
        for cache in caches:
            cache._passes = None
