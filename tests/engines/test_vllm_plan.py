"""Where the slots of a vLLM request lie, however its tokens are split. Needs no vLLM."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops.cache.schedule import Schedule
from kvops.vllm import plugin, settings
from kvops.vllm.plan import Plan, check, why_not_shared

SIZE = 16


@st.composite
def plans(draw):
    block = draw(st.one_of(st.none(), st.integers(1, 70)))
    budget = draw(st.integers(8, 90))
    policy = draw(
        st.one_of(
            st.builds(kvops.LagKV, st.integers(1, 60), st.floats(0, 1), sinks=st.integers(0, 30)),
            st.just(kvops.SnapKV(budget, 8)),
            st.builds(
                draw(st.sampled_from((kvops.KeyDiff, kvops.H2O, kvops.ProtoKV))),
                st.just(budget),
                buffer=st.one_of(st.none(), st.integers(1, 70), st.sampled_from((0.0625, 0.3, 0.9))),
            ),
        )
    )
    schedule = Schedule(policy, block)
    return Plan(schedule, SIZE, why_not_shared(schedule) is None and draw(st.booleans()))


def blocks(slots: int) -> int:
    return -(-slots // SIZE)


@given(plans(), st.integers(1, 300), st.lists(st.integers(0, 600), min_size=1, max_size=30))
@kit.examples(200)
def test_the_blocks_outside_the_gaps_hold_the_slots(x, prompt, counts):
    """Whatever was asked before."""
    for n in counts:
        state = x.at(n, prompt)
        gone = [block for gap in state.gaps for block in gap]
        assert state.held == x.schedule.held(n, prompt) and len(gone) == x.freed(n, prompt)
        assert sorted(gone) == gone and all(a.stop < b.start for a, b in zip(state.gaps, state.gaps[1:]))
        has = blocks(x.length(n, prompt))
        held = [block for block in range(has) if block not in gone]
        assert blocks(state.held) <= len(held) <= blocks(state.held) + 1
        assert x.columns([state], len(held) + 3).tolist() == [[*held, *range(has, has + 3)]]
        assert state == Plan(x.schedule, SIZE, x.shared).at(n, prompt)
    states = [x.at(n, prompt) for n in counts]
    each = [x.columns([state], 9)[0].tolist() for state in states]
    assert x.columns(states, 9).tolist() == each


@given(plans(), st.integers(1, 300), st.lists(st.integers(1, 90), min_size=1, max_size=20))
@kit.examples(200)
def test_the_slots_of_a_step_lie_in_blocks_that_the_request_has(x, prompt, steps):
    """vLLM gives a request of n tokens blocks(n) blocks, less those that have been freed. Freed ones are never used."""
    n, most = 0, x.most(sum(steps), max(steps))
    for new in steps:
        new = x.schedule.cut(n, new, prompt)
        before, after = x.at(n, prompt), x.at(n + new, prompt)
        length = x.length(n + new, prompt)
        assert blocks(length) <= x.width(max(prompt, sum(steps)))
        has = blocks(length) - x.freed(n, prompt)
        assert blocks(before.held + new) <= has <= most
        used = set(x.columns([before], blocks(before.held + new))[0].tolist())
        kept = set(x.columns([after], blocks(after.held))[0].tolist())
        assert used | kept <= set(range(blocks(length)))
        if x.shared and n == before.held and after.held < n + new:  # copied: no block of the prompt is written or held
            assert not used & kept and after.gaps == (range(blocks(n + new)),)
        else:
            assert kept <= used
        assert after.held <= before.held + new
        assert after.kept == (after.held if after.held < before.held + new else before.kept)
        n += new


def test_what_is_freed():
    plan = Plan(Schedule(kvops.KeyDiff(100, buffer=20)), SIZE)
    assert plan.at(160, 200) == (160, 0, ())
    assert plan.at(200, 200) == (100, 100, (range(7, 13),))  # 13 blocks, of which 7 hold 100 slots
    assert plan.at(219, 200) == (119, 100, (range(7, 13),))
    assert plan.at(220, 200) == (100, 100, (range(7, 14),))
    plan = Plan(Schedule(kvops.KeyDiff(32, buffer=20), 64), SIZE)
    assert plan.at(64, 200) == (32, 32, (range(2, 4),)) and plan.at(200, 200) == (32, 32, (range(2, 12),))


def test_what_is_freed_with_shared_prefixes():
    plan = Plan(Schedule(kvops.KeyDiff(100, buffer=20)), SIZE, shared=True)
    assert plan.at(199, 200) == (199, 0, ()) and plan.length(199, 200) == 199
    assert plan.at(200, 200) == (100, 100, (range(13),))  # 13 blocks of the prompt, then 7 new ones
    assert plan.length(200, 200) == 13 * SIZE + 100 and plan.width(200) == 13 + 8 + 1  # 119 slots
    assert plan.at(219, 200) == (119, 100, (range(13),)) and plan.length(219, 200) == 13 * SIZE + 119
    assert plan.at(220, 200) == (100, 100, (range(13), range(20, 21)))
    assert plan.at(119, 60) == (119, 0, ())  # the prompt is within the budget: the first eviction is in decode
    assert plan.at(120, 60) == (100, 100, (range(8),)) and plan.length(121, 60) == 8 * SIZE + 101


@pytest.mark.parametrize(
    "policy, evict, why",
    [
        (kvops.KeyDiff(64), "prompt", None),
        (kvops.SnapKV(64), "prompt", None),
        (kvops.TOVA(64), "prompt", None),
        (kvops.LagKV(64), "prompt", None),
        (kvops.KeyDiff(64), "blocks:128", "evict=blocks:128 evicts"),
        (kvops.H2O(64), "prompt", "H2O adds up"),
    ],
    ids=repr,
)
def test_who_shares_prefixes(policy, evict, why):
    found = why_not_shared(Schedule.of("test", policy, evict))
    assert found is None if why is None else found.startswith(why)


class SumsOfKeys(kvops.KeyDiff):
    needs = kvops.Needs(per_slot=("sums",))


class NoRows(kvops.QueryPolicy):
    pass


@pytest.mark.parametrize(
    "policy, parts",
    [
        (kvops.LAQ(64), ("LAQ", "no stage of its own")),
        (kvops.CriticalKV(64, head_mode="adaptive"), ("CriticalKV", "same number of tokens")),
        (kvops.KVzip(64), ("KVzip", "no stage of its own")),
        (kvops.LaCache(64), ("LaCache", "slots from its tokens")),
        (kvops.Full(), ("Full", "slots from its tokens")),
        (kvops.L2(64), ("L2", "one block table for all layers", "skip_layers=\\(0, 1\\)")),
        (kvops.PyramidKV(64), ("PyramidKV", "one block table for all layers")),
        (kvops.LagKV(64, score="l2"), ("LagKV", "one block table for all layers")),
        (kvops.ProtoKV(64, whole_clusters=True), ("ProtoKV", "whole_clusters=False")),
        (kvops.SnapKV(0.5), ("SnapKV", "budget in tokens", "0.5")),
        (kvops.SnapKV(64, head_mode="adaptive"), ("SnapKV", "same number of tokens")),
        (SumsOfKeys(64), ("SumsOfKeys", "per_slot", "'sums'")),
        (NoRows(64), ("NoRows", "at least one query")),
        (kvops.KeyDiff(0.5), ("KeyDiff", "budget in tokens", "0.5")),
        (kvops.KeyDiff(64, head_mode="adaptive"), ("KeyDiff", "same number of tokens")),
        (kvops.LagKV(64, head_mode="adaptive"), ("LagKV", "same number of tokens")),
        (kvops.H2O(64, group_reduce="max"), ("H2O", "'mean' or 'sum'", "'max'")),
        (kvops.StreamingLLM(64), ("StreamingLLM", "positions='original'", "'slots'")),
        (kvops.TriAttention(64, recent=8), ("TriAttention", "statistics must be", "None")),
    ],
    ids=repr,
)
def test_other_policies_are_refused_by_name(policy, parts):
    with kit.refuses(*parts):
        check(policy)


def test_the_environment_names_the_policy(monkeypatch):
    keydiff = kvops.KeyDiff(64)
    for spec, expected in {
        "": None,
        "full": None,
        "keydiff:budget=64": Schedule(keydiff),
        "keydiff:budget=64,evict=prompt": Schedule(keydiff),
        "keydiff:evict=blocks:128,budget=64": Schedule(keydiff, 128),
    }.items():
        monkeypatch.setenv(settings.VARIABLE, spec)
        assert settings.schedule() == expected
    for spec, part in {
        "keydif": "method must be one of",
        "keydiff": "budget",
        "keydiff:budget=x": "x",
        "keydiff:budget=64,evict=blocks": "evict must be 'prompt' or 'blocks:N'",
        "keydiff:budget=64,evict=prompt,evict=prompt": "evict once",
    }.items():
        monkeypatch.setenv(settings.VARIABLE, spec)
        with kit.refuses(f"KVOPS_VLLM={spec}", part):
            settings.schedule()
    monkeypatch.setenv(settings.VARIABLE, "full")
    plugin.register()  # vLLM is not even imported
