"""Every operator's launches on GPUs of different sizes: legal for head dims 8 to 1024, all dtypes, and sizes at the
edges of tiles. The simulator checks each launch and runs no kernel (CUDASIM_DRY), so only plans are computed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
import re
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import kit
import resources
import traffic
from calls import CALLS, OPERATORS_CALLS, Inputs, inputs

pytestmark = pytest.mark.skipif(not kit.SIMULATED, reason="only in a run with simulated kernels")

# 99, 163 and 227 KB of shared memory per block; 16 to 170 multiprocessors. "+sm90" selects the Hopper kernels.
CARDS = ("rtx3090/5", "rtx3090", "rtx5090", "a100", "h200", "h200+sm90", "b200")
SHARED = {"rtx3090": 99 << 10, "rtx5090": 99 << 10, "a100": 163 << 10, "h200": 227 << 10, "b200": 227 << 10}
DTYPES = (*kit.DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)
LENGTHS = (96, 127, 128, 129, 255, 257, 511, 512, 513, 1025, 2047, 4097, 16385, 131072)
HEADS = ((1, 1), (1, 8), (3, 2), (2, 5), (1, 33))  # (b, Hk)
GROUPS, ROWS = (1, 4, 7, 8, 64), (1, 2, 6, 16, 17, 64, 65, 255, 256)
STORED = ("k", "v", "deep", "out", "ladder_out", "lagkv_out")  # of the dtype of keys and values
COMPUTED = ("q", "w_o")  # of the dtype that they are computed in: bf16 for fp8
BYTES = 1 << 30  # of K at most; the memory is never touched


@functools.cache
def launch_bounds() -> dict[str, int]:
    """The most threads that each kernel may be launched with, by its source. Those that depend on a template's
    arguments are left out."""
    text = "".join(x.read_text() for x in resources.ROOT.glob("csrc/cuda/**/*.cuh"))
    values = {}
    for name, value in 3 * re.findall(r" (k\w+) = ([\w +*/]+)(?=[,;])", text):  # in turns: some use others
        with contextlib.suppress(NameError, SyntaxError):
            values[name] = eval(value.replace("/", "//"), {}, values)
    found = re.findall(r"__launch_bounds__\((\w+)(?:, [^)]*)?\)\s+(?://[^\n]*\s+)?(\w+)\(", text)
    return {kernel: int(most) if most.isdigit() else values[most] for most, kernel in found}


@functools.cache
def shapes(d: int) -> Inputs:
    """Inputs without data, of sizes drawn such that over all head dims every size occurs often."""
    rng = random.Random(d)
    dv = rng.choice((d, d, rng.randrange(16, 1025, 16)))
    b, heads, n = rng.choice(
        [(*x, n) for x, n in itertools.product(HEADS, LENGTHS) if math.prod(x) * n * d < BYTES / 4]
    )
    group, rows = rng.choice(GROUPS), rng.choice(ROWS)
    with FakeTensorMode():
        x = inputs(0, b=b, heads=heads, n=n, d=d, dv=dv)
        wide_q, *stored = x.rounded
        queries = dict(
            q=x.q.new_empty(b, group * heads, rows, d),
            rounded=(wide_q.new_empty(b, group * heads, rows, wide_q.shape[-1]), *stored),
            visible=x.visible.new_empty(b, rows),
        )
        per_row = dict(sink_logits=x.lse.new_empty(group * heads), lse=x.lse.new_empty(b, group * heads, rows))
        return replace(x, **queries, **per_row)


def allocated(x: Inputs, dtype: torch.dtype) -> Inputs:
    """The inputs with data that is never read, since no kernel runs."""
    computed = torch.bfloat16 if dtype.itemsize == 1 else dtype
    dtypes = dict.fromkeys(STORED, dtype) | dict.fromkeys(COMPUTED, computed)

    found = {}
    for field in fields(x):
        value, wanted = getattr(x, field.name), dtypes.get(field.name)
        made = [
            torch.empty(y.shape, dtype=wanted or y.dtype) for y in ([value] if isinstance(value, Tensor) else value)
        ]
        found[field.name] = made[0] if isinstance(value, Tensor) else tuple(made)
    return Inputs(**found)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_launches_are_legal(dtype, card, monkeypatch, tmp_path):
    """The simulator refuses empty and oversized grids, blocks and clusters. It learns a kernel's static shared memory
    only by running it, so here the table of docs/cuda.md supplies it; and it does not see launch bounds."""
    name, _, hopper = card.partition("+")
    notes = tmp_path / "launches"
    monkeypatch.setenv("CUDASIM_DEVICE", name)
    monkeypatch.setenv("CUDASIM_DRY", str(notes))
    monkeypatch.setenv("KVOPS_SM90", str(int(bool(hopper))))
    static = {kernel: bytes for kernel, (_, bytes) in traffic.kernels_of(traffic.CARDS["h200"]).items()}
    for d in range(max(8, 16 // dtype.itemsize), 1025, 16 // dtype.itemsize):
        x = allocated(shapes(d), dtype)
        for call in OPERATORS_CALLS:
            notes.write_text("")
            where = f"{call}, {dtype}, k {list(x.k.shape)}, v {list(x.v.shape)}, q {list(x.q.shape)} on {card}"
            try:
                CALLS[call](x)
            except Exception as error:
                if dtype.itemsize == 1 and "must be float32, float16 or bfloat16" in str(error):
                    continue  # not every operator reads fp8
                raise AssertionError(where) from error
            launches = notes.read_text().splitlines()
            assert launches, f"{where}: launches nothing"
            for line in launches:
                kernel, _, block, dynamic, _ = line.split("\t")
                kernel = re.search(r"(\w+)(<.*)?$", kernel)[1]
                threads = math.prod(map(int, block.split(",")))
                assert threads <= launch_bounds().get(kernel, 1024), f"{where}: {line}"
                assert int(dynamic) + static[kernel] <= SHARED[name.partition("/")[0]], f"{where}: {line}"
