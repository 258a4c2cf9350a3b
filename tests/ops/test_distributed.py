"""DTensors: every operator sharded by heads and by batch, in 2 and 4 processes, compared with one process."""

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
from kvops.ops import reference

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed"),
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo"),
]
BATCH, HEADS, TOKENS = 0, 1, 2


def run(rank: int, ranks: int, check, meeting: str, failed, args: tuple) -> None:
    """Run check(rank, ranks, *args) on one rank."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    try:
        distributed.register()
        distributed.register()  # a second call does nothing
        check(rank, ranks, *args)
        torch.distributed.barrier()  # no rank leaves while another still reads
    except BaseException:
        failed.put(f"rank {rank} of {ranks}:\n{traceback.format_exc()}")
        raise
    finally:
        torch.distributed.destroy_process_group()
    os._exit(0)  # a torch thread that outlives the interpreter aborts the process (observed once)


def on_ranks(ranks: int, check, tmp_path, *args) -> None:
    failed = multiprocessing.get_context("spawn").SimpleQueue()
    try:
        multiprocessing.spawn(run, (ranks, check, str(tmp_path / "meeting"), failed, args), ranks)
    except multiprocessing.ProcessExitedException as error:
        pytest.fail(f"{error}\n{failed.get() if not failed.empty() else ''}")
    except multiprocessing.ProcessRaisedException as error:
        pytest.fail(str(error))


def results(overload, call: dict) -> list[Tensor]:
    """Return a call's results and written tensors."""
    found = pytree.tree_leaves(overload(**call))
    written = [call[x.name] for x in overload._schema.arguments if x.alias_info]
    return [x for x in [*found, *pytree.tree_leaves(written)] if isinstance(x, Tensor)]


def sharded(call: dict, mesh, roles: tuple[int | None, ...]) -> dict:
    """Make the call on DTensors. Shared tensors stay shared."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    made: dict[int, Tensor] = {}

    def of(name: str, x: Tensor) -> Tensor:
        if id(x) not in made:
            dims = distributed.dims_of(name, x.dim(), False)
            placements = [Replicate() if y is None or dims[y] is None else Shard(dims[y]) for y in roles]
            made[id(x)] = distribute_tensor(x.clone(), mesh, placements, src_data_rank=None)  # all ranks have the data
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
    """Check the functions of kvops.ops, eager and compiled."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.experimental import implicit_replication

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
    q = kit.randn(2, 8, 6, 32, seed=5)
    table = torch.arange(12, dtype=torch.int32).view(2, 6)  # pages of 16, replicated; requests are sharded
    pages, visible = k.unflatten(2, (6, 16)).transpose(1, 2).flatten(0, 1).contiguous(), kit.causal(6, 96)
    by_batch = [distribute_tensor(x, mesh, [Shard(BATCH)]) for x in (q, table)]
    found = ops.window_scores(by_batch[0], pages, visible, block_table=by_batch[1])
    assert kit.same(whole(found), ops.window_scores(q, k, visible))
    with implicit_replication():
        kept = kvops.snapkv_compress(*shards, distribute_tensor(q, mesh, [Shard(HEADS)]), 24)
    assert kit.same([whole(x) for x in kept], list(kvops.snapkv_compress(k, v, q, 24)))


def check_anchors_of_tokens(rank: int, ranks: int) -> None:
    """Check anchor_cosine of a sharded sequence: equal to one process except for the order of one sum."""
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


def token_meshes(ranks: int):
    """Yield (mesh, roles) whose last dim shards tokens."""
    from torch.distributed.tensor import init_device_mesh

    shapes = {(TOKENS,): (ranks,)}
    if ranks == 4:
        shapes |= {(HEADS, TOKENS): (2, 2), (TOKENS, TOKENS): (2, 2)}
    return [(init_device_mesh("cpu", shape), roles) for roles, shape in shapes.items()]


def check_windows_of_tokens(rank: int, ranks: int) -> None:
    """Check that results equal one process' except for the rounding of merged sums; the reference is fp64."""
    b, group, w, n = 2, 3, 12, 32  # with 4 ranks, the last 2 have tokens of the window
    q, k, v = kit.randn(b, 2 * group, w, 16), kit.randn(b, 2, n, 16, seed=1), kit.randn(b, 2, n, 24, seed=2)
    k[0, 0, 7] = torch.nan
    sinks = kit.randn(2 * group, seed=3)
    late = kit.causal(w, n).expand(b, -1).clone()
    late[0, :3], late[1, 5], late[1, 6] = 0, 5, 9  # rows that see no key, or none of most ranks
    calls = [
        {"visible": visible, **options, "reduce": reduce, "group_reduce": group_reduce}
        for visible, options in (
            (kit.causal(w, n), {}),
            (late, {"starts": kit.int32(3, 25), "sink_logits": sinks, "softcap": 5.0}),
            (late, {"starts": kit.int32(20, 0), "scale": 0.7}),
        )
        for reduce in ("sum", "mean", "max")
        for group_reduce in ("mean", "none", "max", "sum")
    ]
    for mesh, roles in token_meshes(ranks):

        def shards(call, mesh=mesh, roles=roles):
            return sharded(call, mesh, roles)

        for options in calls:
            call = {"q": q, "k": k, "v": v, **options}
            out, lse, scores = ops.window_attention(**shards(call))
            assert TOKENS not in [x.dim for x in (*out.placements, *lse.placements) if x.is_shard()]
            assert [x.dim for x in scores.placements if x.is_shard()] == [x for x in roles if x is not None]
            want = reference.window_attention(**call)
            for mine, exact in zip((out, lse, scores), want):
                torch.testing.assert_close(whole(mine).double(), exact, rtol=1e-5, atol=1e-6, equal_nan=True)
            alone = ops.window_attention(**shards({**call, "scores": False}))
            assert kit.same([whole(x) for x in alone[:2]], [whole(out), whole(lse)]) and alone[2].shape[2] == 0
            del call["v"]
            for lse_of in ({}, {"lse": whole(lse)}):
                mine = ops.window_scores(**shards({**call, **lse_of}))
                torch.testing.assert_close(whole(mine).double(), want[2], rtol=1e-5, atol=1e-6, equal_nan=True)
            biased = {**call, "v": v, "key_bias": kit.randn(*k.shape[:3]), "scores": False}
            biased |= {"softcap": 0.0}
            for mine, exact in zip(ops.window_attention(**shards(biased)), reference.window_attention(**biased)):
                torch.testing.assert_close(whole(mine).double(), exact, rtol=1e-5, atol=1e-6, equal_nan=True)
            rounded = dict(
                zip(("k", "k_scale", "v", "v_scale"), (*kvops.quantize_rows(k), *kvops.quantize_rows(v[..., :16])))
            )
            rounded |= {"v_scale": rounded["v_scale"].nan_to_num(0)}
            narrow = {**call, "q": q.bfloat16(), **rounded}
            for mine, exact in zip(ops.window_attention(**shards(narrow)), reference.window_attention(**narrow)):
                tolerance = 2e-2 if mine.dtype == torch.bfloat16 else 1e-5
                mine = whole(mine).double()
                torch.testing.assert_close(mine, exact, rtol=tolerance, atol=tolerance, equal_nan=True)
            del narrow["v"], narrow["v_scale"]
            mine, exact = ops.window_scores(**shards(narrow)), reference.window_scores(**narrow)
            torch.testing.assert_close(whole(mine).double(), exact, rtol=1e-5, atol=1e-6, equal_nan=True)
            weighted = {**call, "row_weights": kit.randn(*q.shape[:3]).abs()}
            mine, exact = ops.window_scores(**shards(weighted)), reference.window_scores(**weighted)
            torch.testing.assert_close(whole(mine).double(), exact, rtol=1e-5, atol=1e-6, equal_nan=True)
        dot = {"q": q, "k": k, "visible": late, "score": "dot", "reduce": "mean", "starts": kit.int32(3, 25)}
        torch.testing.assert_close(whole(ops.window_scores(**shards(dot))), ops.window_scores(**dot), equal_nan=True)
        packed = {"q": q.bfloat16(), "k": k.nan_to_num().to(torch.float8_e4m3fn), "visible": late}
        exact = ops.window_scores(**packed)
        torch.testing.assert_close(whole(ops.window_scores(**shards(packed))), exact, rtol=1e-4, atol=1e-5)
        half = {name: x.bfloat16() for name, x in {"q": q, "k": k.nan_to_num(), "v": v}.items()} | {"visible": late}
        for mine, exact in zip(ops.window_attention(**shards(half)), reference.window_attention(**half)):
            tolerance = 2e-2 if mine.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(whole(mine).double(), exact, rtol=tolerance, atol=tolerance)


def check_selection_of_tokens(rank: int, ranks: int) -> None:
    """Check that selections are equal to the last bit."""
    from torch.distributed.tensor import Replicate

    b, heads, n = 2, 4, 48
    spans = (
        {},
        {"starts": kit.int32(0, 29)},
        {"lengths": kit.int32(48, 3)},
        {"starts": kit.int32(5, 40), "lengths": kit.int32(20, 0)},
    )
    budgets = torch.arange(5, 5 + b * heads, dtype=torch.int32).view(b, heads)
    generator = torch.Generator().manual_seed(0)
    few = torch.randint(3, (b, heads, n), generator=generator).float()  # ties
    few[0, :, 5:20], few[1, :2], few[1, 2, 9:] = torch.nan, -torch.inf, torch.inf
    few[0, 0, ::3], few[0, 0, 1::3] = 0.0, -0.0
    for mesh, roles in token_meshes(ranks):
        for scores in (few, kit.randn(b, heads, n)):
            for span in spans:
                for options in (
                    {"k": 1},
                    {"k": 13},
                    {"k": 13, "sinks": 3, "window": 2, "budgets": budgets},
                    {"k": 13, "fill_invalid": True, "sinks": 7, "window": 6},
                    {"k": 13, "fill_invalid": True, "budgets": budgets},
                    {"k": 60, "fill_invalid": True, "sinks": 50},
                    {"k": 60, "window": 50},
                    {"k": 0},
                ):
                    call = {"scores": scores, **options, **span}
                    kept = ops.select_topk(**sharded(call, mesh, roles))
                    assert kit.same(whole(kept), ops.select_topk(**call)), (roles, options, span)
                    assert all(x == Replicate() for x, role in zip(kept.placements, roles) if role == TOKENS)


def check_methods_of_tokens(rank: int, ranks: int) -> None:
    """Check KeyDiff, where each rank moves its part of the kept tokens, and SnapKV, whose pooling crosses ranks."""
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.experimental import implicit_replication

    k, v = kit.kv(2, 4, 96, 32)
    q = kit.randn(2, 8, 6, 32, seed=5)
    want = kvops.keydiff_compress(k, v, 24, sinks=2, recent=4)
    for mesh, roles in token_meshes(ranks):
        call = sharded({"k": k, "v": v, "q": q}, mesh, roles)
        own_k, own_v = call["k"], call["v"]
        kept = ops.select_topk(ops.anchor_cosine(own_k), k=24, sinks=2, window=4)
        assert kit.same(whole(kept), want.indices)
        own = distributed.own_indices(kept, own_k)
        rows = ops.gather_kv(own_k.to_local(), own_v.to_local(), own)
        # Concatenate the ranks' parts.
        *rows, slots = (DTensor.from_local(x, mesh, own_k.placements).full_tensor() for x in (*rows, own))
        assert kit.same([x[slots >= 0] for x in rows], [x.flatten(0, 2) for x in want[:2]])

        for policy in (kvops.SnapKV(24, 6, pooling="max"), kvops.SnapKV(24, 6, pooling="avg")):
            view = kvops.View(own_k, own_v)
            with implicit_replication():
                policy.observe(view, call["q"], None, {})
                kept = policy.select(view)
            assert kit.same(whole(kept), policy.compress(k, v, q).indices)
            assert all(x == Replicate() for x, role in zip(kept.placements, roles) if role == TOKENS)


def check_all_of_tokens(rank: int, ranks: int) -> None:
    """Run all checks, so that the processes start only once."""
    for check in (check_anchors_of_tokens, check_windows_of_tokens, check_selection_of_tokens, check_methods_of_tokens):
        check(rank, ranks)


def check_refusals(rank: int, ranks: int) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (ranks,))
    k, v = kit.kv(2, 4, 96, 32)
    by_heads, by_tokens = (distribute_tensor(k, mesh, [Shard(x)]) for x in (HEADS, TOKENS))
    kept = distribute_tensor(torch.zeros(2, 4, 1, dtype=torch.int64), mesh, [Shard(HEADS)])
    q, visible = kit.randn(2, 8, 6, 32), kit.causal(6, 96)
    scores, segments = (distribute_tensor(kit.randn(2, 4, *x), mesh, [Shard(TOKENS)]) for x in ((96,), (6, 8)))
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
        (("gather_kv: k must be replicated", r"Shard\(dim=2\)"), lambda: ops.gather_kv(by_tokens, by_tokens, kept)),
        (("select_topk: starts must lie", "got .97, 0."),
         lambda: ops.select_topk(scores, k=5, starts=kit.int32(97, 0))),
        ((r"select_topk: starts \+ lengths must lie", "got .97, 0."),
         lambda: ops.select_topk(scores, k=5, starts=kit.int32(7, 0), lengths=kit.int32(90, 0))),
        (("select_topk: sinks . window must be <= k, expected at most 5",),
         lambda: ops.select_topk(scores, k=5, sinks=6)),
        (("select_topk: scores must be replicated or sharded along batch .0. or heads .1.",),
         lambda: ops.select_topk(segments, k=5, seq_len=56)),
        (("window_attention: q must be", "on the mesh of k"),
         lambda: ops.window_attention(by_tokens, by_tokens, by_tokens, visible)),
        (("window_attention: v must be", "on the mesh of k"),
         lambda: ops.window_attention(q, by_tokens, v, visible)),
        (("window_attention: visible must lie",), lambda: ops.window_attention(q, by_tokens, by_tokens, visible + 1)),
        (("window_attention: cos and sin must be None if tokens are sharded",),
         lambda: ops.window_attention(q, by_tokens, by_tokens, visible, cos=kit.randn(96, 16), sin=kit.randn(96, 16))),
        (("window_attention: scores must be False with key_bias if tokens are sharded",),
         lambda: ops.window_attention(q, by_tokens, by_tokens, visible, key_bias=by_tokens[..., 0])),
        (("window_scores: lse must be float32",),
         lambda: ops.window_scores(q, by_tokens, visible, lse=kit.randn(2, 7, 6))),
        (("own_indices: indices must be", "on the mesh of k"), lambda: distributed.own_indices(kept, by_tokens)),
        (("own_indices: k and indices must be", "float32"), lambda: distributed.own_indices(scores, by_tokens)),
        (("anchor_cosine: starts must be", "Replicate"),
         lambda: ops.anchor_cosine(by_heads, starts=distribute_tensor(kit.int32(0, 0), mesh, [Shard(0)]))),
    ):  # fmt: skip
        with kit.refuses(*parts):
            call()
    with kit.refuses("own_indices: k must be a DTensor, got Tensor", kind=TypeError):
        distributed.own_indices(kept, k)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_every_call(ranks, tmp_path):
    """Results are equal to the last bit, in place too."""
    on_ranks(ranks, check_every_call, tmp_path)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_sharded_tokens(ranks, tmp_path):
    on_ranks(ranks, check_all_of_tokens, tmp_path)


@pytest.mark.parametrize("check", [check_methods, check_refusals])
def test_two_processes(check, tmp_path):
    on_ranks(2, check, tmp_path)


def test_every_argument_has_a_rule():
    """Every tensor argument of every operator, new ones included, needs a sharding rule."""
    for overload in distributed.overloads():
        for x in overload._schema.arguments:
            if "Tensor" in str(x.type):
                distributed.dims_of(x.name, 3, False)
    with pytest.raises(NotImplementedError, match="no rule for an argument unheard_of"):
        distributed.dims_of("unheard_of", 3, False)
