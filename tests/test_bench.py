"""The benchmark: its baselines compute what kvops computes, and its command writes what it measured."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from kvops.bench import ROWS
from kvops.bench.measure import Contender, measure
from kvops.bench.rows import SINK, Case

N = 1024


@pytest.mark.parametrize("name", ROWS)
def test_baseline_computes_the_same(name):
    row = ROWS[name]
    heads, n = row.shape or (2, N)
    for form, call in row.forms.items():
        case = Case(n, torch.float32, heads, d=64)
        theirs = row.eager(*row.args(case))  # first: the form may be in place
        torch.testing.assert_close(call(case), theirs, rtol=1e-4, atol=1e-6)  # exact for indices, as they are < 1e4
        case.restore()
        assert torch.equal(case.k, Case(n, torch.float32, heads, d=64).k), f"restore after {form!r}"


def test_a_quarter_is_kept():
    for n in (512, 4096, 65536):
        case = Case(n, torch.float32, heads=1, d=16)
        m = int(case.ratio * case.lag)
        kept = n - (case.partitions - 1) * (case.lag - m)
        assert m > 0 and case.budget - case.partitions < kept <= case.budget == n // 4
        assert SINK < kept and case.lagkv_out[0].shape[2] == kept


def test_everything_runs_in_turns():
    order = []
    rivals = {name: Contender(lambda name=name: order.append(name)) for name in "ab"}
    for rival in rivals.values():
        rival.calls = 2
    for _ in range(2):
        for rival in rivals.values():
            assert rival.sample() > 0
    assert order == ["a", "a", "b", "b"] * 2


def test_restore_precedes_every_in_place_call():
    """Compressing what is compressed already would move nothing."""
    case = Case(N, torch.float32, heads=1, d=64)
    whole, row, seen = case.k.clone(), ROWS["keydiff_compress"], []

    def compress(c: Case) -> None:
        seen.append(torch.equal(c.k, whole))
        row.forms["in place"](c)

    measure("keydiff_compress", replace(row, forms={"in place": compress}), case, 2, compiled=False, tick=int)
    assert len(seen) >= 3 and all(seen) and not torch.equal(case.k, whole)


def test_command(tmp_path):
    record, picture = tmp_path / "out" / "bench.json", tmp_path / "out" / "bench.png"
    command = ["--quick", "--n", "512", "--repeats", "2", "--heads", "2", "--json", str(record), "--plot", str(picture)]
    done = subprocess.run([sys.executable, "-m", "kvops.bench", *command], capture_output=True, text=True, check=True)
    assert "leaves torch.compile out" in done.stdout and str(picture) in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")

    found = json.loads(record.read_text())
    assert found["command"].startswith("python -m kvops.bench --quick --n 512") and found["machine"]["cores"] >= 1
    assert found["isa"] in ("v2", "v3", "v4", "baseline") and found["torch"] == torch.__version__
    rows = {(r["operator"], r["form"], r["dtype"]): r for r in found["rows"]}
    dtypes = {name: ("float32", "bfloat16") if row.per_dtype else ("float32",) for name, row in ROWS.items()}
    assert set(rows) == {(name, form, t) for name, row in ROWS.items() for form in row.forms for t in dtypes[name]}
    for (name, form, _), row in rows.items():
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["seconds"]["best"] / 1e9)
        assert row["ratio"]["eager"]["seconds"] == pytest.approx(row["ratio"]["eager"]["best"] * row["seconds"]["best"])
        assert "compile" not in row["ratio"] and ("parts" in row["ratio"]) == (form == "fresh" and "compress" in name)
        assert row["seconds"]["best"] <= row["seconds"]["median"]
        label = f"{name} {form}".strip()
        assert any(line.startswith(label) for line in done.stdout.splitlines()), f"{label} is not in the table"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--n", "100"], "--n: expected at least 512"),
        (["--ops", "sort"], "invalid choice: 'sort'"),
        (["--device", "cuda"], "--device cuda: expected cpu"),
    ],
)
def test_wrong_arguments(arguments, message):
    done = subprocess.run([sys.executable, "-m", "kvops.bench", *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
