"""The plugin's entry point: vLLM calls `register` in each of its processes.

The plugin does nothing unless the environment variable KVOPS_VLLM names a policy ("keydiff:budget=1024"), or
KVOPS_VLLM_ATTENTION is 1, which selects kvops' attention in vLLM's CPU backend. With the setting "evict=blocks:N" it
evicts from a prompt after every N tokens, otherwise once, at its end. It rejects unsupported settings with a
one-sentence error, here or when the engine starts, never while serving a request.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..supported import VLLM
from .settings import ATTENTION, own_attention, schedule

TESTED = VLLM.minors


class Served(NamedTuple):
    """A vLLM backend for which the plugin has an evicting subclass."""

    module: str  # module name, the same in vLLM's backends and in this package
    builder: str  # vLLM's metadata builder class
    impl: str  # vLLM's attention implementation class


CPU = {"CPU_ATTN": Served("cpu_attn", "CPUAttentionMetadataBuilder", "CPUAttentionBackendImpl")}
CUDA = {
    "FLASH_ATTN": Served("flash_attn", "FlashAttentionMetadataBuilder", "FlashAttentionImpl"),
    "FLASHINFER": Served("flashinfer", "FlashInferMetadataBuilder", "FlashInferImpl"),
}

_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
_BUILD = "self common_prefix_len common_attn_metadata fast_build"
_FORWARD = "self layer query key value kv_cache attn_metadata output output_scale output_block_scale"
_WRITE = (
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update",
    "self layer key value kv_cache slot_mapping",
)
#: The functions of vLLM that the plugin overrides or calls, with the parameters it relies on ("|": or). What the
#: package imports from vLLM is checked too: see `imports`.
HOOKS = {
    f"{_MANAGERS}:FullAttentionManager.remove_skipped_blocks": (
        "self request_id processed_computed_tokens num_prompt_tokens"
    ),
    f"{_MANAGERS}:FullAttentionManager._remove_blocks_in_range": "self request_id first_block last_block",
    f"{_MANAGERS}:FullAttentionManager.get_num_blocks_to_allocate": (
        "self request_id num_tokens new_computed_blocks total_computed_tokens num_local_computed_tokens "
        "num_tokens_main_model apply_admission_cap prefill_end"
    ),
    f"{_MANAGERS}:FullAttentionManager.allocate_new_blocks": "self request_id num_tokens num_tokens_main_model",
    f"{_MANAGERS}:FullAttentionManager.cache_blocks": ("self request num_tokens retention_interval replay_boundaries"),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.truncate_computed_blocks": "self blocks num_computed_tokens",
    "vllm.v1.core.sched.scheduler:Scheduler._get_local_prefix_cache_hit": (
        "self request|self request max_cache_hit_length"  # 0.32 and 0.33
    ),
    "vllm.v1.kv_cache_interface:FullAttentionSpec.max_num_blocks_per_req": "self vllm_config max_len",
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register": (
        "kvcache_spec_cls manager_class uniform_type_base_spec"
    ),
    "vllm.v1.kv_cache_interface:FullAttentionSpec.max_memory_usage_bytes": "self vllm_config",
    "vllm.v1.kv_cache_interface:FullAttentionSpec.copy_with_new_block_size": "self block_size",
    "vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split": (
        "self request num_new_tokens num_new_local_computed_tokens num_external_computed_tokens"
    ),
    "vllm.v1.sample.logits_processor:LogitsProcessor.update_state": "self batch_update",
    "vllm.v1.worker.gpu.sample.logits_processor:LogitsProcessor.add_request": "self req_idx sampling_params",
    "vllm.model_executor.layers.linear:LinearMethodBase.apply": "self layer x bias",
    "vllm.v1.attention.backend:AttentionBackend.customize_spec": "spec",
    "vllm.v1.attention.backend:AttentionMetadataBuilder.get_cudagraph_support": "vllm_config kv_cache_spec",
    "vllm.v1.attention.backends.registry:register_backend": "backend class_path is_mamba",
}


def register() -> None:
    """Make vLLM evict with the policy in KVOPS_VLLM, and attend as KVOPS_VLLM_ATTENTION says.

    May be called several times.
    """
    evict, own = schedule() is not None, own_attention()
    if not evict and not own:
        return
    served = check_vllm()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if own:
        if served is not CPU:
            raise NotImplementedError(
                f"{ATTENTION}=1 expects vLLM on a CPU, whose backend alone it serves, got an NVIDIA GPU; unset it"
            )
        _check_hook(*_WRITE)
    if not evict:
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{__package__}.attention.Backend")
        return
    from . import scheduler, weights

    scheduler.register()
    weights.watch()
    for backend in AttentionBackendEnum:
        if backend.name in served:
            name = "OwnBackend" if own else "Backend"
            register_backend(backend, f"{__package__}.{served[backend.name].module}.{name}")
        elif backend.name != "NO_ATTENTION":  # fail, because this backend would silently keep every token
            register_backend(backend, f"{__package__}.unserved.{backend.name}")
    if served is CUDA:
        scheduler.logger.warning("kvops.vllm is tested in vLLM on CPUs only; for GPUs only its parts are tested")


def imports() -> dict[str, list[str]]:
    """Return what each module of this package imports from vLLM, from its source: "module:name" or "module"."""
    found: dict[str, list[str]] = {}
    for file in sorted(Path(__file__).parent.glob("*.py")):
        names = found[file.stem] = []
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level:
                names += [f"{node.module}:{x.name}" for x in node.names]
            elif isinstance(node, ast.Import):
                names += [x.name for x in node.names]
        names[:] = [x for x in names if x.startswith(("vllm.", "vllm:"))]
    return found


def check_vllm() -> dict[str, Served]:
    """Return the evicting backends by vLLM's names. Raise if the installed vLLM is not a tested one."""
    import vllm

    if not vllm.__version__.startswith(tuple(f"{version}." for version in TESTED)):
        tested = " or ".join(f"{version}.x" for version in TESTED)
        raise RuntimeError(f"kvops.vllm: expected vLLM {tested} (the tested versions), got {vllm.__version__}")
    imported = imports()
    backends = {x.module: imported.pop(x.module) for x in (CPU | CUDA).values()}
    backends["cpu_attn"] += imported.pop("attention")
    for name in sum(imported.values(), []):
        _find(name)
    for hook, expected in HOOKS.items():
        _check_hook(hook, expected)
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() and not current_platform.is_cuda():
        raise NotImplementedError(
            f"kvops.vllm: expected vLLM on a CPU or an NVIDIA GPU (backends {', '.join(CPU | CUDA)}), got "
            f"{current_platform.device_name}"
        )
    served = CPU if current_platform.is_cpu() else CUDA
    for backend in served.values():
        with suppress(ImportError):  # vLLM does not select a backend whose packages are missing
            for name in backends[backend.module]:
                _find(name)
            _check_hook(f"vllm.v1.attention.backends.{backend.module}:{backend.builder}.build", _BUILD)
            _check_hook(f"vllm.v1.attention.backends.{backend.module}:{backend.impl}.forward", _FORWARD)
    return served


def _find(name: str) -> object:
    """Return what vLLM has under "module:name" or "module". Raise if it has no such module or name."""
    import vllm

    module, _, path = name.partition(":")
    try:
        found: object = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # vLLM has the module, which imports a package that is not installed
        found = None
    for part in filter(None, path.split(".")):
        found = getattr(found, part, None)
    if found is None:
        raise RuntimeError(
            f"kvops.vllm: expected vLLM to have {name.replace(':', '.')}, got no such name in vLLM {vllm.__version__}; "
            f"install a release of vLLM {' or '.join(TESTED)} that has it"
        )
    return found


def _check_hook(hook: str, expected: str) -> None:
    import vllm

    found = _find(hook)
    parameters = " ".join(inspect.signature(found).parameters) if callable(found) else "no function"
    if parameters not in expected.split("|"):
        takes = " or ".join(f"({x.replace(' ', ', ')})" for x in expected.split("|"))
        raise RuntimeError(
            f"kvops.vllm: expected vLLM's {hook.partition(':')[2]} to take {takes}, got "
            f"({parameters.replace(' ', ', ')}) in vLLM {vllm.__version__}"
        )
