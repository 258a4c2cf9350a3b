"""KVgrad in transformers: gradients of the passes, against autograd through one plain forward of both readings."""

import threading
from dataclasses import fields, replace

import pytest
import torch

transformers = pytest.importorskip("transformers")

import kvops  # noqa: E402
import kvops.hf  # noqa: E402
from kvops.hf import KVCache, use_attention  # noqa: E402
from kvops.hf.generation import _repeating  # noqa: E402
from kvops.methods.repeating import repeat_ids  # noqa: E402
from test_hf import make_model, make_prompts  # noqa: E402
from test_hf_inputs import GREEDY  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
POLICY = kvops.KVzip(16, gradients=True, chunk=25, instruction=(5, 6, 7), next_instruction=(8, 9), suffix=(4,))


def noting(found):
    return lambda module, args, out: found.append(out)


def formula(model, policy, ids):
    """The scores of all passes over one prompt, [layers][Hk, n]: autograd through eager attention, without a cache."""
    n, layers = ids.shape[1], model.model.layers
    heads, group = (
        model.config.num_key_value_heads,
        model.config.num_attention_heads // model.config.num_key_value_heads,
    )
    scores = torch.zeros(len(layers), heads, n, dtype=torch.float64)
    for first in range(0, n, policy.chunk):
        told = repeat_ids(policy, ids, torch.tensor([n]), first)
        outs, values, lasts = [], [], []
        handles = [layers[-1].register_forward_hook(noting(lasts))]
        for x in layers:
            handles += [x.self_attn.o_proj.register_forward_hook(noting(outs))]
            handles += [x.self_attn.v_proj.register_forward_hook(noting(values))]
        every = torch.cat((ids, told), 1)
        embedded = model.get_input_embeddings()(every).detach().requires_grad_()
        found = model(inputs_embeds=embedded, output_attentions=True, use_cache=False)
        [x.remove() for x in handles]
        phi = lasts[0][:, n:].square().sum()  # of the pass; the prompt's own rows do not see it
        gradients = torch.autograd.grad(phi, outs)
        sinks, chunk = min(4, first), slice(first, min(n, first + policy.chunk))
        for i, layer in enumerate(layers):
            logits = found.attentions[i][0, :, n:].double().log()
            seen = torch.cat((logits[..., :sinks], logits[..., chunk], logits[..., n:]), -1)
            weights = seen.softmax(-1)[..., sinks : sinks + chunk.stop - chunk.start]  # [Hq, t, chunk]
            v = values[i][0, chunk].double().unflatten(1, (heads, -1)).repeat_interleave(group, 1)
            w_o = layer.self_attn.o_proj.weight.double().unflatten(1, (heads * group, -1))
            norms = torch.einsum("ohd,nhd->hno", w_o, v).norm(dim=-1)
            sensitive = gradients[i][0, n:].double().norm(dim=-1)
            rows = (weights * sensitive[:, None]).amax(1) * norms
            scores[i, :, chunk] = torch.maximum(scores[i, :, chunk], rows.unflatten(0, (heads, group)).amax(1))
    return scores.detach()


def scored(model, policy, ids, mask=None):
    """The scores of a cache after its passes, by layer: [b, Hk, n]."""
    found = []

    class Kept(kvops.KVzip):
        def choose(self, scores, view, budget, **options):
            found.append(scores)
            return super().choose(scores, view, budget, **options)

    kept = Kept(**{x.name: getattr(policy, x.name) for x in fields(policy)})
    kvops.hf.generate(model, kept, ids, attention_mask=mask, **GREEDY)
    return found


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_the_scores_are_those_of_the_formula(kind, mode):
    eager = make_model(kind, num_key_value_heads=2)
    eager.set_attn_implementation("eager")
    model = make_model(kind, num_key_value_heads=2)
    ids, _ = make_prompts(60)
    with getattr(torch, mode)():
        found = scored(model, POLICY, ids)
    want = formula(eager, POLICY, ids)
    for i, scores in enumerate(found):
        torch.testing.assert_close(scores[0].double(), want[i], atol=1e-6, rtol=2e-4)
    assert all(x.grad is None for x in model.parameters())


def test_a_padded_batch_is_that_of_its_rows():
    model = make_model(num_key_value_heads=2)
    ids, mask = make_prompts(60, 43)
    together = scored(model, POLICY, ids, mask)
    for row, n in enumerate((60, 43)):
        alone = scored(model, POLICY, ids[row : row + 1, 60 - n :])
        for x, y in zip(together, alone):
            torch.testing.assert_close(x[row, :, 60 - n :], y[0], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("settings", [{}, dict(head_mode="adaptive"), dict(head_mode="adaptive", scope="model")])
def test_blocks_and_generate(settings):
    model = make_model(num_key_value_heads=2)
    ids, mask = make_prompts(60, 43)
    policy = replace(POLICY, **settings)
    said = kvops.hf.generate(model, policy, ids, attention_mask=mask, **GREEDY)
    with kvops.hf.compress(model, policy) as compressed:
        assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), said)
    held = torch.stack([x.cache.lengths - 7 for x in compressed.cache.evicting_layers]).double()
    assert abs(held.mean().item() - 16) < 1
    assert len(compressed.cache.stages) == 2


def test_models_that_autograd_cannot_follow():
    """A layer that writes to what it was given, and one that cuts the graph, raise by name."""
    ids, _ = make_prompts(40)
    for place, spoil in (
        ("model.layers.2.mlp.gate_proj", lambda module, args, out: out.exp_().log_()),
        ("model.layers.2", lambda module, args, out: out.detach()),
    ):
        model = make_model(num_key_value_heads=2)
        model.get_submodule(place).register_forward_hook(spoil)
        with pytest.raises(NotImplementedError, match="KVgrad expected a model that autograd can follow, got LlamaFor"):
            kvops.hf.generate(model, POLICY, ids, **GREEDY)


def test_threads_share_a_model():
    model = use_attention(make_model(num_key_value_heads=2))
    prompts = [make_prompts(40 + i, seed=i)[0] for i in range(4)]
    alone = [kvops.hf.generate(model, POLICY, x, **GREEDY) for x in prompts]
    found = {}

    def work(i):
        found[i] = [kvops.hf.generate(model, POLICY, prompts[i], **GREEDY) for _ in range(3)]

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [x.start() for x in workers]
    [x.join() for x in workers]
    assert all(torch.equal(x, alone[i]) for i in range(4) for x in found[i])


def test_the_cache_is_as_it_was():
    """The gradients are computed beside it; a failed pass changes nothing."""
    model = use_attention(make_model(num_key_value_heads=2))
    ids, mask = make_prompts(60)
    policy = kvops.hf.for_model(POLICY, model)
    cache = KVCache(model.config, policy)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    before = [(x.cache.k.clone(), x.cache.v.clone()) for x in cache.evicting_layers]
    hooks = sum(len(x._forward_hooks) for x in model.modules())
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        kvops.hf.repeat(model, cache, ids)
    handle.remove()
    assert sum(len(x._forward_hooks) for x in model.modules()) == hooks
    for layer, (k, v) in zip(cache.evicting_layers, before):
        assert torch.equal(layer.cache.k, k) and torch.equal(layer.cache.v, v)
    with torch.no_grad():
        kvops.hf.repeat(model, cache, ids)
    assert [len(x.cache) for x in cache.evicting_layers] == [16] * 3
    with pytest.raises(ValueError, match="KVzip: with gradients=True a pass needs the norms of its rows' gradients"):
        fresh = KVCache(model.config, policy)
        with torch.no_grad():
            model(ids, past_key_values=fresh)
            with _repeating(fresh.evicting_layers[0]).repeating(0):
                model(ids[:, :5], past_key_values=fresh)
