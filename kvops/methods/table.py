"""The table of all methods of the library, for evaluation, plots, docs, demo and tests. `methods.registry` looks up."""

from __future__ import annotations

from .attention_matching import AttentionMatching
from .baselines import L2, Full, Random, StreamingLLM
from .criticalkv import CriticalKV
from .defensivekv import DefensiveKV
from .expected_attention import ExpectedAttention
from .h2o import H2O, TOVA
from .keydiff import KeyDiff
from .kvzap import KVzap
from .kvzip import KVzip
from .lacache import LaCache
from .lagkv import LagKV
from .laq import LAQ
from .protokv import SATKV, ProtoKV
from .registry import METHODS, Entry
from .rkv import RKV
from .snapkv import ChunkKV, PyramidKV, SnapKV
from .triattention import TriAttention
from .vase import VaSE

__all__ = [
    "METHODS",
    "AttentionMatching",
    "ChunkKV",
    "CriticalKV",
    "DefensiveKV",
    "ExpectedAttention",
    "Full",
    "H2O",
    "KVzap",
    "KVzip",
    "KeyDiff",
    "L2",
    "LAQ",
    "LaCache",
    "LagKV",
    "ProtoKV",
    "PyramidKV",
    "RKV",
    "Random",
    "SATKV",
    "SnapKV",
    "StreamingLLM",
    "TOVA",
    "TriAttention",
    "VaSE",
]

#: The families of methods: what a rule depends on.
FAMILIES = (
    "everything",
    "position or chance",
    "lag-relative",
    "lookahead",
    "keys alone",
    "prototypes",
    "window attention",
    "accumulated attention",
    "calibrated queries",
    "learned gates",
)

_LAGKV = "LagKV, Liang et al., 2025"
_LACACHE = "LaCache, Shi et al., 2025"
_LAQ = "Lookahead Q-Cache, Wang et al., 2025"
_KEYDIFF = "KeyDiff, Park et al., 2025"
_PROTOKV = "ProtoKV, Yu et al."

METHODS.update(
    {
        "full": Entry("Full", Full, "everything", ""),
        "streamingllm": Entry("StreamingLLM", StreamingLLM, "position or chance", "StreamingLLM, Xiao et al., 2023"),
        "random": Entry("Random", Random, "position or chance", ""),
        "lagkv": Entry("LagKV", LagKV, "lag-relative", _LAGKV),
        "localkv": Entry("LocalKV", LagKV, "lag-relative", _LAGKV, {"reference": "self"}),
        "lagkv-l2": Entry("LagKV L2", LagKV, "lag-relative", _LAGKV, {"score": "l2"}),
        "lacache": Entry("LaCache", LaCache, "position or chance", _LACACHE),
        "lacache-official": Entry("LaCache official", LaCache, "position or chance", _LACACHE, {"pattern": "official"}),
        "laq": Entry("LAQ", LAQ, "lookahead", _LAQ),
        "laq++": Entry("LAQ++", LAQ, "lookahead", _LAQ, {"window": 8}),
        "kvzip": Entry("KVzip", KVzip, "lookahead", "KVzip, Kim et al., 2025"),
        "kvzip+": Entry("KVzip+", KVzip, "lookahead", "KVzap, Jegou and Jeblick, 2026", {"plus": True}),
        "kvgrad": Entry("KVgrad", KVzip, "lookahead", "KVgrad, 2026", {"gradients": True, "chunk": 256}),
        "attention-matching": Entry(
            "Attention Matching", AttentionMatching, "lookahead", "Attention Matching, Zweiger et al., 2026"
        ),
        "kvzap": Entry("KVzap", KVzap, "learned gates", "KVzap, Jegou and Jeblick, 2026", required=("gates",)),
        "keydiff": Entry("KeyDiff", KeyDiff, "keys alone", _KEYDIFF),
        "keydiff-window": Entry("KeyDiff window", KeyDiff, "keys alone", _KEYDIFF, {"recent": 0.2}),
        "protokv": Entry("ProtoKV", ProtoKV, "prototypes", _PROTOKV),
        "satkv": Entry("SATKV", SATKV, "prototypes", _PROTOKV),
        "defensivekv": Entry("DefensiveKV", DefensiveKV, "window attention", "DefensiveKV, Feng et al., 2025"),
        "snapkv": Entry("SnapKV", SnapKV, "window attention", "SnapKV, Li et al., 2024"),
        "dropkv": Entry("DropKV", SnapKV, "window attention", "DropKV, 2026", {"score": "drop", "pooling": "avg"}),
        "pyramidkv": Entry("PyramidKV", PyramidKV, "window attention", "PyramidKV, Cai et al., 2024"),
        "chunkkv": Entry("ChunkKV", ChunkKV, "window attention", "ChunkKV, Liu et al., 2025"),
        "criticalkv": Entry("CriticalKV", CriticalKV, "window attention", "CriticalKV, Feng et al., 2025"),
        "r-kv": Entry("R-KV", RKV, "window attention", "R-KV, Cai et al., 2025"),
        "vase": Entry("VaSE", VaSE, "window attention", "VaSE, Chang et al., 2026"),
        "h2o": Entry("H2O", H2O, "accumulated attention", "H2O, Zhang et al., 2023"),
        "tova": Entry("TOVA", TOVA, "accumulated attention", "TOVA, Oren et al., 2024"),
        "expected-attention": Entry(
            "Expected Attention",
            ExpectedAttention,
            "calibrated queries",
            "Expected Attention, Devoto et al., 2025",
        ),
        "triattention": Entry("TriAttention", TriAttention, "calibrated queries", "TriAttention, Mao et al., 2026"),
        "l2": Entry("L2", L2, "keys alone", "L2 norm, Devoto et al., 2024"),
    }
)
