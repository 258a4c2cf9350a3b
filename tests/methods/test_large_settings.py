"""Integers of any size as settings of policies and arguments of planning functions: each works in seconds, or raises a
TypeError or ValueError of one sentence."""

import contextlib
import resource
import signal
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import kit
import kvops
from kvops.cache import AttendingCache
from kvops.methods.statistics import mean_rotation
from test_policies import SETTINGS, call_of, inputs

LARGE = (2**31 - 1, 2**31, 2**40, 2**53 + 1, 2**63 - 1, 2**63, 2**10000, -(2**10000), 2**100000)
SECONDS, BYTES = 10, 4 << 30


@contextlib.contextmanager
def limits():
    """Fail what takes longer or more memory."""

    def late(*_):
        raise TimeoutError(f"more than {SECONDS} s")

    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    handler = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, before[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def attempt(call, *args, **options) -> None:
    """Check that a call works or is refused in one sentence, within the limits."""
    with limits():
        try:
            call(*args, **options)
        except (TypeError, ValueError) as error:
            assert str(error).count(": ") >= 1 and len(str(error)) < 400, str(error)


def large_settings():
    for cls, settings in SETTINGS.items():
        for x in fields(cls):
            if "int" in str(x.type) or "Budget" in str(x.type):
                yield pytest.param(cls, settings, x.name, id=f"{cls.__name__}-{x.name}")


def compress(cls, given, **spans) -> None:
    policy, (q, k, v) = cls(**given), inputs()
    queries, options = call_of(policy, q)
    policy.compress(k, v, *queries, **options, **spans)


def stream(cls, given) -> None:
    policy, (q, k, v) = cls(**given), inputs()
    if policy.needs.stage or isinstance(policy, kvops.LAQ):
        return
    cache = (AttendingCache if isinstance(policy, kvops.QueryPolicy) else kvops.Cache)(policy, layer=1, num_layers=4)
    for first, end in ((0, 50), (50, 51), (51, 60)):
        inputs_of = kvops.LayerInputs(q[:, 0, first:end])
        step = cache.append(k[:, :, first:end], v[:, :, first:end], inputs=inputs_of)
        if isinstance(policy, kvops.QueryPolicy):
            cache.attention(q[:, :, first:end], *step)


@kit.only("cpu")
@pytest.mark.parametrize("cls, settings, name", list(large_settings()))
def test_settings(cls, settings, name):
    """In a single call, with padding, with budgets per head, and in a cache."""
    spans = {} if cls is kvops.LaCache else dict(starts=kit.int32(0, 9), lengths=kit.int32(50, 47))
    modes = ({}, {"head_mode": "adaptive"}) if "head_mode" in {x.name for x in fields(cls)} else ({},)
    stream(cls, settings)
    for large in LARGE:
        given = settings | {name: (large,) if name in ("template", "skip_layers") else large}
        for mode in modes:
            attempt(compress, cls, given | mode)
            attempt(compress, cls, given | mode, **spans)
        attempt(stream, cls, given)


SCORES = torch.rand(2, 2, 60)
PLAN = dict(n=100, num_layers=4, budget=24)
PLANNING = {  # functions, and arguments that work
    "lacache_plan": (kvops.lacache_plan, PLAN | dict(span=2, overlap=1, sinks=4)),
    "lacache_plan, whole": (kvops.lacache_plan, PLAN | dict(compaction="whole")),
    "lacache_coverage": (kvops.lacache_coverage, PLAN | dict(span=2, overlap=1, sinks=4, chunk=7)),
    "pyramidkv_budgets": (kvops.pyramidkv_budgets, dict(budget=40, num_layers=4, n=100, window=8)),
    "head_budgets": (lambda **x: kvops.head_budgets(SCORES, **x), dict(budget=40, window=8)),
    "entropy_budgets": (lambda **x: kvops.entropy_budgets([SCORES] * 2, **x), dict(budget=40, window=8)),
    "lsh_projection": (kvops.lsh_projection, dict(head_dim=8, bits=4, seed=0)),
    "Rope.of": (kvops.Rope.of, dict(dim=16)),
    "trig_centers": (
        lambda **x: kvops.trig_centers(torch.ones(2, 16), kvops.Rope.of(16), **x),
        dict(position=5, max_offset=64),
    ),
    **{
        f"{cls.__name__}.compress": (
            lambda cls=cls, **x: cls(**SETTINGS[cls]).compress(*inputs()[1:], **x),
            dict(layer=1, num_layers=4),
        )
        for cls in (kvops.LaCache, kvops.L2, kvops.Random, kvops.ExpectedAttention)
    },
    "Cache": (lambda **x: kvops.Cache(kvops.LaCache(24), **x).append(*inputs()[1:]), dict(layer=1, num_layers=4)),
    "keydiff_compress": (lambda **x: kvops.keydiff_compress(*inputs()[1:], **x), dict(budget=20, sinks=2, recent=3)),
}


@kit.only("cpu")
@pytest.mark.parametrize("name", PLANNING)
def test_planning(name):
    function, given = PLANNING[name]
    function(**given)
    for argument, value in given.items():
        if isinstance(value, int):
            for large in LARGE:
                attempt(function, **given | {argument: large})


@kit.only("cpu")
def test_budgets_of_heads_do_not_wrap():
    """The tokens of a layer are int32."""
    most = (2**31 - 1) // 2
    assert kvops.head_budgets(SCORES, most).sum(1).tolist() == [2 * most] * 2
    with kit.refuses(f"head_budgets: budget must be at most {most}, got {most + 1}"):
        kvops.head_budgets(SCORES, most + 1)


@kit.only("cpu")
def test_ranges_of_positions_have_a_closed_form():
    """The mean rotation equals the sum over all offsets, also for frequencies of 0, near 0, and near a whole turn."""
    turn = 2 * torch.pi
    omega = torch.tensor([1.0, 0.3, 1e-3, 1e-9, 1e-30, 0.0, turn / 2, turn, 3 * turn, turn + 1e-5, 2.0**20])
    rope = kvops.Rope(omega, scaling=1.5)
    for offsets in (range(1), range(2), range(512), range(5, 700, 3), range(100_003)):
        angles = torch.tensor(offsets, dtype=torch.float64)[:, None] * omega.double()
        expected = 1.5 * torch.polar(torch.ones_like(angles), angles).mean(0)
        found = mean_rotation(rope, 0, offsets, torch.device("cpu"))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)
        torch.testing.assert_close(found[:6], expected[:6], rtol=0, atol=1e-12)
    far = mean_rotation(rope, 7, range(2**40), torch.device("cpu"))
    assert far.isfinite().all() and (far.abs() <= 1.5 + 1e-6).all() and abs(far[5] - 1.5) < 1e-12
