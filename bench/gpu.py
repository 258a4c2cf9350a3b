"""make gpu: everything that needs a GPU, in one command of under ten minutes, on a bare machine without a network.

    python bench/gpu.py [--out build/gpu/results] [--wheels DIR] [--only build tests ...] [--minutes 9.5]

Needs a Python with torch (CUDA), nvcc, cmake and ninja; pytest and hypothesis for the tests, compute-sanitizer, and
matplotlib for the picture, each of them only where it is there: what is missing is said, and what it is for is not run.
--wheels names a folder of wheels (hypothesis, sortedcontainers, expecttest, say) that are unpacked and used.

    build      both libraries, for this GPU alone, into build/gpu: nothing is installed
    tests      the operators', methods' and streaming tests on device cuda, and test_cuda.py (graphs, streams, repeats)
    memcheck   compute-sanitizer over a sample: each operator and method on a few shapes and dtypes (tests/calls.py)
    racecheck  the same
    hopper     on a Hopper GPU, where CUTLASS is found: its kernels (KVOPS_SM90=1) in the benchmark's rows that use them
    laq        what LAQ adds to a prefill of 32,768 tokens in a stack of 8B shape (laq_cost.py; needs transformers)
    lacache    what LaCache's compactions add to a decode step in such a stack (lacache_cost.py; the same)
    bench      python -m kvops.bench --device cuda, with torch.compile at n = 131072
    end_to_end time to the first token, time per token and memory in such a stack, up to 131,072 tokens (end_to_end.py)

Each step has a time limit, one that fails does not stop the next. Logs, bench.json, bench.png and summary.txt appear in
--out as they come. Ends with a table; the exit status is 1 if anything failed. KVOPS_COMMIT=... names the commit where
there is no repository.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "gpu"
SITE = WORK / "site"  # what a wheel would hold
MODULES = ("pytest", "hypothesis", "expecttest", "numpy", "matplotlib", "transformers")
HOPPER_ROWS = ("window_scores", "window_scores, no lse", "window_attention", "assign_prototypes")  # of the benchmark
LEAST = 5  # seconds; with less left a step is not begun
LOG_BYTES = 1 << 20

PASSED, PARTLY, FAILED, NOT_RUN = "passed", "partly", "failed", "not run"


# Steps


@dataclass
class Result:
    status: str
    note: str = ""
    details: list[str] = field(default_factory=list)


@dataclass
class Step:
    """run(seconds) does it within so many seconds."""

    name: str
    limit: float
    run: Callable[[float], Result]
    needs: str = ""  # a step that must have passed


@dataclass
class Done:
    step: str
    result: Result
    seconds: float


def run_steps(steps: Sequence[Step], seconds: float, report: Callable[[list[Done]], None]) -> list[Done]:
    """All steps in turn within so many seconds; `report` gets the list after each. Nothing that a step does ends it."""
    done: list[Done] = []
    end = time.monotonic() + seconds
    for step in steps:
        began = time.monotonic()
        allowed = min(step.limit, end - began)
        missing = step.needs and not any(d.step == step.needs and d.result.status == PASSED for d in done)
        if missing:
            result = Result(NOT_RUN, f"needs {step.needs}")
        elif allowed < LEAST:
            result = Result(NOT_RUN, "out of time")
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
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        f"{name.ljust(widths[0])}  {status.ljust(widths[1])}  {seconds.rjust(widths[2])}  {note}".rstrip()
        for name, status, seconds, note in rows
    )


# Commands


def execute(command: Sequence[str], log: Path, seconds: float, env: dict[str, str], cwd: Path) -> int | None:
    """Runs it, output to the end of the log; returns its exit status, or None if the time was up."""
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
        finally:  # whatever it started and left behind too
            for last in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, last)
                    process.wait(3)
                except (ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
                    pass
            if log.stat().st_size > LOG_BYTES:
                shorten(log)


def shorten(log: Path) -> None:
    """Head and tail of a log that has become too long."""
    text = log.read_bytes()
    log.write_bytes(text[: LOG_BYTES // 4] + b"\n[...]\n" + text[-LOG_BYTES // 2 :])


def last_line(text: str, most: int | None = 200) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:most] if lines else ""


def find_tool(name: str) -> str | None:
    """Beside this Python first, then on PATH, then where CUDA is installed."""
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
print(json.dumps(found))
"""


def look(env: dict[str, str]) -> dict:
    """What this Python has: torch, a GPU, which of MODULES are missing. In a process of its own, as it takes memory."""
    command = [sys.executable, "-c", LOOK, *MODULES]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=WORK)
    if done.returncode:
        sys.exit(f"make gpu: {sys.executable} cannot import torch: {last_line(done.stderr)}")
    return json.loads(last_line(done.stdout, most=None))


def unpack_wheels(folder: Path) -> Path:
    """The wheels' packages, importable: a wheel is an archive of what pip would install."""
    target = WORK / "wheels"
    shutil.rmtree(target, ignore_errors=True)
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise SystemExit(f"make gpu: no wheels in {folder}")
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
    return target


# What the steps do


class Run:
    def __init__(self, out: Path, facts: dict, wheels: Path | None = None):
        self.out, self.facts, self.wheels = out, facts, wheels

    def log(self, name: str) -> Path:
        file = self.out / f"{name}.log"
        file.unlink(missing_ok=True)
        return file

    def build(self, seconds: float) -> Result:
        log, end = self.log("build"), time.monotonic() + seconds
        cmake, ninja = find_tool("cmake"), find_tool("ninja")
        if not cmake:
            return Result(FAILED, "no cmake")
        shutil.rmtree(SITE, ignore_errors=True)
        major, minor = self.facts["capability"]
        settings = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_INSTALL_PREFIX": SITE,
            "KVOPS_TORCH_DIR": self.facts["folder"],
            "KVOPS_CUDA": 1,
            "KVOPS_CUDA_ARCHS": f"{major}{minor}{'a' * (major == 9)}",
            "CUTLASS_DIR": self.facts["cutlass"],
            **({"CMAKE_MAKE_PROGRAM": ninja} if ninja else {}),
        }
        tree = WORK / ("ninja" if ninja else "make")
        commands = [
            [cmake, "-S", ROOT, "-B", tree, "-G", "Ninja" if ninja else "Unix Makefiles"]
            + [f"-D{name}={value}" for name, value in settings.items()],
            [cmake, "--build", tree, "--parallel", str(os.cpu_count())],
            [cmake, "--install", tree],
            [
                sys.executable,
                "-c",
                "import kvops; cuda = kvops.build_info()['cuda']; print(cuda.get('why') or 'loaded')",
            ],
        ]
        env = environment(self.wheels, CUDAFLAGS="-lineinfo")  # lines in compute-sanitizer's reports
        if not shutil.which(env.get("CUDACXX", "nvcc")) and (nvcc := find_tool("nvcc")):
            env["CUDACXX"] = nvcc
        for command in commands:
            if command is commands[-1]:
                ignored = shutil.ignore_patterns("*.so", "__pycache__")
                shutil.copytree(ROOT / "kvops", SITE / "kvops", ignore=ignored, dirs_exist_ok=True)
            code = execute(list(map(str, command)), log, end - time.monotonic(), env, WORK)
            if code != 0:
                why = "time was up" if code is None else f"exit status {code}"
                return Result(FAILED, f"{why}: {last_line(log.read_text(errors='replace'))}")
        outcome = last_line(log.read_text(errors="replace"))
        if outcome != "loaded":
            return Result(FAILED, outcome)
        details = ["without the Hopper kernels: no nvidia-cutlass, no CUTLASS_DIR"] if self.hopper_missing() else []
        return Result(PASSED, f"sm_{settings['KVOPS_CUDA_ARCHS']}", details)

    def is_hopper(self) -> bool:
        return tuple(self.facts["capability"]) == (9, 0)

    def hopper_missing(self) -> bool:
        return self.is_hopper() and not self.facts["cutlass"]

    def tests(self, seconds: float) -> Result:
        log = self.log("tests")
        names = [file.stem for file in sorted((ROOT / "csrc" / "ops").glob("*.h"))]
        names += ["methods", "baselines", "window_methods", "streaming", "streaming_windows", "protokv"]
        names += ["flash", "cuda"]
        names += ["sm90"] if self.is_hopper() and self.facts["cutlass"] else []
        files = [file for name in names if (file := ROOT / "tests" / f"test_{name}.py").exists()]
        return run_tests(files, log, seconds, environment(self.wheels), SITE, self.facts["missing"])

    def sanitizer(self, tool: str) -> Callable[[float], Result]:
        def run(seconds: float) -> Result:
            sanitizer = find_tool("compute-sanitizer")
            if not sanitizer:
                return Result(NOT_RUN, "no compute-sanitizer")
            log = self.log(tool)
            # Without torch's cache of memory every tensor has bounds that memcheck knows.
            env = environment(self.wheels, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
            options = ["--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
            command = [sanitizer, *options, sys.executable, str(ROOT / "tests" / "calls.py")]
            return judge_sanitizer(execute(command, log, seconds, env, SITE), log.read_text(errors="replace"))

        return run

    def hopper(self, seconds: float) -> Result:
        if not self.is_hopper() or self.hopper_missing():
            return Result(NOT_RUN, "no CUTLASS" if self.is_hopper() else "not a Hopper GPU")
        log, record = self.log("hopper"), self.out / "bench-sm90.json"
        command = [sys.executable, "-m", "kvops.bench", "--device", "cuda", "--json", str(record), "--quick"]
        command += ["--n", "131072", "--dtype", "bf16", "--ops", *HOPPER_ROWS]
        code = execute(command, log, seconds, environment(self.wheels, KVOPS_SM90="1"), SITE)
        if code != 0:
            return Result(FAILED, "time was up" if code is None else f"exit status {code}")
        return Result(PASSED, f"{record.name}; the same rows of the portable kernels are in bench.json")

    def cost(self, name: str) -> Callable[[float], Result]:
        """A script of bench/ that says which goals it reached."""

        def run(seconds: float) -> Result:
            if "transformers" in self.facts["missing"]:
                return Result(NOT_RUN, "no transformers")
            log, record = self.log(name), self.out / f"{name}.json"
            script = str(ROOT / "bench" / f"{name}_cost.py")
            command = [sys.executable, script, "--device", "cuda", "--json", str(record)]
            code = execute(command, log, seconds, environment(self.wheels), SITE)
            text = log.read_text(errors="replace")
            if code != 0:
                return Result(FAILED, "time was up" if code is None else f"exit status {code}: {last_line(text)}")
            goals = re.findall(r"^(?:reached|MISSED).*", text, re.MULTILINE)
            return Result(PASSED, goals[-1] if goals else last_line(text), goals)

        return run

    def end_to_end(self, seconds: float) -> Result:
        if "transformers" in self.facts["missing"]:
            return Result(NOT_RUN, "no transformers")
        log, record = self.log("end_to_end"), self.out / "end_to_end.json"
        picture = [] if "matplotlib" in self.facts["missing"] else ["--out", str(self.out)]
        command = [sys.executable, str(ROOT / "bench" / "end_to_end.py"), "--device", "cuda", "--json", str(record)]
        command += [*picture, "--repeats", "1", "--ratios", "2", "8", "--contexts", "4096", "20480", "131072", "32768"]
        command += ["--seconds", f"{max(1, seconds - 40):.0f}"]
        record.unlink(missing_ok=True)
        code = execute(command, log, seconds, environment(self.wheels), SITE)
        text = log.read_text(errors="replace")
        if code != 0:
            return Result(FAILED, "time was up" if code is None else f"exit status {code}: {last_line(text)}")
        left_out = re.findall(r"^not measured for lack of time: .*", text, re.MULTILINE)
        return Result(PARTLY if left_out else PASSED, record.name, left_out)

    def bench(self, seconds: float) -> Result:
        log, record = self.log("bench"), self.out / "bench.json"
        picture = [] if "matplotlib" in self.facts["missing"] else ["--plot", str(self.out / "bench.png")]
        command = [sys.executable, "-m", "kvops.bench", "--device", "cuda", "--json", str(record), *picture]
        command += ["--compile", "131072", "--seconds", f"{max(1, seconds - 40):.0f}"]
        record.unlink(missing_ok=True)
        code = execute(command, log, seconds, environment(self.wheels), SITE)
        text = log.read_text(errors="replace")
        details = (
            [] if picture else ["no picture: matplotlib is missing; python -m kvops.bench --from bench.json --plot ..."]
        )
        if code is None:
            return Result(FAILED, f"stopped after {seconds:.0f} s; bench.json has what was measured", details)
        reached = re.search(r"^Goals: .*", text, re.MULTILINE)
        failures = re.findall(r"^failed: .*", text, re.MULTILINE)
        left_out = len(re.findall(r"^not measured for lack of time: ", text, re.MULTILINE))
        note = reached.group().removesuffix(".") if reached else last_line(text)
        if left_out:
            details.append(f"{left_out} rows not measured for lack of time")
        return Result(FAILED if code else PARTLY if left_out else PASSED, note, failures[:10] + details)

    def steps(self) -> list[Step]:
        return [
            Step("build", 180, self.build),
            Step("tests", 160, self.tests, needs="build"),
            Step("memcheck", 80, self.sanitizer("memcheck"), needs="build"),
            Step("racecheck", 80, self.sanitizer("racecheck"), needs="build"),
            Step("hopper", 60, self.hopper, needs="build"),
            Step("laq", 60, self.cost("laq"), needs="build"),
            Step("lacache", 40, self.cost("lacache"), needs="build"),
            Step("bench", 300, self.bench, needs="build"),
            Step("end_to_end", 140, self.end_to_end, needs="build"),
        ]


def run_tests(
    files: list[Path], log: Path, seconds: float, env: dict[str, str], cwd: Path, missing: Sequence[str]
) -> Result:
    """Each file in a process of its own, as an illegal access ends all CUDA work of its process; four at a time."""
    if needed := [x for x in ("pytest", "hypothesis") if x in missing]:
        return Result(NOT_RUN, f"{' and '.join(needed)} missing; WHEELS=DIR brings what is not installed")
    chosen, details = "cuda", []
    if "expecttest" in missing:
        chosen += " and not opcheck"
        details.append("not run: opcheck tests (expecttest is missing)")
    end = time.monotonic() + seconds

    def one(file: Path) -> tuple[str, str]:
        part = log.with_name(f"{file.stem}.part")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60"]
        command += ["--tb=short", "--maxfail=20", "-rfE", "-k", chosen, str(file)]
        try:
            code = execute(command, part, max(1, end - time.monotonic()), env, cwd)
            return judge_pytest(code, part.read_text(errors="replace"))
        finally:
            with log.open("ab") as out:
                out.write(part.read_bytes() + b"\n")
            part.unlink()

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(one, files))
    statuses = {status for status, _ in results}
    details = [f"{file.stem}: {status}: {note}" for file, (status, note) in zip(files, results)] + details
    if FAILED in statuses or not files:
        return Result(FAILED, "", details)
    return Result(PARTLY if NOT_RUN in statuses or "expecttest" in missing else PASSED, "", details)


def judge_pytest(code: int | None, text: str) -> tuple[str, str]:
    summary = last_line(text).strip("= ")
    if code is None:
        return FAILED, "stopped, as the time was up; the log has the stack if a test took over a minute"
    if code == 5:
        return NOT_RUN, "it has no test for device cuda"
    if code == 0 and re.search(r"\b\d+ passed", summary):
        return PASSED, summary
    return FAILED, summary or f"exit status {code}"


def judge_sanitizer(code: int | None, text: str) -> Result:
    if "Device not supported" in text:
        return Result(NOT_RUN, "compute-sanitizer does not support this machine")
    if code is None:
        return Result(FAILED, f"stopped, as the time was up, after: {last_line(text)}")
    found = re.search(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard).*", text)
    if not found:
        return Result(FAILED, f"exit status {code}: {last_line(text)}")
    sound = code == 0 and int(found[1] or found[2]) == 0 and re.search(r"^\d+ calls done", text, re.MULTILINE)
    return Result(PASSED if sound else FAILED, found.group())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=WORK / "results", help="folder for the results")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that this Python lacks")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all steps together (default 9.5)")
    names = [step.name for step in Run(Path(), {}).steps()]
    parser.add_argument("--only", nargs="+", choices=names, help="these steps, and the build")
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
    head = f"{facts['gpu']} · torch {facts['torch']}, CUDA {facts['cuda']}"
    if facts["missing"]:
        head += f" · missing: {', '.join(facts['missing'])}"
    print(head, flush=True)

    def report(done: list[Done]) -> None:
        (a.out / "summary.txt").write_text(f"{head}\n\n{table(done)}\n")
        print(table(done[-1:]).split("\n", 1)[1], flush=True)

    run = Run(a.out.resolve(), facts, wheels)
    steps = [step for step in run.steps() if not a.only or step.name in ("build", *a.only)]
    done = run_steps(steps, 60 * a.minutes - (time.monotonic() - started), report)
    log = a.out / "bench.log"
    if log.exists() and any(d.step == "bench" for d in done):
        print(key_rows(log.read_text(errors="replace")))
    print(f"\n{table(done)}\n\nResults: {a.out.resolve()}")
    return int(any(d.result.status == FAILED for d in done))


def key_rows(text: str) -> str:
    """Of the benchmark's output: the table at n = 131072, and the goals."""
    rows = [line for line in text.splitlines() if re.match(r"operator  +n ", line) or re.search(r"  131072  ", line)]
    goals = text[text.index("\nGoals: ") :] if "\nGoals: " in text else ""
    return "\n".join(["", *rows, goals.rstrip()])


if __name__ == "__main__":
    sys.exit(main())
