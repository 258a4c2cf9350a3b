"""Results as JSON lines: one head per run, then one line per measured cell.

A cell is a task, a context, a cut point, a method, a budget and a batch of prompts. Each line is on disk before the
next cell starts, so an interrupted run continues where it stopped. An incomplete last line, left by a killed run, is
dropped. Only one run at a time writes to a folder.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..bench.record import name, number, whole
from .specs import Refused

#: Prefixes of the origin's entries that name the code of a method or task from outside kvops, or the chat template.
CODE = ("method ", "task ", "chat template")
KEY = ("task", "context", "point", "method", "budget", "batch")


class Cell(NamedTuple):
    task: str  # as on the command line
    context: int
    point: str
    method: str  # as in tables
    budget: int | None  # tokens per KV head; None: everything
    batch: int


class Results:
    """A growing results file, which a later run can continue.

    Args:
        file: created if it does not exist; its folder is locked.
        settings: the settings that all its cells share.
        origin: where they are measured; see `bench.record.origin`.

    Attributes:
        done: the cells in the file.
        lines: their lines.

    Raises:
        Refused: the file has other settings, or a method's code has changed; the file is damaged; or another process
            writes to its folder.
    """

    def __init__(self, file: Path, settings: dict[str, Any], origin: dict[str, Any]):
        self.file = file
        self._lock = Lock(file.parent)
        try:
            heads, self.lines = load([file]) if file.exists() else ([], [])
            for head in heads:
                pairs = {x: (head["settings"].get(x), settings.get(x)) for x in (*settings, "share_prefill")}
                pairs |= {x: (head["origin"].get(x, y), y) for x, y in origin.items() if x.startswith(CODE)}
                wrong = [
                    f"{x} was {before!r} and is now {now!r}" for x, (before, now) in pairs.items() if before != now
                ]
                if wrong:
                    said = ", ".join(wrong)
                    raise Refused(f"--out {file.parent} holds results of other settings: {said}")
            self.done = {cell_of(x) for x in self.lines}
            if file.exists():  # drop an incomplete line of a killed run
                os.truncate(file, file.read_bytes().rfind(b"\n") + 1)
            self._file = file.open("a")
        except BaseException:
            self._lock.release()
            raise
        self._head: dict[str, Any] | None = {"settings": settings, "origin": origin}

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, cell: Cell, outcome: dict[str, Any]) -> dict[str, Any]:
        """Write a cell to disk; return its line.

        Args:
            cell: a cell that is not in `done`.
            outcome: the fields of a `tasks.Outcome`, or the reason why the budget is unreachable.
        """
        if self._head:  # a run with nothing left to measure does not change the file
            self._write(self._head)
            self._head = None
        line = {**cell._asdict(), **outcome}
        self._write(line)
        self.lines.append(line)
        self.done.add(cell)
        return line

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        self._lock.release()


class Lock:
    """A lock on a folder. The file `lock` has the process ID. The system releases the lock of a dead process, and the
    next run takes the file over."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "lock"
        while True:
            self._file = self._path.open("a+")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._file.seek(0)
                holder = self._file.read().strip() or "(starting)"
                self._file.close()
                raise Refused(
                    f"--out {folder} is being written to by another run, process {holder}; name another folder, or wait"
                ) from None
            if self._path.exists() and os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path)):
                break
            self._file.close()  # the previous holder has just removed it
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def release(self) -> None:
        if not self._file.closed:
            self._path.unlink(missing_ok=True)
            self._file.close()


def cell_of(line: dict[str, Any]) -> Cell:
    return Cell(*(line[x] for x in KEY))


def load(files: Sequence[Path]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Read results files. Text after the last line break of a file is ignored.

    Returns:
        The heads and the cells of all files, as JSON has them.

    Raises:
        Refused: a line is not in the format of `Results`.
    """
    found = runs(files)
    return [x.head for x in found if x.head], [line for x in found for line in x.lines]


class Run(NamedTuple):
    """The cells that a run has added to a file.

    Attributes:
        file: where they are.
        head: the run's settings and origin; None for cells without a head before them.
        lines: the cells.
    """

    file: Path
    head: dict[str, Any] | None
    lines: list[dict[str, Any]]


def runs(files: Sequence[Path]) -> list[Run]:
    """Read results files run by run; see `load`."""
    made: list[Run] = []
    for file in files:
        made.append(Run(file, None, []))
        for i, line in enumerate(file.read_bytes().split(b"\n")[:-1], 1):  # an incomplete last line is ignored
            where = f"{file}, line {i}"
            try:
                found = json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                raise Refused(f"{where}: expected a line of JSON, got {str(error)[:200]}") from None
            is_head = isinstance(found, dict) and "settings" in found
            if not is_head and not (isinstance(found, dict) and found.keys() >= {*KEY}):
                raise Refused(f"{where}: expected a result of kvops.eval, got {json.dumps(found)[:60]}")
            if wrong := wrong_head(found) if is_head else wrong_cell(found):
                raise Refused(f"{where}: {wrong}")
            if is_head:
                made.append(Run(file, found, []))
            else:
                made[-1].lines.append(found)
    return [x for x in made if x.head or x.lines]


# The expected content of a results file, which may come from another version or program, or be damaged.


def score(x: object) -> bool:
    """Whether x is a number; a loss may be infinite."""
    return isinstance(x, (int, float)) and not isinstance(x, bool) and (abs(x) < 2**62 or x != x or x == math.inf)


def list_of(x: object, kind: Callable[[object], bool]) -> bool:
    return isinstance(x, list) and all(map(kind, x))


#: By key: a description of the expected value, and a test for it.
CELL: dict[str, tuple[str, Callable[[object], bool]]] = {
    **dict.fromkeys(("task", "point", "method"), ("a name", name)),
    "context": ("tokens, at least 1", lambda x: whole(x, 1)),
    "budget": ("tokens, at least 1, or null", lambda x: x is None or whole(x, 1)),
    "batch": ("an integer, at least 0", whole),
}
OUTCOME: dict[str, tuple[str, Callable[[object], bool]]] = {
    "scores": (
        "lists of as many numbers, by metric",
        lambda x: (
            isinstance(x, dict)
            and all(name(key) and y and list_of(y, score) for key, y in x.items())
            and len({len(y) for y in x.values()}) == 1
        ),
    ),
    **dict.fromkeys(("tokens", "bytes_held", "bytes_full", "steps"), ("an integer, at least 0", whole)),
    **dict.fromkeys(("prefill_s", "decode_s"), ("seconds", number)),
}
MORE: dict[str, tuple[str, Callable[[object], bool]]] = {  # optional
    "depths": (
        "a list of numbers in [0, 1], or null",
        lambda x: list_of(x, lambda y: y is None or (number(y) and y <= 1)),
    ),
    "more": (
        "the tokens where stretches of the text end, ascending, and as many losses",
        lambda x: (
            isinstance(x, dict)
            and ("ends" in x) == ("loss" in x)
            and list_of(x.get("ends", []), lambda y: whole(y, 1))
            and list_of(x.get("loss", []), score)
            and len(x.get("ends", [])) == len(x.get("loss", []))
            and x.get("ends", []) == sorted(set(x.get("ends", [])))
        ),
    ),
}


def wrong_cell(line: dict[str, Any]) -> str | None:
    """Return what is wrong with the line of a cell, or None."""
    rules = {**CELL, **({"unreachable": ("why", lambda x: isinstance(x, str))} if "unreachable" in line else OUTCOME)}
    rules |= {x: rule for x, rule in MORE.items() if line.get(x) is not None}
    for key, (expected, holds) in rules.items():
        if not holds(line.get(key)):
            got = json.dumps(line[key])[:60] if key in line else "nothing"
            return f"expected {expected} as {key!r}, got {got}"
    return None


def wrong_head(head: dict[str, Any]) -> str | None:
    """Return what is wrong with a head, or None."""
    origin = head.get("origin")
    machine = origin.get("machine") if isinstance(origin, dict) else None
    gpu = machine.get("gpu") if isinstance(machine, dict) else None
    for key, x in (("settings", head["settings"]), ("origin", origin), ("machine", machine), ("gpu", gpu)):
        if not isinstance(x, dict) and not (key in ("machine", "gpu") and x is None):
            return f"expected an object as {key!r}, got {json.dumps(x)[:60]}"
    try:
        json.dumps(head, allow_nan=False)
    except ValueError:
        return "expected settings and an origin of finite numbers"
    return None
