"""DuoAttention's optimization: which heads of a transformers model need all tokens to find passkeys again."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..cache import Cache
from ..methods import Full
from ..methods.view import LayerInputs
from ..ops.checks import check_finite, check_int
from .arguments import CACHE
from .attention import attention_logits, causal_mask, own_attention, softmax_weights
from .cache import EvictingLayer, KVCache
from .gradients import following
from .passkeys import PasskeyTexts
from .shares import check_texts, evicting_layers, reading_model

INSTEAD = "kvops.hf.head_shares or kvops.hf.retrieval_shares"  # for models that errors name


def duo_shares(
    model: torch.nn.Module,
    texts: PasskeyTexts,
    *,
    sinks: int = 16,
    recent: int = 64,
    steps: int = 150,
    rate: float = 0.05,
    penalty: float = 1.0,
) -> Tensor:
    """Find the heads that need all tokens, by an optimization as DuoAttention does.

    Each KV head h mixes full attention with that to sinks and newest tokens, by a weight alpha_h:

    ```text
    out_h = alpha_h * full attention + (1 - alpha_h) * attention to sinks and newest tokens
    loss  = mean over the tokens that predict answers, and the channels, of (hidden - hidden of the full model)^2
            + penalty * mean over all heads of alpha_h
    ```

    hidden is what the model's last norm returns. AdamW minimizes the loss from alpha = 1 on, without weight decay, and
    alpha stays in [0, 1]. The learning rate rises over the first fifth of the steps and falls over the last. The
    model's weights do not change.

    ```python
    texts = kvops.hf.passkey_texts(tokenizer, ids)  # ids: int64 [b, n]
    alpha = kvops.hf.duo_shares(model, texts)
    policy = kvops.KeyDiff(1024, head_mode="adaptive", shares=0.1 + 0.9 * alpha / alpha.mean())
    ```

    The model reads each text up to its first answer once, with full attention, as a cache does before it evicts. The
    keys and values of all texts stay in memory. A step reads the rest of one text.

    Args:
        model: A causal language model of transformers that `use_attention` supports, in floating point.
        texts: What it reads, one text per step, in turns. They must be longer than sinks and recent.
        sinks: First tokens that every head attends to.
        recent: Newest tokens that every head attends to, the query's own included.
        steps: The steps of the optimization.
        rate: The largest learning rate, at least 0.
        penalty: What a unit of the mean weight costs, at least 0. More of it leaves fewer heads with a large weight.

    Returns:
        alpha, fp32 [layers that evict, Hk] on the CPU, in [0, 1]. Policies take it as `shares`.

    Raises:
        TypeError: texts are not `PasskeyTexts`, or an argument has the wrong type.
        ValueError: An argument has the wrong value, texts do not fit each other, gradients are not finite, all weights
            become 0, or the model is not supported, or in train mode.
        NotImplementedError: Autograd cannot follow the model, or it cannot read a text in two parts.

    Source: DuoAttention, Xiao et al., 2024, Sec. 2.2. There the whole text is read with the mixture, with 128 sinks,
    256 newest tokens, 2,000 steps, a rate of 0.02 and a penalty of 0.05. The defaults here are for shorter texts and
    fewer steps, and were chosen on SmolLM2-135M.
    """
    who = "duo_shares"
    inner = reading_model(who, model)
    check_texts(who, texts)
    for name, value, least in (("sinks", sinks, 0), ("recent", recent, 1), ("steps", steps, 1)):
        check_int(who, name, value, least)
    for name, number in (("rate", rate), ("penalty", penalty)):
        check_finite(who, name, number, 0.0)
    if texts.ids.shape[1] <= sinks + recent:
        raise ValueError(
            f"{who}: texts must have more than {sinks + recent} tokens, sinks and recent, got {texts.ids.shape[1]}"
        )
    first = int(texts.answers.min()) - 1  # the first token that predicts one of an answer
    with own_attention(inner), torch.inference_mode(False), torch.enable_grad():
        ids = texts.ids.to(inner.device, copy=True)  # autograd cannot save tensors of an inference mode
        mixed = [_Mixed(inner, *x, first, sinks, recent) for x in zip(ids[:steps], texts.predicting())]
        # A tensor for each layer, because autograd then notices a layer that it cannot reach.
        alpha = [torch.ones(x, device=inner.device, dtype=torch.float32, requires_grad=True) for x in mixed[0].heads()]
        optimizer = torch.optim.AdamW(alpha, weight_decay=0.0)
        for step in range(steps):
            for x, gradient in zip(alpha, mixed[step % len(mixed)].gradients(alpha)):
                x.grad = gradient + penalty / (len(alpha) * len(x))
            fifth = max(1, steps // 5)
            optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / fifth, (steps - step) / fifth)
            optimizer.step()
            for x in alpha:
                x.data.clamp_(0.0, 1.0)
    found = torch.stack(alpha).detach().cpu()
    if not found.any():
        raise ValueError(f"{who}: expected a penalty that leaves some head a weight, got {penalty}; pass a smaller one")
    return found


class _Mixed:
    """A model whose heads mix two attentions over the last tokens of a text, and has read the first in full.

    Args:
        model: The model, with the library's attention.
        ids: int64 [n], the text.
        counts: bool [n], which tokens count.
        first: The first token that is read with the mixture.
        sinks: See `duo_shares`.
        recent: See `duo_shares`.
    """

    def __init__(self, model: Any, ids: Tensor, counts: Tensor, first: int, sinks: int, recent: int):
        self.model, self.last, self.counts = model, ids[first:], counts[first:]
        self.sinks, self.recent = sinks, recent
        self.cache = KVCache(model.config, Full())
        with torch.no_grad():
            model(ids[None, :first], logits_to_keep=1, **{CACHE: self.cache})
            self.whole = self.hidden(None)
            once = self._read(ids, KVCache(model.config, Full()))[counts.to(self.whole.device)].float()
        if not (self.whole - once).norm() < 0.1 * once.norm():  # NaN, too
            raise NotImplementedError(
                f"duo_shares: expected a {type(model).__name__} that reads a text in two parts as it reads it at once, "
                f"got hidden states that differ by {(self.whole - once).norm() / once.norm():.0%} of their norm; use "
                f"{INSTEAD}"
            )

    def heads(self) -> list[int]:
        """The KV heads of each layer that evicts."""
        caches: list[Any] = [x.cache for x in evicting_layers("duo_shares", self.cache)]  # with tokens
        found = [x.k.shape[1] for x in caches]
        if len({*found}) > 1:
            raise ValueError(f"duo_shares: expected layers with the same number of KV heads, got {found}")
        return found

    def hidden(self, alpha: Sequence[Tensor] | None) -> Tensor:
        """What the model's last norm returns for the tokens that count, fp32. alpha: [Hk] by layer; None: all 1."""
        cache = copy.copy(self.cache)
        weights = iter([None] * len(cache.layers) if alpha is None else alpha)
        cache.layers = [
            x.with_cache(_MixedCache(of=x.cache, alpha=next(weights), sinks=self.sinks, recent=self.recent))
            if isinstance(x, EvictingLayer)
            else copy.deepcopy(x)
            for x in self.cache.layers
        ]
        found = self._read(self.last, cache)
        return found[self.counts.to(found.device)].float()

    def _read(self, ids: Tensor, cache: KVCache) -> Tensor:
        out = self.model(ids[None], output_hidden_states=True, logits_to_keep=1, **{CACHE: cache})
        found: Tensor = out.hidden_states[-1]
        if found.dim() != 3:
            raise NotImplementedError(
                f"duo_shares: expected hidden states [b, t, hidden] of {type(self.model).__name__}, got "
                f"{list(found.shape)}; use {INSTEAD}"
            )
        return found[0]

    def gradients(self, alpha: list[Tensor]) -> list[Tensor]:
        """The gradients of the mean square of what the model loses, by layer."""
        with following("duo_shares:", self.model, INSTEAD):
            lost = (self.hidden(alpha) - self.whole).square()
            # of the sum, because those of a mean may be too small for fp16
            found = [x / lost.numel() for x in torch.autograd.grad(lost.sum(), alpha)]
        if not all(x.isfinite().all() for x in found):
            raise ValueError(
                f"duo_shares: expected finite gradients, got others in {self.model.dtype}; load the model in "
                "torch.float32 or torch.bfloat16"
            )
        return found


class _MixedCache(Cache):
    """Attends to what a cache holds and the tokens of one step, for autograd, and stores nothing.

    Args:
        of: The cache.
        alpha: [Hk], the weights of full attention; None: 1. The rest is attention to sinks and newest tokens.
        sinks: See `duo_shares`.
        recent: See `duo_shares`.
    """

    def __init__(self, *, of: Cache, alpha: Tensor | None, sinks: int, recent: int):
        super().__init__(of.policy)
        assert of.k is not None and of.v is not None  # it holds a prompt
        self.held, self.alpha, self.sinks, self.recent = (of.k, of.v), alpha, sinks, recent
        self.seen, self._length = of.seen, len(of)

    def append(self, k: Tensor, v: Tensor, *, inputs: LayerInputs | None = None) -> tuple[Tensor, Tensor]:
        return torch.cat((self.held[0], k), 2), torch.cat((self.held[1], v), 2)

    def attention(self, q: Tensor, k_step: Tensor, v_step: Tensor, **options: Any) -> Tensor:
        """The attention of the step. It is computed again for gradients, since its weights take much memory."""
        found: Tensor = checkpoint(self._mixed, q, k_step, v_step, use_reentrant=False, **options)
        return found

    read = attention  # of layers that share these keys

    def _mixed(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, softcap: float, sink_logits: Tensor | None
    ) -> Tensor:
        visible = causal_mask(q.shape[2], k.shape[2], k.device)
        logits = attention_logits(q.float(), k.float(), scale, softcap or None)  # fp16 may overflow
        weights = softmax_weights(logits, visible, sink_logits)
        if self.alpha is not None:
            at = torch.arange(k.shape[2], device=k.device)
            near = visible & ((at < self.sinks) | (at > at[-q.shape[2] :, None] - self.recent))
            part = softmax_weights(logits, near, sink_logits)
            weights = part + self.alpha.to(k.device)[:, None, None, None] * (weights - part)
        return (weights.to(v.dtype) @ v.unsqueeze(2)).flatten(1, 2)
