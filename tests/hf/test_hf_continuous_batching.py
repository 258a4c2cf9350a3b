"""kvops.hf.continuous_batching: requests in transformers' engine, compared with each alone in a KVCache."""

import copy
import random
import re
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from packaging.version import Version  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig  # noqa: E402

import kit  # noqa: E402
import kvops  # noqa: E402
from kvops.cache.schedule import Schedule  # noqa: E402
from kvops.hf import KVCache, batching  # noqa: E402
from test_hf import VOCAB, make_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
needs_engine = pytest.mark.skipif(
    Version(transformers.__version__) < Version(batching.MIN_TRANSFORMERS), reason="its engine has no registry"
)
ROOT = Path(__file__).parents[2]


def skip_unserved(policy) -> None:
    if batching.STORES_FIRST and isinstance(policy, kvops.QueryPolicy):
        pytest.skip("this engine stores keys before it has the queries")


PAGE = 8
STREAMING = {"positions": "original", "sinks": 2}

PROTOKV = dict(window=6, num_chunks=3, num_sats=2, alpha=8)

SERVED = [
    kvops.KeyDiff(24, buffer=1),
    kvops.KeyDiff(24, buffer=8, sinks=2, recent=0.25, head_mode="shared"),
    kvops.KeyDiff(40, buffer=0.25),
    kvops.KeyDiff(24, buffer=None),
    kvops.KeyDiff(24, metric="dot"),
    kvops.LagKV(lag=8, ratio=0.5, sinks=3),
    kvops.LagKV(lag=8, ratio=0.0, sinks=0, head_mode="shared"),
    kvops.StreamingLLM(20, buffer=16, **STREAMING),
    kvops.Random(24, buffer=11, seed=3),
    kvops.L2(24, buffer=1, skip_layers=()),
    kvops.SATKV(24, window=4, kappa=2, buffer=7),
    kvops.Random(7, buffer=2, seed=3, protect="prompt"),
    kvops.Full(),
]
QUERIES = [
    kvops.SnapKV(40, 6),
    kvops.SnapKV(64, 40, score="dot", sinks=2),
    kvops.ChunkKV(40, 6, chunk=4),
    kvops.RKV(40, window=6, buffer=8),
    # In the first layer the values of equal tokens have equal ranges, between which rounding would decide.
    kvops.VaSE(40, window=6, buffer=8, largest_values=0),
    kvops.TOVA(24, buffer=1),
    kvops.TOVA(24, buffer=5, head_mode="per_head", sinks=2),
    kvops.H2O(24, buffer=1),
    kvops.H2O(24, buffer=8, group_reduce="sum", recent=12),
    kvops.H2O(24, buffer=None),
    kvops.RKV(8, window=4, buffer=3, protect="prompt"),
    kvops.VaSE(16, window=4, buffer=3, largest_values=0, protect="prompt"),
    # With random weights, outlier degrees are so close that another summation order changes the selection.
    kvops.ProtoKV(40, clusters="chunks", buffer=8, **PROTOKV),
    kvops.ProtoKV(48, clusters="lsh", buffer=8, **PROTOKV),
    kvops.ProtoKV(48, clusters="lsh", buffer=None, **PROTOKV),
]
every_policy = pytest.mark.parametrize("policy", SERVED + QUERIES, ids=repr)


def greedy(tokens=10):
    return GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)


def engine(num_blocks=100, max_batch_tokens=64, page_size=PAGE, **settings):
    sizes = dict(num_blocks=num_blocks, max_batch_tokens=max_batch_tokens, page_size=page_size)
    return transformers.ContinuousBatchingConfig(**sizes, **settings)


def prompts(*lengths, seed=1):
    rng = random.Random(seed)
    return [[rng.randrange(2, VOCAB) for _ in range(n)] for n in lengths]


@pytest.fixture
def seen(monkeypatch):
    """Records the engine's allocators, the chunks of each request, and the requests of each step."""
    allocator = pytest.importorskip("kvops.hf.allocator").EvictingAllocator

    class Seen:
        allocators, chunks, steps = [], defaultdict(list), []

    def __init__(self, *args, **options):
        init(self, *args, **options)
        Seen.allocators.append(self)

    def get_write_indices(self, request, past, tokens):
        Seen.chunks[request].append((past, tokens))
        if not self._step:
            Seen.steps.append([*self._scheduled])
        table = [x for table in self.block_table.values() for x in table]
        assert len(table) == len({*table})
        return write(self, request, past, tokens)

    init, write = allocator.__init__, allocator.get_write_indices
    monkeypatch.setattr(allocator, "__init__", __init__)
    monkeypatch.setattr(allocator, "get_write_indices", get_write_indices)
    return Seen


def assert_whole(allocator) -> None:
    """Check that every block is free exactly once."""
    pool = allocator.pool
    pool.try_to_free_sectors()
    assert not allocator.block_table and not allocator._positions and not allocator._step
    assert not allocator._prompts and not allocator._scheduled
    assert not allocator._rings._numbers
    assert sorted(pool.free_sectors) == list(range(2, 2 + pool.num_sectors))
    assert not any(len(x) for x in pool._free_blocks)


@torch.no_grad()
def alone(model, policy, prompt, tokens, block=None):
    """Return the request's text with a KVCache, which gets the prompt in one step, or in blocks."""
    if isinstance(policy, kvops.QueryPolicy):
        model = kvops.hf.use_attention(copy.deepcopy(model))
    cache, text = KVCache(model.config, policy), []
    steps = torch.tensor([prompt]).split(block or len(prompt), 1)
    while True:
        for ids in steps:
            out = model(ids, past_key_values=cache).logits[0, -1]
        text.append(int(out.argmax()))
        if len(text) == tokens:
            return text
        steps = [torch.tensor([text[-1:]])]


def assert_as_alone(model, policy, requests, seen, *, block=None, tokens=10, **settings):
    """Generate in the engine, compare, and return the counts of evictions."""
    before = dict(vars(model))
    with kvops.hf.continuous_batching(model, policy, evict=f"blocks:{block}" if block else "prompt") as batch:
        outputs = model.generate_batch(requests, generation_config=greedy(tokens), **settings)
    assert vars(model) == before
    assert [x.error for x in outputs.values()] == [None] * len(requests)
    for prompt, (name, output) in zip(requests, outputs.items()):
        assert output.generated_tokens == alone(model, policy, prompt, tokens, block), name
    (allocator,) = seen.allocators
    assert_whole(allocator)
    return batch


# ---- a request's text is the same as alone ----


@needs_engine
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@every_policy
def test_as_in_a_cache_of_its_own(policy, attn, seen):
    """Prompt chunks are shorter than some windows, and requests join while others decode."""
    skip_unserved(policy)
    # The keys of equal tokens have equal norms, so with L2 rounding decides once texts repeat themselves.
    model, tokens = make_model(attn=attn), 10 if isinstance(policy, kvops.L2) else 30
    batch = assert_as_alone(
        model,
        policy,
        prompts(90, 7, 64, 33, 1, 70),
        seen,
        tokens=tokens,
        continuous_batching_config=engine(max_batch_tokens=25),
    )
    assert max(map(len, seen.chunks.values())) > tokens + 2  # prompts came in chunks
    assert model.config._attn_implementation == attn
    if not isinstance(policy, kvops.Full):
        assert batch.evictions >= 2 and batch.tokens >= 30 and batch.blocks >= 5
        assert "evictions of" in batch.stats()


def restarted(seen, lengths) -> list[str]:
    """Return the requests that the engine computed again after they had generated tokens."""
    names = []
    for name, n in lengths.items():
        past = [before for before, _ in seen.chunks[name]]
        names += [name] * (0 in past[[x >= n for x in past].index(True) :])
    return names


@needs_engine
@pytest.mark.parametrize(
    "policy",
    # Texts that repeat themselves make L2 depend on rounding, as above.
    [x for x in SERVED + QUERIES if not isinstance(x, kvops.L2) and kit.in_share(repr(x))],
    ids=repr,
)
def test_the_load_does_not_change_the_answer(policy, seen):
    """Alone, 4 and 16 at once, in short and long steps, and in a pool so small that the engine restarts requests."""
    skip_unserved(policy)
    model, lengths = make_model(num_hidden_layers=2), [(90, 41, 64, 7)[i % 4] + i for i in range(16)]
    requests = prompts(*lengths)
    expected = [alone(model, policy, x, 24) for x in requests]
    for count, tokens, blocks in ((1, 64, 300), (4, 64, 300), (16, 64, 300), (16, 4096, 300), (16, 1000, 16)):
        seen.chunks.clear()
        with kvops.hf.continuous_batching(model, policy):
            config = engine(num_blocks=blocks, max_batch_tokens=tokens)
            outputs = model.generate_batch(requests[:count], greedy(24), continuous_batching_config=config)
        assert [x.error for x in outputs.values()] == [None] * count
        assert [x.generated_tokens for x in outputs.values()] == expected[:count], (count, tokens, blocks)
        assert_whole(seen.allocators[-1])
    assert restarted(seen, dict(zip(outputs, lengths))) or policy.held(140, 102) < 2 * PAGE  # which needs few blocks


@needs_engine
@pytest.mark.parametrize(
    "policy",
    [
        kvops.KeyDiff(24, buffer=5),
        kvops.LagKV(lag=8, ratio=0.5, sinks=3),
        kvops.Random(24, buffer=11, seed=3),
        kvops.SnapKV(20, 6),
        kvops.H2O(24, buffer=3),
    ],
    ids=repr,
)
def test_prompts_in_blocks(policy, seen):
    """They take a bounded number of blocks of the pool, whatever the steps."""
    skip_unserved(policy)
    model, requests = make_model(), prompts(96, 32, 80, 7)
    for tokens in (25, 400):
        seen.allocators.clear()
        batch = assert_as_alone(
            model,
            policy,
            requests,
            seen,
            block=16,
            tokens=20,
            continuous_batching_config=engine(max_batch_tokens=tokens),
        )
        assert batch.most_blocks <= 9  # of 15


@needs_engine
@pytest.mark.parametrize("policy", [kvops.TriAttention(24, recent=4, buffer=1), kvops.ExpectedAttention(24, buffer=1)])
def test_statistics_are_rotated_to_the_next_position(policy, seen):
    model = make_model()
    (ids,) = prompts(200, seed=5)
    policy = replace(policy, statistics=kvops.hf.query_statistics(model, torch.tensor([ids])))
    batch = assert_as_alone(
        model, policy, prompts(90, 7, 64), seen, tokens=20, continuous_batching_config=engine(max_batch_tokens=40)
    )
    assert batch.evictions >= 5


@needs_engine
def test_sliding_layers_are_left_alone(seen):
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    model = make_model(
        "qwen2", num_hidden_layers=4, layer_types=kinds, sliding_window=16, use_sliding_window=True, max_window_layers=0
    )
    batch = assert_as_alone(
        model,
        kvops.KeyDiff(24, buffer=1),
        prompts(90, 40),
        seen,
        continuous_batching_config=engine(max_batch_tokens=40),
    )
    assert seen.allocators[0].layer_indices == [1, 3] and batch.evictions == 20


@needs_engine
@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        (kvops.KeyDiff, dict(buffer=1)),
        (kvops.SnapKV, dict(window=16)),
        (kvops.ProtoKV, dict(num_chunks=8, num_sats=4, alpha=8, buffer=32)),
    ],
)
def test_the_budget_bites(policy, settings, seen):
    """A model that repeats pass keys finds the key if it is kept."""
    skip_unserved(policy(64))
    folder, text = ROOT / "bench/models/passkey-llama", (ROOT / "bench/data/haystack.txt").read_text()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    keys = ["58291740", "13572468", "90817263"]
    asked = [
        f"{text[200 * i : 200 * i + 400]} The pass key is {key}. Remember it. {text[200 * i + 400 : 1000 + 100 * i]}"
        " What is the pass key? The pass key is "
        for i, key in enumerate(keys)
    ]
    requests = [tokenizer(x)["input_ids"] for x in asked]
    right = {}
    for budget in (512, 64):
        rule = policy(budget, **settings)
        for tokens in (64, 256, 4096):
            seen.allocators.clear(), seen.chunks.clear()
            config = engine(num_blocks=120, page_size=32, max_batch_tokens=tokens)
            batch = assert_as_alone(model, rule, requests, seen, tokens=8, continuous_batching_config=config)
            assert batch.most_blocks == -(-max(map(len, requests)) // 32)  # a prompt's, until its end
        with kvops.hf.continuous_batching(model, rule):
            outputs = model.generate_batch(requests, generation_config=greedy(8), continuous_batching_config=config)
        texts = [tokenizer.decode(x.generated_tokens) for x in outputs.values()]
        right[budget] = [x == key for x, key in zip(texts, keys)]
    assert not all(right[64])
    assert all(right[512]) or policy is not kvops.KeyDiff


# ---- blocks ----


@needs_engine
def test_a_pool_too_small_for_the_requests_serves_them_in_blocks(seen):
    """Requests of 300 tokens in a pool of 160 slots, three at once."""
    model, requests = make_model(), prompts(320, 256, 288)
    settings = engine(num_blocks=160 // PAGE, max_batch_tokens=32)
    batch = assert_as_alone(
        model, kvops.KeyDiff(16, buffer=1), requests, seen, block=32, continuous_batching_config=settings, tokens=20
    )
    assert batch.most_blocks <= (16 + 32) // PAGE and batch.blocks > 160 // PAGE
    together = [past for past, tokens in seen.chunks["req_0"] if tokens == 1]
    assert len(together) >= 19


@needs_engine
def test_a_prompt_that_the_pool_cannot_hold(seen):
    """It alone fails, at once, and the error names the remedy. Its blocks are counted until it is evicted."""
    model, settings = make_model(), engine(num_blocks=160 // PAGE, max_batch_tokens=32)
    with kvops.hf.continuous_batching(model, kvops.KeyDiff(16, buffer=1)):
        outputs = model.generate_batch(prompts(161, 160), greedy(), continuous_batching_config=settings)
    long, fits = outputs.values()
    expected = "continuous_batching: the prompt of request 'req_0' needs 161 slots .* at most 160.*evict='blocks:N'"
    assert re.match(expected, long.error) and not long.generated_tokens
    assert fits.error is None and fits.generated_tokens == alone(
        model, kvops.KeyDiff(16, buffer=1), prompts(161, 160)[1], 10
    )
    assert_whole(seen.allocators[0])


@needs_engine
def test_more_tokens_than_the_pool_without_a_bound(seen):
    """LagKV's kept tokens grow, so the scheduler has no bound except the pool; a long request still continues."""
    settings = engine(num_blocks=160 // PAGE, max_batch_tokens=32)
    policy = kvops.LagKV(lag=8, ratio=0.125, sinks=2)
    assert_as_alone(make_model(), policy, prompts(320), seen, block=32, continuous_batching_config=settings)


@needs_engine
def test_requests_decode_together_beyond_the_pools_tokens(seen):
    """The scheduler counts the slots that a request reads, not its tokens."""
    model, settings = make_model(num_hidden_layers=2), engine(num_blocks=12, max_batch_tokens=64)
    with kvops.hf.continuous_batching(model, kvops.KeyDiff(16, buffer=1)):
        outputs = model.generate_batch(prompts(30, 30), greedy(150), continuous_batching_config=settings)
    assert [len(x.generated_tokens) for x in outputs.values()] == [150] * 2
    assert len(seen.steps) <= 155  # each decodes in each step, at 180 tokens in 96 slots


@needs_engine
def test_without_eviction_the_pool_is_too_small():
    with kvops.hf.continuous_batching(make_model(), kvops.Full()):
        pass
    model, settings = make_model(), engine(num_blocks=160 // PAGE, max_batch_tokens=32)
    with kvops.hf.continuous_batching(model, kvops.Full()):
        outputs = model.generate_batch(
            prompts(150, 150), generation_config=greedy(), continuous_batching_config=settings
        )
    assert all(x.error is None for x in outputs.values())  # one after the other, through the engine's soft resets


@needs_engine
@pytest.mark.parametrize(
    "policy",
    [
        kvops.Random(24, buffer=1),
        kvops.H2O(24, buffer=1),
        kvops.SnapKV(24, 8),
        kvops.TOVA(24, buffer=1),
    ],
    ids=repr,
)
def test_return_sequences(policy, seen):
    skip_unserved(policy)
    model = make_model()
    likeliest = GenerationConfig(
        max_new_tokens=10, do_sample=True, top_k=1, num_return_sequences=3, eos_token_id=-1, pad_token_id=0
    )
    with kvops.hf.continuous_batching(model, policy):
        outputs = model.generate_batch(
            prompts(60, 30),
            generation_config=likeliest,
            continuous_batching_config=engine(max_batch_tokens=40),
        )
    texts = [x.generated_tokens for x in outputs.values()]
    assert len(texts) == 6 and texts[0] == texts[1] == texts[2] and texts[3] == texts[4] == texts[5]
    for i, prompt in enumerate(prompts(60, 30)):
        assert texts[3 * i] == alone(model, policy, prompt, 10)
    assert_whole(seen.allocators[0])


@needs_engine
@pytest.mark.parametrize("seed", range(6))
def test_no_block_is_lost(seed, seen):
    """Random requests, cancelled at random, in a pool that is often full, so the engine restarts some."""
    model, rng = make_model(num_hidden_layers=2), random.Random(seed)
    policies = [
        kvops.KeyDiff(24, buffer=rng.randint(1, 12)),
        kvops.LagKV(8, 0.25),
        kvops.Random(20),
        kvops.SnapKV(32, rng.randint(1, 20)),
        kvops.H2O(20, buffer=rng.randint(1, 12)),
        kvops.TOVA(20),
    ]
    policy = policies[seed]
    skip_unserved(policy)
    with kvops.hf.continuous_batching(model, policy):
        settings = engine(num_blocks=rng.randint(14, 30), max_batch_tokens=rng.choice([16, 40]))
        with model.continuous_batching_context_manager(greedy(), continuous_batching_config=settings) as manager:
            names = []
            for prompt in prompts(*(rng.randint(1, 70) for _ in range(12)), seed=seed):
                names.append(manager.add_request(prompt, max_new_tokens=rng.randint(1, 25)))
                if rng.random() < 0.3:
                    time.sleep(0.02)
                if rng.random() < 0.4:
                    manager.cancel_request(rng.choice(names))
    assert manager.background_thread_status.fatal_error is None
    (allocator,) = seen.allocators
    assert_whole(allocator)


@needs_engine
def test_an_end_of_text(seen):
    model, policy = make_model(), kvops.KeyDiff(24, buffer=1)
    (prompt,) = prompts(60)
    with kvops.hf.continuous_batching(model, policy):
        (whole,) = model.generate_batch([prompt], greedy(), continuous_batching_config=engine()).values()
        stop = whole.generated_tokens[4]
        ends = GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=stop, pad_token_id=0)
        (output,) = model.generate_batch([prompt], ends, continuous_batching_config=engine()).values()
    first = whole.generated_tokens.index(stop)
    assert output.generated_tokens == whole.generated_tokens[: first + 1]
    for allocator in seen.allocators:
        assert_whole(allocator)


# ---- the block restores the model ----


@needs_engine
def test_an_error_of_an_eviction_is_one_of_the_step(monkeypatch, seen):
    from kvops.hf import allocator

    def compact_kv_(*args, **options):
        raise RuntimeError("no compaction today")

    model, before = make_model(), dict(allocator.engine.ATTN_TYPE_TO_ALLOCATOR)
    with kvops.hf.continuous_batching(model, kvops.KeyDiff(24)):
        with monkeypatch.context() as broken:
            broken.setattr(allocator, "compact_kv_", compact_kv_)
            outputs = model.generate_batch(prompts(60, 5), greedy(), continuous_batching_config=engine())
        assert len(outputs) == 2 and all("no compaction today" in x.error for x in outputs.values())
        assert not any(x.generated_tokens for x in outputs.values())
        outputs = model.generate_batch(prompts(60, 5), greedy(), continuous_batching_config=engine())
        assert not any(x.error for x in outputs.values())
    assert before == allocator.engine.ATTN_TYPE_TO_ALLOCATOR
    assert "init_continuous_batching" not in vars(model)


@needs_engine
def test_a_rule_that_keeps_other_than_it_says(seen):
    class Greedy(kvops.KeyDiff):
        def resumed(self, before, n, prompt):
            return kvops.KeyDiff(self.budget - 1)

    model = make_model()
    with kvops.hf.continuous_batching(model, Greedy(24)):
        (output,) = model.generate_batch(prompts(60), greedy(), continuous_batching_config=engine()).values()
    assert "must keep as many slots as its `held` returns" in output.error and not output.generated_tokens


@needs_engine
def test_an_attention_that_keeps_its_queries_to_itself(monkeypatch, seen):
    from transformers import AttentionInterface

    from kvops.hf import allocator, query_hook

    query_hook.pass_queries()
    wrapped = AttentionInterface()["sdpa"]
    query_hook.pass_queries()
    assert AttentionInterface()["sdpa"] is wrapped  # once
    model = make_model()
    monkeypatch.setattr(allocator, "pass_queries", lambda: None)
    AttentionInterface.register("sdpa", wrapped.__wrapped__)
    try:
        skip_unserved(kvops.SnapKV(24, 8))
        with kvops.hf.continuous_batching(model, kvops.SnapKV(24, 8)):
            (output,) = model.generate_batch(prompts(60), greedy(), continuous_batching_config=engine()).values()
    finally:
        AttentionInterface.register("sdpa", wrapped)
    assert "an attention that `kvops.hf.query_hook` has wrapped" in output.error and not output.generated_tokens


@needs_engine
def test_an_engine_that_outlives_the_block(seen):
    model, (prompt,) = make_model(), prompts(60)
    with kvops.hf.continuous_batching(model, kvops.KeyDiff(24)) as batch:
        manager = model.init_continuous_batching(greedy(), engine())
    manager.start()
    name = manager.add_request(prompt, max_new_tokens=10)
    output = manager.get_result(name, timeout=30)
    manager.stop()
    assert output.generated_tokens == alone(model, kvops.KeyDiff(24), prompt, 10)
    assert batch.evictions == 10


@needs_engine
def test_after_an_exception_the_model_is_as_before():
    from kvops.hf import allocator

    model, before = make_model(), dict(allocator.engine.ATTN_TYPE_TO_ALLOCATOR)
    with pytest.raises(KeyError), kvops.hf.continuous_batching(model, kvops.KeyDiff(24)):
        raise KeyError
    assert "init_continuous_batching" not in vars(model)
    assert before == allocator.engine.ATTN_TYPE_TO_ALLOCATOR
    plain = model.generate_batch(prompts(60), greedy(), continuous_batching_config=engine())
    full = model.generate(torch.tensor(prompts(60)), max_new_tokens=10, do_sample=False)[0, 60:]
    assert plain["req_0"].generated_tokens == full.tolist()


@needs_engine
def test_engines_of_other_models_are_left_alone(seen):
    """One engine is made while the other's allocator is in the registry."""
    from kvops.hf import allocator

    ours, other = (make_model() for _ in range(2))
    ours, other = (model.init_continuous_batching(greedy(), engine()) for model in (ours, other))
    made = []

    def make():
        made.append(other._create_batch_processor().cache.cache_allocators["full_attention"])
        return ours._create_batch_processor()

    batch = allocator.Batching(Schedule(kvops.KeyDiff(24)))
    processor = allocator.evicting_engine(make, ours.model.config.get_text_config(), batch)
    made.append(processor.cache.cache_allocators["full_attention"])
    assert [isinstance(x, allocator.EvictingAllocator) for x in made] == [False, True]


@needs_engine
def test_an_engine_that_is_cached(seen):
    model = make_model()
    with kvops.hf.continuous_batching(model, kvops.KeyDiff(24)) as batch:
        for _ in range(2):
            model.generate_batch(prompts(60), greedy(), continuous_batching_config=engine(), persistent_manager=True)
    assert len(seen.allocators) == 1 and batch.evictions > 1
    assert not hasattr(model, "_cached_continuous_batching_manager")
    model.generate_batch(prompts(9), greedy(), continuous_batching_config=engine(), persistent_manager=True)
    with pytest.raises(ValueError, match="destroy_cached"), kvops.hf.continuous_batching(model, kvops.KeyDiff(24)):
        pass
    model.destroy_cached_continuous_batching_manager()


# ---- refusals ----


@needs_engine
@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (kvops.PyramidKV(64), "different numbers of slots"),
        (kvops.LAQ(64), "in a stage of its own"),
        (kvops.KVzip(64), "in a stage of its own"),
        (kvops.H2O(64, group_reduce="max"), "how continuous_batching divides the tokens"),
        (kvops.SnapKV(0.5), "budget in tokens"),
        (kvops.SnapKV(64, head_mode="adaptive"), "same number of tokens"),
        (kvops.LaCache(64), "not support pages"),
        (kvops.L2(64), "different numbers of slots"),
        (kvops.LagKV(8, 0.5, score="l2"), "not support pages"),
        (kvops.StreamingLLM(64), "positions='original'"),
        (kvops.KeyDiff(0.5), "budget in tokens"),
        (kvops.KeyDiff(torch.tensor([[8, 9]], dtype=torch.int32)), "budget in tokens"),
        (kvops.KeyDiff(64, head_mode="adaptive"), "same number of tokens"),
    ],
    ids=repr,
)
def test_refused_policies(policy, why):
    model = make_model()
    with pytest.raises(ValueError, match=f"{policy.name}.*{why}"), kvops.hf.continuous_batching(model, policy):
        pass
    assert "init_continuous_batching" not in vars(model)


@needs_engine
def test_queries_that_come_after_the_keys(monkeypatch):
    """The engine of transformers 5.24: policies that use queries are refused at once."""
    monkeypatch.setattr(batching, "STORES_FIRST", True)
    model = make_model()
    expected = (
        r"continuous_batching: policies that use queries need transformers < 5\.24.*SnapKV\(.*or an older version"
    )
    with pytest.raises(NotImplementedError, match=expected):
        kvops.hf.continuous_batching(model, kvops.SnapKV(64)).__enter__()
    with kvops.hf.continuous_batching(model, kvops.KeyDiff(64)) as batch:
        assert str(batch) == batch.stats()


@needs_engine
@pytest.mark.parametrize(
    "settings",
    [{"use_async_batching": True}, {"cpu_offload_space": 1.0}, {"default_compile_level": 1}],
    ids=repr,
)
def test_refused_settings(settings):
    model = make_model(attn="eager")
    with kvops.hf.continuous_batching(model, kvops.KeyDiff(64)):
        with pytest.raises(ValueError, match=r"continuous_batching: \w+ is not supported"):
            model.generate_batch(prompts(9), greedy(), continuous_batching_config=engine(**settings))
    assert model.config._attn_implementation == "eager"


@needs_engine
def test_refused_models():
    with pytest.raises(TypeError, match="transformers model"), kvops.hf.continuous_batching(None, kvops.KeyDiff(64)):
        pass
    with pytest.raises(TypeError, match="^continuous_batching: policy must be a kvops policy .* the class KeyDiff"):
        with kvops.hf.continuous_batching(make_model(), kvops.KeyDiff):
            pass
    model = kvops.hf.use_attention(make_model())
    with pytest.raises(NotImplementedError, match="'sdpa' or 'eager'"):
        with kvops.hf.continuous_batching(model, kvops.KeyDiff(64)):
            pass
    model = make_model("mistral", sliding_window=16)
    with pytest.raises(NotImplementedError, match="no full-attention layer"):
        with kvops.hf.continuous_batching(model, kvops.KeyDiff(64)):
            pass


@needs_engine
def test_one_block_at_a_time():
    model = make_model()
    with kvops.hf.continuous_batching(model, "keydiff:budget=64") as batch:
        assert batch.policy == kvops.KeyDiff(64)
        with pytest.raises(RuntimeError, match="open block"):
            with kvops.hf.continuous_batching(model, kvops.KeyDiff(64)):
                pass
        assert "init_continuous_batching" in vars(model)
    assert "init_continuous_batching" not in vars(model)


@needs_engine
def test_hooks_that_have_changed(monkeypatch):
    from kvops.hf import allocator

    def refused(match):
        with pytest.raises(RuntimeError, match=match), kvops.hf.continuous_batching(make_model(), kvops.KeyDiff(64)):
            pass

    base = allocator.FullAttentionCacheAllocator
    with monkeypatch.context() as patch:
        patch.setattr(base, "update", lambda self, key_states: None)
        refused(
            r"expected FullAttentionCacheAllocator.update\(key_states value_states.*, got key_states in transformers"
        )
    with monkeypatch.context() as patch:
        patch.delattr(base.__mro__[1], "fork_blocks")
        refused("got none")
    with monkeypatch.context() as patch:
        patch.setitem(allocator.engine.ATTN_TYPE_TO_ALLOCATOR, "full_attention", int)
        refused("got <class 'int'>")
    with monkeypatch.context() as patch:
        patch.delattr(allocator.ContinuousBatchingManager, "_create_batch_processor")
        refused("_create_batch_processor")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "kvops.hf.allocator", None)
        patch.delattr(kvops.hf, "allocator")
        refused("expected its allocators")


@needs_engine
def test_another_order_of_memory(monkeypatch):
    from kvops.hf import allocator

    model, blocks = make_model(), allocator.EvictingAllocator._blocks
    monkeypatch.setattr(allocator.EvictingAllocator, "_blocks", lambda self: blocks(self).flip(1))
    with kvops.hf.continuous_batching(model, kvops.KeyDiff(24)):
        with pytest.raises(RuntimeError, match="another order"):
            model.init_continuous_batching(greedy(), engine())._create_batch_processor()


def test_transformers_without_such_an_engine(monkeypatch):
    monkeypatch.setattr(transformers, "__version__", "5.5.0")
    with pytest.raises(ImportError, match=r"needs transformers >= 5\.\d+\.0.*found 5.5.0"):
        with kvops.hf.continuous_batching(make_model(), kvops.KeyDiff(64)):
            pass


@needs_engine
def test_the_statistics_of_a_prompt_are_not_gathered():
    policy = kvops.ExpectedAttention(16, statistics="prompt")
    with (
        kit.refuses("continuous_batching does not gather the statistics of a prompt's queries", "QueryStatistics"),
        kvops.hf.continuous_batching(make_model(), policy),
    ):
        pass
