"""Measure what LAQ adds to a prefill: kvops' own part, and the lookahead steps, eager and as one CUDA graph.

    python bench/experiments/laq_cost.py [--device cuda] [--tokens 32768] [--layers 32] [--budget 1024] [--json FILE]

The stack has the shape of Llama-3-8B and random weights; on a CPU it is one of the 32 layers, with a 32nd of the
vocabulary. LAQ's own part is everything that kvops does for it: the observation of stage 1, two selections and gathers,
and the scores of the lookahead queries. A step of decode is measured with the full cache and with the budget's tokens
(LAQ, Table 3).
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

import common
import kvops
import kvops.hf
from common import median_seconds
from kvops.bench.record import write

GOALS = {"own part": 0.01, "own part and lookahead, one CUDA graph": 0.10}  # fractions of the prefill


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """Capture a call as a CUDA graph; return its replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@torch.inference_mode()
def measure(device: str, tokens: int, layers: int, heads: int, budget: int, repeats: int) -> dict[str, float]:
    """Return the seconds of each part."""
    vocabulary = common.VOCABULARY * layers // common.LAYERS
    model = common.random_llama(layers, heads, vocabulary, tokens, device, torch.bfloat16)
    ids = torch.randint(vocabulary, (1, tokens), device=device, generator=torch.Generator(device).manual_seed(0))

    def prefill(policy: kvops.Policy) -> tuple[kvops.hf.KVCache, Tensor]:
        cache = kvops.hf.KVCache(model.config, policy)
        return cache, model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]

    def copied(cache: kvops.hf.KVCache, copy_of: Callable[[kvops.Cache], kvops.Cache]) -> kvops.hf.KVCache:
        other = copy.copy(cache)
        other.layers = [layer.with_cache(copy_of(layer.cache)) for layer in cache.layers]
        return other

    cache, logits = prefill(kvops.LAQ(budget))

    def draft() -> kvops.hf.KVCache:
        return copied(cache, lambda x: x.draft())

    def look(drafted: kvops.hf.KVCache) -> kvops.hf.KVCache:
        """Run the steps on a copy: they replace the caches' tensors and never write to them."""
        steps = copied(drafted, copy.copy)
        kvops.hf.decode_greedily(model, steps, logits, None, [], cache.policy.steps)
        return steps

    drafted = draft()
    looked = look(drafted)

    def evict() -> None:
        for layer, ahead in zip(cache.layers, looked.layers):
            copy.copy(layer.cache).evict(copy.copy(ahead.cache))

    found = {
        "prefill": median_seconds(lambda: prefill(kvops.Full()), device, 3),
        "own part": median_seconds(draft, device, repeats) + median_seconds(evict, device, repeats),
        "lookahead, eager": median_seconds(lambda: look(drafted), device, repeats),
    }
    if device == "cuda":
        found["lookahead, one CUDA graph"] = median_seconds(captured(lambda: look(drafted)), device, repeats)
    for name, policy in (("full cache", kvops.Full()), ("the budget", kvops.SnapKV(budget))):
        held, _ = prefill(policy)
        step = median_seconds(lambda held=held: model(ids[:, :1], past_key_values=held), device, 4 * repeats)
        found[f"a step of decode, {name}"] = step
    return found


def report(seconds: dict[str, float]) -> str:
    """Return each part's time and its fraction of the prefill."""
    lines = [f"{name:42} {1e3 * x:10.2f} ms {100 * x / seconds['prefill']:9.2f} %" for name, x in seconds.items()]
    graph = seconds.get("lookahead, one CUDA graph")
    if graph is not None:  # the goals apply to a GPU
        for name, x in zip(GOALS, (seconds["own part"], seconds["own part"] + graph)):
            share, goal = x / seconds["prefill"], GOALS[name]
            lines.append(
                f"{'reached' if share < goal else 'MISSED '}  {name}: < {goal:.0%} of the prefill: {share:.2%}"
            )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, help="tokens of the prompt (default 32768; on the CPU 8192)")
    parser.add_argument("--layers", type=int, help="layers (default 32; on the CPU 1)")
    parser.add_argument("--heads", type=int, default=common.HEADS, help="query heads; all widths scale with it")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    a = parser.parse_args(argv)
    cuda = a.device == "cuda"
    tokens, layers = a.tokens or (32768 if cuda else 8192), a.layers or (common.LAYERS if cuda else 1)
    seconds = measure(a.device, tokens, layers, a.heads, a.budget, a.repeats)
    print(f"{layers} layers, {tokens:,} tokens, budget {a.budget:,}, on {a.device}")
    print(report(seconds))
    if a.json:
        record = common.origin(__file__, argv, a.device)
        write(a.json, {**record, "tokens": tokens, "layers": layers, "budget": a.budget, "seconds": seconds})


if __name__ == "__main__":
    main()
