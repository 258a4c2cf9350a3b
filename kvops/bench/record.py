"""The origin of a measurement (machine, versions, command), which every file under bench/results/ records."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any, TypeGuard

import torch

from .. import build_info


class Refused(ValueError):
    """A request that cannot be met; the message is for the user."""


def gpu() -> dict[str, Any]:
    """Return properties of the GPU that torch uses."""
    of = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
        ).stdout.split("\n")[0]
    except OSError:
        driver = ""
    return {
        "name": of.name,
        "capability": f"{of.major}.{of.minor}",
        "multiprocessors": of.multi_processor_count,
        "memory_bytes": of.total_memory,
        "l2_bytes": of.L2_cache_size,
        "driver": driver.strip() or "unknown",
        "cuda": torch.version.cuda,
    }


def machine() -> dict[str, Any]:
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*: (.+)", text)
    return {
        "cpu": model.group(1) if model else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "os": platform.platform(),
        "python": platform.python_version(),
    }


def commit() -> str | None:
    """Return the commit of this kvops, with -dirty if tracked files are modified.

    Outside its repository: the environment variable KVOPS_COMMIT, or None.
    """

    here = Path(__file__).resolve()

    def git(*command: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here.parent), *command], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        # An installed kvops may be inside an unrelated repository, and may even be committed there.
        git("ls-files", "--error-unmatch", here.name)
        if Path(git("rev-parse", "--show-toplevel")).resolve() != here.parents[2]:
            return os.environ.get("KVOPS_COMMIT")
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("KVOPS_COMMIT")


def origin(*command: str, device: str = "cpu") -> dict[str, Any]:
    """Return machine, instruction set, versions, commit and command of a record.

    Args:
        command: the words of the command.
        device: "cuda" adds the GPU.
    """
    info = build_info()
    return {
        "machine": machine() | ({"gpu": gpu()} if device == "cuda" else {}),
        "isa": info["isa"],
        "torch": info["torch"],
        "kvops": info["kvops"],
        "commit": commit(),
        "command": shlex.join(command),
    }


def write(file: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON; see `replace`."""
    replace(file, json.dumps(record, indent=1) + "\n")


def replace(file: Path, content: str | bytes) -> None:
    """Replace a file atomically: it is complete whenever the process stops, and the last writer wins."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = part_of(file)
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def part_of(file: Path) -> Path:
    """Return the path of the temporary file for new content."""
    return file.with_name(f"{file.name}.{os.getpid()}.part")


def check_target(option: str, file: Path) -> None:
    """Raise Refused unless `replace` can write the file that an option names."""
    try:
        if file.is_dir():
            raise Refused(f"--{option}: expected a file, got the folder {file}")
        part = part_of(file)
        part.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        part.unlink()
    except OSError as error:
        raise Refused(f"--{option}: {file} cannot be written: {error.strerror}") from None


def load(file: Path) -> dict[str, Any]:
    """Read a record written by python -m kvops.bench.

    Raises:
        Refused: the file cannot be read or is not such a record.
    """
    try:
        found = json.loads(file.read_bytes().decode())
    except (OSError, ValueError, RecursionError) as error:
        raise Refused(f"{file}: expected JSON, got {str(error)[:200]}") from None
    if wrong := wrong_record(found):
        raise Refused(f"{file}: expected a record of python -m kvops.bench: {wrong}")
    return found


def whole(x: object, least: int = 0) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and least <= x < 2**62


def number(x: object) -> TypeGuard[float]:
    """Whether x is a finite number, at least 0."""
    return isinstance(x, (int, float)) and not isinstance(x, bool) and 0 <= x < 2**62


def positive(x: object) -> bool:
    return number(x) and x > 1e-300


def name(x: object) -> bool:
    """Whether x is one printable line."""
    return isinstance(x, str) and 0 < len(x) <= 200 and x.isprintable()


def text(x: object) -> bool:
    return isinstance(x, str) and x.isprintable()


def wrong_record(x: object) -> str | None:
    """Return what is wrong with a record, or None."""
    if not isinstance(x, dict) or not isinstance(x.get("machine"), dict) or not isinstance(x.get("rows"), list):
        return "machine and rows are missing"
    machine, gpu = x["machine"], x["machine"].get("gpu")
    said = {"kvops": x, "torch": x, "isa": x, "command": x, "cpu": machine}
    said |= dict.fromkeys(("name", "driver", "cuda"), gpu) if gpu is not None else {}
    for key, where in said.items():
        if not isinstance(where, dict) or not text(where.get(key)):
            return f"{key} must be a line of text"
    if not (x.get("commit") is None or text(x["commit"])):
        return "commit must be a line of text or null"
    if not whole(machine.get("threads")) or not whole(x.get("repeats", 1), 1):
        return "threads and repeats must be integers"
    if x.get("statistic", "best") not in ("best", "median"):
        return "statistic must be best or median"
    if not isinstance(x.get("left_out", []), list) or not all(map(text, x.get("left_out", []))):
        return "left_out must be a list of lines"
    for i, row in enumerate(x["rows"]):
        if not isinstance(row, dict):
            return f"row {i} must be an object"
        if wrong := wrong_row(row):
            return f"row {i}: {wrong}"
    return None


DTYPES = ("float32", "float16", "bfloat16")
#: Optional parts of a row: objects whose keys are names, with a test for their values.
PARTS = {
    "ratio": lambda y: isinstance(y, dict) and all(positive(y.get(z)) for z in ("best", "median", "seconds")),
    "failed": text,
    "clock": text,
    "stages": number,
    "goals": positive,
}


def wrong_row(row: dict[str, Any]) -> str | None:
    """Return what is wrong with a row, or None."""
    shape = row.get("shape")
    if not name(row.get("operator")) or not text(row.get("form")) or row.get("dtype") not in DTYPES:
        return "operator, form and dtype must be names"
    if not isinstance(shape, list) or len(shape) != 4 or not all(whole(n, 1) for n in shape):
        return "shape must be [batch, heads, n, head_dim]"
    if "error" in row:
        return None if text(row["error"]) else "error must be a line of text"
    seconds, band = row.get("seconds"), row.get("bandwidth")
    if not isinstance(seconds, dict) or not all(positive(seconds.get(key)) for key in ("best", "median")):
        return "seconds must have best and median"
    if not number(row.get("gb_per_s")) or "ratio" not in row:
        return "gb_per_s and ratio are missing"
    if "bandwidth" in row:
        bands = [band, band.get("same_bytes", band)] if isinstance(band, dict) else [None]
        if not all(isinstance(y, dict) and number(y.get("share")) and number(y.get("gb_per_s")) for y in bands):
            return "bandwidth must have share and gb_per_s"
        if not name(row["bandwidth"].get("of")):
            return "bandwidth must be of something"
    for key, holds in PARTS.items():
        found = row.get(key, {})
        if not isinstance(found, dict) or not all(name(y) and holds(z) for y, z in found.items()):
            return f"{key} has invalid entries"
    if "clock" in row and "stages" not in row:
        return "stages are missing"
    return None
