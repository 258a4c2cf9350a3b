"""Measures fixed shares of heads, by the heads that KVzip gives its budget over texts.

    python bench/experiments/head_shares.py --model smollm2 --file shares.safetensors [--tokens 1024] [--budget 0.125]

    python -m kvops.eval --model smollm2 --methods keydiff:head_mode=adaptive,shares=shares.safetensors

The text is the library's calibration text, which is not among those of `kvops.eval`. The figure printed says whether
the shares are the model's: the correlation between the shares of single texts.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

import common
import kvops.hf
from kvops.files import CALIBRATION


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, record=False, redraws=False)
    common.add_model(parser, CALIBRATION)
    parser.add_argument("--file", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a text")
    parser.add_argument("--budget", type=float, default=0.125, help="fraction of the tokens")
    a = parser.parse_args(argv)
    tokenizer = transformers.AutoTokenizer.from_pretrained(a.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(a.model, dtype=a.dtype).to(a.device)
    ids = common.load_text(a.model, a.text, a.device)[0]
    texts = ids[: len(ids) // a.tokens * a.tokens].view(-1, a.tokens)
    policy = kvops.KVzip(a.budget, head_mode="adaptive", scope="model")
    each = [kvops.hf.head_shares(model, policy, x[None], tokenizer=tokenizer) for x in texts]
    shares = torch.stack(each).mean(0)
    kvops.save_shares(shares, a.file)
    between = torch.corrcoef(torch.stack([x.flatten() for x in each]))
    least = between.min().item() if len(each) > 1 else 1.0
    print(
        f"{a.file}: {len(each)} texts of {a.tokens} tokens; shares from {shares.min():.2f} to {shares.max():.2f}; "
        f"correlation between texts at least {least:.3f}"
    )


if __name__ == "__main__":
    main()
