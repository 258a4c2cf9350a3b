"""python -m kvops.analysis: measure the keys and queries of a model, and whether they are as the papers describe."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from ..bench.record import Refused, check_target, origin, write
from ..commands import Parser
from ..files import MODEL, TEXT
from . import report


def make_parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m kvops.analysis",
        description="Measure the keys and queries of a model: attention sinks, cosines, KeyDiff's bounds, locality.",
    )
    p.add_argument(
        "--model", default=str(MODEL), help="model folder, hub name, or smollm2 (default: the shipped passkey model)"
    )
    p.add_argument("--text", type=Path, default=TEXT, help="text to read (default: the shipped text)")
    p.add_argument("--tokens", type=int, default=1024, help="tokens of each piece of the text (default 1024)")
    p.add_argument("--prompts", type=int, default=4, help="pieces of the text (default 4)")
    p.add_argument("--sinks", type=int, default=4, help="first tokens that count as attention sinks (default 4)")
    p.add_argument("--seed", type=int, default=0, help="seed that chooses the pieces (default 0)")
    p.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    p.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto", help="dtype of the model"
    )
    p.add_argument("--json", type=Path, metavar="FILE", help="write every number, by layer and head")
    p.add_argument("--gate", action="store_true", help="exit with 1 unless all of the papers' conditions hold")
    return p


def main(argv: list[str] | None = None) -> int:
    p = make_parser()
    a = p.parse_args(argv)
    least = {"tokens": 4 * report.DISTANCE, "prompts": 1, "sinks": 1, "seed": 0}
    for name, low in least.items():
        if getattr(a, name) < low:
            p.error(f"--{name}: expected at least {low}, got {getattr(a, name)}")
    if a.sinks > a.tokens // 2:
        p.error(f"--sinks: expected at most {a.tokens // 2} (half of --tokens), got {a.sinks}")
    if not a.text.is_file():
        p.error(f"--text: expected a file, got {a.text}")
    try:
        if a.json:
            check_target("json", a.json)
        record = run(a, shlex.join(["python", "-m", "kvops.analysis", *(sys.argv[1:] if argv is None else argv)]))
        if a.json:
            write(a.json, record)
    except (Refused, OSError) as error:
        print(f"python -m kvops.analysis: {error}", file=sys.stderr)
        return 2
    print(report.markdown(record), end="")
    return int(a.gate and not all(x["holds"] for x in record["gate"].values()))


def run(a: argparse.Namespace, command: str) -> dict[str, Any]:
    """Return the record of a run."""
    import numpy as np

    from .. import hf
    from ..eval import models
    from ..eval.identity import described
    from ..eval.tasks import TASKS

    a.model = models.found(a.model)
    model, filler = models.load(a.model, a.text, a.dtype, a.device, lambda x, _: hf.use_attention(x.eval()))
    most = len(filler.first) + len(filler.ids)
    if a.tokens > most:
        raise Refused(f"--tokens: expected at most {most} (the length of --text), got {a.tokens}")
    pieces = TASKS["perplexity"]().prompts(filler, a.tokens, a.prompts, a.seed)
    layers = report.measure(model, np.stack([x.context for x in pieces]), a.sinks)
    if not layers:
        raise Refused(f"--model {a.model}: none of its layers has a KV cache that can evict")
    settings = {"model": described(a.model), "text": described(a.text), "dtype": a.dtype}
    settings |= {"tokens": a.tokens, "prompts": a.prompts, "sinks": a.sinks, "seed": a.seed}
    where = origin(*shlex.split(command), device=a.device.split(":")[0])
    return {"settings": settings, **where, "gate": report.gate(layers), "layers": layers}


if __name__ == "__main__":
    sys.exit(main())
