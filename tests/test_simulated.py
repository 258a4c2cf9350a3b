"""The CUDA kernels, run on the CPU by the simulator (cudasim/): the operators' tests in three orders of threads, under
AddressSanitizer and UndefinedBehaviorSanitizer, and under ThreadSanitizer; the methods' tests; planted faults."""

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

from test_cudasim import (
    CXX,
    HERE,
    RUNTIMES,
    SANITIZERS,
    compile_flags,
    cuda_include,
    link_flags,
    needs_headers,
    runtime_of,
)
from test_schema import OPERATORS

pytestmark = needs_headers
ROOT = HERE.parent
TORCH = Path(torch.__file__).parent
OPERATORS_TESTS = [*(f"tests/test_{op}.py" for op in OPERATORS), "tests/test_sm90.py"]
FAST = "not opcheck and not many_heads and not repeatable"  # many_heads takes long, repeatable is four orders by itself
# What finds nothing that depends on the order of threads.
SLOW = "dtypes_and_head_dims or every_16_bit or rows_at_any_address or partial_rotation"
LONG = "(window or sm90) and not (layouts or batch or limits or splits)"  # every path of theirs is in those
# The same accesses with other arithmetic.
ALIKE = "(window or sm90) and (reductions or not_finite) or prototypes and (ties or tiny or opposed or much_alike)"
TALK = "compact or select_topk or cluster"

# What runs where: build, order of threads, tests. Shapes and graphs (opcheck, compile) are the same on every device.
RUNS = {
    "order 1": ("plain", 1, [*OPERATORS_TESTS, "-k", f"not opcheck and not ({SLOW} or {ALIKE})"]),
    "order 2": ("plain", 2, [*OPERATORS_TESTS, "-k", f"{FAST} and not ({SLOW} or {ALIKE})"]),
    "address": ("address", 0, [*OPERATORS_TESTS, "-k", f"{FAST} and not ({ALIKE})"]),  # and order 0
    "thread": ("thread", 0, [*OPERATORS_TESTS, "-k", f"{FAST} and not ({SLOW} or {ALIKE}) and not ({LONG})"]),
    # Kernels whose blocks tell each other something, in memory as weak as CUDA's.
    "memory": ("memory", 2, [*OPERATORS_TESTS, "-k", f"({TALK}) and {FAST} and not ({SLOW})"]),
    "methods": (
        "plain",
        0,
        [*(f"tests/test_{x}.py" for x in ("methods", "streaming", "protokv")), "-k", "not compile and not trace"],
    ),
    "windows": (
        "plain",
        0,
        [*(f"tests/test_{x}.py" for x in ("window_methods", "baselines", "streaming_windows")), "-k", "not compile"],
    ),
}


processes: set[subprocess.Popen] = set()  # that are running
building = collections.defaultdict(threading.Lock)  # by folder


def run(*command, env=None) -> subprocess.CompletedProcess:
    arguments = [str(x) for x in command]
    with subprocess.Popen(
        arguments, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        processes.add(process)
        output, _ = process.communicate()
        processes.discard(process)
    return subprocess.CompletedProcess(arguments, process.returncode, output)


def build(kind: str) -> Path:
    """libkvops_cudasim.so; what has not changed since the last time is not compiled again."""
    target = "kvops_cudasim" + (f"_{kind}" if kind in RUNTIMES else "")
    kind = "thread" if kind in RUNTIMES else kind
    scripts = Path(sys.executable).parent
    env = os.environ | {"PATH": f"{scripts}:{os.environ['PATH']}"}
    cmake = shutil.which("cmake", path=env["PATH"])
    folder = ROOT / "build" / ("cudasim" if kind == "plain" else f"cudasim-{kind}")
    options = [f"-DKVOPS_TORCH_DIR={TORCH}", "-DKVOPS_CUDASIM=ON", f"-DKVOPS_CUDA_INCLUDE={cuda_include()}"]
    options += [f"-DKVOPS_SANITIZE={SANITIZERS.get(kind, '').replace(',', ';')}"]
    with building[folder]:
        for command in (
            ["-S", ROOT, "-B", folder, "-G", "Ninja", *options],
            ["--build", folder, "--target", target],
        ):
            done = run(cmake, *command, env=env)
            assert done.returncode == 0, done.stdout[-5000:]
    return folder / f"lib{target}.so"


def run_tests(kind: str, library: Path, order: int, *tests: str) -> subprocess.CompletedProcess:
    env = runtime_of(kind) | {"KVOPS_TEST_LIBRARY": str(library), "CUDASIM_SEED": str(order)}
    return run(sys.executable, "-m", "pytest", "--capture=sys", "-p", "no:cacheprovider", *tests, env=env)


# Faults: a change of a kernel's text, and what must come of it: build, tests, what they say.
WRONG_RESULT = "^E +(AssertionError|assert )"
BARRIER = "    __syncthreads();"
HOPPER_PRODUCT = "      multiply_keys<T, kDim, kKeys>(x, q + tile * kRows * kDim, k + ring.stage * kKeys * kDim);\n"
FAULTS = {
    "compact_kv_ writes before all have read": (
        "compact_kv_",
        ("in_place.cuh", f"{BARRIER}  // the whole chunk has been read\n", ""),
        ("plain", "test_layouts", WRONG_RESULT),
    ),
    "compact_kv_ writes before the chunks before have been read": (
        "compact_kv_",
        ("in_place.cuh", "for (int last = static_cast<int>(chunk) - 1; last >= 0;", "for (int last = -1; last >= 0;"),
        ("plain", "test_all_rows_move_a_little", WRONG_RESULT),
    ),
    "ladder_compact_ writes before all have read": (
        "ladder_compact_",
        ("in_place.cuh", f"{BARRIER}  // the whole chunk has been read\n", ""),
        ("thread", "test_layouts", r"ThreadSanitizer: data race.* csrc/cuda/ladder_compact_.cuh:\d+"),
    ),
    "ladder_compact_ reads before all shifts are there": (
        "ladder_compact_",
        ("ladder_compact_.cuh", "  __syncthreads();  // the shifts are there\n", ""),
        ("plain", "test_all_rows_move_a_little", WRONG_RESULT),
    ),
    "gather_kv writes a row too many": (
        "gather_kv",
        ("gather_kv.cuh", "if (first + u * step < m) reinterpret_cast", "if (first + u * step <= m) reinterpret_cast"),
        ("address", "test_dtypes_and_head_dims", r"heap-buffer-overflow.* csrc/cuda/gather_kv.cuh:\d+"),
    ),
    "select_topk counts without atomics": (
        "select_topk",
        ("select.cuh", "atomicAdd(&histogram[bin], 1);", "++histogram[bin];"),
        ("thread", "test_lengths_of_rows and 4099", r"WARNING: ThreadSanitizer: data race.* csrc/cuda/select.cuh:\d+"),
    ),
    "select_topk reads before all have counted": (
        "select_topk",
        (
            "select_topk.cuh",
            f"    count_digit(scores, search.prefix, Digit(d), histogram);\n{BARRIER}\n",
            "    count_digit(scores, search.prefix, Digit(d), histogram);\n",
        ),
        ("plain", "test_lengths_of_rows and 4099", WRONG_RESULT),
    ),
    "select_topk reads other blocks' histograms before they have counted": (
        "select_topk",
        ("select_topk.cuh", "    cluster_sync();  // all blocks have counted\n", ""),
        ("plain", "test_long_rows_on_several_gpus and 1", "of_block before the first cluster_sync"),
    ),
    "select_topk's blocks end while others look into them": (
        "select_topk",
        ("select_topk.cuh", "  cluster_sync();  // no other block looks into this one's shared memory any more\n", ""),
        ("plain", "test_long_rows_on_several_gpus and 1", "its block returns while another may look into its shared"),
    ),
    "lag_score reads the reference before all have written": (
        "lag_score",
        ("lag_score.cuh", f"{BARRIER}  // the reference is written; the ranges may be overwritten\n", ""),
        ("plain", "test_layouts_change_nothing", WRONG_RESULT),
    ),
    "lag_score looks at the other blocks of its cluster before they have told": (
        "lag_score",
        (
            "lag_score.cuh",
            "      cluster_sync();  // all blocks have told; what they tell in the next step goes to another place\n",
            "",
        ),
        ("plain", "test_clusters_change_nothing", "of_block before the first cluster_sync"),
    ),
    "anchor_cosine overwrites sums before all have been read": (
        "anchor_cosine",
        ("anchor_cosine.cuh", f"{BARRIER}  // and may be overwritten\n", ""),
        ("thread", "test_a_batch_changes_nothing", r"ThreadSanitizer: data race.* csrc/cuda/anchor_cosine.cuh:\d+"),
    ),
    "anchor_cosine adds up before all have written": (
        "anchor_cosine",
        ("anchor_cosine.cuh", f"{BARRIER}  // the warps' sums are there\n", ""),
        ("plain", "test_layouts_change_nothing", WRONG_RESULT),
    ),
    "anchor_cosine does not wait for its copies": (
        "anchor_cosine",
        ("anchor_cosine.cuh", "    wait_for_copies<kStages - 1>();\n", ""),
        ("plain", "test_layouts_change_nothing", WRONG_RESULT),
    ),
    "outlier_degree walks before all factors are there": (
        "outlier_degree",
        ("outlier_degree.cuh", f"{BARRIER}  // all factors are there\n", ""),
        ("plain", "test_dtypes_and_head_dims", WRONG_RESULT),
    ),
    "outlier_degree multiplies with a neighbour too many": (
        "outlier_degree",
        ("outlier_degree.cuh", "distance <= kappa ?", "distance <= kappa + 1 ?"),
        ("plain", "test_narrow_and_wide_rows", WRONG_RESULT),
    ),
    "outlier_degree adds up similarities before all have written": (
        "outlier_degree",
        ("outlier_degree.cuh", f"{BARRIER[2:]}  // the block's similarities are there\n", ""),
        ("thread", "test_a_batch_changes_nothing", r"ThreadSanitizer: data race.* csrc/cuda/outlier_degree.cuh:\d+"),
    ),
    "assign_prototypes multiplies before all prototypes are there": (
        "assign_prototypes",
        ("assign_prototypes.cuh", f"{BARRIER}  // the prototypes are there\n", ""),
        ("plain", "test_dtypes_and_head_dims", WRONG_RESULT),
    ),
    "cluster_mean adds without atomics": (
        "cluster_mean",
        ("cluster_mean.cuh", "    atomicAdd(high + cluster, ", "    high[cluster] += ("),
        ("thread", "test_the_order", r"ThreadSanitizer: data race.* csrc/cuda/cluster_mean.cuh:\d+"),
    ),
    "cluster_mean adds to what other blocks do not see yet": (
        "cluster_mean",
        ("cluster_mean.cuh", "    atomicAdd(sums + cluster, sum);", "    sums[cluster] += sum;"),
        ("memory", "test_many_tokens", WRONG_RESULT),
    ),
    "window_scores multiplies before all queries are there": (
        "window_scores",
        ("window_scores.cuh", f"{BARRIER}  // queries, weights and limits are there\n", ""),
        ("plain", "test_dtypes_and_head_dims", WRONG_RESULT),
    ),
    "window_scores adds up rows before all warps have": (
        "window_scores",
        ("window_scores.cuh", f"{BARRIER}  // all states are final\n", ""),
        ("thread", "test_limits", r"ThreadSanitizer: data race.* csrc/cuda/window_scores.cuh:\d+"),
    ),
    "window_scores lets rows see one key too many": (
        "window_scores",
        ("window_scores.cuh", "first <= j && j < limits[r]", "first <= j && j <= limits[r]"),
        ("plain", "test_limits", WRONG_RESULT),
    ),
    "window_attention cuts sums by the GPU": (
        "window_attention",
        ("window.cuh", "148 / row_blocks", "multiprocessors() / 2 / row_blocks"),
        ("plain", "test_the_gpu_changes_nothing", WRONG_RESULT),
    ),
    "window_attention does not wait for its copies": (
        "window_attention",
        ("window_attention.cuh", "    wait_for_stage<3>(plan.stages);\n", ""),
        ("plain", "test_limits", WRONG_RESULT),
    ),
    "window_attention reads keys before all have copied": (
        "window_attention",
        ("window_attention.cuh", "    meet();  // the tile is there\n", ""),
        ("plain", "test_limits", WRONG_RESULT),
    ),
    "window_attention adds up before all warps have written": (
        "window_attention",
        ("window_attention.cuh", "  __syncthreads();  // all warps' sums are there\n", ""),
        ("plain", "test_limits", WRONG_RESULT),
    ),
    "window_attention copies over a tile before all have read it": (
        "window_attention",
        ("window_attention.cuh", "    meet();  // the tile may be overwritten\n", ""),
        ("plain", "test_window_sizes and 256", WRONG_RESULT),
    ),
    "a Hopper kernel releases keys before it has read them": (
        "sm90",
        (
            "sm90/window_scores.cuh",
            f"{HOPPER_PRODUCT}      if (tile == tiles - 1) ring.release();\n",
            f"      if (tile == tiles - 1) ring.release();\n{HOPPER_PRODUCT}",
        ),
        ("plain", "test_lengths and 1000", WRONG_RESULT),
    ),
    "a Hopper kernel multiplies queries that it has not fenced": (
        "sm90",
        ("sm90/window_scores.cuh", "  share_stores(kConsumers, kAllConsumers);", "  meet(kConsumers, kAllConsumers);"),
        ("plain", "test_lengths and 64", r"window_scores_sm90_kernel.* wgmma at \S+window_scores.cuh:\d+: .* no fence"),
    ),
}
ORDERS = {  # of threads, where 0 does not show a fault
    "cluster_mean adds to what other blocks do not see yet": 2,
    "compact_kv_ writes before the chunks before have been read": 2,
    "window_attention copies over a tile before all have read it": 2,
    "a Hopper kernel releases keys before it has read them": 2,
}

# What is compiled, where it is more than an operator's own kernels.
SOURCES = {
    "window_attention": ["window_attention", "window_scores"],
    "sm90": ["sm90/hopper", "window_scores"],
}


def run_fault(name: str, folder: Path) -> subprocess.CompletedProcess:
    op, (file, right, wrong), (kind, tests, _) = FAULTS[name]
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    path = folder / "csrc/cuda" / file
    text = path.read_text()
    assert text.count(right) == 1, f"{file} has changed: {right!r} is there {text.count(right)} times"
    path.write_text(text.replace(right, wrong))
    library = folder / "libfault.so"
    sources = [folder / f"csrc/cuda/{x}.cu" for x in SOURCES.get(op, [op])]
    objects = [folder / f"{x.stem}.o" for x in sources]
    includes = [f"-I{HERE / 'cudasim'}", "-isystem", cuda_include(), "-isystem", TORCH / "include"]
    for source, to in zip(sources, objects, strict=True):
        done = run(
            *[*CXX, "-std=c++20", "-O1", "-g1", "-w", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing"],
            *compile_flags(kind),
            *[f"-ffile-prefix-map={folder}/=", "-DKVOPS_CUDASIM", "-DTORCH_TARGET_VERSION=0x020a000000000000"],
            *["-DKVOPS_SM90"] * (op == "sm90"),
            *[*includes, "-x", "c++", "-c", source, "-o", to],
        )
        assert done.returncode == 0, done.stdout[-5000:]
    done = run(*CXX, "-shared", *link_flags(kind), *includes, *objects, TORCH / "lib/libtorch_cpu.so", "-o", library)
    assert done.returncode == 0, done.stdout[-5000:]
    return run_tests(kind, library, ORDERS.get(name, 0), f"tests/test_{op}.py", "-x", "-k", tests)


class Outcomes:
    """What the named runs and faults gave. All begin at once, two at a time, beside whatever else the session does."""

    def __init__(self, names: list[str], folder: Path):
        self.folder = folder
        self.pool = ThreadPoolExecutor(2)
        kinds = dict.fromkeys(RUNS[name][0] for name in names if name in RUNS)
        self.libraries = {kind: self.pool.submit(build, kind) for kind in kinds}
        self.futures = {name: self.pool.submit(self.run, name) for name in names}

    def run(self, name: str) -> subprocess.CompletedProcess:
        if name in FAULTS:
            return run_fault(name, self.folder / name.replace(" ", "-"))
        kind, order, tests = RUNS[name]
        return run_tests(kind, self.libraries[kind].result(), order, *tests)

    def __getitem__(self, name: str) -> subprocess.CompletedProcess:
        return self.futures[name].result()

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()


@pytest.fixture
def outcomes(request) -> Outcomes:
    return request.config.outcomes  # conftest.py begins them


@pytest.mark.parametrize("name", RUNS)
def test_simulated_kernels_pass(outcomes, name):
    done = outcomes[name]
    assert done.returncode == 0, done.stdout[-5000:]
    assert "data race" not in done.stdout
    assert f"simulated: {' '.join(OPERATORS)}\n" in done.stdout, "some kernels were not the simulator's"
    assert re.search(r"^[1-9]\d+ passed", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(outcomes, name):
    op, _, (_, _, says) = FAULTS[name]
    done = outcomes[name]
    assert done.returncode != 0 and re.search(says, done.stdout, re.DOTALL | re.MULTILINE), done.stdout[-5000:]
