#include "lag_score.cuh"

namespace kvops {

void launch_lag_score(const LagScoreParams& p, Call& call) {
  const LagScorePlan plan = lag_score_plan(p);
  lag_score_cuda(p, plan, call.workspace(plan.workspace_bytes), stream_of(call));
}

}  // namespace kvops
