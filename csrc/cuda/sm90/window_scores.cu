#include "window_scores.cuh"

#include "hopper.h"

bool kvops::sm90::window_scores(const Window& p, const LseView& lse, cudaStream_t stream) {
  return window_scores_hopper(p, lse, stream);
}
