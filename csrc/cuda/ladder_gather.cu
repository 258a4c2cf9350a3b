#include "ladder_gather.cuh"

namespace kvops {

void launch_ladder_gather(const LadderParams& p, Call& call) {
  ladder_gather_cuda(p, stream_of(call));
}

}  // namespace kvops
