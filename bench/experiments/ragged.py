"""Measure what a step of decode costs when heads differ in length.

    python bench/experiments/ragged.py [--budgets 1024 4096 16384] [--rounds 60] [--json FILE]

Two caches of one layer of Llama-3-8B (32 query heads, 8 KV heads, 128 channels) hold equally many rows: one the same
number in every head, the other with head_mode="adaptive". A policy for this experiment keeps the longest keys of a
prompt four times as long, and the keys of some heads are longer: the longest head holds 13 times as many rows as
the shortest. The caches take steps in turns; the ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

import common
import kvops
from kvops.bench.columns import aligned
from kvops.bench.measure import Contender, in_turns
from kvops.bench.record import write

MODES = ("per_head", "adaptive")
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, eq=False)
class LongKeys(kvops.KeyPolicy):
    """Keeps the longest keys. It never evicts in decode."""

    buffer: None = None

    def scores(self, view: kvops.View) -> Tensor:
        return view.k.float().norm(dim=-1)


def measure(dtype: torch.dtype, budget: int, rounds: int) -> dict[str, Any]:
    """Return the lengths of the heads, the bytes and the seconds of a step by mode, and the ratio of the steps."""
    random = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, KV_HEADS, 4 * budget, HEAD_DIM, generator=random) for _ in range(2))
    k = k * torch.linspace(1, 1.2, KV_HEADS).view(1, -1, 1, 1)
    q = torch.randn(1, HEADS, 1, HEAD_DIM, generator=random)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    caches = [kvops.Cache(LongKeys(budget, head_mode=mode)) for mode in MODES]
    for cache in caches:
        cache.append(k, v)
    step = q, k[:, :, -1:], v[:, :, -1:]
    times = in_turns([Contender(lambda cache=cache: cache.attend(*step)) for cache in caches], 0.0, rounds)
    return {
        "lengths": (caches[1].lengths - (caches[1].seen - 4 * budget)).flatten().tolist(),
        "bytes": {mode: cache.nbytes for mode, cache in zip(MODES, caches)},
        "seconds": {mode: median(of) for mode, of in zip(MODES, zip(*times))},
        "ratio": median(b / a for a, b in times),
    }


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--budgets", type=int, nargs="+", default=[1024, 4096, 16384], help="tokens per head, on average"
    )
    parser.add_argument("--rounds", type=int, default=60)
    a = parser.parse_args(argv)
    rows = [
        {"dtype": name, "budget": budget, **measure(dtype, budget, a.rounds)}
        for name, dtype in DTYPES.items()
        for budget in a.budgets
    ]
    lines = [("dtype", "tokens", "shortest head", "longest", "ms", "ms, adaptive", "ratio", "bytes")]
    for row in rows:
        milliseconds = (f"{1e3 * row['seconds'][mode]:.2f}" for mode in MODES)
        held = row["bytes"]["adaptive"] / row["bytes"]["per_head"]
        lengths = f"{min(row['lengths']):,}", f"{max(row['lengths']):,}"
        lines.append(
            (row["dtype"], f"{row['budget']:,}", *lengths, *milliseconds, f"{row['ratio']:.2f}", f"{held:.2f}")
        )
    print(aligned(lines, left=(0,)))
    if a.json:
        write(a.json, {**common.origin(__file__, argv), "rows": rows})


if __name__ == "__main__":
    main()
