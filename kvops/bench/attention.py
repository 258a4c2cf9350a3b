"""python -m kvops.bench.attention: which backend `kvops.attention` should take on the CPU, and whether it does.

torch's FlashAttention and kvops' own run in turns, causal, for each dtype and number of query rows, over key lengths,
head dims and query heads per KV head. For each dtype, number of rows, and whether query heads share KV heads, that
gives one number, the geometric mean of time of torch_flash / time of kvops: above 1 kvops is faster.
`kvops.flash_attention.KVOPS_ROWS` is made from these: the number of rows up to which kvops runs, so that the least is
lost.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..flash_attention import AMX, KVOPS_ROWS, attention
from .columns import aligned
from .measure import Contender, in_turns
from .record import Refused, check_target, origin, write

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
BACKENDS = ("torch_flash", "kvops")
ROWS = (1, 4, 16, 64, 128, 256, 1024, 4096)
LENGTHS = (1024, 8192, 32768)  # keys; of 1024 rows and more also as many as rows, a whole prompt
HEAD_DIMS = (64, 128)
GROUPS = (1, 4)  # query heads per KV head
MOST_LOGITS = 9_000_000  # of one query head; what is more takes minutes and tells nothing new
LEAST = 3  # pairs of a cell
SLACK = 1.1  # the table holds while the best one is less than so many times faster
_RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
RESULTS = {False: _RESULTS / "cpu-attention.json", True: _RESULTS / "cpu-attention-amx.json"}  # by AMX


def lengths(rows: int) -> list[int]:
    """The numbers of keys for so many rows, the last ones of a sequence."""
    found = sorted({*LENGTHS, *([rows] if rows >= min(LENGTHS) else [])})
    return [n for n in found if n >= rows and rows * (2 * n - rows + 1) // 2 <= MOST_LOGITS]


def cell(dtype: str, rows: int, n: int, d: int, group: int, heads: int, seconds: float) -> dict[str, Any]:
    """The medians of both backends, and of the ratio of each pair."""
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
    """By dtype and whether query heads share KV heads, by rows: the geometric mean of the ratios."""
    found: dict[tuple[str, bool], dict[int, list[float]]] = {}
    for x in cells:
        found.setdefault((x["dtype"], x["group"] > 1), {}).setdefault(x["rows"], []).append(x["ratio"])
    return {kind: {r: statistics.geometric_mean(x) for r, x in sorted(by.items())} for kind, by in found.items()}


def lost(ratios: dict[int, float], most: float) -> float:
    """How many times longer it takes to let kvops run up to `most` rows than to take the faster one each time: the
    geometric mean over the numbers of rows."""
    return statistics.geometric_mean(max(1, 1 / x if rows <= most else x) for rows, x in ratios.items())


def kvops_rows(ratios: dict[int, float]) -> float:
    """Up to how many rows kvops should run: where the least is lost. 0: never; infinity: at any number."""
    return min((0, *list(ratios)[:-1], math.inf), key=lambda most: lost(ratios, most))


def chosen(dtype: str, grouped: bool, amx: bool = AMX) -> float:
    """The same, as `kvops.attention` has it."""
    return KVOPS_ROWS[amx][DTYPES[dtype]][grouped]


def table(found: Means) -> str:
    """A line for each dtype and kind of heads, a column for each number of rows, and up to where kvops runs."""
    every = sorted({rows for x in found.values() for rows in x})
    lines = [["dtype", "query heads", *map(str, every), "kvops up to", "measured"]]
    for (dtype, grouped), x in found.items():
        ratios = [f"{x[rows]:.2f}x" if rows in x else "" for rows in every]
        limits = ["any" if most == math.inf else f"{most:g}" for most in (chosen(dtype, grouped), kvops_rows(x))]
        lines.append([dtype, "shared" if grouped else "alone", *ratios, *limits])
    return aligned(lines, left=())


def wrong(found: Means, amx: bool = AMX) -> list[str]:
    """Where what `kvops.attention` takes is clearly not the best that it could."""
    return [
        f"{dtype}, {'shared' if grouped else 'alone'}: KVOPS_ROWS {most:g} loses {loss:.2f}x on what "
        f"{kvops_rows(x):g} takes"
        for (dtype, grouped), x in found.items()
        for most in [chosen(dtype, grouped, amx)]
        if (loss := lost(x, most) / lost(x, kvops_rows(x))) > SLACK
    ]


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m kvops.bench.attention",
        description="Times torch_flash and kvops in turns on the CPU; says whether kvops.attention takes the faster.",
    )
    p.add_argument(
        "--json", type=Path, metavar="FILE", help=f"write what was measured (the docs': {RESULTS[AMX].name})"
    )
    p.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    p.add_argument("--rows", nargs="+", type=int, choices=ROWS, default=list(ROWS), metavar="ROWS", help=f"of {ROWS}")
    p.add_argument("--heads", type=int, default=8, help="KV heads (default 8)")
    p.add_argument("--seconds", type=float, default=1.0, help=f"per cell, and {LEAST} pairs at least (default 1)")
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
    print("\n".join(lines) or "The table in kvops/flash_attention.py holds.")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
