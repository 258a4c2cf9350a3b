"""The operators on DTensors: tensor parallelism (heads), data parallelism (batch), and sequences sharded by tokens.

After `kvops.distributed.register()` every operator takes DTensors, and so do functions that only call operators. Each
rank works on its own shard, without communication:

```python
mesh = init_device_mesh("cuda", (4,))
k, v = (DTensor.from_local(x, mesh, [Shard(1)]) for x in (k, v))    # each rank has its KV heads
kept = kvops.ops.select_topk(kvops.ops.anchor_cosine(k), k=1024)    # [b, Hk, 1024], Shard(1)
kvops.ops.compact_kv_(k, v, kept)
```

One tensor of a call, the leader, decides for each dim of the mesh whether it shards the batch, the KV heads, or
nothing. The leader is the first tensor, or `k` for the window operators without a block table. The other tensors must
be placed to match: a tensor with a batch or head dim is sharded along it, and a tensor without one (`starts` if heads
are sharded, `phase`) is replicated. Ordinary tensors count as replicated. Any other placement raises ValueError,
because torch would gather the tensor: the whole cache, and a copy of it if an operator writes to it.

Some operators also support sharded tokens, dim 2 of K, V and scores. Every rank holds the same number of tokens, in the
order of the ranks. `starts`, `lengths` and `visible` count slots of the whole sequence. Queries and all tensors without
a token dim are replicated. Each rank works on its own tokens and sends little:

- `anchor_cosine`: The ranks sum their anchors, [b, Hk, d], and each scores its tokens with the sum.
- `window_attention`: Each rank attends to its own keys. The ranks merge log-sum-exps and outputs, [b, Hq, w, dv], and
  each scores its keys with the merged log-sum-exp. The output is rounded to q's dtype before and after the merge.
  `cos` and `sin` are refused, because the scores would need the rotated keys, and so are scores with `key_bias`.
- `window_scores`: The same without the output. A given lse must cover the keys of all ranks. It is not checked, since
  the check needs all scores.
- `select_topk`: Each rank sends its own best scores, at most k, and their slots. All ranks then have the same
  replicated indices as a single process, in slots of the whole sequence. `own_indices` returns a rank's own ones.

All other operators need every token of a head and raise ValueError.

Methods that compute with torch between operators, such as SnapKV's pooling, mix ordinary tensors with DTensors. torch
supports this within `torch.distributed.tensor.experimental.implicit_replication()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.functional import pad
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only, tree_unflatten

from . import ops
from ._lib import operators
from .ops.api import REDUCTIONS, SCORES

__all__ = ["own_indices", "register"]

BATCH, HEADS, TOKENS = 0, 1, 2
Roles = tuple[int | None, ...]
#: Arguments by their names in the schemas: [batch, heads, ...], [batch, ...], [heads], by columns, and neither.
_BOTH = frozenset(
    ("k", "v", "q", "k_out", "v_out", "scores", "indices", "anchor", "budgets", "lse", "prototypes", "assignment")
    + ("row_weights", "key_bias", "k_scale", "v_scale", "cluster_scores", "sat_indices", "buckets")
)
_BY_BATCH = frozenset(("starts", "lengths", "block_table"))
_BY_HEAD = frozenset(("sink_logits",))
_BY_COLUMNS = frozenset(("w_o",))  # [any, heads * dv]
_WHOLE = frozenset(("projection", "phase", "inv_freq"))
_MAYBE_BY_BATCH = {"visible": 2, "cos": 3, "sin": 3}  # they have a batch dim if they have this many dims
#: [heads, ...], after a batch dim if they have this many dims.
_BY_HEAD_MAYBE_BATCH = {"mean": 3, "cov": 4, "centers": 3, "norms": 3}
#: They have a token dim if they have this many dims.
_BY_TOKEN = {"k": 4, "v": 4, "scores": 3, "key_bias": 3, "k_scale": 3, "v_scale": 3}
_ABSENT = torch.iinfo(torch.int64).max  # a slot that sorts after all others
_scores = operators.window_scores.default
_library: torch.library.Library | None = None


def register() -> None:
    """Make the operators take DTensors in this process. Further calls do nothing.

    Raises:
        RuntimeError: This torch was built without torch.distributed.
    """
    global _library
    if _library is not None:
        return
    if not torch.distributed.is_available():
        raise RuntimeError("kvops.distributed: this torch was built without torch.distributed")
    from torch.distributed.tensor import DTensor

    _library = torch.library.Library("kvops", "FRAGMENT")
    for overload in overloads():
        torch.library.register_torch_dispatch(overload.name(), DTensor, _rule, lib=_library)


def own_indices(indices: Any, k: Any) -> Tensor:
    """Return the kept slots that this rank holds, counted from its first token.

    Pass them to `gather_kv` and `compact_kv_` with `k.to_local()` if K and V are sharded by tokens.

    Args:
        indices: int64 [b, Hk, m], a DTensor, ascending, with -1 only at the end, as `select_topk` returns them.
        k: [b, Hk, n, d], a DTensor of any dtype whose tokens are sharded.

    Returns:
        An ordinary int64 [b, Hk, min(m, n / ranks)], ascending, with -1 last in heads that keep fewer slots here.

    Raises:
        TypeError: k or indices is not a DTensor.
        ValueError: k or indices has another shape, dtype or placement.
    """
    from torch.distributed.tensor import DTensor

    op = "own_indices"
    for name, x in (("k", k), ("indices", indices)):
        if not isinstance(x, DTensor):
            raise TypeError(f"{op}: {name} must be a DTensor, got {type(x).__name__}")
    if k.dim() != 4 or indices.dim() != 3 or indices.dtype != torch.int64:
        got = f"{list(k.shape)} and {indices.dtype} {list(indices.shape)}"
        raise ValueError(f"{op}: k and indices must be [b, Hk, n, d] and torch.int64 [b, Hk, m], got {got}")
    roles = _roles(op, "k", "k", k, TOKENS)
    slots = _local(op, "indices", "indices", indices, k, "k", roles, False)
    tokens = _Tokens.of(k, roles)
    inside = (slots >= tokens.first) & (slots < tokens.first + tokens.n)
    own = torch.where(inside, slots - tokens.first, _ABSENT).sort(-1).values[..., : tokens.n]
    return own.masked_fill_(own == _ABSENT, -1)


def overloads() -> Iterator[OpOverload]:
    """The overloads of all operators."""
    for name in ops.__all__:
        packet = getattr(operators, name)
        yield from (getattr(packet, x) for x in packet.overloads())


def dims_of(name: str, dims: int, pages: bool) -> tuple[int | None, int | None, int | None]:
    """The batch, head and token dims of an argument with `dims` dims. pages: K and V are pages."""
    if name in _BOTH:
        paged = pages and name in ("k", "v", "key_bias", "k_scale", "v_scale")
        return None if paged else 0, 1, 2 if dims == _BY_TOKEN.get(name) and not paged else None
    if name in _BY_HEAD:
        return None, 0, None
    if name in _BY_COLUMNS:
        return None, 1, None
    if name in _BY_HEAD_MAYBE_BATCH:
        batched = dims == _BY_HEAD_MAYBE_BATCH[name]
        return (0 if batched else None), int(batched), None
    by_batch = name in _BY_BATCH or dims == _MAYBE_BY_BATCH.get(name)
    if not by_batch and name not in _WHOLE and name not in _MAYBE_BY_BATCH:
        raise NotImplementedError(f"kvops.distributed: no rule for an argument {name}")
    return (0 if by_batch else None), None, None


def _rule(mode: object, overload: OpOverload, types: object, args: Any = (), kwargs: Any = None) -> Any:
    """Runs a call on each rank's own shards."""
    from torch.distributed.tensor import DTensor

    op = overload._opname
    given = dict(zip((x.name for x in overload._schema.arguments), args)) | (kwargs or {})
    pages = given.get("block_table") is not None
    leaves, structure = tree_flatten_with_path(given)
    values = [(*_names(path), x) for path, x in leaves]
    tensors = [x for x in values if isinstance(x[2], Tensor)]
    by_tokens = None if pages else _OF_TOKENS.get(op)
    lead = by_tokens.leader if by_tokens else tensors[0][0]
    argument, first, leader = next((x for x in tensors if x[0] == lead), tensors[0])
    if not isinstance(leader, DTensor):
        raise ValueError(f"{op}: {first} must be a DTensor because other arguments are, got an ordinary tensor")
    roles = _roles(op, argument, first, leader, TOKENS if by_tokens else HEADS, pages)
    local = [
        _local(op, argument, name, x, leader, first, roles, pages) if isinstance(x, Tensor) else x
        for argument, name, x in values
    ]
    call = tree_unflatten(local, structure)
    if by_tokens and TOKENS in roles:
        return by_tokens.rule(overload, call, _Tokens.of(leader, roles))
    return tree_map_only(Tensor, lambda x: _dtensor(x, leader.device_mesh, roles), overload(**call))


def _names(path: tuple[Any, ...]) -> tuple[str, str]:
    """An argument's name, and its name in errors, such as k[0] for an element of a list."""
    return path[0].key, path[0].key + keystr(path[1:])


def _roles(op: str, argument: str, name: str, leader: Any, last: int, pages: bool = False) -> Roles:
    """What each dim of the mesh shards: BATCH, HEADS, TOKENS (allowed if `last` is TOKENS), or None for nothing."""
    dims = dims_of(argument, leader.dim(), pages)
    allowed = [x for x in (BATCH, HEADS, TOKENS)[: last + 1] if dims[x] is not None]
    roles: list[int | None] = []
    for placement in leader.placements:
        dim = placement.dim % leader.dim() if placement.is_shard() else None
        if not placement.is_replicate() and dim not in [dims[x] for x in allowed]:
            names = " or ".join(f"{('batch', 'heads', 'tokens')[x]} ({dims[x]})" for x in allowed)
            raise ValueError(f"{op}: {name} must be replicated or sharded along {names}, got {placement!r}")
        roles.append(None if dim is None else dims.index(dim))
    for role in (x for x in allowed if x in roles):
        ranks, size = prod(_sizes(leader.device_mesh, roles, role)), leader.shape[dims[role]]
        if size % ranks:
            raise ValueError(f"{op}: dim {dims[role]} of {name} must be a multiple of the {ranks} ranks, got {size}")
    return tuple(roles)


def _sizes(mesh: Any, roles: Any, role: int) -> list[int]:
    """The sizes of the mesh's dims with this role."""
    return [mesh.size(x) for x, y in enumerate(roles) if y == role]


def _local(op: str, argument: str, name: str, x: Any, leader: Any, first: str, roles: Roles, pages: bool) -> Any:
    """The rank's own part of a tensor, whose placements must match the leader's. first: the leader's name in errors."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh, dims = leader.device_mesh, dims_of(argument, x.dim(), pages)
    want = _placements([None if y is None else dims[y] for y in roles])
    have = x.placements if isinstance(x, DTensor) else (Replicate(),) * mesh.ndim
    if have != want or (isinstance(x, DTensor) and x.device_mesh != mesh):
        raise ValueError(f"{op}: {name} must be {want} on the mesh of {first}, got {have}")
    return x.to_local() if isinstance(x, DTensor) else x


def _placements(dims: Any) -> tuple[Any, ...]:
    from torch.distributed import tensor

    return tuple(tensor.Replicate() if x is None else tensor.Shard(x) for x in dims)


def _dtensor(x: Tensor, mesh: Any, roles: Roles) -> Any:
    """Makes a DTensor of a result, [batch, heads, tokens, ...]."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(x, mesh, _placements(roles), run_check=False)


# ---- sharded tokens: what each rank computes and sends ----


@dataclass(frozen=True)
class _Tokens:
    """The tokens of this rank: slots [first, first + n) of a sequence of `total` slots."""

    mesh: Any
    roles: Roles
    n: int

    @classmethod
    def of(cls, leader: Any, roles: Roles) -> _Tokens:
        return cls(leader.device_mesh, roles, leader.to_local().shape[2])

    @property
    def ranks(self) -> int:
        return prod(_sizes(self.mesh, self.roles, TOKENS))

    @property
    def total(self) -> int:
        return self.n * self.ranks

    @property
    def first(self) -> int:
        place = 0  # this rank's place among the ranks
        for x, role in enumerate(self.roles):
            if role == TOKENS:
                place = place * self.mesh.size(x) + self.mesh.get_local_rank(x)
        return place * self.n

    @property
    def _by_rest(self) -> Roles:
        return tuple(None if x == TOKENS else x for x in self.roles)

    def sharded(self, x: Tensor) -> Any:
        """Makes a DTensor of a result of which each rank holds its own tokens."""
        return _dtensor(x, self.mesh, self.roles)

    def replicated(self, x: Tensor) -> Any:
        """Makes a DTensor of a result that all these ranks hold."""
        return _dtensor(x, self.mesh, self._by_rest)

    def own(self, slots: Tensor) -> Tensor:
        """Converts limits in the whole sequence to limits in the rank's tokens."""
        return (slots - self.first).clamp(0, self.n)

    def span(self, op: str, starts: Tensor | None, lengths: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
        """The first valid slot of each row, and one past the last: int32 [b]."""
        if starts is None:
            starts = torch.zeros(len(like), dtype=torch.int32, device=like.device)
        else:
            self.check(op, "starts", starts)
        if lengths is None:
            return starts, torch.full_like(starts, self.total)
        self.check(op, "lengths", lengths)
        self.check(op, "starts + lengths", starts + lengths)
        return starts, starts + lengths

    def check(self, op: str, name: str, slots: Tensor) -> None:
        """Checks limits before they are clamped to the rank's tokens. Values on a GPU are not read."""
        if slots.device.type == "cpu" and ((slots < 0) | (slots > self.total)).any():
            raise ValueError(f"{op}: {name} must lie in [0, {self.total}], got {slots.tolist()}")

    def sum(self, x: Tensor) -> Tensor:
        """Sums x over the ranks."""
        from torch.distributed.tensor import DTensor, Partial

        rest = _placements(self._by_rest)
        summands = [Partial() if role == TOKENS else y for role, y in zip(self.roles, rest)]
        return DTensor.from_local(x, self.mesh, summands, run_check=False).redistribute(placements=rest).to_local()

    def gather(self, x: Tensor) -> Tensor:
        """Gathers x from all ranks, in the order of their tokens: [ranks, ...]."""
        from torch.distributed.tensor import DTensor

        mine = [0 if role == TOKENS else None if role is None else role + 1 for role in self.roles]
        rest = [None if role in (TOKENS, None) else role + 1 for role in self.roles]
        stacked = DTensor.from_local(x.unsqueeze(0), self.mesh, _placements(mine), run_check=False)
        return stacked.redistribute(placements=_placements(rest)).to_local()


def _anchor_cosine(overload: OpOverload, call: dict[str, Any], tokens: _Tokens) -> Any:
    """Computes the rank's own anchor, sums the anchors of all ranks, and scores the rank's tokens with the sum."""
    starts, lengths = call.get("starts"), call.get("lengths")
    if starts is not None or lengths is not None:
        begin, end = (tokens.own(x) for x in tokens.span("anchor_cosine", starts, lengths, call["k"]))
        call |= {"starts": begin, "lengths": end - begin}
    if call.get("anchor") is None:
        call["anchor"] = tokens.sum(overload(**call)[1])
    scores, anchor = overload(**call)
    return tokens.sharded(scores), tokens.replicated(anchor)


def _window_attention(overload: OpOverload, call: dict[str, Any], tokens: _Tokens) -> Any:
    """Attends to the rank's own keys, then sums the outputs of all ranks, weighted by their parts of the softmax."""
    op = "window_attention"
    if call.get("cos") is not None or call.get("sin") is not None:
        raise ValueError(
            f"{op}: cos and sin must be None if tokens are sharded, got tensors; rotate k with rope_at_slots first"
        )
    if call.get("key_bias") is not None and call.get("scores", True):
        raise ValueError(f"{op}: scores must be False with key_bias if tokens are sharded, got True")
    own = _own_window(op, call, tokens)
    out, own_lse, scores = overload(**{**own, "scores": False})
    lse = tokens.gather(own_lse).logsumexp(0)
    divisors = [own_lse, lse]  # logarithms of the divisors: the one used by this rank, and the right one
    if (sinks := call.get("sink_logits")) is not None:
        divisors = [x.logaddexp(sinks.unsqueeze(1)) for x in divisors]
    weights = (divisors[0] - divisors[1]).exp()
    weights = torch.where(divisors[1].isneginf(), 0.0, weights)  # no rank has a key that the row sees
    out = tokens.sum(out.float() * weights.unsqueeze(-1)).to(out.dtype)
    if call.get("scores", True):
        scores = _own_scores(call, own, lse)
    return tokens.replicated(out), tokens.replicated(lse), tokens.sharded(scores)


def _window_scores(overload: OpOverload, call: dict[str, Any], tokens: _Tokens) -> Any:
    k, own = call["k"], _own_window("window_scores", call, tokens)
    scale = call.get("k_scale")
    none = {"k": k[:, :, :0], "k_scale": None if scale is None else scale[:, :, :0]}
    overload(**{**own, **none, "visible": own["visible"] * 0, "starts": None})  # checks the rest
    lse = call.get("lse")
    if lse is None and call.get("score", 0) == SCORES["softmax"]:
        attended = {x: own[x] for x in ("q", "k", "visible", "scale", "starts", "softcap", "k_scale") if x in own}
        v = k[..., : 16 // k.element_size()]  # the output is not used: the shortest rows that V can have
        own_lse = operators.window_attention.default(**attended, v=v, v_scale=scale, scores=False)[1]
        lse = tokens.gather(own_lse).logsumexp(0)
    return tokens.sharded(_own_scores(call, own, lse))


def _own_window(op: str, call: dict[str, Any], tokens: _Tokens) -> dict[str, Any]:
    """The call with its limits converted to the rank's tokens."""
    limits = {x: call[x] for x in ("visible", "starts") if call.get(x) is not None}
    for name, x in limits.items():
        tokens.check(op, name, x)
    return call | {name: tokens.own(x) for name, x in limits.items()}


def _own_scores(call: dict[str, Any], own: dict[str, Any], lse: Tensor | None) -> Tensor:
    """`window_scores` of the rank's keys. lse: over the keys of all ranks; None if there is no softmax.

    Given an lse, the operator checks that the weights of each row add up to 1, but the weights of one rank's keys do
    not. The operator skips the check if `reduce` or `group_reduce` is "max". So this function scores the query heads of
    a group one by one, with the maximum over a group of one head, which reads K once per head of a group.
    """
    options: dict[str, Any] = {
        x: y for x, y in own.items() if x in ("k", "visible", "scale", "score", "starts", "softcap", "k_scale")
    }
    reduce, group_reduce = call.get("reduce", REDUCTIONS["sum"]), call.get("group_reduce", REDUCTIONS["mean"])
    mean_over_rows = reduce == REDUCTIONS["mean"]
    options["reduce"] = REDUCTIONS["sum"] if mean_over_rows else reduce
    heads, sinks, weights = own["k"].shape[1], call.get("sink_logits"), call.get("row_weights")
    if lse is None or REDUCTIONS["max"] in (reduce, group_reduce):
        scores = _scores(
            q=own["q"], lse=lse, sink_logits=sinks, row_weights=weights, group_reduce=group_reduce, **options
        )
    else:
        none = [None] * (lse.shape[1] // heads)
        by_member = zip(
            *(x.unflatten(1, (heads, -1)).unbind(2) for x in (own["q"], lse)),
            none if sinks is None else sinks.view(heads, -1).t().contiguous(),
            none if weights is None else weights.unflatten(1, (heads, -1)).unbind(2),
        )
        members = [
            _scores(q=q, lse=x, sink_logits=sink, row_weights=weight, group_reduce=REDUCTIONS["max"], **options)
            for q, x, sink, weight in by_member
        ]
        scores = torch.stack(members, 2)
        if group_reduce == REDUCTIONS["none"]:
            scores = scores.flatten(1, 2)
        else:
            scores = scores.mean(2) if group_reduce == REDUCTIONS["mean"] else scores.sum(2)
    if mean_over_rows:  # the mean over the rows that see a key of any rank
        starts = call.get("starts")
        seeing = (call["visible"] > (0 if starts is None else starts.unsqueeze(1))).sum(-1)
        scores = scores / seeing.clamp(min=1).view(-1, 1, 1)
    return scores


def _select_topk(overload: OpOverload, call: dict[str, Any], tokens: _Tokens) -> Any:
    """Selects the best of the rank's own scores, gathers those of all ranks, and selects the best of these.

    Candidates are in the order of their slots, so of equal scores the lower slot is kept, as in a single process.
    """
    op, own, k = "select_topk", call["scores"], call["k"]
    sinks, window, budgets = call.get("sinks", 0), call.get("window", 0), call.get("budgets")
    overload(scores=own[..., :0], k=k, sinks=sinks, window=window, seq_len=call.get("seq_len"))  # checks them
    begin, end = tokens.span(op, call.get("starts"), call.get("lengths"), own)
    at_front = (end - begin).clamp(max=sinks)
    at_back = (end - begin - at_front).clamp(max=window)
    first, last = tokens.own(begin + at_front), tokens.own(end - at_back)
    found = overload(scores=own, k=min(k - sinks - window, tokens.n), starts=first, lengths=last - first)
    values = tokens.gather(own.gather(2, found.clamp(min=0))).movedim(0, 2).flatten(2)
    found = tokens.gather(torch.where(found < 0, _ABSENT, found + tokens.first)).movedim(0, 2).flatten(2)

    # The sinks and the window, [b, 1, sinks] and [b, 1, window], are kept whatever their scores.
    front, back = (torch.arange(x, device=own.device) for x in (sinks, window))
    fixed = [
        torch.where(front < at_front.unsqueeze(1), begin.unsqueeze(1) + front, _ABSENT),
        torch.where(back < at_back.unsqueeze(1), (end - at_back).unsqueeze(1) + back, _ABSENT),
    ]
    slots = torch.cat((found, *(x.unsqueeze(1).expand(-1, own.shape[1], -1) for x in fixed)), 2)
    slots, order = slots.sort(-1)
    values = pad(values, (0, sinks + window)).gather(2, order)
    candidates = (slots != _ABSENT).any(1).sum(-1, dtype=torch.int32)  # the same number in each head

    best = overload(scores=values, k=k, sinks=sinks, window=window, lengths=candidates, budgets=budgets)
    kept = torch.where(best < 0, -1, slots.gather(2, best.clamp(min=0)))[..., : tokens.total]
    if call.get("fill_invalid", False):
        kept = _filled(kept, begin.view(-1, 1, 1), end.view(-1, 1, 1), tokens.total)
    return tokens.replicated(kept)


def _filled(kept: Tensor, begin: Tensor, end: Tensor, n: int) -> Tensor:
    """Replaces -1 by the lowest invalid slots, those outside [begin, end), and sorts."""
    nth = torch.arange(kept.shape[2], device=kept.device) - (kept >= 0).sum(-1, keepdim=True)
    invalid = torch.where(nth < begin, nth, nth - begin + end)
    filled = torch.where(nth < 0, kept, torch.where(invalid < n, invalid, _ABSENT)).sort(-1).values
    return filled.masked_fill_(filled == _ABSENT, -1)


class _OfTokens(NamedTuple):
    """How an operator runs on sharded tokens."""

    leader: str  # the argument whose placements decide
    rule: Callable[[OpOverload, dict[str, Any], _Tokens], Any]


_OF_TOKENS = {
    "anchor_cosine": _OfTokens("k", _anchor_cosine),
    "select_topk": _OfTokens("scores", _select_topk),
    "window_attention": _OfTokens("k", _window_attention),
    "window_scores": _OfTokens("k", _window_scores),
}
