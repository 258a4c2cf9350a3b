// select_topk: parameters, checks, output shape.
#pragma once
#include "../kv_view.h"
#include "lag_score.h"

namespace kvops {

struct SelectTopkParams {
  const float* scores;                   // [b, Hk, n], or [b, Hk, segments, lag]
  int64_t stride_b, stride_h, stride_s;  // elements; the last dim is contiguous
  int64_t* indices;                      // [b, Hk, width]
  ValidSlots slots;
  const int32_t* budgets;  // [b, Hk] or null: k
  int64_t b, heads, n, width;
  int64_t segments, lag;  // segments = -1: whole rows
  int64_t k, sinks, window;
  bool fill_invalid;
};

// LagKV Eq. 10: slots kept of n.
KVOPS_HOST_DEVICE inline int64_t kept_length(int64_t n, int64_t prefix, int64_t lag, int64_t m) {
  return n - num_segments(n, prefix, lag) * (lag - m);
}

// Slots kept of n, or of a padded batch the most kept of any n' <= n: the kept length grows one by one and drops
// whenever a partition completes, so the maximum lies at n or just before the last drop.
inline int64_t segment_width(int64_t n, int64_t prefix, int64_t lag, int64_t m, bool padded) {
  const int64_t whole = kept_length(n, prefix, lag, m);
  const int64_t last_drop = prefix + (n > prefix ? (n - prefix) / lag * lag : 0);
  if (!padded || last_drop == 0 || last_drop > n) return whole;
  const int64_t before = kept_length(last_drop - 1, prefix, lag, m);
  return before > whole ? before : whole;
}

// Floats of scratch that one selection on the CPU needs: for each chunk a histogram and its bookkeeping, and the keys.
constexpr int kSelectBins = 2048;
inline int64_t select_topk_scratch(const SelectTopkParams& p, int64_t chunks) {
  return chunks * (kSelectBins + 32) + ((p.segments >= 0 ? p.lag : p.n) + 15) / 16 * 16;
}

#ifdef KVOPS_CHECKS
// Each row's own k, int32 [b, Hk]; at least what is always kept, at most k.
inline const int32_t* check_budgets(const char* op, const Tensor& budgets, const Tensor& scores, int64_t least,
                                    int64_t most) {
  const int64_t b = scores.size(0), heads = scores.size(1);
  check_same_device(op, "budgets", budgets, scores);
  check_scalar_type(op, "budgets", budgets, ScalarType::Int);
  KVOPS_CHECK(budgets.dim() == 2 && budgets.size(0) == b && budgets.size(1) == heads && budgets.is_contiguous(), op,
              ": budgets must be a contiguous int32 [", b, ", ", heads, "], got ", shape(budgets));
  const OptionalTensor values = readable(budgets);
  const int32_t* value = values ? static_cast<const int32_t*>(values->const_data_ptr()) : nullptr;
  for (int64_t i = 0; value && i < b * heads; ++i)
    KVOPS_CHECK(value[i] >= least && value[i] <= most, op, ": budgets must lie in [", least, ", ", most, "], got ",
                value[i], " for row ", i / heads, ", head ", i % heads);
  return static_cast<const int32_t*>(budgets.const_data_ptr());
}

inline SelectTopkParams check_select_topk(const Tensor& scores, int64_t k, int64_t sinks, int64_t window,
                                          std::optional<int64_t> seq_len, const OptionalTensor& starts,
                                          const OptionalTensor& lengths, const OptionalTensor& budgets,
                                          bool fill_invalid, Tensor& indices) {
  const char* op = "select_topk";
  check_scalar_type(op, "scores", scores, ScalarType::Float);
  const int64_t dim = scores.dim();
  KVOPS_CHECK(dim == 3 || dim == 4, op,
              ": scores must be [batch, heads, tokens] or [batch, heads, segments, lag], got ", shape(scores));
  const auto sizes = scores.sizes(), strides = scores.strides();
  KVOPS_CHECK(strides[dim - 1] == 1 || sizes[dim - 1] <= 1, op, ": scores must have a contiguous last dim, got stride ",
              strides[dim - 1]);
  KVOPS_CHECK(k >= 0, op, ": k must be >= 0, got ", k);
  KVOPS_CHECK(sinks >= 0 && window >= 0, op, ": sinks and window must be >= 0, got ", sinks, " and ", window);
  const bool by_segment = dim == 4;
  const int64_t b = sizes[0], heads = sizes[1], lag = by_segment ? sizes[3] : 1;
  KVOPS_CHECK(by_segment == seq_len.has_value(), op,
              ": seq_len must be given with scores of 4 dims and only then, got ", shape(scores),
              seq_len ? " and a seq_len" : " and none");
  const int64_t n = by_segment ? *seq_len : sizes[2];
  const ValidSlots slots = check_valid_slots(op, scores, b, n, starts, lengths);
  int64_t segments = -1, width;
  if (by_segment) {
    KVOPS_CHECK(lag >= 1, op, ": scores must have segments of at least 1 token, got ", shape(scores));
    KVOPS_CHECK(n >= 0, op, ": seq_len must be >= 0, got ", n);
    segments = num_segments(n, sinks, lag);
    KVOPS_CHECK(sizes[2] == segments, op, ": scores of seq_len ", n, ", sinks ", sinks, " and lag ", lag, " must have ",
                segments, " segments, got ", shape(scores));
    KVOPS_CHECK(k <= lag, op, ": k must be at most the segment length ", lag, ", got ", k);
    KVOPS_CHECK(window == 0, op, ": window must be 0 with segments (all behind the last one is kept), got ", window);
    KVOPS_CHECK(!budgets, op, ": budgets must be None with segments, got a tensor");
    width = segment_width(n, sinks, lag, k, starts.has_value() || lengths.has_value());
  } else {
    KVOPS_CHECK(sinks <= k && window <= k - sinks, op, ": sinks + window must be <= k, expected at most ", k, ", got ",
                sinks, " + ", window);
    width = k < n ? k : n;
  }
  const int32_t* const budget = budgets ? check_budgets(op, *budgets, scores, sinks + window, k) : nullptr;
  indices = empty(op, scores, std::array{b, heads, width}, ScalarType::Long);
  return {.scores = static_cast<const float*>(scores.const_data_ptr()),
          .stride_b = strides[0],
          .stride_h = strides[1],
          .stride_s = by_segment ? strides[2] : 0,
          .indices = static_cast<int64_t*>(indices.mutable_data_ptr()),
          .slots = slots,
          .budgets = budget,
          .b = b,
          .heads = heads,
          .n = n,
          .width = width,
          .segments = segments,
          .lag = lag,
          .k = k,
          .sinks = sinks,
          .window = window,
          .fill_invalid = fill_invalid};
}
#endif

}  // namespace kvops
