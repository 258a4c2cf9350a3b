"""Statistics of a transformers model's queries before RoPE, for the methods that are calibrated."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from ..files import CALIBRATION
from ..methods import QueryStatistics
from ..methods.queries import RecordQueries
from ..methods.statistics import Sums, of_sums, unrotated
from .arguments import CACHE
from .attention import implementations, restore, unwrap, use_attention
from .cache import KVCache
from .rope import model_rope

CALIBRATION_TOKENS = 1024  # per row of the library's calibration text


@torch.no_grad()
def query_statistics(model: PreTrainedModel, ids: Tensor, *, skip: int = 4) -> QueryStatistics:
    """Gather the statistics of a model's queries over a text.

    The model reads the text once, with the library's attention. Its queries are rotated back by the inverse of the
    model's RoPE (`model_rope`), so norms that a model applies to its queries before the rotation are included.

    Args:
        model: A causal language model of transformers that `use_attention` supports. Its attention is unchanged after
            the call.
        ids: int64 [b, n], texts without padding. 10,000 tokens or more are advisable: a covariance has d^2 entries.
        skip: First tokens of each row that do not count, since attention sinks have unusual queries.

    Returns:
        The statistics of every layer that evicts.

    Raises:
        ValueError: ids has another shape or no more than `skip` tokens, or the model is not supported.
    """
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[0] < 1 or ids.shape[1] <= skip:
        got = list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"query_statistics: ids must be [b, n] with n > skip ({skip}), got {got}")
    inner: Any = unwrap("query_statistics", model)
    rope, before = model_rope(inner.config), implementations(inner)
    sums: list[Sums] = []
    scale: float | None = None
    try:
        use_attention(model)
        for row in ids.to(inner.device):
            cache = KVCache(inner.config, RecordQueries(last=len(row)))
            model(row[None], logits_to_keep=1, **{CACHE: cache})
            layers: list[Any] = [
                x.cache for x in cache.evicting_layers
            ]  # AttendingCaches, since RecordQueries uses queries
            sums = sums or [Sums(rope) for _ in layers]
            for total, layer in zip(sums, layers):
                q = unrotated(layer.last_queries.float(), rope, torch.arange(len(row), device=row.device))
                total.add(q[:, :, skip:])
                scale = layer.logits.get("scale")
    finally:
        restore(before)
    return of_sums(sums, rope, scale)


def calibrated(model: PreTrainedModel) -> QueryStatistics:
    """The statistics over the calibration text that comes with the library, with the model's own tokenizer.

    The text is not part of the texts that `kvops.eval` makes its prompts of. It is short and in English: for a model
    in production, gather statistics over texts of its own domain.

    Raises:
        ValueError: The model's tokenizer cannot be loaded.
    """
    if (found := _known.get(model)) is None:
        name = model.config._name_or_path
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"calibration needs the tokenizer of {name!r}, which cannot be loaded; pass statistics, gathered with "
                "kvops.hf.query_statistics(model, ids)"
            ) from error
        ids = tokenizer(CALIBRATION.read_text(), return_tensors="pt", verbose=False).input_ids[0]
        most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or len(ids)
        size = min(CALIBRATION_TOKENS, most, len(ids))
        found = _known[model] = query_statistics(model, ids[: len(ids) // size * size].view(-1, size))
    return found


_known: weakref.WeakKeyDictionary[PreTrainedModel, QueryStatistics] = weakref.WeakKeyDictionary()
