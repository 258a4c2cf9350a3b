"""The functions of kvops/include/kvops.h, which tools/tables.py writes: a typed one for each operator."""

from __future__ import annotations

import re
import textwrap
from typing import NamedTuple

from kvops import ops

TYPES = {"Tensor": "Tensor", "int": "int64_t", "float": "double", "bool": "bool"}
ENUMERATIONS = {"reduce": ("Reduce", [*ops.REDUCTIONS]), "score": ("Score", [*ops.SCORES])}
WIDTH = 120
fill = textwrap.TextWrapper(WIDTH, "// ", "// ", break_long_words=False, break_on_hyphens=False).fill


class Argument(NamedTuple):
    """An argument of a schema, in C++. value: its default; None: it has to be given."""

    type: str
    name: str
    value: str | None

    @property
    def parameter(self) -> str:
        by_value = self.type in ("int64_t", "double", "bool") or self.type in (x for x, _ in ENUMERATIONS.values())
        return f"{self.type} {self.name}" if by_value else f"const {self.type}& {self.name}"


def cpp_type(schema: str) -> str:
    """Return the C++ type for a schema's: Tensor(a!)[], int?, ..."""
    plain = re.sub(r"\(\w!\)", "", schema)
    if plain.endswith("?"):
        return f"std::optional<{cpp_type(plain[:-1])}>"
    if plain.endswith("[]"):
        return f"std::vector<{cpp_type(plain[:-2])}>"
    return TYPES[plain]


def argument(text: str) -> Argument:
    """Return the argument that `int lag` or `float v_weight=1.0` declares."""
    type_and_name, given, value = text.partition("=")
    schema, name = type_and_name.rsplit(" ", 1)
    kind = cpp_type(schema)
    if not given:
        return Argument(kind, name, None)
    if kind == "int64_t" and name.split("_")[-1] in ENUMERATIONS:
        kind, names = ENUMERATIONS[name.split("_")[-1]]
        return Argument(kind, name, f"{kind}::{names[int(value)]}")
    return Argument(kind, name, {"None": "{}", "True": "true", "False": "false"}.get(value, value))


def broken(before: str, parts: list[str], after: str) -> str:
    """Return the parts, separated by commas, in lines that continue below the first part."""
    lines = [before]
    for i, part in enumerate(parts):
        text = part + (after if i + 1 == len(parts) else ",")
        if len(lines[-1]) + 1 + len(text) > WIDTH:
            lines.append(" " * len(before) + text)
        else:
            lines[-1] += " " * (i > 0) + text
    return "\n".join(lines) if parts else before + after


def function(schema: str, abouts: dict[str, str], options_of: dict[str, list[Argument]]) -> str:
    """Return the function of a schema such as `lag_score(Tensor k, int lag=1) -> Tensor`, after its options unless an
    earlier overload has the same. abouts: a sentence on each operator. options_of: the options so far, by name."""
    match = re.fullmatch(r"(\w+)(?:\.(\w+))?\((.*)\) -> (.*)", schema)
    assert match, schema
    op, overload, arguments, returned = match.groups()
    every = [argument(x) for x in arguments.split(", ") if x != "*"]
    optional = [x for x in every if x.value is not None]
    results = [cpp_type(x) for x in returned.strip("()").split(", ") if x]
    returns = {0: "void", 1: results[0] if results else ""}.get(len(results), f"std::tuple<{', '.join(results)}>")
    lines = []
    options = "".join(x.title() for x in op.strip("_").split("_")) + "Options"
    if optional and options not in options_of:
        fields = [f"  {x.type} {x.name}{x.value if x.value == '{}' else f' = {x.value}'};" for x in optional]
        lines += [f"struct {options} {{", *fields, "};", ""]
        options_of[options] = optional
    assert not optional or options_of[options] == optional, f"{schema}: other options than {op}'s"
    if not overload:
        lines.append(fill(f"{abouts[op]}."))
    parameters = [x.parameter for x in every if x.value is None] + [f"const {options}& options = {{}}"] * bool(optional)
    name = op + (f"_{overload}" if overload else "")
    lines.append(broken(f"inline {returns} {name}(", parameters, ") {"))
    values = [x.name if x.value is None else f"options.{x.name}" for x in every]
    call = f"  return detail::call<{', '.join(results)}>("
    lines += [broken(call, [f'"kvops::{op}"', f'"{overload or ""}"', *values], ");"), "}"]
    return "\n".join(lines)


def functions(schemas: list[str], abouts: dict[str, str]) -> str:
    """Return the functions of all schemas."""
    options: dict[str, list[Argument]] = {}
    return "\n\n".join(function(x, abouts, options) for x in schemas)
