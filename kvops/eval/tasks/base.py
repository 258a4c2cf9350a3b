"""The interface of a task: prompts with their answers, and how answers are scored.

A task generates prompts of an exact length in tokens. They depend on the seed alone, so they are the same for every
method. It then measures how well the model answers from the cut cache. This file needs neither transformers nor kvops'
operators: a reader (../reader.py) runs the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from ..specs import Refused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..methods import Rule

POINTS = ("before", "after")  # the cache is cut before the question is known, or after it


@dataclass(frozen=True)
class Turn:
    """A question and its expected answers.

    Attributes:
        question: int64 [any], tokens.
        answers: the expected answers.
        new_tokens: the most tokens to generate.
        stops: whether an end-of-sequence token ends the answer.
        choices: the allowed answers, for tasks that fix them.
    """

    question: np.ndarray
    answers: tuple[str, ...]
    new_tokens: int
    stops: bool = True
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """A text and the questions about it.

    Attributes:
        context: int64 [context], the tokens of the text.
        turns: the questions, in order.
        depth: position of the answer in the context, 0 to 1; None if unknown.
    """

    context: np.ndarray
    turns: tuple[Turn, ...]
    depth: float | None = None


@dataclass
class Outcome:
    """The result of one method at one budget on a batch of prompts.

    Attributes:
        scores: by metric, one number per prompt.
        tokens: kept per KV head, averaged over the layers.
        bytes_held: bytes of the cache after the cut, per prompt.
        bytes_full: bytes of an uncut cache, per prompt.
        prefill_s: seconds to read the batch and cut its cache.
        decode_s: seconds of the one-token steps of the batch.
        steps: number of these steps.
        said: the generated answers, one per prompt.
        more: results that only this task has, for the report.
    """

    scores: dict[str, list[float]]
    tokens: int = 0
    bytes_held: int = 0
    bytes_full: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    steps: int = 0
    said: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Frame:
    """What surrounds a context, the questions about it and the answers.

    Attributes:
        first: int64 [any], the tokens before the context: <bos>, where the model expects one; in a chat, how the user's
            turn begins.
        before: the text between the context and the first question.
        again: the text between an answer and the next question.
        after: the text between a question and its answer.
    """

    first: np.ndarray
    before: str = " "
    again: str = ". "
    after: str = " "


class Filler:
    """A long tokenized text to hide needles in, and its tokenizer.

    Args:
        tokenizer: a transformers tokenizer, of any version.
        text: the text; it must be longer than the longest context.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str):
        self.tokenizer = tokenizer
        self.ids = self.encode(text)
        self.first = np.array(tokenizer("").input_ids, dtype=np.int64)  # <bos>, where the model expects one
        self.plain = Frame(self.first)
        known = np.unique(self.ids).tolist()
        words = tokenizer.convert_ids_to_tokens(known)
        starts = [i for i, word in zip(known, words) if word[:1] in (" ", "\n", "Ġ", "Ċ", "▁")]
        self.starts_word = np.isin(self.ids, starts)

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text, int64 [any], without special ones."""
        return np.array(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids, dtype=np.int64)

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of tokens, int64 [any], without special ones."""
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        assert isinstance(text, str)  # of one row of ids
        return text

    def frame(self, chat: bool | None, again: bool = False) -> Frame:
        """Return what surrounds contexts, questions and answers: the turns of a chat, or next to nothing.

        Args:
            chat: whether prompts are a user's turns in the tokenizer's chat template.
            again: whether a question follows an answer.

        Raises:
            Refused: as `in_chat`.
        """
        if not chat:
            return self.plain
        first, after = self.rendered(["{turn}"])
        between = self.rendered(["{turn}", "{answer}", "{next}"])[2] if again else ""
        return Frame(self.encode(first), "\n\n", between, after)

    def in_chat(self, context: str, question: str) -> tuple[str, str]:
        """Put a context and a question into a user's turn of the tokenizer's chat template.

        Args:
            context: the text before the cut.
            question: the rest of the turn.

        Returns:
            The text up to the end of the context, and the question with the prompt for the model's turn.

        Raises:
            Refused: the tokenizer has no template, or its template does not render the turn.
        """
        cut = next(x for x in map("<cut {}>".format, count()) if x not in context + question)
        before, after = self.rendered([context + cut + question], cut)
        return before, after

    def rendered(self, turns: Sequence[str], *cuts: str) -> list[str]:
        """Render turns of a user and a model, and split the text at the cuts (default: at each turn's content)."""
        if not self.tokenizer.chat_template:
            raise Refused("--chat: expected a tokenizer with a chat template, got one without; leave out --chat")
        chat = [{"role": ("user", "assistant")[i % 2], "content": x} for i, x in enumerate(turns)]
        try:
            text = self.tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=False, enable_thinking=False
            )
        except Exception as error:  # the template's own
            raise Refused(f"--chat: the tokenizer's chat template fails: {error}; --no-chat leaves it out") from error
        pieces = [str(text)]
        for cut in cuts or turns:
            before, *after = pieces.pop().split(cut)
            if len(after) != 1:
                raise Refused(
                    f"--chat: expected the user's turn once in the rendered chat, found {len(after)} times; "
                    "--no-chat leaves the template out"
                )
            pieces += [before, *after]
        return pieces

    def ask(self, question: str, beginning: str, frame: Frame | None = None, again: bool = False) -> np.ndarray:
        """Return the tokens of a question and of the beginning of its answer, int64 [any].

        Args:
            question: the question.
            beginning: how its answer begins.
            frame: what surrounds them; default: `plain`.
            again: whether the question follows an answer, not the context.
        """
        frame = frame or self.plain
        return self.encode((frame.again if again else frame.before) + question + frame.after + beginning)

    def context(
        self,
        rng: np.random.Generator,
        length: int,
        needles: Sequence[str],
        depths: Sequence[float],
        frame: Frame | None = None,
    ) -> np.ndarray:
        """Return a random piece of the text with needles inserted.

        Args:
            rng: chooses the piece.
            length: tokens, including the needles.
            needles: the tokens to hide.
            depths: their positions, 0 to 1. Each needle goes before the next word that starts there.
            frame: what surrounds the context; default: `plain`.

        Returns:
            int64 [length].

        Raises:
            Refused: the needles do not fit, or the text is too short.
        """
        first = (frame or self.plain).first
        hidden = [self.encode(x) for x in needles]
        room = length - len(first) - sum(map(len, hidden))
        if room < 0:
            raise Refused(f"--context: expected more than the {length - room} tokens of the needles, got {length}")
        if room >= len(self.ids):
            raise Refused(f"--text: expected more than {room} tokens, got {len(self.ids)}")
        begin = int(rng.integers(0, len(self.ids) - room))
        text, starts = self.ids[begin : begin + room], self.starts_word[begin : begin + room]
        places = []
        for depth in depths:
            place = round(depth * room)
            if 0 < depth < 1:
                place = next((i for i in range(place, min(place + 12, room)) if starts[i]), min(place + 12, room))
            places.append(place)
        pieces, last = [first], 0
        for i in sorted(range(len(hidden)), key=lambda i: places[i]):
            pieces += [text[last : places[i]], hidden[i]]
            last = places[i]
        return np.concatenate([*pieces, text[last:]])


class Prefill(Protocol):
    """A batch of prompts that were read, and what their cache holds."""

    tokens: int
    bytes_held: int
    bytes_full: int
    seconds: float


class Reader(Protocol):
    """The interface of a model for tasks; `kvops.eval.reader.Reader` implements it."""

    def prefill(self, prompts: np.ndarray, rule: Rule, budget: int | None) -> Prefill:
        """Read prompts, int64 [b, n], and cut their cache once, by a rule, to a budget in tokens per KV head."""

    def answer(self, prefill: Any, feed: np.ndarray | None, steps: int, stops: bool) -> tuple[np.ndarray, float, int]:
        """Answer from a prefill of this reader.

        Feeds int64 [b, any] (None: nothing) and decodes greedily. Returns int64 [b, steps] (-1 after an end of
        sequence), the seconds of the one-token steps, and their number. The cache grows.
        """


@dataclass
class Task:
    """A kind of prompt and its measures. A subclass has a dataclass field for each option.

    Attributes:
        name: on the command line.
        points: when the cache is cut.
        metrics: names of the scores; pictures show the first.
        batches: whether all prompts and questions have one length, so that several can be read together.
        percent: whether scores lie between 0 and 1.
        better: "higher" or "lower", for the first metric.
        needs_model: whether a language model is needed; if not, `reader` and `filler` are None.
    """

    name: ClassVar[str]
    points: ClassVar[tuple[str, ...]] = POINTS
    needs_model: ClassVar[bool] = True
    metrics: ClassVar[tuple[str, ...]]
    batches: ClassVar[bool] = True
    percent: ClassVar[bool] = True
    better: ClassVar[str] = "higher"

    def prompts(self, filler: Filler, context: int, count: int, seed: int) -> list[Prompt]:
        """Generate prompts; the same arguments give the same prompts.

        Args:
            filler: the text to hide needles in, and the tokenizer.
            context: exact length of each context in tokens. For tasks without batches it is an upper limit that
                includes the question.
            count: number of prompts.
            seed: of their random numbers.

        Raises:
            Refused: the options, the context or the text do not allow it.
        """
        raise NotImplementedError

    def run(
        self, reader: Reader, filler: Filler, prompts: list[Prompt], rule: Rule, budget: int | None, point: str
    ) -> Outcome:
        """Measure a rule at a budget on a batch of prompts.

        Args:
            reader: the model.
            filler: as in `prompts`.
            prompts: the batch.
            rule: the method.
            budget: tokens per KV head; None for a method that keeps everything.
            point: when the cache is cut, one of `points`.

        Raises:
            Unreachable: no settings of the method meet the budget.
        """
        raise NotImplementedError


def asked(prompts: list[Prompt], point: str) -> tuple[np.ndarray, list[np.ndarray | None]]:
    """Return the tokens before and after the cut.

    Args:
        prompts: a batch.
        point: "before" or "after" the first question.

    Returns:
        The tokens read before the cut, int64 [b, n], and those fed after it for each turn, int64 [b, any] (None if
        there are none).
    """
    context = np.stack([x.context for x in prompts])
    turns = range(len(prompts[0].turns))
    questions: list[np.ndarray | None] = [np.stack([x.turns[i].question for x in prompts]) for i in turns]
    if point == "after":
        context = np.concatenate([context, np.stack([x.turns[0].question for x in prompts])], 1)
        questions[0] = None
    return context, questions


class AnswerTask(Task):
    """Tasks whose questions have text answers."""

    metrics: ClassVar[tuple[str, ...]] = ("partial", "exact")

    def score(self, said: Sequence[str], prompt: Prompt) -> dict[str, float]:
        """Return the scores by metric, from the generated answer of each turn."""
        raise NotImplementedError

    def run(
        self, reader: Reader, filler: Filler, prompts: list[Prompt], rule: Rule, budget: int | None, point: str
    ) -> Outcome:
        context, questions = asked(prompts, point)
        return self.answers(reader, filler, prompts, reader.prefill(context, rule, budget), questions)

    def answers(
        self,
        reader: Reader,
        filler: Filler,
        prompts: list[Prompt],
        prefill: Prefill,
        questions: list[np.ndarray | None],
    ) -> Outcome:
        """Generate the answers and score them."""
        said: list[list[str]] = [[] for _ in prompts]
        decode_s, steps = 0.0, 0
        for i, question in enumerate(questions):
            turns = [x.turns[i] for x in prompts]
            most = max(x.new_tokens for x in turns)
            ids, seconds, count = reader.answer(prefill, question, most, turns[0].stops)
            decode_s, steps = decode_s + seconds, steps + count
            for words, row in zip(said, ids):
                words.append(filler.decode(row[row >= 0]))
        scores = [self.score(words, prompt) for words, prompt in zip(said, prompts)]
        return Outcome(
            {x: [s[x] for s in scores] for x in scores[0]},
            prefill.tokens,
            prefill.bytes_held // len(prompts),
            prefill.bytes_full // len(prompts),
            prefill.seconds,
            decode_s,
            steps,
            [" | ".join(words) for words in said],
        )


def share_said(said: str, answers: Sequence[str]) -> float:
    """Return the fraction of the answers that occur in the generated text, in any case (RULER's string_match_all)."""
    return sum(x.lower() in said.lower() for x in answers) / len(answers)


MOST = 1 << 20  # of an option


def check_options(task: Task) -> None:
    """Check a task's options: `chat`, and that the others are between 1 and MOST, integers if their defaults are."""
    check_chat(task)
    for option in (x for x in fields(task) if x.name != "chat"):
        value, whole = getattr(task, option.name), isinstance(option.default, int)
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not value >= 1:
            what = "an integer" if whole else "a number"
            raise Refused(f"{task.name}: {option.name} must be {what}, at least 1, got {value!r}")
        if value > MOST:
            raise Refused(f"{task.name}: {option.name} must be at most {MOST}, got {value!r}")


def check_chat(task: Task) -> None:
    """Check a task's option `chat`, if it has one."""
    chat = getattr(task, "chat", None)
    if not (chat is None or isinstance(chat, bool)):
        raise Refused(f"{task.name}: chat must be True, False or None, got {chat!r}")
