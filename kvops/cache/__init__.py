"""Caches: the state of one layer under a policy, and of a batch of requests in pages."""

from .attending import AttendingCache, LookaheadCache
from .base import Cache
from .paged import OutOfPages, PagedCache
from .slots import SlotCache

__all__ = ["AttendingCache", "Cache", "LookaheadCache", "OutOfPages", "PagedCache", "SlotCache"]
