// check.h first: it makes the checks in ops/ visible.
#include "../check.h"
//
#include "../ops/lag_score.h"
#include "launch.h"

namespace kvops {

KVOPS_LEVELS(lag_score, LagScoreParams)

namespace {

Tensor lag_score(const Tensor& k, const Tensor& v, int64_t lag, int64_t prefix, double v_weight, bool self_reference,
                 const OptionalTensor& starts, const OptionalTensor& lengths) {
  Tensor scores = k;
  const LagScoreParams p = check_lag_score(k, v, lag, prefix, v_weight, self_reference, starts, lengths, scores);
  if (scores.numel() == 0) return scores;
  const int64_t threads = threads_for(p.b * p.heads * p.segments * p.lag * (p.k.row_bytes + p.v.row_bytes));
  const Scratch scratch("lag_score", threads * lag_score_scratch(p));
  lag_score_cpu(p, scratch.workers(threads));
  return scores;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvops, CPU, m) {
  m.impl("lag_score", TORCH_BOX(&lag_score));
}

}  // namespace kvops
