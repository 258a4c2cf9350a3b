"""window_scores against its reference: LAQ Eq. 4, the observation window of SnapKV."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops import ops
from kvops.ops import reference

pytestmark = kit.every_device


def true_lse(q, k, visible, **kwargs):
    """Compute the log-sum-exp in fp32, as FlashAttention returns it."""
    kwargs = {x: y for x, y in kwargs.items() if x in ("scale", "starts", "softcap")}
    return reference.window_attention(q, k, k, visible, **kwargs)[1].float()


def check(q, k, visible, lse=None, **kwargs):
    actual = ops.window_scores(q, k, visible, lse=lse, **kwargs)
    eager = reference.window_scores(q, k, visible, lse=lse, **kwargs, dtype=torch.float32)
    exact = reference.window_scores(q, k, visible, lse=lse, **kwargs)
    if kwargs.get("score") == "dot":
        sizes = reference.window_scores(q.abs(), k.abs(), visible, **kwargs | {"softcap": 0.0})
        condition = kit.dot_condition(exact, sizes)
    else:
        condition = kit.softmax_condition(q, k, **kwargs)
    kit.assert_close(actual, eager, exact, condition)
    assert actual.is_contiguous()
    return actual


def check_both(q, k, visible, **kwargs):
    """Check with and without a given log-sum-exp."""
    check(q, k, visible, true_lse(q, k, visible, **kwargs), **kwargs)
    return check(q, k, visible, **kwargs)


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d", kit.HEAD_DIMS)
def test_dtypes_and_head_dims(dtype, d):
    check_both(*kit.window(2, 2, 2, 9, kit.size(131, 70), d, dtype))


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d", [8, 16, 24, 328, 512])
def test_narrow_and_wide_rows(dtype, d):
    check_both(*kit.window(1, 2, 2, 4, 40, d, dtype))


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 12])
def test_groups(group, dtype):
    check_both(*kit.window(1, 2, group, 6, 60, 64, dtype))


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("w", [1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 64, 100, 256])
def test_window_sizes(w, dtype):
    check_both(*kit.window(1, 1, 3, w, max(w, 60) + 7, 32, dtype))


@pytest.mark.parametrize("reduce", kit.REDUCES)
@pytest.mark.parametrize("group_reduce", kit.GROUP_REDUCES)
@pytest.mark.parametrize("group, w", [(4, 1), (3, 5), (2, 20)])
def test_reductions(reduce, group_reduce, group, w):
    q, k, _ = kit.window(2, 2, group, w, 75, 40)
    visible = torch.stack([kit.causal(w, 75), kit.int32(*[0] * (w // 2), *[60] * (w - w // 2))])
    options = dict(reduce=reduce, group_reduce=group_reduce)
    for more in ({}, dict(softcap=3.0), dict(sink_logits=kit.randn(2 * group)), dict(starts=kit.int32(0, 11))):
        check_both(q, k, visible, **options, **more)
    for more in ({}, dict(softcap=3.0), dict(scale=0.3), dict(starts=kit.int32(5, 60))):
        check(q, k, visible, score="dot", **options, **more)


@pytest.mark.parametrize("layout", kit.LAYOUTS)
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_layouts_change_nothing(layout, dtype):
    q, k, visible = kit.window(2, 2, 2, 5, 150, 72, dtype)
    lse = true_lse(q, k, visible)
    other = kit.laid_out(k, layout)
    for q_other in (
        kit.laid_out(q, layout),
        q.mT.contiguous().mT,
        torch.stack([q, q], -1)[..., 1],
        q.flip(2).contiguous().flip(2),
        torch.cat([q, q], 2)[:, :, :5],
    ):
        assert torch.equal(ops.window_scores(q_other, other, visible), ops.window_scores(q, k, visible))
        assert torch.equal(
            ops.window_scores(q_other, other, visible, lse=lse), ops.window_scores(q, k, visible, lse=lse)
        )
    one = q[:1, :1].expand_as(q)
    assert torch.equal(ops.window_scores(one, other, visible), ops.window_scores(one.contiguous(), k, visible))


def test_lse_of_any_strides():
    q, k, visible = kit.window(2, 2, 3, 6, 50, 32)
    whole = torch.full((2, 20, 6), 1e9)  # from a longer prompt, [b, n, Hq]
    lse = true_lse(q, k, visible)
    whole[:, 14:] = lse.mT
    expected = ops.window_scores(q, k, visible, lse=lse)
    for other in (whole[:, 14:].mT, lse.mT.contiguous().mT, torch.stack([lse, lse], -1)[..., 0]):
        assert torch.equal(ops.window_scores(q, k, visible, lse=other), expected)
    with kvops.debug_checks(), kit.refuses("lse must be"):
        ops.window_scores(q, k, visible, lse=whole[:, :6].mT)


@pytest.mark.parametrize("w", [1, 8])
def test_limits(w):
    """Each row sees its visible keys: none, all, in any order. A key that no row sees scores 0 and is not read."""
    n = 120
    q, k, _ = kit.window(3, 2, 2, w, n, 24)
    limits = [[(i * 37 + row * 50) % (n - 9) for i in range(w)] for row in range(2)] + [[0] * w]
    visible = kit.int32(*sum(limits, [])).view(3, w)
    k[..., max(map(max, limits)) :, :] = float("nan")
    for more in ({}, dict(reduce="mean"), dict(reduce="max", group_reduce="max"), dict(starts=kit.int32(3, 40, 5))):
        scores = check_both(q, k, visible, **more)
        assert (scores[2] == 0).all()
        for row in range(2):
            assert (scores[row, :, max(limits[row]) :] == 0).all()
        check(q, k, visible, score="dot", **more)


def row_weights(b, heads, w):
    """Factors from 0 to 1000, some of them 0, in memory whose order is [w, b, Hq]."""
    x = kit.randn(w, b, heads).abs() * torch.tensor([0.001, 0.1, 1.0, 1000.0])[torch.arange(w) % 4].view(-1, 1, 1)
    x[w // 2, 0] = 0.0
    return x.permute(1, 2, 0)


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("group, w", [(4, 1), (3, 5), (12, 1), (2, 40)])
def test_row_weights(group, w, dtype):
    q, k, visible = kit.window(2, 2, group, w, 95, 40, dtype)
    weights = row_weights(2, 2 * group, w)
    sinks, starts = kit.randn(2 * group), kit.int32(0, 11)
    for reduce in kit.REDUCES:
        for group_reduce in kit.GROUP_REDUCES:
            options = dict(reduce=reduce, group_reduce=group_reduce)
            check_both(q, k, visible, **options, row_weights=weights)
            with kvops.debug_checks():
                check_both(q, k, visible, **options, row_weights=weights, sink_logits=sinks, starts=starts)
            for lse in (None, true_lse(q, k, visible)):
                one = ops.window_scores(q, k, visible, lse=lse, **options, row_weights=torch.ones_like(weights))
                assert torch.equal(one, ops.window_scores(q, k, visible, lse=lse, **options))
    none = ops.window_scores(q, k, visible, row_weights=torch.zeros_like(weights))
    assert (none == 0).all()


@pytest.mark.parametrize("group, w, d", [(4, 1, 48), (5, 1, 64), (3, 5, 32), (12, 1, 80), (2, 40, 272)])
def test_int8(group, w, d):
    """As the numbers that the rows stand for, with every option."""
    q, k, visible = kit.window(2, 2, group, w, 95, d, torch.bfloat16)
    k = k * torch.exp(2 * kit.randn(2, 2, 95, 1, seed=8)).bfloat16()
    rows, k_scale = kvops.quantize_rows(k)
    for more in (
        {},
        dict(reduce="max", group_reduce="none", softcap=2.0),
        dict(reduce="mean", group_reduce="max", starts=kit.int32(0, 11), sink_logits=kit.randn(2 * group)),
        dict(score="dot", scale=0.1),
        dict(row_weights=row_weights(2, 2 * group, w), scale=0.05),
    ):
        check(q, rows, visible, k_scale=k_scale, **more)
    lse = reference.window_attention(q, rows, rows, visible, k_scale=k_scale, v_scale=k_scale)[1].float()
    with kvops.debug_checks():
        check(q, rows, visible, k_scale=k_scale, lse=lse)
    with kit.refuses("window_scores: k_scale must be given if k is torch.int8, got None"):
        ops.window_scores(q, rows, visible)
    with kit.refuses("window_scores: k_scale must be None if k is torch.bfloat16, got a tensor"):
        ops.window_scores(q, k, visible, k_scale=k_scale)


def test_row_weights_with_large_logits_and_what_is_not_finite():
    q, k, visible = kit.window(1, 1, 2, 5, 70, 32)
    q = q * torch.tensor([1000.0, 10.0, 1.0, 0.1, 0.0]).view(5, 1)
    weights = row_weights(1, 2, 5)
    check(q, k, visible, row_weights=weights)
    check(q, k, visible, row_weights=weights, reduce="max", group_reduce="max")
    k[:, :, 20, 3] = torch.inf
    scores = check(q, k, visible, row_weights=weights)
    assert scores.isnan().sum() == 1  # also in the row that does not count


@given(
    data=st.data(),
    n=st.integers(0, 130),
    w=st.integers(1, 20),
    group=st.integers(1, 5),
    dtype=st.sampled_from(kit.DTYPES),
)
@kit.examples(80)
def test_any_limits(data, n, w, group, dtype):
    q, k, _ = kit.window(2, 1, group, w, n, 16, dtype, seed=data.draw(st.integers(0, 2**31)))
    visible, options = kit.any_window(data, w, n, group)
    check_both(q, k, visible, **options)
    options.pop("sink_logits")
    check(q, k, visible, score="dot", **options)


def test_padded_rows_score_as_if_alone():
    q, k, visible = kit.window(3, 2, 2, 4, 100, 32, torch.bfloat16)
    starts = [0, 13, 60]
    scores = ops.window_scores(q, k, visible, starts=kit.int32(*starts))
    for row, s in enumerate(starts):
        alone = ops.window_scores(q[row : row + 1], k[row : row + 1, :, s:], visible - s)
        assert torch.equal(scores[row, :, s:], alone[0]) and (scores[row, :, :s] == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("w", [1, 7])
def test_what_is_not_finite_stays_where_it_is(bad, dtype, w):
    n = 140
    q, k, visible = kit.window(2, 2, 2, w, n, 32, dtype)
    clean = ops.window_scores(q, k, visible)
    k[0, 1, 20, 3] = bad
    k[0, 1, n - 1, 3] = bad  # only the last row sees it
    k[0, 1, 97] = bad  # inf - inf
    lse = true_lse(q, k, visible)
    for options in (
        {},
        dict(reduce="max"),
        dict(reduce="max", group_reduce="max"),
        dict(group_reduce="none"),
        dict(reduce="mean", group_reduce="max"),
    ):
        for score in (
            check(q, k, visible, **options),
            check(q, k, visible, lse, **options),
            check(q, k, visible, score="dot", **options),
        ):
            assert score[0].isnan().sum() == 3 * (2 if options.get("group_reduce") == "none" else 1)
    scores = ops.window_scores(q, k, visible)
    assert torch.equal(scores[1], clean[1]) and torch.equal(scores[0, 0], clean[0, 0])
    check(q, k, visible, softcap=2.0)  # softcap makes an infinity finite
    if w > 1:
        hidden = visible.clamp(max=n - 1)
        assert check(q, k, hidden)[0, 1, n - 1] == 0
    q[0, 2, 0] = bad  # a row with only NaN logits
    check(q, k, visible)


def test_rows_without_a_usable_key():
    q, k, visible = kit.window(1, 2, 2, 3, 20, 16)
    k[:, 0] = float("nan")
    for options in ({}, dict(sink_logits=kit.randn(4)), dict(reduce="max")):
        scores = check(q, k, visible, **options)
        assert scores[:, 0].isnan().all() and scores[:, 1].isfinite().all()


@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_large_logits(dtype):
    """One key outweighs all others by more than fp32 can represent; the rows' logits differ widely."""
    q, k, visible = kit.window(1, 1, 2, 5, 70, 32, dtype)
    q = q * torch.tensor([100.0, 10.0, 1.0, 0.1, 0.0]).to(dtype).view(5, 1)
    scores = check_both(q, k, visible)
    assert scores.isfinite().all()
    check_both(q, k, visible, sink_logits=torch.tensor([300.0, -300.0]))


def test_long_rows_keep_their_accuracy():
    n = kit.size(60_000, 3_000)
    q, k, visible = kit.window(1, 1, 2, 4, n, 16)
    check_both(q, k, visible)
    total = ops.window_scores(q, k, visible).double().sum().item()
    assert abs(total - 4) < 1e-5


@kit.only("cuda", "simulator")
def test_many_heads():
    """More heads than a CUDA grid can have blocks in y; a head's scores do not depend on it."""
    q, k, visible = kit.window(7, kit.size(10_000, 300), 1, 2, 3, 8)
    scores = check(q, k, visible)
    assert torch.equal(scores[3:4, :2], ops.window_scores(q[3:4, :2], k[3:4, :2], visible))


@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_a_batch_changes_nothing(dtype):
    q, k, visible = kit.window(3, 3, 2, 4, kit.size(7000, 700), 32, dtype)
    together = ops.window_scores(q, k, visible)
    for b, h in ((0, 0), (1, 2), (2, 1)):
        alone = ops.window_scores(q[b : b + 1, 2 * h : 2 * h + 2], k[b : b + 1, h : h + 1], visible)
        assert torch.equal(alone, together[b : b + 1, h : h + 1])


@kit.only("simulator")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("w", [1, 6])
def test_the_gpu_changes_nothing(monkeypatch, w, dtype):
    q, k, visible = kit.window(1, 1, 2, w, 1300, 16, dtype)
    results = []
    for gpu in kit.GPUS:
        monkeypatch.setenv("CUDASIM_DEVICE", gpu)
        results.append(ops.window_scores(q, k, visible))
    assert all(x.equal(results[0]) for x in results[1:])


@kit.only("cpu")
@pytest.mark.parametrize("heads, w, n", [(1, 1, 9000), (1, 6, 20000), (3, 4, 3100), (9, 2, 1100)])
def test_threads_change_nothing(heads, w, n):
    q, k, visible = kit.window(1, heads, 2, w, n, 64)
    lse = true_lse(q, k, visible)
    for options in ({}, {"lse": lse}):
        kit.assert_threads_change_nothing(lambda: ops.window_scores(q, k, visible, **options))  # noqa: B023


def test_empty():
    for b, heads, n in ((0, 2, 5), (2, 0, 5), (2, 2, 0)):
        q, k = torch.zeros(b, 2 * heads, 3, 8), torch.zeros(b, heads, n, 8)
        visible = kit.int32(0, n, n)
        assert ops.window_scores(q, k, visible).shape == (b, heads, n)
        assert ops.window_scores(q, k, visible, lse=torch.full((b, 2 * heads, 3), -torch.inf)).shape == (b, heads, n)
        assert ops.window_scores(q, k, visible, group_reduce="none").shape == (b, 2 * heads, n)


def test_bad_input():
    q, k, visible = kit.window(1, 2, 2, 3, 64, 16)
    good = dict(q=q, k=k, visible=visible)
    lse = true_lse(q, k, visible)
    for arguments, parts in (
        (dict(k=k[0]), ("window_scores", "k must be", r"\[2, 64, 16\]")),
        (dict(q=q[0]), ("q must be", r"\[4, 3, 16\]")),
        (dict(q=q.double()), ("q must be float32", "torch.float64")),
        (dict(q=q.half()), ("k must have q's dtype torch.float16", "got torch.float32")),
        (dict(q=q[..., :8]), ("q must have k's batch and head_dim", r"\[1, 4, 3, 8\]")),
        (dict(q=q[:, :3]), ("multiple of the KV heads 2", "got 3")),
        (dict(q=q[:, :0]), ("multiple of the KV heads 2", "got 0")),
        (dict(q=q[:, :, :0], visible=kit.int32()), ("1 to 256 rows", "got 0")),
        (dict(q=torch.zeros(1, 4, 257, 16), visible=kit.causal(257, 64)), ("1 to 256 rows", "got 257")),
        (dict(visible=visible.long()), ("visible must be torch.int32", "torch.int64")),
        (dict(visible=visible[:2]), ("visible must be a contiguous", r"\[2\]")),
        (dict(visible=visible.repeat(2, 1)), ("visible must be a contiguous", r"\[2, 3\]")),
        (dict(visible=kit.int32(0, 65, 1)), (r"visible must lie in \[0, 64\]", "65")),
        (dict(visible=kit.int32(0, -1, 1)), (r"visible must lie in \[0, 64\]", "-1")),
        (dict(starts=kit.int32(65)), (r"starts must lie in \[0, 64\]", "65")),
        (dict(starts=kit.int32(0, 0)), ("starts must be a contiguous", r"\[2\]")),
        (dict(sink_logits=torch.zeros(2)), ("sink_logits must be", r"float32 \[4\]", r"\[2\]")),
        (dict(sink_logits=torch.zeros(4).half()), ("sink_logits must be torch.float32", "torch.float16")),
        (dict(scale=0.0), ("scale must be positive",)),
        (dict(scale=math.nan), ("scale must be positive",)),
        (dict(scale=1e300), ("scale must be positive and a normal number in fp32, got 1e\\+300",)),
        (dict(scale=1e-300), ("scale must be positive and a normal number in fp32, got 1e-300",)),
        (dict(softcap=-1.0), ("softcap must be",)),
        (dict(softcap=1e-300), ("softcap must be 0", "normal number in fp32, got 1e-300")),
        (dict(softcap=1e300), ("softcap must be 0", "normal number in fp32, got 1e\\+300")),
        (dict(softcap=1e-30, scale=1e30), ("scale / softcap must be a normal number in fp32, got 1e\\+30 / 1e-30",)),
        (dict(score="cosine"), ("score must be 'softmax' or 'dot'", "cosine")),
        (dict(reduce="none"), ("reduce must be 'sum', 'mean' or 'max'", "none")),
        (dict(group_reduce="min"), ("group_reduce must be 'sum', 'mean', 'max' or 'none'", "min")),
        (dict(score="dot", lse=lse), ("apply to a softmax", "got lse")),
        (dict(score="dot", sink_logits=torch.zeros(4)), ("apply to a softmax", "got sink_logits")),
        (dict(score="dot", row_weights=torch.ones(1, 4, 3)), ("apply to a softmax", "got row_weights")),
        (dict(row_weights=torch.ones(1, 4, 2)), ("row_weights must be float32", r"\[1, 4, 3\]", r"\[1, 4, 2\]")),
        (dict(row_weights=torch.ones(4, 3)), ("row_weights must be float32", r"\[1, 4, 3\]", r"\[4, 3\]")),
        (dict(row_weights=torch.ones(1, 4, 3).half()), ("row_weights must be torch.float32", "torch.float16")),
        (dict(row_weights=torch.full((1, 4, 3), -1.0)), ("row_weights must be finite and at least 0, got -1",)),
        (dict(row_weights=torch.full((1, 4, 3), torch.inf)), ("row_weights must be finite and at least 0, got inf",)),
        (dict(row_weights=torch.full((1, 4, 3), torch.nan)), ("row_weights must be finite and at least 0, got nan",)),
        (dict(lse=lse + 0.05, row_weights=torch.ones(1, 4, 3)), ("lse must be the natural log",)),
        (dict(lse=lse[:, :, :2]), ("lse must be float32", r"\[1, 4, 3\]", r"\[1, 4, 2\]")),
        (dict(lse=lse[:, :2]), ("lse must be float32", r"\[1, 2, 3\]")),
        (dict(lse=lse.half()), ("lse must be torch.float32", "torch.float16")),
        (dict(lse=lse / math.log(2)), ("lse must be the natural log", "got an lse")),
        (dict(lse=true_lse(q, k, visible - 10)), ("exactly the keys that each row sees",)),
        (dict(lse=true_lse(q, k, visible, scale=1.0)), ("lse must be the natural log",)),
        (dict(lse=lse, starts=kit.int32(30)), ("lse must be the natural log",)),
        (dict(lse=lse + torch.inf), ("lse must be the natural log",)),
        (dict(lse=lse - torch.inf), ("lse must be the natural log",)),
        (dict(lse=lse + 0.05, group_reduce="none"), ("query head 0 of batch row 0", "add up to 3")),
        (dict(lse=lse + 0.05, reduce="mean", group_reduce="sum"), ("KV head 0 of batch row 0", "add up to 2")),
    ):
        with kvops.debug_checks(), kit.refuses(*parts):
            ops.window_scores(**(good | arguments))
    with kit.refuses("q must be a torch.Tensor", kind=TypeError):
        ops.window_scores(None, k, visible)
    with kit.refuses("k requires grad"):
        ops.window_scores(q, k.clone().requires_grad_(), visible)


def test_an_lse_beside_a_sink_that_takes_all():
    """What a row keeps is then less than the rounding of its weight."""
    q, k = torch.full((1, 1, 2, 16), -10.0), torch.full((1, 1, 1, 16), 10.0)
    visible, sinks = kit.int32(1, 1), torch.zeros(1)
    lse = true_lse(q, k, visible)
    for weights in (None, torch.full((1, 1, 2), 5.0)):
        with kvops.debug_checks():
            found = ops.window_scores(q, k, visible, lse=lse, sink_logits=sinks, row_weights=weights)
        assert (found < 1e-30).all()


def test_a_wrong_lse_is_told_from_a_right_one():
    """Totals are compared per KV head, with sinks and rows that see no key; NaN is ignored."""
    q, k, _ = kit.window(2, 2, 2, 4, 40, 16)
    visible = kit.int32(0, 20, 30, 40)
    sinks = kit.randn(4)
    lse = true_lse(q, k, visible)
    for options in (dict(), dict(reduce="mean"), dict(group_reduce="sum"), dict(group_reduce="none")):
        for more in (dict(), dict(sink_logits=sinks)):
            with kvops.debug_checks():
                ops.window_scores(q, k, visible, lse=lse, **options, **more)
                wrong = lse.clone()
                wrong[1, 3] += 0.3
                with kit.refuses("head 3" if options.get("group_reduce") == "none" else "head 1", "batch row 1"):
                    ops.window_scores(q, k, visible, lse=wrong, **options, **more)
                ops.window_scores(q, k, visible, lse=wrong, reduce="max", **more)
    k[1, 1, 7] = torch.nan
    with kvops.debug_checks():
        ops.window_scores(q, k, visible, lse=wrong)


@kit.only("cuda", "simulator")
def test_a_gpus_limits_are_not_looked_at():
    """Values outside [0, n] are clamped to it."""
    q, k, _ = kit.window(2, 2, 2, 3, 50, 16)
    bad = ops.window_scores(q, k, kit.int32(-5, 60, 2**31 - 1), starts=kit.int32(-7, 70))
    good = ops.window_scores(q, k, kit.int32(0, 50, 50), starts=kit.int32(0, 50))
    assert torch.equal(bad, good)
