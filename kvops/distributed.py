"""The operators on DTensors: tensor parallelism (heads), data parallelism (batch), KeyDiff over a sharded sequence.

After `kvops.distributed.register()` every operator, and what is made of them, takes DTensors. Each rank works on its
own shard, and nothing is sent::

    mesh = init_device_mesh("cuda", (4,))
    k, v = (DTensor.from_local(x, mesh, [Shard(1)]) for x in (k, v))    # each rank has its KV heads
    kept = kvops.ops.select_topk(kvops.ops.anchor_cosine(k), k=1024)    # [b, Hk, 1024], Shard(1)
    kvops.ops.compact_kv_(k, v, kept)

For each dim of the mesh the first tensor of a call says what is sharded: batch, KV heads, or nothing. The others have
to lie accordingly: what has a batch or a head dim is sharded there, what has none (`starts` where heads are sharded,
`phase`) is replicated. An ordinary tensor counts as replicated. Other placements are refused by name. torch would
gather such a tensor: the whole cache, and if an operator writes to it, a copy of the cache.

Tokens may be sharded for `anchor_cosine` alone: the ranks add up their anchors, one all-reduce of [b, Hk, d], and each
scores its own tokens by the sum. All other operators need every token of a head, and refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

__all__ = ["register"]

BATCH, HEADS, TOKENS = 0, 1, 2
#: By their names in the schemas: tensors of [batch, heads, ...], of [batch, ...], of [heads], and of neither.
_BOTH = frozenset(
    ("k", "v", "q", "k_out", "v_out", "scores", "indices", "anchor", "budgets", "lse", "prototypes", "assignment")
    + ("cluster_scores", "sat_indices", "buckets")
)
_BY_BATCH = frozenset(("starts", "lengths", "block_table"))
_BY_HEAD = frozenset(("sink_logits",))
_WHOLE = frozenset(("projection", "phase", "inv_freq"))
_MAYBE_BY_BATCH = {"visible": 2, "cos": 3, "sin": 3}  # with so many dims
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


def overloads() -> Iterator[OpOverload]:
    """Of all operators."""
    from . import ops

    for name in ops.__all__:
        packet = getattr(torch.ops.kvops, name)
        yield from (getattr(packet, x) for x in packet.overloads())


def dims_of(name: str, dims: int, pages: bool) -> tuple[int | None, int | None, int | None]:
    """The batch, the head and the token dim of an argument that has so many dims; with a block table K and V are pages.
    Tokens are those of K, whose scores can be had from shards."""
    if name in _BOTH:
        return (None if pages and name in ("k", "v") else 0), 1, 2 if name == "k" else None
    if name in _BY_HEAD:
        return None, 0, None
    by_batch = name in _BY_BATCH or dims == _MAYBE_BY_BATCH.get(name)
    if not by_batch and name not in _WHOLE and name not in _MAYBE_BY_BATCH:
        raise NotImplementedError(f"kvops.distributed: no rule for an argument {name}")
    return (0 if by_batch else None), None, None


def _rule(mode: object, overload: OpOverload, types: object, args: Any = (), kwargs: Any = None) -> Any:
    """The call on each rank's own shards."""
    from torch.distributed.tensor import DTensor, Replicate

    op = overload._opname
    given = dict(zip((x.name for x in overload._schema.arguments), args)) | (kwargs or {})
    pages = given.get("block_table") is not None
    tensors = [
        (name, f"{name}[{i}]" if isinstance(value, (list, tuple)) else name, x)
        for name, value in given.items()
        for i, x in enumerate(value if isinstance(value, (list, tuple)) else [value])
        if isinstance(x, Tensor)
    ]
    argument, first, leader = tensors[0]
    if not isinstance(leader, DTensor):
        raise ValueError(f"{op}: {first} must be a DTensor, as others are, got an ordinary tensor")
    mesh = leader.device_mesh
    roles = [_role(op, argument, first, leader, x, pages) for x in range(mesh.ndim)]
    local = {}
    for argument, name, x in tensors:
        dims = dims_of(argument, x.dim(), pages)
        want = _placements([None if y is None else dims[y] for y in roles])
        have = x.placements if isinstance(x, DTensor) else (Replicate(),) * mesh.ndim
        if have != want or (isinstance(x, DTensor) and x.device_mesh != mesh):
            raise ValueError(f"{op}: {name} must be {want} on the mesh of {first}, got {have}")
        local[name] = x.to_local() if isinstance(x, DTensor) else x

    def own(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [local.get(f"{name}[{i}]", x) for i, x in enumerate(value)]
        return local.get(name, value)

    call = {name: own(name, value) for name, value in given.items()}
    if TOKENS in roles:
        return _anchor_cosine_of_tokens(overload, call, mesh, roles)
    return _wrapped(overload(**call), lambda x: DTensor.from_local(x, mesh, _placements(roles), run_check=False))


def _role(op: str, argument: str, name: str, leader: Any, mesh_dim: int, pages: bool) -> int | None:
    """What a dim of the mesh shards: BATCH, HEADS, TOKENS, or None: nothing."""
    placement, ranks = leader.placements[mesh_dim], leader.device_mesh.size(mesh_dim)
    if placement.is_replicate():
        return None
    by_token = op == "anchor_cosine" and not pages
    dims = [x for x in dims_of(argument, leader.dim(), pages) if x is not None and (x != TOKENS or by_token)]
    dim = placement.dim % leader.dim() if placement.is_shard() else None
    if dim not in dims:
        names = " or ".join(("batch (0)", "heads (1)", "tokens (2)")[x] for x in dims)
        raise ValueError(
            f"{op}: {name} must be replicated or sharded along {names}, as nothing is sent, got {placement!r}"
        )
    if leader.shape[dim] % ranks:
        raise ValueError(f"{op}: dim {dim} of {name} must be a multiple of the {ranks} ranks, got {leader.shape[dim]}")
    return dim


def _placements(dims: list[int | None]) -> tuple[Any, ...]:
    from torch.distributed.tensor import Replicate, Shard

    return tuple(Replicate() if x is None else Shard(x) for x in dims)


def _anchor_cosine_of_tokens(overload: OpOverload, call: dict[str, Any], mesh: Any, roles: list[int | None]) -> Any:
    """Each rank's tokens, which follow the tokens of the rank before: its own anchor, everybody's, its scores."""
    from torch.distributed.tensor import DTensor, Partial

    n = call["k"].shape[2]
    first = 0  # of the rank's tokens
    for x, role in enumerate(roles):
        if role == TOKENS:
            first = first * mesh.size(x) + mesh.get_local_rank(x)
    first *= n
    starts, lengths = call.get("starts"), call.get("lengths")
    if starts is not None or lengths is not None:
        begin = torch.zeros_like(lengths) - first if starts is None else starts - first  # type: ignore[arg-type]
        end = torch.full_like(begin, torch.iinfo(torch.int32).max) if lengths is None else begin + lengths
        call["starts"] = begin.clamp(0, n)
        call["lengths"] = end.clamp(0, n) - call["starts"]
    by_rest = [None if x == TOKENS else x for x in roles]
    if call.get("anchor") is None:
        summands = [Partial() if x == TOKENS else y for x, y in zip(roles, _placements(by_rest))]
        own = DTensor.from_local(overload(**call)[1], mesh, summands, run_check=False)
        call["anchor"] = own.redistribute(placements=_placements(by_rest)).to_local()
    scores, anchor = overload(**call)
    return (
        DTensor.from_local(scores, mesh, _placements(roles), run_check=False),
        DTensor.from_local(anchor, mesh, _placements(by_rest), run_check=False),
    )


def _wrapped(found: Any, wrap: Callable[[Tensor], Any]) -> Any:
    if isinstance(found, Tensor):
        return wrap(found)
    return type(found)(_wrapped(x, wrap) for x in found) if isinstance(found, (list, tuple)) else found
