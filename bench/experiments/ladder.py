"""Draw the ladder: which tokens each layer of a small model holds, after one compaction and after many.

    python bench/experiments/ladder.py [--layers 8] [--budget 48] [--out .]

LaCache's Fig. 2 and 4, from `kvops.lacache_coverage`: ladder.png.
"""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from torch import Tensor

import common
import kvops

SETTINGS = ((2, 1), (4, 2), (4, 0))  # span, overlap
COLORS = ListedColormap(["#eef1f4", "#2a6f97"])


def streaming(n: int, layers: int, budget: int, sinks: int) -> Tensor:
    """Return what StreamingLLM holds: in all layers the first tokens and the newest."""
    held = torch.zeros(layers, n, dtype=torch.bool)
    held[:, :sinks] = held[:, max(sinks, n - budget + sinks) :] = True
    return held


def picture(layers: int, budget: int, sinks: int, path: Path) -> None:
    lengths = (budget + budget // 2, 4 * budget)
    titles = (f"{lengths[0]} tokens at once", f"{lengths[1]} tokens one by one")
    figure = Figure(figsize=(8, 1.25 * len(SETTINGS) + 2.2), layout="constrained")
    axes = figure.subplots(len(SETTINGS) + 1, 2, width_ratios=(1, 1.7), sharex="col")
    covered = {}
    for row, setting in zip(axes, (*SETTINGS, None)):
        for axis, n, chunk in zip(row, lengths, (lengths[0], 1)):
            if setting is None:
                held, label = streaming(n, layers, budget, sinks), "StreamingLLM"
            else:
                span, overlap = setting
                shape = dict(num_layers=layers, budget=budget, span=span, overlap=overlap, sinks=sinks)
                held, label = kvops.lacache_coverage(n, **shape, chunk=chunk), f"LaCache\nS {span}, O {overlap}"
            axis.imshow(held.numpy(), cmap=COLORS, aspect="auto", interpolation="nearest", vmin=0, vmax=1)
            axis.set_yticks([0, layers - 1], ["0", str(layers - 1)])
            covered[label] = int(held.any(0).sum())
            axis.set_title(f"{held.sum(1)[0]} slots per layer, {covered[label]} tokens in all", fontsize=9, loc="left")
            axis.spines[:].set_visible(False)
        row[0].set_ylabel(f"{label}\n\nlayer", fontsize=9)
    for axis, title in zip(axes[-1], titles):
        axis.set_xlabel(f"token ({title})")
    best = max(covered.values())
    common.title(
        figure,
        f"With {budget} slots per layer, LaCache's {layers} layers together hold up to {best} of {lengths[1]} tokens, "
        f"StreamingLLM's hold {covered['StreamingLLM']}",
    )
    common.save(figure, path)


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, record=False, picture="ladder.png")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--budget", type=int, default=48)
    parser.add_argument("--sinks", type=int, default=2)
    a = parser.parse_args(argv)
    picture(a.layers, a.budget, a.sinks, a.out / "ladder.png")
    print(f"wrote {a.out / 'ladder.png'}")


if __name__ == "__main__":
    main()
