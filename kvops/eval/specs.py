"""How the command line names a task or method: "name" or "name:option=value,option=value"."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..bench.record import Refused as Refused
from ..specs import did_you_mean, parse_options


def canonical(spec: str, names: Collection[str]) -> str:
    """The spec with its name in lower case, if that is one of `names`; anything else (a file, a class) as it is."""
    name, colon, rest = spec.partition(":")
    return f"{name.lower()}{colon}{rest}" if name.lower() in names else spec


def parse(kind: str, spec: str, names: Collection[str]) -> tuple[str, dict[str, Any]]:
    """Split "name:option=value,option=value" into the name and its options.

    Args:
        kind: "method" or "task", for error messages.
        spec: the text from the command line. The case of the name does not matter.
        names: the known names.

    Returns:
        The name in lower case, and the options.

    Raises:
        ValueError: the name is unknown, or the options cannot be parsed.
    """
    name, _, rest = canonical(spec, names).partition(":")
    if name not in names:
        raise ValueError(f"{kind} must be one of {', '.join(names)}, got {name!r}{did_you_mean(name, names)}")
    return name, parse_options(kind, spec, name, rest)
