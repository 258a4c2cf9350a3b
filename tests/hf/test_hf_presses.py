"""The presses that docs/porting_a_press.md ports, compared with the formulas of kvpress in plain PyTorch."""

from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

import kit  # noqa: E402
import kvops  # noqa: E402
import kvops.hf  # noqa: E402
from test_docs import blocks  # noqa: E402
from test_hf import make_model, make_prompts  # noqa: E402
from test_hf_inputs import GREEDY, watch  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
PAGE = Path(__file__).parents[2] / "docs/porting_a_press.md"


@pytest.fixture(scope="module")
def ported():
    names = {"__name__": "ported"}
    for tag, code in blocks(PAGE):
        if tag == "python" and "@dataclass" in code:
            exec(compile(code.partition("\nconfig = ")[0], PAGE.name, "exec"), names)
    return names


def best(scores, count, sinks=0):
    """The slots that a press keeps: the first ones, and the highest scores of the others."""
    scores = scores.clone()
    scores[:, :sinks] = torch.inf
    return scores.topk(count).indices.sort().values


def test_q_filters(ported):
    k, v = kit.kv(2, 3, 70, 16)
    filters = kit.randn(4, 3, 16)
    kept = ported["QFilters"](20, filters=filters).compress(k, v, layer=2)
    want = -(filters[2][None, :, None] * k).sum(-1)
    for b in range(2):
        assert torch.equal(kept.indices[b], best(want[b], 20))


def test_leverage_scores(ported):
    model = make_model("llama", num_key_value_heads=2)
    ids, mask = make_prompts(50, 37)
    calls, handles = watch(model)
    with kvops.hf.compress(model, ported["Leverage"](16, sinks=2)) as compressed:
        model.generate(ids, attention_mask=mask, **GREEDY)
    [x.remove() for x in handles]
    hidden = {layer: x for layer, x in reversed(calls)}  # of the prompt, each layer's first call
    for layer, block in enumerate(model.model.layers):
        for row, length in enumerate((50, 37)):
            keys = block.self_attn.k_proj(hidden[layer][row, 50 - length :]).detach().double()
            keys = keys.unflatten(1, (2, -1)).transpose(0, 1)  # [Hk, n, d]
            inverse = torch.linalg.inv(keys.mT @ keys + 0.01 * torch.eye(16))
            leverage = torch.einsum("hid,hde,hie->hi", keys, inverse, keys)
            cache = compressed.cache.evicting_layers[layer].cache
            kept = cache.positions[row, :, :16] - (50 - length)
            assert torch.equal(kept, best(leverage, 16, 2))
    with pytest.raises(ValueError, match="Leverage: expected a prompt in one step, got 20 of "):
        kvops.hf.generate(model, ported["Leverage"](16), ids, attention_mask=mask, prefill_chunk_size=20, **GREEDY)


def test_gates(ported):
    model = make_model("qwen2", num_key_value_heads=2)
    ids, _ = make_prompts(40)
    width, layers = model.config.hidden_size, model.config.num_hidden_layers
    gates = tuple(torch.nn.Linear(width, 2) for _ in range(layers))
    policy = ported["Gated"](20, gates=gates, buffer=None)
    calls, handles = watch(model)
    with kvops.hf.compress(model, policy) as compressed, torch.no_grad():
        model.generate(ids, **GREEDY)
        want = [gates[layer](x).transpose(1, 2)[0] for layer, x in calls[:layers]]
    [x.remove() for x in handles]
    for layer in compressed.cache.evicting_layers:
        cache = layer.cache
        assert torch.equal(cache.positions[0, :, :20], best(want[cache.layer], 20))
        assert cache.state["scores"].shape == cache.k.shape[:3]
    shared = ported["Gated"](20, gates=gates, buffer=None, head_mode="adaptive")
    with kvops.hf.compress(model, shared) as compressed:
        model.generate(ids, **GREEDY)
    for layer in compressed.cache.evicting_layers:
        kept, scores = layer.cache.positions[0], torch.stack(want)[layer.cache.layer]
        for head, count in enumerate(kvops.head_budgets(scores[None].float(), 20, 0)[0].tolist()):
            assert torch.equal(kept[head, :count], best(scores, count)[head])
