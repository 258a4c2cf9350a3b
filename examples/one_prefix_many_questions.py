"""Compress a document once, then ask several questions about it.

The questions are unknown when the cache is compressed, so the policy must not depend on the prompt's last queries.
KeyDiff scores keys alone. `freeze` stops eviction, `crop` removes a question and its answer again.
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvops.hf
from kvops import demo


def main() -> list[str]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(demo.MODEL), AutoTokenizer.from_pretrained(demo.MODEL)
    text = demo.TEXT.read_text()
    document = f"{text[:400]} The pass key is 58291740. Remember it. {text[400:1900]}"
    questions = [" What is the pass key? The pass key is ", " What is the pass key? The pass key is 5829"]

    cache = kvops.hf.KVCache(model.config, kvops.KeyDiff(512))
    with torch.no_grad():
        model(**tokenizer(document, return_tensors="pt"), past_key_values=cache)
    cache.freeze()
    read = cache.get_seq_length()

    answers = []
    for question in questions:
        inputs = tokenizer(document + question, return_tensors="pt")  # only the question is computed
        out = model.generate(**inputs, past_key_values=cache, max_new_tokens=4, do_sample=False)
        answers.append(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :]))
        cache.crop(read - cache.get_seq_length())
        print(repr(question[-12:]), "->", answers[-1])
    print(f"{cache.stats()[0].tokens_kept} of {read} tokens held per head")
    return answers


if __name__ == "__main__":
    main()
