"""Paired comparison of methods: all answer the same prompts, so their differences are taken prompt by prompt.

The spread between easy and hard prompts cancels in these differences, which can therefore separate methods whose own
intervals overlap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import numpy as np

ALPHA = 0.05
RESAMPLES = 9_999  # of the bootstrap; (RESAMPLES + 1) * 2.5 % is a whole number
FLIPS = 49_999  # random sign flips, where there are too many to enumerate
EXACT = 24  # nonzero differences whose 2^24 sign flips are counted, as all sums of two halves of 2^12
LEAST = 6  # prompts; with fewer, even the smallest two-sided p, 2 / 2^n, exceeds 5 %
DECIMALS = 9  # of differences; the last bits of a sum depend on the processor
TOO_FEW, NOT_FINITE = "too few prompts", "not finite"
Scores = Mapping[int, float]  # by prompt


class Comparison(NamedTuple):
    """A method's score minus that of another method, on the prompts that both have.

    Attributes:
        to: the other method.
        difference: the mean difference.
        low, high: its 95 % interval.
        p: of the sign-flip test, two-sided.
        p_holm: p corrected for the number of comparisons.
        n: shared prompts.
        verdict: "better", "worse", "undecided", "best" (the method itself has the best mean), `TOO_FEW` (no difference
            on so many prompts could pass the test) or `NOT_FINITE` (an infinite loss).
    """

    to: str
    difference: float | None
    low: float | None
    high: float | None
    p: float | None
    p_holm: float | None
    n: int
    verdict: str


def sign_flip(differences: Sequence[float]) -> float:
    """Return the two-sided p value of the sign-flip test.

    If two methods are equally good, swapping their scores on a prompt changes nothing: each difference is as likely
    with the opposite sign. p is the fraction of all 2^n choices of signs whose sum is at least as far from 0 as the
    observed sum. Zeros do not change it. Up to `EXACT` nonzero differences, p is exact. For more, it is
    (b + 1) / (m + 1), where b of m = `FLIPS` random choices of signs are as extreme (seeded).

    Args:
        differences: finite, one per prompt.
    """
    return sign_flips([differences])[0]


def sign_flips(pairs: Iterable[Sequence[float]]) -> list[float]:
    """Return the p value of `sign_flip` for the differences of each pair.

    Pairs with as many nonzero differences share the random choices of signs, and a product with these.
    """
    found: list[float] = []
    sampled: dict[int, list[tuple[int, np.ndarray, float]]] = {}
    for i, differences in enumerate(pairs):
        d = np.array([x for x in differences if x], dtype=np.float64)
        slack = 1e-9 * float(np.abs(d).sum())  # sums that are equal but for rounding count as equal
        least = abs(float(d.sum())) - slack
        found.append(1.0)
        if least <= 0:
            continue
        if len(d) > EXACT:
            sampled.setdefault(len(d), []).append((i, d, least))
            continue
        one, two = _sums(d[: len(d) // 2]), np.sort(_sums(d[len(d) // 2 :]))
        count = int((len(two) - np.searchsorted(two, least - one)).sum())
        found[i] = 2 * count / 2 ** len(d)  # as many sums are at most -least
    for n, same in sampled.items():
        columns, least_of_each = np.stack([d for _, d, _ in same], 1), np.array([x for *_, x in same])
        blocks = np.array_split(_signs(n), 10)  # bounds the memory
        counts = sum((np.abs(x @ columns) >= least_of_each).sum(0) for x in blocks)
        for (i, *_), count in zip(same, counts):
            found[i] = (int(count) + 1) / (FLIPS + 1)
    return found


def _sums(d: np.ndarray) -> np.ndarray:
    """Return the sums of d under all choices of signs, [2^n]."""
    sums = np.zeros(1)
    for x in d:
        sums = np.concatenate([sums + x, sums - x])
    return sums


# RandomState: numpy never changes its streams, so another version gives the same report.


@lru_cache(maxsize=64)
def _signs(n: int) -> np.ndarray:
    """Random signs, int8 [FLIPS, n]."""
    return np.random.RandomState(n).randint(0, 2, (FLIPS, n), dtype=np.int8) * 2 - 1


@lru_cache(maxsize=2)
def _counts(n: int) -> np.ndarray:
    """How often each resample of n prompts contains each of them, float64 [RESAMPLES, n]."""
    drawn = np.random.RandomState(n).randint(0, n, (RESAMPLES, n)) + n * np.arange(RESAMPLES)[:, None]
    return np.bincount(drawn.ravel(), minlength=RESAMPLES * n).reshape(RESAMPLES, n).astype(np.float64)


def bootstrap(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean difference, over resampled prompts (seeded).

    Args:
        differences: finite, one per prompt, at least one.
    """
    return bootstraps([differences])[0]


def bootstraps(pairs: Iterable[Sequence[float]]) -> list[tuple[float, float]]:
    """Return the interval of `bootstrap` for the differences of each pair; pairs of one length share a product."""
    every = [np.asarray(x, dtype=np.float64) for x in pairs]
    found = [(0.0, 0.0)] * len(every)
    k = round((RESAMPLES + 1) * ALPHA / 2)
    for n in sorted({*map(len, every)}):
        places = [i for i, d in enumerate(every) if len(d) == n]
        means = np.sort(_counts(n) @ np.stack([every[i] for i in places], 1) / n, axis=0)
        for i, low, high in zip(places, means[k - 1], means[-k]):
            found[i] = float(low), float(high)
    return found


def holm(values: Sequence[float]) -> list[float]:
    """Return p values corrected by Holm's method.

    The smallest of m values is multiplied by m, the next by m - 1 and so on. None becomes smaller than the one before
    it, or larger than 1. Rejecting those of at most 5 % makes any false rejection at most 5 % likely, whatever the
    dependence between the tests.
    """
    corrected, largest = [0.0] * len(values), 0.0
    for rank, i in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - rank) * values[i]))
        corrected[i] = largest
    return corrected


def _differences(a: Scores, b: Scores) -> list[float]:
    return [a[i] - b[i] if a[i] != b[i] else 0.0 for i in sorted(a.keys() & b.keys())]


Pair = tuple[str, str]


def _family(
    pairs: Mapping[Pair, list[float]], known: Mapping[Pair, float] | None = None
) -> tuple[dict[Pair, float], dict[Pair, float], bool]:
    """Test a family of pairs.

    Args:
        pairs: their differences.
        known: the p values, if they are known.

    Returns:
        p, the corrected p, and whether the family has enough prompts: whether the smallest p that so many prompts can
        give withstands the correction. Pairs with less than `LEAST` prompts are not tested.
    """
    tested = {x: d for x, d in pairs.items() if len(d) >= LEAST and all(map(math.isfinite, d))}
    p = dict(zip(tested, sign_flips(tested.values()))) if known is None else {x: known[x] for x in tested}
    most = max(map(len, tested.values()), default=0)
    enough = len(p) * 2.0 ** (1 - most) <= ALPHA
    return p, dict(zip(p, holm(list(p.values())))), enough


def compare(
    scores: Mapping[str, Scores], sign: int, best: str | None, baseline: str
) -> dict[str, dict[str, Comparison]]:
    """Compare all methods of a cell with the best one and with a baseline.

    The baseline is fixed beforehand: its p values are corrected for the number of methods compared with it. The best
    method is known only from the same scores. Selecting it exaggerates its lead, so the p values of comparisons with
    it are corrected for all pairs of methods. Whichever method is best, its comparisons are then among those that the
    correction covers. They say "worse" or "undecided", never "better".

    Args:
        scores: of each method, by prompt.
        sign: 1 if higher is better, -1 if lower is.
        best: the method with the best mean; None if no method qualifies.
        baseline: a method, which may be missing.

    Returns:
        By method: its comparisons "best" and `baseline`, as far as they exist.
    """
    found: dict[str, dict[str, Comparison]] = {x: {} for x in scores}
    if len(scores) < 2:
        return found
    if best is not None:
        names = [*(x for x in scores if x != best), best]
        every = {(a, b): _differences(scores[a], scores[b]) for a, b in combinations(names, 2)}
        tested = _family(every)
        found[best]["best"] = Comparison(best, 0.0, 0.0, 0.0, 1.0, 1.0, len(scores[best]), "best")
        for pair in every:
            if pair[1] == best:
                made = _comparison(pair, every[pair], sign, *tested)
                verdict = "undecided" if made.verdict == "better" else made.verdict  # a mean over fewer prompts
                found[pair[0]]["best"] = made._replace(verdict=verdict)
    if baseline in scores:
        pairs = {(x, baseline): _differences(scores[x], scores[baseline]) for x in scores if x != baseline}
        tested = _family(pairs)
        for pair, d in pairs.items():
            found[pair[0]][baseline] = _comparison(pair, d, sign, *tested)
    return found


def compare_each(scores: Mapping[str, Scores], sign: int) -> dict[Pair, Comparison]:
    """Compare each method with each other one, as `compare` does with a baseline that is fixed beforehand.

    Args:
        scores: of each method, by prompt.
        sign: 1 if higher is better, -1 if lower is.

    Returns:
        The comparison of the first method of a pair with the second one, for every order of every pair.
    """
    every = {pair: _differences(*(scores[x] for x in pair)) for pair in combinations(scores, 2)}
    p, _, _ = _family(every)
    finite = {pair: d for pair, d in every.items() if d and all(map(math.isfinite, d))}
    ends = dict(zip(finite, bootstraps(finite.values())))
    for (a, b), d in [*every.items()]:  # the other order: the same test, and the interval mirrored
        every[b, a] = [-x for x in d]
        if (a, b) in p:
            p[b, a] = p[a, b]
        if (a, b) in ends:
            low, high = ends[a, b]
            ends[b, a] = -high, -low
    found: dict[Pair, Comparison] = {}
    for baseline in scores:
        pairs = {(x, baseline): every[x, baseline] for x in scores if x != baseline}
        tested = _family(pairs, p)
        found |= {x: _comparison(x, d, sign, *tested, ends=ends.get(x)) for x, d in pairs.items()}
    return found


def _comparison(
    pair: Pair,
    d: list[float],
    sign: int,
    p: dict[Pair, float],
    corrected: dict[Pair, float],
    enough: bool,
    ends: tuple[float, float] | None = None,
) -> Comparison:
    if not d:
        return Comparison(pair[1], None, None, None, None, None, 0, TOO_FEW)
    mean = math.fsum(d) / len(d) if all(map(math.isfinite, d)) else math.nan
    if not math.isfinite(mean):
        return Comparison(pair[1], None, None, None, None, None, len(d), NOT_FINITE)
    low, high = ends or bootstrap(d)
    if len(d) < LEAST or not enough:
        verdict = TOO_FEW
    elif corrected[pair] > ALPHA:
        verdict = "undecided"
    else:
        verdict = "better" if sign * mean > 0 else "worse"
    mean, low, high = (round(x, DECIMALS) for x in (mean, low, high))
    return Comparison(pair[1], mean, low, high, p.get(pair), corrected.get(pair), len(d), verdict)
