"""ladder_compact_: equal to ladder_gather, but in place, with no other memory touched."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
from kit import same
from kvops import ops
from kvops.ops.ladder import PATTERNS, lacache_plan
from test_ladder_gather import PLAN, assert_turned, bad_layers, bad_plans, frequencies, ladder_plan, ladder_plans, moved

pytestmark = kit.every_device


def check(k, v, plan, layer, **rope):
    """Check that in place equals out of place bit for bit, in views of one storage, and later slots are unchanged."""
    expected = moved(k, v, plan, layer)
    if rope:
        expected = ops.ladder_gather(k, v, plan=plan, layer=layer, **rope)
        assert_turned(expected, k, v, plan, layer, **rope)
    kit.assert_in_place(lambda: ops.ladder_compact_(k, v, plan=plan, layer=layer, **rope), k, v, expected)


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d", kit.HEAD_DIMS)
def test_dtypes_and_head_dims(dtype, d):
    check(*kit.kv(2, 3, 90, d, dtype, dv=64), PLAN, 3)
    for interleaved in (False, True):
        check(*kit.kv(2, 3, 90, d, dtype, dv=64), PLAN, 3, inv_freq=frequencies(d // 2), interleaved=interleaved)


@pytest.mark.parametrize("layout", kit.LAYOUTS)
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_layouts(layout, dtype):
    check(*kit.kv(2, 3, 90, 48, dtype, layout, dv=80), PLAN, 7)
    check(*kit.kv(2, 3, 90, 48, dtype, layout, dv=80), PLAN, 7, inv_freq=frequencies(24))


@given(plan=ladder_plans(), data=st.data(), heads=st.integers(1, 3), count=st.integers(1, 5), pairs=st.integers(0, 8))
@kit.examples(60)
def test_any_plan(plan, data, heads, count, pairs):
    layer = data.draw(st.integers(0, plan.ladder.num_layers - 1))
    rope = dict(inv_freq=frequencies(pairs), interleaved=data.draw(st.booleans())) if pairs else {}
    with kit.threads(count):
        check(*kit.kv(2, heads, plan.n, 16, torch.bfloat16), plan, layer, **rope)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("budget", [20, 300, 799])
def test_prompts_over_the_budget(pattern, budget):
    plan = lacache_plan(1600, num_layers=4, budget=budget, span=1, overlap=0, sinks=2, pattern=pattern)
    for layer in range(4):
        check(*kit.kv(1, 2, 1600, 16, torch.float16), plan, layer)
        check(*kit.kv(1, 2, 1600, 16, torch.float16), plan, layer, inv_freq=frequencies(8))


def test_one_call_after_the_other():
    """As in a stream: some more tokens arrive, then the next ladders run."""
    k, v = kit.kv(1, 2, 600, 16, torch.bfloat16)
    caches = [x[:, :, :0] for x in (k, v)]
    expected, state = list(caches), None
    for first in range(0, 600, 25):
        new = [x[:, :, first : first + 25] for x in (k, v)]
        caches = [torch.cat(x, 2) for x in zip(caches, new)]
        plan = lacache_plan(caches[0].shape[2], num_layers=8, budget=60, state=state)
        state = plan.state
        expected = moved(*(torch.cat(x, 2) for x in zip(expected, new)), plan, 6)
        caches = [x.clone() for x in ops.ladder_compact_(*caches, plan=plan, layer=6)]
        assert same(caches, expected) and len(plan) <= state.cap


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("d, pairs", [(64, 1), (64, 3), (64, 16), (64, 31), (80, 36), (256, 64), (8, 4)])
def test_partial_rotation(dtype, interleaved, d, pairs):
    plan = ladder_plan(40, (2, 3))
    check(*kit.kv(1, 2, 40, d, dtype, dv=8), plan, 2, inv_freq=frequencies(pairs), interleaved=interleaved)


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d, dv", [(8, 1024), (16, 24), (520, 8), (2048, 72)])
def test_narrow_and_wide_rows(dtype, d, dv):
    plan = ladder_plan(50, (1, 6))
    check(*kit.kv(1, 2, 50, d, dtype, dv=dv), plan, 0)
    check(*kit.kv(1, 2, 50, d, dtype, dv=dv), plan, 0, inv_freq=frequencies(d // 2))


@pytest.mark.parametrize("count", [1, 2, 9, 40])
@pytest.mark.parametrize("turned", [False, True])
def test_lists_of_layers(count, turned):
    """Each layer has its own address, layout and offset."""
    inputs = [kit.kv(1, 2, 40, 16, torch.bfloat16, kit.LAYOUTS[i % 3], dv=24, seed=i) for i in range(count)]
    keys, values = (list(x) for x in zip(*inputs))
    layers = [(5 * i) % 8 for i in range(count)]
    plan = ladder_plan(40, (2, 3))
    inv_freq = frequencies(8) if turned else None
    behind = [x[:, :, len(plan) :].clone() for x in keys + values]
    expected = [ops.ladder_gather(*kv, plan=plan, layer=layer, inv_freq=inv_freq) for kv, layer in zip(inputs, layers)]
    k_out, v_out = ops.ladder_compact_(keys, values, plan=plan, layer=layers, inv_freq=inv_freq)
    assert len(k_out) == len(v_out) == count and all(map(same, zip(k_out, v_out), expected))
    assert same([x[:, :, len(plan) :] for x in keys + values], behind)


def test_more_layers_than_a_launch_takes():
    """On a GPU, layers with the same layout share a launch, up to a maximum number of layers."""
    stack = kit.randn(100, 2, 1, 1, 20, 8)
    keys, values = (list(x) for x in stack.unbind(1))
    plan, layers = ladder_plan(20, (2, 2)), [i % 8 for i in range(100)]
    expected = [moved(*kv, plan, layer) for kv, layer in zip(stack, layers)]
    assert all(map(same, zip(*ops.ladder_gather(keys, values, plan=plan, layer=layers)), expected))
    assert all(map(same, zip(*ops.ladder_compact_(keys, values, plan=plan, layer=layers)), expected))


@kit.only("cuda")
def test_many_heads():
    """More heads than a CUDA grid can have blocks in y. The slow simulator runs only ladder_gather's test."""
    check(*kit.kv(7, 10_000, 8, 8, torch.float16), ladder_plan(8, (1, 1)), 1)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("heads", [1, 8])
def test_repeatable(d, heads):
    """Results would differ between runs if a row were overwritten before it is read."""
    n = kit.size(1_500, 700)
    k, v = kit.kv(1, heads, n, d, torch.bfloat16)
    plan = lacache_plan(n, num_layers=8, budget=n - 3)
    for rope in ({}, dict(inv_freq=frequencies(d // 2))):
        kit.assert_repeatable(lambda: ops.ladder_compact_(k.clone(), v.clone(), plan=plan, layer=5, **rope))  # noqa: B023


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("cursor", [0, 3])
def test_all_rows_move_a_little(layer, cursor):
    """Each row moves a short distance, so chunks depend on one another; there are few chunks, or over forty."""
    for n, d in ((700, 64), (2700, 256)):
        plan = ladder_plan(n, (cursor, 1), layers=2, span=1, overlap=0)
        check(*kit.kv(1, 2, n, d, torch.bfloat16), plan, layer)
        check(*kit.kv(1, 2, n, d, torch.bfloat16), plan, layer, inv_freq=frequencies(32))


@kit.only("cpu", "cuda")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", kit.LAYOUTS)
@pytest.mark.parametrize("heads", [1, 2])
def test_large_moves_are_streamed_and_split_by_column(dtype, layout, heads):
    """Sources more than 4 MiB ahead use streaming stores; the threads split one head by columns."""
    plan = lacache_plan(40_000, num_layers=8, budget=9_000)
    for count in (1, 2, 5):
        with kit.threads(count):
            check(*kit.kv(1, heads, 40_000, 128, dtype, layout), plan, 4)
            check(*kit.kv(1, heads, 40_000, 128, dtype, layout), plan, 4, inv_freq=frequencies(64))


@pytest.mark.parametrize("b,heads,n", [(0, 2, 20), (1, 0, 20), (1, 2, 0), (1, 2, 1)])
def test_empty_and_one_row(b, heads, n):
    for rope in ({}, dict(inv_freq=frequencies(8))):
        check(*kit.kv(b, heads, n, 16), ladder_plan(n, *[(2, 2)] * (n == 20)), 0, **rope)


def test_a_plan_without_passes_changes_nothing():
    check(*kit.kv(1, 2, 40, 16), ladder_plan(40), 3, inv_freq=frequencies(8))


def test_k_and_v_may_be_slices_of_one_buffer():
    plan = ladder_plan(50, (1, 6))
    for both in (kit.randn(3, 2, 4, 50, 16).unbind(1), kit.randn(2, 4, 50, 40).split((16, 24), -1)):
        check(*both, plan, 4, inv_freq=frequencies(8))
    stack = kit.randn(4, 2, 1, 3, 50, 16)  # all layers in one
    expected = [moved(*kv, plan, 2 * i) for i, kv in enumerate(stack)]
    results = ops.ladder_compact_(*(list(x) for x in stack.unbind(1)), plan=plan, layer=[0, 2, 4, 6])
    assert all(map(same, zip(*results), expected))


def test_bad_input_changes_nothing():
    k, v = kit.kv(1, 2, 40, 16)
    plan, other = ladder_plan(40, (2, 3)), kit.kv(1, 2, 40, 16, seed=1)
    before = [x.clone() for x in (k, v, *other)]
    for encoded, parts in bad_plans():
        with kit.refuses("ladder_compact_", *parts):
            ops.ladder_compact_(k, v, plan=encoded, layer=3)
    for (keys, values, layer, options), parts in bad_layers(k, v):
        with kit.refuses("ladder_compact_", *parts):
            ops.ladder_compact_(keys, values, plan=plan, layer=layer, **options)
    buffer = torch.randn(1, 2, 45, 16)
    shared = "is written to and must share no memory with"
    for keys, values, layer, parts in (
        (k, k, 3, (shared,)),
        (buffer[:, :, :40], buffer[:, :, 5:], 3, (shared,)),
        ([k, other[0]], [v, v], [0, 1], (shared,)),
        ([k, k], [v, other[1]], [0, 1], (shared,)),
        ([k, other[0]], [v, other[1]], [0, 8], (r"layer must lie in \[0, 8\), got 8",)),
        ([k, other[0]], [v, other[1][:, :, :39]], [0, 1], ("v must have k's batch, heads and tokens",)),
        (k[:, :1].expand(-1, 2, -1, -1), v, 3, ("must not overlap itself",)),
        (k, v[:, :, :1].expand(-1, -1, 40, -1), 3, ("must not overlap itself",)),
    ):
        with kit.refuses("ladder_compact_", *parts):
            ops.ladder_compact_(keys, values, plan=plan, layer=layer)
    with kit.refuses(shared):
        ops.ladder_compact_(k, v, plan=plan, layer=3, inv_freq=k[0, 0, 0, :8])
    assert same((k, v, *other), before)
    with kit.refuses(r"k\[1\] requires grad"):
        ops.ladder_compact_([k, other[0].clone().requires_grad_()], [v, other[1]], plan=plan, layer=[3, 4])
    assert same((k, v, *other), before)
