"""Semantic anchors: test the claims of ProtoKV's Sec. 3 about keys on a model.

    python bench/experiments/anchors.py [--model FOLDER] [--text FILE] [--prompts 11] [--context 2048] [--tokens 32]
                                        [--out .] [--json FILE]

The model reads prompts and answers greedily. `kvops.analysis` measures the keys and queries of its full-attention
layers. The pictures follow the paper's figures: anchors-outliers.png (Fig. 2 and 37), anchors-similarity.png (Fig. 3),
anchors-clusters.png (Fig. 4), anchors-attention.png (Fig. 5 and 30), and anchors-dropped.png (Fig. 6: how much of the
answer survives when some of the prompt's keys and values are evicted).

--model is a folder with a transformers model and its tokenizer; the prompts are pieces of the text. By default the
model and prompts are the demo's: each prompt hides a key and ends with the question for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import erf, sqrt
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

import common
from common import save
from kvops import analysis
from kvops.bench.record import write
from kvops.demo import passkeys
from kvops.eval.labels import label_ends
from kvops.eval.reader import Prefill, Reader, caches
from kvops.ops import outlier_degree, select_topk

EDGES = np.arange(-4, 8.01, 0.25)  # of the histogram
BETAS = np.arange(0, 4.01, 0.25)
THRESHOLDS = (1.5, 1.75, 2.0)  # Fig. 37
SKIP = 10  # first tokens that Fig. 30 excludes
GROUPS = 10
DROPS = (4, 8, 16, 32, 64, 128, 256, 512)  # tokens evicted per head
RULES = {
    "of highest outlier degree": "#bc6c25",
    f"the same, none of the first {SKIP}": "#f2c14e",
    "that the answer attends to most": "#2a6f97",
    "random": "#9a9a9a",
}
#: Labels in the pictures; the names above are the keys of the records.
LABELS = dict(zip(RULES, ("outliers", f"outliers after the first {SKIP}", "most attended", "random")))
LEAST = 2e-3  # % of the tokens: the lower limit of the histogram's axis


def keys_of_demo(prompts: int, context: int, digits: int) -> tuple[Tensor, list[slice]]:
    """Return the demo's prompts with their question, [prompts, n], and the positions of each key's digits."""
    asked = passkeys.make_prompts(prompts, context, digits)
    return torch.from_numpy(passkeys.asked(asked)), [slice(p.start, p.start + digits) for p in asked]


def pieces(text: Tensor, prompts: int, context: int, bos: int | None) -> Tensor:
    """Return evenly spaced pieces of the text, [prompts, context], each starting with the model's first token."""
    starts = np.linspace(0, text.shape[1] - context, prompts).astype(int)
    ids = torch.cat([text[:, i : i + context] for i in starts])
    if text[0, 0] == bos:
        ids[:, 0] = bos
    return ids


@torch.inference_mode()
def look(reader: Reader, ids: Tensor, tokens: int, secret: slice | None, seed: int) -> dict[str, np.ndarray]:
    """Measure one prompt, ids [1, n]. Returns arrays [layers, KV heads, ...]."""
    prompt = passkeys.read(reader, ids[:, :-1].numpy(), tokens)  # the last token predicts the first of the answer
    cache, ids = passkeys.keep(prompt).cache, ids.to(reader.model.device)
    length = dict(max_new_tokens=tokens, min_new_tokens=tokens)
    said = reader.model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, do_sample=False, pad_token_id=0, **length
    )
    layers = [(x.k[:, :, : ids.shape[1]], x.last_queries, x.logits) for x in caches(cache)]
    seen = {
        "similarity": [analysis.neighbourhood_similarity(k) for k, _, _ in layers],
        "histogram": [analysis.outlier_histogram(k, EDGES) for k, _, _ in layers],
        "anchors": [analysis.sat_counts(k, THRESHOLDS) for k, _, _ in layers],
        "clustering": [analysis.clustering_degree(k, BETAS).degree for k, _, _ in layers],
        "clustering, distinct": [analysis.clustering_degree(k, BETAS, distinct=True).degree for k, _, _ in layers],
    }
    for skip in (0, SKIP):
        options = dict(groups=GROUPS, skip=skip)
        seen[f"attention, skip {skip}"] = [
            analysis.attention_by_outlier_group(k, q, **options, **model_options) for k, q, model_options in layers
        ]
    if secret is not None:
        seen["outlier degree of the key"] = [outlier_degree(k)[:, :, secret] for k, _, _ in layers]
    found = {name: torch.cat(x).cpu().numpy() for name, x in seen.items()}
    found["dropped"] = dropped(reader, prompt, said, layers, seed)
    return found


def dropped(reader: Reader, prompt: Prefill, said: Tensor, layers: list, seed: int) -> np.ndarray:
    """Return the fraction of the answer's tokens still predicted, each after the correct ones before it: [rules,
    drops].

    Every head of every layer loses the same number of the prompt's tokens, never the last one.
    """
    n = prompt.cache.get_seq_length()
    generator = torch.Generator().manual_seed(seed)
    scores = {name: [] for name in RULES}
    for k, q, options in layers:
        theta = outlier_degree(k[:, :, :n])
        attention = analysis.cumulative_attention(k, q, **options)[:, :, :n].contiguous()
        random = torch.rand(theta.shape, generator=generator).to(k.device)
        for name, x in zip(RULES, (theta, theta, attention, random)):
            scores[name].append(x)
    shares = []
    for by_layer, sinks in zip(scores.values(), (0, SKIP, 0, 0)):
        for drop in DROPS:
            prefill = passkeys.keep(prompt, [select_topk(-x, k=n - drop, sinks=sinks) for x in by_layer])
            logits = reader.model(said[:, n:-1], past_key_values=prefill.cache).logits
            shares.append((logits.argmax(-1) == said[:, n + 1 :]).float().mean().item())
    return np.array(shares).reshape(len(RULES), len(DROPS))


def run(reader: Reader, ids: Tensor, tokens: int, secrets: list[slice] | None) -> dict[str, np.ndarray]:
    """Measure all prompts. Returns arrays [prompts, layers, KV heads, ...], and "dropped" [prompts, rules, drops]."""
    found = [
        look(reader, ids[i : i + 1], tokens, secrets and secrets[i], i)
        for i in tqdm(range(len(ids)), desc="prompts", leave=False)
    ]
    return {name: np.stack([x[name] for x in found]) for name in found[0]}


# ---- the pictures, drawn from the record that --json writes ----


def spread(count: int, most: int) -> list[int]:
    """At most `most` of 0 ... count - 1, evenly spaced."""
    return sorted({round(x) for x in np.linspace(0, count - 1, min(count, most))})


def shades(count: int) -> np.ndarray:
    """A colour for each of `count` layers or heads, the first ones light."""
    return matplotlib.colormaps["viridis_r"](np.linspace(0.2, 1, count))


def array(record: dict, name: str) -> np.ndarray:
    """Numbers of the record as an array; JSON's null is NaN."""
    return np.array(record[name], dtype=float)


def layers_named(layers: Iterable[int]) -> str:
    """ "layer 0", "layers 1 and 2", "no layer"."""
    *others, last = map(str, layers) if (layers := list(layers)) else ("no",)
    return f"layers {', '.join(others)} and {last}" if others else f"layer {last}" if layers else "no layer"


def draw_outliers(record: dict, path: Path) -> None:
    """Fig. 2 and 37: the distribution of Theta, and how many anchors the heads have."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    counts = array(record, "histogram").sum(1)  # [layers, bins]
    density = 100 * counts[:, 1:-1] / counts.sum(1, keepdims=True)
    normal = np.array([100 * (erf(b / sqrt(2)) - erf(a / sqrt(2))) / 2 for a, b in zip(EDGES, EDGES[1:])])
    middles = (EDGES[1:] + EDGES[:-1]) / 2
    ends = []
    for layer, color in enumerate(shades(len(counts))):
        left.stairs(density[layer], EDGES, color=color, lw=1.5)
        last = np.flatnonzero(density[layer] > LEAST)[-1]
        ends.append((middles[last], density[layer, last], f"layer {layer}", color))
    left.plot(middles, normal, color="black", lw=1, ls="--")
    last = np.flatnonzero(normal > LEAST)[-1]
    ends = [*ends, (middles[last], normal[last], "normal", "black")] if len(ends) <= 6 else ends[:: len(ends) - 1]
    left.axvline(THRESHOLDS[0], color="black", lw=0.8, ls=":")
    left.set(xlabel="outlier degree", ylabel=f"% of the tokens per bin of {EDGES[1] - EDGES[0]:g}", yscale="log")
    left.set(ylim=(LEAST, 50), xlim=(EDGES[0], EDGES[-1]))
    label_ends(left, ends, 2.6)

    numbers = array(record, "anchors, five numbers")  # [layers, thresholds, 5]
    layers = len(numbers)
    colors = ["#a9c6d9", "#5f9cc0", "#2a6f97"]
    for i in range(len(THRESHOLDS)):
        boxes = right.bxp(
            [dict(zip(("whislo", "q1", "med", "q3", "whishi"), x)) for x in numbers[:, i]],
            positions=np.arange(layers) + 0.25 * (i - 1),
            widths=0.2,
            patch_artist=True,
            showfliers=False,
            medianprops={"color": "black"},
        )
        for box in boxes["boxes"]:
            box.set_facecolor(colors[i])
    right.set_xticks(spread(layers, 16), [str(x) for x in spread(layers, 16)])
    tokens = record["tokens of a prompt"]
    right.set(xlabel="layer", ylabel=f"anchors per KV head, of {tokens:,} tokens", ylim=0)
    right.set_xlim(-0.6, layers - 0.4)
    names = [f"degree\n> {x}" for x in THRESHOLDS]
    places = layers - 1 + 0.25 * (np.arange(len(THRESHOLDS)) - 1) + 0.1
    label_ends(right, list(zip(places, numbers[-1, :, 2], names, ["#444444"] * 3)), 2.6, size=8)
    many = [i for i, x in enumerate(density) if x[EDGES[:-1] >= 3].sum() > 2 * normal[EDGES[:-1] >= 3].sum()]
    common.title(
        figure, f"{layers_named(many).capitalize()}: more outliers of degree above 3 than in a normal distribution"
    )
    save(figure, path)


def draw_similarity(record: dict, path: Path) -> None:
    """Fig. 3: S by position, of the first prompt."""
    shown = record["similarity by position"]
    values, secret = array(shown, "values"), shown["key"] and slice(*shown["key"])
    layers, heads = shown["layers"], shown["heads"]
    figure = Figure(figsize=(8, 0.9 + 1.4 * len(layers)), layout="constrained")
    grid = figure.subplots(len(layers), len(heads), sharex=True, sharey=True, squeeze=False)
    for i, row in enumerate(grid):
        for j, axes in enumerate(row):
            axes.plot(values[i, j], ".", ms=2, color="#2a6f97", rasterized=True)
            if secret:
                at = np.arange(values.shape[2])[secret]
                axes.plot(at, values[i, j][secret], ".", ms=3.5, color="#d1495b", rasterized=True)
            axes.set_title(f"layer {layers[i]}, KV head {heads[j]}", fontsize=9)
    figure.supxlabel("position, tokens", fontsize=10)
    figure.supylabel("mean cosine to the neighbours", fontsize=10)
    if secret:
        low = values[..., secret].mean(2) < values.mean(2)
        named = layers_named(x for x, every in zip(layers, low.all(1)) if every)
        common.title(
            figure, f"The hidden key's digits (red) resemble their neighbours less than other tokens do in {named}"
        )
    else:
        common.title(figure, "How much each key resembles its neighbours, by position")
    save(figure, path)


def draw_clusters(record: dict, path: Path) -> None:
    """Fig. 4: Gamma by threshold, the mean of the prompts."""
    degree, distinct = (array(record, name) for name in ("clustering", "clustering, distinct"))
    layers, heads = spread(len(degree), 3), degree.shape[1]
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    (row,) = figure.subplots(1, len(layers), sharex=True, squeeze=False)
    for layer, axes in zip(layers, row):
        ends = []
        for head, color in zip(range(heads), shades(heads)):
            axes.plot(BETAS, degree[layer, head], color=color)
            axes.plot(BETAS, distinct[layer, head], color=color, ls="--", lw=1)
            for y, name in ((degree, f"head {head}"), (distinct, "no self-pairs")):
                there = np.flatnonzero(np.isfinite(y[layer, head]))
                if len(there):
                    ends.append((BETAS[there[-1]], y[layer, head, there[-1]], name, color))
        axes.axhline(1, color="black", lw=0.8, ls=":")
        axes.set(xlabel="outlier threshold", title=f"layer {layer}", xlim=(0, 1.03 * BETAS[-1]), ylim=0)
        if heads <= 3:
            label_ends(axes, ends, 2.4, size=8)
    row[0].set_ylabel("clustering degree")
    at = int(np.flatnonzero(BETAS >= 2.5)[0])
    together = [
        i for i, x in enumerate(distinct[..., at]) if np.nanmin(x, initial=np.inf) > 1.1 and np.isfinite(x).any()
    ]
    common.title(figure, f"Outliers above {BETAS[at]:g} resemble each other in all heads of {layers_named(together)}")
    save(figure, path)


def draw_attention(record: dict, path: Path) -> None:
    """Fig. 5 and 30: the answer's attention by group of outlier degree."""
    skips = (0, SKIP)
    shares = [100 * array(record, f"attention, skip {skip}") for skip in skips]  # [layers, heads, groups]
    layers, heads = shares[0].shape[:2]
    rows = layers * heads
    figure = Figure(figsize=(8, 1.7 + min(0.3 * rows, 14)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, skip, x in zip(panels, skips, shares):
        image = axes.imshow(x.reshape(rows, GROUPS), aspect="auto", cmap="Blues", vmin=0, vmax=100)
        if rows <= 40:
            for (y, group), value in np.ndenumerate(x.reshape(rows, GROUPS)):
                color = "white" if value > 55 else "black"
                axes.text(group, y, f"{value:.0f}", ha="center", va="center", fontsize=8, color=color)
        axes.set_xticks(range(GROUPS), [f"{i}" for i in range(1, GROUPS + 1)])
        axes.set_xlabel("tenth of the tokens by outlier degree, highest first", fontsize=9)
        axes.set_title(f"without the first {skip} tokens" if skip else "all tokens", fontsize=10)
    step = 1 if rows <= 40 else heads
    panels[0].set_yticks(
        range(0, rows, step), [f"L{i // heads}" + (f" H{i % heads}" if step == 1 else "") for i in range(0, rows, step)]
    )
    figure.colorbar(image, ax=panels, label="% of the answer's attention", pad=0.01)
    most = int((shares[0][..., 0] > 60).sum())
    common.title(
        figure, f"The tenth of highest outlier degree draws over 60 % of the attention in {most} of {rows} heads"
    )
    save(figure, path)


def draw_dropped(record: dict, path: Path) -> None:
    """Fig. 6: what is left of the answer."""
    left, error = record["answer left"], record["answer left, interval"]
    drops = record["tokens lost"]
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    ends = []
    for i, (name, color) in enumerate(RULES.items()):
        y, half = 100 * np.array(left[name]), 100 * np.array(error[name])
        axes.fill_between(drops, y - half, y + half, color=color, alpha=0.15, lw=0)
        axes.plot(drops, y, "o--" if i == 1 else "o-", ms=3, color=color)
        ends.append((drops[-1], y[-1], LABELS[name], color))
    axes.set_xscale("log", base=2)
    axes.set_xticks(drops, [f"{x:,}" for x in drops])
    tokens = record["tokens of a prompt"]
    axes.set(xlabel=f"tokens evicted per KV head, of {tokens:,}", ylabel="answer tokens still right, %", ylim=(0, 103))
    label_ends(axes, ends, 3.1)
    at = len(drops) // 2
    outlying, _, attended, _ = (100 * left[name][at] for name in RULES)
    common.title(
        figure,
        f"Evicting {drops[at]} tokens per head leaves {attended:.0f} % of the answer if they are the most attended, "
        f"{outlying:.0f} % if they are outliers",
    )
    save(figure, path)


def draw(record: dict, folder: Path) -> None:
    """All five pictures."""
    draw_outliers(record, folder / "anchors-outliers.png")
    draw_similarity(record, folder / "anchors-similarity.png")
    draw_clusters(record, folder / "anchors-clusters.png")
    draw_attention(record, folder / "anchors-attention.png")
    draw_dropped(record, folder / "anchors-dropped.png")


# ---- the numbers ----


def mean(x: np.ndarray) -> np.ndarray:
    """Average over the prompts that have a number; NaN where fewer than half of them do."""
    has = np.isfinite(x)
    count = has.sum(0)
    return np.where(has, x, 0).sum(0) / np.where(2 * count >= len(x), count, np.nan)


def numbers(found: dict, secret: slice | None) -> dict:
    """Return what is drawn, by layer and KV head: means over the prompts and their spread.

    Args:
        found: what `run` returned.
        secret: positions of the key's digits in the first prompt, whose similarity is drawn by position.
    """
    by_head = {
        "similarity": mean(np.nanmean(found["similarity"], -1)),
        "histogram": found["histogram"].sum(0),
        "anchors": mean(found["anchors"]),
        **{name: mean(x) for name, x in found.items() if name.startswith(("clustering", "attention"))},
    }
    if "outlier degree of the key" in found:
        by_head["outlier degree of the key"] = mean(np.nanmean(found["outlier degree of the key"], -1))
    anchors = found["anchors"]  # [prompts, layers, heads, thresholds]
    spreads = np.quantile(anchors, (0, 0.25, 0.5, 0.75, 1), axis=(0, 2)).transpose(1, 2, 0)
    first = found["similarity"][0]
    layers, heads = spread(first.shape[0], 6), spread(first.shape[1], 4)
    left = found["dropped"]
    error = 1.96 * left.std(0) / np.sqrt(len(left))
    return {
        "edges": EDGES.tolist(),
        "thresholds": BETAS.tolist(),
        "thresholds of anchors": THRESHOLDS,
        **{name: as_lists(x) for name, x in by_head.items()},
        "anchors, five numbers": as_lists(spreads),
        "tokens lost": DROPS,
        "answer left": dict(zip(RULES, as_lists(left.mean(0)))),
        "answer left, interval": dict(zip(RULES, as_lists(error))),
        "similarity by position": {
            "layers": layers,
            "heads": heads,
            "key": secret and [secret.start, secret.stop],
            "values": as_lists(first[np.ix_(layers, heads)]),
        },
    }


def as_lists(x: np.ndarray) -> list:
    """Convert to lists for JSON, which has no NaN."""
    return [as_lists(y) if np.ndim(y) else None if np.isnan(y) else round(y.item(), 4) for y in x]


def table(found: dict) -> str:
    """Return the main numbers as text: means over the heads, a column per layer; then the rest of the answer."""
    values = {"similarity to the neighbours": mean(np.nanmean(found["similarity"], -1))}
    for i, threshold in enumerate(THRESHOLDS):
        values[f"tokens of outlier degree > {threshold}"] = mean(found["anchors"])[..., i]
    for name in ("clustering", "clustering, distinct"):
        for i in range(0, len(BETAS), 6):
            values[f"{name}, threshold {BETAS[i]:g}"] = mean(found[name])[..., i]
    for skip in (0, SKIP):
        values[f"attention to the first tenth, skip {skip}"] = mean(found[f"attention, skip {skip}"])[..., 0]
    if "outlier degree of the key" in found:
        values["outlier degree of the key"] = mean(np.nanmean(found["outlier degree of the key"], -1))
    lines = [f"{'by layer':42}" + "".join(f"{layer:>8}" for layer in range(found["anchors"].shape[1]))]
    lines += [f"{name:42}" + "".join(f"{x:8.3g}" for x in heads.mean(1)) for name, heads in values.items()]
    lines += ["", f"{'% of the answer right, by tokens lost':42}" + "".join(f"{x:>8,}" for x in DROPS)]
    shares = 100 * found["dropped"].mean(0)
    return "\n".join([*lines, *(f"{name:42}" + "".join(f"{x:8.1f}" for x in row) for name, row in zip(RULES, shares))])


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, picture="the pictures")
    common.add_model(parser, None)
    parser.add_argument("--prompts", type=int, default=11)
    parser.add_argument("--context", type=int, default=2048, help="tokens of a prompt (before the demo's question)")
    parser.add_argument(
        "--tokens", type=int, default=32, help="tokens of the answer; the demo's keys have as many digits"
    )
    a = parser.parse_args(argv)
    if a.record:
        draw(common.load(parser, a.record, "similarity by position"), a.out)
        print(f"wrote {a.out / 'anchors-*.png'}")
        return
    if a.context < DROPS[-1] + SKIP + 2:
        parser.error(f"--context must be at least {DROPS[-1] + SKIP + 2}, got {a.context}")
    reader, secrets = Reader(passkeys.load_model(a.model, a.device, a.dtype)), None
    if a.text is None and a.model == common.MODEL:
        ids, secrets = keys_of_demo(a.prompts, a.context, a.tokens)
    else:
        text = a.text or common.TEXT
        ids = common.load_text(a.model, text)
        if ids.shape[1] < a.context:
            parser.error(f"{text} has {ids.shape[1]:,} tokens, too few for --context {a.context}")
        ids = pieces(ids, a.prompts, a.context, reader.model.config.bos_token_id)
    found = run(reader, ids, a.tokens, secrets)
    print(table(found))
    settings = {"prompts": a.prompts, "tokens of a prompt": ids.shape[1], "tokens of an answer": a.tokens}
    record = {**common.origin(__file__, argv, torch.device(a.device).type), **settings}
    record |= numbers(found, secrets and secrets[0])
    if a.json:
        write(a.json, record)
    draw(record, a.out)
    print(f"wrote {a.out / 'anchors-*.png'}")


if __name__ == "__main__":
    main()
