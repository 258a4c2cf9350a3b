#include "trig_scores.cuh"

namespace kvops {

void launch_trig_scores(const TrigScoresParams& p, Call& call) {
  trig_scores_cuda(p, stream_of(call));
}

}  // namespace kvops
