"""python -m kvops.bench.attention: find the faster backend for `kvops.attention` on the CPU, and check that it is used.

torch's FlashAttention and kvops' own run in turns, causal, for each dtype and number of query rows, over key lengths,
head dims and query heads per KV head. The result is one number per dtype, number of rows, and whether query heads
share KV heads: the geometric mean of (time of torch_flash / time of kvops). Above 1, kvops is faster.
`kvops.ops.flash_attention.KVOPS_ROWS` follows from these: the number of rows up to which kvops should run to lose
least.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..commands import Parser
from ..ops.flash_attention import AMX, KVOPS_ROWS, attention
from .columns import aligned
from .measure import Contender, in_turns
from .record import Refused, check_target, origin, write

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
BACKENDS = ("torch_flash", "kvops")
ROWS = (1, 4, 16, 64, 128, 256, 1024, 4096)
LENGTHS = (1024, 8192, 32768)  # keys; from 1024 rows on also as many as rows, a whole prompt
HEAD_DIMS = (64, 128)
GROUPS = (1, 4)  # query heads per KV head
MOST_LOGITS = 9_000_000  # per query head; larger cells take minutes and add nothing
LEAST = 3  # pairs per cell
SLACK = 1.1  # KVOPS_ROWS is accepted while the best choice is less than this many times faster
_RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
RESULTS = {False: _RESULTS / "cpu-attention.json", True: _RESULTS / "cpu-attention-amx.json"}  # by AMX


def lengths(rows: int) -> list[int]:
    """Return the key lengths to measure for `rows` query rows, the last ones of a sequence."""
    found = sorted({*LENGTHS, *([rows] if rows >= min(LENGTHS) else [])})
    return [n for n in found if n >= rows and rows * (2 * n - rows + 1) // 2 <= MOST_LOGITS]


def cell(dtype: str, rows: int, n: int, d: int, group: int, heads: int, seconds: float) -> dict[str, Any]:
    """Return the median times of both backends, and the median of the pairs' ratios."""
    generator = torch.Generator().manual_seed(0)
    shapes = (heads * group, rows), (heads, n), (heads, n)
    q, k, v = (torch.randn(1, *x, d, generator=generator).to(DTYPES[dtype]) for x in shapes)
    rivals = {x: Contender(partial(attention, q, k, v, backend=x)) for x in BACKENDS}
    pairs = in_turns(rivals.values(), seconds, LEAST)
    return {
        **{"dtype": dtype, "rows": rows, "n": n, "head_dim": d, "group": group, "pairs": len(pairs)},
        "seconds": {x: statistics.median(taken) for x, taken in zip(rivals, zip(*pairs))},
        "ratio": statistics.median(a / b for a, b in pairs),
    }


Means = dict[tuple[str, bool], dict[int, float]]


def means(cells: Iterable[dict[str, Any]]) -> Means:
    """Return the geometric mean of the ratios, by dtype and head sharing, then by rows."""
    found: dict[tuple[str, bool], dict[int, list[float]]] = {}
    for x in cells:
        found.setdefault((x["dtype"], x["group"] > 1), {}).setdefault(x["rows"], []).append(x["ratio"])
    return {kind: {r: statistics.geometric_mean(x) for r, x in sorted(by.items())} for kind, by in found.items()}


def lost(ratios: dict[int, float], most: float) -> float:
    """Return how many times longer it takes to run kvops up to `most` rows than to use the faster backend each time, as
    the geometric mean over the numbers of rows."""
    return statistics.geometric_mean(max(1, 1 / x if rows <= most else x) for rows, x in ratios.items())


def kvops_rows(ratios: dict[int, float]) -> float:
    """Return the number of rows up to which kvops should run to lose least. 0: never; infinity: always."""
    return min((0, *list(ratios)[:-1], math.inf), key=lambda most: lost(ratios, most))


def chosen(dtype: str, grouped: bool, amx: bool = AMX) -> float:
    """Return the number of rows up to which `kvops.attention` runs kvops."""
    return KVOPS_ROWS[amx][DTYPES[dtype]][grouped]


def table(found: Means) -> str:
    """Return a table: a line per dtype and kind of heads, a column per number of rows, and the limits for kvops."""
    every = sorted({rows for x in found.values() for rows in x})
    lines = [["dtype", "query heads", *map(str, every), "kvops up to", "measured"]]
    for (dtype, grouped), x in found.items():
        ratios = [f"{x[rows]:.2f}x" if rows in x else "" for rows in every]
        limits = ["any" if most == math.inf else f"{most:g}" for most in (chosen(dtype, grouped), kvops_rows(x))]
        lines.append([dtype, "shared" if grouped else "alone", *ratios, *limits])
    return aligned(lines, left=())


def wrong(found: Means, amx: bool = AMX) -> list[str]:
    """Return where `kvops.attention` clearly does not use the best limit."""
    return [
        f"{dtype}, {'shared' if grouped else 'alone'}: KVOPS_ROWS {most:g} is {loss:.2f}x slower than {kvops_rows(x):g}"
        for (dtype, grouped), x in found.items()
        for most in [chosen(dtype, grouped, amx)]
        if (loss := lost(x, most) / lost(x, kvops_rows(x))) > SLACK
    ]


def main(argv: list[str] | None = None) -> int:
    p = Parser(
        prog="python -m kvops.bench.attention",
        description="Time torch_flash and kvops in turns on the CPU; check that kvops.attention uses the faster one.",
    )
    p.add_argument(
        "--json", type=Path, metavar="FILE", help=f"write the measurements (for the docs: {RESULTS[AMX].name})"
    )
    p.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    p.add_argument("--rows", nargs="+", type=int, choices=ROWS, default=list(ROWS), metavar="ROWS", help=f"of {ROWS}")
    p.add_argument("--heads", type=int, default=8, help="KV heads (default 8)")
    p.add_argument(
        "--seconds", type=float, default=1.0, help=f"seconds per cell, with at least {LEAST} pairs (default 1)"
    )
    a = p.parse_args(argv)
    if a.heads < 1:
        p.error(f"--heads: expected at least 1, got {a.heads}")
    if not 0 <= a.seconds < math.inf:
        p.error(f"--seconds: expected a number, at least 0, got {a.seconds}")
    try:
        if a.json:
            check_target("json", a.json)
    except Refused as error:
        p.error(str(error))
    said = sys.argv[1:] if argv is None else argv
    record = {**origin("python", "-m", "kvops.bench.attention", *said), "amx": AMX, "heads": a.heads, "cells": []}
    for dtype, rows, d, group in product(a.dtype, a.rows, HEAD_DIMS, GROUPS):
        for n in lengths(rows):
            x = cell(dtype, rows, n, d, group, a.heads, a.seconds)
            record["cells"].append(x)
            if a.json:
                write(a.json, record)
            print(
                f"{dtype} rows {rows} n {n} d {d} group {group}: "
                + ", ".join(f"{name} {1e3 * s:.3g} ms" for name, s in x["seconds"].items())
                + f", {x['ratio']:.2f}x",
                flush=True,
            )
    found = means(record["cells"])
    print(f"\ntime of torch_flash / time of kvops, geometric mean:\n{table(found)}")
    lines = wrong(found)
    print("\n".join(lines) or "KVOPS_ROWS in kvops/ops/flash_attention.py is up to date.")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
