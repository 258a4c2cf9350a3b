"""Methods on synthetic caches, which have the properties that a paper assumes, or lack them (../caches.py)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...cache import Cache
from ...methods import LAQ, Compressed, Policy, QueryPolicy
from ..caches import Caches, CacheSettings, check_context, logits_of, make, per_query_head
from ..methods import Unreachable
from ..specs import Refused
from .base import Filler, Outcome, Prompt, Reader, Task

if TYPE_CHECKING:
    from ..methods import Rule

#: Where a paper's assumptions hold, and where they do not. The comments say what the paper assumes.
PRESETS: dict[str, CacheSettings] = {
    # KeyDiff, Sec. 3.3, App. C.3: keys are collinear, the mean query opposes the mean key, and the keys that get
    # attention differ from it. The needles are passages. The prompt's last queries look for other tokens.
    "distinctive": (
        DISTINCTIVE := CacheSettings(
            collinearity=0.7, alignment=-0.05, needles=96, run_length=12, needle_cosine=-0.2, clustering=0.7
        )
    ),
    # Sec. 2.4: the same, and the prompt arrives in blocks.
    "blocks": replace(DISTINCTIVE, block=128),
    # The opposite: queries point along the mean key, and so do the keys that get attention.
    "aligned": CacheSettings(alignment=0.4, needle_cosine=0.9),
    # Many rare tokens that no query looks for.
    "distractors": replace(DISTINCTIVE, distractors=400),
    # LAQ, Sec. 3: the response looks for other tokens than the prompt does, and a draft looks for the same ones.
    # Nothing in the keys tells which.
    "response": CacheSettings(distinct=False, needles=12, draft=0.8),
    # A draft that looks for other tokens, where the prompt's last queries do better.
    "bad-draft": CacheSettings(distinct=False, needles=12, draft=0.0, overlap=0.5),
    # ProtoKV, Sec. 3: most keys resemble their neighbours. A few do not; they form a cluster, and the response looks
    # for it. Some of the prompt's last queries look for some of its tokens. There are other outliers, too.
    "anchors": (ANCHORS := CacheSettings(locality=0.8, clustering=0.7, needles=96, overlap=0.15, distractors=300)),
    # The same, but each of the needles has a direction of its own.
    "scattered": replace(ANCHORS, clustering=0.0),
    # LagKV, Sec. 1 and 2.2: channels differ in scale, keys drift as the text goes on, and a token matters if its key
    # and value are outliers among the next tokens. The prompt's queries do not tell.
    "outliers": (
        OUTLIERS := CacheSettings(
            collinearity=0.8, locality=0.5, topics=8, channels=2.0, needles=48, needle_cosine=0.4, value_length=2.0
        )
    ),
    # The same, with all needles in one or two partitions.
    "run": replace(OUTLIERS, needles=96, run_length=96),
    # LaCache, Sec. 3.2: the newest tokens matter, which of the others do cannot be known, and a token that some layers
    # hold is not lost.
    "ladder": (LADDER := CacheSettings(layers=8, distinct=False, recency=0.5, redundant=True)),
    # The same, but each layer needs its own.
    "layers-apart": replace(LADDER, redundant=False),
    # SnapKV: the prompt's last queries look for what the response looks for, and that is passages.
    "window": CacheSettings(distinct=False, needles=96, run_length=12, focus=4, overlap=0.9, draft=0.9),
    # H2O: a few tokens get attention from the whole prompt, less from its last queries.
    "heavy-hitters": CacheSettings(distinct=False, overlap=0.05, overlap_before=0.9),
    # TOVA: only the last query looks for what the response looks for.
    "last-query": CacheSettings(distinct=False, needles=2, overlap_last=1.0),
    # StreamingLLM: the response looks for the newest tokens.
    "recent": CacheSettings(distinct=False, recency=1.0),
    # L2 norm: queries oppose all keys, so that short keys get attention.
    "short-keys": CacheSettings(distinct=False, collinearity=0.7, alignment=-0.8, needle_length=0.3),
}


@dataclass
class Synthetic(Task):
    """Attention and output that survive on synthetic caches, without a language model.

    K, V and queries are drawn from distributions. `preset` sets all their settings to a regime that a paper assumes or
    excludes; every setting is an option, too. Each layer is compressed by the method's one-shot `compress`, given the
    queries that it takes: the last of the prompt, all of the prompt, or those of a draft. With `block` a cache reads
    the prompt in blocks instead and evicts after each. Then 16 queries of the response attend to the kept tokens.

    mass: the fraction of the response's attention to the whole cache that the kept tokens had. error: |o - o'| / |o|,
    where o is the attention output of the whole cache, and o' that of the kept tokens. Both are means over queries,
    heads and layers.
    """

    preset: str = "distinctive"
    layers: int | None = None
    heads: int | None = None
    group: int | None = None
    dim: int | None = None
    collinearity: float | None = None
    locality: float | None = None
    topics: int | None = None
    channels: float | None = None
    needles: int | None = None
    run_length: int | None = None
    distinct: bool | None = None
    needle_cosine: float | None = None
    clustering: float | None = None
    needle_length: float | None = None
    value_length: float | None = None
    distractors: int | None = None
    alignment: float | None = None
    focus: int | None = None
    sharpness: float | None = None
    recency: float | None = None
    overlap: float | None = None
    overlap_before: float | None = None
    overlap_last: float | None = None
    draft: float | None = None
    block: int | None = None
    redundant: bool | None = None

    name = "synthetic"
    points = ("once",)
    metrics = ("mass", "error")
    percent = False
    needs_model = False

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise Refused(f"synthetic: preset must be one of {', '.join(PRESETS)}, got {self.preset!r}")
        given = {x.name: getattr(self, x.name) for x in fields(self) if x.name != "preset"}
        self.settings = replace(PRESETS[self.preset], **{x: y for x, y in given.items() if y is not None})
        self.settings.check()
        self._made: tuple[tuple[tuple[int, ...], ...], Caches] | None = None  # the last batch, with its seeds

    def prompts(self, filler: Filler, context: int, count: int, seed: int) -> list[Prompt]:
        """The seeds of the prompts: their caches are drawn when they are measured."""
        check_context(self.settings, context)
        return [Prompt(np.array([seed, context, i]), ()) for i in range(count)]

    def caches(self, prompts: list[Prompt]) -> Caches:
        """The caches of a batch; the last ones are kept for the next method."""
        seeds = tuple(tuple(int(x) for x in prompt.context) for prompt in prompts)
        if self._made is None or self._made[0] != seeds:
            self._made = None  # free its memory first
            self._made = seeds, make(self.settings, seeds[0][1], seeds)
        return self._made[1]

    @torch.inference_mode()
    def run(
        self, reader: Reader, filler: Filler, prompts: list[Prompt], rule: Rule, budget: int | None, point: str
    ) -> Outcome:
        caches = self.caches(prompts)
        n = caches.k.shape[3]
        block = self.settings.block
        policy = rule.policy(budget, n, self.settings.layers, streaming=bool(block))
        if (policy.needs.model or policy.needs.inputs) and not policy.needs.stage:
            raise Unreachable(
                f"{policy.name}: needs weights, statistics or hidden states of a model, which synthetic caches do not "
                "have"
            )
        slots = [streamed(policy, caches, i, block) if block else cut(policy, caches, i) for i in range(len(caches.k))]
        kept = torch.stack([marked(x, n) for x in slots])
        read = kept.any(0, keepdim=True).expand_as(kept) if self.settings.redundant else kept
        scores = {"mass": mass(caches, read), "error": error(caches, read)}
        count = kept.float().sum((0, 2, 3)).mean().item()  # of a prompt
        row = 2 * self.settings.dim * caches.k.element_size()
        full = self.settings.layers * self.settings.heads * n
        return Outcome(
            {name: x.tolist() for name, x in scores.items()},
            round(count * n / full),
            round(count * row),
            full * row,
        )


def marked(indices: Tensor, n: int) -> Tensor:
    """int64 [b, Hk, any], -1 for none -> bool [b, Hk, n]."""
    kept = torch.zeros(*indices.shape[:2], n + 1, dtype=torch.bool)
    return kept.scatter_(2, torch.where(indices < 0, n, indices), True)[..., :n]


def cut(policy: Policy, caches: Caches, layer: int) -> Tensor:
    """Compress one layer with the policy's one-shot call; the slots that it keeps, int64 [b, Hk, any]."""
    k, v, q, draft = (x[layer] for x in (caches.k, caches.v, caches.q, caches.draft))
    return one_shot(policy, k, v, q, draft, layer, len(caches.k)).indices


def streamed(policy: Policy, caches: Caches, layer: int, block: int) -> Tensor:
    """Feed one layer in blocks to a cache with the policy; the positions that it holds, int64 [b, Hk, any]."""
    try:
        cache = Cache(policy, layer=layer, num_layers=len(caches.k))
    except ValueError as error:
        raise Unreachable(str(error)) from error
    for q, k, v in zip(*(x[layer].split(block, 2) for x in (caches.q, caches.k, caches.v)), strict=True):
        cache.attend(q, k, v)
    assert cache.positions is not None  # something was fed
    return cache.positions


def one_shot(policy: Policy, k: Tensor, v: Tensor, q: Tensor, draft: Tensor, layer: int, num_layers: int) -> Compressed:
    """Call a policy's `compress` with the arguments that it takes.

    Args:
        policy: the policy.
        k, v: [b, Hk, n, d].
        q: [b, Hq, n, d], the prompt's queries.
        draft: [b, Hq, DRAFT, d], the queries of a draft.
        layer, num_layers: the place of the layer.

    Raises:
        Unreachable: the policy needs something that a cache and queries do not contain.
    """
    n = k.shape[2]
    window = policy.rows_at(n, n) or n if isinstance(policy, QueryPolicy) else 0
    given: dict[str, Callable[[], Any]] = {
        "q": lambda: q[:, :, -window:],
        "q_window": lambda: q[:, :, -window:],
        "q_last": lambda: q[:, :, -1:],
        "layer": lambda: layer,
        "num_layers": lambda: num_layers,
    }
    if isinstance(policy, LAQ):
        given["q_lookahead"] = lambda: draft[:, :, : policy.steps]
        given["q_window"] = lambda: q[:, :, -policy.window :] if policy.window else None
    parameters = inspect.signature(policy.compress).parameters
    taken = given.keys() & parameters.keys()
    if any(x.kind is x.VAR_KEYWORD for x in parameters.values()):
        taken = taken | {"layer", "num_layers"}
    lacking = [x.name for x in parameters.values() if x.default is x.empty and x.kind is not x.VAR_KEYWORD]
    if unknown := [x for x in lacking if x not in ("k", "v", *taken)]:
        raise Unreachable(f"{policy.name}: synthetic caches have no {', '.join(unknown)}, which compress needs")
    return policy.compress(k, v, **{name: given[name]() for name in taken})


def mass(caches: Caches, read: Tensor) -> Tensor:
    """The fraction of the response's attention that the read tokens had: [b]. read: bool [layers, b, Hk, n]."""
    kept = per_query_head(read, caches.response).unsqueeze(3)
    return (caches.attention * kept).sum(-1).mean((0, 2, 3)).clamp(max=1)


def error(caches: Caches, read: Tensor) -> Tensor:
    """The relative error of the response's attention output: [b]. read: bool [layers, b, Hk, n]."""
    unread = ~per_query_head(read, caches.response).unsqueeze(3)
    weights = logits_of(caches.response, caches.k).masked_fill(unread, -torch.inf).softmax(-1)
    output = weights @ per_query_head(caches.v, caches.response)
    return ((output - caches.output).norm(dim=-1) / caches.output.norm(dim=-1)).mean((0, 2, 3))
