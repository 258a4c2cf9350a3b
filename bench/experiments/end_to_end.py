"""Measure time to first token, time per output token and memory of a model of Llama-3-8B's shape with random weights.

    python bench/experiments/end_to_end.py [--device cuda] [--layers 32] [--contexts 4112 8208 ...] [--out FOLDER]

LagKV's measurement (Sec. 3.5, Fig. 5-7): read a prompt of 4096, 8192, ... tokens and S = 16 more for the sinks in
chunks (S + 2 L tokens, then L = 1024 at a time), with the full cache and with LagKV keeping 1/2 ... 1/8 of each
partition. Then generate 30 tokens. For the ratios of --whole, also read the prompt at once. Memory is the cache after
the prompt, and the peak minus the weights.

KeyDiff's measurement (Sec. 4.5, Fig. 7): read the prompt in blocks of 64, 128 or 256 tokens under a budget.

Decode: read a prompt at once under that budget, or with transformers' DynamicCache and sdpa attention. Then generate
more tokens than any buffer, so that the times include evictions.

Compared cells run in turns, each repetition once through all of them. Times are medians; cells that --seconds leaves no
time for are listed. With fewer than 32 layers the vocabulary shrinks in proportion, so that its part of the work stays
the same. Draws end_to_end.png.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache

import common
import kvops
import kvops.hf
from common import GROUP, HEAD_DIM, HEADS, LAYERS, MLP, VOCABULARY, wait_for
from kvops.bench.columns import aligned
from kvops.bench.record import write
from kvops.ops.lag import kept_length

SINKS = 16
OBSERVED = 32  # SnapKV's window
FULL = "full cache"
DYNAMIC = "DynamicCache, sdpa"
DECODED = 96  # least number of new tokens of the decode cells
COLORS = ["#9a9a9a", "#bc6c25", "#2a6f97", "#52a675", "#8d5a97", "#d1495b", "#e9a03b", "#444444"]


@dataclass(frozen=True)
class Cell:
    """Something to measure."""

    prefill: str  # "chunked", "whole", "blocks of 64"
    context: int  # tokens of the prompt
    name: str
    policy: kvops.Policy | None  # None: DynamicCache and sdpa
    first: int  # tokens of the prompt in the first call
    then: int  # tokens in each later call
    new_tokens: int = 0

    def __str__(self) -> str:
        return f"{self.name}, {self.context:,} tokens, {self.prefill}"


def cells(
    contexts: list[int],
    ratios: list[int],
    whole: list[int],
    lag: int,
    new_tokens: int,
    blocks: list[int],
    block_context: int,
    budget: int,
) -> list[Cell]:
    """Return all cells in the order of measurement."""
    rivals = {
        FULL: kvops.Full(),
        "StreamingLLM": kvops.StreamingLLM(budget),
        "KeyDiff": kvops.KeyDiff(budget),
        "TOVA": kvops.TOVA(budget),
        "SnapKV": kvops.SnapKV(budget, OBSERVED),
    }
    found = [
        Cell(f"blocks of {size}", block_context, name, method, size, size)
        for size in blocks
        for name, method in rivals.items()
    ]
    decoders = {
        DYNAMIC: None,
        **rivals,
        "StreamingLLM, original positions": kvops.StreamingLLM(budget, positions="original"),
        "H2O": kvops.H2O(budget),
        "LagKV": kvops.LagKV(budget // 8, budget / block_context),
        "ProtoKV": kvops.ProtoKV(budget),
    }
    if blocks:
        n, new = block_context, max(DECODED, new_tokens)
        found += [Cell("decode", n, name, method, n, n, new) for name, method in decoders.items()]
    lagkv = {FULL: kvops.Full(), **{f"LagKV {r}x": kvops.LagKV(lag, 1 / r, sinks=SINKS) for r in ratios}}
    at_once = {FULL, *(f"LagKV {r}x" for r in whole)} if whole else set()
    for n in contexts:
        found += [Cell("chunked", n, name, x, SINKS + 2 * lag, lag, new_tokens) for name, x in lagkv.items()]
        found += [Cell("whole", n, name, x, n, n, new_tokens) for name, x in lagkv.items() if name in at_once]
    return found


def kept(n: int, lag: int, ratio: int) -> int:
    """Return the tokens that LagKV keeps of n (Eq. 10)."""
    return kept_length(n, SINKS, lag, int(lag / ratio))


def layers_that_fit(heads: int, tokens: int, dtype: torch.dtype) -> int:
    """Return how many layers fit on the GPU, with a full cache of `tokens` tokens and the prefill's activations."""
    width, size = heads * HEAD_DIM, dtype.itemsize
    mlp = heads * MLP // HEADS
    activations = tokens * (3 * mlp + 8 * width) * size
    weights = width * (2 * width + 2 * width // GROUP + 3 * mlp + 2 * VOCABULARY // LAYERS) * size
    cache = 2 * tokens * width // GROUP * size
    free = torch.cuda.mem_get_info()[0]
    return max(1, min(LAYERS, int((0.9 * free - activations) / (weights + 2 * cache))))  # twice: growing copies it


def pieces(cell: Cell) -> Iterator[slice]:
    """Yield the parts of the prompt, one per call."""
    yield slice(0, cell.first)
    for begin in range(cell.first, cell.context, cell.then):
        yield slice(begin, begin + cell.then)


class Peak:
    """The peak memory since construction minus the memory in use then, in bytes; None if it cannot be measured."""

    def __init__(self, device: str):
        self.cuda = device == "cuda"
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
            return
        try:
            ctypes.CDLL(None).malloc_trim(0)  # return what earlier cells freed
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
            self.before = self._of_process("VmRSS")
        except (OSError, AttributeError):  # no Linux, no glibc, or not allowed
            self.before = None

    @staticmethod
    def _of_process(name: str) -> int:
        return 1024 * int(re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[1])

    def bytes(self) -> int | None:
        if self.before is None:
            return None
        return (torch.cuda.max_memory_allocated() if self.cuda else self._of_process("VmHWM")) - self.before


@torch.inference_mode()
def sample(model: transformers.PreTrainedModel, cell: Cell, ids: Tensor) -> dict:
    """Run a cell once; return seconds and bytes. ids: the prompt, [1, context]."""
    device = ids.device.type
    peak = Peak(device)
    model.set_attn_implementation("sdpa" if cell.policy is None else "kvops")
    cache = DynamicCache() if cell.policy is None else kvops.hf.KVCache(model.config, cell.policy)
    wait_for(device)
    begin = time.perf_counter()
    for part in pieces(cell):
        logits = model(ids[:, part], past_key_values=cache, logits_to_keep=1).logits
    token = logits.argmax(-1)
    wait_for(device)
    found = {"ttft_s": time.perf_counter() - begin, **held(cache), "peak_bytes": peak.bytes()}
    if cell.new_tokens:
        begin = time.perf_counter()
        for _ in range(cell.new_tokens):
            token = model(token, past_key_values=cache).logits.argmax(-1)
        wait_for(device)
        found["tpot_s"] = (time.perf_counter() - begin) / cell.new_tokens
    return found


def held(cache: DynamicCache) -> dict:
    """Return the tokens and bytes of a cache."""
    if isinstance(cache, kvops.hf.KVCache):
        stats = cache.stats()
        return {
            "kept": max(x.tokens_kept for x in stats),
            "bytes_kept": sum(x.bytes_kept for x in stats),
            "bytes_full": sum(x.bytes_full for x in stats),
        }
    size = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    return {"kept": cache.get_seq_length(), "bytes_kept": size, "bytes_full": size}


def run(
    model: transformers.PreTrainedModel,
    todo: list[Cell],
    repeats: int,
    seconds: float | None,
    save: Callable[[list[dict], list[str]], None],
) -> tuple[list[dict], list[str]]:
    """Return a row for each cell measured in time, and the names of the others. `save` gets both after each sample."""
    started = time.monotonic()
    device = model.device
    generator = torch.Generator("cpu").manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, max(x.context for x in todo)), generator=generator).to(device)
    for cell in {x.name: x for x in todo}.values():  # the first calls load and compile
        size = min(cell.context, cell.first + cell.then) if device.type == "cuda" else 128
        sample(model, Cell("", size, cell.name, cell.policy, 64, 64, min(2, cell.new_tokens)), ids[:, :size])
    rows: dict[Cell, dict] = {}
    samples: dict[Cell, list[dict]] = {x: [] for x in todo}

    def left_out() -> list[str]:
        return [str(x) for x in todo if x not in rows]

    with tqdm(total=len(todo) * repeats, leave=False, disable=None) as bar:
        for _ in range(repeats):  # in turns, so that changes of the machine's speed affect all alike
            for cell in todo:
                bar.set_postfix_str(str(cell))
                bar.update()
                if (seconds and time.monotonic() - started > seconds) or "error" in rows.get(cell, {}):
                    continue
                try:
                    samples[cell].append(sample(model, cell, ids[:, : cell.context]))
                    rows[cell] = row(cell, samples[cell])
                except torch.OutOfMemoryError as error:  # the other cells continue
                    rows[cell] = {**named(cell), "error": str(error).splitlines()[0]}
                save(list(rows.values()), left_out())
    return [rows[x] for x in todo if x in rows], left_out()


def named(cell: Cell) -> dict:
    return {"prefill": cell.prefill, "context": cell.context, "method": cell.name}


def row(cell: Cell, samples: list[dict]) -> dict:
    """Return the medians of a cell's samples, and each sample's seconds."""
    return {
        **named(cell),
        "samples": len(samples),
        **{x: None if samples[0][x] is None else statistics.median(y[x] for y in samples) for x in samples[0]},
        "each": {x: [y[x] for y in samples] for x in samples[0] if x.endswith("_s")},
    }


def ratio(r: dict) -> int:
    """Return the compression ratio of a LagKV row; 1 for the full cache."""
    return 1 if r["method"] == FULL else int(r["method"].removeprefix("LagKV ").removesuffix("x"))


def compare(rows: list[dict], lag: int) -> None:
    """Add to each row the speedup over the full cache, and for LagKV the tokens of Eq. 10.

    The speedup is the median, least and greatest of the repetitions' ratios, because the machine's speed drifts.
    """
    base = {
        (r["prefill"], r["context"]): r
        for r in rows
        if r["method"] == (DYNAMIC if r["prefill"] == "decode" else FULL) and "error" not in r
    }
    for r in rows:
        full = base.get((r["prefill"], r["context"]))
        if "error" in r:
            continue
        if r["method"].startswith("LagKV "):
            r["kept_eq_10"] = kept(r["context"], lag, ratio(r))
        if full:
            r["speedup"] = {
                x.removesuffix("_s"): spread(b / a for a, b in zip(seconds, full["each"][x]))
                for x, seconds in r["each"].items()
            }


def spread(values: Iterable[float]) -> list[float]:
    """Return the median, the least and the greatest of the values."""
    values = list(values)
    return [statistics.median(values), min(values), max(values)]


def table(rows: list[dict]) -> str:
    lines = [("prefill", "context", "", "TTFT s", "", "TPOT ms", "", "cache MB", "of full", "peak MB")]
    for r in rows:
        head = (r["prefill"], f"{r['context']:,}", r["method"])
        if "error" in r:
            lines.append((*head, r["error"], *[""] * 6))
            continue
        faster = {x: f"{y[0]:.2f}x" for x, y in r.get("speedup", {}).items()}
        lines.append(
            (
                *head,
                f"{r['ttft_s']:.3f}",
                faster.get("ttft", ""),
                f"{1e3 * r['tpot_s']:.2f}" if "tpot_s" in r else "",
                faster.get("tpot", ""),
                f"{r['bytes_kept'] / 1e6:.1f}",
                f"{r['bytes_kept'] / r['bytes_full']:.1%}",
                "" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 1e6:.0f}",
            )
        )
    return aligned(lines, left=(0, 2))


def picture(rows: list[dict], title: str, path: Path) -> None:
    """Draw Fig. 5-7 of LagKV, a line for each context, and Fig. 7 of KeyDiff, a line for each method."""
    from matplotlib.figure import Figure

    from kvops.eval.labels import label_ends

    rows = [r for r in rows if "error" not in r]
    figure = Figure(figsize=(8, 6.4), layout="constrained")
    axes = figure.subplots(2, 2).flat
    panels = (
        ("ttft_s", 1.0, "time to first token, s"),
        ("tpot_s", 1e3, "time per output token, ms"),
        ("bytes_kept", 1e-6, "cache after the prompt, MB"),
    )
    contexts = sorted({r["context"] for r in rows if r["prefill"] in ("chunked", "whole")})
    thin = dict(lw=1.3, ms=4)
    for axis, (key, unit, label) in zip(axes, panels):
        ends = []
        for context, color in zip(contexts, COLORS[1:]):
            for prefill, style in (("chunked", "o-"), ("whole", "s--"))[: 2 if key == "ttft_s" else 1]:
                of = [r for r in rows if (r["prefill"], r["context"]) == (prefill, context)]
                if of:
                    axis.plot([ratio(r) for r in of], [unit * r[key] for r in of], style, color=color, **thin)
                    name = f"{context // 1024}K" if context % 1024 == 0 else f"{context:,}"
                    name += "" if prefill == "chunked" else ", one chunk"
                    ends.append((ratio(of[-1]), unit * of[-1][key], name, color))
        axis.set(xlabel="compression by LagKV (1: full cache)", ylabel=label, ylim=(0, None))
        ratios = sorted({ratio(r) for r in rows if r["prefill"] == "chunked"})
        axis.set_xticks(ratios, [f"{x}x" for x in ratios])
        label_ends(axis, ends, 2.2, size=8)
    blocks, ends = [r for r in rows if r["prefill"].startswith("blocks")], []
    for name, color in zip(dict.fromkeys(r["method"] for r in blocks), COLORS):
        of = [r for r in blocks if r["method"] == name]
        sizes = [int(r["prefill"].removeprefix("blocks of ")) for r in of]
        axes[3].plot(sizes, [r["ttft_s"] for r in of], "o-", color=color, **thin)
        ends.append((sizes[-1], of[-1]["ttft_s"], name, color))
    axes[3].set(xlabel="tokens per block of the prompt", ylabel="time to first token, s", ylim=(0, None))
    if blocks:
        axes[3].set_xscale("log", base=2)
        axes[3].set_xticks(sorted(set(sizes)), [str(x) for x in sorted(set(sizes))])
        axes[3].set_title(f"prompt of {blocks[0]['context']:,} tokens in blocks", fontsize=9)
        label_ends(axes[3], ends, 2.2, size=8)
    last = [r for r in rows if contexts and (r["prefill"], r["context"]) == ("chunked", contexts[-1])]
    if last and "speedup" in last[-1] and ratio(last[-1]) > 1 and last[-1]["samples"] > 1:  # one run shows no speedup
        r = last[-1]
        first, later = (f"{r['speedup'][x][0]:.2g}x" for x in ("ttft", "tpot"))
        finding = f"{r['method']} at {r['context']:,} tokens: first token {first} and later tokens {later} sooner, "
        finding += f"with {100 * r['bytes_kept'] / r['bytes_full']:.0f} % of the cache. {title}"
    else:
        finding = title
    common.title(figure, finding)
    common.save(figure, path)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = common.parser(__doc__, picture="end_to_end.png")
    parser.set_defaults(out=None)  # draws only if --out is given
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, help="layers (default: as many as fit, up to 32; 1 on a CPU)")
    parser.add_argument("--heads", type=int, default=HEADS, help="query heads; all widths scale with it")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument(
        "--contexts", type=int, nargs="*", default=[4096 * i + SINKS for i in range(1, 6)], metavar="TOKENS"
    )
    parser.add_argument("--ratios", type=int, nargs="+", default=[2, 4, 6, 8], help="LagKV keeps 1/ratio")
    parser.add_argument(
        "--whole", type=int, nargs="*", help="ratios to measure also with the prompt read at once (default: the last)"
    )
    parser.add_argument("--lag", type=int, default=1024, help="L, tokens of LagKV's partitions")
    parser.add_argument("--new-tokens", type=int, default=30)
    parser.add_argument("--blocks", type=int, nargs="*", default=[64, 128, 256], help="tokens per block of the prompt")
    parser.add_argument("--block-context", type=int, default=4096, help="tokens of the prompt read in blocks")
    parser.add_argument("--budget", type=int, default=1024, help="tokens that the methods keep of it")
    parser.add_argument("--repeats", type=int, help="default: 3")
    parser.add_argument("--seconds", type=float, help="start no cell after this many seconds")
    a = parser.parse_args(argv)
    if a.record:
        return a
    cuda = a.device == "cuda"
    a.whole = a.ratios[-1:] if a.whole is None else a.whole
    a.repeats = 3 if a.repeats is None else a.repeats
    least = {"layers": 1, "contexts": 1, "lag": 1, "new_tokens": 1, "ratios": 2, "blocks": OBSERVED, "repeats": 1}
    for name, low in least.items():
        values = getattr(a, name)
        for x in values if isinstance(values, list) else [] if values is None else [values]:
            if x < low:
                parser.error(f"--{name.replace('_', '-')} must be at least {low}, got {x}")
    if a.heads < GROUP or a.heads % GROUP:
        parser.error(f"--heads must be a multiple of {GROUP}, got {a.heads}")
    if missing := [x for x in a.whole if x not in a.ratios]:
        parser.error(f"--whole must be among --ratios {a.ratios}, got {missing[0]}")
    if not OBSERVED < a.budget < a.block_context:
        wanted = f"more than {OBSERVED} and less than --block-context {a.block_context}"
        parser.error(f"--budget must be {wanted}, got {a.budget}")
    if not a.contexts and not a.blocks:
        parser.error("nothing to measure: --contexts and --blocks are empty")
    if cuda and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU")
    return a


def title_of(shape: str, dtype: str, device: str) -> str:
    return f"{shape}, {dtype}, {device}"


def redraw(file: Path, out: Path) -> None:
    """Draw a record that --json wrote."""
    record = json.loads(file.read_text())
    device = "cuda" if "gpu" in record["machine"] else "cpu"
    picture(record["rows"], title_of(record["shape"], record["dtype"], device), out / "end_to_end.png")
    print(f"wrote {out / 'end_to_end.png'}")


def main(argv: list[str] | None = None) -> None:
    a = arguments(argv)
    if a.record:
        redraw(a.record, a.out or Path())
        return
    dtype, longest = getattr(torch, a.dtype), max([*a.contexts, a.block_context])
    if a.layers is None:
        a.layers = layers_that_fit(a.heads, longest, dtype) if a.device == "cuda" else 1
    shape = "Llama-3-8B's shape, random weights"
    if a.layers < LAYERS or a.heads < HEADS:
        shape += f" (scaled: {a.layers} of {LAYERS} layers"
        shape += f", {a.heads} of {HEADS} heads and widths alike)" if a.heads < HEADS else ")"
    title = title_of(shape, a.dtype, a.device)
    print(title)
    vocabulary = VOCABULARY * a.layers // LAYERS
    model = common.random_llama(a.layers, a.heads, vocabulary, longest + a.new_tokens, a.device, dtype)
    todo = cells(a.contexts, a.ratios, a.whole, a.lag, a.new_tokens, a.blocks, a.block_context, a.budget)
    settings = ("layers", "heads", "dtype", "lag", "ratios", "new_tokens", "block_context", "budget", "repeats")
    record = {
        **common.origin(__file__, argv, a.device),
        "shape": shape,
        **{x: getattr(a, x) for x in settings},
        "vocabulary": vocabulary,
        "weight_bytes": sum(x.nbytes for x in model.parameters()),
    }

    def save(rows: list[dict], left_out: list[str]) -> None:
        compare(rows, a.lag)
        if a.json:
            write(a.json, {**record, "rows": rows, "left_out": left_out})

    rows, left_out = run(model, todo, a.repeats, a.seconds, save)
    save(rows, left_out)
    print(table(rows))
    for x in left_out:
        print(f"not measured for lack of time: {x}")
    if a.json:
        print(f"wrote {a.json}")
    if a.out and rows:
        picture(rows, title, a.out / "end_to_end.png")
        print(f"wrote {a.out / 'end_to_end.png'}")


if __name__ == "__main__":
    main()
