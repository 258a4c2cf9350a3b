"""Check everything that a release needs, and build it from a clean clone. It uploads nothing.

    python tools/release_check.py               what `make release-check` runs
    python tools/release_check.py --no-build    check what is in dist/, which keeps the release blocked

It prints what passed and what blocks the release. The exit status is 1 if anything does. dist/ then holds the source
distribution, the wheel of this machine's architecture and a bill of materials (CycloneDX). Wheels of other
architectures that are already in dist/ are checked too.
"""

from __future__ import annotations

import argparse
import datetime
import email
import hashlib
import html.parser
import importlib.metadata
import json
import os
import re
import runpy
import subprocess
import sys
import tarfile
import tempfile
import uuid
import zipfile
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD = {"KVOPS_CUDA": "1", "KVOPS_LEVELS": "all"}  # a wheel without CUDA kernels is no release
PAGES = r"https://(?:github\.com/kvops/kvops/blob|raw\.githubusercontent\.com/kvops/kvops)/main/([^#?]*)"
NOT_IN_SDIST = (".ci/", ".git", ".pre-commit")
ONLY_IN_SDIST = r"PKG-INFO|setup\.cfg|kvops\.egg-info/.*"


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def complaints(done: subprocess.CompletedProcess[str], what: str) -> list[str]:
    """Return what a check that failed has printed, a problem per line."""
    lines = [x.strip() for x in done.stdout.splitlines() if x.strip()]
    return (lines or [f"{what} ended with status {done.returncode}"]) if done.returncode else []


def git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"make release-check: git {words[0]} failed in {root}: {done.stderr.strip()}")
    return done.stdout.strip()


def tracked(root: Path) -> list[str]:
    return git(root, "ls-files").splitlines()


def version_of(root: Path) -> str:
    return runpy.run_path(str(root / "kvops/version.py"))["__version__"]


# The source tree


def work_tree(root: Path) -> list[str]:
    changed = git(root, "status", "--porcelain").splitlines()
    return [f"expected a clean work tree, got {x.strip()}" for x in changed]


def tag(root: Path) -> list[str]:
    name, head = f"v{version_of(root)}", git(root, "rev-parse", "HEAD")
    if not git(root, "tag", "--list", name):
        return []
    at = git(root, "rev-parse", f"{name}^{{commit}}")
    return [] if at == head else [f"{name}: expected no such tag, or one at {head[:12]}, got one at {at[:12]}"]


def version(root: Path) -> list[str]:
    expected, problems = version_of(root), []
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", expected):
        problems.append(f"kvops/version.py: expected a version such as 1.2.3 or 1.2.3rc1, got {expected}")
    cited = re.search(r"^version: (\S+)$", (root / "CITATION.cff").read_text(), re.MULTILINE)
    if not cited or cited[1] != expected:
        problems.append(f"CITATION.cff: expected version: {expected}, got {cited[1] if cited else 'none'}")
    return problems


def changelog(root: Path) -> list[str]:
    expected = version_of(root)
    entries = re.split(r"^## ", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    head, _, text = entries[0].partition("\n") if entries else ("", "", "")
    found, problems = re.fullmatch(r"(\S+) \((\d{4}-\d\d-\d\d)\)", head), []
    try:
        dated = bool(found and datetime.date.fromisoformat(found[2]))
    except ValueError:
        dated = False
    if not dated or not found or found[1] != expected:
        problems.append(f'CHANGELOG.md: expected "## {expected} (YYYY-MM-DD)" on top, got "## {head}"')
    if not re.search(r"^- ", text, re.MULTILINE):
        problems.append("CHANGELOG.md: expected a list of changes below the top heading, got none")
    return problems


class Rendered(html.parser.HTMLParser):
    """The links, pictures and anchors of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.pictures: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "href":
                self.links.append(value or "")
            elif name == "src":
                self.pictures.append(value or "")
            elif name == "id":
                self.anchors.add(value or "")


def readme(root: Path) -> list[str]:
    """Render README.md as the package index does. setup.py has made its relative links absolute."""
    try:
        from readme_renderer.markdown import render
    except ImportError:
        return ["needs readme_renderer[md]; run: pip install -r requirements-dev.txt"]
    text = runpy.run_path(str(root / "setup.py"), run_name="kvops_setup")["readme"]()
    page = render(text)
    if not page:
        return ["README.md: expected it to render, got nothing"]
    found, files, problems = Rendered(page), {*tracked(root)}, []
    folders = {str(x) for name in files for x in Path(name).parents}
    if not found.pictures:
        problems.append("README.md: expected a picture, got none")
    for link in [*found.links, *found.pictures]:
        path = re.match(PAGES, link)
        if path and path[1].rstrip("/") not in files | folders:
            problems.append(f"README.md: {link} leads to {path[1]}, which is not in the repository")
        elif link.startswith("#") and link[1:] not in found.anchors:
            problems.append(f"README.md: {link} leads to no heading")
        elif not link.startswith(("https://", "#")):
            problems.append(f"README.md: expected links with https://, got {link!r}")
    return problems


# What is built


def build(root: Path, dist: Path) -> list[str]:
    """Build the source distribution and the wheel from a clean clone."""
    env = {x: y for x, y in os.environ.items() if not x.startswith("KVOPS_")} | BUILD
    with tempfile.TemporaryDirectory(prefix="kvops-release-") as folder:
        clone = Path(folder) / "kvops"
        git(root, "clone", "--quiet", str(root), str(clone))
        for command in (
            [sys.executable, "setup.py", "-q", "sdist", "-d", dist.resolve()],
            [sys.executable, "tools/wheel.py", "--out", dist.resolve()],
        ):
            if subprocess.run(command, cwd=clone, env=env).returncode:
                return [f"{command[1]} failed in a clean clone; its output is above"]
    return []


def wheels(dist: Path) -> list[Path]:
    return sorted(dist.glob("kvops-*.whl"))


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [x for x in archive.namelist() if re.fullmatch(r"kvops-[^/]*\.dist-info/METADATA", x)]
        return email.message_from_bytes(archive.read(name))


def stale(root: Path, contents: dict[str, bytes], expected: set[str], strangers: set[str]) -> list[str]:
    """Return how files of an archive differ from those of the source tree."""
    problems = [f"it lacks {x}" for x in sorted(expected - contents.keys())]
    problems += [f"it holds {x}, which is not in the repository" for x in sorted(strangers)]
    shared = sorted(expected & contents.keys())
    return problems + [f"its {x} differs from the repository" for x in shared if contents[x] != (root / x).read_bytes()]


def wheel_problems(root: Path, wheel: Path) -> list[str]:
    sources = {x for x in tracked(root) if re.fullmatch(r"kvops/.*\.pyi?", x)}
    with zipfile.ZipFile(wheel) as archive:
        names = {*archive.namelist()}
        python = {x for x in names if x.endswith((".py", ".pyi")) and not x.startswith("kvops/demo_files/")}
        problems = stale(root, {x: archive.read(x) for x in python}, sources, python - sources)
    if "kvops/libkvops_cuda.so" not in names:
        problems.append("it has no CUDA kernels (kvops/libkvops_cuda.so); build it where nvcc >= 12 is found")
    found = metadata(wheel)["Version"]
    if found != version_of(root):
        problems.append(f"expected version {version_of(root)}, got {found}")
    done = run(sys.executable, root / "tools/wheel.py", "--check", wheel.resolve(), cwd=root)
    return [f"{wheel.name}: {x}" for x in problems] + complaints(done, "tools/wheel.py --check")


def sdist_problems(root: Path, sdist: Path) -> list[str]:
    expected = {x for x in tracked(root) if not x.startswith(NOT_IN_SDIST)}
    with tarfile.open(sdist) as archive:
        files = ((x.name.partition("/")[2], x) for x in archive if x.isfile())
        contents = {name: archive.extractfile(x).read() for name, x in files}  # in order: going back unpacks it again
    strangers = {x for x in contents.keys() - expected if not re.fullmatch(ONLY_IN_SDIST, x)}
    return [f"{sdist.name}: {x}" for x in stale(root, contents, expected, strangers)]


def distributions(root: Path, dist: Path) -> list[str]:
    """Return what is wrong with the files that would be uploaded."""
    expected = version_of(root)
    sdist, found = dist / f"kvops-{expected}.tar.gz", wheels(dist)
    problems = [] if sdist.exists() else [f"{dist}: expected {sdist.name}"]
    problems += [] if found else [f"{dist}: expected a wheel"]
    for file in [*dist.glob("kvops-*.tar.gz"), *found]:
        if not file.name.startswith((f"kvops-{expected}-", f"kvops-{expected}.tar.gz")):
            problems.append(f"{file.name}: expected only files of {expected} in {dist}; remove it")
        elif file == sdist:
            problems += sdist_problems(root, file)
        else:
            problems += wheel_problems(root, file)
    return problems


def uploads(root: Path, dist: Path) -> list[Path]:
    """Return the files that the index would take."""
    return [*wheels(dist), *dist.glob(f"kvops-{version_of(root)}.tar.gz")]


def twine(root: Path, dist: Path) -> list[str]:
    if not (files := uploads(root, dist)):
        return [f"{dist}: expected distributions, got none"]
    done = run(sys.executable, "-m", "twine", "check", "--strict", *(x.resolve() for x in files), cwd=root)
    if "No module named twine" in done.stdout:
        return ["needs twine; run: pip install -r requirements-release.txt"]
    return complaints(done, "twine check --strict")


# The bill of materials


def component(name: str, version: str, license: dict[str, Any], what: str, type: str = "library") -> dict[str, Any]:
    ref = f"{name}@{version}"
    return {
        "type": type,
        "bom-ref": ref,
        "name": name,
        "version": version,
        "description": what,
        "licenses": [license],
    }


def package(name: str, version: str, license: dict[str, Any], what: str) -> dict[str, Any]:
    return component(name, version, license, what) | {"purl": f"pkg:pypi/{name}@{version}"}


def spdx(expression: str) -> dict[str, Any]:
    return {"license": {"id": expression}} if re.fullmatch(r"[\w.-]+", expression) else {"expression": expression}


def installed(name: str, what: str) -> dict[str, Any]:
    """Describe a package by its metadata in this environment."""
    found = importlib.metadata.metadata(name)
    if expression := found["License-Expression"]:
        license = spdx(expression)
    elif text := found["License"]:  # of older metadata; often the whole text
        license = {"license": {"name": text.splitlines()[0]}}
    else:
        raise ValueError(f"{name}: expected a license in its metadata, got none")
    return package(name, found["Version"].partition("+")[0], license, what)


def cuda_components(root: Path, wheel: Path) -> list[dict[str, Any]]:
    """Describe what is compiled into libkvops_cuda.so."""
    with zipfile.ZipFile(wheel) as archive:
        if "kvops/libkvops_cuda.so" not in archive.namelist():
            return []
        nvcc = re.search(rb'"nvcc": "([\d.]+)"', archive.read("kvops/libkvops.so"))
    pinned = re.search(r"^CUTLASS := ([\d.]+)", (root / "Makefile").read_text(), re.MULTILINE)
    if not nvcc or not pinned:
        missing = "the version of nvcc in libkvops.so" if not nvcc else "a line CUTLASS := ... in the Makefile"
        raise ValueError(f"{wheel.name}: expected {missing}")
    terms = {"license": {"name": "NVIDIA Software License Agreement"}}
    return [
        package("nvidia-cutlass", pinned[1], spdx("BSD-3-Clause"), "headers, compiled into libkvops_cuda.so"),
        component("cuda-runtime", nvcc[1].decode(), terms, "linked into libkvops_cuda.so; the version is nvcc's"),
    ]


def bill(root: Path, dist: Path) -> dict[str, Any]:
    """Return the bill of materials of the distributions in dist. It depends on nothing but them, the commit, and the
    versions of torch and numpy that are installed."""
    release, found = version_of(root), wheels(dist)
    required = [x for x in metadata(found[0]).get_all("Requires-Dist") or [] if "extra ==" not in x]
    parts = [installed(re.match(r"[\w.-]+", x)[0], "required at run time") for x in required]
    parts.append(installed("torch", "required at run time, installed by the user; this one was compiled against"))
    for wheel in found:
        parts += [x for x in cuda_components(root, wheel) if x not in parts]
    what = "the demo's text, kvops/demo_files/data/haystack.txt: modules of this version"
    parts.append(component("python-standard-library", "3.11.7", spdx("PSF-2.0"), what, type="data"))
    files = [
        {
            "type": "distribution",
            "url": x.name,
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(x.read_bytes()).hexdigest()}],
        }
        for x in uploads(root, dist)
    ]
    ours = package("kvops", release, spdx("Apache-2.0"), metadata(found[0])["Summary"]) | {"externalReferences": files}
    commit, when = git(root, "log", "-1", "--format=%H %cI").split()
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_URL, f"{ours['purl']}#{commit}").urn,
        "version": 1,
        "metadata": {"timestamp": when, "component": ours},
        "components": parts,
        "dependencies": [{"ref": ours["bom-ref"], "dependsOn": [x["bom-ref"] for x in parts]}],
    }


def bill_of_materials(root: Path, dist: Path) -> list[str]:
    """Write the bill of materials beside the wheels."""
    if not wheels(dist):
        return [f"{dist}: expected a wheel, got none"]
    try:
        found = bill(root, dist)
    except (ValueError, importlib.metadata.PackageNotFoundError) as error:
        return [str(error)]
    (dist / f"kvops-{version_of(root)}.cdx.json").write_text(json.dumps(found, indent=2) + "\n")
    return []


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist", type=Path, default=root / "dist", help="folder for what is built (default: dist)")
    parser.add_argument("--no-build", action="store_true", help="check what is there; the release stays blocked")
    a = parser.parse_args(argv)
    a.dist.mkdir(exist_ok=True)
    blocking = 0

    def report(name: str, problems: list[str]) -> None:
        nonlocal blocking
        blocking += len(problems)
        print("\n".join([f"blocks  {name}: {x}" for x in problems] or [f"passed  {name}"]), flush=True)

    tree: dict[str, Callable[[Path], list[str]]] = {
        "clean work tree": work_tree,
        "tag": tag,
        "version": version,
        "changelog": changelog,
        "README on the index": readme,
    }
    built: dict[str, Callable[[Path, Path], list[str]]] = {
        "distributions": distributions,
        "twine": twine,
        "bill of materials": bill_of_materials,
    }
    for name, check in tree.items():
        report(name, check(root))
    if a.no_build:
        report("build from a clean clone", ["not done, because of --no-build"])
    elif blocking:
        report("build from a clean clone", ["not done, because of what is above"])
    else:
        report("build from a clean clone", build(root, a.dist))
    if a.no_build or not blocking:
        for name, of_dist in built.items():
            report(name, of_dist(root, a.dist))
    release = version_of(root)
    if blocking:
        print(f"\nkvops {release} cannot be released: {blocking} problem{'s' * (blocking > 1)}")
        return 1
    print(f"\nkvops {release} can be released: {', '.join(x.name for x in uploads(root, a.dist))}")
    return 0


if __name__ == "__main__":
    sys.path[:] = [x for x in sys.path if x != str(ROOT / "tools")]  # where wheel.py hides the package wheel
    sys.exit(main())
