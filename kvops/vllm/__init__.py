"""vLLM: a plugin that evicts while it serves (`plugin`), and its pages on the CPU as rows (`cpu_pages`).

With KVOPS_VLLM="keydiff:budget=1024" in the environment, `LLM(...)` and `vllm serve` evict without further code.
Importing this package does not import vLLM.
"""

from . import cpu_pages

__all__ = ["cpu_pages"]
