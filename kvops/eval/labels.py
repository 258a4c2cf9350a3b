"""Labels at the ends of lines, instead of a legend, and the colours that pictures share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

#: Distinct at a glance, and in greyscale print; a picture names at most these seven series.
SEVEN = ("#2a6f97", "#bc6c25", "#d1495b", "#52a675", "#8d5a97", "#d9a404", "#3d3d3d")
GREY = "#b9b9b9"


def spread(places: Sequence[float], gap: float, low: float = -np.inf, high: float = np.inf) -> list[float]:
    """Move positions at least `gap` apart, keeping their order and changing them as little as possible.

    Args:
        places: the wanted positions, in any order.
        gap: the least distance between two of them.
        low, high: the allowed range. If it is too small, `low` takes precedence.

    Returns:
        The new positions, in the order of `places`.
    """
    order = np.argsort(places, kind="stable")
    offset = gap * np.arange(len(places))
    pools: list[list[float]] = []  # mean and size: least squares under an ascending order
    for x in np.asarray(places, dtype=float)[order] - offset:
        pools.append([x, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [[(a * m + b * n) / (m + n), m + n]]
    moved = np.concatenate([np.full(int(n), x) for x, n in pools] or [np.empty(0)])
    moved = np.maximum(np.minimum(moved, high - (offset[-1] if len(places) else 0)), low) + offset
    found = np.empty(len(places))
    found[order] = moved
    return found.tolist()


def label_ends(
    axes: Axes, ends: Sequence[tuple[float, float, str, Any]], height: float, size: float = 9, at: float = 1.03
) -> None:
    """Write the name of each series to the right of the axes, with a thin line to the end of its curve.

    Call this once the axes have their final limits and scales.

    Args:
        ends: for each series: x and y of the last point in data coordinates, name, colour.
        height: approximate height of the axes in inches, which sets the distance of the labels.
        size: font size in points.
        at: left edge of the labels, as a fraction of the axes' width.
    """
    to_axes = axes.transData + axes.transAxes.inverted()
    lines = max((text.count("\n") + 1 for _, _, text, _ in ends), default=1)
    wanted = [float(np.clip(to_axes.transform((x, y))[1], 0, 1)) for x, y, _, _ in ends]
    for (x, y, text, color), place in zip(ends, spread(wanted, 1.25 * lines * size / 72 / height, 0.0, 1.0)):
        axes.annotate(
            text,
            (x, y),
            (at, place),
            textcoords="axes fraction",
            color=color,
            fontsize=size,
            va="center",
            annotation_clip=False,
            arrowprops={
                **{"arrowstyle": "-", "color": color, "linewidth": 0.6, "alpha": 0.6, "shrinkA": 0, "shrinkB": 2},
                "relpos": (0, 0.5),  # the line starts at the left of the label
            },
        )


def label_points(axes: Axes, points: Sequence[tuple[float, float, str, Any]], height: float, size: float = 8) -> None:
    """Write the name of each point beside it, on the side where the axes have more space.

    Args:
        points: for each point: x and y in data coordinates, name, colour.
        height: approximate height of the axes in inches, which sets the distance of the labels.
        size: font size in points.
    """
    to_axes = axes.transData + axes.transAxes.inverted()
    places = [to_axes.transform((x, y)) for x, y, _, _ in points]
    for left in (True, False):
        chosen = [i for i, (x, _) in enumerate(places) if (x > 0.5) == left]
        moved = spread([places[i][1] for i in chosen], 1.2 * size / 72 / height, 0.0, 1.0)
        for i, place in zip(chosen, moved):
            x, y, text, color = points[i]
            axes.annotate(
                text,
                (x, y),
                (places[i][0] + (-0.06 if left else 0.06), place),
                textcoords="axes fraction",
                color=color,
                fontsize=size,
                ha="right" if left else "left",
                va="center",
                arrowprops={
                    **{"arrowstyle": "-", "color": color, "linewidth": 0.6, "alpha": 0.6, "shrinkA": 0, "shrinkB": 2},
                    "relpos": (1 if left else 0, 0.5),
                },
            )
