"""Methods by name, each at a budget: the number of tokens every KV head keeps when the cache is cut.

A policy says in `Policy.at_budget` which of its settings meet a budget for a given prompt. If none do, it raises
`Unreachable` with the reason.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ..cache.base import Storage
from ..cache.rounded import STORED
from ..methods import Policy
from ..methods.registry import Entry, find
from ..methods.table import METHODS as METHODS
from .identity import described, described_class, digest

#: The methods that are measured if none are named: those that need no setting of the user's.
DEFAULT = tuple(name for name, entry in METHODS.items() if not entry.required)
MOST = 2**20  # tokens, more than any budget
MOST_SAID = 2**31 - 1
MOST_LABEL = 200  # characters; see `bench.record.name`
#: The types of options that the command line accepts.
KINDS = {int: "an int", float: "a float", str: "a str", bool: "a bool", type(None): "None"}


class Unreachable(ValueError):
    """No settings of a method meet the budget, or the method does not support the model."""


def options_of(policy: type[Policy]) -> dict[str, tuple[type, ...]]:
    """Return the settings of a policy that the command line can set: numbers, strings, booleans and None.

    Args:
        policy: a subclass of `Policy`.

    Returns:
        The types that each setting accepts, by name, without the budget.
    """
    hints = get_type_hints(policy)
    kinds = {name: get_args(hints[name]) or (hints[name],) for name in inspect.signature(policy).parameters}
    kinds = {name: (str,) if isinstance(x[0], str) else x for name, x in kinds.items()}  # the values of a Literal
    settable = {name: tuple(x for x in kind if x in KINDS) for name, kind in kinds.items() if name != "budget"}
    return {name: kind for name, kind in settable.items() if {*kind} - {type(None)}}


def check_option(label: str, key: str, value: object, kinds: tuple[type, ...]) -> None:
    """Check the value of an option; the command line accepts any Python literal.

    Args:
        label: the method's label, for the error message.
        key: the option's name.
        value: the option's value.
        kinds: the accepted types. An int is accepted where a float is.

    Raises:
        ValueError: the type is not accepted, or the number exceeds 2^31 - 1.
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
    """A method with the options that the user has chosen.

    Attributes:
        label: the name in tables, such as "KeyDiff" or "LagKV lag=128". It has the options.
        entry: its entry in the table of methods.
        options: the policy's settings, by name, and "storage" if the caches round what they store.
    """

    label: str
    entry: Entry
    options: dict[str, Any] = field(compare=False)

    @property
    def budgeted(self) -> bool:
        """Whether budgets apply: not if the settings fix what is kept, as in Full, or LagKV's lag and ratio."""
        given = {**self.entry.defaults, **self.options}
        return not all(x in given for x in self.entry.policy.budget_settings)

    @property
    def storage(self) -> Storage:
        """How caches store keys and values; see `kvops.Cache`."""
        return self.options.get("storage", "pre_rope")

    @property
    def source(self) -> Path | None:
        """The file that defines a policy from outside kvops; None for kvops' own, and for those of a notebook."""
        policy = self.entry.policy
        if policy.__module__ == "__main__" or policy in {x.policy for x in METHODS.values()}:
            return None
        module = sys.modules.get(policy.__module__)
        return Path(module.__file__) if module and module.__file__ else None

    @property
    def code(self) -> dict[str, str]:
        """For the record: names and fingerprints of a policy from outside kvops, and of files that are settings."""
        policy, label = self.entry.policy, self.entry.label
        files = {
            f"method {label} {name}={value}": described(value)
            for name, value in self.options.items()
            if isinstance(value, str) and Path(value).is_file()
        }
        if policy in {x.policy for x in METHODS.values()}:
            return files
        return {f"method {label}": described(self.source) if self.source else described_class(policy), **files}

    def policy(self, budget: int | None, n: int, num_layers: int, streaming: bool = False) -> Policy:
        """Return the policy that meets a budget.

        Args:
            budget: tokens per KV head; None if budgets do not apply.
            n: tokens in the prompt.
            num_layers: layers of the model.
            streaming: whether the text arrives in windows, as an endless stream.

        Raises:
            Unreachable: no settings of the method meet the budget.
        """
        options = {name: x for name, x in {**self.entry.defaults, **self.options}.items() if name != "storage"}
        try:
            settings = {}
            if budget is not None:
                settings = self.entry.policy.at_budget(budget, n, num_layers, streaming, options)
            return self.entry.policy(**{**settings, **options})
        except ValueError as error:
            raise Unreachable(str(error)) from error


def check_label(said: str, entry: Entry) -> None:
    if any(entry.label == x.label and entry.policy is not x.policy for x in METHODS.values()):
        raise ValueError(f"method {said}: {entry.label} is the name of a kvops method in tables; rename the class")


def rule(spec: str) -> Rule:
    """Return the method that a command-line argument names.

    Args:
        spec: "keydiff", "keydiff:recent=0.1,sinks=4", or "path/to/file.py:Class". Options are the policy's settings,
            and storage=int8 or storage=fp8, with which the caches round keys and values.
            The case of the names in `METHODS` does not matter.

    Raises:
        ValueError: the method, one of the settings or one of the values does not exist.
    """
    entry, _, options = find(spec, allow_code=True)  # a command line is as trusted as code
    check_label(repr(spec), entry)
    known = options_of(entry.policy)
    for key, value in options.items():
        if key == "storage":
            if value not in STORED:
                raise ValueError(f"method {spec!r}: storage must be one of {', '.join(STORED)}, got {value!r}")
            continue
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
    try:  # settings that fail at the largest budget fail at any
        made.policy(MOST if made.budgeted else None, 2 * MOST, 32)
    except (TypeError, ValueError) as error:
        raise ValueError(f"method {spec!r}: {error}") from None
    return made


def rule_of(method: str | Policy | type[Policy]) -> Rule:
    """Return the method of a name, a class, or a policy, which is measured as it is, whatever the budgets.

    Args:
        method: a name as in `rule`, a subclass of `Policy`, or a policy.

    Raises:
        ValueError: the name cannot be parsed, or the class has the name of another one in tables.
        TypeError: it is none of these.
    """
    if isinstance(method, str):
        return rule(method)
    cls = method if isinstance(method, type) else type(method)
    if not issubclass(cls, Policy):
        raise TypeError(f"method must be a name, a kvops policy or a subclass of kvops.Policy, got {method!r:.80}")
    plain = (x for x in METHODS.values() if x.policy is cls and not x.defaults)
    entry = next(plain, Entry(cls.__name__, cls, "others", ""))
    check_label(f"{method!r:.80}", entry)
    chosen = {} if isinstance(method, type) else settings_of(method)
    label = entry.label + "".join(f" {key}={said(value)}" for key, value in chosen.items())
    return Rule(label[:MOST_LABEL], entry, chosen)


def settings_of(policy: Any) -> dict[str, Any]:
    """Return the settings of a policy that differ from their defaults, and those that a budget would decide."""
    return {
        x.name: value
        for x, value in ((x, getattr(policy, x.name)) for x in fields(policy) if x.init)
        if x.name in policy.budget_settings or not (type(value) in KINDS and value == x.default)
    }


def said(value: object) -> str:
    """A setting in a label: numbers and words as they are, else a fingerprint."""
    return str(value) if type(value) in KINDS else digest(value)
