"""The policies as functions: `kvops.keydiff_compress(k, v, budget)` is `kvops.KeyDiff(budget).compress(k, v)`.

Each policy of `METHODS` that has settings has a function, and a twin such as `keydiff_compress_` for `compress_`. They
are generated: the arguments of the policy's `compress`, its settings in their order, and the docstrings of both.
functions.pyi, for type checkers, editors and the docs, is the same text without the calls; `make tables` writes it.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import re
import sys
import textwrap
from collections import defaultdict
from dataclasses import MISSING, fields
from inspect import Parameter
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from .base import Policy
from .table import METHODS

#: The classes that docstrings name in "See `Class`".
BASES = {base.__name__: base for x in METHODS.values() for base in x.policy.__mro__}
#: The policies by the names of their functions.
POLICIES = {f"{x.policy.__name__.lower()}_compress": x.policy for x in METHODS.values() if x.policy.budget_settings}
#: The policies that functions make: their errors name the function.
CLASSES = {
    name + end: type(name + end, (x,), {"__qualname__": x.__qualname__, "of_function": True})
    for name, x in POLICIES.items()
    for end in ("", "_")
}
PLAIN = frozenset((int, float, str, bool, type(None)))


def policy_of(function: str, **settings: Any) -> Any:
    """The policy of a call. The last ones are remembered, so the settings of many calls are checked once."""
    cls = CLASSES[function]
    if torch.compiler.is_compiling():
        return cls(**settings)
    values = tuple(settings.values())
    types = tuple(map(type, values))
    if tuple in types:
        types = tuple(y for x in values for y in (map(type, x) if type(x) is tuple else (type(x),)))
    if PLAIN.issuperset(types):
        return _remembered(cls, types, values)
    return cls(**settings)  # of tensors or the user's objects, which may change


@functools.lru_cache(1024)
def _remembered(cls: type[Policy], types: object, values: tuple[Any, ...]) -> Policy:
    """values: in the order of the settings; types: theirs, since 1, 1.0 and True are equal."""
    return cls(**{x.name: value for x, value in zip(fields(cls), values)})


def rows(window: int | None, q_window: Any, least: int, call: dict[str, Any]) -> int:
    """The window: if not given the rows of q_window, or `least` without such a tensor, which `compress` may refuse."""
    if window is not None:
        return window
    dim = 1 if call.get("layout") == "bnhd" else 2
    return max(1, q_window.shape[dim]) if isinstance(q_window, torch.Tensor) and q_window.dim() == 4 else least


def module_text(calls: bool) -> str:
    """All functions, with the calls that they make or, for functions.pyi, without."""
    names, imports = [name + end for name in sorted(POLICIES) for end in ("", "_")], defaultdict(set)
    texts = [function_text(name, calls, imports) for name in names]
    groups: dict[int, list[str]] = {0: [], 1: [], 2: []}  # as linters sort them
    for module in sorted(imports):
        group = 2 if module.startswith("kvops") else int(module.partition(".")[0] not in sys.stdlib_module_names)
        groups[group].append(f"from {module} import {', '.join(sorted(imports[module]))}")
    public = "\n".join(("__all__ = [", *(f'    "{name}",' for name in names), "]"))
    head = "# Written by `make tables` from the policies."
    return "\n\n".join((head, *map("\n".join, groups.values()), public, *texts)) + "\n"


def function_text(name: str, calls: bool, imports: dict[str, set[str]]) -> str:
    """One function; adds the names that its annotations need to `imports`."""
    cls, twin = POLICIES[name.rstrip("_")], name.endswith("_")
    compress = inspect.unwrap(cls.compress)
    hints, doc = get_type_hints(compress) | get_type_hints(cls), inspect.getdoc(compress) or ""
    texts = setting_texts(cls) | entries(doc, "Args")
    call = [x for x in list(inspect.signature(compress).parameters.values())[1:] if not (twin and x.name == "out")]
    settings, made = [], []
    for x in fields(cls):
        shown, value, default = cls.function_names.get(x.name, x.name), "", x.default
        hints[shown], texts[shown] = hints[x.name], texts[x.name]
        if x.name == "window" and "q_window" in hints:
            hints["window"], default = hints["window"] | None, None
            value = f"rows(window, q_window, {cls.least_window}, call)"
            texts["window"] = "How many of the last queries observe; their tokens are kept. None: the rows of q_window."
        kind = Parameter.KEYWORD_ONLY if x.kw_only else Parameter.POSITIONAL_OR_KEYWORD
        settings.append(Parameter(shown, kind, default=Parameter.empty if default is MISSING else default))
        made.append(f"{x.name}={value or shown}")
    lines, before, names = [f"def {name}("], Parameter.POSITIONAL_OR_KEYWORD, []
    for x in sorted((*call, *settings), key=lambda x: x.kind):
        if before == Parameter.POSITIONAL_OR_KEYWORD != x.kind:
            lines.append("    *,")
        names.append("**" * (x.kind == Parameter.VAR_KEYWORD) + x.name)
        default = "" if x.default is Parameter.empty else f" = {literal(x.default)}"
        lines.append(f"    {names[-1]}: {annotation(hints[x.name], imports)}{default},")
        before = x.kind
    text = docstring(cls, name, {x: texts[x] for x in names}, doc)
    lines += [f") -> {annotation(hints['return'], imports)}:", textwrap.indent(f'"""{text}\n"""', "    ")]
    if calls:
        given = [f"{x.name}={x.name}" if x.kind == Parameter.KEYWORD_ONLY else str(x).partition(":")[0] for x in call]
        method = "compress_" if twin else "compress"
        lines.append(f'    return policy_of("{name}", {", ".join(made)}).{method}({", ".join(given)})')
    return "\n".join(lines)


def literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def annotation(hint: Any, imports: dict[str, set[str]]) -> str:
    """A type as it is written; adds the names that this needs to `imports`."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is type(None) or hint is ...:
        return "None" if hint is not ... else "..."
    if origin in (Union, UnionType):
        return " | ".join(annotation(x, imports) for x in args)
    kind = origin or hint
    if kind.__module__ != "builtins":  # Python 3.10 has no typing.Unpack
        imports["typing_extensions" if kind.__name__ == "Unpack" else kind.__module__].add(kind.__name__)
    inner = [literal(x) if origin is Literal else annotation(x, imports) for x in args]
    return f"{kind.__name__}[{', '.join(inner)}]" if args else kind.__name__


def docstring(cls: type[Policy], name: str, texts: dict[str, str], doc: str) -> str:
    """What a function says: what the policy says, but for its caches, and the arguments."""
    if name.endswith("_"):
        plain = name.rstrip("_")
        return (
            f"`{plain}` in place: moves the kept slots to the front of k and v, and returns views of them.\n\n"
            f"Takes the arguments of `{plain}` except `out`."
        )
    about, _, more = (inspect.getdoc(cls) or "").partition("\nAttributes:\n")
    of_caches = re.compile(r"^(?:In a cache|In decode|A cache)\b(?:.+\n?)+\n*", re.MULTILINE)  # paragraphs
    summary, _, rest = of_caches.sub("", about).strip().partition("\n\n")
    for old, new in cls.function_names.items():
        rest = re.sub(rf'(?<!")\b{old}\b(?!")', new, rest)
    wrapped = functools.partial(textwrap.fill, width=116, break_long_words=False, break_on_hyphens=False)
    equal = f"`kvops.{cls.__name__}` with these settings in one call of `compress`, which ignores settings of caches."
    items = [wrapped(f"{x}: {text}", initial_indent="    ", subsequent_indent="        ") for x, text in texts.items()]
    ends = re.findall(r"^(?:Returns|Raises):\n(?:    .*\n?)+", doc, re.MULTILINE)
    args = "\n".join(("Args:", *items))
    source = [x for x in more.split("\n\n") if x.startswith("Source")]
    return "\n\n".join(filter(None, (summary, equal, rest, args, *map(str.rstrip, ends), *source)))


def entries(doc: str, section: str) -> dict[str, str]:
    """The entries of a section of a docstring."""
    found = re.search(rf"^{section}:\n((?:    .*\n?)+)", doc, re.MULTILINE)
    items = re.findall(r"^    (\**\w+): (.*\n?(?:     .*\n?)*)", found[1] if found else "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in items}


@functools.cache
def setting_texts(cls: type) -> defaultdict[str, str]:
    """What the docstrings of a policy and its bases say of each setting, with "See `Class`" replaced by that text."""
    texts: defaultdict[str, str] = defaultdict(str)  # no docstrings with python -OO
    for base in reversed(cls.__bases__):
        texts |= setting_texts(base)
    for name, text in entries(inspect.cleandoc(cls.__doc__ or ""), "Attributes").items():
        see = re.match(r"See `(\w+)`", text)
        if see and see[1] in BASES:
            text = setting_texts(BASES[see[1]])[name].rstrip(".") + text[see.end() :]
        texts[name] = text
    return texts


_FILE = "<kvops.methods.functions>"
_TEXT = "from __future__ import annotations\n\n" + module_text(calls=True)
linecache.cache[_FILE] = (len(_TEXT), None, _TEXT.splitlines(keepends=True), _FILE)  # for tracebacks
exec(compile(_TEXT, _FILE, "exec"), globals())
