#include "launch.h"
// launch.h first: it makes the checks in ops/ visible.
#include "lag_score.cuh"

namespace kvops {
namespace {

Tensor lag_score(const Tensor& k, const Tensor& v, int64_t lag, int64_t prefix, double v_weight, bool self_reference,
                 const OptionalTensor& starts, const OptionalTensor& lengths) {
  Tensor scores = k;
  const LagScoreParams p = check_lag_score(k, v, lag, prefix, v_weight, self_reference, starts, lengths, scores);
  check_head_dim("lag_score", "k", k);
  check_head_dim("lag_score", "v", v);
  if (scores.numel() == 0) return scores;
  const OnDevice device(k);
  const LagScorePlan plan = lag_score_plan(p);
  const Workspace workspace("lag_score", k, plan.workspace_bytes);
  lag_score_cuda(p, plan, workspace.data(), device.stream());
  return scores;
}

}  // namespace

KVOPS_CUDA_IMPL(m) {
  m.impl("lag_score", TORCH_BOX(&lag_score));
}

}  // namespace kvops
