"""Results as a report: report.md with tables, pictures beside it, and summary.json with the tables' numbers.

The same results always give the same report, byte by byte.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..bench.markdown import code, escape
from ..bench.record import replace
from .statistics import TOO_FEW, Comparison
from .summary import (
    BASELINE,
    PROMPTS,
    Estimate,
    Row,
    Summary,
    Traits,
    leaders,
    perplexity,
    point_title,
    summarize,
)

READING = """\
- Every method saw the same prompts. Budgets are tokens per KV head. The cache is cut once, before or after the
  question. It then grows with the question and the answer. In streams and chunks it is cut after each piece of text.
- Scores are means over prompts, with the 95 % interval in brackets: {intervals}.
- **Bold**: the best score of its column, if its interval overlaps no other's. Nothing is bold where the prompts cannot
  separate the methods. Full is not ranked, nor are methods marked †.
- † keeps over 5 % more than its budget. ‡ keeps over 5 % less, because its settings do not meet the budget exactly or
  because it evicts only after whole windows. Methods marked ‡ are ranked. They can be the best with fewer tokens. Where
  they are worse, the missing tokens may be the reason.
- Methods whose settings fix what they keep, such as lagkv:lag=128,ratio=0.25, have no budget. A table of their own has
  the tokens that they kept. They are not ranked. r L: the tokens that LagKV selects from each partition.
- Full keeps everything at any budget; its numbers are repeated for comparison.
- Settings that depend on the budget: SnapKV, PyramidKV, ChunkKV and SATKV use a window of 32 tokens, or half the
  budget if that is smaller. ProtoKV uses 8 up to a budget of 128, and 32 above. LagKV, LocalKV and LagKV L2 use the
  largest lag, a power of two up to 1,024, at which the sinks, the last partition and the remainder take at most half
  the budget. If the other half is less than one token per partition, LagKV selects none and uses the lag that keeps
  most.
- Random keeps the same positions of every prompt, so its intervals are slightly too narrow.
- Kept: tokens per KV head, averaged over the layers. Held: bytes of keys and values per prompt after the cut, and in
  brackets their fraction of the whole cache.
- Prefill: the time to read a prompt and cut its cache, which is the time of a batch divided by its prompts. Decode:
  tokens generated per second by a batch. Both are medians over batches, valid for this machine and this batch size.
"""
PAIRED = """\
- Differences are paired: the score of a method minus the score of another method on the same prompt. In brackets: the
  95 % interval of the mean difference (bootstrap over prompts). Two methods can differ clearly although their own
  intervals overlap, since both find the same prompts hard.
- p: how likely a difference at least this large would be if the two methods were equally good (sign-flip test),
  corrected for the number of comparisons in a column. Better, worse: p is at most 5 %. Undecided: these prompts do not
  tell. The interval is not corrected, so it can exclude 0 where the verdict is undecided.
- The best is the method with the best mean on these prompts. That selection favours it, so p is corrected for all pairs
  of methods. Other methods are worse than the best or undecided, never better.
"""
KINDS = {
    True: "Wilson's for proportions (suited to right-or-wrong scores, too wide for partial scores)",
    False: "Student's t for other numbers",
}


def write(heads: list[dict[str, Any]], lines: list[dict[str, Any]], folder: Path) -> str:
    """Write report.md, summary.json and the pictures.

    Args:
        heads, lines: what `results.load` returned.
        folder: where to write; created if it does not exist.

    Returns:
        The text that the command prints.

    Raises:
        Refused: there is nothing to report, or a cell was measured twice.
    """
    return write_summary(summarize(heads, lines), folder)


def write_summary(summary: Summary, folder: Path) -> str:
    """Write the report of rows that are summarized already; see `write`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = report(summary, folder)
    replace(folder / "summary.json", json_of(summary.record()))
    replace(folder / "report.md", text)
    return "\n".join([table(summary), "", f"report: {folder / 'report.md'}, with summary.json and pictures beside it"])


def json_of(record: dict[str, Any]) -> str:
    """Format a record as JSON with one line per row."""
    rows = ",\n".join("  " + json.dumps(x, allow_nan=False) for x in record["rows"])
    head = json.dumps({x: y for x, y in record.items() if x != "rows"}, indent=1, allow_nan=False)
    return f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


def report(summary: Summary, folder: Path) -> str:
    """Return the text of report.md, and draw its pictures into the folder."""
    from . import plots  # needs matplotlib, which tables do not

    intervals = "; ".join(
        text for percent, text in KINDS.items() if percent in {x.percent for x in summary.traits.values()}
    )
    model = re.sub(r" \([0-9a-f]{12}\)$", "", listed(summary.settings.get("model", "synthetic caches")))
    parts = [
        f"# Evaluation of {escape(model)}",
        what_was_run(summary),
        "## How to read it",
        READING.format(intervals=intervals).rstrip() + ("\n" + PAIRED.rstrip()) * any(x.compared for x in summary.rows),
    ]
    if plots.overview(summary, folder / "overview.png"):
        parts.append("![Every method on every task](overview.png)")
    groups = summary.groups()
    for task in summary.traits:
        parts += [f"## {escape(task)}", summary.about(task)]
        for context in sorted({x[1] for x in groups if x[0] == task}):
            parts.append(f"### Context {context:,} tokens")
            name = slug(task, context)
            for draw, file, caption in (
                (plots.accuracy, f"accuracy-{name}.png", "against the tokens kept"),
                (plots.throughput, f"throughput-{name}.png", "against decode throughput"),
                (plots.positions, f"positions-{name}.png", "by position"),
            ):
                if draw(summary, task, context, folder / file):
                    what = f"{task}, context {context:,}: {summary.traits[task].metrics[0]} {caption}"
                    parts.append(f"![{escape(what)}]({file})")
            for (_, _, point), rows in ((x, y) for x, y in groups.items() if x[:2] == (task, context)):
                parts.append(f"#### {escape(point_title(point).capitalize())}")
                parts += section(rows, summary.traits[task])
        maps = []
        for point in dict.fromkeys(x[2] for x in groups if x[0] == task):
            file = f"depth-{slug(task, point)}.png"
            if plots.heatmap(summary, task, point, folder / file):
                maps.append(f"![{escape(f'{task}, {point_title(point)}')}: by context and depth]({file})")
        if maps:
            parts += ["### By context and depth", *maps]
    if plots.partitions(summary, folder / "partitions.png"):
        parts += ["## LagKV by the tokens selected from each partition", "![score by r L](partitions.png)"]
    return "\n\n".join(parts) + "\n"


def slug(*names: str | int) -> str:
    return re.sub(r"[^A-Za-z0-9.+]+", "-", "-".join(str(x)[:80] for x in names)).strip("-")


def listed(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def what_was_run(summary: Summary) -> str:
    """Return the settings, what was compared, and where it ran."""
    rows = summary.rows
    lines = [f"- {entry(name, listed(value))}" for name, value in summary.settings.items() if value is not None]
    differing = [escape(name) for name, value in summary.settings.items() if isinstance(value, list)]
    if differing:
        said = ", so they are not compared in pairs" if {*PROMPTS} & {*differing} else ""
        lines.append(
            f"- **the files differ in {', '.join(differing)}**: their rows may come from different prompts{said}"
        )
    counts = sorted({x.n for x in rows if x.unreachable is None})
    lines += [
        f"- tasks: {escape(', '.join(summary.traits))}",
        f"- context, tokens: {'; '.join(f'{x:,}' for x in sorted({x.context for x in rows}))}",
        f"- methods: {escape(', '.join(dict.fromkeys(x.method for x in rows)))}",
        f"- prompts per task and context: {listed(counts) or 'none, no budget was reachable'}",
    ]
    for origin in summary.origins:
        machine = dict(origin.get("machine") or {})
        gpu = machine.pop("gpu", None)
        lines += [
            "",
            code(str(origin.get("command"))),
            "",
            f"- {entry('machine', ', '.join(f'{name} {value}' for name, value in machine.items()))}",
            *([f"- {entry('GPU', ', '.join(f'{name} {value}' for name, value in gpu.items()))}"] if gpu else []),
            *(f"- {entry(x, y)}" for x, y in origin.items() if x not in ("machine", "command") and y is not None),
        ]
    return "\n".join(lines)


def entry(name: str, value: object) -> str:
    return f"{escape(name)}: {escape(str(value))}"


def budgets_of(rows: list[Row]) -> list[int | None]:
    """Return the budgets, largest first, or [None] if no row has one."""
    return [*sorted({x.budget for x in rows if x.budget is not None}, reverse=True)] or [None]


def section(rows: list[Row], kind: Traits) -> list[str]:
    """Return the tables of one task, context and cut point, with their notes."""
    everything, rows = rows, [x for x in rows if not x.fixed]
    budgets = budgets_of(rows)
    methods = list(dict.fromkeys(x.method for x in rows))
    by_cell = {(x.method, x.budget): x for x in rows}
    best = [row.cell for budget in budgets for row in leaders([x for x in rows if x.budget == budget], kind)]
    reasons: dict[str, int] = {}

    def cell(method: str, budget: int | None) -> Row | str:
        row = by_cell.get((method, budget)) or by_cell.get((method, None))
        if row is None:
            return ""
        if row.unreachable is not None:
            return f"– ({reasons.setdefault(row.unreachable, len(reasons) + 1)})"
        return row

    columns: list[tuple[str, tuple[int | None, str]]] = []
    for budget in budgets:
        over = "" if budget is None else f" at {budget:,}"
        columns += [(f"{escape(metric)}{unit(kind)}{over}", (budget, metric)) for metric in kind.metrics]
        if any(x.positions for x in rows):
            columns.append((f"perplexity{over}", (budget, "perplexity")))
    scores = [["method", *(x for x, _ in columns)]]
    for method in methods:
        line = [escape(method)]
        for _, (budget, metric) in columns:
            row = cell(method, budget)
            if isinstance(row, Row) and metric == "perplexity":
                known = row.positions and kind.metrics[0] in row.scores
                row = f"{perplexity(row.scores[kind.metrics[0]].mean):.4g}" if known else ""
            elif isinstance(row, Row):
                text = score(row.scores.get(metric), kind, interval=metric == kind.metrics[0])
                if metric == kind.metrics[0]:
                    text = f"**{text}**" if row.cell in best else text + row.mark
                row = text
            line.append(row)
        scores.append(line)

    facts = {
        "kept": lambda row: f"{row.tokens:,}" + row.mark if row.tokens else "",
        "held, MB": lambda row: held(row) if row.bytes_held else "",
        "prefill, ms": lambda row: number(1e3 * row.prefill_s) if row.prefill_s else "",
        "decode, tokens/s": lambda row: number(row.decode_tokens_per_s) if row.decode_tokens_per_s else "",
    }
    facts = {x: f for x, f in facts.items() if any(f(row) for row in rows if row.unreachable is None)}
    costs = [["method", *(f"{x}{'' if b is None else f' at {b:,}'}" for b in budgets for x in facts)]]
    for method in methods:
        line = [escape(method)]
        for budget in budgets:
            row = cell(method, budget)
            line += [f(row) if isinstance(row, Row) else row for f in facts.values()]
        costs.append(line)

    notes = [f"({i}) {escape(reason)}" for reason, i in reasons.items()]
    most = max((x.n for x in everything), default=0)
    fewer = [x for x in rows if x.unreachable is None and x.n < most]
    if fewer:
        said = ", ".join(f"{escape(x.method)}{'' if x.budget is None else f' at {x.budget:,}'} ({x.n})" for x in fewer)
        notes.append(f"Not on all {most} prompts: {said}.")
    if any(cell(x, b) == "" for x in methods for b in budgets):
        notes.append("Empty: not measured.")
    return [
        *([markdown(scores)] if rows else []),
        *(["\n".join(f"- {x}" for x in notes)] if notes else []),
        *paired(rows, kind),
        *([markdown(costs)] if facts else []),
        *given([x for x in everything if x.fixed], kind),
    ]


def given(rows: list[Row], kind: Traits) -> list[str]:
    """Return the table of methods whose settings fix what they keep, with its heading."""
    if not rows:
        return []
    selects = any(x.selected is not None for x in rows)
    lines = [["method", "kept", "held, MB", *["r L"] * selects, *(f"{escape(x)}{unit(kind)}" for x in kind.metrics)]]
    for row in rows:
        scores = [score(row.scores.get(x), kind, interval=x == kind.metrics[0]) for x in kind.metrics]
        if row.unreachable is not None:
            scores = [f"– ({escape(row.unreachable)})", *[""] * (len(scores) - 1)]
        of_each = "" if row.selected is None else f"{row.selected:,}"
        held_mb = held(row) if row.bytes_held else ""
        lines.append([escape(row.method), f"{row.tokens:,}", held_mb, *[of_each] * selects, *scores])
    return ["Settings that fix what is kept:", markdown(lines)]


def paired(rows: list[Row], kind: Traits) -> list[str]:
    """Return the table of differences to the best method and to the baseline, with its heading and notes."""
    rows = [x for x in rows if x.compared]
    columns = [(budget, name) for budget in budgets_of(rows) for name in ("best", BASELINE)]
    by_cell = {(x.method, x.budget): x.compared for x in rows}
    lines, notes = [["method"]], []
    used: list[tuple[int | None, str]] = []
    for budget, name in columns:
        to = [x.compared[name].to for x in rows if x.budget == budget and name in x.compared]
        if to:
            used.append((budget, name))
            lines[0].append(f"against {escape(to[0])}{', the best,' * (name == 'best')} at {budget:,}")
    for method in dict.fromkeys(x.method for x in rows):
        found = [by_cell.get((method, budget), {}).get(name) for budget, name in used]
        lines.append([escape(method), *("" if x is None else difference(x, kind) for x in found)])
    for row in rows:
        most = max(x.n for x in rows if x.budget == row.budget)
        fewer = [f"{escape(x.to)} ({x.n})" for x in row.compared.values() if x.n < most and x.verdict != "best"]
        if fewer:
            notes.append(f"{escape(row.method)} at {row.budget:,} with {', '.join(dict.fromkeys(fewer))}")
    if not used:
        return []
    points = ", in points of percent" if kind.percent else ""
    parts = [f"Paired differences in {escape(kind.metrics[0])}{points}:", markdown(lines)]
    return [*parts, f"- Compared on fewer prompts: {'; '.join(notes)}."] if notes else parts


def difference(x: Comparison, kind: Traits) -> str:
    """Format a comparison: "worse, -15 [-22, -8], p 0.002"."""
    if x.verdict == "best":
        return "best"
    if x.difference is None or x.low is None or x.high is None:
        return x.verdict

    def text(value: float) -> str:
        said = f"{100 * value:+.0f}" if kind.percent else f"{value:+.3g}"
        return "0" if not float(said) else said

    p = "" if x.p_holm is None or x.verdict == TOO_FEW else f", p {x.p_holm:.2g}"
    if x.p_holm is not None and p and x.p_holm < 1e-4:
        p = ", p < 0.0001"
    return f"{x.verdict}, {text(x.difference)} [{text(x.low)}, {text(x.high)}]{p}"


def unit(kind: Traits) -> str:
    return ", %" if kind.percent else ""


def score(value: Estimate | None, kind: Traits, interval: bool) -> str:
    """Format a score: "36 [20, 57]" for percentages, else "2.346 [2.331, 2.361]"."""
    if value is None:
        return ""
    digits = 0 if value.n < 1000 else 1

    def text(x: float) -> str:
        return f"{100 * x:.{digits}f}" if kind.percent else f"{x:.4g}" if abs(x) >= 1e-6 else "0"

    if not interval or value.low is None or value.high is None:
        return text(value.mean)
    return f"{text(value.mean)} [{text(value.low)}, {text(value.high)}]"


def number(x: float) -> str:
    """Format with three significant digits."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def held(row: Row) -> str:
    share = f" ({100 * row.bytes_held / row.bytes_full:.3g} %)" if row.bytes_full else ""
    return number(row.bytes_held / 1e6) + share


def markdown(rows: list[list[str]]) -> str:
    """Return a Markdown table, the first column flush left, the others flush right."""
    head, *body = rows
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(x) + " |" for x in (head, rule, *body))


def table(summary: Summary) -> str:
    """Return what the command prints: the main score of every method, a block per task and context."""
    blocks, groups = [], summary.groups()
    for task, context in dict.fromkeys(x[:2] for x in groups):
        kind = summary.traits[task]
        rows = [row for x, found in groups.items() if x[:2] == (task, context) for row in found]
        columns = [
            (point, budget)
            for point in dict.fromkeys(x.point for x in rows)
            for budget in budgets_of([x for x in rows if x.point == point])
        ]
        fixed, rows = [x for x in rows if x.fixed], [x for x in rows if not x.fixed]
        by_cell = {(x.point, x.method, x.budget): x for x in rows}
        methods = list(dict.fromkeys(x.method for x in rows))
        width = max((len(x.method) for x in (*rows, *fixed)), default=0)
        heads: dict[str, int] = {}
        for point, _ in columns:
            heads[point] = heads.get(point, 0) + 1
        counts = sorted({x.n for x in (*rows, *fixed) if x.unreachable is None})
        metric = f"{kind.metrics[0]}{unit(kind)}, of {listed(counts) or 'no'} prompts"
        block = [f"{task}, context {context:,} tokens: {metric}", ""]
        cells = {point: max(9 * count, len(point_title(point)) + 3) for point, count in heads.items()}
        block.append(" " * width + "".join(f"{point_title(x):>{n}}" for x, n in cells.items()))
        line = f"{'budget':{width}}"
        for point, n in cells.items():
            line += "".join(f"{'' if b is None else f'{b:,}':>9}" for p, b in columns if p == point).rjust(n)
        block += [line, "-" * len(line)]
        for method in methods:
            line = f"{method:{width}}"
            for point, n in cells.items():
                said = ""
                for budget in (b for p, b in columns if p == point):
                    row = by_cell.get((point, method, budget)) or by_cell.get((point, method, None))
                    said += f"{'' if row is None else brief(row, kind):>9}"
                line += said.rjust(n)
            block.append(line.rstrip())
        block += undecided(rows)
        if any(x.over or x.under for x in rows):
            block += ["", "* keeps over 5 % more than its budget, < over 5 % less"]
        if fixed:
            block += ["", "settings that fix what is kept:"]
        for row in fixed:
            where = f"{point_title(row.point)}, {row.tokens:,} kept"
            block.append(f"{row.method:{width}}  {brief(row, kind):>5}  {where}")
        reasons: dict[str, list[str]] = {}
        for row in (*rows, *fixed):
            if row.unreachable is not None:
                where = f"{row.method} {row.budget or ''} {row.point}"
                reasons.setdefault(row.unreachable, []).append(" ".join(where.split()))
        if reasons:
            block += ["", "- not reachable:"]
            block += [f"  {', '.join(who)}: {why}" for why, who in reasons.items()]
        blocks.append("\n".join(block))
    return "\n\n".join(blocks)


def undecided(rows: list[Row]) -> list[str]:
    """Return lines that name, for each cut point and budget, the best method and those not shown to be worse."""
    lines = []
    for point, budget in dict.fromkeys((x.point, x.budget) for x in rows):
        versus = {
            x.method: x.compared["best"]
            for x in rows
            if (x.point, x.budget) == (point, budget) and "best" in x.compared
        }
        if not versus:
            continue
        best = next(iter(versus.values())).to
        others = [x for x, y in versus.items() if y.verdict not in ("best", "worse")]
        said = ", ".join(others) or "none"
        if any(x.verdict == TOO_FEW for x in versus.values()):
            said = TOO_FEW
        lines.append(f"  {point_title(point)}, {budget:,}: {best}; {said}")
    return ["", "best mean; methods not shown to be worse (paired test, 5 %):", *lines] if lines else []


def brief(row: Row, kind: Traits) -> str:
    if row.unreachable is not None:
        return "-"
    return score(row.scores.get(kind.metrics[0]), kind, interval=False) + "*" * row.over + "<" * row.under
