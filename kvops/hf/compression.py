"""`compress(model, policy)` gives every call of a model a cache that evicts; `generate` makes one such call.

The module is not called `compress.py`, because that name would hide the function `kvops.hf.compress`.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.utils import GenerateOutput

from ..cache.base import Storage
from ..cache.memory import size, span
from ..methods import Policy
from .arguments import CACHE, by_name, given_cache
from .attention import own_attention, unwrap
from .cache import KVCache, check
from .generation import Lookahead, setting
from .inputs import passing_inputs
from .patches import install
from .requirements import for_model
from .turns import check_caching


class Compression:
    """Gives every call of a model a cache that evicts, while it is enabled. `compress` makes it.

    `with compress(...)` enables it for a block. `enable()` and `disable()` do the same without one, as notebooks and
    servers need it. It can be enabled again after it was disabled. `print` shows its `stats()`.

    Attributes:
        policy: The policy of the caches.
        storage: How they store keys and values; see `KVCache`.
    """

    def __init__(self, model: PreTrainedModel, policy: Policy, storage: Storage = "pre_rope"):
        install()  # before a block replaces the model's methods
        self.policy, self.storage = policy, storage
        self._model = model
        self._open = False
        self._outer: Compression | None = None  # the block around it, always an open one while this one is open
        self._within: frozenset[FrameType] = frozenset()  # generators that ran when it was enabled
        self._undo = ExitStack()  # what disable() has to undo
        self._here = threading.local()  # the last cache of each thread, freed when the thread ends
        self._last: KVCache | None = None  # the last cache of any thread

    def enable(self) -> Compression:
        """Let the model's calls evict until `disable`: what `with` does at the beginning of its block.

        Returns:
            The same object.

        Raises:
            RuntimeError: It is enabled already.
            ValueError: `use_attention` or `KVCache` raises it.
            NotImplementedError: `use_attention` or `KVCache` raises it.
        """
        with ExitStack() as undo:
            undo.enter_context(own_attention(self._model))
            KVCache(self._model.config, self.policy, storage=self.storage)  # raises now for what it does not support
            undo.enter_context(passing_inputs(self._model, self.policy))
            _enter(self)
            self._undo = undo.pop_all()
        return self

    def disable(self) -> None:
        """Let the model's calls be as before: what `with` does at the end of its block. Without effect if not enabled.

        `cache` and `stats()` stay readable.
        """
        if _leave(self):
            self._undo.close()

    def __enter__(self) -> Compression:
        return self.enable()

    def __exit__(self, *_: object) -> None:
        self.disable()

    def __repr__(self) -> str:
        return f"Compression({self.policy!r}, {'enabled' if self._open else 'disabled'}: {self.stats()})"

    def __str__(self) -> str:
        return self.stats()

    @property
    def cache(self) -> KVCache | None:
        """The cache of this thread's last call; None before the first call.

        In a thread that has made no call, it is the cache of the last call of any thread, so that the caller of a
        streamer's thread can find it.
        """
        return getattr(self._here, "cache", None) or self._last

    def stats(self) -> str:
        """Return a line of text about `cache`, for the layers that evict.

        It has the tokens kept and seen, the bytes held, the bytes of a full cache, and the most bytes held at any time.
        `cache.stats()` returns the numbers per layer.
        """
        cache = self.cache
        layers = [x for x in cache.stats() if x.evicts] if cache is not None else []
        if cache is None or not layers:
            return "no tokens yet"
        kept = span([x.tokens_kept for x in layers])
        seen = max(x.tokens_full for x in layers)
        held, full = sum(x.bytes_kept for x in layers), sum(x.bytes_full for x in layers)
        return (
            f"{kept} of {seen} tokens kept in {len(layers)} layers, {size(held)} held of {size(full)}, at most "
            f"{size(cache.peak_bytes)} at a time"
        )

    def _new_cache(self) -> KVCache:
        self._here.cache = self._last = None  # frees the last call's memory for this one
        return self._record(KVCache(self._model.config, self.policy, storage=self.storage))

    def _record(self, cache: KVCache) -> KVCache:
        self._here.cache = self._last = cache
        return cache


def compress(model: torch.nn.Module, policy: Policy | str, *, storage: Storage = "pre_rope") -> Compression:
    """Give every call of a model in the block a cache that evicts.

    ```python
    with kvops.hf.compress(model, kvops.SnapKV(1024)) as compressed:
        model.generate(**inputs)
    print(compressed)
    ```

    Without a block, for example in a notebook or a server:

    ```python
    compressed = kvops.hf.compress(model, "snapkv:budget=1024").enable()
    model.generate(**inputs)
    compressed.disable()
    ```

    In the block the model uses the library's attention (`use_attention`). Its calls get a cache as follows.

    - `model.generate`, from wherever it is called (a pipeline, a chat, a streamer's thread): each call gets a fresh
      `KVCache`, which takes the padding from `attention_mask`. With `kvops.LAQ`, `kvops.KVzip` and its like the stages
      run as in `kvops.hf.generate`.
    - A forward, `model(...)`: each call gets a fresh `KVCache` in place of the cache that transformers would make. The
      output returns it as `past_key_values`, to continue with. With `use_cache=False` there is no cache, and nothing to
      evict.
    - Either of them with a `KVCache` as `past_key_values` uses that one, whatever its policy: for example
      `compressed.cache` for the next turn of a conversation.
    - Any other cache raises, because it would hold everything. So do static and quantized caches requested by
      `cache_implementation`, and `generate` with `use_cache=False`.

    The block sees calls of the model itself, not calls of its parts (`model.model(...)`).

    Blocks nest: the inner block's policy applies until it ends, then the outer one's applies again. Several threads may
    have blocks open for one model, with different policies. A call belongs to the innermost block that its context
    (`contextvars`) has entered. asyncio tasks and `asyncio.to_thread` inherit the context, but a `threading.Thread`,
    such as the one that feeds a streamer, does not. A call whose context has entered no block therefore belongs to the
    model's open block, whoever entered it. If several blocks with different policies are open, the choice would be
    ambiguous, and the call raises. Start the thread with a copy of the context then:
    `Thread(target=contextvars.copy_context().run, args=(model.generate,), kwargs=inputs)`. Keep the block open until
    such a thread has begun to generate. The model keeps the library's attention until the call is done. Threads that
    call the model without compression at the same time need their own model, or `kvops.hf.generate` instead of the
    block. Generators share their caller's context. If several take turns, a call in one of them belongs to the block
    that this generator has entered.

    When the block ends, the model is as it was before, also after an exception. Inside the block `copy.deepcopy` and
    pickling of the model raise; copy it before.

    Args:
        model: A causal language model of transformers. PEFT or `torch.compile` may have wrapped it.
        policy: The policy of the caches, such as `kvops.SnapKV(1024)`, or a string for `kvops.policy`:
            "snapkv:budget=1024". A `kvops.RepeatPolicy` must have its words (`repeat_prompts`), because a block knows
            no tokenizer.
        storage: How the caches store keys and values, "int8" or "fp8" to round them; see `KVCache`.

    Returns:
        A `Compression` for `with`, or for `enable()` and `disable()`. It has the last call's `cache` and its `stats()`,
        also after the block.

    Raises:
        TypeError: `model` is not a transformers model, or `policy` is not a kvops policy or a string that names one.
        ValueError: The string names no policy; or on entering, if `use_attention` or `KVCache` raises it; or in a call,
            for another cache or none, before the model runs.
        NotImplementedError: The model is not supported; or on entering, if `use_attention` or `KVCache` raises it.
        RuntimeError: On entering, if it has been entered already. In a call, if the block that it belongs to is
            ambiguous.
    """
    return Compression(*_checked("compress", model, policy), storage)


def generate(
    model: torch.nn.Module,
    policy: Policy | str,
    input_ids: Tensor | None = None,
    *,
    inputs_embeds: Tensor | None = None,
    attention_mask: Tensor | None = None,
    logits_processor: Sequence[LogitsProcessor] = (),
    storage: Storage = "pre_rope",
    **kwargs: Any,
) -> GenerateOutput | Tensor:
    """Call `model.generate` once with a `KVCache` and the library's attention, without a block.

    Other calls of the model do not see the cache.

    With `kvops.LAQ` the call runs the stages of the paper (LAQ, Sec. 4):

    1. The prefill, with the whole cache, which gives the first token.
    2. The lookahead: stage 1 prunes a copy of the cache, over which `steps` tokens are decoded greedily. Their queries
       are kept. A row that ends stops early.
    3. The eviction from the whole cache, by these queries.
    4. The decode.

    With a `kvops.RepeatPolicy` it runs the prefill, `repeat` and the decode. The prompts must be `input_ids`. Its words
    are the policy's, or those that `repeat_prompts` makes from `tokenizer`.

    Any number of threads may generate with one model. The model keeps the library's attention until the last of them is
    done. Calls that do not go through this function must not run while the attention is being switched. If there are
    any, call `use_attention` once beforehand.

    Args:
        model: A causal language model of transformers. PEFT or `torch.compile` may have wrapped it.
        policy: The policy of the cache, such as `kvops.SnapKV(1024)` or "snapkv:budget=1024".
        input_ids: int64 [b, n], the left-padded prompts.
        inputs_embeds: [b, n, hidden], the prompts' embeddings, in place of input_ids.
        attention_mask: int64 [b, n], 0 for padding; None: no padding.
        logits_processor: Logits processors of transformers.
        storage: As in `compress`.
        kwargs: Further arguments of `model.generate`, except past_key_values. With `tokenizer`, which `model.generate`
            takes too, a `kvops.RepeatPolicy` gets its words if it has none.

    Returns:
        What `model.generate` returns. With `return_dict_in_generate=True` its `past_key_values` is the cache. After LAQ
        the cache's `stages` tell how many bytes all caches held after each stage; the largest is the peak.

    Raises:
        ValueError: past_key_values is given, or not exactly one of input_ids and inputs_embeds, or `compress` would
            raise it.
        TypeError: As in `compress`.
        NotImplementedError: As in `compress`.
    """
    if not {"past_key_values", "cache"}.isdisjoint(kwargs):
        raise ValueError(
            "generate: expected no past_key_values (the cache is made from `policy`), got one; to use a cache of your "
            "own, call model.generate"
        )
    prompts = input_ids if inputs_embeds is None else inputs_embeds
    if prompts is None or (input_ids is not None and inputs_embeds is not None):
        got = "neither" if prompts is None else "both"
        raise ValueError(f"generate: expected one of input_ids and inputs_embeds, got {got}")
    if attention_mask is None:
        attention_mask = torch.ones(prompts.shape[:2], dtype=torch.int64, device=prompts.device)
    call = {
        "input_ids" if inputs_embeds is None else "inputs_embeds": prompts,
        "attention_mask": attention_mask,
        "logits_processor": LogitsProcessorList(logits_processor),
        **kwargs,
    }
    inner, policy = _checked("generate", model, policy, kwargs.get("tokenizer"))
    return _generate(Compression(inner, policy, storage), cast(Any, model).generate, call)


def _checked(
    who: str, model: torch.nn.Module, policy: Policy | str, tokenizer: Any = None
) -> tuple[PreTrainedModel, Policy]:
    """Return the unwrapped model and the policy, after checking that a cache supports both."""
    inner = unwrap(who, model)
    return inner, for_model(check(who, inner.config, policy), inner, tokenizer)


# ---- the block that a call belongs to ----


class _Hooked(NamedTuple):
    """A model's open blocks, in the order of entry, and the attributes that the hooks replaced."""

    blocks: list[Compression]
    before: dict[str, Any]


_hooked: dict[PreTrainedModel, _Hooked] = {}
_hooking = threading.Lock()
#: The innermost block of each model that this context has entered.
_entered: ContextVar[Mapping[PreTrainedModel, Compression]] = ContextVar("kvops.hf.compress", default={})  # noqa: B039


def _running_generators() -> frozenset[FrameType]:
    """Return the frames of the generators and coroutines that run now."""
    suspends = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    frames, frame = [], inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_flags & suspends:
            frames.append(frame)
        frame = frame.f_back
    return frozenset(frames)


def _innermost(model: PreTrainedModel) -> Compression | None:
    """Return the innermost open block that this context has entered."""
    block = _entered.get().get(model)
    while block is not None and not block._open:  # a copy of the context, or a generator closed it in another one
        block = block._outer
    return block


def _enter(block: Compression) -> None:
    model, outer, within = block._model, _innermost(block._model), _running_generators()
    with _hooking:
        if block._open:
            raise RuntimeError(
                "compress: expected a Compression that is not enabled, got one that is, by enable() or by a `with` "
                "block; call disable() first, or make another one with compress(model, policy)"
            )
        block._open, block._outer, block._within = True, outer, within
        if model not in _hooked:
            hooks = _hooks(model)
            _hooked[model] = _Hooked([], {name: vars(model)[name] for name in hooks if name in vars(model)})
            vars(model).update(hooks)
        _hooked[model].blocks.append(block)
    _entered.set({**_entered.get(), model: block})


def _leave(block: Compression) -> bool:
    """End a block. Return whether it was open."""
    model = block._model
    with _hooking:
        if not block._open:
            return False
        block._open, block._within = False, frozenset()
        blocks, before = _hooked[model]
        blocks.remove(block)
        for inner in blocks:
            if inner._outer is block:
                inner._outer = block._outer
        if not blocks:
            del _hooked[model]
            for name in _HOOKS:
                vars(model).pop(name, None)
            vars(model).update(before)
    entered, outer = dict(_entered.get()), _innermost(model)
    if entered.pop(model, None) is not None:
        _entered.set(entered if outer is None else {**entered, model: outer})
    return True


def _block(model: PreTrainedModel) -> Compression | None:
    """Return the block that a call belongs to; None if all have ended."""
    if (block := _innermost(model)) is not None:
        running, outer = _running_generators() if block._outer else frozenset(), block._outer
        while outer is not None:
            if running & outer._within - block._within:  # generators take turns: another one has entered `block`
                block = outer
            outer = outer._outer
        return block
    with _hooking:
        blocks = list(_hooked[model].blocks) if model in _hooked else []
    around = {id(x._outer) for x in blocks}
    inner = [x for x in blocks if id(x) not in around]
    if any(x.policy != inner[-1].policy for x in inner):
        raise RuntimeError(
            "compress: this thread has entered no block, so it expected all open blocks to have the same policy, got "
            f"{', '.join(repr(x.policy) for x in inner)}; enter a block in this thread, or start the thread with a "
            "copy of the block's context: Thread(target=contextvars.copy_context().run, args=(model.generate,))"
        )
    return inner[-1] if inner else None


# ---- the model's methods in a block ----

# Attributes that the model gets while a block is open. Hooks of torch would not work: PEFT calls `forward` itself, and
# compiled models ignore hooks that are added later.
_METHODS = ("generate", "forward", "init_continuous_batching")
_HOOKS = ("_kvops_uncopyable", *_METHODS)


class _Uncopyable:
    """Refuses `copy.deepcopy` and `pickle` of a model that has hooks, which call the original."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise RuntimeError(
            "compress: expected no copy.deepcopy or pickle of the model inside the block, because the copy would run "
            "the original's weights; copy the model before the block"
        )


def _hooks(model: PreTrainedModel) -> dict[str, Any]:
    displaced = {name: getattr(model, name) for name in _METHODS if hasattr(model, name)}

    def generate(*args: Any, **kwargs: Any) -> Any:
        if isinstance(given_cache(kwargs), KVCache):  # a further turn, or a call of `kvops.hf.generate`
            return displaced["generate"](*args, **kwargs)
        block = _block(model)
        if block is None:
            raise RuntimeError(
                "compress: expected an open block, got a call of its `model.generate` after it had ended; keep the "
                "block open until the thread that generates is done"
            )
        return _generate(block, displaced["generate"], by_name(displaced["generate"], args, kwargs))

    def forward(*args: Any, **kwargs: Any) -> Any:
        if isinstance(given_cache(kwargs), KVCache):  # a step of generate, or of the caller's own loop
            return displaced["forward"](*args, **kwargs)
        return _forward(model, displaced["forward"], args, kwargs)

    def init_continuous_batching(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "compress: this block does not evict from the pages of continuous batching; use model.generate, or "
            "kvops.hf.continuous_batching instead of the block"
        )

    # Excluded from compiled graphs, which cannot create a cache per call. What it calls is compiled as before.
    hooks = generate, torch.compiler.disable(forward, recursive=False), init_continuous_batching
    methods = {
        name: functools.wraps(displaced[name])(hook)  # transformers inspects their parameters
        for name, hook in zip(_METHODS, hooks)
        if name in displaced
    }
    return {_HOOKS[0]: _Uncopyable(), **methods}


def _generate(block: Compression, function: Callable[..., Any], call: dict[str, Any]) -> Any:
    model = block._model
    with own_attention(model), passing_inputs(model, block.policy):  # the block may end before the call does
        _check_settings(model, call)
        cache = block._new_cache()
        if block.policy.needs.stage:
            cache._staged = True
            processors = call.get("logits_processor") or ()
            call["logits_processor"] = LogitsProcessorList([*processors, Lookahead(model, cache, call)])
        try:
            return function(**{**call, CACHE: cache})
        finally:
            block._record(cache)  # again, because guidance by a second prompt makes another cache meanwhile


def _check_settings(model: PreTrainedModel, call: dict[str, Any]) -> None:
    """Raise for a call of `model.generate` with another cache or none."""
    kind = setting(model, call, "cache_implementation")
    if kind not in (None, "hybrid"):  # transformers ignores "hybrid" too
        raise ValueError(
            f"kvops.hf: expected no cache_implementation (the cache is made from the policy), got {kind!r}; if "
            "it comes from model.generation_config, pass cache_implementation=None"
        )
    _check_no_other(call)


def _forward(
    model: PreTrainedModel, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    call = by_name(function, args, kwargs)
    if isinstance(given_cache(call), KVCache):
        return function(**call)
    _check_no_other(call)
    use_cache = call.get("use_cache")
    if use_cache is None:
        use_cache = getattr(model.config.get_text_config(decoder=True), "use_cache", True)
    if use_cache and (block := _block(model)) is not None:
        check_caching("compress", model)
        call[CACHE] = block._new_cache()  # the library's attention takes the padding from the mask
    return function(**call)


def _check_no_other(call: dict[str, Any]) -> None:
    """Raise for a cache that is not a KVCache."""
    if (cache := given_cache(call)) is not None:
        raise ValueError(
            "compress: expected no past_key_values (the cache is made from the policy), or a kvops.hf.KVCache to "
            f"continue with, got {type(cache).__name__} (adapters by prefix tuning bring a cache of their own, and are "
            "not supported)"
        )
