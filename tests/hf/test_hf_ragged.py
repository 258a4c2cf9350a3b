"""Heads that differ in length in transformers: batches, beams, turns, memory, and one budget for a model's heads."""

import copy
from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers")

import kit  # noqa: E402
import kvops  # noqa: E402
import kvops.hf  # noqa: E402
from kvops.hf import KVCache, use_attention  # noqa: E402
from test_hf import generate, make_model, make_prompts  # noqa: E402
from test_hf_kvzip import POLICY, prefilled  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = dict(max_new_tokens=10, do_sample=False, pad_token_id=0)
POLICIES = {
    "snapkv": kvops.SnapKV(16, window=4),
    "dropkv": kvops.SnapKV(16, window=4, score="drop"),
    "criticalkv": kvops.CriticalKV(16, window=4),
    "defensivekv": kvops.DefensiveKV(16, window=4, stages=False),
    "keydiff": kvops.KeyDiff(16, sinks=2, recent=2, buffer=3),
    "r-kv": kvops.RKV(16, window=4, buffer=2),
    "expected-attention": kvops.ExpectedAttention(16, statistics="prompt", buffer=3),
    "laq": kvops.LAQ(16, steps=3),
    "kvzip": POLICY,
    "kvzip-model": replace(POLICY, head_mode="adaptive", scope="model"),
}
POLICIES = {name: replace(x, head_mode="adaptive") for name, x in POLICIES.items()}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def lengths_of(cache):
    """Return the slots of all heads, [b, all heads of all layers]."""
    return torch.cat([layer.cache.lengths for layer in cache.evicting_layers], 1)


@every_policy
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"prefill_chunk_size": 17}], ids=["", "beams", "chunks"])
def test_padded_rows_generate_what_they_generate_alone(policy, options):
    if "prefill_chunk_size" in options and not policy.needs.stage:
        pytest.skip("a row's chunks differ from those of the row alone")
    model, lengths = make_model(), (60, 47, 33, 9)
    ids, mask = make_prompts(*lengths)
    settings = dict(GREEDY, return_dict_in_generate=True, **options)
    out = kvops.hf.generate(model, policy, ids, attention_mask=mask, **settings)
    held = lengths_of(out.past_key_values)
    assert (held.amax(1) > held.amin(1))[:3].all()
    for row, n in enumerate(lengths):
        alone = kvops.hf.generate(model, policy, ids[row : row + 1, -n:], **settings)
        assert torch.equal(out.sequences[row, 60:], alone.sequences[0, n:]), row
        if not options and policy.buffer is None:  # rows of a batch are evicted in decode when the fullest is
            assert torch.equal(held[row], lengths_of(alone.past_key_values)[0]), row


@pytest.mark.parametrize("name", ["snapkv", "keydiff", "r-kv"])
def test_prompts_in_chunks_and_further_turns_end_at_the_budget(name):
    model, policy = use_attention(make_model()), POLICIES[name]
    ids, _ = make_prompts(90)
    cache = KVCache(model.config, policy)
    with torch.no_grad():
        for part in ids.split(30, 1):
            model(part, past_key_values=cache)
            heads = sum(layer.cache.lengths.shape[1] for layer in cache.evicting_layers)
            assert lengths_of(cache).sum() == heads * 16
    talk, turns = KVCache(model.config, policy), ids[:, :40]
    for n in (40, 25):
        new = make_prompts(n, seed=n)[0]
        turns = new if n == 40 else torch.cat((turns, new), 1)
        reply, _ = generate(model, talk, turns, tokens=6)
        turns = torch.cat((turns, reply), 1)
        assert lengths_of(talk).sum() <= heads * (16 + 5) and talk.get_seq_length() == turns.shape[1] - 1


def test_one_budget_for_all_heads_of_a_model(monkeypatch):
    """The kept tokens are those of the highest scores of all layers and heads, besides the sinks."""
    model = use_attention(make_model())
    ids, mask = make_prompts(60, 41)
    policy = POLICIES["kvzip-model"]
    cache, _ = prefilled(model, policy, ids, mask)
    layers, scores = cache.evicting_layers, []
    whole = [(layer.cache.k.clone(), layer.cache.v.clone()) for layer in layers]
    evict = kvops.hf.generation.evict_repeated

    def watched(caches):
        scores.extend(x.repeated().observed.clone() for x in caches)
        evict(caches)

    monkeypatch.setattr(kvops.hf.generation, "evict_repeated", watched)
    with torch.no_grad():
        kvops.hf.repeat(model, cache, ids, attention_mask=mask)
    every = torch.cat(scores, 1)  # [b, all heads, n]
    heads = every.shape[1]
    for row, pads in ((0, 0), (1, 19)):
        rest = every[row, :, pads + 4 :].flatten()
        kept = rest.topk(heads * 12).indices
        expected = torch.zeros(heads, 60, dtype=torch.bool)
        expected[:, pads : pads + 4] = True
        place = kept // (56 - pads), kept % (56 - pads) + pads + 4
        expected[place] = True
        found = torch.zeros(heads, 61, dtype=torch.bool)
        positions = [layer.cache.positions[row] for layer in layers]
        at = 0
        for own in positions:
            found[at : at + len(own)].scatter_(1, own.where(own >= 0, 60), True)
            at += len(own)
        assert torch.equal(found[:, :60], expected)
    assert (lengths_of(cache).sum(1) == heads * 16).all()
    per_layer = torch.stack([layer.cache.lengths.sum(1) for layer in layers])
    assert (per_layer.amax(0) > per_layer.amin(0)).all()  # layers differ too
    for layer, (k, v) in zip(layers, whole):
        own = layer.cache.positions
        for b in range(2):
            for h, m in enumerate(layer.cache.lengths[b]):
                assert torch.equal(layer.cache.k[b, h, :m], k[b, h, own[b, h, :m]])
                assert torch.equal(layer.cache.v[b, h, :m], v[b, h, own[b, h, :m]])


def test_one_budget_needs_all_layers():
    policy = replace(POLICIES["kvzip-model"])
    q, k, v = (kit.randn(1, h, 40, 16, seed=h) for h in (4, 2, 3))
    with kit.refuses("KVzip: with scope='model' the heads of all layers share a budget", "scope='layer'"):
        policy.compress(k, v[:, :2], q, k_repeat=k)
    cache = kvops.Cache(policy, layer=1, num_layers=3)
    cache.attend(q, k, v[:, :2])
    for first in (0, 25):
        with cache.repeating(first):
            cache.attend(q, k, v[:, :2])
    with kit.refuses("KVzip: .* expected the caches of all 3 layers, got 1"):
        cache.evict()
    with kit.refuses("KVzip: with scope='model' .* expected head_mode='adaptive', got 'shared'"):
        kvops.KVzip(16, scope="model", head_mode="shared")
    alone = kvops.Cache(policy)  # a model of one layer
    alone.attend(q, k, v[:, :2])
    with alone.repeating(0):
        alone.attend(q, k, v[:, :2])
    alone.evict()
    assert alone.lengths.sum() == 2 * 16
    with kit.refuses("evict.. must follow the passes", kind=RuntimeError):
        alone.evict()
    with kit.refuses("repeating.. expected a cache that has not evicted", kind=RuntimeError), alone.repeating(0):
        pass


def test_memory_and_copies():
    model = make_model()
    ids, _ = make_prompts(600)
    settings = dict(GREEDY, return_dict_in_generate=True)
    policy = kvops.SnapKV(100, window=4, kernel_size=1)
    dense = kvops.hf.generate(model, policy, ids, **settings).past_key_values
    out = kvops.hf.generate(model, replace(policy, head_mode="adaptive"), ids, **settings)
    cache, spare = out.past_key_values, 2 * 16  # a page and spare slots per head
    for layer, other in zip(cache.stats(), dense.stats()):
        assert layer.tokens_full == other.tokens_full and layer.bytes_full == other.bytes_full
        assert layer.tokens_kept == other.tokens_kept == 109
        assert layer.bytes_kept <= other.bytes_kept * (109 + spare) / 109
    assert cache.peak_bytes <= dense.peak_bytes * 1.1
    assert "to" in repr(cache.evicting_layers[0]) and "109 kept" not in repr(cache.evicting_layers[0])
    twin = copy.deepcopy(cache)
    with torch.no_grad():
        model.set_attn_implementation("kvops")
        a, b = (model(out.sequences[:, -1:], past_key_values=x).logits for x in (cache, twin))
    assert torch.equal(a, b) and torch.equal(lengths_of(cache), lengths_of(twin))


def test_the_attention_of_transformers_reads_rectangles():
    config = make_model().config
    for policy in (POLICIES["keydiff"], POLICIES["snapkv"]):
        with kit.refuses("KVCache: ", "call kvops.hf.use_attention"):
            KVCache(config, policy)
    with kit.refuses("different numbers of slots in different heads"):
        KVCache(config, POLICIES["keydiff"])
