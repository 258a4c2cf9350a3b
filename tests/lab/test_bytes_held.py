"""The experiment that joins records into one picture of answers against bytes."""

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

import bytes_held  # noqa: E402  (bench/experiments)

RECORDS = [Path(__file__).parents[2] / f"bench/results/eval-{x}.jsonl" for x in ("ragged", "shares")]


def test_it_joins_records_of_the_same_prompts(tmp_path, capsys):
    bytes_held.main([*map(str, RECORDS), "--json", str(tmp_path / "joined.json"), "--out", str(tmp_path)])
    assert (tmp_path / "bytes-held.png").read_bytes()[:4] == b"\x89PNG"
    record = json.loads((tmp_path / "joined.json").read_text())
    assert record["settings"]["prompts"] == 32 and record["settings"]["seed"] == 1
    for name in ("ragged", "shares"):  # each record's own means
        summary = json.loads((RECORDS[0].parent / f"eval-{name}.json").read_text())
        rows = {(x["method"], x["budget"]): x for x in record["rows"]}
        for row in summary["rows"]:
            if row["point"] == "before" and row["task"] == "needle:chat=True" and row["n"] == 32:
                found = rows[row["method"], row["budget"]]
                if name == "ragged" or "shares" in row["method"]:
                    assert found["score"] == pytest.approx(row["scores"]["partial"]["mean"])
                    assert found["held"] == pytest.approx(row["bytes_held"] / row["bytes_full"], rel=0.01)
    for budget in (128, 256):
        own = [x for x in record["rows"] if x["budget"] == budget]
        best = max(own, key=lambda x: x["score"])
        assert best["beside_best"] == "best" and sum(x["beside_best"] == "best" for x in own) == 1
        assert all(x["minus_full_low"] <= x["minus_full"] <= x["minus_full_high"] for x in own)
    said = capsys.readouterr().out
    assert len(said.splitlines()) == sum(x["budget"] is not None for x in record["rows"])


def test_kinds():
    for method, kind in (
        ("SnapKV", "each head keeps equally many"),
        ("SnapKV head_mode=adaptive", "the heads of a layer share"),
        ("SnapKV head_mode=adaptive shares=x.safetensors", "fixed shares of heads"),
        ("KVzip head_mode=adaptive scope=model", "all heads of the model share"),
        ("KVzap gates=x threshold=-4.0 head_mode=adaptive", "all above a threshold"),
    ):
        assert bytes_held.kind_of(method) == kind and bytes_held.short(method) == method.split()[0]


def test_other_prompts_are_refused(tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(RECORDS[1].read_text().replace('"seed": 1', '"seed": 7'))
    with pytest.raises(SystemExit, match="expected results of needle:chat=True, 1024 tokens, before, .*, got none"):
        bytes_held.main([str(RECORDS[0]), str(other), "--out", str(tmp_path)])
