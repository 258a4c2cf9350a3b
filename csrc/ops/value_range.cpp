// value_range: checks arguments, allocates the output, launches.
#include "value_range.h"

#include "../host.h"

namespace kvops {
namespace {

Tensor value_range(const Tensor& v, const OptionalTensor& starts, const OptionalTensor& lengths,
                   const OptionalTensor& block_table) {
  const char* op = "value_range";
  const DType dtype = check_read_dtype(op, "v", v);
  const KV kv = check_read_cache(op, "v", v, block_table);
  const auto& [view, b, heads, n, dv] = kv;
  const ValidSlots slots = check_valid_slots(op, v, b, n, starts, lengths);
  check_pages(op, block_table, v, n, starts, lengths);
  check_head_dim(op, "v", v);
  const Tensor ranges = empty(op, v, std::array{b, heads, n}, ScalarType::Float);
  const ValueRangeParams p{.v = view,
                           .ranges = static_cast<float*>(ranges.mutable_data_ptr()),
                           .dtype = dtype,
                           .slots = slots,
                           .b = b,
                           .heads = heads,
                           .n = n,
                           .dv = dv};
  HostCall call(op, v);
  launch_value_range(p, call);
  return ranges;
}

}  // namespace

KVOPS_IMPL(m) {
  m.impl("value_range", TORCH_BOX(&value_range));
}

}  // namespace kvops
