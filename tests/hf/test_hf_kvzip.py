"""KVzip in transformers: the model's second reading of its prompt, compared with one plain forward of both readings."""

from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers")

import kvops  # noqa: E402
import kvops.hf  # noqa: E402
from kvops.hf import KVCache, use_attention  # noqa: E402
from kvops.methods.queries import RecordQueries  # noqa: E402
from kvops.methods.repeating import repeat_ids  # noqa: E402
from test_hf import make_model, make_prompts  # noqa: E402
from test_kvzip import assert_kept, pass_scores  # noqa: E402
from test_methods import fp64  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = dict(max_new_tokens=10, do_sample=False)
POLICY = kvops.KVzip(16, chunk=25, instruction=(5, 6, 7), next_instruction=(8, 9), suffix=(4,))


def prefilled(model, policy, ids, mask=None):
    cache = KVCache(model.config, policy, attention_mask=mask)
    mask = torch.ones_like(ids) if mask is None else mask
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits[:, -1]
    return cache, logits


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_kept_tokens_are_those_of_the_formula(kind):
    """Queries and keys from one forward over the prompt and the pass, without a second reading of a cache."""
    model = use_attention(make_model(kind))
    ids, _ = make_prompts(60)
    cache, _ = prefilled(model, POLICY, ids)
    before = [(layer.cache.k.clone(), layer.cache.v.clone()) for layer in cache.evicting_layers]
    peak = cache.peak_bytes
    with torch.no_grad():
        kvops.hf.repeat(model, cache, ids)
    scores = [[0.0, 0.0] for _ in cache.evicting_layers]
    for first in (0, 25, 50):
        told = repeat_ids(POLICY, ids, torch.tensor([60]), first)
        assert told.shape[1] == (29, 36, 21)[first // 25]
        plain, _ = prefilled(model, RecordQueries(last=told.shape[1]), torch.cat((ids, told), 1))
        for i, layer in enumerate(plain.evicting_layers):
            q, k = layer.cache.last_queries, layer.cache.k
            group = q.shape[1] // k.shape[1]
            for h in range(k.shape[1]):
                every = fp64(q[0, h * group : (h + 1) * group]), fp64(k[0, h, :60]), fp64(k[0, h, 60:])
                scores[i][h] = scores[i][h] + pass_scores(*every, first, 25, 4)
    for layer, rows, kv in zip(cache.evicting_layers, scores, before):
        for h, row in enumerate(rows):
            assert_kept(layer.cache.positions[0, h], row, 4, 16, 1e-5)
        at = layer.cache.positions.unsqueeze(-1).expand(-1, -1, -1, 16)
        assert all(torch.equal(x, y.gather(2, at)) for x, y in zip((layer.cache.k, layer.cache.v), kv))
    assert cache.get_seq_length() == 60 and [x.name for x in cache.stages] == ["prefill", "decode"]
    assert cache.stages[1].bytes * 60 == cache.stages[0].bytes * 16
    assert cache.peak_bytes <= 2 * peak


TEMPLATE = (
    "<begin>{% for x in messages %}[{{ x.role }}]{{ x.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{% if enable_thinking is not false %}[think]{% endif %}"
)


@pytest.fixture
def tokenizer():
    from kvops import demo

    return transformers.AutoTokenizer.from_pretrained(demo.MODEL)


def test_the_words_of_the_authors(tokenizer):
    found = kvops.hf.repeat_prompts(tokenizer)
    assert tokenizer.decode(found["instruction"]) == "\n\nRepeat the previous context exactly." and not found["suffix"]
    tokenizer.chat_template = TEMPLATE
    assert tokenizer.decode(kvops.hf.repeat_prompts(tokenizer)["suffix"]) == "[end][assistant]"
    assert kvops.KVzip(8, **kvops.hf.repeat_prompts(tokenizer)).next_instruction == found["next_instruction"]
    for template, why in (("[assistant]", "expected a chat template"), ("{{ raise_exception('no') }}", "fails: no")):
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match=f"repeat_prompts: .*{why}"):
            kvops.hf.repeat_prompts(tokenizer)


def test_the_text_of_a_pass(tokenizer):
    """In the authors' order: the instruction, the tokens before the chunk, the end of the turn, the chunk."""
    tokenizer.chat_template = TEMPLATE
    policy = kvops.KVzip(8, chunk=20, previous=5, **kvops.hf.repeat_prompts(tokenizer))
    text = "A text that the model has to say once more."
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    passes = [tokenizer.decode(repeat_ids(policy, ids, torch.tensor([len(text)]), i)[0]) for i in (0, 20, 40)]
    later = "\n\nRepeat the part of the previous context exactly, starting with"
    assert passes == [
        f"\n\nRepeat the previous context exactly.[end][assistant]{text[:20]}",
        f"{later}{text[15:20]}[end][assistant]{text[20:40]}",
        f"{later}{text[35:40]}[end][assistant]{text[40:]}",
    ]


@pytest.mark.parametrize("lacking", [("instruction", "next_instruction", "suffix"), ("suffix",)], ids=len)
def test_without_words_no_model_runs(lacking):
    model, (ids, _) = make_model(), make_prompts(40)
    policy = replace(POLICY, **dict.fromkeys(lacking))
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model has run"))

    def in_a_block():
        with kvops.hf.compress(model, policy):
            model.generate(ids, **GREEDY)

    for call in (
        lambda: kvops.hf.generate(model, policy, ids, **GREEDY),
        in_a_block,
        lambda: KVCache(use_attention(model).config, policy),
    ):
        with pytest.raises(
            ValueError, match=rf"KVzip: {', '.join(lacking)} must be .*repeat_prompts\(tokenizer\)\), or \(\)"
        ):
            call()


def test_words_from_the_tokenizer(tokenizer):
    """`generate` takes the tokenizer, as for stop strings. Words that are given stay."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tokenizer.name_or_path)
    ids = tokenizer("The pass key is 123. " * 12, return_tensors="pt").input_ids
    words = kvops.hf.repeat_prompts(tokenizer)
    expected = kvops.hf.generate(model, kvops.KVzip(32, **words), ids, **GREEDY)
    assert torch.equal(kvops.hf.generate(model, "kvzip:budget=32", ids, tokenizer=tokenizer, **GREEDY), expected)
    for_model, own = kvops.hf.for_model, kvops.KVzip(32, instruction=(), suffix=(7,))
    assert for_model("kvzip:budget=32", model, tokenizer) == kvops.KVzip(32, **words)
    assert for_model(own, model, tokenizer) == replace(own, next_instruction=words["next_instruction"])
    assert for_model(own, model) == own and for_model(POLICY, model, tokenizer) is POLICY


def test_stop_strings(tokenizer):
    """transformers hands the tokenizer on to the model, whose attention ignores it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tokenizer.name_or_path)
    ids = tokenizer("The pass key is 123. " * 12, return_tensors="pt").input_ids
    with kvops.hf.compress(model, kvops.SnapKV(200)):
        whole = tokenizer.decode(model.generate(ids, **GREEDY)[0, ids.shape[1] :])
        out = model.generate(ids, tokenizer=tokenizer, stop_strings=[whole[:4]], **GREEDY)
    assert tokenizer.decode(out[0, ids.shape[1] :]) == whole[:4]


def test_a_budget_for_everything_changes_nothing():
    """The passes leave no trace: neither in the cache nor in layers that do not evict."""
    for model in (make_model(), make_model("qwen2", use_sliding_window=True, sliding_window=12, max_window_layers=1)):
        ids, mask = make_prompts(50, 31)
        expected = model.generate(ids, attention_mask=mask, **GREEDY)
        policy = kvops.KVzip(400, chunk=20, instruction=(), next_instruction=(), suffix=())
        found = kvops.hf.generate(model, policy, ids, attention_mask=mask, **GREEDY)
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 2}, {"prefill_chunk_size": 17}], ids=["plain", "beams", "chunks"]
)
def test_padded_rows_generate_what_they_generate_alone(options):
    model = make_model()
    lengths = (60, 47, 24, 9)
    ids, mask = make_prompts(*lengths)
    settings = dict(GREEDY, **options)
    out = kvops.hf.generate(model, POLICY, ids, attention_mask=mask, **settings)
    for row, n in enumerate(lengths):
        alone = kvops.hf.generate(model, POLICY, ids[row : row + 1, -n:], **settings)
        assert torch.equal(out[row, 60:], alone[0, n:]), row


def test_a_block_and_a_loop_of_ones_own_give_the_same():
    model = make_model()
    ids, mask = make_prompts(60, 41)
    expected = kvops.hf.generate(model, POLICY, ids, attention_mask=mask, **GREEDY)
    with kvops.hf.compress(model, POLICY) as compressed:
        assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), expected)
    assert [x.name for x in compressed.cache.stages] == ["prefill", "decode"]
    model = use_attention(model)
    for given in (mask, None):
        cache, logits = prefilled(model, POLICY, ids, mask)
        with torch.no_grad():
            kvops.hf.repeat(model, cache, ids, attention_mask=given)
            said = [logits.argmax(-1, keepdim=True)]
            for step in range(9):
                positions = mask.sum(-1, keepdim=True) + step
                logits = model(said[-1], position_ids=positions, past_key_values=cache).logits[:, -1]
                said.append(logits.argmax(-1, keepdim=True))
        assert torch.equal(torch.cat(said, 1), expected[:, 60:])


@torch.no_grad()
def test_a_failed_pass_and_an_emptied_cache_are_as_before(monkeypatch):
    model = use_attention(make_model())
    ids, _ = make_prompts(40)
    cache, _ = prefilled(model, replace(POLICY, budget=100), ids)
    with monkeypatch.context() as failing:
        failing.setattr(kvops.hf.generation, "evict_repeated", lambda caches: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            kvops.hf.repeat(model, cache, ids)
    assert not cache.stages
    kvops.hf.repeat(model, cache, ids)
    cache.crop(-40)
    assert not cache.stages
    model(ids, past_key_values=cache)
    with pytest.raises(RuntimeError, match="kvops.KVzip evicts in its repeat only"):
        model(ids[:, :1], past_key_values=cache)


def test_refusals():
    model = use_attention(make_model())
    ids, _ = make_prompts(40)
    cache, _ = prefilled(model, POLICY, ids)
    with pytest.raises(RuntimeError, match="kvops.KVzip evicts in its repeat only.*kvops.hf.repeat between"):
        model(ids[:, :1], past_key_values=cache)
    with pytest.raises(ValueError, match=r"repeat: input_ids must be the prompts .* expected 40 tokens, got \[1, 39\]"):
        kvops.hf.repeat(model, cache, ids[:, 1:])
    with pytest.raises(TypeError, match="repeat: cache must be a KVCache with kvops.KVzip or .*, got .*SnapKV"):
        kvops.hf.repeat(model, KVCache(model.config, kvops.SnapKV(40)), ids)
    embeds = model.get_input_embeddings()(ids)
    with pytest.raises(ValueError, match="with inputs_embeds there are none to repeat"):
        kvops.hf.generate(model, POLICY, inputs_embeds=embeds, **GREEDY)
    with pytest.raises(ValueError, match="uses queries, which the attention of transformers does not pass"):
        KVCache(make_model().config, POLICY)
