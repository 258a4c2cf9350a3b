"""The benchmark as a picture: share of the memory bandwidth, and how many times longer PyTorch takes."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {"kvops": "#2a6f97", "eager": "#bc6c25", "compile": "#dda15e"}
OPAQUE = {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5}}  # where a label crosses the line of 100 %


def draw(record: dict, path: Path) -> None:
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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
