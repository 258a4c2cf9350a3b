"""Loads libkvops.so (schemas and CPU kernels) and says what was built, what was not, and why."""

from __future__ import annotations

import ctypes
import json
import os
import re
from pathlib import Path

try:
    import torch
except ImportError as error:
    raise ImportError("kvops needs torch >= 2.10, which is not installed; see https://pytorch.org") from error

from .version import __version__

MIN_TORCH = (2, 10)
LIBRARY = Path(__file__).with_name("libkvops.so")


def _load() -> ctypes.CDLL:
    if tuple(int(x) for x in re.findall(r"\d+", torch.__version__)[:2]) < MIN_TORCH:
        raise ImportError(f"kvops needs torch >= 2.10, found {torch.__version__}")
    if not LIBRARY.exists():
        raise ImportError(
            f"kvops: {LIBRARY.name} is missing beside {__file__}; build it: pip install --no-build-isolation ."
        )
    if str(LIBRARY) not in torch.ops.loaded_libraries:
        if hasattr(torch.ops.kvops, "lag_score"):
            # A second registration of the same operators would abort the process.
            raise ImportError(
                f"kvops: another copy of the operators is already loaded in this process; not loading {LIBRARY}"
            )
        torch.ops.load_library(LIBRARY)
    library = ctypes.CDLL(str(LIBRARY))  # the same handle again; its plain C functions release the GIL
    library.kvops_facts.restype = ctypes.c_char_p
    for probe, pointers in ((library.kvops_probe_read, 1), (library.kvops_probe_copy, 2)):
        probe.restype = ctypes.c_double
        probe.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    facts = json.loads(library.kvops_facts())
    if facts["error"]:
        raise ImportError("kvops: " + facts["error"])
    return library


_library = _load()


def build_info() -> dict:
    """What this kvops is: versions, the CPU instruction set in use, what was built, what was not and why.

    Returns a dict: kvops, torch (running), torch_build (compiled against), torch_target (oldest that can load it),
    compiler, isa (in use: v2, v3, v4 are the x86-64 levels, baseline elsewhere), isa_built, cuda (built, why), threads,
    isa_forced (KVOPS_ISA, if set), library (path).
    """
    facts = json.loads(_library.kvops_facts())
    facts.pop("error")
    return {
        "kvops": __version__,
        "torch": torch.__version__,
        **facts,
        "threads": torch.get_num_threads(),
        "isa_forced": os.environ.get("KVOPS_ISA"),
        "library": str(LIBRARY),
    }


def probe_read(x: torch.Tensor, kind: int) -> float:
    """Seconds to read x's bytes once with torch's threads: kind 0 a simd sum, 1 four accumulators. For benchmarks."""
    return _library.kvops_probe_read(x.data_ptr(), x.numel() * x.element_size(), kind, torch.get_num_threads())


def probe_copy(dst: torch.Tensor, src: torch.Tensor, kind: int) -> float:
    """Seconds to move src's bytes to dst with torch's threads: kind 0 memcpy, 1 non-temporal stores, 2 a plain
    forward loop that may overlap (dst below src in the same storage). For benchmarks."""
    size = src.numel() * src.element_size()
    return _library.kvops_probe_copy(dst.data_ptr(), src.data_ptr(), size, kind, torch.get_num_threads())
