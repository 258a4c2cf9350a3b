#include "drop_scores.cuh"

namespace kvops {

void launch_drop_scores(const DropScoresParams& p, Call& call) {
  drop_scores_cuda(p, call.workspace(bytes_of<DropScoresMemory>(p)), stream_of(call));
}

}  // namespace kvops
