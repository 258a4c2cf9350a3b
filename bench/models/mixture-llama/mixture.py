"""Training data: sequences of an exact length with the loss weight of each token.

A sequence is <bos>, a text with hidden pieces, and questions with answers at its end:

text       nothing hidden
copies     random strings, each several times
keys       one or many values by name, in several formats, among other numbers; one or more are asked
tracking   chains of assignments
words      a list of words: the most common ones, or how often one occurs
labels     examples of a labelling that holds in this sequence only; then inputs without labels

Weights: text 1, answers ANSWER, and 0 for what cannot be known: the first occurrence of random characters.
The tasks of kvops.eval are among these, in its wording.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase

import numpy as np

from corpus import BOS, Text
from kvops.eval.tasks.needles import NAMES, needle, question, random_digits
from kvops.eval.tasks.words import HEADER, random_words

TEXT, ANSWER, UNKNOWN = 1.0, 3.0, 0.0

Part = tuple[str, float]  # characters and the weight of their tokens


@dataclass
class Episode:
    """What a sequence hides and asks.

    Attributes:
        hidden: the pieces to hide in the text.
        turns: the parts after the text.
        ordered: whether the pieces keep their order.
        dense: whether the pieces follow each other without text between them.
    """

    hidden: list[list[Part]] = field(default_factory=list)
    turns: list[Part] = field(default_factory=list)
    ordered: bool = False
    dense: bool = False


# ---- keys ----

#: A sentence with a value, and the question that ends with it. {n}: the name, {v}: the value.
FORMATS = (
    (" The secret number for {n} is {v}. ", " What is the secret number for {n}? The secret number for {n} is {v}."),
    (" One of the special magic numbers for {n} is: {v}. ", " What is the special magic number for {n}? It is: {v}."),
    ("\n{n}: {v}\n", "\nQ: {n}?\nA: {v}\n"),
    ("\n{n} = {v}\n", "\n>>> {n}\n{v}\n"),
    ('\n"{n}": "{v}",\n', '\n>>> table["{n}"]\n"{v}"\n'),
    ("\n| {n} | {v} |\n", "\nThe row of {n}: | {n} | {v} |\n"),
    (" Call {n} at {v}. ", " What is the number of {n}? You can call {n} at {v}."),
    ("\ndef {n}():\n    return {v}\n", "\nassert {n}() == {v}\n"),
    (" {n} has the badge {v}, ", " The badge of {n} is {v}."),
)
#: Sentences with values that no question asks for.
OTHERS = (
    " The reading of {n} was {v}. ",
    " {v} items were counted. ",
    " Order {v} was sent to {n}. ",
    "\n# {v}: see {n}\n",
    " Build {v} took a while. ",
    "\n    x = {v}\n",
)


def name_of(rng: np.random.Generator, taken: set[str]) -> str:
    """Return a name that is not taken, and take it."""
    while True:
        kind = rng.integers(4)
        if kind == 0:
            name = NAMES[rng.integers(len(NAMES))]
        elif kind == 1:
            name = random_words(rng, 1)[0]
        elif kind == 2:
            name = "".join(rng.choice(list(ascii_uppercase), 5))
        else:
            name = "_".join(random_words(rng, 2))
        if name not in taken:
            taken.add(name)
            return name


def value_of(rng: np.random.Generator, kind: str, size: int) -> str:
    if kind == "digits":
        return random_digits(rng, size)
    if kind == "hex":
        return "".join(rng.choice(list("0123456789abcdef"), size))
    return " ".join(random_words(rng, max(1, size // 4)))


def others(rng: np.random.Generator, sizes: Sequence[int], taken: set[str]) -> list[list[Part]]:
    """Return sentences with other numbers, on average one for each size and of that size."""
    found = []
    for size in sizes:
        for _ in range(rng.integers(0, 3)):
            before, after = OTHERS[rng.integers(len(OTHERS))].split("{v}")
            name = name_of(rng, taken)
            value = random_digits(rng, size)
            found.append([(before.format(n=name), TEXT), (value, UNKNOWN), (after.format(n=name), TEXT)])
    return found


def keys(rng: np.random.Generator, room: int) -> Episode:
    """Values by name. One name may have several values, which are then asked at once, in their order."""
    most = max(1, room // 64)
    count = int(np.exp(rng.uniform(0, np.log(most + 1))))
    longest = max(4, min(64, room // (8 * count)))
    kind = rng.choice(["digits", "digits", "digits", "hex", "words"])
    size = int(rng.integers(4, min(longest, 12) + 1)) if rng.random() < 0.7 else int(rng.integers(4, longest + 1))
    form, taken, episode = int(rng.integers(-3, len(FORMATS))), set(), Episode()
    several = count > 1 and rng.random() < 0.15
    passkey = form < 0 or several  # in the wording of kvops.eval
    alone = passkey and not several and rng.random() < 0.4  # one key has no name
    one = name_of(rng, taken)
    names = [one if several else None if alone and i == 0 else name_of(rng, taken) for i in range(count)]
    if passkey and kind == "words":
        kind = "digits"
    values = [value_of(rng, kind, size) for _ in names]
    for name, value in zip(names, values):
        sentence = needle("{v}", name) if passkey else FORMATS[form][0].replace("{n}", name)
        before, after = sentence.split("{v}")
        episode.hidden.append([(before, TEXT), (value, UNKNOWN), (after, TEXT)])
    if several:
        episode.ordered = True
        asked = f" What are all the pass keys of {one}? The pass keys of {one} are "
        episode.turns = [(asked, TEXT), (", ".join(values) + ".", ANSWER)]
    else:
        asks = 1 if rng.random() < 0.3 else int(rng.integers(1, min(count, 8) + 1))
        for i in rng.permutation(count)[:asks]:
            if passkey:
                before, after = " " + " ".join(question(names[i])), "."
            else:
                before, after = FORMATS[form][1].replace("{n}", names[i]).split("{v}")
            episode.turns += [(before, TEXT), (values[i], ANSWER), (after, TEXT)]
    distract = others(rng, [size] * count, taken)
    if episode.ordered:
        for x in distract:
            episode.hidden.insert(int(rng.integers(len(episode.hidden) + 1)), x)
    else:
        episode.hidden += distract
    return episode


# ---- the other tasks ----


def text(rng: np.random.Generator, room: int) -> Episode:
    return Episode()


def copies(rng: np.random.Generator, room: int) -> Episode:
    """Random strings, each two to four times. From a string's fourth character on, a repetition can be known."""
    episode = Episode(ordered=True, dense=bool(rng.random() < 0.5))
    alphabet = list("0123456789") if rng.random() < 0.5 else list("abcdefghijklmnopqrstuvwxyz0123456789")
    strings = []
    for _ in range(max(1, int(room * rng.uniform(0.1, 0.35)) // 32)):
        size = int(rng.integers(8, 33))
        words = rng.random() < 0.3
        strings.append(" ".join(random_words(rng, size // 4)) if words else "".join(rng.choice(alphabet, size)))
    times = rng.integers(2, 5, len(strings))
    seen: set[int] = set()
    for i in rng.permutation(np.repeat(np.arange(len(strings)), times)).tolist():
        parts = [(strings[i][:3], UNKNOWN), (strings[i][3:], ANSWER if i in seen else UNKNOWN)]
        episode.hidden.append([(" ", TEXT), *parts, (" ", TEXT)])
        seen.add(i)
    return episode


def tracking(rng: np.random.Generator, room: int) -> Episode:
    """Which variables hold a value? Assignments in the order of the text."""
    chains = int(rng.integers(1, max(1, min(4, room // 160)) + 1))
    hops = int(rng.integers(1, max(1, min(5, room // (40 * chains))) + 1))
    size = int(rng.integers(4, 7))
    short = rng.random() < 0.3
    taken: set[str] = set()
    episode, lists = Episode(ordered=True), []
    while len(taken) < chains * (hops + 1):
        taken.add("".join(rng.choice(list(ascii_uppercase), 5)) if not short else random_words(rng, 1)[0])
    names = sorted(taken)
    names = [names[i] for i in rng.permutation(len(names))]
    values = [random_digits(rng, size) for _ in range(chains)]
    for i, value in enumerate(values):
        chain = names[i * (hops + 1) : (i + 1) * (hops + 1)]
        lines, said = [], [value, *chain]
        for j, name in enumerate(chain):
            sources = [(f"{said[j]}", UNKNOWN if j == 0 else TEXT)]
            if short:
                lines.append([("\n", TEXT), (name, UNKNOWN), (" = ", TEXT), *sources, ("\n", TEXT)])
            else:
                var = "" if j == 0 else "VAR "
                lines.append([(" VAR ", TEXT), (name, UNKNOWN), (f" = {var}", TEXT), *sources, (". ", TEXT)])
        lists.append(lines)
    turn = np.repeat(np.arange(chains), hops + 1)
    for i in rng.permutation(turn):
        episode.hidden.append(lists[i].pop(0))
    value, chain = values[0], names[: hops + 1]
    episode.turns = [
        (f" Which variables hold the value {value}? The variables that hold the value {value} are:", TEXT),
        (" " + ", ".join(chain) + ".", ANSWER),
    ]
    return episode


def words(rng: np.random.Generator, room: int) -> Episode:
    """A list of words. The answer is in the order of the counts, and of the first occurrence where they are equal."""
    budget = int(rng.uniform(0.3, 0.9) * room) // 4  # a word has about four tokens
    kind = rng.integers(3)
    if kind == 0:  # a few common ones among rare ones
        ask = int(rng.integers(1, 11))
        often = int(rng.integers(4, 11))
        ask = max(1, min(ask, budget // (2 * often)))
        times = [often] * ask + [1] * max(2, budget - ask * often)
    elif kind == 1:  # Zipf's law
        ask = int(rng.integers(1, 4))
        shares = np.arange(1, budget + 1) ** -float(rng.uniform(1.2, 2.2))
        times = [x for x in (shares / shares.sum() * budget).astype(int).tolist() if x]
        while len(times) <= ask or times[ask - 1] <= times[ask]:  # the asked ones must stand out
            times = [x + 1 for x in times[:ask]] + (times[ask:] or [1])
    else:  # how often does one occur?
        ask = 0
        times = rng.integers(1, 10, max(2, budget // 5)).tolist()
    vocabulary = random_words(rng, len(times))
    order = rng.permutation(np.repeat(np.arange(len(times)), times)).tolist()
    episode = Episode([[(HEADER, TEXT)]], ordered=True, dense=True)
    episode.hidden += [[(" " + vocabulary[i], UNKNOWN if order.index(i) == at else TEXT)] for at, i in enumerate(order)]
    if ask:
        best = sorted(range(len(times)), key=lambda i: (-times[i], order.index(i)))[:ask]
        asked = f" What are the {ask} most common words in the list? They are:"
        episode.turns = [(asked, TEXT), (" " + ", ".join(vocabulary[i] for i in best) + ".", ANSWER)]
    else:
        for i in rng.permutation(len(times))[:4]:
            asked = f" How many times does {vocabulary[i]} occur in the list? It occurs "
            episode.turns += [(asked, TEXT), (str(times[i]), ANSWER), (" times.", TEXT)]
    return episode


#: Words of a kind each; the labels of the kinds differ from sequence to sequence.
KINDS = tuple(
    tuple(x.split())
    for x in (
        "dog cat horse cow sheep goat pig mouse rabbit lion tiger bear wolf fox deer monkey elephant camel duck goose",
        "red green blue yellow orange purple pink brown black white grey violet turquoise crimson scarlet beige",
        "France Germany Spain Italy Poland Sweden Norway Greece Turkey Egypt India China Japan Brazil Mexico Canada",
        "hammer saw drill screwdriver wrench pliers axe chisel file spade shovel rake anvil clamp ladder crowbar",
        "apple pear plum cherry peach grape lemon banana mango melon fig olive apricot kiwi lime papaya quince",
        "int float str list dict tuple set bool bytes complex object range slice frozenset bytearray memoryview",
        "piano violin flute guitar drum trumpet harp cello oboe clarinet organ banjo tuba bassoon viola trombone",
        "January February March April May June July August September October November December",
        "head arm leg hand foot knee elbow nose ear mouth shoulder finger toe neck chin wrist ankle",
        "rain snow wind storm fog hail thunder frost sunshine drizzle cloud lightning blizzard breeze",
        "one two three four five six seven eight nine ten eleven twelve twenty thirty hundred thousand",
        "open close read write seek flush truncate rename unlink chmod mkdir rmdir stat link chown",
    )
)
EXAMPLES = (
    ("\nInput: {x}\nLabel:", "\n"),
    ("\n{x} ->", "\n"),
    (' The word "{x}" belongs to', ". "),
    ("\nText: I thought of {x} today. Type:", "\n"),
    ("\nQuestion: What about {x}?\nAnswer:", "\n"),
)


def labels(rng: np.random.Generator, room: int) -> Episode:
    """Inputs with labels. A label can be known once its kind has had one."""
    count = int(rng.integers(2, 7))
    kinds = [KINDS[i] for i in rng.permutation(len(KINDS))[:count]]
    taken: set[str] = set()
    if rng.random() < 0.3:
        tags = [ascii_uppercase[i] for i in rng.permutation(26)[:count]]
    else:
        tags = [name_of(rng, taken) for _ in kinds]
    before, after = EXAMPLES[rng.integers(len(EXAMPLES))]
    shots = int(rng.integers(count, max(count + 1, min(12 * count, room // 28))))
    episode, seen = Episode(ordered=True, dense=bool(rng.random() < 0.5)), set()
    for at in range(shots + 3):
        i = int(rng.integers(count))
        if at >= shots:
            if not seen:
                break
            i = sorted(seen)[rng.integers(len(seen))]
        x = kinds[i][rng.integers(len(kinds[i]))]
        parts = [(before.format(x=x), TEXT), (" " + tags[i], ANSWER if i in seen else UNKNOWN), (after, TEXT)]
        seen.add(i)
        if at < shots:
            episode.hidden.append(parts)
        else:
            episode.turns += parts
    return episode


TASKS: dict[str, Callable[[np.random.Generator, int], Episode]] = {
    "text": text,
    "copies": copies,
    "keys": keys,
    "tracking": tracking,
    "words": words,
    "labels": labels,
}


# ---- sequences ----


def encoded(source: Text, parts: Sequence[Part]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of all parts together, int64 [any], and their weights: that of their last character."""
    whole = "".join(x for x, _ in parts)
    weights = np.repeat([w for _, w in parts], [len(x) for x, _ in parts])
    found = source.tok.encode(whole, add_special_tokens=False)
    ends = np.array([b for _, b in found.offsets], dtype=np.int64)
    return np.array(found.ids, dtype=np.int64), weights[ends - 1] if len(ends) else np.zeros(0)


def sequence(rng: np.random.Generator, source: Text, task: str, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a sequence, int64 [length], and the weight of each token as a target, fp64 [length]."""
    room = length - 1
    while True:
        episode = TASKS[task](rng, room)
        hidden = [encoded(source, x) for x in episode.hidden]
        tail = encoded(source, episode.turns)
        left = length - 1 - sum(len(x) for x, _ in hidden) - len(tail[0])
        if left >= 0:
            break
        room = room * 3 // 4
    words = source.slice(rng, left)
    if episode.dense:
        places = np.full(len(hidden), rng.integers(left + 1) if rng.random() < 0.5 else left)
    else:
        starts = np.append(np.flatnonzero(source.starts_word[words]), left)
        places = starts[np.sort(rng.integers(0, len(starts), len(hidden)))]
    order = range(len(hidden)) if episode.ordered else rng.permutation(len(hidden))
    pieces = [(np.array([BOS]), np.zeros(1))]
    last = 0
    for place, i in zip(places.tolist(), order):
        pieces += [(words[last:place], np.full(place - last, TEXT)), hidden[i]]
        last = place
    pieces += [(words[last:], np.full(left - last, TEXT)), tail]
    ids, weights = (np.concatenate(x) for x in zip(*pieces))
    assert len(ids) == len(weights) == length
    return ids, weights


def batch(
    rng: np.random.Generator, source: Text, shares: dict[str, float], length: int, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return sequences, int64 [count, length], and weights, fp32 [count, length]; tasks at random by their shares."""
    chosen = rng.choice(list(shares), count, p=np.array(list(shares.values())) / sum(shares.values()))
    rows = [sequence(rng, source, str(task), length) for task in chosen]
    return np.stack([x for x, _ in rows]), np.stack([w for _, w in rows]).astype(np.float32)
