"""The contract of a conversation: which tokens a `KVCache` has seen, and which of its columns are padding.

A cache is for one batch of conversations. Its columns are the tokens that it has seen. Each row begins with its
padding, and everything after that is a token, evicted or not. Whatever continues the conversation must agree:

- A mask [b, tokens] covers the tokens seen and the new ones. Its zeros are the cache's own padding, and nothing else.
- A prompt of `generate` that repeats the conversation has the same token ids, replies included.

`generate` shows token ids and mask (`turns`), with any attention. A forward shows its mask, if the model uses the
library's attention (`attention`), and no token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

REMEDY = (
    "for a new prompt make a new KVCache (kvops.hf.compress makes one for every call); to continue the conversation "
    "pass the token ids of all of it, its replies as generate returned them (beam search may leave other beams in the "
    "cache), or the new ids with an attention_mask over all tokens"
)


class Conversation:
    """What is known about the tokens that a cache has seen.

    Args:
        pads: int32 [b], how many pads each row of the prompts begins with, as the user declared; None: not declared.

    Attributes:
        ids: int64 [rows, n], token ids of the cache's rows from token `first` on; None: unknown.
        first: How many tokens before `ids` are unknown, because a forward read them, or as embeddings.
        virtual: How many virtual tokens an adapter (prompt tuning) has put before the prompt.
    """

    def __init__(self, pads: Tensor | None):
        self.declared = pads
        self.reset()

    def reset(self) -> None:
        """Forget everything but the declared padding."""
        self.shown: Tensor | None = None  # int32 [rows], the padding that the first forward's mask shows
        self.ids: Tensor | None = None
        self.first = self.virtual = 0

    def padding(self, rows: int) -> Tensor | None:
        """Return how many pads each row of an empty cache will begin with, int32 [rows]; None if that is unknown."""
        pads = self.shown if self.declared is None else self.declared
        if pads is None:
            return None
        if rows % pads.numel():
            raise ValueError(
                f"KVCache: pads must have one entry per row of the batch, expected {rows}, got {pads.numel()}"
            )
        # generate() repeats each prompt for its beams and return sequences, adjacent to each other
        return pads.repeat_interleave(rows // pads.numel())

    @contextmanager
    def declaring(self, pads: Tensor | None) -> Iterator[None]:
        """A block in which an empty cache takes this padding, int32 [b]; None: no block."""
        before = self.declared
        self.declared = before if pads is None else pads
        try:
            yield
        finally:
            self.declared = before

    def see(self, mask: Tensor | None, rows: int, seen: int, new: int, padding: Tensor | None) -> None:
        """Take the padding from the mask of a forward, or check that it has not changed.

        Args:
            mask: bool [rows, seen + new]; None: no zeros, or not shown.
            rows: As in `check_mask`.
            seen: As in `check_mask`.
            new: As in `check_mask`.
            padding: int32 [rows], the padding of a cache with tokens; None: none.

        Raises:
            ValueError: As in `check_mask`. Or a row of the first step is padding only.
        """
        if seen == 0:
            self.shown = None
            padding = self.padding(rows)
        if mask is None:
            return
        pads = self.check_mask(mask, rows, seen, new, padding)
        if seen or padding is not None:
            return
        if (pads == new).any():
            raise ValueError(
                "KVCache: expected a token in every row of the first step, got a row of pads only, and more pads may "
                "follow in the next chunk; give the KVCache the whole attention_mask, or pads"
            )
        self.shown = pads

    def check_mask(self, mask: Tensor, rows: int, seen: int, new: int, known: Tensor | None) -> Tensor:
        """Check the mask of a step and return how many pads each row begins with, int32 [rows].

        Args:
            mask: [rows, seen + new], 0 for padding.
            rows: The rows of the step.
            seen: How many tokens the cache has seen.
            new: How many new tokens the step has.
            known: int32 [rows], the known padding; None: no padding if the cache has tokens, unknown if it is empty.

        Raises:
            ValueError: The mask has another shape, zeros after a one, or other padding than the cache.
        """
        if mask.shape != (rows, seen + new):
            raise ValueError(
                f"KVCache: attention_mask must cover the tokens seen and the new ones, expected [{rows}, {seen} + "
                f"{new}], got {list(mask.shape)}; a cache is for one conversation, make a new KVCache for a new prompt"
            )
        pads = leading_pads(mask)
        if seen and known is None:
            known = torch.zeros_like(pads)
        if known is not None and not torch.equal(pads, known.to(pads.device).clamp(max=seen + new)):
            raise ValueError(
                "KVCache: attention_mask must begin with the pads that were declared or that the first step had, "
                f"expected {known.tolist()}, got {pads.tolist()}"
            )
        return pads

    def check_ids(self, prompt: Tensor, seen: int, pads: Tensor | None) -> None:
        """Check that the conversation so far is the beginning of a prompt.

        Args:
            prompt: int64 [b, n], n > seen. The cache holds each row once, or as often as there are beams.
            seen: How many tokens the cache has seen.
            pads: int32 [b], the padding, whose ids do not matter; None: no padding.

        Raises:
            ValueError: They differ.
        """
        if self.ids is None:
            return
        known = self.ids[:, : max(0, seen - self.first)].to(prompt.device)
        beams = len(known) // len(prompt)
        begun = prompt[:, self.first : self.first + known.shape[1]].repeat_interleave(beams, 0)
        differs = known != begun
        if pads is not None:
            columns = torch.arange(self.first, self.first + known.shape[1], device=prompt.device)
            differs &= columns >= pads.to(prompt.device).repeat_interleave(beams)[:, None]
        if differs.any():
            at, column = differs.nonzero()[0].tolist()
            raise ValueError(
                f"KVCache: expected a prompt that continues the {seen} tokens that this cache has seen, got another "
                f"one: row {at // beams} differs from token {self.first + column} on, expected the id "
                f"{int(known[at, column])}, got {int(begun[at, column])}; {REMEDY}"
            )

    def crop(self, seen: int) -> None:
        """Forget all tokens from token `seen` on."""
        self.first = min(self.first, seen)
        if self.ids is not None:
            self.ids = self.ids[:, : max(0, seen - self.first)]

    def map_rows(self, f: Callable[[Tensor], Tensor]) -> None:
        """Apply what changes the rows of the cache (beam search) to the token ids."""
        if self.ids is not None:
            self.ids = f(self.ids)


def leading_pads(mask: Tensor) -> Tensor:
    """Return how many zeros each row of a mask [b, n] begins with, int32 [b].

    Raises:
        ValueError: The mask has zeros elsewhere.
    """
    live = mask != 0
    pads = (live.cumsum(1) == 0).sum(1, dtype=torch.int32)
    if ((~live).sum(1) != pads).any():
        raise ValueError(
            "KVCache: attention_mask must be padded on the left (0s, then 1s), got 0s elsewhere; use a tokenizer with "
            "padding_side='left' (an evicting cache does not support pads on the right or between the turns of a "
            "conversation, as where the replies of a batch end at different steps; without an attention_mask, generate "
            "takes every pad token for padding)"
        )
    return pads


def mask_of_pads(pads: Tensor | None, n: int, device: torch.device) -> Tensor | None:
    """Return the mask of n tokens whose rows begin with these pads, int64 [b, n]; None without pads. pads: [b]."""
    if pads is None or not pads.any():
        return None
    return (torch.arange(n, device=device) >= pads.to(device)[:, None]).long()


def declared_pads(attention_mask: Tensor | None, pads: Tensor | Sequence[int] | None) -> Tensor | None:
    """Return the padding that the arguments of a `KVCache` declare, int32 [b] on the CPU; None if there is none."""
    if attention_mask is not None:
        if pads is not None:
            raise ValueError("KVCache: expected attention_mask or pads, got both")
        if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
            raise ValueError("KVCache: attention_mask must be a tensor [batch, tokens] of 0 and 1")
        pads = leading_pads(attention_mask.cpu())
        if (pads == attention_mask.shape[1]).any():
            raise ValueError(
                "KVCache: attention_mask must be padded on the left (0s, then 1s), with a 1 in every row, got a row of "
                "pads only"
            )
        return pads
    if pads is None:
        return None
    try:
        counts = torch.as_tensor(pads, device="cpu")
        integers = counts.dim() == 1 and counts.numel() and not (counts.is_floating_point() or counts.is_complex())
        fits = integers and counts.dtype != torch.bool and ((counts >= 0) & (counts < 2**31)).all()
    except (TypeError, ValueError, RuntimeError, OverflowError):  # not numbers, ragged, or beyond 64 bits
        fits = False
    if not fits:
        got = pads.tolist() if isinstance(pads, Tensor) else pads
        raise ValueError(f"KVCache: pads must be one integer per row of the batch, >= 0 and < 2^31, got {got}")
    return counts.to(torch.int32)
