"""The model "kvops" of lm-eval-harness, with the real harness, local data and the shipped model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

lm_eval = pytest.importorskip("lm_eval.evaluator", reason="lm-eval-harness is not installed: pip install 'lm_eval[hf]'")
transformers = pytest.importorskip("transformers")

from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

import kvops  # noqa: E402
from kvops import demo  # noqa: E402
from kvops.eval.harness import KVopsLM  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]
KEYS = ["4711328", "9021165", "5550123", "8243306"]
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
doc_to_text: "{{{{text}}}}"
output_type: {kind}
{more}
metadata:
  version: 1
"""
GENERATE = """\
doc_to_target: "{{key}}"
target_delimiter: ""
generation_kwargs: {max_gen_toks: 7, until: ["zzz"], do_sample: false}
metric_list:
  - metric: exact_match
"""
CHOOSE = """\
doc_to_choice: "{{choices}}"
doc_to_target: label
target_delimiter: ""
metric_list:
  - metric: acc
"""
ROLLING = """\
doc_to_target: "{{text}}"
metric_list:
  - metric: bits_per_byte
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """A folder with three tasks and their data: to say a hidden key, to choose it, and to score a text."""
    folder = tmp_path_factory.mktemp("tasks")
    text, rows = demo.TEXT.read_text(), []
    for i, key in enumerate(KEYS):
        hidden = f"{text[1000 * i :][:250]} The pass key is {key}. Remember it. {text[1000 * i + 250 :][:250]}"
        asked = f"{hidden} What is the pass key? The pass key is "
        rows.append({"text": asked, "key": key, "choices": KEYS, "label": i})
    (folder / "data.jsonl").write_text("".join(json.dumps(x) + "\n" for x in rows))
    kinds = {"say": ("generate_until", GENERATE), "choose": ("multiple_choice", CHOOSE)}
    kinds["score"] = ("loglikelihood_rolling", ROLLING)
    for name, (kind, more) in kinds.items():
        made = TASK.format(name=f"kvops_{name}", data=folder / "data.jsonl", kind=kind, more=more)
        (folder / f"{name}.yaml").write_text(made)
    return folder


def evaluate(tasks: Path, model, *names: str) -> tuple[dict[str, float], list]:
    """The scores of tasks, and the model's answers."""
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=[f"kvops_{x}" for x in names],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    answers = [x["resps"] for name in names for x in found["samples"][f"kvops_{name}"]]
    metric = {"say": "exact_match,none", "choose": "acc,none"}
    return {name: float(found["results"][f"kvops_{name}"][metric[name]]) for name in names}, answers


def model_of(policy, **settings) -> KVopsLM:
    return KVopsLM(pretrained=str(demo.MODEL), policy=policy, device="cpu", **settings)


def test_a_full_cache_is_the_harness_own_model(tasks):
    """The same answers and the same log-likelihoods, also where contexts are cut from the left."""
    for settings in ({}, {"max_length": 300, "batch_size": 2}):
        own = HFLM(pretrained=str(demo.MODEL), device="cpu", **settings)
        expected, wanted = evaluate(tasks, own, "choose", "say")
        scores, found = evaluate(tasks, model_of("full", **settings), "choose", "say")
        assert scores == expected and found[len(KEYS) :] == wanted[len(KEYS) :]
        for x, y in zip(found[: len(KEYS)], wanted[: len(KEYS)]):
            assert [said for ((_, said),) in x] == [said for ((_, said),) in y]
            assert [z for ((z, _),) in x] == pytest.approx([z for ((z, _),) in y], abs=1e-3)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(
    "policy, score",
    [("keydiff:budget=128", 1.0), (kvops.LAQ(128), 1.0), ("kvzip:budget=256", 1.0), ("streamingllm:budget=64", 0.0)],
    ids=["keydiff", "laq", "kvzip", "streamingllm"],
)
def test_what_is_evicted_counts(tasks, policy, score, batch_size):
    """The key is in the middle of the context. KVzip takes its words from the tokenizer."""
    scores, _ = evaluate(tasks, model_of(policy, batch_size=batch_size), "say", "choose")
    assert scores["say"] == score and (scores["choose"] == 1) == (score == 1)


def test_the_command(tasks, tmp_path):
    said = f"run --model kvops --model_args pretrained={demo.MODEL} policy=keydiff:budget=128,sinks=4 --device cpu"
    said += f" --tasks kvops_choose --include_path {tasks} --output_path {tmp_path}"
    run = subprocess.run(
        [sys.executable, "-m", "kvops.eval.harness", *said.split()], capture_output=True, text=True, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr[-2000:]
    (file,) = tmp_path.rglob("results_*.json")
    record = json.loads(file.read_text())
    assert record["results"]["kvops_choose"]["acc,none"] == 1
    assert record["config"]["model_args"]["policy"] == "keydiff:budget=128"


def test_settings_of_the_policy():
    """The harness splits its model arguments at commas."""
    said = f"pretrained={demo.MODEL},policy=keydiff:budget=0.25,sinks=4,max_length=99,device=cpu"
    model = KVopsLM.create_from_arg_string(said)
    assert model.policy == kvops.KeyDiff(0.25, sinks=4) and model.max_length == 99


def test_what_is_refused(tasks):
    with pytest.raises(NotImplementedError, match="kvops.eval.harness: expected tasks with .* loglikelihood_rolling"):
        lm_eval.simple_evaluate(
            model=model_of("full"),
            tasks=["kvops_score"],
            task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        )
    with pytest.raises(ValueError, match="method must be one of full, .*, got 'keydif'"):
        model_of("keydif")
    with pytest.raises(TypeError, match="budget"):
        model_of("keydiff")
    with pytest.raises(TypeError, match="method must be a name, a kvops policy or a subclass of kvops.Policy, got 3"):
        model_of(3)
