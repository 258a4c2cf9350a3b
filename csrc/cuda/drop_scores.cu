#include "drop_scores.cuh"

namespace kvops {

void launch_drop_scores(const DropScoresParams& p, Call& call) {
  const DropPlan plan = DropPlan::of(p);
  drop_scores_cuda(p, plan, call.workspace(bytes_of<DropScoresMemory>(p, plan)), stream_of(call));
}

}  // namespace kvops
