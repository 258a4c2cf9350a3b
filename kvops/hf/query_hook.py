"""Passes queries to the allocators of transformers' continuous batching, which otherwise get keys and values only.

The engine's attention functions receive the queries and call `cache.update` with their layer's keys and values. This
module wraps them, once per process. Before such a call, an allocator with a `take` method gets the layer's queries.
Layers of other caches and allocators are unaffected.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface

ATTENTIONS = ("sdpa", "paged|eager", "paged|sdpa")  # the last one exists up to transformers 5.22
_lock = threading.Lock()


class AttentionInputs(NamedTuple):
    """What a layer attends with."""

    query: Tensor  # [tokens, Hq, d], for all requests of the step
    logits: dict[str, Any]  # see `kvops.methods.queries.Logits`


def pass_queries() -> None:
    """Wrap the engine's attention functions, so that allocators with a `take` method get the queries."""
    with _lock:
        known = AttentionInterface()
        for name in ATTENTIONS:
            attention = known.get(name)
            if attention is not None and not hasattr(attention, "passes_queries"):
                AttentionInterface.register(name, _wrapped(attention))


def _wrapped(attention: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(attention)
    def with_queries(module: torch.nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("cache")
        if cache is not None:
            take = getattr(cache.layer_to_allocator.get(module.layer_idx), "take", None)
            if take is not None:
                # The engine's attention functions have no softcap, and read the sinks from the module.
                logits: dict[str, Any] = {"scale": kwargs.get("scaling")}
                if (sinks := getattr(module, "sinks", None)) is not None:
                    logits["sink_logits"] = sinks.detach().float()
                take(AttentionInputs(query[0].transpose(0, 1), logits))
        return attention(module, query, *args, **kwargs)

    vars(with_queries)["passes_queries"] = True
    return with_queries
