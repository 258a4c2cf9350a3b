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

__all__ = [
    "Compressed",
    "Full",
    "KeyDiff",
    "LagKV",
    "Random",
    "StreamingLLM",
    "keydiff_compress",
    "keydiff_compress_",
    "lagkv_compress",
    "lagkv_compress_",
    "random_compress",
    "random_compress_",
    "streamingllm_compress",
    "streamingllm_compress_",
]
