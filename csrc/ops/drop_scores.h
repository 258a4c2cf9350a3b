// drop_scores: parameters, launcher.
#pragma once
#include "window.h"

namespace kvops {

struct DropScoresParams {
  Window window;  // reduce is sum
  KVView v;       // [b, heads, n, dv]
  int64_t dv;
  float epsilon;  // added to 1 - a, where a is a weight of the softmax
};

// The weights whose distance |v - o| is computed from v - o itself. For smaller ones it is |v|^2 - 2 v o + |o|^2, whose
// rounding error a weight near 1 would amplify. A row has fewer than four keys of a larger weight.
constexpr float kLargeWeight = 0.25f;

void launch_drop_scores(const DropScoresParams& p, Call& call);

}  // namespace kvops
