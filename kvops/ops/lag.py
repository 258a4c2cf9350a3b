"""LagKV's arithmetic in plain integers: which partitions are scored, where they begin, how many slots are kept.

The slots from `prefix` on are cut into partitions of `lag` slots. (The prefix is the sinks, and in a stream also the
slots kept from older partitions.) All complete partitions but the last are scored and are called segments. LagKV keeps
`kept` slots of each segment and all slots outside of segments.

Source: LagKV, Sec. 2.2, Eq. 10.
"""


def num_segments(n: int, prefix: int, lag: int) -> int:
    """The number of scored partitions of n slots: all complete ones of [prefix, n) but the last."""
    return max(0, (n - prefix) // lag - 1)


def segment_start(segment: int, prefix: int, lag: int) -> int:
    """The first slot of a partition."""
    return prefix + segment * lag


def kept_length(n: int, prefix: int, lag: int, kept: int) -> int:
    """The number of slots kept of n (Eq. 10)."""
    return n - num_segments(n, prefix, lag) * (lag - kept)


def longest_kept(n: int, prefix: int, lag: int, kept: int) -> int:
    """The largest number of slots kept of any n' <= n, which is the width of a padded batch (not monotone in n')."""
    # The kept length grows by one per token and drops by lag - kept whenever a partition completes. The maximum
    # therefore lies at n or just before the last drop.
    last_drop = segment_start(max(0, n - prefix) // lag, prefix, lag)
    before = kept_length(min(n, last_drop - 1), prefix, lag, kept) if last_drop > 0 else 0
    return max(kept_length(n, prefix, lag, kept), before)


def kept_within(n: int, prefix: int, lag: int, budget: int) -> tuple[int, int]:
    """Solves Eq. 10 for `kept`: the largest one within the budget (-1 if there is none), and the slots kept with 0."""
    scored, fixed = num_segments(n, prefix, lag), kept_length(n, prefix, lag, 0)
    return min((budget - fixed) // scored, lag) if scored and budget >= fixed else -1, fixed
