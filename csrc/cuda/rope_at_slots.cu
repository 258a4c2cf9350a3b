#include "rope_at_slots.cuh"

namespace kvops {

void launch_rope_at_slots(const RopeAtSlotsParams& p, Call& call) {
  rope_at_slots_cuda(p, stream_of(call));
}

}  // namespace kvops
