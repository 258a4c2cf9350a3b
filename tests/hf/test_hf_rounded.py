"""`kvops.hf` with caches of rounded rows (storage="int8" and "fp8")."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402

import kit  # noqa: E402
import kvops  # noqa: E402
from kvops.hf import KVCache  # noqa: E402
from test_hf import make_model, make_prompts  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


every_storage = pytest.mark.parametrize("storage", ["int8", "fp8"])


def rounded(storage, x):
    if storage == "fp8":
        return x.to(torch.float8_e4m3fn).to(x.dtype)
    return kvops.dequantize_rows(*kvops.quantize_rows(x), x.dtype)


class Rounded(DynamicCache):
    """A full cache of rounded rows; the first step attends to its own tokens before they are rounded."""

    def __init__(self, storage):
        super().__init__()
        self.storage = storage

    def update(self, keys, values, layer, *args, **kwargs):
        first = self.get_seq_length(layer) == 0
        back = [rounded(self.storage, x) for x in (keys, values)]
        stored = super().update(*back, layer, *args, **kwargs)
        return (keys, values) if first else stored


@every_storage
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_full_cache_is_a_rounded_one(dtype, storage):
    """Queries are rounded to bf16 on the way, which float32 shows."""
    model = make_model().to(dtype)
    ids, _ = make_prompts(40)
    with torch.no_grad():
        want, cache = [], Rounded(storage)
        for part in (ids[:, :32], ids[:, 32:36], *ids[:, 36:].split(1, 1)):
            want.append(model(part, past_key_values=cache).logits)
        kvops.hf.use_attention(model)
        cache = KVCache(model.config, kvops.Full(), storage=storage)
        for part, expected in zip((ids[:, :32], ids[:, 32:36], *ids[:, 36:].split(1, 1)), want):
            found = model(part, past_key_values=cache).logits
            exact = part.shape[1] == 32 and dtype == torch.float32
            tolerance = 1e-4 if exact else 2e-2
            torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance * 8)
    layer = cache.layers[0].cache
    assert layer.k.dtype == dtype and all(x.dtype in (torch.int8, torch.uint8) for x in layer.storage_tensors)


@every_storage
@pytest.mark.parametrize(
    "policy",
    [
        kvops.SnapKV(24, window=8),
        kvops.KeyDiff(24, buffer=4),
        kvops.H2O(24),
        kvops.LAQ(24, steps=4),
        kvops.KVzip(24, instruction=(5, 6), suffix=(7,), next_instruction=(5,)),
        kvops.KeyDiff(24, head_mode="adaptive", recent=4),
    ],
    ids=str,
)
def test_policies(policy, storage):
    """A padded batch: as many tokens are kept, in about half of the bytes, and the model says nearly the same."""
    model = make_model(head_dim=64).bfloat16()
    ids, mask = make_prompts(60, 45)
    found = {}
    for kind in ("pre_rope", storage):
        with kvops.hf.compress(model, policy, storage=kind) as compressed:
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=8, do_sample=False, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
        found[kind] = out.logits, compressed.cache.stats(), out.sequences
    (logits, stats, _), (other, narrow, text) = found["pre_rope"], found[storage]
    for mine, theirs in zip(narrow, stats):
        assert mine.tokens_kept == theirs.tokens_kept and mine.bytes_full == theirs.bytes_full
        assert mine.bytes_kept < 0.7 * theirs.bytes_kept
    torch.testing.assert_close(logits[0].float(), other[0].float(), rtol=0, atol=0.15)
    options = dict(attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert torch.equal(kvops.hf.generate(model, policy, ids, storage=storage, **options), text)


@every_storage
def test_errors(storage):
    model = make_model()
    with kit.refuses(f"KVCache: storage='{storage}' is read by the library's attention, which this model does not use"):
        KVCache(model.config, kvops.Full(), storage=storage)
    with kit.refuses(f"storage='{storage}' expected a policy that keeps K and V as they are, got LaCache"):
        with kvops.hf.compress(model, kvops.LaCache(24), storage=storage):
            pass
    with kit.refuses("Cache: storage must be one of 'pre_rope', 'post_rope', 'int8', 'fp8', got 'int4'"):
        kvops.hf.use_attention(model)
        KVCache(model.config, kvops.Full(), storage="int4")
