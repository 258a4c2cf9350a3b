"""The eviction methods: policies, one-shot functions, and the table of all methods."""

from . import shorthands
from .base import BudgetPolicy, Compressed, DecodePolicy, KeyPolicy, Policy, View
from .baselines import L2, Full, Random, StreamingLLM
from .budgets import entropy_budgets, head_budgets
from .criticalkv import CriticalKV
from .h2o import H2O, TOVA
from .keydiff import KeyDiff
from .lacache import LaCache, lacache_coverage
from .lagkv import LagKV
from .laq import LAQ
from .protokv import SATKV, ProtoKV, lsh_projection
from .queries import QueryPolicy, WindowPolicy
from .recall_metric import recall
from .rkv import RKV
from .shorthands import *  # noqa: F403
from .slots import SlotPolicy
from .snapkv import ChunkKV, PyramidKV, SnapKV, pyramidkv_budgets
from .table import METHODS, policy

__all__ = [
    "METHODS",
    "BudgetPolicy",
    "ChunkKV",
    "Compressed",
    "CriticalKV",
    "DecodePolicy",
    "Full",
    "H2O",
    "KeyDiff",
    "KeyPolicy",
    "L2",
    "LAQ",
    "LaCache",
    "LagKV",
    "Policy",
    "ProtoKV",
    "PyramidKV",
    "QueryPolicy",
    "RKV",
    "Random",
    "SATKV",
    "SlotPolicy",
    "SnapKV",
    "StreamingLLM",
    "TOVA",
    "View",
    "WindowPolicy",
    "entropy_budgets",
    "head_budgets",
    "lacache_coverage",
    "lsh_projection",
    "policy",
    "pyramidkv_budgets",
    "recall",
]
__all__ += shorthands.__all__
