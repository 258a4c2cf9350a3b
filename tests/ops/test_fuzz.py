"""Hostile calls of every operator (fuzz.py) in separate processes, with a fixed time budget per test run."""

import collections
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kit
import kvops
from fuzz import between_guards, names_of, odd_calls, outcome, tensors_of
from kvops import ops

ROOT = Path(__file__).resolve().parents[2]
full = pytest.mark.full


@pytest.mark.parametrize(
    "isa, calls", [("best", 100), pytest.param("best", 800, marks=full), pytest.param("v2", 800, marks=full)]
)
def test_hostile_calls(isa, calls):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    if isa != "best":
        if isa not in kvops.build_info()["isa_built"]:
            pytest.skip("another architecture")
        env["KVOPS_ISA"] = isa
    command = [sys.executable, "tests/fuzz.py", f"--calls={calls}", "--seconds=600", f"--seed={isa == 'best':d}"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    wrong = [f"{x}\n{y}" for x, y in zip(lines, lines[1:]) if y.startswith("WRONG")]
    assert done.returncode == 0 and not wrong, "\n".join([*wrong, *lines[-1:], done.stderr[-2000:]])
    assert lines[-1].startswith("outcomes:") and len(lines) == calls + 1


def test_the_guard_pages_guard():
    """An access past the end kills the process; otherwise the calls would prove nothing."""
    script = "import ctypes, fuzz; x = fuzz.between_guards(16, True); ctypes.string_at(x.data_ptr(), 17)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT / "tests", capture_output=True)
    assert done.returncode < 0
    assert between_guards(16, True).sum() == 0


def contents(x: torch.Tensor) -> torch.Tensor:
    """Return all bytes of the memory of a tensor of any dtype."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).clone()


@pytest.mark.parametrize("operator", ops.__all__)
def test_every_dtype_and_number_for_every_argument(operator):
    """Returns, or raises an error that names the operator and the argument, and changes nothing."""
    refused, names = collections.Counter(), names_of(getattr(ops, operator))
    for argument, function, arguments in odd_calls(operator):
        tensors = tensors_of(arguments)
        before = [contents(x) for x in tensors]
        error = outcome(function, arguments)[1]
        if error is not None:
            refused[argument] += 1
            assert isinstance(error, (TypeError, ValueError, NotImplementedError)), f"{argument}: {error!r}"
            assert operator in str(error), f"{argument}: {error!r}"
            assert any(re.search(rf"\b{x}(?![a-z])", str(error)) for x in names), f"{argument}: {error!r}"
            assert all(map(torch.equal, map(contents, tensors), before)), f"{argument}: {error!r}"
    assert set(refused) == set(names), refused
    assert min(refused.values()) > 20, refused


# Calls that were accepted by mistake in the past.


def test_targets_that_share_memory_with_indices():
    k, v = kit.kv(1, 2, 64, 16)
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    indices = memory[:512].view(torch.int64).view(1, 2, 32)
    indices.copy_(torch.arange(32))
    before = indices.clone()
    out = memory[: 2 * 32 * 16 * 4].view(torch.float32).view(1, 2, 32, 16)
    with pytest.raises(ValueError, match="gather_kv: k_out is written to and must share no memory with indices"):
        ops.gather_kv(k, v, indices, out=(out, torch.empty(1, 2, 32, 16)))
    in_place = memory[: 2 * 64 * 16 * 4].view(torch.float32).view(1, 2, 64, 16)
    with pytest.raises(ValueError, match="compact_kv_: k is written to and must share no memory with indices"):
        ops.compact_kv_(in_place, v, indices)
    assert kit.same([indices], [before])


def test_segments_of_no_slots():
    with pytest.raises(ValueError, match="select_topk: scores must have segments of at least 1"):
        ops.select_topk(torch.zeros(1, 1, 2, 0), k=1, seq_len=100)


def test_a_plan_that_is_a_number():
    k, v = kit.kv(1, 2, 64, 16)
    for call in (ops.ladder_gather, ops.ladder_compact_):
        with pytest.raises(TypeError, match="plan must be a list, got int"):
            call(k, v, plan=7, layer=0)
