"""The entry point of the plugin: vLLM calls `register` in each of its processes.

Nothing happens unless the environment variable KVOPS_VLLM names a policy ("keydiff:budget=1024"). What cannot be served
is an error in one sentence, here or when the engine starts, never at a request.
"""

from __future__ import annotations

import importlib
import inspect
import os

from ..methods import Full, Policy
from ..methods import policy as policy_of
from .plan import check

VARIABLE = "KVOPS_VLLM"
TESTED = "0.32"
_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
_CPU = "vllm.v1.attention.backends.cpu_attn"
#: What the plugin overrides or calls, with the parameters that it counts on.
HOOKS = {
    f"{_MANAGERS}:FullAttentionManager.remove_skipped_blocks": (
        "self",
        "request_id",
        "processed_computed_tokens",
        "num_prompt_tokens",
    ),
    f"{_MANAGERS}:FullAttentionManager._remove_blocks_in_range": ("self", "request_id", "first_block", "last_block"),
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register": (
        "kvcache_spec_cls",
        "manager_class",
        "uniform_type_base_spec",
    ),
    "vllm.v1.kv_cache_interface:FullAttentionSpec.max_memory_usage_bytes": ("self", "vllm_config"),
    "vllm.v1.attention.backend:AttentionBackend.customize_spec": ("spec",),
    "vllm.v1.attention.backends.registry:register_backend": ("backend", "class_path", "is_mamba"),
    f"{_CPU}:CPUAttentionMetadataBuilder.build": ("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
    f"{_CPU}:CPUAttentionBackendImpl.forward": (
        "self",
        "layer",
        "query",
        "key",
        "value",
        "kv_cache",
        "attn_metadata",
        "output",
        "output_scale",
        "output_block_scale",
    ),
}


def policy() -> Policy | None:
    """The policy that KVOPS_VLLM names; None: vLLM is to be left as it is."""
    spec = os.environ.get(VARIABLE, "")
    if not spec:
        return None
    try:
        found = policy_of(spec)
        if isinstance(found, Full):
            return None
        check(found)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{VARIABLE}={spec}: {error}") from error
    return found


def register() -> None:
    """Makes vLLM evict as KVOPS_VLLM says. May be called several times."""
    if policy() is None:
        return
    check_vllm()
    from . import scheduler, worker

    scheduler.register()
    worker.register()


def check_vllm() -> None:
    """Raises if the installed vLLM is none that this was written for."""
    import vllm
    from vllm.platforms import current_platform

    if not vllm.__version__.startswith(f"{TESTED}."):
        raise RuntimeError(f"kvops.vllm: expected vLLM {TESTED}.x, with which it was tested, got {vllm.__version__}")
    for hook, expected in HOOKS.items():
        module, path = hook.split(":")
        found: object = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name, None)
        parameters = tuple(inspect.signature(found).parameters) if callable(found) else None
        if parameters != expected:
            raise RuntimeError(
                f"kvops.vllm: expected {path} of vLLM to take ({', '.join(expected)}), got "
                f"{'none' if parameters is None else '(' + ', '.join(parameters) + ')'} in {vllm.__version__}"
            )
    if not current_platform.is_cpu():
        raise NotImplementedError(
            f"kvops.vllm: expected vLLM on the CPU (backend CPU_ATTN), the one that it was tested on, got "
            f"{current_platform.device_name}"
        )
