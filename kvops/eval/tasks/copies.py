"""Benchmarks read from a local copy of their data."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from ...bench.gpu import first_line
from ..specs import Refused
from .base import AnswerTask, Filler, Prompt, Turn, check_chat

MOST_SAID = 1 << 20  # tokens


def need(module: str) -> ModuleType:
    """Import a package that only these benchmarks need."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise Refused(f"{name} is needed for this data but not installed: pip install 'kvops[eval]'") from error


def read(source: Path) -> Iterator[dict[str, Any]]:
    """Return the rows of a folder that `save_to_disk` wrote, or of a .jsonl or .parquet file."""
    try:
        for row in rows_of(source):
            if not isinstance(row, dict):
                raise Refused(f"--data: {source}: expected objects as rows, got {str(row)[:60]!r}")
            yield row
    except Refused:
        raise
    except Exception as error:  # these packages raise all kinds of errors on a damaged file
        raise Refused(f"--data: {source} cannot be read: {first_line(error)}") from error


def rows_of(source: Path) -> Iterator[object]:
    if source.is_dir():
        yield from need("datasets").load_from_disk(str(source))
    elif source.suffix == ".parquet":
        yield from need("pyarrow.parquet").read_table(source).to_pylist()
    else:
        with source.open(encoding="utf-8") as file:
            yield from (json.loads(line) for line in file if line.strip())


def read_task(folder: Path, task: str, column: str) -> list[dict[str, Any]]:
    """Return the rows of a task: those of the file or folder with its name, else all whose `column` names it."""
    sources = {x.parent for x in folder.rglob("state.json")}
    sources |= {x for suffix in ("jsonl", "parquet") for x in folder.rglob(f"*.{suffix}")}
    if not sources:
        raise Refused(f"--data: expected folders of save_to_disk, .jsonl or .parquet files in {folder}, found none")

    def named(source: Path) -> bool:
        stem = re.sub(r"-\d+-of-\d+$", "", source.stem)  # shards
        return task in (folder.name, *source.relative_to(folder).parts, stem)

    own = sorted(filter(named, sources))
    rows = [row for source in own or sorted(sources) for row in read(source)]
    found = [row for row in rows if row.get(column, task if own else None) == task]
    if not found:
        there = ", ".join(sorted({str(row[column]) for row in rows if column in row})) or "none that are named"
        raise Refused(f"--data: {folder} has no rows of {task!r}; it has {there}")
    return found


@dataclass
class Copy(AnswerTask):
    """task: one of the benchmark's tasks; data: the folder (default: --data); chat: whether to use the chat template of
    the model (default: --chat).

    Prompts differ in length, so they are read one at a time.
    """

    task: str
    data: Path | str | None = None
    chat: bool | None = None

    metrics = ("score",)
    batches = False
    tasks: ClassVar[tuple[str, ...]]
    column: ClassVar[str]  # that holds the task's name

    def __post_init__(self) -> None:
        if self.task not in self.tasks:
            raise Refused(f"{self.name}: task must be one of {', '.join(self.tasks)}, got {self.task!r}")
        if self.data is None or not Path(self.data).is_dir():
            raise Refused(f"--data: {self.name} needs a folder with a local copy of its data, got {self.data}")
        check_chat(self)

    @property
    def folder(self) -> Path:
        assert self.data is not None  # as it has been made
        return Path(self.data)

    def column_of(self, row: dict[str, Any], key: str) -> object:
        """Return a required column of a row."""
        if key not in row:
            raise Refused(f"--data: a row of {self.name} {self.task} has no column {key!r}; it has {', '.join(row)}")
        return row[key]

    def text(self, row: dict[str, Any], key: str) -> str:
        value = self.column_of(row, key)
        if not isinstance(value, str):
            raise Refused(f"--data: {key!r} of a row of {self.name} {self.task} must be text, got {str(value)[:60]!r}")
        return value

    def texts(self, row: dict[str, Any], key: str) -> tuple[str, ...]:
        value = self.column_of(row, key)
        if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
            raise Refused(f"--data: {key!r} of a row of {self.name} {self.task} must be texts, got {str(value)[:60]!r}")
        return tuple(value)

    def encode(self, filler: Filler, context: str, question: str, prefix: str = "") -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens before the cut and after it, in the chat template if `chat` is true.

        prefix: the beginning of the answer.
        """
        if not (context and question + prefix):
            raise Refused(f"--data: a prompt of {self.name} {self.task} has an empty context or question")
        if not self.chat:
            return np.concatenate([filler.first, filler.encode(context)]), filler.encode(question + prefix)
        context, question = filler.in_chat(context, question)
        return filler.encode(context), filler.encode(question + prefix)

    def prompt(
        self, ids: np.ndarray, asked: np.ndarray, answers: tuple[str, ...], tokens: object, **turn: Any
    ) -> Prompt:
        """Return a prompt. tokens: the most to generate."""
        if not isinstance(tokens, int) or not 1 <= tokens <= MOST_SAID:
            raise Refused(
                f"--data: an answer of {self.name} {self.task} must have 1 to {MOST_SAID} tokens, got {tokens!r}"
            )
        return Prompt(ids, (Turn(asked, answers, tokens, **turn),))

    def rows(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Return a random choice of the task's rows; all of them in order if there are no more than count."""
        rows = read_task(self.folder, self.task, self.column)
        if count > len(rows):
            raise Refused(f"--prompts must be at most {len(rows)}, the rows of {self.name} {self.task}, got {count}")
        return [rows[i] for i in sorted(np.random.default_rng(seed).permutation(len(rows))[:count])]
