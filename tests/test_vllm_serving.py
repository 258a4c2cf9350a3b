"""A small run of experiments/serving.py with both engines. Needs vLLM 0.32's CPU build (`make test-engines`)."""

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
