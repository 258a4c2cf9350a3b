// check.h first: it makes the checks in ops/ visible.
#include "../check.h"
//
#include "../ops/window_scores.h"
#include "launch.h"
#include "window_scratch.h"

namespace kvops {

KVOPS_LEVELS(window_scores, WindowScoresParams)

namespace {

Tensor window_scores(const Tensor& q, const Tensor& k, const Tensor& visible, const OptionalTensor& lse,
                     std::optional<double> scale, int64_t score, int64_t reduce, int64_t group_reduce,
                     const OptionalTensor& starts, double softcap, const OptionalTensor& sink_logits) {
  Tensor scores = k;
  const WindowScoresParams p =
      check_window_scores(q, k, visible, lse, scale, score, reduce, group_reduce, starts, softcap, sink_logits, scores);
  const WindowScratch sizes(p.window, 0);
  const int64_t threads = threads_for(p.window.b * p.window.heads * p.window.n * p.window.k.row_bytes * p.window.w);
  const bool make_lse = p.softmax && !lse;
  const Scratch scratch("window_scores",
                        threads * sizes.worker + (make_lse ? sizes.items * (sizes.stats + sizes.logits) : 0));
  window_scores_cpu(p, scratch.workers(threads));
  if (lse) check_lse_total(p, *lse, visible, starts, sink_logits, scores);
  return scores;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvops, CPU, m) {
  m.impl("window_scores", TORCH_BOX(&window_scores));
}

}  // namespace kvops
