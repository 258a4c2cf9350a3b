// window_scores: parameters, launcher.
#pragma once
#include "window.h"

namespace kvops {

// The log-sum-exp of each row, fp32 [b, Hq, w], with any strides (elements).
struct LseView {
  const float* data;  // null: the kernel computes it
  int64_t stride_b, stride_h, stride_w;

  KVOPS_HOST_DEVICE float at(int64_t b, int64_t h, int64_t i) const {
    return data[b * stride_b + h * stride_h + i * stride_w];
  }
};

struct WindowScoresParams {
  Window window;
  LseView lse;   // over exactly the keys that the row sees, without the sink
  bool softmax;  // otherwise reduce the logits themselves
};

void launch_window_scores(const WindowScoresParams& p, Call& call);

}  // namespace kvops
