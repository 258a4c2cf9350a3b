"""kvops.hf: a `KVCache` that has seen a prompt continues it, and refuses another one."""

import copy
import inspect

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache, GenerationMixin  # noqa: E402

import kvops  # noqa: E402
from kvops.hf import KVCache, compress, use_attention  # noqa: E402
from test_hf import make_model, make_prompts  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
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


def test_beams_go_on(model):
    ids, _ = make_prompts(40)
    cache = KVCache(model.config, kvops.KeyDiff(24))
    said = model.generate(ids, past_key_values=cache, num_beams=2, num_return_sequences=2, **GREEDY)
    more, _ = make_prompts(9, 9, seed=3)
    assert model.generate(torch.cat((said, more), 1), past_key_values=cache, **GREEDY).shape == (2, 65)


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
