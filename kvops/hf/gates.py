"""What learned gates are fitted to: hidden states of a transformers model, and the scores of KVzip+."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..methods import KVzip
from ..methods.budgets import Budget
from ..methods.view import View
from .compression import generate

#: Scores below this count as this: their logarithms would be those of rounding errors, or infinite.
LEAST = 1e-8


@dataclass(frozen=True, eq=False)
class _Teacher(KVzip):
    """KVzip+ that notes, by layer, the hidden states of the prompt and its scores."""

    name: ClassVar[str] = "gate_data"

    _: KW_ONLY
    plus: bool = True
    hidden: dict[int, Tensor] = field(default_factory=dict)
    scored: dict[int, Tensor] = field(default_factory=dict)

    def remember(self, view: View) -> None:
        assert view.layer is not None
        self.hidden.setdefault(view.layer, view.hidden)  # of the prompt, which comes before the passes

    def choose(self, scores: Tensor, view: View, budget: Budget, **options: Any) -> Tensor:
        assert view.layer is not None
        self.scored[view.layer] = scores
        return super().choose(scores, view, budget, **options)


@torch.no_grad()
def gate_data(model: torch.nn.Module, ids: Tensor, *, tokenizer: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Collect what `kvops.fit_gates` needs: the hidden states of texts, and the logarithms of their KVzip+ scores.

    ```python
    gates = kvops.fit_gates(*kvops.hf.gate_data(model, ids, tokenizer=tokenizer))
    gates.save("gates.safetensors")
    with kvops.hf.compress(model, "kvzap:budget=1024,gates=gates.safetensors"):
        model.generate(**inputs)
    ```

    The model reads each text twice. What is collected takes layers * hidden numbers of the model's dtype per token, in
    memory: 35 KB for SmolLM2-135M in bf16, 256 KB for a model of 8 billion parameters.

    Args:
        model: A causal language model of transformers, as for `generate`, whose layers do not share keys.
        ids: int64 [b, n], texts without padding, each read alone. Texts of similar length to the prompts that the gates
            are for, and of their kinds, serve best. KVzap used texts of about 1,000 tokens.
        tokenizer: The model's tokenizer, for the words that ask the model to repeat a text (`repeat_prompts`).

    Returns:
        For each layer that evicts, the hidden states that its attention is called with, [b * n, hidden] in their dtype,
        and log(max(score, 1e-8)), fp32 [b * n, Hk]; on the CPU.

    Raises:
        TypeError: ids is not a tensor, or as in `generate`.
        ValueError: ids is not int64 [b, n] with texts of at least 8 tokens, the model has no layers that evict, or
            `generate` raises it.
    """
    if not isinstance(ids, Tensor):
        raise TypeError(f"gate_data: ids must be a torch.Tensor, got {type(ids).__name__}")
    if ids.dim() != 2 or not len(ids) or ids.shape[1] < 8 or ids.dtype != torch.int64:
        raise ValueError(f"gate_data: ids must be int64 [b, n] with n >= 8, got {ids.dtype} {list(ids.shape)}")
    if tokenizer is None:
        raise TypeError("gate_data: tokenizer must be the model's, got None")
    options: dict[str, Any] = dict(max_new_tokens=1, do_sample=False, tokenizer=tokenizer, prefill_chunk_size=None)
    hidden: list[Tensor] = []
    scores: list[Tensor] = []
    for i, row in enumerate(ids):
        teacher = _Teacher(4)
        generate(model, teacher, row[None], **options)
        if not teacher.scored:
            raise ValueError(f"gate_data: expected layers that evict, found none in {type(model).__name__}")
        states = [x[0] for _, x in sorted(teacher.hidden.items())]
        logs = [x[0].clamp(min=LEAST).log().mT for _, x in sorted(teacher.scored.items())]
        for every, own in ((hidden, states), (scores, logs)):
            if not i:  # room for all texts at once, since a concatenation would need it twice
                every += [x.new_empty(ids.numel(), x.shape[1], device="cpu") for x in own]
            for x, part in zip(every, own, strict=True):
                x[i * len(row) : (i + 1) * len(row)] = part
    return hidden, scores
