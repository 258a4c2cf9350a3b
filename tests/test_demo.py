"""The demo on a few prompts: which methods find the key, and that the table shows the measurements."""

import json
import re

import pytest
import torch

for name in ("transformers", "matplotlib", "tqdm"):
    pytest.importorskip(name)


@pytest.fixture(scope="module")
def demo():
    import demo

    demo.ROUNDS = 3
    return demo


@pytest.fixture(scope="module")
def shown(demo, tmp_path_factory):
    """One run: returned rows, printed text and the picture."""
    out = tmp_path_factory.mktemp("demo")
    rows, prompt = demo.run(context=2048, digits=32, prompts=11, progress=False)
    demo.picture(rows, prompt, out / "demo.png")
    return rows, prompt, demo.table(rows, 2048, 32, 11), demo.findings(rows, 2048, 32), out / "demo.png"


def test_keydiff_and_lagkv_find_what_streaming_and_random_lose(shown):
    score = {(row.name, row.share): row.score for row in shown[0]}
    assert score["Full cache", 1.0] == 100
    for share, streaming, random in ((0.5, 60, 35), (0.25, 40, 25)):
        assert score["KeyDiff", share] >= 95
        assert score["StreamingLLM", share] <= streaming  # the keys in its window, and a guess where they are not
        assert score["Random", share] <= random
    assert score["LagKV, lag 128", 0.5] >= 70 and score["LagKV, lag 256", 0.5] >= 85
    assert score["LagKV, lag 128", 0.25] <= 40  # 18 tokens per partition do not hold 32 digits
    assert score["SATKV", 0.5] >= 60
    for name in ("SnapKV", *(x for x, _ in score if x.startswith("ProtoKV"))):
        assert score[name, 0.5] <= 45  # no query knows yet what will be asked for
    assert len(score) == 23


def test_tokens_and_bytes(shown):
    full = 3 * 2 * 2048 * 64 * 2 * 4  # layers, KV heads, tokens, channels, K and V, fp32
    for row in shown[0]:
        assert row.bytes_full == full
        assert row.bytes_kept * 2048 == full * row.tokens
        assert row.share * 2048 - 14 <= row.tokens <= row.share * 2048  # LagKV cannot hit it exactly
        assert row.kept.shape == (3, 2, 2048) and (row.kept.sum(-1) == row.tokens).all()
        assert (row.ms > 0 and row.plain_ms > 0) == (row.share < 1)


def test_the_table_says_what_was_measured(shown):
    rows, _, table, findings, path = shown
    lines = table.splitlines()
    assert max(map(len, lines)) <= 120
    for row in rows:
        (line,) = [x for x in lines if x.startswith(row.name) and f" {row.tokens:,} " in x]
        assert f"{row.bytes_full:,}" in line and f"{row.bytes_kept:,}" in line and f"{row.score:.1f} %" in line
        if row.compress:
            assert f"{row.ms:.2f} ms" in line and f"{row.plain_ms / row.ms:.1f} x" in line
    assert "* no token per partition" in table  # LagKV with lag 256 at 25 %
    assert "flatters" in findings and "sink" in findings
    assert path.stat().st_size > 20_000 and path.read_bytes().startswith(b"\x89PNG")


def test_plain_pytorch_does_the_same(demo):
    """The timed PyTorch versions keep the same slots (Random: as many)."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 2, 2048, 64).unbind(0)
    q = torch.randn(1, 4, 32, 64)
    for row in demo.make_rows(2048):
        if row.compress:
            ours, plain = row.compress(k, v, q, 0), row.plain(k, v, q)
            assert ours.k.shape == plain[0].shape and ours.v.shape == plain[1].shape
            # Scores that are equal up to rounding may swap. ProtoKV may take products of 16-bit numbers, and a token's
            # second best prototype for its best (random keys are as far from one as from another).
            least = 0.9 if row.name.startswith("ProtoKV") else 0.99
            for h in range(2) if row.name != "Random" else ():
                for x, y in zip((ours.k, ours.v), plain):
                    assert torch.isin(x[0, h, :, 0], y[0, h, :, 0]).float().mean() > least


def test_lagkv_budget_solves_equation_10(demo):
    for n in (600, 1024, 2048, 3000):
        for lag in (128, 256):
            for share in (0.5, 0.25):
                budget = int(share * n)
                m, fixed = demo.kept_within(n, demo.SINKS, lag, budget)
                row = demo.lagkv_row(share, lag, n, budget)
                partitions = max(1, (n - 16) // lag)
                assert fixed == n - (partitions - 1) * lag
                if m < 0:
                    assert not row.reachable and re.search(rf"no ratio reaches {budget:,} .* {fixed:,}$", row.note)
                    assert fixed > budget or partitions == 1
                else:
                    k = torch.randn(1, 1, n, 64)
                    kept = row.compress(k, k, None, 0).k.shape[2]
                    assert kept == fixed + m * (partitions - 1)
                    assert kept <= budget < kept + partitions - 1


def test_a_cell_out_of_reach_says_so(demo, capsys, tmp_path):
    record = tmp_path / "demo.json"
    demo.main(f"--context 1024 --digits 8 --prompts 1 --lookahead 0 --out {tmp_path / 'new'} --json {record}".split())
    out = capsys.readouterr().out
    assert "LagKV, lag 256     no ratio reaches 256 tokens: sinks, last partition and remainder alone are 512" in out
    assert str(tmp_path / "new" / "demo.png") in out and (tmp_path / "new" / "demo.png").exists()
    found = json.loads(record.read_text())
    assert found["command"].startswith("python experiments/demo.py --context 1024")
    assert [row["tokens"] for row in found["rows"] if row["method"] == "KeyDiff"] == [512, 256]
    assert "lookahead" not in found and "LAQ" not in out
    with pytest.raises(SystemExit):
        demo.main(["--context", "100"])
    assert "--context must be between 512 and 4000, got 100" in capsys.readouterr().err


def test_lookahead_finds_at_small_budgets_what_snapkv_loses(demo, monkeypatch):
    """The second table: the paper's claim on this model, and that no method can anticipate the question."""
    monkeypatch.setattr(demo, "BUDGETS", (64,))
    monkeypatch.setattr(demo, "DIGITS", (8,))
    cells = demo.run_small(1024, 11, progress=False)
    score = {(cell.method, cell.point): cell.score for cell in cells}
    assert len(cells) == 8 and all(len(cell.right) == 11 for cell in cells)
    assert score["LAQ", "after"] >= 95 and score["LAQ++", "after"] >= 95
    assert score["SnapKV", "after"] <= 85
    assert all(score[name, "before"] <= 40 for name in demo.ASKING)
    table, found = demo.small_table(cells, 1024), demo.small_findings(cells)
    for name in demo.ASKING:
        (line,) = [x for x in table.splitlines() if x.startswith(f"{name} ")]
        assert line.split()[1:] == [f"{score[name, point]:.0f}" for point in demo.POINTS]
    assert max(map(len, table.splitlines())) <= 120
    assert f"8 digits at 64 tokens: SnapKV {score['SnapKV', 'after']:.0f} %" in found
    assert cells[0].numbers["digits_right_percent"] == cells[0].score


def test_recall_jumps_when_the_answer_comes_into_the_window(tmp_path, capsys):
    """LAQ Fig. 2 in small: windows of the answer, or of a draft, select better than the last ones of the prompt."""
    import recall

    recall.main(
        f"--context 700 --digits 16 --budget 48 --prompts 3 --out {tmp_path} --json {tmp_path / 'r.json'}".split()
    )
    assert (tmp_path / "recall.png").read_bytes().startswith(b"\x89PNG") and "wrote" in capsys.readouterr().out
    record = json.loads((tmp_path / "r.json").read_text())
    recall.main(["--from", str(tmp_path / "r.json"), "--out", str(tmp_path / "again")])
    assert (tmp_path / "again" / "recall.png").read_bytes() == (tmp_path / "recall.png").read_bytes()
    (tmp_path / "old.json").write_text("{}")
    with pytest.raises(SystemExit):
        recall.main(["--from", str(tmp_path / "old.json")])
    assert "has no 'recall'; it is another script's or too old" in capsys.readouterr().err
    assert len(record["recall"]["answer"]) == recall.TAIL + 16 - recall.WINDOW + 1 and record["first"] == -recall.TAIL
    for name in ("answer", "draft"):
        numbers = record["numbers"][name]
        assert numbers["first of the answer"] > numbers["last queries of the prompt"] + 0.1
        assert numbers["last queries of the prompt"] > record["recall"][name][0]
