"""Synthetic caches: K, V and queries of several layers, drawn from the distributions that the papers assume.

A prompt has n tokens. Some of them are needles, which the response will attend to. All others are ordinary tokens:

```text
ordinary key    k_t = g c_t + sqrt(1 - g^2) unit(sqrt(l) w_t + sqrt(1 - l) e_t)     g^2 = collinearity, l = locality
needle's key    k_t = h c_t + sqrt(1 - h^2) unit(sqrt(a) w + sqrt(1 - a) e_t)       h = needle_cosine, a = clustering
query           q   = o m + sqrt(1 - o^2) unit(sum of the keys it looks for, without m)                 o = alignment
```

c_t is the direction that all keys share. It is constant, or changes slowly if there are several `topics`. m is the mean
key's direction, w_t a direction that changes slowly from token to token, w one that all needles of a head share, and
e_t a token's own. The query's length is chosen so that the keys it looks for exceed the average key's logit by
`sharpness`. Each layer and KV head has its own directions; the needles' positions are a prompt's.

What decides between the methods is what the queries look for. Those of the response look for needles. Those of the
prompt look for needles with a probability, else for ordinary tokens before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from .specs import Refused

WINDOW = 32  # last queries of the prompt, those that SnapKV observes with
RESPONSE = 16  # queries of the response
DRAFT = 32  # queries of a draft, more than any method's default
LOCAL = 16  # tokens between the knots of a slowly changing direction

#: Of the settings that may lie outside [0, 1].
LIMITS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("layers", "heads", "group", "dim", "topics", "run_length", "focus"), (1, 1024)),
    **dict.fromkeys(("overlap_last", "needle_cosine", "alignment"), (-1, 1)),
    **dict.fromkeys(("distractors", "block"), (0, 2**20)),
    **dict.fromkeys(("needle_length", "value_length"), (0.01, 100)),
    "needles": (1, 2**20),
    "channels": (0, 5),
    "sharpness": (0, 100),
}


@dataclass(frozen=True)
class CacheSettings:
    """The settings of a synthetic cache.

    Attributes:
        layers: The layers of the model.
        heads: KV heads.
        group: Query heads per KV head.
        dim: The head dim, of keys and values.
        collinearity: The mean cosine of two ordinary keys (with one topic), in [0, 1].
        locality: How much of the rest two neighbours share, in [0, 1].
        topics: How many directions the keys of a prompt share, one after the other.
        channels: The standard deviation of the logs of the channels' scales. Queries are scaled by the inverse, so that
            attention stays the same.
        needles: How many tokens the response looks for.
        run_length: Needles come in runs of so many adjacent tokens.
        distinct: Whether needles have keys of their own. If not, they are ordinary tokens.
        needle_cosine: The cosine of a distinct needle's key with the shared direction.
        clustering: How much of the rest the needles of a head share, in [0, 1].
        needle_length: The length of a needle's key, relative to the others.
        value_length: The same for a needle's value.
        distractors: How many tokens have keys like single needles, but are never looked for.
        alignment: The cosine of every query with the mean key.
        focus: How many tokens a query looks for.
        sharpness: By how much their logits exceed the average one.
        recency: The probability that a query of the response looks for one of the newest sixteenth instead of needles.
        overlap: The probability that a query of the prompt's last tokens looks for needles.
        overlap_before: The same for the queries before the last 32.
        overlap_last: The same for the very last query; negative: as `overlap`.
        draft: The same for the queries of a drafted response.
        block: The prompt arrives in blocks of so many tokens, and the method evicts after each; 0: it is cut once.
        redundant: Whether all layers hold the same information, so that a token counts as kept everywhere if one layer
            keeps it.
    """

    layers: int = 4
    heads: int = 2
    group: int = 2
    dim: int = 64
    collinearity: float = 0.5
    locality: float = 0.3
    topics: int = 1
    channels: float = 0.0
    needles: int = 64
    run_length: int = 1
    distinct: bool = True
    needle_cosine: float = 0.0
    clustering: float = 0.0
    needle_length: float = 1.0
    value_length: float = 1.0
    distractors: int = 0
    alignment: float = 0.0
    focus: int = 2
    sharpness: float = 14.0
    recency: float = 0.0
    overlap: float = 0.0
    overlap_before: float = 0.0
    overlap_last: float = -1.0
    draft: float = 0.5
    block: int = 0
    redundant: bool = False

    def check(self) -> None:
        """Raise Refused if a value is out of range."""
        for name, value in vars(self).items():
            kind = type(getattr(CacheSettings, name))
            fits = isinstance(value, (int, float)) if kind is float else isinstance(value, kind)
            if not fits or isinstance(value, bool) != (kind is bool):
                raise Refused(f"synthetic: {name} must be of type {kind.__name__}, got {value!r}")
            low, high = LIMITS.get(name, (0, 1))
            if not low <= value <= high:
                raise Refused(f"synthetic: {name} must be in [{low}, {high}], got {value!r}")
        if self.dim % 8:  # what the operators support
            raise Refused(f"synthetic: dim must be a multiple of 8, got {self.dim}")


@dataclass
class Caches:
    """A batch of synthetic caches. The tensors have the layers as first dim.

    Attributes:
        k: [layers, b, Hk, n, d].
        v: [layers, b, Hk, n, d].
        q: [layers, b, Hq, n, d], the queries of the prompt.
        response: [layers, b, Hq, RESPONSE, d].
        draft: [layers, b, Hq, DRAFT, d].
        needles: bool [b, n].
        attention: fp32 [layers, b, Hq, RESPONSE, n], of the response to the whole cache.
        output: fp32 [layers, b, Hq, RESPONSE, d].
    """

    k: Tensor
    v: Tensor
    q: Tensor
    response: Tensor
    draft: Tensor
    needles: Tensor
    attention: Tensor
    output: Tensor


def make(settings: CacheSettings, n: int, seeds: Sequence[Sequence[int]]) -> Caches:
    """Draw a batch of caches, each from its own seed.

    Args:
        settings: the settings.
        n: tokens of the prompt.
        seeds: of each prompt.
    """
    drawn = [draw(settings, n, seed) for seed in seeds]
    k, v, q, response, draft = (torch.stack([x[i] for x in drawn], 1) for i in range(5))
    attention = logits_of(response, k).softmax(-1)
    output = attention @ per_query_head(v, response)
    return Caches(k, v, q, response, draft, torch.stack([x[5] for x in drawn]), attention, output)


def check_context(settings: CacheSettings, n: int) -> None:
    """Raise Refused if a prompt of n tokens is too short for its needles and distractors."""
    runs = -(-settings.needles // settings.run_length)
    least = 2 * (runs * settings.run_length + settings.distractors + WINDOW)  # half of the tokens are ordinary
    if n < least:
        raise Refused(f"--context: expected at least {least} for these needles and distractors, got {n}")


def per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Repeat K or V, [layers, b, Hk, n, d], for the query heads: [layers, b, Hq, n, d]."""
    return x.repeat_interleave(q.shape[2] // x.shape[2], 2)


def logits_of(q: Tensor, k: Tensor) -> Tensor:
    """The logits of queries [layers, b, Hq, rows, d]: [layers, b, Hq, rows, n]."""
    return q @ per_query_head(k, q).mT / k.shape[-1] ** 0.5


def draw(settings: CacheSettings, n: int, seed: Sequence[int]) -> tuple[Tensor, ...]:
    """Draw one prompt: K, V, the queries of prompt, response and draft, and which tokens are needles."""
    state = np.random.SeedSequence(list(seed)).generate_state(1, np.uint64)[0]
    rng = torch.Generator().manual_seed(int(state) % 2**63)
    shape = settings.layers, settings.heads

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=rng, dtype=torch.float32)

    places = positions(settings, n, rng)
    needles = torch.zeros(n, dtype=torch.bool)
    needles[places[: settings.needles]] = True

    shared = slow(normal(*shape, settings.topics, settings.dim), n)
    mean = normalize(shared.mean(2), dim=-1)
    knots = normal(*shape, n // LOCAL + 2, settings.dim)
    own = mixed(settings.locality, slow(knots, n), normal(*shape, n, settings.dim))
    keys = around(shared, settings.collinearity**0.5, own)
    if settings.distinct or settings.distractors:
        odd = places if settings.distinct else places[settings.needles :]
        cluster = normal(*shape, 1, settings.dim).expand(-1, -1, len(odd), -1)
        free = normal(*shape, len(odd), settings.dim)
        clustered = (needles[odd].float() * settings.clustering).unsqueeze(-1)
        keys[:, :, odd] = around(shared[:, :, odd], settings.needle_cosine, mixed(clustered, cluster, free))
    scales = (settings.channels * normal(*shape, 1, settings.dim)).exp()
    keys = keys * settings.dim**0.5
    keys[:, :, needles] *= settings.needle_length
    values = normal(*shape, n, settings.dim)
    values[:, :, needles] *= settings.value_length

    def constant(value: float, size: int) -> Tensor:
        return torch.full((size,), value, dtype=torch.float32)

    def queries(rows: int, probability: Tensor, before: Tensor, newest: float = 0.0) -> Tensor:
        """Queries that look for needles with a probability; all tokens are before `before`. [layers, Hq, rows, d]."""
        heads = settings.heads * settings.group
        found = pick(needles, before, settings.focus, probability.expand(heads, -1), newest, rng)  # [Hq, rows, focus]
        return look_for(keys, found, mean, settings)

    asked = constant(settings.overlap_before, n)
    asked[-WINDOW:] = settings.overlap
    if settings.overlap_last >= 0:
        asked[-1] = settings.overlap_last
    q = queries(n, asked, torch.arange(1, n + 1))
    response = queries(RESPONSE, constant(1.0, RESPONSE), torch.full((RESPONSE,), n), settings.recency)
    draft = queries(DRAFT, constant(settings.draft, DRAFT), torch.full((DRAFT,), n), settings.recency)
    inverse = scales.repeat_interleave(settings.group, 1)
    return keys * scales, values, q / inverse, response / inverse, draft / inverse, needles


def positions(settings: CacheSettings, n: int, rng: torch.Generator) -> Tensor:
    """Where the needles are, and after them the distractors: int64 [needles + distractors], before the last WINDOW."""
    runs = -(-settings.needles // settings.run_length)
    sizes = torch.tensor([settings.run_length] * runs + [1] * settings.distractors)
    spare = n - WINDOW - int(sizes.sum())
    order = torch.randperm(len(sizes), generator=rng)  # of the runs and distractors along the prompt
    gaps = torch.rand(len(sizes), generator=rng, dtype=torch.float32).sort().values.mul(spare + 1).long()
    starts = torch.empty_like(sizes)
    starts[order] = gaps + sizes[order].cumsum(0) - sizes[order]
    tokens = (starts[:runs, None] + torch.arange(settings.run_length)).flatten()[: settings.needles]
    return torch.cat((tokens, starts[runs:]))


def slow(knots: Tensor, n: int) -> Tensor:
    """Directions that change slowly: unit vectors [..., n, d], linear between the knots [..., any, d]."""
    count = knots.shape[-2]
    at = torch.linspace(0, count - 1, n, dtype=torch.float32)
    left = at.floor().long().clamp(max=max(0, count - 2))
    right = (left + 1).clamp(max=count - 1)
    knots = normalize(knots, dim=-1)
    weight = (at - left).unsqueeze(-1)
    return normalize((1 - weight) * knots[..., left, :] + weight * knots[..., right, :], dim=-1)


def mixed(fraction: float | Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Unit vectors whose squared length is a fraction of the first, if the two are orthogonal."""
    f = torch.as_tensor(fraction, dtype=torch.float32)
    return normalize(f.sqrt() * normalize(one, dim=-1) + (1 - f).sqrt() * normalize(other, dim=-1), dim=-1)


def around(center: Tensor, cosine: float, rest: Tensor) -> Tensor:
    """Unit vectors with this cosine to unit centers."""
    free = normalize(rest - (rest * center).sum(-1, keepdim=True) * center, dim=-1)
    return cosine * center + (1 - cosine**2) ** 0.5 * free


def pick(
    needles: Tensor, before: Tensor, focus: int, probability: Tensor, newest: float, rng: torch.Generator
) -> Tensor:
    """Choose the tokens that queries look for: int64 [Hq, rows, focus].

    Args:
        needles: bool [n].
        before: int64 [rows]; a query looks for tokens before this position.
        focus: tokens per query.
        probability: [Hq, rows], to look for needles.
        newest: probability to look for one of the newest sixteenth instead of needles.
        rng: the random numbers.
    """
    heads, rows = probability.shape
    which, where = torch.rand(2, heads, rows, 1, generator=rng, dtype=torch.float32)
    at = torch.rand(heads, rows, focus, generator=rng, dtype=torch.float32)
    before = before[:, None]
    ordinary = (~needles).nonzero()[:, 0]
    available = torch.searchsorted(ordinary, before)  # ordinary tokens before a query
    others = torch.where(available > 0, ordinary[(at * available).long().clamp(max=len(ordinary) - 1)], 0)
    found = needles.nonzero()[:, 0]
    known = torch.searchsorted(found, before)  # needles before it
    hits = found[(at * known).long().clamp(max=len(found) - 1)]
    recent = (before - 1 - (at * (before.float() / 16)).long()).clamp(min=0)
    hits = torch.where(where < newest, recent, hits)
    return torch.where((which < probability.unsqueeze(-1)) & (known > 0), hits, others)


def look_for(keys: Tensor, found: Tensor, mean: Tensor, settings: CacheSettings) -> Tensor:
    """Queries that look for tokens: [layers, Hq, rows, d].

    Args:
        keys: [layers, Hk, n, d].
        found: int64 [Hq, rows, focus], the tokens.
        mean: [layers, Hk, d], the mean key's direction.
        settings: alignment and sharpness.
    """
    heads = torch.arange(len(found))[:, None, None] // settings.group
    targets = keys[:, heads, found]  # [layers, Hq, rows, focus, d]
    center = mean.repeat_interleave(settings.group, 1).unsqueeze(2)
    q = around(center, settings.alignment, targets.sum(3))
    average = keys.mean(2).repeat_interleave(settings.group, 1).unsqueeze(2)
    gap = ((targets.mean(3) - average) * q).sum(-1, keepdim=True) / settings.dim**0.5
    return q * (settings.sharpness / gap.clamp(min=0.05))
