"""The operators: CPU and CUDA kernels that score, select and evict KV-cache entries.

Each operator is one public function and one entry in `torch.ops.kvops`. The rules below hold for all operators, unless
a docstring says otherwise.

**Shapes.** b is the batch size, Hk the number of KV heads, Hq the number of query heads, n the number of cached tokens
(slots), d and dv the head dims of K and V. `k` is [b, Hk, n, d], `v` is [b, Hk, n, dv], queries are [b, Hq, w, d], and
query head h belongs to KV head h // (Hq / Hk). Head dims go up to 1024. Pass a tensor in [b, n, Hk, d] order as
`x.transpose(1, 2)`, which is a view. The operators cannot detect that K and V have been swapped.

**Dtypes.** K and V are torch.float32, float16 or bfloat16. Operators that score keys or only move rows also take
float8_e4m3fn and float8_e5m2, and read them as bfloat16 numbers of the same value (docs/layouts.md). The window
operators also take int8 with a scale for each row. Arithmetic and scores are fp32.

**Strides.** The last dim must be contiguous and each row a multiple of 16 bytes; all other strides are free. The
kernels read K and V in place and never copy them.

**Padding.** `starts` and `lengths` are int32 [b]. Slot i of row b is valid if starts[b] <= i < starts[b] + lengths[b].
The defaults are 0 and n - starts. Invalid slots never influence a result.

**Pages.** With `block_table`, int32 [b, max_pages], `k` and `v` are pages, [num_pages, Hk, page_size, d]. Slot i of
request b is slot i % page_size of page block_table[b, i // page_size], so b is the number of rows of the table and n is
max_pages * page_size. The kernels look up only the pages that hold valid slots (or the given indices, or the slots
below `visible`); other entries may be -1. Each request gets bit for bit the results that it gets alone in dense memory
(docs/layouts.md), unless a Hopper GPU has another kernel for dense memory (docs/cuda.md).

**Errors.** A wrong argument raises ValueError, or TypeError for a wrong type, before anything is written. The message
names the operator and the argument, what was expected and what was given. The operators are inference-only: an input
that requires grad raises outside `torch.no_grad()`.

**CUDA.** Kernels run on the current stream, and no operator waits for the GPU. The values of indices, starts, lengths,
budgets and block tables are therefore checked only under `kvops.debug_checks()`; otherwise the kernels skip or clamp
wrong values (docs/cuda.md).

**Determinism.** On one device, equal inputs give equal bits in every run. Selection uses a total order, so equal scores
give the same slots on every device (docs/numerics.md).
"""

from . import api
from .api import *  # noqa: F403
from .api import REDUCTIONS, SCORES  # noqa: F401  (docs/operators.md)

__all__ = api.__all__


def __dir__() -> list[str]:
    return sorted(__all__)
