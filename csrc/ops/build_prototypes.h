// build_prototypes: parameters, checks, output shapes.
#pragma once
#include "indices.h"

namespace kvops {

struct BuildPrototypesParams {
  KVView k;                // [b, Hk, n, d]
  IndexView sats;          // [b, Hk, p]: each in [-1, n), strictly ascending, -1 last; data is null without any
  const int32_t* buckets;  // [b, Hk, p]: each in [-1, num_buckets)
  float* prototypes;       // [b, Hk, num_chunks + num_buckets, d]
  int32_t* counts;         // [b, Hk, num_chunks + num_buckets]
  DType dtype;
  ValidSlots slots;
  int64_t b, heads, n, d;
  int64_t num_chunks, num_buckets;

  KVOPS_HOST_DEVICE int64_t count() const { return num_chunks + num_buckets; }
  // Chunks that a row of `valid` tokens is cut into; the others are empty.
  KVOPS_HOST_DEVICE int64_t chunks(int64_t valid) const { return num_chunks < valid ? num_chunks : valid; }
  // Chunk c of a row is [chunk_begin(c), chunk_begin(c + 1)) of its valid tokens, for c < chunks(valid).
  KVOPS_HOST_DEVICE int64_t chunk_begin(int64_t valid, int64_t c) const { return c * valid / chunks(valid); }
};

// Floats of scratch of a worker of a CPU call: a sum in fp64 and one in fp32, padded to registers.
inline int64_t build_prototypes_scratch(const BuildPrototypesParams& p) {
  return 3 * ((p.d + 31) / 32 * 32);
}

#ifdef KVOPS_CHECKS
inline BuildPrototypesParams check_build_prototypes(const Tensor& k, const OptionalTensor& sat_indices,
                                                    const OptionalTensor& buckets, int64_t num_chunks,
                                                    int64_t num_buckets, const OptionalTensor& starts,
                                                    const OptionalTensor& lengths, Tensor& prototypes, Tensor& counts) {
  const char* op = "build_prototypes";
  const DType dtype = check_dtype(op, "k", k);
  const KVView view = check_kv(op, "k", k);
  const int64_t b = k.size(0), heads = k.size(1), n = k.size(2), d = k.size(3);
  constexpr int64_t kMost = int64_t{1} << 24;
  KVOPS_CHECK(num_chunks >= 0 && num_chunks <= kMost, op, ": num_chunks must be in [0, ", kMost, "], got ", num_chunks);
  KVOPS_CHECK(num_buckets >= 0 && num_buckets <= kMost, op, ": num_buckets must be in [0, ", kMost, "], got ",
              num_buckets);
  KVOPS_CHECK(num_chunks + num_buckets >= 1, op, ": num_chunks + num_buckets must be at least 1, got 0");
  const ValidSlots slots = check_valid_slots(op, k, b, n, starts, lengths);
  KVOPS_CHECK(sat_indices.has_value() == buckets.has_value(), op,
              ": sat_indices and buckets must be given together, got one of them");
  IndexView sats{};
  if (sat_indices) {
    sats = check_indices(op, *sat_indices, k, "sat_indices");
    check_same_device(op, "buckets", *buckets, k);
    check_scalar_type(op, "buckets", *buckets, ScalarType::Int);
    KVOPS_CHECK(buckets->dim() == 3 && buckets->size(0) == b && buckets->size(1) == heads &&
                    buckets->size(2) == sats.m && buckets->is_contiguous(),
                op, ": buckets must be a contiguous int32 ", shape(*sat_indices), ", got ", shape(*buckets));
    check_ascending_values(op, *sat_indices, n, "sat_indices");
    const OptionalTensor values = readable(*buckets);
    const int32_t* value = values ? static_cast<const int32_t*>(values->const_data_ptr()) : nullptr;
    for (int64_t i = 0; value && i < values->numel(); ++i)
      KVOPS_CHECK(value[i] >= -1 && value[i] < num_buckets, op, ": buckets must lie in [-1, ", num_buckets, "), got ",
                  value[i]);
  }
  prototypes = empty(op, k, std::array{b, heads, num_chunks + num_buckets, d}, ScalarType::Float);
  counts = empty(op, k, std::array{b, heads, num_chunks + num_buckets}, ScalarType::Int);
  return {.k = view,
          .sats = sats,
          .buckets = buckets ? static_cast<const int32_t*>(buckets->const_data_ptr()) : nullptr,
          .prototypes = static_cast<float*>(prototypes.mutable_data_ptr()),
          .counts = static_cast<int32_t*>(counts.mutable_data_ptr()),
          .dtype = dtype,
          .slots = slots,
          .b = b,
          .heads = heads,
          .n = n,
          .d = d,
          .num_chunks = num_chunks,
          .num_buckets = num_buckets};
}
#endif

}  // namespace kvops
