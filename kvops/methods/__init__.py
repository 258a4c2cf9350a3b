"""The eviction methods: policies, one-shot functions, and the table of all methods."""

from . import functions
from .base import BudgetPolicy, Compressed, DecodePolicy, KeyPolicy, Policy
from .baselines import L2, Full, Random, StreamingLLM
from .budgets import entropy_budgets, head_budgets
from .criticalkv import CriticalKV
from .defensivekv import DefensiveKV
from .expected_attention import ExpectedAttention
from .functions import *  # noqa: F403
from .h2o import H2O, TOVA
from .keydiff import KeyDiff
from .kvzip import KVzip
from .lacache import LaCache, lacache_coverage
from .lagkv import LagKV
from .laq import LAQ
from .merging import MergingPolicy
from .protokv import SATKV, ProtoKV, lsh_projection
from .queries import ObservedPolicy, QueryPolicy, WindowPolicy
from .recall_metric import recall
from .registry import policy
from .rkv import RKV
from .slots import SlotPolicy
from .snapkv import ChunkKV, PyramidKV, SnapKV, pyramidkv_budgets
from .statistics import CalibratedPolicy, QueryStatistics, trig_centers
from .table import METHODS
from .triattention import TriAttention
from .vase import VaSE
from .view import View

__all__ = [
    "METHODS",
    "BudgetPolicy",
    "CalibratedPolicy",
    "ChunkKV",
    "Compressed",
    "CriticalKV",
    "DecodePolicy",
    "DefensiveKV",
    "ExpectedAttention",
    "Full",
    "H2O",
    "KeyDiff",
    "KVzip",
    "KeyPolicy",
    "MergingPolicy",
    "L2",
    "LAQ",
    "LaCache",
    "LagKV",
    "ObservedPolicy",
    "Policy",
    "ProtoKV",
    "PyramidKV",
    "QueryPolicy",
    "QueryStatistics",
    "RKV",
    "Random",
    "SATKV",
    "SlotPolicy",
    "SnapKV",
    "StreamingLLM",
    "TOVA",
    "TriAttention",
    "VaSE",
    "View",
    "WindowPolicy",
    "entropy_budgets",
    "head_budgets",
    "lacache_coverage",
    "lsh_projection",
    "policy",
    "pyramidkv_budgets",
    "recall",
    "trig_centers",
]
__all__ += functions.__all__
