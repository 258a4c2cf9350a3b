"""Query statistics of answers, for Expected Attention and TriAttention.

    python bench/experiments/query_statistics.py --file needles.safetensors [--prompts 11] [--context 1500] [--seed N]

    python -m kvops.eval --methods expected-attention:statistics=needles.safetensors

The statistics that `kvops.hf.for_model` gathers are of plain text, in which nothing is asked. These are of the last 60
tokens of prompts that end with a question and its answer: a passkey of 32 digits, in prompts of another seed than those
of `kvops.eval`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

import common
import kvops.hf
from kvops.demo import passkeys
from kvops.eval.tasks.base import Filler
from kvops.eval.tasks.needles import Passkey

LAST = 60  # tokens: the question and the answer


def answered(filler: Filler, prompts: int, context: int, seed: int) -> np.ndarray:
    """Return prompts with their questions and answers, int64 [prompts, tokens]; shorter ones lose first tokens."""
    rows = []
    for prompt in Passkey().prompts(filler, context, prompts, seed):
        turn = prompt.turns[0]
        rows.append(np.concatenate([prompt.context, turn.question, filler.encode(turn.answers[0])]))
    width = min(map(len, rows))
    return np.stack([row[-width:] for row in rows])


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, record=False, redraws=False)
    parser.add_argument("--file", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--prompts", type=int, default=11)
    parser.add_argument("--context", type=int, default=1500, help="tokens before the question")
    parser.add_argument("--seed", type=int, default=12345)
    a = parser.parse_args(argv)
    filler = Filler(AutoTokenizer.from_pretrained(common.MODEL), common.TEXT.read_text())
    ids = torch.from_numpy(answered(filler, a.prompts, a.context, a.seed))
    statistics = kvops.hf.query_statistics(passkeys.load_model(), ids, skip=ids.shape[1] - LAST)
    statistics.save(a.file)
    print(f"{a.file}: {LAST} tokens of each of {a.prompts} prompts")


if __name__ == "__main__":
    main()
