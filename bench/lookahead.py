"""Small budgets: does a cache of 32 to 256 of 2,048 tokens still hold the key, when queries choose what it keeps?

The second table of the demo. SnapKV asks the last queries of the prompt, LAQ those of eight tokens that a cache cut by
SnapKV drafts, LAQ++ these and the prompt's last eight. The cache is cut once: after the question, or before it, when no
query knows yet what will be asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import transformers
from torch import Tensor

import kvops
import kvops.hf

BUDGETS = (32, 64, 128, 256)
DIGITS = (8, 32)
POINTS = ("after", "before")  # the question
METHODS = {
    "SnapKV": lambda budget: kvops.SnapKV(budget, window=min(32, budget // 2)),
    "LAQ": lambda budget: kvops.LAQ(budget),
    "LAQ++": lambda budget: kvops.LAQ(budget, window=8),
}


@dataclass
class Cell:
    """One method at one budget, digits of the key and point of the cut."""

    method: str
    budget: int
    digits: int
    point: str
    right: list[float] = field(default_factory=list)  # share of the digits that are right, per prompt

    @property
    def score(self) -> float:
        """Percent of the digits that are right."""
        return 100 * float(np.mean(self.right))

    @property
    def numbers(self) -> dict:
        """What the table says, for a file."""
        return {
            **{
                "method": self.method,
                "budget": self.budget,
                "digits": self.digits,
                "cut": f"{self.point} the question",
            },
            **{"prompts": len(self.right), "digits_right_percent": self.score},
        }


def make_cells() -> list[Cell]:
    return [Cell(m, b, d, p) for p in POINTS for d in DIGITS for m in METHODS for b in BUDGETS]


def answer(model: transformers.PreTrainedModel, cell: Cell, context: Tensor, question: Tensor, pad: int) -> Tensor:
    """The tokens that are said: int64 [b, digits]. context: [b, n], question: [b, m]."""
    method, length = METHODS[cell.method](cell.budget), dict(min_new_tokens=cell.digits, max_new_tokens=cell.digits)
    settings = dict(do_sample=False, pad_token_id=pad)
    asked = torch.cat([context, question], 1)
    if cell.point == "after":
        return kvops.hf.generate(model, method, asked, **length, **settings)[:, asked.shape[1] :]
    read = kvops.hf.generate(model, method, context, max_new_tokens=1, return_dict_in_generate=True, **settings)
    cache = keeping_all(model, read.past_key_values)
    mask = torch.ones_like(asked)
    said = model.generate(asked, attention_mask=mask, past_key_values=cache, **length, **settings)
    return said[:, asked.shape[1] :]


def keeping_all(model: transformers.PreTrainedModel, cut: kvops.hf.KVCache) -> kvops.hf.KVCache:
    """What is left, in a cache that evicts no more: the question and the answer are not cut."""
    cache = kvops.hf.KVCache(model.config, kvops.Full())
    for i, layer in enumerate(cut.layers):
        cache.update(layer.keys, layer.values, i)
        cache.layers[i].method.seen = layer.method.seen
    return cache


def table(cells: list[Cell], context: int) -> str:
    """Percent of the digits that are right: a line per method, a column per budget."""
    score = {(x.method, x.budget, x.digits, x.point): x.score for x in cells}
    prompts = len(cells[0].right)
    groups = [(point, digits) for point in POINTS for digits in DIGITS]
    width = 6 * len(BUDGETS)
    lines = [
        f"Digits right, %, with {' / '.join(map(str, BUDGETS))} of {context:,} tokens kept; {prompts} prompts",
        "",
        f"{'':10}" + "".join(f"{f'cut {point} the question':>{2 * width + 6}}" for point in POINTS),
        f"{'method':10}" + "".join(f"{f'{digits} digits':>{width + 3}}" for _, digits in groups),
    ]
    lines.append("-" * len(lines[-1]))
    for name in METHODS:
        values = ["".join(f"{score[name, b, digits, point]:6.0f}" for b in BUDGETS) for point, digits in groups]
        lines.append(f"{name:10}" + "".join(f"   {x}" for x in values))
    return "\n".join(lines)


def findings(cells: list[Cell]) -> str:
    """What is seen of the paper's claim, in one sentence."""
    score = {(x.method, x.budget, x.digits, x.point): x.score for x in cells}
    most = {
        digits: max(BUDGETS, key=lambda b: score["LAQ", b, digits, "after"] - score["SnapKV", b, digits, "after"])
        for digits in DIGITS
    }
    gains = "; ".join(
        f"{digits} digits at {b} tokens: SnapKV {score['SnapKV', b, digits, 'after']:.0f} %, "
        f"LAQ {score['LAQ', b, digits, 'after']:.0f} %, LAQ++ {score['LAQ++', b, digits, 'after']:.0f} %"
        for digits, b in most.items()
    )
    return (
        "Seen of LAQ's claim that queries of the answer's beginning choose better at small budgets, where it gains "
        f"most: {gains}. Eight lookahead queries see the first digits of the answer only. Cut before the question, no "
        "query knows what will be asked for, and none of these methods can."
    )
