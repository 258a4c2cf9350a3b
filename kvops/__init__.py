"""kvops: PyTorch operators for KV-cache eviction, and the eviction methods of the papers built from them.

- `kvops.ops`: the operators, CUDA and CPU kernels that score, select and evict KV-cache entries.
- Methods: a policy such as `KeyDiff` for each, one-shot functions such as `keydiff_compress`, and `policy(name)`.
- `Cache`, `PagedCache`: caches that evict by a policy while tokens stream in.
- `attention`: FlashAttention with the log-sum-exp that query-based methods need.
- Imported on demand: `kvops.hf` (Hugging Face transformers), `kvops.vllm`, `kvops.analysis`, `kvops.eval` and
  `kvops.bench`.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036  (a checkout can be imported by any Python)
    raise ImportError(
        f"kvops needs Python >= 3.10, found {sys.version.split()[0]} ({sys.executable})",
        name=__name__,  # with it, `python -m kvops` prints the message without a traceback
    )

try:
    from . import _lib  # noqa: F401  (loads the operators)
except ImportError as error:
    from . import commands

    if commands.called():  # Python imports this package before the command
        sys.exit(commands.main(error=str(error)))
    error.name = error.name or __name__  # for `python -m kvops.eval`, as above
    raise

# ruff: noqa: E402  (after these checks)
from . import distributed, methods, ops
from ._lib import build_info, cmake_prefix_path, debug_checks, include_dir
from .cache import Cache, OutOfPages, PagedCache
from .methods import *  # noqa: F403
from .methods.functions import *  # noqa: F403  (mypy does not follow how methods.__all__ is made)
from .methods.table import *  # noqa: F403  (the same)
from .ops.flash_attention import attention, attention_backends
from .ops.int8 import dequantize_rows, quantize_rows
from .ops.ladder import LadderPlan, LadderState, lacache_plan
from .ops.rope import Rope
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
    "cmake_prefix_path",
    "debug_checks",
    "dequantize_rows",
    "distributed",
    "include_dir",
    "lacache_plan",
    "ops",
    "quantize_rows",
]
__all__ += methods.__all__

#: Public modules that the user imports: `import kvops.hf`.
_ON_DEMAND = ("analysis", "bench", "eval", "hf", "vllm")


def __dir__() -> list[str]:
    """The public names, and the public modules that have been imported."""
    return sorted([*__all__, *(name for name in ("methods", *_ON_DEMAND) if name in globals())])
