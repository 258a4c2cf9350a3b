"""The arguments of models and of `generate` by name, and the name of the cache among them.

transformers 5.24 renamed `past_key_values` to `cache`, and accepts both names for a while.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers import GenerationMixin

_PARAMETERS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = "cache" if "cache" in _PARAMETERS else "past_key_values"


def given_cache(call: Mapping[str, Any]) -> Any:
    """Return the cache among the named arguments of a call, under either name; None without one."""
    found = call.get("cache")
    return call.get("past_key_values") if found is None else found


def by_name(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, all by name."""
    if not args:
        return dict(kwargs)
    signature = inspect.signature(function)
    signature.bind_partial(*args, **kwargs)  # raises TypeError for too many arguments, or the same one twice
    return {**dict(zip(signature.parameters, args)), **kwargs}
