"""CriticalKV against its formula in fp64: single calls, budgets, caches, models, errors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops

pytestmark = kit.every_device


def inputs(b=2, heads=2, group=3, n=200, d=16, dv=24, hidden=40, w=8, seed=0):
    k, v = kit.kv(b, heads, n, d, dv=dv, seed=seed)
    q = kit.randn(b, heads * group, w, d, seed=seed + 1)
    # Query heads and channels of different size, so that norms decide.
    w_o = kit.randn(hidden, heads * group * dv, seed=seed + 2) * kit.randn(1, heads * group * dv, seed=seed + 3).exp()
    return k, v * kit.randn(b, heads, n, 1, seed=seed + 4).exp(), q, w_o


def attention_rows(q, k):
    """Return the attention of the last rows, fp64 [b, Hk, group, w, n]."""
    logits = q.double().unflatten(1, (k.shape[1], -1)) @ k.double().unsqueeze(2).mT / q.shape[-1] ** 0.5
    limits = kit.on_device(kit.causal(q.shape[2], k.shape[2]))
    return logits.masked_fill(torch.arange(k.shape[2]) >= limits[:, None], -torch.inf).softmax(-1)


def ranks(x):
    """Return the slots by descending score, ties to the lower slot."""
    return x.sort(descending=True, stable=True).indices.tolist()


def kept_by_formula(s, norms, budget, w, sinks=0, ratio=0.5, epsilon=1e-4):
    """Return the kept slots of one row and head: s, norms: fp64 [n]."""
    n = len(s)
    protected = {*range(min(sinks, n)), *range(n - w, n)}
    first = int(ratio * (budget - w - sinks))
    kept = [i for i in ranks(s) if i not in protected][:first]
    rest = [i for i in ranks((s + epsilon) * norms) if i not in protected and i not in kept]
    return sorted([*protected, *kept, *rest][:budget])


def formula(k, v, q, w_o, budget, **options):
    w, heads = q.shape[2], k.shape[1]
    s = attention_rows(q, k).sum(3).mean(2)  # [b, Hk, n]
    s = torch.nn.functional.max_pool1d(s[..., :-w], 7, 1, 3)
    s = torch.nn.functional.pad(s, (0, w))
    weights = w_o.double().unflatten(1, (heads, -1, v.shape[3]))
    norms = torch.einsum("bhnd,chgd->bhgnc", v.double(), weights).abs().sum(-1).mean(2)
    return [[kept_by_formula(s[i, h], norms[i, h], budget, w, **options) for h in range(heads)] for i in range(len(k))]


@pytest.mark.parametrize(
    "budget, options",
    [
        (40, {}),
        (40, dict(sinks=4)),
        (40, dict(first_stage_ratio=0.0)),
        (40, dict(first_stage_ratio=1.0)),
        (41, dict(first_stage_ratio=0.3, epsilon=0.05)),
        (9, {}),
        (8, {}),
    ],
)
def test_the_formula(budget, options):
    k, v, q, w_o = inputs()
    kept = kvops.CriticalKV(budget, w_o=w_o, window=8, **options).compress(k, v, q)
    renamed = {"ratio" if name == "first_stage_ratio" else name: x for name, x in options.items()}
    assert kept.indices.tolist() == formula(k, v, q, w_o, budget, **renamed)


def test_norms_decide_the_second_stage():
    k, v, q, w_o = inputs()
    snapkv = kvops.SnapKV(40, window=8).compress(k, v, q).indices
    assert torch.equal(kvops.CriticalKV(40, w_o=w_o, window=8, first_stage_ratio=1).compress(k, v, q).indices, snapkv)
    critical = kvops.CriticalKV(40, w_o=w_o, window=8).compress(k, v, q).indices
    assert not torch.equal(critical, snapkv)
    # A value that reaches far is kept in the second stage, although hardly anybody attends to it.
    v[:, :, 77] *= 1e4
    assert (kvops.CriticalKV(40, w_o=w_o, window=8).compress(k, v, q).indices == 77).any(-1).all()


def test_the_heads_share_a_budget_by_attention():
    k, v, q, w_o = inputs()
    kept = kvops.CriticalKV(40, w_o=w_o, window=8, head_mode="adaptive").compress(k, v, q)
    policy = kvops.SnapKV(40, window=8, head_mode="adaptive")
    counts = (policy.compress(k, v, q).indices >= 0).sum(-1)
    assert torch.equal((kept.indices >= 0).sum(-1), counts) and (counts != 40).any()
    by_head = kvops.CriticalKV(counts.int(), w_o=w_o, window=8).compress(k, v, q)
    assert torch.equal(by_head.indices, kept.indices)


def test_shared_heads_rank_by_means():
    k, v, q, w_o = inputs(b=1)
    kept = kvops.CriticalKV(40, w_o=w_o, window=8, head_mode="shared").compress(k, v, q).indices
    assert torch.equal(kept[:, 0], kept[:, 1])
    s = attention_rows(q, k).sum(3).mean(2)
    s = torch.nn.functional.pad(torch.nn.functional.max_pool1d(s[..., :-8], 7, 1, 3), (0, 8))
    weights = w_o.double().unflatten(1, (2, -1, v.shape[3]))
    weighted = (s + 1e-4) * torch.einsum("bhnd,chgd->bhgnc", v.double(), weights).abs().sum(-1).mean(2)
    mean, weighted = s.mean(1)[0], weighted.mean(1)[0]
    first = ranks(mean[:-8])[:16]
    rest = [i for i in ranks(weighted[:-8]) if i not in first][:16]
    assert kept[0, 0].tolist() == sorted([*first, *rest, *range(192, 200)])


@given(data=st.data(), n=st.integers(9, 60))
@kit.examples(15)
def test_padded_rows_are_compressed_as_if_alone(data, n):
    k, v, q, w_o = inputs(b=3, n=n)
    starts = [data.draw(st.integers(0, n - 8)) for _ in range(3)]
    poisoned = [torch.full_like(x, float("nan")) for x in (k, v)]
    for row, s in enumerate(starts):
        for x, y in zip(poisoned, (k, v)):
            x[row, :, s:] = y[row, :, s:]
    policy = kvops.CriticalKV(data.draw(st.sampled_from([8, 20, 0.9])), w_o=w_o, window=4, sinks=2)
    kept = policy.compress(*poisoned, q[:, :, -4:], starts=kit.int32(*starts)).indices
    for row, s in enumerate(starts):
        alone = policy.compress(k[row : row + 1, :, s:], v[row : row + 1, :, s:], q[row : row + 1, :, -4:]).indices
        mine = kept[row : row + 1]
        assert torch.equal(mine[..., : alone.shape[2]], torch.where(alone < 0, alone, alone + s))
        assert (mine[..., alone.shape[2] :] == -1).all()


def test_weights_by_layer_and_dtype():
    k, v, q, w_o = inputs()
    layers = [w_o * 0 + 1, w_o]
    policy = kvops.CriticalKV(40, w_o=layers, window=8)
    expected = kvops.CriticalKV(40, w_o=w_o, window=8).compress(k, v, q).indices
    assert torch.equal(policy.compress(k, v, q, layer=1).indices, expected)
    assert not torch.equal(policy.compress(k, v, q, layer=0).indices, expected)
    half = kvops.CriticalKV(40, w_o=w_o.double(), window=8)
    assert torch.equal(half.compress(k, v, q).indices, expected)
    assert policy == kvops.CriticalKV(40, w_o=[x.clone() for x in layers], window=8) != half
    assert hash(policy) == hash(kvops.CriticalKV(40, w_o=[x.clone() for x in layers], window=8))
    assert "tensor" not in repr(policy)


def test_a_token_whose_value_is_not_finite_is_evicted_first():
    k, v, q, w_o = inputs()
    v[0, 1, 20, 3] = float("nan")
    k[0, 1, 20] = q[0, 3, -1] * 10  # it draws all attention
    kept = kvops.CriticalKV(190, w_o=w_o, window=8).compress(k, v, q).indices
    assert not (kept[0, 1] == 20).any()


def test_a_cache_compresses_the_prompt_like_one_call():
    k, v, q, w_o = inputs(w=200)
    policy = kvops.CriticalKV(40, w_o=[w_o], window=8)
    cache = kvops.Cache(policy, layer=0, num_layers=1)
    cache.attend(q, k, v)
    kept = policy.compress(k, v, q[:, :, -8:], layer=0)
    assert kit.same((cache.k, cache.v), kept[:2])


@kit.only("cpu")
def test_a_models_own_weights():
    from transformers import AutoModelForCausalLM

    import kvops.hf
    from kvops import demo

    model = AutoModelForCausalLM.from_pretrained(demo.MODEL)
    weights = kvops.hf.output_weights(model)
    layers = model.model.layers
    assert len(weights) == len(layers)
    assert all(x.data_ptr() == layer.self_attn.o_proj.weight.data_ptr() for x, layer in zip(weights, layers))
    policy = kvops.CriticalKV(24, window=4).for_model(model)
    assert policy == kvops.CriticalKV(24, window=4, w_o=weights) and policy.for_model(None) is policy
    assert kvops.SnapKV(64).for_model(model) == kvops.SnapKV(64)
    ids = torch.arange(1, 61)[None]
    with kvops.hf.compress(model, "criticalkv:budget=24,window=4") as block:
        model.generate(ids, max_new_tokens=4, do_sample=False)
    assert block.policy == policy and {x.tokens_kept for x in block.cache.stats()} == {24 + 3}
    with pytest.raises(ValueError, match="w_o must be the weights of the output projection.*got None"):
        kvops.hf.KVCache(kvops.hf.use_attention(model).config, kvops.CriticalKV(64))


def test_bad_input():
    k, v, q, w_o = inputs()
    for settings, parts, kind in (
        (
            dict(),
            ("CriticalKV: w_o must be the weights of the output projection", "output_weights", "got None"),
            ValueError,
        ),
        (dict(w_o=w_o[0]), (r"CriticalKV: w_o must be \[hidden, Hq \* dv\]", r"\[144\]"), ValueError),
        (dict(w_o=[w_o, 3]), ("CriticalKV: w_o must be a torch.Tensor or a list of them, got int",), TypeError),
        (dict(w_o=w_o[:, :100]), ("w_o must be", "a multiple of 2 heads"), ValueError),
        (dict(w_o=[w_o]), ("CriticalKV: w_o is a list, so layer must be an int, got None",), TypeError),
        (
            dict(w_o=w_o, first_stage_ratio=1.5),
            (r"CriticalKV: first_stage_ratio must be in \[0, 1\], got 1.5",),
            ValueError,
        ),
        (dict(w_o=w_o, epsilon=-1.0), ("CriticalKV: epsilon must be at least 0, got -1.0",), ValueError),
        (dict(w_o=w_o, epsilon="x"), ("CriticalKV: epsilon must be a float, got str",), TypeError),
    ):
        with kit.refuses(*parts, kind=kind):
            kvops.CriticalKV(40, window=8, **settings).compress(k, v, q)
    with kit.refuses("CriticalKV: layer must name one of the 1 weights of w_o, got layer 3"):
        kvops.CriticalKV(40, window=8, w_o=[w_o]).compress(k, v, q, layer=3)
    with kit.refuses("CriticalKV: w_o must have the weights of each layer that evicts, expected 2, got 1"):
        kvops.Cache(kvops.CriticalKV(40, w_o=[w_o]), layer=0, num_layers=2)
