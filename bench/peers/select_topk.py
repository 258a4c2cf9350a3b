"""Compare select_topk with what numpy and torch have: a batch row of 8 KV heads, on a CPU with one thread.

    python bench/peers/select_topk.py [--json FILE]

All run in turns on the same scores, and the medians of their CPU times are compared: these depend little on other work
on the machine. select_topk's slots ascend, and of equal scores it keeps the lower slots; numpy's are in no order and
torch's are by score, so "+ sort" sorts them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvops import ops
from kvops.bench import eager
from kvops.bench.columns import aligned
from kvops.bench.measure import cpu_seconds
from kvops.bench.record import origin, write

HEADS = 8
LENGTHS = (1024, 4096, 16384, 65536)
FRACTIONS = (2, 4, 16)  # k = n / this
CALLS = 20  # per turn
KINDS: dict[str, Callable[[Tensor], Tensor]] = {  # of normal random numbers
    "normal": lambda x: x,
    "bf16": lambda x: x.bfloat16().float(),  # many are equal
    "half zero": lambda x: x.relu(),
}


def argpartition(scores: np.ndarray, k: int) -> np.ndarray:
    return np.argpartition(scores, scores.shape[-1] - k, axis=-1)[..., -k:]


def rivals(scores: Tensor, k: int) -> dict[str, Callable[[], Any]]:
    """Return a call of each; numpy's partition finds the k best scores, but not where they are."""
    array = scores.numpy()
    return {
        "kvops": lambda: ops.select_topk(scores, k=k),
        "partition": lambda: np.partition(array, array.shape[-1] - k, axis=-1),
        "argpartition": lambda: argpartition(array, k),
        "argpartition + sort": lambda: np.sort(argpartition(array, k), axis=-1),
        "torch.topk": lambda: torch.topk(scores, k),
        "torch.topk + sort": lambda: eager.select_topk(scores, k),
    }


def repeat(call: Callable[[], Any]) -> None:
    for _ in range(CALLS):
        call()


def measure(kind: str, n: int, fraction: int, rounds: int) -> dict[str, Any]:
    """Return the median CPU seconds of each, per call."""
    scores = KINDS[kind](torch.randn(1, HEADS, n, generator=torch.Generator().manual_seed(n)))
    k = n // fraction
    calls = rivals(scores, k)
    best = [torch.as_tensor(calls[x]()) for x in ("kvops", "argpartition + sort", "torch.topk + sort")]
    kept = [scores.gather(2, x).sort().values for x in best]
    if not torch.equal(kept[0], kept[1]) or not torch.equal(kept[0], kept[2]):
        raise RuntimeError(f"{kind}, {n} tokens, k {k}: they keep different scores")
    medians = cpu_seconds({name: partial(repeat, call) for name, call in calls.items()}, rounds)
    return {"kind": kind, "tokens": n, "k": k, "seconds": {name: x / CALLS for name, x in medians.items()}}


def table(found: list[dict]) -> str:
    """Return the times as multiples of kvops'."""
    names = [x for x in found[0]["seconds"] if x != "kvops"]
    rows = [["scores", "tokens", "k", "kvops", *names]]
    for x in found:
        own = x["seconds"]["kvops"]
        rows.append([x["kind"], f"{x['tokens']:,}", f"{x['k']:,}", f"{1e6 * own:.0f} us"])
        rows[-1] += [f"{x['seconds'][name] / own:.2f}x" for name in names]
    return aligned(rows)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=15, help="timed turns")
    parser.add_argument("--json", type=Path, help="write a record")
    a = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = []
    with torch.inference_mode():
        for kind in KINDS:
            for n in a.tokens:
                found += [measure(kind, n, fraction, a.rounds) for fraction in FRACTIONS]
    print(table(found))
    if a.json:
        command = "python", "bench/peers/select_topk.py", *(sys.argv[1:] if argv is None else argv)
        write(a.json, origin(*command) | {"versions": {"numpy": np.__version__}, "cells": found})


if __name__ == "__main__":
    main()
