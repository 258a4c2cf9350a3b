"""Does a small model still find a passkey in a long text when most of its KV cache is evicted?

    python -m kvops demo [--all] [--out FOLDER]

Each text hides a key of many digits. The model (2.4 million parameters, trained for this task) reads it, each method
evicts once to the same budget, and only then does the question for the key arrive. Five methods are shown at a quarter
of the cache. --all measures every method at a half and a quarter, and those that use queries at 32 to 256 tokens.

Do not generalize from the scores: digits are rare in these texts and KeyDiff keeps rare keys, so the task flatters it.
The model has hardly any attention sink, so nothing here shows what sinks are worth.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..bench.record import origin, write
from ..commands import Parser
from . import lookahead, methods, passkeys
from .methods import Row
from .passkeys import Prompt

FRONT = {
    "Full cache": "Full cache",
    "StreamingLLM": "StreamingLLM",
    "SnapKV": "SnapKV",
    "ProtoKV dot 496": "ProtoKV",
    "LagKV, lag 128": "LagKV",
    "KeyDiff": "KeyDiff",
}
FRONT_SHARE = 0.25
STRIP = 30  # characters that show the whole context
SHADES, ASCII = " ░▒▓█", " .:*#"  # tokens of a strip that were kept, from none to all


# ---- the first screen ----


def shades() -> str:
    """Return five characters that this output can print."""
    try:
        SHADES.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return ASCII
    return SHADES


def front_rows(context: int) -> list[Row]:
    rows = methods.make_rows(context)
    return [x for name in FRONT for x in rows if x.name == name and x.share in (1, FRONT_SHARE)]


def front_heading(prompts: int, context: int, digits: int) -> str:
    return (
        f"Texts of {context:,} tokens hide pass keys of {digits} digits ({prompts} prompts). Each method\n"
        f"evicts {1 - FRONT_SHARE:.0%} of the KV cache after the text; only then is the key asked for.\n\n"
        f"{'method':14}{'KV cache':>8}   {'digits recalled':21}{'eviction':>12}{'eager PyTorch':>22}"
    )


def front_line(row: Row) -> str:
    """Return a line of the first screen: memory, a bar of the digits recalled, time, factor over eager PyTorch."""
    if not row.reachable:
        return f"{FRONT[row.name]:14}{row.note.partition(':')[0]}"
    bar = shades()[-1] * round(row.score / 100 * 15)
    line = f"{FRONT[row.name]:14}{row.bytes_kept / 2**20:4.2f} MiB   {bar:15} {row.score:3.0f} %"
    if row.compress:
        line += f"{row.ms:9.2f} ms{row.plain_ms / row.ms:11.1f} x the time"
    return line


def strip(row: Row) -> str:
    """Return a character for each piece of the context: how much of it the cache holds."""
    pieces = np.array_split(row.kept.mean((0, 1)), STRIP)
    return "".join(shades()[int(np.ceil(4 * x.mean()))] for x in pieces)


def answers(rows: Sequence[Row], prompt: Prompt) -> str:
    """Return the true key, and below it the answers of the methods that recall most and least, with what they kept."""
    evicting = [x for x in rows if x.reachable and x.share < 1]
    at = min(STRIP - 1, STRIP * prompt.start // len(prompt.ids))
    lines = [f"{'the key':14}{prompt.digits}  {' ' * at}v"]
    for row in (max(evicting, key=lambda x: x.score), min(evicting, key=lambda x: x.score)):
        said = "".join(x if x.isprintable() else "?" for x in row.said)
        lines.append(f"{FRONT[row.name]:14}{said}  {strip(row)}")
    lines.append("Digits are rare in these texts, which favours KeyDiff. Other tasks: kvops eval.")
    return "\n".join(lines)


def steps() -> str:
    """Return the next steps, with the words that call this Python from here."""
    here = shutil.which("python") == sys.executable
    python = "python" if here else min(sys.executable, os.path.relpath(sys.executable), key=len)
    return (
        'Your model   with kvops.hf.compress(model, "keydiff:budget=0.25"): ...\n'
        f"All methods  {python} -m kvops demo --all\n"
        f"Other tasks  {python} -m kvops eval --quick"
    )


# ---- --all ----


def heading(context: int, digits: int, prompts: int) -> str:
    head = [
        ("", "tokens kept", "cache bytes", "", "digits right", "score + select", "plain PyTorch"),
        ("method", f"of {context:,}", "full", "kept", f"of {digits * prompts:,}", "+ gather", "takes"),
    ]
    lines = [f"{a:16} {b:>15} {c:>12} {d:>11} {e:>14}{'':11} {f:>14} {g:>14}" for a, b, c, d, e, f, g in head]
    return "\n".join([*lines, "-" * len(lines[0])])


def line(row: Row, context: int) -> str:
    """Return a line of the table of all methods."""
    if not row.reachable:
        return f"{row.name:16}   {row.note}"
    name = row.name + " *" if row.note else row.name
    text = f"{name:16} {row.tokens:7,} {100 * row.tokens / context:5.1f} %"
    text += f" {row.bytes_full:12,} {row.bytes_kept:11,} {row.score:12.1f} % {'#' * round(row.score / 10):10}"
    if row.compress:
        text += f" {row.ms:11.2f} ms {row.plain_ms / row.ms:12.1f} x"
    return text.rstrip()


def tell_all(prompts: Sequence[Prompt], shown: int, few: int) -> tuple[list[Row], list[lookahead.Cell]]:
    """Print and return both tables. few: prompts of the second; 0 leaves it out."""
    context, rows = len(prompts[0].ids), list[Row]()
    print(heading(context, len(prompts[0].digits), len(prompts)), flush=True)
    for row in methods.measured(methods.make_rows(context), prompts, shown):
        if rows and row.share != rows[-1].share:
            print()
        print(line(row, context), flush=True)
        rows.append(row)
    for row in rows:
        if row.reachable and row.note:
            print(f"* {row.note}")
    print(f"\nBytes and times: one context, all layers; medians of {methods.ROUNDS} alternating runs on one thread.")
    cells: list[lookahead.Cell] = []
    if few:
        print(f"\n{lookahead.heading(context, few)}", flush=True)
        for found in lookahead.measured(context, few):
            print(lookahead.line(found), flush=True)
            cells += found
    return rows, cells


# ---- both ----


def draw(rows: Sequence[Row], prompt: Prompt, path: Path) -> str:
    """Draw the picture; return the line that says where it is."""
    try:
        from .picture import picture
    except ImportError as error:
        if error.name != "matplotlib":
            raise
        return "Picture      pip install matplotlib"
    picture(rows, prompt, path)
    return f"Picture      {path}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m kvops.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="every method, and LAQ at small budgets: minutes")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a text, 512 to 4000 (default 2048)")
    parser.add_argument("--digits", type=int, default=32, help="digits of a key, 5 to 64 (default 32)")
    parser.add_argument("--prompts", type=int, help="texts, with keys at 11 depths (default 11, with --all 33)")
    parser.add_argument("--lookahead", type=int, default=11, help="texts of the second table of --all; 0 skips it")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for demo.png (default: this one)")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    args = parser.parse_args(argv)
    args.prompts = args.prompts if args.prompts is not None else 33 if args.all else 11
    for name, low, high in (("context", 512, 4000), ("digits", 5, 64), ("prompts", 1, 330), ("lookahead", 0, 330)):
        if not low <= getattr(args, name) <= high:
            parser.error(f"--{name} must be between {low} and {high}, got {getattr(args, name)}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    command = ["python", "-m", "kvops", "demo", *(sys.argv[1:] if argv is None else argv)]
    record: dict[str, Any] = origin(*command)  # before anything is written
    prompts = passkeys.make_prompts(args.prompts, args.context, args.digits)
    shown = min(range(args.prompts), key=lambda i: abs(prompts[i].depth - 0.3))  # outside StreamingLLM's window
    cells: list[lookahead.Cell] = []
    if args.all:
        rows, cells = tell_all(prompts, shown, args.lookahead)
    else:
        print(front_heading(args.prompts, args.context, args.digits), flush=True)
        rows = []
        for row in methods.measured(front_rows(args.context), prompts, shown):
            print(front_line(row), flush=True)
            rows.append(row)
        print(f"\n{answers(rows, prompts[shown])}")
    print(f"\n{draw(rows, prompts[shown], args.out / 'demo.png')}")
    if not args.all:
        print(steps())
    if args.json:
        record["rows"] = [x.numbers for x in rows]
        if cells:
            record["lookahead"] = [x.numbers for x in cells]
        write(args.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
