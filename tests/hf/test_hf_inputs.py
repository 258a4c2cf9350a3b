"""Policies that read what the attention modules of a model are called with: hidden states, token ids and the module."""

from dataclasses import KW_ONLY, dataclass, replace

import pytest
import torch

transformers = pytest.importorskip("transformers")

import kit  # noqa: E402
import kvops  # noqa: E402
import kvops.hf  # noqa: E402
from kvops.hf import KVCache, use_attention  # noqa: E402
from test_hf import make_model, make_prompts  # noqa: E402
from test_hf_kvzip import POLICY  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
SEEN = []


@dataclass(frozen=True, eq=False)
class Recorder(kvops.KeyPolicy):
    """Keeps the newest tokens, and remembers what each step has shown."""

    needs = kvops.Needs(inputs=True)

    def scores(self, view):
        return view.row_positions().float()

    def evict(self, view):
        SEEN.append((view.layer, view.hidden, view.token_ids, view.module))
        return super().evict(view)


@dataclass(frozen=True, eq=False)
class Gate(kvops.KeyPolicy):
    """Scores a token once, by a linear gate over its hidden state, as KVzap does."""

    needs = kvops.Needs(inputs=True, per_slot=("scores",))

    _: KW_ONLY
    gates: tuple[torch.Tensor, ...] = ()

    def scores(self, view):
        return view.state["scores"]

    def evict(self, view):
        new = (view.hidden.float() @ self.gates[view.layer]).transpose(1, 2)
        old = view.state.get("scores", new[:, :, :0])
        view.state["scores"] = torch.cat((old, new), 2)
        return super().evict(view)


def attention_modules(model):
    return {x.layer_idx: x for name, x in model.named_modules() if name.endswith("self_attn")}


def watch(model):
    """Record the hidden states of every call of an attention module, by layer, until the handles are removed."""
    calls, handles = [], []
    for layer, module in attention_modules(model).items():

        def note(_, args, kwargs, layer=layer):
            calls.append((layer, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]))

        handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
    return calls, handles


def hooks(model):
    return sum(len(x._forward_pre_hooks) for x in model.modules())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("lengths", [(20,), (20, 13)], ids=["alone", "padded"])
@pytest.mark.parametrize("how", ["generate", "block", "forward"])
def test_a_policy_sees_the_inputs_of_every_step(kind, lengths, how):
    model = make_model(kind)
    ids, mask = make_prompts(*lengths)
    SEEN.clear()
    calls, handles = watch(model)
    before = hooks(model)
    if how == "generate":
        sequences = kvops.hf.generate(model, Recorder(12), ids, attention_mask=mask, **GREEDY)
    else:
        with kvops.hf.compress(model, Recorder(12)), torch.no_grad():
            if how == "block":
                sequences = model.generate(ids, attention_mask=mask, **GREEDY)
            else:
                cache = model(ids, attention_mask=mask).past_key_values
                sequences = torch.cat((ids, ids[:, :1], ids[:, :0]), 1)
                model(ids[:, :1], attention_mask=torch.cat((mask, mask[:, :1] * 0 + 1), 1), past_key_values=cache)
    assert hooks(model) == before
    layers = sorted({x[0] for x in SEEN})
    evicting = [i for i, x in enumerate(KVCache(model.config, kvops.Full()).layers) if hasattr(x, "cache")]
    modules = attention_modules(model)
    for order, layer in enumerate(evicting):
        assert order in layers
        mine, want = [x[1:] for x in SEEN if x[0] == order], [x for i, x in calls if i == layer]
        assert len(mine) == len(want) > 1 and all(torch.equal(x[0], y) for x, y in zip(mine, want))
        assert all(x[2] is modules[layer] for x in mine)
        read = torch.cat([x[1] for x in mine], 1)
        assert torch.equal(read, sequences[:, : read.shape[1]]) and read.shape[1] >= ids.shape[1] + 1
    [x.remove() for x in handles]


def test_nothing_is_captured_unless_a_policy_needs_it(monkeypatch):
    model, (ids, _) = make_model(), make_prompts(20)
    before = hooks(model)
    with kvops.hf.compress(model, kvops.KeyDiff(12)) as compressed:
        assert hooks(model) == before
        model.generate(ids, **GREEDY)
        assert all(x.cache._inputs is None and x.inputs is None for x in compressed.cache.evicting_layers)
    with kvops.hf.compress(model, Recorder(12)) as compressed:
        assert hooks(model) > before
        model.generate(ids, **GREEDY)
        layers = compressed.cache.evicting_layers
        assert all(x.cache._inputs is None and x.inputs is None for x in layers)  # no activations outlive a step
        model.generate(ids, past_key_values=KVCache(model.config, kvops.KeyDiff(12)), **GREEDY)
    assert hooks(model) == before


def test_what_a_gate_keeps():
    """A ported press: one-shot scores of the prompt; decode and chunks score each token once, when it arrives."""
    model, (ids, mask) = make_model(num_key_value_heads=2), make_prompts(40, 31)
    layers, hidden = model.config.num_hidden_layers, model.config.hidden_size
    gates = tuple(kit.randn(hidden, 2, seed=i) for i in range(layers))
    policy = Gate(12, sinks=2, gates=gates, buffer=1)
    calls, handles = watch(model)
    with kvops.hf.compress(model, policy) as compressed:
        model.generate(ids, attention_mask=mask, **GREEDY)
    [x.remove() for x in handles]
    for layer in range(layers):
        scores = [(x.float() @ gates[layer]).transpose(1, 2) for i, x in calls if i == layer]
        whole = torch.cat(scores, 2)
        for row, pads in enumerate((0, 9)):
            kept = list(range(pads, 40))
            for head in range(2):
                kept = list(range(pads, 40))
                for n in range(40, whole.shape[2] + 1):  # the prompt, then one token at a time
                    kept = sorted(kept + ([n - 1] if n > 40 else []))
                    order = sorted(kept[2:], key=lambda j: -whole[row, head, j].item())  # noqa: B023
                    kept = kept[:2] + sorted(order[:10])
                found = compressed.cache.evicting_layers[layer].cache
                assert found.positions[row, head].tolist() == kept
    chunks = kvops.hf.generate(model, policy, ids, attention_mask=mask, prefill_chunk_size=15, **GREEDY)
    assert chunks.shape[1] == 48


def test_kvzip_plus_is_the_one_shot_call():
    """The queries, keys and hidden states of the passes, recorded beside the run."""
    model = use_attention(make_model("qwen2"))
    ids, _ = make_prompts(60)
    policy = kvops.hf.for_model(replace(POLICY, plus=True), model)
    assert policy.w_o is not None and POLICY.w_o is None
    cache = KVCache(model.config, policy)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        before = [(x.cache.k.clone(), x.cache.v.clone()) for x in cache.evicting_layers]
        recorded = []
        for x in cache.evicting_layers:
            layer, attention = x.cache, x.cache.attention
            rows = []
            recorded.append(rows)

            def note(q, k, v, layer=layer, attention=attention, rows=rows, **options):
                rows.append((q.clone(), k[:, :, 60:].clone(), layer._inputs.hidden.clone()))
                return attention(q, k, v, **options)

            layer.attention = note
        kvops.hf.repeat(model, cache, ids)
    for i, (layer, rows, (k, v)) in enumerate(zip(cache.evicting_layers, recorded, before)):
        q, own = (torch.cat([x[j] for x in rows], 2) for j in (0, 1))
        passes = [x[0].shape[2] for x in rows]
        call = dict(k_repeat=own, passes=passes, hidden_repeat=torch.cat([x[2] for x in rows], 1))
        want = policy.compress(k, v, q, layer=i, num_layers=len(before), **call)
        assert torch.equal(layer.cache.positions, want.indices)
        plain = replace(policy, plus=False).compress(k, v, q, k_repeat=own, passes=passes)
        assert not torch.equal(plain.indices, want.indices)


@pytest.mark.parametrize("settings", [{}, dict(head_mode="adaptive"), dict(head_mode="adaptive", scope="model")])
def test_kvzip_plus_of_a_padded_batch_is_that_of_its_rows(settings):
    model = make_model("llama")
    ids, mask = make_prompts(60, 43)
    policy = replace(POLICY, plus=True, **settings)
    options = dict(**GREEDY, return_dict_in_generate=True)
    together = kvops.hf.generate(model, policy, ids, attention_mask=mask, **options).sequences
    for row, length in enumerate((60, 43)):
        alone = kvops.hf.generate(model, policy, ids[row : row + 1, 60 - length :], **options).sequences
        assert torch.equal(alone[0, length:], together[row, 60:])
    with kvops.hf.compress(model, policy) as compressed:  # takes w_o from the model
        assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), together)
        assert [x.name for x in compressed.cache.stages] == ["prefill", "decode"]


def test_refusals():
    model, (ids, _) = make_model(), make_prompts(20)
    with pytest.raises(ValueError, match="Recorder.* reads hidden states, which .* call kvops.hf.use_attention"):
        KVCache(model.config, Recorder(12))
    model = use_attention(model)
    for policy in (Recorder(12), Gate(12)):
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"View.hidden: expected it from the model, got none; "):
            model(ids, past_key_values=KVCache(model.config, policy))
    with kvops.hf.compress(model, Recorder(12)), pytest.raises(RuntimeError, match=r"View.token_ids: expected it"):
        model.generate(inputs_embeds=model.get_input_embeddings()(ids), **GREEDY)
    with (
        pytest.raises(ValueError, match="Recorder: continuous_batching does not pass hidden states and token ids"),
        kvops.hf.continuous_batching(make_model(), Recorder(12)),
    ):
        pass
    with pytest.raises(RuntimeError, match=r"View.hidden: expected it from the model, got none"):
        Recorder(4).evict(kvops.View(*kit.kv(1, 2, 9, 16)))
    dense = replace(Recorder(12), buffer=None)
    with pytest.raises(ValueError, match="Recorder: a PagedCache does not pass hidden states"):
        dense.check_paged_cache(2)
