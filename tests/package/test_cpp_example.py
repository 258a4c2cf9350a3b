"""examples/cpp: the operators called from C++, without Python."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

import kvops

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cpp" / "evict.cpp"
TORCH = Path(torch.__file__).parent
LIBRARY = kvops.build_info()["library"]


@pytest.mark.full
@pytest.mark.skipif(not EXAMPLE.exists(), reason="no source tree")
def test_the_example_is_built_and_evicts(tmp_path):
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    program = tmp_path / "evict"
    link = [f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10", "-ldl"]
    command = [*compiler, "-std=c++20", f"-I{TORCH / 'include'}", EXAMPLE, *link, "-o", program]
    subprocess.run(command, check=True, capture_output=True, text=True)
    done = subprocess.run([program, LIBRARY], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "K [1, 8, 4096, 128] -> [1, 8, 1024, 128]\n"), done.stderr
    done = subprocess.run([program, "no-such-library.so"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("no-such-library.so: cannot open")


@pytest.mark.skipif(not EXAMPLE.exists(), reason="no source tree")
def test_the_docs_show_the_example():
    page = EXAMPLE.parents[2] / "docs" / "building.md"
    command = re.search(r"g\+\+ .*evict\.cpp.*", page.read_text().replace("\\\n", " "))
    assert command and "-ltorch_cpu" in command.group() and "(../examples/cpp/evict.cpp)" in page.read_text()
