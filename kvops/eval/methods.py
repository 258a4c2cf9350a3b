"""The methods by name, each brought to a budget: tokens that every KV head keeps when the cache is cut.

Policies say in `Policy.at_budget` which of their settings keep a budget of a prompt. A budget that a method cannot be
brought to is an `Unreachable` that says why.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ..methods import Full, Policy
from ..methods.table import METHODS as METHODS
from ..methods.table import Entry, find

MOST = 2**20  # tokens, more than any budget
MOST_SAID = 2**31 - 1
#: What the command line's words can be.
KINDS = {int: "an int", float: "a float", str: "a str", bool: "a bool", type(None): "None"}


class Unreachable(ValueError):
    """A budget that a method cannot be brought to, or a model that it cannot serve."""


def options_of(policy: type[Policy]) -> dict[str, tuple[type, ...]]:
    """The settings of a policy that the command line can name: those that are numbers, words, booleans or None.

    Args:
        policy: a class.

    Returns:
        By name: the types that the setting may have. The budget is left out.
    """
    hints = get_type_hints(policy)
    kinds = {name: get_args(hints[name]) or (hints[name],) for name in inspect.signature(policy).parameters}
    return {name: kind for name, kind in kinds.items() if name != "budget" and set(kind) <= KINDS.keys()}


def check_option(label: str, key: str, value: object, kinds: tuple[type, ...]) -> None:
    """Checks the value of an option, which the command line takes from any Python literal.

    Args:
        label: of the method, for the error.
        key: name of the option.
        value: of the option.
        kinds: the types that it may have; an int serves as a float.

    Raises:
        ValueError: another type, or a number beyond 2^31 - 1.
    """
    fits = isinstance(value, kinds) or (float in kinds and isinstance(value, int))
    if bool not in kinds and isinstance(value, bool):
        fits = False
    if not fits:
        names = " or ".join(KINDS[x] for x in kinds)
        raise ValueError(f"{label}: {key} must be {names}, got {type(value).__name__} {value!r}")
    if isinstance(value, (int, float)) and not abs(value) <= MOST_SAID:
        raise ValueError(f"{label}: {key} must be at most {MOST_SAID}, got {value!r}")


@dataclass(frozen=True)
class Rule:
    """A method by name, with the options that the command line gave.

    Attributes:
        label: in tables: "KeyDiff", "LagKV lag=128".
        entry: its line in the table of methods.
        options: settings of its policy, by name.
    """

    label: str
    entry: Entry
    options: dict[str, Any]

    @property
    def cuts(self) -> bool:
        """False: keeps everything, so it has no budget."""
        return self.entry.policy is not Full

    @property
    def source(self) -> Path | None:
        """The file of a policy that is not of kvops."""
        ours = {x.policy for x in METHODS.values()}
        return None if self.entry.policy in ours else Path(inspect.getfile(self.entry.policy))

    def policy(self, budget: int | None, n: int, num_layers: int, streaming: bool = False) -> Policy:
        """The policy that keeps a budget.

        Args:
            budget: tokens per KV head; None: the method's own settings, of a method without one.
            n: tokens of a prompt.
            num_layers: of the model.
            streaming: text comes in windows, without an end.

        Raises:
            Unreachable: the method cannot be brought to the budget.
        """
        options = {**self.entry.defaults, **self.options}
        try:
            settings = {}
            if budget is not None:
                settings = self.entry.policy.at_budget(budget, n, num_layers, streaming, options)
            return self.entry.policy(**{**settings, **options})
        except ValueError as error:
            raise Unreachable(str(error)) from error


def rule(spec: str) -> Rule:
    """The method that the command line names.

    Args:
        spec: "keydiff", "keydiff:recent=0.1,sinks=4", or "path/to/file.py:Class"; options are the policy's settings.

    Raises:
        ValueError: there is no such method, or it has no such setting or value.
    """
    entry, _, options = find(spec)
    if any(entry.label == x.label and entry.policy is not x.policy for x in METHODS.values()):
        raise ValueError(
            f"method {spec!r}: in tables {entry.label} is a method of kvops, so expected a class of another name"
        )
    known = options_of(entry.policy)
    for key, value in options.items():
        if key not in known:
            raise ValueError(
                f"method {spec!r}: {entry.label} has no option {key!r}, expected some of {', '.join(known)}"
            )
        try:
            check_option(entry.label, key, value, known[key])
        except ValueError as error:
            raise ValueError(f"method {spec!r}: {error}") from None
    label = entry.label + "".join(f" {key}={value}" for key, value in options.items())
    made = Rule(label, entry, options)
    try:  # what is wrong at the largest budget is wrong at any
        made.policy(MOST if made.cuts else None, 2 * MOST, 32)
    except (TypeError, ValueError) as error:
        raise ValueError(f"method {spec!r}: {error}") from None
    return made
