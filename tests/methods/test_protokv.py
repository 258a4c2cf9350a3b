"""ProtoKV, SATKV and budgets per head, compared with small fp64 versions written from Algorithm 1 and its equations."""

import copy
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import kit
import kvops
from kvops.ops.window import summed_scores
from test_methods import assert_best, assert_moved, fp64
from test_streaming import assert_same_state, rows
from test_window_methods import causal, heads_of, make, weights

pytestmark = kit.every_device
examples = kit.examples(30, derandomize=True)
SMALL = dict(num_sats=6, num_chunks=9)  # for sequences of a few dozen tokens


def clusters_of(k, prefix, **settings):
    """Return the cluster of each of the first `prefix` tokens of each row."""
    return kvops.ProtoKV(32, **settings).assign(kvops.View(k, k), None, prefix)


# Algorithm 1 for one KV head, in fp64: keys [m, d] of the prefix


def outlier_degrees(keys, kappa=5):
    """Line 2, Eq. 4 and 5, the latter with its sign reversed."""
    unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    near = np.abs(np.subtract.outer(np.arange(len(keys)), np.arange(len(keys)))) <= kappa
    similarity = (unit @ unit.T * near).sum(1) / near.sum(1)
    return (similarity.mean() - similarity) / similarity.std()


def bits_of(keys, projection, phase):
    """Eq. 8."""
    signs = np.cos(keys @ projection.T + phase) > 0
    return (signs * 2 ** np.arange(len(phase) - 1, -1, -1)).sum(1)


def prototypes_of(keys, sats, buckets, num_chunks, num_buckets, base=0):
    """Lines 4 to 16: {id: mean key}, without empty prototypes. base: the id of the first bucket."""
    chunks, found = min(num_chunks, len(keys)), {}
    for c in range(chunks):
        members = np.setdiff1d(np.arange(c * len(keys) // chunks, (c + 1) * len(keys) // chunks), sats)
        if len(members):
            found[c] = keys[members].mean(0)
    for s in range(num_buckets):
        if (buckets == s).any():
            found[base + s] = keys[sats[buckets == s]].mean(0)
    return found


def assert_nearest(assignment, keys, prototypes):
    """Check lines 17 to 19, with the accuracy of `ops.assign_prototypes`."""
    ids = np.array(sorted(prototypes))
    means = np.stack([prototypes[i] for i in ids])
    cosines = keys @ means.T / np.linalg.norm(keys, axis=1)[:, None] / np.linalg.norm(means, axis=1)
    assert np.isin(assignment, ids).all()
    chosen = cosines[np.arange(len(keys)), np.searchsorted(ids, assignment)]
    assert (chosen >= cosines.max(1) - 4e-3).all()


def best_clusters(token, assignment, count, reduce="mean", whole=False):
    """Lines 20 to 24 (and Eq. 2): return the prefix's kept tokens, ascending, and how close the decision was."""
    ids = np.unique(assignment)
    score = {c: getattr(token[assignment == c], reduce)() for c in ids}
    order, kept, gap = sorted(ids, key=lambda c: (-score[c], c)), [], np.inf
    for i, c in enumerate(order):
        members = sorted(np.flatnonzero(assignment == c), key=lambda j: (-token[j], j))
        if i:
            gap = min(gap, score[order[i - 1]] - score[c])
        if len(kept) + len(members) > count:
            left = count - len(kept)
            if 0 < left and not whole:
                gap = min(gap, token[members[left - 1]] - token[members[left]])
            kept += [] if whole else members[:left]
            break
        kept += members
    return sorted(kept), gap / max(1.0, np.abs(token).max(initial=0))


settings = dict(
    kappa=st.sampled_from([5, 1, 64]),
    num_sats=st.sampled_from([6, 0, 1, 80]),
    num_chunks=st.sampled_from([None, 9, 1, 0, 100]),
    hash_bits=st.sampled_from([2, 1, 4]),
    clusters=st.sampled_from(["prototypes", "prototypes", "chunks", "lsh"]),
)


@examples
@given(
    n=st.integers(0, 50).map(lambda x: 70 - x),
    w=st.integers(1, 10),
    budget=st.integers(10, 75),
    dtype=st.sampled_from(kit.DTYPES),
    layout=st.sampled_from(kit.LAYOUTS),
    group=st.sampled_from([3, 1]),
    score=st.sampled_from(["dot", "softmax"]),
    reduce=st.sampled_from(["mean", "sum"]),
    group_reduce=st.sampled_from(["mean", "sum", "max"]),
    whole=st.booleans(),
    softcap=st.sampled_from([0.0, 0.0, 3.0]),
    setting=st.fixed_dictionaries(settings),
    seed=st.integers(0, 99),
)
def test_protokv_is_algorithm_1(
    n, w, budget, dtype, layout, group, score, reduce, group_reduce, whole, softcap, setting, seed
):
    assume(setting["num_sats"] or setting["num_chunks"] != 0)
    q, k, v = make(seed, n=n, w=w, dtype=dtype, layout=layout, group=group)
    options = dict(score=score, cluster_reduce=reduce, group_reduce=group_reduce, softcap=softcap)
    result = kvops.protokv_compress(k, v, q, budget, **setting, whole_clusters=whole, seed=seed, **options)
    assert_moved(result, k, v)
    assert result.indices.shape[2] == min(budget, n)
    policy, m = kvops.ProtoKV(budget, w, **setting, seed=seed), n - w
    chunks, base = setting["num_chunks"], setting["num_chunks"]  # base: the number of the first bucket
    if chunks is None:  # one chunk per 10 tokens of the prefix
        chunks, base = max(1, m // 10), max(1, n // 10)
    buckets = 2 ** setting["hash_bits"]
    chunks_only = chunks if setting["num_chunks"] is None else chunks + buckets
    assignments = policy.assign(kvops.View(k, v), None, torch.full((2,), m, dtype=torch.int32))
    assert (assignments[:, :, m:] == -1).all()
    bits = policy.bits
    projection, phase = (fp64(x) for x in kvops.lsh_projection(16, bits, seed))
    for b in range(2):
        for h, (qs, ks) in enumerate(heads_of(q, k, b)):
            assignment, keys = assignments[b, h, :m].cpu().numpy(), ks[:m]
            if m and setting["clusters"] == "lsh":
                assert (assignment == bits_of(keys, projection, phase) % (chunks + buckets)).all()
            elif m and setting["clusters"] == "chunks":
                assert_nearest(assignment, keys, prototypes_of(keys, [], np.empty(0), chunks_only, 0))
            elif m:
                degrees = kvops.ops.outlier_degree(k[b : b + 1, h : h + 1, :m], kappa=setting["kappa"])
                sats = kvops.ops.select_topk(degrees, k=setting["num_sats"])[0, 0].cpu().numpy()
                if m > 2:
                    assert_best(sats, outlier_degrees(keys, setting["kappa"]), min(setting["num_sats"], m), 2e-4)
                found = prototypes_of(keys, sats, bits_of(keys[sats], projection, phase), chunks, 2**bits, base)
                assert_nearest(assignment, keys, found)
            token = weights(qs, ks, causal(n, w), score, softcap=softcap).sum(1)[:, :m]
            token = getattr(token, group_reduce)(0)
            kept, gap = best_clusters(token, assignment, budget - w, reduce, whole)
            got = result.indices[b, h]
            if gap > 1e-5:
                assert got[got >= 0].tolist() == [*kept, *range(m, n)]
            assert whole or (got >= 0).all()


def test_the_closeness_of_decisions_excuses_few():
    """The comparison above skips few cases."""
    gaps = []
    for seed in range(20):
        q, k, _ = make(seed, n=70, w=8)
        assignment = clusters_of(k, kit.int32(62, 62), **SMALL)[0, 0, :62].cpu().numpy()
        token = weights(*heads_of(q, k, 0)[0], causal(70, 8), "dot").sum(1).mean(0)[:62]
        gaps.append(best_clusters(token, assignment, 20)[1])
    assert np.mean(np.array(gaps) > 1e-5) >= 0.9


def walk(n, d=64, seed=0):
    """Return unit keys [n, d] that rotate slowly, like those of position-determined tokens."""
    steps = np.random.default_rng(seed).standard_normal((n, d)) * 0.15
    keys = np.cumsum(steps, 0) + 3 * np.random.default_rng(seed + 1).standard_normal(d)
    return keys / np.linalg.norm(keys, axis=1, keepdims=True)


def test_planted_anchors_are_found_and_share_clusters():
    n, count = kit.size(2048, 512), 44
    rng = np.random.default_rng(5)
    keys = walk(n)
    planted = np.sort(rng.choice(np.arange(20, n - 20), count, replace=False))
    keys[planted] = rng.standard_normal(64) / 8 + 0.3 * rng.standard_normal((count, 64)) / 8
    k = kit.on_device(torch.from_numpy(keys).float()).view(1, 1, n, 64)
    kept = kvops.satkv_compress(k, k, 8 + count, 8).indices[0, 0].tolist()
    assert np.isin(planted, kept).sum() >= 42 and kept[-8:] == list(range(n - 8, n))
    assignment = clusters_of(k, kit.int32(n), num_sats=count, num_chunks=60)[0, 0].cpu().numpy()
    assert (assignment[planted] >= 60).sum() >= 42  # an anchor belongs to a bucket of anchors,
    rest = np.setdiff1d(np.arange(n), planted)
    assert (assignment[rest] < 60).mean() > 0.95  # and a text token to its own chunk, or the next
    own = rest * 60 // n
    assert (np.abs(assignment[rest] - own) <= 1).mean() > 0.6


def test_a_question_about_anchors_keeps_all_of_them():
    """Queries that attend to two anchors keep the other anchors too; token-by-token selection would not."""
    n, rng = 400, np.random.default_rng(3)
    keys = walk(n)
    direction = rng.standard_normal(64)
    direction -= (direction @ keys.T) @ np.linalg.pinv(keys.T)  # now orthogonal to all other keys
    direction /= np.linalg.norm(direction)
    anchors = np.arange(30, 390, 36)
    keys[anchors] = direction + 0.05 * rng.standard_normal((len(anchors), 64))
    k = kit.on_device(torch.from_numpy(keys).float()).view(1, 1, n, 64)
    q = kit.on_device(torch.from_numpy(np.tile(8 * direction, (1, 1, 4, 1))).float())
    options = dict(num_sats=len(anchors), num_chunks=40, hash_bits=1)
    for score in ("dot", "softmax"):
        kept = kvops.protokv_compress(k, k, q, 4 + len(anchors), score=score, **options).indices[0, 0]
        assert kept.tolist() == [*anchors, *range(n - 4, n)]


@pytest.mark.parametrize("clusters", ["prototypes", "chunks", "lsh"])
def test_short_sequences_and_the_whole(clusters):
    options = dict(clusters=clusters)  # 496 chunks and 32 anchors: more than there are tokens
    q, k, v = make(n=40, w=8)
    assert kvops.protokv_compress(k, v, q, 8, **options).indices[0, 0].tolist() == list(range(32, 40))
    for budget in (40, 41, 1000, 1.0):
        result = kvops.protokv_compress(k, v, q, budget, **options)
        assert torch.equal(result.k, k) and torch.equal(result.v, v) and result.k.data_ptr() != k.data_ptr()
    assert kvops.protokv_compress(k, v, q, 0.5, **options).indices.shape == (2, 2, 20)
    for n in (8, 9, 10):
        short, values = k[:, :, :n], v[:, :, :n]
        assert torch.equal(kvops.protokv_compress(short, values, q, 8, **options).k, k[:, :, n - 8 : n])
        assert torch.equal(
            kvops.protokv_compress(short, values, q, 9, **options).indices[..., -8:],
            torch.arange(n - 8, n).expand(2, 2, 8),
        )
    # With as many chunks as tokens each token is its own cluster, so ProtoKV selects token by token.
    options = dict(num_sats=0, num_chunks=100, clusters="prototypes")
    got = kvops.protokv_compress(k, v, q, 20, **options).indices
    assert torch.equal(got, kvops.snapkv_compress(k, v, q, 20, kernel_size=1, score="dot").indices)


def test_equal_keys_and_zero_keys():
    """The tokens are indistinguishable, so the lower slots are kept."""
    q, k, v = make(n=40, w=4)
    for keys in (k[:, :, :1].expand_as(k).contiguous(), torch.zeros_like(k)):
        for compress in (
            lambda x: kvops.protokv_compress(x, v, q, 14, **SMALL),
            lambda x: kvops.satkv_compress(x, v, 14, 4),
        ):
            assert compress(keys).indices[0, 0].tolist() == [*range(10), *range(36, 40)]


@pytest.mark.parametrize(
    "options", [{}, dict(score="softmax"), dict(clusters="lsh"), dict(whole_clusters=True)], ids=str
)
def test_nan_and_infinity_stay_where_they_are(options):
    q, k, v = make(n=60, w=4)
    bad = k.clone()
    bad[0, 1, 30], bad[0, 1, 31, 3] = torch.nan, torch.inf
    for call in (
        lambda x: kvops.protokv_compress(x, v, q, 40, **SMALL, **options).indices,
        lambda x: kvops.satkv_compress(x, v, 40, 4).indices,
    ):
        clean, got = call(k), call(bad)
        assert torch.equal(got[1], clean[1]) and torch.equal(got[0, 0], clean[0, 0])
        assert not np.isin([30, 31], got[0, 1].cpu()).any()
    bad[0, 1, :56] = torch.nan  # with only NaN the lower slots are kept
    assert kvops.protokv_compress(bad, v, q, 10, **SMALL).indices[0, 1].tolist() == [*range(6), *range(56, 60)]


def test_shared_heads():
    """One set for all heads: ordered by the mean over heads of a token's cluster scores, then of its own scores."""
    q, k, v = make(n=60, w=8)
    for reduce in ("mean", "sum"):
        result = kvops.protokv_compress(k, v, q, 30, head_mode="shared", cluster_reduce=reduce, **SMALL)
        assert_moved(result, k, v)
        assignment = clusters_of(k, kit.int32(52, 52), **SMALL).cpu().numpy()
        for b in range(2):
            of_cluster, of_token = np.zeros(52), np.zeros(52)
            for h, (qs, ks) in enumerate(heads_of(q, k, b)):
                token = weights(qs, ks, causal(60, 8), "dot").sum(1).mean(0)[:52]
                ids = assignment[b, h, :52]
                of_cluster += [getattr(token[ids == c], reduce)() for c in ids]
                of_token += token
            order = sorted(range(52), key=lambda j: (-round(of_cluster[j], 4), -of_token[j], j))
            assert result.indices[b, 0].tolist() == sorted(order[:22]) + list(range(52, 60))
            assert torch.equal(result.indices[b, 0], result.indices[b, 1])


# Dot scores, and the hash


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("size", [1.0, 1e4, 1e-4])
@pytest.mark.parametrize("group_reduce", ["mean", "sum"])
def test_dot_scores_of_many_rows_are_one_product(dtype, size, group_reduce):
    """As accurate as fp32, whatever the dtype's range; rows that count nothing are ignored, whatever they hold."""
    q, k, _ = make(b=2, n=50, w=20)
    q = (q * size).to(dtype)
    k = k.to(dtype)
    visible = torch.full((2, 20), 50, dtype=torch.int32)
    visible[1, :7], q[1, :, :7] = 0, torch.nan
    options = dict(score="dot", group_reduce=group_reduce, scale=0.3)
    got = summed_scores(q, k, visible, None, 41, **options)
    total = q.double().nan_to_num(0).unflatten(1, (2, 3)).sum((2, 3)) / (3 if group_reduce == "mean" else 1)
    exact = 0.3 * (k.double() @ total.unsqueeze(-1)).squeeze(-1)
    length = 0.3 * (k.double().abs() @ total.abs().unsqueeze(-1)).squeeze(-1)
    assert got.dtype == torch.float32 and (got[..., 41:] == 0).all()
    assert ((got.double() - exact).abs() <= 2e-6 * length)[..., :41].all()
    if size == 1.0:
        slow = summed_scores(q.nan_to_num(0), k, visible, None, **options)
        torch.testing.assert_close(got[..., :41], slow[..., :41], rtol=1e-3, atol=1e-3)


def test_dot_scores_that_are_not_linear_go_row_by_row():
    q, k, _ = make(n=50, w=20)
    visible = torch.full((20,), 50, dtype=torch.int32)
    for options in (dict(softcap=2.0), dict(group_reduce="max"), dict(group_reduce="none"), dict(reduce="max")):
        got, want = (summed_scores(q, k, visible, None, x, score="dot", **options) for x in (41, None))
        assert torch.equal(got, want) and (got[..., 41:] != 0).any()


def test_the_hash_is_the_same_everywhere():
    projection, phase = kvops.lsh_projection(3, 2, seed=7)
    assert projection.dtype == phase.dtype == torch.float32
    # Values from another implementation of MurmurHash3's finalizer and of Box-Muller.
    want = [[-0.51571333, 0.58894587, 0.827582], [0.30412576, 0.36951965, -0.38500956]], [5.934724, 3.9948134]
    assert torch.equal(projection, torch.tensor(want[0])) and torch.equal(phase, torch.tensor(want[1]))


def test_the_hash_has_its_distribution():
    projection, phase = (fp64(x) for x in kvops.lsh_projection(128, 300, seed=1))
    assert abs(projection.mean()) < 2e-3 and abs(projection.std() * math.sqrt(128) - 1) < 0.02
    assert abs((projection**4).mean() * 128**2 - 3) < 0.2  # normal, not uniform
    assert 0 <= phase.min() < 0.2 and 6.08 < phase.max() < 2 * math.pi and abs(phase.mean() - math.pi) < 0.4
    cosines = projection @ projection.T * 128 / np.sqrt(np.outer(*[(projection**2).sum(1) * 128] * 2))
    assert np.abs(cosines - np.eye(300)).max() < 0.5


def test_the_seed_and_what_it_draws():
    q, k, v = make(n=60, w=4)
    k *= 3
    projection, phase = kvops.lsh_projection(16, 3, seed=2)
    options = dict(num_sats=30, num_chunks=3, hash_bits=3)
    drawn = kvops.protokv_compress(k, v, q, 30, seed=2, **options).indices
    given = kvops.protokv_compress(k, v, q, 30, projection=projection, phase=phase, **options).indices
    assert torch.equal(drawn, given)
    others = [kvops.protokv_compress(k, v, q, 30, seed=x, **options).indices for x in range(3, 7)]
    assert any(not torch.equal(drawn, x) for x in others)
    projection.zero_()  # the caller's own copy
    assert torch.equal(kvops.protokv_compress(k, v, q, 30, seed=2, **options).indices, drawn)
    assert (kvops.lsh_projection(16, 3, seed=2)[0] != 0).all()


# Padded batches


@pytest.mark.parametrize("name", ["protokv", "satkv"])
@examples
@given(
    starts=st.lists(st.integers(0, 20), min_size=3, max_size=3),
    lengths=st.lists(st.integers(0, 28).map(lambda x: 30 - x), min_size=3, max_size=3),
    budget=st.sampled_from([12, 20, 6, 0.9]),
    shared=st.booleans(),
    options=st.sampled_from(
        [{}, dict(score="softmax"), dict(clusters="chunks"), dict(clusters="lsh"), dict(cluster_reduce="sum")]
    ),
    whole=st.booleans(),
    seed=st.integers(0, 99),
)
def test_padded_rows_are_as_alone(name, starts, lengths, budget, shared, options, whole, seed):
    n, w = 50, 2
    q, k, v = make(seed, b=3, n=n, w=w)
    for row, (start, length) in enumerate(zip(starts, lengths)):
        for x in (k, v):
            x[row, :, :start], x[row, :, start + length :] = torch.nan, torch.nan
    assume(isinstance(budget, int) or int(budget * min(lengths)) >= w)
    options = dict(options, **SMALL, whole_clusters=whole and not shared) if name == "protokv" else {}

    def call(k, v, q, **spans):
        options["head_mode"] = "shared" if shared else "per_head"
        if name == "satkv":
            return kvops.satkv_compress(k, v, budget, w, **options, **spans)
        return kvops.protokv_compress(k, v, q, budget, **options, **spans)

    spans = dict(starts=kit.int32(*starts), lengths=kit.int32(*lengths))
    result, filled = call(k, v, q, **spans), call(k, v, q, fill_invalid=True, **spans)
    assert_moved(result, k.nan_to_num(), v.nan_to_num())
    assert result.indices.shape == filled.indices.shape
    for row, (start, length) in enumerate(zip(starts, lengths)):
        alone = (x[row : row + 1, :, start : start + length] for x in (k, v))
        want = call(*alone, q[row : row + 1]).indices
        for head in range(2):
            kept = (want[0, head][want[0, head] >= 0] + start).tolist()
            got = result.indices[row, head]
            assert got[: len(kept)].tolist() == kept and (got[len(kept) :] == -1).all()
            invalid = [i for i in range(n) if not start <= i < start + length][: len(got) - len(kept)]
            padding = [-1] * (len(got) - len(kept) - len(invalid))
            assert filled.indices[row, head].tolist() == sorted(kept + invalid) + padding


# Budgets per head


@examples
@given(
    heads=st.integers(1, 4),
    n=st.integers(1, 60),
    window=st.integers(0, 8),
    budget=st.integers(1, 70),
    floor=st.sampled_from([0.2, 0.0, 1.0, 0.5]),
    ties=st.booleans(),
    padded=st.booleans(),
    seed=st.integers(0, 99),
)
def test_head_budgets_keep_the_layers_best(heads, n, window, budget, floor, ties, padded, seed):
    budget = max(budget, window)
    scores = kit.randn(2, heads, n, seed=seed) * torch.arange(1, heads + 1)[:, None]
    if ties:
        scores = scores.round()
    starts, lengths = (kit.int32(min(3, n), 0), kit.int32(max(0, n - 7), n)) if padded else (None, None)
    got = kvops.head_budgets(scores, budget, window, floor=floor, starts=starts, lengths=lengths)
    assert got.dtype == torch.int32 and got.shape == (2, heads) and (got.sum(1) == heads * budget).all()
    for row in range(2):
        first, m = (starts[row].item(), lengths[row].item()) if padded else (0, n)
        count, m = budget - window, max(0, m - window)
        if count >= m:
            assert (got[row] == budget).all()
            continue
        prefix, least = fp64(scores[row, :, first : first + m]), int(floor * count)
        own = np.argsort(-prefix, axis=1, kind="stable")[:, :least]
        kept = np.zeros((heads, m), bool)
        np.put_along_axis(kept, own, True, 1)
        rest = np.flatnonzero(~kept.ravel())
        kept.ravel()[rest[np.argsort(-prefix.ravel()[rest], kind="stable")][: heads * (count - least)]] = True
        assert (got[row].cpu().numpy() == kept.sum(1) + window).all()


def test_head_budgets_of_fractions_and_of_scores_that_are_not_finite():
    scores = kit.randn(2, 3, 50)
    got = kvops.head_budgets(scores, 0.5, 4, lengths=kit.int32(50, 30))
    assert got.sum(1).tolist() == [75, 45]
    assert torch.equal(got[0], kvops.head_budgets(scores, 25, 4)[0])
    scores[0, 0], scores[0, 1, :10] = torch.nan, torch.inf
    got = kvops.head_budgets(scores, 20, 4, floor=0.25)
    assert got.sum(1).tolist() == [60, 60] and got[0, 0] == 4 + 4  # floor + recent, no other scores
    assert kvops.head_budgets(scores[:, :0], 20).shape == (2, 0)


CALLS = {
    "protokv": lambda k, v, q, budget, **o: kvops.protokv_compress(k, v, q, budget, **SMALL, **o),
    "protokv whole": lambda k, v, q, budget, **o: kvops.protokv_compress(k, v, q, budget, whole_clusters=True, **o),
    "satkv": lambda k, v, q, budget, **o: kvops.satkv_compress(k, v, budget, 8, **o),
    "snapkv": lambda k, v, q, budget, **o: kvops.snapkv_compress(k, v, q, budget, **o),
    "keydiff": lambda k, v, q, budget, **o: kvops.keydiff_compress(k, v, budget, recent=0.25, sinks=2, **o),
    "laq": lambda k, v, q, budget, **o: kvops.laq_compress(k, v, q, budget, **o),
    "h2o": lambda k, v, q, budget, **o: kvops.h2o_compress(k, v, q.repeat(1, 1, 8, 1)[:, :, :60], budget, **o),
    "random": lambda k, v, q, budget, **o: kvops.random_compress(k, v, budget, **o),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("padded", [False, True])
def test_heads_with_budgets_of_their_own(name, padded):
    """Each head keeps the same tokens as when all heads have its budget."""
    q, k, v = make(n=60, w=8)
    budgets = kit.int32(20, 8, 13, 60).view(2, 2)
    spans = dict(starts=kit.int32(0, 9)) if padded else {}
    result = CALLS[name](k, v, q, budgets, **spans)
    assert_moved(result, k, v)
    assert result.indices.shape == (2, 2, 60)
    for b in range(2):
        for h in range(2):
            want = CALLS[name](k, v, q, budgets[b, h].item(), **spans).indices[b, h]
            got = result.indices[b, h]
            assert torch.equal(got[: len(want)], want) and (got[len(want) :] == -1).all()


# Streaming


def make_all(n=150, **options):
    """Return q, k, v of all n tokens."""
    q, _, _ = make(n=n, w=n, b=2, **options)
    return (q, *kit.kv(2, 2, n, 16, dv=8, seed=9))


@pytest.mark.parametrize("score", ["dot", "softmax"])
@pytest.mark.parametrize("pads", [None, (0, 11)])
def test_decode_fills_a_buffer_and_is_observed_by_its_end(score, pads):
    """App. O, step by step: at n = budget + buffer tokens the last alpha observe, and `budget` tokens are kept."""
    q, k, v = make_all()
    own = dict(score=score, seed=4, **SMALL)
    cache = kvops.Cache(kvops.ProtoKV(24, 8, buffer=10, alpha=3, **own))
    if pads:
        cache.set_pads(torch.tensor(pads))
    spans = (lambda: dict(starts=cache.pads, fill_invalid=True)) if pads else dict
    cache.attend(*(x[:, :, :60] for x in (q, k, v)))
    starts = dict(starts=kit.int32(*pads), fill_invalid=True) if pads else {}
    want = kvops.protokv_compress(k[:, :, :60], v[:, :, :60], q[:, :, 52:60], 24, **own, **starts)
    assert torch.equal(cache.positions, want.indices)
    evictions = 0
    for i in range(60, 100):
        before, left = cache.positions, spans()
        cache.attend(*(x[:, :, i : i + 1] for x in (q, k, v)))
        positions = torch.cat((before, torch.full((2, 2, 1), i)), 2)
        if positions.shape[2] == 24 + 10:
            stored = rows(k, positions), rows(v, positions)
            kept = kvops.protokv_compress(*stored, q[:, :, i - 2 : i + 1], 24, **own, **left).indices
            positions = positions.gather(2, kept)
            evictions += 1
        assert torch.equal(cache.positions, positions) and torch.equal(cache.k, rows(k, positions))
    assert evictions == 4 and len(cache) == 24 and cache.seen == 100


def test_satkv_decode():
    q, k, v = make_all()
    cache = kvops.Cache(kvops.SATKV(24, 8, buffer=10))
    cache.append(k[:, :, :60], v[:, :, :60])
    positions = kvops.satkv_compress(k[:, :, :60], v[:, :, :60], 24, 8).indices
    for i in range(60, 100):
        cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        positions = torch.cat((positions, torch.full((2, 2, 1), i)), 2)
        if positions.shape[2] == 34:
            kept = kvops.satkv_compress(rows(k, positions), rows(v, positions), 24, 8).indices
            positions = positions.gather(2, kept)
        assert torch.equal(cache.positions, positions)
    assert len(cache) == 24


@pytest.mark.parametrize("policy", [kvops.ProtoKV(12, 1, buffer=5, alpha=2, **SMALL), kvops.SATKV(12, 1, buffer=5)])
def test_decode_fills_a_buffer_with_a_window_of_one_too(policy):
    """A step of one token is decode, although it has as many tokens as the window."""
    cache = kvops.Cache(policy)
    lengths = []
    for t in (20, *[1] * 10):
        cache.attend(kit.randn(1, 4, t, 16, seed=t), *kit.kv(1, 2, t, 16, seed=t))
        lengths.append(len(cache))
    assert lengths == [12, 13, 14, 15, 16, 12, 13, 14, 15, 16, 12]


@pytest.mark.parametrize("make_policy", [kvops.ProtoKV, kvops.SATKV])
def test_without_a_buffer_decode_keeps_everything(make_policy):
    q, k, v = make_all()
    cache = kvops.Cache(make_policy(24, 8, buffer=None))
    cache.attend(*(x[:, :, :60] for x in (q, k, v)))
    for first, last in ((60, 67), (67, 74)):
        cache.attend(*(x[:, :, first:last] for x in (q, k, v)))
    assert len(cache) == 24 + 14
    cache.attend(*(x[:, :, 74:82] for x in (q, k, v)))  # another turn or chunk
    assert len(cache) == 24


def test_a_cropped_cache_observes_with_the_queries_that_are_left():
    q, k, v = make_all()
    cache = kvops.Cache(kvops.ProtoKV(24, 8, buffer=10, alpha=4, **SMALL))
    cache.attend(*(x[:, :, :60] for x in (q, k, v)))
    for i in range(60, 69):
        cache.attend(*(x[:, :, i : i + 1] for x in (q, k, v)))
    cache.crop(66)  # of the queries of tokens 65 to 68, only the first remains
    positions = cache.positions
    for i in range(3):
        cache.attend(*(x[:, :, 100 + i : 101 + i] for x in (q, k, v)))
    assert len(cache) == 33
    state = copy.deepcopy(cache)
    for wrong in (q[:, :3, 103:104], q[..., 103:104, :8]):
        with kit.refuses("ProtoKV: q must be"):
            cache.attend(wrong, k[:, :, 103:104], v[:, :, 103:104])
        assert_same_state(cache, state) and torch.equal(cache._queries, state._queries)
    cache.attend(*(x[:, :, 103:104] for x in (q, k, v)))
    stored = [torch.cat((rows(x, positions), x[:, :, 100:104]), 2) for x in (k, v)]
    want = kvops.protokv_compress(*stored, q[:, :, 100:104], 24, **SMALL)
    assert len(cache) == 24 and torch.equal(cache.k, want.k)
    cache = kvops.Cache(kvops.ProtoKV(24, 8, buffer=10, alpha=4, **SMALL))
    cache.attend(*(x[:, :, :60] for x in (q, k, v)))
    for i in range(60, 69):
        cache.attend(*(x[:, :, i : i + 1] for x in (q, k, v)))
    cache.crop(60)  # none remains; only new queries observe
    stored = [torch.cat((x, y[:, :, 100:107]), 2) for x, y in ((cache.k, k), (cache.v, v))]
    cache.attend(*(x[:, :, 100:107] for x in (q, k, v)))
    assert len(cache) == 31 and cache._queries.shape[2] == 4


def test_the_observation_window_has_the_papers_sizes():
    assert kvops.ProtoKV(128).window == 8 and kvops.ProtoKV(129).window == kvops.ProtoKV(0.5).window == 32
    assert (kvops.ProtoKV(512).buffer, kvops.ProtoKV(512).alpha) == (128, 8)
    assert kvops.ProtoKV(512).num_chunks is None and kvops.ProtoKV(512).num_clusters == 500
    assert kvops.ProtoKV(512, clusters="lsh").bits == 9
    assert [kvops.ProtoKV(512, num_chunks=x, clusters="lsh").bits for x in (0, 4, 5, 12, 13)] == [2, 3, 4, 4, 5]


def test_models_logits_are_scored_as_they_are():
    q, k, v = make_all(60)
    options = dict(scale=0.7, softcap=3.0, sink_logits=kit.randn(6))
    for score in ("softmax", "dot"):
        cache = kvops.Cache(kvops.ProtoKV(20, 4, score=score, **SMALL))
        cache.attend(q, k, v, **options)
        own = dict(options) if score == "softmax" else dict(scale=0.7, softcap=3.0)
        want = kvops.protokv_compress(k, v, q[:, :, -4:], 20, score=score, **SMALL, **own)
        assert torch.equal(cache.positions, want.indices)


@kit.only("cpu")
def test_nothing_of_the_products_size_is_allocated():
    """A call allocates scores, prototypes, assignment and result indices: 80 times less than the products need."""
    code = """
import torch, kvops
peak = lambda: 1024 * int(next(line for line in open("/proc/self/status") if "VmHWM" in line).split()[1])
torch.set_num_threads(1)
k, v = torch.randn(2, 1, 4, 65536, 64, dtype=torch.bfloat16)
q = torch.randn(1, 8, 32, 64, dtype=torch.bfloat16)
out = torch.zeros_like(k[:, :, :8192]), torch.zeros_like(k[:, :, :8192])
kvops.protokv_compress(k[:, :, :1024], v[:, :, :1024], q, 256)
before = peak()
kvops.protokv_compress(k, v, q, 8192, out=out)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    scores, prototypes, indices = 4 * 4 * 65536, 4 * 4 * 500 * 64, 8 * 4 * 8192
    assert 0 < int(done.stdout) < 1.5 * (2 * scores + prototypes + indices)


# torch.compile, invalid input


@kit.only("cpu", "cuda")
def test_compiles_without_graph_breaks():
    torch.compiler.reset()
    q, k, v = make(n=60, w=8)
    shared = dict(head_mode="shared", clusters="lsh", num_chunks=9, starts=kit.int32(0, 9))

    def call(k, v, q):
        yield kvops.protokv_compress(k, v, q, 20)
        yield kvops.protokv_compress(k, v, q, 20, **shared)
        yield kvops.satkv_compress(k, v, 20, 8)

    compiled = torch.compile(lambda *args: list(call(*args)), fullgraph=True, backend="aot_eager")
    for result, expected in zip(compiled(k, v, q), call(k, v, q), strict=True):
        assert torch.equal(result.indices, expected.indices) and torch.equal(result.k, expected.k)


WRONG = [
    (dict(kappa=0), ValueError, "kappa must be at least 1, got 0"),
    (dict(kappa=1025), ValueError, "kappa must be at most 1024, got 1025"),
    (dict(kappa=5.0), TypeError, "kappa must be an int, got float 5.0"),
    (dict(num_sats=-1), ValueError, "num_sats must be at least 0, got -1"),
    (dict(num_chunks=-1), ValueError, "num_chunks must be at least 0, got -1"),
    (dict(num_sats=0, num_chunks=0), ValueError, r"num_sats \+ num_chunks must be at least 1, got 0"),
    (dict(hash_bits=0), ValueError, "hash_bits must be at least 1, got 0"),
    (dict(hash_bits=17), ValueError, "hash_bits must be at most 16, got 17"),
    (dict(seed=-1), ValueError, "seed must be at least 0, got -1"),
    (dict(clusters="kmeans"), ValueError, "clusters must be one of 'prototypes', 'chunks', 'lsh', got 'kmeans'"),
    (dict(score="cosine"), ValueError, "score must be one of 'softmax', 'dot', 'drop', got 'cosine'"),
    (dict(cluster_reduce="max"), ValueError, "cluster_reduce must be one of 'mean', 'sum', got 'max'"),
    (dict(group_reduce="none"), ValueError, "group_reduce must be one of"),
    (dict(head_mode="all"), ValueError, "head_mode must be one of"),
    (dict(projection=torch.zeros(2, 16)), ValueError, "projection and phase must be given together, got one of them"),
    (dict(phase=torch.zeros(2)), ValueError, "projection and phase must be given together, got one of them"),
    (
        dict(projection=torch.zeros(3, 16), phase=torch.zeros(3)),
        ValueError,
        r"projection must be torch.float32 \[2, d\], got torch.float32 \[3, 16\]",
    ),
    (
        dict(projection=torch.zeros(2, 16), phase=torch.zeros(2, 1)),
        ValueError,
        r"phase must be torch.float32 \[2\], got torch.float32 \[2, 1\]",
    ),
    (
        dict(projection=torch.zeros(2, 16).double(), phase=torch.zeros(2)),
        ValueError,
        r"projection must be torch.float32 \[2, d\], got torch.float64",
    ),
    (dict(projection=3, phase=torch.zeros(2)), TypeError, "projection must be a torch.Tensor, got int"),
    (
        dict(projection=torch.zeros(2, 16), phase=torch.zeros(2), clusters="chunks"),
        ValueError,
        "with clusters='chunks', projection and phase must be None",
    ),
]


@pytest.mark.parametrize("change, error, message", WRONG)
def test_wrong_settings(change, error, message):
    q, k, v = make(n=40, w=8)
    for call in (kvops.protokv_compress, kvops.protokv_compress_):
        with kit.refuses(f"{call.__name__}: {message}", kind=error):
            call(k, v, q, 20, **change)
    with kit.refuses("ProtoKV: " + message, kind=error):
        kvops.ProtoKV(20, 8, **change)


def test_wrong_arguments():
    q, k, v = make(n=40, w=8)
    good = dict(k=k, v=v, q_window=q, budget=20)
    for call, change, error, message in [
        (kvops.protokv_compress, dict(q_window=q[0]), ValueError, r"q_window must be \[b, Hq, w, d\]"),
        (
            kvops.protokv_compress,
            dict(k=k[:, :, :7], v=v[:, :, :7]),
            ValueError,
            "q_window must be queries of the prompt",
        ),
        (kvops.protokv_compress, dict(budget=7), ValueError, "budget must hold the window, expected at least 8 tokens"),
        (kvops.protokv_compress, dict(budget=True), TypeError, "budget must be an int"),
        (kvops.protokv_compress, dict(lse=torch.zeros(2, 6, 7)), ValueError, "lse must be torch.float32"),
        (
            kvops.protokv_compress,
            dict(whole_clusters=True, head_mode="shared"),
            ValueError,
            "whole_clusters=True needs head_mode='per_head'",
        ),
    ]:
        with kit.refuses(f"{call.__name__}: {message}", kind=error):
            call(**{**good, **change})
    for change, message in [
        (dict(projection=torch.zeros(2, 8), phase=torch.zeros(2)), r"projection must be a contiguous \[r, 16\]"),
        (dict(sink_logits=torch.zeros(6)), "lse, sink_logits and row_weights apply to a softmax"),
        (dict(q_window=q[:, :5]), "query heads of q must be a multiple of the KV heads 2, got 5"),
        (dict(q_window=q.half()), "k must have q's dtype torch.float16, got torch.float32"),
        (dict(starts=kit.int32(0, 41)), "starts"),
        (dict(lengths=kit.int32(41, 40)), "lengths"),
    ]:
        with kvops.debug_checks(), kit.refuses(message):
            kvops.protokv_compress(**{**good, **change})
    for args, error, message in [
        ((20, -1), ValueError, "window must be at least 0, got -1"),
        ((20, 8.0), TypeError, "window must be an int"),
        ((20, 21), ValueError, "budget must hold the window, expected at least 21 tokens, got 20"),
    ]:
        with kit.refuses(f"satkv_compress: {message}", kind=error):
            kvops.satkv_compress(k, v, *args)
    for change, message in [
        (dict(kappa=0), "kappa must be at least 1"),
        (dict(head_mode="x"), "head_mode must be one"),
    ]:
        with kit.refuses(f"satkv_compress: {message}"):
            kvops.satkv_compress(k, v, 20, 8, **change)
        with kit.refuses(f"SATKV: {message}"):
            kvops.SATKV(20, 8, **change)
    for make_policy, error, message in [
        (lambda: kvops.ProtoKV(7, 8), ValueError, "ProtoKV: budget must hold the window, expected at least 8 tokens"),
        (lambda: kvops.ProtoKV(20, 0), ValueError, "ProtoKV: window must be at least 1"),
        (lambda: kvops.ProtoKV(20, 8, buffer=0), ValueError, "ProtoKV: buffer must be at least 1, got 0"),
        (lambda: kvops.ProtoKV(20, 8, alpha=0), ValueError, "ProtoKV: alpha must be at least 1, got 0"),
        (
            lambda: kvops.Cache(kvops.ProtoKV(20, 8, alpha=21)),
            ValueError,
            "ProtoKV: budget must hold alpha tokens, expected 21, got 20",
        ),
        (lambda: kvops.SATKV(20, 8, buffer="1"), TypeError, "SATKV: buffer must be an int"),
        (
            lambda: kvops.SATKV(20, 8, buffer=1.0),
            ValueError,
            r"SATKV: buffer as a fraction of the budget must be in \(0, 1",
        ),
        (lambda: kvops.SATKV(20), ValueError, "SATKV: budget must hold the window, expected at least 32"),
        (lambda: kvops.lsh_projection(0), ValueError, "lsh_projection: head_dim must be at least 1, got 0"),
        (lambda: kvops.lsh_projection(8, 0), ValueError, "lsh_projection: bits must be at least 1, got 0"),
    ]:
        with kit.refuses(message, kind=error):
            make_policy()


def test_wrong_budgets_per_head():
    q, k, v = make(n=40, w=8)
    for name in ("snapkv", "protokv", "keydiff", "satkv"):
        call = CALLS[name]
        for budget, message in [
            (kit.int32(20, 20), r"budget as a tensor must be torch.int32 \[b, Hk\], got torch.int32 \[2\]"),
            (torch.full((2, 2), 20), r"budget as a tensor must be torch.int32 \[b, Hk\], got torch.int64"),
            (
                kit.int32(20, 20).view(2, 1),
                r"budget must have one entry per row and head, expected \[2, 2\], got \[2, 1\]",
            ),
        ]:
            with kit.refuses(f"{name}_compress: {message}"):
                call(k, v, q, budget)
        with kit.refuses(f"{name}_compress: a budget per head needs head_mode='per_head', got head_mode='shared'"):
            call(k, v, q, torch.full((2, 2), 20, dtype=torch.int32), head_mode="shared")
    with kit.refuses("pyramidkv_compress: layers share the budget", "got a budget per head"):
        kvops.pyramidkv_compress(k, v, q, torch.full((2, 2), 20, dtype=torch.int32), layer=0, num_layers=2)
    for make_policy in (kvops.SnapKV, kvops.ProtoKV, kvops.KeyDiff, kvops.SATKV):
        with kit.refuses("a cache expects budget as an int or a float"):
            kvops.Cache(make_policy(torch.full((2, 2), 40, dtype=torch.int32)))
    scores = kit.randn(2, 2, 40)
    for args, options, error, message in [
        ((scores[0], 20), {}, ValueError, r"scores must be \[b, Hk, n\], got shape \[2, 40\]"),
        ((scores, 20, 21), {}, ValueError, "budget must hold the window, expected at least 21 tokens, got 20"),
        ((scores, 20, -1), {}, ValueError, "window must be at least 0"),
        ((scores, 20), dict(floor=1.5), ValueError, r"floor must be in \[0, 1\], got 1.5"),
        ((scores, torch.zeros(2, 2).int()), {}, TypeError, "budget must be an int .* got a tensor"),
    ]:
        with kit.refuses(f"head_budgets: {message}", kind=error):
            kvops.head_budgets(*args, **options)


@kit.only("cpu", "simulator")
def test_budgets_per_head_must_hold_what_is_protected():
    q, k, v = make(n=40, w=8)
    budgets = kit.int32(20, 20, 7, 20).view(2, 2)
    for name in ("snapkv", "protokv", "satkv"):
        with kit.refuses(
            rf"{name}_compress, row 1, head 0: budget must hold sinks \+ recent, expected at least 0 \+ 8"
        ):
            CALLS[name](k, v, q, budgets)


# ---- the number of chunks ----


@pytest.mark.parametrize("n, chunks", [(19, 1), (39, 3), (500, 50), (4969, 496), (9000, 496)])
def test_one_chunk_for_ten_tokens(n, chunks):
    k, _ = kit.kv(1, 1, n, 16)
    by_share = clusters_of(k, kit.int32(n), num_sats=4)
    by_count = clusters_of(k, kit.int32(n), num_sats=4, num_chunks=chunks)
    assert torch.equal(
        by_share, torch.where(by_count < chunks, by_count, by_count - chunks + max(1, min(496, n // 10)))
    )
    assert len(by_share[by_share < chunks].unique()) > chunks * 0.8


@pytest.mark.parametrize("clusters", ["prototypes", "chunks", "lsh"])
def test_padded_rows_have_the_chunks_of_their_own_length(clusters):
    q, k, v = make(5, n=150, w=4)
    options = dict(clusters=clusters, num_sats=4)
    starts, lengths = kit.int32(0, 60), kit.int32(97, 90)
    got = kvops.protokv_compress(k, v, q, 40, starts=starts, lengths=lengths, **options).indices
    for row, (first, length) in enumerate(((0, 97), (60, 90))):
        own = [x[row : row + 1] for x in (k[:, :, first : first + length], v[:, :, first : first + length], q)]
        expected = kvops.protokv_compress(*own, 40, **options).indices
        assert torch.equal(got[row : row + 1], expected + first)
