"""The demo: does a small model still find a key in a long text after its cache was cut to a half or a quarter?

    python experiments/demo.py [--context 2048] [--digits 32] [--prompts 33] [--out .]

A context of real text (bench/data) hides ` The pass key is 4083...9. Remember it. `. The model
(bench/models/passkey-llama, 2.4 M parameters, trained from scratch for this task) reads it; then each method cuts the
cache, once; only then comes the question, and the model says the digits. Prints a table, draws which positions were
kept, and says where.

A second table is of the methods that look at queries, at small budgets, 32 to 256 of 2,048 tokens. SnapKV and ProtoKV
ask the last queries of the prompt, LAQ those of eight tokens that a cache cut by SnapKV drafts, LAQ++ these and the
prompt's last eight. The cache is cut once: after the question, or before it, when no query knows yet what will be asked
for.
"""

from __future__ import annotations

import functools
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor
from tqdm import tqdm

import common
import kvops
from common import BATCH, Prompt
from kvops.bench import eager
from kvops.bench.record import write
from kvops.eval.reader import Cut, Reader, caches
from kvops.lag import kept_within
from kvops.methods.lagkv import SINKS

SHARES = (0.5, 0.25)
WINDOW = 32  # the context's last tokens, which SnapKV, ProtoKV and SATKV keep; their queries observe for the first two
LOOKUP = ((1, 1), (2, 1))  # (layer, KV head): where the answer looks the digits up; see heads.py in the model's folder
ROUNDS = 21  # of the timing


# ---- the first table: methods at a half and a quarter of the tokens ----


@dataclass
class Row:
    """One method at one share of the tokens."""

    name: str
    share: float
    compress: Callable | None = None  # (k, v, q, seed) -> kvops.Compressed; None: keeps everything, or cannot reach it
    plain: Callable | None = None  # (k, v, q) -> (k, v, indices): the same in plain PyTorch, to compare the time with
    note: str = ""
    drawn: bool = True
    tokens: int = 0
    bytes_full: int = 0  # of one context, all layers
    bytes_kept: int = 0
    right: list[float] = field(default_factory=list)  # share of the digits that are right, per prompt
    key_kept: list[float] = field(default_factory=list)  # share of the digits that the look-up heads keep, per prompt
    ms: float = 0.0
    plain_ms: float = 0.0
    kept: np.ndarray | None = None  # bool [layers, heads, context], of the prompt in the picture

    @property
    def reachable(self) -> bool:
        return self.share == 1 or self.compress is not None

    @property
    def score(self) -> float:
        """Percent of the digits that are right."""
        return 100 * float(np.mean(self.right))

    @property
    def numbers(self) -> dict:
        """What the table says, for a file."""
        numbers = {"method": self.name, "share": self.share, "note": self.note}
        if self.reachable:
            numbers |= {"tokens": self.tokens, "bytes_full": self.bytes_full, "bytes_kept": self.bytes_kept}
            numbers["digits_right_percent"] = self.score
        if self.compress:
            numbers |= {"ms": self.ms, "plain_pytorch_ms": self.plain_ms}
        return numbers


def lagkv_row(share: float, lag: int, n: int, budget: int) -> Row:
    name = f"LagKV, lag {lag}"
    m, fixed = kept_within(n, SINKS, lag, budget)
    if m < 0:
        return Row(
            name, share, note=f"no r reaches {budget:,} tokens: sink, last partition and rest alone are {fixed:,}"
        )
    r = min(1.0, (m + 0.5) / lag)  # int(r * lag) == m, however the product rounds
    return Row(
        name,
        share,
        lambda k, v, q, seed: kvops.lagkv_compress(k, v, lag, r, sinks=SINKS),
        lambda k, v, q: eager.lagkv_compress(k, v, lag, r, SINKS),
        "" if m else "no token per partition: sink, last partition and rest are the whole budget, nothing is chosen",
    )


def make_rows(n: int) -> list[Row]:
    """The lines of the table for a context of n tokens."""
    rows = [Row("Full cache", 1.0)]
    for share in SHARES:
        budget = int(share * n)

        def row(name: str, compress: Callable, plain: Callable, share=share, budget=budget) -> Row:
            """Of a method that looks at keys alone: compress(k, v, budget, seed), plain(k, v, budget)."""
            return Row(
                name, share, lambda k, v, q, seed: compress(k, v, budget, seed), lambda k, v, q: plain(k, v, budget)
            )

        def asking(name: str, compress: Callable, plain: Callable, share=share, budget=budget, **options) -> Row:
            """Of one that looks at the last queries too: compress(k, v, q, budget), plain(k, v, q, budget)."""
            return Row(
                name,
                share,
                lambda k, v, q, seed: compress(k, v, q, budget, **options),
                lambda k, v, q: plain(k, v, q, budget),
            )

        def protokv(score: str, chunks: int, asking=asking) -> Row:
            def plain(k: Tensor, v: Tensor, q: Tensor, m: int) -> tuple[Tensor, ...]:
                return eager.protokv_compress(k, v, q, m, chunks, *kvops.lsh_projection(k.shape[3]), score)

            name = f"ProtoKV {score[:4]} {chunks}"
            row = asking(name, kvops.protokv_compress, plain, score=score, num_chunks=chunks)
            row.drawn = chunks == 496
            return row

        rows += [
            row(
                "StreamingLLM", lambda k, v, m, seed: kvops.streamingllm_compress(k, v, m), eager.streamingllm_compress
            ),
            row("Random", lambda k, v, m, seed: kvops.random_compress(k, v, m, seed=seed), eager.random_compress),
            lagkv_row(share, 128, n, budget),
            lagkv_row(share, 256, n, budget),
            row("KeyDiff", lambda k, v, m, seed: kvops.keydiff_compress(k, v, m), eager.keydiff_compress),
            asking("SnapKV", kvops.snapkv_compress, eager.snapkv_compress),
            row(
                "SATKV",
                lambda k, v, m, seed: kvops.satkv_compress(k, v, m, WINDOW),
                lambda k, v, m: eager.satkv_compress(k, v, WINDOW, m),
            ),
            *(protokv(score, chunks) for score in ("dot", "softmax") for chunks in (496, 100)),
        ]
    return rows


def layers_of(cut: Cut) -> list[tuple[Tensor, Tensor, Tensor]]:
    """K, V and the last queries of each layer."""
    return [(x.k, x.v, x.last_queries) for x in caches(cut.cache)]


def digits_right(said: np.ndarray, batch: list[Prompt]) -> list[float]:
    """The share of them, place by place, by prompt."""
    return [float(np.mean(answer == common.encode(p.digits))) for answer, p in zip(said, batch)]


@torch.inference_mode()
def run(context: int = 2048, digits: int = 32, prompts: int = 33, progress: bool = True) -> tuple[list[Row], Prompt]:
    """Runs everything; returns the lines of the table, and the prompt whose kept positions they hold."""
    reader, rows, asked = Reader(common.load_model()), make_rows(context), common.make_prompts(prompts, context, digits)
    active = [row for row in rows if row.reachable]
    shown = min(range(prompts), key=lambda i: abs(asked[i].depth - 0.3))  # an early key, outside StreamingLLM's window
    firsts = range(0, prompts, BATCH)
    with progress_bar(len(firsts) * (1 + len(active)) + 1, progress) as bar:
        for first in firsts:
            batch = asked[first : first + BATCH]
            where = f"prompts {first + 1}-{first + len(batch)} of {prompts}"
            bar.set_description(f"{where}: reading")
            whole = common.read(reader, common.contexts(batch), WINDOW)
            layers = layers_of(whole)
            bar.update()
            for row in active:
                bar.set_description(f"{where}: {row.name}")
                slots = row.compress and [row.compress(*x, first + i).indices for i, x in enumerate(layers)]
                cut = common.keep(whole, slots)
                kept = kept_slots(cut, context)
                note_kept(row, cut, kept, batch)
                if first <= shown < first + len(batch):
                    row.kept = kept[shown - first].numpy()
                with threads(1):  # steps of one token are too small to share
                    said, _, _ = reader.answer(cut, common.questions(batch), digits, stops=False)
                row.right += digits_right(said, batch)
                bar.update()
        bar.set_description("timing")
        with threads(1):  # so is one context of this model
            measure(active, [tuple(y[:1].contiguous() for y in x) for x in layers])
        bar.update()
    return rows, asked[shown]


def progress_bar(total: int, shown: bool) -> tqdm:
    return tqdm(total=total, disable=None if shown else True, leave=False, unit="step")


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch with `count` threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def kept_slots(cut: Cut, context: int) -> Tensor:
    """bool [b, layers, heads, context]: is the position kept?"""
    b, heads, _ = cut.positions[0].shape
    kept = torch.zeros(b, len(cut.positions), heads, context, dtype=torch.bool)
    for i, positions in enumerate(cut.positions):
        kept[:, i].scatter_(2, positions, True)
    return kept


def note_kept(row: Row, cut: Cut, kept: Tensor, batch: list[Prompt]) -> None:
    """Tokens, bytes and how much of the key the cache holds after the cut."""
    row.tokens = cut.tokens
    row.bytes_full, row.bytes_kept = cut.bytes_full // len(batch), cut.bytes_held // len(batch)
    for slots, p in zip(kept, batch):
        key = slots[..., p.start : p.start + len(p.digits)].float()  # [layers, heads, digits]
        row.key_kept.append(float(np.mean([key[at].mean() for at in LOOKUP])))


def measure(rows: list[Row], layers: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Fills in `ms` and `plain_ms`: all layers of one context, kvops and plain PyTorch by turns; medians."""
    rows = [row for row in rows if row.compress]
    times = np.zeros((len(rows), 2, ROUNDS))
    for i in range(-2, ROUNDS):  # two rounds to warm up
        for j, row in enumerate(rows):
            for side, call in enumerate((functools.partial(row.compress, seed=0), row.plain)):
                begin = time.perf_counter()
                for k, v, q in layers:
                    call(k, v, q)
                times[j, side, max(i, 0)] = 1e3 * (time.perf_counter() - begin)
    for row, (ours, plain) in zip(rows, np.median(times, 2)):
        row.ms, row.plain_ms = float(ours), float(plain)


def table(rows: list[Row], context: int, digits: int, prompts: int) -> str:
    """The table as text."""
    head = [
        ("", "tokens kept", "cache bytes", "", "digits right", "score + select", "plain PyTorch"),
        ("method", f"of {context:,}", "full", "kept", f"of {digits * prompts:,}", "+ gather", "takes"),
    ]
    lines = [f"{a:16} {b:>15} {c:>12} {d:>11} {e:>14}{'':11} {f:>14} {g:>14}" for a, b, c, d, e, f, g in head]
    rule, share, notes = "-" * len(lines[0]), 1.0, []
    lines.append(rule)
    for row in rows:
        if row.share != share:
            share = row.share
            lines.append("")
        if not row.reachable:
            lines.append(f"{row.name:16}   {row.note}")
            continue
        if row.note:
            notes.append(f"* {row.note}")
        name = row.name + " *" if row.note else row.name
        line = f"{name:16} {row.tokens:7,} {100 * row.tokens / context:5.1f} %"
        line += f" {row.bytes_full:12,} {row.bytes_kept:11,} {row.score:12.1f} % {'#' * round(row.score / 10):10}"
        if row.compress:
            line += f" {row.ms:11.2f} ms {row.plain_ms / row.ms:12.1f} x"
        lines.append(line.rstrip())
    return "\n".join([*lines, rule, *notes])


KEPT, DROPPED, MARK, POOR = "#1b4f8f", "#eceff3", "#e8590c", "#a61e1e"
SHADES = LinearSegmentedColormap.from_list("kept", [DROPPED, KEPT])


def picture(rows: list[Row], prompt: Prompt, path: Path) -> None:
    """Which positions each method kept, per layer and head; beside it the key's surroundings, token by token."""
    names = list(dict.fromkeys(row.name for row in rows if row.share < 1 and row.drawn))
    cells = {(row.name, row.share): row for row in rows}
    height = 1.2 + 1.62 * len(names)
    figure = Figure(figsize=(19, height))
    axes = figure.subplots(
        len(names),
        2 * len(SHARES),
        gridspec_kw={"width_ratios": [2.1, 1.25] * len(SHARES), "wspace": 0.1, "hspace": 0.45},
        squeeze=False,
    )
    for i, name in enumerate(names):
        for j, share in enumerate(SHARES):
            draw_row(cells[name, share], prompt, *axes[i, 2 * j : 2 * j + 2])
    figure.text(
        0.006,
        1 - 0.14 / height,
        f"Which of {len(prompt.ids):,} tokens each method kept, in one of the prompts behind the percentages. A line "
        f"is a KV head (H) of a layer (L), dark is kept.\nOrange: the key's {len(prompt.digits)} digits (on the right "
        "token by token), and the heads that look them up for the answer.",
        fontsize=11.5,
        va="top",
    )
    figure.subplots_adjust(left=0.028, right=0.995, top=1 - 0.93 / height, bottom=0.28 / height)
    common.save(figure, path, dpi=110)


def draw_row(row: Row, prompt: Prompt, wide: Axes, near: Axes) -> None:
    """One method at one share: all positions (wide), and the key with a few tokens around it (near)."""
    name = f"{row.name}: {row.tokens:,} tokens" if row.reachable else row.name
    wide.set_title(name, loc="left", weight="bold", size=10)
    if not row.reachable:
        wide.axis("off")
        near.axis("off")
        wide.text(0, 0.5, textwrap.fill(row.note, 46), transform=wide.transAxes, fontsize=9, va="center")
        return
    context, digits, margin = len(prompt.ids), len(prompt.digits), 8
    layers, heads = row.kept.shape[:2]
    kept = row.kept.reshape(layers * heads, context).astype(float)

    bins = max(1, context // 512)  # tokens per column of the image
    shares = kept[:, : context // bins * bins].reshape(len(kept), -1, bins).mean(2)
    extent = (0, shares.shape[1] * bins, len(kept) - 0.5, -0.5)
    wide.imshow(shares, aspect="auto", cmap=SHADES, vmin=0, vmax=1, extent=extent, interpolation="nearest")
    wide.axvspan(prompt.start, prompt.start + digits, color=MARK, alpha=0.25, lw=0)
    wide.plot(prompt.start + digits / 2, -0.78, "v", color=MARK, ms=7, clip_on=False)
    color = KEPT if row.score > 80 else POOR
    wide.set_title(f"{row.score:.0f} % of all digits right", loc="right", size=9, color=color)
    wide.set_yticks(range(len(kept)), [f"L{at // heads} H{at % heads}" for at in range(len(kept))], fontsize=7)
    for layer, head in LOOKUP:
        wide.get_yticklabels()[heads * layer + head].set(color=MARK, fontweight="bold")
    wide.tick_params(axis="x", labelsize=7)

    first = min(max(prompt.start - margin, 0), context - digits - 2 * margin)
    window = slice(first, first + digits + 2 * margin)
    near.imshow(kept[:, window], aspect="auto", cmap=SHADES, vmin=0, vmax=1, interpolation="nearest")
    at = prompt.start - first - 0.5
    near.add_patch(Rectangle((at, -0.5), digits, len(kept), fill=False, ec=MARK, lw=2, clip_on=False, zorder=5))
    near.vlines(np.arange(digits + 2 * margin) - 0.5, -0.5, len(kept) - 0.5, color="white", lw=0.6)
    letters = [chr(c) if 32 <= c < 127 else " " for c in prompt.ids[window]]
    near.set_xticks(range(len(letters)), letters, fontsize=7, family="monospace")
    near.set_yticks([])
    here = [100 * row.kept[at][prompt.start : prompt.start + digits].mean() for at in LOOKUP]
    near.set_title(f"the two heads keep {np.mean(here):.0f} % of the key", loc="left", size=9)

    for axis in (wide, near):
        axis.tick_params(length=0, pad=2)
        axis.hlines(np.arange(1, len(kept)) - 0.5, *axis.get_xlim(), color="white", lw=0.8)
        axis.hlines(np.arange(heads, len(kept), heads) - 0.5, *axis.get_xlim(), color="white", lw=2.5)
        axis.spines[:].set_visible(False)


def findings(rows: list[Row], context: int, digits: int) -> str:
    """Two honest lines: what is seen, and why not to make too much of it."""

    def kept(name: str) -> str:
        pair = [next(row for row in rows if (row.name, row.share) == (name, share)) for share in SHARES]
        return " / ".join(f"{100 * np.mean(row.key_kept):.0f} %" if row.reachable else "-" for row in pair)

    m, _ = kept_within(context, SINKS, 128, int(SHARES[-1] * context))
    shares = " / ".join(f"{100 * share:.0f}" for share in SHARES)
    seen = (
        "Seen: digits come out right where the two heads that look them up (KV head 1 of layers 1 and 2) still hold "
        f"them. At {shares} % of the tokens these hold {kept('KeyDiff')} of the digits with KeyDiff, "
        f"{kept('LagKV, lag 128')} with LagKV (lag 128), {kept('Random')} with Random; StreamingLLM holds all of a key "
        f"or nothing, by where it stands. At the lower share LagKV keeps {max(m, 0)} tokens of a partition; the key "
        f"has {digits}."
    )
    asking = (
        "The question comes later, so methods that ask the text's own last queries keep what those look at, and those "
        f"do not look at digits: the two heads hold {kept('SnapKV')} of them with SnapKV, {kept('ProtoKV dot 496')} "
        f"with ProtoKV (raw dot, 496 chunks) and {kept('ProtoKV soft 496')} (softmax), fewer than a random choice. "
        f"SATKV, which asks nobody, holds {kept('SATKV')}."
    )
    why = (
        "Do not make too much of it: KeyDiff is flattered, since digits are rare in this text and rare keys are what "
        "it keeps; and this model has hardly any attention sink, so nothing here tells what sinks are worth."
    )
    return "\n".join(map(wrapped, (seen, asking, why)))


# ---- the second table: methods that look at queries, at small budgets ----

BUDGETS = (32, 64, 128, 256)
DIGITS = (8, 32)
POINTS = ("after", "before")  # the question
ASKING = {"SnapKV": None, "ProtoKV": None, "LAQ": 0, "LAQ++": 8}  # the prompt's queries that observe beside a draft's
STEPS = 8  # tokens of a draft


@dataclass
class Cell:
    """One method at one budget, digits of the key and point of the cut."""

    method: str
    budget: int
    digits: int
    point: str
    right: list[float] = field(default_factory=list)  # share of the digits that are right, per prompt

    @property
    def score(self) -> float:
        """Percent of the digits that are right."""
        return 100 * float(np.mean(self.right))

    @property
    def numbers(self) -> dict:
        """What the table says, for a file."""
        what = {
            "method": self.method,
            "budget": self.budget,
            "digits": self.digits,
            "cut": f"{self.point} the question",
        }
        return what | {"prompts": len(self.right), "digits_right_percent": self.score}


@torch.inference_mode()
def run_small(context: int, prompts: int, progress: bool = True) -> list[Cell]:
    """Runs the second table."""
    reader = Reader(common.load_model())
    cells = [Cell(m, b, d, p) for p in POINTS for d in DIGITS for m in ASKING for b in BUDGETS]
    firsts = range(0, prompts, BATCH)
    with progress_bar(len(firsts) * len(cells), progress) as bar:
        for digits, point in dict.fromkeys((cell.digits, cell.point) for cell in cells):
            asked = common.make_prompts(prompts, context, digits)
            for first in firsts:
                batch = asked[first : first + BATCH]
                ids, question = common.contexts(batch), common.questions(batch)
                if point == "after":
                    ids, question = common.asked(batch), None
                whole = common.read(reader, ids, WINDOW)
                for cell in (x for x in cells if (x.digits, x.point) == (digits, point)):
                    bar.set_description(f"{cell.method}, {cell.budget} tokens, cut {point} the question")
                    with threads(1):
                        cut = asking_cut(reader, whole, cell.method, cell.budget)
                        said, _, _ = reader.answer(cut, question, digits, stops=False)
                    cell.right += digits_right(said, batch)
                    bar.update()
    return cells


def asking_cut(reader: Reader, whole: Cut, method: str, budget: int) -> Cut:
    """What the method leaves of the prompts."""
    layers = layers_of(whole)
    if method == "ProtoKV":
        w = kvops.ProtoKV(budget).window
        return common.keep(whole, [kvops.protokv_compress(k, v, q[:, :, -w:], budget).indices for k, v, q in layers])
    w = min(WINDOW, budget // 2)
    small = common.keep(whole, [kvops.snapkv_compress(k, v, q[:, :, -w:], budget).indices for k, v, q in layers])
    if method == "SnapKV":
        return small
    reader.answer(small, None, STEPS, stops=False)  # the draft
    slots = []
    for (k, v, q), (_, _, drafted) in zip(layers, layers_of(small)):
        local = q[:, :, -ASKING[method] :] if ASKING[method] else None
        slots.append(kvops.laq_compress(k, v, drafted[:, :, -STEPS:], budget, q_window=local).indices)
    return common.keep(whole, slots)


def small_table(cells: list[Cell], context: int) -> str:
    """Percent of the digits that are right: a line per method, a column per budget."""
    score = {(x.method, x.budget, x.digits, x.point): x.score for x in cells}
    prompts = len(cells[0].right)
    groups = [(point, digits) for point in POINTS for digits in DIGITS]
    width = 6 * len(BUDGETS)
    lines = [
        f"Digits right, %, with {' / '.join(map(str, BUDGETS))} of {context:,} tokens kept; {prompts} prompts",
        "",
        f"{'':10}" + "".join(f"{f'cut {point} the question':>{2 * width + 6}}" for point in POINTS),
        f"{'method':10}" + "".join(f"{f'{digits} digits':>{width + 3}}" for _, digits in groups),
    ]
    lines.append("-" * len(lines[-1]))
    for name in ASKING:
        values = ["".join(f"{score[name, b, digits, point]:6.0f}" for b in BUDGETS) for point, digits in groups]
        lines.append(f"{name:10}" + "".join(f"   {x}" for x in values))
    return "\n".join(lines)


def small_findings(cells: list[Cell]) -> str:
    """What is seen of the paper's claim, in one sentence."""
    score = {(x.method, x.budget, x.digits, x.point): x.score for x in cells}
    most = {
        digits: max(BUDGETS, key=lambda b: score["LAQ", b, digits, "after"] - score["SnapKV", b, digits, "after"])
        for digits in DIGITS
    }
    gains = "; ".join(
        f"{digits} digits at {b} tokens: SnapKV {score['SnapKV', b, digits, 'after']:.0f} %, "
        f"LAQ {score['LAQ', b, digits, 'after']:.0f} %, LAQ++ {score['LAQ++', b, digits, 'after']:.0f} %"
        for digits, b in most.items()
    )
    return (
        "Seen of LAQ's claim that queries of the answer's beginning choose better at small budgets, where it gains "
        f"most: {gains}. Eight lookahead queries see the first digits of the answer only. Cut before the question, no "
        "query knows what will be asked for, and none of these methods can."
    )


def wrapped(line: str) -> str:
    return textwrap.fill(line, 112, subsequent_indent="  ")


def main(argv: list[str] | None = None) -> None:
    arguments = common.parser(__doc__, picture="demo.png")
    arguments.add_argument("--context", type=int, default=2048, help="tokens before the question, 512 to 4000")
    arguments.add_argument("--digits", type=int, default=32, help="length of the key, 5 to 64")
    arguments.add_argument("--prompts", type=int, default=33, help="how many; their keys lie at 11 depths")
    arguments.add_argument("--lookahead", type=int, default=11, help="prompts of the second table; 0 leaves it out")
    args = arguments.parse_args(argv)
    for name, low, high in (("context", 512, 4000), ("digits", 5, 64), ("prompts", 1, 10_000)):
        if not low <= getattr(args, name) <= high:
            arguments.error(f"--{name} must be between {low} and {high}, got {getattr(args, name)}")
    record = common.origin(__file__, argv)  # before anything is written
    print(
        f"A key of {args.digits} digits in {args.context:,} tokens of text, {args.prompts} times. The cache is cut "
        "after the text and\nbefore the question for the key. Guessing gets 10 % of the digits right.\n"
    )
    rows, prompt = run(args.context, args.digits, args.prompts)
    print(table(rows, args.context, args.digits, args.prompts))
    picture(rows, prompt, args.out / "demo.png")
    record["rows"] = [r.numbers for r in rows]
    print(f"\nBytes and times are of one context, all layers; times are medians of {ROUNDS}, by turns, on one thread.")
    print(f"Which positions each method kept, per layer and head: {(args.out / 'demo.png').resolve()}\n")
    print(findings(rows, args.context, args.digits))
    if args.lookahead:
        cells = run_small(args.context, args.lookahead)
        print(f"\n{small_table(cells, args.context)}\n\n{wrapped(small_findings(cells))}")
        record["lookahead"] = [cell.numbers for cell in cells]
    if args.json:
        write(args.json, record)


if __name__ == "__main__":
    main()
