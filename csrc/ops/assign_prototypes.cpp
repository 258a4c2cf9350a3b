// assign_prototypes: checks arguments, allocates outputs, launches.
#include "assign_prototypes.h"

#include "../host.h"

namespace kvops {
namespace {

Tensor assign_prototypes(const Tensor& k, const Tensor& prototypes, const OptionalTensor& starts,
                         const OptionalTensor& lengths, const OptionalTensor& block_table) {
  const char* op = "assign_prototypes";
  check_same_device(op, "prototypes", prototypes, k);
  const DType dtype = check_read_dtype(op, "k", k);
  check_scalar_type(op, "prototypes", prototypes, ScalarType::Float);
  const KV kv = check_read_cache(op, "k", k, block_table);
  const auto& [view, b, heads, n, d] = kv;
  KVOPS_CHECK(
      prototypes.dim() == 4 && prototypes.size(0) == b && prototypes.size(1) == heads && prototypes.size(2) >= 1 &&
          prototypes.size(2) <= int64_t{1} << 25 && prototypes.size(3) == d && prototypes.is_contiguous(),
      op, ": prototypes must be a contiguous [", b, ", ", heads, ", at least 1, ", d, "], got ", shape(prototypes));
  const ValidSlots slots = check_valid_slots(op, k, b, n, starts, lengths);
  check_pages(op, block_table, k, n, starts, lengths);
  check_head_dim(op, "k", k);
  const Tensor assignment = empty(op, k, std::array{b, heads, n}, ScalarType::Int);
  const AssignPrototypesParams p{.k = view,
                                 .prototypes = static_cast<const float*>(prototypes.const_data_ptr()),
                                 .assignment = static_cast<int32_t*>(assignment.mutable_data_ptr()),
                                 .dtype = dtype,
                                 .slots = slots,
                                 .b = b,
                                 .heads = heads,
                                 .n = n,
                                 .d = d,
                                 .count = prototypes.size(2)};
  HostCall call(op, k);
  launch_assign_prototypes(p, call);
  return assignment;
}

}  // namespace

KVOPS_IMPL(m) {
  m.impl("assign_prototypes", TORCH_BOX(&assign_prototypes));
}

}  // namespace kvops
