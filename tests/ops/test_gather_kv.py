"""gather_kv against its reference: rows move bit for bit."""

import pytest
import torch

import kit
import kvops
from kit import bits, same
from kvops import ops
from kvops.ops import reference

pytestmark = kit.every_device


def random_indices(b: int, heads: int, n: int, m: int, missing: int = 0, seed=0) -> torch.Tensor:
    """Return ascending kept slots, the last `missing` of each row -1."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(b, heads, n, generator=generator, device="cpu").argsort(-1)[..., :m].sort(-1).values
    kept[..., m - missing :] = -1
    return kit.on_device(kept)


def moved(k, v, indices):
    """Apply the reference to the raw bits: floating-point dtypes may change a NaN's payload."""
    return tuple(x.view(y.dtype) for x, y in zip(reference.gather_kv(bits(k), bits(v), indices), (k, v)))


@pytest.mark.parametrize("dtype", kit.BYTES)
@pytest.mark.parametrize("layout", kit.LAYOUTS)
def test_rows_of_bytes(dtype, layout):
    """fp8 and uint8: the operator moves bytes without interpreting them."""
    k, v = kit.kv(2, 3, 90, 48, dtype, layout, dv=80)
    indices = random_indices(2, 3, 90, 33, missing=2)
    assert same(ops.gather_kv(k, v, indices), moved(k, v, indices))


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d", kit.HEAD_DIMS)
def test_dtypes_and_head_dims(dtype, d):
    k, v = kit.kv(2, 3, 90, d, dtype, dv=64)
    indices = random_indices(2, 3, 90, 33, missing=2)
    k_out, v_out = ops.gather_kv(k, v, indices)
    assert k_out.is_contiguous() and v_out.is_contiguous()
    assert same((k_out, v_out), moved(k, v, indices))


@pytest.mark.parametrize("layout", kit.LAYOUTS)
@pytest.mark.parametrize("out_layout", kit.LAYOUTS)
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_layouts_and_out(layout, out_layout, dtype):
    k, v = kit.kv(2, 3, 90, 48, dtype, layout, dv=80)
    k[0, 0, :, 3] = float("nan")
    indices = random_indices(2, 3, 90, 40, missing=3)
    expected = moved(k, v, indices)
    out = tuple(kit.laid_out(torch.full_like(x, 7.0), out_layout) for x in expected)
    versions = [x._version for x in out]
    result = ops.gather_kv(k, v, indices, out=out)
    assert result[0] is out[0] and result[1] is out[1] and same(out, expected)
    assert all(x._version > before for x, before in zip(out, versions))


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("d, dv", [(8, 1024), (16, 24), (520, 8), (2048, 72)])
def test_narrow_and_wide_rows(dtype, d, dv):
    k, v = kit.kv(1, 2, 50, d, dtype, dv=dv)
    indices = random_indices(1, 2, 50, 21, missing=1)
    assert same(ops.gather_kv(k, v, indices), moved(k, v, indices))


@kit.only("cuda", "simulator")
def test_many_heads():
    """More heads than a CUDA grid can have blocks in y."""
    k, v = kit.kv(7, 10_000, 3, 8, torch.float16)
    indices = random_indices(*k.shape[:3], 2)
    assert same(ops.gather_kv(k, v, indices), moved(k, v, indices))


@kit.only("cpu", "cuda")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_large_outputs_are_streamed(dtype, layout):
    """Outputs of more than 16 MiB use streaming stores."""
    k, v = kit.kv(1, 8, 6000, 128, dtype, layout)
    indices = random_indices(1, 8, 6000, 5000, missing=7)
    expected = moved(k, v, indices)
    assert same(ops.gather_kv(k, v, indices), expected)
    out = tuple(kit.laid_out(torch.zeros_like(x), layout) for x in expected)
    assert same(ops.gather_kv(k, v, indices, out=out), expected)


def test_any_order_repeats_and_expanded_indices():
    k, v = kit.kv(2, 4, 30, 16)
    shared = torch.tensor([[[5, 5, 29, -1, 0]], [[1, 0, 2, -1, -1]]])
    assert same(ops.gather_kv(k, v, shared.expand(-1, 4, -1)), moved(k, v, shared.expand(-1, 4, -1)))
    strided = torch.arange(60).reshape(1, 1, 60)[..., ::3].expand(2, 4, -1) % 30
    assert same(ops.gather_kv(k, v, strided), moved(k, v, strided))


@pytest.mark.parametrize("b,heads,n,m", [(0, 2, 5, 2), (1, 0, 5, 2), (1, 2, 5, 0), (1, 2, 0, 0), (1, 2, 0, 3)])
def test_empty(b, heads, n, m):
    k, v = kit.kv(b, heads, n, 16)
    indices = torch.full((b, heads, m), -1)
    assert same(ops.gather_kv(k, v, indices), (torch.zeros(b, heads, m, 16),) * 2)


def test_bad_input_changes_nothing():
    k, v = kit.kv(1, 2, 20, 16)
    indices = torch.tensor([[[0, 1, 2], [3, 4, 5]]])
    out = (torch.full((1, 2, 3, 16), 7.0), torch.full((1, 2, 3, 16), 7.0))
    wide = torch.zeros(1, 2, 40, 16)
    for arguments, target, parts in (
        ((k[0], v, indices), None, ("gather_kv", "k must be", r"\[2, 20, 16\]")),
        ((k, v.half(), indices), out, ("v must have k's dtype",)),
        ((k, v, indices.int()), out, ("indices must be torch.int64", "torch.int32")),
        ((k, v, indices[0]), out, ("indices must be", r"\[2, 3\]")),
        ((k, v, indices[:, :1]), out, (r"\[1, 2, m\]", r"\[1, 1, 3\]")),
        ((k, v, indices + 15), out, (r"indices must lie in \[-1, 20\)", "got 20", "head 1, entry 2")),
        ((k, v, indices - 3), None, ("indices must lie", "got -3")),
        ((k, v, indices), (out[0][:, :, :2], out[1]), ("k_out must be", r"\[1, 2, 3, 16\]", r"\[1, 2, 2, 16\]")),
        ((k, v, indices), (out[0].half(), out[1]), ("k_out must have k's dtype",)),
        ((k, v, indices), (out[0], out[0]), ("k_out is written", "no memory with v_out")),
        ((k, v, indices), (k[:, :, :3], out[1]), ("k_out is written", "no memory with k")),
        ((k, v, indices), (out[0], k[:, :, 5:8]), ("v_out is written", "no memory with k")),
        ((k, v, indices), (out[0][:, :1].expand(-1, 2, -1, -1), out[1]), ("k_out is written", "overlap itself")),
        ((wide[:, :, :20], v, indices), (wide[:, :, 19:22], out[1]), ("k_out is written",)),
    ):
        before = [x.clone() for x in (k, v, *out)]
        with kvops.debug_checks(), kit.refuses(*parts):
            ops.gather_kv(*arguments, out=target)
        assert all(map(torch.equal, (k, v, *out), before))
    ops.gather_kv(wide[:, :, :20], v, indices, out=(wide[:, :, 20:23], out[1]))  # adjacent in one storage is allowed
    with kit.refuses("indices must be a torch.Tensor", kind=TypeError):
        ops.gather_kv(k, v, [0, 1])
    with kit.refuses(r"out\[0\] requires grad"):
        ops.gather_kv(k, v, indices, out=(out[0].requires_grad_(), out[1]))


@kit.only("cuda", "simulator")
def test_a_gpus_indices_are_not_looked_at():
    """Indices outside [-1, n) give zeros, as -1 does."""
    k, v = kit.kv(2, 2, 20, 16)
    indices = random_indices(2, 2, 20, 10)
    bad = indices.clone()
    bad[0, 1, 3], bad[1, 0, 0], bad[1, 1, 9], bad[1, 1, 5] = 20, -2, 2**62, -(2**63)
    assert same(ops.gather_kv(k, v, bad), moved(k, v, torch.where(bad == indices, indices, -1)))


@kit.only("cpu", "simulator")
def test_lazy_clones_are_read_without_a_copy():
    """A copy-on-write clone shares its memory until it is written to; reading K, V and indices must not trigger it."""
    k, v = kit.kv(1, 2, 20, 16)
    indices = random_indices(1, 2, 20, 5)
    lazy = [torch._lazy_clone(x) for x in (k, v, indices)]
    ops.gather_kv(*lazy)
    ops.select_topk(ops.anchor_cosine(lazy[0]), k=3)
    ops.lag_score(*lazy[:2], lag=5)
    assert all(torch._C._is_cow_tensor(x) for x in lazy)
