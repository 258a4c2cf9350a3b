// anchor_cosine: parameters, checks, output shapes.
#pragma once
#include "../kv_view.h"

namespace kvops {

struct AnchorCosineParams {
  KVView k;                   // [b, Hk, n, d]
  const float* given_anchor;  // [b, Hk, d] or null
  float* anchor;              // [b, Hk, d]: the sum made here, or the copy of the given one
  float* scores;              // [b, Hk, n]
  DType dtype;
  ValidSlots slots;
  int64_t b, heads, n, d;
  bool normalize_anchor;
};

// The sum over tokens goes in blocks of this many, combined in order, whatever the number of threads.
constexpr int64_t kAnchorBlock = 512;

// Floats of scratch of a CPU call: per channel (rows rounded up to a 64-byte register, of elements of 2 bytes at least)
// one sum for each worker or for each block of a head.
inline int64_t anchor_cosine_scratch(const AnchorCosineParams& p, int64_t workers) {
  const int64_t blocks = (p.n + kAnchorBlock - 1) / kAnchorBlock;
  return (p.k.row_bytes + 63) / 64 * (p.dtype == DType::f32 ? 16 : 32) * (blocks > workers ? blocks : workers);
}

#ifdef KVOPS_CHECKS
inline AnchorCosineParams check_anchor_cosine(const Tensor& k, const OptionalTensor& anchor, bool normalize_anchor,
                                              const OptionalTensor& starts, const OptionalTensor& lengths,
                                              Tensor& scores, Tensor& anchor_out) {
  const char* op = "anchor_cosine";
  const DType dtype = check_dtype(op, "k", k);
  const KVView view = check_kv(op, "k", k);
  const int64_t b = k.size(0), heads = k.size(1), n = k.size(2), d = k.size(3);
  if (anchor) {
    check_same_device(op, "anchor", *anchor, k);
    check_scalar_type(op, "anchor", *anchor, ScalarType::Float);
    KVOPS_CHECK(anchor->dim() == 3 && anchor->size(0) == b && anchor->size(1) == heads && anchor->size(2) == d &&
                    anchor->is_contiguous(),
                op, ": anchor must be a contiguous [", b, ", ", heads, ", ", d, "], got ", shape(*anchor));
  }
  const ValidSlots slots = check_valid_slots(op, k, b, n, starts, lengths);
  scores = empty(op, k, std::array{b, heads, n}, ScalarType::Float);
  anchor_out = empty(op, k, std::array{b, heads, d}, ScalarType::Float);
  return {.k = view,
          .given_anchor = anchor ? static_cast<const float*>(anchor->const_data_ptr()) : nullptr,
          .anchor = static_cast<float*>(anchor_out.mutable_data_ptr()),
          .scores = static_cast<float*>(scores.mutable_data_ptr()),
          .dtype = dtype,
          .slots = slots,
          .b = b,
          .heads = heads,
          .n = n,
          .d = d,
          .normalize_anchor = normalize_anchor};
}
#endif

}  // namespace kvops
