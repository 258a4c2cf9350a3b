"""Which tokens three methods kept, as a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .methods import LOOKUP, Row
from .passkeys import Prompt

PICTURED = ("KeyDiff", "SnapKV", "StreamingLLM")
SHARE = 0.25
KEPT, DROPPED, MARK, POOR = "#1b4f8f", "#eceff3", "#e8590c", "#a61e1e"
SHADES = LinearSegmentedColormap.from_list("kept", [DROPPED, KEPT])
MARGIN = 8  # tokens on either side of the passkey


def picture(rows: Sequence[Row], prompt: Prompt, path: Path) -> None:
    """Draw which tokens three methods kept: over the whole context, and token by token around the passkey."""
    shown = [row for name in PICTURED for row in rows if (row.name, row.share) == (name, SHARE)]
    figure = Figure(figsize=(8, 6.9))
    axes = figure.subplots(
        2 * len(shown) + len(shown) - 1, 1, height_ratios=([0.3, 1.5, 0.5] * len(shown))[:-1], squeeze=False
    )[:, 0]
    for i, row in enumerate(shown):
        wide, near = axes[3 * i : 3 * i + 2]
        draw_context(row, prompt, wide)
        draw_passkey(row, prompt, near)
        if i + 1 < len(shown):
            axes[3 * i + 2].axis("off")
    good = [row for row in shown if row.score > 80]
    finding = f"With {shown[0].tokens:,} of {len(prompt.ids):,} tokens kept, "
    if good:
        others = " and ".join(row.name for row in shown if row not in good)
        finding += f"{' and '.join(row.name for row in good)} still {'has' if len(good) == 1 else 'have'} the passkey"
        finding += f"; {others} evicted it" if others else ""
    else:
        finding += "none of these methods still has the passkey"
    finding = "\n".join(textwrap.wrap(finding, 98))
    rule = "Rows: the KV heads of each layer; dark: kept; orange: the passkey, and the heads that retrieve it"
    figure.suptitle(f"{finding}\n{rule}", x=0.01, ha="left", fontsize=11)
    figure.subplots_adjust(left=0.075, right=0.985, top=0.87, bottom=0.05, hspace=0.12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)  # 960 pixels wide, so text of 9 points is legible at 800


def draw_context(row: Row, prompt: Prompt, axes: Axes) -> None:
    """The whole context in one strip: how many of the heads kept each token."""
    context, digits = len(prompt.ids), len(prompt.digits)
    bins = max(1, context // 512)  # tokens per column of the image
    fraction = row.kept.mean((0, 1))[: context // bins * bins].reshape(1, -1, bins).mean(2)
    extent = (0, fraction.shape[1] * bins, 0.5, -0.5)
    axes.imshow(fraction, aspect="auto", cmap=SHADES, vmin=0, vmax=1, extent=extent, interpolation="nearest")
    axes.axvspan(prompt.start, prompt.start + digits, ymin=-0.25, ymax=1.25, color=MARK, alpha=0.8, lw=0, clip_on=False)
    axes.set_title(row.name, loc="left", weight="bold", size=10, pad=6)
    color = KEPT if row.score > 80 else POOR
    axes.set_title(f"{row.score:.0f} % of the digits right (all prompts)", loc="right", size=10, color=color, pad=6)
    axes.set_yticks([0], ["context"], fontsize=7.5)
    axes.set_xticks([])
    axes.tick_params(length=0, pad=2)
    axes.spines[:].set_visible(False)


def draw_passkey(row: Row, prompt: Prompt, axes: Axes) -> None:
    """The passkey and a few tokens on either side: a line for each head, a cell for each token."""
    context, digits = len(prompt.ids), len(prompt.digits)
    layers, heads = row.kept.shape[:2]
    kept = row.kept.reshape(layers * heads, context).astype(float)
    first = min(max(prompt.start - MARGIN, 0), context - digits - 2 * MARGIN)
    window = slice(first, first + digits + 2 * MARGIN)
    axes.imshow(kept[:, window], aspect="auto", cmap=SHADES, vmin=0, vmax=1, interpolation="nearest")
    at = prompt.start - first - 0.5
    axes.add_patch(Rectangle((at, -0.5), digits, len(kept), fill=False, ec=MARK, lw=2, clip_on=False, zorder=5))
    axes.vlines(np.arange(digits + 2 * MARGIN) - 0.5, -0.5, len(kept) - 0.5, color="white", lw=0.6)
    axes.hlines(np.arange(1, len(kept)) - 0.5, *axes.get_xlim(), color="white", lw=0.8)
    axes.hlines(np.arange(heads, len(kept), heads) - 0.5, *axes.get_xlim(), color="white", lw=2.5)
    letters = [chr(c) if 32 <= c < 127 else " " for c in prompt.ids[window]]
    axes.set_xticks(range(len(letters)), letters, fontsize=9 if digits <= 48 else 7, family="monospace")
    axes.set_yticks(range(len(kept)), [f"L{x // heads} H{x % heads}" for x in range(len(kept))], fontsize=7.5)
    for layer, head in LOOKUP:
        axes.get_yticklabels()[heads * layer + head].set(color=MARK, fontweight="bold")
    axes.tick_params(length=0, pad=2)
    axes.spines[:].set_visible(False)
