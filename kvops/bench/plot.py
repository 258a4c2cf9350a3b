"""The benchmark as a picture: fraction of the memory bandwidth, and how many times longer PyTorch takes."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from .record import replace

plt.rcParams["text.parse_math"] = False  # names may come from elsewhere
COLORS = {"float32": "#12324a", "bfloat16": "#2a6f97", "float16": "#89b4cc"}
OTHERS = {"eager": ("o", "eager PyTorch"), "compile": ("s", "torch.compile")}
BAR = 0.19  # inches
OPAQUE = {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5}}  # where a label crosses the line of 100 %


def formats() -> list[str]:
    """The picture formats that matplotlib can write here."""
    return sorted(Figure().canvas.get_supported_filetypes())


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw the record of a CPU or GPU run.

    Args:
        record: what `python -m kvops.bench --json` wrote.
        path: the picture; its suffix decides the format.
    """
    figure = draw_gpu(record) if "gpu" in record["machine"] else draw_cpu(record)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, format=path.suffix[1:].lower())
    plt.close(figure)
    replace(path, picture.getvalue())


def head(figure: Figure, finding: str, where: str) -> None:
    """What was found, and where it was measured, at the upper left."""
    lines = [y for x in (finding, where) for y in textwrap.wrap(x, 100)]
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=10.5)


def draw_cpu(record: dict[str, Any]) -> Figure:
    """The largest n that was measured: a group per operator and form, with a bar and a line of marks per dtype."""
    rows = [r for r in record["rows"] if "bandwidth" in r]
    largest = max(r["shape"][2] for r in rows)
    rows = [r for r in rows if r["shape"][2] == largest]
    names = list(dict.fromkeys((r["operator"], r["form"]) for r in rows))
    dtypes = [x for x in COLORS if any(r["dtype"] == x for r in rows)]
    places: dict[tuple[str, str, str], float] = {}
    middles, y = [], 0.0
    for name in names:  # from the top, with a gap after each group
        group = [x for x in dtypes if any((r["operator"], r["form"], r["dtype"]) == (*name, x) for r in rows)]
        places |= {(*name, x): y - i for i, x in enumerate(group)}
        middles.append(y - (len(group) - 1) / 2)
        y -= len(group) + 0.7
    at = [places[r["operator"], r["form"], r["dtype"]] for r in rows]
    figure, (left, right) = plt.subplots(
        *(1, 2), figsize=(8, 1.7 - BAR * y), sharey=True, layout="constrained", gridspec_kw={"wspace": 0.03}
    )

    shares = [100 * r["bandwidth"]["share"] for r in rows]
    bars = left.barh(at, shares, 0.85, color=[COLORS[r["dtype"]] for r in rows])
    left.bar_label(
        bars, ["{share:.0%} of {of}".format(**r["bandwidth"]) for r in rows], padding=3, fontsize=8, **OPAQUE
    )
    left.axvline(100, color="black", lw=0.8, ls="--", zorder=0)
    left.set(xlabel="% of memory bandwidth", title="kvops: bytes moved per second")
    left.set_yticks(middles, [f"{op}\n{form}".strip() for op, form in names], fontsize=8.5)
    left.set_xlim(0, 1.38 * max(100, *shares))
    for i, dtype in enumerate(reversed(dtypes)):
        left.text(0.99 - 0.24 * i, max(at) + 1.2, dtype, transform=left.get_yaxis_transform(), color=COLORS[dtype],
                  ha="right", va="center", fontsize=9, weight="bold", **OPAQUE)  # fmt: skip

    medians = []
    for other, (marker, label) in OTHERS.items():
        found = [(y, r) for y, r in zip(at, rows) if other in r["ratio"]]
        if not found:
            continue
        ratios = [r["ratio"][other]["best"] for _, r in found]
        medians.append(f"{label} takes {np.median(ratios):.2g}x")
        filled = [COLORS[r["dtype"]] if other == "eager" else "white" for _, r in found]
        for (y, r), x, face in zip(found, ratios, filled):
            right.plot(x, y, marker, ms=5, color=COLORS[r["dtype"]], markerfacecolor=face)
    keys = "    ".join(
        f"{'●' if other == 'eager' else '□'} {OTHERS[other][1]}"
        for other in OTHERS
        if any(other in r["ratio"] for r in rows)
    )
    right.text(0.99, max(at) + 1.2, keys, transform=right.get_yaxis_transform(), ha="right", va="center", fontsize=9)
    for y, r in zip(at, rows):
        if known := [r["ratio"][x]["best"] for x in OTHERS if x in r["ratio"]]:
            right.plot([1, max(known)], [y, y], color="#d5d5d5", lw=0.7, zorder=0)
    right.axvline(1, color="black", lw=0.8, ls="--", zorder=0)
    right.set(xscale="log", xlabel="PyTorch time / kvops time (log scale)", title="how many times longer PyTorch takes")
    right.xaxis.set_major_formatter("{x:g}")
    left.set_ylim(min(at) - 0.8, max(at) + 1.8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10)
    _, heads, n, d = rows[0]["shape"]
    machine = record["machine"]
    finding = f"Medians of the rows: kvops reaches {np.median(shares):.0f} % of the memory bandwidth"
    finding += f"; {' and '.join(medians)} as long" if medians else ""
    where = f"K, V [1, {heads}, {n}, {d}] · {machine['cpu']}, {machine['threads']} threads, {record['isa']}"
    head(figure, finding, f"{where} · torch {record['torch']}")
    return figure


def draw_gpu(record: dict[str, Any]) -> Figure:
    """Fraction of the copy bandwidth: a panel per n, a line per operator and form, a bar per dtype, a mark per goal."""
    rows = [r for r in record["rows"] if "bandwidth" in r]
    names = list(dict.fromkeys((r["operator"], r["form"]) for r in rows))
    dtypes = list(dict.fromkeys(r["dtype"] for r in rows))
    sizes = sorted({r["shape"][2] for r in rows})
    height = 0.8 / len(dtypes)
    figure, (panels,) = plt.subplots(
        *(1, len(sizes)),
        figsize=(max(8.0, 2 + 2.4 * len(sizes)), 1.9 + 0.42 * len(names)),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axes, n in zip(panels, sizes):
        for i, dtype in enumerate(dtypes):
            found = {(r["operator"], r["form"]): r for r in rows if r["dtype"] == dtype and r["shape"][2] == n}
            y = [((len(dtypes) - 1) / 2 - i) * height - names.index(name) for name in found]
            shares = [100 * r["bandwidth"]["share"] for r in found.values()]
            bars = axes.barh(y, shares, height, color=COLORS[dtype])
            axes.bar_label(bars, [f"{x:.0f}" for x in shares], label_type="center", color="white", fontsize=7)
            for at, r in zip(y, found.values()):
                if goal := r.get("goals", {}).get("copy"):
                    axes.plot([100 * goal] * 2, [at - height / 2, at + height / 2], color="black", lw=2)
        axes.axvline(100, color="black", lw=0.8, ls="--", zorder=0)
        axes.set_title(f"{n:,} tokens", fontsize=10)
        axes.set_xlabel("% of torch.copy_'s bandwidth", fontsize=9)
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks([-i for i in range(len(names))], [" ".join(x).strip() for x in names], fontsize=8)
    marks: list[Artist] = [Rectangle((0, 0), 1, 1, color=COLORS[x], label=x) for x in dtypes]
    marks.append(Line2D([], [], color="black", lw=2, label="goal"))
    figure.legend(handles=marks, loc="outside lower right", ncols=4, fontsize=9, frameon=False)
    gpu = record["machine"]["gpu"]
    copy = max(r["bandwidth"]["gb_per_s"] for r in rows)
    typical = np.median([100 * r["bandwidth"]["share"] for r in rows])
    head(
        figure,
        f"kvops moves its bytes at {typical:.0f} % of torch.copy_'s bandwidth (median; 100 %: {copy:,.0f} GB/s)",
        f"{gpu['name']}, CUDA {gpu['cuda']}, torch {record['torch']}",
    )
    return figure
