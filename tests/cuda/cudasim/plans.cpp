// How window_attention divides a call, for tests/cuda/test_window_plans.py.
#include "../../../csrc/cuda/window_attention.cuh"

// bf16, values as wide as keys, `memory` bytes of shared memory per block.
extern "C" __attribute__((visibility("default"))) void attention_plan(int64_t n, int64_t rows, int64_t d,
                                                                      int64_t memory, int64_t* out) {
  using namespace kvops;
  WindowAttentionParams p = {};
  p.window.dtype = DType::bf16;
  p.window.b = p.window.heads = p.window.group = 1;
  p.window.w = rows;
  p.window.n = n;
  p.window.d = p.dv = d;
  p.window.k.row_bytes = p.v.row_bytes = 2 * d;
  const AttentionPlan plan = AttentionPlan::of(p, memory);
  const int64_t found[] = {plan.row_blocks, plan.splits.keys, plan.splits.count, plan.warps,
                           plan.row_warps,  plan.stages,      plan.shared_bytes};
  for (const int64_t x : found) *out++ = x;
}
