"""The build and the loader of libkvops_cuda.so, and what the compiler reports about its kernels. Needs no GPU."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools
import torch

import kvops
import resources
import sass
from test_build import (
    ROOT,
    TORCH,
    hardening,
    last_line,
    load_setup_py,
    needs_nm,
    needs_source,
    run,
    script,
    shims,
    symbols,
)

CUDA = kvops.build_info()["cuda"]
LIBRARY = kvops._lib.CUDA_LIBRARY

needs_library = pytest.mark.skipif(not CUDA["built"], reason=f"the CUDA library is skipped: {CUDA['why']}")
needs_readelf = pytest.mark.skipif(not shutil.which("readelf"), reason="no readelf (binutils)")
needs_report = pytest.mark.skipif(bool(resources.missing()), reason=resources.missing())
needs_nvdisasm = pytest.mark.skipif(bool(sass.missing()), reason=sass.missing())
cpu_torch = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")


# The library


@needs_library
@needs_nm
def test_library_asks_torch_for_no_more_than_2_10_has(tmp_path):
    used = {name for kind, name in symbols(LIBRARY, "-D", "--undefined-only") if kind == "U"}
    ours = {x for x in used if x.startswith(("aoti_torch_", "torch_"))}
    assert len(ours) > 10
    assert ours <= shims("0x020a000000000000", tmp_path) | {"aoti_torch_get_current_cuda_stream"}
    assert not [x for x in used if re.search(r"\b(c10|at|torch|caffe2)::", x) or x.startswith(("Py", "_Py"))]


@needs_library
@needs_nm
def test_library_offers_nothing_but_its_switch():
    assert {name for _, name in symbols(LIBRARY, "-D", "--defined-only")} == {"kvops_debug_checks"}


@needs_library
@needs_nm
def test_library_is_hardened():
    assert hardening(LIBRARY) >= {"bound now", "read-only tables", "guarded stacks"}


@needs_library
@needs_readelf
def test_library_finds_torch_by_name_and_carries_the_cuda_runtime():
    lines = run("readelf", "-d", LIBRARY).splitlines()
    needed = {m[1] for x in lines if (m := re.search(r"\(NEEDED\).*\[(.+)\]", x))}
    assert {"libtorch_cuda.so", "libtorch_cpu.so"} <= needed
    assert not [x for x in needed if "cudart" in x or x.startswith("libcuda.")]
    assert not [x for x in lines if "RPATH" in x or "RUNPATH" in x]


# What the compiler reports about the kernels


@needs_library
@needs_report
def test_kernels_spill_no_registers_and_have_no_stack():
    """Checks every instance on every architecture. Spilled registers and the stack are in local memory."""
    found = resources.kernels(LIBRARY)
    assert {x.arch.removeprefix("sm_") for x in found} == set(CUDA["archs"]) or "native" in CUDA["archs"]
    operators = {p.stem for p in ROOT.glob("csrc/cuda/*.cuh")} & set(kvops.ops.__all__)
    assert len({x.name for x in found}) >= len(operators)
    assert [x for x in found if x.stack or x.local] == []


@needs_library
@needs_report
def test_every_gpu_from_the_a100_on_can_run_it():
    """The library has machine code for its architectures, and PTX that the driver of any other GPU can compile."""
    listed = resources.cuobjdump("--list-ptx", LIBRARY) + resources.cuobjdump("--list-elf", LIBRARY)
    ptx = set(re.findall(r"(sm_\w+)\.ptx", listed))
    assert "sm_80" in ptx and not any(x.endswith("a") for x in ptx), ptx
    assert set(re.findall(r"(sm_\w+)\.cubin", listed)) == {f"sm_{x}" for x in CUDA["archs"]}


@needs_library
@needs_report
@needs_source
def test_table_in_the_docs_is_what_was_built():
    text = resources.PAGE.read_text().split(resources.BEGIN)[1].split(resources.END)[0]
    written, here = re.search(r"nvcc ([\d.]+)", text)[1], resources.nvcc_version()
    if written != here:
        pytest.skip(f"the table is of nvcc {written}, this is {here}")
    if not (text := resources.columns_of(text, [f"sm_{x}" for x in CUDA["archs"]])):
        pytest.skip(f"built for {', '.join(CUDA['archs'])}, and not all of these are in the table")
    assert text == resources.table(resources.kernels(LIBRARY), here), "run: python tests/cuda/resources.py --write"


# The machine code, for Hopper


@pytest.fixture(scope="module")
def code():
    if "90a" not in CUDA["archs"]:
        pytest.skip("90a is not among the architectures")
    return sass.functions(resources.disassembly(LIBRARY, sass.ARCH))


@needs_library
@needs_report
def test_hopper_kernels_take_the_registers_that_others_give(code):
    """setmaxnreg would wait for ever if the two consumer warpgroups wanted more than the third has left to them."""
    exchanged = {}
    for x in resources.kernels(LIBRARY):
        changes = [i for i in code.get((x.name, x.instance), ()) if i.op.startswith("USETMAXREG")]
        if x.arch == sass.ARCH and changes:
            takes, gives = (
                [int(i.operands.split()[-1], 16) for i in changes if kind in i.op] for kind in ("_ALLOC", "DE")
            )
            exchanged[x.name, x.instance] = takes, gives
            each = -(-x.registers // 8) * 8  # at the launch
            assert len(takes) == len(gives) == 1 and 2 * (takes[0] - each) <= each - gives[0], (x, takes, gives)
    assert {name for name, _ in exchanged} == {"window_pass_sm90_kernel"} or not CUDA["sm90"]["built"]


# Instructions of a kernel's hot loop per load of 16 bytes, or per product, for bf16 and head_dim 128: those of the
# whole loop, and those of its shortest path. The limits are about 5 % above the code of nvcc 13.0. `tests/cuda/sass.py`
# with the name of a kernel shows the loops.
NVCC = "13.0"
TURNING = ", keys turn"  # the instances of a kernel that rotate keys
MOST = {
    "anchor_score_kernel": (212, 57),
    "anchor_sum_kernel": (251, 57.5),
    "assign_prototypes_kernel": (44, 12),
    "attention_combine_kernel": (16, 16),
    "attention_parts_kernel": (167, 10.3),
    "attention_parts_kernel" + TURNING: (156, 20),
    "build_prototypes_kernel": (42, 42),
    "gather_kv_kernel": (15, 15),
    "ladder_gather_kernel": (284, 25),
    "lag_score_kernel": (74, 72),
    "plain_attention_parts_kernel": (47, 11),
    "rope_at_slots_kernel": (101, 14),
    "select_block_kernel": (77, 33),
    "similarity_kernel": (135, 53),
    "write_chunks_kernel": (137, 77.5),
}
MOST_IN_PAGES = {  # the same kernels on pages
    "anchor_score_kernel": (276, 63),
    "anchor_sum_kernel": (297, 64.5),
    "assign_prototypes_kernel": (56, 11),
    "attention_parts_kernel": (177, 12.2),
    "attention_parts_kernel" + TURNING: (162, 23),
    "build_prototypes_kernel": (66, 41.5),
    "gather_kv_kernel": (41.5, 41.5),
    "lag_score_kernel": (98.5, 97),
    "plain_attention_parts_kernel": (51.5, 10),
    "rope_at_slots_kernel": (110.5, 23),
    "similarity_kernel": (136.5, 53.5),
}
MOST_OF_PRODUCTS = {  # per HMMA, a product of 16 rows with 8 columns; dense and in pages
    "last_similar_kernel": (7.9, 4.8),
    "quadratic_scores_kernel": (4.3, 3.1),
    "query_head_norms_kernel": (3.4, 3.4),
    "trig_products_kernel": (8.5, 8.2),
    "window_scores_kernel": (53.4, 5.4),
    "window_sums_kernel": (69.4, 9),
}
MOST_OF_HOPPER = {  # per HGMMA
    "assign_prototypes_sm90_kernel": (44, 44),
    "last_similar_sm90_kernel": (87.3, 15.1),
    "query_head_norms_sm90_kernel": (25.4, 23.7),
    "window_pass_sm90_kernel": (96.5, 45),
    "window_scores_sm90_kernel": (154.5, 48),
}


@needs_library
@needs_nvdisasm
@pytest.mark.parametrize(
    "kernel",
    [*MOST, *(x + resources.PAGES for x in MOST_IN_PAGES), *MOST_OF_PRODUCTS]
    + [*(x + resources.PAGES for x in MOST_OF_PRODUCTS if x != "last_similar_kernel"), *MOST_OF_HOPPER],
)
def test_hot_loops_are_short(kernel, code):
    if (version := resources.nvcc_version()) != NVCC:
        pytest.skip(f"the numbers are of nvcc {NVCC}, this is {version}")
    if kernel in MOST_OF_HOPPER and not CUDA["sm90"]["built"]:
        pytest.skip(f"no Hopper kernels: {CUDA['sm90']['why']}")
    dense = kernel.removesuffix(resources.PAGES)
    counted = "HGMMA" if kernel in MOST_OF_HOPPER else "HMMA" if dense in MOST_OF_PRODUCTS else sass.WIDE
    name, paged = dense.removesuffix(TURNING), kernel != dense
    instances = sass.usual(code, name, paged)
    if name == "attention_parts_kernel":
        wanted = ["false", "true" if dense != name else "false"]  # kRounded, kTurns
        instances = [x for x in instances if x.removesuffix(resources.PAGES).split(", ")[-2:] == wanted]
    hot = [x for instance in instances for x in sass.hot_loops(code[name, instance], counted)[:1]]
    assert hot, "no loop has such instructions"
    found = [
        max(x) for x in zip(*((len(x.code) / x.count(counted), x.quickest(counted) / x.count(counted)) for x in hot))
    ]
    most = (MOST | MOST_OF_PRODUCTS | MOST_OF_HOPPER | (MOST_IN_PAGES if paged else {}))[dense]
    assert all(x <= y for x, y in zip(found, most)), f"{found} of at most {most}"


@needs_library
@needs_nvdisasm
def test_no_local_memory_and_no_loops_of_compare_and_swap(code):
    """Checks every instance. Shared memory has few atomic instructions; the compiler emulates the others with loops."""

    def having(pattern: str) -> set[str]:
        return {name for (name, _), body in code.items() if sass.count(body, pattern)}

    assert having("LDL|STL") == set()
    assert having(r".*\.CAST\.SPIN") == set()


# The Hopper kernels


@needs_library
@needs_nvdisasm
@pytest.mark.skipif(not CUDA["sm90"]["built"], reason=f"no Hopper kernels: {CUDA['sm90']['why']}")
def test_hopper_kernels_use_its_instructions(code):
    """Those of the tensor cores (HGMMA) and of the copy engine (UTMALDG)."""
    hopper = {key: {x.op for x in body} for key, body in code.items() if "sm90" in key[0]}
    assert {name for name, _ in hopper} == set(MOST_OF_HOPPER) and len(hopper) == 34
    for used in hopper.values():
        assert {x.split(".")[0] for x in used} >= {"HGMMA", "UTMALDG"} and "UTMALDG.4D" in used
        assert not any(x.startswith("HMMA") for x in used)


@needs_library
@needs_nvdisasm
@pytest.mark.skipif(not CUDA["sm90"]["built"], reason=f"no Hopper kernels: {CUDA['sm90']['why']}")
def test_hopper_attention_has_its_exponentials_beside_a_product(code):
    """The wait for the product with V comes after the exponentials, although the compiler could move it before them.
    And the copying warps hand registers to the multiplying ones."""
    passes = {instance: body for (name, instance), body in code.items() if name == "window_pass_sm90_kernel"}
    assert all(
        {"USETMAXREG.DEALLOC.CTAPOOL", "USETMAXREG.TRY_ALLOC.CTAPOOL"} <= {x.op for x in b} for b in passes.values()
    )
    with_values = [body for instance, body in passes.items() if instance.endswith("true")]
    assert len(with_values) == 4
    for body in with_values:
        waits = [i for i, x in enumerate(body) if x.op == "WARPGROUP.DEPBAR.LE"]
        (keys,) = [i for i in waits if body[i].operands.endswith("0x1")]  # one product still runs
        values = min(i for i in waits if i > keys)
        assert sum(x.op == "MUFU.EX2" for x in body[keys:values]) >= 64


@needs_source
@needs_library
@pytest.mark.parametrize(
    "version, why", [(None, "no CUTLASS in {}"), (3, "CUTLASS >= 4 is needed, found 3 in {}"), (4, "")]
)
def test_without_cutlass_the_build_says_why_there_are_no_hopper_kernels(version, why, tmp_path, setup_py):
    cutlass = tmp_path / "cutlass"
    if version:
        for name in ("cute/tensor.hpp", "cutlass/version.h"):
            (cutlass / "include" / name).parent.mkdir(parents=True, exist_ok=True)
            (cutlass / "include" / name).write_text(f"#define CUTLASS_MAJOR {version}\n#define CUTLASS_MINOR 2\n")
    configure(tmp_path, "-DKVOPS_CUDA_ARCHS=90a", f"-DCUTLASS_DIR={cutlass}", CUDACXX=setup_py.find_nvcc()[0])
    assert built_facts(tmp_path)["sm90"] == {"built": not why, "why": why.format(cutlass)}


def test_where_cutlass_is_looked_for(setup_py, monkeypatch, tmp_path):
    monkeypatch.setenv("CUTLASS_DIR", "/some/cutlass")
    assert setup_py.find_cutlass() == "/some/cutlass"
    monkeypatch.delenv("CUTLASS_DIR")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert setup_py.find_cutlass() == ""
    (tmp_path / "cutlass_library").mkdir()
    (tmp_path / "cutlass_library/__init__.py").touch()
    importlib.invalidate_caches()
    assert setup_py.find_cutlass() == str(tmp_path / "cutlass_library/source")


def test_hopper_kernels_are_used_unless_they_are_unwanted(monkeypatch):
    monkeypatch.setitem(kvops._lib._facts["cuda"], "loaded", True)
    monkeypatch.setitem(kvops._lib._facts["cuda"], "sm90", {"built": True, "why": ""})
    for wanted, used in ((None, True), ("0", False), ("1", True)):
        monkeypatch.delenv("KVOPS_SM90", raising=False)
        if wanted:
            monkeypatch.setenv("KVOPS_SM90", wanted)
        assert kvops.build_info()["cuda"]["sm90"]["used"] == used
    kvops._lib._facts["cuda"]["sm90"]["built"] = False
    assert not kvops.build_info()["cuda"]["sm90"]["used"]


# The loader


def load_as(version: str | None, code: str, *libraries: Path) -> subprocess.CompletedProcess:
    """Run code after `import kvops` under a torch that claims to have CUDA `version`."""
    before = "".join(f"ctypes.CDLL({str(x)!r}, ctypes.RTLD_GLOBAL); " for x in libraries)
    start = f"import ctypes, json, torch; torch.version.cuda = {version!r}; {before}import kvops\n"
    return subprocess.run(
        [sys.executable, "-c", start + code], capture_output=True, text=True, cwd=LIBRARY.parent.parent
    )


SAY = "print(json.dumps(kvops.build_info()['cuda']))\n"
EVERY_OVERLOAD = """
def overloads():
    for op in kvops.ops.__all__:
        for overload in getattr(torch.ops.kvops, op).overloads():
            yield f"kvops::{op}" + ("" if overload == "default" else f".{overload}")
"""
WITHOUT_CUDA = """
print([x for x in overloads() if not torch._C._dispatch_has_kernel_for_dispatch_key(x, "CUDA")])
"""
CALL_ON_CUDA = """
k, indices = torch.zeros(1, 1, 4, 64), torch.zeros(1, 1, 2, dtype=torch.int64)
cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
torch.ops.kvops.gather_kv.default.redispatch(cuda, k, k, indices)
"""


def test_what_build_info_reports_about_cuda():
    assert list(CUDA) == ["built", "archs", "nvcc", "why", "sm90", "loaded"]
    assert CUDA["loaded"] == (not CUDA["why"]) and (CUDA["built"] or not CUDA["loaded"])
    assert bool(CUDA["archs"]) == bool(CUDA["nvcc"]) == CUDA["built"] == LIBRARY.exists()
    assert list(CUDA["sm90"]) == ["built", "why", "used"]
    assert CUDA["sm90"]["built"] == (not CUDA["sm90"]["why"]) and CUDA["built"] >= CUDA["sm90"]["built"]
    kvops.build_info()["cuda"]["archs"].append("changed")
    assert kvops.build_info()["cuda"] == CUDA


@needs_library
def test_not_loaded_under_a_torch_without_cuda():
    done = load_as(None, SAY + "print(str(kvops._lib.CUDA_LIBRARY) in torch.ops.loaded_libraries)")
    said, loaded = done.stdout.splitlines()
    assert (json.loads(said)["why"], loaded) == (f"torch {torch.__version__} has no CUDA", "False")
    assert done.stderr == ""


@pytest.mark.parametrize(
    "nvcc, driver, gpus, why",
    [
        ("12.8.93", 12000, [(8, 0)], ""),
        ("12.8.93", 13000, [(12, 0)], ""),
        ("13.0.88", 13000, [], ""),
        ("13.0.88", 0, [], ""),  # no driver: a login node, or a container without GPUs
        ("13.0.88", 12080, [(9, 0)], "nvcc 13.0.88 and need a driver for CUDA 13.0 or newer, but .* CUDA 12.8; update"),
        ("12.8.93", 11040, [(7, 0)], "need a driver for CUDA 12.0 or newer, but the NVIDIA driver supports CUDA 11.4"),
        ("12.8.93", 12040, [(7, 5), (6, 1)], "compute capability 8.0 or higher, but the GPUs here have 7.5, 6.1"),
        ("12.8.93", 12040, [(7, 5), (8, 6)], ""),  # one GPU is enough
    ],
)
def test_drivers_and_gpus(nvcc, driver, gpus, why):
    found = kvops._lib._why_unusable(nvcc, driver, gpus)
    assert re.search(why, found) and bool(found) == bool(why)


NVIDIA = """
int cuDriverGetVersion(int* version) { *version = 12040; return 0; }
int nvmlInit_v2() { return 0; }
int nvmlShutdown() { return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void** gpu) { *gpu = (void*)(long)(10 + i); return i == 1; }
int nvmlDeviceGetCudaComputeCapability(void* gpu, int* major, int* minor) {
  *major = 7;
  *minor = (int)(long)gpu - 10;
  return 0;
}
"""


@cpu_torch
def test_the_driver_and_the_gpus_are_asked(tmp_path):
    """A stand-in for the driver: CUDA 12.4, GPUs of 7.0 and 7.2, and one that cannot be asked. The warning comes before
    the library is loaded."""
    (tmp_path / "nvidia.cpp").write_text(f'extern "C" {{{NVIDIA}}}')
    compiler = os.environ.get("CXX", "c++").split()
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        run(*compiler, "-shared", "-fPIC", tmp_path / "nvidia.cpp", "-o", tmp_path / name)
    code = """
import torch, kvops
torch.version.cuda = "13.0"
print(kvops._lib._driver_and_gpus())
print(kvops._lib._load_cuda({"built": True, "nvcc": "12.8.93"}))
print(kvops.ops.select_topk(torch.arange(4.0).view(1, 1, 4), k=2).tolist())
"""
    env = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT)
    asked, why, result = done.stdout.splitlines()
    assert asked == "(12040, [(7, 0), (7, 2)])" and result == "[[[2, 3]]]"
    assert why == "the CUDA kernels need a GPU of compute capability 8.0 or higher, but the GPUs here have 7.0, 7.2"
    assert f"RuntimeWarning: kvops works on the CPU only: {why}" in done.stderr


@needs_library
@cpu_torch
def test_a_library_that_cannot_be_loaded_is_a_warning():
    """This torch lacks libtorch_cuda.so, so it is enough that it claims to have CUDA."""
    why = "libkvops_cuda.so could not be loaded: libtorch_cuda.so: cannot open shared object file"
    done = load_as("13.0", SAY + "print(kvops.ops.select_topk(torch.arange(4.0).view(1, 1, 4), k=2).tolist())")
    said, result = done.stdout.splitlines()
    assert json.loads(said)["why"].startswith(why) and not json.loads(said)["loaded"]
    assert f"RuntimeWarning: kvops works on the CPU only: {why}" in done.stderr
    assert result == "[[[2, 3]]]"


@needs_library
@cpu_torch
def test_cuda_tensors_without_kernels_are_refused_with_the_reason():
    done = load_as("13.0", CALL_ON_CUDA)
    line = last_line(done.stderr)
    assert line.startswith(
        "NotImplementedError: gather_kv: got CUDA tensors, but kvops has no CUDA kernels here: libkvops"
    )
    assert load_as("13.0", EVERY_OVERLOAD + WITHOUT_CUDA).stdout.strip() == "[]"


@needs_library
@cpu_torch
def test_every_overload_has_a_cuda_kernel(tmp_path):
    """The real library is loaded; a stand-in provides the one function that a CPU torch lacks."""
    source, stand_in = tmp_path / "torch_cuda.cpp", tmp_path / "libtorch_cuda.so"
    source.write_text('extern "C" int aoti_torch_get_current_cuda_stream(int, void**) { return 1; }\n')
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    run(*compiler, "-shared", "-fPIC", f"-Wl,-soname,{stand_in.name}", source, "-o", stand_in)
    done = load_as("13.0", SAY + EVERY_OVERLOAD + WITHOUT_CUDA, stand_in)
    assert done.stderr == ""
    said, without = done.stdout.splitlines()
    hopper = CUDA["sm90"] | {"used": CUDA["sm90"]["built"]}
    assert json.loads(said) == CUDA | {"why": "", "loaded": True, "sm90": hopper}
    assert without == "[]"


def test_debug_checks_is_a_call_and_a_context(monkeypatch):
    told = []
    monkeypatch.setattr(kvops._lib, "_switches", [told.append])
    with kvops.debug_checks():
        with kvops.debug_checks(False):
            assert told == [True, False]
    assert told == [True, False, True, False]
    with pytest.raises(KeyError), kvops.debug_checks():
        raise KeyError
    kvops.debug_checks()
    kvops.debug_checks(False)
    assert told[4:] == [True, False, True, False]


# The build


@pytest.fixture
def setup_py():
    return load_setup_py()


def build(setup_py, folder: Path, monkeypatch, *, inplace: bool = False) -> None:
    """Do what pip does with setup.py, in this folder."""
    monkeypatch.setattr(setup_py, "BUILD", folder / "build")
    monkeypatch.chdir(folder)
    (folder / "kvops").mkdir(exist_ok=True)
    attributes = {"name": "kvops", "packages": ["kvops"], "ext_modules": setup_py.extensions()}
    command = setup_py.CMakeBuild(setuptools.Distribution(attributes))
    command.build_lib, command.inplace = str(folder / "lib"), inplace
    command.ensure_finalized()
    command.run()


@needs_source
@pytest.mark.parametrize("inplace", [False, True], ids=["wheel", "editable"])
def test_no_library_of_an_earlier_build_stays(inplace, setup_py, tmp_path, monkeypatch):
    built = []

    def run_cmake(command, failure, **env):
        for name in built if "--install" in command else ():
            (tmp_path / "lib/kvops").mkdir(parents=True, exist_ok=True)
            (tmp_path / "lib/kvops" / name).write_text("built")

    monkeypatch.setattr(setup_py, "run", run_cmake)
    result = tmp_path / ("kvops" if inplace else "lib/kvops")
    for built in (["libkvops.so", "libkvops_cuda.so"], ["libkvops.so"], ["libkvops.so", "libkvops_cuda.so"]):
        build(setup_py, tmp_path, monkeypatch, inplace=inplace)
        assert sorted(x.name for x in result.iterdir()) == built


def configure(folder: Path, *options: str, expect: int = 0, **env: str) -> str:
    """Run CMake into a folder of its own and return its output."""
    cmake = load_setup_py().find_cmake()
    options = [f"-DKVOPS_TORCH_DIR={TORCH}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", *options]
    return run(cmake, "-S", ROOT, "-B", folder, *options, expect=expect, env=env)


def built_facts(folder: Path) -> dict:
    """Return build_info()["cuda"] of the library that this folder would build, by compiling the files that hold it."""
    commands = json.loads((folder / "compile_commands.json").read_text())
    (command,) = [x["command"] for x in commands if x["file"].endswith("facts.cpp")]
    library = folder / "facts.so"
    command = [*shlex.split(command.replace(" -c ", " -shared ")), ROOT / "csrc/cpu/levels.cpp"]
    run(*command, "-fno-sanitize=all", "-o", library, cwd=folder)
    code = (
        "import ctypes, sys; f = ctypes.CDLL(sys.argv[1]).kvops_facts; f.restype = ctypes.c_char_p; print(f().decode())"
    )
    return json.loads(run(sys.executable, "-c", code, library))["cuda"]


NO_GPU = "no NVIDIA GPU of compute capability >= 8.0 was found when it was built, with KVOPS_CUDA=gpu"


def path_with_nvidia_smi(folder: Path, text: str) -> str:
    script(folder / "nvidia-smi", text)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def path_without_nvcc() -> str:
    folders = [x for x in os.environ["PATH"].split(os.pathsep) if not shutil.which("nvcc", path=x)]
    path = os.pathsep.join(folders)
    if not shutil.which(shlex.split(os.environ.get("CXX") or "c++")[0], path=path):
        pytest.skip("the compiler lies beside nvcc")
    return path


@pytest.mark.full
@needs_source
@pytest.mark.parametrize(
    "options, env, why",
    [
        (["-DKVOPS_CUDA=0"], {}, "switched off by KVOPS_CUDA=0"),
        (["-DKVOPS_CUDA=auto"], {"PATH": None}, "no nvcc was found when it was built"),
        (["-DKVOPS_CUDA=auto"], {"CUDACXX": "no-such-nvcc"}, "no-such-nvcc does not work as nvcc"),
        (["-DKVOPS_CUDA=gpu"], {"NVIDIA_SMI": "exit 9"}, NO_GPU),
        (["-DKVOPS_CUDA=gpu"], {"NVIDIA_SMI": "echo 7.5"}, NO_GPU),
        (["-DKVOPS_SANITIZE=thread"], {}, "left out of a build for the tests"),
    ],
    ids=["off", "no nvcc", "wrong nvcc", "no gpu", "old gpu", "sanitized"],
)
def test_a_build_without_cuda_says_why(options, env, why, tmp_path):
    env = {"CUDACXX": "", **env}
    if env.get("PATH", "") is None:
        env["PATH"] = path_without_nvcc()
    if "NVIDIA_SMI" in env:
        env["PATH"] = path_with_nvidia_smi(tmp_path, env.pop("NVIDIA_SMI"))
    if not env["CUDACXX"]:
        del env["CUDACXX"]
    configure(tmp_path, *options, **env)
    hopper = {"built": False, "why": why}
    assert built_facts(tmp_path) == {"built": False, "archs": [], "nvcc": "", "why": why, "sm90": hopper}


@needs_source
def test_cuda_can_be_demanded(tmp_path):
    out = configure(tmp_path, "-DKVOPS_CUDA=1", CUDACXX="no-such-nvcc", expect=1)
    message = "kvops: KVOPS_CUDA=1, but no-such-nvcc does not work as nvcc; put nvcc on PATH or set CUDACXX"
    assert message in " ".join(out.split())


@pytest.mark.full
@needs_source
@needs_library
@pytest.mark.parametrize("given, built", [("", ["90a", "86"]), ("80", ["80"])])
def test_architectures_of_the_gpus(given, built, tmp_path, setup_py):
    path = path_with_nvidia_smi(tmp_path, "echo 9.0; echo 8.6; echo 9.0; echo 7.5")
    options = ("-DKVOPS_CUDA=gpu", f"-DKVOPS_CUDA_ARCHS={given}")
    configure(tmp_path, *options, CUDACXX=setup_py.find_nvcc()[0], PATH=path)
    facts = built_facts(tmp_path)
    assert (facts["built"], facts["archs"], facts["why"]) == (True, built, "")


@pytest.mark.full
@needs_source
@needs_library
@pytest.mark.parametrize("archs, built", [("", ["80", "90a", "100", "120"]), ("90a", ["90a"]), ("80;90", ["80", "90"])])
def test_architectures(archs, built, tmp_path, setup_py):
    path, version = setup_py.find_nvcc()
    if not archs and setup_py.older(version, "12.8"):
        built = built[:2]
    configure(tmp_path, f"-DKVOPS_CUDA_ARCHS={archs}", CUDACXX=path)
    facts = built_facts(tmp_path)
    hopper = facts.pop("sm90")
    assert setup_py.older(facts.pop("nvcc"), version) is False
    assert facts == {"built": True, "archs": built, "why": ""}
    if "90a" not in built:
        assert hopper == {"built": False, "why": "90a is not among the architectures"}


@needs_source
@pytest.mark.parametrize(
    "variable, value, message",
    [
        ("KVOPS_CUDA", "yes", "kvops: KVOPS_CUDA must be auto, gpu, 0 or 1, got 'yes'"),
        (
            "KVOPS_CUDA_ARCHS",
            "90a;hopper",
            "kvops: KVOPS_CUDA_ARCHS must be architectures such as 80;90a;100;120, or native, got hopper",
        ),
    ],
)
def test_wrong_variables_are_one_line(variable, value, message, setup_py, monkeypatch, tmp_path):
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as error:
        build(setup_py, tmp_path, monkeypatch)
    assert str(error.value) == message


@needs_source
def test_architectures_of_the_variable(setup_py, monkeypatch):
    for text, archs in (("", ""), ("80;90a", "80;90a"), ("80, 90a 100", "80;90a;100"), ("native", "native")):
        monkeypatch.setenv("KVOPS_CUDA_ARCHS", text)
        assert setup_py.cuda_archs() == archs


@needs_source
def test_where_nvcc_is_looked_for(setup_py, monkeypatch, tmp_path):
    for name in ("named", "path", "home/bin"):
        (tmp_path / name).mkdir(parents=True)
        script(tmp_path / name / "nvcc", "echo Cuda compilation tools, release 12.9, V12.9.1\n")
    for name in ("CUDACXX", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    assert setup_py.find_nvcc() is None
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert setup_py.find_nvcc() == (str(tmp_path / "home/bin/nvcc"), "12.9")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert setup_py.find_nvcc() == (str(tmp_path / "path/nvcc"), "12.9")
    monkeypatch.setenv("CUDACXX", str(tmp_path / "named/nvcc"))
    assert setup_py.find_nvcc() == (str(tmp_path / "named/nvcc"), "12.9")
    monkeypatch.setenv("CUDACXX", "no-such-nvcc")
    assert setup_py.find_nvcc() is None
