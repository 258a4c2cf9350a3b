"""Serve a real model from a block pool that is too small, with and without eviction: throughput and answers.

    make serve-demo                                                  # or, in an environment with vLLM 0.32's CPU build:
    python bench/experiments/serving.py [--policies SPEC ...] [--engines vllm transformers] [--requests 12]
                                        [--json FILE]

Many requests arrive at once. Each prompt is a text (bench/data) that hides a five-digit key and ends with a question
for it, in the model's chat template. The pool has blocks for a few of the requests. The script serves them several
times, each time in a new process: with every policy, in each engine. Model, prompts, pool and tokens per step are the
same. It prints a table and one answer of each run, and plots blocks held and requests in flight over time.

The model is SmolLM2-135M-Instruct, which comes from the package index (`kvops.eval.smollm2`). `--model` names the
folder of another; without a chat template its prompts are plain text.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import transformers
from matplotlib.figure import Figure

import common
from kvops.bench.record import write
from kvops.demo import TEXT
from kvops.eval.smollm2 import smollm2

BLOCK = 32  # tokens
CHUNK = 256  # tokens per step
DIGITS = 5
POLICIES = ("full", "snapkv:budget=512,window=32", "keydiff:budget=512")
NEEDLE = " The secret number is {}. Remember it. "
QUESTION, ANSWER = "What is the secret number?", "The secret number is"


@dataclass
class Load:
    """The workload and the pool size."""

    model: str  # a folder
    requests: int
    full: int  # requests that fit into the pool without eviction
    prompt: int  # tokens of the text around the key; the template and the question come on top
    generated: int  # tokens

    @cached_property
    def tokenizer(self) -> Any:
        transformers.utils.logging.set_verbosity_error()  # the text is longer than the model's context, on purpose
        return transformers.AutoTokenizer.from_pretrained(self.model)

    @cached_property
    def keys(self) -> list[str]:
        """The digits that each request should retrieve."""
        draw = random.Random(0)
        return ["".join(draw.choices("0123456789", k=DIGITS)) for _ in range(self.requests)]

    @cached_property
    def prompts(self) -> list[list[int]]:
        """The token ids of each prompt. The keys lie at evenly spaced depths."""
        text = self.tokenizer(TEXT.read_text(), add_special_tokens=False).input_ids
        found = []
        for i, key in enumerate(self.keys):
            start = i * (len(text) - self.prompt) // self.requests
            depth = start + self.prompt * i // max(self.requests - 1, 1)
            before, after = (self.tokenizer.decode(x) for x in (text[start:depth], text[depth : start + self.prompt]))
            found.append(self.asked(before + NEEDLE.format(key) + after))
        return found

    def asked(self, text: str) -> list[int]:
        """Return the token ids of a prompt that asks for the key in a text, and begins the answer."""
        if self.tokenizer.chat_template is None:
            return self.tokenizer(f"{text} {QUESTION} {ANSWER}").input_ids
        messages = [{"role": "user", "content": f"{text}\n\n{QUESTION}"}]
        chat = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(chat + ANSWER, add_special_tokens=False).input_ids

    @property
    def longest(self) -> int:
        """The length of the longest request, in tokens."""
        return max(map(len, self.prompts)) + self.generated

    @property
    def blocks(self) -> int:
        return self.full * -(-self.longest // BLOCK)

    @property
    def tokens(self) -> int:
        """The tokens of all prompts and answers."""
        return sum(map(len, self.prompts)) + self.requests * self.generated


@dataclass
class Served:
    """The results of one engine with one policy. The lists have one entry per sample of the engine's state."""

    engine: str
    policy: str
    seconds: float = 0.0
    answers: list[str] = field(default_factory=list)
    right: int = 0  # requests with the correct digits
    preemptions: int = 0
    times: list[float] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)

    @property
    def numbers(self) -> dict:
        """The table's numbers and the answers, for the JSON file."""
        lists = {"in_flight": self.running, "blocks_held": self.blocks}
        counts = {f"{name}_{of}": f(x) for name, x in lists.items() for of, f in (("mean", self.mean), ("most", max))}
        return {
            x: getattr(self, x) for x in ("engine", "policy", "seconds", "right", "preemptions", "answers")
        } | counts

    def look(self, seconds: float, blocks: int, running: int) -> None:
        self.times.append(seconds)
        self.blocks.append(blocks)
        self.running.append(running)

    def mean(self, values: list[int]) -> float:
        """Return the time-weighted mean: each value lasts until the next sample."""
        spans = [b - a for a, b in zip(self.times, self.times[1:])]
        return sum(x * span for x, span in zip(values, spans)) / sum(spans)

    def answered(self, tokens: list[list[int]], load: Load) -> None:
        """Store the answers, which end where the model ends them, and count the right ones."""
        assert all(len(x) == load.generated for x in tokens)
        end = load.tokenizer.eos_token_id
        cut = [x[: x.index(end)] if end in x else x for x in tokens]
        self.answers = [ANSWER + load.tokenizer.decode(x) for x in cut]
        self.right = sum(f"{ANSWER} {key}" in x for x, key in zip(self.answers, load.keys))


# ---- engines ----


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

    from kvops.vllm import plugin

    plugin.register()  # vLLM does this by itself where kvops is installed
    llm = LLM(
        model=load.model,
        dtype="auto",
        max_model_len=load.longest,
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
    sampling = SamplingParams(max_tokens=load.generated, temperature=0, ignore_eos=True)
    llm.generate([{"prompt_token_ids": load.prompts[0][:CHUNK]}], SamplingParams(max_tokens=8), use_tqdm=False)
    served, answers, preempted = Served("vLLM", spec), dict[str, list[int]](), dict[str, int]()
    for i, prompt in enumerate(load.prompts):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, sampling)
    begin = time.perf_counter()
    while engine.has_unfinished_requests():
        for out in engine.step():
            if out.finished:
                answers[out.request_id] = list(out.outputs[0].token_ids)
        preempted |= {name: x.num_preemptions for name, x in scheduler.requests.items()}
        held = load.blocks - pool.get_num_free_blocks()
        served.look(time.perf_counter() - begin, held, len(scheduler.running))
    served.seconds, served.preemptions = time.perf_counter() - begin, sum(preempted.values())
    served.answered([answers[str(i)] for i in range(load.requests)], load)
    return served


def with_transformers(load: Load, spec: str) -> Served:
    import kvops.hf

    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(load.model, dtype="auto").eval()
    config = transformers.ContinuousBatchingConfig(
        num_blocks=load.blocks, page_size=BLOCK, max_batch_tokens=CHUNK, allow_block_sharing=False
    )
    greedy = transformers.GenerationConfig(
        max_new_tokens=load.generated, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    served, begin = Served("transformers", spec), time.perf_counter()
    evicting = nullcontext() if spec == "full" else kvops.hf.continuous_batching(model, spec)
    with evicting, model.continuous_batching_context_manager(greedy, continuous_batching_config=config) as manager:
        manager.add_request(load.prompts[0][:CHUNK], request_id="warm", max_new_tokens=8)
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
            manager.add_requests(load.prompts, max_new_tokens=load.generated)
            answers = dict[str, list[int]]()
            while len(answers) < load.requests:
                if (out := manager.get_result(timeout=1)) is not None:
                    if out.error:
                        raise RuntimeError(out.error)
                    answers[out.request_id] = out.generated_tokens
            served.seconds = time.perf_counter() - begin
    order = sorted(answers, key=lambda name: int(name.rsplit("_", 1)[-1]))
    served.answered([answers[x] for x in order], load)
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
        f"{load.requests} requests of up to {load.longest:,} tokens, {load.generated} of them generated; a pool of "
        f"{load.blocks} blocks of {BLOCK} tokens, enough for {load.full} full requests",
        "",
        f"{'':46}{'in flight':>18}{'blocks held':>18}{'':>13}{'':>10}{'':>14}",
        f"{'engine':14}{'policy':32}{'mean':>9}{'max':>9}{'mean':>9}{'max':>9}{'preemptions':>13}{'tokens/s':>10}"
        f"{'correct keys':>14}",
    ]
    for x in found:
        lines.append(
            f"{x.engine:14}{x.policy:32}{x.mean(x.running):9.1f}{max(x.running):9}{x.mean(x.blocks):9.0f}"
            f"{max(x.blocks):9}{x.preemptions:13}{load.tokens / x.seconds:10,.0f}{f'{x.right} of {load.requests}':>14}"
        )
    asked = load.requests // 2
    lines += ["", f"the answers of request {asked}, whose key is {load.keys[asked]}:"]
    lines += [f"{x.engine:14}{x.policy:32}{' '.join(x.answers[asked].split())[:80]}" for x in found]
    return "\n".join(lines)


def picture(found: list[Served], load: Load, path: Path) -> None:
    """Plot the policies over time, one column per engine: blocks held above, requests in flight below."""
    engines = list(dict.fromkeys(x.engine for x in found))
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots(2, len(engines), sharex="col", sharey="row", squeeze=False)
    gains = []
    for column, engine in zip(axes.T, engines):
        first, *others = (x for x in found if x.engine == engine)
        for x, color in zip((first, *others), ("#888888", "#1c4f91", "#c4622d", "#3c8a4e", "#7a4fa3")):
            for one, values in zip(column, (x.blocks, x.running)):
                one.step(x.times, values, where="post", color=color, label=name_of(x), lw=1.2)
        column[0].axhline(load.blocks, color="#333333", lw=0.8, ls=":")
        column[0].set_title(engine)
        column[1].set_xlabel("time, s")
        gains += [f"{first.seconds / x.seconds:.1f} times as fast with {name_of(x)} in {engine}" for x in others]
    axes[0, 0].set_ylabel(f"blocks held, of {load.blocks}")
    axes[1, 0].set_ylabel("requests in flight")
    axes[1, 0].legend(frameon=False, loc="upper right")
    common.title(
        figure,
        f"Requests finish {', '.join(gains)}.\n"
        f"{load.requests} requests of {load.longest:,} tokens in a pool that holds {load.full} full ones",
    )
    common.save(figure, path)


def name_of(served: Served) -> str:
    return "full cache" if served.policy == "full" else served.policy.split(":")[0]


def serve(engine: str, spec: str, load: Load) -> Served:
    """Run an engine in a new process, because vLLM loads plugins once and engines leave threads behind."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "served.json"
        options = [f"--{name}={value}" for name, value in asdict(load).items()]
        command = [sys.executable, __file__, *options, f"--run={engine}", f"--policies={spec}", f"--json={path}"]
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if run.returncode:
            sys.exit(f"{run.stdout}\n{engine} with {spec} failed")
        return Served(**json.loads(path.read_text()))


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__ or "", picture="serving.png", redraws=False)
    parser.add_argument("--model", type=Path, help="folder of a model and its tokenizer; by default SmolLM2")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["vllm"])
    parser.add_argument("--policies", nargs="+", default=POLICIES, metavar="SPEC", help="the first is compared with")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--full", type=int, default=4, help="requests that fit into the pool without eviction")
    parser.add_argument("--prompt", type=int, default=1500, help="tokens of the text that hides a key")
    parser.add_argument("--generated", type=int, default=64, help="tokens to generate per request")
    parser.add_argument("--run", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    model = args.model or smollm2()
    load = Load(str(model), args.requests, args.full, args.prompt, args.generated)
    if args.run:  # in the child process of one engine
        args.json.write_text(json.dumps(asdict(ENGINES[args.run](load, *args.policies))))
        os._exit(0)  # skip the engines' own shutdown, in which threads may wait for each other
    found = []
    for engine in args.engines:
        for spec in args.policies:
            print(f"{engine}, {spec} ...", file=sys.stderr)
            found.append(serve(engine, spec, load))
    print(table(found, load))
    picture(found, load, args.out / "serving.png")
    print(f"\nblocks and requests over time: {args.out / 'serving.png'}")
    if args.json:
        workload = asdict(load) | {"model": model.name, "blocks": load.blocks, "tokens": load.tokens}
        workload |= {"keys": load.keys}
        write(args.json, common.origin(__file__, argv) | {"load": workload, "served": [x.numbers for x in found]})


if __name__ == "__main__":
    main()
