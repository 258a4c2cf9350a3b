"""Every operator in the schema must have all its files: kernels, wrapper, reference, tests and docs."""

import ast
import importlib.util
import inspect
import itertools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Container
from pathlib import Path

import pytest
import torch

import kit
import kvops
from kvops import bench, ops
from kvops.ops import reference

ROOT = Path(__file__).parents[2]
SCHEMAS = [
    torch._C.parse_schema("kvops::" + "".join(re.findall(r'"(.*?)"', definition)))
    for definition in re.findall(r"m\.def\((.*?)\);", (ROOT / "csrc/schema.cpp").read_text(), re.DOTALL)
]
NUMBERS = ops.SCORES | ops.REDUCTIONS
INFO = kvops.build_info()
EXACT_BF16 = ("assign_prototypes", "key_similarity", "value_norm")  # they, too, use bf16 dot products
OPERATORS = sorted({schema.name.removeprefix("kvops::") for schema in SCHEMAS})


def test_the_schema_is_what_is_registered():
    registered = {str(s) for s in torch._C._jit_get_all_schemas() if s.name.startswith("kvops::")}
    assert registered == {str(s) for s in SCHEMAS} and len(OPERATORS) >= 5


@pytest.mark.parametrize("op", OPERATORS)
def test_every_operator_is_in_the_files_that_the_docs_list(op):
    rows = re.findall(r"^\| (`.*?`) \|", (ROOT / "docs/adding_an_operator.md").read_text(), re.MULTILINE)
    files = [x for row in rows for x in re.findall(r"`(\S+)`", row)]
    assert len(files) <= 14 and {"csrc/schema.cpp", "csrc/cuda/<op>.cu", "docs/operators.md"} < set(files)
    for file in files:
        path = ROOT / file.replace("<op>", op)
        assert path.is_file(), f"{op} has no {file}"
        assert re.search(rf"\b{op}\b", path.read_text()) or "<op>" in file, f"{file} lacks {op}"
    assert op in ops.__all__, f"{op} is not in kvops.ops"
    assert len(inspect.getdoc(getattr(ops, op))) > 100, f"{op} has no contract"
    assert callable(getattr(reference, op)), f"{op} has no reference"
    assert op in bench.ROWS, f"{op} has no row in the benchmark"
    table = (ROOT / "docs/operators.md").read_text()
    assert re.search(rf"^\| `{op}` \|", table, re.MULTILINE), f"{op} has no row in docs/operators.md"


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_every_overload_has_kernel_and_fake(schema):
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    for key in ("CPU", "Meta"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key), f"{name} has no {key} implementation"


def test_the_wrappers_take_the_schemas_arguments():
    """kvops.ops, the reference and torch.ops use the same argument names and, where the schema has one, default."""
    for schema in SCHEMAS:
        if schema.overload_name:
            continue
        op = schema.name.removeprefix("kvops::")
        for function in (getattr(ops, op), getattr(reference, op)):
            parameters = inspect.signature(function).parameters
            for argument in schema.arguments:
                assert argument.name in parameters, f"{op}: {function.__module__} lacks {argument.name}"
                if argument.has_default_value():
                    default = parameters[argument.name].default
                    assert NUMBERS.get(default, default) == argument.default_value


@pytest.mark.parametrize("op", OPERATORS)
def test_only_the_tensors_that_an_operator_needs_go_by_position(op):
    schema = next(x for x in SCHEMAS if x.name == f"kvops::{op}" and not x.overload_name)
    needed = []
    for argument in schema.arguments:
        if str(argument.type) not in ("Tensor", "List[Tensor]"):
            break
        needed.append(argument.name)
    for function in (getattr(ops, op), getattr(reference, op)):
        parameters = inspect.signature(function).parameters.values()
        by_position = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
        by_name = [x.name for x in parameters if x.kind is x.KEYWORD_ONLY]
        assert by_position == needed and len(by_position) + len(by_name) == len(parameters)


def test_each_fake_is_beneath_its_function():
    found: dict[str, list[str]] = {}
    for node in ast.parse((ROOT / "kvops/ops/api.py").read_text()).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        if node.name != "_":
            last = node.name
        else:
            found.setdefault(last, []).append(node.decorator_list[0].args[0].value)
    expected: dict[str, list[str]] = {}
    for schema in SCHEMAS:
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        expected.setdefault(schema.name.removeprefix("kvops::"), []).append(name.removeprefix("kvops::"))
    assert found == expected


def imported(path: Path) -> set[str]:
    """Return the full names of all modules and members that a file imports, anywhere in it."""
    package = ".".join(path.relative_to(ROOT).parent.parts)
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {x.name for x in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names |= {f"{source}.{x.name}" for x in node.names}
    return names


def files_imported() -> dict[str, set[str]]:
    """Return, for each file of the library, the files that it imports: anywhere in it, even for type checkers alone.
    `from . import cache` imports cache.py, and not __init__.py."""
    files = {}
    for path in (ROOT / "kvops").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: {file_of(x, files) for x in imported(path)} - {name, ""} for name, path in files.items()}


def file_of(name: str, files: Container[str]) -> str:
    """Return the file of an imported module or member; empty if it is not the library's."""
    while name and name not in files:
        name = name.rpartition(".")[0]
    return name


def test_no_circle_of_imports():
    left = files_imported()
    while free := {name for name, imports in left.items() if not imports & left.keys()}:
        left = {name: imports for name, imports in left.items() if name not in free}
    assert not left, {name: sorted(imports & left.keys()) for name, imports in left.items()}


#: The rooms of the library, lower ones first: a file imports from its own room and from lower ones.
ROOMS = ("", "ops", "distributed", "methods", "cache", "hf", "vllm", "bench", "eval", "analysis", "demo")


def test_lower_rooms_import_no_higher_ones():
    def room(name: str) -> int:
        first = f"{name}.".split(".")[1]
        return ROOMS.index(first if first in ROOMS else "")

    files = files_imported()
    assert {room(name) for name in files} == {*range(len(ROOMS))}
    del files["kvops"]  # which offers names of all rooms
    assert not [(name, x) for name, imports in files.items() for x in imports if room(x) > room(name)]


def test_the_library_does_without_its_specification():
    """Tests import the reference; the library itself does not."""
    files = files_imported()
    assert "kvops.ops.lag" in files["kvops.ops.api"] and "kvops.methods.registry" in files["kvops.eval.methods"]
    assert "kvops.ops.reference" in imported(ROOT / "tests/ops/test_lag_score.py") and "kvops.ops.reference" in files
    assert not [name for name, imports in files.items() if "kvops.ops.reference" in imports]


def test_the_library_does_without_numpy():
    code = "import sys; sys.modules['numpy'] = None; import kvops, torch; print(kvops.ops.select_topk.__name__)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout == "select_topk\n", run.stderr


@pytest.mark.full
@pytest.mark.skipif(INFO["isa"] == INFO["isa_built"][0], reason="this CPU has one level only")
@pytest.mark.parametrize("level", itertools.takewhile(lambda x: x != INFO["isa"], INFO["isa_built"]))
def test_lower_levels_pass_the_operators_tests(level):
    """The lower instruction sets pass the same tests as this machine's best one."""
    tested = OPERATORS
    if level == "v4_bf16":  # v4_amx differs from it only in the products of the window operators
        tested = [op for op in OPERATORS if op.startswith("window") or op == "drop_scores"]
    if level in ("v4", "neon"):  # v4_bf16 and neon_bf16 differ only in their products
        tested = [op for op in OPERATORS if op.startswith("window") or op in EXACT_BF16]
    files = [str(ROOT / f"tests/ops/test_{x}.py") for x in (*tested, "operators", "pages")]
    # Names of files and of calls. All levels compute offsets, divide work among threads, and find pages alike.
    alike = "opcheck or compile or offsets_beyond or repeatable or long_requests"
    selected = f"not ({alike}) and ({' or '.join(tested)})"
    command = [sys.executable, "-m", "pytest", "-q", "-k", selected, "-p", "no:cacheprovider", *kit.RERUN, *files]
    run = subprocess.run(command, env={**os.environ, "KVOPS_ISA": level}, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:]


def test_two_threads_with_different_inputs():
    inputs = [kit.kv(2, 2, 700, 64, dtype, seed=seed) for seed, dtype in enumerate((torch.float32, torch.bfloat16))]

    def everything(k, v):
        scores = ops.anchor_cosine(k)
        lag_scores = ops.lag_score(k, v, lag=64, prefix=16)
        indices = ops.select_topk(scores, k=200, sinks=4, window=8)
        segments = ops.select_topk(lag_scores, k=20, sinks=16, seq_len=k.shape[2])
        return scores, lag_scores, *ops.gather_kv(k, v, indices), *ops.compact_kv_(k.clone(), v.clone(), segments)

    expected = [everything(*pair) for pair in inputs]
    wrong = []

    def worker(pair, right):
        for _ in range(50):
            if not all(map(torch.equal, everything(*pair), right)):
                wrong.append(pair)

    workers = [threading.Thread(target=worker, args=x) for x in zip(inputs, expected)]
    for x in workers:
        x.start()
    for x in workers:
        x.join()
    assert not wrong


def test_a_second_copy_is_refused(tmp_path):
    """Two copies of the operators in one process would abort it; the loader raises an error instead."""
    code = (
        "import shutil, sys; import kvops; shutil.copytree(kvops.__path__[0], sys.argv[1] + '/kvops');"
        "sys.path.insert(0, sys.argv[1]); [sys.modules.pop(m) for m in list(sys.modules) if m.startswith('kvops')];"
        "import kvops"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 1 and "already loaded another copy of the operators" in run.stderr
