"""Caches: the state of one layer under a policy."""

from .attending import AttendingCache, LookaheadCache
from .base import Cache
from .slots import SlotCache

__all__ = ["AttendingCache", "Cache", "LookaheadCache", "SlotCache"]
