"""Pictures of a summary. The same numbers give the same bytes: fixed settings, no dates or versions in the file."""

from __future__ import annotations

import io
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator

from ..bench.record import replace
from .labels import GREY, SEVEN, label_ends, label_points
from .specs import parse
from .summary import Row, Summary, Traits, method_order, perplexity, point_title
from .tasks import TASKS

MOST = 6  # methods that a picture names, beside Full; the others are grey
MARKERS = "osD^vh"
SHADES = LinearSegmentedColormap.from_list("score", ["#f4f1ea", "#9dbfd6", "#2a6f97", "#12324a"])
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "text.parse_math": False,
}
FULL = "#7a7a7a"  # the whole cache, to compare with
MORE = 1.06  # margin beside the first and last value of a logarithmic axis
Style = dict[str, Any]


def leading(rows: list[Row], kind: Traits, most: int = MOST) -> list[str]:
    """Return the methods that a picture names: those with the best main score, averaged over cut points and budgets.

    Methods that exceed their budget come last.
    """
    found: dict[str, list[float]] = {}
    over: dict[str, bool] = {}
    for row in rows:
        if row.budget is not None:
            found.setdefault(row.method, []).append(row.scores[kind.metrics[0]].mean)
            over[row.method] = over.get(row.method, False) or row.over
    sign = 1 if kind.better == "lower" else -1
    ranked = sorted(found, key=lambda x: (over[x], sign * fmean(found[x]), method_order(x)))
    return sorted(ranked[:most], key=method_order)


def styles(rows: list[Row], kind: Traits) -> dict[str, Style]:
    """Return colour, marker and line of each method that evicts: the leading ones stand out, the others are grey."""
    named = leading(rows, kind)
    looks: dict[str, Style] = {}
    for label in sorted({x.method for x in rows if x.budget is not None}, key=method_order):
        if label in named:
            i = named.index(label)
            looks[label] = {"color": SEVEN[i], "marker": MARKERS[i], "markersize": 5, "linewidth": 1.4, "zorder": 3}
            looks[label] |= {"markeredgecolor": "white", "markeredgewidth": 0.6}
        else:
            looks[label] = {"color": GREY, "marker": ".", "markersize": 4, "linewidth": 0.8, "zorder": 1}
    return looks


def in_grey(looks: dict[str, Style]) -> str:
    """Return a caption that lists the grey methods."""
    names = [x.replace(" ", "\xa0") for x, look in looks.items() if look["color"] == GREY]  # a name stays in one line
    return "\n".join(textwrap.wrap(f"Grey: {', '.join(names)}", 140)).replace("\xa0", " ") if names else ""


def best(rows: list[Row], kind: Traits, budget: int) -> str:
    """Return the method with the best mean at a budget, and that mean; "" if the task does not say what is better."""
    found = [x for x in rows if x.budget == budget and not x.over]
    if not found or not kind.better:
        return ""
    sign = 1 if kind.better == "lower" else -1
    top = min(found, key=lambda x: sign * x.scores[kind.metrics[0]].mean)
    mean = top.scores[kind.metrics[0]].mean
    return f"{top.method}, {100 * mean:.0f} %" if kind.percent else f"{top.method}, {mean:.3g}"


def finding(rows: list[Row], kind: Traits, task: str, context: int) -> str:
    """Return the picture's title: the best method at the middle budget, for each cut point."""
    budgets = sorted({x.budget for x in rows if x.budget is not None})
    middle = budgets[len(budgets) // 2]
    tops = {x.point: best([y for y in rows if y.point == x.point], kind, middle) for x in rows if x.budget is not None}
    said = [f"{top} ({point_title(point)})" for point, top in tops.items() if top]
    if not said:
        return f"{task}, {context:,} tokens, {prompts(rows)}"
    return f"{task}, {prompts(rows)}: best score at {middle:,} of {context:,} tokens: {'; '.join(said)}"


class Picture(Figure):
    """A figure that a notebook shows, whether or not pyplot is in use."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, dpi=120, format="png", metadata={"Software": None})
        return picture.getvalue()


@contextmanager
def figure(path: Path | None, title: str, height: float, width: float = 8.0, caption: str = "") -> Iterator[Picture]:
    """Yield a figure, independent of the user's matplotlib settings, and write it at the end, if there is a path.

    8 inches are 960 pixels, so text of 9 points is legible at 800.
    """
    defaults = {x: y for x, y in matplotlib.rcParamsDefault.items() if x != "backend"}
    settings: dict[Any, Any] = {**defaults, **STYLE}
    with matplotlib.rc_context(settings):
        page = Picture(figsize=(width, height), layout="constrained")
        page.suptitle("\n".join(textwrap.wrap(title, round(12.2 * width))), x=0.008, ha="left", fontsize=11)
        if caption:
            page.supxlabel(caption, x=0.008, ha="left", fontsize=8, color="#777777")
        yield page
        if path:
            replace(path, page._repr_png_())


def values(row: Row, kind: Traits) -> tuple[float, float, float]:
    """Return the mean, and how far the interval extends below and above it."""
    score, factor = row.scores[kind.metrics[0]], 100 if kind.percent else 1
    low, high = (score.mean if x is None else x for x in (score.low, score.high))
    return factor * score.mean, factor * (score.mean - low), factor * (high - score.mean)


def bars(look: dict[str, Any]) -> dict[str, Any]:
    """Return the style of error bars: paler than the marker, since most of them overlap."""
    return {"ecolor": to_rgba(look["color"], 0.4), "elinewidth": 0.8}


def scale(axis: Axes, rows: list[Row], kind: Traits) -> None:
    if kind.percent:
        axis.set(ylim=(-4, 104), yticks=range(0, 101, 20))
    else:  # with few prompts the interval may be far wider than the range of the means
        means = [x.scores[kind.metrics[0]].mean for x in rows]
        room = 0.3 * (max(means) - min(means)) or 1.0
        axis.set_ylim(min(means) - room, max(means) + room)
    axis.grid(axis="y", color="#ececec", linewidth=0.7)
    axis.set_axisbelow(True)


def unit(kind: Traits) -> str:
    said = f" ({kind.better} is better)" if kind.better else ""
    return f"{kind.metrics[0]}, %" if kind.percent else f"{kind.metrics[0]}{said}"


def prompts(rows: list[Row]) -> str:
    low, high = min(x.n for x in rows), max(x.n for x in rows)
    return f"{high} prompts" if low == high else f"{low} to {high} prompts"


def measured(rows: list[Row], kind: Traits) -> list[Row]:
    """Return the rows that have the main score, without those whose settings fix what is kept."""
    return [x for x in with_score(rows, kind) if not x.fixed]


def with_score(rows: list[Row], kind: Traits) -> list[Row]:
    found = [x for x in rows if kind.metrics and kind.metrics[0] in x.scores]
    return [x for x in found if np.isfinite(x.scores[kind.metrics[0]].mean)]


def accuracy(summary: Summary, task: str, context: int, path: Path | None = None) -> Figure | None:
    """Draw the main score against the tokens kept: a panel per cut point, a line per method; None if no row has a
    budget."""
    kind = summary.traits[task]
    rows = measured([x for x in summary.rows if (x.task, x.context) == (task, context)], kind)
    points = list(dict.fromkeys(x.point for x in rows if x.budget is not None))
    if not points:
        return None
    looks = styles(rows, kind)
    named = [x for x in looks if looks[x]["color"] != GREY]
    budgets = sorted({x.budget for x in rows if x.budget is not None})
    octaves = np.diff(np.log2(budgets)).min() if len(budgets) > 1 else 2.0
    places = dict(zip(named, np.linspace(-0.1, 0.1, len(named)) if len(named) > 1 else [0.0]))
    title = f"{finding(rows, kind, task, context)}. Bars: 95 % intervals"
    with figure(path, title, 0.9 + 3.4 * len(points), caption=in_grey(looks)) as page:
        axes = page.subplots(len(points), 1, sharey=True, sharex=True, squeeze=False)[:, 0]
        for axis, point in zip(axes, points):
            scale(axis, rows, kind)
            ends: list[tuple[float, float, str, Any]] = []
            for label in dict.fromkeys(x.method for x in rows):
                found = sorted((x for x in rows if (x.point, x.method) == (point, label)), key=lambda x: x.tokens)
                if not found:
                    continue
                y, low, high = np.array([values(x, kind) for x in found]).T
                if found[0].budget is None:  # keeps everything: a line to compare with
                    axis.axhline(y[0], color=FULL, linestyle="--", linewidth=1.2)
                    axis.axhspan(y[0] - low[0], y[0] + high[0], color=FULL, alpha=0.1, linewidth=0)
                    ends.append((budgets[-1], y[0], label, FULL))
                    continue
                look = looks[label]
                x = np.array([max(1, x.tokens) for x in found]) * 2 ** (octaves * places.get(label, 0.0))
                if label in named:
                    axis.errorbar(x, y, (low, high), **look, **bars(look))
                    ends.append((x[-1], y[-1], label, look["color"]))
                else:
                    axis.plot(x, y, **look)
            axis.set_xscale("log", base=2)
            axis.xaxis.set(major_locator=FixedLocator(budgets), minor_locator=NullLocator())
            axis.set_xticks(budgets, [f"{x:,}" for x in budgets])
            axis.set(title=point_title(point), ylabel=unit(kind))
            label_ends(axis, ends, 2.7)
        axes[-1].set_xlabel("tokens kept per KV head (log scale; ticks: the budgets)")
    return page


def throughput(summary: Summary, task: str, context: int, path: Path) -> bool:
    """Draw the main score against decode throughput (LaCache, Fig. 7): a row per cut point, a panel per budget."""
    kind = summary.traits[task]
    rows = measured([x for x in summary.rows if (x.task, x.context) == (task, context)], kind)
    rows = [x for x in rows if x.decode_tokens_per_s]
    points = list(dict.fromkeys(x.point for x in rows if x.budget is not None))
    budgets = sorted({x.budget for x in rows if x.budget is not None}, reverse=True)
    if not points:
        return False
    looks, rates = styles(rows, kind), [x.decode_tokens_per_s for x in rows if x.decode_tokens_per_s]
    wide = max(rates) > 5 * min(rates)
    title = f"{finding(rows, kind, task, context)}. Bars: 95 % intervals; speed: median over batches"
    width = max(8.0, 2.4 * len(budgets))
    with figure(path, title, 1.1 + 3.0 * len(points), width, in_grey(looks)) as page:
        axes = page.subplots(len(points), len(budgets), sharex=True, sharey=True, squeeze=False)
        for i, point in enumerate(points):
            for j, budget in enumerate(budgets):
                axis = axes[i, j]
                scale(axis, rows, kind)
                if wide:
                    axis.set_xscale("log")
                    digits = (1, 2, 5) if max(rates) < 30 * min(rates) else (1,)
                    steps = [a * 10**b for b in range(-1, 8) for a in digits]
                    low, high = min(rates) / MORE, max(rates) * MORE
                    axis.set_xlim(low, high)
                    axis.xaxis.set(major_locator=FixedLocator([x for x in steps if low <= x <= high]))
                    axis.xaxis.set(minor_locator=NullLocator(), minor_formatter=NullFormatter())
                else:  # from 0, so that noise does not look like a difference
                    axis.set_xlim(0, max(rates) * MORE)
                axis.xaxis.set_major_formatter("{x:,g}")
                marks: list[tuple[float, float, str, Any]] = []
                for row in rows:
                    if row.point == point and row.budget in (None, budget) and row.decode_tokens_per_s:
                        y, low, high = values(row, kind)
                        look = looks.get(row.method, {"color": FULL, "marker": "o", "markersize": 6})
                        look = look | {"linestyle": ""}
                        if look["color"] == GREY:
                            axis.plot(row.decode_tokens_per_s, y, **look)
                            continue
                        axis.errorbar(row.decode_tokens_per_s, y, [[low], [high]], **look, **bars(look))
                        marks.append((row.decode_tokens_per_s, y, row.method, look["color"]))
                label_points(axis, marks, 2.3)
                axis.set_title(f"budget {budget:,}")
            axes[i, 0].set_ylabel(f"{point_title(point)}\n{unit(kind)}")
        for axis in axes[-1]:
            axis.set_xlabel("decode, tokens/s of a batch")
    return True


def sizes(rows: list[Row]) -> list[tuple[str, Callable[[Row], bool]]]:
    """Return the budgets as columns for several contexts: in tokens, or as fractions if they grow with the context."""
    by_context: dict[int, set[int]] = {}
    for row in rows:
        if row.budget is not None:
            by_context.setdefault(row.context, set()).add(row.budget)
    ranked = {context: sorted(x, reverse=True) for context, x in by_context.items()}
    if not ranked:
        return [("", partial(_has_budget, 0))]
    one = next(iter(ranked.values()))
    shares = [[x[i] / context for context, x in ranked.items()] for i in range(len(one))] if (
        len({len(x) for x in ranked.values()}) == 1
    ) else []  # fmt: skip
    slack = 1 / min(ranked)
    if any(x != one for x in ranked.values()) and shares and all(max(x) - min(x) <= slack for x in shares):
        return [(f"{100 * max(x):.3g} % kept", partial(_has_rank, ranked, i)) for i, x in enumerate(shares)]
    every = sorted({x for found in ranked.values() for x in found}, reverse=True)
    return [(f"budget {x:,}", partial(_has_budget, x)) for x in every]


def _has_rank(ranked: dict[int, list[int]], i: int, row: Row) -> bool:
    return row.budget == ranked[row.context][i]


def _has_budget(budget: int, row: Row) -> bool:
    return row.budget == budget


def heatmap(summary: Summary, task: str, point: str, path: Path) -> bool:
    """Draw the main score by context and depth (LagKV, Fig. 8-11; LAQ, Fig. 4): a panel per method and budget."""
    kind = summary.traits[task]
    asked = [x for x in summary.rows if (x.task, x.point) == (task, point)]
    rows = [x for x in asked if len(x.depths) > 1]
    contexts = sorted({x.context for x in rows})
    cut = [x for x in rows if x.budget is not None or x.fixed]
    if len(contexts) < 2 or not cut:
        return False
    depths = sorted({x for row in rows for x in row.depths})
    methods, columns = list(dict.fromkeys(x.method for x in asked)), sizes([x for x in asked if x.budget is not None])
    fixed = {x.method for x in rows if x.fixed}
    blocks = 1 if len(methods) <= 5 else 2
    height = -(-len(methods) // blocks)
    factor = 100 if kind.percent else 1
    top = factor * (1 if kind.percent else max(max(x.depths.values()) for x in rows))
    means = {
        x: fmean([y for row in cut if row.method == x for y in row.depths.values()])
        for x in dict.fromkeys(x.method for x in cut)
    }
    title = f"{task}, {point_title(point)}, {prompts(rows)} each"
    if kind.better:
        reached = (max if kind.better == "higher" else min)(means.values())
        shown_best = f"{100 * reached:.0f} %" if kind.percent else f"{reached:.3g}"
        title += f": best mean: {' and '.join(x for x in means if means[x] == reached)}, {shown_best}"
    shape = (1.2 + blocks * (1.0 + 1.75 * len(columns)), 1.2 + 1.15 * height)
    with figure(path, title, shape[1], shape[0]) as page:
        axes = page.subplots(height, blocks * len(columns), squeeze=False, sharex=True, sharey=True)
        for axis in axes.flat:
            axis.set_visible(False)
        for k, method in enumerate(methods):
            block, i = divmod(k, height)
            for j, (title, chosen) in enumerate(columns[:1] if method in fixed else columns):
                axis = axes[i, block * len(columns) + j]
                axis.set_visible(True)
                image = np.full((len(depths), len(contexts)), np.nan)
                for row in rows:
                    if row.method == method and (row.budget is None or chosen(row)):
                        for depth, score in row.depths.items():
                            image[depths.index(depth), contexts.index(row.context)] = factor * score
                drawn = axis.imshow(image, aspect="auto", cmap=SHADES, vmin=0, vmax=top, interpolation="nearest")
                axis.set_facecolor("#ffffff")
                if np.isnan(image).all():
                    tried = any(x.method == method and chosen(x) for x in asked if x.budget is not None)
                    text = "unreachable" if tried else "not measured"
                    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", size=7)
                axis.spines[:].set_visible(False)
                axis.tick_params(length=0, labelsize=7, labelleft=j == 0, labelbottom=i == height - 1)
                shown = range(0, len(depths), max(1, (len(depths) - 1) // 2))
                axis.set_yticks(shown, [f"{100 * depths[x]:.0f}" for x in shown])
                axis.set_xticks(range(len(contexts)), [f"{x:,}" for x in contexts])
                if j == 0:
                    axis.set_ylabel("depth, %", fontsize=7)
                    axis.set_title(method, loc="left", weight="bold", fontsize=8.5)
                if i == 0:
                    axis.set_title(title, loc="right", fontsize=8.5, color="#555555")
                if i == height - 1 or k == len(methods) - 1:
                    axis.set_xlabel("context, tokens", fontsize=7)
                    axis.tick_params(labelbottom=True)
        bar = page.colorbar(drawn, ax=axes, shrink=min(1.0, 3 / height), aspect=30, pad=0.01)
        bar.set_label(unit(kind))
        bar.outline.set_visible(False)
    return True


def partitions(summary: Summary, path: Path) -> bool:
    """Draw LagKV's main score against r L over the key's length (LagKV, Table 1 and Fig. 2): a panel per cut point."""
    series: dict[str, dict[tuple[int, int], list[tuple[float, Row]]]] = {}  # by cut point, then by digits and context
    for row in summary.rows:
        digits = key_digits(row.task)
        if row.selected and digits and with_score([row], summary.traits[row.task]):
            found = series.setdefault(row.point, {}).setdefault((digits, row.context), [])
            found.append((row.selected / digits, row))
    if max((len(x) for found in series.values() for x in found.values()), default=0) < 2:
        return False
    title = "LagKV's score by r L over the digits of the key. Bars: 95 % intervals"
    with figure(path, title, 0.9 + 3.4 * len(series)) as page:
        axes = page.subplots(len(series), 1, sharey=True, sharex=True, squeeze=False)[:, 0]
        for axis, (point, lines) in zip(axes, series.items()):
            kind = summary.traits[next(iter(lines.values()))[0][1].task]
            scale(axis, [row for x in lines.values() for _, row in x], kind)
            axis.axvline(1, color=FULL, linewidth=0.8, linestyle=":")
            ends: list[tuple[float, float, str, Any]] = []
            for i, ((digits, context), points) in enumerate(sorted(lines.items())):
                points.sort(key=lambda x: (x[0], x[1].tokens))
                color = SEVEN[i % len(SEVEN)]
                look: Style = {"color": color, "marker": MARKERS[i % len(MARKERS)], "markersize": 5, "linewidth": 1.2}
                y, low, high = np.array([values(row, kind) for _, row in points]).T
                axis.errorbar([x for x, _ in points], y, (low, high), **look, **bars(look))
                ends.append((points[-1][0], y[-1], f"{digits} digits,\n{context:,} tokens", color))
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:g}")
            axis.set(title=point_title(point), ylabel=unit(kind))
            label_ends(axis, ends, 2.7)
        axes[-1].set_xlabel("r L / digits of the key (log scale)")
    return True


def key_digits(task: str) -> int | None:
    """Return the digits of the key that a task asks for, from its name and options; None for tasks without one key."""
    name = task.partition(":")[0]
    default = {x.name: x.default for x in fields(TASKS[name])} if name in TASKS else {}
    try:
        found = {**default, **parse("task", task, TASKS)[1]}.get("digits")
    except ValueError:  # a task of another version
        return None
    return found if isinstance(found, int) and found > 0 else None


def overview(summary: Summary, path: Path) -> bool:
    """Draw the main score of every method on every task, if there are several of one kind at one budget.

    The tasks are in the order of their best methods.
    """
    rows = [x for task in summary.traits for x in measured(summary.rows, summary.traits[task]) if x.task == task]
    rows = [x for x in rows if x.budget is not None and not x.over]
    kinds = {(x.metrics[0], x.percent, x.better) for x in summary.traits.values()}
    cells = {(x.context, x.point, x.budget) for x in rows}
    if len({x.task for x in rows}) < 4 or len(kinds) != 1 or len(cells) != 1:
        return False
    kind = next(iter(summary.traits.values()))
    sign = -1 if kind.better == "lower" else 1
    found = {(x.method, x.task): x.scores[kind.metrics[0]].mean for x in rows}
    methods = sorted({x.method for x in rows}, key=method_order)

    def place(task: str) -> tuple[int, str]:
        values = {x: sign * found[x, task] for x in methods if (x, task) in found}
        return methods.index(max(values, key=values.__getitem__)), task

    tasks = sorted({x.task for x in rows}, key=place)
    prefix = re.match(r"(.*[:=,])?", os.path.commonprefix(tasks))
    cut = len(prefix[0]) if prefix else 0
    image = np.array([[found.get((x, task), np.nan) for task in tasks] for x in methods])
    context, point, budget = cells.pop()
    title = (
        f"{kind.metrics[0]} at {budget:,} of {context:,} tokens, {point_title(point)}, {prompts(rows)}; columns in the "
        "order of their best methods"
    )
    shares = kind.percent or bool((np.nan_to_num(image) <= 1).all() and (np.nan_to_num(image) >= 0).all())
    with figure(path, title, 1.9 + 0.28 * len(methods), 1.6 + 0.47 * len(tasks)) as page:
        axis = page.subplots()
        low, high = (0, 1) if shares else (None, None)
        axis.imshow(image, aspect="auto", cmap=SHADES if sign > 0 else SHADES.reversed(), vmin=low, vmax=high)
        middle = np.nanmean([0, 1] if shares else [np.nanmin(image), np.nanmax(image)])
        for (i, j), value in np.ndenumerate(image):
            dark = sign * value > sign * middle
            text = "–" if np.isnan(value) else f"{100 * value:.0f}" if shares else f"{value:.2g}"
            axis.text(j, i, text, ha="center", va="center", size=7.5, color="white" if dark else "#333333")
        axis.set_xticks(range(len(tasks)), [x[cut:] for x in tasks], rotation=40, ha="right", rotation_mode="anchor")
        axis.set_yticks(range(len(methods)), methods)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    return True


def positions(summary: Summary, task: str, context: int, path: Path) -> bool:
    """Draw perplexity by position in the text (LaCache, Table 1 and Fig. 5): a panel per budget."""
    kind = summary.traits[task]
    rows = [x for x in summary.rows if (x.task, x.context) == (task, context) and x.positions and not x.fixed]
    budgets = sorted({x.budget for x in rows if x.budget is not None}, reverse=True)
    scored = measured(rows, kind)
    if not budgets or not scored:
        return False
    looks = styles(scored, kind)
    title = finding(scored, kind, task, context)
    with figure(path, title, 0.9 + 3.4 * len(budgets), caption=in_grey(looks)) as page:
        axes = page.subplots(len(budgets), 1, sharey=True, sharex=True, squeeze=False)[:, 0]
        for axis, budget in zip(axes, budgets):
            axis.set_yscale("log")
            lines: list[tuple[float, float, str, Any]] = []
            for row in (x for x in rows if x.budget in (None, budget)):
                ends = np.array(list(row.positions))
                middles = (ends + np.concatenate([[0], ends[:-1]])) / 2
                look = looks.get(row.method, {"color": FULL if row.budget is None else GREY, "linestyle": "--"})
                y = [perplexity(x) for x in row.positions.values()]
                axis.plot(middles, y, **look)
                if look["color"] != GREY:
                    lines.append((middles[-1], y[-1], row.method, look["color"]))
            axis.grid(axis="y", color="#ececec", linewidth=0.7)
            axis.set(title=f"budget {budget:,}", ylabel="perplexity")
            axis.set_xlim(0, context)
            axis.xaxis.set_major_formatter("{x:,g}")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 7)))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_locator(NullLocator())
            label_ends(axis, lines, 2.7)
        axes[-1].set_xlabel("position in the text, tokens")
    return True
