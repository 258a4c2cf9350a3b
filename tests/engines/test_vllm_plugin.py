"""vLLM evicts with the policy in KVOPS_VLLM, tested on its CPU backend with the passkey model.

Each engine takes seconds to start:

python -m pytest tests/engines/test_vllm_plugin.py  # in an environment with vLLM 0.32's CPU build and transformers
"""

import importlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from urllib.request import Request, urlopen

import pytest
import torch

import kit
import kvops

pytest.importorskip("vllm")
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "bench" / "models" / "passkey-llama"
HAYSTACK = (ROOT / "bench" / "data" / "haystack.txt").read_text()
CHUNK = 256
BLOCK = 32
SETTINGS = dict(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # so that tests can inspect the scheduler
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)
ENGINE = dict(
    model=str(MODEL),
    dtype="float32",
    max_model_len=2048,
    block_size=BLOCK,
    max_num_batched_tokens=CHUNK,
    enforce_eager=True,
    disable_log_stats=True,
)


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    """Simulate an installed kvops: vLLM finds the entry points that pyproject.toml declares."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = tmp_path_factory.mktemp("installed")
    (folder / "kvops-0.dist-info").mkdir()
    (folder / "kvops-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: kvops\nVersion: 0\n")
    lines = (
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in x.items()) for group, x in project["entry-points"].items()
    )
    (folder / "kvops-0.dist-info" / "entry_points.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join((str(folder), str(ROOT), os.environ.get("PYTHONPATH", ""))))
        patch.setenv("KVOPS_VLLM", "keydiff:budget=512")  # vLLM loads plugins once per process
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        yield


@contextmanager
def engine(policy, **settings):
    """Start a vLLM engine; yield the LLM and its block manager. Use one at a time: its state is global."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVOPS_VLLM", policy)
        # As it starts, vLLM scans all loaded modules. It fails at llvmlite's proxies, which its n-gram proposer loads.
        for name in [x for x in sys.modules if x.split(".")[0] == "llvmlite"]:
            patch.delitem(sys.modules, name)
        try:
            llm = LLM(**{**ENGINE, **settings})
            client = llm.llm_engine.engine_core
            managers = client.engine_core.scheduler.kv_cache_manager.coordinator.single_type_managers
            (manager,) = (x for x in managers if hasattr(x, "freed"))
            try:
                yield llm, manager
            finally:
                client.shutdown()  # the core's would run once more as the LLM is collected, and end the next engine
        finally:
            cleanup_dist_env_and_memory()


def prompt(key: int, start: int, length: int, depth: int = 400) -> list[int]:
    """Return `length` token ids: a text with a passkey after `depth` characters, and the question."""
    needle, question = f" The pass key is {key}. Remember it. ", " What is the pass key? The pass key is "
    rest = length - 1 - len(needle) - len(question)
    text = HAYSTACK[start : start + depth] + needle + HAYSTACK[start + depth : start + rest] + question
    ids = [256, *text.encode()]
    assert len(ids) == length
    return ids


def generate(llm, prompts, tokens=8) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    outs = llm.generate([{"prompt_token_ids": x} for x in prompts], sampling, use_tqdm=False)
    return [list(x.outputs[0].token_ids) for x in outs]


def text(ids) -> str:
    return bytes(ids).decode()


def all_free(manager) -> bool:
    """Return whether no request holds a block; vLLM reserves one null block."""
    return (
        not manager.req_to_blocks and manager.block_pool.get_num_free_blocks() == manager.block_pool.num_gpu_blocks - 1
    )


def reference(policy: kvops.Policy, ids: list[int], tokens: int, folder=MODEL) -> list[int]:
    """Return the tokens that transformers generates with a KVCache of the policy, from the whole prompt."""
    return run_reference(policy, ids, tokens, folder)[0]


def run_reference(policy: kvops.Policy, ids: list[int], tokens: int, folder=MODEL, chunk=None):
    """Return the generated tokens and the cache after them. chunk: of the prompt; None: all of it."""
    from kvops.hf import KVCache, for_model, use_attention

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy = for_model(policy, model)
    if isinstance(policy, kvops.QueryPolicy):
        use_attention(model)
    cache, out = KVCache(model.config, policy), []
    with torch.inference_mode():
        for first in range(0, len(ids), chunk or len(ids)):
            logits = model(torch.tensor([ids[first : first + (chunk or len(ids))]]), past_key_values=cache).logits
        for i in range(tokens):
            out.append(int(logits[0, -1].argmax()))
            if i + 1 < tokens:  # as in vLLM, the last token is never computed
                logits = model(torch.tensor([out[-1:]]), past_key_values=cache).logits
    return out, cache


def watch_kept(monkeypatch) -> dict[int, list[torch.Tensor]]:
    """Record, per layer, the positions kept by each of its evictions: int32 [moves, Hk, kept]."""
    from kvops.vllm.steps import Eviction, Plan, by_slot

    run, kinds, seen = Eviction.run, Plan.kinds, dict[int, list[torch.Tensor]]()

    def watched(self, layers, observing):
        run(self, layers, observing)
        table = self.copies[0] if self.copies else self.blocks.table
        for layer in layers:
            kept = by_slot.read(layer.memory.slots["positions"], table)[..., : getattr(self.rule, "budget", 0)]
            seen.setdefault(layer.layer_and_count[0], []).append(kept)

    monkeypatch.setattr(Eviction, "run", watched)
    monkeypatch.setattr(Plan, "kinds", property(lambda plan: kinds.fget(plan) | {"positions": torch.int32}))
    return seen


POLICIES = [
    ("keydiff:budget=512", kvops.KeyDiff(512)),
    ("keydiff:budget=65,sinks=4,recent=16,buffer=7", kvops.KeyDiff(65, sinks=4, recent=16, buffer=7)),
    ("keydiff:budget=200,buffer=None", kvops.KeyDiff(200, buffer=None)),
    ("lagkv:lag=100,ratio=0.3,sinks=5", kvops.LagKV(100, 0.3, sinks=5)),
    ("lagkv:lag=64,ratio=0,sinks=0", kvops.LagKV(64, 0.0, sinks=0)),
    ("streamingllm:budget=250,positions=original", kvops.StreamingLLM(250, positions="original")),
    ("random:budget=500,seed=3", kvops.Random(500, seed=3)),
    ("l2:budget=256,skip_layers=()", kvops.L2(256, skip_layers=())),
    ("satkv:budget=256,buffer=32", kvops.SATKV(256, buffer=32)),
    ("snapkv:budget=100,window=48", kvops.SnapKV(100, 48)),  # a window longer than a block
    ("dropkv:budget=100,window=8", kvops.SnapKV(100, 8, score="drop", pooling="avg")),
    ("chunkkv:budget=256", kvops.ChunkKV(256)),
    ("criticalkv:budget=100,window=8", kvops.CriticalKV(100, window=8)),  # its weights are those of the model
    ("defensivekv:budget=100,window=8", kvops.DefensiveKV(100, window=8)),
    (
        "protokv:budget=250,buffer=32,num_chunks=16,num_sats=8",
        kvops.ProtoKV(250, buffer=32, num_chunks=16, num_sats=8),
    ),
    ("r-kv:budget=250,buffer=32", kvops.RKV(250, buffer=32)),
    ("tova:budget=250", kvops.TOVA(250)),
    ("h2o:budget=256", kvops.H2O(256)),
    ("h2o:budget=24,buffer=7,protect=prompt", kvops.H2O(24, buffer=7, protect="prompt")),
    (  # in the first layer the values of equal tokens have equal ranges, between which rounding would decide
        "vase:budget=24,window=8,buffer=8,largest_values=0,protect=prompt",
        kvops.VaSE(24, window=8, buffer=8, largest_values=0, protect="prompt"),
    ),
]
every_policy = pytest.mark.parametrize("spec, policy", POLICIES, ids=lambda x: x if isinstance(x, str) else "")


@every_policy
def test_the_text_is_that_of_transformers(monkeypatch, spec, policy):
    """Of requests together, in steps that have nothing to do with their prompts, past several evictions: the texts and
    the kept tokens are those of a KVCache that takes the whole prompt."""
    if isinstance(policy, kvops.L2):  # in the first layer, keys of equal bytes differ only by rotation
        norms = kvops.L2.scores
        monkeypatch.setattr(kvops.L2, "scores", lambda *args: norms(*args).mul(16).round())
    prompts = [prompt(58291740 + i, 61 * i, n) for i, n in enumerate((1280, 700, 831, 1055))]
    texts, caches = zip(*(run_reference(policy, ids, 70) for ids in prompts))
    with engine(spec) as (llm, manager):
        kept = watch_kept(monkeypatch)
        assert generate(llm, prompts, 70) == [*texts]
        assert manager.freed > 0 and all_free(manager)
        generate(llm, prompts[:1], 1)  # a step that runs the evictions of the one before
    for layer, seen in kept.items() if hasattr(policy, "budget") else ():
        if layer or not isinstance(policy, kvops.SATKV):  # its degrees nearly tie there too
            for ids, cache in zip(prompts, caches):
                kept_slots = policy.budget + (len(ids) if policy.protect else 0)
                expected = cache.layers[layer].cache.positions[0, :, :kept_slots].int()
                assert any(torch.equal(row, expected) for moved in seen for row in moved)


@pytest.mark.parametrize(
    "spec, policy",
    [
        ("keydiff:budget=100", kvops.KeyDiff(100)),
        ("snapkv:budget=100", kvops.SnapKV(100)),
        ("lagkv:lag=100,ratio=0.3,sinks=5", kvops.LagKV(100, 0.3, sinks=5)),
        ("h2o:budget=100", kvops.H2O(100)),
        ("r-kv:budget=24,buffer=8,protect=prompt", kvops.RKV(24, buffer=8, protect="prompt")),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_text_does_not_depend_on_the_load(monkeypatch, spec, policy):
    """Alone, 4 and 16 at once, in steps of 64 to 4,096 tokens, and with preemptions in prefill and decode."""
    draw = random.Random(1)
    prompts = [prompt(draw.randrange(10**7, 10**8), 37 * i, draw.randrange(300, 450), 100) for i in range(16)]
    texts = [reference(policy, ids, 60) for ids in prompts]

    def texts_of(make=generate, count=16, **settings):
        with engine(spec, max_model_len=600, **settings) as (llm, manager):
            outs = make(llm, prompts[:count], 60)
            assert manager.freed > 0 and all_free(manager)
        return outs

    assert texts_of(count=4, max_num_seqs=1) == texts[:4]
    assert texts_of(max_num_seqs=4, max_num_batched_tokens=64) == texts
    assert texts_of(max_num_seqs=16, max_num_batched_tokens=4096) == texts
    assert texts_of(preempted, max_num_seqs=8, max_num_batched_tokens=700, num_gpu_blocks_override=80) == texts


def preempted(llm, prompts, tokens) -> list[list[int]]:
    """Generate, and now and then preempt all requests: vLLM computes them anew, prompt and answer so far in one go."""
    from vllm import SamplingParams

    core, outs = llm.llm_engine, {}
    scheduler, sampling = core.engine_core.engine_core.scheduler, SamplingParams(max_tokens=tokens, temperature=0)
    sampling.ignore_eos = True
    for i, ids in enumerate(prompts):
        core.add_request(str(i), {"prompt_token_ids": ids}, sampling)
    step, preemptions = 0, 0
    while core.has_unfinished_requests():
        for x in core.step():
            outs[int(x.request_id)] = list(x.outputs[0].token_ids)
        step += 1
        if step % 37 == 2:
            preemptions += sum(x.num_output_tokens > 0 for x in scheduler.running)
            assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert preemptions > 4
    return [outs[i] for i in range(len(prompts))]


@pytest.mark.parametrize(
    "spec, policy",
    [
        ("keydiff:budget=100,evict=blocks:128", kvops.KeyDiff(100)),
        ("snapkv:budget=100,evict=blocks:128", kvops.SnapKV(100)),
        ("lagkv:lag=64,ratio=0.5,sinks=16,evict=blocks:64", kvops.LagKV(64, 0.5)),
        ("h2o:budget=100,evict=blocks:128", kvops.H2O(100)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_prompts_in_blocks(spec, policy):
    """As in a KVCache that takes the prompt in such chunks, whatever the steps; a request never holds much more."""
    block = int(spec.split(":")[-1])
    prompts = [prompt(58291740 + i, 61 * i, n) for i, n in enumerate((1280, 700, 831, 1055))]
    texts = [run_reference(policy, ids, 40, chunk=block)[0] for ids in prompts]
    with engine(spec, num_gpu_blocks_override=60, max_model_len=1400, max_num_batched_tokens=200) as (llm, manager):
        assert generate(llm, prompts, 40) == texts
        assert all_free(manager)


def test_statistics_from_a_file(monkeypatch, tmp_path):
    """TriAttention scores by the next token's position, which is not the number of slots after an eviction."""
    from kvops.hf import query_statistics

    ids, file = prompt(58291740, 0, 5 * CHUNK), tmp_path / "queries.safetensors"
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    query_statistics(model, torch.tensor([ids])).save(file)
    policy = kvops.TriAttention(250, recent=64, buffer=20, statistics=str(file))
    expected, cache = run_reference(policy, ids, 70)
    with engine(f"triattention:budget=250,recent=64,buffer=20,statistics={file}") as (llm, manager):
        kept = watch_kept(monkeypatch)
        assert generate(llm, [ids], 70) == [expected]
        assert manager.freed > 0 and all_free(manager)
    for layer, positions in kept.items():
        assert torch.equal(positions[-1], cache.layers[layer].cache.positions[..., :250].int())


def model_with_windows(folder) -> None:
    """Save a model in which every other layer has a sliding window."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=260,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
        initializer_range=0.3,
    )
    transformers.Gemma3ForCausalLM(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)


def test_layers_with_a_window_are_left_as_they_are(tmp_path):
    model_with_windows(tmp_path)
    ids = prompt(58291740, 0, 3 * CHUNK)
    with engine("keydiff:budget=256", model=str(tmp_path), enable_prefix_caching=False) as (llm, manager):
        assert generate(llm, [ids], 40) == [reference(kvops.KeyDiff(256), ids, 40, tmp_path)]
        assert manager.freed == (3 * CHUNK + 32 - 256) // BLOCK
    with (
        pytest.raises(NotImplementedError, match="enable_prefix_caching"),
        engine("keydiff:budget=256", model=str(tmp_path)),
    ):
        pass


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "spec, found", [("keydiff:budget=512", True), ("streamingllm:budget=512,positions=original", False)]
)
def test_a_needle_is_found_within_the_budget_only(spec, found, dtype):
    with engine(spec, dtype=dtype) as (llm, manager):
        (out,) = generate(llm, [prompt(58291740, 0, 1280)])
        assert (text(out) == "58291740") == found
        assert manager.freed == (1280 - 512) // BLOCK


def watch(monkeypatch, manager, seen):
    """Check at each step that attention reads the blocks that the scheduler assigns to the request. It may have one
    more, since the last block of the tokens and that of the slots do not fill at the same time, and those to which its
    first eviction copies."""
    from kvops.vllm.worker import EvictingBuilder

    build, copies = EvictingBuilder.build, manager.plan.shared

    def watched(self, *args, **options):
        metadata = build(self, *args, **options)
        owned = [{x.block_id for x in blocks if not x.is_null} for blocks in manager.req_to_blocks.values()]
        for row, n in zip(metadata.block_table.tolist(), metadata.seq_lens.tolist()):
            read = row[: -(-n // BLOCK)]
            more = [len(x) - len(read) for x in owned if set(read) <= x]
            assert len(set(read)) == len(read) and more and (copies or min(more) <= 1)
        seen.append(len(metadata.seq_lens))
        return metadata

    monkeypatch.setattr(EvictingBuilder, "build", watched)


class Pages:
    """Checks an engine's blocks after each step: how many requests hold each, and what those with hashes contain."""

    def __init__(self, llm, manager):
        self.manager, self.runner = manager, llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        self.known = {}

    def check(self):
        pool, counts = self.manager.block_pool, Counter[int]()
        for blocks in self.manager.req_to_blocks.values():
            counts.update(x.block_id for x in blocks if not x.is_null)
        free = {x.block_id for x in pool.free_block_queue.get_all_free_blocks()}
        assert len(free) == pool.get_num_free_blocks() and not free & counts.keys()
        assert len(free) + len(counts) == pool.num_gpu_blocks - 1
        assert all(x.ref_cnt == counts[x.block_id] for x in pool.blocks if not x.is_null)
        hashed = {x.block_id: x.block_hash for x in pool.blocks if x.block_hash is not None}
        for block, key in hashed.items():
            content = [x[block].clone() for x in self.runner.model_runner.kv_caches]
            same, before = self.known.get(block, (None, content))
            assert same != key or all(map(torch.equal, before, content))
            self.known[block] = key, content
        self.known = {block: x for block, x in self.known.items() if block in hashed}


def test_requests_that_the_pool_could_not_hold(monkeypatch):
    """Six requests of 60 blocks each run in a pool of 51 blocks."""
    keys = [random.Random(i).randrange(10**7, 10**8) for i in range(6)]
    with engine("keydiff:budget=512,evict=blocks:256", num_gpu_blocks_override=52) as (llm, manager):
        watch(monkeypatch, manager, seen := [])
        outs = generate(llm, [prompt(key, 37 * i, 1913 + i) for i, key in enumerate(keys)], 9)
        assert [text(x) for x in outs] == [f"{key}." for key in keys]
        assert manager.freed == 6 * ((1913 - 512) // BLOCK) and all_free(manager)
    assert max(seen) > 1  # several requests ran at the same time


@pytest.mark.parametrize(
    "spec", ["keydiff:budget=95", "lagkv:lag=60,ratio=0.4,sinks=3,evict=blocks:100", "snapkv:budget=96"]
)
@pytest.mark.parametrize("share", [False, True])
def test_requests_come_and_go(monkeypatch, spec, share):
    """Random arrivals, preemptions and aborts, in prefill and decode: no block leaks or is freed twice, and no request
    reads another's blocks, or changes what a hash names."""
    from vllm import SamplingParams

    draw = random.Random(0)
    with engine(spec, num_gpu_blocks_override=140, max_num_seqs=8, enable_prefix_caching=share) as (llm, manager):
        watch(monkeypatch, manager, [])
        core, alive, pages, hits, preempted = llm.llm_engine, set(), Pages(llm, manager), 0, 0
        scheduler = core.engine_core.engine_core.scheduler
        for step in range(200):
            if draw.random() < 0.3 and step < 160:
                ids = prompt(12345678, 100 * draw.randrange(3), draw.randint(500, 1800), draw.choice((100, 400)))
                sampling = SamplingParams(max_tokens=draw.randint(1, 60), ignore_eos=True)
                core.add_request(str(step), {"prompt_token_ids": ids}, sampling)
                alive.add(str(step))
            if alive and draw.random() < 0.1:
                core.abort_request([gone := draw.choice(sorted(alive))])
                alive.remove(gone)
            if scheduler.running and draw.random() < 0.1:
                scheduler._preempt_request(scheduler.running.pop(), time.monotonic())
                preempted += 1
            outs = core.step()
            hits += sum(x.num_cached_tokens or 0 for x in outs if x.finished)
            alive -= {x.request_id for x in outs if x.finished}
            pages.check()
        core.abort_request(sorted(alive))
        while core.has_unfinished_requests():
            core.step()
        assert manager.freed > 100 and all_free(manager) and preempted > 5
        assert not manager._prompts and not manager._gaps
    assert (hits > 5000) == manager.plan.shared == (share and "blocks" not in spec)


SHARING = [
    ("keydiff:budget=100", kvops.KeyDiff(100)),
    ("keydiff:budget=700", kvops.KeyDiff(700)),  # the first eviction is in decode
    ("snapkv:budget=100,window=48", kvops.SnapKV(100, 48)),
    ("lagkv:lag=100,ratio=0.3,sinks=5", kvops.LagKV(100, 0.3, sinks=5)),
    ("r-kv:budget=250,buffer=32", kvops.RKV(250, buffer=32)),
    ("tova:budget=250", kvops.TOVA(250)),
    ("chunkkv:budget=256", kvops.ChunkKV(256)),
    ("criticalkv:budget=100,window=8", kvops.CriticalKV(100, window=8)),  # its weights are those of the model
    ("random:budget=5,seed=3,protect=prompt,buffer=5", kvops.Random(5, seed=3, protect="prompt", buffer=5)),
]


@pytest.mark.parametrize(
    "spec, policy", [x for x in SHARING if kit.in_share(x[0])], ids=lambda x: x if isinstance(x, str) else ""
)
@pytest.mark.parametrize("own", ["0", "1"])
def test_prefixes_are_shared(monkeypatch, spec, policy, own):
    """Texts are those of a KVCache. A request that hits computes at least the queries that observe; those that come
    together share too; and what a hash names never changes."""
    from kvops.cache.queries import window

    monkeypatch.setenv("KVOPS_VLLM_ATTENTION", own)
    head = prompt(58291740, 0, 640)[:-60]
    prompts = [
        [*head, *f" {word} What is the pass key? The pass key is ".encode()] for word in ("So." * 3, "Or", "A" * 99)
    ]
    prompts += [prompts[0], prompts[0][: 18 * BLOCK]]  # the same again, and one of full blocks only
    texts = [reference(policy, ids, 60) for ids in prompts]
    with engine(spec, enable_prefix_caching=True, max_num_batched_tokens=200) as (llm, manager):
        pages, done = Pages(llm, manager), set[int]()
        for some in ([0], [1, 2], [3, 4], [4], [0, 1, 2, 3, 4]):
            outs = run_requests(llm, [prompts[i] for i in some], 60, pages.check)
            assert [list(x.outputs[0].token_ids) for x in outs] == [texts[i] for i in some]
            for i, out in zip(some, outs):
                most = len(prompts[i]) - max(1, window(policy))
                known = max((len(os.path.commonprefix([prompts[i], prompts[j]])) for j in done), default=0)
                least = min(most, known) // BLOCK * BLOCK
                assert least <= out.num_cached_tokens <= most and (done or not out.num_cached_tokens)
            done |= {*some}
        assert manager.freed > 0 and all_free(manager)


def run_requests(llm, prompts, tokens, after_step):
    from vllm import SamplingParams

    core, outs = llm.llm_engine, {}
    for i, ids in enumerate(prompts):
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        core.add_request(str(i), {"prompt_token_ids": ids}, sampling)
    while core.has_unfinished_requests():
        outs |= {int(x.request_id): x for x in core.step()}
        after_step()
    return [outs[i] for i in range(len(prompts))]


@pytest.mark.parametrize(
    "spec, why",
    [
        ("keydiff:budget=512,evict=blocks:256", "evict=blocks:256"),
        ("h2o:budget=512", "H2O adds up the scores of all queries"),
    ],
)
def test_prefixes_that_cannot_be_shared(monkeypatch, spec, why):
    """A block that is evicted in place does not contain the tokens that its hash implies."""
    ids, said = prompt(58291740, 0, 1280), []
    monkeypatch.setattr("kvops.vllm.scheduler.logger.warning", lambda text, *args: said.append(text % args))
    with engine(spec, enable_prefix_caching=True) as (llm, manager):
        first, second = generate(llm, [ids]), generate(llm, [ids])
        assert first == second and manager.freed == 2 * (1280 - 512) // BLOCK
    (warning,) = said  # once, at the start
    assert "enable_prefix_caching has no effect" in warning and why in warning
    with engine(spec, enable_prefix_caching=False):
        assert len(said) == 1


def test_a_preempted_request_does_not_take_the_prompt_of_another_for_its_answer():
    """Its prompt and answer are the prompt of another request, whose blocks hold the tokens that it has evicted."""
    from vllm import SamplingParams

    ids = prompt(58291740, 0, 640)
    expected = reference(kvops.KeyDiff(100), ids, 140)
    with engine("keydiff:budget=100", max_num_batched_tokens=1024, enable_prefix_caching=True) as (llm, manager):
        core, scheduler = llm.llm_engine, llm.llm_engine.engine_core.engine_core.scheduler
        pages, sampling = Pages(llm, manager), SamplingParams(max_tokens=140, temperature=0, ignore_eos=True)
        core.add_request("a", {"prompt_token_ids": ids}, sampling)
        for step in range(200):
            if step == 50:
                core.add_request("b", {"prompt_token_ids": [*ids, *expected[:70]]}, SamplingParams(max_tokens=1))
            if step == 78:
                assert len(scheduler.running) == 1
                scheduler._preempt_request(a := scheduler.running.pop(), 0.0)
                assert a.num_output_tokens > 70
            outs = core.step()
            pages.check()
            assert step != 78 or a.num_computed_tokens == 640  # all but one block are found, and a step ends there
            if any(x.finished and x.request_id == "a" for x in outs):
                break
        assert list(outs[0].outputs[0].token_ids) == expected and all_free(manager)


def test_a_conversation():
    """A prompt that goes on from another request's answer shares that one's prompt only: the rest was evicted."""
    ids = prompt(58291740, 0, 640)
    answer = reference(kvops.KeyDiff(100), ids, 100)
    again = [*ids, *answer, *b" What is the pass key? The pass key is "]
    expected = reference(kvops.KeyDiff(100), again, 40)
    with engine("keydiff:budget=100", enable_prefix_caching=True) as (llm, manager):
        pages = Pages(llm, manager)
        for prompt_ids, text, hit in ((ids, answer, 0), (again, expected, 640), (again, expected, 24 * BLOCK)):
            (out,) = run_requests(llm, [prompt_ids], len(text), pages.check)
            assert list(out.outputs[0].token_ids) == text and out.num_cached_tokens == hit
        assert all_free(manager)


def test_the_lengths_of_prompts_follow_the_batch_of_the_v1_runner():
    from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

    from kvops.vllm.prompts import _NONE, Prompts

    prompts = Prompts(None, torch.device("cpu"), False)

    def update(removed=(), added=(), moved=()):
        new = [(row, None, [0] * n, []) for row, n in added]
        prompts.update_state(BatchUpdate(len(prompts._rows), removed, new, moved))

    def of(rows):
        lengths, requests = prompts.by_row(SimpleNamespace(num_reqs=rows, req_idx=None))
        assert [x is None for x in requests] == [x == _NONE for x in lengths]
        return lengths

    update(added=[(0, 10), (1, 20), (2, 30)])
    prompts.update_state(None)
    assert of(3) == [10, 20, 30] and of(2) == [10, 20] and of(5) == [10, 20, 30, _NONE, _NONE]
    update(removed=[0], moved=[(2, 0, MoveDirectionality.UNIDIRECTIONAL)])
    assert of(3) == [30, 20, _NONE]
    update(removed=[1], added=[(1, 40), (4, 50)], moved=[(0, 1, MoveDirectionality.SWAP)])
    assert of(5) == [40, 30, _NONE, _NONE, 50]
    with kit.refuses("prompts of token ids", kind=NotImplementedError):
        prompts.update_state(BatchUpdate(1, [], [(0, None, None, [])], []))


def test_a_vllm_without_the_v2_interface_starts_as_ever(tmp_path):
    """Without a policy. vLLM loads the logits processors of all installed packages."""
    code = """
import sys
sys.modules["vllm.v1.worker.gpu.sample.logits_processor"] = None
from vllm.v1.sample.logits_processor import LogitsProcessor, cached_load_custom_logitsprocs
found = cached_load_custom_logitsprocs(None)
assert found and all(x.__name__ == "Prompts" and issubclass(x, LogitsProcessor) for x in found), found
"""
    environment = os.environ | {"KVOPS_VLLM": ""}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    "spec, policy",
    [("keydiff:budget=100", kvops.KeyDiff(100)), ("snapkv:budget=100,window=48", kvops.SnapKV(100, 48))],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_v2_runner(monkeypatch, spec, policy):
    """This runner needs Triton, which the CPU build lacks. Here the V1 runner's engine passes what the V2 runner would:
    its logits processors see requests' states, and each row of a step names its request's place among them."""
    import numpy as np

    from kvops.vllm.prompts import Prompts
    from kvops.vllm.worker import EvictingBuilder

    prompts = [prompt(12345678, 0, 500), prompt(12345678, 0, 509), prompt(87654321, 40, 500)]
    texts = [reference(policy, ids, 40) for ids in prompts]
    build, seen, places, lengths = EvictingBuilder.build, [], {}, np.zeros(8, dtype=np.int32)

    def as_v2(self, common_prefix_len, metadata, fast_build=False):
        known, requests = v1.by_row(metadata)
        for gone in places.keys() - {id(x) for x in requests}:
            del places[gone]
        for request, length in zip(requests, known):
            if request is not None and id(request) not in places:
                places[id(request)] = place = max({*range(8)} - {*places.values()})
                lengths[place] = length
                assert not v2.add_request(place, None)
        rows = np.array([places.get(id(x), 0) for x in requests])
        monkeypatch.setattr(self, "_prompts", v2)
        seen.append(known)
        return build(self, common_prefix_len, metadata.replace(req_idx=rows), fast_build)

    with engine(spec, enable_prefix_caching=True) as (llm, _):
        v1, v2 = Prompts.current, Prompts(None, SimpleNamespace(prompt_len=SimpleNamespace(np=lengths)))
        assert v2.apply(logits := torch.zeros(1), None) is logits
        monkeypatch.setattr(EvictingBuilder, "build", as_v2)
        assert generate(llm, prompts[:1], 40) == texts[:1]
        outs = run_requests(llm, prompts, 40, lambda: None)
        assert [list(x.outputs[0].token_ids) for x in outs] == texts
        assert [x.num_cached_tokens > 300 for x in outs] == [True, True, False]
    assert [500, 509, 500] in seen


@pytest.mark.parametrize("spec, between", [("keydiff:budget=100", True), ("snapkv:budget=100", False)])
def test_graphs_can_hold_the_attention(monkeypatch, spec, between):
    """Unless queries observe, nothing follows vLLM's attention, which reads tables and lengths at the same addresses in
    each step. The builder then reports what vLLM's own does."""
    from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

    from kvops.vllm.worker import EvictingBuilder

    class Graphs(EvictingBuilder, AttentionMetadataBuilder):
        _cudagraph_support = AttentionCGSupport.ALWAYS

    build, addresses, after = EvictingBuilder.build, [], []

    def watched(self, *args, **options):
        metadata = build(self, *args, **options)
        addresses.append((metadata.block_table.data_ptr(), metadata.seq_lens.data_ptr()))
        after.append(metadata.step is not None)
        return metadata

    monkeypatch.setattr(EvictingBuilder, "build", watched)
    with engine(spec) as (llm, _):
        support = Graphs.get_cudagraph_support(llm.llm_engine.vllm_config, None)
        generate(llm, [prompt(12345678, 0, n) for n in (600, 500)], 40)
    assert support == (AttentionCGSupport.ALWAYS if between else AttentionCGSupport.NEVER)
    assert any(after) == (not between) and len(after) > 40
    assert len({*addresses}) == 1


def test_caches_that_vllm_zeroes_are_evicted_after_the_attention(monkeypatch):
    """vLLM zeroes blocks that an eviction has freed before it builds the next step's metadata."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    from kvops.vllm import worker

    class Layer(AttentionLayerBase):
        def __init__(self, spec):
            self.spec = spec

        def get_attn_backend(self):
            raise NotImplementedError

        def get_kv_cache_spec(self, vllm_config):
            return self.spec

    attention = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float32)
    mamba = MambaSpec(block_size=32, shapes=((2, 2),), dtypes=(torch.float32,))
    for specs, between in [([attention], True), ([attention, mamba], False), ([attention, None], True)]:
        layers = {str(i): Layer(x) for i, x in enumerate(specs)}
        config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
        assert worker.between_steps(config) == between
    prompts = [prompt(12345678, 0, 500), prompt(87654321, 50, 633)]
    monkeypatch.setattr(worker, "between_steps", lambda config: False)
    monkeypatch.setattr(worker.EvictingBuilder, "_evict", None)
    with engine("keydiff:budget=100") as (llm, manager):
        assert generate(llm, prompts, 40) == [reference(kvops.KeyDiff(100), ids, 40) for ids in prompts]
        assert manager.freed


def test_scores_are_of_the_logits_that_the_attention_has():
    from kvops.vllm.worker import EvictingImpl

    impl = SimpleNamespace(
        scale=0.5, logits_soft_cap=30.0, sinks=torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    )
    softmax, dot = (EvictingImpl._logits(impl, policy(64, 8)) for policy in (kvops.SnapKV, kvops.ProtoKV))
    assert dot == {"scale": 0.5, "softcap": 30.0}
    sinks = softmax.pop("sink_logits")
    assert softmax == dot and sinks.dtype == torch.float32 and not sinks.requires_grad


@pytest.mark.parametrize("share, moves", [(False, "compact_kv_"), (True, "gather_kv")])
def test_an_eviction_that_fails_ends_the_step(monkeypatch, share, moves):
    from kvops.vllm import steps

    def fails(*_):
        raise RuntimeError("no eviction")

    with engine("keydiff:budget=512", enable_prefix_caching=share) as (llm, _):
        monkeypatch.setattr(steps, moves, lambda *a, **k: fails())
        with pytest.raises(Exception, match="no eviction"):
            generate(llm, [prompt(58291740, 0, 1280)])


@pytest.mark.parametrize(
    "spec, settings, parts",
    [
        ("keydiff:budget=0.5", {}, ("KeyDiff", "budget in tokens", "0.5")),
        ("keydiff:budget=512", {"kv_cache_dtype": "fp8"}, ("kv_cache_dtype", "fp8")),
        (
            "keydiff:budget=512",
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
            ("speculative_config", "ngram"),
        ),
    ],
)
def test_engines_that_do_not_start(spec, settings, parts):
    with pytest.raises(Exception) as error, engine(spec, **settings):
        pass
    assert all(part in str(error.value) for part in parts), error.value


@pytest.mark.parametrize(
    "name, spec",
    [
        ("pipeline_parallel_size", "keydiff:budget=512"),
        ("decode_context_parallel_size", "keydiff:budget=512"),
        ("tensor_parallel_size", "keydiff:budget=512,head_mode=shared"),
        ("use_ubatching", "keydiff:budget=512"),
    ],
)
def test_parallelism_that_is_refused(name, spec, monkeypatch):
    from kvops.vllm.worker import _check_config

    monkeypatch.setenv("KVOPS_VLLM", spec)
    ones = ("tensor", "pipeline", "decode_context", "prefill_context")
    parallel = {f"{x}_parallel_size": 1 for x in ones} | {"use_ubatching": False, "num_ubatches": 2, name: 2}
    with kit.refuses(name, "got 2", kind=NotImplementedError):
        _check_config(SimpleNamespace(parallel_config=SimpleNamespace(**parallel), model_config=None))


@pytest.mark.parametrize("spec, name", [("criticalkv", "CriticalKV"), ("defensivekv", "DefensiveKV")])
def test_adapters_are_refused_where_the_policy_reads_weights(spec, name, monkeypatch):
    from kvops.vllm.worker import _check_config

    ones = {f"{x}_parallel_size": 1 for x in ("tensor", "pipeline", "decode_context", "prefill_context")}
    parallel = SimpleNamespace(**ones, use_ubatching=False)
    config = SimpleNamespace(parallel_config=parallel, model_config=None, lora_config=object())
    monkeypatch.setenv("KVOPS_VLLM", f"{spec}:budget=100")
    with kit.refuses(f"enable_lora to be False for {name}", "got True", kind=NotImplementedError):
        _check_config(config)
    config.lora_config, config.weight_transfer_config = None, "transfers"
    with kit.refuses(f"weight_transfer_config to be None for {name}", "transfers", kind=NotImplementedError):
        _check_config(config)


def test_weights_are_read_from_packed_projections(monkeypatch):
    """In bf16 vLLM's CPU build packs them and frees the originals; on a CPU without AVX-512 this test does."""
    from vllm.model_executor.layers import utils

    from kvops.vllm import worker

    with_weights, plans = worker.with_weights, []
    monkeypatch.setattr(worker, "with_weights", lambda *args: plans.append(with_weights(*args)) or plans[-1])
    dispatch = utils.dispatch_cpu_unquantized_gemm

    def pack(layer, remove_weight):
        dispatch(layer, remove_weight)
        if remove_weight and layer.weight.numel():
            packed = layer.weight.detach().clone()
            layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, packed, bias)
            layer.weight = torch.nn.Parameter(packed.new_empty(0), requires_grad=False)

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", pack)
    with engine("criticalkv:budget=100,window=8", dtype="bfloat16") as (llm, _):
        (sizes,) = llm.apply_model(_projection_sizes)
        generate(llm, [prompt(58291740, 0, 700)])
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    expected = [x.self_attn.o_proj.weight for x in model.model.layers]
    assert [len(x.policy.w_o) for x in plans] == [len(expected)] and sizes == [0] * len(expected)
    for own, weight in zip(plans[0].policy.w_o, expected):
        assert torch.equal(own, weight)


def test_an_attention_without_an_output_projection_is_refused():
    from kvops.vllm import weights

    weights.watch()
    layer, owner = torch.nn.Module(), torch.nn.Module()
    layer.impl, layer.num_heads, layer.head_size_v, layer.layer_name = object(), 4, 8, "model.layers.0.attn"
    with kit.refuses("layers.0.attn in NoneType", kind=NotImplementedError):  # it is nobody's
        weights._output_weights("CriticalKV", layer, torch.float32)
    owner.attn = layer
    owner.o_proj = torch.nn.Linear(32, 16)  # not one of vLLM's
    with kit.refuses("one RowParallelLinear of 32 inputs", "layers.0.attn in Module, got 0", kind=NotImplementedError):
        weights._output_weights("CriticalKV", layer, torch.float32)


def _projection_sizes(model) -> list[int]:
    return [x.weight.numel() for name, x in model.named_modules() if name.endswith("o_proj")]


def test_masks_of_image_tokens_are_refused():
    """Their ranges count positions, but an evicted request's lengths count slots."""
    from kvops.vllm.worker import _check_config

    ones = {f"{x}_parallel_size": 1 for x in ("tensor", "pipeline", "decode_context", "prefill_context")}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**ones, use_ubatching=False),
        model_config=SimpleNamespace(
            enable_prompt_embeds=False,
            is_encoder_decoder=False,
            runner_type="generate",
            is_mm_prefix_lm=False,
            architecture="Gemma3",
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        speculative_config=None,
        kv_transfer_config=None,
    )
    _check_config(config)
    config.model_config.is_mm_prefix_lm = True
    with kit.refuses("image tokens", "language_model_only", "got 'Gemma3'", kind=NotImplementedError):
        _check_config(config)


def test_another_vllm_is_refused(monkeypatch):
    import vllm

    from kvops.vllm import plugin

    plugin.check_vllm()
    with monkeypatch.context() as patch:
        patch.setattr(vllm, "__version__", "0.34.1")
        with kit.refuses("expected vLLM 0.32.x or 0.33.x", "got 0.34.1", kind=RuntimeError):
            plugin.check_vllm()
    with monkeypatch.context() as patch:
        patch.setitem(plugin.HOOKS, "vllm.v1.attention.backend:AttentionBackend.customize_spec", "spec layer")
        with kit.refuses("customize_spec", "spec, layer", "got .spec. in vLLM 0.3", kind=RuntimeError):
            plugin.check_vllm()
    with monkeypatch.context() as patch:
        patch.setattr("vllm.platforms.current_platform.is_cpu", lambda: False)
        with kit.refuses("CPU_ATTN, FLASH_ATTN, FLASHINFER", kind=NotImplementedError):
            plugin.check_vllm()
        patch.setattr("vllm.platforms.current_platform.is_cuda", lambda: True)
        assert plugin.check_vllm() is plugin.CUDA


def imported_names():
    """Return (module, name) of each name that kvops/vllm imports from vLLM, except those of the backends for GPUs."""
    files = {x for x in (ROOT / "kvops" / "vllm").glob("*.py") if x.stem not in ("flash_attn", "flashinfer")}
    lines = (re.findall(r"from (vllm\S*) import (\([^)]*\)|.*)", x.read_text()) for x in files)
    found = [(module, re.sub(r" as \w+", "", names)) for some in lines for module, names in some]
    return sorted({(module, x) for module, names in found for x in re.findall(r"\w+", names)})


@pytest.mark.parametrize("module, name", imported_names())
def test_a_name_that_moved_is_refused(monkeypatch, module, name):
    """A vLLM that has moved a name, or a whole module, gives one sentence with both, not an ImportError later."""
    import vllm

    from kvops.vllm import plugin

    importlib.import_module(module)
    with monkeypatch.context() as patch:
        without = ModuleType(module)
        vars(without).update({k: x for k, x in vars(sys.modules[module]).items() if k not in (name, "__getattr__")})
        patch.setitem(sys.modules, module, without)
        with kit.refuses(f"expected vLLM to have {module}.{name}", f"in vLLM {vllm.__version__}", kind=RuntimeError):
            plugin.check_vllm()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module, None)  # import_module raises ModuleNotFoundError
        with kit.refuses(f"expected vLLM to have {module}.", f"in vLLM {vllm.__version__}", kind=RuntimeError):
            plugin.check_vllm()


def test_a_package_that_a_backend_needs_may_be_missing(monkeypatch):
    """vLLM does not select a backend whose packages are missing, so its names are not checked."""
    from kvops.vllm import plugin

    def import_module(name):
        if name.endswith(("flash_attn", "flashinfer")):
            raise ModuleNotFoundError("No module named 'flashinfer'", name="flashinfer")
        return import_(name)

    import_ = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", import_module)
    monkeypatch.setattr("vllm.platforms.current_platform.is_cpu", lambda: False)
    monkeypatch.setattr("vllm.platforms.current_platform.is_cuda", lambda: True)
    assert plugin.check_vllm() is plugin.CUDA


def test_backends_that_do_not_evict_are_refused():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kvops.vllm import plugin

    plugin.register()
    assert AttentionBackendEnum.CPU_ATTN.get_class().__module__ == "kvops.vllm.cpu_attn"
    with kit.refuses("expected one of CPU_ATTN, FLASH_ATTN, FLASHINFER", "got TRITON_ATTN", kind=ImportError):
        AttentionBackendEnum.TRITON_ATTN.get_class()
    for mla in (AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.AMX_MLA):
        with kit.refuses("MLA", kind=NotImplementedError):
            mla.get_class()


def test_two_ranks(tmp_path):
    """Tensor parallelism: each rank has one of the model's two KV heads. With vLLM's defaults the engine core is
    another process too, and all processes read the policy from the environment."""
    code = f"""
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM({str(MODEL)!r}, dtype="bfloat16", max_model_len=2048, tensor_parallel_size=2)
    ids = {{"prompt_token_ids": {prompt(58291740, 0, 1280)}}}
    out = llm.generate([ids] * 3, SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)
    print("OUT", *(bytes(x.outputs[0].token_ids).decode() for x in out))
"""
    (tmp_path / "serve.py").write_text(code)
    environment = os.environ | {"KVOPS_VLLM": "keydiff:budget=512", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    run = subprocess.run([sys.executable, tmp_path / "serve.py"], env=environment, capture_output=True, text=True)
    said = run.stdout + run.stderr
    assert "kvops evicts with KeyDiff" in said and "OUT 58291740 58291740 58291740" in said, said


def test_a_server(tmp_path):
    """vLLM's OpenAI server answers, and its metrics count evictions."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"KVOPS_VLLM": "keydiff:budget=512", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    options = f"--host 127.0.0.1 --port {port} --max-model-len 2048 --block-size {BLOCK} --enforce-eager".split()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), *options]

    def ask(path: str, body: dict | None = None) -> str:
        data = body and json.dumps(body).encode()
        request = Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as answer:
            return answer.read().decode()

    with (tmp_path / "log").open("w+") as log:
        server = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=log, stderr=log)
        try:
            for _ in range(120):
                with suppress(OSError):
                    ask("/health")
                    break
                time.sleep(1)
            asked = {"model": str(MODEL), "prompt": prompt(58291740, 0, 1280), "max_tokens": 8, "temperature": 0}
            assert json.loads(ask("/v1/completions", asked))["choices"][0]["text"] == "58291740"
            lines = [x for x in ask("/metrics").splitlines() if x.startswith("kvops:") and "_total{" in x]
            assert 'policy="KeyDiff"' in lines[0]
            assert {x.split("{")[0]: float(x.split()[-1]) for x in lines} == {
                "kvops:evicted_requests_total": 1.0,
                "kvops:evicted_blocks_total": (1280 - 512) // BLOCK,
            }
        except BaseException:
            print((tmp_path / "log").read_text())
            raise
        finally:
            server.terminate()
            server.wait(60)


def test_metrics_count_requests_that_finish(monkeypatch):
    from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats

    from kvops.vllm.metrics import _BLOCKS, EvictionLogger

    config = SimpleNamespace(
        model_config=SimpleNamespace(served_model_name="m"), cache_config=SimpleNamespace(block_size=BLOCK)
    )
    finished = [  # prompt tokens, generated tokens, and the blocks freed with 16 blocks kept
        (512, 33, 1),  # the last token is never computed
        (512, 32, 0),
        (512 + 320, 1, 10),
        (2000, 0, 0),  # aborted during prefill
    ]
    stats = IterationStats()
    for prompt_tokens, generated, _ in finished:
        stats.finished_requests.append(
            FinishedRequestStats(None, num_prompt_tokens=prompt_tokens, num_generation_tokens=generated)
        )
    monkeypatch.setenv("KVOPS_VLLM", "")
    EvictionLogger(config).record(None, stats)  # does nothing
    monkeypatch.setenv("KVOPS_VLLM", "keydiff:budget=512")
    for engine in range(2):
        logger = EvictionLogger(config, engine)
        logger.record(None, None)
        logger.record(None, stats)
        assert _BLOCKS.labels("m", str(engine), "KeyDiff")._value.get() == sum(x[2] for x in finished)
