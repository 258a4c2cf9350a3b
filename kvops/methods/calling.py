"""What all one-shot calls share: the `layout` option, and errors that name the function the user called."""

from __future__ import annotations

import functools
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from .. import ops
from ..checks import check_choice

Layout = Literal["bhnd", "bnhd"]
LAYOUTS = ("bhnd", "bnhd")
#: The arguments that have a head and a token dim; `out` is a pair of such tensors.
TRANSPOSED = frozenset(("k", "v", "q", "q_window", "q_last", "q_lookahead", "q_repeat", "k_repeat", "out"))
#: Arguments that operators and compress functions call by the same name.
SHARED = frozenset(("k", "v", "starts", "lengths", "block_table", "out", "lse", "scale", "softcap", "sink_logits"))
INNER = frozenset((*ops.__all__, "head_budgets", "lacache", "lacache_plan"))
PACKAGE = str(Path(__file__).parents[1])

F = TypeVar("F", bound=Callable[..., Any])


def one_shot(compress: F) -> F:
    """Decorates a `*_compress` function: adds `layout`, and puts the function's name into errors."""
    name = compress.__name__
    query = next((x for x in compress.__annotations__ if x.startswith("q")), None)

    @functools.wraps(compress)
    def call(*args: Any, layout: str | None = None, **options: Any) -> Any:
        return _call(name, query, functools.partial(compress, layout="bhnd"), layout, args, options)

    return cast(F, call)


def one_shot_method(compress: F) -> F:
    """Decorates a policy's `compress`: adds `layout`, and puts the policy's name into errors."""
    query = next((x for x in compress.__annotations__ if x.startswith("q")), None)

    @functools.wraps(compress)
    def call(self: Any, *args: Any, layout: str | None = None, **options: Any) -> Any:
        asked = self.argument if query == "q_window" else query
        return _call(self.name, asked, functools.partial(compress, self), layout, args, options)

    return cast(F, call)


def _call(
    name: str, query: str | None, f: Callable[..., Any], layout: str | None, args: tuple[Any, ...], options: Any
) -> Any:
    if layout is not None:
        check_choice(name, "layout", layout, LAYOUTS)
    if layout == "bnhd":
        args = tuple(map(_transposed, args))
        options = {key: _transposed(x) if key in TRANSPOSED else x for key, x in options.items()}
    if torch.compiler.is_compiling():
        kept = f(*args, **options)
    else:
        if layout is None:
            _warn_of_heads(name, args[0] if args else options.get("k"), options.get("block_table"))
        try:
            kept = f(*args, **options)
        except (TypeError, ValueError, NotImplementedError) as error:
            if (text := _renamed(str(error), name, query)) is not None:
                error.args = (text,)
            raise
    if layout == "bnhd":
        return type(kept)(_transposed(kept.k), _transposed(kept.v), kept.indices)
    return kept


def _transposed(x: Any) -> Any:
    """A view with dims 1 and 2 swapped; of a pair, of each."""
    if isinstance(x, Tensor):
        return x.transpose(1, 2) if x.dim() == 4 else x
    return tuple(map(_transposed, x)) if isinstance(x, (tuple, list)) else x


def _warn_of_heads(name: str, k: Any, block_table: Any) -> None:
    """Warns if k appears to be [b, n, Hk, d]. An explicit `layout` silences the warning."""
    if block_table is not None or not isinstance(k, Tensor) or k.dim() != 4 or not k.shape[1] > k.shape[2] > 0:
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"{name}: k is read as [b, Hk, n, d] and has more KV heads ({k.shape[1]}) than tokens ({k.shape[2]}); if it "
        "is [b, n, Hk, d], pass layout='bnhd', and if it is right, pass layout='bhnd' to silence this warning",
        UserWarning,
        stacklevel=level,
    )


def _renamed(text: str, caller: str, query: str | None) -> str | None:
    """The message with the caller's name in place of an inner function's; None if it needs no change."""
    if caller not in _policies() and (call := re.match(r"\w+\.compress_?\(\)", text)):
        return f"{caller}(){text[call.end() :]}"
    match = re.match(r"(\w+)((?:, row \d+)?(?:, head \d+)?): (\w+)", text)
    if match is None or match[1] == caller:
        return None
    inner, where, argument = match.groups()
    rest = text[match.start(3) :]
    if inner not in INNER:
        return f"{caller}{where}: {rest}" if inner in _policies() else None
    if argument in SHARED:
        return f"{caller}{where}: {rest}"
    if argument == "q" and query is not None:
        return f"{caller}{where}: {query}{rest[1:]}"
    return f"{caller}: {text}"


def _policies() -> set[str]:
    from .base import Policy

    names, found = set(), [Policy]
    for cls in found:
        names.add(cls.__name__)
        found.extend(cls.__subclasses__())
    return names
