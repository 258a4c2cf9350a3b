#include "value_norm.cuh"

namespace kvops {

void launch_value_norm(const ValueNormParams& p, Call& call) {
  value_norm_cuda(p, call.workspace(bytes_of<ValueNormMemory>(p)), stream_of(call));
}

}  // namespace kvops
