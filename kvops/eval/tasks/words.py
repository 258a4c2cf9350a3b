"""Lists that fill the context: words, of which the question asks for the most common ones (RULER's aggregation, Hsieh
et al., 2024, Sec. 3), and a phone book (KeyDiff, App. H.1).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..specs import Refused
from .base import AnswerTask, Filler, Prompt, Turn, check_options, share_said
from .needles import Passkey, random_digits

SYLLABLES = np.array([a + b for a in "bdfghjklmnprstvz" for b in "aeiou"])
HEADER = " Here is a list of words. Some of them come more often than others:"


def random_words(rng: np.random.Generator, count: int) -> list[str]:
    """Return `count` different words of three syllables. A long context needs more words than a text has."""
    n = len(SYLLABLES)
    if count > n**3:
        raise Refused(f"a list has at most {n**3} different words, got {count}: ask for fewer, or lower --context")
    places = np.unravel_index(rng.choice(n**3, count, replace=False), (n, n, n))
    return ["".join(x) for x in zip(*(SYLLABLES[i].tolist() for i in places))]


class WordList(AnswerTask):
    """A list of words; the question asks for the most common ones."""

    words: int  # number of words to ask for
    chat: bool | None

    def __post_init__(self) -> None:
        check_options(self)

    def counts(self, costs: np.ndarray, room: int) -> np.ndarray:
        """Return how many times each word occurs, the most common first, so that all fit into `room` tokens.

        costs: int64, the tokens of each word. If the requested words do not stand out, the room is too small.
        """
        raise NotImplementedError

    def prompts(self, filler: Filler, context: int, count: int, seed: int) -> list[Prompt]:
        rng, frame = np.random.default_rng([seed, context, self.words]), filler.frame(self.chat)
        header, blank = filler.encode(HEADER), filler.encode("\n")[-1:]
        room = max(0, context - len(frame.first) - len(header))
        asked = filler.ask(f"What are the {self.words} most common words in the list?", "They are:", frame)
        found = []
        for _ in range(count):
            words = random_words(rng, max(self.words + 1, room // 2))  # a word has at least two tokens
            pieces = [filler.encode(" " + x) for x in words]
            times = self.counts(np.array([len(x) for x in pieces]), room)
            if times[self.words - 1] <= times[self.words] or not times[self.words]:
                raise Refused(f"--context {context} is too short for the words of {self.name}")
            order = rng.permutation(np.repeat(np.arange(len(times)), times))
            ids = np.concatenate([pieces[i] for i in order])
            pad = np.repeat(blank, room - len(ids))  # too small for one more word
            answers = tuple(words[: self.words])
            turn = Turn(asked, answers, len(filler.encode(", and ".join(answers))) + 8)
            found.append(Prompt(np.concatenate([frame.first, pad, header, ids]), (turn,)))
        return found

    def score(self, said: Sequence[str], prompt: Prompt) -> dict[str, float]:
        share = share_said(said[0], prompt.turns[0].answers)
        return {"partial": share, "exact": float(share == 1)}


@dataclass
class CommonWords(WordList):
    """A few common words among many rare ones: which are the common ones (RULER, Sec. 3)?

    partial: the fraction of them in the answer; exact: all of them.
    words: the number of common words; often, rare: how many times a common and a rare word occur; chat: as in passkey.
    """

    words: int = 10
    often: int = 10
    rare: int = 1
    chat: bool | None = None

    name = "common-words"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rare >= self.often:
            raise Refused(f"{self.name}: rare must be less than often, {self.often}, got {self.rare}")

    def counts(self, costs: np.ndarray, room: int) -> np.ndarray:
        times = np.where(np.arange(len(costs)) < self.words, self.often, self.rare)
        return times * (np.cumsum(times * costs) <= room)


@dataclass
class FrequentWords(WordList):
    """Words whose counts follow Zipf's law: the k-th most common one occurs in proportion to k^-alpha (RULER, Sec. 3).
    Which are the most common ones?

    partial: the fraction of them in the answer; exact: all of them.
    chat: as in passkey.
    """

    words: int = 3
    alpha: float = 2.0
    chat: bool | None = None

    name = "frequent-words"

    def counts(self, costs: np.ndarray, room: int) -> np.ndarray:
        shares = np.arange(1, len(costs) + 1) ** -float(self.alpha)

        def times(scale: int) -> np.ndarray:
            return (scale * shares).astype(np.int64)

        most = bisect_right(
            range(room), room, key=lambda x: int((times(x) * costs).sum())
        )  # the first that does not fit
        return times(most - 1)


@dataclass
class Phonebook(Passkey):
    """A phone book: a line per name with a number of `digits` digits. The question asks for one name's number (KeyDiff,
    App. H.1). All keys are alike, and any of them may be asked for. Scores and options as in passkey.
    """

    digits: int = 7

    name = "phonebook"

    def prompts(self, filler: Filler, context: int, count: int, seed: int) -> list[Prompt]:
        rng, frame = np.random.default_rng([seed, context, self.digits]), filler.frame(self.chat)
        header, blank = filler.encode(" Here is a phone book:"), filler.encode("\n")[-1:]
        room = max(0, context - len(frame.first) - len(header))
        places = min(self.depths, count)
        depths = np.linspace(0, 1, places) if places > 1 else [0.3]
        found: list[Prompt] = []
        size = 0  # of a question: all have the same number of tokens, since they are read together
        for i in range(count):
            names = [x.capitalize() for x in random_words(rng, room // 4 + 1)]  # a line has at least four tokens
            numbers = [random_digits(rng, self.digits) for _ in names]
            lines = [filler.encode(f"\n{x}: {number}") for x, number in zip(names, numbers)]
            fit = int(np.searchsorted(np.cumsum([len(x) for x in lines]), room, "right"))
            if fit < 2:
                raise Refused(f"--context {context} is too short for a phone book with numbers of {self.digits} digits")
            asked = [filler.ask(f"What is the number of {x}?", f"The number of {x} is ", frame) for x in names[:fit]]
            size = size or Counter(map(len, asked)).most_common(1)[0][0]
            depth = float(depths[i % places])
            place = min(range(fit), key=lambda j: (len(asked[j]) != size, abs(j - depth * (fit - 1))))
            if len(asked[place]) != size:
                raise Refused(
                    f"--context {context} is too short: no name of a phone book has a question of {size} tokens"
                )
            book = np.concatenate(lines[:fit])
            ids = np.concatenate([frame.first, np.repeat(blank, room - len(book)), header, book])
            turn = Turn(asked[place], (numbers[place],), len(filler.encode(numbers[place])), stops=False)
            found.append(Prompt(ids, (turn,), depth))
        return found
