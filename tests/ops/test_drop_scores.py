"""drop_scores against its reference: how far the outputs of a window's rows move if a key is dropped."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops import ops
from kvops.ops import reference

pytestmark = kit.every_device

EPS = 8 * torch.finfo(torch.float32).eps


def window(b, heads, group, w, n, d, dtype=torch.float32, *, dv=None, seed=0):
    q, k, visible = kit.window(b, heads, group, w, n, d, dtype, seed=seed)
    return q, k, kit.kv(b, heads, n, d, dtype, dv=dv, seed=seed + 2)[1], visible


def rounding(k):
    """The relative error of the softmax weights beyond fp32's: tensor cores multiply 16-bit weights."""
    tensor_cores = bool(kit.SIMULATED or k.is_cuda)
    return {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}.get(k.dtype, 0.0) * tensor_cores


def allowed_error(q, k, v, visible, *, group_reduce="mean", epsilon=1e-6, **options):
    """Return the error that fp32 arithmetic may have, from the first-order errors of weights, outputs and distances.

    With a weight a of relative error r and g = a / (1 - a + epsilon), g has the relative error (1 + g) r. An output and
    a difference v - o have an error of eps max |v|, and a distance that is expanded one of eps (|v|^2 + |o|^2), or of
    2^-18 where outputs are two bf16 numbers. Rounded weights (`rounding`) are those of another softmax: 1 - a is off by
    as much as a, relatively, and an output by as much as the mean of |v - o|. fp16 weights are also off by 2^-25 of the
    largest.
    """
    sinks, options = options.pop("sink_logits", None), {"scale": None, "starts": None, "softcap": 0.0} | options
    if not k.numel():
        return reference.drop_scores(q, k, v, visible, group_reduce=group_reduce)
    logits, seen = reference.window_logits(q, k, visible, dtype=torch.float64, **options)
    weights, _ = reference.window_softmax(logits, seen, None, sinks)
    values = torch.where(seen.any(-2).unsqueeze(-1), v.double().unsqueeze(2), 0.0)
    outs = weights @ values
    gains = weights / (1 - weights + epsilon)
    distances = torch.cdist(outs, values.expand(-1, -1, outs.shape[2], -1, -1))
    relative = EPS * kit.softmax_condition(q, k, options["scale"])
    largest = values.norm(dim=-1).amax(-1)[..., None, None]
    off = EPS * largest + relative * (distances.amin(-1, keepdim=True) + (1 - weights.amax(-1, keepdim=True)) * largest)
    rounded = rounding(k)
    off = off + rounded * (weights * distances).sum(-1, keepdim=True)
    if rounded and k.dtype == torch.float16:
        off = off + 2.0**-25 * distances.sum(-1, keepdim=True)
    split = 2.0**-18 if k.dtype == torch.bfloat16 and bool(kit.SIMULATED or k.is_cuda) else 0.0
    terms = values.square().sum(-1).unsqueeze(-2) + outs.square().sum(-1, keepdim=True)
    expanded = (EPS + split) * terms * (weights < 0.26)
    relative = relative * (1 + gains) + 3 * rounded
    error = gains.square() * (2 * distances.square() * relative + 2 * distances * off + off**2 + expanded)
    return reference.window_reduce(error, seen, torch.ones_like(seen), "sum", group_reduce)


def check(q, k, v, visible, **options):
    scores = ops.drop_scores(q, k, v, visible, **options)
    exact = reference.drop_scores(q, k, v, visible, **options)
    assert scores.dtype == torch.float32 and scores.is_contiguous() and scores.shape == exact.shape
    assert torch.equal(scores.isnan(), exact.isnan())
    usable = k.isfinite().all(-1, keepdim=True)
    allowed = allowed_error(q, torch.where(usable, k, 0), v, visible, **options)
    if usable.all():
        wrong = (scores - exact).abs() > allowed + 1e-37
        assert not wrong.any(), f"{scores[wrong][:4]}, expected {exact[wrong][:4]} +- {allowed[wrong][:4]}"
    else:  # the other keys' weights are as if it had not been there
        torch.testing.assert_close(scores.double(), exact, rtol=1e-3 + 8 * rounding(k), atol=1e-6, equal_nan=True)
    return scores


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d", kit.HEAD_DIMS)
@pytest.mark.parametrize("w", [1, 9])
def test_dtypes_and_head_dims(dtype, d, w):
    check(*window(2, 2, 2, w, kit.size(131, 70), d, dtype))


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d, dv", [(8, 16), (16, 8), (24, 72), (128, 64), (192, 128), (40, 104), (64, 328), (512, 16)])
def test_head_dims_of_k_and_v_differ(dtype, d, dv):
    check(*window(1, 2, 2, 4, 60, d, dtype, dv=dv))


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 12, 17])
@pytest.mark.parametrize("w", [1, 6])
def test_groups(group, w, dtype):
    check(*window(1, 2, group, w, 60, 64, dtype))


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("w", [1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 100, 256])
def test_window_sizes(w, dtype):
    check(*window(1, 1, 3, w, max(w, 60) + 7, 32, dtype))


@pytest.mark.parametrize("group_reduce", kit.GROUP_REDUCES)
@pytest.mark.parametrize("group, w", [(4, 1), (3, 5), (2, 20), (20, 1)])
def test_reductions(group_reduce, group, w):
    q, k, v, _ = window(2, 2, group, w, 75, 40)
    visible = torch.stack([kit.causal(w, 75), kit.int32(*[0] * (w // 2), *[60] * (w - w // 2))])
    for more in ({}, dict(softcap=3.0), dict(sink_logits=kit.randn(2 * group)), dict(starts=kit.int32(0, 11))):
        check(q, k, v, visible, group_reduce=group_reduce, **more)


def dropped(q, k, v, j, scale=None):
    """Return the rows' outputs over all keys but j, in fp64."""
    kept = [i for i in range(k.shape[2]) if i != j]
    keys, values = (x[:, :, kept].double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return (q.double() @ keys.mT * scale).softmax(-1) @ values


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("sharp", [1.0, 3.0])
def test_a_score_is_what_dropping_the_key_does(dtype, sharp):
    """The formula against a second softmax without the key, also where one key has nearly all the weight."""
    q, k, v, _ = window(1, 2, 3, 4, 12, 32, dtype)
    q = q * sharp
    scores = ops.drop_scores(q, k, v, kit.int32(*[12] * 4), group_reduce="sum")
    out = reference.window_attention(q, k, v, kit.int32(*[12] * 4))[0]
    for j in range(12):
        moved = (dropped(q, k, v, j) - out).square().sum((2, 3)).view(1, 2, 3).sum(2)
        torch.testing.assert_close(scores[..., j].double(), moved, rtol=2e-3 * sharp + 8 * rounding(k), atol=1e-7)


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("logit", [8.0, 11.0, 13.0])
def test_a_key_with_nearly_all_the_weight(dtype, logit):
    """A sink: its own score is as large as its distance to the rest, though v - o is close to nothing."""
    n = 40
    q, k, v = torch.ones(1, 2, 3, 16, dtype=dtype), torch.zeros(1, 1, n, 16, dtype=dtype), kit.kv(1, 1, n, 16, dtype)[1]
    k[0, 0, 3] = logit / 4
    scores = check(q, k, v, kit.int32(n, n, n))
    out = reference.window_attention(q, k, v, kit.int32(n, n, n))[0]
    moved = (dropped(q, k, v, 3) - out).square().sum((2, 3)).mean().item()
    assert scores[0, 0, 3].item() == pytest.approx(moved, rel=0.1) and scores[0, 0].argmax() == 3


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("slot", [0, -1])
@pytest.mark.parametrize("shift", [0.0, 600.0])
def test_the_others_of_a_dominating_key(dtype, slot, shift):
    """Thousands of keys share the last 0.05 % of the weight; neither what comes first nor a shift of logits matters."""
    n, gap = (4000, 16.0) if not kit.SIMULATED else (400, 13.5)
    q, k = torch.ones(1, 1, 1, 16, dtype=dtype), torch.zeros(1, 1, n, 16, dtype=dtype)
    v = (kit.kv(1, 1, n, 64, dtype)[1] / 16 + 1).to(dtype)
    k[:] = shift / 4
    k[0, 0, slot] = (shift + gap) / 4
    score = ops.drop_scores(q, k, v, kit.int32(n))[0, 0, slot].item()
    exact = reference.drop_scores(q, k, v, kit.int32(n))[0, 0, slot].item()
    assert score == pytest.approx(exact, rel=0.1 + 8 * rounding(k))


def test_values_that_are_alike():
    """The rounding of 16-bit outputs would be larger than the differences."""
    for dtype in kit.DTYPES:
        q, k, v, visible = window(1, 2, 2, 5, 80, 32, dtype)
        v = (v / 16 + 1).to(dtype)
        check(q, k, v, visible)
        check(q, k, (v * 1e-3).to(dtype), visible)


def test_large_and_small_fp16_values():
    q, k, v, visible = window(1, 2, 2, 5, 80, 32, torch.float16)
    for size in (6e-5, 1e-3, 300.0, 6_000.0):
        check(q, k, (v * size).half(), visible)


def test_the_only_key_of_a_row_scores_nothing():
    q, k, v, _ = window(1, 2, 2, 3, 10, 16)
    assert (ops.drop_scores(q, k, v, kit.int32(1, 1, 0)) == 0).all()
    one_more = ops.drop_scores(q, k, v, kit.int32(1, 1, 2))
    assert (one_more[..., :2] > 0).all() and (one_more[..., 2:] == 0).all()


@pytest.mark.parametrize("layout", kit.LAYOUTS)
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("w", [1, 5])
def test_layouts_change_nothing(layout, dtype, w):
    q, k, v, visible = window(2, 2, 2, w, 150, 72, dtype)
    expected = ops.drop_scores(q, k, v, visible)
    for other in (kit.laid_out(q, layout), q.mT.contiguous().mT, torch.stack([q, q], -1)[..., 1]):
        assert kit.same(ops.drop_scores(other, kit.laid_out(k, layout), kit.laid_out(v, layout), visible), expected)


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("w", [1, 8])
def test_limits(w, dtype):
    """Each row sees its visible keys: none, all, in any order. Keys that no row sees are not read."""
    n = 120
    q, k, v, _ = window(3, 2, 2, w, n, 24, dtype)
    limits = [[(i * 37 + row * 50) % (n - 9) for i in range(w)] for row in range(2)] + [[0] * w]
    for x in (k, v):
        for row in range(3):
            x[row, :, max(limits[row]) :] = float("nan")
    visible = kit.int32(*sum(limits, [])).view(3, w)
    hidden = torch.arange(n) >= visible.amax(1)[:, None, None]
    clean = [torch.where(hidden.unsqueeze(-1), 0, x) for x in (k, v)]
    for starts in (None, kit.int32(0, 7, 5)):
        for more in ({}, dict(group_reduce="none"), dict(group_reduce="max"), dict(sink_logits=kit.randn(4))):
            scores = check(q, *clean, visible, starts=starts, **more)
            assert kit.same(ops.drop_scores(q, k, v, visible, starts=starts, **more), scores)
            assert (scores[2] == 0).all()


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
    del options["reduce"]
    check(q, k, v, visible, **options, epsilon=data.draw(st.sampled_from([1e-6, 1e-2, 1.0])))


@pytest.mark.parametrize("w", [1, 4])
def test_padded_rows_are_as_if_alone(w):
    q, k, v, visible = window(3, 2, 2, w, 100, 32, torch.bfloat16)
    starts = [0, 13, 60]
    scores = ops.drop_scores(q, k, v, visible, starts=kit.int32(*starts))
    for row, s in enumerate(starts):
        one = slice(row, row + 1)
        alone = ops.drop_scores(q[one], k[one, :, s:], v[one, :, s:], visible - s)
        assert kit.same(scores[one, :, s:].contiguous(), alone)
        assert (scores[row, :, :s] == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("w", [1, 7])
def test_a_key_that_is_not_finite_is_left_out(bad, dtype, w):
    n = 140
    q, k, v, visible = window(2, 2, 2, w, n, 32, dtype)
    clean = ops.drop_scores(q, k, v, visible)
    k[0, 1, 20, 3] = bad
    k[0, 1, n - 1, 3] = bad  # only the last row sees it
    k[0, 1, 97] = bad  # inf - inf
    for options in ({}, dict(group_reduce="none"), dict(group_reduce="max")):
        scores = check(q, k, v, visible, **options)
        assert scores[0].isnan().any(0).nonzero().flatten().tolist() == [20, 97, n - 1]
    now = ops.drop_scores(q, k, v, visible)
    assert kit.same(now[0, 0], clean[0, 0]) and kit.same(now[1], clean[1])


def test_a_value_that_is_not_finite_stays_in_its_head():
    q, k, v, visible = window(2, 2, 2, 5, 60, 16)
    clean = ops.drop_scores(q, k, v, visible)
    v[0, 1, 30, 3] = torch.nan
    scores = ops.drop_scores(q, k, v, visible)
    assert scores[0, 1].isnan().all() and kit.same(scores[0, 0], clean[0, 0]) and kit.same(scores[1], clean[1])


@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_large_logits(dtype):
    """Rows with one key each: no infinity, no NaN, and no score of their keys is below 0."""
    q, k, v, visible = window(1, 1, 2, 5, 70, 32, dtype)
    for size in (30, 1000):
        scores = ops.drop_scores(q * size, k, v, visible)
        assert scores.isfinite().all() and (scores >= 0).all()


@pytest.mark.parametrize("w", [1, 3])
@pytest.mark.parametrize("group_reduce", ["mean", "max"])
def test_many_splits(w, group_reduce):
    for n in (kit.size(7_000, 1_500), kit.size(130_000, 3_000)):
        check(*window(1, 1, 2, w, n, 16), group_reduce=group_reduce)


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("w", [1, 4])
def test_a_batch_changes_nothing(dtype, w):
    q, k, v, visible = window(3, 3, 2, w, kit.size(7000, 700), 32, dtype)
    together = ops.drop_scores(q, k, v, visible)
    for b, h in ((0, 0), (1, 2), (2, 1)):
        own, heads, queries = slice(b, b + 1), slice(h, h + 1), slice(2 * h, 2 * h + 2)
        alone = ops.drop_scores(q[own, queries], k[own, heads], v[own, heads], visible)
        assert kit.same(alone, together[own, heads].contiguous())


@kit.only("simulator")
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_rows_in_chunks(monkeypatch, dtype):
    """Rows that do not fit in shared memory together, and head dims of which 16 rows do not fit."""
    monkeypatch.setenv("CUDASIM_DEVICE", "rtx3090")
    check(*window(1, 2, 2, 3, 40, 1024, dtype))
    check(*window(1, 1, 2, 20, 40, 1016, dtype, dv=1024), group_reduce="none")
    check(*window(1, 1, 4, 100, 128, 64, dtype, dv=128))
    for group_reduce in ("max", "none"):
        check(*window(1, 1, 2, 200, 220, 64, dtype, dv=128), group_reduce=group_reduce)


@kit.only("cpu")
@pytest.mark.parametrize("heads, w, n", [(1, 1, 9000), (1, 6, 20000), (3, 4, 3100), (9, 2, 1100)])
def test_threads_change_nothing(heads, w, n):
    q, k, v, visible = window(1, heads, 2, w, n, 64)
    kit.assert_threads_change_nothing(lambda: ops.drop_scores(q, k, v, visible))


def test_empty():
    for b, heads, n in ((0, 2, 5), (2, 0, 5), (2, 2, 0)):
        q, k, v = torch.zeros(b, 2 * heads, 3, 8), torch.zeros(b, heads, n, 8), torch.ones(b, heads, n, 16)
        assert ops.drop_scores(q, k, v, kit.int32(0, n, n)).shape == (b, heads, n)
        assert ops.drop_scores(q, k, v, kit.int32(0, n, n), group_reduce="none").shape == (b, 2 * heads, n)


def test_bad_input():
    q, k, v, visible = window(1, 2, 2, 3, 64, 16)
    good = dict(q=q, k=k, v=v, visible=visible)
    for arguments, parts in (
        (dict(v=v[0]), ("drop_scores", "v must be", r"\[2, 64, 16\]")),
        (dict(v=v.half()), ("v must have k's dtype torch.float32", "got torch.float16")),
        (dict(v=v[:, :, :9]), ("v must have k's batch, heads and tokens", r"\[1, 2, 9, 16\]")),
        (dict(v=v[..., :2]), ("head_dim of v", "got 2")),
        (dict(q=q[:, :3]), ("multiple of the KV heads 2", "got 3")),
        (dict(q=q.half()), ("k must have q's dtype torch.float16", "got torch.float32")),
        (dict(q=torch.zeros(1, 4, 257, 16), visible=kit.causal(257, 64)), ("1 to 256 rows", "got 257")),
        (dict(visible=kit.int32(0, 65, 1)), (r"visible must lie in \[0, 64\]", "65")),
        (dict(starts=kit.int32(-1)), (r"starts must lie in \[0, 64\]", "-1")),
        (dict(group_reduce="median"), ("group_reduce must be", "median")),
        (dict(sink_logits=torch.zeros(2)), ("sink_logits must be", r"float32 \[4\]")),
        (dict(epsilon=0.0), (r"epsilon must lie in \[1e-7, 1\]", "got 0")),
        (dict(epsilon=2.0), (r"epsilon must lie in \[1e-7, 1\]", "got 2")),
        (dict(epsilon=float("nan")), (r"epsilon must lie in \[1e-7, 1\]", "got nan")),
        (dict(scale=0.0), ("scale must be positive", "got 0")),
    ):
        with kvops.debug_checks(), kit.refuses(*parts):
            ops.drop_scores(**good | arguments)
    for name, argument in good.items():
        with kit.refuses(f"{name} must be a torch.Tensor", kind=TypeError):
            ops.drop_scores(**good | {name: argument.tolist()})
    with kit.refuses("v requires grad"):
        ops.drop_scores(q, k, v.requires_grad_(), visible)
