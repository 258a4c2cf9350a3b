"""Requests that share a prefix, in vLLM: what eviction costs where the prefix is computed once.

    OMP_NUM_THREADS=1 python bench/experiments/vllm_prefixes.py --json bench/results/vllm-prefixes.json

Needs vLLM 0.32's CPU build, and kvops installed as a package. Twelve requests arrive at once. They share 1,400 tokens
and end in a question of their own. Engines with vLLM's prefix cache serve them in turns: without eviction, and with
each policy. In every round the shared tokens are new, so they are computed once. The table has CPU time, which other
processes affect little, and how many times that of the engine without eviction.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from pathlib import Path
from typing import Any

import common
from kvops.bench.columns import aligned
from kvops.bench.record import write
from kvops.demo import MODEL
from kvops.demo.passkeys import QUESTION, encode, make_prompts

PLAIN = "without eviction"
SPECS = {PLAIN: "", "KeyDiff": "keydiff:budget=512", "SnapKV": "snapkv:budget=512,window=32"}
REQUESTS, SHARED, GENERATED = 12, 1400, (8, 32, 100)


def prompts(llm: Any, load: dict) -> list[list[int]]:
    """The shared tokens are those of one of the demo's prompts: another in each round."""
    shared = make_prompts(load["round"] + 1, load["shared"], 8)[-1].ids
    return [[*map(int, shared), *f" Request {i}.".encode(), *encode(QUESTION)] for i in range(load["requests"])]


def measure(model: Path, rounds: int, requests: int, shared: int, generated: list[int]) -> list[dict]:
    """Return a row per number of generated tokens: each engine's CPU seconds by round, and the ratios' medians."""
    command = [__file__, "--model", str(model), "--child"]
    engines = {name: common.Engine(command, {"KVOPS_VLLM": spec}) for name, spec in SPECS.items()}
    rows, turn = [], itertools.count()
    try:
        for tokens in generated:
            load = {"requests": requests, "shared": shared, "generated": tokens}
            found = common.engines_in_turns(engines, [load | {"round": next(turn)} for _ in range(rounds + 1)])
            rows.append({"load": load, "seconds": {name: [sum(x) for x in own] for name, own in found.items()}})
    finally:
        for engine in engines.values():
            engine.end()
    for row in rows:
        plain = row["seconds"][PLAIN]
        row["ratio"] = {
            name: statistics.median(x / y for x, y in zip(own, plain)) for name, own in row["seconds"].items()
        }
    return rows


def table(rows: list[dict]) -> str:
    lines = [["generated", *(f"{name}, CPU time" for name in SPECS)]]
    for row in rows:
        cells = [f"{statistics.median(x):.3g} s ({row['ratio'][name]:.2f})" for name, x in row["seconds"].items()]
        lines.append([str(row["load"]["generated"]), *cells])
    return aligned(lines)


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__ or "", redraws=False)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the model, which reads bytes")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--shared", type=int, default=SHARED, help="tokens that the requests share")
    parser.add_argument("--generated", type=int, nargs="+", default=GENERATED, help="tokens per request")
    parser.add_argument("--rounds", type=int, default=15, help="timed turns")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        return common.serve(prompts, model=str(args.model), dtype="auto", max_model_len=4096, block_size=32)
    rows = measure(args.model, args.rounds, args.requests, args.shared, args.generated)
    print(table(rows))
    if args.json:
        write(args.json, common.origin(__file__, argv) | {"policies": SPECS, "rows": rows})


if __name__ == "__main__":
    main()
