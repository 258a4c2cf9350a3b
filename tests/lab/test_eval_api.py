"""`kvops.eval.run`: the evaluation of a loaded model, from Python."""

import copy
import csv
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

import kvops  # noqa: E402
import kvops.eval  # noqa: E402
from kvops import demo  # noqa: E402
from kvops.eval import AnswerTask, Prompt, Turn, identity  # noqa: E402
from kvops.eval.reader import Reader  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]
SMALL = {"context": 256, "prompts": 2, "points": ["before"], "tasks": ["passkey:digits=4"], "budgets": [64]}


@pytest.fixture(scope="module")
def loaded():
    parts = transformers.AutoModelForCausalLM, transformers.AutoTokenizer
    return tuple(x.from_pretrained(demo.MODEL) for x in parts)


@dataclass(frozen=True, eq=False)
class ValueNorm(kvops.KeyPolicy):
    """Keeps the tokens with the largest values."""

    order: float = 2.0

    def scores(self, view: kvops.View) -> Tensor:
        return view.v.float().norm(self.order, dim=-1)


@dataclass
class Colours(AnswerTask):
    """Which colour is hidden in the text?"""

    name = "colours"
    metrics = ("right",)
    hidden: str = "red"

    def prompts(self, filler, context, count, seed):
        rng = np.random.default_rng(seed)
        asked = Turn(filler.encode(" The colour is "), (self.hidden,), 3, stops=False)
        hidden = [f" The colour is {self.hidden}. "]
        return [Prompt(filler.context(rng, context, hidden, [0.5]), (asked,), 0.5) for _ in range(count)]

    def score(self, said, prompt):
        return {"right": float(prompt.turns[0].answers[0] in said[0])}


class Wrapper(torch.nn.Module):
    """Like peft.PeftModel, calls the forward of the inner model, not the model itself."""

    calls = 0

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def get_base_model(self):
        return self.base_model

    def forward(self, *args, **kwargs):
        Wrapper.calls += 1
        return self.base_model.forward(*args, **kwargs)


WRAPPERS = {"peft": Wrapper, "compiled": lambda x: torch.compile(x, backend="eager")}


def test_methods_of_every_kind(loaded):
    """A name and a class are set to each budget; a policy is measured as it is. The rows are those of the command."""
    seen = []
    methods = ["full", "keydiff", kvops.SnapKV, ValueNorm, ValueNorm(0.5), ValueNorm(32, order=1.0, sinks=4)]
    results = kvops.eval.run(*loaded, **SMALL | {"budgets": [64, 0.5]}, methods=methods, on_row=seen.append)
    kept = {(x["method"], x["budget"]): x["tokens"] for x in results.rows}
    assert kept == {
        ("Full", None): 256,
        **{(x, budget): budget for x in ("KeyDiff", "SnapKV", "ValueNorm") for budget in (64, 128)},
        ("ValueNorm budget=0.5", None): 128,
        ("ValueNorm budget=32 sinks=4 order=1.0", None): 32,
    }
    assert {(x["method"], x["budget"]): x["tokens"] for x in seen} == kept
    assert all(x["n"] == 2 and x["batch"] == 0 and 0 <= x["partial"] <= 1 for x in seen) and len(seen) == len(kept)
    full = next(x for x in results.rows if x["method"] == "Full")
    assert full["partial"] == 1 and full["partial_low"] < 1 == full["partial_high"] and full["unreachable"] is None


def test_rows_are_those_of_the_command(loaded, tmp_path):
    from kvops.eval.__main__ import main

    said = "--methods full keydiff lagkv:lag=16,ratio=0.5 --budgets 64 --context 256 --prompts 3 --batch 2"
    argv = [*said.split(), "--tasks", "passkey:digits=4", "perplexity", "--out", str(tmp_path)]
    assert main(argv) == 0
    results = kvops.eval.run(
        *loaded,
        methods=["full", "keydiff", kvops.LagKV(16, 0.5)],
        tasks=["passkey:digits=4", "perplexity"],
        budgets=[64],
        context=256,
        prompts=3,
        batch=2,
    )
    found, expected = (
        [*x["rows"]] for x in (results.summary.record(), json.loads((tmp_path / "summary.json").read_text()))
    )
    for row in (*found, *expected):
        row["prefill_s"] = row["decode_tokens_per_s"] = None
    assert found == expected


def test_a_task_of_ones_own(loaded, tmp_path):
    """Its metrics, docstring and direction are used, in the report too."""
    results = kvops.eval.run(
        *loaded, **SMALL | {"tasks": [Colours(), Colours(hidden="blue")]}, methods=["full", "keydiff", "streamingllm"]
    )
    assert {x["task"] for x in results.rows} == {"colours", "colours:hidden=blue"}
    assert all(x["right"] in (0, 0.5, 1) for x in results.rows)
    assert results.summary.traits["colours"] == (("right",), True, "higher")
    text = results.report(tmp_path).read_text()
    assert "Which colour is hidden in the text?" in text and "| method | right, % at 64 |" in text
    assert re.search(r"^- task colours: Colours \(\w{12}\)$", text, re.M)


def test_what_results_can_do(loaded, tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("matplotlib")
    results = kvops.eval.run(*loaded, **SMALL, methods=["full", "keydiff", "lagkv"])
    table = results.to_pandas()
    assert isinstance(table, pandas.DataFrame) and [*table.columns] == [*results.rows[0]]
    assert table.query("method == 'KeyDiff'").tokens.item() == 64
    results.to_csv(tmp_path / "results.csv")
    lines = [*csv.DictReader((tmp_path / "results.csv").open())]
    assert [x["method"] for x in lines] == ["Full", "LagKV", "KeyDiff"] and lines[0]["budget"] == ""
    assert float(lines[2]["partial"]) == results.rows[2]["partial"]
    report = results.report(tmp_path / "report")
    assert report.name == "report.md" and (tmp_path / "report" / "summary.json").exists()
    figure = results.plot()
    figure.savefig(tmp_path / "plot.png")
    assert figure._repr_png_().startswith(b"\x89PNG")  # which notebooks show
    assert (tmp_path / "plot.png").read_bytes() != b"" and results.plot("passkey:digits=4", 256) is not figure
    assert "KeyDiff" in str(results) and str(results) == repr(results)
    with pytest.raises(ValueError, match="Evaluation.plot: expected a task and context of passkey:digits=4, 256, got"):
        results.plot("needle")


def test_without_pandas_and_matplotlib(loaded, monkeypatch, tmp_path):
    for name in ("pandas", "matplotlib", "tqdm"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("plots", "report"):
        monkeypatch.delitem(sys.modules, f"kvops.eval.{name}", raising=False)
    results = kvops.eval.run(*loaded, **SMALL | {"tasks": ["passkey:digits=4", "perplexity"]}, methods=["keydiff"])
    results.to_csv(tmp_path / "results.csv")
    assert "KeyDiff" in str(results)
    with pytest.raises(ImportError, match="to_pandas: expected pandas, .*pip install pandas"):
        results.to_pandas()
    for draw in (results.plot, lambda: results.report(tmp_path)):
        with pytest.raises(ImportError, match=r"expected matplotlib, .*pip install 'kvops\[bench\]'"):
            draw()


class Stop(Exception):
    pass


def test_it_resumes(loaded, tmp_path):
    """From the same arguments only; other methods and tasks are added."""
    seen = []

    def stop(row):
        seen.append(row)
        if len(seen) == 2:
            raise Stop

    given = {**SMALL, "out": tmp_path, "methods": ["full", ValueNorm, "keydiff"]}
    with pytest.raises(Stop):
        kvops.eval.run(*loaded, **given, on_row=stop)
    results = kvops.eval.run(*loaded, **given, on_row=seen.append)
    assert [x["method"] for x in seen] == ["Full", "ValueNorm", "KeyDiff"] and len(results.rows) == 3
    again = kvops.eval.run(*loaded, **given, on_row=seen.append)
    assert len(seen) == 3 and again.rows == results.rows
    (one,) = kvops.eval.run(*loaded, **{**given, "methods": ["snapkv"]}).rows  # what was asked for
    assert one["method"] == "SnapKV"
    with pytest.raises(ValueError, match="kvops.eval.run: out .* holds results of other settings: seed was 0 and is"):
        kvops.eval.run(*loaded, **given, seed=1)
    with pytest.raises(ValueError, match="share_prefill was None and is now True"):
        kvops.eval.run(*loaded, **given, share_prefill=True)
    other = {**given, "out": tmp_path / "shared"}
    rows = kvops.eval.run(*loaded, **other, share_prefill=True).rows
    assert [x["partial"] for x in rows] == [x["partial"] for x in results.rows]
    assert [x["prefill_s"] for x in rows] == [None] * 3
    with pytest.raises(ValueError, match="share_prefill was True and is now None"):
        kvops.eval.run(*loaded, **other)
    with pytest.raises(ValueError, match="text was .haystack.txt .* and is now 'text "):
        kvops.eval.run(*loaded, **given, text="word " * 1000)
    other = copy.deepcopy(loaded[0])
    torch.nn.init.zeros_(other.lm_head.weight)
    with pytest.raises(ValueError, match=r"model was 'passkey-llama \(\w+\)' and is now 'passkey-llama \("):
        kvops.eval.run(other, loaded[1], **given)


NOTEBOOK = """{above}
from dataclasses import dataclass
import kvops

@dataclass(frozen=True, eq=False)
class Mine(kvops.KeyPolicy):
    order: float = {order}

    def scores(self, view):
        return {sign}view.v.float().norm(self.order, dim=-1)
"""


def test_the_code_of_a_notebook():
    """A class without a file is known by its code, whatever the lines and comments around it."""

    def mark(**changes):
        code = NOTEBOOK.format(**{"above": "", "order": 2.0, "sign": "", **changes})
        run = f"{code}\nfrom kvops.eval.methods import rule_of\nprint(rule_of(Mine).code)"
        return subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=True, cwd=ROOT).stdout

    first = mark()
    assert re.fullmatch(r"\{'method Mine': 'Mine \(\w{12}\)'\}\n", first)
    assert mark(above="\n# A comment.\n") == first
    assert mark(order=3.0) != first and mark(sign="-") != first


def test_fingerprints_of_settings_and_weights(loaded):
    values = torch.tensor([1.0, 2.0]), (1, 2), {"a": [1]}, None, 1, 1.0, True, "1", np.ones(2), {1, 2}
    marks = [identity.digest(x) for x in values]
    assert len({*marks}) == len(marks) and marks == [identity.digest(copy.deepcopy(x)) for x in values]
    model = loaded[0]
    mark = identity.described_model(model)
    assert identity.described_model(copy.deepcopy(model)) == mark
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight[-1, -1] += 1
    assert identity.described_model(other) != mark != identity.described_model(copy.deepcopy(model).bfloat16())
    assert identity.sample(torch.empty(3, device="meta")) == [] and identity.sample(torch.tensor(2.0)) == [2.0]


def test_the_model_is_as_it_was(loaded):
    """Its attention, and the mode of each module, also after an error."""
    model = copy.deepcopy(loaded[0])
    model.train()
    model.model.layers[0].eval()
    before, attention = [x.training for x in model.modules()], model.config._attn_implementation
    seen = []

    def look(row):
        seen.append((model.training, model.config._attn_implementation))
        raise Stop

    with pytest.raises(Stop):
        kvops.eval.run(model, loaded[1], **SMALL, methods=["snapkv"], on_row=look)
    assert seen == [(False, "kvops")] and attention != "kvops"
    assert [x.training for x in model.modules()] == before and model.config._attn_implementation == attention
    kvops.eval.run(model, loaded[1], **SMALL, methods=["snapkv"])
    assert [x.training for x in model.modules()] == before and model.config._attn_implementation == attention


@pytest.mark.parametrize("template", [None, "{% for x in messages %}[{{ x.role }}]{{ x.content }}[end]{% endfor %}"])
def test_kvzip_gets_its_words_from_the_tokenizer(loaded, monkeypatch, template):
    from kvops.hf import generation

    seen = []

    def repeat_ids(policy, ids, *more):
        seen.append((policy, ids.shape[1]))
        return generation_ids(policy, ids, *more)

    generation_ids = generation.repeat_ids
    monkeypatch.setattr(generation, "repeat_ids", repeat_ids)
    model, tokenizer = loaded[0], copy.deepcopy(loaded[1])
    tokenizer.chat_template = template
    alone = kvops.KVzip(64, instruction=(), next_instruction=(), suffix=())
    results = kvops.eval.run(model, tokenizer, **SMALL, methods=["kvzip", alone])
    words = kvops.hf.repeat_prompts(tokenizer)
    assert bool(words["suffix"]) == bool(template) and words["instruction"]
    assert seen == [(kvops.KVzip(64, **words), 256)] * 2 + [(alone, 256)]  # the first run is untimed
    assert [x["unreachable"] for x in results.rows] == [None, None]
    assert [x["method"].partition(" ")[0] for x in results.rows] == ["KVzip", "KVzip"]
    tokenizer.chat_template = "{{ nothing }}"
    broken = kvops.eval.run(model, tokenizer, **SMALL, methods=["kvzip"], chat=False)
    assert "expected a chat template" in broken.rows[0]["unreachable"]


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapped_models(loaded, name):
    """PEFT and torch.compile: the same answers, from the wrapper's own forward."""
    model, tokenizer = copy.deepcopy(loaded[0]), loaded[1]
    given = {**SMALL, "methods": ["full", "snapkv", "laq", "kvzip", "criticalkv"], "prompts": 1}
    given["tasks"] = ["passkey:digits=4", "perplexity", "recall"]
    wrapped = WRAPPERS[name](model)
    results = kvops.eval.run(wrapped, tokenizer, **given)
    expected = kvops.eval.run(*loaded, **given)
    for found, wanted in zip(results.rows, expected.rows, strict=True):
        for x in ("method", "partial", "recall", "tokens", "unreachable"):
            assert found[x] == wanted[x], (found, wanted)
    if name != "compiled":
        assert Wrapper.calls > 0


@pytest.mark.parametrize(
    "changes, error, words",
    [
        (
            {"methods": "keydiff"},
            TypeError,
            r"kvops.eval.run: methods: expected a list, got 'keydiff'; write \['keydiff'",
        ),
        ({"methods": [3]}, TypeError, "kvops.eval.run: methods: expected names, kvops policies or subclasses of"),
        (
            {"methods": [int]},
            TypeError,
            "method must be a name, a kvops policy or a subclass of kvops.Policy, got <class",
        ),
        ({"methods": []}, ValueError, "kvops.eval.run: methods: expected at least one, got none"),
        ({"methods": ["keydif"]}, ValueError, "method must be one of full, .*, got 'keydif'"),
        (
            {"methods": [ValueNorm, type("ValueNorm", (ValueNorm,), {})]},
            ValueError,
            "are both called ValueNorm in tables",
        ),
        (
            {"methods": [type("KeyDiff", (ValueNorm,), {})]},
            ValueError,
            "KeyDiff is the name of a kvops method in tables",
        ),
        ({"tasks": "passkey"}, TypeError, "kvops.eval.run: tasks: expected a list, got 'passkey'"),
        (
            {"tasks": [Colours]},
            TypeError,
            "kvops.eval.run: tasks: expected names or objects of subclasses of kvops.eval",
        ),
        ({"tasks": ["passkeys"]}, ValueError, "task must be one of passkey, .*, got 'passkeys'"),
        ({"tasks": ["ruler"]}, ValueError, "kvops.eval.run: data: ruler needs a folder with a local copy"),
        ({"prompts": 0}, ValueError, "kvops.eval.run: prompts: expected at least 1, got 0"),
        ({"context": 0}, ValueError, "kvops.eval.run: context: expected at least 1, got 0"),
        (
            {"context": 16},
            ValueError,
            "kvops.eval.run: context: expected more than the .* tokens of the needles, got 16",
        ),
        (
            {"budgets": [1.5]},
            ValueError,
            "kvops.eval.run: budgets: expected tokens .* or a fraction in .0, 1., got 1.5",
        ),
        ({"budgets": []}, ValueError, "kvops.eval.run: budgets: expected at least one, got none"),
        ({"points": ["between"]}, ValueError, "kvops.eval.run: points: expected some of before, after, got 'between'"),
        ({"chat": "yes"}, ValueError, "kvops.eval.run: chat: expected True, False or None, got 'yes'"),
        ({"text": "short"}, ValueError, "kvops.eval.run: text: expected more than .* tokens, got 5"),
    ],
)
def test_what_is_refused(loaded, changes, error, words):
    with pytest.raises(error, match=words):
        kvops.eval.run(*loaded, **{**SMALL, "methods": ["keydiff"], **changes})


def test_scores_of_a_task_that_are_wrong(loaded):
    class Wrong(Colours):
        name = "wrong"

        def run(self, *args):
            outcome = super().run(*args)
            outcome.scores = {"right": [1.0]}
            return outcome

    with pytest.raises(
        ValueError, match="task wrong: expected a list of 2 numbers as right, one per prompt, got .1.0."
    ):
        kvops.eval.run(*loaded, **{**SMALL, "tasks": [Wrong()]}, methods=["full"])


def test_no_model(loaded):
    with pytest.raises(TypeError, match="kvops.eval.run: model must be a transformers model, got str"):
        kvops.eval.run("passkey-llama", loaded[1], methods=["full"])
    with pytest.raises(TypeError, match="kvops.eval.run: tokenizer must be the model's tokenizer of .*, got NoneType"):
        kvops.eval.run(loaded[0], None, methods=["full"])
    with pytest.raises(TypeError, match="kvops.eval.run: model must be a transformers model, got "):
        kvops.eval.run(loaded[1], loaded[0], methods=["full"])


def test_importing_it_is_light():
    heavy = "transformers", "matplotlib", "pandas"
    code = f"import sys, kvops.eval; print([x for x in {heavy} if x in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout == "[]\n"


def test_out_of_memory(loaded, monkeypatch, tmp_path):
    prefill = Reader.prefill

    def full(self, prompts, rule, *args):
        if rule.label == "KeyDiff":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return prefill(self, prompts, rule, *args)

    monkeypatch.setattr(Reader, "prefill", full)
    with pytest.warns(UserWarning, match="kvops.eval.run: 1 of 2 cells ran out of memory and are missing, the first"):
        results = kvops.eval.run(*loaded, **SMALL, methods=["full", "keydiff"], out=tmp_path)
    assert [x["method"] for x in results.rows] == ["Full"]
    monkeypatch.setattr(Reader, "prefill", prefill)
    results = kvops.eval.run(*loaded, **SMALL, methods=["full", "keydiff"], out=tmp_path)
    assert [x["method"] for x in results.rows] == ["Full", "KeyDiff"]


@pytest.mark.full
def test_the_notebook_runs(monkeypatch, capsys):
    pytest.importorskip("pandas")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(ROOT / "examples")
    notebook = json.loads((ROOT / "examples" / "evaluate.ipynb").read_text())
    names = {"__name__": "__main__"}  # as in a notebook
    for number, cell in enumerate(x for x in notebook["cells"] if x["cell_type"] == "code"):
        exec(compile("".join(cell["source"]), f"evaluate.ipynb, cell {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert re.search(r"^after +KeyDiff budget=0.25 sinks=4 +137 kept, 100% of the digits$", printed, re.M)
    assert {*names["table"].method} == {"Full", "KeyDiff", "SnapKV", "ValueNorm", "KeyDiff budget=0.25 sinks=4"}
    assert {x["method"]: x["right"] for x in names["mine"].rows if x["point"] == "before"} == {
        "Full": 1, "KeyDiff": 1, "StreamingLLM": 0
    }  # fmt: skip


@pytest.mark.parametrize("share, storage", [(False, "int8"), (True, "int8"), (True, "fp8")])
def test_caches_that_round(loaded, share, storage):
    """storage=int8 of any method holds as many tokens in fewer bytes, and says what it is."""
    methods = [f"{name}{more}" for name in ("full", "snapkv", "laq") for more in ("", f":storage={storage}")]
    rows = {x["method"]: x for x in kvops.eval.run(*loaded, methods=methods, **SMALL, share_prefill=share).rows}
    for name in ("Full", "SnapKV", "LAQ"):
        plain, rounded = rows[name], rows[f"{name} storage={storage}"]
        assert plain["tokens"] == rounded["tokens"] and plain["bytes_full"] == rounded["bytes_full"]
        assert rounded["bytes_held"] < 0.8 * plain["bytes_held"]
        assert abs(plain["partial"] - rounded["partial"]) <= 0.25
    with pytest.raises(ValueError, match="method 'keydiff:storage=int4': storage must be one of int8, fp8, got 'int4'"):
        kvops.eval.run(*loaded, methods=["keydiff:storage=int4"], **SMALL)
