"""python -m kvops.bench: time, bandwidth, and how much longer the same takes in PyTorch, eager and compiled."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

from .. import build_info
from .measure import measure
from .record import origin, write
from .rows import ROWS, Case

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LEGEND = """
eager, compile: how many times longer the same takes as people write it in PyTorch, and that under torch.compile
(select_topk: torch.topk + sort). of bandwidth: of reading, copying or shifting in place as many bytes, in GB/s,
measured in turns with the row. parts: how many times longer scores + select + a fresh clone of the result take."""


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m kvops.bench", description=__doc__.split(": ", 1)[1])
    p.add_argument("--ops", nargs="+", choices=ROWS, default=list(ROWS), metavar="OP", help=f"of: {', '.join(ROWS)}")
    p.add_argument("--n", nargs="+", type=int, help="cached tokens (default 4096 16384 65536; --quick: 16384)")
    p.add_argument("--dtype", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    p.add_argument("--heads", type=int, default=8, help="KV heads (default 8)")
    p.add_argument("--head-dim", type=int, default=128, help="default 128")
    p.add_argument("--device", default="cpu", help="default cpu")
    p.add_argument("--repeats", type=int, help="interleaved repetitions (default 30; --quick: 5)")
    p.add_argument("--quick", action="store_true", help="less of everything and no torch.compile: under 30 s")
    p.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    p.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the largest n")
    a = p.parse_args()
    a.n = a.n or ([16384] if a.quick else [4096, 16384, 65536])
    a.repeats = a.repeats or (5 if a.quick else 30)
    if min(a.n) < 512:
        p.error(f"--n: expected at least 512 (64 partitions for lag_score), got {min(a.n)}")
    if a.device != "cpu":
        p.error(f"--device {a.device}: expected cpu; {build_info()['cuda']['why']}")
    return a


def duration(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def table(results: list[dict]) -> str:
    """One line per result, columns aligned; a ratio that was not measured has no column."""
    ratios = [x for x in ("eager", "compile", "parts") if any(x in r["ratio"] for r in results)]
    lines = [("operator", "n", "dtype", "time", "GB/s", "of bandwidth", *ratios)]
    short = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}
    for r in results:
        lines.append(
            (
                f"{r['operator']} {r['form']}".strip(),
                str(r["shape"][2]),
                short[r["dtype"]],
                duration(r["seconds"]["best"]),
                f"{r['gb_per_s']:.1f}",
                "{share:.0%} of {of} {gb_per_s:.0f}".format(**r["bandwidth"]) if "bandwidth" in r else "",
                *(f"{r['ratio'][x]['best']:.3g}x" if x in r["ratio"] else "" for x in ratios),
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(x.ljust(w) if i == 0 else x.rjust(w) for i, (x, w) in enumerate(zip(line, widths))) for line in lines
    )


def progress(total: int):
    """A bar that shows itself after three seconds, if tqdm is there and someone is watching."""
    try:
        from tqdm import tqdm
    except ImportError:
        return nullcontext()
    return tqdm(total=total, delay=3, leave=False, disable=None, unit="rep")


def main() -> int:
    a = arguments()
    source = origin("python", "-m", "kvops.bench", *sys.argv[1:])
    print(
        f"kvops {source['kvops']} · {source['isa']} · torch {source['torch']} · {source['machine']['cpu']}, "
        f"{source['machine']['threads']} threads\n"
        f"[1, {a.heads}, n, {a.head_dim}] · best of {a.repeats} interleaved repetitions"
        + (" · --quick leaves torch.compile out" if a.quick else "")
    )
    jobs = []
    for name in a.ops:
        fixed = ROWS[name].shape
        shapes = [fixed] if fixed else [(a.heads, n) for n in a.n]
        dtypes = a.dtype if ROWS[name].per_dtype else ["fp32"]
        jobs += [(name, dtype, heads, n) for heads, n in shapes for dtype in dtypes]
    results = []
    with progress(len(jobs) * a.repeats) as bar:
        for name, dtype, heads, n in jobs:
            if bar is not None:
                bar.set_postfix_str(f"{name} {dtype} {n}")
            case = Case(n, DTYPES[dtype], heads, a.head_dim, a.device)
            results += measure(name, ROWS[name], case, a.repeats, not a.quick, bar.update if bar is not None else int)
    print("\n" + table(results))
    print(LEGEND)
    record = {**source, "repeats": a.repeats, "rows": results}
    if a.json:
        write(a.json, record)
        print(f"wrote {a.json}")
    if a.plot:
        from .plot import draw

        draw(record, a.plot)
        print(f"wrote {a.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
