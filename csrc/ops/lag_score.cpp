// lag_score: checks arguments, allocates the output, launches.
#include "lag_score.h"

#include "../host.h"

namespace kvops {
namespace {

Tensor lag_score(const Tensor& k, const Tensor& v, int64_t lag, int64_t prefix, double v_weight, bool self_reference,
                 const OptionalTensor& starts, const OptionalTensor& lengths, const OptionalTensor& block_table) {
  const char* op = "lag_score";
  const KVPair kv = check_read_pair(op, k, v, block_table);
  const auto& [view, b, heads, n, d] = kv.k;
  constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();
  KVOPS_CHECK(lag >= 1 && lag <= kLargest, op, ": lag must be in [1, ", kLargest, "], got ", lag);
  KVOPS_CHECK(std::isfinite(static_cast<float>(v_weight)), op, ": v_weight must be finite in fp32, got ", v_weight);
  KVOPS_CHECK(prefix >= 0, op, ": prefix must be >= 0, got ", prefix);
  const ValidSlots slots = check_valid_slots(op, k, b, n, starts, lengths);
  check_pages(op, block_table, k, n, starts, lengths);
  const int64_t segments = num_segments(n, prefix, lag);
  check_head_dim(op, "k", k);
  check_head_dim(op, "v", v);
  const Tensor scores = empty(op, k, std::array{b, heads, segments, lag}, ScalarType::Float);
  if (scores.numel() == 0) return scores;
  const LagScoreParams p{.k = view,
                         .v = kv.v.view,
                         .scores = static_cast<float*>(scores.mutable_data_ptr()),
                         .dtype = check_read_dtype(op, "k", k),
                         .slots = slots,
                         .b = b,
                         .heads = heads,
                         .d = d,
                         .dv = kv.v.d,
                         .segments = segments,
                         .lag = lag,
                         .prefix = prefix,
                         .v_weight = static_cast<float>(v_weight),
                         .self_reference = self_reference};
  HostCall call(op, k);
  launch_lag_score(p, call);
  return scores;
}

}  // namespace

KVOPS_IMPL(m) {
  m.impl("lag_score", TORCH_BOX(&lag_score));
}

}  // namespace kvops
