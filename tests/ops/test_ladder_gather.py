"""ladder_gather against its reference: rows move bit for bit, rotated keys are correct to one rounding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
from kit import same
from kvops import ops
from kvops.ops import reference
from kvops.ops.ladder import PATTERNS, Ladder, LadderPlan, LadderState, lacache_plan
from kvops.ops.rope import Rope

pytestmark = kit.every_device


def ladder_plan(n: int, *passes: tuple[int, int], layers=8, span=2, overlap=1, pattern="paper") -> LadderPlan:
    """Return a plan. By default a ladder keeps 2 of 7 slots and frees 5."""
    return LadderPlan(Ladder(layers, span, overlap, pattern), n, passes, LadderState(n, 0))


@st.composite
def ladder_plans(draw, most=120):
    """Draw any ladder and any passes that fit, including plans that `lacache_plan` never makes."""
    layers = draw(st.integers(2, 40))
    span = draw(st.integers(1, layers - 1))
    ladder = Ladder(layers, span, draw(st.integers(0, span - 1)), draw(st.sampled_from(PATTERNS)))
    n = left = draw(st.integers(0, most))
    passes = []
    while left >= ladder.length and ladder.freed and len(passes) < 12 and draw(st.integers(0, 4)):
        cursor = draw(st.integers(0, left - ladder.length))
        count = draw(st.integers(1, (left - cursor) // ladder.length))
        passes.append((cursor, count))
        left -= ladder.freed * count
    return LadderPlan(ladder, n, tuple(passes), LadderState(n, 0))


def sources(plan: LadderPlan, layer: int) -> list[int]:
    """Return the kept slots, by removing the slots that each pass frees."""
    slots, length, offset = list(range(plan.n)), plan.ladder.length, plan.ladder.offset(layer)
    for cursor, count in plan.passes:
        thinned = enumerate(slots[cursor : cursor + count * length])
        slots[cursor : cursor + count * length] = [
            slot for i, slot in thinned if offset <= i % length < offset + plan.ladder.kept
        ]
    return slots


def moved(k, v, plan, layer):
    kept = torch.tensor(sources(plan, layer), dtype=torch.int64)
    return tuple(x[:, :, kept] for x in (k, v))


def pair_size(x, pairs, interleaved):
    """Return |x| + |y| of each channel's rotation pair."""
    ones = torch.ones(pairs, device=x.device)
    turns = [reference.rotate(x.abs().float(), ones, sine, interleaved) for sine in (ones, -ones)]
    return torch.maximum(*turns)


def assert_turned(result, k, v, plan, layer, inv_freq, interleaved=False):
    """Check that values and unrotated channels are bit-identical, and rotated keys correct to one rounding."""
    kept, values = moved(k, v, plan, layer)
    exact, _ = reference.ladder_gather(k, v, plan=plan, layer=layer, inv_freq=inv_freq, interleaved=interleaved)
    rotated = 2 * len(inv_freq)
    still = torch.tensor(sources(plan, layer), dtype=torch.int64) == torch.arange(len(plan))
    assert same((result[1],), (values,))
    assert same((result[0][..., rotated:], result[0][:, :, still]), (kept[..., rotated:], kept[:, :, still]))
    kit.assert_rounded_once(result[0], exact, pair_size(kept, len(inv_freq), interleaved))


def frequencies(pairs: int) -> torch.Tensor:
    return kit.on_device(Rope.of(2 * pairs).inv_freq)


PLAN = ladder_plan(90, (4, 5), (14, 3))  # keeps 50 slots; some move twice


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d", kit.HEAD_DIMS)
def test_dtypes_and_head_dims(dtype, d):
    k, v = kit.kv(2, 3, 90, d, dtype, dv=64)
    k_out, v_out = ops.ladder_gather(k, v, plan=PLAN, layer=3)
    assert k_out.is_contiguous() and v_out.is_contiguous()
    assert same((k_out, v_out), moved(k, v, PLAN, 3))
    for interleaved in (False, True):
        inv_freq = frequencies(d // 2)
        result = ops.ladder_gather(k, v, plan=PLAN, layer=3, inv_freq=inv_freq, interleaved=interleaved)
        assert_turned(result, k, v, PLAN, 3, inv_freq, interleaved)


@pytest.mark.parametrize("layout", kit.LAYOUTS)
@pytest.mark.parametrize("out_layout", kit.LAYOUTS)
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_layouts_and_out(layout, out_layout, dtype):
    k, v = kit.kv(2, 3, 90, 48, dtype, layout, dv=80)
    k[0, 0, :, 3] = float("nan")
    expected = moved(k, v, PLAN, 7)
    out = tuple(kit.laid_out(torch.full_like(x, 7.0), out_layout) for x in expected)
    versions = [x._version for x in out]
    result = ops.ladder_gather(k, v, plan=PLAN, layer=7, out=out)
    assert result[0] is out[0] and result[1] is out[1] and same(out, expected)
    assert all(x._version > before for x, before in zip(out, versions))
    k[0, 0, :, 3] = 1.0
    ops.ladder_gather(k, v, plan=PLAN, layer=7, inv_freq=frequencies(24), out=out)
    assert_turned(out, k, v, PLAN, 7, frequencies(24))


@given(plan=ladder_plans(), data=st.data(), pairs=st.integers(0, 8), interleaved=st.booleans())
@kit.examples(60)
def test_any_plan(plan, data, pairs, interleaved):
    layers = data.draw(st.lists(st.integers(0, plan.ladder.num_layers - 1), min_size=1, max_size=3))
    inputs = [kit.kv(1, 2, plan.n, 16, torch.bfloat16, seed=seed) for seed in range(len(layers))]
    keys, values = zip(*inputs)
    inv_freq = frequencies(pairs) if pairs else None
    results = zip(*ops.ladder_gather(keys, values, plan=plan, layer=layers, inv_freq=inv_freq, interleaved=interleaved))
    for layer, kv, result in zip(layers, inputs, results, strict=True):
        assert torch.equal(plan.indices(layer).cpu(), torch.tensor(sources(plan, layer), device="cpu").long())
        if pairs:
            assert_turned(result, *kv, plan, layer, inv_freq, interleaved)
        else:
            assert same(result, moved(*kv, plan, layer))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_prompts_far_over_the_budget(pattern):
    """Many passes thin the same slots repeatedly."""
    plan = lacache_plan(1600, num_layers=4, budget=20, span=1, overlap=0, sinks=2, pattern=pattern)
    assert len(plan.passes) > 20 and len(plan) <= 20
    k, v = kit.kv(1, 2, 1600, 16, torch.float16)
    for layer in range(4):
        assert same(ops.ladder_gather(k, v, plan=plan, layer=layer), moved(k, v, plan, layer))
        result = ops.ladder_gather(k, v, plan=plan.encoded, layer=layer, inv_freq=frequencies(8))
        assert_turned(result, k, v, plan, layer, frequencies(8))


def test_most_passes():
    """192 passes are allowed, and no more."""
    plan = ladder_plan(1200, *[(3, 1)] * 192)
    k, v = kit.kv(1, 1, 1200, 8)
    assert same(ops.ladder_gather(k, v, plan=plan, layer=5), moved(k, v, plan, 5))
    more = ladder_plan(1200, *[(3, 1)] * 193)
    with kit.refuses("at most 192 passes, got 193"):
        ops.ladder_gather(k, v, plan=more, layer=5)
    first, second = more.parts()
    halfway = ops.ladder_gather(k, v, plan=first, layer=5)
    assert same(ops.ladder_gather(*halfway, plan=second, layer=5), moved(k, v, more, 5))


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("d, pairs", [(64, 1), (64, 3), (64, 12), (64, 16), (64, 31), (80, 36), (256, 64), (8, 4)])
def test_partial_rotation(dtype, interleaved, d, pairs):
    """The rotated halves fill whole registers, or have any other number of channels."""
    k, v = kit.kv(1, 2, 40, d, dtype, dv=8)
    plan = ladder_plan(40, (2, 3))
    result = ops.ladder_gather(k, v, plan=plan, layer=2, inv_freq=frequencies(pairs), interleaved=interleaved)
    assert_turned(result, k, v, plan, 2, frequencies(pairs), interleaved)


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_turns_of_any_size(dtype, interleaved):
    """Up to 2^31 slots at one radian per slot: fp32 cannot hold the angle."""
    ladder = Ladder(1 << 20, 1, 0)
    plan = LadderPlan(ladder, (2047 << 20) + 10, ((0, 2047),), LadderState(0, 0))
    k, v = kit.kv(1, 1, 1, 16, dtype, dv=8)
    k, v = (x.expand(-1, -1, plan.n, -1) for x in (k, v))
    inv_freq = torch.tensor([1.0, 0.8, 0.1, 1 / 7, 1e-2, 1e-3, 1e-5, 1e-9])
    k_out, _ = ops.ladder_gather(k, v, plan=plan, layer=5, inv_freq=inv_freq, interleaved=interleaved)
    slots = torch.arange(len(plan))
    source = torch.where(slots < 2047, (slots << 20) + 5, slots + 2047 * ladder.freed)
    assert source[-1] - slots[-1] > 2**31 - 2**21
    angles = (slots - source).double().unsqueeze(-1) * inv_freq.double()
    exact = reference.rotate(k[:, :, : len(plan)].double(), angles.cos(), angles.sin(), interleaved)
    kit.assert_rounded_once(k_out, exact, pair_size(k[:, :, :1], 8, interleaved))


@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_values_that_are_not_finite(dtype):
    """Unrotated channels move unchanged; NaN or infinity stays in its pair; values that are too large overflow."""
    k, v = kit.kv(1, 1, 40, 16, dtype)
    plan = ladder_plan(40, (2, 3))
    largest = torch.finfo(dtype).max
    k[0, 0, :, 0], k[0, 0, :, 9], k[0, 0, :, 2] = float("nan"), float("inf"), largest
    k[0, 0, :, 10], k[0, 0, :, 3], k[0, 0, :, 11] = largest, 1e-6, -1e-7
    kept, values = moved(k, v, plan, 4)
    for interleaved in (False, True):
        result = ops.ladder_gather(k, v, plan=plan, layer=4, inv_freq=frequencies(8), interleaved=interleaved)
        exact, _ = reference.ladder_gather(k, v, plan=plan, layer=4, inv_freq=frequencies(8), interleaved=interleaved)
        assert same((result[0][:, :, :2], result[1]), (k[:, :, :2], values))
        turned, exact = result[0][:, :, 2:], exact[:, :, 2:]
        assert torch.equal(turned.isnan(), exact.isnan())
        finite, infinite = exact.abs() < 0.99 * largest, exact.abs() > 1.01 * largest
        size = pair_size(kept[:, :, 2:], 8, interleaved)
        kit.assert_rounded_once(turned[finite], exact[finite], size[finite])
        assert torch.equal(turned[infinite].double(), exact[infinite].sign() * torch.inf)


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d, dv", [(8, 1024), (16, 24), (520, 8), (2048, 72)])
def test_narrow_and_wide_rows(dtype, d, dv):
    k, v = kit.kv(1, 2, 50, d, dtype, dv=dv)
    plan = ladder_plan(50, (1, 6))
    assert same(ops.ladder_gather(k, v, plan=plan, layer=0), moved(k, v, plan, 0))
    result = ops.ladder_gather(k, v, plan=plan, layer=0, inv_freq=frequencies(d // 2))
    assert_turned(result, k, v, plan, 0, frequencies(d // 2))


@pytest.mark.parametrize("count", [1, 2, 9, 40])
def test_lists_of_layers(count):
    """Each layer has its own address, layout and offset."""
    inputs = [kit.kv(1, 2, 40, 16, torch.bfloat16, kit.LAYOUTS[i % 3], dv=24, seed=i) for i in range(count)]
    keys, values = (list(x) for x in zip(*inputs))
    layers = [(5 * i) % 8 for i in range(count)]
    plan = ladder_plan(40, (2, 3))
    expected = [moved(*kv, plan, layer) for kv, layer in zip(inputs, layers)]
    k_out, v_out = ops.ladder_gather(keys, values, plan=plan, layer=layers)
    assert len(k_out) == len(v_out) == count and all(map(same, zip(k_out, v_out), expected))
    alone = [
        ops.ladder_gather(*kv, plan=plan, layer=layer, inv_freq=frequencies(8)) for kv, layer in zip(inputs, layers)
    ]
    turned = ops.ladder_gather(keys, values, plan=plan, layer=layers, inv_freq=frequencies(8))
    assert all(map(same, zip(*turned), alone))
    out = [kit.laid_out(torch.full_like(x, 7.0), "slice") for x in k_out], [torch.full_like(x, 7.0) for x in v_out]
    result = ops.ladder_gather(keys, values, plan=plan, layer=layers, out=out)
    assert all(map(same, zip(*out), expected)) and result[0][0] is out[0][0]


@kit.only("cuda", "simulator")
def test_many_heads():
    """More heads than a CUDA grid can have blocks in y."""
    k, v = kit.kv(7, 10_000, 8, 8, torch.float16)
    plan = ladder_plan(8, (1, 1))
    assert same(ops.ladder_gather(k, v, plan=plan, layer=1), moved(k, v, plan, 1))


@kit.only("cpu", "cuda")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_large_outputs_are_streamed(dtype, layout):
    """Outputs of more than 16 MiB use streaming stores; no result depends on the number of threads."""
    k, v = kit.kv(1, 8, 9000, 128, dtype, layout)
    plan = lacache_plan(9000, num_layers=32, budget=6000)
    expected, inv_freq, turned = moved(k, v, plan, 20), frequencies(64), None
    for count in (1, 2, 5):
        with kit.threads(count):
            assert same(ops.ladder_gather(k, v, plan=plan, layer=20), expected)
            out = tuple(kit.laid_out(torch.zeros_like(x), layout) for x in expected)
            assert same(ops.ladder_gather(k, v, plan=plan, layer=20, out=out), expected)
            ops.ladder_gather(k, v, plan=plan, layer=20, inv_freq=inv_freq, out=out)
            turned = turned or [x.clone() for x in out]
            assert same(out, turned)
    assert_turned(turned, k, v, plan, 20, inv_freq)


@pytest.mark.parametrize("b,heads,n", [(0, 2, 20), (1, 0, 20), (1, 2, 0), (1, 2, 1)])
def test_empty_and_one_row(b, heads, n):
    k, v = kit.kv(b, heads, n, 16)
    plan = ladder_plan(n, *[(2, 2)] * (n == 20))
    for inv_freq in (None, frequencies(8)):
        assert same(ops.ladder_gather(k, v, plan=plan, layer=0, inv_freq=inv_freq), moved(k, v, plan, 0))


def bad_plans():
    """Yield invalid encoded plans, with parts of the error messages."""
    good = list(ladder_plan(40, (2, 3)).encoded)
    return [
        (good[:4], ("plan must be", "5 integers and 2 for each pass, got 4")),
        (good[:6], ("plan must be", "got 6")),
        ([-1, *good[1:]], ("plan's n must fit int32, got -1",)),
        ([2**31, *good[1:]], ("plan's n must fit int32, got 2147483648",)),
        ([40, 8, 9, 1, 0], ("0 <= overlap < span <= num_layers", "overlap 1, span 9, num_layers 8")),
        ([40, 8, 2, 2, 0], ("0 <= overlap < span <= num_layers", "overlap 2, span 2")),
        ([40, 8, 2, 1, 3], (r"pattern must be 0 \(paper\), 1 \(official\) or 2 \(short\), got 3",)),
        (
            [40, 8, 2, 1, 0, 34, 1],
            ("pass 0 of plan", "the 40 remaining slots", "got 1 ladders of 7 slots starting at slot 34"),
        ),
        ([40, 8, 2, 1, 0, 2, 3, 19, 1], ("pass 1 of plan", "the 25 remaining slots", "starting at slot 19")),
        ([40, 8, 2, 1, 0, 2**63 - 1, 1], ("pass 0 of plan", "starting at slot 9223372036854775807")),
        ([40, 8, 2, 1, 0, -1, 1], ("pass 0 of plan", "starting at slot -1")),
        ([40, 8, 2, 1, 0, 2, 0], ("pass 0 of plan", "got 0 ladders")),
        ([40, 8, 2, 1, 0, 2, 2**62], ("pass 0 of plan", "got 4611686018427387904 ladders")),
        ([39, *good[1:]], ("k must have the plan's 39 slots", r"got \[1, 2, 40, 16\]")),
    ]


def bad_layers(k, v):
    """Yield (k, v, layer, options) that both ladder operators refuse, with parts of the error messages."""
    inv_freq = torch.ones(8)
    return [
        ((k[0], v, 3, {}), ("k must be", r"\[2, 40, 16\]")),
        ((k, v.half(), 3, {}), ("v must have k's dtype",)),
        ((k, v[:, :, :20], 3, {}), ("v must have k's batch",)),
        (([], [], [], {}), ("k must hold at least one layer, got none",)),
        (([k], [v, v.clone()], [3], {}), ("k and v must have one tensor per layer, got 1 and 2",)),
        (([k], [v], [3, 4], {}), ("k and layer must have one entry per layer, got 1 and 2",)),
        (
            ([k, k.half()], [v, v.half()], [3, 4], {}),
            ("all layers must have one dtype, expected torch.float32, got torch.float16 in layer 1",),
        ),
        (
            ([k, k[..., :8].clone()], [v, v.clone()], [3, 4], {}),
            ("one shape", r"k \[1, 2, 40, 16\]", r"got \[1, 2, 40, 8\]", "layer 1"),
        ),
        ((k, v, 8, {}), (r"layer must lie in \[0, 8\), got 8",)),
        ((k, v, -1, {}), (r"layer must lie in \[0, 8\), got -1",)),
        ((k, v, 3, dict(inv_freq=inv_freq.double())), ("inv_freq must be torch.float32, got torch.float64",)),
        (
            (k, v, 3, dict(inv_freq=inv_freq[None])),
            (r"inv_freq must be a contiguous float32 \[pairs\]", r"got \[1, 8\]"),
        ),
        ((k, v, 3, dict(inv_freq=torch.ones(9))), ("2 \\* pairs at most the head_dim 16", r"got \[9\]")),
        ((k, v, 3, dict(inv_freq=inv_freq[:0])), ("inv_freq must be", r"got \[0\]")),
        ((k, v, 3, dict(inv_freq=torch.ones(16)[::2])), ("inv_freq must be a contiguous",)),
    ]


def test_bad_input_changes_nothing():
    k, v = kit.kv(1, 2, 40, 16)
    plan, m = ladder_plan(40, (2, 3)), 25
    out = (torch.full((1, 2, m, 16), 7.0), torch.full((1, 2, m, 16), 7.0))
    wide = torch.zeros(1, 2, 80, 16)
    before = [x.clone() for x in (k, v, *out)]
    for encoded, parts in bad_plans():
        for target in (None, out):
            with kit.refuses("ladder_gather", *parts):
                ops.ladder_gather(k, v, plan=encoded, layer=3, out=target)
            assert all(map(torch.equal, (k, v, *out), before))
    for (keys, values, layer, options), parts in bad_layers(k, v):
        with kit.refuses("ladder_gather", *parts):
            ops.ladder_gather(keys, values, plan=plan, layer=layer, **options)
    for (keys, values), target, parts in (
        ((k, v), (out[0][:, :, :9], out[1]), ("k_out must be", r"\[1, 2, 25, 16\], got \[1, 2, 9, 16\]")),
        ((k, v), (out[0], out[1][..., :8]), ("v_out must be", r"\[1, 2, 25, 16\], got \[1, 2, 25, 8\]")),
        ((k, v), (out[0].half(), out[1]), ("k_out must have k's dtype",)),
        ((k, v), ([], []), (r"out\[0\] must hold at least one layer, got none",)),
        ((k, v), ([out[0]] * 2, [out[1]]), ("one tensor for each of the 1 layers, got 2 and 1",)),
        ((k, v), (out[0], out[0]), ("_out is written to and must share no memory with",)),
        ((k, v), (k[:, :, :m], out[1]), ("_out is written to and must share no memory with",)),
        ((k, v), (out[0], k[:, :, m - 10 : 2 * m - 10]), ("_out is written to and must share no memory with",)),
        ((k, v), (out[0][:, :1].expand(-1, 2, -1, -1), out[1]), ("must not overlap itself",)),
        (
            (wide[:, :, :40], v),
            (wide[:, :, 39 : 39 + m], out[1]),
            ("_out is written to and must share no memory with",),
        ),
    ):
        with kit.refuses("ladder_gather", *parts):
            ops.ladder_gather(keys, values, plan=plan, layer=3, out=target)
        assert all(map(torch.equal, (k, v, *out), before))
    ops.ladder_gather(
        wide[:, :, :40], v, plan=plan, layer=3, out=(wide[:, :, 40 : 40 + m], out[1])
    )  # adjacent memory is allowed
    with kit.refuses("k must be a torch.Tensor", kind=TypeError):
        ops.ladder_gather([3], [v], plan=plan, layer=[3])
    with kit.refuses("requires grad"):
        ops.ladder_gather(k, v, plan=plan, layer=3, out=(out[0].requires_grad_(), out[1]))


@kit.only("cpu", "simulator")
def test_lazy_clones_are_read_without_a_copy():
    """A copy-on-write clone shares its memory until it is written to; reading must not trigger the copy."""
    k, v = kit.kv(1, 2, 40, 16)
    lazy = [torch._lazy_clone(x) for x in (k, v, frequencies(8))]
    ops.ladder_gather(*lazy[:2], plan=ladder_plan(40, (2, 3)), layer=3, inv_freq=lazy[2])
    assert all(torch._C._is_cow_tensor(x) for x in lazy)
