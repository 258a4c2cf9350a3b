"""Small budgets: does a cache of 32 to 256 of 2,048 tokens still hold the key, when queries choose what it keeps?

The second table of the demo. SnapKV and ProtoKV ask the last queries of the prompt, LAQ those of eight tokens that a
cache cut by SnapKV drafts, LAQ++ these and the prompt's last eight. The cache is cut once: after the question, or
before it, when no query knows yet what will be asked for.
"""

from __future__ import annotations

import copy
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
METHODS = {"SnapKV": None, "ProtoKV": None, "LAQ": 0, "LAQ++": 8}  # the prompt's queries that observe beside a draft's


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


Read = tuple[kvops.hf.KVCache, Tensor]  # a prompt's whole cache, and the logits of its last token


def read(model: transformers.PreTrainedModel, ids: Tensor) -> Read:
    """The prefill that all cells of one prompt share. ids: [b, n]."""
    cache = kvops.hf.KVCache(model.config, kvops.LAQ(max(BUDGETS), max(w or 0 for w in METHODS.values())))
    return cache, model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]


def answer(
    model: transformers.PreTrainedModel, cell: Cell, prompt: Read, ids: Tensor, more: Tensor, pad: int
) -> Tensor:
    """The tokens that are said: int64 [b, digits]. ids: [b, n], what has been read; more: the question, if it comes
    after the cut, else [b, 0]."""
    cut = cut_cache(model, cell, prompt)
    cut.freeze()  # the question and the answer are not cut
    first = more if more.numel() else prompt[1].argmax(-1, keepdim=True)  # the first token is the whole cache's
    steps = cell.digits - (0 if more.numel() else 1)
    asked = torch.cat([ids, first], 1)
    said = model.generate(
        asked,
        attention_mask=torch.ones_like(asked),
        past_key_values=cut,
        do_sample=False,
        pad_token_id=pad,
        min_new_tokens=steps,
        max_new_tokens=steps,
    )
    return said[:, -cell.digits :]


def cut_cache(model: transformers.PreTrainedModel, cell: Cell, prompt: Read) -> kvops.hf.KVCache:
    """What the cell's method leaves of the prompt's cache."""
    cache, window = copy.copy(prompt[0]), METHODS[cell.method]
    methods = [copy.copy(layer.method) for layer in cache.layers]
    for method in methods:  # as if the prompt had been read with these settings: until the cut they change nothing
        method.budget, method.window = cell.budget, window or 0
        if cell.method == "ProtoKV":
            method.stage1 = kvops.ProtoKV(cell.budget)
    if window is None:  # the cache that LAQ drafts with, which is SnapKV's unless another's is asked for
        methods = [method.draft() for method in methods]
    cache.layers = [layer.with_method(method) for layer, method in zip(cache.layers, methods)]
    if window is not None:
        kvops.hf.lookahead(model, cache, prompt[1])
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
