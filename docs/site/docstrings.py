"""A griffe extension: what the API reference needs beside the docstrings of kvops."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

_SECTION = re.compile(r"^(Args|Attributes):\n((?:[ ]+.*\n?|\n)*)", re.MULTILINE)
_SENTENCE = re.compile(r"^(Args|Attributes): (?=\S)", re.MULTILINE)  # for all of them, no section
_ITEM = re.compile(r"^( +)([\w*]+(?:, [\w*]+)+): (.*\n?(?:\1 +.*\n?|\n)*)", re.MULTILINE)
_NAME = re.compile(r"^( *)```.*\n(?:.*\n)*?\1```|(?<!\[)`([\w.]+)`", re.MULTILINE)  # fenced blocks stay as they are

_PAGES = (Path(__file__).parents[1] / "api").glob("*.md")
_LISTED = [x for page in _PAGES for x in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)]


def linkable(listed: list[str]) -> dict[str, str]:
    """Names in backticks that link to an entry of the reference: all in full, operators and classes alone too."""
    alone = [x for x in listed if x.startswith("kvops.ops.") or x.rpartition(".")[2][0].isupper()]
    return {x.rpartition(".")[2]: x for x in alone} | {x: x for x in listed}


NAMES = linkable(_LISTED)
_SCHEMAS = re.split(
    r"\n(?=\S)",
    re.search(r"```text\n(lag_score\(.*?)\n```", (Path(__file__).parents[1] / "operators.md").read_text(), re.S)[1],
)


class Docstrings(griffe.Extension):
    """Give `a, b: ...` an entry each, and find the generated functions."""

    def on_package(self, *, pkg: griffe.Module, **options: Any) -> None:
        """List the generated functions in `kvops`: griffe reads them in the stub, from which it imports no names."""
        for name, x in pkg["methods.functions"].functions.items():
            if not x.runtime:
                pkg.set_member(name, griffe.Alias(name, x))

    def on_object(self, *, obj: griffe.Object, **options: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _NAME.sub(_link, ungrouped(obj.docstring.value)) + schema(obj.path)


def _link(code: re.Match[str]) -> str:
    return f"[{code.group()}][{NAMES[code.group(2)]}]" if code.group(2) in NAMES else code.group()


def schema(path: str) -> str:
    """The schemas of an operator, as docs/operators.md shows them; nothing for other names."""
    shown = [x for x in _SCHEMAS if f"kvops.ops.api.{re.split('[.(]', x)[0]}" == path]
    return "\n\n```text\n" + "\n".join(f"torch.ops.kvops.{x}" for x in shown) + "\n```" if shown else ""


def ungrouped(docstring: str) -> str:
    """The docstring with one entry for each name: `a, b: text` is `a: text` and `b: text`."""

    def entries(item: re.Match[str]) -> str:
        indent, names, text = item.groups()
        return "".join(f"{indent}{name}: {text.rstrip()}\n" for name in names.split(", "))

    docstring = _SENTENCE.sub(r"**\1**: ", docstring)
    return _SECTION.sub(lambda section: _ITEM.sub(entries, section.group()), docstring)
