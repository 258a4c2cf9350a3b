"""Build kvops as a kernel of Hugging Face's hub: `make hub`.

    python tools/hub.py [--out dist/hub]

The result is a folder that `kernels.get_local_kernel` loads, and that can be uploaded as it is:

    OUT/build/torch-stable-abi210-<cpu or CUDA>-<processor>-linux/

It holds the package without its commands, its evaluation and its plugin; the libraries, linked as for a wheel; and
metadata.json. The operators are torch.ops.<namespace>, of a namespace that names the commit, so that a process can load
it beside an installed kvops, or beside the kernel of another commit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = ("__main__.py", "analysis", "bench", "demo", "eval", "include", "info.py", "share", "vllm", "__pycache__")
VERSION = 1  # of the kernel: raised when a call changes


def commit() -> str:
    """Return what names the sources: the commit, and `dirty` if there are changes."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"make hub: needs a git repository, which names the commit: {done.stderr.strip()}")
        return done.stdout.strip()

    return git("rev-parse", "--short=8", "HEAD") + ("_dirty" if git("status", "--porcelain") else "")


def backend(libraries: Path, namespace: str) -> tuple[str, dict[str, object]]:
    """Return the backend in the variant's name and in its metadata: that of the libraries that were built."""
    if not (libraries / f"lib{namespace}_cuda.so").exists():
        return "cpu", {"type": "cpu"}
    _, version = runpy.run_path(str(ROOT / "setup.py"))["find_nvcc"]()
    return "cu" + version.replace(".", ""), {"type": "cuda"}


def build(out: Path) -> Path:
    """Build the kernel; return the folder of its variant."""
    namespace = f"kvops_{commit()}"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", folder]
        env = os.environ | {"KVOPS_NAMESPACE": namespace, "KVOPS_MANYLINUX": "1"}
        if subprocess.run(command, cwd=ROOT, env=env).returncode:
            sys.exit("make hub: the build failed; why is above")
        libraries = Path(folder, "kvops")
        name, described = backend(libraries, namespace)
        target = out / "build" / f"torch-stable-abi210-{name}-{platform.machine()}-linux"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(ROOT / "kvops", target, ignore=shutil.ignore_patterns(*LEFT_OUT, "*.so"))
        for library in libraries.glob("*.so"):
            shutil.copy(library, target)
    problems_of = runpy.run_path(str(ROOT / "tools/wheel.py"))["problems_of"]
    if problems := [problem for library in target.glob("*.so") for problem in problems_of(library)]:
        sys.exit("\n".join(f"make hub: {x}" for x in problems))
    calibration = target / "demo_files/data/LICENSE-python.txt"  # kvops/files.py
    calibration.parent.mkdir(parents=True)
    shutil.copy(ROOT / "bench/data" / calibration.name, calibration)
    metadata = {
        "id": f"_{namespace}_{name}",
        "name": "kvops",
        "version": VERSION,
        "license": "Apache-2.0",
        "upstream": "https://github.com/kvops/kvops",
        "python-depends": [],
        "backend": described,
    }
    (target / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return target


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist/hub", help="folder for the kernel (default: dist/hub)")
    print(build(parser.parse_args(argv).out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
