"""Paired comparison of methods: all answer the same prompts, so their differences are taken prompt by prompt.

The spread between easy and hard prompts cancels in these differences, which can therefore separate methods whose own
intervals overlap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    d = np.array([x for x in differences if x], dtype=np.float64)
    slack = 1e-9 * float(np.abs(d).sum())  # sums that are equal but for rounding count as equal
    least = abs(float(d.sum())) - slack
    if least <= 0:
        return 1.0
    if len(d) > EXACT:
        blocks = np.array_split(_signs(len(d)), 10)  # bounds the memory
        return (sum(int((np.abs(x @ d) >= least).sum()) for x in blocks) + 1) / (FLIPS + 1)
    one, two = _sums(d[: len(d) // 2]), np.sort(_sums(d[len(d) // 2 :]))
    count = int((len(two) - np.searchsorted(two, least - one)).sum())
    return 2 * count / 2 ** len(d)  # as many sums are at most -least


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
    d = np.asarray(differences, dtype=np.float64)
    means = np.sort(_counts(len(d)) @ d / len(d))
    k = round((RESAMPLES + 1) * ALPHA / 2)
    return float(means[k - 1]), float(means[-k])


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


def _family(pairs: Mapping[Pair, list[float]]) -> tuple[dict[Pair, float], dict[Pair, float], bool]:
    """Test a family of pairs.

    Returns:
        p, the corrected p, and whether the family has enough prompts: whether the smallest p that so many prompts can
        give withstands the correction. Pairs with less than `LEAST` prompts are not tested.
    """
    tested = {x: d for x, d in pairs.items() if len(d) >= LEAST and all(map(math.isfinite, d))}
    p = {x: sign_flip(d) for x, d in tested.items()}
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


def _comparison(
    pair: Pair, d: list[float], sign: int, p: dict[Pair, float], corrected: dict[Pair, float], enough: bool
) -> Comparison:
    if not d:
        return Comparison(pair[1], None, None, None, None, None, 0, TOO_FEW)
    mean = math.fsum(d) / len(d) if all(map(math.isfinite, d)) else math.nan
    if not math.isfinite(mean):
        return Comparison(pair[1], None, None, None, None, None, len(d), NOT_FINITE)
    low, high = bootstrap(d)
    if len(d) < LEAST or not enough:
        verdict = TOO_FEW
    elif corrected[pair] > ALPHA:
        verdict = "undecided"
    else:
        verdict = "better" if sign * mean > 0 else "worse"
    mean, low, high = (round(x, DECIMALS) for x in (mean, low, high))
    return Comparison(pair[1], mean, low, high, p.get(pair), corrected.get(pair), len(d), verdict)
