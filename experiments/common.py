"""Shared parts of the experiments: the demo's model, text and prompts; prompts that are read once and cut in many ways;
a Llama with random weights; timing; arguments, records and pictures."""

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
from kvops.demo import MODEL, TEXT
from kvops.eval.reader import Cut, Reader
from kvops.eval.stream import Held
from kvops.methods.queries import Watched

if TYPE_CHECKING:  # not needed for timing
    from matplotlib.figure import Figure

BENCH = Path(__file__).resolve().parents[1] / "bench"
sys.path.insert(0, str(MODEL))
from passkey_task import QUESTION, Corpus, context_with_needles, encode, needle_text, rand_digits  # noqa: E402

# ---- models and texts ----


def load_model(folder: Path = MODEL, device: str = "cpu", dtype: str = "auto") -> transformers.PreTrainedModel:
    """Load a model with kvops' attention."""
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return kvops.hf.use_attention(model.eval().to(device))


def load_text(folder: Path = MODEL, text: Path = TEXT, device: str = "cpu") -> Tensor:
    """Tokenize the whole text for the model in that folder: int64 [1, tokens]."""
    transformers.utils.logging.set_verbosity_error()  # the text is longer than the model's context, on purpose
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer(text.read_text(), return_tensors="pt").input_ids.to(device)


# Llama-3-8B's; GROUP: query heads per KV head.
LAYERS, HEADS, GROUP, HEAD_DIM, MLP, VOCABULARY = 32, 32, 4, 128, 14336, 128256


def random_llama(
    layers: int, heads: int, vocabulary: int, tokens: int, device: str, dtype: torch.dtype
) -> transformers.PreTrainedModel:
    """Return a Llama-3-8B with random weights; with fewer query heads all widths shrink in proportion."""
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

DEPTHS = 11  # passkeys at 0 %, 10 %, ... 100 % of the context
BATCH = 11  # prompts per batch


class Haystack(Corpus):
    """Slices of the shipped text instead of the local Python's standard library."""

    def __init__(self):
        self.data = np.fromfile(TEXT, dtype=np.uint8).astype(np.int64)


@dataclass
class Prompt:
    ids: np.ndarray  # [context]
    digits: str
    start: int  # position of the first digit
    depth: float


def make_prompts(count: int, context: int, digits: int) -> list[Prompt]:
    """Return contexts of exactly `context` tokens with a passkey of `digits` digits each, the same in every run."""
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
    """Return the contexts, int64 [b, context]."""
    return np.stack([p.ids for p in prompts])


def questions(prompts: list[Prompt]) -> np.ndarray:
    """Return the question for the passkey, int64 [b, any]."""
    return np.tile(encode(QUESTION), (len(prompts), 1))


def asked(prompts: list[Prompt]) -> np.ndarray:
    """Return contexts that end with the question, int64 [b, n]."""
    return np.concatenate([contexts(prompts), questions(prompts)], 1)


# ---- prompts that are read once and cut in many ways ----


def read(reader: Reader, ids: np.ndarray, rows: int = 0) -> Cut:
    """Read prompts, int64 [b, n], without eviction; remember the queries of the last `rows` tokens (`Watched`)."""
    cache = kvops.hf.KVCache(reader.model.config, Watched(last=rows))
    logits = reader.feed(cache, reader.tokens(ids))
    return Cut(cache, logits, 0.0, *Held.by(cache))


def keep(whole: Cut, slots: Iterable[Tensor] | None = None) -> Cut:
    """Return a cache with only these slots of each evicting layer, int64 [any] or [b, Hk, any]; None keeps all.

    `whole` does not change. Both share the memory of common slots, which nothing writes to.
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
    """Return the median seconds of a call, after one warm-up call, synchronizing the device."""
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
    """Return an argument parser with --json for the record, --out for pictures, and --from to draw a record again."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if record:
        found.add_argument("--json", type=Path, help="file for all numbers")
    if picture:
        found.add_argument("--out", type=Path, default=Path("."), help=f"folder for {picture}")
    if picture and record and redraws:
        found.add_argument("--from", type=Path, dest="record", metavar="JSON", help="measure nothing, draw this record")
    return found


def add_model(parser: argparse.ArgumentParser, text: Path | None) -> None:
    """Add the arguments of scripts that accept any model. text: the default."""
    parser.add_argument("--model", type=Path, default=MODEL, help="folder with a transformers model and its tokenizer")
    parser.add_argument("--text", type=Path, default=text, help="text file to take prompts from")
    parser.add_argument("--device", default="cpu")
    dtypes = ("auto", "bfloat16", "float16", "float32")
    parser.add_argument("--dtype", choices=dtypes, default="auto", help="dtype of the model")


def origin(script: str, argv: list[str] | None, device: str = "cpu") -> dict:
    """Return the origin of a record: machine, versions and command. script: the script's __file__."""
    arguments = sys.argv[1:] if argv is None else argv
    return record.origin("python", f"experiments/{Path(script).name}", *arguments, device=device)


def load(parser: argparse.ArgumentParser, file: Path, *names: str) -> dict:
    """Load the record of --from, which must contain `names`; exit with an error otherwise."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        parser.error(f"--from: expected a record that --json has written, got {file}: {error}")
    if missing := [x for x in names if x not in found]:
        parser.error(f"--from: {file} has no {missing[0]!r}; it is another script's or too old, measure again")
    return found


def title(figure: Figure, text: str) -> None:
    """Write the finding, one sentence, at the upper left of the picture."""
    figure.suptitle(
        "\n".join(y for x in text.split("\n") for y in textwrap.wrap(x, 98)), x=0.01, ha="left", fontsize=11
    )


def save(figure: Figure, path: Path, dpi: int = 120) -> None:
    """Write the picture. At 8 inches it is 960 pixels wide, so text of 9 points is legible at 800."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
