"""The board: a page that shows quality against bytes held, with paired differences, of recorded runs and of one's own.

docs/board/index.html is the page: one file, which needs no server. Its last element holds the data as JSON, which this
module makes. `tools/board.py` writes the records of the repository into the page. `python -m kvops.eval --board FILE`
writes a copy that has a run of one's own as well. A wheel contains the page with the records.

A view is what can be compared: methods on the same prompts, with one model in one dtype, one task, context and cut
point. Files whose prompts are the same are joined, and a cell that several of them have counts once, as in the file
with the most cells. Scores, intervals and verdicts are those of `summary` and `statistics`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..bench.markdown import one_line
from ..bench.record import replace as write
from ..files import BOARD
from ..methods import Full, Policy, QueryPolicy, QueryStatistics
from ..methods.base import BudgetPolicy
from ..ops.rope import Rope
from ..vllm.plan import check as check_vllm
from .methods import METHODS, Rule, rule
from .report import listed
from .results import Cell, Run, cell_of, runs
from .specs import Refused
from .statistics import Comparison, compare, compare_each
from .summary import (
    POINT_TITLES,
    PROMPTS,
    Estimate,
    Key,
    Row,
    Summary,
    Traits,
    families,
    of_record,
    order,
    summarize,
    take_apart,
)

#: The filters: what a method can do with the settings that it was measured with.
FLAGS = {
    "query-free": "Scores tokens without queries, so it works with any attention kernel.",
    "decode": "Evicts while the model generates, not only from the prompt.",
    "engine-ready": "Runs in pages, with the vLLM plugin or in a PagedCache.",
    "one reading": "Needs no draft of an answer and no second reading of the prompt.",
}
#: A letter for each verdict. "-" is none.
VERDICTS = {"best": "B", "better": "b", "worse": "w", "undecided": "u", "too few prompts": "t", "not finite": "n"}
FULL = METHODS["full"].label
#: The settings of a view: what prompts depend on, and the dtype, on which bytes and scores of the full cache depend.
SAME = (*PROMPTS, "dtype")
#: What encloses the data in the page.
START, END = '<script type="application/json" id="data">\n', "\n</script>"


class Source(NamedTuple):
    """A run with its cells, or a summary without them.

    Attributes:
        name: of its file.
        settings: of the run.
        origins: where it was measured.
        lines: its cells.
        summary: its rows, if the cells are not known.
    """

    name: str
    settings: dict[str, Any]
    origins: list[dict[str, Any]]
    lines: Sequence[dict[str, Any]] = ()
    summary: Summary | None = None


def write_board(file: Path, found: Iterable[Source], rules: Iterable[Rule] = ()) -> None:
    """Write the page with the recorded runs and with others before them; see `board`.

    Raises:
        Refused: the page is not installed.
    """
    text = page()
    write(file, with_data(text, joined(board(found, rules, own=True), data_of(text))))


def page() -> str:
    """Return the page with the recorded runs."""
    try:
        return BOARD.read_text()
    except OSError as error:
        raise Refused(f"--board: expected the page {BOARD}, got {error.strerror}; reinstall kvops") from None


def data_of(text: str) -> dict[str, Any]:
    """Return the data of a page."""
    return json.loads(text.partition(START)[2].partition(END)[0])


def with_data(text: str, data: dict[str, Any]) -> str:
    """Return a page with other data, a line per view."""

    def compact(x: object) -> str:
        return json.dumps(x, separators=(",", ":"), allow_nan=False)

    lines = [f'"{x}":{compact(y)},' for x, y in data.items() if x != "views"]
    made = "\n".join(["{", *lines, '"views":[', ",\n".join(map(compact, data["views"])), "]}"])
    before, start, after = text.partition(START)
    _, end, after = after.partition(END)
    if not end:
        raise Refused(f"{BOARD}: expected the element {START.strip()}")
    return before + start + made.replace("<", "\\u003c") + end + after  # no text can end the element


def joined(own: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the data of two boards."""
    return {x: own[x] + y if isinstance(y, list) else {**own[x], **y} for x, y in other.items()}


def sources(files: Sequence[Path]) -> list[Source]:
    """Return the runs of results.jsonl files and the rows of summary.json files, those with the most cells first."""
    found = []
    for file in files:
        if file.suffix == ".json":
            try:
                summary = of_record(json.loads(file.read_text()))
            except ValueError as error:  # Refused is one
                raise Refused(f"{file}: {error}") from None
            found.append((1, len(summary.rows), [of_summary(file.name, summary)]))
        else:
            made = [Source(file.name, *head_of(x), x.lines) for x in runs([file])]
            found.append((0, sum(len(x.lines) for x in made), made))
    found.sort(key=lambda x: (x[0], -x[1], x[2][0].name if x[2] else ""))  # a summary lacks the scores by prompt
    return [x for *_, made in found for x in made]


def of_summary(name: str, summary: Summary) -> Source:
    return Source(name, summary.settings, summary.origins, summary=summary)


def head_of(run: Run) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return (run.head["settings"], [run.head["origin"]]) if run.head else ({}, [])


def board(found: Iterable[Source], rules: Iterable[Rule] = (), own: bool = False) -> dict[str, Any]:
    """Return the data of a board.

    Args:
        found: what to show.
        rules: the methods, where they are known. Methods of the library are known by their names.
        own: whether these are the runs of who writes the board, not the recorded ones.
    """
    sets: dict[str, list[Source]] = {}
    for source in found:
        if own:  # a file of the same name is another one
            source = source._replace(name=f"{source.name} (own)")
        sets.setdefault(json.dumps([source.settings.get(x) for x in SAME]), []).append(source)
    records: dict[str, list[str]] = {}
    for source in (x for same in sets.values() for x in same):
        records.setdefault(source.name, []).extend(map(where, source.origins))
    views, tasks = [], {}
    for same in sets.values():
        summary, owner, again = join(same)
        for key, rows in grouped(summary.rows).items():
            files = dict.fromkeys(owner[x.cell] for x in rows)
            of = {
                **said(same[0].settings),
                **dict(zip(("task", "context", "point"), key)),
                **({"own": True} if own else {}),
            }
            views.append({**of, "records": [*files], "again": again[key], **view(rows, summary.traits[key[0]])})
            tasks[key[0]] = one_line(summary.about(key[0]).partition("\n\n")[0])
    views.sort(key=lambda x: (x["model"], -len(x["rows"])))
    rule_of = {short(x.label): x for x in rules}
    return {
        "flags": FLAGS,
        "verdicts": {letter: verdict for verdict, letter in VERDICTS.items()},
        "points": POINT_TITLES,
        "tasks": dict(sorted(tasks.items())),
        "methods": {x: about(x, rule_of.get(x)) for x in sorted({row[0] for x in views for row in x["rows"]})},
        "records": {x: [*dict.fromkeys(y)] for x, y in sorted(records.items())},
        "views": views,
    }


def said(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the prompts depend on, without fingerprints."""
    found = {x: settings[x] for x in SAME if settings.get(x) is not None}
    for x in ("model", "text", "data"):
        if x in found:
            found[x] = re.sub(r" \([0-9a-f]{12}\)", "", listed(found[x]))
    return {"model": "synthetic caches", **found}


def where(origin: Mapping[str, Any]) -> str:
    """Return the command, without the folders of files, and the machine of a run."""
    machine = origin.get("machine") or {}
    processor = (machine.get("gpu") or {}).get("name") or machine.get("cpu")
    command = re.sub(r"(?<![^\s=])~?/(\S*/)?", "", str(origin.get("command") or ""))
    return one_line(" on ".join(str(x) for x in (command, processor) if x))


def join(same: Sequence[Source]) -> tuple[Summary, dict[Key, str], Counter[tuple[str, int, str]]]:
    """Join the results of files with the same prompts.

    Returns:
        The rows; the file of each; and how many cells of a task, context and cut point other files have too.
    """
    owner: dict[Key, str] = {}
    again: set[Key] = set()

    def first(key: Key, name: str) -> bool:
        if owner.setdefault(key, name) != name:
            again.add(key)
        return owner[key] == name

    lines = [y for x in same for y in x.lines if first(cell_of(y)[:-1], x.name)]
    heads = [{"settings": x.settings, "origin": {}} for x in same if x.lines]
    made = summarize(heads, lines) if lines else Summary({}, [], [], {})
    for x in same:
        if x.summary:
            made.rows += [y for y in x.summary.rows if first(y.cell, x.name)]
            made.traits = {**x.summary.traits, **made.traits}
            made.kinds |= x.summary.kinds
    made.rows.sort(key=lambda x: order(Cell(*x.cell, 0)))
    return made, owner, Counter(x[:3] for x in again)


def grouped(rows: Iterable[Row]) -> dict[tuple[str, int, str], list[Row]]:
    found: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        found.setdefault(row.cell[:3], []).append(row)
    return found


def view(rows: Sequence[Row], kind: Traits) -> dict[str, Any]:
    """Return the rows of a view, and its comparisons."""
    metric = kind.metrics[0]
    shown = [x for x in rows if metric in x.scores]
    return {
        **{"metric": metric, "percent": kind.percent, "better": kind.better},
        "rows": [row_of(x, x.scores[metric]) for x in shown],
        "families": [family(x, shown, kind) for x in families(shown, {shown[0].task: kind}).values()] if shown else [],
        "unreachable": [[short(x.method), x.budget, x.unreachable] for x in rows if x.unreachable is not None],
    }


def row_of(x: Row, score: Estimate) -> list[Any]:
    """Return method, budget, prompts, score, its interval, tokens kept, bytes held and of the full cache, and mark."""
    return [short(x.method), x.budget, x.n, *map(rounded, score[:3]), x.tokens, x.bytes_held, x.bytes_full, x.mark]


def family(rows: Sequence[Row], shown: Sequence[Row], kind: Traits) -> dict[str, Any]:
    """Return the comparisons of the rows of a budget, of each with each other and with the full cache.

    Returns:
        The rows' places in `shown`, the full cache last; for each pair of them, in the order of `combinations`, the
        difference and its interval in ten-thousandths; the verdict of each on each as a baseline; the best one, and the
        verdicts of a comparison with it.
    """
    sign = 1 if kind.better == "higher" else -1
    scores = {x.method: x.prompts for x in rows if x.prompts}
    found = compare_each(scores, sign)
    full = next((x for x in shown if x.method == FULL and x.budget is None), None)
    if full and full.prompts:
        made = compare({**scores, FULL: full.prompts}, sign, None, FULL)
        found |= {(x, FULL): made[x][FULL] for x in scores if FULL in made[x]}
    best = next((x.compared["best"].to for x in rows if "best" in x.compared), None)
    for row in rows:
        if not row.prompts:  # of a summary, which has two comparisons
            for name, x in row.compared.items():
                if x.verdict != "best":  # a comparison with the best is none with a baseline, but its numbers are
                    found[row.method, x.to] = x._replace(verdict="") if name == "best" else x
    members, places = [*rows, *([full] if full else [])], {x.cell: i for i, x in enumerate(shown)}
    names = [x.method for x in members]
    pairs = [found.get(x) or mirrored(found.get(x[::-1])) for x in combinations(names, 2)]
    to_best = [x.compared.get("best") for x in members]
    return {
        "rows": [places[x.cell] for x in members],
        "pairs": [None if y is None else round(1e4 * y) for x in pairs for y in (x[1:4] if x else (None,) * 3)],
        "verdicts": "".join(letter(found.get((x, y))) for x in names for y in names),
        "best": names.index(best) if best in names else None,
        "to_best": "".join(letter(x if x and x.to == best else None) for x in to_best),
    }


def mirrored(x: Comparison | None) -> Comparison | None:
    """Return the numbers of a comparison the other way round."""
    if x is None or x.difference is None or x.low is None or x.high is None:
        return x
    return x._replace(difference=-x.difference, low=-x.high, high=-x.low)


def letter(x: Comparison | None) -> str:
    return VERDICTS.get(x.verdict, "-") if x else "-"


def rounded(x: float | None) -> float | None:
    return round(x, 5) if x is not None and math.isfinite(x) else None


def short(method: str) -> str:
    """Return a method's name without the folders of files."""
    return re.sub(r"=\S*/", "=", one_line(method))


def about(method: str, known: Rule | None = None) -> dict[str, Any]:
    """Return a method's family and those of `FLAGS` that hold for it.

    Args:
        method: its name on the board.
        known: the method, if it is not one of the library's.
    """
    name = take_apart(method)
    if name.peer or not (name.base or known):
        return {"family": "others", "flags": []}
    options = [
        x for x in name.variant.split() if not re.search(r"\.[a-z]\w*$", x)
    ]  # without files, which are elsewhere
    try:
        made = known or rule(":".join(filter(None, (name.base, ",".join(options)))))
        policy = made.policy(512 if made.budgeted else None, 2048, 8)
    except ValueError:  # settings of another version
        return {"family": "others", "flags": []}
    return {"family": made.entry.family, "flags": flags_of(policy, made.storage != "pre_rope")}


def flags_of(policy: Policy, rounds: bool = False) -> list[str]:
    """Return those of `FLAGS` that hold for a policy. rounds: whether its caches round what they hold."""
    if isinstance(policy, Full):
        return []
    holds = {
        "query-free": not isinstance(policy, QueryPolicy) and not policy.needs.statistics,
        "decode": policy.buffer is not None or not isinstance(policy, BudgetPolicy),
        "engine-ready": in_pages(policy, rounds),
        "one reading": policy.needs.stage is None,
    }
    return [x for x in FLAGS if holds[x]]


def in_pages(policy: Policy, rounds: bool) -> bool:
    """Whether the vLLM plugin or, which also rounds, a PagedCache takes a policy."""
    if "w_o" in policy.needs.model:
        policy = replace(policy, w_o=torch.empty(0, 0))  # type: ignore[type-var]  # as the engine reads it
    if "statistics" in policy.needs.model:
        made = QueryStatistics.of(torch.zeros(1, 1, 1, 2), Rope.of(2))
        policy = replace(policy, statistics=made)  # type: ignore[type-var]
    try:
        policy.check_paged_cache(1)
        return True
    except (TypeError, ValueError):
        pass
    try:
        check_vllm(policy)
        return not rounds
    except (TypeError, ValueError):
        return False
