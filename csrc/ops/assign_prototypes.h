// assign_prototypes: parameters, launcher.
#pragma once
#include "../kv_view.h"

namespace kvops {

struct AssignPrototypesParams {
  KVView k;                 // [b, Hk, n, d]
  const float* prototypes;  // [b, Hk, count, d]
  int32_t* assignment;      // [b, Hk, n]
  DType dtype;
  ValidSlots slots;
  int64_t b, heads, n, d, count;
};

void launch_assign_prototypes(const AssignPrototypesParams& p, Call& call);

}  // namespace kvops
