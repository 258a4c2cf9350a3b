"""make gpu, make gpu-more: everything that needs a GPU, in two commands of under ten minutes each, without a network.

    python bench/gpu.py [--more] [--out build/gpu/results] [--wheels DIR] [--only STEP ...] [--minutes 9.5]

It needs a Python with torch (CUDA), nvcc, cmake and ninja. It first prints what else is missing, and which steps that
skips (LOST_WITHOUT). --wheels names a folder of wheels to unpack and use.

make gpu runs the benchmark, and the tests that only a GPU can run:
    build       both libraries, for this GPU only, into build/gpu; installs nothing
    bench       python -m kvops.bench --device cuda, the most wanted rows first; bench.json, bench.md, bench.png
    gpu_tests   test_cuda.py (graphs, streams, repeats), test_sm90.py
    portable    the rows of the benchmark that have Hopper kernels, without these (KVOPS_SM90=0); bench-portable.json

make gpu-more runs the rest:
    build       unless `make gpu` has built the same sources here
    tests       the tests of operators, methods and streaming on device cuda
    sanitizer   compute-sanitizer's memcheck, racecheck and synccheck on our kernels, with Hopper's (tests/calls.py)
    end_to_end  time to the first token, time per token and memory in a stack of 8B shape, up to 131,072 tokens
    compile     the benchmark at n = 131072 beside torch.compile; compile.json
    laq         the time that LAQ adds to a prefill of 32,768 tokens in such a stack (laq_cost.py)
    lacache     the time that LaCache's compactions add to a decode step in such a stack (lacache_cost.py)

Each step has a guaranteed part of the time, plus what earlier steps left over. A step that fails does not stop the
next. A step that runs out of time keeps its results and names what it left out. Logs, JSON files and a summary are
written to --out as they come. The command ends with the tables; its exit status is 1 if anything failed.
KVOPS_COMMIT=... names the commit where there is no repository.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "gpu"
SITE = WORK / "site"  # the files of a wheel
LOST_WITHOUT = {
    "pytest": "no tests",
    "hypothesis": "no tests",
    "expecttest": "no opcheck tests",
    "transformers": "no end_to_end, laq, lacache",
    "matplotlib": "no pictures",
    "compute-sanitizer": "no sanitizer",
    "nvidia-cutlass": "Hopper's kernels are neither built nor tested nor timed",
}
HOPPER_OPERATORS = ("window_scores", "window_attention", "assign_prototypes", "key_similarity", "value_norm")
MORE_ROWS = ("window_scores, no lse", "window_attention, decode", "key_similarity, keys alike")
HOPPER_ROWS = (*HOPPER_OPERATORS, *MORE_ROWS)
OURS = "kns=5kvops"  # compute-sanitizer's filter: kernels with this in their mangled names
GPU_LOST = 3  # exit status of kvops.bench: this process lost the GPU, another one can continue
NO_GPU_LEFT = "this process has lost the GPU"  # printed by tests/conftest.py
LONGEST = (  # of the tests; they start first
    "test_cuda.py::test_fullgraph_compile",
    "test_fp8.py",
    "test_methods.py",
    "test_operators.py",
    "test_padded_rows.py",
    "test_paged_cache.py",
    "test_pages.py",
    "test_policies.py",
)
AT_ONCE = max(1, min(8, (os.cpu_count() or 2) // 2))  # test processes
MINUTES = 9.5  # for all steps of one command
LEAST = 5  # seconds; with less left, a step is not started
SHOW = 20  # seconds reserved for kvops.bench to write table and picture of a record
LAST = 10  # seconds that the last row may take
LOG_BYTES = 1 << 20

PASSED, PARTLY, FAILED, NOT_RUN = "passed", "partly", "failed", "not run"


# Steps


@dataclass
class Result:
    status: str
    note: str = ""
    details: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # left out for lack of time


@dataclass
class Step:
    """run(seconds) executes the step within that time, which is at least `sure` seconds."""

    name: str
    sure: float
    run: Callable[[float], Result]
    needs: str = ""  # a step that must pass first


@dataclass
class Done:
    step: str
    result: Result
    seconds: float


def run_steps(steps: Sequence[Step], seconds: float, report: Callable[[list[Done]], None]) -> list[Done]:
    """Run all steps in turn within the given time, and pass the list of results to `report` after each. A step that
    raises has failed."""
    done: list[Done] = []
    end = time.monotonic() + seconds
    scale = min(1, seconds / sum(step.sure for step in steps))
    for i, step in enumerate(steps):
        began = time.monotonic()
        allowed = end - began - scale * sum(later.sure for later in steps[i + 1 :])
        missing = step.needs and not any(d.step == step.needs and d.result.status == PASSED for d in done)
        if missing:
            result = Result(NOT_RUN, f"needs {step.needs}")
        elif allowed < LEAST:
            result = Result(NOT_RUN, "out of time", left=[step.name])
        else:
            print(f"== {step.name} (at most {allowed:.0f} s)", flush=True)
            try:
                result = step.run(allowed)
            except Exception as error:
                result = Result(FAILED, f"{type(error).__name__}: {error}")
        done.append(Done(step.name, result, time.monotonic() - began))
        report(done)
    return done


def table(done: list[Done]) -> str:
    rows = [("step", "result", "seconds", "")]
    for d in done:
        rows.append((d.step, d.result.status, f"{d.seconds:.0f}", d.result.note))
        rows += [("", "", "", x) for x in d.result.details]
        if d.result.left:
            rows.append(("", "", "", f"left for lack of time ({len(d.result.left)}): {'; '.join(d.result.left)}"))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        f"{name.ljust(widths[0])}  {status.ljust(widths[1])}  {seconds.rjust(widths[2])}  {note}".rstrip()
        for name, status, seconds, note in rows
    )


# Commands


def execute(command: Sequence[str], log: Path, seconds: float, env: dict[str, str], cwd: Path) -> int | None:
    """Run the command, append its output to the log, and return its exit status, or None if it ran out of time."""
    with log.open("a") as out:
        out.write(f"$ {' '.join(command)}\n")
        out.flush()
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env, cwd=cwd,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:  # end the processes that it left behind, too
            for last in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, last)
                    process.wait(3)
                except (ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
                    pass
            if log.stat().st_size > LOG_BYTES:
                shorten(log)


def shorten(log: Path) -> None:
    """Keep head and tail of a log that has become too long."""
    text = log.read_bytes()
    log.write_bytes(text[: LOG_BYTES // 4] + b"\n[...]\n" + text[-LOG_BYTES // 2 :])


def last_line(text: str, most: int | None = 200) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:most] if lines else ""


def find_tool(name: str) -> str | None:
    """Look for a tool beside this Python, then on PATH, then where CUDA is installed."""
    places = (sysconfig.get_path("scripts"), None, "/usr/local/cuda/bin")
    return next((found for place in places if (found := shutil.which(name, path=place))), None)


def environment(extra: Path | None, **more: str) -> dict[str, str]:
    path = [str(x) for x in (SITE, extra) if x] + [x for x in [os.environ.get("PYTHONPATH")] if x]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"} | more


LOOK = """
import importlib.util, json, os, sys
found = {"missing": [x for x in sys.argv[1:] if importlib.util.find_spec(x) is None]}
cutlass = importlib.util.find_spec("cutlass_library")
found["cutlass"] = os.environ.get("CUTLASS_DIR") or (cutlass and os.path.dirname(cutlass.origin) + "/source") or ""
if importlib.util.find_spec("torch"):
    import torch
    found.update(torch=torch.__version__, folder=torch.__path__[0], gpu="")
    if torch.cuda.is_available():
        of = torch.cuda.get_device_properties(0)
        found.update(gpu=of.name, capability=[of.major, of.minor], cuda=torch.version.cuda)
        found["gpus"] = torch.cuda.device_count()
print(json.dumps(found))
"""


def look(env: dict[str, str]) -> dict:
    """Find torch, the GPU, and which of LOST_WITHOUT are missing. In a process of its own, because torch takes GPU
    memory."""
    command = [sys.executable, "-c", LOOK, *(x for x in LOST_WITHOUT if x.isidentifier())]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=WORK)
    if done.returncode:
        sys.exit(f"make gpu: {sys.executable} cannot import torch: {last_line(done.stderr)}")
    facts = json.loads(last_line(done.stdout, most=None))
    if not find_tool("compute-sanitizer"):
        facts["missing"].append("compute-sanitizer")
    if facts.get("capability") == [9, 0] and not facts["cutlass"]:
        facts["missing"].append("nvidia-cutlass")
    return facts


def unpack_wheels(folder: Path) -> Path:
    """Unpack the wheels into a folder that Python can import from: a wheel is an archive of the installed files."""
    target = WORK / "wheels"
    shutil.rmtree(target, ignore_errors=True)
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise SystemExit(f"make gpu: no wheels in {folder}")
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
    return target


# The steps


class Run:
    """The steps of both commands, for one machine."""

    def __init__(self, out: Path, facts: dict, wheels: Path | None = None):
        self.out, self.facts, self.wheels = out, facts, wheels

    def log(self, name: str) -> Path:
        file = self.out / f"{name}.log"
        file.unlink(missing_ok=True)
        return file

    def missing(self, *names: str) -> str:
        """Say which of these are missing."""
        return " and ".join(f"no {x}" for x in names if x in self.facts["missing"])

    def is_hopper(self) -> bool:
        return tuple(self.facts["capability"]) == (9, 0)

    def has_hopper_kernels(self) -> bool:
        return self.is_hopper() and not self.missing("nvidia-cutlass")

    def build(self, seconds: float) -> Result:
        log, end = self.log("build"), time.monotonic() + seconds
        cmake, ninja = find_tool("cmake"), find_tool("ninja")
        if not cmake:
            return Result(FAILED, "no cmake")
        major, minor = self.facts["capability"]
        settings = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_INSTALL_PREFIX": SITE,
            "KVOPS_TORCH_DIR": self.facts["folder"],
            "KVOPS_LEVELS": "native",
            "KVOPS_CUDA": 1,
            "KVOPS_CUDA_ARCHS": f"{major}{minor}{'a' * (major == 9)}",
            "CUTLASS_DIR": self.facts["cutlass"],
            **({"CMAKE_MAKE_PROGRAM": ninja} if ninja else {}),
        }
        tree = WORK / ("ninja" if ninja else "make")
        env = environment(self.wheels, CUDAFLAGS="-lineinfo")  # line numbers in compute-sanitizer's reports
        if not shutil.which(env.get("CUDACXX", "nvcc")) and (nvcc := find_tool("nvcc")):
            env["CUDACXX"] = nvcc
        commands = [
            [cmake, "-S", ROOT, "-B", tree, "-G", "Ninja" if ninja else "Unix Makefiles"]
            + [f"-D{name}={value}" for name, value in settings.items()],
            [cmake, "--build", tree, "--parallel", str(os.cpu_count())],
            [cmake, "--install", tree],
        ]
        is_loaded = "import kvops; cuda = kvops.build_info()['cuda']; print(cuda.get('why') or 'loaded')"
        stamp, wanted = SITE / "built", digest(settings | {"torch": self.facts["torch"]})
        reused = stamp.exists() and stamp.read_text() == wanted
        if not reused:
            shutil.rmtree(SITE, ignore_errors=True)
        for command in [*([] if reused else commands), [sys.executable, "-c", is_loaded]]:
            if command[0] == sys.executable:
                ignored = shutil.ignore_patterns("*.so", "__pycache__")
                shutil.copytree(ROOT / "kvops", SITE / "kvops", ignore=ignored, dirs_exist_ok=True)
            code = execute(list(map(str, command)), log, end - time.monotonic(), env, WORK)
            if code != 0:
                why = "time was up" if code is None else f"exit status {code}"
                return Result(FAILED, f"{why}: {last_line(log.read_text(errors='replace'))}")
        outcome = last_line(log.read_text(errors="replace"))
        if outcome != "loaded":
            return Result(FAILED, outcome)
        stamp.write_text(wanted)
        return Result(PASSED, f"sm_{settings['KVOPS_CUDA_ARCHS']}" + ", as it was built before" * reused)

    def benchmark(self, name: str, seconds: float, *options: str, **more: str) -> Result:
        """Measure rows into NAME.json, one by one; then write NAME.md and, with matplotlib, NAME.png."""
        log, record = self.log(name), self.out / f"{name}.json"
        env, end = environment(self.wheels, **more), time.monotonic() + seconds
        bench = [sys.executable, "-m", "kvops.bench"]
        record.unlink(missing_ok=True)
        code = GPU_LOST
        while code == GPU_LOST and (allowed := end - SHOW - time.monotonic()) > LAST + LEAST:
            measure = ["--device", "cuda", "--json", str(record), "--resume", "--seconds", f"{allowed - LAST:.0f}"]
            code = execute([*bench, *measure, *options], log, allowed, env, SITE)
        if not log.exists():
            return Result(NOT_RUN, "out of time", left=[name])
        text = log.read_text(errors="replace")
        if not record.exists():
            return Result(FAILED, f"exit status {code}: {last_line(text)}")
        files = ["--markdown", str(record.with_suffix(".md"))]
        files += [] if self.missing("matplotlib") else ["--plot", str(record.with_suffix(".png"))]
        execute([*bench, "--from", str(record), *files], log, end - time.monotonic(), env, SITE)
        text = log.read_text(errors="replace")
        found = json.loads(record.read_text())
        reached = re.findall(r"^Goals: .*", text, re.MULTILINE)
        note = f"{len(found['rows'])} results" + "".join(f"; {x.removesuffix('.')}" for x in reached[-1:])
        failures = list(dict.fromkeys(re.findall(r"^failed: .*", text, re.MULTILINE)))
        failed = code not in (0, None) or any("error" in x for x in found["rows"])  # a baseline may fail
        return Result(FAILED if failed else PARTLY if found["left_out"] else PASSED, note, failures, found["left_out"])

    def bench(self, seconds: float) -> Result:
        return self.benchmark("bench", seconds, "--compile")

    def portable(self, seconds: float) -> Result:
        if not self.has_hopper_kernels():
            return Result(NOT_RUN, self.missing("nvidia-cutlass") or "not a Hopper GPU")
        options = ["--n", "131072", "16384", "--dtype", "bf16", "--ops", *HOPPER_ROWS, "--compile"]
        result = self.benchmark("bench-portable", seconds, *options, KVOPS_SM90="0")
        result.details += against(self.out / "bench-portable.json", self.out / "bench.json")
        return result

    def compile(self, seconds: float) -> Result:
        return self.benchmark("compile", seconds, "--n", "131072")

    def gpu_tests(self, seconds: float) -> Result:
        cuda = ROOT / "tests/cuda/test_cuda.py"  # takes minutes in one process, so each of its functions gets its own
        functions = re.findall(r"^def (test_\w+)", cuda.read_text(), re.MULTILINE)
        if self.facts["gpus"] < 2:
            functions = [x for x in functions if "another_device" not in x]  # it needs two
        hopper = [str(ROOT / "tests/cuda/test_sm90.py")] if self.has_hopper_kernels() else []
        return self.run_tests("gpu_tests", [*hopper, *(f"{cuda}::{x}" for x in functions)], seconds)

    def tests(self, seconds: float) -> Result:
        files = [x for x in sorted((ROOT / "tests").glob("*/test_*.py")) if "kit.every_device" in x.read_text()]
        return self.run_tests("tests", [str(x) for x in files if x.stem != "test_sm90"], seconds)

    def run_tests(self, name: str, parts: list[str], seconds: float) -> Result:
        if without := self.missing("pytest", "hypothesis"):
            return Result(NOT_RUN, without)
        env = environment(self.wheels, OMP_NUM_THREADS=str(max(1, (os.cpu_count() or 1) // AT_ONCE)))
        parts = sorted(parts, key=lambda part: not part.endswith(LONGEST))
        return run_tests(parts, self.log(name), seconds, env, SITE, opcheck=not self.missing("expecttest"))

    def sanitizer(self, seconds: float) -> Result:
        """Run all tools at once, because they mostly keep the host busy."""
        sanitizer = find_tool("compute-sanitizer")
        if not sanitizer:
            return Result(NOT_RUN, self.missing("compute-sanitizer"))

        def one(run: tuple[str, bool]) -> Result:
            tool, hopper = run
            log = self.log(f"{tool}-sm90" if hopper else tool)
            options = ["--tool", tool, "--kernel-name", OURS, "--error-exitcode", "9", "--print-limit", "20"]
            more = {"KVOPS_SM90": str(int(hopper))}
            if tool == "memcheck":
                options += ["--report-api-errors", "no"]  # torch makes failing calls on purpose; ours raise
                more["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # so that memcheck knows every tensor's bounds
            command = [sanitizer, *options, sys.executable, str(ROOT / "tests" / "calls.py")]
            command += [*(HOPPER_OPERATORS if hopper else []), "--seconds", f"{max(LEAST, seconds - 3 * LAST):.0f}"]
            code = execute(command, log, seconds, environment(self.wheels, **more), SITE)
            return judge_sanitizer(code, log.read_text(errors="replace"))

        runs = [(tool, hopper) for hopper in (False, True) for tool in ("memcheck", "racecheck", "synccheck")]
        runs = [x for x in runs if not x[1] or self.has_hopper_kernels()]
        with ThreadPoolExecutor(len(runs)) as pool:
            return together([f"{tool}, Hopper" if hopper else tool for tool, hopper in runs], pool.map(one, runs))

    def cost(self, name: str) -> Callable[[float], Result]:
        """Return the step of a script in bench/experiments/ that prints which goals it reached."""

        def run(seconds: float) -> Result:
            if without := self.missing("transformers"):
                return Result(NOT_RUN, without)
            log, record = self.log(name), self.out / f"{name}.json"
            script = str(ROOT / "bench/experiments" / f"{name}_cost.py")
            command = [sys.executable, script, "--device", "cuda", "--json", str(record)]
            code = execute(command, log, seconds, environment(self.wheels), SITE)
            text = log.read_text(errors="replace")
            if code is None:
                return Result(PARTLY, "stopped, as the time was up", left=[name])
            if code != 0:
                return Result(FAILED, f"exit status {code}: {last_line(text)}")
            goals = re.findall(r"^(?:reached|MISSED).*", text, re.MULTILINE)
            return Result(PASSED, "" if goals else last_line(text), goals)

        return run

    def end_to_end(self, seconds: float) -> Result:
        if without := self.missing("transformers"):
            return Result(NOT_RUN, without)
        log, record = self.log("end_to_end"), self.out / "end_to_end.json"
        picture = [] if self.missing("matplotlib") else ["--out", str(self.out)]
        script = str(ROOT / "bench/experiments" / "end_to_end.py")
        command = [sys.executable, script, "--device", "cuda", "--json", str(record), *picture]
        command += ["--repeats", "1", "--ratios", "2", "8", "--contexts", "4096", "20480", "131072", "32768"]
        command += ["--seconds", f"{max(1, seconds - 40):.0f}"]
        record.unlink(missing_ok=True)
        code = execute(command, log, seconds, environment(self.wheels), SITE)
        if code is None and not record.exists():
            return Result(PARTLY, "stopped, as the time was up, before the first cell", left=["end_to_end"])
        if code:
            return Result(FAILED, f"exit status {code}: {last_line(log.read_text(errors='replace'))}")
        found = json.loads(record.read_text())
        return Result(PARTLY if found["left_out"] else PASSED, f"{len(found['rows'])} cells", left=found["left_out"])

    def parts(self) -> tuple[list[Step], list[Step]]:
        """Return the steps of `make gpu` and those of `make gpu-more`."""
        build = Step("build", 120, self.build)
        return [
            build,
            Step("bench", 220, self.bench, needs="build"),
            Step("gpu_tests", 170, self.gpu_tests, needs="build"),
            Step("portable", 60, self.portable, needs="build"),
        ], [
            build,
            Step("tests", 90, self.tests, needs="build"),
            Step("sanitizer", 100, self.sanitizer, needs="build"),
            Step("end_to_end", 100, self.end_to_end, needs="build"),
            Step("compile", 90, self.compile, needs="build"),
            Step("laq", 40, self.cost("laq"), needs="build"),
            Step("lacache", 30, self.cost("lacache"), needs="build"),
        ]


def digest(settings: dict) -> str:
    """Hash everything that the build depends on."""
    files = [ROOT / "CMakeLists.txt", ROOT / "kvops" / "version.py", *sorted((ROOT / "csrc").rglob("*.*"))]
    found = hashlib.sha256(json.dumps(settings, default=str, sort_keys=True).encode())
    for file in files:
        found.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()


def against(record: Path, other: Path) -> list[str]:
    """Compare the rows of a record with the same rows of another one: how many times as long those take."""

    def seconds(file: Path) -> dict[str, float]:
        rows = json.loads(file.read_text())["rows"] if file.exists() else []
        rows = [r for r in rows if "seconds" in r]
        return {f"{r['operator']} {r['shape'][2]} {r['dtype']}": r["seconds"]["median"] for r in rows}

    mine, its = seconds(record), seconds(other)
    return [f"{x}: {1e6 * mine[x]:.1f} us, {other.stem} {its[x] / mine[x]:.2f}x as long" for x in mine if x in its]


def together(names: list[str], results: Iterable[Result]) -> Result:
    """Combine several results into one."""
    found = dict(zip(names, results))
    statuses = {x.status for x in found.values()}
    status = next((x for x in (FAILED, PARTLY) if x in statuses), None)
    if status is None:  # all passed or not run
        status = statuses.pop() if len(statuses) == 1 else PARTLY
    details = [f"{name}: {x.status}: {x.note}" for name, x in found.items()]
    return Result(status, "", details, [f"{name}: {y}" for name, x in found.items() for y in x.left])


def run_tests(parts: list[str], log: Path, seconds: float, env: dict[str, str], cwd: Path, opcheck: bool) -> Result:
    """Run each part, a file or one of its functions, in a process of its own, AT_ONCE at a time. An illegal memory
    access ends all CUDA work of its process."""
    end = time.monotonic() + seconds
    names = [f"{Path(x.partition('::')[0]).stem}{''.join(x.partition('::')[1:])}" for x in parts]

    def one(name: str, part: str) -> Result:
        part_log = log.with_name(f"{name.replace('::', '-')}.part")
        part_log.write_text("")
        command = [sys.executable, "-m", "pytest", part, f"--rootdir={Path(part.partition('::')[0]).parent}"]
        command += ["-o", "addopts=", "-v", "-rfE", "--tb=short", "--maxfail=20", "-p", "no:cacheprovider"]
        command += ["-o", "faulthandler_timeout=60", "-k", "cuda" if opcheck else "cuda and not opcheck"]
        code, text, ended = None, "", []
        try:
            while (allowed := end - time.monotonic()) > LEAST:
                deselected = [f"--deselect={test}" for test, _ in ended]
                code = execute([*command, *deselected], part_log, allowed, env, cwd)
                before, text = len(text), part_log.read_text(errors="replace")
                ended = re.findall(r"^\S*?(\w+\.py::.+?) (PASSED|FAILED|ERROR)\b", text, re.MULTILINE)
                if code is None or NO_GPU_LEFT not in text[before:]:
                    break  # otherwise another process continues with the tests that have not finished
            return judge_pytest(code, text)
        finally:
            with log.open("ab") as out:
                out.write(part_log.read_bytes() + b"\n")
            part_log.unlink()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        result = together(names, pool.map(one, names, parts))
    if not opcheck:
        result.details.append("not run: opcheck tests (no expecttest)")
        result.status = PARTLY if result.status == PASSED else result.status
    return result


def judge_pytest(code: int | None, text: str) -> Result:
    """Judge the output of pytest -v: one run, or several if tests took the GPU down. code is the last exit status, None
    if the time was up."""
    summary = last_line(text).strip("= ")
    outcomes = re.findall(r"^\S*\w+\.py::.+? (PASSED|FAILED|ERROR|SKIPPED)\b", text, re.MULTILINE)
    failed = sum(x in ("FAILED", "ERROR") for x in outcomes)
    if code is None:
        wanted = [int(b or a) for a, b in re.findall(r"collected (\d+) items?(?:.* (\d+) selected)?", text)]
        begun = re.findall(r"^\S*\w+\.py::(\S+)", text, re.MULTILINE)
        left = f"{max(wanted) - len(outcomes)} tests, from {begun[-1]} on" if begun and wanted else "all tests"
        note = f"out of time after {len(outcomes)} tests, {failed} failed"
        return Result(FAILED if failed else PARTLY, note, left=[left])
    if lost := text.count(NO_GPU_LEFT):
        return Result(FAILED, f"{failed} of {len(outcomes)} tests failed, {lost} took the GPU from their process")
    if code == 5:
        return Result(NOT_RUN, "it has no test for device cuda")
    if code == 0 and re.search(r"\b\d+ passed", summary):
        return Result(PASSED, summary)
    return Result(FAILED, summary or f"exit status {code}")


def judge_sanitizer(code: int | None, text: str) -> Result:
    if "Device not supported" in text:
        return Result(NOT_RUN, "compute-sanitizer does not support this machine")
    made = set(re.findall(r"^made: (.*)", text, re.MULTILINE))
    left = [x for x in re.findall(r"^planned: (.*)", text, re.MULTILINE) if x not in made]
    errors = re.search(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard).*", text)
    note = f"{len(made)} calls; {errors.group() if errors else 'no summary'}"
    if code is None:
        return Result(PARTLY, f"{note}; stopped, as the time was up", left=left)
    if code != 0 or not errors or int(errors[1] or errors[2]) or not made:
        return Result(FAILED, note if errors else f"exit status {code}: {last_line(text)}", left=left)
    return Result(PARTLY if left else PASSED, note, left=left)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--more", action="store_true", help="the steps of make gpu-more")
    parser.add_argument("--out", type=Path, default=WORK / "results", help="folder for the results")
    parser.add_argument("--wheels", type=Path, help="folder of wheels with packages that this Python lacks")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for all steps together (default {MINUTES})")
    names = dict.fromkeys(step.name for steps in Run(Path(), {}).parts() for step in steps)
    parser.add_argument("--only", nargs="+", choices=names, help="run only the build and these steps of either command")
    a = parser.parse_args(argv)
    started = time.monotonic()
    WORK.mkdir(parents=True, exist_ok=True)
    wheels = unpack_wheels(a.wheels) if a.wheels else None
    facts = look(environment(wheels))
    if "torch" not in facts:
        sys.exit(f"make gpu: {sys.executable} has no torch; name a Python that has: make gpu PYTHON=...")
    if not facts["gpu"]:
        sys.exit(f"make gpu: needs an NVIDIA GPU; torch {facts['torch']} of {sys.executable} sees none")
    a.out.mkdir(parents=True, exist_ok=True)
    lines = [f"{facts['gpu']} · torch {facts['torch']}, CUDA {facts['cuda']}"]
    lines += [f"missing: {x}: {LOST_WITHOUT[x]}" for x in facts["missing"]]
    head = "\n".join(lines)
    print(head, flush=True)
    summary = a.out / ("summary-more.txt" if a.more else "summary.txt")

    def report(done: list[Done]) -> None:
        summary.write_text(f"{head}\n\n{table(done)}\n")
        print(table(done[-1:]).split("\n", 1)[1], flush=True)

    first, more = Run(a.out.resolve(), facts, wheels).parts()
    steps = {step.name: step for step in (more if a.more else first)}
    if a.only:
        steps = {step.name: step for step in (*first, *more) if step.name in ("build", *a.only)}
    done = run_steps(list(steps.values()), 60 * a.minutes - (time.monotonic() - started), report)
    for step, page in {"bench": "bench.md", "portable": "bench-portable.md", "compile": "compile.md"}.items():
        if step in steps and (a.out / page).exists():
            print(f"\n{(a.out / page).read_text()}")
    print(f"\n{summary.read_text()}\nResults: {a.out.resolve()}")
    return int(any(d.result.status == FAILED for d in done))


if __name__ == "__main__":
    sys.exit(main())
