"""What the command line says of a task: "name" or "name:option=value,option=value"."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..bench.record import Refused as Refused
from ..specs import parse_options


def parse(kind: str, spec: str, names: Collection[str]) -> tuple[str, dict[str, Any]]:
    """Takes "name:option=value,option=value" apart.

    Args:
        kind: "method" or "task", for errors.
        spec: what was said.
        names: those there are.

    Returns:
        The name and its options.

    Raises:
        ValueError: another name, or options that cannot be read.
    """
    name, _, rest = spec.partition(":")
    if name not in names:
        raise ValueError(f"{kind} must be one of {', '.join(names)}, got {name!r}")
    return name, parse_options(kind, spec, name, rest)
