"""Prompt lookup and assisted decoding with a cache that evicts: the text equals greedy decoding with the same method,
and unsupported calls raise before anything is generated."""

import contextlib

import pytest
import torch

transformers = pytest.importorskip("transformers")

import kvops  # noqa: E402
import kvops.hf  # noqa: E402
from kvops.hf import KVCache, use_attention  # noqa: E402
from kvops.hf import drafts as hf_drafts  # noqa: E402
from test_hf import make_model, make_prompts  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
needs_drafts = pytest.mark.skipif(hf_drafts.WHOLE_CACHES, reason="this transformers drafts with whole caches only")
EOS = {"eos_token_id": 96, "pad_token_id": 0}  # transformers 5.5 searches every draft for it
PROMPT_ONLY = {
    "full": kvops.Full(),
    "snapkv": kvops.SnapKV(16, window=4),
    "snapkv-short": kvops.SnapKV(16, window=2, kernel_size=1),
    "snapkv-adaptive": kvops.SnapKV(16, window=4, head_mode="adaptive"),
    "pyramidkv": kvops.PyramidKV(16, window=4),
    "chunkkv": kvops.ChunkKV(16, window=4, chunk=4),
    "protokv": kvops.ProtoKV(16, window=4, num_sats=4, num_chunks=6, buffer=None),
    "satkv": kvops.SATKV(16, window=4, buffer=None),
    "laq": kvops.LAQ(16, steps=3),
    "kvzip": kvops.KVzip(16, instruction=(5,), next_instruction=(6,), suffix=()),
    "kvgrad": kvops.KVzip(16, gradients=True, instruction=(5,), next_instruction=(6,), suffix=()),
    "kvzip+": kvops.KVzip(16, plus=True, instruction=(5,), next_instruction=(6,), suffix=()),
}
BY_KEYS = {
    "keydiff": kvops.KeyDiff(16, buffer=3),
    "keydiff, at once": kvops.KeyDiff(16, buffer=1),
    "keydiff, adaptive": kvops.KeyDiff(16, buffer=3, head_mode="adaptive"),
    "lagkv": kvops.LagKV(lag=8, ratio=0.25, sinks=2),
    "streaming": kvops.StreamingLLM(16),
    "lacache": kvops.LaCache(24),
    "random": kvops.Random(16, buffer=4, seed=2),
    "satkv": kvops.SATKV(16, window=4, buffer=4),
}
BY_QUERIES = {
    "h2o": kvops.H2O(16),
    "tova": kvops.TOVA(16),
    "protokv": kvops.ProtoKV(16, window=4, num_sats=4, num_chunks=6, buffer=4, alpha=2),
    "snapkv of one row": kvops.SnapKV(16, window=1),
}


def repetitive(n=60, seed=1):
    """Return a prompt with repetitions, so that a lookup finds something."""
    ids, _ = make_prompts(n // 3, seed=seed)
    return torch.cat([ids, ids, ids], 1)


def drafts(kind, seed=0):
    """Return arguments of generate. The assistant is the model with noise, so some of its drafts are accepted."""
    if kind == "lookup":
        return {"prompt_lookup_num_tokens": 4}
    assistant = make_model()
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for x in assistant.parameters():
            x.add_(0.005 * torch.randn(x.shape, generator=g))
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return {"assistant_model": assistant}


class Steps:
    """Records how many tokens the model reads in each step."""

    def __init__(self, model):
        self.tokens = []
        model.register_forward_pre_hook(self.see, with_kwargs=True)

    def see(self, module, args, kwargs):
        self.tokens.append(kwargs.get("input_ids", *args).shape[1])


def how(name, model, policy):
    """Return generation as a function: with a cache of its own, by `kvops.hf.generate`, or in a block."""
    if name == "generate":
        return lambda ids, **call: kvops.hf.generate(model, policy, ids, **call)
    if name == "cache":
        use_attention(model)

    def call(ids, **call):
        with kvops.hf.compress(model, policy) if name == "compress" else contextlib.nullcontext():
            cache = {} if name == "compress" else {"past_key_values": KVCache(model.config, policy)}
            return model.generate(ids, attention_mask=torch.ones_like(ids), **cache, **call)

    return call


@needs_drafts
@pytest.mark.parametrize("name", ["cache", "generate", "compress"])
@pytest.mark.parametrize("kind", ["lookup", "assistant"])
@pytest.mark.parametrize("method", PROMPT_ONLY)
def test_the_text_of_greedy_decoding(method, kind, name):
    if PROMPT_ONLY[method].needs.stage and name == "cache":
        pytest.skip("LAQ and KVzip evict in kvops.hf.generate and in a block")
    model, ids, policy = make_model(**EOS), repetitive(), PROMPT_ONLY[method]
    options = dict(max_new_tokens=24, do_sample=False, return_dict_in_generate=True)
    run = how(name, model, policy)
    expected = run(ids, **options)
    steps = Steps(model)
    found = run(ids, **options, **drafts(kind))
    assert torch.equal(found.sequences, expected.sequences)
    read = [x for x in steps.tokens if x > 1]
    assert read[0] == ids.shape[1] and len(read) > 1  # the prompt alone, then drafts
    assert sum(steps.tokens) > ids.shape[1] + 23  # some are rejected,
    assert len(read) < 24 or kind == "lookup"  # and some are accepted
    caches = found.past_key_values, expected.past_key_values
    for layer, truth in zip(*(x.evicting_layers for x in caches)):
        assert torch.equal(layer.cache.positions, truth.cache.positions) and not layer.cache.frozen
        torch.testing.assert_close(layer.keys, truth.keys, atol=1e-4, rtol=1e-4)


@needs_drafts
def test_drafts_that_are_as_long_as_a_window_evict_nothing():
    """Outside of a draft, SnapKV treats a step of a window's length as a prompt chunk."""
    model, ids, policy = make_model(**EOS), repetitive(), kvops.SnapKV(16, window=2)
    out = kvops.hf.generate(
        model, policy, ids, max_new_tokens=24, return_dict_in_generate=True, do_sample=False, **drafts("lookup")
    )
    new = out.sequences.shape[1] - ids.shape[1]
    assert [x.tokens_kept for x in out.past_key_values.stats()] == [16 + new - 1] * 3


@needs_drafts
@pytest.mark.parametrize("name", ["cache", "generate", "compress"])
@pytest.mark.parametrize("kind", ["lookup", "assistant"])
@pytest.mark.parametrize("method", BY_KEYS)
def test_methods_that_evict_in_decode_wait_for_what_is_accepted(method, kind, name, monkeypatch):
    """Evictions see accepted tokens only: a cache that reads the text up to these ends holds the same tokens."""
    model, ids, policy = make_model(**EOS), repetitive(), BY_KEYS[method]
    ends, catch_up = [], kvops.Cache.catch_up

    def watched(cache):
        catch_up(cache)
        if cache.layer == 0:
            ends.append((cache.seen, int(cache.lengths.sum()) // cache.lengths.numel()))

    monkeypatch.setattr(kvops.Cache, "catch_up", watched)
    out = how(name, model, policy)(
        ids, max_new_tokens=24, do_sample=False, return_dict_in_generate=True, **drafts(kind)
    )
    found, text = out.past_key_values, out.sequences
    assert len(ends) > 2
    if kind == "assistant" and method in ("lagkv", "streaming", "lacache"):  # elsewhere all drafts are wrong
        assert any(b - a > 1 for (a, _), (b, _) in zip(ends, ends[1:]))
    use_attention(model)
    alone = KVCache(model.config, policy)
    with torch.no_grad():
        first = 0
        for end in (ids.shape[1], *(x for x, _ in ends if x > ids.shape[1])):
            for layer in alone.evicting_layers:
                layer.cache.frozen = first > 0
            model(text[:, first:end], past_key_values=alone)
            for layer in alone.evicting_layers if first else ():
                layer.cache.frozen = False
                catch_up(layer.cache)
            first = end
    for layer, truth in zip(found.evicting_layers, alone.evicting_layers):
        assert layer.cache.seen >= truth.cache.seen and not layer.cache.frozen
        if layer.cache.seen == truth.cache.seen:
            assert torch.equal(layer.cache.positions, truth.cache.positions)
            torch.testing.assert_close(layer.keys, truth.keys, atol=1e-3, rtol=1e-3)
    most = {"lagkv": 40, "lacache": 28}.get(method, 16 + 4)
    assert max(x for _, x in ends) <= most


@pytest.mark.parametrize("name", ["cache", "generate", "compress"])
@pytest.mark.parametrize("kind", ["lookup", "assistant"])
@pytest.mark.parametrize("method", BY_QUERIES)
def test_methods_that_look_at_queries_in_decode_are_refused_at_the_start(method, kind, name):
    model = make_model(**EOS)
    run, steps = how(name, model, BY_QUERIES[method]), Steps(model)
    with pytest.raises(NotImplementedError, match=r"expected a policy that uses the prompt's queries only .*buffer"):
        run(repetitive(), max_new_tokens=8, do_sample=False, **drafts(kind))
    assert steps.tokens == []


@pytest.mark.parametrize("name", ["cache", "generate", "compress"])
@pytest.mark.parametrize("kind", ["lookup", "assistant"])
def test_a_transformers_that_asks_for_whole_caches(kind, name, monkeypatch):
    """It would raise after the prompt."""
    monkeypatch.setattr(hf_drafts, "WHOLE_CACHES", True)
    model = make_model(**EOS)
    run, steps = how(name, model, kvops.KeyDiff(16)), Steps(model)
    with pytest.raises(NotImplementedError, match=r"transformers < 5\.24, .*, got 5\..*; call generate without drafts"):
        run(repetitive(), max_new_tokens=8, do_sample=False, **drafts(kind))
    assert steps.tokens == []


def test_a_cache_that_holds_something_is_refused():
    """transformers would read the cached tokens again."""
    model = use_attention(make_model(**EOS))
    ids, cache = repetitive(), KVCache(model.config, kvops.SnapKV(16, window=4))
    with torch.no_grad():
        model(ids[:, :40], past_key_values=cache)
    with pytest.raises(NotImplementedError, match="expected an empty cache, got one that has seen 40 tokens"):
        model.generate(ids, past_key_values=cache, max_new_tokens=8, **drafts("lookup"))
    assert cache.get_seq_length() == 40


def test_laq_needs_its_stages():
    model = use_attention(make_model(**EOS))
    cache = KVCache(model.config, kvops.LAQ(16))
    with pytest.raises(NotImplementedError, match="expected kvops.hf.generate or a block"):
        model.generate(repetitive(), past_key_values=cache, max_new_tokens=8, **drafts("lookup"))


def test_drafts_by_the_models_own_layers_are_refused():
    with pytest.raises(NotImplementedError, match="an assistant_model.*, got EarlyExitCandidateGenerator"):
        kvops.hf.generate(make_model(**EOS), PROMPT_ONLY["snapkv"], repetitive(), assistant_early_exit=1)


@pytest.mark.parametrize("kind", ["lookup", "assistant"])
def test_without_a_cache_of_ours_nothing_changes(kind):
    model, ids = make_model(**EOS), repetitive()
    expected = model.generate(ids, max_new_tokens=24, do_sample=False)
    steps = Steps(model)
    assert torch.equal(model.generate(ids, max_new_tokens=24, do_sample=False, **drafts(kind)), expected)
    assert steps.tokens[0] > ids.shape[1]  # the prompt and a draft


@needs_drafts
def test_crop_takes_back_what_was_drafted_of_a_padded_row():
    model = make_model(**EOS)
    ids, pads = repetitive(), torch.zeros(1, 7, dtype=torch.long)
    mask = torch.cat([pads, torch.ones_like(ids)], 1)
    options = dict(max_new_tokens=24, do_sample=False)
    alone = kvops.hf.generate(model, PROMPT_ONLY["snapkv"], ids, **options)
    padded = kvops.hf.generate(
        model, PROMPT_ONLY["snapkv"], torch.cat([pads, ids], 1), attention_mask=mask, **options, **drafts("lookup")
    )
    assert torch.equal(padded[:, 7:], alone)
