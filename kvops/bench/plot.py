"""The benchmark as a picture: share of the memory bandwidth, and how many times longer PyTorch takes."""

from __future__ import annotations

import io
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

plt.rcParams["text.parse_math"] = False  # names may be others'
COLORS = {"kvops": "#2a6f97", "eager": "#bc6c25", "compile": "#dda15e"}
COLORS |= {"float32": "#2a6f97", "bfloat16": "#468faf", "float16": "#89a8b8"}
OPAQUE = {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5}}  # where a label crosses the line of 100 %


def formats() -> list[str]:
    """Of pictures that can be drawn."""
    return sorted(Figure().canvas.get_supported_filetypes())


def draw(record: dict[str, Any], path: Path) -> None:
    """The picture of a record, of a CPU or of a GPU."""
    figure = draw_gpu(record) if "gpu" in record["machine"] else draw_cpu(record)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, format=path.suffix[1:].lower())
    plt.close(figure)
    replace(path, picture.getvalue())


def draw_cpu(record: dict[str, Any]) -> Figure:
    """Bars for the largest n that was measured, one group per operator, form and dtype."""
    largest = max(r["shape"][2] for r in record["rows"])
    rows = [r for r in record["rows"] if r["shape"][2] == largest and "bandwidth" in r]
    labels = [f"{r['operator']} {r['form']}".strip() + f"\n{r['dtype']}" for r in rows]
    y = np.arange(len(rows))[::-1]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12, 1.6 + 0.36 * len(rows)), sharey=True, layout="constrained", gridspec_kw={"wspace": 0.04}
    )

    shares = ["{share:.0%} of {of}".format(**r["bandwidth"]) for r in rows]
    bars = left.barh(y, [100 * r["bandwidth"]["share"] for r in rows], 0.7, color=COLORS["kvops"])
    left.bar_label(bars, shares, padding=3, fontsize=8, **OPAQUE)
    left.axvline(100, color="black", lw=0.8, ls="--", zorder=0)
    left.set(yticks=y, xlabel="% of the memory bandwidth measured beside it", title="kvops: bytes moved per second")
    left.set_yticklabels(labels, fontsize=8)
    left.margins(x=0.25)

    names = [x for x in ("eager", "compile") if any(x in r["ratio"] for r in rows)]
    height = 0.7 / max(1, len(names))
    for i, name in enumerate(names):
        ratio = [r["ratio"].get(name, {}).get("best", np.nan) for r in rows]
        label = {"eager": "eager PyTorch", "compile": "torch.compile"}[name]
        bars = right.barh(y + (len(names) / 2 - i - 0.5) * height, ratio, height, color=COLORS[name], label=label)
        right.bar_label(bars, [f"{x:.3g}x" for x in ratio], padding=3, fontsize=8, **OPAQUE)
    right.axvline(1, color="black", lw=0.8, ls="--", zorder=0)
    right.set(
        xscale="log",
        xlabel="time of PyTorch / time of kvops (log scale)",
        title="the same in PyTorch takes ... times longer",
    )
    right.margins(x=0.15)
    right.xaxis.set_major_formatter("{x:g}")
    left.set_ylim(-0.6, len(rows) - 0.4)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    _, heads, n, d = rows[0]["shape"]
    machine = record["machine"]
    figure.legend(loc="outside lower right", ncols=2, fontsize=8, frameon=False)
    figure.suptitle(
        f"K, V [1, {heads}, {n}, {d}] · {machine['cpu']}, {machine['threads']} threads, {record['isa']} · "
        f"torch {record['torch']}",
        fontsize=10,
    )
    return figure


def draw_gpu(record: dict[str, Any]) -> Figure:
    """Share of the copy bandwidth: a panel per n, a line per operator and form, a bar per dtype, a mark per goal."""
    rows = [r for r in record["rows"] if "bandwidth" in r]
    names = list(dict.fromkeys((r["operator"], r["form"]) for r in rows))
    dtypes = list(dict.fromkeys(r["dtype"] for r in rows))
    sizes = sorted({r["shape"][2] for r in rows})
    height = 0.8 / len(dtypes)
    figure, (panels,) = plt.subplots(
        *(1, len(sizes)),
        figsize=(3 + 3.6 * len(sizes), 1.8 + 0.42 * len(names)),
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
        axes.set_xlabel("% of the bandwidth of torch.copy_")
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks([-i for i in range(len(names))], [" ".join(x).strip() for x in names], fontsize=8)
    marks: list[Artist] = [Rectangle((0, 0), 1, 1, color=COLORS[x], label=x) for x in dtypes]
    marks.append(Line2D([], [], color="black", lw=2, label="goal"))
    figure.legend(handles=marks, loc="outside lower right", ncols=4, fontsize=8, frameon=False)
    gpu = record["machine"]["gpu"]
    copy = max(r["bandwidth"]["gb_per_s"] for r in rows)
    figure.suptitle(
        f"Bytes that must move, per second · {gpu['name']}, CUDA {gpu['cuda']}, torch {record['torch']} · "
        f"100 %: {copy:,.0f} GB/s",
        fontsize=10,
    )
    return figure
