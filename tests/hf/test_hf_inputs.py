"""Policies that read what the attention modules of a model are called with: hidden states, token ids and the module."""

import copy
import gc
import pickle
import weakref
from dataclasses import KW_ONLY, dataclass, replace

import pytest
import torch
from packaging.version import Version

transformers = pytest.importorskip("transformers")

import hf_architectures as tiny  # noqa: E402
import kit  # noqa: E402
import kvops  # noqa: E402
import kvops.hf  # noqa: E402
from kvops.hf import KVCache, batching, use_attention  # noqa: E402
from kvops.hf.drafts import WHOLE_CACHES  # noqa: E402
from kvops.hf.inputs import _watched, passing_inputs  # noqa: E402
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

    def remember(self, view):
        new = (view.hidden.float() @ self.gates[view.layer]).transpose(1, 2)
        old = view.state.get("scores", new[:, :, :0])
        view.state["scores"] = torch.cat((old, new), 2)


@dataclass(frozen=True, eq=False)
class Weak(kvops.KeyPolicy):
    """Keeps the newest tokens, and refers to the hidden states without holding them."""

    needs = kvops.Needs(inputs=True)

    def scores(self, view):
        return view.row_positions().float()

    def evict(self, view):
        SEEN.append(weakref.ref(view.hidden))
        return super().evict(view)


@dataclass(frozen=True, eq=False)
class Aligned(kvops.KeyPolicy):
    """Scores by the norms of the keys, and checks that the step's tokens are the last slots of all heads."""

    needs = kvops.Needs(inputs=True)

    def scores(self, view):
        t = view.hidden.shape[1]
        assert t == view.new
        last = torch.arange(view.seen - t, view.seen)
        assert (view.positions()[:, :, -t:] == last).all()
        SEEN.append(t)
        return torch.where(view.k.isnan().any(-1), torch.nan, view.k.float().norm(dim=-1))


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


@pytest.mark.skipif(
    Version(transformers.__version__) < Version(batching.MIN_TRANSFORMERS), reason="its engine has no registry"
)
def test_continuous_batching_refuses():
    with (
        pytest.raises(ValueError, match="Recorder: continuous_batching does not pass hidden states and token ids"),
        kvops.hf.continuous_batching(make_model(), Recorder(12)),
    ):
        pass


def test_refusals():
    model, (ids, _) = make_model(), make_prompts(20)
    with pytest.raises(ValueError, match="Recorder.* reads hidden states, which .* call kvops.hf.use_attention"):
        KVCache(model.config, Recorder(12))
    model = use_attention(model)
    for policy in (Recorder(12), Gate(12)):
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"View.hidden: expected what the attention module was"):
            model(ids, past_key_values=KVCache(model.config, policy))
    with (
        kvops.hf.compress(model, Recorder(12)),
        pytest.raises(RuntimeError, match=r"View.token_ids: expected it among"),
    ):
        model.generate(inputs_embeds=model.get_input_embeddings()(ids), **GREEDY)
    with pytest.raises(
        RuntimeError, match=r"View.hidden: expected what the attention module was called with, got none"
    ):
        Recorder(4).evict(kvops.View(*kit.kv(1, 2, 9, 16)))
    dense = replace(Recorder(12), buffer=None)
    with pytest.raises(ValueError, match="Recorder: a PagedCache does not pass hidden states"):
        dense.check_paged_cache(2)
    for policy in (Recorder(4), Gate(4)):
        with pytest.raises(ValueError, match="a single call has no model that passes hidden states and token ids"):
            policy.compress(*kit.kv(1, 2, 9, 16))
    with pytest.raises(ValueError, match="LAQ: stage1 gets no hidden states of the prompt"):
        kvops.LAQ(12, steps=2, window=4, stage1=Recorder(20))
    with pytest.raises(RuntimeError, match=r"Recorder: catch_up\(\) has no inputs"):
        kvops.Cache(Recorder(4)).catch_up()
    if "prompt_lookup_num_tokens" in vars(transformers.GenerationConfig()) and not WHOLE_CACHES:
        with pytest.raises(NotImplementedError, match="prompt lookup and assisted decoding .* without needs.inputs"):
            kvops.hf.generate(model, Recorder(12), ids, prompt_lookup_num_tokens=3, **GREEDY)


@pytest.mark.parametrize("settings", [dict(buffer=1), dict(buffer=None), dict(head_mode="adaptive", buffer=4)], ids=str)
@pytest.mark.parametrize("chunk", [None, 15])
def test_no_activation_outlives_its_step(settings, chunk):
    """Not in a pending eviction either, so a cache can be copied and pickled inside a block."""
    model, (ids, mask) = make_model(), make_prompts(40, 31)
    SEEN.clear()
    options = {} if chunk is None else {"prefill_chunk_size": chunk}
    with kvops.hf.compress(model, Weak(12, **settings)) as compressed:
        model.generate(ids, attention_mask=mask, **options, **GREEDY)
        gc.collect()
        assert len(SEEN) > 3 and all(x() is None for x in SEEN)
        assert compressed.cache._token_ids is None
        plain = pickle.dumps(compressed.cache)
        again = pickle.loads(plain)
        assert [x.cache.seen for x in again.evicting_layers] == [x.cache.seen for x in compressed.cache.evicting_layers]
        copy.deepcopy(compressed.cache)
    assert b"LlamaAttention" not in plain


def test_a_failed_step_leaves_nothing_for_the_next():
    model, (ids, _) = make_model(), make_prompts(20)
    projection = model.model.layers[0].self_attn.q_proj
    with kvops.hf.compress(model, Recorder(12)) as compressed, torch.no_grad():
        out = model(ids)
        broken = projection.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, :1], past_key_values=out.past_key_values)
        broken.remove()
        assert all(x.inputs is None for x in compressed.cache.evicting_layers)
        assert compressed.cache._token_ids is None


def test_several_blocks_share_the_hooks():
    model, before = make_model(), hooks(make_model())
    with kvops.hf.compress(model, Recorder(12)):
        one = hooks(model)
        with kvops.hf.compress(model, Recorder(8)), kvops.hf.compress(model, kvops.KeyDiff(8)):
            assert hooks(model) == one > before
        assert hooks(model) == one
    assert hooks(model) == before


def test_steps_of_heads_that_differ_are_the_last_slots():
    """The tokens since the last eviction are the same columns of all heads, as `View.inputs` says."""
    model, (ids, _) = make_model(num_key_value_heads=2), make_prompts(40)
    SEEN.clear()
    policy = Aligned(12, head_mode="adaptive", buffer=3)
    with kvops.hf.compress(model, policy) as compressed:
        model.generate(ids, prefill_chunk_size=15, max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert any(x.cache.lengths[0, 0] != x.cache.lengths[0, 1] for x in compressed.cache.evicting_layers)
    assert len(SEEN) > 9


def test_ids_of_a_model_inside_another():
    """The outer model gets ids, and passes their embeddings on."""

    class Outer(transformers.PreTrainedModel):
        def __init__(self, inner):
            super().__init__(inner.config)
            self.inner = inner

        def forward(self, input_ids, past_key_values):
            return self.inner(
                inputs_embeds=self.inner.get_input_embeddings()(input_ids), past_key_values=past_key_values
            )

    inner, (ids, _) = use_attention(make_model()), make_prompts(20)
    SEEN.clear()
    with passing_inputs(Outer(inner), Recorder(12)), torch.no_grad():
        Outer(inner)
        outer = next(iter(_watched))
        outer(ids, past_key_values=KVCache(inner.config, Recorder(12)))
    assert len(SEEN) == 3 and all(torch.equal(x[2], ids) for x in SEEN)


@pytest.mark.parametrize("cut", [42, 41, 40])
def test_a_gate_after_tokens_were_taken_back(cut):
    """A cache keeps as many values per slot as it keeps slots."""
    steps = 40, 1, 1, 1, *[1] * 6
    width, layers = 12, 1
    gates = (kit.randn(width, 2),)
    data = [
        kit.randn(1, 4, sum(steps), 16, seed=1),
        *kit.kv(1, 2, sum(steps), 16),
        kit.randn(1, sum(steps), width, seed=3),
    ]

    def run(cache, first, last):
        for at in range(first, last):
            span = slice(0, 40) if at == 0 else slice(39 + at, 40 + at)
            q, k, v = (x[:, :, span] for x in data[:3])
            cache.attend(q, k, v, inputs=kvops.LayerInputs(data[3][:, span]))

    policy = Gate(12, gates=gates, buffer=8)
    cache, want = (kvops.Cache(policy, num_layers=layers) for _ in range(2))
    run(cache, 0, 4)
    cache.crop(cut)
    assert cache.state["scores"].shape[2] == len(cache) == 12 + cut - 40
    run(want, 0, cut - 39)
    run(cache, cut - 39, 10)
    run(want, cut - 39, 10)
    assert torch.equal(cache.positions, want.positions)


def test_layers_that_share_keys_refuse_kvzip_plus():
    config = transformers.CONFIG_MAPPING["gemma3n_text"] if "gemma3n_text" in transformers.CONFIG_MAPPING else None
    if config is None:
        pytest.skip("no Gemma 3n")
    model = use_attention(tiny.tiny_model("gemma3n_text", "eager"))
    with pytest.raises(NotImplementedError, match="KVzip: plus=True weights a layer's scores by its own output"):
        KVCache(model.config, replace(POLICY, plus=True, w_o=torch.ones(4, 4)))
    KVCache(model.config, POLICY)
