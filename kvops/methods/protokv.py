"""ProtoKV and SATKV: eviction by clusters of tokens, and by semantic anchors.

ProtoKV clusters tokens around prototypes, which are the means of semantic anchors and of chunks of text. It keeps or
evicts whole clusters by the attention of the prompt's last queries. SATKV keeps the semantic anchors and does not use
queries.

Source: "ProtoKV: Long-Context Knowledges Are Already Well-Organized Before Your Query", Yu et al.: Sec. 4,
Algorithm 1; ablations: Sec. 5.3; decode: App. O; SATKV: Sec. 4.1, App. H. There is no released code;
docs/methods/protokv.md lists the choices made where the paper leaves one.
"""

from __future__ import annotations

import functools
import math
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from ..ops.api import (
    assign_prototypes,
    build_prototypes,
    cluster_mean,
    cluster_priority,
    lsh_bucket,
    outlier_degree,
    select_topk,
)
from ..ops.checks import MAX_INT, check_bool, check_choice, check_int, check_rows_hold, plain
from ..ops.window import outside_prefix, prefix_lengths
from .base import BudgetPolicy, Needs, Policy, Protect
from .budgets import Budget, row_budgets
from .queries import QueryPolicy, Score
from .random_numbers import random_integers
from .select import places, select_budget, shared_scores
from .view import View

#: With num_chunks=None: the most chunks, and the fewest tokens of one. With 4 buckets these are the paper's 500
#: prototypes for its prompts, which have 5,000 tokens and more.
MOST_CHUNKS = 496
CHUNK_TOKENS = 10
Clusters = Literal["prototypes", "chunks", "lsh"]
ClusterReduce = Literal["mean", "sum"]
CLUSTERS: tuple[Clusters, ...] = get_args(Clusters)
CLUSTER_REDUCES: tuple[ClusterReduce, ...] = get_args(ClusterReduce)
MAX_KAPPA = 1024  # the largest kappa of outlier_degree
MAX_HASH_BITS = 16


@dataclass(frozen=True, eq=False)
class ProtoKV(QueryPolicy):
    """ProtoKV: keeps whole clusters of similar tokens, by the attention of the prompt's last queries.

    ```text
    anchors    = the num_sats highest outlier degrees                         (`ops.outlier_degree`)
    prototypes = the mean key of each of num_chunks chunks without the anchors, and of each of 2^hash_bits buckets
                 of anchors                                     (`ops.lsh_bucket`, `ops.build_prototypes`)
    cluster    = the prototype of highest cosine                              (`ops.assign_prototypes`)
    s[j]       = mean over the group of sum over the window of scale * q_i . k_j
    score      = mean of s over the cluster's tokens                          (`ops.cluster_mean`)
    ```

    All of this covers the tokens before the last w, per head. The w newest tokens are kept. Before them whole clusters
    are kept by descending score; of the cluster that straddles the budget, the tokens with the highest s are kept.

    A cache compresses the prompt by its last `window` queries. Each chunk of a chunked prefill and each further turn is
    compressed in the same way, together with the tokens kept before. In decode (App. O) new tokens are kept until the
    cache holds `buffer` tokens more than the budget. Then the queries of the last `alpha` tokens observe, and the cache
    keeps these tokens and budget - alpha of the others.

    Attributes:
        budget: See `BudgetPolicy`. It must hold the window.
        sinks: See `BudgetPolicy`. Sinks are in no cluster.
        group_reduce: See `QueryPolicy`.
        window: How many of the last queries observe; their tokens are kept. None is 8 for budgets of at most 128
            tokens, else 32.
        kappa: The neighbours on either side from which an anchor differs, 1 to 1024.
        num_sats: The number of anchors; 0 for none.
        num_chunks: The number of chunks. None is one per 10 of the m tokens before the window, at most 496:
            min(496, max(1, m // 10)), for each row of a padded batch.
        projection: fp32 [bits, d] on k's device, of the hash; bits is hash_bits, or with clusters="lsh" enough for all
            clusters. None draws projection and phase from `seed` (`lsh_projection`).
        phase: fp32 [bits] on k's device, of the hash; given together with `projection`.
        seed: The seed of the hash, at least 0.
        hash_bits: The bits of the hash, 1 to 16.
        clusters: "prototypes", or an ablation with the same number of clusters. "chunks": all prototypes are chunks,
            without anchors. "lsh": no prototypes; a cluster is a bucket, with enough bits, modulo the number of
            clusters.
        score: "dot", or "softmax" or "drop" as in `SnapKV`.
        cluster_reduce: "mean" (Algorithm 1) or "sum" (Eq. 11).
        whole_clusters: Never cut a cluster (Eq. 2; one-shot calls only). Fewer tokens than the budget may be kept.
        head_mode: "per_head", or "shared": all heads keep the same tokens, ranked by the mean over heads of their
            clusters' scores, then of their own. Clusters are then not kept whole.
        buffer: See `KeyPolicy`.
        protect: See `KeyPolicy`.
        alpha: The observation window of decode.

    Source: ProtoKV, Sec. 4, Algorithm 1; decode: App. O.
    """

    needs = Needs(dense=False, positions=False)
    protects_window: ClassVar[bool] = True
    window: int = None  # type: ignore[assignment]  # `check` replaces None
    _: KW_ONLY
    kappa: int = 5
    num_sats: int = 32
    num_chunks: int | None = None
    projection: Tensor | None = None
    phase: Tensor | None = None
    seed: int = 0
    hash_bits: int = 2
    clusters: Clusters = "prototypes"
    score: Score = "dot"
    cluster_reduce: ClusterReduce = "mean"
    whole_clusters: bool = False
    buffer: int | float | None = 128
    protect: Protect | None = None
    alpha: int = 8

    def check(self) -> None:
        if self.window is None:
            small = isinstance(self.budget, int) and self.budget <= 128
            object.__setattr__(self, "window", 8 if small else 32)
        check_int(self.name, "window", self.window, 1)
        check_clusters(self)
        check_choice(self.name, "cluster_reduce", self.cluster_reduce, CLUSTER_REDUCES)
        check_bool(self.name, "whole_clusters", self.whole_clusters)
        check_int(self.name, "alpha", self.alpha, 1)
        if self.head_mode == "adaptive":
            raise ValueError(f"{self.name}: head_mode must not be 'adaptive'; pass a budget from kvops.head_budgets")
        if self.whole_clusters and self.head_mode == "shared":
            raise ValueError(f"{self.name}: whole_clusters=True needs head_mode='per_head', got 'shared'")
        super().check()

    def check_cache(self, layer: int, num_layers: int) -> None:
        super().check_cache(layer, num_layers)
        if self.whole_clusters:
            raise ValueError(
                f"{self.name}: the heads of a cache keep the same number of tokens, but whole clusters differ in size; "
                "expected whole_clusters=False"
            )
        if self.buffer is not None and isinstance(self.budget, int) and self.budget < self.alpha:
            raise ValueError(f"{self.name}: budget must hold alpha tokens, expected {self.alpha}, got {self.budget}")

    @property
    def num_buckets(self) -> int:
        return 1 << self.hash_bits

    @property
    def num_clusters(self) -> int:
        """The number of clusters of a long prompt, some of which may be empty."""
        return (MOST_CHUNKS if self.num_chunks is None else self.num_chunks) + self.num_buckets

    def chunks(self, view: View) -> tuple[int, int]:
        """The most chunks of a row, and the fewest tokens of one."""
        if self.num_chunks is None:
            return max(1, min(MOST_CHUNKS, view.n // CHUNK_TOKENS)), CHUNK_TOKENS
        return self.num_chunks, 1

    @property
    def bits(self) -> int:
        """The bits of the hash: `hash_bits`, or with clusters="lsh" enough for all clusters."""
        return max(1, (self.num_clusters - 1).bit_length()) if self.clusters == "lsh" else self.hash_bits

    @property
    def decode_window(self) -> int:
        return self.alpha

    def room(self, view: View) -> int:
        return max(super().room(view), self.alpha)

    @classmethod
    def at_budget(
        cls, budget: int, n: int, num_layers: int, streaming: bool, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Keeps the buffer of the paper's decode, App. O."""
        return {"budget": budget}

    def resumed(self, before: int, n: int, prompt: int) -> Policy:
        return replace(self.protecting(prompt), budget=self.held(n, prompt), window=self.rows_at(n, prompt))

    def assign(self, view: View, starts: Tensor | None, prefix: Tensor) -> Tensor:
        """The cluster of each token, int32 [b, Hk, n]; -1 for keys that are not finite and outside of the prefix.

        starts, prefix: int32 [b], the first token to cluster and the number of tokens to cluster.
        """
        k, pages = view.k, view.block_table
        spans: dict[str, Any] = {"starts": starts, "lengths": prefix}
        count, least = self.chunks(view)
        of_chunks: dict[str, Any] = spans | {"num_chunks": count, "least_chunk": least}
        if self.clusters == "lsh":
            slots = torch.arange(view.n, device=k.device).expand(view.rows, view.heads, -1)
            end = prefix if starts is None else starts + prefix
            slots = slots.masked_fill(outside_prefix(slots, 0, starts, end), -1)
            buckets = lsh_bucket(k, slots, *self._hash(k), block_table=pages)
            clusters: Tensor | int = self.num_clusters
            if self.num_chunks is None:
                clusters = ((prefix // least).clamp(1, count) + self.num_buckets)[:, None, None]
            return torch.where(buckets < 0, buckets, buckets % clusters)
        if self.clusters == "chunks":
            prototypes, _ = build_prototypes(
                k, num_buckets=0, block_table=pages, **of_chunks | {"num_chunks": count + self.num_buckets}
            )
        else:
            degrees = outlier_degree(k, kappa=self.kappa, block_table=pages, **spans)
            sats = select_topk(degrees, k=self.num_sats, **spans)
            buckets = lsh_bucket(k, sats, *self._hash(k), block_table=pages)
            anchors = of_chunks | {"sat_indices": sats, "buckets": buckets, "num_buckets": self.num_buckets}
            prototypes, _ = build_prototypes(k, block_table=pages, **anchors)
        return assign_prototypes(k, prototypes, block_table=pages, **spans)

    def _hash(self, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.projection is None or self.phase is None:
            draw = _draw if torch.compiler.is_compiling() else _drawn
            return draw(k.shape[3], self.bits, self.seed, k.device)
        return self.projection, self.phase

    def choose(self, scores: Tensor, view: View, budget: Budget, *, recent: int = 0, **options: Any) -> Tensor:
        """Select the slots to keep, given the window's scores of each token, fp32 [b, Hk, n]."""
        spans = view.spans
        starts, prefix = spans["starts"], prefix_lengths(scores, recent, spans["starts"], view.lengths)
        if self.sinks:
            first = torch.zeros_like(prefix) if starts is None else starts
            starts, prefix = first + prefix.clamp(max=self.sinks), (prefix - self.sinks).clamp(min=0)
        assignment = self.assign(view, starts, prefix)
        count = self.chunks(view)[0] + self.num_buckets
        cluster_scores = cluster_mean(scores, assignment, num_clusters=count, reduce=self.cluster_reduce)
        if self.head_mode == "shared":
            ranks = shared_ranks(scores, assignment, cluster_scores)
            return select_budget(self.name, ranks, view.heads, budget, sinks=self.sinks, recent=recent, **spans)
        rows, heads = view.rows, view.heads
        keep, budgets = row_budgets(self.name, budget, (rows, heads), view.n, spans["starts"], view.lengths)
        protected, left = recent + self.sinks, None
        if budgets is not None:
            check_rows_hold(self.name, budgets, self.sinks, torch.full_like(budgets, recent))
            budgets = budgets.expand(rows, heads).contiguous()
            left = budgets - protected
        priority, kept = cluster_priority(
            scores, assignment, cluster_scores, k=keep - protected, budgets=left, whole=self.whole_clusters
        )
        if self.whole_clusters:
            budgets = kept + protected
        return select_topk(priority, k=keep, sinks=self.sinks, window=recent, budgets=budgets, **spans)


def check_clusters(of: ProtoKV) -> None:
    """Check the settings of the clustering."""
    op = of.name
    check_choice(op, "clusters", of.clusters, CLUSTERS)
    for name, low, high in (
        ("kappa", 1, MAX_KAPPA),
        ("num_sats", 0, MAX_INT),
        ("num_chunks", 0, 1 << 24),
        ("hash_bits", 1, MAX_HASH_BITS),
        ("seed", 0, MAX_INT),
    ):
        if (value := getattr(of, name)) is None and name == "num_chunks":
            continue
        check_int(op, name, value, low, high)
    if of.clusters == "prototypes" and of.num_chunks == 0 and not of.num_sats:
        raise ValueError(f"{op}: num_sats + num_chunks must be at least 1, got 0")
    if (of.projection is None) != (of.phase is None):
        raise ValueError(f"{op}: projection and phase must be given together, got one of them")
    if of.projection is None:
        return
    if of.clusters == "chunks":
        raise ValueError(f"{op}: with clusters='chunks', projection and phase must be None, got tensors")
    for name, x, dim in (("projection", of.projection, 2), ("phase", of.phase, 1)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dtype != torch.float32 or x.dim() != dim or x.shape[0] != of.bits:
            shape = f"[{of.bits}, d]" if dim == 2 else f"[{of.bits}]"
            raise ValueError(f"{op}: {name} must be torch.float32 {shape}, got {x.dtype} {list(x.shape)}")


def shared_ranks(scores: Tensor, assignment: Tensor, cluster_scores: Tensor) -> Tensor:
    """Integers that order tokens by the mean over heads of their clusters' scores, then of their own: fp32 [b, 1, n].

    They go up to n and are exact in fp32 for n <= 2^24.
    """
    clusters = cluster_scores.gather(2, assignment.clamp(min=0).long()).masked_fill_(assignment < 0, torch.nan)
    keys = [shared_scores(x) for x in (clusters, scores)]
    order = places(*(torch.where(x.isnan(), -torch.inf, x) for x in keys))
    return torch.where(keys[0].isnan(), torch.nan, (scores.shape[2] - order).float())


@dataclass(frozen=True, eq=False)
class SATKV(BudgetPolicy):
    """SATKV: keeps the last `window` tokens, and before them the tokens with the highest outlier degrees.

    The degrees (`ops.outlier_degree`) are computed over the tokens before the window alone. SATKV does not use queries.

    A step of at least `window` tokens brings a cache down to the budget. In decode the cache evicts once it holds
    `buffer` tokens more than the budget.

    Attributes:
        budget: See `BudgetPolicy`. It must hold the window.
        sinks: See `BudgetPolicy`.
        head_mode: See `BudgetPolicy`.
        window: Newest tokens that are always kept.
        kappa: The neighbours on either side from which an anchor differs, 1 to 1024.
        buffer: See `KeyPolicy`.
        protect: See `KeyPolicy`.

    Source: ProtoKV, Sec. 4.1, App. H.
    """

    needs = Needs(dense=False, positions=False)
    by_head: ClassVar[bool] = True

    window: int = 32
    _: KW_ONLY
    kappa: int = 5
    buffer: int | float | None = 128
    protect: Protect | None = None

    def check(self) -> None:
        check_int(self.name, "window", self.window, 0)
        check_int(self.name, "kappa", self.kappa, 1)
        if self.kappa > MAX_KAPPA:
            raise ValueError(f"{self.name}: kappa must be at most {MAX_KAPPA}, got {self.kappa}")
        super().check()

    def check_cache(self, layer: int, num_layers: int) -> None:
        super().check_cache(layer, num_layers)
        check_int(self.name, "window", self.window, 1)

    def scores(self, view: View) -> Tensor:
        prefix = prefix_lengths(view.k, self.window, view.starts, view.lengths)  # with pages, lengths are given
        return outlier_degree(view.k, kappa=self.kappa, **{**view.slots, "lengths": prefix})

    @classmethod
    def at_budget(
        cls, budget: int, n: int, num_layers: int, streaming: bool, options: dict[str, Any]
    ) -> dict[str, Any]:
        """A window of 32 tokens, or half the budget if that is less."""
        return {"budget": budget, "window": max(1, min(32, budget // 2))}


def lsh_projection(
    head_dim: int, bits: int = 2, seed: int = 0, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Draw the random Fourier features of `ops.lsh_bucket`.

    The same arguments give the same numbers on every device.

    Args:
        head_dim: d, the head dim of K.
        bits: The bits of the hash.
        seed: The seed, at least 0.
        device: The device of the results; None is torch's default.

    Returns:
        (projection, phase): fp32 [bits, d] ~ N(0, 1 / d) and fp32 [bits] ~ U(0, 2 pi).

    Raises:
        TypeError: A number is not an int.
        ValueError: A number is too small.

    Source: ProtoKV, Sec. 4.2, Eq. 7, with gamma = 1 / sqrt(d).
    """
    for name, value, low, most in (
        ("head_dim", head_dim, 1, 1 << 14),
        ("bits", bits, 1, 1 << 10),
        ("seed", seed, 0, MAX_INT),
    ):
        check_int("lsh_projection", name, value, low, most)
    head_dim, bits, seed = plain(head_dim), plain(bits), plain(seed)
    return _draw(head_dim, bits, seed, torch.get_default_device() if device is None else torch.device(device))


def _draw(head_dim: int, bits: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draws on the CPU, so that the logarithms and cosines are the same for every device."""

    def uniform(stream: int, width: int) -> Tensor:  # in (0, 1), fp64 [bits, width]
        position = torch.arange(width, dtype=torch.int32, device="cpu").expand(1, bits, -1)
        return (random_integers(position, seed, stream)[0].double() + 0.5) / 2**24

    radius, angle = (-2 * uniform(0, head_dim).log()).sqrt(), 2 * math.pi * uniform(1, head_dim)  # Box-Muller
    projection, phase = radius * angle.cos() / math.sqrt(head_dim), 2 * math.pi * uniform(2, 1)[:, 0]
    return projection.float().to(device), phase.float().to(device)


_drawn = functools.lru_cache(maxsize=64)(_draw)  # shared tensors: never write to them
