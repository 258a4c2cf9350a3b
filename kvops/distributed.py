"""The operators on DTensors: tensor parallelism (heads), data parallelism (batch), and sequences sharded by tokens.

After `kvops.distributed.register()` every operator takes DTensors, and so does what is made of operators alone. Each
rank works on its own shard, and nothing is sent::

    mesh = init_device_mesh("cuda", (4,))
    k, v = (DTensor.from_local(x, mesh, [Shard(1)]) for x in (k, v))    # each rank has its KV heads
    kept = kvops.ops.select_topk(kvops.ops.anchor_cosine(k), k=1024)    # [b, Hk, 1024], Shard(1)
    kvops.ops.compact_kv_(k, v, kept)

For each dim of the mesh one tensor of a call says what is sharded, batch, KV heads, or nothing: the first, or k of the
window operators (without a block table). The others have to lie accordingly: what has a batch or a head dim is sharded
there, what has none (`starts` where heads are sharded, `phase`) is replicated. An ordinary tensor counts as replicated.
Other placements are refused by name. torch would gather such a tensor: the whole cache, and if an operator writes to
it, a copy of the cache.

Some operators take tokens that are sharded too, dim 2 of K, V and scores. Each rank has as many, which follow those of
the rank before; `starts`, `lengths` and `visible` count the slots of the whole sequence. Queries and all that has no
token dim are replicated. A rank works on its own tokens, and little is sent:

- `anchor_cosine`: the ranks add up their anchors, [b, Hk, d], and each scores its tokens by the sum.
- `window_attention`: each rank attends to its own keys; the log-sum-exps and outputs are merged, [b, Hq, w, dv], and
  each rank scores its keys by the merged log-sum-exp. The output is rounded to q's dtype before and after the merge.
  cos and sin are refused: the scores would need the turned keys.
- `window_scores`: the same without the output. A given lse, over the keys of all ranks, is taken as it is: what one
  process checks of it takes all scores.
- `select_topk`: each rank sends the best of its own scores, at most k, and their slots. All then have the same indices,
  those of one process, in slots of the whole sequence, replicated. `own_indices` says which of them a rank holds.

All other operators need every token of a head, and refuse.

Methods that compute with torch between the operators (SnapKV's pooling) mix ordinary tensors with DTensors, which torch
takes within `torch.distributed.tensor.experimental.implicit_replication()`.
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
from .ops import REDUCTIONS, SCORES

__all__ = ["own_indices", "register"]

BATCH, HEADS, TOKENS = 0, 1, 2
Roles = tuple[int | None, ...]
#: By their names in the schemas: tensors of [batch, heads, ...], of [batch, ...], of [heads], and of neither.
_BOTH = frozenset(
    ("k", "v", "q", "k_out", "v_out", "scores", "indices", "anchor", "budgets", "lse", "prototypes", "assignment")
    + ("cluster_scores", "sat_indices", "buckets")
)
_BY_BATCH = frozenset(("starts", "lengths", "block_table"))
_BY_HEAD = frozenset(("sink_logits",))
_WHOLE = frozenset(("projection", "phase", "inv_freq"))
_MAYBE_BY_BATCH = {"visible": 2, "cos": 3, "sin": 3}  # with so many dims
_BY_TOKEN = {"k": 4, "v": 4, "scores": 3}  # with so many dims
_ABSENT = torch.iinfo(torch.int64).max  # a slot that sorts behind all others
_scores = torch.ops.kvops.window_scores.default
_library: torch.library.Library | None = None


def register() -> None:
    """Makes the operators take DTensors, in this process. Again: does nothing.

    Raises:
        RuntimeError: this torch has no torch.distributed.
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
    """Which of the kept slots lie in this rank's tokens, as slots of these: for `gather_kv` and `compact_kv_` of
    `k.to_local()`, where K and V are sharded by tokens.

    Args:
        indices: int64 [b, Hk, m], a DTensor, ascending, -1 only at the end, as `select_topk` gives them.
        k: [b, Hk, n, d], a DTensor whose tokens are sharded, in any dtype.

    Returns:
        An ordinary int64 [b, Hk, min(m, n / ranks)]: ascending, -1 last in heads that keep fewer here.

    Raises:
        TypeError: k or indices is no DTensor.
        ValueError: another shape, dtype or placement.
    """
    from torch.distributed.tensor import DTensor

    op = "own_indices"
    for name, x in (("k", k), ("indices", indices)):
        if not isinstance(x, DTensor):
            raise TypeError(f"{op}: {name} must be a DTensor, got {type(x).__name__}")
    if k.dim() != 4 or indices.dim() != 3 or indices.dtype != torch.int64:
        got = f"{list(k.shape)} and {indices.dtype} {list(indices.shape)}"
        raise ValueError(f"{op}: k and indices must be [b, Hk, n, d] and int64 [b, Hk, m], got {got}")
    roles = _roles(op, "k", "k", k, TOKENS)
    slots = _local(op, "indices", "indices", indices, k, "k", roles, False)
    tokens = _Tokens.of(k, roles)
    inside = (slots >= tokens.first) & (slots < tokens.first + tokens.n)
    own = torch.where(inside, slots - tokens.first, _ABSENT).sort(-1).values[..., : tokens.n]
    return own.masked_fill_(own == _ABSENT, -1)


def overloads() -> Iterator[OpOverload]:
    """Of all operators."""
    for name in ops.__all__:
        packet = getattr(torch.ops.kvops, name)
        yield from (getattr(packet, x) for x in packet.overloads())


def dims_of(name: str, dims: int, pages: bool) -> tuple[int | None, int | None, int | None]:
    """The batch, the head and the token dim of an argument that has so many dims; with a block table K and V are
    pages."""
    if name in _BOTH:
        paged = pages and name in ("k", "v")
        return None if paged else 0, 1, 2 if dims == _BY_TOKEN.get(name) and not paged else None
    if name in _BY_HEAD:
        return None, 0, None
    by_batch = name in _BY_BATCH or dims == _MAYBE_BY_BATCH.get(name)
    if not by_batch and name not in _WHOLE and name not in _MAYBE_BY_BATCH:
        raise NotImplementedError(f"kvops.distributed: no rule for an argument {name}")
    return (0 if by_batch else None), None, None


def _rule(mode: object, overload: OpOverload, types: object, args: Any = (), kwargs: Any = None) -> Any:
    """The call on each rank's own shards."""
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
        raise ValueError(f"{op}: {first} must be a DTensor, as others are, got an ordinary tensor")
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
    """An argument, and what errors call it: k[0] is an element of a list."""
    return path[0].key, path[0].key + keystr(path[1:])


def _roles(op: str, argument: str, name: str, leader: Any, last: int, pages: bool = False) -> Roles:
    """What each dim of the mesh shards: BATCH, HEADS, TOKENS (if that is the last), or None: nothing."""
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
    """Of the mesh's dims with this role."""
    return [mesh.size(x) for x, y in enumerate(roles) if y == role]


def _local(op: str, argument: str, name: str, x: Any, leader: Any, first: str, roles: Roles, pages: bool) -> Any:
    """The rank's own part of a tensor that lies as `leader`, which errors call `first`, asks for."""
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
    """A result of [batch, heads, tokens, ...]."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(x, mesh, _placements(roles), run_check=False)


# ---- sharded tokens: what a rank does and sends ----


@dataclass(frozen=True)
class _Tokens:
    """The tokens of this rank: slots [first, first + n) of a sequence of `total`."""

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
        place = 0  # among the ranks
        for x, role in enumerate(self.roles):
            if role == TOKENS:
                place = place * self.mesh.size(x) + self.mesh.get_local_rank(x)
        return place * self.n

    @property
    def _by_rest(self) -> Roles:
        return tuple(None if x == TOKENS else x for x in self.roles)

    def sharded(self, x: Tensor) -> Any:
        """A result of which each rank has its own tokens."""
        return _dtensor(x, self.mesh, self.roles)

    def replicated(self, x: Tensor) -> Any:
        """A result that all these ranks have."""
        return _dtensor(x, self.mesh, self._by_rest)

    def own(self, slots: Tensor) -> Tensor:
        """Limits in the whole sequence as limits in the rank's tokens."""
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
        """The operator sees what is cut to the rank's tokens. As there, values on a GPU are not read."""
        if slots.device.type == "cpu" and ((slots < 0) | (slots > self.total)).any():
            raise ValueError(f"{op}: {name} must lie in [0, {self.total}], got {slots.tolist()}")

    def sum(self, x: Tensor) -> Tensor:
        """Over the ranks."""
        from torch.distributed.tensor import DTensor, Partial

        rest = _placements(self._by_rest)
        summands = [Partial() if role == TOKENS else y for role, y in zip(self.roles, rest)]
        return DTensor.from_local(x, self.mesh, summands, run_check=False).redistribute(placements=rest).to_local()

    def gather(self, x: Tensor) -> Tensor:
        """Everybody's, in the order of their tokens: [ranks, ...]."""
        from torch.distributed.tensor import DTensor

        mine = [0 if role == TOKENS else None if role is None else role + 1 for role in self.roles]
        rest = [None if role in (TOKENS, None) else role + 1 for role in self.roles]
        stacked = DTensor.from_local(x.unsqueeze(0), self.mesh, _placements(mine), run_check=False)
        return stacked.redistribute(placements=_placements(rest)).to_local()


def _anchor_cosine(overload: OpOverload, call: dict[str, Any], tokens: _Tokens) -> Any:
    """The rank's own anchor, everybody's, the rank's scores by that."""
    starts, lengths = call.get("starts"), call.get("lengths")
    if starts is not None or lengths is not None:
        begin, end = (tokens.own(x) for x in tokens.span("anchor_cosine", starts, lengths, call["k"]))
        call |= {"starts": begin, "lengths": end - begin}
    if call.get("anchor") is None:
        call["anchor"] = tokens.sum(overload(**call)[1])
    scores, anchor = overload(**call)
    return tokens.sharded(scores), tokens.replicated(anchor)


def _window_attention(overload: OpOverload, call: dict[str, Any], tokens: _Tokens) -> Any:
    """The rank's own keys, then everybody's outputs, weighted by their shares of the sum of exponentials."""
    op = "window_attention"
    if call.get("cos") is not None or call.get("sin") is not None:
        raise ValueError(f"{op}: cos and sin must be None where tokens are sharded (turn k before), got tensors")
    own = _own_window(op, call, tokens)
    out, own_lse, scores = overload(**{**own, "scores": False})
    lse = tokens.gather(own_lse).logsumexp(0)
    divisors = [own_lse, lse]  # logarithms of what the rank has divided by, and what is to be divided by
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
    overload(**{**own, "k": k[:, :, :0], "visible": own["visible"] * 0, "starts": None})  # checks the rest
    lse = call.get("lse")
    if lse is None and call.get("score", 0) == SCORES["softmax"]:
        attended = {x: own[x] for x in ("q", "k", "visible", "scale", "starts", "softcap") if x in own}
        v = k[..., : 16 // k.element_size()]  # any would do: its least row
        own_lse = torch.ops.kvops.window_attention.default(**attended, v=v, scores=False)[1]
        lse = tokens.gather(own_lse).logsumexp(0)
    return tokens.sharded(_own_scores(call, own, lse))


def _own_window(op: str, call: dict[str, Any], tokens: _Tokens) -> dict[str, Any]:
    """The call with what its rows see of the rank's tokens."""
    limits = {x: call[x] for x in ("visible", "starts") if call.get(x) is not None}
    for name, x in limits.items():
        tokens.check(op, name, x)
    return call | {name: tokens.own(x) for name, x in limits.items()}


def _own_scores(call: dict[str, Any], own: dict[str, Any], lse: Tensor | None) -> Tensor:
    """`window_scores` of the rank's keys. lse: over the keys of all ranks, or None where there is no softmax.

    Given one, the operator checks that a row's weights add up to 1, which those of the rank's keys do not; it does so
    unless the sum or the mean over the group is asked for. So they are had from the scores of single query heads, whose
    maximum over their group of one they are: K is read once for each head of a group.
    """
    options: dict[str, Any] = {
        x: y for x, y in own.items() if x in ("k", "visible", "scale", "score", "starts", "softcap")
    }
    reduce, group_reduce = call.get("reduce", REDUCTIONS["sum"]), call.get("group_reduce", REDUCTIONS["mean"])
    mean_over_rows = reduce == REDUCTIONS["mean"]
    options["reduce"] = REDUCTIONS["sum"] if mean_over_rows else reduce
    heads, sinks = own["k"].shape[1], call.get("sink_logits")
    if lse is None or REDUCTIONS["max"] in (reduce, group_reduce):
        scores = _scores(q=own["q"], lse=lse, sink_logits=sinks, group_reduce=group_reduce, **options)
    else:
        by_member = zip(
            own["q"].unflatten(1, (heads, -1)).unbind(2),
            lse.unflatten(1, (heads, -1)).unbind(2),
            [None] * (lse.shape[1] // heads) if sinks is None else sinks.view(heads, -1).t().contiguous(),
        )
        members = [
            _scores(q=q, lse=x, sink_logits=sink, group_reduce=REDUCTIONS["max"], **options) for q, x, sink in by_member
        ]
        scores = torch.stack(members, 2)
        if group_reduce == REDUCTIONS["none"]:
            scores = scores.flatten(1, 2)
        else:
            scores = scores.mean(2) if group_reduce == REDUCTIONS["mean"] else scores.sum(2)
    if mean_over_rows:  # that see a key of any rank
        starts = call.get("starts")
        seeing = (call["visible"] > (0 if starts is None else starts.unsqueeze(1))).sum(-1)
        scores = scores / seeing.clamp(min=1).view(-1, 1, 1)
    return scores


def _select_topk(overload: OpOverload, call: dict[str, Any], tokens: _Tokens) -> Any:
    """The best of the rank's own, everybody's, the best of them. Candidates are in the order of their slots, so equal
    scores keep the lower one here as there."""
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

    # What stays anyway, [b, 1, sinks] and [b, 1, window]; its scores do not matter.
    front, back = (torch.arange(x, device=own.device) for x in (sinks, window))
    fixed = [
        torch.where(front < at_front.unsqueeze(1), begin.unsqueeze(1) + front, _ABSENT),
        torch.where(back < at_back.unsqueeze(1), (end - at_back).unsqueeze(1) + back, _ABSENT),
    ]
    slots = torch.cat((found, *(x.unsqueeze(1).expand(-1, own.shape[1], -1) for x in fixed)), 2)
    slots, order = slots.sort(-1)
    values = pad(values, (0, sinks + window)).gather(2, order)
    candidates = (slots != _ABSENT).any(1).sum(-1, dtype=torch.int32)  # as many in each head

    best = overload(scores=values, k=k, sinks=sinks, window=window, lengths=candidates, budgets=budgets)
    kept = torch.where(best < 0, -1, slots.gather(2, best.clamp(min=0)))[..., : tokens.total]
    if call.get("fill_invalid", False):
        kept = _filled(kept, begin.view(-1, 1, 1), end.view(-1, 1, 1), tokens.total)
    return tokens.replicated(kept)


def _filled(kept: Tensor, begin: Tensor, end: Tensor, n: int) -> Tensor:
    """With the lowest invalid slots, those outside [begin, end), in the place of -1, in order."""
    nth = torch.arange(kept.shape[2], device=kept.device) - (kept >= 0).sum(-1, keepdim=True)
    invalid = torch.where(nth < begin, nth, nth - begin + end)
    filled = torch.where(nth < 0, kept, torch.where(invalid < n, invalid, _ABSENT)).sort(-1).values
    return filled.masked_fill_(filled == _ABSENT, -1)


class _OfTokens(NamedTuple):
    """What an operator does where tokens are sharded."""

    leader: str  # the argument that says how
    rule: Callable[[OpOverload, dict[str, Any], _Tokens], Any]


_OF_TOKENS = {
    "anchor_cosine": _OfTokens("k", _anchor_cosine),
    "select_topk": _OfTokens("scores", _select_topk),
    "window_attention": _OfTokens("k", _window_attention),
    "window_scores": _OfTokens("k", _window_scores),
}
