"""python -m kvops.bench: every operator compared with common PyTorch formulations, in one table."""

from .rows import ROWS

__all__ = ["ROWS"]
