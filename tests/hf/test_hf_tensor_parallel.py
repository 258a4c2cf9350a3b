"""kvops.hf on models that transformers shards over ranks (tp_plan), compared with one process."""

import os
import warnings

import pytest
import torch

pytest.importorskip("transformers")
if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("torch without gloo", allow_module_level=True)

from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.integrations import accelerate  # noqa: E402

import kit  # noqa: E402
import kvops.hf  # noqa: E402
from test_distributed import on_ranks  # noqa: E402
from test_hf import generate, make_model, make_prompts  # noqa: E402

TOKENS = 16
SERVED = {
    "keydiff": kvops.KeyDiff(20, sinks=2, recent=4),
    "lagkv": kvops.LagKV(lag=8, ratio=0.5, sinks=2),
    "snapkv": kvops.SnapKV(20, window=6),
    "criticalkv": kvops.CriticalKV(20, window=6),
    "defensivekv": kvops.DefensiveKV(20, window=6),
    "h2o": kvops.H2O(20),
    "expected attention": kvops.ExpectedAttention(20, sinks=2, recent=4, statistics="prompt"),
    "protokv": kvops.ProtoKV(24, window=6),
    "streaming": kvops.StreamingLLM(20),  # keys are rotated to their slots
    "laq": kvops.LAQ(20, window=4),
}
REFUSED = {
    "shared": kvops.KeyDiff(20, head_mode="shared"),
    "lagkv": kvops.LagKV(lag=8, sinks=2, head_mode="shared"),
    "tova": kvops.TOVA(20),
    "chunkkv": kvops.ChunkKV(20, window=6),
    "random": kvops.Random(20),
}


def load(folder: str, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # tp_plan will become part of a DistributedConfig
        return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def run(model, policy, ids, mask):
    """Return tokens, logits and the cache."""
    with kvops.hf.compress(model, policy) as compressed:
        return *generate(model, None, ids, mask, TOKENS), compressed.cache


def check_output_weights(one, model, rank: int, ranks: int) -> None:
    """Each rank has the columns of its heads, of projections that have hooks too."""
    expected = [x.chunk(ranks, 1)[rank] for x in kvops.hf.output_weights(one)]
    for found, x in zip(kvops.hf.output_weights(model), expected):
        assert torch.equal(found, x)
    double = [layer.self_attn.o_proj.register_forward_hook(lambda *x: 2 * x[2]) for layer in model.model.layers]
    for found, x in zip(kvops.hf.output_weights(model), expected):
        torch.testing.assert_close(found, 2 * x)
    for hook in double:
        hook.remove()


def check_generate(rank: int, ranks: int, folder: str) -> None:
    """Check the tokens and logits of every policy, and what each rank keeps."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))  # as torchrun does
    accelerate.is_accelerate_available = lambda: True  # transformers checks for it to read devices, and does not use it
    one, model = load(folder), load(folder, tp_plan="auto")
    assert model.tp_size == ranks and one.config.num_key_value_heads == model.config.num_key_value_heads == 4
    check_output_weights(one, model, rank, ranks)
    ids, mask = make_prompts(60, 43)
    own = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)  # heads
    for name, policy in SERVED.items():
        tokens, logits, expected = run(one, policy, ids, mask)
        found = run(model, policy, ids, mask)
        assert torch.equal(found[0], tokens), name
        torch.testing.assert_close(found[1], logits, atol=1e-4, rtol=1e-4)
        for mine, all_heads in zip(found[2].evicting_layers, expected.evicting_layers):
            assert len(mine.cache) < 60
            torch.testing.assert_close(mine.keys, all_heads.keys[:, own], atol=1e-4, rtol=1e-4)
    for policy in REFUSED.values():
        with kit.refuses(r"uses all KV heads", f"expected 4 heads, got {4 // ranks}", kind=NotImplementedError):
            run(model, policy, ids, mask)
        run(one, policy, ids, mask)  # each rank has the whole model


def test_generate(tmp_path):
    folder = tmp_path / "model"
    make_model(num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=2).save_pretrained(folder)
    on_ranks(2, check_generate, tmp_path, str(folder))
