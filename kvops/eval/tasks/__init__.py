"""Prompts with their answers, and how answers are scored.

base.py       the interface of a task
needles.py    keys hidden in a text: passkey, needle in a haystack, RULER's kinds, variable tracking
words.py      lists: words, of which the question asks for the most common ones, and a phone book
probes.py     measures of the cache itself: agreement, recall, perplexity of streams and after a cut, chunked prefill
synthetic.py  methods on caches without a model, drawn from the papers' assumptions
copies.py     benchmarks read from a local copy of their data: ruler.py, longbench.py
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from ..identity import described_class
from ..specs import parse
from .base import POINTS, AnswerTask, Filler, Outcome, Prefill, Prompt, Reader, Task, Turn, share_said
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
from .probes import Agreement, Chunked, Continuation, Perplexity, Recall
from .ruler import Ruler
from .synthetic import Synthetic
from .words import CommonWords, FrequentWords, Phonebook

__all__ = [
    "POINTS",
    "TASKS",
    "AnswerTask",
    "Filler",
    "Outcome",
    "Prefill",
    "Prompt",
    "Reader",
    "Task",
    "Turn",
    "can_chat",
    "code_of",
    "in_chat",
    "make_task",
    "random_digits",
    "share_said",
    "spec_of",
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
        Phonebook,
        Agreement,
        Recall,
        Perplexity,
        Continuation,
        Chunked,
        Synthetic,
        Ruler,
        LongBench,
    )
}


def make_task(spec: str, data: Path | str | None) -> Task:
    """Return the task that a text names.

    Args:
        spec: "passkey" or "passkey:digits=64". The case of the name does not matter.
        data: the folder of the tasks that read one, unless the spec has its own.

    Raises:
        ValueError: the task or one of its options does not exist, or has a wrong value.
    """
    name, options = parse("task", spec, TASKS)
    known = [x.name for x in fields(TASKS[name])]
    for key in options:
        if key not in known:
            raise ValueError(f"task {spec!r}: {name} has no option {key!r}, expected some of {', '.join(known)}")
    if "data" in known:
        options.setdefault("data", data)
    return TASKS[name](**options)


def spec_of(task: Task) -> str:
    """Return a task's name with the options that differ from their defaults, as `make_task` reads them.

    Raises:
        ValueError: its class has the name of one of kvops' tasks.
    """
    if TASKS.get(task.name, type(task)) is not type(task):
        raise ValueError(f"task {type(task).__name__}: {task.name!r} is the name of a kvops task; rename it")
    values = {x.name: getattr(task, x.name) for x in fields(task) if x.init}
    chosen = [f"{x.name}={values[x.name]}" for x in fields(task) if x.init and values[x.name] != x.default]
    return ":".join([task.name, *filter(None, [",".join(chosen)])])


def can_chat(task: Task) -> bool:
    """Whether a task can use the model's chat template, and leaves that decision to the run."""
    return getattr(task, "chat", False) is None


def in_chat(spec: str, task: Task, chat: bool) -> tuple[str, Task]:
    """Return a task that uses the model's chat template or does not, with its spec, which says chat=True if it does.

    A task that has decided for itself, or that has no such option, stays as it is.
    """
    if not can_chat(task):
        return spec, task
    said = f"{spec}{',' if ':' in spec else ':'}chat=True" if chat else spec
    return said, replace(task, **{"chat": chat})


def code_of(task: Task) -> dict[str, str]:
    """For the record: the name and fingerprint of a task from outside kvops."""
    return {} if type(task) in TASKS.values() else {f"task {task.name}": described_class(type(task))}
