"""The methods by name, each brought to a budget: tokens that every KV head keeps when the cache is cut.

A rule builds a method for a prompt of n tokens and a budget. Where a method has no budget of its own (LagKV's ratio is
per partition) its settings are solved for it; where the paper's default depends on the prompt or the model it is filled
in. A budget that a method cannot reach is a ValueError that says why.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, get_args, get_type_hints

from .. import methods as m
from ..cache import Method
from ..methods.lacache import understanding_span
from ..reference import kept_length, num_segments
from .specs import parse

SINK = 16  # LagKV's
MOST = 2**20  # tokens, more than any budget


class Unreachable(ValueError):
    """A budget that a method cannot be brought to, or a model that it cannot serve."""


def lagkv_tokens(n: int, budget: int, lag: int, sink: int = SINK) -> tuple[int, int]:
    """Solves LagKV's Eq. 10 for the tokens kept per partition: the most within the budget (-1: none), and what 0 would
    keep."""
    scored, fixed = num_segments(n, sink, lag), kept_length(n, sink, lag, 0)  # fixed: sink, last partition, rest
    return min((budget - fixed) // scored, lag) if scored and budget >= fixed else -1, fixed


def _lagkv(budget: int, n: int, num_layers: int, streaming: bool, options: dict) -> dict:
    """The largest lag, at most 1024, the paper's, whose sink, last partition and rest take half of the budget or less;
    then the ratio. What is left of a small budget may be less than a token for each partition: then none is chosen,
    and the lag is the one that keeps most."""
    sink, lag = options.get("sink", SINK), options.get("lag")
    if lag is not None and lag < 1:
        raise ValueError(f"LagKV: lag must be at least 1, got {lag}")
    if lag is None:
        plans = [(x, *lagkv_tokens(n, budget, x, sink)) for x in (2**i for i in range(10, 3, -1))]
        within = {x: kept_length(n, sink, x, kept) for x, kept, _ in plans if kept >= 0}
        chooses = [x for x, kept, fixed in plans if kept > 0 and 2 * fixed <= budget]
        lag = chooses[0] if chooses else max(within, key=within.get, default=plans[-1][0])
    kept, fixed = lagkv_tokens(n, budget, lag, sink)
    if kept < 0:
        raise ValueError(
            f"LagKV: sink, last partition and rest of {n} tokens are {fixed} with lag {lag}, over {budget}"
        )
    ratio = min(1.0, (kept + 0.5) / lag)  # int(ratio * lag) is kept, in any rounding
    return {"sink": sink, "lag": lag, "ratio": ratio}


def _lacache(budget: int, n: int, num_layers: int, streaming: bool, options: dict) -> dict:
    """A prompt and a short answer, or language modelling: the paper's settings for each."""
    if options.get("task", "modeling" if streaming else "understanding") == "modeling":
        return {"budget": budget}
    return {"budget": budget, "task": "understanding", "span": understanding_span(num_layers, budget / n)}


def _window(budget: int, n: int, num_layers: int, streaming: bool, options: dict) -> dict:
    """An observation window of 32 tokens, of half the budget where that is less."""
    return {"budget": budget, "window": max(1, min(32, budget // 2))}


def _budget(budget: int, n: int, num_layers: int, streaming: bool, options: dict) -> dict:
    return {"budget": budget}


def _nothing(budget: None, n: int, num_layers: int, streaming: bool, options: dict) -> dict:
    return {}


class Kind(NamedTuple):
    """A line of the table of methods."""

    label: str  # in tables
    method: type[Method]
    settings: Callable[..., dict] = _budget  # from the budget, the prompt and the model
    defaults: dict = {}  # what makes it this variant

    @property
    def options(self) -> list[str]:
        """What the command line can say of it: the settings that are numbers or words."""
        return [x for x in inspect.signature(self.method).parameters if x not in UNSAID]


def check_option(label: str, key: str, value: object, kind: object) -> None:
    """The command line's words are any Python literal; kind: the setting's annotation."""
    kinds = get_args(kind) or (kind,)
    fits = isinstance(value, kinds) or (float in kinds and isinstance(value, int))
    if bool not in kinds and isinstance(value, bool):
        fits = False
    if not fits:
        names = " or ".join(NAMES[x] for x in kinds)
        raise ValueError(f"{label}: {key} must be {names}, got {type(value).__name__} {value!r}")
    if isinstance(value, (int, float)) and not abs(value) <= MOST_SAID:
        raise ValueError(f"{label}: {key} must be at most {MOST_SAID}, got {value!r}")


NAMES = {int: "an int", float: "a float", str: "a str", bool: "a bool", type(None): "None"}
MOST_SAID = 2**31 - 1
UNSAID = ("budget", "skip_layers", "rope", "stage1", "projection", "phase", "attend_before_compress")

#: By the name on the command line.
METHODS = {
    "full": Kind("Full", m.Full, _nothing),
    "streamingllm": Kind("StreamingLLM", m.StreamingLLM),
    "random": Kind("Random", m.Random),
    "lagkv": Kind("LagKV", m.LagKV, _lagkv),
    "localkv": Kind("LocalKV", m.LagKV, _lagkv, {"reference": "self"}),
    "lagkv-l2": Kind("LagKV L2", m.LagKV, _lagkv, {"score": "l2"}),
    "lacache": Kind("LaCache", m.LaCache, _lacache),
    "lacache-official": Kind("LaCache official", m.LaCache, _lacache, {"pattern": "official"}),
    "laq": Kind("LAQ", m.LAQ),
    "laq++": Kind("LAQ++", m.LAQ, defaults={"window": 8}),
    "keydiff": Kind("KeyDiff", m.KeyDiff),
    "keydiff-window": Kind("KeyDiff window", m.KeyDiff, defaults={"recent": 0.2}),
    "protokv": Kind("ProtoKV", m.ProtoKV),
    "satkv": Kind("SATKV", m.SATKV, _window),
    "snapkv": Kind("SnapKV", m.SnapKV, _window),
    "pyramidkv": Kind("PyramidKV", m.PyramidKV, _window),
    "chunkkv": Kind("ChunkKV", m.ChunkKV, _window),
    "h2o": Kind("H2O", m.H2O),
    "tova": Kind("TOVA", m.TOVA),
    "l2": Kind("L2", m.L2),
}


@dataclass(frozen=True)
class Rule:
    """A method by name, with the options that the command line gave."""

    label: str  # in tables: "KeyDiff", "LagKV lag=128"
    kind: Kind
    options: dict

    @property
    def cuts(self) -> bool:
        """False: keeps everything, so it has no budget."""
        return self.kind.method is not m.Full

    def method(self, budget: int | None, n: int, num_layers: int, streaming: bool = False) -> Method:
        """For prompts of n tokens in a model of so many layers. streaming: text comes in windows, without an end.

        Unreachable where the method cannot be brought to the budget.
        """
        if streaming and self.kind.method is m.LAQ:
            raise Unreachable(
                f"{self.label}: evicts by a draft of the answer to a whole prompt, so not while a text is being read"
            )
        options = {**self.kind.defaults, **self.options}
        try:
            return self.kind.method(**{**self.kind.settings(budget, n, num_layers, streaming, options), **options})
        except ValueError as error:
            raise Unreachable(str(error)) from error


def rule(spec: str) -> Rule:
    """Of "keydiff" or "keydiff:recent=0.1,sinks=4"; options are those of the method's class."""
    name, options = parse("method", spec, METHODS)
    kind = METHODS[name]
    for key in options:
        if key not in kind.options:
            raise ValueError(
                f"method {spec!r}: {kind.label} has no option {key!r}, expected some of {', '.join(kind.options)}"
            )
        try:
            check_option(kind.label, key, options[key], get_type_hints(kind.method.__init__)[key])
        except ValueError as error:
            raise ValueError(f"method {spec!r}: {error}") from None
    made = Rule(kind.label + "".join(f" {key}={value}" for key, value in options.items()), kind, options)
    try:  # what is wrong at the largest budget is wrong at any
        made.method(MOST, 2 * MOST, 32)
    except (TypeError, ValueError) as error:
        raise ValueError(f"method {spec!r}: {error}") from None
    return made
