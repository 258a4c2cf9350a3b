// drop_scores: checks arguments, allocates the output, launches.
#include "drop_scores.h"

#include "../host.h"
#include "window_checks.h"

namespace kvops {
namespace {

Tensor drop_scores(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& visible,
                   std::optional<double> scale, int64_t group_reduce, const OptionalTensor& starts, double softcap,
                   const OptionalTensor& sink_logits, double epsilon, const OptionalTensor& block_table) {
  const char* op = "drop_scores";
  const KVPair kv = check_read_pair(op, k, v, block_table);
  Window window = check_window(op, q, k, visible, scale, static_cast<int64_t>(Reduce::sum), group_reduce, starts,
                               softcap, sink_logits, std::nullopt, block_table);
  check_head_dim(op, "k", k);
  check_head_dim(op, "v", v);
  KVOPS_CHECK(epsilon >= 1e-7 && epsilon <= 1, op, ": epsilon must lie in [1e-7, 1], got ", epsilon);
  const Tensor scores = empty_scores(op, q, window);
  if (scores.numel() == 0) return scores;
  const DropScoresParams p{.window = window, .v = kv.v.view, .dv = kv.v.d, .epsilon = static_cast<float>(epsilon)};
  HostCall call(op, q);
  launch_drop_scores(p, call);
  return scores;
}

}  // namespace

KVOPS_IMPL(m) {
  m.impl("drop_scores", TORCH_BOX(&drop_scores));
}

}  // namespace kvops
