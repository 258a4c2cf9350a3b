"""`kvops.attention` against fp64: the installed backends, and the calling conventions of the others."""

import json
import math
import re
import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops.bench import attention as measuring
from kvops.ops import flash_attention

pytestmark = kit.every_device


def available():
    names = kvops.attention_backends(torch.get_default_device())
    return [name for name, state in names.items() if state == "available"]


def make(seed=0, b=2, heads=2, group=3, t=40, n=40, d=64, dv=64, dtype=torch.float32):
    q = kit.randn(b, heads * group, t, d, seed=seed).to(dtype)
    k, v = kit.kv(b, heads, n, d, dtype, dv=dv, seed=seed)
    return q, k, v


def exact(q, k, v, causal=True, scale=None, starts=None, softcap=0.0, sink=None, bias=None, dtype=torch.float64):
    """Compute the formula in plain PyTorch."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.to(dtype), k.to(dtype).repeat_interleave(group, 1), v.to(dtype).repeat_interleave(group, 1)
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    if bias is not None:
        logits = logits + bias.to(dtype).repeat_interleave(group, 1).unsqueeze(2)
    t, n = logits.shape[-2:]
    seen = torch.ones(len(q), 1, t, n, dtype=torch.bool)
    if causal:
        seen = seen.tril(n - t)
    if starts is not None:
        seen = seen & (torch.arange(n) >= starts[:, None])[:, None, None]
    lse = logits.masked_fill(~seen, -math.inf).logsumexp(-1)
    total = lse if sink is None else torch.logaddexp(lse, sink[:, None].to(dtype))
    weights = torch.where(seen, (logits - total.unsqueeze(-1)).exp(), 0.0)
    return weights @ v, lse


def assert_attention(result, q, k, v, sink=None, **options):
    out, lse = exact(q, k, v, sink=sink, **options)
    plain_out, plain_lse = exact(q, k, v, sink=sink, dtype=torch.float32, **options)
    assert result.out.shape == (*q.shape[:3], v.shape[3]) and result.out.dtype == q.dtype
    assert result.lse.shape == q.shape[:3] and result.lse.dtype == torch.float32
    hidden = lse == -math.inf
    assert torch.equal(result.lse == -math.inf, hidden) and (result.out[hidden] == 0).all()
    lses = [x.masked_fill(hidden, 0) for x in (result.lse, plain_lse, lse)]
    if q.dtype == torch.float32:
        kit.assert_close(result.out, plain_out, out)
        kit.assert_close(*lses)
    else:  # in half precision the weights are rounded too, and in torch's FlashAttention some of the products
        eps = torch.finfo(q.dtype).eps
        assert (result.out.double() - out).abs().max() <= 4 * eps * v.double().abs().max()
        assert (lses[0] - lses[2]).abs().max() <= eps


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("t, n", [(40, 40), (1, 40), (7, 40), (1, 1), (300, 317)])
def test_every_backend_is_the_formula(t, n, causal, dtype):
    q, k, v = make(t=t, n=n, dtype=dtype)
    fit = [name for name in available() if not flash_attention.BACKENDS[name].why_not(call(q, k, v))]
    assert "kvops" in fit and (q.is_cuda or "torch_flash" in fit)
    for backend in (None, *fit):
        result = kvops.attention(q, k, v, causal=causal, backend=backend)
        assert result.backend == (backend or result.backend) and result.backend in fit
        assert_attention(result, q, k, v, causal=causal)


def call(q, k, v, causal=True, starts=None, softcap=0.0):
    return flash_attention._Call(q, k, v, causal, 1.0, starts, softcap, None)


@kit.examples(50, derandomize=True)
@given(
    t=st.integers(1, 40),
    old=st.integers(0, 30),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.3]),
    softcap=st.sampled_from([0.0, 2.0]),
    sink=st.booleans(),
    padding=st.none() | st.lists(st.integers(0, 70), min_size=3, max_size=3),
    group=st.sampled_from([1, 4]),
    dv=st.sampled_from([64, 32]),
    backend=st.sampled_from([None, "kvops", "torch_flash"]),
    seed=st.integers(0, 99),
)
def test_any_options(t, old, causal, scale, softcap, sink, padding, group, dv, backend, seed):
    q, k, v = make(seed, b=3, group=group, t=t, n=t + old, dv=dv)
    options = dict(causal=causal, scale=scale, softcap=softcap)
    if padding is not None:
        options["starts"] = kit.int32(*(min(x, t + old) for x in padding))
        for row, start in enumerate(options["starts"].tolist()):
            k[row, :, :start], v[row, :, :start] = 3e4, 3e4
    if backend and flash_attention.BACKENDS[backend].why_not(call(q, k, v, causal, options.get("starts"), softcap)):
        backend = None
    logits = kit.randn(q.shape[1], seed=seed) if sink else None
    result = kvops.attention(q, k, v, sink_logits=logits, backend=backend, **options)
    assert_attention(result, q, k, v, sink=logits, **options)


@pytest.mark.parametrize("layout", kit.LAYOUTS)
@pytest.mark.parametrize("backend", ["kvops", "torch_flash"])
def test_any_strides(layout, backend):
    q, k, v = make(t=20, n=33, dtype=torch.float16)
    if flash_attention.BACKENDS[backend].why_not(call(q, k, v)):
        pytest.skip(f"{backend} does not run here")
    want = kvops.attention(q, k, v, backend=backend)
    for queries in (kit.laid_out(q, layout), q.mT.contiguous().mT):
        got = kvops.attention(queries, kit.laid_out(k, layout), kit.laid_out(v, layout), backend=backend)
        assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)


@kit.only("cpu")
def test_backends_are_asked_about_the_queries_that_they_get(monkeypatch):
    """torch.backends.cuda.can_use_flash_attention refuses queries whose last dim is not contiguous."""
    asked, why_not = [], flash_attention._Flash.why_not
    monkeypatch.setattr(
        flash_attention._Flash, "why_not", lambda self, call: asked.append(call.q.stride(3)) or why_not(self, call)
    )
    q, k, v = make(t=20, n=33)
    for backend in (None, "torch_flash"):
        kvops.attention(q.mT.contiguous().mT, k, v, backend=backend)
    assert asked and set(asked) == {1}


def test_padded_rows_are_as_alone():
    """The content of the padding, NaN included, does not affect any other row."""
    for t in (50, 300):
        q, k, v = make(b=3, t=t, n=t + 10)
        starts = kit.int32(0, 25, t + 10)
        k[1, :, :25], v[1, :, :25], k[2], v[2] = (torch.nan,) * 4
        result = kvops.attention(q, k, v, starts=starts)
        alone = kvops.attention(q[1:2, :, 15:], k[1:2, :, 25:], v[1:2, :, 25:], backend=result.backend)
        torch.testing.assert_close(result.out[1:2, :, 15:], alone.out)
        torch.testing.assert_close(result.lse[1:2, :, 15:], alone.lse)
        assert (result.lse[1, :, :15] == -math.inf).all() and (result.lse[2] == -math.inf).all()
        assert (result.out[1, :, :15] == 0).all() and (result.out[2] == 0).all()


@kit.only("cpu")
@pytest.mark.parametrize("amx", [False, True])
def test_the_choice(amx, monkeypatch):
    monkeypatch.setattr(flash_attention, "AMX", amx)

    def backend(group, t, dtype=torch.float32):
        return kvops.attention(*make(b=1, group=group, t=t, n=max(t, 40), dtype=dtype)).backend

    for dtype, (alone, shared) in flash_attention.KVOPS_ROWS[amx].items():
        for group, most in ((1, alone), (3, shared)):
            tried = {t: backend(group, t, dtype) for t in (1, 2, 4, 5, 128, 129, 300)}
            assert tried == {t: "kvops" if t <= most else "torch_flash" for t in tried}
    monkeypatch.setitem(flash_attention.KVOPS_ROWS[amx], torch.float32, (0, 0))
    q, k, v = make(t=130, n=130)
    assert kvops.attention(q, k, v).backend == "torch_flash"
    assert kvops.attention(q, k, v, softcap=1.0).backend == "kvops"
    assert kvops.attention(q, k, v[..., :32]).backend == "kvops"
    assert kvops.attention(q, k, v, starts=kit.int32(0, 1)).backend == "kvops"
    long = make(t=257, n=257)
    assert kvops.attention(*long, starts=kit.int32(0, 1)).backend == "torch_flash"


@kit.only("cpu")
@pytest.mark.parametrize("amx", [False, True])
def test_the_table_is_what_was_measured(amx):
    record = json.loads(measuring.RESULTS[amx].read_text())
    assert record.get("amx", False) == amx
    found = measuring.means(record["cells"])
    assert {(measuring.DTYPES[dtype], grouped) for dtype, grouped in found} == {
        (dtype, grouped) for dtype in flash_attention.KVOPS_ROWS[amx] for grouped in (False, True)
    }
    assert {kind: measuring.kvops_rows(x) for kind, x in found.items()} == {x: measuring.chosen(*x, amx) for x in found}
    assert measuring.wrong(found, amx) == []


@kit.only("cpu")
def test_the_table_is_checked(tmp_path, monkeypatch, capsys):
    """The measured times decide: made-up times by number of rows."""
    times = {1: 4.0, 4: 2.0, 16: 1.5, 64: 0.5, 128: 0.9, 256: 0.25}
    monkeypatch.setattr(
        measuring, "cell", lambda dtype, rows, n, d, group, *_: {
            **{"dtype": dtype, "rows": rows, "n": n, "head_dim": d, "group": group},
            **{"seconds": {"torch_flash": times[rows], "kvops": 1.0}, "ratio": times[rows]},
        },
    )  # fmt: skip
    monkeypatch.setitem(flash_attention.KVOPS_ROWS[flash_attention.AMX], torch.float32, (0, 128))
    file, said = tmp_path / "cells.json", ["--dtype", "fp32", "--rows", *map(str, times), "--json"]
    assert measuring.main([*said, str(file)]) == 1
    shown = capsys.readouterr().out
    assert "fp32, alone: KVOPS_ROWS 0 is 1.51x slower than 16" in shown
    assert re.search(r"fp32 +shared +4.00x +2.00x +1.50x +0.50x +0.90x +0.25x +128 +16$", shown, re.M)
    record = json.loads(file.read_text())
    assert len(record["cells"]) == 6 * 3 * 4 and record["command"].startswith("python -m kvops.bench.attention --dtype")
    monkeypatch.setitem(flash_attention.KVOPS_ROWS[flash_attention.AMX], torch.float32, (16, 16))
    assert measuring.main([*said, str(file)]) == 0 and "is up to date" in capsys.readouterr().out
    assert measuring.kvops_rows({1: 0.5, 4: 0.5}) == 0 and measuring.kvops_rows({1: 2.0, 4: 2.0}) == math.inf
    assert measuring.lost({1: 2.0, 4: 0.5}, 4) == pytest.approx(2**0.5)


@kit.only("cpu")
@pytest.mark.parametrize("said", [["--json", "."], ["--seconds", "nan"], ["--heads", "0"], ["--rows", "3"]])
def test_what_the_benchmark_refuses(said, capsys):
    with pytest.raises(SystemExit, match="2"):
        measuring.main(said)
    assert f"{said[0]}: " in capsys.readouterr().err


@kit.only("cpu")
def test_a_cell_is_measured():
    found = measuring.cell("fp32", 1, 64, 64, 2, 2, 0.0)
    assert found["pairs"] == measuring.LEAST and all(x > 0 for x in found["seconds"].values()) and found["ratio"] > 0
    assert measuring.lengths(1) == [1024, 8192, 32768] and measuring.lengths(4096) == [4096]


def test_empty():
    for change in (dict(b=0), dict(heads=0, group=1), dict(t=0)):
        q, k, v = make(**{**change})
        result = kvops.attention(q, k, v)
        assert result.backend == "kvops" and result.out.shape == (*q.shape[:3], 64) and result.lse.numel() == 0
    q, k, v = make(n=0)
    result = kvops.attention(q, k, v, causal=False)
    assert (result.out == 0).all() and (result.lse == -math.inf).all()


@kit.only("cpu")
def test_nothing_is_expanded(monkeypatch):
    """K is not repeated for the group: the largest tensor that the function allocates has q's size."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(result):
                if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in inputs:
                    largest = max(largest, x.numel())
            return result

    q, k, v = make(b=1, heads=2, group=8, t=3, n=5000)
    inputs = {x.untyped_storage().data_ptr() for x in (q, k, v)}
    for backend in ("torch_flash", "kvops"):
        with Watch():
            kvops.attention(q, k, v, backend=backend)
    assert 0 < largest <= k.shape[1] * 8 * 5000 < k.numel()


@kit.only("cpu")
def test_compiles_and_runs_without_gradients():
    q, k, v = make(t=20, n=33)
    want = kvops.attention(q, k, v)
    compiled = torch.compile(lambda q, k, v: kvops.attention(q, k, v), fullgraph=True)(q, k, v)
    torch.testing.assert_close(compiled.out, want.out)
    torch.testing.assert_close(compiled.lse, want.lse)
    assert compiled.backend == want.backend
    starts = kit.int32(0, 5)
    padded = torch.compile(lambda q, k, v, s: kvops.attention(q, k, v, starts=s), fullgraph=True)(q, k, v, starts)
    torch.testing.assert_close(padded.out, kvops.attention(q, k, v, starts=starts).out)
    with torch.inference_mode():
        assert torch.equal(kvops.attention(q, k, v).out, want.out)
    q.requires_grad_()
    with torch.no_grad():
        assert torch.equal(kvops.attention(q, k, v).out, want.out)
    with kit.refuses("attention: q requires grad"):
        kvops.attention(q, k, v)


def test_wrong_arguments():
    q, k, v = make()
    for change, message in [
        (dict(q=q[0]), r"q must be \[b, heads, tokens, head_dim\], got shape"),
        (
            dict(q=q.double(), k=k.double(), v=v.double()),
            "q must be torch.float32, torch.float16 or torch.bfloat16, got torch.float64",
        ),
        (dict(k=k.half()), "k must have q's dtype and device, torch.float32 .* got torch.float16"),
        (dict(k=k[..., :32]), r"k must be \[2, Hk, n, 64\] to match q, got"),
        (dict(k=k[:1]), r"k must be \[2, Hk, n, 64\] to match q, got"),
        (dict(v=v[:, :, 1:]), r"v must be \[2, 2, 40, dv\] to match k, got \[2, 2, 39, 64\]"),
        (dict(q=q[:, :5]), "q must have a multiple of k's 2 heads, got 5"),
        (
            dict(k=k[:, :, 1:], v=v[:, :, 1:]),
            "causal queries belong to the last keys, expected at most 39 rows of q, got 40",
        ),
        (dict(softcap=-1.0), "softcap must be 0"),
        (dict(scale=0.0), "scale must be positive and a normal number in fp32, got 0.0"),
        (dict(scale=1e-300), "scale must be positive and a normal number in fp32, got 1e-300"),
        (dict(scale=1e300), "scale must be positive and a normal number in fp32, got 1e[+]300"),
        (dict(softcap=1e300), "softcap must be 0 .none. or positive and a normal number in fp32, got 1e[+]300"),
        (dict(scale=1e30, softcap=1e-30), "scale / softcap must be a normal number in fp32, got 1e[+]30 / 1e-30"),
        (dict(starts=torch.zeros(2)), r"starts must be torch.int32 \[2\] on .*, got torch.float32 \[2\]"),
        (dict(starts=kit.int32(0)), r"starts must be torch.int32 \[2\] on .*, got torch.int32 \[1\]"),
        (dict(sink_logits=torch.zeros(2)), r"sink_logits must be torch.float32 \[6\] on .*, got torch.float32 \[2\]"),
        (
            dict(key_bias=torch.zeros(2, 6, 40)),
            r"key_bias must be torch.float32 \[2, 2, 40\] on .*, got .*\[2, 6, 40\]",
        ),
        (dict(key_bias=torch.zeros(2, 2, 40).half()), r"key_bias must be torch.float32 .* got torch.float16"),
        (dict(key_bias=torch.zeros(2, 2, 40), softcap=1.0), "softcap must be 0 with key_bias, got 1.0"),
        (dict(backend="magic"), "backend must be one of 'flash_attn_3', .*'kvops', or None, got 'magic'"),
    ]:
        with kit.refuses(f"attention: {message}"):
            kvops.attention(**{**dict(q=q, k=k, v=v), **change})
    for backend in ("torch_flash", "kvops") if not q.is_cuda else ():
        for row, start in enumerate((41, -1)):
            starts = torch.zeros(2, dtype=torch.int32)
            starts[row] = start
            with kit.refuses(f"attention: starts must lie in \\[0, 40\\], got {start} for row {row}"):
                kvops.attention(q, k, v, starts=starts, backend=backend)
        assert not kvops.attention(q, k, v, starts=kit.int32(0, 40), backend=backend).out[1].any()  # all padding
    with kit.refuses("starts must be a torch.Tensor, got list", kind=TypeError):
        kvops.attention(q, k, v, starts=[0, 0])
    with kit.refuses("key_bias must be a torch.Tensor, got list", kind=TypeError):
        kvops.attention(q, k, v, key_bias=[0.0])
    with kit.refuses("k must be a torch.Tensor, got NoneType", kind=TypeError):
        kvops.attention(q, None, v)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("t", [1, 40, 300])
def test_key_bias(t, causal):
    """Only `kvops` takes biases, in blocks of 256 rows; padding and sinks as without."""
    q, k, v = make(t=t, n=330, d=32, dv=32)
    bias, sink, starts = kit.randn(2, 2, 330), kit.randn(6), kit.int32(0, 40)
    result = kvops.attention(q, k, v, causal=causal, starts=starts, sink_logits=sink, key_bias=bias)
    assert result.backend == "kvops"
    assert_attention(result, q, k, v, causal=causal, starts=starts, sink=sink, bias=bias)
    with kit.refuses("backend='torch_flash' cannot run this call"):
        kvops.attention(q, k, v, causal=causal, key_bias=bias, backend="torch_flash")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("t", [1, 40, 300])
def test_int8(t, causal):
    """As with the numbers that the rows stand for, in blocks of 256 rows."""
    q, k, v = (x.bfloat16() for x in make(t=t, n=330, d=32, dv=32))
    (k8, k_scale), (v8, v_scale) = (kvops.quantize_rows(x) for x in (k, v))
    options = dict(causal=causal, starts=kit.int32(0, 40), sink_logits=kit.randn(6), softcap=2.0)
    result = kvops.attention(q, k8, v8, k_scale=k_scale, v_scale=v_scale, **options)
    rows = (kvops.dequantize_rows(*x, torch.float32) for x in ((k8, k_scale), (v8, v_scale)))
    want = kvops.attention(q.float(), *rows, **options, backend="kvops")
    assert result.backend == "kvops" and result.out.dtype == torch.bfloat16
    torch.testing.assert_close(result.out.float(), want.out, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(result.lse, want.lse, rtol=1e-5, atol=1e-5)
    good = dict(q=q, k=k8, v=v8, k_scale=k_scale, v_scale=v_scale, causal=False)
    for wrong, message in (
        (dict(k_scale=None), "k_scale must be a tensor if k is torch.int8, got None"),
        (dict(k=k, v=v, k_scale=None), "v_scale must be None if k is torch.bfloat16, got Tensor"),
        (dict(v_scale=v_scale[:1]), r"v_scale must be torch.float32 \[2, 2, 330\] on .*, one value per key, got .*"),
        (dict(q=q.float()), "k must have q's dtype and device, torch.float32"),
        (dict(v=v), "v must have k's dtype and q's device, torch.int8 .*, got torch.bfloat16"),
        (dict(backend="torch_flash"), "cannot run this call: it does not support k_scale and v_scale"),
    ):
        with kit.refuses(message):
            kvops.attention(**good | wrong)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("t", [1, 40, 300])
def test_fp8(t, dtype):
    """As with the bf16 numbers of the same values, and only by the library's own kernels."""
    q, k, v = (x.bfloat16() for x in make(t=t, n=330, d=32, dv=32))
    narrow = k.to(dtype), v.to(dtype)
    options = dict(starts=kit.int32(0, 40), sink_logits=kit.randn(6), softcap=2.0)
    result = kvops.attention(q, *narrow, **options)
    want = kvops.attention(q, *(x.bfloat16() for x in narrow), **options, backend="kvops")
    assert result.backend == "kvops" and kit.same(result[:2], want[:2])
    for wrong, message in (
        (dict(v=v), rf"v must have k's dtype and q's device, {dtype} .*, got torch.bfloat16"),
        (dict(q=q.float()), "k must have q's dtype and device, torch.float32 .* float8_e4m3fn or float8_e5m2, as v"),
        (dict(k_scale=kit.randn(2, 2, 330)), f"k_scale must be None if k is {dtype}, got Tensor"),
        (dict(backend="torch_flash"), f"cannot run this call: it does not support {dtype} keys"),
    ):
        with kit.refuses(message):
            kvops.attention(**dict(q=q, k=narrow[0], v=narrow[1]) | wrong)


@kit.only("cpu")
def test_a_backend_that_cannot_says_why():
    q, k, v = make(t=257, n=257)
    states = kvops.attention_backends("cpu")
    assert list(states) == list(flash_attention.BACKENDS) and states["torch_flash"] == states["kvops"] == "available"
    assert states["flash_attn_2"] == "it runs on CUDA devices, not on cpu"
    assert states["cudnn"] != "available"
    with kit.refuses(
        "backend='flash_attn_3' cannot run this call: it runs on CUDA devices", r"\['torch_flash', 'kvops'\]"
    ):
        kvops.attention(q, k, v, backend="flash_attn_3")
    with kit.refuses(
        "backend='torch_flash' cannot run this call: it does not support softcap", r"expected one of \['kvops'\]"
    ):
        kvops.attention(q, k, v, softcap=2.0, backend="torch_flash")
    with kit.refuses("V's head dim must be K's, 64, got 32"):
        kvops.attention(q, k, v[..., :32], backend="torch_flash")
    for wrong in (-1, 300):
        with kit.refuses(f"starts must lie in .0, 257., got {wrong}"):
            kvops.attention(q, k, v, starts=kit.int32(0, wrong))


# Stand-ins for the flash-attn packages: plain PyTorch with their published signatures.


def dense(q, k, v, causal, scale, softcap):
    out, lse = exact(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal, scale=scale, softcap=softcap)
    return out.nan_to_num().to(q.dtype).transpose(1, 2), lse.float()


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, scale, softcap):
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and cu_seqlens_q.shape == cu_seqlens_k.shape
    assert cu_seqlens_q[0] == cu_seqlens_k[0] == 0
    assert cu_seqlens_q[-1] == q.shape[0] and cu_seqlens_k[-1] == k.shape[0] == v.shape[0]
    assert 0 <= cu_seqlens_q.diff().min() <= cu_seqlens_q.diff().max() <= max_seqlen_q
    assert 0 <= cu_seqlens_k.diff().min() <= cu_seqlens_k.diff().max() <= max_seqlen_k
    out, lse = torch.full_like(q, torch.nan), torch.full((q.shape[1], q.shape[0]), torch.nan)
    for i in range(len(cu_seqlens_q) - 1):
        rows, keys = slice(*cu_seqlens_q[i : i + 2].tolist()), slice(*cu_seqlens_k[i : i + 2].tolist())
        part, part_lse = dense(q[None, rows], k[None, keys], v[None, keys], causal, scale, softcap)
        out[rows], lse[:, rows] = part[0], part_lse[0]
    return out, lse


def flash_attn_2():
    module = types.ModuleType("flash_attn")
    module.__version__ = "2.8.3"

    def flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        alibi_slopes=None, deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        assert return_attn_probs and dropout_p == 0 and window_size == (-1, -1) and alibi_slopes is None
        return *dense(q, k, v, causal, softmax_scale, softcap), None

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        assert return_attn_probs and dropout_p == 0 and window_size == (-1, -1) and block_table is None
        sizes = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return *varlen(q, k, v, *sizes, causal, softmax_scale, softcap), None

    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    return module


def flash_attn_3(early=False):
    module = types.ModuleType("flash_attn_interface")

    def flash_attn_func(
        q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0, return_attn_probs=False,
    ):  # fmt: skip
        assert return_attn_probs and qv is None and window_size == (-1, -1)
        return dense(q, k, v, causal, softmax_scale, softcap)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
        softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0, return_attn_probs=False,
    ):  # fmt: skip
        assert return_attn_probs and seqused_q is None and seqused_k is None and qv is None
        sizes = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return varlen(q, k, v, *sizes, causal, softmax_scale, softcap)

    def early_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False):
        return dense(q, k, v, causal, softmax_scale, softcap)

    def early_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False,
    ):  # fmt: skip
        sizes = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return varlen(q, k, v, *sizes, causal, softmax_scale, softcap)

    module.flash_attn_func = early_func if early else flash_attn_func
    module.flash_attn_varlen_func = early_varlen_func if early else flash_attn_varlen_func
    return module


@pytest.fixture(params=["flash_attn_2", "flash_attn_3", "early flash_attn_3"])
def package(request, monkeypatch):
    """Return a backend whose package is replaced by a stand-in and whose GPU is this CPU."""
    module = flash_attn_2() if request.param == "flash_attn_2" else flash_attn_3("early" in request.param)
    name = request.param.split()[-1]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(flash_attention.BACKENDS, name, flash_attention._Package(module.__name__, 0))
    monkeypatch.setattr(flash_attention, "_not_cuda", lambda *args: None)
    return name


@kit.only("cpu")
@pytest.mark.parametrize("options", [{}, dict(scale=0.2), dict(softcap=2.0), dict(causal=False)], ids=str)
@pytest.mark.parametrize("t, n", [(40, 40), (7, 40), (1, 40)])
def test_package_is_called_as_it_wants(package, options, t, n):
    q, k, v = make(t=t, n=n)
    result = kvops.attention(q, k, v, **options)
    assert result.backend == package  # the best available backend
    assert_attention(result, q, k, v, **options)


@kit.only("cpu")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("t, n", [(40, 40), (7, 40), (1, 40)])
def test_package_runs_padded_batches_in_one_call(package, causal, t, n):
    q, k, v = make(b=4, t=t, n=n)
    starts = kit.int32(0, 35, 40, 38)
    result = kvops.attention(q, k, v, causal=causal, starts=starts, backend=package)
    assert_attention(result, q, k, v, causal=causal, starts=starts)


@kit.only("cpu")
def test_packages_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(flash_attention, "_not_cuda", lambda *args: None)
    old = flash_attn_2()
    old.__version__ = "2.5.9"
    monkeypatch.setitem(sys.modules, "flash_attn", old)
    assert flash_attention._Package("flash_attn", 8).missing("cuda") == "flash_attn must be 2.7 or later, found 2.5.9"
    assert "cannot be imported: No module named" in flash_attention._Package("flash_attn_of_nobody", 8).missing("cuda")
