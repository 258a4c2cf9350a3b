"""python -m kvops.eval: measure accuracy, memory and time of every method at every budget on the same prompts."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..bench.record import origin
from ..demo import MODEL, TEXT
from ..methods.budgets import budget_tokens
from . import models
from .methods import METHODS, Rule, Unreachable, options_of, rule
from .results import CODE, Cell, Results, fingerprint, load
from .specs import Refused, canonical, parse
from .summary import Summary, of_record
from .tasks import POINTS, TASKS, Prompt, Reader, Task

SHARES = [0.5, 0.125, 0.03125]  # fractions of the context
MOST = 2**31 - 1  # tokens


def budget(said: str) -> int | float:
    """Parse a budget: tokens per KV head, or a fraction of the context."""
    try:
        value = int(said) if said.isdecimal() else float(said)
    except ValueError:
        value = math.nan
    if not (1 <= value <= MOST if isinstance(value, int) else 0 < value < 1):
        raise argparse.ArgumentTypeError(f"expected tokens (an integer) or a fraction in (0, 1), got {said[:60]}")
    return value


def path(said: str) -> Path:
    if not said:
        raise argparse.ArgumentTypeError("expected a path, got nothing")
    return Path(said)


def make_parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m kvops.eval",
        description="Measure accuracy, memory and time of every method at every budget on the same prompts.",
        epilog="Options follow the name of a method or task: keydiff:recent=0.1,sinks=4 or passkey:digits=64. A "
        "method's options are the arguments of its class. Names are case-insensitive. --list prints them all.",
    )
    p.add_argument("--model", default=str(MODEL), help="model folder or hub name (default: the shipped passkey model)")
    p.add_argument("--methods", nargs="+", default=list(METHODS), metavar="METHOD", help="default: all")
    p.add_argument(
        "--budgets", nargs="+", type=budget, default=SHARES, metavar="B",
        help="tokens per KV head, or fractions of the context (default 0.5 0.125 0.03125)",
    )  # fmt: skip
    p.add_argument("--tasks", nargs="+", default=["passkey"], metavar="TASK", help="default: passkey")
    p.add_argument(
        "--context", nargs="+", type=int, metavar="N", help="context length in tokens (default 2048; --quick: 1024)"
    )
    p.add_argument(
        "--points",
        nargs="+",
        choices=POINTS,
        default=list(POINTS),
        help="cut the cache before or after the question (default: both)",
    )
    p.add_argument("--prompts", type=int, help="prompts per task and context (default 64; --quick: 5)")
    p.add_argument("--batch", type=int, default=11, help="prompts per batch (default 11)")
    p.add_argument("--seed", type=int, default=0, help="seed of the prompts (default 0)")
    p.add_argument("--text", type=path, default=TEXT, help="text to hide needles in (default: the shipped text)")
    p.add_argument("--data", type=path, help="folder with a local copy of LongBench or RULER")
    p.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    p.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto", help="dtype of the model"
    )
    p.add_argument(
        "--out", type=path, default=Path("eval"), help="folder for results.jsonl and the report (default eval)"
    )
    p.add_argument("--quick", action="store_true", help="fewer and shorter prompts, under 2 minutes")
    p.add_argument(
        "--from",
        type=path,
        nargs="+",
        dest="files",
        metavar="FILE",
        help="measure nothing; report on these results.jsonl files, or on one summary.json",
    )
    p.add_argument("--list", action="store_true", help="print the methods and tasks with their options")
    return p


def arguments(argv: list[str] | None, p: argparse.ArgumentParser, rule: Callable[[str], Rule]) -> argparse.Namespace:
    """Parse and check the arguments. rule: looks a method up by name."""
    a = p.parse_args(argv)
    a.context = a.context or [1024 if a.quick else 2048]
    a.prompts = (5 if a.quick else 64) if a.prompts is None else a.prompts
    for name, least in (("prompts", a.prompts), ("batch", a.batch), ("context", min(a.context))):
        if least < 1:
            p.error(f"--{name}: expected at least 1, got {least}")
    if max(a.context) > MOST:
        p.error(f"--context: expected at most {MOST}, got {max(a.context)}")
    if a.seed < 0:
        p.error(f"--seed: expected at least 0, got {a.seed}")
    if os.path.lexists(a.out) and not a.out.is_dir():
        p.error(f"--out: expected a folder, got the file {a.out}")
    try:
        rules = {x: rule(x) for x in dict.fromkeys(a.methods)}
        a.kinds = {x: make_task(x, a.data) for x in dict.fromkeys(canonical(x, TASKS) for x in a.tasks)}
    except ValueError as error:
        p.error(str(error))
    named: dict[str, tuple[str, Rule]] = {}
    for said, method in rules.items():
        other, found = named.setdefault(method.label, (said, method))
        if found != method:
            p.error(f"--methods: {other} and {said} are both called {method.label} in tables; name only one of them")
    a.rules = [found for _, found in named.values()]
    for file in a.files or ():
        if not os.path.isfile(file):
            p.error(f"--from: expected a results file, got {file}")
    if a.list or a.files:  # nothing is measured
        return a
    if not os.path.isfile(a.text):
        p.error(f"--text: expected a file, got {a.text}")
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,4})?", a.device):
        p.error(f"--device: expected cpu, cuda or cuda:NUMBER, got {a.device}")
    if a.device != "cpu" and int(a.device.partition(":")[2] or 0) >= torch.cuda.device_count():
        p.error(f"--device {a.device}: torch {torch.__version__} sees {torch.cuda.device_count()} NVIDIA GPUs")
    return a


def make_task(spec: str, data: Path | None) -> Task:
    name, options = parse("task", spec, TASKS)
    known = [x.name for x in fields(TASKS[name])]
    for key in options:
        if key not in known:
            raise ValueError(f"task {spec!r}: {name} has no option {key!r}, expected some of {', '.join(known)}")
    if "data" in known:
        options.setdefault("data", data)
    return TASKS[name](**options)


def batch_size(a: argparse.Namespace, task: Task) -> int:
    return a.batch if task.batches else 1


def tokens(budgets: list[int | float], context: int) -> list[int]:
    """Convert fractions of the context to tokens."""
    return [budget_tokens("budget", x, context) for x in budgets]


def cells(a: argparse.Namespace) -> Iterator[tuple[Cell, Rule]]:
    """Yield the cells in the order of the run, so that compared cells are measured close together."""
    for spec, task in a.kinds.items():
        for context in a.context:
            for batch in range(-(-a.prompts // batch_size(a, task))):
                for point in (x for x in task.points if x in a.points or x not in POINTS):
                    for method in a.rules:
                        for size in tokens(a.budgets, context) if method.budgeted else [None]:
                            yield Cell(spec, context, point, method.label, size, batch), method


def describe() -> str:
    lines = ["methods, with the arguments of their classes:"]
    for name, entry in METHODS.items():
        lines.append(f"  {name:20}{', '.join(options_of(entry.policy))}".rstrip())
    lines.append("  path/to/file.py:Class, module:Class, or an installed package's name (docs/adding_a_method.md)")
    lines.append("tasks:")
    for name, task in TASKS.items():
        lines.append(f"  {name:20}{', '.join(f'{x.name}={x.default}' for x in fields(task))}")
    return "\n".join(lines)


def described(path: Path | str) -> str:
    """Return the file or folder name without its parents, plus a fingerprint of its content."""
    mark = fingerprint(Path(path))
    return f"{Path(path).resolve().name} ({mark})" if mark else str(path)


def measure(a: argparse.Namespace, command: str, reader_of: Callable[..., Reader], **versions: str) -> list[Path]:
    """Measure the cells that are missing; return the results files.

    versions: versions to record beside torch's.
    """
    used = {"model": a.model, "text": a.text, "data": a.data}
    if not any(x.needs_model for x in a.kinds.values()):
        used = {}
    settings = {
        **{name: described(path) for name, path in used.items() if path},
        "prompts": a.prompts,
        "batch": a.batch,
        "seed": a.seed,
        "dtype": a.dtype,
        "device": a.device,
    }
    where = origin(*shlex.split(command), device=a.device.split(":")[0])
    with Results(a.out / "results.jsonl", settings, {**where, **versions}) as results:
        fill(a, results, reader_of)
    return [results.file]


def fill(a: argparse.Namespace, results: Results, reader_of: Callable[..., Reader]) -> None:
    """Measure the cells that the results lack."""
    from tqdm import tqdm

    every = dict(cells(a))  # each once: a fraction and a number may be the same budget
    todo = [x for x in every.items() if x[0] not in results.done]
    count = len(every)
    if len(todo) < count:
        print(f"{count - len(todo)} of {count} cells were measured before: {results.file}")
    reader: Any = None
    filler: Any = None
    if any(a.kinds[x.task].needs_model for x, _ in todo):
        reader, filler = models.load(a.model, a.text, a.dtype, a.device, reader_of)
    made: tuple[tuple[str, int] | None, list[Prompt]] = (None, [])  # the prompts of a task and context
    warm: set[tuple[Any, ...]] = set()
    failed = 0
    with tqdm(total=count, initial=count - len(todo), disable=None, unit="cell") as bar:
        for cell, method in todo:
            bar.set_postfix_str(f"{cell.task} {cell.context} {cell.point} {cell.method} {cell.budget or ''}")
            task, size = a.kinds[cell.task], batch_size(a, a.kinds[cell.task])
            if made[0] != (cell.task, cell.context):
                made = (cell.task, cell.context), task.prompts(filler, cell.context, a.prompts, a.seed)
            prompts = made[1][cell.batch * size : (cell.batch + 1) * size]
            run = partial(task.run, reader, filler, prompts, method, cell.budget, cell.point)
            # Untimed: the first call with these shapes loads, compiles and allocates; on a GPU each method's does.
            shapes = (cell.task, cell.context) + (() if a.device == "cpu" else (cell.point, cell.method))
            try:
                if shapes not in warm:
                    warm.add(shapes)
                    run()
                results.add(cell, {**asdict(run()), "depths": [x.depth for x in prompts]})
            except Unreachable as error:
                results.add(cell, {"unreachable": str(error)})
            except torch.OutOfMemoryError as error:  # not recorded: the next run tries again
                failed += 1
                bar.write(f"out of memory: {cell}: {str(error).splitlines()[0]}", file=sys.stderr)
            bar.update()
    if failed:
        print(f"{failed} of {count} cells ran out of memory; rerun the same command to retry them", file=sys.stderr)


def read_summary(file: Path) -> Summary:
    """The rows of a summary.json.

    Raises:
        Refused: the file holds something else.
    """
    try:
        return of_record(json.loads(file.read_text()))
    except ValueError as error:  # Refused is one
        raise Refused(f"--from {file}: {error}") from None


def main(argv: list[str] | None = None) -> int:
    try:
        a = arguments(argv, make_parser(), rule)
        if a.list:
            print(describe())
            return 0
        try:
            from . import report  # before anything is measured
        except ModuleNotFoundError as error:
            raise Refused(f"needs {error.name} for its pictures: pip install 'kvops[bench]'") from None

        files = a.files
        if not files:
            from . import reader  # needs transformers, which a report does not

            said = sys.argv[1:] if argv is None else argv
            code = {f"{CODE}{x.entry.label}": described(x.source) for x in a.rules if x.source}
            files = measure(a, shlex.join(["python", "-m", "kvops.eval", *said]), reader.Reader, **code)
        if len(files) == 1 and files[0].suffix == ".json":
            print(report.write_summary(read_summary(files[0]), a.out))
        else:
            print(report.write(*load(files), a.out))
    except (Refused, OSError) as error:  # OSError: a file or its disk
        print(f"python -m kvops.eval: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\npython -m kvops.eval: stopped; rerun the same command to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
