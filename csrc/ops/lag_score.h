// lag_score: parameters, checks, output shape.
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

// Scored partitions of count slots: all complete ones behind the prefix but the last, which is only a reference.
KVOPS_HOST_DEVICE inline int64_t num_segments(int64_t count, int64_t prefix, int64_t lag) {
  const int64_t complete = count > prefix ? (count - prefix) / lag : 0;
  return complete > 1 ? complete - 1 : 0;
}

// Floats of scratch that a CPU worker needs: 6 per channel of K and of V (rows rounded up to a 64-byte register, of
// elements of 2 bytes at least), and one partition of V's scores.
inline int64_t lag_score_scratch(const LagScoreParams& p) {
  return 6 * ((p.k.row_bytes + 63) / 64 + (p.v.row_bytes + 63) / 64) * 32 + (p.lag + 15) / 16 * 16;
}

#ifdef KVOPS_CHECKS
inline LagScoreParams check_lag_score(const Tensor& k, const Tensor& v, int64_t lag, int64_t prefix, double v_weight,
                                      bool self_reference, const OptionalTensor& starts, const OptionalTensor& lengths,
                                      Tensor& scores) {
  const char* op = "lag_score";
  const KVPair kv = check_kv_pair(op, k, v);
  constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();
  KVOPS_CHECK(lag >= 1 && lag <= kLargest, op, ": lag must be in [1, ", kLargest, "], got ", lag);
  KVOPS_CHECK(std::isfinite(static_cast<float>(v_weight)), op, ": v_weight must be finite in fp32, got ", v_weight);
  KVOPS_CHECK(prefix >= 0, op, ": prefix must be >= 0, got ", prefix);
  const ValidSlots slots = check_valid_slots(op, k, kv.b, kv.n, starts, lengths);
  const int64_t segments = num_segments(kv.n, prefix, lag);
  scores = empty(op, k, std::array{kv.b, kv.heads, segments, lag}, ScalarType::Float);
  return {.k = kv.k,
          .v = kv.v,
          .scores = static_cast<float*>(scores.mutable_data_ptr()),
          .dtype = kv.dtype,
          .slots = slots,
          .b = kv.b,
          .heads = kv.heads,
          .d = kv.d,
          .dv = kv.dv,
          .segments = segments,
          .lag = lag,
          .prefix = prefix,
          .v_weight = static_cast<float>(v_weight),
          .self_reference = self_reference};
}
#endif

}  // namespace kvops
