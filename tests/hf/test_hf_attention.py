"""kvops.hf with the library's attention (use_attention): methods that use queries, layers and rows of different
lengths, softcap and sinks, and the stages of LAQ."""

import copy
import functools
import weakref

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import DynamicCache, Gemma2Config, GptOssConfig  # noqa: E402

import kvops  # noqa: E402
import kvops.hf  # noqa: E402
from kvops.hf import KVCache, use_attention  # noqa: E402
from test_hf import (  # noqa: E402
    MIXED,
    TINY,
    VOCAB,
    assert_rows_as_alone,
    generate,
    make_model,
    make_prompts,
)

pytestmark = pytest.mark.usefixtures("one_thread")
METHODS = {
    "snapkv": lambda budget=24: kvops.SnapKV(budget, window=8),
    "pyramidkv": lambda budget=24: kvops.PyramidKV(budget, window=8),
    "chunkkv": lambda budget=24: kvops.ChunkKV(budget, window=8, chunk=4),
    "protokv": lambda budget=24: kvops.ProtoKV(budget, window=8, num_sats=4, num_chunks=6),
    "satkv": lambda budget=24: kvops.SATKV(budget, window=8),
    "h2o": lambda budget=24: kvops.H2O(budget),
    "tova": lambda budget=24: kvops.TOVA(budget),
    "keydiff": lambda budget=24: kvops.KeyDiff(budget),
    "lagkv": lambda budget=24: kvops.LagKV(lag=budget // 3, ratio=0.25, sinks=2),
    "lagkv-l2": lambda budget=24: kvops.LagKV(lag=budget // 3, ratio=0.25, sinks=2, score="l2"),
    "streaming": lambda budget=24: kvops.StreamingLLM(budget, positions="original"),
    "lacache": lambda budget=24: kvops.LaCache(budget, positions="original"),
}
every_method = pytest.mark.parametrize("method", METHODS)


def own(*args, **settings):
    return use_attention(make_model(*args, **settings))


def assert_close(a, b, atol=1e-4):
    """Same tokens, and logits that agree."""
    assert torch.equal(a[0], b[0])
    torch.testing.assert_close(a[1], b[1], atol=atol, rtol=atol)


# ---- a method that keeps everything equals the stock cache ----


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
    cache = KVCache(model.config, METHODS[method](400), attention_mask=mask)
    found = generate(model, cache, ids, mask, **options)
    assert torch.equal(found[0], expected[0])
    if not options.get("num_beams"):
        torch.testing.assert_close(found[1], expected[1], atol=1e-4, rtol=1e-4)


def test_calls_without_our_cache_go_to_sdpa():
    stock, model = make_model(), own()
    ids, mask = make_prompts(40, 23)
    a = generate(stock, DynamicCache(config=stock.config), ids, mask)
    b = generate(model, DynamicCache(config=model.config), ids, mask)
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    with torch.no_grad():
        assert torch.equal(stock(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits)


def test_it_can_be_asked_for_by_name(tmp_path):
    make_model().save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="kvops").eval()
    ids, _ = make_prompts(40)
    cache = KVCache(model.config, kvops.SnapKV(24, window=8))
    generate(model, cache, ids)
    assert [s.tokens_kept for s in cache.stats()] == [24 + 11] * 3


# ---- eviction, compared with the reference ----


@every_method
def test_each_head_of_each_layer_attends_to_what_it_kept(method):
    """The step after the prefill equals a stock model with a mask per layer and head."""
    model, stock = own(), make_model(attn="eager")
    ids, _ = make_prompts(70)
    step = torch.tensor([[5]])
    cache, full = KVCache(model.config, METHODS[method]()), DynamicCache(config=stock.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        kept = [layer.cache.positions.clone() for layer in cache.layers]
        got = model(step, past_key_values=cache).logits
        stock(ids, past_key_values=full)
        for layer, positions in zip(stock.model.layers, kept):
            mask = torch.full((1, 2, 1, 71), torch.finfo(torch.float32).min)
            mask[..., -1] = 0
            mask.scatter_(-1, positions.unsqueeze(2), 0.0)
            mask = mask.repeat_interleave(2, 1)
            layer.self_attn.register_forward_pre_hook(
                lambda _, args, kwargs, mask=mask: (args, {**kwargs, "attention_mask": mask}), with_kwargs=True
            )
        expected = stock(step, past_key_values=full).logits
    assert any(x.shape[2] < 70 for x in kept)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_decode_is_brought_to_the_budget_whenever_the_buffer_is_full():
    """Eviction step by step, in all layers, also after a chunk."""
    model = own()
    ids, _ = make_prompts(90)
    for method in (kvops.ProtoKV(24, 8, num_chunks=6, buffer=5, alpha=4), kvops.SATKV(24, 8, buffer=5)):
        cache = KVCache(model.config, method)
        with torch.no_grad():
            model(ids[:, :40], past_key_values=cache)
            for i in range(40, 60):
                model(ids[:, i : i + 1], past_key_values=cache)
                assert {s.tokens_kept for s in cache.stats()} == {24 + (i - 39) % 5}
            model(ids[:, 60:], past_key_values=cache)
        assert {s.tokens_kept for s in cache.stats()} == {24} and cache.get_seq_length() == 90


def test_layers_of_different_lengths():
    model = own()
    ids, _ = make_prompts(70)
    lengths = {}
    for name in ("pyramidkv", "lagkv-l2"):
        cache = KVCache(model.config, METHODS[name]())
        with torch.no_grad():
            model(ids, past_key_values=cache)
        lengths[name] = [s.tokens_kept for s in cache.stats()]
    assert lengths["pyramidkv"] == kvops.pyramidkv_budgets(24, 3, 70, window=8) and sum(lengths["pyramidkv"]) == 3 * 24
    assert lengths["lagkv-l2"][:2] == [70, 70] and lengths["lagkv-l2"][2] < 70


@every_method
@pytest.mark.parametrize(
    "options", [{}, {"prefill_chunk_size": 16}, {"num_beams": 2}], ids=["plain", "chunks", "beams"]
)
def test_rows_of_a_padded_batch_equal_the_rows_alone(method, options):
    """Every row starts and ends a chunk where it would alone, so chunks hold the same tokens."""
    model = own()
    lengths = (64, 48, 32, 16)
    ids, mask = make_prompts(*lengths)
    if method == "pyramidkv":  # its budgets depend on the prompt's length
        lengths = (64, 64)
        ids, mask = make_prompts(*lengths)
    assert_rows_as_alone(model, functools.partial(KVCache, policy=METHODS[method]()), ids, mask, options)


@every_method
def test_second_turn(method):
    """The call passes the whole conversation; only the new tokens are fed, at their true positions."""
    model = own()
    ids, _ = make_prompts(60)
    more, _ = make_prompts(9, seed=2)
    cache = KVCache(model.config, METHODS[method]())
    first, _ = generate(model, cache, ids)
    by_hand = copy.deepcopy(cache)
    talk = torch.cat([ids, first, more], 1)
    tokens, _ = generate(model, cache, talk, tokens=6)
    feed, expected = talk[:, by_hand.get_seq_length() :], []
    for _ in range(6):
        past = by_hand.get_seq_length()
        positions = torch.arange(past, past + feed.shape[1])[None]
        with torch.no_grad():
            feed = model(feed, past_key_values=by_hand, position_ids=positions).logits[:, -1:].argmax(-1)
        expected.append(feed)
    assert torch.equal(tokens, torch.cat(expected, 1))


@every_method
def test_batch_operations_move_the_whole_state(method):
    model = own()
    ids, _ = make_prompts(40, 40)

    def after(ids, operation):
        cache = KVCache(model.config, METHODS[method]())
        with torch.no_grad():
            model(ids, past_key_values=cache)
            operation(cache)
            step = torch.arange(3, 33).repeat(cache.layers[0].keys.shape[0], 1)
            return torch.cat([model(t, past_key_values=cache).logits for t in step.split(1, 1)], 1)

    for operation, rows in [
        (lambda c: c.reorder_cache(torch.tensor([1, 0])), [1, 0]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1]),
        (lambda c: c.batch_select_indices(torch.tensor([1])), [1]),
    ]:
        torch.testing.assert_close(after(ids, operation), after(ids[rows], lambda c: None), atol=1e-4, rtol=1e-4)


def test_sliding_layers_keep_the_stock_class():
    stock, model = make_model("qwen2", **MIXED), own("qwen2", **MIXED)
    ids, mask = make_prompts(40, 22)
    expected = generate(stock, DynamicCache(config=stock.config), ids, mask)
    cache = KVCache(model.config, kvops.SnapKV(400, window=8), attention_mask=mask)
    assert_close(generate(model, cache, ids, mask), expected)
    cache = KVCache(model.config, kvops.SnapKV(20, window=8), attention_mask=mask)
    generate(model, cache, ids, mask)
    assert [s.tokens_kept for s in cache.stats()] == [20 + 11, 15, 20 + 11]


SOFTCAP = {**TINY, "head_dim": 16, "attn_logit_softcapping": 2.0, "sliding_window": 16, "query_pre_attn_scalar": 16}
SINKS = {**TINY, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 16}


@pytest.mark.parametrize("config", [Gemma2Config(**SOFTCAP), GptOssConfig(**SINKS)], ids=["softcap", "sinks"])
def test_softcap_and_sinks(config):
    """Evicting layers use the operators, sliding layers plain PyTorch; eager attention is the reference."""

    def make(attn):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attn).eval()
        for name, x in model.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(x)
        return model

    stock, model = make("eager"), make("kvops")
    ids, mask = make_prompts(40, 23)
    expected = generate(stock, DynamicCache(config=stock.config), ids, mask)
    for method in ("snapkv", "h2o", "keydiff"):
        cache = KVCache(model.config, METHODS[method](400), attention_mask=mask)
        assert_close(generate(model, cache, ids, mask), expected)
    assert {s.evicts for s in cache.stats()} == {True, False}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    model = own().to(dtype)
    ids, _ = make_prompts(40)
    for method in METHODS:
        cache = KVCache(model.config, METHODS[method]())
        tokens, logits = generate(model, cache, ids)
        assert tokens.shape == (1, 12) and logits.isfinite().all() and cache.layers[0].keys.dtype == dtype


# ---- memory ----


def test_no_mask_is_made_and_no_step_is_held(monkeypatch):
    model = own()
    ids, mask = make_prompts(40, 23)
    made = []
    monkeypatch.setattr(kvops.hf.attention, "sdpa_mask", lambda *a, **k: made.append(a))
    cache = KVCache(model.config, kvops.SnapKV(24, window=8), attention_mask=mask)
    seen = []
    update = KVCache.update

    def watched(self, *args, **kwargs):
        step = update(self, *args, **kwargs)
        seen.extend(weakref.ref(x) for x in step)
        return step

    monkeypatch.setattr(KVCache, "update", watched)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    assert made == [] and len(seen) == 6 and all(x() is None for x in seen)


# ---- refusals ----


def test_queries_need_our_attention():
    stock, model = make_model(), own()
    mask = make_prompts(6, 4)[1]
    for method in ("snapkv", "h2o", "pyramidkv", "lagkv-l2"):
        with pytest.raises(ValueError, match=r"kvops.hf.use_attention\(model\)"):
            KVCache(stock.config, METHODS[method]())
    with pytest.raises(ValueError, match="LagKV.*padded batch.*use_attention"):
        KVCache(stock.config, METHODS["lagkv"](), attention_mask=mask)
    model.set_attn_implementation("sdpa")  # too late
    ids, _ = make_prompts(40)
    for made in (METHODS["snapkv"], METHODS["keydiff"]):
        cache = KVCache(own().config, made())
        with pytest.raises(RuntimeError, match="which this cache was made for, got a model with another"):
            generate(model, cache, ids)
        assert cache.get_seq_length() == 0
    with pytest.raises(TypeError, match="use_attention: model must be a transformers model, got LlamaConfig"):
        use_attention(model.config)


def test_training_is_refused():
    model = own(attention_dropout=0.5).train()
    ids, _ = make_prompts(40)
    with torch.no_grad(), pytest.raises(ValueError, match="expected dropout 0, got 0.5"):
        model(ids, past_key_values=KVCache(model.config, METHODS["snapkv"]()))
    with pytest.raises(ValueError, match="requires grad"):
        model.eval()(ids, past_key_values=KVCache(model.config, METHODS["snapkv"]()))


# ---- generate, and LAQ's stages ----


def laq_by_hand(model, ids, method, tokens):
    """LAQ of one prompt, built from one-shot calls on the full cache and greedy decode."""
    full = KVCache(model.config, method)
    n, layers = ids.shape[1], range(model.config.num_hidden_layers)
    with torch.no_grad():
        logits = model(ids, past_key_values=full).logits[:, -1]
        drafts = [layer.cache.draft() for layer in full.layers]
        queries = [[] for _ in layers]
        draft = copy.copy(full)
        draft.layers = [layer.with_cache(x) for layer, x in zip(full.layers, drafts)]
        for i in layers:
            attend = drafts[i].attention

            def watched(q, *args, i=i, attend=attend, **kwargs):
                queries[i].append(q.clone())
                return attend(q, *args, **kwargs)

            drafts[i].attention = watched
        first = token = logits.argmax(-1, keepdim=True)
        for step in range(len(method.template) or method.steps):
            position = torch.tensor([[n + step]])
            if method.template:
                token = torch.tensor([[method.template[step]]])
            token = model(token, position_ids=position, past_key_values=draft).logits[:, -1].argmax(-1, keepdim=True)
        kept = KVCache(model.config, kvops.Full())
        for i in layers:
            q = torch.cat(queries[i], 2)
            stored = full.layers[i].cache
            k, v, indices = kvops.laq_compress(stored.k, stored.v, q, method.budget)
            kept.update(k, v, i)
            kept.layers[i].cache.seen = n
            kept.layers[i].positions = indices
        out, token = [first], first
        for step in range(tokens - 1):
            position = torch.tensor([[n + step]])
            token = model(token, position_ids=position, past_key_values=kept).logits[:, -1].argmax(-1, keepdim=True)
            out.append(token)
    return torch.cat(out, 1), [layer.positions for layer in kept.layers]


@pytest.mark.parametrize("template", [(), (7, 30, 7, 2)], ids=["draft", "template"])
def test_laq_runs_the_stages_of_the_paper(template):
    model = own()
    ids, _ = make_prompts(60)
    method = kvops.LAQ(20, template=template)
    expected, positions = laq_by_hand(model, ids, method, 10)
    out = kvops.hf.generate(make_model(), method, ids, max_new_tokens=10, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(out.sequences[:, 60:], expected)
    cache = out.past_key_values
    for layer, indices in zip(cache.layers, positions):
        assert torch.equal(layer.cache.positions[:, :, :20], indices)
    assert [s.tokens_kept for s in cache.stats()] == [20 + 9] * 3


@pytest.mark.parametrize(
    "stage1",
    [kvops.StreamingLLM(16), "streamingllm", kvops.DefensiveKV(16, window=4)],
)
def test_laq_with_any_first_stage(stage1):
    """One whose tokens take the positions of their slots, and one that needs something of the model."""
    ids, _ = make_prompts(40)
    out = kvops.hf.generate(make_model(), kvops.LAQ(10, stage1=stage1), ids, max_new_tokens=3, do_sample=False)
    assert out.shape[1] == 43


def test_laq_without_the_weights_of_its_first_stage():
    """It raises before the model reads the prompt."""
    model = own()
    with pytest.raises(ValueError, match="CriticalKV: w_o must be .* got None; .*for_model"):
        KVCache(model.config, kvops.LAQ(10, stage1=kvops.CriticalKV(16, window=4)))
    for name in ("criticalkv", "expected-attention"):
        with pytest.raises(ValueError, match=f"LAQ: stage1 by name has no .* of a model, .* got '{name}'"):
            KVCache(model.config, kvops.LAQ(10, stage1=name))


def test_laq_first_token_is_that_of_the_full_prefill():
    model = make_model()
    for seed in range(5):
        ids, _ = make_prompts(60, seed=seed)
        expected = model.generate(ids, max_new_tokens=1, do_sample=False, attention_mask=torch.ones_like(ids))
        out = kvops.hf.generate(model, kvops.LAQ(10), ids, max_new_tokens=3, do_sample=False)
        assert torch.equal(out[:, :61], expected)


@pytest.mark.parametrize(
    "method", [{}, {"window": 8}, {"template": (7, 30, 7)}], ids=["LAQ", "LAQ++", "LAQ by a template"]
)
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["plain", "beams"])
def test_laq_of_a_padded_batch_is_that_of_its_rows(method, options):
    model = make_model()
    lengths = (60, 47, 24, 9)
    ids, mask = make_prompts(*lengths)
    settings = dict(max_new_tokens=12, do_sample=False, **options)
    out = kvops.hf.generate(model, kvops.LAQ(24, **method), ids, attention_mask=mask, **settings)
    for row, n in enumerate(lengths):
        alone = kvops.hf.generate(model, kvops.LAQ(24, **method), ids[row : row + 1, -n:], **settings)
        assert torch.equal(out[row, 60:], alone[0, n:]), row


def test_laq_rows_that_end_early_in_the_lookahead():
    """An EOS among the lookahead tokens ends only its row, which keeps the same tokens as alone."""
    model = make_model()
    lengths = (60, 60, 60)
    ids, mask = make_prompts(*lengths)
    drafted = kvops.hf.generate(model, kvops.LAQ(24), ids, max_new_tokens=6, do_sample=False)[:, 60:]
    eos = int(drafted[1, 2])  # the second row ends in the lookahead
    settings = dict(max_new_tokens=12, do_sample=False, eos_token_id=eos, pad_token_id=0)
    settings["return_dict_in_generate"] = True
    out = kvops.hf.generate(model, kvops.LAQ(24), ids, attention_mask=mask, **settings)
    for row in range(3):
        alone = kvops.hf.generate(model, kvops.LAQ(24), ids[row : row + 1], **settings)
        new = alone.sequences[0, 60:]
        assert torch.equal(out.sequences[row, 60 : 60 + len(new)], new)
        for a, b in zip(out.past_key_values.layers, alone.past_key_values.layers):
            assert torch.equal(a.cache.positions[row, :, :24], b.cache.positions[0, :, :24])


def test_laq_reports_the_memory_of_its_stages():
    model = make_model()
    ids, _ = make_prompts(200)
    out = kvops.hf.generate(model, kvops.LAQ(20), ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    per_token = 3 * 2 * 2 * 16 * 4  # layers, K and V, KV heads, head_dim, fp32
    stages = {s.name: s.bytes for s in out.past_key_values.stages}
    assert stages["prefill"] == 200 * per_token
    assert (200 + 20 + 8) * per_token <= stages["lookahead"] <= (200 + 20 + 8 + 16) * per_token  # with spare slots
    assert stages["decode"] == 20 * per_token


def test_lookahead_for_a_loop_of_ones_own():
    """A loop of calls gives the same as generate()."""
    model = own()
    ids, mask = make_prompts(60, 41)
    expected = kvops.hf.generate(model, kvops.LAQ(20), ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    cache = KVCache(model.config, kvops.LAQ(20), attention_mask=mask)
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits[:, -1]
        kvops.hf.lookahead(model, cache, logits, attention_mask=mask)
        said = [logits.argmax(-1, keepdim=True)]
        for step in range(7):
            positions = mask.sum(-1, keepdim=True) + step
            logits = model(said[-1], position_ids=positions, past_key_values=cache).logits[:, -1]
            said.append(logits.argmax(-1, keepdim=True))
    assert torch.equal(torch.cat(said, 1), expected[:, 60:])
    with pytest.raises(TypeError, match="lookahead: cache must be a KVCache with kvops.LAQ, got .*SnapKV"):
        kvops.hf.lookahead(model, KVCache(model.config, kvops.SnapKV(20, window=8)), logits)


def test_generate_leaves_the_model_as_it_was():
    model = make_model("qwen2", **MIXED)
    ids, mask = make_prompts(40, 22)
    for method in (kvops.LAQ(20), kvops.SnapKV(20, window=8), kvops.KeyDiff(20)):
        out = kvops.hf.generate(model, method, ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
        assert out.shape == (2, 45) and model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="past_key_values"):
        kvops.hf.generate(model, kvops.LAQ(20), ids, past_key_values=DynamicCache(config=model.config))
    with pytest.raises(TypeError, match="policy must be a kvops policy"):
        kvops.hf.generate(model, kvops.LAQ, ids)
    assert model.config._attn_implementation == "sdpa"
    assert 2 <= VOCAB
