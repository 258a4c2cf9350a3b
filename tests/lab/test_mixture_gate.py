"""bench/models/mixture-llama/gate.py: which scores pass, and what it records."""

import json
import sys
from pathlib import Path

import pytest

from kvops.demo import MODEL

FOLDER = Path(__file__).parents[2] / "bench/models/mixture-llama"
sys.path.insert(0, str(FOLDER))
import gate  # noqa: E402

sys.path.remove(str(FOLDER))


@pytest.mark.parametrize(
    ("full", "snapkv", "holds"), [(0.9, 0.81, (True, True)), (0.89, 0.89, (False, True)), (1.0, 0.89, (True, False))]
)
def test_the_worst_task_decides(full, snapkv, holds):
    checks = gate.check({"needle": {"full": full, "snapkv": snapkv}, "niah-single": {"full": 1.0, "snapkv": 1.0}})
    assert tuple(x["holds"] for x in checks.values()) == holds


def test_the_passkey_model_fails(tmp_path, capsys, one_thread):
    file = tmp_path / "gate.json"
    assert gate.main(["--model", str(MODEL), "--context", "256", "--prompts", "1", "--json", str(file)]) == 1
    record = json.loads(file.read_text())
    assert record["gate"]["full cache"]["holds"] and not record["gate"]["sinks"]["holds"]
    assert set(record["needles"]) == set(gate.NEEDLES) and len(record["layers"]) == 3
    assert "FAILS  sinks" in capsys.readouterr().out
