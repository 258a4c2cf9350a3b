"""Registers, shared memory and stack of each CUDA kernel, as the compiler recorded them in libkvops_cuda.so.

python tests/cuda/resources.py            # every kernel on every architecture
python tests/cuda/resources.py --write    # update the table in docs/cuda.md
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "kvops/libkvops_cuda.so"
PAGE = ROOT / "docs/cuda.md"
BEGIN, END = "<!-- resources -->\n", "<!-- end of resources -->\n"

# How to recognize the instance for bf16 and head_dim 128, for kernels that have one.
COMMON = ("BFloat16", "128", "Band<BFloat16, 4>", "BFloat16, 4", "RowLanes<16, 1>", "uint4")
PAGES = ", pages"  # suffix of an instance that reads K and V from pages


RESERVED = 1024  # bytes of a block's shared memory that CUDA reserves from sm_90 on; the report includes them


class Kernel(NamedTuple):
    arch: str  # sm_90a
    name: str  # gather_kv_kernel
    instance: str  # uint4, or empty
    registers: int
    shared: int  # bytes of static shared memory
    stack: int
    local: int


def missing() -> str:
    """Return what is missing to read the report, or an empty string."""
    if not shutil.which("c++filt"):
        return "no c++filt (binutils)"
    return "" if find_cuobjdump() else "no cuobjdump (pip install nvidia-cuda-cuobjdump)"


def find_cuobjdump() -> str | None:
    if found := shutil.which("cuobjdump"):
        return found
    try:
        files = importlib.metadata.files("nvidia-cuda-cuobjdump") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((str(x.locate()) for x in files if x.name == "cuobjdump"), None)


def kernels(library: Path = LIBRARY) -> list[Kernel]:
    """Return all kernels of the library, by name, instance and architecture."""
    report = cuobjdump("--dump-resource-usage", library)
    found = []
    for line in output("c++filt", text=report).splitlines():
        if m := re.match(r"arch = (\w+)", line):
            arch = m[1]
        elif m := re.match(r" Function (.+):$", line):
            name, instance = kernel_name(m[1])
        elif "REG:" in line:
            registers, shared, stack, local = (
                int(re.search(rf"\b{x}:(\d+)", line)[1]) for x in ("REG", "SHARED", "STACK", "LOCAL")
            )
            if shared and number(arch) >= 90:
                shared -= RESERVED
            found.append(Kernel(arch, name, instance, registers, shared, stack, local))
    return sorted(found, key=lambda x: (x.name, x.instance, number(x.arch)))


def kernel_name(function: str) -> tuple[str, str]:
    """Split a function's name, as c++filt prints it, into kernel name and instance."""
    text = re.sub(r"kvops::|sm90::|\(anonymous namespace\)::", "", function).replace("> >", ">>")
    m = re.match(r"(?:void )?(\w+)(?:<(.*?)>)?\(", text)
    name, instance = m[1], m[2] or ""
    if name in paged_kernels():
        instance, _, paged = instance.rpartition(", ")
        instance += PAGES * (paged == "true")
    return name, instance


@functools.cache
def paged_kernels() -> set[str]:
    """Return the kernels whose last template argument says whether K and V are in pages."""
    text = "".join(x.read_text() for x in ROOT.glob("csrc/cuda/*.cuh"))
    return set(re.findall(r"bool kPaged>\n__global__[^;{]*?(\w+_kernel)\(", text))


def usual(found: list, instance, paged: bool = False) -> list:
    """Return a kernel's instances for bf16 and head_dim 128, dense and paged; instance(x) is an instance's name."""
    found = [x for x in found if instance(x).endswith(PAGES) == paged]
    for mark in COMMON:
        found = [x for x in found if mark in instance(x)] or found
    return found


def disassembly(library: Path, arch: str) -> str:
    """Return the machine code for one architecture; needs nvdisasm too."""
    return cuobjdump("--dump-sass", "--gpu-architecture", arch, library)


def find_nvdisasm() -> str | None:
    """Find nvdisasm on PATH, or next to cuobjdump, where pip installs it."""
    beside = Path(find_cuobjdump() or "").with_name("nvdisasm")
    return shutil.which("nvdisasm") or (str(beside) if os.access(beside, os.X_OK) else None)


def cuobjdump(*arguments) -> str:
    program = find_cuobjdump()
    with tempfile.TemporaryDirectory() as folder:
        if not os.access(program, os.X_OK):  # pip may install it without execute permission
            program = shutil.copy(program, folder)
            os.chmod(program, 0o755)
        path = f"{Path(find_nvdisasm() or program).parent}:{os.environ['PATH']}"
        return output(program, *arguments, env=os.environ | {"PATH": path})


def output(*command, text: str | None = None, env: dict[str, str] | None = None) -> str:
    command = [str(x) for x in command]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True, env=env).stdout


def number(arch: str) -> int:
    return int(re.search(r"\d+", arch)[0])


def table(found: list[Kernel], compiler: str) -> str:
    """Return a table with one row per kernel: the maximum over its instances, and the instance that most calls use."""
    archs = sorted({x.arch for x in found}, key=number)
    lines = [
        f"Of nvcc {compiler}, for {', '.join(archs)}:",
        "",
        "| kernel | instances | registers, bf16 and d = 128 | in pages | most registers | static shared, bytes |",
        "|---|---|---|---|---|---|",
    ]
    for name in sorted({x.name for x in found}):
        instances = [x for x in found if x.name == name]
        dense, paged = (usual(instances, lambda x: x.instance, x) for x in (False, True))
        columns = [
            len({x.instance for x in instances}),
            *(
                ", ".join(most([x.registers for x in chosen if x.arch == arch]) for arch in archs) if chosen else ""
                for chosen in (dense, paged, instances)
            ),
            max(x.shared for x in instances),
        ]
        lines.append(f"| `{name.removesuffix('_kernel')}` | {' | '.join(map(str, columns))} |")
    return "\n".join(lines) + "\n"


def columns_of(text: str, archs: list[str]) -> str:
    """Return such a table as a build of these architectures has it, or an empty string if it lacks one of them."""
    all_archs = re.search(r", for (.*):", text)[1].split(", ")
    if not set(archs) <= set(all_archs):
        return ""
    built = [all_archs.index(x) for x in archs]

    def chosen(values: re.Match) -> str:
        return ", ".join(values[0].split(", ")[i] for i in built)

    one = r"(?:\d+|-|sm_\w+)"
    return re.sub(rf"{one}(?:, {one}){{{len(all_archs) - 1}}}", chosen, text)


def most(numbers: list[int]) -> str:
    """Return the maximum; there are no values for a kernel of other architectures."""
    return str(max(numbers)) if numbers else "-"


def nvcc_version() -> str:
    path = shutil.which(os.environ.get("CUDACXX") or "nvcc") or "/usr/local/cuda/bin/nvcc"
    return re.search(r"release ([\d.]+)", output(path, "--version"))[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", nargs="?", type=Path, default=LIBRARY)
    parser.add_argument("--write", action="store_true", help=f"replace the table in {PAGE.relative_to(ROOT)}")
    args = parser.parse_args()
    if why := missing():
        sys.exit(f"resources: {why}")
    found = kernels(args.library)
    if not args.write:
        for x in found:
            name = f"{x.name}<{x.instance}>" if x.instance else x.name
            print(
                f"{x.arch:8}{x.registers:4} registers {x.shared:6} shared {x.stack:4} stack {x.local:4} local  {name}"
            )
        return
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + BEGIN + table(found, nvcc_version()) + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
