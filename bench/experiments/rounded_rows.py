"""Evict more, or round? What a model answers with the same bytes of fewer tokens in bf16, or of more in int8 or fp8.

    python bench/experiments/rounded_rows.py [FILE] [--json FILE] [--out .]

Measures nothing: it reads a record of `kvops.eval` (bench/results/eval-rounded.jsonl) that has methods with and without
storage=int8 and fp8, compares those that hold as many bytes (within 5 %, for what pages leave unused), prompt by
prompt, and draws rounded-rows.png. Bytes are a share of a full cache in bf16.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

import common
from kvops.bench.record import write
from kvops.eval.labels import SEVEN
from kvops.eval.statistics import compare

STORAGES = {"bf16": ("o", "black"), "int8": ("s", SEVEN[0]), "fp8": ("^", SEVEN[1])}
POINTS = {"after": "cut after the question", "before": "cut before the question"}


class Cell(NamedTuple):
    point: str
    method: str
    storage: str
    budget: int | None


def read(file: Path, task: str, context: int, metric: str) -> dict[str, Any]:
    """The answers of each cell, and what they are beside bf16 with the same tokens and with the same bytes."""
    settings, found = {}, defaultdict(list)
    for line in map(json.loads, file.read_text().splitlines()):
        if "settings" in line:
            settings = line["settings"]
        elif "scores" in line and (line["task"], line["context"]) == (task, context):
            cell = Cell(line["point"], *split(line["method"]), line["budget"])
            found[cell].append(line | {"settings": settings})
    answers, rows = {}, []
    for cell, lines in found.items():
        answers[cell], means = common.cell(lines, metric)
        rows.append(cell._asdict() | means)

    def beside(row: dict[str, Any], same: str) -> dict[str, Any] | None:
        """The bf16 row with the same "budget" or "held", and what this one's answers are beside its."""
        own = Cell(*(row[x] for x in Cell._fields))
        for other in rows:
            cell = own._replace(storage="bf16", budget=other["budget"])
            if other["budget"] and other == other | cell._asdict() and abs(row[same] / other[same] - 1) < 0.05:
                x = compare({"bf16": answers[cell], "own": answers[own]}, 1, None, "bf16")["own"]["bf16"]
                differs = dict(difference=x.difference, low=x.low, high=x.high)
                return {"budget": other["budget"], "score": other["score"]} | differs
        return None

    for row in rows:
        for name, same in (("same_tokens", "budget"), ("same_bytes", "held")):
            if row["storage"] != "bf16" and row["budget"] and (x := beside(row, same)):
                row[name] = x
    rows.sort(
        key=lambda x: ([*POINTS].index(x["point"]), x["method"], [*STORAGES].index(x["storage"]), x["budget"] or 0)
    )
    return {"file": file.name, "task": task, "context": context, "metric": metric, "rows": rows}


def split(method: str) -> tuple[str, str]:
    """A method as it is named in results, and its storage."""
    words = method.split()
    storage = [x for x in words if x.startswith("storage=")]
    return " ".join(x for x in words if x not in storage), storage[0].partition("=")[2] if storage else "bf16"


def picture(record: dict[str, Any], path: Path) -> None:
    """Draw the answers against the bytes held, a panel for each method and cut, a line for each storage."""
    rows = record["rows"]
    panels = list(dict.fromkeys((x["point"], x["method"]) for x in rows if x["budget"]))
    figure = Figure(figsize=(3.1 * len(panels), 3.6), layout="constrained")
    for axis, (point, method) in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels):
        full = next(x for x in rows if (x["point"], x["method"], x["storage"]) == (point, "Full", "bf16"))
        axis.axhline(100 * full["score"], color="black", lw=0.8, ls=":")
        for storage, (marker, color) in STORAGES.items():
            own = [x for x in rows if (x["point"], x["method"], x["storage"]) == (point, method, storage)]
            x, y = ([100 * z[name] for z in own] for name in ("held", "score"))
            axis.plot(x, y, f"{marker}-", color=color, ms=4, lw=1, label=storage)
            axis.vlines(x, *([100 * z[name] for z in own] for name in ("low", "high")), color=color, lw=0.5, alpha=0.4)
        axis.set(xlabel="bytes held, % of a full bf16 cache", ylim=(-3, 103))
        axis.set_title(f"{method.split()[0]}, {POINTS[point]}", fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("digits found, %")
    figure.axes[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, picture="rounded-rows.png", redraws=False)
    parser.add_argument("file", nargs="?", type=Path, default="bench/results/eval-rounded.jsonl")
    common.add_cells(parser)
    a = parser.parse_args(argv)
    record = read(a.file, a.task, a.context, a.metric)
    for row in record["rows"]:
        for name in ("same_bytes", "same_tokens"):
            if name in row:
                x = row[name]
                print(
                    f"{row['point']:6} {row['method']:40} {row['storage']:4} {row['budget']:>4} tokens "
                    f"{100 * row['score']:3.0f} %, {name.replace('_', ' ')}: bf16 {x['budget']:>4} tokens "
                    f"{100 * x['score']:3.0f} %, {100 * x['difference']:+.0f} [{100 * x['low']:+.0f}, "
                    f"{100 * x['high']:+.0f}]"
                )
    if a.json:
        write(a.json, record)
    picture(record, a.out / "rounded-rows.png")


if __name__ == "__main__":
    main()
