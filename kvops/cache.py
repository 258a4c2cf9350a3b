"""A compressed cache of one layer that grows: what every method does in prefill chunks and in decode.

An object is settings plus the state of ONE layer. `append` takes the new tokens, returns the K and V that this step's
attention reads, then evicts by the method's rule::

    cache = kvops.KeyDiff(budget=1024)
    k_step, v_step = cache.append(k, v)         # [b, Hk, len + q, d]: what is stored and the new tokens
    out = attention(q, k_step, v_step)          # then the cache already holds only what it keeps

Logical positions live outside of the stored slots: the next token's position is `seen`, not `len`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from .ops import gather_kv


class Method:
    """Base of the methods' objects. A method says in `_evict` which slots stay; all else is here.

    k, v: [b, Hk, len, d] and [b, Hk, len, dv], what is stored (None while empty); heads and rows keep equally many.
    pads: int32 [b] or None, how many of a row's first stored slots are left padding.
    seen: logical tokens seen, padding included.
    layer, num_layers: which layer of how many this is (`fresh` sets them).
    """

    #: Every row of a padded batch keeps the same number of slots (padding goes first).
    fixed_budget = True
    #: Every layer keeps the same number of slots.
    uniform_layers = True
    #: Tensors of the state whose first dim is the batch.
    _state = ("k", "v", "pads", "_padding", "_kept")

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

    def fresh(self, layer: int = 0, num_layers: int = 1) -> Method:
        """An empty object with the same settings, for `layer` of `num_layers`."""
        other = copy.copy(self)
        other.layer, other.num_layers = layer, num_layers
        other.reset()
        return other

    def __repr__(self) -> str:
        names = inspect.signature(type(self)).parameters
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

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
        if not self.fixed_budget:
            if not pads.any():
                return
            raise NotImplementedError(
                f"{type(self).__name__}: rows of a padded batch keep different numbers of tokens, which a cache of "
                "equal rows cannot hold; compress in one call with starts= and lengths=, or batch rows of equal length"
            )
        self._padding = pads.to(torch.int32)
        self.pads = torch.zeros_like(self._padding)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Takes q new tokens, k: [b, Hk, q, d], v: [b, Hk, q, dv]; returns what this step's attention reads.

        That is [b, Hk, len + q, ...], the stored slots and the new ones (with `attend_before_compress=False` what is
        kept of them). Then evicts: the kept slots move to fresh memory, so that the rest is freed with the returned
        tensors. A failed call leaves the object as it was.
        """
        self._check(k, v)
        before = dict(vars(self))  # the state's tensors are replaced, never written to
        try:
            return self._append(k, v)
        except BaseException:
            vars(self).update(before)
            raise

    def _append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        q, seen = k.shape[2], self.seen + k.shape[2]
        k_step, v_step = (k, v) if self.k is None else (torch.cat((self.k, k), 2), torch.cat((self.v, v), 2))
        pads = self.pads
        if pads is not None:
            pads = pads + (self._padding - self.seen).clamp(0, q)
        indices = self._evict(k_step, v_step, pads, seen)
        if indices is None:
            if self.k is None:  # do not hold on to the caller's memory
                k_step, v_step = (x.clone(memory_format=torch.contiguous_format) for x in (k, v))
            self.k, self.v, self.pads, self.seen = k_step, v_step, pads, seen
            return k_step, v_step
        positions = self._positions(k_step, seen).gather(2, indices)
        if pads is not None:  # valid slots stay first of all
            pads = (pads - (k_step.shape[2] - indices.shape[2])).clamp(min=0)
        self.k, self.v = gather_kv(k_step, v_step, indices)
        self.pads, self.seen, self._kept, self._evicted_at = pads, seen, positions, seen
        return (k_step, v_step) if self.attend_before_compress else (self.k, self.v)

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
        self.k, self.v = self.k[:, :, :length].clone(), self.v[:, :, :length].clone()
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
            if not isinstance(x, Tensor):
                raise TypeError(f"{who}: {name} must be a torch.Tensor, got {type(x).__name__}")
            if x.dim() != 4:
                raise ValueError(f"{who}: {name} must be [b, Hk, q, d], got shape {list(x.shape)}")
            if x.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"{who}: {name} requires grad, but kvops is inference-only; call it under torch.no_grad()"
                )
            if x.shape[:3] != k.shape[:3] or x.dtype != k.dtype or x.device != k.device:
                raise ValueError(
                    f"{who}: v must match k in [b, Hk, q], dtype and device, expected {list(k.shape[:3])} {k.dtype} "
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
