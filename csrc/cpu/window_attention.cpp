// check.h first: it makes the checks in ops/ visible.
#include "../check.h"
//
#include "../ops/window_attention.h"
#include "launch.h"
#include "window_scratch.h"

namespace kvops {

KVOPS_LEVELS(window_attention, WindowAttentionParams)

namespace {

std::tuple<Tensor, Tensor, Tensor> window_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                                    const Tensor& visible, std::optional<double> scale, int64_t reduce,
                                                    int64_t group_reduce, const OptionalTensor& starts, double softcap,
                                                    const OptionalTensor& sink_logits) {
  Tensor out = q, lse = q, scores = q;
  const WindowAttentionParams p = check_window_attention(q, k, v, visible, scale, reduce, group_reduce, starts, softcap,
                                                         sink_logits, out, lse, scores);
  const WindowScratch sizes(p.window, p.dv);
  const int64_t threads = threads_for(p.window.b * p.window.heads * p.window.n * p.window.k.row_bytes * p.window.w);
  const Scratch scratch("window_attention",
                        threads * sizes.worker + sizes.items * (sizes.stats + sizes.out + sizes.logits));
  window_attention_cpu(p, scratch.workers(threads));
  return {out, lse, scores};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvops, CPU, m) {
  m.impl("window_attention", TORCH_BOX(&window_attention));
}

}  // namespace kvops
