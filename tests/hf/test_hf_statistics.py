"""Expected Attention by the statistics of the prompt's own queries, in models of transformers: what is kept equals what
`QueryStatistics` of the same queries keep, gathered with hooks before RoPE."""

import contextlib

import pytest
import torch

transformers = pytest.importorskip("transformers")

import kit  # noqa: E402
import kvops  # noqa: E402
import kvops.hf  # noqa: E402
from kvops import ExpectedAttention, QueryStatistics  # noqa: E402
from kvops.hf import KVCache, model_rope, use_attention  # noqa: E402
from test_hf import TINY, assert_rows_as_alone, generate, make_model, make_prompts, needs  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
KINDS = {
    "llama": {},
    "yarn": {"rope_parameters": YARN},
    "qwen3": {},  # norms of the queries
    "glm": {"rope_parameters": PARTIAL},  # adjacent channels form pairs, half of them are rotated
}


def build(kind):
    if kind in ("llama", "yarn"):
        return make_model(**KINDS[kind])
    needs(kind)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **TINY, head_dim=16, **KINDS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


@contextlib.contextmanager
def hooked(model):
    """Record the queries of each layer before RoPE: [b, Hq, t, d] for each step."""
    layers = model.model.layers
    queries, hooks = [[] for _ in layers], []
    for layer, into in zip(layers, queries):
        module = getattr(layer.self_attn, "q_norm", layer.self_attn.q_proj)

        def record(module, args, out, into=into):
            into.append(out.detach().reshape(*out.shape[:2], -1, 16).transpose(1, 2))

        hooks.append(module.register_forward_hook(record))
    yield queries
    for hook in hooks:
        hook.remove()


def kept(cache):
    return [x.cache.positions for x in cache.evicting_layers]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["generate", "compress", "cache"])
def test_what_is_kept_is_what_the_prompts_own_queries_keep(kind, how):
    model, (ids, _) = build(kind), make_prompts(140)
    policy = ExpectedAttention(48, buffer=8, statistics="prompt")
    if how == "cache":
        use_attention(model)
    with hooked(model) as queries:
        if how == "generate":
            out = kvops.hf.generate(model, policy, ids, **GREEDY)
        else:
            with kvops.hf.compress(model, policy) if how == "compress" else contextlib.nullcontext():
                cache = {} if how == "compress" else {"past_key_values": KVCache(model.config, policy)}
                out = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY, **cache)
    assert [x.shape[2] for x in queries[0]] == [140] + [1] * 19
    of = QueryStatistics.of([x[0][:, :, 4:] for x in queries], model_rope(model.config))
    given = kvops.hf.generate(model, ExpectedAttention(48, buffer=8, statistics=of), ids, **GREEDY)
    assert torch.equal(out.sequences, given.sequences)
    assert all(map(torch.equal, kept(out.past_key_values), kept(given.past_key_values)))
    assert len(out.past_key_values.layers[0].cache) < 48 + 8
    text = ExpectedAttention(48, buffer=8, statistics=kvops.hf.query_statistics(model, make_prompts(90, seed=3)[0]))
    other = kvops.hf.generate(model, text, ids, **GREEDY).past_key_values
    assert not all(map(torch.equal, kept(out.past_key_values), kept(other)))


@pytest.mark.parametrize(
    "options",
    [{}, {"prefill_chunk_size": 30}, {"num_beams": 2}],
    ids=["plain", "chunks", "beams"],
)
def test_rows_of_a_padded_batch_equal_the_rows_alone(options):
    model, (ids, mask) = use_attention(make_model()), make_prompts(90, 61, 74)
    if "prefill_chunk_size" in options:  # chunks of a row alone begin elsewhere, so all rows are as long
        ids, mask = make_prompts(90, 90, 90)

    def cache_of(config, **declared):
        return KVCache(config, ExpectedAttention(40, buffer=4, statistics="prompt"), **declared)

    assert_rows_as_alone(model, cache_of, ids, mask, options)


def test_a_forward_whose_positions_count_the_padding():
    """A forward without position_ids counts positions by columns: queries and keys differ by the same rotation."""
    model, (ids, mask) = use_attention(make_model()), make_prompts(120, 90)
    policy = ExpectedAttention(40, statistics="prompt")
    cache, alone = KVCache(model.config, policy), KVCache(model.config, policy)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        model(ids[1:, 30:], past_key_values=alone)
    for together, own in zip(kept(cache), kept(alone)):
        assert torch.equal(together[1] - 30, own[0])


def test_a_second_turn_adds_its_queries():
    model, (ids, _) = use_attention(make_model()), make_prompts(150)
    policy = ExpectedAttention(40, buffer=None, statistics="prompt")
    cache = KVCache(model.config, policy)
    with hooked(model) as queries, torch.no_grad():
        for step in ids.split([100, 1, 1, 48], 1):
            model(step, past_key_values=cache)
    rope = model_rope(model.config)
    for layer, (first, _, _, last) in zip(cache.evicting_layers, queries):
        of = QueryStatistics.of(torch.cat((first[:, :, 4:], last), 2), rope)
        found = layer.cache._stored().statistics
        torch.testing.assert_close(found.mean[0], of.mean[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.cov[0], of.cov[0], rtol=1e-4, atol=1e-4)
    cache.reset()
    out = generate(model, cache, ids[:, :100])
    assert torch.equal(out[0], generate(model, KVCache(model.config, policy), ids[:, :100])[0])


def test_layers_that_share_keys():
    """The queries of the layer that has the keys count; the others attend to the keys before the eviction."""
    from test_hf_refusals import assert_replayed

    needs("gemma3n_text")
    assert_replayed("gemma3n_text", ExpectedAttention(12, statistics="prompt"))


def test_half_precision():
    """Queries that were rotated by rounded cosines and sines are unrotated by the same."""
    model, (ids, _) = make_model().to(torch.bfloat16), make_prompts(140)
    with hooked(model) as queries:
        out = kvops.hf.generate(
            model, ExpectedAttention(48, statistics="prompt"), ids, **{**GREEDY, "max_new_tokens": 1}
        )
    for layer, (q,) in zip(out.past_key_values.evicting_layers, queries):
        assert layer.cache.rope.dtype == torch.bfloat16
        found = layer.cache._stored().statistics
        of = QueryStatistics.of(q[:, :, 4:], layer.cache.rope)
        scale = of.cov[0].diagonal(dim1=1, dim2=2).mean().sqrt()
        torch.testing.assert_close(found.mean[0], of.mean[0], rtol=0, atol=float(scale) * 1e-2)


def test_drafts_do_not_count():
    from test_hf_drafts import EOS, drafts, hf_drafts, repetitive

    if hf_drafts.WHOLE_CACHES:
        pytest.skip("this transformers drafts with whole caches only")
    model, ids = make_model(**EOS), repetitive()
    policy = ExpectedAttention(16, buffer=3, statistics="prompt")
    out = kvops.hf.generate(model, policy, ids, **GREEDY, **drafts("lookup"))
    alone = kvops.hf.generate(model, policy, ids, **GREEDY)
    for layer, truth in zip(out.past_key_values.evicting_layers, alone.past_key_values.evicting_layers):
        assert all(map(torch.equal, layer.cache._moments, truth.cache._moments))
        assert len(layer.cache) <= 16 + 3 + 4


def test_what_is_refused():
    model, policy = make_model(), ExpectedAttention(16, statistics="prompt")
    with kit.refuses("KVCache: ExpectedAttention", "uses queries", "use_attention"):
        KVCache(model.config, policy)
    assert kvops.hf.for_model(policy, model) == policy
    rope = kvops.Rope(torch.ones(8))
    assert KVCache(use_attention(model).config, policy, rope=rope).layers[0].cache.rope is rope
