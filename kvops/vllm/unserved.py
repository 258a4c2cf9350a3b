"""Stand-ins for vLLM's backends without eviction: selecting one raises an error."""

from __future__ import annotations

from typing import NoReturn

from . import plugin


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if "MLA" in name:  # on an ImportError vLLM would try the next backend, and finally say only that there is none
        raise NotImplementedError(
            "kvops.vllm: expected a model that caches keys and values, got one with multi-head latent attention (MLA)"
        )
    raise ImportError(
        f"kvops.vllm: expected one of {', '.join(plugin.CPU | plugin.CUDA)}, the backends with eviction, got {name}"
    )
