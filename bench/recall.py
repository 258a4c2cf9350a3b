"""Recall by window position: how much of what the answer's queries need does an observation window choose?

    python bench/recall.py [--context 2048] [--digits 32] [--budget 64] [--prompts 11] [--out .] [--json FILE]

Fig. 2 of the LAQ paper (Sec. 3) on the demo's model: a window of eight queries slides from the end of the prompt into
the answer; at each place, what it would keep is compared with what all queries of the answer would keep
(`kvops.recall`). Two answers: that of the whole cache, and that of a cache which SnapKV has cut to the budget: a cheap
draft, wrong as it may be.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
import transformers

import kvops
import kvops.hf
from demo import BATCH, MODEL, PAD, QUESTION, encode, make_prompts
from kvops.bench.record import origin, write
from kvops.eval.reader import Watched

TAIL = 64  # queries of the prompt that are looked at
WINDOW = 8


class Draft(kvops.SnapKV):
    """SnapKV that remembers the queries of the last `rows` tokens."""

    rows = 0

    def _remembered(self) -> int:
        return self.rows


@torch.inference_mode()
def run(context: int, digits: int, budget: int, prompts: int) -> dict[str, np.ndarray]:
    """Recall by position of the window's first query: "answer" and "draft", each [prompts, positions]."""
    transformers.utils.logging.disable_progress_bar()
    model = kvops.hf.use_attention(transformers.AutoModelForCausalLM.from_pretrained(MODEL).eval())
    asked = make_prompts(prompts, context, digits)
    question = torch.from_numpy(encode(QUESTION))
    found = {"answer": [], "draft": []}
    for first in range(0, prompts, BATCH):
        ids = torch.from_numpy(np.stack([p.ids for p in asked[first : first + BATCH]]))
        ids = torch.cat([ids, question.expand(len(ids), -1)], 1)
        draft = Draft(budget, window=min(32, budget // 2))
        draft.rows = TAIL + digits
        whole, draft = (queries(model, x, ids, digits) for x in (Watched(TAIL + digits), draft))
        for name, rows in (("answer", whole), ("draft", draft)):
            found[name].append(by_position(rows, whole, ids.shape[1], budget))
    return {name: np.concatenate(x) for name, x in found.items()}


def queries(model, method: kvops.Method, ids: torch.Tensor, steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer the prompt's keys, [b, Hk, n, d], and the queries of its end and of the answer, [b, Hq, TAIL + steps,
    d]."""
    cache = kvops.hf.KVCache(model.config, method)
    length = dict(max_new_tokens=steps + 1, min_new_tokens=steps + 1)  # the last token is not fed
    model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, do_sample=False, pad_token_id=PAD, **length
    )
    methods = [layer.method for layer in cache.layers]
    return [(x.k[:, :, : ids.shape[1]], x.last_queries) for x in methods]


def by_position(rows, whole, n: int, budget: int) -> np.ndarray:
    """Mean recall over layers and heads, [b, positions]: windows that begin TAIL before the answer, and later."""
    visible = (n + 1 + torch.arange(-TAIL, rows[0][1].shape[2] - TAIL)).clamp(max=n).int()
    curves = []
    for first in range(rows[0][1].shape[2] - WINDOW + 1):
        window = slice(first, first + WINDOW)
        recalls = [
            kvops.recall(keys, q[:, :, window], answer[:, :, TAIL:], budget, visible=visible[window])
            for (_, q), (keys, answer) in zip(rows, whole)
        ]
        curves.append(torch.stack(recalls, 1).mean((1, 2)))
    return torch.stack(curves, 1).numpy()


def picture(found: dict[str, np.ndarray], budget: int, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
    x = np.arange(found["answer"].shape[1]) - TAIL
    for name, style, color, label in (
        ("draft", "--", "#bc6c25", f"queries of a draft, from a cache that SnapKV cut to {budget} tokens"),
        ("answer", "-", "#2a6f97", "queries of the answer"),
    ):
        mean = found[name].mean(0)
        error = 1.96 * found[name].std(0) / np.sqrt(len(found[name]))
        axes.fill_between(x, mean - error, mean + error, color=color, alpha=0.2, lw=0)
        axes.plot(x, mean, style, color=color, label=label)
    axes.axvline(1 - WINDOW, color="#a61e1e", lw=1)
    axes.text(
        1 - WINDOW, 1.02, "the first query of the answer is in the window", ha="right", fontsize=9, color="#a61e1e"
    )
    axes.set(
        xlabel=f"position of the window's first query (0: that of the answer's first token); it has {WINDOW}",
        ylabel="recall",
        ylim=(0, 1.08),
        title=f"What a window keeps of the {budget} keys that the whole answer would choose",
    )
    axes.legend(loc="upper left", bbox_to_anchor=(0, 0.93), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def numbers(found: dict[str, np.ndarray]) -> dict:
    """What is quoted: windows at the end of the prompt, with one query of the answer, and of the answer alone."""
    places = {"last queries of the prompt": -WINDOW, "one query of the answer": 1 - WINDOW, "first of the answer": 0}
    return {name: {where: float(x.mean(0)[TAIL + at]) for where, at in places.items()} for name, x in found.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2048, help="tokens before the question")
    parser.add_argument("--digits", type=int, default=32, help="length of the key")
    parser.add_argument("--budget", type=int, default=64, help="tokens to keep")
    parser.add_argument("--prompts", type=int, default=11)
    parser.add_argument("--json", type=Path, help="file for the curves")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the picture, recall.png")
    a = parser.parse_args(argv)
    found = run(a.context, a.digits, a.budget, a.prompts)
    picture(found, a.budget, a.out / "recall.png")
    for name, values in numbers(found).items():
        print(f"{name:8}" + "".join(f"{where}: {100 * x:.0f} %   " for where, x in values.items()))
    print(f"wrote {a.out / 'recall.png'}")
    if a.json:
        curves = {name: np.round(x.mean(0), 4).tolist() for name, x in found.items()}
        record = {**origin("python", "bench/recall.py", *(argv or sys.argv[1:])), "first": -TAIL, "window": WINDOW}
        write(a.json, {**record, "budget": a.budget, "numbers": numbers(found), "recall": curves})


if __name__ == "__main__":
    main()
