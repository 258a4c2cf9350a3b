"""The methods of the evaluation by name, each at a budget."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvops
from kvops.eval.methods import METHODS, Unreachable, rule
from kvops.eval.results import CODE
from kvops.ops.lag import kept_within

LAYERS = 3


@pytest.mark.parametrize("budget", [64, 200])
@pytest.mark.parametrize("name", METHODS)
def test_what_is_kept_of_a_prompt(name, budget):
    """The budget, or fewer tokens if a method cannot meet it exactly; LaCache half a ladder more."""
    of = rule(name)
    policy = of.policy(budget if of.budgeted else None, 600, LAYERS)
    if isinstance(policy, kvops.CalibratedPolicy):  # the evaluation calls `kvops.hf.for_model`
        queries = [torch.randn(1, 4, 50, 16)] * LAYERS
        policy = replace(policy, statistics=kvops.QueryStatistics.of(queries, kvops.Rope.of(16)))
    if "w_o" in policy.needs.model:
        policy = replace(policy, w_o=torch.ones(8, 4 * 16))
    if isinstance(policy, kvops.KVzap):
        policy = replace(policy, gates=kvops.Gates([[torch.randn(2, 16), torch.randn(2)]] * LAYERS))
    cache = kvops.Cache(policy, layer=LAYERS - 1, num_layers=LAYERS)
    k, v = torch.randn(2, 1, 2, 600, 16)
    cache.attend(torch.randn(1, 4, 600, 16), k, v, inputs=kvops.LayerInputs(torch.randn(1, 600, 16)))
    if name == "full" or policy.needs.stage:
        assert len(cache) == 600  # LAQ and KVzip are cut in their stages
    elif name.startswith("lacache"):
        assert budget <= len(cache) <= budget + 1
    elif isinstance(policy, kvops.LagKV) and name != "lagkv-l2":
        kept, fixed = kept_within(600, 16, policy.lag, budget)
        assert len(cache) == fixed + kept * (600 - fixed) // policy.lag <= budget
        assert len(cache) > 0.75 * budget
    elif name == "pyramidkv":
        assert len(cache) < budget  # its last layer
    elif name != "lagkv-l2":
        assert len(cache) == budget


def test_the_lag_that_is_chosen():
    """The largest lag that leaves half of the budget for selection; if that is impossible, the lag that keeps most."""
    for n, budget, lag, m in ((2048, 1024, 256, 85), (2048, 256, 64, 4), (2048, 64, 32, 0), (4000, 128, 64, 0)):
        policy = rule("lagkv").policy(budget, n, LAYERS)
        assert (policy.lag, int(policy.ratio * policy.lag)) == (lag, m)
    assert rule("lagkv:lag=128").policy(1024, 2048, LAYERS).lag == 128
    with pytest.raises(Unreachable, match="expected at least 39 of 1063 tokens with lag 16, got 32"):
        rule("lagkv").policy(32, 1063, LAYERS)


def test_buffers_are_the_papers():
    """Eviction after every token, except for methods whose papers have a buffer."""
    assert [rule(x).policy(64, 600, LAYERS).buffer for x in ("keydiff", "h2o", "tova", "streamingllm")] == [1] * 4
    assert rule("protokv").policy(64, 600, LAYERS).buffer == kvops.ProtoKV(64).buffer == 128
    assert rule("satkv").policy(64, 600, LAYERS).buffer == kvops.SATKV(64).buffer == 128
    assert rule("keydiff:buffer=5").policy(64, 600, LAYERS).buffer == 5


def test_options():
    assert rule("keydiff:recent=0.1,sinks=4").policy(64, 600, LAYERS).recent == 0.1
    assert rule("keydiff:recent=0.1,sinks=4").label == "KeyDiff recent=0.1 sinks=4"
    assert rule("protokv:score=softmax").policy(64, 600, LAYERS).score == "softmax"
    assert rule("lacache").policy(150, 600, LAYERS).span == 1
    assert rule("lacache").policy(150, 600, LAYERS, streaming=True).task == "modeling"
    for spec, words in {
        "keydif": "method must be one of full, .*, got 'keydif'",
        "keydiff:budget=3": "KeyDiff has no option 'budget', expected some of sinks, head_mode, shares, buffer, recent",
        "keydiff:recent": "expected keydiff:option=value,option=value, got 'recent'",
        "keydiff:head_mode=all": "method 'keydiff:head_mode=all': KeyDiff: head_mode must be one of",
    }.items():
        with pytest.raises(ValueError, match=words):
            rule(spec)
    with pytest.raises(Unreachable, match="KeyDiff: budget .*64"):
        rule("keydiff:sinks=100").policy(64, 600, LAYERS)


# ---- a policy of one's own ----

VALUE_NORM = """\
from dataclasses import dataclass

from torch import Tensor

import kvops


@dataclass(frozen=True, eq=False)
class ValueNorm(kvops.KeyPolicy):
    \"\"\"Keeps the tokens with the largest values.

    order: of the norm.
    \"\"\"

    order: float = 2.0

    def scores(self, view: kvops.View) -> Tensor:
        return view.v.float().norm(self.order, dim=-1)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(VALUE_NORM)
    return path


@pytest.mark.parametrize("order", [1, 2])
def test_a_policy_of_ones_own_keeps_what_it_says(file, order):
    made = rule(f"{file}:ValueNorm:order={order},sinks=4")
    policy = made.policy(64, 600, LAYERS)
    assert made.label == f"ValueNorm order={order} sinks=4" and policy.budget == 64
    k, v = torch.randn(2, 1, 2, 600, 16)
    best = v[:, :, 4:].norm(order, dim=-1).topk(60).indices + 4
    kept = torch.cat((torch.arange(4).expand(1, 2, -1), best.sort().values), 2)
    assert torch.equal(policy.compress(k, v).indices, kept)
    cache = kvops.Cache(policy)
    cache.append(k, v)
    assert torch.equal(cache.positions, kept)


def tiny(out, *methods):
    return [
        *("--quick", "--methods", *methods, "--budgets", "64", "--context", "256", "--prompts", "1"),
        *("--tasks", "passkey:digits=4", "--points", "before", "--out", str(out)),
    ]


@pytest.mark.usefixtures("one_thread")
def test_a_policy_of_ones_own_is_evaluated(file, tmp_path, capsys):
    """It appears in every table and picture; a run does not continue results of its former code."""
    for name in ("transformers", "matplotlib", "tqdm"):
        pytest.importorskip(name)
    from kvops.eval.__main__ import main

    out, labels = tmp_path / "out", ["KeyDiff", "ValueNorm", "ValueNorm order=1"]
    said = tiny(out, f"{file}:ValueNorm:order=1", "keydiff", f"{file}:ValueNorm")
    assert main(said) == 0
    assert re.findall(r"^(KeyDiff|ValueNorm(?: order=1)?) +\d+\*?$", capsys.readouterr().out, re.M) == labels
    text = (out / "report.md").read_text()
    assert re.findall(r"^\| (KeyDiff|Val[^|]*) \|", text, re.M) == [*labels] * 3  # scores, differences, costs
    assert re.search(r"^- method ValueNorm: mine.py \([0-9a-f]{12}\)$", text, re.M)
    assert len(list(out.glob("accuracy-*.png"))) == 1
    rows = json.loads((out / "summary.json").read_text())["rows"]
    assert [(x["method"], x["tokens"]) for x in rows] == [(x, 64) for x in labels]
    assert main(said) == 0 and "3 of 3 cells were measured before" in capsys.readouterr().out
    file.write_text(VALUE_NORM.replace("2.0", "3.0"))
    assert main(said) == 2
    assert re.search(r"method ValueNorm was 'mine.py \(\w+\)' and is now 'mine.py", capsys.readouterr().err)
    assert main(tiny(out, "keydiff")) == 0  # which is as it was


def test_policies_that_are_refused(file, tmp_path, capsys):
    from kvops.eval.__main__ import arguments, make_parser

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.py").write_text(VALUE_NORM)
    file.write_text(VALUE_NORM + "\n\nclass KeyDiff(ValueNorm):\n    pass\n\n\nNUMBER = 3\n")
    for spec, words in {
        f"{file}:ValueNorms": "mine.py:ValueNorms': expected a class in a file or module that can be imported, got A",
        f"{tmp_path}/nowhere.py:ValueNorm": "nowhere.py:ValueNorm': expected a class .* got FileNotFoundError",
        f"{file}:NUMBER": "expected a subclass of kvops.Policy, got 3",
        f"{file}:ValueNorm:power=2": "ValueNorm has no option 'power', expected some of order, sinks",
        f"{file}:ValueNorm:order=x": "ValueNorm: order must be a float, got str 'x'",
        f"{file}:KeyDiff": "KeyDiff is the name of a kvops method in tables; rename the class",
    }.items():
        with pytest.raises(ValueError, match=words):
            rule(spec)
    same = rule("kvops:KeyDiff")
    assert same.entry.policy is kvops.KeyDiff and same.source is None and rule(f"{file}:ValueNorm").source == file
    with pytest.raises(SystemExit):
        arguments(tiny(tmp_path, f"{file}:ValueNorm", f"{tmp_path}/other/mine.py:ValueNorm"), make_parser(), rule)
    assert "other/mine.py:ValueNorm are both called ValueNorm in tables; name only one" in capsys.readouterr().err


# ---- settings that fix what is kept ----


def test_budgets_do_not_apply_to_settings_that_fix_what_is_kept():
    of = rule("lagkv:lag=64,ratio=0.125")
    assert not of.budgeted and not rule("full").budgeted and rule("lagkv:lag=64").budgeted and rule("snapkv").budgeted
    policy = of.policy(None, 600, LAYERS)
    assert (policy.lag, policy.ratio, policy.sinks) == (64, 0.125, 16)
    cache = kvops.Cache(policy)
    cache.append(*torch.randn(2, 1, 2, 600, 16))
    assert len(cache) == policy.held(600, 600) == 16 + 8 * 8 + 64 + (600 - 16) % 64


def test_the_draft_of_laq_by_options():
    policy = rule("laq:steps=32,stage1=keydiff,stage1_budget=40").policy(64, 600, LAYERS)
    assert policy.steps == 32 and policy.draft_policy(600, LAYERS) == kvops.KeyDiff(40, buffer=1)
    with pytest.raises(ValueError, match="LAQ: stage1 must be one of full, .*, got 'h3o'"):
        rule("laq:stage1=h3o")


# ---- bench/experiments/variants.py ----

VARIANTS = "bench/experiments/variants.py"


def evicted(name, q, layer=2, **settings):
    """The slots that a variant keeps of 100 tokens, for given queries of the prompt [1, 4, 100, 16]."""
    generator = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 1, 2, 100, 16, generator=generator)
    ahead = [torch.randn(1, heads, 4, 16, generator=generator) for heads in (4, 2, 2)]
    policy = rule(f"{Path(__file__).parents[2] / VARIANTS}:{name}").entry.policy(**settings)
    cache = kvops.Cache(policy, layer=layer, num_layers=LAYERS)
    cache.attend(q, k, v)
    draft = cache.draft()
    for i in range(4):
        draft.attend(*(x[:, :, i : i + 1] for x in ahead))
    cache.evict(draft)
    return cache.positions[0]


def test_each_half_of_laq_plus_plus():
    """One variant observes the local queries, the other keeps their tokens."""
    q = torch.randn(1, 4, 100, 16, generator=torch.Generator().manual_seed(0))
    other = torch.cat((q[:, :, :92], -q[:, :, 92:]), 2)  # other local queries
    options = {"budget": 20, "kernel_size": 1, "stage1": kvops.Full()}
    kept, again = (evicted("ProtectOnly", x, **options) for x in (q, other))
    assert torch.equal(kept, again) and torch.equal(kept[:, -8:], torch.arange(92, 100).expand(2, -1))
    kept, again = (evicted("ObserveOnly", x, **options) for x in (q, other))
    assert kept.shape == (2, 20) and not torch.equal(kept, again)
    assert not torch.equal(kept[:, -8:], torch.arange(92, 100).expand(2, -1))


def test_variants_with_budgets_by_layer():
    q = torch.randn(1, 4, 100, 16, generator=torch.Generator().manual_seed(0))
    lengths = [evicted("PyramidLAQ", q, layer, budget=20).shape[1] for layer in range(LAYERS)]
    assert lengths == kvops.pyramidkv_budgets(20, LAYERS, 100, window=0)
    policy = rule(f"{Path(__file__).parents[2] / VARIANTS}:PyramidProtoKV").entry.policy(40, window=8)
    found = []
    for layer in range(LAYERS):
        cache = kvops.Cache(policy, layer=layer, num_layers=LAYERS)
        cache.attend(q, *torch.randn(2, 1, 2, 100, 16))
        found.append(len(cache))
    assert found == kvops.pyramidkv_budgets(40, LAYERS, 100, window=8)


def test_a_run_is_not_continued_with_another_file(tmp_path):
    """The record has the fingerprints of files that are settings."""
    path = tmp_path / "gates"
    marks = []
    for i in range(2):
        kvops.Gates([[torch.full((2, 4), float(i)), torch.zeros(2)]]).save(path)
        marks.append(rule(f"kvzap:gates={path}").code)
    [(name, one)], [(same, other)] = (x.items() for x in marks)
    assert name == same == f"method KVzap gates={path}" and one != other and name.startswith(CODE)
    assert rule("keydiff").code == {}
