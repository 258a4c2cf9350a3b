"""What a policy needs of a model: a policy names the settings, and this module takes their values from the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from ..methods import Policy
from ..methods.registry import as_policy
from .attention import unwrap
from .statistics import calibrated
from .weights import output_weights

#: Where the settings that `Needs.model` names come from.
SOURCES: dict[str, Callable[[Any], Any]] = {"statistics": calibrated, "w_o": output_weights}


def for_model(policy: Policy | str, model: nn.Module) -> Policy:
    """Return the policy with what it needs of a model, such as weights, filled in.

    `compress`, `generate`, `continuous_batching` and the evaluation call this; a `KVCache` of your own does not.
    Settings that are not None stay as they are.

    Args:
        policy: A policy, or its name and settings as for `kvops.policy`. It needs what its `needs.model` names: "w_o",
            the weights of the output projection (`output_weights`), or "statistics" of the queries (`query_statistics`
            over a short text that comes with kvops).
        model: A causal language model of transformers.

    Raises:
        ValueError: The model does not have what the policy needs, or the policy needs something else.
    """
    policy = as_policy("for_model", policy)
    missing = [name for name in policy.needs.model if getattr(policy, name) is None]
    if unknown := [name for name in missing if name not in SOURCES]:
        raise ValueError(
            f"for_model: {policy.name}.needs.model must be of {', '.join(sorted(SOURCES))}, got {unknown[0]!r}; pass "
            f"{unknown[0]}= to the policy"
        )
    if not missing:
        return policy
    inner = unwrap("for_model", model)
    return replace(policy, **{name: SOURCES[name](inner) for name in missing})  # type: ignore[type-var]
