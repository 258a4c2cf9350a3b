"""LaCache: the plan compared with a simulation on lists of tokens; coverage, one call, streams, slot positions."""

import copy
import re
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops import ops
from kvops.methods.select import gather_rows
from kvops.ops import reference
from kvops.ops.ladder import COMPACTIONS, MAX_PASSES, PATTERNS, Ladder, LadderState, decode_plan

pytestmark = kit.every_device
examples = kit.examples(40, derandomize=True)

SHAPE = dict(num_layers=8, span=3, overlap=1)  # A 4, B 2, R 2
WIDE = dict(num_layers=9, span=2, overlap=1)  # A 8, B 2, R 6


def valid_shapes(layers, pattern="paper"):
    """Yield every (span, overlap) that frees slots, with the paper's A, B and R written out."""
    for span in range(1, layers + 1):
        for overlap in range(span):
            length, kept = sizes(layers, span, overlap, pattern)
            if length > kept:
                assert pattern != "paper" or span <= layers // 2
                yield span, overlap


def sizes(layers, span, overlap, pattern="paper"):
    step = span - overlap
    length = 1
    while (length - 1) * step + span < layers:  # ladders must reach the last layer
        length += 1
    kept = 0
    while kept * step < span:
        kept += 1
    if pattern == "paper" and min(firsts(length, kept, layers, span, overlap)) < 0:
        length -= 1  # one slot does not fit
        assert min(firsts(length, kept, layers, span, overlap)) >= 0
    return length, min(kept, length)


def firsts(length, kept, layers, span, overlap):
    """Return the layer in which each slot of a ladder begins, so that it has `span` layers until it makes way."""
    first = [slot * (span - overlap) for slot in range(length)]
    for slot in reversed(range(length)):
        end = first[slot + kept] if slot + kept < length else layers
        first[slot] = min(first[slot], end - span)
    return first


def kept_of_ladder(layer, layers, span, overlap, pattern):
    """Return the slots of a ladder that a layer keeps."""
    length, kept = sizes(layers, span, overlap, pattern)
    if pattern == "official":
        first = layer % (length - kept + 1)
    elif pattern == "short":  # the last slot that begins at this layer or above, clamped to the ladder's ends
        first = min(max(layer // (span - overlap) - kept + 1, 0), length - kept)
    else:
        begun = sum(x <= layer for x in firsts(length, kept, layers, span, overlap))
        first = max(begun - kept, 0)
    return range(first, first + kept)


class Simulation:
    """Simulates one list of tokens per layer, thinned ladder by ladder."""

    def __init__(self, budget, sinks, num_layers, span, overlap, pattern="paper", compaction="ladder"):
        self.shape, self.pattern = (num_layers, span, overlap), pattern
        self.length, self.kept = sizes(*self.shape, pattern)
        self.whole = compaction == "whole"
        self.budget, self.cap, self.sinks, self.cursor = budget, budget, sinks, sinks
        self.layers, self.seen = [[] for _ in range(num_layers)], 0

    def append(self, count):
        tokens = range(self.seen, self.seen + count)
        self.seen += count
        for x in self.layers:
            x.extend(tokens)
        freed = self.length - self.kept
        if self.whole:
            return self.thin_everything()
        if len(self.layers[0]) > self.cap:
            self.cap = self.budget + freed // 2
        while len(self.layers[0]) > self.cap:
            if self.cap - self.cursor - len(self.layers) < self.kept:  # the newest slots are protected
                self.cursor = self.sinks
                continue
            for i, x in enumerate(self.layers):
                ladder = x[self.cursor : self.cursor + self.length]
                kept = kept_of_ladder(i, *self.shape, self.pattern)
                x[self.cursor : self.cursor + self.length] = [ladder[j] for j in kept]
            self.cursor += self.kept
        return self

    def thin_everything(self):
        """Thin every ladder between the sinks and the newest slots, until the budget is met."""
        while (n := len(self.layers[0])) > self.cap:
            last = n - len(self.layers)
            for i, x in enumerate(self.layers):
                kept, out = kept_of_ladder(i, *self.shape, self.pattern), x[: self.sinks]
                for first in range(self.sinks, last - self.length + 1, self.length):
                    out += [x[first + j] for j in kept]
                x[:] = out + x[last - (last - self.sinks) % self.length :]
        return self


@st.composite
def settings(draw):
    layers = draw(st.integers(2, 14))
    pattern = draw(st.sampled_from(PATTERNS))
    span, overlap = draw(st.sampled_from([*valid_shapes(layers, pattern)]))
    sinks = draw(st.integers(0, 6))
    compaction = draw(st.sampled_from(COMPACTIONS))
    length, kept = sizes(layers, span, overlap, pattern)
    budget = sinks + layers + (length - 1 if compaction == "whole" else kept) + draw(st.integers(0, 40))
    ladder = dict(num_layers=layers, span=span, overlap=overlap, pattern=pattern)
    return dict(ladder, sinks=sinks, budget=budget, compaction=compaction)


chunks = st.lists(st.integers(1, 90), min_size=1, max_size=12)


# The ladder


@pytest.mark.parametrize("pattern, shapes", [("paper", 1015), ("short", 1349)])
def test_ladders_of_all_shapes(pattern, shapes):
    """Every slot is kept in consecutive layers as in the paper's Fig. 2: `span` or more, or the model ends first."""
    count, short = 0, 0
    for layers in range(2, 29):
        for span, overlap in valid_shapes(layers, pattern):
            count += 1
            ladder = Ladder(layers, span, overlap, pattern)
            assert (ladder.length, ladder.kept) == sizes(layers, span, overlap, pattern)
            rows = [[*kept_of_ladder(x, layers, span, overlap, pattern)] for x in range(layers)]
            assert [x[0] for x in rows] == [ladder.offset(x) for x in range(layers)]
            for slot in range(ladder.length):
                held = [x for x in range(layers) if slot in rows[x]]
                assert held == [*range(held[0], held[-1] + 1)]
                first = slot * (span - overlap)
                if pattern == "short":
                    assert {*range(first, min(first + span, layers))} <= {*held}
                    short += len(held) < span
                else:
                    assert len(held) >= span and held[0] <= min(first, layers - span)
    assert count == shapes and bool(short) == (pattern == "short")


def test_the_last_rung():
    """28 layers, span 7, overlap 3: the last slot begins in layer 21 and not 24, and the others make way for it."""

    def coverage(pattern):
        ladder = Ladder(28, 7, 3, pattern)
        first = [ladder.offset(layer) for layer in range(28)]
        return [sum(x <= slot < x + ladder.kept for x in first) for slot in range(ladder.length)]

    assert coverage("short") == [8, 12, 8, 8, 8, 8, 4]
    assert coverage("paper") == [7, 12, 7, 8, 7, 8, 7]
    assert Ladder(11, 4, 2, "short").length == 5 and Ladder(11, 4, 2).length == 4  # 5 slots of 4 layers do not fit
    for layers, span, overlap in ((32, 8, 4), (8, 3, 2), (3, 1, 0)):  # the step divides the rest: the same ladder
        same = [[Ladder(layers, span, overlap, x).offset(i) for i in range(layers)] for x in ("paper", "short")]
        assert same[0] == same[1]


def test_a_ladder_of_figure_2():
    """9 layers, span 3, overlap 0: exactly three steps of three layers."""
    held = kvops.lacache_coverage(16, num_layers=9, budget=14, span=3, overlap=0, sinks=4)
    steps = ["".join(".#"[x] for x in row) for row in held[::3].int()]
    assert (
        steps == ["#####..#########", "####.#.#########", "####..##########"]
        and (held == held[::3].repeat_interleave(3, 0)).all()
    )


# The plan


@examples
@given(settings=settings(), chunks=chunks)
def test_plan_is_the_simulation(settings, chunks):
    simulation, state, n = Simulation(**settings), None, 0
    held = [list(range(0)) for _ in simulation.layers]
    for size in chunks:
        first = simulation.seen
        simulation.append(size)
        plan = kvops.lacache_plan(n + size, **settings, state=state)
        for layer, tokens in enumerate(held):
            tokens.extend(range(first, first + size))
            source = plan.indices(layer, "cpu")
            assert (source.diff() > 0).all() and (source >= torch.arange(len(plan), device="cpu")).all()
            held[layer] = [tokens[i] for i in source.tolist()]
        state, n = plan.state, len(plan)
        assert held == simulation.layers and state == LadderState(simulation.cap, simulation.cursor)
        assert settings["budget"] <= state.cap <= settings["budget"] + plan.ladder.freed // 2 >= n


@examples
@given(settings=settings(), times=st.integers(2, 80))
def test_prompts_far_over_the_budget(settings, times):
    """No token appears twice, sinks and newest tokens are kept, and the operators' closed form agrees."""
    n = settings["budget"] * times
    plan = kvops.lacache_plan(n, **settings)
    budget, freed = settings["budget"], plan.ladder.freed
    if settings["compaction"] == "whole":
        assert settings["sinks"] + settings["num_layers"] + plan.ladder.kept <= len(plan) <= budget
    else:
        assert budget - freed <= len(plan) <= budget + freed // 2
    assert decode_plan(plan.encoded).encoded == plan.encoded
    for layer in range(settings["num_layers"]):
        kept = plan.indices(layer, "cpu")
        assert (kept.diff() > 0).all() and kept.numel() == len(plan)
        assert torch.equal(kept[: settings["sinks"]], torch.arange(settings["sinks"], device="cpu"))
        newest = torch.arange(n - max(0, settings["num_layers"] - freed + 1), n, device="cpu")
        assert torch.equal(kept[len(kept) - len(newest) :], newest)
        slots = torch.arange(n, device="cpu")
        for part in plan.parts():
            assert len(part.passes) <= MAX_PASSES and len(slots) == part.n
            slots = slots[part.indices(layer, "cpu")]
        assert torch.equal(slots, kept)


@pytest.mark.parametrize("shape", [SHAPE, WIDE, dict(num_layers=4, span=2, overlap=0)], ids=["R2", "R6", "R1"])
def test_mean_length_is_the_budget(shape):
    """The mean over single-token steps; half a token more if a ladder frees an even number."""
    budget, lengths, plan = 64, [], kvops.lacache_plan(64, budget=64, **shape)
    for _ in range(6000):
        plan = kvops.lacache_plan(len(plan) + 1, budget=budget, **shape, state=plan.state)
        lengths.append(len(plan))
    freed = plan.ladder.freed
    cycles = lengths[-len(lengths) // (2 * freed) * freed :]
    assert sum(cycles) / len(cycles) == budget + (0.5 if freed % 2 == 0 else 0)
    assert max(lengths) - min(lengths[budget:]) == freed - 1


def test_worked_by_hand():
    """4 layers, span 2: layers 0 and 1 keep the first of two slots, layers 2 and 3 the second. Budget 8, 1 sink."""
    settings = dict(num_layers=4, span=2, overlap=0, budget=8, sinks=1)
    plan = kvops.lacache_plan(9, **settings)
    assert plan.passes == ((1, 1),) and plan.state == LadderState(8, 2) and len(plan) == 8
    assert plan.indices(0, "cpu").tolist() == plan.indices(1, "cpu").tolist() == [0, 1, 3, 4, 5, 6, 7, 8]
    assert plan.indices(2, "cpu").tolist() == plan.indices(3, "cpu").tolist() == [0, 2, 3, 4, 5, 6, 7, 8]
    cursors = []
    for _ in range(8):  # 8 slots less 4 protected: ladders at 2 and 3, then it starts over
        plan = kvops.lacache_plan(9, **settings, state=plan.state)
        cursors.append(plan.passes)
    assert cursors == [((2, 1),), ((3, 1),), ((1, 1),), ((2, 1),), ((3, 1),), ((1, 1),), ((2, 1),), ((3, 1),)]
    long = kvops.lacache_plan(14, **settings)
    assert long.passes == ((1, 3), (1, 3)) and long.state == LadderState(8, 4)
    assert long.indices(0, "cpu").tolist() == [0, 1, 5, 8, 10, 11, 12, 13]


def test_whole_caches_worked_by_hand():
    """The shape above: every ladder between the sink and the newest four slots is thinned, at every overflow."""
    settings = dict(num_layers=4, span=2, overlap=0, budget=8, sinks=1, compaction="whole")
    plan = kvops.lacache_plan(9, **settings)
    assert plan.passes == ((1, 2),) and plan.state == LadderState(8, 1)
    assert plan.indices(0, "cpu").tolist() == [0, 1, 3, 5, 6, 7, 8]
    assert plan.indices(3, "cpu").tolist() == [0, 2, 4, 5, 6, 7, 8]
    assert kvops.lacache_plan(8, **settings, state=plan.state).passes == ()
    assert kvops.lacache_plan(9, **settings, state=plan.state).passes == ((1, 2),)
    assert kvops.lacache_plan(20, **settings).passes == ((1, 7), (1, 4), (1, 2))
    lengths, plan = [], kvops.lacache_plan(64, num_layers=8, budget=64, compaction="whole")
    for _ in range(600):
        plan = kvops.lacache_plan(len(plan) + 1, num_layers=8, budget=64, compaction="whole", state=plan.state)
        lengths.append(len(plan))
    assert max(lengths) == 64 and min(lengths[1:]) == 65 - 5 * ((65 - 4 - 8) // 7)  # of 7 slots of a ladder 5 are freed


def test_no_plan_below_the_cap():
    for n in (0, 1, 64):
        plan = kvops.lacache_plan(n, budget=64, **SHAPE)
        assert plan.passes == () and len(plan) == n and plan.state == LadderState(64, 4)
        assert torch.equal(plan.indices(3, "cpu"), torch.arange(n, device="cpu"))
    assert [*plan.parts()] == [plan]


def test_defaults_are_those_of_language_modelling():
    for layers, span, overlap in ((32, 8, 4), (3, 1, 0), (8, 2, 1), (2, 1, 0)):
        ladder = kvops.lacache_plan(0, num_layers=layers, budget=512).ladder
        assert (ladder.span, ladder.overlap) == (span, overlap)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(span=9), r"expected one of \(1, 0\), \(2, 0\), \(2, 1\), .*; got \(9, 1\)"),
        (dict(span=2, overlap=2), r"expected one of .*; got \(2, 2\)"),
        (dict(span=8, overlap=0), r"expected one of .*; got \(8, 0\)"),
        (dict(span=5), r"expected one of .*; got \(5, 1\)"),
        (dict(num_layers=1, span=1, overlap=0), "the model has too few layers"),
        (dict(budget=13), "expected at least 14 with 4 sinks, got 13"),
        (dict(sinks=60), "expected at least 70 with 60 sinks, got 64"),
        (dict(pattern="ladder"), "pattern must be one of 'paper', 'official', 'short', got 'ladder'"),
        (dict(compaction="some"), "compaction must be one of 'ladder', 'whole', got 'some'"),
        (dict(compaction="whole", budget=14), r"\+ 3 slots of a ladder, expected at least 15 with 4 sinks, got 14"),
        (dict(n=-1), "n must be at least 0, got -1"),
    ],
)
def test_errors_name_what_would_work(change, message):
    arguments = {"n": 100, "budget": 64, **SHAPE, **change}
    with pytest.raises(ValueError, match=message):
        kvops.lacache_plan(arguments.pop("n"), **arguments)
    if named := re.search(r"expected at least (\d+) with", message):
        kvops.lacache_plan(100, **{**arguments, "budget": int(named[1])})


@pytest.mark.parametrize("name", ["n", "num_layers", "budget", "sinks", "span", "overlap"])
@pytest.mark.parametrize("value", [100.5, float("nan"), 8.0, True])
def test_a_plan_is_of_integers(name, value):
    arguments = {"n": 100, "budget": 64, "sinks": 4, **SHAPE, name: value}
    with pytest.raises(TypeError, match=f"lacache_plan: {name} must be an int, got {type(value).__name__} {value}"):
        kvops.lacache_plan(arguments.pop("n"), **arguments)


@kit.only("cpu")
def test_a_plan_takes_microseconds():
    """About 3 us on an idle machine; on a busy one the best of many repetitions counts."""
    plan, best = kvops.lacache_plan(513, num_layers=32, budget=512), 1.0
    for _ in range(200):
        start = time.perf_counter()
        for _ in range(10):
            kvops.lacache_plan(513, num_layers=32, budget=512, state=plan.state)
        best = min(best, (time.perf_counter() - start) / 10)
    assert best < 20e-6


# Coverage


@examples
@given(settings=settings(), chunks=chunks)
def test_coverage_is_the_simulation(settings, chunks):
    simulation = Simulation(**settings)
    for size in chunks:
        simulation.append(size)
    n = sum(chunks)
    expected = torch.zeros(settings["num_layers"], n, dtype=torch.bool, device="cpu")
    for layer, tokens in enumerate(simulation.layers):
        expected[layer, tokens] = True
    assert torch.equal(kvops.lacache_coverage(n, **settings, chunk=chunks), expected)


def test_coverage_token_by_token():
    for pattern in PATTERNS:
        simulation = Simulation(40, 4, 8, 3, 1, pattern)
        for _ in range(500):
            simulation.append(1)
        held = kvops.lacache_coverage(500, budget=40, **SHAPE, pattern=pattern)
        assert [row.nonzero()[:, 0].tolist() for row in held] == simulation.layers
    assert kvops.lacache_coverage(0, budget=40, **SHAPE).shape == (8, 0)
    with pytest.raises(ValueError, match="lacache_coverage: chunk must be at least 1, got 0"):
        kvops.lacache_coverage(500, budget=40, **SHAPE, chunk=0)


# One call


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("n", [30, 64, 65, 300])
def test_compress_moves_what_the_plan_keeps(n, dtype):
    k, v = kit.kv(2, 2, n, 40, dtype, dv=16)
    plan = kvops.lacache_plan(n, budget=64, **SHAPE)
    for layer in (0, 4, 7):
        found = kvops.lacache_compress(k, v, layer=layer, budget=64, **SHAPE)
        kept = plan.indices(layer, k.device)
        assert torch.equal(found.indices, kept.expand(2, 2, -1)) and found.indices.dtype == torch.int64
        assert kit.same(found[:2], (k[:, :, kept], v[:, :, kept]))
        assert found.lengths.tolist() == [len(plan)] * 2
        assert not found.k.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()


def test_compress_into_out_and_in_place():
    k, v = kit.kv(2, 2, 300, 32, dv=16)
    settings = dict(layer=3, budget=64, **SHAPE)
    want = kvops.lacache_compress(k, v, **settings)
    m = want.k.shape[2]
    out = kit.randn(2, 2, m, 32), kit.randn(2, 2, m, 16)
    found = kvops.lacache_compress(k, v, **settings, out=out)
    assert found.k is out[0] and kit.same(found, want)
    k_own, v_own = k.clone(), v.clone()
    found = kvops.lacache_compress_(k_own, v_own, **settings)
    assert kit.same(found, want) and found.k.data_ptr() == k_own.data_ptr()
    assert torch.equal(k_own[:, :, m:], k[:, :, m:]) and torch.equal(k_own[:, :, :4], k[:, :, :4])


def test_compress_with_more_passes_than_a_call_takes():
    settings = dict(num_layers=4, span=2, overlap=0, budget=6, sinks=1)
    plan = kvops.lacache_plan(500, **settings)
    assert len(plan.passes) > 2 * MAX_PASSES
    k, v = kit.kv(1, 1, 500, 8)
    for compress in (kvops.lacache_compress, kvops.lacache_compress_):
        found = compress(k.clone(), v.clone(), layer=3, **settings)
        kept = plan.indices(3, k.device)
        assert kit.same(found, (k[:, :, kept], v[:, :, kept], kept.expand(1, 1, -1)))


def test_compress_turns_keys_to_their_slots():
    k, v = kit.kv(1, 2, 200, 32)
    rope = kvops.Rope.of(24, device=k.device)
    settings = dict(layer=5, budget=64, **SHAPE)
    want = kvops.lacache_compress(k, v, **settings)
    rotated = ops.rope_at_slots(k, *rope.tables(torch.arange(200)))
    found = kvops.lacache_compress(rotated, v, **settings, rope=rope)
    expected = ops.rope_at_slots(want.k, *rope.tables(torch.arange(want.k.shape[2])))
    torch.testing.assert_close(found.k, expected, atol=5e-5, rtol=5e-5)  # fp32 angles of up to 200 radians
    assert torch.equal(found.v, want.v)
    in_place = kvops.lacache_compress_(rotated.clone(), v.clone(), **settings, rope=rope)
    assert kit.same(in_place, found)


def test_compress_for_understanding():
    """The span is the budget fraction times the number of layers."""
    k, v = kit.kv(1, 1, 400, 8)
    for budget in (100, 0.25):
        found = [
            kvops.lacache_compress(k, v, layer=x, num_layers=8, budget=budget, task="understanding").indices[0, 0]
            for x in range(8)
        ]
        for layer, kept in enumerate(found):
            plan = kvops.lacache_plan(400, num_layers=8, budget=100, span=2, overlap=0, sinks=25)
            assert torch.equal(kept, plan.indices(layer, k.device))
    whole = kvops.lacache_compress(k, v, layer=1, num_layers=8, budget=1.0, task="understanding")
    assert kit.same(whole[:2], (k, v))


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(budget=13), ValueError, "lacache_compress: budget .* at least 14 with 4 sinks, got 13"),
        (dict(budget=0.01), ValueError, "lacache_compress: budget .* at least 14 with 4 sinks, got 1"),
        (dict(budget=True), TypeError, "lacache_compress: budget must be an int"),
        (dict(span=8, overlap=0), ValueError, "expected one of"),
        (
            dict(layer=8),
            ValueError,
            r"lacache_compress: layer must lie in \[0, num_layers\), expected less than 8, got 8",
        ),
        (dict(layer=-1), ValueError, "lacache_compress: layer must be at least 0, got -1"),
        (dict(sinks=-1), ValueError, "lacache_compress: sinks must be at least 0, got -1"),
        (dict(task="chat"), ValueError, "task must be one of 'modeling', 'understanding', got 'chat'"),
        (dict(out=3), TypeError, "lacache_compress: out must be a pair of tensors"),
    ],
)
def test_compress_errors(change, error, message):
    k, v = kit.kv(1, 2, 100, 8)
    with pytest.raises(error, match=message):
        kvops.lacache_compress(k, v, **{**SHAPE, "layer": 3, "budget": 64, **change})


# Streams


def feed(cache, k, v, chunks):
    for k_new, v_new in zip(k.split(chunks, 2), v.split(chunks, 2)):
        cache.append(k_new, v_new)
    return cache


@examples
@given(settings=settings(), chunks=chunks, layer=st.integers(0, 13))
def test_a_stream_keeps_what_the_simulation_keeps(settings, chunks, layer):
    layers = settings.pop("num_layers")
    layer %= layers
    k, v = kit.kv(1, 2, sum(chunks), 8)
    cache = feed(kvops.Cache(kvops.LaCache(**settings), layer=layer, num_layers=layers), k, v, chunks)
    simulation = Simulation(**settings, num_layers=layers)
    for size in chunks:
        simulation.append(size)
    kept = simulation.layers[layer]
    assert cache.positions[0].tolist() == [kept, kept]
    assert kit.same((cache.k, cache.v), (k[:, :, kept], v[:, :, kept]))
    assert (
        cache.seen == sum(chunks) and cache.nbytes <= 2 * (cache.k.numel() + cache.v.numel()) * 4 + 64 * 2 * 16 * 4 * 2
    )


def test_one_chunk_is_one_call():
    k, v = kit.kv(1, 2, 300, 8)
    for options in (dict(budget=64), dict(budget=0.3), dict(budget=0.3, task="understanding")):
        want = kvops.lacache_compress(k, v, layer=2, num_layers=8, **options)
        cache = feed(kvops.Cache(kvops.LaCache(**options), layer=2, num_layers=8), k, v, [300])
        assert kit.same((cache.k, cache.v, cache.positions), want)


def test_a_fraction_is_one_of_the_tokens_seen():
    k, v = kit.kv(1, 1, 400, 8)
    cache, lengths = kvops.Cache(kvops.LaCache(0.25, span=3, overlap=1), layer=2, num_layers=8), []
    for t in range(400):
        cache.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        lengths.append(len(cache))
    assert lengths[:15] == [*range(1, 15), 15]  # at least the 14 that a ladder needs; overflows at 15 + 1
    assert all(abs(x - 0.25 * (t + 1)) <= 2 for t, x in enumerate(lengths) if t > 60)
    whole = feed(kvops.Cache(kvops.LaCache(0.25, compaction="whole"), layer=2, num_layers=8), k, v, [1] * 400)
    assert 40 < len(whole) <= 100


@pytest.mark.parametrize("budget, pads", [(24, (0, 7, 40)), (0.4, (3, 7, 0))])
def test_rows_of_a_padded_batch_keep_what_they_keep_alone(budget, pads):
    lengths = [90 - x for x in pads]
    k, v = kit.kv(3, 2, 90, 8)
    chunks = [25, 25, *[1] * 40]
    policy = kvops.LaCache(budget, span=3, overlap=1)
    together = kvops.Cache(policy, layer=5, num_layers=8)
    together.set_pads(torch.tensor(pads))
    feed(together, k, v, chunks)
    for row, (pad, n) in enumerate(zip(pads, lengths)):
        alone = kvops.Cache(policy, layer=5, num_layers=8)
        rest = pad
        for size in chunks:  # the same chunk sizes
            own = max(0, size - rest)
            rest = max(0, rest - size)
            if own:
                at = slice(pad + alone.seen, pad + alone.seen + own)
                alone.append(k[row : row + 1, :, at], v[row : row + 1, :, at])
        assert alone.seen == n
        first = int(together.pads[row])
        assert len(together) - first == len(alone)
        assert torch.equal(together.positions[row, :, first:] - pad, alone.positions[0])
        assert kit.same((together.k[row, :, first:], together.v[row, :, first:]), (alone.k[0], alone.v[0]))
        assert (together.k[row, :, :first] == 0).all()


def test_batch_operations_take_the_rows_plans_along():
    k, v = kit.kv(3, 2, 120, 8)
    cache = kvops.Cache(kvops.LaCache(24), layer=5, num_layers=8)
    cache.set_pads(torch.tensor([0, 30, 60]))
    feed(cache, k[:, :, :90], v[:, :, :90], [90])
    for change, rows in (
        (lambda x: x.reorder(torch.tensor([2, 0, 1])), [2, 0, 1]),
        (lambda x: x.select_rows(torch.tensor([1])), [1]),
        (lambda x: x.repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        changed, whole = copy.deepcopy(cache), copy.deepcopy(cache)
        change(changed)
        feed(changed, k[rows, :, 90:], v[rows, :, 90:], [1] * 30)
        feed(whole, k[:, :, 90:], v[:, :, 90:], [1] * 30)
        for i, row in enumerate(rows):
            a, b = int(changed.pads[i]), int(whole.pads[row])
            assert torch.equal(changed.positions[i, :, a:], whole.positions[row, :, b:])
            assert torch.equal(changed.k[i, :, a:], whole.k[row, :, b:])


def test_crop_back_to_the_last_eviction():
    k, v = kit.kv(1, 2, 80, 8)
    cache = feed(
        kvops.Cache(kvops.LaCache(40, span=3, overlap=1), layer=5, num_layers=8), k[:, :, :60], v[:, :, :60], [60]
    )
    want = copy.deepcopy(cache)
    cache.append(k[:, :, 60:61], v[:, :, 60:61])
    assert (len(cache), cache.seen) == (41, 61)  # a ladder frees two slots, so nothing was evicted
    cache.crop(60)
    for x in (cache, want):
        feed(x, k[:, :, 60:], v[:, :, 60:], [1] * 20)
    assert kit.same((cache.k, cache.v, cache.positions), (want.k, want.v, want.positions))
    with pytest.raises(ValueError, match="cannot crop"):
        cache.crop(30)


@pytest.mark.parametrize("compaction", COMPACTIONS)
@pytest.mark.parametrize("positions", ["original", "slots"])
def test_slots_that_the_caller_keeps(positions, compaction):
    """Other slots than those of the last plan, before and after the first one."""
    policy = kvops.LaCache(30, span=2, overlap=0, sinks=2, positions=positions, compaction=compaction)
    k, v = kit.kv(1, 2, 300, 16)
    for prompt in (20, 60):
        cache = kvops.Cache(policy, layer=1, num_layers=4)
        cache.append(k[:, :, :prompt], v[:, :, :prompt])
        cache.freeze()
        cache.append(k[:, :, prompt : prompt + 1], v[:, :, prompt : prompt + 1])
        cache.frozen = False
        kept = cache.positions[:, :, 3:-2]
        cache.keep(torch.arange(3, len(cache) - 2, device=k.device))
        assert torch.equal(cache.positions, kept)
        for at in range(prompt + 1, 300):
            assert len(cache) <= 30
            assert torch.equal(cache.v, gather_rows(v, cache.positions))
            cache.append(k[:, :, at : at + 1], v[:, :, at : at + 1])


def test_objects_refuse():
    with pytest.raises(
        ValueError, match=r"model of several layers, got 1; .* Cache\(policy, layer=..., num_layers=...\)"
    ):
        kvops.Cache(kvops.LaCache(40))
    with pytest.raises(ValueError, match="LaCache: budget .* at least 14 with 4 sinks, got 13"):
        kvops.Cache(kvops.LaCache(13), layer=0, num_layers=8)
    with pytest.raises(ValueError, match="expected one of"):
        kvops.Cache(kvops.LaCache(40, span=8, overlap=0), layer=0, num_layers=8)
    with pytest.raises(ValueError, match="task='understanding' needs span= .* as a stream's length is not known"):
        kvops.Cache(kvops.LaCache(40, task="understanding"), layer=0, num_layers=8)
    kvops.Cache(kvops.LaCache(40, task="understanding", span=2), layer=0, num_layers=8)
    kvops.Cache(kvops.LaCache(0.5, task="understanding"), layer=0, num_layers=8)
    for settings, message in (
        (dict(positions="absolute"), "positions must be one of 'slots', 'original', got 'absolute'"),
        (dict(pattern="x"), "pattern must be one of"),
        (dict(task="x"), "task must be one of"),
    ):
        with pytest.raises(ValueError, match="LaCache: " + message):
            kvops.LaCache(40, **settings)
    rope, streaming = kvops.Rope.of(8), kvops.StreamingLLM(40)
    for policy, options, error, message in (
        (
            streaming,
            dict(storage="rope"),
            ValueError,
            "storage must be one of .*'int8', 'fp8', got 'rope'",
        ),
        (streaming, dict(rope=torch.ones(4)), TypeError, "rope must be a kvops.Rope, got Tensor"),
        (streaming, dict(rope=rope, attend_before_compress=False), ValueError, "attend_before_compress=True"),
        (kvops.LaCache(40, positions="original"), dict(rope=rope), ValueError, "rope= needs .* positions='slots'"),
        (kvops.LAQ(40, stage1=streaming), dict(rope=rope), ValueError, "rope= needs .* positions='slots'"),
    ):
        with pytest.raises(error, match="Cache: .*" + message):
            kvops.Cache(policy, layer=0, num_layers=8, **options)


def test_repr_gives_the_settings_back():
    policy = kvops.LaCache(40, span=2, overlap=0, positions="original")
    assert repr(policy).startswith("LaCache(") and "positions='original'" in repr(policy)
    for setting in ("budget=40", "span=2", "overlap=0", "sinks=None"):
        assert setting in repr(policy)
    assert eval(repr(policy), vars(kvops)) == policy


# Slot positions


def rotated(x, rope, positions):
    """Rotate by the formula, in fp64."""
    angles = positions.double().unsqueeze(-1) * rope.inv_freq.double()
    tables = (f(angles) * rope.scaling for f in (torch.cos, torch.sin))
    cos, sin = (x if x.dim() == 2 else x.unsqueeze(1) for x in tables)
    return reference.rotate(x.double(), cos, sin, rope.interleaved)


def plain_attention(q, k, v, hidden=None):
    """Compute causal attention in fp64 with repeated KV heads. hidden: int [b], the number of padding slots."""
    t, n = q.shape[2], k.shape[2]
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    logits = q.double() @ k.mT / q.shape[-1] ** 0.5
    visible = torch.ones(t, n, dtype=torch.bool).tril(n - t)[None, None]
    if hidden is not None:
        visible = visible & (torch.arange(n) >= hidden[:, None])[:, None, None]
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)
    return weights @ v


ROPES = {
    "neox": lambda: kvops.Rope.of(16, device=torch.get_default_device()),
    "interleaved": lambda: kvops.Rope.of(16, interleaved=True, device=torch.get_default_device()),
    "partial, scaled": lambda: kvops.Rope(kvops.Rope.of(8, device=torch.get_default_device()).inv_freq, False, 1.3),
}
SLOTTED = {
    "lacache": kvops.LaCache(24, span=3, overlap=1),
    "streaming": kvops.StreamingLLM(20),
    "fraction": kvops.StreamingLLM(0.4),
}
CHUNKS = (50, 1, 1, 7, *[1] * 31)


@pytest.mark.parametrize("storage", ["pre_rope", "post_rope"])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("name", SLOTTED)
@pytest.mark.parametrize("given", [False, True], ids=["unrotated", "rotated"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_a_step_attends_at_slot_positions(name, rope, storage, given, padded):
    """Compared with keys rotated again at their slots in every step. given: q and k arrive already rotated."""
    rope, n = ROPES[rope](), sum(CHUNKS)
    q, k, v = (kit.randn(2, heads, n, d, seed=heads + d) for heads, d in ((4, 16), (2, 16), (2, 8)))
    pads = torch.tensor([0, 13]) if padded else None
    cache = kvops.Cache(SLOTTED[name], layer=5, num_layers=8, rope=rope, storage=storage)
    twin = kvops.Cache(SLOTTED[name], layer=5, num_layers=8)  # caches unrotated keys, which only move
    if padded:
        cache.set_pads(pads)
        twin.set_pads(pads)
    logical = torch.arange(n) + 1000 if pads is None else (torch.arange(n) - pads[:, None]).clamp(min=0) + 1000
    first = 0
    for size in CHUNKS:
        new, stored = slice(first, first + size), len(twin)
        k_all, v_all = twin.append(k[:, :, new], v[:, :, new])
        slots, hidden = torch.arange(stored + size), None
        if padded:
            hidden = twin._step_pads
            slots = (slots - hidden[:, None]).clamp(min=0)
        expected = plain_attention(
            rotated(q[:, :, new], rope, slots[..., stored:]), rotated(k_all, rope, slots), v_all, hidden
        )
        if given:
            at = logical[..., new]
            q_in, k_in = (rotated(x[:, :, new], rope, at).float() for x in (q, k))
            out = cache.attend(q_in, k_in, v[:, :, new], positions=at)
        else:
            out = cache.attend(q[:, :, new], k[:, :, new], v[:, :, new])
        torch.testing.assert_close(out.double(), expected, atol=2e-4, rtol=2e-4)
        assert torch.equal(cache.positions, twin.positions) and cache.seen == twin.seen
        assert (cache.pads is None) == (twin.pads is None)
        first += size
    assert len(cache) < n
    stored = (
        twin.k.double()
        if storage == "pre_rope"
        else rotated(twin.k, rope, cache._slots(len(twin), twin.pads, k.device))
    )
    if padded:
        stored = torch.where((torch.arange(len(twin)) >= twin.pads[:, None])[:, None, :, None], stored, cache.k)
    torch.testing.assert_close(cache.k.double(), stored, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("storage", ["pre_rope", "post_rope"])
@pytest.mark.parametrize("name", SLOTTED)
def test_frozen_decode_attends_at_slot_positions(name, storage):
    """The prompt's kept tokens stay at their slots, and new tokens take the following ones, without a limit."""
    rope = ROPES["neox"]()
    q, k, v = (kit.randn(2, heads, 90, 16, seed=heads) for heads in (4, 2, 2))
    cache = kvops.Cache(SLOTTED[name], layer=5, num_layers=8, rope=rope, storage=storage)
    cache.attend(*(x[:, :, :50] for x in (q, k, v)))
    kept = cache.positions
    assert kept.shape[2] < 30
    cache.freeze()
    for first, last in [(50, 60), *((i, i + 1) for i in range(60, 90))]:
        new = torch.arange(50, last).expand(2, 2, -1)
        at = torch.cat((kept, new), 2).unsqueeze(-1).expand(-1, -1, -1, 16)
        slots = torch.arange(at.shape[2])
        expected = plain_attention(
            rotated(q[:, :, first:last], rope, slots[first - last :]),
            rotated(k.gather(2, at), rope, slots),
            v.gather(2, at),
        )
        out = cache.attend(*(x[:, :, first:last] for x in (q, k, v)))
        torch.testing.assert_close(out.double(), expected, atol=2e-4, rtol=2e-4)
        assert torch.equal(cache.positions, at[..., 0]) and cache.seen == last


@pytest.mark.parametrize("storage", ["pre_rope", "post_rope"])
def test_a_first_prefill_is_exact(storage):
    """Where slots equal positions nothing is rotated: the same bits as without slots, in half precision too."""
    for dtype in kit.DTYPES:
        rope = kvops.Rope(ROPES["neox"]().inv_freq, dtype=dtype)
        q, k, v = (kit.randn(1, heads, 70, 16, seed=heads).to(dtype) for heads in (4, 2, 2))
        cache = kvops.Cache(kvops.LaCache(24), layer=5, num_layers=8, rope=rope, storage=storage)
        out = cache.attend(q, k, v, positions=torch.arange(70))
        assert torch.equal(out, kvops.Cache(kvops.Full()).attend(q, k, v))


def test_rounded_cosines_are_divided_by():
    """bf16 models round cosines and sines: undoing their rotation restores the keys to within the keys' rounding."""
    rope = kvops.Rope(ROPES["neox"]().inv_freq, dtype=torch.bfloat16)
    k, at = kit.randn(1, 2, 300, 16), torch.arange(300) * 7
    cos, sin = (x.double() for x in rope.tables(at))
    turned = reference.rotate(k.double(), cos, sin, False).float()
    back = ops.rope_at_slots(turned, *rope.between(at, None))
    torch.testing.assert_close(back, k, atol=3e-6, rtol=3e-6)
    assert not torch.allclose(ops.rope_at_slots(turned, cos.float(), -sin.float()), k, atol=1e-4)
    cos, sin = rope.between(at, at)
    assert (cos == 1).all() and (sin == 0).all()


def test_a_step_has_two_halves():
    q, k, v = (kit.randn(1, heads, 60, 16, seed=heads) for heads in (4, 2, 2))
    rope = ROPES["neox"]()
    whole, halves = (kvops.Cache(kvops.LaCache(24), layer=5, num_layers=8, rope=rope) for _ in range(2))
    for new in (slice(0, 50), slice(50, 51)):
        q_new, k_new, v_new = (x[:, :, new] for x in (q, k, v))
        step = halves.append(k_new, v_new)
        with pytest.raises(RuntimeError, match="it stores the tokens, got none for the last"):
            halves.append(k_new, v_new)
        with pytest.raises(ValueError, match=r"q must be \[b, Hq, t, d\]"):
            halves.attention(q_new[..., :8], *step)
        with pytest.raises(ValueError, match=r"positions must be int64 \[\d+\] or \[1, \d+\], got torch.float32"):
            halves.attention(q_new, *step, positions=torch.zeros(3))
        assert torch.equal(halves.attention(q_new, *step), whole.attend(q_new, k_new, v_new))
    with pytest.raises(RuntimeError, match="expected one attention.. after each append"):
        halves.attention(q_new, *step)
    state = copy.deepcopy(whole)
    with pytest.raises(ValueError, match="scale must be positive"):
        whole.attend(q_new, k_new, v_new, scale=-1.0)
    assert kit.same((whole.k, whole.v, whole.positions), (state.k, state.v, state.positions)) and whole._due == 0
    with pytest.raises(TypeError, match="unexpected keyword argument 'positions'"):
        kvops.Cache(kvops.StreamingLLM(24)).attend(q, k, v, positions=torch.arange(60))


def test_memory_of_the_caller_is_not_held():
    rope = ROPES["neox"]()
    for storage in ("pre_rope", "post_rope"):
        q, k, v = (kit.randn(1, heads, 20, 16, seed=heads) for heads in (4, 2, 2))
        cache = kvops.Cache(kvops.LaCache(24), layer=5, num_layers=8, rope=rope, storage=storage)
        cache.attend(q, k, v)
        before = cache.k.clone(), cache.v.clone()
        k.zero_(), v.zero_()
        assert kit.same((cache.k, cache.v), before) and cache.nbytes == 2 * 2 * 20 * 16 * 4
