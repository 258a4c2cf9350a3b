"""Endless streams: a long text streams through a model whose cache has a fixed budget.

    python bench/experiments/endless.py [--model FOLDER] [--text FILE] [--tokens 100000] [--budget 512] [--out .]

As in LaCache's Table 1, Fig. 5 and 6, the script measures perplexity by position, bytes of the cache, and time for the
full cache, StreamingLLM and LaCache. The text arrives in windows of `--window` tokens (the paper's protocol for PG19).
With `--token-by-token` it also arrives one token at a time (its protocol for Wikitext), without the full cache. Then
`--streams` shorter pieces of the text give confidence intervals of the differences. Draws endless.png.

--model is a folder with a transformers model and its tokenizer; by default the demo's, with text that it was not
trained on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from torch import Tensor

import common
import kvops
import kvops.hf
from kvops.bench.record import write
from kvops.demo import passkeys
from kvops.eval.labels import label_ends
from kvops.eval.stream import Stream, stream

LENGTHS = [1024 * 2**i for i in range(7)]  # columns of the table, up to the length of the stream
BIN = 1024  # tokens per point of the picture
COLORS = ["#9a9a9a", "#bc6c25", "#2a6f97", "#52a675", "#8d5a97", "#d1495b"]


def through(model, make: Callable[[], kvops.hf.KVCache], ids: Tensor, window: int, label: str) -> Stream:
    return stream(model, make(), ids, window, label)


def methods(
    model, budget: int, ladders: list[tuple[int, int, str]], storages: list[str]
) -> dict[str, Callable[[], kvops.hf.KVCache]]:
    """Return a cache factory for each row. Without ladders: the paper's default for the model's layers."""
    cache = partial(kvops.hf.KVCache, model.config)
    rows = {"full cache": partial(cache, kvops.Full())}
    if not ladders:
        shape = kvops.lacache_plan(0, num_layers=model.config.num_hidden_layers, budget=budget).ladder
        ladders = [(shape.span, shape.overlap, "paper")]
    for storage in storages:
        suffix = "" if storage == "pre_rope" else f", {storage}"
        rows[f"StreamingLLM{suffix}"] = partial(cache, kvops.StreamingLLM(budget, buffer=1), storage=storage)
        for span, overlap, pattern in ladders:
            policy = kvops.LaCache(budget, span=span, overlap=overlap, pattern=pattern)
            name = f"LaCache, S {span}, O {overlap}" + (f", {pattern}" if pattern != "paper" else "")
            rows[f"{name}{suffix}"] = partial(cache, policy, storage=storage)
    return rows


def ladder(text: str) -> tuple[int, int, str]:
    """Read "S,O" or "S,O,pattern"."""
    span, overlap, *pattern = text.split(",")
    return int(span), int(overlap), *(pattern or ["paper"])  # type: ignore[return-value]


def perplexity(losses: np.ndarray) -> float:
    return float(np.exp(losses.mean()))


def table(streams: dict[str, Stream], tokens: int) -> str:
    """Return the perplexity of the first n tokens, like the paper's Table 1."""
    lengths = [x for x in LENGTHS if x < tokens] + [tokens]
    width = max(map(len, streams))
    lines = [f"{'tokens':{width}}" + "".join(f"{x:>9,}" for x in lengths) + "   cache MB  ms/token"]
    for name, x in streams.items():
        values = "".join(f"{perplexity(x.losses[:, : n - 1]):9.3f}" for n in lengths)
        lines.append(f"{name:{width}}{values}{x.bytes[-1] / 1e6:11.2f}{1e3 * x.seconds.sum() / tokens:10.2f}")
    return "\n".join(lines)


def differences(streams: dict[str, Stream]) -> dict[str, dict[str, float]]:
    """Return mean loss minus StreamingLLM's on the same pieces, in nats per token, with half its 95 % interval."""
    base = next(x for name, x in streams.items() if name.startswith("StreamingLLM")).losses.mean(1)
    found = {}
    for name, x in streams.items():
        difference = x.losses.mean(1) - base
        spread = float(1.96 * difference.std(ddof=1) / np.sqrt(len(difference))) if len(difference) > 1 else np.nan
        found[name] = {"perplexity": perplexity(x.losses), "difference": float(difference.mean()), "interval": spread}
    return found


def by_position(x: Stream) -> dict[str, list[float]]:
    """Return the curves of the picture, a point for each BIN tokens."""
    per = max(1, BIN // x.window)
    losses = x.losses.mean(0)
    return {
        "loss": [float(losses[i : i + BIN].mean()) for i in range(0, len(losses), BIN)],
        "bytes": [int(x.bytes[i : i + per].max()) for i in range(0, len(x.bytes), per)],
        "ms_per_token": [
            float(1e3 * np.median(x.seconds[i : i + per]) / x.window) for i in range(0, len(x.seconds), per)
        ],
    }


def picture(record: dict, path: Path) -> None:
    """Draw perplexity, bytes and time by position, one above the other."""
    curves, budget = record["long"], record["budget"]
    figure = Figure(figsize=(8, 6.6), layout="constrained")
    axes = figure.subplots(3, 1, sharex=True)
    panels = (
        ("loss", np.exp, "perplexity"),
        ("bytes", lambda x: x / 1e6, "cache, MB"),
        ("ms_per_token", lambda x: x, "ms per token"),
    )
    for axis, (key, of, label) in zip(axes, panels):
        ends = []
        for (name, curve), color in zip(curves.items(), COLORS):
            y = of(np.array(curve[key]))
            x = np.arange(len(y)) * BIN / 1000
            axis.plot(x, y, color=color, lw=1.2)
            ends.append((x[-1], y[-1], name, color))
        axis.set(ylabel=label, yscale="log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_locator(NullLocator())
        axis.set_xlim(0, x[-1])
        label_ends(axis, ends, 1.8)
    axes[-1].set_xlabel("position in the stream, thousand tokens")
    full, *bounded = (curve["loss"][-1] for curve in curves.values())
    low, high = (f"{x:.1f}" for x in (np.exp(min(bounded)), np.exp(max(bounded))))
    common.title(
        figure,
        f"With {budget} tokens in the cache, perplexity after {record['tokens']:,} tokens is "
        f"{low if low == high else f'{low} to {high}'}, with the full cache {np.exp(full):.0f}",
    )
    common.save(figure, path)


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, picture="endless.png")
    common.add_model(parser, common.TEXT)
    parser.add_argument("--tokens", type=int, default=100_000, help="tokens of the long stream")
    parser.add_argument("--budget", type=int, default=512, help="tokens that the bounded caches keep")
    parser.add_argument("--window", type=int, default=256, help="tokens per window")
    parser.add_argument("--token-by-token", action="store_true", help="also stream one token at a time")
    parser.add_argument("--streams", type=int, default=8, help="number of shorter pieces, for the intervals")
    parser.add_argument("--stream-tokens", type=int, default=8192, help="tokens per shorter piece")
    parser.add_argument(
        "--ladders", nargs="*", default=None, metavar="S,O", help="span and overlap of LaCache, or S,O,pattern"
    )
    storages = ["pre_rope", "post_rope"]
    parser.add_argument(
        "--storage", nargs="+", choices=storages, default=storages[:1], help="storage of the bounded caches"
    )
    a = parser.parse_args(argv)
    if a.record:
        picture(common.load(parser, a.record, "long", "budget", "tokens"), a.out / "endless.png")
        print(f"wrote {a.out / 'endless.png'}")
        return
    ladders = (
        ["1,0", "2,0,short"] if a.ladders is None and a.model.resolve() == common.MODEL else a.ladders or []
    )  # the only ones with 3 layers
    model, text = passkeys.load_model(a.model, a.device, a.dtype), common.load_text(a.model, a.text, a.device)
    if text.shape[1] < max(a.tokens, a.streams * a.stream_tokens):
        parser.error(f"--text has {text.shape[1]:,} tokens, too few for --tokens, or --streams of --stream-tokens")
    rows = methods(model, a.budget, [ladder(x) for x in ladders], a.storage)

    long = {name: through(model, make, text[:, : a.tokens], a.window, name) for name, make in rows.items()}
    print(f"perplexity of the first tokens, budget {a.budget}, windows of {a.window}")
    print(table(long, a.tokens))
    settings = {x: getattr(a, x) for x in ("tokens", "budget", "window", "streams", "stream_tokens", "dtype")}
    record = {**common.origin(__file__, argv), **settings}
    record["long"] = {name: by_position(x) for name, x in long.items()}
    record["perplexity"] = {name: perplexity(x.losses) for name, x in long.items()}
    picture(record, a.out / "endless.png")
    if a.token_by_token:
        single = {
            name: through(model, make, text[:, : a.tokens], 1, name)
            for name, make in rows.items()
            if name != "full cache"
        }
        print("\nthe same, token by token (not the full cache, whose time grows with the square of the length)")
        print(table(single, a.tokens))
        record["token by token"] = {name: by_position(x) for name, x in single.items()}
        record["perplexity, token by token"] = {name: perplexity(x.losses) for name, x in single.items()}
    if a.streams > 1:
        step = (text.shape[1] - a.stream_tokens) // (a.streams - 1)
        pieces = torch.cat([text[:, i * step : i * step + a.stream_tokens] for i in range(a.streams)])
        short = {name: through(model, make, pieces, a.window, name) for name, make in rows.items()}
        record["pieces"] = differences(short)
        print(f"\n{a.streams} pieces of {a.stream_tokens:,} tokens: loss minus StreamingLLM's, nats per token")
        width = max(map(len, short))
        for name, x in record["pieces"].items():
            print(f"{name:{width}} perplexity {x['perplexity']:.3f}   {x['difference']:+.4f} ± {x['interval']:.4f}")
    print(f"\nwrote {a.out / 'endless.png'}")
    if a.json:
        write(a.json, record)


if __name__ == "__main__":
    main()
