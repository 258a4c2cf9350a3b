"""Fixed shares of heads: one call, caches, files, and what refuses them."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

import kit
import kvops
from kvops.cache.attending import evict_repeated
from kvops.methods.shares import _divided

pytestmark = kit.every_device
N, LAYERS = 60, 3
#: The shares of the two heads of each layer, with the mean 1.
SHARES = torch.tensor([[0.0, 0.5], [1.0, 1.5], [2.75, 0.25]])
W_O = torch.ones(24, 4 * 8).cumsum(0)
STATISTICS = kvops.QueryStatistics.of([kit.randn(1, 4, 50, 16, seed=i) for i in range(LAYERS)], kvops.Rope.of(16))
POLICIES = [
    kvops.KeyDiff(20, sinks=2, recent=4),
    kvops.KeyDiff(20, recent=0.25),
    kvops.SnapKV(20, window=4),
    kvops.CriticalKV(20, window=4, sinks=1, w_o=W_O),
    kvops.ExpectedAttention(20, statistics=STATISTICS, epsilon=0.01),
    kvops.RKV(20, window=4),
    kvops.SATKV(20, window=4, kappa=2),
]
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda x: x.name)


def inputs(b=2, n=N, seed=0):
    k, v = kit.kv(b, 2, n, 16, dv=8, seed=seed)
    return kit.randn(b, 4, n, 16, seed=seed + 1), k, v


def queries(policy, q):
    return (q[:, :, -policy.window :],) if isinstance(policy, kvops.QueryPolicy) else ()


def budgets(policy, layer, n=N, budget=20):
    """The budget of each head, by hand."""
    least = policy.sinks + policy.newest(budget)
    return [min(n, max(1, least + round((budget - least) * x))) for x in SHARES[layer].tolist()]


@every_policy
@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("scaled", [1.0, 7.0])
def test_one_call_is_one_with_a_budget_per_head(policy, layer, scaled):
    q, k, v = inputs()
    place = dict(layer=layer, num_layers=LAYERS)
    shared = replace(policy, head_mode="adaptive", shares=SHARES * scaled)
    got = shared.compress(k, v, *queries(policy, q), **place)
    each = budgets(policy, layer)
    by_hand = torch.tensor([each] * 2, dtype=torch.int32).to(k.device)
    want = replace(policy, budget=by_hand).compress(k, v, *queries(policy, q), **place)
    assert kit.same(got, want)
    assert (got.indices >= 0).sum(-1).tolist() == [each] * 2
    of_half = replace(shared, budget=20 / 60).compress(k, v, *queries(policy, q), **place)
    assert torch.equal(of_half.indices, got.indices)


@every_policy
def test_caches_hold_the_shares_of_their_layer(policy):
    held = []
    for layer in range(LAYERS):
        q, k, v = inputs(seed=layer)
        shared = replace(policy, head_mode="adaptive", shares=SHARES)
        cache = kvops.Cache(shared, layer=layer, num_layers=LAYERS)
        cache.attend(q, k, v)
        want = shared.compress(k, v, *queries(policy, q), layer=layer, num_layers=LAYERS).indices
        each = budgets(policy, layer)
        assert cache.lengths.tolist() == [each] * 2
        held += each
        if isinstance(policy.recent, float):  # of each head's own budget in one call, of the mean in a cache
            continue
        for b in range(2):
            for h in range(2):
                assert torch.equal(cache.positions[b, h, : each[h]], want[b, h, : each[h]])
        if policy.buffer is not None:
            mean = sum(each) // 2
            for step in range(30):
                q, k, v = inputs(n=1, seed=100 + step)
                cache.attend(q, k, v)
                lengths = cache.lengths[0].tolist()
                assert sum(lengths) // 2 < mean + policy.buffer_tokens(mean)
                assert all(x >= y for x, y in zip(lengths, each))
    assert abs(sum(held) - 20 * 6) <= 3  # rounding, and one token at least


def test_the_first_stage_of_defensivekv_is_the_layers():
    for layer in range(LAYERS):
        q, k, v = inputs(seed=layer)
        policy = kvops.DefensiveKV(20, window=4, w_o=W_O, head_mode="adaptive", shares=SHARES)
        want = policy.compress(k, v, q[:, :, -4:], layer=layer, num_layers=LAYERS).indices
        cache = kvops.Cache(policy, layer=layer, num_layers=LAYERS)
        cache.attend(q, k, v)
        assert cache.lengths.tolist() == [budgets(policy, layer)] * 2
        assert torch.equal(cache.positions, want)


def test_what_a_head_cannot_use_goes_to_the_others():
    """By hand: 120 tokens for six heads that can hold 30 each; three hold all, and one has no share."""
    want = [[1, 20], [30, 30], [30, 10]]
    caches = []
    for layer, each in enumerate(want):
        policy = kvops.KeyDiff(20, head_mode="adaptive", shares=SHARES, buffer=2)
        caches.append(kvops.Cache(policy, layer=layer, num_layers=LAYERS))
        caches[layer].attend(*inputs(n=30))
        assert caches[layer].lengths.tolist() == [each] * 2
    for step in range(60):  # more tokens, and in the end no head can hold too few
        for cache in caches:
            cache.attend(*inputs(n=1, seed=step))
    for cache, each in zip(caches, ([1, 10], [20, 30], [55, 5])):
        lengths = cache.lengths[0].tolist()
        assert all(x <= y <= x + 2 for x, y in zip(each, lengths)), lengths
    everything = replace(policy, budget=30)
    kept = everything.compress(*inputs(n=30)[1:], layer=2, num_layers=LAYERS)
    assert (kept.indices >= 0).sum(-1).tolist() == [[30, 30]] * 2


@pytest.mark.parametrize("sinks, recent", [(0, 0), (3, 5)])
def test_a_budget_is_used_whole(sinks, recent):
    """Whatever the shares, as long as the heads that have one can hold it."""
    _, k, v = inputs()
    for seed in range(20):
        shares = torch.rand(LAYERS, 2, generator=torch.Generator().manual_seed(seed)) ** 4
        policy = kvops.KeyDiff(40, sinks=sinks, recent=recent, head_mode="adaptive", shares=shares)
        kept = [policy.compress(k, v, layer=i, num_layers=LAYERS).indices[0] for i in range(LAYERS)]
        each = [(x >= 0).sum(-1).double() for x in kept]
        assert abs(torch.cat(each).mean() - 40) < 0.5
        ranked = torch.cat(each)[shares.flatten().argsort()]
        assert (ranked.diff() >= 0).all()


@pytest.mark.parametrize(
    "policy",
    [kvops.KeyDiff(20, sinks=8, recent=5), kvops.SnapKV(40, window=16, sinks=4), kvops.DefensiveKV(40, 16, w_o=W_O)],
    ids=lambda x: x.name,
)
def test_fewer_tokens_than_are_always_kept(policy):
    """Everything stays, as without shares."""
    q, k, v = inputs(n=10)
    kept = replace(policy, head_mode="adaptive", shares=SHARES).compress(
        k, v, *queries(policy, q), layer=0, num_layers=LAYERS
    )
    assert ((kept.indices >= 0).sum(-1) == 10).all()
    cache = kvops.Cache(replace(policy, head_mode="adaptive", shares=SHARES), layer=0, num_layers=LAYERS)
    cache.attend(q, k, v)
    assert len(cache) == 10


def test_padded_rows_keep_as_many_as_they_have():
    q, k, v = inputs()
    policy = kvops.KeyDiff(20, head_mode="adaptive", shares=SHARES)
    cache, alone = (kvops.Cache(policy, layer=2, num_layers=LAYERS) for _ in range(2))
    cache.set_pads(kit.int32(0, 25))
    cache.attend(q, k, v)
    assert cache.lengths.tolist() == [[55, 5], [35, 7]]  # 85 for shares of 0.5, 1, 1.5 (at most 35) and 0.25
    alone.attend(q[1:, :, 25:], k[1:, :, 25:], v[1:, :, 25:])
    assert torch.equal(cache.lengths[1], alone.lengths[0])
    assert torch.equal(cache.positions[1, 1, :7] - 25, alone.positions[0, 1, :7])
    kept = policy.compress(k, v, layer=2, num_layers=LAYERS, starts=kit.int32(0, 25)).indices
    assert (kept >= 0).sum(-1).tolist() == [[55, 5], [35, 7]]
    lengths = kit.int32(60, 35)
    kept = policy.compress(k, v, layer=2, num_layers=LAYERS, lengths=lengths).indices
    assert (kept >= 0).sum(-1).tolist() == [[55, 5], [35, 7]]


def test_a_short_row_does_not_make_a_batch_evict_more():
    """In layers with small shares a short row keeps more than a long one, whose heads with large shares hold more."""
    shares = torch.tensor([[1.0, 1.0], [8.0, 8.0]])
    policy = kvops.KeyDiff(40, head_mode="adaptive", shares=shares, buffer=10)
    for layer in range(2):
        counts = []
        for pads in ([0, 60], [0], [60]):
            cache = kvops.Cache(policy, layer=layer, num_layers=2)
            cache.set_pads(kit.int32(*pads))
            cache.attend(*inputs(b=len(pads), n=100))
            evicted = 0
            for step in range(30):
                before = cache.mean_length
                cache.attend(*inputs(b=len(pads), n=1, seed=step))
                evicted += cache.mean_length <= before
            counts.append(evicted)
        assert counts[0] <= max(counts[1:]) + 1, counts


def test_one_share_is_not_more_than_its_head_holds():
    """Heads without a share keep what they must, even if the budget is not used up."""
    _, k, v = inputs(n=40)
    policy = kvops.KeyDiff(30, sinks=2, head_mode="adaptive", shares=torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    kept = [policy.compress(k, v, layer=i, num_layers=2).indices for i in range(2)]
    assert [(x >= 0).sum(-1)[0].tolist() for x in kept] == [[2, 2], [40, 2]]
    assert _divided((1.0, 1e-45, 1e-45), 30, 20) == [20, 5, 5]
    assert _divided((1.0, 0.0, 2.0), 30, 9) == [9, 0, 9] and _divided((3.0, 1.0), 0, 9) == [0, 0]


def test_an_empty_batch():
    q, k, v = (x[:0] for x in inputs())
    policy = kvops.KeyDiff(20, head_mode="adaptive", shares=SHARES)
    assert policy.compress(k, v, layer=1, num_layers=LAYERS).k.shape[:2] == (0, 2)
    for each in (policy, kvops.SnapKV(20, window=4, head_mode="adaptive", shares=SHARES)):
        cache = kvops.Cache(each, layer=1, num_layers=LAYERS)
        assert cache.attend(q, k, v).shape == (0, 4, N, 8)


def test_kvzip_evicts_each_layer_to_its_shares():
    """A layer whose share holds the whole prompt keeps it."""
    q, k, v = inputs(b=1)
    shares = torch.tensor([[5.0, 5.0], [0.6, 0.6], [0.2, 0.8]])
    policy = kvops.KVzip(30, head_mode="adaptive", shares=shares)
    caches = [kvops.Cache(policy, layer=i, num_layers=3) for i in range(3)]
    for cache in caches:
        cache.attend(q, k, v)
        with cache.repeating(0):
            cache.attend(q + 1, k - 1, v)
    evict_repeated(caches)
    assert [len(x) for x in caches] == [
        60,
        16,
        20,
    ]  # beside the sinks 44 of 156 are left for shares of 0.6, 0.6, 0.2, 0.8
    with kit.refuses("KVzip: shares and scope='model' both divide the budget"):
        replace(policy, scope="model")


def test_files(tmp_path):
    path, (_, k, v) = tmp_path / "shares.safetensors", inputs()
    kvops.save_shares(SHARES.double(), path)
    named = kvops.policy(f"keydiff:budget=20,head_mode=adaptive,shares={path}")
    given = kvops.KeyDiff(20, head_mode="adaptive", shares=SHARES)
    place = dict(layer=2, num_layers=LAYERS)
    assert kit.same(named.compress(k, v, **place), given.compress(k, v, **place))
    assert named.shares == str(path) and named != given
    kvops.save_shares(SHARES.flip(1), path)  # a new version of the file is read
    assert named.compress(k, v, **place).lengths[0] == 55
    assert (named.compress(k, v, **place).indices[0] >= 0).sum(-1).tolist() == [5, 55]
    broken = tmp_path / "broken"
    broken.write_text("no safetensors")
    other = tmp_path / "other"
    save_file({"shares": SHARES, "more": SHARES + 1}, other)
    negative = tmp_path / "negative"
    save_file({"shares": -SHARES}, negative)
    for file, says in (
        (tmp_path, "expected a file that save_shares wrote"),
        (broken, "got one that is not safetensors"),
        (other, r"with the tensors \['more', 'shares'\]"),
        (negative, "shares must be finite, at least 0"),
    ):
        with kit.refuses(f"KeyDiff: shares='{file}': ", says):
            replace(named, shares=str(file)).compress(k, v, **place)
    with pytest.raises(FileNotFoundError, match="KeyDiff: shares must be the path of a file"):
        replace(named, shares=str(tmp_path / "none")).compress(k, v, **place)
    with pytest.raises(FileNotFoundError, match="save_shares: there is no folder .*none"):
        kvops.save_shares(SHARES, tmp_path / "none" / "new")
    for wrong, kind in ((3, TypeError), (torch.ones(3), ValueError), (SHARES - 1, ValueError)):
        with kit.refuses("save_shares: ", kind=kind):
            kvops.save_shares(wrong, path)


def test_refusals():
    _, k, v = inputs()
    policy = kvops.KeyDiff(20, head_mode="adaptive", shares=SHARES)
    for settings, says in (
        (dict(head_mode="per_head"), "shares need head_mode='adaptive', got 'per_head'"),
        (dict(shares=torch.zeros(2, 3)), "not all 0, got values from 0"),
        (dict(shares=torch.tensor([[1.0, torch.nan]])), "shares must be finite"),
        (dict(shares=torch.ones(2, 3).int()), r"floating point \[layers, Hk\], got torch.int32 of shape \[2, 3\]"),
    ):
        with kit.refuses("KeyDiff: ", says):
            replace(policy, **settings)
    with kit.refuses("KeyDiff: layer and num_layers must be ints", kind=TypeError):
        policy.compress(k, v)
    with kit.refuses(r"KeyDiff: shares must be \[layers that evict, Hk\], expected \[4, 2\], got \[3, 2\]"):
        policy.compress(k, v, layer=1, num_layers=4)
    with kit.refuses("KeyDiff: a PagedCache does not support shares of heads"):
        replace(policy, buffer=None).check_paged_cache(3, by_head=True)
