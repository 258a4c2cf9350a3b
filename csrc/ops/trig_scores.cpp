// trig_scores: checks arguments, allocates the output, launches.
#include "trig_scores.h"

#include "../host.h"
#include "head_rows.h"

namespace kvops {
namespace {

Tensor trig_scores(const Tensor& k, const Tensor& centers, const OptionalTensor& norms, bool interleaved,
                   const OptionalTensor& starts, const OptionalTensor& lengths, const OptionalTensor& block_table) {
  const char* op = "trig_scores";
  const DType dtype = check_read_dtype(op, "k", k);
  const KV kv = check_read_cache(op, "k", k, block_table);
  const auto& [view, b, heads, n, d] = kv;
  const PerHead center = check_per_head(op, "centers", centers, k, kv, std::array{d});
  int64_t pairs = 0;
  PerHead norm{};
  if (norms) {
    pairs = norms->dim() >= 2 ? norms->size(norms->dim() - 1) : 0;
    KVOPS_CHECK(1 <= pairs && 2 * pairs <= d, op, ": norms must be float32 [", center.heads, ", pairs] or [", b, ", ",
                center.heads, ", pairs] with 2 * pairs at most the head_dim ", d, ", got ", shape(*norms));
    norm = check_per_head(op, "norms", *norms, k, kv, std::array{pairs}, center.heads);
  }
  const ValidSlots slots = check_valid_slots(op, k, b, n, starts, lengths);
  check_pages(op, block_table, k, n, starts, lengths);
  check_head_dim(op, "k", k);
  const Tensor scores = empty(op, k, std::array{b, center.heads, n}, ScalarType::Float);
  const TrigScoresParams p{.k = view,
                           .centers = {center.data, center.stride_b, d},
                           .norms = {norm.data, norm.stride_b, pairs},
                           .scores = static_cast<float*>(scores.mutable_data_ptr()),
                           .dtype = dtype,
                           .slots = slots,
                           .b = b,
                           .heads = heads,
                           .group = heads ? center.heads / heads : 0,
                           .n = n,
                           .d = d,
                           .pairs = pairs,
                           .interleaved = interleaved,
                           .scale = 1.0f};
  HostCall call(op, k);
  launch_trig_scores(p, call);
  return scores;
}

}  // namespace

KVOPS_IMPL(m) {
  m.impl("trig_scores", TORCH_BOX(&trig_scores));
}

}  // namespace kvops
