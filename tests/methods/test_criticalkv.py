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
    rest = [i for i in ranks((s / w + epsilon) * norms) if i not in protected and i not in kept]
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
    weighted = (s / 8 + 1e-4) * torch.einsum("bhnd,chgd->bhgnc", v.double(), weights).abs().sum(-1).mean(2)
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
    policy = kvops.hf.for_model(kvops.CriticalKV(24, window=4), model)
    assert policy == kvops.CriticalKV(24, window=4, w_o=weights) and kvops.hf.for_model(policy, None) is policy
    assert kvops.hf.for_model("snapkv:budget=64", model) == kvops.SnapKV(64)
    ids = torch.arange(1, 61)[None]
    with kvops.hf.compress(model, "criticalkv:budget=24,window=4") as block:
        model.generate(ids, max_new_tokens=4, do_sample=False)
    assert block.policy == policy and {x.tokens_kept for x in block.cache.stats()} == {24 + 3}
    with pytest.raises(ValueError, match="w_o must be the weights of the output projection.*got None"):
        kvops.hf.KVCache(kvops.hf.use_attention(model).config, kvops.CriticalKV(64))


# ---- the weights of a model whose output projections compute something else than their `weight` says ----


class Adapted(torch.nn.Module):
    """A low-rank adapter, as PEFT's: `weight` is the base's. Dropout in training."""

    def __init__(self, base):
        super().__init__()
        self.base, self.on, self.dropout = base, True, torch.nn.Dropout(0.5)
        self.a, self.b = (torch.nn.Linear(*x, bias=False) for x in ((base.in_features, 8), (8, base.out_features)))

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        return self.base(x) + 8 * self.on * self.b(self.a(self.dropout(x)))

    def product(self):
        return self.base.weight + 8 * self.on * self.b.weight @ self.a.weight


class Offloaded(torch.nn.Linear):
    """A linear layer of which accelerate's AlignDevicesHook holds the weights: on the meta device between calls."""

    def __init__(self, base):
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.held = base.weight.detach().clone()
        self.register_forward_pre_hook(lambda *_: self.put(self.held))
        self.register_forward_hook(lambda *_: self.put(self.held.to("meta")))

    def put(self, weight):
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def product(self):
        return self.held


class Packed(torch.nn.Module):
    """A quantized layer: eight bits and a scale per row, no `weight`, and a bias far larger than the weights."""

    def __init__(self, base):
        super().__init__()
        self.scale = base.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("packed", (base.weight.detach() / self.scale).round().to(torch.int8))
        self.shift = 300 * self.scale.squeeze(1)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.product().to(x.dtype), self.shift.to(x.dtype))

    def product(self):
        return self.scale * self.packed


class Rounding(torch.nn.Linear):
    """A linear layer that quantizes its inputs to eight bits, each by its largest element."""

    def __init__(self, base):
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight.data.copy_(base.weight.data)

    def forward(self, x):
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-3) / 127
        return super().forward((x / scale).round() * scale)

    def product(self):
        return self.weight


WRAPPERS = (Adapted, Offloaded, Packed, Rounding)


def wrapped(wrapper, dtype=torch.float32):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(vocab_size=101, hidden_size=48, intermediate_size=96, num_hidden_layers=2, initializer_range=0.15)
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    model = transformers.LlamaForCausalLM(config).eval().to(dtype)
    for layer in model.model.layers:
        layer.self_attn.o_proj = wrapper(layer.self_attn.o_proj).eval().to(dtype=dtype)
    return model, [layer.self_attn.o_proj for layer in model.model.layers]


@kit.only("cpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_weights_are_what_the_module_computes(wrapper, dtype, monkeypatch):
    import kvops.hf

    model, projections = wrapped(wrapper, dtype)
    with torch.inference_mode():
        weights = kvops.hf.output_weights(model)
    for x, projection in zip(weights, projections):
        assert x.shape == (48, 64) and x.dtype == dtype and x.is_contiguous() and not x.is_inference()
        assert not x.requires_grad
        close = dict(rtol=1e-6, atol=1e-6) if dtype == torch.float32 else dict(rtol=0.03, atol=0.002)
        torch.testing.assert_close(x, projection.product().detach().to(dtype), **close)
    calls = []
    hook = projections[0].register_forward_hook(lambda *_: calls.append(1))
    again = kvops.hf.output_weights(model)
    assert len(calls) == 1 and all(map(torch.equal, again, weights))  # the projection is recognized
    hook.remove()
    monkeypatch.setattr(kvops.linear, "_CHUNK", 5 * 64)
    monkeypatch.setattr(kvops.hf.weights, "_known", {})
    for x, y in zip(kvops.hf.output_weights(model), weights):  # products of fewer rows at a time may round otherwise
        torch.testing.assert_close(x, y, **close)


@kit.only("cpu")
def test_adapters_decide_what_is_kept():
    """The tokens are those that the model with merged weights keeps."""
    import kvops.hf

    model, projections = wrapped(Adapted)
    merged, _ = wrapped(lambda base: base)
    for layer, projection in zip(merged.model.layers, projections):
        layer.self_attn.o_proj.weight.data.copy_(projection.product())
    ids = torch.randint(2, 101, (1, 64))

    def kept(model):
        with kvops.hf.compress(model, kvops.CriticalKV(24, window=8)) as compressed:
            model.generate(ids, max_new_tokens=2, do_sample=False)
        return [layer.cache.positions for layer in compressed.cache.layers]

    assert all(map(torch.equal, kept(model), kept(merged)))


@kit.only("cpu")
def test_a_projection_that_changes_is_asked_anew():
    import kvops.hf

    model, projections = wrapped(Adapted)
    before = kvops.hf.output_weights(model)
    changes = (
        lambda x: setattr(x, "on", False),
        lambda x: setattr(x, "on", True),
        lambda x: x.a.weight.data.mul_(1.001),
        lambda x: x.base.weight.data[:, 3].add_(0.01),
        lambda x: x.double(),
        lambda x: x.float(),
    )
    for change in changes:
        change(projections[1])
        after = kvops.hf.output_weights(model)
        assert after[0] is before[0]
        torch.testing.assert_close(after[1], projections[1].product().detach(), rtol=1e-6, atol=1e-6)


@kit.only("cpu")
def test_dropout_is_off_while_the_projection_is_asked():
    import kvops.hf

    model, projections = wrapped(Adapted)
    expected = kvops.hf.output_weights(model)
    model.train()
    projections[0].base.eval()
    flags, state = [x.training for x in model.modules()], torch.get_rng_state()
    assert all(map(torch.equal, kvops.hf.output_weights(model), expected))
    assert flags == [x.training for x in model.modules()] and torch.equal(torch.get_rng_state(), state)


@kit.only("cpu")
def test_projections_that_are_not_linear_are_refused():
    import kvops.hf

    for forward, got in (
        (lambda x: torch.tanh(torch.nn.functional.linear(x, torch.eye(48, 64))), "by [0-9.]+% of their norm"),
        (lambda x: torch.nn.functional.linear(x, torch.full((48, 64), torch.nan)), "by nan% of their norm"),
        (lambda x: x[..., :0] @ x, "expected a linear output projection"),
    ):
        model, projections = wrapped(lambda base: base)
        projections[1].forward = forward
        with kit.refuses("output_weights: expected a linear output projection", "in layer 1, got a Linear", got):
            kvops.hf.output_weights(model)
    model, projections = wrapped(lambda base: base)
    model.model.layers[0].second = model.model.layers[0].self_attn.__class__(model.config, 0)
    with kit.refuses("expected one attention module with layer_idx=0", "found several"):
        kvops.hf.output_weights(model)


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
