"""The C++ header kvops/include/kvops.h, which tools/tables.py writes: a typed function for each operator."""

from __future__ import annotations

import re
from typing import NamedTuple

HEAD = """\
// kvops' operators as C++ functions, over torch's stable ABI. C++20; torch >= 2.10.
//
//   torch::stable::Tensor kept = kvops::select_topk(scores, 1024, {.sinks = 4, .window = 64});
//
// Arguments with a default are fields of the operator's options, named in order. What an operator computes and expects:
// docs/operators.md and `help(kvops.ops.select_topk)` in Python. Errors are std::runtime_error. Their message names the
// argument if the torch that runs is 2.13 or newer; before that it is in torch's log. kvops_aten.h converts at::Tensor.
// The program must link or load libkvops.so and, for CUDA tensors, libkvops_cuda.so.
//
// tools/tables.py wrote this file from csrc/schema.cpp.
#pragma once
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/stableivalue_conversions.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

// Null before torch 2.13.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

#pragma GCC visibility push(hidden)  // as torch's tensors are
namespace kvops {

using torch::stable::Tensor;

// How several values are reduced to one: the rows of a window, the query heads of a group, or the tokens of a cluster.
enum class Reduce : int64_t { sum, mean, max, none };

// What window_scores adds up: softmax weights or dot products.
enum class Score : int64_t { softmax, dot };

namespace detail {

template <class T>
StableIValue value(const T& x) {
  if constexpr (std::is_enum_v<T>)
    return torch::stable::detail::from(static_cast<int64_t>(x));
  else
    return torch::stable::detail::from(x);
}

template <class... Results, class... Arguments>
auto call(const char* name, const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, std::max(sizeof...(Arguments), sizeof...(Results))> stack{value(arguments)...};
  if (torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION) != TORCH_SUCCESS) {
    if (torch_exception_get_what_without_backtrace)
      throw std::runtime_error(torch_exception_get_what_without_backtrace());
    throw std::runtime_error(std::string(name) + " failed; torch's log says why");
  }
  return [&]<size_t... I>(std::index_sequence<I...>) {
    if constexpr (sizeof...(Results) == 1)
      return torch::stable::detail::to<Results...>(stack[0]);
    else if constexpr (sizeof...(Results) > 1)
      return std::tuple<Results...>{torch::stable::detail::to<Results>(stack[I])...};
  }(std::make_index_sequence<sizeof...(Results)>());
}

}  // namespace detail
"""
TAIL = "\n}  // namespace kvops\n#pragma GCC visibility pop\n"
TYPES = {"Tensor": "Tensor", "int": "int64_t", "float": "double", "bool": "bool"}
ENUMERATIONS = {"reduce": ("Reduce", ("sum", "mean", "max", "none")), "score": ("Score", ("softmax", "dot"))}
WIDTH = 120


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
            lines.append(" " * len(before))
            lines[-1] += text
        else:
            lines[-1] += " " * (i > 0) + text
    return "\n".join(lines) if parts else before + after


def function(schema: str, about: str, options_of: dict[str, list[Argument]]) -> str:
    """Return the function of one schema, after its options unless an earlier overload has the same. options_of: the
    options so far, by name."""
    match = re.fullmatch(r"(\w+)(?:\.(\w+))?\((.*)\) -> (.*)", schema)
    assert match, schema
    op, overload, arguments, returned = match.groups()
    every = [argument(x) for x in arguments.split(", ") if x != "*"]
    optional = [x for x in every if x.value is not None]
    results = [cpp_type(x) for x in returned.strip("()").split(", ") if x]
    returns = {0: "void", 1: results[0] if results else ""}.get(len(results), f"std::tuple<{', '.join(results)}>")
    lines = [""]
    options = "".join(x.title() for x in op.strip("_").split("_")) + "Options"
    if optional and options not in options_of:
        fields = [f"  {x.type} {x.name}{x.value if x.value == '{}' else f' = {x.value}'};" for x in optional]
        lines += [f"struct {options} {{", *fields, "};", ""]
        options_of[options] = optional
    assert not optional or options_of[options] == optional, f"{schema}: other options than {op}'s"
    if not overload:
        lines += comment(about)
    parameters = [x.parameter for x in every if x.value is None] + [f"const {options}& options = {{}}"] * bool(optional)
    name = op + (f"_{overload}" if overload else "")
    lines.append(broken(f"inline {returns} {name}(", parameters, ") {"))
    values = [x.name if x.value is None else f"options.{x.name}" for x in every]
    call = f"  return detail::call<{', '.join(results)}>("
    lines += [broken(call, [f'"kvops::{op}"', f'"{overload or ""}"', *values], ");"), "}"]
    return "\n".join(lines)


def comment(text: str) -> list[str]:
    """Return a comment in lines."""
    lines = ["//"]
    for word in f"{text}.".split():
        if len(lines[-1]) + 1 + len(word) > WIDTH:
            lines.append("//")
        lines[-1] += f" {word}"
    return lines


def header(schemas: list[str], abouts: dict[str, str]) -> str:
    """Return the header for schemas such as `lag_score(Tensor k, int lag=1) -> Tensor`. abouts: a sentence on each
    operator."""
    options: dict[str, list[Argument]] = {}
    functions = [function(x, abouts[re.split(r"[.(]", x)[0]], options) for x in schemas]
    return HEAD + "\n".join(functions) + "\n" + TAIL
