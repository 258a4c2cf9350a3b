"""The blocks a vLLM request holds: as many as `Policy.held` says, however its tokens are split. Needs no vLLM."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops.vllm import plugin
from kvops.vllm.plan import plan

SIZE = 16


@st.composite
def plans(draw):
    if draw(st.booleans()):
        lag, sinks = draw(st.integers(1, 4)), draw(st.integers(0, 2))
        ratio = draw(st.integers(0, lag)) / lag
        return plan(kvops.LagKV(lag * SIZE, ratio, sinks=sinks * SIZE), SIZE)
    budget = draw(st.integers(1, 5)) * SIZE
    if draw(st.integers(0, 4)) == 0:
        return plan(kvops.SnapKV(budget, 8), SIZE)
    buffer = draw(st.one_of(st.integers(1, 4 * SIZE), st.sampled_from((0.0625, 0.3, 0.9))))
    return plan(draw(st.sampled_from((kvops.KeyDiff, kvops.H2O, kvops.ProtoKV)))(budget, buffer=buffer), SIZE)


def held(x, filled):
    """Return the held blocks among the first `filled`, ascending."""
    return [block for block in range(filled) if not any(block in gap for gap in x.gaps(filled))]


@given(plans(), st.integers(0, 40))
@kit.examples(200)
def test_as_many_blocks_are_held_as_the_policy_says(x, filled):
    blocks = held(x, filled)
    assert len(blocks) == x.held(filled) == filled - x.gone(np.array(filled))
    columns = np.arange(len(blocks) + 3)  # and the open blocks after them
    assert x.block_of(np.array([[filled]]), columns).tolist() == [[*blocks, *range(filled, filled + 3)]]
    if isinstance(x.policy, kvops.SnapKV):  # outside of vLLM it keeps all decoded tokens
        assert x.held(filled) <= max(filled, x.kept) and x.held(filled) < x.kept + x.buffer
    elif not isinstance(x.policy, kvops.ProtoKV):  # outside of vLLM it holds the whole prompt
        assert len(blocks) * SIZE == x.policy.held(filled * SIZE, 0)


@given(plans(), st.lists(st.integers(1, 9), min_size=1, max_size=12))
@kit.examples(200)
def test_moves_leave_the_blocks_that_are_held_filled(x, steps):
    """Track what each block contains through steps of any size.

    No move reads from a gap or writes into one, and the content of all held blocks is known at the end.
    """
    known, filled = dict[int, str](), 0
    for step in steps:
        before, filled = filled, filled + step
        own = set(held(x, before))
        assert own <= known.keys()
        known |= dict.fromkeys(range(before, filled), "new")
        looked_at = set[int]()
        for move in x.moves(before, filled):
            assert [known[block] for block in move.blocks[: move.moved_before]] == ["moved"] * move.moved_before
            assert set(move.blocks) <= {*own, *range(before, filled)}
            written = move.blocks[: move.moved]
            assert not looked_at & set(written), "a block that a later move reads must not have been written by then"
            looked_at |= set(written)
            for block in written:
                del known[block]
            known |= dict.fromkeys(written[: x.kept], "moved")
        for gap in x.gaps(filled):
            for block in gap:
                known.pop(block, None)
        assert set(known) >= set(held(x, filled))


@given(plans(), st.lists(st.integers(1, 60), min_size=1, max_size=12))
@kit.examples(100)
def test_the_most_blocks_are_never_exceeded(x, steps):
    """Before each step the scheduler frees blocks for the tokens computed so far."""
    n = 0
    for new in steps:
        blocks = x.held(n // SIZE) + -(-(n + new) // SIZE) - n // SIZE
        n += new
        assert blocks <= x.most(sum(steps), max(steps))


def test_a_buffer_is_rounded_up_to_whole_blocks():
    assert plan(kvops.KeyDiff(1024), 128).policy == kvops.KeyDiff(1024, buffer=128)
    assert plan(kvops.KeyDiff(1024, buffer=1), 32).policy.buffer == 32
    assert held(plan(kvops.KeyDiff(4 * SIZE), SIZE), 9) == [0, 1, 2, 3]
    assert held(plan(kvops.KeyDiff(4 * SIZE, buffer=2 * SIZE), SIZE), 9) == [0, 1, 2, 3, 8]
    assert held(plan(kvops.ProtoKV(4 * SIZE, buffer=2 * SIZE), SIZE), 9) == [0, 1, 2, 3, 8]
    assert plan(kvops.SnapKV(4 * SIZE), SIZE).buffer == 1 and plan(kvops.ChunkKV(64 * SIZE), SIZE).buffer == 4
    assert held(plan(kvops.LagKV(2 * SIZE, sinks=SIZE), SIZE), 9) == [0, 1, 3, 5, 7, 8]


class SumsOfKeys(kvops.KeyDiff):
    by_slot = ("sums",)


class NoRows(kvops.QueryPolicy):
    pass


class LooksAtQueries(kvops.KeyDiff):
    uses_queries = True


@pytest.mark.parametrize(
    "policy, parts",
    [
        (kvops.LAQ(64), ("LAQ", "no stage of its own")),
        (kvops.KVzip(64), ("KVzip", "no stage of its own")),
        (kvops.LaCache(64), ("LaCache", "whole blocks")),
        (kvops.Full(), ("Full", "whole blocks")),
        (kvops.L2(64), ("L2", "one block table for all layers", "skip_layers=\\(0, 1\\)")),
        (kvops.PyramidKV(64), ("PyramidKV", "one block table for all layers")),
        (kvops.LagKV(64, score="l2"), ("LagKV", "one block table for all layers")),
        (kvops.ProtoKV(64, whole_clusters=True), ("ProtoKV", "whole_clusters=False")),
        (kvops.ProtoKV(64, buffer=None), ("ProtoKV", "buffer", "None")),
        (kvops.SnapKV(0.5), ("SnapKV", "budget in tokens", "0.5")),
        (kvops.SnapKV(64, head_mode="adaptive"), ("SnapKV", "same number of tokens")),
        (SumsOfKeys(64), ("SumsOfKeys", "by_slot", "'sums'")),
        (NoRows(64), ("NoRows", "at least one query")),
        (LooksAtQueries(64), ("LooksAtQueries", "QueryPolicy")),
        (kvops.KeyDiff(0.5), ("KeyDiff", "budget in tokens", "0.5")),
        (kvops.KeyDiff(64, buffer=None), ("KeyDiff", "buffer", "None")),
        (kvops.KeyDiff(64, head_mode="adaptive"), ("KeyDiff", "same number of tokens")),
        (kvops.KeyDiff(72), ("KeyDiff", "budget to be a positive multiple", "72")),
        (kvops.LagKV(64, head_mode="adaptive"), ("LagKV", "same number of tokens")),
        (kvops.LagKV(64, sinks=8), ("LagKV", "sinks to be a multiple", "8")),
        (kvops.LagKV(72, sinks=0), ("LagKV", "lag", "multiple", "72")),
        (kvops.LagKV(64, 0.3, sinks=0), ("LagKV", r"floor\(ratio \* lag\)", "multiple", "19")),
        (kvops.StreamingLLM(64), ("StreamingLLM", "positions='original'", "'slots'")),
        (kvops.TriAttention(64, recent=8), ("TriAttention", "statistics must be", "None")),
    ],
    ids=repr,
)
def test_other_policies_are_refused_by_name(policy, parts):
    with kit.refuses(*parts):
        plan(policy, SIZE)


def test_the_environment_names_the_policy(monkeypatch):
    for spec, expected in {"": None, "full": None, "keydiff:budget=64": kvops.KeyDiff(64)}.items():
        monkeypatch.setenv(plugin.VARIABLE, spec)
        assert plugin.policy() == expected
    for spec, part in {
        "keydif": "method must be one of",
        "keydiff": "budget",
        "keydiff:budget=x": "x",
    }.items():
        monkeypatch.setenv(plugin.VARIABLE, spec)
        with kit.refuses(f"KVOPS_VLLM={spec}", part):
            plugin.policy()
    monkeypatch.setenv(plugin.VARIABLE, "full")
    plugin.register()  # vLLM is not even imported
