"""SnapKV and its variants, LAQ and the recall, compared with small fp64 versions written from their formulas."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn.functional import avg_pool1d, max_pool1d

import kit
import kvops
from test_methods import assert_best, assert_moved, fp64

pytestmark = kit.every_device
examples = kit.examples(40, derandomize=True)


def make(seed=0, b=2, heads=2, group=3, n=60, w=8, d=16, dv=8, dtype=torch.float32, layout="bhnd"):
    """Return q [b, heads * group, w, d], k and v, with larger values than usual so that the attention is not flat."""
    k, v = kit.kv(b, heads, n, d, dtype, layout, dv=dv, seed=seed)
    q = kit.randn(b, heads * group, w, d, seed=seed + 1).to(dtype)
    return kit.laid_out(q, layout), k, v


# fp64 versions of the formulas, one KV head at a time: q [G, w, d], k [n, d]


def weights(q, k, limits, score="softmax", scale=None, softcap=0.0, sink=None):
    """Return a[g, i, j]: row i sees k[:limits[i]], and is all zeros for a limit of 0."""
    logits = q @ k.T * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    seen = np.arange(len(k)) < np.asarray(limits)[:, None]
    if score == "dot":
        return np.where(seen, logits, 0.0)
    top = np.where(seen, logits, -np.inf).max(-1, keepdims=True, initial=-1e300)
    a = np.exp(np.where(seen, logits - top, -np.inf))
    total = a.sum(-1, keepdims=True) + (0 if sink is None else np.exp(sink[:, None, None] - top))
    return a / np.where(total > 0, total, 1.0)


def pooled(s, kernel_size=7, pooling="max"):
    """Pool s [.., m] over kernel_size neighbours of each entry: their maximum, or their sum over kernel_size."""
    side = kernel_size // 2
    if s.shape[-1] == 0:
        return s
    if pooling == "max":
        return np.stack([s[..., max(0, j - side) : j + side + 1].max(-1) for j in range(s.shape[-1])], -1)
    return np.stack([s[..., max(0, j - side) : j + side + 1].sum(-1) for j in range(s.shape[-1])], -1) / kernel_size


def window_score(a, keep, kernel_size=7, pooling="max", pool_first=False, group_reduce="mean"):
    """Return the scores of the prefix, i.e. all but the last `keep` keys. a: [G, w, n]."""
    group = {"mean": np.mean, "sum": np.sum, "max": np.max}[group_reduce]
    s = a.sum(1)[:, : a.shape[-1] - keep]
    if pool_first:
        return group(pooled(s, kernel_size, pooling), 0)
    return pooled(group(s, 0), kernel_size, pooling)


def causal(n, w):
    return np.maximum(0, np.arange(n - w + 1, n + 1))


def heads_of(q, k, b):
    """Yield (q [G, w, d], k [n, d]) for each KV head of row b, in fp64."""
    group = q.shape[1] // k.shape[1]
    return [(fp64(q[b, h * group : (h + 1) * group]), fp64(k[b, h])) for h in range(k.shape[1])]


def assert_kept(indices, scores, keep, budget, offset=0, tolerance=2e-6):
    """Check one head's `indices`: the last `keep` of n slots and the best of the prefix, `budget` in total."""
    kept, n = indices[indices >= 0].cpu().numpy() - offset, len(scores) + keep
    assert (kept < n).all() and (kept >= 0).all()
    if budget >= n:
        assert kept.tolist() == list(range(n))
        return
    assert kept[len(kept) - keep :].tolist() == list(range(n - keep, n))
    scale = max(1.0, np.abs(scores).max(initial=0.0))
    assert_best(kept[: len(kept) - keep], scores, budget - keep, tolerance * scale)


pool_options = dict(
    kernel_size=st.sampled_from([7, 1, 3, 21]),
    pooling=st.sampled_from(["max", "avg"]),
    pool_first=st.booleans(),
    group_reduce=st.sampled_from(["mean", "max", "sum"]),
)
logit_options = dict(
    scale=st.sampled_from([None, 0.5]), softcap=st.sampled_from([0.0, 3.0]), score=st.sampled_from(["softmax", "dot"])
)


@examples
@given(
    n=st.integers(0, 50).map(lambda x: 60 - x),
    w=st.integers(1, 10),
    budget=st.integers(10, 70),
    dtype=st.sampled_from(kit.DTYPES),
    layout=st.sampled_from(kit.LAYOUTS),
    group=st.sampled_from([3, 1]),
    sink=st.booleans(),
    with_lse=st.booleans(),
    shared=st.booleans(),
    seed=st.integers(0, 99),
    pool=st.fixed_dictionaries(pool_options),
    logit=st.fixed_dictionaries(logit_options),
)
def test_snapkv_is_its_formula(n, w, budget, dtype, layout, group, sink, with_lse, shared, seed, pool, logit):
    q, k, v = make(seed, n=n, w=w, dtype=dtype, layout=layout, group=group)
    options = dict(logit)
    sinks = None
    if logit["score"] == "softmax" and sink:
        sinks = options["sink_logits"] = kit.randn(q.shape[1], seed=seed) * 3
    if logit["score"] == "softmax" and with_lse:
        options["lse"] = kvops.attention(q, k, v, scale=logit["scale"], softcap=logit["softcap"]).lse
    head_mode = "shared" if shared else "per_head"
    result = kvops.snapkv_compress(k, v, q, budget, head_mode=head_mode, **pool, **options)
    assert_moved(result, k, v)
    assert result.indices.shape[2] == min(budget, n)
    for b in range(2):
        scores = []
        for h, (qs, ks) in enumerate(heads_of(q, k, b)):
            one = None if sinks is None else fp64(sinks[h * group : (h + 1) * group])
            scores.append(window_score(weights(qs, ks, causal(n, w), sink=one, **logit), w, **pool))
        for h in range(2):
            # a half-precision lse is accurate to about its eps
            tolerance = 2e-6 if not with_lse or dtype == torch.float32 else 2e-2
            mean = np.mean(scores, 0) if shared else scores[h]
            assert_kept(result.indices[b, h], mean, w, budget, tolerance=w * group * tolerance)
        assert not shared or torch.equal(result.indices[b, 0], result.indices[b, 1])


def test_snapkv_as_kvpress_computes_it():
    """Plain PyTorch in kvpress' formulation: softmax of the window over all keys, cut to the prefix, mean over rows,
    average pooling (padding counts), mean over the group, and the window added on top."""
    n, w, kernel, budget = 300, 64, 5, 90
    q, k, v = make(n=n, w=w, d=64)
    expanded = k.double().repeat_interleave(3, 1)
    mask = torch.ones(w, n, dtype=torch.bool).tril(n - w)
    a = (q.double() @ expanded.mT * 64**-0.5).masked_fill(~mask, -torch.inf).softmax(-1)[..., : n - w]
    s = avg_pool1d(a.mean(2), kernel, stride=1, padding=kernel // 2).unflatten(1, (2, 3)).mean(2)
    s = torch.cat((s, torch.full((2, 2, w), s.max() + 1, dtype=s.dtype)), -1)
    want = s.topk(budget, -1).indices.sort(-1).values
    got = kvops.snapkv_compress(k, v, q, budget, kernel_size=kernel, pooling="avg", pool_first=True)
    assert torch.equal(got.indices, want)


@pytest.mark.parametrize("pooling", ["max", "avg"])
def test_a_kernel_that_is_wider_than_the_keys(pooling):
    """A kernel beyond 2 n - 1 covers no more keys, and must not take longer."""
    q, k, v = make(n=40, w=5)
    wide, wider, widest = (
        kvops.snapkv_compress(k, v, q, 12, kernel_size=x, pooling=pooling).indices for x in (79, 81, 2**40 + 1)
    )
    assert torch.equal(wide, wider) and torch.equal(wide, widest)


@examples
@given(
    n=st.integers(0, 50).map(lambda x: 60 - x),
    w=st.integers(1, 10),
    budget=st.integers(10, 70),
    dtype=st.sampled_from(kit.DTYPES),
    group=st.sampled_from([3, 1]),
    sink=st.booleans(),
    seed=st.integers(0, 99),
    pool=st.fixed_dictionaries(pool_options),
    logit=st.fixed_dictionaries({x: logit_options[x] for x in ("scale", "softcap")}),
)
def test_dropkv_is_its_formula(n, w, budget, dtype, group, sink, seed, pool, logit):
    q, k, v = make(seed, n=n, w=w, dtype=dtype, group=group)
    sinks = kit.randn(q.shape[1], seed=seed) * 3 if sink else None
    result = kvops.snapkv_compress(k, v, q, budget, score="drop", **pool, **logit, sink_logits=sinks)
    assert_moved(result, k, v)
    for b in range(2):
        for h, (qs, ks) in enumerate(heads_of(q, k, b)):
            a = weights(
                qs, ks, causal(n, w), sink=sinks if sinks is None else fp64(sinks[h * group : (h + 1) * group]), **logit
            )
            values = fp64(v[b, h])
            out = a @ values
            drops = (a / (1 - a + 1e-6)) ** 2 * ((values - out[:, :, None]) ** 2).sum(-1)
            scores = window_score(drops, w, **pool)
            assert_kept(result.indices[b, h], scores, w, budget, tolerance=2e-2 if q.is_cuda or kit.SIMULATED else 1e-4)


def test_dropkv_as_kvpress_computes_it():
    """The published formula in plain fp64, with the terms expanded; here the window's own scores do not count."""
    n, w, budget = 300, 32, 90
    q, k, v = make(n=n, w=w, d=64)
    keys, values = (x.double().repeat_interleave(3, 1) for x in (k, v))
    logits = q.double() @ keys.mT / 8 + torch.full((w, n), -torch.inf, dtype=torch.float64).triu(n - w + 1)
    a = logits.softmax(-1)
    out = a @ values
    gain = (a / (1 - a + 1e-6)).square()
    terms = gain.sum(2) * values.square().sum(-1) - 2 * (values * (gain.mT @ out)).sum(-1)
    s = terms + (gain * out.square().sum(-1, keepdim=True)).sum(2)
    s = avg_pool1d(s.unflatten(1, (2, 3)).mean(2)[..., : n - w], 7, stride=1, padding=3)
    best = s.topk(budget - w, -1).indices.sort(-1).values
    want = torch.cat((best, torch.arange(n - w, n).expand(2, 2, -1)), -1)
    policy = kvops.policy("dropkv", budget=budget)
    assert policy == kvops.SnapKV(budget, score="drop", pooling="avg")
    assert torch.equal(policy.compress(k, v, q).indices, want)
    with kit.refuses("SnapKV: with score='drop'", "expected no lse"):
        policy.compress(k, v, q, lse=torch.zeros(2, 6, w))
    with kit.refuses("DefensiveKV: score='drop' is a sum over the rows", "got 'drop'"):
        kvops.DefensiveKV(budget, score="drop", stages=False)


def test_snapkv_as_it_was_released():
    """The released code works per query head: expanded keys, sum over rows, max-pooling. Here a group has one head."""
    n, w, budget = 300, 32, 70
    q, k, v = make(n=n, w=w, group=1, d=64)
    logits = q.double() @ k.double().mT / 64**0.5
    logits[..., -w:] += torch.full((w, w), -torch.inf, dtype=torch.float64).triu(1)
    s = max_pool1d(logits.softmax(-1).sum(-2)[..., :-w], 7, stride=1, padding=3)
    best = s.sort(dim=-1, descending=True, stable=True).indices[
        ..., : budget - w
    ]  # pooled scores tie: the lower slots win
    want = torch.cat((best.sort(-1).values, torch.arange(n - w, n).expand(2, 2, -1)), -1)
    assert torch.equal(kvops.snapkv_compress(k, v, q, budget).indices, want)


def test_window_does_not_reach_into_the_prefix():
    """The newest tokens get much attention; pooling before cutting the prefix would spread it to their neighbours."""
    q, k, v = make(b=1, heads=1, group=1, n=40, w=4)
    k[0, 0, 36:] = q[0, 0, 3] * 4  # the window attends to itself
    k[0, 0, :36] *= 0.01
    k[0, 0, 10] = q[0, 0, 3] * 3
    kept = kvops.snapkv_compress(k, v, q, 4 + 7).indices[0, 0].tolist()
    assert kept == [*range(7, 14), *range(36, 40)]


def test_snapkv_of_a_window_alone_and_of_everything():
    q, k, v = make(n=40, w=8)
    assert kvops.snapkv_compress(k, v, q, 8).indices[0, 0].tolist() == list(range(32, 40))
    for budget in (40, 41, 1000, 1.0):
        result = kvops.snapkv_compress(k, v, q, budget)
        assert torch.equal(result.k, k) and torch.equal(result.v, v) and result.k.data_ptr() != k.data_ptr()
    q, k, v = make(n=8, w=8)
    assert torch.equal(kvops.snapkv_compress(k, v, q, 8).k, k)
    q, k, v = make(n=40, w=8)
    assert kvops.snapkv_compress(k, v, q, 0.5).indices.shape == (2, 2, 20)


def test_windows_of_more_rows_than_the_operator_takes():
    n, w = 700, 300
    q, k, v = make(b=1, n=n, w=w)
    for lse in (None, kvops.attention(q, k, v).lse):
        result = kvops.snapkv_compress(k, v, q, 350, lse=lse)
        for h, (qs, ks) in enumerate(heads_of(q, k, 0)):
            assert_kept(result.indices[0, h], window_score(weights(qs, ks, causal(n, w)), w), w, 350, tolerance=1e-4)


def test_ties_keep_the_lower_slot():
    q, k, v = make(n=40, w=4)
    k[:] = k[:, :, :1]
    result = kvops.snapkv_compress(k, v, q, 14)
    # Every row gives all visible keys the same weight, so all prefix slots have the same score.
    assert result.indices[0, 0].tolist() == [*range(10), *range(36, 40)]


@pytest.mark.parametrize("pooling", ["max", "avg"])
@pytest.mark.parametrize("pool_first", [True, False])
@pytest.mark.parametrize("compress", ["snapkv_compress", "chunkkv_compress", "laq_compress"])
def test_nan_and_infinity_stay_where_they_are(compress, pooling, pool_first):
    """A non-finite key is evicted first; its neighbours, other heads and other rows keep what they keep without it."""
    q, k, v = make(n=60, w=4)
    k[0, 1, 30] *= 4  # would be kept if it were finite
    bad = k.clone()
    bad[0, 1, 30] = torch.nan
    bad[0, 1, 31, 3] = torch.inf
    options = dict(kernel_size=7, pooling=pooling, pool_first=pool_first)
    clean, got = (getattr(kvops, compress)(x, v, q, 30, **options).indices for x in (k, bad))
    assert torch.equal(got[1], clean[1])
    if compress != "chunkkv_compress":  # ChunkKV keeps one set for all heads, scored by the finite ones
        assert torch.equal(got[0, 0], clean[0, 0])
        assert not np.isin([30, 31], got[0, 1].cpu()).any() and (got[0, 1] >= 0).all()


def test_neighbours_of_what_is_not_finite_are_pooled_without_it():
    q, k, v = make(b=1, heads=1, n=60, w=4)
    k[0, 0, 30] = torch.nan
    for pooling, pool_first in (("max", False), ("avg", False), ("max", True), ("avg", True)):
        pool = dict(kernel_size=5, pooling=pooling, pool_first=pool_first)
        ((qs, ks),) = heads_of(q, k, 0)
        a = weights(qs, np.delete(ks, 30, 0), causal(59, 4))  # no softmax includes the key
        a = np.insert(a, 30, 0.0, -1)  # and it pools as a neighbour with zero attention
        scores = window_score(a, 4, **pool)
        scores[30] = -1
        assert_kept(kvops.snapkv_compress(k, v, q, 59, **pool).indices[0, 0], scores, 4, 59)
        assert_kept(kvops.snapkv_compress(k, v, q, 30, **pool).indices[0, 0], scores, 4, 30)


@pytest.mark.parametrize("compress", ["snapkv_compress", "pyramidkv_compress", "chunkkv_compress", "laq_compress"])
@examples
@given(
    starts=st.lists(st.integers(0, 20), min_size=3, max_size=3),
    lengths=st.lists(st.integers(0, 28).map(lambda x: 30 - x), min_size=3, max_size=3),
    budget=st.sampled_from([12, 20, 6, 0.9]),
    shared=st.booleans(),
    layer=st.integers(0, 3),
    local=st.booleans(),
    pool=st.fixed_dictionaries(dict(pool_options, kernel_size=st.sampled_from([5, 1]))),
    seed=st.integers(0, 99),
)
def test_padded_rows_are_as_alone(compress, starts, lengths, budget, shared, layer, local, pool, seed):
    n, w = 50, 2
    q, k, v = make(seed, b=3, n=n, w=w)
    for row, (start, length) in enumerate(zip(starts, lengths)):
        for x in (k, v):
            x[row, :, :start], x[row, :, start + length :] = torch.nan, torch.nan
    options = dict(pool)
    if compress != "chunkkv_compress":
        options["head_mode"] = "shared" if shared else "per_head"
    if compress == "pyramidkv_compress":
        options.update(layer=layer, num_layers=4)
    if compress == "laq_compress" and local:
        options["q_window"] = kit.randn(*q.shape, seed=seed + 2)
    call = getattr(kvops, compress)
    spans = dict(starts=kit.int32(*starts), lengths=kit.int32(*lengths))
    if isinstance(budget, float):
        low = min(int(budget * x) for x in lengths)
        if low < (w if compress != "laq_compress" else w * local) or low < 1:
            return
    result = call(k, v, q, budget, **spans, **options)
    filled = call(k, v, q, budget, fill_invalid=True, **spans, **options)
    assert_moved(result, k.nan_to_num(), v.nan_to_num())
    assert result.indices.shape == filled.indices.shape
    for row, (start, length) in enumerate(zip(starts, lengths)):
        alone_k, alone_v = (x[row : row + 1, :, start : start + length] for x in (k, v))
        one = dict(options)
        if "q_window" in one:
            one["q_window"] = one["q_window"][row : row + 1]
        want = call(alone_k, alone_v, q[row : row + 1], budget, **one).indices + start
        m = want.shape[2]
        assert result.lengths[row] == m
        assert torch.equal(result.indices[row, :, :m], want[0]) and (result.indices[row, :, m:] == -1).all()
        invalid = [i for i in range(n) if not start <= i < start + length][: result.indices.shape[2] - m]
        for head in range(2):
            assert filled.indices[row, head].tolist() == sorted(want[0, head].tolist() + invalid)


def test_rows_shorter_than_the_window():
    """The first rows of their window are padding and count nothing; such rows keep all tokens."""
    q, k, v = make(n=40, w=8)
    k[1, :, :35], v[1, :, :35], q[1, :, :3] = torch.nan, torch.nan, torch.nan
    result = kvops.snapkv_compress(k, v, q, 12, starts=kit.int32(0, 35))
    assert result.lengths.tolist() == [12, 5] and result.indices[1, 0, :5].tolist() == list(range(35, 40))


# PyramidKV


@examples
@given(
    layers=st.integers(1, 40),
    window=st.integers(0, 32),
    c=st.integers(0, 300),
    rest=st.integers(0, 900),
)
def test_pyramid_budgets(layers, window, c, rest):
    budget = max(1, window + c)
    n = budget + rest
    budgets = kvops.pyramidkv_budgets(budget, layers, n, window)
    assert len(budgets) == layers and sum(budgets) == layers * budget
    assert budgets == sorted(budgets, reverse=True) and budgets[-1] >= window and budgets[0] <= max(n, budget)
    c = budget - window
    if layers > 1 and n >= 2 * c and rest:
        hi = min(2 * c - c // 20, n - window)
        assert budgets[0] == window + hi and budgets[-1] == window + 2 * c - hi
        line = np.linspace(hi, 2 * c - hi, layers) + window
        assert np.abs(np.array(budgets) - line).max() < 1
    else:
        assert budgets == [budget] * layers


def test_pyramidkv_is_snapkv_with_the_layers_budget():
    q, k, v = make(n=60, w=4)
    for budget in (16, 0.3):
        budgets = kvops.pyramidkv_budgets(budget, 5, 60, 4)
        assert budgets[0] > budgets[-1]
        for layer, tokens in enumerate(budgets):
            got = kvops.pyramidkv_compress(k, v, q, budget, layer=layer, num_layers=5)
            assert torch.equal(got.indices, kvops.snapkv_compress(k, v, q, tokens).indices)


# ChunkKV


@examples
@given(
    n=st.integers(0, 50).map(lambda x: 60 - x),
    w=st.integers(1, 10),
    chunk=st.sampled_from([20, 7, 1, 4, 10**12]),
    budget=st.integers(10, 70),
    pool=st.fixed_dictionaries(pool_options),
    seed=st.integers(0, 99),
)
@example(26, 3, 7, 10, dict(kernel_size=21, pooling="max", pool_first=False, group_reduce="mean"), 0)  # equal chunks
def test_chunkkv_is_its_formula(n, w, chunk, budget, pool, seed):
    q, k, v = make(seed, n=n, w=w)
    result = kvops.chunkkv_compress(k, v, q, budget, chunk=chunk, **pool)
    assert_moved(result, k, v)
    assert result.indices.shape[2] == min(budget, n)
    for b in range(2):
        assert torch.equal(result.indices[b, 0], result.indices[b, 1])
        scores = sum(window_score(weights(*x, causal(n, w)), w, **pool) for x in heads_of(q, k, b))
        chunks = [list(range(i, min(n - w, i + chunk))) for i in range(0, n - w, chunk)]
        chunks.sort(key=lambda x: -(scores[x].max() + (scores[x] - scores[x].max()).mean()))  # equal where all are
        kept, left = [], min(budget, n) - w
        for members in chunks:
            best = sorted(members, key=lambda j: (-scores[j], j))[:left]
            kept += best
            left -= len(best)
        assert result.indices[b, 0].tolist() == sorted(kept) + list(range(n - w, n))


def test_chunkkv_leaves_what_is_not_finite():
    q, k, v = make(b=1, n=45, w=5)
    k[0, 1, [3, 17]] = torch.nan
    k[:, 0, [3, 17]] = torch.nan
    for budget in (10, 25, 42, 43):
        kept = kvops.chunkkv_compress(k, v, q, budget, chunk=10).indices[0, 0].tolist()
        assert len(kept) == budget and sum(x in kept for x in (3, 17)) == max(0, budget - 43)


# LAQ


@examples
@given(
    n=st.integers(0, 50).map(lambda x: 60 - x),
    w=st.integers(0, 10),
    steps=st.integers(1, 8),
    budget=st.integers(10, 70),
    compat=st.booleans(),
    ended=st.none() | st.lists(st.integers(0, 8), min_size=2, max_size=2),
    pool=st.fixed_dictionaries(pool_options),
    logit=st.fixed_dictionaries(logit_options),
    seed=st.integers(0, 99),
)
def test_laq_is_its_formula(n, w, steps, budget, compat, ended, pool, logit, seed):
    q, k, v = make(seed, n=n, w=w + steps)
    local, ahead = (q[:, :, :w] if w else None), q[:, :, w:]
    lengths = None if ended is None else kit.int32(*(min(x, steps) for x in ended))
    options = dict(q_window=local, lookahead_lengths=lengths, compat_mask=compat, **pool, **logit)
    result = kvops.laq_compress(k, v, ahead, budget, **options)
    assert_moved(result, k, v)
    assert result.indices.shape[2] == min(budget, n)
    for b in range(2):
        limits = np.concatenate((causal(n, w), np.full(steps, n)))
        if compat:
            limits = causal(n, w + steps)
        if ended is not None:
            limits[w + min(ended[b], steps) :] = 0
        for h, (qs, ks) in enumerate(heads_of(q, k, b)):
            scores = window_score(weights(qs, ks, limits, **logit), w, **pool)
            assert_kept(result.indices[b, h], scores, w, budget, tolerance=1e-4 if logit["score"] == "dot" else 2e-5)


def test_laq_without_a_window_protects_nothing():
    """The newest tokens are kept only if the lookahead attends to them (pooling includes them)."""
    q, k, v = make(n=60, w=8, group=1)
    k *= 0.01
    k[:, :, 20] = q[:, :, 3] * 4
    assert kvops.laq_compress(k, v, q, 7).indices[0, 0].tolist() == list(range(17, 24))
    k[:, :, 59] = q[:, :, 3] * 4
    assert kvops.laq_compress(k, v, q, 11).indices[0, 0].tolist() == [*range(17, 24), *range(56, 60)]
    kept = kvops.laq_compress(k, v, q, 13, q_window=q).indices[0, 0].tolist()
    assert kept[-8:] == list(range(52, 60)) and len(kept) == 13


def test_laq_whose_lookahead_is_the_window_is_snapkv():
    """LAQ++ with an empty draft and the rows' own limits equals SnapKV; so does compat_mask on SnapKV's own rows."""
    q, k, v = make(n=60, w=8)
    snap = kvops.snapkv_compress(k, v, q, 24).indices
    ended = kvops.laq_compress(k, v, q[:, :, :3], 24, q_window=q, lookahead_lengths=kit.int32(0, 0)).indices
    assert torch.equal(ended, snap)
    whole = kvops.laq_compress(k, v, q, 60)
    assert torch.equal(whole.k, k)


def test_laq_early_ends_are_shorter_lookaheads():
    q, k, v = make(n=60, w=8)
    ahead = q.clone()
    ahead[0, :, 3:], ahead[1, :, 5:] = torch.nan, torch.nan
    got = kvops.laq_compress(k, v, ahead, 20, lookahead_lengths=kit.int32(3, 5)).indices
    for row, steps in enumerate((3, 5)):
        alone = (x[row : row + 1] for x in (k, v, q[:, :, :steps]))
        assert torch.equal(got[row : row + 1], kvops.laq_compress(*alone, 20).indices)


def test_laq_takes_the_lse_of_all_rows():
    q, k, v = make(n=60, w=8)
    window, ahead = q[:, :, :5], q[:, :, 5:]
    lse = torch.cat((kvops.attention(window, k, v).lse, kvops.attention(ahead, k, v, causal=False).lse), 2)
    with_lse, without = (kvops.laq_compress(k, v, ahead, 20, q_window=window, lse=x).indices for x in (lse, None))
    assert torch.equal(with_lse, without)


# Recall


@examples
@given(
    budget=st.integers(1, 70),
    rows=st.integers(1, 9),
    answer=st.sampled_from([20, 1, 300]),
    inside=st.booleans(),
    score=st.sampled_from(["softmax", "dot"]),
    padded=st.booleans(),
    seed=st.integers(0, 99),
)
def test_recall_is_its_formula(budget, rows, answer, inside, score, padded, seed):
    n = 60
    q, k, _ = make(seed, n=n, w=rows + answer)
    observed, response = q[:, :, :rows], q[:, :, rows:]
    visible = torch.arange(20, 20 + rows, dtype=torch.int32) if inside and not padded else None
    spans = dict(starts=kit.int32(0, 13), lengths=kit.int32(60, 30)) if padded else {}
    got = kvops.recall(k, observed, response, budget, visible=visible, score=score, **spans)
    assert got.shape == (2, 2) and got.dtype == torch.float32
    for b in range(2):
        span = slice(13, 43) if padded and b == 1 else slice(0, 60)
        for h, (qs, ks) in enumerate(heads_of(q, k, b)):
            ks = ks[span]
            m = len(ks)
            limits = visible.cpu().numpy() if visible is not None else np.full(rows, m)
            best = []
            for part, limit in ((qs[:, :rows], limits), (qs[:, rows:], np.full(answer, m))):
                s = weights(part, ks, limit, score=score).sum(1).mean(0)
                order = np.lexsort((np.arange(m), -s))
                best.append(set(order[:budget].tolist()))
                gap = np.sort(s)[::-1]
                clear = (
                    budget >= m or gap[budget - 1] - gap[budget] > 1e-4 * max(1, abs(gap[0])) or gap[budget - 1] == 0
                )
                if not clear:  # for near-equal scores fp32 may pick either
                    break
            else:
                want = len(best[0] & best[1]) / len(best[1])
                assert abs(got[b, h].item() - want) < 1e-6


def test_recall_of_the_response_itself_is_one():
    q, k, _ = make(n=60, w=20)
    assert (kvops.recall(k, q, q, 10) == 1).all() and (kvops.recall(k, q[:, :, :1], q, 60) == 1).all()
    assert (kvops.recall(k, q[:, :, :1], q, 0.2) < 1).any()


# Invalid input


SNAP = dict(budget=20)
METHODS = {
    "snapkv_compress": {},
    "pyramidkv_compress": dict(layer=1, num_layers=4),
    "chunkkv_compress": {},
    "laq_compress": {},
}


@pytest.mark.parametrize("compress", METHODS)
def test_wrong_arguments(compress):
    q, k, v = make(n=40, w=8)
    call, own = getattr(kvops, compress), METHODS[compress]
    rows = "q_lookahead" if compress == "laq_compress" else "q_window"
    good = dict(k=k, v=v, budget=20, **{rows: q}, **own)
    for change, message in [
        ({rows: q[0]}, rf"{rows} must be \[b, Hq, w, d\], got shape \[6, 8, 16\]"),
        ({rows: q[:, :, :0]}, rf"{rows} must have at least one row"),
        ({rows: q.requires_grad_(False).clone().requires_grad_()}, f"{rows} requires grad"),
        (dict(k=k[0]), r"k must be \[b, Hk, n, d\], got shape"),
        (dict(budget=0), "budget must be at least 1 token, got 0"),
        (dict(budget=1.5), r"budget as a fraction must be in \(0, 1\], got 1.5"),
        (dict(kernel_size=4), r"kernel_size must be odd \(1 does not pool\), got 4"),
        (dict(kernel_size=0), "kernel_size must be at least 1, got 0"),
        (dict(pooling="mean"), "pooling must be one of 'max', 'avg', got 'mean'"),
        (dict(group_reduce="none"), "group_reduce must be one of 'mean', 'max', 'sum', got 'none'"),
        (dict(lse=torch.zeros(2, 6, 7)), r"lse must be torch.float32 \[2, 6, 8\], .* got torch.float32 \[2, 6, 7\]"),
        (dict(lse=torch.zeros(2, 6, 8).half()), r"lse must be torch.float32 .* got torch.float16"),
        (dict(score="cosine"), "score must be one of 'softmax', 'dot', 'drop', got 'cosine'"),
    ]:
        with kit.refuses(f"{compress}: {message}"):
            call(**{**good, **change})
    for change, message in [
        (dict(k=None), "k must be a torch.Tensor, got NoneType"),
        ({rows: None}, f"{rows} must be a torch.Tensor, got NoneType"),
        (dict(budget=True), "budget must be an int"),
        (dict(kernel_size=3.0), "kernel_size must be an int, got float 3.0"),
        (dict(lse=3), "lse must be a torch.Tensor, got int"),
        (dict(out=k), "out must be a pair of tensors"),
    ]:
        with kit.refuses(f"{compress}: {message}", kind=TypeError):
            call(**{**good, **change})
    for change, message in [  # the operators' own messages
        ({rows: q[:, :5]}, "query heads of q must be a multiple of the KV heads 2, got 5"),
        ({rows: q[..., :8]}, f"{compress}: {rows} must have k's batch and head_dim"),
        (dict(scale=0.0), "scale must be positive and a normal number in fp32, got 0"),
        (dict(starts=kit.int32(0, 41)), "starts"),
        (dict(lengths=kit.int32(41, 40)), "lengths"),
    ]:
        with kvops.debug_checks(), kit.refuses(message):
            call(**{**good, **change})


def test_wrong_arguments_of_one_method():
    q, k, v = make(n=40, w=8)
    for compress in ("snapkv_compress", "pyramidkv_compress", "chunkkv_compress"):
        call, own = getattr(kvops, compress), METHODS[compress]
        with kit.refuses(
            rf"{compress}: q_window must be queries of the prompt, expected at most 7 rows \(its tokens\), got 8"
        ):
            call(k[:, :, :7], v[:, :, :7], q, 20, **own)
        with kit.refuses(f"{compress}: budget must hold the window, expected at least 8 tokens, got 7"):
            call(k, v, q, 7, **own)
        with kit.refuses(f"{compress}: budget must hold the window, expected at least 8 tokens, got 4"):
            call(k, v, q, 0.1, **own)
    for change, message in [
        (dict(q_window=q[:, :3]), r"q_window must have q_lookahead's shape .*, expected \[2, 6, 8, 16\], got"),
        (dict(q_window=q, budget=7), "budget must hold the window, expected at least 8 tokens, got 7"),
        (
            dict(q_window=torch.cat([q] * 6, 2), budget=50),
            "q_window must be queries of the prompt, expected at most 40",
        ),
        (dict(lookahead_lengths=kit.int32(1)), r"lookahead_lengths must be torch.int32 \[2\], got torch.int32 \[1\]"),
        (dict(lookahead_lengths=torch.zeros(2)), r"lookahead_lengths must be torch.int32 \[2\], got torch.float32"),
    ]:
        with kit.refuses(f"laq_compress: {message}"):
            kvops.laq_compress(**{**dict(k=k, v=v, q_lookahead=q, budget=20), **change})
    for layer, layers, message in [
        (4, 4, r"layer must lie in \[0, num_layers\), expected less than 4, got 4"),
        (-1, 4, "layer must be at least 0"),
    ]:
        with kit.refuses(f"pyramidkv_compress: {message}"):
            kvops.pyramidkv_compress(k, v, q, 20, layer=layer, num_layers=layers)
    with kit.refuses("pyramidkv_budgets: budget must hold the window, expected at least 32 tokens, got 31"):
        kvops.pyramidkv_budgets(31, 4, 1000)
    with kit.refuses("chunkkv_compress: chunk must be at least 1, got 0"):
        kvops.chunkkv_compress(k, v, q, 20, chunk=0)
    with kit.refuses("recall: q_response must have at least one row"):
        kvops.recall(k, q, q[:, :, :0], 20)


@kit.only("cpu", "simulator")
def test_lengths_of_the_lookahead_out_of_range():
    q, k, v = make(n=40, w=8)
    for wrong in (-1, 9):
        with kit.refuses(rf"laq_compress: lookahead_lengths must lie in \[0, 8\], got {wrong}"):
            kvops.laq_compress(k, v, q, 20, lookahead_lengths=kit.int32(3, wrong))
