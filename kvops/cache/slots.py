"""Caches that rotate tokens at the positions of their slots."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..methods.base import Out
from ..methods.view import LayerInputs
from ..ops import rope_at_slots, window_attention
from ..ops.flash_attention import attention
from ..ops.rope import Rope, Tables
from .base import Cache, Eviction, check_inputs, check_tokens

#: Steps of at most this many rows, drafts included, rotate keys as the attention reads them. Longer steps are prompt
#: chunks, and K is rotated once for them.
DECODE_ROWS = 16


class SlotCache(Cache, kind="slots"):
    """A cache whose tokens take the positions of their slots: 0, 1, ..., without gaps for evicted ones; see `Cache`.

    `attention` must follow each `append`: `append` only passes the new tokens on, and `attention` rotates, stores and
    evicts.
    """

    rope: Rope

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
        inputs: LayerInputs | None = None,
    ) -> Tensor:
        """Store, attend and evict, as `Cache.attend`.

        positions: int64 [t] or [b, t], the positions that q and k are rotated at; None: they are not rotated.
        """
        self._check(k, v)
        check_tokens(self.name, k)
        check_inputs(self.name, inputs, k)
        with self.undone_on_error():
            self._inputs = inputs if self.policy.needs.inputs else None
            k_step, v_step = self._append(k, v)
            self._check_step(q, k, k.shape[2])
            options = dict(scale=scale, softcap=softcap, sink_logits=sink_logits)
            out = self.attention(q, k_step, v_step, positions=positions, **options)
            self.release()
            return out

    def attention(
        self, q: Tensor, k_step: Tensor, v_step: Tensor, *, positions: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Compute the attention of the tokens just appended, as `Cache.attention`. positions: as in `attend`."""
        t = k_step.shape[2]
        self._check_step(q, k_step, self._due)
        positions = self._check_positions(positions, k_step)
        with self.undone_on_error():
            n, pads = len(self), self._pads_with(t)
            interleaved = self.rope.interleaved
            to_slots, back, tables = self._tables(positions, n, t, pads, k_step.device)
            q = rope_at_slots(q, *to_slots, interleaved=interleaved)
            if self.storage == "post_rope":
                k, v = self._extend(rope_at_slots(k_step, *to_slots, interleaved=interleaved), v_step)
                out = attention(q, k, v, starts=pads, **options).out
            else:
                plain = k_step if back is None else rope_at_slots(k_step, *back, interleaved=interleaved)
                k, v = self._extend(plain, v_step)
                cos, sin = tables
                if t <= DECODE_ROWS:
                    rotation: dict[str, Any] = dict(cos=cos, sin=sin, interleaved=interleaved)
                    visible = torch.arange(n + 1, n + t + 1, dtype=torch.int32, device=q.device)
                    out, _, _ = window_attention(q, k, v, visible, starts=pads, scores=False, **rotation, **options)
                else:
                    read = torch.empty_like(k, memory_format=torch.contiguous_format)
                    rope_at_slots(k_step, *to_slots, interleaved=interleaved, out=read[:, :, n:])
                    old = cos[..., :n, :], sin[..., :n, :]
                    rope_at_slots(k[:, :, :n], *old, interleaved=interleaved, out=read[:, :, :n])
                    out = attention(q, read, v, starts=pads, **options).out
            self._store(k, v, pads, self.seen + t)
            self._due = 0
        return out

    def _tables(
        self, positions: Tensor | None, n: int, t: int, pads: Tensor | None, device: torch.device
    ) -> tuple[Tables, Tables | None, Tables]:
        """Return three rotations: of the t new tokens to their slots; of the new tokens back to unrotated (None if they
        are unrotated); and of all n + t unrotated tokens to their slots."""
        rope = self.rope
        if pads is None:
            return *rope.new_slots(positions, n, t, device), rope.first(n + t, device)
        slots = self._slots(n + t, pads, device)
        back = None if positions is None else rope.between(positions, None)
        return rope.between(positions, slots[:, n:]), back, rope.tables(slots)

    def _append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self._due:
            raise RuntimeError(
                f"{self.name}: expected attention() after each append(), because with rope= it stores the tokens, got "
                f"none for the last {self._due} tokens; call attend(), or attention() after append() (with "
                "transformers: kvops.hf.use_attention(model))"
            )
        self._due = k.shape[2]
        return k, v

    def _moved(self, eviction: Eviction, out: Out = None) -> tuple[Tensor, Tensor]:
        indices, view, left = eviction
        view.rope = self.rope if self.storage == "post_rope" else None
        k, v = super()._moved(eviction, out)
        if view.rope is not None:  # all heads keep the same slots
            pads = view.starts
            old = indices[0, 0] if pads is None else (indices[:, 0] - pads[:, None]).clamp(min=0)
            new = self._slots(indices.shape[2], left, k.device)
            rope_at_slots(k, *self.rope.between(old, new), interleaved=self.rope.interleaved, out=k)
        return k, v

    @staticmethod
    def _slots(n: int, pads: Tensor | None, device: torch.device) -> Tensor:
        """Return the positions of n slots: int64 [n], or [b, n] for rows that begin with padding, whose slots are 0."""
        slots = torch.arange(n, device=device)
        return slots if pads is None else (slots - pads[:, None]).clamp(min=0)

    def _check_positions(self, positions: Tensor | None, k: Tensor) -> Tensor | None:
        if positions is None:
            return None
        b, t = k.shape[0], k.shape[2]
        integers = isinstance(positions, Tensor) and positions.dtype in (torch.int32, torch.int64)
        if not integers or positions.shape not in ((t,), (1, t), (b, t)):
            got = f"{positions.dtype} {list(positions.shape)}" if isinstance(positions, Tensor) else repr(positions)
            raise ValueError(f"{self.name}: positions must be int64 [{t}] or [{b}, {t}], got {got}")
        return positions[0] if positions.dim() == 2 and positions.shape[0] == 1 else positions
