"""`with continuous_batching(model, policy)`: eviction in transformers' engine for many requests.

Not called `continuous_batching.py`: `kvops.hf.continuous_batching` is the function, which a module of that name would
hide. What is the engine's is in `allocator.py`, which a transformers without that engine cannot import.
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
from ..methods.base import BudgetPolicy, DecodePolicy, Policy, check_policy
from ..methods.laq import LAQ
from ..methods.queries import QueryPolicy
from ..methods.table import policy as policy_of
from .attention import unwrap
from .cache import check

if TYPE_CHECKING:
    from .allocator import Batching

MIN_TRANSFORMERS = "5.18.0"  # the oldest whose engine has a registry of allocators
MANY = 2**40  # tokens, more than any budget
ATTENTIONS = ("sdpa", "eager", "paged|eager")
_NAME = "init_continuous_batching"  # what every way to an engine goes through

_open: set[PreTrainedModel] = set()
_lock = threading.Lock()


@contextmanager
def continuous_batching(model: torch.nn.Module, policy: Policy | str) -> Iterator[Batching]:
    """A block in which the model's continuous batching evicts. ::

        with kvops.hf.continuous_batching(model, kvops.KeyDiff(1024, buffer=256)) as batching:
            outputs = model.generate_batch(prompts, generation_config=...)
        print(batching.stats())

    `model.generate_batch`, `continuous_batching_context_manager` and `init_continuous_batching` make engines whose
    full-attention layers evict, for as long as they live; other layers are left alone. When a step ends, each request
    that holds more than `policy.held` says is evicted, and its blocks go back to the engine's pool, for other requests.

    With `kvops.LagKV`, `kvops.Full` and buffer=1 a request's text is the one that it has alone in a
    `kvops.hf.KVCache` with the same chunks. A longer buffer a KVCache empties with each chunk of a prompt; `held`,
    which knows nothing of chunks, when it is full.

    In the block an engine keeps the model's attention (as `auto_switch_to_flash=False` does) and shares no prefixes.
    An engine that transformers caches (`persistent_manager=True`) is destroyed when the block ends.

    Args:
        model: a causal language model of transformers with the attention "sdpa" or "eager", which PEFT or
            `torch.compile` may have wrapped.
        policy: one that holds by the number of a request's tokens alone, such as kvops.KeyDiff(1024),
            kvops.LagKV(lag=128, ratio=0.25), kvops.StreamingLLM(1024, positions="original"); or one that looks at
            queries, such as kvops.SnapKV(1024), kvops.H2O(1024), which evicts prompts and decode alike, by its buffer
            or 1/16 of the budget; or how `kvops.policy` makes it: "keydiff:budget=1024".

    Yields:
        A `Batching`, which counts what was evicted.

    Raises:
        ImportError: transformers has no such engine.
        TypeError: model is no transformers model, policy no kvops policy.
        ValueError: a policy that cannot be served; CUDA graphs, compiled steps, asynchronous batching, offloading to
            the CPU, when the engine is made; an engine that is cached already.
        NotImplementedError: models and attentions that are not served.
        RuntimeError: the engine is another than this was written for; a block of the model is open already.

    An error while a step evicts ends the engine, and all its requests fail with it. In any case the model makes engines
    afterwards as it did before.
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
            "continuous_batching: the engine of the installed transformers is another than the one this was written "
            f"for, expected its allocators, got {error} in transformers {transformers.__version__}"
        ) from error
    allocator.check_hooks()
    inner = unwrap("continuous_batching", model)
    if isinstance(policy, str):
        policy = policy_of(policy)
    check_policy("continuous_batching", policy)
    _check_model(inner, policy)
    _check_served(inner, policy)
    batching = allocator.Batching(policy)
    with _lock:
        if inner in _open:
            raise RuntimeError("continuous_batching: expected no other open block of the model, got one")
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
        if _cached(inner) is not None:  # one of the block's, as others are refused in it
            cast(Any, inner).destroy_cached_continuous_batching_manager()


def _cached(model: PreTrainedModel) -> Any:
    return getattr(model, "_cached_continuous_batching_manager", None)


def _check_model(model: PreTrainedModel, policy: Policy) -> None:
    """Raises for a model that cannot be served."""
    from . import allocator

    check(model.config, policy)
    text = model.config.get_text_config()
    if text._attn_implementation not in ATTENTIONS:
        raise NotImplementedError(
            "continuous_batching: only the attentions 'sdpa' and 'eager' are served, got "
            f"{text._attn_implementation!r}; call model.set_attn_implementation('sdpa')"
        )
    if getattr(text, "num_kv_shared_layers", None):
        raise NotImplementedError(
            f"continuous_batching: layers of {type(text).__name__} share keys, which is served in a KVCache only"
        )
    if getattr(model, "_device_mesh", None) is not None:
        raise NotImplementedError("continuous_batching: tensor parallelism is not served, got a model with a mesh")
    if not allocator.has_full_attention(text):
        raise NotImplementedError(
            f"continuous_batching: {type(text).__name__} has no full-attention layer, so nothing would be evicted"
        )
    if _cached(model) is not None:
        raise ValueError(
            "continuous_batching: the model has an engine in its cache, made before the block, which would hold "
            "everything; call model.destroy_cached_continuous_batching_manager()"
        )


def _check_served(model: PreTrainedModel, policy: Policy) -> None:
    """Raises for a policy that the engine cannot serve."""
    layers, queries = model.config.get_text_config().num_hidden_layers, isinstance(policy, QueryPolicy)
    if isinstance(policy, LAQ):
        why = "drafts an answer before it evicts, which the engine does not"
    elif not policy.paged and not isinstance(policy, BudgetPolicy):
        why = "takes no pages, which the engine keeps keys and values in"
    elif policy.positions == "slots":
        why = "rotates keys at their slots, before the attention; use positions='original'"
    elif not policy.uniform_layers:
        why = "leaves the layers with different lengths, but the engine has one block table for all of them"
    elif isinstance(policy, BudgetPolicy) and not isinstance(policy.budget, int):
        why = "needs a budget in tokens, an int, as blocks are counted without a look at the prompt"
    elif queries and isinstance(policy, DecodePolicy) and policy.buffer is None:
        why = "keeps all of decode; use a buffer, as the engine evicts prompts and decode alike"
    elif not queries and len({policy.held(MANY, prompt) for prompt in (1, MANY, 2 * MANY)}) > 1:
        why = "holds what depends on the prompt's length, which the engine tells no allocator; use a buffer"
    else:
        check_observed("continuous_batching", policy)
        for layer in range(layers):
            policy.check_cache(layer, layers)
        return
    raise ValueError(f"continuous_batching: {policy!r} {why}")


def _hook(model: PreTrainedModel, batching: Batching) -> Any:
    """`model.init_continuous_batching`, as it is in the block."""
    make = getattr(model, _NAME)

    @functools.wraps(make)  # transformers may look at its parameters
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
        if manager is known:  # of this block
            return manager
        try:
            _check_settings(manager.continuous_batching_config)
            _let_evict(model, manager, batching)
        except BaseException:
            model.set_attn_implementation(attention)  # which the manager may have changed
            raise
        return manager

    return init_continuous_batching


def _check_settings(config: Any) -> None:
    """Raises for settings of the engine, as it has resolved them, that are not served."""
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
                f"continuous_batching: {name} is not served, as eviction is a part of the engine's steps in Python, "
                f"expected {expected}, got {got!r}"
            )


def _let_evict(model: PreTrainedModel, manager: Any, batching: Batching) -> None:
    """Has the manager make its engine with the block's allocator."""
    from . import allocator

    text, make = model.config.get_text_config(), manager._create_batch_processor
    manager._create_batch_processor = functools.partial(allocator.evicting_engine, make, text, batching)
