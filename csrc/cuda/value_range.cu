#include "value_range.cuh"

namespace kvops {

void launch_value_range(const ValueRangeParams& p, Call& call) {
  value_range_cuda(p, stream_of(call));
}

}  // namespace kvops
