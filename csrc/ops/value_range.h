// value_range: parameters, launcher.
#pragma once
#include "../kv_view.h"

namespace kvops {

struct ValueRangeParams {
  KVView v;       // [b, Hk, n, dv]
  float* ranges;  // [b, Hk, n]
  DType dtype;
  ValidSlots slots;
  int64_t b, heads, n, dv;
};

void launch_value_range(const ValueRangeParams& p, Call& call);

}  // namespace kvops
