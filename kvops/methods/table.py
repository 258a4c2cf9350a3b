"""The methods by name: one table for evaluation, plots, docs, demo and tests.

`kvops.policy("keydiff", budget=1024)` makes a policy by name. Names are accepted in any case. Third-party policies are
named by an entry point that a package installs in the group "kvops.methods". Where the caller allows it, a name may
also be `path/to/file.py:Class` or `module:Class`, which runs the code of that file or module.
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
from .baselines import L2, Full, Random, StreamingLLM
from .criticalkv import CriticalKV
from .defensivekv import DefensiveKV
from .expected_attention import ExpectedAttention
from .h2o import H2O, TOVA
from .keydiff import KeyDiff
from .kvzip import KVzip
from .lacache import LaCache
from .lagkv import LagKV
from .laq import LAQ
from .protokv import SATKV, ProtoKV
from .rkv import RKV
from .snapkv import ChunkKV, PyramidKV, SnapKV
from .triattention import TriAttention
from .vase import VaSE

ENTRY_POINTS = "kvops.methods"
#: The families of methods: what a rule depends on.
FAMILIES = (
    "everything",
    "position or chance",
    "lag-relative",
    "lookahead",
    "keys alone",
    "prototypes",
    "window attention",
    "accumulated attention",
    "calibrated queries",
)


class Entry(NamedTuple):
    """A row of the table of methods.

    Attributes:
        label: The name in tables and plots.
        policy: The class of the policy.
        family: One of `FAMILIES`.
        source: The paper; empty if there is none.
        defaults: Settings that make the policy this variant.
    """

    label: str
    policy: type[Policy]
    family: str
    source: str
    defaults: Mapping[str, Any] = MappingProxyType({})


_LAGKV = "LagKV, Liang et al., 2025"
_LACACHE = "LaCache, Shi et al., 2025"
_LAQ = "Lookahead Q-Cache, Wang et al., 2025"
_KEYDIFF = "KeyDiff, Park et al., 2025"
_PROTOKV = "ProtoKV, Yu et al."

#: The methods by name.
METHODS: dict[str, Entry] = {
    "full": Entry("Full", Full, "everything", ""),
    "streamingllm": Entry("StreamingLLM", StreamingLLM, "position or chance", "StreamingLLM, Xiao et al., 2023"),
    "random": Entry("Random", Random, "position or chance", ""),
    "lagkv": Entry("LagKV", LagKV, "lag-relative", _LAGKV),
    "localkv": Entry("LocalKV", LagKV, "lag-relative", _LAGKV, {"reference": "self"}),
    "lagkv-l2": Entry("LagKV L2", LagKV, "lag-relative", _LAGKV, {"score": "l2"}),
    "lacache": Entry("LaCache", LaCache, "position or chance", _LACACHE),
    "lacache-official": Entry("LaCache official", LaCache, "position or chance", _LACACHE, {"pattern": "official"}),
    "laq": Entry("LAQ", LAQ, "lookahead", _LAQ),
    "laq++": Entry("LAQ++", LAQ, "lookahead", _LAQ, {"window": 8}),
    "kvzip": Entry("KVzip", KVzip, "lookahead", "KVzip, Kim et al., 2025"),
    "keydiff": Entry("KeyDiff", KeyDiff, "keys alone", _KEYDIFF),
    "keydiff-window": Entry("KeyDiff window", KeyDiff, "keys alone", _KEYDIFF, {"recent": 0.2}),
    "protokv": Entry("ProtoKV", ProtoKV, "prototypes", _PROTOKV),
    "satkv": Entry("SATKV", SATKV, "prototypes", _PROTOKV),
    "defensivekv": Entry("DefensiveKV", DefensiveKV, "window attention", "DefensiveKV, Feng et al., 2025"),
    "snapkv": Entry("SnapKV", SnapKV, "window attention", "SnapKV, Li et al., 2024"),
    "pyramidkv": Entry("PyramidKV", PyramidKV, "window attention", "PyramidKV, Cai et al., 2024"),
    "chunkkv": Entry("ChunkKV", ChunkKV, "window attention", "ChunkKV, Liu et al., 2025"),
    "criticalkv": Entry("CriticalKV", CriticalKV, "window attention", "CriticalKV, Feng et al., 2025"),
    "r-kv": Entry("R-KV", RKV, "window attention", "R-KV, Cai et al., 2025"),
    "vase": Entry("VaSE", VaSE, "window attention", "VaSE, Chang et al., 2026"),
    "h2o": Entry("H2O", H2O, "accumulated attention", "H2O, Zhang et al., 2023"),
    "tova": Entry("TOVA", TOVA, "accumulated attention", "TOVA, Oren et al., 2024"),
    "expected-attention": Entry(
        "Expected Attention",
        ExpectedAttention,
        "calibrated queries",
        "Expected Attention, Devoto et al., 2025",
    ),
    "triattention": Entry("TriAttention", TriAttention, "calibrated queries", "TriAttention, Mao et al., 2026"),
    "l2": Entry("L2", L2, "keys alone", "L2 norm, Devoto et al., 2024"),
}


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
        place, (cls, _, rest) = name, rest.partition(":")
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
        name = f"{place}:{cls}"
    options = parse_options("method", spec, name, rest)  # before foreign code runs
    found = installed[name].load() if name in installed.names else _class(place, cls)
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


def _class(place: str, name: str) -> object:
    """Loads a class from a file or a module."""
    where = f"method '{place}:{name}'"
    try:
        module = _load(place) if place.endswith(".py") else importlib.import_module(place)
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
