"""Fixed shares of heads, measured on a model, and used by other policies."""

from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers")

import kvops  # noqa: E402
import kvops.hf  # noqa: E402
from test_hf import make_model, make_prompts  # noqa: E402
from test_hf_kvzip import POLICY  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
ADAPTIVE = replace(POLICY, head_mode="adaptive", scope="model")


def test_shares_are_the_mean_of_what_heads_keep(tmp_path):
    model = make_model(num_key_value_heads=2)
    texts, _ = make_prompts(60, 60, 60)
    shares = kvops.hf.head_shares(model, ADAPTIVE, texts)
    total = torch.zeros(3, 2, dtype=torch.float64)
    for row in texts:
        out = kvops.hf.generate(
            model, ADAPTIVE, row[None], max_new_tokens=1, do_sample=False, return_dict_in_generate=True
        )
        total += torch.stack([x.cache.lengths[0] for x in out.past_key_values.evicting_layers])
    torch.testing.assert_close(shares, (total / total.mean()).float())
    assert shares.shape == (3, 2) and shares.dtype == torch.float32 and shares.min() < 0.9 < 1.1 < shares.max()

    path = tmp_path / "shares.safetensors"
    kvops.save_shares(shares, path)
    with kvops.hf.compress(model, f"keydiff:budget=16,head_mode=adaptive,buffer=None,shares={path}") as compressed:
        ids, mask = make_prompts(50, 41)
        model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    caches = [x.cache for x in compressed.cache.evicting_layers]
    for cache, row in zip(caches, shares):
        assert (cache.lengths - 5 == torch.tensor([round(16 * x) for x in row.double().tolist()])).all()
    held = sum(x.lengths.double().mean().item() for x in caches) / 3
    assert abs(held - 5 - 16) < 1


def test_refusals():
    model, (ids, _) = make_model(), make_prompts(40)
    for policy in (POLICY, kvops.KeyDiff(8), kvops.KeyDiff(8, head_mode="adaptive", shares=torch.ones(3, 2))):
        with pytest.raises(ValueError, match="head_shares: policy must have head_mode='adaptive' and no shares, got"):
            kvops.hf.head_shares(model, policy, ids)
    for wrong in (ids[0], ids[:0], ids.float()):
        with pytest.raises(ValueError, match=r"head_shares: ids must be int64 \[b, n\], got"):
            kvops.hf.head_shares(model, ADAPTIVE, wrong)
    with pytest.raises(TypeError, match="head_shares: ids must be a torch.Tensor, got list"):
        kvops.hf.head_shares(model, ADAPTIVE, [1, 2])
    with pytest.raises(ValueError, match="head_shares: expected a budget of less than the 40 tokens, got KVzip"):
        kvops.hf.head_shares(model, replace(ADAPTIVE, budget=64), ids)
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model has run"))
    for policy in (kvops.KeyDiff(8, head_mode="adaptive", shares=torch.ones(2, 2)), "keydiff:budget=8,shares=none"):
        settings = dict(max_new_tokens=2, do_sample=False)
        with pytest.raises((ValueError, FileNotFoundError), match="KeyDiff: shares (must be of the 3 layers|need)"):
            kvops.hf.generate(model, policy, ids, **settings)
    with pytest.raises(FileNotFoundError, match="KeyDiff: shares must be the path of a file"):
        kvops.hf.generate(model, "keydiff:budget=8,head_mode=adaptive,shares=none", ids, **settings)
