// The checks that cluster_mean and cluster_priority share.
#pragma once
#include "../check.h"
#include "cluster_mean.h"

namespace kvops {

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

}  // namespace kvops
