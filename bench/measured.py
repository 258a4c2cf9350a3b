"""The tables of measured rows in docs/, from bench/results/eval.json.

    python bench/measured.py            # writes them anew
    python bench/measured.py --check    # fails if a page is not what it would write

Between `<!-- measured: LagKV LocalKV -->` and `<!-- end -->` stand the rows of the methods of these names and of their
variants (LAQ: also LAQ++), or of `all`: the partial match of each budget, by whether the prompt was cut before the
question was known or after.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path

from kvops.eval.summary import SLACK

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "eval.json"
DOCS = ROOT / "docs"
BLOCK = re.compile(r"(<!-- measured: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def chosen(rows: list[dict], names: str) -> list[dict]:
    """The rows of the methods that a block asks for, of tasks with a partial match and one cut."""
    tasks = {row["task"] for row in rows if "partial" in row.get("scores", ())}
    rows = [row for row in rows if row["task"] in tasks and row["point"] in ("before", "after")]
    if names == "all":
        return rows
    found = {x: [row for row in rows if re.match(rf"{re.escape(x)}(?!\w)", row["method"])] for x in names.split()}
    for name, its in found.items():
        if not its:
            have = ", ".join(dict.fromkeys(row["method"] for row in rows))
            raise ValueError(f"measured: {names}: expected one of the methods {have}, got {name}")
    return [row for its in found.values() for row in its]


def budget(row: dict) -> int | None:
    """Tokens kept of each KV head; None: all."""
    return None if row["budget"] is None or row["budget"] >= row["context"] else row["budget"]


def over(row: dict) -> bool:
    """It holds more than its budget."""
    return "scores" in row and row["budget"] is not None and row["tokens"] > SLACK * row["budget"]


def number(x: int | None) -> str:
    return "all" if x is None else f"{x:,}"


def table(rows: list[dict], results: str) -> str:
    """A line of text and a table, a row for each method, task and point, a column for each budget."""
    tasks = list(dict.fromkeys(f"{row['task']}, {row['context']:,} tokens" for row in rows))
    prompts = " or ".join(map(str, sorted({row["scores"]["partial"]["n"] for row in rows if "scores" in row})))
    legend = "" if all("scores" in row for row in rows) else "; –: a budget that the method cannot keep to"
    legend += "; †: keeps over 5 % more than its budget" * any(map(over, rows))
    cells: dict[tuple[str, ...], dict[int | None, str]] = {}
    for row in rows:
        point = f"{row['point']} the question"
        if len(tasks) > 1:
            point = f"{row['task']}, {row['context']:,} tokens, {point}"
        line = cells.setdefault((row["method"], point), {})
        if budget(row) in line:
            raise ValueError(f"{results}: {row['method']}, {point}, budget {row['budget']}: expected one row, got two")
        line[budget(row)] = "–"
        if "scores" in row:
            mean, low, high = (100 * row["scores"]["partial"][x] for x in ("mean", "low", "high"))
            line[budget(row)] = f"{mean:.0f} [{low:.0f}, {high:.0f}]" + " †" * over(row)
    budgets = sorted({budget(row) for row in rows}, key=lambda x: sys.maxsize if x is None else x)
    lines = [["method", "cut", *map(number, budgets)], ["---"] * (len(budgets) + 2)]
    lines += [[*label, *(line.get(x, "") for x in budgets)] for label, line in cells.items()]
    return (
        "Partial match in %, in brackets the 95 % interval, by tokens kept of each KV head; "
        f"{'; '.join(tasks)}; {prompts} prompts{legend}\n"
        f"([bench/results/{RESULTS.name}]({results}), `python -m kvops.eval`):\n\n"
        + "\n".join(f"| {' | '.join(line)} |" for line in lines)
    )


def filled(page: Path, rows: list[dict]) -> str:
    """The page's text with every block as it should be."""
    results = Path(os.path.relpath(RESULTS, page.parent)).as_posix()
    return BLOCK.sub(lambda x: f"{x[1]}\n{table(chosen(rows, x[2]), results)}\n\n{x[3]}", page.read_text())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a page would change")
    check = parser.parse_args(argv).check
    rows = json.loads(RESULTS.read_text())["rows"]
    stale = {page: text for page in sorted(DOCS.rglob("*.md")) if (text := filled(page, rows)) != page.read_text()}
    if check and stale:
        sys.exit(f"not what {RESULTS.name} says: {', '.join(x.name for x in stale)}; run python bench/measured.py")
    for page, text in stale.items():
        page.write_text(text)
        print(page)


if __name__ == "__main__":
    main()
