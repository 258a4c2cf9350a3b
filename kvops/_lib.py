"""Loads libkvops.so (schemas and CPU kernels) and, under a torch with CUDA, libkvops_cuda.so (CUDA kernels). Says what
was built and loaded, what was not, and why."""

from __future__ import annotations

import copy
import ctypes
import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

try:
    import torch
except ImportError as error:
    raise ImportError("kvops needs torch >= 2.10, which is not installed; see https://pytorch.org") from error

from .version import __version__

MIN_TORCH = (2, 10)
LIBRARY = Path(__file__).with_name("libkvops.so")
CUDA_LIBRARY = Path(__file__).with_name("libkvops_cuda.so")

_debug = False
_switches: list[Any] = []  # kvops_debug_checks() of each library that has CUDA kernels


def load(path: Path | str) -> ctypes.CDLL:
    """Loads a library of operators or kernels, so that debug_checks() reaches it. The tests load the simulator so."""
    torch.ops.load_library(path)
    library = ctypes.CDLL(str(path))  # the same handle again; its plain C functions release the GIL
    if hasattr(library, "kvops_debug_checks"):
        switch = library.kvops_debug_checks
        switch.argtypes, switch.restype = [ctypes.c_bool], ctypes.c_bool
        switch(_debug)
        _switches.append(switch)
    return library


def _load() -> ctypes.CDLL:
    if tuple(int(x) for x in re.findall(r"\d+", torch.__version__)[:2]) < MIN_TORCH:
        raise ImportError(f"kvops needs torch >= 2.10, found {torch.__version__}")
    if not LIBRARY.exists():
        raise ImportError(
            f"kvops: {LIBRARY.name} is missing beside {__file__}; build it: pip install --no-build-isolation ."
        )
    if str(LIBRARY) not in torch.ops.loaded_libraries and hasattr(torch.ops.kvops, "lag_score"):
        # A second registration of the same operators would abort the process.
        raise ImportError(
            f"kvops: another copy of the operators is already loaded in this process; not loading {LIBRARY}"
        )
    library = load(LIBRARY)
    library.kvops_facts.restype = ctypes.c_char_p
    probes = (library.kvops_probe_read, 1), (library.kvops_probe_copy, 2), (library.kvops_probe_pages, 2)
    for probe, pointers in probes:
        probe.restype = ctypes.c_double
        probe.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    facts = json.loads(library.kvops_facts())
    if facts["error"]:
        raise ImportError("kvops: " + facts["error"])
    return library


def _load_cuda(built: bool, why: str) -> str:
    """Why the CUDA kernels are not loaded; empty if they are."""
    if not built:
        return why
    if not torch.version.cuda:
        return f"torch {torch.__version__} has no CUDA"
    try:
        load(CUDA_LIBRARY)
    except OSError as error:
        why = f"{CUDA_LIBRARY.name} could not be loaded: {error.__cause__ or error}"
        warnings.warn(f"kvops works on the CPU only: {why}", RuntimeWarning, stacklevel=2)
    return why


_library = _load()
_facts = json.loads(_library.kvops_facts())
_facts["cuda"]["why"] = _load_cuda(_facts["cuda"]["built"], _facts["cuda"]["why"])
_facts.pop("error")
_facts["cuda"]["loaded"] = not _facts["cuda"]["why"]


def build_info() -> dict[str, Any]:
    """What this kvops is: versions, the CPU instruction set in use, what was built, what was not and why.

    Returns a dict: kvops, torch (running), torch_build (compiled against), torch_target (oldest that can load it),
    compiler, isa (in use: v2, v3, v4 are the x86-64 levels, v4_bf16 is v4 with bf16 dot products, baseline elsewhere),
    isa_built, cuda (built, archs, loaded, and why it is not built or not loaded; sm90, the Hopper kernels: built, why
    not, and used, if KVOPS_SM90=1 says so), threads, isa_forced (KVOPS_ISA, if set), library (path).
    """
    facts = copy.deepcopy(_facts)
    hopper = facts["cuda"]["sm90"]
    hopper["used"] = facts["cuda"]["loaded"] and hopper["built"] and os.environ.get("KVOPS_SM90") == "1"
    return {
        "kvops": __version__,
        "torch": torch.__version__,
        **facts,
        "threads": torch.get_num_threads(),
        "isa_forced": os.environ.get("KVOPS_ISA"),
        "library": str(LIBRARY),
    }


class debug_checks:
    """Reads the values of indices, starts, lengths and budgets back from the GPU and checks them, as is always done on
    the CPU: `kvops.debug_checks()` from now on, `kvops.debug_checks(False)` no more, `with kvops.debug_checks():`
    within the block.

    Without it the CUDA kernels skip values that lie outside of their range, silently; with it they raise the CPU's
    ValueErrors. Each such call waits for the GPU, so it is off by default and cannot be on while a CUDA graph is
    captured. One switch for the whole process, all threads.
    """

    def __init__(self, on: bool = True) -> None:
        self._before = _debug
        _switch(bool(on))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        _switch(self._before)


def _switch(on: bool) -> None:
    global _debug
    _debug = on
    for switch in _switches:
        switch(on)


def probe_read(x: torch.Tensor, kind: int) -> float:
    """Seconds to read x's bytes once with torch's threads: kind 0 a simd sum, 1 four accumulators. For benchmarks."""
    return _library.kvops_probe_read(x.data_ptr(), x.numel() * x.element_size(), kind, torch.get_num_threads())


def probe_copy(dst: torch.Tensor, src: torch.Tensor, kind: int) -> float:
    """Seconds to move src's bytes to dst with torch's threads: kind 0 memcpy, 1 non-temporal stores, 2 a plain
    forward loop that may overlap (dst below src in the same storage). For benchmarks."""
    size = src.numel() * src.element_size()
    return _library.kvops_probe_copy(dst.data_ptr(), src.data_ptr(), size, kind, torch.get_num_threads())


def probe_pages(x: torch.Tensor, places: torch.Tensor, page_bytes: int) -> float:
    """Seconds to read x's pages of so many bytes, a multiple of 256, in the order of `places` (int32), each while the
    next is asked for, with torch's threads. For benchmarks."""
    threads = torch.get_num_threads()
    return _library.kvops_probe_pages(x.data_ptr(), places.data_ptr(), places.numel(), page_bytes, threads)
