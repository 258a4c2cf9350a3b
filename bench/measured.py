"""Write the tables of measurements in README.md and docs/ from bench/results/.

    python bench/measured.py            # rewrite the tables
    python bench/measured.py --check    # fail if a table is out of date

Each table is between a marker and `<!-- end -->`:

- `<!-- speed -->`: the benchmark at 65,536 tokens. A plain call comes first, then its other forms by name.
- `<!-- h200 -->`: the benchmark on an H200.
- `<!-- products -->`: the compute-bound operators whose work depends on more than the tokens.
- `<!-- attention -->`: python -m kvops.bench.attention.
- `<!-- decode -->`: python -m kvops.bench.decode.
- `<!-- pages -->`, `<!-- fp8 -->`: python -m kvops.bench --paged.
- `<!-- analysis -->`: python -m kvops.analysis on the shipped model.
- `<!-- regimes -->`: its conditions, on the shipped model and on the real one.
- `<!-- synthetic -->`: python -m kvops.eval --tasks synthetic, all presets; `<!-- synthetic draft -->`: a sweep.
- `<!-- measured: LagKV LocalKV -->`: python -m kvops.eval, the partial match of these methods and their variants (LAQ:
  also LAQ++), or of `all`, by budget and by whether the cache was cut before or after the question. `<!-- measured:
  KeyDiff in eval-merging -->` takes them from bench/results/eval-merging.json.
- `<!-- real model -->`: the needles found on SmolLM2, from eval-smollm2.json.
- `<!-- continuation -->`: the loss of text after a cut on SmolLM2, from eval-continuation-*.json; `<!-- protokv texts
  -->`: ProtoKV's variants.
- `<!-- other prompts -->`: the needles of eval-smollm2.json and of eval-smollm2-others.json.
- `<!-- ragged -->`: bench/experiments/ragged.py.
- `<!-- rounded step -->`: bench/experiments/rounded_step.py.
- `<!-- ragged quality -->`, `<!-- shares -->`, `<!-- kvzip plus -->`, `<!-- kvgrad -->`, `<!-- dropkv -->`,
  `<!-- attention matching -->`, `<!-- kvzap -->`, `<!-- kvzap english -->`: the needles of eval-ragged.json,
  eval-shares.json, eval-kvzip-plus.json, eval-kvgrad.json, eval-dropkv.json, eval-attention-matching.json,
  eval-kvzap.json and eval-kvzap-english.json.
- `<!-- eval: NAME -->`: the same of all rows of bench/results/NAME.json.
- `<!-- claims: LagKV -->`: a paper's claims, from bench/claims.py.
- `<!-- partitions -->`: LagKV's partial match by lag and ratio, from eval-lagkv.json and eval-lag-long.json.
- `<!-- pareto -->`, `<!-- pareto real -->`: bench/experiments/pareto.py, the best ladder and random patterns of its
  size.
- `<!-- ladders -->`: LaCache's spans and overlaps on SmolLM2, from eval-lacache-ladders.json.
- `<!-- keydiff depths -->`: KeyDiff's needles minus the full cache's by depth, from eval-smollm2.json.
- `<!-- decode stream -->`: the loss of a stream read token by token on SmolLM2, from eval-smollm2-decode.json.
- `<!-- clusters -->`: bench/experiments/clusters.py.
- `<!-- laq cost -->`: bench/experiments/laq_cost.py. `<!-- fp8 rows -->`: fp8_rows.py.
  `<!-- rounded rows -->`: rounded_rows.py. `<!-- rounded keys -->`: rounded_keys.py.
- `<!-- prefixes -->`: bench/experiments/vllm_prefixes.py.
- `<!-- decode peers -->`: bench/peers/decode_attention.py.
- `<!-- topk peers -->`: bench/peers/select_topk.py.
- `<!-- vllm attention -->`, `<!-- vllm engines -->`: bench/experiments/vllm_attention.py, layers of 32 query
  heads, and whole engines.
- `<!-- end-to-end -->`, `<!-- end-to-end blocks -->`: bench/experiments/end_to_end.py, prompts in chunks and in small
  blocks; `<!-- end-to-end lags -->`: LagKV with other lags.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
from collections.abc import Collection, Iterable
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import fmean

import claims
from kvops.analysis import report
from kvops.bench import attention, decode, pages
from kvops.bench.goals import goals
from kvops.eval.methods import METHODS
from kvops.eval.plots import key_digits
from kvops.eval.statistics import bootstrap
from kvops.eval.summary import POINT_TITLES, Row, of_record
from kvops.eval.tasks.synthetic import PRESETS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "eval.json"
DOCS = ROOT / "docs"
README = ROOT / "README.md"
BLOCK = re.compile(r"(<!-- measured: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
OF_PAPER = re.compile(r"(<!-- claims: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
OF_FILE = re.compile(r"(<!-- eval: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
#: Partial match of 64 digits, one token each, in %: LagKV, Table 1, Qwen2.5-7B-Instruct.
QWEN = {
    (1024, 0.5): 99.75, (1024, 0.25): 96.98, (1024, 0.167): 77.47, (1024, 0.125): 66.88,
    (512, 0.5): 97.07, (512, 0.25): 75.89, (512, 0.167): 42.70, (512, 0.125): 30.00,
    (128, 0.5): 65.93, (128, 0.25): 20.83, (128, 0.167): 16.18, (128, 0.125): 15.07,
}  # fmt: skip
TOKENS = 65536
#: The real model's tasks: a key of seven digits; four such keys, one of which is asked for.
NEEDLES = ("needle:chat=True", "niah-multikey:chat=True")
LABELS = [x.label for x in METHODS.values()]
#: Label of each row, and where it was measured: file, operator and form.
SPEED = {
    "`keydiff_compress`": ("cpu-v4", "keydiff_compress", "fresh"),
    "`keydiff_compress` into `out=`": ("cpu-v4", "keydiff_compress", "out="),
    "`keydiff_compress_`, in place": ("cpu-v4", "keydiff_compress", "in place"),
    "`lagkv_compress`": ("cpu-v4", "lagkv_compress", "fresh"),
    "`lagkv_compress` into `out=`": ("cpu-v4", "lagkv_compress", "out="),
    "`lagkv_compress_`, in place": ("cpu-v4", "lagkv_compress", "in place"),
    "`snapkv_compress` into `out=`": ("cpu-windows", "snapkv_compress, no lse", "out="),
    "`snapkv_compress` into `out=`, log-sum-exp given": ("cpu-windows", "snapkv_compress", "out="),
    "`protokv_compress` into `out=`": ("cpu-protokv", "protokv_compress", "out="),
    "`lag_score`": ("cpu-v4", "lag_score", ""),
    "`anchor_cosine`": ("cpu-v4", "anchor_cosine", ""),
    "`outlier_degree`": ("cpu-protokv", "outlier_degree", ""),
    "`window_scores`, 32 rows": ("cpu-windows", "window_scores, no lse", ""),
    "`window_scores`, 32 rows, log-sum-exp given": ("cpu-windows", "window_scores", ""),
    "`window_attention`, 32 rows, with the scores": ("cpu-windows", "window_attention", ""),
    "`window_attention`, decode": ("cpu-windows", "window_attention, decode", ""),
    "`assign_prototypes`, 500 prototypes": ("cpu-protokv", "assign_prototypes", ""),
    "`trig_scores`, 4 query heads per KV head": ("cpu-calibrated", "trig_scores", ""),
    "`quadratic_scores`, the same, means only": ("cpu-calibrated", "quadratic_scores, means", ""),
    "`quadratic_scores`, the same, with covariances": ("cpu-calibrated", "quadratic_scores", ""),
    "`select_topk` (fp32 scores)": ("cpu-v4", "select_topk", ""),
    "`gather_kv`, rows scattered": ("cpu-v4", "gather_kv", "fresh"),
    "`gather_kv`, rows scattered, into `out=`": ("cpu-v4", "gather_kv", "out="),
    "`gather_kv`, one run of rows": ("cpu-v4", "gather_kv, one run", "fresh"),
    "`gather_kv`, one run of rows, into `out=`": ("cpu-v4", "gather_kv, one run", "out="),
    "`compact_kv_`, rows scattered": ("cpu-v4", "compact_kv_", "in place"),
    "`compact_kv_`, one run of rows": ("cpu-v4", "compact_kv_, one run", "in place"),
    "`ladder_gather`, 32 layers in one call": ("cpu-ladder", "ladder_gather", "fresh"),
    "`ladder_compact_`, 32 layers in one call": ("cpu-ladder", "ladder_compact_", "in place"),
}


def load(name: str) -> dict:
    """Return a record of bench/results/."""
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())


def chosen(rows: list[dict], names: str) -> list[dict]:
    """Return the rows of the methods that a block names, for tasks with a partial match and a single cut."""
    tasks = {row["task"] for row in rows if "partial" in row.get("scores", ())}
    rows = [row for row in rows if row["task"] in tasks and row["point"] in ("before", "after")]
    if names == "all":
        return rows
    wanted = [x.replace("_", " ") for x in names.split()]
    found = {x: [row for row in rows if re.match(rf"{re.escape(x)}(?!\w)", row["method"])] for x in wanted}
    for name, its in found.items():
        if not its:
            have = ", ".join(dict.fromkeys(row["method"] for row in rows))
            raise ValueError(f"measured: {names}: expected one of the methods {have}, got {name}")
    return [row for its in found.values() for row in its]


def budget(row: dict) -> int | None:
    """Return the tokens kept per KV head; None for all."""
    return None if row["budget"] is None or row["budget"] >= row["context"] else row["budget"]


def mark(row: dict) -> str:
    """Return the mark of a method that keeps more or less than its budget."""
    if "scores" not in row:
        return ""
    kept = Row(row["task"], row["context"], row["point"], row["method"], row["budget"], tokens=row["tokens"])
    kept.bytes_held, kept.bytes_full = row["bytes_held"], row["bytes_full"]
    return kept.mark


def percent(row: dict, score: str) -> str:
    """Return a score in % with its interval and the row's mark."""
    mean, low, high = (100 * row["scores"][score][x] for x in ("mean", "low", "high"))
    return f"{mean:.0f} [{low:.0f}, {high:.0f}]" + mark(row)


def number(x: int | None) -> str:
    return "all" if x is None else f"{x:,}"


def table(rows: list[dict], results: str, command: str = "python -m kvops.eval") -> str:
    """Return a caption and a table: a row per method, task and cut point, a column per budget."""
    command = command.replace(" experiments/", " bench/experiments/")  # the scripts moved after some records
    tasks = list(dict.fromkeys(f"{row['task']}, {row['context']:,} tokens" for row in rows))
    prompts = " or ".join(map(str, sorted({row["scores"]["partial"]["n"] for row in rows if "scores" in row})))
    legend = "" if all("scores" in row for row in rows) else "; –: the method cannot meet the budget"
    marks = {mark(row) for row in rows}
    legend += "; †: keeps over 5 % more than its budget" * (" †" in marks)
    legend += "; ‡: keeps over 5 % less" * (" ‡" in marks)
    cells: dict[tuple[str, ...], dict[int | None, str]] = {}
    for row in rows:
        point = POINT_TITLES.get(row["point"], row["point"]).removeprefix("cut ")
        if len(tasks) > 1:
            point = f"{row['task']}, {row['context']:,} tokens, {point}"
        line = cells.setdefault((row["method"], point), {})
        if budget(row) in line:
            raise ValueError(f"{results}: {row['method']}, {point}, budget {row['budget']}: expected one row, got two")
        line[budget(row)] = "–"
        if "scores" in row:
            line[budget(row)] = percent(row, "partial")
    budgets = sorted({budget(row) for row in rows}, key=lambda x: sys.maxsize if x is None else x)
    lines = [["method", "cut", *map(number, budgets)], ["---"] * (len(budgets) + 2)]
    lines += [[*label, *(line.get(x, "") for x in budgets)] for label, line in cells.items()]
    return (
        "Partial match in % with the 95 % interval in brackets, by tokens kept per KV head; "
        f"{'; '.join(tasks)}; {prompts} prompts{legend}\n"
        f"([bench/results/{Path(results).name}]({results}),{' ' if len(command) < 50 else chr(10)}`{command}`):\n\n"
        + markdown(lines)
    )


def markdown(lines: list[list[str]]) -> str:
    """Return a Markdown table; the first two lines are the heads and the rule."""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def speeds(file: str, operator: str, form: str) -> list[dict]:
    """Return the rows of bf16 and fp32, or of one dtype if the dtype does not matter."""
    record = load(file)
    rows = {
        row["dtype"]: row
        for row in record["rows"]
        if (row["operator"], row["form"], row["shape"][2]) == (operator, form, TOKENS) and "seconds" in row
    }
    found = [rows[x] for x in ("bfloat16", "float32") if x in rows]
    if not found:
        raise ValueError(f"measured: {file}.json has no row of {operator}, {form or 'its only form'}, n {TOKENS}")
    return found


def short(x: float) -> str:
    """Format with two or three digits."""
    return f"{x:.2f}" if x < 1 else f"{x:.1f}" if x < 20 else f"{x:.0f}"


def speed_table() -> str:
    lines = [["bf16 / fp32", "time, ms", "% of bandwidth", "eager PyTorch takes", "torch.compile takes"], ["---"] * 5]
    for label, where in SPEED.items():
        rows = speeds(*where)
        times = " / ".join(short(1e3 * row["seconds"]["best"]) for row in rows)
        shares = " / ".join(f"{row['bandwidth']['share']:.0%}".rstrip("%") for row in rows)
        ratios = [[row["ratio"][x]["best"] for row in rows if x in row["ratio"]] for x in ("eager", "compile")]
        said = [f"{' / '.join(map(short, x))} x" if x else "" for x in ratios]
        lines.append([label, times, f"{shares} of {rows[0]['bandwidth']['of']}", *said])
    return markdown(lines)


def h200_table() -> str:
    """Return a row per operator, form and number of tokens; no fresh outputs, which take as long as `out=`.

    The rows of h200-moves.json were measured again later; theirs count.
    """
    record, again = load("h200"), load("h200-moves")
    rows = {(x["operator"], x["form"], x["dtype"], *x["shape"]): x for x in (*record["rows"], *again["rows"])}
    record = {**record, "rows": [*rows.values()]}
    head = ["bf16 / fp32", "tokens", "time, us", "% of copy", "eager PyTorch takes", "others take"]
    lines = [head, ["---"] * len(head)]
    measured: dict[tuple[str, str, int], dict[str, dict]] = {}
    for row in record["rows"]:
        if "seconds" in row and (row["form"] != "fresh" or "64 tokens" in row["operator"]):
            measured.setdefault((row["operator"], row["form"], row["shape"][2]), {})[row["dtype"]] = row
    for (operator, form, tokens), by_dtype in measured.items():
        rows = [by_dtype[x] for x in ("bfloat16", "float32") if x in by_dtype]
        times = " / ".join(short(1e6 * row["seconds"]["median"]) for row in rows)
        shares = " / ".join(f"{100 * row['bandwidth']['share']:.0f}" for row in rows if "bandwidth" in row)
        eager = " / ".join(short(row["ratio"]["eager"]["median"]) for row in rows)
        others = [f"{x} {short(y['median'])} x" for x, y in rows[0]["ratio"].items() if x != "eager"]
        label = code(operator) + {"": "", "out=": " into `out=`"}.get(form, f", {form}")
        lines.append([label, number(tokens), times, shares, f"{eager} x", ", ".join(others)])
    reached = [x.reached for x in goals(record)]
    return f"{markdown(lines)}\n\n{sum(reached)} of {len(reached)} [goals](#goals) are reached."


def products_table() -> str:
    record = load("cpu-products")
    lines = [["", "dtype", "tokens", "time, ms", "GFLOP/s", "`torch.matmul` takes", "eager PyTorch takes"], ["---"] * 7]
    for row in record["rows"]:
        rate = f"{row['gflop_per_s']:.0f}" if "gflop_per_s" in row else ""
        ratios = [f"{short(row['ratio'][x]['best'])} x" for x in ("matmul", "eager")]
        seconds = short(1e3 * row["seconds"]["best"])
        lines.append([code(row["operator"]), row["dtype"], number(row["shape"][2]), seconds, rate, *ratios])
    return markdown(lines)


def attention_table() -> str:
    found = {amx: attention.means(json.loads(x.read_text())["cells"]) for amx, x in attention.RESULTS.items()}
    every = sorted({rows for means in found.values() for x in means.values() for rows in x})
    lines = [
        ["AMX", "dtype", "query heads", *(f"{x:,} rows" if x > 1 else "1 row" for x in every)],
        ["---"] * (len(every) + 3),
    ]
    for amx, means in found.items():
        for (dtype, grouped), x in means.items():
            heads = "shared" if grouped else "alone"
            lines.append(["yes" if amx else "no", dtype, heads, *(f"{x[rows]:.2f}" for rows in every)])
    return markdown(lines)


def decode_table() -> str:
    rows = json.loads(decode.RESULTS.read_text())["rows"]
    cells = {(row["method"], row["dtype"], row["budget"]): row for row in rows}
    kinds = list(dict.fromkeys((row["dtype"], row["budget"]) for row in rows))
    lines = [["", *(f"{dtype}, {number(tokens)} tokens" for dtype, tokens in kinds)], ["---"] * (1 + len(kinds))]
    for name in dict.fromkeys(row["method"] for row in rows):
        found = [cells[(name, *kind)] for kind in kinds]
        lines.append([name, *(f"{1e3 * row['seconds']['mean']:.3g} ms ({row['of_attention']:.2f})" for row in found)])
    return markdown(lines)


def code(op: str) -> str:
    """Format an operator's name as code and keep the text after it."""
    name, comma, kind = op.partition(",")
    return op if op == pages.READING else f"`{name}`{comma}{kind}"


def pages_table() -> str:
    rows = json.loads(pages.RESULTS.read_text())["rows"]
    kinds = list(dict.fromkeys((row["dtype"], row["order"]) for row in rows))
    sizes = list(rows[0]["ratio"])
    columns = [f"{dtype}, {order}, {size} slots" for dtype, order in kinds for size in sizes]
    lines = [["", *columns], ["---"] * (1 + len(columns))]
    cells = {(row["op"], row["dtype"], row["order"], size): row["ratio"][size] for row in rows for size in sizes}
    for op in dict.fromkeys(row["op"] for row in rows):
        found = [cells[op, dtype, order, size] for dtype, order in kinds for size in sizes]
        lines.append([code(op), *(f"{x:.2f}" for x in found)])
    return markdown(lines)


def fp8_table() -> str:
    rows = json.loads(pages.RESULTS.read_text())["fp8"]
    lines = [["", "bf16", *pages.FP8], ["---"] * (2 + len(pages.FP8))]
    for row in rows:
        lines.append(
            [code(row["op"]), f"{1e3 * row['seconds']:.3g} ms", *(f"{row['ratio'][x]:.2f}" for x in pages.FP8)]
        )
    return markdown(lines)


def analysis_tables() -> str:
    """Return the report on the shipped model without its title."""
    record = load("analysis")
    return report.markdown(record).partition("\n\n")[2].replace("\n## ", "\n### ").strip()


def regimes_table() -> str:
    """Return the papers' conditions on both models."""
    models = claims.TOY, claims.REAL
    gates = [load(x.analysis)["gate"] for x in models]
    lines = [["condition", "expected", *(x.name for x in models)], ["---"] * 4]
    for name, x in gates[0].items():
        values = [gate[name] for gate in gates]
        found = [f"{y['value']:.2f}, {'holds' if y['holds'] else 'does not hold'}" for y in values]
        lines.append([name, x["expected"], *found])
    outliers = [f"{100 * x.facts['outliers']:.0f} %" for x in models]
    lines.append(["outliers", "attention on the 10 % most outlying keys: over 60 % (ProtoKV, Sec. 3)", *outliers])
    return markdown(lines)


def of_file(name: str, page: Path) -> str:
    """Return the table of all rows of a record of python -m kvops.eval that have a partial match and a budget."""
    file = RESULTS.with_name(f"{name}.json")
    record = json.loads(file.read_text())
    rows = [row for row in record["rows"] if "partial" in row.get("scores", ()) and row["budget"] is not None]
    return table(rows, Path(os.path.relpath(file, page.parent)).as_posix(), record["origins"][0]["command"])


def partitions_table() -> str:
    records = [load(f"eval-{x}") for x in ("lagkv", "lag-long")]
    rows = [row for x in records for row in of_record(x).rows if row.selected is not None]
    kinds = sorted({(key_digits(row.task), row.context) for row in rows})
    contexts = sorted({row.context for row in rows})
    cells = {(row.method, key_digits(row.task), row.context): row for row in rows}
    lines = [
        ["L", "r", "r L", *(f"kept of {x:,}" for x in contexts)]
        + [f"{digits} digits, {context:,} tokens (r L / digits)" for digits, context in kinds]
        + ["paper, 64 digits"]
    ]
    lines += [["---"] * len(lines[0])]
    for method in dict.fromkeys(row.method for row in rows):
        own = [row for row in rows if row.method == method]
        lag, ratio = (float(x) for x in re.findall(r"(?:lag|ratio)=([0-9.]+)", method))
        line = [f"{lag:,.0f}", f"{ratio:g}", f"{own[0].selected}"]
        line += [next((f"{row.tokens:,}" for row in own if row.context == x), "") for x in contexts]
        for digits, context in kinds:
            row = cells.get((method, digits, context))
            if row is None:
                line.append("")
                continue
            mean, low, high = (100 * x for x in row.scores["partial"][:3])
            line.append(f"{mean:.0f} [{low:.0f}, {high:.0f}] ({row.selected / digits:.2g})")
        lines.append([*line, f"{QWEN[lag, ratio]:.0f}" if (lag, ratio) in QWEN else ""])
    return markdown(lines)


def end_to_end(key: str, name: str = "end-to-end") -> list[dict]:
    """Return the rows whose prompts were read as `key` says."""
    return [row for row in load(name)["rows"] if row["prefill"].startswith(key)]


def faster(row: dict, time: str) -> str:
    """Format how many times as fast as the full cache a row is."""
    middle, low, high = row["speedup"][time]
    return "1" if row["method"] == "full cache" else f"{middle:.2f} ({low:.2f} to {high:.2f})"


def end_to_end_table() -> str:
    head = ["context", "", "first token, s", "times as fast", "each next token, ms", "times as fast"]
    lines = [[*head, "cache, % of the full cache"], ["---"] * 7]
    for row in end_to_end("chunked"):
        line = [f"{row['context']:,}", row["method"], f"{row['ttft_s']:.2f}", faster(row, "ttft")]
        line += [f"{1e3 * row['tpot_s']:.1f}", faster(row, "tpot")]
        lines.append([*line, f"{100 * row['bytes_kept'] / row['bytes_full']:.1f}"])
    return markdown(lines)


def blocks_table() -> str:
    rows = end_to_end("blocks of ")
    methods: dict[str, list[str]] = {row["method"]: [] for row in rows}
    for row in rows:
        methods[row["method"]] += [f"{row['ttft_s']:.2f}", faster(row, "ttft")]
    head = [""]
    for size in dict.fromkeys(row["prefill"] for row in rows):
        head += [f"{size}, s", "times as fast"]
    return markdown([head, ["---"] * len(head), *([name, *cells] for name, cells in methods.items())])


def lags_table() -> str:
    """Return LagKV's speedups for each lag, at the contexts and ratios that all records have."""
    lines = [
        ["L", "context", "", "first token, times as fast", "next tokens", "cache, % of the full cache"],
        ["---"] * 6,
    ]
    few = {(row["context"], row["method"]) for row in end_to_end("chunked", "end-to-end-lag128")}
    for lag, name in ((128, "end-to-end-lag128"), (512, "end-to-end-lag512"), (1024, "end-to-end")):
        for row in end_to_end("chunked", name):
            if (row["context"], row["method"]) in few and row["method"] != "full cache":
                share = f"{100 * row['bytes_kept'] / row['bytes_full']:.1f}"
                context = number(row["context"])
                lines.append([number(lag), context, row["method"], faster(row, "ttft"), faster(row, "tpot"), share])
    return markdown(lines)


def pareto_table(name: str) -> str:
    head = ["slots per layer", "best ladder: S, O (slots)", "its perplexity", "StreamingLLM's", "best random pattern"]
    lines = [[*head, "patterns beaten by the ladder"], ["---"] * 6]
    of = load(name)
    for x in of["shares_beaten"]:
        span, overlap, pattern = x["shape"]
        shape = f"{span}, {overlap}" + f", {pattern}" * (pattern != "paper")
        shape += f" ({number(x['ladder_slots'] // of['layers'])})"
        values = [f"{x[y]:.3f}" for y in ("ladder", "StreamingLLM", "random")]
        lines.append([number(x["slots"] // of["layers"]), shape, *values, f"{100 * x['beaten']:.0f} %"])
    return markdown(lines)


def clusters_table() -> str:
    """Return a row per clustering: the mass that whole clusters keep, with the interval of the paired difference to
    ProtoKV, and the cost of finding them."""
    of = load("clusters")
    base = of["mass"]["ProtoKV"]
    names = [x for x in base if x != "cosine"]
    lines = [["clusters", *names, "cosine with the center", "CPU time"], ["---"] * (3 + len(names))]
    for name, values in of["mass"].items():
        shares = [f"{100 * fmean(values[x]):.1f}" for x in names]
        if name != "ProtoKV":
            found = [bootstrap([y - z for y, z in zip(values[x], base[x], strict=True)]) for x in names]
            shares = [f"{x} [{100 * low:+.1f}, {100 * high:+.1f}]" for x, (low, high) in zip(shares, found)]
        time = f"{of['seconds'][name] / of['seconds']['ProtoKV']:.1f} x"
        lines.append([name, *shares, f"{fmean(values['cosine']):.3f}", time])
    return markdown(lines)


def fp8_rows_table() -> str:
    """Return a row per method: the same tokens kept, and the attention lost, by format."""
    kept = load("fp8-rows")["kept"]
    formats = list(next(iter(kept.values())))
    lines = [["", *(f"{x}, {y}" for x in formats for y in ("same", "lost"))], ["---"] * (1 + 2 * len(formats))]
    for name, of in kept.items():
        line = [name]
        for x in formats:
            lost = fmean(of[x]["lost"]), *bootstrap(of[x]["lost"])
            mean, low, high = (round(100 * y, 1) + 0.0 for y in lost)  # not -0.0
            line += [f"{100 * fmean(of[x]['same']):.1f}", f"{mean:.1f} [{low:.1f}, {high:.1f}]"]
        lines.append(line)
    return markdown(lines)


def rounded_rows_table() -> str:
    """Return a row per method and cut: bf16 at two sizes, and what the same bytes hold in int8 and fp8."""
    rows = load("rounded-rows")["rows"]
    pairs = {(x["point"], x["method"], x["same_bytes"]["budget"], x["storage"]): x for x in rows if "same_bytes" in x}
    sizes = sorted({key[2] for key in pairs if {(*key[:3], y) for y in ("int8", "fp8")} <= pairs.keys()})
    lines = [["", "tokens in bf16", "bf16", "int8", "fp8"], ["---"] * 5]
    for point, method in dict.fromkeys((x["point"], x["method"]) for x in rows if x["budget"]):
        for size in sizes:
            cells = [pairs[point, method, size, x] for x in ("int8", "fp8")]
            line = [
                f"{method.split()[0]}, {point} the question",
                str(size),
                f"{100 * cells[0]['same_bytes']['score']:.0f}",
            ]
            for x in cells:
                d = x["same_bytes"]
                low, mean, high = (round(100 * d[y]) for y in ("low", "difference", "high"))
                line.append(f"{100 * x['score']:.0f}, {x['budget']} tokens: {mean:+d} [{low:+d}, {high:+d}]")
            lines.append(line)
    return markdown(lines)


def rounded_keys_table() -> str:
    lines = [["", "int8: error, %", "int8: KL", "fp8: error, %", "fp8: KL"], ["---"] * 5]
    found = load("rounded-keys")["rounded"]
    for what in dict.fromkeys(x.rpartition(", ")[0] for x in found):
        line = [what]
        for name in ("int8", "fp8"):
            of = found[f"{what}, {name}"]
            kl = [1e3 * x for x in of["kl"]]
            low, high = bootstrap(kl)
            line += [f"{100 * fmean(of['error']):.4f}", f"{fmean(kl):.2f} [{low:.2f}, {high:.2f}]"]
        lines.append(line)
    return markdown(lines)


def laq_cost_table() -> str:
    seconds = load("laq-cost")["seconds"]
    lines = [["", "ms", "% of the prefill"], ["---"] * 3]
    for name, x in seconds.items():
        lines.append([name, short(1e3 * x), f"{100 * x / seconds['prefill']:.1f}"])
    return markdown(lines)


def keydiff_depths_table() -> str:
    """Return the digits that KeyDiff finds minus those of the full cache, in points, by context and depth."""
    rows = {}
    for row in claims.rows("smollm2"):
        if row["task"] == NEEDLES[0] and row["point"] == "after":
            rows[row["context"], row["method"], row["budget"]] = row["depths"]
    depths = next(iter(rows.values()))["depth"]
    lines = [["tokens", "kept", *(f"{100 * x:.0f} %" for x in depths)], ["---"] * (2 + len(depths))]
    for (context, method, size), own in sorted(rows.items(), key=lambda x: (x[0][0], -(x[0][2] or 0))):
        if method == "KeyDiff":
            full = rows[context, "Full", None]["score"]
            lines.append(
                [number(context), number(size), *(f"{100 * (x - y):+.0f}" for x, y in zip(own["score"], full))]
            )
    return markdown(lines)


#: The columns of the table of synthetic caches.
SYNTHETIC = ("KeyDiff", "LagKV", "LaCache", "LAQ", "ProtoKV", "SnapKV", "Random")


def synthetic_table() -> str:
    """Return a row per preset: the mass that each method keeps, and the best method of all."""
    rows = load("synthetic")["rows"]
    cells = {(row["task"].partition("preset=")[2], row["method"]): row for row in rows if mark(row) != " †"}
    lines = [["preset", *SYNTHETIC, "best of all, and those not shown to be worse"]]
    lines.append(["---", *["---:"] * len(SYNTHETIC), "---"])
    for preset in PRESETS:
        found = {name: row for (task, name), row in cells.items() if task == preset and "scores" in row}
        led = [x for x, row in found.items() if row["compared"]["best"]["verdict"] == "undecided"]
        best = next(x for x, row in found.items() if row["compared"]["best"]["verdict"] == "best")
        line = [f"`{preset}`"]
        for name in SYNTHETIC:
            text = f"{100 * found[name]['scores']['mass']['mean']:.0f}" if name in found else "–"
            line.append(f"**{text}**" if name in (best, *led) else text)
        share = 100 * found[best]["scores"]["mass"]["mean"]
        lines.append([*line, ", ".join([f"{best} {share:.0f}", *led])])
    return markdown(lines)


#: Sweeps of a setting over synthetic caches: the preset, the setting and the methods.
SWEEPS = {
    "alignment": ("distinctive", "alignment", ("KeyDiff", "SATKV", "ProtoKV", "TOVA", "SnapKV")),
    "draft": ("response", "draft", ("LAQ", "LAQ++", "SnapKV")),
    "run": ("outliers", "run_length", ("LagKV", "SATKV", "KeyDiff")),
}


def sweep_table(name: str) -> str:
    """Return a row per method, a column per value of the setting."""
    preset, setting, methods = SWEEPS[name]
    rows = load("synthetic")["rows"]
    start = f"synthetic:preset={preset},{setting}="
    cells = {(row["method"], row["task"][len(start) :]): row for row in rows if row["task"].startswith(start)}
    values = sorted({value for _, value in cells}, key=float)
    lines = [[f"`{setting}`", *values], ["---", *["---:"] * len(values)]]
    for method in methods:
        found = [cells[method, value]["scores"]["mass"] for value in values]
        lines.append([method, *(f"{100 * x['mean']:.0f} {interval(x)}" for x in found)])
    return markdown(lines)


def interval(score: dict) -> str:
    """Format the 95 % interval of a fraction."""
    return f"[{100 * max(0.0, score['low']):.0f}, {100 * min(1.0, score['high']):.0f}]"


def prefixes_table() -> str:
    """Return a row per number of generated tokens: CPU time, and in brackets the ratio to no eviction."""
    rows = load("vllm-prefixes")["rows"]
    lines = [["tokens generated", *rows[0]["seconds"]], ["---"] * (1 + len(rows[0]["seconds"]))]
    for row in rows:
        times = {name: f"{1e3 * statistics.median(x):.0f} ms" for name, x in row["seconds"].items()}
        cells = [f"{x} ({row['ratio'][name]:.2f})" for name, x in times.items()]
        lines.append([f"{row['load']['generated']}", *cells])
    return markdown(lines)


def decode_peers_table() -> str:
    """Return a row per dtype and number of tokens: kvops' rate, and the others' CPU times as multiples of its."""
    rows = load("decode-peers")["cells"]
    names = [x for x in rows[0]["seconds"] if x != "kvops"]
    lines = [["dtype", "tokens", "kvops, GB/s", *names], ["---"] * (3 + len(names))]
    for row in rows:
        seconds = row["seconds"]
        others = ("–" if (x := seconds[name]) is None else f"{x / seconds['kvops']:.1f} x" for name in names)
        lines.append([row["dtype"], number(row["tokens"]), f"{row['bytes'] / seconds['kvops'] / 1e9:.1f}", *others])
    return markdown(lines)


def topk_peers_table() -> str:
    """Return a row per number of tokens: the others' CPU times as multiples of select_topk's, over the kinds and k."""
    rows = load("topk-peers")["cells"]
    names = [x for x in rows[0]["seconds"] if x != "kvops"]
    lines = [["tokens", "kvops, us", *names], ["---"] * (2 + len(names))]
    for n in dict.fromkeys(x["tokens"] for x in rows):
        cells = [x["seconds"] for x in rows if x["tokens"] == n]
        own = [f"{1e6 * x['kvops']:.0f}" for x in sorted(cells, key=itemgetter("kvops"))]
        ratios = {name: sorted(x[name] / x["kvops"] for x in cells) for name in names}
        lines.append([number(n), f"{own[0]}–{own[-1]}", *(f"{x[0]:.1f}–{x[-1]:.1f} x" for x in ratios.values())])
    return markdown(lines)


def vllm_attention_table() -> str:
    """Return a row per kind of step: kvops' CPU time as a fraction of vLLM's, and the bytes that decode reads."""
    rows = load("vllm-attention")["layers"]
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        if row["heads"] != "32/8, d 128":
            continue
        cell = f"{row['kvops'] / row['vLLM']:.2f}"
        if "bytes" in row and "H2O" not in row["step"]:
            kvops, vllm, most = (f"{row['bytes'] / row[name] / 1e9:.0f}" for name in ("kvops", "vLLM", "read"))
            cell += f" ({kvops}; {vllm}; {most} GB/s)"
        cells.setdefault(row["step"], {})[row["dtype"]] = cell
    lines = [["", "bf16", "fp32"], ["---"] * 3]
    lines += [[re.sub(r"\d{4,}", lambda x: number(int(x[0])), x), y["bf16"], y["fp32"]] for x, y in cells.items()]
    return markdown(lines)


def vllm_engines_table() -> str:
    """Return a row per kind of step of whole engines: CPU time per step."""
    rows = load("vllm-attention")["engines"]
    lines = [
        ["CPU time of a step", "vLLM's attention", "kvops' attention", "steps per second, kvops / vLLM"],
        ["---"] * 4,
    ]
    for row in rows:
        step = re.sub(r"\d{4,}", lambda x: number(int(x[0])), row["step"])
        times = [f"{1e3 * row[name]:.1f} ms" for name in ("vLLM", "kvops")]
        lines.append([step, *times, f"{row['vLLM'] / row['kvops']:.2f}"])
    return markdown(lines)


def real_model_table() -> str:
    """Return the needles that each method finds whole on the real model, the most after the question first."""
    points = {"after": "after the question", "before": "before the question"}
    cells: dict[str, dict[tuple[str, str, int | None], str]] = {}
    means: dict[str, list[float]] = {}
    shown = {*LABELS, "DefensiveKV stages=False"}  # recorded before the library had its stages
    for row in claims.rows("smollm2"):
        if row["context"] == 1024 and row["task"] in NEEDLES and row["method"] in shown:
            cells.setdefault(row["method"], {})[row["task"], row["point"], row["budget"]] = percent(row, "exact")
            if row["point"] == "after":
                means.setdefault(row["method"], []).append(row["scores"]["exact"]["mean"])
    columns = [(task, point, size) for point in points for task in NEEDLES for size in (128, 256, 512)]
    columns = [x for x in columns if x[0] == NEEDLES[0] or x[1:] == ("after", 256)]
    head = ["method", *(f"{'one key' if x[0] == NEEDLES[0] else 'four keys'}, {points[x[1]]}, {x[2]}" for x in columns)]
    lines = [head, ["---"] * len(head)]
    for method in sorted(cells, key=lambda x: -sum(means[x]) / len(means[x])):
        found = cells[method]
        lines.append([method, *(found.get(x) or found[(*x[:2], None)] for x in columns)])
    return markdown(lines)


def continuation_table(methods: Collection[str]) -> str:
    """Return what each cut adds to the loss of the next tokens, per text and budget."""
    texts = {"English": "continuation-english", "code": "continuation-code"}
    columns = [f"{text}, {budget}" for text in texts for budget in (512, 256, 128)]
    return losses_added(texts.values(), columns, methods)


def losses_added(records: Iterable[str], columns: list[str], methods: Collection[str] = (), digits: int = 2) -> str:
    """Return the loss that each method adds to the full cache's, a column per record and budget; the least on average
    first. methods: their labels, () for all."""
    cells: dict[str, list[str]] = {}
    means: dict[str, float] = {}
    for name in records:
        for row in claims.rows(name):
            if (methods and row["method"] not in methods) or row["budget"] is None:
                continue
            cell = claims.Cell(row["task"], row["context"], row["point"], row["budget"])
            losses, whole = claims.raw(name)[cell, row["method"]], claims.raw(name)[cell._replace(budget=None), "Full"]
            added = [x - y for x, y in zip(losses["loss"], whole["loss"], strict=True)]
            low, high = bootstrap(added)
            said = "{:.{d}f} [{:.{d}f}, {:.{d}f}]".format(fmean(added), low, high, d=digits)
            cells.setdefault(row["method"], []).append(said + mark(row))
            means[row["method"]] = means.get(row["method"], 0.0) + fmean(added)
    head = ["method", *columns]
    return markdown([head, ["---"] * len(head), *([x, *cells[x]] for x in sorted(cells, key=means.__getitem__))])


#: ProtoKV's rows of eval-smollm2.json, made with one chunk per 16 tokens, by what they are called now.
CHUNKS_OF_16 = {x: f"{x} num_chunks=64" for x in ("ProtoKV", claims.SOFTMAX)}


def other_prompts_table() -> str:
    """Return the needles found whole on the prompts of the real model's table and on others."""
    sizes, records = {"after": 256, "before": 512}, ("smollm2", "smollm2-others")
    cells: dict[str, dict[tuple[str, str], str]] = {}
    means: dict[str, float] = {}
    for record in records:
        for row in claims.rows(record):
            method, point = row["method"], row["point"]
            if record == records[0]:
                method = CHUNKS_OF_16.get(method, method)
            size = sizes[point] if method == "Full" and point in sizes else row["budget"]
            if (row["task"], row["context"]) == (NEEDLES[0], 1024) and size == sizes[point]:
                cells.setdefault(method, {})[record, point] = percent(row, "exact")
                if (record, point) == (records[1], "after"):
                    means[method] = row["scores"]["exact"]["mean"]
    head = ["method"]
    for point, size in sizes.items():
        head += [f"{point} the question, {size}: recorded table", "other prompts"]
    lines = [head, ["---"] * len(head)]
    for method in sorted(means, key=lambda x: -means[x]):
        lines.append([method, *(cells[method].get((record, point), "") for point in sizes for record in records)])
    return markdown(lines)


def ragged_table() -> str:
    """Return a row per dtype and budget: the lengths of the heads, and the step's time and the bytes as ratios."""
    lines = [["", "rows per head", "of the shortest", "of the longest", "time", "bytes"], ["---"] * 6]
    for row in load("ragged")["rows"]:
        held = row["bytes"]["adaptive"] / row["bytes"]["per_head"]
        lengths = map(number, (row["budget"], min(row["lengths"]), max(row["lengths"])))
        lines.append([row["dtype"], *lengths, f"{row['ratio']:.2f} x", f"{held:.2f} x"])
    return markdown(lines)


def rounded_step_table() -> str:
    """Return a row per number of query heads, and for each number of tokens the times as ratios to bf16's."""
    rows = load("rounded-step")["rows"]
    sizes = sorted({x["tokens"] for x in rows})
    columns = [(tokens, dtype) for tokens in sizes for dtype in ("int8", "fp8")]
    lines = [["query heads per KV head", *(f"{n:,} tokens: {x}" for n, x in columns)], ["---"] * (1 + len(columns))]
    found = {(x["tokens"], x["group"]): x["ratio"] for x in rows}
    for group in sorted({x["group"] for x in rows}):
        lines.append([str(group), *(f"{found[n, group][x]:.2f} x" for n, x in columns)])
    return markdown(lines)


def by_heads_table(record: str) -> str:
    """Return a row per method and division of its budget: the digits found, by cut and budget, and the loss of the text
    after a cut, if the record has it. What a threshold keeps is in the column of the nearest budget."""
    rows, scores = claims.rows(record), {NEEDLES[0]: "partial", "continuation": "loss"}
    budgeted = [x for x in rows if x["budget"] and "threshold=" not in x["method"]]
    columns = sorted({(x["task"] != NEEDLES[0], x["point"], x["budget"], x["task"]) for x in budgeted})
    head, cells = ["method"], {}
    for _, point, size, task in columns:
        head.append(f"{point} the question, {size}" if task == NEEDLES[0] else f"loss, {size}")
        for x in rows:
            near = min((y[2] for y in columns), key=lambda y: abs(y - x["tokens"]))
            own = x["method"].startswith("Full") or (near if "threshold=" in x["method"] else x["budget"]) == size
            if own and (x["task"], x["point"]) == (task, point):
                score = x["scores"][scores[task]]["mean"]
                shown = percent(x, "partial") if task == NEEDLES[0] else f"{score:.2f}"
                if "threshold=" in x["method"]:
                    shown = f"{shown.replace(' ‡', '')} ({x['tokens']} kept)"
                cells[x["method"], task, point, size] = shown
    lines = [head, ["---"] * len(head)]
    names = dict.fromkeys(x["method"] for x in rows)
    several = len({*re.findall(r"shares=build/eval/(\w+)\.safetensors", " ".join(names))}) > 1
    for name in sorted(names, key=lambda x: x != "Full"):
        shown = re.sub(r"shares=build/eval/(\w+)\.safetensors", r"shares=\1", name) if several else name
        shown = re.sub(r"build/eval/\w+\.safetensors", "...", shown)
        lines.append([shown, *(cells.get((name, task, point, size), "") for _, point, size, task in columns)])
    return markdown(lines)


#: Tables by the name of their markers.
TABLES = {
    "real model": real_model_table,
    "continuation": partial(continuation_table, LABELS),
    "protokv texts": partial(continuation_table, ("ProtoKV", "ProtoKV num_chunks=62", claims.SOFTMAX, "SnapKV")),
    "other prompts": other_prompts_table,
    "ragged": ragged_table,
    "rounded step": rounded_step_table,
    "ragged quality": partial(by_heads_table, "ragged"),
    "shares": partial(by_heads_table, "shares"),
    "kvzip plus": partial(by_heads_table, "kvzip-plus"),
    "kvzap": partial(by_heads_table, "kvzap"),
    "kvgrad": partial(by_heads_table, "kvgrad"),
    "dropkv": partial(by_heads_table, "dropkv"),
    "attention matching": partial(by_heads_table, "attention-matching"),
    "kvzap english": partial(by_heads_table, "kvzap-english"),
    "rounded rows": rounded_rows_table,
    "rounded keys": rounded_keys_table,
    "synthetic": synthetic_table,
    **{f"synthetic {name}": partial(sweep_table, name) for name in SWEEPS},
    "analysis": analysis_tables,
    "regimes": regimes_table,
    "pareto": partial(pareto_table, "pareto"),
    "pareto real": partial(pareto_table, "pareto-smollm2"),
    "ladders": partial(losses_added, ["lacache-ladders"], ["512 kept"], digits=3),
    "keydiff depths": keydiff_depths_table,
    "decode stream": partial(losses_added, ["smollm2-decode"], ["256 kept"]),
    "clusters": clusters_table,
    "laq cost": laq_cost_table,
    "fp8 rows": fp8_rows_table,
    "end-to-end lags": lags_table,
    "partitions": partitions_table,
    "end-to-end": end_to_end_table,
    "end-to-end blocks": blocks_table,
    "speed": speed_table,
    "h200": h200_table,
    "products": products_table,
    "attention": attention_table,
    "decode": decode_table,
    "pages": pages_table,
    "fp8": fp8_table,
    "prefixes": prefixes_table,
    "decode peers": decode_peers_table,
    "topk peers": topk_peers_table,
    "vllm attention": vllm_attention_table,
    "vllm engines": vllm_engines_table,
}


def of_methods(names: str, page: Path, rows: list[dict]) -> str:
    """Return the table that a block names. rows: those of RESULTS."""
    names, _, file = names.partition(" in ")
    results = RESULTS.with_name(f"{file}.json") if file else RESULTS
    link = Path(os.path.relpath(results, page.parent)).as_posix()
    if not file:
        return table(chosen(rows, names), link)
    record = json.loads(results.read_text())
    command = re.sub(r" --out \S+", "", record["origins"][0]["command"])
    return table(chosen(record["rows"], names), link, command)


def filled(page: Path, rows: list[dict]) -> str:
    """Return the page's text with every table up to date."""
    text = BLOCK.sub(lambda x: f"{x[1]}\n{of_methods(x[2], page, rows)}\n\n{x[3]}", page.read_text())
    text = OF_PAPER.sub(lambda x: f"{x[1]}\n{claims.table(x[2])}\n\n{x[3]}", text)
    text = OF_FILE.sub(lambda x: f"{x[1]}\n{of_file(x[2], page)}\n\n{x[3]}", text)
    for name, made in TABLES.items():
        if f"<!-- {name} -->" not in text:
            continue
        block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = block.sub(lambda x, made=made: f"{x[1]}\n{made()}\n\n{x[2]}", text)
    return text


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page would change")
    check = parser.parse_args(argv).check
    rows = json.loads(RESULTS.read_text())["rows"]
    files = [README, *sorted(DOCS.rglob("*.md"))]
    stale = {page: text for page in files if (text := filled(page, rows)) != page.read_text()}
    if check and stale:
        sys.exit(f"out of date with bench/results: {', '.join(x.name for x in stale)}; run python bench/measured.py")
    for page, text in stale.items():
        page.write_text(text)
        print(page)


if __name__ == "__main__":
    main()
