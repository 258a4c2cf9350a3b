"""python -m kvops.eval: measure accuracy, memory and time of every method at every budget on the same prompts."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import torch

from ..bench.record import check_target, origin
from ..files import MODEL, TEXT
from . import board, models
from .identity import described
from .methods import DEFAULT, METHODS, Rule, options_of, rule
from .plan import MOST, SHARES, Plan
from .results import Results, load
from .specs import Refused, canonical
from .summary import Summary, of_record
from .tasks import POINTS, TASKS, Filler, Reader, can_chat, in_chat, make_task


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
        "method's options are the arguments of its class, and storage=int8 or fp8, with which caches round what they "
        "hold. Names are case-insensitive. --list prints them all.",
    )
    p.add_argument(
        "--model", default=str(MODEL), help="model folder, hub name, or smollm2 (default: the shipped passkey model)"
    )
    p.add_argument(
        "--methods",
        nargs="+",
        default=list(DEFAULT),
        metavar="METHOD",
        help="default: all but kvzap, which needs gates",
    )
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
    p.add_argument(
        "--chat", action=argparse.BooleanOptionalAction,
        help="put prompts with questions into the model's chat template (default: if it has one)",
    )  # fmt: skip
    p.add_argument("--data", type=path, help="folder with a local copy of LongBench or RULER")
    p.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    p.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto", help="dtype of the model"
    )
    p.add_argument(
        "--out", type=path, default=Path("eval"), help="folder for results.jsonl and the report (default eval)"
    )
    p.add_argument(
        "--share-prefill",
        action="store_true",
        help="read each prompt once for all methods and budgets; prefill times are left out",
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
    p.add_argument("--board", type=path, metavar="FILE", help="write a page with this run and the recorded ones")
    p.add_argument("--list", action="store_true", help="print the methods and tasks with their options")
    return p


def arguments(argv: list[str] | None, p: argparse.ArgumentParser, rule: Callable[[str], Rule]) -> argparse.Namespace:
    """Parse and check the arguments. rule: looks a method up by name."""
    a = p.parse_args(argv)
    a.context = a.context or [1024 if a.quick else 2048]
    a.prompts = (5 if a.quick else 64) if a.prompts is None else a.prompts
    if os.path.lexists(a.out) and not a.out.is_dir():
        p.error(f"--out: expected a folder, got the file {a.out}")
    try:
        rules = {x: rule(x) for x in dict.fromkeys(a.methods)}
        a.kinds = {x: make_task(x, a.data) for x in dict.fromkeys(canonical(x, TASKS) for x in a.tasks)}
        a.plan = Plan(a.kinds, a.context, a.points, [*rules.items()], a.budgets, a.prompts, a.batch, a.seed)
    except ValueError as error:
        p.error(str(error))
    for file in a.files or ():
        if not os.path.isfile(file):
            p.error(f"--from: expected a results file, got {file}")
    if a.board and not a.list:
        check_target("board", a.board)
        board.page()
    if a.list or a.files:  # nothing is measured
        return a
    if not os.path.isfile(a.text):
        p.error(f"--text: expected a file, got {a.text}")
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,4})?", a.device):
        p.error(f"--device: expected cpu, cuda or cuda:NUMBER, got {a.device}")
    if a.device != "cpu" and int(a.device.partition(":")[2] or 0) >= torch.cuda.device_count():
        p.error(f"--device {a.device}: torch {torch.__version__} sees {torch.cuda.device_count()} NVIDIA GPUs")
    a.model = models.found(a.model)
    if any(map(can_chat, a.kinds.values())):
        chat = models.has_template(a.model) if a.chat is None else a.chat
        a.kinds = dict(in_chat(spec, task, chat) for spec, task in a.kinds.items())
        a.plan = replace(a.plan, tasks=a.kinds)
    return a


def describe() -> str:
    lines = ["methods, with the arguments of their classes:"]
    for name, entry in METHODS.items():
        lines.append(f"  {name:20}{', '.join(options_of(entry.policy))}".rstrip())
    lines.append("  path/to/file.py:Class, module:Class, or an installed package's name (docs/adding_a_method.md)")
    lines.append("tasks:")
    for name, task in TASKS.items():
        lines.append(f"  {name:20}{', '.join(f'{x.name}={x.default}' for x in fields(task))}")
    return "\n".join(lines)


def measure(a: argparse.Namespace, command: str, reader_of: Callable[..., Reader], **versions: str) -> list[Path]:
    """Measure the cells that are missing; return the results files.

    versions: versions to record beside torch's.
    """
    used = {"model": a.model, "text": a.text, "data": a.data} if a.plan.needs_model else {}
    settings = {
        **{name: described(path) for name, path in used.items() if path},
        **{name: getattr(a, name) for name in ("prompts", "batch", "seed", "dtype", "device")},
        **({"share_prefill": True} if a.share_prefill else {}),
    }
    where = origin(*shlex.split(command), device=a.device.split(":")[0])
    with Results(a.out / "results.jsonl", settings, {**where, **versions}) as results:
        show(a, results, lambda: models.load(a.model, a.text, a.dtype, a.device, reader_of))
    return [results.file]


def show(a: argparse.Namespace, results: Results, load: Callable[[], tuple[Reader, Filler]]) -> None:
    """Measure the cells that the results lack, with a progress bar."""
    from tqdm import tqdm

    cells = a.plan.cells()
    count, done = len(cells), len(results.done & cells.keys())
    if done:
        print(f"{done} of {count} cells were measured before: {results.file}")
    failed = 0
    with tqdm(total=count, initial=done, disable=None, unit="cell") as bar:
        for cell, line, why in a.plan.measure(results, load, warm_each=a.device != "cpu"):
            bar.set_postfix_str(f"{cell.task} {cell.context} {cell.point} {cell.method} {cell.budget or ''}")
            if line is None:
                failed += 1
                bar.write(f"out of memory: {cell}: {why}", file=sys.stderr)
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
            from . import plots, report  # noqa: F401  (before anything is measured)
        except ModuleNotFoundError as error:
            raise Refused(f"needs {error.name} for its pictures: pip install 'kvops[bench]'") from None

        files = a.files
        if not files:
            from . import reader  # needs transformers, which a report does not

            said = sys.argv[1:] if argv is None else argv
            code = {name: mark for x in a.plan.rules for name, mark in x.code.items()}
            reads = partial(reader.Reader, share=a.share_prefill)
            files = measure(a, shlex.join(["python", "-m", "kvops.eval", *said]), reads, **code)
        if len(files) == 1 and files[0].suffix == ".json":
            print(report.write_summary(read_summary(files[0]), a.out))
        else:
            print(report.write(*load(files), a.out))
        if a.board:
            board.write_board(a.board, board.sources(files), a.plan.rules)
            print(f"board: {a.board}, with the recorded runs")
    except (Refused, OSError) as error:  # OSError: a file or its disk
        print(f"python -m kvops.eval: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\npython -m kvops.eval: stopped; rerun the same command to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
