"""Check that a trained model is in the regime of the papers: exit status 0 if all conditions hold, else 1.

    python gate.py --model DIR/model --json DIR/gate.json

The conditions on keys and queries are those of `python -m kvops.analysis --gate`, measured on held-out text. The rest are
here: the full cache finds needles, and so does SnapKV with a tenth of it when the question is known.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvops.analysis import report
from kvops.demo import TEXT
from kvops.eval.methods import rule
from kvops.eval.models import load
from kvops.eval.reader import Reader
from kvops.eval.tasks import TASKS, Filler

NEEDLES = ("needle", "niah-single", "niah-multikey")
FULL = 0.9  # the full cache's least score
SHARE, OF_FULL = 0.1, 0.9  # SnapKV's budget, and its least fraction of the full cache's score
BATCH = 8


def needles(reader: Reader, filler: Filler, context: int, count: int) -> dict[str, dict[str, float]]:
    """Return the fraction of the digits that the full cache and SnapKV get right, by task; cut after the question."""
    found: dict[str, dict[str, float]] = {}
    for name in NEEDLES:
        prompts = TASKS[name]().prompts(filler, context, count, seed=0)
        found[name] = {}
        for method, budget in (("full", None), ("snapkv", round(SHARE * context))):
            scores: list[float] = []
            for i in range(0, count, BATCH):
                outcome = TASKS[name]().run(reader, filler, prompts[i : i + BATCH], rule(method), budget, "after")
                scores += outcome.scores["partial"]
            found[name][method] = float(np.mean(scores))
    return found


def check(scores: dict[str, dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Return the conditions on the scores of `needles`, each with its value and whether it holds."""
    full = min(x["full"] for x in scores.values())
    ratio = min(x["snapkv"] / max(x["full"], 1e-9) for x in scores.values())
    return {
        "full cache": {
            "expected": f"digits that the full cache gets right, in each task: at least {FULL}",
            "value": full,
            "holds": full >= FULL,
        },
        "snapkv": {
            "expected": f"SnapKV's score at {SHARE:.0%} of the full cache's, in each task: at least {OF_FULL}",
            "value": ratio,
            "holds": ratio >= OF_FULL,
        },
    }


def run(model: str, context: int, prompts: int, text: Path) -> dict[str, Any]:
    """Measure a model and return the record: settings, conditions, scores, and each layer's measurements."""
    reader, filler = load(model, text, "float32", "cpu", Reader)
    pieces = TASKS["perplexity"]().prompts(filler, context, 4, seed=0)
    layers = report.measure(reader.model, np.stack([x.context for x in pieces]))
    scores = needles(reader, filler, context, prompts)
    settings = {"model": model, "text": text.name, "context": context, "prompts": prompts}
    return {"settings": settings, "gate": report.gate(layers) | check(scores), "needles": scores, "layers": layers}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--context", type=int, default=2048, help="tokens of a prompt (default 2048)")
    parser.add_argument("--prompts", type=int, default=64, help="prompts per task (default 64)")
    parser.add_argument("--text", type=Path, default=TEXT, help="held-out text (default: the demo's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record")
    options = parser.parse_args(argv)
    record = run(options.model, options.context, options.prompts, options.text)
    for name, x in record["gate"].items():
        print(f"{'holds' if x['holds'] else 'FAILS'}  {name}: {x['value']:.3f}  ({x['expected']})")
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(not all(x["holds"] for x in record["gate"].values()))


if __name__ == "__main__":
    sys.exit(main())
