"""libkvops_c.so: kernels for C programs, without torch. They compute what the operators do, on the same memory."""

import ctypes
import importlib.util
import math
import os
import shlex
import shutil
import subprocess
import sys
import threading
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

import pytest
import torch

import kit
from kvops import ops

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)  # in the enum's order
BODY = ctypes.CFUNCTYPE(None, c_int64, c_int64, c_void_p)
RUN = ctypes.CFUNCTYPE(c_int32, c_int64, c_int64, c_int64, BODY, c_void_p)

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not (ROOT / "csrc/c/kvops_c.h").exists() or not importlib.util.find_spec("cmake"),
        reason="no source or no cmake",
    ),
]


class Rows(Structure):
    _fields_ = [("data", c_void_p), *((x, c_int64) for x in ("batch", "head", "token", "dim")), ("dtype", c_int)]


class Shape(Structure):
    _fields_ = [
        ("batch", c_int64),
        ("heads", c_int64),
        ("tokens", c_int64),
        ("starts", c_void_p),
        ("lengths", c_void_p),
    ]


class Threads(Structure):
    _fields_ = [("count", c_int64), ("run", RUN)]


def run(*command, **kwargs):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built() -> Path:
    """The library, built from nothing, beside the other builds: there a compiler cache knows its kernels."""
    folder = ROOT / "build" / f"c-tests{os.environ.get('PYTEST_XDIST_WORKER', '')}"
    shutil.rmtree(folder, ignore_errors=True)
    ninja = shutil.which("ninja", path=Path(sys.executable).parent) or shutil.which("ninja")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    options = ["-DKVOPS_C=1", "-DKVOPS_LEVELS=native", "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON"]
    run(sys.executable, "-m", "cmake", "-S", ROOT, "-B", folder, *generator, *options)
    run(sys.executable, "-m", "cmake", "--build", folder)
    return folder / "libkvops_c.so"


@pytest.fixture(scope="module")
def library(built):
    found = ctypes.CDLL(str(built))
    found.kvops_error.restype = c_char_p
    found.kvops_lag_segments.restype = found.kvops_lag_kept.restype = c_int64
    found.kvops_lag_segments.argtypes = [c_int64] * 3
    found.kvops_lag_kept.argtypes = [POINTER(Shape)] + [c_int64] * 3
    return found


class Queries(Structure):
    _fields_ = [
        ("data", c_void_p),
        *((x, c_int64) for x in ("batch", "head", "row", "heads", "rows")),
        ("visible", c_void_p),
        ("sink_logits", c_void_p),
        ("scale", c_float),
        ("softcap", c_float),
    ]


def queries(q: torch.Tensor, visible=None, sink_logits=None, scale=0.0, softcap=0.0) -> Queries:
    strides = (s * q.element_size() for s in q.stride()[:3])
    pointers = (None if x is None else x.data_ptr() for x in (visible, sink_logits))
    return Queries(q.data_ptr(), *strides, q.shape[1], q.shape[2], *pointers, scale, softcap)


def rows(x: torch.Tensor) -> Rows:
    return Rows(x.data_ptr(), *(s * x.element_size() for s in x.stride()[:3]), x.shape[3], DTYPES.index(x.dtype))


def shape(x: torch.Tensor, starts=None, lengths=None) -> Shape:
    return Shape(*x.shape[:3], *(None if y is None else y.data_ptr() for y in (starts, lengths)))


def pointer(x: torch.Tensor) -> c_void_p:
    return c_void_p(x.data_ptr())


def succeeds(library, status: int) -> None:
    assert status == 0, library.kvops_error().decode()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padded", [False, True])
def test_the_functions_compute_what_the_operators_do(library, dtype, padded):
    b, heads, n, d, dv, lag, prefix, keep = 2, 3, 400, 64, 80, 32, 5, 9
    k, v = kit.kv(b, heads, n, d, dtype)[0], kit.kv(b, heads, n, dv, dtype, seed=1)[0]
    k = k.transpose(1, 2).contiguous().transpose(1, 2)  # [b, n, heads, d] in memory
    starts, lengths = (kit.int32(3, 40), kit.int32(390, 200)) if padded else (None, None)
    valid = dict(starts=starts, lengths=lengths)
    s, K, V = shape(k, starts, lengths), rows(k), rows(v)

    scores, anchor = torch.full((b, heads, n), 7.0), torch.full((b, heads, d), 7.0)
    succeeds(library, library.kvops_anchor_cosine(byref(s), byref(K), pointer(scores), pointer(anchor), None))
    for found, expected in zip((scores, anchor), torch.ops.kvops.anchor_cosine(k, **valid)):
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))

    indices = torch.full((b, heads, 100), 7)
    succeeds(
        library,
        library.kvops_select_topk(
            byref(s), pointer(scores), c_int64(100), c_int64(4), c_int64(8), pointer(indices), None
        ),
    )
    assert torch.equal(indices, ops.select_topk(scores, k=100, sinks=4, window=8, **valid))

    segments = library.kvops_lag_segments(n, prefix, lag)
    scores = torch.full((b, heads, segments, lag), 7.0)
    succeeds(
        library,
        library.kvops_lag_score(byref(s), byref(K), byref(V), c_int64(prefix), c_int64(lag), pointer(scores), None),
    )
    expected = ops.lag_score(k, v, lag=lag, prefix=prefix, **valid)
    assert torch.equal(scores.view(torch.int32), expected.view(torch.int32))

    by_lag = torch.full((b, heads, library.kvops_lag_kept(byref(s), prefix, lag, keep)), 7)
    numbers = c_int64(prefix), c_int64(lag), c_int64(keep)
    succeeds(library, library.kvops_lag_select(byref(s), pointer(scores), *numbers, pointer(by_lag), None))
    assert torch.equal(by_lag, ops.select_topk(scores, k=keep, sinks=prefix, seq_len=n, **valid))

    for kept in (indices, by_lag):
        m = kept.shape[2]
        k_out, v_out = torch.full((b, heads, m, d), 1.0).to(dtype), torch.full((b, heads, m, dv), 1.0).to(dtype)
        targets = [rows(x) for x in (k_out, v_out)]
        succeeds(
            library,
            library.kvops_gather_kv(
                byref(s), byref(K), byref(V), pointer(kept), c_int64(m), *map(byref, targets), None
            ),
        )
        for out, e in zip((k_out, v_out), ops.gather_kv(k, v, kept)):
            assert torch.equal(out.view(torch.uint8), e.view(torch.uint8))

    moved = [x.clone() for x in (k, v)]
    expected = [x.clone() for x in (k, v)]
    succeeds(
        library,
        library.kvops_compact_kv(
            byref(s), byref(rows(moved[0])), byref(rows(moved[1])), pointer(indices), c_int64(100), None
        ),
    )
    ops.compact_kv_(*expected, indices)
    for out, e in zip(moved, expected):
        assert torch.equal(out.view(torch.uint8), e.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("w", [1, 20])
@pytest.mark.parametrize("how", ["plain", "padded", "options"])
def test_windows(library, dtype, w, how):
    """Attention and scores of a window, by what the C functions default to, and by what the caller chooses."""
    b, heads, group, n, d, dv = 2, 2, 3, 200, 64, 80
    k, v = (x.to(dtype) for x in kit.kv(b, heads, n, d, dv=dv))  # every pattern of 8 bits would be NaN in every sum
    q = kit.randn(b, w, heads * group, d, seed=2).to(dtype if dtype.itemsize > 1 else torch.bfloat16).transpose(1, 2)
    starts, lengths = (kit.int32(3, 40), kit.int32(190, 5)) if how == "padded" else (None, None)
    ends = kit.int32(193, 45) if how == "padded" else kit.int32(n, n)
    visible = (ends[:, None] - torch.arange(w - 1, -1, -1, dtype=torch.int32)).clamp(min=0)
    own, options, over = {}, {}, (0, 1)
    if how == "options":
        visible = torch.randint(0, n, (b, w), dtype=torch.int32, generator=torch.Generator().manual_seed(3))
        options = dict(sink_logits=kit.randn(heads * group), scale=0.5, softcap=3.0)
        own, over = dict(visible=visible, **options), (2, 3)
    reduced = dict(zip(("reduce", "group_reduce"), (("sum", "mean", "max", "none")[x] for x in over)))
    expected = ops.window_attention(q, k, v, visible, starts=starts, scores=True, **options, **reduced)
    s, Q, K, V = shape(k, starts, lengths), queries(q, **own), rows(k), rows(v)
    enums = [c_int(x) for x in over]

    out, lse, scores = (torch.full_like(x, 7.0) for x in expected)
    outputs = pointer(out), pointer(lse)
    succeeds(
        library,
        library.kvops_window_attention(*map(byref, (s, Q, K, V)), *enums, *outputs, pointer(scores), None),
    )
    assert kit.same((out, lse, scores), expected)
    succeeds(library, library.kvops_window_scores(*map(byref, (s, Q, K)), *enums, pointer(scores), None))
    assert kit.same([scores], [ops.window_scores(q, k, visible, starts=starts, **options, **reduced)])
    out.fill_(7)
    succeeds(library, library.kvops_window_attention(*map(byref, (s, Q, K, V)), *enums, *outputs, None, None))
    assert kit.same([out], expected[:1])


@pytest.mark.parametrize("over_heads", range(4))
@pytest.mark.parametrize("over_rows", range(3))
def test_reductions_of_windows(library, over_rows, over_heads):
    q, k, visible = kit.window(1, 2, 2, 5, 70, 32)
    names = ("sum", "mean", "max", "none")
    expected = ops.window_scores(q, k, visible, reduce=names[over_rows], group_reduce=names[over_heads])
    scores, enums = torch.full_like(expected, 7.0), (c_int(over_rows), c_int(over_heads))
    arguments = map(byref, (shape(k), queries(q), rows(k)))
    succeeds(library, library.kvops_window_scores(*arguments, *enums, pointer(scores), None))
    assert kit.same([scores], [expected])


def calls(library, k, q, threads):
    """The results of a scorer, of window scores and of attention; or None if one fails."""
    s, K, Q, enums = shape(k), rows(k), queries(q), (c_int(0), c_int(1))
    scores, attention = torch.full(k.shape[:3], 7.0), torch.full(k.shape[:3], 7.0)
    anchor, out, lse = (
        torch.full((*k.shape[:2], k.shape[3]), 7.0),
        torch.full_like(q, 7.0),
        torch.full(q.shape[:3], 7.0),
    )
    statuses = (
        library.kvops_anchor_cosine(byref(s), byref(K), pointer(scores), pointer(anchor), threads),
        library.kvops_window_scores(byref(s), byref(Q), byref(K), *enums, pointer(attention), threads),
        library.kvops_window_attention(
            *map(byref, (s, Q, K, K)), *enums, pointer(out), pointer(lse), pointer(attention), threads
        ),
    )
    return None if any(statuses) else (scores, anchor, attention, out, lse)


def test_the_callers_threads(library):
    """The work is divided among a pool of the caller's. The results are those of one thread."""
    q, k, _ = kit.window(2, 4, 2, 3, 4000, 64)
    parts = []

    @RUN
    def parallel(begin, end, grain, body, context):
        each = [threading.Thread(target=body, args=(i, i + 1, context)) for i in range(begin, end)]
        parts.append(len(each))
        for x in each:
            x.start()
        for x in each:
            x.join()
        return 0

    @RUN
    def broken(begin, end, grain, body, context):
        return -5

    alone, together = calls(library, k, q, None), calls(library, k, q, byref(Threads(4, parallel)))
    assert kit.same(alone, together) and max(parts) > 1
    assert calls(library, k, q, byref(Threads(4, broken))) is None
    assert library.kvops_error().endswith(b": threads.run must return 0, got -5")
    assert kit.same(alone, calls(library, k, q, None))


@pytest.mark.parametrize("b, heads, n", [(0, 2, 40), (1, 0, 40), (1, 2, 0)])
def test_nothing_is_needed_for_nothing(library, b, heads, n):
    """Without requests, heads or tokens, addresses may be null. A row that sees nothing gets zeros."""
    s, x = Shape(b, heads, n, None, None), Rows(None, 0, 0, 0, 64, 0)
    q = kit.randn(max(b, 1), 2 * heads, 3, 64)
    Q, enums = queries(q), (c_int(0), c_int(1))
    Q.data = q.data_ptr() if b * heads else None
    out, lse = torch.full(q.shape, 7.0), torch.full(q.shape[:3], 7.0)
    succeeds(library, library.kvops_window_scores(*map(byref, (s, Q, x)), *enums, None, None))
    succeeds(
        library,
        library.kvops_window_attention(*map(byref, (s, Q, x, x)), *enums, pointer(out), pointer(lse), None, None),
    )
    filled = b * heads > 0
    assert (out == (0 if filled else 7)).all() and (lse == (-math.inf if filled else 7)).all()


def test_what_is_refused(library):
    """Nothing is written, and the message names the argument, what was expected and what came."""
    k, v = kit.kv(1, 2, 40, 64, torch.float32)
    scores, anchor, indices = torch.full((1, 2, 40), 7.0), torch.full((1, 2, 64), 7.0), torch.full((1, 2, 8), 7)
    wrong_lengths, descending = kit.int32(41), torch.tensor([[[3, 2], [0, 1]]])
    S, K, V = shape(k), rows(k), rows(v)

    def with_(x, **values):
        made = type(x).from_buffer_copy(x)
        for name, value in values.items():
            setattr(made, name, value)
        return made

    to_scores, to_anchor = pointer(scores), pointer(anchor)

    def anchor_cosine(s=S, x=K, scores=to_scores, anchor=to_anchor, threads=None):
        return library.kvops_anchor_cosine(
            byref(s) if s else None, byref(x) if x else None, scores, anchor, byref(threads) if threads else None
        )

    def select(keep=8, sinks=0, window=0):
        numbers = c_int64(keep), c_int64(sinks), c_int64(window)
        return library.kvops_select_topk(byref(S), pointer(scores), *numbers, pointer(indices), None)

    def compact(x=V, kept=descending, m=2):
        return library.kvops_compact_kv(byref(S), byref(K), byref(x), pointer(kept), c_int64(m), None)

    query = kit.randn(1, 4, 2, 64)
    Q, beyond, lse, out = queries(query), kit.int32(40, 41), torch.full((1, 4, 2), 7.0), torch.full_like(query, 7.0)
    to_out, to_lse = pointer(out), pointer(lse)

    def window(q=Q, over_rows=0, over_heads=1, scores=to_scores):
        enums = c_int(over_rows), c_int(over_heads)
        return library.kvops_window_scores(byref(S), byref(q) if q else None, byref(K), *enums, scores, None)

    def attention(x=V, out=to_out, lse=to_lse):
        enums = c_int(0), c_int(1)
        return library.kvops_window_attention(*map(byref, (S, Q, K, x)), *enums, out, lse, None, None)

    before = k.clone()
    for call, message in {
        lambda: window(q=None): "kvops_window_scores: q must not be null",
        lambda: window(q=with_(Q, data=None)): "q's data must not be null",
        lambda: window(q=with_(Q, rows=0)): "q must have 1 to 256 rows, got 0",
        lambda: window(q=with_(Q, rows=257)): "q must have 1 to 256 rows, got 257",
        lambda: window(q=with_(Q, heads=3)): "the heads of q must be a positive multiple of the KV heads 2, got 3",
        lambda: window(q=with_(Q, heads=0)): "the heads of q must be a positive multiple of the KV heads 2, got 0",
        lambda: window(q=with_(Q, data=query.data_ptr() + 1)): "q must begin at a multiple of 4 bytes",
        lambda: window(q=with_(Q, row=255)): "q must begin at a multiple of 4 bytes and have such strides",
        lambda: window(q=with_(Q, scale=-1.0)): "scale must be 0 or positive and a normal number, got -1",
        lambda: window(q=with_(Q, scale=math.inf)): "scale must be 0 or positive and a normal number, got inf",
        lambda: window(q=with_(Q, softcap=math.nan)): "softcap must be 0 or positive and a normal number, got nan",
        lambda: window(q=with_(Q, softcap=1e38)): "scale / softcap must be a normal number, got 0.125 / 1e+38",
        lambda: window(
            q=with_(Q, visible=beyond.data_ptr())
        ): "visible must lie in [0, 40], where the valid slots of request 0 end, got 41",
        lambda: window(over_rows=3): "over_rows must be in [0, 2], got 3",
        lambda: window(over_heads=-1): "over_heads must be in [0, 3], got -1",
        lambda: window(scores=None): "scores must not be null",
        lambda: attention(out=None): "kvops_window_attention: out must not be null",
        lambda: attention(lse=None): "lse must not be null",
        lambda: attention(x=with_(V, dtype=1)): "v must have k's dtype 0, got 1",
        lambda: anchor_cosine(s=None): "kvops_anchor_cosine: shape must not be null",
        lambda: anchor_cosine(x=None): "kvops_anchor_cosine: k must not be null",
        lambda: anchor_cosine(scores=None): "scores must not be null",
        lambda: anchor_cosine(x=with_(K, data=None)): "k must not be null",
        lambda: anchor_cosine(x=with_(K, dtype=9)): "k must have a kvops_dtype, got 9",
        lambda: anchor_cosine(x=with_(K, dim=63)): "k must have a dim that is a multiple of 4 (16 bytes), got 63",
        lambda: anchor_cosine(x=with_(K, dim=0)): "k must have a dim",
        lambda: anchor_cosine(x=with_(K, token=255)): "k must begin at a multiple of 4 bytes and have such strides",
        lambda: anchor_cosine(
            s=with_(S, tokens=-1)
        ): "shape must have batch * heads and tokens in [0, 2^31), got 1, 2 and -1",
        lambda: anchor_cosine(s=with_(S, batch=2**20, heads=2**20)): "shape must have batch * heads and tokens",
        lambda: anchor_cosine(s=with_(S, lengths=wrong_lengths.data_ptr())): "got start 0, length 41",
        lambda: anchor_cosine(threads=Threads(1 << 17, RUN())): "threads must have a count in [1, 65536]",
        lambda: anchor_cosine(
            threads=Threads(0, RUN())
        ): "threads must have a count in [1, 65536] and a function, got count 0",
        lambda: select(keep=-1): "kvops_select_topk: keep, sinks and window must be >= 0, got -1",
        lambda: select(keep=8, sinks=5, window=4): "sinks + window must be <= keep, expected at most 8, got 5 + 4",
        lambda: compact(): "indices must be strictly ascending, and -1 only at the end, got 2 after 3",
        lambda: compact(kept=descending + 38): "indices must lie in [-1, 40), got 41",
        lambda: compact(x=with_(V, dtype=1)): "v must have k's dtype 0, got 1",
        lambda: compact(m=-1): "kept must be in [0, 2^31), got -1",
        lambda: compact(m=41): "kept must be at most the 40 tokens, got 41",
    }.items():
        assert call() == -1
        assert message in library.kvops_error().decode()
    assert all((x == 7).all() for x in (scores, anchor, indices, out, lse)) and torch.equal(k, before)
    other = []
    thread = threading.Thread(target=lambda: other.append(library.kvops_error()))
    thread.start()
    thread.join()
    assert other == [b""]


def test_the_library_needs_no_torch_and_exports_its_header(built):
    needed = run("readelf", "-d", built)
    assert "libtorch" not in needed and "libc10" not in needed
    symbols = run("nm", "-D", "--defined-only", built).split("\n")
    exported = {x.split()[-1] for x in symbols if x}
    header = (ROOT / "csrc/c/kvops_c.h").read_text()
    assert exported == {x for x in header.replace("(", " ").replace("*", " ").split() if x in exported}
    assert {"kvops_error", "kvops_compact_kv"} < exported and len(exported) == header.count("KVOPS_API ") - 1


def test_the_example_is_c99_and_evicts(built, tmp_path):
    program = tmp_path / "evict"
    compiler = [*shlex.split(os.environ.get("CC") or "cc"), "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror"]
    include = ["-I", ROOT / "csrc/c"]
    link = [f"-L{built.parent}", f"-Wl,-rpath,{built.parent}", "-lkvops_c"]
    run(*compiler, *include, ROOT / "examples/c/evict.c", "-o", program, *link)
    evicted, decoded = run(program).splitlines()
    assert evicted.startswith("1024 of 4096 tokens; head 0 keeps 0 1 2 3 ") and decoded.startswith("decoded: lse ")
