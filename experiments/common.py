"""Shared parts of the experiments: texts; a Llama with random weights; timing; arguments, records and pictures. Their
prompts are the demo's: kvops.demo.passkeys."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from torch import Tensor

import kvops.hf
from kvops.bench import record
from kvops.demo import MODEL, TEXT

if TYPE_CHECKING:  # not needed for timing
    from matplotlib.figure import Figure

BENCH = Path(__file__).resolve().parents[1] / "bench"

# ---- models and texts ----


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
