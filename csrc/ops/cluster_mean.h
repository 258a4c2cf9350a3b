// cluster_mean: parameters, checks, output shape.
#pragma once
#include "reduce.h"

namespace kvops {

// Tokens of a KV head with a score and a cluster, [b, Hk, n], the last dim contiguous.
struct ClusteredTokens {
  const float* scores;
  const int32_t* assignment;   // in [0, clusters), or something else: of none
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

// Scores are added as integers, multiples of 2^-shift, so that no order of the sum matters. `largest`: of the |scores|
// that count (finite and of a cluster), whose exponent says which shift n of them cannot overflow with.
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

// 2^exponent, for exponents of normal numbers.
KVOPS_HOST_DEVICE inline double power_of_two(int exponent) {
  union {
    uint64_t word;
    double value;
  } x{static_cast<uint64_t>(1023 + exponent) << 52};
  return x.value;
}

// A score as such an integer, cut off towards zero.
KVOPS_HOST_DEVICE inline int64_t to_fixed_point(float score, int shift) {
  return static_cast<int64_t>(score * power_of_two(shift));
}

// What a cluster of `count` such scores gives; NaN without any.
KVOPS_HOST_DEVICE inline float from_fixed_point(int64_t total, int shift, int64_t count, bool sum) {
  const double exact = static_cast<double>(total) * power_of_two(-shift);
  return static_cast<float>(sum && count ? exact : exact / static_cast<double>(count));
}

// Floats of scratch of a worker of a CPU call: for each cluster an int64 sum and a count.
inline int64_t cluster_mean_scratch(const ClusterMeanParams& p) {
  return (3 * p.tokens.clusters + 15) / 16 * 16;
}

#ifdef KVOPS_CHECKS
inline ClusteredTokens check_clustered_tokens(const char* op, const Tensor& scores, const Tensor& assignment,
                                              int64_t clusters) {
  check_same_device(op, "assignment", assignment, scores);
  check_scalar_type(op, "scores", scores, ScalarType::Float);
  check_scalar_type(op, "assignment", assignment, ScalarType::Int);
  KVOPS_CHECK(scores.dim() == 3, op, ": scores must be [batch, heads, tokens], got ", shape(scores));
  KVOPS_CHECK(scores.stride(2) == 1 || scores.size(2) <= 1, op, ": scores must have a contiguous last dim, got stride ",
              scores.stride(2));
  const int64_t b = scores.size(0), heads = scores.size(1), n = scores.size(2);
  KVOPS_CHECK(assignment.dim() == 3 && assignment.size(0) == b && assignment.size(1) == heads &&
                  assignment.size(2) == n && (assignment.stride(2) == 1 || n <= 1),
              op, ": assignment must be ", shape(scores), " with a contiguous last dim, got ", shape(assignment));
  KVOPS_CHECK(n <= std::numeric_limits<int32_t>::max(), op, ": the number of tokens must fit int32, got ", n);
  const OptionalTensor values = readable(assignment);
  for (int64_t i = 0; values && n > 0 && i < b * heads; ++i) {
    const int64_t row = i / heads, h = i % heads;
    const int32_t* const value =
        static_cast<const int32_t*>(values->const_data_ptr()) + row * values->stride(0) + h * values->stride(1);
    bool wrong = false;
    for (int64_t j = 0; j < n; ++j) wrong |= value[j] < -1 || value[j] >= clusters;
    for (int64_t j = 0; wrong && j < n; ++j)
      KVOPS_CHECK(value[j] >= -1 && value[j] < clusters, op, ": assignment must lie in [-1, ", clusters, "), got ",
                  value[j], " at row ", row, ", head ", h, ", token ", j);
  }
  return {.scores = static_cast<const float*>(scores.const_data_ptr()),
          .assignment = static_cast<const int32_t*>(assignment.const_data_ptr()),
          .scores_b = scores.stride(0),
          .scores_h = scores.stride(1),
          .assignment_b = assignment.stride(0),
          .assignment_h = assignment.stride(1),
          .b = b,
          .heads = heads,
          .n = n,
          .clusters = clusters};
}

inline ClusterMeanParams check_cluster_mean(const Tensor& scores, const Tensor& assignment, int64_t num_clusters,
                                            int64_t reduce, Tensor& means) {
  const char* op = "cluster_mean";
  constexpr int64_t kMost = int64_t{1} << 25;
  KVOPS_CHECK(num_clusters >= 1 && num_clusters <= kMost, op, ": num_clusters must be in [1, ", kMost, "], got ",
              num_clusters);
  const bool sum = check_reduce(op, "reduce", reduce, Reduce::mean) == Reduce::sum;
  const ClusteredTokens tokens = check_clustered_tokens(op, scores, assignment, num_clusters);
  means = empty(op, scores, std::array{tokens.b, tokens.heads, num_clusters}, ScalarType::Float);
  return {.tokens = tokens, .means = static_cast<float*>(means.mutable_data_ptr()), .sum = sum};
}
#endif

}  // namespace kvops
