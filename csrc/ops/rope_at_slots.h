// rope_at_slots: parameters, launcher.
#pragma once
#include "rope.h"

namespace kvops {

struct RopeAtSlotsParams {
  KVView k, out;  // [b, Hk, n, d]; out may alias k
  SlotRope rope;
  DType dtype;
  int64_t b, heads, n;
};

void launch_rope_at_slots(const RopeAtSlotsParams& p, Call& call);

}  // namespace kvops
