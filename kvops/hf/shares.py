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

    The shares can then be those of any policy (`shares=`), for prompts of which nothing is measured. For example, KVzip
    with scope="model" reads each text a second time to find the heads that look far back; KeyDiff with its shares gives
    these heads more of the cache, at no cost per prompt.

    ```python
    policy = kvops.KVzip(0.125, head_mode="adaptive", scope="model")
    shares = kvops.hf.head_shares(model, policy, ids, tokenizer=tokenizer)
    kvops.save_shares(shares, "shares.safetensors")
    with kvops.hf.compress(model, "keydiff:budget=1024,head_mode=adaptive,shares=shares.safetensors"):
        model.generate(**inputs)
    ```

    Args:
        model: A causal language model of transformers, as for `generate`.
        policy: A policy with head_mode="adaptive", without `shares`. With a budget much smaller than the texts its
            choice says more.
        ids: int64 [b, n], texts without padding, each compressed alone.
        tokenizer: The model's tokenizer, if the policy needs its words, as `kvops.KVzip` does.

    Returns:
        fp32 [layers that evict, Hk] on the CPU: the tokens that each head kept, over their mean.

    Raises:
        TypeError: As in `generate`.
        ValueError: The policy does not divide its budget among heads, it keeps the texts whole, ids has another shape,
            or `generate` raises it.
    """
    policy = as_policy("head_shares", policy)
    if not policy.ragged or getattr(policy, "shares", None) is not None:
        raise ValueError(f"head_shares: policy must have head_mode='adaptive' and no shares, got {policy!r}")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not len(ids):
        got = list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"head_shares: ids must be [b, n], got {got}")
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
