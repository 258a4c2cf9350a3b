"""Which method keeps most of a model's answers for the bytes that its cache really holds?

    cd bench/results; python ../experiments/bytes_held.py eval-{ragged,shares,kvzip-plus,kvzap,kvgrad,dropkv}.jsonl
        eval-{attention-matching,rounded,bytes-held}.jsonl [--task TASK] [--point before] [--json FILE] [--out .]

Measures nothing: it joins records of `kvops.eval` whose prompts are the same, compares the methods at each budget of
the first record with the best one and with the full cache, prompt by prompt, and draws bytes-held.png. A method that
several records have counts once, as in the first of them. Bytes are a share of a full cache in bf16; a method whose
caches round what they hold counts where it holds as many as a budget's tokens, within a tenth for what pages leave
unused.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

import common
from kvops.bench.record import write
from kvops.eval.labels import GREY, SEVEN, label_points
from kvops.eval.statistics import compare
from kvops.eval.summary import PROMPTS, method_order

#: What decides how a layer's budget is divided, and how a picture shows it.
KINDS = {
    "each head keeps equally many": ("o", GREY),
    "the heads of a layer share": ("^", SEVEN[0]),
    "fixed shares of heads": ("s", SEVEN[3]),
    "all heads of the model share": ("D", SEVEN[1]),
    "all above a threshold": ("*", SEVEN[2]),
}


def kind_of(method: str) -> str:
    """The key of `KINDS` of a method, as it is named in results."""
    tests = "threshold=", "scope=model", "shares=", "head_mode=adaptive"
    kinds = [*KINDS][::-1]
    return next((kind for test, kind in zip(tests, kinds) if test in method), kinds[-1])


def short(method: str) -> str:
    """The name of a method without what its kind says, nor paths; with that of a file of shares and the storage."""
    method = re.sub(r"shares=\S*/(?!shares)(\w+)\.safetensors", r"by \1", method)
    method = re.sub(r"storage=(\w+)", r"in \1", method)
    return re.sub(r" (gates|shares|threshold|head_mode|scope|sinks|recent|epsilon)=\S+", "", method)


def join(files: list[Path], task: str, context: int, point: str, metric: str) -> dict[str, Any]:
    """The methods of all files: their scores by prompt and the bytes that they hold, with comparisons."""
    same = [name for name in PROMPTS if name != "model"]  # whose dtype may differ
    settings: dict[str, Any] = {}
    found: dict[tuple[str, int | None], list[dict]] = {}
    budgets: list[int] = []
    for file in files:
        by: dict[tuple[str, int | None], list[dict]] = defaultdict(list)
        for line in map(json.loads, file.read_text().splitlines()):
            if "settings" in line:  # of the lines that follow
                own = line["settings"]
                of = {name: own.get(name) for name in same}
            elif (line["task"], line["context"], line["point"]) == (task, context, point) and "scores" in line:
                settings = settings or of
                if of == settings:
                    by[line["method"], line["budget"]].append(line | {"settings": own})
        if not by:
            raise SystemExit(f"{file}: expected results of {task}, {context} tokens, {point}, {settings}, got none")
        for cell, results in by.items():
            found.setdefault(cell, results)
        budgets = budgets or sorted({budget for name, budget in by if budget is not None and "threshold=" not in name})
    rows: list[dict[str, Any]] = []
    scores: dict[int, dict[str, dict[int, float]]] = defaultdict(dict)
    tokens = found["Full", None][0]["tokens"]
    for (method, budget), results in found.items():
        values, means = common.cell(results, metric)
        held = means["held"] * tokens
        near = min(budgets, key=lambda x: abs(x - held))
        if "threshold=" in method or (budget and "storage=" in method and abs(held / near - 1) < 0.1):
            budget = near  # beside the methods that hold about as much
        elif budget not in (None, *budgets) or "storage=" in method:
            continue
        rows.append({"method": method, "budget": budget} | means)
        for each in budgets if budget is None else [budget]:
            scores[each][method] = values
    for budget, each in scores.items():
        evicting = {name: x for name, x in each.items() if name != "Full"}
        best = max(evicting, key=lambda x: sum(each[x].values()))  # of those with all prompts
        verdicts, with_full = compare(evicting, 1, best, best), compare(each, 1, None, "Full")
        for row in rows:
            if row["budget"] == budget:
                row["beside_best"] = verdicts[row["method"]]["best"].verdict
                beside = with_full[row["method"]]["Full"]
                row |= {"minus_full": beside.difference, "minus_full_low": beside.low, "minus_full_high": beside.high}
    rows.sort(key=lambda x: (x["budget"] is not None, x["budget"] or 0, method_order(x["method"])))
    return {"task": task, "context": context, "point": point, "settings": settings, "rows": rows}


def picture(record: dict[str, Any], path: Path) -> None:
    """Draw the answers against the bytes held; filled: not worse than the best at its budget, as far as can be told."""
    figure = Figure(figsize=(8, 5.2), layout="constrained")
    axis = figure.subplots()
    rows = [x for x in record["rows"] if x["budget"] is not None]
    full = next(x for x in record["rows"] if x["budget"] is None)
    axis.axhline(100 * full["score"], color="black", lw=0.8, ls=":")
    axis.axhspan(100 * full["low"], 100 * full["high"], color="black", alpha=0.05, lw=0)
    named = []
    for kind, (marker, color) in KINDS.items():
        own = [x for x in rows if kind_of(x["method"]) == kind]
        for row in own:
            x, y = 100 * row["held"], 100 * row["score"]
            undecided = row["beside_best"] != "worse"
            axis.plot([x, x], [100 * row["low"], 100 * row["high"]], color=color, lw=0.6, alpha=0.4)
            axis.plot(x, y, marker, ms=7, mec=color, mfc=color if undecided else "white")
            better = [z for z in rows if z["held"] <= row["held"] and z["score"] > row["score"]]
            if undecided and (len(better) < 3 or "threshold=" in row["method"]):
                few = f" ({row['prompts']} prompts)" * (row["prompts"] < record["settings"]["prompts"])
                named.append((x, y, short(row["method"]) + few, color if color != GREY else "#555555"))
        if own:
            axis.plot([], [], marker, ms=6, color=color, label=kind)
    axis.set(xlabel="bytes really held, % of the full cache's", ylabel="digits found, %", ylim=(-3, 103))
    axis.text(axis.get_xlim()[0], 100 * full["score"], " full cache", va="bottom", fontsize=8)
    axis.legend(fontsize=8, frameon=False, loc=(0.17, 0.24))
    axis.spines[["top", "right"]].set_visible(False)
    label_points(axis, named, 4.4)
    count = sum(x["beside_best"] == "worse" for x in rows)
    figure.suptitle(
        f"{record['settings']['prompts']} prompts of {record['context']:,} tokens, cut {record['point']} the question: "
        f"{count} of {len(rows)} are worse than the best of their budget (hollow);\nthe others are undecided, or best",
        x=0.01, ha="left", fontsize=10,
    )  # fmt: skip
    figure.savefig(path, dpi=120, metadata={"Software": None})


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, picture="bytes-held.png", redraws=False)
    parser.add_argument("files", nargs="+", type=Path, help="results.jsonl of kvops.eval")
    common.add_cells(parser)
    parser.add_argument("--point", default="before")
    a = parser.parse_args(argv)
    record = join(a.files, a.task, a.context, a.point, a.metric)
    for row in record["rows"]:
        if row["budget"] is not None:
            print(
                f"{row['budget']:>5} {100 * row['held']:5.1f} % held {100 * row['score']:5.0f} % found "
                f"({100 * row['minus_full']:+.0f} [{100 * row['minus_full_low']:+.0f}, "
                f"{100 * row['minus_full_high']:+.0f}] beside Full) {row['beside_best']:10} {row['method']}"
            )
    if a.json:
        write(a.json, record)
    picture(record, a.out / "bytes-held.png")


if __name__ == "__main__":
    main()
