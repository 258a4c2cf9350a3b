// quadratic_scores: parameters, launcher. Without a covariance, the host calls trig_scores' kernel instead.
#pragma once
#include "trig_scores.h"

namespace kvops {

struct QuadraticScoresParams {
  KVView k;          // [b, Hk, n, d]
  HeadRowsF32 mean;  // width d
  const float* cov;  // [Hq, d, d] or [b, Hq, d, d]
  int64_t cov_stride_b;
  float* scores;  // [b, Hk * group, n]
  DType dtype;
  ValidSlots slots;
  int64_t b, heads, group, n, d;
  float scale;
};

void launch_quadratic_scores(const QuadraticScoresParams& p, Call& call);

}  // namespace kvops
