"""Keys hidden in a text; the question asks for them.

The kinds are RULER's (Hsieh et al., 2024, Sec. 3), in the wording that the shipped passkey model was trained on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase

import numpy as np

from ..specs import Refused
from .base import MOST, AnswerTask, Filler, Frame, Prompt, Turn, check_options, share_said

#: Names that the shipped model was trained on.
NAMES = (
    *("Alice", "Bruno", "Carla", "David", "Emma", "Farid", "Greta", "Hugo", "Irene", "Jonas", "Karin", "Luca", "Mara"),
    *("Nils", "Olga", "Pavel", "Quinn", "Rosa", "Sven", "Tara", "Ugo", "Vera", "Willem", "Xenia", "Yann", "Zoe"),
    *("the door", "the safe", "the garage", "the server", "the archive", "room seven", "the north gate"),
    "the blue box",
)


def random_digits(rng: np.random.Generator, count: int) -> str:
    return "".join(map(str, rng.integers(0, 10, count)))


def needle(key: str, name: str | None) -> str:
    return f" The pass key{f' of {name}' if name else ''} is {key}. Remember it. "


def question(name: str | None) -> tuple[str, str]:
    """Return a question, and how its answer begins."""
    of = f" of {name}" if name else ""
    return f"What is the pass key{of}?", f"The pass key{of} is "


def random_names(filler: Filler, rng: np.random.Generator, count: int, option: str) -> list[str]:
    """Return `count` names with the same number of tokens, so that questions can be read together."""
    lengths = {x: len(filler.ask(*question(x))) for x in NAMES}
    usual = Counter(lengths.values()).most_common(1)[0][0]
    names = [x for x in NAMES if lengths[x] == usual]
    if not 1 <= count <= len(names):
        raise Refused(f"{option} must be in 1..{len(names)} (the number of names with equal token counts), got {count}")
    return [names[i] for i in rng.permutation(len(names))[:count]]


@dataclass
class Passkey(AnswerTask):
    """A key of `digits` digits hidden in a text (LagKV, Sec. 3.3 and Fig. 8-11).

    partial: the fraction of digits that are right, position by position; exact: the fraction of keys with all digits
    right.
    depths: the requested key cycles through this many depths, 0 %, ..., 100 % of the context.
    chat: whether to use the chat template of the model (default: --chat).
    """

    digits: int = 32
    depths: int = 11
    chat: bool | None = None

    name = "passkey"

    def __post_init__(self) -> None:
        check_options(self)

    def names(self, filler: Filler, rng: np.random.Generator) -> Sequence[str | None]:
        """Return the names whose keys are hidden; the question asks for the first one's."""
        return [None]

    def turns(self, filler: Filler, frame: Frame, names: Sequence[str | None], keys: list[str]) -> tuple[Turn, ...]:
        asked = filler.ask(*question(names[0]), frame)
        return (Turn(asked, (keys[0],), len(filler.encode(keys[0])), stops=False),)

    def prompts(self, filler: Filler, context: int, count: int, seed: int) -> list[Prompt]:
        if self.digits > context:
            raise Refused(f"--context {context} is too short for a key of {self.digits} digits")
        rng, frame = np.random.default_rng([seed, context, self.digits]), filler.frame(self.chat)
        places = min(self.depths, count)
        depths = np.linspace(0, 1, places) if places > 1 else [0.3]
        found = []
        for i in range(count):
            names = self.names(filler, rng)
            keys = [random_digits(rng, self.digits) for _ in names]
            depth = float(depths[i % len(depths)])
            needles = [needle(*x) for x in zip(keys, names)]
            ids = filler.context(rng, context, needles, [depth, *rng.random(len(names) - 1)], frame)
            found.append(Prompt(ids, self.turns(filler, frame, names, keys), depth))
        return found

    def score(self, said: Sequence[str], prompt: Prompt) -> dict[str, float]:
        keys = [x.answers[0] for x in prompt.turns]
        right = [[a == b for a, b in zip(x.strip().ljust(len(key)), key)] for x, key in zip(said, keys)]
        return {"exact": float(np.mean([all(x) for x in right])), "partial": float(np.mean(right))}


@dataclass
class Needle(Passkey):
    """Needle in a haystack: a short key at each depth (LAQ, Fig. 4). Scores as in passkey."""

    digits: int = 7

    name = "needle"


@dataclass
class NiahSingle(Needle):
    """The key of a name (RULER, Sec. 3). Scores as in passkey."""

    name = "niah-single"

    def names(self, filler: Filler, rng: np.random.Generator) -> Sequence[str | None]:
        return random_names(filler, rng, 1, self.name)


@dataclass
class NiahMultikey(Needle):
    """The keys of several names; one is requested, the others distract (RULER, Sec. 3). Scores as in passkey."""

    keys: int = 4

    name = "niah-multikey"

    def names(self, filler: Filler, rng: np.random.Generator) -> Sequence[str | None]:
        return random_names(filler, rng, self.keys, f"{self.name}: keys")


@dataclass
class NiahMultiquery(NiahMultikey):
    """The keys of several names, requested one after the other (RULER, Sec. 3). The cache is cut before any question,
    or only the first, is known. Scores as in passkey; the depth is that of the first key."""

    name = "niah-multiquery"

    def turns(self, filler: Filler, frame: Frame, names: Sequence[str | None], keys: list[str]) -> tuple[Turn, ...]:
        size, frame = len(filler.encode(keys[0])), filler.frame(self.chat, again=True)
        asked = [filler.ask(*question(x), frame, again=i > 0) for i, x in enumerate(names)]
        return tuple(Turn(x, (key,), size, stops=False) for x, key in zip(asked, keys))


@dataclass
class NiahMultivalue(Needle):
    """Several keys of the same name, all requested at once (RULER, Sec. 3).

    partial: the fraction of keys in the answer; exact: all of them. The depth is that of the first.
    """

    values: int = 4

    name = "niah-multivalue"

    def names(self, filler: Filler, rng: np.random.Generator) -> Sequence[str | None]:
        if self.values * self.digits > MOST:
            raise Refused(f"{self.name}: values and digits are too many: {self.values} keys of {self.digits} digits")
        return random_names(filler, rng, 1, self.name) * self.values

    def turns(self, filler: Filler, frame: Frame, names: Sequence[str | None], keys: list[str]) -> tuple[Turn, ...]:
        of = f"of {names[0]}"
        asked = filler.ask(f"What are all the pass keys {of}?", f"The pass keys {of} are ", frame)
        return (Turn(asked, tuple(keys), len(filler.encode(", and ".join(keys)))),)

    def score(self, said: Sequence[str], prompt: Prompt) -> dict[str, float]:
        share = share_said(said[0], prompt.turns[0].answers)
        return {"partial": share, "exact": float(share == 1)}


@dataclass
class VariableTracking(AnswerTask):
    """Chains of assignments hidden in a text, ` VAR ABCDE = 12345. `, ` VAR FGHIJ = VAR ABCDE. `, ...: which variables
    hold the value of the first chain (RULER, Sec. 3)?

    partial: the fraction of its variables in the answer; exact: all of them.
    hops: assignments of a variable, in each chain.
    chat: as in passkey.
    """

    chains: int = 1
    hops: int = 4
    chat: bool | None = None

    name = "variable-tracking"

    def __post_init__(self) -> None:
        check_options(self)

    def prompts(self, filler: Filler, context: int, count: int, seed: int) -> list[Prompt]:
        if self.chains * (self.hops + 1) > context:  # each is several tokens
            raise Refused(f"--context {context} is too short for {self.chains} chains of {self.hops} hops")
        rng, frame = np.random.default_rng([seed, context, self.chains, self.hops]), filler.frame(self.chat)
        found: list[Prompt] = []
        while len(found) < count:
            values = rng.choice(np.arange(10_000, 100_000), self.chains, replace=False)
            hold = f"hold the value {values[0]}"
            asked = filler.ask(f"Which variables {hold}?", f"The variables that {hold} are:", frame)
            if found and len(asked) != len(found[0].turns[0].question):
                continue  # questions are read together
            names: list[str] = []
            while len(names) < self.chains * (self.hops + 1):
                name = "".join(rng.choice(list(ascii_uppercase), 5))
                names += [name] * (name not in names)
            needles, depths = [], []
            for i, value in enumerate(values):
                chain = names[i * (self.hops + 1) : (i + 1) * (self.hops + 1)]
                needles += [f" VAR {a} = {b}. " for a, b in zip(chain, [value, *(f"VAR {x}" for x in chain)])]
                depths += sorted(rng.random(len(chain)))
            answers = tuple(names[: self.hops + 1])
            ids = filler.context(rng, context, needles, depths, frame)
            found.append(Prompt(ids, (Turn(asked, answers, len(filler.encode(" VAR, ".join(answers))) + 8),)))
        return found

    def score(self, said: Sequence[str], prompt: Prompt) -> dict[str, float]:
        share = share_said(said[0], prompt.turns[0].answers)
        return {"partial": share, "exact": float(share == 1)}
