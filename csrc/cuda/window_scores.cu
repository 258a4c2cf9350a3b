#include "launch.h"
// launch.h first: it makes the checks in ops/ visible.
#include "window_scores.cuh"

namespace kvops {
namespace {

Tensor window_scores(const Tensor& q, const Tensor& k, const Tensor& visible, const OptionalTensor& lse,
                     std::optional<double> scale, std::string score, std::string reduce, std::string group_reduce,
                     const OptionalTensor& starts, double softcap, const OptionalTensor& sink_logits) {
  Tensor scores = q;
  const WindowScoresParams p =
      check_window_scores(q, k, visible, lse, scale, score, reduce, group_reduce, starts, softcap, sink_logits, scores);
  check_head_dim("window_scores", "k", k);
  if (scores.numel() == 0) return scores;
  const OnDevice device(q);
  const Workspace workspace(q, window_scores_workspace(p));
  window_scores_cuda(p, workspace.data(), device.stream());
  if (lse && debug_checks()) check_lse_total(p, *lse, visible, starts, sink_logits, scores);
  return scores;
}

}  // namespace

KVOPS_CUDA_IMPL(m) {
  m.impl("window_scores", TORCH_BOX(&window_scores));
}

}  // namespace kvops
