"""Hostile calls of every operator, on memory that ends at a guard page.

python tests/fuzz.py [--seed N] [--calls N] [--seconds N] [--only CALL] [OPERATOR ...]

takes the calls of calls.py and corrupts some of their arguments: shapes, strides, dtypes, values, types, memory shared
with outputs. Each call must either raise an error that names the operator and change nothing, or return the same as for
copies of its arguments in ordinary memory and write only its outputs. An access past a tensor crashes the process. The
script prints each call before making it, so after a crash the last line is the call to repeat with --only.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import faulthandler
import functools
import inspect
import math
import mmap
import random
import re
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor

import kit
import kvops
from calls import CALLS, inputs
from kvops import ops

ERRORS = (ValueError, TypeError, NotImplementedError, MemoryError)
SIZES = dict(b=2, heads=2, n=96, d=16, dv=24)
LIMIT = 60  # seconds allowed per call
NUMBERS = (0, 1, -1, 2, 3, 7, 95, 96, 97, 1 << 31, -(1 << 31), (1 << 63) - 1, -(1 << 63), 1 << 40)
REALS = (0.0, -1.0, 0.5, 1.0, 1e-45, 1e-300, 1e38, 1e300, math.inf, -math.inf, math.nan)
STRANGERS = (None, "mean", "nonsense", True, [0], (), 1.5, object())
DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.uint8,
)

# Of every kind that a caller may pass for a number or a name.
ODD_VALUES = (
    *(2**31, 2**40, 2**62, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 2**70, 2**2000, -(2**20000)),
    *(3.0, 1e30, -1e30, math.inf, -math.inf, math.nan, 1j, True, None, "3", b"3", (), object()),
    *(np.int8(-1), np.int64(3), np.uint64(2**64 - 1), np.float32(3), np.float64(1e30), np.bool_(True), np.zeros(2)),
    *(torch.tensor(3), torch.tensor(math.nan), torch.tensor([3, 4])),
)
EVERY_DTYPE = tuple(dict.fromkeys(x for x in vars(torch).values() if isinstance(x, torch.dtype)))

Arguments = dict[str, Any]


# ---- Memory
# ----------------------------------------------------------------------------------------------------------------------

libc = ctypes.CDLL(None, use_errno=True)


def between_guards(size: int, at_end: bool) -> Tensor:
    """Allocate memory between two guard pages, adjacent to one of them."""
    pages = -(-size // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (0, pages + 1):
        assert libc.mprotect(ctypes.c_void_p(start + page * mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    offset = mmap.PAGESIZE + (pages * mmap.PAGESIZE - size if at_end else 0)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset)


def span(x: Tensor) -> int:
    """Return the number of bytes from the first element of x to the end of the last."""
    return (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride()))) * x.element_size() if x.numel() else 0


def memory_of(x: Tensor) -> Tensor:
    """View all elements in the memory range of x as one vector."""
    return x.as_strided((span(x) // x.element_size(),), (1,))


def placed(x: Tensor, memory: Tensor) -> Tensor:
    """Copy x into this memory with its strides."""
    flat = memory[: span(x)].view(x.dtype)
    flat.copy_(memory_of(x))
    return flat.as_strided(x.shape, x.stride(), 0)


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [x for item in items for x in tensors_of(item)]


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every plain tensor in the value; everything else stays."""
    if isinstance(value, Tensor):
        plain = value.layout == torch.strided and not value.is_neg() and not value.requires_grad
        return change(value) if plain else value
    if isinstance(value, dict):
        return {name: mapped(x, change) for name, x in value.items()}
    return type(value)(mapped(x, change) for x in value) if tensors_of(value) else value


def copied(x: Tensor) -> Tensor:
    return placed(x, torch.zeros(max(span(x), 1), dtype=torch.uint8))


# ---- Calls
# ----------------------------------------------------------------------------------------------------------------------

OWNERS = (ops, kvops)  # modules whose functions calls.py calls


@functools.cache
def recorded(name: str, seed: int) -> tuple[Callable, Arguments]:
    """Return the function that a call of calls.py calls first, and its arguments by name."""
    found: list[tuple[Callable, Arguments]] = []
    function_name = name.split(",")[0]
    owner = next(x for x in OWNERS if function_name in x.__all__)
    function = getattr(owner, function_name)

    def record(*args, **kwargs):
        arguments = dict(inspect.signature(function).bind(*args, **kwargs).arguments)
        found.append((function, {**arguments, **arguments.pop("call", {})}))
        return function(*args, **kwargs)

    setattr(owner, function_name, record)
    try:
        CALLS[name](inputs(seed, **SIZES))
    finally:
        setattr(owner, function_name, function)
    return found[0]


def written(function: Callable, arguments: Arguments) -> list[str]:
    """Return the arguments that the function writes."""
    return ["k", "v"] if function.__name__.endswith("_") else ["out"] if arguments.get("out") is not None else []


def spoil_tensor(rng: random.Random, x: Tensor) -> Any:
    def integers() -> Tensor:
        return torch.tensor([rng.choice(NUMBERS) for _ in range(x.numel())]).view(x.shape).to(x.dtype)

    def some_values(value: float) -> Tensor:
        y = x.clone()
        y.view(-1)[:: rng.choice((1, 5, 31))] = torch.tensor(value).to(x.dtype)
        return y

    dim = rng.randrange(x.dim()) if x.dim() else 0
    limits = torch.iinfo(torch.int64 if x.is_floating_point() or x.dtype == torch.bool else x.dtype)
    changes: list[Callable[[], Any]] = [
        lambda: x.to(rng.choice(DTYPES)),
        lambda: x.narrow(dim, 0, rng.choice((0, 1, max(x.shape[dim] - 1, 0)))),
        lambda: torch.cat((x, x.narrow(dim, 0, 1)), dim),
        lambda: x.select(dim, 0),
        lambda: x.unsqueeze(dim),
        lambda: x.narrow(dim, 0, 1).expand(x.shape),
        lambda: x.transpose(dim, -1),
        lambda: x.transpose(dim, -1).contiguous().transpose(dim, -1),
        lambda: torch.cat((x, x), dim).unflatten(dim, (2, -1)).select(dim, rng.randrange(2)),
        lambda: torch.stack((x, x), dim + 1).flatten(dim, dim + 1).narrow(dim, 0, 2 * x.shape[dim]).select(dim, 0),
        lambda: torch.repeat_interleave(x, 2, dim)[(slice(None),) * dim + (slice(None, None, 2),)],
        lambda: (
            some_values(rng.choice(REALS))
            if x.is_floating_point()
            else integers().clamp(max(-(1 << 31), limits.min), min((1 << 31) - 1, limits.max)).to(x.dtype)
        ),
        lambda: x * 1e30 if x.is_floating_point() else x + rng.choice((-1, 1, min(x.numel(), limits.max))),
        lambda: torch._neg_view(x),
        lambda: x.to_sparse(),
        lambda: x.float().requires_grad_(),
        lambda: [x],
        lambda: rng.choice(STRANGERS),
    ]
    return rng.choice(changes)()


def spoil(rng: random.Random, value: Any) -> Any:
    if isinstance(value, Tensor):
        return spoil_tensor(rng, value)
    if tensors_of(value):
        i = rng.randrange(len(value))
        return rng.choice((value[:-1], value + value, (*value[:i], spoil(rng, value[i]), *value[i + 1 :])))
    return rng.choice((rng.choice(NUMBERS), rng.choice(REALS), rng.choice(STRANGERS)))


def of_dtype(x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return x in another dtype, or any tensor of its shape; None if torch makes no such tensors."""
    if dtype in (torch.qint8, torch.quint8, torch.qint32):
        return torch.quantize_per_tensor(torch.zeros(x.shape), 1.0, 0, dtype)
    for make in (lambda: x.to(dtype), lambda: torch.empty(x.shape, dtype=dtype)):
        with contextlib.suppress(RuntimeError, NotImplementedError):
            return make()
    return None


def odd_calls(operator: str) -> Iterator[tuple[str, Callable, Arguments]]:
    """Yield calls of an operator with one argument of another dtype, or another number, name or object."""
    calls = [recorded(name, 0) for name in CALLS if name.split(",")[0] == operator]
    for argument in names_of(calls[0][0]):
        function, arguments = next((x for x in calls if argument in x[1]), calls[0])
        value = arguments.get(argument)
        tensors = tensors_of(value) or [torch.zeros(2)]
        odd: list[Any] = [*ODD_VALUES, *([x] for x in ODD_VALUES), *((3, x) for x in ODD_VALUES)]
        takes_tensors = re.search("Tensor|Layers", str(inspect.signature(function).parameters[argument].annotation))
        # Not for numbers: torch's error then prints the tensor, which for some dtypes fails and leaks torch's guards.
        for dtype in EVERY_DTYPE if takes_tensors else ():
            if None not in (cast := [of_dtype(x, dtype) for x in tensors]):
                odd.append(type(value)(cast) if isinstance(value, (list, tuple)) and tensors_of(value) else cast[0])
        for x in odd:
            yield argument, function, mapped(arguments, torch.Tensor.clone) | {argument: x}


def share_memory(rng: random.Random, arguments: Arguments, names: list[str]) -> bool:
    """Move an output tensor into memory that overlaps another tensor."""
    targets = [name for name in names if tensors_of(arguments[name])]
    if not targets:
        return False
    target = rng.choice(targets)
    all_of_them = tensors_of(arguments)
    mine = rng.choice(tensors_of(arguments[target]))
    other = rng.choice([x for x in all_of_them if x is not mine] or [mine])
    if any(x.layout != torch.strided or x.is_neg() or x.requires_grad or not x.numel() for x in (mine, other)):
        return False
    shift = rng.choice((0, 1, 2, 3, span(other) // 32, span(other) // 16)) * 16
    memory = torch.zeros(max(span(other), shift + span(mine)), dtype=torch.uint8)
    moved = {id(other): placed(other, memory), id(mine): memory[shift:]}
    moved[id(mine)] = memory[shift : shift + span(mine)].view(mine.dtype).as_strided(mine.shape, mine.stride(), 0)
    arguments.update(mapped(arguments, lambda x: moved.get(id(x), x)))
    return True


def outcome(function: Callable, arguments: Arguments) -> tuple[Any, Exception | None]:
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    try:
        return function(**arguments), None
    except Exception as error:
        return None, error
    finally:
        faulthandler.cancel_dump_traceback_later()


def check(rng: random.Random, function: Callable, arguments: Arguments, shared: bool) -> str:
    """Make the call and return its outcome; raise AssertionError if the outcome is wrong."""
    own = arguments
    if not shared:
        own = mapped(arguments, lambda x: placed(x, between_guards(max(span(x), 1), rng.random() < 0.8)))
    strided = [x for x in tensors_of(own) if x.layout == torch.strided and not x.is_neg()]
    before = [memory_of(x.detach()).view(torch.uint8).clone() for x in strided]
    copies = mapped(own, copied)
    result, error = outcome(function, own)
    expected, expected_error = outcome(function, copies)
    writes = {id(x) for name in written(function, own) for x in tensors_of(own[name])} if error is None else set()
    if error is not None:
        assert isinstance(error, ERRORS), f"{type(error).__name__}: {error}"
        assert any(name.rstrip("_") in str(error) for name in ERROR_NAMES), f"no operator is named: {error}"
        assert shared or type(expected_error) is type(error), f"{expected_error!r} for copies, here {error!r}"
    else:
        assert expected_error is None, f"{expected_error!r} for copies"
        assert kit.same(tensors_of(result), tensors_of(expected)), "the result is another one than for copies"
    reached = [x for x in strided if id(x) in writes]
    for x, was in zip(strided, before):
        overlaps = shared and any(x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() for y in reached)
        if id(x) not in writes and not overlaps:
            assert memory_of(x.detach()).view(torch.uint8).equal(was), f"a tensor {list(x.shape)} has changed"
    return "returned" if error is None else type(error).__name__


#: Operators, and the policies behind the one-call functions.
ERROR_NAMES = {
    *ops.__all__,
    *(name.split(",")[0] for name in CALLS),
    *(x.policy.__name__ for x in kvops.METHODS.values()),
}


@functools.cache
def names_of(function: Callable) -> list[str]:
    """Return the function's argument names, including those of `**call: Unpack[...]`."""
    names = list(inspect.signature(function).parameters)
    if "call" in names:
        (call,) = get_args(get_type_hints(function, include_extras=True)["call"])
        names[names.index("call") :] = get_type_hints(call)
    return names


def described(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = str(value.dtype if value.layout == torch.strided else value.layout).removeprefix("torch.")
        return f"{kind}{list(value.shape)}{'' if value.is_contiguous() else f' by {list(value.stride())}'}"
    return f"({', '.join(map(described, value))})" if tensors_of(value) else repr(value)[:40]


def make(call: int, seed: int, names: list[str]) -> str:
    """Build the call with that number."""
    rng = random.Random(f"{seed}.{call}")
    name = rng.choice(names)
    function, arguments = recorded(name, rng.randrange(4))
    arguments = mapped(arguments, torch.Tensor.clone)
    every = [x for x in names_of(function) if x in arguments or rng.random() < 0.3]
    for argument in rng.sample(every, min(rng.choice((0, 1, 1, 1, 2, 3)), len(every))):
        arguments[argument] = spoil(rng, arguments.get(argument))
    shared = rng.random() < 0.3 and share_memory(rng, arguments, written(function, arguments))
    text = ", ".join(f"{x}={described(y)}" for x, y in arguments.items())
    print(f"{call}: {function.__name__}({text}){', shared memory' if shared else ''}", flush=True)
    try:
        return check(rng, function, arguments, shared)
    except AssertionError as error:
        print(f"WRONG {call}: {error}", flush=True)
        return "wrong"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=int, default=1 << 40)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--only", type=int, help="the call of this number alone")
    a = parser.parse_args()
    torch.set_num_threads(2)
    warnings.simplefilter("ignore")
    # Allocations that are too large fail at once.
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    names = [name for name in CALLS if not a.operators or name.split(",")[0] in a.operators]
    end, outcomes = time.monotonic() + a.seconds, collections.Counter()
    for call in range(a.calls) if a.only is None else [a.only]:
        if time.monotonic() > end:
            break
        outcomes[make(call, a.seed, names)] += 1
    print("outcomes:", dict(outcomes))
    sys.exit(1 if outcomes["wrong"] else 0)


if __name__ == "__main__":
    main()
