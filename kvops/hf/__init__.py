"""Hugging Face transformers: a cache that compresses itself, and an attention function, for `model.generate`. ::

    import kvops.hf

    with kvops.hf.compress(model, kvops.SnapKV(1024)):
        model.generate(**inputs)  # a fresh cache for each call

Or with a cache of one's own: ::

    model = kvops.hf.use_attention(model)  # for the policies that look at queries
    cache = kvops.hf.KVCache(model.config, kvops.SnapKV(1024))
    model.generate(**inputs, past_key_values=cache)

Each full-attention layer holds a `kvops.Cache` under a policy. `update()` stores, and lets it evict: the step's
attention still reads every key and value that was there, then only the kept ones are stored. transformers counts in two
ways, and both stay right: `get_seq_length()` is the logical length (positions, what a second turn still has to feed),
`get_mask_sizes()` says that the stored slots are the last ones before the query.

With the attention of transformers its own masks serve: all stored slots are older than the query, so causal masks are
exact; and when a row's padding is evicted first, in slot order, what is left of it lies just where the padding mask
looks. That needs every row to keep the same number of slots in every layer (`fixed_budget`, `uniform_layers`).

With the library's attention (`use_attention`) no mask is made: where transformers asks for the mask of evicting layers,
it gets an object that only the library's attention can read, once it is sure that the mask would be causal. `update()`
leaves word of its step in a thread-local, where the attention function finds the layer that the keys came from. The
layer's cache knows its padding, sees the queries, and computes the attention with the scores it needs. That serves
every policy. What is not understood raises: keys that no cache returned, other masks, unknown arguments.

Keys and queries come rotated at their logical positions. Policies that give tokens the positions of their slots get the
step's position_ids and the model's rotary embedding (`model_rope`), and turn both to where they want them.

Modules: `cache` (the cache and its layers), `attention` (the library's attention and its masks), `rope` (`model_rope`),
`compression` (`compress`, `generate`), `generation` (`lookahead`), `drafts` (prompt lookup and assisted decoding),
`batching` and `allocator` (`continuous_batching`), `architectures` (which models are served). Nothing else in kvops
imports transformers.
"""

MIN_TRANSFORMERS = "5.5.0"  # the oldest that the tests run with; the Makefile reads it here

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
from . import drafts as drafts
from . import turns as turns
from .attention import use_attention
from .batching import continuous_batching
from .cache import EvictingLayer, KVCache, LayerStats, Stage
from .compression import Compression, compress, generate
from .generation import decode_greedily, lookahead
from .rope import model_rope

__all__ = [
    "Compression",
    "EvictingLayer",
    "KVCache",
    "LayerStats",
    "Stage",
    "compress",
    "continuous_batching",
    "decode_greedily",
    "generate",
    "lookahead",
    "model_rope",
    "use_attention",
]
