// key_similarity: checks arguments, allocates the output, launches anchor_cosine, then the search for similar keys.
#include "key_similarity.h"

#include "../host.h"
#include "anchor_cosine.h"

namespace kvops {
namespace {

Tensor key_similarity(const Tensor& k, double threshold, const OptionalTensor& starts, const OptionalTensor& lengths,
                      const OptionalTensor& block_table) {
  const char* op = "key_similarity";
  const DType dtype = check_read_dtype(op, "k", k);
  const KV kv = check_read_cache(op, "k", k, block_table);
  const auto& [view, b, heads, n, d] = kv;
  KVOPS_CHECK(threshold >= 0, op, ": threshold must be at least 0, got ", threshold);
  const ValidSlots slots = check_valid_slots(op, k, b, n, starts, lengths);
  check_pages(op, block_table, k, n, starts, lengths);
  check_head_dim(op, "k", k);
  const Tensor scores = empty(op, k, std::array{b, heads, n}, ScalarType::Float);
  const Tensor anchor = empty(op, k, std::array{b, heads, d}, ScalarType::Float);
  float* const sums = static_cast<float*>(anchor.mutable_data_ptr());
  float* const out = static_cast<float*>(scores.mutable_data_ptr());
  {
    HostCall call(op, k);
    launch_anchor_cosine({.k = view,
                          .given_anchor = nullptr,
                          .anchor = sums,
                          .scores = out,
                          .dtype = dtype,
                          .slots = slots,
                          .b = b,
                          .heads = heads,
                          .n = n,
                          .d = d,
                          .normalize_anchor = true},
                         call);
  }
  const KeySimilarityParams p{.k = view,
                              .anchor = sums,
                              .scores = out,
                              .dtype = dtype,
                              .slots = slots,
                              .b = b,
                              .heads = heads,
                              .n = n,
                              .d = d,
                              .threshold = static_cast<float>(threshold)};
  HostCall call(op, k);
  launch_key_similarity(p, call);
  return scores;
}

}  // namespace

KVOPS_IMPL(m) {
  m.impl("key_similarity", TORCH_BOX(&key_similarity));
}

}  // namespace kvops
