#include "build_prototypes.cuh"

namespace kvops {

void launch_build_prototypes(const BuildPrototypesParams& p, Call& call) {
  build_prototypes_cuda(p, stream_of(call));
}

}  // namespace kvops
