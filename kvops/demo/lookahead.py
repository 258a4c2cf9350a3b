"""The demo's second table: methods that use queries, at small budgets.

SnapKV and ProtoKV score with the last queries of the prompt. LAQ scores with the queries of eight tokens drafted from a
cache that SnapKV pruned, LAQ++ with these and the prompt's last eight. The cache is cut once, either after the question
or before it, when no query can know what will be asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .. import ProtoKV, laq_compress, protokv_compress, snapkv_compress
from ..bench.measure import threads
from ..eval.reader import Prefill, Reader
from . import passkeys
from .methods import WINDOW, digits_right, layers_of
from .passkeys import BATCH, Ids, Prompt

BUDGETS = (32, 64, 128, 256)
DIGITS = (8, 32)
POINTS = ("after", "before")  # the question
ASKING = {"SnapKV": 0, "ProtoKV": 0, "LAQ": 0, "LAQ++": 8}  # queries of the prompt used beside a draft's
STEPS = 8  # tokens of a draft


@dataclass
class Cell:
    """One method at one budget, passkey length and point of the cut."""

    method: str
    budget: int
    digits: int
    point: str
    right: list[float] = field(default_factory=list)  # fraction of the digits that are right, per prompt

    @property
    def score(self) -> float:
        """Percent of the digits that are right."""
        return 100 * float(np.mean(self.right))

    @property
    def numbers(self) -> dict[str, Any]:
        """The table's numbers, for the JSON file."""
        what = {
            "method": self.method,
            "budget": self.budget,
            "digits": self.digits,
            "cut": f"{self.point} the question",
        }
        return what | {"prompts": len(self.right), "digits_right_percent": self.score}


@torch.inference_mode()
def measured(context: int, prompts: int) -> Iterator[list[Cell]]:
    """Measure a method at all budgets: one passkey length, one point of the cut."""
    reader = Reader(passkeys.load_model())
    for point in POINTS:
        for digits in DIGITS:
            asked = passkeys.make_prompts(prompts, context, digits)
            read: list[tuple[list[Prompt], Ids | None, Prefill]] = []
            for batch in (asked[i : i + BATCH] for i in range(0, prompts, BATCH)):
                after = point == "after"
                whole = passkeys.read(reader, passkeys.asked(batch) if after else passkeys.contexts(batch), WINDOW)
                read.append((batch, None if after else passkeys.questions(batch), whole))
            for method in ASKING:
                cells = [Cell(method, budget, digits, point) for budget in BUDGETS]
                for cell in cells:
                    for batch, question, whole in read:
                        with threads(1):
                            prefill = prefill_of(reader, whole, method, cell.budget)
                            said, _, _ = reader.answer(prefill, question, digits, stops=False)
                        cell.right += digits_right(said, batch)
                yield cells


def prefill_of(reader: Reader, whole: Prefill, method: str, budget: int) -> Prefill:
    """Return the prompts' cache as the method leaves it."""
    layers = layers_of(whole)
    if method == "ProtoKV":
        w = ProtoKV(budget).window
        return passkeys.keep(whole, [protokv_compress(k, v, q[:, :, -w:], budget).indices for k, v, q in layers])
    w = min(WINDOW, budget // 2)
    small = passkeys.keep(whole, [snapkv_compress(k, v, q[:, :, -w:], budget).indices for k, v, q in layers])
    if method == "SnapKV":
        return small
    reader.answer(small, None, STEPS, stops=False)  # the draft
    slots = []
    for (k, v, q), (_, _, drafted) in zip(layers, layers_of(small)):
        local = q[:, :, -ASKING[method] :] if ASKING[method] else None
        slots.append(laq_compress(k, v, drafted[:, :, -STEPS:], budget, q_window=local).indices)
    return passkeys.keep(whole, slots)


def heading(context: int, prompts: int) -> str:
    return (
        f"Methods that use queries: digits right in %, {prompts} prompts, by the tokens kept of {context:,}\n"
        f"cut                 digits  method  {''.join(f'{b:6}' for b in BUDGETS)}"
    )


def line(cells: Sequence[Cell]) -> str:
    """Return the table's line for the cells of one method."""
    of = cells[0]
    return f"{of.point + ' the question':19}{of.digits:7}  {of.method:8}" + "".join(f"{x.score:6.0f}" for x in cells)
