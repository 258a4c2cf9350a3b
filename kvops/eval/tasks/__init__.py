"""Prompts with their answers, and how answers are scored.

base.py       the interface of a task
needles.py    keys hidden in a text: passkey, needle in a haystack, RULER's kinds, variable tracking
words.py      lists of words; the question asks for the most common ones
probes.py     measures of the cache itself: agreement, recall, perplexity, chunked prefill
synthetic.py  methods on caches without a model, drawn from the papers' assumptions
copies.py     benchmarks read from a local copy of their data: ruler.py, longbench.py
"""

from __future__ import annotations

from .base import POINTS, AnswerTask, Cut, Filler, Outcome, Prompt, Reader, Task, Turn, share_said
from .longbench import LongBench
from .needles import (
    Needle,
    NiahMultikey,
    NiahMultiquery,
    NiahMultivalue,
    NiahSingle,
    Passkey,
    VariableTracking,
    random_digits,
)
from .probes import Agreement, Chunked, Perplexity, Recall
from .ruler import Ruler
from .synthetic import Synthetic
from .words import CommonWords, FrequentWords

__all__ = [
    "POINTS",
    "TASKS",
    "AnswerTask",
    "Cut",
    "Filler",
    "Outcome",
    "Prompt",
    "Reader",
    "Task",
    "Turn",
    "random_digits",
    "share_said",
]

#: The tasks by name.
TASKS: dict[str, type[Task]] = {
    x.name: x
    for x in (
        Passkey,
        Needle,
        NiahSingle,
        NiahMultikey,
        NiahMultivalue,
        NiahMultiquery,
        VariableTracking,
        CommonWords,
        FrequentWords,
        Agreement,
        Recall,
        Perplexity,
        Chunked,
        Synthetic,
        Ruler,
        LongBench,
    )
}
