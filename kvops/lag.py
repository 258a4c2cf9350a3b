"""LagKV's arithmetic, in plain integers: which partitions are scored, where they lie, how many slots stay.

The slots from `prefix` on (the sinks; in a stream also what was kept of older partitions) are cut into partitions of
`lag`. All complete ones but the last are scored, and called segments; `kept` slots of each stay, and all other slots.

Source: LagKV, Sec. 2.2, Eq. 10.
"""


def num_segments(n: int, prefix: int, lag: int) -> int:
    """The scored partitions of n slots: all complete ones of [prefix, n) but the last."""
    return max(0, (n - prefix) // lag - 1)


def segment_start(segment: int, prefix: int, lag: int) -> int:
    """The first slot of a partition."""
    return prefix + segment * lag


def kept_length(n: int, prefix: int, lag: int, kept: int) -> int:
    """Eq. 10: the slots that stay of n."""
    return n - num_segments(n, prefix, lag) * (lag - kept)


def longest_kept(n: int, prefix: int, lag: int, kept: int) -> int:
    """The most slots that stay of any n' <= n, which a padded batch has to have room for (not monotone in n')."""
    # The kept length grows one by one and drops by lag - kept whenever a partition completes; so the maximum lies at n
    # or just before the last drop.
    last_drop = segment_start(max(0, n - prefix) // lag, prefix, lag)
    before = kept_length(min(n, last_drop - 1), prefix, lag, kept) if last_drop > 0 else 0
    return max(kept_length(n, prefix, lag, kept), before)


def kept_within(n: int, prefix: int, lag: int, budget: int) -> tuple[int, int]:
    """Solves Eq. 10 for `kept`: the most within the budget (-1: none), and the slots that stay with 0."""
    scored, fixed = num_segments(n, prefix, lag), kept_length(n, prefix, lag, 0)
    return min((budget - fixed) // scored, lag) if scored and budget >= fixed else -1, fixed
