"""R-KV against its formula in fp64: single calls, decode, padding, errors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from test_criticalkv import attention_rows

pytestmark = kit.every_device


def inputs(b=2, heads=2, group=3, n=200, d=16, w=8, seed=0):
    k, v = kit.kv(b, heads, n, d, seed=seed)
    return k, v, kit.randn(b, heads * group, w, d, seed=seed + 1)


def mean_cosines(k, threshold=0.5, first_is_spared=False):
    """Return what the released code computes before its softmax, fp64 [b, Hk, n].

    first_is_spared: as there, a key without a similar one spares slot 0.
    """
    unit = k.double() / (k.double().norm(dim=-1, keepdim=True) + 1e-8)
    cosines = unit @ unit.mT
    n = k.shape[2]
    cosines[..., range(n), range(n)] = 0
    for matrix in cosines.flatten(0, 1):
        for row in matrix:
            similar = (row > threshold).nonzero().flatten().tolist()
            if similar or first_is_spared:
                row[similar[-1] if similar else 0] = 0
    return cosines.mean(-2)


def formula(k, q, mix=0.1, threshold=0.5):
    """Return the score of each slot before the window, fp64 [b, Hk, n - w]."""
    w = q.shape[2]
    importance = attention_rows(q, k).mean(3).amax(2)[..., :-w]
    importance = torch.nn.functional.max_pool1d(importance, 7, 1, 3)
    redundancy = mean_cosines(k, threshold).softmax(-1)[..., :-w]
    return mix * importance - (1 - mix) * redundancy


def best(scores, count, n, w):
    found = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count].sort(dim=-1).values
    return torch.cat((found, torch.arange(n - w, n).expand(*found.shape[:2], -1)), -1)


@pytest.mark.parametrize("options", [{}, dict(mix=0.5), dict(mix=0.0), dict(mix=1.0), dict(threshold=0.8)])
def test_the_formula(options):
    k, v, q = inputs()
    kept = kvops.RKV(40, **options).compress(k, v, q).indices
    assert torch.equal(kept, best(formula(k, q, **options), 32, 200, 8))


def test_where_the_released_code_spares_slot_0():
    """The only difference: there, each key without a similar one takes its cosine with slot 0 away."""
    k = kit.randn(1, 2, 80, 16)
    ours = kvops.ops.key_similarity(k)
    theirs = mean_cosines(k, first_is_spared=True)
    torch.testing.assert_close(ours[..., 1:], theirs[..., 1:].float(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours, mean_cosines(k).float(), rtol=1e-4, atol=1e-6)
    assert (ours[..., 0] - theirs[..., 0]).abs().min() > 1e-3


def test_of_copies_the_last_is_kept():
    k, v, q = kit.randn(1, 1, 120, 64), kit.randn(1, 1, 120, 64), kit.randn(1, 1, 8, 64, seed=1)
    k[:, :, 30:60] = k[:, :, 30:31] + 0.01 * k[:, :, 30:60]  # thirty times nearly the same key
    kept = set(kvops.RKV(60, mix=0.0).compress(k, v, q).indices.flatten().tolist())
    assert kept & set(range(30, 60)) <= {58, 59} and 59 in kept


def test_decode_evicts_whenever_the_buffer_is_full():
    """By the queries of the last window tokens, over the tokens that are left."""
    k, v, q = inputs(n=150, w=150)
    policy = kvops.RKV(40, window=8, buffer=16)
    cache = kvops.Cache(policy)
    cache.attend(q[:, :, :100], k[:, :, :100], v[:, :, :100])
    kept = policy.compress(k[:, :, :100], v[:, :, :100], q[:, :, 92:100])
    assert kit.same((cache.k, cache.v), kept[:2])
    for i in range(100, 132):
        cache.attend(*(x[:, :, i : i + 1] for x in (q, k, v)))
        assert len(cache) == 40 + (i - 99) % 16
        if i == 115:
            before = [torch.cat((x, y[:, :, 100:116]), 2) for x, y in zip(kept[:2], (k, v))]
            expected = policy.compress(*before, q[:, :, 108:116])
            assert kit.same((cache.k, cache.v), expected[:2])


def test_a_short_chunk_counts_as_decode():
    k, v, q = inputs(n=60, w=60)
    cache = kvops.Cache(kvops.RKV(40, buffer=16))
    cache.attend(q[:, :, :50], k[:, :, :50], v[:, :, :50])
    cache.attend(q[:, :, 50:54], k[:, :, 50:54], v[:, :, 50:54])
    assert len(cache) == 44
    cache = kvops.Cache(kvops.RKV(40, buffer=None))
    for i in range(60):
        cache.attend(*(x[:, :, i : i + 1] for x in (q, k, v)))
    assert len(cache) == 60


@given(data=st.data(), n=st.integers(9, 60))
@kit.examples(15)
def test_padded_rows_are_compressed_as_if_alone(data, n):
    k, v, q = inputs(b=3, n=n)
    starts = [data.draw(st.integers(0, n - 8)) for _ in range(3)]
    poisoned = torch.full_like(k, float("nan"))
    for row, s in enumerate(starts):
        poisoned[row, :, s:] = k[row, :, s:]
    policy = kvops.RKV(data.draw(st.sampled_from([6, 20, 0.9])), window=4, sinks=2)
    kept = policy.compress(poisoned, v, q[:, :, -4:], starts=kit.int32(*starts)).indices
    for row, s in enumerate(starts):
        alone = policy.compress(k[row : row + 1, :, s:], v[row : row + 1, :, s:], q[row : row + 1, :, -4:]).indices
        mine = kept[row : row + 1]
        shared = [len(set(x) & set(y)) for x, y in zip((alone + s).flatten(0, 1).tolist(), mine.flatten(0, 1).tolist())]
        assert min(shared) >= alone.shape[2] - 1  # a softmax over more slots rounds differently


def test_a_key_that_is_not_finite_is_evicted_first():
    k, v, q = inputs()
    k[0, 1, 20, 3] = float("nan")
    kept = kvops.RKV(190).compress(k, v, q).indices
    assert not (kept[0, 1] == 20).any()


@pytest.mark.parametrize("head_mode", ["shared", "adaptive"])
def test_head_modes(head_mode):
    k, v, q = inputs()
    kept = kvops.RKV(40, head_mode=head_mode).compress(k, v, q)
    if head_mode == "shared":
        assert torch.equal(kept.indices[:, 0], kept.indices[:, 1]) and kept.k.shape[2] == 40
    else:
        assert ((kept.indices >= 0).sum((1, 2)) == 80).all()


def test_bad_input():
    k, v, q = inputs()
    for settings, parts in (
        (dict(mix=1.5), (r"RKV: mix must be in \[0, 1\], got 1.5",)),
        (dict(threshold=-0.5), ("RKV: threshold must be at least 0, got -0.5",)),
        (dict(kernel_size=4), ("RKV: kernel_size must be odd", "got 4")),
        (dict(budget=4), ("RKV: budget must hold the window, expected at least 8 tokens, got 4",)),
        (dict(window=4), ("RKV: q_window must have at most window rows, expected at most 4, got 8",)),
        (dict(buffer=0), ("RKV: buffer must be at least 1, got 0",)),
    ):
        with kit.refuses(*parts):
            kvops.RKV(**{"budget": 40, **settings}).compress(k, v, q)
