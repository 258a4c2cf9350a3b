"""The experiment that measures fixed shares of heads, with a short text."""

import functools

import pytest

pytest.importorskip("transformers")

import head_shares  # noqa: E402  (bench/experiments)
import kvops  # noqa: E402
import kvops.hf  # noqa: E402
from kvops.methods.shares import _load  # noqa: E402


def test_it_writes_the_shares_and_says_how_alike_they_are(tmp_path, capsys):
    file, text = tmp_path / "shares.safetensors", tmp_path / "text"
    text.write_text("The heads that look far back need more of the cache. " * 20)
    head_shares.main(["--file", str(file), "--text", str(text), "--tokens", "300"])
    said = capsys.readouterr().out
    assert (
        "texts of 300 tokens in " in said and "; shares from " in said and "correlation between texts at least " in said
    )
    shares = _load(file)
    assert shares.dim() == 2 and abs(shares.mean().item() - 1) < 1e-5
    kvops.KeyDiff(64, head_mode="adaptive", shares=str(file))
    head_shares.main(["--file", str(file), "--text", str(text), "--tokens", "900"])
    said = capsys.readouterr().out
    assert "1 texts of 900 tokens" in said and "correlation" not in said


@pytest.mark.parametrize("way", ["retrieval", "duo"])
def test_other_ways(way, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(kvops.hf, "duo_shares", functools.partial(kvops.hf.duo_shares, steps=4))
    file, text = tmp_path / "new" / "shares.safetensors", tmp_path / "text"
    text.write_text("The heads that look far back need more of the cache. " * 60)
    settings = ["--tokens", "1500", "--by", way, "--floor", "0.25", "--penalty", "0.001"]
    head_shares.main(["--file", str(file), "--text", str(text), *settings])
    said = capsys.readouterr().out
    assert "2 texts of 1500 tokens" in said and ("correlation" in said) == (way == "retrieval")
    shares = _load(file)
    assert abs(shares.mean().item() - 1) < 1e-5 and 0.25 - 1e-5 <= shares.min() < shares.max()
