"""Aggregate results into rows, one per task, context, cut point, method and budget over all batches, with intervals.

Rows are in the order of METHODS and TASKS, whatever the order of the lines.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, median, stdev
from types import MappingProxyType
from typing import Any, NamedTuple

from ..bench.markdown import one_line
from ..methods import LagKV
from .methods import METHODS, rule
from .results import Cell, cell_of
from .specs import Refused
from .statistics import Comparison, compare
from .tasks import POINTS, TASKS, Task

LAGS = [x.label for x in METHODS.values() if x.policy is LagKV]
#: Other names of our methods.
ALIASES = {"ObservedAttention": "H2O", "Knorm": "L2"}
LEVEL = 0.95  # of the intervals
Key = tuple[str, int, str, str, int | None]  # task, context, point, method, budget
#: The settings that prompts depend on. Files that differ in one of them have no prompts in common.
PROMPTS = ("model", "text", "data", "prompts", "seed")
BASELINE = METHODS["snapkv"].label  # every method is compared with it and with the best
#: Titles of the cut points.
POINT_TITLES = {
    "before": "cut before the question",
    "after": "cut after the question",
    "stream": "evicting as the text streams by",
    "chunked": "evicting after each chunk of the prompt",
    "once": "cut once",
}
SLACK = 1.05  # methods that keep more than SLACK times the budget are marked, and those that keep less than 1 / SLACK


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity if that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def point_title(point: str) -> str:
    return POINT_TITLES.get(point, point)


class Estimate(NamedTuple):
    """A mean over n prompts and its 95 % interval; None if a single number gives no interval."""

    mean: float
    low: float | None
    high: float | None
    n: int


def wilson(mean: float, n: int) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion. For the mean of n numbers in [0, 1] it is conservative.

    Args:
        mean: the proportion, in [0, 1].
        n: the number of samples, at least 1.

    Returns:
        The lower and upper end.
    """
    z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
    center, spread = mean + z * z / (2 * n), z * math.sqrt((mean * (1 - mean) + z * z / (4 * n)) / n)
    low, high = (center - spread) / (1 + z * z / n), (center + spread) / (1 + z * z / n)
    return min(max(0.0, low), mean), max(min(1.0, high), mean)  # exactly 0 and 1 despite rounding


def student_cdf(t: float, freedom: int) -> float:
    """Student's t distribution function for integer degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    square, term, total = math.cos(angle) ** 2, 1.0, 0.0
    if freedom % 2:
        term = math.cos(angle)
        for i in range(1, freedom, 2):
            total += term
            term *= square * (i + 1) / (i + 2)
        inside = 2 / math.pi * (angle + math.sin(angle) * total)
    else:
        for i in range(0, freedom, 2):
            total += term
            term *= square * (i + 1) / (i + 2)
        inside = math.sin(angle) * total
    return (1 + inside) / 2


def student_quantile(p: float, freedom: int) -> float:
    """Return the quantile t > 0 of Student's t distribution for p > 0.5, by bisection."""
    low, high = 0.0, 1.0
    while student_cdf(high, freedom) < p:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, freedom) < p else (low, middle)
    return (low + high) / 2


def estimate(values: Sequence[float], percent: bool) -> Estimate:
    """Return the mean and its interval: Wilson's for proportions, else mean +- t s / sqrt(n) (Student's t).

    Args:
        values: one or more numbers.
        percent: whether they are proportions in [0, 1].
    """
    n, mean = len(values), fmean(values)
    if not math.isfinite(mean):
        return Estimate(mean, None, None, n)
    if percent:
        return Estimate(mean, *wilson(mean, n), n)
    if n < 2:
        return Estimate(mean, None, None, n)
    spread = student_quantile(0.5 + LEVEL / 2, n - 1) * stdev(values) / math.sqrt(n)
    return Estimate(mean, mean - spread, mean + spread, n)


@dataclass
class Row:
    """The result of a method at a budget, on all prompts of a task and context."""

    task: str
    context: int
    point: str
    method: str
    budget: int | None
    n: int = 0  # prompts
    scores: dict[str, Estimate] = field(default_factory=dict)
    tokens: int = 0  # kept per KV head, averaged over layers and prompts
    bytes_held: int = 0  # per prompt
    bytes_full: int = 0
    prefill_s: float | None = None  # per prompt, median over the batches
    decode_tokens_per_s: float | None = None  # of a whole batch, median over the batches
    depths: dict[float, float] = field(default_factory=dict)  # the main score by depth
    positions: dict[int, float] = field(default_factory=dict)  # the loss of each stretch of the text, by its last token
    prompts: dict[int, float] = field(default_factory=dict, repr=False)  # the main score by prompt, if comparable
    compared: dict[str, Comparison] = field(default_factory=dict)  # with the "best" and with the BASELINE
    unreachable: str | None = None

    @property
    def cell(self) -> Key:
        return self.task, self.context, self.point, self.method, self.budget

    @property
    def over(self) -> bool:
        """Whether it holds more than its budget."""
        return self.budget is not None and self.unreachable is None and self.tokens > SLACK * self.budget

    @property
    def under(self) -> bool:
        """Whether it holds less than its budget, although it has evicted tokens."""
        if self.budget is None or self.unreachable is not None:
            return False
        return SLACK * self.tokens < self.budget and self.bytes_held < self.bytes_full

    @property
    def mark(self) -> str:
        """What tables append to its numbers."""
        return " †" * self.over + " ‡" * self.under

    @property
    def fixed(self) -> bool:
        """Whether it evicts, but has no budget because its settings fix what it keeps."""
        return self.budget is None and take_apart(self.method).base != METHODS["full"].label

    @property
    def selected(self) -> int | None:
        """The tokens that LagKV selects from each partition, r L, if its settings are given."""
        name = take_apart(self.method)
        if not self.fixed or name.peer or name.base not in LAGS:
            return None
        try:
            policy = rule(f"{name.base}:{name.variant.replace(' ', ',')}").policy(None, 1, 1)
        except ValueError:  # settings of another version
            return None
        assert isinstance(policy, LagKV)
        return policy.kept


class Traits(NamedTuple):
    """What a report needs to know about a task; for an unknown task it is guessed from the scores."""

    metrics: tuple[str, ...]  # at least one
    percent: bool
    better: str  # "higher" or "lower"; "": not known


def traits(spec: str, lines: Iterable[dict[str, Any]], kind: type[Task] | None = None) -> Traits:
    """Return what a report needs to know about a task.

    Args:
        spec: the task's name and options.
        lines: its cells.
        kind: its class; None for the one in `TASKS` of that name, if there is one.

    Raises:
        Refused: the task's scores are proportions, but some lie outside [0, 1].
    """
    lines = list(lines)
    found = dict.fromkeys(x for line in lines for x in line.get("scores", ()))
    shares = all(0 <= x <= 1 for line in lines for scores in line.get("scores", {}).values() for x in scores)
    kind = kind or TASKS.get(spec.partition(":")[0])
    if kind is None:
        return Traits(tuple(found) or ("score",), shares, "")
    if kind.percent and not shares:
        raise Refused(f"{spec}: expected scores in [0, 1] for this task")
    known = [x for x in kind.metrics if x in found] or kind.metrics[: not found]  # no budget was reachable
    return Traits((*known, *(x for x in found if x not in known)), kind.percent, kind.better)


class Name(NamedTuple):
    """The parts of a method's name in tables."""

    base: str | None  # the label in METHODS; None for a method from elsewhere
    peer: str  # the other implementation: "kvpress" of "kvpress KeyDiff"
    variant: str  # options: "lag=128" of "LagKV lag=128"


def take_apart(label: str) -> Name:
    """Split a method's name in tables into its parts."""
    who, _, rest = label.partition(" ")
    rest = ALIASES.get(rest, rest)
    for peer, name in (("", label), (who, rest)):
        known = [x.label for x in METHODS.values() if name == x.label or name.startswith(x.label + " ")]
        if known:
            base = max(known, key=len)
            return Name(base, peer, name[len(base) + 1 :])
    return Name(None, "", "")


def method_order(label: str) -> tuple[int, str, list[str | float], str]:
    """Sort key: the order of METHODS, then variants, then other implementations; unknown methods come last."""
    name, labels = take_apart(label), [x.label for x in METHODS.values()]
    parts = re.split(r"(\d+(?:\.\d+)?)", name.variant)  # texts and numbers in turns
    variant = [float(x) if i % 2 else x for i, x in enumerate(parts)]
    return labels.index(name.base) if name.base else len(labels), name.peer, variant, label


def order(cell: Cell) -> tuple[Any, ...]:
    """Sort key of the tables: tasks as in TASKS, short contexts first, methods as in METHODS, large budgets first."""
    name = cell.task.partition(":")[0]
    points = [*getattr(TASKS.get(name), "points", ()), *POINTS]
    return (
        list(TASKS).index(name) if name in TASKS else len(TASKS),
        cell.task,
        cell.context,
        points.index(cell.point) if cell.point in points else len(points),
        cell.point,
        method_order(cell.method),
        -math.inf if cell.budget is None else -cell.budget,
        cell.batch,
    )


def describe(cell: Cell) -> str:
    budget = "everything" if cell.budget is None else f"budget {cell.budget}"
    return f"{cell.task}, context {cell.context}, {cell.point}, {cell.method}, {budget}, batch {cell.batch}"


@dataclass
class Summary:
    """One or more results files as rows.

    Attributes:
        settings: by name; a list of values if the files differ.
        origins: where they were measured.
        rows: in the order of the tables.
        traits: by task.
        kinds: the classes of the tasks that are not in `TASKS`.
    """

    settings: dict[str, Any]
    origins: list[dict[str, Any]]
    rows: list[Row]
    traits: dict[str, Traits]
    kinds: dict[str, type[Task]] = field(default_factory=dict)

    def about(self, task: str) -> str:
        """Return what a task measures: its docstring."""
        kind = self.kinds.get(task) or TASKS.get(task.partition(":")[0])
        return inspect.cleandoc(kind.__doc__ or "") if kind else "This version does not know the task."

    def groups(self) -> dict[tuple[str, int, str], list[Row]]:
        """Group the rows by task, context and cut point."""
        found: dict[tuple[str, int, str], list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.cell[:3], []).append(row)
        return found

    def record(self) -> dict[str, Any]:
        """Return the content of summary.json."""
        return {"settings": self.settings, "origins": self.origins, "rows": [_record(x) for x in self.rows]}


def summarize(
    heads: list[dict[str, Any]], lines: list[dict[str, Any]], classes: Mapping[str, type[Task]] = MappingProxyType({})
) -> Summary:
    """Aggregate results into rows.

    Args:
        heads, lines: what `results.load` returned.
        classes: of tasks that are not in `TASKS`, by their names in the lines.

    Raises:
        Refused: there are no cells, or one was measured twice.
    """
    if not lines:
        raise Refused("nothing to report: the results have no measured cells")
    cells: dict[Cell, dict[str, Any]] = {}
    twice: dict[Cell, None] = {}
    for line in lines:
        cell = cell_of(line)
        if cell in cells:
            twice[cell] = None
        cells[cell] = line
    if twice:
        named = sorted(twice, key=order)
        more = f"; and {len(named) - 5} more" if len(named) > 5 else ""
        raise Refused(f"measured twice: {'; '.join(map(describe, named[:5]))}{more}")
    ordered = sorted(cells, key=order)
    kinds = {
        task: traits(task, [cells[x] for x in ordered if x.task == task], classes.get(task))
        for task in dict.fromkeys(x.task for x in ordered)
    }
    groups: dict[Key, list[dict[str, Any]]] = {}
    for cell in ordered:
        groups.setdefault(cell[:-1], []).append(cells[cell])
    rows = [_row(cell, group, kinds[cell[0]]) for cell, group in groups.items()]
    if not differing(heads):
        _compare(rows, groups, kinds)
    return Summary(_settings(heads), _distinct(x["origin"] for x in heads), rows, kinds, {**classes})


def of_line(line: dict[str, Any], task: Task) -> tuple[Row, Traits]:
    """Return one cell as a row."""
    kind = traits(line["task"], [line], type(task))
    return _row(cell_of(line)[:-1], [line], kind), kind


def of_record(record: dict[str, Any]) -> Summary:
    """The summary that a summary.json holds, so that its pictures can be drawn again without the cells.

    Args:
        record: what `Summary.record` returned.

    Raises:
        Refused: it is not such a record.
    """
    rows = []
    try:
        for x in record["rows"]:
            row = Row(x["task"], x["context"], x["point"], x["method"], x["budget"])
            if "unreachable" in x:
                row.unreachable = x["unreachable"]
            else:
                for name in ("tokens", "bytes_held", "bytes_full", "prefill_s", "decode_tokens_per_s", "n"):
                    setattr(row, name, x[name])
                for name, score in x["scores"].items():
                    mean = math.nan if score["mean"] is None else score["mean"]
                    row.scores[name] = Estimate(mean, score["low"], score["high"], score["n"])
                depths, positions = x.get("depths", {}), x.get("positions", {})
                row.depths = dict(zip(depths.get("depth", ()), depths.get("score", ())))
                row.positions = dict(zip(positions.get("ends", ()), positions.get("loss", ())))
                row.compared = {name: Comparison(**found) for name, found in x.get("compared", {}).items()}
            rows.append(row)
        kinds = {}
        for task in dict.fromkeys(x.task for x in rows):
            means = [{y: [z.mean] for y, z in x.scores.items()} for x in rows if x.task == task]
            kinds[task] = traits(task, [{"scores": x} for x in means])
        return Summary(record["settings"], record["origins"], rows, kinds)
    except (KeyError, TypeError, AttributeError) as error:
        raise Refused(f"expected a summary.json of python -m kvops.eval, got {type(error).__name__}: {error}") from None


def _row(cell: Key, lines: list[dict[str, Any]], kind: Traits) -> Row:
    row, fails = Row(*cell), [x["unreachable"] for x in lines if "unreachable" in x]
    if fails:  # a mean over the remaining prompts would not be comparable with other methods
        some = f" (so for {len(fails)} of {len(lines)} batches)" if len(fails) < len(lines) else ""
        row.unreachable = one_line(fails[0]) + some
        return row
    sizes = [len(next(iter(x["scores"].values()))) for x in lines]
    row.n = sum(sizes)
    for metric in kind.metrics:
        values = [value for x in lines for value in x["scores"].get(metric, ())]
        if values:
            row.scores[metric] = estimate(values, kind.percent)
    for name in ("tokens", "bytes_held", "bytes_full"):
        setattr(row, name, round(sum(x[name] * size for x, size in zip(lines, sizes)) / row.n))
    row.prefill_s = median(x["prefill_s"] / size for x, size in zip(lines, sizes)) or None  # 0: a shared reading
    rates = [x["steps"] * size / x["decode_s"] for x, size in zip(lines, sizes) if x["decode_s"] > 0 and x["steps"]]
    row.decode_tokens_per_s = median(rates) if rates else None
    by_depth: dict[float, list[float]] = {}
    for x in lines:
        for depth, score in zip(x.get("depths") or (), x["scores"].get(kind.metrics[0], ())):
            if depth is not None:
                by_depth.setdefault(round(depth, 6), []).append(score)
    row.depths = {x: fmean(by_depth[x]) for x in sorted(by_depth)}
    row.positions = _positions(lines, sizes)
    return row


def differing(heads: Iterable[dict[str, Any]]) -> list[str]:
    """Return the settings of `PROMPTS` in which the files differ."""
    found = [x["settings"] for x in heads]
    return [name for name in PROMPTS if len({json.dumps(x.get(name)) for x in found}) > 1]


def _compare(rows: list[Row], groups: dict[Key, list[dict[str, Any]]], kinds: dict[str, Traits]) -> None:
    """Set `prompts` of all rows, and `compared`, by the main score. Full is not compared."""
    scored = [x for x in rows if kinds[x.task].metrics[0] in x.scores]
    most: dict[tuple[Any, ...], int] = {}
    for row in scored:
        sizes = (len(x["scores"].get(kinds[row.task].metrics[0], ())) for x in groups[row.cell])
        most[row.cell[:3]] = max(most.get(row.cell[:3], 0), *sizes)
    for row in scored:
        row.prompts = by_prompt(groups[row.cell], kinds[row.task].metrics[0], most[row.cell[:3]])
    for (task, *_), family in families(scored, kinds).items():
        kind = kinds[task]
        metric, sign = kind.metrics[0], 1 if kind.better == "higher" else -1
        whole = max(row.n for row in family)
        rivals = [x for x in family if not x.over and x.n == whole and math.isfinite(x.scores[metric].mean)]
        best = max(rivals, key=lambda x: sign * x.scores[metric].mean).method if rivals else None
        found = compare({row.method: row.prompts for row in family}, sign, best, BASELINE)
        for row in family:
            row.compared = found[row.method]


def families(rows: Iterable[Row], kinds: Mapping[str, Traits]) -> dict[tuple[str, int, str, int], list[Row]]:
    """Return the rows that are compared with each other, by task, context, cut point and budget."""
    found: dict[tuple[str, int, str, int], list[Row]] = {}
    for row in rows:
        if row.budget is not None and kinds[row.task].metrics[0] in row.scores and kinds[row.task].better:
            found.setdefault((row.task, row.context, row.point, row.budget), []).append(row)
    return found


def by_prompt(lines: list[dict[str, Any]], metric: str, most: int) -> dict[int, float]:
    """Return the scores of a cell's lines by the number of the prompt.

    Only the last batch may have less prompts than the others. most: the prompts of a batch, if there is but one line.
    """
    sizes = {x["batch"]: len(x["scores"].get(metric, ())) for x in lines}
    size = most if len(sizes) == 1 and 0 not in sizes else max(sizes.values())
    return {x["batch"] * size + i: y for x in lines for i, y in enumerate(x["scores"].get(metric, ()))}


def _positions(lines: list[dict[str, Any]], sizes: list[int]) -> dict[int, float]:
    """Average the batches' means over all prompts."""
    found: dict[int, list[tuple[float, int]]] = {}
    for line, size in zip(lines, sizes):
        more = line.get("more") or {}
        for end, loss in zip(more.get("ends", ()), more.get("loss", ())):
            found.setdefault(end, []).append((loss, size))
    return {x: sum(loss * size for loss, size in y) / sum(size for _, size in y) for x, y in sorted(found.items())}


def _record(row: Row) -> dict[str, Any]:
    of = dict(zip(("task", "context", "point", "method", "budget"), row.cell))
    if row.unreachable is not None:
        return {**of, "unreachable": row.unreachable}
    scores = {name: {x: _finite(y) for x, y in score._asdict().items()} for name, score in row.scores.items()}
    names = ("tokens", "bytes_held", "bytes_full", "prefill_s", "decode_tokens_per_s", "n")
    found = {**of, "scores": scores, **{x: getattr(row, x) for x in names}}
    if row.compared:
        found["compared"] = {name: x._asdict() for name, x in row.compared.items()}
    if row.depths:
        found["depths"] = {"depth": list(row.depths), "score": [_finite(x) for x in row.depths.values()]}
    if row.positions:
        found["positions"] = {"ends": list(row.positions), "loss": [_finite(x) for x in row.positions.values()]}
    return found


def _finite(x: float | None) -> float | None:
    return None if x is None or not math.isfinite(x) else x


def _distinct(values: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each value once, in an order that does not depend on the order of the files."""
    found = {json.dumps(x, sort_keys=True): x for x in values}
    return [found[x] for x in sorted(found)]


def _settings(heads: list[dict[str, Any]]) -> dict[str, Any]:
    """Return each setting as a value, or as a list of values if the files differ."""
    found = _distinct(x["settings"] for x in heads)
    names = dict.fromkeys(name for x in found for name in x)
    values = {name: list({json.dumps(x.get(name)): x.get(name) for x in found}.values()) for name in names}
    return {name: x[0] if len(x) == 1 else x for name, x in values.items()}


def _overlap(a: Estimate, b: Estimate) -> bool:
    """Whether the intervals overlap; True if one is missing."""
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return True
    return a.low <= b.high and b.low <= a.high


def leaders(rows: list[Row], kind: Traits) -> list[Row]:
    """Return the best method that evicts and meets the budget, if its interval overlaps no other's.

    Args:
        rows: rows of one task, context, cut point and budget.
        kind: the task's traits.

    Returns:
        No row, one row, or several with equal scores.
    """
    metric, sign = kind.metrics[0], 1 if kind.better == "higher" else -1
    rivals = [x for x in rows if x.budget is not None and not x.over and metric in x.scores]
    rivals = [x for x in rivals if x.scores[metric].low is not None]
    if not (rivals and kind.better):
        return []
    top = max((x.scores[metric] for x in rivals), key=lambda x: sign * x.mean)
    others = [x.scores[metric] for x in rivals if x.scores[metric].mean != top.mean]
    clear = others and not any(_overlap(x, top) for x in others)
    return [x for x in rivals if x.scores[metric].mean == top.mean] if clear else []
