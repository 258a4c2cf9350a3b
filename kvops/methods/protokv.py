"""ProtoKV: clusters tokens around prototypes, those of semantic anchors and those of chunks of text, and keeps or drops
whole clusters by what the prompt's last queries make of them. SATKV: keeps the semantic anchors, without any query.

Source: "ProtoKV: Long-Context Knowledges Are Already Well-Organized Before Your Query", Yu et al.: Sec. 4,
Algorithm 1; ablations: Sec. 5.3; decode: App. O; SATKV: Sec. 4.1, App. H. There is no released code:
docs/methods/protokv.md says what was chosen where the paper leaves a choice.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache import AttentionMethod, Method, summed_scores
from ..ops import (
    assign_prototypes,
    build_prototypes,
    cluster_mean,
    cluster_priority,
    lsh_bucket,
    outlier_degree,
    select_topk,
)
from .common import (
    Budget,
    Compressed,
    budget_tokens,
    check_choice,
    check_head_mode,
    check_int,
    check_rank,
    check_rows_hold,
    in_place,
    moved,
    places,
    random_integers,
    row_budgets,
    select_budget,
    shared_scores,
)
from .window import (
    GROUP_REDUCES,
    causal_limits,
    check_budget,
    check_lse,
    observation_window,
    outside_prefix,
    prefix_lengths,
    span_ends,
)

CLUSTERS = ("prototypes", "chunks", "lsh")
MAX_KAPPA = 1024  # what outlier_degree takes
MAX_HASH_BITS = 16


def lsh_projection(
    head_dim: int, bits: int = 2, seed: int = 0, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """The random Fourier features of `ops.lsh_bucket`: projection, fp32 [bits, d] ~ N(0, 1 / d), and phase, fp32 [bits]
    ~ U(0, 2 pi). The same (head_dim, bits, seed) gives the same numbers on every device.

    Source: ProtoKV, Sec. 4.2, Eq. 7, with gamma = 1 / sqrt(d).
    """
    for name, value, low in (("head_dim", head_dim, 1), ("bits", bits, 1), ("seed", seed, 0)):
        check_int("lsh_projection", name, value, low)
    return _draw(head_dim, bits, seed, torch.get_default_device() if device is None else torch.device(device))


def _draw(head_dim: int, bits: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Drawn on the CPU, so that no device's logarithm or cosine differs."""

    def uniform(stream: int, width: int) -> Tensor:  # in (0, 1), fp64 [bits, width]
        position = torch.arange(width, dtype=torch.int32, device="cpu").expand(1, bits, -1)
        return (random_integers(position, seed, stream)[0].double() + 0.5) / 2**24

    radius, angle = (-2 * uniform(0, head_dim).log()).sqrt(), 2 * math.pi * uniform(1, head_dim)  # Box-Muller
    projection, phase = radius * angle.cos() / math.sqrt(head_dim), 2 * math.pi * uniform(2, 1)[:, 0]
    return projection.float().to(device), phase.float().to(device)


_drawn = functools.lru_cache(maxsize=64)(_draw)  # not to be written to


class Clustering(NamedTuple):
    """How the tokens before the window become clusters (docs/methods/protokv.md, up to the assignment)."""

    kappa: int = 5
    num_sats: int = 32
    num_chunks: int = 496
    projection: Tensor | None = None
    phase: Tensor | None = None
    seed: int = 0
    hash_bits: int = 2
    clusters: str = "prototypes"

    @property
    def num_buckets(self) -> int:
        return 1 << self.hash_bits

    @property
    def count(self) -> int:
        """Clusters, some of which may be empty."""
        return self.num_chunks + self.num_buckets

    @property
    def bits(self) -> int:
        """Bits of the hash: those of a bucket of anchors, or (clusters="lsh") enough for all clusters."""
        return max(1, (self.count - 1).bit_length()) if self.clusters == "lsh" else self.hash_bits

    def check(self, op: str) -> None:
        check_choice(op, "clusters", self.clusters, CLUSTERS)
        for name, low, high in (
            ("kappa", 1, MAX_KAPPA),
            ("num_sats", 0, None),
            ("num_chunks", 0, 1 << 24),
            ("hash_bits", 1, MAX_HASH_BITS),
            ("seed", 0, None),
        ):
            value = getattr(self, name)
            check_int(op, name, value, low)
            if high is not None and value > high:
                raise ValueError(f"{op}: {name} must be at most {high}, got {value}")
        if self.clusters == "prototypes" and not self.num_sats + self.num_chunks:
            raise ValueError(f"{op}: num_sats + num_chunks must be at least 1, got no prototype at all")
        if (self.projection is None) != (self.phase is None):
            raise ValueError(f"{op}: projection and phase must be given together, got one of them")
        if self.projection is None:
            return
        if self.clusters == "chunks":
            raise ValueError(f"{op}: clusters='chunks' hashes nothing, expected no projection and phase, got them")
        for name, x, dim in (("projection", self.projection, 2), ("phase", self.phase, 1)):
            if not isinstance(x, Tensor):
                raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(x).__name__}")
            if x.dtype != torch.float32 or x.dim() != dim or x.shape[0] != self.bits:
                shape = f"[{self.bits}, d]" if dim == 2 else f"[{self.bits}]"
                raise ValueError(f"{op}: {name} must be float32 {shape}, got {x.dtype} {list(x.shape)}")

    def __call__(self, k: Tensor, starts: Tensor | None, prefix: Tensor) -> Tensor:
        """Each token's cluster, int32 [b, Hk, n]; -1 for keys that are not finite and outside of the prefix.

        prefix: int32 [b], the tokens before the window.
        """
        if self.clusters == "lsh":
            buckets = lsh_bucket(k, self._prefix_slots(k, starts, prefix), *self._hash(k))
            return torch.where(buckets < 0, buckets, buckets % self.count)
        if self.clusters == "chunks":
            prototypes, _ = build_prototypes(k, None, None, self.count, 0, starts, prefix)
        else:
            degree = outlier_degree(k, self.kappa, starts=starts, lengths=prefix)
            sats = select_topk(degree, self.num_sats, starts=starts, lengths=prefix)
            buckets = lsh_bucket(k, sats, *self._hash(k))
            prototypes, _ = build_prototypes(k, sats, buckets, self.num_chunks, self.num_buckets, starts, prefix)
        return assign_prototypes(k, prototypes, starts, prefix)

    def _hash(self, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.projection is None:
            draw = _draw if torch.compiler.is_compiling() else _drawn
            return draw(k.shape[3], self.bits, self.seed, k.device)
        return self.projection, self.phase

    @staticmethod
    def _prefix_slots(k: Tensor, starts: Tensor | None, prefix: Tensor) -> Tensor:
        """Each slot's own index, -1 outside of the prefix: int64 [b, Hk, n]."""
        outside = outside_prefix(k, 0, starts, prefix if starts is None else starts + prefix)
        return torch.arange(k.shape[2], device=k.device).masked_fill(outside, -1).expand(k.shape[:3])


def protokv_compress(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: Budget,
    *,
    kappa: int = 5,
    num_sats: int = 32,
    num_chunks: int = 496,
    projection: Tensor | None = None,
    phase: Tensor | None = None,
    seed: int = 0,
    hash_bits: int = 2,
    clusters: str = "prototypes",
    score: str = "dot",
    cluster_reduce: str = "mean",
    whole_clusters: bool = False,
    group_reduce: str = "mean",
    lse: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    head_mode: str = "per_head",
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    fill_invalid: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> Compressed:
    """ProtoKV in one call. k: [b, Hk, n, d], v: [b, Hk, n, dv] -> (k, v, indices) with min(budget, n) slots. ::

        anchors    = the num_sats highest outlier degrees                         (`ops.outlier_degree`)
        prototypes = the mean key of each of num_chunks chunks without the anchors, and of each of 2^hash_bits buckets
                     of anchors                                     (`ops.lsh_bucket`, `ops.build_prototypes`)
        cluster    = the prototype of highest cosine                              (`ops.assign_prototypes`)
        s[j]       = mean over the group of sum over the window of scale * q_i . k_j
        score      = mean of s over the cluster's tokens                          (`ops.cluster_mean`)

    All of this is of the tokens before the last w, per head. The w newest tokens stay, and before them clusters by
    descending score, whole; the one that the budget cuts gives its tokens of highest s.

    q_window: [b, Hq, w, d], the queries of the last w (valid) tokens of each row; 32 are usual, 8 for budgets <= 128.
    budget: tokens (int), or a fraction in (0, 1] of the valid slots (float); it must hold the w newest. Or int32 [b,
        Hk], tokens of each head (`head_budgets`): the result is as wide as the most of them (on a GPU that is read
        back), and heads that keep fewer end in -1.
    kappa: neighbours on either side that an anchor is unlike, 1 to 1024. num_sats: anchors; 0: none.
    projection, phase: fp32 [hash_bits, d] and [hash_bits], on k's device, of the hash; drawn from `seed` if not given
        (`lsh_projection`).
    clusters: "prototypes"; ablations with as many clusters: "chunks" (all prototypes are chunks', without anchors) and
        "lsh" (no prototypes: a cluster is a bucket, of enough bits, modulo the number of clusters).
    score: "dot", or "softmax" as in `snapkv_compress`. cluster_reduce: "mean" (Algorithm 1), or "sum" (Eq. 11).
    whole_clusters: no cluster is cut (Eq. 2), so fewer may stay than the budget allows: the rest is -1, last.
    head_mode: "shared" keeps one set for all heads, by the mean over heads of the scores of a token's clusters, then of
        its own; then clusters are not whole.

    group_reduce, lse, scale, softcap, sink_logits, starts, lengths, fill_invalid, out: as in `snapkv_compress` (lse and
    sink_logits with score="softmax"). TypeError or ValueError for wrong arguments, before anything is written.
    """
    op = "protokv_compress"
    clustering = Clustering(kappa, num_sats, num_chunks, projection, phase, seed, hash_bits, clusters)
    _check(op, clustering, score, cluster_reduce, group_reduce, head_mode)
    if whole_clusters and head_mode == "shared":
        raise ValueError(f"{op}: whole_clusters needs head_mode='per_head' (heads differ in their clusters), got both")
    visible, w = observation_window(op, q_window, k, starts, lengths)
    check_lse(op, lse, q_window)
    check_budget(op, budget, k.shape[2], w)
    prefix = span_ends(k, starts, lengths) - w
    options = dict(score=score, group_reduce=group_reduce, scale=scale, softcap=softcap, sink_logits=sink_logits)
    scores = summed_scores(q_window, k, visible, lse, prefix, starts=starts, **options)
    spans = (starts, lengths, fill_invalid)
    indices = _indices(op, k, scores, budget, w, clustering, cluster_reduce, head_mode, *spans, whole_clusters)
    return moved(op, k, v, indices, out)


protokv_compress_ = in_place(protokv_compress)


def _check(op: str, clustering: Clustering, score: str, cluster_reduce: str, group_reduce: str, head_mode: str) -> None:
    clustering.check(op)
    check_choice(op, "score", score, ("dot", "softmax"))
    check_choice(op, "cluster_reduce", cluster_reduce, ("mean", "sum"))
    check_choice(op, "group_reduce", group_reduce, GROUP_REDUCES)
    check_head_mode(op, head_mode)


def _indices(
    op: str,
    k: Tensor,
    scores: Tensor,
    budget: Budget,
    window: int,
    clustering: Clustering,
    cluster_reduce: str,
    head_mode: str,
    starts: Tensor | None,
    lengths: Tensor | None,
    fill_invalid: bool,
    whole: bool = False,
) -> Tensor:
    """The kept slots, by the window's scores of each token, fp32 [b, Hk, n]: int64 [b, Hk, m]."""
    assignment = clustering(k, starts, prefix_lengths(k, window, starts, lengths))
    cluster_scores = cluster_mean(scores, assignment, clustering.count, cluster_reduce)
    if head_mode == "shared":
        ranks = _shared_ranks(scores, assignment, cluster_scores)
        return select_budget(op, ranks, k.shape[1], budget, 0, window, starts, lengths, fill_invalid)
    keep, budgets = row_budgets(op, budget, k.shape[:2], k.shape[2], starts, lengths)
    left = None
    if budgets is not None:
        check_rows_hold(op, budgets, 0, torch.full_like(budgets, window))
        budgets = budgets.expand(k.shape[:2]).contiguous()
        left = budgets - window
    priority, kept = cluster_priority(scores, assignment, cluster_scores, keep - window, left, whole)
    if whole:
        budgets = kept + window
    return select_topk(priority, keep, 0, window, None, starts, lengths, budgets, fill_invalid)


def _shared_ranks(scores: Tensor, assignment: Tensor, cluster_scores: Tensor) -> Tensor:
    """fp32 [b, 1, n]: whole numbers that order tokens by the mean over heads of their clusters' scores, then of their
    own. Up to n, they are exact in fp32 for n <= 2^24.
    """
    clusters = cluster_scores.gather(2, assignment.clamp(min=0).long()).masked_fill_(assignment < 0, torch.nan)
    keys = [shared_scores(x) for x in (clusters, scores)]
    order = places(*(torch.where(x.isnan(), -torch.inf, x) for x in keys))
    return torch.where(keys[0].isnan(), torch.nan, (scores.shape[2] - order).float())


def satkv_compress(
    k: Tensor,
    v: Tensor,
    window: int,
    budget: Budget,
    *,
    kappa: int = 5,
    head_mode: str = "per_head",
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    fill_invalid: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> Compressed:
    """SATKV in one call: the last `window` tokens, and before them the highest outlier degrees, without any query.

    k: [b, Hk, n, d], v: [b, Hk, n, dv] -> (k, v, indices) with min(budget, n) slots. The degrees
    (`ops.outlier_degree`) are of the tokens before the window alone. Budget and all other arguments as in
    `protokv_compress`.
    """
    op = "satkv_compress"
    _check_satkv(op, window, kappa, head_mode)
    check_rank(op, k)
    check_budget(op, budget, k.shape[2], window)
    indices = _anchors(op, k, window, budget, kappa, head_mode, starts, lengths, fill_invalid)
    return moved(op, k, v, indices, out)


satkv_compress_ = in_place(satkv_compress)


def _check_satkv(op: str, window: int, kappa: int, head_mode: str) -> None:
    check_int(op, "window", window, 0)
    Clustering(kappa).check(op)
    check_head_mode(op, head_mode)


def _anchors(
    op: str,
    k: Tensor,
    window: int,
    budget: Budget,
    kappa: int,
    head_mode: str,
    starts: Tensor | None,
    lengths: Tensor | None,
    fill_invalid: bool,
) -> Tensor:
    """The last `window` slots and the highest outlier degrees before them: int64 [b, Hk, m]."""
    degree = outlier_degree(k, kappa, starts=starts, lengths=prefix_lengths(k, window, starts, lengths))
    if head_mode == "shared":
        degree = shared_scores(degree)
    return select_budget(op, degree, k.shape[1], budget, 0, window, starts, lengths, fill_invalid)


class _Buffered(Method):
    """When a cache is brought to its budget: by a step of at least `window` tokens, as a prompt is; and in decode when
    `buffer` tokens more than the budget are held (ProtoKV, App. O; None: never)."""

    alpha = 0  # decode's own observation window

    def _check_budget(self, op: str) -> None:
        check_int(op, "window", self.window, 1)
        if self.buffer is not None:
            check_int(op, "buffer", self.buffer, 1)
        if budget_tokens(op, self.budget, 1) and isinstance(self.budget, int):
            check_budget(op, self.budget, 0, self.window)
            if self.budget < self.alpha:
                raise ValueError(f"{op}: budget must hold the last alpha, {self.alpha}, tokens, got {self.budget}")

    def _keep_of(self, seen: int) -> int:
        return max(self.window, self.alpha, budget_tokens(type(self).__name__, self.budget, seen))

    def _full(self, n: int, t: int, seen: int) -> bool:
        """Whether n slots, t of them new, are too many."""
        spare = 1 if t >= self.window else self.buffer
        return spare is not None and n >= self._keep_of(seen) + spare


class ProtoKV(_Buffered, AttentionMethod):
    """ProtoKV's cache of one layer: a step of at least `window` tokens brings it to the budget, and in decode a buffer.

    The prompt is compressed by its last `window` queries, and so is each chunk of a chunked prefill and each further
    turn, with what was kept before. In decode (App. O) new tokens stay until `buffer` more than the budget are held;
    then the queries of the last `alpha` tokens observe, and these and budget - alpha of the others stay. A fraction is
    one of the tokens seen, but never less than the window.

    window: None is 8 for budgets of at most 128 tokens, else 32. buffer: None keeps every new token of decode.

    All other settings as in `protokv_compress`. (Whole clusters differ in size from head to head, and the heads of a
    cache do not: there is no such setting.)
    """

    protects_window = True

    def __init__(
        self,
        budget: int | float,
        window: int | None = None,
        *,
        kappa: int = 5,
        num_sats: int = 32,
        num_chunks: int = 496,
        projection: Tensor | None = None,
        phase: Tensor | None = None,
        seed: int = 0,
        hash_bits: int = 2,
        clusters: str = "prototypes",
        score: str = "dot",
        cluster_reduce: str = "mean",
        group_reduce: str = "mean",
        head_mode: str = "per_head",
        buffer: int | None = 128,
        alpha: int = 8,
    ):
        self._clustering = Clustering(kappa, num_sats, num_chunks, projection, phase, seed, hash_bits, clusters)
        for name, value in self._clustering._asdict().items():
            setattr(self, name, value)
        _check("ProtoKV", self._clustering, score, cluster_reduce, group_reduce, head_mode)
        if window is None:
            window = 8 if isinstance(budget, int) and budget <= 128 else 32
        check_int("ProtoKV", "alpha", alpha, 1)
        self.budget, self.window, self.buffer, self.alpha = budget, window, buffer, alpha
        self.score, self.cluster_reduce, self.group_reduce = score, cluster_reduce, group_reduce
        self.head_mode = head_mode
        self._check_budget("ProtoKV")
        super().__init__()

    def _remembered(self) -> int:
        return 0 if self.buffer is None else self.alpha

    def _rows(self, t: int) -> int:
        return self.window if t >= self.window and self._full(len(self), t, self.seen) else 0

    def _evict_by(self, scores: Tensor, k: Tensor, v: Tensor, pads: Tensor | None, seen: int) -> Tensor:
        return self._choose(scores, k, pads, seen, self.window)

    def _choose(self, scores: Tensor, k: Tensor, pads: Tensor | None, seen: int, window: int) -> Tensor:
        rules = (self._keep_of(seen), window, self._clustering, self.cluster_reduce, self.head_mode)
        return _indices("ProtoKV", k, scores, *rules, pads, None, pads is not None)

    def _settle(self, k_step: Tensor, v_step: Tensor, options: dict) -> None:
        t = self._due
        super()._settle(k_step, v_step, options)
        n = len(self)
        if t < self.window and not self.frozen and self._full(n, t, self.seen):
            options = dict(options, score=self.score, group_reduce=self.group_reduce, starts=self.pads)
            if self.score == "dot":
                options.pop("sink_logits", None)
            visible = causal_limits(n, self._queries.shape[2], self.k.device)
            scores = summed_scores(self._queries, self.k, visible, None, n - self.alpha, **options)
            indices = self._choose(scores, self.k, self.pads, self.seen, self.alpha)
            self._keep(indices, self.k, self.v, self.pads, self.seen)


class SATKV(_Buffered):
    """SATKV's cache of one layer: as `ProtoKV`'s, with the highest outlier degrees instead of clusters and queries.

    A step of at least `window` tokens brings it to the budget, and so does decode when `buffer` tokens more are held
    (None: never). A fraction is one of the tokens seen, but never less than the window. Settings as in
    `satkv_compress`.
    """

    def __init__(
        self,
        budget: int | float,
        window: int = 32,
        *,
        kappa: int = 5,
        head_mode: str = "per_head",
        buffer: int | None = 128,
        attend_before_compress: bool = True,
    ):
        _check_satkv("SATKV", window, kappa, head_mode)
        self.budget, self.window, self.kappa, self.head_mode, self.buffer = budget, window, kappa, head_mode, buffer
        self._check_budget("SATKV")
        super().__init__(attend_before_compress)

    def _evict(self, k: Tensor, v: Tensor, pads: Tensor | None, seen: int) -> Tensor | None:
        n = k.shape[2]
        if not self._full(n, n - len(self), seen):
            return None
        rules = (self.window, self._keep_of(seen), self.kappa, self.head_mode)
        return _anchors("SATKV", k, *rules, pads, None, pads is not None)
