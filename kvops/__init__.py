"""kvops: PyTorch operators for KV-cache eviction, and the eviction methods of the papers built from them.

- `kvops.ops`: the operators, CUDA and CPU kernels that score, select and evict KV-cache entries.
- Methods: a policy such as `KeyDiff` for each, one-shot functions such as `keydiff_compress`, and `policy(name)`.
- `Cache`, `PagedCache`: caches that evict by a policy while tokens stream in.
- `attention`: FlashAttention with the log-sum-exp that query-based methods need.
- Imported on demand: `kvops.hf` (Hugging Face transformers), `kvops.vllm`, `kvops.analysis`, `kvops.eval` and
  `kvops.bench`.
"""

from . import _lib, distributed, methods, ops  # noqa: F401  (importing _lib loads the operators)
from ._lib import build_info, debug_checks
from .cache import Cache, OutOfPages, PagedCache
from .flash_attention import attention, attention_backends
from .ladder import LadderPlan, LadderState, lacache_plan
from .methods import *  # noqa: F403
from .methods.shorthands import *  # noqa: F403  (mypy does not see them in methods.__all__)
from .rope import Rope
from .version import __version__

__all__ = [
    "Cache",
    "LadderPlan",
    "LadderState",
    "OutOfPages",
    "PagedCache",
    "Rope",
    "__version__",
    "attention",
    "attention_backends",
    "build_info",
    "debug_checks",
    "distributed",
    "lacache_plan",
    "ops",
]
__all__ += methods.__all__

#: Public modules that the user imports: `import kvops.hf`.
_ON_DEMAND = ("analysis", "bench", "eval", "hf", "reference", "vllm")


def __dir__() -> list[str]:
    """The public names, and the public modules that have been imported."""
    return sorted([*__all__, *(name for name in ("methods", *_ON_DEMAND) if name in globals())])
