"""`with continuous_batching(model, policy)`: eviction in transformers' engine for many requests.

The module is not called `continuous_batching.py`, because that name would hide the function
`kvops.hf.continuous_batching`. Everything that needs the engine's classes is in `allocator.py`, which cannot be
imported with a transformers that lacks them.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

from ..cache.queries import check_observed
from ..cache.schedule import Schedule
from ..methods.base import BudgetPolicy, Policy
from ..methods.queries import QueryPolicy
from ..methods.registry import as_policy
from .attention import unwrap
from .cache import check
from .requirements import for_model

if TYPE_CHECKING:
    from .allocator import Batching

MIN_TRANSFORMERS = "5.18.0"  # the oldest version whose engine has a registry of allocators
#: Whether the engine stores a step's keys before its attention function gets the queries.
STORES_FIRST = Version(transformers.__version__) >= Version("5.24.dev0")
ATTENTIONS = ("sdpa", "eager", "paged|eager")
_NAME = "init_continuous_batching"  # the method that creates every engine

_open: set[PreTrainedModel] = set()
_lock = threading.Lock()


@contextmanager
def continuous_batching(model: torch.nn.Module, policy: Policy | str, *, evict: str = "prompt") -> Iterator[Batching]:
    """Make the model's continuous batching evict within a block.

    ```python
    with kvops.hf.continuous_batching(model, kvops.KeyDiff(1024, buffer=256)) as batching:
        outputs = model.generate_batch(prompts, generation_config=...)
    print(batching.stats())
    ```

    In the block, `model.generate_batch`, `continuous_batching_context_manager` and `init_continuous_batching` make
    engines whose full-attention layers evict for as long as the engine lives. Other layers are unchanged. A prompt is
    evicted when it ends, and in decode a request is evicted whenever its buffer is full. The blocks that become free
    return to the engine's pool for other requests.

    A request generates the same text as alone in a `kvops.hf.KVCache` that gets its prompt in one step, up to rounding.
    Neither the other requests, nor `max_batch_tokens`, nor a restart of the request by an engine that has run out of
    blocks change what is kept.

    In the block an engine keeps the model's attention (as with `auto_switch_to_flash=False`) and shares no prefixes. An
    engine that transformers caches (`persistent_manager=True`) is destroyed when the block ends. Afterwards the model
    makes engines as before, also after an exception. An error during eviction ends the engine, and all its requests
    fail.

    Args:
        model: A causal language model of transformers with the attention "sdpa" or "eager". PEFT or `torch.compile` may
            have wrapped it.
        policy: A policy that keeps equally many tokens in all heads and layers, with a budget in tokens:
            `kvops.KeyDiff(1024)`, `kvops.SnapKV(1024)`, `kvops.StreamingLLM(1024, positions="original")`. Or a string
            for `kvops.policy`: "keydiff:budget=1024".
        evict: When a prompt is evicted: "prompt", once, at its end, or "blocks:N", after every N of its tokens and at
            its end (KeyDiff's block-wise prompts). The blocks of a prompt are taken until its end; with "blocks:N" a
            long prompt takes no more than the budget and N slots.

    Yields:
        A `Batching`, which counts what was evicted.

    Raises:
        ImportError: The installed transformers has no such engine.
        TypeError: `model` is not a transformers model, `policy` is not a kvops policy, or `evict` is not a string.
        ValueError: The policy is not supported; `evict` is invalid; the model has a cached engine already; or, when the
            engine is made, it would use CUDA graphs, compiled steps, asynchronous batching or CPU offloading.
        NotImplementedError: The model or its attention is not supported.
        RuntimeError: The engine differs from the one this was written for, or another block of the model is open.
    """
    if Version(transformers.__version__) < Version(MIN_TRANSFORMERS):
        raise ImportError(
            f"continuous_batching: needs transformers >= {MIN_TRANSFORMERS}, whose engine has a registry of "
            f"allocators, found {transformers.__version__}: pip install -U transformers"
        )
    try:
        from . import allocator
    except ImportError as error:
        raise RuntimeError(
            "continuous_batching: the installed transformers has a different engine than the one this was written for: "
            f"expected its allocators, got {error} in transformers {transformers.__version__}"
        ) from error
    allocator.check_hooks()
    inner = unwrap("continuous_batching", model)
    policy = as_policy("continuous_batching", policy)
    _check_model(inner, policy)
    policy = for_model(policy, inner)
    _check_served(inner, policy)
    batching = allocator.Batching(Schedule.of("continuous_batching", policy, evict))
    with _lock:
        if inner in _open:
            raise RuntimeError("continuous_batching: expected no other open block of this model, got one; end it first")
        _open.add(inner)
        before = vars(inner).get(_NAME)
        vars(inner)[_NAME] = _hook(inner, batching)
    try:
        yield batching
    finally:
        with _lock:
            _open.remove(inner)
            del vars(inner)[_NAME]
            if before is not None:
                vars(inner)[_NAME] = before
        if _cached(inner) is not None:  # made in the block, which refuses other cached engines
            cast(Any, inner).destroy_cached_continuous_batching_manager()


def _cached(model: PreTrainedModel) -> Any:
    return getattr(model, "_cached_continuous_batching_manager", None)


def _check_model(model: PreTrainedModel, policy: Policy) -> None:
    """Raise for models that are not supported."""
    from . import allocator

    check("continuous_batching", model.config, policy)
    text = model.config.get_text_config()
    if text._attn_implementation not in ATTENTIONS:
        raise NotImplementedError(
            "continuous_batching: expected the attention 'sdpa' or 'eager', got "
            f"{text._attn_implementation!r}; call model.set_attn_implementation('sdpa')"
        )
    if getattr(text, "num_kv_shared_layers", None):
        raise NotImplementedError(
            f"continuous_batching: layers of {type(text).__name__} share keys, which only KVCache supports; use "
            "kvops.hf.compress"
        )
    if getattr(model, "_device_mesh", None) is not None:
        raise NotImplementedError(
            "continuous_batching: tensor parallelism is not supported, got a model with a device mesh"
        )
    if not allocator.has_full_attention(text):
        raise NotImplementedError(
            f"continuous_batching: {type(text).__name__} has no full-attention layer, so nothing would be evicted"
        )
    if _cached(model) is not None:
        raise ValueError(
            "continuous_batching: expected a model without a cached engine, got one made before the block, which would "
            "not evict; call model.destroy_cached_continuous_batching_manager()"
        )


def _check_served(model: PreTrainedModel, policy: Policy) -> None:
    """Raise for policies that the engine cannot support."""
    layers = model.config.get_text_config().num_hidden_layers
    if policy.needs.stage:
        why = "evicts in a stage of its own between prompt and decode, which the engine cannot run"
    elif policy.needs.dense and not isinstance(policy, BudgetPolicy):
        why = "does not support pages, in which the engine keeps keys and values"
    elif policy.merge:
        why = "merges values, but the engine moves tokens by itself; use merge=False"
    elif policy.positions == "slots":
        why = "rotates keys at their slots, before the attention; use positions='original'"
    elif not policy.uniform_layers:
        why = "keeps different numbers of slots in different layers, but the engine has one block table for all layers"
    elif isinstance(policy, BudgetPolicy) and not isinstance(policy.budget, int):
        why = "needs a budget in tokens, an int, as in a PagedCache"
    else:
        check_observed("continuous_batching", policy)
        policy.check_equal_heads("continuous batching")
        for layer in range(layers):
            policy.check_cache(layer, layers)
        if isinstance(policy, QueryPolicy) and STORES_FIRST:
            raise NotImplementedError(
                "continuous_batching: policies that use queries need transformers < 5.24, because the engine of later "
                f"versions stores the keys before it has the queries, got {policy!r} in transformers "
                f"{transformers.__version__}; use a policy that scores keys, such as kvops.KeyDiff, or an older version"
            )
        return
    raise ValueError(f"continuous_batching: {policy!r} {why}")


def _hook(model: PreTrainedModel, batching: Batching) -> Any:
    """Return the block's `model.init_continuous_batching`."""
    make = getattr(model, _NAME)

    @functools.wraps(make)  # transformers may inspect its parameters
    def init_continuous_batching(
        generation_config: Any = None, continuous_batching_config: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        attention = model.config._attn_implementation
        known = _cached(model)
        if continuous_batching_config is None:
            given = model.generation_config if generation_config is None else generation_config
            continuous_batching_config = getattr(given, "continuous_batching_config", None)
        if continuous_batching_config is None:
            continuous_batching_config = transformers.ContinuousBatchingConfig()
        config = copy.copy(continuous_batching_config)
        config.auto_switch_to_flash = False
        manager = make(generation_config, config, *args, **kwargs)
        if manager is known:  # made earlier in this block
            return manager
        try:
            _check_settings(manager.continuous_batching_config)
            _let_evict(model, manager, batching)
        except BaseException:
            model.set_attn_implementation(attention)  # the manager may have changed it
            raise
        return manager

    return init_continuous_batching


def _check_settings(config: Any) -> None:
    """Raise ValueError for engine settings, as the engine has resolved them, that are not supported."""
    served = {
        "use_cuda_graph": (False, any(config.cuda_graph_booleans)),
        "use_async_batching": (False, bool(config.use_async_batching)),
        "varlen_compile_config": (None, config.varlen_compile_config),
        "decode_compile_config": (None, config.decode_compile_config),
        "cpu_offload_space": (0, config.cpu_offload_space),
    }
    for name, (expected, got) in served.items():
        if got != expected:
            raise ValueError(
                f"continuous_batching: {name} is not supported, because eviction runs in Python between the engine's "
                f"kernels: expected {expected}, got {got!r}"
            )


def _let_evict(model: PreTrainedModel, manager: Any, batching: Batching) -> None:
    """Make the manager create its engine with the block's allocator."""
    from . import allocator

    text, make = model.config.get_text_config(), manager._create_batch_processor
    manager._create_batch_processor = functools.partial(allocator.evicting_engine, make, text, batching)
