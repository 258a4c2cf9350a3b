"""The text that the model trains on, and its tokenizer.

Text: Python sources (the standard library, and the packages that the training needs anyway), the licences in
/usr/share/common-licenses, and the manual pages of the machine, if it has any. ASCII files only. One file in ten is held
out, by the rule of ../passkey-llama/passkey_task.py, so bench/data/haystack.txt is held out here too.

Tokens: a byte-level BPE, trained on an eighth of the text. A digit is one token, as in Qwen.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

sys.path.append(str(Path(__file__).resolve().parent.parent / "passkey-llama"))

from passkey_task import LICENSES, ascii_files, plain_files, python_files  # noqa: E402

PACKAGES = ("numpy", "sympy", "torch", "transformers")
MANUAL = "/usr/share/man"
SPECIAL = ("<bos>", "<eos>", "<pad>", "<unk>")
BOS, EOS, PAD, UNK = range(4)
VOCAB = 2048


def files(split: str) -> list[str]:
    """Return the files of a split, "train" or "heldout"."""
    stdlib = sysconfig.get_path("stdlib")
    chunks = ascii_files(stdlib, python_files(stdlib), split)
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None, f"{name} is not installed"
        root = os.path.dirname(spec.origin)
        # transformers' models are copies of each other
        chunks += ascii_files(root, python_files(root, skip={"models"}), split)
    chunks += ascii_files(LICENSES, plain_files(LICENSES), split)
    pages = [x for n in range(1, 9) for x in plain_files(f"{MANUAL}/man{n}")]
    pages = [x for x in pages if "gcloud" not in x]  # thousands of similar pages, where they are installed
    return [x.tobytes().decode() for x in chunks] + [
        prose(x.tobytes().decode()) for x in ascii_files(MANUAL, pages, split)
    ]


def prose(page: str) -> str:
    """Return the text of a manual page without most of its markup."""
    lines = [x for x in page.splitlines() if not x.startswith(("'", ".\\")) and not re.match(r"\.[a-z]", x)]
    text = re.sub(r"^\.[A-Z]+ ?", "", "\n".join(lines), flags=re.M)
    text = re.sub(r"\\f(\[\w*\]|\(..|.)|\\s[+-]?\d|\\[&/,|^%]", "", text)
    return text.replace("\\-", "-").replace("\\(aq", "'").replace("\\e", "\\").replace("\\ ", " ")


def build_tokenizer(texts: list[str], vocab: int = VOCAB) -> Tokenizer:
    """Train the tokenizer. The same texts give the same tokenizer."""
    tok = Tokenizer(models.BPE(unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tok.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    return tok


def save_tokenizer(tok: Tokenizer, folder: Path, longest: int) -> None:
    """Write the tokenizer so that transformers 4 and 5 load it."""
    PreTrainedTokenizerFast(
        tokenizer_object=tok,
        **{f"{x[1:-1]}_token": x for x in SPECIAL},
        clean_up_tokenization_spaces=False,
        model_max_length=longest,
    ).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("backend", None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2, sort_keys=True))


def encode(tok: Tokenizer, texts: list[str]) -> np.ndarray:
    """Return the tokens of all texts, uint16 [any]. "<bos>" in a text is text."""
    tok.encode_special_tokens = True
    found = [tok.encode_batch_fast(texts[i : i + 64], add_special_tokens=False) for i in range(0, len(texts), 64)]
    return np.concatenate([np.array(x.ids, dtype=np.uint16) for batch in found for x in batch])


class Text:
    """The tokens of a split, and which of them start a word.

    Args:
        tok: the tokenizer.
        ids: [any].
    """

    def __init__(self, tok: Tokenizer, ids: np.ndarray):
        self.tok = tok
        self.ids = ids
        starts = [i for word, i in tok.get_vocab().items() if word[0] in "ĠĊ"]
        self.starts_word = np.isin(np.arange(tok.get_vocab_size()), starts)

    def slice(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Return a random piece, int64 [count]."""
        begin = int(rng.integers(0, len(self.ids) - count + 1))
        return self.ids[begin : begin + count].astype(np.int64)


def load(folder: Path, vocab: int = VOCAB) -> tuple[Text, Text]:
    """Return the text of both splits. The first call tokenizes it, in minutes, and keeps the result in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    words, kept = folder / "tokenizer.json", folder / "text.npz"
    if not kept.exists():
        train = files("train")
        tok = build_tokenizer(train[::8], vocab)
        tok.save(str(words))
        partial = folder / "text.partial.npz"
        np.savez(partial, train=encode(tok, train), heldout=encode(tok, files("heldout")))
        os.replace(partial, kept)  # whole or not at all
    tok = Tokenizer.from_file(str(words))
    tok.encode_special_tokens = True
    with np.load(kept) as arrays:
        return Text(tok, arrays["train"]), Text(tok, arrays["heldout"])
