"""The demo on a few prompts: which methods find the key, and that its screens show the measurements."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

for name in ("transformers", "matplotlib"):
    pytest.importorskip(name)

from kvops.demo import __main__ as demo  # noqa: E402
from kvops.demo import lookahead, methods, passkeys  # noqa: E402
from kvops.demo.picture import picture  # noqa: E402
from kvops.methods.lagkv import SINKS  # noqa: E402
from kvops.ops.lag import kept_within  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def few_rounds():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods, "ROUNDS", 3)
        yield


@pytest.fixture(scope="module")
def prompts():
    return passkeys.make_prompts(11, 2048, 32)


@pytest.fixture(scope="module")
def rows(prompts):
    return list(methods.measured(methods.make_rows(2048), prompts, 3))


@pytest.fixture(scope="module")
def front(rows):
    """The rows of the first screen."""
    return [x for name in demo.FRONT for x in rows if x.name == name and x.share in (1, demo.FRONT_SHARE)]


def test_keydiff_and_lagkv_find_what_streaming_and_random_lose(rows):
    score = {(row.name, row.share): row.score for row in rows}
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


def test_tokens_and_bytes(rows):
    full = 3 * 2 * 2048 * 64 * 2 * 4  # layers, KV heads, tokens, channels, K and V, fp32
    for row in rows:
        assert row.bytes_full == full
        assert row.bytes_kept * 2048 == full * row.tokens
        assert row.share * 2048 - 14 <= row.tokens <= row.share * 2048  # LagKV cannot hit it exactly
        assert row.kept.shape == (3, 2, 2048) and (row.kept.sum(-1) == row.tokens).all()
        assert (row.ms > 0 and row.plain_ms > 0) == (row.share < 1)


def test_the_table_says_what_was_measured(rows):
    head = demo.heading(2048, 32, 11).splitlines()
    for row in rows:
        line = demo.line(row, 2048)
        assert line.startswith(row.name) and f" {row.tokens:,} " in line and len(line) <= len(head[0])
        assert f"{row.bytes_full:,}" in line and f"{row.bytes_kept:,}" in line and f"{row.score:.1f} %" in line
        if row.compress:
            assert f"{row.ms:.2f} ms" in line and f"{row.plain_ms / row.ms:.1f} x" in line
    (starred,) = [x for x in rows if x.name == "LagKV, lag 256" and x.share == 0.25]
    assert starred.note.startswith("no token per partition") and "LagKV, lag 256 *" in demo.line(starred, 2048)


def test_the_first_screen_says_what_was_measured(front, prompts):
    assert [x.name for x in front] == list(demo.FRONT)
    for row in front:
        line = demo.front_line(row)
        assert len(line) <= 80 and f"{row.bytes_kept / 2**20:.2f} MiB" in line and f" {row.score:3.0f} %" in line
        assert line.count("█") == round(row.score / 100 * 15)
        if row.compress:
            assert f"{row.ms:.2f} ms" in line and f"{row.plain_ms / row.ms:.1f} x the time" in line
    key, most, least, _ = demo.answers(front, prompts[3]).splitlines()
    best = max(front[1:], key=lambda x: x.score)
    assert best.name == "KeyDiff" and key.split()[-2:] == [prompts[3].digits, "v"]
    assert most.startswith(f"KeyDiff       {best.said}  ") and best.said == prompts[3].digits
    assert least.split()[0] in (demo.FRONT[x.name] for x in front if x.score == min(y.score for y in front))
    assert all(len(x) <= 80 for x in (key, most, least))


def test_the_strip_shows_what_was_kept(front):
    keydiff, streaming = front[-1], front[1]
    assert streaming.name == "StreamingLLM"
    kept, strip = streaming.kept.mean((0, 1)), demo.strip(streaming)
    assert len(strip) == demo.STRIP and strip[-1] == "█" and set(strip[1 : demo.STRIP // 2]) == {" "}
    assert kept[-100:].all() and not kept[100:1000].any()
    assert keydiff.kept.shape == (3, 2, 2048) and " " not in demo.strip(keydiff)


def test_the_picture(rows, prompts, tmp_path):
    picture(rows, prompts[3], tmp_path / "new" / "demo.png")
    found = (tmp_path / "new" / "demo.png").read_bytes()
    assert len(found) > 20_000 and found.startswith(b"\x89PNG")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_program(encoding, tmp_path):
    """From any folder, into a pipe: rows, answers, the picture, three next steps."""
    command = [sys.executable, "-m", "kvops", "demo", "--prompts", "2", "--context", "1024", "--out", "new"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, encoding=encoding)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 20
    assert [x.split()[0] for x in lines[4:10]] == ["Full", "StreamingLLM", "SnapKV", "ProtoKV", "LagKV", "KeyDiff"]
    assert f"Picture      {Path('new', 'demo.png')}" in lines and (tmp_path / "new" / "demo.png").exists()
    assert any(x.startswith("Your model   with kvops.hf.compress(model, ") for x in lines)


def test_plain_pytorch_does_the_same():
    """The timed PyTorch versions keep the same slots (Random: as many)."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 2, 2048, 64).unbind(0)
    q = torch.randn(1, 4, 32, 64)
    for row in methods.make_rows(2048):
        if row.compress:
            ours, plain = row.compress(k, v, q, seed=0), row.plain(k, v, q)
            assert ours.k.shape == plain[0].shape and ours.v.shape == plain[1].shape
            # Scores that are equal up to rounding may swap. ProtoKV may take products of 16-bit numbers, and a token's
            # second best prototype for its best (random keys are as far from one as from another).
            least = 0.9 if row.name.startswith("ProtoKV") else 0.99
            for h in range(2) if row.name != "Random" else ():
                for x, y in zip((ours.k, ours.v), plain):
                    assert torch.isin(x[0, h, :, 0], y[0, h, :, 0]).float().mean() > least


def test_lagkv_budget_solves_equation_10():
    for n in (600, 1024, 2048, 3000):
        for lag in (128, 256):
            for share in (0.5, 0.25):
                budget = int(share * n)
                m, fixed = kept_within(n, SINKS, lag, budget)
                row = methods.lagkv_row(share, lag, n, budget)
                partitions = max(1, (n - 16) // lag)
                assert fixed == n - (partitions - 1) * lag
                if m < 0:
                    assert not row.reachable and re.search(rf"no ratio reaches {budget:,} .* {fixed:,}$", row.note)
                    assert fixed > budget or partitions == 1
                else:
                    k = torch.randn(1, 1, n, 64)
                    kept = row.compress(k, k, None, seed=0).k.shape[2]
                    assert kept == fixed + m * (partitions - 1)
                    assert kept <= budget < kept + partitions - 1


def test_a_cell_out_of_reach_says_so(capsys, tmp_path):
    record = tmp_path / "demo.json"
    options = "--all --context 1024 --digits 8 --prompts 1 --lookahead 0"
    assert demo.main([*options.split(), "--out", str(tmp_path), "--json", str(record)]) == 0
    out = capsys.readouterr().out
    assert "LagKV, lag 256     no ratio reaches 256 tokens: sinks, last partition and remainder alone are 512" in out
    found = json.loads(record.read_text())
    assert found["command"].startswith("python -m kvops demo --all --context 1024")
    assert [row["tokens"] for row in found["rows"] if row["method"] == "KeyDiff"] == [512, 256]
    assert "lookahead" not in found and "LAQ" not in out
    assert demo.main(["--context", "600", "--prompts", "1", "--out", str(tmp_path)]) == 0
    assert "LagKV         no ratio reaches 150 tokens\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        demo.main(["--context", "100"])
    assert "--context must be between 512 and 4000, got 100" in capsys.readouterr().err


def test_lookahead_finds_at_small_budgets_what_snapkv_loses(monkeypatch):
    """The second table: the paper's claim on this model, and that no method can anticipate the question."""
    monkeypatch.setattr(lookahead, "BUDGETS", (64,))
    monkeypatch.setattr(lookahead, "DIGITS", (8,))
    lines = list(lookahead.measured(1024, 11))
    score = {(cell.method, cell.point): cell.score for (cell,) in lines}
    assert len(score) == 8 and all(len(cell.right) == 11 for (cell,) in lines)
    assert score["LAQ", "after"] >= 95 and score["LAQ++", "after"] >= 95
    assert score["SnapKV", "after"] <= 85
    assert all(score[name, "before"] <= 40 for name in lookahead.ASKING)
    for cells in lines:
        of, text = cells[0], lookahead.line(cells)
        assert text.split() == [of.point, "the", "question", "8", of.method, f"{of.score:.0f}"] and len(text) <= 80
    assert lines[0][0].numbers["digits_right_percent"] == lines[0][0].score


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
