"""Texts with passkeys, random passages that a model must find again: they show which heads look far back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.checks import check_int

#: What a passage is made of.
WORDS = (
    "apple river stone candle garden window silver mountain pencil bridge yellow market winter engine paper island "
    "orange table music forest copper letter summer bottle planet rabbit castle velvet harbor button lemon tower"
).split()
ANNOUNCEMENT = "\n\nRemember code {number}. Code {number} is:"
QUESTION = "\n\nWhat was code {number}? Code {number} is:"


class PasskeyTexts(NamedTuple):
    """Texts that repeat some of their passages at the end.

    Attributes:
        ids: int64 [b, n], the tokens, without padding.
        passages: int64 [b, p, 2], the first token of each passage and the one after its last.
        answers: int64 [b, p, 2], the same of its repetition, all of them after all passages.
    """

    ids: Tensor
    passages: Tensor
    answers: Tensor

    def check(self, who: str) -> None:
        """Raise TypeError or ValueError, in the name of `who`, unless these are such texts."""
        for name, x in self._asdict().items():
            if not isinstance(x, Tensor):
                raise TypeError(f"{who}: texts.{name} must be a torch.Tensor, got {type(x).__name__}")
            dims = "[b, n]" if name == "ids" else "[b, p, 2]"
            if x.dtype != torch.int64 or x.dim() != dims.count(",") + 1 or not x.numel():
                raise ValueError(f"{who}: texts.{name} must be int64 {dims}, got {x.dtype} {list(x.shape)}")
        b, n = self.ids.shape
        for name, x in (("passages", self.passages), ("answers", self.answers)):
            if x.shape != (b, self.passages.shape[1], 2):
                raise ValueError(f"{who}: texts.{name} must be [{b}, {self.passages.shape[1]}, 2], got {list(x.shape)}")
            if (x[..., 0] >= x[..., 1]).any() or x.min() < 0 or x.max() > n:
                raise ValueError(f"{who}: texts.{name} must be spans of at least one of {n} tokens, got {x.tolist()}")
        if (self.passages.amax((1, 2)) > self.answers.amin((1, 2)) - 1).any():
            raise ValueError(
                f"{who}: texts.answers must begin at least one token after the last passage, got "
                f"{self.answers.amin((1, 2)).tolist()} with passages up to {self.passages.amax((1, 2)).tolist()}"
            )

    def predicting(self) -> Tensor:
        """Return which tokens predict those of the answers: bool [b, n]."""
        at = torch.arange(self.ids.shape[1], device=self.answers.device) + 1
        first, end = self.answers.unbind(-1)
        return ((at >= first[..., None]) & (at < end[..., None])).any(1)


def passkey_texts(tokenizer: Any, ids: Tensor, *, passages: int = 4, length: int = 16, seed: int = 0) -> PasskeyTexts:
    """Hide passages of random words in texts, and ask for them at the end.

    The passages of a text are numbered, and stand at random places of its tokens: "Remember code 2. Code 2 is: river
    apple ...". Its end repeats them in the same order, each after a question: "What was code 2? Code 2 is: river apple
    ...". A text has as many tokens as it had, because its last ones make room.

    Args:
        tokenizer: The model's tokenizer.
        ids: int64 [b, n], texts without padding, of the lengths and the kind of the model's prompts.
        passages: How many passages each text gets.
        length: The words of a passage.
        seed: Of the random words and places, at least 0.

    Raises:
        TypeError: ids is not a tensor.
        ValueError: ids is not int64 [b, n], passages or length is less than 1, a text has too few tokens, or the
            tokenizer has none for the words.

    Source: after the passkeys of DuoAttention, Xiao et al., 2024, Sec. 2.2. The words were chosen here.
    """
    check_int("passkey_texts", "passages", passages, 1)
    check_int("passkey_texts", "length", length, 1)
    check_int("passkey_texts", "seed", seed, 0)
    check_ids("passkey_texts", ids)
    random = torch.Generator().manual_seed(seed)
    announce, ask = (
        [_encode(tokenizer, x.format(number=i + 1)) for i in range(passages)] for x in (ANNOUNCEMENT, QUESTION)
    )
    made = [_with_passages(tokenizer, row, announce, ask, length, random) for row in ids.tolist()]
    return PasskeyTexts(*(torch.tensor(x, dtype=torch.int64, device=ids.device) for x in zip(*made)))


def check_ids(who: str, ids: object) -> None:
    """Raise unless ids are int64 [b, n] with at least one token."""
    if not isinstance(ids, Tensor):
        raise TypeError(f"{who}: ids must be a torch.Tensor, got {type(ids).__name__}")
    if ids.dim() != 2 or not ids.numel() or ids.dtype != torch.int64:
        raise ValueError(f"{who}: ids must be int64 [b, n], got {ids.dtype} {list(ids.shape)}")


def _encode(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


_Spans = list[list[int]]


def _with_passages(
    tokenizer: Any, text: list[int], announce: _Spans, ask: _Spans, length: int, random: torch.Generator
) -> tuple[list[int], _Spans, _Spans]:
    """One text with its passages, and the spans of these and of their answers."""
    chosen = torch.randint(len(WORDS), (len(ask), length), generator=random).tolist()
    words = [_encode(tokenizer, "".join(f" {WORDS[i]}" for i in row)) for row in chosen]
    if not all(words):
        raise ValueError(f"passkey_texts: expected a tokenizer with tokens for {WORDS[:3]} and other words, got none")
    added = sum(len(a) + len(q) + 2 * len(w) for a, q, w in zip(announce, ask, words))
    left = len(text) - added
    if left < len(ask) + 1:
        raise ValueError(
            f"passkey_texts: expected texts of more than {added + len(ask)} tokens, which {len(ask)} passages of "
            f"{length} words and their questions take, got {len(text)}; pass fewer passages, or a smaller length"
        )
    places = (1 + torch.randint(left - 1, (len(ask),), generator=random)).sort().values.tolist()
    ids, passages, answers, read = [], [], [], 0
    for place, before, own in zip(places, announce, words):
        ids += text[read:place] + before
        passages.append([len(ids), len(ids) + len(own)])
        ids += own
        read = place
    ids += text[read:left]
    for before, own in zip(ask, words):
        ids += before
        answers.append([len(ids), len(ids) + len(own)])
        ids += own
    return ids, passages, answers
