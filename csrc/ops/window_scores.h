// window_scores: parameters, launcher.
#pragma once
#include "window.h"

namespace kvops {

struct WindowScoresParams {
  Window window;
  RowValues lse;  // over exactly the keys that the row sees, without the sink; null: the kernel computes it
  bool softmax;   // otherwise reduce the logits themselves
};

void launch_window_scores(const WindowScoresParams& p, Call& call);

}  // namespace kvops
