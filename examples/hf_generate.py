"""Generate with a Hugging Face model whose KV cache keeps a quarter of the tokens.

`kvops.hf.compress` gives every `generate` call in the block a cache that evicts. The model itself is not changed.
"""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvops.hf

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "bench/models/passkey-llama"  # 2.4 million parameters, trained to find digits in a text


def main() -> str:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(FOLDER), AutoTokenizer.from_pretrained(FOLDER)
    text = (ROOT / "bench/data/haystack.txt").read_text()
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
