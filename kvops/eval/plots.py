"""Pictures of a summary. The same numbers give the same bytes: own settings, no dates, no version in the file."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator

from ..bench.record import replace
from ..methods.table import FAMILIES, METHODS
from .summary import Row, Summary, Traits, method_order, take_apart

#: Of the families of methods; within one a method is a marker.
COLORS = dict(
    zip(FAMILIES, ("#9a9a9a", "#bc6c25", "#2a6f97", "#d1495b", "#52a675", "#3d3d3d", "#8d5a97", "#d9a404"), strict=True)
)
POINTS = {
    "before": "cut before the question",
    "after": "cut after the question",
    "stream": "evicting as the text streams by",
    "chunked": "evicting after each chunk of the prompt",
}
OTHERS = "others", "#e377c2"
MARKERS = "osD^vP"
VARIANTS = "X<>p*hd8"
LINES = ("-", "--", "-.")
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
MORE = 1.06  # room beside the first and last value of a logarithmic axis


def styles(labels: list[str]) -> dict[str, dict[str, Any]]:
    """Of lines, by method: family, colour, marker; variants have a marker of their own and are dashed, others'
    implementations are hollow and dotted. Methods of others share a colour; each has a marker and a line of its own."""
    found, variants, others = {}, 0, 0
    for label in sorted(set(labels), key=method_order):
        name = take_apart(label)
        family, color, marker = *OTHERS, "o"
        entry = next((x for x in METHODS.values() if x.label == name.base), None)
        if entry is not None:
            members = [x.label for x in METHODS.values() if x.family == entry.family]
            family, color, marker = entry.family, COLORS[entry.family], MARKERS[members.index(entry.label)]
        line = "--" if name.variant else "-"
        if family == OTHERS[0]:
            marker, line = VARIANTS[others % len(VARIANTS)], LINES[others // len(VARIANTS) % len(LINES)]
            others += 1
        elif name.variant:
            marker, variants = VARIANTS[variants % len(VARIANTS)], variants + 1
        hollow = {"markerfacecolor": "white", "linestyle": ":"} if name.peer else {}
        look = {"color": color, "marker": marker, "linestyle": line, "markersize": 5.5, "linewidth": 1.2}
        look |= {"markeredgecolor": color if hollow else "white", "markeredgewidth": 0.6, **hollow}
        found[label] = {"family": family, "look": look}
    return found


@contextmanager
def figure(
    path: Path, title: str, width: float, height: float, looks: dict[str, dict[str, Any]] | None = None
) -> Iterator[Figure]:
    """A page that is written at the end, with a legend for looks, whatever the user's settings of matplotlib are."""
    if looks:  # which is below the title
        height = max(height, 0.8 + 0.172 * (len(looks) + len({x["family"] for x in looks.values()})))
    defaults = {x: y for x, y in matplotlib.rcParamsDefault.items() if x != "backend"}
    settings: dict[Any, Any] = {**defaults, **STYLE}
    with matplotlib.rc_context(settings):
        page = Figure(figsize=(width + (1.9 if looks else 0), height), layout="constrained")
        page.suptitle(title, x=0.008, ha="left", fontsize=11)
        yield page
        if looks:
            legend(page, looks)
        picture = io.BytesIO()
        page.savefig(picture, dpi=120, format="png", metadata={"Software": None})
    replace(path, picture.getvalue())


def legend(page: Figure, looks: dict[str, dict[str, Any]]) -> None:
    """At the side, by family."""
    entries: list[tuple[Line2D, str]] = []
    heads = []
    for family in dict.fromkeys(x["family"] for x in looks.values()):
        heads.append(len(entries))
        entries.append((Line2D([], [], linestyle=""), family))
        entries += [(Line2D([], [], **x["look"]), label) for label, x in looks.items() if x["family"] == family]
    made = page.legend(*zip(*entries), loc="outside right center", fontsize=8, handlelength=2.4, labelspacing=0.35)
    for i in heads:
        made.get_texts()[i].set(weight="bold", color="#555555", fontsize=7.5)


def values(row: Row, kind: Traits) -> tuple[float, float, float]:
    """Mean, and how far the interval reaches below and above it."""
    score, factor = row.scores[kind.metrics[0]], 100 if kind.percent else 1
    low, high = (score.mean if x is None else x for x in (score.low, score.high))
    return factor * score.mean, factor * (score.mean - low), factor * (high - score.mean)


def bars(look: dict[str, Any]) -> dict[str, Any]:
    """Of intervals: paler than what they belong to, since most of them overlap."""
    return {"ecolor": to_rgba(look["color"], 0.4), "elinewidth": 0.8}


def scale(axis: Axes, rows: list[Row], kind: Traits) -> None:
    if kind.percent:
        axis.set(ylim=(-4, 104), yticks=range(0, 101, 20))
    else:  # of a few prompts the interval may be far wider than what the means span
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


def perplexity(loss: float) -> float:
    """exp(loss), of any loss."""
    return math.exp(loss) if loss < 700 else math.inf


def point_title(point: str) -> str:
    return POINTS.get(point, point)


def measured(rows: list[Row], kind: Traits) -> list[Row]:
    """Those that have the main score."""
    found = [x for x in rows if kind.metrics and kind.metrics[0] in x.scores]
    return [x for x in found if np.isfinite(x.scores[kind.metrics[0]].mean)]


def accuracy(summary: Summary, task: str, context: int, path: Path) -> bool:
    """The main score against what the cache holds: a panel per point of the cut, a line per method."""
    kind = summary.traits[task]
    rows = measured([x for x in summary.rows if (x.task, x.context) == (task, context)], kind)
    points = list(dict.fromkeys(x.point for x in rows if x.budget is not None))
    if not points:
        return False
    looks = styles([x.method for x in rows])
    names = [x for x in looks if any(y.method == x and y.budget is not None for y in rows)]
    budgets = sorted({x.budget for x in rows if x.budget is not None})
    octaves = np.diff(np.log2(budgets)).min() if len(budgets) > 1 else 2.0
    places = dict(zip(names, np.linspace(-0.14, 0.14, len(names)) if len(names) > 1 else [0.0]))
    title = f"{task}, context {context:,} tokens, {prompts(rows)}; bars: 95 % intervals"
    with figure(path, title, 4.6 * len(points), 5.0, looks) as page:
        axes = page.subplots(1, len(points), sharey=True, squeeze=False)[0]
        for axis, point in zip(axes, points):
            scale(axis, rows, kind)
            for label, look in looks.items():
                found = sorted((x for x in rows if (x.point, x.method) == (point, label)), key=lambda x: x.tokens)
                if not found:
                    continue
                y, low, high = np.array([values(x, kind) for x in found]).T
                if found[0].budget is None:  # keeps everything: a line to compare with
                    axis.axhline(y[0], color=look["look"]["color"], linestyle="--", linewidth=1.2)
                    axis.axhspan(y[0] - low[0], y[0] + high[0], color=look["look"]["color"], alpha=0.13, linewidth=0)
                    continue
                x = np.array([max(1, x.tokens) for x in found]) * 2 ** (octaves * places[label])
                axis.errorbar(x, y, (low, high), **look["look"], **bars(look["look"]))
            axis.set_xscale("log", base=2)
            axis.xaxis.set(major_locator=FixedLocator(budgets), minor_locator=NullLocator())
            axis.set_xticks(budgets, [f"{x:,}" for x in budgets])
            axis.set(title=point_title(point), xlabel="tokens kept per KV head (ticks: the budgets), side by side")
        axes[0].set_ylabel(unit(kind))
        for name in looks:  # what keeps everything has no marker here
            if name not in names:
                looks[name]["look"] |= {"marker": "", "linestyle": "--"}
    return True


def throughput(summary: Summary, task: str, context: int, path: Path) -> bool:
    """The main score against decode throughput (LaCache, Fig. 7): a row per point of the cut, a panel per budget."""
    kind = summary.traits[task]
    rows = measured([x for x in summary.rows if (x.task, x.context) == (task, context)], kind)
    rows = [x for x in rows if x.decode_tokens_per_s]
    points = list(dict.fromkeys(x.point for x in rows if x.budget is not None))
    budgets = sorted({x.budget for x in rows if x.budget is not None}, reverse=True)
    if not points:
        return False
    looks, rates = styles([x.method for x in rows]), [x.decode_tokens_per_s for x in rows if x.decode_tokens_per_s]
    wide = max(rates) > 5 * min(rates)
    title = f"{task}, context {context:,} tokens, {prompts(rows)}; bars: 95 % intervals; speed: median over batches"
    with figure(path, title, 3.3 * len(budgets), 0.9 + 3.1 * len(points), looks) as page:
        axes = page.subplots(len(points), len(budgets), sharex=True, sharey=True, squeeze=False)
        for i, point in enumerate(points):
            for j, budget in enumerate(budgets):
                axis = axes[i, j]
                scale(axis, rows, kind)
                for row in rows:
                    if row.point == point and row.budget in (None, budget):
                        y, low, high = values(row, kind)
                        look = looks[row.method]["look"] | {"linestyle": "", "markersize": 7}
                        axis.errorbar(row.decode_tokens_per_s, y, [[low], [high]], **look, **bars(look))
                axis.set_title(f"budget {budget:,}")
                if wide:
                    axis.set_xscale("log")
                    digits = (1, 2, 5) if max(rates) < 30 * min(rates) else (1,)
                    steps = [a * 10**b for b in range(-1, 8) for a in digits]
                    low, high = min(rates) / MORE, max(rates) * MORE
                    axis.set_xlim(low, high)
                    axis.xaxis.set(major_locator=FixedLocator([x for x in steps if low <= x <= high]))
                    axis.xaxis.set(minor_locator=NullLocator(), minor_formatter=NullFormatter())
                else:  # from 0, lest noise look like a difference
                    axis.set_xlim(0, max(rates) * MORE)
                axis.xaxis.set_major_formatter("{x:,g}")
            axes[i, 0].set_ylabel(f"{point_title(point)}\n{unit(kind)}")
        for axis in axes[-1]:
            axis.set_xlabel("decode, tokens/s of a batch")
        for x in looks.values():
            x["look"]["linestyle"] = ""
    return True


def sizes(rows: list[Row]) -> list[tuple[str, Callable[[Row], bool]]]:
    """The budgets as columns for several contexts: in tokens, or, where they grow with the context, as its share."""
    by_context: dict[int, set[int]] = {}
    for row in rows:
        if row.budget is not None:
            by_context.setdefault(row.context, set()).add(row.budget)
    ranked = {context: sorted(x, reverse=True) for context, x in by_context.items()}
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
    """The main score by context and depth (LagKV, Fig. 8-11; LAQ, Fig. 4): a panel per method and budget."""
    kind = summary.traits[task]
    asked = [x for x in summary.rows if (x.task, x.point) == (task, point)]
    rows = [x for x in asked if len(x.depths) > 1]
    contexts = sorted({x.context for x in rows})
    cut = [x for x in rows if x.budget is not None]
    if len(contexts) < 2 or not cut:
        return False
    depths = sorted({x for row in rows for x in row.depths})
    methods, columns = list(dict.fromkeys(x.method for x in asked)), sizes([x for x in asked if x.budget is not None])
    blocks = 1 if len(methods) <= 5 else 2
    height = -(-len(methods) // blocks)
    factor = 100 if kind.percent else 1
    top = factor * (1 if kind.percent else max(max(x.depths.values()) for x in rows))
    shape = (1.2 + blocks * (1.0 + 1.75 * len(columns)), 1.2 + 1.15 * height)
    with figure(path, f"{task}, {point_title(point)}, {prompts(rows)} per context", *shape) as page:
        axes = page.subplots(height, blocks * len(columns), squeeze=False, sharex=True, sharey=True)
        for axis in axes.flat:
            axis.set_visible(False)
        for k, method in enumerate(methods):
            block, i = divmod(k, height)
            for j, (title, chosen) in enumerate(columns):
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


def positions(summary: Summary, task: str, context: int, path: Path) -> bool:
    """Perplexity by position in the text (LaCache, Table 1 and Fig. 5): a panel per budget."""
    rows = [x for x in summary.rows if (x.task, x.context) == (task, context) and x.positions]
    budgets = sorted({x.budget for x in rows if x.budget is not None}, reverse=True)
    if not budgets:
        return False
    looks = styles([x.method for x in rows])
    title = f"{task}, context {context:,} tokens, {prompts(rows)}"
    with figure(path, title, 3.8 * len(budgets), 4.6, looks) as page:
        axes = page.subplots(1, len(budgets), sharey=True, squeeze=False)[0]
        for axis, budget in zip(axes, budgets):
            for row in (x for x in rows if x.budget in (None, budget)):
                ends = np.array(list(row.positions))
                middles = (ends + np.concatenate([[0], ends[:-1]])) / 2
                look = looks[row.method]["look"] | {"markersize": 4.5}
                axis.plot(middles, [perplexity(x) for x in row.positions.values()], **look)
            axis.grid(axis="y", color="#ececec", linewidth=0.7)
            axis.set(title=f"budget {budget:,}", xlabel="position in the text, tokens", yscale="log")
            axis.set_xlim(0, context)
            axis.xaxis.set_major_formatter("{x:,g}")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 7)))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_locator(NullLocator())
        axes[0].set_ylabel("perplexity")
    return True
