// lsh_bucket: checks arguments, allocates the output, launches.
#include "lsh_bucket.h"

#include "../host.h"

namespace kvops {
namespace {

Tensor lsh_bucket(const Tensor& k, const Tensor& indices, const Tensor& projection, const Tensor& phase,
                  const OptionalTensor& block_table) {
  const char* op = "lsh_bucket";
  check_same_device(op, "projection", projection, k);
  check_same_device(op, "phase", phase, k);
  const DType dtype = check_read_dtype(op, "k", k);
  check_scalar_type(op, "projection", projection, ScalarType::Float);
  check_scalar_type(op, "phase", phase, ScalarType::Float);
  const KV kv = check_read_cache(op, "k", k, block_table);
  const auto& [view, b, heads, n, d] = kv;
  const IndexView rows = check_indices(op, indices, k, kv);
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
  check_pages(op, block_table, k, IndexRange(indices));
  const Tensor buckets = empty(op, k, std::array{b, heads, rows.m}, ScalarType::Int);
  const LshBucketParams p{.k = view,
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
  HostCall call(op, k);
  launch_lsh_bucket(p, call);
  return buckets;
}

}  // namespace

KVOPS_IMPL(m) {
  m.impl("lsh_bucket", TORCH_BOX(&lsh_bucket));
}

}  // namespace kvops
