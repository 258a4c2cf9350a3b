// outlier_degree: checks arguments, allocates the output, launches.
#include "outlier_degree.h"

#include "../host.h"

namespace kvops {
namespace {

Tensor outlier_degree(const Tensor& k, int64_t kappa, bool standardize, const OptionalTensor& starts,
                      const OptionalTensor& lengths, const OptionalTensor& block_table) {
  const char* op = "outlier_degree";
  const DType dtype = check_read_dtype(op, "k", k);
  const KV kv = check_read_cache(op, "k", k, block_table);
  const auto& [view, b, heads, n, d] = kv;
  KVOPS_CHECK(kappa >= 1 && kappa <= kMaxKappa, op, ": kappa must be in [1, ", kMaxKappa, "], got ", kappa);
  const ValidSlots slots = check_valid_slots(op, k, b, n, starts, lengths);
  check_pages(op, block_table, k, n, starts, lengths);
  check_head_dim(op, "k", k);
  const Tensor scores = empty(op, k, std::array{b, heads, n}, ScalarType::Float);
  const OutlierDegreeParams p{.k = view,
                              .scores = static_cast<float*>(scores.mutable_data_ptr()),
                              .dtype = dtype,
                              .slots = slots,
                              .b = b,
                              .heads = heads,
                              .n = n,
                              .d = d,
                              .kappa = kappa,
                              .standardize = standardize};
  HostCall call(op, k);
  launch_outlier_degree(p, call);
  return scores;
}

}  // namespace

KVOPS_IMPL(m) {
  m.impl("outlier_degree", TORCH_BOX(&outlier_degree));
}

}  // namespace kvops
