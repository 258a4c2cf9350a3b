"""The methods that the evaluation knows by name, brought to a budget."""

import pytest
import torch

import kvops
from kvops.eval.methods import METHODS, Unreachable, lagkv_tokens, rule

LAYERS = 3


@pytest.mark.parametrize("budget", [64, 200])
@pytest.mark.parametrize("name", METHODS)
def test_what_is_kept_of_a_prompt(name, budget):
    """The budget, or, where a method cannot keep just so many, fewer; LaCache half a ladder more."""
    of = rule(name)
    method = of.method(budget if of.cuts else None, 600, LAYERS).fresh(LAYERS - 1, LAYERS)
    k, v = torch.randn(2, 1, 2, 600, 16)
    method.attend(torch.randn(1, 4, 600, 16), k, v)
    if name == "full" or isinstance(method, kvops.LAQ):
        assert len(method) == 600  # LAQ is cut by its draft
    elif name.startswith("lacache"):
        assert budget <= len(method) <= budget + 1
    elif isinstance(method, kvops.LagKV) and name != "lagkv-l2":
        kept, fixed = lagkv_tokens(600, budget, method.lag)
        assert len(method) == fixed + kept * (600 - fixed) // method.lag <= budget
        assert len(method) > 0.75 * budget
    elif name == "pyramidkv":
        assert len(method) < budget  # its last layer
    elif name != "lagkv-l2":
        assert len(method) == budget


def test_the_lag_that_is_chosen():
    """Half of the budget to be chosen, by the largest lag; where nothing could be chosen, most of it kept."""
    for n, budget, lag, m in ((2048, 1024, 256, 85), (2048, 256, 64, 4), (2048, 64, 32, 0), (4000, 128, 64, 0)):
        method = rule("lagkv").method(budget, n, LAYERS)
        assert (method.lag, int(method.ratio * method.lag)) == (lag, m)
    assert rule("lagkv:lag=128").method(1024, 2048, LAYERS).lag == 128
    with pytest.raises(Unreachable, match="of 1063 tokens are 39 with lag 16, over 32"):
        rule("lagkv").method(32, 1063, LAYERS)


def test_options():
    assert rule("keydiff:recent=0.1,sinks=4").method(64, 600, LAYERS).recent == 0.1
    assert rule("keydiff:recent=0.1,sinks=4").label == "KeyDiff recent=0.1 sinks=4"
    assert rule("protokv:score=softmax").method(64, 600, LAYERS).score == "softmax"
    assert rule("lacache").method(150, 600, LAYERS).span == 1
    assert rule("lacache").method(150, 600, LAYERS, streaming=True).task == "modeling"
    for spec, words in {
        "keydif": "method must be one of full, .*, got 'keydif'",
        "keydiff:budget=3": "KeyDiff has no option 'budget', expected some of sinks, recent",
        "keydiff:recent": "expected keydiff:option=value,option=value, got 'recent'",
        "keydiff:head_mode=all": "method 'keydiff:head_mode=all': KeyDiff: head_mode must be one of",
    }.items():
        with pytest.raises(ValueError, match=words):
            rule(spec)
    with pytest.raises(Unreachable, match="KeyDiff: budget .*64"):
        rule("keydiff:sinks=100").method(64, 600, LAYERS)
