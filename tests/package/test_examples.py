"""The scripts and the notebook of examples/ run, and find what they say."""

import json
import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
RESULTS = {
    "custom_method": 256,
    "hf_generate": "58291740",
    "one_prefix_many_questions": ["5829", "1740"],
    "paged_cache": (64, 64),
    "streaming_cache": 260,
    "torch_ops": (1, 8, 1024, 128),
}


@pytest.mark.parametrize("name", RESULTS)
def test_example_runs(name, one_thread, capsys):
    names = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    assert names["main"]() == RESULTS[name]


def test_every_example_is_short_and_listed():
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert [x.stem for x in scripts] == [*RESULTS]
    listed = re.findall(r"^\| \[([\w.]+)\]\(\1\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(x.name for x in [*scripts, *EXAMPLES.glob("*.ipynb")])
    for script in scripts:
        text = script.read_text()
        assert text.startswith('"""') and len(text.splitlines()) < 60, f"{script.name}: a head comment, under 60 lines"


def test_notebook_runs(one_thread, monkeypatch, capsys):
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.chdir(EXAMPLES)
    plt.switch_backend("Agg")
    notebook = json.loads((EXAMPLES / "kv_eviction.ipynb").read_text())
    assert notebook["nbformat"] == 4
    cells = ["".join(x["source"]) for x in notebook["cells"] if x["cell_type"] == "code"]
    names = {"__name__": "notebook"}
    try:
        for number, code in enumerate(cells):
            exec(compile(code, f"kv_eviction.ipynb, cell {number}", "exec"), names)
    finally:
        plt.close("all")
    printed = capsys.readouterr().out
    assert re.search(r"^KeyDiff +'58291740'", printed, re.MULTILINE)
    assert not re.search(r"^StreamingLLM +'58291740'", printed, re.MULTILINE)
