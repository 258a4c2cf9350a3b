"""Byte-level tokenizer without merges: id = byte value; 256 <bos>, 257 <eos>, 258 <pad>, 259 <unk>.

<bos> is prepended to every encoded text (add_special_tokens=True)."""

import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


def bytes_to_unicode():
    """The GPT-2 byte -> printable character table."""
    bs = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, n = {b: chr(b) for b in bs}, 0
    for b in range(256):
        if b not in table:
            table[b] = chr(256 + n)
            n += 1
    return table


def build():
    vocab = {c: b for b, c in bytes_to_unicode().items()}
    special = ["<bos>", "<eos>", "<pad>", "<unk>"]
    vocab.update({s: 256 + i for i, s in enumerate(special)})
    tok = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens(special)
    tok.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 256)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tok,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


if __name__ == "__main__":
    build().save_pretrained(sys.argv[1] if len(sys.argv) > 1 else ".")
