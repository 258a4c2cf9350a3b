"""Generate with a Hugging Face model whose KV cache keeps a quarter of the tokens.

`kvops.hf.compress` gives every `generate` call in the block a cache that evicts. The model itself is not changed.
"""

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvops.hf
from kvops import demo


def main() -> str:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(demo.MODEL), AutoTokenizer.from_pretrained(demo.MODEL)
    text = demo.TEXT.read_text()
    prompt = f"{text[:400]} The pass key is 58291740. Remember it. {text[400:1900]}"
    inputs = tokenizer(f"{prompt} What is the pass key? The pass key is ", return_tensors="pt")

    with kvops.hf.compress(model, kvops.KeyDiff(budget=0.25)) as compressed:
        out = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
    print("answer:", answer)
    print(compressed.stats())
    return answer


if __name__ == "__main__":
    main()
