#include "launch.h"
// launch.h first: it makes the checks in ops/ visible.
#include "window_attention.cuh"
#include "window_passes.h"

namespace kvops {
namespace {

// What a call keeps while it runs, in floats: the parts of out, the parts' sums, an lse and logits, and what is left is
// for the passes.
struct Memory {
  int64_t out, sums, lse, logits, passes;

  static Memory of(const WindowAttentionParams& p, const AttentionPlan& plan) {
    const Window& w = p.window;
    const int64_t rows = w.b * w.heads * w.group * w.w;
    const int64_t lse = plan.tensor_cores ? 0 : window_lse_workspace(w), scores = window_scores_pass_workspace(w);
    return {rows * plan.parts * p.dv, 2 * rows * plan.parts, plan.tensor_cores ? 0 : rows, w.w == 1 ? rows * w.n : 0,
            ((lse > scores ? lse : scores) + 3) / 4};
  }
};

std::tuple<Tensor, Tensor, Tensor> window_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                                    const Tensor& visible, std::optional<double> scale,
                                                    std::string reduce, std::string group_reduce,
                                                    const OptionalTensor& starts, double softcap,
                                                    const OptionalTensor& sink_logits) {
  Tensor out = q, lse = q, scores = q;
  const WindowAttentionParams p = check_window_attention(q, k, v, visible, scale, reduce, group_reduce, starts, softcap,
                                                         sink_logits, out, lse, scores);
  check_head_dim("window_attention", "k", k);
  check_head_dim("window_attention", "v", v);
  const Window& w = p.window;
  if (lse.numel() == 0) return {out, lse, scores};
  const OnDevice device(q);
  const AttentionPlan plan = AttentionPlan::of(p);
  const Memory memory = Memory::of(p, plan);
  const Workspace workspace(q, 4 * (memory.out + memory.sums + memory.lse + memory.logits + memory.passes));
  float* const parts = static_cast<float*>(workspace.data());
  RowSum* const sums = reinterpret_cast<RowSum*>(parts + memory.out);
  float* const own_lse = parts + memory.out + memory.sums;
  float* const logits = memory.logits ? own_lse + memory.lse : nullptr;
  void* const passes = own_lse + memory.lse + memory.logits;
  if (plan.tensor_cores) {
    attention_parts_cuda(p, plan, parts, sums, logits, device.stream());
  } else {
    window_lse(w, own_lse, logits, passes, device.stream());
    plain_attention_parts_cuda(p, plan, own_lse, parts, sums, device.stream());
  }
  attention_combine_cuda(p, plan, parts, sums, device.stream());
  if (logits)
    window_row_scores(w, logits, p.lse, device.stream());
  else if (w.n > 0)
    window_scores_pass(w, p.lse, passes, device.stream());
  return {out, lse, scores};
}

}  // namespace

KVOPS_CUDA_IMPL(m) {
  m.impl("window_attention", TORCH_BOX(&window_attention));
}

}  // namespace kvops
