"""The reference for caches that evict: a model with its whole cache and a mask over what the other cache evicted."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, PreTrainedModel

SOFTMAX = (torch.nn.functional.softmax, torch.softmax, torch.Tensor.softmax)
SUMS = (*SOFTMAX, torch.logsumexp, torch.Tensor.logsumexp)  # a sink may enter through the log-sum-exp

Kept = dict[int, Tensor]  # by evicting layer: int64 [b, Hk, m], the positions in its slots; -1 for none


class Replay(TorchFunctionMode):
    """Runs a model step by step, each step with the tokens kept before it, whatever code computes its eager attention.

    The mask is applied in the first softmax over the keys that an evicting layer's cache has returned.

    Attributes:
        sums: By evicting layer, fp32 [b, Hk, n], the attention that each token has received, averaged over the heads of
            a GQA group.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        self.cache = WholeCache(self)
        self.kept: Kept = {}
        self.hidden: Kept = {}  # bool [b, Hk, n]
        self.sums: Kept = {}
        self.layer: int | None = None  # the layer whose keys the next softmax is over
        self.unread = False
        self.rescaled = False  # weights are rescaled after the softmax, so `sums` is incomplete
        # query heads of KV head i: usually i * G to i * G + G - 1; in JetMoe i, i + Hk, i + 2 Hk, ...
        self.tiled = model.config.model_type == "jetmoe"

    def __call__(self, ids: Tensor, kept: Kept, **inputs) -> Tensor:
        self.kept = kept
        with torch.no_grad(), self.hooked(), self:
            logits = self.model(ids, past_key_values=self.cache, **inputs).logits
        self.expect(None)
        return logits

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        shared = [x for x in self.model.modules() if getattr(x, "is_kv_shared_layer", False)]
        hooks = [x.register_forward_pre_hook(self.expect_shared) for x in shared]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def expect_shared(self, module: torch.nn.Module, _) -> None:
        """A layer without its own keys reads those of the last layer of its kind that has keys."""
        kinds = self.model.config.get_text_config(decoder=True).layer_types
        self.expect(max((i for i in self.hidden if kinds[i] == module.layer_type), default=None))

    def expect(self, layer: int | None) -> None:
        assert not self.unread, f"no softmax is over the keys of layer {self.layer}"
        self.layer, self.unread = layer, layer is not None

    def returned(self, layer: int, keys: Tensor, values: Tensor, new: int) -> tuple[Tensor, Tensor]:
        """The cache has returned these keys and values; the last `new` tokens belong to the step."""
        self.expect(layer if layer in self.kept else None)
        if self.layer is not None:
            kept = self.kept[layer]
            kept = kept.where(kept >= 0, keys.shape[2] - 1)  # a column of the step, which is never hidden
            hidden = torch.ones(keys.shape[:3], dtype=torch.bool).scatter_(2, kept, False)
            hidden[..., keys.shape[2] - new :] = False
            self.hidden[layer] = hidden
        return keys, values

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.layer is None or function not in SUMS or args[0].dim() < 3:
            return function(*args, **kwargs)
        logits, hidden = args[0], self.hidden[self.layer]
        (b, heads, n), (t, width) = hidden.shape, logits.shape[-2:]
        if width not in (n, n + 1):  # n + 1: with a sink
            return function(*args, **kwargs)
        groups = logits.numel() // (b * heads * t * width)
        hidden = torch.nn.functional.pad(hidden, (0, width - n))
        hidden = hidden.repeat(1, groups, 1) if self.tiled else hidden.repeat_interleave(groups, 1)
        masked = logits.reshape(b, -1, t, width).masked_fill(hidden.unsqueeze(2), torch.finfo(logits.dtype).min)
        out = function(masked.view(logits.shape), *args[1:], **kwargs)
        if function not in SOFTMAX:
            self.rescaled = True
            return out
        self.unread = False
        columns = out.view(masked.shape)[..., :n].sum(2)
        columns = columns.unflatten(1, (groups, heads) if self.tiled else (heads, groups)).mean(1 if self.tiled else 2)
        before = self.sums.get(self.layer, columns[..., :0])
        self.sums[self.layer] = columns + torch.nn.functional.pad(before, (0, n - before.shape[2]))
        return out


class WholeCache(DynamicCache):
    """Tells the replay which layer's keys are next."""

    def __init__(self, replay: Replay):
        super().__init__(config=replay.model.config)
        self.replay = replay

    def update(self, keys: Tensor, values: Tensor, layer: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        new = keys.shape[2]
        keys, values = super().update(keys, values, layer, *args, **kwargs)
        return self.replay.returned(layer, keys, values, new)


class SlotReplay(Replay):
    """A replay with keys and queries rotated at their slots. Keys are cached unrotated and rotated after the cache."""

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        attention = [x for x in self.model.modules() if hasattr(x, "layer_idx")]
        self.code = sys.modules[type(attention[0]).__module__]
        self.rotate = self.code.apply_rotary_pos_emb
        self.together = "q" in inspect.signature(self.rotate).parameters  # else queries first, then keys (Gemma 4)
        # channels per angle of the rotary module's output: GPT-OSS lists each pair once
        self.per_angle = 1 if hasattr(self.code, "rotate_half") else 2
        self.rotary = next(x for x in self.model.modules() if type(x).__name__.endswith("RotaryEmbedding"))
        hooks = [x.register_forward_pre_hook(self.enter) for x in attention]
        self.code.apply_rotary_pos_emb = self.rotate_queries if self.together else self.rotate_first
        try:
            with super().hooked():
                yield
        finally:
            self.code.apply_rotary_pos_emb = self.rotate
            for hook in hooks:
                hook.remove()

    def enter(self, module: torch.nn.Module, _) -> None:
        self.at, self.first = module.layer_idx, True

    def angles(self, x: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        kinds = ("full_attention",) if "layer_type" in inspect.signature(self.rotary.forward).parameters else ()
        return self.rotary(x, slots, *kinds)

    def rotate_queries(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if self.at not in self.kept:
            return self.rotate(q, k, cos, sin, *args, **kwargs)
        held = self.kept[self.at].shape[2]
        cos, sin = self.angles(q, torch.arange(held, held + q.shape[2])[None])
        return self.rotate(q, k, cos, sin, *args, **kwargs)[0], k

    def rotate_first(self, x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
        """Do the same where queries, [b, t, heads, d], and keys are rotated by separate calls."""
        if self.at not in self.kept:
            return self.rotate(x, cos, sin, unsqueeze_dim=unsqueeze_dim)
        first, self.first = self.first, False
        held = self.kept[self.at].shape[2]
        angles = self.angles(x, torch.arange(held, held + x.shape[1])[None])
        return self.rotate(x, *angles, unsqueeze_dim=unsqueeze_dim) if first else x

    def returned(self, layer: int, keys: Tensor, values: Tensor, new: int) -> tuple[Tensor, Tensor]:
        keys, values = super().returned(layer, keys, values, new)
        if self.layer is None:
            return keys, values
        slots = ((~self.hidden[layer]).cumsum(2) - 1).clamp(min=0)
        return torch.cat([self.turned(k, at) for k, at in zip(keys.split(1, 1), slots.unbind(1))], 1), values

    def turned(self, k: Tensor, slots: Tensor) -> Tensor:
        cos, sin = self.angles(k, slots)
        k, rest = k.tensor_split((cos.shape[-1] * self.per_angle,), -1)
        k = self.rotate(k, k, cos, sin)[1] if self.together else self.rotate(k, cos, sin)
        return torch.cat((k, rest), -1)
