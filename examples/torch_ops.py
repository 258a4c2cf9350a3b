"""Build eviction from the operators: score, select, move, with torch.compile.

The policies do the same; use the operators for a rule of your own, or from a graph (`torch.ops.kvops.*`).
"""

import torch

from kvops import ops


def evict(k: torch.Tensor, v: torch.Tensor, budget: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """KeyDiff in three operators, with 4 sinks and the last 32 tokens kept."""
    scores = ops.anchor_cosine(k)  # fp32 [b, Hk, n]
    indices = ops.select_topk(scores, k=budget, sinks=4, window=32)  # int64 [b, Hk, budget], ascending
    k_kept, v_kept = ops.gather_kv(k, v, indices)
    return k_kept, v_kept, indices


def main() -> tuple[int, ...]:
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 8, 4096, 128, dtype=torch.bfloat16)
    k_kept, v_kept, indices = evict(k, v, 1024)
    print("fresh memory:", list(k_kept.shape))

    compiled = torch.compile(evict, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(k, v, 1024)[2], indices)

    k_view, v_view = ops.compact_kv_(k, v, indices)  # in place: views of the front of the same memory
    assert torch.equal(k_view, k_kept) and torch.equal(v_view, v_kept) and k_view.data_ptr() == k.data_ptr()
    print("in place:", list(k_view.shape))
    return tuple(k_view.shape)


if __name__ == "__main__":
    main()
