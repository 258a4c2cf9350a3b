"""The demo: does a small model still find a key in a long text after its cache was cut to a half or a quarter?

    python bench/demo.py [--context 2048] [--digits 32] [--prompts 33] [--out .]

A context of real text (bench/data) hides ` The pass key is 4083...9. Remember it. `. The model
(bench/models/passkey-llama, 2.4 M parameters, trained from scratch for this task) reads it; then each method cuts the
cache, once; only then comes the question, and the model says the digits. Prints a table, draws which positions were
kept, and says where. A second table is of the methods that look at queries, at small budgets (lookahead.py).
"""

# ruff: noqa: E402  (the model's folder must be on the path, and the backend of the figures chosen, between imports)

from __future__ import annotations

import argparse
import functools
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from matplotlib.colors import LinearSegmentedColormap
from torch import Tensor
from tqdm import tqdm

import kvops
import kvops.hf
from kvops.bench.record import origin, write
from kvops.cache import AttentionMethod
from kvops.eval.methods import SINK, lagkv_tokens
from kvops.hf import KVCache

HERE = Path(__file__).resolve().parent
MODEL = HERE / "models" / "passkey-llama"
sys.path[:0] = [str(MODEL), str(HERE)]
import lookahead
from passkey_task import PAD, QUESTION, Corpus, context_with_needles, encode, needle_text, rand_digits

SHARES = (0.5, 0.25)
DEPTHS = 11  # keys at 0 %, 10 %, ... 100 % of the context
BATCH = 11
WINDOW = 32  # the context's last tokens, which SnapKV, ProtoKV and SATKV keep; their queries observe for the first two
LOOKUP = ((1, 1), (2, 1))  # (layer, KV head): where the answer looks the digits up; see heads.py in the model's folder
ROUNDS = 21  # of the timing


class Haystack(Corpus):
    """Slices of the shipped text instead of this Python's standard library."""

    def __init__(self):
        self.data = np.fromfile(HERE / "data" / "haystack.txt", dtype=np.uint8).astype(np.int64)


# ---- the same methods in plain PyTorch, to compare the time with ----


def plain_gather(k: Tensor, v: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    indices = indices.unsqueeze(-1)
    return k.gather(2, indices.expand(-1, -1, -1, k.shape[-1])), v.gather(2, indices.expand(-1, -1, -1, v.shape[-1]))


def plain_streamingllm(k: Tensor, v: Tensor, budget: int, sinks: int = 4) -> tuple[Tensor, Tensor]:
    n = k.shape[2]
    indices = torch.cat([torch.arange(sinks), torch.arange(n - budget + sinks, n)])
    return plain_gather(k, v, indices.expand(*k.shape[:2], -1))


def plain_random(k: Tensor, v: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    return plain_gather(k, v, torch.rand(k.shape[:3]).topk(budget, -1).indices.sort(-1).values)


def plain_keydiff(k: Tensor, v: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    anchor = F.normalize(k, dim=-1).mean(2, keepdim=True)
    scores = -F.cosine_similarity(k, anchor, dim=-1)
    return plain_gather(k, v, scores.topk(budget, -1).indices.sort(-1).values)


def plain_lagkv(k: Tensor, v: Tensor, lag: int, m: int) -> tuple[Tensor, Tensor]:
    n = k.shape[2]
    count = (n - SINK) // lag

    def spread(x: Tensor) -> Tensor:
        x = x[:, :, SINK : SINK + count * lag].unflatten(2, (count, lag))
        lo, hi = x[:, :, 1:].amin(3, keepdim=True), x[:, :, 1:].amax(3, keepdim=True)
        return ((x[:, :, :-1] - lo) / (hi - lo)).std(-1).softmax(-1)

    kept = (spread(k) + spread(v)).topk(m, -1).indices.sort(-1).values
    kept = kept + SINK + lag * torch.arange(count - 1)[:, None]
    head, tail = torch.arange(SINK), torch.arange(SINK + (count - 1) * lag, n)
    shape = (*k.shape[:2], -1)
    return plain_gather(k, v, torch.cat([head.expand(shape), kept.flatten(2), tail.expand(shape)], 2))


def plain_keep(k: Tensor, v: Tensor, prefix: Tensor) -> tuple[Tensor, Tensor]:
    """These slots of the prefix, int64 [b, Hk, any], and the window."""
    window = torch.arange(k.shape[2] - WINDOW, k.shape[2]).expand(*k.shape[:2], -1)
    return plain_gather(k, v, torch.cat([prefix.sort(-1).values, window], 2))


def plain_window(k: Tensor, q: Tensor, score: str) -> Tensor:
    """What the last queries make of each token of the prefix: [b, Hk, n - w]."""
    n, w, group = k.shape[2], q.shape[2], q.shape[1] // k.shape[1]
    logits = q @ k.repeat_interleave(group, 1).mT * k.shape[3] ** -0.5
    if score == "softmax":
        logits = logits.masked_fill(torch.ones(w, n).triu(n - w + 1).bool(), -torch.inf).softmax(-1)
    return logits.sum(2)[..., : n - w].unflatten(1, (-1, group)).mean(2)


def plain_snapkv(k: Tensor, v: Tensor, q: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    scores = F.max_pool1d(plain_window(k, q, "softmax"), 7, 1, 3)
    return plain_keep(k, v, scores.topk(budget - WINDOW, -1).indices)


def plain_outlier_degree(k: Tensor, kappa: int = 5) -> Tensor:
    unit, slots = F.normalize(k, dim=-1), torch.arange(k.shape[2])
    first, last = (slots - kappa).clamp(min=0), (slots + kappa + 1).clamp(max=k.shape[2])
    sums = F.pad(unit.cumsum(2), (0, 0, 1, 0))
    similarity = (unit * (sums[:, :, last] - sums[:, :, first])).sum(-1) / (last - first)
    return (similarity.mean(-1, keepdim=True) - similarity) / similarity.std(-1, keepdim=True)


def plain_satkv(k: Tensor, v: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    return plain_keep(k, v, plain_outlier_degree(k[:, :, :-WINDOW]).topk(budget - WINDOW, -1).indices)


def plain_protokv(k: Tensor, v: Tensor, q: Tensor, budget: int, score: str, chunks: int) -> tuple[Tensor, Tensor]:
    prefix = k[:, :, :-WINDOW]
    b, heads, m, d = prefix.shape
    projection, phase = kvops.lsh_projection(d)
    sats = plain_outlier_degree(prefix).topk(32, -1).indices
    signs = (prefix.gather(2, sats.unsqueeze(-1).expand(-1, -1, -1, d)) @ projection.mT + phase).cos() > 0
    ids = torch.bucketize(torch.arange(m), torch.arange(1, chunks) * m // chunks, right=True).repeat(b, heads, 1)
    ids.scatter_(2, sats, chunks + (signs * torch.tensor([2, 1])).sum(-1))
    sums = torch.zeros(b, heads, chunks + 4, d).scatter_add_(2, ids.unsqueeze(-1).expand(-1, -1, -1, d), prefix)
    cosines = F.normalize(prefix, dim=-1) @ F.normalize(sums, dim=-1).mT
    ids = cosines.masked_fill((sums == 0).all(-1).unsqueeze(2), -torch.inf).argmax(-1)
    token, zero = plain_window(k, q, score), torch.zeros(b, heads, chunks + 4)
    cluster = zero.scatter_add(2, ids, token) / zero.scatter_add(2, ids, torch.ones_like(token))
    order = token.sort(dim=-1, descending=True, stable=True).indices  # clusters in order, in each its tokens in order
    of_cluster = cluster.gather(2, ids).gather(2, order)
    order = order.gather(2, of_cluster.sort(dim=-1, descending=True, stable=True).indices)
    return plain_keep(k, v, order[..., : budget - WINDOW])


# ---- the lines of the table ----


@dataclass
class Row:
    """One method at one share of the tokens."""

    name: str
    share: float
    compress: Callable | None = None  # (k, v, q, seed) -> kvops.Compressed; None: keeps everything, or cannot reach it
    plain: Callable | None = None  # (k, v, q) -> (k, v): the same in plain PyTorch
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
    m, fixed = lagkv_tokens(n, budget, lag)
    if m < 0:
        return Row(
            name, share, note=f"no r reaches {budget:,} tokens: sink, last partition and rest alone are {fixed:,}"
        )
    r = min(1.0, (m + 0.5) / lag)  # int(r * lag) == m, however the product rounds
    return Row(
        name,
        share,
        lambda k, v, q, seed: kvops.lagkv_compress(k, v, lag, r, sink=SINK),
        lambda k, v, q: plain_lagkv(k, v, lag, m),
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
            plain = functools.partial(plain_protokv, score=score, chunks=chunks)
            name = f"ProtoKV {score[:4]} {chunks}"
            row = asking(name, kvops.protokv_compress, plain, score=score, num_chunks=chunks)
            row.drawn = chunks == 496
            return row

        rows += [
            row("StreamingLLM", lambda k, v, m, seed: kvops.streamingllm_compress(k, v, m), plain_streamingllm),
            row("Random", lambda k, v, m, seed: kvops.random_compress(k, v, m, seed=seed), plain_random),
            lagkv_row(share, 128, n, budget),
            lagkv_row(share, 256, n, budget),
            row("KeyDiff", lambda k, v, m, seed: kvops.keydiff_compress(k, v, m), plain_keydiff),
            asking("SnapKV", kvops.snapkv_compress, plain_snapkv),
            row("SATKV", lambda k, v, m, seed: kvops.satkv_compress(k, v, WINDOW, m), plain_satkv),
            *(protokv(score, chunks) for score in ("dot", "softmax") for chunks in (496, 100)),
        ]
    return rows


# ---- the run ----


class Once(kvops.Method):
    """Evicts after the first append, the context; the question and the answer are all kept."""

    def __init__(self, compress: Callable, queries: list[Tensor], seed: int):
        super().__init__()
        self.compress, self.queries, self.seed = compress, queries, seed

    def _evict(self, k, v, pads, seen):
        return None if self.seen else self.compress(k, v, self.queries[self.layer], self.seed + self.layer).indices


class Reading(AttentionMethod):
    """Keeps everything, and the last queries."""

    def _rows(self, t):
        return 0

    def _remembered(self):
        return WINDOW

    @property
    def queries(self) -> Tensor:
        return self._queries


@dataclass
class Prompt:
    ids: np.ndarray  # [context]
    digits: str
    start: int  # position of the first digit
    depth: float


def make_prompts(count: int, context: int, digits: int) -> list[Prompt]:
    """Contexts of exactly `context` tokens, a key of `digits` digits in each; the same in every run."""
    rng, text = np.random.default_rng([0, context, digits]), Haystack()
    depths = np.linspace(0, 1, min(DEPTHS, count)) if count > 1 else [0.3]
    prompts = []
    for i in range(count):
        depth, key = float(depths[i % len(depths)]), rand_digits(rng, digits)
        needle = needle_text(key)
        ids, (start,) = context_with_needles(rng, text, context, [needle], [depth])
        prompts.append(Prompt(ids, key, start + needle.index(key), depth))
    return prompts


@torch.inference_mode()
def run(context: int = 2048, digits: int = 32, prompts: int = 33, progress: bool = True) -> tuple[list[Row], Prompt]:
    """Runs everything; returns the lines of the table, and the prompt whose kept positions they hold."""
    transformers.utils.logging.disable_progress_bar()
    model = kvops.hf.use_attention(transformers.AutoModelForCausalLM.from_pretrained(MODEL).eval())
    rows, asked = make_rows(context), make_prompts(prompts, context, digits)
    active = [row for row in rows if row.reachable]
    shown = min(range(prompts), key=lambda i: abs(asked[i].depth - 0.3))  # an early key, outside StreamingLLM's window
    question = torch.from_numpy(encode(QUESTION))
    firsts = range(0, prompts, BATCH)
    with tqdm(
        total=len(firsts) * (1 + len(active)) + 1, disable=None if progress else True, leave=False, unit="step"
    ) as bar:
        for first in firsts:
            batch = asked[first : first + BATCH]
            where = f"prompts {first + 1}-{first + len(batch)} of {prompts}"
            bar.set_description(f"{where}: reading")
            ids = torch.from_numpy(np.stack([p.ids for p in batch]))
            full = KVCache(model.config, Reading())
            model.model(ids, past_key_values=full)
            read = [layer.method for layer in full.layers]
            queries = [x.queries for x in read]
            ids = torch.cat([ids, question.expand(len(batch), -1)], 1)
            bar.update()
            for row in active:
                bar.set_description(f"{where}: {row.name}")
                cache = KVCache(model.config, Once(row.compress, queries, first) if row.compress else kvops.Full())
                for i, layer in enumerate(read):  # what reading the context with this cache would hand to it
                    cache.update(layer.k, layer.v, i)
                note_kept(row, cache, batch)
                if first <= shown < first + len(batch):
                    row.kept = kept_slots(cache)[shown - first].numpy()
                with threads(1):  # steps of one token are too small to share
                    said = model.generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        past_key_values=cache,
                        max_new_tokens=digits,
                        min_new_tokens=digits,
                        do_sample=False,
                        pad_token_id=PAD,
                    )[:, ids.shape[1] :].numpy()
                row.right += [float(np.mean(answer == encode(p.digits))) for answer, p in zip(said, batch)]
                bar.update()
        bar.set_description("timing")
        with threads(1):  # so is one context of this model
            measure(active, [tuple(y[:1].contiguous() for y in (x.k, x.v, x.queries)) for x in read])
        bar.update()
    return rows, asked[shown]


@torch.inference_mode()
def run_lookahead(context: int, prompts: int, progress: bool = True) -> list[lookahead.Cell]:
    """Runs the second table."""
    transformers.utils.logging.disable_progress_bar()
    model = kvops.hf.use_attention(transformers.AutoModelForCausalLM.from_pretrained(MODEL).eval())
    cells = lookahead.make_cells()
    question = torch.from_numpy(encode(QUESTION))
    firsts = range(0, prompts, BATCH)
    with tqdm(total=len(firsts) * len(cells), disable=None if progress else True, leave=False, unit="step") as bar:
        for digits, point in dict.fromkeys((cell.digits, cell.point) for cell in cells):
            asked = make_prompts(prompts, context, digits)
            for first in firsts:
                batch = asked[first : first + BATCH]
                ids = torch.from_numpy(np.stack([p.ids for p in batch]))
                more = question.expand(len(batch), -1)
                if point == "after":
                    ids, more = torch.cat([ids, more], 1), more[:, :0]
                prompt = lookahead.read(model, ids)
                for cell in (x for x in cells if (x.digits, x.point) == (digits, point)):
                    bar.set_description(f"{cell.method}, {cell.budget} tokens, cut {point} the question")
                    with threads(1):
                        said = lookahead.answer(model, cell, prompt, ids, more, PAD).numpy()
                    cell.right += [float(np.mean(answer == encode(p.digits))) for answer, p in zip(said, batch)]
                    bar.update()
    return cells


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch with `count` threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def kept_slots(cache: KVCache) -> Tensor:
    """bool [b, layers, heads, context]: is the position kept?"""
    layers = [layer.method for layer in cache.layers]
    b, heads, _ = layers[0].positions.shape
    kept = torch.zeros(b, len(layers), heads, layers[0].seen, dtype=torch.bool)
    for i, method in enumerate(layers):
        kept[:, i].scatter_(2, method.positions, True)
    return kept


def note_kept(row: Row, cache: KVCache, batch: list[Prompt]) -> None:
    """Tokens, bytes and how much of the key the cache holds after the cut."""
    stats, kept = cache.stats(), kept_slots(cache)
    row.tokens = stats[0].tokens_kept
    row.bytes_full = sum(s.bytes_full for s in stats) // len(batch)
    row.bytes_kept = sum(s.bytes_kept for s in stats) // len(batch)
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


# ---- what is shown ----


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
    figure, axes = plt.subplots(
        len(names),
        2 * len(SHARES),
        figsize=(19, height),
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
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_row(row: Row, prompt: Prompt, wide: plt.Axes, near: plt.Axes) -> None:
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
    near.add_patch(plt.Rectangle((at, -0.5), digits, len(kept), fill=False, ec=MARK, lw=2, clip_on=False, zorder=5))
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

    m, _ = lagkv_tokens(context, int(SHARES[-1] * context), 128)
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


def wrapped(line: str) -> str:
    return textwrap.fill(line, 112, subsequent_indent="  ")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2048, help="tokens before the question, 512 to 4000")
    parser.add_argument("--digits", type=int, default=32, help="length of the key, 5 to 64")
    parser.add_argument("--prompts", type=int, default=33, help="how many; their keys lie at 11 depths")
    parser.add_argument("--lookahead", type=int, default=11, help="prompts of the second table; 0 leaves it out")
    parser.add_argument("--json", type=Path, help="file for the tables' numbers")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the picture, demo.png")
    args = parser.parse_args(argv)
    for name, low, high in (("context", 512, 4000), ("digits", 5, 64), ("prompts", 1, 10_000)):
        if not low <= getattr(args, name) <= high:
            parser.error(f"--{name} must be between {low} and {high}, got {getattr(args, name)}")
    record = origin("python", "bench/demo.py", *(argv or sys.argv[1:]))  # before anything is written
    args.out.mkdir(parents=True, exist_ok=True)
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
        cells = run_lookahead(args.context, args.lookahead)
        print(f"\n{lookahead.table(cells, args.context)}\n\n{wrapped(lookahead.findings(cells))}")
        record["lookahead"] = [cell.numbers for cell in cells]
    if args.json:
        write(args.json, record)


if __name__ == "__main__":
    main()
