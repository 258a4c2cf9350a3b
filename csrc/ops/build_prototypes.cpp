// build_prototypes: checks arguments, allocates outputs, launches.
#include "build_prototypes.h"

#include "../host.h"

namespace kvops {
namespace {

std::tuple<Tensor, Tensor> build_prototypes(const Tensor& k, const OptionalTensor& sat_indices,
                                            const OptionalTensor& buckets, int64_t num_chunks, int64_t num_buckets,
                                            int64_t least_chunk, const OptionalTensor& starts,
                                            const OptionalTensor& lengths, const OptionalTensor& block_table) {
  const char* op = "build_prototypes";
  const DType dtype = check_read_dtype(op, "k", k);
  const KV kv = check_read_cache(op, "k", k, block_table);
  const auto& [view, b, heads, n, d] = kv;
  constexpr int64_t kMost = int64_t{1} << 24;
  KVOPS_CHECK(num_chunks >= 0 && num_chunks <= kMost, op, ": num_chunks must be in [0, ", kMost, "], got ", num_chunks);
  KVOPS_CHECK(num_buckets >= 0 && num_buckets <= kMost, op, ": num_buckets must be in [0, ", kMost, "], got ",
              num_buckets);
  KVOPS_CHECK(least_chunk >= 1, op, ": least_chunk must be at least 1, got ", least_chunk);
  KVOPS_CHECK(num_chunks + num_buckets >= 1, op, ": num_chunks + num_buckets must be at least 1, got 0");
  const ValidSlots slots = check_valid_slots(op, k, b, n, starts, lengths);
  check_pages(op, block_table, k, n, starts, lengths);
  KVOPS_CHECK(sat_indices.has_value() == buckets.has_value(), op,
              ": sat_indices and buckets must be given together, got only ", sat_indices ? "sat_indices" : "buckets");
  IndexView sats{};
  if (sat_indices) {
    sats = check_indices(op, *sat_indices, k, kv, "sat_indices");
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
  check_head_dim(op, "k", k);
  const Tensor prototypes = empty(op, k, std::array{b, heads, num_chunks + num_buckets, d}, ScalarType::Float);
  const Tensor counts = empty(op, k, std::array{b, heads, num_chunks + num_buckets}, ScalarType::Int);
  const BuildPrototypesParams p{.k = view,
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
                                .num_buckets = num_buckets,
                                .least_chunk = std::min(least_chunk, int64_t{1} << 31)};
  HostCall call(op, k);
  launch_build_prototypes(p, call);
  return {prototypes, counts};
}

}  // namespace

KVOPS_IMPL(m) {
  m.impl("build_prototypes", TORCH_BOX(&build_prototypes));
}

}  // namespace kvops
