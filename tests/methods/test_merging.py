"""Merging on eviction: the definition, in single calls and in caches, and what it leaves alone."""

import pytest
import torch

import kvops
from kit import DTYPES

POLICIES = (kvops.KeyDiff(12, merge=True), kvops.L2(12, skip_layers=(), sinks=2, recent=3, merge=True))


def inputs(seed=0, b=2, heads=2, n=60, d=16, dv=32, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(b, heads, n, x, generator=generator).to(dtype) for x in (d, dv))


def merged(k, v, indices):
    """The definition, token by token in fp64, for one head without padding: k [n, d], v [n, dv], indices [m]."""
    nearest = kvops.ops.assign_prototypes(k[None, None], k[indices].float()[None, None]).flatten().tolist()
    values = [[v[i].double()] for i in indices.tolist()]
    for j in set(range(len(k))) - set(indices.tolist()):
        values[nearest[j]].append(v[j].double())
    return torch.stack([torch.stack(x).mean(0) for x in values])


@pytest.mark.parametrize("policy", POLICIES, ids=lambda x: x.name)
def test_values_are_means(policy):
    k, v = inputs()
    got = policy.compress(k, v)
    plain = type(policy)(**{**vars(policy), "merge": False}).compress(k, v)
    assert torch.equal(got.indices, plain.indices) and torch.equal(got.k, plain.k)
    assert not torch.equal(got.v, plain.v)
    for b in range(2):
        for h in range(2):
            want = merged(k[b, h], v[b, h], got.indices[b, h])
            torch.testing.assert_close(got.v[b, h].double(), want, atol=1e-6, rtol=1e-6)


def test_alike_tokens_become_one():
    """Of 16 groups with one key each, the kept token of a group gets the mean of its values."""
    k = torch.eye(16)[torch.arange(48) % 16].view(1, 1, 48, 16).contiguous()
    v = torch.randn(1, 1, 48, 16)
    out = kvops.L2(16, recent=16, skip_layers=(), merge=True).compress(k, v)
    want = torch.stack([v[0, 0, i::16].mean(0) for i in range(16)])
    torch.testing.assert_close(out.v[0, 0], want)


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float8_e4m3fn))
def test_dtypes_and_in_place(dtype):
    k, v = inputs(dtype=dtype)
    want = kvops.keydiff_compress(k, v, 12, merge=True)
    out = torch.empty_like(want.k), torch.empty_like(want.v)
    given = kvops.keydiff_compress(k, v, 12, merge=True, out=out)
    moved = kvops.keydiff_compress_(k.clone(), v.clone(), 12, merge=True)
    for got in (given, moved):
        assert torch.equal(got.indices, want.indices)
        assert torch.equal(got.v.view(torch.uint8), want.v.view(torch.uint8))
    for b in range(2):
        reference = merged(k[b, 1], v[b, 1], want.indices[b, 1]).float()
        tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 0.2)
        torch.testing.assert_close(want.v[b, 1].float(), reference, atol=tolerance, rtol=tolerance)


def test_padding_is_not_merged():
    """Padded rows are merged as if alone, whatever the padding holds, and rows with fewer tokens end in zeros."""
    k, v = inputs(n=40)
    starts, lengths = torch.tensor([7, 0], dtype=torch.int32), torch.tensor([30, 9], dtype=torch.int32)
    for x in (k, v):
        x[0, :, :7] = x[0, :, 37:] = x[1, :, 9:] = torch.nan
    got = kvops.keydiff_compress(k, v, 12, merge=True, starts=starts, lengths=lengths)
    alone = kvops.keydiff_compress(k[:1, :, 7:37].contiguous(), v[:1, :, 7:37].contiguous(), 12, merge=True)
    assert torch.equal(got.indices[:1], alone.indices + 7) and torch.equal(got.v[:1], alone.v)
    assert torch.equal(got.v[1, :, :9], v[1, :, :9]) and not got.v[1, :, 9:].any()  # nothing was evicted


def test_filled_rows_attract_nothing():
    k, v = inputs(n=40)
    starts = torch.tensor([33, 0], dtype=torch.int32)
    got = kvops.keydiff_compress(k, v, 12, merge=True, starts=starts, fill_invalid=True)
    assert torch.equal(got.v[0], v[0].gather(1, got.indices[0].unsqueeze(-1).expand(-1, -1, v.shape[3])))


def test_values_that_are_not_finite():
    """An evicted one is left out, a kept one stays."""
    k, v = inputs(b=1, heads=1)
    plain = kvops.keydiff_compress(k, v, 12)
    evicted = min(set(range(60)) - set(plain.indices.flatten().tolist()))
    kept = int(plain.indices[0, 0, 3])
    want = kvops.keydiff_compress(k, v, 12, merge=True).v
    hurt = v.clone()
    hurt[0, 0, evicted, 5], hurt[0, 0, kept, 2] = torch.nan, torch.inf
    got = kvops.keydiff_compress(k, hurt, 12, merge=True).v
    assert got[0, 0, 3, 2] == torch.inf
    got[0, 0, 3, 2] = want[0, 0, 3, 2]
    assert got.isfinite().all() and torch.equal(got[..., 6:], want[..., 6:])


@pytest.mark.parametrize("policy", POLICIES, ids=lambda x: x.name)
def test_a_cache_merges_as_its_evictions_do(policy):
    """Step by step: what the cache keeps is `compress` of what it kept before and the step's tokens."""
    k, v = inputs(b=1)
    cache = kvops.Cache(policy)
    held = k[:, :, :0], v[:, :, :0]
    for step in zip(k.split(20, 2), v.split(20, 2)):
        cache.append(*step)
        held = tuple(torch.cat(x, 2) for x in zip(held, step))
        if held[0].shape[2] > 12:
            held = policy.compress(*held)[:2]
    assert len(cache) == 12 and torch.equal(cache.k, held[0])
    torch.testing.assert_close(cache.v, held[1])


def test_engines_refuse_it():
    from kvops.vllm import plan

    k, v = inputs()
    table, lengths = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="KeyDiff: .* takes no pages"):
        kvops.KeyDiff(4, merge=True).compress(k, v, block_table=table, lengths=lengths)
    for policy in POLICIES:
        with pytest.raises(ValueError, match=rf"{policy.name}: .* expected merge=False"):
            plan.check(policy)
    with pytest.raises(TypeError, match="KeyDiff: merge must be a bool"):
        kvops.KeyDiff(4, merge=1)
