"""How far do keys drift that are rotated again and again? Compare post-RoPE with pre-RoPE storage.

    python bench/experiments/rope_drift.py [--compactions 10000] [--budget 512] [--json FILE]

The script runs LaCache's cache of one layer of a 32-layer model token by token, with random keys of 128 channels. A key
stored with RoPE is rotated at every compaction that moves it, and rounded to the storage dtype each time. A key stored
without RoPE is only moved, and rotated when it is read. The error of a slot compares its key as attention sees it with
the exact rotation of the original key, relative to the key's length.
"""

from __future__ import annotations

import torch
from torch import Tensor
from tqdm import tqdm

import common
import kvops
from common import HEAD_DIM, LAYERS
from kvops import ops
from kvops.bench.record import write
from kvops.ops import reference

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Storage:
    """A layer's keys three ways: exact without positions, stored with RoPE, stored without."""

    def __init__(self, slots: int, dtype: torch.dtype, theta: float):
        self.rope = kvops.Rope.of(HEAD_DIM, theta)
        self.exact = torch.zeros(1, 1, slots, HEAD_DIM, dtype=torch.float64)
        self.turned, self.plain = (torch.zeros_like(self.exact, dtype=dtype) for _ in range(2))
        self.times = torch.zeros(slots, dtype=torch.int64)  # how often a slot's key was rotated
        self.n = 0

    def append(self, keys: Tensor) -> None:
        last = self.n + keys.shape[2]
        self.exact[:, :, self.n : last] = keys
        self.plain[:, :, self.n : last] = keys
        self.turned[:, :, self.n : last] = self.at_slots(keys, self.n)
        self.times[self.n : last] = 0
        self.n = last

    def compact(self, plan: kvops.LadderPlan, layer: int) -> None:
        slots = plan.indices(layer)
        k, v = self.turned[:, :, : self.n], self.plain[:, :, : self.n]
        # This rotates the keys and not the values.
        ops.ladder_compact_(k, v, plan=plan, layer=layer, inv_freq=self.rope.inv_freq)
        self.n = len(plan)
        self.exact[:, :, : self.n] = self.exact[:, :, slots]
        self.times[: self.n] = self.times[slots] + (slots != torch.arange(self.n))

    def at_slots(self, keys: Tensor, first: int) -> Tensor:
        """Return the exact rotation in fp64."""
        angles = torch.arange(first, first + keys.shape[2]).unsqueeze(-1) * self.rope.inv_freq.double()
        return reference.rotate(keys, angles.cos(), angles.sin(), False)

    def errors(self) -> dict[str, Tensor]:
        """Return the relative errors by slot."""
        cos, sin = self.rope.tables(torch.arange(self.n))
        wanted = self.at_slots(self.exact[:, :, : self.n], 0)
        seen = {
            "with RoPE": self.turned[:, :, : self.n],
            "without": ops.rope_at_slots(self.plain[:, :, : self.n], cos, sin),
        }
        return {name: ((x.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1))[0, 0] for name, x in seen.items()}


def run(dtype: torch.dtype, compactions: int, budget: int, layer: int, theta: float) -> list[dict]:
    """Return the errors after 1, 10, 100, ... compactions."""
    storage = Storage(budget + LAYERS, dtype, theta)
    generator = torch.Generator().manual_seed(0)
    plan = kvops.lacache_plan(0, num_layers=LAYERS, budget=budget)
    found, done = [], 0
    bar = tqdm(total=compactions, leave=False, desc=str(dtype).removeprefix("torch."))
    while done < compactions:
        storage.append(torch.randn(1, 1, 1, HEAD_DIM, dtype=torch.float64, generator=generator))
        plan = kvops.lacache_plan(storage.n, num_layers=LAYERS, budget=budget, state=plan.state)
        if plan.passes:
            storage.compact(plan, layer)
            done += 1
            bar.update()
            if done == compactions or done in (1, 10, 100, 1000):
                row = {"compactions": done, "most turned": int(storage.times[: storage.n].max())}
                for name, errors in storage.errors().items():
                    row[name] = {"mean": float(errors.mean()), "largest": float(errors.max())}
                found.append(row)
    bar.close()
    return found


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--compactions", type=int, default=10_000)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--layer", type=int, default=16)
    parser.add_argument("--theta", type=float, default=500_000.0, help="Llama 3's")
    a = parser.parse_args(argv)
    found = {}
    print("relative error of a key: mean over the slots, maximum in brackets")
    for name, dtype in DTYPES.items():
        found[name] = run(dtype, a.compactions, a.budget, a.layer, a.theta)
        for x in found[name]:
            errors = "   ".join(
                f"{key} {x[key]['mean']:.1e} ({x[key]['largest']:.1e})" for key in ("with RoPE", "without")
            )
            print(
                f"{name}  {x['compactions']:7,} compactions, a key rotated up to {x['most turned']:5,} times: {errors}"
            )
    if a.json:
        settings = {x: getattr(a, x) for x in ("compactions", "budget", "layer", "theta")}
        write(a.json, {**common.origin(__file__, argv), **settings, "errors": found})


if __name__ == "__main__":
    main()
