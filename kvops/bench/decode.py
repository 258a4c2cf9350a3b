"""python -m kvops.bench.decode: time a decode step of one layer under each method, compared with DynamicCache and sdpa.

A step appends a token, attends and, when the method requires it, evicts. Its time is the mean over --steps steps, so it
includes its part of the evictions. Two baselines run in turns with it over as many tokens as the budget:
`window_attention` alone, a lower bound of a step, and transformers' DynamicCache with sdpa attention (cropped back
after each step, untimed). All caches together are larger than the processor's, as those of a model's layers are.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import Cache, Rope, ops
from ..cache.base import Storage
from ..commands import Parser
from ..methods import (
    H2O,
    L2,
    SATKV,
    TOVA,
    Full,
    KeyDiff,
    LaCache,
    LagKV,
    Policy,
    ProtoKV,
    QueryPolicy,
    SnapKV,
    StreamingLLM,
)
from .columns import aligned
from .record import Refused, check_target, origin, write

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FLOOR, BASELINE = "window_attention", "DynamicCache + sdpa"
GROUP, HEAD_DIM, LAYERS = 4, 128, 32
RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results" / "cpu-decode.json"
EVERY = 8  # the baseline runs every so many steps, as each takes as long as ten of ours


def policies(m: int) -> dict[str, tuple[Policy, Rope | None, Storage]]:
    """Return methods that hold about m tokens in decode, with RoPE and storage for slot positions."""
    rope = Rope.of(HEAD_DIM)
    return {
        "full cache": (Full(), None, "pre_rope"),
        "KeyDiff": (KeyDiff(m), None, "pre_rope"),
        "KeyDiff, buffer=1": (KeyDiff(m, buffer=1), None, "pre_rope"),
        "TOVA": (TOVA(m), None, "pre_rope"),
        "H2O": (H2O(m), None, "pre_rope"),
        "L2": (L2(m), None, "pre_rope"),
        "StreamingLLM": (StreamingLLM(m, positions="original"), None, "pre_rope"),
        "StreamingLLM, slots": (StreamingLLM(m), rope, "pre_rope"),
        "StreamingLLM, slots, post-RoPE": (StreamingLLM(m), rope, "post_rope"),
        "LaCache, slots": (LaCache(m), rope, "pre_rope"),
        "LagKV": (LagKV(m // 8, 0.5), None, "pre_rope"),
        "SnapKV": (SnapKV(m), None, "pre_rope"),
        "ProtoKV": (ProtoKV(m), None, "pre_rope"),
        "SATKV": (SATKV(m), None, "pre_rope"),
    }


def filled(
    name: str, policy: Policy, rope: Rope | None, storage: Storage, m: int, token: Callable[..., Tensor]
) -> Cache:
    """Return a cache that has read a prompt and holds about m tokens."""
    cache = Cache(policy, layer=LAYERS // 2, num_layers=LAYERS, rope=rope, storage=storage)
    tokens = 2 * m if name == "LagKV" else m  # LagKV keeps a fraction of the tokens
    k, v = token(1, tokens), token(1, tokens)
    if isinstance(policy, QueryPolicy) or rope is not None:
        cache.attend(token(GROUP, tokens), k, v)
    else:  # the prompt's attention does not matter
        cache.append(k, v)
    return cache


class Baseline:
    """transformers' cache and attention at a constant length."""

    def __init__(self, m: int, token: Callable[..., Tensor]):
        from transformers import DynamicCache
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        self.cache, self.attention = DynamicCache(), sdpa_attention_forward
        self.module = torch.nn.Module()
        vars(self.module).update(num_key_value_groups=GROUP, is_causal=True)
        self.cache.update(token(1, m), token(1, m), 0)

    def step(self, q: Tensor, k: Tensor, v: Tensor) -> float:
        start = time.perf_counter()
        keys, values = self.cache.update(k, v, 0)
        self.attention(self.module, q, keys, values, None, scaling=HEAD_DIM**-0.5)
        seconds = time.perf_counter() - start
        self.cache.crop(-1)
        return seconds


@torch.inference_mode()
def measure(dtype: str, m: int, heads: int, steps: int, methods: list[str] | None) -> list[dict[str, Any]]:
    """Return a row for each method at a budget of m tokens."""
    generator = torch.Generator().manual_seed(0)

    def token(group: int, t: int = 1) -> Tensor:
        return torch.randn(1, heads * group, t, HEAD_DIM, generator=generator).to(DTYPES[dtype])

    chosen = {x: y for x, y in policies(m).items() if methods is None or x in methods}
    caches = {name: filled(name, *x, m, token) for name, x in chosen.items()}
    baseline = Baseline(m, token)
    k_floor, v_floor, visible = token(1, m), token(1, m), torch.tensor([m], dtype=torch.int32)
    inputs = [(token(GROUP), token(1), token(1)) for _ in range(16)]
    seconds: dict[str, list[float]] = {name: [] for name in (*caches, FLOOR, BASELINE)}
    lengths: dict[str, list[int]] = {name: [] for name in caches}
    for step in range(-EVERY, steps):  # the first steps warm up
        q, k, v = inputs[step % len(inputs)]
        for name, cache in caches.items():
            start = time.perf_counter()
            cache.attend(q, k, v)
            seconds[name].append(time.perf_counter() - start)
            lengths[name].append(len(cache))
        start = time.perf_counter()
        ops.window_attention(q, k_floor, v_floor, visible, scores=False)
        seconds[FLOOR].append(time.perf_counter() - start)
        if step % EVERY == 0:
            seconds[BASELINE].append(baseline.step(q, k, v))
    warm = {name: x[1 if name == BASELINE else EVERY :] for name, x in seconds.items()}
    mean, median = ({name: f(x) for name, x in warm.items()} for f in (statistics.mean, statistics.median))
    floor = median[FLOOR] / m  # per token; the median, since it has no evictions to average
    return [
        {
            "method": name,
            "dtype": dtype,
            "budget": m,
            "mean_tokens": tokens,
            "seconds": {"mean": mean[name], "median": median[name]},
            "of_attention": mean[name] / (floor * tokens),
            "faster": median[BASELINE] / mean[name],
        }
        for name in seconds
        for tokens in [statistics.mean(lengths[name][EVERY:]) if name in lengths else m]
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Return a table with a line per method and two columns per dtype and budget."""
    cells = {(x["method"], x["dtype"], x["budget"]): x for x in rows}
    kinds = list(dict.fromkeys((x["dtype"], x["budget"]) for x in rows))
    lines = [["", *(f"{dtype}, {m:,}" for dtype, m in kinds)]]
    for name in dict.fromkeys(x["method"] for x in rows):
        found = [cells.get((name, *kind)) for kind in kinds]
        lines.append([name, *("" if x is None else cell(x) for x in found)])
    return aligned(lines)


def cell(x: dict[str, Any]) -> str:
    return f"{1e3 * x['seconds']['mean']:.2f} ms  {x['of_attention']:.2f}  {x['faster']:.1f}x"


def main(argv: list[str] | None = None) -> int:
    names = list(policies(1024))
    p = Parser(
        prog="python -m kvops.bench.decode",
        description="Time a decode step of one layer under each method on the CPU, in turns with DynamicCache + sdpa.",
    )
    p.add_argument("--json", type=Path, metavar="FILE", help="write the measurements")
    p.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    p.add_argument("--budget", nargs="+", type=int, default=[1024, 8192], help="tokens (default 1024 8192)")
    p.add_argument("--heads", type=int, default=8, help="KV heads (default 8)")
    p.add_argument("--steps", type=int, default=256, help="of decode (default 256)")
    p.add_argument("--methods", nargs="+", choices=names, metavar="METHOD", help=f"of: {', '.join(names)}")
    a = p.parse_args(argv)
    for option, value, least in (("--heads", a.heads, 1), ("--steps", a.steps, 1), ("--budget", min(a.budget), 128)):
        if value < least:
            p.error(f"{option}: expected at least {least}, got {value}")
    try:
        if a.json:
            check_target("json", a.json)
    except Refused as error:
        p.error(str(error))
    try:
        import transformers  # noqa: F401
    except ImportError:
        p.error("the baseline is transformers' DynamicCache; pip install transformers")
    said = sys.argv[1:] if argv is None else argv
    record = {**origin("python", "-m", "kvops.bench.decode", *said), "heads": a.heads, "steps": a.steps, "rows": []}
    for dtype, m in product(a.dtype, a.budget):
        print(f"{dtype}, {m:,} tokens: {a.steps} steps of each method", flush=True)
        record["rows"] += measure(dtype, m, a.heads, a.steps, a.methods)
        if a.json:
            write(a.json, record)
    print("mean time of a step; times that of the attention operator over as many tokens; and how many times longer")
    print("DynamicCache + sdpa takes")
    print(table(record["rows"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
