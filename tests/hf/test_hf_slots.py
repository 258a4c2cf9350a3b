"""kvops.hf with slot positions (LaCache, StreamingLLM), compared with a plain fp64 model that rotates keys at their
slots in every step; and the ways in which transformers uses a cache."""

import contextlib
import copy
import functools
import math
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import CONFIG_MAPPING, DynamicCache, GlmConfig  # noqa: E402

import kvops  # noqa: E402
import kvops.hf  # noqa: E402
from kvops.hf import KVCache, model_rope, use_attention  # noqa: E402
from test_hf import TINY, assert_rows_as_alone, generate, make_model, make_prompts, needs  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]
METHODS = {
    "lacache": lambda budget=24: kvops.LaCache(budget),
    "lacache-post": lambda budget=24: kvops.LaCache(budget),
    "lacache-wide": lambda budget=24: kvops.LaCache(budget, span=2, overlap=0, sinks=2, pattern="short"),
    "streaming": lambda budget=24: kvops.StreamingLLM(budget),
    "streaming-post": lambda budget=24: kvops.StreamingLLM(budget),
}
every_method = pytest.mark.parametrize("method", METHODS)


def cache_of(config, method, budget=24, **options):
    storage = "post_rope" if method.endswith("-post") else "pre_rope"
    return KVCache(config, METHODS[method](budget), storage=storage, **options)


def own(*args, **settings):
    return use_attention(make_model(*args, **settings))


def plain_logits(model, policy, chunks, frozen=False):
    """Compute the logits of chunks of ids by the formulas in fp64; `policy` only determines which tokens each layer
    holds. frozen: whether the cache is frozen from the second chunk on."""
    model = copy.deepcopy(model).double()
    code = sys.modules[type(model).__module__]
    layers = model.model.layers
    held = [kvops.Cache(policy, layer=i, num_layers=len(layers)) for i in range(len(layers))]
    keys, values, out = [None] * len(layers), [None] * len(layers), []
    for ids in chunks:
        x, t = model.model.embed_tokens(ids), ids.shape[1]
        for i, layer in enumerate(layers):
            own, h = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (
                p(h).unflatten(-1, (-1, own.head_dim)).transpose(1, 2) for p in (own.q_proj, own.k_proj, own.v_proj)
            )
            if keys[i] is not None:  # the whole past, unrotated
                keys[i], values[i] = torch.cat((keys[i], k), 2), torch.cat((values[i], v), 2)
            else:
                keys[i], values[i] = k, v
            seen = held[i].seen
            new = torch.arange(seen, seen + t).expand(*k.shape[:2], -1)
            at = new if seen == 0 else torch.cat((held[i].positions, new), 2)
            k, v = (x.gather(2, at.unsqueeze(-1).expand(*at.shape, x.shape[-1])) for x in (keys[i], values[i]))
            n = k.shape[2]
            cos, sin = (x.double() for x in model.model.rotary_emb(x.float(), torch.arange(n)[None]))
            k = code.apply_rotary_pos_emb(k, k, cos, sin)[1]
            q = code.apply_rotary_pos_emb(q, q, cos[:, n - t :], sin[:, n - t :])[0]
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
            weights = (q @ k.mT * own.scaling).masked_fill(~torch.ones(t, n).tril(n - t).bool(), -torch.inf).softmax(-1)
            x = x + own.o_proj((weights @ v).transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            kept = torch.zeros(*at.shape[:2], t, 8)
            held[i].append(kept, kept)
            if frozen:
                held[i].freeze()
        out.append(model.lm_head(model.model.norm(x)))
    return torch.cat(out, 1)


def logits_of(model, cache, chunks):
    with torch.no_grad():
        return torch.cat([model(ids, past_key_values=cache).logits for ids in chunks], 1)


def stepped(ids, *sizes):
    """Return chunks of these sizes, then single tokens."""
    return ids.split([*sizes, *[1] * (ids.shape[1] - sum(sizes))], 1)


@every_method
@pytest.mark.parametrize(
    "model",
    [
        ("llama", {}),
        ("qwen2", {}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
        ("glm", {}),
    ],
    ids=lambda x: x[0] + "".join("-" + v["rope_type"] for v in x[1].values()),
)
def test_a_model_with_keys_at_their_slots(method, model):
    """A prompt far above the budget, a second one in chunks, and single tokens."""
    kind, settings = model
    if kind == "glm":  # adjacent channels form pairs, half of them are rotated, and gate and up share a matrix
        torch.manual_seed(0)
        config = GlmConfig(
            **TINY,
            head_dim=16,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        )
        model = use_attention(transformers.AutoModelForCausalLM.from_config(config).eval())
    else:
        model = own(kind, **settings)
    ids, _ = make_prompts(140, 140)
    chunks = stepped(ids, 90, 20, 7)
    cache = cache_of(model.config, method)
    found = logits_of(model, cache, chunks)
    with torch.no_grad():
        expected = plain_logits(model, METHODS[method](), chunks)
        elsewhere = logits_of(model, KVCache(model.config, kvops.StreamingLLM(24, positions="original")), chunks)
    torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=2e-4)
    assert (elsewhere - expected).abs().max() > 0.1  # slots matter
    assert cache.get_seq_length() == 140 and 20 < len(cache.layers[0].cache) < 30


@every_method
def test_a_model_whose_cache_is_cut_once(method):
    """A frozen cache keeps its slots and grows; reset() unfreezes it."""
    model, (ids, _) = own(), make_prompts(140, 140)
    chunks = stepped(ids, 100, 20)
    cache = cache_of(model.config, method)
    found = [logits_of(model, cache, chunks[:1])]
    kept = len(cache.layers[0].cache)
    cache.freeze()
    found.append(logits_of(model, cache, chunks[1:]))
    with torch.no_grad():
        expected = plain_logits(model, METHODS[method](), chunks, frozen=True)
    torch.testing.assert_close(torch.cat(found, 1).double(), expected, atol=2e-4, rtol=2e-4)
    assert kept < 30 and {len(layer.cache) for layer in cache.layers} == {kept + 40}
    cache.reset()
    assert torch.equal(logits_of(model, cache, chunks[:1]), found[0])
    logits_of(model, cache, chunks[1:])
    assert len(cache.layers[0].cache) < 30


@pytest.mark.parametrize("method", ["lacache", "lacache-post", "streaming"])
def test_half_precision(method):
    """The model rounds its cosines and sines: the error is at most a few times the model's own rounding."""
    model, exact = own().to(torch.bfloat16), own()
    exact.load_state_dict({name: x.float() for name, x in model.state_dict().items()})
    ids, _ = make_prompts(140)
    chunks = stepped(ids, 90, 7)
    with torch.no_grad():
        whole = plain_logits(exact, kvops.Full(), chunks)
        expected = plain_logits(exact, METHODS[method](), chunks)
    usual = (logits_of(model, KVCache(model.config, kvops.Full()), chunks) - whole).abs().mean()
    cache = cache_of(model.config, method)
    error = (logits_of(model, cache, chunks) - expected).abs().mean()
    assert cache.layers[0].keys.dtype == torch.bfloat16 and error < 2 * usual
    first = logits_of(model, cache_of(model.config, method), chunks[:1])
    assert torch.equal(first, logits_of(model, KVCache(model.config, kvops.Full()), chunks[:1]))  # no rotation


@pytest.mark.parametrize("method", ["lacache", "streaming"])
def test_the_demo_model(method):
    folder, text = ROOT / "bench/models/passkey-llama", (ROOT / "bench/data/haystack.txt").read_text()
    model = use_attention(transformers.AutoModelForCausalLM.from_pretrained(folder).eval())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text[:1200], return_tensors="pt")["input_ids"][:, :700]
    chunks = ids.split([400, 200, *[10] * 10], 1)
    found = logits_of(model, cache_of(model.config, method, 128), chunks)
    with torch.no_grad():
        expected = plain_logits(model, METHODS[method](128), chunks)
    torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=1e-3)


# ---- what transformers does with a cache ----


@every_method
@pytest.mark.parametrize(
    "options",
    [{}, {"prefill_chunk_size": 7}, {"num_beams": 2, "num_return_sequences": 2}],
    ids=["plain", "chunks", "beams"],
)
def test_keeping_everything_of_a_padded_batch(method, options):
    stock, model = make_model(), own()
    ids, mask = make_prompts(40, 23, 9)
    expected = generate(stock, DynamicCache(config=stock.config), ids, mask, **options)
    found = generate(model, cache_of(model.config, method, 400, attention_mask=mask), ids, mask, **options)
    assert torch.equal(found[0], expected[0])
    if not options.get("num_beams"):
        torch.testing.assert_close(found[1], expected[1], atol=1e-4, rtol=1e-4)


@every_method
@pytest.mark.parametrize(
    "options", [{}, {"prefill_chunk_size": 16}, {"num_beams": 2}], ids=["plain", "chunks", "beams"]
)
def test_rows_of_a_padded_batch_equal_the_rows_alone(method, options):
    """Every row starts and ends a chunk where it would alone, so chunks hold the same tokens."""
    assert_rows_as_alone(own(), functools.partial(cache_of, method=method), *make_prompts(64, 48, 32, 16), options)


@every_method
def test_second_turn(method):
    """The call passes the whole conversation; only the new tokens are fed."""
    model = own()
    ids, _ = make_prompts(60)
    more, _ = make_prompts(9, seed=2)
    cache = cache_of(model.config, method)
    first, _ = generate(model, cache, ids)
    talk = torch.cat([ids, first, more], 1)
    assert cache.get_seq_length() == 71
    _, found = generate(model, cache, talk, tokens=1)
    with torch.no_grad():
        expected = plain_logits(model, METHODS[method](), [*stepped(talk[:, :71], 60), talk[:, 71:]])[:, -1:]
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


@every_method
def test_batch_operations_move_the_whole_state(method):
    model = own()
    ids, mask = make_prompts(60, 41)

    def after(rows, operation):
        cache = cache_of(model.config, method, attention_mask=mask[rows])
        positions = (mask[rows].cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            model(ids[rows], attention_mask=mask[rows], position_ids=positions, past_key_values=cache)
        operation(cache)
        return cache

    for operation, rows in [
        (lambda c: c.reorder_cache(torch.tensor([1, 0])), [1, 0]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1]),
        (lambda c: c.batch_select_indices(torch.tensor([0])), [0]),
    ]:
        caches, ends = (after([0, 1], operation), after(rows, lambda c: None)), mask.sum(1)[rows]
        with torch.no_grad():
            for step in range(30):
                token = torch.full((len(rows), 1), 3 + step)
                a, b = (model(token, position_ids=ends[:, None] + step, past_key_values=x).logits for x in caches)
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_positions_of_ones_own():
    """position_ids are where keys come rotated. If they are the slots, nothing needs to be rotated again."""
    model = own()
    ids, _ = make_prompts(120)
    chunks = stepped(ids, 80)
    expected = logits_of(model, KVCache(model.config, METHODS["lacache"]()), chunks)
    cache, found = KVCache(model.config, METHODS["lacache"]()), []
    with torch.no_grad():
        for x in chunks:
            held = len(cache.layers[0].cache)
            at = torch.arange(held, held + x.shape[1])[None]
            found.append(model(x, position_ids=at, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-4, rtol=1e-4)


def test_memory_does_not_grow():
    model = own()
    ids, _ = make_prompts(400)
    cache, held = KVCache(model.config, METHODS["lacache"]()), []
    with torch.no_grad():
        for x in ids.split(1, 1):
            model(x, past_key_values=cache)
            held.append(sum(layer.bytes_kept for layer in cache.stats()))
    assert max(held[30:]) <= 3 * 2 * 2 * 16 * 4 * (25 + 32) and cache.get_seq_length() == 400


# ---- the model's rotary embedding ----


@pytest.mark.parametrize(
    "kind, interleaved, pairs",
    [
        ("llama", False, 64),
        ("qwen2", False, 64),
        ("mistral", False, 64),
        ("gemma3_text", False, 128),
        ("cohere", True, 64),
        ("glm", True, 32),
        ("phi", False, 16),
        ("gpt_neox", False, 12),
        ("mixtral", False, 64),
        ("qwen3_next", False, 32),
        ("granite_swa", False, 64),
        ("gpt_oss", False, 32),
    ],
)
def test_rope_of_a_model(kind, interleaved, pairs):
    needs(kind)
    rope = model_rope(CONFIG_MAPPING[kind]())
    scaling = 1.0 + 0.1 * math.log(32) if kind == "gpt_oss" else 1.0  # of YaRN
    assert (rope.interleaved, len(rope.inv_freq), rope.scaling) == (interleaved, pairs, pytest.approx(scaling))
    assert rope.inv_freq[0] == 1 and (rope.inv_freq.diff() < 0).all()


def test_rope_of_a_scaled_model():
    model = make_model(rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4})
    rope = model_rope(model.config)
    assert torch.equal(rope.inv_freq, model.model.rotary_emb.inv_freq)
    assert rope.scaling == model.model.rotary_emb.attention_scaling != 1.0


@pytest.mark.parametrize(
    "kind",
    ["cohere2", "smollm3", "exaone4", "deepseek_v3", "minicpm3", "hunyuan_v1_dense", "qwen2_vl", "gpt2"],
)
def test_models_that_rotate_otherwise_are_refused(kind):
    """Layers without rotation, MLA, a norm after the rotation, positions of three dims, no rotation."""
    needs(kind)
    settings = {"head_dim": 16} if kind == "hunyuan_v1_dense" else {}
    with unclear():
        model_rope(CONFIG_MAPPING[kind](**settings))


def unclear():
    return pytest.raises(ValueError, match="cannot determine how the model of .* rotates .*; pass the cache rope=")


@pytest.fixture
def unasked(monkeypatch):
    """Clear the cache of known rotations."""
    monkeypatch.setattr(kvops.hf.rope, "_known", {})


def rotated(q, k, cos, sin, unsqueeze_dim=1):
    """Llama's."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    half = transformers.models.llama.modeling_llama.rotate_half
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def scaled(x):
    return x * torch.linspace(1.0, 1.001, x.shape[-1])


ROTATIONS = {  # functions of a model, and whether each is a rotation
    "as it is": (True, rotated),
    "backwards": (False, lambda q, k, cos, sin: rotated(q, k, cos, -sin)),
    "queries stay": (False, lambda q, k, cos, sin: (q, rotated(q, k, cos, sin)[1])),
    "keys stay": (False, lambda q, k, cos, sin: (rotated(q, k, cos, sin)[0], k)),
    "one head stays": (
        False,
        lambda q, k, cos, sin: (
            torch.cat((q[:, :1], rotated(q, k, cos, sin)[0][:, 1:]), 1),
            rotated(q, k, cos, sin)[1],
        ),
    ),
    "twice": (False, lambda q, k, cos, sin: rotated(*rotated(q, k, cos, sin), cos, sin)),
    "scaled before": (True, lambda q, k, cos, sin: rotated(scaled(q), scaled(k), cos, sin)),
    "scaled after": (False, lambda q, k, cos, sin: tuple(map(scaled, rotated(q, k, cos, sin)))),
    "larger": (True, lambda q, k, cos, sin: rotated(q, k, 1.001 * cos, 1.001 * sin)),
    "shifted": (False, lambda q, k, cos, sin: tuple(x + 0.01 for x in rotated(q, k, cos, sin))),
    "last channels": (
        False,
        lambda q, k, cos, sin: tuple(x.flip(-1) for x in rotated(q.flip(-1), k.flip(-1), cos, sin)),
    ),
    "fails": (False, lambda q, k, cos, sin: q @ k),
}


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_what_a_model_does_with_its_keys_is_seen(rotation, unasked, monkeypatch):
    """Whatever its rotary module declares."""
    is_one, function = ROTATIONS[rotation]
    monkeypatch.setattr(transformers.models.llama.modeling_llama, "apply_rotary_pos_emb", function)
    config = transformers.LlamaConfig(**TINY)
    if is_one:
        assert len(model_rope(config).inv_freq) == 8
    else:
        with unclear():
            model_rope(config)


@pytest.mark.parametrize("threshold", [20, 16384, 100_000, 150_000, 900_000])
def test_what_changes_at_far_positions_is_seen(threshold, unasked, monkeypatch):
    """Whether the config names the threshold, in a nested dictionary too, or not; in the model's range or beyond."""
    kind = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    forward = kind.forward

    def scaled(self, x, position_ids):
        far = 1 + 0.01 * (position_ids == threshold if named else position_ids > threshold).unsqueeze(-1)
        return tuple(x * far for x in forward(self, x, position_ids))

    monkeypatch.setattr(kind, "forward", scaled)
    for named in (True, False):
        config = transformers.LlamaConfig(**TINY | {"max_position_embeddings": 131072})
        config.rope_parameters["more"] = {"start": [float(threshold)] if named else []}
        with unclear():
            model_rope(config)


def test_temperatures_of_queries_are_seen():
    """Ministral 3's starts at original_max_position_embeddings, far inside of the model's range."""
    needs("ministral3")
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
    sizes = {**TINY, "max_position_embeddings": 262144, "head_dim": 16}
    for beta, is_one in ((0.1, False), (0.0, True)):
        config = CONFIG_MAPPING["ministral3"](**sizes, rope_parameters={**rope, "llama_4_scaling_beta": beta})
        if is_one:
            assert len(model_rope(config).inv_freq) == 8
        else:
            with unclear():
                model_rope(config)


def test_a_short_model_is_asked(unasked):
    assert len(model_rope(transformers.LlamaConfig(**TINY | {"max_position_embeddings": 2})).inv_freq) == 8


@pytest.mark.parametrize("error", ["scaling", "frequencies", "positions"])
def test_what_a_rotary_module_does_is_seen(error, unasked, monkeypatch):
    """Whatever the rotary module declares."""
    kind = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    forward = kind.forward

    def wrong(self, x, position_ids):
        if error == "frequencies":
            self.inv_freq = 1.001 * self.original_inv_freq
        cos, sin = forward(self, x, position_ids + (error == "positions"))
        return (1.001 * cos, 1.001 * sin) if error == "scaling" else (cos, sin)

    model_rope(transformers.LlamaConfig(**TINY))
    kvops.hf.rope._known.clear()
    monkeypatch.setattr(kind, "forward", wrong)
    with unclear():
        model_rope(transformers.LlamaConfig(**TINY))


def test_one_layer_in_many_is_seen():
    """Every fourth layer of SmolLM3 is unrotated, unless its config sets it otherwise."""
    layers = 12
    config = CONFIG_MAPPING["smollm3"](num_hidden_layers=layers, no_rope_layers=[1] * layers)
    assert len(model_rope(config).inv_freq) == 64
    config.no_rope_layers = [*config.no_rope_layers[:-1], 0]
    with unclear():
        model_rope(config)


def test_a_config_is_asked_once(unasked, monkeypatch):
    asked, ask = [], kvops.hf.rope._ask
    monkeypatch.setattr(kvops.hf.rope, "_ask", lambda config: asked.append(config) or ask(config))
    ropes = [model_rope(transformers.LlamaConfig(**TINY)) for _ in range(2)]
    assert ropes[0] is ropes[1] and len(asked) == 1
    other = model_rope(transformers.LlamaConfig(**TINY, rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
    assert len(asked) == 2 and not torch.equal(other.inv_freq, ropes[0].inv_freq)


@pytest.mark.parametrize("where", ["bfloat16", "float64", "meta", "with meta", "autocast", "inference"])
def test_it_is_asked_anywhere(where, unasked):
    """The result does not depend on the caller's defaults and random state, and leaves them unchanged."""
    expected = model_rope(transformers.LlamaConfig(**TINY))
    kvops.hf.rope._known.clear()
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    around = {
        "with meta": torch.device("meta"),
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "inference": torch.inference_mode(),
    }
    try:
        if where == "meta":
            torch.set_default_device("meta")
        elif where not in around:
            torch.set_default_dtype(getattr(torch, where))
        inside = torch.get_default_dtype(), torch.get_default_device()
        with around.get(where, contextlib.nullcontext()):
            rope = model_rope(transformers.LlamaConfig(**TINY))
        assert inside == (torch.get_default_dtype(), torch.get_default_device())
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)
    assert torch.equal(rope.inv_freq, expected.inv_freq) and rope.inv_freq.dtype == torch.float32
    assert rope.inv_freq.device.type == "cpu" and not rope.inv_freq.is_inference()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_stays_large_is_refused(unasked, monkeypatch):
    model_rope(CONFIG_MAPPING["llama"](num_hidden_layers=2))
    monkeypatch.setattr(kvops.hf.rope, "_SIZES", {})
    kvops.hf.rope._known.clear()
    with unclear():
        model_rope(CONFIG_MAPPING["llama"](num_hidden_layers=2, intermediate_size=10**7))


def test_frequencies_that_change_are_refused():
    model = own(rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4})
    with pytest.raises(ValueError, match="'dynamic' change with the length"):
        KVCache(model.config, kvops.LaCache(24))
    KVCache(model.config, kvops.LaCache(24, positions="original"))
    KVCache(model.config, kvops.LaCache(24), rope=kvops.Rope.of(16))


def test_a_rope_of_ones_own_is_used():
    model = own()
    ids, _ = make_prompts(100)
    chunks = stepped(ids, 80)
    mine = kvops.Rope.of(16, model.config.rope_parameters["rope_theta"])
    cache = KVCache(model.config, kvops.LaCache(24), rope=mine)
    found = logits_of(model, cache, chunks)
    assert all(layer.cache.rope.inv_freq is mine.inv_freq for layer in cache.layers)
    torch.testing.assert_close(found, logits_of(model, KVCache(model.config, kvops.LaCache(24)), chunks))


def test_what_is_refused():
    stock, model = make_model(), own()
    for method in (kvops.LaCache(24), kvops.StreamingLLM(24)):
        with pytest.raises(ValueError, match=r"positions='original'.*kvops.hf.use_attention\(model\)"):
            KVCache(stock.config, method)
    KVCache(stock.config, kvops.LaCache(24, positions="original"))  # all layers hold equally many slots
    with pytest.raises(ValueError, match="LaCache.*padded batch.*use_attention"):
        KVCache(stock.config, kvops.LaCache(24, positions="original"), pads=[3, 0])
    with pytest.raises(ValueError, match="LaCache: budget .* at least 8 with 4 sinks, got 7"):
        KVCache(model.config, kvops.LaCache(7))
    cache = KVCache(model.config, kvops.LaCache(24))
    model.set_attn_implementation("sdpa")  # too late
    ids, _ = make_prompts(40)
    with pytest.raises(RuntimeError, match="which this cache was made for, got a model with another"):
        generate(model, cache, ids)
