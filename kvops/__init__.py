"""kvops: which KV-cache entries a language model keeps, and moving the kept ones. See `ops`, `methods`, `hf`."""

from . import _lib, ops  # noqa: F401  (loads the operators first)
from ._lib import build_info, debug_checks
from .cache import Cache
from .flash_attention import attention, attention_backends
from .ladder import LadderPlan, LadderState, lacache_plan
from .methods import *  # noqa: F403
from .methods import __all__ as _methods
from .rope import Rope
from .version import __version__

__all__ = [
    "Cache",
    "LadderPlan",
    "LadderState",
    "Rope",
    "__version__",
    "attention",
    "attention_backends",
    "build_info",
    "debug_checks",
    "lacache_plan",
    "ops",
    *_methods,
]
