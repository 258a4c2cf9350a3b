// anchor_cosine: checks arguments, allocates outputs, launches.
#include "anchor_cosine.h"

#include "../host.h"

namespace kvops {
namespace {

std::tuple<Tensor, Tensor> anchor_cosine(const Tensor& k, const OptionalTensor& anchor, bool normalize_anchor,
                                         const OptionalTensor& starts, const OptionalTensor& lengths,
                                         const OptionalTensor& block_table) {
  const char* op = "anchor_cosine";
  const DType dtype = check_read_dtype(op, "k", k);
  const KV kv = check_read_cache(op, "k", k, block_table);
  const auto& [view, b, heads, n, d] = kv;
  if (anchor) {
    check_same_device(op, "anchor", *anchor, k);
    check_scalar_type(op, "anchor", *anchor, ScalarType::Float);
    KVOPS_CHECK(anchor->dim() == 3 && anchor->size(0) == b && anchor->size(1) == heads && anchor->size(2) == d &&
                    anchor->is_contiguous(),
                op, ": anchor must be a contiguous [", b, ", ", heads, ", ", d, "], got ", shape(*anchor));
  }
  const ValidSlots slots = check_valid_slots(op, k, b, n, starts, lengths);
  check_pages(op, block_table, k, n, starts, lengths);
  check_head_dim(op, "k", k);
  const Tensor scores = empty(op, k, std::array{b, heads, n}, ScalarType::Float);
  const Tensor anchor_out = empty(op, k, std::array{b, heads, d}, ScalarType::Float);
  const AnchorCosineParams p{.k = view,
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
  HostCall call(op, k);
  launch_anchor_cosine(p, call);
  return {scores, anchor_out};
}

}  // namespace

KVOPS_IMPL(m) {
  m.impl("anchor_cosine", TORCH_BOX(&anchor_cosine));
}

}  // namespace kvops
