"""Serve from a block pool that is too small: vLLM and transformers' engine, with and without eviction.

    make serve-demo                                                  # or, in an environment with vLLM 0.32's CPU build:
    python experiments/serving.py [--requests 32] [--full 8] [--budget 512] [--buffer 160] [--out .] [--json FILE]

Many requests of 2,000 tokens arrive at once. Each prompt is a text (bench/data) with a hidden passkey and a question
for it; the generation continues after the digits. The pool has blocks for 8 requests. The script serves them four
times, each time in a new process: with both engines, with the full cache and with KeyDiff at a quarter. Model, prompts,
pool and tokens per step are the same. It prints a table, and plots blocks held and requests in flight over time.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

import common
from kvops.bench.record import write
from kvops.demo import passkeys

BLOCK = 32  # tokens
CHUNK = 256  # tokens per step
DIGITS = 8


@dataclass
class Load:
    """The workload and the pool size."""

    requests: int
    full: int  # requests that fit into the pool without eviction
    prompt: int  # tokens, including the question
    generated: int  # tokens

    @property
    def blocks(self) -> int:
        return self.full * -(-(self.prompt + self.generated) // BLOCK)

    def prompts(self) -> tuple[list[list[int]], list[str]]:
        """Return the token ids of each prompt, and the digits that each should retrieve."""
        context = self.prompt - len(passkeys.QUESTION)
        found = passkeys.make_prompts(self.requests, context, DIGITS)
        return passkeys.asked(found).tolist(), [x.digits for x in found]


@dataclass
class Served:
    """The results of one engine with one policy. The lists have one entry per sample of the engine's state."""

    engine: str
    policy: str
    seconds: float = 0.0
    right: int = 0  # requests with the correct digits
    preemptions: int = 0
    times: list[float] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    #: Seconds in steps, and in their evictions: for decode-only steps, and for steps with prompt tokens.
    decode: list[float] = field(default_factory=lambda: [0.0, 0.0])
    prefill: list[float] = field(default_factory=lambda: [0.0, 0.0])

    @property
    def shares(self) -> dict[str, float]:
        """The fraction of step time spent in evictions."""
        return {name: x[1] / x[0] for name in ("decode", "prefill") if (x := getattr(self, name))[1]}

    @property
    def numbers(self) -> dict:
        """The table's numbers, for the JSON file."""
        lists = {"in_flight": self.running, "blocks_held": self.blocks}
        counts = {f"{name}_{of}": f(x) for name, x in lists.items() for of, f in (("mean", self.mean), ("most", max))}
        return (
            {x: getattr(self, x) for x in ("engine", "policy", "seconds", "right", "preemptions")}
            | counts
            | {f"evictions_share_{name}": x for name, x in self.shares.items()}
        )

    def look(self, seconds: float, blocks: int, running: int) -> None:
        self.times.append(seconds)
        self.blocks.append(blocks)
        self.running.append(running)

    def mean(self, values: list[int]) -> float:
        """Return the time-weighted mean: each value lasts until the next sample."""
        spans = [b - a for a, b in zip(self.times, self.times[1:])]
        return sum(x * span for x, span in zip(values, spans)) / sum(spans)


# ---- engines ----


class Clock:
    """Sums the seconds spent in instrumented functions. They must not call each other."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def time(self, owner: type, name: str) -> None:
        bound = inspect.getattr_static(owner, name)
        function = getattr(bound, "__func__", bound)

        def timed(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds += time.perf_counter() - begin

        setattr(owner, name, classmethod(timed) if isinstance(bound, classmethod) else timed)


def check_answers(served: Served, answers: list[list[int]], keys: list[str], load: Load) -> None:
    assert all(len(x) == load.generated for x in answers)
    served.right = sum(bytes(x[:DIGITS]) == key.encode() for x, key in zip(answers, keys))


def with_vllm(load: Load, spec: str) -> Served:
    os.environ |= {
        "KVOPS_VLLM": spec,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that the script can inspect each step
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams

    from kvops.vllm import plugin, steps

    clock = Clock()
    for owner, name in ((steps.Held, "of"), (steps.Step, "of"), (steps.Step, "run")):
        clock.time(owner, name)
    plugin.register()  # vLLM does this by itself where kvops is installed
    llm = LLM(
        model=str(common.MODEL),
        dtype="float32",
        max_model_len=load.prompt + load.generated,
        block_size=BLOCK,
        num_gpu_blocks_override=load.blocks + 1,  # vLLM reserves one null block
        max_num_batched_tokens=CHUNK,
        max_num_seqs=3 * load.full,  # evicted requests that fit; more would be admitted, and then preempted
        enable_prefix_caching=False,
        enforce_eager=True,
    )
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    prompts, keys = load.prompts()
    sampling = SamplingParams(max_tokens=load.generated, temperature=0, ignore_eos=True)
    llm.generate([{"prompt_token_ids": prompts[0][:CHUNK]}], SamplingParams(max_tokens=8), use_tqdm=False)
    served, answers, preempted = Served("vLLM", spec), dict[str, list[int]](), dict[str, int]()
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, sampling)
    begin = time.perf_counter()
    while engine.has_unfinished_requests():
        clock.seconds, step_begin = 0.0, time.perf_counter()
        computed = {name: x.num_computed_tokens for name, x in scheduler.requests.items()}
        outs = engine.step()
        in_prompt = any(x.num_computed_tokens > computed[name] < load.prompt for name, x in scheduler.requests.items())
        step = served.prefill if in_prompt else served.decode
        step[0] += time.perf_counter() - step_begin
        step[1] += clock.seconds
        for out in outs:
            if out.finished:
                answers[out.request_id] = list(out.outputs[0].token_ids)
        preempted |= {name: x.num_preemptions for name, x in scheduler.requests.items()}
        held = load.blocks - pool.get_num_free_blocks()
        served.look(time.perf_counter() - begin, held, len(scheduler.running))
    served.seconds, served.preemptions = time.perf_counter() - begin, sum(preempted.values())
    check_answers(served, [answers[str(i)] for i in range(load.requests)], keys, load)
    return served


def with_transformers(load: Load, spec: str) -> Served:
    import transformers

    import kvops.hf

    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(common.MODEL, dtype=torch.float32).eval()
    config = transformers.ContinuousBatchingConfig(
        num_blocks=load.blocks, page_size=BLOCK, max_batch_tokens=CHUNK, allow_block_sharing=False
    )
    greedy = transformers.GenerationConfig(
        max_new_tokens=load.generated, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    prompts, keys = load.prompts()
    served, begin = Served("transformers", spec), time.perf_counter()
    evicting = nullcontext() if spec == "full" else kvops.hf.continuous_batching(model, spec)
    with evicting, model.continuous_batching_context_manager(greedy, continuous_batching_config=config) as manager:
        manager.add_request(prompts[0][:CHUNK], request_id="warm", max_new_tokens=8)
        while manager.get_result("warm", timeout=1) is None:
            pass
        scheduler, cache = manager.batch_processor.scheduler, manager.batch_processor.cache
        (allocator,) = cache.cache_allocators.values()

        def look() -> tuple[int, set[str], set[str]]:
            running = {name for name, blocks in list(allocator.block_table.items()) if blocks}
            held = 1 - cache.pool.num_free_sectors / cache.num_sectors  # a sector is part of a block of all layers
            return round(held * load.blocks), running, set(scheduler.waiting_requests)

        begin = time.perf_counter()
        with watching(served, begin, look):
            manager.add_requests(prompts, max_new_tokens=load.generated)
            answers = dict[str, list[int]]()
            while len(answers) < load.requests:
                if (out := manager.get_result(timeout=1)) is not None:
                    if out.error:
                        raise RuntimeError(out.error)
                    answers[out.request_id] = out.generated_tokens
            served.seconds = time.perf_counter() - begin
    order = sorted(answers, key=lambda name: int(name.rsplit("_", 1)[-1]))
    check_answers(served, [answers[x] for x in order], keys, load)
    return served


@contextmanager
def watching(served: Served, begin: float, look: Callable[[], tuple[int, set[str], set[str]]]) -> Iterator[None]:
    """Sample an engine that runs in another thread.

    Args:
        served: where the samples go.
        begin: the start time, of time.perf_counter.
        look: returns how many blocks are held, the names of the requests that hold them, and those of the waiting
            requests. A request that held blocks in the last sample and now waits counts as preempted.
    """
    done = threading.Event()

    def run() -> None:
        before = set[str]()
        while not done.wait(0.02):
            try:
                held, running, waiting = look()
            except RuntimeError:  # the engine changed a dict during the iteration
                continue
            served.preemptions += len(before & waiting - running)
            served.look(time.perf_counter() - begin, held, len(running))
            before = running

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


ENGINES = {"vllm": with_vllm, "transformers": with_transformers}


# ---- output ----


def table(found: list[Served], load: Load) -> str:
    lines = [
        f"{load.requests} requests of {load.prompt} + {load.generated} tokens; a pool of {load.blocks} blocks of "
        f"{BLOCK} tokens, enough for {load.full} requests",
        "",
        f"{'':46}{'in flight':>20}{'blocks held':>22}{'':>13}{'':>10}{'':>16}",
        f"{'engine':14}{'policy':32}{'mean':>10}{'max':>10}{'mean':>11}{'max':>11}{'preemptions':>13}{'tokens/s':>10}"
        f"{'correct keys':>16}",
    ]
    for x in found:
        rate = load.requests * (load.prompt + load.generated) / x.seconds
        lines.append(
            f"{x.engine:14}{x.policy:32}{x.mean(x.running):10.1f}{max(x.running):10}{x.mean(x.blocks):11.0f}"
            f"{max(x.blocks):11}{x.preemptions:13}{rate:10,.0f}{f'{x.right} of {load.requests}':>16}"
        )
    for x in found:
        if x.shares:
            shares = " and ".join(f"{share:.1%} of {name} steps" for name, share in x.shares.items())
            lines += ["", f"{x.engine}, {x.policy}: evictions take {shares}"]
    return "\n".join(lines)


def picture(found: list[Served], load: Load, path: Path) -> None:
    """Plot both policies over time, one column per engine: blocks held above, requests in flight below."""
    engines = list(dict.fromkeys(x.engine for x in found))
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots(2, len(engines), sharex="col", sharey="row", squeeze=False)
    gains = []
    for column, engine in zip(axes.T, engines):
        runs = [x for x in found if x.engine == engine]
        for x, color in zip(runs, ("#888888", "#1c4f91")):
            label = "full cache" if x.policy == "full" else x.policy.split(":")[0]
            for one, values in zip(column, (x.blocks, x.running)):
                one.step(x.times, values, where="post", color=color, label=label, lw=1.2)
        column[0].axhline(load.blocks, color="#333333", lw=0.8, ls=":")
        column[0].set_title(engine)
        column[1].set_xlabel("time, s")
        gains.append(f"{runs[0].seconds / runs[-1].seconds:.1f} times as fast with {engine}")
    axes[0, 0].set_ylabel(f"blocks held, of {load.blocks}")
    axes[1, 0].set_ylabel("requests in flight")
    axes[1, 0].legend(frameon=False, loc="upper right")
    total = load.prompt + load.generated
    common.title(
        figure,
        f"With eviction, requests finish {' and '.join(gains)}.\n"
        f"{load.requests} requests of {total:,} tokens in a pool that holds {load.full} full ones",
    )
    common.save(figure, path)


def serve(engine: str, spec: str, load: Load) -> Served:
    """Run an engine in a new process, because vLLM loads plugins once and engines leave threads behind."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "served.json"
        options = [f"--{name}={value}" for name, value in asdict(load).items()]
        command = [sys.executable, __file__, *options, f"--run={engine}", f"--policy={spec}", f"--json={path}"]
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if run.returncode:
            sys.exit(f"{run.stdout}\n{engine} with {spec} failed")
        return Served(**json.loads(path.read_text()))


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__ or "", picture="serving.png")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--full", type=int, default=8, help="requests that fit into the pool without eviction")
    parser.add_argument("--prompt", type=int, default=1280, help="prompt tokens, including the question")
    parser.add_argument("--generated", type=int, default=720, help="tokens to generate per request")
    parser.add_argument("--budget", type=int, default=512, help="tokens that KeyDiff keeps per request")
    parser.add_argument("--buffer", type=int, default=160, help="tokens beyond the budget that trigger an eviction")
    parser.add_argument("--run", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--policy", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    load = Load(args.requests, args.full, args.prompt, args.generated)
    if args.run:  # in the child process of one engine
        args.json.write_text(json.dumps(asdict(ENGINES[args.run](load, args.policy))))
        os._exit(0)  # skip the engines' own shutdown, in which threads may wait for each other
    found = []
    for engine in ENGINES:
        for spec in ("full", f"keydiff:budget={args.budget},buffer={args.buffer}"):
            print(f"{engine}, {spec} ...", file=sys.stderr)
            found.append(serve(engine, spec, load))
    print(table(found, load))
    picture(found, load, args.out / "serving.png")
    print(f"\nblocks and requests over time: {args.out / 'serving.png'}")
    if args.json:
        write(args.json, common.origin(__file__, argv) | {"load": asdict(load), "served": [x.numbers for x in found]})


if __name__ == "__main__":
    main()
