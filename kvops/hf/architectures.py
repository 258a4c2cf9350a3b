"""Which models of transformers `kvops.hf` supports, by the type of their text model (`config.model_type`).

tests/hf/test_hf_architectures.py checks each row with a tiny model of that type: its logits with a cache that evicts
must equal its logits with a mask that hides the evicted tokens. A type without a row is untested. docs/architectures.md
is generated from this table.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

from transformers import PreTrainedConfig


class Architecture(NamedTuple):
    """Why a type of model is not supported; None where it is."""

    cache: str | None = None  # by KVCache
    attention: str | None = None  # by use_attention, which only some methods need


_ALIBI = "it computes ALiBi distances from the number of cached slots, so eviction would move the kept tokens closer"
_LOCAL = "its local layers count cached slots, so eviction would widen their window"
_ENCODER = "encoder-decoder models need two caches"
_NO_CACHE = "it has no cache, or its own kind of cache"
_BIASES = "its position biases expect a cache that holds every token"
_CROSS = "its cross-attention layers keep the image's keys in the same cache"
_HEADS = "it pairs the keys of one head with the values of another, so heads cannot keep different tokens"
_BLOCKS = "its sparse attention counts blocks of cached slots, so eviction would move the kept tokens to other blocks"

_ITSELF = "it computes its attention itself, without the AttentionInterface of transformers"
_LATENT = "it computes keys and values from cached latents, so a method never sees the keys that its queries meet"
_CHANGED = "it changes keys or values after the cache, so a method never sees the keys that its queries meet"
_SPARSE = "an indexer selects the tokens that its attention reads"
_BIAS = "it adds a position bias to the logits"

_TABLE: dict[Architecture, str] = {
    Architecture(): """
        afmoe apertus arcee aria_text bamba beam bert bert-generation biogpt bitnet camembert codegen cohere cohere2
        cohere2_moe cohere_compass_text ctrl cwm data2vec-text dbrx dots1 electra ernie ernie4_5 ernie4_5_moe exaone4
        exaone_moe falcon_h1 falcon_mamba flex_olmo flint gemma gemma2 gemma3_text gemma3n_text gemma4_text
        gemma4_unified_text glm glm4 glm4_moe gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite granite_swa
        granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe
        hy_v3 hyperclovax internlm3 iquestcoder jais2 jamba kolibri1 laguna lfm2 lfm2_moe lfm3 llama llama4_text mamba
        mamba2 mellum mimo_v2_flash minimax_m2 ministral ministral3 mistral mixtral modernbert-decoder moshi nanochat
        nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3
        qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next recurrent_gemma roberta roberta-prelayernorm roc_bert
        seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma xlm-roberta xlm-roberta-xl xmod zamba zamba2 zaya
        """,
    Architecture(attention=_ITSELF): """
        big_bird falcon gpt_neox_japanese megatron-bert rembert roformer trocr xglm
        """,
    Architecture(attention=_LATENT): """
        axk1 bailing_hybrid deepseek_v2 deepseek_v3 glm4_moe_lite kimi_linear longcat_flash minicpm3 youtu
        """,
    Architecture(attention=_CHANGED): "deepseek_v4 doge jetmoe",
    Architecture(attention=_SPARSE): "axk2 deepseek_v32 glm_moe_dsa hy_v4",
    Architecture(attention=_BIAS): "inkling2_text inkling_text",
    Architecture(_ALIBI, _ITSELF): "bloom falcon:alibi mpt",
    Architecture(_LOCAL, _ITSELF): "gpt_neo",
    Architecture(_BLOCKS, _SPARSE): "minimax_m3_vl_text",
    Architecture(_HEADS, _CHANGED): "diffllama",
    Architecture(_NO_CACHE, _ITSELF): "openai-gpt rwkv xlm xlnet",
    Architecture(_BIASES, _ITSELF): "cpmant",
    Architecture(_NO_CACHE): "minimax",
    Architecture(_CROSS): "mllama_text_model",
    Architecture(_ENCODER): """
        bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet whisper
        """,
}
ARCHITECTURES = {name: served for served, names in _TABLE.items() for name in names.split()}


def name_of(config: PreTrainedConfig) -> str:
    """Return the name of a text model's row: its type, or "falcon:alibi"."""
    return config.model_type + (":alibi" if config.model_type == "falcon" and config.alibi else "")


_warned: set[type] = set()


def lookup(text: PreTrainedConfig) -> Architecture:
    """Return what is known about a text model. Warn once per config class if it is untested."""
    known = ARCHITECTURES.get(name_of(text))
    if known is not None and type(text).__module__.startswith("transformers."):
        return known
    if type(text) not in _warned:
        _warned.add(type(text))
        warnings.warn(
            f"kvops.hf is untested with the model of {type(text).__name__} (type {text.model_type!r}): first compare "
            "the text it generates with kvops.Full() and with a cache of transformers",
            stacklevel=4,
        )
    return Architecture()
