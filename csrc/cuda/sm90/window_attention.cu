#include "window_attention.cuh"

#include "hopper.h"

bool kvops::sm90::window_pass(const Window& p, const KVView* v, int64_t splits, int64_t split_keys, float2* sums,
                              float* out, cudaStream_t stream) {
  return window_pass_hopper(p, v, splits, split_keys, sums, out, stream);
}
