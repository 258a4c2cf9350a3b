"""Fixed shares of heads, measured on a transformers model: which heads need how much of a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..methods import Policy
from ..methods.registry import as_policy
from .compression import generate


@torch.no_grad()
def head_shares(model: torch.nn.Module, policy: Policy | str, ids: Tensor, *, tokenizer: Any = None) -> Tensor:
    """Measure how a policy divides its budget among the heads of a model, over texts.

    Any policy can then use them (`shares=`), and nothing is measured per prompt. For example, KVzip with scope="model"
    reads each text a second time to find the heads that look far back; KeyDiff with its shares gives these heads more
    of the cache.

    ```python
    policy = kvops.KVzip(0.125, head_mode="adaptive", scope="model")
    shares = kvops.hf.head_shares(model, policy, ids, tokenizer=tokenizer)
    kvops.save_shares(shares, "shares.safetensors")
    with kvops.hf.compress(model, "keydiff:budget=1024,head_mode=adaptive,shares=shares.safetensors"):
        model.generate(**inputs)
    ```

    Args:
        model: A causal language model of transformers, as for `generate`.
        policy: A policy with head_mode="adaptive", without `shares`. A budget much smaller than the texts shows more
            clearly which heads need more. The counts include the tokens that the policy always keeps, so a window makes
            the shares more equal than its choice.
        ids: int64 [b, n], texts without padding, each compressed alone.
        tokenizer: The model's tokenizer, if the policy needs its words, as `kvops.KVzip` does.

    Returns:
        fp32 [layers that evict, Hk] on the CPU: the tokens that each head kept, over their mean.

    Raises:
        TypeError: ids is not a tensor, or as in `generate`.
        ValueError: The policy does not divide its budget among heads, it keeps the texts whole, ids is not int64 [b, n]
            with at least one text, or `generate` raises it.
    """
    policy = as_policy("head_shares", policy)
    if not policy.ragged or getattr(policy, "shares", None) is not None:
        raise ValueError(f"head_shares: policy must have head_mode='adaptive' and no shares, got {policy!r}")
    if not isinstance(ids, Tensor):
        raise TypeError(f"head_shares: ids must be a torch.Tensor, got {type(ids).__name__}")
    if ids.dim() != 2 or not ids.numel() or ids.dtype != torch.int64:
        raise ValueError(f"head_shares: ids must be int64 [b, n], got {ids.dtype} {list(ids.shape)}")
    options = dict(max_new_tokens=1, do_sample=False, return_dict_in_generate=True, tokenizer=tokenizer)
    kept: list[Tensor] = []
    for row in ids:
        out: Any = generate(model, policy, row[None], **options)
        caches = [x.cache for x in out.past_key_values.evicting_layers]
        if not any(x.ragged for x in caches):
            raise ValueError(f"head_shares: expected a budget of less than the {len(row)} tokens, got {policy!r}")
        kept.append(torch.stack([x.lengths[0].cpu() for x in caches]))
    total = torch.stack(kept).double().sum(0)
    return (total / total.mean()).float()
