"""vLLM integration: a plugin that evicts while vLLM serves (`plugin`), and row views of vLLM's CPU pages (`cpu_pages`).

Set KVOPS_VLLM="keydiff:budget=1024" in the environment, and `LLM(...)` and `vllm serve` evict without further code.
Importing this package does not import vLLM.
"""

from . import cpu_pages

__all__ = ["cpu_pages"]
