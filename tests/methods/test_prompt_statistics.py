"""Expected Attention by the prompt's own queries: caches that gather their statistics, against kvpress' formula."""

import copy
import pickle

import pytest
import torch

import kit
import kvops
from kvops import ExpectedAttention, QueryStatistics
from kvops.cache import StatisticsCache
from kvops.cache import statistics as statistics_cache
from kvops.methods.statistics import pooled
from test_calibrated import GROUP, HEADS, ROPES, D, N, expected_attention, rope, rotate

FORMS = {**ROPES, "some channels": {"pairs": 6}, "some channels, adjacent": {"pairs": 6, "interleaved": True}}
PADS = 0, 7, 40


def prompt(of, n=N, rows=1, seed=0):
    """Return queries before RoPE; queries and keys at their positions; values."""
    q = kit.randn(rows, HEADS * GROUP, n, D, seed=seed) + kit.randn(rows, HEADS * GROUP, 1, D, seed=seed + 1)
    before, v = kit.kv(rows, HEADS, n, D, seed=seed)
    return q, *(rotate(x, torch.arange(n), of).float() for x in (q, before)), v


def cache_of(policy, of=None):
    return kvops.Cache(policy, rope=of or rope())


def attend(cache, q, k, v, *sizes):
    """Attend to chunks of these sizes, then to single tokens."""
    for step in zip(*(x.split([*sizes, *[1] * (x.shape[2] - sum(sizes))], 2) for x in (q, k, v))):
        cache.attend(*step)
    return cache


def moments(cache):
    found = cache._stored().statistics
    return found.mean, found.cov


def assert_moments(cache, q):
    """q: [1, Hq, tokens, d], the queries that must count."""
    golden = q[0].double()
    mean, cov = moments(cache)
    torch.testing.assert_close(mean[0].double(), golden.mean(1), rtol=1e-5, atol=1e-5)
    expected = torch.stack([x.T.cov(correction=0) for x in golden])
    torch.testing.assert_close(cov[0].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "options",
    [{}, {"covariance": False}, {"value_norm": False}, {"epsilon": 0.01, "future": 64}, {"sinks": 0}, {"sinks": 9}],
)
def test_a_cache_keeps_what_kvpress_keeps(form, options):
    of = rope(**FORMS[form])
    q, q_turned, k, v = prompt(of)
    policy = ExpectedAttention(100, statistics="prompt", **options)
    cache = attend(cache_of(policy, of), q_turned, k, v, N)
    assert isinstance(cache, StatisticsCache) and len(cache) == 100
    golden = expected_attention(
        q[:, :, policy.sinks :], k, v, of, **{"sinks": policy.sinks, "future": policy.future} | options
    )
    for h in range(HEADS):
        best = golden[h].topk(100 - policy.sinks).indices.sort().values + policy.sinks
        assert cache.positions[0, h].tolist() == [*range(policy.sinks), *best.tolist()]


def test_the_scale_of_the_logits_is_the_attentions():
    of = rope()
    q, q_turned, k, v = prompt(of)
    cache = cache_of(ExpectedAttention(100, statistics="prompt"), of)
    cache.attend(q_turned, k, v, scale=0.7)
    given = ExpectedAttention(100, statistics=QueryStatistics.of(q[:, :, 4:], of, scale=0.7))
    assert torch.equal(cache.positions, given.compress(k, v).indices)
    other = ExpectedAttention(100, statistics=QueryStatistics.of(q[:, :, 4:], of))
    assert not torch.equal(cache.positions, other.compress(k, v).indices)


def test_padded_rows_keep_what_they_keep_alone():
    """In the prompt, in decode and in a later turn. Padding holds NaN."""
    of = rope()
    policy = ExpectedAttention(64, buffer=8, statistics="prompt")
    q, q_turned, k, v = prompt(of, n=260, rows=len(PADS))
    together, alone, n = [], [], 200
    for row, pads in enumerate(PADS):
        own = [x[row : row + 1, :, : 260 - pads] for x in (q_turned, k, v)]
        alone.append(attend(cache_of(policy, of), *own, n - pads, *[1] * 20, 12))
        together.append([torch.cat((torch.full_like(x[:, :, :pads], torch.nan), x), 2) for x in own])
    cache = cache_of(policy, of)
    cache.set_pads(kit.int32(*PADS))
    attend(cache, *(torch.cat(x) for x in zip(*together)), n, *[1] * 20, 12)
    for row, pads in enumerate(PADS):
        assert torch.equal(cache.positions[row] - pads, alone[row].positions[0])
        for x, y in zip(moments(cache), moments(alone[row])):
            torch.testing.assert_close(x[row], y[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("sizes", [(N,), (100, 150, 50), (2, 3, 290, 5), (299, 1)])
def test_chunks_of_a_prompt_add_up(sizes, monkeypatch):
    """The last chunk evicts. Blocks of 64 queries are added one by one. A last chunk of one token is decode."""
    monkeypatch.setattr(statistics_cache, "BLOCK", 64)
    of = rope()
    q, q_turned, k, v = prompt(of)
    keep = N - 2 if sizes[-1] == 5 else N - 40
    policy = ExpectedAttention(keep, buffer=1, statistics="prompt")
    cache = attend(cache_of(policy, of), q_turned, k, v, *sizes)
    counted = N - 1 if sizes[-1] == 1 else N
    assert_moments(cache, q[:, :, 4:counted])
    given = kvops.Cache(ExpectedAttention(keep, buffer=1, statistics=QueryStatistics.of(q[:, :, 4:counted], of)))
    if sizes[-1] != 1:
        given.append(k, v)
        assert torch.equal(cache.positions, given.positions)


def test_decode_evicts_by_the_prompts_queries_and_a_turn_adds_its_own():
    of = rope()
    q, q_turned, k, v = prompt(of)
    policy = ExpectedAttention(64, buffer=16, statistics="prompt")
    sizes = 200, *[1] * 40, 30
    cache = cache_of(policy, of)
    given = kvops.Cache(ExpectedAttention(64, buffer=16, statistics=QueryStatistics.of(q[:, :, 4:200], of)))
    for i, (a, b, c) in enumerate(zip(*(x[:, :, :270].split(sizes, 2) for x in (q_turned, k, v)))):
        if i == 41:
            both = torch.cat((q[:, :, 4:200], q[:, :, 240:270]), 2)
            vars(given)["policy"] = ExpectedAttention(64, buffer=16, statistics=QueryStatistics.of(both, of))
        cache.attend(a, b, c)
        given.append(b, c)
        assert torch.equal(cache.positions, given.positions)
    assert_moments(cache, both)
    assert len(cache) == 64


def test_a_prompt_that_stays_counts_too():
    """protect="prompt": the first `sinks` tokens do not count, the others do."""
    of = rope()
    q, q_turned, k, v = prompt(of)
    policy = ExpectedAttention(40, buffer=10, statistics="prompt", protect="prompt")
    cache = attend(cache_of(policy, of), q_turned, k, v, 200)
    assert_moments(cache, q[:, :, 4:200])
    given = kvops.Cache(
        ExpectedAttention(40, buffer=10, statistics=QueryStatistics.of(q[:, :, 4:200], of), protect="prompt")
    )
    for step in zip(*(x.split([200, *[1] * (N - 200)], 2) for x in (k, v))):
        given.append(*step)
    assert torch.equal(cache.positions, given.positions) and len(cache) == 240


def test_a_frozen_cache_gathers_nothing():
    of = rope()
    q, q_turned, k, v = prompt(of)
    cache = attend(
        cache_of(ExpectedAttention(64, statistics="prompt"), of), *(x[:, :, :200] for x in (q_turned, k, v)), 200
    )
    cache.freeze()
    attend(cache, *(x[:, :, 200:] for x in (q_turned, k, v)), 60)
    assert len(cache) == 64 + 100
    assert_moments(cache, q[:, :, 4:200])
    cache.crop(200)
    assert len(cache) == 64


def test_after_a_prompt_that_was_read_frozen_the_next_query_counts():
    of = rope()
    q, q_turned, k, v = prompt(of)
    cache = cache_of(ExpectedAttention(64, statistics="prompt", buffer=1), of)
    cache.freeze()
    attend(cache, *(x[:, :, :200] for x in (q_turned, k, v)), 200)
    cache.frozen = False
    attend(cache, *(x[:, :, 200:201] for x in (q_turned, k, v)))
    assert len(cache) == 64
    assert_moments(cache, q[:, :, 200:201])


@pytest.mark.parametrize("sinks", [4, 0])
def test_a_prompt_without_queries_that_count_leaves_the_norms(sinks):
    """All keys are expected to get the same weight. Without sinks, the first query counts."""
    of = rope()
    q, q_turned, k, v = prompt(of, n=80)
    policy = ExpectedAttention(40, sinks=sinks, buffer=40, statistics="prompt")
    cache = attend(cache_of(policy, of), q_turned, k, v)
    mean, cov = moments(cache)
    if sinks:
        assert not mean.any() and not cov.any()
        best = v[0, :, sinks:].norm(dim=-1).topk(40 - sinks).indices.sort().values + sinks
        assert torch.equal(cache.positions[0, :, sinks:], best)
    else:
        torch.testing.assert_close(mean, q[:, :, 0], rtol=1e-5, atol=1e-5)
        assert not cov.any()
    assert len(cache) == 40


def test_operations_on_the_batch_move_the_statistics():
    of, rows = rope(), 3
    policy = ExpectedAttention(64, buffer=8, statistics="prompt")
    q, q_turned, k, v = prompt(of, n=240, rows=rows)
    steps = [x[:, :, 200:] for x in (q_turned, k, v)]
    read = attend(cache_of(policy, of), *(x[:, :, :200] for x in (q_turned, k, v)), 200)
    for operation, kept in [
        (lambda c: c.reorder(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda c: c.select_rows(torch.tensor([1])), [1]),
        (lambda c: c.repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda c: None, [0, 1, 2]),
    ]:
        cache = copy.copy(read)
        operation(cache)
        attend(cache, *(x[kept] for x in steps))
        for i, row in enumerate(kept):
            alone = attend(cache_of(policy, of), *(x[row : row + 1] for x in (q_turned, k, v)), 200)
            assert torch.equal(cache.positions[i], alone.positions[0])
        assert all(map(torch.equal, moments(cache), (x[kept] for x in moments(read))))
    twin = pickle.loads(pickle.dumps(read))
    for cache in (twin, copy.deepcopy(read)):
        assert torch.equal(attend(cache, *steps).positions, attend(copy.copy(read), *steps).positions)
    assert read.seen == 200
    read.reset()
    assert read._moments is None
    assert_moments(attend(read, *(x[:1, :, :90] for x in (q_turned, k, v)), 90), q[:1, :, 4:90])


def test_crop():
    """What the statistics include cannot be taken back, except all of it."""
    of = rope()
    q, q_turned, k, v = prompt(of)
    cache = attend(
        cache_of(ExpectedAttention(290, statistics="prompt"), of), *(x[:, :, :208] for x in (q_turned, k, v)), 200
    )
    with kit.refuses("cannot crop to 199 tokens", "expected 0 or at least 200"):
        cache.crop(199)
    assert cache.seen == 208
    cache.crop(200)
    assert_moments(cache, q[:, :, 4:200])
    cache.crop(0)
    attend(cache, *(x[:, :, :50] for x in (q_turned, k, v)), 50)
    assert_moments(cache, q[:, :, 4:50])


def test_half_precision():
    """Queries are unrotated in fp32 and added in fp64."""
    of = rope()
    q, q_turned, k, v = (x.bfloat16() for x in prompt(of))
    cache = cache_of(ExpectedAttention(100, statistics="prompt"), of)
    attend(cache, q_turned, k, v, N)
    assert_moments(cache, rotate(q_turned, -torch.arange(N), of)[:, :, 4:])


def test_moments_of_queries_far_from_zero():
    """The covariance is about the mean, so that a large mean takes nothing of its precision."""
    q = kit.randn(2, 3, 500, 8) + 3000
    counts = torch.arange(500) >= kit.int32(4, 200)[:, None]
    found = None
    for part, own in zip(q.split(90, 2), counts.split(90, 1)):
        found = pooled(found, part, own)
    for row, first in enumerate((4, 200)):
        golden = q[row, :, first:].double()
        assert found[0][row] == 500 - first
        torch.testing.assert_close(found[1][row].double(), golden.mean(1), rtol=1e-6, atol=0)
        expected = torch.stack([x.T.cov(correction=0) for x in golden])
        torch.testing.assert_close(found[2][row].double(), expected, rtol=1e-3, atol=1e-4)


def test_a_failed_step_changes_nothing():
    q, q_turned, k, v = prompt(rope())
    cache = attend(
        cache_of(ExpectedAttention(64, statistics="prompt")), *(x[:, :, :100] for x in (q_turned, k, v)), 100
    )
    before = moments(cache)
    with pytest.raises(ValueError, match="q must be"):
        cache.attend(q_turned[:, :, :3], k[:, :, :2], v[:, :, :2])
    assert cache.seen == 100 and all(x is y for x, y in zip(moments(cache), before))
    cache.append(k[:, :, 100:110], v[:, :, 100:110])
    with pytest.raises(RuntimeError, match="got none for the last 10 tokens"):
        cache.append(k[:, :, 110:120], v[:, :, 110:120])


def test_heads_are_alone():
    """What a head keeps depends on its own queries only, unless all heads keep the same tokens."""
    of = rope()
    _, q, k, v = prompt(of)
    policy = ExpectedAttention(64, statistics="prompt")
    assert policy.heads_alone and not ExpectedAttention(64, head_mode="shared", statistics="prompt").heads_alone
    both = attend(cache_of(policy, of), q, k, v, N).positions
    alone = [
        attend(cache_of(policy, of), q[:, h * GROUP : (h + 1) * GROUP], *(x[:, h : h + 1] for x in (k, v)), N)
        for h in range(HEADS)
    ]
    assert torch.equal(both, torch.cat([x.positions for x in alone], 1))


def test_what_cannot_gather_says_so():
    _, _, k, v = prompt(rope(), n=100)
    policy = ExpectedAttention(64, statistics="prompt")
    one_shot = "statistics='prompt' are gathered by a cache", r"QueryStatistics.of\(q, rope\)"
    for n in (100, 64):  # also where everything would be kept
        with kit.refuses("ExpectedAttention: ", *one_shot):
            policy.compress(k[:, :, :n], v[:, :, :n])
    with kit.refuses("expectedattention_compress: ", *one_shot):
        kvops.expectedattention_compress(k, v, 64, statistics="prompt")
    with kit.refuses("Cache: ExpectedAttention", r"expected rope= as a kvops.Rope, got None"):
        kvops.Cache(policy)
    with kit.refuses("Cache: rope= needs", "attend_before_compress=True"):
        kvops.Cache(policy, rope=rope(), attend_before_compress=False)
    with kit.refuses("Cache: rope= needs", "statistics='prompt'"):
        kvops.Cache(ExpectedAttention(64, statistics=kit.query_statistics(1, HEADS * GROUP, D)), rope=rope())
    with kit.refuses("ExpectedAttention: a PagedCache does not gather the statistics of a prompt's queries"):
        kvops.PagedCache(policy, 10, num_layers=1, kv_heads=HEADS, head_dim=D)
    with kit.refuses("TriAttention: statistics='prompt' is for rules that declare", "got 'prompt'"):
        kvops.TriAttention(200, statistics="prompt")
    with kit.refuses("LAQ: stage1 gets no queries of the prompt", "ExpectedAttention"):
        kvops.LAQ(64, stage1=ExpectedAttention(32, statistics="prompt"))


def test_engines_refuse_it():
    plan = pytest.importorskip("kvops.vllm.plan")
    with kit.refuses("kvops.vllm does not gather the statistics of a prompt's queries", "QueryStatistics"):
        plan.check(ExpectedAttention(64, statistics="prompt"))
