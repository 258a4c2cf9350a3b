"""Small runs of the experiments on LaCache: what they print, draw and record."""

# ruff: noqa: E402  (after the check of what they need)

import json

import numpy as np
import pytest
import torch

for name in ("transformers", "matplotlib", "tqdm"):
    pytest.importorskip(name)

import common
import endless
import kvops
import lacache_cost
import ladder
import pareto
import rope_drift
from kvops.demo import passkeys
from kvops.eval.reader import Reader


@pytest.mark.full
def test_a_stream_without_end(tmp_path, capsys):
    """The cache stops growing, the losses match one pass over the text, and the record has the drawn curves."""
    sizes = ["--tokens", "1400", "--budget", "128", "--streams", "2", "--stream-tokens", "600"]
    endless.main([*sizes, "--token-by-token", "--json", str(tmp_path / "x.json"), "--out", str(tmp_path)])
    shown, record = capsys.readouterr().out, json.loads((tmp_path / "x.json").read_text())
    rows = ["full cache", "StreamingLLM", "LaCache, S 1, O 0", "LaCache, S 2, O 0, short"]
    assert list(record["long"]) == rows and list(record["token by token"]) == rows[1:]
    assert all(shown.count(name) >= 2 for name in rows) and (tmp_path / "endless.png").stat().st_size > 10_000
    endless.main(["--from", str(tmp_path / "x.json"), "--out", str(tmp_path / "again")])
    assert (tmp_path / "again" / "endless.png").read_bytes() == (tmp_path / "endless.png").read_bytes()
    for name, curve in record["long"].items():
        full = name == "full cache"
        growth = curve["bytes"][-1] / curve["bytes"][0]  # with room for tokens to come
        assert growth == pytest.approx(1399 / 1024, rel=0.06) if full else curve["bytes"][-1] < 450_000
    values = record["perplexity"] | record["perplexity, token by token"]
    assert all(2 < x < 6 for x in values.values()), values
    assert record["pieces"]["StreamingLLM"]["difference"] == 0


def test_a_text_that_is_too_short(capsys):
    with pytest.raises(SystemExit):
        endless.main(["--tokens", "10000000"])
    assert "too few for --tokens" in capsys.readouterr().err


def test_random_patterns_have_their_size():
    generator = np.random.default_rng(0)
    for total in (64 * 3, 300, 128 * 3 - 1):
        slots = pareto.random_pattern(128, total, 3, generator)
        assert sum(map(len, slots)) == total
        for x in slots:
            assert (x.diff() > 0).all() and 0 <= x[0] and x[-1] < 128 and x[: pareto.SINKS].tolist() == [0, 1, 2, 3]


def test_the_ladders_of_a_deep_model_fit_all_sizes():
    found = pareto.ladders(30)
    assert (8, 4, "paper") in found and len(set(found)) == 4  # the default and others
    for size in pareto.SIZES:
        for span, overlap, pattern in found:
            shape = dict(num_layers=30, budget=size, span=span, overlap=overlap, sinks=pareto.SINKS, pattern=pattern)
            assert 0.95 * size < len(kvops.lacache_plan(1024, **shape)) < 1.05 * size


def test_pareto(tmp_path, capsys):
    sizes = ["--patterns", "2", "--context", "200", "--following", "60", "--pieces", "2"]
    pareto.main([*sizes, "--json", str(tmp_path / "x.json"), "--out", str(tmp_path)])
    record = json.loads((tmp_path / "x.json").read_text())
    assert len(record["random"]) == 2 * len(record["shares_beaten"]) == 8
    assert all(2 < x[-1] < 6 for x in (record["whole"], *record["ladders"], *record["random"]))
    assert "better than" in capsys.readouterr().out and (tmp_path / "pareto.png").exists()
    pareto.main(["--from", str(tmp_path / "x.json"), "--out", str(tmp_path / "again")])
    assert (tmp_path / "again" / "pareto.png").read_bytes() == (tmp_path / "pareto.png").read_bytes()


@torch.inference_mode()
def test_a_pattern_of_all_slots_is_the_whole_cache():
    reader, text = Reader(passkeys.load_model()), common.load_text()
    read = passkeys.read(reader, text[:, :100].numpy())
    patterns = (None, [torch.arange(100)] * 3, [torch.arange(100), torch.arange(100), torch.arange(50, 100)])
    whole, same, other = (pareto.perplexity(reader, read, x, text[:, 100:150]) for x in patterns)
    assert whole == same != other
    assert read.cache.get_seq_length() == read.positions[0].shape[2] == 100  # what was read is as it was


def test_keys_drift_only_if_they_are_turned():
    found = rope_drift.run(torch.bfloat16, 100, 128, 16, 10_000.0)
    assert [x["compactions"] for x in found] == [1, 10, 100]
    assert found[-1]["with RoPE"]["mean"] > 4 * found[0]["with RoPE"]["mean"]
    assert found[-1]["without"]["mean"] < 1.2 * found[0]["without"]["mean"] < 0.005


def test_what_compactions_move():
    """Slots after the ladder move by what it frees: between none and all slots after the sinks."""
    plans = list(lacache_cost.stream(80, 50))
    assert all(lacache_cost.moved_slots(x) <= len(x) - 4 for x in plans) and any(x.passes for x in plans)
    assert 0.1 < lacache_cost.moved_against_read(80, 200) < 2 / plans[0].ladder.freed
    share, text = lacache_cost.report(
        {"matrix products": 0.9, "attention": 0.1, "a compaction of all layers": 0.5, "tokens until the next": 5.0}
    )
    assert share == pytest.approx(0.1) and text.splitlines()[-1].startswith("MISSED")


def test_the_ladder_is_drawn(tmp_path, capsys):
    ladder.main(["--out", str(tmp_path)])
    assert (tmp_path / "ladder.png").exists() and "wrote" in capsys.readouterr().out
    assert ladder.streaming(100, 2, 10, 4).sum(1).tolist() == [10, 10]
