"""Shared tools of the operators' tests: devices, inputs in every layout, the error-ratio rule, error messages."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves

import kvops
from kvops.bench.measure import threads

# Tests in a file with `pytestmark = kit.every_device` run on the CPU and, if there is one, on a GPU. They create their
# tensors on the default device. In a run with simulated kernels (KVOPS_TEST_LIBRARY names a library with the CUDA
# kernels, registered for CPU tensors) they run on these instead. `@kit.only("cpu", ...)` restricts a test.
SIMULATED = os.environ.get("KVOPS_TEST_LIBRARY")
HAS_CUDA = torch.cuda.is_available() and kvops.build_info()["cuda"]["loaded"]
DEVICES = ["simulator"] if SIMULATED else ["cpu", "cuda"] if HAS_CUDA else ["cpu"]
every_device = pytest.mark.usefixtures("device")
only = pytest.mark.only

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Further dtypes of rows that operators only move.
BYTES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8)
HEAD_DIMS = (40, 64, 80, 96, 128, 192, 256)
LAYOUTS = ("bhnd", "bnhd", "slice")
REDUCES, GROUP_REDUCES = ("sum", "mean", "max"), ("sum", "mean", "max", "none")  # options of the window operators
#: "I/N": what runs tests again, in another build or with other packages, runs share I of N (0 to N - 1) of them.
SHARE = os.environ.get("KVOPS_SHARE", "")
#: Options of a pytest that runs tests again.
RERUN = ["--share", SHARE] if SHARE else []
GPUS = ("small", "a100", "h200", "b200")  # GPUs the simulator can model, chosen by CUDASIM_DEVICE


def in_share(name: str, share: str = SHARE) -> bool:
    """Return whether a test is in a share of all, by a hash of its name: every N-th would always be of one dtype."""
    if not share:
        return True
    chosen, shares = map(int, share.split("/"))
    assert 0 <= chosen < shares, f"a share must be I/N with I from 0 to N - 1, got {share}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % shares == chosen


def simulated_operators() -> list[str]:
    """Return the operators whose kernel for CPU tensors is a simulated CUDA kernel."""
    names = sorted(x for x in kvops.ops.__all__)
    dump = torch._C._dispatch_dump
    return [
        x for x in names if re.search(rf"^CPU: registered at cudasim/ops/{x}\.cpp", dump(f"kvops::{x}"), re.MULTILINE)
    ]


def size(real: int, simulated: int) -> int:
    """Choose a test's size: simulated kernels need a second for what a CPU does in milliseconds."""
    return simulated if SIMULATED else real


def examples(count: int, **options) -> settings:
    return settings(max_examples=size(count, max(4, count // 6)), deadline=None, **options)


def on_device(x: Tensor) -> Tensor:
    return x.to(torch.get_default_device())


def randn(*shape: int, seed=0) -> Tensor:
    """Return normal random numbers, the same on every device."""
    return on_device(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu"))


def query_statistics(layers: int, heads: int, d: int) -> kvops.QueryStatistics:
    """Return the statistics of random queries, each head's about a mean of its own."""
    with torch.device("cpu"):
        queries = [randn(1, heads, 50, d, seed=i) + 2 * randn(1, heads, 1, d, seed=i) for i in range(layers)]
        return kvops.QueryStatistics.of(queries, kvops.Rope.of(d))


def kv(b: int, heads: int, n: int, d: int, dtype=torch.float32, layout="bhnd", *, dv=None, seed=0):
    """Return random K [b, heads, n, d] and V [b, heads, n, dv] in one of LAYOUTS, with a mean and scale per channel."""

    generator = torch.Generator().manual_seed(seed)

    def one(width: int) -> Tensor:
        with torch.device("cpu"):
            scale = torch.rand(width, generator=generator) * 2 + 0.1
            values = torch.randn(b, heads, n, width, generator=generator) * scale
            values += torch.randn(width, generator=generator)
            if dtype in BYTES:
                values = torch.randint(256, values.shape, dtype=torch.uint8, generator=generator).view(dtype)
        return laid_out(on_device(values.to(dtype)), layout)

    return one(d), one(dv or d)


def window(b: int, heads: int, group: int, w: int, n: int, d: int, dtype=torch.float32, *, seed=0):
    """Return queries [b, heads * group, w, d], K [b, heads, n, d], and the visible limits of the last w of n rows."""
    k, _ = kv(b, heads, n, d, dtype, seed=seed)
    return randn(b, heads * group, w, d, seed=seed + 1).to(dtype), k, causal(w, n)


SCORES = ("normal", "ties", "skewed", "special", "equal", "huge", "tiny")


def any_window(data, w: int, n: int, query_heads: int) -> tuple[Tensor, dict]:
    """Draw how many of n keys each query of 2 batch rows sees, int32 [2, w], and options of a window operator."""
    limits = data.draw(st.lists(st.integers(0, n), min_size=2 * w, max_size=2 * w))
    options = dict(
        reduce=data.draw(st.sampled_from(REDUCES)),
        group_reduce=data.draw(st.sampled_from(GROUP_REDUCES)),
        starts=data.draw(st.none() | st.builds(int32, st.integers(0, n), st.integers(0, n))),
        softcap=data.draw(st.sampled_from([0.0, 4.0])),
        sink_logits=data.draw(st.none() | st.just(randn(query_heads))),
    )
    return int32(*limits).view(2, w), options


def scores(kind: str, *shape: int, seed=0) -> Tensor:
    """Return scores of one of these kinds."""
    x = randn(*shape, seed=seed)
    if kind == "ties":
        return (x * 2).round() / 2
    if kind == "skewed":  # any equal-width histogram puts most of them into one bin
        return x.exp().pow(8)
    if kind == "special":
        choice = (randn(*shape, seed=seed + 1).abs() * 4).long()  # 0 to 5 or more
        for value, at in ((math.nan, 0), (math.inf, 1), (-math.inf, 2), (0.0, 3), (-0.0, 4)):
            x = x.masked_fill(choice == at, value)
        return x
    if kind == "equal":
        return torch.full(shape, -0.25)
    if kind == "huge":
        return x * 3e38
    if kind == "tiny":
        return x * 1e-42
    return x


def clusters(b: int, heads: int, n: int, count: int, *, seed=0) -> Tensor:
    """Return each token's cluster, int32 [b, heads, n] in [-1, count): sizes differ widely, some clusters are empty."""
    share = randn(b, heads, n, seed=seed + 100).abs().exp2() - 1  # half of the tokens are below 0.6
    return (share * count / 2).int().clamp(max=count) - 1


def causal(w: int, n: int) -> Tensor:
    return (torch.arange(w, dtype=torch.int32) + (n - w + 1)).clamp(min=0)


def softmax_condition(q: Tensor, k: Tensor, scale: float | None = None, k_scale: Tensor | None = None, **_) -> float:
    """Return assert_close's condition: exp(logit) has the relative error that the logit has as absolute error."""
    if k_scale is not None:
        k = k.double() * k_scale.double().unsqueeze(-1)
    size = q.abs().double().unflatten(1, (k.shape[1], -1)) @ k.double().nan_to_num(0, 0, 0).abs().unsqueeze(2).mT
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return max(1.0, size.nan_to_num(0, 0, 0).max().item() * scale) if size.numel() else 1.0


def dot_condition(sums: Tensor, sums_of_sizes: Tensor) -> float:
    """Return assert_close's condition for sums of products: the largest sum of the terms' sizes over the largest sum.

    With it the bound is 4 eps of the former. Where terms cancel, a single rounding of one exceeds any relative bound on
    the sum. sums_of_sizes: the same sums with the absolute values of their terms.
    """
    largest, sizes = (x.nan_to_num(0, 0, 0).abs().max().item() if x.numel() else 0.0 for x in (sums, sums_of_sizes))
    return max(1.0, sizes / largest) if largest else 1.0


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Return the same values contiguous, in token-major layout, or as a slice of a tensor wider in every dim."""
    if layout == "bhnd":
        return x.contiguous()
    if layout == "bnhd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    b, heads, n, d = x.shape
    pad = 16 // x.element_size()
    wide = torch.full((b + 1, heads + 1, n + 3, d + 2 * pad), 255, dtype=torch.uint8)
    wide = wide.repeat_interleave(x.element_size(), 3).view(x.dtype)  # NaN
    inner = wide[1:, :heads, 2 : 2 + n, pad : pad + d]
    inner.copy_(x)
    return inner


def unaligned(x: Tensor, offset: int, gap: int = 0) -> Tensor:
    """Return the same values, `offset` elements after an aligned address, with `gap` elements between rows."""
    *outer, n, d = x.shape
    between = float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).min
    wide = torch.full((offset + x.numel() // d * (d + gap),), between, dtype=x.dtype)
    view = wide[offset:].view(*outer, n, d + gap)[..., :d]
    view.copy_(x)
    return view


def far_apart(x: Tensor) -> Tensor:
    """Return the same values with the last tokens beyond 2^31 elements; memory between tokens is never touched."""
    b, heads, n, d = x.shape
    step = (1 << 31) // (n - 2)
    wide = torch.empty((n - 1) * step + b * heads * d, dtype=x.dtype)
    view = wide.as_strided(x.shape, (heads * d, d, step, 1))
    view.copy_(x)
    return view


def assert_close(actual: Tensor, eager: Tensor, exact: Tensor, condition: float = 1.0) -> None:
    """Apply the error-ratio rule: at most twice the plain fp32 formula's error against fp64, + 4 eps of the largest.

    condition: by what factor the result's relative error exceeds its argument's. Where it is large, the plain formula
    may be exact by luck.
    """
    assert actual.dtype == torch.float32 and eager.dtype == torch.float32 and exact.dtype == torch.float64
    assert torch.equal(actual.isnan(), exact.isnan()), "NaN in other places than the reference"
    if exact.numel() == 0 or exact.isnan().all():
        return
    error, allowed = ((x.double() - exact).nan_to_num(nan=0.0).abs().max().item() for x in (actual, eager))
    bound = 2 * allowed + 4 * torch.finfo(torch.float32).eps * condition * exact.nan_to_num(nan=0.0).abs().max().item()
    assert error <= bound, f"error {error:.3e} against fp64, at most {bound:.3e} allowed (plain formula {allowed:.3e})"


def assert_rounded_once(actual: Tensor, exact: Tensor, size: Tensor) -> None:
    """Allow fp32 arithmetic, then one rounding to actual's dtype: half a unit in the last place, plus 4 eps of fp32.

    exact: the fp64 result. size: the magnitude of the terms, which may be much larger than their sum.
    """
    info = torch.finfo(actual.dtype)
    exponent = torch.frexp(exact.abs().clamp(min=info.tiny)).exponent - 1
    unit = torch.ldexp(torch.full_like(exact, info.eps), exponent)
    excess = (actual.double() - exact).abs() - (unit / 2 + 4 * torch.finfo(torch.float32).eps * size.double())
    assert (excess <= 0).all(), f"{(~(excess <= 0)).sum()} values are off, at most by {excess.nan_to_num(0).max():.3e}"


def bits(x: Tensor) -> Tensor:
    """View x as integers, so that NaN equals itself."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def same(actual, expected) -> bool:
    """Return whether all tensors are equal bit for bit, NaN payloads included."""
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(actual, expected, strict=True))


def assert_in_place(call: Callable[[], tuple[Tensor, Tensor]], k: Tensor, v: Tensor, expected) -> None:
    """Check that the call writes `expected` to the front of k and v, tells autograd, and leaves the rest unchanged."""
    m = expected[0].shape[2]
    behind = k[:, :, m:].clone(), v[:, :, m:].clone()
    versions = k._version, v._version
    result = call()
    assert same(result, expected) and same((k[:, :, m:], v[:, :, m:]), behind)
    assert all(
        x._base is not None and x.untyped_storage()._cdata == y.untyped_storage()._cdata for x, y in zip(result, (k, v))
    )
    assert k._version > versions[0] and v._version > versions[1]


def assert_holds_little(cache, floats: int) -> None:
    """Check that a cache of 2 rows and 2 heads stores its slots, of so many fp32 values, within its allowed size."""
    n = len(cache)
    assert 16 * floats * n <= cache.nbytes <= 16 * floats * (n + max(32, n // 4))


def assert_repeatable(call: Callable[[], tuple[Tensor, ...]]) -> None:
    """Check that results are new tensors and bit-identical, whatever the memory held and in any order of threads."""
    expected = call()
    for _ in repeats():
        for x in expected:  # same sizes as the results, so the allocator reuses this memory next
            [torch.empty_like(x).view(torch.uint8).fill_(0xA5) for _ in range(2)]
        assert same(call(), expected)


def repeats() -> Iterator[int]:
    """Repeat 20 times; with simulated kernels once for each of four thread orders."""
    before = os.environ.get("CUDASIM_SEED", "0")
    for i in range(size(20, 4)):
        os.environ["CUDASIM_SEED"] = str(i)
        yield i
    os.environ["CUDASIM_SEED"] = before


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Padded(NamedTuple):
    """Rows of different lengths in one tensor.

    x: [b, heads, n, d], NaN outside of the rows. spans: starts and lengths as operators take them, int32 [b].
    alone: the rows, [1, heads, length, d] each.
    """

    x: Tensor
    spans: dict[str, Tensor]
    alone: list[Tensor]

    def assert_as_alone(self, actual: Tensor, alone: Iterable[Tensor], outside: float = math.nan) -> None:
        """Check a result by token, [b, heads, n]: that of each row alone, and `outside` outside of the rows."""
        for found, row, start in zip(actual, alone, self.spans["starts"].tolist(), strict=True):
            end = start + row.shape[2]
            padding = torch.cat((found[:, :start], found[:, end:]), 1)
            assert torch.equal(found[:, start:end], row[0])
            assert (padding.isnan() if math.isnan(outside) else padding == outside).all()


def padded(data, x: Tensor, *more: Tensor) -> list[Padded]:
    """Draw the same starts and lengths for the rows of tensors [b, heads, n, any]."""
    n = x.shape[2]
    starts = [data.draw(st.integers(0, n)) for _ in x]
    lengths = [data.draw(st.integers(0, n - s)) for s in starts]
    spans = dict(starts=int32(*starts), lengths=int32(*lengths))
    found = []
    for y in (x, *more):
        inside = torch.full_like(y, math.nan)
        alone = [y[row : row + 1, :, s : s + c] for row, (s, c) in enumerate(zip(starts, lengths))]
        for row, (s, c) in enumerate(zip(starts, lengths)):
            inside[row, :, s : s + c] = alone[row][0]
        found.append(Padded(inside, spans, alone))
    return found


def assert_spans_are_clamped(call: Callable[..., Any]) -> None:
    """Check that out-of-range starts and lengths, which are not looked at on a GPU, count as if clamped.

    call(starts=, lengths=) is about 6 rows of 50 slots.
    """
    for bad, good in spans_beyond_50():
        found, expected = (tree_leaves(call(starts=s, lengths=c)) for s, c in (bad, good))
        assert same(found, expected)


def spans_beyond_50() -> list[tuple]:
    """Return out-of-range (starts, lengths) of 6 rows of 50 slots, and the values a GPU clamps them to."""
    starts, lengths = int32(-3, 60, 10, 10, 2**31 - 1, -(2**31)), int32(30, 5, 2**31 - 1, -4, 20, -(2**31))
    good_starts = int32(0, 50, 10, 10, 50, 0)
    return [
        ((starts, lengths), (good_starts, int32(30, 0, 40, 0, 0, 0))),
        ((starts, None), (good_starts, None)),
        ((None, lengths), (None, int32(30, 5, 50, 0, 20, 0))),
    ]


def assert_threads_change_nothing(call: Callable[[], Any]) -> None:
    with threads(1):
        one = tree_leaves(call())
    for count in (2, 3, 5):
        with threads(count):
            assert same(tree_leaves(call()), one)


def refuses(*parts: str, kind=ValueError):
    """Check that the block raises `kind` with a message that contains all parts."""
    pattern = "".join(f"(?=.*{part})" for part in parts)
    return pytest.raises(kind, match=f"(?s){pattern}")
