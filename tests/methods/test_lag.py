"""LagKV's arithmetic, checked by counting."""

from hypothesis import given
from hypothesis import strategies as st

import kit
from kvops.ops.lag import kept_length, kept_within, longest_kept, num_segments, segment_start

SHAPES = dict(n=st.integers(0, 90), prefix=st.integers(0, 20), lag=st.integers(1, 15))


@given(**SHAPES, data=st.data())
@kit.examples(200)
def test_what_stays(n, prefix, lag, data):
    """A segment is a partition followed by a complete one."""
    kept = data.draw(st.integers(0, lag))
    segments = [s for s in range(n + 1) if segment_start(s + 2, prefix, lag) <= n]
    assert num_segments(n, prefix, lag) == len(segments)
    firsts = [segment_start(s, prefix, lag) for s in segments]
    inside = {slot for first in firsts for slot in range(first, first + lag)}
    assert len(inside) == len(segments) * lag and all(prefix <= slot < n - lag for slot in inside)
    assert kept_length(n, prefix, lag, kept) == n - len(inside) + len(segments) * kept
    assert longest_kept(n, prefix, lag, kept) == max(kept_length(i, prefix, lag, kept) for i in range(n + 1))


@given(**SHAPES, budget=st.integers(0, 100))
@kit.examples(200)
def test_what_a_budget_allows(n, prefix, lag, budget):
    kept, fixed = kept_within(n, prefix, lag, budget)
    assert fixed == kept_length(n, prefix, lag, 0)
    fits = [m for m in range(lag + 1) if kept_length(n, prefix, lag, m) <= budget]
    assert kept == (max(fits, default=-1) if num_segments(n, prefix, lag) else -1)
