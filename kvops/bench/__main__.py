"""python -m kvops.bench: measure time and bandwidth, and compare with PyTorch, eager and compiled."""

from __future__ import annotations

import argparse
import gc
import math
import os
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import build_info, ops
from ..commands import Parser
from ..specs import did_you_mean
from . import pages
from .columns import aligned
from .goals import goals, goals_of
from .gpu import at_most, first_line, usable
from .markdown import escape
from .measure import measure
from .record import Refused, check_target, load, origin, replace, write
from .rows import ROWS, Case

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LEGEND = """
eager, compile: how many times longer a common PyTorch formulation takes, eager and under torch.compile (select_topk:
torch.topk + sort). of bandwidth: compared with reading, copying or shifting in place the same number of bytes, in
GB/s, measured in turns with the row. parts: how many times longer scores + select + a fresh clone of the result take.
matmul: the product of the window and K alone (key_similarity: of K and K; value_norm: of V and the output projection;
as many FLOP as the row). flash: torch's FlashAttention on the same rows, without scores.
repeat_kv: eager PyTorch with K repeated for each query head. one layer: the same rows as one layer with a larger
batch. index_select: into out=. bf16 product: K times the prototypes, without the argmax. assign_prototypes: that step
alone. SnapKV: eager. our SnapKV: snapkv_compress without the log-sum-exp. no bias: without `key_bias`. not rounded: K
and V before int8."""
CUDA_LEGEND = """
Times come from CUDA graphs of several calls, between events, over inputs that do not fit in the L2 cache.
eager, compile: how many times longer a common PyTorch formulation takes, eager and under torch.compile (select_topk:
torch.topk + sort). of bandwidth: compared with a torch.copy_ of 2 GiB (bytes read and written), in GB/s. same bytes:
compared with a copy_ that moves as many bytes as the row. Both are measured in turns with the row. select:
select_topk's fraction of the time. matmul: the product of the window and K alone (key_similarity: of K and K;
value_norm: of V and the output projection; as many FLOP as the row). flash, cudnn: torch's attention on
the same rows, without scores. repeat_kv: eager PyTorch with K repeated for each query head. one layer: the same rows
as one layer with a larger batch. index_select: into out=. bf16 product: K times the prototypes, without the argmax.
assign_prototypes: that step alone. SnapKV: eager. our SnapKV: snapkv_compress without the log-sum-exp. K-means: ten
iterations in eager PyTorch. no bias: without `key_bias`. not rounded: K and V before they were rounded to int8."""
CUDA_N = [131072, 16384, 1048576]  # the most important first
STUCK = 45  # seconds until a row counts as hung; it takes a few on a GPU, and may take 4 times this with torch.compile
MOST = 2**31 - 1  # tokens
LOST = 3  # exit status: this process lost the GPU (illegal access, hung kernel); another one can --resume


def path(said: str) -> Path:
    if not said:
        raise argparse.ArgumentTypeError("expected a file, got nothing")
    return Path(said)


def row_name(said: str) -> str:
    if said not in ROWS:
        raise argparse.ArgumentTypeError(f"expected a row of the benchmark, got {said!r}{did_you_mean(said, ROWS)}")
    return said


def arguments(argv: list[str]) -> argparse.Namespace:
    p = Parser(
        prog="python -m kvops.bench",
        description="Measure time and bandwidth, and compare with PyTorch, eager and compiled.",
    )
    p.add_argument(
        "--ops", nargs="+", type=row_name, metavar="ROW", help=f"rows to measure (default: all), of: {shlex.join(ROWS)}"
    )
    p.add_argument(
        "--n",
        nargs="+",
        type=int,
        help="cached tokens (default 4096 16384 65536; --quick: 16384; on cuda 16384 131072 1048576)",
    )
    p.add_argument("--dtype", nargs="+", choices=DTYPES, help="default fp32 bf16; on cuda bf16 fp32")
    p.add_argument("--heads", type=int, default=8, help="KV heads (default 8)")
    p.add_argument("--head-dim", type=int, default=128, help="default 128")
    p.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    p.add_argument("--repeats", type=int, help="interleaved repetitions (default 30; on cuda 20; --quick: 5)")
    p.add_argument("--paged", action="store_true", help="compare paged with dense memory instead; see --paged --help")
    p.add_argument("--quick", action="store_true", help="fewer sizes and repetitions, no torch.compile: under 30 s")
    p.add_argument(
        "--compile", nargs="*", type=int, metavar="N", help="run torch.compile at these n only (default: all)"
    )
    p.add_argument("--seconds", type=float, help="start no row after this many seconds; missing rows are listed")
    p.add_argument("--json", type=path, metavar="FILE", help="write all measurements, row by row")
    p.add_argument("--resume", action="store_true", help="measure what the --json file lists as left out")
    p.add_argument("--markdown", type=path, metavar="FILE", help="write a Markdown table with the goals")
    p.add_argument("--plot", type=path, metavar="FILE.png", help="draw the results (CPU: the largest n)")
    p.add_argument(
        "--from", type=path, metavar="FILE", dest="file", help="measure nothing; show a file that --json wrote"
    )
    a = p.parse_args(argv)
    a.argv = argv
    cuda = a.device == "cuda"
    a.ops = list(dict.fromkeys(a.ops or (name for name, row in ROWS.items() if cuda or not row.cuda_only)))
    a.dtype = list(dict.fromkeys(a.dtype or (["bf16", "fp32"] if cuda else ["fp32", "bf16"])))
    a.n = list(dict.fromkeys(a.n or ([16384] if a.quick else CUDA_N if cuda else [4096, 16384, 65536])))
    if a.repeats is None:
        a.repeats = 5 if a.quick else 20 if cuda else 30
    if a.resume and not a.json:
        p.error("--resume: needs --json FILE")
    if min(a.n) < 512:
        p.error(f"--n: expected at least 512 (64 partitions for lag_score), got {min(a.n)}")
    if max(a.n) > MOST:
        p.error(f"--n: expected at most {MOST}, got {max(a.n)}")
    for option, value, least, most in (
        *(("heads", a.heads, 1, 4096), ("head-dim", a.head_dim, 8, 256), ("repeats", a.repeats, 1, 10**6)),
        *(("compile", n, 0, MOST) for n in a.compile or ()),
    ):
        if not least <= value <= most:
            p.error(f"--{option}: expected {least} to {most}, got {value}")
    if a.head_dim % 8:
        p.error(f"--head-dim: expected a multiple of 8 (16 bytes), got {a.head_dim}")
    if a.seconds is not None and not 0 < a.seconds < math.inf:
        p.error(f"--seconds: expected a positive number, got {a.seconds}")
    if a.file and not os.path.isfile(a.file):
        p.error(f"--from: expected a file that --json wrote, got {a.file}")
    try:  # before anything is measured
        for option in ("json", "plot", "markdown"):
            if file := getattr(a, option):
                check_target(option, file)
        if a.plot:
            check_picture(a.plot)
    except Refused as error:
        p.error(str(error))
    if a.device not in ("cpu", "cuda"):
        p.error(f"--device {a.device}: expected cpu or cuda")
    if cuda and not torch.cuda.is_available():
        p.error(f"--device cuda: torch {torch.__version__} sees no NVIDIA GPU")
    if cuda and (why := build_info()["cuda"]["why"]):
        p.error(f"--device cuda: kvops has no CUDA kernels here: {why}")
    return a


def check_picture(file: Path) -> None:
    """Raise Refused unless matplotlib can write the file's format."""
    try:
        from .plot import formats
    except ImportError as error:
        raise Refused(f"--plot: needs matplotlib, pip install 'kvops[bench]': {error}") from None
    if file.suffix[1:].lower() not in formats():
        raise Refused(f"--plot: expected a name that ends in .{', .'.join(formats())}, got {file}")


def duration(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def table(record: dict[str, Any]) -> str:
    """Return the results as an aligned table. Columns that nothing was measured for are omitted."""
    results, typical = record["rows"], record.get("statistic", "best")
    ratios = list(dict.fromkeys(x for r in results for x in (*r.get("ratio", {}), *lost(r))))
    ratios.sort(key=lambda x: ("eager", "compile", "parts").index(x) if x in ("eager", "compile", "parts") else 3)
    more = {
        "GFLOP/s": lambda r: f"{r['gflop_per_s']:.0f}",
        "same bytes": lambda r: "{share:.0%} of {gb_per_s:.0f}".format(**r["bandwidth"]["same_bytes"]),
        "select": lambda r: f"{r['stages']['select_topk']:.1%}",
    }
    cells = [[entry(r, show) for r in results] for show in more.values()]
    shown = {name: column for name, column in zip(more, cells) if any(column)}
    lines: list[tuple[str, ...]] = [("operator", "n", "dtype", "time", "GB/s", "of bandwidth", *shown, *ratios)]
    for i, r in enumerate(results):
        name = names(r)
        if "error" in r:
            lines.append((*name, "failed", *[""] * (len(lines[0]) - 4)))
            continue
        lines.append(
            (
                *name,
                duration(r["seconds"][typical]),
                f"{r['gb_per_s']:.1f}",
                "{share:.0%} of {of} {gb_per_s:.0f}".format(**r["bandwidth"]) if "bandwidth" in r else "",
                *(column[i] for column in shown.values()),
                *(
                    f"{r['ratio'][x][typical]:.3g}x" if x in r["ratio"] else "failed" if x in lost(r) else ""
                    for x in ratios
                ),
            )
        )
    return aligned(lines)


def lost(result: dict[str, Any]) -> list[str]:
    """Return the competitors that failed beside a row that did not."""
    return [x for x in result.get("failed", {}) if not x.startswith(("probe ", "stage "))]


def names(result: dict[str, Any]) -> tuple[str, str, str]:
    """Return operator and form, n, and dtype."""
    short = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}
    return f"{result['operator']} {result['form']}".strip(), str(result["shape"][2]), short[result["dtype"]]


def markdown(record: dict[str, Any]) -> str:
    """Return a Markdown table: a line per result, with the goals it reached."""
    typical = record.get("statistic", "best")
    lines: list[tuple[str, ...]] = [("operator", "n", "dtype", "time", "of bandwidth", "goals"), ("---",) * 6]
    for r in record["rows"]:
        label = map(escape, names(r))
        if "error" in r:
            lines.append((*label, "failed", "", escape(r["error"])))
            continue
        share = "{share:.0%} of {of}".format(**r["bandwidth"]) if "bandwidth" in r else ""
        reached = (f"{escape(g.wanted)}: {'reached' if g.reached else f'**missed**, {g.found}'}" for g in goals_of(r))
        lines.append((*label, duration(r["seconds"][typical]), escape(share), "; ".join(reached)))
    page = [f"{escape(head(record))}, commit {record.get('commit')}", "", *(f"| {' | '.join(x)} |" for x in lines)]
    if left := record.get("left_out"):
        page += ["", f"Not measured: {escape('; '.join(left))}."]
    return "\n".join(page) + "\n"


def entry(result: dict[str, Any], show: Callable[[dict[str, Any]], str]) -> str:
    try:
        return show(result)
    except KeyError:  # not measured
        return ""


def remarks(record: dict[str, Any]) -> list[str]:
    """Return notes on the table: what failed, what was timed in another way, what was left out."""
    found = []
    for r in record["rows"]:
        label = f"{r['operator']} {r['shape'][2]} {r['dtype']}"
        if "error" in r:
            found.append(f"failed: {label}: kvops {r['form']}: {r['error']}")
        found += [f"failed: {label}: {x}: {why}" for x, why in r.get("failed", {}).items()]
        found += [f"{label}: {x} timed by {clock}" for x, clock in r.get("clock", {}).items() if clock != "graph"]
    return list(dict.fromkeys(found)) + [f"not measured: {x}" for x in record.get("left_out", [])]


def head(record: dict[str, Any]) -> str:
    machine = record["machine"]
    gpu = machine.get("gpu")
    where = (
        f"{gpu['name']}, driver {gpu['driver']}, CUDA {gpu['cuda']} · torch {record['torch']}"
        if gpu
        else f"{record['isa']} · torch {record['torch']} · {machine['cpu']}, {machine['threads']} threads"
    )
    return f"kvops {record['kvops']} · {where}"


def show(record: dict[str, Any], plot: Path | None, page: Path | None) -> None:
    """Print table, legend, remarks and goals, and write the requested files."""
    print("\n" + table(record))
    print(CUDA_LEGEND if "gpu" in record["machine"] else LEGEND)
    for line in remarks(record):
        print(line)
    reached = goals(record)
    if reached:
        print(f"\nGoals: {sum(g.reached for g in reached)} of {len(reached)} reached.")
        width = max(len(g.what) for g in reached)
        for g in reached:
            print(f"{'reached' if g.reached else 'MISSED '}  {g.what.ljust(width)}  {g.wanted}: {g.found}")
    if page:
        replace(page, markdown(record))
        print(f"wrote {page}")
    if plot and not any("bandwidth" in r for r in record["rows"]):
        print(f"no row has a bandwidth to draw; {plot} is not written")
    elif plot:
        from .plot import draw

        draw(record, plot)
        print(f"wrote {plot}")


def brief(result: dict[str, Any], typical: str) -> str:
    """Return one result in a few words."""
    form = f"{result['form']} ".lstrip()
    if "error" in result:
        return f"{form}failed: {result['error']}"
    ratios = "".join(f", {x} {r[typical]:.3g}x" for x, r in result["ratio"].items())
    return f"{form}{duration(result['seconds'][typical])}, {result['gb_per_s']:.1f} GB/s{ratios}"


class Job(NamedTuple):
    """A row to measure, in one shape and dtype."""

    name: str
    dtype: str
    heads: int
    n: int

    def __str__(self) -> str:
        return f"{self.name} {self.n} {self.dtype}"


def jobs(a: argparse.Namespace) -> list[Job]:
    """Return the jobs in the order in which they run."""
    found = []
    for name in a.ops:
        row = ROWS[name]
        shapes = [row.shape] if row.shape else [(a.heads, n) for n in a.n if n <= (row.most or n)]
        dtypes = a.dtype if row.per_dtype else ["fp32"]
        found += [Job(name, dtype, heads, n) for heads, n in shapes for dtype in dtypes]
    if a.device == "cuda":
        found.sort(key=lambda job: urgency(a, job))
    return found


def urgency(a: argparse.Namespace, job: Job) -> tuple[int, int, int]:
    """Return the sort key of a job on a GPU, so that a run that is cut short has the most important rows.

    The first of --n and the rows of fixed shape come first; among these operators with a goal, then whole methods, then
    the other operators; each in the order of --dtype.
    """
    row = ROWS[job.name]
    method = job.name.split(",")[0] not in ops.__all__
    goal = bool(row.copy_goal or row.eager_goal or row.peer_goals)
    size = 0 if row.shape else a.n.index(job.n)
    return size, 1 if method else 0 if goal else 2, a.dtype.index(job.dtype) if row.per_dtype else 0


def compiled(a: argparse.Namespace, job: Job) -> bool:
    return not a.quick and (a.compile is None or job.n in a.compile)


def attempt(a: argparse.Namespace, job: Job) -> list[dict[str, Any]]:
    """Return the results of a job. An error is a result too, so that the other rows still run."""
    cuda = a.device == "cuda"
    try:
        if cuda:  # free what the previous row left
            gc.collect()
            torch.cuda.empty_cache()
        case = Case(job.n, DTYPES[job.dtype], job.heads, a.head_dim, a.device, ROWS[job.name].batch)
        return measure(job.name, ROWS[job.name], case, a.repeats, compiled(a, job))
    except Exception as error:
        return failure(a, job, error)


def failure(a: argparse.Namespace, job: Job, error: Exception) -> list[dict[str, Any]]:
    """Return the results of a row that could not be measured at all."""
    shape, dtype = [ROWS[job.name].batch, job.heads, job.n, a.head_dim], str(DTYPES[job.dtype]).removeprefix("torch.")
    return [
        {"operator": job.name, "form": form, "dtype": dtype, "shape": shape, "error": first_line(error)}
        for form in ROWS[job.name].forms
    ]


def begin(a: argparse.Namespace) -> tuple[dict[str, Any], list[Job]]:
    """Return the record and the jobs to run: all of them, or those that the record of --resume lists as left out."""
    found = {
        **origin("python", "-m", "kvops.bench", *a.argv, device=a.device),
        "repeats": a.repeats,
        "statistic": "median" if a.device == "cuda" else "best",
        "rows": [],
        "left_out": [],
    }
    todo = jobs(a)
    if a.resume and a.json.exists():
        before = load(a.json)
        for x in ("machine", "torch", "kvops", "commit", "repeats"):
            if before.get(x) != found[x]:
                raise Refused(f"--resume: {a.json} was measured with {x} {before.get(x)}, this is {found[x]}")
        found, todo = before, [job for job in todo if str(job) in before.get("left_out", [])]
    found["left_out"] = list(map(str, todo))
    return found, todo


def main(argv: list[str] | None = None) -> int:
    said = sys.argv[1:] if argv is None else argv
    if "--paged" in said:
        return pages.main([x for x in said if x != "--paged"])
    a = arguments(said)
    try:
        return run(a)
    except (Refused, OSError) as error:  # OSError: a file or its disk
        print(f"python -m kvops.bench: error: {error}", file=sys.stderr)
        return 2


def run(a: argparse.Namespace) -> int:
    if a.file:
        record = load(a.file)
        print(f"{head(record)}\n{record['command']}, commit {record.get('commit')}")
        show(record, a.plot, a.markdown)
        return 0
    started, cuda = time.monotonic(), a.device == "cuda"
    record, todo = begin(a)
    print(
        f"{head(record)}\n"
        f"[1, {a.heads}, n, {a.head_dim}] · {record['statistic']} of {a.repeats} interleaved repetitions"
        + (" · --quick leaves torch.compile out" if a.quick else "")
    )
    order = list(ROWS)

    def keep(job: Job, results: list[dict[str, Any]]) -> None:
        """Store results in the record and its file, which lists everything not measured yet as left out."""
        record["rows"] = sorted(record["rows"] + results, key=lambda r: (order.index(r["operator"]), r["shape"][2]))
        record["left_out"].remove(str(job))
        if a.json:
            write(a.json, record)

    def give_up(job: Job, limit: float) -> None:
        keep(job, failure(a, job, TimeoutError(f"no result within {limit} s")))
        os._exit(LOST)  # the thread that waits for the GPU cannot be stopped

    if a.json:
        write(a.json, record)
    stopped = False
    try:
        for i, job in enumerate(todo, 1):
            if a.seconds and time.monotonic() - started > a.seconds:
                break
            print(f"[{i:{len(str(len(todo)))}} of {len(todo)}] {job}: ", end="", flush=True)
            limit = 4 * STUCK if compiled(a, job) else STUCK
            with at_most(limit, partial(give_up, job, limit)) if cuda else nullcontext():
                results = attempt(a, job)
            print("; ".join(brief(r, record["statistic"]) for r in results), flush=True)
            keep(job, results)
            if cuda and any("error" in r for r in results) and not usable():
                print(f"This process lost the GPU in {job}; --resume measures the other rows.")
                return LOST
    except KeyboardInterrupt:
        stopped = True
    show(record, a.plot, a.markdown)
    if a.json:
        print(f"wrote {a.json}")
    if stopped:
        print("stopped" + (f"; --resume --json {a.json} measures the other rows" if a.json else ""), file=sys.stderr)
        return 130
    return int(any("error" in r or refused(r) for r in record["rows"]))


def refused(result: dict[str, Any]) -> bool:
    """Whether the bandwidth could not be measured."""
    return any(x.startswith("probe ") for x in result.get("failed", {}))


if __name__ == "__main__":
    sys.exit(main())
