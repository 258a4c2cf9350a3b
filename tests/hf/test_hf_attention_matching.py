"""Attention Matching in transformers: the passes' queries, the biases in the model's attention, budgets of a model."""

from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers")

import kvops  # noqa: E402
import kvops.hf  # noqa: E402
from hf_architectures import tiny_model  # noqa: E402
from kvops.hf import use_attention  # noqa: E402
from kvops.methods.queries import RecordQueries  # noqa: E402
from kvops.methods.repeating import repeat_ids  # noqa: E402
from test_hf import make_model, make_prompts  # noqa: E402
from test_hf_kvzip import GREEDY, prefilled  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
WORDS = dict(instruction=(5, 6, 7), next_instruction=(8, 9), suffix=(4,))
POLICY = kvops.AttentionMatching(16, chunk=25, **WORDS)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_cache_holds_what_a_single_call_returns(kind):
    """Reference queries from one plain forward over the prompt and the pass."""
    model = use_attention(make_model(kind))
    ids, _ = make_prompts(60)
    cache, _ = prefilled(model, POLICY, ids)
    before = [(layer.cache.k.clone(), layer.cache.v.clone()) for layer in cache.evicting_layers]
    passes = {}
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        observe = kvops.AttentionMatching.observe_passes

        def noting(self, view, found, logits):
            passes[view.layer] = found
            observe(self, view, found, logits)

        patch.setattr(kvops.AttentionMatching, "observe_passes", noting)
        kvops.hf.repeat(model, cache, ids)
    queries = [[] for _ in before]
    for first in (0, 25, 50):
        told = repeat_ids(POLICY, ids, torch.tensor([60]), first)
        plain, _ = prefilled(model, RecordQueries(last=told.shape[1]), torch.cat((ids, told), 1))
        for own, layer in zip(queries, plain.evicting_layers):
            own.append(layer.cache.last_queries)
    for i, (layer, own, (k, v)) in enumerate(zip(cache.evicting_layers, queries, before)):
        torch.testing.assert_close(passes[i][..., :-1], torch.cat(own, 2), rtol=1e-4, atol=1e-5)
        want = POLICY.compress(k, v, passes[i][..., :-1], row_weights=passes[i][..., -1])
        assert torch.equal(layer.cache.positions, want.indices) and torch.equal(layer.cache.k, want.k)
        torch.testing.assert_close(layer.cache.v, want.v, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(layer.cache.state["key_bias"], want.key_bias, rtol=1e-3, atol=1e-4)
    assert [x.name for x in cache.stages] == ["prefill", "decode"]


@pytest.mark.parametrize("mode", [{}, dict(head_mode="adaptive"), dict(head_mode="adaptive", scope="model")])
def test_budgets_and_a_further_turn(mode):
    """Heads of a layer or of the model share the budget; biases and values both reach the model's attention."""
    model = use_attention(make_model("llama"))
    ids, turn = make_prompts(80)[0], make_prompts(12)[0]
    policy = kvops.AttentionMatching(40, sinks=1, **mode, **WORDS)
    found = []
    for variant in (policy, replace(policy, max_bias=0.0), replace(policy, ridge=1e9)):
        cache, _ = prefilled(model, variant, ids)
        positions = torch.arange(80, 92)[None]
        with torch.no_grad():
            kvops.hf.repeat(model, cache, ids)
            found.append(model(turn, position_ids=positions, past_key_values=cache).logits)
        kept = torch.cat([x.cache.lengths for x in cache.evicting_layers], 1) - 12
        assert abs(kept.float().mean() - 40) < 1 and (mode or kept.eq(40).all())
    assert all(x.isfinite().all() for x in found)
    assert min((found[0] - x).norm() for x in found[1:]) > 0.1


def test_a_padded_batch_generates_as_its_rows_alone():
    model = use_attention(make_model("llama"))
    ids, mask = make_prompts(60, 41)
    policy = replace(POLICY, budget=30)
    together = kvops.hf.generate(model, policy, input_ids=ids, attention_mask=mask, **GREEDY)[:, 60:]
    for row in range(2):
        own = ids[row : row + 1, mask[row].bool()]
        alone = kvops.hf.generate(model, policy, input_ids=own, **GREEDY)[:, own.shape[1] :]
        assert torch.equal(together[row], alone[0])


def test_what_fits_the_budget_is_the_whole_cache():
    model = use_attention(make_model("llama"))
    ids, _ = make_prompts(50)
    want = model.generate(ids, **GREEDY)
    assert torch.equal(kvops.hf.generate(model, replace(POLICY, budget=50), input_ids=ids, **GREEDY), want)


def test_refusals():
    model, (ids, _) = use_attention(tiny_model("gemma2")), make_prompts(60)
    with pytest.raises(ValueError, match="AttentionMatching: softcap must be 0"):
        kvops.hf.generate(model, POLICY, input_ids=ids, **GREEDY)
    with pytest.raises(ValueError, match="AttentionMatching: instruction, next_instruction, suffix must be the token"):
        kvops.hf.generate(make_model("llama"), kvops.AttentionMatching(16), input_ids=ids, **GREEDY)
