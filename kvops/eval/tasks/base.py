"""What a task promises: prompts with their answers, and how answers are judged.

A task makes prompts of an exact length in tokens (the same for every method: they hang on the seed alone), and measures
what a method's cut of the cache leaves. This file needs neither transformers nor kvops' operators: a reader
(../reader.py) does what a model has to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from ..specs import Refused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..methods import Rule

POINTS = ("before", "after")  # the cache is cut before the question is known, or after it


@dataclass(frozen=True)
class Turn:
    """A question, and what the answer should say."""

    question: np.ndarray  # int64 [any], tokens
    answers: tuple[str, ...]
    new_tokens: int  # of the answer, at most
    stops: bool = True  # an end-of-sequence token ends it
    choices: tuple[str, ...] = ()  # what may be answered, where that is fixed


@dataclass(frozen=True)
class Prompt:
    context: np.ndarray  # int64 [context], tokens: the text that the questions are about
    turns: tuple[Turn, ...]
    depth: float | None = None  # where in the context the answer lies, 0 to 1


@dataclass
class Outcome:
    """What one method did at one budget with a batch of prompts."""

    scores: dict[str, list[float]]  # by metric, one number per prompt
    tokens: int = 0  # kept per KV head, mean over the layers
    bytes_held: int = 0  # by the cache after the cut, per prompt
    bytes_full: int = 0  # by an uncut one
    prefill_s: float = 0.0  # of the batch: reading the prompts and cutting the cache
    decode_s: float = 0.0  # of the batch: the steps of one token
    steps: int = 0
    said: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)  # what only this task has, for the report


class Filler:
    """A long text in tokens, to hide things in, and the tokenizer that made them.

    tokenizer: one of transformers' (any version).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str):
        self.tokenizer = tokenizer
        self.ids = self.encode(text)
        self.first = np.array(tokenizer("").input_ids, dtype=np.int64)  # <bos>, where the model expects one
        known = np.unique(self.ids).tolist()
        words = tokenizer.convert_ids_to_tokens(known)
        starts = [i for i, word in zip(known, words) if word[:1] in (" ", "\n", "Ġ", "Ċ", "▁")]
        self.starts_word = np.isin(self.ids, starts)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer(text, add_special_tokens=False).input_ids, dtype=np.int64)

    def decode(self, ids: np.ndarray) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        assert isinstance(text, str)  # of one row of ids
        return text

    def context(
        self, rng: np.random.Generator, length: int, needles: Sequence[str], depths: Sequence[float]
    ) -> np.ndarray:
        """Exactly `length` tokens: a random piece of the text with the needles at these depths (0 to 1), before the
        next word that begins there."""
        hidden = [self.encode(x) for x in needles]
        room = length - len(self.first) - sum(map(len, hidden))
        if room < 0:
            raise Refused(f"--context must hold {length - room} tokens of needles at least, got {length}")
        if room >= len(self.ids):
            raise Refused(f"--text must have more than {room} tokens, got {len(self.ids)}")
        begin = int(rng.integers(0, len(self.ids) - room))
        text, starts = self.ids[begin : begin + room], self.starts_word[begin : begin + room]
        places = []
        for depth in depths:
            place = round(depth * room)
            if 0 < depth < 1:
                place = next((i for i in range(place, min(place + 12, room)) if starts[i]), min(place + 12, room))
            places.append(place)
        pieces, last = [self.first], 0
        for i in sorted(range(len(hidden)), key=lambda i: places[i]):
            pieces += [text[last : places[i]], hidden[i]]
            last = places[i]
        return np.concatenate([*pieces, text[last:]])


class Cut(Protocol):
    """A batch of prompts whose cache was cut."""

    tokens: int
    bytes_held: int
    bytes_full: int
    seconds: float


class Reader(Protocol):
    """What a task asks of a model; `kvops.eval.reader.Reader` is one."""

    def cut(self, prompts: np.ndarray, rule: Rule, budget: int | None) -> Cut:
        """Reads prompts, int64 [b, n], and cuts their cache once, by a rule, to a budget."""

    def answer(self, cut: Any, feed: np.ndarray | None, steps: int, stops: bool) -> tuple[np.ndarray, float, int]:
        """Goes on after `cut`, which this reader has made.

        Feeds int64 [b, any] (None: nothing was said since the cut) and goes on greedily: int64 [b, steps] (padded with
        -1 behind an end), seconds of the steps of one token, and how many these were. The cache grows.
        """


@dataclass
class Task:
    """A kind of prompts, and what is measured on them. A subclass has a dataclass field for each option."""

    name: ClassVar[str]
    points: ClassVar[tuple[str, ...]] = POINTS
    metrics: ClassVar[tuple[str, ...]]  # the first is the one of pictures
    batches: ClassVar[bool] = True  # prompts and their questions have one length, so several can be read together
    percent: ClassVar[bool] = True  # scores lie between 0 and 1
    better: ClassVar[str] = "higher"  # or "lower": the first metric

    def prompts(self, filler: Filler, context: int, count: int, seed: int) -> list[Prompt]:
        """So many prompts, with contexts of exactly so many tokens (at most so many, the question included, where
        prompts are not read in batches)."""
        raise NotImplementedError

    def run(
        self, reader: Reader, filler: Filler, prompts: list[Prompt], rule: Rule, budget: int | None, point: str
    ) -> Outcome:
        """What a rule at a budget makes of a batch of prompts; raises `methods.Unreachable` where it cannot."""
        raise NotImplementedError


def asked(prompts: list[Prompt], point: str) -> tuple[np.ndarray, list[np.ndarray | None]]:
    """What is read before the cut, int64 [b, n], and what is fed after it for each turn, int64 [b, any] (None:
    nothing)."""
    context = np.stack([x.context for x in prompts])
    turns = range(len(prompts[0].turns))
    questions: list[np.ndarray | None] = [np.stack([x.turns[i].question for x in prompts]) for i in turns]
    if point == "after":
        context = np.concatenate([context, np.stack([x.turns[0].question for x in prompts])], 1)
        questions[0] = None
    return context, questions


class AnswerTask(Task):
    """Tasks whose questions are answered in words."""

    metrics: ClassVar[tuple[str, ...]] = ("partial", "exact")

    def score(self, said: Sequence[str], prompt: Prompt) -> dict[str, float]:
        """By metric, from what was said in each turn."""
        raise NotImplementedError

    def run(
        self, reader: Reader, filler: Filler, prompts: list[Prompt], rule: Rule, budget: int | None, point: str
    ) -> Outcome:
        context, questions = asked(prompts, point)
        return self.answers(reader, filler, prompts, reader.cut(context, rule, budget), questions)

    def answers(
        self, reader: Reader, filler: Filler, prompts: list[Prompt], cut: Cut, questions: list[np.ndarray | None]
    ) -> Outcome:
        """What is said to the questions, and its scores."""
        said: list[list[str]] = [[] for _ in prompts]
        decode_s, steps = 0.0, 0
        for i, question in enumerate(questions):
            turns = [x.turns[i] for x in prompts]
            most = max(x.new_tokens for x in turns)
            ids, seconds, count = reader.answer(cut, question, most, turns[0].stops)
            decode_s, steps = decode_s + seconds, steps + count
            for words, row in zip(said, ids):
                words.append(filler.decode(row[row >= 0]))
        scores = [self.score(words, prompt) for words, prompt in zip(said, prompts)]
        return Outcome(
            {x: [s[x] for s in scores] for x in scores[0]},
            cut.tokens,
            cut.bytes_held // len(prompts),
            cut.bytes_full // len(prompts),
            cut.seconds,
            decode_s,
            steps,
            [" | ".join(words) for words in said],
        )


def share_said(said: str, answers: Sequence[str]) -> float:
    """The share of the answers that occur in what was said, in any case (RULER's string_match_all)."""
    return sum(x.lower() in said.lower() for x in answers) / len(answers)


MOST = 1 << 20  # of an option


def positive(task: Task) -> None:
    """Every option of the task is at least 1 and at most MOST, and an integer unless its default is none."""
    for option in fields(task):
        value, whole = getattr(task, option.name), isinstance(option.default, int)
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not value >= 1:
            what = "an integer" if whole else "a number"
            raise Refused(f"{task.name}: {option.name} must be {what}, at least 1, got {value!r}")
        if value > MOST:
            raise Refused(f"{task.name}: {option.name} must be at most {MOST}, got {value!r}")
