"""Small runs of experiments/serving.py and vllm_attention.py. They need vLLM 0.32's CPU build (`make test-engines`)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[1]


def test_more_requests_are_in_flight(tmp_path):
    options = "--requests 6 --full 2 --prompt 640 --generated 96 --budget 128 --buffer 32".split()
    files = ["--out", tmp_path, "--json", tmp_path / "serving.json"]
    command = [sys.executable, ROOT / "experiments" / "serving.py", *options, *files]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "serving.png").stat().st_size > 10_000
    served = json.loads((tmp_path / "serving.json").read_text())["served"]
    assert [x["engine"] for x in served] == ["vLLM"] * 2 + ["transformers"] * 2
    for full, evicted in zip(served[::2], served[1::2]):
        assert full["policy"] == "full" and full["right"] == 6
        assert evicted["in_flight_most"] > full["in_flight_most"]
        assert evicted["blocks_held_most"] <= 2 * 23 and evicted["preemptions"] == 0


def test_attentions_are_compared(tmp_path):
    model, record = ROOT / "bench" / "models" / "passkey-llama", tmp_path / "attention.json"
    options = ["--most", "512", "--rounds", "1", "--page", "32", "--dtype", "float32", "--model", model]
    command = [sys.executable, ROOT / "experiments" / "vllm_attention.py", *options, "--json", record]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(record.read_text())
    assert len(found["layers"]) == 2 * 2 * 6 and len(found["engines"]) == 6
    assert all(x["vLLM"] > 0 and x["kvops"] > 0 for x in found["layers"] + found["engines"])
    assert len(run.stdout.splitlines()) == 1 + 24 + 1 + 1 + 6
