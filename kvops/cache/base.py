"""The cache of one layer under a policy: state only, the rule is the policy's."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..checks import check_choice, check_int, inference_only
from ..flash_attention import attention
from ..methods.base import IN_PLACE, Out, Policy, View, check_policy
from ..rope import Rope
from .memory import Memory, storage_bytes

STORAGES = ("pre_rope", "post_rope")


class Eviction(NamedTuple):
    """What stays of the stored slots, until they move."""

    indices: Tensor  # int64 [b, Hk, m]
    view: View  # as the policy saw it
    pads: Tensor | None  # int32 [b]: padding that is left


class Cache:
    """A compressed cache of one layer that grows: prefill chunks and decode under any policy. ::

        cache = kvops.Cache(kvops.SnapKV(1024))
        out = cache.attend(q, k, v)             # q: [b, Hq, t, d], k, v: [b, Hk, t, d] -> [b, Hq, t, d]

    `attend` takes the new tokens, computes their attention over what is stored and over each other, then evicts by the
    policy's rule. With an attention of one's own it is two steps: `append` returns the K and V that this step's
    attention reads, [b, Hk, len + t, d]. Most policies have then evicted already. Those that look at queries do it in
    `attention`, which has to follow, and so does a cache that rotates keys at their slots (`rope`).

    In decode nothing is copied: memory has room for tokens to come, `append` returns views of it, and what an eviction
    keeps moves to the front at the next `append`. So use what `append` returned before the next call that changes the
    cache. Reading `k` or `v` in between is safe: it moves them to fresh memory.

    Logical positions live outside of the stored slots: the next token's position is `seen`, not `len`.

    Args:
        policy: settings and rule, such as kvops.KeyDiff(1024).
        layer, num_layers: which layer of how many that evict this is.
        rope: the model's rotary embedding, for policies with positions="slots". `attention` then rotates all keys at
            their slots and the queries at theirs (new tokens take the slots after the stored ones), attends, stores and
            evicts. Without it keys are moved as they come.
        storage: with a rope, "pre_rope": keys are stored without rotation, and rotated whenever they are read;
            "post_rope": they are stored rotated at their slots and turned when they move, which rounds them each time.
        attend_before_compress: False: a step's attention reads only what is kept (policies that look at K and V).

    Attributes:
        k, v: [b, Hk, len, d] and [b, Hk, len, dv], what is stored (None while empty); heads and rows keep equally many.
        pads: int32 [b] or None, how many of a row's first stored slots are left padding.
        seen: logical tokens seen, padding included.
        frozen: nothing is evicted any more (`freeze`).
        state: what the policy remembers of the layer.
    """

    #: Tensors whose first dim is the batch, beside those of `state`.
    _tensors: ClassVar[tuple[str, ...]] = ("pads", "queries", "_padding", "_kept")
    #: The subclasses; `Cache(policy)` makes the last that serves the policy.
    _kinds: ClassVar[list[type[Cache]]] = []

    def __init_subclass__(cls) -> None:
        Cache._kinds.append(cls)

    def __new__(cls, policy: Policy | None = None, *, rope: Rope | None = None, **options: Any) -> Cache:
        kinds = [x for x in Cache._kinds if x.serves(policy, rope)] if cls is Cache else []
        return object.__new__(kinds[-1] if kinds else cls)

    @classmethod
    def serves(cls, policy: Policy | None, rope: Rope | None) -> bool:
        """Whether this is the cache that such a policy needs."""
        return True

    def __init__(
        self,
        policy: Policy,
        *,
        layer: int = 0,
        num_layers: int = 1,
        rope: Rope | None = None,
        storage: str = "pre_rope",
        attend_before_compress: bool = True,
    ):
        check_policy("Cache", policy)
        check_int("Cache", "layer", layer, 0)
        check_int("Cache", "num_layers", num_layers, 1)
        if layer >= num_layers:
            raise ValueError(f"Cache: layer must be below num_layers, {num_layers}, got {layer}")
        check_choice("Cache", "storage", storage, STORAGES)
        if not (rope is None or isinstance(rope, Rope)):
            raise TypeError(f"Cache: rope must be a kvops.Rope, got {type(rope).__name__}")
        slots = policy.positions == "slots" and not policy.uses_queries
        if rope is not None and not (slots and attend_before_compress):
            raise ValueError(
                f"Cache: rope= needs a policy with positions='slots', and attend_before_compress=True, got {policy!r}"
            )
        if policy.uses_queries and not attend_before_compress:
            raise ValueError(f"Cache: {policy.name} evicts by a step's attention, expected attend_before_compress=True")
        policy.check_cache(layer, num_layers)
        self.policy, self.layer, self.num_layers = policy, layer, num_layers
        self.rope, self.storage, self.attend_before_compress = rope, storage, attend_before_compress
        self.drafts = False  # remembers the queries of its steps
        self.reset()

    def reset(self) -> None:
        """Forgets every token and the padding."""
        self.pads: Tensor | None = None
        self.seen = 0
        self.frozen = False
        self.state: dict[str, Any] = {}
        self._memory: Memory | None = None
        self._length = 0  # slots that stay,
        self._eviction: Eviction | None = None  # if they have yet to move
        #: Of a draft: the queries of its steps, [b, Hq, steps, d].
        self.queries: Tensor | None = None
        self._padding: Tensor | None = None  # int32 [b]: padding columns of the whole sequence
        self._kept: Tensor | None = None  # int64 [b, Hk, <= len]: positions at the last eviction; the rest follow on
        self._evicted_at = 0  # tokens seen at the last eviction
        self._step_pads: Tensor | None = None  # int32 [b]: pads of what the last append returned

    @property
    def name(self) -> str:
        """What errors call it: as its policy."""
        return self.policy.name

    def __repr__(self) -> str:
        return f"Cache({self.policy!r}, layer={self.layer}, num_layers={self.num_layers})"

    def __len__(self) -> int:
        """Stored slots per head."""
        return self._length

    @property
    def k(self) -> Tensor | None:
        """[b, Hk, len, d], None while empty."""
        return None if self._memory is None else self._k_and_v()[0]

    @property
    def v(self) -> Tensor | None:
        """[b, Hk, len, dv], None while empty."""
        return None if self._memory is None else self._k_and_v()[1]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the stored K and V hold, with the room for tokens to come."""
        return self.nbytes_with()

    def nbytes_with(self, *step: Tensor) -> int:
        """`nbytes` while the tensors that `append` returned are still there, which may be other memory."""
        memory = self._memory
        return storage_bytes(*step) if memory is None else storage_bytes(memory.k, memory.v, *step)

    @property
    def positions(self) -> Tensor | None:
        """int64 [b, Hk, len]: the logical position of each stored slot (columns of the padded batch)."""
        if self._memory is None:
            return None
        return self._stored().positions() if self._eviction is None else self._kept

    @property
    def padding(self) -> Tensor | None:
        """int32 [b]: columns of padding that each row of the sequence begins with; None: there is none."""
        return self._padding

    def freeze(self) -> None:
        """From now on every token stays (until `reset`): a prompt that is compressed once, and a decode that grows."""
        self.frozen = True

    def keep(self, slots: Tensor) -> None:
        """Evicts all stored slots but these: int64 [any] or [b, Hk, any], ascending."""
        with self.undone_on_error():
            view = self._stored()
            self._keep(slots.expand(*view.k.shape[:2], -1), view)

    def set_pads(self, pads: Tensor) -> None:
        """Row b of the sequence begins with pads[b] columns of padding. Call before the first append."""
        if self._memory is not None:
            raise ValueError(f"{self.name}: set_pads must come before the first append, got {self.seen} tokens")
        if not isinstance(pads, Tensor):
            raise TypeError(f"{self.name}: pads must be a torch.Tensor, got {type(pads).__name__}")
        if pads.dim() != 1 or pads.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{self.name}: pads must be int32 [b], got {pads.dtype} {list(pads.shape)}")
        if (pads < 0).any():
            raise ValueError(f"{self.name}: pads must be at least 0, got {pads.min()}")
        if not self.policy.fixed_budget and not pads.any():
            return
        self._padding = pads.to(torch.int32)
        self.pads = torch.zeros_like(self._padding)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Takes t new tokens, k: [b, Hk, t, d], v: [b, Hk, t, dv]; returns what this step's attention reads.

        That is [b, Hk, len + t, ...], the stored slots and the new ones (with `attend_before_compress=False` what is
        kept of them). Then evicts. The returned tensors are valid until the next call that changes the cache. A failed
        call leaves the object as it was.
        """
        self._check(k, v)
        with self.undone_on_error():
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
        self._check(k, v)
        check_tokens(self.name, k)
        with self.undone_on_error():
            k_step, v_step = self._append(k, v)
            check_step(self.name, q, k, k.shape[2])
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
                f"{self.name}: with attend_before_compress=False only one token at a time can attend to a "
                f"compressed cache (which kept slots are older than a row differs by head), got {q.shape[2]}"
            )
        options: dict[str, Any] = dict(scale=scale, softcap=softcap, sink_logits=sink_logits)
        return self._record(q, attention(q, k_step, v_step, starts=self._step_pads, **options).out)

    def _record(self, q: Tensor, out: Tensor) -> Tensor:
        """A draft remembers its queries."""
        if self.drafts:
            self.queries = q.clone() if self.queries is None else torch.cat((self.queries, q), 2)
        return out

    def read(self, q: Tensor, k_step: Tensor, v_step: Tensor, **options: Any) -> Tensor:
        """The attention of another layer's queries over the step that `attention` was for (layers that share keys).

        q: [b, Hq, t or fewer, d], of the last of the rows just appended -> [b, Hq, as many, dv]. options: as there.
        """
        return attention(q, k_step, v_step, starts=self._step_pads, **options).out

    def _append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        t, first = k.shape[2], self._memory is None
        self._step_pads = pads = self._pads_with(t)
        k_step, v_step = (k, v) if first else self._extend(k, v)
        evicted = self._store(k_step, v_step, pads, self.seen + t)
        if evicted and not self.attend_before_compress:
            self._step_pads = self.pads
            return self._k_and_v()
        if not evicted and first:  # do not hold on to the caller's memory
            self._memory = Memory.of(k, v)
            return self._k_and_v()
        return k_step, v_step

    def _extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes tokens behind the stored slots; the views of all of them."""
        if self._memory is None:
            self._memory = Memory.of(k, v)
        else:
            self._memory = self._memory.extended(self._length, k, v)
        return self._memory.first(self._length + k.shape[2])

    def _store(self, k: Tensor, v: Tensor, pads: Tensor | None, seen: int) -> bool:
        """Evicts by the rule from k, v, the stored slots and the new ones; whether it evicted any."""
        view = self._view(k, v, pads, seen)
        indices = None if self.frozen else self._evict(view)
        if indices is None:
            self._length, self.pads, self.seen, self.state = k.shape[2], pads, seen, view.state
        else:
            self._keep(indices, view)
        return indices is not None

    def _stored(self, new: int | None = None) -> View:
        """What the policy sees of what is stored; `new`: how many of the tokens are the step's."""
        if self._memory is None:
            raise RuntimeError(f"{self.name}: the cache is empty, expected an append() before")
        self._settle()
        return self._view(*self._memory.first(self._length), self.pads, self.seen, new=new)

    def _k_and_v(self) -> tuple[Tensor, Tensor]:
        """K and V of the stored slots, without a change of what `append` returned."""
        self._settle(in_place=False)
        assert self._memory is not None  # as the caller knows
        return self._memory.first(self._length)

    def _settle(self, in_place: bool = True) -> None:
        """Moves what the last eviction kept to the front of the memory, or to fresh memory."""
        if self._eviction is None:
            return
        assert self._memory is not None  # what an eviction is of
        if in_place and self._memory.writable:
            self._moved(self._eviction, IN_PLACE)
        else:
            self._memory = Memory(*self._moved(self._eviction))
        self._eviction = None

    def _evict(self, view: View) -> Tensor | None:
        """The slots that stay once a step has been stored; None if all do."""
        return self.policy.evict(view)

    def _view(self, k: Tensor, v: Tensor, pads: Tensor | None, seen: int, new: int | None = None) -> View:
        """What the policy sees. k, v: the stored slots and the new ones; pads: a row's first invalid slots."""
        return View(
            k,
            v,
            pads,
            fill_invalid=pads is not None,
            layer=self.layer,
            num_layers=self.num_layers,
            seen=seen,
            new=seen - self.seen if new is None else new,
            kept=self._kept,
            padding=self._padding,
            state=dict(self.state),
        )

    def _pads_with(self, t: int) -> Tensor | None:
        """`pads` when t more columns of the batch are stored."""
        if self.pads is None or self._padding is None:
            return None
        return self.pads + (self._padding - self.seen).clamp(0, t)

    def _keep(self, indices: Tensor, view: View) -> None:
        """Evicts all slots but `indices`, int64 [b, Hk, m]: ascending, -1 first in rows that keep fewer."""
        pads = view.starts
        slots = indices.clamp(min=0) if pads is not None else indices
        self._kept = view.positions().gather(2, slots)
        for name in self.policy.by_slot:
            view.state[name] = view.state[name].gather(2, slots)
        left = pads
        if pads is not None:  # what is kept of a row's padding, alike in all heads, stays first
            left = (indices[:, 0] < pads[:, None]).sum(-1, dtype=torch.int32)
        self._length, self.pads, self.seen, self._evicted_at = indices.shape[2], left, view.seen, view.seen
        self.state = view.state
        self._eviction = Eviction(indices, view, left)
        if not self._moves_in_place(view):
            self._memory = Memory(*self._moved(self._eviction))
            self._eviction = None

    def _moves_in_place(self, view: View) -> bool:
        """Whether what stays may wait in the memory, and then move within it."""
        memory = self._memory
        return (
            memory is not None  # else the view is of the caller's tensors
            and self.attend_before_compress  # this step's attention reads what is there
            and (view.starts is None or self.policy.fixed_budget)  # rows that begin with -1 are no compaction
            and not memory.wasteful(self._length)
            and memory.writable
        )

    def _moved(self, eviction: Eviction, out: Out = None) -> tuple[Tensor, Tensor]:
        """The slots that stay: in fresh memory, or `IN_PLACE`."""
        return self.policy.move(eviction.view, eviction.indices, out)

    def undone_on_error(self) -> _Undone:
        """A block after which, if it fails, the cache is what it was."""
        self._settle()
        return _Undone(self)

    def __copy__(self) -> Cache:
        """A cache that goes on from here by itself; the first of the two that is written to takes memory of its own."""
        twin: Cache = object.__new__(type(self))
        vars(twin).update(vars(self))
        if self._memory is not None:
            self._memory.shared = True
        return twin

    def catch_up(self) -> None:
        """Evicts what a frozen cache has not, as after a step of decode: when drafted tokens are accepted, say.

        Policies that look at queries evict in `attention` alone.
        """
        with self.undone_on_error():
            view = self._stored(new=1)
            indices = None if self.frozen else self._evict(view)
            if indices is not None:
                self._keep(indices, view)

    def crop(self, seen: int) -> None:
        """Forgets all tokens from logical position `seen` on (those of a rejected draft, say).

        ValueError when that needs tokens that were evicted: when `seen` is before the last eviction.
        """
        if isinstance(seen, bool) or not isinstance(seen, int):
            raise TypeError(f"{self.name}: crop needs an int, got {type(seen).__name__} {seen!r}")
        if seen < 0:
            raise ValueError(f"{self.name}: crop expected at least 0 tokens, got {seen}")
        if seen >= self.seen:
            return
        if not self.policy.croppable:
            raise ValueError(
                f"{self.name}: cannot crop to {seen} of {self.seen} tokens: what the later ones attended to is in the "
                "scores"
            )
        if seen < self._evicted_at:
            raise ValueError(
                f"{self.name}: cannot crop to {seen} tokens, since some were evicted when "
                f"{self._evicted_at} had been seen; expected {self._evicted_at} or more"
            )
        self._settle()
        memory, length = self._memory, self._length - (self.seen - seen)
        if memory is not None and memory.wasteful(length):
            self._memory = Memory(*(x.clone() for x in memory.first(length)))
        self._length = length
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

    def _map(self, f: Callable[[Tensor], Tensor]) -> None:
        self._settle()
        if self._memory is not None:
            self._memory = Memory(f(self._memory.k), f(self._memory.v))
        for name in self._tensors:
            x = getattr(self, name)
            if x is not None:
                setattr(self, name, f(x))
        self.state = {name: f(x) if isinstance(x, Tensor) else x for name, x in self.state.items()}

    def _check(self, k: Tensor, v: Tensor) -> None:
        """New tokens have four dims, agree with each other and with what is stored, and need no gradient."""
        who = self.name
        memory = self._memory
        k_stored, v_stored = (None, None) if memory is None else (memory.k, memory.v)
        for name, x, stored in (("k", k, k_stored), ("v", v, v_stored)):
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


class _Undone:
    """What `Cache.undone_on_error` returns.

    What a cache remembers is replaced, never written to. Only its memory is, and a block writes behind the slots that
    are used; what has to move within them (`Cache._settle`) has done so before.
    """

    __slots__ = ("cache", "before")

    def __init__(self, cache: Cache):
        self.cache, self.before = cache, vars(cache).copy()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        if kind is not None:
            vars(self.cache).clear()
            vars(self.cache).update(self.before)
