"""The demo (`python -m kvops demo`), and the small model and the text that it, the examples and `kvops.eval` use.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvops import demo

model = AutoModelForCausalLM.from_pretrained(demo.MODEL)
tokenizer = AutoTokenizer.from_pretrained(demo.MODEL)
text = demo.TEXT.read_text()
```

The model is a byte-level Llama with 2.4 million parameters, trained to find passkeys in a text. It compares methods and
needs no download; it says little about large models. bench/models/passkey-llama/README.md describes it.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["CALIBRATION", "MODEL", "TEXT"]

_PACKAGE = Path(__file__).resolve().parents[1]
_WHEEL = _PACKAGE / "demo_files"  # setup.py copies the files there
_FILES = _WHEEL if _WHEEL.is_dir() else _PACKAGE.parent / "bench"

#: A folder that `from_pretrained` loads.
MODEL = _FILES / "models" / "passkey-llama"
#: English text and source code, 267 kB.
TEXT = _FILES / "data" / "haystack.txt"
#: English text that is not in `TEXT`, 14 kB: Python's history and license. `Policy.for_model` calibrates with it.
CALIBRATION = _FILES / "data" / "LICENSE-python.txt"
