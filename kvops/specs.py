"""Methods and tasks as text: "name" or "name:option=value,option=value"."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable
from typing import Any


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error message: the known name that is most like this one; empty if none is."""
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def parse_options(kind: str, spec: str, name: str, text: str) -> dict[str, Any]:
    """Parses the options after a name. Values are Python literals; anything else is a string."""
    options: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not (equals and key.isidentifier()):
            raise ValueError(f"{kind} {spec!r}: expected {name}:option=value,option=value, got {item!r}")
        if key in options:
            raise ValueError(f"{kind} {spec!r}: expected each option once, got {key} twice")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: nested too deeply
            options[key] = value
    return options
