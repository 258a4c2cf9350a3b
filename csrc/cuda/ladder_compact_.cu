#include "ladder_compact_.cuh"

namespace kvops {

void launch_ladder_compact_(const LadderParams& p, Call& call) {
  ladder_compact__cuda(p, call.workspace(ladder_compact__workspace(p)), stream_of(call));
}

}  // namespace kvops
