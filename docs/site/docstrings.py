"""A griffe extension: what the API reference needs beside the docstrings of kvops."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

_SECTION = re.compile(r"^(Args|Attributes):\n((?:[ ]+.*\n?|\n)*)", re.MULTILINE)
_ITEM = re.compile(r"^( +)([\w*]+(?:, [\w*]+)+): (.*\n?(?:\1 +.*\n?|\n)*)", re.MULTILINE)
_NAME = re.compile(r"(?<!\[)`(kvops[\w.]+)`")
_IN_PLACE = re.compile(r"in_place\((\w+)\)")

_PAGES = (Path(__file__).parents[1] / "api").glob("*.md")
LISTED = {x for page in _PAGES for x in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)}


class Docstrings(griffe.Extension):
    """Give `a, b: ...` an entry each, and the in-place forms of functions the signatures of their twins."""

    def on_object(self, *, obj: griffe.Object, **options: Any) -> None:
        if obj.docstring is not None:
            text = ungrouped(obj.docstring.value)
            obj.docstring.value = _NAME.sub(
                lambda x: f"[{x.group()}][{x.group(1)}]" if x.group(1) in LISTED else x.group(), text
            )

    def on_module_members(self, *, mod: griffe.Module, **options: Any) -> None:
        for name, attribute in list(mod.attributes.items()):
            if twin := _IN_PLACE.fullmatch(str(attribute.value)):
                mod.set_member(name, in_place(mod[twin.group(1)], name))


def ungrouped(docstring: str) -> str:
    """The docstring with one entry for each name: `a, b: text` is `a: text` and `b: text`."""

    def entries(item: re.Match[str]) -> str:
        indent, names, text = item.groups()
        return "".join(f"{indent}{name}: {text.rstrip()}\n" for name in names.split(", "))

    docstring = re.sub(
        r"^(Args|Attributes): (?=\S)", r"**\1**: ", docstring, flags=re.MULTILINE
    )  # one sentence for all
    return _SECTION.sub(lambda section: _ITEM.sub(entries, section.group()), docstring)


def in_place(function: griffe.Function, name: str) -> griffe.Function:
    """The twin of a compress function that works in place."""
    text = f"[`kvops.{function.name}`][] in place: the kept entries move to the front of `k` and `v`."
    return griffe.Function(
        name,
        parameters=griffe.Parameters(*(x for x in function.parameters if x.name != "out")),
        returns=function.returns,
        lineno=function.lineno,
        endlineno=function.endlineno,
        parent=function.parent,
        docstring=griffe.Docstring(text, parent=function.parent),
    )
