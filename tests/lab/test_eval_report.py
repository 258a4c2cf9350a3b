"""Results of kvops.eval, from their lines to the report; and the command, end to end."""

# ruff: noqa: E402  (after the check of what they need)

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

for name in ("transformers", "matplotlib", "tqdm"):
    pytest.importorskip(name)

from kvops.bench import markdown
from kvops.eval import __main__ as command
from kvops.eval import labels, plots, report, summary
from kvops.eval.methods import METHODS
from kvops.eval.reader import Reader
from kvops.eval.results import Cell, Results, load
from kvops.eval.specs import Refused

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]
ORIGIN = {
    "machine": {"cpu": "A CPU", "cores": 2},
    "torch": "2.13.0",
    "commit": "abc",
    "command": "python -m kvops.eval",
}
HEAD = {"settings": {"model": "m", "prompts": 4, "seed": 0}, "origin": ORIGIN}
METRICS = ("partial", "exact")


def line(method="KeyDiff", budget=64, partial=(1.0, 0.0), batch=0, context=256, point="before", task="passkey", **more):
    """A cell of two prompts, or of as many as `partial` has."""
    outcome = {
        "scores": {"partial": list(partial), "exact": [x / 2 for x in partial]},
        "tokens": context if budget is None else budget,
        "bytes_held": 1000,
        "bytes_full": 4000,
        "prefill_s": 0.5,
        "decode_s": 0.25,
        "steps": 8,
        "said": ["1"] * len(partial),
        "more": {},
        "depths": [0.0, 1.0][: len(partial)],
    }
    return {**Cell(task, context, point, method, budget, batch)._asdict(), **outcome, **more}


def some_lines():
    """Two contexts, both cut points, two batches; one unreachable budget, one method over its budget."""
    lines = []
    for context in (256, 512):
        for point in ("before", "after"):
            for batch in (0, 1):
                where = {"context": context, "point": point, "batch": batch}
                lines.append(line("Full", None, (1.0, 1.0), **where))
                for budget in (128, 64):
                    lines.append(line("KeyDiff", budget, (1.0, budget / 128), **where))
                    lines.append(line("LagKV lag=32", budget, (0.0, 0.5), **where, tokens=100))
                    lines.append(line("kvpress KeyDiff", budget, (1.0, 0.0), **where))
                    lines.append(line("Another", budget, (0.0, 0.0), **where))
                lines.append(line("LagKV", 128, **where))
                lines.append({**Cell("passkey", context, point, "LagKV", 64, batch)._asdict(), "unreachable": "why"})
    return lines


def files(folder):
    return {x.name: x.read_bytes() for x in sorted(folder.iterdir()) if x.name != "results.jsonl"}


# ---- intervals ----


def test_wilson():
    """Newcombe 1998, Table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    known = {(81, 263): (0.2553, 0.3662), (15, 148): (0.0624, 0.1605), (0, 20): (0, 0.1611), (1, 29): (0.0061, 0.1718)}
    for (right, n), (low, high) in known.items():
        assert summary.wilson(right / n, n) == pytest.approx((low, high), abs=5e-5)
    assert summary.wilson(1.0, 7)[1] == 1.0 and summary.wilson(0.0, 7)[0] == 0.0


def test_student():
    """Printed tables of the t distribution."""
    for freedom, t in {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 10: 2.228, 30: 2.042, 120: 1.980}.items():
        assert summary.student_quantile(0.975, freedom) == pytest.approx(t, abs=5e-4)
    assert summary.student_quantile(0.995, 7) == pytest.approx(3.499, abs=5e-4)
    assert summary.student_cdf(0.0, 5) == 0.5
    assert summary.student_cdf(-2.0, 5) == pytest.approx(1 - summary.student_cdf(2.0, 5))


def test_means_of_losses():
    found = summary.estimate([1.0, 2.0, 3.0, 6.0], percent=False)  # mean 3, s = sqrt(14/3), t = 3.182
    half = 3.1824 * (14 / 3) ** 0.5 / 2
    assert found == pytest.approx((3.0, 3 - half, 3 + half, 4), abs=1e-3)
    assert summary.estimate([2.5], percent=False) == (2.5, None, None, 1)
    assert summary.estimate([2.5, float("inf")], percent=False)[1:] == (None, None, 2)


# ---- rows ----


def test_a_row_by_hand():
    """Two batches of unequal size."""
    one = line(partial=(1.0, 0.0), tokens=60, prefill_s=0.5, decode_s=0.25, steps=8)
    two = line(partial=(1.0,), batch=1, tokens=66, bytes_held=1300, prefill_s=0.75, decode_s=1.0, steps=8)
    (row,) = summary.summarize([HEAD], [two, one]).rows
    assert row.scores["partial"] == pytest.approx((2 / 3, *summary.wilson(2 / 3, 3), 3))
    assert row.scores["exact"].mean == pytest.approx(1 / 3)
    assert (row.n, row.tokens, row.bytes_held, row.bytes_full) == (3, 62, 1100, 4000)
    assert row.prefill_s == (0.25 + 0.75) / 2  # per prompt
    assert row.decode_tokens_per_s == (64 + 8) / 2
    assert row.depths == {0.0: 1.0, 1.0: 0.0}
    assert summary.summarize([HEAD], [one]).record() == {
        "settings": HEAD["settings"],
        "origins": [ORIGIN],
        "rows": [
            {
                **{"task": "passkey", "context": 256, "point": "before", "method": "KeyDiff", "budget": 64},
                "scores": {
                    "partial": dict(zip(("mean", "low", "high", "n"), (0.5, *summary.wilson(0.5, 2), 2))),
                    "exact": dict(zip(("mean", "low", "high", "n"), (0.25, *summary.wilson(0.25, 2), 2))),
                },
                **{"tokens": 60, "bytes_held": 1000, "bytes_full": 4000, "prefill_s": 0.25},
                **{"decode_tokens_per_s": 64.0, "n": 2},
                "depths": {"depth": [0.0, 1.0], "score": [1.0, 0.0]},
            }
        ],
    }


def test_rows_are_in_the_order_of_the_methods():
    lines = some_lines()
    random.Random(0).shuffle(lines)
    rows = summary.summarize([HEAD], lines).rows
    assert [(x.method, x.budget) for x in rows[:10]] == [
        *[("Full", None), ("LagKV", 128), ("LagKV", 64), ("LagKV lag=32", 128), ("LagKV lag=32", 64)],
        *[("KeyDiff", 128), ("KeyDiff", 64), ("kvpress KeyDiff", 128), ("kvpress KeyDiff", 64), ("Another", 128)],
    ]
    assert list(dict.fromkeys((x.context, x.point) for x in rows)) == [
        *[(256, "before"), (256, "after"), (512, "before"), (512, "after")]
    ]


def test_unreachable_on_some_prompts_only():
    lines = [line(), {**Cell("passkey", 256, "before", "KeyDiff", 64, 1)._asdict(), "unreachable": "too long"}]
    (row,) = summary.summarize([HEAD], lines).rows
    assert row.unreachable == "too long (so for 1 of 2 batches)" and not row.scores


def test_measured_twice():
    twice = [line(), line("TOVA", None, batch=1), line()]
    with pytest.raises(Refused, match="measured twice: passkey, context 256, before, KeyDiff, budget 64, batch 0$"):
        summary.summarize([HEAD], twice)
    with pytest.raises(Refused, match=r"batch 4; and 2 more$"):
        summary.summarize([HEAD], 2 * [line(batch=i) for i in range(7)])


def test_nothing_measured(tmp_path):
    with pytest.raises(Refused, match="nothing to report"):
        report.write([HEAD], [], tmp_path)


def test_the_best_is_named_where_the_prompts_tell():
    def leading(right, over=()):
        """Return the leaders among methods with this many of 20 right."""
        lines = [
            line(x, 64, [1.0] * n + [0.0] * (20 - n), tokens=80 if x in over else 64, depths=[None] * 20)
            for x, n in right.items()
        ]
        lines.append(line("Full", None, [1.0] * 20, depths=[None] * 20))
        made = summary.summarize([HEAD], lines)
        rows = [x for x in made.rows if x.budget == 64]
        return [x.method for x in summary.leaders(rows, made.traits["passkey"])]

    assert leading({"KeyDiff": 20, "TOVA": 5}) == ["KeyDiff"]
    assert leading({"KeyDiff": 20, "TOVA": 15}) == []  # intervals 84 to 100 and 53 to 89
    assert leading({"KeyDiff": 20, "L2": 20, "TOVA": 5}) == ["KeyDiff", "L2"]
    assert leading({"KeyDiff": 20, "H2O": 20}) == []
    assert leading({"LagKV": 20, "KeyDiff": 19, "TOVA": 5}, over=["LagKV"]) == ["KeyDiff"]


def test_less_is_better():
    lines = [line(x, 64, task="new", scores={"kl": y}) for x, y in {"TOVA": [0.1, 0.12], "L2": [9.0, 9.1]}.items()]
    made = summary.summarize([HEAD], lines)
    kind = made.traits["new"]
    assert kind == (("kl",), False, "")  # of a task that this version does not know
    assert summary.leaders(made.rows, kind) == []
    assert [x.method for x in summary.leaders(made.rows, kind._replace(better="higher"))] == ["L2"]
    assert [x.method for x in summary.leaders(made.rows, kind._replace(better="lower"))] == ["TOVA"]


# ---- the report ----


@pytest.mark.full
def test_the_same_results_make_the_same_report(tmp_path):
    """In any order of the lines, and for a resumed run (with a second head)."""
    lines, said = some_lines(), []
    for i in range(2):
        random.Random(i).shuffle(lines)
        said.append(report.write([HEAD] * (i + 1), lines, tmp_path / str(i)).replace(f"/{i}/", "/"))
    made = [files(tmp_path / str(i)) for i in range(2)]
    assert made[0] == made[1] and said[0] == said[1]
    pictures = [f"{x}-passkey-{n}.png" for x in ("accuracy", "throughput") for n in (256, 512)]
    pictures += [f"depth-passkey-{x}.png" for x in ("after", "before")]
    assert sorted(made[0]) == sorted([*pictures, "report.md", "summary.json"])
    text = made[0]["report.md"].decode()
    assert sorted(re.findall(r"\]\((.*?\.png)\)", text)) == sorted(pictures)
    assert not any(b"matplotlib" in made[0][x].lower() for x in pictures)  # its version would be one more thing to vary
    assert re.search(r"^\| Full \| 100 \[51, 100\] \| 50 \| 100", text, re.M)
    assert re.search(r"^\| LagKV \| 50 \[15, 85\] \| 25 \| – \(1\) \| – \(1\) \|$", text, re.M) and "- (1) why" in text
    assert re.search(r"^\| LagKV lag=32 \| 100 ‡ \| 0.001 \(25 %\) \| 250 \| 64 \| 100 † \|", text, re.M)
    assert "LagKV 64 before, LagKV 64 after: why" in said[0]


def test_rows_that_are_not_there(tmp_path):
    """An interrupted run, or an unknown task: reported, not hidden."""
    lines = [line(), line(batch=1), line("TOVA"), line("L2", 32), line(task="new", scores={"kl": [2.5, 3.5]})]
    said = report.write([HEAD], lines, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "Not on all 4 prompts: TOVA at 64 (2), L2 at 32 (2)." in text and "- Empty: not measured." in text
    assert (
        "## new\n\nThis version does not know the task." in text and "new, context 256 tokens: kl, of 2 prompts" in said
    )
    assert re.search(r"^\| KeyDiff \| 3 \[-3.353, 9.353\] \|$", text, re.M)  # t = 12.706


def test_perplexity_by_position(tmp_path):
    """Batches of two prompts and of one; the task is not a question."""
    texts = [([1.0, 2.0], [1.0, 2.0]), ([4.0], [4.0, 4.0])]
    lines = [
        line(
            x, y, task="perplexity", point="stream", batch=i, scores={"loss": loss}, depths=[None] * len(loss), steps=0
        )
        | {"more": {"ends": [128, 256], "loss": by_position}}
        for x, y in (("Full", None), ("L2", 64))
        for i, (loss, by_position) in enumerate(texts)
    ]
    (row, _), found = summary.summarize([HEAD], lines).rows, {"ends": [128, 256], "loss": [2.0, pytest.approx(8 / 3)]}
    assert row.positions == {128: 2.0, 256: pytest.approx(8 / 3)}
    report.write([HEAD], lines, tmp_path)
    assert [x["positions"] for x in json.loads((tmp_path / "summary.json").read_text())["rows"]] == [found, found]
    text = (tmp_path / "report.md").read_text()
    assert "| method | loss at 64 | perplexity at 64 |" in text and "| L2 | 2.333 [-1.461, 6.128] | 10.31 |" in text
    assert "](positions-perplexity-256.png)" in text and "throughput" not in text  # nothing is said


def test_several_files(tmp_path):
    """Lines from elsewhere beside ours; settings in which the heads differ are listed."""
    for name, head, lines in (
        ("a", HEAD, [line()]),
        ("b", {"settings": {**HEAD["settings"], "seed": 7}, "origin": {**ORIGIN, "command": "other"}}, [line("TOVA")]),
    ):
        (tmp_path / name).write_text("".join(json.dumps(x) + "\n" for x in (head, *lines)))
    out = []
    for order in ("ab", "ba"):
        assert command.main(["--from", *(str(tmp_path / x) for x in order), "--out", str(tmp_path / "out")]) == 0
        out.append(files(tmp_path / "out"))
    text = out[0]["report.md"].decode()
    assert out[0] == out[1] and "- seed: 0, 7\n" in text and "**the files differ in seed**" in text
    assert "`other`" in text and "`python -m kvops.eval`" in text and "| KeyDiff |" in text and "| TOVA |" in text
    assert json.loads(out[0]["summary.json"])["settings"] == {"model": "m", "prompts": 4, "seed": [0, 7]}


def test_pictures_name_the_best_methods():
    """At most six stand out, each with its own colour; the others are grey; one over its budget comes last."""
    lines = [
        line(x.label, 64, (i / 100,) * 2, tokens=100 if x.label == "L2" else 64)
        for i, x in enumerate(METHODS.values())
        if x.label != "Full"
    ]
    made = summary.summarize([HEAD], [*lines, line("Full", None), line("kvpress KeyDiff", 64, (0.99, 0.99))])
    kind = made.traits["passkey"]
    looks = plots.styles(made.rows, kind)
    named = [x for x, look in looks.items() if look["color"] != plots.GREY]
    best = [x.label for x in METHODS.values() if x.label not in ("Full", "L2")][1 - plots.MOST :]
    assert named == ["kvpress KeyDiff", *best] and "Full" not in looks
    assert len({looks[x]["color"] for x in named}) == len({looks[x]["marker"] for x in named}) == plots.MOST
    assert all(x in plots.in_grey(looks) for x in looks if x not in named)
    assert plots.finding(made.rows, kind, "passkey", 256).endswith(
        "best score at 64 of 256 tokens: kvpress KeyDiff, 99 % (cut before the question)"
    )
    lower = kind._replace(better="lower")
    assert "StreamingLLM" in plots.leading(made.rows, lower) and "TOVA" not in plots.leading(made.rows, lower)


def test_labels_keep_their_distance():
    assert labels.spread([0.5, 0.1, 0.5, 0.52], 0.1) == pytest.approx([0.4066667, 0.1, 0.5066667, 0.6066667])
    assert labels.spread([0.95, 1.0], 0.2, 0.0, 1.0) == pytest.approx([0.8, 1.0])
    assert labels.spread([], 0.1) == []


@pytest.mark.full
def test_a_summary_makes_the_report_that_its_results_made(tmp_path, capsys):
    """summary.json alone is enough to draw everything again."""
    report.write([HEAD], some_lines(), tmp_path / "one")
    record = str(tmp_path / "one" / "summary.json")
    assert command.main(["--from", record, "--out", str(tmp_path / "two")]) == 0
    assert files(tmp_path / "one") == files(tmp_path / "two")
    (tmp_path / "wrong.json").write_text('{"rows": [{"task": 1}]}')
    assert command.main(["--from", str(tmp_path / "wrong.json"), "--out", str(tmp_path)]) == 2
    assert "expected a summary.json of python -m kvops.eval, got KeyError: 'context'" in capsys.readouterr().err


def test_budgets_that_grow_with_the_context():
    def titles(budgets):
        rows = [summary.Row("passkey", n, "before", "L2", b) for n, found in budgets.items() for b in found]
        return [(title, [x.budget for x in rows if chosen(x)]) for title, chosen in plots.sizes(rows)]

    assert titles({256: [64, 32], 512: [64, 32]}) == [("budget 64", [64, 64]), ("budget 32", [32, 32])]
    assert titles({256: [64, 32], 512: [128, 64]}) == [("25 % kept", [64, 128]), ("12.5 % kept", [32, 64])]
    assert titles({256: [64], 512: [128, 64]}) == [("budget 128", [128]), ("budget 64", [64, 64])]


# ---- the file of results ----


def test_results_go_on(tmp_path):
    file, first, second = tmp_path / "results.jsonl", *(Cell("passkey", 256, "before", "L2", x, 0) for x in (64, 32))
    outcome = {"unreachable": "why"}
    results = Results(file, {"seed": 0}, ORIGIN)
    results.add(first, outcome)
    results.add(second, outcome)
    results.close()
    whole = file.read_text()
    file.write_text(whole[:-20])  # killed while it wrote
    assert len(load([file])[1]) == 1
    results = Results(file, {"seed": 0}, ORIGIN)
    assert results.done == {first}
    results.add(second, outcome)
    results.close()
    heads, lines = load([file])
    assert len(heads) == 2 and [x["budget"] for x in lines] == [64, 32]
    before = file.read_text()
    Results(file, {"seed": 0}, ORIGIN).close()  # everything is there: the file stays as it is
    assert file.read_text() == before
    with pytest.raises(Refused, match="holds results of other settings: seed was 0 and is now 1"):
        Results(file, {"seed": 1}, ORIGIN)
    file.write_text(whole.replace('"unreachable"', "unreachable", 1))
    with pytest.raises(Refused, match="line 2: expected a line of JSON"):
        load([file])
    file.write_text('{"rows": []}\n')
    with pytest.raises(Refused, match="line 1: expected a result of kvops.eval, got"):
        load([file])


def test_the_report_in_the_docs(tmp_path):
    """It matches the recorded results, and so does the summary that other pages take their numbers from."""
    report.write(*load([ROOT / "bench" / "results" / "eval.jsonl"]), tmp_path)
    assert (tmp_path / "report.md").read_text() == (ROOT / "docs" / "evaluation" / "report.md").read_text()
    assert (tmp_path / "summary.json").read_text() == (ROOT / "bench" / "results" / "eval.json").read_text()
    for picture in tmp_path.glob("*.png"):
        assert (ROOT / "docs" / "evaluation" / picture.name).exists()


# ---- results of others, and damaged ones ----

CELL = line()
STREAM = line(task="perplexity", point="stream", scores={"loss": [1.0, 2.0]}, depths=[None, None]) | {
    "more": {"ends": [128, 256], "loss": [1.0, 2.0]}
}


def from_file(tmp_path, *lines) -> int:
    content = "".join(json.dumps(x) + "\n" for x in lines)
    (tmp_path / "results.jsonl").write_text(content)
    return command.main(["--from", str(tmp_path / "results.jsonl"), "--out", str(tmp_path / "out")])


@pytest.mark.parametrize(
    "where, key, value, message",
    [
        (0, "settings", 3, "line 1: expected an object as 'settings', got 3"),
        (0, "settings", {"seed": float("nan")}, "line 1: expected settings and an origin of finite numbers"),
        (0, "origin", None, "line 1: expected an object as 'origin', got null"),
        (0, "origin", {"machine": []}, "line 1: expected an object as 'machine', got .."),
        (0, "origin", {"machine": {"gpu": "x"}}, "line 1: expected an object as 'gpu', got .x."),
        (1, "task", "a\n| b", "line 2: expected a name as 'task', got .a.n. b."),
        (1, "method", "\x1b[31m", "line 2: expected a name as 'method'"),
        (1, "context", 256.0, "line 2: expected tokens, at least 1 as 'context', got 256.0"),
        (1, "budget", 0, "line 2: expected tokens, at least 1, or null as 'budget', got 0"),
        (1, "batch", True, "line 2: expected an integer, at least 0 as 'batch', got true"),
        (1, "scores", {}, "line 2: expected lists of as many numbers, by metric as 'scores', got {}"),
        (1, "scores", {"partial": [1.0], "exact": []}, "line 2: expected lists of as many numbers"),
        (1, "scores", {"partial": [1e300]}, "line 2: expected lists of as many numbers"),
        (1, "scores", {"partial": [-5.0, 2.0]}, "passkey: expected scores in .0, 1. for this task"),
        (1, "tokens", 1.5, "line 2: expected an integer, at least 0 as 'tokens', got 1.5"),
        (1, "decode_s", None, "line 2: expected seconds as 'decode_s', got null"),
        (1, "depths", [2.0], "line 2: expected a list of numbers in .0, 1., or null as 'depths'"),
        (1, "unreachable", 3, "line 2: expected why as 'unreachable', got 3"),
        (
            2,
            "more",
            {"ends": [256, 128], "loss": [1, 2]},
            "line 3: expected the tokens where stretches of",
        ),
    ],
)
def test_results_that_are_not_ours(where, key, value, message, tmp_path, capsys):
    lines = [HEAD, CELL, STREAM]
    lines[where] = {**lines[where], key: value}
    assert from_file(tmp_path, *lines) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert re.search(message, said) and said.startswith("python -m kvops.eval: ") and not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"\xff\n", b"[" * 10**5 + b"\n", b"9" * 5000 + b"\n", b"null\n", b"", b"{}\n"])
def test_files_that_are_no_results(content, tmp_path, capsys):
    (tmp_path / "file").write_bytes(content)
    assert command.main(["--from", str(tmp_path / "file"), "--out", str(tmp_path / "out")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("python -m kvops.eval: ") and len(said) < 400


def test_a_group_of_which_nothing_is_reachable(tmp_path, capsys):
    """All of a task, known or unknown, and all at one cut point only."""
    why = {"unreachable": "too | small\x1b"}
    lines = [{**Cell(x, 256, "before", "LagKV", 64, 0)._asdict(), **why} for x in ("passkey", "needle", "new")]
    lines[0]["point"] = "after"
    assert from_file(tmp_path, HEAD, CELL, *lines) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert text.count(r"- (1) too \| small?") == 3 and text.count("| LagKV | – (1) |") >= 3
    assert "| method | partial, % at 64 |" in text and "| method | score, % at 64 |" in text
    assert "needle, context 256 tokens: partial, %, of no prompts" in capsys.readouterr().out
    rows = json.loads((tmp_path / "out" / "summary.json").read_text())["rows"]
    assert [x.get("unreachable") for x in rows].count("too | small?") == 3


def test_names_of_others_are_escaped(tmp_path):
    """They cannot make a link, a tag, a new line or a formula."""
    bad = "<b>|`x`*y*[a](b)$z$_w_ http://a.b www.c.d"
    origin = {"machine": {bad: bad}, bad: bad, "command": "a `` b\n# c", "torch": "\ud800"}
    lines = [line(bad, task=bad, point=bad, scores={bad: [0.5, 1.0]}), line(bad, 64, task=bad, context=512)]
    lines[1]["scores"] = {bad: [0.5, 0.5]}
    assert from_file(tmp_path, {"settings": {"model": bad, bad: bad + "\n# c"}, "origin": origin}, *lines) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    whole = r"\<b>\|\`x\`\*y\*\[a\](b)\$z\$\_w\_ http\://a.b www\.c.d"
    assert f"# Evaluation of {whole}\n" in text and f"\n## {whole}\n" in text and f"\n- {whole}: {whole} # c\n" in text
    assert f"| {whole} | 75 " in text and "\n``` a `` b # c ```\n" in text and "- torch: ?\n" in text
    assert text.replace(whole, "").count("<b>") == 0 and not re.search(r"^# c", text, re.M)
    assert markdown.escape(r"kvpress_eval.py compact_kv_ a\b x & y") == r"kvpress_eval.py compact_kv\_ a\\b x \& y"


def test_losses_beyond_all_numbers(tmp_path):
    huge = {**STREAM, "scores": {"loss": [1e4, float("inf")]}, "more": {"ends": [128, 256], "loss": [1e4, 1.0]}}
    assert from_file(tmp_path, HEAD, huge) == 0
    assert "| KeyDiff | inf | inf |" in (tmp_path / "out" / "report.md").read_text()


# ---- one run at a time ----


def test_a_folder_has_one_run(tmp_path, capsys):
    file, settings = tmp_path / "out" / "results.jsonl", {"seed": 0}
    with Results(file, settings, ORIGIN):
        said = f"--out {file.parent} is being written to by another run, process {os.getpid()};"
        with pytest.raises(Refused, match=re.escape(said)):
            Results(file, settings, ORIGIN)
        assert command.main([*TINY[:-1], str(file.parent)]) == 2 and said in capsys.readouterr().err
    assert [x.name for x in file.parent.iterdir()] == ["results.jsonl"]
    for _ in range(2):  # what is refused leaves no lock
        file.write_text('{"rows": []}\n')
        with pytest.raises(Refused, match="expected a result of kvops.eval"):
            Results(file, settings, ORIGIN)


def test_a_process_that_died_holds_nothing(tmp_path):
    code = "import os, sys, pathlib; from kvops.eval.results import Lock; Lock(pathlib.Path(sys.argv[1])); os._exit(9)"
    died = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
    assert died.returncode == 9 and (tmp_path / "lock").read_text().strip().isdigit()
    Results(tmp_path / "results.jsonl", {}, ORIGIN).close()
    assert not (tmp_path / "lock").exists()


def test_reports_are_written_whole(tmp_path, monkeypatch):
    """A report that fails leaves the previous one unchanged."""
    report.write([HEAD], [line()], tmp_path)
    before = files(tmp_path)

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        report.write([HEAD], [line("TOVA")], tmp_path)
    assert files(tmp_path) == before


# ---- the command ----

TINY = ["--context", "256", "--prompts", "2", "--methods", "full", "keydiff", "laq", "--budgets", "64", "128", "0.25"]
TINY += ["--tasks", "passkey:digits=4", "--out", "out"]


class Stop(Exception):
    pass


def test_the_command(tmp_path, monkeypatch, capsys):
    """A stopped and resumed run gives the same report as an undisturbed one, byte by byte."""
    ticks = iter(range(10**9))
    monkeypatch.setattr(Reader, "clock", lambda self: float(next(ticks)))  # so that times are equal
    made, shown, prefill = {}, {}, Reader.prefill
    text = tmp_path / "text.txt"
    text.write_text(command.TEXT.read_text()[:4000])
    tiny = [*TINY, "--text", str(text)]
    for name, stops in (("whole", None), ("resumed", 5)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        if stops:
            calls = Counter()

            def stopping(self, *args, calls=calls, stops=stops):
                calls["prefill"] += 1
                if calls["prefill"] > stops:
                    raise Stop
                return prefill(self, *args)

            monkeypatch.setattr(Reader, "prefill", stopping)
            with pytest.raises(Stop):
                command.main(tiny)
            monkeypatch.setattr(Reader, "prefill", prefill)
            with open("out/results.jsonl", "a") as file:
                file.write('{"task": "passkey:dig')
            capsys.readouterr()
        assert command.main(tiny) == 0
        made[name], shown[name] = files(tmp_path / name / "out"), capsys.readouterr().out
    assert made["whole"] == made["resumed"]
    assert shown["resumed"] == "4 of 10 cells were measured before: out/results.jsonl\n" + shown["whole"]
    rows = json.loads(made["whole"]["summary.json"])["rows"]
    assert [(x["point"], x["method"], x["budget"], x["n"]) for x in rows] == [
        (point, method, budget, 2)
        for point in ("before", "after")
        for method, budget in [("Full", None), ("LAQ", 128), ("LAQ", 64), ("KeyDiff", 128), ("KeyDiff", 64)]
    ]
    assert all(x["scores"]["partial"]["mean"] == 1 for x in rows if x["method"] == "Full")
    assert all(x["tokens"] == x["budget"] and 4 * x["budget"] >= x["bytes_held"] / 768 for x in rows if x["budget"])
    capsys.readouterr()
    assert command.main(tiny) == 0 and "10 of 10 cells were measured before" in capsys.readouterr().out
    assert command.main([*tiny, "--seed", "1"]) == 2
    assert "holds results of other settings: seed was 0 and is now 1" in capsys.readouterr().err
    text.write_text(command.TEXT.read_text()[1:4001])  # another text of the same name
    assert command.main(tiny) == 2 and re.search(r"text was 'text.txt \(\w{12}\)' and is", capsys.readouterr().err)


def test_out_of_memory(tmp_path, monkeypatch, capsys):
    """The cell is reported but not recorded, and the others continue; the same command fills it in."""
    prefill, of = Reader.prefill, METHODS["keydiff"].label

    def full(self, prompts, rule, *args):
        if rule.label == of:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return prefill(self, prompts, rule, *args)

    monkeypatch.setattr(Reader, "prefill", full)
    tiny = [*TINY[:-1], str(tmp_path / "out"), "--points", "before", "--budgets", "64"]
    assert command.main(tiny) == 0
    out, err = capsys.readouterr()
    assert "1 of 3 cells ran out of memory" in err and of not in out
    monkeypatch.setattr(Reader, "prefill", prefill)
    assert command.main(tiny) == 0
    out, err = capsys.readouterr()
    assert out.startswith("2 of 3 cells were measured before") and of in out and not err


def test_a_text_that_is_not_text(tmp_path, capsys):
    (tmp_path / "text").write_bytes(b"\xff" * 100)
    assert command.main([*TINY[:-1], str(tmp_path / "out"), "--text", str(tmp_path / "text")]) == 2
    assert "--text: expected UTF-8, got " in capsys.readouterr().err


@pytest.mark.parametrize("name, content", [("config.json", "[1]"), ("model.safetensors", "x"), ("tokenizer.json", "{")])
def test_a_model_that_is_damaged(name, content, tmp_path, capsys):
    for file in command.MODEL.glob("*.*"):
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / name).unlink()
    (tmp_path / name).write_text(content)
    assert command.main([*TINY[:-1], str(tmp_path / "out"), "--model", str(tmp_path)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"python -m kvops.eval: --model {tmp_path}: ") and len(said) < 600


def test_a_model_that_is_not_there(tmp_path, capsys):
    assert command.main([*TINY[:-1], str(tmp_path / "out"), "--model", str(tmp_path / "nowhere")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"python -m kvops.eval: --model {tmp_path}/nowhere: expected a folder that holds a model")


def test_names_in_any_case(tmp_path):
    """KEYDIFF, keydiff and KeyDiff are one method, measured once; labels and file names are those of the lower case."""
    sizes = ["--context", "256", "--prompts", "1", "--budgets", "64", "--points", "before", "--out", str(tmp_path)]
    names = ["KEYDIFF", "keydiff", "KeyDiff:sinks=4", "LAQ++"]
    assert command.main(["--methods", *names, "--tasks", "Passkey:digits=4", *sizes]) == 0
    rows = json.loads((tmp_path / "summary.json").read_text())["rows"]
    assert [x["method"] for x in rows] == ["LAQ++", "KeyDiff", "KeyDiff sinks=4"]
    assert {x["task"] for x in rows} == {"passkey:digits=4"}


def test_the_list(capsys):
    assert command.main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(re.search(rf"^  {re.escape(x)}( |$)", shown, re.M) for x in (*METHODS, *command.TASKS))
    assert re.search(r"^  keydiff .*\brecent\b", shown, re.M) and re.search(r"^  passkey .*digits=32", shown, re.M)


@pytest.mark.parametrize(
    "said, expected",
    [
        (["--methods", "keydif"], "method must be one of full, streamingllm, .*, got 'keydif'"),
        (["--methods", "keydiff:rec=0.1"], "KeyDiff has no option 'rec', expected some of .*recent"),
        (["--methods", "keydiff:recent"], "expected keydiff:option=value,option=value, got 'recent'"),
        (["--tasks", "passkey:digit=4"], "passkey has no option 'digit', expected some of digits, depths"),
        (["--methods", "keydiff:recent=x"], "'keydiff:recent=x': KeyDiff: recent must be an int .*, got str 'x'"),
        (
            ["--methods", "keydiff:recent=0.1,recent=0.2"],
            "keydiff:recent=0.1,recent=0.2': expected each option once, got recent twice",
        ),
        (["--methods", "keydiff:recent=" + "-" * 10**5 + "1"], "KeyDiff: recent must be an int or a float, got str"),
        (["--methods", "lagkv:lag=0"], "LagKV: lag must be at least 1, got 0"),
        (["--methods", "lagkv:v_weight=1e400"], "LagKV: v_weight must be at most 2147483647, got inf"),
        (["--methods", "lacache:span=[]"], "LaCache: span must be an int or None, got list"),
        (["--tasks", "passkey:digits=9999999"], "passkey: digits must be at most 1048576, got 9999999"),
        (["--budgets", "9" * 30], "expected tokens .an integer. or a fraction in .0, 1., got 9+"),
        (["--context", "9" * 30], "--context: expected at most 2147483647, got 9+"),
        (["--out", ""], "--out: expected a path, got nothing"),
        (["--text", "x" * 300], "--text: expected a file, got x+"),
        (["--methods", "keydiff:recent=2.5"], "'keydiff:recent=2.5': KeyDiff: recent .* must be in .0, 1., got 2.5"),
        (["--budgets", "1.5"], "expected tokens .an integer. or a fraction in .0, 1., got 1.5"),
        (["--prompts", "0"], "--prompts: expected at least 1, got 0"),
        (["--context", "256", "-3"], "--context: expected at least 1, got -3"),
        (["--seed", "-1"], "--seed: expected at least 0, got -1"),
        (["--out", __file__], "--out: expected a folder, got the file .*test_eval_report.py"),
        (["--text", "nowhere.txt"], "--text: expected a file, got nowhere.txt"),
        (["--device", "gpu"], "--device: expected cpu, cuda or cuda:NUMBER, got gpu"),
        (["--device", "cuda:99"], "--device cuda:99: torch .* sees [0-9]+ NVIDIA GPUs"),
        (["--from", "nowhere.jsonl"], "--from: expected a results file, got nowhere.jsonl"),
    ],
)
def test_what_the_command_refuses(said, expected, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(said)
    assert re.search(expected, " ".join(capsys.readouterr().err.split()))


# ---- settings that fix what is kept, and underuse ----


def fixed_lines():
    """LagKV with its lag and ratio given, keys of 32 and 64 digits, both contexts; beside it methods with a budget."""
    lines = []
    for task, digits in (("passkey", 32), ("passkey:digits=64", 64)):
        for context in (256, 512):
            where = {"task": task, "context": context}
            lines += [line("Full", None, (1.0, 1.0), **where), line("SnapKV", 128, (0.5, 0.5), **where)]
            lines.append(line("KeyDiff", 128, (1.0, 0.5), **where, tokens=100))
            for ratio in ("0.5", "0.125"):
                fixed = f"LagKV lag=128 ratio={ratio}"
                lines.append(line(fixed, None, (float(ratio), 1.0), **where, tokens=32 * digits // 64))
    return lines


def test_settings_that_fix_what_is_kept(tmp_path):
    """They have a table of their own with what they kept and r L, and neither budgets nor ranks."""
    made = summary.summarize([HEAD], fixed_lines())
    rows = {x.method: x for x in made.rows}
    assert [x.fixed for x in rows.values()] == [False, True, True, False, False]
    assert [rows[f"LagKV lag=128 ratio={x}"].selected for x in ("0.5", "0.125")] == [64, 16]
    assert rows["Full"].selected is rows["KeyDiff"].selected is None
    said = report.write_summary(made, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| method | kept | held, MB | r L | partial, % | exact, % |" in text
    assert re.search(
        r"^\| LagKV lag=128 ratio=0.5 \| 32 \| 0.001 \(25 %\) \| 64 \| 75 \[\d+, \d+\] \| 38 \|$", text, re.M
    )
    assert text.index("| Full | 100") < text.index("Settings that fix") and "| LagKV lag=128 ratio=0.5 | 75" not in text
    assert re.search(r"LagKV lag=128 ratio=0.125 +56  cut before the question, 16 kept", said)
    assert "![score by r L](partitions.png)" in text and (tmp_path / "partitions.png").exists()
    for name in ("accuracy-passkey-256.png", "depth-passkey-before.png"):
        assert (tmp_path / name).exists()


def test_only_settings_that_fix_what_is_kept(tmp_path):
    lines = [x for x in fixed_lines() if x["budget"] is None]
    report.write([HEAD], lines, tmp_path)
    assert (tmp_path / "depth-passkey-before.png").exists()  # LagKV, Fig. 8-11
    assert not (tmp_path / "accuracy-passkey-256.png").exists()


def test_underuse_is_marked_and_ranked(tmp_path):
    made = summary.summarize([HEAD], fixed_lines())
    rows = {x.method: x for x in made.rows if (x.task, x.context) == ("passkey", 256)}
    assert rows["KeyDiff"].under and rows["KeyDiff"].mark == " ‡" and not rows["SnapKV"].under
    assert rows["SnapKV"].compared["best"].to == "KeyDiff"
    said = report.write_summary(made, tmp_path)
    assert re.search(r"^\| KeyDiff \| 75 \[\d+, \d+\] ‡ \| 38 \|$", (tmp_path / "report.md").read_text(), re.M)
    assert re.search(r"KeyDiff +75<", said) and "< over 5 % less" in said
    whole = summary.summarize([HEAD], [line("KeyDiff", 128, tokens=100, bytes_held=4000)]).rows[0]
    assert not whole.under  # a prompt shorter than the budget


def test_the_length_of_a_key():
    specs = ("passkey", "passkey:digits=64", "needle", "perplexity", "unknown", "passkey:digits", "common-words")
    assert [plots.key_digits(x) for x in specs] == [32, 64, 7, None, None, None, None]


def test_variants_are_in_the_order_of_their_numbers():
    lines = [line(f"LagKV lag={x}", 64) for x in (1024, 128, 64)]
    assert [x.method for x in summary.summarize([HEAD], lines).rows] == [f"LagKV lag={x}" for x in (64, 128, 1024)]
