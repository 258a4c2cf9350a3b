"""What a policy needs of a model: a policy names the settings, and this module takes their values from the model or its
tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from ..methods import LAQ, Policy
from ..methods.registry import as_policy
from ..methods.repeating import WORDS
from .attention import unwrap
from .generation import repeat_prompts
from .statistics import calibrated
from .weights import output_weights

#: Where the settings that `Needs.model` names come from; `WORDS` come from a tokenizer (`repeat_prompts`).
SOURCES: dict[str, Callable[[Any], Any]] = {"statistics": calibrated, "w_o": output_weights}


def for_model(policy: Policy | str, model: nn.Module, tokenizer: Any = None) -> Policy:
    """Return the policy with what it needs of a model, such as weights, filled in.

    `compress`, `generate`, `continuous_batching` and the evaluation call this; a `KVCache` of your own does not.
    Settings that are not None stay as they are. Those of a tokenizer stay None without one, and a `KVCache` then
    refuses the policy. Of `kvops.LAQ` the policy of stage 1 is filled in as well.

    Args:
        policy: A policy, or its name and settings as for `kvops.policy`. It needs what its `needs.model` names: "w_o",
            the weights of the output projection (`output_weights`), "statistics" of the queries (`query_statistics`
            over a short text that comes with kvops), or "instruction", "next_instruction" and "suffix", the words of
            `kvops.KVzip` (`repeat_prompts`).
        model: A causal language model of transformers.
        tokenizer: The model's tokenizer, for the words.

    Raises:
        ValueError: The model does not have what the policy needs, or the policy needs something else; or
            `repeat_prompts` raises it.
    """
    policy = as_policy("for_model", policy)
    if isinstance(policy, LAQ) and isinstance(policy.stage1, Policy):
        stage1 = for_model(policy.stage1, model, tokenizer)
        policy = policy if stage1 is policy.stage1 else replace(policy, stage1=stage1)
    missing = [name for name in policy.needs.model if getattr(policy, name) is None]
    if unknown := [name for name in missing if name not in (*SOURCES, *WORDS)]:
        known = ", ".join(sorted((*SOURCES, *WORDS)))
        raise ValueError(
            f"for_model: {policy.name}.needs.model must be of {known}, got {unknown[0]!r}; pass {unknown[0]}= to the "
            "policy"
        )
    if not missing:
        return policy
    inner = unwrap("for_model", model)
    words = repeat_prompts(tokenizer) if tokenizer is not None and {*WORDS} & {*missing} else {}
    found = {name: SOURCES[name](inner) if name in SOURCES else words.get(name) for name in missing}
    return replace(policy, **found)  # type: ignore[type-var]
