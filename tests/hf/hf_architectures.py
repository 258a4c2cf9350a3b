"""A tiny random model of every causal language model in transformers, with the features that matter to a KV cache:
sliding windows, shared keys, latent attention, sinks, ALiBi, recurrent layers. Also generates docs/architectures.md."""

from __future__ import annotations

import argparse
import dataclasses
import warnings
from pathlib import Path

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

import kvops
from kvops.hf import EvictingLayer, KVCache, model_rope, output_weights
from kvops.hf.architectures import ARCHITECTURES

VOCAB = 101
LAYERS = 4

# A config gets those of these settings that its class has.
TINY = {
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "is_decoder": True,
    "max_position_embeddings": 512,
    # wide enough that attention matters: evicted tokens change the logits
    "hidden_size": 64,
    "intermediate_size": 96,
    "initializer_range": 0.15,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 16,
    # GPT-2's names, and those of encoders and decoders
    "n_embd": 64,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": 512,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "ffn_dim": 96,
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # latent and sparse attention
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 16,
    # recurrent layers
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}

# Further settings by type; other types need none. "falcon:alibi" is a variant of "falcon".
FULL = {"sliding_window": None}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2}
LATENT = {"num_key_value_heads": 4}
MAMBA = {"layer_types": ["mamba", "attention"] * 2}
LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
CONV = {"layer_types": ["conv", "full_attention"] * 2}
SETTINGS = {
    "afmoe": MIXED,
    "axk1": LATENT,
    "axk2": LATENT,
    "bailing_hybrid": {**LATENT, **LINEAR, "first_k_dense_replace": 0, "linear_head_dim": 16},
    "bamba": {"attn_layer_indices": [1, 3]},
    "beam": MIXED,
    "codegen": {"rotary_dim": 8},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {**MIXED, "logit_scale": 1.0},
    "cohere2_moe": {**MIXED, "logit_scale": 1.0},
    "cohere_compass_text": {
        **MIXED,
        "logit_scale": 1.0,
        "rope_parameters": {x: {"rope_type": "default", "rope_theta": 1e4} for x in MIXED["layer_types"]},
    },
    "cpmant": {"dim_head": 16, "dim_ff": 96, "prompt_length": 4},
    "ctrl": {"dff": 96},
    "cwm": MIXED,
    "dbrx": {
        "n_heads": 4,
        "n_layers": LAYERS,
        "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "doge": {**FULL, "keep_window_size": 512},
    "dots1": {**MIXED, "n_shared_experts": 1},
    "exaone4": MIXED,
    "exaone4:full": {**FULL, "layer_types": ["full_attention"] * LAYERS},
    "exaone_moe": MIXED,
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
    "falcon:alibi": {"new_decoder_architecture": False, "multi_query": True, "alibi": True},
    "falcon_h1": {"mamba_d_ssm": 128},
    "flint": MIXED,
    "gemma2": {**MIXED, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 16},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 6,
        "intermediate_size": [96] * 6,
    },
    "gemma4_text": {
        **MIXED,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 16,
    },
    "gemma4_unified_text": {**MIXED, "global_head_dim": 32},
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "num_heads": 4, "window_size": 16},
    "gpt_oss": MIXED,
    "gptj": {"rotary_dim": 8},
    "granite": {"attention_multiplier": 0.25},
    "granite_swa": MIXED,
    "granitemoe": {"attention_multiplier": 0.25},
    "granitemoe_swa": MIXED,
    "granitemoehybrid": {**MAMBA, "attention_multiplier": 0.25, "shared_intermediate_size": 32},
    "inkling2_text": {"unpadded_vocab_size": VOCAB, "swa_head_dim": 16, "rel_extent": 16},
    "inkling_text": {"swa_head_dim": 16, "rel_extent": 16, "logits_mup_width_multiplier": 1.0},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_conv": 4,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    "kimi_linear": {**LATENT, **LINEAR, "linear_head_dim": 16, "linear_num_heads": 4},
    "kolibri1": MIXED,
    "laguna": MIXED,
    "lfm2": CONV,
    "lfm2_moe": CONV,
    "lfm3": CONV,
    "llama4_text": {"attention_chunk_size": 16, "no_rope_layers": [1, 0, 1, 0], "intermediate_size_mlp": 96},
    "longcat_flash": {
        "num_layers": 2,
        "num_key_value_heads": 4,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "head_dim": 8,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16},
    "mellum": MIXED,
    "minicpm3": LATENT,
    "minimax": LINEAR,
    "minimax_m3_vl_text": {
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 32,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "ministral": MIXED,
    "ministral3": FULL,
    "mistral": FULL,
    "mistral:window": {},
    "mixtral": FULL,
    "mpt": {"n_layers": 4, "n_heads": 4, "max_seq_len": 512},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "moe_shared_expert_intermediate_size": 32,
        "use_mamba_kernels": False,
    },
    "olmo3": MIXED,
    "olmo_hybrid": LINEAR,
    "opt": {"word_embed_proj_dim": 64, "init_std": 0.15},
    "phi3": FULL,
    "phimoe": FULL,
    "qwen2:window": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3_5_moe_text": LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR,
    "roc_bert": {
        "enable_pronunciation": False,
        "enable_shape": False,
        "pronunciation_vocab_size": 10,
        "shape_vocab_size": 10,
    },
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "starcoder2": FULL,
    "trocr": {"init_std": 0.15},
    "vaultgemma": {**MIXED, "query_pre_attn_scalar": 16},
    "xglm": {"num_layers": 4, "attention_heads": 4, "init_std": 0.15},
    "xlm": {"emb_dim": 64, "n_layers": 4, "n_heads": 4, "causal": True, "embed_init_std": 0.15},
    "xlnet": {"d_inner": 96},
    "xmod": {"default_language": "en_XX"},
    "youtu": LATENT,
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "chunk_size": 16,
        "use_mamba_kernels": False,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}


def model_type(name: str) -> str:
    return name.partition(":")[0]


def tiny_config(name: str) -> PreTrainedConfig:
    config = CONFIG_MAPPING[model_type(name)]
    fields = {x.name for x in dataclasses.fields(config)}
    return config(**{name: x for name, x in TINY.items() if name in fields} | SETTINGS.get(name, {}))


def tiny_model(name: str, attention: str | None = None) -> PreTrainedModel:
    """Build a tiny model. attention: the name of its attention in transformers; None: transformers' default."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(name), attn_implementation=attention).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name.endswith("sinks"):
                x.normal_()
            elif "norm" in name and x.dim() == 1 and (x == x[0]).all():
                x.add_(0.1 * torch.randn_like(x))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


# Types whose attention receives no positions, which a rotation to the slots needs.
NO_POSITIONS = ("persimmon",)

# Types whose code in older versions of transformers does not support what the table says, and the first of the versions
# 5.5, 5.8, 5.12, 5.15, 5.23 and 5.24 that does. With earlier versions their models raise, by themselves or in kvops.hf:
# they compute their attention themselves, pass it no positions, have their own caches or masks, or cannot read a chunk.
SINCE = {
    **dict.fromkeys("big_bird glm_moe_dsa megatron-bert rembert roformer".split(), "5.12"),
    **dict.fromkeys("ctrl dbrx lfm2 lfm2_moe nemotron olmo_hybrid phimoe recurrent_gemma zamba".split(), "5.15"),
    "gemma4_unified_text": "5.15",
    **dict.fromkeys(("ministral3", "moshi"), "5.23"),  # Moshi: sdpa and eager differ
    **dict.fromkeys(("codegen", "gptj"), "5.24"),
}

# Types without a tiny model here, and why. Nothing is known about them except their text model's row.
_WRAPPER = "a multimodal model; its text model has its own type"
_LARGE = "its config has no settings that make it small"
UNMADE = {
    **dict.fromkeys(
        """dots3_note emu3 fuyu gemma3 gemma3n gemma4 gemma4_unified got_ocr2 llama4 mllama moss_transcribe_diarize
        musicgen musicgen_melody qwen3_5 qwen3_5_moe qwen4_exp""".split(),
        _WRAPPER,
    ),
    **dict.fromkeys("blt dots3_note_text git phi4_multimodal qwen4_exp_text".split(), _LARGE),
    **dict.fromkeys("gemma4_assistant gemma4_unified_assistant".split(), "a draft model that reads another's cache"),
    "reformer": "it keeps buckets of hashes, not a cache",
    "xlstm": "it has no attention",
}


def row(name: str) -> str:
    """Return the row of the table that a variant belongs to."""
    return name if name in ARCHITECTURES else model_type(name)


def names() -> list[str]:
    """Return all rows of the table, and the variants."""
    return sorted({*ARCHITECTURES, *SETTINGS})


# ---- docs/architectures.md ----

HEAD = """# Architectures

<!-- `python tests/hf/hf_architectures.py` writes this page. -->

This page lists the models that [`kvops.hf`](huggingface.md) supports, by the type of the text model
(`model.config.get_text_config().model_type`).

The tests check each row with a tiny random model of that type. The model reads a prompt, a chunk and single tokens with
KeyDiff, H2O and StreamingLLM, and for some types with all families of methods. The reference is the same model with its
whole cache and a mask that hides what each layer and head had evicted. The logits agree to 1e-4, and H2O keeps the
tokens that the model's own attention weights select.

Unsupported combinations raise, with the reason from the row. Types without a row, and config classes from outside
transformers, are untested: a `KVCache` warns once. Layers that do not evict keep the class that transformers gives
them.

- **every method**: with `use_attention`, methods with slot positions included.
- **every method, original positions**: `LaCache` and `StreamingLLM` need `positions="original"`. Where all layers
  rotate their keys the same way at every position, your own `rope=` works too. `ExpectedAttention` and `TriAttention`
  need `statistics=` of your own if `model_rope` raises.
- **CriticalKV and DefensiveKV with `w_o` of your own**: `output_weights` does not find the output projections.
- **without `needs.inputs`**: policies that read [hidden states](porting_a_press.md), KVzip+ among them, raise.
- **methods without queries**: a `KVCache` works with the attention of transformers. `use_attention` raises, so
  [the methods that need it](huggingface.md#what-is-refused-and-why) are not available.

The page describes the newest transformers that the tests run with. With older versions, [these types](#since) may
raise.

| type | layers that evict | supported |
|---|---|---|
"""
NEWER = """
## Since

The table applies to transformers 5.5 or newer, except for these types. With versions older than listed here, their
models raise, by themselves or in `kvops.hf`.

| type | since transformers |
|---|---|
"""
UNTRIED = """
## Untested

| type | why |
|---|---|
"""
OTHERS = {
    "DynamicSlidingWindowLayer": "sliding",
    "LinearAttentionLayer": "recurrent",
    "LinearAttentionAndFullAttentionLayer": "recurrent with attention",
    "LinearAttentionAndSlidingWindowAttentionLayer": "recurrent with attention",
    "DynamicIndexedLayer": "indexed",
    "DeepseekV4HCACache": "compressed",
    "DeepseekV4CSACache": "compressed",
    "DummyLayer": "without keys",
}


def evicting(config: PreTrainedConfig) -> str:
    """Describe which layers evict."""
    MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # imports the model's code, which may define its own cache layers
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "KVCache: this model has no full-attention layer")
        layers = KVCache(config, kvops.Full()).layers
    others = sorted({OTHERS[type(x).__name__] for x in layers if not isinstance(x, EvictingLayer)})
    if not any(isinstance(x, EvictingLayer) for x in layers):
        return f"none ({', '.join(others)})"
    return f"all but {', '.join(others)}" if others else "all"


def turns(name: str) -> bool:
    """Return whether slot positions are supported."""
    config = tiny_config(name)
    try:
        model_rope(config)
    except ValueError:
        return False
    return model_type(name) not in NO_POSITIONS and not getattr(config, "num_kv_shared_layers", 0)


#: Models whose attention modules have no place in the cache of their own: a policy with `needs.inputs` raises.
NO_INPUTS = ("ctrl", "hrm_text")


def has_output_weights(model: PreTrainedModel) -> bool:
    """Return whether the output projections, which policies with `w_o` need, are found."""
    try:
        output_weights(model)
    except ValueError:
        return False
    return True


def page() -> str:
    rows = []
    for name in sorted(ARCHITECTURES):
        served, config = ARCHITECTURES[name], tiny_config(name)
        if served.cache:
            layers, what = "", f"no: {served.cache}"
        elif served.attention:
            layers, what = evicting(config), f"methods without queries: {served.attention}"
        else:
            layers, what = evicting(config), "every method" + ("" if turns(name) else ", original positions")
            if not layers.startswith("none") and not has_output_weights(tiny_model(name)):
                what += ", CriticalKV and DefensiveKV with `w_o` of your own"
            what += ", without `needs.inputs`" if model_type(name) in NO_INPUTS else ""
        if layers.startswith("none"):
            what = "nothing is evicted, with a warning" + (
                f"; not `use_attention`: {served.attention}" if served.attention else ""
            )
        rows.append(f"| {name} | {layers} | {what} |\n")
    untried = [f"| {name} | {why} |\n" for name, why in sorted(UNMADE.items())]
    newer = [f"| {name} | {since} |\n" for name, since in sorted(SINCE.items())]
    return HEAD + "".join(rows) + NEWER + "".join(newer) + UNTRIED + "".join(untried)


if __name__ == "__main__":
    argparse.ArgumentParser(description="Writes docs/architectures.md, from the repository's root.").parse_args()
    Path("docs/architectures.md").write_text(page())
