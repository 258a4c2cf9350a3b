#include "launch.h"
// launch.h first: it makes the checks in ops/ visible.
#include "window_attention.cuh"
#include "window_passes.h"

namespace kvops {
namespace {

// What a call keeps while it runs.
struct WindowAttentionMemory {
  float* parts;   // [b, Hq, w, parts, dv]
  RowSum* sums;   // [b, Hq, w, parts]
  float* lse;     // [b, Hq, w], of the plain kernel
  float* logits;  // [b, Hq, n], of one row for each query head, or null
  char* passes;   // of window_scores' passes, one after the other

  WindowAttentionMemory(const WindowAttentionParams& p, const AttentionPlan& plan, Sections& sections) {
    const Window& w = p.window;
    const int64_t rows = w.b * w.heads * w.group * w.w;
    const int64_t sums_pass = plan.tensor_cores ? 0 : window_lse_workspace(w), scores = window_scores_pass_workspace(w);
    parts = sections.add<float>(rows * plan.parts * p.dv);
    sums = sections.add<RowSum>(rows * plan.parts);
    lse = sections.add<float>(plan.tensor_cores ? 0 : rows);
    logits = w.w == 1 && w.n > 0 ? sections.add<float>(rows * w.n) : nullptr;
    passes = sections.add<char>(sums_pass > scores ? sums_pass : scores);
  }
};

std::tuple<Tensor, Tensor, Tensor> window_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                                    const Tensor& visible, std::optional<double> scale, int64_t reduce,
                                                    int64_t group_reduce, const OptionalTensor& starts, double softcap,
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
  const Workspace workspace("window_attention", q, bytes_of<WindowAttentionMemory>(p, plan));
  Sections sections{workspace.data()};
  const auto [parts, sums, own_lse, logits, passes] = WindowAttentionMemory(p, plan, sections);
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
