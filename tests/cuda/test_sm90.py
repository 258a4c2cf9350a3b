"""The Hopper kernels (csrc/cuda/sm90) compared with the portable ones and the reference: on a Hopper GPU, and in a run
of simulated kernels, with wgmma, TMA and mbarriers simulated too. Elsewhere nothing here runs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops import ops
from kvops.ops import reference
from test_key_similarity import check as check_key_similarity


def missing() -> str:
    if kit.SIMULATED:
        return ""
    hopper = kvops.build_info()["cuda"]["sm90"]
    if not kit.HAS_CUDA or torch.cuda.get_device_capability() != (9, 0):
        return "needs a Hopper GPU"
    return "" if hopper["built"] else f"the Hopper kernels are not built: {hopper['why']}"


pytestmark = [
    kit.every_device,
    kit.only("cuda", "simulator"),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setenv("KVOPS_SM90", "1")
    monkeypatch.setenv("CUDASIM_DEVICE", "hopper")


def with_portable(op, *args, **options):
    """The results of the Hopper kernels and of the portable ones."""
    found = op(*args, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVOPS_SM90", "0")
        return found, op(*args, **options)


def true_lse(q, k, visible, starts=None, scale=None):
    return reference.window_attention(q, k, k, visible, starts=starts, scale=scale)[1].float()


def check(q, k, visible, *, served=True, **options):
    """Checks window_scores, with and without a given lse, against the reference. If `served`, the bits must differ from
    the portable kernel's; otherwise the portable kernel must have done the work."""
    lse = true_lse(q, k, visible, options.get("starts"), options.get("scale"))
    exact = reference.window_scores(q, k, visible, **options)
    eager = reference.window_scores(q, k, visible, **options, dtype=torch.float32)
    condition = kit.softmax_condition(q, k, **options)
    others = []
    for given_lse in (None, lse):
        actual, portable = with_portable(ops.window_scores, q, k, visible, lse=given_lse, **options)
        kit.assert_close(actual, eager, exact, condition)
        others.append(not torch.equal(kit.bits(actual), kit.bits(portable)))
    if served is not None:
        assert others == [served, served], "the wrong kernel"


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("group, w", [(4, 8), (4, 32), (2, 65), (5, 50)])
def test_dtypes_head_dims_and_rows(dtype, d, group, w):
    """One to four tiles of rows, not always full."""
    check(*kit.window(2, 2, group, w, kit.size(3000, 333), d, dtype))


@pytest.mark.parametrize("group, w, d", [(8, 64, 128), (3, 256, 64)])
def test_many_rows(group, w, d):
    check(*kit.window(1, 1, group, w, 300, d, torch.bfloat16))


@pytest.mark.parametrize("n", [64, 127, 128, 129, 255, 256, 257, 512, 1000])
def test_lengths(n):
    check(*kit.window(1, 3, 4, 32, n, 128, torch.bfloat16))


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("group_reduce", ["sum", "mean", "none"])
def test_reductions(reduce, group_reduce):
    q, k, _ = kit.window(2, 2, 3, 20, 275, 64, torch.float16)
    visible = torch.stack([kit.causal(20, 275), kit.int32(*[0] * 10, *[200] * 10)])
    options = dict(reduce=reduce, group_reduce=group_reduce)
    for more in ({}, dict(scale=0.3), dict(starts=kit.int32(0, 77)), dict(sink_logits=kit.randn(6))):
        check(q, k, visible, **options, **more)


def test_what_is_left_to_the_portable_kernels():
    for shape, options in (
        (dict(d=80), {}),
        (dict(dtype=torch.float32), {}),
        (dict(w=1), {}),
        (dict(), dict(softcap=5.0)),
        (dict(), dict(reduce="max", group_reduce="max")),
    ):
        dtype = shape.get("dtype", torch.bfloat16)
        q, k, visible = kit.window(1, 2, 4, shape.get("w", 8), 300, shape.get("d", 64), dtype)
        options = dict(options)
        given_lse = None if options.get("softcap") else true_lse(q, k, visible)
        found, portable = with_portable(ops.window_scores, q, k, visible, lse=given_lse, **options)
        assert torch.equal(found, portable)
    q, k, visible = kit.window(1, 2, 4, 8, 300, 64, torch.bfloat16)
    check(q, kit.unaligned(k, 3, 1), visible, served=False)  # addresses that TMA does not support
    found, portable = with_portable(ops.window_scores, q, k, visible, score="dot")
    assert torch.equal(found, portable)


@pytest.mark.parametrize("layout", kit.LAYOUTS)
def test_layouts_change_nothing(layout):
    q, k, visible = kit.window(2, 2, 2, 16, 300, 128, torch.bfloat16)
    expected = ops.window_scores(q, k, visible)
    other = kit.laid_out(k, layout)
    for q_other in (
        kit.laid_out(q, layout),
        q.mT.contiguous().mT,
        kit.unaligned(q, 3, 1),
        torch.cat([q, q], 2)[:, :, :16],
    ):
        assert torch.equal(ops.window_scores(q_other, other, visible), expected)
    one = ops.window_scores(q[:1, 2:], other[:1, 1:], visible)  # dims of size one, with any strides
    assert torch.equal(one, ops.window_scores(q[:1, 2:].contiguous(), k[:1, 1:].contiguous(), visible))


@given(data=st.data(), n=st.integers(1, 400), w=st.integers(2, 40), group=st.integers(1, 5))
@kit.examples(60)
def test_any_limits(data, n, w, group):
    q, k, _ = kit.window(2, 1, group, w, n, 64, torch.bfloat16, seed=data.draw(st.integers(0, 2**31)))
    limits = data.draw(st.lists(st.integers(0, n), min_size=2 * w, max_size=2 * w))
    starts = data.draw(st.none() | st.builds(kit.int32, st.integers(0, n), st.integers(0, n)))
    options = dict(
        reduce=data.draw(st.sampled_from(["sum", "mean"])),
        group_reduce=data.draw(st.sampled_from(["sum", "mean", "none"])),
        starts=starts,
    )
    check(q, k, kit.int32(*limits).view(2, w), served=None, **options)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_not_finite_stays_where_it_is(bad, dtype):
    n = 300
    q, k, visible = kit.window(2, 2, 2, 20, n, 64, dtype)
    clean = ops.window_scores(q, k, visible)
    k[0, 1, 20, 3] = k[0, 1, n - 1, 3] = bad  # only the last row sees the second
    k[0, 1, 200] = bad  # inf - inf
    check(q, k, visible)
    check(q, k, visible, starts=kit.int32(21, 0))
    scores = ops.window_scores(q, k, visible)
    assert scores[0].isnan().sum() == 3
    assert torch.equal(scores[1], clean[1]) and torch.equal(scores[0, 0], clean[0, 0])
    hidden = visible.clamp(max=n - 1)
    assert ops.window_scores(q, k, hidden)[0, 1, n - 1] == 0
    q[0, 2, 0] = bad  # a row whose logits are all NaN
    check(q, k, visible)
    visible = visible.clone()
    visible[0] = 0  # now that row sees no key
    check(q, k, visible)


def test_keys_that_no_row_sees_are_not_looked_at():
    q, k, visible = kit.window(2, 2, 2, 8, 300, 128, torch.bfloat16)
    starts = kit.int32(70, 0)
    visible = (visible - 100).repeat(2, 1)
    visible[1] = 0
    k[:, :, 200:] = k[0, :, :70] = k[1] = float("nan")
    check(q, k, visible, starts=starts)
    scores = ops.window_scores(q, k, visible, starts=starts)
    assert (scores[1] == 0).all() and (scores[0, :, :70] == 0).all() and (scores[0, :, 200:] == 0).all()


def test_padded_rows_score_as_if_alone():
    q, k, visible = kit.window(3, 2, 2, 8, 250, 64, torch.bfloat16)
    starts = [0, 13, 160]
    scores = ops.window_scores(q, k, visible, starts=kit.int32(*starts))
    for row, s in enumerate(starts):
        alone = ops.window_scores(q[row : row + 1], k[row : row + 1, :, s:], visible - s)
        assert torch.equal(scores[row, :, s:], alone[0]) and (scores[row, :, :s] == 0).all()


@pytest.mark.parametrize("group, w, n", [(2, 8, 300), (4, 32, kit.size(20_000, 1_500)), (4, 64, 700)])
def test_repeatable(group, w, n):
    q, k, visible = kit.window(2, 2, group, w, n, 128, torch.bfloat16)
    lse = true_lse(q, k, visible)
    kit.assert_repeatable(lambda: [ops.window_scores(q, k, visible), ops.window_scores(q, k, visible, lse=lse)])


def test_a_batch_changes_nothing():
    q, k, visible = kit.window(3, 3, 2, 8, kit.size(7000, 700), 64, torch.float16)
    together = ops.window_scores(q, k, visible)
    for b in range(3):
        assert torch.equal(ops.window_scores(q[b : b + 1], k[b : b + 1], visible), together[b : b + 1])


def check_attention(q, k, v, visible, *, served=True, **options):
    found, portable = with_portable(ops.window_attention, q, k, v, visible, **options)
    exact = reference.window_attention(q, k, v, visible, **options)
    for actual, other, right in zip(found, portable, exact):
        # Both kernels round the weights to q's dtype before they multiply them with V.
        assert torch.equal(actual.isnan(), right.isnan()) and torch.equal(actual.isinf(), right.isinf())
        error, allowed = ((x.double() - right).nan_to_num(0, 0, 0).abs().max().item() for x in (actual, other))
        assert error <= 2 * allowed + 1e-6 * right.nan_to_num(0, 0, 0).abs().max().item(), (error, allowed)
    if served is not None:  # weights and their sums differ in their last bits
        assert kit.same(found[:2], portable[:2]) != served, "the wrong kernel"


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("group, w", [(4, 8), (4, 32), (2, 65)])
def test_attention(dtype, d, group, w):
    n = kit.size(3000, 333)
    q, k, visible = kit.window(2, 2, group, w, n, d, dtype)
    v = kit.kv(2, 2, n, d, dtype, seed=7)[1]
    check_attention(q, k, v, visible)
    check_attention(q, k, v, visible, starts=kit.int32(0, 77), sink_logits=kit.randn(2 * group), reduce="mean")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("d, group, n", [(64, 1, 129), (128, 4, 2100), (128, 70, 300)])
def test_attention_of_one_row(dtype, d, group, n):
    """Decoding, which also needs the logits: tiles of one row, of four, and more than one tile."""
    q, k, visible = kit.window(2, 2, group, 1, n, d, dtype)
    v = kit.kv(2, 2, n, d, dtype, seed=7)[1]
    check_attention(q, k, v, visible)
    check_attention(q, k, v, visible - 3, starts=kit.int32(0, 77), sink_logits=kit.randn(2 * group), reduce="mean")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_attention_of_one_row_of_what_is_not_finite(bad):
    q, k, visible = kit.window(2, 2, 3, 1, 500, 64, torch.bfloat16)
    k[0, 0, 100, 3] = k[1, 1, 0] = k[1, 0, 499, 0] = bad
    check_attention(q, k, k.flip(1).nan_to_num(0, 0, 0), visible)
    q[0, 0, 0, 5] = bad  # affects all of its logits
    check_attention(q, k, k.flip(1).nan_to_num(0, 0, 0), visible, served=None)


@pytest.mark.parametrize("group, w, n", [(1, 1, 1500), (2, 8, 1500), (3, 64, 700)])
def test_attention_of_a_batch(group, w, n):
    """Results do not depend on which block processes an item, or on what it processed before."""
    q, k, _ = kit.window(3, 3, group, w, n, 64, torch.float16)
    visible = torch.stack([kit.causal(w, n), kit.causal(w, n) // 2, kit.int32(*[0] * w)])
    together = ops.window_attention(q, k, k, visible)
    for b in range(3):
        for h in range(3):
            heads = slice(h * group, (h + 1) * group)
            one = ops.window_attention(
                q[b : b + 1, heads], k[b : b + 1, h : h + 1], k[b : b + 1, h : h + 1], visible[b : b + 1]
            )
            for alone, found in zip(one, together):
                found = found[b : b + 1, heads] if found.shape[1] > 3 else found[b : b + 1, h : h + 1]
                assert torch.equal(kit.bits(alone), kit.bits(found))


def test_attention_of_limits_and_of_what_is_not_finite():
    """Values that no row sees may be NaN in V, too; a non-finite key is left out of a row, together with its value."""
    n = 300
    q, k, _ = kit.window(3, 2, 3, 7, n, 64, torch.bfloat16)
    v = kit.kv(3, 2, n, 64, torch.bfloat16, seed=7)[1]
    visible = torch.stack([kit.int32(0, 290, 150, 80, 71, 0, 289), kit.int32(*[0] * 7), kit.int32(*[290] * 7)])
    v[:, :, 290:] = v[0, :, :70] = v[1] = float("nan")
    k[:, :, 290:] = k[1] = float("inf")
    k[0, 0, 100, 3] = k[2, 1, 0] = k[2, 1, 289, 0] = float("nan")
    check_attention(q, k, v, visible, starts=kit.int32(70, 0, 0))


def test_attention_that_is_left_to_the_portable_kernels():
    q, k, visible = kit.window(1, 2, 4, 8, 300, 64, torch.bfloat16)
    v = kit.kv(1, 2, 300, 64, torch.bfloat16, dv=80)[1]
    check_attention(q, k, v, visible, served=False)
    check_attention(q, k, kit.unaligned(k, 3, 1), visible, served=False)


@pytest.mark.parametrize("heads, group, w", [(1, 1, 3), (1, 3, 5), (3, 1, 7)])
def test_attention_of_odd_sizes_of_wide_values(heads, group, w):
    """The portable kernel, after Hopper's sums over K: each puts an odd number of floats into the workspace first. The
    run under UndefinedBehaviorSanitizer detects misalignment."""
    q, k, visible = kit.window(1, heads, group, w, 301, 64, torch.bfloat16)
    v = kit.kv(1, heads, 301, 64, torch.bfloat16, dv=512)[1]
    check_attention(q, k, v, visible, served=None)


def test_attention_is_repeatable():
    q, k, visible = kit.window(2, 2, 4, 16, 700, 128, torch.float16)
    kit.assert_repeatable(lambda: ops.window_attention(q, k, k, visible))


def check_assignment(k, prototypes, **spans):
    """The same rule as in test_assign_prototypes.py."""
    chosen = ops.assign_prototypes(k, prototypes, **spans)
    cosines = reference.prototype_cosines(k, prototypes)
    expected = reference.assign_prototypes(k, prototypes, **spans)
    missed = cosines.amax(-1) - cosines.gather(-1, chosen.long().clamp(min=0).unsqueeze(-1)).squeeze(-1)
    assert torch.equal(chosen == -1, expected == -1) and not (missed[chosen >= 0] > 4e-3).any()
    return chosen


@pytest.mark.parametrize(
    "dtype, d, count", [(torch.float16, 64, 300), (torch.bfloat16, 128, 129), (torch.float16, 256, 40)]
)
def test_assignment(dtype, d, count):
    k, _ = kit.kv(2, 1, kit.size(3000, 150), d, dtype)
    prototypes = kit.randn(2, 1, count, d)
    prototypes[:, :, ::7] = 0
    check_assignment(k, prototypes)
    check_assignment(k, prototypes, starts=kit.int32(0, 77), lengths=kit.int32(100, 39))
    again = torch.cat([prototypes[:, :, : count // 4]] * 4, 2)  # ties
    assert (check_assignment(k, again) < count // 4).all()


@pytest.mark.parametrize("n, heads", [(1, 3), (63, 1), (64, 1), (65, 5), (400, 1)])
def test_assignment_of_lengths(n, heads):
    k, _ = kit.kv(1, heads, n, 64, torch.bfloat16)
    check_assignment(k, kit.randn(1, heads, 30, 64))


def test_assignment_of_keys_to_do_again():
    """Keys that are not finite, zero, tiny, huge, or point away from all prototypes."""
    k = kit.randn(1, 2, 90, 64).clamp(-3, 3).bfloat16()
    k[0, 0, 3, 5] = k[0, 0, 89, 63] = float("nan")
    k[0, 1, 64] = float("inf")
    k[0, :, 10] = 0
    k[0, :, 20:30] *= 1e-38
    k[0, :, 30:40] *= 1e38
    k[0, :, 40:50] = -k[0, :, 40:50].abs() - 0.1
    check_assignment(k, kit.randn(1, 2, 20, 64, seed=1).abs())


def test_assignment_that_is_left_to_the_portable_kernel():
    """A key of equal channels has the same cosine with every permutation of a prototype: the last bits show which
    kernel ran."""
    k = (torch.arange(1, 201) * 0.37).bfloat16().view(1, 1, 200, 1).expand(1, 1, 200, 128).contiguous()
    values = kit.randn(128, seed=1).abs()
    prototypes = torch.stack([values[kit.randn(128, seed=i).argsort()] for i in range(100)]).view(1, 1, 100, 128)
    found, portable = with_portable(ops.assign_prototypes, k, prototypes)
    assert not torch.equal(found, portable), "the wrong kernel"
    many = prototypes.repeat(1, 1, 9, 1)  # more than shared memory holds
    for served in ((kit.unaligned(k, 3, 1), prototypes), (k, many), (k.float(), prototypes)):
        found, portable = with_portable(ops.assign_prototypes, *served)
        assert torch.equal(found, portable)


def test_assignment_is_repeatable():
    k, _ = kit.kv(1, 2, 300, 64, torch.float16)
    prototypes = kit.randn(1, 2, 60, 64)
    kit.assert_repeatable(lambda: (ops.assign_prototypes(k, prototypes),))


def test_assignment_of_a_batch():
    k, _ = kit.kv(2, 2, 150, 64, torch.float16)
    prototypes = kit.randn(2, 2, 20, 64)
    one = ops.assign_prototypes(k[1:, :1], prototypes[1:, :1].contiguous())
    assert torch.equal(ops.assign_prototypes(k, prototypes)[1:, :1], one)


def check_similarity(k, threshold=0.5, *, served=True, **spans):
    """The rule of test_key_similarity.py."""
    scores = check_key_similarity(k, threshold, **spans)
    found, portable = with_portable(ops.key_similarity, k, threshold=threshold, **spans)
    if served is not None:  # what is spared is a sum of cosines, which differ in their last bits
        assert torch.equal(kit.bits(found), kit.bits(portable)) != served, "the wrong kernel"
    return scores


def similar(b, heads, n, d, dtype, seed=0):
    """Keys of which some have a similar one far away, some nearby, some none."""
    k = kit.randn(b, heads, n, d, seed=seed)
    near = kit.randn(b, heads, n, 1, seed=seed + 1).abs()
    k[:, :, n // 2 :] += 3 * near[:, :, n // 2 :] * k[:, :, : n - n // 2]
    return k.to(dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_similarity(dtype, d):
    check_similarity(similar(2, 2, kit.size(3000, 400), d, dtype), starts=kit.int32(0, 77), lengths=kit.int32(300, 290))


@pytest.mark.parametrize("d, n", [(64, 2), (64, 63), (64, 128), (64, 129), (128, 900), (256, 400)])
def test_similarity_of_lengths(d, n):
    """Up to more panels than stages."""
    check_similarity(similar(1, 1, n, d, torch.bfloat16), served=None)


def test_similarity_of_an_empty_row():
    k = similar(2, 2, 150, 64, torch.float16)
    scores = check_similarity(k, lengths=kit.int32(0, 150))
    assert scores[0].isnan().all()


@pytest.mark.parametrize("threshold", [0.0, -0.0])
def test_similarity_with_everything(threshold):
    """Each key's last other one with a positive cosine; of equal keys, the last one; of zeros, none."""
    assert (ops.key_similarity(torch.zeros(1, 1, 150, 64).half(), threshold=threshold) == 0).all()
    scores = ops.key_similarity(kit.randn(1, 1, 1, 64).half().expand(1, 1, 150, 64).contiguous(), threshold=threshold)
    torch.testing.assert_close(scores[0, 0, -2:], torch.tensor([148 / 150, 0.0]).to(scores), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [2.0**-120, 2.0**110])
def test_similarity_of_tiny_and_huge_keys(scale):
    k = similar(1, 2, 150, 64, torch.bfloat16)
    scaled = k.clone()
    scaled[:, :, ::3] *= scale
    torch.testing.assert_close(ops.key_similarity(scaled), ops.key_similarity(k), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("others", [0, 100])
def test_similarity_that_ends_early(others):
    """More panels than stages. Keys that are alike find one in the first panel; the other ones search through all."""
    k = kit.randn(1, 1, 3, 64).repeat(1, 1, 320, 1) + 0.1 * kit.randn(1, 1, 960, 64, seed=1)
    k = torch.cat([kit.randn(1, 1, others, 64, seed=2), k], 2).bfloat16()
    check_similarity(k, 0.7, served=None)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_similarity_of_keys_without_a_direction(bad):
    k = similar(1, 2, 300, 64, torch.bfloat16)
    k[0, 0, 100, 3] = k[0, 1, 299, 0] = bad
    k[0, 0, 290:] = k[0, 1, :130] = bad
    check_similarity(k)
    assert check_similarity(torch.full_like(k, bad), served=None).nan_to_num(0).abs().max() == 0


def test_similarity_of_layouts_and_fp8():
    """Keys are packed first, so that neither makes a difference."""
    k = similar(2, 2, 300, 128, torch.bfloat16)
    expected = ops.key_similarity(k, threshold=0.5)
    for other in (kit.laid_out(k, "bnhd"), kit.unaligned(k, 3, 1)):
        assert torch.equal(ops.key_similarity(other, threshold=0.5), expected)
    narrow = k.to(torch.float8_e4m3fn)
    assert torch.equal(ops.key_similarity(narrow, threshold=0.5), ops.key_similarity(narrow.bfloat16(), threshold=0.5))
    check_similarity(narrow.bfloat16())


def test_similarity_that_is_left_to_the_portable_kernel():
    check_similarity(similar(1, 2, 300, 80, torch.bfloat16), served=False)
    check_similarity(similar(1, 2, 300, 64, torch.float32), served=False)


def check_norms(v, w_o, *, served=True, **options):
    found, portable = with_portable(ops.value_norm, v, w_o, **options)
    exact = reference.value_norm(v, w_o, **options)
    kit.assert_close(found, reference.value_norm(v, w_o, **options, dtype=torch.float32), exact)
    if served is not None:
        assert torch.equal(kit.bits(found), kit.bits(portable)) != served, "the wrong kernel"
    return found


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("d, hidden", [(64, 300), (128, 256), (256, 100)])
def test_norms(dtype, d, hidden):
    v, w_o = kit.kv(2, 2, kit.size(3000, 200), d, dtype)[1], kit.randn(hidden, 6 * d, seed=3).to(dtype)
    check_norms(v, w_o)
    check_norms(v, w_o, starts=kit.int32(0, 77), lengths=kit.int32(130, 100), group_reduce="max")


@pytest.mark.parametrize("d, n, hidden", [(64, 1, 1), (64, 64, 127), (64, 129, 128), (128, 9, 900), (256, 70, 400)])
def test_norms_of_sizes(d, n, hidden):
    """Up to more panels than stages."""
    v, w_o = kit.kv(1, 3, n, d, torch.bfloat16)[1], kit.randn(hidden, 3 * d, seed=3).bfloat16()
    check_norms(v, w_o, served=None if hidden == 1 else True)


def test_norms_of_layouts_and_a_batch():
    v, w_o = kit.kv(2, 2, 150, 64, torch.float16)[1], kit.randn(200, 4 * 64, seed=3).half()
    norms = check_norms(v, w_o)
    wide = torch.cat([w_o, w_o], 1)[:, : 4 * 64]  # rows that are further apart
    assert torch.equal(ops.value_norm(kit.laid_out(v, "bnhd"), wide), norms)
    assert torch.equal(ops.value_norm(v[1:, 1:], w_o[:, 2 * 64 :]), norms[1:, 1:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_norms_of_bad_values(bad):
    v, w_o = kit.kv(1, 2, 150, 64, torch.bfloat16)[1], kit.randn(200, 4 * 64, seed=3).bfloat16()
    clean = ops.value_norm(v, w_o)
    v[0, 1, 100, 7] = bad
    norms = check_norms(v, w_o)
    assert norms[0, 1, 100].isnan() and norms.isnan().sum() == 1 and torch.equal(norms[0, 0], clean[0, 0])
    v[0, 1, 100, 7] = 3e38  # the norm overflows
    assert torch.equal(ops.value_norm(v, w_o).isinf().nonzero(), kit.on_device(torch.tensor([[0, 1, 100]])))


def test_norms_that_are_left_to_the_portable_kernel():
    v, w_o = kit.kv(1, 2, 150, 64, torch.bfloat16)[1], kit.randn(200, 4 * 64, seed=3).bfloat16()
    check_norms(kit.unaligned(v, 3, 1), w_o, served=False)
    check_norms(v, torch.cat([w_o, w_o], 1)[:, 3 : 3 + 4 * 64], served=False)
    check_norms(v.float(), w_o.float(), served=False)
    check_norms(v, w_o[:1].expand(200, -1), served=False)
    assert (check_norms(v, w_o[:0], served=None) == 0).all()


def test_similarity_and_norms_are_repeatable():
    k, w_o = similar(1, 2, 300, 64, torch.float16), kit.randn(200, 4 * 64, seed=3).half()
    kit.assert_repeatable(lambda: (ops.key_similarity(k, threshold=0.5), ops.value_norm(k, w_o)))


@kit.only("cuda")
def test_at_size():
    """Several waves of blocks, splits of many keys, offsets beyond 31 bits."""
    q, k, visible = kit.window(1, 8, 4, 32, 131_072, 128, torch.bfloat16)
    check(q, k, visible)
    check_attention(q, k, k.flip(2), visible)
    check_assignment(k, kit.randn(1, 8, 500, 128))
    few = similar(1, 8, 5000, 128, torch.bfloat16)
    check_similarity(few)
    check_norms(few, kit.randn(1024, 32 * 128, seed=3).bfloat16())
