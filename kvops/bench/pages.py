"""python -m kvops.bench --paged: every operator that takes a block table, on pages and in dense memory, in turns.

The pages of a request are shuffled. Pages in the order of heads ("HND") are compared with dense memory in that order,
[Hk, n, d], those in the order of tokens ("NHD") with [n, Hk, d]: what a block table costs, not what an order does.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .columns import aligned
from .measure import Contender, in_turns
from .record import Refused, check_target, origin, write
from .rows import WINDOW, Case

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ORDERS = ("HND", "NHD")
LEAST = 5  # rounds of a row
RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results" / "cpu-pages.json"
OPERATORS = (
    *("lag_score", "anchor_cosine", "outlier_degree"),
    *("window_scores", "window_attention", "window_attention, decode"),
    *("lsh_bucket", "build_prototypes", "assign_prototypes", "gather_kv", "compact_kv_"),
)


def dense(x: Tensor, order: str) -> Tensor:
    """[1, Hk, n, d], whose memory is in that order."""
    return x.clone() if order == "HND" else x.transpose(1, 2).contiguous().transpose(1, 2)


def paged(x: Tensor, order: str, size: int, places: Tensor) -> Tensor:
    """The pages [n / size, Hk, size, d] of one request at these places of the pool, whose memory is in that order."""
    _, heads, n, d = x.shape
    pages = x.new_empty((n // size, heads, size, d) if order == "HND" else (n // size, size, heads, d))
    view = pages if order == "HND" else pages.transpose(1, 2)
    view[places] = x[0].unflatten(1, (-1, size)).transpose(0, 1)
    return view


def calls(c: Case, k: Tensor, v: Tensor, table: Tensor | None) -> dict[str, Callable[[], Any]]:
    """Each operator over c's K and V, which lie in k and v."""
    last, one, of = c.window(WINDOW), c.window(1), c.clusters
    pages: dict[str, Any] = dict(block_table=table)
    anchors: dict[str, Any] = dict(sat_indices=of.sats, buckets=of.buckets, num_chunks=of.prototypes.shape[2] - 4)
    every: dict[str, Callable[[], Any]] = {
        "lag_score": partial(ops.lag_score, k, v, lag=c.lag, **pages),
        "anchor_cosine": partial(ops.anchor_cosine, k, **pages),
        "window_scores": partial(ops.window_scores, last.q, k, last.visible, lse=last.lse, **pages),
        "window_attention": partial(ops.window_attention, last.q, k, v, last.visible, **pages),
        "window_attention, decode": partial(ops.window_attention, one.q, k, v, one.visible, **pages),
        "outlier_degree": partial(ops.outlier_degree, k, **pages),
        "lsh_bucket": partial(ops.lsh_bucket, k, of.sats, *of.hash, **pages),
        "build_prototypes": partial(ops.build_prototypes, k, **anchors, **pages),
        "assign_prototypes": partial(ops.assign_prototypes, k, of.prototypes, **pages),
        "gather_kv": partial(ops.gather_kv, k, v, c.indices, out=c.out, **pages),
        "compact_kv_": partial(ops.compact_kv_, k, v, c.indices, **pages),
    }
    return every


@torch.no_grad()
def measure(c: Case, dtype: str, sizes: list[int], names: list[str], seconds: float) -> list[dict[str, Any]]:
    """A row for each operator and order: the medians, and those of the ratio to dense memory in each round."""
    generator = torch.Generator().manual_seed(0)
    places = {size: torch.randperm(c.n // size, generator=generator) for size in sizes}
    tables = {size: at.to(torch.int32).view(1, -1) for size, at in places.items()}
    rows = []
    for name, order in product(names, ORDERS):
        memory = {0: (dense(c.k, order), dense(c.v, order))}
        memory |= {size: (paged(c.k, order, size, at), paged(c.v, order, size, at)) for size, at in places.items()}
        rivals = {size: Contender(calls(c, *both, tables.get(size))[name]) for size, both in memory.items()}
        rounds = in_turns(rivals.values(), seconds, LEAST)
        taken = dict(zip(rivals, zip(*rounds)))
        rows.append(
            {
                **{"op": name, "n": c.n, "dtype": dtype, "order": order, "rounds": len(rounds)},
                "seconds": statistics.median(taken[0]),
                "ratio": {size: statistics.median(a / b for a, b in zip(taken[size], taken[0])) for size in sizes},
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each operator and order."""
    kinds = list(dict.fromkeys((x["dtype"], x["n"]) for x in rows))
    sizes = list(rows[0]["ratio"])
    lines = [["", "order"]]
    for dtype, n in kinds:
        lines[0] += [f"{dtype}, {n:,}, dense", *(f"page {size}" for size in sizes)]
    cells = {(x["op"], x["order"], x["dtype"], x["n"]): x for x in rows}
    for name, order in dict.fromkeys((x["op"], x["order"]) for x in rows):
        line = [name, order]
        for dtype, n in kinds:
            x = cells[name, order, dtype, n]
            line += [f"{1e3 * x['seconds']:.3g} ms", *(f"{x['ratio'][size]:.2f}x" for size in sizes)]
        lines.append(line)
    return aligned(lines, left=(0, 1))


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(
        prog="python -m kvops.bench --paged",
        description="Times the operators on shuffled pages of one request, in turns with dense memory, on the CPU.",
    )
    p.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    p.add_argument("--ops", nargs="+", choices=OPERATORS, default=list(OPERATORS), metavar="OP", help="default: all")
    p.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    p.add_argument("--n", nargs="+", type=int, default=[32768], help="tokens (default 32768)")
    p.add_argument("--pages", nargs="+", type=int, default=[16, 64], help="slots of a page (default 16 64)")
    p.add_argument("--heads", type=int, default=8, help="KV heads (default 8)")
    p.add_argument("--seconds", type=float, default=1.0, help=f"per operator and order, {LEAST} rounds at least")
    a = p.parse_args(argv)
    if a.heads < 1:
        p.error(f"--heads: expected at least 1, got {a.heads}")
    if not 0 <= a.seconds < math.inf:
        p.error(f"--seconds: expected a number, at least 0, got {a.seconds}")
    for n, size in product(a.n, a.pages):
        if size < 1 or n < 1024 or n % size:
            p.error(f"--pages: expected sizes that divide --n, which is at least 1024, got {size} and {n}")
    try:
        if a.json:
            check_target("json", a.json)
    except Refused as error:
        p.error(str(error))
    record = {**origin("python", "-m", "kvops.bench", "--paged", *argv), "heads": a.heads, "rows": []}
    for n, dtype in product(a.n, a.dtype):
        record["rows"] += measure(Case(n, DTYPES[dtype], heads=a.heads), dtype, a.pages, a.ops, a.seconds)
        if a.json:
            write(a.json, record)
    print(table(record["rows"]))
    print("\ndense: the median time; page 16: how many times longer it takes in shuffled pages of 16 slots")
    return 0
