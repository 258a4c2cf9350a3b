// window_scores: parameters, launcher.
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

void launch_window_scores(const WindowScoresParams& p, Call& call);

}  // namespace kvops
