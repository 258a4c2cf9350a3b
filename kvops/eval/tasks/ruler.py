"""RULER (Hsieh et al., 2024) from a local copy of its data.

Either as its own scripts write it (.jsonl: input, outputs, and in newer ones answer_prefix) or as the copies for cache
compression on the hub have it (context, question, answer_prefix, answer, task, max_new_tokens).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..specs import Refused
from .base import Filler, Prompt, Turn, share_said
from .copies import Copy

#: By the kind of a task, as RULER has them: where the question begins in a prompt, and the tokens of an answer.
KINDS = {
    "niah": (r"What (?:is|are all) the special magic", 128),
    "vt": (r"Question: Find all variables that are assigned the value", 30),
    "cwe": (r"Question: What are the 10 most common words in the above list", 120),
    "fwe": (r"Question: Do not provide any explanation\.", 50),
    "qa": (r"Answer the question based on the given documents\.", 32),
}


def parts(row: dict, task: str) -> tuple[str, str, Sequence[str], int]:
    """Context, question with the beginning of the answer, answers, and tokens of an answer."""
    begins, tokens = KINDS[task.partition("_")[0]]
    try:
        if "context" in row:
            context, question, answers = row["context"], row["question"], row["answer"]
        else:
            places = [x.start() for x in re.finditer(begins, row["input"])]  # the last: examples may come before
            if not places:
                raise Refused(f"--data: a prompt of ruler {task} asks nothing like {begins!r}")
            context, question, answers = row["input"][: places[-1]], row["input"][places[-1] :], row["outputs"]
    except KeyError as error:
        raise Refused(f"--data: a row of ruler {task} has no column {error}; it has {', '.join(row)}") from None
    answers = [answers] if isinstance(answers, str) else answers
    return context, question + (row.get("answer_prefix") or ""), answers, row.get("max_new_tokens") or tokens


@dataclass
class Ruler(Copy):
    """A task of RULER (Hsieh et al., 2024), from a local copy of its data.

    score: the share of the answers that are said (string_match_all); for qa whether any is (string_match_part).
    """

    task: str = "niah_single_1"

    name = "ruler"
    column = "task"
    tasks = (
        *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
        *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
    )

    def prompts(self, filler: Filler, context: int, count: int, seed: int) -> list[Prompt]:
        found = []
        for row in self.rows(count, seed):
            text, question, answers, tokens = parts(row, self.task)
            ids, asked = np.concatenate([filler.first, filler.encode(text)]), filler.encode(question)
            if (length := len(ids) + len(asked)) > context:
                raise Refused(
                    f"--context {context}: a prompt of ruler {self.task} has {length} tokens, and RULER's are never "
                    "shortened; raise --context, or let --data name shorter ones"
                )
            found.append(Prompt(ids, (Turn(asked, tuple(answers), tokens),)))
        return found

    def score(self, said: Sequence[str], prompt: Prompt) -> dict[str, float]:
        answers = prompt.turns[0].answers
        if self.task.startswith("qa"):
            return {"score": max(share_said(said[0], [x]) for x in answers)}
        return {"score": share_said(said[0], answers)}
