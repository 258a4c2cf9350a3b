"""python -m kvops.bench --paged: compare paged with dense memory for every operator with a block table.

The pages of a request are shuffled. "HND" pages are compared with dense memory in the same order, [Hk, n, d], and "NHD"
pages with [n, Hk, d]: this isolates the cost of the block table from that of the order. The first row is the cost of
the memory itself, a bare loop over K and V. Further tables compare fp8 with bf16 in the same pages, and one call for
many requests or all layers with a call for each.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import _lib, ops
from ..commands import Parser
from ..methods.functions import keydiff_compress_
from .columns import aligned
from .measure import Contender, in_turns
from .record import Refused, check_target, origin, write
from .rows import WINDOW, Case

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
ORDERS = ("HND", "NHD")
LEAST = 5  # rounds per row
REQUESTS, LAYERS = 64, 32
RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results" / "cpu-pages.json"
READING = "reading alone"
OPERATORS = (
    READING,
    *("lag_score", "anchor_cosine", "outlier_degree"),
    *("window_scores", "window_attention", "window_attention, decode", "drop_scores"),
    *(
        "lsh_bucket",
        "build_prototypes",
        "assign_prototypes",
        "key_similarity",
        "value_norm",
        "value_range",
        "quadratic_scores",
        "trig_scores",
        "gather_kv",
        "compact_kv_",
    ),
)


MOVES = ("gather_kv", "compact_kv_")


def dense(x: Tensor, order: str) -> Tensor:
    """Return x, [1, Hk, n, d], in memory of that order."""
    return x.clone() if order == "HND" else x.transpose(1, 2).contiguous().transpose(1, 2)


def paged(x: Tensor, order: str, size: int, places: Tensor) -> Tensor:
    """Return the pages [b n / size, Hk, size, d] at `places` of the pool, in memory of that order."""
    b, heads, n, d = x.shape
    count = b * n // size
    pages = x.new_empty((count, heads, size, d) if order == "HND" else (count, size, heads, d))
    view = pages if order == "HND" else pages.transpose(1, 2)
    view[places] = x.unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1)
    return view


def reading(both: tuple[Tensor, Tensor], order: str, size: int, places: Tensor | None) -> Callable[[], Any]:
    """Return a bare loop over K and V: over dense memory from start to end, or over pages of `size` slots at `places`;
    in HND order one head after the other."""
    heads, width = both[0].shape[1], size * both[0].shape[3] * both[0].element_size()
    if order == "NHD":
        heads, width = 1, heads * width
    order_of = torch.arange(both[0].numel() * both[0].element_size() // width) if places is None else places
    if places is not None:
        order_of = (order_of * heads + torch.arange(heads).unsqueeze(1)).flatten()
    chunks = order_of.to(torch.int32)
    return lambda: [_lib.probe_pages(x, chunks, width) for x in both]


def of_requests(c: Case, size: int) -> dict[str, Callable[[], Any]]:
    """Return calls that evict all requests of c by KeyDiff, in pages of `size` slots."""
    places = torch.randperm(c.batch * c.n // size, generator=torch.Generator().manual_seed(0))
    k, v = (paged(x, "HND", size, places) for x in (c.k, c.v))
    table = places.to(torch.int32).view(c.batch, -1)
    lengths = torch.full((c.batch,), c.n, dtype=torch.int32)

    def evict(rows: slice) -> Any:
        return keydiff_compress_(k, v, c.budget, lengths=lengths[rows], block_table=table[rows])

    return {
        "one call, pages": lambda: evict(slice(None)),
        "one call, dense": lambda: keydiff_compress_(c.k, c.v, c.budget),
        "a call for each, pages": lambda: [evict(slice(i, i + 1)) for i in range(c.batch)],
    }


def of_layers(c: Case, size: int) -> dict[str, Callable[[], Any]]:
    """Return calls that compact c's rows as the layers of one request, each in its own pages."""
    places = torch.randperm(c.n // size, generator=torch.Generator().manual_seed(0))
    table = places.to(torch.int32).view(1, -1)
    k_dense, v_dense, kept = (list(x.unsqueeze(1)) for x in (c.k, c.v, c.indices))
    k, v = ([paged(x, "HND", size, places) for x in layers] for layers in (k_dense, v_dense))
    return {
        "one call, pages": lambda: ops.compact_kv_(k, v, kept, block_table=table),
        "one call, dense": lambda: ops.compact_kv_(k_dense, v_dense, kept),
        "one layer of so many requests, dense": lambda: ops.compact_kv_(c.k, c.v, c.indices),
        "a call for each, pages": lambda: [ops.compact_kv_(x, y, i, block_table=table) for x, y, i in zip(k, v, kept)],
    }


def calls(c: Case, k: Tensor, v: Tensor, table: Tensor | None) -> dict[str, Callable[[], Any]]:
    """Return a call of each operator over c's K and V, stored in k and v."""
    last, one, of = c.window(WINDOW), c.window(1), c.clusters
    pages: dict[str, Any] = dict(block_table=table)
    anchors: dict[str, Any] = dict(sat_indices=of.sats, buckets=of.buckets, num_chunks=of.prototypes.shape[2] - 4)
    every: dict[str, Callable[[], Any]] = {
        "lag_score": partial(ops.lag_score, k, v, lag=c.lag, **pages),
        "anchor_cosine": partial(ops.anchor_cosine, k, **pages),
        "window_scores": partial(ops.window_scores, last.q, k, last.visible, lse=last.lse, **pages),
        "window_attention": partial(ops.window_attention, last.q, k, v, last.visible, **pages),
        "window_attention, decode": partial(ops.window_attention, one.q, k, v, one.visible, **pages),
        "drop_scores": partial(ops.drop_scores, last.q, k, v, last.visible, **pages),
        "outlier_degree": partial(ops.outlier_degree, k, **pages),
        "lsh_bucket": partial(ops.lsh_bucket, k, of.sats, *of.hash, **pages),
        "build_prototypes": partial(ops.build_prototypes, k, **anchors, **pages),
        "assign_prototypes": partial(ops.assign_prototypes, k, of.prototypes, **pages),
        "key_similarity": partial(ops.key_similarity, k, **pages),
        "value_norm": partial(ops.value_norm, v, c.w_o, **pages),
        "value_range": partial(ops.value_range, v, **pages),
        "quadratic_scores": partial(ops.quadratic_scores, k, c.statistics.mean, cov=c.statistics.cov, **pages),
        "trig_scores": partial(ops.trig_scores, k, c.statistics.mean, norms=c.statistics.norms, **pages),
        "gather_kv": partial(ops.gather_kv, k, v, c.indices, out=c.out, **pages),
        "compact_kv_": partial(ops.compact_kv_, k, v, c.indices, **pages),
    }
    return every


def measured(row: dict[str, Any], prefix: str = "") -> str:
    """Return the results of a row in a few words, for the line that is printed as soon as it is there."""
    return ", ".join([f"{1e3 * row['seconds']:.3g} ms", *(f"{prefix}{x} {y:.2f}x" for x, y in row["ratio"].items())])


@torch.no_grad()
def measure(c: Case, dtype: str, sizes: list[int], names: list[str], seconds: float) -> list[dict[str, Any]]:
    """Return a row per operator and order: median times, and median ratios to dense memory in each round."""
    generator = torch.Generator().manual_seed(0)
    places = {size: torch.randperm(c.n // size, generator=generator) for size in sizes}
    tables = {size: at.to(torch.int32).view(1, -1) for size, at in places.items()}
    rows = []
    for name, order in product(names, ORDERS):
        memory = {0: (dense(c.k, order), dense(c.v, order))}
        memory |= {size: (paged(c.k, order, size, at), paged(c.v, order, size, at)) for size, at in places.items()}
        if name == READING:
            loops = {size: reading(both, order, size or min(sizes), places.get(size)) for size, both in memory.items()}
            rivals = {size: Contender(loop) for size, loop in loops.items()}
        else:
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
        print(f"{name}, {order}, {dtype}, {c.n:,} tokens: {measured(rows[-1], 'page ')}", flush=True)
    return rows


@torch.no_grad()
def measure_fp8(c: Case, size: int, names: list[str], seconds: float) -> list[dict[str, Any]]:
    """Return a row per operator that computes with K or V, in pages of `size` slots: the median time in bf16, and the
    median ratios to it in each round."""
    places = torch.randperm(c.n // size, generator=torch.Generator().manual_seed(0))
    table = places.to(torch.int32).view(1, -1)
    k, v = (paged(x, "HND", size, places) for x in (c.k, c.v))
    kinds = {"bf16": (k, v)} | {name: (k.to(kind), v.to(kind)) for name, kind in FP8.items()}
    rows = []
    for name in names:
        if name in (READING, *MOVES):
            continue
        rounds = in_turns((Contender(calls(c, *both, table)[name]) for both in kinds.values()), seconds, LEAST)
        taken = dict(zip(kinds, zip(*rounds)))
        rows.append(
            {
                **{"op": name, "n": c.n, "page": size, "rounds": len(rounds)},
                "seconds": statistics.median(taken["bf16"]),
                "ratio": {x: statistics.median(a / b for a, b in zip(taken[x], taken["bf16"])) for x in FP8},
            }
        )
        print(f"{name}, fp8, {c.n:,} tokens, pages of {size}: {measured(rows[-1])}", flush=True)
    return rows


@torch.no_grad()
def measure_together(n: int, dtype: str, heads: int, size: int, seconds: float) -> list[dict[str, Any]]:
    """Return a row for many requests of n tokens, and one for many layers."""
    rows = []
    for name, batch, calls_of in (
        (f"keydiff_compress_, {REQUESTS} requests", REQUESTS, of_requests),
        (f"compact_kv_, {LAYERS} layers", LAYERS, of_layers),
    ):
        every = calls_of(Case(n, DTYPES[dtype], heads=heads, batch=batch), size)
        rounds = in_turns(map(Contender, every.values()), seconds, LEAST)
        taken = dict(zip(every, zip(*rounds)))
        seconds_of = {x: statistics.median(times) for x, times in taken.items()}
        rows.append({"op": name, "n": n, "dtype": dtype, "page": size, "rounds": len(rounds), "seconds": seconds_of})
    return rows


def lines_together(rows: list[dict[str, Any]]) -> list[str]:
    """Return each call's time, and its ratio to one call on pages."""
    lines = []
    for x in rows:
        lines.append(f"\n{x['op']} of {x['n']:,} tokens, {x['dtype']}, pages of {x['page']} slots")
        first = x["seconds"]["one call, pages"]
        cells = [[name, f"{1e3 * s:.3g} ms", f"{s / first:.2f}x"] for name, s in x["seconds"].items()]
        lines.append(aligned(cells, left=(0,)))
    return lines


def lines_fp8(rows: list[dict[str, Any]]) -> list[str]:
    """Return each operator's time in bf16, and the ratios in fp8."""
    lines = []
    for n, size in dict.fromkeys((x["n"], x["page"]) for x in rows):
        own = [x for x in rows if (x["n"], x["page"]) == (n, size)]
        cells = [["", "bf16", *FP8]]
        cells += [[x["op"], f"{1e3 * x['seconds']:.3g} ms", *(f"{y:.2f}x" for y in x["ratio"].values())] for x in own]
        lines += [f"\nfp8, {n:,} tokens, pages of {size} slots", aligned(cells, left=(0,))]
    return lines


def table(rows: list[dict[str, Any]]) -> str:
    """Return a table with a line per operator and order."""
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
    p = Parser(
        prog="python -m kvops.bench --paged",
        description="Time the operators on shuffled pages of one request, in turns with dense memory, on the CPU.",
    )
    p.add_argument("--json", type=Path, metavar="FILE", help="write the measurements")
    p.add_argument("--ops", nargs="+", choices=OPERATORS, default=list(OPERATORS), metavar="OP", help="default: all")
    p.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    p.add_argument("--n", nargs="+", type=int, default=[32768], help="tokens (default 32768)")
    p.add_argument("--pages", nargs="+", type=int, default=[16, 64], help="slots per page (default 16 64)")
    p.add_argument("--heads", type=int, default=8, help="KV heads (default 8)")
    p.add_argument(
        "--seconds",
        type=float,
        default=1.0,
        help=f"seconds per operator and order, with at least {LEAST} rounds (default 1)",
    )
    a = p.parse_args(argv)
    if a.heads < 1:
        p.error(f"--heads: expected at least 1, got {a.heads}")
    if not 0 <= a.seconds < math.inf:
        p.error(f"--seconds: expected a number, at least 0, got {a.seconds}")
    for n, size in product(a.n, a.pages):
        if size < 1 or n < 1024 or n % size:
            p.error(f"--pages: expected sizes that divide --n, and --n of at least 1024, got {size} and {n}")
    try:
        if a.json:
            check_target("json", a.json)
    except Refused as error:
        p.error(str(error))
    record = {
        **origin("python", "-m", "kvops.bench", "--paged", *argv),
        "heads": a.heads,
        "rows": [],
        "fp8": [],
        "together": [],
    }
    for n, dtype in product(a.n, a.dtype):
        case, few, size = Case(n, DTYPES[dtype], heads=a.heads), n // 8, a.pages[0]
        record["rows"] += measure(case, dtype, a.pages, a.ops, a.seconds)
        if dtype == "bf16":
            record["fp8"] += measure_fp8(case, size, a.ops, a.seconds)
        record["together"] += measure_together(max(1, few // size) * size, dtype, a.heads, size, a.seconds)
        if a.json:
            write(a.json, record)
    print("\n" + table(record["rows"]))
    print("\ndense: median time; page 16: how many times longer shuffled pages of 16 slots take")
    print(*lines_fp8(record["fp8"]), *lines_together(record["together"]), sep="\n")
    return 0
