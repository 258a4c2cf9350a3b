// cluster_mean: parameters, launcher.
#pragma once
#include "reduce.h"

namespace kvops {

// The tokens of each KV head with a score and a cluster, [b, Hk, n], contiguous in the last dim.
struct ClusteredTokens {
  const float* scores;
  const int32_t* assignment;   // in [0, clusters); any other value: no cluster
  int64_t scores_b, scores_h;  // strides, elements
  int64_t assignment_b, assignment_h;
  int64_t b, heads, n, clusters;

  KVOPS_HOST_DEVICE const float* scores_row(int64_t row, int64_t h) const {
    return scores + row * scores_b + h * scores_h;
  }
  KVOPS_HOST_DEVICE const int32_t* assignment_row(int64_t row, int64_t h) const {
    return assignment + row * assignment_b + h * assignment_h;
  }
};

struct ClusterMeanParams {
  ClusteredTokens tokens;
  float* means;  // [b, Hk, clusters]
  bool sum;      // instead of the mean
};

// Scores are added as integer multiples of 2^-shift, so the order of the sum does not matter. `largest` is the largest
// |score| that counts (finite and in a cluster). Its exponent determines the shift with which n of them cannot
// overflow.
KVOPS_HOST_DEVICE inline int fixed_point_shift(float largest, int64_t n) {
  int bits = 0;  // n < 2^bits
  while (n >> bits) ++bits;
  union {
    float value;
    uint32_t word;
  } x{largest};
  const int exponent = static_cast<int>(x.word >> 23 & 0xff) - 126;  // |score| < 2^exponent
  return 62 - bits - exponent;
}

// 2^exponent, for exponents of normal doubles.
KVOPS_HOST_DEVICE inline double power_of_two(int exponent) {
  union {
    uint64_t word;
    double value;
  } x{static_cast<uint64_t>(1023 + exponent) << 52};
  return x.value;
}

// A score as such an integer, truncated towards zero.
KVOPS_HOST_DEVICE inline int64_t to_fixed_point(float score, int shift) {
  return static_cast<int64_t>(score * power_of_two(shift));
}

// The result for a cluster whose `count` scores sum to `total`; NaN for an empty cluster.
KVOPS_HOST_DEVICE inline float from_fixed_point(int64_t total, int shift, int64_t count, bool sum) {
  const double exact = static_cast<double>(total) * power_of_two(-shift);
  return static_cast<float>(sum && count ? exact : exact / static_cast<double>(count));
}

void launch_cluster_mean(const ClusterMeanParams& p, Call& call);

}  // namespace kvops
