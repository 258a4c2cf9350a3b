"""The methods in one call, compared with small fp64 versions written from their formulas, and their properties."""

import functools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops

pytestmark = kit.every_device
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
names = functools.partial(pytest.mark.parametrize, ids=lambda x: getattr(x, "__name__", str(x)))
examples = kit.examples(40, derandomize=True)


def make_kv(seed=0, b=2, heads=2, n=40, d=16, dv=8, dtype=torch.float32, layout="BHND"):
    """Return random k [b, heads, n, d] and v [b, heads, n, dv]; BNHD has the strides of [b, n, heads, d] memory."""
    generator = torch.Generator().manual_seed(seed)

    def one(*shape):
        return kit.on_device(torch.randn(*shape, generator=generator, device="cpu").to(dtype))

    if layout == "BNHD":
        return tuple(one(b, n, heads, x).transpose(1, 2) for x in (d, dv))
    return tuple(one(b, heads, n, x) for x in (d, dv))


def rows_of(x, indices):
    """Return x[b, h, indices[b, h, i]], and zeros where the index is -1."""
    b, h = torch.arange(x.shape[0])[:, None, None], torch.arange(x.shape[1])[:, None]
    return torch.where(indices[..., None] < 0, 0, x[b, h, indices])


def assert_moved(result, k, v):
    """Check what every result guarantees: ascending indices, -1 only at the end, and their rows bit for bit."""
    indices = result.indices
    order = torch.where(indices < 0, k.shape[2] + torch.arange(indices.shape[2]), indices)
    assert indices.dtype == torch.int64 and (order.diff(dim=-1) > 0).all() and (indices < k.shape[2]).all()
    assert torch.equal(result.k, rows_of(k, indices)) and torch.equal(result.v, rows_of(v, indices))


def fp64(x):
    return x.double().cpu().numpy()


def assert_best(kept, scores, count, tolerance=2e-6):
    """Check that `kept` are the `count` highest fp64 `scores`, except for differences that fp32 cannot resolve."""
    assert len(kept) == count
    if 0 < count < len(scores):
        threshold = np.sort(scores)[-count]
        dropped = np.setdiff1d(np.arange(len(scores)), kept)
        assert scores[kept].min() >= threshold - tolerance and scores[dropped].max() <= threshold + tolerance


# fp64 versions of the formulas


def lagkv_scores(k, v, lag, sinks, v_weight=1.0, reference="lag", score="std"):
    """Return one head's scores, [S, lag]. k: [n, d], v: [n, dv]."""
    result = []
    for p in range((len(k) - sinks) // lag - 1):
        total = 0.0
        for z, weight in ((k, 1.0), (v, v_weight)):
            x = z[sinks + p * lag : sinks + (p + 1) * lag]
            y = x if reference == "self" else z[sinks + (p + 1) * lag : sinks + (p + 2) * lag]
            normalized = (x - y.min(0)) / np.where(y.max(0) > y.min(0), y.max(0) - y.min(0), np.inf)
            spread = np.exp(normalized.std(1, ddof=1))
            total = total + weight * spread / spread.sum()
        result.append(-np.linalg.norm(k[sinks + p * lag : sinks + (p + 1) * lag], axis=1) if score == "l2" else total)
    return np.array(result).reshape(-1, lag)


def keydiff_scores(k, metric="cosine", anchor="mean", normalize=True):
    """Return one head's scores, [n]. k: [n, d]."""
    unit = k / np.linalg.norm(k, axis=1, keepdims=True)
    if anchor == "pairwise":
        return -(unit @ unit.T).mean(1)
    members = unit if normalize else k
    mu = members.mean(0) if anchor == "mean" else np.sort(members, 0)[(len(k) - 1) // 2]
    if metric == "cosine":
        return -unit @ mu / np.linalg.norm(mu)
    return -k @ mu if metric == "dot" else np.linalg.norm(k - mu, axis=1)


def lagkv_length(n, lag, m, sinks):
    """Eq. 10."""
    return sinks + m * ((n - sinks) // lag - 1) + lag + (n - sinks) % lag if n >= sinks + 2 * lag else n


# LagKV


@pytest.mark.parametrize("head_mode", ["per_head", "shared"])
@pytest.mark.parametrize("score, reference", [("std", "lag"), ("std", "self"), ("l2", "lag")])
@examples
@given(
    partitions=st.integers(0, 5).map(lambda x: 5 - x),
    rest=st.integers(0, 11),
    lag=st.integers(0, 8).map(lambda x: 12 - x),
    r=st.sampled_from([0.5, 0.334, 0.9]),
    sinks=st.integers(0, 10),
    v_weight=st.sampled_from([0.5, 1.0, 0.0]),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["BHND", "BNHD"]),
    seed=st.integers(0, 99),
)
def test_lagkv_is_its_formula(
    partitions, rest, lag, r, sinks, v_weight, reference, score, head_mode, dtype, layout, seed
):
    n = sinks + partitions * lag + rest
    k, v = make_kv(seed, n=n, dtype=dtype, layout=layout)
    options = dict(v_weight=v_weight, reference=reference, score=score)
    result = kvops.lagkv_compress(k, v, lag, r, sinks=sinks, head_mode=head_mode, **options)
    assert_moved(result, k, v)
    m = int(r * lag)
    assert (
        result.indices.shape[2] == lagkv_length(n, lag, m, sinks)
        and result.lengths.tolist() == [result.indices.shape[2]] * 2
    )
    for b in range(2):
        scores = [lagkv_scores(fp64(k[b, h]), fp64(v[b, h]), lag, sinks, **options) for h in (0, 1)]
        if head_mode == "shared":
            scores = [np.mean(scores, 0)] * 2
            assert torch.equal(result.indices[b, 0], result.indices[b, 1])
        for h in range(2):
            kept = result.indices[b, h].cpu().numpy()
            assert np.isin(np.arange(min(sinks, n)), kept).all()
            for p, part in enumerate(scores[h]):
                first = sinks + p * lag
                assert_best(kept[(kept >= first) & (kept < first + lag)] - first, part, m)
            assert np.isin(np.arange(sinks + len(scores[h]) * lag, n), kept).all()


@pytest.mark.parametrize(
    "lag, r, m", [(8, 0.0, 0), (8, 0.1, 0), (8, 1.0, 8), (8, 1, 8), (8, 0, 0), (1, 0.5, 0), (1, 1.0, 1)]
)
def test_lagkv_share_of_nothing_and_of_all(lag, r, m):
    k, v = make_kv(n=39)
    result = kvops.lagkv_compress(k, v, lag, r, sinks=4)
    assert_moved(result, k, v)
    last = 4 + ((39 - 4) // lag - 1) * lag
    want = range(39) if m else [*range(4), *range(last, 39)]
    assert (result.indices == torch.tensor(want)).all() and result.indices.shape[2] == lagkv_length(39, lag, m, 4)


def test_lagkv_defaults_are_the_papers():
    k, v = make_kv(b=1, heads=1, n=16 + 2 * 1024 + 5)
    assert torch.equal(
        kvops.lagkv_compress(k, v).indices, kvops.lagkv_compress(k, v, 1024, 0.5, sinks=16, v_weight=1.0).indices
    )
    assert kvops.lagkv_compress(k, v).indices.shape[2] == 16 + 512 + 1024 + 5
    assert kvops.lagkv_compress(k, v, 1024, 0.167).indices.shape[2] == 16 + 171 + 1024 + 5


@pytest.mark.parametrize("score", ["std", "l2"])
@pytest.mark.parametrize("head_mode", ["per_head", "shared"])
@examples
@given(
    starts=st.lists(st.integers(0, 12), min_size=3, max_size=3),
    lengths=st.lists(st.integers(0, 28).map(lambda x: 28 - x), min_size=3, max_size=3),
    lag=st.sampled_from([5, 4, 7, 2, 1]),
    sinks=st.integers(0, 4),
    seed=st.integers(0, 99),
)
def test_lagkv_padded_rows_are_as_alone(starts, lengths, lag, sinks, seed, score, head_mode):
    n, r = 40, 0.5
    k, v = make_kv(seed, b=3, n=n)
    for row, (start, length) in enumerate(zip(starts, lengths)):  # invalid slots must be ignored
        for x in (k, v):
            x[row, :, :start] = torch.nan
            x[row, :, start + length :] = torch.nan
    slots = dict(starts=torch.tensor(starts, dtype=torch.int32), lengths=torch.tensor(lengths, dtype=torch.int32))
    options = dict(sinks=sinks, score=score, head_mode=head_mode)
    result = kvops.lagkv_compress(k, v, lag, r, **slots, **options)
    filled = kvops.lagkv_compress(k, v, lag, r, **slots, **options, fill_invalid=True)
    assert_moved(result, k.nan_to_num(), v.nan_to_num())
    width = max(lagkv_length(i, lag, int(r * lag), sinks) for i in range(n + 1))
    assert result.indices.shape[2] == filled.indices.shape[2] == width
    for row, (start, length) in enumerate(zip(starts, lengths)):
        alone = (x[row : row + 1, :, start : start + length] for x in (k, v))
        want = kvops.lagkv_compress(*alone, lag, r, **options).indices + start
        m = want.shape[2]
        assert result.lengths[row] == m
        assert torch.equal(result.indices[row, :, :m], want[0]) and (result.indices[row, :, m:] == -1).all()
        invalid = [i for i in range(n) if not start <= i < start + length][: width - m]
        for head in range(2):
            assert filled.indices[row, head].tolist() == sorted(want[0, head].tolist() + invalid)


def test_lagkv_l2_leaves_the_first_two_layers():
    k, v = make_kv()
    lengths = torch.tensor([40, 30], dtype=torch.int32)
    for layer in (0, 1):
        whole = kvops.lagkv_compress(k, v, 4, 0.5, sinks=2, score="l2", layer=layer)
        assert torch.equal(whole.k, k) and torch.equal(whole.v, v) and whole.k.data_ptr() != k.data_ptr()
        padded = kvops.lagkv_compress(k, v, 4, 0.5, sinks=2, score="l2", layer=layer, lengths=lengths)
        assert padded.lengths.tolist() == [40, 30] and padded.k.shape == k.shape
        assert kvops.lagkv_compress(k, v, 4, 0.5, sinks=2, score="std", layer=layer).k.shape[2] < 40
    assert kvops.lagkv_compress(k, v, 4, 0.5, sinks=2, score="l2", layer=2).k.shape[2] < 40


def test_lagkv_constant_channels_have_no_say():
    k, v = make_kv(n=36)
    k[..., 3], v[..., 5] = 7.0, -1.0
    result = kvops.lagkv_compress(k, v, 8, 0.5, sinks=4)
    for h in range(2):
        for p, part in enumerate(lagkv_scores(fp64(k[0, h]), fp64(v[0, h]), 8, 4)):
            kept = result.indices[0, h].cpu().numpy() - 4 - p * 8
            assert_best(kept[(kept >= 0) & (kept < 8)], part, 4)
    same = kvops.lagkv_compress(torch.ones(1, 1, 36, 16), torch.ones(1, 1, 36, 16), 8, 0.5, sinks=4)
    first = [4 + 8 * p + i for p in range(3) for i in range(4)]  # all tie: the lower slots are kept
    assert same.indices[0, 0].tolist() == [*range(4), *first, *range(28, 36)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lagkv_by_one_threshold_for_all_heads(dtype):
    """Each scored partition keeps the highest scores of all heads together, as many in total as without."""
    k, v = make_kv(n=75, heads=4, dtype=dtype)
    k[1, 2, 9] = torch.nan
    indices = kvops.lagkv_compress(k, v, 12, 0.4, sinks=5, head_mode="adaptive").indices
    scores = kvops.ops.lag_score(k, v, lag=12, prefix=5)
    lengths = set()
    for row in range(2):
        kept = [set(x[x >= 0].tolist()) for x in indices[row]]
        assert all(x[x >= 0].tolist() == sorted(y) for x, y in zip(indices[row], kept))
        lengths |= {len(x) for x in kept}
        ends = {*range(5), *range(5 + 4 * 12, 75)}
        assert all(ends <= x for x in kept)
        for partition in range(4):
            every = [(float(x), h, j) for h, own in enumerate(scores[row, :, partition]) for j, x in enumerate(own)]
            best = sorted((x for x in every if x[0] == x[0]), key=lambda x: (-x[0], *x[1:]))[: 4 * int(0.4 * 12)]
            first = 5 + 12 * partition
            assert {(h, j) for _, h, j in best} == {(h, j) for h in range(4) for j in range(12) if first + j in kept[h]}
    assert len(lengths) > 2 and indices.shape[2] == max(lengths)
    for call in (dict(lengths=kit.int32(75, 75)), dict(starts=kit.int32(0, 3))):
        with kit.refuses("LagKV: with head_mode='adaptive', starts and lengths must be None"):
            kvops.LagKV(12, 0.4, head_mode="adaptive").compress(k, v, **call)
    with kit.refuses("LagKV: the heads of a cache keep the same number of tokens"):
        kvops.Cache(kvops.LagKV(12, 0.4, head_mode="adaptive"))
    with kit.refuses("needs score='std', whose scores are comparable", "got 'l2'"):
        kvops.LagKV(12, 0.4, head_mode="adaptive", score="l2")


def test_lagkv_nan_goes_first_and_stays_in_its_head():
    k, v = make_kv(n=36)
    clean = kvops.lagkv_compress(k, v, 8, 0.5, sinks=4)
    k[0, 0, 6] = torch.nan  # in partition 0
    result = kvops.lagkv_compress(k, v, 8, 0.5, sinks=4)
    assert 6 not in result.indices[0, 0] and torch.equal(result.indices[0, 0, 8:], clean.indices[0, 0, 8:])
    assert torch.equal(result.indices[0, 1], clean.indices[0, 1]) and torch.equal(result.indices[1], clean.indices[1])
    shared = kvops.lagkv_compress(k, v, 8, 0.5, sinks=4, head_mode="shared")
    k[0, 0, 6] = k[0, 1, 6] = torch.nan
    assert 6 not in kvops.lagkv_compress(k, v, 8, 0.5, sinks=4, head_mode="shared").indices[0]
    assert shared.indices.shape == clean.indices.shape


# KeyDiff


@examples
@given(
    n=st.integers(0, 59).map(lambda x: 60 - x),
    budget=st.one_of(st.sampled_from([0.25, 0.5, 0.999, 0.01, 1.0]), st.integers(1, 70)),
    sinks=st.integers(0, 6),
    recent=st.one_of(st.integers(0, 6), st.sampled_from([0.0, 0.2, 0.5])),
    normalize=st.booleans(),
    metric=st.sampled_from(["cosine", "cosine", "dot", "euclidean"]),
    anchor=st.sampled_from(["mean", "mean", "median", "pairwise"]),
    head_mode=st.sampled_from(["per_head", "shared"]),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["BHND", "BNHD"]),
    seed=st.integers(0, 99),
)
def test_keydiff_is_its_formula(n, budget, sinks, recent, normalize, metric, anchor, head_mode, dtype, layout, seed):
    k, v = make_kv(seed, n=n, dtype=dtype, layout=layout)
    keep = budget if isinstance(budget, int) else max(1, int(budget * n))
    newest = recent if isinstance(recent, int) else int(recent * keep)
    if anchor == "pairwise":
        metric = "cosine"
    options = dict(
        sinks=sinks, recent=recent, normalize_anchor=normalize, metric=metric, anchor=anchor, head_mode=head_mode
    )
    if sinks + newest > keep:
        with pytest.raises(ValueError, match=f"budget must hold sinks .* {sinks} .* {newest} .* got {keep}"):
            kvops.keydiff_compress(k, v, budget, **options)
        return
    result = kvops.keydiff_compress(k, v, budget, **options)
    assert_moved(result, k, v)
    assert result.indices.shape[2] == min(keep, n) and result.lengths.tolist() == [min(keep, n)] * 2
    if keep >= n:
        assert torch.equal(result.k, k) and torch.equal(result.v, v) and result.k.data_ptr() != k.data_ptr()
        return
    for b in range(2):
        scores = [keydiff_scores(fp64(k[b, h]), metric, anchor, normalize) for h in range(2)]
        if head_mode == "shared":
            scores = [np.mean(scores, 0)] * 2
            assert torch.equal(result.indices[b, 0], result.indices[b, 1])
        for h in range(2):
            kept = result.indices[b, h].cpu().numpy()
            assert np.isin([*range(sinks), *range(n - newest, n)], kept).all()
            between = kept[(kept >= sinks) & (kept < n - newest)] - sinks
            assert_best(between, scores[h][sinks : n - newest], keep - sinks - newest, tolerance=1e-5)


def test_keydiff_is_the_pairwise_ranking():
    k, v = make_kv(n=200, b=1, heads=3)
    for budget in (1, 20, 100, 199):
        mean = kvops.keydiff_compress(k, v, budget)
        assert torch.equal(mean.indices, kvops.keydiff_compress(k, v, budget, anchor="pairwise").indices)


@pytest.mark.parametrize(
    "options",
    [
        dict(budget=9),
        dict(budget=9, sinks=2, recent=3),
        dict(budget=9, recent=0.4, head_mode="shared"),
        dict(budget=0.4),
        dict(budget=0.4, recent=0.5, sinks=1),
        dict(budget=0.5, recent=2, head_mode="shared"),
        dict(budget=7, metric="euclidean"),
        dict(budget=0.3, anchor="median", metric="dot", normalize_anchor=False),
        dict(budget=7, anchor="pairwise"),
        dict(budget=1.0),
    ],
    ids=str,
)
@examples
@given(
    starts=st.lists(st.integers(0, 12), min_size=3, max_size=3),
    lengths=st.lists(st.integers(6, 28), min_size=3, max_size=3),
    poison=st.sampled_from([torch.nan, 0.0, 1e30]),
)
def test_keydiff_padded_rows_are_as_alone(options, starts, lengths, poison):
    assert_padded_rows_are_as_alone(kvops.keydiff_compress, dict(options), starts, lengths, poison)


@names(
    "compress, options",
    [
        (kvops.streamingllm_compress, dict(budget=9)),
        (kvops.streamingllm_compress, dict(budget=0.4, sinks=2)),
        (kvops.random_compress, dict(budget=9, seed=3)),
        (kvops.random_compress, dict(budget=0.4)),
    ],
)
@examples
@given(
    starts=st.lists(st.integers(0, 12), min_size=3, max_size=3),
    lengths=st.lists(st.integers(6, 28), min_size=3, max_size=3),
)
def test_padded_baselines_are_as_alone(compress, options, starts, lengths):
    assert_padded_rows_are_as_alone(compress, dict(options), starts, lengths, torch.nan)


def assert_padded_rows_are_as_alone(compress, options, starts, lengths, poison):
    n, budget = 40, options.pop("budget")
    k, v = make_kv(b=3, n=n)
    for row, (start, length) in enumerate(zip(starts, lengths)):
        for x in (k, v):
            x[row, :, :start] = poison
            x[row, :, start + length :] = poison
    slots = dict(starts=torch.tensor(starts, dtype=torch.int32), lengths=torch.tensor(lengths, dtype=torch.int32))
    result = compress(k, v, budget, **options, **slots)
    filled = compress(k, v, budget, **options, **slots, fill_invalid=True)
    assert_moved(result, k.nan_to_num(), v.nan_to_num())
    width = min(n, budget if isinstance(budget, int) else max(1, int(budget * n)))
    assert result.indices.shape[2] == filled.indices.shape[2] == width
    for row, (start, length) in enumerate(zip(starts, lengths)):
        alone = (x[row : row + 1, :, start : start + length] for x in (k, v))
        want = compress(*alone, budget, **options).indices + start
        m = want.shape[2]
        assert result.lengths[row] == m
        assert torch.equal(result.indices[row, :, :m], want[0]) and (result.indices[row, :, m:] == -1).all()
        invalid = [i for i in range(n) if not start <= i < start + length][: width - m]
        for head in range(2):
            assert filled.indices[row, head].tolist() == sorted(want[0, head].tolist() + invalid)


@pytest.mark.parametrize("side", ["left", "right"])
def test_one_of_starts_and_lengths_is_enough(side):
    k, v = make_kv(n=20)
    pads = torch.tensor([0, 5], dtype=torch.int32)
    slots = dict(starts=pads) if side == "left" else dict(lengths=20 - pads)
    other = dict(starts=pads, lengths=20 - pads) if side == "left" else dict(starts=0 * pads, lengths=20 - pads)
    for compress, args in ALL:
        assert torch.equal(compress(k, v, *args, **slots).indices, compress(k, v, *args, **other).indices)


@kit.only("cpu", "simulator")
def test_row_whose_fraction_cannot_hold_the_protected():
    """On a GPU the lengths are not read back, and the rows' budgets are clamped (docs/cuda.md)."""
    k, v = make_kv(n=20)
    lengths = torch.tensor([20, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"row 1: budget must hold sinks \+ recent, expected at least 2 \+ 1 .* got 2"):
        kvops.keydiff_compress(k, v, 0.5, sinks=2, recent=1, lengths=lengths)
    with pytest.raises(ValueError, match=r"row 1: budget must hold sinks \+ recent, expected at least 2 \+ 1 .* got 2"):
        kvops.keydiff_compress(k, v, 0.5, sinks=2, recent=0.5, lengths=lengths)


def test_keydiff_ties_zeros_and_nan():
    k, v = torch.ones(1, 1, 12, 16), torch.zeros(1, 1, 12, 16)
    assert kvops.keydiff_compress(k, v, 4).indices.flatten().tolist() == [0, 1, 2, 3]  # ties: the lower slots
    k[0, 0, 7] = 0  # scores 0, all others about -1
    assert 7 in kvops.keydiff_compress(k, v, 1).indices
    k[0, 0, 2], k[0, 0, 3] = torch.nan, torch.inf  # left out of the anchor, and evicted first
    assert kvops.keydiff_compress(k, v, 10).indices.flatten().tolist() == [0, 1, *range(4, 12)]
    assert kvops.keydiff_compress(k, v, 11).indices.flatten().tolist() == [0, 1, 2, *range(4, 12)]
    zero = torch.zeros(1, 1, 12, 16)
    for anchor in ("mean", "median", "pairwise"):
        assert kvops.keydiff_compress(zero, v, 3, anchor=anchor).indices.flatten().tolist() == [0, 1, 2]


@pytest.mark.parametrize("anchor", ["mean", "median", "pairwise"])
def test_keydiff_ablations_ignore_keys_that_are_not_finite(anchor):
    k, v = make_kv(n=30)
    good = [i for i in range(30) if i not in (4, 11)]
    want = kvops.keydiff_compress(k[:, :, good], v[:, :, good], 10, anchor=anchor)
    k[:, :, 4], k[0, :, 11, 3], k[1, :, 11] = torch.nan, torch.inf, -torch.inf
    result = kvops.keydiff_compress(k, v, 10, anchor=anchor)
    assert torch.equal(result.indices, torch.tensor(good)[want.indices])


def test_shared_mode_averages_the_finite_heads():
    k, v = make_kv(b=1, heads=2, n=20)
    k[0, 0, 5] = torch.nan
    result = kvops.keydiff_compress(k, v, 8, head_mode="shared")
    scores = np.stack([keydiff_scores(fp64(k[0, 1]))] * 2)
    others = [i for i in range(20) if i != 5]
    scores[0, others] = keydiff_scores(fp64(k[0, 0, others]))
    assert_best(result.indices[0, 0].cpu().numpy(), scores.mean(0), 8)
    k[0, 1, 5] = torch.nan  # not finite in any head
    assert 5 not in kvops.keydiff_compress(k, v, 19, head_mode="shared").indices


# Baselines


@examples
@given(n=st.integers(1, 40), budget=st.integers(1, 45), sinks=st.integers(0, 6))
def test_streamingllm_keeps_both_ends(n, budget, sinks):
    k, v = make_kv(n=n)
    if budget < sinks:
        with pytest.raises(ValueError, match="budget must hold"):
            kvops.streamingllm_compress(k, v, budget, sinks=sinks)
        return
    result = kvops.streamingllm_compress(k, v, budget, sinks=sinks)
    assert_moved(result, k, v)
    want = range(n) if n <= budget else [*range(sinks), *range(n - budget + sinks, n)]
    assert (result.indices == torch.tensor(want)).all() and result.indices.shape[2] == len(want)


def test_random_is_fair_and_reproducible():
    k, v = make_kv(b=2, heads=8, n=4000, d=8)
    result = kvops.random_compress(k, v, 0.25)
    assert_moved(result, k, v)
    assert result.indices.shape[2] == 1000 and torch.equal(result.indices, kvops.random_compress(k, v, 0.25).indices)
    assert torch.equal(result.indices[0], result.indices[1])  # batching changes nothing
    sets = [set(result.indices[0, h].tolist()) for h in range(8)]
    sets += [set(kvops.random_compress(k, v, 0.25, seed=seed).indices[0, 0].tolist()) for seed in (1, 2, 2**40)]
    kept = np.zeros(4000)
    for i, one in enumerate(sets):
        kept[list(one)] += 1
        for other in sets[:i]:
            assert abs(len(one & other) - 250) < 80  # independent: 250 expected, standard deviation 12
    assert abs(kept.reshape(4, 1000).sum(1) - 250 * len(sets)).max() < 200  # every quarter keeps as many
    assert np.abs(kept[:-1] @ kept[1:] / len(sets) ** 2 / 250 - 1) < 0.1  # neighbors independent


# In place, out=, and errors

ALL = [
    (kvops.lagkv_compress, (6, 0.5)),
    (kvops.keydiff_compress, (8,)),
    (kvops.streamingllm_compress, (8,)),
    (kvops.random_compress, (8,)),
]
TWINS = [
    (compress, getattr(kvops, compress.__name__ + "_"), args, options)
    for compress, args in ALL
    for options in [
        {},
        dict(starts=(0, 7)),
        dict(lengths=(19, 3), fill_invalid=True),
    ]
]


def with_tensors(options):
    return {name: kit.int32(*x) if isinstance(x, tuple) else x for name, x in options.items()}


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@names("compress, compress_, args, options", TWINS)
def test_in_place_is_the_same(compress, compress_, args, options, layout):
    k, v = make_kv(n=40, layout=layout)
    options = with_tensors(options)
    want = compress(k, v, *args, **options)
    before_k, before_v = k.clone(), v.clone()
    result = compress_(k, v, *args, **options)
    for got, expected in zip(result, want):
        assert torch.equal(got, expected)
    m = want.indices.shape[2]
    for view, whole, before in ((result.k, k, before_k), (result.v, v, before_v)):
        assert view.data_ptr() == whole.data_ptr() and view.stride() == whole.stride()
        assert torch.equal(view, whole[:, :, :m]) and torch.equal(whole[:, :, m:], before[:, :, m:])


@names("compress, compress_, args, options", TWINS)
def test_out_is_written_and_returned(compress, compress_, args, options):
    k, v = make_kv(n=40)
    options = with_tensors(options)
    want = compress(k, v, *args, **options)
    m = want.indices.shape[2]
    out = tuple(torch.full((2, m + 3, 2, d), 9.0).transpose(1, 2)[:, :, :m] for d in (16, 8))
    result = compress(k, v, *args, **options, out=out)
    assert result.k is out[0] and result.v is out[1]
    for got, expected in zip(result, want):
        assert torch.equal(got, expected)
    for wrong in ((out[0][:, :, :-1], out[1]), (out[0].double(), out[1]), (out[0], k[..., :8])):
        before = [x.clone() for x in (k, v, *out)]
        with pytest.raises(ValueError):
            compress(k, v, *args, **options, out=wrong)
        assert all(torch.equal(x, y) for x, y in zip((k, v, *out), before))
    for wrong in (out[0], (out[0],), (*out, out[0])):
        with pytest.raises(TypeError, match=r"out must be a pair of tensors"):
            compress(k, v, *args, out=wrong)
    with pytest.raises(TypeError, match="out"):
        compress(k, v, *args, out=(out[0], None))


@names("compress_, args", [(getattr(kvops, f.__name__ + "_"), args) for f, args in ALL])
def test_failed_in_place_calls_change_nothing(compress_, args):
    k, v = make_kv(n=40, dv=16)
    shared = torch.randn(2, 2, 40, 32)
    targets = {
        "k and v are one": (k, k),
        "k and v overlap": (shared[..., :16], shared[..., 8:24]),
        "stride 0": (k[:1].expand(2, -1, -1, -1), v),
        "overlapping rows": (torch.randn(2, 2, 200).as_strided((2, 2, 40, 16), (400, 200, 4, 1)), v),
        "lengths differ": (k, v[:, :, :39]),
        "dtypes differ": (k, v.half()),
        "heads differ": (k, v[:, :1]),
    }
    for name, (a, b) in targets.items():
        before = a.clone(), b.clone()
        with pytest.raises(ValueError):
            compress_(a, b, *args)
            pytest.fail(name)
        assert torch.equal(a, before[0]) and torch.equal(b, before[1]), name
    before = k.clone(), v.clone()
    for bad in (dict(starts=torch.tensor([0, 50], dtype=torch.int32)), dict(lengths=torch.tensor([1, 2, 3]))):
        with kvops.debug_checks(), pytest.raises(ValueError):
            compress_(k, v, *args, **bad)
    with pytest.raises(TypeError, match="out"):
        compress_(k, v, *args, out=(k, v))
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])


@names("compress, args", ALL)
def test_gradients_are_refused(compress, args):
    for wrong in (0, 1):
        kv = list(make_kv(n=40))
        kv[wrong].requires_grad_()
        for call in (compress, getattr(kvops, compress.__name__ + "_")):
            with pytest.raises(ValueError, match="requires grad"):
                call(*kv, *args)
        with torch.no_grad():
            assert compress(*kv, *args).k.shape[2] <= 40


@names("compress, args", ALL)
def test_wrong_tensors(compress, args):
    k, v = make_kv(n=40)
    for wrong_k, wrong_v, error, message in [
        (None, v, TypeError, "k must be a torch.Tensor, got NoneType"),
        (k.cpu().numpy(), v, TypeError, "k must be a torch.Tensor, got ndarray"),
        (k, None, TypeError, "v must be a torch.Tensor, got NoneType"),
        (k[0], v[0], ValueError, r"k must be .*got (shape )?\[2, 40, 16\]"),
        (k, v[0], ValueError, r"v must .*got \[2, 40, 8\]"),
        (k, v[:, :, 1:], ValueError, "v must"),
        (k, v[:1], ValueError, "v must"),
        (k.double(), v.double(), ValueError, "k must be float32, float16,? (or )?bfloat16.*, got torch.float64"),
        (k, v.bfloat16(), ValueError, "v must .*got torch.bfloat16"),
        (k.mT.contiguous().mT, v, ValueError, "k must have a contiguous last dim"),
        (k[..., :3], v, ValueError, "head_dim of k must be"),
    ]:
        with pytest.raises(error, match=message):
            compress(wrong_k, wrong_v, *args)


@pytest.mark.parametrize(
    "args, options, error, message",
    [
        ((0, 0.5), {}, ValueError, "L must be at least 1, got 0"),
        ((8.0, 0.5), {}, TypeError, "L must be an int, got float"),
        ((True, 0.5), {}, TypeError, "L must be an int, got bool"),
        ((8, -0.1), {}, ValueError, r"r must be in \[0, 1\], got -0.1"),
        ((8, 1.5), {}, ValueError, r"r must be in \[0, 1\], got 1.5"),
        ((8, float("nan")), {}, ValueError, r"r must be in \[0, 1\], got nan"),
        ((8, True), {}, TypeError, "r must be a float, got bool"),
        ((8, "0.5"), {}, TypeError, "r must be a float, got str"),
        ((8, 0.5), dict(sinks=-1), ValueError, "sinks must be at least 0, got -1"),
        ((8, 0.5), dict(reference="next"), ValueError, "reference must be one of 'lag', 'self', got 'next'"),
        ((8, 0.5), dict(score="l1"), ValueError, "score must be one of 'std', 'l2', got 'l1'"),
        (
            (8, 0.5),
            dict(head_mode="all"),
            ValueError,
            "head_mode must be one of 'per_head', 'shared', 'adaptive', got 'all'",
        ),
    ],
)
def test_lagkv_wrong_arguments(args, options, error, message):
    k, v = make_kv()
    for call in (kvops.lagkv_compress, kvops.lagkv_compress_):
        with pytest.raises(error, match=f"^{call.__name__}: {message}"):
            call(k, v, *args, **options)
    with pytest.raises(error, match=message.replace("L must", "lag must").replace("r must", "ratio must", 1)):
        kvops.LagKV(*args, **options)


BUDGETS = [
    (0, {}, ValueError, "budget must be at least 1 token, got 0"),
    (-3, {}, ValueError, "budget must be at least 1 token, got -3"),
    (0.0, {}, ValueError, r"budget as a fraction must be in \(0, 1\], got 0.0"),
    (1.1, {}, ValueError, r"budget as a fraction must be in \(0, 1\], got 1.1"),
    (float("nan"), {}, ValueError, r"budget as a fraction must be in \(0, 1\], got nan"),
    (True, {}, TypeError, "budget must be an int .* got bool True"),
    ("8", {}, TypeError, "budget must be an int .* got str '8'"),
    (None, {}, TypeError, "budget must be an int .* got NoneType"),
]


@pytest.mark.parametrize(
    "budget, options, error, message",
    [
        *BUDGETS,
        (8, dict(sinks=-1), ValueError, "sinks must be at least 0, got -1"),
        (8, dict(sinks=True), TypeError, "sinks must be an int, got bool"),
        (8, dict(recent=-1), ValueError, "recent must be at least 0 tokens, got -1"),
        (8, dict(recent=1.0), ValueError, r"recent as a fraction of the budget must be in \[0, 1\), got 1.0"),
        (8, dict(recent=True), TypeError, "recent must be an int .* got bool"),
        (8, dict(sinks=5, recent=4), ValueError, r"budget must hold sinks \+ recent, .* 5 \+ 4 tokens, got 8"),
        (8, dict(sinks=5, recent=0.5), ValueError, r"budget must hold sinks \+ recent, .* 5 \+ 4 tokens, got 8"),
        (8, dict(metric="l2"), ValueError, "metric must be one of 'cosine', 'dot', 'euclidean', got 'l2'"),
        (8, dict(anchor="mode"), ValueError, "anchor must be one of 'mean', 'median', 'pairwise', got 'mode'"),
        (8, dict(anchor="pairwise", metric="dot"), ValueError, "anchor='pairwise' .* got metric='dot'"),
        (8, dict(head_mode=1), ValueError, "head_mode must be one of 'per_head', 'shared', 'adaptive', got 1"),
    ],
)
def test_keydiff_wrong_arguments(budget, options, error, message):
    k, v = make_kv()
    for call in (kvops.keydiff_compress, kvops.keydiff_compress_):
        with pytest.raises(error, match=f"^{call.__name__}: {message}"):
            call(k, v, budget, **options)
    with pytest.raises(error, match="KeyDiff: " + message):
        kvops.KeyDiff(budget, **options)


@pytest.mark.parametrize("name", ["streamingllm_compress", "random_compress"])
@pytest.mark.parametrize("budget, options, error, message", BUDGETS)
def test_baselines_wrong_budgets(name, budget, options, error, message):
    k, v = make_kv()
    make = kvops.StreamingLLM if name.startswith("streaming") else kvops.Random
    with pytest.raises(error, match=f"^{name}: {message}"):
        getattr(kvops, name)(k, v, budget)
    with pytest.raises(error, match=f"{make.__name__}: {message}"):
        make(budget)


def test_baselines_wrong_arguments():
    k, v = make_kv()
    for seed, error in ((-1, ValueError), (0.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="random_compress: seed must be"):
            kvops.random_compress(k, v, 8, seed=seed)
        with pytest.raises(error, match="Random: seed must be"):
            kvops.Random(8, seed=seed)
    message = r"budget must hold sinks \+ recent, expected at least 4 \+ 0 tokens, got 3"
    with pytest.raises(ValueError, match="streamingllm_compress: " + message):
        kvops.streamingllm_compress(k, v, 3)
    with pytest.raises(ValueError, match="StreamingLLM: " + message):
        kvops.StreamingLLM(3)


@names("compress, args", ALL)
def test_empty_inputs(compress, args):
    for shape in ((0, 2, 30), (2, 0, 30), (2, 2, 0)):
        k, v = torch.zeros(*shape, 16), torch.zeros(*shape, 8)
        for call in (compress, getattr(kvops, compress.__name__ + "_")):
            result = call(k, v, *args)
            assert result.k.shape[:2] == shape[:2] and result.lengths.shape == shape[:1]
            assert result.k.shape[2] == result.v.shape[2] == result.indices.shape[2] <= shape[2]


# torch.compile and threads


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@names("compress, args", ALL[:2])
def test_compiles_without_graph_breaks(compress, args, layout):
    torch.compiler.reset()
    k, v = make_kv(n=40, layout=layout)
    compress_ = getattr(kvops, compress.__name__ + "_")
    want = compress(k, v, *args)

    @torch.compile(fullgraph=True)
    def both(k, v):
        return compress(k, v, *args), compress_(k, v, *args)

    copied, moved = both(k, v)
    for result in (copied, moved):
        for got, expected in zip(result, want):
            assert torch.equal(got, expected)
    assert torch.equal(k[:, :, : want.k.shape[2]], want.k)


@names(
    "compress, args, options",
    [
        (kvops.lagkv_compress, (6, 0.5), dict(sinks=3, head_mode="shared", starts=(0, 7))),
        (kvops.keydiff_compress, (0.25,), dict(recent=0.5, head_mode="shared", starts=(0, 7))),
        (kvops.keydiff_compress, (9,), dict(anchor="median", sinks=2, starts=(0, 7))),
        (kvops.keydiff_compress, (9,), dict(anchor="pairwise")),
        (kvops.streamingllm_compress, (0.25,), dict(sinks=1, starts=(0, 7), fill_invalid=True)),
        (kvops.random_compress, (0.25,), {}),
    ],
)
def test_options_trace_into_one_graph_of_any_length(compress, args, options):
    torch.compiler.reset()
    options = with_tensors(options)
    compiled = torch.compile(
        lambda k, v: compress(k, v, *args, **options), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for n in (40, 57):
        k, v = make_kv(n=n)
        for got, expected in zip(compiled(k, v), compress(k, v, *args, **options)):
            assert torch.equal(got, expected)


def test_threads_do_not_disturb_each_other():
    inputs = [make_kv(seed, n=300, heads=4) for seed in range(2)]
    calls = [
        lambda k, v: kvops.lagkv_compress(k, v, 32, 0.5),
        lambda k, v: kvops.keydiff_compress(k, v, 0.25, recent=4),
        lambda k, v: kvops.keydiff_compress_(k.clone(), v.clone(), 64),
        lambda k, v: kvops.lagkv_compress_(k.clone(), v.clone(), 16, 0.25, head_mode="shared"),
    ]
    want = [[call(k, v) for call in calls] for k, v in inputs]
    wrong = []

    def work(i):
        try:
            for _ in range(20):
                for call, expected in zip(calls, want[i]):
                    if not all(torch.equal(x, y) for x, y in zip(call(*inputs[i]), expected)):
                        wrong.append(i)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_result_unpacks_and_counts():
    k, v = make_kv(n=20)
    result = kvops.keydiff_compress(k, v, 9, starts=torch.tensor([0, 14], dtype=torch.int32))
    kept_k, kept_v, indices = result
    assert kept_k is result.k and kept_v is result.v and indices is result.indices
    assert result.lengths.tolist() == [9, 6] and result.lengths.dtype == torch.int32
