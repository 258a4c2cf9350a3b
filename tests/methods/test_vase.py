"""VaSE: what always stays, how the rest is drawn, decode, padding, errors."""

import pytest
import torch

import kit
import kvops
from kvops.methods.view import View
from kvops.ops.window import causal_limits, summed_scores
from test_criticalkv import attention_rows

pytestmark = kit.every_device

SINKS, WINDOW, BUDGET, LARGEST = 3, 8, 60, 15


def inputs(b=2, heads=2, group=3, n=200, d=16, w=WINDOW, seed=0):
    k, v = kit.kv(b, heads, n, d, seed=seed)
    return k, v, kit.randn(b, heads * group, w, d, seed=seed + 1)


def policy(**settings):
    return kvops.VaSE(BUDGET, window=WINDOW, **{"sinks": SINKS, **settings})


def probabilities(k, q):
    """Return the probabilities of the slots before the window, up to a factor: fp64 [b, Hk, n - w]."""
    w = q.shape[2]
    attention = attention_rows(q, k).mean((2, 3))[..., :-w]
    return torch.nn.functional.avg_pool1d(attention, 5, 1, 2)


def largest(v, first=SINKS, last=-WINDOW):
    """Return the slots of the largest ranges, int64 [b, Hk, LARGEST]."""
    return (v.amax(-1) - v.amin(-1))[..., first:last].topk(LARGEST).indices + first


def test_sinks_window_and_the_largest_values_stay():
    k, v, q = inputs()
    v[:, 1, 50] = torch.nan  # is never among the largest
    k[0, 0, 70] = torch.nan
    for seed in range(5):
        kept = policy(seed=seed).compress(k, v, q).indices
        wanted = largest(v.nan_to_num(0.0))
        for row in range(2):
            for head in range(2):
                slots = set(kept[row, head].tolist())
                assert {*range(SINKS), *range(192, 200), *wanted[row, head].tolist()} <= slots and len(slots) == BUDGET
        assert not (kept[0, 0] == 70).any() or 70 in wanted[0, 0]


def test_the_rest_is_drawn_in_proportion_to_the_attention():
    """One token of 300 draws by the seed: the counts are those of the probabilities, by a chi-squared test."""
    k, v, q = inputs(b=1, heads=1, group=2, n=40)
    keep, draws = SINKS + WINDOW + 1, 4000
    options = dict(sinks=SINKS, window=WINDOW, largest_values=0)
    counts = torch.zeros(40)
    for seed in range(draws):
        kept = kvops.VaSE(keep, seed=seed, **options).compress(k, v, q).indices.flatten()
        counts[kept] += 1
    p = probabilities(k, q)[0, 0, SINKS:]
    expected = draws * p / p.sum()
    found = counts[SINKS:-WINDOW].to(expected)
    chi = ((found - expected).square() / expected).sum()
    freedom = len(expected) - 1
    assert expected.min() > 5 and abs(chi - freedom) < 5 * (2 * freedom) ** 0.5
    assert found.sum() == draws


def test_each_eviction_draws_anew():
    k, v, _ = inputs()
    one, other = (policy().gumbel(View(k[:, :, :n], v[:, :, :n], layer=2))[..., :150] for n in (150, 151))
    assert (one != other).float().mean() > 0.99 and (one[:, 0] != one[:, 1]).float().mean() > 0.99
    assert torch.equal(one[0], one[1])  # rows of a batch that have seen as many tokens
    assert abs(one.mean() - 0.5772) < 0.2 and abs(one.var() - 1.6449) < 0.5


def test_decode_evicts_by_the_queries_of_the_last_tokens():
    k, v, q = inputs(n=150, w=150)
    rule = policy(buffer=16)
    cache = kvops.Cache(rule)
    cache.attend(q[:, :, :100], k[:, :, :100], v[:, :, :100])
    kept = rule.compress(k[:, :, :100], v[:, :, :100], q[:, :, 100 - WINDOW : 100])
    assert torch.equal(cache.positions, kept.indices)
    for i in range(100, 132):
        cache.attend(*(x[:, :, i : i + 1] for x in (q, k, v)))
        assert len(cache) == BUDGET + (i - 99) % 16
    stay = cache.positions
    assert torch.equal(stay[..., :SINKS], torch.arange(SINKS).expand_as(stay[..., :SINKS]))
    assert torch.equal(stay[..., -WINDOW:], torch.arange(132 - WINDOW, 132).expand_as(stay[..., -WINDOW:]))


def test_the_largest_number_is_finite():
    """A hash of 2^24 - 1 is among the numbers of these tokens."""
    n = 1 << 19
    k, v, q = inputs(b=1, heads=1, group=1, n=n, d=8, w=4)
    rule = kvops.VaSE(12, window=4, sinks=4, largest_values=4, seed=58)
    assert rule.gumbel(View(k, v)).isfinite().all()
    wanted = (v.amax(-1) - v.amin(-1))[0, 0, 4:-4].topk(4).indices + 4
    assert {*wanted.tolist()} <= {*rule.compress(k, v, q).indices.flatten().tolist()}


def test_more_rows_than_a_call_takes():
    """The operators take 256 rows; the mean of more is that of all rows."""
    k, v, q = inputs(n=400, w=300)
    wanted = attention_rows(q, k).mean((2, 3)).float()
    got = summed_scores(q, k, causal_limits(400, 300, k.device), None, reduce="mean")
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-7)
    padded = summed_scores(q, k, causal_limits(400, 300, k.device), None, reduce="mean", starts=kit.int32(0, 150))
    alone = summed_scores(q[1:, :, 50:], k[1:, :, 150:], causal_limits(250, 250, k.device), None, reduce="mean")
    torch.testing.assert_close(padded[1:, :, 150:], alone, rtol=1e-4, atol=1e-7)


def test_padded_rows_draw_as_if_alone():
    k, v, q = inputs(b=3)
    starts = [0, 37, 120]
    kept = policy().compress(k, v, q, starts=kit.int32(*starts)).indices
    for row, s in enumerate(starts):
        alone = policy().compress(k[row, None, :, s:], v[row, None, :, s:], q[row, None]).indices + s
        for mine, others in zip(kept[row], alone[0]):
            assert (
                len({*mine.tolist()} & {*others.tolist()}) >= BUDGET - 1
            )  # a softmax over more slots rounds otherwise


def test_a_fraction_of_a_fraction():
    """Each row keeps a quarter of its own budget by the ranges."""
    k, v, q = inputs()
    starts = kit.int32(0, 60)
    kept = kvops.VaSE(0.5, window=WINDOW, sinks=SINKS).compress(k, v, q, starts=starts).indices
    for row, first in enumerate(starts.tolist()):
        count = (200 - first) // 2
        wanted = (v.amax(-1) - v.amin(-1))[row, :, first + SINKS : -WINDOW].topk(count // 4).indices + first + SINKS
        for mine, large in zip(kept[row].tolist(), wanted.tolist()):
            assert set(large) <= set(mine) and sum(x >= 0 for x in mine) == count


@pytest.mark.parametrize("head_mode", ["shared", "adaptive"])
def test_head_modes(head_mode):
    k, v, q = inputs()
    kept = policy(head_mode=head_mode).compress(k, v, q)
    if head_mode == "shared":
        assert torch.equal(kept.indices[:, 0], kept.indices[:, 1]) and kept.k.shape[2] == BUDGET
        wanted = (v.amax(-1) - v.amin(-1)).mean(1)[:, SINKS:-WINDOW].topk(LARGEST).indices + SINKS
        for mine, large in zip(kept.indices[:, 0].tolist(), wanted.tolist()):
            assert {*large} <= {*mine}
        other = policy(head_mode=head_mode, seed=1).compress(k, v, q).indices
        assert len({*other[0, 0].tolist()} - {*kept.indices[0, 0].tolist()}) > 5  # the rest is drawn
    else:
        assert ((kept.indices >= 0).sum((1, 2)) == 2 * BUDGET).all()


def test_bad_input():
    k, v, q = inputs()
    for settings, parts in (
        (
            dict(budget=20, largest_values=16),
            (r"budget must hold sinks \+ window \+ largest_values", "3 .* 8 .* 16 .* 20"),
        ),
        (dict(kernel_size=4), ("VaSE: kernel_size must be odd", "got 4")),
        (dict(pooling="sum"), ("VaSE: pooling must be", "got 'sum'")),
        (dict(budget=10), ("VaSE: budget must hold sinks", "3 .* 8 .* 2 tokens, got 10", "lower one of the others")),
        (dict(window=4), ("VaSE: q_window must have at most window rows, expected at most 4, got 8",)),
        (dict(seed=-1), ("VaSE: seed must be at least 0, got -1",)),
    ):
        with kit.refuses(*parts):
            kvops.VaSE(**{"budget": BUDGET, "sinks": SINKS, "window": WINDOW, **settings}).compress(k, v, q)
    for wrong, parts in (
        (v[:, :, :50], ("v must be torch.float32", r"200\] as in k, got torch.float32 \[2, 2, 50, 16\]")),
        (v.double(), ("v must be torch.float32", "got torch.float64")),
        (v[0], ("v must be", r"got torch.float32 \[2, 200, 16\]")),
        (v.clone().requires_grad_(), ("v requires grad",)),
    ):
        with kit.refuses("vase_compress", *parts):
            kvops.vase_compress(k, wrong, q, BUDGET)
    with kit.refuses("vase_compress: v must be a torch.Tensor", kind=TypeError):
        kvops.vase_compress(k, None, q, BUDGET)
