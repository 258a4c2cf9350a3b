"""How window_attention's kernel is cut for three GPUs, by arithmetic: what is on its way to a multiprocessor, and what
splits of the keys that are the same for every GPU cost beside ones made for each."""

import ctypes
import math
import subprocess
from typing import NamedTuple

import pytest

from test_cudasim import CXX, HERE, cuda_include, needs_headers

pytestmark = needs_headers


class Gpu(NamedTuple):
    multiprocessors: int
    shared: int  # bytes that a block may have; a multiprocessor has 1024 more, and each block takes 1024 itself
    bandwidth: float  # bytes per second


GPUS = {
    "a100": Gpu(108, 163 << 10, 2.0e12),
    "h200": Gpu(132, 227 << 10, 4.8e12),
    "b200": Gpu(148, 227 << 10, 8.0e12),
}
RESERVED, STATIC = 1024, 1024  # bytes of each block beside its dynamic shared memory


class Plan(NamedTuple):
    row_blocks: int
    keys: int  # of a split
    splits: int
    warps: int
    row_warps: int
    stages: int
    shared: int  # dynamic


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
    on_its_way = resident * (plan.stages - 1) * plan.warps * 16 * 4 * d  # while a warp works on one more stage
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
    """The keys that the busiest multiprocessor goes through for 8 heads, and for each block the time of `more`."""
    blocks = 8 * row_blocks * math.ceil(n / keys)
    return math.ceil(blocks / gpu.multiprocessors) * (keys + more)


def own_keys(gpu: Gpu, row_blocks: int, n: int) -> int:
    """Of splits made for the GPU: those of 4 heads fill it twice."""
    blocks = gpu.multiprocessors * 2 // (4 * row_blocks)
    return max(math.ceil(math.ceil(n / max(blocks, 1)) / 256) * 256, 512)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("n", [2**i for i in range(14, 19)])
@pytest.mark.parametrize("rows", [4, 256, 512, 1024])
def test_splits_for_every_gpu_cost_little(plan_of, gpu, rows, n):
    """A block of few rows begins while another of its multiprocessor reads. One of 128 rows has it alone, and writes
    64 KB that are read again: together some 150 keys' time. Then fewer splits are better, and a compromise costs more,
    most where the keys are few."""
    plan = plan_of(n, rows, 128, gpu)
    more, limit = (10, 1.03) if rows == 4 else (150, 1.07 if n > 2**16 else 1.16)
    now = rounds(gpu, plan.row_blocks, n, plan.keys, more)
    own = rounds(gpu, plan.row_blocks, n, own_keys(gpu, plan.row_blocks, n), more)
    assert now <= limit * own
