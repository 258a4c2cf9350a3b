"""Fits KVzap's gates to a model, and says how well they predict KVzip+'s scores of texts that they have not seen.

    python bench/experiments/gates.py --model smollm2 --dtype float32 --file gates.safetensors [--texts 64] [--width 72]

    python -m kvops.eval --model smollm2 --methods kvzap:gates=gates.safetensors,head_mode=adaptive

The texts are windows of Python's language reference (`pydoc_data.topics`) and of the modules of its standard library,
without those of the text of `kvops.eval`. One in eight is held out.
"""

from __future__ import annotations

import itertools
import json
import pydoc_data.topics
import sysconfig
import time
from pathlib import Path

import torch
import transformers
from torch import Tensor

import common
import kvops.hf

#: The modules in bench/data/haystack.txt.
HELD_OUT = "calendar copy glob modulefinder random sched shutil tempfile events server".split()
HOLD = 8  # one text in so many is held out


def library(tokenizer: transformers.PreTrainedTokenizerBase, texts: int, tokens: int) -> Tensor:
    """Windows of tokens, of prose and of code in turns: int64 [texts, tokens]."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(x for x in folder.glob("*.py") if x.stem not in HELD_OUT)
    topics = pydoc_data.topics.topics
    prose = "\n\n".join(topics[name] for name in sorted(topics))
    code = "\n\n".join(x.read_text(errors="ignore") for x in files)
    code = code[: 8 * len(prose)]  # a tokenizer takes minutes for all of it
    windows: list[list[Tensor]] = []
    for text, count in ((prose, texts - texts // 2), (code, texts // 2)):
        ids = torch.tensor(tokenizer(text)["input_ids"])
        first = torch.linspace(0, len(ids) - tokens, count).long()
        windows.append([ids[x : x + tokens] for x in first])
    turns = [x for pair in itertools.zip_longest(*windows) for x in pair if x is not None]
    return torch.stack(turns)


def explained(gates: kvops.Gates, hidden: list[Tensor], scores: list[Tensor]) -> list[float]:
    """The share of the variance of each layer's scores that its gate explains (R^2), the mean over the heads."""
    found = []
    for layer, (x, y) in enumerate(zip(hidden, scores)):
        error = (gates.scores(x[None], layer)[0].mT - y).square().sum(0)
        found.append((1 - error / (y - y.mean(0)).square().sum(0)).mean().item())
    return found


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, redraws=False)
    common.add_model(parser, None)
    parser.add_argument("--file", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--texts", type=int, default=64, help="texts to read")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a text")
    parser.add_argument("--width", type=int, help="channels between two maps; without it gates are linear")
    parser.add_argument("--sinks", type=int, default=0, help="learned sinks of gates that attend to them, with --width")
    parser.add_argument("--group", type=int, default=1, help="queries of each KV head in such gates")
    a = parser.parse_args(argv)
    a.file.parent.mkdir(parents=True, exist_ok=True)  # before what takes minutes
    transformers.utils.logging.set_verbosity_error()  # the library is longer than the model's context, on purpose
    tokenizer = transformers.AutoTokenizer.from_pretrained(a.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(a.model, dtype=a.dtype).to(a.device)
    if a.text is None:
        texts = library(tokenizer, a.texts, a.tokens)
    else:
        ids = common.load_text(a.model, a.text)[0]
        texts = ids[: min(a.texts, len(ids) // a.tokens) * a.tokens].view(-1, a.tokens)
    begin = time.perf_counter()
    hidden, scores = kvops.hf.gate_data(model, texts.to(a.device), tokenizer=tokenizer)
    read = time.perf_counter()
    cut = a.tokens * (len(texts) - max(1, len(texts) // HOLD))
    known, held = (([x[part] for x in hidden], [y[part] for y in scores]) for part in (slice(cut), slice(cut, None)))
    gates = kvops.fit_gates(*known, width=a.width, sinks=a.sinks, group=a.group)
    fitted = time.perf_counter()
    gates.save(a.file)
    figures = {
        "gates": repr(gates),
        "tokens": cut,
        "read_s": read - begin,
        "fit_s": fitted - read,
        "r2_known": explained(gates, *known),
        "r2_held_out": explained(gates, *held),
    }
    for name in ("r2_known", "r2_held_out"):
        of = figures[name]
        print(f"{name}: mean {sum(of) / len(of):.2f}, layers from {min(of):.2f} to {max(of):.2f}")
    print(f"{a.file}: {gates!r} from {cut} tokens, read in {read - begin:.0f} s, fitted in {fitted - read:.0f} s")
    if a.json:
        a.json.write_text(json.dumps({"origin": common.origin(__file__, argv, a.device), **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
