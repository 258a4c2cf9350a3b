"""kvops: which KV-cache entries a language model keeps, and moving the kept ones. See `ops`, `methods`, `hf`."""

from . import _lib, distributed, methods, ops  # noqa: F401  (loads the operators first)
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
