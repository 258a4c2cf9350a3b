"""The layer between the public functions and torch's dispatcher: refuses tracked tensors and clarifies errors.

`kvops.ops` calls overloads through `operator`, which refuses tensors that autograd tracks and skips the dispatcher's
autograd keys. It adds half a microsecond. `register` puts the same check on those keys for callers of
`torch.ops.kvops.*`, so that no transform of torch (backward, `torch.func.grad`, `torch.func.jvp`) silently ignores an
operator. It also increments the versions of tensors that an operator writes, so a backward pass that has saved such a
tensor raises.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import forward_ad

from .._lib import NAMESPACE
from .checks import shown, tracked

_BelowAutograd = torch._C._AutoDispatchBelowADInplaceOrView
_any_requires_grad = torch._C._any_requires_grad
_TYPES: dict[str, tuple[Any, str]] = {  # a schema's types: Python's type, and its name in errors
    "Tensor": (Tensor, "a torch.Tensor"),
    "int": (int, "an int"),
    "float": ((int, float), "a float"),
    "bool": (bool, "a bool"),
}


class _Call(NamedTuple):
    """An overload and the arguments of one call."""

    overload: OpOverload
    args: tuple[Any, ...]
    options: dict[str, Any]
    public: dict[str, str]  # the public function's argument names where they differ from the schema's

    def arguments(self) -> Iterator[tuple[torch.Argument, object]]:
        """The given arguments with their schemas, in any order."""
        by_name = {x.name: x for x in self.overload._schema.arguments}
        yield from zip(by_name.values(), self.args)
        yield from ((by_name[name], x) for name, x in self.options.items())

    def elements(self, argument: torch.Argument, value: object) -> Iterator[tuple[str, object]]:
        """(name, value), or one such pair per element of a list."""
        name = self.public.get(argument.name, argument.name)
        if "List[" in str(argument.type) and isinstance(value, (list, tuple)):
            yield from ((f"{name}[{i}]" if len(value) > 1 else name, x) for i, x in enumerate(value))
        else:
            yield name, value

    def refuse_tracked(self, kind: type[Exception]) -> None:
        for argument, value in self.arguments():
            for name, x in self.elements(argument, value):
                if isinstance(x, Tensor) and (how := tracked(x)):
                    raise kind(f"{self.overload._opname}: {name} {how}")

    def clearer(self, error: Exception) -> Exception:
        """An exception that says more clearly what `error` means, or `error` itself."""
        op, text = self.overload._opname, str(error)
        if isinstance(error, MemoryError) and f"{op}: CUDA out of memory" in text:
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize()  # after a failed kernel every allocation fails: raise the kernel's failure
            return torch.OutOfMemoryError(text)
        # torch's argument parser raises RuntimeError, and accepts None for a tensor, which then fails later.
        for argument, value in self.arguments():
            declared = str(argument.type)
            optional, kind = "Optional[" in declared, re.findall(r"(\w+)\]*$", declared)[0]
            for name, x in self.elements(argument, value):
                if kind == "int" and isinstance(x, int) and not -(2**63) <= x < 2**63:
                    return ValueError(f"{op}: {name} must fit int64, got {shown(x)}")
                if kind == "float" and isinstance(x, int) and abs(x) > sys.float_info.max:
                    return ValueError(f"{op}: {name} must fit a float, got {shown(x)}")
                if not (isinstance(x, _TYPES[kind][0]) or (optional and x is None)):
                    expected = _TYPES[kind][1] + " or None" * optional
                    return TypeError(f"{op}: {name} must be {expected}, got {type(x).__name__}")
                if isinstance(error, NotImplementedError) and isinstance(x, Tensor):
                    if x.layout != torch.strided or x.is_quantized:
                        found = x.dtype if x.is_quantized else x.layout
                        return NotImplementedError(f"{op}: {name} must be a dense tensor of plain numbers, got {found}")
            if "List[" in declared and not isinstance(value, (list, tuple)):
                return TypeError(f"{op}: {argument.name} must be a list, got {type(value).__name__}")
        return error


def operator(overload: OpOverload, **public: str) -> Callable[..., Any]:
    """Wraps `overload` in a function with clear errors.

    It raises ValueError for tensors that autograd tracks, TypeError for arguments of a wrong type, and MemoryError or
    torch.OutOfMemoryError if memory runs out. public: the names of arguments in errors, where they differ.
    """
    run = overload._op  # what the overload calls, with one Python frame less

    def call(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return overload(*args, **options)
        if forward_ad._current_level >= 0 or (torch.is_grad_enabled() and _any_requires_grad(*args, **options)):
            _Call(overload, args, options, public).refuse_tracked(ValueError)
        try:
            with _BelowAutograd():
                return run(*args, **options)
        except (RuntimeError, ValueError, MemoryError) as error:
            clearer = _Call(overload, args, options, public).clearer(error)
            if clearer is error:
                raise
            raise clearer from None

    return call


def register(overloads: list[OpOverload]) -> torch.library.Library:
    """Refuses tensors that autograd tracks, at the dispatcher, for as long as the returned library lives."""
    library = torch.library.Library(NAMESPACE, "IMPL")
    for overload in overloads:
        library.impl(overload._name, _autograd(overload), "Autograd", with_keyset=True)
        if overload._schema.is_mutable:
            library.impl(overload._name, _in_place(overload), "ADInplaceOrView", with_keyset=True)
    return library


def _autograd(overload: OpOverload) -> Callable[..., Any]:
    after = torch._C._after_autograd_keyset

    def kernel(keyset: Any, *args: Any, **options: Any) -> Any:
        if forward_ad._current_level >= 0 or (torch.is_grad_enabled() and _any_requires_grad(*args, **options)):
            _Call(overload, args, options, {}).refuse_tracked(NotImplementedError)
        try:
            return overload.redispatch(keyset & after, *args, **options)
        except MemoryError as error:
            raise _Call(overload, args, options, {}).clearer(error) from None

    return kernel


def _in_place(overload: OpOverload) -> Callable[..., Any]:
    after = torch._C._after_ADInplaceOrView_keyset
    names = [x.name for x in overload._schema.arguments]
    written = {x.name for x in overload._schema.arguments if x.alias_info and x.alias_info.is_write}

    def kernel(keyset: Any, *args: Any, **options: Any) -> Any:
        result = overload.redispatch(keyset & after, *args, **options)
        for name, x in (*zip(names, args), *options.items()):
            if name in written:
                torch.autograd.graph.increment_version(x)
        return result

    return kernel
