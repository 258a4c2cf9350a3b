"""What was measured, as JSON lines: one head for each run, then one line for each cell that is done.

A cell is a task, a context, a point of the cut, a method, a budget and a batch of prompts. Lines are on the disk before
the next cell begins, so an interrupted run goes on where it stopped; what a kill has left of a line is dropped.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .specs import Refused

KEY = ("task", "context", "point", "method", "budget", "batch")


class Cell(NamedTuple):
    task: str  # as on the command line
    context: int
    point: str
    method: str  # as in tables
    budget: int | None  # tokens per KV head; None: everything
    batch: int


class Results:
    """Of one file.

    settings: what all its cells have in common; a file with other settings is an error that names them.
    """

    def __init__(self, file: Path, settings: dict, origin: dict):
        self.file = file
        heads, self.lines = load([file]) if file.exists() else ([], [])
        for head in heads:
            wrong = [x for x in settings if head["settings"].get(x) != settings[x]]
            if wrong:
                said = ", ".join(f"{x} was {head['settings'].get(x)!r} and is now {settings[x]!r}" for x in wrong)
                raise Refused(f"--out {file.parent} holds results of other settings: {said}")
        self.done = {cell_of(x) for x in self.lines}
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():  # what a kill has left of a line
            os.truncate(file, file.read_bytes().rfind(b"\n") + 1)
        self._file = file.open("a")
        self._head: dict | None = {"settings": settings, "origin": origin}

    def add(self, cell: Cell, outcome: dict) -> None:
        if self._head:  # a run that finds everything done leaves the file as it is
            self._write(self._head)
            self._head = None
        line = {**cell._asdict(), **outcome}
        self._write(line)
        self.lines.append(line)
        self.done.add(cell)

    def _write(self, line: dict) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


#: What a model, or a copy of a benchmark, is made of.
KINDS = (".json", ".jsonl", ".safetensors", ".bin", ".model", ".parquet", ".arrow")


def fingerprint(path: Path) -> str | None:
    """Of a file's bytes, or the names and sizes of a folder's files; None if there is no such path (a hub's name)."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    if not path.is_dir():
        return None
    files = sorted(x for x in path.rglob("*") if x.suffix in KINDS)
    text = "\n".join(f"{x.relative_to(path)} {x.stat().st_size}" for x in files)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def cell_of(line: dict) -> Cell:
    return Cell(*(line[x] for x in KEY))


def load(files: Sequence[Path]) -> tuple[list[dict], list[dict]]:
    """Heads and cells of one or more files."""
    heads, lines = [], []
    for file in files:
        text = file.read_text()
        for number, line in enumerate(text.splitlines(keepends=True), 1):
            if not line.endswith("\n"):
                break  # being written, or cut off
            try:
                found = json.loads(line)
            except json.JSONDecodeError as error:
                raise Refused(f"{file}, line {number}: expected a line of JSON, got {error}") from None
            if not isinstance(found, dict) or not ("settings" in found or found.keys() >= {*KEY}):
                raise Refused(f"{file}, line {number}: expected what kvops.eval has measured, got {line[:60].strip()}")
            (heads if "settings" in found else lines).append(found)
    return heads, lines
