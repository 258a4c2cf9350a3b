"""KV-cache eviction for Hugging Face transformers: caches and an attention function for `model.generate`.

```python
import kvops.hf

with kvops.hf.compress(model, kvops.SnapKV(1024)):
    model.generate(**inputs)  # a fresh cache for each call
```

Or with a cache of your own:

```python
model = kvops.hf.use_attention(model)  # for policies that use queries
cache = kvops.hf.KVCache(model.config, kvops.SnapKV(1024))
model.generate(**inputs, past_key_values=cache)
```

Each full-attention layer holds a `kvops.Cache` with the policy. `update()` stores the new tokens and lets the policy
evict. The step's attention still reads every key and value that was cached; afterwards only the kept ones remain.
transformers counts tokens in two ways, and both stay correct. `get_seq_length()` returns the logical length, which
determines positions and what a second turn still has to feed. `get_mask_sizes()` reports the stored slots as the last
ones before the query.

With the attention of transformers, its own masks serve. All stored slots are older than the query, so causal masks are
exact. A row's padding is evicted first, in slot order, so the padding that is left lies where the padding mask hides
it. This requires every row to keep the same number of slots in every layer (`fixed_budget`, `uniform_layers`).

With the library's attention (`use_attention`) there is no mask. When transformers requests the mask of evicting layers,
the library checks that it would be causal and returns an object that only the library's attention can read. `update()`
records its step in a thread-local, where the attention function finds the layer that the keys came from. The layer's
cache knows its padding, sees the queries, and computes the attention together with the scores it needs. This supports
every policy. Whatever the attention does not understand raises: keys that no cache returned, other masks, unknown
arguments.

Keys and queries arrive rotated at their logical positions. Policies that place tokens at the positions of their slots
get the step's position_ids and the model's rotary embedding (`model_rope`), and rotate both to their slots.

Modules:

- `cache`: the cache and its layers
- `attention`: the library's attention and its masks
- `rope`: `model_rope`
- `statistics`: `query_statistics`
- `compression`: `compress`, `generate`
- `generation`: `lookahead`, `repeat`
- `drafts`: prompt lookup and assisted decoding
- `weights`: `output_weights`
- `shares`: `head_shares`, `retrieval_shares`
- `duo`: `duo_shares`
- `passkeys`: `passkey_texts`
- `gates`: `gate_data`
- `gradients`: what KVgrad needs of a pass
- `inputs`: what attention modules are called with, for policies that read it
- `conversation`: which tokens and which padding a cache has seen
- `turns`: what `generate` shows of a conversation
- `patches`: the two methods of transformers that are wrapped
- `arguments`: the arguments of calls, and the name of the cache among them
- `batching`, `allocator`, `query_hook`: `continuous_batching`
- `architectures`: which models are supported

Nothing else in kvops imports transformers.
"""

from ..supported import TRANSFORMERS

MIN_TRANSFORMERS = TRANSFORMERS.oldest

try:
    import transformers
    from packaging.version import Version
except ImportError:
    raise ImportError(
        f"kvops.hf needs transformers >= {MIN_TRANSFORMERS}, which is not installed: pip install -U transformers"
    ) from None
if Version(transformers.__version__) < Version(MIN_TRANSFORMERS):
    raise ImportError(
        f"kvops.hf needs transformers >= {MIN_TRANSFORMERS}, found {transformers.__version__}: "
        "pip install -U transformers"
    )

# ruff: noqa: E402  (after the check of the version)
from . import drafts as drafts  # `patches` wraps methods by their functions
from . import turns as turns
from .attention import use_attention
from .batching import continuous_batching
from .cache import EvictingLayer, KVCache, LayerStats, Stage
from .compression import Compression, compress, generate
from .duo import duo_shares
from .gates import gate_data
from .generation import decode_greedily, lookahead, repeat, repeat_prompts
from .passkeys import PasskeyTexts, passkey_texts
from .requirements import for_model
from .rope import model_rope
from .shares import head_shares, retrieval_shares
from .statistics import query_statistics
from .weights import output_weights

__all__ = [
    "Compression",
    "EvictingLayer",
    "KVCache",
    "LayerStats",
    "PasskeyTexts",
    "Stage",
    "compress",
    "continuous_batching",
    "decode_greedily",
    "duo_shares",
    "for_model",
    "gate_data",
    "generate",
    "lookahead",
    "model_rope",
    "repeat",
    "repeat_prompts",
    "head_shares",
    "passkey_texts",
    "retrieval_shares",
    "query_statistics",
    "output_weights",
    "use_attention",
]
