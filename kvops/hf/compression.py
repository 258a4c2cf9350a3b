"""`with compress(model, policy)`: every call of a model gets a cache that evicts. And `generate`, a single such call.

Not called `compress.py`: `kvops.hf.compress` is the function, which a module of that name would hide.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.utils import GenerateOutput

from ..methods import LAQ, Policy
from ..methods.table import policy as policy_of
from .attention import own_attention, unwrap
from .cache import KVCache, check
from .generation import Lookahead, setting


class Compression:
    """What `compress` yields: the caches of its calls.

    Attributes:
        policy: of the caches.
    """

    def __init__(self, model: PreTrainedModel, policy: Policy, outer: Compression | None):
        self.policy = policy
        self._model, self._outer = model, outer
        self._open = True
        self._here = threading.local()  # the last cache of each thread, which goes with its thread
        self._last: KVCache | None = None  # of all threads

    @property
    def cache(self) -> KVCache | None:
        """The cache of this thread's last call; of the last call of any thread, if this one has made none, so that the
        caller of a streamer's thread finds it. None before the first call."""
        return getattr(self._here, "cache", None) or self._last

    def stats(self) -> str:
        """A line about `cache`: the tokens kept and seen, the bytes held, those of a full cache, and the most that were
        held at a time, of the layers that evict. `cache.stats()` has the numbers of each layer."""
        cache = self.cache
        layers = [x for x in cache.stats() if x.evicts] if cache is not None else []
        if cache is None or not layers:
            return "no tokens yet"
        fewest, most = (f(x.tokens_kept for x in layers) for f in (min, max))
        kept = f"{fewest}" if fewest == most else f"{fewest} to {most}"
        seen = max(x.tokens_full for x in layers)
        held, full = sum(x.bytes_kept for x in layers), sum(x.bytes_full for x in layers)
        return (
            f"{kept} of {seen} tokens kept in {len(layers)} layers, {_size(held)} held of {_size(full)}, at most "
            f"{_size(cache.peak_bytes)} at a time"
        )

    def _new_cache(self, attention_mask: Tensor | None = None) -> KVCache:
        self._here.cache = self._last = None  # the memory of the last call is free for this one
        return self._record(KVCache(self._model.config, self.policy, attention_mask=attention_mask))

    def _record(self, cache: KVCache) -> KVCache:
        self._here.cache = self._last = cache
        return cache


@contextmanager
def compress(model: torch.nn.Module, policy: Policy | str) -> Iterator[Compression]:
    """A block in which every call of the model gets a cache that evicts. ::

        with kvops.hf.compress(model, kvops.SnapKV(1024)) as compressed:
            model.generate(**inputs)
        print(compressed.stats())

    The model has the library's attention in the block (`use_attention`). Its calls get a cache as follows.

    - `model.generate`, from wherever it is called (a pipeline, a chat, a streamer's thread): a fresh `KVCache` for each
      call, which knows the padding of its `attention_mask`. With `kvops.LAQ` the stages run as in
      `kvops.hf.generate`.
    - A forward, `model(...)`: a fresh `KVCache`, in the place of the cache that transformers would make. It is in the
      output's `past_key_values`, to go on with. With `use_cache=False` nothing is held, and there is nothing to evict.
    - Either of them with a `KVCache` as `past_key_values` goes on with that one, whatever its policy, such as
      `compressed.cache` for the next turn of a conversation.
    - Any other cache, static and quantized ones that `cache_implementation` asks for, and `generate` with
      `use_cache=False` are refused, because they would hold everything.

    Only calls of the model itself are seen, not those of its parts (`model.model(...)`).

    Blocks nest: the inner one's policy holds in it, then the outer one's again. They may be open in several threads,
    with several policies, for one model. A call belongs to the innermost block that its context (`contextvars`) has
    entered. It is a context variable rather than a thread-local because tasks of asyncio and `asyncio.to_thread`
    inherit it. A `threading.Thread`, such as the one that feeds a streamer, does not. So a call whose context has
    entered no block belongs to the open block of the model, whoever has entered it. If several with different policies
    are open, nothing says which one is meant, and the call raises. Start the thread with the context then:
    `Thread(target=contextvars.copy_context().run, args=(model.generate,), kwargs=inputs)`. Keep the block open until
    such a thread has begun to generate; the attention stays the library's until it is done. Threads that are to call
    the model without compression at the same time need a model of their own, or `kvops.hf.generate` in place of the
    block.

    Args:
        model: a causal language model of transformers, which PEFT or `torch.compile` may have wrapped.
        policy: the rule of the caches, such as kvops.SnapKV(1024), or how `kvops.policy` makes it:
            "snapkv:budget=1024".

    Yields:
        A `Compression`, with the last call's `cache` and its `stats()`. It can be read after the block too.

    Raises:
        TypeError: model is no transformers model, policy no kvops policy.
        ValueError, NotImplementedError: what `use_attention` and `KVCache` refuse, on entering; what is said above, in
            the call, before the model runs.
        RuntimeError: which block a call belongs to is not known.

    In any case the model is afterwards as it was before.
    """
    model, policy = _checked("compress", model, policy)
    with own_attention(model):
        KVCache(model.config, policy)  # what it refuses, it refuses now
        block = Compression(model, policy, _innermost(model))
        _enter(block)
        try:
            yield block
        finally:
            _leave(block)


def generate(
    model: torch.nn.Module,
    policy: Policy | str,
    input_ids: Tensor | None = None,
    *,
    inputs_embeds: Tensor | None = None,
    attention_mask: Tensor | None = None,
    logits_processor: Sequence[LogitsProcessor] = (),
    **kwargs: Any,
) -> GenerateOutput | Tensor:
    """`model.generate` with a `KVCache` of `policy` and the library's attention: one call as `compress` makes it, which
    no other call of the model sees.

    With `kvops.LAQ` it runs the stages of the paper: the prefill with its whole cache, which gives the first token; a
    draft cache of stage 1, over which `steps` lookahead tokens are decoded greedily, keeping their queries (a row that
    comes to its end stops early); the eviction of the whole cache by these queries; then the decode.

    Any number of threads may generate with one model. Its attention is the library's until the last of them is done,
    which other calls of the model must not meet halfway: if there are any, call `use_attention` before, once.

    Args:
        model: a causal language model of transformers, which PEFT or `torch.compile` may have wrapped.
        policy: the rule of the cache, such as kvops.SnapKV(1024), or "snapkv:budget=1024".
        input_ids: int64 [b, n], the prompts, padded on the left.
        inputs_embeds: [b, n, hidden], the prompts' embeddings, in the place of input_ids.
        attention_mask: int [b, n]; None: no padding.
        logits_processor: of transformers.
        kwargs: further arguments of `model.generate`, but for past_key_values.

    Returns:
        What `model.generate` returns. With `return_dict_in_generate=True` the cache is its `past_key_values`; after LAQ
        the cache's `stages` say how many bytes all caches held after each stage, the largest of which is the peak.

    Raises:
        ValueError: past_key_values is given; not just one of input_ids and inputs_embeds; or what `compress` refuses.
        TypeError, NotImplementedError: what `compress` refuses.

    Source: LAQ, Sec. 4.
    """
    if "past_key_values" in kwargs:
        raise ValueError("generate: expected no past_key_values (the cache is made from `policy`), got one")
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
    inner, policy = _checked("generate", model, policy)
    return _generate(Compression(inner, policy, None), cast(Any, model).generate, call)


def _checked(who: str, model: torch.nn.Module, policy: Policy | str) -> tuple[PreTrainedModel, Policy]:
    """The model out of its wrappers, and the policy, if there can be a cache of both."""
    if isinstance(policy, str):
        policy = policy_of(policy)
    inner = unwrap(who, model)
    check(inner.config, policy)
    return inner, policy


# ---- which block a call belongs to ----


class _Hooked(NamedTuple):
    """A model's open blocks, in the order in which they were entered, and what the hooks have displaced in it."""

    blocks: list[Compression]
    before: dict[str, Any]


_hooked: dict[PreTrainedModel, _Hooked] = {}
_hooking = threading.Lock()
#: The innermost block of each model that this context has entered.
_entered: ContextVar[Mapping[PreTrainedModel, Compression]] = ContextVar("kvops.hf.compress", default={})  # noqa: B039


def _innermost(model: PreTrainedModel) -> Compression | None:
    """The innermost open block that this context has entered."""
    block = _entered.get().get(model)
    while block is not None and not block._open:  # the context is a copy, or a generator has left it in another
        block = block._outer
    return block


def _enter(block: Compression) -> None:
    model = block._model
    with _hooking:
        if model not in _hooked:
            hooks = _hooks(model)
            _hooked[model] = _Hooked([], {name: vars(model)[name] for name in hooks if name in vars(model)})
            vars(model).update(hooks)
        _hooked[model].blocks.append(block)
    _entered.set({**_entered.get(), model: block})


def _leave(block: Compression) -> None:
    model = block._model
    with _hooking:
        block._open = False
        blocks, before = _hooked[model]
        blocks.remove(block)
        if not blocks:
            del _hooked[model]
            for name in _HOOKS:
                vars(model).pop(name, None)
            vars(model).update(before)
    entered, outer = dict(_entered.get()), _innermost(model)
    if entered.pop(model, None) is not None:
        _entered.set(entered if outer is None else {**entered, model: outer})


def _block(model: PreTrainedModel) -> Compression | None:
    """The block that a call belongs to; None: all have ended."""
    if (block := _innermost(model)) is not None:
        return block
    with _hooking:
        blocks = list(_hooked[model].blocks) if model in _hooked else []
    outer = {id(x._outer) for x in blocks}
    inner = [x for x in blocks if id(x) not in outer]
    if any(x.policy != inner[-1].policy for x in inner):
        raise RuntimeError(
            "compress: this thread has entered no block, and expected that those of the other threads have one policy, "
            f"got {', '.join(repr(x.policy) for x in inner)}; enter a block in this thread, or start it with the "
            "context of the one that has: Thread(target=contextvars.copy_context().run, args=(model.generate,))"
        )
    return inner[-1] if inner else None


# ---- what the calls of the model are in a block ----

# Attributes of the model while a block is open. Hooks of torch would not do: PEFT calls `forward` itself, and compiled
# models do not look at hooks that came later.
_HOOKS = ("generate", "forward", "init_continuous_batching")


def _hooks(model: PreTrainedModel) -> dict[str, Callable[..., Any]]:
    displaced = {name: getattr(model, name) for name in _HOOKS if hasattr(model, name)}

    def generate(*args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("past_key_values"), KVCache):  # the next turn, or a call of `kvops.hf.generate`
            return displaced["generate"](*args, **kwargs)
        block = _block(model)
        if block is None:
            raise RuntimeError(
                "compress: expected an open block, but it had ended when the `model.generate` that was taken from it "
                "was called; keep it open until the thread that generates is done"
            )
        return _generate(block, displaced["generate"], _by_name(displaced["generate"], args, kwargs))

    def forward(*args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("past_key_values"), KVCache):  # a step of generate, or of a loop of one's own
            return displaced["forward"](*args, **kwargs)
        return _forward(model, displaced["forward"], args, kwargs)

    def init_continuous_batching(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "compress: continuous batching keeps its keys in pages that nothing is evicted from here; use "
            "model.generate, or kvops.hf.continuous_batching in the place of the block"
        )

    # Left out of compiled graphs: a new cache in every call is none. What it calls is compiled as before.
    hooks = generate, torch.compiler.disable(forward, recursive=False), init_continuous_batching
    return {
        name: functools.wraps(displaced[name])(hook)  # transformers looks at their parameters
        for name, hook in zip(_HOOKS, hooks)
        if name in displaced
    }


def _generate(block: Compression, function: Callable[..., Any], call: dict[str, Any]) -> Any:
    model = block._model
    with own_attention(model):  # which refuses models; and the block may end before the call
        _check_settings(model, call)
        mask = call.get("attention_mask")
        cache = block._new_cache(mask)
        if isinstance(block.policy, LAQ):
            cache._staged = True
            processors = call.get("logits_processor") or ()
            call["logits_processor"] = LogitsProcessorList([*processors, Lookahead(model, cache, mask, call)])
        try:
            return function(**{**call, "past_key_values": cache})
        finally:
            block._record(cache)  # guidance by a second prompt has a cache of its own


def _check_settings(model: PreTrainedModel, call: dict[str, Any]) -> None:
    """Raises for a call of `model.generate` with another cache, or none."""
    kind = setting(model, call, "cache_implementation")
    if kind not in (None, "hybrid"):  # "hybrid" transformers does not heed either
        raise ValueError(
            f"kvops.hf: expected no cache_implementation (the cache is made from the policy), got {kind!r}; if "
            "it comes from model.generation_config, pass cache_implementation=None"
        )
    if setting(model, call, "use_cache") is False:
        raise ValueError(
            "kvops.hf: expected use_cache=True, got False: without a cache there is nothing to evict; if it comes from "
            "model.generation_config, pass use_cache=True"
        )
    _check_no_other(call)


def _forward(
    model: PreTrainedModel, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    call = _by_name(function, args, kwargs)
    if isinstance(call.get("past_key_values"), KVCache):
        return function(**call)
    _check_no_other(call)
    use_cache = call.get("use_cache")
    if use_cache is None:
        use_cache = getattr(model.config.get_text_config(decoder=True), "use_cache", True)
    if use_cache and (block := _block(model)) is not None:
        call["past_key_values"] = block._new_cache()  # the library's attention takes the padding from the mask
    return function(**call)


def _check_no_other(call: dict[str, Any]) -> None:
    """Raises for a cache that is none of the library's."""
    if (cache := call.get("past_key_values")) is not None:
        raise ValueError(
            "compress: expected no past_key_values (the cache is made from the policy), or a kvops.hf.KVCache to go on "
            f"with, got {type(cache).__name__}"
        )


def _by_name(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, all by name."""
    if not args:
        return dict(kwargs)
    signature = inspect.signature(function)
    signature.bind_partial(*args, **kwargs)  # a TypeError if there are too many, or twice the same
    return {**dict(zip(signature.parameters, args)), **kwargs}


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
