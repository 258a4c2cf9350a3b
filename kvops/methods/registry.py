"""Methods by name: `kvops.policy("keydiff", budget=1024)` makes a policy.

Names are accepted in any case. `methods.table` fills `METHODS`. Third-party policies are named by an entry point that a
package installs in the group "kvops.methods". Where the caller allows it, a name may also be `path/to/file.py:Class` or
`module:Class`, which runs the code of that file or module.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

from ..specs import did_you_mean, parse_options
from .base import Policy, check_policy

ENTRY_POINTS = "kvops.methods"


class Entry(NamedTuple):
    """A row of the table of methods.

    Attributes:
        label: The name in tables and plots.
        policy: The class of the policy.
        family: One of `table.FAMILIES`.
        source: The paper; empty if there is none.
        defaults: Settings that make the policy this variant.
        required: Settings that have no default that works.
    """

    label: str
    policy: type[Policy]
    family: str
    source: str
    defaults: Mapping[str, Any] = MappingProxyType({})
    required: tuple[str, ...] = ()


#: The methods by name.
METHODS: dict[str, Entry] = {}


def table_name(name: str) -> str | None:
    """The key in `METHODS` of a name or label in any case ("KeyDiff", "LAQ++", "LagKV L2"); None if it has none."""
    key = name.strip().lower().replace(" ", "-").replace("_", "-")
    return key if key in METHODS else None


def find(spec: str, allow_code: bool = False) -> tuple[Entry, str, dict[str, Any]]:
    """Find a method by name, in any case: in the table, in installed packages, or as a class in a file or module.

    Args:
        spec: The name, with options after a colon: "keydiff:recent=0.1,sinks=4".
        allow_code: Whether the name may be that of a file or module, whose code then runs.

    Returns:
        The entry, the method's own name, and the options.

    Raises:
        TypeError: `spec` is not a string.
        ValueError: There is no such method, or it is a file or module, which is not allowed.
    """
    if not isinstance(spec, str):
        raise TypeError(f"method must be a string, got {type(spec).__name__} {spec!r}")
    installed = importlib.metadata.entry_points(group=ENTRY_POINTS)
    name, _, rest = spec.partition(":")
    if (known := table_name(name)) is not None:
        return METHODS[known], known, parse_options("method", spec, name, rest)
    if name not in installed.names:
        origin, (cls, _, rest) = name, rest.partition(":")
        if not cls or "=" in cls:  # settings of an unknown method
            names = [*METHODS, *sorted(installed.names)]
            code = ", path/to/file.py:Class, or module:Class" if allow_code else ""
            raise ValueError(
                f"method must be one of {', '.join(names)}{code}, got {spec!r}{did_you_mean(name.lower(), names)}"
            )
        if not allow_code:
            raise ValueError(
                f"method {spec!r} names a file or module, whose code would run; import the class and pass a policy, "
                "install it as an entry point, or call kvops.policy(..., allow_code=True) for a string that you trust"
            )
        name = f"{origin}:{cls}"
    options = parse_options("method", spec, name, rest)  # before foreign code runs
    found = installed[name].load() if name in installed.names else _class(origin, cls)
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ValueError(f"method {name!r}: expected a subclass of kvops.Policy, got {found!r}")
    return Entry(found.__name__, found, "others", ""), name, options


def policy(spec: str, *, allow_code: bool = False, **settings: Any) -> Policy:
    """Make the policy of a method by name.

    `kvops.policy("keydiff", budget=1024)` and `kvops.policy("KeyDiff:budget=1024")` are both `kvops.KeyDiff(1024)`.

    Args:
        spec: A name as in `METHODS`, in any case, or an entry point that a package installs in the group
            "kvops.methods". Settings may follow after a colon.
        allow_code: Whether `spec` may also be path/to/file.py:Class or module:Class. The code of the file or module
            then runs, so pass True only for strings that you trust as much as code.
        **settings: Settings of the policy's class. They override those in `spec`.

    Returns:
        The policy.

    Raises:
        ValueError: There is no such method, it is a file or module and `allow_code` is False, or a setting has an
            invalid value.
        TypeError: The method has no such setting, a setting has the wrong type, or one without a default is missing.
    """
    entry, name, options = find(spec, allow_code)
    wanted = {**entry.defaults, **options, **settings}
    every = fields(entry.policy)  # type: ignore[arg-type]  # all policies are dataclasses
    known = [x.name for x in every]
    if unknown := [x for x in wanted if x not in known]:
        raise TypeError(
            f"method {name!r} has no setting {unknown[0]!r}, only {', '.join(known)}{did_you_mean(unknown[0], known)}"
        )
    needed = [x.name for x in every if x.init and x.default is MISSING and x.default_factory is MISSING]
    if missing := [x for x in needed if x not in wanted]:
        value = 1024 if missing[0] == "budget" else "..."
        raise TypeError(
            f"method {name!r} needs {' and '.join(missing)}, got {spec!r}; write for example "
            f"'{name}:{missing[0]}={value}'"
        )
    return entry.policy(**wanted)


def as_policy(who: str, given: Policy | str) -> Policy:
    """Returns the policy that a caller of `who` has passed: itself, or the one that a string names as for `policy`.

    Raises:
        TypeError: `given` is neither, or `policy` raises it.
        ValueError: `policy` raises it.
    """
    if isinstance(given, str):
        try:
            return policy(given)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{who}: {error}") from error
    check_policy(who, given)
    return given


def _class(origin: str, name: str) -> object:
    """Loads a class from a file or a module."""
    where = f"method '{origin}:{name}'"
    try:
        module = _load(origin) if origin.endswith(".py") else importlib.import_module(origin)
        return getattr(module, name)
    except Exception as error:  # third-party code may raise anything
        raise ValueError(
            f"{where}: expected a class in a file or module that can be imported, got {type(error).__name__}: {error}"
        ) from error


def _load(path: str) -> ModuleType:
    name = f"kvops_method_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module
