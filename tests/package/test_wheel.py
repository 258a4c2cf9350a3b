"""The wheel of `make wheel`: its tags, files and symbols; and which kvops Python imports beside a clone."""

import email
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import kvops
from kvops import supported
from test_build import LEVELS, LIBRARY, ROOT, TORCH, last_line, load_setup_py, needs_source, run, script

SMOKE = ROOT / "tests/package/smoke_wheel.py"

pytestmark = needs_source
needs_tools = pytest.mark.skipif(
    not (shutil.which("readelf") and importlib.util.find_spec("auditwheel")),
    reason="no binutils or no auditwheel",
)


def load(path: str):
    """Import a module of tools/, which is no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / "tools" / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tool():
    return load("wheel.py")


@pytest.fixture(scope="module")
def wheel(tool, tmp_path_factory) -> Path:
    """The wheel, from the objects of the build that is here."""
    cuda = kvops.build_info()["cuda"]
    env = {"KVOPS_CUDA": "1" if cuda["built"] else "0", "KVOPS_CUDA_ARCHS": ";".join(cuda["archs"])}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        return tool.build(tmp_path_factory.mktemp("wheel"))


@needs_tools
def test_one_wheel_for_every_python(wheel, tool):
    name, version, python, abi, platform = wheel.stem.split("-")
    assert (name, version, python, abi, platform) == ("kvops", kvops.__version__, "py3", "none", tool.tag())
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
        metadata = email.message_from_bytes(archive.read(f"kvops-{version}.dist-info/METADATA"))
        tags = archive.read(f"kvops-{version}.dist-info/WHEEL").decode()
    assert re.findall(r"^Tag: (.*)", tags, re.MULTILINE) == [f"py3-none-{tool.tag()}"]
    task = "models/passkey-llama/passkey_task.py"
    python_files = {str(p.relative_to(ROOT)) for p in ROOT.glob("kvops/**/*.py*") if p.suffix in (".py", ".pyi")}
    assert python_files | {"kvops/py.typed", f"kvops/demo_files/{task}"} == {
        x for x in files if x.endswith((".py", ".pyi", ".typed"))
    }
    cuda = {"kvops/libkvops_cuda.so"} if kvops.build_info()["cuda"]["built"] else set()
    demo = {x.removeprefix("kvops/demo_files/") for x in files if re.match(r"kvops/demo_files/.*[^/]$", x)}
    model = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    others = {"data/haystack.txt", "data/LICENSE-python.txt", "board/index.html"}
    assert demo == {f"models/passkey-llama/{x}" for x in model} | {task} | others
    assert {x for x in files if x.endswith(".so")} == {"kvops/libkvops.so"} | cuda
    assert not [x for x in files if not x.startswith(("kvops/", f"kvops-{version}.dist-info/"))]
    links = re.findall(r"\]\(([^)]*)\)", metadata.get_payload())
    assert len(links) > 40 and all(x.startswith("https://") for x in links)
    picture = "https://raw.githubusercontent.com/kvops/kvops/main/docs/images/demo.png"
    assert f"]({picture})" in metadata.get_payload() and metadata["Description-Content-Type"] == "text/markdown"
    # If torch were listed, a resolver would replace it, or fetch the index's default build.
    required = [x for x in metadata.get_all("Requires-Dist") if "extra ==" not in x]
    assert required == ["numpy"] and metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0" and len(metadata.get_all("Project-URL")) >= 4
    versions = [x for x in metadata.get_all("Classifier") if x.startswith("Programming Language :: Python :: 3.")]
    assert [x.rpartition(" ")[2] for x in versions] == supported.PYTHON.minors


@needs_tools
def test_the_wheel_runs_on_old_systems(wheel, tool):
    """No symbol is newer than the platform tag allows, no library is missing there, and the file is small enough."""
    assert tool.check(wheel) == []
    assert wheel.stat().st_size < 60e6  # half of what PyPI allows
    out = run(sys.executable, ROOT / "tools/wheel.py", "--check", wheel)
    assert out == f"{wheel.name}: PyPI and {tool.tag()} systems take it\n"


@needs_tools
def test_libraries_that_need_more_than_the_stable_abi(tool):
    """torch's library calls C10's C++ functions, numpy's Python's."""
    numpy = importlib.util.find_spec("numpy._core._multiarray_umath").origin
    for library, symbol in {TORCH / "lib/libtorch_cpu.so": "_ZN", Path(numpy): "Py"}.items():
        (problem,) = [x for x in tool.problems_of(library) if x.endswith(", outside torch's stable ABI")]
        assert problem.startswith(f"{library.name}: it needs {symbol}")


@needs_tools
def test_a_wheel_for_another_processor(wheel, tool, tmp_path, capsys):
    """Its name says which; its libraries must be for that one."""
    assert [tool.arch_of(Path(f"kvops-0.1.0-py3-none-{x}.whl")) for x in ("linux_aarch64", tool.tag("aarch64"))] == [
        "aarch64",
        "aarch64",
    ]
    here, other = sorted(tool.ARCHS, key=lambda x: x != tool.HERE)
    wrong = tmp_path / wheel.name.replace(here, other)
    shutil.copy(wheel, wrong)
    assert f"libkvops.so: it is for {tool.ELF[here]}, expected {tool.ELF[other]}" in tool.check(wrong)
    for command, message in {
        ("--arch", other): f"--torch is for --arch other than this machine's, {here}, and needed there",
        ("--torch", "x"): f"--torch is for --arch other than this machine's, {here}, and needed there",
        ("--arch", "riscv64"): "argument --arch: invalid choice: 'riscv64'",
    }.items():
        with pytest.raises(SystemExit):
            tool.main([*command])
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit, match=f"--torch {tmp_path} is not a folder of torch for {other}|no {other}-linux"):
        tool.build(tmp_path, other, tmp_path)


def test_an_emulated_smoke_test_that_cannot_import_the_wheel(tmp_path):
    if not (ROOT / ".venv/bin/python").exists():
        pytest.skip("tools/arm.sh uses the Python in .venv")
    script(tmp_path / "qemu-aarch64-static", "echo no library >&2; exit 1\n")
    wheel = tmp_path / "kvops.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("kvops/__init__.py", "")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    missing = tmp_path / "none.whl"
    for path, message in {wheel: "no library", missing: f"no wheel {missing}; run: make wheel ARCH=aarch64"}.items():
        out = run(ROOT / "tools/arm.sh", "smoke", tmp_path / "arm", path, env=env, expect=1)
        assert message in out and "passed" not in out


@needs_tools
def test_the_library_of_a_plain_build_is_not_taken_for_one(tool):
    """On a system with a newer glibc, a build without stand-ins has newer symbols, and the check names them."""
    if load("manylinux/stubs.py").host_glibc() <= (2, 28):
        pytest.skip("this system is old enough")
    (problem,) = tool.problems_of(LIBRARY)
    assert problem.startswith("libkvops.so: it needs ") and "container" in problem
    assert "exp (GLIBC_2.29)" in problem or "GLIBCXX" in problem


@needs_tools
def test_wheels_that_pypi_would_not_take(tool, tmp_path):
    wrong = tmp_path / "kvops-0.1.0-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(wrong, "w") as archive:
        archive.write(LIBRARY, "kvops.libs/libstdc++-1.so.6")
    tool.MOST_BYTES = 1000
    problems = tool.check(wrong)
    assert [x.partition(": ")[2].partition(",")[0] for x in problems[:4]] == [
        f"expected the tags py3-none-{tool.tag()}",
        f"{wrong.stat().st_size / 1e6:.0f} MB",
        "it holds kvops.libs/libstdc++-1.so.6",
        "it holds no kvops/libkvops.so",
    ]
    tool.MOST_BYTES = 100 * 1000 * 1000


@needs_tools
def test_installed_wheel_works(wheel, tmp_path):
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tmp_path, wheel)
    code = "import kvops, torch; scores = torch.arange(4.0).view(1, 1, 4);"
    code += "print(kvops.__file__, kvops.ops.select_topk(scores, k=2).tolist())"
    env = {"PYTHONPATH": str(tmp_path)}
    out = run(sys.executable, "-c", code, cwd=tmp_path, env=env)
    assert out.strip() == f"{tmp_path / 'kvops/__init__.py'} [[[2, 3]]]"


@pytest.mark.full
@needs_tools
def test_the_smoke_test_passes(wheel, tmp_path):
    """`make smoke` runs the same in fresh environments."""
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tmp_path, wheel)
    out = run(sys.executable, SMOKE, "--here", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert last_line(out).startswith("passed: Python ")


def test_the_smoke_test_says_what_is_missing(tmp_path):
    command = (sys.executable, SMOKE, "--wheel", tmp_path / "kvops.whl")
    assert last_line(run(*command, expect=1)).endswith(f"no wheel {tmp_path / 'kvops.whl'}; run: make wheel")


def test_workflows_build_test_and_publish():
    """On a tag the workflow builds for both architectures, tests every Python and torch, and publishes."""
    text = (ROOT / ".github/workflows/wheels.yml").read_text() if (ROOT / ".github").exists() else ""
    if not text:
        pytest.skip("no workflows in a source distribution")
    assert "manylinux_2_28_" in text and "aarch64" in text and "id-token: write" in text
    for version in (*supported.PYTHON.minors, *supported.TORCH.minors):
        assert f'"{version}"' in text
    assert "tests/package/smoke_wheel.py" in text and "tools/wheel.py" in text


# A kernel of Hugging Face's hub


@pytest.fixture(scope="module")
def kernel(tool, tmp_path_factory) -> Path:
    """The folder of `make hub`, of the build that is here without its CUDA kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVOPS_CUDA", "0")
        if subprocess.run(["git", "-C", ROOT, "rev-parse"], capture_output=True).returncode:
            pytest.skip("no git repository, which names the commit")
        return load("hub.py").build(tmp_path_factory.mktemp("hub"))


@pytest.mark.full
@needs_tools
def test_two_copies_of_the_operators_in_one_process(kernel, tool):
    """The loader of the hub takes the kernel, whose operators have a namespace of their own; beside it kvops works."""
    (library,) = kernel.glob("*.so")
    assert tool.problems_of(library) == [] and library.stem.startswith("libkvops_")
    assert kernel.name == f"torch-stable-abi210-cpu-{tool.HERE}-linux" and not (kernel / "bench").exists()
    loader = next(ROOT.glob(".venv/kernels-*"), None)
    if not loader:
        pytest.skip("Hugging Face's kernels is not installed (make test-all)")
    code = f"""
import importlib, json, pathlib, kernels, torch, transformers
kernel = kernels.get_local_kernel(pathlib.Path({str(kernel.parents[1])!r}))
hf = importlib.import_module(kernel.__name__ + ".hf")
import kvops, kvops.demo, kvops.hf
k, v = torch.randn(2, 1, 2, 512, 64, generator=torch.Generator().manual_seed(0)).unbind(0)
each = [x.keydiff_compress(k, v, 0.25) for x in (kernel, kvops)]
compiled = torch.compile(lambda k: kernel.ops.anchor_cosine(k), fullgraph=True)(k)
same = [*map(torch.equal, *each), torch.equal(compiled, kvops.ops.anchor_cosine(k))]
try:
    kernel.ops.gather_kv(k[0], v, each[0][2])
    refused = ""
except ValueError as error:
    refused = str(error)
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_pretrained(kvops.demo.MODEL)
prompt, answers = torch.randint(0, model.config.vocab_size, (1, 200)), []
for x, in_models in (kernel, hf), (kvops, kvops.hf), (kernel, hf):
    in_models.use_attention(model)
    with in_models.compress(model, x.SnapKV(budget=64)):
        answers.append(model.generate(prompt, max_new_tokens=8, do_sample=False).tolist())
in_models.for_model(x.ExpectedAttention(budget=64), model)
operators = [x.ops.api._ops.name for x in (kernel, kvops)]
print(json.dumps([same, refused, operators, answers]))
"""
    out = run(sys.executable, "-c", code, env={"PYTHONPATH": f"{ROOT}:{loader}"})
    same, refused, operators, answers = json.loads(last_line(out))
    assert answers[0] == answers[1] == answers[2] and len(answers[0][0]) == 208
    assert same == [True] * 4 and refused.startswith("gather_kv: ")
    assert operators == [library.stem.removeprefix("lib"), "kvops"]


# Paths with spaces


@pytest.mark.full
@pytest.mark.parametrize("cuda", [False, True], ids=["cpu", "cuda"])
def test_a_clone_in_a_path_with_spaces_is_built(cuda, tmp_path):
    """One object of each library: nvcc used to fail, and only after minutes."""
    setup_py = load_setup_py()
    nvcc = setup_py.find_nvcc()
    if cuda and not (nvcc and setup_py.find_tool("ninja")):
        pytest.skip("no nvcc or no ninja")
    clone, build = tmp_path / "a b" / "kvops", tmp_path / "a b" / "build"
    for name in ("csrc", "tools"):
        shutil.copytree(ROOT / name, clone / name)
    shutil.copy(ROOT / "CMakeLists.txt", clone)
    options = [f"-DKVOPS_TORCH_DIR={TORCH}", f"-DKVOPS_CUDA={int(cuda)}", "-DKVOPS_CUDA_ARCHS=90a"]
    if ninja := setup_py.find_tool("ninja"):
        options += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja[0]}"]
    env = {"CUDACXX": nvcc[0]} if cuda else {}
    run(setup_py.find_cmake(), "-S", clone, "-B", build, *options, env=env)
    if not ninja:
        run(setup_py.find_cmake(), "--build", build, "--target", f"level_{LEVELS[0]}")
        assert list(build.rglob("gather_kv_*.o"))
        return
    suffix = "cu" if cuda else "cpp"
    targets = re.findall(rf"^(\S+\.{suffix}\.o):", run(ninja[0], "-C", build, "-t", "targets", "all"), re.MULTILINE)
    target = next((x for x in targets if ("hopper" if cuda else "gather_kv") in x), targets[0])
    run(ninja[0], "-C", build, target)
    assert str(clone).encode() not in (build / target).read_bytes(), "the object names a folder of the build machine"


# Which kvops Python imports


def sources(folder: Path, library: bool) -> Path:
    """A clone of the repository, as far as an import sees it."""
    shutil.copytree(ROOT / "kvops", folder / "kvops", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "CMakeLists.txt", folder)
    if library:
        shutil.copy(LIBRARY, folder / "kvops")
    return folder


def test_python_started_in_a_clone_that_is_not_built(tmp_path):
    """The source tree comes before the installed package. The error says so, and what to do."""
    clone, site = sources(tmp_path / "clone", library=False), LIBRARY.parent.parent
    error = run(sys.executable, "-c", "import kvops", cwd=clone, env={"PYTHONPATH": str(site)}, expect=1)
    assert last_line(error) == (
        f"ImportError: kvops: Python imported the source tree {clone / 'kvops'}, where libkvops.so has not been built, "
        f"and not the package installed in {site / 'kvops'}; start Python in another folder"
    )


def test_a_library_that_is_missing(tmp_path, monkeypatch):
    clone = sources(tmp_path / "clone", library=False)
    monkeypatch.setattr(kvops._lib, "LIBRARY", clone / "kvops/libkvops.so")
    monkeypatch.setattr(sys, "path", [str(clone)])
    assert kvops._lib._why_missing() == (
        f"Python imported the source tree {clone / 'kvops'}, where libkvops.so has not been built; "
        f"build it: cd {clone} && pip install --no-build-isolation -e ."
    )
    (clone / "CMakeLists.txt").unlink()
    assert kvops._lib._why_missing().endswith("is missing from the installed package; reinstall kvops")


def test_python_started_beside_a_clone(tmp_path, monkeypatch):
    """A folder named kvops without __init__.py is a namespace package. The installed package must win over it."""
    (tmp_path / "kvops").symlink_to(ROOT)
    code = "import kvops; print(kvops.build_info()['library'])"
    site = LIBRARY.parent.parent
    assert run(sys.executable, "-c", code, cwd=tmp_path, env={"PYTHONPATH": str(site)}).strip() == str(LIBRARY)
    try:
        origin = importlib.metadata.distribution("kvops").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        origin = None
    if not origin or json.loads(origin)["url"] != ROOT.as_uri():
        pytest.skip("this clone is not installed in this environment")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert run(sys.executable, "-c", code, cwd=tmp_path).strip() == str(LIBRARY)


# Progress


@pytest.mark.full
def test_pip_shows_the_progress(tmp_path):
    """`pip install -v` passes on what the build prints, line by line."""
    project = tmp_path / "project"
    (project / "tools").mkdir(parents=True)
    text = (ROOT / "setup.py").read_text()
    names = "\n".join(f"echo '[{i}/3] Building CXX object CMakeFiles/kvops.dir/x{i}.cpp.o'" for i in (1, 2, 3))
    fake = script(tmp_path / "fake", names + "\n")
    main = f"""
def build(self, ext):
    if not ext.optional:
        run([{str(fake)!r}], "no")
        Path(self.get_ext_fullpath(ext.name)).parent.mkdir(parents=True, exist_ok=True)
        Path(self.get_ext_fullpath(ext.name)).touch()
CMakeBuild.build_extension = build
if __name__ =="""
    (project / "setup.py").write_text(text.replace("\nif __name__ ==", main, 1))
    for name in ("pyproject.toml", "README.md", "CMakeLists.txt"):
        shutil.copy(ROOT / name, project)
    shutil.copytree(ROOT / "kvops", project / "kvops", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    command = (sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps", "-w", tmp_path, project)
    assert "== kvops: compiled 1 of 3, x1.cpp" in run(*command)
