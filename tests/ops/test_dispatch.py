"""What lies between a call and a kernel: memory, autograd, errors by name, torch's own switches."""

import ctypes
import gc
import itertools
import os
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from torch.autograd import forward_ad

import calls
import kit
import kvops
from kvops import ops

SMALL = dict(b=1, heads=1, n=80, d=8, dv=8)
OVERLOADS = [
    getattr(getattr(torch.ops.kvops, op), x) for op in ops.__all__ for x in getattr(torch.ops.kvops, op).overloads()
]


def inputs() -> calls.Inputs:
    return calls.inputs(0, **SMALL)


# Memory

# Calls of each; docs/building.md has the command for 200,000.
SOAK = int(os.environ.get("KVOPS_SOAK", 500))


class Heap:
    """Bytes that malloc and Python have handed out to this thread and that were not given back."""

    def __init__(self):
        self.libc = ctypes.CDLL(None)
        self.info = getattr(self.libc, "mallinfo2", None)
        if self.info is None:
            pytest.skip("the C library has no mallinfo2")

        class Mallinfo(ctypes.Structure):
            _fields_ = [
                (x, ctypes.c_size_t) for x in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks".split()
            ]
            _fields_ += [(x, ctypes.c_size_t) for x in ("fordblks", "keepcost")]

        self.info.restype = Mallinfo
        self.libc.malloc.restype = ctypes.c_void_p

    def held(self) -> tuple[int, int]:
        gc.collect()
        found = self.info()
        return found.uordblks + found.hblkhd, sys.getallocatedblocks()

    def growth(self, call) -> float:
        """Bytes that a call leaves behind, the mean of SOAK calls. Where there are any it is measured again, for some
        seconds at most: a leak is there each time, what the process's other threads allocate meanwhile is not."""
        for pause in range(10):
            time.sleep(pause / 10)
            if (found := self._growth(call)) < 4:
                break
        return found

    def _growth(self, call) -> float:
        for _ in range(50):
            call()
        bytes_before, blocks_before = self.held()
        for _ in range(SOAK):
            call()
        bytes_after, blocks_after = self.held()
        return max(bytes_after - bytes_before, 16 * (blocks_after - blocks_before)) / SOAK


@pytest.mark.full
def test_the_heap_is_measured():
    heap, kept, tries = Heap(), [], range(5)  # what other threads free meanwhile hides a leak now and then
    assert any(heap.growth(lambda: heap.libc.malloc(38)) >= 38 for _ in tries)
    assert any(heap.growth(lambda: kept.append([object()])) >= 16 for _ in tries)
    assert heap.growth(lambda: None) < 4


@pytest.mark.parametrize("name", calls.OPERATORS_CALLS)
def test_no_call_leaves_memory_behind(name):
    """A leak of one small string per call is 32 bytes; SOAK calls of malloc's own caches are some hundred in all."""
    heap, x, call = Heap(), inputs(), calls.CALLS[name]
    with torch.no_grad(), kit.threads(1):
        assert heap.growth(lambda: call(x)) < 8


def test_no_schema_has_a_string():
    """torch's stable ABI never frees what it makes of one."""
    assert not [str(x._schema) for x in OVERLOADS if any("str" in str(a.type) for a in x._schema.arguments)]


HUGE = 2**47  # of one stored row: what the calls make has more bytes than a process has addresses
OUT_OF_MEMORY = {
    "gather_kv": lambda k, v: ops.gather_kv(k, v, torch.zeros(1, 1, 1, dtype=torch.int64).expand(1, 1, HUGE)),
    "outlier_degree": lambda k, v: ops.outlier_degree(k[:, :1, :1].expand(2**28, 2**21, 1, 8)),
    "anchor_cosine": lambda k, v: ops.anchor_cosine(k[:, :1, :1].expand(2**28, 2**21, 1, 8)),
    "window_attention": lambda k, v: ops.window_attention(
        *(k[:, :1, :1].expand(2**28, 2**21, 1, 8),) * 3, torch.ones(1, dtype=torch.int32)
    ),
    "rope_at_slots": lambda k, v: ops.rope_at_slots(
        k[:, :1, :1].expand(2**28, 2**21, 1, 8), torch.ones(1, 4), torch.ones(1, 4)
    ),
}


@pytest.mark.parametrize("op", OUT_OF_MEMORY)
def test_out_of_memory_names_operator_and_bytes(op):
    x = inputs()
    with pytest.raises(MemoryError, match=rf"^{op}: out of memory, could not allocate \d{{13,}} bytes$"):
        OUT_OF_MEMORY[op](x.k, x.v)


def test_out_of_memory_for_scratch():
    """What the kernels need while they run, under a limit on the process: 2^25 clusters are 384 MiB for each thread."""
    code = """
        import resource, torch
        from kvops import ops
        torch.set_num_threads(1)
        scores, assignment = torch.zeros(1, 1, 8), torch.zeros(1, 1, 8, dtype=torch.int32)
        ops.cluster_mean(scores, assignment, num_clusters=3)
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), -1))
        try:
            ops.cluster_mean(scores, assignment, num_clusters=2**25)
        except MemoryError as error:
            print(error)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert run.stdout == f"cluster_mean: out of memory, could not allocate {3 * 2**25 * 4} bytes\n", run.stderr


def test_out_of_memory_on_a_gpu(monkeypatch):
    """As the CUDA kernels report it; dispatch.py makes torch's exception of it, unless the GPU has failed before."""
    overload, text = torch.ops.kvops.anchor_cosine.default, "anchor_cosine: CUDA out of memory, could not allocate 9"
    waits = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))

    class Failing:
        _opname, _schema = overload._opname, overload._schema

        def _op(self, *args, **options):
            raise MemoryError(text)

    with pytest.raises(torch.OutOfMemoryError, match=text):
        kvops.ops.dispatch.operator(Failing())(inputs().k)
    assert waits == [1]


@pytest.mark.skipif(not kit.HAS_CUDA, reason="no GPU")
def test_out_of_memory_of_a_gpu():
    k = inputs().k.cuda()[:, :1, :1].expand(2**28, 2**21, 1, 8)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"^outlier_degree: CUDA out of memory, .* \d{13,} bytes on cuda:0$"
    ):
        ops.outlier_degree(k)


# Autograd


def replaced(arguments: dict, name: str, f) -> dict:
    """The arguments with f of the tensor, or of the first tensor, of one of them."""
    value = arguments[name]
    return arguments | {name: [f(value[0]), *value[1:]] if isinstance(value, list) else f(value)}


def floating(overload, arguments: dict) -> list[str]:
    tensors = {n: x[0] if isinstance(x, list) else x for n, x in arguments.items()}
    return [n for n, x in tensors.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]


def every_call(overload) -> list[dict]:
    """Calls of the overload that together have every tensor that it takes."""
    every = calls.every_tensor(inputs())
    return [arguments for name, arguments in every.items() if name.split(",")[0] == overload._name]


@pytest.mark.parametrize("overload", OVERLOADS, ids=str)
def test_every_argument_that_requires_grad_is_refused(overload):
    every = every_call(overload)
    tensors = {a.name for a in overload._schema.arguments if "Tensor" in str(a.type)}
    assert tensors - {"block_table"} <= {*itertools.chain(*every)}  # of integers; test_pages.py gives it to every call
    for arguments in every:
        with torch.no_grad():
            overload(**arguments)
        for name in floating(overload, arguments):
            tracked = replaced(arguments, name, lambda x: x.clone().requires_grad_())
            with kit.refuses(f"{overload._opname}: {name} requires grad", "no_grad", kind=NotImplementedError):
                overload(**tracked)
            with torch.no_grad():
                overload(**tracked)


@pytest.mark.parametrize("overload", OVERLOADS, ids=str)
def test_every_tangent_is_refused(overload):
    """Also under no_grad(), where forward differentiation goes on."""
    for arguments in every_call(overload):
        for name in floating(overload, arguments):
            with forward_ad.dual_level(), torch.no_grad():
                tracked = replaced(arguments, name, lambda x: forward_ad.make_dual(x, torch.ones_like(x)))
                with kit.refuses(f"{overload._opname}: {name} has a tangent", kind=NotImplementedError):
                    overload(**tracked)
                overload(**arguments)


def test_the_public_functions_refuse_optional_arguments_too():
    x = inputs()
    for call in (
        lambda: ops.anchor_cosine(x.k, anchor=x.anchor.requires_grad_()),
        lambda: ops.window_scores(x.q, x.k, x.visible, lse=x.lse.requires_grad_()),
        lambda: ops.window_attention(x.q, x.k, x.v, x.visible, sink_logits=x.sink_logits.requires_grad_()),
        lambda: ops.ladder_gather(x.k, x.v, plan=x.plan, layer=3, inv_freq=x.inv_freq.requires_grad_()),
        lambda: ops.ladder_compact_(x.k, x.v, plan=x.plan, layer=3, inv_freq=x.inv_freq.requires_grad_()),
        lambda: kvops.attention(x.q, x.k[:, :, :6], x.v[:, :, :6], sink_logits=x.sink_logits.requires_grad_()),
    ):
        with kit.refuses("(anchor|lse|sink_logits|inv_freq) requires grad"):
            call()


@pytest.mark.parametrize("function", [ops.outlier_degree, torch.ops.kvops.outlier_degree], ids=["public", "direct"])
def test_transforms_raise(function):
    """torch.func would have made zeros of derivatives that nobody computed."""
    k = inputs().k
    kind = ValueError if function is ops.outlier_degree else NotImplementedError
    with kit.refuses("outlier_degree: k has a tangent", kind=kind):
        torch.func.jvp(function, (k,), (k,))
    with kit.refuses("outlier_degree: k requires grad", kind=kind):
        torch.func.grad(lambda k: function(k).sum())(k)
    out, tangent = torch.func.jvp(lambda x: function(k) + x, (k[..., 0],), (k[..., 0],))  # of what is no input
    assert torch.equal(tangent, k[..., 0]) and torch.equal(out, function(k) + k[..., 0])


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "name", ["compact_kv_", "gather_kv.out", "ladder_compact_", "ladder_gather.out", "rope_at_slots.out"]
)
def test_what_backward_needs_is_not_overwritten_in_silence(name, mode):
    """Called directly; the public functions have always counted."""
    arguments = calls.every_tensor(inputs())[f"kvops::{name}"]
    op, _, overload = name.partition(".")
    call = getattr(getattr(torch.ops.kvops, op), overload or "default")
    for written in [a.name for a in call._schema.arguments if a.alias_info]:
        target = arguments[written][0] if isinstance(arguments[written], list) else arguments[written]
        factor = torch.ones_like(target, requires_grad=True)
        loss = (factor * target).sum()
        with mode():
            call(**arguments)
        with kit.refuses("modified by an inplace operation", kind=RuntimeError):
            loss.backward()


def test_a_mutation_of_an_inference_tensor_is_not_counted():
    with torch.inference_mode():
        x = inputs()
        torch.ops.kvops.compact_kv_([x.k], [x.v], [x.indices])
    torch.ops.kvops.compact_kv_([x.k], [x.v], [x.indices])


# Errors by name


def test_wrong_types_are_type_errors():
    x = inputs()
    for call, message in (
        (lambda: ops.anchor_cosine(x.k, starts=[0]), "anchor_cosine: starts must be a torch.Tensor or None, got list"),
        (lambda: ops.anchor_cosine(x.k, anchor=3), "anchor_cosine: anchor must be a torch.Tensor or None, got int"),
        (lambda: ops.lag_score(x.k, x.v, lag=2.5), "lag_score: lag must be an int, got float"),
        (lambda: ops.lag_score(x.k, x.v, lag=4, v_weight="1"), "lag_score: v_weight must be a float, got str"),
        (lambda: ops.window_scores(x.q, x.k, x.visible, scale="1"), "scale must be a float or None, got str"),
        (lambda: ops.select_topk(x.scores, k=4, budgets=3), "select_topk: budgets must be a torch.Tensor or None"),
        (
            lambda: ops.ladder_gather(3, x.v, plan=x.plan, layer=3),
            "ladder_gather: k must be a torch.Tensor or a list of them",
        ),
        (
            lambda: ops.ladder_gather([x.k, 3], [x.v, x.v], plan=x.plan, layer=[3, 4]),
            r"k\[1\] must be a torch.Tensor, got int",
        ),
        (lambda: ops.ladder_gather(x.k, x.v, plan=x.plan, layer="3"), "layer must be an int, got str"),
        (lambda: ops.gather_kv(x.k, x.v, x.indices, out=x.k), r"gather_kv: out must be a pair \(k_out, v_out\)"),
        (lambda: ops.ladder_gather(x.k, x.v, plan=x.plan, layer=3, out=x.k), r"ladder_gather: out must be a pair"),
        (lambda: ops.gather_kv(x.k, x.v, x.indices, out=(x.k, 3)), r"gather_kv: out\[1\] must be a torch.Tensor"),
        (lambda: ops.gather_kv(x.k, x.v, x.indices, out=(x.k, None)), r"gather_kv: out\[1\] must be a torch.Tensor"),
    ):
        with kit.refuses(message, kind=TypeError):
            call()
    with kit.refuses(f"lag_score: lag must fit int64, got {2**70}"):
        ops.lag_score(x.k, x.v, lag=2**70)


@pytest.mark.parametrize("op", ops.__all__)
def test_what_is_no_tensor(op):
    """Each tensor that an operator needs, one after the other."""
    given, public = calls.every_tensor(inputs())[f"kvops::{op}"], getattr(ops, op)
    schema = getattr(torch.ops.kvops, op).default._schema
    for argument in schema.arguments:
        if str(argument.type) not in ("Tensor", "List[Tensor]"):
            continue
        for wrong in (None, 3):
            arguments = given | {argument.name: [wrong] if "List" in str(argument.type) else wrong}
            with kit.refuses(
                f"{op}: {argument.name} must be a torch.Tensor, got {type(wrong).__name__}", kind=TypeError
            ):
                public(**arguments)


def test_wrong_names_and_numbers_of_reductions():
    x = inputs()
    for options, message in (
        (dict(score="cosine"), "score must be 'softmax' or 'dot', got 'cosine'"),
        (dict(reduce="none"), "reduce must be 'sum', 'mean' or 'max', got 'none'"),
        (dict(group_reduce=0), "group_reduce must be 'sum', 'mean', 'max' or 'none', got 0"),
    ):
        with kit.refuses(f"window_scores: {message}"):
            ops.window_scores(x.q, x.k, x.visible, **options)
    for options, message in (
        (dict(score=2), r"score must be 0 \(softmax\) or 1 \(dot\), got 2"),
        (dict(reduce=3), r"reduce must be 0 \(sum\), 1 \(mean\) or 2 \(max\), got 3"),
        (dict(group_reduce=-1), r"group_reduce must be 0 \(sum\), 1 \(mean\), 2 \(max\) or 3 \(none\), got -1"),
    ):
        with kit.refuses(f"window_scores: {message}"):
            torch.ops.kvops.window_scores(x.q, x.k, x.visible, **options)
    with kit.refuses(r"cluster_mean: reduce must be 0 \(sum\) or 1 \(mean\), got 2"):
        torch.ops.kvops.cluster_mean(x.scores, x.assignment, 70, 2)


def test_numbers_of_reductions_are_those_of_the_names():
    x = inputs()
    for score, number in ops.SCORES.items():
        found = torch.ops.kvops.window_scores(x.q, x.k, x.visible, score=number)
        assert kit.same([found], [ops.window_scores(x.q, x.k, x.visible, score=score)])
    for reduce, number in ops.REDUCTIONS.items():
        direct, public = dict(group_reduce=number), dict(group_reduce=reduce)
        if reduce != "none":
            direct["reduce"], public["reduce"] = number, reduce
        found = torch.ops.kvops.window_attention(x.q, x.k, x.v, x.visible, **direct)
        assert kit.same(found, ops.window_attention(x.q, x.k, x.v, x.visible, **public))
    for reduce in ("sum", "mean"):
        found = torch.ops.kvops.cluster_mean(x.scores, x.assignment, 70, ops.REDUCTIONS[reduce])
        assert kit.same([found], [ops.cluster_mean(x.scores, x.assignment, num_clusters=70, reduce=reduce)])


META = [
    (lambda k, s, i: ops.lag_score(k, k, lag=0), "lag_score: lag must be at least 1, got 0"),
    (
        lambda k, s, i: ops.lag_score(k[0], k, lag=4),
        r"lag_score: k must be \[batch, heads, tokens, head_dim\], got \[2, 80",
    ),
    (lambda k, s, i: ops.anchor_cosine(k[0]), "anchor_cosine: k must be"),
    (lambda k, s, i: ops.window_scores(k[0], k, i), r"window_scores: q must be \[batch, query heads, rows"),
    (lambda k, s, i: ops.window_attention(k, k, k[0], i), "window_attention: v must be"),
    (lambda k, s, i: ops.drop_scores(k, k, k[0], i), "drop_scores: v must be"),
    (lambda k, s, i: ops.select_topk(s[0], k=4), r"select_topk: scores must be \[batch, heads, tokens\] or"),
    (lambda k, s, i: ops.select_topk(s, k=-4), "select_topk: k must be at least 0, got -4"),
    (lambda k, s, i: ops.select_topk(k, k=4), "select_topk: seq_len must be given with scores of 4 dims"),
    (lambda k, s, i: ops.select_topk(k[..., :0], k=4, seq_len=80), "select_topk: the lag of scores must be at least 1"),
    (lambda k, s, i: ops.gather_kv(k[0], k, i), "gather_kv: k must be"),
    (lambda k, s, i: ops.gather_kv(k, k, i[0]), r"gather_kv: indices must be \[batch, heads, kept\]"),
    (lambda k, s, i: ops.compact_kv_(k, k, i[0]), r"compact_kv_: indices must be"),
    (lambda k, s, i: ops.ladder_gather(k, k, plan=[80, 8], layer=1), "ladder_gather: plan must be"),
    (lambda k, s, i: ops.ladder_gather(k, k, plan=[80, 8, 2, 2, 0], layer=1), "ladder_gather: plan must be"),
    (lambda k, s, i: ops.ladder_compact_(k, k, plan=[80, 8, 2, 2, 0], layer=1), "ladder_compact_: plan must be"),
    (lambda k, s, i: ops.outlier_degree(k[0]), "outlier_degree: k must be"),
    (lambda k, s, i: ops.lsh_bucket(k, i[0], s, s), "lsh_bucket: indices must be"),
    (lambda k, s, i: ops.build_prototypes(k, num_chunks=-3, num_buckets=1), "num_chunks must be at least 0, got -3"),
    (lambda k, s, i: ops.assign_prototypes(k[0], k), "assign_prototypes: k must be"),
    (lambda k, s, i: ops.quadratic_scores(k[0], k[0, :, 0]), "quadratic_scores: k must be"),
    (lambda k, s, i: ops.trig_scores(k, k), "trig_scores: centers must be"),
    (lambda k, s, i: ops.key_similarity(k[0]), "key_similarity: k must be"),
    (lambda k, s, i: ops.value_norm(k[0], s), "value_norm: v must be"),
    (lambda k, s, i: ops.value_range(k[0]), "value_range: v must be"),
    (lambda k, s, i: ops.cluster_mean(s, i, num_clusters=0), "cluster_mean: num_clusters must be at least 1, got 0"),
    (
        lambda k, s, i: ops.cluster_priority(s[0], i, s, k=4),
        r"cluster_priority: scores must be \[batch, heads, tokens\]",
    ),
]


@pytest.mark.parametrize("case", range(len(META)))
def test_fakes_refuse_by_name(case):
    call, message = META[case]
    k = torch.empty(1, 2, 80, 8, device="meta")
    with kit.refuses(message):
        call(k, k[..., 0], torch.empty(1, 2, 4, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize("policy", [kvops.SnapKV(12, 4), kvops.KeyDiff(12), kvops.LaCache(12)], ids=repr)
def test_attend_of_no_tokens(policy):
    x = inputs()
    cache = kvops.Cache(policy, layer=1, num_layers=4)
    for _ in range(2):  # of an empty cache, and of one that stores tokens
        with kit.refuses(f"{type(policy).__name__}: k must hold at least one token, got shape"):
            cache.attend(x.q[:, :, :0], x.k[:, :, :0], x.v[:, :, :0])
        cache.attend(x.q, x.k[:, :, :6], x.v[:, :, :6])


# torch's own switches


@pytest.fixture(params=[torch.float64, torch.float16, torch.bfloat16], ids=str)
def default_dtype(request):
    yield request.param
    torch.set_default_dtype(torch.float32)


def test_the_default_dtype_has_no_say(default_dtype):
    x = calls.inputs(0, n=300, d=40, dv=64)
    rows, limit = x.q, 40
    ones = torch.ones(2, 3, 300)
    statistics = kit.query_statistics(1, 12, 40)
    hidden, learned = x.k[0, 0], x.v[0, 0, :, :2]

    def matched():
        """A cache whose prompt of 6 tokens is matched, and a step."""
        steps = [(rows, x.k[:, :, i : i + 6], x.v[:, :, i : i + 6]) for i in (0, 6, 12)]
        cache = kvops.Cache(kvops.AttentionMatching(4))
        cache.attend(*steps[0])
        with cache.repeating(0):
            cache.attend(*steps[1])
        cache.evict()
        return [cache.attend(*steps[2]), cache.k, cache.v, cache.state["key_bias"]]

    everything = {
        **{name: lambda call=call: call(x.map(torch.clone)) for name, call in calls.CALLS.items()},
        "h2o": lambda: kvops.h2o_compress(x.k, x.v, rows, limit),
        "h2o, padded": lambda: kvops.h2o_compress(x.k, x.v, rows, limit, starts=x.starts, head_mode="shared"),
        "tova": lambda: kvops.tova_compress(x.k, x.v, rows[:, :, -1:], limit),
        "l2": lambda: kvops.l2_compress(x.k, x.v, limit, starts=x.starts, recent=0.2, head_mode="shared"),
        "l2, whole": lambda: kvops.l2_compress(x.k, x.v, limit, layer=0),
        "lagkv, adaptive": lambda: kvops.LagKV(8, 0.5, head_mode="adaptive").compress(x.k, x.v),
        "lagkv, l2, whole": lambda: kvops.lagkv_compress(x.k, x.v, 8, 0.5, sinks=2, score="l2", layer=0),
        "keydiff, median": lambda: kvops.keydiff_compress(x.k, x.v, limit, anchor="median", metric="dot"),
        "snapkv": lambda: kvops.snapkv_compress(x.k, x.v, rows, limit, pooling="avg", starts=x.starts),
        "snapkv, dot": lambda: kvops.snapkv_compress(x.k * 1e4, x.v, rows * 1e4, limit, score="dot"),
        "pyramidkv": lambda: kvops.pyramidkv_compress(x.k, x.v, rows, limit, layer=1, num_layers=4),
        "chunkkv": lambda: kvops.chunkkv_compress(x.k, x.v, rows, limit, starts=x.starts),
        "laq": lambda: kvops.laq_compress(x.k, x.v, rows, limit),
        "protokv": lambda: kvops.protokv_compress(x.k, x.v, rows, limit),
        "protokv, lsh": lambda: kvops.protokv_compress(x.k, x.v, rows, limit, clusters="lsh"),
        "satkv": lambda: kvops.satkv_compress(x.k, x.v, limit, 4),
        "attentionmatching": matched,
        "expectedattention": lambda: kvops.expectedattention_compress(x.k, x.v, limit, statistics=statistics),
        "triattention": lambda: kvops.triattention_compress(x.k, x.v, 160, statistics=statistics),
        "fit_gates": lambda: kvops.fit_gates([hidden], [learned], width=8).layers[0],
        "fit_gates, sinks": lambda: kvops.fit_gates([hidden], [learned], width=4, sinks=2).layers[0],
        "recall": lambda: [kvops.recall(x.k, rows, rows[:, :, :2], limit)],
        "head_budgets": lambda: [kvops.head_budgets(ones, limit)],
        "attention": lambda: kvops.attention(rows, x.k, x.v, starts=x.starts)[:2],
        "lsh_projection": lambda: kvops.lsh_projection(16),
        "rope": lambda: kvops.Rope.of(16).between(torch.arange(9), torch.arange(9) + 3),
    }
    with kit.threads(1):
        for name, call in everything.items():
            torch.set_default_dtype(torch.float32)
            expected = call()
            torch.set_default_dtype(default_dtype)
            found = call()
            assert [y.dtype for y in found] == [y.dtype for y in expected] and kit.same(found, expected), name


def test_compile_writes_to_a_slice():
    """rope_at_slots(out=) of some slots of a cache, as the caches call it."""
    x = inputs()

    def step(k, cache):
        ops.rope_at_slots(k * 2, *x.angles, out=cache[:, :, 4:84])
        return cache + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    caches = torch.zeros(2, 1, 1, 90, 8)
    assert torch.equal(compiled(x.k, caches[0]), step(x.k, caches[1])) and torch.equal(*caches)
    assert caches[0, :, :, 4:84].any()


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_any_number_of_tokens(strict):
    class Compress(torch.nn.Module):
        def forward(self, k, v, q):
            return tuple(kvops.snapkv_compress(k, v, q, 20))

    tokens, q = {2: torch.export.Dim("n", min=20, max=4096)}, kit.randn(1, 4, 8, 8)
    with torch.no_grad():
        dynamic = (tokens, tokens, None)
        program = torch.export.export(Compress(), (*kit.kv(1, 2, 64, 8), q), dynamic_shapes=dynamic, strict=strict)
    for n in (20, 64, 150):
        k, v = kit.kv(1, 2, n, 8)
        assert kit.same(program.module()(k, v, q), kvops.snapkv_compress(k, v, q, 20))


def test_compiled_calls_refuse_what_requires_grad():
    x = inputs()
    compiled = torch.compile(lambda k: ops.outlier_degree(k), fullgraph=True, backend="aot_eager")
    assert kit.same([compiled(x.k)], [ops.outlier_degree(x.k)])
    with kit.refuses("outlier_degree: k requires grad", kind=Exception):
        compiled(x.k.requires_grad_())
