// window_attention: parameters, launcher.
#pragma once
#include "window.h"

namespace kvops {

struct WindowAttentionParams {
  Window window;
  KVView v;    // [b, heads, n, dv]
  char* out;   // [b, heads * group, w, dv], contiguous, with q's dtype
  float* lse;  // [b, heads * group, w], contiguous
  int64_t dv;
};

void launch_window_attention(const WindowAttentionParams& p, Call& call);

}  // namespace kvops
