"""What the experiments share: the demo's model, text and prompts; prompts that are read once and cut in many ways; a
Llama of random weights, and times; arguments, records, pictures."""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import transformers
from torch import Tensor

import kvops.hf
from kvops.bench import record
from kvops.eval.reader import Cut, Reader, Watched
from kvops.eval.stream import Held

if TYPE_CHECKING:  # times are taken without it too
    from matplotlib.figure import Figure

BENCH = Path(__file__).resolve().parents[1] / "bench"
MODEL = BENCH / "models" / "passkey-llama"
TEXT = BENCH / "data" / "haystack.txt"
sys.path.insert(0, str(MODEL))
from passkey_task import QUESTION, Corpus, context_with_needles, encode, needle_text, rand_digits  # noqa: E402

# ---- models and texts ----


def load_model(folder: Path = MODEL, device: str = "cpu", dtype: str = "auto") -> transformers.PreTrainedModel:
    """With the library's attention."""
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return kvops.hf.use_attention(model.eval().to(device))


def load_text(folder: Path = MODEL, text: Path = TEXT, device: str = "cpu") -> Tensor:
    """The whole text in tokens of the model in that folder: [1, tokens]."""
    transformers.utils.logging.set_verbosity_error()  # the text is longer than the model's context, on purpose
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer(text.read_text(), return_tensors="pt").input_ids.to(device)


# Llama-3-8B's; GROUP: query heads per KV head.
LAYERS, HEADS, GROUP, HEAD_DIM, MLP, VOCABULARY = 32, 32, 4, 128, 14336, 128256


def random_llama(
    layers: int, heads: int, vocabulary: int, tokens: int, device: str, dtype: torch.dtype
) -> transformers.PreTrainedModel:
    """So many layers of Llama-3-8B, random, for twice as many tokens; of fewer query heads, all widths shrink alike."""
    config = transformers.LlamaConfig(
        hidden_size=heads * HEAD_DIM,
        intermediate_size=heads * MLP // HEADS,
        num_attention_heads=heads,
        num_key_value_heads=heads // GROUP,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        max_position_embeddings=2 * tokens,
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return kvops.hf.use_attention(model.eval())


# ---- the demo's prompts ----

DEPTHS = 11  # keys at 0 %, 10 %, ... 100 % of the context
BATCH = 11  # prompts that are read together


class Haystack(Corpus):
    """Slices of the shipped text instead of this Python's standard library."""

    def __init__(self):
        self.data = np.fromfile(TEXT, dtype=np.uint8).astype(np.int64)


@dataclass
class Prompt:
    ids: np.ndarray  # [context]
    digits: str
    start: int  # position of the first digit
    depth: float


def make_prompts(count: int, context: int, digits: int) -> list[Prompt]:
    """Contexts of exactly `context` tokens, a key of `digits` digits in each; the same in every run."""
    rng, text = np.random.default_rng([0, context, digits]), Haystack()
    depths = np.linspace(0, 1, min(DEPTHS, count)) if count > 1 else [0.3]
    prompts = []
    for i in range(count):
        depth, key = float(depths[i % len(depths)]), rand_digits(rng, digits)
        needle = needle_text(key)
        ids, (start,) = context_with_needles(rng, text, context, [needle], [depth])
        prompts.append(Prompt(ids, key, start + needle.index(key), depth))
    return prompts


def contexts(prompts: list[Prompt]) -> np.ndarray:
    """int64 [b, context]."""
    return np.stack([p.ids for p in prompts])


def questions(prompts: list[Prompt]) -> np.ndarray:
    """The question for the key, int64 [b, any]."""
    return np.tile(encode(QUESTION), (len(prompts), 1))


def asked(prompts: list[Prompt]) -> np.ndarray:
    """Contexts that end with the question, int64 [b, n]."""
    return np.concatenate([contexts(prompts), questions(prompts)], 1)


# ---- prompts that are read once and cut in many ways ----


def read(reader: Reader, ids: np.ndarray, rows: int = 0) -> Cut:
    """The whole cache of prompts, int64 [b, n], which remembers the queries of the last `rows` tokens (`Watched`)."""
    cache = kvops.hf.KVCache(reader.model.config, Watched(last=rows))
    logits = reader.feed(cache, reader.tokens(ids))
    return Cut(cache, logits, 0.0, *Held.by(cache))


def keep(whole: Cut, slots: Iterable[Tensor] | None = None) -> Cut:
    """A cache of its own with these slots alone of each layer that evicts, int64 [any] or [b, Hk, any]; None: with all.

    `whole` stays as it was, and they share what they both hold: nothing writes to it.
    """
    cache, left = copy.copy(whole.cache), None if slots is None else iter(slots)
    cache.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in cache.evicting_layers if left else ():
        layer.cache.keep(next(left))
    return Cut(cache, whole.logits, 0.0, *Held.by(cache))


# ---- times ----


def wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def median_seconds(call: Callable[[], object], device: str, repeats: int) -> float:
    """Of a call, after one to warm up; the device is waited for."""
    found = []
    for _ in range(repeats + 1):
        wait_for(device)
        begin = time.perf_counter()
        call()
        wait_for(device)
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])


# ---- arguments, records, pictures ----


def parser(doc: str, record: bool = True, picture: str | None = None, redraws: bool = True) -> argparse.ArgumentParser:
    """What a script says of itself, --json for its record, and --out for its picture."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if record:
        found.add_argument("--json", type=Path, help="file for all numbers")
    if picture:
        found.add_argument("--out", type=Path, default=Path("."), help=f"folder for {picture}")
    if picture and record and redraws:
        found.add_argument("--from", type=Path, dest="record", metavar="JSON", help="measure nothing, draw this record")
    return found


def add_model(parser: argparse.ArgumentParser, text: Path | None) -> None:
    """The arguments of scripts that take any model. text: the default."""
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of a transformers model and its tokenizer")
    parser.add_argument("--text", type=Path, default=text, help="file to cut prompts from")
    parser.add_argument("--device", default="cpu")
    dtypes = ("auto", "bfloat16", "float16", "float32")
    parser.add_argument("--dtype", choices=dtypes, default="auto", help="the model's")


def origin(script: str, argv: list[str] | None, device: str = "cpu") -> dict:
    """What the record of a script (its __file__) begins with: where it was made, and by which command."""
    arguments = sys.argv[1:] if argv is None else argv
    return record.origin("python", f"experiments/{Path(script).name}", *arguments, device=device)


def load(parser: argparse.ArgumentParser, file: Path, *names: str) -> dict:
    """The record that --from names; it must hold `names`. Exits with an error if it does not."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        parser.error(f"--from: expected a record that --json has written, got {file}: {error}")
    if missing := [x for x in names if x not in found]:
        parser.error(f"--from: {file} has no {missing[0]!r}; it is another script's or too old, measure again")
    return found


def title(figure: Figure, text: str) -> None:
    """What the picture shows, in one sentence at its upper left."""
    figure.suptitle(
        "\n".join(y for x in text.split("\n") for y in textwrap.wrap(x, 98)), x=0.01, ha="left", fontsize=11
    )


def save(figure: Figure, path: Path, dpi: int = 120) -> None:
    """Writes the picture. One of 8 inches is 960 pixels wide, so its 9 point text is legible at 800."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
