"""Shared parts of the experiments: texts; a Llama with random weights; the evaluation's records; timing; vLLM's
engines; arguments, records and pictures. Their prompts are the demo's: kvops.demo.passkeys."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor

import kvops.hf
from kvops.bench import record
from kvops.demo import MODEL, TEXT
from kvops.eval import models
from kvops.eval.summary import by_prompt, estimate

if TYPE_CHECKING:  # not needed for timing
    from matplotlib.figure import Figure

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


# ---- records of kvops.eval ----


def held(line: dict[str, Any]) -> float:
    """Return the bytes that a result's caches hold, as a share of full ones in bf16, which is the dtype "auto".

    Rows of a byte per number take the same bytes whatever the model's dtype is.
    """
    wide = 2 if line["settings"]["dtype"] == "float32" and "storage=" in line["method"] else 1
    return wide * line["bytes_held"] / line["bytes_full"]


def cell(lines: list[dict[str, Any]], metric: str) -> tuple[dict[int, float], dict[str, Any]]:
    """Return a cell's scores by prompt, and its means. lines: the results of its batches, each with its "settings"."""
    values = by_prompt(lines, metric, lines[0]["settings"]["batch"])
    mean, shares = estimate([*values.values()], True), [held(x) for x in lines]
    means = dict(prompts=len(values), score=mean.mean, low=mean.low, high=mean.high, held=sum(shares) / len(shares))
    return values, means


def add_cells(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which results of a record are compared."""
    parser.add_argument("--task", default="needle:chat=True")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--metric", default="partial")


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


# ---- engines ----


class Engine:
    """A vLLM engine in a process of its own: `command` runs a script that calls `serve`."""

    def __init__(self, command: list[str], settings: dict[str, str]):
        ours = {
            "KVOPS_VLLM": "",
            "KVOPS_VLLM_ATTENTION": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, *command],
            env=os.environ | ours | settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def steps(self, **load: Any) -> list[float]:
        """Return the CPU seconds of each step."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(load), file=self._process.stdin, flush=True)
        for line in self._process.stdout:  # vLLM writes there, too
            if line.startswith("seconds "):
                return json.loads(line.removeprefix("seconds "))
        raise RuntimeError("expected the engine to answer, got the end of its output; its messages are above")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def serve(prompts: Callable[[Any, dict], list[list[int]]], **options: Any) -> None:
    """Answer `Engine.steps` until the input ends. prompts(llm, load): the token ids; options: vLLM's."""
    from vllm import LLM, SamplingParams

    from kvops.vllm import plugin

    plugin.register()  # vLLM does this by itself where kvops is installed
    llm, served = LLM(enforce_eager=True, max_num_seqs=16, **options), 0
    engine = llm.llm_engine
    for line in sys.stdin:
        load = json.loads(line)
        sampling = SamplingParams(max_tokens=load["generated"], temperature=0, ignore_eos=True)
        for ids in prompts(llm, load):
            engine.add_request(str(served), {"prompt_token_ids": ids}, sampling)
            served += 1
        seconds = []
        while engine.has_unfinished_requests():
            begin = time.process_time()
            engine.step()
            seconds.append(time.process_time() - begin)
        print("seconds", json.dumps(seconds), flush=True)


def engines_in_turns(engines: dict[str, Engine], loads: list[dict]) -> dict[str, list[list[float]]]:
    """Return the CPU seconds of each step, by engine and load. The first load warms up."""
    found: dict[str, list[list[float]]] = {name: [] for name in engines}
    for load in loads:
        for name, engine in engines.items():
            found[name].append(engine.steps(**load))
    return {name: own[1:] for name, own in found.items()}


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


def model_folder(name: str) -> Path:
    """Return the folder that --model names; "smollm2" is the real model of kvops.eval."""
    try:
        return Path(models.found(name))
    except models.Refused as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_model(parser: argparse.ArgumentParser, text: Path | None) -> None:
    """Add the arguments of scripts that accept any model. text: the default."""
    what = "folder with a transformers model and its tokenizer, or smollm2"
    parser.add_argument("--model", type=model_folder, default=MODEL, help=what)
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
