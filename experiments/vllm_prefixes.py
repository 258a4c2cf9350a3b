"""Requests that share a prefix, in vLLM: what eviction costs where the prefix is computed once.

    OMP_NUM_THREADS=1 python experiments/vllm_prefixes.py --json bench/results/vllm-prefixes.json

Needs vLLM 0.32's CPU build. Twelve requests arrive at once. They share 1,400 tokens and end in a question of their own,
and each generates 32 tokens. Engines with vLLM's prefix cache serve them in turns: without eviction, and with each
policy. In every round the shared tokens are new, so they are computed once. The table has CPU time, which other
processes affect little, and how many times that of the engine without eviction.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import common
from kvops.bench.columns import aligned
from kvops.bench.record import write
from kvops.demo import MODEL
from kvops.demo.passkeys import QUESTION, encode, make_prompts

PLAIN = "without eviction"
SPECS = {PLAIN: "", "KeyDiff": "keydiff:budget=512", "SnapKV": "snapkv:budget=512,window=32"}
REQUESTS, SHARED, GENERATED = 12, 1400, 32


def prompts(llm: Any, load: dict) -> list[list[int]]:
    """The shared tokens are those of one of the demo's prompts: another in each round."""
    shared = make_prompts(load["round"] + 1, load["shared"], 8)[-1].ids
    return [[*map(int, shared), *f" Request {i}.".encode(), *encode(QUESTION)] for i in range(load["requests"])]


def measure(model: Path, rounds: int, load: dict) -> dict[str, list[float]]:
    """Return each engine's CPU seconds by round."""
    engines = {
        name: common.Engine([__file__, "--model", str(model), "--child"], {"KVOPS_VLLM": spec})
        for name, spec in SPECS.items()
    }
    try:
        found = common.engines_in_turns(engines, rounds, lambda i: load | {"round": i})
    finally:
        for engine in engines.values():
            engine.end()
    return {name: [sum(steps) for steps in own] for name, own in found.items()}


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__ or "", redraws=False)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the model, which reads bytes")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--shared", type=int, default=SHARED, help="tokens that the requests share")
    parser.add_argument("--generated", type=int, default=GENERATED, help="tokens per request")
    parser.add_argument("--rounds", type=int, default=15, help="timed turns")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        return common.serve(prompts, model=str(args.model), dtype="auto", max_model_len=4096, block_size=32)
    load = {"requests": args.requests, "shared": args.shared, "generated": args.generated}
    seconds = measure(args.model, args.rounds, load)
    plain = seconds[PLAIN]
    rows = [["", "CPU time", "times that without eviction"]]
    ratios = {
        name: statistics.median(x / y for x, y in zip(own, plain)) for name, own in seconds.items() if name != PLAIN
    }
    for name, own in seconds.items():
        rows.append([name, f"{statistics.median(own):.3g} s", f"{ratios.get(name, 1):.2f}"])
    print(aligned(rows))
    if args.json:
        record = {"load": load, "policies": SPECS, "seconds": seconds, "ratio": ratios}
        write(args.json, common.origin(__file__, argv) | record)


if __name__ == "__main__":
    main()
