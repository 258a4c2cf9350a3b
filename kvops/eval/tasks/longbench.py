"""LongBench (Bai et al., 2024) from a local copy of its data.

Prompts and answer lengths are the benchmark's own: its dataset2prompt.json and dataset2maxlen.json (LongBench/config in
its repository) must be in the data folder. The metrics are its own too, so results can be compared. Three things
differ. The context and the text after it are tokenized separately, since the cache may be cut between them. A chat
template is used for all data sets or none; the benchmark leaves it out for the few-shot and code ones. A newline does
not end an answer of samsum (only its first line counts).
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np

from ..specs import Refused
from .base import Filler, Prompt
from .copies import Copy, need

PARAGRAPH = re.compile(r"(?:Paragraph |段落)(\d+)")  # an answer of a retrieval
FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")  # the rest does not count
PUNCTUATION_ZH = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～"
    "｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)


def without(text: str, characters: str) -> str:
    return text.translate(dict.fromkeys(map(ord, characters)))


def f1_of(said: Sequence[str], answer: Sequence[str]) -> float:
    same = sum((Counter(said) & Counter(answer)).values())
    return 2 * same / (len(said) + len(answer)) if same else 0.0


def f1(said: str, answer: str, classes: Sequence[str]) -> float:
    """F1 of words, in lower case, without punctuation and articles."""

    def words(text: str) -> list[str]:
        return re.sub(r"\b(a|an|the)\b", " ", without(text.lower(), string.punctuation)).split()

    return f1_of(words(said), words(answer))


def cut_zh(text: str) -> list[str]:
    jieba = need("jieba")
    jieba.setLogLevel("WARNING")
    return jieba.lcut(text)


def f1_zh(said: str, answer: str, classes: Sequence[str]) -> float:
    """F1 of jieba's words, without punctuation."""

    def words(text: str) -> list[str]:
        plain = ("".join(without(x.lower(), string.punctuation + PUNCTUATION_ZH).split()) for x in cut_zh(text))
        return [x for x in plain if x]

    return f1_of(words(said), words(answer))


def rouge(said: str, answer: str, classes: Sequence[str]) -> float:
    """ROUGE-L F, by the benchmark's package, which uses sets of words and the union of the longest common subsequences
    of sentences. Google's rouge-score counts repeated words and drops Chinese ones."""
    try:
        return need("rouge").Rouge(["rouge-l"]).get_scores(said, answer)[0]["rouge-l"]["f"]
    except (ValueError, RecursionError):  # empty, or a sentence too long for it: 0 in the benchmark too
        return 0.0


def rouge_zh(said: str, answer: str, classes: Sequence[str]) -> float:
    return rouge(" ".join(cut_zh(said)), " ".join(cut_zh(answer)), classes)


def classification(said: str, answer: str, classes: Sequence[str]) -> float:
    """One over the number of classes named, if the right one is among them; parts of its name do not count."""
    named = [x for x in classes if x in said]
    for x in named:  # as in the benchmark: the one after a removed one is skipped
        if x in answer and x != answer:
            named.remove(x)
    return 1 / len(named) if answer in named else 0.0


def numbers(said: str, answer: str) -> float:
    """Fraction of the numbers in the text that equal the answer."""
    found = re.findall(r"\d+", said)
    return found.count(answer) / len(found) if found else 0.0


def count(said: str, answer: str, classes: Sequence[str]) -> float:
    return numbers(said, answer)


def retrieval(said: str, answer: str, classes: Sequence[str]) -> float:
    """The answer is "Paragraph 3" or "段落3"."""
    found = PARAGRAPH.search(answer)
    assert found is not None  # `LongBench.prompts` checks it
    return numbers(said, found[1])


def code(said: str, answer: str, classes: Sequence[str]) -> float:
    """Similarity of the answer to the first line that is neither a comment nor a fence, in whole percent: fuzzywuzzy's
    ratio when no faster package is installed."""
    lines = (x for x in said.lstrip("\n").split("\n") if not any(mark in x for mark in ("`", "#", "//")))
    return round(100 * SequenceMatcher(None, next(lines, ""), answer).ratio()) / 100


#: The metric of each data set.
METRICS = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"), f1),
    "multifieldqa_zh": f1_zh,
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), rouge),
    **dict.fromkeys(("dureader", "vcsum"), rouge_zh),
    **dict.fromkeys(("trec", "lsht"), classification),
    "passage_count": count,
    **dict.fromkeys(("passage_retrieval_en", "passage_retrieval_zh"), retrieval),
    **dict.fromkeys(("lcc", "repobench-p"), code),
}
PACKAGES = {f1_zh: ("jieba",), rouge: ("rouge",), rouge_zh: ("rouge", "jieba")}


@dataclass
class LongBench(Copy):
    """A data set of LongBench (Bai et al., 2024), from a local copy, with the benchmark's prompts and metrics.

    score: the best over a prompt's answers, by the metric of its data set.

    A prompt longer than the context, question included, loses its middle, as in the benchmark.
    """

    task: str = "qasper"

    name = "longbench"
    column = "dataset"
    tasks = tuple(METRICS)

    def __post_init__(self) -> None:
        super().__post_init__()
        for package in PACKAGES.get(METRICS[self.task], ()):  # reported before anything is measured
            need(package)

    def config(self, name: str) -> object:
        """Return the data set's entry in one of the benchmark's own files."""
        file = next(iter(sorted(self.folder.rglob(name))), None)
        if file is None:
            raise Refused(f"--data: longbench needs {name}, of LongBench/config in its repository, in {self.data}")
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise Refused(f"--data: {file}: expected JSON, got {error}") from None
        if not isinstance(found, dict):
            raise Refused(f"--data: {file}: expected an object, got {str(found)[:60]!r}")
        if self.task not in found:
            raise Refused(f"--data: {file} has no entry for {self.task}; it has {', '.join(found)}")
        return found[self.task]

    def prompts(self, filler: Filler, context: int, count: int, seed: int) -> list[Prompt]:
        template = self.config("dataset2prompt.json")
        if not isinstance(template, str) or template.count("{context}") != 1:
            raise Refused(f"--data: the prompt of longbench {self.task} must have one {{context}}, got {template!r}")
        before, after = template.split("{context}")
        new_tokens = self.config("dataset2maxlen.json")
        half, found = context // 2, []
        head = len(filler.frame(self.chat).first)
        for row in self.rows(count, seed):
            answers = self.texts(row, "answers")
            if METRICS[self.task] is retrieval and any(PARAGRAPH.search(x) is None for x in answers):
                raise Refused(f"--data: an answer of longbench {self.task} names no paragraph: {answers!r}")
            classes = self.texts(row, "all_classes") if self.column_of(row, "all_classes") is not None else ()
            question = after.replace("{input}", self.text(row, "input"))
            ids, asked = self.encode(filler, before + self.text(row, "context"), question)
            if len(ids) + len(asked) > context:
                if len(asked) >= half:
                    raise Refused(f"--context {context}: a question of {self.task} alone has {len(asked)} tokens")
                if head >= half:
                    raise Refused(f"--context {context}: the chat template alone begins with {head} tokens")
                ids = np.concatenate([ids[:half], ids[len(ids) - (half - len(asked)) :]])
            found.append(self.prompt(ids, asked, answers, new_tokens, choices=classes))
        return found

    def score(self, said: Sequence[str], prompt: Prompt) -> dict[str, float]:
        (text,), turn = said, prompt.turns[0]
        if self.task in FIRST_LINE:
            text = text.lstrip("\n").partition("\n")[0]
        metric = METRICS[self.task]
        return {"score": max((metric(text, x, turn.choices) for x in turn.answers), default=0.0)}
