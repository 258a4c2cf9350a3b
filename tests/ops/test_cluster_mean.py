"""cluster_mean against exact integer sums, bit for bit on every device: ProtoKV Algorithm 1, line 22."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops import ops
from kvops.ops import reference

pytestmark = kit.every_device


def fixed_point(scores: np.ndarray, assignment: np.ndarray, clusters: int, total: bool) -> list[float]:
    """Compute one head's means as the contract defines them, in Python integers."""
    members = [[] for _ in range(clusters)]
    counting = np.isfinite(scores) & (assignment >= 0)
    for x, c in zip(scores[counting].tolist(), assignment[counting].tolist()):
        members[c].append(x)
    largest = np.abs(scores[counting]).max(initial=0.0)
    exponent = max(-126, int(np.frexp(largest)[1])) if largest else -126
    unit = 2.0 ** (exponent + len(scores).bit_length() - 62)
    sums = [sum(int(x / unit) for x in own) * unit / (1 if total else max(1, len(own))) for own in members]
    with np.errstate(over="ignore"):  # a sum may exceed fp32's range
        return [float(np.float32(x)) if own else float("nan") for x, own in zip(sums, members)]


def check(scores, assignment, clusters):
    results = []
    for reduce in ("mean", "sum"):
        actual = ops.cluster_mean(scores, assignment, num_clusters=clusters, reduce=reduce)
        exact = reference.cluster_mean(scores, assignment, num_clusters=clusters, reduce=reduce)
        size = scores.nan_to_num(0, 0, 0).abs().double().max().item() if scores.numel() else 0.0
        size *= scores.shape[2] if reduce == "sum" else 1
        assert actual.dtype == torch.float32 and torch.equal(actual.isnan(), exact.isnan())
        error = (actual.double() - exact).nan_to_num(0, 0, 0).abs()
        finite = exact.isfinite() & (exact.abs() < 3e38)  # a sum may exceed fp32's range
        assert (error <= 1e-7 * exact.abs() + 1e-9 * size + 1e-45)[finite].all()
        expected = [
            [
                fixed_point(scores[b, h].cpu().numpy(), assignment[b, h].cpu().numpy(), clusters, reduce == "sum")
                for h in range(scores.shape[1])
            ]
            for b in range(scores.shape[0])
        ]
        assert torch.equal(actual.nan_to_num(-1), torch.tensor(expected).view(actual.shape).nan_to_num(-1))
        results.append(actual)
    return results


@given(
    kind=st.sampled_from(kit.SCORES),
    n=st.integers(0, 300),
    clusters=st.integers(1, 40),
    seed=st.integers(0, 2**31),
)
@kit.examples(60)
def test_scores_of_every_kind(kind, n, clusters, seed):
    check(kit.scores(kind, 2, 2, n, seed=seed), kit.clusters(2, 2, n, clusters, seed=seed), clusters)


@pytest.mark.parametrize("clusters", [1, 500, kit.size(20_000, 9_000)])
def test_many_tokens(clusters):
    n = kit.size(30_000, 5_000)
    check(kit.randn(1, 2, n), kit.clusters(1, 2, n, clusters), clusters)


def test_the_order_of_the_tokens_does_not_matter():
    """Scores from 1e-4 to 1e4: floating-point sums would differ."""
    scores = kit.randn(1, 1, 2000) * 10 ** (3 * kit.randn(1, 1, 2000, seed=1)).clamp(-4, 4)
    assignment = kit.clusters(1, 1, 2000, 7)
    order = kit.randn(2000, seed=2).argsort()
    for reduce in ("mean", "sum"):
        shuffled = ops.cluster_mean(
            scores[..., order].contiguous(), assignment[..., order].contiguous(), num_clusters=7, reduce=reduce
        )
        assert torch.equal(shuffled, ops.cluster_mean(scores, assignment, num_clusters=7, reduce=reduce))


def test_tokens_of_no_cluster_change_nothing():
    """They do not affect the fixed-point unit of the scores either."""
    scores, assignment = kit.randn(1, 2, 100), kit.clusters(1, 2, 100, 9)
    free = assignment == -1
    assert free.any()
    for outside in (1e30, float("nan"), float("inf")):
        changed, plain = (
            ops.cluster_mean(scores.masked_fill(free, x), assignment, num_clusters=9) for x in (outside, 0)
        )
        assert kit.same([changed], [plain])


def test_empty_clusters_are_nan():
    means = ops.cluster_mean(torch.ones(1, 1, 4), torch.tensor([[[0, 3, 3, -1]]], dtype=torch.int32), num_clusters=5)
    assert means[0, 0, [0, 3]].tolist() == [1, 1] and means[0, 0, [1, 2, 4]].isnan().all()
    scores = torch.tensor([[[1.0, float("inf"), float("nan")]]])
    sums = ops.cluster_mean(scores, torch.tensor([[[0, 0, 1]]], dtype=torch.int32), num_clusters=2, reduce="sum")
    assert sums[0, 0, 0] == 1 and sums[0, 0, 1].isnan()


def test_strided_and_expanded_inputs():
    scores, assignment = kit.randn(2, 6, 80), kit.clusters(2, 6, 80, 5)
    plain = ops.cluster_mean(scores[:, ::2, 3:70].contiguous(), assignment[:, 1::2, 3:70].contiguous(), num_clusters=5)
    assert torch.equal(ops.cluster_mean(scores[:, ::2, 3:70], assignment[:, 1::2, 3:70], num_clusters=5), plain)
    expanded = ops.cluster_mean(scores, assignment[:, :1].expand(-1, 6, -1), num_clusters=5)
    assert torch.equal(expanded, ops.cluster_mean(scores, assignment[:, :1].repeat(1, 6, 1), num_clusters=5))


def test_bad_input():
    scores, assignment = torch.zeros(2, 2, 10), torch.zeros(2, 2, 10, dtype=torch.int32)
    good = dict(scores=scores, assignment=assignment, num_clusters=3)
    for change, parts in (
        (dict(scores=scores[0]), ("cluster_mean", "scores must be", r"\[2, 10\]")),
        (dict(scores=scores.half()), ("scores must be torch.float32", "torch.float16")),
        (dict(assignment=assignment.long()), ("assignment must be torch.int32", "torch.int64")),
        (dict(assignment=assignment[..., :9]), (r"assignment must be \[2, 2, 10\]", r"got \[2, 2, 9\]")),
        (dict(scores=torch.zeros(2, 10, 2).mT), ("scores must have a contiguous last dim",)),
        (dict(num_clusters=0), ("num_clusters must be in", "got 0")),
        (dict(reduce="max"), ("reduce must be 'sum' or 'mean', got 'max'",)),
        (dict(assignment=assignment + 3), (r"assignment must lie in \[-1, 3\), got 3 at row 0, head 0, token 0",)),
        (dict(assignment=assignment - 2), (r"assignment must lie in \[-1, 3\), got -2",)),
    ):
        with kvops.debug_checks(), kit.refuses(*parts):
            ops.cluster_mean(**good | change)
    many = torch.empty(2**31, 2**31, 0)
    with kit.refuses("more elements than fit int64"):  # raised before looping over 2^62 heads
        ops.cluster_mean(many, many.int(), num_clusters=3)
    with kit.refuses("assignment must be a torch.Tensor", kind=TypeError):
        ops.cluster_mean(scores, None, num_clusters=3)


@kit.only("cuda", "simulator")
def test_a_gpus_assignment_is_not_looked_at():
    """Tokens with an out-of-range assignment are in no cluster."""
    scores, bad = kit.randn(1, 1, 6), torch.tensor([[[0, 3, -2, 2**31 - 1, -(2**31), 2]]], dtype=torch.int32)
    good = bad.masked_fill((bad < 0) | (bad >= 3), -1)
    assert kit.same([ops.cluster_mean(scores, bad, num_clusters=3)], [ops.cluster_mean(scores, good, num_clusters=3)])
