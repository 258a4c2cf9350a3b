"""The measurements of this package on every layer of a model, as a record and as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..bench.markdown import escape
from ..methods.queries import RecordQueries
from ..methods.registry import policy
from ..methods.table import METHODS
from ..ops.window import causal_limits
from . import anchors, attention, geometry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WINDOW = 32  # queries of the prompt's end, for the methods that observe with them
BOUNDED = 64  # queries whose bounds are computed
DISTANCE = 64  # tokens between distant keys
SHARE = 8  # the methods of `VOLUMES` keep 1 of so many keys
VOLUMES = ("keydiff", "tova", "snapkv", "streamingllm", "random")

#: The gate: a name, what must hold, and whether it does, given the record of the layers after the first.
Layers = list[dict[str, Any]]
GATE: dict[str, tuple[str, Callable[[Layers], float], Callable[[float], bool]]] = {
    "sinks": (
        "fraction of the query heads with a sink mass over 0.3: more than 0.5",
        lambda layers: mean([x > 0.3 for layer in layers for x in layer["sink_mass"]]),
        lambda x: x > 0.5,
    ),
    "opposed": (
        "mean cosine of queries and keys: less than 0",
        lambda layers: mean([x for layer in layers for x in layer["query_key_cosine"]]),
        lambda x: x < 0,
    ),
    "attracting": (
        "Spearman's rho of -cos(key, anchor) and attention: more than 0.7",
        lambda layers: mean([x for layer in layers for x in layer["rank_correlation"]]),
        lambda x: x > 0.7,
    ),
    "local": (
        f"distance, 1 - cosine, of keys {DISTANCE} tokens or more apart over that of adjacent keys: more than 2",
        lambda layers: mean([x for layer in layers for x in layer["locality_ratio"]]),
        lambda x: x > 2,
    ),
}


def mean(values: list[Any]) -> float:
    return float(np.mean(np.array(values, dtype=np.float64)))


@torch.inference_mode()
def measure(model: PreTrainedModel, ids: np.ndarray, sinks: int = 4) -> Layers:
    """Measure the layers of a model that have an ordinary KV cache.

    The last quarter of each text stands for an answer: its queries attend to the tokens before it, the prompt.

    Args:
        model: a causal language model with kvops' attention (`kvops.hf.use_attention`).
        ids: int64 [texts, tokens], at least 4 * DISTANCE tokens each.
        sinks: first tokens that count as attention sinks.

    Returns:
        For each layer its index and, averaged over the texts, lists by head. See docs/analysis.md.
    """
    texts = [measure_text(model, torch.from_numpy(x[None]).to(model.device), sinks) for x in ids]
    averaged = []
    for layers in zip(*texts):
        first = layers[0]
        values = {name: np.mean([x[name] for x in layers], 0).tolist() for name in first if name != "layer"}
        averaged.append({"layer": first["layer"], **values})
    return averaged


def measure_text(model: PreTrainedModel, ids: Tensor, sinks: int) -> Layers:
    """Measure one text, ids int64 [1, tokens]."""
    from ..hf import KVCache

    rows = ids.shape[1] // 4
    cache = KVCache(model.config, RecordQueries(last=rows + WINDOW))
    model(ids, past_key_values=cache, logits_to_keep=1)
    found = []
    for i, layer in enumerate(cache.layers):
        if hasattr(layer, "cache"):  # else it does not evict: a sliding window, or no attention
            one = layer.cache
            queries = one.last_queries[:, :, WINDOW:], one.last_queries[:, :, :WINDOW]
            measured = measure_layer(one.k, one.v, *queries, sinks, one.logits)
            found.append({"layer": i, **{name: x[0].double().tolist() for name, x in measured.items()}})
    return found


def measure_layer(
    k: Tensor, v: Tensor, q: Tensor, q_window: Tensor, sinks: int, logits: dict[str, Any]
) -> dict[str, Tensor]:
    """Measure one layer.

    Args:
        k, v: [1, Hk, n, d], the cache.
        q: [1, Hq, rows, d], the queries of the last tokens, the answer.
        q_window: [1, Hq, WINDOW, d], the queries before them.
        sinks: see `measure`.
        logits: scale, softcap and sink_logits of the model's attention.

    Returns:
        Tensors [1, heads], by name.
    """
    rows = q.shape[2]
    prompt, values = k[:, :, :-rows], v[:, :, :-rows]
    own = {"visible": causal_limits(k.shape[2], rows, k.device), **logits}  # with the answer's keys, as the model did
    near = geometry.key_locality(k, DISTANCE)
    found = {
        "sink_mass": attention.sink_attention(k, q, sinks, **own),
        "query_key_cosine": geometry.query_key_cosine(prompt, q),
        "rank_correlation": attention.attention_rank_correlation(k, q, **own),
        "adjacent_cosine": near.adjacent,
        "distant_cosine": near.distant,
        "locality_ratio": near.ratio,
        "outlier_attention": anchors.attention_by_outlier_group(prompt, q, **logits)[:, :, 0],
    }
    last = q[:, :, -BOUNDED:]
    lemma = geometry.attention_bound(prompt, last, scale=logits.get("scale"))
    theorem = geometry.anchor_bound(prompt, last)
    most = lemma.weight.argmax(-1, keepdim=True)  # k*, for each query
    similarity = theorem.similarity.expand_as(theorem.bound)
    for name, x in (
        ("top_cosine", lemma.cosine),
        ("top_cosine_bound", lemma.bound),
        ("top_anchor_cosine", similarity),
        ("top_anchor_bound", theorem.bound),
        ("top_premise", theorem.premise.double()),
    ):
        found[name] = x.gather(-1, most).mean((2, 3))
    found["lemma_holds"] = (lemma.cosine >= lemma.bound - 1e-9).double().mean((2, 3))
    keep = max(1, prompt.shape[2] // SHARE)
    for name in VOLUMES:
        kept = one_shot(name, keep, prompt, values, q_window)
        found[f"log_volume {name}"] = geometry.log_volume(prompt, kept)
    return found


def one_shot(name: str, keep: int, k: Tensor, v: Tensor, q_window: Tensor) -> Tensor:
    """The slots that a method of `VOLUMES` keeps."""
    settings: dict[str, Any] = {"window": min(WINDOW, keep)} if name == "snapkv" else {}
    queries = {"snapkv": q_window[:, :, -min(WINDOW, keep) :], "tova": q_window[:, :, -1:]}
    return policy(name, budget=keep, **settings).compress(k, v, *([queries[name]] if name in queries else [])).indices


def gate(layers: Layers) -> dict[str, dict[str, Any]]:
    """Whether the layers after the first are in the regime that the papers describe."""
    later = [x for x in layers if x["layer"] > 0]
    if not later:
        return {name: {"expected": text, "value": None, "holds": False} for name, (text, _, _) in GATE.items()}
    values = {name: value(later) for name, (_, value, _) in GATE.items()}
    return {name: {"expected": GATE[name][0], "value": x, "holds": GATE[name][2](x)} for name, x in values.items()}


def markdown(record: dict[str, Any]) -> str:
    """The record as Markdown: the gate, and tables by layer."""
    layers, settings = record["layers"], record["settings"]
    lines = [["", "expected", "measured", ""], ["---"] * 4]
    for name, x in record["gate"].items():
        value = "–" if x["value"] is None else f"{x['value']:.3g}"
        lines.append([name, x["expected"], value, "holds" if x["holds"] else "does not hold"])
    parts = [
        f"# Keys and queries of {escape(str(settings['model']))}",
        f"{settings['prompts']} texts of {settings['tokens']:,} tokens. The last quarter of a text stands for the "
        "answer, the rest is the prompt. Means over texts and heads; in brackets: the lowest and the highest head.",
        "## The papers' regime, in the layers after the first",
        table(lines),
    ]
    for title, columns in (
        (
            "Attention and similarity",
            {
                f"attention on the first {settings['sinks']}": "sink_mass",
                "cos(q, k)": "query_key_cosine",
                "rho of -cos(k, anchor) and attention": "rank_correlation",
                "cos of adjacent keys": "adjacent_cosine",
                f"of keys {DISTANCE} or more apart": "distant_cosine",
                "attention on the 10 % most outlying": "outlier_attention",
            },
        ),
        (
            "KeyDiff's bounds, for the key with the most attention",
            {
                "cos(k*, q)": "top_cosine",
                "at least (Lemma 3.1)": "top_cosine_bound",
                "the lemma holds, of all keys": "lemma_holds",
                "cos(mean, k*)": "top_anchor_cosine",
                "at most (Theorem 3.2)": "top_anchor_bound",
                "cos(mean, q) < 0 < cos(k*, q)": "top_premise",
            },
        ),
        (
            f"log det of the kept keys' Gram matrix, 1 of {SHARE} keys kept",
            {METHODS[x].label: f"log_volume {x}" for x in VOLUMES},
        ),
    ):
        lines = [["layer", *columns], ["---:"] * (len(columns) + 1)]
        lines += [[str(x["layer"]), *(cell(x[name]) for name in columns.values())] for x in layers]
        parts += [f"## {title}", table(lines)]
    return "\n\n".join(parts) + "\n"


def cell(values: list[float]) -> str:
    low, high = min(values), max(values)
    digits = 2 if max(abs(low), abs(high)) < 10 else 0
    return f"{mean(values):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def table(lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(x) + " |" for x in lines)
