"""The experiments that round rows: rounded_rows.py, of a record, and rounded_keys.py, of the passkey model."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

import rounded_keys  # noqa: E402  (bench/experiments)
import rounded_rows  # noqa: E402

RESULTS = Path(__file__).parents[2] / "bench/results"


def test_the_same_bytes_and_the_same_tokens(tmp_path, capsys):
    """The record's own means, beside those of bf16, with paired differences."""
    rounded_rows.main([str(RESULTS / "eval-rounded.jsonl"), "--json", str(tmp_path / "x.json"), "--out", str(tmp_path)])
    assert (tmp_path / "rounded-rows.png").read_bytes()[:4] == b"\x89PNG"
    found = json.loads((tmp_path / "x.json").read_text())["rows"]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == sum(name in x for x in found for name in ("same_bytes", "same_tokens"))
    summary = {
        (x["point"], x["method"], x["budget"]): x
        for x in json.loads((RESULTS / "eval-rounded.json").read_text())["rows"]
    }
    pairs = {"same_bytes": 0, "same_tokens": 0}
    for row in found:
        name = row["method"] + (f" storage={row['storage']}" if row["storage"] != "bf16" else "")
        of = summary[row["point"], name, row["budget"]]
        assert row["score"] == pytest.approx(of["scores"]["partial"]["mean"]) and row["prompts"] == of["n"]
        per_number = {"bf16": 4, "int8": (64 + 16) / 64, "fp8": 1}[row["storage"]]  # bytes; the model runs in fp32
        of_full = of["tokens"] / summary[row["point"], "Full", None]["tokens"]
        unused = 0.1 if "adaptive" in name else 0.001  # by pages of heads that differ in length
        assert of["bytes_held"] / of["bytes_full"] == pytest.approx(per_number / 4 * of_full, rel=unused)
        for name in pairs:
            if name in row:
                x, pairs[name] = row[name], pairs[name] + 1
                other = summary[row["point"], row["method"], x["budget"]]
                assert x["difference"] == pytest.approx(row["score"] - other["scores"]["partial"]["mean"])
                assert x["low"] <= x["difference"] <= x["high"]
                bytes = {"int8": 80 / 128, "fp8": 0.5}[row["storage"]] * row["budget"]
                assert x["budget"] == (row["budget"] if name == "same_tokens" else pytest.approx(bytes, rel=0.01))
    assert pairs == {"same_bytes": 14, "same_tokens": 21}


def test_methods_and_storages():
    assert rounded_rows.split("KVzip head_mode=adaptive scope=model storage=fp8") == (
        "KVzip head_mode=adaptive scope=model", "fp8"
    )  # fmt: skip
    assert rounded_rows.split("SnapKV") == ("SnapKV", "bf16")


def test_rounded_keys(tmp_path, capsys):
    """int8 rounds more finely than fp8, and predictions move less; exact rows move none."""
    record = tmp_path / "x.json"
    rounded_keys.main(["--texts", "2", "--context", "200", "--json", str(record)])
    found, shown = json.loads(record.read_text())["rounded"], capsys.readouterr().out
    assert len(found) == 6 and all(name in shown for name in found)
    for what in rounded_keys.WHAT:
        fine, coarse = (found[f"{what}, {x}"] for x in ("int8", "fp8"))
        for name in ("error", "kl"):
            assert all(0 < x < y for x, y in zip(fine[name], coarse[name])) and len(fine[name]) == 2
    assert found["keys before rotation, int8"] != found["keys after rotation, int8"]


def test_exact_rows_are_exact():
    model = rounded_keys.AutoModelForCausalLM.from_pretrained(rounded_keys.common.MODEL).eval()
    ids = rounded_keys.common.load_text()[:, :50]
    with rounded_keys.torch.inference_mode():
        want = model(ids).logits[0].log_softmax(-1)
        for what in (None, *rounded_keys.WHAT):
            found = rounded_keys.predictions(model, ids, what, lambda x: x)
            rounded_keys.torch.testing.assert_close(found, want)
        assert not model.model.layers[0].self_attn.k_proj._forward_hooks
