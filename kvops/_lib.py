"""Load libkvops.so (schemas and CPU kernels) and, under a torch with CUDA, libkvops_cuda.so (CUDA kernels), and report
what was built and loaded, what was not, and why."""

from __future__ import annotations

import copy
import ctypes
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from .supported import TORCH, minor

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError(
        f"kvops needs torch >= {TORCH.oldest}, which is not installed: pip install torch (https://pytorch.org has the "
        "builds for the CPU and for each CUDA)"
    ) from None

from .version import __version__

MIN_CAPABILITY = (8, 0)
# The operators are torch.ops.<namespace>. It is chosen when kvops is built, and the libraries are named after it.
_libraries = [x for x in Path(__file__).parent.glob("lib*.so") if not x.stem.endswith("_cuda")]
if len(_libraries) > 1:
    raise ImportError(f"kvops: expected one library of operators, got {', '.join(map(str, sorted(_libraries)))}")
LIBRARY = _libraries[0] if _libraries else Path(__file__).with_name("libkvops.so")
NAMESPACE = LIBRARY.stem.removeprefix("lib")
CUDA_LIBRARY = LIBRARY.with_name(f"{LIBRARY.stem}_cuda.so")

_debug = False
_switches: list[Any] = []  # kvops_debug_checks() of each library with CUDA kernels


def load(path: Path | str) -> ctypes.CDLL:
    """Load a library of operators or kernels, and register its debug_checks() switch. The tests load the simulator with
    this function."""
    torch.ops.load_library(path)
    library = ctypes.CDLL(str(path))  # the same handle again; its plain C functions release the GIL
    if hasattr(library, "kvops_debug_checks"):
        switch = library.kvops_debug_checks
        switch.argtypes, switch.restype = [ctypes.c_bool], ctypes.c_bool
        switch(_debug)
        _switches.append(switch)
    return library


def _why_missing() -> str:
    """Explain why there is no libkvops.so, and what to do."""
    package = LIBRARY.parent
    if not (package.parent / "CMakeLists.txt").exists():
        return f"{LIBRARY} is missing from the installed package; reinstall kvops"
    message = f"Python imported the source tree {package}, where {LIBRARY.name} has not been built"
    others = [Path(x or ".").resolve() / "kvops" for x in sys.path]
    installed = [x for x in others if x != package and (x / LIBRARY.name).exists()]
    if installed:
        return f"{message}, and not the package installed in {installed[0]}; start Python in another folder"
    return f"{message}; build it: cd {package.parent} && pip install --no-build-isolation -e ."


def _load() -> ctypes.CDLL:
    if minor(torch.__version__) < minor(TORCH.oldest):
        raise ImportError(f"kvops needs torch >= {TORCH.oldest}, found {torch.__version__}")
    if not LIBRARY.exists():
        raise ImportError(f"kvops: {_why_missing()}")
    if str(LIBRARY) not in torch.ops.loaded_libraries and hasattr(getattr(torch.ops, NAMESPACE), "lag_score"):
        # Registering the same operators twice would abort the process.
        raise ImportError(
            f"kvops: this process has already loaded another copy of the operators, so it cannot load {LIBRARY}"
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


def _driver_and_gpus() -> tuple[int, list[tuple[int, int]]]:
    """Find the CUDA version that the driver supports (12080 is 12.8), or 0, and the compute capability of each GPU.

    Initializing CUDA would break processes that fork later. So this asks NVML, which may be missing.
    """
    driver, count, gpus = ctypes.c_int(), ctypes.c_uint(), []
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(driver)):
            driver.value = 0
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return driver.value, []
    if nvml.nvmlInit_v2():
        return driver.value, []
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for i in range(count.value):
        gpu, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        if not nvml.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(gpu)) and not (
            nvml.nvmlDeviceGetCudaComputeCapability(gpu, ctypes.byref(major), ctypes.byref(minor))
        ):
            gpus.append((major.value, minor.value))
    nvml.nvmlShutdown()
    return driver.value, gpus


def _why_unusable(nvcc: str, driver: int, gpus: list[tuple[int, int]]) -> str:
    """Say why kernels built by this version of nvcc cannot run here; empty if they can, or if nothing was found.

    The CUDA runtime in the library is nvcc's. It runs with every driver for the same major version of CUDA or a newer
    one. One usable GPU is enough.
    """
    major = nvcc.partition(".")[0]
    if driver and driver // 1000 < int(major):
        return (
            f"the CUDA kernels were built by nvcc {nvcc} and need a driver for CUDA {major}.0 or newer, but the NVIDIA "
            f"driver supports CUDA {driver // 1000}.{driver % 1000 // 10}; update the driver"
        )
    if gpus and max(gpus) < MIN_CAPABILITY:
        found = ", ".join(f"{x}.{y}" for x, y in gpus)
        return f"the CUDA kernels need a GPU of compute capability 8.0 or higher, but the GPUs here have {found}"
    return ""


def _load_cuda(cuda: dict[str, Any]) -> str:
    """Load the CUDA kernels. Return why they are not loaded; empty if they are."""
    if not cuda["built"]:
        return cuda["why"]
    if not torch.version.cuda:
        return f"torch {torch.__version__} has no CUDA"
    why = _why_unusable(cuda["nvcc"], *_driver_and_gpus())
    if not why:
        try:
            load(CUDA_LIBRARY)
        except OSError as error:
            why = f"{CUDA_LIBRARY.name} could not be loaded: {error.__cause__ or error}"
    if why:
        warnings.warn(f"kvops works on the CPU only: {why}", RuntimeWarning, stacklevel=2)
    return why


_library = _load()
operators = getattr(torch.ops, NAMESPACE)
_facts = json.loads(_library.kvops_facts())
_facts["cuda"]["why"] = _load_cuda(_facts["cuda"])
_facts.pop("error")
_facts["cuda"]["loaded"] = not _facts["cuda"]["why"]


def include_dir() -> str:
    """Return the folder of `kvops.h`, which declares the operators as C++ functions, and `kvops_aten.h`."""
    return str(LIBRARY.with_name("include"))


def cmake_prefix_path() -> str:
    """Return the folder where CMake's `find_package(kvops)` finds the targets `kvops::kvops` and `kvops::cuda`."""
    return str(LIBRARY.with_name("share") / "cmake")


def build_info() -> dict[str, Any]:
    """Report versions, the CPU instruction set in use, and what was built and loaded. `python -m kvops` prints it.

    Returns:
        A dict with these keys:

        - `kvops`, `torch`: versions of kvops and of the torch that runs.
        - `torch_build`, `torch_target`: the torch that kvops was compiled against, and the oldest that can load it.
        - `compiler`: the C++ compiler and its version.
        - `isa`: the instruction-set level in use. `v2`, `v3` and `v4` are the x86-64 levels, `v4_bf16` is v4 with bf16
          dot products, `v4_amx` that with AMX tiles. On aarch64 they are `neon`, and `neon_bf16` with bf16 products. On
          other processors it is `baseline`.
        - `isa_built`: the levels in this build, lowest first.
        - `cuda`: a dict. `built`: whether there is a CUDA library; `archs`: the GPU architectures it was compiled for;
          `nvcc`: the version of the compiler; `loaded`: whether it is in use; `why`: why it was not built or not
          loaded, else empty: a CUDA library that cannot be loaded, a driver that is too old, or no GPU of compute
          capability 8.0 or higher; `sm90`: the Hopper kernels (`built`, `why` they were not, and `used`: whether
          H100 and H200 run them: false if `KVOPS_SM90=0`).
        - `threads`: the number of CPU threads.
        - `isa_forced`: the environment variable `KVOPS_ISA`, or None.
        - `library`: path of libkvops.so.
    """
    facts = copy.deepcopy(_facts)
    hopper = facts["cuda"]["sm90"]
    hopper["used"] = facts["cuda"]["loaded"] and hopper["built"] and os.environ.get("KVOPS_SM90") != "0"
    return {
        "kvops": __version__,
        "torch": torch.__version__,
        **facts,
        "threads": torch.get_num_threads(),
        "isa_forced": os.environ.get("KVOPS_ISA"),
        "library": str(LIBRARY),
    }


class debug_checks:
    """Check index values on the GPU: indices, starts, lengths and budgets. The CPU always checks them.

    `kvops.debug_checks()` switches the checks on, `kvops.debug_checks(False)` off, and `with kvops.debug_checks():` on
    for one block. The switch applies to all threads of the process.

    Without the checks, CUDA kernels silently skip values that are out of range. With them, the operators copy the
    values back from the GPU and raise the same ValueErrors as on the CPU. Every checked call waits for the GPU.
    Therefore the checks are off by default, and cannot be on while a CUDA graph is captured.
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
    """Return the seconds to read x once with torch's threads. kind 0 is a simd sum, 1 uses four accumulators. For
    benchmarks."""
    return _library.kvops_probe_read(x.data_ptr(), x.numel() * x.element_size(), kind, torch.get_num_threads())


def probe_copy(dst: torch.Tensor, src: torch.Tensor, kind: int) -> float:
    """Return the seconds to copy src to dst with torch's threads. kind 0 is memcpy, 1 uses non-temporal stores, 2 is a
    plain forward loop, whose ranges may overlap (dst below src in the same storage). For benchmarks."""
    size = src.numel() * src.element_size()
    return _library.kvops_probe_copy(dst.data_ptr(), src.data_ptr(), size, kind, torch.get_num_threads())


def probe_pages(x: torch.Tensor, places: torch.Tensor, page_bytes: int) -> float:
    """Return the seconds to read the pages of x in the order of `places` (int32) with torch's threads, prefetching each
    next page. page_bytes is a multiple of 256. For benchmarks."""
    threads = torch.get_num_threads()
    return _library.kvops_probe_pages(x.data_ptr(), places.data_ptr(), places.numel(), page_bytes, threads)
