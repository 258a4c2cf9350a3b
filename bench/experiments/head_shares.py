"""Measures fixed shares of heads over texts, in one of three ways.

    python bench/experiments/head_shares.py --model smollm2 --file shares.safetensors [--by kvzip] [--tokens 1024]

    python -m kvops.eval --model smollm2 --methods keydiff:head_mode=adaptive,shares=shares.safetensors

--by kvzip: the heads to which KVzip with scope="model" gives its budget. --by retrieval: where heads attend while the
model repeats passages (HeadKV). --by duo: the heads without whose far attention it could not (DuoAttention). The text
is the library's calibration text, which is not among those of `kvops.eval`. The correlation printed, between the shares
of single texts, says whether they are the model's; the optimization of `duo` has one result for all texts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import common
import kvops.hf
from kvops.files import CALIBRATION


def by_kvzip(model: Any, tokenizer: Any, texts: Tensor) -> list[Tensor]:
    policy = kvops.KVzip(0.125, head_mode="adaptive", scope="model")
    return [kvops.hf.head_shares(model, policy, x[None], tokenizer=tokenizer) for x in texts]


def by_retrieval(model: Any, tokenizer: Any, texts: Tensor) -> list[Tensor]:
    made = kvops.hf.passkey_texts(tokenizer, texts)
    singles = (kvops.hf.PasskeyTexts(*(x[i : i + 1] for x in made)) for i in range(len(texts)))
    return [kvops.hf.retrieval_shares(model, x) for x in singles]


def by_duo(model: Any, tokenizer: Any, texts: Tensor, penalty: float) -> list[Tensor]:
    return [kvops.hf.duo_shares(model, kvops.hf.passkey_texts(tokenizer, texts), penalty=penalty)]


WAYS: dict[str, Callable[..., list[Tensor]]] = {"kvzip": by_kvzip, "retrieval": by_retrieval, "duo": by_duo}


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, record=False, redraws=False)
    common.add_model(parser, CALIBRATION)
    parser.add_argument("--file", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a text")
    parser.add_argument("--by", choices=WAYS, default="kvzip", help="how the shares are measured")
    parser.add_argument("--floor", type=float, default=0.0, help="part of all shares that is equal for all heads")
    parser.add_argument("--penalty", type=float, default=1.0, help="of duo: more leaves fewer heads with a weight")
    a = parser.parse_args(argv)
    a.file.parent.mkdir(parents=True, exist_ok=True)  # before what takes minutes
    tokenizer = transformers.AutoTokenizer.from_pretrained(a.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(a.model, dtype=a.dtype).to(a.device)
    ids = common.load_text(a.model, a.text, a.device)[0]
    texts = ids[: len(ids) // a.tokens * a.tokens].view(-1, a.tokens)
    begin = time.perf_counter()
    options = {"penalty": a.penalty} if a.by == "duo" else {}
    each = WAYS[a.by](model, tokenizer, texts, **options)
    took = time.perf_counter() - begin
    mean = torch.stack(each).mean(0)
    shares = a.floor + (1 - a.floor) * mean / mean.mean()
    kvops.save_shares(shares, a.file)
    said = f"{a.file}: {len(texts)} texts of {a.tokens} tokens in {took:.0f} s"
    said += f"; shares from {shares.min():.2f} to {shares.max():.2f}"
    if len(each) > 1:
        least = torch.corrcoef(torch.stack([x.flatten() for x in each])).min().item()
        said += f"; correlation between texts at least {least:.3f}"
    print(said)


if __name__ == "__main__":
    main()
