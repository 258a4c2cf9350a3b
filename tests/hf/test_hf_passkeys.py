"""Texts with passkeys, and the shares of heads measured over them: against plain formulas over eager attention."""

import re
import zlib

import pytest
import torch

transformers = pytest.importorskip("transformers")

import kit  # noqa: E402
import kvops.hf  # noqa: E402
from hf_architectures import tiny_model  # noqa: E402
from kvops.hf import PasskeyTexts, duo, passkey_texts  # noqa: E402
from kvops.hf.passkeys import WORDS  # noqa: E402
from test_hf import make_model, make_prompts, needs  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
PASSAGES, ANSWERS = [[5, 8], [15, 31]], [[40, 43], [44, 60]]


def tokenizer(text, add_special_tokens=True):
    """Words are tokens, and so are the spaces before them."""
    assert not add_special_tokens
    return {"input_ids": [1000 + zlib.crc32(x.encode()) for x in text.split(" ")[1:]]}


def make_texts(rows=2, n=60):
    ids, _ = make_prompts(*[n] * rows)
    spans = (torch.tensor(x).expand(rows, -1, -1).clone() for x in (PASSAGES, ANSWERS))
    passages, answers = spans
    for (begin, end), (answer, after) in zip(PASSAGES, ANSWERS):
        ids[:, answer:after] = ids[:, begin:end]
    return PasskeyTexts(ids, passages, answers)


# Texts


def test_answers_repeat_the_passages_of_a_text():
    ids = torch.arange(3 * 200).view(3, 200)
    texts = passkey_texts(tokenizer, ids, passages=3, length=7)
    texts.check("test")
    assert texts.ids.shape == ids.shape and texts.passages.shape == texts.answers.shape == (3, 3, 2)
    known = {x for word in WORDS for x in tokenizer(f" {word}", add_special_tokens=False)["input_ids"]}
    for text, own, passages, answers in zip(ids.tolist(), texts.ids.tolist(), *(x.tolist() for x in texts[1:])):
        kept = [x for x in own if x < 1000]
        assert kept == text[: len(kept)] and own[0] == text[0]  # the text's own tokens, in order
        for (begin, end), (answer, after) in zip(passages, answers):
            assert own[begin:end] == own[answer:after] and end - begin == 7 and {*own[begin:end]} <= known
            assert own[begin - 1] == own[answer - 1] not in known  # "is:"
        assert answers[-1][1] == len(own) and passages == sorted(passages)
    assert len({tuple(x) for x in texts.passages[:, :, 0].tolist()}) == 3  # each text has its own places
    assert torch.equal(texts.ids, passkey_texts(tokenizer, ids, passages=3, length=7).ids)
    assert not torch.equal(texts.ids, passkey_texts(tokenizer, ids, passages=3, length=7, seed=1).ids)


def test_the_tokens_before_those_of_an_answer_predict_them():
    texts = make_texts()
    found = texts.predicting()
    assert found.shape == (2, 60) and found[0].nonzero()[:, 0].tolist() == [*range(39, 42), *range(43, 59)]


def test_a_text_without_room_is_refused():
    with kit.refuses("passkey_texts: expected texts of more than", "tokens, which 4 passages of 16 words", "got 150"):
        passkey_texts(tokenizer, torch.zeros(1, 150, dtype=torch.int64))
    with pytest.raises(ValueError) as error:
        passkey_texts(tokenizer, torch.arange(9)[None], passages=2, length=3)
    most = int(re.search(r"more than (\d+) tokens", str(error.value))[1])
    with kit.refuses(f"more than {most} tokens"):
        passkey_texts(tokenizer, torch.arange(most)[None], passages=2, length=3)
    texts = passkey_texts(tokenizer, torch.arange(most + 1)[None], passages=2, length=3)
    assert texts.ids[0, 0] == 0 and (texts.ids < 1000).sum() == 3  # a text begins with a token of its own
    for wrong in ([1, 2], torch.zeros(3), torch.zeros(0, 4, dtype=torch.int64)):
        with kit.refuses("passkey_texts: ids must be", kind=(TypeError, ValueError)):
            passkey_texts(tokenizer, wrong)
    with kit.refuses("passkey_texts: passages must be at least 1, got 0"):
        passkey_texts(tokenizer, torch.zeros(1, 500, dtype=torch.int64), passages=0)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("ids", lambda x: x[0], "texts.ids must be int64 [b, n], got torch.int64 [60]"),
        ("ids", lambda x: x.int(), "texts.ids must be int64 [b, n], got torch.int32"),
        ("passages", lambda x: x[:, 0], "texts.passages must be int64 [b, p, 2], got torch.int64 [2, 2]"),
        ("answers", lambda x: x[:1], "texts.answers must be [2, 2, 2], got [1, 2, 2]"),
        ("answers", lambda x: x + 1, "texts.answers must be spans of at least one of 60 tokens"),
        ("passages", lambda x: x.flip(-1), "texts.passages must be spans of at least one of 60 tokens"),
        ("answers", lambda x: x - 10, "texts.answers must begin at least one token after the last passage"),
    ],
)
def test_texts_that_do_not_fit_each_other(name, change, message):
    texts = make_texts()
    texts = texts._replace(**{name: change(getattr(texts, name))})
    for measure in (kvops.hf.retrieval_shares, kvops.hf.duo_shares):
        with kit.refuses(re.escape(f"{measure.__name__}: {message}")):
            measure(make_model(), texts)


def test_other_things_than_texts_are_refused():
    for measure in (kvops.hf.retrieval_shares, kvops.hf.duo_shares):
        with kit.refuses(f"{measure.__name__}: texts must be kvops.hf.PasskeyTexts, got Tensor", kind=TypeError):
            measure(make_model(), make_texts().ids)
        with kit.refuses(f"{measure.__name__}: texts.answers must be a torch.Tensor, got list", kind=TypeError):
            measure(make_model(), make_texts()._replace(answers=ANSWERS))
        with kit.refuses(f"{measure.__name__}: model must be a transformers model, got Linear", kind=TypeError):
            measure(torch.nn.Linear(2, 2), make_texts())


# HeadKV's retrieval


def retrieval(model, texts, layers):
    """Of the heads of some layers, over their mean, by the attention that the model returns: fp64 [layers, Hk]."""
    heads = model.config.num_key_value_heads
    attentions = model(texts.ids, output_attentions=True, use_cache=False).attentions
    found = torch.zeros(len(layers), heads, dtype=torch.float64)
    for i, layer in enumerate(layers):
        for b, attention in enumerate(attentions[layer].double()):
            for (begin, end), (answer, after) in zip(texts.passages[b].tolist(), texts.answers[b].tolist()):
                for h, rows in enumerate(attention[:, answer - 1 : after - 1]):
                    for weights in rows:
                        best = weights.argsort(descending=True)[: end - begin]
                        mass = sum(weights[j] for j in best if begin <= j < end)
                        found[i, h * heads // len(attention)] += mass / (after - answer)
    return (found / found.mean()).detach()


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
def test_retrieval_is_the_attention_to_the_passage_among_the_largest(kind):
    needs(kind)
    model = tiny_model(kind, "eager")
    texts = make_texts()
    layers = [
        i for i, x in enumerate(kvops.hf.KVCache(model.config, "full").layers) if isinstance(x, kvops.hf.EvictingLayer)
    ]
    assert layers
    expected = retrieval(model, texts, layers)
    shares = kvops.hf.retrieval_shares(model, texts)
    assert shares.dtype == torch.float32 and model.config._attn_implementation == "eager"
    torch.testing.assert_close(shares.double(), expected, rtol=1e-4, atol=1e-5)
    assert expected.min() < 0.9 * expected.max()
    kvops.KeyDiff(16, head_mode="adaptive", shares=shares)


# DuoAttention's optimization


def mixed(alpha, first, sinks, recent):
    """An attention for transformers: rows from `first` on mix full and near attention by alpha, [layers, Hk]."""

    def attention(module, query, key, value, mask, scaling=None, **options):
        group, n = query.shape[1] // key.shape[1], key.shape[2]
        k, v = (x.repeat_interleave(group, 1) for x in (key, value))
        logits = query @ k.mT * scaling
        i, j = torch.arange(n)[:, None], torch.arange(n)
        seen, near = j <= i, (j <= i) & ((j < sinks) | (i - j < recent))
        full, part = (logits.masked_fill(~x, -torch.inf).softmax(-1) for x in (seen, near))
        own = alpha[module.layer_idx].repeat_interleave(group)[:, None, None]
        own = torch.where(i >= first, own, 1.0)
        return ((own * full + (1 - own) * part) @ v).transpose(1, 2), None

    return attention


def test_gradients_are_those_of_the_mixed_attention():
    model, texts, first = make_model(num_key_value_heads=2), make_texts(rows=1), 39
    transformers.AttentionInterface.register("kvops_test_mixed", lambda *args, **options: own(*args, **options))
    rows = texts.predicting()[0]
    generator = torch.Generator().manual_seed(0)
    alpha = [torch.rand(2, generator=generator).requires_grad_() for _ in model.model.layers]

    with kvops.hf.attention.own_attention(model):
        ours = duo._Mixed(model, texts.ids[0], rows, first, 3, 8)
        found, hidden = torch.stack(ours.gradients(alpha)), ours.hidden(alpha)
    target = model(texts.ids, output_hidden_states=True).hidden_states[-1][0, rows]
    torch.testing.assert_close(ours.whole, target, rtol=1e-4, atol=1e-5)

    model.set_attn_implementation("kvops_test_mixed")
    own = mixed(alpha, first, 3, 8)
    expected = model(texts.ids, output_hidden_states=True).hidden_states[-1][0, rows]
    assert (expected - target).abs().max() > 0.01  # the mixture matters
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-5)
    wanted = torch.stack(torch.autograd.grad((expected - target).square().mean(), alpha))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-7)
    assert wanted.abs().min() > 0


def test_heads_that_do_not_matter_lose_their_weight():
    """Their columns of the output projection are 0, so only the penalty pulls at them."""
    model, texts = make_model(num_key_value_heads=2), make_texts()
    width = model.config.hidden_size // 2  # the query heads of one KV head
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:, :width] = 0
            layer.self_attn.o_proj.weight[:, width:] *= 4
    before = {name: x.clone() for name, x in model.state_dict().items()}
    settings = dict(sinks=2, recent=6, steps=30, rate=0.1, penalty=1e-3)
    alpha = kvops.hf.duo_shares(model, texts, **settings)
    assert alpha.shape == (len(model.model.layers), 2) and alpha.dtype == torch.float32 and not alpha.requires_grad
    assert alpha.min() >= 0 and alpha.max() <= 1
    assert (alpha[:, 0] < 0.05).all() and alpha[:, 1].max() > 0.5
    assert torch.equal(alpha, kvops.hf.duo_shares(model, texts, **settings))
    with torch.inference_mode():
        assert torch.equal(alpha, kvops.hf.duo_shares(model, texts, **settings))
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name]) and x.grad is None
    assert model.config._attn_implementation == "sdpa" and all(x.grad is None for x in model.parameters())


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "qwen3", "gemma4_text", "roberta"])
def test_other_architectures(kind):
    """A softcap, sinks, norms of queries, layers that share keys, positions that do not begin at 0; layers with windows
    keep their own attention."""
    needs(kind)
    model = tiny_model(kind)
    alpha = kvops.hf.duo_shares(model, make_texts(), sinks=2, recent=6, steps=4, rate=0.1, penalty=1e3)
    evicting = kvops.hf.KVCache(model.config, "full").evicting_layers
    assert alpha.shape == (len(evicting), 4 if kind == "roberta" else 2) and 0.5 < alpha.min() and alpha.max() < 1


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(sinks=-1), "sinks must be at least 0, got -1"),
        (dict(recent=0), "recent must be at least 1, got 0"),
        (dict(steps=0), "steps must be at least 1, got 0"),
        (dict(rate=-1), "rate must be at least 0, got -1"),
        (dict(penalty=float("nan")), "penalty must be finite in fp32, got nan"),
        (dict(sinks=16, recent=44), "texts must have more than 60 tokens, sinks and recent, got 60"),
    ],
)
def test_settings_of_the_optimization(settings, message):
    with kit.refuses(f"duo_shares: {message}"):
        kvops.hf.duo_shares(make_model(), make_texts(), **{"sinks": 2, "recent": 6, **settings})
    with kit.refuses("duo_shares: rate must be a float, got ", kind=TypeError):
        kvops.hf.duo_shares(make_model(), make_texts(), sinks=2, recent=6, rate="1")


@pytest.mark.parametrize(
    "place, spoil",
    [
        ("model.layers.1.mlp.gate_proj", lambda module, args, out: out.exp_().log_()),
        ("model.layers.1", lambda module, args, out: out.detach()),
    ],
)
def test_a_model_that_autograd_cannot_follow(place, spoil):
    model, texts = make_model(), make_texts()
    model.get_submodule(place).register_forward_hook(spoil)
    with kit.refuses("duo_shares: expected a model that autograd can follow, got Llama", kind=NotImplementedError):
        kvops.hf.duo_shares(model, texts, sinks=2, recent=6)


def test_a_penalty_that_leaves_nothing():
    with kit.refuses("duo_shares: expected a penalty that leaves some head a weight, got 1000"):
        kvops.hf.duo_shares(make_model(), make_texts(), sinks=2, recent=6, steps=40, penalty=1000)


def test_products_that_fp16_does_not_hold():
    model = make_model("qwen2", num_key_value_heads=2)
    with torch.no_grad():
        for layer in model.model.layers:
            d = layer.self_attn.head_dim
            for bias, value in ((layer.self_attn.q_proj.bias, 40), (layer.self_attn.k_proj.bias, 900)):
                bias.view(-1, d)[:, d // 2 - 1 :: d // 2] = value  # the pair that turns slowest
    found = kvops.hf.retrieval_shares(model.half(), make_texts())  # raises if all weights are 0
    assert found.isfinite().all()
    alpha = kvops.hf.duo_shares(model, make_texts(), sinks=2, recent=6, steps=2, penalty=1e3)
    assert alpha.isfinite().all() and alpha.max() < 1


def test_gradients_in_fp16():
    """The derivative by a hidden state of a mean over all of them may be less than fp16 holds, as with this norm."""
    model, texts, found = make_model(num_key_value_heads=2), make_texts(rows=1), []
    with torch.no_grad():
        model.model.norm.weight *= 1e-3
    alpha = [torch.full((2,), 0.95).requires_grad_() for _ in model.model.layers]
    for dtype in (torch.float32, torch.float16):
        with kvops.hf.attention.own_attention(model.to(dtype)):
            mixed = duo._Mixed(model, texts.ids[0], texts.predicting()[0], 39, 3, 8)
            found.append(torch.stack(mixed.gradients(alpha)))
    assert ((found[1] - found[0]).norm() / found[0].norm()) < 0.1


def test_a_model_in_train_mode_is_refused():
    for measure in (kvops.hf.retrieval_shares, kvops.hf.duo_shares):
        with kit.refuses(f"{measure.__name__}: expected a model that is not in train mode", "call model.eval"):
            measure(make_model().train(), make_texts())


def test_a_model_that_restarts_in_the_middle_of_a_text():
    needs("jamba")
    with kit.refuses("duo_shares: expected a JambaForCausalLM that reads a text in two", kind=NotImplementedError):
        kvops.hf.duo_shares(tiny_model("jamba"), make_texts(), sinks=2, recent=6)


def test_a_tokenizer_without_words():
    def silent(text, add_special_tokens=True):
        return {"input_ids": [] if "code" not in text else [1, 2]}

    with kit.refuses("passkey_texts: expected a tokenizer with tokens for"):
        passkey_texts(silent, torch.zeros(1, 500, dtype=torch.int64))


def test_models_without_what_is_needed():
    needs("gemma3n_text")
    streams = tiny_model("gemma3n_text")  # its hidden states have a dim more
    with kit.refuses("duo_shares: expected hidden states .b, t, hidden. of Gemma3nFor", kind=NotImplementedError):
        kvops.hf.duo_shares(streams, make_texts(), sinks=2, recent=6)
    assert kvops.hf.retrieval_shares(streams, make_texts()).shape[1] == 2
    for measure in (kvops.hf.retrieval_shares, kvops.hf.duo_shares):
        with kit.refuses(f"{measure.__name__}: expected a model with full-attention layers, which evict, got one"):
            measure(make_model("mistral", sliding_window=16), make_texts(n=100))
