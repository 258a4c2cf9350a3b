"""How well do clusters of keys serve, and what does finding them cost? ProtoKV's prototypes beside K-means.

    python bench/experiments/clusters.py [--model smollm2] [--prompts 8] [--context 1024] [--budget 256] [--json FILE]

ProtoKV assigns each token once to the nearest of t prototypes, in O(n t d). ClusterKV and SqueezedAttention run K-means
for e iterations, in O(e n t d) (the paper's Sec. 4.2, Fig. 7, Table 3). Both assign with the same operator here, have
as many clusters, and keep whole clusters by the same scores.

The prompts are `needle`'s, in the model's chat template; the correct answer is read after them. "once": the clusters
are chosen by the prompt's last queries, and the others are evicted. "every step": they are chosen again by each query
of the answer, which needs the evicted ones in other memory (the paper's Table 3, "Decoding"). The last 32 tokens of the
prompt are always kept. The mass is the share of the answer's attention to the prompt that falls on the kept tokens, the
mean over layers, heads, queries and prompts.
The script also prints the CPU time of the clustering of one prompt, all layers, and the mean cosine of a key and its
cluster's center.
"""

from __future__ import annotations

import argparse
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize
from tqdm import tqdm

import common
import kvops
from kvops.bench.columns import aligned
from kvops.bench.eager import cluster_centers
from kvops.bench.measure import cpu_seconds
from kvops.bench.record import write
from kvops.demo import passkeys
from kvops.eval import models
from kvops.eval.reader import Reader, caches
from kvops.eval.tasks import TASKS, Filler
from kvops.ops import cluster_mean, cluster_priority, select_topk, window_scores
from variants import KMeansKV

WINDOW = 32
ITERATIONS = (1, 2, 5, 10, 20)


class Blocks(kvops.ProtoKV):
    """Clusters of consecutive tokens: chunks, without any assignment."""

    def assign(self, view: kvops.View, starts: Tensor | None, prefix: Tensor) -> Tensor:
        count = self.chunks(view)[0] + self.num_buckets
        at = torch.arange(view.n, device=view.k.device) * count // prefix[:, None]
        at = at.masked_fill(torch.arange(view.n, device=view.k.device) >= prefix[:, None], -1)
        return at.int()[:, None].expand(view.rows, view.heads, -1).contiguous()


CLUSTERINGS = {
    "ProtoKV": kvops.ProtoKV,
    "ProtoKV, chunks alone": lambda budget, window: kvops.ProtoKV(budget, window, clusters="chunks"),
    "consecutive tokens": Blocks,
    **{f"K-means, {e}": lambda budget, window, e=e: KMeansKV(budget, window, iterations=e) for e in ITERATIONS},
}


class Layer(NamedTuple):
    """What one layer read: K and V of the prompt, [b, Hk, n, d]; the queries of its last tokens, and of the answer."""

    k: Tensor
    v: Tensor
    window: Tensor
    answer: Tensor
    logits: dict


def read(reader: Reader, filler: Filler, prompts: int, context: int, seed: int) -> list[Layer]:
    """Read prompts with their questions and correct answers."""
    asked = TASKS["needle"](chat=bool(filler.tokenizer.chat_template)).prompts(filler, context, prompts, seed)
    answers = [filler.encode(x.turns[0].answers[0]) for x in asked]
    ids = np.stack([np.concatenate([x.context, x.turns[0].question, y]) for x, y in zip(asked, answers)])
    rows = len(answers[0])
    whole, n = passkeys.read(reader, ids, WINDOW + rows), ids.shape[1] - rows
    found = []
    for x in caches(whole.cache):
        k, v, q = x.k[:, :, :n].contiguous(), x.v[:, :, :n].contiguous(), x.last_queries
        found.append(Layer(k, v, q[:, :, :WINDOW], q[:, :, WINDOW:], x.logits))
    return found


def kept(scores: Tensor, clusters: Tensor, count: int, budget: int) -> Tensor:
    """Return the slots of the best clusters and the last WINDOW slots, int64 [b, Hk, budget]."""
    priority, _ = cluster_priority(
        scores, clusters, cluster_mean(scores, clusters, num_clusters=count), k=budget - WINDOW
    )
    return select_topk(priority, k=budget, window=WINDOW)


def mass(layer: Layer, slots: Tensor, rows: slice = slice(None)) -> Tensor:
    """Return the share of the attention of some queries of the answer on these slots, [b]."""
    n = layer.k.shape[2]
    visible = torch.full((layer.answer[:, :, rows].shape[2],), n, dtype=torch.int32, device=layer.k.device)
    weights = window_scores(layer.answer[:, :, rows], layer.k, visible, reduce="mean", **layer.logits)
    return weights.gather(2, slots).sum(-1).mean(1)


def measure(layers: list[Layer], policy: kvops.ProtoKV, budget: int) -> dict[str, list[float]]:
    """Return by prompt: the mass once and at every step, by raw and softmax scores, and the centers' cosine."""
    found: dict[str, list[Tensor]] = {}
    for layer in layers:
        b, _, n, _ = layer.k.shape
        view, on = kvops.View(layer.k, layer.k), dict(dtype=torch.int32, device=layer.k.device)
        clusters = policy.assign(view, None, torch.full((b,), n - WINDOW, **on))
        count = policy.chunks(view)[0] + policy.num_buckets
        steps = [slice(i, i + 1) for i in range(layer.answer.shape[2])]
        for score in ("dot", "softmax"):
            options = {"score": score, **layer.logits}
            by_window = window_scores(layer.window, layer.k, torch.arange(n - WINDOW + 1, n + 1, **on), **options)
            once = mass(layer, kept(by_window, clusters, count, budget))
            found.setdefault(f"once, {score}", []).append(once)
            every = []
            for step in steps:
                scores = window_scores(layer.answer[:, :, step], layer.k, torch.tensor([n], **on), **options)
                every.append(mass(layer, kept(scores, clusters, count, budget), step))
            found.setdefault(f"every step, {score}", []).append(torch.stack(every).mean(0))
        found.setdefault("cosine", []).append(cosine(layer.k, clusters, count))
    return {name: torch.stack(x).mean(0).tolist() for name, x in found.items()}


def cosine(k: Tensor, clusters: Tensor, count: int) -> Tensor:
    """Return the mean cosine of each clustered key and its cluster's mean direction, [b]."""
    keys = normalize(k.float(), dim=-1)
    at = clusters.masked_fill(clusters < 0, count).long()
    centers = normalize(cluster_centers(keys, at, count + 1)[0], dim=-1)
    found = (keys * centers.gather(2, at.unsqueeze(-1).expand_as(keys))).sum(-1)
    return found.masked_fill(clusters < 0, 0).sum((1, 2)) / (clusters >= 0).sum((1, 2))


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the model, the prompts and the budget."""
    common.add_model(parser, common.TEXT)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024, help="tokens before the question")
    parser.add_argument("--budget", type=int, default=256, help="tokens to keep")
    parser.add_argument("--seed", type=int, default=0)


def check_budget(parser: argparse.ArgumentParser, a: argparse.Namespace) -> None:
    if not WINDOW < a.budget < a.context:
        parser.error(f"--budget must be more than {WINDOW} and less than --context {a.context}, got {a.budget}")


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    add_prompts(parser)
    parser.add_argument("--repeats", type=int, default=5, help="of the times")
    a = parser.parse_args(argv)
    check_budget(parser, a)
    reader, filler = models.load(str(a.model), a.text, a.dtype, a.device, lambda model, _: Reader(model))
    with torch.inference_mode():
        layers = read(reader, filler, a.prompts, a.context, a.seed)
        policies = {name: make(a.budget, WINDOW) for name, make in CLUSTERINGS.items()}
        found = {name: measure(layers, x, a.budget) for name, x in tqdm(policies.items(), leave=False)}
        views = [kvops.View(x.k[:1], x.k[:1]) for x in layers]
        prefix = torch.tensor([layers[0].k.shape[2] - WINDOW], dtype=torch.int32, device=layers[0].k.device)
        calls = {
            name: lambda policy=policy: [policy.assign(x, None, prefix) for x in views]
            for name, policy in policies.items()
        }
        seconds = cpu_seconds(calls, a.repeats)
    columns = list(next(iter(found.values())))
    lines = [("", *(f"{x}, %" if x != "cosine" else x for x in columns), "CPU ms", "of ProtoKV's")]
    for name, x in found.items():
        values = [f"{fmean(v):.3f}" if c == "cosine" else f"{100 * fmean(v):.1f}" for c, v in x.items()]
        lines.append((name, *values, f"{1e3 * seconds[name]:.1f}", f"{seconds[name] / seconds['ProtoKV']:.1f}x"))
    print(aligned(lines, left=(0,)))
    if a.json:
        settings = {x: getattr(a, x) for x in ("prompts", "context", "budget", "seed", "repeats")}
        write(a.json, {**common.origin(__file__, argv, a.device), **settings, "mass": found, "seconds": seconds})


if __name__ == "__main__":
    main()
