"""The rows of the benchmark: one entry of `ROWS` per operator, and one per whole call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import kvops
from kvops import ops
from kvops.methods.budgets import fraction_of
from kvops.ops.ladder import make_ladder
from kvops.ops.lag import kept_length
from kvops.ops.rope import Rope

from . import eager

KEEP = 0.25  # fraction of the tokens that rows select or move
SINK = 16  # LagKV's sinks
GROUP = 4  # query heads per KV head
WINDOW = 32  # query rows of the observation window, SnapKV's default
PROTOTYPES = 500  # the most of ProtoKV's default, with its four buckets
HIDDEN = 4096  # output channels of the output projection
SIMILAR = 2048  # tokens of the key_similarity rows, whose work grows with their square
LAYERS = 32  # of the ladder rows, which divide the tokens; fewer if each would have less than 64
NEAR_FLOOR = 1 / 1.3  # a whole call may take at most 1.3 times as long as a copy of its bytes


class Window(NamedTuple):
    """The last w queries of a sequence."""

    q: Tensor  # [batch, GROUP * heads, w, d]
    visible: Tensor  # int32 [w]: causal
    lse: Tensor  # fp32 [batch, GROUP * heads, w]


class Clusters(NamedTuple):
    """Intermediate results of ProtoKV."""

    hash: tuple[Tensor, Tensor]  # projection and phase
    sats: Tensor
    buckets: Tensor
    prototypes: Tensor
    assignment: Tensor
    means: Tensor


class Statistics(NamedTuple):
    """Of the queries of one layer."""

    mean: Tensor  # [GROUP * heads, d]
    cov: Tensor  # [GROUP * heads, d, d]
    norms: Tensor  # [GROUP * heads, d / 2]


class Ladder:
    """The last `count` layers of a model, with slices of K and V, and LaCache's plan for an overflow."""

    def __init__(self, k: Tensor, v: Tensor, count: int, num_layers: int):
        n = k.shape[2] // count
        self.keys, self.values = ([x[:, :, i * n : (i + 1) * n] for i in range(count)] for x in (k, v))
        self.layers = [num_layers - 1 - i for i in range(count)]
        freed = make_ladder(num_layers, None, None, "paper").freed
        self.plan = kvops.lacache_plan(n, num_layers=num_layers, budget=n - freed)
        self.indices = [self.plan.indices(layer, k.device) for layer in self.layers]
        slots = torch.arange(len(self.plan), device=k.device)
        self.rows = sum(int((x != slots).sum()) for x in self.indices)  # that move, of a (batch, head)

    def moved(self, x: Tensor) -> Tensor:
        """Return as many elements of x (K or V) as the plan moves."""
        b, heads, _, d = x.shape
        return x.view(-1)[: b * heads * self.rows * d]


class Case:
    """The inputs of one measurement: random K and V, [batch, heads, n, d], and the operators' other arguments.

    Tensors are created on first use.
    """

    def __init__(
        self,
        n: int,
        dtype: torch.dtype,
        heads: int = 8,
        d: int = 128,
        device: str = "cpu",
        batch: int = 1,
        seed: int = 0,
    ):
        self.n, self.dtype, self.heads, self.d, self.device, self.batch = n, dtype, heads, d, device, batch
        self._seed = seed
        self._windows: dict[int, Window] = {}

    def _randn(self, *shape: int, stream: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(3 * self._seed + stream)
        return torch.randn(self.batch, self.heads, *shape, device=self.device, generator=generator)

    @cached_property
    def _source(self) -> list[Tensor]:
        return [self._randn(self.n, self.d, stream=i).to(self.dtype) for i in range(2)]

    @cached_property
    def k(self) -> Tensor:
        return self._source[0].clone()

    @cached_property
    def v(self) -> Tensor:
        return self._source[1].clone()

    @cached_property
    def scores(self) -> Tensor:
        return self._randn(self.n, stream=2)

    def window(self, rows: int) -> Window:
        """Return the window of the last `rows` tokens."""
        if rows not in self._windows:
            self._windows[rows] = self._window(rows)
        return self._windows[rows]

    def _window(self, rows: int) -> Window:
        generator = torch.Generator(self.device).manual_seed(3 * self._seed + 1)
        shape = (self.batch, GROUP * self.heads, rows, self.d)
        q = torch.randn(shape, device=self.device, generator=generator).to(self.dtype)
        visible = torch.arange(self.n - rows + 1, self.n + 1, dtype=torch.int32, device=self.device)
        return Window(q, visible, ops.window_attention(q, self.k, self.v, visible)[1])

    @cached_property
    def alike(self) -> Tensor:
        """Keys of which each has a similar one among the last few: a common direction, and the random keys."""
        return (1.5 * self._randn(1, self.d, stream=2) + self.k.float()).to(self.dtype)

    @cached_property
    def int8(self) -> dict[str, Any]:
        """K and V rounded to int8, with their scales, by the names of the arguments."""
        (k, k_scale), (v, v_scale) = kvops.quantize_rows(self.k), kvops.quantize_rows(self.v)
        return {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}

    @cached_property
    def w_o(self) -> Tensor:
        """The output projection of GROUP query heads per KV head, [HIDDEN, GROUP * heads * d]."""
        width = GROUP * self.heads * self.d
        generator = torch.Generator(self.device).manual_seed(3 * self._seed + 2)
        weights = torch.randn(HIDDEN, width, device=self.device, generator=generator)
        return (weights / width**0.5).to(self.dtype)

    @cached_property
    def clusters(self) -> Clusters:
        hashing = kvops.lsh_projection(self.d, device=self.device)
        sats = ops.select_topk(ops.outlier_degree(self.k), k=32)
        buckets = ops.lsh_bucket(self.k, sats, *hashing)
        prototypes, _ = ops.build_prototypes(self.k, sat_indices=sats, buckets=buckets, num_chunks=PROTOTYPES - 4)
        assignment = ops.assign_prototypes(self.k, prototypes)
        means = ops.cluster_mean(self.scores, assignment, num_clusters=PROTOTYPES)
        return Clusters(hashing, sats, buckets, prototypes, assignment, means)

    @cached_property
    def statistics(self) -> Statistics:
        generator = torch.Generator(self.device).manual_seed(3 * self._seed + 2)
        shape = (GROUP * self.heads, self.d, self.d)
        factor = torch.randn(shape, device=self.device, generator=generator)
        mean, norms = factor[:, 0].contiguous(), factor[:, 1, : self.d // 2].abs().contiguous()
        return Statistics(mean, factor @ factor.mT / self.d, norms)

    @property
    def held(self) -> int:
        """The bytes of the tensors that have been created."""
        return size(*(x for x in tree_leaves(vars(self)) if isinstance(x, Tensor)))

    def restore(self) -> None:
        """Undo in-place calls."""
        self.k.copy_(self._source[0])
        self.v.copy_(self._source[1])

    @property
    def budget(self) -> int:
        return max(1, int(KEEP * self.n))

    @property
    def lag(self) -> int:
        """LagKV's default of 1024 at n = 65536; the number of partitions is the same at every n."""
        return max(4, self.n // 64)

    @property
    def partitions(self) -> int:
        return (self.n - SINK) // self.lag

    @property
    def ratio(self) -> float:
        """LagKV's r that keeps a fraction KEEP of all tokens (Eq. 10: sinks and tail are always kept)."""
        tail = self.n - SINK - (self.partitions - 1) * self.lag
        return (self.budget - SINK - tail) / ((self.partitions - 1) * self.lag)

    @cached_property
    def indices(self) -> Tensor:
        return eager.select_topk(self.scores, self.budget)

    @cached_property
    def run(self) -> Tensor:
        """As many indices as `indices`, in one run: the last tokens."""
        return torch.arange(self.n - self.budget, self.n, device=self.device).expand_as(self.indices).contiguous()

    @cached_property
    def out(self) -> tuple[Tensor, Tensor]:
        """Warm output memory for gather_kv and keydiff_compress."""
        k, v = (x[:, :, : self.budget].clone(memory_format=torch.contiguous_format) for x in self._source)
        return k, v

    @property
    def layers(self) -> int:
        """Layers of the grouped ladder."""
        return min(LAYERS, self.n // 64)

    @cached_property
    def ladder(self) -> Ladder:
        """The tokens split over a model's layers, at the step of a stream that compacts one ladder."""
        return Ladder(self.k, self.v, self.layers, self.layers)

    @cached_property
    def deep_ladder(self) -> Ladder:
        """The tokens as one layer."""
        return Ladder(self.k, self.v, 1, self.layers)

    @cached_property
    def ladder_out(self) -> tuple[Tensor, Tensor]:
        """Warm output memory for ladder_gather, all layers in one tensor."""
        shape = (self.layers, self.batch, self.heads, len(self.ladder.plan), self.d)
        k, v = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        return k, v

    @cached_property
    def inv_freq(self) -> Tensor:
        return Rope.of(self.d, device=self.device).inv_freq

    @cached_property
    def angles(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all slots."""
        return Rope.of(self.d, device=self.device).tables(torch.arange(self.n, device=self.device))

    @cached_property
    def rope_out(self) -> tuple[Tensor]:
        """Warm memory for the rotated keys."""
        return (torch.zeros_like(self.k),)

    @cached_property
    def lagkv_out(self) -> tuple[Tensor, Tensor]:
        kept = kept_length(self.n, SINK, self.lag, fraction_of(self.ratio, self.lag))
        k, v = (x[:, :, :kept].clone(memory_format=torch.contiguous_format) for x in self._source)
        return k, v


@dataclass(frozen=True)
class Row:
    """How one operator or whole call is measured.

    forms: name -> kvops call.
    eager, args: the baseline and its arguments; it also runs under torch.compile.
    bytes: bytes that must be read and written, for GB/s.
    against: the bandwidth to compare with: "read", "copy", "shift" (a copy within one tensor, to lower addresses); ""
        if the work is too small to compare.
    touched: the tensors on which this bandwidth is measured: those read, or for copies tensors of the result's size.
    peers: other calls to compare with, by name: from libraries, or parts of the work.
    parts: the parts of a whole call with fresh outputs: scores + select + a clone of the kept bytes.
    restore: whether the form "in place" needs `Case.restore` first (untimed), because its work depends on the values.
    per_dtype: False if the dtype of K and V does not matter.
    shape: (heads, n) of a row that ignores --heads and --n.
    flops: floating-point operations of a compute-bound row; its peers include a matrix product of as many.

    For a GPU:
    cuda_only: not measured on the CPU unless --ops names it.
    batch: batch size; larger than 1 where one layer of one sequence does not fill the GPU.
    most: the largest n (the batch must fit in memory).
    stages: parts of a whole call whose fraction of its time is reported.
    copy_goal, eager_goal, peer_goals: the fraction of the copy bandwidth to reach, and how many times longer eager
        PyTorch and the peers should take, from 131,072 tokens on (for all forms of a row with several, except "in
        place").
    """

    forms: dict[str, Callable[[Case], Any]]
    eager: Callable[..., Any]
    args: Callable[[Case], tuple[Any, ...]]
    bytes: Callable[[Case], int]
    against: str
    touched: Callable[[Case], tuple[Tensor, ...]]
    peers: Callable[[Case], dict[str, Callable[[], Any]]] = lambda c: {}
    parts: Callable[[Case], Any] | None = None
    restore: bool = False
    per_dtype: bool = True
    shape: tuple[int, int] | None = None
    flops: Callable[[Case], int] | None = None
    cuda_only: bool = False
    batch: int = 1
    most: int | None = None
    stages: dict[str, Callable[[Case], Any]] = field(default_factory=dict)
    copy_goal: float | None = None
    eager_goal: float | None = None
    peer_goals: dict[str, float] = field(default_factory=dict)


def size(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _lagkv_parts(c: Case) -> None:
    scores = ops.lag_score(c.k, c.v, lag=c.lag, prefix=SINK)
    ops.select_topk(scores, k=fraction_of(c.ratio, c.lag), sinks=SINK, seq_len=c.n)
    for x in c.lagkv_out:
        x.clone()


def _keydiff_parts(c: Case) -> None:
    ops.select_topk(ops.anchor_cosine(c.k), k=c.budget)
    for x in c.out:
        x.clone()


def _keydiff(
    shape: tuple[int, int] | None = None, forms: tuple[str, ...] = ("out=", "in place", "fresh"), **row: Any
) -> Row:
    calls = {
        "out=": lambda c: kvops.keydiff_compress(c.k, c.v, c.budget, out=c.out),
        "in place": lambda c: kvops.keydiff_compress_(c.k, c.v, c.budget),
        "fresh": lambda c: kvops.keydiff_compress(c.k, c.v, c.budget),
    }
    return Row(
        forms={form: calls[form] for form in forms},
        eager=eager.keydiff_compress,
        args=lambda c: (c.k, c.v, c.budget),
        bytes=lambda c: 2 * size(c.k) + 2 * size(*c.out),
        against="" if shape else "read",
        touched=lambda c: (c.k,),
        parts=_keydiff_parts,
        restore=True,
        shape=shape,
        stages={"select_topk": lambda c: ops.select_topk(c.scores, k=c.budget)},
        copy_goal=NEAR_FLOOR,
        eager_goal=20,
        **row,
    )


def _gather(indices: Callable[[Case], Tensor]) -> Row:
    return Row(
        forms={
            "out=": lambda c: ops.gather_kv(c.k, c.v, indices(c), out=c.out),
            "fresh": lambda c: ops.gather_kv(c.k, c.v, indices(c)),
        },
        eager=eager.gather_kv,
        args=lambda c: (c.k, c.v, indices(c)),
        bytes=lambda c: 2 * size(*c.out),
        against="copy",
        touched=lambda c: c.out,
        copy_goal=0.85,
    )


def _compact(indices: Callable[[Case], Tensor], **row: Any) -> Row:
    return Row(
        forms={"in place": lambda c: ops.compact_kv_(c.k, c.v, indices(c))},
        eager=eager.gather_kv,
        args=lambda c: (c.k, c.v, indices(c)),
        bytes=lambda c: 2 * size(*c.out),
        against="shift",
        touched=lambda c: c.out,
        **row,
    )


def _ladder_compact(ladder: Callable[[Case], Ladder], turned: bool = False, **row: Any) -> Row:
    def call(c: Case) -> Any:
        x = ladder(c)
        return ops.ladder_compact_(
            x.keys, x.values, plan=x.plan, layer=x.layers, inv_freq=c.inv_freq if turned else None
        )

    def args(c: Case) -> tuple[Any, ...]:
        x = ladder(c)
        return x.keys, x.values, x.indices, *([c.inv_freq] if turned else [])

    return Row(
        forms={"in place": call},
        eager=eager.ladder_gather,
        args=args,
        bytes=lambda c: 2 * size(ladder(c).moved(c.k), ladder(c).moved(c.v)),
        against="shift",
        touched=lambda c: (ladder(c).moved(c.k), ladder(c).moved(c.v)),
        **row,
    )


def _stacked(c: Case) -> Any:
    """Run the grouped ladder's work as one layer with a larger batch."""
    tokens = c.layers * c.ladder.plan.n
    k, v = (x[:, :, :tokens].unflatten(2, (c.layers, -1)).flatten(0, 1) for x in (c.k, c.v))
    return ops.ladder_compact_(k, v, plan=c.ladder.plan, layer=0)


def _ladder_gather(c: Case, **out: Any) -> Any:
    return ops.ladder_gather(c.ladder.keys, c.ladder.values, plan=c.ladder.plan, layer=c.ladder.layers, **out)


def _ladder_index_select(c: Case) -> None:
    for layers, outputs in zip((c.ladder.keys, c.ladder.values), c.ladder_out):
        for x, indices, out in zip(layers, c.ladder.indices, outputs.unbind()):
            torch.index_select(x, 2, indices, out=out)


def _window_scores(rows: int, with_lse: bool, **row: Any) -> Row:
    def call(c: Case) -> Tensor:
        w = c.window(rows)
        return ops.window_scores(w.q, c.k, w.visible, lse=w.lse if with_lse else None)

    return Row(
        forms={"": call},
        eager=eager.window_scores,
        args=lambda c: (c.window(rows).q, c.k),
        bytes=lambda c: size(c.k) * (1 if with_lse else 2),
        against="read",
        touched=lambda c: (c.k,),
        peers=lambda c: {"matmul": lambda: eager.grouped_logits(c.window(rows).q, c.k)},
        **row,
    )


def _window_attention(rows: int, floor: Callable[[Case], int], **row: Any) -> Row:
    return Row(
        forms={"": lambda c: ops.window_attention(c.window(rows).q, c.k, c.v, c.window(rows).visible)},
        eager=eager.window_attention,
        args=lambda c: (c.window(rows).q, c.k, c.v),
        bytes=floor,
        against="read",
        touched=lambda c: (c.k, c.v),
        peers=lambda c: eager.flash(c.window(rows).q, c.k, c.v),
        **row,
    )


def _decode(c: Case, k: Tensor | None = None, **options: Any) -> Any:
    w = c.window(1)
    return ops.window_attention(w.q, c.k if k is None else k, c.v, w.visible, **options)


def _snapkv(with_lse: bool, **row: Any) -> Row:
    def call(c: Case, **out: Any) -> Any:
        w = c.window(WINDOW)
        return kvops.snapkv_compress(c.k, c.v, w.q, c.budget, lse=w.lse if with_lse else None, **out)

    return Row(
        forms={"out=": lambda c: call(c, out=c.out), "fresh": call},
        eager=eager.snapkv_compress,
        args=lambda c: (c.k, c.v, c.window(WINDOW).q, c.budget),
        bytes=lambda c: size(c.k) * (1 if with_lse else 2) + 2 * size(*c.out),
        against="read",
        touched=lambda c: (c.k,),
        peers=lambda c: {"repeat_kv": lambda: eager.snapkv_compress_expanded(c.k, c.v, c.window(WINDOW).q, c.budget)},
        **row,
    )


def _prototype_product(c: Case) -> Callable[[], Tensor]:
    """Multiply K by the prototypes in bf16, without argmax; writes [n, C]."""
    k, prototypes = c.k.bfloat16(), c.clusters.prototypes.bfloat16().mT
    out = k.new_empty(*k.shape[:3], PROTOTYPES)
    return lambda: torch.matmul(k, prototypes, out=out)


def _covariance_product(c: Case) -> None:
    """Multiply K by each covariance in K's dtype, head by head; the products are written but not reduced."""
    for head, cov in enumerate(c.statistics.cov.to(c.k.dtype)):
        torch.matmul(c.k[:, head // GROUP], cov)


def _protokv(c: Case, **out: Any) -> Any:
    return kvops.protokv_compress(c.k, c.v, c.window(WINDOW).q, c.budget, num_chunks=PROTOTYPES - 4, **out)


def _protokv_peers(c: Case) -> dict[str, Callable[[], Any]]:
    q = c.window(WINDOW).q
    peers = {
        "bf16 product": _prototype_product(c),
        "assign_prototypes": lambda: ops.assign_prototypes(c.k, c.clusters.prototypes),
        "SnapKV": lambda: eager.snapkv_compress(c.k, c.v, q, c.budget),
        "our SnapKV": lambda: kvops.snapkv_compress(c.k, c.v, q, c.budget, out=c.out),
    }
    if c.device != "cpu":  # there it takes ten seconds
        peers["K-means"] = lambda: eager.kmeans(c.k, PROTOTYPES)
    return peers


def _key_product(c: Case) -> Callable[[], Tensor]:
    """Multiply K by itself; writes [n, n]."""
    out = c.k.new_empty(*c.k.shape[:3], c.n)
    return lambda: torch.matmul(c.k, c.k.mT, out=out)


def _key_similarity(keys: Callable[[Case], Tensor], **row: Any) -> Row:
    return Row(
        forms={"": lambda c: ops.key_similarity(keys(c))},
        eager=eager.key_similarity,
        args=lambda c: (keys(c),),
        bytes=lambda c: 2 * size(c.k) + size(c.scores),
        against="",
        touched=lambda c: (c.k,),
        peers=lambda c: {"matmul": _key_product(c)},
        shape=(8, SIMILAR),
        **row,
    )


def _value_product(c: Case) -> Callable[[], Tensor]:
    """Project the values of one query head per KV head, GROUP times; writes [n, HIDDEN] each."""
    out = c.v.new_empty(*c.v.shape[:3], HIDDEN)
    weights = c.w_o.unflatten(1, (c.heads, GROUP, c.d)).permute(2, 1, 3, 0)  # [GROUP, heads, d, HIDDEN]
    return lambda: [torch.matmul(c.v, x, out=out) for x in weights][0]


# Moves are measured on randomly scattered rows, which defeat prefetching, and on one run of rows.
ROWS: dict[str, Row] = {
    "lag_score": Row(
        forms={"": lambda c: ops.lag_score(c.k, c.v, lag=c.lag, prefix=SINK)},
        eager=eager.lag_score,
        args=lambda c: (c.k, c.v, c.lag, SINK),
        bytes=lambda c: size(c.k, c.v) * c.partitions * c.lag // c.n,
        against="read",
        touched=lambda c: (c.k, c.v),
        copy_goal=0.82,
    ),
    "anchor_cosine": Row(
        forms={"": lambda c: ops.anchor_cosine(c.k)},
        eager=eager.anchor_cosine,
        args=lambda c: (c.k,),
        bytes=lambda c: 2 * size(c.k),
        against="read",
        touched=lambda c: (c.k,),
        copy_goal=0.88,
    ),
    "select_topk": Row(
        forms={"": lambda c: ops.select_topk(c.scores, k=c.budget)},
        eager=eager.select_topk,
        args=lambda c: (c.scores, c.budget),
        bytes=lambda c: size(c.scores, c.indices),
        against="read",
        touched=lambda c: (c.scores,),
        per_dtype=False,
        eager_goal=5,
    ),
    "window_scores": _window_scores(WINDOW, True, copy_goal=0.45),
    "window_scores, no lse": _window_scores(WINDOW, False),
    "window_scores, 8 rows": _window_scores(8, True, copy_goal=0.8),
    "window_attention": _window_attention(WINDOW, lambda c: 2 * size(c.k) + size(c.v), copy_goal=0.5),
    "drop_scores": Row(
        forms={"": lambda c: ops.drop_scores(c.window(WINDOW).q, c.k, c.v, c.window(WINDOW).visible)},
        eager=eager.drop_scores,
        args=lambda c: (c.window(WINDOW).q, c.k, c.v),
        bytes=lambda c: 2 * size(c.k, c.v),
        against="read",
        touched=lambda c: (c.k, c.v),
    ),
    "window_attention, decode": _window_attention(
        1, lambda c: size(c.k, c.v), copy_goal=0.8, peer_goals={"flash": 1 / 1.1, "cudnn": 1 / 1.1}
    ),
    "window_attention, decode, RoPE": Row(
        forms={"": lambda c: _decode(c, cos=c.angles[0], sin=c.angles[1])},
        eager=eager.turned_attention,
        args=lambda c: (c.window(1).q, c.k, c.v, *c.angles),
        bytes=lambda c: size(c.k, c.v, *c.angles),
        against="read",
        touched=lambda c: (c.k, c.v),
        peers=lambda c: {
            "rotated before": lambda: _decode(c),
            "rope_at_slots first": lambda: _decode(c, ops.rope_at_slots(c.k, *c.angles, out=c.rope_out[0])),
        },
    ),
    "window_attention, decode, bias": Row(
        forms={"": lambda c: _decode(c, key_bias=c.scores)},
        eager=eager.window_attention,
        args=lambda c: (c.window(1).q, c.k, c.v, c.scores),
        bytes=lambda c: size(c.k, c.v, c.scores),
        against="read",
        touched=lambda c: (c.k, c.v),
        peers=lambda c: {"no bias": lambda: _decode(c)},
    ),
    "window_attention, decode, int8": Row(
        forms={"": lambda c: ops.window_attention(c.window(1).q.bfloat16(), visible=c.window(1).visible, **c.int8)},
        eager=eager.int8_attention,
        args=lambda c: (c.window(1).q.bfloat16(), *c.int8.values()),
        bytes=lambda c: size(*c.int8.values()),
        against="read",
        touched=lambda c: (c.int8["k"], c.int8["v"]),
        peers=lambda c: {
            "not rounded": lambda: _decode(c),
        },
    ),
    "gather_kv": _gather(lambda c: c.indices),
    "gather_kv, one run": _gather(lambda c: c.run),
    "compact_kv_": _compact(lambda c: c.indices, copy_goal=0.75),
    "compact_kv_, one run": _compact(lambda c: c.run),
    "compact_kv_, batch 32": _compact(lambda c: c.indices, cuda_only=True, batch=32, most=131072, copy_goal=0.88),
    "ladder_compact_": _ladder_compact(
        lambda c: c.ladder,
        peers=lambda c: {"one layer": lambda: _stacked(c)},
        copy_goal=0.88,
        eager_goal=2,
        peer_goals={"one layer": 1 / 1.2},
    ),
    "ladder_compact_, RoPE": _ladder_compact(lambda c: c.ladder, turned=True),
    "ladder_compact_, one layer": _ladder_compact(lambda c: c.deep_ladder),
    "ladder_gather": Row(
        forms={
            "out=": lambda c: _ladder_gather(c, out=[x.unbind() for x in c.ladder_out]),
            "fresh": lambda c: _ladder_gather(c),
        },
        eager=eager.ladder_gather,
        args=lambda c: (c.ladder.keys, c.ladder.values, c.ladder.indices),
        bytes=lambda c: 2 * size(*c.ladder_out),
        against="copy",
        touched=lambda c: c.ladder_out,
        peers=lambda c: {"index_select": lambda: _ladder_index_select(c)},
        copy_goal=0.85,
        eager_goal=2,
        peer_goals={"index_select": 1},
    ),
    "rope_at_slots": Row(
        forms={
            "out=": lambda c: ops.rope_at_slots(c.k, *c.angles, out=c.rope_out[0]),
            "fresh": lambda c: ops.rope_at_slots(c.k, *c.angles),
        },
        eager=eager.rotate_half,
        args=lambda c: (c.k, *c.angles),
        bytes=lambda c: 2 * size(c.k) + size(*c.angles),
        against="copy",
        touched=lambda c: c.rope_out,
    ),
    "outlier_degree": Row(
        forms={"": lambda c: ops.outlier_degree(c.k)},
        eager=eager.outlier_degree,
        args=lambda c: (c.k,),
        bytes=lambda c: size(c.k),
        against="read",
        touched=lambda c: (c.k,),
        copy_goal=0.8,
    ),
    "lsh_bucket": Row(
        forms={"": lambda c: ops.lsh_bucket(c.k, c.clusters.sats, *c.clusters.hash)},
        eager=eager.lsh_bucket,
        args=lambda c: (c.k, c.clusters.sats, *c.clusters.hash),
        bytes=lambda c: size(c.k) // c.n * c.clusters.sats.shape[2],
        against="",
        touched=lambda c: (c.k,),
    ),
    "build_prototypes": Row(
        forms={
            "": lambda c: ops.build_prototypes(
                c.k, sat_indices=c.clusters.sats, buckets=c.clusters.buckets, num_chunks=PROTOTYPES - 4
            )
        },
        eager=eager.build_prototypes,
        args=lambda c: (c.k, c.clusters.sats, c.clusters.buckets, PROTOTYPES - 4),
        bytes=lambda c: size(c.k, c.clusters.prototypes),
        against="read",
        touched=lambda c: (c.k,),
        copy_goal=0.8,
    ),
    "assign_prototypes": Row(
        forms={"": lambda c: ops.assign_prototypes(c.k, c.clusters.prototypes)},
        eager=eager.assign_prototypes,
        args=lambda c: (c.k, c.clusters.prototypes),
        bytes=lambda c: size(c.k, c.clusters.assignment),
        against="read",
        touched=lambda c: (c.k,),
        peers=lambda c: {"bf16 product": _prototype_product(c)},
        peer_goals={"bf16 product": 1},
    ),
    "quadratic_scores": Row(
        forms={"": lambda c: ops.quadratic_scores(c.k, c.statistics.mean, cov=c.statistics.cov)},
        eager=eager.quadratic_scores,
        args=lambda c: (c.k, c.statistics.mean, c.statistics.cov),
        bytes=lambda c: size(c.k) + 4 * GROUP * c.k.numel() // c.d,
        against="read",
        touched=lambda c: (c.k,),
        peers=lambda c: {"matmul": lambda: _covariance_product(c)},
        peer_goals={"matmul": 1},
    ),
    "quadratic_scores, means": Row(
        forms={"": lambda c: ops.quadratic_scores(c.k, c.statistics.mean)},
        eager=eager.quadratic_scores,
        args=lambda c: (c.k, c.statistics.mean),
        bytes=lambda c: size(c.k) + 4 * GROUP * c.k.numel() // c.d,
        against="read",
        touched=lambda c: (c.k,),
        copy_goal=0.8,
    ),
    "trig_scores": Row(
        forms={"": lambda c: ops.trig_scores(c.k, c.statistics.mean, norms=c.statistics.norms)},
        eager=eager.trig_scores,
        args=lambda c: (c.k, c.statistics.mean, c.statistics.norms),
        bytes=lambda c: size(c.k) + 4 * GROUP * c.k.numel() // c.d,
        against="read",
        touched=lambda c: (c.k,),
        copy_goal=0.8,
    ),
    "key_similarity": _key_similarity(
        lambda c: c.k, flops=lambda c: 2 * c.batch * c.heads * c.n**2 * c.d, peer_goals={"matmul": 0.5}
    ),
    "key_similarity, keys alike": _key_similarity(lambda c: c.alike),
    "value_norm": Row(
        forms={"": lambda c: ops.value_norm(c.v, c.w_o)},
        eager=eager.value_norm,
        args=lambda c: (c.v, c.w_o),
        bytes=lambda c: size(c.v, c.w_o, c.scores),
        against="",
        touched=lambda c: (c.v,),
        peers=lambda c: {"matmul": _value_product(c)},
        shape=(8, SIMILAR),
        flops=lambda c: 2 * c.batch * c.n * c.heads * GROUP * c.d * HIDDEN,
        peer_goals={"matmul": 0.5},
    ),
    "value_range": Row(
        forms={"": lambda c: ops.value_range(c.v)},
        eager=lambda v: v.amax(-1).float() - v.amin(-1).float(),
        args=lambda c: (c.v,),
        bytes=lambda c: size(c.v, c.scores),
        against="read",
        touched=lambda c: (c.v,),
        copy_goal=0.8,
    ),
    "cluster_mean": Row(
        forms={"": lambda c: ops.cluster_mean(c.scores, c.clusters.assignment, num_clusters=PROTOTYPES)},
        eager=eager.cluster_mean,
        args=lambda c: (c.scores, c.clusters.assignment, PROTOTYPES),
        bytes=lambda c: size(c.scores, c.clusters.assignment),
        against="read",
        touched=lambda c: (c.scores, c.clusters.assignment),
        per_dtype=False,
    ),
    "cluster_priority": Row(
        forms={"": lambda c: ops.cluster_priority(c.scores, c.clusters.assignment, c.clusters.means, k=c.budget)},
        eager=eager.cluster_priority,
        args=lambda c: (c.scores, c.clusters.assignment, c.clusters.means, c.budget),
        bytes=lambda c: 2 * size(c.scores) + size(c.clusters.assignment),
        against="read",
        touched=lambda c: (c.scores, c.clusters.assignment),
        per_dtype=False,
    ),
    "keydiff_compress": _keydiff(),
    "lagkv_compress": Row(
        forms={
            "out=": lambda c: kvops.lagkv_compress(c.k, c.v, c.lag, c.ratio, sinks=SINK, out=c.lagkv_out),
            "in place": lambda c: kvops.lagkv_compress_(c.k, c.v, c.lag, c.ratio, sinks=SINK),
            "fresh": lambda c: kvops.lagkv_compress(c.k, c.v, c.lag, c.ratio, sinks=SINK),
        },
        eager=eager.lagkv_compress,
        args=lambda c: (c.k, c.v, c.lag, c.ratio, SINK),
        bytes=lambda c: size(c.k, c.v) * c.partitions * c.lag // c.n + 2 * size(*c.lagkv_out),
        against="read",
        touched=lambda c: (c.k, c.v),
        parts=_lagkv_parts,
        restore=True,
        copy_goal=NEAR_FLOOR,
        eager_goal=20,
    ),
    "snapkv_compress": _snapkv(True, eager_goal=4, peer_goals={"repeat_kv": 7}),
    "snapkv_compress, no lse": _snapkv(False, eager_goal=2),
    "protokv_compress": Row(
        forms={"out=": lambda c: _protokv(c, out=c.out), "fresh": _protokv},
        eager=eager.protokv_compress,
        args=lambda c: (c.k, c.v, c.window(WINDOW).q, c.budget, PROTOTYPES - 4, *c.clusters.hash),
        bytes=lambda c: 4 * size(c.k) + 2 * size(*c.out),
        against="read",
        touched=lambda c: (c.k,),
        peers=_protokv_peers,
        peer_goals={"SnapKV": 1, "K-means": 5},
    ),
    "keydiff_compress, 4096 tokens": _keydiff(shape=(8, 4096), forms=("out=", "fresh"), cuda_only=True),
    "keydiff_compress, 64 tokens": _keydiff(
        shape=(1, 64), forms=("fresh",)
    ),  # the overhead of a call with almost no work
}
