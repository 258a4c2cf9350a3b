"""Recall by window position: which of the keys that the answer needs does an observation window select?

    python bench/experiments/recall.py [--context 2048] [--digits 32] [--budget 64] [--prompts 11]
                                       [--out .] [--json FILE]

This is Fig. 2 of the LAQ paper (Sec. 3) on the demo's model. A window of eight queries slides from the end of the
prompt into the answer. At each position, the keys that it would keep are compared with those that all queries of the
answer would keep (`kvops.recall`). There are two answers: that of the whole cache, and that of a cache which SnapKV
pruned to the budget, a cheap draft that may be wrong.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

import common
import kvops
from kvops.bench.record import write
from kvops.demo import passkeys
from kvops.eval.labels import label_ends
from kvops.eval.reader import Reader, caches

TAIL = 64  # queries of the prompt to measure
WINDOW = 8


@torch.inference_mode()
def run(context: int, digits: int, budget: int, prompts: int) -> dict[str, np.ndarray]:
    """Measure recall by position of the window's first query: "answer" and "draft", each [prompts, positions]."""
    reader, asked = Reader(passkeys.load_model()), passkeys.make_prompts(prompts, context, digits)
    found = {"answer": [], "draft": []}
    for first in range(0, prompts, passkeys.BATCH):
        whole = passkeys.read(reader, passkeys.asked(asked[first : first + passkeys.BATCH]), TAIL + digits)
        held, w = caches(whole.cache), min(32, budget // 2)
        snapkv = [kvops.snapkv_compress(x.k, x.v, x.last_queries[:, :, -w:], budget).indices for x in held]
        seen = {}
        for name, prefill in (("answer", passkeys.keep(whole)), ("draft", passkeys.keep(whole, snapkv))):
            reader.answer(prefill, None, digits, stops=False)
            seen[name] = [x.last_queries for x in caches(prefill.cache)]
        for name, queries in seen.items():
            found[name].append(by_position(queries, seen["answer"], [x.k for x in held], budget))
    return {name: np.concatenate(x) for name, x in found.items()}


def by_position(queries: list[Tensor], answers: list[Tensor], keys: list[Tensor], budget: int) -> np.ndarray:
    """Return recall averaged over layers and heads, [b, positions], for windows from TAIL before the answer on.

    Arguments are lists by layer: queries and the whole cache's queries, [b, Hq, TAIL + digits, d]; the prompt's keys,
    [b, Hk, n, d].
    """
    rows, n = queries[0].shape[2], keys[0].shape[2]
    visible = (n + 1 + torch.arange(-TAIL, rows - TAIL)).clamp(max=n).int()
    curves = []
    for first in range(rows - WINDOW + 1):
        window = slice(first, first + WINDOW)
        recalls = [
            kvops.recall(k, q[:, :, window], answer[:, :, TAIL:], budget, visible=visible[window])
            for q, answer, k in zip(queries, answers, keys)
        ]
        curves.append(torch.stack(recalls, 1).mean((1, 2)))
    return torch.stack(curves, 1).numpy()


def picture(record: dict, path: Path) -> None:
    """Draw recall by position, with 95 % intervals."""
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axes = figure.subplots()
    budget, window = record["budget"], record["window"]
    ends = []
    for name, style, color, label in (
        ("answer", "-", "#2a6f97", "queries of\nthe answer"),
        ("draft", "--", "#bc6c25", f"queries of a draft\n(SnapKV, {budget} tokens)"),
    ):
        mean, error = (100 * np.array(record[x][name]) for x in ("recall", "recall, interval"))
        x = np.arange(len(mean)) + record["first"]
        axes.fill_between(x, mean - error, mean + error, color=color, alpha=0.2, lw=0)
        axes.plot(x, mean, style, color=color)
        ends.append((x[-1], mean[-1], label, color))
    axes.axvline(1 - window, color="#a61e1e", lw=1)
    axes.annotate(
        "from here on the window holds\na query of the answer",
        (1 - window, 66),
        (-6, 0),
        textcoords="offset points",
        ha="right",
        va="top",
        color="#a61e1e",
    )
    axes.set(
        xlabel=f"position of the first of the window's {window} queries (0: first token of the answer)",
        ylabel="recall, %",
        ylim=(0, 70),
        xlim=(record["first"], x[-1]),
    )
    label_ends(axes, ends, 3)
    before, first = (100 * record["recall"]["answer"][at - record["first"]] for at in (-window, 0))
    common.title(
        figure,
        f"A window at the prompt's end finds {before:.0f} % of the {budget} keys that the answer attends to most; "
        f"the first {window} queries of the answer find {first:.0f} %",
    )
    common.save(figure, path)


def numbers(found: dict[str, np.ndarray]) -> dict:
    """Return the quoted numbers: windows at the end of the prompt, with one query of the answer, and in the answer."""
    places = {"last queries of the prompt": -WINDOW, "one query of the answer": 1 - WINDOW, "first of the answer": 0}
    return {name: {where: float(x.mean(0)[TAIL + at]) for where, at in places.items()} for name, x in found.items()}


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, picture="recall.png")
    parser.add_argument("--context", type=int, default=2048, help="tokens before the question")
    parser.add_argument("--digits", type=int, default=32, help="digits of the passkey")
    parser.add_argument("--budget", type=int, default=64, help="tokens to keep")
    parser.add_argument("--prompts", type=int, default=11)
    a = parser.parse_args(argv)
    if a.record:
        picture(common.load(parser, a.record, "recall", "recall, interval"), a.out / "recall.png")
        print(f"wrote {a.out / 'recall.png'}")
        return
    found = run(a.context, a.digits, a.budget, a.prompts)
    record = {**common.origin(__file__, argv), "first": -TAIL, "window": WINDOW, "budget": a.budget}
    record["numbers"] = numbers(found)
    record["recall"] = {name: np.round(x.mean(0), 4).tolist() for name, x in found.items()}
    half = {name: 1.96 * x.std(0) / np.sqrt(len(x)) for name, x in found.items()}
    record["recall, interval"] = {name: np.round(x, 4).tolist() for name, x in half.items()}
    picture(record, a.out / "recall.png")
    for name, values in record["numbers"].items():
        print(f"{name:8}" + "".join(f"{where}: {100 * x:.0f} %   " for where, x in values.items()))
    print(f"wrote {a.out / 'recall.png'}")
    if a.json:
        write(a.json, record)


if __name__ == "__main__":
    main()
