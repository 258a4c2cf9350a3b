"""window_attention against its reference: FlashAttention's output and lse, and the window's scores."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops import ops
from kvops.ops import reference
from kvops.ops.rope import Rope

pytestmark = kit.every_device


def window(b, heads, group, w, n, d, dtype=torch.float32, *, dv=None, seed=0):
    q, k, visible = kit.window(b, heads, group, w, n, d, dtype, seed=seed)
    return q, k, kit.kv(b, heads, n, d, dtype, dv=dv, seed=seed + 2)[1], visible


def check(q, k, v, visible, **kwargs):
    """Check out, lse and scores by the error-ratio rule; the plain formula's out is rounded to q's dtype as well."""
    actual = ops.window_attention(q, k, v, visible, **kwargs)
    eager = reference.window_attention(q, k, v, visible, **kwargs, dtype=torch.float32)
    exact = reference.window_attention(q, k, v, visible, **kwargs)
    condition = kit.softmax_condition(q, k, **kwargs)
    out, lse, scores = actual
    assert out.dtype == q.dtype and all(x.is_contiguous() for x in actual)
    kit.assert_close(out.float(), eager[0].to(q.dtype).float(), exact[0], condition)
    infinite = exact[1].isinf()  # rows that see no key
    assert torch.equal(lse.isinf(), infinite) and (lse[infinite] < 0).all() and (out[infinite] == 0).all()
    kit.assert_close(*(x.masked_fill(infinite, 0) for x in (lse, eager[1], exact[1])), condition)
    kit.assert_close(scores, eager[2], exact[2], condition)
    return actual


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d", kit.HEAD_DIMS)
@pytest.mark.parametrize("w", [1, 9])
def test_dtypes_and_head_dims(dtype, d, w):
    check(*window(2, 2, 2, w, kit.size(131, 70), d, dtype))


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d, dv", [(8, 16), (16, 8), (24, 72), (128, 64), (192, 128), (40, 104)])
def test_head_dims_of_k_and_v_differ(dtype, d, dv):
    check(*window(1, 2, 2, 4, 60, d, dtype, dv=dv))


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 17])
@pytest.mark.parametrize("d", [64, pytest.param(120, marks=pytest.mark.only("cpu", "cuda"))])
@pytest.mark.parametrize("w", [1, 6])
def test_groups(group, d, w, dtype):
    check(*window(1, 2, group, w, 60, d, dtype))


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("w", [1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 64, 100, 256])
def test_window_sizes(w, dtype):
    check(*window(1, 1, 3, w, max(w, 60) + 7, 32, dtype))


@pytest.mark.parametrize("reduce", kit.REDUCES)
@pytest.mark.parametrize("group_reduce", kit.GROUP_REDUCES)
@pytest.mark.parametrize("group, w", [(4, 1), (3, 5), (2, 20), (20, 1)])
def test_reductions(reduce, group_reduce, group, w):
    q, k, v, _ = window(2, 2, group, w, 75, 40)
    visible = torch.stack([kit.causal(w, 75), kit.int32(*[0] * (w // 2), *[60] * (w - w // 2))])
    options = dict(reduce=reduce, group_reduce=group_reduce)
    for more in ({}, dict(softcap=3.0), dict(sink_logits=kit.randn(2 * group)), dict(starts=kit.int32(0, 11))):
        check(q, k, v, visible, **options, **more)


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("w", [1, 6])
def test_agrees_with_window_scores(dtype, w):
    """window_scores accepts the lse that window_attention returns."""
    q, k, v, visible = window(2, 2, 3, w, kit.size(4000, 500), 64, dtype)
    _, lse, scores = ops.window_attention(q, k, v, visible)
    with kvops.debug_checks():
        again = ops.window_scores(q, k, visible, lse=lse)
    torch.testing.assert_close(scores, again, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(scores, ops.window_scores(q, k, visible), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("group_reduce, rows", [("mean", 2), ("none", 6)])
@pytest.mark.parametrize("w, n", [(1, 4000), (6, 4000), (20, 90), (1, 0)])
def test_without_scores(dtype, group_reduce, rows, w, n):
    """The attention is the same; no scores are returned."""
    q, k, v, _ = window(2, 2, 3, w, n if n < 4000 else kit.size(4000, 500), 64, dtype)
    n = k.shape[2]
    visible = torch.stack((kit.causal(w, n), kit.int32(*[n // 2] * w))) if n else kit.int32(*[0] * w)
    k[1, :, n // 2 :] = v[1, :, n // 2 :] = float("nan")
    starts, tables = kit.int32(0, n // 9), Rope.of(64).tables(torch.arange(n))
    for more in ({}, dict(starts=starts, softcap=3.0), dict(zip(("cos", "sin"), tables), sink_logits=kit.randn(6))):
        options = dict(group_reduce=group_reduce, **more)
        out, lse, scores = check(q, k, v, visible, **options, scores=False)
        assert scores.shape == (2, rows, 0) and scores.dtype == torch.float32
        expected = ops.window_attention(q, k, v, visible, **options)
        if not (kit.SIMULATED or q.is_cuda):  # on a GPU the pass that computes logits may round sums differently
            assert kit.same((out, lse), expected[:2])


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize(
    "group, w, d", [(1, 1, 32), (3, 1, 72), (8, 1, 16), (9, 1, 40), (2, 6, 32), (3, 20, 72), (3, 20, 264)]
)
def test_key_bias(dtype, group, w, d):
    """Of any strides, with every option but a softcap; biases of 0 change no bit (no head dim of Hopper's kernels)."""
    n = 150
    q, k, v, visible = window(2, 2, group, w, n, d, dtype)
    bias = 3 * kit.randn(2, n, 2, seed=9).transpose(1, 2)
    for more in (
        {},
        dict(reduce="max", group_reduce="max"),
        dict(reduce="mean", group_reduce="none", starts=kit.int32(0, 11), scale=0.3),
        dict(sink_logits=kit.randn(2 * group), visible=torch.stack((visible, kit.int32(*[70] * w)))),
    ):
        limits = more.pop("visible", visible)
        check(q, k, v, limits, key_bias=bias, **more)
        none = ops.window_attention(q, k, v, limits, key_bias=torch.zeros_like(bias), **more)
        assert kit.same(none, ops.window_attention(q, k, v, limits, **more))
    cos, sin = Rope.of(d).tables(torch.arange(n))
    found = ops.window_attention(q, k, v, visible, cos=cos, sin=sin, key_bias=bias)
    turned = ops.rope_at_slots(k, cos, sin)
    assert kit.same(found, ops.window_attention(q, turned, v, visible, key_bias=bias))


def int8(k, v):
    """Return k and v rounded, with their scales, by the names of the arguments."""
    return dict(zip(("k", "k_scale", "v", "v_scale"), (*kvops.quantize_rows(k), *kvops.quantize_rows(v))))


@pytest.mark.parametrize(
    "group, w, d, dv",
    [
        *((1, 1, 32, 48), (3, 1, 80, 64), (8, 1, 16, 16)),
        *((4, 1, 64, 128), (7, 1, 128, 64)),  # on tiles
        *((9, 1, 48, 80), (2, 6, 32, 32), (3, 20, 80, 48), (3, 5, 272, 96)),
    ],
)
def test_int8(group, w, d, dv):
    """With every option but RoPE; scales of any strides. Scales of 1 give what bf16 rows give."""
    n = 150
    q, k, v, visible = window(2, 2, group, w, n, d, torch.bfloat16, dv=dv)
    sizes = torch.exp(2 * kit.randn(2, 2, n, 1, seed=8)).bfloat16()
    rows = int8(k * sizes, v * sizes.flip(2))
    rows |= {x: rows[x].transpose(1, 2).contiguous().transpose(1, 2) for x in ("k_scale", "v_scale")}
    assert rows["k_scale"].amax() > 9 * rows["k_scale"].amin()
    for more in (
        {},
        dict(reduce="max", group_reduce="max", softcap=3.0),
        dict(reduce="mean", group_reduce="none", starts=kit.int32(0, 11), scale=0.03),
        dict(sink_logits=kit.randn(2 * group), visible=torch.stack((visible, kit.int32(*[70] * w)))),
        dict(key_bias=3 * kit.randn(2, 2, n, seed=9), scale=0.1),
    ):
        check(q, **rows, **{"visible": visible} | more)
    one = torch.ones(2, 2, n)
    tens = {x: (rows[x] % 10).contiguous() for x in ("k", "v")}
    found = ops.window_attention(q, **tens, visible=visible, k_scale=one, v_scale=one)
    exact = ops.window_attention(q, *(x.bfloat16() for x in tens.values()), visible)
    if w == 1 and q.device.type == "cpu" and not kit.SIMULATED:  # a decode step adds channels in another order
        torch.testing.assert_close(found, exact, rtol=1e-2, atol=1e-4)
    else:
        assert kit.same(found, exact)


def test_every_int8_number():
    """-128 too, which quantize_rows does not use, in every lane of a register."""
    codes = torch.arange(256, device="cpu").to(torch.uint8)
    k = torch.stack([codes.roll(i) for i in range(64)]).view(torch.int8).view(1, 1, 64, 256)
    one, q = torch.ones(1, 1, 64), torch.eye(256).bfloat16()[None, None]
    logits = ops.window_scores(q, k, kit.int32(64).expand(256).contiguous(), k_scale=one, scale=1.0, score="dot",
                               reduce="max", group_reduce="none")  # fmt: skip
    assert torch.equal(logits[0, 0], k.float()[0, 0].amax(-1))
    for i in range(0, 64, 9):  # all of the row's weight is one token's
        hidden = torch.full((1, 1, 64), -torch.inf)
        hidden[..., i] = 0.0
        out, _, _ = ops.window_attention(q[:, :, :3], k, k, kit.int32(64, 64, 64), key_bias=hidden, k_scale=one,
                                         v_scale=0.5 * one)  # fmt: skip
        assert torch.equal(out[0, 0].float(), (k[0, 0, i].float() / 2).expand(3, -1))


@pytest.mark.parametrize("w", [1, 7])
def test_scales_of_unseen_slots(w):
    """They are not used, and those that are not finite leave a key out, or spoil its head's values, as rows do."""
    q, k, v, _ = window(2, 2, 3, w, 90, 32, torch.bfloat16)
    rows, visible, starts = int8(k, v), kit.int32(*[70] * w), kit.int32(20, 31)
    clean = ops.window_attention(q, **rows, visible=visible, starts=starts)
    for name in ("k_scale", "v_scale"):
        rows[name][:, :, 70:] = rows[name][0, :, :20] = rows[name][1, :, :31] = torch.nan
    assert kit.same(ops.window_attention(q, **rows, visible=visible, starts=starts), clean)
    rows["k_scale"][0, 1, 33] = torch.inf
    out, _, scores = ops.window_attention(q, **rows, visible=visible, starts=starts)
    assert scores[0, 1, 33].isnan() and out.isfinite().all() and kit.same(out[1], clean[0][1])
    capped = ops.window_attention(q, **rows, visible=visible, starts=starts, softcap=2.0)[2]
    assert capped[0, 1, 33].isnan() and capped.isnan().sum() == 1
    rows["v_scale"][1, 0, 40] = torch.nan
    spoiled = ~ops.window_attention(q, **rows, visible=visible, starts=starts)[0].isfinite()
    assert spoiled[1, :3].all() and not spoiled[0].any() and not spoiled[1, 3:].any()


@pytest.mark.parametrize("w", [1, 4])
def test_a_bias_of_log_m_counts_a_key_m_times(w):
    q, k, v, _ = window(2, 2, 2, w, 40, 32)
    times = torch.arange(40) % 3 + 1
    bias = times.log().expand(2, 2, 40)
    out, lse, scores = ops.window_attention(q, k, v, kit.int32(*[40] * w), key_bias=bias)
    copies = [x.repeat_interleave(times, 2) for x in (k, v)]
    want = ops.window_attention(q, *copies, kit.int32(*[int(times.sum())] * w))
    torch.testing.assert_close((out, lse), want[:2], rtol=1e-5, atol=1e-6)
    firsts = times.cumsum(0) - times
    torch.testing.assert_close(scores, want[2][:, :, firsts] * times, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("w", [1, 7])
def test_a_bias_that_is_not_finite_leaves_its_key_out(dtype, w):
    q, k, v, visible = window(1, 2, 2, w, 90, 32, dtype)
    bias = kit.randn(1, 2, 90)
    bias[0, 0, 5], bias[0, 0, 40], bias[0, 0, 41], bias[0, 1] = -torch.inf, torch.nan, torch.inf, -torch.inf
    out, lse, scores = check(q, k, v, visible, key_bias=bias)
    assert (out[:, 2:] == 0).all() and scores[0, 0, [5, 40, 41]].isnan().all()
    bias[0, 0, 60:] = torch.nan  # keys that no row sees
    few = kit.int32(*[60] * w)
    assert kit.same(ops.window_attention(q, k, v, few, key_bias=bias)[0][:, :2].isfinite(), out[:, :2].isfinite())


@pytest.mark.parametrize("layout", kit.LAYOUTS)
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("group, w, d", [(2, 1, 72), (2, 5, 72), (4, 1, 64), (3, 5, 96)])
def test_layouts_change_nothing(layout, dtype, group, w, d):
    q, k, v, visible = window(2, 2, group, w, 150, d, dtype)
    expected = ops.window_attention(q, k, v, visible)
    others = (kit.laid_out(q, layout), q.mT.contiguous().mT, torch.stack([q, q], -1)[..., 1])
    for other in others:
        assert kit.same(
            ops.window_attention(other, kit.laid_out(k, layout), kit.laid_out(v, layout), visible), expected
        )


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("w", [1, 8])
def test_limits(w, dtype):
    """Each row sees its visible keys: none, all, in any order. Keys that no row sees are not read."""
    n = 120
    q, k, v, _ = window(3, 2, 2, w, n, 24, dtype)
    limits = [[(i * 37 + row * 50) % (n - 9) for i in range(w)] for row in range(2)] + [[0] * w]
    visible = kit.int32(*sum(limits, [])).view(3, w)
    for x in (k, v):
        for row in range(3):
            x[row, :, max(limits[row]) :] = float("nan")
    for more in ({}, dict(reduce="mean"), dict(reduce="max", group_reduce="max"), dict(sink_logits=kit.randn(4))):
        out, lse, scores = check(q, k, v, visible, **more)
        assert (scores[2] == 0).all() and (out[2] == 0).all() and (lse[2] == -torch.inf).all()
    starts = kit.int32(0, 7, 5)
    for x in (k, v):
        for row, s in enumerate(starts.tolist()):
            x[row, :, :s] = float("nan")
    check(q, k, v, visible, starts=starts)


@given(
    data=st.data(),
    n=st.integers(0, 130),
    w=st.integers(1, 20),
    group=st.integers(1, 5),
    dtype=st.sampled_from(kit.DTYPES),
)
@kit.examples(80)
def test_any_limits(data, n, w, group, dtype):
    q, k, v, _ = window(2, 1, group, w, n, 16, dtype, seed=data.draw(st.integers(0, 2**31)))
    visible, options = kit.any_window(data, w, n, group)
    check(q, k, v, visible, **options)


@pytest.mark.parametrize("w", [1, 4])
def test_padded_rows_are_as_if_alone(w):
    q, k, v, visible = window(3, 2, 2, w, 100, 32, torch.bfloat16)
    starts = [0, 13, 60]
    out, lse, scores = ops.window_attention(q, k, v, visible, starts=kit.int32(*starts))
    for row, s in enumerate(starts):
        one = slice(row, row + 1)
        alone = ops.window_attention(q[one], k[one, :, s:], v[one, :, s:], visible - s)
        assert kit.same((out[one], lse[one], scores[one, :, s:].contiguous()), alone)
        assert (scores[row, :, :s] == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("w", [1, 7])
def test_a_key_that_is_not_finite_is_left_out(bad, dtype, w):
    n = 140
    q, k, v, visible = window(2, 2, 2, w, n, 32, dtype)
    clean = ops.window_attention(q, k, v, visible)
    k[0, 1, 20, 3] = bad
    k[0, 1, n - 1, 3] = bad  # only the last row sees it
    k[0, 1, 97] = bad  # inf - inf
    for options in ({}, dict(reduce="max"), dict(group_reduce="none"), dict(softcap=2.0)):
        check(q, k, v, visible, **options)
    now = ops.window_attention(q, k, v, visible)
    for before, after in zip(clean, now):
        assert after[0, : len(before[0]) // 2].equal(before[0, : len(before[0]) // 2]) and after[1].equal(before[1])
    k[0, 1] = bad  # a head without a usable key
    check(q, k, v, visible)
    check(q, k, v, visible, sink_logits=kit.randn(4))


def test_a_value_that_is_not_finite_stays_in_its_head():
    q, k, v, visible = window(2, 2, 2, 5, 60, 16)
    clean, lse, scores = ops.window_attention(q, k, v, visible)
    v[0, 1, 30, 3] = torch.nan
    out, *others = ops.window_attention(q, k, v, visible)
    assert kit.same(others, (lse, scores)) and out[0, 2:, :, 3].isnan().all()
    assert torch.equal(out[1], clean[1]) and torch.equal(out[0, :2], clean[0, :2])


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("w", [1, 5])
def test_large_logits(dtype, w):
    q, k, v, visible = window(1, 1, 2, w, 70, 32, dtype)
    q = q * torch.tensor([100.0, 10.0, 1.0, 0.1, 0.0]).to(dtype)[:w].view(w, 1)
    check(q, k, v, visible)
    check(q, k, v, visible, sink_logits=torch.tensor([300.0, -300.0]))


@pytest.mark.parametrize("w", [1, 3])
def test_many_splits(w):
    """More keys than one split holds, up to the maximum number of splits."""
    for n in (kit.size(7_000, 1_500), kit.size(130_000, 3_000)):
        check(*window(1, 1, 2, w, n, 16))


@kit.only("cuda", "simulator")
def test_many_heads():
    """More heads than a CUDA grid can have blocks in y; a head's results do not depend on it."""
    q, k, v, visible = window(7, kit.size(10_000, 300), 1, 2, 3, 8)
    out, lse, scores = check(q, k, v, visible)
    alone = ops.window_attention(q[3:4, :2], k[3:4, :2], v[3:4, :2], visible)
    assert kit.same(alone, [x[3:4, :2].contiguous() for x in (out, lse, scores)])


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("w", [1, 4])
def test_a_batch_changes_nothing(dtype, w):
    q, k, v, visible = window(3, 3, 2, w, kit.size(7000, 700), 32, dtype)
    together = ops.window_attention(q, k, v, visible)
    for b, h in ((0, 0), (1, 2), (2, 1)):
        own, heads, queries = slice(b, b + 1), slice(h, h + 1), slice(2 * h, 2 * h + 2)
        alone = ops.window_attention(q[own, queries], k[own, heads], v[own, heads], visible)
        expected = (together[0][own, queries], together[1][own, queries], together[2][own, heads])
        assert kit.same(alone, [x.contiguous() for x in expected])


@kit.only("simulator")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group, w", [(4, 1), (2, 12), (5, 24)])
def test_the_gpu_changes_nothing(monkeypatch, group, w, dtype):
    """Different numbers of multiprocessors and sizes of shared memory give the same bits."""
    inputs = window(1, 1, group, w, 1100, 16, dtype)
    results = []
    for gpu in kit.GPUS:
        monkeypatch.setenv("CUDASIM_DEVICE", gpu)
        results.append(ops.window_attention(*inputs))
    assert all(kit.same(x, results[0]) for x in results[1:])


@kit.only("cpu")
@pytest.mark.parametrize("heads, w, n", [(1, 1, 9000), (1, 6, 20000), (3, 4, 3100), (9, 2, 1100)])
def test_threads_change_nothing(heads, w, n):
    q, k, v, visible = window(1, heads, 2, w, n, 64)
    kit.assert_threads_change_nothing(lambda: ops.window_attention(q, k, v, visible))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_out_is_rounded_to_nearest(dtype):
    """Weights of one half produce midpoints of adjacent half-precision numbers; ties go to even. Sums must fit fp32."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    x = x[x.float().abs() < 2.0**126].float().sort().values
    pad = -len(x) % 8
    x = torch.cat([x, x.new_zeros(pad)])
    y = x.roll(-1)
    y[-pad - 1 :] = 0
    width = 512
    rows = [torch.cat([z, z.new_zeros(-len(z) % width)]).view(1, -1, 1, width).to(dtype) for z in (x, y)]
    v = torch.cat(rows, 2)  # [1, heads, 2, width]
    heads = v.shape[1]
    q, k = torch.zeros(1, heads, 1, 8, dtype=dtype), torch.zeros(1, heads, 2, 8, dtype=dtype)
    out, _, _ = ops.window_attention(q, k, v, kit.int32(2))
    expected = (v[:, :, :1].float() * 0.5 + v[:, :, 1:].float() * 0.5).to(dtype)
    tiny = torch.finfo(torch.float32).tiny * 2  # fp32 subnormals may be flushed
    usual = (v.float().abs().amax(2, keepdim=True) >= tiny) | (expected == 0)
    assert torch.equal(out[usual], expected[usual])


def test_empty():
    for b, heads, n in ((0, 2, 5), (2, 0, 5), (2, 2, 0)):
        q, k, v = torch.zeros(b, 2 * heads, 3, 8), torch.zeros(b, heads, n, 8), torch.ones(b, heads, n, 16)
        out, lse, scores = ops.window_attention(q, k, v, kit.int32(0, n, n))
        assert out.shape == (b, 2 * heads, 3, 16) and scores.shape == (b, heads, n)
        assert lse.shape == (b, 2 * heads, 3) and (n > 0 or ((out == 0).all() and (lse == -torch.inf).all()))
        assert ops.window_attention(q, k, v, kit.int32(0, n, n), group_reduce="none")[2].shape == (b, 2 * heads, n)


def test_bad_input():
    q, k, v, visible = window(1, 2, 2, 3, 64, 16)
    good = dict(q=q, k=k, v=v, visible=visible)
    for arguments, parts in (
        (dict(v=v[0]), ("window_attention", "v must be", r"\[2, 64, 16\]")),
        (dict(v=v.half()), ("v must have k's dtype torch.float32", "got torch.float16")),
        (dict(v=v[:, :, :9]), ("v must have k's batch, heads and tokens", r"\[1, 2, 9, 16\]")),
        (dict(v=v[..., :2]), ("head_dim of v", "got 2")),
        (dict(q=q[:, :3]), ("multiple of the KV heads 2", "got 3")),
        (dict(q=q[..., :8]), ("q must have k's batch and head_dim", r"\[1, 4, 3, 8\]")),
        (dict(q=q.half()), ("k must have q's dtype torch.float16", "got torch.float32")),
        (dict(q=torch.zeros(1, 4, 257, 16), visible=kit.causal(257, 64)), ("1 to 256 rows", "got 257")),
        (dict(visible=kit.int32(0, 65, 1)), (r"visible must lie in \[0, 64\]", "65")),
        (dict(starts=kit.int32(-1)), (r"starts must lie in \[0, 64\]", "-1")),
        (dict(reduce="none"), ("reduce must be 'sum', 'mean' or 'max'", "none")),
        (dict(sink_logits=torch.zeros(2)), ("sink_logits must be", r"float32 \[4\]")),
        (dict(key_bias=torch.zeros(1, 2, 63)), ("key_bias must be float32", r"\[1, 2, 64\]", r"\[1, 2, 63\]")),
        (dict(key_bias=torch.zeros(1, 4, 64)), ("key_bias must be float32", r"\[1, 2, 64\]", r"\[1, 4, 64\]")),
        (dict(key_bias=torch.zeros(1, 2, 64).half()), ("key_bias must be torch.float32", "torch.float16")),
        (dict(key_bias=torch.zeros(1, 2, 64), softcap=2.0), ("softcap must be 0 with key_bias, got 2",)),
        (dict(key_bias=torch.zeros(1, 2, 64), scale=1e-7), ("scale must lie in", "with key_bias")),
        (dict(k_scale=torch.ones(1, 2, 64)), ("k_scale must be None if k is torch.float32",)),
        (dict(v_scale=torch.ones(1, 2, 64)), ("v_scale must be None if k is torch.float32",)),
    ):
        with kvops.debug_checks(), kit.refuses(*parts):
            ops.window_attention(**(good | arguments))
    narrow = dict(q=q.bfloat16(), visible=visible, **int8(k, v))
    for arguments, parts in (
        (dict(k_scale=None), ("k_scale must be given if k is torch.int8, got None",)),
        (dict(v_scale=None), ("v_scale must be given if k is torch.int8, got None",)),
        (dict(k_scale=torch.ones(1, 2, 63)), ("k_scale must be float32", r"\[1, 2, 64\]", r"\[1, 2, 63\]")),
        (dict(v_scale=torch.ones(1, 2, 64).half()), ("v_scale must be torch.float32", "torch.float16")),
        (dict(q=q), ("q must be torch.bfloat16 with int8 keys, k torch.int8", "got torch.float32")),
        (dict(v=v), ("v must have k's dtype torch.int8", "got torch.float32")),
        (dict(cos=torch.ones(64, 8), sin=torch.ones(64, 8)), ("cos and sin must be None if k is torch.int8",)),
    ):
        with kit.refuses("window_attention", *parts):
            ops.window_attention(**(narrow | arguments))
    with kit.refuses("drop_scores: k must be float32, float16, bfloat16, .*, got torch.int8"):
        ops.drop_scores(narrow["q"], narrow["k"], narrow["v"], visible)
    with kit.refuses("v must be a torch.Tensor", kind=TypeError):
        ops.window_attention(q, k, None, visible)
    with kit.refuses("v requires grad"):
        ops.window_attention(q, k, v.clone().requires_grad_(), visible)


def tables(n, pairs, rows=None):
    """Return cosines and sines of n slots, with different positions per batch row if rows are given."""
    positions = torch.arange(n) + (0 if rows is None else 100 * torch.arange(rows).unsqueeze(1))
    return dict(zip(("cos", "sin"), Rope.of(2 * pairs).tables(positions)))


def check_turned(q, k, v, visible, *, cos, sin, interleaved=False, **options):
    """Compare with the reference, and bit for bit with a call on keys that are already rotated."""
    turned = ops.rope_at_slots(k, cos, sin, interleaved=interleaved)
    result = ops.window_attention(q, k, v, visible, cos=cos, sin=sin, interleaved=interleaved, **options)
    assert kit.same(result, ops.window_attention(q, turned, v, visible, **options))
    check(q, turned, v, visible, **options)
    exact = reference.window_attention(q, k, v, visible, cos=cos, sin=sin, interleaved=interleaved, **options)
    for x, y in zip(result, exact):  # its keys may be rounded differently
        size = y.nan_to_num(0, 0, 0).abs().max().item() if y.numel() else 0
        torch.testing.assert_close(x.double(), y, rtol=0.02, atol=0.02 * size, equal_nan=True)


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("w", [1, 9])
@pytest.mark.parametrize("d", kit.HEAD_DIMS)
def test_keys_turn_on_their_way(d, w, interleaved, dtype):
    inputs = window(2, 2, 2, w, kit.size(131, 70), d, dtype)
    check_turned(*inputs, **tables(inputs[1].shape[2], d // 2), interleaved=interleaved)


@given(
    data=st.data(),
    d=st.sampled_from((8, 16, 24, 64, 136, 264)),
    pairs=st.integers(1, 132),
    n=st.integers(0, 130),
    w=st.sampled_from((1, 1, 2, 20)),
    group=st.integers(1, 9),
    dtype=st.sampled_from(kit.DTYPES),
    layout=st.sampled_from(kit.LAYOUTS),
    interleaved=st.booleans(),
    rows=st.sampled_from((None, 2)),
)
@kit.examples(150)
def test_any_keys_turn_on_their_way(data, d, pairs, n, w, group, dtype, layout, interleaved, rows):
    """Partial rotation, tables per batch row, and all other options of a call."""
    q, k, v, _ = window(2, 2, group, w, n, d, dtype, dv=16, seed=data.draw(st.integers(0, 2**31)))
    visible, options = kit.any_window(data, w, n, 2 * group)
    options["scale"] = data.draw(st.sampled_from([None, 0.1]))
    angles = tables(n, min(pairs, d // 2), rows)
    k = kit.laid_out(k, layout)
    check_turned(q, k, v, visible, **angles, interleaved=interleaved, **options)


@pytest.mark.parametrize("w", [1, 3])
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_many_keys_turn_on_their_way(w, dtype):
    """More keys than a split holds and than a worker rotates at a time; tables with any strides."""
    n = kit.size(7000, 700)
    q, k, v, visible = window(2, 3, 4, w, n, 64, dtype)
    wide = tables(n, 40)
    angles = {name: x[:, 3:35] for name, x in wide.items()}
    turned = ops.rope_at_slots(k, **angles)
    for more in ({}, dict(starts=kit.int32(0, n // 3))):
        expected = ops.window_attention(q, turned, v, visible, **more)
        for count in (1, 2, 5):
            with kit.threads(count):
                assert kit.same(ops.window_attention(q, k, v, visible, **angles, **more), expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("w", [1, 8])
def test_slots_that_no_row_sees_do_not_turn(w, dtype, interleaved):
    """They and their cosines may be NaN. Visible keys that are not finite are left out."""
    q, k, v, _ = window(1, 2, 2, w, 120, 128, dtype)
    angles = tables(120, 64)
    visible = kit.int32(*[100] * w)
    clean = ops.window_attention(q, k, v, visible, **angles, interleaved=interleaved, starts=kit.int32(7))
    for x in (k[0].transpose(0, 1), v[0].transpose(0, 1), *angles.values()):
        x[:7] = x[100:] = torch.nan
    dirty = ops.window_attention(q, k, v, visible, **angles, interleaved=interleaved, starts=kit.int32(7))
    assert kit.same(dirty, clean)
    k[0, 1, 50, 3] = torch.inf
    check_turned(q, k, v, visible, **angles, interleaved=interleaved, starts=kit.int32(7))


def test_bad_tables():
    q, k, v, visible = window(2, 2, 2, 3, 20, 16)
    angles = tables(20, 8)
    cos, sin = angles.values()
    for arguments, parts in (
        (dict(cos=cos), ("window_attention", "cos and sin must be given together, got cos alone")),
        (dict(sin=sin), ("cos and sin must be given together, got sin alone",)),
        (dict(cos=cos.half(), sin=sin), ("cos must be torch.float32, got torch.float16",)),
        (dict(cos=cos[:19], sin=sin), (r"cos must be float32 \[20, pairs\] or \[2, 20, pairs\]", r"got \[19, 8\]")),
        (tables(20, 9), ("2 \\* pairs at most the head_dim 16", r"got \[20, 9\]")),
        (dict(cos=cos, sin=sin[:, :4]), (r"sin must have the shape of cos \[20, 8\], got \[20, 4\]",)),
        (dict(cos=cos.mT.contiguous().mT, sin=sin), ("cos must have a contiguous last dim, got stride 20",)),
    ):
        with kit.refuses(*parts):
            ops.window_attention(q, k, v, visible, **arguments)
    with kit.refuses("cos must be a torch.Tensor or None", kind=TypeError):
        ops.window_attention(q, k, v, visible, cos=[1.0], sin=sin)
    with kit.refuses("sin requires grad"):
        ops.window_attention(q, k, v, visible, cos=cos, sin=sin.clone().requires_grad_())


EXTREMES = {
    torch.float16: (7e3, 65504.0),
    torch.bfloat16: (7e4, 1e9, 1e18),
    torch.float32: (7e4, 1e9, 1e18),
}


@pytest.mark.parametrize("w", [1, 5, 20])
@pytest.mark.parametrize("dtype, size", [(dtype, size) for dtype in EXTREMES for size in EXTREMES[dtype]])
def test_the_largest_logits(dtype, size, w):
    """Their differences far exceed exp's range: a row's best keys share the weight, and all results are finite."""
    n, d, group = 70, 64, 3
    signs = torch.where(kit.randn(1, 2, n, d) < 0, -1.0, 1.0)
    signs[:, :, 5] = 1
    signs[:, :, 13] = signs[:, :, 50] = signs[:, :, 31]  # three equal keys, and their opposite
    signs[:, :, 40] = -signs[:, :, 31]
    negative = torch.ones(1, 2, n, d)
    negative[:, :, 9] = 0.5
    _, v = kit.kv(1, 2, n, d, dtype)
    visible = kit.causal(w, n)
    for pattern, like in ((signs, 31), (negative, 9)):
        k = (pattern * size).to(dtype)
        q = k[:, :, like : like + 1].repeat_interleave(group, 1).expand(-1, -1, w, -1).clone()
        q[:, 1] = k[:, 0, 5]  # one best key
        q[:, :1] *= -1
        q = -q if like == 9 else q  # and rows whose logits are all that far below 0
        for options in (
            {},
            dict(sink_logits=torch.tensor([1e9, -3.0, 1.0, 0.0, 1e38, 1e5])),
            dict(group_reduce="none", reduce="max"),
            dict(starts=kit.int32(3)),
        ):
            exact = reference.window_attention(q, k, v, visible, **options)
            out, lse, scores = ops.window_attention(q, k, v, visible, **options)
            assert torch.allclose(lse.double(), exact[1], rtol=1e-6)
            atol = 2 * torch.finfo(dtype).eps * v.abs().max().item()
            assert torch.allclose(out.double(), exact[0], rtol=1e-5, atol=atol)
            assert torch.allclose(scores.double(), exact[2], rtol=1e-5, atol=1e-5)
            again = ops.window_scores(q, k, visible, **options)
            assert torch.allclose(again.double(), exact[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("w", [1, 9])
def test_a_logit_that_the_scale_makes_infinite_is_left_out(w):
    """The products are finite, but overflow when multiplied by the scale."""
    q, k, v, visible = window(1, 1, 2, w, 60, 16)
    k[:, :, 7] = q[:, :1, 0] * 1e30
    k[:, :, 9] = -q[:, :1, 0] * 1e30
    out, lse, scores = ops.window_attention(q, k, v, visible, scale=1e10)
    assert scores[..., 7].isnan().all() and not scores[..., 8].isnan().any()
    assert lse.isfinite().all() and out.isfinite().all()
