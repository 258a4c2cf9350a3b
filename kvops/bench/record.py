"""Where a measurement comes from: what every file under bench/results/ says beside its numbers."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
from pathlib import Path

import torch

from .. import build_info


def gpu() -> dict:
    """Of the GPU that torch uses."""
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


def machine() -> dict:
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
    """The commit that this kvops was run from, with -dirty if its files were changed.

    Outside its own repository KVOPS_COMMIT, else None.
    """

    here = Path(__file__).resolve()

    def git(*command: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here.parent), *command], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        # An installed kvops may lie in a repository of someone else, who may even have committed it there.
        git("ls-files", "--error-unmatch", here.name)
        if Path(git("rev-parse", "--show-toplevel")).resolve() != here.parents[2]:
            return os.environ.get("KVOPS_COMMIT")
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("KVOPS_COMMIT")


def origin(*command: str, device: str = "cpu") -> dict:
    """Machine, instruction set, versions, commit, and the command that made it."""
    info = build_info()
    return {
        "machine": machine() | ({"gpu": gpu()} if device == "cuda" else {}),
        "isa": info["isa"],
        "torch": info["torch"],
        "kvops": info["kvops"],
        "commit": commit(),
        "command": shlex.join(command),
    }


def write(file: Path, record: dict) -> None:
    """A record as JSON, replaced as `replace` does."""
    replace(file, json.dumps(record, indent=1) + "\n")


def replace(file: Path, content: str | bytes) -> None:
    """Replaces the file in one step, so that it is whole whenever the process is stopped, and of whoever was last."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
