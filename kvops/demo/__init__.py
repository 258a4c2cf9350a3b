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

from ..files import CALIBRATION, MODEL, TEXT

__all__ = ["CALIBRATION", "MODEL", "TEXT"]
