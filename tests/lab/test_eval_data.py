"""RULER and LongBench from tiny local copies, in the formats of their data."""

# ruff: noqa: E402  (after the check of what they need)

import json
import sys

import numpy as np
import pytest

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
for package in ("tqdm", "rouge", "jieba"):
    pytest.importorskip(package)

from kvops.eval import __main__ as run
from kvops.eval.methods import rule
from kvops.eval.reader import Reader
from kvops.eval.results import load
from kvops.eval.specs import Refused
from kvops.eval.tasks import TASKS, Filler, Prompt, Turn
from kvops.eval.tasks import longbench as lb

pytestmark = pytest.mark.usefixtures("one_thread")
KEYS = ["4711328", "9021165", "5550123"]
TEXT = run.TEXT.read_text()


@pytest.fixture(scope="module")
def filler() -> Filler:
    return Filler(transformers.AutoTokenizer.from_pretrained(run.MODEL), TEXT)


def hidden(key: str, length: int = 300) -> str:
    """In the wording that the shipped model was trained on."""
    return TEXT[:length] + f" The pass key is {key}. Remember it. " + TEXT[length : 2 * length]


def ruler_rows(task: str = "niah_single_1") -> list[dict]:
    """The columns of the copies on the hub."""
    return [
        {
            "context": hidden(key),
            "question": " What is the pass key?",
            "answer_prefix": " The pass key is ",
            "answer": [key],
            "task": task,
            "max_new_tokens": 8,
        }
        for key in KEYS
    ]


def longbench_rows(task: str = "trec") -> list[dict]:
    return [
        {
            "input": " What is the pass key? The pass key is ",
            "context": hidden(key),
            "answers": [key],
            "length": 200,
            "dataset": task,
            "language": "en",
            "all_classes": KEYS,
            "_id": key,
        }
        for key in KEYS
    ]


PROMPTS = {"trec": "Name the kind.\n{context}\n{input}", "qasper": "An article: {context}\nNow: {input}\nAnswer:"}


def save_config(folder):
    """Write the files that LongBench's repository has beside its data."""
    (folder / "config").mkdir(parents=True)
    (folder / "config" / "dataset2prompt.json").write_text(json.dumps(PROMPTS))
    (folder / "config" / "dataset2maxlen.json").write_text(json.dumps({"trec": 8, "qasper": 16}))


def save(rows: list[dict], folder, form: str):
    if form == "disk":
        datasets.Dataset.from_list(rows).save_to_disk(folder / "copy")
    elif form == "splits":
        datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)}).save_to_disk(folder / "copy")
    elif form == "parquet":
        (folder / "data").mkdir(parents=True)
        datasets.Dataset.from_list(rows).to_parquet(folder / "data" / "test-00000-of-00001.parquet")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "validation.jsonl").write_text("".join(json.dumps(x, ensure_ascii=False) + "\n" for x in rows))


FORMS = ["disk", "splits", "parquet", "jsonl"]


@pytest.mark.parametrize(
    "name, rows, count", [("ruler:task=niah_single_1", ruler_rows, 2), ("longbench:task=trec", longbench_rows, 1)]
)
def test_a_run(tmp_path, name, rows, count):
    """The model finds the needle until a method evicts it; prompts are read one at a time."""
    save(rows(), tmp_path, "disk")
    save_config(tmp_path)
    argv = f"--tasks {name} --data {tmp_path} --out {tmp_path}/out --context 900 --prompts {count} --points before"
    argv = [*argv.split(), "--methods", "full", "streamingllm", "--budgets", "64"]
    files = run.measure(run.arguments(argv, run.make_parser(), rule), "python -m kvops.eval", Reader)
    lines = load(files)[1]
    assert len(lines) == 2 * count
    for line in lines:
        assert line["scores"] == {"score": [1.0 if line["method"] == "Full" else 0.0]}, line
        assert (line["tokens"] == 64) == (line["method"] == "StreamingLLM")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name, rows", [("ruler", ruler_rows), ("longbench", longbench_rows)])
def test_formats(tmp_path, filler, name, rows, form):
    """All formats give the same rows; rows of other tasks are ignored."""
    other = rows("qa_1" if name == "ruler" else "qasper")
    save(rows() + other, tmp_path, form)
    save_config(tmp_path)
    task = TASKS[name](task=rows()[0]["task" if name == "ruler" else "dataset"], data=tmp_path)
    prompts = task.prompts(filler, 1600, 3, 0)
    assert [x.turns[0].answers for x in prompts] == [(x,) for x in KEYS]
    for prompt, row in zip(prompts, rows()):
        text = filler.decode(np.concatenate([prompt.context, prompt.turns[0].question]))
        assert prompt.context[0] == filler.first[0]
        if name == "ruler":
            assert text == row["context"] + row["question"] + row["answer_prefix"]
        else:
            assert text == PROMPTS["trec"].format(**row)
    some = task.prompts(filler, 1600, 2, 0)
    assert [x.turns[0].answers for x in some] == [x.turns[0].answers for x in task.prompts(filler, 1600, 2, 0)]
    with pytest.raises(Refused, match=f"--prompts must be at most 3, the rows of {name}"):
        task.prompts(filler, 1600, 4, 0)


@pytest.mark.parametrize(
    "task, question, answers, tokens",
    [
        ("niah_single_1", "What is the special magic number for x?", ["123"], 128),
        ("vt", "Question: Find all variables that are assigned the value 1.", ["ABCDE", "FGHIJ"], 30),
        ("cwe", "Question: What are the 10 most common words in the above list?", ["a", "b"], 120),
        ("fwe", "Question: Do not provide any explanation. Which?", ["a", "b", "c"], 50),
        ("qa_2", "Answer the question based on the given documents. Who?", ["she", "her"], 32),
    ],
)
def test_rulers_own_files(tmp_path, filler, task, question, answers, tokens):
    """Whole prompts in a folder with the task's name; the question is the last match, after examples."""
    row = {"index": 0, "input": f"Read. {question} An example.\n{question}", "outputs": answers, "length": 20}
    save([row], tmp_path / "4096" / task, "jsonl")
    save([{**row, "input": "other"}], tmp_path / "4096" / "niah_multivalue", "jsonl")
    (prompt,) = TASKS["ruler"](task=task, data=tmp_path).prompts(filler, 500, 1, 0)
    (turn,) = prompt.turns
    assert filler.decode(prompt.context) == f"Read. {question} An example.\n"
    assert (filler.decode(turn.question), turn.answers, turn.new_tokens) == (question, tuple(answers), tokens)
    with pytest.raises(Refused, match=r"has no rows of 'niah_multikey_1'; it has none that are named"):
        TASKS["ruler"](task="niah_multikey_1", data=tmp_path).prompts(filler, 500, 1, 0)
    with pytest.raises(Refused, match="has no question like"):
        TASKS["ruler"](task="niah_multivalue", data=tmp_path).prompts(filler, 500, 1, 0)


def test_score_of_ruler(tmp_path):
    prompt = Prompt(np.zeros(1, np.int64), (Turn(np.zeros(1, np.int64), ("Ab", "cd"), 9),))
    score = {task: TASKS["ruler"](task=task, data=tmp_path).score for task in ("niah_multivalue", "qa_1")}
    for said, all_of, any_of in (("AB and cd", 1, 1), ("cd", 0.5, 1), ("", 0, 0)):
        assert score["niah_multivalue"]([said], prompt) == {"score": all_of}
        assert score["qa_1"]([said], prompt) == {"score": any_of}


def test_middle(tmp_path, filler):
    """A long prompt loses its middle, as in LongBench; its question stays whole."""
    save(longbench_rows(), tmp_path, "jsonl")
    save_config(tmp_path)
    task = TASKS["longbench"](task="trec", data=tmp_path)
    whole = PROMPTS["trec"].format(**longbench_rows()[0])
    (cut, *_) = task.prompts(filler, 301, 3, 0)
    ids = np.concatenate([cut.context, cut.turns[0].question])
    full = np.concatenate([filler.first, filler.encode(whole)])
    assert np.array_equal(ids, np.concatenate([full[:150], full[-150:]]))
    assert filler.decode(cut.turns[0].question) == "\n" + longbench_rows()[0]["input"]
    with pytest.raises(Refused, match="--context 60: a question of trec alone has 40 tokens"):
        task.prompts(filler, 60, 1, 0)


def test_the_benchmarks_own_files(tmp_path, filler):
    """Prompts and lengths come from the copy of LongBench; missing entries are reported."""
    assert len(lb.METRICS) == 21
    save(longbench_rows("qasper") + longbench_rows("lcc"), tmp_path, "jsonl")
    task = TASKS["longbench"](task="qasper", data=tmp_path)
    with pytest.raises(Refused, match="--data: longbench needs dataset2prompt.json, of LongBench/config"):
        task.prompts(filler, 1600, 1, 0)
    save_config(tmp_path)
    (prompt,) = task.prompts(filler, 1600, 1, 0)
    assert prompt.turns[0].new_tokens == 16 and filler.decode(prompt.turns[0].question).endswith("\nAnswer:")
    with pytest.raises(Refused, match="dataset2prompt.json has no entry for lcc; it has trec, qasper"):
        TASKS["longbench"](task="lcc", data=tmp_path).prompts(filler, 1600, 1, 0)


CLASSES = ("Individual", "Group", "Individual description")


@pytest.mark.parametrize(
    "metric, said, answer, expected",
    [
        ("f1", "The cat, sat.", "a cat sat down", 0.8),  # 2 of 2 words are right, of 3
        ("f1", "", "cat", 0),
        ("f1", "the", "a", 0),  # nothing but articles
        ("f1", "cat cat", "cat", 2 / 3),
        ("classification", "Individual description", "Individual description", 1),
        ("classification", "Individual description", "Individual", 0.5),
        ("classification", "Group", "Individual", 0),
        ("classification", "", "Individual", 0),
        ("count", "There are 3, or 4", "3", 0.5),
        ("count", "none", "3", 0),
        ("count", "13", "3", 0),
        ("retrieval", "Paragraph 7", "Paragraph 7", 1),
        ("retrieval", "段落7 段落8", "段落7", 0.5),
        ("code", "# first\n```\nreturn x\nreturn y", "return y", 0.88),  # 2 x 7 characters of 16, in whole percent
        ("code", "", "return y", 0),
        ("code", "return y", "return y", 1),
    ],
)
def test_metrics(metric, said, answer, expected):
    assert getattr(lb, metric)(said, answer, CLASSES) == pytest.approx(expected)


def test_rouge():
    said, answer = "the cat sat on the mat", "the cat is on the mat"  # 4 of 5 different words, in order
    assert lb.rouge(said, answer, ()) == pytest.approx(0.8)
    assert lb.rouge("on the mat. the cat sat", answer, ()) == pytest.approx(0.8)  # the union over sentences
    assert lb.rouge("", answer, ()) == 0
    assert lb.rouge("dog", answer, ()) == 0


def test_chinese():
    assert lb.f1_zh("我爱北京。", "北京", ()) == pytest.approx(0.5)  # 我 / 爱 / 北京
    assert lb.f1_zh("。", "北京", ()) == 0
    assert lb.rouge_zh("我爱北京", "我爱 北京", ()) == pytest.approx(1)  # the same words, the blank aside


def test_best_answer_and_first_line(tmp_path):
    turn = Turn(np.zeros(1, np.int64), ("Paris", "the city of Paris"), 9)
    prompt = Prompt(np.zeros(1, np.int64), (turn,))
    score = {task: TASKS["longbench"](task=task, data=tmp_path).score for task in ("triviaqa", "hotpotqa")}
    assert score["hotpotqa"](["City of Paris"], prompt) == {"score": 1}
    assert score["triviaqa"](["\nParis\nPassage: London"], prompt) == {"score": 1}
    assert score["hotpotqa"](["\nParis\nPassage: London"], prompt)["score"] < 1


@pytest.mark.parametrize(
    "spec, words",
    [
        ("ruler", "--data: ruler needs a folder with a local copy of its data, got None"),
        ("longbench:data=/nowhere", "--data: longbench needs a folder .*, got /nowhere"),
        ("longbench:task=nq", "longbench: task must be one of narrativeqa, .*, got 'nq'"),
    ],
)
def test_wrong_options(spec, words):
    with pytest.raises(Refused, match=words):
        run.make_task(spec, None)


def test_wrong_data(tmp_path, filler):
    save_config(tmp_path)
    task = TASKS["longbench"](task="trec", data=tmp_path)
    with pytest.raises(Refused, match="--data: expected folders of save_to_disk, .* found none"):
        task.prompts(filler, 1600, 1, 0)
    save(longbench_rows("qasper"), tmp_path, "jsonl")
    with pytest.raises(Refused, match="has no rows of 'trec'; it has qasper"):
        task.prompts(filler, 1600, 1, 0)
    save([{k: v for k, v in x.items() if k != "answers"} for x in longbench_rows()], tmp_path / "trec", "jsonl")
    with pytest.raises(Refused, match="a row of longbench trec has no column 'answers'; it has input"):
        task.prompts(filler, 1600, 1, 0)
    rows = [{k: v for k, v in x.items() if k != "answer"} for x in ruler_rows()]
    save(rows, tmp_path / "vt", "jsonl")
    save([{**x, "task": "vt"} for x in rows], tmp_path / "vt", "jsonl")
    with pytest.raises(Refused, match="a row of ruler vt has no column 'answer'; it has context"):
        TASKS["ruler"](task="vt", data=tmp_path).prompts(filler, 1600, 1, 0)
    save(ruler_rows(), tmp_path / "niah_single_1", "jsonl")
    with pytest.raises(Refused, match=r"--context 600: a prompt of ruler niah_single_1 has \d+ tokens"):
        TASKS["ruler"](data=tmp_path).prompts(filler, 600, 1, 0)


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("ruler", {"context": None}, "'context' of a row of ruler niah_single_1 must be text, got 'None'"),
        ("ruler", {"answer": []}, "a row of ruler niah_single_1 has no answer"),
        ("ruler", {"answer": [3]}, "'answer' of a row of ruler niah_single_1 must be texts, got '.3.'"),
        ("ruler", {"max_new_tokens": -3}, "an answer of ruler niah_single_1 must have 1 to 1048576 tokens, got -3"),
        (
            "ruler",
            {"question": "", "answer_prefix": ""},
            "a prompt of ruler niah_single_1 has an empty context or question",
        ),
        ("longbench", {"input": None}, "'input' of a row of longbench trec must be text, got 'None'"),
        ("longbench", {"answers": "y"}, "'answers' of a row of longbench trec must be texts, got 'y'"),
        ("longbench", {"all_classes": 3}, "'all_classes' of a row of longbench trec must be texts, got '3'"),
    ],
)
def test_damaged_rows(tmp_path, filler, name, change, words):
    task = {"ruler": "niah_single_1", "longbench": "trec"}[name]
    save_config(tmp_path)
    made = {"ruler": ruler_rows, "longbench": longbench_rows}[name]()
    save([{**x, **change} for x in made], tmp_path / task, "jsonl")
    with pytest.raises(Refused, match=f"--data: {words}"):
        TASKS[name](task=task, data=tmp_path).prompts(filler, 10**5, 1, 0)


@pytest.mark.parametrize(
    "file", ["trec.jsonl", "trec.parquet", "config/dataset2prompt.json", "config/dataset2maxlen.json"]
)
@pytest.mark.parametrize("content", ["{", "[1]\n"])
def test_damaged_files(tmp_path, filler, file, content):
    save_config(tmp_path)
    if file.startswith("config"):
        save(longbench_rows(), tmp_path / "trec", "jsonl")
    (tmp_path / file).write_text(content)
    with pytest.raises(Refused, match=f"--data: .*{file}.*(cannot be read|expected)"):
        TASKS["longbench"](task="trec", data=tmp_path).prompts(filler, 10**5, 1, 0)


# ---- chat templates ----

#: Trims the turn, as many templates do.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[model]{% endif %}{% if enable_thinking %}[think]{% endif %}"
)


@pytest.fixture
def chatting() -> Filler:
    """With a tokenizer that has a chat template."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.MODEL)
    tokenizer.chat_template = TEMPLATE
    return Filler(tokenizer, TEXT)


@pytest.mark.parametrize("name, rows", [("ruler", ruler_rows), ("longbench", longbench_rows)])
def test_a_prompt_in_the_chat_template(tmp_path, chatting, name, rows):
    """A user's turn with the question after the context, then the model's turn, which the answer's prefix begins."""
    save(rows(), tmp_path, "jsonl")
    save_config(tmp_path)
    (row, *_) = rows()
    task = TASKS[name](task="niah_single_1" if name == "ruler" else "trec", data=tmp_path, chat=True)
    (prompt, *_) = task.prompts(chatting, 1600, 3, 0)
    (turn,) = prompt.turns
    said = row["context"] + row["question"] if name == "ruler" else PROMPTS["trec"].format(**row)
    message = [{"role": "user", "content": said}]
    ids = chatting.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    prefix = row["answer_prefix"] if name == "ruler" else ""
    assert [*prompt.context, *turn.question] == [*ids, *chatting.encode(prefix)]
    before = row["context"] if name == "ruler" else "Name the kind.\n" + row["context"]
    assert chatting.decode(prompt.context) == "[user]" + before
    assert chatting.decode(turn.question).endswith("[end][model]" + prefix)


def test_a_long_prompt_in_the_chat_template(tmp_path, chatting):
    """The middle of the text is lost; what the template adds is not."""
    save(longbench_rows(), tmp_path, "jsonl")
    save_config(tmp_path)
    task = TASKS["longbench"](task="trec", data=tmp_path, chat=True)
    (prompt, *_) = task.prompts(chatting, 301, 3, 0)
    ids = np.concatenate([prompt.context, prompt.turns[0].question])
    text = chatting.decode(ids)
    assert len(ids) <= 301 and text.startswith("[user]Name the kind.") and text.endswith("The pass key is[end][model]")
    chatting.tokenizer.chat_template = "An assistant of few words." * 6 + TEMPLATE
    with pytest.raises(Refused, match=r"--context 301: the chat template alone begins with 16\d tokens"):
        task.prompts(chatting, 301, 3, 0)


@pytest.mark.parametrize(
    "name", ["passkey", "niah-multikey", "niah-multiquery", "variable-tracking", "common-words", "phonebook"]
)
def test_a_generated_prompt_in_the_chat_template(chatting, name):
    """Context and question are the user's turn, whatever the task; the context has as many tokens as without a chat."""
    first, again = "<bos>[user]", "[end][user]"
    for prompt in TASKS[name](chat=True).prompts(chatting, 900, 3, 0):
        assert len(prompt.context) == 900
        ids = np.concatenate([prompt.context, *(x.question for x in prompt.turns)])
        assert chatting.tokenizer.decode(prompt.context).startswith(first)
        asked = [chatting.tokenizer.decode(x.question) for x in prompt.turns]
        for i, text in enumerate(asked):
            question, beginning = text.split("[end][model]")
            assert question.startswith(again if i else "\n\nW") and question.endswith("?") and beginning[0] == "T"
        if len(asked) == 1:
            said, end, _ = chatting.tokenizer.decode(ids).partition("[end][model]")
            message = [{"role": "user", "content": said.removeprefix(first)}]  # the template trims it
            turn = chatting.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            assert turn == first + said.removeprefix(first).lstrip() + end
    with pytest.raises(Refused, match=f"{name}: chat must be True, False or None, got 1"):
        TASKS[name](chat=1)


def test_templates_that_fail(chatting, filler):
    for template, words in {
        "{{ raise_exception('no user turns') }}": "--chat: the tokenizer's chat template fails: no user turns",
        "nothing": "--chat: expected the user's turn once in the rendered chat, found 0 times",
        "{{ messages[0].content }}{{ messages[0].content }}": "found 2 times",
    }.items():
        chatting.tokenizer.chat_template = template
        with pytest.raises(Refused, match=words):
            chatting.in_chat("a", "b")
    with pytest.raises(Refused, match="--chat: expected a tokenizer with a chat template, got one without"):
        filler.in_chat("a", "b")
    chatting.tokenizer.chat_template = TEMPLATE
    assert chatting.in_chat("a <cut 0>", "0> b") == ("<bos>[user]a <cut 0>", "0> b[end][model]")


@pytest.mark.parametrize(
    "template, said, chat",
    [(True, [], True), (True, ["--chat"], True), (True, ["--no-chat"], False), (False, [], False)],
)
def test_chat_on_the_command_line(tmp_path, template, said, chat):
    """On by default if the tokenizer has a template; the task's name in the results says so."""
    for file in run.MODEL.glob("*.*"):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / file.name).symlink_to(file)
    if template:
        (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    save(ruler_rows(), tmp_path / "data", "jsonl")
    argv = f"--model {tmp_path}/model --tasks ruler passkey:digits=4 --data {tmp_path}/data --out {tmp_path}/out"
    argv += " --context 900 --prompts 1 --points before --methods full kvzip --budgets 0.5"
    a = run.arguments([*argv.split(), *said], run.make_parser(), rule)
    names = ["ruler:chat=True", "passkey:digits=4,chat=True"] if chat else ["ruler", "passkey:digits=4"]
    assert [*a.plan.tasks] == names and all(x.chat is chat for x in a.plan.tasks.values())
    lines = load(run.measure(a, "python -m kvops.eval", Reader))[1]
    assert [x["task"] for x in lines] == [x for x in a.plan.tasks for _ in range(2)]
    assert all("scores" in x for x in lines)  # KVzip has its words


def test_a_task_that_has_decided_about_chat(tmp_path):
    save(ruler_rows(), tmp_path, "jsonl")
    argv = ["--tasks", "ruler:chat=True", "ruler:task=niah_single_2,chat=False", "--data", str(tmp_path)]
    a = run.arguments(argv, run.make_parser(), rule)
    assert {spec: x.chat for spec, x in a.plan.tasks.items()} == dict(zip(argv[1:3], (True, False)))
    with pytest.raises(Refused, match="ruler: chat must be True, False or None, got 'yes'"):
        run.make_task("ruler:chat=yes", tmp_path)
    with pytest.raises(Refused, match="nowhere: expected a folder that holds a model"):
        run.arguments([*argv[:1], "ruler", *argv[3:], "--model", str(tmp_path / "nowhere")], run.make_parser(), rule)


def test_chat_from_python(tmp_path, chatting):
    import kvops.eval

    save(ruler_rows(), tmp_path, "jsonl")
    model = transformers.AutoModelForCausalLM.from_pretrained(run.MODEL)
    mine = TASKS["ruler"](data=tmp_path)
    given = {"tasks": [mine], "methods": ["full"], "context": 900, "prompts": 1, "points": ["before"]}
    for chat, name in ((None, "ruler:data=%s,chat=True"), (True, "ruler:data=%s,chat=True"), (False, "ruler:data=%s")):
        (row,) = kvops.eval.run(model, chatting.tokenizer, **given, chat=chat).rows
        assert row["task"] == name % tmp_path and mine.chat is None
    plain = transformers.AutoTokenizer.from_pretrained(run.MODEL)
    with pytest.raises(
        ValueError, match="kvops.eval.run: chat: expected a tokenizer with a chat template, got one wit"
    ):
        kvops.eval.run(model, plain, **given, chat=True)


def test_missing_package(tmp_path, monkeypatch):
    """It is reported before anything is measured."""
    monkeypatch.setitem(sys.modules, "rouge", None)
    with pytest.raises(Refused, match=r"rouge is needed for this data .*: pip install 'kvops\[eval\]'"):
        TASKS["longbench"](task="samsum", data=tmp_path)
