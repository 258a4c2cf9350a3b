"""The CUDA kernels, run on the CPU by the simulator (cudasim/): the operators' tests in three thread orders, under
AddressSanitizer and UndefinedBehaviorSanitizer, and under ThreadSanitizer; the methods' tests; planted faults."""

import ast
import collections
import os
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import faults
import kit
from faults import FAULTS
from test_cudasim import HERE, RUNTIMES, SANITIZERS, cuda_include, needs_headers, runtime_of
from test_schema import OPERATORS

pytestmark = needs_headers
ROOT = HERE.parents[1]
TORCH = Path(torch.__file__).parent
PLANTED = ROOT / "build/planted"  # csrc with its faults


def files(*names: str) -> list[str]:
    """Return the files of these tests."""
    found = {x: [*ROOT.glob(f"tests/*/test_{x}.py")] for x in names}
    assert all(len(paths) == 1 for paths in found.values()), found
    return [str(path.relative_to(ROOT)) for (path,) in found.values()]


OPERATORS_TESTS = files(*OPERATORS, "operators", "pages", "fp8", "sm90")
FAST = "not opcheck and not many_heads and not repeatable"  # many_heads is slow, repeatable runs four orders itself
# Tests that find nothing that depends on the order of threads.
SLOW = "dtypes_and_head_dims or every_16_bit or rows_at_any_address or partial_rotation"
LONG = "(window or sm90) and not (layouts or batch or limits or splits)"  # those tests cover every path
# Tests with the same accesses and different arithmetic.
ALIKE = "(window or sm90) and (reductions or not_finite) or prototypes and (ties or tiny or opposed or much_alike)"
# Tests that differ only in strides, widths or dtypes.
STRIDES = "every_call_is_the_same and not (vLLM and HND) or every_call_is_that and not (64-80 and dtype0)"
HALVES = (
    "(sm90 or test_window_ and not the_gpu or any_address or (head_dims or layouts) and not quadratic) and dtype1"
    " or sm90 and (4-32 or 2-65)"
)
# Sparse memory is mapped, which sanitizers do not track; what torch compiles is compiled for the host.
UNSEEN = "offsets_beyond or compiles"
# Pages and layouts change addresses, but not how threads communicate.
ADDRESSES = "long_requests or policies or entries_that_name or every_number or change_nothing and (slice or bhnd)"
# The same kernels and accesses as in a smaller test, but minutes long with a function call per access.
LARGE = "several_gpus and 40 or a_batch and 64 or lengths_of_rows and 20000 and not (normal or equal)"
TALK = "compact or select_topk or cluster"

# The runs, longest first: build, thread order, tests. Graphs (opcheck, compile) are the same on every device.
RUNS = {
    "thread": (
        "thread",
        0,
        [
            *OPERATORS_TESTS,
            "-k",
            f"{FAST} and not ({SLOW} or {ALIKE} or {STRIDES} or {UNSEEN} or {ADDRESSES} or {LARGE} or {LONG})",
            *kit.RERUN,
        ],
    ),
    # Also order 2. The two half types have the same addresses.
    "address": (
        "address",
        2,
        [
            *OPERATORS_TESTS,
            "-k",
            f"{FAST} and not ({ALIKE} or {STRIDES} or {HALVES} or {UNSEEN} or {LARGE})",
            *kit.RERUN,
        ],
    ),
    "order 1": ("plain", 1, [*OPERATORS_TESTS, "-k", f"not opcheck and not ({SLOW} or {ALIKE})"]),
    # Kernels whose blocks communicate, in memory as weak as CUDA's.
    "memory": ("memory", 2, [*OPERATORS_TESTS, "-k", f"({TALK}) and {FAST} and not ({SLOW})"]),
    # The same tests in plain memory, with 48 blocks at once, some of them starved.
    "crowd": ("plain", 5, [*OPERATORS_TESTS, "-k", f"({TALK}) and {FAST} and not ({SLOW})"]),
    # The methods on these kernels. Their tests run on the CPU's too.
    "methods": (
        "plain",
        0,
        [
            *files("methods", "streaming", "protokv", "ragged", "shares"),
            "-k",
            "not compile and not trace and not (test_ragged and (steps or first or later))",
            *kit.RERUN,
        ],
    ),
    "plans": ("plain", 0, files("plans")),  # no kernel runs
    "windows": (
        "plain",
        0,
        [*files("window_methods", "baselines", "streaming_windows"), "-k", "not compile", *kit.RERUN],
    ),
}


processes: set[subprocess.Popen] = set()  # the running ones
building = collections.defaultdict(threading.Lock)  # by folder


def run(*command, env=None) -> subprocess.CompletedProcess:
    arguments = ["nice", *(str(x) for x in command)]  # the other tests, which run one after another, take longest
    with subprocess.Popen(
        arguments, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        processes.add(process)
        output, _ = process.communicate()
        processes.discard(process)
    return subprocess.CompletedProcess(arguments, process.returncode, output)


def build(kind: str) -> Path:
    """Builds libkvops_cudasim.so with all faults, switched off; recompiles only what has changed."""
    target = "kvops_cudasim" + (f"_{kind}" if kind in RUNTIMES else "")
    kind = "thread" if kind in RUNTIMES else kind
    scripts = Path(sys.executable).parent
    env = os.environ | {"PATH": f"{scripts}:{os.environ['PATH']}"}
    cmake = shutil.which("cmake", path=env["PATH"])
    folder = ROOT / "build" / ("cudasim" if kind == "plain" else f"cudasim-{kind}")
    options = [f"-DKVOPS_TORCH_DIR={TORCH}", f"-DKVOPS_CUDASIM={PLANTED}", f"-DKVOPS_CUDA_INCLUDE={cuda_include()}"]
    options += [f"-DKVOPS_SANITIZE={SANITIZERS.get(kind, '').replace(',', ';')}"]
    with building[PLANTED]:
        faults.plant(PLANTED)
    with building[folder]:
        for command in (
            ["-S", ROOT, "-B", folder, "-G", "Ninja", *options],
            ["--build", folder, "--target", target, "--parallel", os.cpu_count()],
        ):
            done = run(cmake, *command, env=env)
            assert done.returncode == 0, done.stdout[-5000:]
    return folder / f"lib{target}.so"


def run_tests(kind: str, library: Path, order: int, *tests: str, fault: int = 0) -> subprocess.CompletedProcess:
    env = runtime_of(kind) | {"KVOPS_TEST_LIBRARY": str(library), "CUDASIM_SEED": str(order)}
    env["CUDASIM_FAULT"] = str(fault)
    return run(sys.executable, "-m", "pytest", "--capture=sys", "-p", "no:cacheprovider", *tests, env=env)


class Outcomes:
    """The results of the named runs and faults. All start at once, two at a time, while other tests run.

    sample: If given, each run takes one in so many cases of each test.
    """

    def __init__(self, names: list[str], sample: int | None = None):
        self.pool, self.options = ThreadPoolExecutor(2), ["--sample", str(sample)] if sample else []
        kinds = dict.fromkeys(RUNS[name][0] if name in RUNS else FAULTS[name].build for name in names)
        self.libraries = {kind: self.pool.submit(build, kind) for kind in kinds}
        self.futures = {name: self.pool.submit(self.run, name) for name in names}

    def run(self, name: str) -> subprocess.CompletedProcess:
        if name in RUNS:
            kind, order, tests = RUNS[name]
            return run_tests(kind, self.libraries[kind].result(), order, *tests, *self.options)
        x = FAULTS[name]
        tests = [*files(x.op), "-x", "-k", x.tests]
        return run_tests(x.build, self.libraries[x.build].result(), x.order, *tests, fault=faults.switch_of(x))

    def __getitem__(self, name: str) -> subprocess.CompletedProcess:
        return self.futures[name].result()

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()


def test_every_word_of_the_selections_is_in_the_name_of_a_test():
    """A test that is renamed does not leave a run unseen: each alternative selects tests, each word is in some name."""
    collected = run_tests("plain", build("plain"), 0, "--collect-only", *OPERATORS_TESTS).stdout
    names = [x.rpartition("/")[2] for x in collected.splitlines() if "::" in x]
    assert len(names) > 1000
    for chosen in (FAST, SLOW, LONG, ALIKE, STRIDES, HALVES, UNSEEN, ADDRESSES, LARGE, TALK):
        words = set(re.findall(r"[\w-]+", chosen)) - {"and", "or", "not"}
        assert not [x for x in words if not any(x in name for name in names)]
        tests = re.sub(r"(?!\b(?:and|or|not)\b)\b[\w-]+", r"('\g<0>' in name)", chosen)  # as an expression of Python
        tree = ast.parse(tests, mode="eval").body
        for part in tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.Or) else [tree]:
            selects = compile(ast.Expression(part), "selection", "eval")
            assert any(eval(selects, {"name": name}) for name in names), ast.unparse(part)


QUICK = "order 1"  # the run that is part of `make test`


@pytest.mark.parametrize("name", [x if x == QUICK else pytest.param(x, marks=pytest.mark.full) for x in RUNS])
def test_simulated_kernels_pass(outcomes, name):
    done = outcomes[name]
    assert done.returncode == 0, done.stdout[-5000:]
    assert "data race" not in done.stdout
    assert f"simulated: {' '.join(OPERATORS)}\n" in done.stdout, "some kernels were not the simulator's"
    assert re.search(r"^[1-9]\d+ passed", done.stdout, re.MULTILINE)


@pytest.mark.full
@pytest.mark.parametrize("name", [x for x in FAULTS if kit.in_share(x)])
def test_faults_are_found(outcomes, name):
    done, says = outcomes[name], FAULTS[name].says
    assert done.returncode != 0 and re.search(says, done.stdout, re.DOTALL | re.MULTILINE), done.stdout[-5000:]
