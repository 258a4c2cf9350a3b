"""The simulator that runs CUDA kernels in tests: its results for sound and faulty kernels (cudasim/selftest.cpp)."""

import ctypes
import functools
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CXX = [*filter(shutil.which, ["ccache"]), *os.environ.get("CXX", "c++").split()]
SANITIZERS = {"address": "address,undefined", "thread": "thread"}
RUNTIMES = {x: f"cudasim/cudasim_{x}.cpp" for x in ("traffic", "memory")}  # in place of ThreadSanitizer's


def compile_flags(kind: str) -> list[str]:
    """Flags for a build of kernels; "memory" and "traffic" compile like "thread" and link another runtime."""
    if kind in RUNTIMES:
        return ["-fsanitize=thread", "-fno-tree-sra"]
    trap = ["-fsanitize-undefined-trap-on-error"] * (kind == "address")
    return [f"-fsanitize={SANITIZERS[kind]}", *trap] if kind in SANITIZERS else []


def link_flags(kind: str) -> list[str]:
    if kind in RUNTIMES:
        return ["-std=c++20", "-O2", "-fPIC", str(HERE / RUNTIMES[kind])]
    return compile_flags(kind)


def cuda_include() -> Path | None:
    """The folder with CUDA's headers: KVOPS_CUDA_INCLUDE, next to nvcc, or from pip's nvidia-cuda-runtime."""
    nvcc = Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc").resolve()
    folders = [nvcc.parent.parent / "include", Path("/usr/local/cuda/include")]
    folders += [x for site in sys.path for x in Path(site).glob("nvidia/*/include")]
    if "KVOPS_CUDA_INCLUDE" in os.environ:
        folders = [Path(os.environ["KVOPS_CUDA_INCLUDE"])]
    return next((x for x in folders if (x / "cuda_bf16.h").exists() and (x / "crt").exists()), None)


def runtime_of(sanitizer: str) -> dict[str, str]:
    """The environment in which Python, which is not instrumented, can load instrumented libraries."""
    names = {"address": ["libasan.so", "libubsan.so"], "thread": ["libtsan.so"]}.get(sanitizer, [])
    paths = [subprocess.check_output([*CXX, f"-print-file-name={x}"], text=True).strip() for x in names]
    return os.environ | {
        "LD_PRELOAD": " ".join(paths),
        # Undefined behavior is an illegal instruction. pytest's own handler for it has too small a stack for a report.
        "ASAN_OPTIONS": "detect_leaks=0:handle_sigill=2:use_sigaltstack=0",
        "TSAN_OPTIONS": "exitcode=66",
        "OMP_NUM_THREADS": "1",
    }


needs_headers = pytest.mark.skipif(
    cuda_include() is None,
    reason="no CUDA headers: install CUDA, pip install nvidia-cuda-runtime, or set KVOPS_CUDA_INCLUDE",
)
pytestmark = needs_headers


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """build(kind): selftest.cpp as a library; `broken` leaves out what three of its kernels need to be correct."""
    folder = tmp_path_factory.mktemp("cudasim")

    @functools.cache
    def get(kind: str, broken: bool = False) -> str:
        flags = ["-O2"] if kind == "plain" else ["-O1", *compile_flags(kind)]
        flags += ["-DCUDASIM_UCONTEXT"] * (kind == "ucontext") + ["-DBROKEN"] * broken
        flags += ["-std=c++20", "-g", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-fno-strict-aliasing", "-fPIC"]
        library = folder / f"{kind}{'-broken' * broken}.so"
        object_file, headers = library.with_suffix(".o"), ["-isystem", cuda_include()]
        subprocess.run([*CXX, *flags, *headers, "-c", HERE / "cudasim/selftest.cpp", "-o", object_file], check=True)
        subprocess.run([*CXX, "-shared", *link_flags(kind), *headers, object_file, "-o", library], check=True)
        return str(library)

    return get


def run(library, name, *ints):
    """The contents of 64 ints, initially -1, after kernel `name`; and the simulator's error message."""
    x = (ctypes.c_int * 64)(*[-1] * 64)
    function = getattr(ctypes.CDLL(library), "run_" + name)
    function.restype = ctypes.c_char_p
    said = function(x, *map(ctypes.c_int, ints))
    return list(x), (said or b"").decode()


ALONE = """
import ctypes, sys
library, name, *ints = sys.argv[1:]
function = getattr(ctypes.CDLL(library), "run_" + name)
function.restype = ctypes.c_char_p
x = ctypes.create_string_buffer(4096)
print("said:", function(ctypes.c_void_p(ctypes.addressof(x) + -ctypes.addressof(x) % 16), *map(int, ints)))
"""


def under(sanitizer, library, name, *ints) -> str:
    """The output of a separate process, which has pytest's handler of signals."""
    command = [sys.executable, "-X", "faulthandler", "-c", ALONE, library, name, *map(str, ints)]
    done = subprocess.run(command, env=runtime_of(sanitizer), capture_output=True, text=True)
    return done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    "name, says",
    [
        (
            "barrier_in_branch",
            r"deadlock.*\(0,0,0\) to \(39,0,0\) wait in __syncthreads at .*selftest.cpp:\d+\n"
            r".*\(40,0,0\) to \(63,0,0\) have returned",
        ),
        (
            "two_barriers",
            r"divergence: it comes to __syncthreads at .*:\d+ while others wait in __syncthreads at .*:\d+",
        ),
        ("lane_outside_mask", r"thread \(16,0,0\).* not in the mask it gives to __shfl_sync at .*:\d+"),
        ("partial_warp", r"lane 0 reads lane 16, which does not take part"),
        ("half_a_tensor_core", r"thread \(\d+,0,0\): mma of a warp that is not whole"),
        ("unaligned_matrix", r"ldmatrix of a row that is not 16-byte aligned"),
        ("empty_block", r"cannot launch an empty grid or block"),
        ("big_block", r"more than 1024 threads"),
    ],
)
def test_faults_are_named(build, name, says):
    _, said = run(build("plain"), name)
    assert re.search(says, said, re.DOTALL), said
    assert name in said or "block" in name
    assert run(build("plain"), "collectives") == ([1] * 64, "")  # and the next launch works again


def test_lanes_that_have_returned(build):
    _, said = run(build("plain"), "early_return", 50)
    assert re.search(r"deadlock.*\(32,0,0\) to \(49,0,0\) wait in __shfl_xor_sync.*have returned", said, re.DOTALL)
    x, said = run(build("plain"), "early_return", 32)  # a whole warp may leave
    assert not said and x[:32] == [i ^ 1 for i in range(32)]


@pytest.mark.parametrize("kind", ["plain", pytest.param("ucontext", marks=pytest.mark.full)])
@pytest.mark.parametrize("seed", "0123")
def test_sound_kernels(build, monkeypatch, seed, kind):
    monkeypatch.setenv("CUDASIM_SEED", seed)
    assert run(build(kind), "half_warps") == (([3] * 16 + [20] * 16) * 2, "")
    assert run(build(kind), "collectives") == ([1] * 64, "")
    assert run(build(kind), "broadcast") == ([7] * 64, "")
    x, said = run(build(kind), "last_block")
    assert not said and x[:8] == list(range(1, 9)) and x[9] == 36


def test_shared_memory_is_limited(build, monkeypatch):
    """Static and dynamic together: 48 KiB, more after opting in, and never more than the device has."""
    library, static, free = build("plain"), 200, 48 << 10
    assert run(library, "static_shared_memory")[0][:2] == [free, static]  # first the maximum, then the actual size
    assert not run(library, "shared_memory", free - static, 0)[1]
    for dynamic, allowed in ((free - static + 1, 0), (free, free - 1), (60000, 50000)):
        said = run(library, "shared_memory", dynamic, allowed)[1]
        assert f"{dynamic + static} bytes of shared memory, {static} of them static: more than 48 KiB must be" in said
    for name, most in {"small": 99 << 10, "a100": 163 << 10, "h200": 227 << 10}.items():
        monkeypatch.setenv("CUDASIM_DEVICE", name)
        assert not run(library, "shared_memory", most - static, most)[1]
        said = run(library, "shared_memory", most - static + 1, most)[1]
        assert f"more than a block may have on {name}" in said


def test_static_shared_memory_counts_the_first_time(build, tmp_path):
    """Also for a kernel that has not run before: in a separate process."""
    said = under("plain", build("plain"), "shared_memory", (48 << 10) - 100, 0)
    assert "49252 bytes of shared memory, 200 of them static: more than 48 KiB must be allowed" in said


def test_devices(build, monkeypatch):
    for name, facts in {
        "small": [4, 99 << 10, 1 << 20, 1],
        "a100": [108, 163 << 10, 40 << 20, 0],
        "h200": [132, 227 << 10, 50 << 20, 1],
        "b200": [148, 227 << 10, 126 << 20, 1],
    }.items():
        monkeypatch.setenv("CUDASIM_DEVICE", name)
        assert run(build("plain"), "device")[0][:4] == facts
    monkeypatch.setenv("CUDASIM_DEVICE", "a100")
    assert "cannot launch clusters on this device" in run(build("plain"), "cluster", 0)[1]
    monkeypatch.setenv("CUDASIM_DEVICE", "v100")
    assert "CUDASIM_DEVICE is v100" in run(build("plain"), "device")[1]


@pytest.mark.parametrize("kind", ["plain", pytest.param("ucontext", marks=pytest.mark.full)])
@pytest.mark.parametrize("seed", "012345")
def test_clusters(build, monkeypatch, seed, kind):
    monkeypatch.setenv("CUDASIM_SEED", seed)
    x, said = run(build(kind), "cluster", 0)
    assert not said and x[:9] == [1] * 8 + [-1]
    for fault, says in enumerate(
        [
            r"deadlock: .*block \(\d,0,0\)\n  threads \(0,0,0\) to \(31,0,0\) wait in cluster_sync at ",
            r"of_block before the first cluster_sync",
            r"of_block of a block that has returned|returns while another may still read its shared memory",
            r"of_block of rank \d, beyond the cluster",
            r"of_block of what is not dynamic shared memory",
            r"deadlock|divergence",
            r"returns while another may still read its shared memory|of_block of a block that has returned",
        ],
        1,
    ):
        _, said = run(build(kind), "cluster", fault)
        assert re.search(says, said, re.DOTALL), (fault, said)
    assert "clusters that are not 1 to 8 blocks, a divisor of grid.x" in run(build(kind), "odd_cluster")[1]


@pytest.mark.parametrize("seed", "012345")
def test_flags_between_blocks(build, monkeypatch, seed):
    monkeypatch.setenv("CUDASIM_SEED", seed)
    for fault in (0, 2, 5):  # 2: atomicExch in place of store_release(), which only the race detector sees as a fault
        x, said = run(build("plain"), "chain", fault)
        assert not said and x[:8] == list(range(1, 9))
    never = (
        r"block \(\d,0,0\), warp 0, thread \(5,0,0\): deadlock: load_acquire at \S+:\d+, \d+ times, and nothing changes"
    )
    if seed == "0":  # the last block's number is in the first
        said = run(build("plain"), "chain", 1)[1]
        assert re.search(rf"{never}; 7 clusters have not started", said)
    for fault in (3, 6):  # no block stores its flag; 6: the loop contains a barrier
        assert re.search(never, run(build("plain"), "chain", fault)[1])


@pytest.mark.parametrize("seed", ["0", "2", "3", "5", "9", "13"])
def test_starved_threads_run_in_the_end(build, monkeypatch, seed):
    """More blocks than run at once; in order 5, 48 do, and some wait until nothing else can run."""
    monkeypatch.setenv("CUDASIM_SEED", seed)
    x, said = run(build("plain"), "long_chain")
    assert not said and x[0] == 100
    crowded = seed in ("5", "9", "13")
    assert 16 < x[1] <= 48 if crowded else x[1] == (int(seed) or 1)
    x, said = run(build("plain"), "late_warps")
    assert not said and (x[0] > 0) == (crowded or seed == "0")


def test_blocks_run_at_once(build, monkeypatch):
    for seed in "012345":
        monkeypatch.setenv("CUDASIM_SEED", seed)
        assert run(build("plain"), "meets_others")[0][1] == (seed in "2345")


@pytest.mark.full
def test_weak_memory_between_blocks(build, monkeypatch):
    """Stores that are not published, and stale loads that are not refreshed, show in some order."""
    library, sums, chains = build("memory"), set(), set()
    for seed in map(str, range(12)):
        monkeypatch.setenv("CUDASIM_SEED", seed)
        for fault in range(4):  # 0 and 1 are sound; 2: no fence before the atomic; 3: none after it, and plain loads
            x, said = run(library, "sum_of_blocks", fault)
            assert not said and (fault > 1 or x[9] == 36)
            if x[9] != 36:
                sums.add(fault)
        for fault in (0, 2, 4):  # 2: the flag is not a release; 4: the load of it is no acquire, either
            if fault and seed in "01":
                continue  # one block at a time
            x, said = run(library, "chain", fault)
            assert not said and (fault or x[:8] == list(range(1, 9)))
            if x[:8] != list(range(1, 9)):
                chains.add(fault)
        assert run(library, "own_stores") == ([i % 32 ^ 1 for i in range(64)], "")
        assert run(library, "cluster", 0)[0][:8] == [1] * 8
        assert run(library, "collectives") == ([1] * 64, "")
    assert sums == {2, 3} and chains == {2, 4}


def test_launches_of_several_threads_take_turns(build):
    results = []
    threads = [
        threading.Thread(target=lambda: results.extend(run(build("plain"), "collectives") for _ in range(20)))
        for _ in range(4)
    ]
    build("plain")
    for x in threads:
        x.start()
    for x in threads:
        x.join()
    assert results == [([1] * 64, "")] * 80


@pytest.mark.full
def test_a_missing_barrier_shows_in_some_order(build, monkeypatch):
    right = []
    for seed in "0123":
        monkeypatch.setenv("CUDASIM_SEED", seed)
        right.append(run(build("plain", broken=True), "broadcast")[0] == [7] * 64)
    assert right[0] and not right[1] and not (right[2] and right[3])


def test_shared_memory_starts_as_rubbish(build):
    assert run(build("plain"), "uninitialised")[0] == [63] * 64  # -1 + 64


def test_copies_arrive_as_late_as_they_may_or_at_once(build, monkeypatch):
    """The previous contents are gone in both cases."""
    unwaited = {}
    for seed in range(12):
        monkeypatch.setenv("CUDASIM_SEED", str(seed))
        assert run(build("plain"), "async_copies")[0][8:10] == [3, 7]
        waited, unwaited[seed] = run(build("plain", broken=True), "async_copies")[0][8:10]
        assert waited == 3
    assert unwaited[0] == -1 and unwaited[1] == 7 and set(unwaited.values()) == {-1, 7}


@pytest.mark.full
@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("bf16", [0, 1])
def test_tensor_cores(build, bf16, transposed):
    for kind in ("plain", "ucontext"):
        x, said = run(build(kind), "tensor_cores", bf16, transposed)
        assert not said and x == [1] * 32 + [-1] * 32
    assert run(build("plain"), "matrix_of_others")[0][:32] == [1] * 32


@pytest.mark.full
def test_tensor_cores_of_tf32(build):
    x, said = run(build("plain"), "tf32_cores")
    assert not said and x == [1] * 32 + [-1] * 32


@pytest.mark.full
def test_races_are_found(build):
    for name in ("broadcast", "warp_synchronous", "last_block", "matrix_of_others"):
        said = under("thread", build("thread", broken=True), name)
        assert re.search(rf"data race.* {name} \S+selftest.cpp:\d+", said, re.DOTALL), said
    for name in ("broadcast", "warp_synchronous", "collectives", "half_warps", "last_block", "matrix_of_others"):
        assert "data race" not in under("thread", build("thread"), name)
    assert "data race" in under("thread", build("thread"), "chain", 2)
    for name in ("chain", "cluster"):
        assert "data race" not in under("thread", build("thread"), name, 0)
    assert "deadlock" in under("thread", build("thread"), "barrier_in_branch")


@pytest.mark.full
def test_accesses_out_of_bounds_are_found(build):
    library = build("address")
    for name, good, bad, says in (
        ("static_overrun", 7, 8, "ILL on unknown address|heap-buffer-overflow"),
        ("dynamic_overrun", 7, 8, "heap-buffer-overflow"),
        ("misaligned", 4, 1, "ILL on unknown address"),
    ):
        assert "said: None" in under("address", library, name, good)
        said = under("address", library, name, bad)
        assert re.search(says, said) and "selftest.cpp" in said, said
    assert "said: None" in under("address", library, "cluster", 0)
    assert "deadlock" in under("address", library, "barrier_in_branch")
