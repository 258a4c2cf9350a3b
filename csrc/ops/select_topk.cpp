// select_topk: checks arguments, allocates the output, launches.
#include "select_topk.h"

#include "../host.h"

namespace kvops {
namespace {

Tensor select_topk(const Tensor& scores, int64_t k, int64_t sinks, int64_t window, std::optional<int64_t> seq_len,
                   const OptionalTensor& starts, const OptionalTensor& lengths, const OptionalTensor& budgets,
                   bool fill_invalid) {
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
  KVOPS_CHECK(!by_segment || n <= std::numeric_limits<int32_t>::max(), op, ": seq_len must fit int32, got ", n);
  const ValidSlots slots = check_valid_slots(op, scores, b, n, starts, lengths);
  int64_t segments = -1, width;
  if (by_segment) {
    KVOPS_CHECK(lag >= 1, op, ": scores must have segments of at least 1 token, got ", shape(scores));
    KVOPS_CHECK(n >= 0, op, ": seq_len must be >= 0, got ", n);
    segments = num_segments(n, sinks, lag);
    KVOPS_CHECK(sizes[2] == segments, op, ": scores must have ", segments, " segments for seq_len ", n, ", sinks ",
                sinks, " and lag ", lag, ", got ", shape(scores));
    KVOPS_CHECK(k <= lag, op, ": k must be at most the segment length ", lag, ", got ", k);
    KVOPS_CHECK(window == 0, op, ": window must be 0 with segments (all tokens after the last segment are kept), got ",
                window);
    KVOPS_CHECK(!budgets, op, ": budgets must be None with segments, got a tensor");
    width = segment_width(n, sinks, lag, k, starts.has_value() || lengths.has_value());
  } else {
    KVOPS_CHECK(sinks <= k && window <= k - sinks, op, ": sinks + window must be <= k, expected at most ", k, ", got ",
                sinks, " + ", window);
    width = k < n ? k : n;
  }
  const int32_t* const budget = budgets ? check_budgets(op, *budgets, scores, sinks + window, k) : nullptr;
  const Tensor indices = empty(op, scores, std::array{b, heads, width}, ScalarType::Long);
  if (indices.numel() == 0) return indices;
  const SelectTopkParams p{.scores = static_cast<const float*>(scores.const_data_ptr()),
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
  HostCall call(op, scores);
  launch_select_topk(p, call);
  return indices;
}

}  // namespace

KVOPS_IMPL(m) {
  m.impl("select_topk", TORCH_BOX(&select_topk));
}

}  // namespace kvops
