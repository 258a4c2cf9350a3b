// value_norm: checks arguments, allocates the output, launches.
#include "value_norm.h"

#include "../host.h"

namespace kvops {
namespace {

constexpr int64_t kMostHidden = int64_t{1} << 20;

Tensor value_norm(const Tensor& v, const Tensor& w_o, int64_t group_reduce, const OptionalTensor& starts,
                  const OptionalTensor& lengths, const OptionalTensor& block_table) {
  const char* op = "value_norm";
  check_same_device(op, "w_o", w_o, v);
  const DType dtype = check_read_dtype(op, "v", v);
  check_scalar_type(op, "w_o", w_o, v.element_size() == 1 ? ScalarType::BFloat16 : v.scalar_type());
  const KV kv = check_read_cache(op, "v", v, block_table);
  const auto& [view, b, heads, n, dv] = kv;
  const int64_t width = heads * dv;
  KVOPS_CHECK(w_o.dim() == 2 && w_o.size(1) >= 1 && width > 0 && w_o.size(1) % width == 0 &&
                  (w_o.stride(1) == 1 || w_o.size(1) == 1),
              op, ": w_o must be [hidden, a multiple of ", heads, " heads * ", dv, "] with a contiguous last dim, got ",
              shape(w_o));
  // Rows that share memory (stride 0) would make the work unlimited, and no signal interrupts it.
  KVOPS_CHECK(w_o.size(0) <= kMostHidden, op, ": w_o must have at most ", kMostHidden, " rows (hidden), got ",
              w_o.size(0));
  const Reduce reduce = check_reduce(op, "group_reduce", group_reduce, Reduce::max);
  const ValidSlots slots = check_valid_slots(op, v, b, n, starts, lengths);
  check_pages(op, block_table, v, n, starts, lengths);
  check_head_dim(op, "v", v);
  const Tensor norms = empty(op, v, std::array{b, heads, n}, ScalarType::Float);
  const ValueNormParams p{.v = view,
                          .w_o = static_cast<const char*>(w_o.const_data_ptr()),
                          .w_stride = w_o.stride(0) * static_cast<int64_t>(w_o.element_size()),
                          .norms = static_cast<float*>(norms.mutable_data_ptr()),
                          .dtype = dtype,
                          .slots = slots,
                          .b = b,
                          .heads = heads,
                          .group = w_o.size(1) / width,
                          .n = n,
                          .dv = dv,
                          .hidden = w_o.size(0),
                          .group_reduce = reduce};
  HostCall call(op, v);
  launch_value_norm(p, call);
  return norms;
}

}  // namespace

KVOPS_IMPL(m) {
  m.impl("value_norm", TORCH_BOX(&value_norm));
}

}  // namespace kvops
