"""bench/gpu.py, which `make gpu` runs, without a GPU: its steps, its time limits, and how it judges outputs."""

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
import torch

from kvops.bench import __main__ as bench_command
from kvops.bench import record as bench_record

ROOT = Path(__file__).parents[2]


FACTS = {"gpu": "Some GPU", "gpus": 1, "torch": "2.11", "folder": "torch", "cuda": "13.0", "capability": [9, 0]}
FACTS |= {"missing": [], "cutlass": "cutlass"}


class Clock:
    """A clock that only wait() advances. Each thread has its own time, which starts at the main thread's; the main
    thread continues last. A little real time passes too, so that the thread with the shorter wait works next."""

    def __init__(self):
        self.now: dict[int, float] = {threading.main_thread().ident: 0.0}

    def monotonic(self) -> float:
        if threading.current_thread() is threading.main_thread():
            found = max(self.now.values())
        else:
            found = max(self.now.get(threading.get_ident(), 0), self.now[threading.main_thread().ident])
        self.now[threading.get_ident()] = found
        return found

    def wait(self, seconds: float) -> None:
        self.now[threading.get_ident()] = self.monotonic() + max(0, seconds)
        time.sleep(max(0, seconds) / 2000)


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
    run.run_steps(steps, 50, lambda done: None)  # less than their sum, so each gets less
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


@pytest.mark.full
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


def test_the_longest_tests_start_first(run, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "run_tests", lambda parts, *_, **__: [part.endswith(run.LONGEST) for part in parts])
    steps, found = run.Run(tmp_path, FACTS), 0
    for step in (steps.tests, steps.gpu_tests):
        long = step(60)
        assert long == sorted(long, reverse=True) and not all(long)
        found += sum(long)
    assert found == len(run.LONGEST)  # all names exist


def test_a_benchmark_without_time_is_not_run(run, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "execute", lambda *_: pytest.fail("there is no time"))
    for seconds in (5, run.SHOW, run.SHOW + run.LAST):
        result = run.Run(tmp_path, FACTS).benchmark("bench", seconds)
        assert (result.status, result.note, result.left) == ("not run", "out of time", ["bench"])


def test_tests_go_on_in_another_process_when_one_has_lost_the_gpu(run, tmp_path):
    (tmp_path / "conftest.py").write_text(
        "import pytest\n@pytest.hookimpl(trylast=True)\ndef pytest_runtest_logreport(report):\n"
        f"    if report.failed: pytest.exit({run.NO_GPU_LEFT!r}, returncode=2)\n"
    )
    test = tmp_path / "test_it.py"
    test.write_text(
        "import pytest\n@pytest.mark.parametrize('name', ['a', 'b, c', 'b, d'])\n"
        "def test_cuda(name): assert name != 'b, c'\n"
    )
    log = tmp_path / "tests.log"
    result = run.run_tests([f"{test}::test_cuda"], log, 60, dict(os.environ), tmp_path, True)
    wanted = "test_it::test_cuda: failed: 1 of 3 tests failed, 1 took the GPU from their process"
    assert (result.status, result.details) == ("failed", [wanted])
    assert [log.read_text().count(f"test_cuda[{x}] PASSED") for x in ("a", "b, d")] == [1, 1]
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
    """Its filter is part of every kernel's mangled name."""
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
    for code in (0, None):  # stopped: its results are in the file
        seen["code"] = code
        result = of.end_to_end(140)
        assert (result.status, result.note, result.left) == ("partly", "2 cells", ["LagKV 8x, whole"])
    options = seen["command"][2:]
    assert options[-2:] == ["--seconds", "100"] and "--out" not in options
    import end_to_end

    monkeypatch.setattr(end_to_end.torch.cuda, "is_available", lambda: True)
    assert end_to_end.arguments(options).contexts == [4096, 20480, 131072, 32768]  # the script accepts the options
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


# A rehearsal of both commands on a Clock, with stand-ins for every process they start.


class Stage:
    """Stand-ins for the commands, and the seconds they take."""

    BUILD, ROW, COMPILED_ROW, CALL, CELL, COST = 60, 1.5, 12, 1, 15, 25
    TEST_CUDA = 200  # in one process; torch.compile takes half of it
    TEST_SM90, TEST_FILE = 60, 15

    def __init__(self, clock: Clock, monkeypatch):
        self.clock, self.patch = clock, monkeypatch
        self.order: list[str] = []  # the rows of the benchmark, in the order in which they were measured
        self.builds = 0

    def execute(self, command, log, seconds, env, cwd):
        for word, stand_in in (
            ("cmake", self.build), ("kvops.bench", self.bench), ("calls.py", self.calls), ("pytest", self.pytest),
            ("end_to_end.py", self.end_to_end), ("_cost.py", self.cost), ("import kvops", self.load),
        ):  # fmt: skip
            if any(word in Path(x).name for x in command):
                with log.open("a") as out:
                    return stand_in(command, out, seconds, env)
        raise AssertionError(command)

    def steps(self, out, lines: list[str], each: float, seconds: float) -> bool:
        """Write the lines, one every `each` seconds. Return whether there was time for all."""
        for i, line in enumerate(lines):
            self.clock.wait(min(each, seconds - i * each))
            if (i + 1) * each > seconds:
                return False
            out.write(line + "\n")
            out.flush()
        return True

    def build(self, command, out, seconds, env):
        self.builds += "--build" in command
        return 0 if self.steps(out, ["ok"], self.BUILD if "--build" in command else 1, seconds) else None

    def load(self, command, out, seconds, env):
        out.write("loaded\n")
        return 0

    def pytest(self, command, out, seconds, env):
        file, _, function = command[3].rpartition("/")[2].partition("::")
        whole = {"test_cuda.py": self.TEST_CUDA, "test_sm90.py": self.TEST_SM90}.get(file, self.TEST_FILE)
        if function:
            whole *= 0.5 if "compile" in function else 0.05
        out.write("collected 10 items\n")
        if not self.steps(out, [f"{file}::test[{i}] PASSED [{i}0%]" for i in range(10)], whole / 10, seconds):
            return None
        out.write("=== 10 passed ===\n")
        return 0

    def calls(self, command, out, seconds, env):
        names = [f"{i}{'; Hopper' * (env.get('KVOPS_SM90') == '1')}" for i in range(100)]
        out.writelines(f"planned: {x}\n" for x in names)
        limit = float(command[command.index("--seconds") + 1])
        self.steps(out, [f"made: {x}" for x in names], self.CALL, limit)
        out.write("= RACECHECK SUMMARY: 0 hazards\n" if "racecheck" in command else "= ERROR SUMMARY: 0 errors\n")
        return 0

    def end_to_end(self, command, out, seconds, env):
        limit, cells = float(command[command.index("--seconds") + 1]), list(range(20))
        for i in cells:
            if i * self.CELL > limit:
                break
            self.clock.wait(self.CELL)
            record = {"rows": cells[: i + 1], "left_out": [f"cell {x}" for x in cells[i + 1 :]]}
            Path(command[command.index("--json") + 1]).write_text(json.dumps(record))
        return 0

    def cost(self, command, out, seconds, env):
        return 0 if self.steps(out, ["reached  own part: 0.5%"], self.COST, seconds) else None

    def bench(self, command, out, seconds, env):
        """The real benchmark command, without the measuring."""

        def measure(name, row, case, repeats, compiled):
            dtype = str(case.dtype).removeprefix("torch.")
            self.order.append(
                f"{name} {case.n} {dtype}" + ", compiled" * compiled + ", portable" * ("KVOPS_SM90" in env)
            )
            self.clock.wait((self.COMPILED_ROW if compiled else self.ROW) * max(1, case.n / 262_144))
            return [
                {
                    "operator": name, "form": form, "dtype": dtype, "shape": [case.batch, case.heads, case.n, case.d],
                    "seconds": {"best": 1e-4, "median": 1e-4}, "bytes": 1, "gb_per_s": 1.0, "ratio": {}, "stages": {},
                    "bandwidth": {"of": "copy", "by": "copy", "gb_per_s": 4000, "share": 0.9},
                    "clock": {}, "failed": {}, "goals": {"copy": 0.85},
                }
                for form in row.forms
            ]  # fmt: skip

        with self.patch.context() as patch, contextlib.redirect_stdout(out):
            patch.setattr(sys, "argv", command[2:])
            patch.setattr(bench_command, "time", self.clock)
            patch.setattr(bench_command.gc, "collect", int)
            patch.setattr(bench_command, "measure", measure)
            patch.setattr(bench_command, "build_info", lambda: {"cuda": {"why": ""}})
            patch.setattr(bench_record, "gpu", lambda: {"name": "Some GPU", "driver": "1", "cuda": "13.0"})
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "empty_cache", lambda: None)
            return bench_command.main()


@pytest.fixture
def stage(run, clock, monkeypatch, tmp_path):
    found = Stage(clock, monkeypatch)
    monkeypatch.setattr(run, "execute", found.execute)
    monkeypatch.setattr(run, "look", lambda env: FACTS)
    monkeypatch.setattr(run, "find_tool", lambda name: f"/tools/{name}")
    monkeypatch.setattr(run, "SITE", tmp_path / "site")
    monkeypatch.setattr(run, "AT_ONCE", 8)
    return found


def statuses(file: Path) -> dict[str, str]:
    """Return the status of each step, from the summary."""
    lines = [x for x in file.read_text().splitlines() if re.match(r"\w+ +(passed|partly|failed|not run)", x)]
    return {x.split()[0]: x.split()[1] for x in lines}


def test_both_commands_fit_in_their_time(run):
    for steps in run.Run(Path(), {}).parts():
        assert sum(step.sure for step in steps) <= 60 * run.MINUTES < 575


def test_rehearsal_of_make_gpu(run, stage, clock, tmp_path, capsys):
    out, began = tmp_path / "out", clock.monotonic()
    assert run.main(["--out", str(out)]) == 0
    assert clock.monotonic() - began < 600
    found = statuses(out / "summary.txt")
    assert found == {"build": "passed", "bench": "partly", "gpu_tests": "passed", "portable": "passed"}
    record = json.loads((out / "bench.json").read_text())
    measured = [x for x in stage.order if not x.endswith("portable")]
    assert not any("compiled" in x for x in stage.order)
    large = [x for x in measured if " 131072 " in x or " 2048 " in x or "tokens" in x]
    assert measured[: len(large)] == large and len(large) > 50  # the size with goals and fixed shapes come first
    assert measured[0] == "lag_score 131072 bfloat16" and measured[len(large)] == "lag_score 16384 bfloat16"
    assert record["left_out"] and all("1048576" in x for x in record["left_out"])
    left = re.search(r"left for lack of time \((\d+)\): (.*)", (out / "summary.txt").read_text())
    assert left[2].split("; ") == record["left_out"] and int(left[1]) == len(record["left_out"])
    assert stage.order[-1].endswith("portable") and (out / "bench-portable.json").exists()
    shown = capsys.readouterr().out
    assert "| lag_score | 131072 | bf16 | 100 us | 90% of copy | >= 85% of copy: reached |" in shown
    assert "window_scores 131072 bfloat16: 100.0 us, bench 1.00x as long" in shown


def test_rehearsal_of_make_gpu_more(run, stage, clock, tmp_path):
    out, began = tmp_path / "out", clock.monotonic()
    run.main(["--out", str(out), "--only", "build"])
    assert run.main(["--out", str(out), "--more"]) == 0
    assert clock.monotonic() - began < 600 + 80 and stage.builds == 1  # the earlier build is reused
    summary = (out / "summary-more.txt").read_text()
    assert "as it was built before" in summary
    assert statuses(out / "summary-more.txt") == {
        **dict.fromkeys(("build", "tests", "sanitizer"), "passed"),
        **dict.fromkeys(("end_to_end", "compile"), "partly"),
        **dict.fromkeys(("laq", "lacache"), "passed"),
    }
    assert "racecheck, Hopper: passed: 100 calls; RACECHECK SUMMARY: 0 hazards" in summary and "cell 19" in summary
    record = json.loads((out / "compile.json").read_text())
    jobs = len(stage.order) + len(record["left_out"])
    assert stage.order[0] == "lag_score 131072 bfloat16, compiled" and 50 < jobs < 90
    assert len(stage.order) > 5 and all(x in summary for x in record["left_out"])


def test_what_takes_longer_than_thought_is_named(run, stage, clock, tmp_path):
    """However long the build takes, the benchmark and the steps after it keep their guaranteed time."""
    stage.BUILD, stage.ROW, stage.TEST_CUDA, out = 115, 8, 2000, tmp_path / "out"
    began = clock.monotonic()
    assert run.main(["--out", str(out)]) == 0
    assert clock.monotonic() - began < 600
    found = statuses(out / "summary.txt")
    assert found == {"build": "passed", "bench": "partly", "gpu_tests": "partly", "portable": "partly"}
    summary = (out / "summary.txt").read_text()
    assert "test_cuda::test_fullgraph_compile: " in summary and "tests, from test[" in summary
    measured = [x for x in stage.order if not x.endswith("portable")]  # bf16 at the sizes with goals, and a little more
    assert "assign_prototypes 131072 bfloat16" in measured and "lag_score 131072 float32" in measured
    assert 20 < len(measured) < 30 and "lag_score 131072" not in summary and "lag_score 16384" in summary


def test_what_is_missing_is_said_first(run, stage, tmp_path, monkeypatch, capsys):
    missing = ["hypothesis", "expecttest", "nvidia-cutlass"]
    monkeypatch.setattr(run, "look", lambda env: FACTS | {"missing": missing, "cutlass": ""})
    stage.ROW = 20
    out = tmp_path / "out"
    assert run.main(["--out", str(out)]) == 0
    lines = [
        "Some GPU · torch 2.11, CUDA 13.0",
        "missing: hypothesis: no tests",
        "missing: expecttest: no opcheck tests",
        "missing: nvidia-cutlass: Hopper's kernels are neither built nor tested nor timed",
    ]
    assert capsys.readouterr().out.splitlines()[:4] == lines
    assert (out / "summary.txt").read_text().splitlines()[:4] == lines
    assert re.search(r"^gpu_tests +not run +\d+ +no hypothesis$", (out / "summary.txt").read_text(), re.MULTILINE)
    assert re.search(r"^portable +not run +\d+ +no nvidia-cutlass$", (out / "summary.txt").read_text(), re.MULTILINE)


def test_a_build_that_fails(run, stage, tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "build", lambda command, out, seconds, env: 2 * (out.write("error: no\n") > 0))
    assert run.main(["--out", str(tmp_path / "out")]) == 1
    assert set(statuses(tmp_path / "out" / "summary.txt").values()) == {"failed", "not"}
    assert "exit status 2: error: no" in (tmp_path / "out" / "summary.txt").read_text()


def test_without_a_gpu_one_line_says_so():
    done = subprocess.run(
        [sys.executable, ROOT / "bench" / "gpu.py"],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("make gpu: needs an NVIDIA GPU; torch ")
