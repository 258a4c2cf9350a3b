#include "quadratic_scores.cuh"

namespace kvops {

void launch_quadratic_scores(const QuadraticScoresParams& p, Call& call) {
  quadratic_scores_cuda(p, call.workspace(quadratic_scores_workspace(p)), stream_of(call));
}

}  // namespace kvops
