"""Drive CMake, and put libkvops.so and, where nvcc is found, libkvops_cuda.so into the package. pyproject.toml holds
the metadata, CMakeLists.txt the build.

Environment: KVOPS_LEVELS=all|native, KVOPS_CUDA=auto|gpu|0|1, KVOPS_CUDA_ARCHS="80;90a;100;120", CUTLASS_DIR,
KVOPS_NAMESPACE=NAME (for `make hub`), KVOPS_SANITIZE="address;undefined", KVOPS_MANYLINUX=1 (for `make wheel`),
MAX_JOBS, CXX, CUDACXX, CMAKE_ARGS. See docs/building.md.
"""

import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import setuptools

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build"
# The oldest stable ABI that kvops supports; kvops/_lib.py checks the torch at run time.
MIN_TORCH = runpy.run_path(str(ROOT / "kvops/supported.py"))["TORCH"].oldest
MIN_SETUPTOOLS = "77"


def older(version: str, minimum: str) -> bool:
    def numbers(text: str) -> list[int]:
        return [int(x) for x in re.findall(r"\d+", text)[: minimum.count(".") + 1]]

    return numbers(version) < numbers(minimum)


if older(setuptools.__version__, MIN_SETUPTOOLS):
    sys.exit(
        f"kvops: needs setuptools >= {MIN_SETUPTOOLS}, found {setuptools.__version__}; run: pip install -U setuptools"
    )

from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402  (older setuptools has none)
from setuptools.command.build_ext import build_ext  # noqa: E402
from setuptools.command.build_py import build_py  # noqa: E402


def find_torch() -> tuple[Path, str]:
    """Return the directory and version of the torch to build against, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit(
            f"kvops: torch is not installed for {sys.executable}, or pip's build isolation hides it; "
            f"install torch >= {MIN_TORCH}, then run: pip install --no-build-isolation ."
        )
    directory = Path(spec.origin).parent
    version = re.search(r"__version__ = ['\"](.+?)['\"]", (directory / "version.py").read_text()).group(1)
    if older(version, MIN_TORCH):
        sys.exit(f"kvops: needs torch >= {MIN_TORCH}, found {version} in {directory}; run: pip install -U torch")
    return directory, version


def find_cutlass() -> str:
    """Return CUTLASS's folder, for the Hopper kernels: CUTLASS_DIR, else the package nvidia-cutlass, else nothing.
    CMake then records why those kernels are missing."""
    spec = importlib.util.find_spec("cutlass_library")
    package = str(Path(spec.origin).parent / "source") if spec and spec.origin else ""
    return os.environ.get("CUTLASS_DIR") or package


def find_tool(name: str) -> list[str]:
    """Return the tool's paths: first the one that pip installed beside this Python, then the one on PATH."""
    found = [shutil.which(name, path=sysconfig.get_path("scripts")), shutil.which(name)]
    return [path for path in found if path]


def find_cmake() -> str:
    minimum = re.search(r"cmake_minimum_required\(VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text()).group(1)
    seen = "none is installed"
    for path in find_tool("cmake"):
        out = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        version = re.search(r"cmake version ([\d.]+)", out)
        if version and not older(version.group(1), minimum):
            return path
        seen = f"found {version.group(1) if version else 'a broken one'} at {path}"
    sys.exit(f"kvops: needs cmake >= {minimum}, {seen}; run: pip install cmake ninja")


def check_compiler() -> None:
    """Exit with one line if there is no compiler. CMakeLists.txt checks its version."""
    wanted = [shlex.split(os.environ["CXX"])[0]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    if not any(map(shutil.which, wanted)):
        sys.exit(
            f"kvops: no C++ compiler found ({', '.join(wanted)}); install one with C++20 (g++ >= 11 or clang++ >= 14)"
        )


def find_nvcc() -> tuple[str, str] | None:
    """Return path and version of nvcc: CUDACXX, else the one on PATH, else the one of CUDA's installer."""
    cuda_home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    wanted = [os.environ["CUDACXX"]] if os.environ.get("CUDACXX") else ["nvcc", f"{cuda_home}/bin/nvcc"]
    for path in filter(None, map(shutil.which, wanted)):
        out = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        version = re.search(r"release ([\d.]+)", out)
        return path, version.group(1) if version else "unknown"
    return None


def cuda_archs() -> str:
    """Return KVOPS_CUDA_ARCHS as a CMake list; CMakeLists.txt holds the default."""
    archs = re.split(r"[;, ]+", os.environ.get("KVOPS_CUDA_ARCHS", "").strip())
    if wrong := [x for x in archs if x and not re.fullmatch(r"\d{2,3}[af]?|native", x)]:
        sys.exit(f"kvops: KVOPS_CUDA_ARCHS must be architectures such as 80;90a;100;120, or native, got {wrong[0]}")
    return ";".join(archs)


def run(command: list[str], failure: str, **env: str) -> None:
    """Run the command and report progress: in a terminal every compiled file, in one line that changes; elsewhere, as
    under `pip install -v`, the first file and then one line every ten seconds. If the command fails, the last line says
    why: the message that CMakeLists.txt wrote ("kvops: ..."), else the first error in the output."""
    terminal, due, output = sys.stdout.isatty(), 0.0, ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **env}
    ) as process:
        for line in process.stdout:
            output += line
            compiled = re.match(r"\[ *(\S+)\] Building \w+ object (?:CMakeFiles/\w+\.dir/)?(.+)\.o$", line)
            if compiled and (terminal or (now := time.monotonic()) >= due):
                text = f"== kvops: compiled {compiled.group(1).replace('/', ' of ')}, {compiled.group(2)}"
                if terminal:
                    print(f"\r{text}\x1b[K", end="", flush=True)
                else:
                    print(text, flush=True)
                    due = now + 10
    if terminal:
        print("\r\x1b[K", end="", flush=True)
    if process.returncode:
        own = re.search(r"^  (kvops: .+(?:\n  \S.*)*)", output, re.MULTILINE)  # CMake indents and wraps its messages
        if own:
            sys.exit(" ".join(own.group(1).split()))
        error = re.search(r"^.*\b(?:error|fatal)\b[^:\n]*:.*$", output, re.MULTILINE)
        why = f": {error.group().strip()}" if error else ""
        sys.exit(f"{output}\nkvops: {failure}; its output is above{why}")


def old_glibc(folder: Path) -> str:
    """Return the folder of stand-ins to link against, so that the libraries run on older systems than this one. Empty
    unless `make wheel` asks for them with KVOPS_MANYLINUX=1."""
    if os.environ.get("KVOPS_MANYLINUX", "0") == "0":
        return ""
    run([sys.executable, str(ROOT / "tools/manylinux/stubs.py"), str(folder)], "the stand-ins for glibc failed")
    return str(folder) if any(folder.iterdir()) else ""


class CMakeBuild(build_ext):
    """Configure, build, and install the libraries into the package that setuptools puts together."""

    def run(self) -> None:
        if self.inplace and os.environ.get("KVOPS_NAMESPACE", "kvops") != "kvops":
            sys.exit("kvops: KVOPS_NAMESPACE is for `make hub`; a build in place has the namespace kvops")
        super().run()

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"  # a plain shared library: no Python ABI in its name

    def build_extension(self, ext: setuptools.Extension) -> None:
        if ext.optional:
            return  # CMake built it together with the first extension
        torch_dir, torch_version = find_torch()
        cmake = find_cmake()
        check_compiler()
        ninja = find_tool("ninja")
        sanitize = os.environ.get("KVOPS_SANITIZE", "")
        cuda = os.environ.get("KVOPS_CUDA", "auto")
        nvcc = None if sanitize else find_nvcc()
        # One folder for each combination of what CMake would not notice changing. It notices KVOPS_LEVELS, KVOPS_CUDA.
        compiler = Path(os.environ.get("CXX", "").split(" ")[0]).name
        tag = ["torch", torch_version.split("+")[0], "ninja" if ninja else "make", compiler, *sanitize.split(";")]
        tag += [f"nvcc{nvcc[1]}"] if nvcc else []
        build = BUILD / "-".join(filter(None, tag))
        prefix = Path(self.get_ext_fullpath(ext.name)).resolve().parent.parent
        configure = [
            *(cmake, "-S", str(ROOT), "-B", str(build)),
            *(["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja[0]}"] if ninja else ["-G", "Unix Makefiles"]),
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_INSTALL_PREFIX={prefix}",
            f"-DKVOPS_TORCH_DIR={torch_dir}",
            f"-DKVOPS_LEVELS={os.environ.get('KVOPS_LEVELS', 'all')}",
            f"-DKVOPS_CUDA={cuda}",
            f"-DKVOPS_CUDA_ARCHS={cuda_archs()}",
            f"-DCUTLASS_DIR={find_cutlass()}",
            f"-DKVOPS_NAMESPACE={os.environ.get('KVOPS_NAMESPACE', 'kvops')}",
            f"-DKVOPS_SANITIZE={sanitize}",
            f"-DKVOPS_STUBS={old_glibc(build / 'old_glibc')}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        try:
            run(configure, "CMake could not configure the build", **({"CUDACXX": nvcc[0]} if nvcc else {}))
        except SystemExit:
            shutil.rmtree(build)  # or CMake would remember the compiler that it refused
            raise
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count())
        run([cmake, "--build", str(build), "--parallel", jobs], "the build failed")
        for library in prefix.glob("kvops/*.so"):
            library.unlink()  # left by an earlier build
        run([cmake, "--install", str(build)], "the libraries could not be installed")

    def copy_extensions_to_source(self) -> None:
        """For an editable install: copy the libraries just built, and remove one that an earlier build left."""
        package = self.get_finalized_command("build_py").get_package_dir("kvops")
        Path(package, "libkvops_cuda.so").unlink(missing_ok=True)
        super().copy_extensions_to_source()

    def get_output_mapping(self) -> dict[str, str]:
        return {built: source for built, source in super().get_output_mapping().items() if os.path.exists(built)}


class WithDemo(build_py):
    """Copies into the package what the demo and the evaluation read: the model, texts, and the page of recorded runs.

    An editable install finds them where they are.
    """

    FILES = {
        "bench": (
            "models/passkey-llama/*config.json",
            "models/passkey-llama/tokenizer.json",
            "models/passkey-llama/model.safetensors",
            "models/passkey-llama/passkey_task.py",
            "data/*.txt",
        ),
        "docs": ("board/index.html",),
    }

    def demo_files(self) -> dict[str, str]:
        target = Path(self.build_lib, "kvops", "demo_files")
        return {
            str(target / x.relative_to(ROOT / folder)): str(x)
            for folder, patterns in self.FILES.items()
            for pattern in patterns
            for x in sorted((ROOT / folder).glob(pattern))
        }

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for target, source in self.demo_files().items():
                self.mkpath(os.path.dirname(target))
                self.copy_file(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return super().get_outputs(include_bytecode) + ([] if self.editable_mode else [*self.demo_files()])


class Wheel(bdist_wheel):
    """One wheel for every Python: the libraries call torch's C shims, never Python's C API."""

    def run(self) -> None:
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)  # modules since removed
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


def extensions() -> list[setuptools.Extension]:
    sources = [str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("csrc/**/*")) if p.is_file()]
    return [
        setuptools.Extension("kvops.libkvops", sources=[], depends=["CMakeLists.txt", *sources]),
        setuptools.Extension("kvops.libkvops_cuda", sources=[], optional=True),
    ]


def readme() -> str:
    """Return README.md for a package index, where relative links lead nowhere."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", r"\1https://raw.githubusercontent.com/kvops/kvops/main/", text)
    return re.sub(r"(\]\()(?!https?:|#)", r"\1https://github.com/kvops/kvops/blob/main/", text)


if __name__ == "__main__":  # true under pip too; tests import the functions above
    setuptools.setup(
        long_description=readme(),
        long_description_content_type="text/markdown",
        ext_modules=extensions(),
        cmdclass={"build_ext": CMakeBuild, "build_py": WithDemo, "bdist_wheel": Wheel},
    )
