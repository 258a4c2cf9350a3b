"""DTensors: every operator on shards of heads and of the batch, against one process; 2 and 4 processes."""

import copy
import os
import traceback

import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor
from torch.utils import _pytree as pytree

import kit
import kvops
from calls import OPERATORS_CALLS, direct, inputs
from kvops import distributed, ops

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed"),
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo"),
]
BATCH, HEADS, TOKENS = 0, 1, 2


def run(rank: int, ranks: int, check, meeting: str, failed) -> None:
    """check(rank, ranks) on one rank."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    try:
        distributed.register()
        distributed.register()  # again: nothing
        check(rank, ranks)
        torch.distributed.barrier()  # no rank leaves while another still reads
    except BaseException:
        failed.put(f"rank {rank} of {ranks}:\n{traceback.format_exc()}")
        raise
    finally:
        torch.distributed.destroy_process_group()
    os._exit(0)  # seen once: a thread of torch's was still there when the interpreter ended, which aborts the process


def on_ranks(ranks: int, check, tmp_path) -> None:
    failed = multiprocessing.get_context("spawn").SimpleQueue()
    try:
        multiprocessing.spawn(run, (ranks, check, str(tmp_path / "meeting"), failed), ranks)
    except multiprocessing.ProcessExitedException as error:
        pytest.fail(f"{error}\n{failed.get() if not failed.empty() else ''}")
    except multiprocessing.ProcessRaisedException as error:
        pytest.fail(str(error))


def results(overload, call: dict) -> list[Tensor]:
    """What a call returns and writes."""
    found = pytree.tree_leaves(overload(**call))
    written = [call[x.name] for x in overload._schema.arguments if x.alias_info]
    return [x for x in [*found, *pytree.tree_leaves(written)] if isinstance(x, Tensor)]


def sharded(call: dict, mesh, roles: tuple[int | None, ...]) -> dict:
    """The call on DTensors; what is the same tensor still is."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    made: dict[int, Tensor] = {}

    def of(name: str, x: Tensor) -> Tensor:
        if id(x) not in made:
            dims = distributed.dims_of(name, x.dim(), False)
            placements = [Replicate() if y is None or dims[y] is None else Shard(dims[y]) for y in roles]
            made[id(x)] = distribute_tensor(x.clone(), mesh, placements)
        return made[id(x)]

    return {name: pytree.tree_map_only(Tensor, lambda x, name=name: of(name, x), value) for name, value in call.items()}


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def check_every_call(rank: int, ranks: int) -> None:
    from torch.distributed.tensor import init_device_mesh

    meshes = {(HEADS,): (ranks,), (BATCH,): (ranks,), (None,): (ranks,)}
    if ranks == 4:
        meshes = {(BATCH, HEADS): (2, 2)}
    for roles, shape in meshes.items():
        mesh = init_device_mesh("cpu", shape)
        for name in OPERATORS_CALLS:
            x = inputs(0, b=2, heads=2, n=60, d=16, dv=24, dtype=torch.bfloat16)
            overload, call = direct(name, x)
            expected = results(overload, copy.deepcopy(call))
            found = results(overload, sharded(call, mesh, roles))
            assert len(found) == len(expected), name
            for mine, want in zip(found, expected):
                assert type(mine).__name__ == "DTensor" and kit.same(whole(mine), want), (name, roles)


def check_methods(rank: int, ranks: int) -> None:
    """The functions of kvops.ops, and torch.compile of them."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (ranks,))
    k, v = kit.kv(2, 4, 96, 32)

    def step(k, v):
        kept = ops.select_topk(ops.anchor_cosine(k), k=24)
        return ops.gather_kv(k, v, kept)

    shards = [distribute_tensor(x, mesh, [Shard(HEADS)]) for x in (k, v)]
    for call in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        assert kit.same([whole(x) for x in call(*shards)], step(k, v))
    kept = kvops.keydiff_compress(*shards, 24)
    assert kit.same([whole(x) for x in kept[:2]], kvops.keydiff_compress(k, v, 24)[:2])


def check_tokens(rank: int, ranks: int) -> None:
    """anchor_cosine of a sharded sequence: what one process has, but for the order of one sum."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    k, _ = kit.kv(2, 4, 96, 32)
    meshes = [((ranks,), (TOKENS,))] if ranks == 2 else [((4,), (TOKENS,)), ((2, 2), (HEADS, TOKENS))]
    for shape, roles in meshes:
        mesh = init_device_mesh("cpu", shape)
        shards = distribute_tensor(k, mesh, [Shard(x) for x in roles])
        for options in (
            {},
            {"normalize_anchor": False},
            {"starts": kit.int32(0, 70)},
            {"starts": kit.int32(3, 40), "lengths": kit.int32(60, 50)},
            {"lengths": kit.int32(96, 10)},
        ):
            scores, anchor = ops.anchor_cosine(shards, return_anchor=True, **options)
            assert scores.placements == tuple(Shard(x) for x in roles)
            assert anchor.placements == tuple(Replicate() if x == TOKENS else Shard(x) for x in roles)
            want = ops.anchor_cosine(k, return_anchor=True, **options)
            for mine, expected in zip((scores, anchor), want):
                size = max(1.0, float(expected.nan_to_num().abs().max()))
                torch.testing.assert_close(whole(mine), expected, rtol=0, atol=1e-6 * size, equal_nan=True)
        given = kit.randn(2, 4, 32)
        own = distribute_tensor(given, mesh, [Replicate() if x == TOKENS else Shard(x) for x in roles])
        assert kit.same(whole(ops.anchor_cosine(shards, anchor=own)), ops.anchor_cosine(k, anchor=given))


def check_refusals(rank: int, ranks: int) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (ranks,))
    k, v = kit.kv(2, 4, 96, 32)
    by_heads, by_tokens = (distribute_tensor(k, mesh, [Shard(x)]) for x in (HEADS, TOKENS))
    kept = distribute_tensor(torch.zeros(2, 4, 1, dtype=torch.int64), mesh, [Shard(HEADS)])
    for parts, call in (
        ((r"outlier_degree: k must be replicated or sharded along batch \(0\) or heads \(1\)", r"Shard\(dim=2\)"),
         lambda: ops.outlier_degree(by_tokens)),
        ((r"compact_kv_: k\[0\] must be", r"Shard\(dim=2\)"),
         lambda: ops.compact_kv_(by_tokens, by_tokens, kept)),
        (("anchor_cosine: k must be replicated or sharded", "Partial"),
         lambda: ops.anchor_cosine(DTensor.from_local(k, mesh, [Partial()]))),
        (("anchor_cosine: dim 1 of k must be a multiple of the 2 ranks, got 3",),
         lambda: ops.anchor_cosine(distribute_tensor(k[:, :3], mesh, [Shard(1)]))),
        (("lag_score: v must be", "on the mesh of k", "Replicate"),
         lambda: ops.lag_score(by_heads, distribute_tensor(v, mesh, [Replicate()]), lag=8)),
        (("lag_score: v must be", "on the mesh of k"), lambda: ops.lag_score(by_heads, v, lag=8)),
        (("lag_score: k must be a DTensor", "got an ordinary tensor"), lambda: ops.lag_score(k, by_heads, lag=8)),
        (("anchor_cosine: starts must be", "Replicate"),
         lambda: ops.anchor_cosine(by_heads, starts=distribute_tensor(kit.int32(0, 0), mesh, [Shard(0)]))),
    ):  # fmt: skip
        with kit.refuses(*parts):
            call()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_every_call(ranks, tmp_path):
    """To the last bit, in place too."""
    on_ranks(ranks, check_every_call, tmp_path)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_sharded_tokens(ranks, tmp_path):
    on_ranks(ranks, check_tokens, tmp_path)


@pytest.mark.parametrize("check", [check_methods, check_refusals])
def test_two_processes(check, tmp_path):
    on_ranks(2, check, tmp_path)


def test_every_argument_has_a_rule():
    """A new operator's tensors are named, or registering it is not enough."""
    for overload in distributed.overloads():
        for x in overload._schema.arguments:
            if "Tensor" in str(x.type):
                distributed.dims_of(x.name, 3, False)
    with pytest.raises(NotImplementedError, match="no rule for an argument unheard_of"):
        distributed.dims_of("unheard_of", 3, False)
