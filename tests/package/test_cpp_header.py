"""kvops.h, which tools/tables.py generates, the CMake package and examples/cpp: the operators called from C++."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvops

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
EXAMPLE = ROOT / "examples/cpp"
TORCH = Path(torch.__file__).parent
PACKAGE = Path(kvops.build_info()["library"]).parent
COMPILER = [*shlex.split(os.environ.get("CXX") or "c++"), "-std=c++20", "-Wall", "-Wextra", "-Werror"]
# -isystem: warnings in torch's headers are not ours.
INCLUDES = ["-isystem", TORCH / "include", "-I", kvops.include_dir()]
LIBRARIES = [f"-L{TORCH}/lib", f"-L{PACKAGE}", f"-Wl,-rpath,{TORCH}/lib:{PACKAGE}", "-ltorch_cpu", "-lc10", "-lkvops"]
TARGET_2_10 = "-DTORCH_TARGET_VERSION=0x020a000000000000"

pytestmark = pytest.mark.skipif(not EXAMPLE.exists(), reason="no source tree")


def run(*command):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_package_has_them():
    assert {x.name for x in Path(kvops.include_dir()).iterdir()} == {"kvops.h", "kvops_aten.h"}
    config = {x.name for x in Path(kvops.cmake_prefix_path(), "kvops").iterdir()}
    assert config == {"kvopsConfig.cmake", "kvopsConfigVersion.cmake"}


@pytest.mark.parametrize(
    ("version", "asked", "found"),
    [
        ("0.1.3", "", True),
        ("0.1.3", "0.1", True),
        ("0.1.3", "0.1.3 EXACT", True),
        ("0.1.3", "0.1 EXACT", False),
        ("0.1.3", "0.1.4", False),
        ("0.2.0", "0.1", False),  # before 1.0 a minor version may break what another serves
        ("0.10.0", "0.1", False),
        ("1.4.2", "1.2", True),
        ("1.4.2", "1", True),
        ("12.0", "1", False),
        ("2.0.0", "1.4", False),
        ("1.0.0", "0.1", False),
        ("0.1.2", "0.1.0...0.1.2", True),
        ("0.1.2", "0.1.0...<0.1.2", False),
        ("0.1.5", "0.1.0...0.1.2", False),
        ("0.2.0", "0.1...0.3", True),
        (kvops.__version__, kvops.__version__, True),
    ],
)
def test_find_package_of_a_version(tmp_path, version, asked, found):
    config = tmp_path / "kvops/share/cmake/kvops"
    shutil.copytree(Path(kvops.cmake_prefix_path(), "kvops"), config)
    (config / "kvopsConfig.cmake").write_text("")
    (tmp_path / "kvops/version.py").write_text(f'__version__ = "{version}"\n')
    script = tmp_path / "ask.cmake"
    script.write_text(
        f"find_package(kvops {asked} CONFIG QUIET NO_DEFAULT_PATH PATHS {config})\n"
        'file(WRITE "${CMAKE_CURRENT_LIST_DIR}/said" "${kvops_FOUND} ${kvops_VERSION}")\n'
    )
    run(sys.executable, "-m", "cmake", "-P", script)
    said = (tmp_path / "said").read_text().split()
    assert said[0] == ("1" if found else "0") and (not found or said[1] == version)


@pytest.mark.full
def test_the_header_is_enough_and_calls_as_python_does(tmp_path):
    """Two files that include it are linked, and its results are those of the same calls in Python."""
    other = tmp_path / "other.cpp"
    other.write_text('#include "kvops.h"\nkvops::Tensor norms(kvops::Tensor v) { return kvops::value_range(v); }\n')
    program = tmp_path / "calls"
    run(*COMPILER, *INCLUDES, HERE / "header_calls.cpp", other, "-o", program, "-Wl,--no-as-needed", *LIBRARIES)
    plan = kvops.lacache_plan(64, num_layers=2, budget=32)
    lines = run(program, *plan.encoded).splitlines()

    def waves(heads, tokens, step):
        x = torch.sin(torch.arange(heads * tokens * 64, dtype=torch.double) * step)
        return x.float().view(1, heads, tokens, 64)

    k, v, q = waves(2, 64, 0.37), waves(2, 64, 0.71), waves(4, 3, 0.93)
    visible = torch.arange(62, 65, dtype=torch.int32)
    scores, bias = kvops.ops.lag_score(k, v, lag=8, prefix=4, v_weight=0.5), kvops.ops.value_range(v)
    out, lse, attention = kvops.ops.window_attention(
        q, k, v, visible, scale=0.3, reduce="mean", group_reduce="max", key_bias=bias
    )
    dot = kvops.ops.window_scores(q, k, visible, score="dot")
    kept = kvops.ops.select_topk(bias, k=16, sinks=2, window=3)
    clusters = torch.arange(128, dtype=torch.int32).remainder(5).view(1, 2, 64)
    sums = kvops.ops.cluster_mean(bias, clusters, num_clusters=5, reduce="sum")
    k_out, v_out = kvops.ops.gather_kv(k, v, kept)
    ladder_k, ladder_v = kvops.ops.ladder_gather([k, v], [v, k], plan=plan, layer=[0, 1])
    kvops.ops.compact_kv_(k, v, kept)
    expected = {
        "lag_score": scores,
        **{"out": out, "lse": lse, "attention": attention, "dot": dot, "kept": kept, "sums": sums},
        **{"k_out": k_out, "v_out": v_out, "ladder 0": ladder_k[0], "ladder 1": ladder_v[1], "compacted": k},
    }
    for line, (name, x) in zip(lines, expected.items(), strict=False):
        said, total, size = line.rsplit(" ", 2)
        assert (said, int(size)) == (name, x.numel())
        assert float(total) == pytest.approx(x.double().sum().item(), rel=1e-8, abs=1e-7), name
    assert len(lines) == len(expected) + 1 and "select_topk: k must" in lines[-1], lines[-1]


@pytest.mark.full
def test_the_header_needs_only_the_stable_abi(tmp_path):
    """As the library itself: the undefined symbols of a program that calls every function are torch's C shims."""
    source = tmp_path / "every.cpp"
    text = (Path(kvops.include_dir()) / "kvops.h").read_text()
    names = [line.split("(")[0].split()[-1] for line in text.splitlines() if line.startswith("inline ")]
    assert len(names) == len({x for x in torch._C._dispatch_get_all_op_names() if x.startswith("kvops::")})
    calls = "\n".join(f"auto* at_{x} = &kvops::{x};" for x in names)
    source.write_text(f'#include "kvops.h"\n{calls}\n')
    run(*COMPILER, TARGET_2_10, *INCLUDES, "-c", source, "-o", tmp_path / "every.o")
    undefined = {x.split()[-1] for x in run("nm", "-u", tmp_path / "every.o").splitlines()}
    assert "torch_call_dispatcher" in undefined
    assert not {x for x in undefined if "c10" in x or "2at" in x}, undefined
    since = run("nm", "-u", tmp_path / "every.o").splitlines()
    assert [x.split() for x in since if "torch_exception" in x or "stable_ivalue" in x] == [
        ["w", "torch_exception_get_what_without_backtrace"]
    ]


NARROW = """
#include <cstdio>
#include "kvops.h"
int main() {
  AtenTensorHandle x;
  const int64_t sizes[] = {1, 2, 3}, strides[] = {6, 3, 1};
  aoti_torch_empty_strided(3, sizes, strides, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, &x);
  try {
    kvops::select_topk(kvops::Tensor(x), -1);
  } catch (const std::runtime_error& error) {
    std::puts(error.what());
  }
}
"""


@pytest.mark.full
def test_an_error_says_why_in_a_program_for_an_older_torch(tmp_path):
    (tmp_path / "narrow.cpp").write_text(NARROW)
    program = tmp_path / "narrow"
    run(*COMPILER, TARGET_2_10, *INCLUDES, tmp_path / "narrow.cpp", "-o", program, "-Wl,--no-as-needed", *LIBRARIES)
    assert "select_topk: k must" in run(program)


@pytest.mark.full
def test_an_unbuilt_package_is_not_found(tmp_path):
    shutil.copytree(kvops.cmake_prefix_path(), tmp_path / "kvops/share/cmake")
    shutil.copy(PACKAGE / "version.py", tmp_path / "kvops")
    paths = f"{torch.utils.cmake_prefix_path};{tmp_path / 'kvops/share/cmake'}"
    command = ["cmake", "-S", EXAMPLE, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={paths}"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode and "libkvops.so has not been built" in " ".join(done.stderr.split())


@pytest.mark.full
def test_the_example_is_built_by_cmake_and_evicts(tmp_path):
    paths = f"{torch.utils.cmake_prefix_path};{kvops.cmake_prefix_path()}"
    run("cmake", "-S", EXAMPLE, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={paths}")
    run("cmake", "--build", tmp_path)
    assert run(tmp_path / "evict") == "K [1, 8, 4096, 128] -> [1, 8, 1024, 128]\n"


@pytest.mark.full
def test_the_commands_in_the_docs(tmp_path):
    """The one without CMake, as a reader types it."""
    page = (ROOT / "docs/building.md").read_text()
    section = page.partition("## From C++")[2].partition("\n## ")[0]
    commands = section[section.rindex("```text\n") + 8 : section.rindex("```")]
    assert "g++" in commands
    here = tmp_path / "evict"
    text = commands.replace("examples/cpp", str(EXAMPLE)).replace("-o evict", f"-o {here}")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(["bash", "-ec", text], check=True, cwd=ROOT, env={**os.environ, "PATH": path})
    assert run(here) == "K [1, 8, 4096, 128] -> [1, 8, 1024, 128]\n"
