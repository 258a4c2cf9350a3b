"""kvops.hf.compress: every call of a model in a block gets a cache that evicts."""

import asyncio
import contextlib
import contextvars
import copy
import gc
import pickle
import threading
import weakref
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import DynamicCache, GenerationConfig, LogitsProcessor, TextIteratorStreamer  # noqa: E402

import kvops  # noqa: E402
from kvops.hf import KVCache, compress  # noqa: E402
from kvops.hf.arguments import CACHE  # noqa: E402
from test_hf import make_model, make_prompts  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
FOLDER = Path(__file__).parents[2] / "bench" / "models" / "passkey-llama"
GREEDY = {"max_new_tokens": 8, "do_sample": False}
SNAP, OTHER = kvops.SnapKV(12, window=4), kvops.KeyDiff(20)
POLICIES = {
    "snapkv": SNAP,
    "keydiff": OTHER,
    "pyramidkv": kvops.PyramidKV(20, window=4),
    "lacache": kvops.LaCache(16),
    "laq": kvops.LAQ(16),
    "kvzip": kvops.KVzip(16, chunk=20, instruction=(), next_instruction=(), suffix=()),
}


@pytest.fixture
def model():
    """A small model, which the test must leave unchanged."""
    model = make_model()
    before = set(vars(model))
    yield model
    assert_untouched(model)
    assert set(vars(model)) - {"_is_torch_compile"} == before  # torch.compile leaves this one


def assert_untouched(model) -> None:
    assert model.config._attn_implementation == "sdpa" and model not in kvops.hf.attention._generating
    assert not vars(model).keys() & set(kvops.hf.compression._HOOKS)
    assert model not in kvops.hf.compression._hooked and model not in kvops.hf.compression._entered.get()


def expected_of(model, policy, ids, mask=None, **kwargs):
    """Return the text of kvops.hf.generate, which differs from the text with the whole cache."""
    out = kvops.hf.generate(model, policy, ids, attention_mask=mask, **GREEDY, **kwargs)
    assert not torch.equal(out, kvops.hf.generate(model, kvops.Full(), ids, attention_mask=mask, **GREEDY, **kwargs))
    return out


def in_thread(function):
    """Return the result of function() in a new thread."""
    out = []

    def run():
        try:
            out.append(function())
        except Exception as error:
            out.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(out[0], Exception):
        raise out[0]
    return out[0]


# ---- generate ----


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["plain", "beams"])
def test_generate_in_a_block_is_that_of_the_library(model, name, options):
    ids, mask = make_prompts(60, 41)
    expected = expected_of(model, POLICIES[name], ids, mask, **options)
    with compress(model, POLICIES[name]) as compressed:
        for call in ({"inputs": ids}, {"input_ids": ids}):
            out = model.generate(**call, attention_mask=mask, **GREEDY, **options)
            assert torch.equal(out, expected)
        assert torch.equal(model.generate(ids, **GREEDY, **options), expected)  # it tells padding by its token
    assert compressed.policy == POLICIES[name]
    assert compressed.cache.get_seq_length() == 67 and max(x.tokens_kept for x in compressed.cache.stats()) < 67


def test_every_call_gets_a_cache_of_its_own(model):
    ids, _ = make_prompts(60)
    other, _ = make_prompts(60, seed=2)
    expected = [expected_of(model, SNAP, x) for x in (ids, other)]
    with compress(model, SNAP) as compressed:
        assert compressed.cache is None and compressed.stats() == "no tokens yet"
        assert torch.equal(model.generate(ids, **GREEDY), expected[0])
        first = weakref.ref(compressed.cache)
        held = []
        handle = model.model.register_forward_pre_hook(lambda *_: held.append(first()))
        assert torch.equal(model.generate(other, **GREEDY), expected[1])
        handle.remove()
        assert held == [None] * 8  # the first cache is freed before the second fills


def test_each_thread_has_its_last_cache(model):
    ids, _ = make_prompts(60)
    with compress(model, SNAP) as compressed:
        model.generate(ids, **GREEDY)
        own = compressed.cache

        def other():
            assert compressed.cache is own  # until this thread has made a call
            model.generate(ids[:, :50], **GREEDY)
            return compressed.cache

        assert in_thread(other).get_seq_length() == 57 and compressed.cache is own


def test_stats(model):
    ids, _ = make_prompts(60)
    with compress(model, SNAP) as compressed:
        model.generate(ids, **GREEDY)
    token = 2 * 2 * 16 * 4  # K and V, KV heads, head_dim, fp32
    kept, full = sum(x.bytes_kept for x in compressed.cache.stats()) / 1024, 3 * 67 * token / 1024
    assert 3 * 19 * token <= 1024 * kept <= 3 * (19 + 16) * token  # with spare slots
    line = f"19 of 67 tokens kept in 3 layers, {kept} KiB held of {full} KiB, at most {kept} KiB at a time"
    assert compressed.stats() == line
    with compress(model, POLICIES["pyramidkv"]) as compressed:
        model.generate(ids, **GREEDY)
    kept = [x.tokens_kept for x in compressed.cache.stats()]
    assert compressed.stats().startswith(f"{min(kept)} to {max(kept)} of 67 tokens kept in 3 layers, ")


def test_a_prompt_is_held_whole_by_one_layer_at_a_time():
    """In one call, and in chunks. A layer that evicts before the attention holds its kept tokens beside the step's."""
    model, (ids, _) = kvops.hf.use_attention(make_model()), make_prompts(600)
    token = 2 * 2 * 16 * 4
    for policy, own in ((kvops.SnapKV(40, 4), 0), (kvops.KeyDiff(40), 40)):
        for first, most in ((600, 600 + own + 2 * 40), (300, 340 + 21 + own + 2 * 40)):  # 21: spare slots
            cache = KVCache(model.config, policy)
            with torch.no_grad():
                for part in ids.split(first, 1):
                    model(part, past_key_values=cache)
            assert cache.peak_bytes == most * token and all(x.tokens_kept == 40 for x in cache.stats())


def test_a_policy_by_name(model):
    ids, _ = make_prompts(60)
    expected = expected_of(model, SNAP, ids)
    with compress(model, "snapkv:budget=12,window=4") as compressed:
        assert compressed.policy == SNAP
        assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert torch.equal(kvops.hf.generate(model, "snapkv:budget=12,window=4", ids, **GREEDY), expected)
    with pytest.raises(ValueError, match="method must be one of"), compress(model, "snapkw"):
        pass


def test_laq_goes_with_other_processors_and_reads_the_end_where_transformers_does(model):
    class Seen(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            return scores

    ids, _ = make_prompts(60)
    method = POLICIES["laq"]
    seen, drafted = Seen(), expected_of(model, method, ids)[0, 60:].tolist()
    settings = {"eos_token_id": drafted[2], "pad_token_id": 0, "return_dict_in_generate": True}
    expected = kvops.hf.generate(model, method, ids, **GREEDY, **settings)
    with compress(model, method) as compressed:
        out = model.generate(ids, GenerationConfig(**GREEDY, **settings), [seen])
        assert torch.equal(out.sequences, expected.sequences) and out.past_key_values is compressed.cache
    assert seen.calls == out.sequences.shape[1] - 60
    assert [x.name for x in compressed.cache.stages] == ["prefill", "lookahead", "decode"]
    for a, b in zip(compressed.cache.layers, expected.past_key_values.layers):
        assert torch.equal(a.cache.positions, b.cache.positions)


@pytest.mark.parametrize("name", ["snapkv", "laq"])
def test_embeddings_in_the_place_of_ids(model, name):
    ids, mask = make_prompts(60, 41)
    embeds = model.get_input_embeddings()(ids).detach()
    expected = expected_of(model, POLICIES[name], ids, mask)[:, 60:]
    call = {"inputs_embeds": embeds, "attention_mask": mask, **GREEDY}
    assert torch.equal(kvops.hf.generate(model, POLICIES[name], **call), expected)
    with compress(model, POLICIES[name]):
        assert torch.equal(model.generate(**call), expected)
    alone = kvops.hf.generate(model, POLICIES[name], inputs_embeds=embeds[:1], **GREEDY)
    assert torch.equal(alone, expected[:1])
    for given, got in (({}, "neither"), ({"input_ids": ids, "inputs_embeds": embeds}, "both")):
        with pytest.raises(ValueError, match=f"generate: expected one of input_ids and inputs_embeds, got {got}"):
            kvops.hf.generate(model, SNAP, **given)


# ---- entry points of transformers ----


@pytest.fixture(scope="module")
def passkey():
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER, padding_side="left")
    return model, tokenizer


def test_pipeline(passkey):
    model, tokenizer = passkey
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    texts = ["The grass is green. The pass key is 40832. Remember it. " * 2, "One of these mornings. " * 8]
    expected = []
    for text in texts:
        out = kvops.hf.generate(model, SNAP, **tokenizer(text, return_tensors="pt"), **GREEDY)
        expected.append(tokenizer.decode(out[0], skip_special_tokens=True))
    plain = [x[0]["generated_text"] for x in pipe(texts, **GREEDY)]
    with compress(model, SNAP) as compressed:
        found = [x[0]["generated_text"] for x in pipe(texts, **GREEDY)]
        assert found == expected != plain
        assert compressed.cache.stats()[0].tokens_kept == 12 + 7
        batch = pipe(texts, **GREEDY, batch_size=2)
        assert [x[0]["generated_text"] for x in batch] == expected
    assert [x[0]["generated_text"] for x in pipe(texts, **GREEDY)] == plain
    assert_untouched(model)


def test_chat(passkey):
    model, tokenizer = passkey
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    template = "{% for x in messages %}{{ x['role'] }}: {{ x['content'] }}\n{% endfor %}"
    chat = [{"role": "user", "content": "The pass key is 40832. " * 3}]
    tokenizer.chat_template = template
    try:
        ids = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True, add_generation_prompt=True)
        out = kvops.hf.generate(model, SNAP, **ids, **GREEDY)[0, ids["input_ids"].shape[1] :]
        with compress(model, SNAP):
            found = pipe(chat, **GREEDY)[0]["generated_text"][-1]
    finally:
        tokenizer.chat_template = None
    assert found == {"role": "assistant", "content": tokenizer.decode(out, skip_special_tokens=True)}


def test_a_streamer_in_a_thread(passkey):
    model, tokenizer = passkey
    inputs = tokenizer("The grass is green. The pass key is 40832. Remember it. " * 2, return_tensors="pt")
    out = kvops.hf.generate(model, SNAP, **inputs, **GREEDY)[0, inputs["input_ids"].shape[1] :]
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    with compress(model, SNAP) as compressed:
        call = {**inputs, **GREEDY, "streamer": streamer}
        thread = threading.Thread(target=model.generate, kwargs=call)
        thread.start()
        assert "".join(streamer) == tokenizer.decode(out)
        thread.join()
        assert compressed.cache.stats()[0].tokens_kept == 12 + 7  # the thread's call, read from this thread
    assert_untouched(model)


# ---- forwards, and calls with a cache ----


@torch.no_grad()
def test_a_forward_gets_a_cache_too(model):
    ids, mask = make_prompts(60, 41)
    expected = model(ids, attention_mask=mask).logits
    with compress(model, SNAP) as compressed:
        for call in ((ids, mask), (ids,)):
            out = model(*call, **({} if call[1:] else {"attention_mask": mask}))
            assert out.past_key_values is compressed.cache
            assert [x.tokens_kept for x in compressed.cache.stats()] == [12] * 3
            torch.testing.assert_close(out.logits[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=1e-4)
        token = torch.full((2, 1), 5)
        assert model(token, None, None, out.past_key_values).past_key_values is out.past_key_values
        assert [x.tokens_kept for x in compressed.cache.stats()] == [13] * 3
        assert model(ids, use_cache=False).past_key_values is None
        assert model(ids, past_key_values=compressed.cache, use_cache=True) is not None
        with pytest.raises(ValueError, match="expected no past_key_values .*, got DynamicCache"):
            model(ids, past_key_values=DynamicCache(config=model.config))
        with pytest.raises(ValueError, match="expected no past_key_values .*, got DynamicCache"):
            model(ids, None, None, DynamicCache(config=model.config))
        with torch.enable_grad(), pytest.raises(ValueError, match="inference-only"):
            model(ids[:1])
    assert isinstance(model(ids).past_key_values, DynamicCache)


def test_a_second_turn_goes_on_with_the_cache_of_the_first(model):
    ids, _ = make_prompts(60)
    own = compress(model, SNAP)
    with own as compressed:
        first = model.generate(ids, **GREEDY)
        cache = compressed.cache
        second = model.generate(torch.cat((first, ids[:, :9]), 1), past_key_values=cache, **GREEDY)
        assert compressed.cache is cache and cache.get_seq_length() == 60 + 8 + 9 + 7
        assert cache.stats()[0].tokens_kept < 60 + 8
        assert second.shape[1] == 60 + 8 + 9 + 8


def test_generate_of_the_library_keeps_its_policy_in_a_block(model):
    ids, _ = make_prompts(60)
    expected = expected_of(model, OTHER, ids)
    with compress(model, SNAP):
        assert torch.equal(kvops.hf.generate(model, OTHER, ids, **GREEDY), expected)


def test_guidance_by_a_second_prompt(model):
    ids, _ = make_prompts(60)
    with compress(model, SNAP) as compressed:
        out = model.generate(ids, guidance_scale=1.5, **GREEDY)
        assert out.shape == (1, 68)
        assert compressed.cache.get_seq_length() == 67 and compressed.cache.stats()[0].tokens_kept == 12 + 7


# ---- refusals ----


@pytest.mark.parametrize("kind", ["static", "offloaded", "quantized", "dynamic", "paged"])
def test_other_caches_are_refused_before_anything_runs(model, kind):
    ids, _ = make_prompts(20)
    ran = []
    handle = model.model.register_forward_pre_hook(lambda *_: ran.append(1))
    message = f"expected no cache_implementation .*, got '{kind}'"
    with compress(model, SNAP):
        with pytest.raises(ValueError, match=message):
            model.generate(ids, cache_implementation=kind)
        with pytest.raises(ValueError, match=message):
            model.generate(ids, generation_config=GenerationConfig(cache_implementation=kind))
        model.generation_config.cache_implementation = kind
        with pytest.raises(ValueError, match=message):
            model.generate(ids)
        assert not ran
        model.generate(ids, cache_implementation=None, **GREEDY)
    model.generation_config.cache_implementation = None
    with pytest.raises(ValueError, match=message):
        kvops.hf.generate(model, SNAP, ids, cache_implementation=kind)
    handle.remove()


def test_what_would_hold_everything_is_refused(model):
    ids, _ = make_prompts(20)
    with compress(model, SNAP):
        with pytest.raises(ValueError, match="expected use_cache=True, got False"):
            model.generate(ids, use_cache=False)
        with pytest.raises(ValueError, match="expected no past_key_values .*, got DynamicCache"):
            model.generate(ids, past_key_values=DynamicCache(config=model.config))
        with pytest.raises(NotImplementedError, match="continuous batching"):
            model.generate_batch([[3, 4, 5]])


def test_models_that_are_not_served():
    t5 = transformers.T5Config(vocab_size=97, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2)
    encoder_decoder = transformers.T5ForConditionalGeneration(t5)
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=97, hidden_size=16, n_layer=1, n_head=2))
    refused = [
        (encoder_decoder, SNAP, NotImplementedError, "encoder-decoder"),
        (bloom, SNAP, NotImplementedError, "'bloom' are not supported"),
        (torch.nn.Linear(1, 1), SNAP, TypeError, "compress: model must be a transformers model, got Linear"),
        (make_model(), 7, TypeError, "policy must be a kvops policy .*, got int"),
    ]
    for model, policy, error, message in refused:
        before = set(vars(model))
        with pytest.raises(error, match=message), compress(model, policy):
            pytest.fail("entered")
        assert set(vars(model)) == before


@pytest.mark.parametrize("where", ["call", "model", "block"])
def test_after_an_exception_the_model_is_as_before(model, where):
    ids, _ = make_prompts(20)
    calls = {"call": {"no_such": 1}, "model": {}, "block": {}}

    def fail(*_):
        raise ZeroDivisionError("on purpose")

    handle = model.model.layers[1].register_forward_pre_hook(fail) if where == "model" else None
    with pytest.raises((ValueError, ZeroDivisionError)), compress(model, SNAP):
        if where == "block":
            fail()
        model.generate(ids, **calls[where])
    if handle is not None:
        handle.remove()
    assert_untouched(model)
    assert isinstance(model(ids).past_key_values, DynamicCache)


def test_what_others_have_put_into_the_model_is_put_back(model):
    """As accelerate does with `forward`."""
    ids, _ = make_prompts(60)
    expected = expected_of(model, SNAP, ids)
    original, calls = model.forward, []

    def forward(input_ids=None, attention_mask=None, **kwargs):
        calls.append(kwargs.get(CACHE))
        return original(input_ids, attention_mask=attention_mask, **kwargs)

    model.forward = forward
    with compress(model, SNAP) as compressed:
        assert torch.equal(model.generate(ids, **GREEDY), expected)
        assert len(calls) == 8 and all(x is compressed.cache for x in calls)
    assert vars(model)["forward"] is forward
    del model.forward


# ---- nested blocks, and threads ----


def test_the_inner_block_wins_and_the_outer_is_restored(model):
    ids, _ = make_prompts(60)
    expected = {policy: expected_of(model, policy, ids) for policy in (SNAP, OTHER)}
    with compress(model, SNAP) as outer:
        with compress(model, OTHER) as inner:
            assert torch.equal(model.generate(ids, **GREEDY), expected[OTHER])
            assert outer.cache is None
            assert torch.equal(in_thread(lambda: model.generate(ids, **GREEDY)), expected[OTHER])
        assert torch.equal(model.generate(ids, **GREEDY), expected[SNAP])
        assert outer.cache is not inner.cache
        with pytest.raises(ZeroDivisionError), compress(model, OTHER):
            raise ZeroDivisionError
        assert torch.equal(model.generate(ids, **GREEDY), expected[SNAP])
        assert torch.equal(in_thread(lambda: model.generate(ids, **GREEDY)), expected[SNAP])


def test_blocks_of_two_models(model):
    ids, _ = make_prompts(60)
    other = make_model("qwen2")
    with compress(model, SNAP) as a, compress(other, OTHER) as b:
        model.generate(ids, **GREEDY)
        assert b.cache is None
        other.generate(ids, **GREEDY)
    assert a.cache.policy == SNAP and b.cache.policy == OTHER
    assert_untouched(other)


def test_threads_with_blocks_of_their_own(model):
    prompts = [make_prompts(60, seed=i)[0] for i in range(3)]
    policies = [SNAP, OTHER, POLICIES["laq"]]
    expected = [expected_of(model, *x) for x in zip(policies, prompts)]
    begun = threading.Barrier(3)
    wrong = []

    def work(i):
        try:
            for _ in range(3):
                with compress(model, policies[i]) as compressed:
                    begun.wait(60)
                    if not torch.equal(model.generate(prompts[i], **GREEDY), expected[i]):
                        wrong.append(i)
                    if compressed.cache.policy != policies[i]:
                        wrong.append(i)
        except BaseException as error:
            wrong.append(error)
            begun.abort()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for x in threads:
        x.start()
    for x in threads:
        x.join()
    assert wrong == []


def test_a_thread_without_a_block_raises_where_there_are_several(model):
    ids, _ = make_prompts(60)
    expected = expected_of(model, SNAP, ids)
    entered, done = threading.Event(), threading.Event()

    def other(policy):
        with compress(model, policy):
            entered.set()
            done.wait(60)

    for policy in (SNAP, OTHER):
        entered.clear()
        done.clear()
        thread = threading.Thread(target=other, args=(policy,))
        with compress(model, SNAP):
            thread.start()
            entered.wait(60)
            try:
                context = contextvars.copy_context()
                assert torch.equal(in_thread(lambda: context.run(model.generate, ids, **GREEDY)), expected)  # noqa: B023
                if policy == SNAP:  # it does not matter which
                    assert torch.equal(in_thread(lambda: model.generate(ids, **GREEDY)), expected)
                else:
                    with pytest.raises(RuntimeError, match="has entered no block.*got (SnapKV|KeyDiff).*copy_context"):
                        in_thread(lambda: model.generate(ids, **GREEDY))
                    explicit = in_thread(lambda: kvops.hf.generate(model, SNAP, ids, **GREEDY))
                    assert torch.equal(explicit, expected)
            finally:
                done.set()
                thread.join()


def test_tasks_of_asyncio_have_blocks_of_their_own(model):
    ids, _ = make_prompts(60)
    expected = [expected_of(model, policy, ids) for policy in (SNAP, OTHER)]

    async def task(policy):
        with compress(model, policy):
            await asyncio.sleep(0.01)
            return await asyncio.to_thread(model.generate, ids, **GREEDY)

    async def both():
        return await asyncio.gather(task(SNAP), task(OTHER))

    assert all(torch.equal(a, b) for a, b in zip(asyncio.run(both()), expected))


def test_a_thread_that_begins_after_the_block_raises(model):
    ids, _ = make_prompts(60)
    with compress(model, SNAP):
        late = model.generate
    with pytest.raises(RuntimeError, match="expected an open block, got a call of its `model.generate` after"):
        in_thread(lambda: late(ids, **GREEDY))


def test_a_call_outlives_its_block(model):
    """The model keeps the library's attention until the thread is done."""
    ids, _ = make_prompts(60)
    expected = expected_of(model, SNAP, ids)
    begun, closed, out = threading.Event(), threading.Event(), []

    class Wait(LogitsProcessor):
        def __call__(self, input_ids, scores):
            begun.set()
            assert closed.wait(60)
            return scores

    call = {"inputs": ids, "logits_processor": [Wait()], **GREEDY}
    with compress(model, SNAP):
        thread = threading.Thread(target=lambda: out.append(model.generate(**call)))
        thread.start()
        assert begun.wait(60)
    assert model.config._attn_implementation == "kvops"
    closed.set()
    thread.join()
    assert torch.equal(out[0], expected)


def test_a_block_in_a_generator_that_another_context_ends(model):
    """As web servers run generators: each next() in a copy of the context."""
    ids, _ = make_prompts(60)
    expected = expected_of(model, SNAP, ids)

    def answers():
        with compress(model, SNAP):
            yield model.generate(ids, **GREEDY)
            yield model.generate(ids, **GREEDY)

    steps = answers()
    for _ in range(2):
        assert torch.equal(contextvars.copy_context().run(next, steps), expected)
    assert contextvars.copy_context().run(next, steps, None) is None


# ---- wrapped models ----


class Wrapper(torch.nn.Module):
    """Like peft.PeftModel, calls the forward of the inner model, not the model itself."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def get_base_model(self):
        return self.base_model

    def generate(self, *args, **kwargs):
        return self.base_model.generate(*args, **kwargs)

    def forward(self, *args, **kwargs):
        return self.base_model.forward(*args, **kwargs)

    @property
    def config(self):
        return self.base_model.config


WRAPPERS = {
    "peft": Wrapper,
    "compiled": lambda x: torch.compile(x, backend="eager"),
    "both": lambda x: torch.compile(Wrapper(x), backend="eager"),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapped_models(model, name):
    ids, mask = make_prompts(60, 41)
    expected = expected_of(model, SNAP, ids, mask)
    wrapped = WRAPPERS[name](model)
    with torch.no_grad():
        wrapped(ids, attention_mask=mask)  # compiled without a block
        with compress(wrapped, SNAP) as compressed:
            for x in (wrapped, model):
                assert torch.equal(x.generate(ids, attention_mask=mask, **GREEDY), expected)
                assert compressed.cache.stats()[0].tokens_kept == 12 + 7
            out = wrapped(ids, attention_mask=mask)
            assert out.past_key_values is compressed.cache and compressed.cache.stats()[0].tokens_kept == 12
        assert isinstance(wrapped(ids, attention_mask=mask).past_key_values, DynamicCache)
    assert torch.equal(kvops.hf.generate(wrapped, SNAP, ids, attention_mask=mask, **GREEDY), expected)
    assert_untouched(model)
    assert kvops.hf.use_attention(wrapped) is wrapped and model.config._attn_implementation == "kvops"
    cache = KVCache(wrapped.config, SNAP, attention_mask=mask)
    assert torch.equal(wrapped.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY), expected)
    model.set_attn_implementation("sdpa")


def test_lookahead_takes_the_padding_that_its_cache_has_seen():
    model = kvops.hf.use_attention(make_model())
    ids, mask = make_prompts(60, 41)
    positions = []
    for given in (mask, None):
        cache = KVCache(model.config, kvops.LAQ(20))
        with torch.no_grad():
            steps = (mask.cumsum(-1) - 1).clamp(min=0)
            logits = model(ids, attention_mask=mask, position_ids=steps, past_key_values=cache).logits[:, -1]
            kvops.hf.lookahead(model, cache, logits, attention_mask=given)
        positions.append([layer.cache.positions for layer in cache.layers])
    assert all(torch.equal(a, b) for a, b in zip(*positions))
    cache = KVCache(model.config, kvops.LAQ(20))
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=steps, past_key_values=cache)
        with pytest.raises(ValueError, match="attention_mask must begin with the pads that .* the first step had"):
            kvops.hf.lookahead(model, cache, logits, attention_mask=torch.ones_like(mask))
    assert not cache.stages and cache.get_seq_length() == 60


@pytest.mark.parametrize("template", [(), (1, 2, 3)])
def test_the_steps_of_a_lookahead_without_padding_check_no_mask(monkeypatch, template):
    """The check would read it on the host."""
    model = kvops.hf.use_attention(make_model())
    ids, _ = make_prompts(60)
    cache = KVCache(model.config, kvops.LAQ(20, template=template))
    with torch.no_grad():
        logits = model(ids, past_key_values=cache).logits[:, -1]
        monkeypatch.setattr(kvops.hf.conversation, "leading_pads", None)
        kvops.hf.lookahead(model, cache, logits)
    assert [x.cache.positions.shape[-1] for x in cache.layers] == [20] * len(cache.layers)


# ---- which block a call belongs to, and copies of the model ----


def test_generators_that_take_turns_keep_their_blocks():
    model = make_model()
    ids, _ = make_prompts(40)

    def turns(policy):
        with compress(model, policy) as compressed:
            while True:
                model.generate(ids, max_new_tokens=2, do_sample=False)
                yield compressed.cache.policy, model(ids).past_key_values.policy

    policies = kvops.KeyDiff(24), kvops.SnapKV(20, window=8), kvops.TOVA(16)
    with torch.no_grad():
        generators = [turns(policy) for policy in policies]
        for i in (0, 1, 2, 0, 2, 1, 1, 0):
            assert next(generators[i]) == (policies[i], policies[i])
        generators[1].close()
        assert next(generators[0]) == (policies[0], policies[0])
    del generators  # a generator that is forgotten ends its block
    gc.collect()
    assert not vars(model).keys() & set(kvops.hf.compression._HOOKS)
    assert model.config._attn_implementation == "sdpa"


def test_a_context_manager_of_ones_own_opens_a_block_for_its_body():
    model = make_model()
    ids, _ = make_prompts(40)
    inner, outer = kvops.SnapKV(20, window=8), kvops.KeyDiff(24)

    @contextlib.contextmanager
    def mine(policy):
        with compress(model, policy) as compressed:
            yield compressed

    def asked(compressed):
        model.generate(ids, max_new_tokens=2, do_sample=False)
        return compressed.cache.policy

    def generator():
        with compress(model, outer), mine(inner) as compressed:
            yield asked(compressed)

    assert list(generator()) == [inner]
    with mine(outer) as first:
        with mine(inner) as second:
            assert asked(second) == inner
        assert asked(first) == outer


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
def test_a_model_is_not_copied_inside_a_block(copied):
    """Its copy would call the original's methods, after the block too."""
    model = make_model()
    with compress(model, kvops.KeyDiff(24)):
        with pytest.raises(RuntimeError, match="copy the model before the block"):
            copied(model)
    copied(model)


def test_a_string_names_a_policy(model):
    cache = kvops.hf.KVCache(model.config, "keydiff:budget=24")
    assert cache.policy == kvops.KeyDiff(24) == cache.evicting_layers[0].cache.policy
    for name, call in {
        "compress": lambda x: compress(model, x),
        "generate": lambda x: kvops.hf.generate(model, x, make_prompts(8)[0]),
        "KVCache": lambda x: kvops.hf.KVCache(model.config, x),
    }.items():
        with pytest.raises(TypeError, match=f"^{name}: method 'keydiff' needs budget, got 'keydiff'"):
            call("keydiff")
        with pytest.raises(ValueError, match=f"^{name}: method must be one of .*; did you mean 'snapkv'"):
            call("snapk:budget=64")


def test_without_a_block(model):
    """enable() and disable() are what `with` does, as often as wanted."""
    ids, mask = make_prompts(40)
    before = set(vars(model))
    with compress(model, kvops.KeyDiff(24)):
        expected = model.generate(ids, attention_mask=mask, max_new_tokens=6)
    compressed = compress(model, "keydiff:budget=24")
    assert set(vars(model)) == before and str(compressed) == "no tokens yet"
    compressed.disable()  # nothing to do
    for _ in range(2):
        assert compressed.enable() is compressed and repr(compressed).startswith("Compression(KeyDiff(budget=24, ")
        assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=6), expected)
        for again in (compressed.enable, compressed.__enter__):
            with pytest.raises(
                RuntimeError, match=r"^compress: .*not enabled.* call disable\(\) first, or make another"
            ):
                again()
        assert "tokens kept in" in str(compressed) and str(compressed) == compressed.stats() in repr(compressed)
        compressed.disable()
        assert set(vars(model)) == before and "tokens kept in" in str(compressed)
    with compressed:
        assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=6), expected)
    assert set(vars(model)) == before and "disabled" in repr(compressed)


@torch.no_grad()
def test_blocks_that_end_in_any_order(model):
    """Of two objects that take turns, the one that was enabled last counts."""
    ids, _ = make_prompts(40)
    a, b = compress(model, kvops.KeyDiff(24)), compress(model, kvops.KeyDiff(32))

    def kept() -> int:
        return model(ids).past_key_values.stats()[0].tokens_kept

    a.enable(), b.enable()
    assert kept() == 32
    a.disable()
    assert kept() == 32
    a.enable()
    assert kept() == 24
    b.disable()
    assert kept() == 24
    b.enable()
    a.disable()
    assert kept() == 32
    b.disable()
    a.enable()
    assert kept() == 24
    a.disable()
    assert type(model(ids).past_key_values) is DynamicCache


@torch.no_grad()
def test_enabled_in_another_thread(model):
    """As a server does: whoever enables it, all threads are served."""
    ids, _ = make_prompts(40)
    compressed = compress(model, kvops.KeyDiff(24))
    kept = []

    def in_thread(function):
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()

    in_thread(compressed.enable)
    kept.append(model(ids).past_key_values.stats()[0].tokens_kept)
    in_thread(torch.no_grad()(lambda: kept.append(model(ids).past_key_values.stats()[0].tokens_kept)))
    compressed.disable()
    kept.append(model(ids).past_key_values.get_seq_length())
    assert kept == [24, 24, 40]
    assert type(model(ids).past_key_values) is DynamicCache


@torch.no_grad()
def test_repr_of_caches(model):
    ids, _ = make_prompts(40)
    cache = kvops.hf.KVCache(model.config, kvops.KeyDiff(24))
    layers = len(cache.evicting_layers)
    evicts = f"{layers} of {len(cache.layers)} layers evict"
    assert repr(cache) == f"KVCache({cache.policy!r}, {evicts}: 0 tokens seen, 0 kept, 0 B)"
    model(ids, past_key_values=cache)
    layer = cache.evicting_layers[0]
    held = layers * layer.cache.nbytes
    assert f"{evicts}: 40 tokens seen, 24 kept, {held / 1024:.4g} KiB)" in repr(cache)
    assert repr(layer) == f"EvictingLayer({layer.cache!r})" and ": 40 tokens seen, 24 kept, " in repr(layer)


def test_errors_name_the_call(model):
    for name, call in {
        "compress": lambda: compress(model, 256).__enter__(),
        "generate": lambda: kvops.hf.generate(model, 256, make_prompts(8)[0]),
    }.items():
        with pytest.raises(TypeError, match=f"^{name}: policy must be a kvops policy .* got int"):
            call()
