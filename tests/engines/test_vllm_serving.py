"""Small runs of bench/experiments/serving.py, vllm_attention.py and vllm_prefixes.py.

They need vLLM 0.32's CPU build (`make test-engines`).
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for x in messages %}{{ x['content'] }}{% endfor %} "


@pytest.fixture(params=["chat", "text"])
def model(request, tmp_path):
    """The passkey model: it finds keys too, and reads prompts in seconds. With a chat template, and without."""
    shutil.copytree(ROOT / "bench" / "models" / "passkey-llama", tmp_path / "model")
    if request.param == "chat":
        (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path / "model"


def test_more_requests_are_in_flight(tmp_path, model):
    options = "--requests 6 --full 2 --prompt 580 --generated 96 --engines vllm transformers".split()
    options += ["--policies", "full", "keydiff:budget=128,buffer=32", "--model", model]
    files = ["--out", tmp_path, "--json", tmp_path / "serving.json"]
    command = [sys.executable, ROOT / "bench/experiments" / "serving.py", *options, *files]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "serving.png").stat().st_size > 10_000
    record = json.loads((tmp_path / "serving.json").read_text())
    load, served = record["load"], record["served"]
    assert load["model"] == "model" and [x["engine"] for x in served] == ["vLLM"] * 2 + ["transformers"] * 2
    for x in served:
        assert len(x["answers"]) == 6 and x["blocks_held_most"] <= load["blocks"]
        assert x["right"] == sum(f"is {key}" in answer for key, answer in zip(load["keys"], x["answers"]))
        assert x["answers"][3][:60].strip().split("\n")[0][:20] in run.stdout
    for full, evicted in zip(served[::2], served[1::2]):
        assert full["policy"] == "full" and full["right"] == 6, full["answers"]
        assert evicted["in_flight_most"] > full["in_flight_most"] and evicted["preemptions"] == 0


def test_attentions_are_compared(tmp_path):
    model, record = ROOT / "bench" / "models" / "passkey-llama", tmp_path / "attention.json"
    options = ["--most", "512", "--rounds", "1", "--page", "32", "--dtype", "float32", "--model", model]
    command = [sys.executable, ROOT / "bench/experiments" / "vllm_attention.py", *options, "--json", record]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(record.read_text())
    assert len(found["layers"]) == 2 * 2 * 11 and len(found["engines"]) == 6
    assert all(x["vLLM"] > 0 and x["kvops"] > 0 for x in found["layers"] + found["engines"])
    assert len(run.stdout.splitlines()) == 1 + 44 + 1 + 1 + 6


def test_shared_prefixes_are_compared(tmp_path):
    record = tmp_path / "prefixes.json"
    options = "--requests 3 --shared 600 --generated 4 8 --rounds 2".split()
    command = [sys.executable, ROOT / "bench/experiments" / "vllm_prefixes.py", *options, "--json", record]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rows = json.loads(record.read_text())["rows"]
    assert [x["load"]["generated"] for x in rows] == [4, 8] and len(run.stdout.splitlines()) == 3
    for row in rows:
        assert (
            row["ratio"].keys() == {"without eviction", "KeyDiff", "SnapKV"} and row["ratio"]["without eviction"] == 1
        )
        assert all(len(x) == 2 and min(x) > 0 for x in row["seconds"].values())
