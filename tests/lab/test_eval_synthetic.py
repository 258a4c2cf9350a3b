"""Synthetic caches: the settings, scores against a dense computation, and the task on the command line."""

import functools
import json
from dataclasses import fields, replace

import pytest
import torch
import torch.nn.functional as F

import kvops
from kvops import analysis
from kvops.eval.caches import RESPONSE, WINDOW, CacheSettings, check_context, make, positions
from kvops.eval.methods import METHODS, Unreachable, rule
from kvops.eval.specs import Refused
from kvops.eval.tasks.synthetic import PRESETS, Synthetic, one_shot

N = 768


def caches(count: int = 2, **settings):
    return make(CacheSettings(**settings), N, [(0, N, i) for i in range(count)])


def cosines(x, y=None) -> float:
    """The mean cosine of all pairs of rows, without a row and itself; or of rows of x and y."""
    x = F.normalize(x, dim=-1)
    if y is not None:
        return float((x @ F.normalize(y, dim=-1).mT).mean())
    n = x.shape[-2]
    return float(((x @ x.mT).sum((-2, -1)) - n).mean()) / (n * (n - 1))


def chosen(x, which):
    """Rows of [layers, b, H, n, d] at bool [b, n], equally many in each prompt: [layers, b, H, any, d]."""
    return torch.stack([x[:, i][:, :, which[i]] for i in range(len(which))], 1)


def looked_for(q, c) -> float:
    """The fraction of queries whose most attended key is a needle's."""
    k = c.k.repeat_interleave(q.shape[2] // c.k.shape[2], 2)
    most = (q @ k.mT).argmax(-1)  # [layers, b, Hq, rows]
    return float(torch.stack([c.needles[i][most[:, i]] for i in range(len(c.needles))]).double().mean())


@pytest.mark.parametrize("collinearity", (0.0, 0.4, 0.8))
def test_collinearity_is_the_mean_cosine_of_ordinary_keys(collinearity):
    c = caches(collinearity=collinearity)
    assert cosines(chosen(c.k, ~c.needles)) == pytest.approx(collinearity, abs=0.02)


def test_locality_is_what_neighbours_share():
    for locality in (0.0, 0.4, 0.9):
        c = caches(collinearity=0.5, locality=locality, distinct=False)
        near = analysis.key_locality(c.k.flatten(0, 1))
        assert near.distant.mean() == pytest.approx(0.5, abs=0.03)
        shared = (near.adjacent - near.distant).mean() / 0.5
        assert shared == pytest.approx(locality, abs=0.05)


def test_alignment_is_the_cosine_of_queries_and_the_mean_key():
    for alignment in (-0.6, 0.0, 0.3):
        c = caches(alignment=alignment)
        mean = F.normalize(chosen(c.k, ~c.needles), dim=-1).mean(3, keepdim=True).repeat_interleave(2, 2)
        for q in (c.q, c.response, c.draft):
            assert cosines(q, mean) == pytest.approx(alignment, abs=0.05)


@pytest.mark.parametrize("distinct", (False, True))
def test_queries_look_for_needles_as_often_as_told(distinct):
    c = caches(8, distinct=distinct, overlap=0.75, overlap_before=0.25, overlap_last=1.0, draft=0.5)
    assert looked_for(c.response, c) > 0.98
    assert looked_for(c.draft, c) == pytest.approx(0.5, abs=0.06)
    assert looked_for(c.q[..., -WINDOW:-1, :], c) == pytest.approx(0.75, abs=0.06)
    assert looked_for(c.q[..., N // 2 : -WINDOW, :], c) == pytest.approx(0.25, abs=0.06)
    assert looked_for(c.q[..., -1:, :], c) > 0.98
    assert looked_for(caches(8).q, c) < 0.1


def test_queries_of_the_prompt_look_back():
    """The two most attended keys are those that a query looks for, with focus=2."""
    c = caches(focus=1, sharpness=40.0, overlap_before=0.5)
    most = (c.q @ c.k.repeat_interleave(2, 2).mT).argmax(-1)
    assert (most <= torch.arange(N)).double().mean() > 0.97


def test_sharpness_is_the_lead_of_the_keys_looked_for():
    for sharpness in (5.0, 20.0):
        c = caches(sharpness=sharpness, focus=1)
        logits = c.response @ c.k.repeat_interleave(2, 2).mT / 8
        lead = logits.amax(-1) - logits.mean(-1)
        assert lead.mean() == pytest.approx(sharpness, abs=2)
        torch.testing.assert_close(c.attention, logits.softmax(-1), atol=1e-5, rtol=1e-4)


def test_recency():
    c = caches(8, recency=0.7)
    newest = c.attention[..., -N // 16 :].sum(-1).mean()
    assert newest == pytest.approx(0.7, abs=0.06)


def test_needles_have_the_keys_that_they_are_told_to_have():
    c = caches(clustering=0.6, needle_cosine=0.5, needle_length=0.25, value_length=4.0, topics=1, collinearity=0.8)
    needles, others = chosen(c.k, c.needles), chosen(c.k, ~c.needles)
    assert cosines(needles) == pytest.approx(0.25 + 0.75 * 0.6, abs=0.03)  # the shared direction, and the cluster
    assert cosines(needles, others) == pytest.approx(0.5 * 0.8**0.5, abs=0.03)
    assert needles.norm(dim=-1).mean() / others.norm(dim=-1).mean() == pytest.approx(0.25, rel=1e-4)
    values = chosen(c.v, c.needles).norm(dim=-1).mean() / chosen(c.v, ~c.needles).norm(dim=-1).mean()
    assert values == pytest.approx(4, rel=0.05)
    assert cosines(chosen(caches(clustering=0.0).k, c.needles)) == pytest.approx(0, abs=0.03)


def test_needles_that_are_not_distinct_are_ordinary():
    c = caches(4, distinct=False, collinearity=0.8)
    needles, others = chosen(c.k, c.needles), chosen(c.k, ~c.needles)
    assert cosines(needles, others) == pytest.approx(cosines(others), abs=0.01)


def test_positions():
    for settings in (
        CacheSettings(needles=50, run_length=12, distractors=30),
        CacheSettings(needles=5),
        CacheSettings(needles=96, run_length=96),
    ):
        rng = torch.Generator().manual_seed(0)
        for _ in range(20):
            at = positions(settings, 400, rng)
            assert len(at) == len(at.unique()) == settings.needles + settings.distractors
            assert at.min() >= 0 and at.max() < 400 - WINDOW
            steps = at[: settings.needles].diff()
            assert (steps == 1).sum() >= settings.needles - -(-settings.needles // settings.run_length)
    c = caches(needles=20)
    assert (c.needles.sum(-1) == 20).all() and not c.needles[:, -WINDOW:].any()


def test_distractors_are_single_and_never_looked_for():
    """They differ from all other keys; needles stay what they are."""
    plain, c = caches(1, distinct=False), caches(1, distinct=False, distractors=100)
    odd = kvops.ops.anchor_cosine(c.k.flatten(0, 1))[0, 0].sort(descending=True).indices[:100]
    assert cosines(c.k[0, 0, 0, odd]) == pytest.approx(0, abs=0.03)
    assert not c.needles[0, odd].any() and c.attention[..., odd].sum(-1).mean() < 0.03
    assert plain.needles.sum() == c.needles.sum()


def test_topics_drift():
    c = caches(topics=6, collinearity=0.9, distinct=False)
    near = analysis.key_locality(c.k.flatten(0, 1), N // 2)
    assert (near.adjacent > 0.85).all() and near.distant.mean() < 0.3
    c = caches(topics=1, collinearity=0.9, distinct=False)
    assert (analysis.key_locality(c.k.flatten(0, 1), N // 2).distant > 0.85).all()


def test_channels_change_keys_but_not_attention():
    even, c = caches(channels=0.0), caches(channels=2.0)
    torch.testing.assert_close(c.attention, even.attention, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(c.v, even.v)
    spread = c.k.std(3).log().std(-1).mean()
    assert spread == pytest.approx(2, abs=0.3) and even.k.std(3).log().std(-1).mean() < 0.2


def test_a_cache_depends_on_its_own_seed_alone():
    both = caches(3)
    alone = make(CacheSettings(), N, [(0, N, 2)])
    for name in ("k", "v", "q", "response", "draft"):
        assert torch.equal(getattr(both, name)[:, 2:], getattr(alone, name))
        assert not torch.equal(getattr(both, name)[:, :1], getattr(both, name)[:, 1:2])
    assert torch.equal(both.needles[2], alone.needles[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_default_dtype_has_no_say(dtype):
    options = dict(distractors=4, clustering=0.5, recency=0.3, draft=0.6)
    expected = caches(**options)
    try:
        torch.set_default_dtype(dtype)
        found = caches(**options)
    finally:
        torch.set_default_dtype(torch.float32)
    for x, y in zip(vars(found).values(), vars(expected).values()):
        assert x.dtype == y.dtype and torch.equal(x, y)


def run(method: str, budget: int | None, count: int = 2, context: int = N, **options):
    task = Synthetic(**options)
    return task.run(None, None, task.prompts(None, context, count, 0), rule(method), budget, "once"), task


@pytest.mark.parametrize("redundant", (False, True))
def test_scores_are_those_of_a_dense_computation(redundant):
    found, task = run("random", 100, redundant=redundant, layers=3)
    policy = rule("random").policy(100, N, 3)
    for i in range(2):
        c = make(task.settings, N, [(0, N, i)])
        kept = torch.zeros(3, 2, N, dtype=torch.bool)
        for layer in range(3):
            indices = policy.compress(c.k[layer], c.v[layer], layer=layer, num_layers=3).indices
            kept[layer].scatter_(1, indices[0], True)
        if redundant:
            kept = kept.any(0).expand_as(kept)
        mass, error = [], []
        for layer in range(3):
            for head in range(4):
                k, v = c.k[layer, 0, head // 2].double(), c.v[layer, 0, head // 2].double()
                for row in range(RESPONSE):
                    logits = k @ c.response[layer, 0, head, row].double() / 8
                    weights, read = logits.softmax(-1), kept[layer, head // 2]
                    mass.append(weights[read].sum())
                    whole, left = weights @ v, logits[read].softmax(-1) @ v[read]
                    error.append((whole - left).norm() / whole.norm())
        assert found.scores["mass"][i] == pytest.approx(float(torch.stack(mass).mean()), abs=1e-5)
        assert found.scores["error"][i] == pytest.approx(float(torch.stack(error).mean()), abs=1e-4)
    assert found.tokens == 100 and found.bytes_held == 100 * 3 * 2 * 2 * 64 * 4
    assert found.bytes_full == N * 3 * 2 * 2 * 64 * 4


def test_the_whole_cache_loses_nothing():
    found, _ = run("full", None)
    assert found.scores["mass"] == pytest.approx([1, 1]) and found.scores["error"] == pytest.approx([0, 0], abs=1e-5)
    assert found.tokens == N


@pytest.mark.parametrize("block", (0, 128))
@pytest.mark.parametrize("method", [*METHODS, "defensivekv:stages=False"])
def test_every_method_runs(method, block):
    """At its budget, or with the reason why not."""
    if method == "full":
        return
    try:
        found, _ = run(method, 128, 1, block=block, layers=4)
    except Unreachable as error:
        repeats = method in ("kvzip", "kvzip+", "kvgrad", "attention-matching")
        if repeats and block:
            assert "second reading" in str(error)
        elif repeats:
            assert "have no q_re" in str(error)  # q_repeat, q_reference
        elif method in ("criticalkv", "defensivekv", "expected-attention", "triattention", "kvzap"):
            assert "of a model" in str(error)
        else:
            assert block and method.startswith("laq") and "draft" in str(error)
        return
    assert 0 < found.scores["mass"][0] <= 1 and found.scores["error"][0] > 0
    assert found.tokens <= 1.1 * 128 or method == "lagkv-l2"


def test_a_blocked_prompt_is_that_of_a_cache():
    found, task = run("keydiff", 100, 1, block=100)
    c = make(task.settings, N, [(0, N, 0)])
    mass = []
    for layer in range(4):
        cache = kvops.Cache(kvops.KeyDiff(100), layer=layer, num_layers=4)
        for first in range(0, N, 100):
            cache.attend(*(x[layer][:, :, first : first + 100] for x in (c.q, c.k, c.v)))
        kept = cache.positions[0].repeat_interleave(2, 0)[:, None].expand(-1, RESPONSE, -1)
        mass.append(c.attention[layer, 0].gather(-1, kept).sum(-1).mean())
    assert found.tokens == 100 and found.scores["mass"][0] == pytest.approx(float(sum(mass) / 4), abs=1e-5)


def test_the_arguments_of_compress(monkeypatch):
    """Each method gets the queries that its one-shot call names."""
    c = caches(1, layers=1)
    q = c.q[0]

    def given(method, **settings):
        policy = kvops.policy(method, budget=64, **settings)
        plain, seen = type(policy).compress, {}

        @functools.wraps(plain)
        def compress(self, k, v, **options):
            seen.update(options)
            return plain(self, k, v, **options)

        with monkeypatch.context() as patch:
            patch.setattr(type(policy), "compress", compress)
            one_shot(policy, c.k[0], c.v[0], q, c.draft[0], 0, 4)
        return seen

    assert torch.equal(given("snapkv", window=16)["q_window"], q[:, :, -16:])
    assert torch.equal(given("h2o")["q"], q)
    assert torch.equal(given("tova")["q_last"], q[:, :, -1:])
    assert torch.equal(given("laq", steps=4)["q_lookahead"], c.draft[0][:, :, :4])
    assert given("laq")["q_window"] is None
    assert torch.equal(given("laq++")["q_window"], q[:, :, -8:])
    assert given("keydiff") == {"layer": 0, "num_layers": 4}


class Knowing(kvops.KeyPolicy):
    """A policy whose one-shot call needs what synthetic caches lack."""

    def compress(self, k, v, answer, **call):
        raise AssertionError("not called")


def test_a_policy_that_needs_more_is_unreachable():
    c = caches(1, layers=1)
    with pytest.raises(Unreachable, match="Knowing: synthetic caches have no answer, which compress needs"):
        one_shot(Knowing(64), c.k[0], c.v[0], c.q[0], c.draft[0], 0, 1)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(preset="none"), "preset must be one of distinctive, blocks"),
        (dict(overlap=1.5), r"overlap must be in \[0, 1\], got 1.5"),
        (dict(needles=2.0), "needles must be of type int, got 2.0"),
        (dict(heads=True), "heads must be of type int, got True"),
        (dict(redundant=1), "redundant must be of type bool, got 1"),
        (dict(dim=20), "dim must be a multiple of 8, got 20"),
        (dict(channels="much"), "channels must be of type float, got 'much'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(Refused, match=message):
        Synthetic(**options)


def test_a_prompt_must_hold_its_needles():
    check_context(CacheSettings(needles=64), 192)
    with pytest.raises(Refused, match="--context: expected at least 192 for these needles and distractors, got 191"):
        Synthetic(needles=64, run_length=1).prompts(None, 191, 1, 0)


def test_every_setting_is_an_option():
    assert [x.name for x in fields(Synthetic)] == ["preset", *(x.name for x in fields(CacheSettings))]
    assert all(x.default is None for x in fields(Synthetic)[1:])
    for name, settings in PRESETS.items():
        assert Synthetic(preset=name).settings == settings
        assert Synthetic(preset=name, overlap=0.5).settings == replace(settings, overlap=0.5)


#: A paper's method, the preset of its assumptions, one without them, and by how much it must lead.
REGIMES = [
    ("keydiff", "distinctive", "aligned"),
    ("laq", "response", "bad-draft"),
    ("protokv", "anchors", "scattered"),
    ("lagkv", "outliers", "run"),
    ("lacache", "ladder", "layers-apart"),
    ("snapkv", "window", "response"),
]


@pytest.mark.parametrize("method, holds, lacks", REGIMES)
def test_a_method_is_good_where_its_paper_says_so(method, holds, lacks):
    """On one prompt of the recorded size; the recorded run has the comparison of all methods."""
    good, bad, chance = (
        run(name, 205, 1, 2048, preset=preset)[0].scores["mass"][0]
        for name, preset in ((method, holds), (method, lacks), ("random", holds))
    )
    assert good > 0.6 and good > chance + 0.1 and bad < good - 0.3


def test_on_the_command_line(tmp_path, monkeypatch, capsys):
    """Without loading a model."""
    from kvops.eval import __main__ as command
    from kvops.eval import models

    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("a model was loaded"))
    out = ["--out", str(tmp_path / "out")]
    arguments = ["--tasks", "synthetic:preset=window,layers=2,draft=0.0", "Synthetic:preset=window,draft=0.9,layers=2"]
    arguments += ["--methods", "full", "keydiff", "snapkv", "laq", "--prompts", "7", "--budgets", "0.1", *out]
    assert command.main([*arguments, "--context", "1024"]) == 0
    shown = capsys.readouterr().out
    assert "synthetic:preset=window,layers=2,draft=0.0, context 1,024 tokens: mass, of 7 prompts" in shown
    record = json.loads((tmp_path / "out/summary.json").read_text())
    assert "model" not in record["settings"] and "text" not in record["settings"]
    rows = {(x["task"], x["method"]): x for x in record["rows"]}
    first, second = "synthetic:preset=window,layers=2,draft=0.0", "synthetic:preset=window,draft=0.9,layers=2"
    assert rows[first, "SnapKV"]["scores"] == rows[second, "SnapKV"]["scores"]
    assert rows[second, "LAQ"]["scores"]["mass"]["mean"] > rows[first, "LAQ"]["scores"]["mass"]["mean"]
    assert rows[first, "KeyDiff"]["compared"]["SnapKV"]["verdict"] == "worse"
    report = (tmp_path / "out/report.md").read_text()
    assert report.startswith("# Evaluation of synthetic caches\n")


def made_up(count: int, **other):
    """A summary with three methods on `count` tasks; each task has another best one."""
    from kvops.eval.summary import Estimate, Row, Summary, Traits

    tasks = [f"synthetic:preset={x}" for x in "abcde"[:count]]
    methods, rows = ("KeyDiff", "LAQ", "SnapKV"), []
    for i, task in enumerate(tasks):
        for j, method in enumerate(methods):
            row = Row(task, 1024, "once", method, 100, tokens=100, n=3)
            row.scores["mass"] = Estimate(0.9 if i % 3 == j else 0.1, None, None, 3)
            for name, value in other.items():
                setattr(row, name, value if i == j == 0 else getattr(row, name))
            rows.append(row)
    return Summary({}, [], rows, {x: Traits(("mass",), False, "higher") for x in tasks})


def test_overview_of_tasks(tmp_path):
    """Drawn for four tasks or more of one kind at one budget, and the same bytes each time."""
    plots = pytest.importorskip("kvops.eval.plots")
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    assert all(plots.overview(made_up(5), x) for x in files)
    assert files[0].read_bytes() == files[1].read_bytes() and len(files[0].read_bytes()) > 5000
    assert not plots.overview(made_up(3), tmp_path / "c.png")
    assert not plots.overview(made_up(5, budget=200, tokens=200), tmp_path / "c.png")
    assert not (tmp_path / "c.png").exists()
    assert plots.overview(made_up(5, tokens=300), tmp_path / "c.png")  # one cell is over its budget
    assert (tmp_path / "c.png").read_bytes() != files[0].read_bytes()
