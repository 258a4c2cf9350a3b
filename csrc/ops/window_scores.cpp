// window_scores: checks arguments, allocates the output, launches.
#include "window_scores.h"

#include "../host.h"
#include "window_checks.h"

namespace kvops {
namespace {

// Rejects an lse that cannot belong to these logits (other base or scale, other keys): with it the weights of a row
// would not sum to 1 (less the sink's share), nor the scores of a KV head to the total of its rows. Sums are needed for
// this, so reductions by maximum are not checked, and neither are scores with a NaN. On a GPU this runs after the
// kernel and under debug_checks() only.
void check_lse_total(const WindowScoresParams& p, const Tensor& lse, const Tensor& visible,
                     const OptionalTensor& starts, const OptionalTensor& sink_logits, const Tensor& scores) {
  const Window& w = p.window;
  if (w.reduce == Reduce::max || w.group_reduce == Reduce::max || w.n == 0) return;
  const OptionalTensor scores_here = readable(scores), lse_here = readable(lse), visible_here = readable(visible);
  if (!scores_here) return;
  const OptionalTensor starts_here = starts ? readable(*starts) : starts;
  const OptionalTensor sinks_here = sink_logits ? readable(*sink_logits) : sink_logits;
  const auto data = [](const auto& x, auto zero) { return static_cast<const decltype(zero)*>(x->const_data_ptr()); };
  const int64_t by_query = w.group_reduce == Reduce::none;
  const int64_t group = by_query ? 1 : w.group;  // query heads per row of scores
  for (int64_t b = 0; b < w.b; ++b)
    for (int64_t h = 0; h < w.heads * w.group; h += group) {
      const float* const row = data(scores_here, 0.0f) + (b * w.heads * w.group + h) / group * w.n;
      double total = 0, expected = 0;
      int64_t counting = 0;
#pragma omp simd reduction(+ : total)
      for (int64_t j = 0; j < w.n; ++j) total += row[j];
      for (int64_t g = h; g < h + group; ++g) {
        for (int64_t i = 0; i < w.w; ++i) {
          const int64_t end = data(visible_here, int32_t{})[b * w.visible_stride + i];
          if (end <= (starts_here ? data(starts_here, int32_t{})[b] : 0)) continue;
          const auto strides = lse_here->strides();
          const float x = data(lse_here, 0.0f)[b * strides[0] + g * strides[1] + i * strides[2]];
          expected += sinks_here ? 1 / (1 + std::exp(double(data(sinks_here, 0.0f)[g]) - x)) : 1.0;
          counting += g == h;
        }
      }
      if (w.reduce == Reduce::mean && counting) expected /= static_cast<double>(counting);
      if (w.group_reduce == Reduce::mean) expected /= static_cast<double>(group);
      KVOPS_CHECK(!(std::abs(total - expected) > 1e-2 * expected),
                  "window_scores: lse must be the natural log of the sum of "
                  "exp(logits) over exactly the keys that each row sees, so that the scores of ",
                  by_query ? "query head " : "KV head ", h / group, " of batch row ", b, " add up to ", expected,
                  ", got an lse with which they add up to ", total);
    }
}

Tensor window_scores(const Tensor& q, const Tensor& k, const Tensor& visible, const OptionalTensor& lse,
                     std::optional<double> scale, int64_t score, int64_t reduce, int64_t group_reduce,
                     const OptionalTensor& starts, double softcap, const OptionalTensor& sink_logits,
                     const OptionalTensor& block_table) {
  const char* op = "window_scores";
  KVOPS_CHECK(score == 0 || score == 1, op, ": score must be 0 (softmax) or 1 (dot), got ", score);
  const bool softmax = score == 0;
  KVOPS_CHECK(softmax || (!lse && !sink_logits), op,
              ": lse and sink_logits apply to a softmax only, expected neither with score='dot', got ",
              lse ? "lse" : "sink_logits");
  Window window =
      check_window(op, q, k, visible, scale, reduce, group_reduce, starts, softcap, sink_logits, block_table);
  check_head_dim(op, "k", k);
  LseView view{nullptr, 0, 0, 0};
  if (lse) {
    check_same_device(op, "lse", *lse, q);
    check_scalar_type(op, "lse", *lse, ScalarType::Float);
    KVOPS_CHECK(lse->dim() == 3 && lse->size(0) == q.size(0) && lse->size(1) == q.size(1) && lse->size(2) == q.size(2),
                op, ": lse must be float32 [", q.size(0), ", ", q.size(1), ", ", q.size(2), "], one per row of q, got ",
                shape(*lse));
    const auto strides = lse->strides();
    view = {static_cast<const float*>(lse->const_data_ptr()), strides[0], strides[1], strides[2]};
  }
  const Tensor scores = empty_scores(op, q, window);
  if (scores.numel() == 0) return scores;
  const WindowScoresParams p{window, view, softmax};
  HostCall call(op, q);
  launch_window_scores(p, call);
  if (lse) check_lse_total(p, *lse, visible, starts, sink_logits, scores);
  return scores;
}

}  // namespace

KVOPS_IMPL(m) {
  m.impl("window_scores", TORCH_BOX(&window_scores));
}

}  // namespace kvops
