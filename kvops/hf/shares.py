"""Fixed shares of heads, measured on a transformers model: which heads need how much of a cache.

`head_shares` asks a policy, `retrieval_shares` looks where heads attend (HeadKV), and `duo_shares` (duo.py) asks what
the model loses (DuoAttention).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..methods import Policy
from ..methods.queries import RecordQueries
from ..methods.registry import as_policy
from .arguments import CACHE
from .attention import attention_logits, causal_mask, own_attention, softmax_weights, unwrap
from .cache import EvictingLayer, KVCache
from .compression import generate
from .passkeys import PasskeyTexts, check_ids


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
    check_ids("head_shares", ids)
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


@torch.no_grad()
def retrieval_shares(model: torch.nn.Module, texts: PasskeyTexts) -> Tensor:
    """Measure how much each head attends to a passage while the model repeats it, as HeadKV does.

    For the queries i that predict the tokens of an answer, and the passage P of len tokens that the answer repeats:

    ```text
    retrieval = mean over the queries i, and the group's query heads, of
                sum of a[i, j] over the j in P that are among the len largest weights of i
    share     = mean of retrieval over the answers and texts / the same over all heads
    ```

    ```python
    texts = kvops.hf.passkey_texts(tokenizer, ids)           # ids: int64 [b, n]
    shares = 0.1 + 0.9 * kvops.hf.retrieval_shares(model, texts)
    policy = kvops.SnapKV(1024, head_mode="adaptive", shares=shares)
    ```

    Some heads never attend to a passage, so mix in a part that is equal for all, as HeadKV does.

    Args:
        model: A causal language model of transformers that `use_attention` supports.
        texts: What it reads, one text at a time, each in one forward.

    Returns:
        fp32 [layers that evict, Hk] on the CPU, with the mean 1.

    Raises:
        TypeError: texts are not `PasskeyTexts`.
        ValueError: They do not fit each other, no head attends to a passage, or the model is not supported, or in train
            mode.

    Source: HeadKV, Fu et al., 2024, Sec. 3.1: its retrieval heads, from passages that the model copies. The paper's R2
    heads come from needles of its own that also take reasoning; pass such texts for them.
    """
    inner = reading_model("retrieval_shares", model)
    check_texts("retrieval_shares", texts)
    total: Tensor | None = None
    with own_attention(inner):
        for ids, passages, answers in zip(*(x.to(inner.device) for x in texts)):
            spans = list(zip(passages.tolist(), answers.tolist()))
            first = min(begin for _, (begin, _) in spans) - 1  # of the queries
            cache = KVCache(inner.config, RecordQueries(last=len(ids) - first))
            model(ids[None], logits_to_keep=1, **{CACHE: cache})
            layers: list[Any] = [x.cache for x in evicting_layers("retrieval_shares", cache)]
            found = torch.stack([_retrieval(x.last_queries, x.k, spans, first, x.logits).cpu() for x in layers])
            total = found if total is None else total + found
    assert total is not None  # there is a text
    if not total.any():
        raise ValueError("retrieval_shares: expected a model that attends to passages as it repeats them, got none")
    return (total / total.mean()).float()


def reading_model(who: str, model: object) -> Any:
    """The transformers model in its wrappers. Raise, in the name of `who`, if there is none, or if it is in train mode.

    Dropout would make its readings random.
    """
    inner = unwrap(who, model)
    if inner.training:
        raise ValueError(f"{who}: expected a model that is not in train mode, got one that is; call model.eval()")
    return inner


def check_texts(who: str, texts: object) -> None:
    """Raise, in the name of `who`, unless these are `PasskeyTexts` that fit each other."""
    if not isinstance(texts, PasskeyTexts):
        raise TypeError(f"{who}: texts must be kvops.hf.PasskeyTexts, got {type(texts).__name__}")
    texts.check(who)


def evicting_layers(who: str, cache: KVCache) -> list[EvictingLayer]:
    """The layers that evict; raise ValueError, in the name of `who`, if there are none."""
    if not cache.evicting_layers:
        raise ValueError(f"{who}: expected a model with full-attention layers, which evict, got one without")
    return cache.evicting_layers


def _retrieval(
    q: Tensor, k: Tensor, spans: list[tuple[list[int], list[int]]], first: int, logits: dict[str, Any]
) -> Tensor:
    """The retrieval of the heads of a layer, the mean over its spans: fp64 [Hk].

    q: [1, Hq, n - first, d], the last queries. k: [1, Hk, n, d]. spans: of passages and answers. logits: of the layer's
    attention.
    """
    n = k.shape[2]
    visible = causal_mask(n - first, n, k.device)
    found = []
    for (begin, end), (answer, after) in spans:
        rows = slice(answer - 1 - first, after - 1 - first)
        products = attention_logits(
            q[:, :, rows].float(), k.float(), logits.get("scale"), logits.get("softcap") or None
        )
        weights = softmax_weights(products, visible[:, :, rows], logits.get("sink_logits"))[0]  # [Hk, G, rows, n]
        top, at = weights.topk(min(end - begin, n), dim=-1)
        inside = (at >= begin) & (at < end)
        found.append((top.double() * inside).sum(-1).mean((1, 2)))
    return torch.stack(found).mean(0)
