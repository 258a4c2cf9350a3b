"""make release-check: each problem is planted in a clone, and found."""

import email
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvops
from test_build import ROOT, run
from test_versions import load

VERSION = kvops.__version__
COMMIT = ("-c", "user.name=kvops", "-c", "user.email=kvops@example.org", "commit", "-qam", "a change")

pytestmark = pytest.mark.skipif(
    not (ROOT / ".git").exists()
    or subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True).returncode,
    reason="no repository",
)


def git(folder: Path, *words: str) -> str:
    return run("git", *words, cwd=folder)


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


@pytest.fixture(scope="module")
def tool():
    return load("tools/release_check.py")


@pytest.fixture
def clone(tmp_path) -> Path:
    """A clone that can be released: its changelog has a date, and what checks wheels is content."""
    folder = tmp_path / "clone"
    git(tmp_path, "clone", "-q", "--shared", str(ROOT), str(folder))
    text = (folder / "CHANGELOG.md").read_text()
    (folder / "CHANGELOG.md").write_text(re.sub(r"^## .*$", f"## {VERSION} (2026-12-01)", text, count=1, flags=re.M))
    (folder / "tools/wheel.py").write_text("")
    git(folder, *COMMIT)
    return folder


# The source tree


def test_a_clean_tree(tool, clone):
    assert tool.work_tree(clone) == []
    (clone / "new.txt").touch()
    (clone / "README.md").write_text("")
    got = ["M README.md", "?? new.txt"]
    assert tool.work_tree(clone) == [f"expected a clean work tree, got {x}" for x in got]


def test_the_tag(tool, clone):
    assert tool.tag(clone) == []
    git(clone, "tag", f"v{VERSION}")
    assert tool.tag(clone) == []
    git(clone, "tag", "-f", f"v{VERSION}", "HEAD~1")
    (problem,) = tool.tag(clone)
    head, before = (git(clone, "rev-parse", x)[:12] for x in ("HEAD", "HEAD~1"))
    assert problem == f"v{VERSION}: expected no such tag, or one at {head}, got one at {before}"


def test_versions_that_differ(tool, clone):
    assert tool.version(clone) == []
    edit(clone / "CITATION.cff", f"\nversion: {VERSION}\n", "\nversion: 0.0.9\n")
    assert tool.version(clone) == [f"CITATION.cff: expected version: {VERSION}, got 0.0.9"]
    edit(clone / "CITATION.cff", "\nversion: 0.0.9\n", "\n")
    assert tool.version(clone) == [f"CITATION.cff: expected version: {VERSION}, got none"]
    edit(clone / "kvops/version.py", f'"{VERSION}"', '"7.0.0.dev1"')
    assert tool.version(clone)[0] == "kvops/version.py: expected a version such as 1.2.3 or 1.2.3rc1, got 7.0.0.dev1"


@pytest.mark.parametrize("head", [f"{VERSION} (unreleased)", "0.0.9 (2026-12-01)", f"{VERSION} (2026-13-01)", VERSION])
def test_a_stale_changelog(tool, clone, head):
    assert tool.changelog(clone) == []
    edit(clone / "CHANGELOG.md", f"## {VERSION} (2026-12-01)", f"## {head}")
    assert tool.changelog(clone) == [f'CHANGELOG.md: expected "## {VERSION} (YYYY-MM-DD)" on top, got "## {head}"']


def test_a_changelog_that_says_nothing(tool, clone):
    nothing = ["CHANGELOG.md: expected a list of changes below the top heading, got none"]
    edit(clone / "CHANGELOG.md", "## ", "## 9.9.9 (2026-12-02)\n\n## ")
    assert tool.changelog(clone)[1:] == nothing
    (clone / "CHANGELOG.md").write_text("# Changelog\n")
    assert tool.changelog(clone)[1:] == nothing


@pytest.mark.parametrize(
    "text, problem",
    [
        (
            "[x](examples/no_such_page.md#a)",
            "README.md: {blob}examples/no_such_page.md#a leads to examples/no_such_page.md, which is",
        ),
        ("![x](docs/images/no.png)", "README.md: {raw}docs/images/no.png leads to docs/images/no.png, which is not in"),
        ('<img src="docs/images/demo.png">', "README.md: expected links with https://, got 'docs/images/demo.png'"),
        ("[x](#no-such-heading)", "README.md: #user-content-no-such-heading leads to no heading"),
        ("[x](http://example.org)", "README.md: expected links with https://, got 'http://example.org'"),
    ],
)
def test_dead_links_of_the_readme(tool, clone, text, problem):
    pytest.importorskip("readme_renderer.markdown")
    pytest.importorskip("comrak")
    edit(clone / "README.md", "\n## Install\n", "\n[here](#install), [there](docs/)\n\n## Install\n")
    assert tool.readme(clone) == []
    edit(clone / "README.md", "\n## Install\n", f"\n{text}\n\n## Install\n")
    (found,) = tool.readme(clone)
    blob, raw = "https://github.com/kvops/kvops/blob/main/", "https://raw.githubusercontent.com/kvops/kvops/main/"
    assert found.startswith(problem.format(blob=blob, raw=raw))


def test_a_readme_without_pictures(tool, clone):
    pytest.importorskip("readme_renderer.markdown")
    pytest.importorskip("comrak")
    (clone / "README.md").write_text("# kvops\n")
    assert tool.readme(clone) == ["README.md: expected a picture, got none"]


# What is built


def test_a_build_is_of_the_commit_alone(tool, clone, tmp_path, monkeypatch):
    """The source distribution has no file that is not committed, and options of the environment are not passed on."""
    monkeypatch.setenv("KVOPS_LEVELS", "native")
    monkeypatch.setenv("KVOPS_CUDA_ARCHS", "80")
    told = "import json, os, sys; print(json.dumps({x: y for x, y in os.environ.items() if x[:5] == 'KVOPS'}), "
    (clone / "tools/wheel.py").write_text(f"{told}file=open(sys.argv[2] + '/told', 'w'))\n")
    git(clone, *COMMIT)
    (clone / "tests/not_committed.py").touch()
    assert tool.build(clone, tmp_path) == []
    assert json.loads((tmp_path / "told").read_text()) == {"KVOPS_CUDA": "1", "KVOPS_LEVELS": "all"}
    sdist = tmp_path / f"kvops-{VERSION}.tar.gz"
    assert tool.sdist_problems(clone, sdist) == []
    with tarfile.open(sdist) as archive:
        assert not [x for x in archive.getnames() if "not_committed" in x]

    edit(clone / "CONTRIBUTING.md", "#", "##")
    (clone / "tests/new.py").touch()
    git(clone, "add", "tests/new.py")
    git(clone, "rm", "-q", "--cached", "mkdocs.yml")
    assert tool.sdist_problems(clone, sdist) == [
        f"{sdist.name}: it lacks tests/new.py",
        f"{sdist.name}: it holds mkdocs.yml, which is not in the repository",
        f"{sdist.name}: its CONTRIBUTING.md differs from the repository",
    ]
    (clone / "tools/wheel.py").write_text("raise SystemExit('no nvcc')\n")
    git(clone, *COMMIT)
    assert tool.build(clone, tmp_path) == ["tools/wheel.py failed in a clean clone; its output is above"]


def wheel(
    clone: Path, dist: Path, version: str = VERSION, cuda: bool = True, more: dict[str, str] | None = None
) -> Path:
    """Put a wheel of the clone's Python files into dist."""
    dist.mkdir(exist_ok=True)
    info = f"kvops-{version}.dist-info"
    head = f"Metadata-Version: 2.4\nName: kvops\nVersion: {version}\nRequires-Dist: numpy\n"
    head += "Requires-Dist: tqdm; extra == 'bench'\nDescription-Content-Type: text/markdown\n\n# kvops\n"
    files = {str(x.relative_to(clone)): x.read_text() for x in (clone / "kvops").rglob("*.py*")}
    files |= {"kvops/libkvops.so": '{"nvcc": "12.8"}', f"{info}/METADATA": head}
    files |= {f"{info}/WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n", f"{info}/RECORD": ""}
    files |= {"kvops/libkvops_cuda.so": ""} if cuda else {}
    file = dist / f"kvops-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in (files | (more or {})).items():
            archive.writestr(name, text)
    return file


def test_wheels_that_are_not_of_this_release(tool, clone, tmp_path):
    dist = tmp_path / "dist"
    name = wheel(clone, dist, cuda=False, more={"kvops/demo_files/data/a.py": "", "kvops/gone.py": ""}).name
    (clone / "kvops/new.py").touch()
    git(clone, "add", "kvops/new.py")
    edit(clone / "kvops/info.py", "the", "a")
    problems = [
        f"{name}: it lacks kvops/new.py",
        f"{name}: it holds kvops/gone.py, which is not in the repository",
        f"{name}: its kvops/info.py differs from the repository",
        f"{name}: it has no CUDA kernels (kvops/libkvops_cuda.so); build it where nvcc >= 12 is found",
    ]
    assert tool.distributions(clone, dist) == [f"{dist}: expected kvops-{VERSION}.tar.gz", *problems]
    wheel(clone, dist)
    assert tool.wheel_problems(clone, dist / name) == []
    wheel(clone, dist, version="0.0.9")
    assert tool.distributions(clone, dist)[1:] == [
        f"kvops-0.0.9-py3-none-any.whl: expected only files of {VERSION} in {dist}; remove it"
    ]
    assert tool.wheel_problems(clone, dist / "kvops-0.0.9-py3-none-any.whl") == [
        f"kvops-0.0.9-py3-none-any.whl: expected version {VERSION}, got 0.0.9"
    ]


def test_wheels_are_checked_by_what_makes_them(tool, clone, tmp_path):
    file = wheel(clone, tmp_path / "dist")
    (clone / "tools/wheel.py").write_text("import sys; sys.exit(print('expected the tags', *sys.argv[1:]) or 1)\n")
    assert tool.wheel_problems(clone, file) == [f"expected the tags --check {file}"]
    (clone / "tools/wheel.py").write_text("raise SystemExit(3)\n")
    assert tool.wheel_problems(clone, file) == ["tools/wheel.py --check ended with status 3"]
    assert tool.distributions(clone, tmp_path)[1:] == [f"{tmp_path}: expected a wheel"]


def test_twine(tool, clone, tmp_path, monkeypatch):
    dist = tmp_path / "dist"
    assert tool.twine(clone, tmp_path) == [f"{tmp_path}: expected distributions, got none"]
    file = wheel(clone, dist)
    ran = []

    def without_twine(*command, cwd):
        ran.append(command)
        return SimpleNamespace(returncode=1, stdout=f"{sys.executable}: No module named twine\n")

    with monkeypatch.context() as patch:
        patch.setattr(tool, "run", without_twine)
        assert tool.twine(clone, dist) == ["needs twine; run: pip install -r requirements-release.txt"]
    assert ran == [(sys.executable, "-m", "twine", "check", "--strict", file)]
    pytest.importorskip("twine")
    assert tool.twine(clone, dist) == []
    wheel(clone, dist, more={f"kvops-{VERSION}.dist-info/METADATA": f"Metadata-Version: 2.4\nVersion: {VERSION}\n"})
    assert tool.twine(clone, dist)


# The bill of materials


def test_the_bill_of_materials(tool, clone, tmp_path):
    dist = tmp_path / "dist"
    assert tool.bill_of_materials(clone, tmp_path) == [f"{tmp_path}: expected a wheel, got none"]
    file = wheel(clone, dist)
    assert tool.bill_of_materials(clone, dist) == []
    written = dist / f"kvops-{VERSION}.cdx.json"
    text = written.read_text()
    assert tool.bill_of_materials(clone, dist) == [] and written.read_text() == text  # with the same number and time
    found = json.loads(text)
    assert (found["bomFormat"], found["metadata"]["component"]["version"]) == ("CycloneDX", VERSION)
    (uploaded,) = found["metadata"]["component"]["externalReferences"]
    digest = run("sha256sum", file).split()[0]
    assert uploaded["url"] == file.name and uploaded["hashes"] == [{"alg": "SHA-256", "content": digest}]
    pinned = re.search(r"^CUTLASS := ([\d.]+)", (clone / "Makefile").read_text(), re.M)[1]
    parts = {x["name"]: x for x in found["components"]}
    assert list(parts) == ["numpy", "torch", "nvidia-cutlass", "cuda-runtime", "python-standard-library"]
    assert parts["nvidia-cutlass"]["version"] == pinned and parts["cuda-runtime"]["version"] == "12.8"
    assert all(x["licenses"] and x["version"] for x in parts.values())
    assert found["dependencies"][0]["dependsOn"] == [x["bom-ref"] for x in parts.values()]

    wheel(clone, dist, cuda=False)
    assert tool.bill_of_materials(clone, dist) == []
    names = [x["name"] for x in json.loads(written.read_text())["components"]]
    assert names == ["numpy", "torch", "python-standard-library"]

    wheel(clone, dist, more={"kvops/libkvops.so": ""})
    assert tool.bill_of_materials(clone, dist) == [f"{file.name}: expected the version of nvcc in libkvops.so"]
    info = f"kvops-{VERSION}.dist-info/METADATA"
    wheel(clone, dist, more={info: f"Version: {VERSION}\nRequires-Dist: no-such-package>=1\n"})
    (problem,) = tool.bill_of_materials(clone, dist)
    assert "no-such-package" in problem


@pytest.mark.parametrize(
    "metadata, licenses",
    [
        ("License-Expression: MIT", [{"license": {"id": "MIT"}}]),
        ("License-Expression: MIT AND BSD-3-Clause", [{"expression": "MIT AND BSD-3-Clause"}]),
        ("License: BSD, see LICENSE\n  for details", [{"license": {"name": "BSD, see LICENSE"}}]),
        ("License-File: LICENSE", None),
    ],
)
def test_licenses(tool, monkeypatch, metadata, licenses):
    found = email.message_from_string(f"Name: x\nVersion: 1.0+cpu\n{metadata}\n\n")
    monkeypatch.setattr(tool.importlib.metadata, "metadata", lambda name: found)
    if licenses:
        part = tool.installed("x", "what it is")
        assert part["licenses"] == licenses and part["purl"] == "pkg:pypi/x@1.0"
    else:
        with pytest.raises(ValueError, match="^x: expected a license in its metadata, got none$"):
            tool.installed("x", "what it is")


# The whole


def test_what_blocks_and_what_passes(tool, clone, tmp_path, monkeypatch, capsys):
    """A release is built only if its source can be released, and passes only if it was built."""
    dist, built = tmp_path / "dist", []

    def build(root, dist):
        built.append(wheel(root, dist))
        (dist / f"kvops-{VERSION}.tar.gz").touch()
        return []

    monkeypatch.setattr(tool, "build", build)
    monkeypatch.setattr(tool, "sdist_problems", lambda root, sdist: [])
    for name in ("readme", "twine"):
        monkeypatch.setattr(tool, name, lambda *_: [])
    options = ["--dist", str(dist)]
    assert tool.main(options, clone) == 0 and len(built) == 1
    out = capsys.readouterr().out
    assert "blocks" not in out and len(re.findall("^passed  ", out, re.M)) == 9
    assert out.splitlines()[-1] == (
        f"kvops {VERSION} can be released: kvops-{VERSION}-py3-none-any.whl, kvops-{VERSION}.tar.gz"
    )

    assert tool.main([*options, "--no-build"], clone) == 1 and len(built) == 1
    out = capsys.readouterr().out
    assert re.findall("^blocks  (.*)", out, re.M) == ["build from a clean clone: not done, because of --no-build"]
    assert out.splitlines()[-1] == f"kvops {VERSION} cannot be released: 1 problem"

    edit(clone / "CITATION.cff", f"\nversion: {VERSION}\n", "\nversion: 0.0.9\n")
    assert tool.main(options, clone) == 1 and len(built) == 1
    out = capsys.readouterr().out
    assert [x.split(":")[0] for x in re.findall("^blocks  (.*)", out, re.M)] == [
        *("clean work tree", "version", "build from a clean clone")
    ]
    assert "twine" not in out and out.splitlines()[-1] == f"kvops {VERSION} cannot be released: 3 problems"


def test_the_package_wheel_is_not_hidden(tmp_path):
    """Python puts the folder of the script, which has a wheel.py, on its path; setup.py needs the package wheel."""
    pytest.importorskip("readme_renderer.markdown")
    pytest.importorskip("comrak")
    out = run(sys.executable, "tools/release_check.py", "--no-build", "--dist", tmp_path / "dist", cwd=ROOT, expect=1)
    assert "passed  README on the index\n" in out and "Traceback" not in out
