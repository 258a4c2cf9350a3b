"""bench/peers: decode_attention.py; select_topk.py; kvpress_eval.py, with kvpress or a stand-in for it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("tqdm")

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]
TASK = "passkey:digits=8"
PER_TOKEN = 3 * 2 * 2 * 64 * 4  # bytes: layers, KV heads, K and V, head_dim, fp32


class FakePress:
    """Keeps the newest int(n (1 - ratio)) slots of the prompt, with hooks like kvpress' presses."""

    def __init__(self, ratio, **settings):
        self.ratio, self.settings = ratio, settings

    def kept(self, n: int, layer: int) -> int:
        return int(n * (1 - self.ratio))

    def hook(self, module, inputs, kwargs, output):
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        kept = self.kept(layer.keys.shape[2], module.layer_idx)
        layer.keys, layer.values = (x[:, :, -kept:].contiguous() for x in (layer.keys, layer.values))

    @contextlib.contextmanager
    def __call__(self, model):
        hooks = [x.self_attn.register_forward_hook(self.hook, with_kwargs=True) for x in model.model.layers]
        try:
            yield
        finally:
            for x in hooks:
                x.remove()


class Pyramid(FakePress):
    def kept(self, n, layer):
        return super().kept(n, layer) + 8 * (1 - layer)


class Broken(FakePress):
    def hook(self, *args):
        raise NotImplementedError("not for this model\nat all")


def fake_kvpress() -> types.ModuleType:
    names = ["StreamingLLM", "Random", "LagKV", "KeyDiff", "SnapKV", "ObservedAttention", "Knorm"]
    module = types.ModuleType("kvpress")
    for name in names:
        setattr(module, f"{name}Press", type(name, (FakePress,), {}))
    module.PyramidKVPress, module.TOVAPress = Pyramid, Broken
    module.KeyRerotationPress = module.ChunkKVPress = lambda press: press
    module.BasePress = FakePress
    return module


@pytest.fixture
def peer(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvpress", fake_kvpress())
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda x: "0 (a stand-in)" if x == "kvpress" else real(x))
    return load(monkeypatch)


def load(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("kvpress_eval", ROOT / "bench" / "peers" / "kvpress_eval.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kvpress_eval", module)
    spec.loader.exec_module(module)
    return module


def run(peer, out: Path, *more: str) -> dict[tuple, dict]:
    """Return the lines by method and cut point."""
    peer.main(["--context", "192", "--prompts", "2", "--budgets", "64", "--tasks", TASK, "--out", str(out), *more])
    lines = [json.loads(x) for x in (out / "results.jsonl").read_text().splitlines()]
    assert lines[0]["origin"]["kvpress"] and lines[0]["origin"]["transformers"] == transformers.__version__
    return {(x["method"].removeprefix("kvpress "), x["point"]): x for x in lines[1:]}


def test_all_presses_on_the_prompts_of_the_evaluation(peer, tmp_path, capsys):
    found = run(peer, tmp_path)
    assert set(found) == {(x.name, point) for x in peer.PRESSES.values() for point in ("before", "after")}
    for (name, point), x in found.items():
        if name == "TOVA":
            assert x["unreachable"] == "kvpress TOVA: NotImplementedError: not for this model"
            continue
        n = 192 if point == "before" else x["bytes_full"] // PER_TOKEN
        assert n > 192 or point == "before"
        kept = n if name == "Full" else 64
        assert (x["tokens"], x["bytes_held"], x["bytes_full"]) == (kept, kept * PER_TOKEN, n * PER_TOKEN), name
        assert x["steps"] == 8 and len(x["scores"]["exact"]) == 2
    assert capsys.readouterr().err.count("kvpress TOVA: NotImplementedError") == 2
    # With nothing cut both libraries read the same prompts, and say the same.
    from kvops.eval import __main__ as ours
    from kvops.eval.methods import rule
    from kvops.eval.reader import Reader

    said = ["--methods", "full", "--context", "192", "--prompts", "2", "--tasks", TASK, "--out", str(tmp_path / "ours")]
    a = ours.arguments(said, ours.make_parser(), rule)
    lines = ours.measure(a, "x", Reader)[0].read_text().splitlines()[1:]
    for x in map(json.loads, lines):
        theirs = found["Full", x["point"]]
        assert (x["said"], x["scores"]) == (theirs["said"], theirs["scores"]) and x["bytes_held"] == theirs[
            "bytes_held"
        ]
    assert run(peer, tmp_path) == found  # everything was there


@pytest.fixture
def reader(peer):
    model = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "bench" / "models" / "passkey-llama")
    return peer.KVPressReader(model)


def positions(reader, prefill, ids: np.ndarray) -> list[list[int]]:
    """Record the positions of each model call during feeding."""
    seen = []
    model, reader.model = reader.model, lambda x, **kw: seen.append(kw["position_ids"][0].tolist()) or model(x, **kw)
    reader.feed(prefill.cache, torch.from_numpy(ids))
    reader.model = model
    return seen


@torch.inference_mode()
def test_where_tokens_go_on(reader, peer):
    ids, more = np.random.default_rng(0).integers(0, 200, (2, 100)), np.ones((2, 3), dtype=np.int64)
    of = {name: reader.prefill(ids, x, 40) for name, x in peer.PRESSES.items() if name != "tova"}
    assert [x.position for x in of["keydiff"].cache] == [100] and of["keydiff"].cache[0].lengths == [40] * 3
    assert positions(reader, of["keydiff"], more) == [[100, 101, 102]]
    assert positions(reader, of["streamingllm-rerotated"], more) == [[40, 41, 42]]
    assert positions(reader, of["chunkkv"], more) == [[100, 101, 102]] * 2  # prompt by prompt
    assert of["pyramidkv"].cache[0].lengths == [48, 40, 32] and of["pyramidkv"].tokens == 40
    assert positions(reader, of["pyramidkv"], more) == [[100], [101], [102]]  # one mask does not fit all layers
    for name, x in of.items():
        if name != "pyramidkv" and name != "full":
            assert x.bytes_held * 100 == x.bytes_full * 40, name
    assert reader.model.config._attn_implementation == "sdpa"


@torch.inference_mode()
def test_a_budget_that_holds_the_prompt_cuts_nothing(reader, peer):
    ids = np.random.default_rng(0).integers(0, 200, (1, 50))
    prefill = reader.prefill(ids, peer.PRESSES["streamingllm-rerotated"], 50)
    assert prefill.tokens == 50 and prefill.cache[0].position == 50 and prefill.bytes_held == prefill.bytes_full


@pytest.mark.parametrize(
    "options, message",
    [
        (["--methods", "protokv"], "method must be one of full, streamingllm, "),
        (["--from", __file__], "--from: python -m kvops.eval makes the report"),
    ],
)
def test_wrong_arguments(peer, options, message, capsys):
    with pytest.raises(SystemExit):
        peer.main(options)
    assert message in capsys.readouterr().err


def test_what_cannot_be_measured_is_said_in_one_line(peer, tmp_path):
    run(peer, tmp_path, "--methods", "full")
    with pytest.raises(
        SystemExit, match="^kvpress_eval.py: .* holds results of other settings: seed was 0 and is now 1$"
    ):
        run(peer, tmp_path, "--methods", "full", "--seed", "1")


@pytest.mark.parametrize("task", ["agreement", "recall", "perplexity", "continuation", "chunked"])
def test_tasks_without_answers_are_refused(peer, task, capsys):
    with pytest.raises(SystemExit):
        peer.main(["--tasks", task])
    error = capsys.readouterr().err
    assert "--tasks: presses cut once, so expected some of passkey" in error and error.endswith(f"got {task}\n")


def test_without_kvpress_the_set_up_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvpress", None)
    with pytest.raises(SystemExit, match="pip install -r bench/peers/requirements.txt"):
        load(monkeypatch)


@pytest.mark.skipif(importlib.util.find_spec("kvpress") is None, reason="kvpress is not installed")
def test_kvpress_itself(monkeypatch, tmp_path):
    """In its own environment: python -m pytest tests/lab/test_peers.py -k kvpress_itself."""
    found = run(load(monkeypatch), tmp_path)
    assert [name for (name, _), x in found.items() if "unreachable" in x] == []
    for (name, _), x in found.items():
        kept = x["bytes_full"] // PER_TOKEN if name == "Full" else 64
        assert x["tokens"] == kept or name == "ChunkKV" and 32 <= x["tokens"] < 64  # whole chunks
        assert x["bytes_held"] == x["tokens"] * PER_TOKEN


DECODE = ROOT / "bench/peers/decode_attention.py"


def test_decode_attention_in_turns(monkeypatch):
    """A dtype that a kernel does not have is left out; a kernel that computes something else is an error."""
    spec = importlib.util.spec_from_file_location("decode_attention", DECODE)
    peers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(peers)
    monkeypatch.setattr(peers, "BYTES", 1)

    def missing(*_):
        raise TypeError("no such dtype")

    found = {"kvops": peers.with_kvops, "sdpa": peers.with_sdpa, "rows": peers.with_rows, "missing": missing}
    monkeypatch.setattr(peers, "kernels", lambda _: found)
    for dtype, worst in (("fp32", 1e-5), ("bf16", 1e-2)):
        cell = peers.measure(dtype, 70, 1, None)
        assert cell["seconds"].pop("missing") is None and "missing" not in cell["errors"]
        assert cell["seconds"].keys() == cell["errors"].keys() == found.keys() - {"missing"}
        assert min(cell["seconds"].values()) > 0 and max(cell["errors"].values()) < worst
    found["missing"] = lambda q, k, v: lambda: torch.zeros_like(q)
    with pytest.raises(RuntimeError, match="missing, fp32, 70 tokens: this is not attention, it is 1 off"):
        peers.measure("fp32", 70, 1, None)


@pytest.mark.full
def test_decode_attention_of_what_is_installed(tmp_path):
    file = tmp_path / "x.json"
    options = ("--tokens", "70", "--dtypes", "fp32", "--rounds", "1", "--json", str(file))
    done = subprocess.run([sys.executable, str(DECODE), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (cell,) = json.loads(file.read_text())["cells"]
    assert {"kvops", "sdpa", "sdpa, rows", "flex"} <= {x for x, y in cell["seconds"].items() if y and y > 0}
    assert cell["bytes"] == 2 * 8 * 70 * 128 * 4 and max(cell["errors"].values()) < 1e-4


TOPK = ROOT / "bench/peers/select_topk.py"


@pytest.mark.full
def test_selection_in_turns(tmp_path):
    file = tmp_path / "x.json"
    options = ("--tokens", "300", "--rounds", "1", "--json", str(file))
    done = subprocess.run([sys.executable, str(TOPK), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cells = json.loads(file.read_text())["cells"]
    assert [(x["kind"], x["k"]) for x in cells] == [
        (kind, k) for kind in ("normal", "bf16", "half zero") for k in (150, 75, 18)
    ]
    assert all(0 < x < 1 for cell in cells for x in cell["seconds"].values())


def test_selections_that_differ_are_refused(monkeypatch):
    spec = importlib.util.spec_from_file_location("peers_select_topk", TOPK)
    peers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(peers)
    monkeypatch.setattr(peers, "argpartition", lambda scores, k: np.argpartition(scores, k, axis=-1)[..., :k])
    with pytest.raises(RuntimeError, match="normal, 64 tokens, k 16: they keep different scores"):
        peers.measure("normal", 64, 4, 1)
