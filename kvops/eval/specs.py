"""What the command line says of a method or a task: "name" or "name:option=value,option=value"."""

from __future__ import annotations

import ast
from collections.abc import Collection


class Refused(ValueError):
    """What was asked for cannot be done; the message is for who asked."""


def parse(kind: str, spec: str, names: Collection[str]) -> tuple[str, dict]:
    """The name and its options; values are Python literals, or else strings."""
    name, _, rest = spec.partition(":")
    if name not in names:
        raise ValueError(f"{kind} must be one of {', '.join(names)}, got {name!r}")
    options = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not (equals and key.isidentifier()):
            raise ValueError(f"{kind} {spec!r}: expected {name}:option=value,option=value, got {item!r}")
        if key in options:
            raise ValueError(f"{kind} {spec!r}: {key} is given twice")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: nested too deeply
            options[key] = value
    return name, options
