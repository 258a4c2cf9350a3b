// trig_scores: parameters, launcher.
#pragma once
#include "../kv_view.h"

namespace kvops {

// Rows of coefficients, one per query head: fp32 [Hq, width], or [b, Hq, width].
struct HeadRowsF32 {
  const float* data;
  int64_t stride_b;  // elements; 0 if all rows of the batch share them
  int64_t width;

  KVOPS_HOST_DEVICE const float* row(int64_t b, int64_t query_head) const {
    return data + b * stride_b + query_head * width;
  }
};

struct TrigScoresParams {
  KVView k;             // [b, Hk, n, d]
  HeadRowsF32 centers;  // width d
  HeadRowsF32 norms;    // width `pairs`; null data: no term of norms, and pairs is 0
  float* scores;        // [b, Hk * group, n]
  DType dtype;
  ValidSlots slots;
  int64_t b, heads, group, n, d, pairs;
  bool interleaved;  // pair f is channels 2 f, 2 f + 1, else f, f + pairs
  float scale;       // the factor of the whole score
};

void launch_trig_scores(const TrigScoresParams& p, Call& call);

}  // namespace kvops
