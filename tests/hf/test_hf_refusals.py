"""kvops.hf with the library's attention on models and calls that it must not get wrong silently: layers that share
keys, compared with a masked replay; and what it does not understand, which must raise."""

import copy
import threading

import pytest
import torch

transformers = pytest.importorskip("transformers")

from packaging.version import Version  # noqa: E402
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache  # noqa: E402
from transformers.masking_utils import create_causal_mask, sdpa_mask  # noqa: E402
from transformers.models.mllama.configuration_mllama import MllamaTextConfig  # noqa: E402

import hf_architectures as tiny  # noqa: E402
import kvops  # noqa: E402
import kvops.hf  # noqa: E402
from kvops.hf import KVCache, use_attention  # noqa: E402
from kvops.hf.architectures import Architecture  # noqa: E402
from test_hf import TINY, VOCAB, generate, make_model, make_prompts, needs  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "no_table")
FOUR = {"num_hidden_layers": 4, "head_dim": 16}
SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
SHARED = {**FOUR, **SLIDING, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCAB}
SHARED["hidden_size_per_layer_input"] = 8
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "head_dim": 8}
LATENT.update(qk_nope_head_dim=16, v_head_dim=16)
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32}
EXPERTS.update(first_k_dense_replace=1, n_group=1, topk_group=1)
HYBRID = {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_hidden_layers": 4}
SMALL = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB}
CONFIGS = {
    "gemma2": {**FOUR, "sliding_window": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "gemma3n_text": {
        **SHARED,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "altup_active_idx": 0,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [96] * 4,
    },
    "gemma4_text": {**SHARED, "global_head_dim": 16},
    "deepseek_v2": {**LATENT, **EXPERTS},
    "deepseek_v3": {**LATENT, **EXPERTS},
    "glm4_moe_lite": {**LATENT, **EXPERTS},
    "minicpm3": LATENT,
    "deepseek_v32": {**LATENT, **EXPERTS, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 16},
    "diffllama": {"head_dim": 16},
    "doge": {"head_dim": 16},
    "jetmoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16, "num_key_value_heads": 2},
    "lfm2": HYBRID,
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gptj": {**SMALL, "rotary_dim": 8},
    "codegen": {**SMALL, "rotary_dim": 8},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "vocab_size": VOCAB},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
}


@pytest.fixture
def no_table(monkeypatch):
    """Empty the table of architectures, whose refusals would come before all others."""
    monkeypatch.setattr(kvops.hf.architectures, "lookup", lambda text: Architecture())


def build(kind, attn=None):
    torch.manual_seed(0)
    settings = CONFIGS[kind] if "vocab_size" in CONFIGS[kind] else {**TINY, **CONFIGS[kind]}
    config = transformers.AutoConfig.for_model(kind, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attn).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def own(kind):
    return use_attention(build(kind))


def forward(model, ids, cache, mask=None, **options):
    with torch.no_grad():
        return model(ids, attention_mask=mask, past_key_values=cache, **options).logits


# ---- the reference: the whole sequence, and a mask over what each layer held before each step ----

HELD: dict = {}  # layer: positions [b, Hk, slots] and tokens seen; "shared": layer -> the layer with its keys


def replayed(module, q, k, v, mask, dropout=0.0, scaling=None, softcap=None, **kwargs):
    layer = HELD["shared"].get(module.layer_idx, module.layer_idx)
    t, n, heads = q.shape[2], k.shape[2], k.shape[1]
    if mask is None:
        mask = torch.ones(t, n, dtype=torch.bool).tril(n - t)
    if layer in HELD:
        positions, seen = HELD[layer]
        old = torch.zeros(k.shape[0], heads, seen, dtype=torch.bool)
        if seen:
            old.scatter_(2, positions, True)
        new = torch.ones(t, n - seen, dtype=torch.bool).tril(n - seen - t).expand(*old.shape[:2], -1, -1)
        mask = mask & torch.cat((old.unsqueeze(2).expand(-1, -1, t, -1), new), 3).repeat_interleave(
            q.shape[1] // heads, 1
        )
    k, v = (x.repeat_interleave(q.shape[1] // heads, 1) for x in (k, v))
    logits = q @ k.mT * (q.shape[3] ** -0.5 if scaling is None else scaling)
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    weights = logits.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ v).transpose(1, 2), None


AttentionInterface.register("replayed", replayed)
AttentionMaskInterface.register("replayed", sdpa_mask)


def assert_replayed(kind, method, chunks=(30, 9, 1, 1, 1), **options):
    """Every step's logits equal those in fp64, in a padded batch whose padding was not declared."""
    model, truth = own(kind), build(kind, "replayed").double()
    truth.set_experts_implementation("eager")  # the other implementations have no fp64
    n = sum(chunks)
    ids, mask = make_prompts(n, n - 7)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache, full = KVCache(model.config, method), DynamicCache(config=truth.config)
    kinds, last = model.config.layer_types, getattr(model.config, "num_kv_shared_layers", 0)
    own_keys = kinds[: len(kinds) - last]
    shared = {i: len(own_keys) - 1 - own_keys[::-1].index(kinds[i]) for i in range(len(own_keys), len(kinds))}
    first = 0
    for t in chunks:
        now = slice(first, first + t)
        HELD.clear()
        HELD["shared"] = shared
        HELD.update(
            (i, (layer.cache.positions, first))
            for i, layer in enumerate(cache.layers)
            if layer in cache.evicting_layers
        )
        step = dict(position_ids=positions[:, now], **options)
        found = forward(model, ids[:, now], cache, mask[:, : now.stop], **step)
        expected = forward(truth, ids[:, now], full, mask[:, : now.stop], **step)
        live = mask[:, now][:, -expected.shape[1] :].bool()
        torch.testing.assert_close(found[live].double(), expected[live], atol=1e-4, rtol=1e-4)
        first += t
    assert any(len(layer.cache) < n for layer in cache.evicting_layers)
    return cache


@pytest.mark.parametrize("kind", ["gemma3n_text", "gemma4_text"])
@pytest.mark.parametrize(
    "method", [kvops.KeyDiff(12), kvops.SnapKV(12, window=4), kvops.H2O(12)], ids=lambda x: type(x).__name__
)
def test_layers_that_share_keys(kind, method):
    assert_replayed(kind, method)


def test_layers_that_share_keys_and_go_on_with_the_last_row():
    """Gemma 4 as generate() calls it."""
    for method in (kvops.SnapKV(12, window=4), kvops.KeyDiff(12)):
        cache = assert_replayed("gemma4_text", method, logits_to_keep=1)
        assert [layer.reads for layer in cache.evicting_layers] == [2]
    model, stock = own("gemma4_text"), build("gemma4_text")
    ids, mask = make_prompts(12, 12)  # shorter than the window: sdpa would skip the mask and lose the rows' positions
    for cached in (False, True):
        a, b = (
            forward(x, ids, DynamicCache(config=x.config) if cached else None, mask, logits_to_keep=3)
            for x in (stock, model)
        )
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("reduce", ["mean", "sum", "max"])
@pytest.mark.parametrize("method", [kvops.SnapKV, kvops.H2O], ids=lambda x: x.__name__)
def test_the_queries_of_all_layers_that_share_keys_count(method, reduce):
    """Two layers with 4 query heads keep the same tokens as one with 8."""
    g = torch.Generator().manual_seed(3)
    q = torch.randn(2, 2, 2, 2, 40, 16, generator=g)  # layer, row, KV head, head of the GQA group
    k, v = torch.randn(2, 2, 2, 40, 16, generator=g)
    for pool_first in [False, True] if method is kvops.SnapKV else [None]:
        options = {} if pool_first is None else dict(window=4, pool_first=pool_first)
        both, one = (kvops.Cache(method(12, group_reduce=reduce, **options)) for _ in range(2))
        expected = one.attend(torch.cat((q[0], q[1]), 2).flatten(1, 2), k, v).unflatten(1, (2, 2, 2))
        step = both.append(k, v)
        found = both.attention(q[0].flatten(1, 2), *step, readers=1)
        with pytest.raises(RuntimeError, match="expected one attention.. after each append"):
            both.attention(q[0].flatten(1, 2), *step)
        assert len(both) == 40  # the other layer has yet to read
        with pytest.raises(RuntimeError, match="got none for the last 40 tokens"):
            both.append(k, v)
        torch.testing.assert_close(found, expected[:, :, 0].flatten(1, 2))
        torch.testing.assert_close(both.read(q[1].flatten(1, 2), *step), expected[:, :, 1].flatten(1, 2))
        assert torch.equal(both.positions, one.positions) and len(both) == 12
        with pytest.raises(RuntimeError, match="expected one attention.. after each append"):
            both.read(q[1].flatten(1, 2), *step)


def test_slots_of_shared_keys():
    config = own("gemma3n_text").config
    rope = kvops.Rope(torch.ones(8))
    with pytest.raises(NotImplementedError, match="Gemma3nTextConfig share keys.*positions='original'"):
        KVCache(config, kvops.StreamingLLM(12), rope=rope)


# ---- models that the library's attention does not understand ----


@pytest.mark.parametrize(
    "kind, name",
    [
        ("deepseek_v2", "DeepseekV2Attention"),
        ("deepseek_v3", "DeepseekV3Attention"),
        ("glm4_moe_lite", "Glm4MoeLiteAttention"),
        ("minicpm3", "MiniCPM3Attention"),
        ("diffllama", "DiffLlamaAttention"),
        ("jetmoe", "JetMoeAttention"),
        ("doge", "'doge'"),
    ],
)
def test_keys_that_change_after_the_cache(kind, name):
    """They run without a KVCache. With one they raise, because evicted keys would not be hidden."""
    needs(kind, "0" if kind in ("jetmoe", "doge") else "5.15")
    model, stock = own(kind), build(kind)
    ids, mask = make_prompts(20)
    for method in (kvops.KeyDiff(12), kvops.SnapKV(12, window=4)):
        with pytest.raises(NotImplementedError, match=f"{name}.*set_attn_implementation"):
            forward(model, ids, KVCache(model.config, method), mask)
    torch.testing.assert_close(forward(model, ids, None), forward(stock, ids, None), atol=1e-5, rtol=1e-5)
    forward(stock, ids, KVCache(stock.config, kvops.KeyDiff(12)))  # as the error says


def test_deepseek_hands_its_attention_indices():
    """DeepSeek V3.2 applies its mask itself for sdpa, but leaves it to any other attention."""
    needs("deepseek_v32")
    model = own("deepseek_v32")
    ids, _ = make_prompts(20)
    with pytest.raises(NotImplementedError, match=r"DeepseekV32Attention passes indices to its attention"):
        forward(model, ids, None)


def test_arguments_that_change_the_attention():
    q, k = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16)
    module = make_model().model.layers[0].self_attn
    for name in ("position_bias", "sinks", "block_indices", "anything"):
        with pytest.raises(NotImplementedError, match=f"LlamaAttention passes {name} to its attention"):
            kvops.hf.attention._attention(module, q, k, k, None, softcap=2.0, **{name: torch.ones(1)})
    expected = kvops.hf.attention.sdpa_attention_forward(module, q, k, k, None, is_causal=False)[0]
    assert torch.equal(
        kvops.hf.attention._attention(module, q, k, k, None, is_causal=False, use_cache=True)[0], expected
    )


def test_softcap_in_layers_that_are_not_causal():
    module = make_model().model.layers[0].self_attn
    q, k, v = torch.randn(1, 4, 5, 16), *torch.randn(2, 1, 4, 7, 16)
    weights = (2.0 * (q @ k.mT / 8.0).tanh()).softmax(-1)
    found = kvops.hf.attention._attention(module, q, k, v, None, softcap=2.0, is_causal=False)[0]
    torch.testing.assert_close(found, (weights @ v).transpose(1, 2))
    hidden = torch.rand(1, 1, 5, 7) < 0.4
    hidden[..., 0] = False
    masks = (~hidden, torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min))
    a, b = (kvops.hf.attention._attention(module, q, k, v, mask, softcap=2.0)[0] for mask in masks)
    torch.testing.assert_close(a, b)
    with pytest.raises(ValueError, match="expected dropout 0, got 0.5"):
        kvops.hf.attention._attention(module, q, k, v, None, softcap=2.0, dropout=0.5)


@pytest.mark.parametrize("kind", ["gptj", "codegen", "bloom", "mpt", "falcon"])
def test_models_that_compute_their_attention_themselves(kind):
    if Version(transformers.__version__) >= Version(tiny.SINCE.get(kind, "999")):
        pytest.skip(f"this transformers lets {kind}'s attention be replaced")
    model = build(kind)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=f"{type(model).__name__} computes its attention itself"):
        use_attention(model)
    with pytest.raises(ValueError, match="computes its attention itself"):
        kvops.hf.generate(model, kvops.SnapKV(12, window=4), make_prompts(20)[0], max_new_tokens=2)
    assert model.config._attn_implementation == before != "kvops"


def test_masks_that_no_evicting_layer_uses():
    """Qwen2-MoE requests a sliding-window mask, whether it has such layers or not."""
    assert_replayed("qwen2_moe", kvops.SnapKV(12, window=4))


def test_what_a_model_may_do_with_the_mask():
    mask = kvops.hf.attention._CausalMask("some", 2, 5, True)
    x, every = torch.ones(2, 1, 5, 5), slice(None)
    for use in (
        lambda: x + mask,
        lambda: mask + x,
        lambda: 1 - mask,
        lambda: ~mask,
        lambda: mask == 0,
        lambda: torch.where(mask, x, x),
        lambda: torch.cat([x, mask]),
        lambda: torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask),
        lambda: mask.dtype,
        lambda: mask.to("cpu"),
        lambda: len(mask),
        lambda: mask[..., :3],
        lambda: mask[:, :, -9:, :],
        lambda: mask[:, :, 1:, :],
    ):
        with pytest.raises(NotImplementedError, match="the model 'some' uses its attention mask itself"):
            use()
    assert mask[:, :, -2:, :].tokens == 2 and mask[every, every, slice(0, None), every].tokens == 5
    assert copy.copy(mask).tokens == 5 and not hasattr(mask, "to")  # so that nothing moves it between devices


VISION = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
VISION.update(num_attention_heads=2, image_size=8, patch_size=4, projection_dim=64)


def tiny_paligemma(attn="sdpa"):
    torch.manual_seed(0)
    text = {**TINY, "model_type": "gemma", "head_dim": 16}
    config = transformers.PaliGemmaConfig(
        text_config=text, vision_config=VISION, image_token_index=VOCAB - 1, projection_dim=64
    )
    return transformers.PaliGemmaForConditionalGeneration._from_config(config, attn_implementation=attn).eval()


def tiny_gemma3(attn="sdpa"):
    torch.manual_seed(0)
    text = {**TINY, **FOUR, **SLIDING, "model_type": "gemma3_text", "query_pre_attn_scalar": 16}
    config = transformers.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation=attn).eval()


@pytest.mark.parametrize("make, text, kind", [(tiny_paligemma, 1, 0), (tiny_gemma3, 0, 1)], ids=["paligemma", "gemma3"])
def test_prompts_that_are_not_causal(make, text, kind):
    """PaliGemma's prefix and an image in Gemma 3 attend bidirectionally and raise; a prompt without them works."""
    model, stock = use_attention(make()), make()
    ids, mask = make_prompts(20, 14)
    types = torch.full_like(ids, text)
    cache = KVCache(model.config, kvops.SnapKV(12, window=4))
    found = forward(model, ids, cache, mask, token_type_ids=types)
    expected = forward(stock, ids, None, mask, token_type_ids=types)
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=1e-5)
    assert {s.tokens_kept for s in cache.stats() if s.evicts} == {12}
    types[:, 8:12] = kind
    cache = KVCache(model.config, kvops.SnapKV(12, window=4))
    with pytest.raises(NotImplementedError, match=r"Gemma3?Attention .*needs attention that is not causal"):
        forward(model, ids, cache, mask, token_type_ids=types)


def test_the_real_error_when_a_part_names_no_attention():
    model = tiny_paligemma()
    model.config.vision_config._attn_implementation_internal = None
    with pytest.raises(ValueError, match="no_such_argument"):
        kvops.hf.generate(model, kvops.KeyDiff(12), make_prompts(20)[0], max_new_tokens=2, no_such_argument=1)
    assert model.config.vision_config._attn_implementation is None
    assert model.config.text_config._attn_implementation == model.config._attn_implementation == "sdpa"


def test_cross_attention_keeps_its_cache():
    """Mllama's cross-attention layers hold an image's keys in the same cache."""
    config = MllamaTextConfig(**{**TINY, "num_hidden_layers": 4, "cross_attention_layers": [1, 3]})
    models = []
    for attn in ("sdpa", "kvops"):
        torch.manual_seed(0)
        model = transformers.models.mllama.modeling_mllama.MllamaForCausalLM._from_config(
            copy.deepcopy(config), attn_implementation=attn
        )
        for name, x in model.named_parameters():
            if "gate" in name and x.numel() == 1:
                torch.nn.init.constant_(x, 1.0)  # an untrained gate blocks the image
        models.append(model.eval())
    ids, mask = make_prompts(40, 33)
    image = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(1))
    found = []
    for model in models:
        evicting = model is models[1]
        cache = KVCache(model.config, kvops.SnapKV(400, window=4)) if evicting else DynamicCache(config=model.config)
        options = dict(cross_attention_states=image)
        logits = [forward(model, ids[:, :30], cache, mask[:, :30], **options)]
        logits += [forward(model, ids[:, i : i + 1], cache, mask[:, : i + 1]) for i in range(30, 40)]
        found.append(torch.cat(logits, 1)[mask.bool()])
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
    cache = KVCache(models[1].config, kvops.SnapKV(12, window=4))
    forward(models[1], ids, cache, mask, cross_attention_states=image)
    assert [(s.evicts, s.tokens_kept) for s in cache.stats()] == [(True, 12), (False, 6), (True, 12), (False, 6)]


# ---- masks and padding ----


def test_masks_of_four_dims():
    model = use_attention(make_model())
    ids, _ = make_prompts(20)
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    with pytest.raises(NotImplementedError, match=r"LlamaAttention has its own.*\[1, 1, 20, 20\]; pass the model a"):
        forward(model, ids, KVCache(model.config, kvops.KeyDiff(12)), mask)
    assert forward(model, ids, None, mask).isfinite().all()


def test_masks_that_a_cache_cannot_follow():
    """A cache that has refused one stays unchanged."""
    model = use_attention(make_model())
    ids, mask = make_prompts(20, 14)
    hole, right = mask.clone(), mask.flip(1)
    hole[0, 7] = 0
    for wrong, message in [
        (hole, "on the left"),
        (right, "on the left"),
        (mask[:, 1:], r"expected \[2, 0 \+ 20\], got \[2, 19\]"),
        (mask[:1], r"expected \[2, 0 \+ 20\], got \[1, 20\]"),
    ]:
        cache = KVCache(model.config, kvops.KeyDiff(12))
        with pytest.raises(ValueError, match=message):
            forward(model, ids, cache, wrong)
        assert cache.get_seq_length() == 0
    forward(model, ids, cache, mask)
    more, short = make_prompts(6, 4, seed=2)
    with pytest.raises(ValueError, match="between the turns of a conversation"):
        forward(model, more, cache, torch.cat((mask, short), 1))
    with pytest.raises(ValueError, match=r"must begin with the pads.*expected \[0, 6\], got \[0, 0\]"):
        forward(model, more, cache, torch.ones(2, 26, dtype=torch.long))
    assert cache.get_seq_length() == 20
    forward(model, more, cache, torch.cat((mask, torch.ones_like(more)), 1))


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 2}, {"prefill_chunk_size": 40}], ids=["plain", "beams", "chunks"]
)
def test_padding_is_taken_from_the_mask(options):
    """The result is the same as with declared padding."""
    model = use_attention(make_model())
    ids, mask = make_prompts(60, 41, 24)
    for method in (kvops.KeyDiff(24), kvops.SnapKV(24, window=8), kvops.LagKV(lag=8, ratio=0.25, sinks=2)):
        told = generate(model, KVCache(model.config, method, attention_mask=mask), ids, mask, **options)
        cache = KVCache(model.config, method)
        seen = generate(model, cache, ids, mask, **options)
        assert torch.equal(told[0], seen[0]) and torch.equal(told[1], seen[1])
        cache.reset()  # for a batch with different padding
        flipped = generate(model, cache, ids.flip(0), mask.flip(0), **options)
        assert torch.equal(flipped[0].flip(0), told[0])


def test_padding_that_was_said_and_seen_has_to_agree():
    model = use_attention(make_model())
    ids, mask = make_prompts(20, 14)
    for pads in ([0, 5], [0, 0], [6, 0]):
        cache = KVCache(model.config, kvops.KeyDiff(12), pads=pads)
        with pytest.raises(ValueError, match=r"must begin with the pads that were declared.*got \[0, 6\]"):
            forward(model, ids, cache, mask)
    cache = KVCache(model.config, kvops.KeyDiff(12))
    with pytest.raises(ValueError, match="got a row of pads only.*give the KVCache the whole attention_mask"):
        forward(model, ids[:, :6], cache, mask[:, :6])
    cache = KVCache(model.config, kvops.KeyDiff(12), attention_mask=mask)
    forward(model, ids[:, :6], cache, mask[:, :6])
    with pytest.raises(ValueError, match="pads must be one integer per row"):
        KVCache(model.config, kvops.KeyDiff(12), pads=[2**40])
    with pytest.raises(ValueError, match="pads must be one integer per row"):
        KVCache(model.config, kvops.KeyDiff(12), pads=[2**70])


def test_a_cache_is_for_one_conversation():
    """The mask of a second one shows it, by its length or its padding."""
    model = use_attention(make_model())
    cache = KVCache(model.config, kvops.KeyDiff(12))
    generate(model, cache, *make_prompts(40, 31))
    seen = cache.get_seq_length()
    ids, mask = make_prompts(30, 21, seed=2)
    with pytest.raises(ValueError, match="a cache is for one conversation.*make a new KVCache for a new prompt"):
        forward(model, ids, cache, mask)
    ids, mask = make_prompts(seen + 30, seen + 22, seed=2)
    with pytest.raises(ValueError, match="must begin with the pads"):
        forward(model, ids[:, seen:], cache, mask)


# ---- layers, LAQ, threads, autocast ----


def test_only_layers_that_evict_count():
    """PyramidKV's budgets range over these layers, with the budget as mean; LaCache's ladder has a rung for each."""
    model = own("gemma2")
    ids, _ = make_prompts(90)
    cache = KVCache(model.config, kvops.PyramidKV(24, window=8))
    forward(model, ids, cache)
    kept = [s.tokens_kept for s in cache.stats() if s.evicts]
    assert kept == kvops.pyramidkv_budgets(24, 2, 90, window=8) and sum(kept) == 2 * 24
    assert [(x.cache.layer, x.cache.num_layers) for x in cache.evicting_layers] == [(0, 2), (1, 2)]


def test_laq_of_a_hybrid_model():
    """Layers without keys are unchanged; each KV layer keeps the tokens that LAQ keeps alone."""
    model = build("lfm2")
    ids, mask = make_prompts(40, 31)
    settings = dict(max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    out = kvops.hf.generate(model, kvops.LAQ(16), ids, attention_mask=mask, **settings)
    cache = out.past_key_values
    assert [s.tokens_kept for s in cache.stats()] == [16 + 7] * 2 and len(cache.stages) == 3
    whole = kvops.hf.generate(model, kvops.LAQ(400), ids, attention_mask=mask, **settings)
    expected = model.generate(ids, attention_mask=mask, **settings)  # drafting must not change the conv states
    assert torch.equal(whole.sequences, expected.sequences)


def test_laq_without_its_lookahead():
    model = use_attention(make_model())
    ids, mask = make_prompts(40, 31)
    with pytest.raises(RuntimeError, match="kvops.LAQ evicts in its lookahead only.*call kvops.hf.generate"):
        generate(model, KVCache(model.config, kvops.LAQ(16)), ids, mask)
    out = kvops.hf.generate(model, kvops.LAQ(16), ids[:, :33], max_new_tokens=3, do_sample=False, prefill_chunk_size=8)
    assert out.shape == (2, 36)  # a last chunk of one token is not a decode step


def test_laq_of_a_model_of_sliding_layers_only():
    model = make_model("mistral", sliding_window=16)
    ids, _ = make_prompts(40)
    expected = model.generate(ids, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(ids))
    with pytest.warns(UserWarning, match="nothing is evicted"):
        found = kvops.hf.generate(model, kvops.LAQ(16), ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(found, expected)


def test_threads_generate_with_one_model():
    """The first thread switches the attention and the last restores it, even if one of them raises."""
    model = make_model(num_hidden_layers=2)
    methods = [kvops.SnapKV(16, window=4), kvops.KeyDiff(16), kvops.LAQ(16)]
    prompts = [make_prompts(40, 31, seed=i) for i in range(3)]

    def run(i):
        ids, mask = prompts[i]
        return kvops.hf.generate(model, methods[i], ids, attention_mask=mask, max_new_tokens=8, do_sample=False)

    expected = [run(i) for i in range(3)]
    wrong = []

    def work(i):
        for j in range(4):
            if j == 1:
                with pytest.raises(ValueError, match="past_key_values"):
                    kvops.hf.generate(model, methods[i], prompts[i][0], past_key_values=None)
                with pytest.raises(ValueError, match="no_such"):
                    kvops.hf.generate(model, methods[i], prompts[i][0], no_such=1, max_new_tokens=1)
            if not torch.equal(run(i), expected[i]):
                wrong.append(i)

    def watched(i):
        try:
            work(i)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=watched, args=(i,)) for i in range(3)]
    for x in threads:
        x.start()
    for x in threads:
        x.join()
    assert wrong == [] and model.config._attn_implementation == "sdpa" and model not in kvops.hf.attention._generating


@pytest.mark.parametrize("attn", ["sdpa", "eager", "kvops"])
def test_autocast(attn):
    """Keys come rotated in fp32, values in bf16; the cache stores both as sdpa would cast them."""
    model = make_model(attn=attn)
    ids, mask = make_prompts(40, 31)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache = KVCache(model.config, kvops.KeyDiff(400), attention_mask=mask)
        expected = forward(model, ids, None, mask)
        found = forward(model, ids, cache, mask)
        assert cache.layers[0].keys.dtype == cache.layers[0].values.dtype == torch.bfloat16
        small = KVCache(model.config, kvops.KeyDiff(12), attention_mask=mask)
        assert generate(model, small, ids, mask)[1].isfinite().all()
    live = mask.bool()
    error, scale = (found - expected)[live].float().abs().max(), expected[live].float().std()
    assert error <= (0.0 if attn != "kvops" else 0.2 * scale)


IN_AUTOCAST = {
    "keydiff": lambda budget: kvops.KeyDiff(budget),
    "lagkv": lambda budget: kvops.LagKV(lag=budget // 2, ratio=0.25, sinks=2),
    "snapkv": lambda budget: kvops.SnapKV(budget, window=4),
    "h2o": lambda budget: kvops.H2O(budget),
    "laq": lambda budget: kvops.LAQ(budget, steps=2),
    "lacache": lambda budget: kvops.LaCache(budget),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("method", IN_AUTOCAST)
def test_generation_under_autocast(method, dtype):
    """With a model in fp32 and in bf16: a policy that keeps everything gives the logits of a stock cache, however the
    cache is passed, and a policy that evicts stores bf16."""
    model = make_model().to(dtype)
    ids, mask = make_prompts(60, 41)
    call = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    call.update(return_dict_in_generate=True, output_logits=True)

    def block(policy):
        with kvops.hf.compress(model, policy):
            return model.generate(ids, **call)

    def one_call(policy):
        return kvops.hf.generate(model, policy, ids, **call)

    def own_cache(policy):
        return model.generate(ids, past_key_values=KVCache(model.config, policy), **call)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model.generate(ids, **call).logits[0].float()
        ways = [block, one_call] + [own_cache] * (method != "laq")
        for way in ways:
            if way is own_cache:
                use_attention(model)
            found = way(IN_AUTOCAST[method](400)).logits[0].float()
            assert (found - expected).abs().max() <= 0.2 * expected.std()
            out = way(IN_AUTOCAST[method](16))
            assert torch.stack(out.logits).isfinite().all()
            for layer in out.past_key_values.layers:
                assert layer.keys.dtype == layer.values.dtype == torch.bfloat16
                assert layer.keys.shape[2] < 60


WORDS = dict(chunk=25, instruction=(5, 6, 7), next_instruction=(8, 9), suffix=(4,))
REPEATING = kvops.KVzip(16, plus=True, **WORDS), kvops.AttentionMatching(16, **WORDS)


@pytest.mark.parametrize("policy", REPEATING, ids=lambda x: x.name)
def test_a_second_reading_under_autocast(policy):
    model = make_model()
    ids, _ = make_prompts(60)
    options = dict(max_new_tokens=8, do_sample=False, return_dict_in_generate=True, output_logits=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = kvops.hf.generate(model, policy, ids, **options)
    assert torch.stack(out.logits).isfinite().all()
    for layer in out.past_key_values.layers:
        assert layer.keys.dtype == torch.bfloat16 and layer.keys.shape[2] < 30


def test_compiled_models_run_the_cache_as_it_is():
    """Do what a compiled model does in each layer, over a cache that grows."""
    model = use_attention(make_model(num_hidden_layers=1))
    module = model.model.layers[0].self_attn

    def layer(x, cache):
        mask = create_causal_mask(model.config, x, None, past_key_values=cache)
        q, k = (x.unflatten(-1, (-1, 16)).transpose(1, 2) for x in (x, x[..., :32]))
        return kvops.hf.attention._attention(module, q, *cache.update(k, k, 0), mask, scaling=module.scaling)[0]

    compiled = torch.compile(layer, backend="eager", dynamic=True)
    x = torch.randn(1, 24, 64, generator=torch.Generator().manual_seed(4))
    caches = [KVCache(model.config, kvops.SnapKV(12, window=4)) for _ in range(2)]
    for part in x.split([20, 1, 1, 1, 1], 1):
        assert torch.equal(compiled(part, caches[0]), layer(part, caches[1]))
    assert caches[0].stats()[0].tokens_kept == 16
