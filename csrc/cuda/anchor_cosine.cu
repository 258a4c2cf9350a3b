#include "anchor_cosine.cuh"

namespace kvops {

void launch_anchor_cosine(const AnchorCosineParams& p, Call& call) {
  anchor_cosine_cuda(p, call.workspace(bytes_of<AnchorMemory>(p)), stream_of(call));
}

}  // namespace kvops
