"""The functions that are generated from the policies: their text, and what a call costs."""

import gc
import inspect
import re
import runpy
import subprocess
import sys
import weakref
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

import kvops
from kvops.methods import functions
from kvops.methods.attention_matching import Matched

ROOT = Path(__file__).parents[2]
K, V = torch.randn(2, 1, 2, 60, 16, generator=torch.Generator().manual_seed(0))
Q = torch.randn(1, 4, 60, 16, generator=torch.Generator().manual_seed(1))
every_function = pytest.mark.parametrize("name", [x for x in functions.__all__ if not x.endswith("_")])


def test_the_tables_are_up_to_date():
    """README's and the docs' lists of methods, and the stub of the functions."""
    written = runpy.run_path(str(ROOT / "tools/tables.py"))["written"]()
    assert not [path.name for path, text in written.items() if path.read_text() != text], "run `make tables`"
    assert {"README.md", "mkdocs.yml", "functions.pyi"} < {path.name for path in written}
    pages = set(re.findall(r"methods/(\w+)\.md", written[ROOT / "mkdocs.yml"]))
    assert pages == {x.stem for x in ROOT.glob("docs/methods/*.md")}


@pytest.mark.parametrize("name", [name for name, x in kvops.METHODS.items() if x.policy is not kvops.Full])
def test_a_method_is_in_the_files_that_the_docs_list(name):
    """A file may have several methods, such as those of one paper."""
    section = (ROOT / "docs/adding_a_method.md").read_text().split("\n## A method of the library\n")[1]
    files = re.findall(r"^\| `(\S+)` \|", section, re.MULTILINE)
    assert len(files) <= 6 and {"kvops/methods/table.py", "docs/methods/<method>.md"} < set(files)
    entry = kvops.METHODS[name]
    for file in files:
        texts = [x.read_text() for x in ROOT.glob(file.replace("<method>", "*"))]
        assert any(entry.label in x or entry.policy.__name__ in x for x in texts), f"{file} lacks {entry.label}"


@every_function
def test_a_function_says_what_its_arguments_are(name):
    function, cls = getattr(kvops, name), functions.POLICIES[name]
    assert get_type_hints(function)["return"] in (kvops.Compressed, Matched)
    head, _, rest = inspect.getdoc(function).partition("Args:\n")
    assert head.startswith(inspect.getdoc(cls).split("\n")[0]) and ("```text" in head) == ("```text" in cls.__doc__)
    described = dict(re.findall(r"^    (?:\*\*)?(\w+): (.+)", rest, re.MULTILINE))
    assert list(described)[: len(inspect.signature(function).parameters)] == list(
        inspect.signature(function).parameters
    )
    assert not [x for x in described.values() if re.match("See `\\w+Policy`", x)]
    assert ("Source" in rest) == ("Source" in cls.__doc__) and "Returns:" in rest and "Raises:" in rest
    assert inspect.getsource(function).startswith(f"def {name}(")
    assert f"`{name}` in place" in getattr(kvops, name + "_").__doc__


def test_all_settings_are_arguments():
    assert torch.equal(
        kvops.random_compress(K, V, 16, sinks=4, recent=0.25, head_mode="shared").indices,
        kvops.Random(16, sinks=4, recent=0.25, head_mode="shared").compress(K, V).indices,
    )
    assert torch.equal(
        kvops.tova_compress(K, V, Q[:, :, -1:], 16, head_mode="per_head", group_reduce="max").indices,
        kvops.TOVA(16, head_mode="per_head", group_reduce="max").compress(K, V, Q[:, :, -1:]).indices,
    )
    with pytest.raises(ValueError, match="^keydiff_compress: a one-shot call cannot tell the prompt"):
        kvops.keydiff_compress(K, V, 16, protect="prompt")
    with pytest.raises(ValueError, match="^laq_compress_: stage1 must be one of"):
        kvops.laq_compress_(K, V, Q[:, :, :4], 16, stage1="none")


def test_the_window_is_that_of_the_queries_unless_it_is_given():
    want = kvops.SnapKV(16, 8).compress(K, V, Q[:, :, -8:]).indices
    assert torch.equal(kvops.snapkv_compress(K, V, Q[:, :, -8:], 16).indices, want)
    assert torch.equal(kvops.snapkv_compress(K, V, Q[:, :, -8:], 16, 8).indices, want)
    with pytest.raises(ValueError, match="^snapkv_compress: q_window must have at most window rows, .* 4, got 8"):
        kvops.snapkv_compress(K, V, Q[:, :, -8:], 16, window=4)
    with pytest.raises(ValueError, match="^laq_compress: window=4 needs q_window"):
        kvops.laq_compress(K, V, Q[:, :, :4], 16, window=4)
    for wrong in (None, Q[0], Q[:, :, :0]):
        with pytest.raises((TypeError, ValueError), match="^snapkv_compress: q_window must"):
            kvops.snapkv_compress(K, V, wrong, 16)


def test_errors_name_the_function_and_its_arguments():
    with pytest.raises(ValueError, match="^lagkv_compress_: r must be in"):
        kvops.lagkv_compress_(K, V, 8, 1.5)
    with pytest.raises(ValueError, match="^LagKV: ratio must be in"):
        kvops.LagKV(8, 1.5)
    with pytest.raises(TypeError, match=r"^lagkv_compress\(\) got an unexpected keyword argument 'lag'"):
        kvops.lagkv_compress(K, V, lag=8)
    with pytest.raises(ValueError, match=r"^lacache_compress: \(span, overlap\) must free slots"):
        kvops.lacache_compress(K, V, 40, layer=0, num_layers=4, span=4, overlap=0)
    with pytest.raises(ValueError, match="^keydiff_compress: KeyDiff\\(budget=8.*takes no pages"):
        table = torch.zeros(1, 1, dtype=torch.int32)
        kvops.keydiff_compress(K, V, 8, metric="dot", block_table=table, lengths=torch.tensor([8], dtype=torch.int32))
    with pytest.raises(ValueError, match="^keydiff_compress: k must be"):
        kvops.keydiff_compress(K.int(), V, 8, metric="dot")


def calls_of(function) -> int:
    """The calls of kvops' Python functions, once the settings are known."""
    function()
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        file = frame.f_code.co_filename
        count += event == "call" and (str(ROOT / "kvops") in file or file in (functions._FILE, "<string>"))

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_a_call_makes_few_calls():
    assert calls_of(lambda: kvops.keydiff_compress(K, V, 16, sinks=2, recent=2)) <= 30
    assert calls_of(lambda: kvops.keydiff_compress(K, V, 0.25)) <= 32


def test_settings_are_checked_in_every_call_that_has_others():
    kvops.keydiff_compress(K, V, 1)
    for wrong in (True, 1.5):
        with pytest.raises((TypeError, ValueError), match="^keydiff_compress: budget"):
            kvops.keydiff_compress(K, V, wrong)
    assert kvops.keydiff_compress(K, V, 1.0).k.shape[2] == 60  # all tokens: 1 is not 1.0
    kvops.laq_compress(K, V, Q[:, :, :4], 16, template=(1,))
    with pytest.raises(TypeError, match="^laq_compress: template must be an int, got bool True"):
        kvops.laq_compress(K, V, Q[:, :, :4], 16, template=(True,))


def test_functions_hold_no_tensors():
    budget, w_o = torch.full((1, 2), 16, dtype=torch.int32), torch.ones(8, 64)
    kept = kvops.keydiff_compress(K, V, budget)
    budget.fill_(9)
    assert (kept.lengths == 16).all() and (kvops.keydiff_compress(K, V, budget).lengths == 9).all()
    for given in (w_o, (w_o,), [w_o]):
        kvops.criticalkv_compress(K, V, Q[:, :, -4:], 16, w_o=given, layer=0, num_layers=1)
    held, budgets = weakref.ref(w_o), weakref.ref(budget)
    del w_o, given, budget
    gc.collect()
    assert held() is None and budgets() is None


@pytest.mark.full
def test_type_checkers_know_the_functions(tmp_path):
    path = tmp_path / "calls.py"
    path.write_text(
        "import kvops\nimport torch\n"
        "k = torch.ones(1, 2, 8, 4)\n"
        "lengths: torch.Tensor = kvops.keydiff_compress(k, k, 4, sinks=1, metric='dot', layout='bhnd').lengths\n"
        "kvops.lagkv_compress_(k, k, 4, r=0.5, starts=None, layer=0)\n"
        "kvops.snapkv_compress(k, k, k, 0.5, 2, scale=0.5, out=(k, k))\n"
        "kvops.lacache_compress(k, k, 8, layer=0, num_layers=4, rope=None)\n"
        "kvops.keydiff_compress(k, k)\n"
        "kvops.keydiff_compress(k, k, 4, metric='manhattan')\n"
        "kvops.keydiff_compress(k, k, 4, start=None)\n"
    )
    run = subprocess.run([sys.executable, "-m", "mypy", "--strict", path], cwd=ROOT, capture_output=True, text=True)
    assert re.findall(r"calls.py:(\d+): error: .*\[(.*)\]", run.stdout) == [
        ("8", "call-arg"),
        ("9", "arg-type"),
        ("10", "call-arg"),
    ], run.stdout + run.stderr
