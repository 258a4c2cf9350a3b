"""python -m kvops.bench: every operator beside what people write in PyTorch, in one table."""

from .rows import ROWS

__all__ = ["ROWS"]
