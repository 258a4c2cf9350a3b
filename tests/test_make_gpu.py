"""bench/gpu.py, what `make gpu` runs, as far as it goes without a GPU: steps, limits, and what it makes of outputs."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


FACTS = {"gpu": "Some GPU", "gpus": 1, "torch": "2.11", "folder": "torch", "cuda": "13.0", "capability": [9, 0]}
FACTS |= {"missing": [], "cutlass": "cutlass"}


class Clock:
    """A hundred seconds of it are one."""

    def monotonic(self) -> float:
        return 100 * time.monotonic()

    def wait(self, seconds: float) -> None:
        time.sleep(max(0, seconds) / 100)


@pytest.fixture
def clock(run, monkeypatch):
    monkeypatch.setattr(run, "time", found := Clock())
    return found


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
        assert seconds == pytest.approx(20, abs=2)
        return run.Result(run.PASSED, "fine")

    reports = []
    steps = [
        run.Step("build", 20, passed),
        run.Step("tests", 20, broken, needs="build"),
        run.Step("more", 20, passed, needs="tests"),
        run.Step("bench", 20, lambda s: run.Result(run.PARTLY, "9 of 10", ["one", "two"]), needs="build"),
    ]
    done = run.run_steps(steps, 80, lambda done: reports.append(len(done)))
    assert [(d.step, d.result.status, d.result.note) for d in done] == [
        ("build", "passed", "fine"),
        ("tests", "failed", "OSError: disk full"),
        ("more", "not run", "needs tests"),
        ("bench", "partly", "9 of 10"),
    ]
    assert reports == [1, 2, 3, 4]
    lines = run.table(done).splitlines()
    assert lines[2].split() == ["tests", "failed", "0", "OSError:", "disk", "full"] and lines[-1].split() == ["two"]
    assert "== bench (at most 80 s)" in capsys.readouterr().out


def test_a_step_has_what_those_before_it_left_over(run, clock):
    allowed = {}

    def takes(name, wanted):
        def step(seconds):
            allowed[name] = seconds
            clock.wait(min(wanted, seconds))
            return run.Result(run.PASSED)

        return step

    steps = [
        run.Step(name, sure, takes(name, wanted)) for name, sure, wanted in (("a", 60, 20), ("b", 30, 99), ("c", 9, 9))
    ]
    run.run_steps(steps, 100, lambda done: None)
    assert allowed == {"a": pytest.approx(61, abs=1), "b": pytest.approx(71, abs=3), "c": pytest.approx(9, abs=3)}
    run.run_steps(steps, 50, lambda done: None)  # less than they add up to: each has less
    assert allowed["a"] == pytest.approx(30, abs=1) and allowed["b"] == pytest.approx(25, abs=3)
    run.LEAST = 20
    last = run.run_steps(steps, 100, lambda done: None)[-1].result
    assert (last.status, last.note, last.left) == ("not run", "out of time", ["c"])


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
    run.AT_ONCE = 6
    result = run.run_tests(list(map(str, files)), log, 20, env, tmp_path, True)
    found = dict(line.split(": ", 1) for line in result.details)
    assert result.status == "failed"
    assert found["test_good"].startswith("passed: 1 passed, 1 deselected")
    assert found["test_bad"].startswith("failed: 1 failed")
    assert found["test_dead"].startswith("failed: ")
    assert found["test_slow"] == "partly: out of time after 0 tests, 0 failed"
    assert result.left == ["test_slow: 1 tests, from test_cuda_hangs on"]
    assert found["test_none"] == "not run: it has no test for device cuda"
    assert found["test_skip"].startswith("failed: 1 skipped")
    assert "assert 1 == 2" in log.read_text() and not list(tmp_path.glob("*.part"))

    def of(*names, seconds=60, opcheck=True):
        parts = [str(files[list(bodies).index(name)]) for name in names]
        return run.run_tests(parts, log, seconds, env, tmp_path, opcheck)

    assert of("good").status == "passed" and of("good", "none").status == "partly"
    some = of("good", opcheck=False)
    assert some.status == "partly" and some.details[-1] == "not run: opcheck tests (no expecttest)"
    none = of("good", "bad", seconds=1)
    assert none.status == "partly" and none.left == ["test_good: all tests", "test_bad: all tests"]
    without = run.Run(tmp_path, {"missing": ["hypothesis"]}).run_tests("tests", [], 60)
    assert (without.status, without.note) == ("not run", "no hypothesis")


def test_tests_go_on_in_another_process_when_one_has_lost_the_gpu(run, tmp_path):
    (tmp_path / "conftest.py").write_text(
        "import pytest\n@pytest.hookimpl(trylast=True)\ndef pytest_runtest_logreport(report):\n"
        f"    if report.failed: pytest.exit({run.NO_GPU_LEFT!r}, returncode=2)\n"
    )
    test = tmp_path / "test_it.py"
    test.write_text(
        "import pytest\n@pytest.mark.parametrize('name', ['a', 'b, c', 'b, d', 'e'])\n"
        "def test_cuda(name): assert name not in ('b, c', 'e')\ndef test_cuda_other(): pass\n"
    )
    log = tmp_path / "tests.log"
    result = run.run_tests([f"{test}::test_cuda", str(test)], log, 60, dict(os.environ), tmp_path, True)
    assert [x.split(": ", 1)[1] for x in result.details] == [
        "failed: 2 of 4 tests failed, 2 took the GPU from their process",
        "failed: 2 of 5 tests failed, 2 took the GPU from their process",
    ]
    assert log.read_text().count("::test_cuda[a] PASSED") == 2  # each ran once
    assert f'pytest.exit("{run.NO_GPU_LEFT}"' in (ROOT / "tests" / "conftest.py").read_text()


@pytest.mark.parametrize(
    "code, text, status, note, left",
    [
        (0, "made: a\nmade: b\n= ERROR SUMMARY: 0 errors", "passed", "2 calls; ERROR SUMMARY: 0 errors", []),
        (9, "made: a\nmade: b\n= ERROR SUMMARY: 3 errors", "failed", "ERROR SUMMARY: 3 errors", []),
        (0, "made: a\n= ERROR SUMMARY: 0 errors", "partly", "1 calls; ERROR SUMMARY: 0 errors", ["b"]),
        (0, "= ERROR SUMMARY: 0 errors", "failed", "0 calls", ["a", "b"]),
        (0, "made: a\nmade: b\n= RACECHECK SUMMARY: 0 hazards displayed (0 errors)", "passed", "0 hazards", []),
        (0, "made: a\nmade: b\n= RACECHECK SUMMARY: 1 hazard displayed (0 errors)", "failed", "1 hazard", []),
        (255, "========= Error: Device not supported.", "not run", "does not support", []),
        (None, "made: a\n", "partly", "1 calls; no summary; stopped, as the time was up", ["b"]),
        (1, "Traceback\nImportError: no", "failed", "exit status 1: ImportError: no", ["a", "b"]),
    ],
)
def test_what_compute_sanitizer_says(run, code, text, status, note, left):
    result = run.judge_sanitizer(code, f"planned: a\nplanned: b\n{text}")
    assert result.status == status and note in result.note and result.left == left


def test_compute_sanitizer_looks_at_all_our_kernels(run):
    """Its filter is a part of each kernel's mangled name."""
    library = ROOT / "kvops" / "libkvops_cuda.so"
    if not library.exists():
        pytest.skip("the CUDA library is not built")
    kernels = set(re.findall(rb"_Z\w+_kernel\w+", library.read_bytes()))
    assert len(kernels) > 50 and all(run.OURS.removeprefix("kns=").encode() in x for x in kernels)


def test_the_end_to_end_times_of_a_run(run, tmp_path, monkeypatch):
    seen = {"code": 0}

    def execute(command, log, seconds, env, cwd):
        seen.update(command=command)
        log.write_text("")
        if seen["code"] != 1:
            (tmp_path / "end_to_end.json").write_text(json.dumps({"rows": [1, 2], "left_out": ["LagKV 8x, whole"]}))
        return seen["code"]

    monkeypatch.setattr(run, "execute", execute)
    of = run.Run(tmp_path, {"missing": ["matplotlib"]})
    for code in (0, None):  # stopped: what it has is in the file
        seen["code"] = code
        result = of.end_to_end(140)
        assert (result.status, result.note, result.left) == ("partly", "2 cells", ["LagKV 8x, whole"])
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
    assert (
        facts["torch"]
        and set(facts["missing"]) <= {"compute-sanitizer"}
        and Path(facts["folder"], "version.py").exists()
    )
    with pytest.raises(SystemExit, match="no wheels in"):
        run.unpack_wheels(found)


def test_without_a_gpu_one_line_says_so():
    done = subprocess.run(
        [sys.executable, ROOT / "bench" / "gpu.py"],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("make gpu: needs an NVIDIA GPU; torch ")
