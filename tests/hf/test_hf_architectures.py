"""Every causal language model in transformers, as a tiny random model, with a cache of each family of methods, compared
with a masked replay (`hf_replay`); and the table of supported models."""

import contextlib
import dataclasses
import functools
import re
import warnings
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from packaging.version import Version  # noqa: E402
from transformers import CONFIG_MAPPING, LlamaConfig  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

import hf_architectures as tiny  # noqa: E402
import kit  # noqa: E402
import kvops  # noqa: E402
import kvops.hf  # noqa: E402
from hf_replay import Replay, SlotReplay  # noqa: E402
from kvops.hf import EvictingLayer, KVCache, for_model, use_attention  # noqa: E402
from kvops.hf.architectures import ARCHITECTURES  # noqa: E402
from test_hf_inputs import SEEN, Recorder  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]

STEPS = (40, 3, 1, 1, 1)  # a prompt, a chunk, and single tokens
IDS = torch.randint(2, tiny.VOCAB, (2, sum(STEPS)), generator=torch.Generator().manual_seed(1)).split(STEPS, 1)


def inputs_of(step: int) -> dict:
    """Return what `generate` passes with the ids of a step."""
    end = sum(STEPS[: step + 1])
    mask = torch.ones(2, end, dtype=torch.int64)
    return {"attention_mask": mask, "position_ids": torch.arange(end - STEPS[step], end).expand(2, -1)}


def kept_of(cache) -> dict[int, torch.Tensor]:
    """Return the positions that each evicting layer holds."""
    layers = {i: x.cache for i, x in enumerate(cache.layers) if isinstance(x, EvictingLayer)}
    empty = torch.zeros(2, 1, 0, dtype=torch.int64)
    return {i: empty if len(x) == 0 else x.positions for i, x in layers.items()}


def cache_of(model, method):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "KVCache: this model has no full-attention layer")
        return KVCache(model.config, method)


@contextlib.contextmanager
def attention(model, name):
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def assert_replayed(model, method, replay=Replay, *, told=True) -> None:
    """Check that each step's logits equal the replay's, and that H2O keeps the tokens that the replay's sums select.

    told: whether the model gets masks and positions, as from `generate`; else it takes them from the cache.
    """
    inputs = [inputs_of(step) if told else {} for step in range(len(STEPS))]
    cache = cache_of(model, method)
    found, kept = [], [kept_of(cache)]
    for ids, more in zip(IDS, inputs):
        with torch.no_grad():
            found.append(model(ids, past_key_values=cache, **more).logits)
        kept.append(kept_of(cache))
    assert all(x.shape[2] < sum(STEPS) for x in kept[-1].values())
    with attention(model, "eager"):
        replay = replay(model)
        for step, (ids, more) in enumerate(zip(IDS, inputs)):
            expected = replay(ids, kept[step], **more)
            torch.testing.assert_close(found[step], expected, atol=1e-4, rtol=1e-4, msg=f"step {step}: {{}}".format)
            if isinstance(method, kvops.H2O) and not replay.rescaled:
                assert_heavy(replay, kept[step + 1], method.budget)


def assert_heavy(replay, kept, budget) -> None:
    """Check that the newest half of the budget is kept, and the older tokens with the most attention."""
    for layer, positions in kept.items():
        sums, there = replay.sums[layer], ~replay.hidden[layer]
        stays = torch.zeros_like(there).scatter_(2, positions, True)
        older = torch.arange(there.shape[2]) < there.shape[2] - budget // 2
        assert stays[..., ~older].all() and (stays <= there).all()
        least = sums.masked_fill(~(stays & older), torch.inf).amin(2)
        most = sums.masked_fill(~(there & ~stays), -torch.inf).amax(2)
        assert (least > most - 1e-4).all(), (
            f"layer {layer}: a token was dropped that had more attention than a kept one"
        )


def config_of(name):
    """Skip models that this transformers lacks."""
    if tiny.model_type(name) not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    since = tiny.SINCE.get(tiny.model_type(name), "0")
    if Version(transformers.__version__) < Version(since):
        pytest.skip(f"{name} is tried with transformers >= {since}")
    return tiny.tiny_config(name)


# ---- every architecture ----


@pytest.mark.parametrize("name", tiny.names())
def test_architecture(name):
    """Methods depend on different parts of a model: KeyDiff on its keys and masks, H2O on its queries and attention
    weights, StreamingLLM on its rotation. R-KV's heads differ in length."""
    config = config_of(name)
    served = ARCHITECTURES[tiny.row(name)]
    if served.cache:
        with kit.refuses("KVCache", re.escape(served.cache), kind=NotImplementedError):
            KVCache(config, kvops.KeyDiff(12))
        return
    model = tiny.tiny_model(name, "eager")
    assert_replayed(model, kvops.KeyDiff(12), told=False)
    if served.attention:
        with kit.refuses("use_attention", repr(config.model_type), re.escape(served.attention)):
            use_attention(model)
        assert model.config._attn_implementation == "eager"
        return
    use_attention(model)
    evicts = bool(kept_of(cache_of(model, kvops.Full())))
    assert_replayed(model, kvops.H2O(12), told=evicts)  # Mamba takes no mask over tokens it has read
    if evicts:
        assert_replayed(model, kvops.RKV(12, window=3, buffer=1, head_mode="adaptive"))
    if evicts and tiny.has_output_weights(model):
        policy = for_model(kvops.CriticalKV(12, window=4), model)
        assert_replayed(model, policy)
    if evicts:
        assert_inputs(model, tiny.model_type(name) not in tiny.NO_INPUTS)
    if evicts and tiny.turns(name):
        assert_replayed(model, kvops.StreamingLLM(12), SlotReplay)
    elif evicts:
        with pytest.raises((ValueError, NotImplementedError), match="positions='original'"):
            assert_replayed(model, kvops.StreamingLLM(12), SlotReplay)


def assert_inputs(model, passed):
    """A policy with `needs.inputs` sees the hidden states and token ids of all steps, or raises."""
    SEEN.clear()
    options = dict(max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    with kvops.hf.compress(model, Recorder(12)) as compressed:
        if not passed:
            with kit.refuses("View.hidden: expected what the attention module was called with", kind=RuntimeError):
                model.generate(IDS[0], **options)
            return
        sequences = model.generate(IDS[0], **options)
        for layer in compressed.cache.evicting_layers:
            steps = [x[1:] for x in SEEN if x[0] == layer.cache.layer]
            assert all(hidden.shape[:2] == ids.shape and module.layer_idx >= 0 for hidden, ids, module in steps)
            assert torch.equal(torch.cat([x[1] for x in steps], 1), sequences[:, :-1])


@pytest.mark.parametrize("name", ["gemma3n_text", "gpt_oss"])
@pytest.mark.parametrize("policy", [kvops.KeyDiff(12, buffer=1), kvops.SnapKV(12, window=3)], ids=lambda x: x.name)
def test_heads_that_differ_with_shared_keys_and_with_sinks(name, policy):
    """Layers that share keys read the slots from before the eviction that follows the first one's step."""
    config_of(name)
    assert_replayed(use_attention(tiny.tiny_model(name, "eager")), dataclasses.replace(policy, head_mode="adaptive"))


# ---- every family ----

FAMILIES = {
    "lagkv": lambda: (kvops.LagKV(lag=8, ratio=0.25, sinks=2), Replay),
    "lacache": lambda: (kvops.LaCache(20), SlotReplay),
    "lacache-original": lambda: (kvops.LaCache(20, positions="original"), Replay),
    "snapkv": lambda: (kvops.SnapKV(16, window=4), Replay),
    "pyramidkv": lambda: (kvops.PyramidKV(16, window=4), Replay),
    "protokv": lambda: (kvops.ProtoKV(16, window=4, num_sats=4, num_chunks=6, buffer=2, alpha=2), Replay),
    "tova": lambda: (kvops.TOVA(12), Replay),
    "keydiff": lambda: (kvops.KeyDiff(12, sinks=2, recent=4), Replay),
}
FEW = ("llama", "gemma2", "gpt_oss", "gemma3n_text", "qwen3_next", "glm")
few = pytest.mark.parametrize("name", FEW)


@functools.cache
def own(name):
    return use_attention(tiny.tiny_model(name))


@few
@pytest.mark.parametrize("family", FAMILIES)
def test_family(name, family):
    config_of(name)
    method, replay = FAMILIES[family]()
    if replay is SlotReplay and not tiny.turns(name):
        pytest.skip("no slot positions")
    assert_replayed(own(name), method, replay)


@few
def test_lookahead(name):
    """LAQ prunes the prompt once, after the first token."""
    config_of(name)
    model, prompt, tokens = own(name), IDS[0], 4
    out = kvops.hf.generate(
        model,
        kvops.LAQ(12, steps=2),
        prompt,
        max_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    n = prompt.shape[1]
    kept = kept_of(out.past_key_values)
    with attention(model, "eager"):
        replay = Replay(model)
        expected = [replay(prompt, dict.fromkeys(kept, torch.zeros(2, 1, 0, dtype=torch.int64)))[:, -1]]
        for i in range(n, n + tokens - 1):
            held = {layer: x[:, :, : 12 + i - n] for layer, x in kept.items()}  # the prompt's tokens come first
            expected.append(replay(out.sequences[:, i : i + 1], held)[:, -1])
    torch.testing.assert_close(torch.stack(out.logits), torch.stack(expected), atol=1e-4, rtol=1e-4)
    assert all((x < n).sum(2).eq(12).all() for x in kept.values())


# ---- what the replay notices ----


PLANTED = {
    "scale": lambda q, k, v: (1.01 * q, k, v),
    "keys": lambda q, k, v: (q, k.flip(1), v),
    "values": lambda q, k, v: (q, k, torch.cat((v[:, :, 1:], v[:, :, :1]), 2)),
}


@pytest.mark.parametrize("error", [*PLANTED, "no mask", "scores"])
def test_it_notices(error, monkeypatch):
    """Planted errors in the forwards after the first eviction, and in H2O's sums."""
    model, compute, evict = own("llama"), EvictingLayer.attention, kvops.H2O.evict

    def wrong(self, module, q, k, v, **options):
        late = self.cache.seen > STEPS[0]
        out = compute(self, module, *(PLANTED[error](q, k, v) if error in PLANTED and late else (q, k, v)), **options)
        if error == "no mask" and late:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)
        return out

    if error == "scores":
        monkeypatch.setattr(
            kvops.H2O, "evict", lambda self, x: evict(self, dataclasses.replace(x, observed=x.observed.flip(1)))
        )
    else:
        monkeypatch.setattr(EvictingLayer, "attention", wrong)
    with pytest.raises(AssertionError, match="had more attention" if error == "scores" else "not close"):
        assert_replayed(model, kvops.H2O(12))


# ---- the table ----


def test_every_type_is_in_the_table_or_untested():
    """A new transformers may bring untested types. They trigger a warning."""
    assert not tiny.UNMADE.keys() & ARCHITECTURES.keys() and not tiny.UNMADE.keys() & tiny.SETTINGS.keys()
    untested = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - ARCHITECTURES.keys() - tiny.UNMADE.keys()
    if untested:
        warnings.warn(
            f"untested, in transformers {transformers.__version__}: {', '.join(sorted(untested))}", stacklevel=1
        )
    assert {tiny.row(x) for x in tiny.SETTINGS} <= ARCHITECTURES.keys()


def test_an_unknown_model_warns_once(monkeypatch):
    monkeypatch.setattr(kvops.hf.architectures, "_warned", set())

    @dataclasses.dataclass
    class MyConfig(LlamaConfig):
        pass

    config = MyConfig(num_hidden_layers=2)
    with pytest.warns(UserWarning, match="untested with the model of MyConfig .*'llama'"):
        KVCache(config, kvops.KeyDiff(12))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KVCache(config, kvops.KeyDiff(12))
        KVCache(LlamaConfig(num_hidden_layers=2), kvops.KeyDiff(12))


def test_a_refused_attention_that_was_asked_for_by_name():
    model = tiny.tiny_model("deepseek_v3")
    model.set_attn_implementation("kvops")
    with kit.refuses("KVCache", "'deepseek_v3'", re.escape(ARCHITECTURES["deepseek_v3"].attention)):
        KVCache(model.config, kvops.KeyDiff(12))


def test_the_page_is_the_table():
    if missing := [x for x in ARCHITECTURES if tiny.model_type(x) not in CONFIG_MAPPING]:
        pytest.skip(f"transformers {transformers.__version__} has no {missing[0]}")
    expected = tiny.page()
    assert (ROOT / "docs/architectures.md").read_text() == expected, "python tests/hf/hf_architectures.py writes it"
