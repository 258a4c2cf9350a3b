"""The methods: each composes the operators as score -> select -> gather, and has an object for streaming."""

from .allocation import head_budgets
from .baselines import (
    L2,
    Full,
    Random,
    StreamingLLM,
    l2_compress,
    l2_compress_,
    random_compress,
    random_compress_,
    streamingllm_compress,
    streamingllm_compress_,
)
from .common import Compressed
from .h2o import H2O, TOVA, h2o_compress, h2o_compress_, tova_compress, tova_compress_
from .keydiff import KeyDiff, keydiff_compress, keydiff_compress_
from .lacache import LaCache, lacache_compress, lacache_compress_, lacache_coverage
from .lagkv import LagKV, lagkv_compress, lagkv_compress_
from .laq import LAQ, laq_compress, laq_compress_, recall
from .protokv import (
    SATKV,
    ProtoKV,
    lsh_projection,
    protokv_compress,
    protokv_compress_,
    satkv_compress,
    satkv_compress_,
)
from .snapkv import (
    ChunkKV,
    PyramidKV,
    SnapKV,
    chunkkv_compress,
    chunkkv_compress_,
    pyramidkv_budgets,
    pyramidkv_compress,
    pyramidkv_compress_,
    snapkv_compress,
    snapkv_compress_,
)

__all__ = [
    "ChunkKV",
    "Compressed",
    "Full",
    "H2O",
    "KeyDiff",
    "L2",
    "LAQ",
    "LaCache",
    "LagKV",
    "ProtoKV",
    "PyramidKV",
    "Random",
    "SATKV",
    "SnapKV",
    "StreamingLLM",
    "TOVA",
    "chunkkv_compress",
    "chunkkv_compress_",
    "h2o_compress",
    "h2o_compress_",
    "head_budgets",
    "keydiff_compress",
    "keydiff_compress_",
    "l2_compress",
    "l2_compress_",
    "lacache_compress",
    "lacache_compress_",
    "lacache_coverage",
    "lagkv_compress",
    "lagkv_compress_",
    "laq_compress",
    "laq_compress_",
    "lsh_projection",
    "protokv_compress",
    "protokv_compress_",
    "pyramidkv_budgets",
    "pyramidkv_compress",
    "pyramidkv_compress_",
    "random_compress",
    "random_compress_",
    "recall",
    "satkv_compress",
    "satkv_compress_",
    "snapkv_compress",
    "snapkv_compress_",
    "streamingllm_compress",
    "streamingllm_compress_",
    "tova_compress",
    "tova_compress_",
]
