"""RULER (Hsieh et al., 2024) from a local copy of its data.

Two formats are supported: that of its own scripts (.jsonl: input, outputs, in newer versions answer_prefix), and that
of the copies for cache compression on the hub (context, question, answer_prefix, answer, task, max_new_tokens).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..specs import Refused
from .base import Filler, Prompt, share_said
from .copies import Copy

#: For each kind of task, from RULER: a pattern for the start of the question, and the tokens of an answer.
KINDS = {
    "niah": (r"What (?:is|are all) the special magic", 128),
    "vt": (r"Question: Find all variables that are assigned the value", 30),
    "cwe": (r"Question: What are the 10 most common words in the above list", 120),
    "fwe": (r"Question: Do not provide any explanation\.", 50),
    "qa": (r"Answer the question based on the given documents\.", 32),
}


@dataclass
class Ruler(Copy):
    """A task of RULER (Hsieh et al., 2024), from a local copy of its data.

    score: the fraction of the answers generated (string_match_all); for qa whether any is (string_match_part).
    """

    task: str = "niah_single_1"

    name = "ruler"
    column = "task"
    tasks = (
        *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
        *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
    )

    def parts(self, row: dict[str, Any]) -> tuple[str, str, str, tuple[str, ...], int]:
        """Return context, question, the answer's prefix, answers, and the tokens of an answer."""
        begins, tokens = KINDS[self.task.partition("_")[0]]
        if "context" in row:
            context, question, said = self.text(row, "context"), self.text(row, "question"), "answer"
        else:
            text, said = self.text(row, "input"), "outputs"
            places = [x.start() for x in re.finditer(begins, text)]  # the last: examples may come before
            if not places:
                raise Refused(f"--data: a prompt of ruler {self.task} has no question like {begins!r}")
            context, question = text[: places[-1]], text[places[-1] :]
        answers = (row[said],) if isinstance(row.get(said), str) else self.texts(row, said)
        if not answers:
            raise Refused(f"--data: a row of ruler {self.task} has no answer")
        prefix = self.text(row, "answer_prefix") if row.get("answer_prefix") else ""
        return context, question, prefix, answers, row.get("max_new_tokens") or tokens

    def prompts(self, filler: Filler, context: int, count: int, seed: int) -> list[Prompt]:
        found = []
        for row in self.rows(count, seed):
            text, question, prefix, answers, tokens = self.parts(row)
            ids, asked = self.encode(filler, text, question, prefix)
            if (length := len(ids) + len(asked)) > context:
                raise Refused(
                    f"--context {context}: a prompt of ruler {self.task} has {length} tokens, and RULER's are never "
                    "shortened; raise --context, or point --data to shorter ones"
                )
            found.append(self.prompt(ids, asked, answers, tokens))
        return found

    def score(self, said: Sequence[str], prompt: Prompt) -> dict[str, float]:
        answers = prompt.turns[0].answers
        if self.task.startswith("qa"):
            return {"score": max(share_said(said[0], [x]) for x in answers)}
        return {"score": share_said(said[0], answers)}
