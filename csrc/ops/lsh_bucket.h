// lsh_bucket: parameters, checks, output shape.
#pragma once
#include "indices.h"

namespace kvops {

struct LshBucketParams {
  KVView k;                 // [b, Hk, n, d]
  IndexView indices;        // [b, Hk, p], each in [-1, n)
  const float* projection;  // [r, d]
  const float* phase;       // [r]
  int32_t* buckets;         // [b, Hk, p]
  DType dtype;
  int64_t b, heads, n, d, r;
};

constexpr int64_t kMaxHashBits = 30;

// Is the cosine of x, which is finite, positive? Without a cosine, so that every device says the same. Beyond 2^53
// turns neighbouring numbers are whole turns apart.
KVOPS_HOST_DEVICE inline bool cosine_is_positive(double x) {
  const double turns = x * 0.15915494309189535;  // 1 / (2 pi)
  if (!(turns > -0x1p53 && turns < 0x1p53)) return true;
  const double past = turns - static_cast<double>(static_cast<int64_t>(turns));  // in (-1, 1)
  const double distance = past < 0 ? -past : past;
  return distance < 0.25 || distance > 0.75;
}

// Floats of scratch of a CPU call: the projection and for each worker a key, in fp64, padded to registers.
inline int64_t lsh_bucket_scratch(const LshBucketParams& p, int64_t workers) {
  return 2 * (p.r + workers) * ((p.d + 31) / 32 * 32);
}

#ifdef KVOPS_CHECKS
inline LshBucketParams check_lsh_bucket(const Tensor& k, const Tensor& indices, const Tensor& projection,
                                        const Tensor& phase, Tensor& buckets) {
  const char* op = "lsh_bucket";
  check_same_device(op, "projection", projection, k);
  check_same_device(op, "phase", phase, k);
  const DType dtype = check_dtype(op, "k", k);
  check_scalar_type(op, "projection", projection, ScalarType::Float);
  check_scalar_type(op, "phase", phase, ScalarType::Float);
  const KVView view = check_kv(op, "k", k);
  const IndexView rows = check_indices(op, indices, k);
  const int64_t b = k.size(0), heads = k.size(1), n = k.size(2), d = k.size(3);
  KVOPS_CHECK(projection.dim() == 2 && projection.size(0) >= 1 && projection.size(0) <= kMaxHashBits &&
                  projection.size(1) == d && projection.is_contiguous(),
              op, ": projection must be a contiguous [r, ", d, "] with r in [1, ", kMaxHashBits, "], got ",
              shape(projection));
  const int64_t r = projection.size(0);
  KVOPS_CHECK(phase.dim() == 1 && phase.size(0) == r && phase.is_contiguous(), op, ": phase must be a contiguous [", r,
              "], one for each row of projection, got ", shape(phase));
  for (const auto& [name, x] : {std::pair{"projection", &projection}, std::pair{"phase", &phase}}) {
    const OptionalTensor values = readable(*x);
    const float* const value = values ? static_cast<const float*>(values->const_data_ptr()) : nullptr;
    for (int64_t i = 0; value && i < values->numel(); ++i)
      KVOPS_CHECK(std::isfinite(value[i]), op, ": ", name, " must be finite, got ", value[i], " at entry ", i);
  }
  check_index_values(op, indices, n);
  buckets = empty(op, k, std::array{b, heads, rows.m}, ScalarType::Int);
  return {.k = view,
          .indices = rows,
          .projection = static_cast<const float*>(projection.const_data_ptr()),
          .phase = static_cast<const float*>(phase.const_data_ptr()),
          .buckets = static_cast<int32_t*>(buckets.mutable_data_ptr()),
          .dtype = dtype,
          .b = b,
          .heads = heads,
          .n = n,
          .d = d,
          .r = r};
}
#endif

}  // namespace kvops
