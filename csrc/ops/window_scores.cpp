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
void check_lse_total(const WindowScoresParams& p, const Tensor& lse, const OptionalTensor& row_weights,
                     const Tensor& visible, const OptionalTensor& starts, const OptionalTensor& sink_logits,
                     const Tensor& scores) {
  const Window& w = p.window;
  if (w.reduce == Reduce::max || w.group_reduce == Reduce::max || w.n == 0) return;
  const OptionalTensor scores_here = readable(scores), lse_here = readable(lse), visible_here = readable(visible);
  if (!scores_here) return;
  const OptionalTensor starts_here = starts ? readable(*starts) : starts;
  const OptionalTensor sinks_here = sink_logits ? readable(*sink_logits) : sink_logits;
  const OptionalTensor weights_here = row_weights ? readable(*row_weights) : row_weights;
  RowValues weights = w.row_weights;
  if (weights_here) weights.data = values_of<float>(weights_here);
  const auto data = [](const auto& x, auto zero) { return static_cast<const decltype(zero)*>(x->const_data_ptr()); };
  const int64_t by_query = w.group_reduce == Reduce::none;
  const int64_t group = by_query ? 1 : w.group;  // query heads per row of scores
  for (int64_t b = 0; b < w.b; ++b)
    for (int64_t h = 0; h < w.heads * w.group; h += group) {
      const float* const row = data(scores_here, 0.0f) + (b * w.heads * w.group + h) / group * w.n;
      double total = 0, expected = 0, weights_of_rows = 0;
      int64_t counting = 0;
#pragma omp simd reduction(+ : total)
      for (int64_t j = 0; j < w.n; ++j) total += row[j];
      for (int64_t g = h; g < h + group; ++g) {
        for (int64_t i = 0; i < w.w; ++i) {
          const int64_t end = data(visible_here, int32_t{})[b * w.visible_stride + i];
          if (end <= (starts_here ? data(starts_here, int32_t{})[b] : 0)) continue;
          const auto strides = lse_here->strides();
          const float x = data(lse_here, 0.0f)[b * strides[0] + g * strides[1] + i * strides[2]];
          const double weight = weights.data ? weights.at(b, g, i) : 1.0;
          weights_of_rows += weight;
          expected += sinks_here ? weight / (1 + std::exp(double(data(sinks_here, 0.0f)[g]) - x)) : weight;
          counting += g == h;
        }
      }
      if (w.reduce == Reduce::mean && counting) expected /= static_cast<double>(counting);
      if (w.group_reduce == Reduce::mean) expected /= static_cast<double>(group);
      // A row whose sink takes nearly all is left with less than the rounding of its weight.
      KVOPS_CHECK(!(std::abs(total - expected) > 1e-2 * expected + 1e-6 * weights_of_rows),
                  "window_scores: lse must be the natural log of the sum of "
                  "exp(logits) over exactly the keys that each row sees, so that the scores of ",
                  by_query ? "query head " : "KV head ", h / group, " of batch row ", b, " add up to ", expected,
                  ", got an lse with which they add up to ", total);
    }
}

// A tensor of one value per row of q.
RowValues row_values(const char* op, const char* name, const OptionalTensor& x, const Tensor& q) {
  if (!x) return {};
  check_same_device(op, name, *x, q);
  check_scalar_type(op, name, *x, ScalarType::Float);
  KVOPS_CHECK(x->dim() == 3 && x->size(0) == q.size(0) && x->size(1) == q.size(1) && x->size(2) == q.size(2), op, ": ",
              name, " must be float32 [", q.size(0), ", ", q.size(1), ", ", q.size(2), "], one per row of q, got ",
              shape(*x));
  const auto strides = x->strides();
  return {static_cast<const float*>(x->const_data_ptr()), strides[0], strides[1], strides[2]};
}

void check_row_weights(const char* op, const OptionalTensor& row_weights) {
  const OptionalTensor here = readable(row_weights);
  if (!here) return;
  const auto strides = here->strides();
  const RowValues weights{values_of<float>(here), strides[0], strides[1], strides[2]};
  for (int64_t b = 0; b < here->size(0); ++b)
    for (int64_t h = 0; h < here->size(1); ++h)
      for (int64_t i = 0; i < here->size(2); ++i) {
        const float x = weights.at(b, h, i);
        KVOPS_CHECK(x >= 0 && std::isfinite(x), op, ": row_weights must be finite and at least 0, got ", x);
      }
}

Tensor window_scores(const Tensor& q, const Tensor& k, const Tensor& visible, const OptionalTensor& lse,
                     std::optional<double> scale, int64_t score, int64_t reduce, int64_t group_reduce,
                     const OptionalTensor& starts, double softcap, const OptionalTensor& sink_logits,
                     const OptionalTensor& row_weights, const OptionalTensor& k_scale,
                     const OptionalTensor& block_table) {
  const char* op = "window_scores";
  KVOPS_CHECK(score == 0 || score == 1, op, ": score must be 0 (softmax) or 1 (dot), got ", score);
  const bool softmax = score == 0;
  KVOPS_CHECK(softmax || (!lse && !sink_logits && !row_weights), op,
              ": lse, sink_logits and row_weights apply to a softmax only, expected none with score='dot', got ",
              lse           ? "lse"
              : sink_logits ? "sink_logits"
                            : "row_weights");
  Window window =
      check_window(op, q, k, visible, scale, reduce, group_reduce, starts, softcap, sink_logits, k_scale, block_table);
  check_head_dim(op, "k", k);
  const RowValues lse_view = row_values(op, "lse", lse, q);
  window.row_weights = row_values(op, "row_weights", row_weights, q);
  check_row_weights(op, row_weights);
  const Tensor scores = empty_scores(op, q, window);
  if (scores.numel() == 0) return scores;
  const WindowScoresParams p{window, lse_view, softmax};
  HostCall call(op, q);
  launch_window_scores(p, call);
  if (lse) check_lse_total(p, *lse, row_weights, visible, starts, sink_logits, scores);
  return scores;
}

}  // namespace

KVOPS_IMPL(m) {
  m.impl("window_scores", TORCH_BOX(&window_scores));
}

}  // namespace kvops
