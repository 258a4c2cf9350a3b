"""The build: what the library and the source distribution hold, and one clear line for each thing that is missing."""

import functools
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import conftest
import kvops
from kvops import supported

ROOT = Path(__file__).resolve().parents[2]
TORCH = Path(torch.__file__).parent
LIBRARY = Path(kvops.build_info()["library"])
LEVELS = kvops.build_info()["isa_built"]

needs_source = pytest.mark.skipif(not (ROOT / "CMakeLists.txt").exists(), reason="no source tree")
needs_nm = pytest.mark.skipif(not shutil.which("nm"), reason="no nm (binutils)")


def run(*command, expect: int = 0, **kwargs) -> str:
    """Run the command and return its stdout and stderr together; env is added to the environment."""
    env = os.environ | kwargs.pop("env", {})
    done = subprocess.run(
        [str(x) for x in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, **kwargs
    )
    assert (done.returncode == 0) == (expect == 0), done.stdout
    return done.stdout


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


# What is built


@needs_source
def test_source_distribution_is_whole(tmp_path):
    """It holds every file of the repository, except those of the continuous integration, and CMake takes it."""
    run(sys.executable, "setup.py", "-q", "egg_info", "-e", tmp_path, "sdist", "-d", tmp_path, cwd=ROOT)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        files = {x.partition("/")[2] for x in archive.getnames() if not x.endswith("/")}
        archive.extractall(tmp_path / "unpacked")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    found = [p for x in ("csrc", "kvops", "tests", "tools") for p in ROOT.glob(f"{x}/**/*")]  # without a repository
    names = tracked or [str(p.relative_to(ROOT)) for p in found if p.is_file() and p.suffix not in (".so", ".pyc")]
    needed = {x for x in names if not x.startswith((".ci/", ".git", ".pre-commit")) and (ROOT / x).exists()}
    assert {"CMakeLists.txt", "tests/kit.py", "tests/conftest.py", "tools/wheel.py", "LICENSE"} <= needed | files
    assert needed <= files, f"MANIFEST.in leaves out {sorted(needed - files)[:5]}"
    assert not [x for x in files if x.endswith((".so", ".pyc")) or ".venv" in x]
    (source,) = (tmp_path / "unpacked").iterdir()
    options = ("-DKVOPS_CUDA=0", f"-DKVOPS_TORCH_DIR={TORCH}")
    run(load_setup_py().find_cmake(), "-S", source, "-B", tmp_path / "build", *options)


def symbols(path: Path, *options: str) -> list[tuple[str, str]]:
    """Return (type, demangled name without version) of each symbol that nm lists."""
    lines = run("nm", "-C", *options, path).splitlines()
    return [(m[1], m[2]) for line in lines if (m := re.match(r"[0-9a-f ]{16} (\w) ([^@]+)", line))]


def shims(target: str, tmp_path: Path) -> set[str]:
    """Return the C functions that torch's headers declare for a target version."""
    source = tmp_path / "shims.cpp"
    headers = ("torch/csrc/inductor/aoti_torch/c/shim.h", "torch/csrc/stable/c/shim.h")
    source.write_text("".join(f"#include <{x}>\n" for x in headers))
    compiler = os.environ.get("CXX", "c++").split()
    text = run(
        *compiler, "-std=c++20", "-E", "-P", f"-I{TORCH / 'include'}", f"-DTORCH_TARGET_VERSION={target}", source
    )
    return set(re.findall(r"\b((?:aoti_)?torch_\w+)\s*\(", text))


@needs_nm
def test_library_asks_torch_for_no_more_than_2_10_has(tmp_path):
    used = {name for kind, name in symbols(LIBRARY, "-D", "--undefined-only") if kind == "U"}
    ours = {x for x in used if x.startswith(("aoti_torch_", "torch_"))}
    old, new = shims("0x020a000000000000", tmp_path), shims("0x020d000000000000", tmp_path)
    assert old < new or torch.__version__ < "2.12", "the target version hides nothing, so this test would find nothing"
    assert len(ours) > 10 and ours <= old
    # torch's C++ ABI and Python's C API differ between versions; the library needs neither.
    assert not [x for x in used if re.search(r"\b(c10|at|torch|caffe2)::", x) or x.startswith(("Py", "_Py"))]


@needs_nm
def test_library_offers_nothing_but_its_c_functions():
    offered = {name for _, name in symbols(LIBRARY, "-D", "--defined-only")}
    assert offered == {"kvops_facts", "kvops_probe_copy", "kvops_probe_pages", "kvops_probe_read"}


def hardening(library: Path) -> set[str]:
    """Return which of the protections of CMakeLists.txt the library has."""
    dynamic, segments = run("readelf", "-dW", library), run("readelf", "-lW", library)
    used = {name for _, name in symbols(library, "-D", "--undefined-only")}
    found = {"bound now": "BIND_NOW" in dynamic, "read-only tables": "GNU_RELRO" in segments}
    found["guarded stacks"] = "__stack_chk_fail" in used
    found["checked copies"] = any(re.fullmatch(r"__\w+_chk", x) for x in used)
    return {x for x, there in found.items() if there}


def test_libraries_name_no_folder_of_their_build():
    for library in LIBRARY.parent.glob("libkvops*.so"):
        assert f"{ROOT}/csrc".encode() not in library.read_bytes(), library


@needs_nm
def test_library_is_hardened():
    assert hardening(LIBRARY) == {"bound now", "read-only tables", "guarded stacks", "checked copies"}


def level_objects(level: str) -> list[Path]:
    """Return the level's objects of the newest build of the library for this machine, without sanitizers."""
    other = "address|thread|-linux-gnu-"
    builds = [p for p in ROOT.glob("build/torch-*/CMakeFiles") if not re.search(other, p.parent.name)]
    if not builds:
        pytest.skip("no build folder")
    newest = max(builds, key=lambda p: max((x.stat().st_mtime for x in p.glob("level_*/**/*.o")), default=0))
    return sorted(newest.glob(f"level_{level}.dir/**/*.o"))


@needs_nm
@pytest.mark.parametrize("level", [x for x in LEVELS if x != "v4_amx"])  # which has no objects of its own
def test_level_objects_hold_nothing_but_their_kernels(level):
    """The linker could pick a template of std or torch that was compiled at a high level, for every CPU."""
    foreign = {"memcpy", "memset", "memmove", "_GLOBAL_OFFSET_TABLE_", "__stack_chk_fail", "kvops::has_tiles()"}
    objects = level_objects(level)
    assert objects
    for path in objects:
        for kind, name in symbols(path):
            if kind in "WVuvw":
                raise AssertionError(f"{path.name}: weak symbol {name}")
            if kind == "U":
                assert name in foreign, path.name
            elif kind.isupper():
                assert f"kvops::{level}::" in name, f"{path.name}: {name} is not of its level"


@needs_source
@pytest.mark.full
@pytest.mark.skipif(not shutil.which("clang++"), reason="no clang++")
@pytest.mark.parametrize("options", [("-DKVOPS_CUDA=0", f"-DKVOPS_TORCH_DIR={TORCH}"), ("-DKVOPS_C=1",)])
def test_clang_takes_all_of_it(options, tmp_path):
    """Without a warning. Only its front end runs, which instantiates the templates."""
    export = ("-DCMAKE_CXX_COMPILER=clang++", "-DCMAKE_EXPORT_COMPILE_COMMANDS=1", "-DCMAKE_COMPILE_WARNING_AS_ERROR=1")
    run(load_setup_py().find_cmake(), "-S", ROOT, "-B", tmp_path, "-DKVOPS_LEVELS=all", *export, *options)
    commands = json.loads((tmp_path / "compile_commands.json").read_text())
    assert len(commands) > 20
    for x in commands:
        compiler = [y for y in shlex.split(x["command"]) if not y.endswith("/ccache")]
        run(*compiler, "-fsyntax-only", cwd=x["directory"])


# The instruction set at run time


@functools.cache
def best_level() -> int:
    """Return the index of the best level that this CPU has."""
    code = "import kvops; print(kvops.build_info()['isa'])"
    return LEVELS.index(run(sys.executable, "-c", code, env={"KVOPS_ISA": ""}).strip())


@pytest.mark.parametrize("level", LEVELS)
def test_isa_can_be_forced(level):
    best = best_level()
    code = "import kvops; info = kvops.build_info(); print(info['isa'], info['isa_forced'])"
    if LEVELS.index(level) <= best:
        assert run(sys.executable, "-c", code, env={"KVOPS_ISA": level}).split() == [level, level]
    else:
        error = run(sys.executable, "-c", code, env={"KVOPS_ISA": level}, expect=1)
        wrong = f"KVOPS_ISA={level} is not supported by this machine, expected at most {LEVELS[best]}"
        assert last_line(error) == f"ImportError: kvops: {wrong}"


@pytest.mark.parametrize("level", ["avx9", '"', "\\"])
def test_unknown_isa_is_one_line(level):
    error = run(sys.executable, "-c", "import kvops", env={"KVOPS_ISA": level}, expect=1)
    assert last_line(error) == f"ImportError: kvops: KVOPS_ISA must be one of {','.join(LEVELS)}, got {level}"


@needs_source
def test_unknown_levels_are_one_line(tmp_path):
    command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path), f"-DKVOPS_TORCH_DIR={Path(torch.__file__).parent}"]
    out = run(sys.executable, "-m", *command, "-DKVOPS_CUDA=0", "-DKVOPS_LEVELS=v9", expect=1)
    assert "kvops: KVOPS_LEVELS must be all or native, got 'v9'" in " ".join(out.split())


@needs_source
@pytest.mark.parametrize("name", ["my-ops", "1st", "x_cuda", ""])
def test_wrong_namespace(name, tmp_path):
    command = ("cmake", "-S", ROOT, "-B", tmp_path, f"-DKVOPS_TORCH_DIR={TORCH}")
    out = run(sys.executable, "-m", *command, "-DKVOPS_CUDA=0", f"-DKVOPS_NAMESPACE={name}", expect=1)
    wrong = f"kvops: KVOPS_NAMESPACE must be lower-case letters, digits and _, not ending in _cuda, got '{name}'"
    assert wrong in " ".join(out.split())
    env = {"KVOPS_NAMESPACE": "other"}
    error = run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=ROOT, env=env, expect=1)
    assert last_line(error) == "kvops: KVOPS_NAMESPACE is for `make hub`; a build in place has the namespace kvops"


# One line for what is missing


def fake_torch(folder: Path, version: str) -> Path:
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text("from .version import __version__\n")
    (folder / "torch/version.py").write_text(f"__version__ = '{version}'\n")
    return folder


@needs_source
def test_build_without_torch(tmp_path):
    """Python with only setuptools, as under pip's build isolation."""
    site = Path(importlib.util.find_spec("setuptools").origin).parent.parent
    for path in (site / "_distutils_hack", *site.glob("setuptools*")):
        (tmp_path / path.name).symlink_to(path)
    command = [sys.executable, "-S", "setup.py", "-q", "build_ext"]
    line = last_line(run(*command, cwd=ROOT, env={"PYTHONPATH": str(tmp_path)}, expect=1))
    assert line.startswith("kvops: torch is not installed") and "--no-build-isolation" in line


@needs_source
@pytest.mark.parametrize("version", ["2.9.1+cu128", "1.13.0"])
def test_build_with_old_torch(version, tmp_path):
    env = {"PYTHONPATH": str(fake_torch(tmp_path, version))}
    line = last_line(run(sys.executable, "setup.py", "-q", "build_ext", cwd=ROOT, env=env, expect=1))
    assert line.startswith(f"kvops: needs torch >= 2.10, found {version} in {tmp_path}") and "pip install" in line


def test_import_with_old_torch(tmp_path):
    env = {"PYTHONPATH": str(fake_torch(tmp_path, "2.9.1"))}
    error = run(sys.executable, "-c", "import kvops", cwd=LIBRARY.parent.parent, env=env, expect=1)
    assert last_line(error).startswith("ImportError: kvops needs torch >= 2.10, found 2.9.1")


@needs_source
def test_build_without_compiler():
    line = last_line(run(sys.executable, "setup.py", "-q", "build_ext", cwd=ROOT, env={"CXX": "no-such-c++"}, expect=1))
    assert line.startswith("kvops: no C++ compiler found (no-such-c++)")


@pytest.fixture
def setup_py():
    return load_setup_py()


def load_setup_py():
    spec = importlib.util.spec_from_file_location("kvops_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def script(path: Path, text: str) -> Path:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


@needs_source
def test_cmake_missing_old_and_new(setup_py, monkeypatch, tmp_path):
    old = script(tmp_path / "old", "echo cmake version 3.10.2\n")
    new = script(tmp_path / "new", "echo cmake version 3.31.6\n")
    monkeypatch.setattr(setup_py, "find_tool", lambda name: [])
    with pytest.raises(SystemExit, match=r"^kvops: needs cmake >= [\d.]+, none is installed; run: pip install cmake"):
        setup_py.find_cmake()
    monkeypatch.setattr(setup_py, "find_tool", lambda name: [str(old)])
    with pytest.raises(SystemExit, match=rf"^kvops: needs cmake >= [\d.]+, found 3.10.2 at {old}; run: pip install"):
        setup_py.find_cmake()
    monkeypatch.setattr(setup_py, "find_tool", lambda name: [str(old), str(new)])
    assert setup_py.find_cmake() == str(new)


@needs_source
def test_cmake_says_why_in_one_line(tmp_path):
    """CMake indents and wraps the messages of CMakeLists.txt. This one is about a torch without headers."""
    env = {"PYTHONPATH": str(fake_torch(tmp_path, "2.99.0"))}
    out = run(sys.executable, "setup.py", "-q", "build_ext", cwd=ROOT, env=env, expect=1)
    assert last_line(out).startswith(f"kvops: no torch >= 2.10 in '{tmp_path / 'torch'}'") and "CMake Error" not in out
    assert not list(ROOT.glob("build/torch-2.99.0*")), "the next attempt would remember this one"


@needs_source
def test_other_failures_are_shown_whole(setup_py, tmp_path):
    with pytest.raises(SystemExit, match=r"^what it printed\n\nkvops: it failed; its output is above$"):
        setup_py.run([script(tmp_path / "fails", "echo what it printed; exit 3\n")], "it failed")
    with pytest.raises(SystemExit, match=r"\nkvops: it failed; its output is above: x.cu\(3\): error: no such thing$"):
        text = "one\nx.cu(3): error: no such thing\n  int x;\nx.cu(4): error: nor this"
        setup_py.run([script(tmp_path / "fails", f"echo '{text}'; exit 3\n")], "it failed")


@needs_source
@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_told(terminal, setup_py, monkeypatch, tmp_path, capsys):
    """In a terminal every object, in a line that changes; elsewhere the first one, then one every ten seconds."""
    clock = iter([100, 109, 111]).__next__
    monkeypatch.setattr(setup_py, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    objects = [f"[{i}/9] Building CXX object CMakeFiles/level_v3.dir/levels/x{i}.cpp.o" for i in (1, 2, 3)]
    setup_py.run([script(tmp_path / "build", "\n".join(f"echo '{x}'" for x in [*objects, "[9/9] Linking"]))], "no")
    told = capsys.readouterr().out.replace("\r\x1b[K", "").split("\r" if terminal else "\n")
    told = [x.removesuffix("\x1b[K") for x in told if x]
    assert told == [f"== kvops: compiled {i} of 9, levels/x{i}.cpp" for i in ((1, 2, 3) if terminal else (1, 3))]


def make(goal: str, tmp_path: Path, python: Path | str, expect: int = 0) -> str:
    venv = tmp_path / "venv"
    command = ["make", "-s", f"VENV={venv}", f"PYTHON={python}", f"{venv}/stamps/{goal}"]
    env = {"MAKEFLAGS": "", "MAKELEVEL": "", "MAKEOVERRIDES": ""}  # the tests may run under make
    return run(*command, cwd=ROOT, expect=expect, env=env)


@needs_source
@pytest.mark.parametrize(
    "python, message",
    [
        (None, "cannot run"),
        ('case "$2" in *version_info*) exit 1;; esac; [ "$1" != -V ] || echo Python 3.9.2\n', "is Python 3.9.2"),
        ('case "$2" in *ensurepip*) exit 1;; esac\n', "apt install python3-venv"),
    ],
    ids=["no python", "old python", "no venv"],
)
def test_make_says_what_is_missing(python, message, tmp_path):
    path = tmp_path / "python"
    if python:
        script(path, python)
    lines = make("venv", tmp_path, path, expect=1).strip().splitlines()
    assert lines[0].startswith("kvops: ") and message in lines[0]
    assert [x for x in lines[1:] if not x.startswith("make")] == []
    assert not (tmp_path / "venv").exists()


@needs_source
def test_make_uses_the_torch_that_python_has(tmp_path):
    out = make(f"torch-{supported.TORCH.ci}", tmp_path, sys.executable)
    assert f"using the torch in {TORCH.parent}" in out and "== torch" not in out
    code = "import sys, torch; print(torch.__file__, sys.prefix)"
    assert run(tmp_path / "venv/bin/python", "-c", code).split() == [torch.__file__, str(tmp_path / "venv")]


# The tests themselves


class Item(NamedTuple):
    """A case of a test, as pytest collects it."""

    name: str
    originalname: str = "test"
    path: Path = Path("tests/test_a.py")


def choose(items: list[Item], **options) -> tuple[list[Item], list[Item]]:
    """Return the items that the tests' options choose, and those that they leave out."""
    chosen, left_out = [*items], []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    conftest.pytest_collection_modifyitems(SimpleNamespace(getoption=options.get, hook=hook), chosen)
    assert sorted(chosen + left_out) == sorted(items)
    return chosen, left_out


def test_shares_are_a_partition():
    """Of --share: each test is in one of them, and they are about as large."""
    items = [Item(f"test[{i}-dtype{i % 3}]") for i in range(600)]
    taken = []
    for share in ("0/3", "1/3", "2/3"):
        chosen, _ = choose(items, share=share)
        assert 150 < len(chosen) < 250 and len({x.name.partition("-")[2] for x in chosen}) == 3
        taken += chosen
    assert sorted(taken) == sorted(items)


def test_a_sample_has_cases_of_every_test():
    items = [Item(f"test_{i}[{case}]", f"test_{i}") for i in range(100) for case in range(1 + i % 20)]
    chosen, left_out = choose(items, sample=4)
    assert {x.originalname for x in chosen} == {x.originalname for x in items}
    assert len(items) / 5 < len(chosen) < len(items) / 2.5 and chosen == [x for x in items if x in chosen]
    assert choose(items) == (items, [])
    # The shares of a sample are a partition of it.
    shares = [choose(items, share=f"{i}/4", sample=4)[0] for i in range(4)]
    assert sorted(sum(shares, [])) == sorted(chosen) and all(len(x) > len(chosen) / 6 for x in shares)
    with pytest.raises(pytest.UsageError, match="--sample: expected at least 1, got 0"):
        choose(items, sample=0)
