"""DefensiveKV compared with its formula and its released code in plain PyTorch: risk, prior, stages, layer budgets."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import max_pool1d

import kit
import kvops
from kvops.ops import reference
from kvops.ops.window import summed_scores
from test_methods import assert_moved, fp64
from test_window_methods import assert_kept, causal, heads_of, logit_options, make, pooled, weights

pytestmark = kit.every_device
examples = kit.examples(40, derandomize=True)
aggregated = partial(kvops.defensivekv_compress, stages=False)  # the risk alone


def risks(a, keep, prior=1.0, kernel_size=5, pooling="max", pool_first=False, group_reduce="max"):
    """Return the scores of the prefix, i.e. all but the last `keep` keys. a: [G, w, n]."""
    group = {"mean": np.mean, "sum": np.sum, "max": np.max}[group_reduce]
    r = a.max(1)[:, : a.shape[-1] - keep]
    r = group(pooled(r, kernel_size, pooling), 0) if pool_first else pooled(group(r, 0), kernel_size, pooling)
    return np.maximum(r, prior * r.mean()) if r.size and prior else r


@examples
@given(
    n=st.integers(0, 50).map(lambda x: 60 - x),
    w=st.integers(1, 10),
    budget=st.integers(10, 70),
    dtype=st.sampled_from(kit.DTYPES),
    layout=st.sampled_from(kit.LAYOUTS),
    group=st.sampled_from([3, 1]),
    shared=st.booleans(),
    seed=st.integers(0, 99),
    prior=st.sampled_from([1.0, 0, 0.5, 3.0]),
    pool=st.fixed_dictionaries(
        dict(
            kernel_size=st.sampled_from([5, 1, 21]),
            pooling=st.sampled_from(["max", "avg"]),
            pool_first=st.booleans(),
            group_reduce=st.sampled_from(["mean", "max", "sum"]),
        )
    ),
    logit=st.fixed_dictionaries(logit_options),
)
def test_defensivekv_is_its_formula(n, w, budget, dtype, layout, group, shared, seed, prior, pool, logit):
    q, k, v = make(seed, n=n, w=w, dtype=dtype, layout=layout, group=group)
    head_mode = "shared" if shared else "per_head"
    result = aggregated(k, v, q, budget, head_mode=head_mode, prior=prior, **pool, **logit)
    assert_moved(result, k, v)
    assert result.indices.shape[2] == min(budget, n)
    for b in range(2):
        scores = [risks(weights(qs, ks, causal(n, w), **logit), w, prior, **pool) for qs, ks in heads_of(q, k, b)]
        for h in range(2):
            mean = np.mean(scores, 0) if shared else scores[h]
            assert_kept(result.indices[b, h], mean, w, budget, tolerance=group * 4e-6)


def released(q, k, pool=lambda rows: rows):
    """Return the scores of the released code before its value norms, in fp64: [b, Hk, n - w]. pool: of each row."""
    w, n = q.shape[2], k.shape[2]
    group = q.shape[1] // k.shape[1]
    seen = torch.ones(w, n, dtype=torch.bool).tril(n - w)
    logits = q.double() @ k.double().repeat_interleave(group, 1).mT / q.shape[-1] ** 0.5
    a = logits.masked_fill(~seen, -torch.inf).softmax(-1)[..., : n - w]
    worst = pool(a.flatten(0, 2)[:, None]).view(a.shape).unflatten(1, (-1, group)).amax((2, 3))
    return worst.clamp(min=worst.mean(-1, keepdim=True))


@pytest.mark.parametrize("kernel", [1, 5])
def test_the_released_code(kernel):
    """Its scores in plain PyTorch, with max pooling of each row: the order of maxima does not matter."""
    n, w, budget = 300, 32, 60
    q, k, v = make(n=n, w=w, d=64)
    scores = released(q, k, lambda rows: max_pool1d(rows, kernel, stride=1, padding=kernel // 2))
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., : budget - w].sort(-1).values
    want = torch.cat((best, torch.arange(n - w, n).expand(2, 2, -1)), -1)
    assert torch.equal(aggregated(k, v, q, budget, kernel_size=kernel).indices, want)


def test_the_layer_wise_variant_is_a_budget_for_each_head_of_each_layer():
    """Layer-DefensiveKV: all heads of all layers share one budget, without a floor."""
    layers, n, w, budget = 3, 200, 16, 48
    inputs = [make(seed, b=1, n=n, w=w, d=32) for seed in range(layers)]
    scores = torch.cat([released(q, k) for q, k, _ in inputs], 1)  # [1, layers * Hk, n - w]
    heads = scores.shape[1]
    order = scores.flatten().sort(descending=True, stable=True).indices[: heads * (budget - w)]
    padded = torch.nn.functional.pad(scores, (0, w)).float()
    budgets = kvops.head_budgets(padded, budget, w, floor=0.0)
    assert budgets[0].tolist() == [int((order // (n - w) == h).sum()) + w for h in range(heads)]
    assert len(set(budgets[0].tolist())) > 1
    for layer, (q, k, v) in enumerate(inputs):
        own = budgets[:, 2 * layer : 2 * layer + 2].contiguous()
        kept = aggregated(k, v, q, own, kernel_size=1).indices
        for h in range(2):
            chosen = (order[order // (n - w) == 2 * layer + h] % (n - w)).sort().values
            row = kept[0, h][kept[0, h] >= 0]
            assert torch.equal(row, torch.cat((chosen, torch.arange(n - w, n))))


def test_one_high_weight_outweighs_many_low_ones():
    """Key 10 is decisive for one query, key 20 gets a little from all. SnapKV keeps 20, DefensiveKV 10."""
    n, w, d = 40, 4, 16
    k = torch.zeros(1, 1, n, d)
    k[0, 0, 10, 0], k[0, 0, 20, 1:5] = 6.0, 2.2
    q = torch.zeros(1, 1, w, d)
    q[0, 0, torch.arange(w), torch.arange(w)] = 4.0
    q[0, 0, 1:, 1:5] = 1.5
    options = dict(kernel_size=1)
    assert 10 in aggregated(k, k, q, w + 1, **options).indices
    assert 20 in kvops.snapkv_compress(k, k, q, w + 1, **options).indices


def test_corrected_keys_tie_and_the_lower_slots_win():
    q, k, v = make(b=1, heads=1, group=1, n=50, w=4)
    a = weights(*heads_of(q, k, 0)[0], causal(50, 4))
    r = risks(a, 4, prior=0, kernel_size=1)
    above = np.flatnonzero(r > r.mean())
    below = np.flatnonzero(r <= r.mean())
    kept = aggregated(k, v, q, 4 + len(above) + 5, kernel_size=1).indices[0, 0].tolist()
    assert kept == sorted([*above.tolist(), *below[:5].tolist(), *range(46, 50)])
    without = aggregated(k, v, q, 4 + len(above) + 5, kernel_size=1, prior=0).indices[0, 0].tolist()
    assert without == sorted([*np.argsort(-r)[: len(above) + 5].tolist(), *range(46, 50)])


def test_the_prior_changes_the_shares_of_heads():
    """One key takes most of the first head's attention, and the second head attends evenly. The mean risks are nearly
    the same, so with the prior both heads keep tokens; without it the other keys of the first head count for nothing.
    """
    q, k, v = make(b=1, group=1, n=100, w=4)
    k *= 0.01
    q[:] = q[:, :, :1]
    k[:, 0, 5] = q[:, 0, 0]

    def counts(prior):
        kept = aggregated(k, v, q, 30, prior=prior, head_mode="adaptive", kernel_size=1).indices
        return (kept >= 0).sum(-1)[0].tolist()

    assert sum(counts(1.0)) == sum(counts(0)) == 60
    assert counts(0)[0] == 4 + 5 and counts(1.0)[0] > 20  # the window and the floor of head_budgets


def test_nan_and_padding():
    """A key that is not finite is evicted first and does not count in the mean; padded rows keep the same as alone."""
    q, k, v = make(n=60, w=4)
    k[0, 0, 7] = torch.nan
    kept = aggregated(k, v, q, 55, kernel_size=1).indices
    assert 7 not in kept[0, 0] and (kept[0, 0] >= 0).all()
    finite = torch.arange(60) != 7
    alone = aggregated(k[:1, :1, finite], v[:1, :1, finite], q[:1, :3], 20, kernel_size=1).indices
    among = aggregated(k, v, q, 20, kernel_size=1).indices[0, 0]
    assert torch.equal(torch.arange(60)[finite][alone[0, 0]], among)
    k[1, :, :17], k[1, :, 50:] = 9e3, torch.nan  # outside of the second row
    starts, lengths = kit.int32(0, 17), kit.int32(60, 33)
    q[1] = q[1].flip(1)
    kept = aggregated(k, v, q, 20, starts=starts, lengths=lengths).indices
    alone = aggregated(k[1:, :, 17:50], v[1:, :, 17:50], q[1:], 20).indices
    assert torch.equal(kept[1], alone[0] + 17)


@pytest.mark.parametrize("score", ["softmax", "dot"])
def test_the_maximum_over_more_rows_than_the_operator_takes(score):
    """Rows of another block do not see a key, or do not count: they must not raise its maximum to 0."""
    w, n = 300, 320
    q, k, _ = make(n=n, w=w)
    k = -k.abs()
    q = q.abs()  # all logits are negative
    visible = torch.arange(n - w + 1, n + 1, dtype=torch.int32).repeat(2, 1)
    visible[1, :280] = 0
    options = dict(score=score, reduce="max", group_reduce="max")
    found = summed_scores(q, k, visible, None, **options)
    want = reference.window_scores(q, k, visible, **options)
    torch.testing.assert_close(found.double(), want, atol=1e-5, rtol=1e-5)
    assert (fp64(found) < 0).any() == (score == "dot")


def both_scores(q, k, v, w_o, kernel=5, prior=1.0):
    """Return the mean attention of each prefix token and its score in the second stage, fp64 [b, Hk, n - w]."""
    (_, heads, n, _), w = k.shape, q.shape[2]
    logits = q.double().unflatten(1, (heads, -1)) @ k.double().unsqueeze(2).mT / q.shape[-1] ** 0.5
    seen = torch.ones(w, n, dtype=torch.bool).tril(n - w)
    a = logits.masked_fill(~seen, -torch.inf).softmax(-1)[..., : n - w]  # [b, Hk, group, w, n - w]
    risk = max_pool1d(a.amax((2, 3)), kernel, 1, kernel // 2)
    risk = torch.maximum(risk, prior * risk.mean(-1, keepdim=True))
    weights = w_o.double().unflatten(1, (heads, -1, v.shape[3]))
    norms = torch.einsum("bhnd,chgd->bhgnc", v[:, :, : n - w].double(), weights).abs().sum(-1).mean(2)
    return a.mean((2, 3)), risk * norms / norms.sum(-1, keepdim=True)


def ranking(m, s, most, sinks=0, mass=0.9):
    """Return the tokens of one head that are not sinks, best first, and how many of them are of the first stage."""
    free = [i for i in m.sort(descending=True, stable=True).indices.tolist() if i >= sinks]
    first, held = [], 0.0
    for i in free[:most]:
        held += m[i]
        if m[free].sum() - held <= 1 - mass:
            break
        first.append(i)
    others = [i for i in s.sort(descending=True, stable=True).indices.tolist() if i >= sinks and i not in first]
    return first + others, len(first)


def staged(q, k, v, w_o, budget, sinks=0, mass=0.9, prior=1.0, shared=False):
    """Return the kept slots of each row and head by the formula, in fp64."""
    (b, heads, n, _), w = k.shape, q.shape[2]
    mean, second = both_scores(q, k, v, w_o, prior=prior)
    if shared:
        mean, second = (x.mean(1, keepdim=True).expand(-1, heads, -1) for x in (mean, second))
    rows, most = [], budget - w - sinks
    for m, s in zip(mean.flatten(0, 1), second.flatten(0, 1)):
        best, _ = ranking(m, s, most, sinks, mass)
        rows.append(sorted([*range(sinks), *best[:most], *range(n - w, n)]))
    return torch.tensor(rows).unflatten(0, (b, heads))


def projected(seed=0, **sizes):
    """Return inputs of sharper attention, whose values and projections differ in size, so that the norms decide."""
    q, k, v = make(seed, **sizes)
    w_o = kit.randn(40, q.shape[1] * v.shape[3], seed=seed + 2) * kit.randn(1, q.shape[1] * v.shape[3], seed=3).exp()
    return 2 * q, k, v * kit.randn(*v.shape[:3], 1, seed=seed + 4).exp(), w_o


OPTIONS = [{}, dict(sinks=3), dict(prior=0.0), dict(mass=0.0), dict(mass=0.5), dict(mass=1.0)]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", OPTIONS)
def test_the_stages_are_their_formula(options, seed, shared):
    q, k, v, w_o = projected(seed, n=200, w=8)
    want = staged(q, k, v, w_o, 60, shared=shared, **options)
    names = {"mass": "first_stage_mass"}
    options = {names.get(name, name): x for name, x in options.items()}
    options["head_mode"] = "shared" if shared else "per_head"
    assert torch.equal(kvops.defensivekv_compress(k, v, q, 60, w_o=w_o, **options).indices, want)


def test_both_stages_decide():
    """The first stage holds some of the budget, and the norms reorder the rest."""
    q, k, v, w_o = projected(n=200, w=8)
    kept = [
        kvops.defensivekv_compress(k, v, q, 60, w_o=w_o, first_stage_mass=mass).indices.tolist()
        for mass in (0.0, 0.3, 0.5, 1.0)
    ]
    assert len({str(x) for x in (*kept, aggregated(k, v, q, 60).indices.tolist())}) == 5


def test_heads_share_the_budget_by_both_stages():
    """The first stage is the layer's. Each head keeps a fifth of the budget, and the layer the best of all others."""
    q, k, v, w_o = projected(n=200, w=8, b=1)
    k[:, 1] *= 0.2  # this head attends evenly
    mean, second = both_scores(q, k, v, w_o)
    weights = sorted(((float(m) / 2, h, i) for h in range(2) for i, m in enumerate(mean[0, h, :192])), reverse=True)
    others, first = sum(x for x, _, _ in weights), set()
    for weight, h, i in weights:
        others -= weight
        if others <= 0.7:
            break
        first.add((h, i))
    ranks = [(0, h, i) if (h, i) in first else (1, -float(second[0, h, i]), h, i) for h in range(2) for i in range(192)]
    kept, rest = [[], []], []
    for *_, h, i in sorted(ranks):
        if len(kept[h]) < 10:  # a fifth of 60 - 8, rounded down
            kept[h].append(i)
        else:
            rest.append((h, i))
    for h, i in rest[: 2 * (52 - 10)]:
        kept[h].append(i)
    want = [sorted([*x, *range(192, 200)]) for x in kept]
    assert 10 < len(first) < 2 * 52 and len({h for h, _ in first}) == 2
    found = kvops.defensivekv_compress(k, v, q, 60, w_o=w_o, head_mode="adaptive", first_stage_mass=0.3).indices
    assert [[i for i in x if i >= 0] for x in found[0].tolist()] == want
    assert len(want[0]) != len(want[1])


def test_a_first_stage_of_all_tokens_keeps_the_most_attention():
    """The floor of one head pushes tokens of others out of a stage that fills the budget: those of least attention."""
    q, k, v, w_o = projected(n=200, w=8, b=1)
    k[:, 0], k[:, 1] = 60 * k[:, 0], 0.05 * k[:, 1]  # one head attends to few tokens, the other to all
    mean, _ = both_scores(q, k, v, w_o)
    found = kvops.defensivekv_compress(k, v, q, 108, w_o=w_o, head_mode="adaptive", first_stage_mass=1.0).indices
    pushed = mean[0, :, :192].flatten().topk(2 * 100).indices
    own = [{i for i in row if 0 <= i < 192} for row in found[0].tolist()]
    assert sum(map(len, own)) == 2 * 100 and len(own[0]) == 20 > int((pushed < 192).sum())
    assert own[1] == set(mean[0, 1, :192].topk(len(own[1])).indices.tolist())


def test_padded_rows_and_lost_tokens_with_stages():
    """Padded rows keep the same as alone. A token without a norm is evicted first."""
    q, k, v, w_o = projected(n=60, w=4)
    k[1, :, :17], k[1, :, 50:], v[1, :, 50:] = 9e3, torch.nan, torch.nan  # outside of the second row
    spans = dict(starts=kit.int32(0, 17), lengths=kit.int32(60, 33))
    kept = kvops.defensivekv_compress(k, v, q, 20, w_o=w_o, **spans).indices
    alone = kvops.defensivekv_compress(k[1:, :, 17:50], v[1:, :, 17:50], q[1:], 20, w_o=w_o).indices
    assert torch.equal(kept[1], alone[0] + 17)
    q, k, v, w_o = projected(n=60, w=4)
    v[0, 0, 7] = torch.nan
    kept = kvops.defensivekv_compress(k, v, q, 20, w_o=w_o).indices
    assert 7 not in kept[0, 0]
    v[0, 0, 7] = 0.0  # the other head does not see it
    assert torch.equal(kept[0, 1], kvops.defensivekv_compress(k, v, q, 20, w_o=w_o).indices[0, 1])


def test_a_cache_keeps_what_a_single_call_keeps():
    """Also with pool_first, where the attention of each query head precedes the means."""
    q, k, v, w_o = projected(n=60, w=60)
    for options in ({}, dict(pool_first=True, pooling="avg", group_reduce="mean"), dict(window=20)):
        policy = kvops.DefensiveKV(30, **{"window": 8, **options}, w_o=w_o)
        cache = kvops.Cache(policy)
        cache.attend(q, k, v)
        assert torch.equal(cache.positions, policy.compress(k, v, q[:, :, -policy.window :]).indices)


def test_layers_that_share_keys_count_as_one_group():
    """The query heads of both layers observe, in both reductions."""
    q, k, v, w_o = projected(n=60, w=60, b=1, group=4)
    halves = [q.unflatten(1, (2, 2, 2))[:, :, i].flatten(1, 2) for i in range(2)]
    for options in ({}, dict(pool_first=True)):
        policy = kvops.DefensiveKV(30, 8, w_o=w_o, **options)
        cache = kvops.Cache(policy)
        keys = cache.append(k, v)
        cache.attention(halves[0], *keys, readers=1)
        cache.read(halves[1], *keys)
        assert torch.equal(cache.positions, policy.compress(k, v, q[:, :, -8:]).indices)


@kit.only("cpu")
@pytest.mark.parametrize("stages", [True, False])
def test_compiles_without_graph_breaks(stages):
    torch.compiler.reset()
    q, k, v, w_o = projected(n=60, w=8)
    policy = kvops.DefensiveKV(40, w_o=w_o, stages=stages)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def both(q, k, v):
        return policy.compress(k, v, q), kvops.defensivekv_compress(k, v, q, 40, w_o=w_o, stages=stages)

    want = policy.compress(k, v, q)
    for got in both(q, k, v):
        assert all(torch.equal(x, y) for x, y in zip(got, want))


def test_settings_of_the_stages():
    q, k, v, w_o = projected()
    with kit.refuses("w_o must be the weights of the output projection", "got None", kind=ValueError):
        kvops.defensivekv_compress(k, v, q, 20)
    with kit.refuses("first stage is a part of the attention", "stages=False", "got 'dot'", kind=ValueError):
        kvops.DefensiveKV(40, score="dot", w_o=w_o)
    with kit.refuses("first_stage_mass", "got 1.5", kind=ValueError):
        kvops.DefensiveKV(40, first_stage_mass=1.5, w_o=w_o)
    with kit.refuses("stages must be", "got int 1", kind=TypeError):
        kvops.DefensiveKV(40, stages=1, w_o=w_o)
    assert kvops.DefensiveKV(40, stages=False, score="dot").needs.model == ()
    assert kvops.DefensiveKV(40).needs.model == ("w_o",)
