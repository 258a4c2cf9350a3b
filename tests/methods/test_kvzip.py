"""KVzip compared with its released code in plain PyTorch; passes, padding, the cache, and a model's second reading."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops.methods.repeating import repeat_ids
from kvops.methods.select import gather_rows
from test_methods import assert_best, assert_moved, fp64

pytestmark = kit.every_device
examples = kit.examples(40, derandomize=True)


def make(seed=0, b=2, heads=2, group=3, n=60, t=70, d=16, dv=8, dtype=torch.float32):
    """Return k, v, q_repeat and k_repeat, with a sharp attention."""
    k, v = kit.kv(b, heads, n, d, dtype, dv=dv, seed=seed)
    q, own = kit.randn(b, heads * group, t, d, seed=seed + 1), kit.randn(b, heads, t, d, seed=seed + 2)
    return k, v, q.to(dtype), own.to(dtype)


def pass_scores(q, k, own, first, chunk, sinks, scale=None, softcap=0.0, group_reduce=np.max, norms=1.0):
    """Return one head's scores by the released code: the softmax over [sinks, chunk, the pass] in fp64.

    q: [G, t, d]. k: [n, d]. own: [t, d]. norms: [t], the divisors of the rows' weights.
    """
    held, last, t = min(sinks, first), min(first + chunk, len(k)), len(own)
    keys = np.concatenate((k[:held], k[first:last], own))
    logits = q @ keys.T * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    hidden = np.arange(len(keys)) > len(keys) - t + np.arange(t)[:, None]
    weights = np.exp(np.where(hidden, -np.inf, logits - logits.max()))
    weights /= weights.sum(-1, keepdims=True) * np.reshape(norms, (-1, 1))
    scores = np.zeros(len(k))
    scores[first:last] = group_reduce(weights[..., held : held + last - first].max(1), 0)
    return scores


def assert_kept(indices, scores, sinks, budget, tolerance):
    """Check one head's slots: the sinks, and the best of the others."""
    kept = indices[indices >= 0].cpu().numpy()
    assert kept[:sinks].tolist() == list(range(sinks))
    assert_best(kept[sinks:] - sinks, scores[sinks:], budget - sinks, tolerance)


@examples
@given(
    n=st.integers(8, 60),
    chunk=st.sampled_from([100, 60, 23, 7]),
    told=st.integers(0, 3),
    sinks=st.sampled_from([0, 4]),
    budget=st.integers(5, 20),
    dtype=st.sampled_from(kit.DTYPES),
    group=st.sampled_from([3, 1]),
    shared=st.booleans(),
    seed=st.integers(0, 99),
    scale=st.sampled_from([None, 0.5]),
    softcap=st.sampled_from([0.0, 3.0]),
    group_reduce=st.sampled_from(["max", "mean", "sum"]),
)
def test_kvzip_is_the_released_code(
    n, chunk, told, sinks, budget, dtype, group, shared, seed, scale, softcap, group_reduce
):
    """A pass has `told` rows of instruction and then the chunk's."""
    passes = [told + min(chunk, n - first) for first in range(0, n, chunk)]
    k, v, q, own = make(seed, n=n, t=sum(passes), group=group, dtype=dtype)
    options = dict(scale=scale, softcap=softcap)
    head_mode = "shared" if shared else "per_head"
    settings = dict(chunk=chunk, sinks=sinks, head_mode=head_mode, group_reduce=group_reduce)
    result = kvops.kvzip_compress(k, v, q, budget, k_repeat=own, passes=passes, **settings, **options)
    assert_moved(result, k, v)
    assert result.indices.shape[2] == min(budget, n)
    for b in range(2):
        scores = []
        for h in range(2):
            total, row = np.zeros(n), 0
            for i, rows in enumerate(passes):
                at = slice(row, row + rows)
                queries = fp64(q[b, h * group : (h + 1) * group, at])
                reduced = {"max": np.max, "mean": np.mean, "sum": np.sum}[group_reduce]
                every = queries, fp64(k[b, h]), fp64(own[b, h, at])
                part = pass_scores(*every, i * chunk, chunk, sinks, **options, group_reduce=reduced)
                total, row = np.maximum(total, part), row + rows
            scores.append(total)
        for h in range(2):
            mean = np.mean(scores, 0) if shared else scores[h]
            assert_kept(result.indices[b, h], mean, min(sinks, n), min(budget, n), group * 4e-6)


def test_passes_of_more_rows_than_the_operator_takes():
    k, v, q, own = make(b=1, n=300, t=320)
    result = kvops.kvzip_compress(k, v, q, 60, k_repeat=own)
    for h in range(2):
        scores = pass_scores(fp64(q[0, 3 * h : 3 * h + 3]), fp64(k[0, h]), fp64(own[0, h]), 0, 2048, 4)
        assert_kept(result.indices[0, h], scores, 4, 60, 1e-5)


def test_padded_rows_keep_what_they_keep_alone():
    """Left- and right-padded rows of different lengths; the chunks begin at a row's first token."""
    chunk, told, lengths, starts = 20, 3, (55, 30, 41), (0, 25, 6)
    longest = [min(chunk, max(0, 55 - first)) for first in range(0, 55, chunk)]
    k, v, q, own = make(b=3, n=60, t=sum(longest) + 3 * told)
    rows = [x + told for x in longest]
    options = dict(starts=kit.int32(*starts), lengths=kit.int32(*lengths))
    want, ends = [], np.cumsum([0, *rows])
    for b, (start, length) in enumerate(zip(starts, lengths)):
        sizes = [told + min(chunk, length - first) for first in range(0, length, chunk)]
        mine = [torch.arange(ends[i], ends[i] + size) for i, size in enumerate(sizes)]
        queries, keys = (x[b : b + 1, :, torch.cat(mine)] for x in (q, own))
        slots = slice(start, start + length)
        alone = kvops.kvzip_compress(
            k[b : b + 1, :, slots], v[b : b + 1, :, slots], queries, 12, k_repeat=keys, passes=sizes, chunk=chunk
        )
        want.append(alone.indices[0] + start)
        unused = torch.ones(len(q[0, 0]), dtype=torch.bool)
        unused[torch.cat(mine)] = False
        q[b, :, unused], own[b, :, unused] = torch.nan, torch.nan
        outside = torch.ones(60, dtype=torch.bool)
        outside[slots] = False
        k[b, :, outside] = torch.nan
    got = kvops.kvzip_compress(k, v, q, 12, k_repeat=own, passes=rows, chunk=chunk, **options)
    assert torch.equal(got.indices, torch.stack(want))


def test_ties_and_nan():
    k, v, q, own = make(n=40, t=40)
    kept = kvops.kvzip_compress(torch.zeros_like(k), v, q, 10, k_repeat=own).indices
    assert torch.equal(kept, torch.arange(10).expand(2, 2, -1))
    k[0, 0, 7] = torch.inf
    kept = kvops.kvzip_compress(k, v, q, 39, k_repeat=own).indices
    assert 7 not in kept[0, 0] and (kept[0, 0] >= 0).all()


def test_budgets_over_all_heads_of_all_layers():
    """The paper's allocation: the best tokens of the whole model, whichever head they belong to."""
    layers, n, budget = 3, 50, 12
    inputs = [make(seed, b=1, n=n, t=52) for seed in range(layers)]
    policy = kvops.KVzip(budget, sinks=0)
    scores = torch.cat(
        [policy.repeated(kvops.View(k, v), q, own, None, {}) for k, v, q, own in inputs], 1
    )  # [1, layers * Hk, n]
    heads = scores.shape[1]
    order = scores.double().flatten().sort(descending=True, stable=True).indices[: heads * budget].cpu()
    budgets = kvops.head_budgets(scores, budget, floor=0.0)
    assert budgets[0].tolist() == [int((order // n == h).sum()) for h in range(heads)]
    assert len(set(budgets[0].tolist())) > 1
    for layer, (k, v, q, own) in enumerate(inputs):
        mine = budgets[:, 2 * layer : 2 * layer + 2].contiguous()
        kept = kvops.kvzip_compress(k, v, q, mine, k_repeat=own, sinks=0).indices.cpu()
        for h in range(2):
            chosen = (order[order // n == 2 * layer + h] % n).sort().values
            assert torch.equal(kept[0, h][kept[0, h] >= 0], chosen)


def feed(policy, k, v, q, steps):
    cache, first = kvops.Cache(policy), 0
    for step in steps:
        new = slice(first, first + step)
        cache.attend(q[:, :, new], k[:, :, new], v[:, :, new])
        first += step
    return cache


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("steps", [[60], [25, 25, *[1] * 10]], ids=["whole", "chunks"])
def test_a_cache_is_one_call(steps, padded):
    """Everything is kept until evict; passes attend like further tokens and are forgotten."""
    policy = kvops.KVzip(12, chunk=25)
    k, v, q, own = make(n=60, t=60 + 3 * 2, d=16, dv=16)
    prompt, values = kit.randn(2, 6, 60, 16, seed=9), kit.randn(2, 2, 66, 16, seed=8)
    spans, cache = {}, kvops.Cache(policy)
    if padded:
        cache.set_pads(torch.tensor([0, 5]))
        spans = dict(starts=kit.int32(0, 5))
    first = 0
    for step in steps:
        new = slice(first, first + step)
        cache.attend(prompt[:, :, new], k[:, :, new], v[:, :, new])
        first += step
    assert len(cache) == 60
    with pytest.raises(RuntimeError, match="evict\\(\\) must follow the passes"):
        cache.evict()
    passes, at = [27, 27, 12], 0
    for i, rows in enumerate(passes):
        new = slice(at, at + rows)
        with cache.repeating(25 * i):
            out = cache.attend(q[:, :, new], own[:, :, new], values[:, :, new])
        full = kvops.attention(
            q[:, :, new], torch.cat((k, own[:, :, new]), 2), torch.cat((v, values[:, :, new]), 2), **spans
        ).out
        torch.testing.assert_close(out, full)
        assert len(cache) == cache.seen == 60 and torch.equal(cache.k, k) and torch.equal(cache.v, v)
        at += rows
    cache.evict()
    want = kvops.kvzip_compress(k, v, q, 12, k_repeat=own, passes=passes, chunk=25, **spans)
    assert torch.equal(cache.positions, want.indices) and kit.same((cache.k, cache.v), want[:2])
    assert cache.seen == 60
    cache.attend(prompt[:, :, :1], k[:, :, :1], v[:, :, :1])
    assert len(cache) == 13 and cache.seen == 61
    with pytest.raises(RuntimeError, match="evict\\(\\) must follow the passes"):
        cache.evict()


def test_a_pass_that_fails_leaves_the_cache_as_it_was():
    k, v, q, own = make(n=30, t=30, dv=16)
    cache = feed(kvops.KVzip(12), k, v, kit.randn(2, 6, 30, 16), [30])
    with pytest.raises(ValueError, match="scale must be positive"), cache.repeating(0):
        cache.attend(q, own, own, scale=-1.0)
    with pytest.raises(RuntimeError, match="the block"), cache.repeating(0):
        cache.append(own, own)  # without its attention
        raise RuntimeError("the block")
    assert len(cache) == cache.seen == 30 and torch.equal(cache.k, k)
    with cache.repeating(0):
        cache.attend(q, own, own)
    cache.evict()
    assert torch.equal(cache.positions, kvops.kvzip_compress(k, v, q, 12, k_repeat=own).indices)
    with pytest.raises(RuntimeError, match="got a cache without one"), kvops.Cache(kvops.KVzip(12)).repeating(0):
        pass


def test_passes_over_a_cache_that_has_evicted():
    """They score all its slots, or raise: which slots a chunk of tokens has is not known."""
    k, v, q, own = make(n=60, t=60, dv=16)
    for chunk in (30, 60):
        cache = feed(kvops.KVzip(12, chunk=chunk), k[:, :, :30], v[:, :, :30], kit.randn(2, 6, 30, 16), [30])
        with cache.repeating(0):
            cache.attend(q[:, :, :30], own[:, :, :30], own[:, :, :30])
        cache.evict()
        first = cache.positions
        cache.attend(q[:, :, :30], k[:, :, 30:], v[:, :, 30:])
        if chunk == 30:
            for at in (0, 30):
                with pytest.raises(RuntimeError, match="expected chunk >= 60, the tokens seen, got 30"):
                    cache.repeating(at).__enter__()
            assert len(cache) == 42
            continue
        with cache.repeating(0):
            cache.attend(q, own, own)
        cache.evict()
        every = torch.cat((first, torch.arange(30, 60, device=k.device).expand(2, k.shape[1], -1)), 2)
        stored = gather_rows(k, every), gather_rows(v, every)
        chosen = kvops.kvzip_compress(*stored, q, 12, k_repeat=own, chunk=60).indices
        assert torch.equal(cache.positions, every.gather(2, chosen))


def test_a_prompt_within_the_budget_is_kept():
    k, v, q, own = make(n=10, t=10, dv=16)
    cache = feed(kvops.KVzip(12), k, v, kit.randn(2, 6, 10, 16), [10])
    with cache.repeating(0):
        cache.attend(q, own, own)
    cache.evict()
    assert len(cache) == 10


def test_the_tokens_of_a_pass():
    policy = kvops.KVzip(8, chunk=4, previous=2, instruction=(90, 91), next_instruction=(92,), suffix=())
    ids, valid = torch.arange(20).view(2, 10), torch.tensor([10, 7])  # the second row has three pads
    assert repeat_ids(policy, ids, valid, 0).tolist() == [[90, 91, 0, 1, 2, 3], [90, 91, 13, 14, 15, 16]]
    assert repeat_ids(policy, ids, valid, 4).tolist() == [[92, 2, 3, 4, 5, 6, 7], [92, 15, 16, 17, 18, 19, 19]]
    assert repeat_ids(policy, ids, valid, 8)[0].tolist() == [92, 6, 7, 8, 9]
    chat = dataclasses.replace(policy, suffix=(80, 81))  # the authors' order
    assert repeat_ids(chat, ids, valid, 0)[0].tolist() == [90, 91, 80, 81, 0, 1, 2, 3]
    assert repeat_ids(chat, ids, valid, 4).tolist() == [
        [92, 2, 3, 80, 81, 4, 5, 6, 7],
        [92, 15, 16, 80, 81, 17, 18, 19, 19],
    ]


@pytest.mark.parametrize(
    "change, error, parts",
    [
        (dict(k_repeat=None), TypeError, ("k_repeat must be a torch.Tensor",)),
        (dict(passes=[30, 30]), ValueError, ("passes must be the rows of at most 1 passes", "sum 70")),
        (dict(passes=[70, 0]), ValueError, ("passes must be",)),
        (dict(passes=[35, 35]), ValueError, ("at most 1 passes of 2048 tokens", r"got \[35, 35\]")),
        (dict(budget=3), ValueError, ("budget must hold", "got 3")),
        (dict(lse=torch.zeros(2, 6, 70)), TypeError, ("unexpected keyword argument 'lse'",)),
        (dict(block_table=torch.zeros(2, 1, dtype=torch.int32)), ValueError, ("takes no pages",)),
    ],
)
def test_errors(change, error, parts):
    k, v, q, own = make()
    call = {"k": k, "v": v, "q_repeat": q, "budget": 20, "k_repeat": own, **change}
    with kit.refuses("kvzip_compress", *parts, kind=error):
        kvops.kvzip_compress(**call)


def test_errors_of_shapes():
    k, v, q, own = make()
    for keys, part in (
        (own[:, :, :60], r"k_repeat must have 70 rows \(dim 2\), got 60"),
        (own[:, :1], "k_repeat must have k's dtype and its shape"),
        (own.half(), "k_repeat must have k's dtype and its shape"),
    ):
        with kit.refuses("kvzip_compress", part):
            kvops.kvzip_compress(k, v, q, 20, k_repeat=keys)
    with pytest.raises(ValueError, match="KVzip: a PagedCache cannot repeat prompts"):
        kvops.KVzip(64).check_paged_cache(2)


@examples
@given(
    n=st.integers(8, 60),
    chunk=st.sampled_from([100, 23, 7]),
    told=st.integers(0, 3),
    dtype=st.sampled_from(kit.DTYPES),
    group=st.sampled_from([3, 1]),
    by_layer=st.booleans(),
    group_reduce=st.sampled_from(["max", "mean", "sum"]),
    seed=st.integers(0, 99),
)
def test_kvzip_plus_is_the_released_code(n, chunk, told, dtype, group, by_layer, group_reduce, seed):
    """Weights over the norm of the repeated token's hidden state, times the norm of the projected value, in fp64."""
    passes = [told + min(chunk, n - first) for first in range(0, n, chunk)]
    k, v, q, own = make(seed, n=n, t=sum(passes), group=group, dtype=dtype)
    hidden = kit.randn(2, sum(passes), 12, seed=seed + 3) * kit.randn(2, sum(passes), 1, seed=seed + 4)
    w_o = kit.randn(24, 2 * group * 8, seed=seed + 5)
    settings = dict(chunk=chunk, group_reduce=group_reduce, plus=True, w_o=[w_o + 1, w_o] if by_layer else w_o)
    call = dict(k_repeat=own, passes=passes, hidden_repeat=hidden, layer=1, num_layers=2)
    result = kvops.kvzip_compress(k, v, q, 8, **settings, **call)
    assert_moved(result, k, v)
    for b in range(2):
        for h in range(2):
            total, row = np.zeros(n), 0
            for i, rows in enumerate(passes):
                at = slice(row, row + rows)
                members = []
                for g in range(h * group, (h + 1) * group):
                    weights = pass_scores(
                        fp64(q[b, g : g + 1, at]), fp64(k[b, h]), fp64(own[b, h, at]), i * chunk, chunk, 4,
                        norms=np.linalg.norm(fp64(hidden[b, at]), axis=-1),
                    )  # fmt: skip
                    reach = np.linalg.norm(fp64(v[b, h]) @ fp64(w_o[:, 8 * g : 8 * g + 8]).T, axis=-1)
                    members.append(weights * reach)
                reduced = {"max": np.max, "mean": np.mean, "sum": np.sum}[group_reduce](members, 0)
                total, row = np.maximum(total, reduced), row + rows
            assert_kept(result.indices[b, h], total, min(4, n), min(8, n), 1e-5 * total.max())


def test_kvgrad_weights_rows_by_the_norms_that_it_is_given():
    """KVzip+ with hidden states of norm 1 / gradient keeps the same; a single call and a cache take the norms."""
    chunk, passes = 20, [22, 22, 17]
    k, v, q, own = make(n=55, t=61)
    norms, w_o = kit.randn(2, 61).abs() + 0.1, kit.randn(24, 6 * 8)
    hidden = torch.nn.functional.normalize(kit.randn(2, 61, 12), dim=-1) / norms.unsqueeze(-1)
    policy = kvops.KVzip(12, gradients=True, chunk=chunk, w_o=w_o)
    call = dict(k_repeat=own, passes=passes)
    got = policy.compress(k, v, q, **call, gradients_repeat=norms)
    want = kvops.KVzip(12, chunk=chunk, plus=True, w_o=w_o).compress(k, v, q, **call, hidden_repeat=hidden)
    assert torch.equal(got.indices, want.indices)
    other = policy.compress(k, v, q, **call, gradients_repeat=norms.flip(1))
    assert not torch.equal(other.indices, got.indices)
    cache = kvops.Cache(policy)
    cache.attend(kit.randn(2, 6, 55, k.shape[3]), k, v)
    parts = zip(q.split(passes, 2), own.split(passes, 2), norms.split(passes, 1))
    for i, (queries, keys, weights) in enumerate(parts):
        with cache.repeating(i * chunk, weights):
            cache.attend(queries, keys, kit.randn(2, 2, passes[i], v.shape[3]))
    cache.evict()
    assert torch.equal(cache.positions, got.indices)
    for options, says, kind in (
        ({}, "with gradients=True a pass needs the norms of its rows' gradients, got none", ValueError),
        (dict(gradients_repeat=norms[:, 1:]), r"gradients_repeat must be floating point \[2, 61\]", ValueError),
        (dict(gradients_repeat=3), "gradients_repeat must be a torch.Tensor", TypeError),
        (dict(hidden_repeat=hidden, gradients_repeat=norms), "hidden_repeat is for plus=True", ValueError),
    ):
        with kit.refuses(f"KVzip: {says}", kind=kind):
            policy.compress(k, v, q, **call, **options)
    with kit.refuses("KVzip: gradients_repeat is for gradients=True, expected None"):
        kvops.KVzip(12, chunk=20).compress(k, v, q, **call, gradients_repeat=norms)
    with kit.refuses("KVzip: plus and gradients both weight the rows, expected one, got both"):
        kvops.KVzip(12, plus=True, gradients=True)


def test_kvzip_plus_in_padded_rows_and_with_rows_that_are_not_finite():
    chunk, starts = 20, (0, 25)
    k, v, q, own = make(n=55, t=55)
    hidden, w_o = kit.randn(2, 55, 12), kit.randn(24, 6 * 8)
    passes = [20, 20, 15]
    policy = kvops.KVzip(12, chunk=chunk, plus=True, w_o=w_o)
    call = dict(k_repeat=own, passes=passes, hidden_repeat=hidden, starts=kit.int32(*starts))
    mine = torch.cat((torch.arange(20), torch.arange(20, 30)))  # a pass has fewer rows where the chunk is shorter
    alone = policy.compress(
        k[1:, :, 25:], v[1:, :, 25:], q[1:, :, mine], k_repeat=own[1:, :, mine], passes=[20, 10],
        hidden_repeat=hidden[1:, mine],
    )  # fmt: skip
    unused = torch.ones(55, dtype=torch.bool)
    unused[mine] = False
    q[1, :, unused], own[1, :, unused], hidden[1, unused] = torch.nan, torch.nan, torch.nan
    k[1, :, :25] = v[1, :, :25] = torch.nan
    assert torch.equal(policy.compress(k, v, q, **call).indices[1], alone.indices[0] + 25)
    hidden[0, 3] = 0.0  # such a row says nothing, as if it did not see anything
    without = hidden.clone()
    without[0, 3] = torch.inf
    kept = policy.compress(k, v, q, **call).indices
    assert torch.equal(kept, policy.compress(k, v, q, **{**call, "hidden_repeat": without}).indices)
    assert (kept[0] >= 0).all()


def test_kvzip_plus_in_a_cache():
    k, v, q, own = make(n=60, t=70)
    hidden, w_o = kit.randn(2, 70, 12), [kit.randn(24, 6 * 8, seed=i) for i in range(2)]
    policy = kvops.KVzip(12, plus=True, w_o=w_o)
    want = policy.compress(k, v, q, k_repeat=own, hidden_repeat=hidden, layer=1, num_layers=2)
    cache = kvops.Cache(policy, layer=1, num_layers=2)
    cache.attend(kit.randn(2, 6, 60, 16), k, v)
    step = q, own, kit.randn(2, 2, 70, 8)
    with kit.refuses("KVzip: with plus=True a pass needs the hidden states"), cache.repeating(0):
        cache.attend(*step)
    for wrong, says in (
        (
            kvops.LayerInputs(hidden[:, 1:]),
            r"inputs.hidden must be floating point \[2, 70, hidden\], got torch.float32 \[2, 69, 12\]",
        ),
        (
            kvops.LayerInputs(hidden, torch.zeros(2, 3)),
            r"inputs.token_ids must be integers of shape \[2, 70\], got torch.float32 \[2, 3\]",
        ),
    ):
        with kit.refuses(says), cache.repeating(0):
            cache.attend(*step, inputs=wrong)
    with kit.refuses("inputs must be a kvops.LayerInputs, got Tensor", kind=TypeError), cache.repeating(0):
        cache.attend(*step, inputs=hidden)
    with cache.repeating(0):
        cache.attend(*step, inputs=kvops.LayerInputs(hidden))
    cache.evict()
    assert torch.equal(cache.positions, want.indices) and cache._inputs is None
    cache.attend(*(x[:, :, :1] for x in (q, own, v)))  # decode needs no inputs
    with kit.refuses("plus=True weights a layer's scores by its own", "got 1 more", kind=NotImplementedError):
        fresh = kvops.Cache(policy, layer=0, num_layers=2)
        fresh.attention(q, *fresh.append(own, v[:, :, :1].expand(-1, -1, 70, -1)), readers=1)


def test_kvzip_plus_refuses():
    k, v, q, own = make(n=40, t=40)
    hidden, w_o = kit.randn(2, 40, 12), kit.randn(24, 6 * 8)
    for settings, call, says in (
        (dict(plus=True), dict(hidden_repeat=hidden), "KVzip: w_o must be the weights"),
        (dict(plus=True, w_o=w_o), {}, "KVzip: with plus=True a pass needs the hidden states of its tokens, got none"),
        (
            dict(plus=True, w_o=w_o),
            dict(hidden_repeat=hidden[:, 1:]),
            r"hidden_repeat must be floating point \[2, 40, hi",
        ),
        (dict(plus=True, w_o=w_o[:, 8:]), dict(hidden_repeat=hidden), r"w_o must be \[hidden, 6 query heads \* 8\]"),
        (dict(plus=True, w_o=[w_o]), dict(hidden_repeat=hidden, layer=1, num_layers=2), "layer must name one of the 1"),
        ({}, dict(hidden_repeat=hidden), "hidden_repeat is for plus=True, expected None"),
    ):
        with kit.refuses(says):
            kvops.KVzip(9, **settings).compress(k, v, q, k_repeat=own, **call)
