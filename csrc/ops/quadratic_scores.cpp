// quadratic_scores: checks arguments, allocates the output, launches.
#include "quadratic_scores.h"

#include <cmath>

#include "../host.h"
#include "head_rows.h"

namespace kvops {
namespace {

Tensor quadratic_scores(const Tensor& k, const Tensor& mean, const OptionalTensor& cov, std::optional<double> scale,
                        const OptionalTensor& starts, const OptionalTensor& lengths,
                        const OptionalTensor& block_table) {
  const char* op = "quadratic_scores";
  const DType dtype = check_read_dtype(op, "k", k);
  const KV kv = check_read_cache(op, "k", k, block_table);
  const auto& [view, b, heads, n, d] = kv;
  const PerHead means = check_per_head(op, "mean", mean, k, kv, std::array{d});
  PerHead covs{};
  if (cov) covs = check_per_head(op, "cov", *cov, k, kv, std::array{d, d}, means.heads);
  const float factor = static_cast<float>(scale.value_or(1 / std::sqrt(static_cast<double>(d))));
  KVOPS_CHECK(std::isfinite(factor), op, ": scale must be finite in fp32, got ", *scale);
  const ValidSlots slots = check_valid_slots(op, k, b, n, starts, lengths);
  check_pages(op, block_table, k, n, starts, lengths);
  check_head_dim(op, "k", k);
  const Tensor scores = empty(op, k, std::array{b, means.heads, n}, ScalarType::Float);
  float* const out = static_cast<float*>(scores.mutable_data_ptr());
  const HeadRowsF32 rows{means.data, means.stride_b, d};
  const int64_t group = heads ? means.heads / heads : 0;
  HostCall call(op, k);
  if (cov) {
    const QuadraticScoresParams p{.k = view,
                                  .mean = rows,
                                  .cov = covs.data,
                                  .cov_stride_b = covs.stride_b,
                                  .scores = out,
                                  .dtype = dtype,
                                  .slots = slots,
                                  .b = b,
                                  .heads = heads,
                                  .group = group,
                                  .n = n,
                                  .d = d,
                                  .scale = factor};
    launch_quadratic_scores(p, call);
  } else {
    const TrigScoresParams p{.k = view,
                             .centers = rows,
                             .norms = {nullptr, 0, 0},
                             .scores = out,
                             .dtype = dtype,
                             .slots = slots,
                             .b = b,
                             .heads = heads,
                             .group = group,
                             .n = n,
                             .d = d,
                             .pairs = 0,
                             .interleaved = false,
                             .scale = factor};
    launch_trig_scores(p, call);
  }
  return scores;
}

}  // namespace

KVOPS_IMPL(m) {
  m.impl("quadratic_scores", TORCH_BOX(&quadratic_scores));
}

}  // namespace kvops
