"""Paired statistics of kvops.eval: known answers, calibration, and what the report says."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from kvops.eval import report, statistics, summary
from kvops.eval.results import load
from kvops.eval.statistics import TOO_FEW, bootstrap, compare, holm, sign_flip

ROOT = Path(__file__).parents[2]
HEAD = {"settings": {"model": "m", "prompts": 20, "seed": 0}, "origin": {"command": "python -m kvops.eval"}}


def line(method, scores, batch=0, budget=64, task="passkey", metric="partial"):
    where = {"task": task, "context": 256, "point": "before", "method": method, "budget": budget, "batch": batch}
    facts = {"tokens": 64, "bytes_held": 1, "bytes_full": 4, "prefill_s": 1.0, "decode_s": 1.0, "steps": 1}
    return {**where, "scores": {metric: [float(x) for x in scores]}, **facts}


def compared(lines, heads=(HEAD,)):
    return {x.method: x.compared for x in summary.summarize(list(heads), lines).rows}


# ---- the parts ----


@pytest.mark.parametrize(
    "differences, p",
    [
        ([1, 2, 3], 2 / 8),  # only +++ and --- reach 6
        ([3, -1, 2], 4 / 8),  # sums of 6, 4, -4, -6 reach 4
        ([0, 1, 0, 2, 3, 0], 2 / 8),  # zeros change nothing
        ([1] * 6, 2 / 64),
        ([1] * 5 + [-1], 14 / 64),  # 1 + 6 choices of signs reach 4, and their opposites
        ([0.1, 0.2, -0.3], 1.0),  # 0 but for rounding
        ([0.1, 0.2, 0.3], 2 / 8),
        ([0.0] * 9, 1.0),
        ([], 1.0),
        ([1] * 22, 2 / 2**22),
    ],
)
def test_sign_flip_by_hand(differences, p):
    assert sign_flip(differences) == p == sign_flip([-x for x in differences])


def test_sign_flip_is_every_choice_of_signs():
    rng = np.random.RandomState(0)
    for n in (7, 10):
        d = rng.standard_normal(n) + 0.4
        signs = 1 - 2 * (np.arange(2**n)[:, None] >> np.arange(n) & 1)
        expected = float((np.abs(signs @ d) >= abs(d.sum()) - 1e-9).mean())
        assert sign_flip(list(d)) == expected


def test_many_prompts_are_sampled():
    """20 of 30 equal differences are positive: |sum| >= 10, twice the binomial tail. 30 of 30: the smallest p."""
    tail = 2 * sum(math.comb(30, k) for k in range(20, 31)) / 2**30
    assert sign_flip([1.0] * 20 + [-1.0] * 10) == pytest.approx(tail, abs=0.005)
    assert sign_flip([1.0] * 30) == 1 / (statistics.FLIPS + 1)


def test_holm_by_hand():
    """0.005 * 4, 0.01 * 3, 0.03 * 2; 0.04 * 1 is not below the one before."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.5]) == [1.0, 1.0] and holm([]) == []


def test_intervals_by_hand():
    assert bootstrap([0.25] * 8) == (0.25, 0.25)
    assert bootstrap([0.0, 1.0]) == (0.0, 1.0)  # a quarter of the resamples each
    low, high = bootstrap([0.0] * 50 + [1.0] * 50)
    assert low == pytest.approx(0.5 - 1.96 * 0.05, abs=0.011) and high == pytest.approx(0.5 + 1.96 * 0.05, abs=0.011)


def test_the_same_numbers_each_time():
    d = list(np.random.RandomState(1).standard_normal(40))
    found = sign_flip(d), bootstrap(d)
    statistics._signs.cache_clear()
    statistics._counts.cache_clear()
    np.random.seed(7)
    assert (sign_flip(d), bootstrap(d)) == found


# ---- calibration: methods that are equally good ----


def test_intervals_and_tests_have_their_level():
    rng = np.random.RandomState(2)
    rejected, covered, runs = 0, 0, 400
    for _ in range(runs):
        d = list(rng.standard_normal(20))
        rejected += sign_flip(d) <= 0.05
        low, high = bootstrap(d)
        covered += low <= 0 <= high
    assert 0.025 <= rejected / runs <= 0.075  # 5 % +- 2.3 standard errors
    assert 0.89 <= covered / runs <= 0.97  # the percentile interval is slightly too narrow


def test_equal_methods_are_rarely_told_apart(monkeypatch):
    """Also from the best, which is selected by the same scores: without its correction 5 % would not hold."""
    monkeypatch.setattr(statistics, "bootstrap", lambda d: (0.0, 0.0))  # no verdict depends on it
    rng = np.random.RandomState(3)
    runs, wrong, plain = 200, {"best": 0, "SnapKV": 0}, 0
    for _ in range(runs):
        hard = rng.standard_normal(16)  # all methods find the same prompts hard
        scores = {x: dict(enumerate(hard + rng.standard_normal(16))) for x in ("SnapKV", *"abcdef")}
        best = max(scores, key=lambda x: sum(scores[x].values()))
        found = compare(scores, 1, best, "SnapKV")
        for name in wrong:
            wrong[name] += any(x[name].verdict in ("better", "worse") for x in found.values() if name in x)
        others = [x for x in scores if x != best]
        ps = [sign_flip([scores[x][i] - scores[best][i] for i in range(16)]) for x in others]
        plain += min(holm(ps)) <= 0.05
    assert all(x / runs <= 0.08 for x in wrong.values())  # 5 % + 2 standard errors
    assert plain / runs > 0.08  # Holm over the comparisons with the best alone


# ---- verdicts ----


def test_verdicts():
    hard = np.linspace(0, 0.8, 20)
    lines = [line("SnapKV", hard), line("KeyDiff", hard + 0.1), line("TOVA", hard), line("Full", [1] * 20, budget=None)]
    lines.append(line("L2", np.roll(hard, 1)))
    found = compared(lines)
    assert found["Full"] == {} and set(found["SnapKV"]) == {"best"}
    better, p = found["KeyDiff"]["SnapKV"], 2 / 2**20
    assert better == ("SnapKV", pytest.approx(0.1), pytest.approx(0.1), pytest.approx(0.1), p, 3 * p, 20, "better")
    assert found["KeyDiff"]["best"].verdict == "best"
    assert (
        found["SnapKV"]["best"][:2] == ("KeyDiff", pytest.approx(-0.1)) and found["SnapKV"]["best"].verdict == "worse"
    )
    assert found["TOVA"]["SnapKV"] == ("SnapKV", 0, 0, 0, 1, 1, 20, "undecided")  # identical
    assert found["L2"]["SnapKV"].verdict == "undecided" and found["L2"]["SnapKV"].p == 1  # the same mean
    own = {x.method: x.scores["partial"] for x in summary.summarize([HEAD], lines).rows}
    assert own["SnapKV"].high > own["KeyDiff"].low  # the methods' own intervals hide it


def test_lower_is_better():
    lines = [line(x, np.arange(12) + y, task="agreement", metric="kl") for x, y in {"SnapKV": 1, "TOVA": 0}.items()]
    found = compared(lines)
    assert found["TOVA"]["SnapKV"].verdict == "better" and found["TOVA"]["SnapKV"].difference == -1
    assert found["SnapKV"]["best"].to == "TOVA" and found["SnapKV"]["best"].verdict == "worse"
    lines[0]["scores"]["kl"][3] = math.inf
    found = compared(lines)["SnapKV"]["best"]
    assert found.verdict == "not finite" and found.difference is None
    assert compared([line(x, [1, 2] * 6, task="new") for x in ("SnapKV", "L2")]) == {
        "SnapKV": {},
        "L2": {},
    }  # direction unknown


def test_few_prompts_cannot_decide():
    def verdict(n, others=()):
        lines = [line("SnapKV", [0] * n), line("L2", [1] * n), *(line(x, [0] * n) for x in others)]
        return compared(lines)["L2"]["SnapKV"].verdict

    assert verdict(5) == TOO_FEW and verdict(6) == "better"
    assert verdict(6, ["H2O"]) == TOO_FEW and verdict(7, ["H2O"]) == "better"  # 2 * 2 / 2^6 > 5 %


def test_runs_of_unequal_length(tmp_path):
    """Compared on the prompts that both have; only the last batch may be short."""
    hard = np.linspace(0, 0.8, 20)
    lines = [line(x, (hard + y)[8 * i : 8 * i + 8], i) for x, y in (("SnapKV", 0), ("L2", 0.1)) for i in range(3)]
    lines += [line("TOVA", hard[:8]), line("H2O", hard[16:], 2)]  # a single batch: the first, the last
    lines += [line("KeyDiff", (hard + 0.2)[i : i + 1], i) for i in range(7)]  # another size of batches
    found = compared(lines)
    assert found["SnapKV"]["best"].to == "L2"  # KeyDiff is above it, but on fewer prompts
    assert [found[x]["SnapKV"].n for x in ("L2", "KeyDiff", "TOVA", "H2O")] == [20, 7, 8, 4]
    assert found["KeyDiff"]["SnapKV"].difference == pytest.approx(0.2) and found["TOVA"]["SnapKV"].difference == 0
    assert found["H2O"]["SnapKV"][1:] == (0, 0, 0, None, None, 4, TOO_FEW)
    assert found["KeyDiff"]["best"].verdict == "undecided" and found["KeyDiff"]["best"].difference > 0
    report.write([HEAD], lines, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "TOVA at 64 with L2 (8), SnapKV (8)" in text and "| L2 | best | better, +10 [+10, +10], p < 0.0001 |" in text


def test_files_with_other_prompts_are_not_compared(tmp_path):
    lines = [line("SnapKV", [0] * 12), line("L2", [1] * 12)]
    other = {**HEAD, "settings": {**HEAD["settings"], "seed": 1}}
    assert compared(lines, [HEAD, HEAD])["L2"] and compared(lines, [HEAD, other]) == {"SnapKV": {}, "L2": {}}
    report.write([HEAD, other], lines, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "different prompts, so they are not compared in pairs" in text and "Paired" not in text


def test_over_the_budget_is_not_the_best():
    lines = [line("SnapKV", [0] * 12), line("L2", [1] * 12), line("TOVA", [0.5] * 12)]
    lines[1]["tokens"] = 100
    found = compared(lines)
    assert found["SnapKV"]["best"].to == "TOVA" and found["L2"]["SnapKV"].verdict == "better"
    assert found["L2"]["best"].verdict == "undecided"  # never better than the best


# ---- the recorded run ----


def test_what_unpaired_intervals_hide():
    """LAQ and LAQ++ after the question at 64 tokens: 13 points in 33 prompts, although their intervals overlap."""
    heads, cells = load([ROOT / "bench" / "results" / "eval.jsonl"])
    three = [x for x in cells if x["method"] in ("LAQ", "LAQ++", "SnapKV") and x["batch"] < 3]
    made = summary.summarize(heads, three)
    laq, plus = (x for x in made.rows if x.method in ("LAQ", "LAQ++") and (x.point, x.budget) == ("after", 64))
    assert plus.scores["partial"].high > laq.scores["partial"].low
    found = plus.compared["best"]
    assert found.to == "LAQ" and found.n == 33 and found.verdict == "worse"
    assert found.difference == pytest.approx(-0.128, abs=5e-4) and found.high < -0.05
    assert found.p <= 2e-4 and found.p_holm < 0.01
    assert laq.compared["SnapKV"].verdict == plus.compared["SnapKV"].verdict == "better"


def test_the_record_has_the_comparisons():
    """And the report made from it is the one made from the cells (also see test_eval_report.py)."""
    record = json.loads((ROOT / "bench" / "results" / "eval.json").read_text())
    rows = [x for x in record["rows"] if x["budget"] is not None]
    assert all(x["compared"].keys() == {"best", "SnapKV"} - {x["method"]} for x in rows)
    assert summary.of_record(record).record() == record
