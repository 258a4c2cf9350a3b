"""Texts that hide a passkey, for the demo and the experiments: the prompts, the model that reads them, and caches that
are read once and cut in many ways."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from .. import hf
from ..eval.reader import Prefill, Reader
from ..eval.stream import CacheSize
from ..methods.queries import RecordQueries
from . import MODEL, TEXT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Ids = np.ndarray[Any, np.dtype[np.int64]]


def _training() -> Any:
    """Return the module beside the model that made its training texts. The prompts come from the same functions."""
    spec = importlib.util.spec_from_file_location("passkey_task", MODEL / "passkey_task.py")
    assert spec and spec.loader
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


_training_texts = _training()
QUESTION, encode, decode = _training_texts.QUESTION, _training_texts.encode, _training_texts.decode


def load_model(folder: Path = MODEL, device: str = "cpu", dtype: str = "auto") -> PreTrainedModel:
    """Load a model with kvops' attention."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return hf.use_attention(model.eval().to(device))


# ---- prompts ----

DEPTHS = 11  # passkeys at 0 %, 10 %, ... 100 % of the context
BATCH = 11  # prompts per batch


@dataclass
class Prompt:
    ids: Ids  # [context]
    digits: str
    start: int  # position of the first digit
    depth: float


def make_prompts(count: int, context: int, digits: int) -> list[Prompt]:
    """Return contexts of exactly `context` tokens with a passkey of `digits` digits each, the same in every run."""
    rng, text = np.random.default_rng([0, context, digits]), np.fromfile(TEXT, dtype=np.uint8).astype(np.int64)

    def piece(rng: np.random.Generator, n: int) -> Ids:
        start = int(rng.integers(0, len(text) - n - 1))
        return text[start : start + n]

    haystack = SimpleNamespace(slice=piece)
    depths = [float(x) for x in np.linspace(0, 1, min(DEPTHS, count))] if count > 1 else [0.3]
    prompts = []
    for i in range(count):
        depth, key = depths[i % len(depths)], _training_texts.rand_digits(rng, digits)
        needle = _training_texts.needle_text(key)
        ids, (start,) = _training_texts.context_with_needles(rng, haystack, context, [needle], [depth])
        prompts.append(Prompt(ids, key, start + needle.index(key), depth))
    return prompts


def contexts(prompts: Sequence[Prompt]) -> Ids:
    """Return the contexts, int64 [b, context]."""
    return np.stack([p.ids for p in prompts])


def questions(prompts: Sequence[Prompt]) -> Ids:
    """Return the question for the passkey, int64 [b, any]."""
    return np.tile(encode(QUESTION), (len(prompts), 1))


def asked(prompts: Sequence[Prompt]) -> Ids:
    """Return contexts that end with the question, int64 [b, n]."""
    return np.concatenate([contexts(prompts), questions(prompts)], 1)


# ---- prompts that are read once and cut in many ways ----


def read(reader: Reader, ids: Ids, rows: int = 0) -> Prefill:
    """Read prompts, int64 [b, n], without eviction; remember the queries of the last `rows` tokens."""
    cache = hf.KVCache(reader.model.config, RecordQueries(last=rows))
    logits = reader.feed(cache, reader.tokens(ids))
    return Prefill(cache, logits, 0.0, *CacheSize.by(cache))


def keep(whole: Prefill, slots: Iterable[Tensor] | None = None) -> Prefill:
    """Return a cache with only these slots of each evicting layer, int64 [any] or [b, Hk, any]; None keeps all.

    `whole` does not change. Both share the memory of common slots, which nothing writes to.
    """
    cache = copy.copy(whole.cache)
    cache.layers = [copy.copy(layer) for layer in cache.layers]
    for layer, kept in zip(cache.evicting_layers, slots, strict=True) if slots is not None else ():
        layer.cache.keep(kept)
    return Prefill(cache, whole.logits, 0.0, *CacheSize.by(cache))
