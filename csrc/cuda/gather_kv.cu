#include "gather_kv.cuh"

namespace kvops {

void launch_gather_kv(const GatherKVParams& p, Call& call) {
  gather_kv_cuda(p, stream_of(call));
}

}  // namespace kvops
