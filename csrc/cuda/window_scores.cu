#include "launch.h"
// launch.h first: it makes the checks in ops/ visible.
#include "window_passes.h"
#include "window_scores.cuh"

namespace kvops {
namespace {

Tensor window_scores(const Tensor& q, const Tensor& k, const Tensor& visible, const OptionalTensor& lse,
                     std::optional<double> scale, int64_t score, int64_t reduce, int64_t group_reduce,
                     const OptionalTensor& starts, double softcap, const OptionalTensor& sink_logits) {
  Tensor scores = q;
  const WindowScoresParams p =
      check_window_scores(q, k, visible, lse, scale, score, reduce, group_reduce, starts, softcap, sink_logits, scores);
  check_head_dim("window_scores", "k", k);
  if (scores.numel() == 0) return scores;
  const OnDevice device(q);
  const Workspace workspace("window_scores", q, bytes_of<WindowScoresMemory>(p));
  window_scores_cuda(p, workspace.data(), device.stream());
  if (lse && debug_checks()) check_lse_total(p, *lse, visible, starts, sink_logits, scores);
  return scores;
}

}  // namespace

int64_t window_lse_workspace(const Window& p) {
  return bytes_of<SumsMemory>(SumsPlan::of(p));
}

void window_lse(const Window& p, float* lse, float* logits, void* workspace, cudaStream_t stream) {
  const SumsPlan plan = SumsPlan::of(p);
  RowSum* const partial_sums = static_cast<RowSum*>(workspace);
  window_sums_cuda(p, plan, partial_sums, logits, stream);
  window_lse_cuda(plan, partial_sums, lse, stream);
}

int64_t window_scores_pass_workspace(const Window& p) {
  return bytes_of<ScoresMemory>(p);
}

void window_scores_pass(const Window& p, const float* lse, void* workspace, cudaStream_t stream) {
  const WindowScoresParams params{p, {lse, p.heads * p.group * p.w, p.w, 1}, true};
  window_scores_pass_cuda(params, ScoresPlan::of(p), static_cast<float*>(workspace), stream);
}

void window_row_scores(const Window& p, const float* logits, const float* lse, cudaStream_t stream) {
  window_row_scores_cuda(p, logits, lse, stream);
}

KVOPS_CUDA_IMPL(m) {
  m.impl("window_scores", TORCH_BOX(&window_scores));
}

}  // namespace kvops
