// window_scores: parameters, checks, output shape.
#pragma once
#include "window.h"

namespace kvops {

// The log-sum-exp of each row, [b, Hq, w] fp32, of any strides (elements).
struct LseView {
  const float* data;  // or null: to be made
  int64_t stride_b, stride_h, stride_w;

  KVOPS_HOST_DEVICE float at(int64_t b, int64_t h, int64_t i) const {
    return data[b * stride_b + h * stride_h + i * stride_w];
  }
};

struct WindowScoresParams {
  Window window;
  LseView lse;   // over exactly the keys that the row sees, without the sink
  bool softmax;  // else the logits themselves are reduced
};

#ifdef KVOPS_CHECKS
inline WindowScoresParams check_window_scores(const Tensor& q, const Tensor& k, const Tensor& visible,
                                              const OptionalTensor& lse, std::optional<double> scale,
                                              const std::string& score, const std::string& reduce,
                                              const std::string& group_reduce, const OptionalTensor& starts,
                                              double softcap, const OptionalTensor& sink_logits, Tensor& scores) {
  const char* op = "window_scores";
  KVOPS_CHECK(score == "softmax" || score == "dot", op, ": score must be 'softmax' or 'dot', got '", score, "'");
  const bool softmax = score == "softmax";
  KVOPS_CHECK(softmax || (!lse && !sink_logits), op,
              ": lse and sink_logits belong to a softmax, expected none of them with score='dot', got ",
              lse ? "lse" : "sink_logits");
  const Window window =
      check_window(op, q, k, visible, scale, reduce, group_reduce, starts, softcap, sink_logits, scores);
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
  return {window, view, softmax};
}
#endif

}  // namespace kvops
