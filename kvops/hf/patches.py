"""The methods of transformers that kvops.hf wraps, for calls with a `KVCache`. All other calls are unchanged.

transformers has no hooks for what a cache that evicts must know: which prompt a call of `generate` brings (`turns`),
and which tokens of a draft are rejected (`drafts`). So two methods of `GenerationMixin` are wrapped when a process
makes its first `KVCache` or `Compression`. Importing kvops.hf changes nothing, and `remove` undoes it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from transformers import GenerationMixin

_F = TypeVar("_F", bound=Callable[..., Any])
_wrappers: dict[str, Callable[..., Any]] = {}
_installed: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}  # by name: the original and what replaced it
_lock = threading.Lock()


def wraps(name: str) -> Callable[[_F], _F]:
    """Declare that the function wraps a method of `GenerationMixin`. Its first argument is that method."""

    def declare(wrapper: _F) -> _F:
        _wrappers[name] = wrapper
        return wrapper

    return declare


def install() -> None:
    """Wrap the methods, unless they are."""
    with _lock:
        for name, wrapper in _wrappers.items():
            if name not in _installed:
                original = getattr(GenerationMixin, name)
                ours = _wrapped(wrapper, original)
                setattr(GenerationMixin, name, ours)
                _installed[name] = original, ours


def _wrapped(wrapper: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, *args, **kwargs)

    return method


def remove() -> None:
    """Give transformers its own methods back, until the next `KVCache` or `Compression` is made.

    Calls of `generate` with a `KVCache` made before are then no longer checked.

    Raises:
        RuntimeError: Other code has wrapped a method since, and would be lost. Nothing has been changed.
    """
    with _lock:
        for name, (_, ours) in _installed.items():
            if getattr(GenerationMixin, name) is not ours:
                raise RuntimeError(
                    f"kvops.hf: expected GenerationMixin.{name} to be as kvops.hf left it, got one that other code has "
                    "replaced since; undo that first"
                )
        for name, (original, _) in _installed.items():
            setattr(GenerationMixin, name, original)
        _installed.clear()
