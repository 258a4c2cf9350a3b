"""kvops.hf: `model.generate` with a cache that evicts, compared with DynamicCache and with explicit attention masks."""

import copy
import os
import subprocess
import sys
import warnings
import weakref
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from packaging.version import Version  # noqa: E402
from transformers import CONFIG_MAPPING, DynamicCache, LlamaConfig, MistralConfig, Qwen2Config  # noqa: E402

import kit  # noqa: E402
import kvops  # noqa: E402
from kvops.hf import KVCache  # noqa: E402
from kvops.supported import TRANSFORMERS  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]
VOCAB = 97
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large enough that attention matters: evicted tokens change the logits
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "mistral": MistralConfig}


def make_model(kind="llama", attn="sdpa", **settings):
    extra = {"sliding_window": None} if kind == "mistral" else {}
    torch.manual_seed(0)
    config = CONFIGS[kind](**{**TINY, **extra, **settings})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attn).eval()


def needs(kind, since="0"):
    """Skip models that this transformers lacks, or has with another attention."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    if Version(transformers.__version__) < Version(since):
        pytest.skip(f"before transformers {since} {kind} had another attention, got {transformers.__version__}")


def make_prompts(*lengths, seed=1):
    """Return left-padded prompts: ids and mask, [b, longest]."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, n in enumerate(lengths):
        ids[row, -n:] = torch.randint(2, VOCAB, (n,), generator=g)
        mask[row, -n:] = 1
    return ids, mask


def generate(model, cache, ids, mask=None, tokens=12, **kwargs):
    """Return new tokens [rows, tokens] and logits [rows, tokens, vocab]."""
    mask = torch.ones_like(ids) if mask is None else mask
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **kwargs,
    )
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, 1)


def assert_rows_as_alone(model, cache_of, ids, mask, options) -> None:
    """A padded batch gives the same tokens and logits as each row alone. cache_of: makes the cache for a config."""
    tokens, logits = generate(model, cache_of(model.config, attention_mask=mask), ids, mask, **options)
    for row, n in enumerate(mask.sum(1).tolist()):
        expected = generate(model, cache_of(model.config), ids[row : row + 1, -n:], **options)
        assert torch.equal(tokens[row : row + 1], expected[0]), row
        if not options.get("num_beams"):
            torch.testing.assert_close(logits[row : row + 1], expected[1], atol=1e-4, rtol=1e-4)


def same(a, b):
    """Same tokens and bit-identical logits."""
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


KEEP_ALL = {
    "full": lambda: kvops.Full(),
    "keydiff": lambda: kvops.KeyDiff(400),
    "streaming": lambda: kvops.StreamingLLM(400, positions="original"),
    "random": lambda: kvops.Random(400),
    "lagkv": lambda: kvops.LagKV(lag=128, ratio=0.5),
}
EVICT = {
    "keydiff": lambda budget: kvops.KeyDiff(budget),
    "keydiff-recent": lambda budget: kvops.KeyDiff(budget, sinks=2, recent=4),
    "streaming": lambda budget: kvops.StreamingLLM(budget, sinks=2, positions="original"),
    "shared": lambda budget: kvops.KeyDiff(budget, head_mode="shared"),
}


# ---- a method that keeps everything equals DynamicCache ----


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("method", KEEP_ALL)
def test_keeping_everything_changes_nothing(kind, method):
    model = make_model(kind)
    ids, _ = make_prompts(40, 40)
    expected = generate(model, DynamicCache(config=model.config), ids)
    cache = KVCache(model.config, KEEP_ALL[method]())
    assert same(generate(model, cache, ids), expected)
    assert cache.get_seq_length() == 40 + 11  # the last token was never fed


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("method", ["full", "keydiff", "streaming", "random"])
@pytest.mark.parametrize(
    "options",
    [{}, {"prefill_chunk_size": 7}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}],
    ids=["plain", "chunks", "beams", "beams-returned"],
)
def test_keeping_everything_of_a_padded_batch(attn, method, options):
    model = make_model(attn=attn)
    ids, mask = make_prompts(40, 23, 9)
    expected = generate(model, DynamicCache(config=model.config), ids, mask, **options)
    cache = KVCache(model.config, KEEP_ALL[method](), attention_mask=mask)
    assert same(generate(model, cache, ids, mask, **options), expected)


@pytest.mark.parametrize("options", [{"prefill_chunk_size": 7}, {"num_beams": 3}], ids=["chunks", "beams"])
def test_lagkv_below_its_first_compression_changes_nothing(options):
    model = make_model()
    ids, _ = make_prompts(40, 40)
    expected = generate(model, DynamicCache(config=model.config), ids, **options)
    assert same(generate(model, KVCache(model.config, KEEP_ALL["lagkv"]()), ids, **options), expected)


@pytest.mark.parametrize("method", KEEP_ALL)
def test_second_turn_when_everything_is_kept(method):
    model = make_model()
    ids, _ = make_prompts(30, 30)
    more, _ = make_prompts(11, 11, seed=2)
    results = []
    for cache in (DynamicCache(config=model.config), KVCache(model.config, KEEP_ALL[method]())):
        first, _ = generate(model, cache, ids)
        results.append(generate(model, cache, torch.cat([ids, first, more], 1)))
    assert same(*results)


# ---- eviction, compared with the reference ----


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_is_kept_after_the_prefill_is_what_the_method_keeps(kind):
    """Eviction comes after the prompt's own attention, so one-shot compression of DynamicCache's K and V must give the
    same bits."""
    model = make_model(kind)
    ids, _ = make_prompts(100, 100)
    full = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=full)
    cases = [
        (kvops.KeyDiff(25), lambda k, v: kvops.keydiff_compress(k, v, 25)),
        (kvops.KeyDiff(0.3), lambda k, v: kvops.keydiff_compress(k, v, 0.3)),
        (kvops.StreamingLLM(25, positions="original"), lambda k, v: kvops.streamingllm_compress(k, v, 25)),
        (kvops.LagKV(lag=16, ratio=0.25, sinks=4), lambda k, v: kvops.lagkv_compress(k, v, 16, 0.25, sinks=4)),
    ]
    for method, compress in cases:
        cache = KVCache(model.config, method)
        with torch.no_grad():
            model(ids, past_key_values=cache)
        for layer, stock in zip(cache.layers, full.layers):
            k, v, indices = compress(stock.keys, stock.values)
            assert indices.shape[-1] < 100
            assert torch.equal(layer.keys, k) and torch.equal(layer.values, v)
            assert torch.equal(layer.cache.positions, indices)


@pytest.mark.parametrize("chunk", [1, 8, 40])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_streaming_is_attention_under_an_explicit_mask(attn, chunk):
    """StreamingLLM keeps the same slots everywhere, so one forward with a 4D mask hides what each query may not see."""
    n, budget, sinks = 60, 12, 2
    model = make_model(attn=attn)
    ids, _ = make_prompts(n)
    cache = KVCache(model.config, kvops.StreamingLLM(budget, sinks=sinks, positions="original"))
    with torch.no_grad():
        got = torch.cat([model(part, past_key_values=cache).logits for part in ids.split(chunk, 1)], 1)

    q, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    start = q // chunk * chunk  # tokens before the query's chunk
    stored = (j < start) & ((start <= budget) | (j < sinks) | (j >= start - (budget - sinks)))
    visible = stored | ((j >= start) & (j <= q))
    mask = torch.zeros(1, 1, n, n).masked_fill(~visible, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        full = model(ids).logits
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    if chunk < n - budget:
        assert (expected - full).abs().max() > 0.1  # otherwise the test could not fail


def test_each_head_attends_to_what_it_kept():
    """KeyDiff keeps different tokens per head: the step after the prefill of one layer, with a mask per head."""
    model = make_model(attn="eager", num_hidden_layers=1)
    ids, _ = make_prompts(50)
    step = torch.tensor([[5]])
    cache, full = KVCache(model.config, kvops.KeyDiff(10)), DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        positions = cache.layers[0].cache.positions.clone()  # [1, 2, 10]
        got = model(step, past_key_values=cache).logits
        model(ids, past_key_values=full)
        mask = torch.full((1, 2, 1, 51), torch.finfo(torch.float32).min)
        mask[..., -1] = 0
        mask.scatter_(-1, positions.unsqueeze(2), 0.0)
        out = model(step, past_key_values=full, attention_mask=mask.repeat_interleave(2, 1))
    assert not torch.equal(positions[0, 0], positions[0, 1])
    torch.testing.assert_close(got, out.logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("method", EVICT)
@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 1}, {"num_beams": 2}], ids=["plain", "steps", "beams"])
def test_rows_of_a_padded_batch_equal_the_rows_alone(attn, method, options):
    """Budget 24 of 60 slots: row 0 loses tokens, rows 1 and 2 lose their pads first, and row 3 keeps some pads."""
    model = make_model(attn=attn)
    lengths = (60, 37, 24, 9)
    ids, mask = make_prompts(*lengths)
    cache = KVCache(model.config, EVICT[method](24), attention_mask=mask)
    tokens, logits = generate(model, cache, ids, mask, **options)
    assert all(s.tokens_kept == 24 for s in cache.stats())
    changed = 0.0
    for row, n in enumerate(lengths):
        alone = ids[row : row + 1, -n:]
        expected = generate(model, KVCache(model.config, EVICT[method](24)), alone, **options)
        assert torch.equal(tokens[row : row + 1], expected[0]), row
        if not options.get("num_beams"):  # with beams, the order of the beams' logits is not defined
            torch.testing.assert_close(logits[row : row + 1], expected[1], atol=1e-4, rtol=1e-4)
            full = generate(model, DynamicCache(config=model.config), alone, **options)
            changed = max(changed, (full[1][:, :2] - logits[row, :2]).abs().max().item())
    assert changed > 0.1 or options.get("num_beams")


def test_pads_and_attention_mask_say_the_same():
    model = make_model()
    ids, mask = make_prompts(40, 12)
    results = [
        generate(model, KVCache(model.config, kvops.KeyDiff(20), **told), ids, mask)
        for told in ({"attention_mask": mask}, {"pads": [0, 28]}, {"pads": torch.tensor([0, 28])})
    ]
    assert same(results[0], results[1]) and same(results[0], results[2])


def test_chunked_lagkv_equals_one_shot():
    """Layer 0's K and V do not depend on attention, so the same tokens are kept however they arrive."""
    model = make_model()
    ids, _ = make_prompts(200)
    full = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=full)
    one = kvops.lagkv_compress(full.layers[0].keys, full.layers[0].values, 16, 0.25, sinks=4)
    for chunk in (1, 23, 200):
        cache = KVCache(model.config, kvops.LagKV(lag=16, ratio=0.25, sinks=4))
        generate(model, cache, ids, tokens=1, prefill_chunk_size=chunk)
        assert cache.get_seq_length() == 200
        assert cache.layers[0].keys.shape == one.k.shape
        # projections of one token and of many round differently: the values are close, and the selection is equal
        assert torch.equal(cache.layers[0].cache.positions, one.indices)
        torch.testing.assert_close(cache.layers[0].keys, one.k, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", [*EVICT, "lagkv"])
def test_second_turn_feeds_only_what_is_new(method):
    model = make_model()
    ids, _ = make_prompts(60)
    more, _ = make_prompts(9, seed=2)
    rule = kvops.LagKV(lag=8, ratio=0.25, sinks=2) if method == "lagkv" else EVICT[method](20)
    cache = KVCache(model.config, rule)
    first, _ = generate(model, cache, ids)
    by_hand = copy.deepcopy(cache)
    talk = torch.cat([ids, first, more], 1)
    tokens, _ = generate(model, cache, talk, tokens=6)

    feed, expected = talk[:, by_hand.get_seq_length() :], []  # the last answer token, and the new ones
    assert feed.shape[1] == 1 + 9
    for _ in range(6):
        past = by_hand.get_seq_length()
        positions = torch.arange(past, past + feed.shape[1])[None]
        with torch.no_grad():
            feed = model(feed, past_key_values=by_hand, position_ids=positions).logits[:, -1:].argmax(-1)
        expected.append(feed)
    assert torch.equal(tokens, torch.cat(expected, 1))
    assert cache.get_seq_length() == talk.shape[1] + 5


# ---- operations on the batch ----


@pytest.mark.parametrize("method", [*EVICT, "lagkv"])
def test_batch_operations_move_the_whole_state(method):
    model = make_model()
    ids, _ = make_prompts(40, 40)
    rule = kvops.LagKV(lag=8, ratio=0.25, sinks=2) if method == "lagkv" else EVICT[method](20)

    def after(ids, operation):
        cache = KVCache(model.config, rule)
        with torch.no_grad():
            model(ids, past_key_values=cache)
            operation(cache)
            rows = cache.layers[0].keys.shape[0]
            step = torch.arange(3, 33).repeat(rows, 1)  # 30 tokens one by one: the policy continues from its state
            return torch.cat([model(t, past_key_values=cache).logits for t in step.split(1, 1)], 1)

    for operation, rows in [
        (lambda c: c.reorder_cache(torch.tensor([1, 0])), [1, 0]),
        (lambda c: c.reorder_cache(torch.tensor([1, 1])), [1, 1]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1]),
        (lambda c: c.batch_select_indices(torch.tensor([1])), [1]),
    ]:
        got = after(ids, operation)
        expected = after(ids[rows], lambda c: None)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_reset_is_a_new_cache():
    model = make_model()
    ids, mask = make_prompts(40, 12)
    cache = KVCache(model.config, kvops.KeyDiff(20), attention_mask=mask)
    first = generate(model, cache, ids, mask)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.stats() == []
    assert same(generate(model, cache, ids, mask), first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    model = make_model().to(dtype)
    ids, _ = make_prompts(40)
    cache = KVCache(model.config, kvops.KeyDiff(20))
    tokens, logits = generate(model, cache, ids)
    assert tokens.shape == (1, 12) and logits.isfinite().all()
    assert cache.layers[0].keys.dtype == dtype and cache.stats()[0].tokens_kept == 20


# ---- a real model ----


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 256}], ids=["plain", "chunks"])
def test_a_trained_model_finds_the_key_in_a_padded_batch(options):
    """As a user would call it: text, tokenizer, unmodified generate. A third of the longer prompt is kept."""
    folder = ROOT / "bench" / "models" / "passkey-llama"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    text = (ROOT / "bench" / "data" / "haystack.txt").read_text()
    keys = ["58291740366172940581", "90417263350918264417"]
    prompts = [
        f"{text[at : at + 500]} The pass key is {key}. Remember it. {text[at + 500 : at + length]}"
        " What is the pass key? The pass key is "
        for key, at, length in zip(keys, (20_000, 90_000), (1900, 1300))
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    found = {}
    for method in (kvops.KeyDiff(640), kvops.StreamingLLM(640, positions="original")):
        cache = KVCache(model.config, method, attention_mask=inputs["attention_mask"])
        out = model.generate(**inputs, past_key_values=cache, max_new_tokens=20, do_sample=False, **options)
        found[type(method)] = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :])
        assert all(640 <= s.tokens_kept <= 640 + 40 for s in cache.stats())  # and a buffer
    assert found[kvops.KeyDiff] == keys
    assert found[kvops.StreamingLLM] != keys  # the pass keys lie before its window


# ---- memory ----


def storage_bytes(*tensors):
    return sum(x.untyped_storage().nbytes() for x in tensors)


@pytest.mark.parametrize(
    "method, kept",
    [
        (kvops.KeyDiff(24), 24),
        (kvops.StreamingLLM(24, positions="original"), 24),
        (kvops.Random(0.25), 50),
        (kvops.LagKV(lag=16, ratio=0.25, sinks=4), 4 + 11 * 4 + 16 + 4),  # Eq. 10: P = 196 // 16 = 12, rest 4
        (kvops.Full(), 200),
    ],
    ids=repr,
)
def test_memory_is_freed(method, kept):
    model = make_model()
    ids, _ = make_prompts(200, 200)
    cache = KVCache(model.config, method)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    per_token = 2 * 2 * (16 + 16) * 4  # 2 rows, 2 KV heads, K and V of 16 channels, fp32
    for i, (layer, stats) in enumerate(zip(cache.layers, cache.stats())):
        assert layer.keys.shape == (2, 2, kept, 16)
        assert storage_bytes(layer.keys, layer.values) == kept * per_token
        assert stats == (i, True, 200, kept, 200 * per_token, kept * per_token)


def test_the_step_does_not_outlive_its_attention():
    cache = KVCache(make_model().config, kvops.KeyDiff(8))
    k, v = torch.randn(2, 1, 2, 100, 16).unbind(0)
    step = cache.update(k, v, 0)
    assert step[0].shape[2] == 100 and cache.layers[0].keys.shape[2] == 8
    alive = [weakref.ref(x) for x in step]
    del step, k, v
    assert [r() for r in alive] == [None, None]


# ---- crop ----


def test_crop_of_what_is_held_and_beyond():
    model = make_model()
    ids, _ = make_prompts(40)
    cache = KVCache(model.config, kvops.KeyDiff(20))
    with torch.no_grad():
        model(ids, past_key_values=cache)
    twin = copy.deepcopy(cache)
    cache.crop(0)
    with pytest.raises(ValueError, match="crop"):
        cache.crop(-5)
    with pytest.raises(ValueError, match="crop"):  # a length, before transformers 5.15
        cache.crop(35)
    more, _ = make_prompts(30, seed=3)
    assert cache.get_seq_length() == 40
    assert same(generate(model, cache, torch.cat([ids, more], 1)), generate(model, twin, torch.cat([ids, more], 1)))


def test_crop_without_eviction_equals_dynamic_cache():
    model = make_model()
    ids, _ = make_prompts(40)
    more, _ = make_prompts(10, seed=3)
    results = []
    for cache in (DynamicCache(config=model.config), KVCache(model.config, kvops.KeyDiff(100))):
        with torch.no_grad():
            model(ids, past_key_values=cache)
        cache.crop(-5)
        assert cache.get_seq_length() == 35
        results.append(generate(model, cache, torch.cat([ids[:, :35], more], 1)))
    assert same(*results)


def test_a_failed_crop_leaves_every_layer_as_it_was():
    model = make_model("qwen2", **MIXED)
    ids, _ = make_prompts(30)
    cache = KVCache(model.config, kvops.KeyDiff(20))
    with torch.no_grad():
        model(ids[:, :12], past_key_values=cache)
        cache.layers[2].update(*torch.randn(2, 1, 2, 18, 16).unbind(0))  # only this one evicts
    with pytest.raises(ValueError, match="crop"):
        cache.crop(-8)
    assert [layer.get_seq_length() for layer in cache.layers] == [12, 12, 30]
    assert [layer.keys.shape[2] for layer in cache.layers] == [12, 12, 20]


# ---- layers of other kinds ----

MIXED = {
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 16,
    "max_window_layers": 0,
}


def test_sliding_layers_keep_the_stock_class():
    model = make_model("qwen2", **MIXED)
    ids, mask = make_prompts(40, 22)
    stock = DynamicCache(config=model.config)
    expected = generate(model, stock, ids, mask)
    cache = KVCache(model.config, kvops.Full(), attention_mask=mask)
    assert same(generate(model, cache, ids, mask), expected)
    assert [s.evicts for s in cache.stats()] == [True, False, True]
    assert type(cache.layers[1]) is type(stock.layers[1])

    cache = KVCache(model.config, kvops.KeyDiff(20), attention_mask=mask)
    tokens, logits = generate(model, cache, ids, mask)
    assert [s.tokens_kept for s in cache.stats()] == [20, 15, 20]
    assert [s.tokens_full for s in cache.stats()] == [51, 51, 51]
    for row, n in enumerate((40, 22)):
        alone = generate(model, KVCache(model.config, kvops.KeyDiff(20)), ids[row : row + 1, -n:])
        assert torch.equal(tokens[row : row + 1], alone[0])


def test_a_model_of_sliding_layers_only():
    model = make_model("mistral", sliding_window=16)
    ids, _ = make_prompts(40)
    with pytest.warns(UserWarning, match="nothing is evicted"):
        cache = KVCache(model.config, kvops.KeyDiff(8))
    expected = generate(model, DynamicCache(config=model.config), ids)
    assert same(generate(model, cache, ids), expected)
    assert not any(s.evicts for s in cache.stats())


# ---- refusals ----


def test_wrong_arguments():
    model = make_model()
    config, method = model.config, kvops.KeyDiff(20)
    mask = make_prompts(6, 4)[1]
    with pytest.raises(TypeError, match="config.*LlamaForCausalLM"):
        KVCache(model, method)
    with pytest.raises(TypeError, match="policy.*the class KeyDiff"):
        KVCache(config, kvops.KeyDiff)
    with pytest.raises(TypeError, match="policy.*float"):
        KVCache(config, 0.5)
    with pytest.raises(ValueError, match="got both"):
        KVCache(config, method, attention_mask=mask, pads=[0, 2])
    with pytest.raises(ValueError, match="on the left"):
        KVCache(config, method, attention_mask=mask.flip(1))
    with pytest.raises(ValueError, match="on the left"):
        KVCache(config, method, attention_mask=mask * 0)
    with pytest.raises(ValueError, match=r"\[batch, tokens\]"):
        KVCache(config, method, attention_mask=mask[0])
    for pads in ([0, -1], [0.5, 1.0], [[0, 1]], []):
        with pytest.raises(ValueError, match="one integer per row"):
            KVCache(config, method, pads=pads)
    ids, mask = make_prompts(6, 4, 2)
    with pytest.raises(ValueError, match=r"pads.*expected 3, got 2"):
        generate(model, KVCache(config, method, pads=[0, 2]), ids, mask)
    assert vars(method) == vars(kvops.KeyDiff(20))  # a cache never writes to its policy


def test_what_stock_masks_cannot_express():
    config = make_model().config
    mask = make_prompts(6, 4)[1]
    with pytest.raises(ValueError, match=r"LagKV.*padded.*use_attention"):
        KVCache(config, kvops.LagKV(lag=16), attention_mask=mask)
    with pytest.raises(ValueError, match=r"one attention mask.*use_attention"):
        KVCache(config, kvops.LagKV(lag=16, score="l2"))
    with pytest.raises(TypeError, match="attend_before_compress"):
        KVCache(config, kvops.LagKV(lag=16), attend_before_compress=False)
    with pytest.raises(NotImplementedError, match="encoder-decoder"):
        KVCache(transformers.T5Config(num_layers=1, d_model=16), kvops.KeyDiff(20))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KVCache(config, kvops.LagKV(lag=16), attention_mask=torch.ones_like(mask))  # a mask without padding


def run_python(code, *path):
    env_path = ":".join([*map(str, path), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {env_path.split(':')!r}\n{code}"],
        capture_output=True,
        text=True,
    )


# Nothing of transformers takes part in these methods that does not in the others.
ALIKE = ("pyramidkv", "chunkkv", "protokv", "satkv", "tova", "lagkv", "random")


@pytest.mark.full
@pytest.mark.parametrize("which", ["FLOOR", "NEWEST"])
def test_the_oldest_and_the_newest_transformers(which):
    """Run the tests of kvops.hf again with the oldest and the newest supported transformers. Continuous batching, whose
    tests take longer than all others together, is as in the version of requirements-demo.txt."""
    expected = {"FLOOR": TRANSFORMERS.oldest, "NEWEST": TRANSFORMERS.newest}[which]
    folder = ROOT / ".venv" / f"transformers-{expected}"
    if not folder.exists():
        pytest.skip(f"needs transformers {expected} in {folder}, where `make test-all` puts it")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    options = {"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": path}, "capture_output": True, "text": True}
    version = [sys.executable, "-c", "import transformers; print(transformers.__version__)"]
    assert subprocess.run(version, **options).stdout.strip() == expected
    tests = sorted(str(x) for x in Path(__file__).parent.glob("test_hf*.py") if "continuous" not in x.stem)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", f"not ({' or '.join(ALIKE)})"]
    done = subprocess.run([*command, *kit.RERUN, *tests], **options)
    assert done.returncode == 0, done.stdout


def test_transformers_is_imported_only_by_hf():
    done = run_python("import kvops, sys; sys.exit('transformers' in sys.modules)")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "source, message",
    [
        ("raise ModuleNotFoundError(\"No module named 'transformers'\")", "which is not installed"),
        ("__version__ = '4.57.1'", "found 4.57.1"),
    ],
    ids=["missing", "too-old"],
)
def test_a_missing_or_old_transformers_is_one_clear_line(tmp_path, source, message):
    (tmp_path / "transformers.py").write_text(source)
    done = run_python("import kvops.hf", tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "During handling" not in done.stderr
    assert last.startswith("ImportError: kvops.hf needs transformers >= ") and message in last and "pip install" in last
