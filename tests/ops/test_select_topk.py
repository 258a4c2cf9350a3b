"""select_topk against its reference: exact, so indices are compared bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops import ops
from kvops.ops import reference
from kvops.ops.lag import kept_length, num_segments

pytestmark = kit.every_device

NAN, INF = float("nan"), float("inf")


def check(scores, k, sinks=0, window=0, seq_len=None, **options):
    options.update(k=k, sinks=sinks, window=window, seq_len=seq_len)
    actual = ops.select_topk(scores, **options)
    assert torch.equal(actual, reference.select_topk(scores, **options))
    for row in actual.flatten(0, 1):
        kept = row[row >= 0]
        assert (kept.diff() > 0).all() and (row[len(kept) :] == -1).all()
    return actual


GOLDEN = 2654435769  # the CPU kernel samples a row in steps of GOLDEN / 2**32 of its length


@kit.only("cpu")
@pytest.mark.parametrize("n", [257, 1000, 5000, 40_000])
def test_rows_that_a_sample_misjudges(n):
    """Few values, long ties, periods, outliers, and rows in which exactly the sampled slots are high or low. Also with
    threads that share a row."""
    x, slots = kit.randn(n), torch.arange(n)
    sampled = torch.zeros(n, dtype=torch.bool)
    sampled[[(i * GOLDEN % 2**32) * n >> 32 for i in range(256 if n >= 32768 else 128 if n >= 4096 else 64)]] = True
    rows = [
        torch.ones(n),
        (x > 0).float(),
        x.relu(),
        (3 * x).round(),
        slots.float(),
        -slots.float(),
        (slots % 64).float(),
        torch.where(slots % 97 == 5, 1e30, x),
        torch.where(x > 0, x, NAN),
        torch.where(x > 1.7, x, NAN),  # one in 22
        torch.where(x > 0, INF, -INF),
        torch.where(sampled, 100 + x, x),
        torch.where(sampled, x - 100, x),
        torch.where(sampled, 1.0, 0.0),
        torch.where(sampled, 5.0, x),
    ]
    scores = torch.stack(rows)[:, None]
    for k in {1, 2, 60, 255, 256, 257, n // 4, n // 2, max(n - 300, 0), n - 2, n - 1}:
        kept = check(scores, k)
        for row, its in zip(scores[:, None], kept[:, None]) if n == 40_000 else ():
            with kit.threads(3):
                assert torch.equal(ops.select_topk(row, k=k), its)


@given(
    kind=st.sampled_from(kit.SCORES),
    n=st.integers(1, 700),
    data=st.data(),
    seed=st.integers(0, 2**31),
)
@kit.examples(150)
def test_rows(kind, n, data, seed):
    k = data.draw(st.integers(0, n + 5))
    sinks = data.draw(st.integers(0, k))
    window = data.draw(st.integers(0, k - sinks))
    check(kit.scores(kind, 2, 2, n, seed=seed), k, sinks, window)


@pytest.mark.parametrize("kind", kit.SCORES)
@pytest.mark.parametrize("n", [16, 255, 256, 257, 4099, kit.size(60_000, 20_000)])
def test_lengths_of_rows(kind, n):
    for rows in (1, 3):
        scores = kit.scores(kind, 1, rows, n)
        for k in (1, n // 4, n - 1, n):
            check(scores, k)


@kit.only("simulator")
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_long_rows_on_several_gpus(rows, monkeypatch):
    """Clusters of eight, four and two blocks, and no clusters, select the same slots."""
    scores = kit.scores("ties", 1, rows, 17_000)
    for device in ("small", "h200", "a100"):
        monkeypatch.setenv("CUDASIM_DEVICE", device)
        check(scores, 4000, 5, 9)


@kit.only("simulator")
@pytest.mark.parametrize(
    "device, rows, n", [("small", 1, 140_000), ("small", 3, 40_000), ("small", 5, 40_000), ("a100/8", 13, 40_000)]
)
@pytest.mark.parametrize("kind", ["ties", "normal"])
def test_rows_that_do_not_fit_in_registers(device, rows, n, kind, monkeypatch):
    """A cluster of eight blocks, one of two, a single block, and chunks read their scores again in each pass."""
    monkeypatch.setenv("CUDASIM_DEVICE", device)
    check(kit.scores(kind, 1, rows, n), n // 4, 5, 9)


@pytest.mark.parametrize("n", [5, 1025, 4100])
def test_rows_at_any_address(n):
    """Rows of scores may begin at any multiple of 4 bytes."""
    scores = kit.scores("normal", 2, 3, n)
    for offset, gap in ((1, 0), (2, 0), (3, 1), (0, 2), (4, 4)):
        assert torch.equal(
            ops.select_topk(kit.unaligned(scores, offset, gap), k=n // 2, sinks=1, window=1),
            check(scores, n // 2, 1, 1),
        )


@kit.only("cuda", "simulator")
def test_many_heads():
    """More heads than a CUDA grid can have blocks in y."""
    check(kit.scores("ties", 7, kit.size(10_000, 300), 9), 4, 1, 1)


@pytest.mark.parametrize("rows, n", [(3, 300), (2, kit.size(100_000, 5_000)), (1, kit.size(1_000_000, 40_000))])
def test_repeatable(rows, n):
    for kind in ("normal", "ties"):
        scores = kit.scores(kind, 1, rows, n)
        kit.assert_repeatable(lambda: (ops.select_topk(scores, k=n // 3, sinks=4, window=9),))  # noqa: B023


@kit.only("cpu", "cuda")
def test_a_million():
    scores = kit.scores("normal", 1, 1, 1_000_000)
    kept = ops.select_topk(scores, k=250_000)
    assert torch.equal(kept[0, 0], scores[0, 0].topk(250_000).indices.sort().values)
    ties = kit.scores("ties", 1, 1, 1_000_000)
    kept = ops.select_topk(ties, k=250_000)[0, 0]
    threshold = ties[0, 0, kept].min()
    assert (ties[0, 0] > threshold).sum() == (ties[0, 0, kept] > threshold).sum()
    at_threshold = (ties[0, 0] == threshold).nonzero().flatten()
    assert torch.equal(kept[ties[0, 0, kept] == threshold], at_threshold[: (ties[0, 0, kept] == threshold).sum()])


@kit.only("cpu")
@pytest.mark.parametrize("kind", kit.SCORES)
def test_threads_change_nothing(kind):
    """The row is long enough for several threads, which split it into chunks."""
    scores = kit.scores(kind, 1, 1, 300_000)
    with kit.threads(1):
        one = ops.select_topk(scores, k=9_000, sinks=4, window=32)
    for count in (2, 3, 7):
        with kit.threads(count):
            assert torch.equal(ops.select_topk(scores, k=9_000, sinks=4, window=32), one)


@kit.only("cpu")
@pytest.mark.parametrize("n", [50, 300_000])
def test_threads_that_flush_subnormal_numbers(n):
    """torch.set_flush_denormal affects the calling thread, but not the worker threads."""
    scores = kit.scores("tiny", 1, 1, n)
    expected = ops.select_topk(scores, k=n // 3)
    assert torch.set_flush_denormal(True)
    try:
        kept = ops.select_topk(scores, k=n // 3)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(kept, expected)


@given(data=st.data(), n=st.integers(1, 60), kind=st.sampled_from(kit.SCORES), fill=st.booleans(), own=st.booleans())
@kit.examples(120)
def test_padded_rows_and_budgets(data, n, kind, fill, own):
    k = data.draw(st.integers(0, n))
    sinks = data.draw(st.integers(0, k))
    window = data.draw(st.integers(0, k - sinks))
    starts = [data.draw(st.integers(0, n)) for _ in range(3)]
    lengths = [data.draw(st.integers(0, n - s)) for s in starts]
    budgets = None
    if own:
        budgets = torch.tensor([[data.draw(st.integers(sinks + window, k)) for _ in "ab"] for _ in "abc"]).int()
    spans = dict(starts=kit.int32(*starts), lengths=kit.int32(*lengths))
    kept = check(kit.scores(kind, 3, 2, n), k, sinks, window, **spans, budgets=budgets, fill_invalid=fill)
    for row, (s, c) in enumerate(zip(starts, lengths)):
        inside = ((kept[row] >= s) & (kept[row] < s + c)).sum(-1)
        expected = budgets[row] if own else torch.full((2,), k)
        assert torch.equal(inside, expected.clamp(max=c).long())
        if not fill:
            assert ((kept[row] == -1) | ((kept[row] >= s) & (kept[row] < s + c))).all()


@given(
    data=st.data(),
    n=st.integers(0, 90),
    lag=st.integers(1, 12),
    sinks=st.integers(0, 9),
    kind=st.sampled_from(kit.SCORES),
    padded=st.booleans(),
    fill=st.booleans(),
)
@kit.examples(120)
def test_segments(data, n, lag, sinks, kind, padded, fill):
    m = data.draw(st.integers(0, lag))
    scores = kit.scores(kind, 2, 2, num_segments(n, sinks, lag), lag)
    spans = {}
    if padded:
        starts = [data.draw(st.integers(0, n)) for _ in range(2)]
        spans = dict(starts=kit.int32(*starts), lengths=kit.int32(*(data.draw(st.integers(0, n - s)) for s in starts)))
    kept = check(scores, m, sinks, 0, n, fill_invalid=fill, **spans)
    if not padded:
        assert kept.shape[2] == kept_length(n, sinks, lag, m) and (kept >= 0).all()


def test_strided_and_expanded_scores():
    scores = kit.scores("normal", 2, 6, 80)
    check(scores[:, ::2, 3:70], 20)
    assert torch.equal(
        ops.select_topk(scores[:, :1].expand(-1, 4, -1), k=20)[:, 3], ops.select_topk(scores, k=20)[:, 0]
    )


def test_bad_input():
    scores = torch.zeros(2, 2, 10)
    for arguments, parts in (
        (dict(scores=scores[0], k=3), ("select_topk", "scores must be", r"\[2, 10\]")),
        (dict(scores=scores.half(), k=3), ("scores must be torch.float32", "torch.float16")),
        (dict(scores=scores.mT, k=3), ("contiguous last dim",)),
        (dict(scores=scores, k=-1), ("k must be >= 0", "-1")),
        (dict(scores=scores, k=8, sinks=4, window=6), (r"sinks \+ window must be <= k", "at most 8", r"4 \+ 6")),
        (dict(scores=scores, k=8, sinks=-1), ("sinks and window must be >= 0", "-1")),
        (dict(scores=scores, k=3, sinks=2**62, window=2**62), (r"sinks \+ window must be <= k",)),
        (dict(scores=scores, k=3, seq_len=10), ("seq_len",)),
        (dict(scores=scores[None], k=3), ("seq_len must be given",)),
        (dict(scores=torch.zeros(2, 2, 3, 4), k=3, seq_len=12), ("must have 2 segments", r"\[2, 2, 3, 4\]")),
        (dict(scores=torch.zeros(2, 2, 0, 0), k=0, seq_len=12), ("segments of at least 1 token", r"\[2, 2, 0, 0\]")),
        (dict(scores=torch.zeros(2, 2, 0, 4), k=0, seq_len=-1), ("seq_len must be >= 0, got -1",)),
        (dict(scores=torch.zeros(2, 2, 2, 4), k=5, seq_len=12), ("segment length 4", "got 5")),
        (dict(scores=torch.zeros(2, 2, 2, 4), k=3, window=1, seq_len=12), ("window must be 0",)),
        (dict(scores=scores, k=3, budgets=torch.full((2, 2), 4, dtype=torch.int32)), ("budgets must lie", "got 4")),
        (dict(scores=scores, k=3, budgets=torch.ones(2, 2)), ("budgets must be torch.int32", "torch.float32")),
        (dict(scores=scores, k=3, starts=kit.int32(0, 11)), ("starts and lengths of row 1",)),
    ):
        with kvops.debug_checks(), kit.refuses(*parts):
            ops.select_topk(**arguments)
    with kit.refuses("scores must be a torch.Tensor", kind=TypeError):
        ops.select_topk(3, k=3)


@kit.only("cuda", "simulator")
def test_a_gpus_starts_lengths_and_budgets_are_not_looked_at():
    """Out-of-range values are clamped."""
    starts, lengths = kit.int32(-3, 60, 10, 10, 2**31 - 1, -(2**31)), kit.int32(30, 5, 2**31 - 1, -4, 20, -(2**31))
    budgets = torch.tensor([[2**31 - 1, -(2**31)], [21, 4], [2, 20], [-1, 5], [20, 20], [0, 7]], dtype=torch.int32)
    good_starts = kit.int32(0, 50, 10, 10, 50, 0)
    segments = kit.scores("ties", 6, 2, num_segments(50, 3, 6), 6)
    for fill in (False, True):
        for bad, good in (
            ((starts, lengths), (good_starts, kit.int32(30, 0, 40, 0, 0, 0))),
            ((starts, None), (good_starts, None)),
            ((None, lengths), (None, kit.int32(30, 5, 50, 0, 20, 0))),
        ):
            good, bad = (dict(starts=s, lengths=c, fill_invalid=fill) for s, c in (good, bad))
            scores = kit.scores("ties", 6, 2, 50)
            expected = check(scores, 20, 2, 3, **good, budgets=budgets.clamp(5, 20))
            found = ops.select_topk(scores, k=20, sinks=2, window=3, **bad, budgets=budgets)
            assert torch.equal(found, expected)
            expected = check(segments, 2, 3, 0, 50, **good)
            assert torch.equal(ops.select_topk(segments, k=2, sinks=3, seq_len=50, **bad), expected)
