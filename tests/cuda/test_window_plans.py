"""How window_attention's kernel is split on three GPUs, by arithmetic.

The tests compute the bytes in flight per multiprocessor, and the cost of using the same key splits on every GPU instead
of splits tuned for each.
"""

import ctypes
import math
import subprocess
from typing import NamedTuple

import pytest

from test_cudasim import CXX, HERE, cuda_include, needs_headers

pytestmark = needs_headers


class Gpu(NamedTuple):
    multiprocessors: int
    shared: int  # bytes available to a block; a multiprocessor has 1024 more, and each block reserves 1024
    bandwidth: float  # bytes per second


GPUS = {
    "a100": Gpu(108, 163 << 10, 2.0e12),
    "h200": Gpu(132, 227 << 10, 4.8e12),
    "b200": Gpu(148, 227 << 10, 8.0e12),
}
RESERVED, STATIC = 1024, 1024  # bytes per block in addition to its dynamic shared memory


class Plan(NamedTuple):
    row_blocks: int
    keys: int  # per split
    splits: int
    warps: int
    row_warps: int
    stages: int
    shared: int  # dynamic shared memory, in bytes


@pytest.fixture(scope="module")
def plan_of(tmp_path_factory):
    library = tmp_path_factory.mktemp("plans") / "plans.so"
    command = [*CXX, "-std=c++20", "-O0", "-w", "-fPIC", "-shared", "-fno-strict-aliasing", f"-I{HERE / 'cudasim'}"]
    subprocess.run([*command, "-isystem", cuda_include(), HERE / "cudasim/plans.cpp", "-o", library], check=True)
    function = ctypes.CDLL(str(library)).attention_plan

    def get(n: int, rows: int, d: int, gpu: Gpu) -> Plan:
        found = (ctypes.c_int64 * len(Plan._fields))()
        function(*map(ctypes.c_int64, (n, rows, d, gpu.shared)), found)
        return Plan(*found)

    return get


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_decoding_keeps_enough_on_its_way(plan_of, gpu, d):
    plan = plan_of(131072, 4, d, gpu)
    assert plan.row_warps == 1 and plan.stages >= 2
    resident = (gpu.shared + RESERVED) // (plan.shared + STATIC + RESERVED)
    assert resident == (2 if d <= 128 else 1)
    on_its_way = resident * (plan.stages - 1) * plan.warps * 16 * 4 * d  # one of the stages is being computed on
    assert on_its_way >= gpu.bandwidth / gpu.multiprocessors * 800e-9


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("rows", [16, 17, 64, 65, 256, 2048])
@pytest.mark.parametrize("d", [40, 128, 256])
def test_only_stages_depend_on_the_gpu(plan_of, gpu, rows, d):
    plan = plan_of(131072, rows, d, gpu)
    assert plan.shared + STATIC <= gpu.shared and plan.stages >= 2
    small = plan_of(131072, rows, d, Gpu(1, 99 << 10, 0))
    assert small.shared + STATIC <= 99 << 10 and small.stages >= 1
    assert plan._replace(stages=0, shared=0) == small._replace(stages=0, shared=0)


def rounds(gpu: Gpu, row_blocks: int, n: int, keys: int, more: int) -> int:
    """Return the keys that the busiest multiprocessor processes for 8 heads, with `more` keys' time per block added."""
    blocks = 8 * row_blocks * math.ceil(n / keys)
    return math.ceil(blocks / gpu.multiprocessors) * (keys + more)


def own_keys(gpu: Gpu, row_blocks: int, n: int) -> int:
    """Return the keys per split when splits are tuned for the GPU: those of 4 heads fill it twice."""
    blocks = gpu.multiprocessors * 2 // (4 * row_blocks)
    return max(math.ceil(math.ceil(n / max(blocks, 1)) / 256) * 256, 512)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("n", [2**i for i in range(14, 19)])
@pytest.mark.parametrize("rows", [4, 256, 512, 1024])
def test_splits_for_every_gpu_cost_little(plan_of, gpu, rows, n):
    """A block of few rows starts while another block of its multiprocessor reads. A block of 128 rows occupies the
    multiprocessor alone and writes 64 KB that are read again, which takes about the time of 150 keys. Fewer splits are
    better then, and a compromise costs more, most of all for few keys.
    """
    plan = plan_of(n, rows, 128, gpu)
    more, limit = (10, 1.03) if rows == 4 else (150, 1.07 if n > 2**16 else 1.16)
    now = rounds(gpu, plan.row_blocks, n, plan.keys, more)
    own = rounds(gpu, plan.row_blocks, n, own_keys(gpu, plan.row_blocks, n), more)
    assert now <= limit * own
