"""The small model and the texts that come with the library. `kvops.demo` has them too, under the same names."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_WHEEL = _PACKAGE / "demo_files"  # setup.py copies the files there
_FILES = _WHEEL if _WHEEL.is_dir() else _PACKAGE.parent / "bench"

#: A folder that `from_pretrained` loads.
MODEL = _FILES / "models" / "passkey-llama"
#: English text and source code, 267 kB.
TEXT = _FILES / "data" / "haystack.txt"
#: English text that is not in `TEXT`, 14 kB: Python's history and license. `kvops.hf.for_model` calibrates with it.
CALIBRATION = _FILES / "data" / "LICENSE-python.txt"
#: The board: the page that `python -m kvops.eval --board` copies, with the recorded runs.
BOARD = (_WHEEL if _WHEEL.is_dir() else _PACKAGE.parent / "docs") / "board" / "index.html"
