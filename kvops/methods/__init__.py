"""The methods: each composes the operators as score -> select -> gather, and has an object for streaming."""

from .baselines import (
    Full,
    Random,
    StreamingLLM,
    random_compress,
    random_compress_,
    streamingllm_compress,
    streamingllm_compress_,
)
from .common import Compressed
from .keydiff import KeyDiff, keydiff_compress, keydiff_compress_
from .lagkv import LagKV, lagkv_compress, lagkv_compress_
from .laq import laq_compress, laq_compress_, recall
from .snapkv import (
    chunkkv_compress,
    chunkkv_compress_,
    pyramidkv_budgets,
    pyramidkv_compress,
    pyramidkv_compress_,
    snapkv_compress,
    snapkv_compress_,
)

__all__ = [
    "Compressed",
    "Full",
    "KeyDiff",
    "LagKV",
    "Random",
    "StreamingLLM",
    "chunkkv_compress",
    "chunkkv_compress_",
    "keydiff_compress",
    "keydiff_compress_",
    "lagkv_compress",
    "lagkv_compress_",
    "laq_compress",
    "laq_compress_",
    "pyramidkv_budgets",
    "pyramidkv_compress",
    "pyramidkv_compress_",
    "random_compress",
    "random_compress_",
    "recall",
    "snapkv_compress",
    "snapkv_compress_",
    "streamingllm_compress",
    "streamingllm_compress_",
]
