"""The tasks of kvops.eval that inspect the cache, compared with plain transformers and explicit masks."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

import kvops  # noqa: E402
from kvops.eval import __main__ as command  # noqa: E402
from kvops.eval.methods import METHODS, Unreachable, rule  # noqa: E402
from kvops.eval.reader import Reader, chunks  # noqa: E402
from kvops.eval.specs import Refused  # noqa: E402
from kvops.eval.tasks import Filler  # noqa: E402
from kvops.eval.tasks.base import asked  # noqa: E402
from kvops.eval.tasks.needles import Passkey  # noqa: E402
from kvops.eval.tasks.probes import Agreement, Chunked, Continuation, Perplexity, Recall  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
BENCH = Path(__file__).parents[2] / "bench"
MODEL = BENCH / "models" / "passkey-llama"
DIGITS = 8


@pytest.fixture(scope="module")
def filler():
    return Filler(transformers.AutoTokenizer.from_pretrained(MODEL), (BENCH / "data" / "haystack.txt").read_text())


@pytest.fixture(scope="module")
def reader():
    return Reader(transformers.AutoModelForCausalLM.from_pretrained(MODEL))


@pytest.fixture(scope="module")
def plain():
    """The transformers model in fp64, which returns its attention."""
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation="eager").double().eval()


def with_room(held, size):
    """The bytes in use match, with no more spare capacity than a growing cache has."""
    return size <= held <= 1.12 * size


def run(task, reader, filler, method, budget, point, context=256, count=2):
    return task.run(reader, filler, task.prompts(filler, context, count, 0), rule(method), budget, point)


def read(task, reader, filler, point, context=256):
    """Return the tokens before the cut, the question, and the full cache's answer, each [2, any]."""
    before, (question,) = asked(task.prompts(filler, context, 2, 0), point)
    said = torch.from_numpy(reader.whole(before, question, DIGITS).said)
    return torch.from_numpy(before), torch.empty(2, 0).long() if question is None else torch.from_numpy(question), said


# One reading for all methods


def test_a_shared_reading_is_cut_as_each_method_cuts_its_own(reader, filler, monkeypatch, tmp_path):
    """Every method keeps the same tokens and gives the same answer; the model reads the prompts once for all of them,
    once more for those that see hidden states, and for each stage of LAQ and KVzip."""
    config, random = reader.model.config, torch.Generator().manual_seed(0)
    sizes = (config.num_key_value_heads, config.hidden_size), (config.num_key_value_heads,)
    layers = [[torch.randn(x, generator=random) for x in sizes] for _ in range(config.num_hidden_layers)]
    kvops.Gates(layers).save(tmp_path / "gates")
    kvzap = [f"kvzap:gates={tmp_path / 'gates'}{x}" for x in ("", ",head_mode=adaptive")]
    shared, reader = (Reader(reader.model, filler.tokenizer, share=x) for x in (True, False))
    prompts, _ = asked(Passkey(DIGITS).prompts(filler, 256, 2, 0), "after")
    staged = {name for name, x in METHODS.items() if x.policy in (kvops.LAQ, kvops.KVzip, kvops.AttentionMatching)}
    read, feed = [], Reader.feed
    monkeypatch.setattr(Reader, "feed", lambda self, cache, ids: read.append(ids.shape[1]) or feed(self, cache, ids))
    alone = []
    for name, of in ((x, rule(x)) for x in (*METHODS, "expected-attention:statistics=prompt", *kvzap)):
        for budget in (128, 64) if of.budgeted else (None,):
            try:
                want = reader.prefill(prompts, of, budget)
            except Unreachable:
                continue
            read.clear()
            found = shared.prefill(prompts, of, budget)
            alone += [name] if prompts.shape[1] in read else []
            for x, y in zip(found.positions, want.positions, strict=True):
                assert torch.equal(x, y), (name, budget)
            assert (found.tokens, found.bytes_full) == (want.tokens, want.bytes_full)
            assert (found.seconds > 0) == (name in staged), name
            said = [of_.answer(x, None, DIGITS, False)[0] for of_, x in ((shared, found), (reader, want))]
            assert np.array_equal(*said), (name, budget)
    assert {*alone} == {next(iter(METHODS)), *staged, kvzap[0]}


def test_shared_keys_are_refused(reader, monkeypatch):
    cache = Reader._cache

    def with_readers(self, policy):
        made = cache(self, policy)
        made.evicting_layers[1].readers = 1
        return made

    monkeypatch.setattr(Reader, "_cache", with_readers)
    with pytest.raises(Refused, match="--share-prefill: layers of this model share keys"):
        Reader(reader.model, share=True)
    assert not Reader(reader.model).share


# The full cache


def test_the_full_cache_agrees_with_itself(reader, filler):
    for point in ("before", "after"):
        for task, perfect in (
            (Agreement(DIGITS), {"kl": 0.0, "top1": 1.0}),
            (Recall(DIGITS), {"recall": 1.0, "mass": 1.0}),
        ):
            found = run(task, reader, filler, "full", None, point)
            assert found.scores.keys() == perfect.keys() == set(task.metrics)
            for name, value in perfect.items():
                assert found.scores[name] == pytest.approx([value] * 2, abs=1e-6)
            assert found.bytes_held == found.bytes_full == found.tokens * 3 * 2 * 2 * 64 * 4 and found.prefill_s > 0


def test_its_answer_is_computed_once(reader, filler):
    ids, _ = asked(Passkey(DIGITS).prompts(filler, 256, 2, 0), "after")
    first = reader.whole(ids, None, 3)
    assert reader.whole(ids.copy(), None, 3) is first and reader.whole(ids, None, 2) is not first
    assert reader.whole(ids, None, 2).said.tolist() == first.said[:, :2].tolist()


@torch.inference_mode()
def test_its_answer_is_that_of_transformers(reader, filler, plain):
    before, question, said = read(Agreement(DIGITS), reader, filler, "before")
    ids = torch.cat((before, question, said), 1)
    logits = plain(ids).logits[:, -DIGITS - 1 : -1]
    assert torch.equal(logits.argmax(-1), said)
    whole = reader.whole(before.numpy(), question.numpy(), DIGITS)
    torch.testing.assert_close(whole.logits.double(), logits, atol=1e-3, rtol=1e-3)


# Agreement and recall


@pytest.mark.parametrize("point", ["before", "after"])
def test_small_caches_keep_less(reader, filler, point):
    """The newest tokens alone lose the key, which is at the beginning and at the end; KeyDiff keeps its digits."""
    found = {
        method: {
            name: np.mean(x)
            for task in (Agreement(DIGITS), Recall(DIGITS))
            for name, x in run(task, reader, filler, method, 128, point, 512).scores.items()
        }
        for method in ("streamingllm", "keydiff")
    }
    newest, distinct = found["streamingllm"], found["keydiff"]
    assert newest["kl"] > 0.5 and max(newest["top1"], newest["recall"], newest["mass"]) < 0.9
    assert distinct["kl"] < newest["kl"] / 2 and distinct["top1"] > newest["top1"]
    assert distinct["mass"] > newest["mass"], found


@torch.inference_mode()
def test_agreement_is_kl_under_an_explicit_mask(reader, filler, plain):
    """Sinks and the newest tokens keep their positions; later tokens attend to them and to themselves."""
    task, budget = Agreement(DIGITS), 64
    found = run(task, reader, filler, "streamingllm:positions=original", budget, "before")
    before, question, said = read(task, reader, filler, "before")
    ids = torch.cat((before, question, said), 1)
    n, total = before.shape[1], ids.shape[1]
    visible = torch.ones(total, total, dtype=torch.bool).tril()
    visible[n:, 4 : n - (budget - 4)] = False
    mask = torch.zeros(1, 1, total, total).double().masked_fill(~visible, torch.finfo(torch.float64).min)
    full, cut = (x.logits[:, -DIGITS - 1 : -1].softmax(-1) for x in (plain(ids), plain(ids, attention_mask=mask)))
    kl = (full * (full / cut).log()).sum(-1).mean(-1)
    assert kl[0] > 1 and kl[1] < 1e-3  # keys at the beginning, which is forgotten, and at the end
    assert found.scores["kl"] == pytest.approx(kl.tolist(), rel=1e-3, abs=1e-5)
    assert found.scores["top1"] == (full.argmax(-1) == cut.argmax(-1)).double().mean(-1).tolist()


@pytest.mark.parametrize("point", ["before", "after"])
@pytest.mark.parametrize("method", ["keydiff", "snapkv", "pyramidkv", "lacache", "laq", "lagkv-l2"])
@torch.inference_mode()
def test_recall_is_that_of_explicit_attention(reader, filler, plain, method, point):
    """The answer's rows and the prompt's columns of the attention of one forward pass in fp64."""
    task, context, budget = Recall(DIGITS), 320, 96
    found = run(task, reader, filler, method, budget, point, context)
    before, question, said = read(task, reader, filler, point, context)
    n, recall, mass = before.shape[1], [], []
    weights = plain(torch.cat((before, question, said), 1), output_attentions=True).attentions
    kept = reader.prefill(before.numpy(), rule(method), budget).positions
    assert len(kept) == len(weights) == 3
    assert len({x.shape for x in kept}) == (2 if method == "lagkv-l2" else 3 if method == "pyramidkv" else 1)
    for layer, positions in zip(weights, kept):
        rows = layer[:, :, -DIGITS:, :n]
        rows = (rows / rows.sum(-1, keepdim=True)).sum(2).unflatten(1, (2, 2)).mean(2)  # a query head's group
        for b in range(2):
            for head in range(2):
                w, slots = rows[b, head], positions[b, head].tolist()
                gold = set(w.argsort(descending=True)[: len(slots)].tolist())
                recall.append(len(gold & set(slots)) / len(gold))
                mass.append((w[slots].sum() / w.sum()).item())
    recall, mass = (np.array(x).reshape(3, 2, 2).mean((0, 2)) for x in (recall, mass))
    assert found.scores["recall"] == pytest.approx(recall, abs=2e-3)  # a slot or so, where two are as heavy
    assert found.scores["mass"] == pytest.approx(mass, abs=1e-4)
    assert ((0 < recall) & (recall < 1) & (0 < mass) & (mass < 1)).all()


# Perplexity


@torch.inference_mode()
def test_perplexity_is_the_loss_of_transformers(reader, filler, plain):
    task = Perplexity(window=64, bins=3)
    found = run(task, reader, filler, "full", None, "stream", 300)
    ids = torch.from_numpy(np.stack([x.context for x in task.prompts(filler, 300, 2, 0)]))
    losses = torch.nn.functional.cross_entropy(plain(ids).logits[:, :-1].mT, ids[:, 1:], reduction="none")
    assert found.scores["loss"] == pytest.approx(losses.mean(1).tolist(), rel=1e-4)
    assert found.more["ends"] == [100, 200, 299]
    pieces = [x.mean().item() for x in losses.split([100, 100, 99], 1)]
    assert found.more["loss"] == pytest.approx(pieces, rel=1e-4)
    assert found.more["perplexity"] == pytest.approx(np.exp(pieces), rel=1e-3)
    assert found.tokens == 299 and with_room(found.bytes_held, found.bytes_full)  # the last token is not fed


@pytest.mark.parametrize("method", ["streamingllm", "lacache", "keydiff", "snapkv", "protokv", "h2o", "tova", "random"])
def test_streams_hold_bounded_bytes(reader, filler, method):
    task, tokens = Perplexity(window=64), []
    for context in (256, 512):
        found = run(task, reader, filler, method, 96, "stream", context, 1)
        assert found.bytes_full == (context - 1) * 3 * 2 * 2 * 64 * 4 and found.scores["loss"][0] < 6
        assert found.bytes_held == found.tokens * 3 * 2 * 2 * 64 * 4
        tokens.append(found.tokens)
    assert tokens[0] <= 110 and abs(tokens[0] - tokens[1]) <= 16  # LaCache's length oscillates


def test_pieces_of_the_text():
    """They do not overlap if the text is long enough, else they are evenly spaced."""
    numbered = SimpleNamespace(first=np.array([-1]), ids=np.arange(30_000))
    for count, room in ((1, 999), (1, 30_000), (2, 15_000), (30, 999)):
        pieces = [x.context for x in Perplexity().prompts(numbered, room + 1, count, 3)]
        text = np.concatenate([x[1:] for x in pieces])
        assert len(pieces) == count and all(len(x) == room + 1 and x[0] == -1 for x in pieces)
        assert (np.diff(text) > 0).all() and 0 <= text[0] and text[-1] < 30_000 and (np.diff(text) > 1).sum() < count
    begins = [x.context[1] for x in Perplexity().prompts(numbered, 20_001, 3, 0)]
    assert begins == [0, 5_000, 10_000]
    again, other = (Perplexity().prompts(numbered, 1000, 20, seed) for seed in (3, 4))
    assert not np.array_equal(again[0].context, other[0].context)
    for context in (2, 30_002):
        with pytest.raises(Refused, match=f"--context: expected 3 to 30001 .*, got {context}"):
            Perplexity().prompts(numbered, context, 1, 0)


# Loss after a cut


@torch.inference_mode()
def test_the_loss_of_a_continuation_is_that_of_transformers(reader, filler, plain):
    """The newest tokens alone are what a mask leaves of the context."""
    task = Continuation(tokens=40)
    ids = torch.from_numpy(np.stack([x.context for x in task.prompts(filler, 200, 2, 0)]))
    assert ids.shape == (2, 240)
    seen = torch.ones(240, 240, dtype=torch.bool).tril()
    for method, budget in (("full", None), ("streamingllm:sinks=0", 50)):
        if budget:
            seen[200:, : 200 - budget] = False
        mask = torch.where(seen, 0.0, -torch.inf).double().expand(2, 1, -1, -1)
        logits = plain(ids, attention_mask=mask).logits[:, 199:-1]
        want = torch.nn.functional.cross_entropy(logits.mT, ids[:, 200:], reduction="none").mean(1)
        found = run(task, reader, filler, method, budget, "once", 200)
        assert found.scores["loss"] == pytest.approx(want.tolist(), rel=1e-4)
        assert found.tokens == (budget or 200) and found.bytes_full == 200 * 3 * 2 * 2 * 64 * 4
    with pytest.raises(Refused, match=f"--context: expected 1 to {len(filler.ids) - 39} .*, got {len(filler.ids)}"):
        task.prompts(filler, len(filler.ids), 1, 0)


# Chunked prefill


def test_chunks_of_a_prompt():
    lagkv = kvops.LagKV(32, 0.5, sinks=16)
    assert chunks(lagkv, 200, 0) == [80, 32, 32, 32, 24] and chunks(lagkv, 60, 0) == [60]
    assert chunks(lagkv, 200, 128) == [128, 72] and chunks(kvops.KeyDiff(8), 600, 0) == [256, 256, 88]


@pytest.mark.parametrize("chunk", [0, 100])
def test_chunks_of_the_full_cache_are_the_whole(reader, filler, chunk):
    found = run(Chunked(DIGITS, chunk=chunk), reader, filler, "full", None, "chunked", 300)
    whole = run(Passkey(DIGITS), reader, filler, "full", None, "after", 300)
    assert found.scores == {"fgt": [1.0, 1.0], **whole.scores} and found.said == whole.said
    assert (found.tokens, found.steps) == (whole.tokens, DIGITS) and with_room(found.bytes_held, whole.bytes_full)


def test_lagkv_in_the_papers_chunks(reader, filler):
    """The same partitions as in one step, with other keys: later chunks attended to what was left of earlier ones."""
    ids, _ = asked(Passkey(DIGITS).prompts(filler, 400, 2, 0), "after")
    method = rule("lagkv:lag=32")
    whole, chunked = reader.prefill(ids, method, 160), reader.prefill(ids, method, 160, 0)
    assert whole.tokens == chunked.tokens <= 160 and with_room(chunked.bytes_held, whole.bytes_held)
    first, *others = zip(whole.cache.layers, chunked.cache.layers)
    assert torch.equal(first[0].cache.positions, first[1].cache.positions)  # of the embeddings alone
    torch.testing.assert_close(first[0].keys, first[1].keys)
    assert all(not torch.equal(a.cache.positions, b.cache.positions) for a, b in others)


def test_a_window_of_chunks_forgets_the_key(reader, filler):
    found = run(Chunked(DIGITS, chunk=64), reader, filler, "streamingllm", 64, "chunked", 400)
    assert found.tokens == 64 and np.mean(found.scores["partial"]) < 0.7 and len(found.scores["fgt"]) == 2
    assert found.prefill_s > 0 and found.decode_s > 0 and found.steps == DIGITS


# The command


def test_every_task_by_the_command(tmp_path):
    names = ["agreement", "recall", "perplexity", "continuation", "chunked"]
    a = command.arguments(
        [
            *("--tasks", "agreement:digits=8", "recall:digits=8", "perplexity:window=64", "continuation:tokens=16"),
            "chunked:digits=8,chunk=64",
            *("--methods", "full", "satkv", "laq", "--budgets", "64", "--context", "256"),
            *("--prompts", "2", "--batch", "1", "--out", str(tmp_path)),
        ],
        command.make_parser(),
        rule,
    )
    (file,) = command.measure(a, "python -m kvops.eval", Reader)
    lines = [x for x in map(json.loads, file.read_text().splitlines()) if "task" in x]
    assert [x.partition(":")[0] for x in dict.fromkeys(line["task"] for line in lines)] == names
    assert len(lines) == 3 * 2 * (2 + 2 + 1 + 1 + 1)  # methods, batches, points
    for line in lines:
        streams = line["point"] in ("stream", "chunked")
        if streams and line["method"] == "LAQ":
            assert "draft of the answer" in line["unreachable"]
        else:
            task = command.TASKS[line["task"].partition(":")[0]]
            assert list(line["scores"]) == list(task.metrics) and all(len(x) == 1 for x in line["scores"].values())
            assert 0 < line["bytes_held"] <= 1.1 * line["bytes_full"] and line["prefill_s"] > 0  # with room


def test_wrong_use(reader, filler, capsys):
    for spec, message in (
        ("perplexity:window=0", "perplexity: window must be an integer, at least 1, got 0"),
        ("perplexity:bins=x", "perplexity: bins must be an integer, at least 1, got 'x'"),
        ("continuation:tokens=0", "continuation: tokens must be an integer, at least 1, got 0"),
        ("chunked:chunk=-1", "chunked: chunk must be an integer, at least 0, got -1"),
        ("recall:digits=0", "passkey: digits must be an integer, at least 1, got 0"),
    ):
        with pytest.raises(SystemExit):
            command.arguments(["--tasks", spec], command.make_parser(), rule)
        assert message in capsys.readouterr().err
    with pytest.raises(Unreachable, match="LAQ: eviction needs a draft"):
        rule("laq").policy(64, 256, 3, streaming=True)


def test_a_first_stage_that_needs_more_queries_is_unreachable(reader):
    prompts = np.ones((1, 60), dtype=np.int64)
    with pytest.raises(Unreachable, match="LAQ: stage1 must use a window of the last queries, .* got 60 from H2O"):
        reader.prefill(prompts, rule("laq:stage1=h2o"), 16)
    assert reader.prefill(prompts, rule("laq:stage1=full"), 16).tokens == 16
