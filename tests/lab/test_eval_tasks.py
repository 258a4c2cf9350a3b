"""The tasks of kvops.eval with text answers: their prompts and scores."""

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from kvops.eval.__main__ import MODEL, TEXT  # noqa: E402
from kvops.eval.specs import Refused  # noqa: E402
from kvops.eval.tasks import TASKS, Filler, Prompt, Turn  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
HIDDEN = ["passkey", "needle", "niah-single", "niah-multikey", "niah-multiquery", "niah-multivalue"]
MADE = [*HIDDEN, "variable-tracking", "common-words", "frequent-words", "phonebook"]
CONTEXT = 1024


@pytest.fixture(scope="module")
def filler() -> Filler:
    return Filler(transformers.AutoTokenizer.from_pretrained(MODEL), Path(TEXT).read_text())


@pytest.fixture(scope="module", params=["bytes", "words"])
def any_filler(request, filler) -> Filler:
    """With the shipped model's tokens, or those of a tokenizer that merges characters, including digits."""
    if request.param == "bytes":
        return filler
    text = Path(TEXT).read_text()
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator([text[:50_000], " ".join(map(str, range(100, 1000, 3)))], trainer)
    return Filler(transformers.PreTrainedTokenizerFast(tokenizer_object=inner), text)


def solve(text: str) -> str:
    """Answer the last question of a prompt from the prompt's text alone."""
    if found := re.search(r"What are the (\d+) most common words in the list\? They are:$", text):
        words = text[: found.start()].rpartition("than others:")[2].split()
        return ", ".join(x for x, _ in Counter(words).most_common(int(found[1])))
    if found := re.search(r"The variables that hold the value (\d+) are:$", text):
        held = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text))
        while any(x in held for x in held.values()):
            held = {x: held.get(y, y) for x, y in held.items()}
        return ", ".join(x for x, y in held.items() if y == found[1])
    if found := re.search(r"The number of (\w+) is $", text):
        return re.search(rf"\n{found[1]}: (\d+)", text)[1]
    found = re.search(r"The pass keys?( of [\w ]+?)? (?:is|are) $", text)
    keys = re.findall(rf"The pass key{found[1] or ''} is (\d+)\. Remember it\.", text)
    return ", ".join(keys)


class Oracle:
    """A reader that solves the tasks from the text."""

    def __init__(self, filler: Filler):
        self.filler = filler

    def prefill(self, prompts, rule, budget):
        return SimpleNamespace(ids=prompts, tokens=prompts.shape[1], bytes_held=0, bytes_full=0, seconds=0.0)

    def answer(self, prefill, feed, steps, stops):
        if feed is not None:
            prefill.ids = np.concatenate([prefill.ids, feed], 1)
        said = np.full((len(prefill.ids), steps), -1)
        for row, ids in zip(said, prefill.ids):
            answer = self.filler.encode(solve(self.filler.decode(ids)))
            assert len(answer) <= steps, "no room for the answer"
            row[: len(answer)] = answer
        prefill.ids = np.concatenate([prefill.ids, np.maximum(said, 0)], 1)
        return said, 0.0, steps


@pytest.mark.parametrize("name", MADE)
def test_prompts(any_filler, name):
    task = TASKS[name]()
    prompts = task.prompts(any_filler, CONTEXT, 5, 7)
    assert [len(x.context) for x in prompts] == [CONTEXT] * 5
    first = any_filler.first  # <bos>, where there is one
    assert all(np.array_equal(x.context[: len(first)], first) for x in prompts)
    again = task.prompts(any_filler, CONTEXT, 5, 7)
    other = task.prompts(any_filler, CONTEXT, 5, 8)
    assert all(np.array_equal(x.context, y.context) for x, y in zip(prompts, again))
    assert [[t.answers for t in x.turns] for x in prompts] == [[t.answers for t in x.turns] for x in again]
    assert not any(np.array_equal(x.context, y.context) for x, y in zip(prompts, other))
    assert len({x.turns[0].answers for x in prompts}) == 5
    for prompt in prompts:
        text = any_filler.decode(prompt.context)
        assert all(answer in text for turn in prompt.turns for answer in turn.answers)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("point", ["before", "after"])
def test_oracle(any_filler, name, point):
    """The oracle gets everything right through the same code as a model."""
    task = TASKS[name]()
    prompts = task.prompts(any_filler, CONTEXT, 3, 0)
    outcome = task.run(Oracle(any_filler), any_filler, prompts, None, None, point)
    assert set(outcome.scores) == set(task.metrics) == {"exact", "partial"}
    assert outcome.scores == {"exact": [1.0] * 3, "partial": [1.0] * 3}
    assert outcome.tokens == CONTEXT + (len(prompts[0].turns[0].question) if point == "after" else 0)


@pytest.mark.parametrize("name", HIDDEN)
def test_depth(filler, name):
    """The first key is at its recorded depth, up to the length of the needles and of a word."""
    task = TASKS[name](depths=5)
    prompts = task.prompts(filler, 2048, 10, 0)
    assert [x.depth for x in prompts] == [0, 0.25, 0.5, 0.75, 1] * 2
    for prompt in prompts:
        place = filler.decode(prompt.context).index(prompt.turns[0].answers[0])  # bytes are tokens here
        needles = len(re.findall("Remember it.", filler.decode(prompt.context)))
        assert abs(place - prompt.depth * 2048) <= needles * 60 + 12


def test_a_phone_book_fills_the_context(filler):
    prompts = TASKS["phonebook"](digits=5, depths=3).prompts(filler, 2048, 6, 0)
    assert len({len(x.turns[0].question) for x in prompts}) == 1
    for prompt, depth in zip(prompts, [0, 0.5, 1] * 2):
        text = filler.decode(prompt.context)
        lines = re.findall(r"\n(\w+): (\d{5})\b", text)
        names = [x for x, _ in lines]
        assert len({*names}) == len(names) > 100 and text.endswith(": ".join(lines[-1]))
        name = re.search(r"What is the number of (\w+)\?", filler.decode(prompt.turns[0].question))[1]
        assert dict(lines)[name] == prompt.turns[0].answers[0]
        assert prompt.depth == depth and abs(names.index(name) - depth * (len(names) - 1)) < 5  # all names cost alike


def test_options(filler):
    """Options that are counts."""
    (passkey,) = TASKS["passkey"](digits=64).prompts(filler, CONTEXT, 1, 0)
    assert len(passkey.turns[0].answers[0]) == passkey.turns[0].new_tokens == 64
    (many,) = TASKS["niah-multikey"](keys=8).prompts(filler, CONTEXT, 1, 0)
    names = re.findall(r"The pass key of (\w+) is \d{7}\. Remember", filler.decode(many.context))
    assert len(names) == len(set(names)) == 8
    (values,) = TASKS["niah-multivalue"](values=3).prompts(filler, CONTEXT, 1, 0)
    assert len(set(values.turns[0].answers)) == 3
    (queries,) = TASKS["niah-multiquery"](keys=3).prompts(filler, CONTEXT, 1, 0)
    assert len(queries.turns) == 3
    (chains,) = TASKS["variable-tracking"](chains=3, hops=2).prompts(filler, CONTEXT, 1, 0)
    text = filler.decode(chains.context)
    assert len(re.findall(r"VAR \w{5} = \d{5}\.", text)) == 3
    assert len(re.findall(r"VAR \w{5} = VAR \w{5}\.", text)) == 6
    assert len(chains.turns[0].answers) == 3
    (common,) = TASKS["common-words"](words=4, often=6, rare=2).prompts(filler, CONTEXT, 1, 0)
    counts = Counter(filler.decode(common.context).rpartition("than others:")[2].split())
    assert sorted(counts.values(), reverse=True)[:5] == [6, 6, 6, 6, 2]
    assert set(list(counts.values())) == {6, 2}
    (zipf,) = TASKS["frequent-words"](words=2, alpha=1.0).prompts(filler, CONTEXT, 1, 0)
    counts = Counter(filler.decode(zipf.context).rpartition("than others:")[2].split()).most_common(4)
    assert [x for x, _ in counts[:2]] == list(zipf.turns[0].answers)
    assert [round(counts[0][1] / x) for _, x in counts] == [1, 2, 3, 4]


def turns(*keys: str) -> Prompt:
    return Prompt(np.zeros(1, np.int64), tuple(Turn(np.zeros(1, np.int64), (x,), 4) for x in keys))


@pytest.mark.parametrize(
    "said, keys, exact, partial",
    [
        (["1234"], ["1234"], 1, 1),
        ([" 1234. And"], ["1234"], 1, 1),
        (["1934"], ["1234"], 0, 0.75),
        (["2341"], ["1234"], 0, 0),  # place by place
        (["12"], ["1234"], 0, 0.5),
        ([""], ["1234"], 0, 0),
        (["1234", "56"], ["1234", "5678"], 0.5, 0.75),
    ],
)
def test_score_of_keys(said, keys, exact, partial):
    assert TASKS["passkey"]().score(said, turns(*keys)) == {"exact": exact, "partial": partial}


@pytest.mark.parametrize("name", ["niah-multivalue", "variable-tracking", "common-words", "frequent-words"])
def test_score_of_several(name):
    prompt = Prompt(np.zeros(1, np.int64), (Turn(np.zeros(1, np.int64), ("ABC", "DEF"), 9),))
    score = TASKS[name]().score
    assert score(["DEF and abc"], prompt) == {"exact": 1, "partial": 1}
    assert score(["ABC, ABC"], prompt) == {"exact": 0, "partial": 0.5}
    assert score([""], prompt) == {"exact": 0, "partial": 0}


@pytest.mark.parametrize("name", MADE)
def test_too_short(filler, name):
    with pytest.raises(Refused, match="--context"):
        TASKS[name]().prompts(filler, 32, 1, 0)


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("passkey", {"digits": 0}, "passkey: digits must be an integer, at least 1, got 0"),
        ("passkey", {"digits": 3.5}, "passkey: digits must be an integer, at least 1, got 3.5"),
        ("frequent-words", {"alpha": None}, "frequent-words: alpha must be a number, at least 1, got None"),
        ("needle", {"depths": 0}, "needle: depths must be an integer, at least 1"),
        ("variable-tracking", {"hops": 0}, "variable-tracking: hops"),
        ("common-words", {"words": "ten"}, "common-words: words must be an integer, at least 1, got 'ten'"),
        ("common-words", {"rare": 10}, "common-words: rare must be less than often, 10, got 10"),
    ],
)
def test_wrong_options(name, options, words):
    with pytest.raises(Refused, match=words):
        TASKS[name](**options)


def test_too_many_names(filler):
    with pytest.raises(Refused, match=r"niah-multikey: keys must be in 1\.\.12 .*, got 40"):
        TASKS["niah-multikey"](keys=40).prompts(filler, 4096, 1, 0)
