"""Measure what a step of decode takes in rows of bf16, int8 and fp8.

    python bench/experiments/rounded_step.py [--tokens 8192 32768] [--groups 1 2 4 8] [--rounds 12] [--json FILE]

Layers with 8 KV heads of 128 channels, and 1 to 8 query heads for each, together larger than the processor's caches.
The dtypes take turns; a ratio is the median of the rounds' ratios to bf16. KVOPS_ISA names the instruction-set level,
if it is not to be the best one.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

import common
import kvops
from kvops.bench.columns import aligned
from kvops.bench.measure import Contender, in_turns
from kvops.bench.record import write

HEADS, HEAD_DIM = 8, 128
ROUNDED = ("int8", "fp8")


def measure(tokens: int, group: int, size: int, rounds: int) -> dict[str, Any]:
    """Return the number of layers, the seconds of a step by dtype, and their ratios to bf16."""
    random = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, HEADS, tokens, HEAD_DIM, generator=random).bfloat16() for _ in range(2))
    q = torch.randn(1, HEADS * group, 1, HEAD_DIM, generator=random).bfloat16()
    (k8, k_scale), (v8, v_scale) = kvops.quantize_rows(k), kvops.quantize_rows(v)
    inputs = {
        "bf16": {"k": k, "v": v},
        "int8": {"k": k8, "v": v8, "k_scale": k_scale, "v_scale": v_scale},
        "fp8": {x: y.to(torch.float8_e4m3fn) for x, y in (("k", k), ("v", v))},
    }
    visible = torch.tensor([tokens], dtype=torch.int32)
    layers = -(-size // (2 * k.nbytes))
    caches = [[{name: of.clone() for name, of in x.items()} for _ in range(layers)] for x in inputs.values()]

    def step(cache: list[dict[str, Tensor]]) -> None:
        for layer in cache:
            kvops.ops.window_attention(q, visible=visible, scores=False, **layer)

    rivals = [Contender(partial(step, cache)) for cache in caches]
    times = in_turns(rivals, 0.0, rounds)
    return {
        "layers": layers,
        "seconds": {name: median(of) for name, of in zip(inputs, zip(*times))},
        "ratio": {name: median(x[i] / x[0] for x in times) for i, name in enumerate(inputs) if name in ROUNDED},
    }


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 4, 8], help="query heads per KV head")
    parser.add_argument("--bytes", type=int, default=2**30, help="of the layers in bf16, at least")
    parser.add_argument("--rounds", type=int, default=12)
    a = parser.parse_args(argv)
    rows = [
        {"tokens": tokens, "group": group, **measure(tokens, group, a.bytes, a.rounds)}
        for tokens in a.tokens
        for group in a.groups
    ]
    lines = [("tokens", "query heads", "ms, bf16", *ROUNDED)]
    for row in rows:
        ratios = (f"{row['ratio'][x]:.2f}" for x in ROUNDED)
        lines.append((f"{row['tokens']:,}", str(row["group"]), f"{1e3 * row['seconds']['bf16']:.2f}", *ratios))
    print(aligned(lines, left=()))
    if a.json:
        write(a.json, {**common.origin(__file__, argv), "rows": rows})


if __name__ == "__main__":
    main()
