"""What the environment says of the plugin: the policy, and whose attention."""

from __future__ import annotations

import os

from ..cache.schedule import Schedule
from ..methods import Full
from ..methods import policy as policy_of
from .plan import check

VARIABLE = "KVOPS_VLLM"
ATTENTION = "KVOPS_VLLM_ATTENTION"


def schedule() -> Schedule | None:
    """Return the policy that KVOPS_VLLM names, and when it evicts from prompts, or None to leave vLLM unchanged."""
    spec = os.environ.get(VARIABLE, "")
    if not spec:
        return None
    name, colon, settings = spec.partition(":")
    items = settings.split(",")
    evict = [x.removeprefix("evict=") for x in items if x.startswith("evict=")]
    try:
        found = policy_of(name + colon + ",".join(x for x in items if not x.startswith("evict=")))
        if len(evict) > 1:
            raise ValueError(f"expected evict once, got {evict}")
        if isinstance(found, Full):
            return None
        check(found)
        return Schedule.of("kvops.vllm", found, *evict or ["prompt"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{VARIABLE}={spec}: {error}") from error


def own_attention() -> bool:
    """Return whether KVOPS_VLLM_ATTENTION selects kvops' attention."""
    value = os.environ.get(ATTENTION, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{ATTENTION} must be 1 (kvops' attention) or 0 (vLLM's, the default), got {value!r}")
    return value == "1"
