// lag_score: parameters, launcher.
#pragma once
#include "../kv_view.h"

namespace kvops {

struct LagScoreParams {
  KVView k, v;    // [b, Hk, n, d], [b, Hk, n, dv]
  float* scores;  // [b, Hk, segments, lag]
  DType dtype;
  ValidSlots slots;
  int64_t b, heads, d, dv, segments, lag, prefix;
  float v_weight;
  bool self_reference;
};

// A channel's 1/range fits a float unless the range is below 2^-128. Such a range is encoded in the payload of a NaN
// instead. The NaN makes the variance of every row NaN, and the kernels then recompute the row on their careful path.
constexpr uint32_t kNarrow = 0x7fc00000;
KVOPS_HOST_DEVICE inline double inverse_range(float inverse) {
  if (inverse == inverse) return inverse;
  union {
    float value;
    uint32_t word;
  } range{inverse};
  range.word &= ~kNarrow;
  return 1.0 / range.value;
}

// The scored partitions among `count` slots: all complete ones after the prefix except the last, which is only a
// reference.
KVOPS_HOST_DEVICE inline int64_t num_segments(int64_t count, int64_t prefix, int64_t lag) {
  const int64_t complete = count > prefix ? (count - prefix) / lag : 0;
  return complete > 1 ? complete - 1 : 0;
}

void launch_lag_score(const LagScoreParams& p, Call& call);

}  // namespace kvops
