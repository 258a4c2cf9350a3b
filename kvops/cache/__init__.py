"""KV caches that evict by a policy: one layer of a model, or a batch of requests in pages."""

from .attending import AttendingCache, LookaheadCache, RepeatingCache
from .base import Cache
from .paged import OutOfPages, PagedCache
from .slots import SlotCache
from .statistics import StatisticsCache

__all__ = [
    "AttendingCache",
    "Cache",
    "LookaheadCache",
    "OutOfPages",
    "PagedCache",
    "RepeatingCache",
    "SlotCache",
    "StatisticsCache",
]
