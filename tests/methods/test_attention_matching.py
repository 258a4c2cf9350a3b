"""Attention Matching against its formula in fp64: the scores, the biases, the values; and in caches."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import kit
import kvops
from kvops.methods.attention_matching import bounded_least_squares
from test_methods import assert_best

pytestmark = kit.every_device
LIMIT = 3.0


def make(seed=0, b=2, heads=2, group=3, n=90, rows=70, d=16, dv=8, dtype=torch.float32):
    """Return k, v and reference queries, with a sharp attention."""
    k, v = kit.kv(b, heads, n, d, dtype, dv=dv, seed=seed)
    return k, v, (2 * kit.randn(b, heads * group, rows, d, seed=seed + 1)).to(dtype)


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Return one KV head's softmax in fp64, [G * rows, n], and its outputs. q: [G, rows, d]."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    weights = (q.double().flatten(0, 1) @ k.double().mT * scale).softmax(-1)
    return weights, weights @ v.double()


def loss_of_mass(weights: Tensor, factors: Tensor, rows: Tensor) -> float:
    return ((weights @ factors - 1) * rows).square().sum().item()


def best_factors(weights: Tensor, rows: Tensor) -> Tensor:
    """Return the factors of the masses, by very many plain projected gradients."""
    weights = weights * rows.unsqueeze(1)
    gram, goal = weights.mT @ weights, weights.mT @ rows
    step, x = 1 / torch.linalg.matrix_norm(gram, 2), torch.ones_like(goal)
    low, high = torch.tensor([-LIMIT, LIMIT], dtype=torch.float64).exp()
    for _ in range(20_000):
        x = (x - step * (gram @ x - goal)).clamp(low, high)
    return x


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("ridge", [1e-3, 0.3])
@pytest.mark.parametrize("scale", [None, 0.4])
def test_the_formula(dtype, ridge, scale):
    """Each head: the keys are those with the largest weights, and biases and values solve their problems."""
    k, v, q = make(dtype=dtype)
    r = kit.randn(*q.shape[:3], seed=5).sigmoid()
    sinks, budget, tolerance = 3, 20, 1e-5 if dtype == torch.float32 else 2e-2
    settings = dict(sinks=sinks, ridge=ridge, max_bias=LIMIT)
    kept = kvops.attentionmatching_compress(k, v, q, budget, row_weights=r, scale=scale, **settings)
    assert kept.v.dtype == dtype and kept.indices.shape == (2, 2, budget) and kept.key_bias.abs().max() <= LIMIT + 1e-6
    for b in range(2):
        for h in range(2):
            weights, outs = exact(q[b, 3 * h : 3 * h + 3], k[b, h], v[b, h], scale)
            slots, bias = kept.indices[b, h], kept.key_bias[b, h].double()
            assert slots[:sinks].tolist() == [0, 1, 2] and torch.equal(kept.k[b, h], k[b, h, slots])
            rows = r[b, 3 * h : 3 * h + 3].double().flatten()
            scores = (weights * rows.unsqueeze(1)).amax(0).cpu().numpy()
            assert_best(slots[sinks:].cpu().numpy() - sinks, scores[sinks:], budget - sinks, 1e-4)
            own = weights[:, slots]
            least = loss_of_mass(own, best_factors(own, rows), rows)
            assert loss_of_mass(own, bias.exp(), rows) <= least * 1.001 + 1e-9
            shares = own * bias.exp()
            shares = shares / shares.sum(-1, keepdim=True)
            error, before = outs - shares @ v[b, h, slots].double(), v[b, h, slots].double()
            shares, error = shares * rows.unsqueeze(1), error * rows.unsqueeze(1)
            gram = shares.mT @ shares
            damped = gram + ridge * gram.diagonal().mean() * torch.eye(budget, dtype=torch.float64)
            want = before + torch.linalg.solve(damped, shares.mT @ error)
            torch.testing.assert_close(kept.v[b, h].double(), want, rtol=20 * tolerance, atol=20 * tolerance)


@pytest.mark.parametrize("bound", [0.1, 1.0, 30.0])
def test_the_biases_solve_their_problem(bound):
    """The conditions of a minimum in a box: a gradient of 0 inside, pointing outward at the bounds."""
    weights = kit.randn(2, 60, 12).abs().double() ** 3
    gram, goal = weights.mT @ weights, weights.sum(1) * 20
    low, high = 1 / (1 + bound), 1 + bound
    x = bounded_least_squares(gram, goal, low, high)
    assert (x >= low * (1 - 1e-12)).all() and (x <= high * (1 + 1e-12)).all()
    gradient = ((gram @ x.unsqueeze(-1)).squeeze(-1) - goal) / goal
    inside = (x > low * 1.001) & (x < high * 0.999)
    assert (gradient[inside].abs() < 1e-3).all()
    assert (gradient[x <= low * 1.001] > -1e-3).all() and (gradient[x >= high * 0.999] < 1e-3).all()


def errors(kept, k, v, q, bias=None):
    """Return how far the outputs and the log-masses of queries are from those of the whole cache."""
    whole = kvops.attention(q, k, v, causal=False)
    mine = kvops.attention(q, kept.k, kept.v, causal=False, key_bias=bias)
    return (mine.out - whole.out).norm().item(), (mine.lse - whole.lse).abs().mean().item()


def test_what_is_fitted_is_closer_to_the_whole():
    """Than the kept tokens as they are; for other queries of the same kind too."""
    k, v, q = make(rows=200)
    kept = kvops.attentionmatching_compress(k, v, q, 30)
    plain = kept._replace(v=v.gather(2, kept.indices.unsqueeze(-1).expand(-1, -1, -1, 8)))
    for queries in (q, 2 * kit.randn(*q.shape, seed=9)):
        (out, mass), (out_before, mass_before) = (
            errors(kept, k, v, queries, kept.key_bias),
            errors(plain, k, v, queries),
        )
        assert out < 0.8 * out_before and mass < 0.6 * mass_before
    none = kvops.attentionmatching_compress(k, v, q, 30, max_bias=0.0, ridge=1e9)
    assert (none.key_bias == 0).all() and torch.allclose(none.v, plain.v, atol=1e-5)


def test_what_is_kept_whole_is_unchanged():
    k, v, q = make(n=40)
    for budget in (40, 100):
        kept = kvops.attentionmatching_compress(k, v, q, budget)
        assert torch.equal(kept.k, k) and kept.key_bias.abs().max() < 2e-3
        torch.testing.assert_close(kept.v, v, rtol=1e-4, atol=1e-4)


def test_padded_rows_are_as_if_alone():
    k, v, q = make(n=60)
    starts, lengths = [7, 0], [50, 33]
    kept = kvops.attentionmatching_compress(k, v, q, 12, starts=kit.int32(*starts), lengths=kit.int32(*lengths))
    for i, (s, n) in enumerate(zip(starts, lengths)):
        one = slice(i, i + 1)
        alone = kvops.attentionmatching_compress(k[one, :, s : s + n], v[one, :, s : s + n], q[one], 12)
        assert torch.equal(kept.indices[one] - s, alone.indices)
        torch.testing.assert_close(kept.v[one], alone.v, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(kept.key_bias[one], alone.key_bias, rtol=1e-4, atol=1e-5)


def test_layouts_and_in_place():
    k, v, q = make()
    want = kvops.attentionmatching_compress(k, v, q, 20)
    turned = kvops.attentionmatching_compress(*(x.transpose(1, 2) for x in (k, v, q)), 20, layout="bnhd")
    assert kit.same((turned.k.transpose(1, 2), turned.v.transpose(1, 2), turned.key_bias), (*want[:2], want.key_bias))
    found = kvops.attentionmatching_compress_(k, v, q, 20)
    assert kit.same((*found, found.key_bias), (*want, want.key_bias)) and found.v.data_ptr() == v.data_ptr()


def test_queries_that_see_nothing_change_nothing():
    """Rows whose keys are not finite, and a head whose budget is one key."""
    k, v, q = make()
    k[0, 0] = torch.nan
    budgets = torch.tensor([[8, 3], [1, 8]], dtype=torch.int32)
    kept = kvops.attentionmatching_compress(k, v, q, budgets, sinks=0)
    assert kept.v[1].isfinite().all() and kept.key_bias.isfinite().all()
    assert (kept.indices >= 0).sum(-1).tolist() == budgets.tolist()
    assert (kept.key_bias[kept.indices < 0] == 0).all()


def compacted(mode="per_head", pads=None):
    """Return a cache after its eviction, and what a single call of each row returns."""
    k, v, q = make(n=80, rows=90)
    cache = kvops.Cache(kvops.AttentionMatching(30, sinks=2, head_mode=mode))
    if pads is not None:
        cache.set_pads(pads)
    cache.attend(kit.randn(2, 6, 80, 16, seed=3), k, v)
    with cache.repeating(0):
        cache.attend(q, *kit.kv(2, 2, 90, 16, dv=8, seed=4))
    passes, kept = cache._passes, []
    assert torch.equal(passes[..., :-1], q)
    cache.evict()
    for i, s in enumerate([0, 0] if pads is None else pads.tolist()):  # a shorter row has fewer rows in the pass
        one = slice(i, i + 1)
        own = k[one, :, s:], v[one, :, s:], q[one, :, : 90 - s]
        options = dict(row_weights=passes[one, :, : 90 - s, -1], sinks=2, head_mode=mode)
        kept.append(kvops.attentionmatching_compress(*own, 30, **options))
        assert (passes[i, :, 90 - s :, -1] == 0).all()
    return cache, kept


def test_a_row_of_a_pass_weighs_what_it_gives_to_the_prompt():
    k, v, q = make(n=40, rows=50)
    cache = kvops.Cache(kvops.AttentionMatching(30))
    cache.attend(kit.randn(2, 6, 40, 16), k, v)
    own = kit.kv(2, 2, 50, 16, dv=8, seed=4)
    with cache.repeating(0):
        cache.attend(q, *own)
    keys = torch.cat((k, own[0]), 2).double().repeat_interleave(3, 1)
    logits = q.double() @ keys.mT / 4
    seen = torch.arange(90) <= torch.arange(40, 90)[:, None]
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)[..., :40].sum(-1)
    torch.testing.assert_close(cache._passes[..., -1].double(), weights, rtol=1e-5, atol=1e-6)
    cache.evict()
    bias, kept = cache.state["key_bias"], cache.k
    with cache.repeating(0):  # now with the biases that the keys have
        cache.attend(q, *own)
    keys = torch.cat((kept, own[0]), 2).double().repeat_interleave(3, 1)
    biases = torch.cat((bias.double(), torch.zeros(2, 2, 50)), 2).repeat_interleave(3, 1)
    logits = q.double() @ keys.mT / 4 + biases.unsqueeze(2)
    seen = torch.arange(80) <= torch.arange(30, 80)[:, None]
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)[..., :30].sum(-1)
    torch.testing.assert_close(cache._passes[..., -1].double(), weights, rtol=1e-5, atol=1e-6)


def test_passes_over_other_tokens_are_forgotten():
    k, v, q = make(n=40, rows=50)
    cache = kvops.Cache(kvops.AttentionMatching(30))
    cache.attend(kit.randn(2, 6, 40, 16), k, v)
    with cache.repeating(0):
        cache.attend(q, *kit.kv(2, 2, 50, 16, dv=8, seed=4))
    cache.crop(39)
    cache.attend(kit.randn(2, 6, 1, 16), *kit.kv(2, 2, 1, 16, dv=8))
    with kit.refuses("AttentionMatching: evict", "got none since the last", kind=RuntimeError):
        cache.evict()
    with kit.refuses("first must be one of the 40 tokens", "got 40"), cache.repeating(40):
        pass


@pytest.mark.parametrize("mode", ["per_head", "shared", "adaptive"])
def test_a_cache_attends_with_the_biases(mode):
    """Decode, a second turn and a crop, beside dense attention over the result of the single call."""
    cache, kept = compacted(mode)
    k, v, bias = ([getattr(x, name) for x in kept] for name in ("k", "v", "key_bias"))
    bias = [x.masked_fill(y.indices < 0, -torch.inf) for x, y in zip(bias, kept)]
    cache.freeze()
    before = cache.seen
    for i, t in enumerate((1, 1, 20, *[1] * 40)):
        q, (ks, vs) = kit.randn(2, 6, t, 16, seed=i), kit.kv(2, 2, t, 16, dv=8, seed=50 + i)
        if i == 2:
            kept_back = copy.deepcopy(cache)
        found = cache.attend(q, ks, vs)
        for row in range(2):
            one = slice(row, row + 1)
            k[row], v[row] = torch.cat((k[row], ks[one]), 2), torch.cat((v[row], vs[one]), 2)
            bias[row] = torch.cat((bias[row], torch.zeros(1, 2, t)), 2)
            want = kvops.attention(q[one], k[row], v[row], key_bias=bias[row]).out
            torch.testing.assert_close(found[one], want, rtol=1e-4, atol=1e-4)
    cache.crop(before + 2)
    q, (ks, vs) = kit.randn(2, 6, 1, 16, seed=1), kit.kv(2, 2, 1, 16, dv=8, seed=2)
    rows = torch.tensor([1, 0])
    for x in (cache, kept_back):
        x.reorder(rows)
    found, want = (x.attend(q, ks, vs) for x in (cache, kept_back))
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_a_padded_batch_in_a_cache():
    pads = kit.int32(0, 25)
    cache, kept = compacted(pads=pads)
    q, (ks, vs) = kit.randn(2, 6, 1, 16), kit.kv(2, 2, 1, 16, dv=8, seed=2)
    found = cache.attend(q, ks, vs)
    assert cache.pads is not None and len(cache) == 31
    for i, own in enumerate(kept):
        one = slice(i, i + 1)
        k, v = torch.cat((own.k, ks[one]), 2), torch.cat((own.v, vs[one]), 2)
        bias = torch.cat((own.key_bias, torch.zeros(1, 2, 1)), 2)
        want = kvops.attention(q[one], k, v, key_bias=bias).out
        torch.testing.assert_close(found[one], want, rtol=1e-4, atol=1e-4)


def test_a_second_fit_counts_the_biases():
    """What was compacted before, kept whole by further passes, answers as before."""
    cache, _ = compacted()
    wide = copy.deepcopy(cache)
    wide.policy = replace(wide.policy, budget=1000)
    q, (ks, vs) = kit.randn(2, 6, 10, 16), kit.kv(2, 2, 10, 16, dv=8, seed=2)
    cache.attend(q, ks, vs), wide.attend(q, ks, vs)
    passes = kit.randn(2, 6, 50, 16, seed=7), *kit.kv(2, 2, 50, 16, dv=8, seed=8)
    for x in (cache, wide):
        with x.repeating(0):
            x.attend(*passes)
        x.evict()
    assert len(wide) == 40 and len(cache) == 30
    step = kit.randn(2, 6, 1, 16, seed=9), *kit.kv(2, 2, 1, 16, dv=8, seed=10)
    bias = cache.state["key_bias"]
    assert bias.shape == (2, 2, 30) and bias.ne(0).any() and bias.isfinite().all()
    whole = wide.attend(*step)
    plain = (torch.cat((x[:, :, :30], y), 2) for x, y in zip((cache.k, cache.v), step[1:]))
    found, without = cache.attend(*step), kvops.attention(step[0], *plain).out
    assert (found - whole).norm() < (without - whole).norm()


def test_few_queries_are_remembered():
    """Evenly spaced, those of all passes; rows that do not count are left out."""
    k, v, _ = make(n=200)
    cache = kvops.Cache(kvops.AttentionMatching(30, queries=50, chunk=100))
    cache.set_pads(kit.int32(0, 60))
    cache.attend(kit.randn(2, 6, 200, 16), k, v)
    for first in (0, 100):
        with cache.repeating(first):
            cache.attend(kit.randn(2, 6, 110, 16, seed=first), *kit.kv(2, 2, 110, 16, dv=8, seed=first))
    assert 40 <= cache._passes.shape[2] <= 50
    counts = cache._passes[:, 0, :, -1] > 0
    assert counts[0].all() and 0.5 < counts[1].float().mean() < 0.9  # its second chunk has 40 tokens
    cache.evict()
    assert len(cache) == 30


def test_heads_that_keep_fewer_and_empty_dims():
    k, v, q = make(n=30)
    budgets = torch.tensor([[8, 4], [5, 12]], dtype=torch.int32)
    for fill in (False, True):
        kept = kvops.attentionmatching_compress(k, v, q, budgets, fill_invalid=fill)
        none = kept.indices < 0
        assert none.any() and all((x[none] == 0).all() for x in (kept.key_bias, kept.k, kept.v))
    assert kept._replace(v=v).key_bias is kept.key_bias
    for empty in ((k[:0], v[:0], q[:0]), (k[:, :0], v[:, :0], q[:, :0])):
        kept = kvops.attentionmatching_compress(*empty, 8, layout="bhnd")
        assert kept.key_bias.shape == kept.indices.shape and kept.indices.numel() == 0


def test_the_size_of_the_row_weights_does_not_matter():
    k, v, q = make()
    r = kit.randn(*q.shape[:3], seed=5).sigmoid()
    want = kvops.attentionmatching_compress(k, v, q, 20, row_weights=r)
    for factor in (2.0**-40, 2.0**30):
        found = kvops.attentionmatching_compress(k, v, q, 20, row_weights=r * factor)
        assert kit.same((*found, found.key_bias), (*want, want.key_bias))
    kvops.attentionmatching_compress(k, v, q, 20, row_weights=r * 0)  # nothing counts


def test_keys_that_are_alike_have_a_solution():
    """The smallest damping suffices for sums in fp32."""
    k = kit.randn(1, 1, 1, 16) + 1e-3 * kit.randn(1, 1, 600, 16)
    v, q = kit.randn(1, 1, 600, 16), kit.randn(1, 1, 2000, 16)
    for rows in (None, kit.randn(1, 1, 2000).sigmoid()):
        kept = kvops.attentionmatching_compress(k, v, q, 500, ridge=1e-4, row_weights=rows)
        assert kept.v.isfinite().all() and kept.key_bias.isfinite().all()


def test_refusals():
    k, v, q = make()
    for wrong in (torch.ones(2, 70), torch.ones(2, 6, 70).half(), torch.ones(2, 6, 71)):
        with kit.refuses(r"row_weights must be torch.float32 \[2, 6, 70\]", "got"):
            kvops.attentionmatching_compress(k, v, q, 20, row_weights=wrong)
    with kit.refuses("row_weights must be a torch.Tensor", "got list", kind=TypeError):
        kvops.attentionmatching_compress(k, v, q, 20, row_weights=[1.0])
    with kit.refuses("row_weights must be finite and at least 0", "got -1"):
        kvops.attentionmatching_compress(k, v, q, 20, row_weights=-torch.ones(2, 6, 70))
    with kit.refuses("attentionmatching_compress: scale must", "got 1e-07"):
        kvops.attentionmatching_compress(k, v, q, 20, scale=1e-7)
    with kit.refuses("attentionmatching_compress: softcap must be 0", "got 2.0"):
        kvops.attentionmatching_compress(k, v, q, 20, softcap=2.0)
    with kit.refuses("q_reference must", "got"):
        kvops.attentionmatching_compress(k, v, q[..., :8], 20)
    with kit.refuses("AttentionMatching: with scope='model'", "head_mode='adaptive'"):
        kvops.AttentionMatching(20, scope="model")
    with kit.refuses("AttentionMatching: a PagedCache cannot repeat prompts"):
        kvops.AttentionMatching(20).check_paged_cache(1)
    cache = kvops.Cache(kvops.AttentionMatching(20))
    cache.attend(kit.randn(2, 6, 90, 16), k, v, softcap=3.0)
    with kit.refuses("AttentionMatching: softcap must be 0"), cache.repeating(0):
        cache.attend(q, *kit.kv(2, 2, 70, 16, dv=8), softcap=3.0)
    assert len(cache) == 90
    with kit.refuses("AttentionMatching: evict", "got none", kind=RuntimeError):
        cache.evict()
    with kit.refuses("AttentionMatching: ", "do not share keys", kind=NotImplementedError):
        cache.policy.check_readers(1)
