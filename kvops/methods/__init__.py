"""The eviction methods: policies, one-shot functions, and the table of all methods."""

from . import functions, table
from .attention_matching import Matched
from .base import BudgetPolicy, Compressed, KeyPolicy, Needs, Policy
from .budgets import entropy_budgets, head_budgets
from .functions import *  # noqa: F403
from .gates import Gates, fit_gates
from .lacache import lacache_coverage
from .protokv import lsh_projection
from .queries import ObservedPolicy, QueryPolicy, WindowPolicy
from .recall_metric import recall
from .registry import policy
from .repeating import RepeatPolicy
from .shares import save_shares
from .snapkv import pyramidkv_budgets
from .statistics import CalibratedPolicy, QueryStatistics, trig_centers
from .table import *  # noqa: F403
from .view import LayerInputs, View

__all__ = [
    "BudgetPolicy",
    "CalibratedPolicy",
    "Compressed",
    "Gates",
    "KeyPolicy",
    "LayerInputs",
    "Matched",
    "Needs",
    "ObservedPolicy",
    "Policy",
    "QueryPolicy",
    "QueryStatistics",
    "RepeatPolicy",
    "View",
    "WindowPolicy",
    "entropy_budgets",
    "fit_gates",
    "head_budgets",
    "lacache_coverage",
    "lsh_projection",
    "policy",
    "pyramidkv_budgets",
    "recall",
    "save_shares",
    "trig_centers",
]
__all__ += table.__all__
__all__ += functions.__all__
