"""cluster_priority against its reference, exactly: ProtoKV Eq. 2 and Algorithm 1, line 24."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops import ops
from kvops.ops import reference

pytestmark = kit.every_device

INF = float("inf")


def check(scores, assignment, means, k, budgets=None, whole=False):
    priority, kept = ops.cluster_priority(scores, assignment, means, k=k, budgets=budgets, whole=whole)
    inputs = [x if x is None else x.cpu() for x in (scores, assignment, means, budgets)]
    with torch.device("cpu"):  # the reference works cluster by cluster: on a GPU it takes minutes
        expected, expected_kept = reference.cluster_priority(*inputs[:3], k=k, budgets=inputs[3], whole=whole)
    expected, expected_kept = expected.to(kept.device), expected_kept.to(kept.device)
    assert torch.equal(kept, expected_kept) and torch.equal(priority.isnan(), expected.isnan())
    assert torch.equal(priority.nan_to_num(0, INF, -INF), expected.nan_to_num(0, INF, -INF))
    return priority, kept


@given(
    kind=st.sampled_from(kit.SCORES),
    n=st.integers(0, 200),
    clusters=st.integers(1, 40),
    data=st.data(),
    whole=st.booleans(),
    seed=st.integers(0, 2**31),
)
@kit.examples(80)
def test_any_clusters(kind, n, clusters, data, whole, seed):
    """Ties, infinities and NaN among token and cluster scores; empty clusters; a budget that is too large."""
    scores, assignment = kit.scores(kind, 2, 2, n, seed=seed), kit.clusters(2, 2, n, clusters, seed=seed)
    means = kit.scores(kind, 2, 2, clusters, seed=seed + 9)
    k = data.draw(st.integers(0, n + 5))
    budgets = None
    if data.draw(st.booleans()):
        budgets = kit.int32(*(data.draw(st.integers(0, k)) for _ in range(4))).view(2, 2)
    priority, kept = check(scores, assignment, means, k, budgets, whole)
    best = ops.select_topk(priority, k=n + 5, budgets=kept)  # the intended use
    assert torch.equal((best >= 0).sum(-1).int(), kept)
    chosen = assignment.gather(-1, best.clamp(min=0)).masked_fill(best < 0, 0)
    assert (chosen >= 0).all()
    if not whole:
        most = torch.full((2, 2), k) if budgets is None else budgets
        assert torch.equal(kept, torch.minimum((assignment >= 0).sum(-1), most).int())


def test_clusters_stay_whole():
    assignment = torch.tensor([[[2, 0, 1, 0, 2, 2, 1, 0, -1, 4]]], dtype=torch.int32)
    scores = torch.tensor([[[9.0, 1, 5, 3, 9, 9, 6, 2, 9, 9]]])
    means = torch.tensor([[[7.0, 8, 1, 99, float("nan")]]])  # order: 3 (empty), 1, 0, 2, 4
    priority, kept = check(scores, assignment, means, 4)
    assert priority[0, 0, 8].isnan()
    assert priority[0, 0, :8].tolist() + priority[0, 0, 9:].tolist() == [-INF, 1, INF, 3, -INF, -INF, INF, 2, -INF]
    assert ops.select_topk(priority, k=4).tolist() == [[[2, 3, 6, 7]]] and kept.item() == 4
    priority, kept = check(scores, assignment, means, 4, whole=True)
    assert kept.item() == 2 and ops.select_topk(priority, k=4, budgets=kept).tolist() == [[[2, 6, -1, -1]]]
    _, kept = check(scores, assignment, means, 5, whole=True)
    assert kept.item() == 5  # exactly two clusters
    _, kept = check(scores, assignment, means, 100)
    assert kept.item() == 9


def test_a_smaller_cluster_behind_the_straddling_one_does_not_jump_the_queue():
    assignment = torch.tensor([[[0, 0, 0, 1]]], dtype=torch.int32)
    _, kept = check(torch.ones(1, 1, 4), assignment, torch.tensor([[[2.0, 1.0]]]), 2, whole=True)
    assert kept.item() == 0


@pytest.mark.parametrize("clusters", [1, 500, kit.size(2_000, 1_000)])
def test_many_tokens(clusters):
    n = kit.size(30_000, 5_000)
    scores, assignment = kit.randn(1, 2, n), kit.clusters(1, 2, n, clusters)
    means = kit.scores("ties", 1, 2, clusters)
    for whole in (False, True):
        check(scores, assignment, means, n // 3, None, whole)


def test_strided_and_expanded_inputs():
    scores, assignment, means = kit.randn(2, 6, 80), kit.clusters(2, 6, 80, 5), kit.randn(2, 3, 5)
    check(scores[:, ::2, 3:70], assignment[:, 1::2, 3:70], means, 20)
    check(scores[:, :3], assignment[:, :1].expand(-1, 3, -1), means, 20)


def test_repeatable():
    """There are more clusters than threads in a block."""
    n = kit.size(20_000, 3_000)
    scores, assignment, means = kit.randn(1, 2, n), kit.clusters(1, 2, n, 300), kit.randn(1, 2, 300)
    kit.assert_repeatable(lambda: ops.cluster_priority(scores, assignment, means, k=n // 2))


def test_bad_input():
    scores, assignment = torch.zeros(2, 2, 10), torch.zeros(2, 2, 10, dtype=torch.int32)
    means, budgets = torch.zeros(2, 2, 3), torch.full((2, 2), 4, dtype=torch.int32)
    good = dict(scores=scores, assignment=assignment, cluster_scores=means, k=4)
    for change, parts in (
        (dict(scores=scores[0]), ("cluster_priority", "scores must be", r"\[2, 10\]")),
        (dict(scores=scores.half()), ("scores must be torch.float32", "torch.float16")),
        (dict(cluster_scores=means.half()), ("cluster_scores must be torch.float32", "torch.float16")),
        (dict(cluster_scores=means[:1]), ("cluster_scores must be a contiguous", r"got \[1, 2, 3\]")),
        (dict(cluster_scores=means[..., :0]), ("at least 1", r"got \[2, 2, 0\]")),
        (dict(assignment=assignment.long()), ("assignment must be torch.int32", "torch.int64")),
        (dict(assignment=assignment + 3), (r"assignment must lie in \[-1, 3\), got 3",)),
        (dict(k=-1), ("k must be >= 0, got -1",)),
        (dict(k=3, budgets=budgets), ("budgets must lie", "got 4")),
        (dict(budgets=budgets.long()), ("budgets must be torch.int32", "torch.int64")),
    ):
        with kvops.debug_checks(), kit.refuses(*parts):
            ops.cluster_priority(**good | change)
    with kit.refuses("cluster_scores must be a torch.Tensor", kind=TypeError):
        ops.cluster_priority(scores, assignment, None, k=3)


@kit.only("cuda", "simulator")
def test_a_gpus_assignment_and_budgets_are_not_looked_at():
    """Out-of-range assignments count as no cluster; out-of-range budgets are clamped."""
    scores, means = kit.randn(1, 2, 6), kit.randn(1, 2, 3)
    bad = torch.tensor([0, 3, -2, 2**31 - 1, -(2**31), 2], dtype=torch.int32).expand(1, 2, 6)
    good = bad.masked_fill((bad < 0) | (bad >= 3), -1)
    budgets = torch.tensor([[2**31 - 1, -(2**31)]], dtype=torch.int32)
    result = ops.cluster_priority(scores, bad, means, k=1, budgets=budgets)
    assert kit.same(result, ops.cluster_priority(scores, good, means, k=1, budgets=budgets.clamp(0, 1)))
