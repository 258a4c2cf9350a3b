"""Learned gates on transformers models: what they are fitted to, and what KVzap keeps."""

from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers")

import kvops  # noqa: E402
import kvops.hf  # noqa: E402
from kvops import demo  # noqa: E402
from kvops.hf.gates import LEAST  # noqa: E402
from kvops.methods.repeating import repeat_ids  # noqa: E402
from test_hf import make_model, make_prompts  # noqa: E402
from test_hf_inputs import GREEDY, watch  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def bed():
    """The demo's model and tokenizer, three texts, and what gates are fitted to."""
    model = transformers.AutoModelForCausalLM.from_pretrained(demo.MODEL, attn_implementation="eager")
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo.MODEL)
    ids = tokenizer(demo.CALIBRATION.read_text(), return_tensors="pt")["input_ids"]
    texts = ids[0, : 3 * 80].view(3, 80)
    return model, tokenizer, texts, kvops.hf.gate_data(model, texts, tokenizer=tokenizer)


def test_data_are_hidden_states_and_log_scores(bed):
    """Against KVzip+ in plain PyTorch: a text and its repetition in one forward with eager attention."""
    model, tokenizer, texts, (hidden, scores) = bed
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    group = model.config.num_attention_heads // heads
    words = kvops.KVzip(8, **kvops.hf.repeat_prompts(tokenizer))
    assert len(hidden) == len(scores) == layers
    for i, text in enumerate(texts):
        n, at = len(text), slice(80 * i, 80 * i + 80)
        again = repeat_ids(words, text[None], torch.tensor([n]), 0)
        calls, handles = watch(model)
        with torch.no_grad():
            out = model(torch.cat((text[None], again), 1), output_attentions=True, use_cache=False)
        [x.remove() for x in handles]
        for layer, block in enumerate(model.model.layers):
            states = calls[layer][1][0].double()
            torch.testing.assert_close(hidden[layer][at].double(), states[:n], atol=1e-4, rtol=1e-4)
            values = block.self_attn.v_proj(calls[layer][1])[0, :n].detach().double()
            values = values.unflatten(1, (heads, -1)).repeat_interleave(group, 1)  # [n, Hq, dv]
            weights = block.self_attn.o_proj.weight.detach().double().unflatten(1, (heads * group, -1))
            norms = torch.einsum("ohd,nhd->hno", weights, values).norm(dim=-1)
            added = out.attentions[layer][0, :, n:, :n].double() / states[n:].norm(dim=-1)[:, None]
            want = (added.amax(1) * norms).unflatten(0, (heads, group)).amax(1).clamp(min=LEAST).log().mT
            torch.testing.assert_close(scores[layer][at].double(), want, atol=2e-3, rtol=1e-4)


def test_gates_of_a_model_keep_nearly_what_kvzip_keeps(bed, tmp_path):
    """On the texts that they were fitted to, gates find more of KVzip+'s tokens than chance does."""
    model, tokenizer, texts, data = bed
    path = tmp_path / "gates.safetensors"
    kvops.fit_gates(*data).save(path)
    with kvops.hf.compress(model, f"kvzap:budget=24,sinks=0,recent=0,gates={path}") as compressed:
        model.generate(texts[:1], **GREEDY)
    shared = []
    for layer in compressed.cache.evicting_layers:
        want = data[1][layer.cache.layer][:80].mT.topk(24).indices
        for head, kept in enumerate(layer.cache.positions[0, :, :24]):
            shared.append(len(set(kept.tolist()) & set(want[head].tolist())) / 24)
    assert sum(shared) / len(shared) > 0.6  # of random tokens 0.3


@pytest.mark.parametrize("mode", ["per_head", "adaptive", "threshold"])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_prompts_and_decode(kind, mode):
    """Padded batches keep what the scores of all tokens say, the rows as alone."""
    model = make_model(kind, num_key_value_heads=2)
    ids, mask = make_prompts(50, 37)
    size, layers = model.config.hidden_size, model.config.num_hidden_layers
    random = torch.Generator().manual_seed(1)
    gates = kvops.Gates([[torch.randn(s, generator=random) for s in ((2, size), (2,))] for _ in range(layers)])
    policy = kvops.KVzap(16, gates=gates, sinks=2, recent=3, buffer=4)
    if mode == "adaptive":
        policy = replace(policy, head_mode="adaptive")
    elif mode == "threshold":
        policy = replace(policy, budget=1.0, head_mode="adaptive", threshold=0.5)
    calls, handles = watch(model)
    with kvops.hf.compress(model, policy) as compressed:
        together = model.generate(ids, attention_mask=mask, **GREEDY)
    [x.remove() for x in handles]
    for layer in compressed.cache.evicting_layers:
        cache = layer.cache
        hidden = torch.cat([x for i, x in calls if i == cache.layer], 1)
        scores = gates.scores(hidden, cache.layer)
        at = torch.arange(hidden.shape[1] - cache._since, hidden.shape[1]).expand(2, 2, -1)
        positions = torch.cat((cache._kept, at), 2)
        real = positions >= 0
        torch.testing.assert_close(
            cache.state["scores"].where(real, 0), scores.gather(2, positions.clamp(min=0)).where(real, 0)
        )
        if mode == "threshold":
            inner = scores[:, :, 2 : cache._evicted_at - 3] >= 0.5
            assert torch.equal(cache.lengths[0] - cache._since, 5 + inner[0].sum(-1))
    for row, n in enumerate((50, 37)):
        with kvops.hf.compress(model, policy):
            alone = model.generate(ids[row : row + 1, 50 - n :], **GREEDY)
        assert torch.equal(alone[0, n:], together[row, 50:])


def test_refusals(bed):
    model, tokenizer, texts, _ = bed
    for wrong in (texts[0], texts[:0], texts.float(), texts[:, :7]):
        with pytest.raises(ValueError, match=r"gate_data: ids must be int64 \[b, n\] with n >= 8, got"):
            kvops.hf.gate_data(model, wrong, tokenizer=tokenizer)
    with pytest.raises(TypeError, match="gate_data: ids must be a torch.Tensor, got list"):
        kvops.hf.gate_data(model, [1, 2], tokenizer=tokenizer)
    own = make_model()
    own.register_forward_pre_hook(lambda *_: pytest.fail("the model has run"))
    ids, _ = make_prompts(40)
    with pytest.raises(ValueError, match=r"KVzap: gates must be .*\(model, ids, tokenizer=tokenizer\)"):
        kvops.hf.generate(own, "kvzap:budget=16", ids, **GREEDY)
    wrong = kvops.Gates([[torch.ones(2, 32), torch.ones(2)]])
    with pytest.raises(ValueError, match="KVzap: gates must be those of the 3 layers that evict, got Gates"):
        kvops.hf.generate(own, kvops.KVzap(16, gates=wrong), ids, **GREEDY)
