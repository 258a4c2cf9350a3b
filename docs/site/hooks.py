"""What MkDocs needs to show these pages as GitHub does.

The pages are written for GitHub: they link to each other by relative path, and to files outside docs/. On the site

- some files outside docs/ are pages too (`PAGES`), and recorded results are files of the site (`FILES`);
- a link to any other file of the repository leads to the repository's URL;
- `kvops.KeyDiff`, and any other public name in backticks, links to the API reference;
- Markdown that GitHub reads and Python-Markdown does not (escaped pipes in code, blocks in lists that are indented by
  three spaces) is adapted.
"""

from __future__ import annotations

import functools
import os
import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Pages of the site that lie outside docs/: their place on the site, and in the repository.
PAGES = {
    "overview.md": "README.md",
    "examples.md": "examples/README.md",
    "measurements.md": "bench/README.md",
    "demo_model.md": "bench/models/passkey-llama/README.md",
    "demo_text.md": "bench/data/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
NOT_IN_NAV = ("demo_model.md", "demo_text.md")
FILES = ("bench/results/*.json", "bench/results/*.jsonl", "bench/results/*.png")

_FENCE = re.compile(r"^( *)```.*\n(?:.*\n)*?\1```$", re.MULTILINE)
_LINK = re.compile(r"(?<=\])\((?!https?:|mailto:|#)([^()\s#]+)(#[^()\s]*)?\)")
_CODE = re.compile(r"`[^`\n]+`")
_NAME = re.compile(r"(\[[^\]]*\]\(|^#.*$)|`([\w.]+)`", re.MULTILINE)  # links and headings stay as they are
_LISTED = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)


def on_files(files, config):
    """Add the pages and files that lie outside docs/."""
    from mkdocs.structure.files import File, InclusionLevel

    for uri, path in PAGES.items():
        level = InclusionLevel.NOT_IN_NAV if uri in NOT_IN_NAV else InclusionLevel.UNDEFINED
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path), inclusion=level))
    for path in (x for pattern in FILES for x in sorted(ROOT.glob(pattern))):
        uri = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Adapt a page's links and its Markdown, and let the search prefer the reference."""
    if page.file.src_uri.startswith("api/"):
        page.meta["search"] = {"boost": 4}
    return adapted(markdown, page.file.src_uri, config.repo_url)


def adapted(markdown: str, uri: str, repo_url: str) -> str:
    """The Markdown of the site's page at `uri`."""
    markdown = re.sub(r"^ {3}(?=\S)", "    ", markdown, flags=re.MULTILINE)
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_prose(markdown[end : fence.start()], uri, repo_url), fence.group()]
        end = fence.end()
    return "".join([*parts, _prose(markdown[end:], uri, repo_url)])


def _prose(text: str, uri: str, repo_url: str) -> str:
    text = _NAME.sub(_linked, text)
    text = _CODE.sub(lambda code: code.group().replace("\\|", "|"), text)
    return _LINK.sub(lambda link: f"({target(link.group(1), uri, repo_url)}{link.group(2) or ''})", text)


def _linked(found: re.Match[str]) -> str:
    rest, name = found.groups()
    path = names().get(name)
    return rest or (f"[`{name}`][{path}]" if path else found.group())


@functools.cache
def names() -> dict[str, str]:
    """Names that link to an entry of the reference: all in full, operators and classes alone too."""
    pages = sorted((ROOT / "docs/api").glob("*.md"))
    listed = [x for page in pages for x in _LISTED.findall(page.read_text())]
    alone = [x for x in listed if x.startswith("kvops.ops.") or x.rpartition(".")[2][0].isupper()]
    return {x.rpartition(".")[2]: x for x in alone} | {x: x for x in listed}


def target(link: str, uri: str, repo_url: str) -> str:
    """Where a page's relative link leads on the site.

    Args:
        link: as written, relative to the page's file in the repository.
        uri: the page's place on the site.
        repo_url: of the repository, for what the site does not have.
    """
    source = PAGES.get(uri, f"docs/{uri}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    pages = {there: here for here, there in PAGES.items()}
    if path in pages or path.startswith("docs/") or any(Path(path).match(x) for x in FILES):
        return posixpath.relpath(pages.get(path, path.removeprefix("docs/")), posixpath.dirname(uri) or os.curdir)
    return f"{repo_url}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}"
