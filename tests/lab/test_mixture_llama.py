"""The training of bench/models/mixture-llama: its tokenizer, its data and resuming, on a tiny model."""

import dataclasses
import fcntl
import json
import re
import signal
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvops.demo import TEXT
from kvops.eval.tasks import Filler

FOLDER = Path(__file__).parents[2] / "bench/models/mixture-llama"
sys.path.insert(0, str(FOLDER))
import corpus  # noqa: E402
import mixture  # noqa: E402
import train  # noqa: E402

sys.path.remove(str(FOLDER))

SEEDS = range(40)


@pytest.fixture(scope="module")
def source():
    written = TEXT.read_text()
    tok = corpus.build_tokenizer([written], vocab=600)
    return corpus.Text(tok, corpus.encode(tok, [written]))


def episodes(task, room=500):
    return [mixture.TASKS[task](np.random.default_rng([7, i]), room) for i in SEEDS]


def joined(parts):
    return "".join(x for x, _ in parts)


def answers(parts):
    return [x for x, w in parts if w == mixture.ANSWER]


def test_tokenizer_returns_every_text(source):
    for x in ("a  b\n\tc", "key_1 = 0x0042", "<bos> is text here", "naïve 数", TEXT.read_text()[:5000]):
        assert source.tok.decode(source.tok.encode(x, add_special_tokens=False).ids, skip_special_tokens=False) == x


def test_a_digit_is_one_token_and_the_text_starts_with_bos(source, tmp_path):
    corpus.save_tokenizer(source.tok, tmp_path, 128)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(" The pass key is 40831.").input_ids
    assert ids[0] == tokenizer.bos_token_id == corpus.BOS
    assert tokenizer.convert_ids_to_tokens(ids)[-6:] == ["4", "0", "8", "3", "1", "."]
    assert Filler(tokenizer, "any text").first.tolist() == [corpus.BOS]


def test_the_tokenizer_depends_on_the_text_alone():
    one, two = (corpus.build_tokenizer([TEXT.read_text()[:50_000]], vocab=500).to_str() for _ in range(2))
    assert one == two


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_demo_text_is_held_out(split):
    root = sysconfig.get_path("stdlib")
    texts = [x.tobytes() for x in corpus.ascii_files(root, corpus.python_files(root), split)]
    calendar = Path(root, "calendar.py").read_bytes()  # the first file of the demo's text
    assert (calendar in texts) == (split == "heldout") and len(texts) > 10


def test_manual_pages_lose_their_markup():
    page = ".\\\" comment\n.TH LS 1\n.SH NAME\nls \\- list \\fBdirectory\\fR contents\n.nf\n'br\nthe end\n"
    assert corpus.prose(page) == "LS 1\nNAME\nls - list directory contents\nthe end"


@pytest.mark.parametrize("task", mixture.TASKS)
@pytest.mark.parametrize("length", [128, 512])
def test_sequences_have_their_length(source, task, length):
    for i in SEEDS:
        ids, weights = mixture.sequence(np.random.default_rng([i]), source, task, length)
        assert ids.shape == weights.shape == (length,)
        assert ids[0] == corpus.BOS and (ids[1:] != corpus.BOS).all() and ids.max() < source.tok.get_vocab_size()
        assert set(weights) <= {mixture.TEXT, mixture.ANSWER, mixture.UNKNOWN}
        assert task == "text" or i > 5 or mixture.ANSWER in weights
    again, _ = mixture.sequence(np.random.default_rng([SEEDS[-1]]), source, task, length)
    assert (ids == again).all()


def test_weighted_tokens_are_the_answers(source):
    parts = [(" It is ", 1.0), ("407", 3.0), (".", 1.0)]
    ids, weights = mixture.encoded(source, parts)
    assert source.tok.decode(ids[weights == 3]) == "407"
    assert (ids == source.tok.encode(joined(parts), add_special_tokens=False).ids).all()


def test_keys_are_in_the_text_once():
    for x in episodes("keys"):
        hidden = "".join(map(joined, x.hidden))
        assert answers(x.turns)
        for answer in answers(x.turns):
            for value in answer.rstrip(".").split(", "):
                assert hidden.count(value) == 1, (value, hidden)


def test_other_numbers_are_as_common_as_keys():
    other = re.compile("|".join(re.escape(x).replace(r"\{n\}", ".+").replace(r"\{v\}", r"\d+") for x in mixture.OTHERS))
    digits = Counter()
    for x in episodes("keys", 2000) + episodes("keys", 300):
        values = [(bool(other.fullmatch(joined(parts))), parts[1][0]) for parts in x.hidden]
        if all(value.isdigit() for _, value in values):
            for found in values:
                digits[found[0]] += len(found[1])
    assert 0.8 < digits[True] / digits[False] < 1.25


def test_chains_lead_to_the_value():
    for x in episodes("tracking"):
        (answer,) = answers(x.turns)
        value = re.search(r"the value (\d+)\?", joined(x.turns))[1]
        holds = {value}
        for parts in x.hidden:  # in the order of the text
            name, source = re.fullmatch(r"(?:VAR )?(\w+) = (?:VAR )?(\w+)\.?", joined(parts).strip()).groups()
            holds |= {name} if source in holds else set()
        assert holds - {value} == set(answer.strip(" .").split(", "))


def test_counts_are_those_of_the_list():
    for x in episodes("words"):
        counts = Counter(joined(parts).strip() for parts in x.hidden[1:])
        turns = joined(x.turns)
        for word, times in re.findall(r"How many times does (\w+) occur in the list\? It occurs (\d+) times", turns):
            assert counts[word] == int(times)
        if "How many" not in turns:
            best = re.search(r"They are: (.*)\.", turns)[1].split(", ")
            assert [counts[x] for x in best] == sorted(counts.values(), reverse=True)[: len(best)]
            assert counts[best[-1]] > max([n for word, n in counts.items() if word not in best], default=0)


def test_labels_are_known_from_earlier_examples():
    kind = {word: i for i, words in enumerate(mixture.KINDS) for word in words}
    assert len(kind) == sum(map(len, mixture.KINDS))  # a word has one kind
    for x in episodes("labels"):
        said = {}
        parts = [part for piece in x.hidden for part in piece] + x.turns
        for (before, _), (label, weight), _ in zip(parts[::3], parts[1::3], parts[2::3]):
            (word,) = [w for w in re.findall(r"\w+", before) if w in kind and w not in ("Text", "Type")]
            assert (weight == mixture.ANSWER) == (kind[word] in said)
            assert said.setdefault(kind[word], label) == label
        assert len(set(said.values())) == len(said)


def test_copies_repeat_what_was_there():
    for x in episodes("copies"):
        before = ""
        for _, (start, _), (rest, weight), _ in x.hidden:
            assert (f" {start}{rest} " in before) == (weight == mixture.ANSWER)
            before += f" {start}{rest} "


TINY = dict(
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=256,
    attention_bias=True,
)
RECIPE = train.Recipe(
    model=TINY,
    vocab=600,
    warmup=2,
    stages=(
        train.Stage(3, 256, {128: 1.0}, train.FIRST, 1e-3),
        train.Stage(2, 256, {128: 0.5, 256: 0.5}, train.LATER, 0.0),
    ),
)


@pytest.fixture
def handlers():
    """Give pytest its signal handlers back."""
    kept = {x: signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(train, "validate", lambda *a: {})


def run(folder, source, recipe=RECIPE, **options):
    folder.mkdir(exist_ok=True)
    train.train(recipe, folder, "cpu", source, source, **options)
    return torch.load(folder / "last.pt", weights_only=True)


def test_a_resumed_run_computes_the_same_bits(source, tmp_path, monkeypatch, one_thread, handlers, quick):
    whole = run(tmp_path / "whole", source)
    monkeypatch.setattr(train, "SAVE", 2)
    killed = run(tmp_path / "killed", source, stop=3)  # checkpoints after steps 2 and 3
    assert killed["step"] == 3 and not torch.equal(killed["model"]["lm_head.weight"], whole["model"]["lm_head.weight"])
    resumed = run(tmp_path / "killed", source)
    assert whole["step"] == resumed["step"] == 5
    assert whole["model"].keys() == resumed["model"].keys()
    for name, x in whole["model"].items():
        assert torch.equal(x, resumed["model"][name]), name


def test_a_kill_while_writing_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    train.save(tmp_path / "last.pt", {"step": 1})

    def half(state, file):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(KeyboardInterrupt):
        train.save(tmp_path / "last.pt", {"step": 2})
    assert torch.load(tmp_path / "last.pt")["step"] == 1


def test_other_settings_are_refused_and_later_stages_may_change(source, tmp_path, one_thread, handlers, quick):
    run(tmp_path, source, stop=2)
    with pytest.raises(ValueError, match="expected a checkpoint with seed = 1, got 0"):
        run(tmp_path, source, dataclasses.replace(RECIPE, seed=1))
    longer = dataclasses.replace(RECIPE, stages=(RECIPE.stages[0], dataclasses.replace(RECIPE.stages[1], steps=3)))
    assert run(tmp_path, source, longer)["step"] == 6


def test_the_model_loads_as_a_stock_llama(source, tmp_path, monkeypatch, one_thread, handlers):
    monkeypatch.setattr(train, "HELD_OUT", 256)
    state = run(tmp_path, source)
    lines = [json.loads(x) for x in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines if "held_out" in x] == [3, 5]
    assert all(0 <= x[f"{task}_exact"] <= x[task] <= 1 for x in lines if "held_out" in x for task in ("keys", "labels"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert type(model).__name__ == "LlamaForCausalLM" and model.config.bos_token_id == tokenizer.bos_token_id
    assert torch.equal(model.lm_head.weight, state["model"]["lm_head.weight"])


def test_every_layer_starts_with_a_sink(one_thread):
    recipe = train.Recipe()
    model = train.build(recipe).eval()
    x = model.get_input_embeddings().weight.square().mean(-1).sqrt()
    assert x[corpus.BOS].item() == pytest.approx(recipe.sink) and x[corpus.UNK :].max() < 0.05
    model.set_attn_implementation("eager")
    ids = torch.randint(corpus.UNK + 1, recipe.vocab, (1, 256), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = corpus.BOS
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    assert len(attentions) == 8 and all(a[:, :, 64:, 0].mean() > 0.4 for a in attentions)


def test_two_runs_in_one_folder_are_refused(tmp_path, capsys):
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SystemExit):
            train.main(["--out", str(tmp_path)])
    assert "another run is training there" in capsys.readouterr().err
