"""Writes the recorded runs of kvops.eval into the board, docs/board/index.html.

    python tools/board.py            # make tables
    python tools/board.py --check    # fail if the page is out of date

It shows every summary of kvops.eval in bench/results in which a model was measured, prompt by prompt where there is a
.jsonl file beside it. So synthetic.json is left out. The page itself is written by hand; see kvops/eval/board.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kvops.eval import board
from kvops.files import BOARD

RESULTS = Path(__file__).resolve().parents[1] / "bench/results"


def records() -> list[Path]:
    """Return the recorded runs: with every prompt, where there is such a file."""
    found = []
    for file in sorted(RESULTS.glob("*.json")):
        record = json.loads(file.read_text())
        if {"settings", "origins", "rows"} <= record.keys() and "model" in record["settings"]:
            lines = file.with_suffix(".jsonl")
            found.append(lines if lines.exists() else file)
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page would change")
    check = parser.parse_args(argv).check
    text = BOARD.read_text()
    made = board.with_data(text, board.board(board.sources(records())))
    if check and made != text:
        sys.exit(f"{BOARD.name} is out of date with bench/results; run python tools/board.py")
    if not check:
        BOARD.write_text(made)


if __name__ == "__main__":
    main()
