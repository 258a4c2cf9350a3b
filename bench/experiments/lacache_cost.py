"""Measure what LaCache's compaction adds to a decode step of a stack of Llama-3-8B's shape.

    python bench/experiments/lacache_cost.py [--device cuda] [--budget 512] [--json FILE]

A step consists of the matrix products of 32 layers and the attention over their caches, bf16, one sequence. A
compaction moves all layers in place in one call of `ladder_compact_`; its time is divided by the tokens until the next
one. On a CPU the step is 32 times one layer's products and attention, since the whole stack may not fit into memory.

The script also computes, from the plans of a long stream, how many bytes the paper's settings move compared with the
bytes that attention reads.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import common
import kvops
from common import GROUP, HEAD_DIM, HEADS, LAYERS, MLP, median_seconds
from kvops import ops
from kvops.bench.record import write

HIDDEN, KV_HEADS = HEADS * HEAD_DIM, HEADS // GROUP
GOAL = 0.03  # fraction of a decode step
# Llama-2-7B and Llama-3-8B, 32 layers: Tables 1 and 2 of the paper, S a quarter of the layers, O half of S.
PAPER = {"Table 1, budget 512": 512, "Table 1, budget 256": 256, "Table 2, budget 80": 80}


def stream(budget: int, tokens: int) -> Iterator[kvops.LadderPlan]:
    """Yield the plans of a full cache that receives one token at a time."""
    plan = kvops.lacache_plan(budget, num_layers=LAYERS, budget=budget)
    for _ in range(tokens):
        plan = kvops.lacache_plan(len(plan) + 1, num_layers=LAYERS, budget=budget, state=plan.state)
        yield plan


def moved_slots(plan: kvops.LadderPlan) -> float:
    """Return the slots that a layer moves, averaged over the layers."""
    here = torch.arange(len(plan))
    return statistics.mean(int((plan.indices(layer) != here).sum()) for layer in range(LAYERS))


def moved_against_read(budget: int, tokens: int = 4000) -> float:
    """Return the bytes that compactions read and write, divided by those that attention reads, in a long stream."""
    moved = read = 0.0
    for plan in tqdm(stream(budget, tokens), total=tokens, leave=False):
        read += plan.n
        moved += 2 * moved_slots(plan) if plan.passes else 0
    return moved / read


@torch.inference_mode()
def measure(device: str, budget: int, repeats: int) -> dict[str, float]:
    """Return the seconds of the parts of a decode step and of a compaction."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).bfloat16()

    measured = LAYERS if device == "cuda" else 1
    kv = KV_HEADS * HEAD_DIM
    shapes = [
        (HIDDEN, HIDDEN),
        (kv, HIDDEN),
        (kv, HIDDEN),
        (HIDDEN, HIDDEN),
        (MLP, HIDDEN),
        (MLP, HIDDEN),
        (HIDDEN, MLP),
    ]
    weights = [[randn(*shape) for shape in shapes] for _ in range(measured)]
    inputs = {width: randn(1, width) for width in (HIDDEN, MLP)}
    q = randn(1, HEADS, 1, HEAD_DIM)
    plans = [x for x in stream(budget, 20 * budget) if x.passes][-repeats:]
    n = max(x.n for x in plans)
    k, v = ([randn(1, KV_HEADS, n, HEAD_DIM) for _ in range(LAYERS)] for _ in range(2))
    rope = kvops.Rope.of(HEAD_DIM, 500_000.0, device=device)
    tables = rope.tables(torch.arange(n, device=device))

    def products() -> None:
        for layer in weights:
            for weight in layer:
                F.linear(inputs[weight.shape[1]], weight)

    def attention() -> None:
        for i in range(measured):
            kvops.attention(q, k[i], v[i])

    def rotation() -> None:
        for i in range(measured):
            ops.rope_at_slots(k[i], *tables)

    def compactions() -> None:
        for plan in plans:
            kept = [[x[:, :, : plan.n] for x in group] for group in (k, v)]
            ops.ladder_compact_(*kept, plan=plan, layer=range(LAYERS))

    scale = LAYERS / measured
    tokens = plans[0].ladder.freed * statistics.mean(sum(count for _, count in x.passes) for x in plans)
    return {
        "matrix products": scale * median_seconds(products, device, repeats),
        "attention": scale * median_seconds(attention, device, repeats),
        "keys rotated when read": scale * median_seconds(rotation, device, repeats),
        "a compaction of all layers": median_seconds(compactions, device, 5) / len(plans),
        "tokens until the next": tokens,
    }


def report(found: dict[str, float]) -> tuple[float, str]:
    """Return the compaction's time as a fraction of a step without it, and a report."""
    step = found["matrix products"] + found["attention"]
    share = found["a compaction of all layers"] / found["tokens until the next"] / step
    lines = [f"{name:28} {1e3 * x:10.3f} ms" for name, x in found.items() if name != "tokens until the next"]
    lines.append(
        f"{'reached' if share < GOAL else 'MISSED '}  one compaction for {found['tokens until the next']:.1f} tokens: "
        f"{share:.2%} of a decode step (goal: < {GOAL:.0%})"
    )
    return share, "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=15)
    a = parser.parse_args(argv)
    found = measure(a.device, a.budget, a.repeats)
    share, text = report(found)
    print(f"{LAYERS} layers, budget {a.budget}, on {a.device}\n{text}")
    traffic = {name: moved_against_read(budget) for name, budget in PAPER.items()}
    for name, x in traffic.items():
        print(f"{name}: compactions move {x:.1%} of the bytes that attention reads")
    if a.json:
        record = common.origin(__file__, argv, a.device)
        write(a.json, {**record, "budget": a.budget, "seconds": found, "share": share, "moved over read": traffic})


if __name__ == "__main__":
    main()
