"""Compare kvops' attention in vLLM's CPU backend (KVOPS_VLLM_ATTENTION=1) with vLLM's own, layer by layer and whole.

    OMP_NUM_THREADS=1 python bench/experiments/vllm_attention.py [--model FOLDER] [--json FILE]  # vLLM 0.32's CPU build

Both run in turns, and the medians of their CPU times are compared: these do not depend on other work on the machine.
The first table times one layer of a step, writes included, in turn in so many layers that their caches exceed the
processor's. Rows with "H2O" include the scores that H2O adds up in decode: kvops' attention returns them, and beside
vLLM's they take a pass over the keys of their own. With --model, the second table times the steps of two engines, which
generate from random prompts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from types import SimpleNamespace
from typing import Any

import torch

import common
from kvops.bench.columns import aligned
from kvops.bench.measure import cpu_seconds
from kvops.bench.record import write

HEADS = {"32/8, d 128": (32, 8, 128), "9/3, d 64": (9, 3, 64)}  # query and KV heads
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BYTES = 200_000_000  # of all layers' caches together
NAMES = ("vLLM", "kvops")


def steps(most: int) -> dict[str, tuple[int, int, int]]:
    """Return requests, new tokens and all tokens of each kind of step."""
    return {
        f"decode at {most // 8}": (1, 1, most // 8),
        f"decode at {most // 8}, 8 requests": (8, 1, most // 8),
        f"decode at {most}": (1, 1, most),
        f"prompt of {most // 16}": (1, most // 16, most // 16),
        f"prompt of {most // 4}": (1, most // 4, most // 4),
        f"last {most // 4} of {most}": (1, most // 4, most),
    }


def time_layer(
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    step: tuple[int, int, int],
    rounds: int,
    page: int,
    scores: bool = False,
) -> dict[str, float]:
    """Return the CPU seconds of a step's layer. scores: with those that H2O adds up."""
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from kvops import H2O
    from kvops._lib import probe_read
    from kvops.cache.queries import AllQueries, Batch, LayerMemory
    from kvops.cache.schedule import Schedule
    from kvops.vllm import attention
    from kvops.vllm.cpu_attn import OwnImpl
    from kvops.vllm.layouts import Tiles
    from kvops.vllm.plan import Plan
    from kvops.vllm.steps import Step

    (query_heads, kv_heads, d), (requests, new, total) = heads, step
    pages = -(-total // page)
    table = torch.randperm(requests * pages).int().view(requests, pages)
    layers = -(-BYTES // (table.numel() * kv_heads * page * 2 * d * dtype.itemsize)) if new == 1 else 1
    caches = [torch.randn(table.numel(), kv_heads, page, 2 * d).to(dtype) for _ in range(layers)]
    q, k, v = (torch.randn(requests * new, x, d).to(dtype) for x in (query_heads, kv_heads, kv_heads))
    slots = torch.arange(total - new, total)
    starts = torch.arange(0, requests * new + 1, new, dtype=torch.int32)
    common_metadata = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.full((requests,), total, dtype=torch.int32),
        num_reqs=requests,
        num_actual_tokens=requests * new,
        max_query_len=new,
        max_seq_len=total,
        block_table_tensor=table,
        slot_mapping=(table[:, slots // page] * page + slots % page).flatten().long(),
    )
    config = SimpleNamespace(
        parallel_config=None,
        model_config=SimpleNamespace(dtype=dtype, get_num_attention_heads=lambda _: query_heads),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    spec = FullAttentionSpec(block_size=page, num_kv_heads=kv_heads, head_size=d, dtype=dtype)
    builder = attention.Builder(spec, [], config, torch.device("cpu"))
    metadata = builder.build(0, common_metadata)
    layer = SimpleNamespace(
        isa=builder.isa, _k_scale_float=1.0, _v_scale_float=1.0, layer_name="model.layers.0.self_attn.attn"
    )
    options = (query_heads, d, d**-0.5, kv_heads, None, None, "auto")
    stock, out = CPUAttentionBackendImpl(*options), torch.empty_like(q)
    own, memories, look = attention.Impl(*options), [None] * layers, None
    if scores:
        rule, lengths = H2O(total + 1), torch.full((requests,), total)
        plan = Plan(Schedule(rule), page)
        memories = [LayerMemory(cache.shape[:3], plan.kinds, cache.device) for cache in caches]
        for memory in memories:
            memory.slots["scores"].zero_()
        batch = Batch(table, starts[:-1].long(), lengths - new, lengths)
        look = AllQueries(rule, page).step(batch, [], table, lengths)
        own = OwnImpl.__new__(OwnImpl)  # without an engine's configuration
        attention.Impl.__init__(own, *options)
        own._num_layers, metadata.adds_up, metadata.step = 1, True, Step(plan, None, [])

    def as_vllm():
        for cache, memory in zip(caches, memories):
            stock.do_kv_cache_update(layer, k, v, cache, metadata.slot_mapping)
            stock.forward(layer, q, k, v, cache, metadata, out)
            if look is not None:
                look(memory, q, Tiles(cache, layer.isa).keys, {"scale": d**-0.5})

    def as_kvops():
        for cache, memory in zip(caches, memories):
            own._memory = memory
            own.forward(layer, q, k, v, cache, metadata, out)

    def read():
        for cache in caches:
            probe_read(cache, 1)

    calls = dict(zip(NAMES, (as_vllm, as_kvops))) | ({} if new > 1 else {"read": read})
    found = {name: x / layers for name, x in cpu_seconds(calls, rounds).items()}
    return found | ({} if new > 1 else {"bytes": caches[0].numel() * dtype.itemsize})


def time_layers(most: int, rounds: int, page: int) -> list[dict]:
    from vllm.config import VllmConfig, set_current_vllm_config

    torch.cpu._init_amx()  # asks Linux for AMX, which an engine's first product does; vLLM's kernel would crash without
    config, found = VllmConfig(), []
    with set_current_vllm_config(config), torch.inference_mode():
        for heads, shape in HEADS.items():
            for dtype, of in DTYPES.items():
                config.model_config = SimpleNamespace(dtype=of)
                for step, sizes in ({f"decode at {4 * most}": (1, 1, 4 * most)} | steps(most)).items():
                    for scores in (False, True)[: 1 + (sizes[1] == 1)]:
                        found.append({"heads": heads, "dtype": dtype, "step": step + ", H2O" * scores})
                        found[-1] |= time_layer(shape, of, sizes, rounds, page, scores)
                        print(found[-1], file=sys.stderr)
    return found


def engine(name: str, args: argparse.Namespace) -> common.Engine:
    command = [__file__, "--model", str(args.model), "--dtype", args.dtype, "--most", str(args.most), "--child"]
    return common.Engine([*command, "--page", str(args.page)], {"KVOPS_VLLM_ATTENTION": str(NAMES.index(name))})


def serve(args: argparse.Namespace) -> None:
    def prompts(llm: Any, load: dict) -> list[list[int]]:
        generator, words = torch.Generator().manual_seed(load["seed"]), llm.model_config.get_vocab_size()
        shape = load["requests"], load["tokens"]
        return torch.randint(words, shape, generator=generator).tolist()

    common.serve(
        prompts,
        model=str(args.model),
        dtype=args.dtype,
        max_model_len=args.most,
        block_size=args.page,
        max_num_batched_tokens=max(64, args.most // 4),
    )


def time_engines(args: argparse.Namespace) -> list[dict]:
    """Time engines with the model. Prompts repeat in decode, so that vLLM finds their prefix in its cache."""
    engines = {name: engine(name, args) for name in NAMES}
    found = []
    try:
        for step, (requests, new, total) in steps(args.most - 64).items():
            if args.only not in step:
                continue
            if new != 1 and new != total:
                requests, new, total = 1, total, total  # a whole prompt, in several steps
                step = f"prompt of {total}"
            load = {"requests": requests, "tokens": total, "generated": 33 if new == 1 else 1}
            seeds = (1 if new == 1 else 2 + i for i in range(args.rounds + 1))
            seconds = common.engines_in_turns(engines, [load | {"seed": x} for x in seeds])
            found.append({"step": step})
            for name, rounds in seconds.items():
                found[-1][name] = statistics.median(
                    x for own in rounds for x in (own[-32:] if new == 1 else [sum(own)])
                )
            print(found[-1], file=sys.stderr)
    finally:
        for x in engines.values():
            x.end()
    return found


def table(found: list[dict]) -> str:
    labels = [name for name, x in found[0].items() if isinstance(x, str)]
    rows = [[*labels, *NAMES, "kvops / vLLM", "GB/s", "read"]]
    for x in found:
        times = [f"{1e3 * x[name]:.3g} ms" for name in NAMES]
        rates = [f"{x['bytes'] / x[name] / 1e9:.3g}" if "bytes" in x else "" for name in ("kvops", "read")]
        rows.append([*(x[name] for name in labels), *times, f"{x['kvops'] / x['vLLM']:.2f}", *rates])
    return aligned(rows)


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__ or "", redraws=False)
    parser.add_argument("--model", help="folder of a model for whole engines")
    parser.add_argument("--dtype", default="bfloat16", help="of the model")
    parser.add_argument("--most", type=int, default=8192, help="the largest number of tokens")
    parser.add_argument("--page", type=int, default=128, help="tokens per block")
    parser.add_argument("--only", default="", help="whole engines only run the steps with this in their names")
    parser.add_argument("--rounds", type=int, default=5, help="timed turns")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        return serve(args)
    record = {"layers": time_layers(args.most, args.rounds, args.page)}
    print(table(record["layers"]))
    if args.model:
        record["engines"] = time_engines(args)
        print("\n" + table(record["engines"]))
    if args.json:
        write(args.json, common.origin(__file__, argv) | record)


if __name__ == "__main__":
    main()
