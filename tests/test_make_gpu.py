"""bench/gpu.py, what `make gpu` runs, as far as it goes without a GPU: steps, limits, and what it makes of outputs."""

import importlib.util
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("make_gpu", ROOT / "bench" / "gpu.py")
    module = sys.modules["make_gpu"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "WORK", tmp_path / "work")
    monkeypatch.setattr(module, "SITE", tmp_path)
    (tmp_path / "work").mkdir()
    return module


def test_a_step_that_fails_does_not_stop_the_next(run, capsys):
    def broken(seconds):
        raise OSError("disk full")

    def passed(seconds):
        assert seconds == pytest.approx(20, abs=1)
        return run.Result(run.PASSED, "fine")

    reports = []
    steps = [
        run.Step("build", 20, passed),
        run.Step("tests", 20, broken, needs="build"),
        run.Step("more", 20, passed, needs="tests"),
        run.Step("bench", 20, lambda s: run.Result(run.PARTLY, "9 of 10", ["one", "two"]), needs="build"),
    ]
    done = run.run_steps(steps, 100, lambda done: reports.append(len(done)))
    assert [(d.step, d.result.status, d.result.note) for d in done] == [
        ("build", "passed", "fine"),
        ("tests", "failed", "OSError: disk full"),
        ("more", "not run", "needs tests"),
        ("bench", "partly", "9 of 10"),
    ]
    assert reports == [1, 2, 3, 4]
    lines = run.table(done).splitlines()
    assert lines[2].split() == ["tests", "failed", "0", "OSError:", "disk", "full"] and lines[-1].split() == ["two"]
    assert "== bench (at most 20 s)" in capsys.readouterr().out


def test_all_steps_share_the_time(run):
    def takes(seconds):
        time.sleep(1.5)
        return run.Result(run.PASSED)

    run.LEAST = 1
    steps = [run.Step(name, 100, takes) for name in "abc"]
    done = run.run_steps(steps, 2.2, lambda done: None)
    assert [(d.result.status, d.result.note) for d in done] == [("passed", ""), ("not run", "out of time")] + [
        ("not run", "out of time")
    ]


def test_commands_end_in_time_with_all_that_they_started(run, tmp_path):
    log, mark = tmp_path / "log", tmp_path / "mark"
    child = f"import time; time.sleep(4); open({str(mark)!r}, 'w')"
    code = f"import subprocess, sys, time; print('on', flush=True); subprocess.Popen([sys.executable, '-c', {child!r}])"
    began = time.monotonic()
    assert run.execute([sys.executable, "-c", f"{code}; time.sleep(60)"], log, 1.5, dict(os.environ), tmp_path) is None
    assert run.execute([sys.executable, "-c", code], log, 60, dict(os.environ), tmp_path) == 0
    assert run.execute([sys.executable, "-c", "exit(3)"], log, 60, dict(os.environ), tmp_path) == 3
    assert time.monotonic() - began < 30 and log.read_text().count("\non\n") == 2
    time.sleep(4.5)
    assert not mark.exists()


def test_long_logs_are_cut(run, tmp_path):
    run.LOG_BYTES = 1000
    run.execute(
        [sys.executable, "-c", "print('x' * 5000); print('end')"], tmp_path / "log", 60, dict(os.environ), tmp_path
    )
    text = (tmp_path / "log").read_text()
    assert len(text) < 1000 and text.startswith("$ ") and "[...]" in text and text.endswith("end\n")


def test_test_files_run_apart(run, tmp_path, monkeypatch):
    bodies = {
        "good": "import pytest\n@pytest.mark.parametrize('on', ['cpu', 'cuda'])\ndef test_it(on): assert on == 'cuda'",
        "bad": "def test_cuda_is_wrong(): assert 1 == 2",
        "dead": "import os\ndef test_cuda_crashes(): os.abort()",
        "slow": "import time\ndef test_cuda_hangs(): time.sleep(60)",
        "none": "def test_cpu(): pass",
        "skip": "import pytest\n@pytest.mark.skip\ndef test_cuda(): pass",
    }
    files = [tmp_path / f"test_{name}.py" for name in bodies]
    for file, body in zip(files, bodies.values()):
        file.write_text(body + "\n")
    env = dict(os.environ)
    log = tmp_path / "tests.log"
    result = run.run_tests(files, log, 20, env, tmp_path, [])
    found = dict(line.split(": ", 1) for line in result.details)
    assert result.status == "failed"
    assert found["test_good"].startswith("passed: 1 passed, 1 deselected")
    assert found["test_bad"].startswith("failed: 1 failed")
    assert found["test_dead"].startswith("failed: ") and found["test_slow"].startswith("failed: stopped")
    assert found["test_none"] == "not run: it has no test for device cuda"
    assert found["test_skip"].startswith("failed: 1 skipped")
    assert "assert 1 == 2" in log.read_text() and not list(tmp_path.glob("*.part"))

    assert run.run_tests(files[:1], log, 60, env, tmp_path, []).status == "passed"
    some = run.run_tests([files[0], files[4]], log, 60, env, tmp_path, [])
    assert some.status == "partly"
    some = run.run_tests(files[:1], log, 60, env, tmp_path, ["expecttest", "numpy"])
    assert some.status == "partly" and some.details[-1] == "not run: opcheck tests (expecttest is missing)"
    none = run.run_tests(files, log, 60, env, tmp_path, ["hypothesis"])
    assert none.status == "not run" and "hypothesis missing" in none.note


@pytest.mark.parametrize(
    "code, text, status, note",
    [
        (0, "96 calls done\n========= ERROR SUMMARY: 0 errors", "passed", "ERROR SUMMARY: 0 errors"),
        (9, "96 calls done\n========= ERROR SUMMARY: 3 errors", "failed", "ERROR SUMMARY: 3 errors"),
        (0, "========= ERROR SUMMARY: 0 errors", "failed", "ERROR SUMMARY: 0 errors"),  # it did not get to the end
        (0, "96 calls done\n= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", "passed", "0 hazards"),
        (0, "96 calls done\n= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)", "failed", "1 hazard"),
        (255, "========= Error: Device not supported.", "not run", "does not support"),
        (None, "anchor_cosine n=300\n", "failed", "time was up, after: anchor_cosine n=300"),
        (1, "Traceback\nImportError: no", "failed", "exit status 1: ImportError: no"),
    ],
)
def test_what_compute_sanitizer_says(run, code, text, status, note):
    result = run.judge_sanitizer(code, text)
    assert result.status == status and note in result.note


def test_the_benchmark_of_a_run(run, tmp_path, monkeypatch):
    output = (
        "operator   n  dtype\nlag_score     16384  fp32  1 ms\nlag_score    131072  fp32  2 ms\n"
        "failed: lag_score 131072 fp32: compile: no Triton\nnot measured for lack of time: x\n"
        "\nGoals: 3 of 4 reached.\nMISSED  x\n"
    )
    seen = {}

    def execute(command, log, seconds, env, cwd):
        seen.update(command=command, seconds=seconds)
        log.write_text(output)
        return 0

    monkeypatch.setattr(run, "execute", execute)
    result = run.Run(tmp_path, {"missing": ["matplotlib"]}).bench(240)
    assert result.status == "partly" and result.note == "Goals: 3 of 4 reached"
    assert (
        result.details[0] == "failed: lag_score 131072 fp32: compile: no Triton"
        and "1 rows not measured" in result.details[-1]
    )
    assert "--plot" not in seen["command"] and seen["command"][-2:] == ["--seconds", "200"]
    rows = run.key_rows(output).splitlines()
    assert [x for x in rows if x] == [
        "operator   n  dtype",
        "lag_score    131072  fp32  2 ms",
        "Goals: 3 of 4 reached.",
        "MISSED  x",
    ]


def test_the_end_to_end_times_of_a_run(run, tmp_path, monkeypatch):
    seen = {}

    def execute(command, log, seconds, env, cwd):
        seen.update(command=command)
        log.write_text("prefill  context\nnot measured for lack of time: LagKV 8x, 131,072 tokens, whole\nwrote x\n")
        return seen.get("code", 0)

    monkeypatch.setattr(run, "execute", execute)
    of = run.Run(tmp_path, {"missing": ["matplotlib"]})
    result = of.end_to_end(140)
    assert result.status == "partly" and len(result.details) == 1 and "131,072 tokens" in result.details[0]
    options = seen["command"][2:]
    assert options[-2:] == ["--seconds", "100"] and "--out" not in options
    sys.path.insert(0, str(ROOT / "bench"))
    import end_to_end

    monkeypatch.setattr(end_to_end.torch.cuda, "is_available", lambda: True)
    assert end_to_end.arguments(options).contexts == [4096, 20480, 131072, 32768]  # what it says is understood
    seen["code"] = 1
    assert of.end_to_end(140).status == "failed"
    assert run.Run(tmp_path, {"missing": ["transformers"]}).end_to_end(140).status == "not run"


def test_wheels_are_unpacked(run, tmp_path):
    with zipfile.ZipFile(tmp_path / "some_module-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("some_module/__init__.py", "")
    found = run.unpack_wheels(tmp_path)
    facts = run.look(run.environment(found))
    assert (found / "some_module" / "__init__.py").exists() and str(found) in run.environment(found)["PYTHONPATH"]
    assert facts["torch"] and facts["missing"] == [] and Path(facts["folder"], "version.py").exists()
    with pytest.raises(SystemExit, match="no wheels in"):
        run.unpack_wheels(found)


def test_a_whole_run(run, tmp_path, monkeypatch, capsys):
    """With pretended steps: what is printed, what is written, the exit status."""
    facts = {"gpu": "Some GPU", "torch": "2.11", "cuda": "13.0", "missing": ["expecttest"], "capability": [9, 0]}
    monkeypatch.setattr(run, "look", lambda env: facts)

    def steps(self):
        (self.out / "bench.log").write_text("\nGoals: 1 of 1 reached.\n")
        result = {"build": run.PASSED, "tests": run.FAILED, "bench": run.PASSED}
        return [run.Step(name, 9, lambda s, x=x: run.Result(x)) for name, x in result.items()]

    real = run.Run.steps
    monkeypatch.setattr(run.Run, "steps", lambda self: steps(self) if self.facts else real(self))
    out = tmp_path / "out"
    assert run.main(["--out", str(out)]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("Some GPU · torch 2.11, CUDA 13.0 · missing: expecttest\n") and "Goals: 1 of 1" in shown
    assert [line.split()[:2] for line in shown.splitlines()[-6:-2]] == [
        ["step", "result"],
        ["build", "passed"],
        ["tests", "failed"],
        ["bench", "passed"],
    ]
    assert "tests  failed" in (out / "summary.txt").read_text()
    assert run.main(["--out", str(out), "--only", "bench"]) == 0


def test_without_a_gpu_one_line_says_so():
    done = subprocess.run(
        [sys.executable, ROOT / "bench" / "gpu.py"],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("make gpu: needs an NVIDIA GPU; torch ")
