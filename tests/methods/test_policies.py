"""Every method is one policy: the tests walk the table of methods, and test shared behaviour once."""

import ast
import copy
import dataclasses
import importlib.metadata
import inspect
import math
import os
import re
import tempfile
import textwrap
import threading
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops.methods.registry import ENTRY_POINTS
from kvops.methods.table import FAMILIES
from kvops.methods.view import View
from test_protokv import best_clusters

pytestmark = kit.every_device

ROOT = Path(__file__).parents[2]
N, SINKS = 60, 3
#: Statistics of 4 layers, 4 query heads and 16 channels: paths, since equal settings have equal representations.
STATISTICS = [os.path.join(tempfile.mkdtemp(), f"{i}.safetensors") for i in range(2)]
for _i, _path in enumerate(STATISTICS):
    _queries = torch.randn(1, 4, 50, 16, generator=torch.Generator().manual_seed(_i)) + _i
    kvops.QueryStatistics.of([_queries] * 4, kvops.Rope.of(16)).save(_path)
#: Of 4 layers, 2 KV heads and 16 channels.
GATES = [kvops.Gates([[kit.randn(2, 16, seed=i + j), kit.randn(2)] for j in range(4)]) for i in range(2)]
#: Settings for 60 tokens: of a policy that is not here, a budget of 20.
CHOSEN = {
    kvops.Full: {},
    kvops.StreamingLLM: dict(budget=20, sinks=2, buffer=0.2),
    kvops.Random: dict(budget=20, seed=3),
    kvops.LagKV: dict(lag=8, ratio=0.5, sinks=3),
    kvops.LaCache: dict(budget=24, span=2, overlap=0, sinks=2),
    kvops.LAQ: dict(budget=20, steps=5),
    kvops.KVzip: dict(budget=20, sinks=2, w_o=torch.ones(24, 4 * 8).cumsum(0)),
    kvops.AttentionMatching: dict(budget=20, sinks=2, ridge=0.01),
    kvops.KVzap: dict(budget=20, sinks=2, recent=3, gates=GATES[0]),
    kvops.KeyDiff: dict(budget=20, sinks=2, refresh=30),
    kvops.ProtoKV: dict(budget=20, window=4, num_sats=4, num_chunks=6, buffer=5, alpha=2),
    kvops.SATKV: dict(budget=20, window=4, buffer=3),
    kvops.SnapKV: dict(budget=20, window=4, kernel_size=3),
    kvops.CriticalKV: dict(budget=20, window=4, w_o=torch.ones(24, 4 * 8).cumsum(0)),
    kvops.RKV: dict(budget=20, window=4, buffer=5),
    kvops.VaSE: dict(budget=20, window=4, buffer=5, kernel_size=3),
    kvops.PyramidKV: dict(budget=20, window=4, group_reduce="max"),
    kvops.ChunkKV: dict(budget=20, window=4, chunk=5),
    kvops.DefensiveKV: dict(budget=20, window=4, kernel_size=3, w_o=torch.ones(24, 4 * 8).cumsum(0)),
    kvops.H2O: dict(budget=20, recent=3),
    kvops.TOVA: dict(budget=20, buffer=3),
    kvops.ExpectedAttention: dict(budget=20, statistics=STATISTICS[0], sinks=2, epsilon=0.01),
    kvops.TriAttention: dict(budget=20, statistics=STATISTICS[0], recent=3, buffer=4),
    kvops.L2: dict(budget=20, recent=0.25, skip_layers=()),
}
SETTINGS = {x.policy: CHOSEN.get(x.policy, dict(budget=20)) for x in kvops.METHODS.values()}
#: By name.
POLICIES = {name: x.policy(**{**SETTINGS[x.policy], **x.defaults}) for name, x in kvops.METHODS.items()}
BASES = (
    kvops.BudgetPolicy,
    kvops.KeyPolicy,
    kvops.CalibratedPolicy,
    kvops.QueryPolicy,
    kvops.RepeatPolicy,
    kvops.WindowPolicy,
    kvops.ObservedPolicy,
)
every_class = pytest.mark.parametrize("cls", SETTINGS, ids=lambda x: x.__name__)
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def own_fields(cls):
    return [name for name in vars(cls).get("__annotations__", {}) if name in {x.name for x in fields(cls)}]


def function_of(cls):
    return getattr(kvops, f"{cls.__name__.lower()}_compress", None)


def inputs(seed=0, n=N):
    q, (k, v) = kit.randn(2, 4, n, 16, seed=seed + 1), kit.kv(2, 2, n, 16, dv=8, seed=seed)
    return q, k, v


def call_of(policy, q):
    """Return `compress`' arguments other than K and V: the queries and the layer."""
    if isinstance(policy, kvops.KVzip):
        given = dict(hidden_repeat=q[:, 0, :32]) if policy.plus else {}
        if policy.gradients:
            given = dict(gradients_repeat=q[:, 0, :32, 0].abs())
        return (q[:, :, :32] + 1,), dict(k_repeat=q[:, ::2, :32] - 1, **given)
    if isinstance(policy, kvops.AttentionMatching):
        return (q[:, :, :32] + 1,), {}
    if isinstance(policy, kvops.LAQ):
        return (q[:, :, :5] + 1,), dict(q_window=q[:, :, -policy.window :]) if policy.window else {}
    if isinstance(policy, kvops.KVzap):
        return (q[:, 0],), dict(layer=1, num_layers=4)
    by_layer = kvops.LaCache, kvops.PyramidKV, kvops.CalibratedPolicy
    layer = dict(layer=1, num_layers=4) if isinstance(policy, by_layer) else {}
    if isinstance(policy, kvops.H2O):
        return (q,), layer
    return ((q[:, :, -policy.window :],) if isinstance(policy, kvops.QueryPolicy) else ()), layer


# The table


def test_the_table_names_every_policy_that_is_exported():
    exported = {x for x in vars(kvops).values() if isinstance(x, type) and issubclass(x, kvops.Policy)}
    assert {x.policy for x in kvops.METHODS.values()} == exported - {kvops.Policy, *BASES} >= set(CHOSEN)
    labels = [x.label for x in kvops.METHODS.values()]
    assert len(set(labels)) == len(labels)
    assert all(re.fullmatch(r"[a-z0-9+-]+", name) for name in kvops.METHODS)


def test_bases_form_a_chain():
    """Each class has one base, so what a method inherits can be read from the bottom up."""
    for cls in SETTINGS:
        chain = [x for x in cls.__mro__ if issubclass(x, kvops.Policy)]
        assert all(x.__bases__ == (y,) for x, y in zip(chain, chain[1:])), cls
        assert chain[-1] is kvops.Policy and set(chain[1:-1]) <= set(BASES) and len(chain) <= 5, cls


@pytest.mark.parametrize("name", kvops.METHODS)
def test_every_room(name):
    entry = kvops.METHODS[name]
    cls = entry.policy
    assert cls.__name__ in kvops.__all__ and getattr(kvops, cls.__name__) is cls
    assert entry.family in FAMILIES and (entry.source or cls in (kvops.Full, kvops.Random))
    assert set(entry.defaults) <= {x.name for x in fields(cls)}
    if cls is kvops.Full:  # keeps the whole cache
        return
    page = ROOT / f"docs/methods/{cls.__name__.lower()}.md"
    assert page.is_file(), f"{cls.__name__} has no {page}"
    assert f"kvops.{cls.__name__}" in page.read_text(), f"{page} does not name the policy"
    assert f"(docs/methods/{page.name})" in (ROOT / "README.md").read_text(), f"README.md lacks {cls.__name__}"
    assert function_of(cls) is not None, f"{cls.__name__} has no function"


def code_lines(cls) -> int:
    """Count the lines of a class that are neither blank nor part of a docstring."""
    source = textwrap.dedent(inspect.getsource(cls))
    texts = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            texts |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return sum(bool(line.strip()) and i not in texts for i, line in enumerate(source.splitlines(), 1))


@pytest.mark.parametrize("cls", [*SETTINGS, *BASES], ids=lambda x: x.__name__)
def test_a_policy_is_a_small_frozen_dataclass_that_says_what_its_settings_are(cls):
    assert dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen
    assert 0 < code_lines(cls) <= 150
    attributes = inspect.getdoc(cls).partition("Attributes:")[2]
    missing = [name for name in own_fields(cls) if not re.search(rf"\b{name}\b", attributes)]
    assert not missing, f"the docstring of {cls.__name__} says nothing of {missing}"


# Functions


@pytest.mark.parametrize("cls", [x for x in SETTINGS if function_of(x)], ids=lambda x: x.__name__)
def test_a_functions_arguments_are_the_settings_and_those_of_compress(cls):
    parameters = dict(inspect.signature(function_of(cls)).parameters)
    call = list(inspect.signature(cls.compress).parameters.values())[1:]
    names = [cls.function_names.get(x.name, x.name) for x in fields(cls)]
    assert sorted(parameters) == sorted([*names, *(x.name for x in call)])
    positional = [x for x, y in zip(names, fields(cls)) if not y.kw_only]
    assert [x for x in parameters if parameters[x].kind == inspect.Parameter.POSITIONAL_OR_KEYWORD] == [
        *(x.name for x in call if x.kind == x.POSITIONAL_OR_KEYWORD),
        *positional,
    ]
    for name, setting in zip(names, fields(cls)):
        default = inspect.Parameter.empty if setting.default is dataclasses.MISSING else setting.default
        if name == "window" and "q_window" in parameters:
            default = None  # the rows of q_window
        assert parameters[name].default == default
        assert (parameters[name].kind == inspect.Parameter.KEYWORD_ONLY) == setting.kw_only
    for x in call:
        assert (parameters[x.name].kind, parameters[x.name].default) == (x.kind, x.default)
    if issubclass(cls, kvops.QueryPolicy):  # the queries have the same name everywhere
        assert list(parameters)[2] == call[2].name == cls.argument
    twin = getattr(kvops, f"{function_of(cls).__name__}_")
    expected = [x for x in parameters.values() if x.name != "out"]
    assert list(inspect.signature(twin).parameters.values()) == expected


@every_policy
def test_one_call_is_the_function_and_the_same_in_place(policy):
    q, k, v = inputs()
    queries, options = call_of(policy, q)
    want = policy.compress(k, v, *queries, **options)
    assert want.k.shape[2] < N or isinstance(policy, kvops.Full)
    slots = want.indices.unsqueeze(-1)
    rows = [x.gather(2, slots.expand(*slots.shape[:3], x.shape[3])) for x in (k, v)]
    fitted = isinstance(policy, kvops.AttentionMatching)  # its values are not those of the slots
    assert kit.same(want[: 2 - fitted], rows[: 2 - fitted])
    calls = [policy.compress_]
    if function := function_of(type(policy)):
        settings = {policy.function_names.get(x.name, x.name): getattr(policy, x.name) for x in fields(policy)}
        assert kit.same(function(k, v, *queries, **settings, **options), want)
        in_place = getattr(kvops, function.__name__ + "_")
        calls.append(lambda *args, **rest: in_place(*args, **settings, **rest))
    for call in calls:
        kk, vv = k.clone(), v.clone()
        kit.assert_in_place(lambda: call(kk, vv, *queries, **options)[:2], kk, vv, want[:2])  # noqa: B023
        assert torch.equal(call(k.clone(), v.clone(), *queries, **options).indices, want.indices)
        with pytest.raises(TypeError, match=r"_\(\) got an unexpected keyword argument 'out'"):
            call(kk, vv, *queries, **options, out=(kk, vv))
    out = torch.empty_like(want.k), torch.empty_like(want.v)
    assert policy.compress(k, v, *queries, **options, out=out).k is out[0] and kit.same(out, want[:2])


@pytest.mark.parametrize(
    "policy", [*POLICIES.values(), kvops.KeyDiff(20, anchor="pairwise")], ids=[*POLICIES, "keydiff, pairwise"]
)
def test_autocast_has_no_say(policy):
    q, k, v = inputs()
    queries, options = call_of(policy, q)
    want = policy.compress(k, v, *queries, **options)
    with torch.autocast(k.device.type, torch.bfloat16):
        assert kit.same(policy.compress(k, v, *queries, **options), want)


def test_an_unknown_argument_of_a_call_is_named():
    k = torch.randn(1, 1, 8, 4)
    with pytest.raises(TypeError, match=r"KeyDiff\.compress\(\) got an unexpected keyword argument 'start'"):
        kvops.KeyDiff(4).compress(k, k, start=0)
    for call in (kvops.keydiff_compress, kvops.keydiff_compress_):
        with pytest.raises(TypeError, match=rf"^{call.__name__}\(\) got an unexpected keyword argument 'start'"):
            call(k, k, 4, start=0)


# Settings


def test_copies_share_the_settings():
    """They never change, and some are a model's weights."""
    w_o = kit.randn(32, 64)
    policy = kvops.CriticalKV(64, window=16, w_o=w_o)
    cache = copy.deepcopy(kvops.Cache(policy))
    assert cache.policy is policy and cache.policy.w_o[0].data_ptr() == w_o.data_ptr()


@every_policy
def test_a_rule_that_reads_positions_declares_it(policy, monkeypatch):
    reads, positions = [], View.positions
    monkeypatch.setattr(View, "positions", lambda view: reads.append(view) or positions(view))
    q, k, v = inputs()
    queries, options = call_of(policy, q)
    policy.compress(k, v, *queries, **options)
    assert bool(reads) == isinstance(policy, (kvops.Random, kvops.VaSE))
    assert policy.needs.positions or not reads
    mine = type("Mine", (type(policy),), {})(**{x.name: getattr(policy, x.name) for x in fields(policy)})
    assert mine.needs == policy.needs._replace(positions=True), "a subclass may read them"


@every_policy
def test_settings_come_back_from_repr(policy):
    policy = replace(policy, **{x.name: x.default for x in fields(policy) if not x.repr})
    assert eval(repr(policy), vars(kvops)) == policy and f"{type(policy).__name__}(" in repr(policy)
    if not policy.needs.inputs:
        assert eval(repr(kvops.LAQ(20, stage1=policy)), vars(kvops)) == kvops.LAQ(20, stage1=policy)


SHARES = "shares.safetensors"
OTHER = {
    "head_mode": "shared",
    "metric": "dot",
    "anchor": "median",
    "reference": "self",
    "score": "softmax",
    "pooling": "avg",
    "group_reduce": "sum",
    "positions": "original",
    "pattern": "official",
    "compaction": "whole",
    "scope": "model",
    "task": "understanding",
    "clusters": "lsh",
    "cluster_reduce": "sum",
    "stage1": kvops.Full(),
    "statistics": STATISTICS[1],
    "gates": GATES[1],
    "kernel_size": 5,
    "skip_layers": (0,),
    "instruction": (7, 8),
    "next_instruction": (9,),
    "suffix": (3,),
    "template": (9,),
    "budget": 0.5,
    "ratio": 0.25,
    "protect": "prompt",
}


def changed(policy, name):
    """Return the policy with another value for one setting."""
    value = getattr(policy, name)
    if name in ("projection", "phase"):
        return replace(policy, projection=torch.ones(2, 16), phase=torch.ones(2))
    if name == "w_o":
        return replace(policy, w_o=value + 1)
    if name in ("plus", "gradients"):  # one of them at a time
        return replace(policy, plus=name == "plus" and not value, gradients=name == "gradients" and not value)
    if name == "scope":
        return replace(policy, head_mode="adaptive", scope="model")
    if name == "shares":
        return replace(policy, head_mode="adaptive", shares=SHARES)
    if name == "threshold" and isinstance(policy, kvops.KVzap):
        return replace(policy, head_mode="adaptive", threshold=-4.0)
    if name == "score" and isinstance(policy, kvops.DefensiveKV):
        return replace(policy, score="dot", stages=False)
    if name in OTHER:
        other = OTHER[name]
    elif isinstance(value, bool):
        other = not value
    else:
        other = value / 2 if isinstance(value, float) else (value or 0) + 1
    if name == "score":
        other = {"std": "l2", "softmax": "dot", "dot": "softmax", "drop": "dot"}.get(value, "std")
    elif other == value:
        other = {"shared": "per_head", "self": "lag", "official": "paper", "avg": "max"}[value]
    return replace(policy, **{name: other})


@every_policy
def test_equal_settings_are_equal(policy):
    cls = type(policy)
    twin = cls(**{x.name: getattr(policy, x.name) for x in fields(cls)})
    assert twin == policy and hash(twin) == hash(policy) and twin is not policy and len({twin, policy}) == 1
    equal_heads = isinstance(policy, (kvops.ProtoKV, kvops.PyramidKV))  # they have no shares
    others = {x.name: changed(policy, x.name) for x in fields(cls) if not (equal_heads and x.name == "shares")}
    shown = {x.name for x in fields(cls) if x.repr}
    for name, other in others.items():
        assert other != policy and (repr(other) != repr(policy)) == (name in shown), name
        again = changed(policy, name)
        assert other == again and hash(other) == hash(again), name
    assert policy != "policy" and policy != object()


def test_scores_that_are_added_up_have_one_reduction():
    @dataclass(frozen=True, eq=False)
    class Both(kvops.H2O):
        @property
        def reductions(self):
            return ("sum", "mean"), ("max", "max")

    with pytest.raises(ValueError, match="Both: caches add up the scores of one reduction .* got .*'max'"):
        Both(20)


def test_policies_of_different_classes_differ():
    assert kvops.SnapKV(64) != kvops.PyramidKV(64) and len({kvops.SnapKV(64), kvops.PyramidKV(64)}) == 2
    budget = kit.int32(1, 2, 3, 4).view(2, 2)
    one, same, other = (kvops.KeyDiff(x) for x in (budget, budget.clone(), budget + 1))
    assert one == same and hash(one) == hash(same) and one != other and one != kvops.KeyDiff(1) != one


@every_policy
def test_fields_cannot_be_assigned(policy):
    before = dict(vars(policy))
    for name in [*(x.name for x in fields(policy)), "scores", "anything"]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(policy, name, 1)
    assert vars(policy) == before


FLAG = [("unheard of", TypeError), (None, TypeError), (1, TypeError), (0.0, TypeError)]
WRONG = {
    "budget": [(0, ValueError), (1.5, ValueError), (-0.5, ValueError), (True, TypeError), ("20", TypeError)],
    "sinks": [(-1, ValueError), (1.0, TypeError), (True, TypeError)],
    "recent": [(-1, ValueError), (1.0, ValueError), ("3", TypeError)],
    "window": [(-1, ValueError), (2.0, TypeError)],
    "lag": [(0, ValueError), (8.0, TypeError)],
    "ratio": [(-0.1, ValueError), (1.1, ValueError), ("half", TypeError)],
    "seed": [(-1, ValueError), (0.5, TypeError)],
    "kappa": [(0, ValueError), (1025, ValueError)],
    "kernel_size": [(0, ValueError), (2, ValueError), (3.0, TypeError)],
    "refresh": [(0, ValueError), (1.5, TypeError)],
    "steps": [(0, ValueError)],
    "stage1": [("none", ValueError), ("laq", ValueError), (None, TypeError), (kvops.Full, TypeError)],
    "stage1_budget": [(0, ValueError), (1.5, TypeError)],
    "chunk": [(0, ValueError)],
    "previous": [(-1, ValueError), (1.0, TypeError)],
    "instruction": [([1, 2], TypeError), ("repeat", TypeError), ((-1,), ValueError), ((0.5,), TypeError)],
    "next_instruction": [(["x"], TypeError), ((1, True), TypeError)],
    "suffix": [("x", TypeError), ((-1,), ValueError)],
    "template": [([1], TypeError), ((1, -1), ValueError)],
    "num_sats": [(-1, ValueError)],
    "num_chunks": [(-1, ValueError)],
    "hash_bits": [(0, ValueError), (17, ValueError)],
    "buffer": [(0, ValueError), (1.5, ValueError), (True, TypeError), ("3", TypeError)],
    "alpha": [(0, ValueError)],
    "projection": [(torch.zeros(2, 16), ValueError)],
    "phase": [(torch.zeros(2), ValueError)],
    "skip_layers": [(0, TypeError), ([0, 1], TypeError)],
    "span": [("wide", TypeError)],
    "overlap": [("none", TypeError)],
    **{name: [("unheard of", ValueError), (None, ValueError)] for name, x in OTHER.items() if isinstance(x, str)},
    "protect": [("unheard of", ValueError), (True, ValueError)],
    "largest_values": [(-1, ValueError), (1.0, ValueError), ("3", TypeError)],
    "statistics": [(5, TypeError), (["a"], TypeError)],
    "future": [(0, ValueError), (1.5, TypeError)],
    "max_offset": [(0, ValueError), (1.5, TypeError)],
    "covariance": FLAG,
    "value_norm": FLAG,
    "normalize": FLAG,
    "merge": FLAG,
    "normalize_anchor": FLAG,
    "pool_first": FLAG,
    "compat_mask": FLAG,
    "whole_clusters": FLAG,
    "prior": [("1", TypeError), (True, TypeError), (math.nan, ValueError), (-0.5, ValueError)],
    "mix": [(-0.1, ValueError), (1.1, ValueError), ("half", TypeError)],
    "threshold": [(-0.1, ValueError), (math.nan, ValueError), ("half", TypeError)],
    "plus": FLAG,
    "gradients": FLAG,
    "queries": [(0, ValueError), (2.0, TypeError), (True, TypeError)],
    "max_bias": [(-0.1, ValueError), (31.0, ValueError), (math.inf, ValueError), ("3", TypeError)],
    "ridge": [(9e-5, ValueError), (math.nan, ValueError), (None, TypeError)],
    "gates": [(3, TypeError), ([torch.zeros(2, 3)], TypeError)],
    "stages": FLAG,
    "first_stage_mass": [(-0.1, ValueError), (1.1, ValueError), (None, TypeError)],
    "first_stage_ratio": [(-0.1, ValueError), (1.1, ValueError), (None, TypeError)],
    "epsilon": [(-0.1, ValueError), (math.inf, ValueError), (math.nan, ValueError), ("1", TypeError)],
    "w_o": [(torch.zeros(3), ValueError), ([torch.zeros(2, 3, 4)], ValueError), (3, TypeError), ([3], TypeError)],
    "shares": [(torch.ones(3), ValueError), (3, TypeError), ("a path without head_mode='adaptive'", ValueError)],
    "v_weight": [("1", TypeError), (None, TypeError), (True, TypeError), (math.nan, ValueError), (1e39, ValueError)],
}


@every_class
def test_wrong_settings_are_refused_on_construction(cls):
    for x in fields(cls):
        for wrong, error in WRONG[x.name]:
            with pytest.raises(error, match=rf"{cls.__name__}: .*\b{x.name}\b"):
                cls(**{**SETTINGS[cls], x.name: wrong})
    with pytest.raises(TypeError, match="unexpected keyword argument 'bugdet'"):
        cls(**SETTINGS[cls], bugdet=3)


def test_a_budget_has_to_hold_what_always_stays():
    for cls, settings in SETTINGS.items():
        if not issubclass(cls, kvops.BudgetPolicy):
            continue
        with pytest.raises(ValueError, match=rf"{cls.__name__}: budget must hold .* got 20"):
            cls(**{**settings, "budget": 20, "sinks": 21})
    with pytest.raises(ValueError, match=r"SnapKV: budget must hold sinks \+ recent, expected at least 17 \+ 4 .* 20"):
        kvops.SnapKV(20, 4, sinks=17)
    kvops.SnapKV(20, 4, sinks=16)


# Shared by all policies with scores: sinks, and budgets per head

#: Policies with scores per head.
SCORING = [
    kvops.KeyDiff(20),
    kvops.KeyDiff(20, recent=0.25, metric="dot"),
    kvops.L2(20, recent=2),
    kvops.Random(20, seed=2),
    kvops.SATKV(20, 4),
    kvops.SnapKV(20, 4),
    kvops.SnapKV(20, 4, pooling="avg", kernel_size=3, score="dot"),
    kvops.LAQ(20),
    kvops.LAQ(20, 4),
    kvops.H2O(20, recent=4),
    kvops.H2O(20),
    kvops.TOVA(20, head_mode="per_head"),
]
SPANS = [{}, dict(starts=(0, 9)), dict(starts=(6, 0), lengths=(50, 47))]
every_scoring = pytest.mark.parametrize("policy", SCORING, ids=repr)
with_spans = pytest.mark.parametrize("spans", SPANS, ids=["whole", "starts", "spans"])


def observed(policy, q, k, v, spans):
    """Return the view that the policy gets in one call."""
    view, (queries, options) = kvops.View(k, v, **spans), call_of(policy, q)
    if isinstance(policy, kvops.LAQ):
        policy.observe_draft(view, options.get("q_window"), *queries, None, None, {})
    elif isinstance(policy, kvops.QueryPolicy):
        policy.observe(view, *queries, None, {})
    return view


def bounds(spans, row):
    """Return a row's first valid slot, and one past its last."""
    first = int(spans["starts"][row]) if "starts" in spans else 0
    return first, first + int(spans["lengths"][row]) if "lengths" in spans else N


def best(scores, first, end, budget, sinks, newest):
    """Return one head's kept slots, by definition."""
    slots = list(range(first, end))
    if len(slots) <= budget:
        return slots
    always = {*slots[:sinks], *slots[len(slots) - newest :]}
    others = sorted(set(slots) - always, key=lambda j: (-scores[j], j))
    return sorted([*always, *others[: budget - len(always)]])


def protected(policy, view, budget):
    """Return how many newest tokens are always kept within a head's budget."""
    observed = isinstance(policy, kvops.QueryPolicy) and not isinstance(policy, kvops.H2O)
    return view.window if observed else policy.newest(budget)


def kept(result):
    return [[[i for i in head if i >= 0] for head in row] for row in result.indices.tolist()]


@every_scoring
@with_spans
@pytest.mark.parametrize("sinks", [0, SINKS])
@pytest.mark.parametrize("budgets", [(20, 20, 20, 20), (20, 12, 17, 45)], ids=str)
def test_sinks_and_budgets_per_head(policy, spans, sinks, budgets):
    q, k, v = inputs(5)
    spans = {name: kit.int32(*x) for name, x in spans.items()}
    if isinstance(policy, kvops.H2O):  # all rows see the first tokens: kept even without sinks
        q += 1
        for b in range(2):
            k[b, :, bounds(spans, b)[0] :][:, :SINKS] = -3.0
    tensor = kit.int32(*budgets).view(2, 2)
    queries, options = call_of(policy, q)
    result = replace(policy, budget=tensor, sinks=sinks).compress(k, v, *queries, **options, **spans)
    view = observed(policy, q, k, v, spans)
    scores = policy.scores(view).tolist()
    want = [
        [
            best(scores[b][h], *bounds(spans, b), keep, sinks, protected(policy, view, keep))
            for h, keep in enumerate(tensor[b].tolist())
        ]
        for b in range(2)
    ]
    assert kept(result) == want and result.indices.shape == (2, 2, max(budgets))
    ends = (result.indices < 0).int()
    assert torch.equal(ends, ends.cummax(-1).values)  # padding of shorter heads comes last
    assert (result.k[ends.bool()] == 0).all() and (result.v[ends.bool()] == 0).all()
    if len({*budgets}) == 1:
        plain = replace(policy, sinks=sinks).compress(k, v, *queries, **options, **spans)
        assert kit.same(result, plain)
    if sinks:
        none = replace(policy, budget=tensor).compress(k, v, *queries, **options, **spans)
        assert not torch.equal(none.indices, result.indices)


@with_spans
@pytest.mark.parametrize("budgets", [(20, 20, 20, 20), (20, 12, 17, 45)], ids=str)
def test_sinks_are_in_no_cluster(spans, budgets):
    q, k, v = inputs(5)
    spans = {name: kit.int32(*x) for name, x in spans.items()}
    policy = kvops.ProtoKV(kit.int32(*budgets).view(2, 2), 4, num_sats=4, num_chunks=6, sinks=SINKS)
    result = policy.compress(k, v, q[:, :, -4:], **spans)
    view, clear = observed(policy, q, k, v, spans), 0
    firsts = [bounds(spans, b)[0] + SINKS for b in range(2)]
    widths = [bounds(spans, b)[1] - 4 - firsts[b] for b in range(2)]
    assignment = policy.assign(view, kit.int32(*firsts), kit.int32(*widths)).cpu().numpy()
    for b in range(2):
        slots = slice(firsts[b], firsts[b] + widths[b])
        for h in range(2):
            token = view.observed[b, h, slots].double().cpu().numpy()
            chosen, gap = best_clusters(token, assignment[b, h, slots], budgets[2 * b + h] - 4 - SINKS)
            if gap > 1e-5:
                clear += 1
                want = [*range(firsts[b] - SINKS, firsts[b]), *(int(i) + firsts[b] for i in chosen)]
                assert kept(result)[b][h] == [*want, *range(slots.stop, slots.stop + 4)]
    assert clear >= 3


@pytest.mark.parametrize("policy", [POLICIES[x] for x in ("streamingllm", "pyramidkv", "chunkkv", "tova")], ids=repr)
@with_spans
def test_sinks_of_policies_with_one_score_or_layers_that_share(policy, spans):
    q, k, v = inputs(5)
    spans = {name: kit.int32(*x) for name, x in spans.items()}
    queries, options = call_of(policy, q)
    result = replace(policy, sinks=7).compress(k, v, *queries, **options, **spans)
    none = replace(policy, sinks=0).compress(k, v, *queries, **options, **spans)
    assert result.indices.shape == none.indices.shape and torch.equal(result.lengths, none.lengths)
    assert kept(none) != kept(result)
    for b in range(2):
        first, end = bounds(spans, b)
        for h in range(2):
            slots = kept(result)[b][h]
            assert slots[:7] == list(range(first, first + 7)) and slots[-1] == end - 1
            # the rest of the budget goes to the best other tokens, which are also among the best without sinks
            assert {*slots[7:]} <= {*kept(none)[b][h]}


@pytest.mark.parametrize("mode", ["per_head", "shared"])
@every_policy
def test_heads_alone_keep_what_they_keep_beside_others(policy, mode):
    if hasattr(policy, "head_mode"):
        policy = replace(policy, head_mode=mode)
    elif mode == "shared":
        return
    q, k, v = inputs(7)
    if isinstance(policy, kvops.KVzap):  # its gates are those of all heads
        assert not policy.heads_alone
        return
    queries, options = call_of(policy, q)
    together = kept(policy.compress(k, v, *queries, **options))

    def alone(h):
        def of(x):
            return x[:, 2 * h : 2 * h + 2] if isinstance(x, torch.Tensor) else x

        own = {name: x[:, h : h + 1] if name == "k_repeat" else of(x) for name, x in options.items()}
        own |= {name: x for name, x in options.items() if name.startswith(("hidden", "gradients"))}  # the same for all
        mine = policy if policy.w_o is None else replace(policy, w_o=policy.w_o[:, 16 * h : 16 * h + 16])
        return kept(mine.compress(k[:, h : h + 1], v[:, h : h + 1], *map(of, queries), **own))

    same = [[row[h] for row in together] == [row[0] for row in alone(h)] for h in range(2)]
    if policy.heads_alone:
        assert all(same)
    elif not isinstance(policy, kvops.StreamingLLM):  # it has one score for all heads in every mode
        assert not all(same)


def test_heads_with_one_score_have_one_budget():
    q, k, v = inputs()
    budget = torch.full((2, 2), 20, dtype=torch.int32)
    for policy in (kvops.StreamingLLM(budget), kvops.ChunkKV(budget, 4)):
        queries, options = call_of(policy, q)
        with kit.refuses(
            f"{policy.name}: budget must have one entry per row and head", r"expected \[2, 1\], got \[2, 2\]"
        ):
            policy.compress(k, v, *queries, **options)
    with kit.refuses("PyramidKV: layers share the budget", "as an int or a float .* got a budget per head"):
        kvops.PyramidKV(budget, 4)
    with kit.refuses("KeyDiff: a budget per head needs head_mode='per_head', got head_mode='shared'"):
        kvops.KeyDiff(budget, head_mode="shared")


def budgets_by_hand(policy, scores, spans, sinks, newest):
    """Split the layer's budget by the scores of the tokens that are not always kept, per row: int32 [b, Hk]."""
    rows = []
    for b in range(2):
        first, end = bounds(spans, b)
        alone = scores[b : b + 1, :, first + sinks : end].contiguous()
        rows.append(kvops.head_budgets(alone, policy.budget - sinks, newest) + sinks)
    return torch.cat(rows)


@every_scoring
@with_spans
@pytest.mark.parametrize("sinks", [0, SINKS])
def test_adaptive_heads_share_the_layers_budget(policy, spans, sinks):
    """Two heads keep twice the budget of a head, split as computed by hand."""
    q, k, v = inputs(4)
    k[:, 0] *= 1.5
    spans = {name: kit.int32(*x) for name, x in spans.items()}
    queries, options = call_of(policy, q)
    view = observed(policy, q, k, v, spans)
    scores = policy.scores(view)
    budgets = budgets_by_hand(policy, scores, spans, sinks, protected(policy, view, policy.budget))
    assert (budgets.sum(1) == 2 * 20).all() and (budgets != 20).any()
    got = replace(policy, head_mode="adaptive", sinks=sinks).compress(k, v, *queries, **options, **spans)
    want = replace(policy, budget=budgets, sinks=sinks).compress(k, v, *queries, **options, **spans)
    assert kit.same(got, want)
    assert torch.equal((got.indices >= 0).sum(2, dtype=torch.int32), budgets)
    assert ((got.indices >= 0).sum((1, 2)) == 2 * 20).all()
    assert torch.equal(got.lengths, budgets.max(1).values)


def test_adaptive_heads_of_a_fraction():
    q, k, v = inputs(5)
    for policy in (kvops.SnapKV(0.4, 4), kvops.TOVA(0.4)):
        queries, _ = call_of(policy, q)
        view = observed(policy, q, k, v, {})
        if isinstance(policy, kvops.SnapKV):
            with kit.refuses(r"SnapKV: head_mode='adaptive' with sinks or recent needs a budget in tokens, got 0.4"):
                replace(policy, head_mode="adaptive").compress(k, v, *queries)
            continue
        with kit.refuses("TOVA: head_mode='adaptive' with sinks or recent needs a budget in tokens, got 0.4"):
            replace(policy, head_mode="adaptive").compress(k, v, *queries)
    view = kvops.View(k, v)
    policy = kvops.KeyDiff(0.4)
    budgets = kvops.head_budgets(policy.scores(view), 0.4)
    got = replace(policy, head_mode="adaptive").compress(k, v)
    assert kit.same(got, replace(policy, budget=budgets).compress(k, v))
    assert ((got.indices >= 0).sum((1, 2)) == 2 * 24).all()


def test_adaptive_heads_need_scores_of_their_own():
    q, k, v = inputs()
    for policy in (kvops.StreamingLLM(20, head_mode="adaptive"), kvops.ChunkKV(20, 4, head_mode="adaptive")):
        queries, options = call_of(policy, q)
        with kit.refuses(f"{policy.name}: head_mode='adaptive' needs scores of each head, got one for all heads"):
            policy.compress(k, v, *queries, **options)
    with kit.refuses("ProtoKV: head_mode must not be 'adaptive'", "pass a budget from kvops.head_budgets"):
        kvops.ProtoKV(20, 4, head_mode="adaptive")
    with kit.refuses("PyramidKV: layers share the budget", "or 'shared', got head_mode='adaptive'"):
        kvops.PyramidKV(20, 4, head_mode="adaptive")


@every_scoring
def test_caches_with_budgets_per_head(policy):
    """A cache shares its budget among its heads, if the policy's scores allow it, and takes no other shares."""
    kvops.Cache(policy)
    with kit.refuses(f"{policy.name}: a cache expects budget as an int or a float", "got a budget per head"):
        kvops.Cache(replace(policy, budget=kit.int32(20, 20).view(1, 2)))
    adaptive = replace(policy, head_mode="adaptive")
    if isinstance(policy, (kvops.H2O, kvops.TOVA)):
        why = (
            "its rule makes .'scores',. in `evict`"
            if isinstance(policy, kvops.H2O)
            else "one set of tokens for all heads"
        )
        with kit.refuses(f"{policy.name}: a cache does not support head_mode='adaptive'", why):
            kvops.Cache(adaptive)
        return
    kvops.Cache(adaptive)
    if "protect" in {x.name for x in fields(policy)}:
        with kit.refuses(f"{policy.name}: ", "because protect='prompt' needs"):
            kvops.Cache(replace(adaptive, protect="prompt"))


# By name


@pytest.mark.parametrize("name", kvops.METHODS)
def test_policies_by_name(name):
    entry = kvops.METHODS[name]
    settings = {x: y for x, y in SETTINGS[entry.policy].items() if x not in entry.defaults}
    assert kvops.policy(name, **settings) == POLICIES[name]
    rest = {x: y for x, y in settings.items() if "," in str(y) or y == () or x == "gates"}
    text = ",".join(f"{x}={y}" for x, y in settings.items() if x not in rest)
    assert kvops.policy(f"{name}:{text}", **rest) == POLICIES[name]


def test_options_in_text_are_settings():
    assert kvops.policy("keydiff:recent=0.1,metric=dot", budget=64) == kvops.KeyDiff(64, recent=0.1, metric="dot")
    assert kvops.policy("keydiff-window:recent=3", budget=64) == kvops.KeyDiff(64, recent=3)
    assert kvops.policy("keydiff-window", budget=64, recent=4) == kvops.KeyDiff(64, recent=4)
    assert kvops.policy("keydiff:budget=64", budget=32) == kvops.KeyDiff(32)
    assert kvops.policy("snapkv:pool_first=True", budget=64).pool_first is True
    assert kvops.policy("protokv:buffer=None", budget=64).buffer is None


# Policies of one's own


@dataclass(frozen=True, eq=False)
class Newest(kvops.BudgetPolicy):
    """Scores by slot, and declares no setting."""

    def scores(self, view):
        return torch.arange(view.n, dtype=torch.float32).expand(view.rows, 1, -1)


@dataclass(frozen=True, eq=False)
class NewestInDecode(Newest):
    _: KW_ONLY
    buffer: int = 4


@dataclass(frozen=True, eq=False)
class WindowInDecode(kvops.WindowPolicy):
    needs = kvops.Needs(dense=False)
    _: KW_ONLY
    buffer: int = 4


@pytest.mark.parametrize(
    "policy, buffer", [(Newest(12), 100), (NewestInDecode(12), 4), (WindowInDecode(12, 4), 4)], ids=lambda x: repr(x)
)
def test_decode_evicts_if_the_class_has_a_buffer(policy, buffer):
    """As long as `held` says."""
    cache = kvops.Cache(policy)
    for n in (20, *range(21, 35)):
        new = n - cache.seen
        cache.attend(kit.randn(1, 4, new, 16, seed=n), *kit.kv(1, 2, new, 16, seed=n))
        assert len(cache) == policy.held(n, 20) == 12 + (n - 20) % buffer


def test_observing_needs_a_window_or_rows():
    class Nothing(kvops.QueryPolicy):
        pass

    with pytest.raises(NotImplementedError):
        kvops.Cache(Nothing(12)).attend(kit.randn(1, 4, 20, 16), *kit.kv(1, 2, 20, 16))


@pytest.mark.parametrize("base", [kvops.H2O, kvops.KeyDiff, kvops.LAQ])
def test_a_class_changes_one_of_its_bases_needs(base):
    @dataclass(frozen=True, eq=False, slots=True)
    class Mine(base):
        @property
        def needs(self):
            return super(Mine, self).needs._replace(positions=True)

    @dataclass(frozen=True, eq=False, slots=True)
    class Plain(base):
        pass

    assert Mine(12).needs == Plain(12).needs == base(12).needs._replace(positions=True) != base(12).needs
    assert type(kvops.Cache(Plain(12))) is type(kvops.Cache(base(12)))


def test_merging_refuses_pages():
    """Whatever the rule itself reads."""

    @dataclass(frozen=True, eq=False)
    class Merging(kvops.KeyPolicy):
        needs = kvops.Needs(dense=False)
        _: KW_ONLY
        merge: bool = True

    pages = dict(block_table=kit.int32(0)[:, None], lengths=kit.int32(16))
    with pytest.raises(ValueError, match="takes no pages"):
        Merging(4).compress(*kit.kv(1, 2, 16, 16), **pages)
    with pytest.raises(ValueError, match="takes pages"):
        kvops.PagedCache(Merging(4), 8, num_layers=1, kv_heads=2, head_dim=16)


MINE = """
from dataclasses import KW_ONLY, dataclass

import kvops

number = 3


@dataclass(frozen=True, eq=False)
class ValueNorm(kvops.KeyPolicy):
    _: KW_ONLY
    power: float = 1.0

    def scores(self, view):
        return view.v.float().norm(dim=-1) ** self.power
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder on the import path that contains value_norm.py."""
    (tmp_path / "value_norm.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path


@pytest.fixture
def installed(monkeypatch):
    """Set the entry points that packages install in the group."""

    def install(**values):
        points = [importlib.metadata.EntryPoint(name, value, ENTRY_POINTS) for name, value in values.items()]

        def entry_points(**select):
            return importlib.metadata.EntryPoints(points).select(**select)

        monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)

    return install


def test_anyones_policy_by_name(folder, installed):
    installed(**{"value-norm": "value_norm:ValueNorm", "keydiff": "value_norm:ValueNorm"})
    _, k, v = inputs()
    want = v.norm(dim=-1).topk(20).indices.sort().values
    for name in (f"{folder}/value_norm.py:ValueNorm", "value_norm:ValueNorm", "value-norm"):
        policy = kvops.policy(name, allow_code=True, budget=20)
        assert type(policy).__name__ == "ValueNorm" and (policy.budget, policy.power) == (20, 1.0)
        assert torch.equal(policy.compress(k, v).indices, want)
        cache = kvops.Cache(policy)
        cache.append(k, v)
        assert torch.equal(cache.positions, want)
        power = kvops.policy(f"{name}:power=2.0,sinks=3", allow_code=True, budget=20)
        assert (power.power, power.sinks) == (2.0, 3) and power.compress(k, v).indices[..., :3].unique().tolist() == [
            0,
            1,
            2,
        ]
    assert isinstance(kvops.policy("keydiff", budget=20), kvops.KeyDiff)  # built-in policies take precedence
    assert type(kvops.policy("kvops.methods.keydiff:KeyDiff", allow_code=True, budget=20)) is kvops.KeyDiff
    assert type(kvops.policy("value-norm", budget=20)).__name__ == "ValueNorm"  # installed: no need to allow it


def test_a_string_runs_no_code(folder):
    """Unless the caller allows it, and then only after its options have been parsed."""
    (folder / "effect.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    for spec in (f"{folder}/effect.py:X", "effect:X", "effect:X:budget=20", "os:system"):
        with pytest.raises(ValueError, match=rf"method '{spec}' names a file or module, .* allow_code=True"):
            kvops.policy(spec)
    for spec in (f"{folder}/effect.py:X:budget", "effect:X:budget=1,budget=2"):
        with pytest.raises(ValueError, match="expected"):
            kvops.policy(spec, allow_code=True)
    assert not (folder / "ran").exists()
    with pytest.raises(ValueError, match="expected a class in a file or module .* got AttributeError"):
        kvops.policy("effect:X", allow_code=True)
    assert (folder / "ran").exists()


def test_names_that_are_none(folder, installed):
    installed(**{"value-norm": "value_norm:ValueNorm", "number": "value_norm:number"})
    (folder / "broken.py").write_text("1 / 0")
    path = f"{folder}/value_norm.py"
    for spec, message in {
        "keydif": "method must be one of full, .*, l2, number, value-norm, path/to/file.py:Class, or module:Class, "
        "got 'keydif'",
        "": "method must be one of full, .*, got ''",
        "number": "method 'number': expected a subclass of kvops.Policy, got 3",
        f"{path}:number": "method '.*value_norm.py:number': expected a subclass of kvops.Policy, got 3",
        "kvops:Cache": "method 'kvops:Cache': expected a subclass of kvops.Policy, got <class 'kvops.cache",
        "builtins:print": "method 'builtins:print': expected a subclass of kvops.Policy, got <built-in",
        f"{path}:Missing": "method '.*value_norm.py:Missing': expected a class .* got AttributeError: .*Missing",
        f"{folder}/nowhere.py:ValueNorm": r"method '.*nowhere.py:ValueNorm': expected .* got FileNotFoundError: ",
        f"{folder}/broken.py:ValueNorm": "method '.*broken.py:ValueNorm': expected .* got ZeroDivisionError: ",
        "nowhere_at_all:ValueNorm": "method 'nowhere_at_all:ValueNorm': expected .* got ModuleNotFoundError: ",
        "keydiff:recent": "method 'keydiff:recent': expected keydiff:option=value,option=value, got 'recent'",
        "keydiff:recent=1,recent=2": "method 'keydiff:recent=1,recent=2': expected each option once, got recent twice",
        "keydiff:recent=-1": "KeyDiff: recent must be at least 0 tokens, got -1",
        f"{path}:ValueNorm:power": r"method '.*:ValueNorm:power': expected .*:option=value,option=value, got 'power'",
    }.items():
        with kit.refuses(message):
            kvops.policy(spec, allow_code=True, budget=20)
    with kit.refuses("method must be one of full, .*, l2, number, value-norm, got 'keydif'; did you mean 'keydiff'"):
        kvops.policy("keydif", budget=20)
    with kit.refuses("method must be a string, got int 20", kind=TypeError):
        kvops.policy(20)
    with pytest.raises(TypeError, match="method 'keydiff' has no setting 'lag', only budget"):
        kvops.policy("keydiff", budget=20, lag=3)
    with pytest.raises(TypeError, match="budget"):
        kvops.policy("keydiff")


def takers() -> dict[str, Callable]:
    """Everything that takes a policy, besides kvops.hf: the policy that it uses."""
    pages = dict(num_layers=1, kv_heads=1, head_dim=8)
    return {
        "Cache": lambda x: kvops.Cache(x).policy,
        "PagedCache": lambda x: kvops.PagedCache(x, 4, **pages).policy,
        "LAQ": lambda x: kvops.LAQ(20, stage1=x).stage1,
    }


@pytest.mark.parametrize("who", takers())
def test_a_string_names_a_policy(who):
    make = takers()[who]
    assert make("keydiff:budget=64") == kvops.KeyDiff(64) == make(kvops.KeyDiff(64))
    assert make("SnapKV:budget=64,window=8") == kvops.SnapKV(64, window=8)
    for wrong, kind, message in (
        ("keydif:budget=64", ValueError, r"method must be one of .*, got 'keydif:budget=64'; did you mean 'keydiff'\?"),
        (
            "keydiff:sinks=4",
            TypeError,
            "method 'keydiff' needs budget, got 'keydiff:sinks=4'; write .*'keydiff:budget=",
        ),
        ("keydiff:budget=0", ValueError, "KeyDiff: budget must be at least 1 token, got 0"),
        ("keydiff:budget", ValueError, "expected keydiff:option=value,option=value, got 'budget'"),
        ("kvops.methods.keydiff:KeyDiff", ValueError, "names a file or module, whose code would run"),
    ):
        with pytest.raises(kind, match=f"^{who}: .*{message}"):
            make(wrong)


def test_a_name_without_settings():
    assert kvops.Cache("lagkv").policy == kvops.LagKV() and kvops.Cache("full").policy == kvops.Full()
    assert type(kvops.Cache("snapkv:budget=64")) is type(kvops.Cache(kvops.SnapKV(64))) is not kvops.Cache
    with pytest.raises(
        TypeError, match="^Cache: method 'protokv' needs budget, got 'protokv'; .*'protokv:budget=1024'"
    ):
        kvops.Cache("protokv")
    with pytest.raises(TypeError, match="^method 'random' needs budget, got 'random'"):
        kvops.policy("random", seed=3)


# No state


def step(cache, q, k, v, first, last):
    q, k, v = (x[:, :, first:last] for x in (q, k, v))
    return cache.attend(q, k, v, inputs=kvops.LayerInputs(q[:, 0]))


def answer(policy, seed):
    """Return the slots kept by a cache after a prompt and 30 tokens, and by one call."""
    q, k, v = inputs(seed, 90)
    cache = kvops.Cache(policy, layer=2, num_layers=4)
    out = [step(cache, q, k, v, 0, N)]
    if isinstance(policy, kvops.LAQ):
        draft = cache.draft()
        out += [step(draft, q, k, v, i, i + 1) for i in range(N, N + 5)]
        cache.evict(draft)
    out += [step(cache, q, k, v, i, i + 1) for i in range(N, 90)]
    queries, options = call_of(policy, q)
    return [cache.positions, cache.k, cache.v, *out, *policy.compress(k, v, *queries, **options)]


@every_policy
def test_one_policy_serves_caches_in_several_threads(policy):
    """A policy has no state: caches in several threads give the results they give alone."""
    settings = dict(vars(policy))
    fresh = [replace(policy) for _ in range(4)]
    alone = [answer(x, seed) for seed, x in enumerate(fresh)]
    assert not torch.equal(alone[0][1], alone[1][1])
    found, device = {}, torch.get_default_device()

    def work(seed):
        with torch.device(device):  # the default device is per thread
            found[seed] = [answer(policy, seed) for _ in range(2)]

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for x in workers:
        x.start()
    for x in workers:
        x.join()
    assert len(found) == 4
    for seed, results in found.items():
        assert all(kit.same(result, alone[seed]) for result in results)
    assert vars(policy) == settings and all(vars(policy)[name] is x for name, x in settings.items())


@every_policy
def test_caches_of_one_policy_take_turns(policy):
    """Two caches of one policy alternate step by step."""
    both = [inputs(seed, 90) for seed in range(2)]
    caches, twins = ([kvops.Cache(p, layer=2, num_layers=4) for p in (policy, x)] for x in (policy, replace(policy)))
    for first, last in ((0, N), *((i, i + 1) for i in range(N, 90))):
        for cache, x in zip(caches, both):
            step(cache, *x, first, last)
    for twin, x in zip(twins, both):
        for first, last in ((0, N), *((i, i + 1) for i in range(N, 90))):
            step(twin, *x, first, last)
    for cache, twin in zip(caches, twins):
        assert kit.same((cache.k, cache.v, cache.positions), (twin.k, twin.v, twin.positions))


@given(
    st.lists(st.floats(0, 8), min_size=1, max_size=6),
    st.integers(1, 60),
    st.integers(1, 60),
    st.integers(0, 9),
    st.integers(0, 99),
)
@kit.examples(60)
def test_layers_share_a_budget_by_entropy(sharpness, n, budget, window, seed):
    """Compared with the formula in plain Python; sums, bounds, padding."""
    window = min(window, budget)
    scores = [kit.randn(2, 3, n, seed=seed + i).mul(x).softmax(-1) for i, x in enumerate(sharpness)]
    lengths = [n, max(0, n - 7)]
    got = kvops.entropy_budgets(scores, budget, window, lengths=kit.int32(*lengths))
    assert got.dtype == torch.int32 and got.shape == (len(scores), 2)
    for row, length in enumerate(lengths):
        prefix, entropies = max(0, length - window), []
        for x in scores:
            p = x[row, :, :prefix].double()
            p = p / p.sum(-1, keepdim=True)
            entropies.append(float(-(p * p.log()).nan_to_num(0).sum(-1).mean()) if prefix else 0.0)
        share, total = {}, len(scores) * min(budget - window, prefix)
        while True:  # layers that keep all tokens leave the rest of the budget to the others
            left = [i for i in range(len(scores)) if i not in share]
            weight = sum(entropies[i] for i in left)
            ideal = {
                i: (total - sum(share.values())) * (entropies[i] / weight if weight > 0 else 1 / len(left))
                for i in left
            }
            if not (full := [i for i in left if ideal[i] >= prefix]):
                break
            share |= dict.fromkeys(full, prefix)
        share |= ideal
        kept = got[:, row] - min(window, length)
        assert int(kept.sum()) == total and all(0 <= x <= prefix for x in kept.tolist())
        assert all(abs(x - share[i]) < 1 + 1e-6 for i, x in enumerate(kept.tolist()))
    if n > 20:
        alone = kvops.entropy_budgets([x[1:, :, : lengths[1]] for x in scores], budget, window)
        assert torch.equal(alone[:, 0], got[:, 1])


def test_budgets_by_entropy():
    flat, sharp = torch.ones(1, 2, 100), torch.zeros(1, 2, 100)
    sharp[..., 7] = 1.0
    half = flat * (torch.arange(100) < 10)
    assert kvops.entropy_budgets([flat, sharp, half], 30, 3)[:, 0].tolist() == [3 + 54, 3, 3 + 27]  # ln 100 : 0 : ln 10
    assert kvops.entropy_budgets([sharp, sharp], 30)[:, 0].tolist() == [30, 30]
    flat[0, 0, 5], flat[0, 1, 9] = torch.nan, torch.inf
    budgets = kvops.entropy_budgets([flat, half], 30)
    assert int(budgets.sum()) == 60
    k, v = kit.kv(1, 2, 100, 16)
    kept = kvops.KeyDiff(budgets[0, :, None].expand(1, 2).contiguous()).compress(k, v)
    assert kept.k.shape[2] == int(budgets[0, 0])
    for parts, arguments in (
        (("at least one layer",), ([], 3)),
        (("scores must be a list", "got Tensor"), (flat, 3)),
        (("the same b and n in all layers", "in layer 1"), ([flat, flat[:, :, :50]], 3)),
        (("budget must be at least 1, got 0",), ([flat], 0)),
        (("window",), ([flat], 3, 4)),
    ):
        with kit.refuses("entropy_budgets", *parts):
            kvops.entropy_budgets(*arguments)


# Settings of few values


def choices(hint: object) -> set[str]:
    """The names that a type allows."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint]
    return {x for part in parts if get_origin(part) is Literal for x in get_args(part)}


def functions() -> dict[str, Callable]:
    found = {f"ops.{x}": getattr(kvops.ops, x) for x in kvops.ops.__all__}
    found |= {x: getattr(kvops, x) for x in kvops.__all__ if inspect.isfunction(getattr(kvops, x))}
    return found | {"Cache": kvops.Cache.__init__}


@pytest.mark.parametrize("name", functions())
def test_names_are_literal_types(name):
    """Editors and mypy know them: a str as default stands for one of a few values."""
    function = inspect.unwrap(functions()[name])
    hints = get_type_hints(function)
    for x in inspect.signature(function).parameters.values():
        if isinstance(x.default, str) and x.name not in ("stage1", "device"):
            assert x.default in choices(hints[x.name]), f"{name}: {x.name}"


@pytest.mark.parametrize("name", [x for x in kvops.METHODS if x != "full"])
def test_settings_are_literal_types(name):
    entry = kvops.METHODS[name]
    policy = kvops.policy(name, **({} if issubclass(entry.policy, kvops.LagKV) else {"budget": 1024}))
    hints = get_type_hints(entry.policy)
    for x in fields(policy):
        if not isinstance(getattr(policy, x.name), str) or x.name == "stage1":
            continue
        allowed = choices(hints[x.name])
        assert getattr(policy, x.name) in allowed, x.name
        with pytest.raises(ValueError, match=f"{x.name} must be") as error:
            replace(policy, **{x.name: "nonsense"})
        assert {*re.findall(r"'(\w+)'", str(error.value))} - {"nonsense"} <= allowed, x.name


def test_dir_of_the_operators():
    assert dir(kvops.ops) == sorted(kvops.ops.__all__)
