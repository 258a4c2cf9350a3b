"""fp8 rows: operators that compute with K or V give the results of bf16 rows with the same values."""

import dataclasses
import math

import pytest
import torch

import calls
import kit
import kvops
from calls import direct, inputs
from kvops import ops
from kvops.ops import reference
from test_pages import LAYOUTS, PAGED_CALLS, results, to_pages, with_paged_values

pytestmark = kit.every_device

FP8 = torch.float8_e4m3fn, torch.float8_e5m2
#: Calls of operators that compute with K or V; the others move bytes (test_gather_kv.py).
CALLS = [x for x in PAGED_CALLS if x.split(",")[0] not in ("gather_kv", "compact_kv_") and "int8" not in x]


def stored(arguments: dict, dtype: torch.dtype) -> tuple[dict, dict]:
    """Return the call with K and V in fp8, and the same call with the same values in bf16."""
    rows = {x: arguments[x].to(dtype) for x in ("k", "v") if x in arguments}
    return arguments | rows, arguments | {name: x.bfloat16() for name, x in rows.items()}


def in_pages(arguments: dict, size: int, seed: int, layout: str) -> dict:
    """Do what test_pages.paged does, in a dtype that torch can fill tensors of."""
    v = arguments.get("v", arguments.get("k"))
    k = arguments.get("k", v)
    pages = to_pages(k.bfloat16(), v.bfloat16(), size, seed, layout)
    views = LAYOUTS[layout][1](pages.memory.to(k.dtype))
    rows = {"k": views[0][..., : k.shape[3]], "v": views[1][..., : v.shape[3]]}
    arguments = with_paged_values(arguments, size, seed, layout)
    return arguments | {x: rows[x] for x in rows if x in arguments} | {"block_table": pages.block_table}


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("d, dv", [(16, 48), (64, 80), (128, 128), (272, 16)])
def test_every_call_is_that_of_bf16(name, dtype, d, dv):
    """Results are equal to the last bit."""
    x = inputs(0, n=kit.size(700, 150), heads=2, d=d, dv=dv, dtype=torch.bfloat16).map(kit.on_device)
    overload, arguments = direct(name, x)
    fp8, bf16 = stored(arguments, dtype)
    assert kit.same(results(overload, fp8), results(overload, bf16))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("name", CALLS)
def test_every_call_is_the_same_in_pages(name, dtype, layout):
    overload, arguments = direct(name, inputs(0, n=80, d=32, dv=32, dtype=torch.bfloat16).map(kit.on_device))
    fp8, bf16 = stored(arguments, dtype)
    expected = results(overload, bf16)
    for seed, size in enumerate((1, 5, 16, 80)):
        assert kit.same(results(overload, in_pages(fp8, size, seed, layout)), expected), size


@pytest.mark.parametrize("dtype", FP8)
def test_every_number(dtype):
    """All 256 values, including subnormals, infinities and NaN, in every lane of a register, with and without flushing
    subnormals to zero."""
    codes = kit.on_device(torch.arange(256, device="cpu").to(torch.uint8))
    k = torch.stack([codes.roll(i) for i in range(64)]).view(dtype).view(1, 1, 64, 256)
    wide = k.bfloat16()
    assert wide.float().isfinite().sum() < wide.numel()
    q = torch.eye(256).bfloat16()[None, None]
    one = kit.int32(64).expand(256).contiguous()
    finite = torch.where(wide.float().isfinite(), wide.float(), 0).to(dtype)
    for flush in (False, True)[: kit.size(2, 1)]:  # the simulator computes with the CPU's arithmetic
        torch.set_flush_denormal(flush)
        try:
            means, counts = ops.build_prototypes(finite, num_chunks=64, num_buckets=0)
            logits = ops.window_scores(q, finite, one, scale=1.0, score="dot", reduce="max", group_reduce="none")
        finally:
            torch.set_flush_denormal(False)
        assert torch.equal(means, finite.float()) and (counts == 1).all()
        assert torch.equal(logits[0, 0], finite.float()[0, 0].amax(-1))
    rows = k.view(torch.uint8).view(64, 256).T.contiguous().view(dtype)  # 64 consecutive codes per row
    bad = ~rows.float().isfinite().all(-1)
    scores = ops.anchor_cosine(rows.view(1, 1, 256, 64))
    assert bad.any() and torch.equal(scores[0, 0].isnan(), bad)


@pytest.mark.parametrize("dtype", FP8)
def test_scales_of_tensors_and_heads(dtype):
    """Which results do not depend on the scales, and where the scales go otherwise."""
    k, v = kit.kv(2, 3, 200, 64, torch.bfloat16)
    scale = kit.on_device(torch.tensor([0.25, 2.0, 8.0], device="cpu"))  # powers of two, so products are exact
    by_head = scale[:, None, None]
    k8, v8 = ((x / by_head).to(dtype) for x in (k, v))
    true_k, true_v = ((x.float() * by_head).bfloat16() for x in (k8, v8))
    prototypes, counts = ops.build_prototypes(true_k, num_chunks=9, num_buckets=0)
    found, same_counts = ops.build_prototypes(k8, num_chunks=9, num_buckets=0)
    assert kit.same((found * by_head, same_counts), (prototypes, counts))
    assert torch.equal(ops.assign_prototypes(k8, found), ops.assign_prototypes(true_k, prototypes))
    mean, cov = kit.randn(6, 64), kit.randn(6, 64, 64, seed=1)
    unscaled = k8.bfloat16()
    assert kit.same([ops.quadratic_scores(k8, mean, cov=cov)], [ops.quadratic_scores(unscaled, mean, cov=cov)])
    assert kit.same(*([ops.trig_scores(x, mean, norms=mean[:, :32].contiguous())] for x in (k8, unscaled)))
    for op, arguments in (
        (ops.anchor_cosine, ()),
        (ops.outlier_degree, ()),
    ):
        torch.testing.assert_close(op(k8, *arguments), op(true_k, *arguments), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ops.lag_score(k8, v8, lag=16), ops.lag_score(true_k, true_v, lag=16), rtol=1e-4, atol=0)
    q, visible = kit.randn(2, 6, 5, 64).bfloat16(), kit.int32(*range(196, 201))
    scaled = (q.view(2, 3, 2, 5, 64) * scale.bfloat16()[:, None, None, None]).view(2, 6, 5, 64)
    out, *rest = ops.window_attention(scaled, k8, v8, visible)
    want, *others = ops.window_attention(q, true_k, true_v, visible)
    assert kit.same(rest, others)
    assert torch.equal((out.view(2, 3, -1) * scale.bfloat16()[:, None]).view_as(out), want)
    for one in (0.25, 8.0):
        scores = ops.window_scores(q, k8, visible, scale=one * 64**-0.5)
        assert kit.same(scores, ops.window_scores(q, (k8.float() * one).bfloat16(), visible))


@pytest.mark.parametrize("dtype", FP8)
def test_scales_of_tokens_change_no_cosine(dtype):
    k, _ = kit.kv(1, 2, 300, 64, torch.bfloat16)
    scale = k.float().abs().amax(-1, keepdim=True) / 200
    k8 = (k.float() / scale).to(dtype)
    true = (k8.float() * scale).float()
    for op in (ops.anchor_cosine, ops.outlier_degree):
        torch.testing.assert_close(op(k8), op(true), rtol=1e-3, atol=1e-4)


@kit.only("cpu")
@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("name", [x for x in PAGED_CALLS if "out=" not in x and "int8" not in x])
def test_the_reference_is_the_same_for_fp8(name, dtype, monkeypatch):
    monkeypatch.setattr(calls, "ops", reference)
    x = inputs(0, n=96, heads=2, d=16, dv=32, dtype=torch.bfloat16)

    def of(change) -> list[torch.Tensor]:
        rows = dict(k=change(x.k), v=change(x.v), deep=tuple(map(change, x.deep)))
        return [y.float() for y in calls.CALLS[name](dataclasses.replace(x, **rows))]

    assert kit.same(of(lambda y: y.to(dtype)), of(lambda y: y.to(dtype).bfloat16()))


def test_the_reference_gathers_pages_of_fp8():
    pages = kit.randn(3, 2, 4, 8).to(FP8[0])
    dense = reference.pages_to_dense(pages, kit.int32(2, -1).view(1, 2))
    assert dense.dtype == FP8[0] and dense.shape == (1, 2, 8, 8) and not dense[:, :, 4:].float().any()
    assert torch.equal(dense[:, :, :4].float(), pages[2:].float())


def test_the_reference_reads_fp8():
    k, v = kit.kv(1, 2, 120, 32, torch.bfloat16)
    k, v = k.to(FP8[0]), v.to(FP8[0])
    torch.testing.assert_close(ops.anchor_cosine(k), reference.anchor_cosine(k).float(), rtol=1e-4, atol=1e-5)
    found, exact = ops.lag_score(k, v, lag=16), reference.lag_score(k, v, lag=16)
    torch.testing.assert_close(found, exact.float(), rtol=1e-4, atol=1e-6)
    assert math.isfinite(float(found.sum()))


def test_policies_in_fp8_pages():
    """A serving engine's step: scores are those of bf16, rows move byte for byte."""
    k, v = kit.kv(2, 2, 96, 32, torch.bfloat16)
    lengths = kit.int32(96, 70)
    k8, v8 = k.to(FP8[0]), v.to(FP8[0])
    for policy in (
        kvops.KeyDiff(24),
        kvops.LagKV(16, 0.5),
        kvops.SnapKV(24, window=8),
        kvops.ProtoKV(24, window=8, num_chunks=6, num_sats=8),
    ):
        pages = in_pages({"k": k8, "v": v8}, 16, 0, "NHD")
        queries = {"q_window": kit.randn(2, 4, 8, 32).bfloat16()} if isinstance(policy, kvops.QueryPolicy) else {}
        result = policy.compress_(pages["k"], pages["v"], lengths=lengths, block_table=pages["block_table"], **queries)
        want = policy.compress(k8.bfloat16(), v8.bfloat16(), lengths=lengths, **queries)
        assert torch.equal(result.indices, want.indices)
        front = torch.arange(want.indices.shape[2]).expand_as(want.indices)
        front = torch.where(want.indices < 0, -1, front)
        moved = ops.gather_kv(pages["k"], pages["v"], front, block_table=pages["block_table"])
        assert kit.same([x.bfloat16() for x in moved], want[:2])


@pytest.mark.parametrize(
    "policy", [kvops.L2(20), kvops.KeyDiff(20, metric="dot"), kvops.LagKV(8, 0.5, score="l2")], ids=str
)
def test_scores_that_torch_computes(policy):
    k, v = (x.to(FP8[0]) for x in kit.kv(1, 2, 64, 32, torch.bfloat16))
    assert torch.equal(policy.compress(k, v).indices, policy.compress(k.bfloat16(), v.bfloat16()).indices)
    with kit.refuses("k must be torch.float32, .* or torch.float8_e5m2, got torch.int8"):
        policy.compress(k.view(torch.int8), v.view(torch.int8))


def test_what_fp8_is_not_for():
    k, v = (x.to(FP8[0]) for x in kit.kv(1, 2, 32, 16))
    q = kit.randn(1, 2, 1, 16)
    for other in (torch.float32, torch.float16):
        with kit.refuses("q must be torch.bfloat16 with fp8 keys, k torch.float8_e4m3fn", "got torch.float(32|16)"):
            ops.window_scores(q.to(other), k, kit.int32(32))
    with kit.refuses("v must have k's dtype torch.float8_e4m3fn, got torch.float8_e5m2"):
        ops.lag_score(k, v.view(torch.uint8).view(FP8[1]), lag=4)
    with kit.refuses("k must be float32, float16, bfloat16, float8_e4m3fn or float8_e5m2, got torch.uint8"):
        ops.anchor_cosine(k.view(torch.uint8))
    with kit.refuses("head_dim of k must be a positive multiple of 16", "got 8"):
        ops.anchor_cosine(k[..., :8])
    tables = kvops.Rope.of(16).tables(torch.arange(32))
    with kit.refuses("k must be float32, float16 or bfloat16, got torch.float8_e4m3fn"):
        ops.rope_at_slots(k, *tables)


@pytest.mark.parametrize("policy", [kvops.KeyDiff(24), kvops.H2O(24), kvops.SnapKV(24, window=8)], ids=lambda x: x.name)
def test_a_paged_cache_of_fp8(policy):
    """It takes half the memory, and each step gives the results of a bf16 cache with the same values."""
    sizes = dict(num_layers=2, kv_heads=2, head_dim=32, page_size=16)
    caches = {x: kvops.PagedCache(policy, 40, dtype=x, **sizes) for x in (FP8[0], torch.bfloat16)}
    outs: dict[torch.dtype, list] = {x: [] for x in caches}
    for dtype, cache in caches.items():
        requests = [cache.join(prompt=90), cache.join(prompt=50)]
        for turn, tokens in enumerate([[90, 50], *[[1, 1]] * kit.size(20, 5)]):
            with cache.step(requests, tokens) as now:
                for layer in range(2):
                    q, k, v = (kit.randn(2, h, max(tokens), 32, seed=9 * turn + i) for i, h in enumerate((4, 2, 2)))
                    k, v = (x.to(FP8[0]).to(dtype) for x in (k, v))
                    outs[dtype].append(now.attend(layer, q.bfloat16(), k, v))
    assert kit.same(*outs.values())
    fp8, bf16 = caches.values()
    assert fp8.free == bf16.free and 2 * sum(x.nbytes for x in fp8.k) == sum(x.nbytes for x in bf16.k)
