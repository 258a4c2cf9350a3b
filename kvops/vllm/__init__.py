"""vLLM: its pages on the CPU as rows (`cpu_pages`). Nothing here imports vLLM."""

from . import cpu_pages

__all__ = ["cpu_pages"]
