"""Is the ladder a good shape? Perplexity against cache size, for LaCache's ladders and for random patterns.

    python bench/experiments/pareto.py [--model FOLDER] [--patterns 60] [--context 1024] [--pieces 8] [--json FILE]
                                       [--out .]

A small version of LaCache's Fig. 3. The model reads pieces of text in full. Then each layer keeps some slots, the same
number on average for every pattern, and the script measures the perplexity of the text that follows. All slots keep
their original positions. A random pattern draws each layer's fraction of the slots, how many of these are the newest
ones, and the length of the runs of the others; the first four slots are always kept. The pattern of StreamingLLM, the
first four and the newest, is measured beside them. Draws pareto.png.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor
from tqdm import tqdm

import common
import kvops
from kvops.bench.record import write
from kvops.demo import passkeys
from kvops.eval.labels import SEVEN, label_ends
from kvops.eval.reader import Prefill, Reader

SINKS = 4
SIZES = (64, 96, 128, 192, 256, 384, 512, 768)  # slots per layer
MARKERS = "osD^"
Ladder = tuple[int, int, str]  # span, overlap, pattern


def ladders(layers: int) -> list[Ladder]:
    """Return the ladders to measure: spans of up to half of the layers, overlaps of half a span (LaCache, Fig. 10)."""
    if layers < 8:  # with (1, 0) all patterns are the same; "paper" refuses (2, 0) in three layers
        return [(1, 0, "paper"), (2, 0, "short"), (2, 0, "official")]
    usual = round(layers / 4)  # LaCache's default
    spans = dict.fromkeys((usual // 2, usual, layers // 2))
    return [*((x, x // 2, "paper") for x in spans), (usual, usual // 2, "official")]


def random_pattern(n: int, total: int, layers: int, generator: np.random.Generator) -> list[Tensor]:
    """Return ascending slots for each layer, `total` in all."""
    shares = generator.dirichlet(np.full(layers, 2.0)) * (total - 2 * SINKS * layers)
    counts = np.minimum(np.floor(shares).astype(int) + 2 * SINKS, n)
    while (missing := total - counts.sum()) > 0:  # slots lost by rounding, or above n, go to other layers
        layer = generator.integers(layers)
        counts[layer] += min(missing, n - counts[layer])
    return [torch.from_numpy(random_slots(n, count, generator)) for count in counts]


def random_slots(n: int, count: int, generator: np.random.Generator) -> np.ndarray:
    """Return the first SINKS, some of the newest, and runs of random positions and length: `count` slots in all."""
    kept = np.zeros(n, dtype=bool)
    kept[:SINKS] = True
    kept[n - int(generator.random() * (count - SINKS)) - 1 :] = True
    run = max(1, int(count / 2 ** generator.uniform(0, np.log2(count))))
    while (missing := count - kept.sum()) > 0:
        free = np.flatnonzero(~kept)
        first = np.searchsorted(free, generator.integers(n))
        kept[free[first : first + min(run, missing)]] = True
    return np.flatnonzero(kept)


@torch.inference_mode()
def perplexity(reader: Reader, whole: Prefill, pattern: list[Tensor] | None, ids: Tensor) -> float:
    """Return the perplexity of the tokens ids[:, 1:], [b, t], after the read text, cut to the pattern."""
    logits = reader.model(ids[:, :-1], past_key_values=passkeys.keep(whole, pattern).cache).logits
    return float(F.cross_entropy(logits.mT.float(), ids[:, 1:]).exp())


@torch.inference_mode()
def run(reader: Reader, text: Tensor, patterns: int, context: int, pieces: int, following: int, seed: int) -> dict:
    """Measure the whole cache, the ladders, StreamingLLM and random patterns: [slots in all layers, perplexity]
    each."""
    layers = reader.num_layers
    step = (text.shape[1] - context - following) // max(1, pieces - 1)
    ids = torch.cat([text[:, i * step : i * step + context + following] for i in range(pieces)])
    whole, rest = passkeys.read(reader, ids[:, :context].cpu().numpy()), ids[:, context:]
    found = {"layers": layers, "whole": [context * layers, perplexity(reader, whole, None, rest)]}
    found |= {"ladders": [], "StreamingLLM": [], "random": []}
    generator = np.random.default_rng(seed)
    for size in tqdm([x for x in SIZES if x < context], leave=False):
        rows = []
        for span, overlap, pattern in ladders(layers):
            shape = dict(num_layers=layers, budget=size, span=span, overlap=overlap, sinks=SINKS, pattern=pattern)
            plan = kvops.lacache_plan(context, **shape)
            slots = [plan.indices(layer) for layer in range(layers)]
            total = len(plan) * layers
            rows.append([span, overlap, pattern, total, perplexity(reader, whole, slots, rest)])
        found["ladders"] += rows
        total = min(x[3] for x in rows)  # the others have a few slots more in each layer
        kept = torch.tensor([*range(SINKS), *range(context - total // layers + SINKS, context)])
        found["StreamingLLM"].append([total, perplexity(reader, whole, [kept] * layers, rest)])
        for _ in range(patterns):
            slots = random_pattern(context, total, layers, generator)
            found["random"].append([total, perplexity(reader, whole, slots, rest)])
    return found


def shares_beaten(found: dict) -> list[dict]:
    """Return by size: the fraction of random patterns that the best ladder beats, and the best of each."""
    rows, totals = [], sorted({x[0] for x in found["random"]})
    for total, larger in zip(totals, [*totals[1:], found["whole"][0]]):
        values = np.array([x[1] for x in found["random"] if x[0] == total])
        best = min((x for x in found["ladders"] if total <= x[3] < larger), key=lambda x: x[4])
        row = {"slots": total, "ladder": best[4], "shape": best[:3], "ladder_slots": best[3]}
        row["StreamingLLM"] = next(x[1] for x in found["StreamingLLM"] if x[0] == total)
        rows.append(row | {"random": float(values.min()), "beaten": float((values > best[4]).mean())})
    return rows


def picture(record: dict, path: Path) -> None:
    """Draw a point for each random pattern and a line for each ladder."""
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    axis = figure.subplots()
    slots, values = np.array(record["random"]).T
    axis.scatter(slots, values, s=7, color="#9a9a9a", lw=0)
    sizes, best = sorted(set(slots)), [values[slots == x].min() for x in sorted(set(slots))]
    ends = [(sizes[-1], np.median(values[slots == sizes[-1]]), "random patterns", "#7a7a7a")]
    drawn = list(dict.fromkeys(tuple(x[:3]) for x in record["ladders"]))
    for (span, overlap, pattern), marker, color in zip(drawn, MARKERS, SEVEN):
        line = np.array([x[3:] for x in record["ladders"] if tuple(x[:3]) == (span, overlap, pattern)])
        axis.plot(*line.T, marker=marker, ms=4, lw=1, color=color)
        alone = sum(x[:2] == (span, overlap) for x in drawn) == 1
        ends.append((*line[-1], f"LaCache, S {span}, O {overlap}" + ("" if alone else f",\n{pattern} pattern"), color))
    line = np.array(record["StreamingLLM"])
    axis.plot(*line.T, marker="x", ms=4, lw=1, color="black")
    ends.append((*line[-1], "StreamingLLM", "black"))
    axis.axhline(record["whole"][1], color="black", lw=0.8, ls=":")
    axis.set(xlabel="slots kept in all layers (log scale)", ylabel="perplexity of the next tokens", xscale="log")
    ends.append((sizes[-1], record["whole"][1], "whole cache", "black"))
    axis.set_xticks(sizes, [f"{x:.0f}" for x in sizes])
    axis.xaxis.set_minor_locator(NullLocator())
    label_ends(axis, ends, 3.4)
    beaten = [x["beaten"] for x in shares_beaten(record)]
    behind = sum(x["ladder"] > low for x, low in zip(shares_beaten(record), best))
    common.title(
        figure,
        f"The best ladder beats {min(beaten):.0%} to {max(beaten):.0%} of random patterns of its size; the best random "
        f"pattern beats it at {behind} of {len(beaten)} sizes".replace("%", " %"),
    )
    common.save(figure, path)


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, picture="pareto.png")
    parser.add_argument("--patterns", type=int, default=60, help="random patterns for each size")
    parser.add_argument("--context", type=int, default=1024, help="tokens read before the cut")
    parser.add_argument("--following", type=int, default=256, help="tokens to measure the perplexity of")
    parser.add_argument("--pieces", type=int, default=8, help="pieces of text")
    parser.add_argument("--seed", type=int, default=0)
    common.add_model(parser, common.TEXT)
    a = parser.parse_args(argv)
    if a.record:
        picture(common.load(parser, a.record, "random", "ladders", "StreamingLLM", "whole"), a.out / "pareto.png")
        print(f"wrote {a.out / 'pareto.png'}")
        return
    reader = Reader(passkeys.load_model(a.model, a.device, a.dtype))
    text = common.load_text(a.model, a.text, a.device)
    found = run(reader, text, a.patterns, a.context, a.pieces, a.following, a.seed)
    picture(found, a.out / "pareto.png")
    print(f"whole cache, {found['whole'][0]:,} slots: perplexity {found['whole'][1]:.3f}")
    for x in shares_beaten(found):
        print(
            f"{x['slots']:6,} slots: ladder {x['ladder']:.3f} {x['shape']}, StreamingLLM {x['StreamingLLM']:.3f}, "
            f"best of {a.patterns} random {x['random']:.3f}; the ladder is better than {x['beaten']:.0%} of them"
        )
    print(f"wrote {a.out / 'pareto.png'}")
    if a.json:
        settings = {x: getattr(a, x) for x in ("patterns", "context", "following", "pieces", "seed")}
        record = {**common.origin(__file__, argv), **settings, **found}
        write(a.json, {**record, "shares_beaten": shares_beaten(found)})


if __name__ == "__main__":
    main()
