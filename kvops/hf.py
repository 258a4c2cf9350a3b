"""Hugging Face transformers: a cache that compresses itself, for an unmodified `model.generate`. ::

    import kvops.hf

    cache = kvops.hf.KVCache(model.config, kvops.KeyDiff(1024))
    model.generate(**inputs, past_key_values=cache)

Each full-attention layer holds a `kvops` method, whose rule evicts inside `update()`: the step's attention still reads
every key and value that was there, then only the kept ones are stored. transformers counts in two ways, and both stay
right: `get_seq_length()` is the logical length (positions, what a second turn still has to feed), `get_mask_sizes()`
says that the stored slots are the last ones before the query. All stored slots are older than the query, so the stock
causal masks are exact; and when a row's padding is evicted first, in slot order, what is left of it lies just where
the stock padding mask looks. That needs every row to keep the same number of slots in every layer (`fixed_budget`,
`uniform_layers`); methods that do not are refused with the reason.

The only module of kvops that imports transformers.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .cache import Method

MIN_TRANSFORMERS = "5.15.0"  # the oldest that the tests have run with; before, get_mask_sizes() and crop() differ

try:
    import transformers
    from packaging.version import Version
except ImportError:
    raise ImportError(
        f"kvops.hf needs transformers >= {MIN_TRANSFORMERS}, which is not installed: pip install -U transformers"
    ) from None
if Version(transformers.__version__) < Version(MIN_TRANSFORMERS):
    raise ImportError(
        f"kvops.hf needs transformers >= {MIN_TRANSFORMERS}, found {transformers.__version__}: "
        "pip install -U transformers"
    )

from transformers import PreTrainedConfig  # noqa: E402  (after the check of the version)
from transformers.cache_utils import DynamicCache, DynamicLayer  # noqa: E402

__all__ = ["KVCache", "LayerStats"]


class LayerStats(NamedTuple):
    """What one layer holds. Tokens are slots per head (padding included), bytes are those of the whole batch."""

    layer: int
    evicts: bool  # False: a layer of another kind (sliding window, ...), which keeps the class of transformers
    tokens_full: int  # tokens seen: what an uncompressed cache would hold
    tokens_kept: int
    bytes_full: int
    bytes_kept: int  # of the storage really allocated, not of the view


class EvictingLayer(DynamicLayer):
    """One layer's keys and values, [b, Hk, n, d], under the rule of a `kvops` method."""

    is_croppable = False  # what was evicted cannot come back, so a rollback may fail

    def __init__(self, method: Method, pads: Tensor | None):
        super().__init__()
        self.method = method
        self.pads = pads  # int32 [b] as the user gave them, before beam search repeats the rows

    def _mirror(self) -> None:
        """`keys` and `values` are what transformers reads; the method owns the tensors."""
        self.keys, self.values = self.method.k, self.method.v

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True
        if self.pads is not None:
            rows, given = key_states.shape[0], self.pads.numel()
            if rows % given:
                raise ValueError(f"KVCache: pads must have one entry per row of the batch ({rows}), got {given}")
            # generate() repeats each prompt for its beams and return sequences, in this order
            self.method.set_pads(self.pads.to(self.device).repeat_interleave(rows // given))

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        step = self.method.append(key_states, value_states)
        self._mirror()
        return step

    def get_seq_length(self) -> int:
        return self.method.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return len(self.method) + query_length, self.method.seen - len(self.method)

    def reset(self) -> None:
        self.method.reset()
        self._mirror()
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.is_initialized:
            self.method.reorder(beam_idx)
            self._mirror()

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.method.repeat_interleave(repeats)
            self._mirror()

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_initialized:
            self.method.select_rows(indices)
            self._mirror()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(
                f"KVCache.crop: tokens_to_remove must be 0 or negative (-2 removes 2 tokens), got {tokens_to_remove}"
            )
        if tokens_to_remove and self.is_initialized:
            self.method.crop(self.method.seen + tokens_to_remove)
            self._mirror()

    def __copy__(self) -> EvictingLayer:
        """A layer of its own that shares the tensors (crop makes views, it never writes)."""
        twin = EvictingLayer.__new__(EvictingLayer)
        twin.__dict__.update(self.__dict__, method=copy.copy(self.method))
        return twin


class KVCache(DynamicCache):
    """A cache for `past_key_values=` whose full-attention layers evict by `method`.

    Args:
        config: the model's config (`model.config`). It says which layers are "full_attention"; layers of other kinds
            (sliding window, ...) keep the class that transformers gives them.
        method: the rule and its settings, such as `kvops.LagKV(lag=128)` or `kvops.KeyDiff(1024)`. Each layer gets a
            fresh object with these settings; this one is not touched.
        attention_mask: int or bool [b, n], the mask of the first prompt, when its rows are padded on the left.
        pads: the same said shorter: how many pads each row starts with (b integers). The cache cannot see padding by
            itself: a padded batch without one of the two gives wrong text, because pads are scored and kept as tokens.

    Raises:
        TypeError: config is no transformers config, method no kvops method.
        ValueError: padding that is not on the left; `crop` of what was evicted (the cache stays as it was).
        NotImplementedError: what stock attention masks cannot express (see the module's text).
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        method: Method,
        *,
        attention_mask: Tensor | None = None,
        pads: Tensor | Sequence[int] | None = None,
    ):
        _check(config, method)
        pads = _pads(attention_mask, pads)
        if pads is not None and not method.fixed_budget:
            raise NotImplementedError(
                f"KVCache: {method!r} keeps more of a longer row than of a shorter one, so in a padded batch the rows "
                "would need masks of their own, which the attention of transformers does not take; run the rows one "
                "by one, or use a method with a budget in tokens, such as kvops.KeyDiff(1024)"
            )
        super().__init__(config=config)
        count = len(self.layers)
        self.layers = [
            EvictingLayer(method.fresh(i, count), pads) if type(layer) is DynamicLayer else layer
            for i, layer in enumerate(self.layers)
        ]
        if not any(isinstance(layer, EvictingLayer) for layer in self.layers):
            warnings.warn("KVCache: this model has no full-attention layer, so nothing is evicted", stacklevel=2)

    def crop(self, tokens_to_remove: int) -> None:
        before = [copy.copy(layer) for layer in self.layers]
        try:
            super().crop(tokens_to_remove)
        except Exception:
            self.layers = before
            raise

    def stats(self) -> list[LayerStats]:
        """Tokens and bytes per layer, full and kept; layers without keys and values (recurrent ones) are left out."""
        out = []
        for i, layer in enumerate(self.layers):
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if keys is None or keys.numel() == 0:
                continue
            seen, kept = layer.get_seq_length(), keys.shape[-2]
            storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in (keys, values)}
            per_token = (keys.nbytes + values.nbytes) // kept
            evicts = isinstance(layer, EvictingLayer)
            out.append(LayerStats(i, evicts, seen, kept, seen * per_token, sum(storages.values())))
        return out


def _check(config: PreTrainedConfig, method: Method) -> None:
    """Raises for what cannot work, whatever the batch."""
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"KVCache: config must be a transformers config (model.config), got {type(config).__name__}")
    if not isinstance(method, Method):
        got = f"the class {method.__name__}" if isinstance(method, type) else type(method).__name__
        raise TypeError(f"KVCache: method must be a kvops method object such as kvops.KeyDiff(1024), got {got}")
    if config.is_encoder_decoder:
        raise NotImplementedError("KVCache: encoder-decoder models need two caches and are not supported")
    if not method.uniform_layers:
        raise NotImplementedError(
            f"KVCache: {method!r} leaves the layers with different lengths, but transformers makes one attention mask "
            "for all of them"
        )
    if not method.attend_before_compress:
        raise NotImplementedError(
            "KVCache: attend_before_compress=False is not supported: transformers makes the mask of a step before the "
            "layers know what they keep of it"
        )


def _pads(attention_mask: Tensor | None, pads: Tensor | Sequence[int] | None) -> Tensor | None:
    """The pad counts, int32 [b] on the CPU, or None where there is no padding."""
    if attention_mask is not None:
        if pads is not None:
            raise ValueError("KVCache: give attention_mask or pads, not both")
        if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
            raise ValueError("KVCache: attention_mask must be a tensor [batch, tokens] of 0 and 1")
        mask = attention_mask.cpu() != 0
        if not (mask.cummax(1).values == mask).all() or not mask.any(1).all():
            raise ValueError("KVCache: attention_mask must be padded on the left (0s, then 1s): padding_side='left'")
        pads = (~mask).sum(1)
    if pads is None:
        return None
    pads = torch.as_tensor(pads, device="cpu")
    if pads.dim() != 1 or pads.numel() == 0 or pads.is_floating_point() or pads.dtype == torch.bool or (pads < 0).any():
        raise ValueError(f"KVCache: pads must be one count >= 0 per row of the batch, got {pads.tolist()}")
    return pads.to(torch.int32) if pads.any() else None
