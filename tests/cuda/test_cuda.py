"""What only a GPU shows: graphs, streams, no waiting, memory, and the same selection as on the CPU. Uses calls.py."""

import functools
import gc

import pytest
import torch

import kit
import kvops
from calls import CALLS, OPERATORS_CALLS, Inputs, inputs
from kvops import ops

needs_gpu = pytest.mark.skipif(not kit.HAS_CUDA, reason="needs an NVIDIA GPU and kvops' CUDA kernels")
every_call = pytest.mark.parametrize("name", CALLS)


@every_call
def test_calls_are_sound(name):
    """On the CPU, where most of the tests below are skipped: the calls run, and depend on their inputs' values."""
    results = [CALLS[name](inputs(seed, n=300)) for seed in (0, 0, 1)]
    assert kit.same(results[0], results[1])
    assert name.startswith("streamingllm") or not kit.same(results[0], results[2])


# The rest needs a GPU.


@functools.cache
def on_gpu(seed: int) -> Inputs:
    """Clone these before writing to them."""
    return inputs(seed).map(lambda x: x.cuda())


def fresh(seed: int) -> Inputs:
    return on_gpu(seed).map(lambda x: x.clone())


def expected(name: str, seed: int) -> list[torch.Tensor]:
    result = CALLS[name](fresh(seed))
    torch.cuda.synchronize()
    return [x.clone() for x in result]


def poison() -> None:
    """Fills the memory that will be allocated next with 0xA5: large pieces, and those that small tensors share."""
    gc.collect()
    torch.cuda.empty_cache()
    sizes = [1 << 26, *[1 << 24] * 3, *[1 << 19] * 16]
    pieces = [torch.full((size,), 0xA5, dtype=torch.uint8, device="cuda") for size in sizes]
    del pieces


@needs_gpu
@every_call
def test_graph_replay_with_other_inputs(name):
    call, static = CALLS[name], fresh(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(static)
    torch.cuda.current_stream().wait_stream(side)
    static = fresh(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(static)
    for seed in (0, 1, 2, 1):
        static.copy_(on_gpu(seed))
        graph.replay()
        torch.cuda.synchronize()
        assert kit.same(result, expected(name, seed)), f"replay with the inputs of seed {seed}"


def requests_in_pages(seed: int) -> list[torch.Tensor]:
    """K, V, block table and lengths of four requests, each of which may be empty."""
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randn(2, 40, 2, 16, 64, generator=generator).bfloat16()
    table = torch.randperm(40, generator=generator)[:36].view(4, 9).int()
    return [*pages, table, torch.randint(9 * 16 + 1, (4,), generator=generator, dtype=torch.int32)]


def evict_in_pages(k, v, table, lengths):
    kept = ops.select_topk(ops.anchor_cosine(k, lengths=lengths, block_table=table), k=24, lengths=lengths)
    ops.compact_kv_([k], [v], [kept], block_table=table)
    return kept


@needs_gpu
def test_graph_of_an_eviction_in_pages():
    """Other requests, lengths and tables at each replay."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        evict_in_pages(*(x.cuda() for x in requests_in_pages(0)))
    torch.cuda.current_stream().wait_stream(side)
    static = [x.cuda() for x in requests_in_pages(0)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = evict_in_pages(*static)
    for seed in (0, 1, 2, 1):
        for x, new in zip(static, requests_in_pages(seed)):
            x.copy_(new)
        graph.replay()
        twins = [x.cuda() for x in requests_in_pages(seed)]
        assert kit.same((evict_in_pages(*twins), *twins[:2]), (kept, *static[:2])), f"replay of seed {seed}"


@needs_gpu
@every_call
def test_repeats_are_bit_identical_whatever_was_in_the_memory(name):
    first = expected(name, 0)
    poison()
    for _ in range(20):
        for x in first:  # the same sizes as the results: these are allocated next
            torch.empty_like(x).view(torch.uint8).fill_(0xA5)
        assert kit.same(CALLS[name](fresh(0)), first)


@needs_gpu
@every_call
def test_two_streams_at_once(name):
    """Both streams are held back until the host has queued all calls, so that they really run at the same time."""
    call, seeds = CALLS[name], (0, 1)
    wanted = [expected(name, seed) for seed in seeds]
    arguments = [[fresh(seed) for _ in range(10)] for seed in seeds]
    streams = [torch.cuda.Stream() for _ in seeds]
    torch.cuda.synchronize()
    results = [[], []]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)  # some 50 ms
    for i in range(10):
        for which, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[which].append(call(arguments[which][i]))
    torch.cuda.synchronize()
    for which, seed in enumerate(seeds):
        assert all(kit.same(result, wanted[which]) for result in results[which]), f"stream {which}, seed {seed}"


@needs_gpu
@every_call
def test_the_current_stream_is_used(name):
    """The stream is held back first, then the inputs are written, then the call reads them."""
    wanted, late, side = expected(name, 1), fresh(0), torch.cuda.Stream()
    source = fresh(1)
    with torch.cuda.stream(side):
        CALLS[name](source.map(torch.clone))  # loads the kernels, and caches memory for this stream in the allocator
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)  # some 50 ms
        late.copy_(source)
        result = CALLS[name](late)
        assert not side.query(), "the call waited for its stream"
    side.synchronize()
    assert kit.same(result, wanted)


@needs_gpu
@every_call
def test_the_host_does_not_wait(name):
    CALLS[name](fresh(0))
    arguments = fresh(0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = CALLS[name](arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert kit.same(result, expected(name, 0))


@needs_gpu
@every_call
def test_memory_does_not_grow(name):
    call, arguments = CALLS[name], fresh(0)
    for _ in range(3):
        call(arguments)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(200):
        call(arguments)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


@needs_gpu
@every_call
def test_fullgraph_compile(name):
    """With the compiler's own kernels around a whole method; a lone operator has nothing to compile but its fake."""
    torch.compiler.reset()
    backend = "aot_eager" if name in OPERATORS_CALLS else "inductor"
    compiled = torch.compile(CALLS[name], fullgraph=True, backend=backend)
    with torch.no_grad():
        assert kit.same(compiled(fresh(0)), expected(name, 0))


@needs_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@every_call
def test_another_device_than_the_current_one(name):
    assert torch.cuda.current_device() == 0
    result = CALLS[name](inputs(0).map(lambda x: x.to("cuda:1")))
    assert torch.cuda.current_device() == 0 and {x.device.index for x in result} == {1}
    assert kit.same([x.to("cuda:0") for x in result], expected(name, 0))


# The same selection as on the CPU, bit for bit.


def ties(*shape: int, decimals: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator).round(decimals=decimals)
    chance = torch.rand(*shape, generator=generator)
    for i, special in enumerate((torch.inf, -torch.inf, torch.nan, -0.0)):
        x[(0.01 * i < chance) & (chance < 0.01 * (i + 1))] = special
    return x


@needs_gpu
@pytest.mark.parametrize("n", [1, 16, 31, 1000, 4096, 32_769, 131_072, 1_000_000])
@pytest.mark.parametrize("decimals", [0, 2, 7])
def test_select_topk_is_that_of_the_cpu(n, decimals):
    scores = ties(2, 2, n, decimals=decimals, seed=n)
    on_device = scores.cuda()
    for k in {1, n // 100, n // 4, n - 1, n} - {0}:
        for sinks, window in {(0, 0), (min(4, k // 4), min(9, k // 2))}:
            found = ops.select_topk(on_device, k=k, sinks=sinks, window=window)
            assert torch.equal(found.cpu(), ops.select_topk(scores, k=k, sinks=sinks, window=window)), (
                k,
                sinks,
                window,
            )


@needs_gpu
@pytest.mark.parametrize("fill_invalid", [False, True])
def test_select_topk_of_padded_rows_is_that_of_the_cpu(fill_invalid):
    scores = ties(3, 4, 50_000, decimals=2, seed=0)
    starts, lengths = kit.int32(0, 7, 30_000), kit.int32(50_000, 0, 12_345)
    budgets = torch.randint(20, 9000, (3, 4), dtype=torch.int32)
    for padding in ((None, None), (starts, None), (None, lengths), (starts, lengths)):
        options = dict(k=9000, sinks=3, window=5, budgets=budgets, fill_invalid=fill_invalid)
        options.update(zip(("starts", "lengths"), padding))
        on_device = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        found = ops.select_topk(scores.cuda(), **on_device)
        assert torch.equal(found.cpu(), ops.select_topk(scores, **options))


@needs_gpu
@pytest.mark.parametrize("lag, segments", [(4, 5000), (128, 900), (1024, 60), (65_536, 3)])
def test_select_topk_of_segments_is_that_of_the_cpu(lag, segments):
    scores = ties(1, 3, segments, lag, decimals=2, seed=lag)
    n = 10 + (segments + 1) * lag + lag // 2
    for m in {0, 1, lag // 3, lag - 1, lag}:
        found = ops.select_topk(scores.cuda(), k=m, sinks=10, seq_len=n)
        assert torch.equal(found.cpu(), ops.select_topk(scores, k=m, sinks=10, seq_len=n))


# Values on the GPU are not read back, so wrong ones must change nothing else, and debug_checks() must find them.


@needs_gpu
def test_wrong_values_are_skipped_or_found_by_debug_checks():
    x = on_gpu(0)
    n = x.n
    wrong = x.indices.clone()
    wrong[0, 0, 3], wrong[1, 2, 0] = n, -7
    k, v = ops.gather_kv(x.k, x.v, wrong)
    right = ops.gather_kv(x.k, x.v, x.indices)
    for found, usual in zip((k, v), right):
        assert not found[0, 0, 3].any() and not found[1, 2, 0].any()
        found[0, 0, 3], found[1, 2, 0] = usual[0, 0, 3], usual[1, 2, 0]
    assert kit.same((k, v), right)
    y, z = fresh(0), fresh(0)
    for found, usual in zip(ops.compact_kv_(y.k, y.v, wrong), ops.compact_kv_(z.k, z.v, x.indices)):
        assert kit.same((found[0, 1], found[1, 0]), (usual[0, 1], usual[1, 0]))  # the heads without wrong indices
    ops.lag_score(x.k, x.v, lag=x.lag, starts=kit.int32(n + 5, -3).cuda())
    ops.select_topk(x.scores, k=5, lengths=kit.int32(-1, n + 1).cuda())
    beyond, all_seen = (torch.full_like(x.visible, y) for y in (n + 7, n))
    assert kit.same(ops.window_attention(x.q, x.k, x.v, beyond), ops.window_attention(x.q, x.k, x.v, all_seen))
    torch.cuda.synchronize()
    with kvops.debug_checks():
        with kit.refuses("indices must lie", f"got {n}"):
            ops.gather_kv(x.k, x.v, wrong)
        with kit.refuses("indices"):
            ops.compact_kv_(y.k, y.v, wrong)
        with kit.refuses("visible must lie", f"got {n + 7}"):
            ops.window_scores(x.q, x.k, beyond)
        with kit.refuses("starts and lengths of row 0"):
            ops.lag_score(x.k, x.v, lag=x.lag, starts=kit.int32(n + 5, -3).cuda())
        with kit.refuses("starts and lengths of row 0"):
            ops.select_topk(x.scores, k=5, lengths=kit.int32(-1, n + 1).cuda())
    ops.gather_kv(x.k, x.v, wrong)


@needs_gpu
def test_tensors_on_two_devices_are_refused():
    x, y = on_gpu(0), inputs(0)
    for call in (
        lambda: ops.gather_kv(x.k, x.v, y.indices),
        lambda: ops.gather_kv(x.k, y.v, x.indices),
        lambda: ops.anchor_cosine(x.k, starts=y.starts),
        lambda: ops.select_topk(x.scores, k=5, starts=y.starts),
    ):
        with kit.refuses("cuda:0", "cpu"):
            call()
