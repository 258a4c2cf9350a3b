"""kvops.hf: a `KVCache` that has seen a prompt continues it, and refuses another one."""

import copy
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache, GenerationMixin  # noqa: E402

import kvops  # noqa: E402
from kvops.hf import KVCache, compress, use_attention  # noqa: E402
from kvops.hf.arguments import CACHE  # noqa: E402
from test_hf import VOCAB, make_model, make_prompts  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
PAD = 0  # no prompt contains it
GREEDY = dict(max_new_tokens=8, do_sample=False)
REMEDY = "for a new prompt make a new KVCache .*kvops.hf.compress.*to continue the conversation pass the token ids"


@pytest.fixture(params=["sdpa", "kvops"])
def model(request):
    return make_model(attn=request.param)


def used(model, *lengths, policy=None):
    """A cache that has generated from prompts of these lengths; the prompts, their mask, and all tokens."""
    ids, mask = make_prompts(*lengths)
    cache = KVCache(model.config, policy or kvops.KeyDiff(24), attention_mask=mask)
    return cache, ids, mask, model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)


def held(cache):
    return [(layer.cache.seen, len(layer.cache), layer.keys.clone()) for layer in cache.evicting_layers]


def unchanged(cache, before):
    return all(a == x and b == y and torch.equal(c, z) for (a, b, c), (x, y, z) in zip(held(cache), before))


@pytest.mark.parametrize("length", [20, 46, 47, 80], ids=["shorter", "shorter by one", "equal", "longer"])
def test_a_second_prompt_is_refused(model, length):
    cache, *_ = used(model, 40)
    other, _ = make_prompts(length, seed=2)
    before = held(cache)
    assert before[0][0] == 47
    with pytest.raises(ValueError, match=rf"KVCache: expected a prompt that continues the 47 tokens.*{REMEDY}"):
        model.generate(other, past_key_values=cache, **GREEDY)
    assert unchanged(cache, before)


def test_the_error_names_the_first_token_that_differs(model):
    cache, ids, _, said = used(model, 40)
    other = torch.cat((said, ids[:, :10]), 1)
    other[0, 33] += 1
    with pytest.raises(ValueError, match="row 0 differs from token 33 on"):
        model.generate(inputs=other, past_key_values=cache, **GREEDY)
    with pytest.raises(ValueError, match="row 0 differs from token 33 on"):
        model.generate(input_ids=other, past_key_values=cache, **GREEDY)


def test_a_row_of_a_padded_batch_is_refused(model):
    cache, ids, mask, said = used(model, 40, 31)
    more, _ = make_prompts(12, 12, seed=3)
    whole, mask = torch.cat((said, more), 1), torch.cat((mask, torch.ones(2, 8 + 12, dtype=torch.long)), 1)
    other = whole.clone()
    other[1, 20] += 1
    with pytest.raises(ValueError, match="row 1 differs from token 20 on"):
        model.generate(other, attention_mask=mask, past_key_values=cache, **GREEDY)
    whole[1, :9] = 5  # padding of another id
    assert model.generate(whole, attention_mask=mask, past_key_values=cache, **GREEDY).shape == (2, 68)


def test_further_turns_go_on(model):
    cache, _, _, said = used(model, 40)
    for seed in (3, 4):
        more, _ = make_prompts(12, seed=seed)
        whole = torch.cat((said, more), 1)
        alone = copy.deepcopy(cache)
        said = model.generate(whole, past_key_values=cache, **GREEDY)
        # the new tokens alone, with a mask over all of them
        new = whole[:, alone.get_seq_length() :]
        out = model.generate(new, attention_mask=torch.ones_like(whole), past_key_values=alone, **GREEDY)
        assert torch.equal(out[:, new.shape[1] :], said[:, whole.shape[1] :])
    assert cache.get_seq_length() == 40 + 8 + 12 + 8 + 12 + 7
    said[0, 50] += 1  # of the second turn
    with pytest.raises(ValueError, match="row 0 differs from token 50 on"):
        model.generate(torch.cat((said, more), 1), past_key_values=cache, **GREEDY)


def test_a_prefix_that_a_forward_has_read_is_not_compared(model):
    """A forward shows the library no token ids."""
    ids, _ = make_prompts(40)
    cache = KVCache(model.config, kvops.KeyDiff(24))
    with torch.no_grad():
        model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="continues the 40 tokens .* got one of 40"):
        model.generate(ids, past_key_values=cache, **GREEDY)
    more, _ = make_prompts(10, seed=3)
    assert model.generate(torch.cat((ids, more), 1), past_key_values=cache, **GREEDY).shape == (1, 58)


def test_crop_takes_back_what_is_compared(model):
    ids, _ = make_prompts(40)
    cache = KVCache(model.config, kvops.KeyDiff(24))
    with torch.no_grad():
        model(ids, past_key_values=cache)
    cache.freeze()
    for seed in (3, 4):  # another question each
        more, _ = make_prompts(10, seed=seed)
        model.generate(torch.cat((ids, more), 1), past_key_values=cache, **GREEDY)
        cache.crop(40 - cache.get_seq_length())
    other, _ = make_prompts(50, seed=5)
    with pytest.raises(ValueError, match="row 0 differs"):
        model.generate(other, past_key_values=cache, **GREEDY)


def test_after_reset_and_reordering(model):
    cache, ids, mask, said = used(model, 40, 40)
    cache.batch_select_indices(torch.tensor([1, 0]))
    whole = torch.cat((said, ids[:, :9]), 1).flip(0)
    model.generate(whole, past_key_values=cache, **GREEDY)
    cache.reset()
    other, _ = make_prompts(30, 30, seed=2)
    assert model.generate(other, past_key_values=cache, **GREEDY).shape == (2, 38)


def test_what_beams_leave_in_the_cache_goes_on(model):
    """The rows of the cache are the beams of the last step, which need not be those that generate returns."""
    ids, _ = make_prompts(40)
    more, _ = make_prompts(9, 9, seed=3)
    for budget in (400, 24):
        cache = KVCache(model.config, kvops.KeyDiff(budget))
        said = model.generate(ids, past_key_values=cache, num_beams=2, num_return_sequences=2, **GREEDY)
        held = cache.conversation.ids
        assert held.shape == (2, 47)
        if budget == 24:  # other beams than those returned
            with pytest.raises(ValueError, match="row 1 differs from token 45 on, expected the id .*beam search"):
                model.generate(torch.cat((said, more), 1), past_key_values=copy.deepcopy(cache), **GREEDY)
        whole = torch.cat((held, more), 1)
        found = model.generate(whole, past_key_values=cache, **GREEDY)
        if budget == 400:  # nothing is evicted
            assert torch.equal(found, model.generate(whole, **GREEDY))
    cache = KVCache(model.config, kvops.KeyDiff(24))
    model.generate(ids, past_key_values=cache, num_beams=2, **GREEDY)
    with pytest.raises(ValueError, match="expected a prompt for each of the 2 rows of this cache, got 3"):
        model.generate(make_prompts(60, 60, 60)[0], past_key_values=cache, **GREEDY)


def test_embeddings_must_be_longer_than_what_was_seen(model):
    cache, ids, _, said = used(model, 40)
    embed = model.get_input_embeddings()
    with pytest.raises(ValueError, match="continues the 47 tokens .* got one of 40"):
        model.generate(inputs_embeds=embed(ids), past_key_values=cache, **GREEDY)
    whole = torch.cat((said, ids[:, :9]), 1)
    assert model.generate(inputs_embeds=embed(whole), past_key_values=cache, **GREEDY).shape == (1, 8)


def test_a_block_refuses_it_too():
    model = make_model()
    ids, _ = make_prompts(40)
    other, _ = make_prompts(60, seed=2)
    with compress(model, kvops.SnapKV(24, window=8)) as compressed:
        model.generate(ids, **GREEDY)
        with pytest.raises(ValueError, match=REMEDY):
            model.generate(other, past_key_values=compressed.cache, **GREEDY)
        assert model.generate(other, **GREEDY).shape == (1, 68)  # a fresh cache


def test_positions_that_restart_are_refused():
    """With the library's attention, which gets them."""
    model = use_attention(make_model())
    ids, _ = make_prompts(40)
    cache = KVCache(model.config, kvops.KeyDiff(24))
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="position_ids that continue the 40 tokens.*make a new KVCache"):
            model(ids, position_ids=torch.arange(40)[None], past_key_values=copy.deepcopy(cache))
        model(ids, position_ids=torch.arange(40, 80)[None], past_key_values=cache)
    assert cache.get_seq_length() == 80


def test_positions_of_a_row_that_begins_in_a_later_chunk():
    model = use_attention(make_model())
    ids, mask = make_prompts(40, 30)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = KVCache(model.config, kvops.KeyDiff(24), attention_mask=mask)
    with torch.no_grad():
        for part in (slice(0, 10), slice(10, 40)):
            seen = mask[:, : part.stop]
            model(ids[:, part], attention_mask=seen, position_ids=positions[:, part], past_key_values=cache)
    assert cache.get_seq_length() == 40


def test_other_caches_and_the_signature_stay(model):
    ids, _ = make_prompts(40)
    cache = DynamicCache(config=model.config)
    model.generate(ids, past_key_values=cache, **GREEDY)
    model.generate(make_prompts(60, seed=2)[0], past_key_values=cache, **GREEDY)
    assert list(inspect.signature(GenerationMixin.generate).parameters)[:3] == ["self", "inputs", "generation_config"]


PATCHES = """
import transformers, kvops.hf
from transformers import GenerationMixin
names = ("generate", "_get_candidate_generator")
own = [getattr(GenerationMixin, name) for name in names]
def patched():
    return [getattr(GenerationMixin, name) is not x for name, x in zip(names, own)]
states = [patched()]
config = transformers.LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                  num_attention_heads=1, num_key_value_heads=1)
cache = kvops.hf.KVCache(config, kvops.KeyDiff(4))
states.append(patched())
once = GenerationMixin.generate
kvops.hf.KVCache(config, kvops.KeyDiff(4))
states.append([GenerationMixin.generate is once])
kvops.hf.patches.remove()
kvops.hf.patches.remove()
states.append(patched())
kvops.hf.compress(transformers.LlamaForCausalLM(config), "keydiff:budget=4")
states.append(patched())
GenerationMixin.generate = lambda self: None
try:
    kvops.hf.patches.remove()
except RuntimeError as error:
    states.append("other code has replaced" in str(error))
states.append(patched()[1])
print(states)
"""


def test_transformers_is_changed_by_the_first_cache_and_as_before_afterwards():
    done = subprocess.run(
        [sys.executable, "-c", PATCHES], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip().endswith(
        "[[False, False], [True, True], [True], [False, False], [True, True], True, True]"
    ), done.stdout + done.stderr


# ---- masks and padding ----


def alone(model, ids, mask, policy=None, **options):
    """What each row of a left-padded batch generates alone."""
    return [
        model.generate(
            row[m.bool()][None],
            past_key_values=KVCache(model.config, policy or kvops.KeyDiff(24)),
            **{**GREEDY, **options},
        )[0, int(m.sum()) :]
        for row, m in zip(ids, mask)
    ]


@pytest.mark.parametrize("how", ["mask", "pad tokens", "declared", "beams", "chunks", "embeddings"])
def test_padded_rows_generate_what_they_generate_alone(model, how):
    ids, mask = make_prompts(64, 25, 9)
    ids[~mask.bool()] = PAD
    cache, shown, prompt = KVCache(model.config, kvops.KeyDiff(24)), {"attention_mask": mask}, {"input_ids": ids}
    options = {"beams": {"num_beams": 2}, "chunks": {"prefill_chunk_size": 20}}.get(how, {})
    if how == "pad tokens":
        shown = {"pad_token_id": PAD}
    elif how == "declared":
        shown, cache = {}, KVCache(model.config, kvops.KeyDiff(24), pads=[0, 39, 55])
    elif how == "embeddings":
        prompt = {"inputs_embeds": model.get_input_embeddings()(ids)}
    out = model.generate(**prompt, **shown, past_key_values=cache, **options, **GREEDY)
    out = out[:, out.shape[1] - 8 :]
    if how == "chunks":  # chunks of a padded row do not end where the row's own end
        assert cache.get_seq_length() == 71 and cache.evicting_layers[0].cache.padding.tolist() == [0, 39, 55]
        return
    for row, text in zip(out, alone(model, ids, mask, **options)):
        assert row.tolist() == text.tolist()


@pytest.mark.parametrize("shown", ["mask", "pad tokens"])
def test_zeros_elsewhere_are_refused(model, shown):
    """Pads on the right, and pads between turns, where the replies of a batch ended at different steps."""
    cache, ids, mask, said = used(model, 40, 31)
    more, _ = make_prompts(12, 12, seed=3)
    whole, mask = torch.cat((said, more), 1), torch.cat((mask, torch.ones(2, 20, dtype=torch.long)), 1)
    mask[0, 44:48] = 0
    whole[~mask.bool()] = PAD
    call = {"attention_mask": mask} if shown == "mask" else {"pad_token_id": PAD}
    before = held(cache)
    with pytest.raises(ValueError, match="padded on the left .* pads on the right or between the turns"):
        model.generate(whole, **call, past_key_values=cache, **GREEDY)
    assert unchanged(cache, before)
    mask = make_prompts(40, 31)[1].flip(1)
    ids[~mask.bool()] = PAD
    call = {"attention_mask": mask} if shown == "mask" else {"pad_token_id": PAD}
    with pytest.raises(ValueError, match="padded on the left"):
        model.generate(ids, **call, past_key_values=KVCache(model.config, kvops.KeyDiff(24)), **GREEDY)


def test_other_padding_in_a_further_turn_is_refused(model):
    cache, _, mask, said = used(model, 40, 31)
    more, _ = make_prompts(12, 12, seed=3)
    whole, mask = torch.cat((said, more), 1), torch.cat((mask, torch.ones(2, 20, dtype=torch.long)), 1)
    with pytest.raises(ValueError, match=r"begin with the pads .* expected \[0, 9\], got \[0, 0\]"):
        model.generate(whole, attention_mask=torch.ones_like(mask), past_key_values=cache, **GREEDY)
    expected = model.generate(whole, attention_mask=mask, past_key_values=copy.deepcopy(cache), **GREEDY)
    assert torch.equal(model.generate(whole, past_key_values=cache, **GREEDY), expected)  # the cache knows its padding


@pytest.mark.parametrize("length", [60, 64, 65, 66, 128])
def test_a_mask_covers_all_tokens(model, length):
    """After a prefill by a forward, generate gets the next token and a mask over all."""
    ids, _ = make_prompts(64)
    with torch.no_grad():
        token = model(ids).logits[:, -1:].argmax(-1)
        cache = KVCache(model.config, kvops.KeyDiff(400))
        model(ids, past_key_values=cache)
    before, mask = held(cache), torch.ones(1, length, dtype=torch.long)
    if length != 65:
        with pytest.raises(ValueError, match=rf"and the new ones, expected \[1, 64 \+ 1\], got \[1, {length}\]"):
            model.generate(token, attention_mask=mask, past_key_values=cache, **GREEDY)
        assert unchanged(cache, before)
        return
    said = model.generate(token, attention_mask=mask, past_key_values=cache, **GREEDY)
    expected = model.generate(torch.cat((ids, token), 1), **GREEDY)
    assert torch.equal(said[:, 1:], expected[:, 65:])


def test_a_mask_of_a_prompt_covers_the_prompt(model):
    ids, _ = make_prompts(40)
    for shape in ((1, 39), (1, 41), (2, 40), (1, 1, 40, 40)):
        cache = KVCache(model.config, kvops.KeyDiff(24))
        with pytest.raises(ValueError, match="KVCache: attention_mask must"):
            model.generate(ids, attention_mask=torch.ones(shape, dtype=torch.long), past_key_values=cache, **GREEDY)
        assert model.generate(ids, past_key_values=cache, **GREEDY).shape == (1, 48)


def test_a_refused_call_declares_nothing(model):
    ids, mask = make_prompts(40, 31)
    cache = KVCache(model.config, kvops.KeyDiff(24))

    class Broken:
        def put(self, ids):
            raise OSError("the stream is closed")

    with pytest.raises(OSError):
        model.generate(ids, attention_mask=mask, past_key_values=cache, streamer=Broken(), **GREEDY)
    other, mask = make_prompts(31, 40)
    out = model.generate(other, attention_mask=mask, past_key_values=cache, **GREEDY)
    for row, text in zip(out[:, 40:], alone(model, other, mask)):
        assert row.tolist() == text.tolist()


def test_methods_that_need_a_mask_per_row_are_refused_in_a_padded_batch():
    model = make_model()
    ids, mask = make_prompts(40, 31)
    cache = KVCache(model.config, kvops.LagKV(lag=8))
    with pytest.raises(ValueError, match="LagKV.*use_attention"):
        model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
    assert model.generate(make_prompts(40, 40)[0], past_key_values=cache, **GREEDY).shape == (2, 48)


# ---- replies ----


@pytest.mark.parametrize("at", [40, 43, 46])
def test_a_changed_reply_is_refused(model, at):
    """Such as one with its thinking left out, or tokenized again."""
    cache, _, _, said = used(model, 40, 40)
    more, _ = make_prompts(12, 12, seed=3)
    whole = torch.cat((said, more), 1)
    for other in (torch.cat((whole[:, :at], whole[:, at + 1 :]), 1), whole.clone()):
        other[1, at] = (whole[1, at] + 1) % VOCAB
        other[0, :47] = whole[0, :47]
        before = held(cache)
        with pytest.raises(ValueError, match=f"row 1 differs from token {at} on, expected the id {whole[1, at]}, got"):
            model.generate(other, past_key_values=cache, **GREEDY)
        assert unchanged(cache, before)
    whole[:, 47] = 5  # the last token has not been read yet
    model.generate(whole, past_key_values=cache, **GREEDY)


def test_a_reply_to_new_tokens_alone_is_compared_too(model):
    cache, _, _, said = used(model, 40)
    more, _ = make_prompts(12, seed=3)
    new = torch.cat((said[:, 47:], more), 1)
    out = model.generate(new, attention_mask=torch.ones(1, 60), past_key_values=cache, **GREEDY)
    whole = torch.cat((said[:, :47], out, more), 1)
    for at in (20, 45, 50, 62):
        other = whole.clone()
        other[0, at] = (other[0, at] + 1) % VOCAB
        with pytest.raises(ValueError, match=f"row 0 differs from token {at} on"):
            model.generate(other, past_key_values=copy.deepcopy(cache), **GREEDY)
    model.generate(whole, past_key_values=cache, **GREEDY)


def test_a_reply_to_embeddings_is_compared(model):
    ids, _ = make_prompts(40)
    cache = KVCache(model.config, kvops.KeyDiff(24))
    said = model.generate(inputs_embeds=model.get_input_embeddings()(ids), past_key_values=cache, **GREEDY)
    whole = torch.cat((ids, said, ids[:, :9]), 1)
    whole[0, 44] = (whole[0, 44] + 1) % VOCAB
    with pytest.raises(ValueError, match="row 0 differs from token 44 on"):
        model.generate(whole, past_key_values=cache, **GREEDY)


# ---- models that go without their cache ----


def test_gradient_checkpointing_switches_the_cache_off(model):
    model.gradient_checkpointing_enable()
    model.train()
    ids, _ = make_prompts(40)
    cache = KVCache(model.config, kvops.KeyDiff(24))
    with pytest.raises(ValueError, match="train mode with gradient checkpointing.*model.eval()"):
        model.generate(ids, past_key_values=cache, **GREEDY)
    with compress(model, kvops.KeyDiff(24)):
        for call in (lambda: model.generate(ids, **GREEDY), lambda: model(ids)):
            with pytest.raises(ValueError, match="gradient checkpointing"):
                call()
        assert model(ids, use_cache=False).logits.shape[1] == 40
    if model.config._attn_implementation == "kvops":
        with pytest.raises(NotImplementedError, match="gradient checkpointing.*model.eval()"):
            model(ids, past_key_values=cache)
    model.eval()
    assert model.generate(ids, past_key_values=cache, **GREEDY).shape == (1, 48)


def test_prefix_tuning_brings_its_own_cache(model, monkeypatch):
    """PEFT puts a prefilled cache into the model's inputs as long as the cache of the call is empty."""
    plain = model.prepare_inputs_for_generation
    ids, _ = make_prompts(40)

    def prefixed(*args, **kwargs):
        inputs = plain(*args, **kwargs)
        if not inputs[CACHE].get_seq_length():
            inputs[CACHE] = DynamicCache(config=model.config)
        return inputs

    monkeypatch.setattr(model, "prepare_inputs_for_generation", prefixed)
    with pytest.raises(RuntimeError, match="prefix tuning"):
        model.generate(ids, past_key_values=KVCache(model.config, kvops.KeyDiff(24)), **GREEDY)
    with compress(model, kvops.KeyDiff(24)), pytest.raises(ValueError, match="prefix tuning"):
        model.generate(ids, **GREEDY)


def test_prompt_tuning_serves_one_prompt(model, monkeypatch):
    """PEFT puts virtual tokens before the prompt's embeddings."""
    plain, embed = model.prepare_inputs_for_generation, model.get_input_embeddings()
    ids, _ = make_prompts(40)

    def with_virtual_tokens(*args, **kwargs):
        inputs = plain(*args, **kwargs)
        if not inputs[CACHE].get_seq_length():
            inputs["inputs_embeds"] = embed(torch.cat((ids[:, :6], inputs.pop("input_ids")), 1))
        inputs.pop("position_ids", None)
        if (mask := inputs.get("attention_mask")) is not None:
            inputs["attention_mask"] = torch.cat((mask.new_ones(1, 6), mask), 1)
        return inputs

    monkeypatch.setattr(model, "prepare_inputs_for_generation", with_virtual_tokens)
    cache = KVCache(model.config, kvops.KeyDiff(400))
    said = model.generate(ids, past_key_values=cache, **GREEDY)
    monkeypatch.undo()
    expected = model.generate(torch.cat((ids[:, :6], ids), 1), **GREEDY)
    assert torch.equal(said[:, 40:], expected[:, 46:])
    with pytest.raises(ValueError, match="got one with 6 .prompt tuning"):
        model.generate(torch.cat((said, ids), 1), past_key_values=cache, **GREEDY)


def test_prompt_tuning_of_a_padded_batch_is_refused():
    """Its virtual tokens come before the pads."""
    model = make_model()
    plain, embed = model.prepare_inputs_for_generation, model.get_input_embeddings()
    ids, mask = make_prompts(20, 11)

    def with_virtual_tokens(*args, **kwargs):
        inputs = plain(*args, **kwargs)
        inputs["inputs_embeds"] = embed(torch.cat((ids[:, -6:], inputs.pop("input_ids")), 1))
        inputs["attention_mask"] = torch.cat((mask.new_ones(2, 6), inputs["attention_mask"]), 1)
        inputs.pop("position_ids", None)
        return inputs

    model.prepare_inputs_for_generation = with_virtual_tokens
    cache = KVCache(model.config, kvops.KeyDiff(24))
    with pytest.raises(RuntimeError, match="prompt tuning .* without padding"):
        model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)


def test_a_mask_of_four_dims_in_decode(model):
    ids, _ = make_prompts(40)
    cache = KVCache(model.config, kvops.KeyDiff(24))
    with torch.no_grad():
        model(ids, past_key_values=cache)
        for keys in (41, 25):
            with pytest.raises(NotImplementedError, match=r"pass the model a mask \[batch, tokens\], or none"):
                mask = torch.ones(1, 1, 1, keys, dtype=torch.bool)
                model(ids[:, :1], attention_mask=mask, past_key_values=copy.deepcopy(cache))
        model(ids[:, :1], past_key_values=cache)


# ---- what readers found ----


@pytest.mark.parametrize("value", [False, None, "config"])
def test_a_call_without_a_cache(model, value):
    ids, _ = make_prompts(40)
    options = {} if value == "config" else {"use_cache": value}
    model.generation_config.use_cache = value != "config"
    with pytest.raises(ValueError, match="expected use_cache=True, got (False|None)"):
        model.generate(ids, past_key_values=KVCache(model.config, kvops.KeyDiff(24)), **options, **GREEDY)
    with compress(model, kvops.KeyDiff(24)), pytest.raises(ValueError, match="expected use_cache=True"):
        model.generate(ids, **options, **GREEDY)


def test_a_model_without_evicting_layers_takes_further_turns():
    model = make_model("mistral", sliding_window=16)
    ids, mask = make_prompts(20, 11)
    more, _ = make_prompts(6, 6, seed=5)
    texts = []
    with pytest.warns(UserWarning, match="no full-attention layer"):
        evicting = KVCache(model.config, kvops.KeyDiff(24))
    for cache in (evicting, DynamicCache(config=model.config)):
        said = model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
        whole, every = torch.cat((said, more), 1), torch.cat((mask, torch.ones(2, 14, dtype=torch.long)), 1)
        texts.append(model.generate(whole, attention_mask=every, past_key_values=cache, **GREEDY))
    assert torch.equal(*texts)


def turn(model, cache, whole, new):
    """Generate from the last `new` tokens of a conversation, with a mask over all. Return the conversation with it."""
    said = model.generate(whole[:, -new:], attention_mask=torch.ones_like(whole), past_key_values=cache, **GREEDY)
    return torch.cat((whole, said[:, new:]), 1)


@pytest.mark.parametrize("how", ["a gap", "a crop", "beams"])
def test_the_tokens_of_new_ids_are_noted_where_they_are(model, how):
    """After tokens that only a forward has read, after a crop below the first known token, and with beams."""
    ids, _ = make_prompts(20)
    more, _ = make_prompts(6, seed=5)
    cache = KVCache(model.config, kvops.KeyDiff(400))
    if how == "a gap":
        whole = model.generate(ids, past_key_values=cache, **GREEDY)
        with torch.no_grad():
            model(torch.cat((whole[:, -1:], more), 1), past_key_values=cache)
        whole = turn(model, cache, torch.cat((whole, more, more[:, :3]), 1), 3)
    elif how == "a crop":
        with torch.no_grad():
            model(ids, past_key_values=cache)
        turn(model, cache, torch.cat((ids, more), 1), 6)
        cache.crop(15 - cache.get_seq_length())
        whole = turn(model, cache, torch.cat((ids[:, :15], more), 1), 6)
    else:
        beams = dict(num_beams=3, num_return_sequences=3)
        model.generate(ids, past_key_values=cache, **beams, **GREEDY)
        whole = torch.cat((cache.conversation.ids, more.expand(3, -1)), 1)
        cache.batch_select_indices(torch.tensor([0, 1, 2]))
        turn(model, cache, whole, 6)
        held = cache.conversation.ids
        assert held.shape == (3, cache.get_seq_length())
        fresh = KVCache(model.config, kvops.KeyDiff(400))
        with torch.no_grad():
            model(held, past_key_values=fresh)
        for old, new in zip(cache.evicting_layers, fresh.evicting_layers):
            torch.testing.assert_close(old.keys, new.keys, atol=1e-4, rtol=1e-4)
        return
    whole = torch.cat((whole, more), 1)
    expected = model.generate(whole, **GREEDY)
    assert torch.equal(model.generate(whole, past_key_values=copy.deepcopy(cache), **GREEDY), expected)
    assert torch.equal(turn(model, cache, whole, whole.shape[1] - cache.get_seq_length()), expected)


def test_a_crop_into_the_padding(model):
    ids, mask = make_prompts(20, 5)
    cache = KVCache(model.config, kvops.KeyDiff(400))
    said = model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
    cache.crop(10 - cache.get_seq_length())
    whole = torch.cat((said[:, :10], make_prompts(8, 8, seed=4)[0]), 1)
    every = torch.cat((mask[:, :10], torch.ones(2, 8, dtype=torch.long)), 1)
    with pytest.raises(ValueError, match=r"expected \[0, 15\], got \[0, 10\]"):  # the rest of the padding is missing
        model.generate(whole, attention_mask=every, past_key_values=cache, **GREEDY)
    cache.crop(-cache.get_seq_length())
    other, mask = make_prompts(13, 20, seed=6)  # of other padding
    expected = model.generate(other, attention_mask=mask, **GREEDY)
    assert torch.equal(model.generate(other, attention_mask=mask, past_key_values=cache, **GREEDY), expected)


def test_an_interrupted_forward(model):
    ids, _ = make_prompts(20)
    cache = KVCache(model.config, kvops.KeyDiff(400))

    def interrupt(*args):
        raise KeyboardInterrupt

    hook = model.model.layers[1].mlp.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, past_key_values=cache, **GREEDY)
    hook.remove()
    for call in (model.generate, model):
        with pytest.raises(RuntimeError, match="from 0 to 20, because a forward was interrupted; make a new KVCache"):
            call(make_prompts(30)[0], past_key_values=cache)


def test_prompts_for_other_rows_than_those_of_the_cache(model):
    ids, _ = make_prompts(40, 40)
    more, _ = make_prompts(50, 50, 50)
    cache = KVCache(model.config, kvops.KeyDiff(400))
    with torch.no_grad():
        model(ids, past_key_values=cache)
    before = held(cache)
    for rows, options in ((1, {}), (3, {}), (2, {"num_beams": 2}), (2, {"num_return_sequences": 2, "do_sample": True})):
        with pytest.raises(ValueError, match=f"a prompt for each of the 2 rows of this cache, got {rows}"):
            model.generate(more[:rows], past_key_values=cache, **{**GREEDY, **options})
    assert unchanged(cache, before)


def test_masks_of_other_numbers(model):
    ids, mask = make_prompts(40, 31)
    for other in (2 * mask, mask * 0.5, -mask):
        with pytest.raises(ValueError, match="of 0 and 1, got other numbers"):
            model.generate(
                ids, attention_mask=other, past_key_values=KVCache(model.config, kvops.KeyDiff(24)), **GREEDY
            )


def test_parts_in_train_mode_with_gradient_checkpointing(model):
    model.gradient_checkpointing_enable()
    model.eval().model.train()
    with pytest.raises(ValueError, match="gradient checkpointing"):
        model.generate(make_prompts(40)[0], past_key_values=KVCache(model.config, kvops.KeyDiff(24)), **GREEDY)
