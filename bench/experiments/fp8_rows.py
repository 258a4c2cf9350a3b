"""Do methods keep the same tokens if K and V are stored in fp8?

    python bench/experiments/fp8_rows.py [--model smollm2] [--prompts 8] [--context 1024] [--budget 256] [--json FILE]

The prompts are those of clusters.py. Each layer's cache is cut from its rows in bf16 and in two fp8 formats, without
scales, as serving engines store them by default. "same": the share of the tokens kept from bf16 rows that are also kept
from fp8 rows. "lost": by how much the share of the answer's attention on the kept tokens falls. Both are means over
layers, heads and prompts; the attention is that of the bf16 keys. LagKV keeps a quarter of each partition (L 128).
"""

from __future__ import annotations

from statistics import fmean

import torch
from tqdm import tqdm

import clusters
import common
import kvops
from clusters import Layer, mass, read
from kvops.bench.columns import aligned
from kvops.bench.record import write
from kvops.eval import models
from kvops.eval.reader import Reader

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
#: Method: (k, v, the last queries of the prompt, budget) -> slots, int64 [b, Hk, any].
METHODS = {
    "LagKV": lambda k, v, q, budget: kvops.lagkv_compress(k, v, 128, 0.25).indices,
    "KeyDiff": lambda k, v, q, budget: kvops.keydiff_compress(k, v, budget).indices,
    "L2": lambda k, v, q, budget: kvops.l2_compress(k, v, budget).indices,
    "SATKV": lambda k, v, q, budget: kvops.satkv_compress(k, v, budget).indices,
    "SnapKV": lambda k, v, q, budget: kvops.snapkv_compress(k, v, q, budget).indices,
    "TOVA": lambda k, v, q, budget: kvops.tova_compress(k, v, q[:, :, -1:], budget).indices,
    "ChunkKV": lambda k, v, q, budget: kvops.chunkkv_compress(k, v, q, budget).indices,
    "ProtoKV": lambda k, v, q, budget: kvops.protokv_compress(k, v, q, budget, score="softmax").indices,
}


def measure(layers: list[Layer], name: str, budget: int) -> dict[str, dict[str, list[float]]]:
    """Return by format and prompt: the share of the same tokens, and the mass lost."""
    found: dict[str, dict[str, list[torch.Tensor]]] = {x: {"same": [], "lost": []} for x in FORMATS}
    for layer in layers:
        q = layer.window.contiguous()
        exact = METHODS[name](layer.k, layer.v, q, budget)
        for label, dtype in FORMATS.items():
            kept = METHODS[name](layer.k.to(dtype), layer.v.to(dtype), q, budget)
            same = (exact.unsqueeze(-1) == kept.unsqueeze(-2)).any(-1).float().mean((1, 2))
            found[label]["same"].append(same)
            found[label]["lost"].append(mass(layer, exact) - mass(layer, kept))
    return {x: {y: torch.stack(z).mean(0).tolist() for y, z in of.items()} for x, of in found.items()}


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    clusters.add_prompts(parser)
    a = parser.parse_args(argv)
    clusters.check_budget(parser, a)
    reader, filler = models.load(str(a.model), a.text, "bfloat16", a.device, lambda model, _: Reader(model))
    with torch.inference_mode():
        layers = read(reader, filler, a.prompts, a.context, a.seed)
        found = {name: measure(layers, name, a.budget) for name in tqdm(METHODS, leave=False)}
    lines = [("%", *(f"{x}, {y}" for x in FORMATS for y in ("same", "lost")))]
    for name, of in found.items():
        lines.append((name, *(f"{100 * fmean(of[x][y]):.1f}" for x in FORMATS for y in ("same", "lost"))))
    print(aligned(lines, left=(0,)))
    if a.json:
        settings = {x: getattr(a, x) for x in ("prompts", "context", "budget", "seed")}
        write(a.json, {**common.origin(__file__, argv, a.device), **settings, "kept": found})


if __name__ == "__main__":
    main()
