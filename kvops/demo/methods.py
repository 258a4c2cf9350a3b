"""The demo's methods: each evicts once, after a text that hides a passkey and before the question for it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from .. import (
    Compressed,
    keydiff_compress,
    lagkv_compress,
    lsh_projection,
    protokv_compress,
    random_compress,
    satkv_compress,
    snapkv_compress,
    streamingllm_compress,
)
from ..bench import eager
from ..bench.measure import threads
from ..cache import AttendingCache
from ..eval.reader import Prefill, Reader, caches
from ..methods.lagkv import SINKS
from ..ops.lag import kept_within
from . import passkeys
from .passkeys import Ids, Prompt

SHARES = (0.5, 0.25)
WINDOW = 32  # SnapKV, ProtoKV and SATKV keep these last tokens; the first two score with their queries
LOOKUP = ((1, 1), (2, 1))  # (layer, KV head) that retrieve the digits; see heads.py in the model's folder
ROUNDS = 21  # of the timing

Layers = list[tuple[Any, Any, Any]]  # tensors: K, V and the last queries of each layer


@dataclass
class Row:
    """One method at one fraction of the tokens."""

    name: str
    share: float
    compress: Callable[..., Compressed] | None = None  # (k, v, q, seed); None: keeps everything, or is unreachable
    plain: Callable[..., Any] | None = None  # (k, v, q): the same in plain PyTorch, to compare times
    note: str = ""
    tokens: int = 0
    bytes_full: int = 0  # of one context, all layers
    bytes_kept: int = 0
    right: list[float] = field(default_factory=list)  # fraction of the digits that are right, per prompt
    ms: float = 0.0
    plain_ms: float = 0.0
    kept: Any = None  # bool [layers, heads, context], for the prompt that is shown
    said: str = ""  # the answer to that prompt

    @property
    def reachable(self) -> bool:
        return self.share == 1 or self.compress is not None

    @property
    def score(self) -> float:
        """Percent of the digits that are right."""
        return 100 * float(np.mean(self.right))

    @property
    def numbers(self) -> dict[str, Any]:
        """The table's numbers, for the JSON file."""
        numbers: dict[str, Any] = {"method": self.name, "share": self.share, "note": self.note}
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
        lambda k, v, q, seed: lagkv_compress(k, v, lag, r, sinks=SINKS),
        lambda k, v, q: eager.lagkv_compress(k, v, lag, r, SINKS),
        ""
        if m
        else "no token per partition: sinks, last partition and remainder use up the budget, nothing is selected",
    )


def protokv(score: Literal["dot", "softmax"], chunks: int) -> tuple[str, Callable[..., Compressed], Callable[..., Any]]:
    def ours(k: Tensor, v: Tensor, q: Tensor, budget: int, seed: int) -> Compressed:
        return protokv_compress(k, v, q, budget, score=score, num_chunks=chunks)

    def plain(k: Tensor, v: Tensor, q: Tensor, budget: int) -> Any:
        return eager.protokv_compress(k, v, q, budget, chunks, *lsh_projection(k.shape[3]), score)

    return f"ProtoKV {score[:4]} {chunks}", ours, plain


# name, (k, v, q, budget, seed) -> Compressed, (k, v, q, budget) -> the same in plain PyTorch
METHODS: list[tuple[str, Callable[..., Compressed], Callable[..., Any]]] = [
    (
        "StreamingLLM",
        lambda k, v, q, budget, seed: streamingllm_compress(k, v, budget),
        lambda k, v, q, budget: eager.streamingllm_compress(k, v, budget),
    ),
    (
        "Random",
        lambda k, v, q, budget, seed: random_compress(k, v, budget, seed=seed),
        lambda k, v, q, budget: eager.random_compress(k, v, budget),
    ),
    (
        "KeyDiff",
        lambda k, v, q, budget, seed: keydiff_compress(k, v, budget),
        lambda k, v, q, budget: eager.keydiff_compress(k, v, budget),
    ),
    (
        "SnapKV",
        lambda k, v, q, budget, seed: snapkv_compress(k, v, q, budget),
        lambda k, v, q, budget: eager.snapkv_compress(k, v, q, budget),
    ),
    (
        "SATKV",
        lambda k, v, q, budget, seed: satkv_compress(k, v, budget, WINDOW),
        lambda k, v, q, budget: eager.satkv_compress(k, v, WINDOW, budget),
    ),
    protokv("dot", 496),
    protokv("dot", 100),
    protokv("softmax", 496),
    protokv("softmax", 100),
]


def make_rows(n: int) -> list[Row]:
    """Return the table's rows for a context of n tokens."""
    rows = [Row("Full cache", 1.0)]
    for share in SHARES:
        budget = int(share * n)
        found = [
            Row(name, share, functools.partial(ours, budget=budget), functools.partial(plain, budget=budget))
            for name, ours, plain in METHODS
        ]
        rows += [*found[:2], lagkv_row(share, 128, n, budget), lagkv_row(share, 256, n, budget), *found[2:]]
    return rows


def layers_of(prefill: Prefill) -> Layers:
    """Return K, V and the last queries of each layer."""
    return [(x.k, x.v, cast(AttendingCache, x).last_queries) for x in caches(prefill.cache)]


def digits_right(said: Ids, batch: Sequence[Prompt]) -> list[float]:
    """Return for each prompt the fraction of digits that are right, compared position by position."""
    return [float(np.mean(answer == passkeys.encode(p.digits))) for answer, p in zip(said, batch)]


@torch.inference_mode()
def measured(rows: Sequence[Row], prompts: Sequence[Prompt], shown: int) -> Iterator[Row]:
    """Measure the rows one by one. The context of prompt `shown` gives them their `kept` and `said`."""
    reader, context, digits = Reader(passkeys.load_model()), len(prompts[0].ids), len(prompts[0].digits)
    batches = []
    for first in range(0, len(prompts), passkeys.BATCH):
        batch = prompts[first : first + passkeys.BATCH]
        whole = passkeys.read(reader, passkeys.contexts(batch), WINDOW)
        batches.append((first, batch, whole, layers_of(whole)))
    for row in rows:
        for first, batch, whole, layers in batches if row.reachable else ():
            slots = row.compress and [row.compress(*x, seed=first + i).indices for i, x in enumerate(layers)]
            prefill = passkeys.keep(whole, slots)
            kept = kept_slots(prefill, context)
            row.tokens = prefill.tokens
            row.bytes_full, row.bytes_kept = prefill.bytes_full // len(batch), prefill.bytes_held // len(batch)
            with threads(1):  # one-token steps are too small to parallelize
                said, _, _ = reader.answer(prefill, passkeys.questions(batch), digits, stops=False)
            row.right += digits_right(said, batch)
            if first <= shown < first + len(batch):
                row.kept, row.said = kept[shown - first].numpy(), passkeys.decode(said[shown - first])
        if row.compress and row.plain:
            with threads(1):  # so is one context of this small model
                one = [(k[:1].contiguous(), v[:1].contiguous(), q[:1].contiguous()) for k, v, q in batches[-1][3]]
                row.ms, row.plain_ms = alternate(functools.partial(row.compress, seed=0), row.plain, one)
        yield row


def kept_slots(prefill: Prefill, context: int) -> Tensor:
    """Return bool [b, layers, heads, context]: whether the cut kept the position."""
    b, heads, _ = prefill.positions[0].shape
    kept = torch.zeros(b, len(prefill.positions), heads, context, dtype=torch.bool)
    for i, positions in enumerate(prefill.positions):
        kept[:, i].scatter_(2, positions, True)
    return kept


def alternate(ours: Callable[..., Any], plain: Callable[..., Any], layers: Layers) -> list[float]:
    """Return the median milliseconds of two functions over all layers of one context. Their runs alternate."""
    times = np.zeros((2, ROUNDS))
    for i in range(-2, ROUNDS):  # two warm-up rounds
        for side, call in enumerate((ours, plain)):
            begin = time.perf_counter()
            for k, v, q in layers:
                call(k, v, q)
            times[side, max(i, 0)] = 1e3 * (time.perf_counter() - begin)
    return [float(x) for x in np.median(times, 1)]
