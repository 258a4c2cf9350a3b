"""Write stand-ins for glibc's libraries that offer no symbol version newer than a wheel may use.

    python tools/manylinux/stubs.py OUT

A linker binds each function to its newest version: on glibc 2.36 a call of exp() needs exp@GLIBC_2.29, and dlsym()
needs dlsym@GLIBC_2.34, although glibc still has the old versions, which compute the same. Linking against these
stand-ins (-L OUT) binds to the old versions. The result runs on every glibc from 2.28 on, which is what the platform
tag manylinux_2_28 promises. The stand-ins hold names and versions, no code, and nothing loads them.

On a glibc that is old enough, as in the manylinux_2_28 container, OUT is left empty and the linker uses the real ones.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

CXX = shlex.split(os.environ.get("CXX") or "c++")
GLIBC = (2, 28)
LIBRARIES = {"libc.so": "libc.so.6", "libm.so": "libm.so.6"}
# glibc 2.34 moved these libraries into libc. Where 2.28 has a function tells the loader which library to load.
MOVED = {"libdl.so": "libdl.so.2", "libpthread.so": "libpthread.so.0", "librt.so": "librt.so.1"}
HOME = (
    (r"dl(?!_iterate_phdr)", "libdl.so"),
    (r"pthread_|sem_", "libpthread.so"),
    (r"shm_|mq_|aio_|timer_", "librt.so"),
)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def host_glibc() -> tuple[int, ...]:
    """Return the version of the C library that this Python runs on."""
    name, version = platform.libc_ver()
    if name != "glibc":
        sys.exit("kvops: a manylinux wheel needs a system with glibc")
    return numbers(version)


def run(*command: str | Path) -> str:
    env = os.environ | {"LC_ALL": "C"}  # readelf speaks the user's language
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env).stdout


def find(name: str) -> Path:
    """Return the path where the compiler finds a library."""
    return Path(run(*CXX, f"-print-file-name={name}").strip())


def old_symbols(library: Path) -> dict[str, tuple[str, str]]:
    """Return (type, newest version that is old enough) of each symbol that a library defines."""
    found: dict[str, tuple[str, str]] = {}
    for line in run("readelf", "-W", "--dyn-syms", library).splitlines():
        m = re.search(r" (FUNC|IFUNC|OBJECT) .* \d+ (\w+)@@?GLIBC_([\d.]+)$", line)
        if not m or numbers(m[3]) > GLIBC:
            continue
        if m[2] not in found or numbers(found[m[2]][1]) < numbers(m[3]):
            found[m[2]] = "object" if m[1] == "OBJECT" else "function", m[3]
    return found


def write_library(out: Path, soname: str, symbols: dict[str, tuple[str, str]]) -> None:
    code = [
        f"{'.text' if kind == 'function' else '.data'}\n.globl {x}\n.type {x},%{kind}\n{x}: .8byte 0\n.size {x}, 8\n"
        for x, (kind, _) in symbols.items()
    ]
    versions = sorted({version for _, version in symbols.values()}, key=numbers)
    script = "".join(
        f"GLIBC_{version} {{ global: {' '.join(f'{x};' for x, (_, y) in symbols.items() if y == version)} }};\n"
        for version in versions
    )
    source, map_file = out / f"{soname}.s", out / f"{soname}.map"
    source.write_text("".join(code))
    map_file.write_text(script)
    options = ["-shared", "-nostdlib", f"-Wl,-soname,{soname}", f"-Wl,--version-script={map_file}"]
    run(*CXX, *options, source, "-o", out / soname)
    source.unlink()
    map_file.unlink()


def write(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    if host_glibc() <= GLIBC:
        return
    wanted: dict[str, dict[str, tuple[str, str]]] = {}
    for name, soname in (LIBRARIES | MOVED).items():
        for symbol, about in old_symbols(find(soname)).items():
            home = next((home for pattern, home in HOME if re.match(pattern, symbol)), name)
            wanted.setdefault(home if name == "libc.so" else name, {})[symbol] = about
    for name, symbols in wanted.items():
        write_library(out, (LIBRARIES | MOVED)[name], symbols)
        (out / name).unlink(missing_ok=True)
        (out / name).symlink_to((LIBRARIES | MOVED)[name])
    # The host's libc.so is a linker script, which also names the loader and a static part.
    script = find("libc.so").read_text()
    (out / "libc.so").unlink()
    (out / "libc.so").write_text(re.sub(r"\S*/libc\.so\.6", f'"{out / "libc.so.6"}"', script))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]).resolve())
