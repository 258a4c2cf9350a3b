"""The experiment that fits gates, with few and short texts."""

import json

import pytest

pytest.importorskip("transformers")

import gates  # noqa: E402  (bench/experiments)
import kvops  # noqa: E402
from kvops.files import TEXT  # noqa: E402


def test_it_writes_gates_and_says_how_much_they_explain(tmp_path, capsys):
    file, record = tmp_path / "gates.safetensors", tmp_path / "record.json"
    gates.main(["--file", str(file), "--texts", "6", "--tokens", "120", "--json", str(record)])
    said = capsys.readouterr().out
    assert "r2_held_out: mean " in said and "from 600 tokens" in said
    found, fitted = json.loads(record.read_text()), kvops.Gates.load(file)
    assert len(found["r2_known"]) == len(found["r2_held_out"]) == len(fitted.layers)
    assert all(0.2 < x <= 1 for x in found["r2_known"]) and found["gates"] == repr(fitted)
    text = tmp_path / "text"
    text.write_text("A gate scores each token once, when it arrives. " * 20)
    for more, says, tensors in (([], "-> 4 -> ", 4), (["--sinks", "3", "--group", "2"], "-> 4 beside 3 sinks -> ", 7)):
        gates.main(["--file", str(file), "--text", str(text), "--tokens", "200", "--width", "4", *more])
        assert says in capsys.readouterr().out and len(kvops.Gates.load(file).layers[0]) == tensors


def test_its_texts_are_not_those_of_the_evaluation():
    class Words:
        def __call__(self, text):
            self.text = text
            return {"input_ids": list(range(1000))}

    words, held = Words(), TEXT.read_text()
    assert gates.library(words, 4, 100).shape == (4, 100)
    lines = {x for x in held.splitlines() if len(x) > 60}
    shared = lines & set(words.text.splitlines())
    assert len(shared) < 0.02 * len(lines)
