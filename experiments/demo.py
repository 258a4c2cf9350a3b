"""The demo: does a small model still find a passkey in a long text when its cache is cut to a half or a quarter?

    python experiments/demo.py [--context 2048] [--digits 32] [--prompts 33] [--out .]

A context of real text (bench/data) hides ` The pass key is 4083...9. Remember it. `. The model
(bench/models/passkey-llama, 2.4 M parameters, trained from scratch for this task) reads it. Each method then evicts
once, to the same budget. Only then does the question arrive, and the model answers with the digits. The script prints
a table and draws which tokens three of the methods kept around the passkey.

A second table compares the methods that use queries, at small budgets of 32 to 256 of 2,048 tokens. SnapKV and ProtoKV
score with the last queries of the prompt. LAQ scores with the queries of eight tokens drafted from a cache that SnapKV
pruned, LAQ++ with these and the prompt's last eight. The cache is cut once, either after the question or before it,
when no query can know what will be asked.
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
WINDOW = 32  # SnapKV, ProtoKV and SATKV keep these last tokens; the first two score with their queries
LOOKUP = ((1, 1), (2, 1))  # (layer, KV head) that retrieve the digits; see heads.py in the model's folder
PICTURED = ("KeyDiff", "SnapKV", "StreamingLLM")
PICTURED_SHARE = 0.25
ROUNDS = 21  # of the timing


# ---- the first table: methods at a half and a quarter of the tokens ----


@dataclass
class Row:
    """One method at one fraction of the tokens."""

    name: str
    share: float
    compress: Callable | None = None  # (k, v, q, seed) -> kvops.Compressed; None: keeps everything, or is unreachable
    plain: Callable | None = None  # (k, v, q) -> (k, v, indices): the same in plain PyTorch, to compare times
    note: str = ""
    tokens: int = 0
    bytes_full: int = 0  # of one context, all layers
    bytes_kept: int = 0
    right: list[float] = field(default_factory=list)  # fraction of the digits that are right, per prompt
    key_kept: list[float] = field(default_factory=list)  # fraction of the digits in the retrieval heads, per prompt
    ms: float = 0.0
    plain_ms: float = 0.0
    kept: np.ndarray | None = None  # bool [layers, heads, context], for the prompt in the picture

    @property
    def reachable(self) -> bool:
        return self.share == 1 or self.compress is not None

    @property
    def score(self) -> float:
        """Percent of the digits that are right."""
        return 100 * float(np.mean(self.right))

    @property
    def numbers(self) -> dict:
        """The table's numbers, for the JSON file."""
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
            name,
            share,
            note=f"no ratio reaches {budget:,} tokens: sinks, last partition and remainder alone are {fixed:,}",
        )
    r = min(1.0, (m + 0.5) / lag)  # int(r * lag) == m, whichever way the product rounds
    return Row(
        name,
        share,
        lambda k, v, q, seed: kvops.lagkv_compress(k, v, lag, r, sinks=SINKS),
        lambda k, v, q: eager.lagkv_compress(k, v, lag, r, SINKS),
        ""
        if m
        else "no token per partition: sinks, last partition and remainder use up the budget, nothing is selected",
    )


def make_rows(n: int) -> list[Row]:
    """Return the table's rows for a context of n tokens."""
    rows = [Row("Full cache", 1.0)]
    for share in SHARES:
        budget = int(share * n)

        def row(name: str, compress: Callable, plain: Callable, share=share, budget=budget) -> Row:
            """A method that uses keys alone: compress(k, v, budget, seed), plain(k, v, budget)."""
            return Row(
                name, share, lambda k, v, q, seed: compress(k, v, budget, seed), lambda k, v, q: plain(k, v, budget)
            )

        def asking(name: str, compress: Callable, plain: Callable, share=share, budget=budget, **options) -> Row:
            """A method that also uses the last queries: compress(k, v, q, budget), plain(k, v, q, budget)."""
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
            return asking(name, kvops.protokv_compress, plain, score=score, num_chunks=chunks)

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
    """Return K, V and the last queries of each layer."""
    return [(x.k, x.v, x.last_queries) for x in caches(cut.cache)]


def digits_right(said: np.ndarray, batch: list[Prompt]) -> list[float]:
    """Return for each prompt the fraction of digits that are right, compared position by position."""
    return [float(np.mean(answer == common.encode(p.digits))) for answer, p in zip(said, batch)]


@torch.inference_mode()
def run(context: int = 2048, digits: int = 32, prompts: int = 33, progress: bool = True) -> tuple[list[Row], Prompt]:
    """Run the first table. Return its rows, and the prompt whose kept positions they hold."""
    reader, rows, asked = Reader(common.load_model()), make_rows(context), common.make_prompts(prompts, context, digits)
    active = [row for row in rows if row.reachable]
    shown = min(
        range(prompts), key=lambda i: abs(asked[i].depth - 0.3)
    )  # an early passkey, outside StreamingLLM's window
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
                with threads(1):  # one-token steps are too small to parallelize
                    said, _, _ = reader.answer(cut, common.questions(batch), digits, stops=False)
                row.right += digits_right(said, batch)
                bar.update()
        bar.set_description("timing")
        with threads(1):  # so is one context of this small model
            measure(active, [tuple(y[:1].contiguous() for y in x) for x in layers])
        bar.update()
    return rows, asked[shown]


def progress_bar(total: int, shown: bool) -> tqdm:
    return tqdm(total=total, disable=None if shown else True, leave=False, unit="step")


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def kept_slots(cut: Cut, context: int) -> Tensor:
    """Return bool [b, layers, heads, context]: whether the cut kept the position."""
    b, heads, _ = cut.positions[0].shape
    kept = torch.zeros(b, len(cut.positions), heads, context, dtype=torch.bool)
    for i, positions in enumerate(cut.positions):
        kept[:, i].scatter_(2, positions, True)
    return kept


def note_kept(row: Row, cut: Cut, kept: Tensor, batch: list[Prompt]) -> None:
    """Record tokens, bytes and the fraction of the passkey that the cache holds after the cut."""
    row.tokens = cut.tokens
    row.bytes_full, row.bytes_kept = cut.bytes_full // len(batch), cut.bytes_held // len(batch)
    for slots, p in zip(kept, batch):
        key = slots[..., p.start : p.start + len(p.digits)].float()  # [layers, heads, digits]
        row.key_kept.append(float(np.mean([key[at].mean() for at in LOOKUP])))


def measure(rows: list[Row], layers: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Fill in `ms` and `plain_ms`: medians over all layers of one context; kvops and plain PyTorch alternate."""
    rows = [row for row in rows if row.compress]
    times = np.zeros((len(rows), 2, ROUNDS))
    for i in range(-2, ROUNDS):  # two warm-up rounds
        for j, row in enumerate(rows):
            for side, call in enumerate((functools.partial(row.compress, seed=0), row.plain)):
                begin = time.perf_counter()
                for k, v, q in layers:
                    call(k, v, q)
                times[j, side, max(i, 0)] = 1e3 * (time.perf_counter() - begin)
    for row, (ours, plain) in zip(rows, np.median(times, 2)):
        row.ms, row.plain_ms = float(ours), float(plain)


def table(rows: list[Row], context: int, digits: int, prompts: int) -> str:
    """Return the table as text."""
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
MARGIN = 8  # tokens on either side of the passkey


def picture(rows: list[Row], prompt: Prompt, path: Path) -> None:
    """Draw which tokens three methods kept: over the whole context, and token by token around the passkey."""
    shown = [row for name in PICTURED for row in rows if (row.name, row.share) == (name, PICTURED_SHARE)]
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
    common.title(
        figure,
        f"{finding}\nRows: the KV heads of each layer; dark: kept; orange: the passkey, and the heads that retrieve it",
    )
    figure.subplots_adjust(left=0.075, right=0.985, top=0.87, bottom=0.05, hspace=0.12)
    common.save(figure, path)


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


def findings(rows: list[Row], context: int, digits: int) -> str:
    """Say what the first table shows, and why not to generalize from it."""

    def kept(name: str) -> str:
        pair = [next(row for row in rows if (row.name, row.share) == (name, share)) for share in SHARES]
        return " / ".join(f"{100 * np.mean(row.key_kept):.0f} %" if row.reachable else "-" for row in pair)

    m, _ = kept_within(context, SINKS, 128, int(SHARES[-1] * context))
    shares = " / ".join(f"{100 * share:.0f}" for share in SHARES)
    seen = (
        "Observed: the digits are right where the two heads that retrieve them (KV head 1 of layers 1 and 2) still "
        f"hold them. At {shares} % of the tokens these heads hold {kept('KeyDiff')} of the digits with KeyDiff, "
        f"{kept('LagKV, lag 128')} with LagKV (lag 128) and {kept('Random')} with Random. StreamingLLM holds all of a "
        f"passkey or none, depending on its position. At the lower budget LagKV keeps {max(m, 0)} tokens per "
        f"partition; the passkey has {digits}."
    )
    asking = (
        "The question comes after the cut. Methods that score with the text's own last queries keep what those queries "
        f"attend to, which is not the digits: the two heads hold {kept('SnapKV')} of them with SnapKV, "
        f"{kept('ProtoKV dot 496')} with ProtoKV (raw dot, 496 chunks) and {kept('ProtoKV soft 496')} (softmax), fewer "
        f"than a random choice. SATKV, which does not use queries, holds {kept('SATKV')}."
    )
    why = (
        "Do not generalize from this: the task flatters KeyDiff, because digits are rare in this text and KeyDiff "
        "keeps rare keys. The model has hardly any attention sink, so nothing here shows what sinks are worth."
    )
    return "\n".join(map(wrapped, (seen, asking, why)))


# ---- the second table: methods that use queries, at small budgets ----

BUDGETS = (32, 64, 128, 256)
DIGITS = (8, 32)
POINTS = ("after", "before")  # the question
ASKING = {"SnapKV": None, "ProtoKV": None, "LAQ": 0, "LAQ++": 8}  # queries of the prompt used beside a draft's
STEPS = 8  # tokens of a draft


@dataclass
class Cell:
    """One method at one budget, passkey length and point of the cut."""

    method: str
    budget: int
    digits: int
    point: str
    right: list[float] = field(default_factory=list)  # fraction of the digits that are right, per prompt

    @property
    def score(self) -> float:
        """Percent of the digits that are right."""
        return 100 * float(np.mean(self.right))

    @property
    def numbers(self) -> dict:
        """The table's numbers, for the JSON file."""
        what = {
            "method": self.method,
            "budget": self.budget,
            "digits": self.digits,
            "cut": f"{self.point} the question",
        }
        return what | {"prompts": len(self.right), "digits_right_percent": self.score}


@torch.inference_mode()
def run_small(context: int, prompts: int, progress: bool = True) -> list[Cell]:
    """Run the second table."""
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
    """Return the prompts' cache as the method leaves it."""
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
    """Return percentages of right digits: a line per method, a column per budget."""
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
    """Say whether the table supports the paper's claim."""
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
        "LAQ claims that queries from the beginning of the answer select better at small budgets. Where it gains "
        f"most: {gains}. Eight lookahead queries cover only the first digits of the answer. With a cut before the "
        "question, no query knows what will be asked, and all of these methods fail."
    )


def wrapped(line: str) -> str:
    return textwrap.fill(line, 112, subsequent_indent="  ")


def main(argv: list[str] | None = None) -> None:
    arguments = common.parser(__doc__, picture="demo.png", redraws=False)
    arguments.add_argument(
        "--context", type=int, default=2048, help="tokens before the question, 512 to 4000 (default 2048)"
    )
    arguments.add_argument("--digits", type=int, default=32, help="digits of the passkey, 5 to 64 (default 32)")
    arguments.add_argument(
        "--prompts", type=int, default=33, help="number of prompts; their passkeys lie at 11 depths (default 33)"
    )
    arguments.add_argument(
        "--lookahead", type=int, default=11, help="prompts of the second table (default 11); 0 skips it"
    )
    args = arguments.parse_args(argv)
    for name, low, high in (("context", 512, 4000), ("digits", 5, 64), ("prompts", 1, 10_000)):
        if not low <= getattr(args, name) <= high:
            arguments.error(f"--{name} must be between {low} and {high}, got {getattr(args, name)}")
    record = common.origin(__file__, argv)  # before anything is written
    print(
        f"{args.prompts} prompts hide a passkey of {args.digits} digits in {args.context:,} tokens of text. Each "
        "method cuts the cache after\nthe text and before the question. Guessing gets 10 % of the digits right.\n"
    )
    rows, prompt = run(args.context, args.digits, args.prompts)
    print(table(rows, args.context, args.digits, args.prompts))
    picture(rows, prompt, args.out / "demo.png")
    record["rows"] = [r.numbers for r in rows]
    print(
        f"\nBytes and times: one context, all layers. Times: medians of {ROUNDS} alternating runs on one thread.\n"
        f"Picture of the tokens kept around the passkey: {(args.out / 'demo.png').resolve()}\n"
    )
    print(findings(rows, args.context, args.digits))
    if args.lookahead:
        cells = run_small(args.context, args.lookahead)
        print(f"\n{small_table(cells, args.context)}\n\n{wrapped(small_findings(cells))}")
        record["lookahead"] = [cell.numbers for cell in cells]
    if args.json:
        write(args.json, record)


if __name__ == "__main__":
    main()
